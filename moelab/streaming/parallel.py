"""Linear layers spread over MLX streams.

MLX's CPU backend uses one core for each stream. Every output row of a quantized
matrix-vector product is computed by itself, so dividing the rows over streams gives the
same bits in a fraction of the time.
"""

import copy

import mlx.core as mx
import mlx.nn as nn

# A part of fewer bytes is done before another stream has heard of it (about 60 us).
PART_NBYTES = 64 * 1024


class SpreadLinear(nn.QuantizedLinear):
    """A ``QuantizedLinear`` with its rows divided over streams."""

    def __call__(self, x):
        return self._spread(self, x)

    def __getattr__(self, key):
        return _handed_out(self, super().__getattr__(key))


class SpreadEmbedding(nn.QuantizedEmbedding):
    """A ``QuantizedEmbedding`` that does so where it serves as the output head."""

    def as_linear(self, x):
        return self._spread(self, x)

    def __getattr__(self, key):
        return _handed_out(self, super().__getattr__(key))


def _handed_out(module, value):
    if isinstance(value, mx.array):  # it may be changed in place
        module._spread.forget()
    return value


class Spread:
    """Calls the parts of a layer, each on a stream of its own, and joins their outputs.

    The parts are views of the layer's arrays, made again when it has others.

    Args:
        call (Callable): ``call(part, x)``, the layer's own method.
        num_parts (int): How many parts to make.
        session (Session): Whose streams to use.
    """

    def __init__(self, call, num_parts, session):
        self._call, self._session, self._num_parts = call, session, num_parts
        self._parts, self._arrays, self._ids = [], [], None

    def __call__(self, module, x):
        if [*map(id, module.values())] != self._ids:
            self._divide(module)
        ys = []
        for part, stream in zip(self._parts, self._session.streams):
            with mx.stream(stream):
                ys.append(self._call(part, x))
        return mx.concatenate(ys, axis=-1)

    def forget(self):
        """Make the parts again at the next call."""
        self._ids = None

    def _divide(self, module):
        arrays = dict(module)
        mx.eval(arrays)
        rows = arrays["weight"].shape[0]
        ends = [rows * i // self._num_parts for i in range(self._num_parts + 1)]
        self._parts = [copy.copy(module) for _ in range(self._num_parts)]
        for part, first, last in zip(self._parts, ends, ends[1:]):
            del part._spread  # this object: a cycle would keep a dropped model's memory
            part.update({k: v[first:last] for k, v in arrays.items()})  # views, not copies
            mx.eval(part.parameters())
        self._arrays = list(arrays.values())  # alive, so that no other array gets their ids
        self._ids = [*map(id, self._arrays)]


def spread(model, session):
    """Divide the large quantized linears of a model over the session's streams.

    Args:
        model (nn.Module): Its weights have been read.
        session (Session): What the layers of this model share.
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
