"""The thread that computes: it reads prompts in parts and writes texts, in batches or one by one.

A *text* is a prompt and its answer; it is *written* token by token. A short prompt is read with
others in one pass of mlx-lm's ``BatchGenerator``. A long prompt is read in parts. Other texts are
written after each part for as long as the part took, so no text waits for another's whole prompt. A
single text is not in a batch: the kernels for one text cannot compute a batch. Texts with a draft,
``--kv-bits`` or caches that cannot be merged are written one after another. Rank 0 decides each
turn and tells the other ranks.
"""

import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, make_stop_sequences, maybe_quantize_kv_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

from ...checkpoint import describe
from ...speculation.generate import speculative_generate_step
from ...speculation.sampling import set_state
from ...streaming.model import close
from ...streaming.ranks import RankError
from ...system import HERE
from ..drafting import shared_policy
from ..kv_cache import quantized_given
from .ask import Ask, Part, Refused, Served, Token, Usage
from .grammar import Mask
from .prompts import Prompts
from .text import Stops

IDLE_S = 0.1  # seconds between two messages of rank 0 when there is nothing to do
PART = 512  # tokens in a part of a prompt, while other texts exist and for 10 s after them


class _Text:
    """A text. ``cache`` holds the text's first ``read`` tokens, unless the text is in the batch."""

    def __init__(self, number, ask, tell, tokenizer):
        self.number, self.ask, self.tell = number, ask, tell
        self.tokens, self.prompt_size = ask.tokens, len(ask.tokens)  # ``_open`` copies the tokens
        self.place = "waiting"  # waits for memory; later "reading", "alone" or "batch"
        self.cache, self.read, self.cached, self.cuts = None, 0, 0, {}
        self.uid = None  # the text's number in the batch
        self.steps = None  # yields the text's tokens, if a draft helps to write them
        self.mask = Mask(ask.form, tokenizer, self.prompt_size) if ask.form else None
        self.scores = [Token(ask.tokens[0], None, [])] if ask.echo else []
        self._ends, self._detokenizer = tokenizer.eos_token_ids, tokenizer.detokenizer
        self._detokenizer.begin(ask.tokens)
        self._stops, self._decoded, self._told = Stops(ask.stops), 0, 0
        self._held = []  # tokens that the client does not have yet, and where their texts begin

    @property
    def size(self) -> int:
        """How many tokens the text's caches must hold; without a limit, ``PART`` more than now."""
        is_open, ended = self.ask.is_open, self.prompt_size + self.ask.max_tokens
        return min(len(self.tokens) + PART, ended) if is_open else ended

    @property
    def rest(self) -> int:
        """How many tokens are unread before the prompt's last token, which begins the answer."""
        return self.prompt_size - 1 - self.read

    def write(self, token: int, logprobs: mx.array) -> bool:
        """Add a chosen token and tell the client what is new. Returns whether the text ends."""
        self.tokens.append(token)
        if self.mask and self.mask.error:
            self.tell(Refused(f"the form that was asked for: {self.mask.error}"))
            return True
        if self.ask.logprobs is not None:
            (told,) = _tokens([token], logprobs[None], self.ask.logprobs)
            self._held.append((self._decoded, told))
        if token in self._ends:
            return self.say("stop")
        self._detokenizer.add_token(token)
        is_long = len(self.tokens) - self.prompt_size >= self.ask.max_tokens
        return self.say("length" if is_long else None)

    def say(self, finish: str | None) -> bool:
        """Tell the client what is new. Returns whether the text ends, as at a stop string."""
        if finish:
            self._detokenizer.finalize()
        piece = self._detokenizer.last_segment
        self._decoded += len(piece)
        text, found = self._stops.add(piece, last=bool(finish)), self._stops.found
        self._told += len(text)
        most = inf if finish and not found else self._told
        tokens = [token for begins, token in self._held if begins < most]
        del self._held[: len(tokens)]
        finish, size = "stop" if found else finish, self.prompt_size
        usage = Usage(size, self.cached, len(self.tokens) - size) if finish else None
        if text or tokens or self.scores or finish:
            self.tell(Part(text, tokens, self.scores, finish, usage, found))
            self.scores = []
        return finish is not None


class Engine:
    """Computes the texts of all clients in one thread, which ``stop`` ends.

    ``prompts`` keeps caches of earlier prompts.
    """

    def __init__(self, served: Served, prompts: Prompts):
        self.served, self.prompts, self._ranks = served, prompts, served.ranks
        self._quantized = quantized_given(served.args)
        self._inbox, self._numbers = queue.SimpleQueue(), itertools.count(1)
        self._tells, self._error = {}, None  # ``tell`` by text number; the thread's last error
        self._texts, self._batch = {}, None  # texts by number, in the order of their last moves
        # The times when a long prompt's next part is due and when there last were several texts.
        self._due_s = self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def begin(self, ask: Ask, tell: Callable[[Part | Exception], None]) -> Callable[[], None]:
        """Begin a text; return a function to end it. ``tell`` gets each part, or a final error."""
        ask.seed = secrets.randbits(64) if ask.seed is None else ask.seed
        number = next(self._numbers)
        self._tells[number] = tell
        self._inbox.put((number, ask))
        if self._error:  # nobody reads the inbox any more
            tell(self._error)
        return partial(self._inbox.put, (number, None))

    def check(self) -> None:
        """Raise the error that ended the thread, if any: no rank goes on without the others."""
        if self._error and not isinstance(self._error, Refused):
            raise self._error

    def stop(self) -> None:
        """End all texts with an error, then end the thread."""
        self._inbox.put((0, None))
        self.join()

    def join(self) -> None:
        """Wait for the end of the thread. On other ranks the thread ends when rank 0 says so."""
        self._thread.join()
        # The thread frees MLX's compiled functions after its Python code has ended. The process
        # would abort if the interpreter ended before that.
        end = time.monotonic() + 2
        while HERE.is_alive(self._thread.native_id) and time.monotonic() < end:
            time.sleep(0.01)

    def _run(self):
        """Compute until the server is stopped or an error ends all texts."""
        self._stream = mx.default_stream(mx.default_device())
        error = Refused("the server was stopped", status=503)
        try:
            while self._turn():
                pass
        except Exception as e:
            error = e
            if self._ranks and not isinstance(e, RankError):
                rank = f"rank {self._ranks.rank} of {self._ranks.size}"
                error = RankError(f"{rank}: {describe(e)}")
        self._error = error  # ``begin`` now sends the error to new clients
        for tell in [*self._tells.values()]:
            tell(error)
        for text in [*self._texts.values()]:
            with suppress(Exception):
                self._end(text)
        self._batch = None
        self.prompts.close()
        close(self.served.model)

    def _turn(self):
        """Take new requests, then read a part or write a token. Returns False after ``stop``."""
        turn, begin = self._next(), time.monotonic()
        for number, ask in turn["new"]:
            tell = self._tells.get(number, lambda _: None)  # other ranks tell nobody
            self._texts[number] = _Text(number, Ask(**ask), tell, self.served.tokenizer)
        for number in turn["gone"]:
            if text := self._texts.get(number):
                self._try(self._end, text)
        while (waiting := self._at("waiting")) and self._fits(waiting[0]):
            self._try(self._open, waiting[0])
        for text in self._at("reading", "alone"):
            self._try(self._place, text)
        reading, written = self._at("reading"), self._at("batch", "alone")
        drafts = any(text.steps for text in written)  # the draft then holds a text's state
        if reading and not drafts and (turn["due"] or not written):
            # A short prompt comes first, or a long prompt if its next part is due.
            text = min(reading, key=lambda text: (text.rest <= PART) == turn["due"])
            is_long, self._most = text.rest > PART, turn["most"]
            self._try(self._read, text)
            if is_long:  # texts are written for as long as the part took
                self._due_s = 2 * time.monotonic() - begin
        elif self._at("batch"):
            self._try(self._write_batch)
        elif written:
            self._try(self._write_alone, written[0])
        return not turn["stop"]

    def _next(self):
        """Decide the next turn, or get it from rank 0; wait while there is nothing to do."""
        if self._ranks and self._ranks.rank:
            if not self._texts:
                time.sleep(0.9 * IDLE_S)  # in MLX's ring, waiting keeps a core busy
            return self._ranks.gather(None)[0]
        told = []
        with suppress(queue.Empty):
            if not self._texts:
                told.append(self._inbox.get(timeout=IDLE_S if self._ranks else None))
            while True:
                told.append(self._inbox.get_nowait())
        now = time.monotonic()
        self._busy_s = now if len(self._texts) > 1 else self._busy_s
        turn = {
            "new": [(number, vars(ask)) for number, ask in told if ask],
            "gone": [number for number, ask in told if not ask],
            "stop": (0, None) in told,
            "due": now >= self._due_s,
            "most": PART if now - self._busy_s < 10 else 10**9,
        }
        return self._ranks.gather(turn)[0] if self._ranks else turn

    def _at(self, *places):
        """Return the texts in these places, in the order of their last moves."""
        return [text for text in self._texts.values() if text.place in places]

    def _move(self, text, place):
        """Move a text to a place, behind the other texts there."""
        text.place, self._texts[text.number] = place, self._texts.pop(text.number)

    def _try(self, work, *texts):
        """Do ``work`` for a text or the batch. An error ends it or, with ranks, all texts."""
        try:
            work(*texts)
        except Exception as e:
            if self._ranks:
                raise
            logging.error("%s", describe(e))
            if not texts or texts[0].uid is not None:
                texts, self._batch = self._at("batch"), None  # the batch's caches may be damaged
            for text in texts:
                text.cache = text.uid = None  # so that its cache is not kept
                begun = text.ask.is_open and len(text.tokens) > text.prompt_size
                if begun and isinstance(e, MemoryError):
                    text.say("length")  # without a limit, a text ends when memory runs out
                else:
                    text.tell(e.with_traceback(None))  # its frames hold the batch's caches
                self._end(text)

    def _fits(self, text):
        """Return whether a text's caches fit in memory beside the other texts' caches."""
        texts = self._at("reading", "alone", "batch")
        fits = self.served.fits([t.size for t in [*texts, text]])
        return not texts or (len(texts) < self.served.most_texts and fits)

    def _open(self, text):
        """Fetch the caches kept for a prompt's beginning; choose how to read the prompt's rest."""
        served, ask, cuts = self.served, text.ask, dict(text.ask.cuts)
        text.tokens = ask.tokens[:]
        text.processors = make_logits_processors(**ask.penalties) + [text.mask] * bool(text.mask)
        text.sampler = _with_own_numbers(make_sampler(**ask.sampling), ask.seed)
        self.prompts.make_way()
        if not text.scores:
            text.cache, text.cached = self.prompts.fetch(text.tokens)
            if served.has_states:
                cuts = cuts or {text.prompt_size - 1: "assistant"}
                cuts.setdefault(self.prompts.shared(text.tokens, text.cached), "system")
        text.cache, text.read = text.cache or served.make_cache(not text.scores), text.cached
        text.cuts = {end: kind for end, kind in sorted(cuts.items()) if end > text.read}
        self._place(text)

    def _place(self, text):
        """Move a text to its next place: its prompt is read in parts, or its answer is written."""
        # A text that waits for memory is counted, because it will soon be written, too.
        others = [t for t in self._at("waiting", "alone", "batch") if t is not text]
        place = "batch" if self.served.is_batchable and others else "alone"
        # The batch, or the loop with a draft, reads a short prompt.
        drafted = self.served.draft is not None and not text.cuts
        is_short = text.rest <= PART and not text.scores and (drafted or place == "batch")
        if text.rest > 0 and not is_short:
            place = "reading"
        elif not text.ask.max_tokens:
            text.say("length")
            return self._end(text)
        if place != text.place:
            self._move(text, place)
            if place == "batch":
                self._insert(text)

    def _insert(self, text):
        """Put a text into the batch, which reads the rest of its prompt."""
        tokens, served = text.tokens, self.served
        if self._batch is None:
            self._batch = BatchGenerator(
                served.model,
                completion_batch_size=served.most_texts,
                prefill_batch_size=served.args.prompt_concurrency,
                prefill_step_size=served.args.prefill_step_size,
                stream=self._stream,
            )
        ends = [text.read, *text.cuts, len(tokens)]
        (text.uid,) = self._batch.insert_segments(
            segments=[[tokens[a:b] for a, b in itertools.pairwise(ends)]],
            max_tokens=[text.ask.max_tokens + text.prompt_size - len(tokens)],
            caches=[text.cache],
            all_tokens=[tokens[: text.read]],
            samplers=[text.sampler],
            logits_processors=[text.processors],
            stop_sequences=[make_stop_sequences(served.tokenizer)],
        )
        text.cache = None
        self.prompts.trim(self._batch.prompt_cache_nbytes)

    def _read(self, text):
        """Read the next part of a prompt, and put the text behind the other prompts."""
        most = 128 if text.scores else self._most  # log probabilities take [T, V] numbers
        most = min(self.served.args.prefill_step_size, most)
        end = min(*text.cuts, text.prompt_size - 1, text.read + most)
        if self.served.draft is not None and not text.scores:
            next(self._drafted(text, end, max_tokens=0), None)  # reads, but chooses no token
            text.read = end
        else:
            following = text.tokens[text.read + 1 : end + 1]
            logits = self._logits(text, end)
            if text.scores:
                logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                text.scores += _tokens(following, logprobs, text.ask.logprobs)
            mx.eval([c.state for c in text.cache])
            mx.clear_cache()
        if kind := text.cuts.pop(end, None):
            self.prompts.keep(text.tokens[:end], text.cache, kind)
        self._move(text, "reading")

    def _write_batch(self):
        """Compute a token of each text in the batch, and read a part of the batch's prompts."""
        texts = {text.uid: text for text in self._at("batch")}
        read, written = self._batch.next()
        for r in read:
            text = texts[r.uid]
            if kind := text.cuts.pop(text.read + r.progress[0], None):
                ((cache, tokens),) = self._batch.extract_cache([r.uid]).values()
                self.prompts.keep(tokens[:], cache, kind)
        for r in written:
            text = texts[r.uid]
            ends = text.write(r.token, r.logprobs)
            if r.finish_reason:  # the batch has dropped the text
                text.uid, text.cache, text.read = None, r.prompt_cache, len(text.tokens)
            if ends:
                self._end(text)

    def _write_alone(self, text):
        """Compute a token of a text that is not in the batch."""
        if self.served.draft is not None:
            text.steps = text.steps or self._drafted(text, None, text.ask.max_tokens)
            token, logprobs, *_ = next(text.steps)
        else:
            if len(text.tokens) % 256 == 0:
                mx.clear_cache()  # caches have grown into larger arrays, as in mlx-lm's loop
            logits = self._logits(text, len(text.tokens))[-1:]
            for processor in text.processors:
                logits = processor(mx.array(text.tokens, mx.uint32), logits)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            token, logprobs = text.sampler(logprobs).item(), logprobs[0]
        if text.write(token, logprobs):
            self._end(text)

    def _logits(self, text, end):
        """Read a text's tokens before ``end`` into its cache; return each token's logits."""
        part = mx.array(text.tokens[text.read : end], mx.uint32)
        logits = self.served.model(part[None], cache=text.cache)[0]
        maybe_quantize_kv_cache(text.cache, **self._quantized)
        text.read = end
        return logits

    def _drafted(self, text, end, max_tokens):
        """Read a text's tokens before ``end`` (None: all), then yield the tokens that follow."""
        served, before = self.served, mx.array(text.tokens[: text.read], mx.uint32)
        mx.random.seed(text.ask.seed)  # nothing else is sampled until the text ends
        drafted = 0 if text.ask.echo else text.ask.num_draft_tokens
        options = {"max_tokens": max_tokens, "prompt_cache": text.cache}
        options["num_draft_tokens"] = shared_policy(served.model, served.draft, drafted)
        options["sampler"] = make_sampler(**text.ask.sampling)
        options["logits_processors"] = [  # processors get the tokens of the whole prompt
            lambda tokens, logits, f=f: f(mx.concatenate([before, tokens]), logits)
            for f in text.processors
        ]
        options |= {"prefill_step_size": served.args.prefill_step_size} | self._quantized
        tokens = mx.array(text.tokens[text.read : end], mx.uint32)
        return speculative_generate_step(
            tokens, served.model, served.draft, self._stream, **options
        )

    def _end(self, text):
        """Forget a text, and keep its cache for prompts that begin like it."""
        self._texts.pop(text.number, None)
        self._tells.pop(text.number, None)
        tokens, cache = text.tokens[: text.read], text.cache
        if text.uid is not None:
            ((cache, tokens),) = self._batch.remove([text.uid], True).values()
        elif text.steps is not None:
            text.steps.close()  # this completes the cache
            tokens = text.tokens
        if tokens and cache and not text.ask.echo:
            self.prompts.keep(tokens[:], cache, "assistant")


def _tokens(ids, logprobs, most):
    """Make ``Token``s of ids from logprobs [ids, V], each with up to ``most`` likeliest tokens."""
    chosen = mx.take_along_axis(logprobs, mx.array(ids)[:, None], axis=-1)[:, 0].tolist()
    size = min(max(most, 1), logprobs.shape[-1])
    top = mx.argpartition(-logprobs, size - 1, axis=-1)[:, :size]
    values = mx.take_along_axis(logprobs, top, axis=-1).tolist()
    rows = [sorted(zip(*row), key=lambda pair: -pair[1]) for row in zip(top.tolist(), values)]
    return [Token(i, p, row[:most]) for i, p, row in zip(ids, chosen, rows)]


def _with_own_numbers(sampler, seed):
    """Make a sampler draw its own random numbers from ``seed``, whatever other texts sample."""
    if sampler is greedy_sampler:
        return sampler
    state = mx.random.key(seed)

    def sample(logprobs):
        nonlocal state
        set_state(state)
        token, state = sampler(logprobs), mx.random.state[0]
        return token

    return sample
