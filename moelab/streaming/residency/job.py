"""Reads that no layer waits for yet: for a prefetch, or for a prompt."""

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter, sleep

from ..counters import Counters
from ..reading.file import ReadError
from ..reading.reader import SHARE_NBYTES, Reader
from .bank import SlotBank


class Job:
    """Experts on their way into slots of one layer, which belong to the job until ``collect``.

    ``counters`` are those of the phase that it began in, which also get what becomes of it.
    """

    def __init__(self, reader: Reader, bank: SlotBank, slots: dict[int, int], counters: Counters):
        self._reader, self._bank, self.slots, self.counters = reader, bank, slots, counters
        counters.prefetch_issued += len(slots)
        self._queued, self._flights = deque(), {}  # ``Future``s would take as long as small reads
        self._took_s = {}  # seconds of each expert's read; None if it failed
        self._ended = SimpleQueue()  # experts whose read a thread has ended
        flight = reader.fly(bank.reads(slots)) if reader.direct else None
        if flight is not None:
            self._flights = dict(zip(slots, flight.divided(len(slots))))
            return
        self._queued.extend(slots.items())
        threads = -(-len(slots) * bank.expert_nbytes // SHARE_NBYTES)
        reader.in_background(self._run, threads=threads)

    def _run(self):
        """Read one expert after another until none is left, as the work of one thread."""
        with suppress(IndexError):  # none is queued
            while not self._reader.closed:
                self._reader.give_way()
                self._read(*self._queued.popleft())

    def _read(self, e, slot):
        begin, took_s = perf_counter(), None
        try:
            self._reader.read_here(self._bank.reads({e: slot}))
            self._bank.arrived(e, slot)
            took_s = perf_counter() - begin
        except ReadError:
            pass  # the layer that needs the expert reads it again, and may raise
        finally:
            self._took_s[e] = took_s
            self._ended.put(e)

    def wait(self) -> None:
        """Wait until every read has ended."""
        while not all(map(self.has_ended, self.slots)):
            sleep(1e-4)

    def collect(
        self, awaited: Collection[int], everything: bool
    ) -> Iterator[tuple[int, float | None, float]]:
        """Cancel the reads that have not begun, and wait for running ones: ``awaited``, or all.

        Yields each expert that is no longer on its way, the seconds of its read (None: it did not
        arrive) and the seconds waited for it here.
        """
        with suppress(IndexError):  # none is queued
            while True:
                e, _ = self._queued.popleft()
                self._took_s[e] = None
        for e in [*self.slots]:
            if everything or e in awaited or self.has_ended(e):
                yield e, *self.land(e)

    def land(self, e: int) -> tuple[float | None, float]:
        """Wait for an expert's read; the seconds that it took (None: it failed) and of the wait."""
        begin, late = perf_counter(), not self.has_ended(e)
        with suppress(ReadError):
            if self._flights:
                self._took_s[e] = self._flights[e].result()
                self._bank.arrived(e, self.slots[e])
        while e not in self._took_s and not self._flights:
            self._ended.get()
        return self._took_s.get(e), perf_counter() - begin if late else 0.0

    def has_ended(self, e: int) -> bool:
        """Whether an expert's read has ended."""
        return self._flights[e].done() if self._flights else e in self._took_s
