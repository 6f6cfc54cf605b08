"""Kernels for the CPU backend that run at the speed of memory, in place of MLX's.

MLX unpacks every weight of a quantized matrix for every row, at 0.6 GB/s of packed weights on one
core of an AMD EPYC (MLX 0.32.4), and mlx-lm loops over tokens where a layer is recurrent.
``quantized.py``, ``attention.py`` and ``gated_delta.py`` write kernels in LLVM's language,
``code.py`` builds them for the processor at hand, and ``modules.py`` puts them into mlx-lm's
modules.
"""

from . import gated_delta
from .modules import FAST, FastExperts, available, check, describe, fits, use, used

__all__ = [
    "FAST",
    "FastExperts",
    "available",
    "check",
    "describe",
    "fits",
    "gated_delta",
    "use",
    "used",
]
