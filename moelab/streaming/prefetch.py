"""Prefetching: experts are read into their slots before their layer is called.

While one layer runs, a prefetcher guesses which experts another layer will need, and a ``Job``
reads them on background threads. Reads that a layer waits for come first: a prefetch that has not
begun by then is cancelled. A guess evicts no expert that it names itself, and never one of the
layer that is running.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from time import perf_counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..hooks import hooked
from .reading.file import ReadError
from .reading.reader import Reader
from .slots import SlotBank
from .trace import Trace


class Job:
    """One prefetch: experts on their way into slots of one layer.

    Args:
        reader (Reader): Reads them and counts the reads.
        bank (SlotBank): The layer's slots.
        slots (dict[int, int]): The slot of each expert. Until ``collect`` they belong to the job.
        of (SlotBank or None): The layer that the experts belong to, if the slots are another's.
    """

    def __init__(
        self, reader: Reader, bank: SlotBank, slots: dict[int, int], of: SlotBank | None = None
    ):
        self._reader, self._bank, self._slots, self._of = reader, bank, slots, of
        self._waiting = dict(slots)
        self._running = set()
        self._took_s = {}  # None where the read failed
        self._changed = threading.Condition()

    @property
    def experts(self) -> Collection[int]:
        """The experts that have a slot of the job."""
        return self._slots.keys()

    def run(self) -> None:
        """Read one expert after another until none is left: the work of one thread."""
        while True:
            self._reader.give_way()
            with self._changed:
                if not self._waiting or self._reader.closed:
                    return
                e = next(iter(self._waiting))
                slot = self._waiting.pop(e)
                self._running.add(e)
            begin, took_s = perf_counter(), None
            try:
                self._reader.read_here(self._bank.reads({e: slot}, self._of))
                self._bank.arrived(e, slot)
                took_s = perf_counter() - begin
            except ReadError:
                pass  # the layer that needs the expert reads it again and raises
            finally:
                with self._changed:
                    self._running.discard(e)
                    self._took_s[e] = took_s
                    self._changed.notify_all()

    def collect(self, needed: set[int], everything: bool = False) -> tuple[dict, list[int], bool]:
        """Cancel the reads that have not begun and wait for those that are needed.

        Args:
            needed (set[int]): Wait for these experts if they are being read now.
            everything (bool): Wait for the others as well.

        Returns:
            tuple[dict, list[int], bool]: For each expert that arrived, its slot, the seconds of
            its read and the seconds spent waiting for it here; the slots that are free again;
            whether the job has ended.
        """
        arrived, waited_s = {}, {}
        with self._changed:
            free = list(self._waiting.values())
            for e in self._waiting:
                del self._slots[e]
            self._waiting.clear()
            for e in [e for e in self._running if everything or e in needed]:
                begin = perf_counter()
                while e in self._running:
                    self._changed.wait()
                waited_s[e] = perf_counter() - begin
            for e, took_s in self._took_s.items():
                slot = self._slots.pop(e)
                if took_s is None:
                    free.append(slot)
                else:
                    arrived[e] = slot, took_s, waited_s.get(e, 0.0)
            self._took_s.clear()
            return arrived, free, not self._running


class Prefetcher:
    """Guesses which experts the next layer will need.

    Args:
        layers (list[StreamedExperts]): The streamed layers, in order.
        blocks (list[nn.Module]): The MoE block that calls each of them.
    """

    def __init__(self, layers: list[nn.Module], blocks: list[nn.Module]):
        self._layers, self._blocks = layers, blocks

    def ask(self, layer: int, x: mx.array) -> list[mx.array]:
        """What to evaluate together with the routing of a layer.

        Args:
            layer (int): The layer that is running.
            x (mx.array): ``[..., D]``, its input.

        Returns:
            list[mx.array]: Handed to ``guess`` once it is evaluated.
        """
        return []

    def guess(self, layer: int, asked: list[mx.array]) -> tuple[int, np.ndarray] | None:
        """Which experts will be needed next.

        Args:
            layer (int): The layer that is running.
            asked (list[mx.array]): From ``ask``.

        Returns:
            tuple[int, np.ndarray] or None: The next layer and its experts ``[..., K]``; None if
            the prefetcher has no guess.
        """
        raise NotImplementedError

    @contextmanager
    def timed_asks(self) -> Iterator[list[float]]:
        """Inside the block, measure what each ``ask`` takes.

        The layer's input is evaluated before the clock starts and the answer before it stops, so
        the model itself is slower inside.

        Yields:
            list[float]: Seconds, one entry for each call of ``ask`` so far.
        """
        seconds = []

        def timed(ask, layer, x):
            mx.eval(x)
            begin = perf_counter()
            asked = ask(layer, x)
            mx.eval(asked)
            seconds.append(perf_counter() - begin)
            return asked

        with hooked(self, timed, "ask"):
            yield seconds


class Lookahead(Prefetcher):
    """The next layer's router on this layer's hidden state (MoE-Infinity; ds4 issue 849).

    The next block is called with this block's input, up to the call of its experts. MLX is lazy,
    so only the router is computed.
    """

    def ask(self, layer: int, x: mx.array) -> list[mx.array]:
        if layer + 1 == len(self._layers):
            return []
        asked = []
        experts = self._layers[layer + 1]
        experts.probe = asked.append
        try:
            self._blocks[layer + 1](x if x.ndim > 2 else x[None])
        except (TypeError, ValueError) as e:
            raise ValueError(
                f"StreamConfig.prefetch='lookahead': {experts.path}: this family's router cannot "
                f"be asked before its layer is called ({e}). Use prefetch='none'."
            ) from e
        finally:
            experts.probe = None
        return asked

    def guess(self, layer: int, asked: list[mx.array]) -> tuple[int, np.ndarray] | None:
        return (layer + 1, np.array(asked[0])) if asked else None


class Oracle(Prefetcher):
    """The experts that a recorded trace names: the upper bound for every prefetcher.

    It guesses nothing before ``set_trace``, nor after the trace's last token.
    """

    def __init__(self, layers: list[nn.Module], blocks: list[nn.Module]):
        super().__init__(layers, blocks)
        self._rows, self._next = (), 0

    def set_trace(self, trace: Trace) -> None:
        """Guess by the decoded tokens of a trace, of which the first is the next token.

        Args:
            trace (Trace): Recorded with the same model and prompt.

        Raises:
            ValueError: If the trace is of another model.
        """
        rows, L = trace.experts[trace.phase == "decode"], len(self._layers)
        if rows.shape[1] != L:
            raise ValueError(
                f"set_trace: expected a trace of {L} layers, got {rows.shape[1]}. "
                "Record it with this model."
            )
        self._rows, self._next = rows, 0

    def guess(self, layer: int, asked: list[mx.array]) -> tuple[int, np.ndarray] | None:
        following = (layer + 1) % len(self._layers)
        if following == 0:
            self._next += 1
        if self._next >= len(self._rows):
            return None
        return following, self._rows[self._next][following]


PREFETCHERS = {"lookahead": Lookahead, "oracle": Oracle}
