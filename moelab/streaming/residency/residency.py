"""``Residency`` knows which experts of each layer are in memory."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ...memory import memory_available, return_free_memory
from ..counters import Counting
from ..cuda import MAILBOX_SIZE, Copy, Handover
from ..reading.reader import Reader
from .bank import SlotBank
from .layer import PART_NBYTES

# The experts of a prompt are read ahead if the prompt has at least ``AHEAD_PAIRS`` (token, expert)
# pairs for each expert, and if the layer before needed at least ``AHEAD_SHARE`` of its experts.
AHEAD_PAIRS, AHEAD_SHARE = 2, 0.5


class Arrived(NamedTuple):
    """Experts of a call that are in slots."""

    slots: dict[int, int]  # expert to slot
    bank: SlotBank  # the bank that has these slots
    is_all: bool = False  # whether these are all the experts of the call
    copies: Sequence[Copy] = ()  # with ``is_all``: copies that the GPU makes before it computes
    # A zero, computed after the GPU has copied the experts; results that use it wait for them.
    after: mx.array | None = None


class Pairs:
    """The (token, expert) pairs of a call whose routing is ``[..., K]``."""

    def __init__(self, routed: np.ndarray):
        self.shape, self.size, self._flat = routed.shape, routed.size, routed.ravel().tolist()
        self.needed = [*dict.fromkeys(self._flat)]  # the distinct experts, in order of first use

    @cached_property
    def _places(self):
        """The places of each expert's pairs in the call."""
        places = {e: [] for e in self.needed}
        for i, e in enumerate(self._flat):
            places[e].append(i)
        return places

    def of(self, arrived: Arrived) -> tuple[np.ndarray, np.ndarray]:
        """For the pairs whose experts arrived, return their places in the call and their slots."""
        if arrived.is_all:
            return np.arange(self.size), np.array([arrived.slots[e] for e in self._flat])
        places = [i for e in arrived.slots for i in self._places[e]]
        return np.array(places), np.array([arrived.slots[self._flat[i]] for i in places])


class Residency:
    """Decides when experts are read, also ahead of a call, and brings them into slots."""

    def __init__(
        self, reader: Reader, handover: Handover, counting: Counting, top_k: int, overlap: bool
    ):
        self._reader, self._handover, self._counting = reader, handover, counting
        self._top_k, self._overlap = top_k, overlap
        self.layers, self.prefetches = [], False  # in a mode without slots there are no layers
        self._finish = None  # finishes the reads that the GPU waits for

    def bring(
        self, i: int, pairs: Pairs, computed: Sequence[mx.array], x: mx.array
    ) -> Iterator[Arrived]:
        """Bring a call's experts into slots; yield each expert once, in parts, as they arrive.

        A part's slots may get other experts once the caller asks for the next part. So the caller
        first computes with the part, or puts a lazy result into ``computed``.
        """
        layer, needed = self.layers[i], pairs.needed
        layer.report()
        layer.collect(needed)
        self._look(i, needed, pairs.size)
        table, after, missing = layer.table, None, layer.missing(needed)
        at_once = table.fits(needed) and len(missing) <= layer.most
        if at_once and not missing and not layer.awaited:
            held, _ = layer.choose(needed)
            # Read a few others, too: once all experts are in slots, no call waits for its routing.
            if some := layer.unread()[: self._top_k]:
                layer.read(table.choose(some)[1])
            yield Arrived(held, layer.bank, is_all=True)
            return
        held = [e for e in needed if e in table.slot_of]
        while held or missing or layer.awaited:
            ready, flying = {}, {e for group in layer.awaited for e in group.slots}
            n, m = (len(held), len(missing)) if at_once else self._room(layer, held, flying)
            now, held, missing = held[:n] + missing[:m], held[n:], missing[m:]
            if now:
                if computed and not layer.is_copied:
                    mx.eval(computed)  # lazy results read slots that are about to be overwritten
                hits, misses = layer.choose(now, flying.union(held).difference(now))
                layer.begin(misses)
                ready = {e: slot for e, slot in hits.items() if e not in flying}
            if now and at_once and not self._in_parts(layer):
                yield self._all(layer, hits | misses, pairs.size)
                return
            if ready or not layer.is_copied:
                most = (layer.part if missing else table.num_slots) if self._overlap else None
                yield Arrived(ready or layer.land(most), layer.bank, after=after)
            elif now and missing and layer.host is None and len(layer.awaited) < 2:
                continue  # begin to read the next experts before waiting for these
            else:
                group = layer.awaited[0]
                if (copies := group.reads.in_graph()) is None:
                    mx.eval(computed)
                    layer.finish(group)
                else:
                    after = self._handover.mailbox.copy(copies, computed[-1] if computed else x)
                yield Arrived(group.slots, layer.bank, after=after)
                if copies is not None:
                    layer.finish(group)

    def prefetch(self, i: int, experts: Iterable[int], kept: Collection[int] = ()) -> None:
        """Begin to read experts, if all fit and no prefetch runs; ``kept`` ones are not evicted."""
        layer = self.layers[i]
        layer.collect(())  # take over what the last call did not need
        experts = layer.of_rank(experts)
        if layer.ahead or not layer.table.fits(experts):
            return
        if len(self.layers) == 1:  # another layer's call has done this if there are more layers
            mx.eval(self._handover.pending)
        if slots := layer.table.reserve(experts, kept):
            layer.begin_ahead(slots)

    def expect(self, tokens: int) -> None:
        """Read ahead for a prompt of ``tokens`` tokens, before its first layer is computed."""
        for layer in self.layers[:1]:
            # A rank's share of the experts is also its share of the pairs.
            if self._is_long(layer, tokens * self._top_k * layer.num_owned / layer.num_experts):
                self._read_ahead(layer, range(layer.num_experts), memory_available() // 2)

    def slots_in_graph(self, i: int, indices: mx.array) -> mx.array | None:
        """The slots of a call's experts, ``[..., K]``; None if the host has to see the routing."""
        layer = self.layers[i]
        if self.prefetches or indices.shape[-1] > self._top_k:
            return None
        if layer.host is not None and layer.host.takes(indices):
            return layer.host.slots(indices, self._counting.decoding)
        # One token has K hits. Tokens may share experts: then only the host can count the hits.
        if not layer.holds_all or indices.size > indices.shape[-1]:
            return None
        self._counting.now.hits += indices.size
        return layer.slot_of_all[indices]

    def left(self, i: int, y: mx.array) -> None:
        """Note the output ``y`` of a layer's call: ``y`` reads slots until it is evaluated."""
        if self.layers[i].host is not None:
            self.layers[i].host.after = y

    def settle(self) -> None:
        """Wait for reads that the GPU waits for. If a read failed, the GPU's results are wrong."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def report(self) -> None:
        """Count the hits and misses that only the GPU knows so far."""
        for layer in self.layers:
            layer.report()

    def recover(self) -> None:
        """After an error, free the slots that were being filled. No read may be running."""
        self._finish = None
        for layer in self.layers:
            layer.recover()

    @property
    def nbytes(self) -> int:
        """The bytes of memory of all layers' slots."""
        return sum(layer.bank.nbytes for layer in self.layers)

    def resize(self, slots: int) -> None:
        """Use ``slots`` slots in each layer, at most as many as at first. No layer may run."""
        self._reader.stop()  # this ends prefetches
        self._handover.settle()
        self.report()
        for layer in self.layers:
            layer.resize(slots)
            mx.clear_cache()
        return_free_memory()

    def _room(self, layer, held, flying):
        """How many ``held`` and how many missing experts to take next, while others are flying."""
        free = layer.table.num_slots - len(flying.union(held))
        if layer.refills:
            return layer.part, min(free, max(0, layer.most - len(flying)))
        few = len(layer.awaited) < 2 if layer.is_copied else not flying
        return (len(held), min(free, layer.most)) if few else (0, 0)

    def _in_parts(self, layer):
        """Whether a call whose experts all fit is computed in parts, while its misses are read."""
        flying = sum(len(group.slots) for group in layer.awaited)
        is_worth_it = flying >= max(1, PART_NBYTES // layer.bank.expert_nbytes)
        return self._overlap and not layer.is_copied and is_worth_it

    def _all(self, layer, slots, size):
        """Return all experts of a call; either the GPU or this thread waits for the reads."""
        copies = None
        # Prefetches need an up-to-date table, so a model with a prefetcher finishes the reads here.
        if layer.is_copied and layer.awaited and not self.prefetches and size <= MAILBOX_SIZE:
            copies = layer.awaited[0].reads.in_graph()
        if copies is None:
            layer.land()
        else:
            self._finish = layer.land
        return Arrived(slots, layer.bank, is_all=True, copies=copies or ())

    def _look(self, i, needed, pairs):
        """Ask the system to read the experts of a long call, and of the next layer's call."""
        layer = self.layers[i]
        if not self._is_long(layer, pairs) or len(needed) < AHEAD_SHARE * layer.num_owned:
            return
        room = memory_available() // 2  # so that the pages stay cached until they are needed
        room -= self._read_ahead(layer, needed, room)
        for other in self.layers[i + 1 : i + 2]:
            self._read_ahead(other, range(other.num_experts), room)

    def _is_long(self, layer, pairs):
        """Whether a call of ``pairs`` (token, expert) pairs is long enough to read ahead."""
        # Direct reads bypass what is read ahead. On a GPU a prompt waits more for Python than for
        # the disk, and a thread that asks for ranges slows Python.
        ahead = self._overlap and not self._reader.direct
        return ahead and pairs >= AHEAD_PAIRS * layer.num_owned

    def _read_ahead(self, layer, experts, nbytes):
        """Ask the system to cache experts that have no slot, up to ``nbytes``; return the bytes."""
        experts = layer.missing(experts)[: max(0, nbytes // layer.bank.expert_nbytes)]
        self._reader.read_ahead(layer.bank.places(experts))
        return len(experts) * layer.bank.expert_nbytes
