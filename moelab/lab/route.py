"""Let a trace choose a model's experts."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from ..streaming.layers import expert_layers
from ..streaming.record import replacing_indices
from ..streaming.session import session_of
from ..streaming.trace import PHASES, Trace, TraceError


class _Router:
    """Chooses experts by the rows of a trace; the first layer moves on to the next row."""

    def __init__(self, trace):
        phases = {p: trace.experts[trace.phase == p] for p in PHASES}
        either = next(p for p in phases.values() if len(p))
        self.rows = {p: rows if len(rows) else either for p, rows in phases.items()}
        self.next = dict.fromkeys(PHASES, 0)
        self.now = None

    def choose(self, layer, indices):
        if indices.ndim > 2 and indices.shape[0] != 1:
            raise ValueError(f"route_by: expected a batch of 1, got {indices.shape[0]}.")
        T = indices.size // indices.shape[-1]
        if layer == 0:
            phase = PHASES[T == 1]
            rows = self.rows[phase]
            self.now = rows[(self.next[phase] + np.arange(T)) % len(rows)]
            self.next[phase] += T
        chosen = kernels.to_mlx(self.now[:, layer].astype(np.uint32)).reshape(indices.shape)
        # The router is waited for all the same, as it is without a trace.
        return mx.depends(chosen, indices)


@contextmanager
def route_by(model: nn.Module, trace: Trace) -> Iterator[nn.Module]:
    """Let a trace choose the experts, so that a random checkpoint routes like a trained one.

    The model's output means nothing, while its reads and its speed are those of the trace's
    routing. A call with one token takes the next decoded row, a call with more takes the next
    prompt rows, and after the last row comes the first. A trace that has only decoded or only
    prompt rows serves both kinds of calls. ``record`` records the trace's choices. A prefetcher
    that asks the next layer's router gets its answer.
    """
    names = "L (MoE layers)", "K (experts per token)", "E (experts)"
    got = *trace.experts.shape[1:], trace.num_experts
    wrong = [
        f"{name} {of_model} of the model, {of_trace} of the trace"
        for name, of_model, of_trace in zip(names, session_of(model).facts.shape, got)
        if of_model != of_trace
    ]
    if wrong or not len(trace):
        raise TraceError(
            f"route_by: expected a trace with tokens and the model's shape, got {trace} "
            f"({'; '.join(wrong) or 'no tokens'}). "
            "Make one that fits: moelab.replay.locality.synthesize."
        )
    modules = [module for _, module in expert_layers(model)]
    with replacing_indices(modules, _Router(trace).choose):
        yield model
