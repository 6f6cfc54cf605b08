"""Which experts a model routed to: recorded from a run, and put in a router's place."""

from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from ..checkpoint import expert_modules
from .layers import StreamedExperts, num_experts
from .trace import PHASES, Trace, TraceError

__all__ = ["PHASES", "Trace", "TraceError", "record", "route_by"]


class _Recorder:
    def __init__(self, num_layers):
        self.num_layers = num_layers
        self.calls = []  # (token ids, phase, {layer: routed})

    def begin(self, inputs, phase):
        if inputs.shape[0] != 1:
            raise ValueError(f"record: expected a batch of 1, got {inputs.shape[0]}.")
        self.calls.append((np.array(inputs).ravel(), phase, {}))

    def add(self, layer, routed):
        self.calls[-1][2][layer] = routed.reshape(-1, routed.shape[-1]).astype(np.uint16)

    def into(self, trace):
        calls = [c for c in self.calls if len(c[2]) == self.num_layers]  # the others failed
        if not calls:
            return
        trace.tokens = np.concatenate([tokens for tokens, _, _ in calls])
        trace.phase = np.concatenate([np.repeat(phase, len(t)) for t, phase, _ in calls])
        trace.experts = np.concatenate(
            [np.stack([layers[i] for i in sorted(layers)], axis=1) for _, _, layers in calls]
        )


class _Tapped:
    # Mixed into the class of an experts' module for as long as its indices are looked at or replaced.
    def __call__(self, x, indices):
        if (
            getattr(self, "probe", None) is None
        ):  # else a prefetcher asks the router what it would choose
            for tap in self._taps.each:
                indices = tap(indices)
        return super().__call__(x, indices)


class _Taps:
    # Not a list, which mlx would take for the module's own.
    def __init__(self):
        self.each = []


@contextmanager
def _tapped(modules, taps, first):
    """Hand what ``modules[i]`` is called with to ``taps[i]``, and take what comes back."""
    for module, tap in zip(modules, taps):
        if not isinstance(module, _Tapped):
            cls = type(module)
            module._taps = _Taps()
            module.__class__ = type(cls.__name__, (_Tapped, cls), {})
        module._taps.each.insert(0 if first else len(module._taps.each), tap)
    try:
        yield
    finally:
        for module, tap in zip(modules, taps):
            module._taps.each.remove(tap)
            if not module._taps.each:
                module.__class__ = type(module).__mro__[2]
                del module._taps


def _session(model, what):
    session = getattr(model, "_session", None)
    if session is None:
        raise ValueError(f"{what}: expected a model from moelab.load, got {type(model).__name__}.")
    return session


def _layers(model):
    """The modules that are called with indices, in layer order; E of each."""
    found = [m for _, m in expert_modules(model)]
    if found:
        return found, [num_experts(m) for m in found]
    found = sorted(
        (m for m in model.modules() if isinstance(m, StreamedExperts)), key=lambda m: m.index
    )
    return found, [m.num_experts for m in found]


@contextmanager
def record(model, name=None, seed=None, prompt=""):
    """Record the routing of everything that ``model`` runs inside the block.

    Args:
        model (nn.Module): As ``moelab.load`` returned it, in any mode.
        name (str, optional): Kept with the trace. Default: the model's type.
        seed (int, optional): Kept with the trace.
        prompt (str): Kept with the trace.

    Yields:
        Trace: Empty at first, filled when the block ends, also by an exception. A call that
            failed half-way is left out.
    """
    session = _session(model, "record")
    if session.recorder is not None:
        raise ValueError("record: this model is being recorded already.")
    modules, sizes = _layers(model)
    name = name or getattr(model, "model_type", None) or type(model).__name__
    empty = np.zeros((0, len(modules), session.top_k), np.uint16)
    trace = Trace(
        empty,
        np.zeros(0, "U7"),
        np.zeros(0, np.int64),
        max(sizes, default=0),
        str(name),
        seed,
        prompt,
    )
    recorder = session.recorder = _Recorder(len(modules))

    def look(layer):
        def tap(indices):
            recorder.add(layer, np.array(indices))
            return indices

        return tap

    # A streamed layer tells the recorder itself: it evaluates the indices anyway.
    resident = [m for m in modules if not isinstance(m, StreamedExperts)]
    try:
        with _tapped(resident, [look(i) for i in range(len(resident))], first=False):
            yield trace
    finally:
        session.recorder = None
        recorder.into(trace)


class _Driver:
    # Which rows of the trace come next; the first layer moves on, the others follow it.
    def __init__(self, trace):
        phases = {p: trace.experts[trace.phase == p] for p in PHASES}
        either = next(p for p in phases.values() if len(p))
        self.rows = {p: rows if len(rows) else either for p, rows in phases.items()}
        self.next = dict.fromkeys(PHASES, 0)
        self.now = None

    def tap(self, layer):
        def replace(indices):
            if indices.ndim > 2 and indices.shape[0] != 1:
                raise ValueError(f"route_by: expected a batch of 1, got {indices.shape[0]}.")
            T = indices.size // indices.shape[-1]
            if layer == 0:
                phase = PHASES[T == 1]
                rows = self.rows[phase]
                self.now = (self.next[phase] + np.arange(T)) % len(rows)
                self.next[phase] += T
                self.now = rows[self.now]
            chosen = mx.array(self.now[:, layer].astype(np.uint32)).reshape(indices.shape)
            # The router is still waited for, as it is when its own choice counts.
            return mx.depends(chosen, indices)

        return replace


@contextmanager
def route_by(model, trace):
    """Let a trace choose the experts in the router's place, so that a random checkpoint routes like a trained one.

    The router still runs and is waited for, and its scores weigh the experts: what such a model writes means nothing,
    what it costs is what the trace costs. A call with one token takes the next decoded row of the trace, a call with
    more takes the next prompt rows; of a phase that the trace lacks, it takes the other's. Each starts over when it
    runs out. ``record`` sees the trace's choices. A prefetcher that asks the next layer's router hears the router, not the trace.

    Args:
        model (nn.Module): As ``moelab.load`` returned it, in any mode.
        trace (Trace): With the model's L, K and E.

    Yields:
        nn.Module: ``model``. After the block nothing of the trace is left in it.

    Raises:
        TraceError: If the trace is empty, or its L, K or E are not the model's.
        ValueError: If the model is not ours, or is called with a batch of more than 1.
    """
    session = _session(model, "route_by")
    modules, sizes = _layers(model)
    want = {
        "L (MoE layers)": len(modules),
        "K (experts per token)": session.top_k,
        "E (experts)": max(sizes, default=0),
    }
    got = dict(zip(want, (*trace.experts.shape[1:], trace.num_experts)))
    wrong = [
        f"{k} {want[k]} of the model, {got[k]} of the trace" for k in want if want[k] != got[k]
    ]
    if wrong or not len(trace):
        raise TraceError(
            f"route_by: expected a trace with tokens and the model's shape, got {trace} ({'; '.join(wrong) or 'no tokens'}). "
            "Make one that fits: moelab.replay.locality.synthesize."
        )
    driver = _Driver(trace)
    with _tapped(modules, [driver.tap(i) for i in range(len(modules))], first=True):
        yield model
