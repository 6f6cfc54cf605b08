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
        self._left_s = 0.0  # the time when a prompt left a layer's experts, or began
        self._between_s = 0.0  # seconds from there to the next layer's experts: its attention

    def prefetch(self, i: int, experts: Iterable[int]) -> None:
        """Begin to read distinct experts that may be needed and are not held.

        It does nothing while an earlier prefetch is running, or if the experts do not all fit.
        """
        own = self._layers[i]
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
        own.job.begin(1 if quick else len(slots))

    def expect(self, tokens: int) -> None:
        """Begin to read for a prompt of so many tokens, before its first layer is computed."""
        self._left_s = perf_counter()
        if not self._layers:
            return
        own = self._layers[0]
        share = own.num_owned / own.num_experts  # this rank's share of experts, and of pairs
        if not self._is_long(own, tokens * self._top_k * share):
            return
        if self._reader.direct:
            self.fill(0, {} if own.computes_at_once else None)
        else:
            self._read_ahead(own, range(own.num_experts), memory_available() // 2)

    def left(self) -> None:
        """Note that a layer has computed its experts."""
        self._left_s = perf_counter()

    def forget(self) -> None:
        """Forget the layer that is being filled."""
        self._filling = None

    def take(self, i: int, needed: Collection[int]) -> list[tuple[LayerSlots, dict[int, int]]]:
        """Hold the experts that were read ahead for a layer's call.

        Returns other layers, with the needed experts that are in their slots (expert to slot). The
        caller releases such a slot when it has computed the expert.
        """
        own = self._layers[i]
        own.collect_prefetched(needed)
        if self._filling not in (None, i):  # the layers were not called in order
            self.end_fill(self._filling)
        if not own.fills:
            return []
        return self.end_fill(i, {*needed} if own.computes_at_once else ())

    def _is_long(self, own, pairs):
        """Whether a call of so many (token, expert) pairs needs most experts and so reads ahead.

        On a GPU it does not: prompts wait for Python there more than for the disk, and a thread
        that asks for ranges holds Python up.
        """
        return self._overlap and pairs >= AHEAD_PAIRS * own.num_owned

    def look(self, i: int, needed: Collection[int], pairs: int) -> list[int]:
        """Ask the system to read the experts of a long call, and of the next layer's call.

        If reads go past the page cache, it returns that layer instead; the caller calls ``fill``.
        """
        own = self._layers[i]
        if not self._is_long(own, pairs) or len(needed) < AHEAD_SHARE * own.num_owned:
            return []
        following = [i + 1] if i + 1 < len(self._layers) else []
        if self._reader.direct:
            self._between_s = perf_counter() - self._left_s
            return following
        room = memory_available() // 2  # pages must still be there when they are needed
        room -= self._read_ahead(own, needed, room)
        for layer in following:
            self._read_ahead(self._layers[layer], range(self._layers[layer].num_experts), room)
        return []

    def _read_ahead(self, own, experts, nbytes):
        """Ask the system to read experts that are not held into its cache; return their bytes.

        The first ones are taken, of at most ``nbytes``.
        """
        experts = [e for e in own.of_rank(experts) if e not in own.table.slot_of]
        experts = experts[: max(0, nbytes // own.bank.expert_nbytes)]
        self._reader.read_ahead(own.bank.places(experts))
        return len(experts) * own.bank.expert_nbytes

    def fill(self, i: int, busy: Mapping[int, int] | None = None) -> None:
        """Begin to read a layer's missing experts into slots, as a prompt needs nearly all.

        With ``busy`` other layers lend their free slots. If attention takes longer than the reads,
        earlier layers' experts are evicted, too, except ``busy`` (expert to slot), which the layer
        before this one has yet to compute. Give it with the fast kernels alone: MLX's do not
        compute experts in other layers' slots.
        """
        own, experts = self._layers[i], self._layers[i].missing()
        self._settle_one_layer()
        lenders = [(own, None)]
        if busy is not None:
            front, behind = self._layers[:i], self._layers[i + 1 :]
            lenders += [(other, None) for other in (*front[:-1], *behind[:0:-1])]
            num = len(experts) + sum(len(job.experts) for _, job in own.fills)
            if self._reader.expected_s(num * own.bank.expert_nbytes) < self._between_s:
                lenders += [(other, busy if other is front[-1] else {}) for other in front]
            lenders += [(other, None) for other in behind[:1]]  # last, as it needs its slots next
        for other, needed in lenders:
            if not experts or not other.bank.can_hold(own.bank):
                continue
            if slots := other.table.set_aside(len(experts), needed):
                some, experts = experts[: len(slots)], experts[len(slots) :]
                job = Job(self._reader, other.bank, dict(zip(some, slots)), own.bank)
                own.fills.append((other, job))
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
        own, borrowed = self._layers[i], []
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
        if len(self._layers) == 1:  # with several layers, the calls of the others have evaluated it
            mx.eval(self._handover.pending)
