"""Decode and time, with a draft, without one, or with given experts: what experiments use."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache

from .. import kernels, stats
from ..prompt import encode as encode
from ..speculation.drafts import Draft
from ..speculation.generate import speculative_generate_step
from ..speculation.policy import Policy
from ..speculation.sampling import num_accepted as same_tokens  # noqa: F401 (of two texts)
from ..streaming.counters import Counters
from ..streaming.layers import expert_layers
from ..streaming.record import replacing_indices
from ..streaming.session import is_loaded, session_of

BUILT_IN = ("lookup", "mtp", "self", "oracle")  # drafts that have a name and no folder
ACCEPT = 0.8  # of the draft ``oracle``'s guesses this share is right; ``oracle:0.7`` sets another


@dataclass(frozen=True)
class Decoded:
    """The result of one timed run."""

    tokens: list[int]  # the first token after the prompt, the warm-up's tokens, the timed tokens
    prefill_s: float  # seconds of the prompt and of the token after it
    decode_s: float  # seconds of the timed tokens together
    counters: Counters | None  # of the timed tokens; None if mlx-lm loaded the model
    decode_tokens: int  # how many tokens were timed
    # For each timed round with a draft: drafted and accepted tokens; draft and verify seconds.
    rounds: list[tuple[int, int, float, float]]


def read_all_but_last(model: nn.Module, ids: mx.array, cache: list[Any]) -> None:
    """Prefill a prompt ``[1, n]`` except its last token, in parts that fit into memory."""
    before = ids[:, :-1]
    if before.shape[1]:
        for part in session_of(model).room.parts(before) if is_loaded(model) else [before]:
            model(part, cache=cache)
            mx.eval([c.state for c in cache])


def decode(
    model: nn.Module,
    prompt_ids: Sequence[int],
    tokens: int,
    warmup: int = 0,
    feed: Sequence[int] | None = None,
    sampler: Callable[[mx.array], mx.array] | None = None,
    **calls: Callable[[], Any] | None,
) -> Decoded:
    """Decode ``warmup + tokens`` tokens and time the prompt and the last ``tokens``.

    Each token is scheduled before the previous token is read, as in mlx-lm's ``generate_step``. But
    no token is scheduled when the clock starts or stops, so exactly ``tokens`` passes are timed.
    ``feed`` has ``warmup + tokens`` ids, which are fed in place of the decoded ids. ``calls`` are
    functions called with the clock stopped: ``before_prompt``, ``before_clock``, ``before_token``.
    With ``before_token`` each token is read before the next is scheduled.
    """
    cache, ids = make_prompt_cache(model), mx.array(prompt_ids)[None]
    fed, alone = None if feed is None else iter(feed), calls.get("before_token")

    def step(ids):
        logits = model(ids[None], cache=cache)[:, -1, :]
        if sampler is None:
            return mx.argmax(logits, axis=-1)
        return sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    def scheduled(y):
        y = step(y if fed is None else mx.array([next(fed)], mx.uint32))
        mx.async_eval(y)
        return y

    def rounds():
        read_all_but_last(model, ids, cache)
        y, following = step(ids[0, -1:]), None
        yield [y.item()], None
        for n in range(1, warmup + tokens + 1):
            y = scheduled(y) if following is None else following
            following = None if alone or n in (warmup, warmup + tokens) else scheduled(y)
            yield [y.item()], None

    with mx.stream(generation_stream):
        return _timed(model, rounds(), tokens, warmup, **calls)


def decode_drafted(
    model: nn.Module,
    prompt_ids: Sequence[int],
    draft: Draft,
    num_drafts: int | str | Policy,
    tokens: int,
    warmup: int = 0,
    sampler: Callable[[mx.array], mx.array] | None = None,
    feed: Sequence[int] | None = None,
    **calls: Callable[[], Any] | None,
) -> Decoded:
    """Decode as ``decode`` does, with a draft: the clock starts and stops between rounds.

    With ``feed`` the text continues with the ids of ``feed``. The returned tokens are then those
    that the target would have chosen, as in ``decode``.
    """
    chosen = {}  # the target's last choice at each place; a rejection makes it choose again

    def fed(tokens, logits):
        i = tokens.size - len(prompt_ids)
        chosen[i] = mx.argmax(logits, axis=-1)
        mx.async_eval(chosen[i])  # a lazy choice would keep its logits in memory
        token = feed[min(i, len(feed) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == token, logits, -mx.inf)

    def rounds():
        made, most = [], 1 + warmup + tokens
        steps = speculative_generate_step(
            mx.array(prompt_ids),
            model,
            draft,
            num_draft_tokens=num_drafts,
            max_tokens=most,
            sampler=sampler,
            logits_processors=None if feed is None else [fed],
        )
        with closing(steps):
            for n, (token, _, _, r) in enumerate(steps, 1):
                made.append(token)
                if len(made) > r.accepted or n == most:  # the round is complete
                    yield made, (r.drafted, r.accepted, r.draft_s, r.verify_s)
                    made = []

    ran = _timed(model, rounds(), tokens, warmup, **calls)
    own = ran.tokens if feed is None else [chosen[i].item() for i in range(len(ran.tokens))]
    return replace(ran, tokens=own)


def _timed(
    model, rounds, tokens, warmup, before_prompt=None, before_clock=None, before_token=None
) -> Decoded:
    """Time ``rounds``, which yields a round's tokens and its entry for ``Decoded.rounds``."""
    out, decode_s, told, first = [], 0.0, [], None
    if ours := is_loaded(model):
        stats(model, reset=True)
    if before_prompt:
        before_prompt()
    # Keep macOS from swapping out the GPU's memory while tokens are timed, as mlx-lm's loop does.
    with wired_limit(model, [generation_stream]), closing(rounds):
        begin = time.perf_counter()
        for made, drafted in rounds:
            took_s = time.perf_counter() - begin
            if not out:
                prefill_s = took_s
            out += made
            if first is not None:
                decode_s += took_s
                told.append(drafted)
            elif len(out) > warmup:
                first = len(out)
                if ours:
                    stats(model, reset=True)
                if before_clock:
                    before_clock()
            if before_token and len(out) <= warmup + tokens:
                before_token()
            begin = time.perf_counter()
    counters = None
    if ours:
        both = stats(model)  # a verify pass of many tokens counts as prefill
        counted = {k: v + getattr(both.prefill, k) for k, v in asdict(both.decode).items()}
        counters = Counters(**counted)
    return Decoded(
        tokens=out,
        prefill_s=prefill_s,
        decode_s=decode_s,
        counters=counters,
        decode_tokens=len(out) - first,
        rounds=[drafted for drafted in told if drafted],
    )


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


class OracleDraft(Draft):
    """A draft that knows the text, and guesses each token right with probability ``accept``.

    The seed decides which tokens of the text are guessed right. After a wrong guess, the later
    guesses of the round are wrong too. A wrong guess is usually a token from elsewhere in the text.
    """

    def __init__(self, tokens: Sequence[int], accept: float = ACCEPT, seed: int = 0):
        rng, self._tokens = np.random.default_rng(seed), np.array(tokens)
        self._is_right = rng.random(len(tokens)) < accept
        others = rng.permutation(self._tokens)
        self._wrong = np.where(others == tokens, (others + 1) % 2, others)

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        self._read = 0

    def extend(self, tokens: mx.array, features: mx.array | None = None) -> None:
        self._read += tokens.size

    def propose(self, last: int, n: int, choose: Callable) -> mx.array:
        at = slice(self._read + 1, self._read + 1 + n)
        right = np.logical_and.accumulate(self._is_right[at])
        return mx.array(np.where(right, self._tokens[at], self._wrong[at]), mx.uint32)


def oracle_share(draft: str | Path | None) -> float | None:
    """Return the share of right guesses of ``oracle`` or ``oracle:SHARE``; None for others."""
    word, _, share = str(draft).partition(":")
    if word != "oracle":
        return None
    with suppress(ValueError):
        if 0 <= (accept := float(share or ACCEPT)) <= 1:
            return accept
    raise ValueError(f"draft {draft!r}: expected a share from 0 to 1, as in oracle:0.7")
