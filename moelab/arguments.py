"""What the commands of ``python -m moelab`` share: types of arguments, options of ``StreamConfig``.

A module with a command has ``add_arguments(parser)`` and ``run(args) -> int | None``, the exit
status. ``args.error(text)`` ends it as a wrong command line does.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from .streaming.config import OPTIONS, StreamConfig

LEAST_KV_SIZE = 5  # tokens: of a limited cache the first 4 stay
MEASURED_SLOTS = 16  # of commands that measure, where slots="auto" would change with the machine
STREAM_OPTIONS = {name: option for name, option in OPTIONS.items() if option.help}


# Types of arguments


def at_least(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Whole numbers from ``least`` on, and to ``most`` if that is given."""

    def number(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            end = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number {end}, got {text!r}")
        return value

    return number


positive, zero_or_more = at_least(1), at_least(0)


def between(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Numbers from ``least`` to ``most``, neither nan nor infinite."""

    def number(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            end = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
            raise argparse.ArgumentTypeError(f"expected a number {end}, got {text!r}")
        return value

    return number


def json_object(text: str) -> dict:
    """An object in JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected an object in JSON, got {text!r}")
    return value


def or_word(word: str, value: Any, item: Callable[[str], Any]) -> Callable[[str], Any]:
    """``value`` for one word; for anything else, what ``item`` makes of it."""

    def either(text):
        try:
            return value if text == word else item(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or {word}") from None

    return either


def or_auto(item: Callable[[str], Any]) -> Callable[[str], Any]:
    """``auto``, or what ``item`` takes."""
    return or_word("auto", "auto", item)


def or_none(item: Callable[[str], Any]) -> Callable[[str], Any]:
    """``none``, which gives None, or what ``item`` takes."""
    return or_word("none", None, item)


def several(item: Callable[[str], Any]) -> Callable[[str], tuple]:
    """Different items, divided by commas."""

    def items(text):
        values = [item(part.strip()) for part in text.split(",")]
        for value in values:
            if values.count(value) > 1:
                raise argparse.ArgumentTypeError(f"expected each item once, got {value} again")
        return tuple(values)

    return items


def prompt_text(text: str) -> str:
    """A text that is not empty; ``-`` reads it from standard input."""
    where = ""
    try:
        if text == "-":
            if "MLX_RANK" in os.environ:
                raise argparse.ArgumentTypeError(
                    "expected the text itself: mlx.launch does not pass on where standard input "
                    "ends"
                )
            where = " on standard input"
            text = sys.stdin.buffer.read().decode() if sys.stdin else ""
        text.encode()
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(
            f"expected UTF-8 text{where}, got {error.reason} at position {error.start}: "
            "convert it first, for example with iconv"
        ) from None
    if not text:
        raise argparse.ArgumentTypeError(f"expected some text{where}, got none")
    return text


def not_empty(text: str) -> str:
    """A name that is not empty, since an empty path is the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got nothing")
    return text


# Options that several commands have


def flag(name: str) -> str:
    """The option of a name: ``top_k`` -> ``--top-k``."""
    return "--" + name.replace("_", "-")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional argument ``model``."""
    parser.add_argument(
        "model",
        type=not_empty,
        metavar="MODEL",
        help="folder or Hub repository, as for mlx_lm.load",
    )


def add_number(
    parser: argparse.ArgumentParser,
    name: str,
    default: int,
    what: str,
    kind: Callable[[str], int] = positive,
    short: str | None = None,
) -> None:
    """An option that takes a whole number.

    Args:
        parser (argparse.ArgumentParser): The command's.
        name (str): The option, with its dashes.
        default (int): Its value if it is not given, which its help says.
        what (str): Its help.
        kind (Callable): ``positive`` or ``zero_or_more``.
        short (str or None): Its short name.
    """
    names = (name,) if short is None else (short, name)
    parser.add_argument(
        *names, type=kind, metavar="N", default=default, help=f"{what} (default: %(default)s)"
    )


def add_json(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """``--json``; whether the file can be written is checked before the command runs."""
    parser.add_argument(
        "--json",
        type=not_empty,
        metavar="FILE",
        required=required,
        help="keep raw samples, machine and settings there",
    )


def add_prompts(parser: argparse.ArgumentParser, default: str = "the built-in ones") -> None:
    """``--prompt``, which may be given several times: ``prompt`` is a list, or None."""
    parser.add_argument(
        "--prompt",
        type=prompt_text,
        action="append",
        metavar="TEXT",
        help=f"again for more; - reads standard input (default: {default})",
    )


def add_mode(parser: argparse.ArgumentParser) -> None:
    """``--mode``, one of the names of ``StreamConfig.mode``."""
    modes = OPTIONS["mode"].choices
    parser.add_argument(
        "--mode",
        choices=modes,
        default=OPTIONS["mode"].default,
        metavar="MODE",
        help=f"{', '.join(modes)} (default: %(default)s)",
    )


def add_modes(parser: argparse.ArgumentParser, default: str) -> None:
    """``--modes``, as ``parse_modes`` takes it."""
    parser.add_argument(
        "--modes",
        default=default,
        help="divided by commas; fields of StreamConfig may follow a slash, as in "
        "resident,fused,fused/readers=1/slots=32 (default: %(default)s)",
    )


def add_stream_options(
    parser: argparse.ArgumentParser, slots: int | str = "auto", sampling: bool = False
) -> None:
    """The fields of ``StreamConfig`` that have a help; None where an option was not given.

    Args:
        parser (argparse.ArgumentParser): The command's.
        slots (int or str): The slots if ``--slots`` is not given. With ``auto`` come the options
            that it goes by; a command that measures names ``MEASURED_SLOTS``.
        sampling (bool): Whether the command has mlx-lm's options of sampling, whose ``--top-k`` is
            another: then both have names of their own, and ``--top-k`` says so.
    """
    parser.set_defaults(default_slots=slots)
    if sampling:
        parser.add_argument("--top-k", nargs="?", action=_TwoMeanings, help=argparse.SUPPRESS)
    group = parser.add_argument_group("how experts are streamed")
    for name, option in STREAM_OPTIONS.items():
        if option.for_auto and slots != "auto":
            continue
        choices = [c for c in option.choices if c not in option.only_in_python]
        default = slots if name == "slots" else option.default
        group.add_argument(
            "--experts-top-k" if sampling and name == "top_k" else flag(name),
            dest=name,
            type=_type(option),
            choices=choices or None,
            metavar=option.metavar,
            help=option.help.format(default=default),
        )


def _type(option):
    """What makes a value of the text that was given for a field of ``StreamConfig``."""
    if option.bounds:
        number = at_least(*option.bounds)
        return or_auto(number) if option.default == "auto" else number
    return str if option.choices else not_empty


class _TwoMeanings(argparse.Action):
    """Refuses ``--top-k`` where it could be taken for another option."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(
            "--top-k has two meanings here: expected --sampling-top-k (mlx-lm's --top-k: the most "
            "likely tokens that sampling keeps) or --experts-top-k (experts per token)"
        )


NO_PIPELINE = "several machines divide the experts of each layer, not the layers"


def add_refused(parser: argparse.ArgumentParser, why: str, *names: str) -> None:
    """An option of mlx-lm's command that ends this one with the reason; not in the help.

    Args:
        parser (argparse.ArgumentParser): The command's.
        why (str): What the error says.
        names (str): The option, and its short name.
    """

    class Refuse(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            parser.error(f"{option_string}: {why}, so leave it out")

    parser.add_argument(*names, nargs="*", action=Refuse, default=False, help=argparse.SUPPRESS)


def add_kv_cache(parser: argparse.ArgumentParser, *names: str) -> None:
    """Options of the key-value cache with the names and defaults of mlx-lm; not in the help.

    Args:
        parser (argparse.ArgumentParser): The command's.
        names (str): Which of them. Default: all.
    """
    for name, options in {
        "--max-kv-size": {"type": at_least(LEAST_KV_SIZE)},
        "--kv-bits": {"type": int, "choices": (2, 3, 4, 5, 6, 8)},
        "--kv-group-size": {"type": int, "choices": (32, 64, 128), "default": 64},
        "--quantized-kv-start": {"type": zero_or_more, "default": 5000},
    }.items():
        if name in (names or (name,)):
            parser.add_argument(name, help=argparse.SUPPRESS, **options)


def add_draft(parser: argparse.ArgumentParser) -> None:
    """``--draft``, which mlx-lm calls ``--draft-model``, and ``--num-draft-tokens``."""
    parser.add_argument("--draft-model", type=not_empty, help=argparse.SUPPRESS)
    parser.add_argument(
        "--draft",
        dest="draft_model",
        type=not_empty,
        metavar="DRAFT",
        help="lookup, or the folder of a model or of a DFlash draft",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=or_auto(zero_or_more),
        metavar="N",
        default="auto",
        help="drafted in a round; auto decides by what it gains (default: %(default)s)",
    )


def add_sampling(parser: argparse.ArgumentParser, names: tuple[str, ...] | None = None) -> None:
    """Options of sampling with the names and defaults of mlx-lm, but for ``--top-k``.

    Args:
        parser (argparse.ArgumentParser): The command's.
        names (tuple[str, ...]): Which of them. Default: all.
    """
    for name, kind, default, what in (
        ("--temp", between(0), 0.0, "temperature; 0: always the most likely token"),
        ("--top-p", between(0, 1), 1.0, "only the likeliest, of this probability together"),
        ("--min-p", between(0, 1), 0.0, "only tokens of this share of the likeliest one's"),
        ("--sampling-top-k", zero_or_more, 0, "only the N likeliest tokens; 0: all"),
    ):
        if names is None or name in names:
            parser.add_argument(
                name, type=kind, metavar="N", default=default, help=f"{what} (default: %(default)s)"
            )


def streaming_given(args: argparse.Namespace) -> StreamConfig:
    """``mode_given`` over SwiftLM's variables of the environment, which are named on stderr.

    Args:
        args (argparse.Namespace): Of a parser with ``add_mode`` and ``add_stream_options``.
    """
    names = [name for option in OPTIONS.values() for name in option.environment]
    found = {name: os.environ[name] for name in names if name in os.environ}
    if not found:
        return mode_given(args)
    chosen = found.keys().isdisjoint(OPTIONS["mode"].environment)
    chosen = chosen or "mode" in getattr(args, "given", ())
    config = StreamConfig.from_env(**({"mode": args.mode} if chosen else {}))
    args.mode = config.mode
    for field, option in STREAM_OPTIONS.items():
        is_set = not found.keys().isdisjoint(option.environment)
        if is_set and getattr(args, field) is None and field not in config.unused():
            setattr(args, field, getattr(config, field))
    config = mode_given(args)
    now = [f"mode {config.mode}"]
    now += [] if "slots" in config.unused() else [f"slots {config.slots}"]
    now += [f"top-k {config.top_k}"] if config.top_k else []
    print(
        f"moelab: the environment has {', '.join(f'{k}={v}' for k, v in found.items())}; with the "
        f"command's own options this gives {', '.join(now)}",
        file=sys.stderr,
    )
    return config


def mode_given(args: argparse.Namespace) -> StreamConfig:
    """How to stream by the options that were given; one of no use in the mode ends the command.

    Args:
        args (argparse.Namespace): Of a parser with ``add_mode`` and ``add_stream_options``.
    """
    config = _stream_config(args, mode=args.mode)
    _check_stream_options(args, {args.mode: config})
    return config


def modes_given(args: argparse.Namespace) -> tuple[StreamConfig, dict[str, StreamConfig]]:
    """How to stream in each mode that was given; an option of no use in any ends the command.

    Args:
        args (argparse.Namespace): Of a parser with ``add_modes`` and ``add_stream_options``.

    Returns:
        tuple[StreamConfig, dict[str, StreamConfig]]: What the modes have in common, and each mode.
    """
    base = _stream_config(args)
    configs = parse_modes(args.modes, base)
    _check_stream_options(args, configs)
    return base, configs


def _stream_config(args, **fields):
    given = {n: getattr(args, n, None) for n in STREAM_OPTIONS}
    given = {n: value for n, value in given.items() if value is not None}
    defaults = {"slots": args.default_slots, "lazy_logits": True}
    return StreamConfig(**defaults | given, **fields)


def _check_stream_options(args, configs):
    """End the command if an option that was given means nothing to any of the configs."""
    for name, option in STREAM_OPTIONS.items():
        given = getattr(args, name, None)
        users = [c for c in configs.values() if name not in c.unused()]
        if given is None or any(getattr(c, name) == given for c in users):
            continue
        why = f"has no effect in mode {', '.join(configs)}"
        if option.for_auto and any("slots" not in c.unused() for c in configs.values()):
            why = "has no effect without --slots auto"
        args.error(f"{flag(name)} {why}: leave it out, or change that")


def parse_modes(text: str, base: StreamConfig | None = None) -> dict[str, StreamConfig]:
    """Modes as text: ``"resident,fused,fused/readers=1"``; a field may follow each slash.

    Args:
        text (str): Modes, divided by commas.
        base (StreamConfig): Every other field. Default: ``StreamConfig(slots=16)``.

    Returns:
        dict[str, StreamConfig]: By the text of each mode.

    Raises:
        ValueError: If a mode is none, is there twice, or has a field that has no effect in it.
    """
    base, configs = base or StreamConfig(slots=MEASURED_SLOTS), {}
    for name in (part.strip() for part in text.split(",")):
        if name in configs:
            raise ValueError(f"modes: expected each mode once, {name!r} is there twice in {text!r}")
        mode, *settings = name.split("/")
        if not mode:
            raise ValueError(
                f"modes: expected names divided by commas, such as resident,fused; got {text!r}"
            )
        changes = _parse_fields(name, settings)
        config = dataclasses.replace(base, mode=mode, **changes)
        for key in config.unused().intersection(changes):
            raise ValueError(f"modes: {key} in {name!r} has no effect there: leave it out")
        if config.prefetch == "oracle":
            raise ValueError(
                f"modes: {name!r}: an oracle needs a trace (moelab.lab.experiments.prefetch); "
                "expected none or lookahead"
            )
        configs[name] = config
    return configs


def _parse_fields(name, settings):
    """The fields of ``StreamConfig`` that follow a mode's slashes."""
    known = sorted(OPTIONS.keys() - {"mode"})
    changes = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        where = f"modes: {setting!r} in {name!r}"
        if key not in known or not value:
            raise ValueError(
                f"{where}, expected FIELD=VALUE with a field of StreamConfig ({', '.join(known)})"
            )
        if key in changes:
            raise ValueError(f"modes: expected each field once, {key} is there twice in {name!r}")
        if OPTIONS[key].bounds and value != OPTIONS[key].default:
            if not value.isdecimal():
                raise ValueError(f"{where}, expected a whole number")
            value = int(value)
        changes[key] = value
    return changes
