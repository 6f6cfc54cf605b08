"""``plan`` decides how many slots fit, by a model's headers and the memory that there is.

Notebook 03 shows why: a token is fastest with nearly all of the memory in slots and reads past the
page cache. Few slots are nearly as fast, because the page cache has the rest of the memory. With
half of the memory in slots, slots and page cache hold the same experts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from .. import kernels
from ..checkpoint import Checkpoint, try_out
from ..experts import expert_modules, expert_parameters, num_experts
from ..memory import HALF, memory_in_cgroups, memory_on_gpu, most_for_a_model
from .build import activation_dtype, build_model, stays_resident
from .config import SLOT_MODES, StreamConfig
from .ranks import Ranks
from .reading.flight import BUFFER_NBYTES
from .residency.bank import can_empty

# Bytes that a process takes beside its arrays once it has loaded a model and computed a prompt
# (tokenizer, libraries' pages, freed memory that is kept, kernels). The four layers of notebook 03
# took 88 MB, and 111 where kernels were compiled and not loaded.
PROCESS_NBYTES = 110_000_000
# On a GPU the process is in other memory. There MLX takes these bytes beside the arrays that are
# planned (70 to 143 MB were measured).
GPU_NBYTES = 160_000_000
# A tenth of the machine's memory, at most 4 GB, is left to other programs. In a cgroup nothing is,
# as they do not share its limit.
SYSTEM_SHARE, SYSTEM_NBYTES = 10, 4_000_000_000
# A prompt is computed in chunks, of at most mlx-lm's own number of tokens and, in a longer context,
# of at least 32. Where slots can lend their memory to a prompt, a chunk may take 7/8 of the memory
# that is left for slots. Elsewhere it may take a sixteenth of all memory, or what 256 tokens need,
# since a chunk reads nearly all experts, and no more than half of what is left for slots.
PROMPT_TOKENS, PROMPT_SHARE, FEW_PROMPT_TOKENS, LEAST_PROMPT_TOKENS = 2048, 16, 256, 32
# A prompt needs more than its arrays, because the C library keeps some that are freed
# (``heap.MAPPED_NBYTES``): 15 to 20 MB beside 97 for the four layers of notebook 03.
MORE_SHARE, MORE_NBYTES = 8, 20_000_000
# A prompt takes these bytes of a process's memory beside its arrays, and gives them back: freed
# arrays that the C library keeps, the readers' buffers. The four layers of notebook 03 took 60 to
# 72 MB for 66 to 1,000 tokens; fewer tokens take up to 1.4 times their arrays.
BESIDE_NBYTES = 72_000_000
# The logits of a call's last part are computed at once if it has up to so many tokens, although
# ``lazy_logits`` is set: those of drafts are used.
FEW_LOGITS = 64
# Even while slots lend memory, keep room to compute so many tokens (a batch, or drafts).
FEW_TOKENS = 64
# How many arrays of the hidden size a layer keeps for a token beside its experts' work: with MLX's
# kernels; with the fast ones, which also keep copies of the results of its other matrices.
BLOCK_VALUES, STREAM_VALUES, BLOCK_COPIES = 16, 8, 3
LINEARS = (nn.Linear, nn.QuantizedLinear)
# The time to read an expert from the page cache, as a share of the time from the SSD: 0.22 for the
# four layers of notebook 03.
COPY_COST = 0.25
# The reasons for a number of slots.
ALL, RESIDENT_FITS = "every expert", " (mode='resident' fits, too)"
FEW = "few (the page cache holds more experts in the rest)"
NEARLY_ALL = "nearly all of the memory (half of it would be slowest)"


@dataclass(frozen=True)
class Plan:
    """How many slots ``StreamConfig(slots="auto")`` takes, and why.

    Attributes:
        config (StreamConfig): The configuration with the slots of this plan.
        slots (int): Slots in each layer (S).
        prompt_slots (int): Slots that stay while ``prompt_tokens`` tokens are computed. The others
            lend their memory to the prompt.
        num_layers (int): MoE layers (L).
        num_experts (int): E, the largest of any layer.
        top_k (int): K.
        memory_nbytes (int): Bytes that the process may take beside those that it holds already.
        system_nbytes (int): Other available bytes, which are left to the system.
        process_nbytes (int): For the process itself.
        backbone_nbytes (int): Everything but the slots that stays in memory.
        caches_nbytes (int): Key-value caches and recurrent states of ``context`` tokens.
        prompt_nbytes (int): For computing ``prompt_tokens`` tokens at once.
        token_nbytes (int): For computing one of them.
        token_logits_nbytes (int): The part of it for logits, if all of a prompt's are computed.
        logits_nbytes (int): If not, the bytes for the logits of few tokens.
        reserved_nbytes (int): The configuration's ``reserved_nbytes``.
        expert_nbytes (tuple[int]): One expert of each layer, in its slot.
        context (int): Tokens of prompt and answer that the plan has room for.
        prompt_tokens (int): A prompt's tokens that are computed at once: the model divides a
            longer call that has a cache and no other argument. Given to mlx-lm as
            ``prefill_step_size``, it saves the logits' memory, too.
        direct (bool): Whether experts are read past the page cache (Linux, on a CPU). They are if
            the available memory decided the number of slots, there are more than K, and the page
            cache has room for less than twice as many experts (with slots for all: for fewer than
            all). It would hold much the same ones, and a copy from it takes a core's time.
        reason (str): One line.
    """

    config: StreamConfig
    slots: int
    prompt_slots: int
    num_layers: int
    num_experts: int
    top_k: int
    memory_nbytes: int
    system_nbytes: int
    process_nbytes: int
    backbone_nbytes: int
    caches_nbytes: int
    prompt_nbytes: int
    token_nbytes: int
    token_logits_nbytes: int
    logits_nbytes: int
    reserved_nbytes: int
    expert_nbytes: tuple[int, ...]
    context: int
    prompt_tokens: int
    direct: bool
    reason: str

    @property
    def other_nbytes(self) -> int:
        """The bytes that the process takes beside the slots while it decodes."""
        fixed = self.process_nbytes + self.backbone_nbytes + self.caches_nbytes
        prompt, few = self.prompt_nbytes, (self.token_nbytes, self.logits_nbytes)
        lent = _lendable(prompt, self.prompt_tokens, *few)
        return fixed + self.reserved_nbytes + prompt - lent

    @property
    def all_caches_nbytes(self) -> int:
        """The bytes that are left for caches of several texts together."""
        taken = self.process_nbytes + self.backbone_nbytes + self.prompt_nbytes
        return self.memory_nbytes - taken - self.prompt_slots * sum(self.expert_nbytes)

    @property
    def lent_nbytes(self) -> int:
        """The bytes that slots lend to a prompt of ``prompt_nbytes``."""
        return (self.slots - self.prompt_slots) * sum(self.expert_nbytes)

    def slots_beside(self, tokens: int) -> int:
        """The slots that stay in use while a call of so many tokens is computed."""
        share = (tokens - FEW_TOKENS) / max(1, self.prompt_tokens - FEW_TOKENS)
        return self.slots - ceil(min(1.0, max(0.0, share)) * (self.slots - self.prompt_slots))

    def call_nbytes(self, tokens: int, caches: Sequence = (), is_first: bool = False) -> int:
        """The bytes that a call takes until it ends, beside the slots, if it computes all tokens.

        ``caches`` grow, and one at a time is copied. The first call also loads kernels.
        """
        work = _arrays_nbytes(tokens, self.token_nbytes, self.logits_nbytes)
        work += BESIDE_NBYTES if tokens > FEW_TOKENS else min(work, BESIDE_NBYTES)
        work += self.process_nbytes - BESIDE_NBYTES if is_first else 0
        copied = max((c.nbytes for c in _leaves(caches)), default=0)
        return work + copied + tokens * self.caches_nbytes // self.context

    def __str__(self):
        return self.reason


def plan(
    path: str | Path,
    config: StreamConfig | None = None,
    *,
    memory_nbytes: int | None = None,
    context: int | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """Choose the slots of ``load(path, config)`` from the files' headers; no weight is read.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig or None): How to stream; its ``slots`` are replaced. Default:
            ``StreamConfig()``.
        memory_nbytes (int or None): What the model may take, beside what this process holds.
            Default: the config's, or what is available now.
        context (int or None): Tokens whose caches must fit. Default: the config's.
        trust_remote_code (bool): As for ``mlx_lm.load``.

    Returns:
        Plan: The slots, the numbers that they follow from, and the reason.

    Raises:
        CheckpointError: If the files are damaged.
        ValueError: If the model does not fit with K slots in each layer, with the numbers, or if
            the config's mode has no slots.
    """
    config = replace(StreamConfig.checked(config), slots="auto")
    given = {"memory_nbytes": memory_nbytes, "context": context}
    given = {name: value for name, value in given.items() if value is not None}
    config = replace(config, **given).resolved()
    if config.mode not in SLOT_MODES:
        raise ValueError(
            f"plan: expected a mode with slots ({' or '.join(SLOT_MODES)}), got {config.mode!r}. "
            "footprint says what another mode takes."
        )
    checkpoint = Checkpoint(path)
    model, _, top_k = build_model(checkpoint, config, trust_remote_code=trust_remote_code)
    return plan_of(model, checkpoint, config, top_k)


def plan_of(
    model: nn.Module,
    checkpoint: Checkpoint,
    config: StreamConfig,
    top_k: int,
    ranks: Ranks | None = None,
) -> Plan:
    """``plan`` for a model of ``build_model``; with ranks, for this rank's experts."""
    needs = _needs(model, checkpoint, config, top_k, ranks)
    given = config.memory_nbytes
    memory, system, why = _for_a_model() if given is None else (max(0, given), 0, "")
    tokens = _prompt_tokens(needs, memory, config.context)
    prompt = _prompt_nbytes(needs, tokens)
    parts = {
        "backbone": needs.backbone,
        f"caches of {config.context} tokens": needs.caches,
        f"prompt by {tokens}": prompt,
        "process": needs.process,
    }
    if needs.reserved:
        parts["reserved"] = needs.reserved
    listed = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in parts.items())
    left = f" ({_size(system)} more left to the system{why})" if system else ""
    free, least, L = memory - sum(parts.values()), needs.least, len(needs.experts)
    if free < least * needs.slot:
        raise ValueError(
            f"{checkpoint.path}: expected at least "
            f"{_size(sum(parts.values()) + least * needs.slot)} of memory ({listed}, {least} slots "
            f"in each of {L} layers {_size(least * needs.slot)}), got {_size(memory)}{left}. Close "
            "other programs or raise the limit, set a shorter context or a lower top_k, or take a "
            "smaller model."
        )
    lent = _lendable(prompt, tokens, needs.token, needs.logits)
    slots, prompt_slots, why = _slots(needs, free, lent)
    lent, taken = (slots - prompt_slots) * needs.slot, slots * needs.slot
    # Bytes of the page cache while it decodes. Once all experts are in slots nothing is read.
    pages = system + needs.process + prompt - lent + free - taken
    is_small = pages < taken * (2 if slots < needs.held else 1)
    # A limit that the caller gave says nothing about the page cache.
    direct = can_empty() and config.memory_nbytes is None and least < slots and is_small
    reason = (
        f"slots={slots} of {needs.held} in each of {L} layers: {why}. {_size(memory)} "
        f"available{left}: {listed}, slots {_size(slots * needs.slot)}"
    )
    if lent:
        reason += f" ({_size(lent)} of it lent to a prompt)"
    return Plan(
        config=replace(config, slots=slots),
        slots=slots,
        prompt_slots=prompt_slots,
        num_layers=L,
        num_experts=needs.num_experts,
        top_k=top_k,
        memory_nbytes=memory,
        system_nbytes=system,
        process_nbytes=needs.process,
        backbone_nbytes=needs.backbone,
        caches_nbytes=needs.caches,
        prompt_nbytes=prompt,
        token_nbytes=needs.token,
        token_logits_nbytes=needs.token_logits,
        logits_nbytes=needs.logits,
        reserved_nbytes=needs.reserved,
        expert_nbytes=tuple(needs.experts),
        context=config.context,
        prompt_tokens=tokens,
        direct=direct,
        reason=reason,
    )


class _Needs(NamedTuple):
    """The bytes that a model needs whatever its slots are; the last three fields are counts."""

    backbone: int  # everything but the slots that stays in memory
    caches: int  # the caches of the context
    process: int
    reserved: int
    token: int  # to compute one token of a prompt
    token_logits: int  # the part of ``token`` for its logits, if all of a prompt's are computed
    logits: int  # if not, the logits of few tokens, beside ``token``
    experts: list[int]  # one expert of each layer in its slot
    disk: float  # the part of the checkpoint that is read here
    num_experts: int
    held: int  # experts of a layer that this rank holds: E without ranks
    least: int  # the fewest slots with which a token can be computed

    @property
    def slot(self):
        """The bytes of one slot in each layer."""
        return sum(self.experts)


def _needs(model, checkpoint, config, top_k, ranks):
    backbone, resident, experts = sizes_of(model, config)
    E = max(num_experts(module) for _, module in expert_modules(model))
    held = int(ranks.owned(E).sum()) if ranks else E
    caches, largest_state, words = _caches(model, checkpoint, config.context)
    token = _token_nbytes(model, checkpoint, config, top_k, largest_state)
    every, few = 0, 0
    if config.kernels == "fast":  # these compute logits at once, and make a copy
        logits = 2 * words * activation_dtype(model).size
        every, few = (0, FEW_LOGITS * logits) if config.lazy_logits else (logits, 0)
    return _Needs(
        backbone + resident,
        caches,
        GPU_NBYTES if mx.cuda.is_available() else PROCESS_NBYTES + _in_flight_nbytes(E, experts),
        config.reserved_nbytes,
        max(token, every),
        every,
        few,
        experts,
        checkpoint.nbytes * held / E,
        E,
        held,
        min(top_k, held),
    )


def _in_flight_nbytes(E, experts):
    """The bytes that reads past the page cache take on their way into slots."""
    return min(BUFFER_NBYTES, E * max(experts)) if can_empty() else 0


def _prompt_tokens(needs, memory, context):
    """The number of a prompt's tokens that are computed at once."""
    fixed = needs.backbone + needs.caches + needs.reserved + needs.process
    room = memory - fixed - needs.least * needs.slot
    if can_empty():  # slots lend their memory
        most = room * 7 // 8
        most -= min(most // (MORE_SHARE + 1), MORE_NBYTES)
    else:
        most = max(memory // PROMPT_SHARE, FEW_PROMPT_TOKENS * needs.token)
        most = min(most, room // 2)
    return min(max(LEAST_PROMPT_TOKENS, most // needs.token), PROMPT_TOKENS, context)


def _prompt_nbytes(needs, tokens):
    """The bytes that so many tokens take if they are computed at once."""
    prompt = _arrays_nbytes(tokens, needs.token, needs.logits)
    return prompt + (min(prompt // MORE_SHARE, MORE_NBYTES) if can_empty() else 0)


def _lendable(prompt_nbytes, tokens, token_nbytes, logits_nbytes):
    """The bytes of a prompt's memory that slots may use while few tokens are computed."""
    few = min(tokens, FEW_TOKENS) * token_nbytes + logits_nbytes
    return max(0, prompt_nbytes - few) if can_empty() else 0


def _slots(needs, free, lent):
    """The slots, how many of them stay while a prompt is computed, and the reason.

    ``free`` bytes are left while a prompt is computed; while it decodes slots have ``lent``, too.
    """
    prompt_slots = min(needs.held, free // needs.slot)
    slots = min(needs.held, (free + lent) // needs.slot)
    if slots == needs.held:
        if needs.held < needs.num_experts:
            return slots, prompt_slots, f"{ALL} of this rank"
        return slots, prompt_slots, ALL + (RESIDENT_FITS if slots == prompt_slots else "")
    if not mx.cuda.is_available():  # there the page cache is in another memory
        pages = (free + lent - needs.least * needs.slot) / needs.disk
        if slots / needs.held < (1 - COPY_COST) * pages:
            return needs.least, needs.least, FEW
    return slots, prompt_slots, NEARLY_ALL


def sizes_of(model: nn.Module, config: StreamConfig) -> tuple[int, int, list[int]]:
    """The bytes of the backbone, of parameters kept for all E experts, and of each layer's slot."""
    everything = sum(p.nbytes for _, p in tree_flatten(model.parameters()))
    resident, total, experts = 0, 0, []
    for _, module in expert_modules(model):
        parameters = expert_parameters(module)
        nbytes = sum(p.nbytes for p in parameters.values())
        total += nbytes
        experts.append(nbytes // num_experts(module))
        if config.mode != "resident":
            resident += sum(p.nbytes for p in parameters.values() if stays_resident(p))
    return everything - total, resident, experts


def _memory():
    """The bytes that arrays of this process may take, and those left to the system beside them."""
    gpu = memory_on_gpu()
    if gpu is not None and not mx.metal.is_available():  # its own memory, not the machine's
        return gpu - gpu // SYSTEM_SHARE, gpu // SYSTEM_SHARE
    machine = psutil.virtual_memory()
    kept = min(machine.total // SYSTEM_SHARE, SYSTEM_NBYTES)
    limits = [n for n in (memory_in_cgroups(), gpu) if n is not None]
    memory = min([machine.available - kept, *limits])
    return memory, kept if memory == machine.available - kept else 0


def memory_for_a_model() -> int:
    """The bytes that ``plan`` gives a model if the caller sets no limit."""
    return _for_a_model()[0]


def _for_a_model():
    """The bytes that a plan fills and leaves to the system, and why if that is a Mac's half."""
    memory, kept = _memory()
    most = most_for_a_model(psutil.virtual_memory().total) - mx.get_active_memory()
    if memory <= most:
        return max(0, memory), kept, ""
    most = max(0, int(most))
    return most, kept + memory - most, f": {HALF}"


def memory_now() -> tuple[int, int]:
    """The bytes that a model may take before it gives slots back, and before a call is refused.

    The first leaves the system half of the memory that ``plan`` left it, the second none.
    """
    memory, kept = _memory()
    return memory + kept // 2, memory + kept


def _arrays_nbytes(tokens, token_nbytes, logits_nbytes):
    """The bytes of a call's arrays; its other arrays are free when its logits are computed."""
    few = min(tokens, FEW_LOGITS)
    return max(tokens * token_nbytes, few * token_nbytes + logits_nbytes)


def _caches(model, checkpoint, context):
    """The bytes of a text's caches and of the largest recurrent state, and the vocabulary size."""
    caches = make_prompt_cache(model)
    logits = try_out(checkpoint, model, caches)
    if logits is None:
        return 0, 0, 0
    states = [c.nbytes for c in _leaves(caches) if isinstance(c, ArraysCache)]
    return grown_nbytes(caches, context), max(states, default=0), logits.shape[-1]


def grown_nbytes(caches: list, context: int) -> int:
    """The bytes of caches grown to a text's length. The given ones, of two tokens, are used up."""
    kept = [_grown(c, context) for c in _leaves(caches)]
    # A key-value cache is copied when it grows, so one at a time takes twice its bytes.
    return sum(kept) + max(kept, default=0)


def _leaves(caches):
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _leaves(cache.caches)
        else:
            yield cache


def _grown(cache, context):
    """The bytes of a cache of two tokens when it has ``context``; nothing is evaluated."""
    if isinstance(cache, ArraysCache):
        return cache.nbytes
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return cache.nbytes * -(-context // 2)  # a family's own class
    # The length of a chunk matters only in a cache of limited size, which stays full once it is.
    limit, chunk = getattr(cache, "max_size", None), context
    if limit is not None:
        chunk = PROMPT_TOKENS
        context = min(context, limit + chunk + (context - limit) % chunk)
    for first in range(2, context, chunk):
        num = min(chunk, context - first)
        shapes = [(*a.shape[:2], num, a.shape[-1]) for a in (keys, values)]
        cache.update_and_fetch(*(mx.zeros(shape, keys.dtype) for shape in shapes))
    return cache.nbytes


def _token_nbytes(model, checkpoint, config, top_k, state_nbytes):
    """The bytes, without logits, for each token that is computed at once, in the largest layer.

    On a CPU MLX's kernels keep a recurrent state for every token. The result is 1.1 to 1.3 times
    the measured bytes of the four layers of notebook 03.
    """
    fast, size, values, D = config.kernels == "fast", activation_dtype(model).size, 0, 0
    for _, module in expert_modules(model):
        names = {name.split(".")[0] for name in expert_parameters(module)}
        inputs, outputs = zip(*((module[n].input_dims, module[n].output_dims) for n in names))
        D = max(D, module["down_proj" if "down_proj" in names else "fc2"].output_dims)
        if fast and all(map(_at_once, (module[n] for n in names))):
            # The result, the results of gate and up, and as much for the last matrix's input.
            pairs = top_k * (D + 2 * (sum(outputs) - D))
        else:
            pairs = top_k * (sum(inputs) + sum(outputs) + D)
        values = max(values, pairs)
    if fast:
        return (max(values, BLOCK_COPIES * _outputs(model)) + STREAM_VALUES * D) * size
    values += BLOCK_VALUES * D
    text = checkpoint.config.get("text_config") or checkpoint.config
    heads = text.get("num_attention_heads")
    scores = heads * config.context if isinstance(heads, int) else 0
    loops = 0 if mx.metal.is_available() else state_nbytes
    return (values + scores) * size + loops


def _at_once(linear):
    """Whether the fast kernels take this matrix, and compute several experts' in one call."""
    return kernels.fits(linear) and "bias" not in linear


def _outputs(model):
    """The most values that a block's matrices, without its experts', give for a token."""
    outputs = Counter()
    experts = {id(m) for _, module in expert_modules(model) for m in module.modules()}
    for path, module in model.named_modules():
        layer = next((i for i, part in enumerate(path.split(".")) if part.isdigit()), None)
        if layer is not None and isinstance(module, LINEARS) and id(module) not in experts:
            outputs[tuple(path.split(".")[: layer + 2])] += len(module.weight)
    return max(outputs.values(), default=0)


def _size(nbytes):
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
