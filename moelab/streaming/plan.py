"""``plan`` decides how many slots fit; ``footprint`` predicts the memory of a loaded model.

Notebook 03 measured that decoding is fastest if slots take nearly all of the memory and reads go
past the page cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from operator import attrgetter
from pathlib import Path
from typing import Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from ..checkpoint import leaves
from ..memory import (
    FREED_NBYTES,
    STATES_NBYTES,
    WHY_LEFT,
    Most,
    memory_in_cgroups,
    memory_on_gpu,
    most_for_a_model,
    return_free_memory,
)
from ..system import HERE, on_metal
from .config import MOST_NBYTES, SLOT_MODES, StreamConfig
from .facts import FEW_TOKENS, PROMPT_TOKENS, ModelFacts, grown_nbytes
from .ranks import Ranks
from .residency.bank import can_empty

# Bytes that a process takes beside its arrays once it has loaded a model and computed a prompt:
# 88 MB, or 111 MB where it compiled the kernels (measured with the four layers of notebook 03).
PROCESS_NBYTES = 110_000_000
# On CUDA these bytes are in the GPU's memory: MLX took 70 to 143 MB beside the planned arrays.
GPU_NBYTES = 160_000_000
# A tenth of the machine's memory, at most 4 GB, is left to other programs. A cgroup's limit is used
# whole: other programs have their own limits.
SYSTEM_SHARE, SYSTEM_NBYTES = 10, 4_000_000_000
# Where slots lend their memory, a chunk of a prompt may take 7/8 of the memory left for slots.
# Elsewhere it may take 1/16 of all memory, or the bytes of 256 tokens if that is more, but at most
# half of the memory left for slots. (A chunk reads nearly all experts, so few tokens are slow.)
PROMPT_SHARE, FEW_PROMPT_TOKENS, LEAST_PROMPT_TOKENS = 16, 256, 32
# A prompt needs more than its arrays, because the C library keeps some freed arrays
# (``memory.MAPPED_NBYTES``): 15 to 20 MB beside arrays of 97 MB.
MORE_SHARE, MORE_NBYTES = 8, 20_000_000
# Bytes that a prompt needs for a while beside its arrays: freed arrays that the C library keeps,
# and the readers' buffers. Calls of 66 to 1,000 tokens took 60 to 72 MB; calls of fewer tokens
# take up to 1.4 times their arrays in all.
BESIDE_NBYTES = 72_000_000
# The reasons for a number of slots.
ALL = "every expert"
RESIDENT_FITS = " (mode resident, which reads all of them at the start, would fit as well)"
FEW = "few, since the page cache holds more experts in the rest of the memory"
NEARLY_ALL = "nearly all of the memory, so that hardly an expert is in memory twice"


class AnyDraft(Protocol):
    """What ``plan`` needs of a draft; ``speculation.drafts.Draft`` explains the members."""

    verify_tokens: int

    def read_zeros(self) -> list: ...


class DoesNotFit(ValueError):
    """Even with K slots in each layer a model needs ``nbytes`` of memory, more than it may take."""

    def __init__(self, message: str, nbytes: int):
        super().__init__(message)
        self.nbytes = nbytes


@dataclass(frozen=True)
class Plan:
    """How many slots ``StreamConfig(slots="auto")`` takes, and why: ``str(plan)``."""

    facts: ModelFacts = field(repr=False)
    config: StreamConfig  # the given configuration, with these slots
    other_nbytes: int  # all that the process takes beside the slots while it decodes
    reserved_nbytes: int = 0  # for a draft, and for the caches of all texts but the first
    # Slots in use while a prompt is computed; the other slots lend the prompt their memory.
    prompt_slots: int = 0
    memory_nbytes: int = 0  # bytes that the process may take beside what it holds already
    system_nbytes: int = 0  # other available bytes, which are left to the system
    process_nbytes: int = 0  # for the process itself
    prompt_nbytes: int = 0  # for computing ``prompt_tokens`` tokens at once
    # How many tokens of a prompt are computed at once. The model divides a longer call if the cache
    # is its only other argument. As mlx-lm's ``prefill_step_size`` this saves memory of logits.
    prompt_tokens: int = PROMPT_TOKENS
    # Whether experts are read past the page cache (Linux). With reads "auto" this is true on a CPU
    # with more than K slots, if the caller gives no ``memory_nbytes`` and the page cache would be
    # small. Most experts in a small page cache are in slots, too, and copies from the page cache
    # take a core's time.
    direct: bool = False
    reason: str = ""  # in one line

    slots = property(attrgetter("facts.slots"), doc="In each layer (S).")
    num_experts = property(attrgetter("facts.num_experts"), doc="E, the largest of any layer.")
    top_k = property(attrgetter("facts.top_k"), doc="K.")
    caches_nbytes = property(attrgetter("facts.caches_nbytes"), doc="Of ``context`` tokens.")
    context = property(attrgetter("config.context"), doc="Tokens whose caches fit.")

    @property
    def all_caches_nbytes(self) -> int:
        """The bytes that are left for caches of several texts together."""
        taken = self.process_nbytes + self.facts.kept_nbytes + self.prompt_nbytes
        return self.memory_nbytes - taken - self.prompt_slots * self.facts.slot_nbytes

    def fits(self, memory_nbytes: float) -> int:
        """How many slots in each layer, up to E, fit in this memory beside the other parts."""
        nbytes = max(0, memory_nbytes - self.other_nbytes)
        return int(min(self.num_experts, nbytes / self.facts.slot_nbytes))

    def slots_beside(self, tokens: int) -> int:
        """The slots that stay in use while a call of ``tokens`` tokens is computed."""
        share = (tokens - FEW_TOKENS) / max(1, self.prompt_tokens - FEW_TOKENS)
        return self.slots - ceil(min(1.0, max(0.0, share)) * (self.slots - self.prompt_slots))

    def call_nbytes(self, tokens: int, caches: Sequence = (), is_first: bool = False) -> int:
        """The bytes, beside the slots, of a call that computes ``tokens`` tokens at once."""
        work = self.facts.arrays_nbytes(tokens)
        work += BESIDE_NBYTES if tokens > FEW_TOKENS else min(work, BESIDE_NBYTES)
        work += self.process_nbytes - BESIDE_NBYTES if is_first else 0  # it loads kernels
        copied = max((c.nbytes for c in leaves(caches)), default=0)  # one cache at a time grows
        return work + copied + tokens * self.caches_nbytes // self.context

    def __str__(self):
        return self.reason


def plan(
    path: str | Path,
    config: StreamConfig | None = None,
    *,
    memory_nbytes: int | None = None,
    context: int | None = None,
    draft: AnyDraft | None = None,
    texts: int = 1,
    trust_remote_code: bool = False,
) -> Plan:
    """Choose the slots of ``load(path, config)`` from the files' headers; no weight is read.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig or None): How to stream; its ``slots`` are replaced. Default:
            ``StreamConfig()``.
        memory_nbytes (int or None): Memory that the model may take beside what this process holds.
            Default: the config's, or what is available now.
        context (int or None): Tokens whose caches must fit. Default: the config's.
        draft, texts, trust_remote_code: As for ``load``.

    Returns:
        Plan: The slots, the numbers that they follow from, and the reason.

    Raises:
        CheckpointError: If the files are damaged.
        ValueError: If the model does not fit even with K slots in each layer (the message has the
            numbers), or if the config's mode has no slots.
    """
    given = {"memory_nbytes": memory_nbytes, "context": context}
    given = {name: value for name, value in given.items() if value is not None}
    config = replace(StreamConfig.checked(config), slots="auto", **given).resolved()
    if config.mode not in SLOT_MODES:
        raise ValueError(
            f"plan: expected a mode with slots ({' or '.join(SLOT_MODES)}), got {config.mode!r}. "
            "footprint says what another mode takes."
        )
    facts = ModelFacts.of(path, config, trust_remote_code)
    return plan_of(facts, config, draft=draft, texts=texts)


def plan_of(
    facts: ModelFacts,
    config: StreamConfig,
    ranks: Ranks | None = None,
    most: Most | None = None,
    draft: AnyDraft | None = None,
    texts: int = 1,
) -> Plan:
    """Plan from facts, for this rank's experts; ``most`` limits a plan for another machine."""
    # A layer has E experts; this rank holds ``held`` of them.
    E = facts.num_experts
    held = int((ranks.owners(E) == ranks.rank).sum()) if ranks else E
    reserved = (texts - 1) * facts.caches_nbytes
    if draft is not None:
        config, nbytes = _beside(draft, facts, config)
        reserved += nbytes
    mx.clear_cache()  # memory that ``facts_of`` or a former model freed must count as available
    return_free_memory()
    given, there = config.memory_nbytes, (0, 0)
    if most is None:
        most, there = (Most(*3 * (given,)), there) if given is not None else _for_a_model()
    L, slot = facts.num_layers, facts.slot_nbytes
    least = min(facts.top_k, held)  # the fewest slots with which a token can be computed
    process = GPU_NBYTES if mx.cuda.is_available() else PROCESS_NBYTES
    fixed = process + facts.kept_nbytes + facts.caches_nbytes + reserved
    work = partial(_work, facts, config.context, fixed + least * slot)
    memory = _filled(most, work, fixed + held * slot, fixed + least * slot)
    tokens, prompt, lendable = work(memory)
    system = max(0, sum(there) - memory)
    why = f", {WHY_LEFT}" if memory < there[0] else ""  # a Mac's plan leaves some unused
    parts = {
        "backbone": facts.kept_nbytes,
        f"caches of {config.context} tokens": facts.caches_nbytes,
        f"{tokens} tokens of a prompt at once": prompt,
        "program beside its arrays": process,
        "reserved": reserved,
    }
    listed = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in parts.items() if nbytes)
    left = f" ({_size(system)} more left to the system{why})" if system else ""
    free = memory - fixed - prompt
    if free < least * slot:
        raise DoesNotFit(
            f"{facts.path}: expected at least {_size(fixed + prompt + least * slot)} of memory "
            f"({listed}, {least} slots in each of {L} layers {_size(least * slot)}), got "
            f"{_size(memory)}{left}. Close other programs or raise the limit, set a shorter "
            "context or a lower top_k, or take a smaller model.",
            fixed + prompt + least * slot,
        )
    # Slots that stay while a prompt is computed, and slots while tokens are decoded.
    prompt_slots, slots = (min(held, nbytes // slot) for nbytes in (free, free + lendable))
    why = NEARLY_ALL
    if slots == held:
        why = ALL + (RESIDENT_FITS if slots == prompt_slots else "")
        if held < E:
            why = f"{ALL} of this rank"
    elif not mx.cuda.is_available():  # on CUDA slots take no memory of the page cache
        pages = (free + lendable - least * slot) / (facts.checkpoint_nbytes * held / E)
        # A read from the page cache takes about a quarter of the time of one from the SSD.
        if slots / held < (1 - 0.25) * pages:
            prompt_slots, slots, why = least, least, FEW
    lent, taken = (slots - prompt_slots) * slot, slots * slot
    # Bytes of the page cache while tokens are decoded. With all experts in slots nothing is read.
    pages = system + process + prompt - lent + free - taken
    is_small = pages < taken * (2 if slots < held else 1)
    # A limit that the caller gave says nothing about the page cache.
    direct = can_empty() and given is None and least < slots and is_small
    direct = direct if config.reads == "auto" else config.reads == "direct"
    reason = (
        f"slots={slots} of {held} in each of {L} layers: {why}. {_size(memory)} "
        f"available{left}: {listed}, slots {_size(taken)}"
    )
    if lent:
        reason += f" ({_size(lent)} of it lent to a prompt)"
    return Plan(
        facts=replace(facts, slots=slots),
        config=replace(config, slots=slots),
        other_nbytes=fixed + prompt - lendable,
        prompt_slots=prompt_slots,
        memory_nbytes=memory,
        system_nbytes=system,
        process_nbytes=process,
        prompt_nbytes=prompt,
        reserved_nbytes=reserved,
        prompt_tokens=tokens,
        direct=direct,
        reason=reason,
    )


def _beside(draft, facts, config):
    """Subtract a draft's weights from the config's memory; return config and bytes to reserve."""
    if config.memory_nbytes is not None:  # else the draft's weights already reduce free memory
        weights = tree_flatten(vars(draft).get("model", {}))
        memory = config.memory_nbytes - sum(p.nbytes for _, p in weights)
        config = replace(config, memory_nbytes=max(1, memory))
    # A verify pass keeps the recurrent states before it and after each of its tokens, until its
    # guesses are accepted or rejected.
    states = min(draft.verify_tokens * facts.states_nbytes, STATES_NBYTES) + facts.states_nbytes
    return config, states + grown_nbytes(draft.read_zeros(), config.context)


def footprint(path: str | Path, config: StreamConfig | None = None) -> ModelFacts:
    """Predict the memory of ``load(path, config)`` without reading any weights.

    With ``slots="auto"`` the slots are those that ``plan`` would choose now.

    Returns:
        ModelFacts: ``total_nbytes`` and its parts, without a prompt's activations and caches.

    Raises:
        CheckpointError: If the files are damaged.
        ValueError: If ``config`` does not fit the model.
    """
    config = StreamConfig.checked(config)
    facts = ModelFacts.of(path, config)
    return plan_of(facts, config.resolved()).facts if config.asks_for_slots else facts


def _filled(most, work, every, least):
    """Return the bytes to fill: ``most.some``, or more if all experts, or else K, need more."""
    some, may_fill, most_for_least = (int(min(max(0, nbytes), MOST_NBYTES)) for nbytes in most)
    _, prompt, lendable = work(may_fill)
    need = every + prompt - lendable
    if need > may_fill:
        # 2% more, since a prompt's arrays grow a little with the memory.
        need, may_fill = (least + work(some)[1]) * 51 // 50, most_for_least
    return min(may_fill, max(some, need))


def _work(facts, context, taken, memory):
    """Return a prompt chunk's tokens, the chunk's bytes, and the bytes that slots lend it."""
    left = memory - taken  # memory beside K slots in each layer and all else
    if can_empty():  # slots lend their memory
        most = left * 7 // 8
        most -= min(most // (MORE_SHARE + 1), MORE_NBYTES)
    else:
        most = max(memory // PROMPT_SHARE, FEW_PROMPT_TOKENS * facts.token_nbytes)
        most = min(most, left // 2)
    tokens = min(max(LEAST_PROMPT_TOKENS, most // facts.token_nbytes), PROMPT_TOKENS, context)
    nbytes = facts.arrays_nbytes(tokens)
    if not can_empty():
        return tokens, nbytes, 0
    nbytes += min(nbytes // MORE_SHARE, MORE_NBYTES)
    return tokens, nbytes, max(0, nbytes - facts.few_nbytes(tokens))


def _memory():
    """Return the bytes that this process's arrays may take, and those kept for the system."""
    gpu = memory_on_gpu()
    if gpu is not None and not mx.metal.is_available():  # this GPU has its own memory
        return gpu - gpu // SYSTEM_SHARE, gpu // SYSTEM_SHARE
    total, available = HERE.memory()
    kept = min(total // SYSTEM_SHARE, SYSTEM_NBYTES)
    limits = [n for n in (memory_in_cgroups(), gpu) if n is not None]
    memory = min([available - kept, *limits])
    return memory, kept if memory == available - kept else 0


def memory_for_a_model() -> int:
    """The bytes that a model and its page cache may take if the caller sets no limit."""
    return _memory()[0] - FREED_NBYTES * on_metal()


def _for_a_model():
    """Return the bytes a plan may fill, and a pair: bytes available, bytes kept for the system."""
    memory, kept = _memory()
    (total, _), held = HERE.memory(), mx.get_active_memory()
    most = memory_for_a_model()
    return Most(*(min(most, nbytes - held) for nbytes in most_for_a_model(total))), (memory, kept)


def memory_now() -> tuple[int, int]:
    """A model's bytes above which it gives slots back, and those above which a call is refused."""
    memory, kept = _memory()
    return memory + kept // 2, memory + kept


def _size(nbytes):
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
