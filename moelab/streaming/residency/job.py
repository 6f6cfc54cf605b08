"""Reads that no layer waits for yet: for a prefetch, or for a prompt."""

import threading
from collections.abc import Collection
from time import perf_counter

from ..reading.file import ReadError
from ..reading.reader import Reader
from .bank import SlotBank


class Job:
    """Experts on their way into slots of one layer, while the model computes.

    The slots belong to the job until ``collect``.
    """

    def __init__(self, reader: Reader, bank: SlotBank, slots: dict[int, int]):
        self._reader, self._bank, self._slots = reader, bank, slots
        self._queued = dict(slots)
        self._running = set()
        self._took_s = {}  # seconds of each expert's read; None if it failed
        self._changed = threading.Condition()
        self._flight = None  # the reads, if they need no thread

    @property
    def experts(self) -> Collection[int]:
        """The experts that have a slot of the job."""
        return self._slots.keys()

    def begin(self, threads: int) -> None:
        """Begin to read, without a thread where that is possible, else with at most ``threads``."""
        if self._reader.direct:
            self._flight = self._reader.fly(self._bank.reads(self._slots))
        if self._flight is None:
            return self._reader.in_background(self.run, threads)
        self._order, self._running, self._queued = [*self._slots], {*self._slots}, {}

    def _land(self, needed, everything):
        """Wait for the experts that ``collect`` needs, and note all that have ended.

        Returns the seconds waited for each expert that was waited for.
        """
        waited_s, n = {}, len(self._flight) // len(self._order)
        for i, e in enumerate(self._order):
            rows, begin = (i * n, i * n + n), perf_counter()
            if e not in self._running:
                continue
            if not self._flight.done(*rows):
                if not (everything or e in needed):
                    continue
                self._flight.wait(*rows)
                waited_s[e] = perf_counter() - begin
            self._running.discard(e)
            self._took_s[e] = self._flight.took_s(*rows)
            if self._took_s[e] is not None:
                self._bank.arrived(e, self._slots[e])
        if not self._running:
            self._flight.end()
        return waited_s

    def run(self) -> None:
        """Read one expert after another until none is left, as the work of one thread."""
        while True:
            self._reader.give_way()
            with self._changed:
                if not self._queued or self._reader.closed:
                    return
                e = next(iter(self._queued))
                slot = self._queued.pop(e)
                self._running.add(e)
            begin, took_s = perf_counter(), None
            try:
                self._reader.read_here(self._bank.reads({e: slot}))
                self._bank.arrived(e, slot)
                took_s = perf_counter() - begin
            except ReadError:
                pass  # the layer that needs the expert reads it again, and may raise
            finally:
                with self._changed:
                    self._running.discard(e)
                    self._took_s[e] = took_s
                    self._changed.notify_all()

    def wait(self) -> None:
        """Wait until every read has ended."""
        if self._flight is not None:
            return self._flight.wait()
        with self._changed:
            while (self._queued or self._running) and not self._reader.closed:
                self._changed.wait(0.1)

    def collect(self, needed: set[int], everything: bool = False) -> tuple[dict, list[int], bool]:
        """Cancel the reads that have not begun, and wait for running ones: ``needed``, or all.

        Returns for each expert that arrived its slot, the seconds of its read and the seconds
        waited for it here; the slots that are free again; and whether the job has ended.
        """
        arrived = {}
        waited_s = {} if self._flight is None else self._land(needed, everything)
        with self._changed:
            free = list(self._queued.values())
            for e in self._queued:
                del self._slots[e]
            self._queued.clear()
            for e in [e for e in self._running if everything or e in needed]:
                begin = perf_counter()
                while e in self._running:
                    self._changed.wait()
                waited_s[e] = perf_counter() - begin
            for e, took_s in self._took_s.items():
                slot = self._slots.pop(e)
                if took_s is None:
                    free.append(slot)
                else:
                    arrived[e] = slot, took_s, waited_s.get(e, 0.0)
            self._took_s.clear()
            return arrived, free, not self._running
