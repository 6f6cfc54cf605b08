"""Experts that are read before their layer asks for them."""

from collections.abc import Collection, Iterable

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


class Ahead:
    """Reads experts that the next layer may need, or that a prompt will need, if they fit.

    A prompt's experts go into the page cache, or past it into their layer's free slots.
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
        self._next = None  # the layer whose slots ``fill_next`` fills

    def prefetch(self, i: int, experts: Iterable[int]) -> None:
        """Begin to read distinct experts that may be needed and are not held.

        It does nothing while an earlier prefetch is running, or if the experts do not all fit.
        """
        layer = self._layers[i]
        experts = layer.of_rank(experts)
        if layer.job is None and layer.table.fits(experts):
            self._begin(layer, experts)

    def expect(self, tokens: int) -> None:
        """Begin to read for a prompt of so many tokens, before its first layer is computed."""
        for layer in self._layers[:1]:
            # A rank's share of the experts is also its share of the pairs.
            if not self._is_long(layer, tokens * self._top_k * layer.num_owned / layer.num_experts):
                return
            if self._reader.direct:
                self._fill(layer)
            else:
                self._read_ahead(layer, range(layer.num_experts), memory_available() // 2)

    def look(self, i: int, needed: Collection[int], pairs: int) -> None:
        """Ask the system to read the experts of a long call, and of the next layer's call.

        If reads go past the page cache, ``fill_next`` will read those of the next layer's call.
        """
        layer, following, self._next = self._layers[i], self._layers[i + 1 : i + 2], None
        if not self._is_long(layer, pairs) or len(needed) < AHEAD_SHARE * layer.num_owned:
            return
        if self._reader.direct:
            self._next = next(iter(following), None)
            return
        room = memory_available() // 2  # pages must still be there when they are needed
        room -= self._read_ahead(layer, needed, room)
        for other in following:
            self._read_ahead(other, range(other.num_experts), room)

    def fill_next(self) -> None:
        """Begin to read what a prompt needs in the layer after the one of the last ``look``."""
        if self._next is not None:
            self._fill(self._next)

    def _is_long(self, layer, pairs):
        """Whether a call of so many (token, expert) pairs needs most experts and so reads ahead.

        On a GPU it does not: prompts wait for Python there more than for the disk, and a thread
        that asks for ranges holds Python up.
        """
        return self._overlap and pairs >= AHEAD_PAIRS * layer.num_owned

    def _read_ahead(self, layer, experts, nbytes):
        """Ask the system to read experts that are not held into its cache; return their bytes.

        The first ones are taken, of at most ``nbytes``.
        """
        experts = layer.missing(experts)[: max(0, nbytes // layer.bank.expert_nbytes)]
        self._reader.read_ahead(layer.bank.places(experts))
        return len(experts) * layer.bank.expert_nbytes

    def _fill(self, layer):
        """Begin to read missing experts into a layer's free slots, as a prompt needs nearly all."""
        if layer.job is None:
            experts = layer.missing(range(layer.num_experts))
            self._begin(layer, experts[: layer.table.num_free])

    def _begin(self, layer, experts):
        """Begin to read those of the experts that are not held and for which there are slots."""
        if len(self._layers) == 1:  # with several layers, the calls of the others have evaluated it
            mx.eval(self._handover.pending)
        slots = layer.table.reserve(experts)
        if not slots:
            return
        self._counting.now.prefetch_issued += len(slots)
        layer.job = Job(self._reader, layer.bank, slots)
