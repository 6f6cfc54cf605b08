"""The model behind ``serve``: loads it, keeps earlier prompts, computes the answers.

mlx-lm's classes do that; these change what streaming and ranks need, and what would end the server.
Clients' threads make tokens, one thread computes. With ranks, rank 0 shares the requests.
"""

import argparse
import copy
import logging
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import mlx.core as mx
import psutil
from mlx.utils import tree_map
from mlx_lm import server
from mlx_lm.generate import GenerationResponse, generate_step, stream_generate
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache

from ..checkpoint import describe
from ..hooks import with_globals
from ..memory import return_free_memory
from ..speculation.generate import speculative_generate, speculative_generate_step
from ..speculation.target import vocabulary
from ..streaming.config import StreamConfig
from ..streaming.model import close, find, load
from ..streaming.plan import memory_now, plan
from ..streaming.ranks import LOADING_S, RankError
from ..streaming.session import session_of
from .drafting import leave_room, open_draft, shared_policy
from .kv_cache import check_kv_cache
from .request_checks import check_tokens
from .stream_options import say_plan

GRACE_S = 2  # the computing thread has so long to end when the server is stopped
TEXTS_SHARE = 8  # caches of texts decoded at once get at most this part (an eighth) of the memory
MIN_SHARED = 16  # the state after shared tokens is kept if prompts share at least so many
# Private methods of mlx-lm's ResponseGenerator that ``Generator`` replaces or calls.
SEAMS = ("_generate", "_next_request", "_run_generate", "_serve_single", "_share_object")
SEAMS += ("_tokenize",)


class Provider(server.ModelProvider):
    """Loads the one model of the command line, with its experts on disk, and its draft."""

    def __init__(
        self,
        cli_args: argparse.Namespace,
        config: StreamConfig,
        group: mx.distributed.Group | None = None,
    ):
        super().__init__(cli_args)
        folder = Path(cli_args.model)
        # The model's name in requests and answers: that of its folder, or that on the Hub.
        self.name = folder.resolve().name if folder.is_dir() else cli_args.model
        self._config, self._group, self.ranks = config, group, None

    def reset(self) -> None:
        if self.model is not None:
            close(self.model)
        super().reset()

    def load(self, *_):
        """Load, once, what the command line names; requests can name nothing else."""
        if self.model is not None:
            return self.model, self.tokenizer
        args = self.cli_args
        path = find(args.model)
        check_kv_cache(args, self._config)
        # The draft comes before the model, whose slots take the memory that is left.
        draft = open_draft(args.draft_model, self._config.kernels)
        model, self.tokenizer, config = load(
            path,
            self._with_room(path, draft),
            adapter_path=args.adapter_path,
            tokenizer_config=self._tokenizer_config,
            return_config=True,
            trust_remote_code=args.trust_remote_code,
            group=self._group,
        )
        session = session_of(model)
        self.model, self.draft_model, self.ranks = model, draft, session.ranks
        if args.use_default_chat_template and self.tokenizer.chat_template is None:
            self.reset()
            raise ValueError(
                f"serve: --use-default-chat-template: the tokenizer of {args.model} has none. Give "
                "one with --chat-template."
            )
        if draft is not None:
            draft.bind(model)  # refuses a draft that does not fit
        say_plan(model)
        args.prefill_step_size = session.room.step(args.prefill_step_size)
        self.model_key = (args.model, args.adapter_path, args.draft_model)
        self.processor = server.load_processor(model, config)
        caches = make_prompt_cache(model)
        self.is_batchable = draft is None and all(hasattr(c, "merge") for c in caches)
        # No token can be taken back from a recurrent state, so states are kept where texts part.
        self.has_states = not can_trim_prompt_cache(caches)
        self._limit_batches(session.plan)
        return model, self.tokenizer

    def _with_room(self, path, draft):
        """Reserve memory in the configuration for the draft or, without one, for several texts.

        These are as many as the command line says, or as fit into an eighth of the memory.
        """
        config, args = leave_room(self._config, draft), self.cli_args
        if draft is not None or not config.asks_for_slots or args.kv_bits is not None:
            return config
        alone = plan(path, config, trust_remote_code=args.trust_remote_code)
        # While mlx-lm reads prompts, all texts but one may decode. The plan has memory for one.
        more = args.decode_concurrency + min(args.prompt_concurrency, args.decode_concurrency) - 2
        if "decode_concurrency" not in getattr(args, "given", ()) and alone.caches_nbytes:
            # Leave out one text that would fit, since the available memory changes.
            slots = (alone.prompt_slots - alone.top_k) * sum(alone.expert_nbytes)
            free = alone.all_caches_nbytes - 2 * alone.caches_nbytes + slots
            free = max(0, min(alone.memory_nbytes // TEXTS_SHARE, free))
            more = min(more, free // alone.caches_nbytes)
        return replace(config, reserved_nbytes=more * alone.caches_nbytes)

    def _limit_batches(self, plan):
        """Lower mlx-lm's limits of concurrent texts to what there is memory for."""
        args = self.cli_args
        if plan is None or not plan.caches_nbytes or args.kv_bits is not None:
            return
        fit = max(1, plan.all_caches_nbytes // plan.caches_nbytes)
        fit = min(self.ranks.gather(fit)) if self.ranks else fit
        most = args.decode_concurrency
        args.prompt_concurrency = min(args.prompt_concurrency, most, (fit + 1) // 2)
        args.decode_concurrency = min(most, fit + 1 - args.prompt_concurrency)
        if args.decode_concurrency < most and not (self.ranks and self.ranks.rank):
            texts = f"{args.decode_concurrency}, as many as fit"
            print(f"moelab: texts decoded at once: {texts}", file=sys.stderr)


class Prompts(LRUPromptCache):
    """Caches of earlier prompts and answers; a prompt's last token is always left to read.

    mlx-lm's server ends at a prompt that is cached whole. Where less than ``free_nbytes`` of memory
    are free, prompts are forgotten; with 0, as on ranks (which must all keep the same), none is.
    """

    def __init__(self, size: int = 10, nbytes: int = sys.maxsize, free_nbytes: int = 0):
        super().__init__(size, nbytes)
        self.free_nbytes = free_nbytes

    def make_way(self, nbytes: int = 0) -> bool:
        """Forget prompts (LRU) until ``free_nbytes + nbytes`` are free; False if that fails."""
        short = self.free_nbytes + nbytes - memory_now()[1] if self.free_nbytes else 0
        enough = short <= self.nbytes
        if short > 0:
            self.trim_to(n_bytes=self.nbytes - short)
            mx.clear_cache()
            return_free_memory()
        return enough

    def insert_cache(self, model, tokens: list[int], prompt_cache: list, **kwargs) -> None:
        # The caches of a text in a batch are views of the batch's arrays and would keep them all.
        for c in prompt_cache:
            c.state = tree_map(lambda a: mx.contiguous(a) if type(a) is mx.array else a, c.state)
        if self.make_way(sum(c.nbytes for c in prompt_cache)):  # before they are copied
            mx.eval([c.state for c in prompt_cache])
            super().insert_cache(model, tokens, prompt_cache, **kwargs)

    def fetch_nearest_cache(self, model, tokens: list[int]) -> tuple[list | None, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
        return cache, rest + tokens[-1:]

    def parts_at(self, model, tokens: list[int]) -> int:
        """How many tokens a prompt shares with an earlier one; 0 if a kept cache ends there."""
        found = self._trie.search(model, tokens[:-1])
        return found.common_prefix if len(found.shorter or ()) < found.common_prefix else 0


class Generator(server.ResponseGenerator):
    """Computes the answers in one thread, in batches or one by one."""

    def __init__(self, provider: Provider, prompts: Prompts):
        self._begun = weakref.WeakSet()  # queues of the requests that were begun
        # Of a request that is served alone, not in a batch: its tokens, and where a state is kept.
        self._prompt, self._ends, self._context = [], [], None
        self._ranks, self._stopping, self._error = provider.ranks, False, None
        super().__init__(provider, prompts)

    def check(self) -> None:
        """Raise the error that ended this rank, if one did: no rank goes on without another."""
        if self._ranks and self._error:
            if isinstance(self._error, RankError):
                raise self._error
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
        """Compute until the server is stopped; an error ends the answers that were begun."""
        while not self._stop and not self._generation_failed:
            self._begun.clear()
            error = RuntimeError("the server was stopped")
            try:
                self._generate()
            except Exception as e:
                error = self._error = e
                # Without a request that may have caused it, the error would come again.
                self._generation_failed = bool(self._ranks) or not self._begun
                if not self._ranks:  # else ``check`` raises it
                    logging.error("Generation failed: %s", describe(e))
            for queue in list(self._begun):
                queue.put(error)

    def stop_and_join(self) -> None:
        self._stopping = True  # rank 0 tells the others
        self._stop = self._stop or self._ranks is None
        self.join()

    def join(self) -> None:
        super().join()
        # After its Python code the thread still frees functions that MLX compiled in it. If the
        # interpreter ended meanwhile, the process would abort.
        end = time.monotonic() + GRACE_S
        thread = self._generation_thread.native_id
        while thread in {t.id for t in psutil.Process().threads()} and time.monotonic() < end:
            time.sleep(0.01)

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
        """Begin an answer, which ends when ``request.check_client`` finds that its client left."""
        check = vars(request).pop("check_client")

        def progress(*done):
            check()
            progress_callback(*done)

        # Tokens are made in the client's thread, so that others are answered meanwhile; ranks get
        # them with the request. Prompts with images need MLX, so the generating thread reads them.
        if self.model_provider.processor is None:
            request.read = self._read(self.model_provider.tokenizer, request, generation_args)
        context, responses = super().generate(request, generation_args, progress)
        return context, (check() or response for response in responses)

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
        check_tokens(read[0], args, vocabulary(self.model_provider.model))
        return read

    def _tokenize(self, tokenizer, request, args):
        read = getattr(request, "read", None) or self._read(tokenizer, request, args)
        prompt, segments, types, state, vision = read
        self._prompt, self._ends = prompt, []
        if vision is None and self.model_provider.has_states:
            # mlx-lm keeps the state after each segment. One more segment ends where an earlier
            # prompt differs, with the type of a system prompt, since several prompts begin so.
            ends = dict(zip(accumulate(map(len, segments)), types))
            shared = self.prompt_cache.parts_at(self.model_provider.model_key, prompt)
            if shared >= MIN_SHARED:
                ends.setdefault(shared, "system")
            self._ends = sorted(ends.items())
            segments = [prompt[a:b] for a, b in pairwise([0, *sorted(ends)])]
            types = [kind for _, kind in self._ends]
        return prompt, segments, types, state, vision

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
        self._context = context = server.GenerationContext(**fields)
        context.gone = False
        if self._ranks:  # which must all end the answer at the same token: in ``_check``
            context.stop = partial(setattr, context, "gone", True)
        return context

    def _answer(
        self, prompt, draft_model, num_draft_tokens, input_embeddings, logits_processors, **given
    ) -> Iterator[GenerationResponse]:
        """Stream an answer as mlx-lm does, with a draft; keep a hybrid's state after segments."""
        provider, whole = self.model_provider, self._prompt
        begin = read = len(whole) - len(prompt)
        told = given.pop("prompt_progress_callback")
        writing = {name: given.pop(name) for name in ("tokenizer", "max_tokens", "sampler")}

        def progress(done, _):
            self._check()
            told(read - begin + done, len(prompt))

        step, generate = generate_step, stream_generate
        given["prompt_progress_callback"] = progress
        if draft_model is not None:
            step, generate = speculative_generate_step, speculative_generate
            number = shared_policy(provider.model, draft_model, num_draft_tokens)
            given |= {"draft": draft_model, "num_draft_tokens": number}
        for end, kind in self._ends:
            end = min(end, len(whole) - 1)
            if end > read:
                for _ in step(mx.array(whole[read:end]), max_tokens=0, **given):
                    pass
                read, cache = end, copy.deepcopy(given["prompt_cache"])
                self.prompt_cache.insert_cache(
                    provider.model_key, whole[:read], cache, cache_type=kind
                )
        if input_embeddings is not None:
            given["input_embeddings"] = input_embeddings
        # Logits processors see the whole prompt, as in mlx-lm's batches.
        processors = [_after(whole[:read], p) for p in logits_processors]
        answer = generate(prompt=whole[read:], logits_processors=processors, **writing, **given)
        with closing(answer):
            for response in answer:
                self._check()
                yield response

    def _check(self):
        """End an answer if the server was stopped; on ranks, also if the client has gone."""
        if self._ranks:
            self._stop, gone = self._ranks.any(self._stopping, self._context.gone)
            if gone:
                raise ConnectionAbortedError("the client has gone")
        if self._stop:
            raise RuntimeError("the server was stopped")


def _after(before, processor):
    """Make a logits processor that also sees the tokens ``before``."""
    before = mx.array(before, mx.uint32)
    return lambda tokens, logits: processor(
        mx.concatenate([before, tokens.astype(mx.uint32)]), logits
    )
