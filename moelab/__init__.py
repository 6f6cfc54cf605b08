"""How fast can a Mixture-of-Experts model decode with its experts on the SSD, and why?

One set of letters everywhere: B batch, T tokens, D hidden size, F expert hidden size,
E experts, K experts per token (top-k), S slots per layer, L layers. Bytes are ``nbytes``,
seconds end in ``_s``.
"""

from pathlib import Path

from . import interrupt, moved
from .checkpoint import CheckpointError
from .speculation.drafts import ModelDraft
from .speculation.generate import speculative_generate
from .streaming.config import StreamConfig
from .streaming.footprint import Footprint, footprint
from .streaming.model import close, load
from .streaming.reader import ReadError
from .streaming.record import record
from .streaming.session import Stats, stats
from .streaming.trace import Trace, TraceError

interrupt.restore()
moved.stop_if_moved()

__version__ = "0.1.0"

DATA = Path(__file__).resolve().parent.parent / "data"

__all__ = [
    "DATA",
    "CheckpointError",
    "Footprint",
    "ModelDraft",
    "ReadError",
    "Stats",
    "StreamConfig",
    "Trace",
    "TraceError",
    "close",
    "footprint",
    "load",
    "record",
    "speculative_generate",
    "stats",
]
