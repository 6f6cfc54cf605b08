"""The command ``serve``: a streamed model behind OpenAI's and Anthropic's APIs (``server``)."""

import argparse
import logging
import signal
import sys
from contextlib import nullcontext
from math import inf
from pathlib import Path

from mlx_lm.generate import make_stop_sequences
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..checkpoint import read_json
from ..prompt import vocabulary
from ..streaming.config import StreamConfig
from ..streaming.model import close, find, load
from ..streaming.plan import plan
from ..streaming.ranks import joined
from ..streaming.room import RESERVE_NBYTES
from ..streaming.session import session_of
from . import arguments
from .argument_types import at_least, json_object, nbytes, not_empty, positive
from .drafting import open_draft
from .kv_cache import PromptFiles, check_kv_cache, quantized_given
from .server.engine import Engine
from .server.prompts import Prompts
from .stream_options import add_stream_options, say_plan, streaming_given

MOST_TOKENS = 2**31 - 1  # of a text, where a model has no limit of its own
TEXTS_SHARE = 8  # caches of texts decoded at once get at most this part (an eighth) of the memory


class Model:
    """The model that is served, its draft, and how many texts there is memory for."""

    def __init__(self, args: argparse.Namespace, config: StreamConfig, group=None):
        self.args, folder = args, Path(args.model)
        # The model's name in requests and answers: that of its folder, or that on the Hub.
        self.name = folder.resolve().name if folder.is_dir() else args.model
        check_kv_cache(args, config)
        loading = arguments.loading_given(args)
        if args.chat_template:
            loading["tokenizer_config"]["chat_template"] = args.chat_template
        # The draft comes before the model, whose slots take the memory that is left.
        self.draft = open_draft(args.draft_model, config.kernels, args.model)
        self.prompt_files = PromptFiles(args, config, self.draft) if args.prompt_cache_dir else None
        path = find(args.model)
        room = {"draft": self.draft, "texts": self._texts(path, config)}
        self.model, self.tokenizer = load(path, config, group=group, **room, **loading)
        session = session_of(self.model)
        self.plan, self.ranks = session.plan, session.ranks
        try:
            if self.draft is not None:
                self.draft.bind(self.model)  # refuses a draft that does not fit
        except ValueError:
            close(self.model)
            raise
        say_plan(self.model)
        args.prefill_step_size = session.room.step(args.prefill_step_size)
        self.quantized = quantized_given(args)
        caches = make_prompt_cache(self.model)
        can_merge = getattr(self.model, "batches", True) and all(
            hasattr(c, "merge") for c in caches
        )
        self.is_batchable = can_merge and self.draft is None and args.kv_bits is None
        # No token can be taken back from a recurrent state, so states are kept where texts part.
        self.has_states = not can_trim_prompt_cache(caches)
        self.size, self.positions = vocabulary(self.model), positions(path)
        self.ends = make_stop_sequences(self.tokenizer)
        # Texts of ``context`` tokens for whose caches there is memory, and texts at once.
        self._context, self.room = self.plan.context if self.plan else inf, inf
        if self.plan is not None and self.plan.caches_nbytes and args.kv_bits is None:
            room = max(1, self.plan.all_caches_nbytes // self.plan.caches_nbytes)
            self.room = min(self.ranks.gather(room)) if self.ranks else room
        self.most_texts = min(args.decode_concurrency, 2 * self.room)

    def _texts(self, path, config):
        """How many texts there shall be memory for: as the command line says, or as fit."""
        args = self.args
        if self.draft is not None or not config.asks_for_slots or args.kv_bits is not None:
            return 1
        alone = plan(path, config, trust_remote_code=args.trust_remote_code)
        more = args.decode_concurrency - 1
        if "decode_concurrency" not in getattr(args, "given", ()) and alone.caches_nbytes:
            # Leave out one text that would fit, since the available memory changes.
            slots = (alone.prompt_slots - alone.top_k) * alone.facts.slot_nbytes
            free = alone.all_caches_nbytes - 2 * alone.caches_nbytes + slots
            free = max(0, min(alone.memory_nbytes // TEXTS_SHARE, free))
            more = min(more, free // alone.caches_nbytes)
        return 1 + more

    def fits(self, sizes: list[int]) -> bool:
        """Whether the caches of these texts fit in memory; ``sizes`` are their tokens."""
        return sum(max(0.5, n / self._context) for n in sizes) <= self.room  # a short one's: half

    def make_cache(self, drafted: bool = True) -> list:
        """New caches of the model and, if ``drafted``, of its draft."""
        drafts = self.draft.make_cache() if drafted and self.draft is not None else []
        return make_prompt_cache(self.model) + drafts


def positions(path: Path) -> int:
    """The tokens of the longest text that a model was made for."""
    config = read_json(path / "config.json")
    config |= config.get("text_config") or {}
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = rope.get("factor", 1) * rope.get("original_max_position_embeddings", 0)
    return max(config.get("max_position_embeddings") or 0, int(stretched)) or MOST_TOKENS


def serve(args: argparse.Namespace, config: StreamConfig) -> None:
    """Answer requests until Ctrl-C; of several ranks, rank 0 listens and the others follow."""
    try:
        from .server import http
        from .server.completions import Chat, Completions
        from .server.messages import CountTokens, Messages
        from .server.responses import Responses
    except ImportError as error:
        raise ValueError(
            f"serve: expected the packages of moelab[serve], {error.name} is missing: pip install "
            "'moelab[serve]'"
        ) from error
    group = joined()
    if group is not None and args.prompt_cache_dir:
        raise ValueError("--prompt-cache-dir: ranks would keep other prompts. Leave it out.")
    follows = group is not None and group.rank() > 0
    level = "ERROR" if follows else args.log_level
    logging.basicConfig(level=level, format="%(asctime)s - %(levelname)s - %(message).1000s")
    maybe_set_recommended_wired_limit()
    with nullcontext() if follows else http.listen(args.host, args.port) as listening:
        model = Model(args, config, group)
        free = _prompt_memory(model, args)
        kept = args.prompt_cache_size, args.prompt_cache_bytes, free
        engine = Engine(model, Prompts(*kept, files=model.prompt_files))
        if follows:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when to end
            engine.join()
            engine.check()
        else:
            dialects = (Chat, Completions, Responses, Messages, CountTokens)
            app = http.app(engine, model, dialects, args.allowed_origins)
            http.Server(app, engine, listening).answer()


def _prompt_memory(model, args):
    """The memory of kept prompts, and what they leave free for others."""
    plan, ranks = model.plan, model.ranks
    if args.prompt_cache_bytes is None:
        # The other texts may need all of their caches at once.
        others = min(args.decode_concurrency, model.room) - 1 if model.is_batchable else 0
        args.prompt_cache_bytes = (
            max(0, plan.all_caches_nbytes - others * plan.caches_nbytes) if plan else sys.maxsize
        )
    if ranks:  # all keep the same prompts
        args.prompt_cache_bytes = min(ranks.gather(args.prompt_cache_bytes))
        arguments.compare_arguments(ranks, args)
    # Prompts leave free what is reserved for caches, and what ``Room`` keeps free in each call.
    return plan.reserved_nbytes + RESERVE_NBYTES if plan and not ranks else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "An HTTP server for clients of OpenAI's and Anthropic's APIs, with the experts on disk. By "
        "default only this machine may ask."
    )
    arguments.add_model(parser)
    who = "0.0.0.0: other machines may ask, without password (default: %(default)s)"
    parser.add_argument("--host", type=not_empty, metavar="NAME", default="127.0.0.1", help=who)
    parser.add_argument(
        "--allowed-origins",
        type=lambda text: text.split(","),
        metavar="URLS",
        default=[],
        help="of web pages that may ask (CORS), or * (default: none)",
    )
    arguments.add_number(parser, "--port", 8080, "0 takes a free one", at_least(0, 65535))
    arguments.add_draft(parser)
    ends = "of an answer whose request does not say (default: to its end)"
    parser.add_argument("--max-tokens", type=positive, metavar="N", help=ends)
    arguments.add_sampling(parser)
    arguments.add_number(parser, "--prompt-cache-size", 10, "prompts and answers to keep")
    size = "their memory, as in 2GB (default: what slots auto leaves)"
    parser.add_argument("--prompt-cache-bytes", type=nbytes(), metavar="SIZE", help=size)
    where = "keep them here when the server ends, for its next start"
    parser.add_argument("--prompt-cache-dir", type=not_empty, metavar="DIR", help=where)
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    arguments.add_hidden(parser, "--chat-template", default="")
    arguments.add_hidden(parser, "--chat-template-args", type=json_object, default={})
    arguments.add_hidden(parser, "--decode-concurrency", type=positive, default=32)
    arguments.add_hidden(parser, "--log-level", choices=levels, default="INFO")
    arguments.add_hidden(parser, "--prompt-concurrency", type=positive, default=8)
    arguments.add_kv_cache(parser)
    arguments.add_loading(parser)
    arguments.add_refused(parser, arguments.NO_PIPELINE, "--pipeline")
    why = "a tokenizer has no other template than its own"
    arguments.add_refused(parser, why, "--use-default-chat-template")
    add_stream_options(parser, sampling=True)


def run(args: argparse.Namespace) -> None:
    serve(args, streaming_given(args))
