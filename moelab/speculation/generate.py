"""Draft, verify, roll back: several tokens for one pass of the target, and the target's own text.

At any temperature the target chooses every token itself, each position with its own random numbers, and a draft is accepted where it is what the target
chose. So the text does not depend on the draft: with the same `mx.random.seed` it is the text that `mlx_lm.stream_generate` writes. A draft that
chooses with the same random numbers agrees nearly as often as rejection sampling could make it, and needs no probabilities, so any sampler will do
(Daliri, Musco, Suresh: Coupling without Communication and Drafter-Invariant Speculative Decoding, arXiv 2408.07978).
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    GenerationResponse,
    generation_stream,
    maybe_quantize_kv_cache,
    wired_limit,
)
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .policy import Always, Policy
from .rollback import Rollback, lock

PREFILL_STEP = 512  # prompt tokens in one pass, as in mlx-lm


class Draft(Protocol):
    """Guesses the target's next tokens. What it guesses decides the speed, never the text.

    One sequence, B = 1. A round is: `propose`, one pass of the target over `[last, *proposed]`, `extend` with what was committed. `last` is chosen
    and yielded but no model has read it yet; `extend` names it in the round that reads it. Drafts that were refused are never extended, so a draft
    that kept state for them takes it out again in `extend`.
    """

    layer_ids: Sequence[int]
    """Decoder layers of the target whose outputs it reads (0: the first one); () for none."""

    cache: list
    """Its own state as mlx-lm caches, so that it can be saved and go on later; [] for none. Set by `bind`."""

    def make_cache(self) -> list:
        """Caches for a new sequence, in the order of `cache`; [] for none."""

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        """Start a sequence for this target: state of an earlier sequence is dropped, or with `cache` taken up where `cache` ends.

        Raises ValueError: the draft does not fit the target (vocabulary, hidden size, layer ids), in one message that says what was expected and got.
        """

    def extend(self, tokens: mx.array, features: mx.array | None) -> None:
        """Take note of `tokens` [n], which the target has read (the prompt first, in chunks), with `features` [n, len(layer_ids) * D], None without
        `layer_ids`. Called for every token, also while nothing is drafted, so it must cost next to nothing: queue, and do the work in `propose`."""

    def propose(self, last: int, n: int, choose: Callable[[mx.array], mx.array]) -> mx.array:
        """At most `n` tokens, uint32 [<= n], to follow `last`. With n = 0 it only brings `cache` up to date with what was extended, without `last`.

        `choose(logits [k, V]) -> tokens [k]`, lazy, applies the caller's processors and sampler. Call it for the positions in their order, one row or
        several at a time. It draws with the random numbers that the target will use at the same positions, which is why no probabilities are returned:
        where draft and target agree about a distribution they choose the same token.
        """


@dataclass(frozen=True)
class Round:
    """One pass of the target after the prompt.

    Attributes:
        number (int): From 0.
        drafted (int): Tokens that the draft proposed.
        accepted (int): How many of them the target chose too; it adds one of its own.
        draft_s (float): Seconds until the drafts were there.
        verify_s (float): Seconds until the target had chosen. Without a draft: until the next token was asked for.
    """

    number: int
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass
class SpeculativeResponse(GenerationResponse):
    """mlx-lm's response, and how the token came about.

    Attributes:
        drafted (int): Tokens drafted so far.
        accepted (int): How many of them were accepted so far.
        round (Round): The round that gave this token.
    """

    drafted: int = 0
    accepted: int = 0
    round: Round = Round(0)


class ModelDraft:
    """A small mlx-lm model as a draft: same tokenizer, resident, attention or recurrent.

    Args:
        model (nn.Module): As `mlx_lm.load` or `moelab.load` returns it.
    """

    layer_ids = ()

    def __init__(self, model: nn.Module):
        self.model, self.cache = model, []

    def make_cache(self) -> list:
        return make_prompt_cache(self.model)

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        own, target = vocabulary(self.model), vocabulary(model)
        if own != target:
            raise ValueError(
                f"draft: expected the target's vocabulary of {target} tokens, got {own}. Draft and target must share a tokenizer."
            )
        self.cache = cache or self.make_cache()
        self._rollback = Rollback(self.model, self.cache)
        self._unread = []  # what the target has read and this model has not
        self._ahead = 0  # what this model has read and the target may refuse

    def extend(self, tokens: mx.array, features: mx.array | None = None) -> None:
        if self._ahead > tokens.size:
            self._rollback.undo(self._ahead - tokens.size)
        self._unread.append(tokens[self._ahead :])
        self._ahead = 0

    def propose(self, last: int, n: int, choose: Callable[[mx.array], mx.array]) -> mx.array:
        self._rollback.commit()
        x = mx.concatenate([*self._unread, mx.array([last] if n else [], mx.uint32)])
        self._unread = []
        while x.size > PREFILL_STEP or (n == 0 and x.size):
            self.model(x[None, :PREFILL_STEP], cache=self.cache)
            mx.eval([c.state for c in self.cache])
            x = x[PREFILL_STEP:]
        ys = []
        for _ in range(n):
            x = choose(self._rollback(x[None])[:, -1])
            mx.async_eval(x)
            ys.append(x)
        self._ahead = n
        return mx.concatenate(ys) if ys else mx.array([], mx.uint32)


class LookupDraft:
    """Proposes what followed when the last tokens were written before: a draft without a model, good where text repeats itself (prompt lookup, Saxena 2023).

    The longest match is taken, then the latest, and at most half as many tokens proposed as match: the longer two texts have agreed, the longer they will.

    Args:
        shortest (int): Tokens that must match at least.

    Raises:
        ValueError: If that is below 1.
    """

    layer_ids = ()

    def __init__(self, shortest: int = 4):
        if shortest < 1:
            raise ValueError(f"shortest: expected at least 1 token to match, got {shortest}.")
        self.shortest, self.cache = shortest, []

    def make_cache(self) -> list:
        return []

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        self._tokens, self._unread = [], []
        self._ends = {}  # `shortest` tokens -> where each of their latest occurrences ends

    def extend(self, tokens: mx.array, features: mx.array | None = None) -> None:
        self._unread.append(tokens)

    def propose(self, last: int, n: int, choose: Callable[[mx.array], mx.array]) -> mx.array:
        written = self._tokens
        for token in (t for x in self._unread for t in x.tolist()):
            if len(written) >= self.shortest:
                self._ends.setdefault(
                    tuple(written[-self.shortest :]), deque(maxlen=16)
                ).appendleft(len(written))
            written.append(token)
        self._unread = []
        written.append(last)
        longest, at = 0, 0
        for end in self._ends.get(tuple(written[-self.shortest :]), ()):
            k = self.shortest
            while k < min(2 * n, end) and written[end - 1 - k] == written[-1 - k]:
                k += 1
            if k > longest:
                longest, at = k, end
        drafts = written[at : at + min(n, longest // 2)]
        written.pop()
        return mx.array(drafts, mx.uint32)


def speculative_generate(
    model: nn.Module,
    tokenizer,
    prompt: str | mx.array | list[int],
    draft: Draft,
    max_tokens: int = 256,
    stream: mx.Stream = generation_stream,
    **kwargs,
) -> Iterator[SpeculativeResponse]:
    """Generate text with a draft: the text of `mlx_lm.stream_generate`, in fewer passes.

    Args:
        model (nn.Module): The target, resident or streamed.
        tokenizer (TokenizerWrapper): Its tokenizer.
        prompt (str or mx.array or list[int]): Text or token ids.
        draft (Draft): A `ModelDraft`, a DFlash draft, or anything with their methods.
        max_tokens (int): Where to stop; -1 for no limit.
        kwargs: As for `speculative_generate_step`.

    Yields:
        SpeculativeResponse: mlx-lm's response with `drafted`, `accepted` and the `round`.

    Raises:
        ValueError: The draft does not fit the model, or the cache cannot be rolled back.
    """
    if max_tokens == 0:
        raise ValueError("max_tokens: expected a number above 0, or -1 for no limit; got 0.")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(
            prompt, add_special_tokens=bos is None or not prompt.startswith(bos)
        )
    prompt = mx.array(prompt, mx.uint32)
    detokenizer = tokenizer.detokenizer
    drafted, accepted, last_round = 0, 0, None

    def response(finish_reason=None):
        return SpeculativeResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=from_draft,
            prompt_tokens=prompt.size,
            prompt_tps=prompt_tps,
            generation_tokens=n,
            generation_tps=n / (time.perf_counter() - begin),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            drafted=drafted,
            accepted=accepted,
            round=round,
        )

    steps = speculative_generate_step(prompt, model, draft, stream, max_tokens=max_tokens, **kwargs)
    with wired_limit(model, [stream]), closing(steps):
        begin = time.perf_counter()
        for n, (token, logprobs, from_draft, round) in enumerate(steps, 1):
            if n == 1:
                prompt_tps = prompt.size / (time.perf_counter() - begin)
                begin = time.perf_counter()
            if round is not last_round:
                drafted, accepted, last_round = (
                    drafted + round.drafted,
                    accepted + round.accepted,
                    round,
                )
            if token in tokenizer.eos_token_ids:
                break
            detokenizer.add_token(token)
            if n == max_tokens:
                break
            yield response()
        steps.close()  # before the last response, so that whoever gets it finds the prompt cache complete
        detokenizer.finalize()
        yield response("stop" if token in tokenizer.eos_token_ids else "length")


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
    rollback: str = "auto",
) -> Iterator[tuple[int, mx.array, bool, Round]]:
    """Token by token, as mlx-lm's function of this name, on any cache that can be rolled back.

    Args:
        prompt (mx.array): Token ids [T].
        model (nn.Module): The target.
        draft (Draft): What guesses.
        num_draft_tokens (int or str or Policy): Drafts in each round, 0 for none; `auto` decides anew for each round whether and how many, by
            what it measures, and remembers that from text to text for as long as there are this model and this draft; so does a `Policy` given again.
        max_tokens (int): Where to stop; -1 for no limit.
        sampler (Callable): From log probabilities [1, V] to tokens [1]. Default: the most likely one.
        logits_processors (list): As for mlx-lm.
        prompt_cache (list): The target's cache and, if wanted, the draft's (`make_cache`) after it. They are left as `mlx_lm.stream_generate` leaves
            a cache: with the prompt and every token that was yielded.
        prefill_step_size (int): Prompt tokens in one pass.
        kv_bits, kv_group_size, quantized_kv_start: As for mlx-lm.
        rollback (str): A way of `Rollback`.

    Yields:
        tuple: token (int), log probabilities [V], whether it was drafted, and its `Round`.
    """
    if prompt.size == 0:
        raise ValueError("prompt: expected at least one token, got none.")
    policy = _learned(model, draft) if num_draft_tokens == "auto" else num_draft_tokens
    if isinstance(policy, int) and policy >= 0:
        policy = Always(policy)
    if not hasattr(policy, "choose"):
        raise ValueError(
            f"num_draft_tokens: expected a number from 0, 'auto' or a Policy, got {num_draft_tokens!r}."
        )
    policy.begin(max_tokens)
    left = max_tokens if max_tokens >= 0 else float("inf")

    def quantize(cache):
        maybe_quantize_kv_cache(cache, quantized_kv_start, kv_group_size, kv_bits)

    with mx.stream(stream):
        target = _Target(model, draft, prompt_cache, rollback, quantize)
        target.prefill(prompt[:-1], prefill_step_size, policy)
        if num_draft_tokens != 0:
            begin = time.perf_counter()
            draft.propose(0, 0, None)  # it reads the prompt too, in the prompt's time
            policy.read(prompt.size - 1, time.perf_counter() - begin)
        chooser = _Chooser(sampler, logits_processors, prompt)
        last, number = prompt[-1:], 0
        pending = None  # log probabilities, from_draft and round of `last`, which was chosen and not yet yielded
        unread = True  # `last` stands and the target has not read it
        missed = 0  # tokens that the draft has not read since it was last asked
        in_flight = False  # whether the last round was plain, and so this one is on its way
        try:
            while left:
                target.require_draft()
                most = max(left - 1 - (pending is not None), 0)  # the target adds one
                n = min(policy.choose(missed, most), most)
                if pending is not None and (n or left == 1):
                    unread = True
                    yield last.item(), *pending
                    pending, left = None, left - 1
                if not left:
                    break
                begin = time.perf_counter()
                guesses = []
                if n:
                    if missed:
                        draft.propose(0, 0, None)
                    missed_s = time.perf_counter() - begin
                    with chooser.ahead() as choose:
                        drafts = target.possible(draft.propose(last.item(), n, choose)[:n])
                        guesses = drafts.tolist()
                asked_s = time.perf_counter() - begin
                if not guesses:
                    following, logprobs = chooser(target.read(last))
                    mx.async_eval(following)  # before `last` is asked for, as mlx-lm does
                    target.keep(1)
                    unread = False
                    token = last.item()
                    seconds = time.perf_counter() - begin
                    if n:
                        policy.drafted(0, 0, asked_s - missed_s, policy.plain_s, missed, missed_s)
                    elif in_flight:
                        policy.plain(seconds)
                    missed, in_flight = 0 if n else missed + 1, not n
                    if pending is not None:
                        yield token, *pending
                        left -= 1
                    last, pending = following, (logprobs[0], False, Round(number, verify_s=seconds))
                    chooser.commit(last, 1)
                else:
                    tokens, logprobs = chooser(target.read(mx.concatenate([last, drafts])), drafts)
                    unread = False
                    own = tokens.tolist()
                    accepted = next(
                        (i for i, guess in enumerate(guesses) if guess != own[i]), len(guesses)
                    )
                    chooser.commit(tokens[: accepted + 1], accepted + 1)
                    round = Round(
                        number,
                        len(guesses),
                        accepted,
                        asked_s,
                        time.perf_counter() - begin - asked_s,
                    )
                    policy.drafted(
                        len(guesses), accepted, asked_s - missed_s, round.verify_s, missed, missed_s
                    )
                    missed, in_flight = 0, False
                    for i in range(accepted):
                        target.standing = i + 2  # `last` and the drafts up to this one
                        yield own[i], logprobs[i], True, round
                        left -= 1
                    target.keep(accepted + 1)
                    last, pending = (
                        tokens[accepted : accepted + 1],
                        (logprobs[accepted], False, round),
                    )
                number += 1
        except GeneratorExit:
            target.finish(last if unread else None)
            raise
        target.finish(last if unread else None)


def _learned(model, draft):
    """The policy of this pair, kept with the draft."""
    target, policy = getattr(draft, "_learned", (lambda: None, None))
    if target() is not model:
        policy = Policy()
        draft._learned = weakref.ref(model), policy
    return policy


class _Target:
    """The target, what it has read, and the draft that is told what of it stands."""

    def __init__(self, model, draft, prompt_cache, way, quantize):
        self._num_caches = len(make_prompt_cache(model))
        self._given, given = prompt_cache, prompt_cache or []
        if 0 < len(given) < self._num_caches:
            raise ValueError(
                f"prompt_cache: expected {self._num_caches} caches for the target, then the draft's; got {len(given)}."
            )
        self._cache = given[: self._num_caches] or make_prompt_cache(model)
        draft.bind(model, given[self._num_caches :] or None)
        self._model, self._draft, self._quantize = model, draft, quantize
        self._bound = draft._bound = object()  # until another generation binds it
        self._vocabulary = vocabulary(model)
        self._rollback = Rollback(model, self._cache, way)
        self._capture = None
        if draft.layer_ids:
            from .dflash import Capture

            self._capture = Capture(model, draft.layer_ids)
        self._read = None
        self.standing = 0  # of the tokens last read, how many stand if nobody asks for more

    def prefill(self, tokens, step, policy):
        for i in range(0, tokens.size, step):
            x = tokens[i : i + step]
            begin = time.perf_counter()
            _, features = self._captured(self._model, x[None], cache=self._cache)
            mx.eval([c.state for c in self._cache], features)
            policy.prompt(x.size, time.perf_counter() - begin)
            self._extend(x, features)
            self._quantize(self._cache)
            mx.clear_cache()

    def read(self, tokens):
        """Logits [T, V] after each of the tokens [T]."""
        logits, features = self._captured(self._rollback, tokens[None])
        self._read, self.standing = (tokens, features), 1
        return logits[0]

    def keep(self, n):
        """The first `n` of the tokens last read stand, the others are taken back."""
        tokens, features = self._read
        self._rollback.undo(tokens.size - n)
        self._rollback.commit()
        self._extend(tokens[:n], None if features is None else features[:n])
        self._quantize(self._cache)
        self._read = None

    def possible(self, drafts):
        """The drafts up to the first token id that is outside the target's vocabulary."""
        guesses = drafts.tolist()
        wrong = (i for i, guess in enumerate(guesses) if not 0 <= guess < self._vocabulary)
        return mx.array(guesses[: next(wrong, None)], mx.uint32)

    @property
    def has_draft(self):
        """Whether no other generation has bound the draft since."""
        return self._draft._bound is self._bound

    def require_draft(self):
        if not self.has_draft:
            raise ValueError(
                "draft: another generation has begun with this draft, which keeps the state of one text. "
                "Give each generation that runs at the same time a draft of its own."
            )

    def _extend(self, tokens, features):
        if self.has_draft:
            self._draft.extend(tokens, features)

    def finish(self, unread):
        """Bring the caches to where the caller stands."""
        if self._read is not None:
            self.keep(self.standing)
        if self._given is None:
            return
        if unread is not None:
            self.read(unread)
            self.keep(1)
        self._given[: self._num_caches] = self._cache
        if len(self._given) > self._num_caches and self.has_draft:
            self._draft.propose(0, 0, None)
            self._given[self._num_caches :] = self._draft.cache
        mx.eval([c.state for c in self._given])

    def _captured(self, call, *args, **kwargs):
        if self._capture is None:
            return call(*args, **kwargs), None
        with lock(self._model), self._capture as seen:
            out = call(*args, **kwargs)
            return out, seen.features[0]


class _Chooser:
    """Processors and sampler over rows of logits, with the same random numbers at the same position whoever asks."""

    def __init__(self, sampler, processors, tokens):
        self._sampler, self._processors = sampler or greedy_sampler, processors or []
        self._tokens = tokens  # all that stand
        self._keys = []  # the state of mx.random after each row

    def __call__(self, logits, drafts=None):
        """Tokens [k] and log probabilities [k, V] for logits [k, V], of which the rows after the first follow `drafts` [k - 1]."""
        self._keys = []
        return self._rows(logits, lambda i: drafts[:i] if i else None)

    @contextmanager
    def ahead(self):
        """Gives a draft's `choose`; afterwards the random numbers it drew are drawn again."""
        before, chosen = mx.random.state[0], []

        def choose(logits):
            for i in range(logits.shape[0]):
                y, _ = self._rows(
                    logits[i : i + 1], lambda _: mx.concatenate(chosen) if chosen else None
                )
                chosen.append(y)
            return mx.concatenate(chosen[-logits.shape[0] :])

        yield choose if self._random or self._processors else greedy_sampler
        if self._random:
            _seed(before)

    def commit(self, tokens, num_rows):
        """The first `num_rows` choices of the last call stand."""
        if self._processors:
            self._tokens = mx.concatenate([self._tokens, tokens])
        if self._random and num_rows < len(self._keys):
            _seed(self._keys[num_rows - 1])

    @property
    def _random(self):
        return self._sampler is not greedy_sampler

    def _rows(self, logits, following):
        if not self._random and not self._processors:
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            return greedy_sampler(logprobs), logprobs
        tokens, logprobs = [], []
        for i in range(logits.shape[0]):
            row = logits[i : i + 1]
            if self._processors:
                more = following(i)
                context = self._tokens if more is None else mx.concatenate([self._tokens, more])
                for processor in self._processors:
                    row = processor(context, row)
            logprobs.append(row - mx.logsumexp(row, axis=-1, keepdims=True))
            tokens.append(self._sampler(logprobs[-1]))
            self._keys.append(mx.random.state[0])
        return mx.concatenate(tokens), mx.concatenate(logprobs)


def _seed(key):
    # The state of mx.random cannot be set, but a seed is a key: its two halves.
    high, low = key.tolist()
    mx.random.seed(high << 32 | low)


def vocabulary(model: nn.Module) -> int:
    """V of an mlx-lm model, from its configuration or else its embedding."""
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None) or {}
    found = getattr(args, "vocab_size", None) or (
        text.get("vocab_size") if isinstance(text, dict) else getattr(text, "vocab_size", None)
    )
    return found or max(
        m.weight.shape[0]
        for _, m in model.named_modules()
        if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))
    )
