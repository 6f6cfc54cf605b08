"""mlx-lm's modules that hold matrices, with the kernels of ``quantized.py``.

A module with matrices computes when it is called: it evaluates its input, and its product is an
array that is already evaluated. MLX adds a bias. What the kernels do not fit (half precision, other
quantizations, a GPU) goes MLX's way; ``use`` counts the modules whose matrices do not fit.
"""

import platform
from functools import cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.qwen3_next import Qwen3NextMLP
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

from ..hooks import unhooked
from . import code, quantized, rowwise, team
from .code import to_mlx

# MLX keeps a plain matrix with fewer weights: its call is as fast, even with the reference BLAS of
# its Linux packages. On macOS it has a fast BLAS and keeps every plain matrix.
FLOAT_WEIGHTS = 2**14


def available() -> bool:
    """Whether the kernels can be used here: on the CPU backend, with llvmlite installed."""
    return code.llvm is not None and mx.default_device() == mx.cpu


def check() -> None:
    """Raise if the kernels cannot be used here."""
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


def use(module: nn.Module, types: tuple[mx.Dtype, ...]) -> bool | None:
    """Let a module compute with the kernels, if they fit it. Those inside it must come first.

    It gives whether they fit the module's matrices, None if it has none of its own.
    """
    fast, computes = FAST.get(type(module)), None
    if fast is not None:
        computes = fits(module, types)
        if computes:
            module.__class__ = fast
    elif type(module) is SwitchGLU and gate_up_down(module):
        module.__class__ = FastSwitchGLU
    elif _is_mlp(type(module)):
        module.__class__ = _fast_mlp(type(module))
    return computes


def used(model: nn.Module) -> bool:
    """Whether a model computes with these kernels."""
    return any(isinstance(module, _Fast) for module in model.modules())


def fits(module: nn.Module, types: tuple[mx.Dtype, ...] = (mx.float32, mx.bfloat16)) -> bool:
    """Whether the kernels compute with the matrices that a module of ``FAST`` holds now.

    ``types`` are those that affine scales may have.
    """
    if isinstance(module, nn.Conv1d):
        channels, _, inputs = module["weight"].shape
        return (inputs, channels) == (1, module.groups) and (
            (module.stride, module.padding, module.dilation) == (1, 0, 1)
        )
    if "scales" not in module:
        weight = module["weight"]
        return (
            platform.system() != "Darwin"
            and weight.dtype == mx.float32
            and weight.shape[-2] * weight.shape[-1] >= FLOAT_WEIGHTS
            and quantized.supported(32, 1, weight.shape[-1], "float")
        )
    weight, scales, biases = module["weight"], module["scales"], module.get("biases")
    return (
        weight.shape[:-1] == scales.shape[:-1]
        and weight.shape[-1] * 32 == scales.shape[-1] * module.group_size * module.bits
        and (biases is None or biases.shape == scales.shape)
        and weight.dtype == mx.uint32
        and scales.dtype in (types if module.mode == "affine" else (mx.uint8,))
        and (biases is None or biases.dtype == scales.dtype)
        and module.get("global_scale") is None
        and quantized.supported(
            module.bits, module.group_size, scales.shape[-1] * module.group_size, module.mode
        )
    )


class Kept:
    """What was made of a module's arrays, and the arrays that it was made of."""

    def __init__(self, arrays: tuple = (None,), made: Any = None, owned: list = ()):
        self.arrays, self.made, self.owned = arrays, made, owned

    def __deepcopy__(self, memo):
        return None  # a copy of the module has arrays of its own


class Watched:
    """Mixed into a module: drops what was made of its arrays when one is got or anything is set."""

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
        if key != "__class__":  # a hook
            self.__dict__.pop("_kept", None)


@cache
def watched(cls: type) -> type:
    """A class of modules whose changes are seen (``Watched``)."""
    return type(
        cls.__name__, (Watched, cls), {"__module__": cls.__module__, "of": (cls, cls.__call__)}
    )


class _Fast(Watched):
    """Mixed into a module that holds matrices.

    ``of`` is its class of MLX or mlx-lm and how that was called at first.
    """

    @property
    def form(self) -> tuple[int, int, str]:
        """Weights that share a scale, bits of a weight, mode."""
        return self.group_size, self.bits, self.mode

    def matrices(self) -> quantized.Matrices | None:
        """The module's matrices, in the memory of its arrays; None if they do not fit now."""
        weight, scales, biases = self["weight"], self.get("scales"), self.get("biases")
        kept = self.__dict__.get("_kept")
        if kept is not None:
            of = kept.arrays
            if of[0] is weight and of[1] is scales and of[2] is biases:
                return kept.made
        matrices, held = None, []
        if fits(self):
            held = [a if a is None else owned(_bits(a)) for a in (weight, scales, biases)]
            views = [a if a is None else _in_rows(a) for a in held]
            matrices = quantized.Matrices(*views, *self.form)
        self.__dict__["_kept"] = Kept((weight, scales, biases), matrices, held)
        return matrices

    def takes(self, x: mx.array) -> bool:
        """Whether the kernels compute with this input."""
        return takes(x) and self.computes(x.shape[-1])

    def computes(self, inputs: int) -> bool:
        """Whether the kernels compute with rows of ``inputs`` numbers."""
        if self.training or replaced(self):
            return False
        matrices = self.matrices()
        return matrices is not None and inputs == matrices.inputs

    def _multiply(self, x):
        """Multiply x ``[..., D]`` with the module's one matrix: ``[..., N]``."""
        (y,) = quantized.Rows.of(x).multiply(self.matrices())
        return to_mlx(y.reshape(*x.shape[:-1], y.shape[-1]))


def _bits(a):
    """An array that numpy can see: bfloat16 as uint16, in the same memory."""
    return a.view(mx.uint16) if a.dtype == mx.bfloat16 else a


def owned(a: mx.array) -> mx.array:
    """An array in the same memory that nobody else can change in place; else the array itself."""
    other = a.view(a.dtype)
    mx.eval(a, other)
    same = np.asarray(other).ctypes.data == np.asarray(a).ctypes.data
    return other if same and other is not a else a


def _in_rows(a):
    """The matrices ``[E, N, n]`` of an array ``[N, n]`` or ``[E, N, n]``, row after row."""
    view = np.asarray(a)
    view = view if view.ndim == 3 else view[None]
    row = view.itemsize * view.shape[2]
    # A transposed or broadcast array is copied. The arrays of slots have their rows in order and
    # are not: the engine writes new experts to them.
    return view if view.strides[1:] == (row, view.itemsize) else np.ascontiguousarray(view)


class _Plain(_Fast):
    """Mixed into a module whose matrix is not quantized."""

    form = 1, 32, "float"


def replaced(module: nn.Module) -> bool:
    """Whether another library has put a method of its own in the place of MLX's or mlx-lm's."""
    cls, call = module.of
    return cls.__call__ is not call


def takes(x: mx.array) -> bool:
    """Whether the kernels compute with this input."""
    return x.dtype == mx.float32 and mx.default_device() == mx.cpu and x.size > 0


class _Linear(_Fast):
    def __call__(self, x: mx.array) -> mx.array:
        if not self.takes(x):
            return super().__call__(x)
        y = self._multiply(x)
        return y + self["bias"] if "bias" in self else y


class FastLinear(_Linear, nn.QuantizedLinear):
    """An ``nn.QuantizedLinear`` that computes with the kernels."""


class PlainLinear(_Linear, _Plain, nn.Linear):
    """An ``nn.Linear`` that computes with the kernels."""


class _Embedding(_Fast):
    def as_linear(self, x: mx.array) -> mx.array:
        return self._multiply(x) if self.takes(x) else super().as_linear(x)


class FastEmbedding(_Embedding, nn.QuantizedEmbedding):
    """An ``nn.QuantizedEmbedding`` that computes logits with the kernels."""


class PlainEmbedding(_Embedding, _Plain, nn.Embedding):
    """An ``nn.Embedding`` that computes logits with the kernels."""


class _SwitchLinear(_Fast):
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


class FastSwitchLinear(_SwitchLinear, QuantizedSwitchLinear):
    """A ``QuantizedSwitchLinear`` (a matrix for each expert) that computes with the kernels."""


class PlainSwitchLinear(_SwitchLinear, _Plain, SwitchLinear):
    """A ``SwitchLinear`` that computes with the kernels."""


def gate_up_down(module: nn.Module) -> list[nn.Module] | None:
    """The projections of a ``SwitchGLU``, down last; None unless the kernels compute them all.

    Gate and up may be one projection.
    """
    names = ("gate_up_proj",) if "gate_up_proj" in module else ("gate_proj", "up_proj")
    found = [module[name] for name in (*names, "down_proj")]
    alike = all(isinstance(p, _SwitchLinear) and "bias" not in p for p in found)
    alike = alike and type(module.activation) is SwiGLU
    return found if alike and len({p.form for p in found[:-1]}) == 1 else None


class FastExperts:
    """Mixed into ``SwitchGLU``, whose gate and up may be one: computes it in one call."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        call = self.begin(x, indices.shape)
        if call is None:
            return super().__call__(x, indices)
        mx.eval(indices)
        call.compute(np.arange(indices.size), np.asarray(indices).ravel())
        return call.result()

    def all_matrices(self) -> tuple[list[quantized.Matrices], quantized.Matrices] | None:
        """The matrices of gate and up, and that of down; None if the kernels do not fit all now."""
        found = gate_up_down(self)
        if found is None or any(p.training or replaced(p) for p in found):
            return None
        *gate_up, down = [p.matrices() for p in found]
        return None if down is None or None in gate_up else (gate_up, down)

    def begin(self, x: mx.array, shape: tuple[int, ...]) -> "ExpertCall | None":
        """Begin a call for x ``[..., D]``; its (token, expert) pairs are computed some at a time.

        The call's indices have this shape, ``[..., K]``. None if the kernels do not fit it.
        """
        if not takes(x):
            return None
        mx.eval(x)
        return self.begin_rows(quantized.Rows.of(x), shape, in_mlx=x.size > x.shape[-1])

    def begin_rows(
        self, x: quantized.Rows, shape: tuple[int, ...], in_mlx: bool = False
    ) -> "ExpertCall | None":
        """As ``begin``, for tokens x ``[n, D]``. ``in_mlx``: compute into memory of MLX."""
        found = self.all_matrices()
        if found is None or found[0][0].inputs != x.x.shape[-1]:
            return None
        return ExpertCall(*found, x, shape, in_mlx)


class ExpertCall:
    """A call of ``FastExperts`` for x ``[n, D]`` that is computed in parts.

    Its indices have this shape, ``[..., K]``. ``y`` ``[n * K, D]`` holds what is computed so far.
    """

    def __init__(self, gate_up, down, x, shape, in_mlx):
        self._gate_up, self._down, self._shape, self._x = gate_up, down, shape, x
        shape, self._out = (len(x.x) * shape[-1], down.outputs), None
        if in_mlx:  # a copy of a prompt's would take as much memory once more
            self._out = mx.zeros(shape)
            mx.eval(self._out)
        self.y = np.empty(shape, np.float32) if self._out is None else np.asarray(self._out)

    def compute(self, pairs: np.ndarray, experts: np.ndarray, of: tuple | None = None) -> None:
        """Compute some pairs: their places among all n * K, and the expert of each.

        ``of``: matrices of the same form, from ``all_matrices``, if others hold the experts.
        """
        gate_up, down = of or (self._gate_up, self._down)
        experts, each = experts.astype(np.int64), np.arange(len(pairs))
        if len(self.y) == self._shape[-1] == len(pairs):  # one token, its experts as they are
            parts = quantized.Parts(experts, each, np.ones_like(each), np.zeros_like(each), pairs)
        else:
            parts = quantized.Parts.of(experts, pairs // self._shape[-1], pairs)
        F, packed = down.inputs, self._x.packed_for(gate_up[0])
        y = np.empty((len(pairs), 2 * F), np.float32)
        for i, matrices in enumerate(gate_up):
            part = y[:, i * F : (i + 1) * F] if len(gate_up) > 1 else y
            matrices.multiply_parts(packed, parts._replace(y=each), part)
        packed = down.pack(rowwise.swiglu(y[:, :F], y[:, F:]))
        down.multiply_parts(packed, parts._replace(x=each), self.y)

    def result(self) -> mx.array:
        """``[..., K, D]``, once all pairs are computed."""
        out = to_mlx(self.y) if self._out is None else self._out
        return out.reshape(*self._shape, -1)


class PlacedExperts:
    """One token's experts, wherever they are: a program whose matrices are named before each run.

    The token x ``[1, D]`` is packed for the experts; ``y`` ``[K, D]`` is what they give.
    """

    def __init__(self, module: nn.Module, x: quantized.Rows, K: int):
        (like, *_), down = module.all_matrices()
        F, D = down.inputs, down.outputs
        hidden, self.y = np.empty((K, 2 * F), np.float32), np.empty((K, D), np.float32)
        # The tasks of a run's two calls. They are copied from ``_all``, which has those of all K.
        self._tasks = [np.zeros((n, quantized.TASK), np.int64) for n in (2 * K, K)]
        self._program, (numbers, at) = team.Program(), quantized.in_order(2 * K)

        def multiply(tasks, matrices, packed, y, rows):
            code.keep((packed, y, numbers))
            tasks[:, 3:6] = packed.x, packed.sums, code.address(y)
            tasks[:, 6] = at + 8 * np.array(rows)
            tasks[:, 7], tasks[:, 8] = at + 8 * np.arange(len(tasks)), 1
            tasks[:, 9:] = y.shape[1]
            pieces = team.pieces(y.size * matrices.inputs, y.shape[1] // 2)
            team.run(matrices.kernel, code.address(tasks), len(tasks), pieces=pieces)

        packed = x.packed_for(like)
        with self._program.recording():
            multiply(self._tasks[0], like, packed, hidden.reshape(2 * K, F), [0] * 2 * K)
            packed = down.pack(rowwise.swiglu(hidden[:, :F], hidden[:, F:]))
            multiply(self._tasks[1], down, packed, self.y, range(K))
        self._calls = [place for tasks in self._tasks for place in self._program.places(tasks)]
        self._all = [tasks.reshape(K, -1, quantized.TASK).copy() for tasks in self._tasks]

    def compute(self, pairs: list[int], addresses: np.ndarray) -> None:
        """Compute the experts at some places of the K, from their addresses ``[pairs, 9]``."""
        parts = addresses[:, :6].reshape(-1, 2, 3), addresses[:, None, 6:]
        for (arguments, i), tasks, of_all, part in zip(self._calls, self._tasks, self._all, parts):
            now = tasks[: len(pairs) * part.shape[1]].reshape(*part.shape[:2], -1)
            now[:] = of_all[pairs]
            now[..., :3] = part
            arguments[i + 1] = len(pairs) * part.shape[1]
        self._program.run()

    @staticmethod
    def takes(module: nn.Module) -> bool:
        """Whether the experts of a module can be used in this way now."""
        all_matrices = getattr(module, "all_matrices", None)
        return unhooked(module) is type(module) and all_matrices and all_matrices() is not None


def addresses_of(matrices: tuple[list[quantized.Matrices], quantized.Matrices]) -> np.ndarray:
    """Where weights, scales and biases of each expert's gate, up and down begin: ``[E, 9]``."""
    gate_up, down = matrices
    if down.together is None or down.together[0] != gate_up:
        if sum(m.outputs for m in gate_up) != 2 * down.inputs:
            raise ValueError(f"experts: expected gates for {down.inputs} inputs of the last matrix")
        gate, up = gate_up[0].addresses(), gate_up[-1].addresses(0 if gate_up[1:] else down.inputs)
        down.together = gate_up, np.concatenate([gate, up, down.addresses()], axis=1)
    return down.together[1]


class FastSwitchGLU(FastExperts, SwitchGLU):
    """A ``SwitchGLU`` that computes with the kernels."""

    of = SwitchGLU, SwitchGLU.__call__

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if replaced(self):
            return SwitchGLU.__call__(self, x, indices)
        return super().__call__(x, indices)


class FastMLP:
    """Mixed into a family's MLP, ``down(swiglu(gate(x), up(x)))``: evaluates nothing between."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self.forward(quantized.Rows.of(x)) if takes(x) else None
        return super().__call__(x) if y is None else to_mlx(y.reshape(x.shape))

    def fits(self) -> list[quantized.Matrices] | None:
        """The matrices of gate, up and down; None if the kernels do not compute all of them now."""
        return None if replaced(self) else products(self, "gate_proj", "up_proj", "down_proj")

    def forward(self, x: quantized.Rows) -> np.ndarray | None:
        """Compute rows ``[n, D]``: ``[n, D]``, None if the kernels do not fit now."""
        found = self.fits()
        if found is None or found[0].inputs != x.x.shape[-1]:
            return None
        *gate_up, down = found
        return down.multiply(rowwise.swiglu(*x.multiply(*gate_up)))


def products(module: nn.Module, *names: str) -> list[quantized.Matrices] | None:
    """The matrices of some of a module's projections.

    None if the kernels do not compute one now: it has a bias, is hooked or was replaced.
    """
    found = []
    for name in names:
        linear = module[name]
        if type(linear) not in (FastLinear, PlainLinear) or "bias" in linear:
            return None
        if linear.training or replaced(linear) or (matrices := linear.matrices()) is None:
            return None
        found.append(matrices)
    return found


def _is_mlp(cls):
    """Whether a class computes as ``Qwen3NextMLP`` does: most families have one that does."""
    own, known = (c.__call__ for c in (cls, Qwen3NextMLP))
    return (
        isinstance(own, FunctionType)
        and own.__code__.co_code == known.__code__.co_code
        and own.__code__.co_names == known.__code__.co_names
        and own.__globals__["swiglu"] is known.__globals__["swiglu"]
    )


@cache
def _fast_mlp(cls):
    kept = {"__module__": cls.__module__, "of": (cls, cls.__call__)}
    return type(cls.__name__, (FastMLP, cls), kept)


class FastConv1d(_Fast, nn.Conv1d):
    """An ``nn.Conv1d`` of a recurrent layer, one filter a channel, as a few products of MLX's.

    MLX's own convolution takes ten times as long. It is not evaluated, unlike the other modules.
    """

    @property
    def taps(self) -> Kept:
        """The filters, ``[width, C]`` of numpy (``made``) and ``[C]`` each of MLX (``owned``)."""
        weight, kept = self["weight"], self.__dict__.get("_kept")
        if kept is None or kept.arrays[0] is not weight:
            taps = np.ascontiguousarray(np.asarray(weight)[..., 0].T)
            kept = Kept((weight,), taps, [to_mlx(w) for w in taps])
            self.__dict__["_kept"] = kept
        return kept

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]  # [C, width, 1]
        if not takes(x) or self.training or replaced(self) or weight.dtype != mx.float32:
            return super().__call__(x)
        taps = self.taps.owned
        T = x.shape[1] - len(taps) + 1
        y = x[:, :T] * taps[0]
        for i, tap in enumerate(taps[1:], 1):
            y = y + x[:, i : i + T] * tap
        return y + self["bias"] if "bias" in self else y


FAST = {
    nn.QuantizedLinear: FastLinear,
    nn.QuantizedEmbedding: FastEmbedding,
    QuantizedSwitchLinear: FastSwitchLinear,
    nn.Linear: PlainLinear,
    nn.Embedding: PlainEmbedding,
    SwitchLinear: PlainSwitchLinear,
    nn.Conv1d: FastConv1d,
}
for _cls, _fast in FAST.items():
    _fast.of = _cls, _cls.__call__
