"""Options that several commands share."""

import argparse
import zlib
from typing import Any

from ..checkpoint import shorten
from ..streaming.config import OPTIONS
from ..streaming.ranks import Ranks
from . import argument_types as kinds

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# Options of mlx-lm's commands. The help lists their names at its end, and does not explain them.
HIDDEN = {
    "--adapter-path": {"type": kinds.not_empty},
    "--chat-template": {"default": ""},
    "--chat-template-args": {"type": kinds.json_object, "default": {}},
    "--decode-concurrency": {"type": kinds.positive, "default": 32},
    "--draft-model": {"type": kinds.not_empty},
    "--eos-token": {"type": kinds.not_empty},
    "--extra-eos-token": {"nargs": "+", "default": ()},
    "--kv-bits": {"type": int, "choices": (2, 3, 4, 5, 6, 8)},
    "--kv-group-size": {"type": int, "choices": (32, 64, 128), "default": 64},
    "--log-level": {"choices": LEVELS, "default": "INFO"},
    "--max-kv-size": {"type": kinds.at_least(5)},  # a limited cache never drops its first 4 tokens
    "--min-tokens-to-keep": {"type": kinds.positive, "default": 1},
    "--prefill-response": {},
    "--prefill-step-size": {"type": kinds.positive, "default": 2048},
    "--prompt-concurrency": {"type": kinds.positive, "default": 8},
    "--quantized-kv-start": {"type": kinds.zero_or_more, "default": 5000},
    "--trust-remote-code": {"action": "store_true"},
    "--verbose": {"type": kinds.yes_or_no, "default": True},
    "--xtc-probability": {"type": kinds.between(0, 1), "default": 0.0},
    "--xtc-threshold": {"type": kinds.between(0, 0.5), "default": 0.1},
}
KV_CACHE = ("--kv-bits", "--kv-group-size", "--quantized-kv-start")
LOADING = ("--adapter-path", "--prefill-step-size", "--trust-remote-code")
XTC = ("--xtc-probability", "--xtc-threshold")
# Arguments that may differ between ranks. ``load`` checks that ranks stream experts alike.
OWN_ARGUMENTS = {"model", "adapter_path", "host", "port", "log_level", "given", "default_slots"}


def flag(name: str) -> str:
    """Spell a field's name as an option: ``--top-k`` for ``top_k``, ``--from`` for ``library``."""
    return "--from" if name == "library" else "--" + name.replace("_", "-")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument ``model``, also under mlx-lm's flag ``--model``."""
    what = "folder or Hub repository, as for mlx_lm.load"
    given = {"type": kinds.not_empty, "metavar": "MODEL", "default": argparse.SUPPRESS}
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("model", nargs="?", help=what, **given)
    either.add_argument("--model", help=argparse.SUPPRESS, **given)


def add_number(
    parser: argparse.ArgumentParser, names: str, default: Any, what: str, kind: Any = kinds.positive
) -> None:
    """Add an option that takes a number; its help is ``what`` and the default."""
    given = {"type": kind, "metavar": "N", "default": default}
    parser.add_argument(*names.split(), help=f"{what} (default: %(default)s)", **given)


NO_PIPELINE = "several machines divide the experts of each layer, not the layers"


def add_refused(parser: argparse.ArgumentParser, why: str, *names: str) -> None:
    """Add hidden options that mlx-lm's command has; here they end the command and say why."""

    class Refuse(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            parser.error(f"{option_string}: {why}, so leave it out")

    parser.add_argument(*names, nargs="*", action=Refuse, help=argparse.SUPPRESS)


def add_hidden(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options of ``HIDDEN``."""
    for name in names:
        parser.add_argument(name, help=argparse.SUPPRESS, **HIDDEN[name])
    parser.epilog = " ".join([parser.epilog or "Options as in mlx-lm:", *names])


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add ``--draft``, also under mlx-lm's name ``--draft-model``, and ``--num-draft-tokens``."""
    add_hidden(parser, "--draft-model")
    what = "lookup, mtp (the model's own head), or the folder of a model, DFlash draft or head"
    kind = {"type": kinds.not_empty, "metavar": "DRAFT"}
    parser.add_argument("--draft", dest="draft_model", help=what, **kind)
    what = "tokens drafted in a round; auto chooses by their gain"
    add_number(parser, "--num-draft-tokens", "auto", what, kinds.or_auto(kinds.zero_or_more))


def add_sampling(parser: argparse.ArgumentParser, names: tuple[str, ...] | None = None) -> None:
    """Add mlx-lm's sampling options (None: all), with ``--sampling-top-k`` for ``--top-k``."""
    for name, kind, default, what in (
        ("--temp", kinds.between(0), 0.0, "temperature; 0: always the most likely token"),
        ("--top-p", kinds.between(0, 1), 1.0, "the likeliest tokens that sum to this probability"),
        ("--min-p", kinds.between(0, 1), 0.0, "only tokens of this share of the top probability"),
        ("--sampling-top-k", kinds.zero_or_more, 0, "only the N likeliest tokens; 0: all"),
    ):
        if names is None or name in names:
            add_number(parser, name, default, what, kind)


def loading_given(args: argparse.Namespace) -> dict:
    """Turn options of ``LOADING`` into arguments of ``moelab.load``."""
    trust = {"trust_remote_code": args.trust_remote_code}
    return {"adapter_path": args.adapter_path, "tokenizer_config": dict(trust), **trust}


def compare_arguments(ranks: Ranks, args: argparse.Namespace) -> None:
    """Refuse ranks whose arguments differ; ``load`` compares the arguments of streaming."""
    given = {
        name: str(value)
        for name, value in vars(args).items()
        if name not in OWN_ARGUMENTS | OPTIONS.keys() and not callable(value)
    }
    for name, text in given.items():
        given[name] = f"{shorten(text, 100)!r}, checksum {zlib.crc32(text.encode()):08x}"
    ranks.compare(given)
