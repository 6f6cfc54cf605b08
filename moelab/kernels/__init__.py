"""Kernels for MLX's CPU backend. They replace MLX's own and run at the speed of memory.

MLX unpacks every weight of a quantized matrix anew for every input row: 0.6 GB/s of packed weights
on one core of an AMD EPYC (MLX 0.32.4). mlx-lm computes a recurrent layer token by token. ``code``
builds our kernels, ``team`` runs them on all cores, and ``use(model)`` puts them into a model.
"""

# ruff: noqa: F401 (for other modules)

from . import gated_delta
from .blocks import GatedDelta, Recurred
from .code import to_mlx
from .experts import ExpertsInModule, FastExperts, call_for
from .layers import blocks_of, use
from .modules import available, check, describe, fits, used, with_mixin
from .quantized import Rows
