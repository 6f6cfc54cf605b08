"""Sets how many of a model's slots are in use, from the free memory and the swapped pages."""

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter

import mlx.core as mx

from ..memory import return_free_memory, swapped_s
from ..system import HERE, Mac
from .facts import FEW_TOKENS
from .plan import BESIDE_NBYTES, LEAST_PROMPT_TOKENS, Plan, memory_now
from .residency.bank import can_empty
from .residency.residency import Residency

# Seconds between two looks at the free memory; a look takes 0.2 ms. macOS renews its answer 2 to 10
# times a second, so after 1.1 s it knows of slots that were given back.
LOOK_S = 1.1 if isinstance(HERE, Mac) else 0.05
# Bytes that stay free. They are for other programs that take memory between two looks, and for a
# prompt that takes more than planned. (Without this reserve a server of 900 MB was killed.)
RESERVE_NBYTES = BESIDE_NBYTES // 2
# Seconds between two looks at swapping; a look takes 0.07 ms. Fewer slots are faster if swapping in
# takes more than this share of the time, and swapping out does, too.
WATCH_S, SWAPPED_SHARE = 0.5, 0.02
# Slots that were given back because of swapping are tried again, an eighth at a time, after this
# many seconds without swapping. If a try makes the system swap again, the wait doubles.
REST_S = 60.0


class Room:
    """Sets how many slots are in use: fewer where memory gets short, more where it is free again.

    Without a plan the slots stay as the user chose them. ``together`` says that other ranks make
    the same calls: then a call's parts depend on ``Plan.prompt_tokens`` alone, not on free memory.
    """

    def __init__(self, plan: Plan | None, slots: int, residency: Residency, together: bool):
        self._plan, self._residency, self._together = plan, residency, together
        # ``slots``: how many are kept. Fewer are in use while slots lend memory to a prompt.
        self.slots = self._in_use = slots
        self._warned = slots  # how many slots the last warning named
        self.tokens = 0  # tokens of the call, or part of a call, that began last
        self._look_s = 0.0  # when to look at the memory again
        # A GPU's own memory is not swapped. Elsewhere ``_most`` limits the slots: it falls while
        # pages are swapped, and rises again after a long rest.
        self._is_swappable = can_empty() or mx.metal.is_available()
        self._most, self._rest_s, self._rest_until, self._tried = slots, REST_S, 0.0, False
        self._watch_s, self._swapped = 0.0, None

    def step(self, most: int) -> int:
        """How many tokens of a prompt one part has: ``most``, or fewer if the plan has fewer."""
        return min(most, self._plan.prompt_tokens) if self._plan else most

    def parts(self, inputs: mx.array, step: int | None = None) -> list[mx.array]:
        """Divide ``[B, T]`` tokens into equal parts of at most ``step`` (None: the plan's)."""
        step = step or self.step(inputs.size)
        if inputs.ndim != 2 or inputs.size <= step:
            return [inputs]
        T = inputs.shape[1]
        num = min(-(-inputs.size // step), max(1, T // 2))
        return [inputs[:, a:b] for a, b in pairwise([T * i // num for i in range(num + 1)])]

    def make(self, tokens: int, caches: Sequence = (), divisible: bool = True) -> int:
        """Set the slots for a call that begins; return how many tokens may be computed at once.

        If there is too little memory even with K slots in each layer, this raises ``MemoryError``.
        """
        plan, now = self._plan, perf_counter()
        if plan is None:
            return tokens
        is_prompt = tokens > FEW_TOKENS
        step = min(tokens, plan.prompt_tokens) if divisible else tokens
        if not is_prompt and now < self._look_s and self._in_use == self.slots:
            return step
        self._look_s = now + LOOK_S
        self._watch(now)
        slots = self.slots
        if is_prompt:  # lent slots stay lent in a prompt's shorter last part
            slots = min(slots, self._in_use, plan.slots_beside(step))
        needs = partial(plan.call_nbytes, caches=caches, is_first=not self.tokens)
        free, _ = memory_now()
        taken = needs(step) + RESERVE_NBYTES
        if self._fitting(taken, free) < slots:
            mx.clear_cache()  # perhaps the freed memory that MLX and the C library keep is enough
            return_free_memory()
            free, _ = memory_now()
        # Where slots cannot lend memory, a prompt's memory stays free while tokens are decoded.
        self._keep(self._fitting(needs(1 if can_empty() else step) + RESERVE_NBYTES, free))
        fitting = self._fitting(taken, free)
        self._use(max(self._least, min(self.slots, slots, fitting)))
        if fitting >= self._least:
            return step
        _, most = memory_now()
        fewest = step if self._together or not divisible else LEAST_PROMPT_TOKENS
        while self._fitting(needs(step), most) < self._least:
            if step <= fewest:
                raise self._no_room(needs(step), most)
            step = max(fewest, step // 2)  # fewer tokens at once take less memory
        return step

    @property
    def _least(self):
        """The fewest slots with which a token can be computed."""
        return min(self._plan.top_k, self._plan.slots)

    def _fitting(self, nbytes, free):
        """How many slots fit in each layer if a call needs ``nbytes`` of the ``free`` bytes."""
        return (self._residency.nbytes + free - nbytes) // self._plan.facts.slot_nbytes

    def _keep(self, fitting):
        """Choose how many slots to keep; ``fitting`` slots fit. Warn if many are lost."""
        slots, slot_nbytes = self.slots, self._plan.facts.slot_nbytes
        most = self._plan.slots if can_empty() else slots
        more = min(self._most, fitting - -(-BESIDE_NBYTES // slot_nbytes))  # leaves memory to spare
        fits = fitting = min(self._most, fitting)
        if not can_empty() and fitting < slots:  # all slots are read again: then give an eighth
            fitting = min(fitting, slots - max(1, slots // 8))
        kept = max(self._least, min(most, fitting if fitting < slots else max(slots, more)))
        warned = kept if kept > slots else self._warned
        self.slots, self._warned = kept, warned
        if not warned or fitting >= warned - warned // 8:  # warn once for each eighth lost
            return
        self._warned = kept if fitting >= kept else 0  # 0: this was the last warning
        missing = (warned - fits) * slot_nbytes
        what = f"slots {warned} -> {kept}" if kept < warned else f"no more than {kept} slots left"
        warnings.warn(
            f"memory is short by {missing / 1e6:.0f} MB: {what} in each layer. Other programs, or "
            f"a text longer than the {self._plan.context} tokens planned for "
            "(StreamConfig.context), took it.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _watch(self, now):
        """Lower ``_most`` while slots are swapped, and raise it after a long rest."""
        if not self._is_swappable or now < self._watch_s:
            return
        seconds, self._watch_s = now + WATCH_S - self._watch_s, now + WATCH_S
        before, self._swapped = self._swapped, swapped_s()
        both = zip(before, self._swapped) if before and self._swapped else ()
        # If pages are only swapped in, memory is not short: then a program goes on after a pause.
        if min((b - a for a, b in both), default=0) > SWAPPED_SHARE * seconds:
            slots = min(self._most, self.slots)
            most = max(self._least, slots - max(1, slots // (8 if can_empty() else 4)))
            if most < slots and (self._tried or self._most >= self._plan.slots):
                less = f"slots {slots} -> {most} in each layer, and still fewer while it swaps."
                less = f"the system swaps this model's memory: {less}"
                warnings.warn(less, RuntimeWarning, stacklevel=2)
            self._rest_s *= 1 + self._tried
            self._most = self._warned = most
            self._rest_until, self._tried, self._swapped = now + self._rest_s, False, None
            # macOS counts all programs' swapped pages, and slots given back on a Mac do not return.
            # So a Mac waits longer until the next look: a program that opens costs only a quarter
            # of the slots, not one quarter after the other.
            self._watch_s += 0 if can_empty() else 5.0
        elif self._most < self._plan.slots and now > self._rest_until:
            self._most, self._tried = self._most + max(1, self._most // 8), True
            self._rest_until = now + self._rest_s

    def _use(self, slots):
        """Use ``slots`` slots in each layer. No layer may be computing with a slot."""
        if slots == self._in_use:
            return
        if slots > self._in_use:
            mx.clear_cache()
            return_free_memory()
        self._in_use = slots
        self._residency.resize(slots)

    def _no_room(self, nbytes, most):
        """Return the error of a call that does not fit beside the fewest slots."""
        self._look_s = 0.0
        slots = self._plan.facts.slot_nbytes * self._in_use
        held = self._residency.nbytes
        return MemoryError(
            f"memory is short: with {self._in_use} slots in each layer, the fewest, the call takes "
            f"{(nbytes + slots - held) / 1e6:.0f} MB, and there are {max(0, most) / 1e6:.0f} MB. "
            "Close other programs, raise the limit or take a shorter prompt."
        )

    def look_in_prompt(self) -> None:
        """Give slots back if memory gets short between a prompt's layers (if ``can_empty()``)."""
        if self._plan is None or self.tokens <= FEW_TOKENS or not can_empty():
            return
        if (now := perf_counter()) < self._look_s:
            return
        self._look_s = now + LOOK_S
        facts = self._plan.facts
        # Bytes per token that a layer, or the logits after the last layer, take and free again. A
        # layer of notebook 03 took 0.1 to 0.7 of a prompt's memory.
        in_layer = max(0.75 * facts.token_nbytes, facts.token_logits_nbytes)
        nbytes = int(self.tokens * in_layer)
        self._watch(now)
        fitting = min(self._most, self._fitting(nbytes, memory_now()[0]))
        if fitting >= self._in_use:
            return
        self._use(max(self._least, fitting))
        if self._fitting(nbytes, most := memory_now()[1]) < self._least:
            raise self._no_room(nbytes, most)
