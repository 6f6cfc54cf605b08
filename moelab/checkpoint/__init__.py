"""A model folder: where each tensor lies in its files, and mlx-lm's model of it.

A checkpoint is a folder of safetensors files. Their headers are read and checked here, the
tensors are not. ``python -m moelab repack`` writes a second layout (``packed``), in which the
experts of a layer have a file of their own.
"""

from .builder import FORKED, check_fork, mlx_lm_model, try_out
from .checkpoint import Checkpoint, check_config
from .files import CheckpointError, describe, new_folder, read_json, regular_file, shorten
from .headers import (
    DTYPES,
    GATE_UP,
    MAX_DIMENSION,
    PAGE_NBYTES,
    ExpertTensor,
    Tensor,
    merge_headers,
    packed_header,
    packing_order,
    read_header,
)

__all__ = [
    "DTYPES",
    "FORKED",
    "GATE_UP",
    "MAX_DIMENSION",
    "PAGE_NBYTES",
    "Checkpoint",
    "CheckpointError",
    "ExpertTensor",
    "Tensor",
    "check_config",
    "check_fork",
    "describe",
    "merge_headers",
    "mlx_lm_model",
    "new_folder",
    "packed_header",
    "packing_order",
    "read_header",
    "read_json",
    "regular_file",
    "shorten",
    "try_out",
]
