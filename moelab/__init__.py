"""How fast can a Mixture-of-Experts model decode with its experts on the SSD, and why?

One set of letters everywhere: B batch, T tokens, D hidden size, F expert hidden size,
E experts, K experts per token (top-k), S slots per layer, L layers. Bytes are ``nbytes``,
seconds end in ``_s``.
"""

from pathlib import Path

from . import open_files  # noqa: F401 (before mlx-lm is imported anywhere)

__version__ = "0.2.0"

DATA = Path(__file__).resolve().parent.parent / "data"

__all__ = [
    "DATA",
    "CheckpointError",
    "Footprint",
    "ModelDraft",
    "Plan",
    "ReadError",
    "Stats",
    "StreamConfig",
    "Trace",
    "TraceError",
    "close",
    "footprint",
    "load",
    "plan",
    "record",
    "speculative_generate",
    "stats",
]


def __getattr__(name: str):
    """A public name, imported when it is first used: that takes a second, mostly for MLX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    return getattr(api, name)
