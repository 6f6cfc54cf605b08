"""Options that several commands have."""

import argparse
import zlib
from collections.abc import Callable
from typing import Any

from ..checkpoint import shorten
from ..streaming.config import OPTIONS
from ..streaming.ranks import Ranks
from .argument_types import at_least, between, not_empty, or_auto, positive, zero_or_more

LEAST_KV_SIZE = 5  # tokens: a limited cache never drops its first 4
# Arguments that may differ between ranks. ``load`` checks that ranks stream experts alike.
OWN_ARGUMENTS = {"model", "adapter_path", "host", "port", "log_level", "given", "default_slots"}


def flag(name: str) -> str:
    """Spell a field's name as an option: ``top_k`` becomes ``--top-k``, ``library`` ``--from``."""
    return "--from" if name == "library" else "--" + name.replace("_", "-")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument ``model``, also under mlx-lm's flag ``--model``."""
    what = "folder or Hub repository, as for mlx_lm.load"
    given = {"type": not_empty, "metavar": "MODEL", "default": argparse.SUPPRESS}
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("model", nargs="?", help=what, **given)
    either.add_argument("--model", help=argparse.SUPPRESS, **given)


def add_number(
    parser: argparse.ArgumentParser,
    name: str,
    default: Any,
    what: str,
    kind: Callable[[str], Any] = positive,
    short: str | None = None,
) -> None:
    """Add an option that takes a number; its help is ``what`` and the default."""
    names = (name,) if short is None else (short, name)
    parser.add_argument(
        *names, type=kind, metavar="N", default=default, help=f"{what} (default: %(default)s)"
    )


NO_PIPELINE = "several machines divide the experts of each layer, not the layers"


def add_refused(parser: argparse.ArgumentParser, why: str, *names: str) -> None:
    """Add a hidden option, which mlx-lm's command has; here it ends the command and says why."""

    class Refuse(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            parser.error(f"{option_string}: {why}, so leave it out")

    parser.add_argument(*names, nargs="*", action=Refuse, help=argparse.SUPPRESS)


def add_hidden(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """Add an option that mlx-lm's command has. The help's end names it, without a text."""
    parser.add_argument(name, help=argparse.SUPPRESS, **options)
    parser.epilog = f"{parser.epilog or 'As mlx-lm has them:'} {name}"


def add_kv_cache(parser: argparse.ArgumentParser, max_size: bool = False) -> None:
    """Add mlx-lm's options of the key-value cache."""
    if max_size:
        add_hidden(parser, "--max-kv-size", type=at_least(LEAST_KV_SIZE))
    add_hidden(parser, "--kv-bits", type=int, choices=(2, 3, 4, 5, 6, 8))
    add_hidden(parser, "--kv-group-size", type=int, choices=(32, 64, 128), default=64)
    add_hidden(parser, "--quantized-kv-start", type=zero_or_more, default=5000)


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add ``--draft``, also under mlx-lm's name ``--draft-model``, and ``--num-draft-tokens``."""
    add_hidden(parser, "--draft-model", type=not_empty)
    what = "lookup, mtp (the model's own head), or the folder of a model, DFlash draft or head"
    parser.add_argument("--draft", dest="draft_model", type=not_empty, metavar="DRAFT", help=what)
    what = "drafted in a round; auto decides by what it gains"
    add_number(parser, "--num-draft-tokens", "auto", what, or_auto(zero_or_more))


def add_sampling(parser: argparse.ArgumentParser, names: tuple[str, ...] | None = None) -> None:
    """Add mlx-lm's options of sampling (None: all); its ``--top-k`` is ``--sampling-top-k``."""
    for name, kind, default, what in (
        ("--temp", between(0), 0.0, "temperature; 0: always the most likely token"),
        ("--top-p", between(0, 1), 1.0, "only the likeliest, of this probability together"),
        ("--min-p", between(0, 1), 0.0, "only tokens of this share of the likeliest one's"),
        ("--sampling-top-k", zero_or_more, 0, "only the N likeliest tokens; 0: all"),
    ):
        if names is None or name in names:
            add_number(parser, name, default, what, kind)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Add mlx-lm's options of loading a model and reading a prompt."""
    add_hidden(parser, "--adapter-path", type=not_empty)
    add_hidden(parser, "--prefill-step-size", type=positive, default=2048)
    add_hidden(parser, "--trust-remote-code", action="store_true")


def add_xtc(parser: argparse.ArgumentParser) -> None:
    """Add mlx-lm's options of XTC sampling."""
    add_hidden(parser, "--xtc-probability", type=between(0, 1), default=0.0)
    add_hidden(parser, "--xtc-threshold", type=between(0, 0.5), default=0.1)


def loading_given(args: argparse.Namespace) -> dict:
    """Turn the options of ``add_loading`` into arguments of ``moelab.load``."""
    trust = {"trust_remote_code": args.trust_remote_code}
    return {"adapter_path": args.adapter_path, "tokenizer_config": dict(trust), **trust}


def compare_arguments(ranks: Ranks, args: argparse.Namespace) -> None:
    """Refuse ranks that were started with other arguments; ``load`` compares how they stream."""
    given = {
        name: str(value)
        for name, value in vars(args).items()
        if name not in OWN_ARGUMENTS | OPTIONS.keys() and not callable(value)
    }
    for name, text in given.items():
        given[name] = f"{shorten(text, 100)!r}, checksum {zlib.crc32(text.encode()):08x}"
    ranks.compare(given)
