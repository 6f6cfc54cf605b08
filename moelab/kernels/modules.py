"""mlx-lm's modules that hold matrices, with the kernels of ``quantized.py``.

A module computes when it is called: it evaluates its input, and its result is an array that is
already evaluated. What the kernels do not fit (half precision, other quantizations, a GPU) goes
MLX's way, and ``use`` counts it.
"""

import platform
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from . import code, gated_delta, quantized

# Weights of a plain matrix. Below this a call of MLX's is as fast, even with the reference BLAS
# that its Linux packages have. On macOS MLX has a fast BLAS and keeps every plain matrix.
FLOAT_WEIGHTS = 2**14


def available() -> bool:
    """Whether the kernels can be used here: on the CPU backend, with llvmlite installed."""
    return code.llvm is not None and mx.default_device() == mx.cpu


def check() -> None:
    """Raise if the kernels cannot be used here.

    Raises:
        ValueError: With what to do.
    """
    if mx.default_device() != mx.cpu:
        raise ValueError(
            "StreamConfig.kernels: 'fast' is for the CPU backend, the default device is "
            f"{mx.default_device()}. Use 'mlx'."
        )
    if code.llvm is None:
        raise ValueError(
            "StreamConfig.kernels: 'fast' needs the package llvmlite: pip install llvmlite, or "
            "use 'mlx'."
        )


def describe() -> str:
    """Which kernels there are, in a line."""
    if not available():
        return "mlx; fast ones come with the package llvmlite: pip install llvmlite"
    return f"mlx and fast ({code.widest()} numbers at once)"


def use(model: nn.Module) -> dict[str, int]:
    """Let a model's matrices and recurrent layers compute with these kernels.

    Args:
        model (nn.Module): Any model of mlx-lm. It is changed in place.

    Returns:
        dict[str, int]: How many modules with matrices compute with the kernels (``fast``) and with
        MLX's (``mlx``).
    """
    gated_delta.use(model)
    found = Counter(fast=0, mlx=0)
    for module in model.modules():
        fast = FAST.get(type(module))
        if fast is None:
            continue
        fits = _fits(module)
        if fits:
            module.__class__ = fast
        found["fast" if fits else "mlx"] += 1
    return dict(found)


def _fits(module):
    if "scales" not in module:
        weight = module["weight"]
        return (
            platform.system() != "Darwin"
            and weight.dtype == mx.float32
            and weight.shape[-2] * weight.shape[-1] >= FLOAT_WEIGHTS
            and quantized.supported(32, 1, weight.shape[-1], "float")
        )
    scales = module["scales"]
    return (
        scales.dtype == (mx.float32 if module.mode == "affine" else mx.uint8)
        and module.get("global_scale") is None
        and quantized.supported(
            module.bits, module.group_size, scales.shape[-1] * module.group_size, module.mode
        )
    )


ONE_EXPERT = np.zeros(1, np.int64)


class _Fast:
    """Mixed into a module that holds matrices."""

    @property
    def _form(self):
        return self.group_size, self.bits, self.mode

    def _matrices(self):
        arrays = [self.get(name) for name in ("weight", "scales", "biases")]
        kept = self.__dict__.get("_kept")
        if kept is None or any(a is not b for a, b in zip(arrays, kept.arrays)):
            kept = self.__dict__["_kept"] = _Kept(arrays, *self._form)
        return kept.matrices

    def __getattr__(self, key):
        value = super().__getattr__(key)
        if isinstance(value, mx.array):  # the caller may change the array in place
            self.__dict__.pop("_kept", None)
        return value

    def _takes(self, x):
        return x.dtype == mx.float32 and mx.default_device() == mx.cpu and x.size > 0

    def _multiply(self, x):
        """``x [..., D]`` with the one matrix: ``[..., N]``."""
        rows = np.asarray(x).reshape(-1, x.shape[-1])
        packed = quantized.Packed(rows, *self._form[1:])
        y = self._matrices().multiply(packed, ONE_EXPERT, np.array([0, len(rows)]))
        return mx.array(y.reshape(*x.shape[:-1], y.shape[-1]))


class _Plain(_Fast):
    """Of a matrix that is not quantized."""

    _form = 1, 32, "float"


class _Kept:
    """The matrices of a module, and its arrays then: other arrays need new matrices."""

    def __init__(self, arrays, group_size, bits, mode):
        self.arrays = tuple(arrays)
        views = [None if a is None else np.asarray(a) for a in arrays]
        if mode == "float" and not views[0].flags.c_contiguous and views[0].ndim == 2:
            views[0] = np.ascontiguousarray(views[0])  # such as a transposed one
        views = [v if v is None or v.ndim == 3 else v[None] for v in views]
        self.matrices = quantized.Matrices(*views, group_size, bits, mode)


class _Linear(_Fast):
    def __call__(self, x: mx.array) -> mx.array:
        if not self._takes(x):
            return super().__call__(x)
        y = self._multiply(x)
        return y + self["bias"] if "bias" in self else y


class FastLinear(_Linear, nn.QuantizedLinear):
    """``nn.QuantizedLinear``."""


class PlainLinear(_Linear, _Plain, nn.Linear):
    """``nn.Linear``."""


class _Embedding(_Fast):
    def as_linear(self, x: mx.array) -> mx.array:
        return self._multiply(x) if self._takes(x) else super().as_linear(x)


class FastEmbedding(_Embedding, nn.QuantizedEmbedding):
    """``nn.QuantizedEmbedding``, as the matrix of the logits."""


class PlainEmbedding(_Embedding, _Plain, nn.Embedding):
    """``nn.Embedding``, as the matrix of the logits."""


class _SwitchLinear(_Fast):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if not self._takes(x) or x.shape[-2] != 1:
            return super().__call__(x, indices, sorted_indices)
        mx.eval(x, indices)
        flat, chosen = np.asarray(x).reshape(-1, x.shape[-1]), np.asarray(indices)
        # Which row of x each (token, expert) pair takes, in the order of the experts.
        row, chosen = np.broadcast_arrays(np.arange(len(flat)).reshape(x.shape[:-2]), chosen)
        row = row.ravel()
        order = np.argsort(chosen, axis=None, kind="stable")
        experts, first = np.unique(chosen.ravel()[order], return_index=True)
        rows = flat[row[order]]
        y = self._matrices().multiply(
            quantized.Packed(rows, *self._form[1:]),
            experts.astype(np.int64),
            np.append(first, len(rows)),
        )
        out = np.empty_like(y)
        out[order] = y
        out = mx.array(out.reshape(*chosen.shape, 1, out.shape[-1]))
        if "bias" in self:
            out = out + mx.expand_dims(self["bias"][indices], -2)
        return out


class FastSwitchLinear(_SwitchLinear, QuantizedSwitchLinear):
    """``QuantizedSwitchLinear``: a matrix for each expert."""


class PlainSwitchLinear(_SwitchLinear, _Plain, SwitchLinear):
    """``SwitchLinear``."""


FAST = {
    nn.QuantizedLinear: FastLinear,
    nn.QuantizedEmbedding: FastEmbedding,
    QuantizedSwitchLinear: FastSwitchLinear,
    nn.Linear: PlainLinear,
    nn.Embedding: PlainEmbedding,
    SwitchLinear: PlainSwitchLinear,
}
