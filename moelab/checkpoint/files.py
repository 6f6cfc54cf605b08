"""Reads a model folder's plain files, reports damaged ones, and writes a new folder."""

import errno
import json
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tqdm import tqdm

from ..interrupts import undone

FOR_MLX = "Take a version made for MLX, or convert the original one with mlx_lm.convert."
# The number and size of the blocks that ``sample`` reads. It needs 2 ms for them from an SSD.
BLOCKS, BLOCK_NBYTES = 16, 4096


class CheckpointError(ValueError):
    """A checkpoint's file is missing or damaged, or the model cannot be streamed."""


def shorten(text: object, most: int = 300) -> str:
    """Put a text on one line without control characters, and cut the middle out of a long one."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def describe(error: BaseException) -> str:
    """Describe an exception of another library in one short line."""
    return f"{type(error).__name__}: {shorten(error)}"


@contextmanager
def readable(what: str, remedy: str = "Download it again.") -> Iterator[None]:
    """Raise a CheckpointError in place of any error that another library raises for a file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        raise CheckpointError(f"{what} {describe(e)}. {remedy}") from e


def regular_file(file: Path) -> int:
    """Return a regular file's size; refuse other files, as opening a FIFO would wait for ever."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: expected a file, got {stat.filemode(status.st_mode)}.")
    return status.st_size


def sample(fd: int) -> int:
    """Return a checksum of blocks spread over an open file, from its first byte to its last.

    A program that writes over a file can put the mtime back, so the mtime is not enough. The ctime
    changes too often: chmod, a new link or an attribute such as Finder's changes it, too.
    """
    last = max(0, os.fstat(fd).st_size - BLOCK_NBYTES)
    places = (last * i // (BLOCKS - 1) for i in range(BLOCKS))
    return zlib.crc32(b"".join(os.pread(fd, BLOCK_NBYTES, at) for at in places))


def read_json(file: Path, like: dict | None = None) -> dict:
    """Read the JSON object in a file; ``like`` has the types of some values."""
    regular_file(file)
    with readable(f"{file}: not JSON:"):
        content = json.loads(file.read_bytes().decode())
    _check_kind(content, dict, f"{file}:")
    for name, kind in (like or {}).items():
        _check_kind(content.get(name), kind, f"{file}: {name}:")
    return content


def _check_kind(value, kind, where):
    if not isinstance(value, kind):
        raise CheckpointError(f"{where} expected {kind.__name__}, got {shorten(repr(value), 60)}.")


def check_writable(path: str | Path, what: str) -> None:
    """Raise, before any work, if a file cannot be written; the file is not created."""
    path = Path(path)
    parent = next((p for p in path.absolute().parents if os.path.lexists(p)), Path("/"))
    try:
        if path.exists() and not path.is_file():
            raise OSError("it exists and is no plain file")
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{what}: cannot be written: {why}. Name another.") from error


@contextmanager
def temporary_folder(prefix: str = "", parent: str | Path | None = None) -> Iterator[Path]:
    """Yield a new folder, and remove it after the block, also if Ctrl-C interrupts the block."""
    folder = Path(parent or tempfile.gettempdir(), prefix + os.urandom(8).hex())
    with undone(partial(shutil.rmtree, folder, ignore_errors=True)):
        folder.mkdir(0o700)
        yield folder


@contextmanager
def new_folder(out: Path, nbytes: int, progress: bool) -> Iterator[tuple[Path, tqdm]]:
    """Yield a temporary folder beside ``out``, and rename it to ``out`` when all is on disk.

    An exception removes the folder; a killed process leaves it. The progress bar counts ``nbytes``.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists already: remove it or name another folder")
    parent = out.absolute().parent
    with suppress(OSError):
        parent.mkdir(parents=True, exist_ok=True)
    if not parent.is_dir():
        raise OSError(f"{out}: no folder can be made in {parent}: name another")
    free = shutil.disk_usage(parent).free
    if free < nbytes + (64 << 20):  # room for headers, configuration and tokenizer
        raise OSError(
            errno.ENOSPC,
            f"not enough disk in {parent}: {out.name} takes {nbytes / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} GB is free; choose another disk",
        )

    def nothing():
        return None if os.path.lexists(out) else f"nothing was written, there is no {out}"

    try:
        with undone(nothing), temporary_folder(f"{out.name}.", parent) as beside:
            folder = beside / out.name
            folder.mkdir()
            shown = {"desc": out.name, "unit": "B", "unit_scale": True, "leave": False}
            with tqdm(total=nbytes, disable=not progress or None, **shown) as bar:
                yield folder, bar
            for path in (*folder.iterdir(), folder):
                _to_disk(path)
            os.rename(folder, out)
        _to_disk(parent)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*filter(None, [nothing()])) from None
    except (OSError, RuntimeError) as error:  # MLX's writes raise RuntimeError
        if (words := nothing()) is None:
            raise
        raise OSError(f"{words}: {getattr(error, 'strerror', None) or error}") from error


def _to_disk(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
