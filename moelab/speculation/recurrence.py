"""Tapes of what recurrent layers do in a pass: their caches after any number of its tokens.

``recorders`` finds the recurrent layers of an mlx-lm model. While ``recording`` lasts, a pass of
the model leaves one ``Tape`` for each ``ArraysCache``: what went into the layer's convolutions, and
either what went into its recurrence or the recurrence's state after every token. ``Tape.at(n)``
then gives the cache's arrays after the first ``n`` tokens, without weights and without experts.
``rollback`` decides when to record.
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
    """How one of mlx-lm's recurrences is called. It returns its output and the new state."""

    state: str  # the argument that is the state
    inputs: dict[str, int]  # arguments with one entry for each token, and their time axis
    axis: int  # the output's time axis


# The keys are names of functions that a layer's module imports; ``ssm_step`` is a layer's method.
# A family with another recurrence gets a line here and one in ``tests/helpers/recurrent.py``, whose
# tests fail until it is there. Without it ``rollback`` restores the state and computes again.
RECURRENCES = {
    "gated_delta_update": Form("state", dict(q=1, k=1, v=1, a=1, b=1, mask=1), 1),
    "ssm_update": Form("state", dict(hidden_states=1, B=1, C=1, dt=1, mask=1), 1),
    "recurrent_gla": Form("h", dict(q=2, k=2, v=2, mask=1), 2),
    "ssm_step": Form("state", dict(x=1), 1),
}


class Tape:
    """What a recurrent layer did in one pass: its cache after any number of the tokens."""

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
        """The cache's arrays after ``n`` tokens, at least one."""
        arrays = [
            _contiguous(x[:, n : n + c.shape[1]]) for x, c in zip(self.convs, self.cache.cache)
        ]
        for step in self.steps:
            if n <= step.num_tokens:
                arrays.append(step.state_after(n))
                break
            n -= step.num_tokens
        return arrays

    def arrays(self) -> list[mx.array]:
        """Everything that the tape holds."""
        return self.convs + [a for step in self.steps for a in (*step.kept, step.state)]


@dataclass
class _Step:
    """What a call of a recurrence did: its state after any number of its tokens."""

    num_tokens: int
    state: mx.array  # after all tokens
    earlier: Callable[[int], mx.array]  # the state after fewer tokens, at least one
    kept: list  # the arrays that ``earlier`` needs

    def state_after(self, n: int) -> mx.array:
        return self.state if n == self.num_tokens else self.earlier(n)


class _Recurrence:
    """Stands for one of mlx-lm's recurrences: computes the same, and puts its work on the tape."""

    def __init__(self, name: str, function, recorder: "Recorder"):
        self.form = RECURRENCES[name]
        self.function, self.recorder = function, recorder
        self.signature = inspect.signature(function)
        self._on_cuda = {
            every: gated_delta_cuda.with_kernel(function, every)
            for every in (False, True)
            if name == "gated_delta_update"
        }
        self.with_states = kernels.gated_delta.with_states(function)

    def __call__(self, *args, **kwargs):
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments, tape = bound.arguments, self.recorder.tape
        if tape is None:
            return self._call(arguments)
        name, axis = next(iter(self.form.inputs.items()))
        # Mamba gives one token at a time, [B, channels].
        T = arguments[name].shape[axis] if arguments[name].ndim > 2 else 1
        if T == 1 or not self.recorder.keep_states:
            y, state = self._call(arguments)
            kept = [arguments.get(name) for name in (*self.form.inputs, self.form.state)]
            kept = [x for x in kept if x is not None]
            step = _Step(T, state, lambda n: self._over(arguments, 0, n)[1], kept)
        else:
            y, states = self._with_states(arguments, T)
            kept = [states] if isinstance(states, mx.array) else states
            step = _Step(T, states[-1], lambda n: states[n - 1], kept)
        tape.steps.append(step)
        return y, step.state

    def _with_states(self, arguments, T):
        """Output and the state after every token: one array, if a kernel writes them, or a list."""
        on_cuda = self._on_cuda and gated_delta_cuda.fits(**arguments)
        if on_cuda or (self.with_states and kernels.gated_delta.fits(**arguments)):
            return self._call(arguments, every=True)
        ys, states = [], []
        for t in range(T):
            y, state = self._over(arguments, t, t + 1)
            arguments = {**arguments, self.form.state: state}
            ys.append(y)
            states.append(state)
        return mx.concatenate(ys, axis=self.form.axis), states

    def _over(self, arguments, a, b):
        """Run over the tokens from ``a`` to ``b``: output and state."""
        cut = {}
        for name, axis in self.form.inputs.items():
            if (x := arguments.get(name)) is not None:
                cut[name] = x[(slice(None),) * axis + (slice(a, b),)]
        return self._call({**arguments, **cut})

    def _call(self, arguments, every=False):
        if self._on_cuda and gated_delta_cuda.fits(**arguments):
            function = self._on_cuda[every]
        else:
            function = self.with_states if every else self.function
        bound = inspect.BoundArguments(self.signature, arguments)
        return function(*bound.args, **bound.kwargs)


class Recorder:
    """Puts what one recurrent layer does on tape, while its hooks are installed.

    Copies of the layer's methods run in their place. They have globals of their own, in which the
    name of a recurrence means a ``_Recurrence``, so no other model is affected.
    """

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
        # A block of ``kernels`` tells what it did (``keep``), or asks for ``call``. It is always
        # replayed: that takes less time than memory for the states of all tokens.
        self._is_block = isinstance(layer, kernels.GatedDelta)
        # A copy runs in place of the original. This hook is innermost, or the hooks of others
        # would be skipped.
        self._hooks = [
            *([] if self._is_block else [hooked(layer, self._on_call, innermost=True)]),
            *(
                hooked(layer, partial(_instead, copy), name, innermost=True)
                for name, copy in copies.items()
            ),
            *(hooked(conv, self._on_convolution) for conv in _convolutions(layer)),
        ]

    def install(self) -> None:
        """Begin to record."""
        if self._is_block:
            object.__setattr__(self.layer, "recorder", self)  # no change of the layer
        else:
            self._install_hooks()

    def remove(self) -> None:
        """End recording. Undoes an interrupted ``install`` too."""
        if self._is_block:
            object.__setattr__(self.layer, "recorder", None)
        self._remove_hooks()
        self.tapes = None

    def _install_hooks(self):
        for hook in self._hooks:
            hook.install()

    def _remove_hooks(self):
        for hook in self._hooks:
            hook.remove()

    def call(self, *args, **kwargs) -> mx.array:
        """Call the block mlx-lm's way."""
        try:
            self._install_hooks()
            return self._on_call(None, *args, **kwargs)
        finally:
            self._remove_hooks()

    def keep(self, cache: ArraysCache, did: kernels.Recurred) -> None:
        """Put on tape what the block did; nobody may write to the memory of its inputs again."""
        tape = self.tapes[id(cache)] = Tape(cache)
        tape.convs.append(did.conv)
        *inputs, state = did.inputs

        def earlier(n):
            begun = (a[:, :n] for a in inputs)
            return kernels.to_mlx(kernels.gated_delta.recur(*begun, state)[1])

        tape.steps.append(_Step(inputs[0].shape[1], cache[1], earlier, list(did.inputs)))

    def _on_call(self, original, *args, **kwargs):
        given = (*args, *kwargs.values())
        cache = next((a for a in given if isinstance(a, ArraysCache)), None)
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
    """Record what the layers do in a pass, which fills the dict of tapes by the id of their cache.

    ``keep_states`` keeps the state after every token in place of the inputs.
    """
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
    """A recorder for each recurrent layer of an mlx-lm model.

    These are the innermost modules that take a cache and have a recurrence or a convolution.
    """
    found = {}
    for path, m in model.named_modules():
        cls = unhooked(m)
        if "cache" in inspect.signature(cls.__call__).parameters and (
            _uses_recurrence(cls) or _convolutions(m)
        ):
            found[path] = m
    return [
        Recorder(m)
        for p, m in found.items()
        if not any(q != p and q.startswith(p + ".") for q in found) and p
    ]


def _contiguous(x):
    """Copy an array, a numpy one at once: MLX would copy each layer's apart, at the next token."""
    return mx.contiguous(x) if isinstance(x, mx.array) else kernels.to_mlx(np.ascontiguousarray(x))


def _instead(copy, original, *args, **kwargs):
    return copy(*args, **kwargs)


def _uses_recurrence(cls) -> bool:
    return hasattr(cls, "ssm_step") or any(_recurrences_of(f) for f in methods(cls).values())


def _recurrences_of(f) -> list[str]:
    return [n for n in f.__code__.co_names if n in RECURRENCES and callable(f.__globals__.get(n))]


def _convolutions(m: nn.Module) -> list[nn.Module]:
    return [c for _, c in m.named_modules() if isinstance(c, nn.Conv1d)]
