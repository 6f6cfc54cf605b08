"""Large linear layers divided over MLX streams, so that a CPU uses all its cores.

MLX's CPU backend uses one core for each stream. Every output row of a quantized matrix-vector
product is computed by itself, so dividing the rows over streams gives the same bits in less time.
The divided layers have classes of their own for as long as the model is loaded, not hooks
(``moelab/hooks.py``): they are called for every token.
"""

import copy
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from .session import Session

# Bytes. A smaller part of a layer is computed in less time than another stream takes to start on
# it, about 60 us.
PART_NBYTES = 64 * 1024


class SpreadLinear(nn.QuantizedLinear):
    """A ``QuantizedLinear`` with its rows divided over streams."""

    def __call__(self, x: mx.array) -> mx.array:
        return self._spread(self, x)

    def __getattr__(self, key: str):
        return _forget_parts(self, super().__getattr__(key))


class SpreadEmbedding(nn.QuantizedEmbedding):
    """A ``QuantizedEmbedding`` with its rows divided where it is the output head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return self._spread(self, x)

    def __getattr__(self, key: str):
        return _forget_parts(self, super().__getattr__(key))


def _forget_parts(module, value):
    if isinstance(value, mx.array):  # the caller may change the array in place
        module._spread.forget()
    return value


class Spread:
    """Calls the parts of a layer, each on a stream of its own, and joins their outputs.

    The parts are views of the layer's arrays. They are made again when the arrays are replaced.

    Args:
        call (Callable): ``call(part, x)``, the layer's own method.
        num_parts (int): How many parts to make.
        session (Session): Its streams are used.
    """

    def __init__(self, call: Callable, num_parts: int, session: Session):
        self._call, self._session, self._num_parts = call, session, num_parts
        self._parts, self._arrays, self._ids = [], [], None

    def __call__(self, module: nn.Module, x: mx.array) -> mx.array:
        if [*map(id, module.values())] != self._ids:
            self._divide(module)
        ys = []
        for part, stream in zip(self._parts, self._session.streams):
            with mx.stream(stream):
                ys.append(self._call(part, x))
        return mx.concatenate(ys, axis=-1)

    def forget(self) -> None:
        """Make the parts again at the next call."""
        self._ids = None

    def _divide(self, module):
        arrays = dict(module)
        mx.eval(arrays)
        rows = arrays["weight"].shape[0]
        ends = [rows * i // self._num_parts for i in range(self._num_parts + 1)]
        self._parts = [copy.copy(module) for _ in range(self._num_parts)]
        for part, first, last in zip(self._parts, ends, ends[1:]):
            del part._spread  # this object: a cycle would keep the memory of a model that is gone
            part.update({k: v[first:last] for k, v in arrays.items()})  # views, not copies
            mx.eval(part.parameters())
        self._arrays = list(arrays.values())  # kept, so that no other array gets their ids
        self._ids = [*map(id, self._arrays)]


def spread(model: nn.Module, session: Session) -> None:
    """Divide the large quantized linear layers of a model over the session's streams.

    Args:
        model (nn.Module): Its weights have been read.
        session (Session): The model's.
    """
    for _, module in model.named_modules():
        if type(module) is nn.QuantizedLinear:
            cls, call = SpreadLinear, nn.QuantizedLinear.__call__
        elif type(module) is nn.QuantizedEmbedding:
            cls, call = SpreadEmbedding, nn.QuantizedEmbedding.as_linear
        else:
            continue
        weight = module["weight"]
        num_parts = min(len(session.streams), weight.nbytes // PART_NBYTES, weight.shape[0])
        if num_parts > 1:
            module._spread = Spread(call, num_parts, session)
            module.__class__ = cls
