"""Record which experts a model chooses."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import mlx.nn as nn
import numpy as np

from ..hooks import hooked
from .layers import expert_layers
from .session import session_of
from .trace import Trace


class _Recorder:
    """Keeps the routing of each call; ``fill`` leaves out calls that did not reach all layers."""

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


@contextmanager
def replacing_indices(
    modules: list[nn.Module], replace: Callable, innermost: bool = False
) -> Iterator[None]:
    """Pass ``replace(i, indices)`` to module i inside the block, except in prefetchers' calls."""

    def call(i, module, original, x, indices):
        if getattr(module, "probe", None) is None:
            indices = replace(i, indices)
        return original(x, indices)

    with ExitStack() as hooks:
        for i, module in enumerate(modules):
            hooks.enter_context(hooked(module, partial(call, i, module), innermost=innermost))
        yield


@contextmanager
def record(
    model: nn.Module, name: str | None = None, seed: int | None = None, prompt: str = ""
) -> Iterator[Trace]:
    """Record the routing of the calls that ``model`` (from ``load``) gets inside the block.

    The trace is filled when the block ends, also by an exception. Calls that failed are left out.
    The trace keeps ``name`` (default: the model's type), ``seed`` and ``prompt``.

    Raises:
        ValueError: If the model is not from ``moelab.load``, is being recorded already, or is
            called with a batch of more than 1.
    """
    session = session_of(model)
    if session.recorder is not None:
        raise ValueError("record: this model is being recorded already.")
    L, K, E = session.facts.shape
    name = str(name or getattr(model, "model_type", None) or type(model).__name__)
    none = np.zeros((0, L, K), np.uint16), np.zeros(0, "U7"), np.zeros(0, np.int64)
    trace = Trace(*none, E, name, seed, prompt)
    recorder = session.recorder = _Recorder()

    def add(layer, indices):
        recorder.add(layer, np.array(indices))
        return indices

    # A streamed layer hands the indices to the recorder itself.
    resident = [] if session.layers else [module for _, module in expert_layers(model)]
    try:
        # Innermost: this records the routing that ``route_by`` puts in the router's place.
        with replacing_indices(resident, add, innermost=True):
            yield trace
    finally:
        session.recorder = None
        recorder.fill(trace)
