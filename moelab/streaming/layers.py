"""The MoE layer: it evaluates its routing, asks for the experts and computes with them.

A layer takes the place of mlx-lm's ``SwitchGLU``: ``x [..., D]`` and ``indices [..., K]`` give
``[..., K, D]``.
"""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from ..experts import expert_modules, expert_parameters, num_experts
from ..system import on_cuda, on_metal
from .facts import FEW_TOKENS
from .fused import SORTED_ROWS, can_fuse
from .residency.bank import SlotBank
from .residency.layer import LayerSlots
from .residency.residency import Arrived, Pairs
from .session import Session


def kernel_rows(size: int, E: int, S: int, quantized: bool) -> tuple[int, int]:
    """Fewest and most rows that S slots compute with the kernel for ``size`` rows of E experts."""
    # On a GPU the number of rows decides MLX's kernel, and so its rounding. gather_qmm runs
    # gather_qmv on CUDA for fewer than 8 rows, and gather_qmm_rhs on Metal for at least 4 sorted
    # rows for each matrix. On both, gather_mm runs another kernel for sorted rows.
    if on_cuda():
        return min(size, 8 if quantized else SORTED_ROWS), size
    if not on_metal():
        return 1, size
    many, of_all = (max(SORTED_ROWS, 4 * n if quantized else 0) for n in (S, E))
    return (many, size) if size >= of_all else (1, many - 1)


class StreamedExperts(nn.Module):
    """The base of streaming layers. A layer replaces ``module``, whose weights are not read."""

    def __init__(self, module: nn.Module, path: str, layer: int, session: Session):
        super().__init__()
        self.path, self.index, self.session = path, layer, session
        parameters = expert_parameters(module)
        linears = {name.split(".")[0] for name in parameters}
        for name, child in module.items():
            if name not in linears:  # a family's code may use the module's other attributes
                self[name] = child
        self.quantized = all(f"{linear}.scales" in parameters for linear in linears)
        self.num_experts = num_experts(module)
        self.input_dims = module["fc1" if "fc1" in module else "gate_proj"].input_dims
        # With ranks: which rank owns each expert, ``[E]``, and which experts are this rank's.
        self._owners = self.owned = None
        if session.ranks:
            self._owners = session.ranks.owners(self.num_experts)
            self.owned = self._owners == session.ranks.rank
        # A prefetcher sets a function here while it asks the router. A call then gives the function
        # the router's indices and computes nothing. The session clears it after an interrupt.
        self.probe = None
        # Makes a bank of S slots. It does not refer to this layer: no cycle keeps a deleted model.
        self._take_bank = partial(SlotBank, module, path, session.located, session.resident)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if self.probe is not None:
            self.probe(indices)
            return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)
        return self._in_call(self._call, x, indices)

    def _in_call(self, compute, *args):
        if self.session.is_in_call:
            return compute(*args)
        with self.session.call():  # the layer is called by itself, outside the model
            return compute(*args)

    def _call(self, x, indices):
        session = self.session
        # Some families in half precision give their experts float32: MLX then computes in float32.
        # A float32 model may keep bfloat16 scales in slots. MLX would round differently with such
        # scales if activations had another type.
        if x.dtype != session.dtype == mx.float32:
            raise TypeError(
                f"{self.path}: expected {session.dtype} activations, got {x.dtype}. "
                "Something before this layer changed the type of the activations: cast them back."
            )
        if (y := self._without_waiting(x, indices)) is not None:
            return y
        asked = self._ask(x) if session.residency.prefetches else []
        routed = session.routing(indices, asked)
        session.count(self.index, routed)
        if session.ranks is None:
            y = self._compute(x, indices, routed, asked)
            pending = [y]
            if session.fast_experts and routed.size > FEW_TOKENS * session.top_k:
                mx.eval(y)  # the fast kernels computed it already
                pending = []  # else the prompt's large output would stay in memory
        else:
            y, *pending = self._compute_owned(x, indices, routed, asked)
        session.handover.pending = pending
        mx.async_eval(pending)  # compute while Python builds the graph of the next layers
        return y

    def _compute_owned(self, x, indices, routed, asked):
        """Compute the (token, expert) pairs of this rank's experts, and join all ranks' results."""
        flat = routed.ravel()
        mine = np.flatnonzero(self.owned[flat])
        y = None
        if len(mine):
            # A GPU may compute these rows in one call. ``Parts`` pads no such call, so pad here.
            E = self.num_experts
            least = kernel_rows(flat.size, E, E, self.quantized)[0]
            pairs = np.append(mine, mine[-1:].repeat(max(0, least - len(mine))))
            rows = x.reshape(-1, x.shape[-1])[kernels.to_mlx(pairs // routed.shape[-1])]
            some = indices.reshape(-1)[: len(pairs), None]  # only the shape matters
            y = self._compute(rows, some, flat[pairs][:, None], asked, flat.size)[: len(mine), 0]
        else:
            self._compute_nothing(asked)
        row = x.shape[-1], x.dtype  # a rank that computes no pair cannot know these
        return self.session.ranks.join(y, self._owners[routed], routed, row, self.path)

    def _compute_nothing(self, asked):
        """Finish a call that needs no expert of this rank."""

    def _without_waiting(self, x, indices):
        """Compute a call whose routing the host need not know; return None for other calls."""

    def _ask(self, x):
        session = self.session
        # A prompt needs nearly all experts, so none are guessed.
        return session.prefetcher.ask(self.index, x) if session.counting.decoding else []


class Stacked(StreamedExperts, kernels.FastExperts):
    """Keeps S slots; a call is one gathered matmul for each projection (as in SwiftLM's PR 90).

    Mode ``fused`` joins gate and up into one matrix if both are alike and lie side by side.
    """

    known_call = StreamedExperts.__call__

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        take = partial(self._take_bank, fuse=session.config.mode == "fused" and can_fuse(module))
        given = self.num_experts, self.owned, session.config, session.reader, session.counting
        self.slots = LayerSlots(take, *given)
        session.residency.layers.append(self.slots)

    def read(self, experts: list[int]) -> None:
        """Read at most S distinct experts into slots as a call does; compute nothing."""
        self.slots.report()
        self.slots.collect(experts)
        self.slots.read(self.slots.choose(experts)[1])

    def all_matrices(self):
        """The matrices of all slots, for a block's kernels; None: the block must call the layer."""
        if self.session.ranks or not self.slots.computes_at_once or self.probe is not None:
            return None
        return self.slots.bank.experts.all_matrices()

    def forward(self, x, routed, placed=None):
        session = self.session
        if not session.is_in_call:
            return self._in_call(self.forward, x, routed, placed)
        call = kernels.call_for(self.all_matrices(), x, routed.shape, placed)
        if call is None:
            return None
        session.settle()
        session.count(self.index, routed)
        pairs, asked = Pairs(routed), self._ask(x) if session.residency.prefetches else ()
        for arrived in self._bring(None, pairs, asked):
            call.compute(*pairs.of(arrived))
        return call.y

    @property
    def expects(self):
        return self.session.prefetcher.asks_early if self.session.prefetcher else 0

    @property
    def expecting(self):
        return self.session.residency.prefetches and self.expects > 0

    def expect(self, likely, probability):
        if self.session.is_in_call:
            guess = self.session.prefetcher.choose(self.index, likely, probability)
            self.session.residency.prefetch(self.index, *guess)

    def _bring(self, x, pairs, asked, computed=()):
        """Yield a call's experts as they arrive, and start the reads of guessed experts."""
        session = self.session
        guesses = session.residency.prefetches
        if guesses and self.expects:
            session.prefetcher.learn(self.index, {*pairs.needed})
        alone = len(session.residency.layers) == 1  # a guess would take this call's slots
        for arrived in session.residency.bring(self.index, pairs, computed, x):
            if guesses and not alone:
                self._prefetch_next(asked)
                guesses = False
            yield arrived
        if guesses:
            self._prefetch_next(asked)

    def _prefetch_next(self, asked):
        session = self.session
        if session.counting.decoding and (guess := session.prefetcher.guess(self.index, asked)):
            layer, routed = guess
            session.residency.prefetch(layer, dict.fromkeys(routed.ravel().tolist()))

    def _compute(self, x, indices, routed, asked, size=0):
        session, experts = self.session, self.slots.bank.experts
        at_once = self.slots.computes_at_once
        fast = at_once and experts.matrices_for(x) is not None
        parts, call, y = Parts(x, routed, self, size), None, None
        for arrived in self._bring(x, parts, asked, parts.computed):
            if fast:
                call = call or experts.begin(x, routed.shape)
                places, slots = parts.of(arrived)
                call.compute(places, slots)
            elif arrived.is_all and routed.size <= parts.rows(arrived.bank)[1]:
                slots = parts.of(arrived)[1].astype(np.uint32).reshape(routed.shape)
                slots = session.handover.to_device(slots, indices, arrived.copies)
                y = experts(x, slots)
            else:
                mx.async_eval(parts.add(arrived))
            if at_once and not fast:
                mx.eval(parts.computed if y is None else y)
        if y is None:
            y = (call or parts).result()
        session.residency.left(self.index, y)
        return y

    def _compute_nothing(self, asked):
        self.slots.collect(())
        if self.session.residency.prefetches:
            self._prefetch_next(asked)

    def _without_waiting(self, x, indices):
        session = self.session
        if session.recorder is not None:
            return None
        if (slots := session.residency.slots_in_graph(self.index, indices)) is None:
            return None
        session.counting.now.calls += 1
        y = self.slots.bank.experts(x, slots)
        session.handover.pending = [y]  # y depends on the arrays that were pending
        session.residency.left(self.index, y)
        return y


class Parts(Pairs):
    """Pairs that MLX computes part by part into ``computed``; ``size``: the pairs of all ranks."""

    def __init__(self, x: mx.array, routed: np.ndarray, layer: StreamedExperts, size: int = 0):
        super().__init__(routed)
        self._x, self._of_all = x, (size or self.size, layer.num_experts)
        self._quantized = layer.quantized
        self.computed, self._order = [], []

    def rows(self, bank: SlotBank) -> tuple[int, int]:
        """The fewest and most rows of a call with a bank's slots (see ``kernel_rows``)."""
        return kernel_rows(*self._of_all, bank.num_slots, self._quantized)

    def add(self, arrived: Arrived) -> list[mx.array]:
        """Compute the pairs of arrived experts, with the kernel that the whole call would take."""
        pairs, slots = self.of(arrived)
        self._order += pairs.tolist()
        (least, most), before = self.rows(arrived.bank), len(self.computed)
        for first in range(0, len(pairs), most):
            part, its = (a[first : first + most] for a in (pairs, slots))
            n, rows = len(part), self._x.reshape(-1, self._x.shape[-1])
            more = max(0, least - n)  # repeat the last pair until there are enough rows
            part, its = (np.append(a, a[-1:].repeat(more)) for a in (part, its))
            its = kernels.to_mlx(its.astype(np.uint32))
            its = its if arrived.after is None else its + arrived.after
            part = kernels.to_mlx(part.astype(np.int32))
            y = arrived.bank.experts(rows[part // self.shape[-1]], its[:, None])
            self.computed.append(mx.contiguous(y[:n]) if more else y)  # a copy, to free y
        return self.computed[before:]

    def result(self) -> mx.array:
        """Return ``[..., K, D]``, once all experts have arrived."""
        y = self.computed[0] if len(self.computed) == 1 else mx.concatenate(self.computed)
        y = y.squeeze(-2)[kernels.to_mlx(np.argsort(self._order))]
        return y.reshape(*self.shape, y.shape[-1])


class Buffers(StreamedExperts):
    """Reads K experts at a time into K buffers, anew for each token (as in SwiftLM's PR 26).

    Mode ``serial`` takes one expert at a time (as SwiftLM's ``--stream-experts`` did at first).
    """

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        self._bank = self._take_bank(1 if session.config.mode == "serial" else session.top_k)

    def _compute(self, x, indices, routed, asked, size=0):
        parts, K = Parts(x, routed, self, size), self._bank.num_slots
        experts = parts.needed
        for first in range(0, len(experts), K):
            mx.eval(parts.computed)  # the buffers are about to be overwritten
            for e, buffer in self.read(experts[first : first + K]).items():
                parts.add(Arrived({e: buffer}, self._bank))
        return parts.result()

    def read(self, experts: list[int]) -> dict[int, int]:
        """Read at most K distinct experts as a call does; return the buffer of each."""
        buffers, reader = {e: i for i, e in enumerate(experts)}, self.session.reader
        read = reader.read_in_turn if self.session.config.mode == "serial" else reader.read
        with self.session.counting.read_wait():
            read(self._bank.reads(buffers))
        self.session.counting.now.misses += len(buffers)
        for e, buffer in buffers.items():
            self._bank.arrived(e, buffer)
        return buffers


def expert_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of each layer's experts, in memory or streamed, in layer order."""
    streamed = [(m.path, m) for m in model.modules() if isinstance(m, StreamedExperts)]
    return sorted(streamed, key=lambda item: item[1].index) or expert_modules(model)
