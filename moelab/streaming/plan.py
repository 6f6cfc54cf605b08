"""``plan``: how many slots fit, decided by a model's headers and the memory that there is.

Notebook 03 decides: with nearly all of the memory in slots and reads past the page cache a token is
fastest. Through the page cache few slots are nearly as fast, because it has the rest; with half of
the memory in slots both hold the same experts.
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

# What a process takes beside its arrays once it has loaded a model and computed a prompt
# (tokenizer, libraries' pages, freed memory that is kept, kernels). The four layers of notebook 03
# took 88 MB, 111 where kernels were compiled and not loaded (Linux, CPU).
PROCESS_NBYTES = 110_000_000
# On a GPU the process is in other memory. There this is for what MLX takes beside the arrays that
# are planned: 70 to 143 MB (eight of these layers, prompts by 101 and 256 tokens, one H200).
GPU_NBYTES = 160_000_000
# Left for what other programs may yet take: a tenth of the machine's memory, at most 4 GB. Not in
# a cgroup, where others do not share the limit.
SYSTEM_SHARE, SYSTEM_NBYTES = 10, 4_000_000_000
# A prompt is computed in chunks, of at most mlx-lm's own number of tokens and, in a longer context,
# of at least 32. Where slots can lend their memory to a prompt, a chunk may take 7/8 of the memory
# that is left for slots. Elsewhere it may take a sixteenth of all memory, or what 256 tokens need,
# since a chunk reads nearly all experts, and no more than half of what is left for slots.
PROMPT_TOKENS, PROMPT_SHARE, FEW_PROMPT_TOKENS, LEAST_PROMPT_TOKENS = 2048, 16, 256, 32
# A prompt needs more than its arrays: the C library keeps some of them (``heap.MAPPED_NBYTES``),
# 15 to 20 MB of the four layers' 97 in notebook 03.
MORE_SHARE, MORE_NBYTES = 8, 20_000_000
# A prompt takes more of a process's memory than its arrays, and gives it back: freed arrays that
# the C library keeps, the readers' buffers. The four layers of notebook 03 took 60 to 72 MB for 66
# to 1,000 tokens; fewer tokens take up to 1.4 times their arrays.
BESIDE_NBYTES = 72_000_000
# A call's last part of up to so many tokens has its logits computed at once although
# ``lazy_logits`` is set: those of drafts are used.
FEW_LOGITS = 64
# Slots that lend their memory to a prompt leave enough free for calls of so many tokens: a batch,
# or drafts.
FEW_TOKENS = 64
# Arrays of the hidden size that a layer keeps for a token beside its experts' work: with MLX's
# kernels; with the fast ones, which also keep copies of what its other matrices give.
BLOCK_VALUES, STREAM_VALUES, BLOCK_COPIES = 16, 8, 3
LINEARS = (nn.Linear, nn.QuantizedLinear)
# The time to read an expert from the page cache, as a share of the time from the SSD: 0.22 for the
# four layers of notebook 03.
COPY_COST = 0.25
# Why there are so many slots.
ALL, RESIDENT_FITS = "every expert", " (mode='resident' fits, too)"
FEW = "few (the page cache holds more experts in the rest)"
NEARLY_ALL = "nearly all of the memory (half of it would be slowest)"


@dataclass(frozen=True)
class Plan:
    """How many slots ``StreamConfig(slots="auto")`` takes, and why.

    Attributes:
        config (StreamConfig): The configuration with the slots of this plan.
        slots (int): Slots in each layer (S).
        prompt_slots (int): Those that are left while ``prompt_tokens`` tokens are computed: the
            others lend them their memory.
        num_layers (int): MoE layers (L).
        num_experts (int): E, the largest of any layer.
        top_k (int): K.
        memory_nbytes (int): What the process may take beside what it holds already.
        system_nbytes (int): What is available beside that, and is left to the system.
        process_nbytes (int): For the process itself.
        backbone_nbytes (int): Everything but the slots that stays in memory.
        caches_nbytes (int): Key-value caches and recurrent states of ``context`` tokens.
        prompt_nbytes (int): For computing ``prompt_tokens`` tokens at once.
        token_nbytes (int): For computing one of them.
        token_logits_nbytes (int): Of that, for its logits, where a prompt's are computed at once.
        logits_nbytes (int): Where they are not: for those of few tokens, which are.
        reserved_nbytes (int): The config's.
        expert_nbytes (tuple[int]): One expert of each layer, in its slot.
        context (int): The tokens, prompt and answer, that it is for.
        prompt_tokens (int): A prompt's tokens that are computed at once: the model divides a
            longer call that has a cache and no other argument. As the ``prefill_step_size`` of
            mlx-lm it saves the logits' memory, too.
        direct (bool): Whether experts are read past the page cache, where Linux computes on a CPU.
            They are if what is available decided about the slots, these are more than K and fewer
            than all, and the page cache has room for less than twice as many experts: it would
            hold much the same ones, and a copy from it takes a core's time.
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
        """What is taken beside the slots while it decodes."""
        fixed = self.process_nbytes + self.backbone_nbytes + self.caches_nbytes
        prompt, few = self.prompt_nbytes, (self.token_nbytes, self.logits_nbytes)
        lent = _lendable(prompt, self.prompt_tokens, *few)
        return fixed + self.reserved_nbytes + prompt - lent

    @property
    def all_caches_nbytes(self) -> int:
        """What everything else leaves for caches, of several texts together."""
        taken = self.process_nbytes + self.backbone_nbytes + self.prompt_nbytes
        return self.memory_nbytes - taken - self.prompt_slots * sum(self.expert_nbytes)

    @property
    def lent_nbytes(self) -> int:
        """What slots lend a prompt of ``prompt_nbytes``."""
        return (self.slots - self.prompt_slots) * sum(self.expert_nbytes)

    def slots_beside(self, tokens: int) -> int:
        """Slots that stay in use while a call is computed. A short prompt borrows fewer.

        Args:
            tokens (int): Of the call.
        """
        share = (tokens - FEW_TOKENS) / max(1, self.prompt_tokens - FEW_TOKENS)
        return self.slots - ceil(min(1.0, max(0.0, share)) * (self.slots - self.prompt_slots))

    def call_nbytes(self, tokens: int, caches: Sequence = (), is_first: bool = False) -> int:
        """What a call takes until it ends, beside the slots.

        Args:
            tokens (int): Those that are computed at once.
            caches (Sequence): The call's. They grow, and one at a time is copied.
            is_first (bool): Whether no call was before it, so that kernels have yet to be loaded.
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
    """``plan`` for a model that is built already.

    Args:
        model (nn.Module): From ``build_model``; no weight is read.
        checkpoint (Checkpoint): Its files.
        config (StreamConfig): How to stream.
        top_k (int): K.
        ranks (Ranks or None): Those that divide the experts: the slots are for this one's.
    """
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
    # The page cache, while it decodes. Once all experts are in slots nothing is read any more.
    pages = system + needs.process + prompt - lent + free - taken
    is_small = pages < taken * (2 if slots < needs.held else 1)
    # A limit of the caller's says nothing about the page cache.
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
    """What a model needs in memory whatever its slots are. In bytes, but the last three."""

    backbone: int  # everything but the slots that stays in memory
    caches: int  # of the context
    process: int
    reserved: int
    token: int  # for computing one token of a prompt
    token_logits: int  # of that, for its logits, if a prompt's are computed at once
    logits: int  # if not: for those of few tokens, beside that
    experts: list[int]  # one expert of each layer in its slot
    disk: float  # the part of the checkpoint that is read here
    num_experts: int  # E
    held: int  # experts of a layer that this rank holds: E without ranks
    least: int  # slots without which a token cannot be computed

    @property
    def slot(self):
        """One slot in each layer."""
        return sum(self.experts)


def _needs(model, checkpoint, config, top_k, ranks):
    backbone, resident, experts = sizes_of(model, config)
    E = max(num_experts(module) for _, module in expert_modules(model))
    held = int(ranks.owned(E).sum()) if ranks else E
    caches, largest_state, words = _caches(model, checkpoint, config.context)
    token = _token_nbytes(model, checkpoint, config, top_k, largest_state)
    every, few = 0, 0
    if config.kernels == "fast":  # which compute them at once: they and a copy
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
    """What reads past the page cache take on their way into slots."""
    return min(BUFFER_NBYTES, E * max(experts)) if can_empty() else 0


def _prompt_tokens(needs, memory, context):
    """How many tokens of a prompt are computed at once."""
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
    """What so many tokens take that are computed at once."""
    prompt = _arrays_nbytes(tokens, needs.token, needs.logits)
    return prompt + (min(prompt // MORE_SHARE, MORE_NBYTES) if can_empty() else 0)


def _lendable(prompt_nbytes, tokens, token_nbytes, logits_nbytes):
    """What of a prompt's memory slots may have while few tokens are computed."""
    few = min(tokens, FEW_TOKENS) * token_nbytes + logits_nbytes
    return max(0, prompt_nbytes - few) if can_empty() else 0


def _slots(needs, free, lent):
    """Slots, those that are left while a prompt is computed, and why.

    Args:
        needs (_Needs): Of the model.
        free (int): Bytes that nothing else needs while a prompt is computed.
        lent (int): Bytes that slots have back while it decodes.
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
    """What a model is made of, in bytes of memory.

    Args:
        model (nn.Module): From ``build_model``.
        config (StreamConfig): How to stream.

    Returns:
        tuple[int, int, list[int]]: The backbone, the parameters kept for all E experts, and one
        expert of each layer in its slot.
    """
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
    """What arrays of this process may take, and what is left to the system beside that."""
    gpu = memory_on_gpu()
    if gpu is not None and not mx.metal.is_available():  # its own memory, not the machine's
        return gpu - gpu // SYSTEM_SHARE, gpu // SYSTEM_SHARE
    machine = psutil.virtual_memory()
    kept = min(machine.total // SYSTEM_SHARE, SYSTEM_NBYTES)
    limits = [n for n in (memory_in_cgroups(), gpu) if n is not None]
    memory = min([machine.available - kept, *limits])
    return memory, kept if memory == machine.available - kept else 0


def memory_for_a_model() -> int:
    """Bytes that ``plan`` gives a model where none are said: the system keeps some beside them."""
    return _for_a_model()[0]


def _for_a_model():
    """What a plan fills, what it leaves to the system, and why if that is a Mac's half."""
    memory, kept = _memory()
    most = most_for_a_model(psutil.virtual_memory().total) - mx.get_active_memory()
    if memory <= most:
        return max(0, memory), kept, ""
    most = max(0, int(most))
    return most, kept + memory - most, f": {HALF}"


def memory_now() -> tuple[int, int]:
    """Bytes that a model may take while it is used.

    Returns:
        tuple[int, int]: What it may take before it gives slots back, and what it may take before a
        call is refused. ``plan`` left the system some memory: the first number leaves it half of
        that, the second leaves it none.
    """
    memory, kept = _memory()
    return memory + kept // 2, memory + kept


def _arrays_nbytes(tokens, token_nbytes, logits_nbytes):
    """What the arrays of a call take. When its logits are computed, its other arrays are free."""
    few = min(tokens, FEW_LOGITS)
    return max(tokens * token_nbytes, few * token_nbytes + logits_nbytes)


def _caches(model, checkpoint, context):
    """Bytes of a text's caches, bytes of the largest recurrent state, size of the vocabulary."""
    caches = make_prompt_cache(model)
    logits = try_out(checkpoint, model, caches)
    if logits is None:
        return 0, 0, 0
    states = [c.nbytes for c in _leaves(caches) if isinstance(c, ArraysCache)]
    return grown_nbytes(caches, context), max(states, default=0), logits.shape[-1]


def grown_nbytes(caches: list, context: int) -> int:
    """What caches take that have grown to a text's length.

    Args:
        caches (list): Of two tokens. They are used up; nothing is evaluated.
        context (int): The text's tokens.
    """
    kept = [_grown(c, context) for c in _leaves(caches)]
    # A key-value cache is copied when it grows: one at a time is there twice.
    return sum(kept) + max(kept, default=0)


def _leaves(caches):
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _leaves(cache.caches)
        else:
            yield cache


def _grown(cache, context):
    """Bytes of a cache of two tokens when it has ``context``; nothing is evaluated."""
    if isinstance(cache, ArraysCache):
        return cache.nbytes
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return cache.nbytes * -(-context // 2)  # a family's own
    # Only in a cache of a limited size does the length of a chunk matter; once full, it stays so.
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
    """Bytes for each token of those that are computed at once, by the layer that takes most.

    Without their logits.

    Measured with the four layers of notebook 03 (64 to 2,048 tokens): 0.19 MB, here 0.24; with
    MLX's kernels, which on a CPU keep a recurrent state for every token, 2.5 MB, here 2.8.
    """
    fast, size, values, D = config.kernels == "fast", activation_dtype(model).size, 0, 0
    for _, module in expert_modules(model):
        names = {name.split(".")[0] for name in expert_parameters(module)}
        inputs, outputs = zip(*((module[n].input_dims, module[n].output_dims) for n in names))
        D = max(D, module["down_proj" if "down_proj" in names else "fc2"].output_dims)
        if fast and all(map(_at_once, (module[n] for n in names))):
            # The result; what gate and up give, and as much for what goes into the last matrix.
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
    """Whether the fast kernels compute experts' matrices in one call, and fit this one."""
    return type(linear) in kernels.FAST and kernels.fits(linear) and "bias" not in linear


def _outputs(model):
    """What the matrices of a block (attention, or the experts' without theirs) give for a token."""
    outputs = Counter()
    experts = {id(m) for _, module in expert_modules(model) for m in module.modules()}
    for path, module in model.named_modules():
        layer = next((i for i, part in enumerate(path.split(".")) if part.isdigit()), None)
        if layer is not None and isinstance(module, LINEARS) and id(module) not in experts:
            outputs[tuple(path.split(".")[: layer + 2])] += len(module.weight)
    return max(outputs.values(), default=0)


def _size(nbytes):
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
