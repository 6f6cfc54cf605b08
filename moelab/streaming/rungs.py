"""The rungs below slots: ``serial`` and ``buffers``, which hold no expert for a later token."""

import mlx.core as mx

from .layers import Parts, StreamedExperts
from .residency.arriving import Arrived


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
        self._bank = self._take_bank(session.top_k)

    def _compute(self, x, indices, routed):
        parts, K = Parts(x, routed, self._least_rows), self._bank.num_slots
        experts = list(parts.of_expert)
        for first in range(0, len(experts), K):
            mx.eval(parts.computed)  # the buffers are about to be overwritten
            for e, buffer in self.read(experts[first : first + K]).items():
                parts.add(Arrived({e: buffer}, self._bank))
        return parts.result()

    def read(self, experts: list[int]) -> dict[int, int]:
        """Read at most K distinct experts as a call does; return the buffer of each."""
        buffers = {e: i for i, e in enumerate(experts)}
        with self.session.counting.read_wait():
            self.session.reader.read(self._bank.reads(buffers))
        self.session.counters.misses += len(buffers)
        for e, buffer in buffers.items():
            self._bank.arrived(e, buffer)
        return buffers
