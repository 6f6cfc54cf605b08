"""Options for the fields of ``StreamConfig``."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from ..streaming.config import ENVIRONMENT, OPTIONS, StreamConfig
from ..streaming.session import session_of
from .argument_types import at_least, nbytes, or_auto
from .arguments import add_refused, flag

STREAM_OPTIONS = {name: option for name, option in OPTIONS.items() if option.command}


def add_stream_options(
    parser: argparse.ArgumentParser, slots: int | str = "auto", sampling: bool = False
) -> None:
    """Add the options of ``StreamConfig``'s fields; the default of each option is None."""
    parser.set_defaults(default_slots=slots)
    group = parser.add_argument_group("how experts are streamed")
    if sampling:
        mode, modes = OPTIONS["mode"].default, OPTIONS["mode"].choices
        what = f"{', '.join(modes)} (default: %(default)s)"
        group.add_argument("--mode", choices=modes, default=mode, metavar="MODE", help=what)
        why = "it has two meanings here; write --sampling-top-k for likely tokens, as in mlx-lm, "
        why += "or --experts-top-k for the experts per token"
        add_refused(parser, why, "--top-k")
    for name, option in STREAM_OPTIONS.items():
        if option.for_auto and slots != "auto":
            continue
        spelled = "--experts-top-k" if sampling and name == "top_k" else None
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
    number = (nbytes if option.metavar == "BYTES" else at_least)(*option.bounds)
    return or_auto(number) if option.default == "auto" else number


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
