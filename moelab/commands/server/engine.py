"""The thread that computes: it reads prompts in parts and writes texts, in batches or one by one.

A short prompt is read with others in one pass of mlx-lm's ``BatchGenerator``. A long one is read in
parts, between which texts are written for as long as the part took, so that nobody waits for a
whole prompt of another. A text that is alone is not in a batch, which the kernels for one text
cannot compute. Texts with a draft, ``--kv-bits`` or caches that cannot be merged are written one
after another. Of several ranks, rank 0 decides each turn and tells the others.
"""

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise

import mlx.core as mx
import psutil
from mlx_lm.generate import BatchGenerator, maybe_quantize_kv_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

from ...checkpoint import describe
from ...speculation.generate import speculative_generate_step
from ...speculation.sampling import set_state
from ...streaming.ranks import RankError
from ..drafting import shared_policy
from .ask import Ask, Part, Token, Usage
from .text import Stops

GRACE_S = 2  # the thread has so long to end when the server is stopped
IDLE_S = 0.1  # between two messages of rank 0 when there is nothing to do
PART = 512  # tokens of a prompt that are read at once while there are other texts,
LATELY_S = 10  # or were so lately
SCORED = 128  # tokens whose log probabilities are computed at once


class Stopped(RuntimeError):
    """The server ends."""

    status = 503


class _Text:
    """A text: ``cache`` holds the first ``read`` of ``tokens``, while it is not in the batch."""

    def __init__(self, number, ask, tell, tokenizer):
        self.number, self.ask, self.tell = number, ask, tell
        self.tokens, self.prompt_size = list(ask.tokens), len(ask.tokens)
        self.cache, self.read, self.cached, self.cuts = None, 0, 0, {}
        self.uid = None  # its number in the batch
        self.processors = make_logits_processors(**ask.penalties)
        self.sampler = _with_own_numbers(make_sampler(**ask.sampling), ask.seed)
        scores = ask.echo and ask.logprobs is not None
        self.scores = [Token(ask.tokens[0], None, [])] if scores else []
        self._ends, self._detokenizer = tokenizer.eos_token_ids, tokenizer.detokenizer
        self._stops, self._decoded, self._told = Stops(ask.stops), 0, 0
        self._held = deque()  # tokens that are not told yet, each with where its text begins

    @property
    def rest(self) -> int:
        """The tokens of the prompt to read, but for the last one, with which writing begins."""
        return self.prompt_size - 1 - self.read

    def write(self, token: int, logprobs: mx.array) -> bool:
        """Add a chosen token and tell the client what is new. Returns whether the text ends."""
        self.tokens.append(token)
        if self.ask.logprobs is not None:
            (told,) = _tokens([token], logprobs[None], self.ask.logprobs)
            self._held.append((self._decoded, told))
        finish = "length" if len(self.tokens) - self.prompt_size >= self.ask.max_tokens else None
        if token in self._ends:
            finish = "stop"
        else:
            self._detokenizer.add_token(token)
        return self.say(finish)

    def say(self, finish: str | None) -> bool:
        """Tell the client what is new. Returns whether the text ends, as at a stop string."""
        if finish:
            self._detokenizer.finalize()
        piece = self._detokenizer.last_segment
        self._decoded += len(piece)
        text = self._stops.add(piece) + (self._stops.end() if finish else "")
        self._told += len(text)
        whole = finish and not self._stops.found
        finish, tokens = "stop" if self._stops.found else finish, []
        while self._held and (whole or self._held[0][0] < self._told):
            tokens.append(self._held.popleft()[1])
        written = len(self.tokens) - self.prompt_size
        usage = Usage(self.prompt_size, self.cached, written) if finish else None
        if text or tokens or self.scores or finish:
            self.tell(Part(text, tokens, self.scores, finish, usage, self._stops.found))
            self.scores = []
        return finish is not None


class Engine:
    """Computes the texts of all clients in one thread, which ``stop`` ends.

    ``model`` is what is served (``serve.Model``), ``prompts`` keeps caches of earlier prompts.
    """

    def __init__(self, model, prompts):
        self.model, self.prompts, self._ranks = model, prompts, model.ranks
        self._inbox, self._lock, self._count = queue.SimpleQueue(), threading.Lock(), 0
        self._tells, self._error = {}, None  # by the texts' numbers; what ended the thread
        # A text waits for memory, then its prompt is read here or, if short, in the batch.
        self._texts, self._waiting, self._reading = {}, deque(), deque()
        self._batch, self._in_batch = None, {}  # by the batch's numbers
        self._alone, self._steps = deque(), None  # texts that are not batched; the first's tokens
        self._owed_s = 0.0  # seconds for which texts are written before a prompt's next part
        self._busy_s = 0.0  # when there last were several texts
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def begin(self, ask: Ask, tell: Callable) -> int:
        """Begin a text; ``tell`` gets each ``Part`` or, as the last, an exception."""
        ask.seed = secrets.randbits(64) if ask.seed is None else ask.seed
        with self._lock:
            self._count += 1
            self._tells[self._count] = tell
            self._inbox.put((self._count, ask))
            if self._error:
                tell(self._error)
            return self._count

    def cancel(self, number: int) -> None:
        """End a text that nobody waits for; nothing happens if it has ended."""
        self._inbox.put((number, None))

    def check(self) -> None:
        """Raise the error that ended the thread, if one did: no rank goes on without another."""
        if self._ranks and self._error and not isinstance(self._error, Stopped | RankError):
            rank = f"rank {self._ranks.rank} of {self._ranks.size}"
            raise RankError(f"{rank}: {describe(self._error)}") from self._error
        if self._error and not isinstance(self._error, Stopped):
            raise self._error

    def stop(self) -> None:
        """End the texts that were begun with an error, and the thread."""
        self._inbox.put((0, None))
        self.join()

    def join(self) -> None:
        """Wait for the thread, which on other ranks ends when rank 0 says so."""
        self._thread.join()
        # After its Python code the thread still frees functions that MLX compiled in it. If the
        # interpreter ended meanwhile, the process would abort.
        end = time.monotonic() + GRACE_S
        thread = self._thread.native_id
        while thread in {t.id for t in psutil.Process().threads()} and time.monotonic() < end:
            time.sleep(0.01)

    def _run(self):
        """Compute until the server is stopped or something fails that concerns all texts."""
        error = Stopped("the server was stopped")
        try:
            while self._turn():
                pass
        except Exception as e:
            error = e
        with self._lock:
            self._error = error
            for tell in self._tells.values():
                tell(error)
        for text in [*self._texts.values()]:
            with suppress(Exception):
                self._end(text)
        self._drop_batch()
        self.prompts.close()
        self.model.close()

    def _turn(self):
        """Take new requests, compute a part or a token. Returns False if the server is stopped."""
        turn, begin = self._next(), time.perf_counter()
        for number, ask in turn["new"]:
            tell = self._tells.get(number, lambda _: None)  # other ranks tell nobody
            self._texts[number] = text = _Text(number, ask, tell, self.model.tokenizer)
            self._waiting.append(text)
        for number in turn["gone"]:
            if text := self._texts.get(number):
                self._try(self._end, text)
        while self._waiting and self._fits(self._waiting[0]):
            self._try(self._open, self._waiting.popleft())
        if turn["reads"] and self._reading:
            # A short prompt comes first, unless a part of a long one is due.
            text = min(self._reading, key=lambda text: (text.rest <= PART) == turn["due"])
            is_long, self._most = text.rest > PART, turn["most"]
            self._try(self._read, text)
            read_s = time.perf_counter() - begin
            self._owed_s = max(self._owed_s, read_s) + read_s if is_long else self._owed_s
        elif self._alone and self._is_batched(self._alone[0]):
            self._try(self._prepare, self._alone.popleft())
        elif self._in_batch:
            self._try(self._write_batch)
        elif self._alone:
            self._try(self._write_alone, self._alone[0])
        self._owed_s -= time.perf_counter() - begin
        return not turn["stop"]

    def _next(self):
        """Decide what comes next, or hear it from rank 0; wait while there is nothing to do."""
        if self._ranks and self._ranks.rank:
            if not self._texts:
                time.sleep(0.9 * IDLE_S)  # in MLX's ring, waiting keeps a core busy
            turn = self._ranks.gather(None)[0]
            return turn | {"new": [(number, Ask(**ask)) for number, ask in turn["new"]]}
        told = []
        with suppress(queue.Empty):
            if not self._texts:
                told.append(self._inbox.get(timeout=IDLE_S if self._ranks else None))
            while True:
                told.append(self._inbox.get_nowait())
        # A draft keeps the state of the text that is written with it.
        free = self._steps is None or self.model.draft is None
        idle = not self._in_batch and not self._alone
        self._busy_s = time.monotonic() if len(self._texts) > 1 else self._busy_s
        due = self._owed_s <= 0
        new = [(number, ask) for number, ask in told if ask]
        turn = {
            "new": new,
            "gone": [number for number, ask in told if not ask],
            "stop": (0, None) in told,
            "reads": free and (due or (idle and not new)),
            "due": due,
            "most": PART if time.monotonic() - self._busy_s < LATELY_S else 10**9,
        }
        if self._ranks:
            self._ranks.gather(turn | {"new": [(number, asdict(ask)) for number, ask in new]})
        return turn

    def _try(self, work, *texts):
        """Do some work for a text or the batch; an error ends its texts and, with ranks, all."""
        try:
            work(*texts)
        except Exception as e:
            if self._ranks:
                raise
            logging.error("%s", describe(e))
            texts = texts or [*self._in_batch.values()]
            if texts[0].uid is not None:
                self._drop_batch()
            for text in texts:
                text.tell(e)
                self._end(text, keeps=False)

    def _fits(self, text):
        """Whether there is memory for a text's caches beside those of the others."""
        texts = [t for t in self._texts.values() if t.cache is not None or t.uid is not None]
        sizes = [len(t.ask.tokens) + t.ask.max_tokens for t in [*texts, text]]
        return not texts or (len(texts) < self.model.most_texts and self.model.fits(sizes))

    def _open(self, text):
        """Find what is known of a prompt, and where it is read."""
        model, tokens, ends = self.model, text.tokens, dict(map(tuple, text.ask.cuts))
        self.prompts.make_way()
        if not text.scores:
            text.cache, text.cached = self.prompts.fetch(tokens)
        if model.has_states and not text.scores:
            ends = ends or {len(tokens) - 1: "assistant"}
            ends.setdefault(self.prompts.shared(tokens, text.cached), "system")
        text.cache = text.cache or model.make_cache(drafted=not text.scores)
        text.read = text.cached
        text.cuts = {end: kind for end, kind in sorted(ends.items()) if end > text.read}
        if self._reads(text):
            self._reading.append(text)
        else:
            self._prepare(text)

    def _is_batched(self, text):
        """Whether a text is put into the batch, since others are written or will soon be."""
        others = len(self._texts) - len(self._reading) - (text not in self._reading)
        return self.model.is_batchable and others > 0

    def _reads(self, text):
        """Whether ``_read`` reads a prompt. The batch or the draft reads a short one."""
        drafted = self.model.draft is not None and not text.cuts
        is_short = text.rest <= PART and not text.scores and (drafted or self._is_batched(text))
        return text.rest > 0 and not is_short

    def _read(self, text):
        """Read the next part of a prompt; the other prompts are read before the one after it."""
        reads = self._reads(text)
        self._reading.remove(text)
        if not reads:
            return self._prepare(text)
        most = SCORED if text.scores else self._most
        ends = [end for end in text.cuts if end > text.read] + [text.prompt_size - 1]
        end = min(*ends, text.read + min(self.model.args.prefill_step_size, most))
        self._compute(text, mx.array(text.tokens[text.read : end], mx.uint32))
        text.read = end
        if kind := text.cuts.get(end):
            self.prompts.keep(text.tokens[:end], text.cache, kind)
        self._reading.append(text) if text.rest else self._prepare(text)

    def _compute(self, text, part):
        """Read tokens [T] into a text's cache and, if asked, score those that follow them."""
        model = self.model
        if model.draft is not None and not text.scores:
            for _ in self._drafted(text, part, 0):
                pass
            return
        logits = model.model(part[None], cache=text.cache)[0]
        if text.scores:
            following = text.tokens[text.read + 1 : text.read + part.size + 1]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            text.scores += _tokens(following, logprobs, text.ask.logprobs)
        maybe_quantize_kv_cache(text.cache, **model.quantized)
        mx.eval([c.state for c in text.cache])
        mx.clear_cache()

    def _prepare(self, text):
        """Put a text, of whose prompt no more than a short rest is unread, where it is written."""
        ask, tokens, model = text.ask, text.tokens, self.model
        if not ask.max_tokens:
            text.say("length")
            return self._end(text)
        if not self._is_batched(text):
            return self._alone.append(text)
        if self._batch is None:
            self._batch = BatchGenerator(
                model.model,
                completion_batch_size=model.most_texts,
                prefill_batch_size=min(model.args.prompt_concurrency, model.most_texts),
                prefill_step_size=model.args.prefill_step_size,
                stream=_stream(),
            )
        ends = [text.read, *(end for end in text.cuts if end > text.read), len(tokens)]
        (text.uid,) = self._batch.insert_segments(
            segments=[[tokens[a:b] for a, b in pairwise(ends)]],
            max_tokens=[ask.max_tokens + text.prompt_size - len(tokens)],
            caches=[text.cache],
            all_tokens=[tokens[: text.read]],
            samplers=[text.sampler],
            logits_processors=[text.processors],
            stop_sequences=[model.ends],
        )
        self._in_batch[text.uid], text.cache = text, None
        self.prompts.trim(self._batch.prompt_cache_nbytes)

    def _write_batch(self):
        """Compute a token of each text in the batch, and a part of the prompts that are read."""
        read, written = self._batch.next()
        ends = {r.uid: self._in_batch[r.uid].read + r.progress[0] for r in read if r.end_of_segment}
        ends = [uid for uid, end in ends.items() if end in self._in_batch[uid].cuts]
        for uid, (cache, tokens) in self._batch.extract_cache(ends).items():
            self.prompts.keep(tokens[:], cache, self._in_batch[uid].cuts[len(tokens)])
        for r in written:
            text = self._in_batch[r.uid]
            ends = text.write(r.token, r.logprobs)
            if r.finish_reason:  # then the batch has no longer anything of it
                del self._in_batch[r.uid]
                text.uid, text.cache, text.read = None, r.prompt_cache, len(text.tokens)
            if ends:
                self._end(text)

    def _write_alone(self, text):
        """Compute a token of a text that is not in the batch."""
        if self.model.draft is not None:
            if self._steps is None:
                rest = mx.array(text.tokens[text.read :], mx.uint32)
                self._steps = self._drafted(text, rest, text.ask.max_tokens)
            token, logprobs, *_ = next(self._steps)
        else:
            inputs = mx.array(text.tokens[text.read :], mx.uint32)
            logits = self.model.model(inputs[None], cache=text.cache)[:, -1]
            for processor in text.processors:
                logits = processor(mx.array(text.tokens, mx.uint32), logits)
            maybe_quantize_kv_cache(text.cache, **self.model.quantized)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            token, logprobs = text.sampler(logprobs).item(), logprobs[0]
            text.read = len(text.tokens)
        if text.write(token, logprobs):
            self._end(text)

    def _drafted(self, text, prompt, max_tokens):
        """Read tokens [T] of a text into its cache and choose those that follow, with the draft."""
        model, before = self.model, mx.array(text.tokens[: text.read], mx.uint32)
        mx.random.seed(text.ask.seed)  # nothing else is sampled until the text ends
        most = 0 if text.ask.echo else text.ask.num_draft_tokens
        return speculative_generate_step(
            prompt,
            model.model,
            model.draft,
            _stream(),
            num_draft_tokens=shared_policy(model.model, model.draft, most),
            max_tokens=max_tokens,
            sampler=make_sampler(**text.ask.sampling),
            logits_processors=[  # which look at the whole prompt
                lambda tokens, logits, f=f: f(mx.concatenate([before, tokens]), logits)
                for f in text.processors
            ],
            prompt_cache=text.cache,
            prefill_step_size=model.args.prefill_step_size,
            **model.quantized,
        )

    def _end(self, text, keeps=True):
        """Take a text out of all queues; keep its cache for prompts that begin like it."""
        self._texts.pop(text.number, None)
        self._tells.pop(text.number, None)
        tokens, cache = text.tokens[: text.read], text.cache
        if text.uid is not None:
            del self._in_batch[text.uid]
            ((cache, tokens),) = self._batch.remove([text.uid], True).values()
        elif self._steps is not None and text is self._alone[0]:
            self._steps.close()  # then the cache is complete
            self._steps, tokens = None, text.tokens
        for texts in (self._waiting, self._reading, self._alone):
            with suppress(ValueError):
                texts.remove(text)
        if keeps and tokens and cache and not text.ask.echo:
            self.prompts.keep(tokens[:], cache, "assistant")

    def _drop_batch(self):
        """End the batch: after an error its caches may be damaged."""
        for text in self._in_batch.values():
            text.uid = None
        self._in_batch.clear()
        if self._batch is not None:
            self._batch.close()
        self._batch = None


def _stream():
    return mx.default_stream(mx.default_device())


def _tokens(ids, logprobs, most):
    """Tokens [n] with their own of the log probabilities [n, V], and the ``most`` likeliest."""
    chosen = mx.take_along_axis(logprobs, mx.array(ids)[:, None], axis=-1)[:, 0].tolist()
    most = min(most, logprobs.shape[-1])
    if not most:
        return [Token(i, p, []) for i, p in zip(ids, chosen)]
    top = mx.argpartition(-logprobs, most - 1, axis=-1)[:, :most]
    values = mx.take_along_axis(logprobs, top, axis=-1).tolist()
    rows = [sorted(zip(*row), key=lambda pair: -pair[1]) for row in zip(top.tolist(), values)]
    return [Token(i, p, row) for i, p, row in zip(ids, chosen, rows)]


def _with_own_numbers(sampler, seed):
    """A sampler whose random numbers begin at ``seed``, whatever else is sampled in between."""
    if sampler is greedy_sampler:
        return sampler
    state = mx.random.key(seed)

    def sample(logprobs):
        nonlocal state
        set_state(state)
        token, state = sampler(logprobs), mx.random.state[0]
        return token

    return sample
