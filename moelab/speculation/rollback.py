"""Take the last tokens back out of mlx-lm's caches, as if the model had not read them.

An attention cache is trimmed. A recurrent state (``ArraysCache``) depends on every token of the
text. ``Rollback`` has three strategies to get the state after fewer tokens:

    restore   put back the state from before the pass, and run the model over the kept tokens
    replay    keep a recurrence's inputs, and run the recurrence alone, without weights and experts
    states    keep the state after every token (but ``kernels.gated_delta`` uses replay)

``states`` costs memory. For Mamba 2 and on Metal it also costs time: otherwise mlx-lm computes
several tokens together there. ``auto`` is ``restore`` for an unknown recurrence, ``replay`` on
Metal or for states of more than ``STATES_NBYTES``, and otherwise ``states``.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, RotatingKVCache

from ..checkpoint import leaves
from ..memory import STATES_NBYTES
from ..system import on_metal
from .recurrence import Tape, recorders, recording
from .target import lock

STRATEGIES = ("auto", "restore", "replay", "states")


class Rollback:
    """Calls a model so that its last tokens can be taken back.

        rollback = Rollback(model, cache)
        logits = rollback(tokens)   # a pass over tokens [B, T]
        rollback.undo(n)            # the cache is as after the first T - n tokens
        rollback.commit()           # drops what undoing would need

    ``undo`` may take back several passes, up to the last ``commit``. ``Rollback`` changes the
    model's layers only during a pass. The caller may replace entries of ``cache`` between a commit
    and the next pass: mlx-lm does so to quantize them.

    Args:
        model (nn.Module): As ``mlx_lm.load`` or ``moelab.load`` returns it.
        cache (list): Its caches, from mlx-lm's ``make_prompt_cache(model)``.
        strategy (str): How recurrent states are taken back: ``restore``, ``replay``, ``states`` or
            ``auto``, as the module says. Default: ``auto``.

    Raises:
        ValueError: If the strategy is none of these, or a cache cannot give tokens back.
    """

    def __init__(self, model: nn.Module, cache: list, strategy: str = "auto"):
        if strategy not in STRATEGIES:
            raise ValueError(
                f"rollback: strategy {strategy!r}, expected one of {', '.join(STRATEGIES)}"
            )
        for c in leaves(cache):
            _check(c)
        self.model, self.cache, self.strategy = model, cache, strategy
        recurrent = any(isinstance(c, ArraysCache) for c in leaves(cache))
        self._recorders = recorders(model) if recurrent and strategy != "restore" else []
        if recurrent and not self._recorders:
            self._refuse_other_strategies()
        self._passes: list[_Pass] = []
        self._tapes_checked = False

    def __call__(self, tokens: mx.array, **kwargs) -> mx.array:
        """Call the model on tokens ``[B, T]``. An error leaves the caches as before the pass."""
        current = _Pass(tokens, [(c, _snapshot(c, tokens.shape[1])) for c in leaves(self.cache)])
        try:
            with lock(self.model), self._recording(current):
                logits = self.model(tokens, cache=self.cache, **kwargs)
        except BaseException:
            current.take_back()
            raise
        self._passes.append(current)
        return logits

    @property
    def undoable(self) -> int:
        """The number of tokens read since the last commit."""
        return sum(p.num_tokens for p in self._passes)

    @property
    def nbytes(self) -> int:
        """The bytes that the tapes hold until the next commit."""
        held = [a for p in self._passes for tape in p.tapes.values() for a in tape.arrays()]
        return sum({id(a): a.nbytes for a in held}.values())

    def undo(self, n: int) -> None:
        """Take back the last ``n`` tokens, at most ``undoable``, of every row of the batch."""
        if not isinstance(n, int) or not 0 <= n <= self.undoable:
            raise ValueError(
                f"rollback: undo({n!r}), expected a number from 0 to {self.undoable}, the tokens "
                "since commit"
            )
        while n and n >= self._passes[-1].num_tokens:
            whole = self._passes.pop()
            whole.take_back()
            n -= whole.num_tokens
        if not n:
            return
        last = self._passes.pop()
        kept = last.tokens[:, : last.num_tokens - n]
        if last.shorten(n):
            self._passes.append(_Pass(kept, last.snapshots, last.tapes))
        else:
            last.take_back()
            self(kept)

    def commit(self) -> None:
        """Keep all tokens for good."""
        self._passes.clear()

    @contextmanager
    def _recording(self, current: "_Pass"):
        # A pass over one token is undone whole, and needs no tape.
        if current.num_tokens == 1 or not self._recorders:
            yield
            return
        with recording(self._recorders, self._keep_states(current)) as tapes:
            yield
        current.tapes = {i: tape for i, tape in tapes.items() if tape.fits()}
        if not self._tapes_checked and not self._check_tapes(current):
            current.tapes, self._recorders = {}, []
        recurrent = (c for c, _ in current.snapshots if isinstance(c, ArraysCache))
        if any(id(c) not in current.tapes for c in recurrent):
            self._refuse_other_strategies()

    def _keep_states(self, current) -> bool:
        if self.strategy != "auto":
            return self.strategy == "states"
        caches = (c for c, _ in current.snapshots)
        state_nbytes = sum(c.nbytes for c in caches if isinstance(c, ArraysCache))
        return not on_metal() and current.num_tokens * state_nbytes <= STATES_NBYTES

    def _check_tapes(self, current) -> bool:
        """Whether the tapes, asked for a whole pass, give the arrays that the caches now hold."""
        equal = [
            mx.array_equal(a, b)
            for tape in current.tapes.values()
            for a, b in zip(tape.at(current.num_tokens), tape.cache.cache)
        ]
        self._tapes_checked = len(equal) == 0 or bool(mx.all(mx.stack(equal)).item())
        return self._tapes_checked

    def _refuse_other_strategies(self):
        if self.strategy in ("replay", "states"):
            raise ValueError(
                f"rollback: {self.strategy!r} is not known for every recurrent layer of "
                f"{type(self.model).__module__}; use 'restore' or 'auto'"
            )


@dataclass
class _Pass:
    """A pass that may be undone."""

    tokens: mx.array  # [B, T]
    snapshots: list[tuple[Any, Any]]  # each cache and its ``_snapshot``
    tapes: dict[int, Tape] = field(default_factory=dict)  # by the id of an ArraysCache

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]

    def take_back(self) -> None:
        for c, snapshot in self.snapshots:
            _take_back(c, snapshot)

    def shorten(self, n: int) -> bool:
        """Take back the last ``n`` tokens, but not all. False: a recurrent cache has no tape."""
        complete = True
        for c, snapshot in self.snapshots:
            if not isinstance(c, ArraysCache):
                _trim(c, snapshot, n)
            elif id(c) in self.tapes:
                c.cache = self.tapes[id(c)].at(self.num_tokens - n)
                c.advance(-n)
            else:
                complete = False
        return complete


def _check(c, more: int = 0) -> None:
    """Refuse a cache from which tokens cannot be taken back after ``more`` tokens were added."""
    if not isinstance(c, (ArraysCache, RotatingKVCache)) and not _trimmable(c, more):
        raise ValueError(
            f"rollback: a {type(c).__name__} of {_length(c) + more} tokens cannot be rolled back: "
            "it drops or merges tokens that are stored nowhere else. Generate without a draft, or "
            "with a batch of one."
        )
    if getattr(c, "keep", 0):
        raise ValueError(
            f"rollback: a {type(c).__name__} with keep={c.keep} cannot be used: once it is full, "
            "mlx-lm's pass over several tokens does not see the kept ones, as decoding one by one "
            "does. Generate without a draft, or without max_kv_size."
        )


def _trimmable(c, more: int = 0) -> bool:
    """Whether ``trim`` still takes tokens back exactly after ``more`` tokens were added."""
    if isinstance(c, (RotatingKVCache, BatchRotatingKVCache)):
        return _length(c) + more < c.max_size
    return getattr(c, "is_trimmable", lambda: False)()


def _length(c) -> int:
    """Return the number of tokens added to an attention cache."""
    # In batched caches ``offset`` is an array with a number for each row.
    lengths = (getattr(c, name, None) for name in ("_offset", "offset", "_idx"))
    return next((n for n in lengths if isinstance(n, int)), 0)


def _copies(arrays) -> tuple:
    # The new array shares the data. MLX copies the data only if one of the two arrays changes.
    return tuple(None if x is None else mx.array(x) for x in arrays)


def _snapshot(c, more: int):
    """Check a cache, and return what ``_take_back`` needs to undo a pass over ``more`` tokens."""
    _check(c, more)
    if isinstance(c, ArraysCache):
        return list(c.cache), *_copies((c.left_padding, c.lengths))
    if _trimmable(c, more):
        return _length(c)
    keys, values, *rest = c.state  # the cache is full: new tokens will overwrite these
    return _copies((keys, values)), rest


def _take_back(c, snapshot) -> None:
    """Put a cache back to its state at the snapshot."""
    if isinstance(c, ArraysCache):
        arrays, *paddings = snapshot
        c.state = list(arrays), *_copies(paddings)
    elif isinstance(snapshot, int):
        _checked_trim(c, _length(c) - snapshot)
    else:
        arrays, rest = snapshot
        c.state = *_copies(arrays), *rest


def _trim(c, snapshot, n: int) -> None:
    """Drop an attention cache's last ``n`` tokens, fewer than were added since the snapshot."""
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
