"""A tape records a recurrent layer in a pass, and gives the layer's cache after fewer tokens.

While ``recording`` lasts, a pass of the model leaves one ``Tape`` for each ``ArraysCache``. A tape
computes the cache's arrays after the first n tokens; it needs no weights and no experts for that.
"""

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache

from .. import kernels
from ..hooks import hooked, methods, unhooked, with_globals
from . import gated_delta_cuda


class Form(NamedTuple):
    """How to call a recurrence of mlx-lm. A recurrence returns its output and the new state."""

    state: str  # the argument that is the state
    inputs: dict[str, int]  # arguments with one entry for each token, and their time axis


# Keys are functions that a layer's Python file imports, and the layer's method ``ssm_step``. If a
# family's recurrence is missing here, ``Rollback`` uses the strategy ``restore``. The test
# ``tests/speculation/test_rollback.py`` fails until ``tests/helpers/drafting.py`` names the family.
RECURRENCES = {
    "gated_delta_update": Form("state", dict(q=1, k=1, v=1, a=1, b=1, mask=1)),
    "ssm_update": Form("state", dict(hidden_states=1, B=1, C=1, dt=1, mask=1)),
    "recurrent_gla": Form("h", dict(q=2, k=2, v=2, mask=1)),
    "ssm_step": Form("state", dict(x=1)),
}


class Tape:
    """Keeps one pass of a recurrent layer; gives the layer's cache after the first n tokens."""

    def __init__(self, cache: ArraysCache):
        self.cache = cache
        self.convs = []  # inputs of the convolutions, [B, kernel - 1 + T, channels]
        self.steps: list[_Step] = []  # the recurrence's work, in order

    def fits(self) -> bool:
        """Whether the tape accounts for every array of the cache."""
        kernels = [None if x is None else x.shape[1] for x in self.cache.cache[: len(self.convs)]]
        lengths = {x.shape[1] - k for x, k in zip(self.convs, kernels) if k is not None}
        if self.steps:
            lengths.add(sum(step.num_tokens for step in self.steps))
        return (
            self.cache.lengths is None
            and len(lengths) == 1
            and len(self.cache.cache) == len(self.convs) + bool(self.steps)
        )

    def at(self, n: int) -> list[mx.array]:
        """The cache's arrays after the first ``n`` tokens; ``n`` is 1 or more."""
        arrays = [
            _contiguous(x[:, n : n + c.shape[1]]) for x, c in zip(self.convs, self.cache.cache)
        ]
        for step in self.steps:
            if n <= step.num_tokens:
                return [*arrays, step.state if n == step.num_tokens else step.earlier(n)]
            n -= step.num_tokens
        return arrays

    def arrays(self) -> list[mx.array]:
        """Everything that the tape holds."""
        return self.convs + [a for step in self.steps for a in (*step.kept, step.state)]


@dataclass
class _Step:
    """What a call of a recurrence did."""

    num_tokens: int
    state: mx.array  # after all tokens
    earlier: Callable[[int], mx.array]  # the state after fewer tokens, at least one
    kept: list  # the arrays that ``earlier`` needs


class _Recurrence:
    """Replaces one of mlx-lm's recurrences: computes the same, and puts the work on the tape."""

    def __init__(self, name: str, function, recorder: "Recorder"):
        self.form, self.name = RECURRENCES[name], name
        self.function, self.recorder = function, recorder
        self.signature = inspect.signature(function)
        self._is_fast = getattr(function, "is_fast", False)  # set by ``kernels.gated_delta``

    def __call__(self, *args, **kwargs):
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments, tape = bound.arguments, self.recorder.tape
        if tape is None:
            return self._call(arguments)
        name, axis = next(iter(self.form.inputs.items()))  # the output has the same time axis
        # Mamba's method gets one token at a time, [B, channels].
        T = arguments[name].shape[axis] if arguments[name].ndim > 2 else 1
        if T == 1 or self._is_fast or not self.recorder.keep_states:
            y, state = self._call(arguments)
            kept = [arguments.get(name) for name in (*self.form.inputs, self.form.state)]
            kept = [x for x in kept if x is not None]
            step = _Step(T, state, lambda n: self._over(arguments, 0, n)[1], kept)
        else:
            y, states = self._with_states(arguments, T, axis)
            kept = [states] if isinstance(states, mx.array) else states
            step = _Step(T, states[-1], lambda n: states[n - 1], kept)
        tape.steps.append(step)
        return y, step.state

    def _with_states(self, arguments, T, axis):
        """Return the output and the states after every token, as a kernel's array or a list."""
        if self._on_cuda(arguments):
            return self._call(arguments, every=True)
        ys, states = [], []
        for t in range(T):
            y, state = self._over(arguments, t, t + 1)
            arguments = {**arguments, self.form.state: state}
            ys.append(y)
            states.append(state)
        return mx.concatenate(ys, axis=axis), states

    def _over(self, arguments, a, b):
        """Run the recurrence over tokens ``[a:b]``; return output and state."""
        cut = {}
        for name, axis in self.form.inputs.items():
            if (x := arguments.get(name)) is not None:
                cut[name] = x[(slice(None),) * axis + (slice(a, b),)]
        return self._call({**arguments, **cut})

    def _on_cuda(self, arguments):
        return self.name == "gated_delta_update" and gated_delta_cuda.fits(**arguments)

    def _call(self, arguments, every=False):
        function = self.function
        if self._on_cuda(arguments):
            ops = partial(gated_delta_cuda.gated_delta, every=every)
            function = with_globals(function, {"gated_delta_ops": ops})
        bound = inspect.BoundArguments(self.signature, arguments)
        return function(*bound.args, **bound.kwargs)


class Recorder:
    """Puts one recurrent layer's work on tape, by hooks that run copies of the layer's methods."""

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.tape = None  # the tape of the call that is running
        self.tapes = None  # the tapes of the pass that is running, by the id of their cache
        self.keep_states = False
        cls = unhooked(layer)
        copies = {}
        if hasattr(cls, "ssm_step"):
            copies["ssm_step"] = _Recurrence("ssm_step", MethodType(cls.ssm_step, layer), self)
        for name, f in methods(cls).items():
            used = {g: _Recurrence(g, f.__globals__[g], self) for g in _recurrences_of(f)}
            if used:
                copies[name] = MethodType(with_globals(f, used), layer)
        self._copy = copies.pop("__call__", None)
        # A block of ``kernels`` calls ``keep`` with its work, or ``call`` if mlx-lm computes.
        self._is_block = isinstance(layer, kernels.GatedDelta)
        # These hooks are innermost: a copy replaces the original, so other hooks must run first.
        instead = {} if self._is_block else {"__call__": self._on_call}
        instead |= {name: partial(_instead, copy) for name, copy in copies.items()}
        self._hooks = [hooked(layer, f, name, innermost=True) for name, f in instead.items()]
        self._hooks += [hooked(conv, self._on_convolution) for conv in _convolutions(layer)]

    def install(self) -> None:
        """Begin to record."""
        if self._is_block:
            object.__setattr__(self.layer, "recorder", self)  # ``Watched`` must not notice this
        else:
            self._install_hooks()

    def remove(self) -> None:
        """End recording, also after an interrupted ``install``."""
        if self._is_block:
            object.__setattr__(self.layer, "recorder", None)
        self._remove_hooks()
        self.tapes = None

    def call(self, *args, **kwargs) -> mx.array:
        """Call mlx-lm's code with the hooks."""
        try:
            self._install_hooks()
            return self._on_call(None, *args, **kwargs)
        finally:
            self._remove_hooks()

    def _install_hooks(self):
        for hook in self._hooks:
            hook.install()

    def _remove_hooks(self):
        for hook in self._hooks:
            hook.remove()

    def keep(self, cache: ArraysCache, did: kernels.Recurred) -> None:
        """Put a block's work on tape. The memory of ``did.inputs`` must not change afterwards."""
        tape = self.tapes[id(cache)] = Tape(cache)
        tape.convs.append(did.conv)
        *inputs, state = did.inputs

        def earlier(n):
            first = [a[:, :n] for a in inputs]
            if len(state) > 1:  # see ``recur``: these are parts of several texts
                first = map(np.ascontiguousarray, first)
            return kernels.to_mlx(kernels.gated_delta.recur(*first, state)[1])

        tape.steps.append(_Step(inputs[0].shape[1], cache[1], earlier, list(did.inputs)))

    def _on_call(self, original, *args, **kwargs):
        cache = next((a for a in (*args, *kwargs.values()) if isinstance(a, ArraysCache)), None)
        if cache is not None:
            self.tape = self.tapes[id(cache)] = Tape(cache)
        try:
            return (self._copy or original)(*args, **kwargs)
        finally:
            self.tape = None

    def _on_convolution(self, original, x):
        if self.tape is not None:
            self.tape.convs.append(x)
        return original(x)


@contextmanager
def recording(recorders: list[Recorder], keep_states: bool):
    """Yield a pass's tapes by cache id. A tape keeps states if ``keep_states``, else inputs."""
    tapes = {}
    try:
        for recorder in recorders:
            recorder.tapes, recorder.keep_states = tapes, keep_states
            recorder.install()
        yield tapes
    finally:
        for recorder in recorders:
            recorder.remove()


def recorders(model: nn.Module) -> list[Recorder]:
    """Make recorders for mlx-lm's recurrent layers: the innermost modules that have a cache."""
    found = {path: m for path, m in model.named_modules() if path and _is_recurrent(m)}
    if any(unhooked(m).__module__.startswith("mlx_vlm.") for m in found.values()):
        return []  # mlx-vlm's recurrences change the cache themselves
    inner = [p for p in found if not any(q.startswith(f"{p}.") for q in found)]
    return [Recorder(found[path]) for path in inner]


def _contiguous(x):
    """Make an array contiguous. Copy a numpy array now; MLX would copy it with the next token."""
    return mx.contiguous(x) if isinstance(x, mx.array) else kernels.to_mlx(np.ascontiguousarray(x))


def _instead(copy, original, *args, **kwargs):
    return copy(*args, **kwargs)


def _is_recurrent(m: nn.Module) -> bool:
    cls = unhooked(m)
    return "cache" in inspect.signature(cls.__call__).parameters and (
        hasattr(cls, "ssm_step")
        or any(map(_recurrences_of, methods(cls).values()))
        or len(_convolutions(m)) > 0
    )


def _recurrences_of(f) -> list[str]:
    return [n for n in f.__code__.co_names if n in RECURRENCES and callable(f.__globals__.get(n))]


def _convolutions(m: nn.Module) -> list[nn.Module]:
    return [c for _, c in m.named_modules() if isinstance(c, nn.Conv1d)]
