"""Kernels that this user has built before, as object code in ``~/.cache/moelab/kernels``.

Reading a model's kernels takes 10 ms, building them about a second. A file's name is a hash of what
its code depends on. Nothing is read from another user's file, or stored in another user's folder.
"""

import hashlib
import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

import llvmlite
from llvmlite import binding as llvm

from ..interrupts import written

DIGEST_NBYTES = hashlib.sha256().digest_size


def load(name: str) -> bytes | None:
    """The object code of a kernel; None if its file is missing, damaged or another user's."""
    try:
        with open(_file(name), "rb", opener=_at_once) as file:
            found = os.fstat(file.fileno())
            _check(file.name, found)
            stored = file.read() if stat.S_ISREG(found.st_mode) else b""
    except (OSError, RuntimeError):  # the home, the folder or the file is missing
        return None
    digest, code = stored[:DIGEST_NBYTES], stored[DIGEST_NBYTES:]
    return code if digest == hashlib.sha256(code).digest() else None


def save(name: str, code: bytes) -> None:
    """Store object code for later processes. Do nothing if that is not possible."""
    with suppress(OSError, RuntimeError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with written(_file(name)) as beside:
            beside.touch(0o600)
            beside.write_bytes(hashlib.sha256(code).digest() + code)


def folder() -> Path:
    """The files' folder. A relative ``XDG_CACHE_HOME`` is ignored, as XDG's standard says."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    caches = caches if caches.is_absolute() else Path.home() / ".cache"
    return caches / "moelab" / "kernels"


def _at_once(path, flags):
    """Open a file without waiting; opening a FIFO would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check(path, found):
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path}: others may write here")


def _file(name):
    """Return the file of a kernel; PermissionError if others can write to its folder."""
    _check(folder(), folder().stat())
    return folder() / hashlib.sha256(f"{_origin()} {name}".encode()).hexdigest()


@cache
def _origin():
    """Return versions of everything that the code of a kernel depends on."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    if not sources:
        raise OSError("no sources: nothing says whether a stored kernel is still right")
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    built_by = llvmlite.__version__, llvm.llvm_version_info, llvm.get_process_triple()
    return digest, built_by, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
