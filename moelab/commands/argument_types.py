"""Types of arguments: each gives a text's value, or an error that says what was expected."""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

from mlx_lm import utils as mlx_lm_utils

from ..checkpoint import shorten
from ..configs import one_of

MOST = 10**9  # the largest number of an option without a bound of its own


def _number(kind, what, least, most):
    def number(text):
        try:
            value = kind(text)
        except (ValueError, KeyError, ArithmeticError):
            value = math.nan
        if not least <= value <= most:  # true for nan as well
            raise argparse.ArgumentTypeError(
                f"expected {what} from {least} to {most}, got {shorten(repr(text), 60)}"
            )
        return value

    return number


def at_least(least: int, most: int = MOST) -> Callable[[str], int]:
    """A type of whole numbers from ``least`` to ``most``, both included."""
    return _number(int, "a whole number", least, most)


def between(least: float, most: float = MOST) -> Callable[[str], float]:
    """A type of numbers from ``least`` to ``most``, both included."""
    return _number(float, "a number", least, most)


def gigabytes(least: float) -> Callable[[str], float]:
    """A type of GB or GB/s, written with the unit or without."""
    return _number(lambda s: float(re.sub("(?i)gb?(/s)?$", "", s)), "a number of GB", least, 10**6)


positive, zero_or_more = at_least(1), at_least(0)


def nbytes(least: int = 0, most: int = 2**63 - 1) -> Callable[[str], int]:
    """A type of whole bytes, written as a number or with a unit (``2GB``)."""
    return _number(mlx_lm_utils._parse_size, "bytes, also as in 500MB or 2GB,", least, most)


def json_object(text: str) -> dict:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected an object in JSON, got {text!r}")
    return value


def or_word(word: str, value: Any, item: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type that gives ``value`` for ``word`` and what ``item`` returns for any other text."""

    def either(text):
        try:
            return value if text == word else item(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or {word}") from None

    return either


def or_auto(item: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type that takes ``auto`` and any text that ``item`` takes."""
    return or_word("auto", "auto", item)


def prompt_text(text: str) -> str:
    """Take a text that is not empty; ``-`` reads it from standard input."""
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
        raise argparse.ArgumentTypeError(not_utf8(error, where)) from None
    if not text:
        raise argparse.ArgumentTypeError(f"expected some text{where}, got none")
    return text


def name_of(names: Collection[str], also: str = "") -> Callable[[str], str]:
    """A type that takes one of these names, as ``one_of`` knows it."""

    def name(text):
        try:
            return one_of(names, text, also)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return name


def not_utf8(error: UnicodeError, where: str) -> str:
    """Say where a text is no UTF-8, and what to do."""
    return (
        f"expected UTF-8 text{where}, got {error.reason} at position {error.start}: "
        "convert it first, for example with iconv"
    )


def not_empty(text: str) -> str:
    """Take a name that is not empty: an empty path would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got nothing")
    return text
