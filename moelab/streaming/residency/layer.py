"""The slots of one layer: which expert is in which, and which experts are on their way."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter

import mlx.core as mx
import numpy as np

from ... import kernels
from ..config import StreamConfig
from ..counters import Counters, Counting
from ..cuda import MAX_COPIES
from ..reading.file import ReadError
from ..reading.flight import Flight
from ..reading.reader import Reader, Threads
from .bank import SlotBank, can_empty
from .table import SlotTable

# On a CPU, a call that reads at least this many bytes is computed as the bytes arrive, in parts of
# about this size: large enough to wait for. While one part is computed, the next part is read.
PART_NBYTES = 2 * 1024 * 1024
# While one of so many parts of the slots is computed, the others are filled.
PARTS = 4
# In bytes. A prompt on a CPU has about 192 MB in flight, so that the disk is busy while the CPU
# computes. A GPU copies experts in groups of 64 MB; two groups are in pinned memory at once.
FLYING_NBYTES, COPIED_NBYTES = 192 * 1024 * 1024, 64 * 1024 * 1024


@dataclass(eq=False)
class Arriving:
    """Experts on their way into slots, which can be waited for together."""

    slots: dict[int, int]  # expert to slot
    reads: Flight | Threads
    counters: Counters | None = None  # of the prefetch that began the reads; None if a call did
    # ``others``: a prefetch's experts that the call does not need. ``is_late``: the call began
    # before the prefetch's reads ended.
    others: dict[int, int] = field(default_factory=dict)
    is_late: bool = False


class LayerSlots:
    """S slots for those experts of a layer that this rank owns (``owned [E]``; None: all E)."""

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
        # ``host`` is the ``HostExperts`` from which a GPU copies experts if ``source="host"``.
        self.host = self.bank = self._slot_of_all = None
        self._take(config.slots)

    def _take(self, slots):
        """Take memory for ``slots`` slots, and forget the present slots."""
        slots = min(slots, self.num_owned)
        self.bank = self._slot_of_all = None  # frees the old slots before new memory is taken
        self.bank = self._take_bank(slots)
        self.table = SlotTable(slots, self._config.policy)
        self.awaited = []  # reads that the running call waits for
        self.ahead = []  # reads that began before any call needed them
        if self.host is not None:
            self.host.bind(self.bank, self.table)

    @property
    def holds_all(self) -> bool:
        """Whether every expert is in a slot."""
        return len(self.table.slot_of) == self.num_experts

    @property
    def slot_of_all(self) -> mx.array:
        """The slot of each expert, ``[E]``; only if ``holds_all``."""
        if self._slot_of_all is None:
            slots = [self.table.slot_of[e] for e in range(self.num_experts)]
            self._slot_of_all = mx.array(slots, mx.uint32)
            mx.eval(self._slot_of_all)
        return self._slot_of_all

    @property
    def is_copied(self) -> bool:
        """Whether an operation of MLX's graph copies the experts' bytes to the GPU."""
        return self._reader.copies_in_graph and self.bank.as_read

    @property
    def computes_at_once(self) -> bool:
        """Whether the fast kernels compute each part before the layer asks for the next part."""
        return isinstance(self.bank.experts, kernels.FastExperts) and not self.is_copied

    @property
    def most(self) -> int:
        """How many experts may be on their way at the same time."""
        nbytes = self.bank.expert_nbytes
        if self.is_copied:  # one kernel copies them
            most = max(1, MAX_COPIES // len(self.bank.into))
            return most if self.host is not None else max(1, min(most, COPIED_NBYTES // nbytes))
        # The page cache reads ahead, so it is fastest to ask for as many experts as slots.
        return max(1, FLYING_NBYTES // nbytes) if self._reader.direct else self.table.num_slots

    @property
    def refills(self) -> bool:
        """Whether a slot is free for another expert as soon as the slot's expert was computed."""
        return self._reader.direct and self.computes_at_once

    @property
    def part(self) -> int:
        """How many experts a call computes at a time while more than these are missing."""
        slots, nbytes = self.table.num_slots, self.bank.expert_nbytes
        return max(1, slots // PARTS, PART_NBYTES // nbytes) if self.refills else slots

    def resize(self, slots: int) -> None:
        """Use ``slots`` slots, never more than at first; no slot may be in use meanwhile."""
        if not can_empty():
            return self._take(slots)
        self.awaited, self.ahead = [], []
        self.table.resize(min(slots, self.bank.num_slots))
        self.bank.empty(self.table.num_slots, self.bank.num_slots)

    def recover(self) -> None:
        """After an error, free the slots that were being filled. No read may be running."""
        for group in self.awaited + self.ahead:
            for e in group.slots:  # ``collect`` may have put the expert into the table
                self.table.slot_of.pop(e, None)
        self.awaited, self.ahead = [], []
        if self.host is not None:
            self.host.forget()
        self.table.recover()

    def report(self) -> None:
        """Update table and counters from the GPU, if only the GPU knows what slots hold."""
        if self.host is not None:
            stats = self._counting.stats
            for counters, (hits, misses) in zip((stats.prefill, stats.decode), self.host.report()):
                counters.hits += hits
                counters.misses += misses

    def of_rank(self, experts: Iterable[int]) -> list[int]:
        """Those of the ``experts`` that this rank owns."""
        return [*experts] if self.owned is None else [e for e in experts if self.owned[e]]

    def missing(self, experts: Iterable[int]) -> list[int]:
        """Those of the ``experts`` that this rank owns and that are in no slot."""
        return [e for e in self.of_rank(experts) if e not in self.table.slot_of]

    def choose(self, needed, busy=()):
        """Choose slots as ``SlotTable.choose`` does, and count hits and misses."""
        hits, misses = self.table.choose(needed, busy)
        self._counting.now.hits += len(hits)
        self._counting.now.misses += len(misses)
        return hits, misses

    def begin(self, misses: dict[int, int]) -> None:
        """Begin to read experts into the slots that ``choose`` gave."""
        if not misses:
            return
        with self._counting.read_wait():
            start = self._reader.start if self.host is None else self.host.start
            self.awaited += self._groups(start, misses)

    def begin_ahead(self, slots: dict[int, int]) -> None:
        """Begin to read experts, which no call needs yet, into reserved slots."""
        counters = self._counting.now
        counters.prefetch_issued += len(slots)
        self.ahead += self._groups(self._reader.start_ahead, slots, counters)

    def _groups(self, start, slots, counters=None):
        """Begin reads into slots, in groups that can be waited for."""
        if self.host is not None:
            return [Arriving(slots, *start(slots))]
        n = len(slots) if self.is_copied else max(1, PART_NBYTES // self.bank.expert_nbytes)
        reads, items = start(self.bank.reads(slots), n * self.bank.num_ranges), iter(slots.items())
        return [Arriving(dict(islice(items, n)), r, counters) for r in reads]

    def land(self, most: int | None = None) -> dict[int, int]:
        """Finish groups that arrived, about ``most`` experts, at least a group; return the slots.

        None: wait for all groups.
        """
        ended = [*self.awaited]
        if most is not None:
            num = max(1, most // len(ended[0].slots))
            ended = [*islice((g for g in ended if g.reads.done()), num)] or ended[:1]
        for group in ended:
            self.finish(group)
        return {e: slot for group in ended for e, slot in group.slots.items()}

    def finish(self, group: Arriving) -> None:
        """Wait for a group's reads, and enter its experts in the table."""
        begin = perf_counter()
        with self._counting.read_wait():
            try:
                took_s = self._reader.finish([group.reads])
            except ReadError:
                if group.counters is None:
                    raise
                self.table.release(group.others.values())
                group.others, took_s = {}, 0.0
                # Read again the experts that a call needs; a second failure raises.
                self._reader.read(self.bank.reads(group.slots))
        waited_s = perf_counter() - begin
        if group in self.awaited:
            self.awaited.remove(group)
        slots = group.slots | group.others
        for e, slot in slots.items():
            self.bank.arrived(e, slot)
        self.table.commit(slots)
        self._slot_of_all = None
        if (c := group.counters) is not None:
            c.prefetch_used += len(group.slots)
            c.prefetch_wasted += len(group.others)
            c.prefetch_late += len(group.slots) * group.is_late
            c.prefetch_saved_s += max(0.0, took_s - waited_s) if group.slots else 0.0

    def read(self, misses: dict[int, int]) -> None:
        """Read experts into the slots that ``choose`` gave for them."""
        self.begin(misses)
        self.land()

    def unread(self) -> list[int]:
        """The experts in no slot; ``[]`` if there are fewer than E slots or a prefetch runs."""
        if self.table.num_slots < self.num_experts or self.ahead or self.holds_all:
            return []
        return [e for e in range(self.num_experts) if e not in self.table.slot_of]

    def collect(self, needed: Collection[int]) -> None:
        """Take over a prefetch's reads when a call begins that needs the experts ``needed``."""
        if not self.ahead:
            return
        groups, self.ahead, needed = self.ahead, [], set(needed)
        every = needed.union(*(group.slots | group.others for group in groups))
        wait = self.is_copied or not self.table.fits(every)
        for group in groups:
            slots = group.slots | group.others
            group.slots = {e: slot for e, slot in slots.items() if e in needed}
            group.others = {e: slot for e, slot in slots.items() if e not in needed}
            group.is_late = not group.reads.done()
            if group.reads.cancel():
                self.table.release(slots.values())
            elif wait or not group.is_late:
                self.finish(group)
            elif group.slots:  # the table holds these experts while the call awaits them
                self.table.commit(group.slots)
                self.awaited.append(group)
            else:
                self.ahead.append(group)
        self._slot_of_all = None
