"""Speculative decoding: a pass of the target gives several tokens, and the text is mlx-lm's.

At any temperature and with any draft, the text is that of ``mlx_lm.stream_generate`` with the same
``mx.random.seed``, except for rounding in longer passes. A round of ``_Rounds`` has these steps:

    ask the policy     how many tokens to draft, 0 included             (``policy``)
    propose            the draft guesses these tokens                   (``drafts``, ``dflash``)
    verify             one pass of the target over the guesses chooses its own tokens
    accept             the guesses before the first refused one         (``sampling``)
    tell the policy    what the round cost and brought
    roll back, commit  the target's cache keeps the accepted tokens     (``rollback``)

mlx-lm's ``stream_generate`` turns the tokens into text. It uses the ``Detokenizer`` that ``load``
gives to tokenizers (``moelab/detokenizer.py``).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Integral

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    GenerationResponse,
    generation_stream,
    maybe_quantize_kv_cache,
    stream_generate,
)
from mlx_lm.models.cache import make_prompt_cache

from ..hooks import with_globals
from ..prompt import check_tokens
from .drafts import BoundDraft, Draft, learned_policy
from .policy import Always, Policy
from .rollback import Rollback
from .sampling import Chooser, num_accepted
from .target import PREFILL_STEP, Capture, lock


@dataclass(frozen=True)
class Round:
    """One pass of the target after the prompt."""

    number: int  # from 0
    drafted: int = 0  # tokens that the draft proposed
    accepted: int = 0  # accepted drafts; the token that the target adds does not count
    draft_s: float = 0.0  # seconds until the drafts were there
    verify_s: float = 0.0  # seconds of the verify pass; if nothing was drafted, until a token came


@dataclass
class SpeculativeResponse(GenerationResponse):
    """mlx-lm's response, with the numbers of tokens drafted and accepted so far."""

    drafted: int = 0  # tokens drafted so far
    accepted: int = 0  # drafted tokens that the target accepted so far


def speculative_generate(
    model: nn.Module,
    tokenizer,
    prompt: str | mx.array | list[int],
    draft: Draft,
    max_tokens: int = 256,
    stream: mx.Stream = generation_stream,
    num_draft_tokens: int | str | Policy = "auto",
    **kwargs,
) -> Iterator[SpeculativeResponse]:
    """Generate text with a draft: the text of ``mlx_lm.stream_generate``, in fewer passes.

    Args:
        model (nn.Module): The target, resident or streamed.
        tokenizer (TokenizerWrapper): Its tokenizer.
        prompt (str | mx.array | list[int]): Text or token ids.
        draft (Draft): A ``LookupDraft()``, ``ModelDraft``, ``DFlashDraft`` or ``MTPDraft``, or
            another object with the methods of ``Draft``.
        max_tokens (int): The most tokens to generate; -1 for no limit. Default: ``256``.
        stream (mx.Stream): Where to compute. Default: mlx-lm's.
        num_draft_tokens (int | str | Policy): The most drafts in a round; 0 for none. ``auto``
            chooses the number in each round by measured times and acceptance. It keeps these
            measurements from text to text, until this draft serves another model. A ``Policy``
            keeps its own measurements. Default: ``auto``.
        sampler (Callable | None): Turns log probabilities [1, V] into tokens [1]. Default: the most
            likely token.
        prompt_cache (list | None): The target's caches. The draft's caches (from the draft's
            ``make_cache``) may follow them. The caches hold the prompt and every yielded token at
            the end.
        kwargs: ``logits_processors``, ``prefill_step_size``, ``kv_bits``, ``kv_group_size``,
            ``quantized_kv_start`` and ``prompt_progress_callback``, as for mlx-lm.

    Yields:
        SpeculativeResponse: mlx-lm's response with ``drafted`` and ``accepted``.

    Raises:
        ValueError: The prompt is empty or has tokens outside the vocabulary, an argument is not as
            above, the draft does not fit the model or is used by another generation, or the cache
            cannot be rolled back.
    """
    drafted, accepted, steps, step, last_round = 0, 0, None, None, None

    def generate_step(prompt, model, stream, **kwargs):
        nonlocal steps, step
        kwargs["num_draft_tokens"] = num_draft_tokens
        steps = speculative_generate_step(prompt, model, draft, stream, **kwargs)
        for step in steps:
            yield step[:2]

    # mlx-lm's own loop over tokens, with this ``generate_step`` in place of mlx-lm's.
    write = with_globals(stream_generate, {"generate_step": generate_step})
    responses = write(model, tokenizer, prompt, max_tokens, stream=stream, **kwargs)
    try:
        for response in responses:
            *_, from_draft, round = step
            if round is not last_round:
                drafted += round.drafted
                accepted += round.accepted
                last_round = round
            if response.finish_reason:
                steps.close()  # the caches are complete before the caller gets the last response
            told = vars(response) | {"from_draft": from_draft}
            yield SpeculativeResponse(**told, drafted=drafted, accepted=accepted)
    finally:
        if steps:
            steps.close()
        responses.close()


def speculative_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft: Draft,
    stream: mx.Stream = generation_stream,
    *,
    num_draft_tokens: int | str | Policy = "auto",
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: list | None = None,
    prompt_cache: list | None = None,
    prefill_step_size: int = PREFILL_STEP,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, mx.array, bool, Round]]:
    """Yield (token, log probabilities ``[V]``, whether the token was drafted, its round)."""
    if not hasattr(draft, "propose"):
        raise ValueError(
            "draft: expected one that proposes tokens, such as moelab.LookupDraft(), "
            f"moelab.DFlashDraft(FOLDER) or moelab.ModelDraft(MODEL), got {draft!r}."
        )
    for name, n, least, expected in (
        ("max_tokens", max_tokens, -1, "a number above 0, or -1 for no limit"),
        ("prefill_step_size", prefill_step_size, 1, "at least 1 token"),
    ):
        if not isinstance(n, Integral) or n < least:
            raise ValueError(f"{name}: expected {expected}, got {n!r}.")
    if prompt.size == 0:
        raise ValueError("prompt: expected at least one token, got none.")
    check_tokens(prompt, model)
    prompt = prompt.astype(mx.uint32)
    policy = learned_policy(model, draft) if num_draft_tokens == "auto" else num_draft_tokens
    if isinstance(policy, int) and policy >= 0:
        policy = Always(policy)
    if not hasattr(policy, "choose"):
        expected = "num_draft_tokens: expected a number from 0, 'auto' or a Policy"
        raise ValueError(f"{expected}, got {num_draft_tokens!r}.")
    policy.begin(max_tokens)

    quantizing = (quantized_kv_start, kv_group_size, kv_bits)
    with mx.stream(stream):
        target = _Target(model, draft, prompt_cache, quantizing)
        progress = prompt_progress_callback or (lambda *_: None)
        progress(0, prompt.size)
        draft_s = 0.0  # seconds in which the draft read the prompt
        for i in range(0, prompt.size - 1, prefill_step_size):
            end = min(i + prefill_step_size, prompt.size - 1)
            target.prefill(prompt[i:end], policy)
            if num_draft_tokens != 0:  # read now, since unread features take memory
                begin = time.perf_counter()
                target.draft.catch_up()
                draft_s += time.perf_counter() - begin
            progress(end, prompt.size)
        if num_draft_tokens != 0:
            policy.read(prompt.size - 1, draft_s)
        chooser = Chooser(sampler, logits_processors, prompt)
        yield from _Rounds(target, chooser, policy, prompt[-1:], max_tokens).tokens()


class _Rounds:
    """The rounds of one text, from the prompt's last token on."""

    def __init__(self, target, chooser, policy, last, max_tokens):
        self._target, self._draft = target, target.draft
        self._chooser, self._policy = chooser, policy
        # ``_last``: the newest token [1], accepted but not yet in the target's cache. ``_pending``:
        # the rest of its tuple (log probabilities, from_draft, round), or None once yielded.
        self._last, self._pending = last, None
        self._left = max_tokens if max_tokens >= 0 else float("inf")
        self._number = 0  # the round's number
        # Tokens since the draft was last asked, which it has not read. A round without drafts
        # schedules the next token, and only then waits for ``_last``.
        self._missed = 0

    def tokens(self) -> Iterator[tuple[int, mx.array, bool, Round]]:
        """Yield ``speculative_generate_step``'s tuples."""
        try:
            while self._left:
                # A pass also gives the target's own token.
                most = max(self._left - 1 - bool(self._pending), 0)
                most = min(most, self._target.room() - 1)
                n = min(self._policy.choose(self._missed, most), most)
                if self._pending and (n or self._left == 1):  # drafting would delay this token
                    pending, self._pending = self._pending, None
                    self._left -= 1
                    yield self._last.item(), *pending
                if not self._left:
                    break
                begin = time.perf_counter()
                guesses, missed_s = self._propose(n)
                seconds = time.perf_counter() - begin, missed_s
                if guesses:
                    yield from self._round_with_drafts(guesses, *seconds)
                else:
                    yield from self._round_without_drafts(begin, n, *seconds)
                self._number += 1
                if self._number % 256 == 0:
                    mx.clear_cache()  # caches have grown into larger arrays, as in mlx-lm's loop
        except GeneratorExit:
            self._finish()
            raise
        self._finish()

    def _propose(self, n):
        """Return guesses, and the seconds in which the draft first read tokens that it missed."""
        if not n:
            return [], 0.0
        begin = time.perf_counter()
        if self._missed:
            self._draft.catch_up()
        missed_s = time.perf_counter() - begin
        with self._chooser.drafting() as choose:
            return self._draft.propose(self._last.item(), n, choose), missed_s

    def _round_without_drafts(self, begin, asked, draft_s, missed_s):
        """Compute one token while the previous token is yielded."""
        following, logprobs = self._chooser(self._target.read(self._last))
        mx.async_eval(following)  # before the wait for ``_last``, as mlx-lm does
        self._target.keep(1)
        token, pending = self._last.item(), self._pending
        seconds = time.perf_counter() - begin
        if asked:  # the draft was asked, and guessed nothing
            self._tell_drafted(0, 0, draft_s, missed_s, self._policy.plain_s)
        else:
            if self._missed:
                self._policy.plain(seconds)
            self._missed += 1
        round = Round(self._number, verify_s=seconds)
        self._last, self._pending = following, (logprobs[0], False, round)
        self._chooser.commit(following)
        if pending:
            self._left -= 1
            yield token, *pending

    def _round_with_drafts(self, guesses, draft_s, missed_s):
        """Yield the drafts that the target accepts. The target's own token is then pending."""
        begin, drafts = time.perf_counter(), mx.array(guesses, mx.uint32)
        logits = self._target.read(mx.concatenate([self._last, drafts]))
        tokens, logprobs = self._chooser(logits, drafts)  # for the drafts' positions and one more
        chosen = tokens.tolist()
        accepted = num_accepted(guesses, chosen)
        self._chooser.commit(tokens[: accepted + 1])
        verify_s = time.perf_counter() - begin
        round = Round(self._number, drafts.size, accepted, draft_s, verify_s)
        self._tell_drafted(drafts.size, accepted, draft_s, missed_s, verify_s)
        self._last = tokens[accepted : accepted + 1]
        self._pending = logprobs[accepted], False, round
        for i in range(accepted):
            self._target.accepted = i + 2  # the token before the drafts, and drafts 0 to i
            self._left -= 1
            yield chosen[i], logprobs[i], True, round
        self._target.keep(accepted + 1)

    def _tell_drafted(self, drafted, accepted, draft_s, missed_s, verify_s):
        seconds = draft_s - missed_s, verify_s
        self._policy.drafted(drafted, accepted, *seconds, self._missed, missed_s)
        self._missed = 0

    def _finish(self):
        # The caches must hold every token that was yielded, and no other.
        self._target.finish(self._last if self._pending is None else None)


class _Target:
    """The target, its cache and draft; ``quantizing``: start, group size and bits, as in mlx-lm."""

    def __init__(self, model, draft, prompt_cache, quantizing):
        self._num_caches = len(make_prompt_cache(model))
        self._given, given = prompt_cache, prompt_cache or []
        if 0 < len(given) < self._num_caches:
            raise ValueError(
                f"prompt_cache: expected {self._num_caches} caches for the target, then the "
                f"draft's; got {len(given)}."
            )
        self._cache = given[: self._num_caches] or make_prompt_cache(model)
        self.draft = BoundDraft(draft, model, given[self._num_caches :] or None)
        self._model, self._quantizing = model, quantizing
        self._rollback = Rollback(model, self._cache)
        self._capture = Capture(model, draft.layer_ids) if draft.layer_ids else None
        self._read = None  # the tokens of the last pass and their features, until ``keep``
        self.accepted = 0  # how many of those tokens ``finish`` keeps

    def prefill(self, tokens: mx.array, policy: Policy) -> None:
        """Read tokens [T] of the prompt in one pass."""
        begin = time.perf_counter()
        _, features = self._captured(self._model, tokens[None], cache=self._cache)
        mx.eval([c.state for c in self._cache], features)
        policy.prompt(tokens.size, time.perf_counter() - begin)
        maybe_quantize_kv_cache(self._cache, *self._quantizing)
        mx.clear_cache()
        self.draft.extend(tokens, features)

    def room(self) -> float:
        """Return how many tokens a pass may have before a cache is quantized."""
        start, _, bits = self._quantizing
        if bits is None:
            return float("inf")
        left = [start - c.offset for c in self._cache if hasattr(c, "to_quantized")]
        return min((n for n in left if n > 0), default=float("inf"))

    def read(self, tokens: mx.array) -> mx.array:
        """Compute logits [T, V] after tokens [T]. ``keep`` then says how many tokens stay."""
        logits, features = self._captured(self._rollback, tokens[None])
        self._read, self.accepted = (tokens, features), 1
        return logits[0]

    def keep(self, n: int) -> None:
        """Keep the first ``n`` tokens of the last pass, and roll back the rest."""
        tokens, features = self._read
        self._rollback.undo(tokens.size - n)
        self._rollback.commit()
        self.draft.extend(tokens[:n], None if features is None else features[:n])
        maybe_quantize_kv_cache(self._cache, *self._quantizing)
        self._read = None

    def finish(self, unread: mx.array | None) -> None:
        """Leave in the caches only tokens that the caller took; then read ``unread``, if given."""
        if self._read is not None:
            self.keep(self.accepted)
        if self._given is None:
            return
        if unread is not None:
            self.read(unread)
            self.keep(1)
        self._given[: self._num_caches] = self._cache
        if len(self._given) > self._num_caches and self.draft.is_bound:
            self._given[self._num_caches :] = self.draft.catch_up()
        mx.eval([c.state for c in self._given])

    def _captured(self, call, *args, **kwargs):
        """Call the model; return its result and features ``[T, n * D]`` for the draft."""
        if self._capture is None:
            return call(*args, **kwargs), None
        with lock(self._model), self._capture as seen:
            out = call(*args, **kwargs)
            return out, seen.features[0]
