"""The order in which a call's experts are handed over, if they do not all arrive at once."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import mlx.core as mx

from ..cuda import Copy, Mailbox
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


def as_read(
    layer: LayerSlots,
    held: dict[int, int],
    misses: dict[int, int],
    later: list[list[int]],
    computed: Sequence[mx.array],
    read_on: Callable[[], None],
    flying: dict[int, int],
) -> Iterator[Arrived]:
    """Hand over the held experts, the missing ones as their reads end, and then later waves.

    A prefetch still reads those of the held ones that are ``flying``. ``computed`` has results that
    are not evaluated yet. Where reads go past the page cache and a part is computed at once, a slot
    takes a later expert as soon as its own is computed. Else the system reads ahead, and whole
    waves take less time. ``read_on`` is called once the reads of all experts have begun.
    """
    later, S = [e for wave in later for e in wave], layer.table.num_slots
    size = min(S, layer.part_size(S)) if layer.refills else S
    ready = {e: slot for e, slot in held.items() if e not in flying}
    reading = deque()  # parts that are being read: expert to slot, and the reads

    def begin(misses):
        reading.extend((part, layer.begin(part)) for part in layer.parts(misses))

    begin(misses)
    while ready or reading or flying:
        waits = not ready
        for e, slot in [*flying.items()]:
            if waits or layer.job.has_ended(e):
                layer.land(e, flying.pop(e))
                ready, waits = ready | {e: slot}, False
        while reading and (waits or all(read.done() for read in reading[0][1])):
            part, reads = reading.popleft()
            layer.finish(part, reads)
            ready, waits = ready | part, False
        # Hand over all experts that have arrived. If no read is running, hand over one part, so
        # that its slots are free soon.
        few = size if later and layer.refills and not reading else len(ready)
        now, ready = dict(islice(ready.items(), few)), dict(islice(ready.items(), few, None))
        if now:
            yield Arrived(now, layer.bank)
        while later:
            busy = ready | {e: slot for part, _ in reading for e, slot in part.items()}
            if not layer.table.fits(later[:size], len(busy)):
                break
            mx.eval(computed)  # it reads slots that are about to be overwritten
            begin(layer.choose(later[:size], busy)[1])
            del later[:size]
        if not later:
            read_on()


def as_copied(
    layer: LayerSlots,
    held: dict[int, int],
    misses: dict[int, int],
    later: list[list[int]],
    computed: Sequence[mx.array],
    x: mx.array,
    mailbox: Mailbox,
) -> Iterator[Arrived]:
    """Hand over the held experts, and the others as soon as they have been read.

    The GPU copies a part after the arithmetic that was scheduled before (``computed``, or the
    call's input ``x``), which may read the same slots. If one kernel cannot copy the part, this
    thread waits for that arithmetic.
    """
    zero = None
    for hits, missing in chain([(held, misses)], map(layer.choose, later)):
        if hits:
            yield Arrived(hits, layer.bank, after=zero)
        parts = deque(layer.parts(missing))
        begun = layer.begin(parts[0]) if parts else None
        while parts:
            part, reads = parts.popleft(), begun
            begun = layer.begin(parts[0]) if parts else None
            copies = reads.in_graph()
            if copies is None:
                mx.eval(computed)
                layer.finish(part, reads)
                yield Arrived(part, layer.bank, after=zero)
            else:
                zero = mailbox.copy(copies, computed[-1] if computed else x)
                yield Arrived(part, layer.bank, after=zero)
                layer.finish(part, reads)
