"""Options that several commands share."""

import argparse
import os
import sys
import zlib
from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from ..checkpoint import shorten
from ..streaming.config import ENVIRONMENT, OPTIONS, StreamConfig
from ..streaming.ranks import Ranks
from ..streaming.session import session_of
from . import argument_types as kinds

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# Options of mlx-lm's commands. The help lists their names at its end, and does not explain them.
HIDDEN = {
    "--adapter-path": {"type": kinds.not_empty},
    "--chat-template": {"default": ""},
    "--chat-template-args": {"type": kinds.json_object, "default": {}},
    "--decode-concurrency": {"type": kinds.positive, "default": 32},
    "--draft-model": {"type": kinds.not_empty},
    "--extra-eos-token": {"nargs": "+", "default": ()},
    "--kv-bits": {"type": int, "choices": (2, 3, 4, 5, 6, 8)},
    "--kv-group-size": {"type": int, "choices": (32, 64, 128), "default": 64},
    "--log-level": {"choices": LEVELS, "default": "INFO"},
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
STREAM_OPTIONS = {name: option for name, option in OPTIONS.items() if option.command}


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


NO_LIMIT = "most models make caches without a limit, and --context sets the memory for them"
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


def add_stream_options(parser: argparse.ArgumentParser, slots: int | str = "auto") -> None:
    """Add the options of ``StreamConfig``'s fields; the default of each option is None."""
    parser.set_defaults(default_slots=slots)
    group = parser.add_argument_group("how experts are streamed")
    if slots == "auto":  # else a command that measures, with modes and sampling of its own
        mode, modes = OPTIONS["mode"].default, OPTIONS["mode"].choices
        what = f"{', '.join(modes)} (default: %(default)s)"
        group.add_argument("--mode", choices=modes, default=mode, metavar="MODE", help=what)
        why = "it has two meanings here; write --sampling-top-k for likely tokens, as in mlx-lm, "
        why += "or --experts-top-k for the experts per token"
        add_refused(parser, why, "--top-k")
    for name, option in STREAM_OPTIONS.items():
        if option.for_auto and slots != "auto":
            continue
        spelled = "--experts-top-k" if slots == "auto" and name == "top_k" else None
        add_field(group, name, spelled, slots if name == "slots" else None)


def add_field(parser: Any, name: str, spelled: str | None = None, default: Any = None) -> None:
    """Add a field's option to a parser or group; without the option, the value is None."""
    option = OPTIONS[name]
    parser.add_argument(
        spelled or flag(name),
        dest=name,
        type=option_type(option),
        choices=[c for c in option.choices if c not in option.only_in_python] or None,
        metavar=option.metavar,
        help=option.help.format(default=default or option.default),
    )


def option_type(option: Any) -> Callable[[str], Any]:
    """Return the argument type of a field of ``StreamConfig``."""
    if not option.bounds:
        return str
    number = (kinds.nbytes if option.metavar == "BYTES" else kinds.at_least)(*option.bounds)
    return kinds.or_auto(number) if option.default == "auto" else number


def streaming_given(args: argparse.Namespace) -> StreamConfig:
    """Return the options' configuration; SwiftLM's environment variables give defaults."""
    found = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    fields = {ENVIRONMENT[name] for name in found}
    if "mode" in fields and "mode" not in getattr(args, "given", ()):
        args.mode = StreamConfig.from_env().mode
    if found:
        config = StreamConfig.from_env(mode=args.mode)
        for field in fields & STREAM_OPTIONS.keys() - config.unused():
            if getattr(args, field) is None:
                setattr(args, field, getattr(config, field))
    config = stream_config(args, mode=args.mode)
    check_stream_options(args, {args.mode: config})
    if found:
        now = [f"mode {config.mode}"]
        now += [] if "slots" in config.unused() else [f"slots {config.slots}"]
        now += [f"top-k {config.top_k}"] if config.top_k else []
        print(
            f"moelab: the environment has {', '.join(f'{k}={v}' for k, v in found.items())}; with "
            f"the command's own options this gives {', '.join(now)}",
            file=sys.stderr,
        )
    return config


def say_plan(model: nn.Module) -> None:
    """Let rank 0 print to stderr the plan of slots, or that ``--slots`` exceeds the experts."""
    session = session_of(model)
    said, E, slots = session.plan, session.facts.num_experts, session.config.slots
    if said is None and session.residency.layers and slots > E:
        said = f"slots={E} of {E} in each layer: --slots {slots} is more than a layer has experts"
    if said and not (session.ranks and session.ranks.rank):
        print(f"moelab: {said}", file=sys.stderr)


def stream_config(args: argparse.Namespace, **fields) -> StreamConfig:
    """Return the configuration that the options give, with ``fields`` added."""
    given = {n: getattr(args, n, None) for n in STREAM_OPTIONS}
    given = {n: value for n, value in given.items() if value is not None}
    defaults = {"slots": args.default_slots, "lazy_logits": True}
    return StreamConfig(**defaults | given, **fields)


def check_stream_options(args: argparse.Namespace, configs: dict[str, StreamConfig]) -> None:
    """End the command if an option that was given has no effect in any of the configurations."""
    for name, option in STREAM_OPTIONS.items():
        given = getattr(args, name, None)
        users = [c for c in configs.values() if name not in c.unused()]
        if given is None or any(getattr(c, name) == given for c in users):
            continue
        why = f"has no effect in mode {', '.join(configs)}"
        if option.for_auto and any("slots" not in c.unused() for c in configs.values()):
            why = "has no effect without --slots auto"
        args.error(f"{flag(name)} {why}: leave it out, or change the other option")
