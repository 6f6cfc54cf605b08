"""The command ``serve``: mlx-lm's HTTP server with a streamed model.

mlx-lm's classes answer. The classes here change what streaming needs and what would end the server:

    Provider   loads the model and the draft that the command line names, and nothing else
    Generator  tokenizes a prompt in its client's thread. One other thread computes: several texts
               as a batch, with a draft one after another (``speculative_generate``). It goes on
               after an error and ends answers at Ctrl-C. A hybrid's state cannot be trimmed, so the
               state is kept where a prompt parts from an earlier one. With ranks, rank 0 tells the
               others which requests there are, and all compute them.
    Prompts    always leaves a token to read: mlx-lm's server ends at a prompt that is cached whole
    Handler    refuses requests that mlx-lm would fail at later or misread, and pages of other
               origins; notices a client that has gone or is silent
"""

import argparse
import copy
import io
import json
import logging
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlx.core as mx
import psutil
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlx.utils import tree_map
from mlx_lm import server
from mlx_lm.generate import GenerationResponse, generate_step, stream_generate
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache

from ..checkpoint import describe, shorten
from ..hooks import with_globals
from ..speculation.drafts import Draft
from ..speculation.generate import speculative_generate, speculative_generate_step
from ..speculation.target import vocabulary
from ..streaming.config import StreamConfig
from ..streaming.heap import return_free_memory
from ..streaming.model import close, find, load
from ..streaming.plan import memory_now, plan
from ..streaming.ranks import LOADING_S, RankError, joined
from ..streaming.room import RESERVE_NBYTES
from ..streaming.session import session_of
from . import request_checks as checks
from .argument_types import at_least, json_object, nbytes, not_empty, positive
from .arguments import (
    NO_PIPELINE,
    add_draft,
    add_kv_cache,
    add_loading,
    add_model,
    add_number,
    add_refused,
    add_sampling,
)
from .drafting import leave_room, open_draft, prompt_step, say_plan, shared_policy
from .kv_cache import KVCacheOptions
from .stream_options import add_mode, add_stream_options, streaming_given

GRACE_S = 2  # threads have so long to end when the server is stopped
SILENT_S = 30  # a client that sends or takes nothing for so long is dropped
TEXTS_SHARE = 8  # caches of texts decoded at once get at most this part (an eighth) of the memory
MIN_SHARED = 16  # the state after shared tokens is kept if prompts share at least so many
AUTO = "auto"  # as num_draft_tokens: the policy decides
# Reading a request takes memory: so many bytes for each byte of its JSON that is parsed, and for
# each byte of its text that becomes tokens.
PARSE_NBYTES, TOKENS_NBYTES = 30, 260
READING = "reading the request"  # how an error names this use of memory
# Arguments that may differ between ranks.
OWN_ARGUMENTS = ("model", "adapter_path", "host", "port", "log_level", "memory_nbytes", "given")
SEAMS = {  # methods of mlx_lm.server that the classes below call or replace
    "ModelProvider": ("load", "load_default", "reset"),
    "ResponseGenerator": (
        *("_generate", "_next_request", "_run_generate", "_serve_single", "_share_object"),
        *("_tokenize", "generate", "join", "stop_and_join"),
    ),
    "APIHandler": (
        *("_set_completion_headers", "do_POST", "handle_completion", "handle_models_request"),
        "validate_model_parameters",
    ),
}


class Provider(server.ModelProvider):
    """Loads the one model, with its experts on disk, and its draft.

    ``name`` is how requests and answers call it: its folder's name, or that on the Hub.
    """

    def __init__(
        self,
        cli_args: argparse.Namespace,
        config: StreamConfig,
        group: mx.distributed.Group | None = None,
    ):
        super().__init__(cli_args)
        self._group, self.ranks = group, None
        folder = Path(cli_args.model)
        self.name = folder.resolve().name if folder.is_dir() else cli_args.model
        self.config, self._prefill_step_size = config, cli_args.prefill_step_size
        self._concurrency = cli_args.prompt_concurrency, cli_args.decode_concurrency
        self._concurrency_given = "decode_concurrency" in getattr(cli_args, "given", ())

    def reset(self) -> None:
        if self.model is not None:
            close(self.model)
        super().reset()

    def load(self, *_):
        """Load, once, what the command line names; requests can name nothing else."""
        if self.model is None:
            args, draft = self.cli_args, None
            if args.draft_model is not None:  # before the model, whose slots take the memory left
                draft = open_draft(args.draft_model, self.config.kernels)
            self._load_model(draft)
            if draft is not None:
                draft.bind(self.model)  # refuses a draft that does not fit
            self.model_key = (args.model, args.adapter_path, args.draft_model)
            self.draft_model = draft
            batched = all(hasattr(c, "merge") for c in make_prompt_cache(self.model))
            self.is_batchable = draft is None and batched
        return self.model, self.tokenizer

    def _load_model(self, draft):
        args = self.cli_args
        path, trust = find(args.model), args.trust_remote_code
        if args.adapter_path is not None and not Path(args.adapter_path).is_dir():
            raise ValueError(f"adapters: expected a folder, {args.adapter_path!r} is none")
        KVCacheOptions.given(args).check(path, self.config, trust_remote_code=trust)
        model, tokenizer, config = load(
            path,
            self._with_room(path, draft),
            adapter_path=args.adapter_path,
            tokenizer_config=self._tokenizer_config,
            return_config=True,
            trust_remote_code=trust,
            group=self._group,
        )
        self.ranks = session_of(model).ranks
        if args.use_default_chat_template and tokenizer.chat_template is None:
            close(model)
            raise ValueError(
                f"serve: --use-default-chat-template: the tokenizer of {args.model} has none. Give "
                "one with --chat-template."
            )
        self.model, self.tokenizer = model, tokenizer
        args.prefill_step_size = prompt_step(model, self._prefill_step_size)
        say_plan(model)
        self._limit_batches(session_of(model).plan)
        self.processor = server.load_processor(model, config)

    def _with_room(self, path, draft):
        """Reserve memory in the configuration for the draft or, without one, for several texts.

        These are as many as the command line says, or as fit into an eighth of the memory.
        """
        config = leave_room(self.config, draft)
        if draft is not None or not config.asks_for_slots or self.cli_args.kv_bits is not None:
            return config
        alone = plan(path, config, trust_remote_code=self.cli_args.trust_remote_code)
        prompts, texts = self._concurrency
        # mlx-lm decodes all but one while it reads prompts, and the plan has memory for one text.
        more = texts + min(prompts, texts) - 2
        if not self._concurrency_given and alone.caches_nbytes:
            # Leave out one text that would fit, since the available memory changes.
            slots = (alone.prompt_slots - alone.top_k) * sum(alone.expert_nbytes)
            free = alone.all_caches_nbytes - 2 * alone.caches_nbytes + slots
            free = max(0, min(alone.memory_nbytes // TEXTS_SHARE, free))
            more = min(more, free // alone.caches_nbytes)
        return replace(config, reserved_nbytes=more * alone.caches_nbytes)

    def _limit_batches(self, plan):
        """Lower mlx-lm's limits of concurrent texts to what there is memory for.

        While it decodes all texts but one, it may read the prompts of several others.
        """
        prompts, texts = self._concurrency
        if plan is not None and plan.caches_nbytes and self.cli_args.kv_bits is None:
            fit = max(1, plan.all_caches_nbytes // plan.caches_nbytes)
            if self.ranks:
                fit = min(self.ranks.gather(fit))
            prompts = min(prompts, texts, (fit + 1) // 2)
            texts = min(texts, fit + 1 - prompts)
        self.cli_args.prompt_concurrency, self.cli_args.decode_concurrency = prompts, texts
        if texts < self._concurrency[1] and not (self.ranks and self.ranks.rank):
            print(f"moelab: texts decoded at once: {texts}, as many as fit", file=sys.stderr)


class Prompts(LRUPromptCache):
    """Caches of earlier prompts and answers, which leave at least a prompt's last token to read.

    Where less than ``free_nbytes`` of memory are free, prompts are forgotten; with 0, as on ranks
    (which must all keep the same prompts), none is.
    """

    def __init__(
        self,
        size: int = 10,
        nbytes: int = sys.maxsize,
        free_nbytes: int = 0,
        memory: Callable[[], tuple[int, int]] = memory_now,
    ):
        super().__init__(size, nbytes)
        self.free_nbytes, self._memory = free_nbytes, memory

    def make_way(self, nbytes: int = 0) -> bool:
        """Forget the least recently used prompts until ``nbytes`` are free, beside ``free_nbytes``.

        False if they are not free even so.
        """
        short = self._short(nbytes)
        if short > 0 and self.nbytes:
            self.trim_to(n_bytes=self.nbytes - short)
            mx.clear_cache()
            return_free_memory()
            short = self._short(nbytes)
        return short <= 0

    def _short(self, nbytes):
        return self.free_nbytes + nbytes - self._memory()[1] if self.free_nbytes else 0

    def insert_cache(self, model, tokens: list[int], prompt_cache: list, **kwargs) -> None:
        # The caches of a text in a batch are views of the batch's arrays and would keep them all.
        for c in prompt_cache:
            c.state = tree_map(_own, c.state)
        if self.make_way(sum(c.nbytes for c in prompt_cache)):  # before they are copied
            mx.eval([c.state for c in prompt_cache])
            super().insert_cache(model, tokens, prompt_cache, **kwargs)

    def fetch_nearest_cache(self, model, tokens: list[int]) -> tuple[list | None, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
        return cache, rest + tokens[-1:]

    def parts_at(self, model, tokens: list[int]) -> int:
        """Where a prompt parts from an earlier one, in tokens; 0 if a kept cache reaches so far."""
        found = self._trie.search(model, tokens[:-1])
        return found.common_prefix if len(found.shorter or ()) < found.common_prefix else 0


class Generator(server.ResponseGenerator):
    """Computes the answers in one thread, in batches or one by one.

    ``room`` is the memory for reading requests, which all clients share.
    """

    def __init__(self, provider: Provider, prompts: Prompts):
        self._begun = weakref.WeakSet()  # queues of the requests that were begun
        # Of a request that is served alone, not in a batch: (tokens, segments, types), context.
        self._prompt = None
        self._context = None
        self._ranks, self._stopping, self._error = provider.ranks, False, None
        self.room = session_of(provider.model).room
        super().__init__(provider, prompts)

    def check(self) -> None:
        """Raise the error that ended this rank, if one did: no rank goes on without another."""
        if isinstance(self._error, RankError):
            raise self._error
        if self._error is not None:
            rank = f"rank {self._ranks.rank} of {self._ranks.size}"
            raise RankError(f"{rank}: {describe(self._error)}") from self._error

    def _share_object(self, obj):
        """Give all ranks the object of rank 0, which also tells them whether to end."""
        if self._ranks is None:
            return obj
        with self._ranks.waiting(LOADING_S):
            obj, self._stop = super()._share_object((obj, self._stopping))
        return obj

    def _run_generate(self):
        while not self._stop:
            self._begun.clear()
            try:
                self._generate()
            except Exception as error:
                if self._ranks:
                    self._error, self._generation_failed = error, True
                    break
                logging.error("Generation failed: %s: %s", type(error).__name__, error)
                if not self._begun:  # no request caused the error, so it would come again
                    self._generation_failed = True
                    return
                self._end_begun(error)
        self._end_begun(RuntimeError("the server was stopped"))

    def stop_and_join(self) -> None:
        self._stopping = True  # rank 0 tells the others
        if self._ranks is None:
            self._stop = True
        self.join()

    def join(self) -> None:
        super().join()
        # After its Python code the thread still frees functions that MLX compiled in it. If the
        # interpreter ended meanwhile, the process would abort.
        end = time.monotonic() + GRACE_S
        thread = self._generation_thread.native_id
        while thread in {t.id for t in psutil.Process().threads()} and time.monotonic() < end:
            time.sleep(0.01)

    def _end_begun(self, error):
        for queue in list(self._begun):
            queue.put(error)

    def _next_request(self, timeout=None):
        if timeout is not None and self._ranks and self._ranks.rank:
            # Sleep while rank 0 waits for a request: in MLX's ring, waiting keeps a core busy.
            time.sleep(0.9 * timeout)
        request = super()._next_request(timeout)
        if request is not None:
            self._begun.add(request[0])
            self.prompt_cache.make_way()
        return request

    def generate(self, request, generation_args, progress_callback=None):
        # Tokens are made in the client's thread, so that others are answered meanwhile; ranks get
        # them with the request. Prompts with images need MLX, so the generating thread reads them.
        if self.model_provider.processor is None:
            tokenizer = self.model_provider.tokenizer
            chatting = request.request_type == "chat"
            text = str((request.messages, request.tools)) if chatting else request.prompt
            with self.room.beside(TOKENS_NBYTES * len(text.encode()), READING):
                request.read = self._read(tokenizer, request, generation_args)
        return super().generate(request, generation_args, progress_callback)

    def _read(self, tokenizer, request, args):
        """Call mlx-lm's ``_tokenize``; refuse a request that cannot be computed (ValueError)."""
        try:
            read = super()._tokenize(tokenizer, request, args)
        except Exception as error:  # a template and its arguments may raise anything
            if request.request_type != "chat":
                raise
            raise ValueError(
                f"messages: expected some that the chat template takes, it fails: {describe(error)}"
            ) from error
        if not read[0]:
            raise ValueError("prompt: expected a text of at least one token, got none")
        size = vocabulary(self.model_provider.model)
        if args.sampling.top_k >= size:
            raise ValueError(f"top_k: expected less than the vocabulary's {size} tokens")
        if wrong := [token for token in args.logits.logit_bias or () if not 0 <= token < size]:
            raise ValueError(f"logit_bias: expected token ids from 0 to {size - 1}, got {wrong[0]}")
        return read

    def _tokenize(self, tokenizer, request, args):
        read = getattr(request, "read", None) or self._read(tokenizer, request, args)
        prompt, segments, types, state, vision = read
        if vision is None and not can_trim_prompt_cache(
            make_prompt_cache(self.model_provider.model)
        ):
            shared = self.prompt_cache.parts_at(self.model_provider.model_key, prompt)
            segments, types = _cut(segments, types, shared)
        self._prompt = (prompt, segments, types) if vision is None else (prompt, [], [])
        return prompt, list(segments), list(types), state, vision

    def _serve_single(self, request, stream):
        # Call mlx-lm's method with our own functions in place of two that it uses.
        serve = with_globals(
            server.ResponseGenerator._serve_single,
            {"stream_generate": self._answer, "GenerationContext": self._begin},
        )
        serve(self, request, stream)
        if self._ranks:
            session_of(self.model_provider.model).check_ranks()

    def _begin(self, **fields):
        self._context = (_SharedContext if self._ranks else server.GenerationContext)(**fields)
        return self._context

    def _answer(
        self,
        prompt: list[int],
        draft_model: Draft | None,
        num_draft_tokens: int | str,
        input_embeddings: mx.array | None,
        logits_processors: list,
        prompt_progress_callback: Callable[[int, int], None],
        tokenizer,
        max_tokens: int,
        sampler: Callable,
        **reading,
    ) -> Iterator[GenerationResponse]:
        """Stream an answer as mlx-lm's ``stream_generate`` does, with a draft if there is one.

        The state after each segment of a hybrid's prompt is kept, as in mlx-lm's batches, since no
        token can be trimmed from a later state.
        """
        whole, segments, types = self._prompt
        begin = read = len(whole) - len(prompt)
        token_nbytes = 0  # for each token, the draft's caches grow by so many bytes
        if draft_model is not None and (plan := session_of(self.model_provider.model).plan):
            token_nbytes = plan.reserved_nbytes // plan.context

        def progress(done, _):
            self._check()
            prompt_progress_callback(read - begin + done, len(prompt))
            keep_free(token_nbytes * (len(whole) - read - done))

        step, generate = generate_step, stream_generate
        reading["prompt_progress_callback"] = progress
        if draft_model is not None:
            step, generate = speculative_generate_step, speculative_generate
            number = shared_policy(self.model_provider.model, draft_model, num_draft_tokens)
            reading |= {"draft": draft_model, "num_draft_tokens": number}
        cache = reading["prompt_cache"]
        with self.room.beside(token_nbytes * len(prompt), None) as keep_free:
            if input_embeddings is None and not can_trim_prompt_cache(cache):
                for end, kind in zip(accumulate(map(len, segments)), types):
                    end = min(end, len(whole) - 1)
                    if end > read:
                        for _ in step(mx.array(whole[read:end]), max_tokens=0, **reading):
                            pass
                        read = end
                        self.prompt_cache.insert_cache(
                            self.model_provider.model_key,
                            whole[:read],
                            copy.deepcopy(cache),
                            cache_type=kind,
                        )
            if input_embeddings is not None:
                reading["input_embeddings"] = input_embeddings
            answer = generate(
                prompt=whole[read:],
                tokenizer=tokenizer,
                max_tokens=max_tokens,
                sampler=sampler,
                # They see the whole prompt, as in mlx-lm's batches.
                logits_processors=[_after(whole[:read], p) for p in logits_processors],
                **reading,
            )
            with closing(answer):
                for response in answer:
                    self._check()
                    yield response

    def _check(self):
        if self._ranks:
            self._stop, gone = self._ranks.any(self._stopping, self._context.gone)
            if gone:
                raise ConnectionAbortedError("the client has gone")
        if self._stop:
            raise RuntimeError("the server was stopped")


class _SharedContext(server.GenerationContext):
    """The context of an answer that all ranks must end at the same token: ``_check`` ends it."""

    gone = False

    def stop(self) -> None:
        self.gone = True


def _own(value):
    """Copy an array, if needed, so that it is no view; return any other value as it is."""
    return mx.contiguous(value) if isinstance(value, mx.array) else value


def _cut(segments, types, at):
    """Cut the segment that token ``at`` is in, so that the state there is kept for later prompts.

    The part before gets the type of a system prompt, since it begins several prompts.
    """
    begins = accumulate(map(len, segments), initial=0)
    for i, (begin, segment) in enumerate(zip(begins, segments)):
        if at >= MIN_SHARED and begin < at < begin + len(segment):
            pieces = [segment[: at - begin], segment[at - begin :]]
            return (
                [*segments[:i], *pieces, *segments[i + 1 :]],
                [*types[:i], "system", *types[i:]],
            )
    return segments, types


def _after(before, processor):
    """Make a logits processor that also sees the tokens ``before``."""
    before = mx.array(before, mx.uint32)
    return lambda tokens, logits: processor(
        mx.concatenate([before, tokens.astype(mx.uint32)]), logits
    )


class _Refused(BaseException):
    """Carries an error past mlx-lm's handler, which would answer any with status 404."""


class Handler(server.APIHandler):
    """One request over HTTP."""

    timeout = SILENT_S
    _begun = _understood = _unread = False

    def parse_request(self):
        """Refuse pages of other origins: CORS hides answers from them, but sends their requests."""
        if not super().parse_request():
            return False
        self._unread = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        allowed = self.response_generator.cli_args.allowed_origins
        if (origin := self.headers.get("Origin")) is None or {"*", origin}.intersection(allowed):
            return True
        origin = origin[:100]
        words = f"Origin: {origin} may not ask. Start the server with --allowed-origins {origin}"
        self._refuse(ValueError(words), 403)
        return False

    def do_POST(self):
        try:
            length = self.headers.get("Content-Length", "0")
            if not re.fullmatch("[0-9]{1,18}", length):
                raise ValueError(f"Content-Length: expected a whole number, got {length[:100]!r}")
            images = self.response_generator.model_provider.processor is not None
            most = checks.MOST_IMAGES if images else checks.MOST_TEXT
            if int(length) > most:
                words = f"Content-Length: expected at most {most} bytes, got {length}"
                return self._refuse(ValueError(words), 413)
            with ExitStack() as self._parsing:
                room, needs = self.response_generator.room, PARSE_NBYTES * int(length)
                self._parsing.enter_context(room.beside(needs, READING))
                raw = self.rfile.read(int(length))
                self._unread = "Transfer-Encoding" in self.headers
                checks.check_size(raw)
                self.rfile = io.BytesIO(raw)  # mlx-lm reads the request from there
                super().do_POST()
        except (ConnectionError, TimeoutError):
            raise
        except _Refused as refused:
            error = refused.__cause__
            status = 400 if isinstance(error, ValueError) else 500
            self._refuse(error, 503 if isinstance(error, MemoryError) else status)
        except MemoryError as error:
            self._refuse(error, 503)
        except Exception as error:
            self._refuse(error, 500 if self._understood else 400)

    def finish(self):
        """Close, after reading what a client still sends: else a reset could lose the answer."""
        super().finish()
        with suppress(OSError):
            if self._unread:
                self.connection.shutdown(socket.SHUT_WR)
                end = time.monotonic() + SILENT_S
                while self.connection.recv(1 << 16) and time.monotonic() < end:
                    pass

    def log_message(self, format, *args):
        super().log_message("%s", shorten(format % args))

    def handle_models_request(self):
        """Answer with a list of the one served model or, if its name is asked for, with itself."""
        name = self.response_generator.model_provider.name
        model = {"id": name, "object": "model", "created": self.created, "owned_by": "moelab"}
        asked = unquote(urlsplit(self.path).path.removeprefix("/v1/models").strip("/"))
        answer = model if asked == name else {"object": "list", "data": [model]}
        if asked not in ("", name):
            return self._refuse(
                ValueError(f"expected the model {name!r}, got {asked[:100]!r}"), 404
            )
        self._set_completion_headers()
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def end_headers(self):
        super().end_headers()
        self._begun = True

    def _refuse(self, error, status):
        """Answer with an error, in the stream if that has begun."""
        text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        logging.error(text)
        answer = json.dumps({"error": text})
        if self._begun:
            answer = f"data: {answer}\n\n"
        else:
            self._headers_buffer = []
            self._set_completion_headers(status)
            self.end_headers()
        self.wfile.write(answer.encode())

    def validate_model_parameters(self) -> None:
        """Run mlx-lm's checks, then check the fields that mlx-lm does not check or know."""
        if auto := self.num_draft_tokens == AUTO:
            self.num_draft_tokens = 0
        try:
            super().validate_model_parameters()
        except (TypeError, OverflowError) as error:
            raise ValueError("logit_bias must be a dict of int to float") from error
        if auto:
            self.num_draft_tokens = AUTO
        for name in checks.NUMBERS:
            setattr(self, name, checks.finite(name, getattr(self, name)))
        for name in checks.WHOLE_NUMBERS:
            checks.whole(name, getattr(self, name))
        for value in (self.logit_bias or {}).values():
            checks.finite("logit_bias", value)
        provider, args = self.response_generator.model_provider, self.response_generator.cli_args
        for name, most in checks.MOST.items():
            if getattr(self, name) != getattr(args, name, None):
                self._validate(name, (int, str), max_val=most, whitelist=[AUTO])
        if self.seed is not None:
            self._validate("seed", int, min_val=0, max_val=2**64 - 1)
        self._validate("requested_draft_model", str)
        checks.served("model", self.requested_model, provider.name, args.model)
        checks.served("draft_model", self.requested_draft_model, args.draft_model)
        if self.adapter is not None:
            checks.served("adapters", self.adapter, args.adapter_path)
        self.requested_model, self.requested_draft_model = provider.name, "default_model"
        self.adapter = None
        self._validate("xtc_threshold", float, max_val=0.5)
        self._validate("stream_options", dict, optional=True)
        self._validate("chat_template_kwargs", dict, optional=True)
        checks.check_options(self.stream_options, self.chat_template_kwargs)
        checks.check_body(self.body, provider.processor is not None)

    def handle_completion(self, request, stop_words):
        self._understood, shared = True, self.response_generator
        self._parsing.close()
        self.response_generator = _Watched(shared, self.connection)
        try:
            super().handle_completion(request, stop_words)
        finally:
            self.response_generator = shared


class _Watched:
    """A response generator for one client, which ends the request when the client has hung up.

    mlx-lm notices only when it writes, which without ``stream`` is after the last token.
    """

    def __init__(self, generator, connection):
        self._generator, self._connection = generator, connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def __getattr__(self, name):
        return getattr(self._generator, name)

    def generate(self, request, args, progress_callback):
        def progress(*done):
            self._check()
            progress_callback(*done)

        try:
            context, responses = self._generator.generate(request, args, progress)
        except Exception as error:
            raise _Refused from error
        return context, self._checked(responses)

    def _checked(self, responses):
        for response in responses:
            self._check()
            yield response

    def _check(self):
        # Poll first: on a socket with a timeout, ``recv`` waits if nothing has come.
        if self._poll.poll(0) and not self._connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError("it closed the connection")


class Server(ThreadingHTTPServer):
    """Listens once it is made, so that a busy port is reported before a model is loaded.

    Port 0 takes a free one.
    """

    request_queue_size = 1024  # clients that wait to be accepted; with 5 some are reset

    def __init__(self, host: str, port: int):
        self._handlers, self._check = set(), lambda: None
        try:
            self.address_family, *_, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            super().__init__(address, Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"serve: cannot listen at --host {host} --port {port}: {error}. Give another."
            ) from error

    def process_request_thread(self, request, client_address):
        thread = threading.current_thread()
        self._handlers.add(thread)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._handlers.discard(thread)

    def service_actions(self):
        self._check()

    def handle_error(self, request, client_address):
        error = sys.exception()
        if isinstance(error, ConnectionError):
            logging.info("Client %s has gone: %s", client_address[0], error)
        else:
            logging.error("%s: %s", type(error).__name__, error)

    def answer(self, generator: Generator) -> None:
        """Answer requests until Ctrl-C."""
        self.RequestHandlerClass, self._check = partial(Handler, generator), generator.check
        host, port = self.server_address[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"moelab: http://{host}:{port}/v1 answers; Ctrl-C ends it", file=sys.stderr)
        before = signal.signal(signal.SIGINT, _ctrl_c)
        try:
            with suppress(KeyboardInterrupt):
                self.serve_forever()
        finally:
            generator.stop_and_join()
            end = time.monotonic() + GRACE_S
            for thread in list(self._handlers):
                thread.join(max(0, end - time.monotonic()))
            pressed = signal.getsignal(signal.SIGINT) is not _ctrl_c
            signal.signal(signal.SIGINT, signal.SIG_IGN if pressed else before)


def _ctrl_c(*_):
    """End the server at the first Ctrl-C and ignore more for some seconds.

    MLX aborts a process that ends before its threads do. If the server takes longer, one more
    Ctrl-C ends it at once.
    """
    patience = time.monotonic() + 2 * GRACE_S
    signal.signal(signal.SIGINT, lambda *_: os._exit(130) if time.monotonic() > patience else None)
    raise KeyboardInterrupt


def serve(args: argparse.Namespace, config: StreamConfig) -> None:
    """Answer requests until Ctrl-C; of several ranks, rank 0 listens and the others follow."""
    for cls, names in SEAMS.items():
        for name in names:
            if not hasattr(getattr(server, cls), name):
                raise ValueError(
                    f"serve: mlx-lm {server.__version__} has no server.{cls}.{name}, which this "
                    "command builds on. Install mlx-lm 0.32."
                )
    group = joined()
    follows = group is not None and group.rank() > 0
    level = "ERROR" if follows else args.log_level
    logging.basicConfig(level=level, format="%(asctime)s - %(levelname)s - %(message).1000s")
    ImmutableSandboxedEnvironment.concat = staticmethod(checks.bounded_text)  # of chat templates
    server.maybe_set_recommended_wired_limit()
    with nullcontext() if follows else Server(args.host, args.port) as listening:
        provider = Provider(args, config, group)
        provider.load_default()  # an error here ends the command
        session = session_of(provider.model)
        plan = session.plan
        if args.prompt_cache_bytes is None:
            # The other texts may need their caches all at once.
            texts = args.prompt_concurrency + args.decode_concurrency - 2
            texts *= provider.is_batchable and args.kv_bits is None
            args.prompt_cache_bytes = (
                max(0, plan.all_caches_nbytes - texts * plan.caches_nbytes) if plan else sys.maxsize
            )
        if provider.ranks:
            _agree(provider.ranks, args)
        # Keep memory free for the other texts or the draft, and for decoding a token.
        free = plan.reserved_nbytes + RESERVE_NBYTES if plan and not provider.ranks else 0
        prompts = Prompts(
            args.prompt_cache_size, args.prompt_cache_bytes, free, session.room.memory
        )
        if follows:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when to end
            generator = Generator(provider, prompts)
            generator.join()
            generator.check()
        else:
            listening.answer(Generator(provider, prompts))


def _agree(ranks, args):
    """Give ranks one ``prompt_cache_bytes`` (the least); refuse other arguments that differ."""
    args.prompt_cache_bytes = min(ranks.gather(args.prompt_cache_bytes))
    own = {*OWN_ARGUMENTS, *(name for name in vars(args) if callable(getattr(args, name)))}
    ranks.compare({name: str(value) for name, value in vars(args).items() if name not in own})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "python -m moelab serve [options] MODEL"
    parser.description = (
        "mlx-lm's HTTP server, with the experts on disk. By default only this machine may ask."
    )
    add_model(parser)
    parser.add_argument(
        "--host",
        type=not_empty,
        metavar="NAME",
        default="127.0.0.1",
        help="0.0.0.0: other machines may ask, without password (default: %(default)s)",
    )
    parser.add_argument(
        "--allowed-origins",
        type=lambda text: text.split(","),
        metavar="URLS",
        default=[],
        help="of web pages that may ask (CORS), or * (default: none)",
    )
    add_number(parser, "--port", 8080, "0 takes a free one", at_least(0, 65535))
    add_mode(parser)
    add_draft(parser)
    add_number(parser, "--max-tokens", 512, "of an answer that does not say")
    add_sampling(parser)
    add_number(parser, "--prompt-cache-size", 10, "prompts and answers to keep")
    parser.add_argument(
        "--prompt-cache-bytes",
        type=nbytes(),
        metavar="SIZE",
        help="their memory, as in 2GB (default: what slots auto leaves)",
    )
    kv_cache = ("--kv-bits", "--kv-group-size", "--quantized-kv-start")
    more = ("--draft-model", *kv_cache)
    for name, options in {
        "--chat-template": {"default": ""},
        "--chat-template-args": {"type": json_object, "default": {}},
        "--decode-concurrency": {"type": positive, "default": 32},
        "--prompt-concurrency": {"type": positive, "default": 8},
        "--log-level": {
            "choices": ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
            "default": "INFO",
        },
        "--use-default-chat-template": {"action": "store_true"},
    }.items():
        parser.add_argument(name, help=argparse.SUPPRESS, **options)
        more += (name,)
    add_kv_cache(parser, *kv_cache)
    add_loading(parser, "mlx_lm.server", *more)
    add_refused(parser, NO_PIPELINE, "--pipeline")
    add_stream_options(parser, sampling=True)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    config = streaming_given(args)
    args.top_k = args.sampling_top_k  # the name in mlx-lm's server
    serve(args, config)
