"""The MoE layer: it evaluates its routing, asks for the experts and computes with them.

A layer takes the place of mlx-lm's ``SwitchGLU`` and is called like it: ``x [..., D]`` and
``indices [..., K]`` give ``[..., K, D]``. ``Stacked`` and ``Fused`` get their experts from the
residency (``residency``), in slots. They compute with all of a call's experts at once, or part by
part as they arrive. The modes without slots are in ``rungs``.
"""

from functools import cached_property, partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from ..experts import expert_modules, expert_parameters, num_experts
from .cuda import on_cuda
from .fused import can_fuse
from .handover import FEW_TOKENS
from .residency.arriving import Arrived
from .residency.bank import SlotBank
from .session import Session

# On CUDA a call's rows (token, expert pairs) decide which kernel MLX takes, and so how it rounds:
# gather_qmm takes gather_qmv for fewer than 8 rows, and gather_mm takes another kernel for sorted
# rows, which SwitchGLU makes of 64 rows or more.
QUANTIZED_ROWS, DENSE_ROWS = 8, 64


class StreamedExperts(nn.Module):
    """The base of the layers that stream: it evaluates the routing, counts, and has experts read.

    It takes the place of ``module``, whose weights are not read.
    """

    def __init__(self, module: nn.Module, path: str, layer: int, session: Session):
        super().__init__()
        self.path, self.index, self.session = path, layer, session
        parameters = expert_parameters(module)
        linears = {name.split(".")[0] for name in parameters}
        for name, child in module.items():
            if name not in linears:  # a family's code may use its other attributes of the module
                self[name] = child
        quantized = all(f"{linear}.scales" in parameters for linear in linears)
        self._least_rows = QUANTIZED_ROWS if quantized else DENSE_ROWS
        self.num_experts = num_experts(module)
        # With ranks: the rank of each expert, ``[E]``, and whether it is this one. ``_row``: D and
        # type of a row, for a rank that computes none.
        self._owners = self.owned = None
        if session.ranks:
            self._owners = session.ranks.owners(self.num_experts, layer)
            self.owned = session.ranks.owned(self.num_experts, layer)
        last = module["fc2" if "fc2" in linears else "down_proj"]
        self._row = last.output_dims, session.dtype
        # If set, a call hands the indices to it and computes nothing: a prefetcher asks the router.
        # It is not a hook, because ``recover`` must remove it after an interrupt at any line.
        self.probe = None
        # Takes memory for a number of experts. It does not refer to this layer: a cycle would keep
        # the memory of a model that is gone.
        resident = {k: v for k, v in session.resident.items() if k.startswith(path + ".")}
        self._take_bank = partial(SlotBank, module, path, session.located, resident)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if self.session.is_in_call:
            return self._call(x, indices)
        with self.session.call():  # the layer is called by itself, outside the model
            return self._call(x, indices)

    def _call(self, x, indices):
        session = self.session
        if x.dtype != session.dtype:
            raise TypeError(
                f"{self.path}: expected {session.dtype} activations, got {x.dtype}. "
                "Something before this layer changed the type of the activations: cast them back."
            )
        if self.probe is not None:
            self.probe(indices)
            return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)
        if (y := self._without_waiting(x, indices)) is not None:
            return y
        asked = self._ask(x)
        routed = session.routing(indices, asked)
        self._count(routed)
        if session.ranks is None:
            y = self._compute(x, indices, routed)
            pending = [y]
            if session.fast_experts and routed.size > FEW_TOKENS * session.top_k:
                mx.eval(y)  # the fast kernels computed it already
                pending = []  # else the prompt's output, which is large, would stay in memory
        else:
            y, after = self._compute_owned(x, indices, routed)
            pending = [after]
        session.handover.pending = pending
        mx.async_eval(pending)  # compute while Python builds the graph of the next layers
        self._prefetch_next(asked)
        return y

    def _count(self, routed):
        """Count a call whose routing is known."""
        session = self.session
        if routed.shape[-1] > session.top_k:
            raise ValueError(
                f"{self.path}: expected at most {session.top_k} experts per token "
                f"(StreamConfig.top_k), its router chose {routed.shape[-1]}: mlx-lm does not let "
                f"this family choose fewer. Load it with top_k={routed.shape[-1]}."
            )
        if session.recorder is not None:
            session.recorder.add(self.index, routed)
        session.counters.calls += 1

    def _compute_owned(self, x, indices, routed):
        """Compute the (token, expert) pairs of this rank's experts, and join all ranks' results."""
        flat = routed.ravel()
        mine = np.flatnonzero(self.owned[flat])
        y = None
        if len(mine):
            # Pad to the rows that decide which CUDA kernel MLX takes for the whole call.
            more = max(0, min(flat.size, self._least_rows) - len(mine)) if on_cuda() else 0
            pairs = np.append(mine, mine[-1:].repeat(more))
            rows = x.reshape(-1, x.shape[-1])[kernels.to_mlx(pairs // routed.shape[-1])]
            some = indices.reshape(-1)[: len(pairs), None]  # for its shape
            y = self._compute(rows, some, flat[pairs][:, None])[: len(mine), 0]
        else:
            self._compute_nothing()
        return self.session.ranks.join(y, self._owners[routed], routed, self._row, self.path)

    def _compute_nothing(self):
        pass

    def recover(self) -> None:
        """Make the layer usable after a call that an exception ended. No read may be running."""
        self.probe = None

    def _without_waiting(self, x, indices):
        """Compute a call whose routing the host need not know, else return None."""
        return None

    def _ask(self, x):
        return []

    def _prefetch_next(self, asked):
        pass

    def part(
        self,
        bank: SlotBank,
        rows: mx.array,
        pairs: list[int],
        slots: list[int],
        top_k: int,
        zero: mx.array | None = None,
    ) -> mx.array:
        """Compute some (token, expert) pairs of a call as ``[pairs, 1, D]``, from rows ``[T, D]``.

        ``pairs`` are positions in the call; the kernel is that of the whole call. The pairs are
        computed after ``zero``, if there is one.
        """
        n = len(pairs)
        if on_cuda():  # repeat the last pair until there are enough rows for the same kernel
            more = min(len(rows) * top_k, self._least_rows) - n
            pairs, slots = pairs + pairs[-1:] * more, slots + slots[-1:] * more
        slots = mx.array(slots, mx.uint32)
        slots = slots if zero is None else slots + zero
        y = bank.experts(rows[mx.array(pairs) // top_k], slots[:, None])
        return y[:n] if len(pairs) > n else y


class Stacked(StreamedExperts):
    """Keeps S slots in one array for each projection, so that one gather computes a projection.

    An expert stays in its slot until it is evicted, or the slot is given back. A call that needs
    more experts than there are slots is computed in parts, and reads an expert at most once. This
    is SwiftLM PR 90.
    """

    gate_with_up = False  # not named ``fuse``: mlx_lm.fuse takes such a module for an adapter

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        fuse = self.gate_with_up and can_fuse(module)
        self.slots = session.residency.add(
            partial(self._take_bank, fuse=fuse),
            self.num_experts,
            self.owned,
            session.config,
        )

    def read(self, experts: list[int]) -> None:
        """Read at most S distinct experts into slots as a call does; compute nothing."""
        self.session.residency.read(self.index, experts)

    def all_matrices(self) -> tuple | None:
        """The slots' matrices as ``FastExperts.all_matrices``; None if the layer must be called."""
        return self.slots.bank.matrices if self._computes_rows else None

    @property
    def _computes_rows(self):
        return not self.session.ranks and self.slots.computes_at_once and self.probe is None

    def forward(
        self, x: kernels.Rows, routed: np.ndarray, placed: kernels.PlacedExperts | None = None
    ) -> np.ndarray | None:
        """Compute ``[n * K, D]`` from ``[n, D]`` for a block of ``kernels`` that knows the routing.

        With ``placed``, for one token, the result is its ``y``. None if the layer must be called.
        """
        # A caller that hands over ``placed`` has asked for the matrices.
        if not self._computes_rows or (placed is None and self.all_matrices() is None):
            return None
        if self.session.is_in_call:
            return self._forward(x, routed, placed)
        with self.session.call():
            return self._forward(x, routed, placed)

    def _forward(self, x, routed, placed):
        session, flat = self.session, routed.ravel().tolist()
        session.settle()
        self._count(routed)
        asked, call = self._ask(x), placed
        if call is None:
            call = self.slots.bank.experts.begin_rows(x, routed.shape)
        parts = PartsAtOnce(call, flat)
        alone = len(session.residency.layers) == 1  # a guess would take this call's slots
        for i, arrived in enumerate(session.residency.bring(self.index, routed, (), None)):
            if not (i or alone):  # this layer's reads have begun
                self._prefetch_next(asked)
            parts.add(arrived)
        if alone:
            self._prefetch_next(asked)
        return call.y

    def _compute(self, x, indices, routed):
        session, flat = self.session, routed.ravel().tolist()
        call, computed = None, []
        for arrived in session.residency.bring(self.index, routed, computed, x):
            if arrived.is_all and not self.slots.computes_at_once:
                slots = np.array([arrived.slots[e] for e in flat], np.uint32).reshape(routed.shape)
                slots = session.handover.to_device(slots, indices, arrived.copies)
                y = arrived.bank.experts(x, slots)
            else:
                call = call or self._begin(x, routed.shape, flat, computed)
                call.add(arrived)
        y = call.result() if call else y
        session.residency.left(self.index, y)
        return y

    def _begin(self, x, shape, flat, computed):
        """Begin a call that is computed part by part, as its experts arrive."""
        if self.slots.computes_at_once:
            return PartsAtOnce(self.slots.bank.experts.begin(x, shape), flat)
        return PartsInGraph(self.part, x, shape, flat, computed)

    def _compute_nothing(self):
        self.session.residency.skip(self.index)

    def _without_waiting(self, x, indices):
        session = self.session
        if session.recorder is not None:
            return None
        slots = session.residency.slots_in_graph(self.index, indices)
        if slots is None:
            return None
        session.counters.calls += 1
        y = self.slots.bank.experts(x, slots)
        session.handover.pending = [y]  # y depends on the arrays that were pending
        session.residency.left(self.index, y)
        return y

    def _ask(self, x):
        session = self.session
        asks = session.prefetcher and session.counting.decoding  # a prompt needs nearly all experts
        return session.prefetcher.ask(self.index, x) if asks else []

    def _prefetch_next(self, asked):
        session = self.session
        if not (session.prefetcher and session.counting.decoding):
            return
        guess = session.prefetcher.guess(self.index, asked)
        if guess is not None:
            layer, routed = guess
            session.residency.ahead.prefetch(layer, dict.fromkeys(routed.ravel().tolist()))


class Fused(Stacked):
    """``Stacked`` with gate and up, if they are alike, in one buffer, which saves a gather."""

    gate_with_up = True


class PartsAtOnce:
    """A call whose parts the fast kernels compute, into one array, when their experts arrive.

    ``flat`` has the expert of every (token, expert) pair.
    """

    def __init__(self, call: kernels.ExpertCall | kernels.PlacedExperts, flat: list[int]):
        self._call, self._flat = call, flat
        self._by_address = isinstance(call, kernels.PlacedExperts)

    @cached_property
    def _positions(self):
        return by_expert(self._flat)

    def add(self, arrived: Arrived) -> None:
        """Compute the pairs of experts that have arrived."""
        pairs = range(len(self._flat))
        if not (self._by_address and arrived.is_all):
            pairs = [i for e in arrived.slots for i in self._positions[e]]
        slots = np.array([arrived.slots[self._flat[i]] for i in pairs])
        if self._by_address:
            return self._call.compute(pairs, arrived.bank.addresses[slots])
        self._call.compute(np.array(pairs), slots, arrived.bank.matrices)

    def result(self) -> mx.array:
        """``[..., K, D]``, once all have arrived."""
        return self._call.result()


class PartsInGraph:
    """A call whose parts MLX begins to compute when their experts arrive.

    ``shape``, ``[..., K]``, is that of the call's indices. ``computed`` gets each part's result.
    """

    def __init__(self, part, x, shape, flat, computed):
        self._part, self._rows, self._shape = part, x.reshape(-1, x.shape[-1]), shape
        self._flat, self._positions = flat, by_expert(flat)
        self._computed, self._order = computed, []

    def add(self, arrived: Arrived) -> None:
        """Begin to compute the pairs of experts that have arrived."""
        pairs = [i for e in arrived.slots for i in self._positions[e]]
        slots = [arrived.slots[self._flat[i]] for i in pairs]
        self._order += pairs
        y = self._part(arrived.bank, self._rows, pairs, slots, self._shape[-1], arrived.after)
        mx.async_eval(y)
        self._computed.append(y)

    def result(self) -> mx.array:
        """``[..., K, D]``, once all have arrived."""
        return unsort(self._computed, self._order, self._shape)


def by_expert(flat: list[int]) -> dict[int, list[int]]:
    """The positions of each expert's (token, expert) pairs in a call, in order of first use."""
    positions = {}
    for i, e in enumerate(flat):
        positions.setdefault(e, []).append(i)
    return positions


def unsort(ys: list[mx.array], order: list[int], shape: tuple[int, ...]) -> mx.array:
    """Put rows ``[pairs, 1, D]`` of expert after expert in the call's order, ``[..., K, D]``.

    ``order`` has the positions of the pairs in the call.
    """
    y = ys[0] if len(ys) == 1 else mx.concatenate(ys)
    y = y.squeeze(-2)[kernels.to_mlx(np.argsort(order))]
    return y.reshape(*shape, y.shape[-1])


def expert_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of all experts in layer order, in memory or streamed."""
    streamed = [(m.path, m) for m in model.modules() if isinstance(m, StreamedExperts)]
    return sorted(streamed, key=lambda item: item[1].index) or expert_modules(model)


def moe_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks (router, experts, shared expert) that call the experts, in layer order."""
    modules = dict(model.named_modules())
    return [modules[path.rpartition(".")[0]] for path, _ in expert_layers(model)]
