"""Which experts a model routed to: recorded from a run."""

from contextlib import contextmanager
from dataclasses import dataclass

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from ..checkpoint import expert_modules


@dataclass
class Trace:
    """The routing of one run.

    Attributes:
        experts (np.ndarray): ``[T, L, K]`` uint16, the experts of every token in every MoE
            layer, in the order of the router.
        phase (np.ndarray): ``[T]`` of ``prefill`` (came with others) or ``decode``.
        tokens (np.ndarray): ``[T]`` token ids that went in.
    """

    experts: np.ndarray
    phase: np.ndarray
    tokens: np.ndarray


class _Recorder:
    def __init__(self):
        self.calls = []  # (token ids, phase, {layer: routed})

    def begin(self, inputs, phase):
        if inputs.shape[0] != 1:
            raise ValueError(f"record: expected a batch of 1, got {inputs.shape[0]}.")
        self.calls.append((np.array(inputs).ravel(), phase, {}))

    def add(self, layer, routed):
        self.calls[-1][2][layer] = routed.reshape(-1, routed.shape[-1]).astype(np.uint16)

    def into(self, trace):
        calls = [c for c in self.calls if c[2]]
        if not calls:
            return
        trace.tokens = np.concatenate([tokens for tokens, _, _ in calls])
        trace.phase = np.concatenate([np.repeat(phase, len(t)) for t, phase, _ in calls])
        trace.experts = np.concatenate(
            [np.stack([layers[i] for i in sorted(layers)], axis=1) for _, _, layers in calls]
        )


class _Recorded(nn.Module):
    # Stands before a resident layer for as long as it is recorded.
    def __init__(self, experts, layer, session):
        super().__init__()
        self.experts, self._layer, self._session = experts, layer, session

    def __call__(self, x, indices):
        self._session.recorder.add(self._layer, np.array(indices))
        return self.experts(x, indices)


@contextmanager
def record(model):
    """Record the routing of everything that ``model`` runs inside the block.

    Args:
        model (nn.Module): As ``moelab.load`` returned it, in any mode.

    Yields:
        Trace: Empty at first, filled when the block ends, also by an exception.
    """
    session = getattr(model, "_session", None)
    if session is None:
        raise ValueError(f"{type(model).__name__}: expected a model from moelab.load.")
    if session.recorder is not None:
        raise ValueError("record: this model is being recorded already.")
    resident = expert_modules(model)
    trace = Trace(np.zeros((0, 0, 0), np.uint16), np.zeros(0, "U7"), np.zeros(0, np.int64))
    recorder = session.recorder = _Recorder()
    wrapped = [(p, _Recorded(m, i, session)) for i, (p, m) in enumerate(resident)]
    model.update_modules(tree_unflatten(wrapped))
    try:
        yield trace
    finally:
        session.recorder = None
        model.update_modules(tree_unflatten(resident))
        recorder.into(trace)
