"""``Residency`` knows which experts of each layer are in memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from ..config import StreamConfig
from ..counters import Counting
from ..cuda import MAILBOX_SIZE
from ..handover import Handover
from ..heap import return_free_memory
from ..reading.reader import Reader
from .ahead import Ahead
from .arriving import Arrived, as_copied, as_read
from .bank import SlotBank
from .layer import LayerSlots

# Bytes. On a CPU, a call whose experts fit is computed while others are read if it reads at least
# so much, for which an SSD takes about a millisecond.
OVERLAP_NBYTES = 1024 * 1024


class Residency:
    """Brings experts into slots, and knows for each layer which are there.

    A layer asks for the experts of a call and gets them as they arrive (``bring``). It touches no
    slot that it was not handed. This class decides who evicts, prefetches and reads ahead.
    """

    def __init__(
        self, reader: Reader, handover: Handover, counting: Counting, top_k: int, overlap: bool
    ):
        self._reader, self._handover, self._counting = reader, handover, counting
        self._top_k, self._overlap = top_k, overlap
        self.layers, self.prefetches = [], False  # in a mode without slots there are no layers
        self.ahead = Ahead(self.layers, reader, handover, counting, top_k, overlap)
        self._finish = None  # finishes the reads that the GPU waits for

    def add(
        self,
        take_bank: Callable[[int], SlotBank],
        num_experts: int,
        owned: np.ndarray | None,
        config: StreamConfig,
    ) -> LayerSlots:
        """Take the slots of the next layer (see ``LayerSlots``)."""
        given = take_bank, num_experts, owned, config
        self.layers.append(LayerSlots(*given, self._reader, self._counting))
        return self.layers[-1]

    def bring(
        self, i: int, routed: np.ndarray, computed: Sequence[mx.array], x: mx.array
    ) -> Iterator[Arrived]:
        """Bring the experts of a call, ``[..., K]``, into slots; hand them over as they arrive.

        Each expert is read at most once and handed over once. The caller computes a part, or puts
        its result into ``computed`` (results not evaluated yet), and then asks for the next one.
        When it asks, the part's slots may be given to other experts.
        """
        layer, needed = self.layers[i], list(dict.fromkeys(routed.ravel().tolist()))
        layer.report()
        layer.collect_prefetched(needed)
        self.ahead.look(i, needed, routed.size)
        fits = layer.table.fits(needed)
        first, *later = [needed] if fits else layer.table.waves(needed)
        held, misses = layer.choose(first)
        if fits:
            if not misses:  # read some others: a layer with all experts need not wait for routing
                layer.read(layer.table.choose(layer.unread()[: self._top_k])[1])
            if not (misses and self._in_parts(layer, len(misses))):
                yield self._all(layer, held, misses, routed.size)
                return
        call = layer, held, misses, later, computed
        if layer.is_copied:
            yield from as_copied(*call, x, self._handover.mailbox)
        else:
            yield from as_read(*call, self.ahead.fill_next)

    def slots_in_graph(self, i: int, indices: mx.array) -> mx.array | None:
        """The slots of a call, ``[..., K]`` as its experts; None if the host must know these."""
        layer = self.layers[i]
        if self.prefetches or indices.shape[-1] > self._top_k:
            return None
        if layer.host is not None and layer.host.takes(indices):
            return layer.host.slots(indices, self._counting.decoding)
        # Only a single token's experts can be counted without knowing them.
        if not layer.holds_all or indices.size > indices.shape[-1]:
            return None
        self._counting.now.hits += indices.size
        return layer.slot_of_all[indices]

    def left(self, i: int, y: mx.array) -> None:
        """Note that a layer's call is built; its output ``y`` reads slots until it is evaluated."""
        if self.layers[i].host is not None:
            self.layers[i].host.after = y

    def skip(self, i: int) -> None:
        """Note that a layer's call needs no expert of this rank."""
        self.layers[i].collect_prefetched(())

    def read(self, i: int, experts: list[int]) -> None:
        """Read at most S distinct experts into a layer's slots as a call does; compute nothing."""
        layer = self.layers[i]
        layer.report()
        layer.read(layer.choose(experts)[1])

    def settle(self) -> None:
        """Wait for the reads of the layer before, if the GPU waits for them.

        If one failed, it raises ``ReadError``, and the results computed since must not be used.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def report(self) -> None:
        """Count the hits and misses that only the GPU knows so far."""
        for layer in self.layers:
            layer.report()

    def recover(self) -> None:
        """Make every slot held or free after an exception. No read may be running."""
        self._finish = None
        for layer in self.layers:
            layer.recover()

    @property
    def nbytes(self) -> int:
        """The bytes of memory of all layers' slots."""
        return sum(layer.nbytes for layer in self.layers)

    def resize(self, slots: int) -> None:
        """Use so many slots in each layer, at most as many as were taken.

        No layer may be computing with one.
        """
        self._reader.stop()  # this ends prefetches
        self._handover.settle()
        self.report()
        for layer in self.layers:
            layer.resize(slots)
            mx.clear_cache()
        return_free_memory()

    def _in_parts(self, layer, num_misses):
        """Whether a call whose experts fit is computed while its misses are read."""
        if layer.is_copied and num_misses > layer.part_size(num_misses):
            return True
        return self._overlap and num_misses * layer.bank.expert_nbytes >= OVERLAP_NBYTES

    def _all(self, layer, held, misses, size):
        """Bring the missing experts of a call, and hand over all its experts at once."""
        slots = held | misses
        # With a prefetcher the layer's table must be up to date before the next one.
        if misses and layer.is_copied and not self.prefetches and size <= MAILBOX_SIZE:
            reads = layer.begin(misses)
            if (copies := reads.in_graph()) is not None:
                self._finish = partial(layer.finish, misses, reads)
                return Arrived(slots, layer.bank, is_all=True, copies=copies)
            layer.finish(misses, reads)
        else:
            layer.read(misses)
        return Arrived(slots, layer.bank, is_all=True)
