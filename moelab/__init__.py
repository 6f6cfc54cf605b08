"""How fast can a Mixture-of-Experts model decode with its experts on the SSD, and why?

Each letter means the same everywhere: B batch, T tokens, D hidden size, F hidden size of an
expert, E experts, K experts per token (top-k), S slots per layer, L layers. Names of sizes in
bytes end in ``nbytes``; names of times in seconds end in ``_s``.

    checkpoint/     a model's files: headers, formats, errors about damaged files
    streaming/      ``load``: experts on disk, slots in memory, the plan of memory
    kernels/        kernels for CPUs, built with llvmlite; where it is missing, MLX computes
    speculation/    drafts, their verification, the rollback of caches
    commands/       the commands of ``python -m moelab``, and the server
    replay/         what recorded routing would cost with other slots and policies
    lab/            measurements, records and charts, for the notebooks

These files say how to add something: a family of models (streaming/build.py), an eviction policy
(streaming/residency/table.py), a source of experts (streaming/reading/__init__.py), a dialect of
the server (commands/server/__init__.py).
"""

import _signal
import sys

# ``python -m moelab`` begins here: Ctrl-C prints no traceback until ``__main__`` handles it.
if (
    sys.argv[:1] == ["-m"]
    and "moelab" in sys.orig_argv
    and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
):
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from . import interrupts, open_files  # noqa: F401 (before mlx-lm is imported anywhere)

# On a CPU MLX compiles kernels in TMPDIR/mlx, which belongs to the first user who ran MLX. Another
# user's MLX cannot write there, and would run the kernels that the first user left there.
with suppress(OSError):
    if Path(os.environ.get("TMPDIR") or "/tmp", "mlx").stat().st_uid != os.getuid():
        _own = Path.home() / ".cache" / "moelab" / "tmp"
        _own.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["TMPDIR"] = str(_own)

__version__ = "0.2.0"
# Each record names the engine's version. Raise the version with each change of the engine that
# alters what is read or computed for a decoded token, or when.
ENGINE = 2

DATA = Path(__file__).resolve().parent.parent / "data"

_PUBLIC = {  # public names, grouped by the module that defines them
    "checkpoint": "CheckpointError",
    "speculation.dflash": "DFlashDraft",
    "speculation.drafts": "LookupDraft ModelDraft",
    "speculation.generate": "speculative_generate",
    "speculation.mtp": "MTPDraft",
    "speculation.rollback": "Rollback",
    "streaming.config": "StreamConfig",
    "streaming.facts": "ModelFacts",
    "streaming.model": "close load",
    "streaming.plan": "Plan footprint plan",
    "streaming.reading.file": "ReadError",
    "streaming.record": "record",
    "streaming.session": "Stats stats",
    "streaming.trace": "Trace TraceError",
}
_HOMES = {name: home for home, names in _PUBLIC.items() for name in names.split()}
__all__ = ["DATA", *_HOMES]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str):
    """Import a public name at its first use: the import takes a second, mostly for MLX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with interrupts.held():  # an interrupted import of numpy or MLX cannot be repeated
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
