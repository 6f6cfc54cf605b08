"""Types of arguments, which refuse a value that cannot be.

Each takes the text of an argument and returns its value, or raises ``ArgumentTypeError`` with what
was expected.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any


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
UNITS = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}  # as mlx-lm's server has them


def nbytes(least: int = 0, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Bytes, as a number or as in ``2GB``."""

    def number(text):
        digits, unit = re.fullmatch(r"([\d.]*)(.*)", text, re.DOTALL).groups()
        try:
            value = Fraction(digits) * UNITS[unit.strip().upper()]
        except (ValueError, KeyError):
            value = None
        if value is None or value % 1 or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected bytes from {least} to {most}, also as in 500MB or 2GB, got {text!r}"
            )
        return int(value)

    return number


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
