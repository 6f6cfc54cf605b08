"""Choose a model's experts in place of the router."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from ..streaming.layers import expert_layers
from ..streaming.record import replacing_indices


@contextmanager
def route_by(model: nn.Module, calls: Iterable[np.ndarray]) -> Iterator[None]:
    """Inside the block, a model uses given experts: ``[T, L, K]`` for each call with T tokens.

    The output means nothing, but reads and speed are those of the given experts. ``record`` records
    the given experts. A prefetcher that asks the next layer's router gets the router's own choice.
    """
    rest, now = iter(calls), None

    def choose(layer, indices):
        nonlocal now
        if layer == 0:
            now = next(rest, None)
            if now is None:
                raise ValueError("route_by: expected experts for each call, got too few.")
        chosen = kernels.to_mlx(now[:, layer].astype(np.uint32)).reshape(indices.shape)
        return mx.depends(chosen, indices)  # so that the experts still wait for the router

    with replacing_indices([module for _, module in expert_layers(model)], choose):
        yield
