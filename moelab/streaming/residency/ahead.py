"""Experts that are read before their layer asks for them."""

from collections.abc import Collection, Iterable, Mapping
from time import perf_counter

import mlx.core as mx

from ...memory import memory_available
from ..counters import Counting
from ..handover import Handover
from ..reading.reader import Reader
from .job import Job
from .layer import LayerSlots

# The experts of a prompt are read ahead if it has so many (token, expert) pairs for each expert,
# and if the layer before needed at least this share of its experts.
AHEAD_PAIRS, AHEAD_SHARE = 2, 0.5
# Seconds. Below this predicted read time one prefetch thread is enough: handing the work to more
# threads would take as long as the reads.
HANDOVER_S = 1e-4


class Ahead:
    """Reads experts that the next layer may need, or that a prompt will need, if they fit.

    A prompt's experts go into the page cache, or past it into slots: the layer's free ones, and
    slots that other layers do not need while the prompt is computed.
    """

    def __init__(
        self,
        layers: list[LayerSlots],
        reader: Reader,
        handover: Handover,
        counting: Counting,
        top_k: int,
        overlap: bool,
    ):
        self._layers, self._reader, self._handover = layers, reader, handover
        self._counting, self._top_k, self._overlap = counting, top_k, overlap
        self._filling = None  # the layer for which slots are being filled
        self._next = None  # the layer for which ``fill_next`` fills slots
        self._left_s = 0.0  # the time when a prompt left a layer's experts, or began
        self._between_s = 0.0  # seconds from there to the next layer's experts: its attention

    def prefetch(self, i: int, experts: Iterable[int]) -> None:
        """Begin to read distinct experts that may be needed and are not held.

        It does nothing while an earlier prefetch is running, or if the experts do not all fit.
        """
        layer = self._layers[i]
        experts = layer.of_rank(experts)
        if layer.job is not None or not layer.table.fits(experts):
            return
        self._settle_one_layer()
        slots = layer.table.reserve(experts)
        if not slots:
            return
        self._counting.now.prefetch_issued += len(slots)
        layer.job = Job(self._reader, layer.bank, slots)
        quick = self._reader.expected_s(len(slots) * layer.bank.expert_nbytes) < HANDOVER_S
        layer.job.begin(1 if quick else len(slots))

    def expect(self, tokens: int) -> None:
        """Begin to read for a prompt of so many tokens, before its first layer is computed."""
        self._left_s = perf_counter()
        if not self._layers:
            return
        layer = self._layers[0]
        share = layer.num_owned / layer.num_experts  # this rank's share of experts, and of pairs
        if not self._is_long(layer, tokens * self._top_k * share):
            return
        if self._reader.direct:
            self.fill(0, {})
        else:
            self._read_ahead(layer, range(layer.num_experts), memory_available() // 2)

    def computed(self) -> None:
        """Note that a layer has computed its experts."""
        self._left_s = perf_counter()

    def forget(self) -> None:
        """Forget the layer that is being filled, or will be."""
        self._filling = self._next = None

    def take(self, i: int, needed: Collection[int]) -> list[tuple[LayerSlots, dict[int, int]]]:
        """Hold the experts that were read ahead for a layer's call.

        Returns other layers, with the needed experts that are in their slots (expert to slot). The
        caller releases such a slot when it has computed the expert.
        """
        layer = self._layers[i]
        layer.collect_prefetched(needed)
        if self._filling not in (None, i):  # the layers were not called in order
            self.end_fill(self._filling)
        if not layer.fills:
            return []
        return self.end_fill(i, {*needed} if layer.computes_at_once else ())

    def _is_long(self, layer, pairs):
        """Whether a call of so many (token, expert) pairs needs most experts and so reads ahead.

        On a GPU it does not: prompts wait for Python there more than for the disk, and a thread
        that asks for ranges holds Python up.
        """
        return self._overlap and pairs >= AHEAD_PAIRS * layer.num_owned

    def look(self, i: int, needed: Collection[int], pairs: int) -> None:
        """Ask the system to read the experts of a long call, and of the next layer's call.

        If reads go past the page cache, ``fill_next`` will read those of the next layer's call.
        """
        layer, following, self._next = self._layers[i], self._layers[i + 1 : i + 2], None
        if not self._is_long(layer, pairs) or len(needed) < AHEAD_SHARE * layer.num_owned:
            return
        if self._reader.direct:
            self._between_s = perf_counter() - self._left_s
            self._next = i + 1 if following else None
            return
        room = memory_available() // 2  # pages must still be there when they are needed
        room -= self._read_ahead(layer, needed, room)
        for other in following:
            self._read_ahead(other, range(other.num_experts), room)

    def fill_next(self, busy: Mapping[int, int]) -> None:
        """``fill`` the layer after the one of the last ``look``, if a prompt needs its experts."""
        if self._next is not None:
            self.fill(self._next, busy)

    def _read_ahead(self, layer, experts, nbytes):
        """Ask the system to read experts that are not held into its cache; return their bytes.

        The first ones are taken, of at most ``nbytes``.
        """
        experts = [e for e in layer.of_rank(experts) if e not in layer.table.slot_of]
        experts = experts[: max(0, nbytes // layer.bank.expert_nbytes)]
        self._reader.read_ahead(layer.bank.places(experts))
        return len(experts) * layer.bank.expert_nbytes

    def fill(self, i: int, busy: Mapping[int, int]) -> None:
        """Begin to read a layer's missing experts into slots, as a prompt needs nearly all.

        With the fast kernels into free slots of other layers, too, where MLX's compute no expert.
        If attention takes longer than the reads, experts of earlier layers are evicted as well, but
        not ``busy`` ones (expert to slot), which the layer before this one has yet to compute.
        """
        layers, layer, missing = self._layers, self._layers[i], self._layers[i].missing()
        self._settle_one_layer()
        free, evicting = [layer], []
        if layer.computes_at_once:
            # First those that are called last: the layers before the last one that was called, back
            # to the first, and then from the last layer back to the next one.
            free += [layers[i - n] for n in range(2 if i else 1, len(layers))]
            num = len(missing) + sum(len(job.experts) for _, job in layer.fills)
            if self._reader.expected_s(num * layer.bank.expert_nbytes) < self._between_s:
                evicting = layers[:i]
        takes = [(other, None) for other in free]
        takes += [(other, busy if other is layers[i - 1] else {}) for other in evicting]
        for other, needed in takes:
            if not missing or not other.bank.can_hold(layer.bank):
                continue
            if slots := other.table.set_aside(len(missing), needed):
                some, missing = missing[: len(slots)], missing[len(slots) :]
                job = Job(self._reader, other.bank, dict(zip(some, slots)), layer.bank)
                layer.fills.append((other, job))
                self._filling = i
                self._counting.now.prefetch_issued += len(slots)
                job.begin(len(slots))

    def end_fill(
        self, i: int, needed: Collection[int] = ()
    ) -> list[tuple[LayerSlots, dict[int, int]]]:
        """End what ``fill`` began, and hold the experts that are in the layer's own slots.

        Returns other layers, with the ``needed`` experts in their slots (expert to slot), which the
        caller releases when it has computed these. All other slots are released here.
        """
        layer, borrowed = self._layers[i], []
        self._filling = None
        while layer.fills:
            other, job = layer.fills.pop(0)
            arrived, free, _ = job.collect(needed, everything=True)
            other.table.release(free)
            arrived = layer.count_prefetched(arrived, needed)
            if other is layer:
                layer.keep(arrived)
                continue
            other.table.release(slot for e, slot in arrived.items() if e not in needed)
            borrowed.append((other, {e: slot for e, slot in arrived.items() if e in needed}))
        return borrowed

    def _settle_one_layer(self):
        if len(self._layers) == 1:  # with several layers, the calls of the others have evaluated it
            mx.eval(self._handover.pending)
