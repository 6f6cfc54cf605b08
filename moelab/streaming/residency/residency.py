"""``Residency`` knows which experts of each layer are in memory."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from ...memory import memory_available, return_free_memory
from ..counters import Counting
from ..cuda import MAILBOX_SIZE
from ..handover import Handover
from ..reading.reader import Reader
from .arriving import Arrived, as_copied, as_read
from .job import Job
from .layer import LayerSlots

# The experts of a prompt are read ahead if it has so many (token, expert) pairs for each expert,
# and if the layer before needed at least this share of its experts.
AHEAD_PAIRS, AHEAD_SHARE = 2, 0.5


class Residency:
    """Brings experts into slots, and knows for each layer which are there.

    A layer asks for the experts of a call and gets them as they arrive (``bring``). It touches no
    slot that it was not handed. This class decides who evicts, prefetches and reads ahead. What a
    prompt will need is read into the page cache, or past it into its layer's free slots.
    """

    def __init__(
        self, reader: Reader, handover: Handover, counting: Counting, top_k: int, overlap: bool
    ):
        self._reader, self._handover, self._counting = reader, handover, counting
        self._top_k, self._overlap = top_k, overlap
        self.layers, self.prefetches = [], False  # in a mode without slots there are no layers
        self._finish = None  # finishes the reads that the GPU waits for
        self._next = None  # the layer whose free slots are filled during this call

    def add(self, *given) -> LayerSlots:
        """Take the slots of the next layer, given the first four arguments of ``LayerSlots``."""
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
        fits = layer.table.fits(needed)
        flies = fits and self._overlap and not layer.is_copied
        flying = layer.collect_prefetched(needed, wait=not flies)
        self._look(i, needed, routed.size)
        first, *later = [needed] if fits else layer.table.waves(needed)
        held, misses = layer.choose(first)
        if fits:
            if not misses:  # read some others: a layer with all experts need not wait for routing
                layer.read(layer.table.choose(layer.unread()[: self._top_k])[1])
            if not flying and not (misses and self._in_parts(layer, len(misses))):
                yield self._all(layer, held, misses, routed.size)
                return
        call = layer, held, misses, later, computed
        if layer.is_copied:
            yield from as_copied(*call, x, self._handover.mailbox)
        else:
            yield from as_read(*call, self._fill_next, flying)

    def prefetch(self, i: int, experts: Iterable[int], kept: Collection[int] = ()) -> None:
        """Begin to read experts, if all fit and no prefetch runs; ``kept`` ones are not evicted."""
        layer = self.layers[i]
        layer.collect_prefetched(())  # what the last call did not need
        experts = layer.of_rank(experts)
        if layer.job is None and layer.table.fits(experts):
            self._begin(layer, experts, kept)

    def expect(self, tokens: int) -> None:
        """Begin to read for a prompt of so many tokens, before its first layer is computed."""
        for layer in self.layers[:1]:
            # A rank's share of the experts is also its share of the pairs.
            if not self._is_long(layer, tokens * self._top_k * layer.num_owned / layer.num_experts):
                return
            if self._reader.direct:
                self._fill(layer)
            else:
                self._read_ahead(layer, range(layer.num_experts), memory_available() // 2)

    def slots_in_graph(self, i: int, indices: mx.array) -> mx.array | None:
        """The slots of a call's experts, ``[..., K]``; None if the host must know the experts."""
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

    def read(self, i: int, experts: list[int]) -> None:
        """Read at most S distinct experts into a layer's slots as a call does; compute nothing."""
        layer = self.layers[i]
        layer.report()
        layer.read(layer.choose(experts)[1])

    def settle(self) -> None:
        """Wait for reads that the GPU waits for. After a ``ReadError`` its results are wrong."""
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
        return sum(layer.bank.nbytes for layer in self.layers)

    def resize(self, slots: int) -> None:
        """Use so many slots in each layer, at most as many as were taken. No layer may run."""
        self._reader.stop()  # this ends prefetches
        self._handover.settle()
        self.report()
        for layer in self.layers:
            layer.resize(slots)
            mx.clear_cache()
        return_free_memory()

    def _in_parts(self, layer, num_misses):
        """Whether a call whose experts fit is computed while its misses are read."""
        size = layer.part_size(num_misses)
        return num_misses > size if layer.is_copied else self._overlap and num_misses >= size

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

    def _look(self, i, needed, pairs):
        """Ask the system to read the experts of a long call, and of the next layer's call.

        If reads go past the page cache, ``_fill_next`` will read those of the next layer's call.
        """
        layer, following, self._next = self.layers[i], self.layers[i + 1 : i + 2], None
        if not self._is_long(layer, pairs) or len(needed) < AHEAD_SHARE * layer.num_owned:
            return
        if self._reader.direct:
            self._next = next(iter(following), None)
            return
        room = memory_available() // 2  # pages must still be there when they are needed
        room -= self._read_ahead(layer, needed, room)
        for other in following:
            self._read_ahead(other, range(other.num_experts), room)

    def _fill_next(self):
        """Begin to read what a prompt needs in the layer after the one of the last ``_look``."""
        if self._next is not None:
            self._fill(self._next)

    def _is_long(self, layer, pairs):
        """Whether a call of so many (token, expert) pairs needs most experts and so reads ahead.

        On a GPU it does not: prompts wait for Python there more than for the disk, and a thread
        that asks for ranges holds Python up.
        """
        return self._overlap and pairs >= AHEAD_PAIRS * layer.num_owned

    def _read_ahead(self, layer, experts, nbytes):
        """Ask the system to cache experts in no slot, at most so many bytes; return their bytes."""
        experts = layer.missing(experts)[: max(0, nbytes // layer.bank.expert_nbytes)]
        self._reader.read_ahead(layer.bank.places(experts))
        return len(experts) * layer.bank.expert_nbytes

    def _fill(self, layer):
        """Begin to read missing experts into a layer's free slots, as a prompt needs nearly all."""
        if layer.job is None:
            experts = layer.missing(range(layer.num_experts))
            self._begin(layer, experts[: layer.table.num_free])

    def _begin(self, layer, experts, kept=()):
        """Begin to read those of the experts that are not held and for which there are slots."""
        if len(self.layers) == 1:  # else other layers' calls evaluated its readers
            mx.eval(self._handover.pending)
        if slots := layer.table.reserve(experts, kept):
            layer.job = Job(self._reader, layer.bank, slots, self._counting.now)
