"""A model folder's plain files, and the errors of damaged ones."""

import json
import stat
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint's file is missing or damaged, or the model cannot be streamed."""


def shorten(text: object, most: int = 300) -> str:
    """Put a text on one line and leave out the middle of a long one.

    Args:
        text (object): Its ``str`` is taken.
        most (int): Characters that a text may have. Of a longer one half as many are kept at
            either end.
    """
    text = " ".join(str(text).split())
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


def read_json(file: Path) -> dict:
    """Read the object in a JSON file.

    Args:
        file (Path): The file.

    Returns:
        dict: The object.

    Raises:
        CheckpointError: If the file is not JSON, or is not an object.
    """
    regular_file(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, MemoryError) as e:
        raise CheckpointError(f"{file}: not JSON ({describe(e)}). Download it again.") from e
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file}: expected a JSON object, got {shorten(content, 60)}. Download it again."
        )
    return content
