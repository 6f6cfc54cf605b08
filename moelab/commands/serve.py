"""An HTTP server for clients of OpenAI's and Anthropic's APIs, with the experts on disk.

By default the server answers only this machine.
"""

import argparse
import logging
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..checkpoint import read_json
from ..prompt import vocabulary
from ..streaming.model import close, find, load
from ..streaming.plan import plan
from ..streaming.ranks import joined
from ..streaming.room import RESERVE_NBYTES
from ..streaming.session import session_of
from . import arguments
from .argument_types import at_least, nbytes, not_empty, positive
from .drafting import open_draft
from .kv_cache import PromptFiles, check_kv_cache
from .server.ask import Served
from .server.engine import Engine
from .server.prompts import Prompts


def _load(args, config, group):
    """Load the draft and the model that the command line names, and an earlier server's prompts."""
    folder, path = Path(args.model), find(args.model)
    check_kv_cache(args, config)
    loading = arguments.loading_given(args)
    if args.chat_template:
        loading["tokenizer_config"]["chat_template"] = args.chat_template
    # The draft is loaded before the model, whose slots take the memory that is left.
    draft = open_draft(args.draft_model, config.kernels, args.model)
    files = PromptFiles(args, config, draft) if args.prompt_cache_dir else None
    is_alone = draft is not None or args.kv_bits is not None
    texts = 1 if is_alone else _texts(args, path, config)
    model, tokenizer = load(path, config, group=group, draft=draft, texts=texts, **loading)
    try:
        if draft is not None:
            draft.bind(model)  # raises if the draft does not fit
    except ValueError:
        close(model)
        raise
    arguments.say_plan(model)
    session = session_of(model)
    plan, ranks = session.plan, session.ranks
    args.prefill_step_size = session.room.step(args.prefill_step_size)
    caches = make_prompt_cache(model)
    name = folder.resolve().name if folder.is_dir() else args.model
    served = Served(name, args, tokenizer, vocabulary(model), positions(path), model, draft, ranks)
    served.has_states = not can_trim_prompt_cache(caches)
    can_merge = getattr(model, "batches", True) and all(hasattr(c, "merge") for c in caches)
    served.is_batchable = can_merge and not is_alone
    if plan is not None:
        served.context, kept = plan.context, plan.all_caches_nbytes
        if plan.caches_nbytes and args.kv_bits is None:
            served.room = max(1, kept // plan.caches_nbytes)
            served.room = min(ranks.gather(served.room)) if ranks else served.room
        # The other texts may fill all of their caches at the same time.
        others = min(args.decode_concurrency, served.room) - 1 if served.is_batchable else 0
        kept = max(0, kept - others * plan.caches_nbytes)
    served.most_texts = min(args.decode_concurrency, 2 * served.room)
    if args.prompt_cache_bytes is None:
        args.prompt_cache_bytes = sys.maxsize if plan is None else kept
    if ranks:  # all ranks keep the same prompts
        args.prompt_cache_bytes = min(ranks.gather(args.prompt_cache_bytes))
        arguments.compare_arguments(ranks, args)
    # Kept prompts leave room for the caches of texts and for what ``Room`` keeps free.
    free = plan.reserved_nbytes + RESERVE_NBYTES if plan and not ranks else 0
    return served, Prompts(args.prompt_cache_size, args.prompt_cache_bytes, free, files=files)


def _texts(args, path, config):
    """Return the number of texts to plan memory for: the command line's, or as many as fit."""
    if not config.asks_for_slots:
        return 1
    alone = plan(path, config, trust_remote_code=args.trust_remote_code)
    more = args.decode_concurrency - 1
    if "decode_concurrency" not in getattr(args, "given", ()) and alone.caches_nbytes:
        # The caches of further texts get at most an eighth of the memory. The plan has one text
        # fewer than would fit, since the available memory changes.
        slots = (alone.prompt_slots - alone.top_k) * alone.facts.slot_nbytes
        free = alone.all_caches_nbytes - 2 * alone.caches_nbytes + slots
        free = max(0, min(alone.memory_nbytes // 8, free))
        more = min(more, free // alone.caches_nbytes)
    return 1 + more


def positions(path: Path) -> int:
    """Return how many tokens a model's texts may have; 2^31 - 1 if its files set no limit."""
    config = read_json(path / "config.json")
    config |= config.get("text_config") or {}
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = rope.get("factor", 1) * rope.get("original_max_position_embeddings", 0)
    return max(config.get("max_position_embeddings") or 0, int(stretched)) or 2**31 - 1


def run(args: argparse.Namespace) -> None:
    """Answer requests until Ctrl-C; of several ranks, rank 0 listens and the others follow."""
    config = arguments.streaming_given(args)
    try:
        from .server import http
    except ImportError as error:
        raise ValueError(
            f"serve: expected the packages of moelab[serve], {error.name} is missing: pip install "
            "'moelab[serve]'"
        ) from error
    group = joined()
    if group is not None and args.prompt_cache_dir:
        raise ValueError("--prompt-cache-dir: each rank would keep other prompts. Leave it out.")
    follows = group is not None and group.rank() > 0
    level = "ERROR" if follows else args.log_level
    logging.basicConfig(level=level, format="%(asctime)s - %(levelname)s - %(message).1000s")
    maybe_set_recommended_wired_limit()
    with nullcontext() if follows else http.listen(args.host, args.port) as listening:
        served, prompts = _load(args, config, group)
        engine = Engine(served, prompts)
        if follows:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 tells the others when to end
            engine.join()
            engine.check()
        else:
            app = http.app(engine, served, args.allowed_origins)
            http.Server(app, engine, listening).answer()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    who = "address; 0.0.0.0 lets other machines ask, without password (default: %(default)s)"
    parser.add_argument("--host", type=not_empty, metavar="NAME", default="127.0.0.1", help=who)
    pages = {"metavar": "URLS", "help": "origins of web pages that may ask, or * (default: none)"}
    split = partial(str.split, sep=",")
    parser.add_argument("--allowed-origins", type=split, default=[], **pages)
    arguments.add_number(parser, "--port", 8080, "port; 0 takes a free port", at_least(0, 65535))
    arguments.add_draft(parser)
    ends = "most tokens of an answer, for requests without a limit (default: no limit)"
    parser.add_argument("--max-tokens", type=positive, metavar="N", help=ends)
    arguments.add_sampling(parser)
    arguments.add_number(parser, "--prompt-cache-size", 10, "prompts and answers to keep")
    size = {"metavar": "SIZE", "help": "their memory, as in 2GB (default: what slots auto leaves)"}
    parser.add_argument("--prompt-cache-bytes", type=nbytes(0, 2**63 - 1), **size)
    where = "folder that keeps the prompts until the server starts again"
    parser.add_argument("--prompt-cache-dir", type=not_empty, metavar="DIR", help=where)
    names = ["--chat-template", "--chat-template-args", "--decode-concurrency", "--log-level"]
    names += ["--prompt-concurrency", *arguments.KV_CACHE, *arguments.LOADING]
    arguments.add_hidden(parser, *names)
    arguments.add_refused(parser, arguments.NO_PIPELINE, "--pipeline")
    why = "a tokenizer has no other template than its own"
    arguments.add_refused(parser, why, "--use-default-chat-template")
    arguments.add_stream_options(parser)
