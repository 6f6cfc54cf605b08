"""Reads that no layer waits for yet: for a prefetch, or for a prompt."""

from collections.abc import Collection, Iterator
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
        self, needed: Collection[int], everything: bool
    ) -> Iterator[tuple[int, float | None, float]]:
        """Cancel the reads that have not begun, and wait for running ones: ``needed``, or all.

        Yields each expert that is no longer on its way, the seconds of its read (None: it did not
        arrive) and the seconds waited for it here.
        """
        for e in [e for e, read in self._reads.items() if read.cancel()]:
            del self._reads[e]
            yield e, None, 0.0
        for e, read in [*self._reads.items()]:
            begin, late = perf_counter(), not read.done()
            if late and not (everything or e in needed):
                continue
            del self._reads[e]
            try:
                took_s = read.result()
                if self._flies:
                    self._bank.arrived(e, self.slots[e])
            except ReadError:  # the layer that needs the expert reads it again, and may raise
                took_s = None
            yield e, took_s, perf_counter() - begin if late else 0.0
