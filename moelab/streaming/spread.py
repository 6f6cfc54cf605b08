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
        return self._spread(x)


class SpreadEmbedding(nn.QuantizedEmbedding):
    """A ``QuantizedEmbedding`` that does so where it serves as the output head."""

    def as_linear(self, x):
        return self._spread(x)


class Spread:
    """Calls the parts of a layer, each on a stream of its own, and joins their outputs.

    Args:
        call (Callable): ``call(part, x)``, the layer's own method.
        module (nn.Module): Its arrays all have one row for each output.
        num_parts (int): How many parts to make.
        session (Session): Whose streams to use.
    """

    def __init__(self, call, module, num_parts, session):
        rows = module["weight"].shape[0]
        ends = [rows * i // num_parts for i in range(num_parts + 1)]
        self._call, self._session = call, session
        self._parts = [copy.copy(module) for _ in range(num_parts)]
        for part, first, last in zip(self._parts, ends, ends[1:]):
            part.update({k: v[first:last] for k, v in module.items()})  # views, not copies
            mx.eval(part.parameters())

    def __call__(self, x):
        ys = []
        for part, stream in zip(self._parts, self._session.streams):
            with mx.stream(stream):
                ys.append(self._call(part, x))
        return mx.concatenate(ys, axis=-1)


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
        num_parts = min(len(session.streams), module["weight"].nbytes // PART_NBYTES)
        if num_parts > 1:
            module._spread = Spread(call, module, num_parts, session)
            module.__class__ = cls
