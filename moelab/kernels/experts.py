"""Computes a layer's experts with the kernels. Blocks call experts through ``FastExperts``."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from ..hooks import replaced
from . import code, modules, quantized, rowwise, team
from .code import to_mlx
from .quantized import Matrices, Rows

Projections = tuple[list[Matrices], Matrices]  # of gate and up (or both in one), and of down


class FastExperts:
    """The experts of one layer. ``forward`` takes and gives numpy arrays."""

    # If ``expecting``, a layer calls ``expect`` before attention, with ``expects`` experts a token.
    expects, expecting = 0, False

    def all_matrices(self) -> Projections | None:
        """The layer's projections; None if the kernels cannot compute a call now."""
        raise NotImplementedError

    def expect(self, likely: np.ndarray, probability: np.ndarray) -> None:
        """Take a hint: experts ``[n, expects]`` that a call may need soon, the likeliest first."""

    def forward(
        self, x: Rows, routed: np.ndarray, placed: "PlacedExperts | None" = None
    ) -> np.ndarray | None:
        """Compute ``[n * K, D]`` for tokens x ``[n, D]`` and their experts ``[n, K]``.

        None if the kernels do not fit. The result is ``placed.y`` if ``placed`` fits.
        """
        call = call_for(self.all_matrices(), x, routed.shape, placed)
        if call is None:
            return None
        call.compute(np.arange(routed.size), routed.ravel())
        return call.y


def call_for(
    found: Projections | None, x: Rows, shape: tuple[int, int], placed: "PlacedExperts | None"
) -> "ExpertCall | PlacedExperts | None":
    """Return the call that computes ``FastExperts.forward``; None if the projections do not fit."""
    if found is None or found[0][0].inputs != x.x.shape[-1]:
        return None
    return placed if placed and placed.bind(found) else ExpertCall(found, x, shape)


class ExpertsInModule(FastExperts):
    """Mixed into ``SwitchGLU``: computes all projections in one call; gate and up may be joined."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        call = self.begin(x, indices.shape)
        if call is None:
            return super().__call__(x, indices)
        mx.eval(indices)
        call.compute(np.arange(indices.size), np.asarray(indices).ravel())
        return call.result()

    known_call = __call__

    def all_matrices(self):
        found = None if replaced(self.originals) else gate_up_down(self)
        if found is None or any(p.training or replaced(p.originals) for p in found):
            return None
        *gate_up, down = [p.matrices() for p in found]
        return None if down is None or None in gate_up else (gate_up, down)

    def matrices_for(self, x: mx.array) -> Projections | None:
        """Return ``all_matrices``, or None if the kernels cannot compute x ``[..., D]`` now."""
        found = self.all_matrices() if modules.takes(x) else None
        return None if found is None or found[0][0].inputs != x.shape[-1] else found

    def begin(self, x: mx.array, shape: tuple[int, ...]) -> "ExpertCall | None":
        """Begin a call for x ``[..., D]``, indices of ``shape``; None if the kernels do not fit."""
        found = self.matrices_for(x)
        return found and ExpertCall(found, Rows.of(x), shape, in_mlx=x.size > x.shape[-1])


FastSwitchGLU = modules.with_mixin(ExpertsInModule, SwitchGLU)


def gate_up_down(module: nn.Module) -> list[nn.Module] | None:
    """The projections of a ``SwitchGLU``, down last; None if one call cannot compute them all."""
    names = ("gate_up_proj",) if "gate_up_proj" in module else ("gate_proj", "up_proj")
    found = [module[name] for name in (*names, "down_proj")]
    alike = all(isinstance(p, modules.SwitchMatrices) and "bias" not in p for p in found)
    alike = alike and type(module.activation) is SwiGLU
    return found if alike and len({p.form for p in found[:-1]}) == 1 else None


class ExpertCall:
    """A call of experts for tokens x ``[n, D]``. Each ``compute`` fills some rows of ``y``."""

    def __init__(self, found: Projections, x: Rows, shape: tuple[int, ...], in_mlx: bool = False):
        self._found, self._x, self._shape, self._out = found, x, shape, None
        shape = len(x.x) * shape[-1], found[1].outputs
        if in_mlx:  # ``y [n * K, D]`` lies in MLX's memory, which saves a copy
            self._out = mx.zeros(shape)
            mx.eval(self._out)
        self.y = np.empty(shape, np.float32) if self._out is None else np.asarray(self._out)

    def compute(self, pairs: np.ndarray, experts: np.ndarray) -> None:
        """Compute some (token, expert) pairs. ``pairs`` are their places among all n * K pairs."""
        gate_up, down = self._found
        experts, each = experts.astype(np.int64), np.arange(len(pairs))
        if len(self.y) == self._shape[-1] == len(pairs):  # one token: no grouping by expert
            parts = quantized.Parts(experts, each, np.ones_like(each), np.zeros_like(each), pairs)
        else:
            parts = quantized.Parts.of(experts, pairs // self._shape[-1], pairs)
        F, packed = down.inputs, self._x.packed_for(gate_up[0])
        y = np.empty((len(pairs), 2 * F), np.float32)
        for i, matrices in enumerate(gate_up):
            part = y[:, i * F : (i + 1) * F] if len(gate_up) > 1 else y
            matrices.multiply_parts(packed, parts._replace(y=each), part)
        packed = down.pack(rowwise.gated(y[:, :F], y[:, F:]))
        down.multiply_parts(packed, parts._replace(x=each), self.y)

    def result(self) -> mx.array:
        """Return the result ``[..., K, D]``, after all pairs were computed."""
        out = to_mlx(self.y) if self._out is None else self._out
        return out.reshape(*self._shape, -1)


class PlacedExperts:
    """A recorded program for one token x ``[1, D]``; each run is given its experts' addresses."""

    def __init__(self, found: Projections, x: Rows, K: int):
        gate_up, down = found
        F, D = down.inputs, down.outputs
        if sum(m.outputs for m in gate_up) != 2 * F:
            raise ValueError(f"experts: expected {F} outputs of gate and of up, as down has inputs")
        hidden, self.y = np.empty((K, 2 * F), np.float32), np.empty((K, D), np.float32)
        self._form, self._program, self._tasks = _form(found), team.Program(), []
        packed = x.packed_for(gate_up[0])
        with self._program.recording():
            self._multiply(gate_up, packed, hidden, np.zeros(K, int))
            packed = down.pack(rowwise.gated(hidden[:, :F], hidden[:, F:]))
            self._multiply([down], packed, self.y, np.arange(K))
        places = (self._program.places(tasks)[0] for tasks in self._tasks)
        # A run may have fewer experts: it picks its tasks from a copy of all K tasks.
        self._calls = [(*place, tasks, tasks.copy()) for place, tasks in zip(places, self._tasks)]

    def _multiply(self, matrices, packed, y, rows):
        """Record the products of row ``rows[k]`` and expert k's matrices, side by side in y."""
        K, n = len(rows), len(matrices)
        N = y.shape[1] // n
        each = np.arange(n * K)
        at = code.address(each)
        tasks = np.zeros((K, n, quantized.TASK), np.int64)
        tasks[..., 3:6] = packed.x, packed.sums, code.address(y)
        tasks[..., 6] = at + 8 * rows[:, None]
        tasks[..., 7] = at + 8 * each.reshape(K, n)
        tasks[..., 8:] = 1, N, N
        code.keep(packed)
        self._tasks.append(tasks)
        pieces = team.pieces(y.size * matrices[0].inputs, N // 2)
        team.run(matrices[0].kernel, tasks, n * K, pieces=pieces)

    def bind(self, found: Projections) -> bool:
        """Use these projections from now on; return False if the program is for another form."""
        self._found = found
        return _form(found) == self._form

    def compute(self, pairs: np.ndarray, experts: np.ndarray) -> None:
        """Compute as ``ExpertCall`` does; ``pairs`` are places of ``experts`` among a token's K."""
        both = self._found[0], self._found[1:]
        for (arguments, i, tasks, of_all), matrices in zip(self._calls, both):
            now = tasks[: len(pairs)]
            now[:] = of_all[pairs]
            for j, m in enumerate(matrices):
                now[:, j, :3] = m.addresses[experts]
            arguments[i + 1] = len(pairs) * len(matrices)
        self._program.run()


def _form(found):
    gate_up, down = found
    return [(m.kernel, m.outputs) for m in (*gate_up, down)]
