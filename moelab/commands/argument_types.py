"""Types of arguments: each turns a text into a value; its error says what is expected."""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from ..checkpoint import shorten


def _number(kind, what, least, most=10**9):
    """Make a type of numbers from ``least`` to ``most``; ``kind`` turns a text into a number."""

    def number(text):
        try:
            value = kind(text)
        except (ValueError, KeyError):
            value = math.nan
        if not least <= value <= most:  # true for nan as well
            raise argparse.ArgumentTypeError(
                f"expected {what} from {least} to {most}, got {shorten(repr(text), 60)}"
            )
        return value

    return number


def _without_unit(text):
    return float(re.sub("(?i)gb?(/s)?$", "", text))


def _whole_bytes(text):
    digits, unit = re.fullmatch(r"([\d.]*)(.*)", text, re.DOTALL).groups()
    value = Fraction(digits) * UNITS[unit.strip().upper()]
    return int(value) if value.denominator == 1 else math.nan


UNITS = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}  # the units of mlx-lm's server
at_least = partial(_number, int, "a whole number")
between = partial(_number, float, "a number")
gigabytes = partial(_number, _without_unit, "a number of GB", most=10**6)  # or GB/s
nbytes = partial(_number, _whole_bytes, "bytes, also as in 500MB or 2GB,")
positive, zero_or_more = at_least(1), at_least(0)


def json_object(text: str) -> dict:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected an object in JSON, got {text!r}")
    return value


def yes_or_no(text: str) -> bool:
    """Parse T, True, F or False, the values of mlx-lm's ``--verbose``."""
    if text.lower() not in ("t", "true", "f", "false"):
        raise argparse.ArgumentTypeError(f"expected T or F, got {text!r}")
    return text.lower().startswith("t")


def or_word(word: str, value: Any, item: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a type that turns ``word`` into ``value``; the type ``item`` reads any other text."""

    def either(text):
        try:
            return value if text == word else item(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or {word}") from None

    return either


or_auto = partial(or_word, "auto", "auto")


def prompt_text(text: str) -> str:
    """Return a text, or the text on standard input for ``-``; refuse an empty text."""
    where = ""
    try:
        if text == "-":
            if "MLX_RANK" in os.environ:
                raise argparse.ArgumentTypeError(
                    "expected a text: mlx.launch does not pass on the end of standard input"
                )
            where = " on standard input"
            text = sys.stdin.buffer.read().decode() if sys.stdin else ""
        text.encode()
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(not_utf8(error, where)) from None
    if not text:
        raise argparse.ArgumentTypeError(f"expected some text{where}, got none")
    return text


def not_utf8(error: UnicodeError, where: str) -> str:
    """Make an error message that says where a text is not UTF-8, and what to do."""
    return (
        f"expected UTF-8 text{where}, got {error.reason} at position {error.start}: "
        "convert it first, for example with iconv"
    )


def not_empty(text: str) -> str:
    """Return a name; refuse an empty name, which would mean the current folder as a path."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got nothing")
    return text
