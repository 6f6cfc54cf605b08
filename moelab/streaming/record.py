"""Record which experts a model chooses, or let a trace choose them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from ..experts import num_experts
from ..hooks import hooked
from .layers import StreamedExperts, expert_layers
from .session import session_of
from .trace import PHASES, Trace, TraceError


class _Recorder:
    """Keeps the routing of each call; a call in which fewer layers have run has failed."""

    def __init__(self):
        self.calls = []  # (token ids, phase, {layer: routed})

    def begin(self, inputs, phase):
        if inputs.shape[0] != 1:
            raise ValueError(f"record: expected a batch of 1, got {inputs.shape[0]}.")
        self.calls.append((np.array(inputs).ravel(), phase, {}))

    def add(self, layer, routed):
        self.calls[-1][2][layer] = routed.reshape(-1, routed.shape[-1]).astype(np.uint16)

    def fill(self, trace):
        calls = [c for c in self.calls if len(c[2]) == trace.experts.shape[1]]
        if calls:
            tokens, phases, routed = zip(*calls)
            trace.tokens = np.concatenate(tokens)
            trace.phase = np.repeat(phases, [len(t) for t in tokens])
            rows = [np.stack([layers[i] for i in sorted(layers)], axis=1) for layers in routed]
            trace.experts = np.concatenate(rows)


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
def _replacing_indices(modules, replace: Callable, innermost=False):
    """Call module i with ``replace(i, indices)`` inside, except when its router is asked."""

    def call(i, module, original, x, indices):
        if getattr(module, "probe", None) is None:
            indices = replace(i, indices)
        return original(x, indices)

    with ExitStack() as hooks:
        for i, module in enumerate(modules):
            hook = partial(call, i, module)
            hooks.enter_context(hooked(module, hook, innermost=innermost))
        yield


def _shape(session, modules):
    """L, K and the largest E."""
    streamed = [isinstance(m, StreamedExperts) for m in modules]
    sizes = [m.num_experts if own else num_experts(m) for m, own in zip(modules, streamed)]
    return len(modules), session.top_k, max(sizes, default=0)


@contextmanager
def record(
    model: nn.Module, name: str | None = None, seed: int | None = None, prompt: str = ""
) -> Iterator[Trace]:
    """Record the routing of the calls of ``model`` inside the block.

    Args:
        model (nn.Module): From ``moelab.load``, in any mode.
        name (str or None): Kept with the trace. Default: the model's type.
        seed (int or None): Kept with the trace.
        prompt (str): Kept with the trace.

    Yields:
        Trace: Empty until the block ends, also by an exception. Calls that failed are left out.

    Raises:
        ValueError: If the model is not from ``moelab.load``, is being recorded already, or is
            called with a batch of more than 1.
    """
    session = session_of(model)
    if session.recorder is not None:
        raise ValueError("record: this model is being recorded already.")
    modules = [module for _, module in expert_layers(model)]
    L, K, E = _shape(session, modules)
    name = str(name or getattr(model, "model_type", None) or type(model).__name__)
    none = np.zeros((0, L, K), np.uint16), np.zeros(0, "U7"), np.zeros(0, np.int64)
    trace = Trace(*none, E, name, seed, prompt)
    recorder = session.recorder = _Recorder()

    def add(layer, indices):
        recorder.add(layer, np.array(indices))
        return indices

    # A streamed layer hands the indices to the recorder itself.
    resident = [] if session.layers else modules
    try:
        # Innermost: a trace that ``route_by`` puts in the router's place is recorded.
        with _replacing_indices(resident, add, innermost=True):
            yield trace
    finally:
        session.recorder = None
        recorder.fill(trace)


@contextmanager
def route_by(model: nn.Module, trace: Trace) -> Iterator[nn.Module]:
    """Let a trace choose the experts, so that a random checkpoint routes like a trained one.

    The model's output means nothing, while its reads and its speed are those of the trace's
    routing. A call with one token takes the next decoded row, a call with more takes the next
    prompt rows, and after the last row comes the first. A trace that has only decoded or only
    prompt rows serves both kinds of calls. ``record`` records the trace's choices. A prefetcher
    that asks the next layer's router gets its answer.
    """
    session = session_of(model)
    modules = [module for _, module in expert_layers(model)]
    names = "L (MoE layers)", "K (experts per token)", "E (experts)"
    shapes = zip(names, _shape(session, modules), (*trace.experts.shape[1:], trace.num_experts))
    wrong = [
        f"{name} {of_model} of the model, {of_trace} of the trace"
        for name, of_model, of_trace in shapes
        if of_model != of_trace
    ]
    if wrong or not len(trace):
        raise TraceError(
            f"route_by: expected a trace with tokens and the model's shape, got {trace} "
            f"({'; '.join(wrong) or 'no tokens'}). "
            "Make one that fits: moelab.replay.locality.synthesize."
        )
    with _replacing_indices(modules, _Router(trace).choose):
        yield model
