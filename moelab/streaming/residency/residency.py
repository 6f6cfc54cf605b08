"""``Residency``: which experts are in memory, of all layers of a model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from ..config import StreamConfig
from ..counters import Counting
from ..gpu.cuda import MAILBOX_SIZE
from ..handover import Handover
from ..heap import return_free_memory
from ..reading.reader import Reader
from .ahead import Ahead
from .arriving import Arrived, as_copied, as_read
from .bank import SlotBank
from .layer import LayerSlots

# Seconds. On a CPU, a call whose experts fit is computed while others are read if the reads should
# take at least this long.
OVERLAP_S = 1e-3


class Residency:
    """Brings experts into slots, and knows for each layer which are there.

    A layer asks for the experts of a call and gets them as they arrive (``bring``). It touches no
    slot that it was not handed. Who evicts, lends, prefetches and reads ahead is decided here.

    Args:
        reader (Reader): Reads the experts of all layers.
        handover (Handover): Knows which arrays still read slots.
        counting (Counting): Counts hits, misses, waits and prefetches.
        top_k (int): K.
        overlap (bool): Whether experts are computed while others are read.

    Attributes:
        layers (list[LayerSlots]): The slots of each layer; an empty list in a mode without slots.
        ahead (Ahead): Reads experts before their layer asks for them.
        prefetches (bool): Whether the experts of a layer are prefetched while another is computed.
    """

    def __init__(
        self, reader: Reader, handover: Handover, counting: Counting, top_k: int, overlap: bool
    ):
        self._reader, self._handover, self._counting = reader, handover, counting
        self._top_k, self._overlap = top_k, overlap
        self.layers, self.prefetches = [], False
        self.ahead = Ahead(self.layers, reader, handover, counting, top_k, overlap)
        self._finish = None  # finishes the reads that the GPU waits for
        self._slot_of_all = {}  # of layers that hold every expert: [E], their slots

    def add(
        self,
        take_bank: Callable[[int], SlotBank],
        num_experts: int,
        owned: np.ndarray | None,
        config: StreamConfig,
    ) -> LayerSlots:
        """Take the slots of the next layer.

        Args:
            take_bank, num_experts, owned, config: As for ``LayerSlots``.
        """
        self.layers.append(
            LayerSlots(
                take_bank,
                num_experts,
                owned,
                config,
                self._reader,
                self._counting,
            )
        )
        return self.layers[-1]

    def bring(
        self, i: int, routed: np.ndarray, computed: Sequence[mx.array], x: mx.array
    ) -> Iterator[Arrived]:
        """Bring the experts of a call into slots, and hand them over as they arrive.

        Each expert is read at most once and handed over once. The caller computes a part, or puts
        its result into ``computed``, and then asks for the next one. When it asks, the part's slots
        may be given to other experts.

        Args:
            i (int): The layer.
            routed (np.ndarray): ``[..., K]``, the experts of the call.
            computed (Sequence[mx.array]): The results so far that are not evaluated yet.
            x (mx.array): The input of the call.

        Yields:
            Arrived: Some of the experts.

        Raises:
            ReadError: If a read fails.
        """
        own, needed = self.layers[i], list(dict.fromkeys(routed.ravel().tolist()))
        own.report()
        borrowed = self.ahead.take(i, needed)
        following = self.ahead.look(i, needed, routed.size)
        for _, slots in borrowed:
            self._counting.now.hits += len(slots)
            needed = [e for e in needed if e not in slots]
        later = []
        if own.table.fits(needed):
            held, misses = own.choose(needed)
            if not misses:  # read some others: a layer that holds all need not wait for routing
                own.read(own.table.choose(own.unread()[: self._top_k])[1])
            if not borrowed and not (misses and self._in_parts(own, len(misses))):
                yield self._all(own, held, misses, routed.size)
                return
        else:
            first, *later = own.table.waves(needed)
            held, misses = own.choose(first)
        if own.is_copied:
            mailbox = self._handover.mailbox
            yield from as_copied(own, held, misses, later, self._reader, mailbox, computed, x)
            return

        def then(busy):
            for layer in following:
                self.ahead.fill(layer, busy if own.computes_at_once else None)

        direct = self._reader.direct
        yield from as_read(own, held, misses, later, borrowed, direct, computed, then)
        self.ahead.left()

    def slots_in_graph(self, i: int, indices: mx.array) -> mx.array | None:
        """The slots of a call whose routing the host need not know.

        Args:
            i (int): The layer.
            indices (mx.array): ``[..., K]``, the experts of the call.

        Returns:
            mx.array or None: uint32, of the same shape; None if the host must know the routing.
        """
        own = self.layers[i]
        if self.prefetches or indices.shape[-1] > self._top_k:
            return None
        if own.host is not None and own.host.takes(indices):
            return own.host.slots(indices, self._counting.decoding)
        # While every expert is held no call of the layer changes a slot. Another layer's prompt may
        # take one. Only a single token's experts can be counted without knowing them.
        if not own.holds_all:
            self._slot_of_all.pop(i, None)
        if not own.holds_all or indices.size > indices.shape[-1]:
            return None
        if i not in self._slot_of_all:
            slots = [own.table.slot_of[e] for e in range(own.num_experts)]
            self._slot_of_all[i] = mx.array(slots, mx.uint32)
            mx.eval(self._slot_of_all[i])
        self._counting.now.hits += indices.size
        return self._slot_of_all[i][indices]

    def left(self, i: int, y: mx.array) -> None:
        """A layer's call has been built.

        Args:
            i (int): The layer.
            y (mx.array): Its output. Until it is evaluated it reads slots.
        """
        if self.layers[i].host is not None:
            self.layers[i].host.after = y

    def skip(self, i: int) -> None:
        """A layer's call needs no expert of this rank."""
        self.ahead.take(i, ())

    def read(self, i: int, experts: list[int]) -> None:
        """Read experts into a layer's slots, as a call does, and compute nothing.

        Args:
            i (int): The layer.
            experts (list[int]): Distinct, at most S.
        """
        own = self.layers[i]
        own.report()
        own.read(own.choose(experts)[1])

    def settle(self) -> None:
        """Wait for the reads of the layer before, if the GPU waits for them.

        Raises:
            ReadError: If one failed: what was computed since is not used.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def report(self) -> None:
        """Count what only the GPU knows so far."""
        for own in self.layers:
            own.report()

    def recover(self) -> None:
        """After a call that an exception ended: every slot is held or free. No read is running."""
        self._finish = None
        self.ahead.forget()
        for own in self.layers:
            own.recover()

    @property
    def nbytes(self) -> int:
        """Memory of the slots of all layers."""
        return sum(own.nbytes for own in self.layers)

    def resize(self, slots: int) -> None:
        """Set how many slots are in use in each layer. No layer may be computing with one.

        Args:
            slots (int): At most as many as were taken.
        """
        self._reader.stop()  # prefetches
        self._handover.settle()
        self.report()
        self.ahead.forget()
        self._slot_of_all = {}
        for own in self.layers:
            own.resize(slots)
            mx.clear_cache()
        return_free_memory()

    def _in_parts(self, own, num_misses):
        """Whether a call whose experts fit is computed while its misses are read."""
        if own.is_copied and num_misses > own.part_size:
            return True
        expected_s = self._reader.expected_s(num_misses * own.bank.expert_nbytes)
        return self._overlap and expected_s >= OVERLAP_S

    def _all(self, own, held, misses, size):
        """Bring the misses of a call, whose other experts are held, and hand over all."""
        slots = held | misses
        if not (misses and own.is_copied):
            own.read(misses)
            return Arrived(slots, own.bank, is_all=True)
        reads = own.begin(misses)
        # With a prefetcher the layer's table must be up to date before the next one.
        alone = not self.prefetches and size <= MAILBOX_SIZE
        copies = self._reader.copies(reads) if alone else None
        if copies is None:
            own.finish(misses, reads)
            return Arrived(slots, own.bank, is_all=True)
        self._finish = partial(own.finish, misses, reads)
        return Arrived(slots, own.bank, is_all=True, copies=copies)
