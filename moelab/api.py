"""The public names of ``moelab``, from the rooms that they live in."""

# ruff: noqa: F401 (``__init__`` hands them on)

from .checkpoint import CheckpointError
from .speculation.drafts import ModelDraft
from .speculation.generate import speculative_generate
from .streaming.config import StreamConfig
from .streaming.model import close, load
from .streaming.plan import Footprint, Plan, footprint, plan
from .streaming.reading.file import ReadError
from .streaming.record import record
from .streaming.session import Stats, stats
from .streaming.trace import Trace, TraceError
