"""``Residency``: which experts are in memory, of all layers of a model."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ...memory import memory_available
from ..config import StreamConfig
from ..counters import Counting
from ..gpu.cuda import MAILBOX_SIZE, Copy
from ..handover import Handover
from ..heap import return_free_memory
from ..reading.reader import Reader
from .bank import SlotBank
from .job import Job
from .layer import LayerSlots

# Seconds. Overlap compute with reads only when the reads should take at least this long.
OVERLAP_S = 1e-3
# A prompt lets the system read ahead if it has so many (token, expert) pairs for each expert, and
# if the layer before needed at least this share of its experts.
AHEAD_PAIRS, AHEAD_SHARE = 2, 0.5
# Seconds. Below this predicted read time one prefetch thread is enough: handing the work to more
# threads would take as long as the reads.
HANDOVER_S = 1e-4


class Arrived(NamedTuple):
    """Experts of a call that are in slots.

    Attributes:
        slots (dict[int, int]): The slot of each expert.
        bank (SlotBank): Whose slots these are.
        is_all (bool): Whether these are all the experts of the call.
        copies (Sequence[Copy]): With ``is_all``: what the GPU has yet to copy into the slots.
        after (mx.array or None): A zero: what depends on it is computed when the GPU has copied
            the experts.
    """

    slots: dict[int, int]
    bank: SlotBank
    is_all: bool = False
    copies: Sequence[Copy] = ()
    after: mx.array | None = None


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
        prefetches (bool): Whether ``prefetch`` is called after each layer.
    """

    def __init__(
        self, reader: Reader, handover: Handover, counting: Counting, top_k: int, overlap: bool
    ):
        self._reader, self._handover, self._counting = reader, handover, counting
        self._top_k, self._overlap = top_k, overlap
        self.layers, self.prefetches = [], False
        self._filling = None  # the layer for which slots are being filled
        self._left_s = 0.0  # when a prompt left a layer's experts, or began; as perf_counter
        self._between_s = 0.0  # from there to the next layer's experts: of attention
        self._unfinished = None  # finishes the reads that the GPU waits for
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
            take_bank, num_experts, owned: As for ``LayerSlots``.
            config (StreamConfig): Its slots and its policy.
        """
        self.layers.append(
            LayerSlots(
                take_bank,
                num_experts,
                owned,
                config.policy,
                config.slots,
                self._reader,
                self._counting,
            )
        )
        return self.layers[-1]

    # What a layer asks for

    def bring(
        self, i: int, routed: np.ndarray, computed: Sequence[mx.array], x: mx.array
    ) -> Iterator[Arrived]:
        """Bring the experts of a call into slots, and hand them over as they arrive.

        Each expert is read once and handed over once. Its slot may take another one as soon as the
        next part is asked for: then the part has been computed, or its result is in ``computed``.

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
        own.collect_prefetched(needed)
        if self._filling not in (None, i):  # the layers were not called in order
            self.end_fill(self._filling)
        borrowed = []
        if own.fills:
            borrowed = self.end_fill(i, {*needed} if own.computes_at_once else ())
        following = self._look_ahead(i, needed, routed.size)
        for _, slots in borrowed:
            self._counting.now.hits += len(slots)
            needed = [e for e in needed if e not in slots]
        later = []
        if own.table.fits(needed):
            held, misses = own.choose(needed)
            if not misses:  # the call has time: a layer that holds all need not wait for routing
                own.read(own.table.choose(own.unread()[: self._top_k])[1])
            if not borrowed and not (misses and self._in_parts(own, len(misses))):
                yield self._all(own, held, misses, routed.size)
                return
        else:
            first, *later = own.table.waves(needed)
            held, misses = own.choose(first)
        if own.is_copied:
            yield from self._as_copied(own, held, misses, later, computed, x)
        else:
            yield from self._as_read(own, held, misses, later, computed, borrowed, following)

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
        # Once every expert is held no slot changes any more. Only a single token's experts can be
        # counted without knowing them.
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
        self.layers[i].collect_prefetched([])
        self.end_fill(i)

    def read(self, i: int, experts: list[int]) -> None:
        """Read experts into a layer's slots, as a call does, and compute nothing.

        Args:
            i (int): The layer.
            experts (list[int]): Distinct, at most S.
        """
        own = self.layers[i]
        own.report()
        own.read(own.choose(experts)[1])

    def prefetch(self, i: int, experts: Iterable[int]) -> None:
        """Begin to read experts that may be needed and are not held.

        Does nothing while an earlier prefetch is running, or if the experts do not all fit.

        Args:
            i (int): The layer.
            experts (Iterable[int]): Distinct.
        """
        own = self.layers[i]
        experts = own.of_rank(experts)
        if own.job is not None or not own.table.fits(experts):
            return
        self._settle_one_layer()
        slots = own.table.reserve(experts)
        if not slots:
            return
        self._counting.now.prefetch_issued += len(slots)
        own.job = Job(self._reader, own.bank, slots)
        quick = self._reader.expected_s(len(slots) * own.bank.expert_nbytes) < HANDOVER_S
        self._reader.in_background(own.job.run, 1 if quick else len(slots))

    # What the session asks for

    def expect(self, tokens: int) -> None:
        """Get ready for a prompt, before its first layer is computed.

        Args:
            tokens (int): Its length.
        """
        self._left_s = perf_counter()
        if not self.layers:
            return
        own = self.layers[0]
        share = own.num_owned / own.num_experts  # with ranks: of the pairs, too
        if not self._is_long(own, tokens * self._top_k * share):
            return
        if self._reader.direct:
            self._fill(0, {} if own.computes_at_once else None)
        else:
            self._read_ahead(own, range(own.num_experts), memory_available() // 2)

    def settle(self) -> None:
        """Wait for the reads of the layer before, if the GPU waits for them.

        Raises:
            ReadError: If one failed: what was computed since is not used.
        """
        finish, self._unfinished = self._unfinished, None
        if finish is not None:
            finish()

    def report(self) -> None:
        """Count what only the GPU knows so far."""
        for own in self.layers:
            own.report()

    def recover(self) -> None:
        """After a call that an exception ended: end all reads, make every slot held or free."""
        self._unfinished = self._filling = None
        for own in self.layers:
            own.recover()

    @property
    def nbytes(self) -> int:
        """Memory of the slots of all layers."""
        return sum(own.nbytes for own in self.layers)

    def resize(self, slots: int) -> None:
        """Set how many slots are in use in each layer. No call may be computing with one.

        Args:
            slots (int): At most as many as were taken.
        """
        self._reader.stop()  # prefetches
        self._handover.settle()
        self._filling, self._slot_of_all = None, {}
        for own in self.layers:
            own.resize(slots)
            mx.clear_cache()
        return_free_memory()

    # How experts arrive

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
        self._unfinished = partial(own.finish, misses, reads)
        return Arrived(slots, own.bank, is_all=True, copies=copies)

    def _as_read(self, own, held, misses, later, computed, borrowed, following):
        """Hand over the experts that are held, and the others as their reads end.

        Then those of ``later``. Where reads go past the page cache and a part is computed at once,
        a slot takes a later expert as soon as its own is computed. Else the system reads ahead, and
        whole waves take less time (8% of a prompt of 400 tokens, cold, 35B layers, 64 slots, n=8).

        Args:
            held, misses (dict[int, int]): As ``LayerSlots.choose`` returned them.
            later (list[list[int]]): The experts of later waves.
            borrowed (list): As ``end_fill`` returned it.
            following (list[int]): The layer that takes the slots that this one no longer needs.
        """
        later, S = [e for wave in later for e in wave], own.table.num_slots
        direct = self._reader.direct and own.computes_at_once
        size = min(S, own.parts_of(S)) if direct else S
        ready, reading = held, deque()

        def begin(misses):
            reading.extend((part, own.begin(part)) for part in own.parts(misses))

        begin(misses)
        borrowed = deque((other, part) for other, slots in borrowed for part in own.parts(slots))
        while ready or reading or borrowed:
            waits = not (ready or borrowed)
            while reading and (waits or all(future.done() for future in reading[0][1])):
                part, reads = reading.popleft()
                own.finish(part, reads)
                ready, waits = ready | part, False
            if borrowed:
                other, part = borrowed.popleft()
                yield Arrived(part, other.bank)
                other.table.release(part.values())
            # All that has arrived. If no read is running, one part: its slots are free after it.
            few = later and direct and not reading
            now = dict(islice(ready.items(), size)) if few else ready
            ready = {e: slot for e, slot in ready.items() if e not in now}
            if now:
                yield Arrived(now, own.bank)
            busy = ready | {e: slot for part, _ in reading for e, slot in part.items()}
            while later and own.table.fits(later[:size], len(busy)):
                mx.eval(computed)  # from slots that are about to be overwritten
                begin(own.choose(later[:size], busy)[1])
                del later[:size]
                busy = ready | {e: slot for part, _ in reading for e, slot in part.items()}
            for layer in [] if later else following:
                self._fill(layer, busy if own.computes_at_once else None)
        self._left_s = perf_counter()

    def _as_copied(self, own, held, misses, later, computed, x):
        """Hand over the experts that are held, and the others as soon as they have been read.

        The GPU copies a part behind the arithmetic that was scheduled before, which reads the same
        slots, so only the reads are waited for.
        """
        zero = None
        for hits, missing in chain([(held, misses)], map(own.choose, later)):
            if hits:
                yield Arrived(hits, own.bank, after=zero)
            parts = deque(own.parts(missing))
            begun = own.begin(parts[0]) if parts else None
            while parts:
                part, reads = parts.popleft(), begun
                begun = own.begin(parts[0]) if parts else None
                copies = self._reader.copies(reads)
                if copies is None:
                    mx.eval(computed)
                    own.finish(part, reads)
                    yield Arrived(part, own.bank, after=zero)
                else:
                    after = computed[-1] if computed else x
                    zero = self._handover.mailbox.copy_after(copies, after)
                    yield Arrived(part, own.bank, after=zero)
                    own.finish(part, reads)

    # What is read before it is asked for

    def _is_long(self, own, pairs):
        """Whether a call of so many (token, expert) pairs reads ahead: it needs most experts.

        Not on a GPU: an H200's prompts wait for Python more than for the disk, and a thread that
        asks for ranges takes its time (400 tokens, cold: 3.3 s with it, 2.9 without, n=6).
        """
        return self._overlap and pairs >= AHEAD_PAIRS * own.num_owned

    def _look_ahead(self, i, needed, pairs):
        """Let the system read what this call and the next layer's will need, if it is long.

        Returns:
            list[int]: The next layer, if its experts are read past the page cache.
        """
        own = self.layers[i]
        if not self._is_long(own, pairs) or len(needed) < AHEAD_SHARE * own.num_owned:
            return []
        following = [i + 1] if i + 1 < len(self.layers) else []
        if self._reader.direct:
            self._between_s = perf_counter() - self._left_s
            return following
        room = memory_available() // 2  # pages must still be there when they are needed
        room -= self._read_ahead(own, needed, room)
        for layer in following:
            self._read_ahead(self.layers[layer], range(self.layers[layer].num_experts), room)
        return []

    def _read_ahead(self, own, experts, nbytes):
        """Let the system read experts that are not held into the page cache.

        Args:
            own (LayerSlots): Of their layer.
            experts (Iterable[int]): Those that will be needed, in this order.
            nbytes (int): At most so many of their bytes.

        Returns:
            int: The bytes.
        """
        experts = [e for e in own.of_rank(experts) if e not in own.table.slot_of]
        experts = experts[: max(0, nbytes // own.bank.expert_nbytes)]
        self._reader.read_ahead(own.bank.places(experts))
        return len(experts) * own.bank.expert_nbytes

    def _fill(self, i: int, busy: Mapping[int, int] | None = None) -> None:
        """Begin to read experts into slots that hold none: a prompt needs nearly all experts.

        Args:
            i (int): The layer of the experts.
            busy (Mapping[int, int] or None): If given, free slots of other layers are filled, too.
                If attention takes longer than the reads, earlier layers' experts, which the
                prompt no longer needs, are evicted to make room. Not evicted are ``busy`` (expert
                to slot), which the layer before this one has not computed yet. Only the fast
                kernels compute experts in other layers' slots.
        """
        own, experts = self.layers[i], self.layers[i].missing()
        self._settle_one_layer()
        lenders = [(own, None)]
        if busy is not None:
            front, behind = self.layers[:i], self.layers[i + 1 :]
            lenders += [(other, None) for other in (*front[:-1], *behind[:0:-1])]
            num = len(experts) + sum(len(job.experts) for _, job in own.fills)
            if self._reader.expected_s(num * own.bank.expert_nbytes) < self._between_s:
                lenders += [(other, busy if other is front[-1] else {}) for other in front]
            lenders += [(other, None) for other in behind[:1]]  # it needs them next
        for other, needed in lenders:
            if not experts or not other.bank.can_hold(own.bank):
                continue
            if slots := other.table.set_aside(len(experts), needed):
                some, experts = experts[: len(slots)], experts[len(slots) :]
                job = Job(self._reader, other.bank, dict(zip(some, slots)), own.bank)
                own.fills.append((other, job))
                self._filling = i
                self._counting.now.prefetch_issued += len(slots)
                self._reader.in_background(job.run, len(slots))

    def end_fill(
        self, i: int, needed: Collection[int] = ()
    ) -> list[tuple[LayerSlots, dict[int, int]]]:
        """End what ``_fill`` began. Experts in the layer's own slots are held from then on.

        Args:
            i (int): The layer of the experts.
            needed (Collection[int]): Experts that stay in other layers' slots until the caller has
                computed them and releases these slots. All other slots are released here.

        Returns:
            list[tuple[LayerSlots, dict[int, int]]]: Other layers, and the slots of such experts.
        """
        own, borrowed = self.layers[i], []
        self._filling = None
        while own.fills:
            other, job = own.fills.pop(0)
            arrived, free, _ = job.collect(needed, everything=True)
            other.table.release(free)
            arrived = own.count_prefetched(arrived, needed)
            if other is own:
                for e, slot in arrived.items():
                    own.table.keep(e, slot)
                continue
            other.table.release(slot for e, slot in arrived.items() if e not in needed)
            borrowed.append((other, {e: slot for e, slot in arrived.items() if e in needed}))
        return borrowed

    def _settle_one_layer(self):
        if len(self.layers) == 1:  # with several, the calls of the others have evaluated it
            mx.eval(self._handover.pending)
