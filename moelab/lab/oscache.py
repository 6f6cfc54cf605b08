"""The operating system's page cache: drop a file's pages, and count bytes read from the disk."""

import os
from pathlib import Path

from ..system import HERE


def drop_pages(path: str | Path) -> str:
    """Drop the pages of a file, or of a folder's tensor files, as far as possible without root.

    Returns how this was done, for the record of a cold measurement. On Linux, pages that are not
    yet written to the disk stay.
    """
    how = "no file"
    for file in Path(path).glob("*.safetensors") if os.path.isdir(path) else [path]:
        with open(file, "rb") as f:
            how = HERE.drop_pages(f.fileno())
    return how


def disk_read_nbytes() -> int | None:
    """Return the bytes read from the disk for this process; None if the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
