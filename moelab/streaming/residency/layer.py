"""The slots of one layer: which expert is in which, and which experts are on their way."""

from collections.abc import Callable, Collection, Iterable

import mlx.core as mx
import numpy as np

from ... import kernels
from ..config import StreamConfig
from ..counters import Counting
from ..cuda import MAX_COPIES
from ..reading.reader import Reader
from .bank import SlotBank, can_empty
from .table import SlotTable, policy_of

# Bytes. On a CPU, experts are computed in parts of about so many bytes as they arrive, if so many
# are read.
PART_NBYTES = 2 * 1024 * 1024
# The most parts of a wave with the fast kernels. They compute an expert so fast that a part's
# other costs show.
NUM_PARTS = 8
# Bytes. Where a GPU copies, experts are read in parts of about so many bytes. Up to three parts
# have pinned memory at once: one is copied, one is read, and one was begun.
COPIED_NBYTES = 64 * 1024 * 1024


class LayerSlots:
    """Memory for S of a layer's E experts, and which of them are in it.

    S is ``config.slots``, but no more than this rank's experts (``owned`` ``[E]``; None: all).
    """

    def __init__(
        self,
        take_bank: Callable[[int], SlotBank],
        num_experts: int,
        owned: np.ndarray | None,
        config: StreamConfig,
        reader: Reader,
        counting: Counting,
    ):
        self._take_bank, self._config = take_bank, config
        self._reader, self._counting = reader, counting
        self.num_experts, self.owned = num_experts, owned
        self.num_owned = num_experts if owned is None else int(owned.sum())
        # ``host``: ``HostExperts`` if ``source="host"``; a GPU copies experts from there.
        self.host = self.bank = self._slot_of_all = None
        self._take(config.slots)

    def _take(self, slots):
        """Take memory for so many slots, and forget the present ones."""
        slots = min(slots, self.num_owned)
        self.bank = self._slot_of_all = None  # memory is free before more is taken
        self.bank = self._take_bank(slots)
        self.table = SlotTable(slots, policy_of(self._config.policy, self._config.source))
        self.job = None  # reads experts of this layer before they are needed
        if self.host is not None:
            self.host.bind(self.bank, self.table)

    @property
    def holds_all(self) -> bool:
        """Whether every expert is in a slot."""
        return len(self.table.slot_of) == self.num_experts

    @property
    def slot_of_all(self) -> mx.array:
        """The slot of each expert, ``[E]``, while every expert is in one."""
        if self._slot_of_all is None:
            slots = [self.table.slot_of[e] for e in range(self.num_experts)]
            self._slot_of_all = mx.array(slots, mx.uint32)
            mx.eval(self._slot_of_all)
        return self._slot_of_all

    @property
    def is_copied(self) -> bool:
        """Whether the GPU copies the bytes read, as one of its operations."""
        return self._reader.copies_in_graph and self.bank.as_read

    @property
    def computes_at_once(self) -> bool:
        """Whether the fast kernels compute each part before the next one is asked for."""
        return isinstance(self.bank.experts, kernels.FastExperts) and not self.is_copied

    @property
    def refills(self) -> bool:
        """Whether a slot takes a later expert of a call as soon as its own is computed."""
        return self._reader.direct and self.computes_at_once

    def resize(self, slots: int) -> None:
        """Use so many slots, at most as many as were taken; nothing may be using one of them."""
        if not can_empty():
            return self._take(slots)
        self.job = None
        self.table.resize(min(slots, self.bank.num_slots))
        self.bank.empty(self.table.num_slots, self.bank.num_slots)

    def recover(self) -> None:
        """Make every slot held or free after an exception. No read may be running."""
        if self.job is not None:
            for e in self.job.slots:  # some may be in the table already, see ``collect_prefetched``
                self.table.slot_of.pop(e, None)
        self.job = None
        if self.host is not None:
            self.host.forget()
        self.table.recover()

    def report(self) -> None:
        """Learn from the GPU what its slots hold, if only the GPU knows."""
        if self.host is not None:
            stats = self._counting.stats
            for counters, (hits, misses) in zip((stats.prefill, stats.decode), self.host.report()):
                counters.hits += hits
                counters.misses += misses

    def of_rank(self, experts: Iterable[int]) -> list[int]:
        """The experts among these that are this rank's."""
        return [e for e in experts if self.owned is None or self.owned[e]]

    def missing(self, experts: Iterable[int]) -> list[int]:
        """The rank's experts among these that are in no slot."""
        return [e for e in self.of_rank(experts) if e not in self.table.slot_of]

    def choose(self, needed, busy=()):
        """Choose slots as ``SlotTable.choose`` does, and count hits and misses."""
        hits, misses = self.table.choose(needed, busy)
        self._counting.now.hits += len(hits)
        self._counting.now.misses += len(misses)
        return hits, misses

    def begin(self, misses: dict[int, int]) -> list:
        """Begin to read experts into the slots that ``choose`` gave; return the running reads."""
        if self.host is not None:
            return self.host.start(misses)
        with self._counting.read_wait():
            return self._reader.start(self.bank.reads(misses))

    def finish(self, misses: dict[int, int], reads: list) -> None:
        """Wait for the reads that ``begin`` began, and hold the experts from then on."""
        with self._counting.read_wait():
            self._reader.finish(reads)
        for e, slot in misses.items():
            self.bank.arrived(e, slot)
        self.table.commit(misses)
        self._slot_of_all = None

    def read(self, misses: dict[int, int]) -> None:
        """Read experts into the slots that ``choose`` gave for them."""
        if misses:
            self.finish(misses, self.begin(misses))

    def part_size(self, num: int) -> int:
        """The number of experts in a part, if ``num`` experts are read."""
        if self.is_copied:
            most = MAX_COPIES // len(self.bank.into)
            if self.host is None:
                most = min(most, COPIED_NBYTES // self.bank.expert_nbytes)
            return max(1, most)
        # Large enough to be worth a wait, small enough that computing one hides the next read.
        size = max(1, PART_NBYTES // self.bank.expert_nbytes)
        return max(size, -(-num // NUM_PARTS)) if self.computes_at_once else size

    def parts(self, misses: dict[int, int]) -> list[dict[int, int]]:
        """Divide experts into the parts in which they are read and computed."""
        size, misses = self.part_size(len(misses)), list(misses.items())
        return [dict(misses[i : i + size]) for i in range(0, len(misses), size)]

    def unread(self) -> list[int]:
        """The experts in no slot; none if there are fewer than E slots, or a prefetch runs."""
        if self.table.num_slots < self.num_experts or self.job is not None or self.holds_all:
            return []
        return [e for e in range(self.num_experts) if e not in self.table.slot_of]

    def collect_prefetched(self, needed: Collection[int], wait: bool = True) -> dict[int, int]:
        """Hold the experts that were read before this call, and count how many it needs.

        Without ``wait`` it returns the needed ones that are still being read, and their slots: call
        ``land`` before using one. The table holds them already, so that none is evicted.
        """
        if self.job is None:
            return {}
        crowded = not self.table.fits({*needed, *self.job.slots})
        for e, took_s, waited_s in self.job.collect(needed if wait else (), crowded):
            slot = self.job.slots[e]
            if took_s is None:
                self.table.release([slot])
            else:
                self.table.commit({e: slot})
                self._count_prefetched(e in needed, took_s, waited_s)
            del self.job.slots[e]
        self._slot_of_all = None
        flying = {e: slot for e, slot in self.job.slots.items() if e in needed}
        self.table.commit(flying)
        if not self.job.slots:
            self.job = None
        return flying

    def land(self, e: int, slot: int) -> None:
        """Wait for an expert that ``collect_prefetched`` found on its way."""
        took_s, waited_s = self.job.land(e)
        if took_s is None:  # the read failed: this one raises if it fails, too
            self.finish({e: slot}, self.begin({e: slot}))
        else:
            self._count_prefetched(True, took_s, waited_s)
        del self.job.slots[e]
        if not self.job.slots:
            self.job = None

    def _count_prefetched(self, is_needed, took_s, waited_s):
        c = self.job.counters
        c.prefetch_used += is_needed
        c.prefetch_wasted += not is_needed
        if is_needed:
            c.prefetch_late += waited_s > 0
            c.prefetch_saved_s += max(0.0, took_s - waited_s)
            self._counting.now.wait_s += waited_s
