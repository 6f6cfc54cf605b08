"""A model folder: where each tensor lies in safetensors files, and mlx-lm's model of the folder.

This package reads and checks headers, but reads no tensors. ``python -m moelab repack`` writes a
second layout (``packed``), in which the experts of a layer have a file of their own.
"""

# ruff: noqa: F401 (for other modules)

from .checkpoint import FORKED, Checkpoint, mlx_lm_model, model_classes, try_out
from .files import (
    CheckpointError,
    check_writable,
    describe,
    new_folder,
    read_json,
    readable,
    regular_file,
    sample,
    shorten,
    temporary_folder,
)
from .headers import GATE_UP, MAX_DIMENSION, ExpertTensor, Tensor, packing_order, read_header
from .vlm import leaves
