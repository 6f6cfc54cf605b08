"""mlx-lm's modules that hold matrices, with the kernels of ``quantized.py``.

A module computes when it is called: it evaluates its input, and its result is an array that is
already evaluated. What the kernels do not fit (half precision, other quantizations, a GPU) goes
MLX's way, and ``use`` counts it.
"""

import platform
from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

from ..hooks import call_instead
from . import attention, code, gated_delta, quantized

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
    """Let a model's matrices, attention and recurrent layers compute with these kernels.

    Args:
        model (nn.Module): Any model of mlx-lm. It is changed in place.

    Returns:
        dict[str, int]: How many modules with matrices compute with the kernels (``fast``) and with
        MLX's (``mlx``).
    """
    found = Counter(fast=0, mlx=0)
    for module in reversed(list(model.modules())):  # a module after those in it
        fast = FAST.get(type(module))
        if fast is not None:
            fits = _fits(module)
            if fits:
                module.__class__ = fast
            found["fast" if fits else "mlx"] += 1
        if type(module) is SwitchGLU and gate_up_down(module):
            module.__class__ = FastSwitchGLU
        if any(isinstance(child, _Linear) for child in module.children().values()):
            call_instead(module, "swiglu", eager_swiglu)
        gated_delta.use(module)
        call_instead(module, "scaled_dot_product_attention", attention.eager_attention)
    return dict(found)


def used(model: nn.Module) -> bool:
    """Whether a model computes with these kernels.

    Args:
        model (nn.Module): Any model of mlx-lm.
    """
    return any(isinstance(module, _Fast) for module in model.modules())


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


class _Fast:
    """Mixed into a module that holds matrices."""

    @property
    def form(self) -> tuple[int, int, str]:
        """Weights that share a scale, bits of a weight, mode."""
        return self.group_size, self.bits, self.mode

    def matrices(self) -> quantized.Matrices:
        """The module's matrices, in the memory of its arrays."""
        weight, scales, biases = self["weight"], self.get("scales"), self.get("biases")
        kept = self.__dict__.get("_kept")
        if kept is not None:
            of, matrices = kept
            if of[0] is weight and of[1] is scales and of[2] is biases:
                return matrices
        views = [None if a is None else np.asarray(a) for a in (weight, scales, biases)]
        if scales is None and views[0].ndim == 2:  # a transposed one is copied
            views[0] = np.ascontiguousarray(views[0])
        views = [v if v is None or v.ndim == 3 else v[None] for v in views]
        matrices = quantized.Matrices(*views, *self.form)
        self.__dict__["_kept"] = (weight, scales, biases), matrices
        return matrices

    def __getattr__(self, key):
        value = super().__getattr__(key)
        if isinstance(value, mx.array):  # the caller may change the array in place
            self.__dict__.pop("_kept", None)
        return value

    def _multiply(self, x):
        """``x [..., D]`` with the one matrix: ``[..., N]``."""
        y = self.matrices().multiply(rows(x))
        return mx.array(y.reshape(*x.shape[:-1], y.shape[-1]))


class _Plain(_Fast):
    """Of a matrix that is not quantized."""

    form = 1, 32, "float"


def takes(x: mx.array) -> bool:
    """Whether the kernels compute with this input.

    Args:
        x (mx.array): Of a module.
    """
    return x.dtype == mx.float32 and mx.default_device() == mx.cpu and x.size > 0


def rows(x: mx.array) -> np.ndarray:
    """An input as ``[rows, D]``, evaluated, one row after the other.

    Args:
        x (mx.array): ``[..., D]``.
    """
    return np.ascontiguousarray(np.asarray(x).reshape(-1, x.shape[-1]))


class _Linear(_Fast):
    def __call__(self, x: mx.array) -> mx.array:
        if not takes(x):
            return super().__call__(x)
        y = self._multiply(x)
        return y + self["bias"] if "bias" in self else y


class FastLinear(_Linear, nn.QuantizedLinear):
    """``nn.QuantizedLinear``."""


class PlainLinear(_Linear, _Plain, nn.Linear):
    """``nn.Linear``."""


class _Embedding(_Fast):
    def as_linear(self, x: mx.array) -> mx.array:
        return self._multiply(x) if takes(x) else super().as_linear(x)


class Pairs:
    """The (token, expert) pairs of a call, sorted by expert.

    Args:
        chosen (np.ndarray): The expert of each pair.

    Attributes:
        parts (quantized.Parts): A part for each expert, of the sorted pairs.
    """

    def __init__(self, chosen: np.ndarray):
        if chosen.ndim > 1 and chosen.size == chosen.shape[-1]:  # one token: experts as they are
            self._order, each = slice(None), np.arange(chosen.size)
            self.parts = quantized.Parts(
                chosen.ravel().astype(np.int64), each, each, np.ones_like(each)
            )
            return
        chosen = chosen.ravel()
        self._order = np.argsort(chosen, kind="stable")
        experts, first = np.unique(chosen[self._order], return_index=True)
        ends = np.append(first[1:], len(chosen))
        self.parts = quantized.Parts(experts.astype(np.int64), first, first, ends - first)

    def sort(self, of_pairs: np.ndarray) -> np.ndarray:
        """What belongs to each pair, in sorted order.

        Args:
            of_pairs (np.ndarray): ``[pairs, ...]``.
        """
        return of_pairs[self._order]

    def unsort(self, y: np.ndarray) -> np.ndarray:
        """Rows of the sorted pairs in the order of the call.

        Args:
            y (np.ndarray): ``[pairs, ...]``.
        """
        out = np.empty_like(y)
        out[self._order] = y
        return out


class FastEmbedding(_Embedding, nn.QuantizedEmbedding):
    """``nn.QuantizedEmbedding``, as the matrix of the logits."""


class PlainEmbedding(_Embedding, _Plain, nn.Embedding):
    """``nn.Embedding``, as the matrix of the logits."""


class _SwitchLinear(_Fast):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if not takes(x) or x.shape[-2] != 1:
            return super().__call__(x, indices, sorted_indices)
        mx.eval(x, indices)
        chosen = np.asarray(indices)
        # Which row of x each (token, expert) pair takes.
        row = np.arange(x.size // x.shape[-1]).reshape(x.shape[:-2])
        row, chosen = np.broadcast_arrays(row, chosen)
        pairs = Pairs(chosen)
        y = np.empty((chosen.size, self.output_dims), np.float32)
        matrices = self.matrices()
        packed = matrices.pack(rows(x)[pairs.sort(row.ravel())])
        matrices.multiply_parts(packed, pairs.parts, y)
        out = mx.array(pairs.unsort(y).reshape(*chosen.shape, 1, -1))
        if "bias" in self:
            out = out + mx.expand_dims(self["bias"][indices], -2)
        return out


class FastSwitchLinear(_SwitchLinear, QuantizedSwitchLinear):
    """``QuantizedSwitchLinear``: a matrix for each expert."""


class PlainSwitchLinear(_SwitchLinear, _Plain, SwitchLinear):
    """``SwitchLinear``."""


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """``silu(gate) * up``; an element does not depend on where it is.

    Args:
        gate (np.ndarray): float32.
        up (np.ndarray): The same shape.
    """
    y = np.negative(gate, order="C")
    with np.errstate(over="ignore"):  # then the result is 0, as it should be
        np.exp(y, out=y)
    y += 1
    np.divide(gate, y, out=y)
    y *= up
    return y


def eager_swiglu(of_mlx_lm: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's ``swiglu(gate, up)`` for inputs that are evaluated: one evaluation less.

    Args:
        of_mlx_lm (Callable): What is called with other types.
    """

    def call(gate, up):
        if not takes(gate) or up.dtype != mx.float32:
            return of_mlx_lm(gate, up)
        return mx.array(swiglu(np.asarray(gate), np.asarray(up)))

    return call


def gate_up_down(module: nn.Module) -> list[nn.Module] | None:
    """The projections of a ``SwitchGLU``, if the kernels compute all of it.

    Args:
        module (nn.Module): Gate and up may be one projection.

    Returns:
        list[nn.Module] or None: ``gate_proj`` and ``up_proj``, or ``gate_up_proj``, and last
        ``down_proj``.
    """
    names = ("gate_up_proj",) if "gate_up_proj" in module else ("gate_proj", "up_proj")
    found = [module[name] for name in (*names, "down_proj")]
    fits = all(isinstance(p, _SwitchLinear) and "bias" not in p for p in found)
    fits = fits and type(module.activation) is SwiGLU
    return found if fits and len({p.form for p in found[:-1]}) == 1 else None


class FastExperts:
    """Mixed into ``SwitchGLU``, or one with gate and up in one projection: all in one call."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        projections = gate_up_down(self) if takes(x) else None
        if projections is None:
            return super().__call__(x, indices)
        *gate_up, down = projections
        mx.eval(x, indices)
        x, chosen = rows(x), np.asarray(indices)
        K, F = chosen.shape[-1], down.input_dims
        pairs = Pairs(chosen)
        parts = pairs.parts
        if len(x) == 1:  # all pairs take the same row
            parts = parts._replace(x=np.zeros_like(parts.x))
        else:
            x = x[pairs.sort(np.arange(chosen.size)) // K]
        packed = gate_up[0].matrices().pack(x)
        y = np.empty((chosen.size, 2 * F), np.float32)
        for i, projection in enumerate(gate_up):
            part = y[:, i * F : (i + 1) * F] if len(gate_up) > 1 else y
            projection.matrices().multiply_parts(packed, parts, part)
        matrices = down.matrices()
        packed = matrices.pack(swiglu(y[:, :F], y[:, F:]))
        y = np.empty((chosen.size, down.output_dims), np.float32)
        matrices.multiply_parts(packed, pairs.parts, y)
        return mx.array(pairs.unsort(y).reshape(*chosen.shape, -1))


class FastSwitchGLU(FastExperts, SwitchGLU):
    """``SwitchGLU``."""


FAST = {
    nn.QuantizedLinear: FastLinear,
    nn.QuantizedEmbedding: FastEmbedding,
    QuantizedSwitchLinear: FastSwitchLinear,
    nn.Linear: PlainLinear,
    nn.Embedding: PlainEmbedding,
    SwitchLinear: PlainSwitchLinear,
}
