"""The order in which a call's experts are handed over, if they do not all arrive at once."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import mlx.core as mx

from ..cuda import Copy, Mailbox
from ..reading.uploading import Begun, UploadingReader
from .bank import SlotBank
from .layer import LayerSlots


class Arrived(NamedTuple):
    """Experts of a call that are in slots."""

    slots: dict[int, int]  # expert to slot
    bank: SlotBank  # the bank that has these slots
    is_all: bool = False  # whether these are all the experts of the call
    copies: Sequence[Copy] = ()  # with ``is_all``: the GPU must make these before it computes
    # A zero. A result that depends on it is computed after the GPU has copied the experts.
    after: mx.array | None = None


class Reading:
    """Parts of a layer's experts that are being read, in the order in which they were begun."""

    def __init__(self, own: LayerSlots):
        self._own, self._parts = own, deque()

    def __len__(self):
        return len(self._parts)

    def begin(self, misses: dict[int, int]) -> None:
        """Begin to read experts into slots."""
        self._parts.extend((part, self._own.begin(part)) for part in self._own.parts(misses))

    def finished(self, waits: bool) -> dict[int, int]:
        """Hold the experts whose reads have ended, and return their slots.

        With ``waits`` it first waits for the first part.
        """
        ready = {}
        while self._parts and (waits or _ended(self._parts[0][1])):
            part, reads = self._parts.popleft()
            self._own.finish(part, reads)
            ready, waits = ready | part, False
        return ready

    @property
    def slots(self) -> dict[int, int]:
        """The slots of the experts that are being read."""
        return {e: slot for part, _ in self._parts for e, slot in part.items()}


def _ended(reads):
    """Whether the reads that ``LayerSlots.begin`` began have ended."""
    return reads.done() if isinstance(reads, Begun) else all(future.done() for future in reads)


def as_read(
    own: LayerSlots,
    held: dict[int, int],
    misses: dict[int, int],
    later: list[list[int]],
    borrowed: list[tuple[LayerSlots, dict[int, int]]],
    direct: bool,
    computed: Sequence[mx.array],
    then: Callable[[dict[int, int]], None],
) -> Iterator[Arrived]:
    """Hand over the held experts, the missing ones as their reads end, and then ``later`` waves.

    Where reads go past the page cache (``direct``) and a part is computed at once, a slot takes a
    later expert as soon as its own is computed. Else the system reads ahead, and whole waves take
    less time. Once the reads of all experts have begun, ``then`` is called after each part with the
    slots that are still needed. ``computed`` has the results that are not evaluated yet.
    """
    later, reading, S = [e for wave in later for e in wave], Reading(own), own.table.num_slots
    direct = direct and own.computes_at_once
    size = min(S, own.parts_of(S)) if direct else S
    borrowed = deque((other, part) for other, slots in borrowed for part in own.parts(slots))
    ready = held
    reading.begin(misses)
    while ready or reading or borrowed:
        ready = ready | reading.finished(waits=not (ready or borrowed))
        if borrowed:
            other, part = borrowed.popleft()
            yield Arrived(part, other.bank)
            other.table.release(part.values())
        # Hand over all experts that have arrived. If no read is running, hand over one part, so
        # that its slots are free soon.
        few = later and direct and not reading
        now = dict(islice(ready.items(), size)) if few else ready
        ready = {e: slot for e, slot in ready.items() if e not in now}
        if now:
            yield Arrived(now, own.bank)
        while later and own.table.fits(later[:size], len(ready) + len(reading.slots)):
            mx.eval(computed)  # it reads slots that are about to be overwritten
            reading.begin(own.choose(later[:size], ready | reading.slots)[1])
            del later[:size]
        if not later:
            then(ready | reading.slots)


def as_copied(
    own: LayerSlots,
    held: dict[int, int],
    misses: dict[int, int],
    later: list[list[int]],
    reader: UploadingReader,
    mailbox: Mailbox,
    computed: Sequence[mx.array],
    x: mx.array,
) -> Iterator[Arrived]:
    """Hand over the held experts, and the others as soon as they have been read.

    The GPU copies a part after the arithmetic that was scheduled before, which may read the same
    slots. If one kernel cannot copy the part, this thread waits for that arithmetic.
    """
    zero = None
    for hits, missing in chain([(held, misses)], map(own.choose, later)):
        if hits:
            yield Arrived(hits, own.bank, after=zero)
        parts = deque(own.parts(missing))
        begun = own.begin(parts[0]) if parts else None
        while parts:
            part, reads = parts.popleft(), begun
            begun = own.begin(parts[0]) if parts else None
            copies = reader.copies(reads)
            if copies is None:
                mx.eval(computed)
                own.finish(part, reads)
                yield Arrived(part, own.bank, after=zero)
            else:
                after = computed[-1] if computed else x
                zero = mailbox.copy_after(copies, after)
                yield Arrived(part, own.bank, after=zero)
                own.finish(part, reads)
