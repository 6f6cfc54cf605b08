"""The rungs below slots: ``serial`` and ``buffers``, which hold no expert for a later token."""

import mlx.core as mx

from .layers import Parts, StreamedExperts
from .residency.arriving import Arrived
from .residency.bank import SlotBank


class Serial(StreamedExperts):
    """Read and compute one expert after another, each into new arrays.

    SwiftLM's first ``--stream-experts``: every read waits for the computation before it.
    """

    def _compute(self, x, indices, routed):
        parts = Parts(x, routed, self._least_rows)
        for e in parts.of_expert:
            bank = self._take_bank(1)
            with self.session.counting.read_wait():
                for read in bank.reads({e: 0}):  # one range after another
                    self.session.reader.read(read)
            bank.arrived(e, 0)
            self.session.counters.misses += 1
            mx.eval(parts.add(Arrived({e: 0}, bank)))
        return parts.result()


class Buffers(StreamedExperts):
    """Keep one buffer for each top-k position, and read K experts together.

    An expert is read again for the next token, from the page cache if it is there. This is SwiftLM
    PR 26.
    """

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        self._banks = tuple(self._take_bank(1) for _ in range(session.top_k))

    def _compute(self, x, indices, routed):
        parts = Parts(x, routed, self._least_rows)
        experts = list(parts.of_expert)
        for first in range(0, len(experts), len(self._banks)):
            mx.eval(parts.computed)  # the buffers are about to be overwritten
            for bank, e in self.read(experts[first : first + len(self._banks)]):
                parts.add(Arrived({e: 0}, bank))
        return parts.result()

    def read(self, experts: list[int]) -> list[tuple[SlotBank, int]]:
        """Read at most K distinct experts as a call does; return each buffer with its expert."""
        wave = list(zip(self._banks, experts))
        with self.session.counting.read_wait():
            begun = [self.session.reader.start(bank.reads({e: 0})) for bank, e in wave]
            for reads in begun:
                self.session.reader.finish(reads)
        self.session.counters.misses += len(wave)
        for bank, e in wave:
            bank.arrived(e, 0)
        return wave
