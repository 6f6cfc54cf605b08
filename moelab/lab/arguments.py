"""Options and argument types that only the measuring commands have."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..commands.arguments import option_type
from ..streaming.config import OPTIONS, SLOT_MODES, StreamConfig
from ..streaming.residency.table import EVICTION

MEASURED_SLOTS = 16  # the slots if none are given; slots="auto" would depend on the machine


@dataclass(frozen=True)
class Evicting(StreamConfig):
    """A configuration whose slots evict by ``policy``, not by the engine's own policy."""

    policy: str = "lrfu"

    def __post_init__(self):
        super().__post_init__()
        if self.policy not in EVICTION:
            known = ", ".join(EVICTION)
            raise ValueError(f"policy: expected one of {known}, got {self.policy!r}.")

    def unused(self) -> set[str]:
        return super().unused() | (set() if self.mode in SLOT_MODES else {"policy"})


def several(item: Callable[[str], Any]) -> Callable[[str], tuple]:
    """Make an argument type for distinct items, separated by commas."""

    def items(text):
        values = [item(part.strip()) for part in text.split(",")]
        for value in values:
            if values.count(value) > 1:
                raise argparse.ArgumentTypeError(f"expected each item once, got {value} again")
        return tuple(values)

    return items


def parse_modes(text: str, base: StreamConfig | None = None) -> dict[str, StreamConfig]:
    """Parse ``"resident,fused/readers=1"``; map each name to ``base`` with its mode and fields."""
    base, configs = base or StreamConfig(slots=MEASURED_SLOTS), {}
    for name in (part.strip() for part in text.split(",")):
        if name in configs:
            raise ValueError(f"modes: expected each mode once, {name!r} is there twice in {text!r}")
        mode, *settings = name.split("/")
        if not mode:
            raise ValueError(
                f"modes: expected names separated by commas, as in resident,fused; got {text!r}"
            )
        changes = _parse_fields(name, settings)
        given = vars(base) | {"mode": mode} | changes
        config = (Evicting if "policy" in changes else type(base))(**given)
        for key in config.unused().intersection(changes):
            raise ValueError(f"modes: {key} in {name!r} has no effect: leave it out")
        configs[name] = config
    return configs


def _parse_fields(name, settings):
    """Parse the fields of ``StreamConfig`` that follow a mode's slashes."""
    known = sorted({"policy", *OPTIONS} - {"mode"})
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
        option = OPTIONS.get(key)
        if option and option.bounds:
            try:
                value = option_type(option)(value)
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{where}: {error}") from None
        elif option and isinstance(option.default, bool):
            value = {"True": True, "False": False}.get(value, value)
        changes[key] = value
    return changes
