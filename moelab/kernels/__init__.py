"""Kernels for the CPU backend that run at the speed of memory, in place of MLX's.

MLX unpacks every weight of a quantized matrix for every row, at 0.6 GB/s of packed weights on one
core of an AMD EPYC (MLX 0.32.4), and mlx-lm loops over tokens where a layer is recurrent. ``code``
builds the kernels, ``team`` runs them on all cores, and ``use(model)`` puts them into a model.
"""

# ruff: noqa: F401 (for other modules)

from . import gated_delta
from .blocks import GatedDelta, Recurred
from .code import to_mlx
from .experts import ExpertsInModule, FastExperts, call_for
from .layers import blocks_of, use
from .modules import available, check, describe, fits, used, with_mixin
from .quantized import Rows
