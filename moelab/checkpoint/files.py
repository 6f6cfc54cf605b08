"""A model folder's plain files, and the errors of damaged ones."""

import json
import re
import stat
from pathlib import Path

# What a terminal acts on or cannot show: control characters, directions of writing, surrogates.
CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]+"
)


class CheckpointError(ValueError):
    """A checkpoint's file is missing or damaged, or the model cannot be streamed."""


def shorten(text: object, most: int = 300) -> str:
    """Put a text on one line, without control characters and the middle of a long one.

    Args:
        text (object): Its ``str`` is taken.
        most (int): Characters that a text may have. Of a longer one half as many are kept at
            either end.
    """
    text = " ".join(CONTROL.sub(" ", str(text)).split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def describe(error: BaseException) -> str:
    """Describe an exception of another library in one short line.

    Args:
        error (BaseException): The exception.
    """
    return f"{type(error).__name__}: {shorten(error)}"


def regular_file(file: Path) -> int:
    """The size of a regular file. Opening a FIFO in its place would wait for ever.

    Args:
        file (Path): The file.

    Returns:
        int: Bytes.

    Raises:
        CheckpointError: If it is a folder, a FIFO, a socket or a device.
        OSError: If it does not exist.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: expected a file, got {stat.filemode(status.st_mode)}.")
    return status.st_size


def read_json(file: Path, like: dict | None = None, text: bytes | None = None) -> dict:
    """Read the object in a JSON file.

    Args:
        file (Path): The file.
        like (dict or None): Parts that it must have, each with its type. Default: none.
        text (bytes or None): What was read of it already.

    Returns:
        dict: The object.

    Raises:
        CheckpointError: If the file is not JSON, is not an object, or lacks a part.
    """
    regular_file(file)
    try:
        content = json.loads((file.read_bytes() if text is None else text).decode())
    except (ValueError, RecursionError, MemoryError) as e:
        raise CheckpointError(f"{file}: not JSON ({describe(e)}). Download it again.") from e
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file}: expected a JSON object, got {shorten(content, 60)}. Download it again."
        )
    _check_parts(content, like or {}, f"{file}: ")
    return content


def _check_parts(value, like, where):
    """Refuse a value that lacks parts of ``like``, or has numbers that no calculation takes."""
    kind = like if isinstance(like, (type, tuple)) else type(like)
    number = isinstance(value, (int, float))
    if not isinstance(value, kind) or (number and not abs(value) < 2**63):  # NaN, too
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise CheckpointError(f"{where} expected {kinds}, got {shorten(repr(value), 60)}.")
    if isinstance(like, dict):
        for name, part in like.items():
            _check_parts(value.get(name), part, f"{where}{name}:")
    elif isinstance(like, list):
        for item in value:
            _check_parts(item, like[0], where)
