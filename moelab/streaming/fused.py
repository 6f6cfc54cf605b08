"""The module that a slot bank computes with: mlx-lm's own, or one with gate and up joined."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    _gather_sort,
    _scatter_unsort,
)

from .. import kernels

SORTED_ROWS = 64  # SwitchGLU sorts (token, expert) pairs by expert if there are so many or more


class FusedSwitchGLU(nn.Module):
    """``SwitchGLU`` with gate and up in one projection ``[S, 2F, D]``: one ``gather_qmm`` less."""

    def __init__(self, gate_up_proj: nn.Module, down_proj: nn.Module, activation: nn.Module):
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        x = mx.expand_dims(x, (-2, -3))
        idx, do_sort = indices, indices.size >= SORTED_ROWS
        if do_sort:
            x, idx, inv_order = _gather_sort(x, indices)
        gate, up = mx.split(self.gate_up_proj(x, idx, sorted_indices=do_sort), 2, axis=-1)
        x = self.down_proj(self.activation(up, gate), idx, sorted_indices=do_sort)
        if do_sort:
            x = _scatter_unsort(x, inv_order, indices.shape)
        return x.squeeze(-2)


FastFusedSwitchGLU = kernels.with_mixin(kernels.ExpertsInModule, FusedSwitchGLU)

# MLX's tiled quantized matmul on CUDA (qmm_sm80) loads at least three tiles of 64 inputs, even if a
# row is shorter. So it reads past the last row of inputs and of weights.
TILES, TILE = 3, 64
PADDING_NBYTES = 256  # bytes of padding behind the weights


class PaddedLinear(QuantizedSwitchLinear):
    """A projection that pads its input after the last row, where qmm_sm80 reads (``TILES``)."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        rows = x.reshape(-1, x.shape[-1])
        x = mx.pad(rows, ((0, TILES - 1), (0, 0)))[: len(rows)].reshape(x.shape)
        return super().__call__(x, indices, sorted_indices)


def give_room(module: nn.Module) -> None:
    """Where rows are too short for MLX's CUDA kernel, pad weights and use ``PaddedLinear``."""
    for linear in module.modules() if mx.cuda.is_available() else ():
        quantized = type(linear) is QuantizedSwitchLinear
        if quantized and linear.input_dims < TILES * max(TILE, linear.group_size):
            linear.__class__, w = PaddedLinear, linear.weight
            zeros = mx.zeros(PADDING_NBYTES // w.dtype.size, w.dtype)
            linear.weight = mx.concatenate([w.flatten(), zeros])[: w.size].reshape(w.shape)


def can_fuse(experts: nn.Module) -> bool:
    """Whether gate and up of this module can share a buffer."""
    fast = isinstance(experts, kernels.FastExperts)
    if not fast and type(experts).__call__ is not SwitchGLU.__call__:
        return False

    def form(linear):
        quantization = [getattr(linear, k, None) for k in ("group_size", "bits", "mode")]
        params = {k: (p.shape, p.dtype) for k, p in linear.parameters().items()}
        return type(linear), quantization, params

    # A tensor-wide scale belongs to one projection and cannot be shared.
    alone = getattr(experts.gate_proj, "global_scale", None) is not None
    return form(experts.gate_proj) == form(experts.up_proj) and not alone
