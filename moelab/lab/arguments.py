"""Options and types of arguments that only commands that measure have."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from ..commands.stream_options import check_stream_options, option_type, stream_config
from ..streaming.config import OPTIONS, StreamConfig

MEASURED_SLOTS = 16  # slots="auto" would depend on the machine


def several(item: Callable[[str], Any]) -> Callable[[str], tuple]:
    """A type of different items, divided by commas."""

    def items(text):
        values = [item(part.strip()) for part in text.split(",")]
        for value in values:
            if values.count(value) > 1:
                raise argparse.ArgumentTypeError(f"expected each item once, got {value} again")
        return tuple(values)

    return items


def modes_given(args: argparse.Namespace) -> dict[str, StreamConfig]:
    """The options' configuration of each mode, by its text.

    An option that has no effect in any of the modes ends the command.
    """
    configs = parse_modes(args.modes, stream_config(args))
    check_stream_options(args, configs)
    return configs


def parse_modes(text: str, base: StreamConfig | None = None) -> dict[str, StreamConfig]:
    """Parse ``"resident,fused,fused/readers=1"``: each mode's text to ``base`` with its fields.

    Without ``base``, each has ``MEASURED_SLOTS``.
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
        configs[name] = config
    return configs


def _parse_fields(name, settings):
    """Parse the fields of ``StreamConfig`` that follow a mode's slashes."""
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
        if OPTIONS[key].bounds:
            try:
                value = option_type(OPTIONS[key])(value)
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{where}: {error}") from None
        elif isinstance(OPTIONS[key].default, bool):
            value = {"True": True, "False": False}.get(value, value)
        changes[key] = value
    return changes
