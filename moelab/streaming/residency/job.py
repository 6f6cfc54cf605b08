"""Reads that no layer waits for yet: for a prefetch, or for a prompt."""

from collections.abc import Collection
from concurrent.futures import Future
from time import perf_counter, sleep

from ..reading.file import ReadError
from ..reading.reader import SHARE_NBYTES, Reader
from .bank import SlotBank


class Job:
    """Experts on their way into slots of one layer, while the model computes.

    They are read past the page cache without a thread where that is possible, else by background
    threads. The slots belong to the job until ``collect``.
    """

    def __init__(self, reader: Reader, bank: SlotBank, slots: dict[int, int]):
        self._reader, self._bank, self.slots = reader, bank, slots
        reads = bank.reads(slots)
        flight = reader.fly(reads) if reader.direct else None
        self._flies = flight is not None
        if self._flies:
            self._reads = dict(zip(slots, flight.divided(len(slots))))
            return
        self._reads = {e: Future() for e in slots}
        self._queued = iter([(e, slots[e], read) for e, read in self._reads.items()])  # for threads
        reader.in_background(self._run, threads=-(-reads.nbytes // SHARE_NBYTES))

    def _run(self):
        """Read one expert after another until none is left, as the work of one thread."""
        while not self._reader.closed:
            self._reader.give_way()
            e, slot, read = next(self._queued, (None, None, None))
            if read is None:
                return
            if not read.set_running_or_notify_cancel():
                continue
            try:
                begin = perf_counter()
                self._reader.read_here(self._bank.reads({e: slot}))
                self._bank.arrived(e, slot)
                read.set_result(perf_counter() - begin)
            except BaseException as error:
                read.set_exception(error)

    def wait(self) -> None:
        """Wait until every read has ended."""
        while not all(read.done() for read in self._reads.values()):
            sleep(1e-4)

    def collect(
        self, needed: Collection[int], everything: bool = False
    ) -> tuple[dict[int, tuple[int, float, float]], list[int], bool]:
        """Cancel the reads that have not begun, and wait for running ones: ``needed``, or all.

        Returns for each expert that arrived its slot, the seconds of its read and the seconds
        waited for it here; the slots that are free again; and whether the job has ended.
        """
        arrived = {}
        free = [self._taken(e) for e, read in [*self._reads.items()] if read.cancel()]
        for e, read in [*self._reads.items()]:
            begin, late = perf_counter(), not read.done()
            if late and not (everything or e in needed):
                continue
            slot = self._taken(e)
            try:
                took_s = read.result()
            except ReadError:  # the layer that needs the expert reads it again, and may raise
                free.append(slot)
                continue
            if self._flies:
                self._bank.arrived(e, slot)
            arrived[e] = slot, took_s, perf_counter() - begin if late else 0.0
        return arrived, free, not self._reads

    def _taken(self, e):
        """The slot of an expert that is no longer the job's."""
        del self._reads[e]
        return self.slots.pop(e)
