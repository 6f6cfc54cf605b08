"""Prefetching: guesses of the experts that a layer will need, before it is called.

While one layer runs, a prefetcher guesses which experts another layer will need, and the residency
reads them on background threads. Reads that a layer waits for come first. What has not begun when
the guessed layer is called is cancelled. A guess evicts experts of the layer that it is for, and
none that it names itself.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from .trace import Trace


class Prefetcher:
    """Guesses which experts the next layer will need.

    Args:
        layers (list[StreamedExperts]): The streamed layers, in order.
        blocks (list[nn.Module]): The MoE block that calls each of them.
    """

    def __init__(self, layers: list[nn.Module], blocks: list[nn.Module]):
        self._layers, self._blocks = layers, blocks

    def ask(self, layer: int, x: mx.array | kernels.Rows) -> list:
        """What to evaluate together with the routing of a layer.

        Args:
            layer (int): The layer that is running.
            x (mx.array or kernels.Rows): ``[..., D]``, its input.

        Returns:
            list[mx.array or np.ndarray]: Handed to ``guess`` once it is evaluated.
        """
        return []

    def guess(self, layer: int, asked: list) -> tuple[int, np.ndarray] | None:
        """Which experts will be needed next.

        Args:
            layer (int): The layer that is running.
            asked (list[mx.array]): From ``ask``.

        Returns:
            tuple[int, np.ndarray] or None: The next layer and its experts ``[..., K]``; None if
            the prefetcher has no guess.
        """
        raise NotImplementedError


class Lookahead(Prefetcher):
    """The next layer's router on this layer's hidden state (MoE-Infinity; ds4 issue 849).

    A block of ``kernels`` is asked for its router's choice alone. Another one is called with this
    block's input, and its experts hand over what its router chose. MLX is lazy and computes no more
    than that; the fast kernels also compute what else the block has, a shared expert for example.
    """

    def ask(self, layer: int, x: mx.array | kernels.Rows) -> list:
        if layer + 1 == len(self._layers):
            return []
        if isinstance(x, kernels.Rows):
            route = getattr(self._blocks[layer + 1], "route", lambda x: None)
            if (routed := route(x)) is not None:
                return [routed]
            x = kernels.to_mlx(x.x)
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

    def guess(self, layer: int, asked: list) -> tuple[int, np.ndarray] | None:
        return (layer + 1, np.array(asked[0])) if asked else None


class Oracle(Prefetcher):
    """The experts that a recorded trace names: the upper bound for guesses of the next layer.

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

    def guess(self, layer: int, asked: list) -> tuple[int, np.ndarray] | None:
        following = (layer + 1) % len(self._layers)
        if following == 0:
            self._next += 1
        if self._next >= len(self._rows):
            return None
        return following, self._rows[self._next][following]


PREFETCHERS = {"lookahead": Lookahead, "oracle": Oracle}
