"""mlx-lm's modules that hold matrices, with the kernels of ``quantized.py``.

A module with matrices computes as soon as it is called, and evaluates its input. MLX adds biases.
Where the kernels do not fit (half precision, other quantizations, a GPU), MLX computes the module.
"""

from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.activations import swiglu
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..hooks import replaced, with_globals
from ..system import HERE, Mac
from . import code, quantized, rowwise
from .code import to_mlx

# MLX computes a plain matrix with fewer weights than this: MLX is as fast there, even with the
# reference BLAS of Linux packages. On macOS MLX has a fast BLAS and computes all plain matrices.
FLOAT_WEIGHTS = 2**14


def available() -> bool:
    """Whether the kernels can be used here: on the CPU backend, with llvmlite installed."""
    return code.llvm is not None and mx.default_device() == mx.cpu


def check() -> None:
    """Raise ValueError if the kernels cannot be used here."""
    if available():
        return
    wrong = "needs the package llvmlite: pip install llvmlite, or use 'mlx'."
    if (device := mx.default_device()) != mx.cpu:
        wrong = f"is for the CPU backend, the default device is {device}. Use 'mlx'."
    raise ValueError(f"StreamConfig.kernels: 'fast' {wrong}")


def describe() -> str:
    """Name the available kernels in one line."""
    if not available():
        return "mlx; fast ones come with the package llvmlite: pip install llvmlite"
    return f"mlx and fast ({code.widest()} numbers at once)"


def used(model: nn.Module) -> bool:
    """Whether a model computes with these kernels."""
    return any(isinstance(module, _Fast) for module in model.modules())


def fits(module: nn.Module, types: tuple = (mx.float32, mx.bfloat16)) -> bool:
    """Whether the kernels compute with a module's matrices; affine scales must be of ``types``."""
    if type(module) not in FAST and not isinstance(module, _Fast):
        return False
    if isinstance(module, nn.Conv1d):
        channels, _, inputs = module["weight"].shape
        return (inputs, channels) == (1, module.groups) and (
            (module.stride, module.padding, module.dilation) == (1, 0, 1)
        )
    if "scales" not in module:
        weight = module["weight"]
        return (
            not isinstance(HERE, Mac)
            and weight.dtype == mx.float32
            and weight.shape[-2] * weight.shape[-1] >= FLOAT_WEIGHTS
            and quantized.supported(32, 1, weight.shape[-1], "float")
        )
    weight, scales, biases = module["weight"], module["scales"], module.get("biases")
    group, bits, mode = module.group_size, module.bits, module.mode
    return (
        None not in (group, bits)  # both are None if mlx-lm was given only a mode
        and weight.shape[:-1] == scales.shape[:-1]
        and weight.shape[-1] * 32 == scales.shape[-1] * group * bits
        and (biases is None or biases.shape == scales.shape)
        and weight.dtype == mx.uint32
        and scales.dtype in (types if mode == "affine" else (mx.uint8,))
        and (biases is None or biases.dtype == scales.dtype)
        and module.get("global_scale") is None
        and quantized.supported(bits, group, scales.shape[-1] * group, mode)
    )


class Kept:
    """What was ``made`` from a module's ``arrays``, and MLX arrays ``owned`` by the kernels."""

    def __init__(self, arrays: tuple = (None,), made: Any = None, owned: list = ()):
        self.arrays, self.made, self.owned = arrays, made, owned

    def __deepcopy__(self, memo):
        return None  # a copied module has its own arrays, so ``made`` does not fit


class Watched:
    """A mixin: a module drops its ``Kept`` if anything is set or an array attribute is read."""

    def __getattr__(self, key):
        value = super().__getattr__(key)
        if isinstance(value, mx.array):  # the caller may change the array in place
            self.__dict__.pop("_kept", None)
        return value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.__dict__.pop("_kept", None)

    def __setattr__(self, key, value):
        super().__setattr__(key, value)
        if key != "__class__":  # hooks set this
            self.__dict__.pop("_kept", None)


@cache
def with_mixin(mixin: type, cls: type) -> type:
    """Return a subclass of ``cls`` with a mixin. ``hooks.replaced`` checks its ``originals``."""
    kept = {"__module__": cls.__module__, "originals": ((cls, "__call__", cls.__call__),)}
    return type(cls.__name__, (mixin, cls), kept)


class _Fast(Watched):
    """Mixed into a module that holds matrices."""

    @property
    def form(self) -> tuple[int, int, str]:
        """The group size, the bits of a weight, and the mode."""
        return (self.group_size, self.bits, self.mode) if "scales" in self else (1, 32, "float")

    def matrices(self) -> quantized.Matrices | None:
        """The module's matrices, in the arrays' memory; None if the kernels do not fit now."""
        weight, scales, biases = self["weight"], self.get("scales"), self.get("biases")
        kept = self.__dict__.get("_kept")
        if kept is not None:
            of = kept.arrays
            if of[0] is weight and of[1] is scales and of[2] is biases:
                return kept.made
        matrices, held = None, []
        if fits(self):
            held = [a if a is None else owned(_bits(a)) for a in (weight, scales, biases)]
            # The arrays of slots are not copied here: the engine writes new experts to them.
            views = [a if a is None else code.in_rows(np.asarray(a)) for a in held]
            matrices = quantized.Matrices(*views, *self.form)
        self.__dict__["_kept"] = Kept((weight, scales, biases), matrices, held)
        return matrices

    def takes(self, x: mx.array) -> bool:
        """Whether the kernels compute with this input."""
        if not takes(x) or self.training or replaced(self.originals):
            return False
        matrices = self.matrices()
        return matrices is not None and x.shape[-1] == matrices.inputs

    def multiply(self, x: mx.array) -> mx.array:
        """Multiply x ``[..., D]`` with the module's one matrix: ``[..., N]``."""
        (y,) = quantized.Rows.of(x).multiply(self.matrices())
        return to_mlx(y.reshape(*x.shape[:-1], y.shape[-1]))


def _bits(a):
    """Return an array that numpy can read: bfloat16 as uint16, in the same memory."""
    return a.view(mx.uint16) if a.dtype == mx.bfloat16 else a


def owned(a: mx.array) -> mx.array:
    """Return a view that keeps MLX from writing to ``a``'s memory; ``a`` if MLX makes a copy."""
    other = a.view(a.dtype)
    mx.eval(a, other)
    same = np.asarray(other).ctypes.data == np.asarray(a).ctypes.data
    return other if same and other is not a else a


def is_itself(module: nn.Module, kind: type | tuple[type, ...]) -> bool:
    """Whether a module is of a kind and its call is unchanged: no hook, no other method."""
    return isinstance(module, kind) and type(module).__call__ is type(module).known_call


def takes(x: mx.array) -> bool:
    """Whether the kernels compute with this input."""
    return x.dtype == mx.float32 and mx.default_device() == mx.cpu and x.size > 0


class _Linear(_Fast):
    def __call__(self, x: mx.array) -> mx.array:
        if not self.takes(x):
            return super().__call__(x)
        y = self.multiply(x)
        return y + self["bias"] if "bias" in self else y


class _Embedding(_Fast):
    def as_linear(self, x: mx.array) -> mx.array:
        return self.multiply(x) if self.takes(x) else super().as_linear(x)


class SwitchMatrices(_Fast):
    """Mixed into a module that has a matrix for each expert."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if x.shape[-2] != 1 or not self.takes(x):
            return super().__call__(x, indices, sorted_indices)
        mx.eval(x, indices)
        chosen = np.asarray(indices)
        # Which row of x each (token, expert) pair takes.
        row = np.arange(x.size // x.shape[-1]).reshape(x.shape[:-2])
        row, chosen = np.broadcast_arrays(row, chosen)
        matrices, each = self.matrices(), np.arange(chosen.size)
        parts = quantized.Parts.of(chosen.ravel().astype(np.int64), row.ravel(), each)
        y = np.empty((chosen.size, matrices.outputs), np.float32)
        matrices.multiply_parts(matrices.pack(quantized.Rows.of(x).x), parts, y)
        out = to_mlx(y.reshape(*chosen.shape, 1, -1))
        if "bias" in self:
            out = out + mx.expand_dims(self["bias"][indices], -2)
        return out


class FastMLP:
    """Mixed into a family's MLP. Computes ``down(swiglu(gate(x), up(x)))`` without MLX's graph."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self.forward(quantized.Rows.of(x)) if takes(x) else None
        return super().__call__(x) if y is None else to_mlx(y.reshape(x.shape))

    known_call = __call__

    def own_matrices(self) -> list[quantized.Matrices] | None:
        """The matrices of gate, up and down; None if the kernels do not compute all of them now."""
        names = "gate_proj", "up_proj", "down_proj"
        return None if replaced(self.originals) else products(self, *names)

    def forward(self, x: quantized.Rows, B: int = 1) -> np.ndarray | None:
        """Compute ``[n, D]`` for rows ``[n, D]`` of B texts; None if the kernels do not fit now."""
        found = self.own_matrices()
        if found is None or found[0].inputs != x.x.shape[-1]:
            return None
        *gate_up, down = found
        return down.multiply(rowwise.gated(*x.multiply(*gate_up)))


def products(module: nn.Module, *names: str) -> list[quantized.Matrices] | None:
    """The matrices of some projections; None if one has a bias, is hooked or was replaced."""
    linears = [module[name] for name in names]
    if any(type(m) not in LINEARS or "bias" in m for m in linears):
        return None
    if any(m.training or replaced(m.originals) for m in linears):
        return None
    found = [m.matrices() for m in linears]
    return None if None in found else found


@cache
def is_mlp(cls: type) -> bool:
    """Whether a class computes ``down(swiglu(gate(x), up(x)))``; its code is run on strings."""
    call = cls.__call__
    if not isinstance(call, FunctionType) or call.__globals__.get("swiglu") is not swiglu:
        return False

    def written(name):
        return lambda *arguments: f"{name}({', '.join(arguments)})"

    words = {f"{name}_proj": written(name) for name in ("gate", "up", "down")}
    try:
        y = with_globals(call, {"swiglu": written("swiglu")})(SimpleNamespace(**words), "x")
    except Exception:  # the class's call computes something else
        return False
    return y == "down(swiglu(gate(x), up(x)))"


class _Conv1d(_Fast):
    """Convolves each channel by lazy products; MLX's convolution takes ten times as long."""

    @property
    def taps(self) -> Kept:
        """The filters: ``made`` is numpy's ``[width, C]``; ``owned`` is a list of MLX's ``[C]``."""
        weight, kept = self["weight"], self.__dict__.get("_kept")
        if kept is None or kept.arrays[0] is not weight:
            taps = np.ascontiguousarray(np.asarray(weight)[..., 0].T)
            kept = Kept((weight,), taps, [to_mlx(w) for w in taps])
            self.__dict__["_kept"] = kept
        return kept

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]  # [C, width, 1]
        if not takes(x) or self.training or replaced(self.originals):
            return super().__call__(x)
        if weight.dtype != mx.float32 or len(weight) != x.shape[-1]:  # one filter would broadcast
            return super().__call__(x)
        taps = self.taps.owned
        T = x.shape[1] - len(taps) + 1
        y = x[:, :T] * taps[0]
        for i, tap in enumerate(taps[1:], 1):
            y = y + x[:, i : i + T] * tap
        return y + self["bias"] if "bias" in self else y


MIXINS = {
    _Linear: (nn.QuantizedLinear, nn.Linear),
    _Embedding: (nn.QuantizedEmbedding, nn.Embedding),
    SwitchMatrices: (QuantizedSwitchLinear, SwitchLinear),
    _Conv1d: (nn.Conv1d,),
}
# The classes are made at import: if a library replaces a method later, the new one is called.
FAST = {cls: with_mixin(mixin, cls) for mixin, classes in MIXINS.items() for cls in classes}
LINEARS = FAST[nn.QuantizedLinear], FAST[nn.Linear]
