"""The order in which a call's experts are handed over, if they do not all arrive at once."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass
class Call:
    """A layer's call whose experts do not all arrive at once."""

    layer: LayerSlots
    held: dict[int, int]  # experts that are in slots
    misses: dict[int, int]  # experts to read into these slots
    later: list[list[int]]  # waves of experts that get slots afterwards
    computed: Sequence[mx.array]  # results that are not evaluated yet


class Reading:
    """Parts of a layer's experts that are being read, in the order in which they were begun."""

    def __init__(self, layer: LayerSlots):
        self._layer, self._parts = layer, deque()

    def __len__(self):
        return len(self._parts)

    def begin(self, misses: dict[int, int]) -> None:
        """Begin to read experts into slots."""
        self._parts.extend((part, self._layer.begin(part)) for part in self._layer.parts(misses))

    def finished(self, waits: bool) -> dict[int, int]:
        """Hold the experts whose reads have ended, and return their slots.

        With ``waits`` it first waits for the first part.
        """
        ready = {}
        while self._parts and (waits or _ended(self._parts[0][1])):
            part, reads = self._parts.popleft()
            self._layer.finish(part, reads)
            ready, waits = ready | part, False
        return ready

    @property
    def slots(self) -> dict[int, int]:
        """The slots of the experts that are being read."""
        return {e: slot for part, _ in self._parts for e, slot in part.items()}


def _ended(reads):
    """Whether the reads that ``LayerSlots.begin`` began have ended."""
    return reads.done() if isinstance(reads, Begun) else all(future.done() for future in reads)


def as_read(call: Call, read_on: Callable[[], None]) -> Iterator[Arrived]:
    """Hand over the held experts, the missing ones as their reads end, and then later waves.

    Where reads go past the page cache and a part is computed at once, a slot takes a later expert
    as soon as its own is computed. Else the system reads ahead, and whole waves take less time.
    ``read_on`` is called after a part once the reads of all experts have begun.
    """
    layer, ready, reading = call.layer, call.held, Reading(call.layer)
    later, S = [e for wave in call.later for e in wave], layer.table.num_slots
    size = min(S, layer.parts_of(S)) if layer.refills else S
    reading.begin(call.misses)
    while ready or reading:
        ready = ready | reading.finished(waits=not ready)
        # Hand over all experts that have arrived. If no read is running, hand over one part, so
        # that its slots are free soon.
        few = size if later and layer.refills and not reading else len(ready)
        now, ready = dict(islice(ready.items(), few)), dict(islice(ready.items(), few, None))
        if now:
            yield Arrived(now, layer.bank)
        while later and layer.table.fits(later[:size], len(ready) + len(reading.slots)):
            mx.eval(call.computed)  # it reads slots that are about to be overwritten
            reading.begin(layer.choose(later[:size], ready | reading.slots)[1])
            del later[:size]
        if not later:
            read_on()


def as_copied(
    call: Call, reader: UploadingReader, mailbox: Mailbox, x: mx.array
) -> Iterator[Arrived]:
    """Hand over the held experts, and the others as soon as they have been read.

    The GPU copies a part after the arithmetic that was scheduled before, which may read the same
    slots. If one kernel cannot copy the part, this thread waits for that arithmetic.
    """
    layer, zero = call.layer, None
    for hits, missing in chain([(call.held, call.misses)], map(layer.choose, call.later)):
        if hits:
            yield Arrived(hits, layer.bank, after=zero)
        parts = deque(layer.parts(missing))
        begun = layer.begin(parts[0]) if parts else None
        while parts:
            part, reads = parts.popleft(), begun
            begun = layer.begin(parts[0]) if parts else None
            copies = reader.copies(reads)
            if copies is None:
                mx.eval(call.computed)
                layer.finish(part, reads)
                yield Arrived(part, layer.bank, after=zero)
            else:
                zero = mailbox.copy_after(copies, call.computed[-1] if call.computed else x)
                yield Arrived(part, layer.bank, after=zero)
                layer.finish(part, reads)
