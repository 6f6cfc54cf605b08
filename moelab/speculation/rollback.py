"""Undo the last tokens of any mlx-lm cache, exactly.

An attention cache is trimmed. A recurrent state (``ArraysCache``: Mamba, Mamba-2, GatedDeltaNet and what resembles them) holds every token that it has
seen in one array and cannot be; mlx-lm therefore refuses to speculate on such models. Three ways to have the state after fewer tokens:

    restore   take back the state from before the pass and run the model again over the tokens that stay
    replay    keep what went into the recurrence, and run the recurrence alone over them: no weights, no experts
    states    run the recurrence one token at a time and keep every state on the way

On a CPU mlx-lm's recurrence is a loop over tokens anyway, and on CUDA a kernel here writes them all, so `states` costs nothing but memory; on Metal it
is one kernel, which `replay` keeps whole. `auto` goes by that and by `STATES_NBYTES`, and restores where it does not know a layer.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, CacheList, RotatingKVCache

from . import gated_delta

WAYS = ("auto", "restore", "replay", "states")

# `auto` keeps the state of every position where a pass's states take no more than this.
STATES_NBYTES = 256 * 2**20

# mlx-lm's recurrences: which argument is the state, which run over time and along which axis. Each returns (output [B, T, ...], state); the output's
# own time axis comes last in the tuple. `ssm_step` is a method of its layer, the others are functions that the layer's module has imported.
RECURRENCES = {
    "gated_delta_update": ("state", dict(q=1, k=1, v=1, a=1, b=1, mask=1), 1),
    "ssm_update": ("state", dict(hidden_states=1, B=1, C=1, dt=1, mask=1), 1),
    "recurrent_gla": ("h", dict(q=2, k=2, v=2, mask=1), 2),
    "ssm_step": ("state", dict(x=1), 1),
}


_LOCK = threading.RLock()


def lock(model: nn.Module) -> threading.RLock:
    """The lock to hold while a pass has changed the model's layers: the model's own, or one shared by all models without."""
    return getattr(model, "lock", _LOCK)


class Rollback:
    """Calls a model so that its last tokens can be taken back.

        rollback = Rollback(model, cache)
        logits = rollback(tokens)   # a pass over tokens [B, T]
        rollback.undo(n)            # cache as after the first T - n of them
        rollback.commit()           # frees what undoing would need

    Passes add up until `commit`: `undo` reaches over several of them. Between passes nothing of the model is changed; during one, only
    the layers of this model object are.

    Args:
        model (nn.Module): Any mlx-lm model, resident or streamed.
        cache (list): Its prompt cache. Entries may be exchanged between a commit and the next pass, as mlx-lm does to quantize.
        way (str): `restore`, `replay`, `states` or `auto`, as above.

    Raises:
        ValueError: if the cache cannot be rolled back, or not in this way.
    """

    def __init__(self, model: nn.Module, cache: list, way: str = "auto"):
        if way not in WAYS:
            raise ValueError(f"rollback: way {way!r}, expected one of {', '.join(WAYS)}")
        for c in _leaves(cache):
            if not isinstance(c, (ArraysCache, RotatingKVCache)) and not _trimmable(c):
                raise ValueError(
                    f"rollback: a {type(c).__name__} of {_length(c)} tokens cannot be rolled back: what it has dropped or merged is nowhere else. "
                    "Generate without a draft."
                )
            if getattr(c, "keep", 0):
                raise ValueError(
                    f"rollback: a {type(c).__name__} with keep={c.keep} cannot be used: once it is full, mlx-lm's pass over several tokens does not "
                    "see the kept ones as decoding one by one does. Generate without a draft, or without max_kv_size."
                )
        self.model, self.cache, self.way = model, cache, way
        recurrent = any(isinstance(c, ArraysCache) for c in _leaves(cache))
        self._recorders = _recorders(model) if recurrent and way != "restore" else []
        if recurrent and not self._recorders:
            self._refuse_unless_restoring()
        self._passes: list[_Pass] = []
        self._proved = False

    def __call__(self, tokens: mx.array, **kwargs) -> mx.array:
        """One pass over tokens [B, T]: what the model returns. If it raises, the caches are as they were before it."""
        before = _Pass(tokens, [(c, _snapshot(c, tokens.shape[1])) for c in _leaves(self.cache)])
        try:
            with lock(self.model), self._recording(before):
                logits = self.model(tokens, cache=self.cache, **kwargs)
        except BaseException:
            for c, snapshot in before.snapshots:
                _take_back(c, snapshot)
            raise
        self._passes.append(before)
        return logits

    @property
    def undoable(self) -> int:
        """Tokens that have gone in since `commit`."""
        return sum(p.num_tokens for p in self._passes)

    @property
    def nbytes(self) -> int:
        """Bytes held only so that tokens can be taken back."""
        held = [a for p in self._passes for tape in p.tapes.values() for a in tape.arrays()]
        return sum({id(a): a.nbytes for a in held}.values())

    def undo(self, n: int) -> None:
        """Take back the last `n` tokens of every row of the batch."""
        if not isinstance(n, int) or not 0 <= n <= self.undoable:
            raise ValueError(
                f"rollback: undo({n!r}), expected a number from 0 to {self.undoable}, the tokens since commit"
            )
        while n and n >= self._passes[-1].num_tokens:
            gone = self._passes.pop()
            n -= gone.num_tokens
            for c, snapshot in gone.snapshots:
                _take_back(c, snapshot)
        if not n:
            return
        last = self._passes.pop()
        stay = last.num_tokens - n
        again = False
        for c, snapshot in last.snapshots:
            if not isinstance(c, ArraysCache):
                _trim(c, snapshot, n)
            elif id(c) in last.tapes:
                c.cache = last.tapes[id(c)].at(stay)
                _advance(c, -n)
            else:
                again = True
        if not again:
            self._passes.append(_Pass(last.tokens[:, :stay], last.snapshots, last.tapes))
            return
        for c, snapshot in last.snapshots:
            _take_back(c, snapshot)
        self(last.tokens[:, :stay])

    def commit(self) -> None:
        """Keep all tokens for good."""
        self._passes.clear()

    @contextmanager
    def _recording(self, current: "_Pass"):
        """What the recurrent layers compute in this pass goes on tapes, one for each cache."""
        if current.num_tokens == 1 or not self._recorders:  # before and after are all there is
            yield
            return
        steps = self.way == "states" or (
            self.way == "auto"
            and not mx.metal.is_available()
            and self._state_nbytes(current) <= STATES_NBYTES
        )
        with ExitStack() as stack:
            for r in self._recorders:
                stack.enter_context(r.recording(current.tapes, steps))
            yield
        usable = {i: t for i, t in current.tapes.items() if t.fits()}
        if not self._proved:  # once: that the tapes say of all tokens what the caches say
            same = [
                mx.array_equal(a, b)
                for t in usable.values()
                for a, b in zip(t.at(current.num_tokens), t.cache.cache)
            ]
            self._proved = bool(mx.all(mx.stack(same)).item()) if same else True
            if not self._proved:
                usable, self._recorders = {}, []
        current.tapes = usable
        if any(isinstance(c, ArraysCache) and id(c) not in usable for c, _ in current.snapshots):
            self._refuse_unless_restoring()

    def _state_nbytes(self, current: "_Pass") -> int:
        return current.num_tokens * sum(
            c.nbytes for c, _ in current.snapshots if isinstance(c, ArraysCache)
        )

    def _refuse_unless_restoring(self):
        if self.way in ("replay", "states"):
            raise ValueError(
                f"rollback: {self.way!r} is not known for every recurrent layer of {type(self.model).__module__}; use 'restore' or 'auto'"
            )


@dataclass
class _Pass:
    tokens: mx.array
    snapshots: list  # (cache, what it takes to put it back)
    tapes: dict = field(default_factory=dict)  # id of an ArraysCache -> _Tape

    @property
    def num_tokens(self):
        return self.tokens.shape[1]


# Caches


def _leaves(cache) -> Iterator:
    for c in cache:
        if isinstance(c, CacheList):
            yield from _leaves(c.caches)
        else:
            yield c


def _trimmable(c, more: int = 0) -> bool:
    """Whether `trim` takes tokens back exactly once `more` have gone in."""
    if isinstance(c, (RotatingKVCache, BatchRotatingKVCache)):
        return _length(c) + more < c.max_size
    return getattr(c, "is_trimmable", lambda: False)()


def _length(c) -> int:
    """Tokens that have gone into an attention cache."""
    lengths = (
        getattr(c, name, None) for name in ("_offset", "offset", "_idx")
    )  # batched caches hold an `offset` for each row
    return next((n for n in lengths if isinstance(n, int)), 0)


def _snapshot(c, more: int):
    """What `_take_back` needs to undo a pass over `more` tokens."""
    if isinstance(c, ArraysCache):
        return list(c.cache), *(
            None if x is None else mx.array(x) for x in (c.left_padding, c.lengths)
        )
    if _trimmable(c, more):
        return _length(c)
    if isinstance(
        c, RotatingKVCache
    ):  # full: new tokens overwrite old ones, so keep the old. A handle is no copy until one is written.
        keys, values, *rest = c.state
        return tuple(None if x is None else mx.array(x) for x in (keys, values)), rest
    raise ValueError(
        f"rollback: a {type(c).__name__} that is full (max_size {getattr(c, 'max_size', '?')}) cannot be rolled back: it has overwritten its oldest "
        "tokens. Generate without a draft, or with a batch of one."
    )


def _take_back(c, snapshot) -> None:
    """As it was when the snapshot was made."""
    if isinstance(c, ArraysCache):
        arrays, left_padding, lengths = snapshot
        c.state = (
            list(arrays),
            *(None if x is None else mx.array(x) for x in (left_padding, lengths)),
        )
    elif isinstance(snapshot, int):
        _checked_trim(c, _length(c) - snapshot)
    else:
        (keys, values), rest = snapshot
        c.state = *(None if x is None else mx.array(x) for x in (keys, values)), *rest


def _trim(c, snapshot, n: int) -> None:
    """Take the last `n` tokens out of an attention cache, which keeps some that went in after the snapshot."""
    if isinstance(snapshot, int):
        return _checked_trim(c, n)
    stay = c.offset - snapshot[1][0] - n
    keys, values = (c._temporal_order(x) for x in (c.keys, c.values))
    end = keys.shape[2] - n
    keys, values = (mx.contiguous(x[..., end - stay : end, :]) for x in (keys, values))
    _take_back(c, snapshot)
    c.update_and_fetch(keys, values)


def _checked_trim(c, n: int) -> None:
    if n and (gone := c.trim(n)) != n:
        raise ValueError(f"rollback: a {type(c).__name__} gave back {gone} of {n} tokens")


def _advance(c: ArraysCache, n: int) -> None:
    for name in ("left_padding", "lengths"):
        if (x := getattr(c, name)) is not None:
            setattr(c, name, x - n)


# Recurrent layers


class _Tape:
    """What a recurrent layer did in one pass: its cache after any number of the tokens."""

    def __init__(self, cache: ArraysCache):
        self.cache = cache
        self.convs = []  # what went into its convolutions, [B, kernel - 1 + T, channels]
        self.steps = []  # (number of tokens, function, arguments, state afterwards), one after the other

    def fits(self) -> bool:
        """Whether every array of the cache is accounted for."""
        T = sum(n for n, *_ in self.steps)
        kernels = [None if x is None else x.shape[1] for x in self.cache.cache[: len(self.convs)]]
        lengths = {x.shape[1] - k for x, k in zip(self.convs, kernels) if k is not None} | (
            {T} if self.steps else set()
        )
        return (
            self.cache.lengths is None
            and len(lengths) == 1
            and len(self.cache.cache) == len(self.convs) + bool(self.steps)
        )

    def at(self, n: int) -> list:
        """The cache's arrays after `n` tokens."""
        arrays = [
            mx.contiguous(x[:, n : n + c.shape[1]]) for x, c in zip(self.convs, self.cache.cache)
        ]
        if self.steps:
            for num_tokens, fn, arguments, state in self.steps:
                if n <= num_tokens:
                    break
                n -= num_tokens
            if n < num_tokens:
                state = fn.over(arguments, 0, n)[1]
            arrays.append(state)
        return arrays

    def arrays(self) -> list:
        """Everything it holds."""
        held = [a for _, fn, arguments, _ in self.steps for a in fn.inputs(arguments)] + [
            state for *_, state in self.steps
        ]
        return self.convs + held


class _Recurrence:
    """One of mlx-lm's recurrences, called as mlx-lm calls it and put on tape."""

    def __init__(self, name: str, function, recorder: "_Recorder"):
        self.state, self.over_time, self.axis = RECURRENCES[name]
        self.function, self.recorder = function, recorder
        self.signature = inspect.signature(function)
        self.on_cuda = {
            every: gated_delta.with_kernel(function, every)
            for every in (False, True)
            if name == "gated_delta_update"
        }

    def __call__(self, *args, **kwargs):
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments, tape = bound.arguments, self.recorder.tape
        if tape is None:
            return self._call(arguments)
        name, axis = next(iter(self.over_time.items()))
        T = (
            arguments[name].shape[axis] if arguments[name].ndim > 2 else 1
        )  # mamba gives one token at a time, [B, channels]
        if T == 1 or not self.recorder.steps:
            y, state = self._call(arguments)
            tape.steps.append((T, self, arguments, state))
            return y, state
        if self.on_cuda and gated_delta.fits(**arguments):
            y, states = self._call(arguments, every=True)
            tape.steps.append((T, _States, states, states[-1]))
            return y, states[-1]
        ys = []
        for t in range(T):
            y, state = self.over(arguments, t, t + 1)
            arguments = {**arguments, self.state: state}
            tape.steps.append((1, self, {}, state))
            ys.append(y)
        return mx.concatenate(ys, axis=self.axis), state

    def over(self, arguments: dict, a: int, b: int):
        """(output, state) over the tokens from a to b."""
        cut = {}
        for name, axis in self.over_time.items():
            if (x := arguments.get(name)) is not None:
                cut[name] = x[(slice(None),) * axis + (slice(a, b),)]
        return self._call({**arguments, **cut})

    def inputs(self, arguments: dict) -> list:
        return [
            x for name in (*self.over_time, self.state) if (x := arguments.get(name)) is not None
        ]

    def _call(self, arguments: dict, every: bool = False):
        kernel = self.on_cuda and gated_delta.fits(**arguments)
        function = self.on_cuda[every] if kernel else self.function
        args, kwargs = [], {}
        for name, p in self.signature.parameters.items():
            if p.kind is p.KEYWORD_ONLY:
                kwargs[name] = arguments[name]
            else:
                args.append(arguments[name])
        return function(*args, **kwargs)


class _States:
    """In the place of a recurrence, where a kernel has kept every state [T, ...] of a pass."""

    @staticmethod
    def over(states, a, b):
        return None, states[b - 1]

    @staticmethod
    def inputs(states):
        return [states]


class _Recorder:
    """Listens to one recurrent layer, by giving the layer and its convolutions a class of their own for as long as a pass takes.

    The layer's methods are the original ones; only the names under which they find the recurrence mean a `_Recurrence`.
    """

    def __init__(self, layer: nn.Module):
        self.tape, self.steps = None, False
        cls = type(layer)
        own = {"__call__": _noting_the_cache(self, cls.__call__)}
        if hasattr(cls, "ssm_step"):
            step = _Recurrence("ssm_step", layer.ssm_step, self)
            own["ssm_step"] = lambda _, *args, **kwargs: step(*args, **kwargs)
        for name, f in _functions(cls).items():
            used = {g: _Recurrence(g, f.__globals__[g], self) for g in _recurrences_of(f)}
            if used:
                rebound = FunctionType(
                    f.__code__, {**f.__globals__, **used}, f.__name__, f.__defaults__, f.__closure__
                )
                rebound.__kwdefaults__ = f.__kwdefaults__
                own[name] = _noting_the_cache(self, rebound) if name == "__call__" else rebound
        self._classes = [(layer, type(cls.__name__, (cls,), own))]
        for conv in _convolutions(layer):
            self._classes.append(
                (
                    conv,
                    type(
                        type(conv).__name__,
                        (type(conv),),
                        {"__call__": _noting_the_input(self, type(conv))},
                    ),
                )
            )

    @contextmanager
    def recording(self, tapes: dict, steps: bool):
        """Within, the layer's work goes to a tape in `tapes` under the id of the cache that it is called with, with `steps` token by token."""
        self._tapes, self.steps = tapes, steps
        before = [(m, type(m)) for m, _ in self._classes]
        try:
            for m, cls in self._classes:
                m.__class__ = cls
            yield
        finally:
            for m, cls in before:
                m.__class__ = cls
            self.tape = self._tapes = None

    def begin(self, cache) -> None:
        self.tape = None
        if cache is not None:
            self.tape = self._tapes[id(cache)] = _Tape(cache)


def _noting_the_cache(recorder, call):
    def __call__(self, *args, **kwargs):
        recorder.begin(
            next((a for a in (*args, *kwargs.values()) if isinstance(a, ArraysCache)), None)
        )
        try:
            return call(self, *args, **kwargs)
        finally:
            recorder.tape = None

    return __call__


def _noting_the_input(recorder, cls):
    def __call__(self, x):
        if recorder.tape is not None:
            recorder.tape.convs.append(x)
        return cls.__call__(self, x)

    return __call__


def _recorders(model: nn.Module) -> list[_Recorder]:
    """One for each recurrent layer: the innermost modules that take a cache and have a recurrence or a convolution."""
    found = {}
    for path, m in model.named_modules():
        if "cache" in inspect.signature(type(m).__call__).parameters and (
            _uses_recurrence(type(m)) or _convolutions(m)
        ):
            found[path] = m
    return [
        _Recorder(m)
        for p, m in found.items()
        if not any(q != p and q.startswith(p + ".") for q in found) and p
    ]


def _uses_recurrence(cls) -> bool:
    return hasattr(cls, "ssm_step") or any(_recurrences_of(f) for f in _functions(cls).values())


def _functions(cls) -> dict:
    """The methods that a class and its bases define in Python."""
    mro = [c for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    return {
        name: f for c in reversed(mro) for name, f in vars(c).items() if isinstance(f, FunctionType)
    }


def _recurrences_of(f) -> list[str]:
    return [n for n in f.__code__.co_names if n in RECURRENCES and callable(f.__globals__.get(n))]


def _convolutions(m: nn.Module) -> list[nn.Module]:
    return [c for _, c in m.named_modules() if isinstance(c, nn.Conv1d)]
