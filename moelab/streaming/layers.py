"""The MoE layer, once for each mode.

Each is called as mlx-lm's ``SwitchGLU``: ``x [..., D]``, ``indices [..., K]``, returns
``[..., K, D]``. Read them in this order; they are the history of the idea.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..checkpoint import expert_parameters
from .slots import SlotBank, SlotTable, can_fuse


class StreamedExperts(nn.Module):
    """What the modes share: learning the routing, reading, counting.

    Args:
        module (SwitchGLU or SwitchMLP): The experts as mlx-lm built them, not yet read.
        path (str): Their path in the model, for messages.
        layer (int): The number of this MoE layer, from 0.
        session (Session): What all layers of a model share.
    """

    def __init__(self, module, path, layer, session):
        super().__init__()
        self._path, self._layer, self._session = path, layer, session
        held = {name.split(".")[0] for name in expert_parameters(module)}
        for name, child in module.items():
            if name not in held:  # what the family hangs on it may be asked for
                self[name] = child
        self._num_experts = num_experts(module)
        self._last = None  # the last output, which reads the slots until evaluated

    def _bank(self, module, num_slots, fuse=False):
        s = self._session
        resident = {k: v for k, v in s.resident.items() if k.startswith(self._path + ".")}
        return SlotBank(module, self._path, s.located, resident, num_slots, s.dtype, fuse)

    def __call__(self, x, indices):
        session = self._session
        if x.dtype != session.dtype:
            raise TypeError(
                f"{self._path}: expected {session.dtype} activations, got {x.dtype}. "
                "Something before this layer promoted the graph: cast it back."
            )
        mx.eval(indices)  # the one evaluation of a layer: the host learns the routing
        routed = np.array(indices)
        if session.recorder is not None:
            session.recorder.add(self._layer, routed)
        session.counters.calls += 1
        self._last = self._compute(x, routed)
        return self._last

    def _fill(self, places):
        """Read experts: ``[(bank, expert, slot)]``."""
        # Whatever still reads the slots must be evaluated before they change.
        if self._last is not None:
            mx.eval(self._last)
            self._last = None
        with self._session.waiting() as reader:
            reader.read([r for bank, e, slot in places for r in bank.reads(e, slot)])
        for bank, e, slot in places:
            bank.arrived(e, slot)


def num_experts(module):
    """E of a ``SwitchGLU`` or ``SwitchMLP``."""
    return (module.fc1 if "fc1" in module else module.gate_proj).num_experts


class Serial(StreamedExperts):
    """One expert after another: read, compute, into fresh arrays.

    The first ``--stream-experts``: every read waits for the computation before it.
    """

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        self._module = (module,)  # in a tuple, so that mlx does not own its parameters

    def _compute(self, x, routed):
        order, bounds, experts = by_expert(routed)
        rows = x.reshape(-1, x.shape[-1])[mx.array(order // routed.shape[-1])]
        ys = []
        for e, a, b in zip(experts, bounds, bounds[1:]):
            bank = self._bank(self._module[0], 1)
            with self._session.waiting() as reader:
                for read in bank.reads(e, 0):  # one at a time, waiting for each
                    reader.read([read])
            bank.arrived(e, 0)
            self._session.counters.misses += 1
            y = bank.experts(rows[a:b], mx.zeros((b - a, 1), mx.uint32))
            mx.eval(y)
            ys.append(y)
        return unsort(ys, order, routed.shape)


class Buffers(StreamedExperts):
    """One persistent buffer for each top-k position, all reads of a call in flight together.

    SwiftLM PR 26. Nothing is kept from one token to the next but the page cache.
    """

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        self._banks = tuple(self._bank(module, 1) for _ in range(session.top_k))

    def _compute(self, x, routed):
        order, bounds, experts = by_expert(routed)
        rows = x.reshape(-1, x.shape[-1])[mx.array(order // routed.shape[-1])]
        ys = []
        for first in range(0, len(experts), len(self._banks)):
            wave = list(zip(self._banks, experts[first : first + len(self._banks)]))
            self._fill([(bank, e, 0) for bank, e in wave])
            self._session.counters.misses += len(wave)
            for i, (bank, _) in enumerate(wave, first):
                n = bounds[i + 1] - bounds[i]
                ys.append(bank.experts(rows[bounds[i] : bounds[i + 1]], mx.zeros((n, 1), mx.uint32)))
            if len(experts) > len(self._banks):
                mx.eval(ys[first:])  # the buffers are needed again at once
        return unsort(ys, order, routed.shape)


class Stacked(StreamedExperts):
    """S slots in one array for each projection, filled in place; one gather for each.

    SwiftLM PR 90. Experts stay in their slots until others need them. A call that needs
    more experts than there are slots goes in waves that read each of them once.
    """

    fuse = False

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        slots = min(session.config.slots, self._num_experts)
        self._slots = self._bank(module, slots, self.fuse and can_fuse(module))
        self._table = SlotTable(slots, session.config.policy)

    def _compute(self, x, routed):
        flat = routed.ravel().tolist()
        needed = list(dict.fromkeys(flat))
        if len(needed) > self._table.num_slots:
            return self._waves(x, routed)
        hits, misses = self._plan(needed)
        done = None
        if hits and misses and routed.shape[-1] == len(flat) and self._session.overlap:
            # Compute the experts that are there while the others are being read.
            there = [i for i, e in enumerate(flat) if e in hits]
            order = there + [i for i, e in enumerate(flat) if e in misses]
            done = self._gather(x, _slots([flat[i] for i in there], hits, routed.shape))
            mx.async_eval(done)
            flat = [flat[i] for i in order[len(there) :]]
        if misses:
            self._fill([(self._slots, e, slot) for e, slot in misses.items()])
            self._table.commit(misses)
            hits.update(misses)
        y = self._gather(x, _slots(flat, hits, routed.shape))
        if done is None:
            return y
        return mx.concatenate([done, y], axis=-2)[..., mx.array(np.argsort(order)), :]

    def _plan(self, needed):
        hits, misses = self._table.plan(needed)
        self._session.counters.hits += len(hits)
        self._session.counters.misses += len(misses)
        return hits, misses

    def _gather(self, x, slots):
        """The experts' work, spread over the session's streams along K or along rows."""
        streams = self._session.streams
        # Experts are independent: split them and the result is the same bit for bit.
        axis = -1 if slots.ndim < 2 or slots.shape[-1] >= slots.shape[-2] else -2
        parts = np.array_split(np.arange(slots.shape[axis]), min(len(streams), slots.shape[axis]))
        if len(parts) == 1:
            return self._slots.experts(x, slots)
        ys = []
        for stream, part in zip(streams, parts):
            a, b = int(part[0]), int(part[-1]) + 1
            with mx.stream(stream):
                if axis == -1:
                    ys.append(self._slots.experts(x, slots[..., a:b]))
                else:
                    ys.append(self._slots.experts(x[..., a:b, :], slots[..., a:b, :]))
        return mx.concatenate(ys, axis=axis - 1)

    def _waves(self, x, routed):
        K, S = routed.shape[-1], self._table.num_slots
        order, bounds, experts = by_expert(routed, first=self._table.slot_of)
        rows = x.reshape(-1, x.shape[-1])
        ys = []
        for first in range(0, len(experts), S):
            wave = experts[first : first + S]
            held, misses = self._plan(wave)
            self._fill([(self._slots, e, slot) for e, slot in misses.items()])
            self._table.commit(misses)
            held.update(misses)
            a, b = bounds[first], bounds[first + len(wave)]
            sizes = np.diff(bounds[first : first + len(wave) + 1])
            slots = np.repeat(np.array([held[e] for e in wave], np.uint32), sizes)
            y = self._gather(rows[mx.array(order[a:b] // K)], mx.array(slots[:, None]))
            mx.eval(y)  # the next wave takes these slots
            ys.append(y)
        return unsort(ys, order, routed.shape)


def _slots(experts, slot_of, shape):
    """The slots of some experts as indices ``[..., those]``."""
    slots = np.array([slot_of[e] for e in experts], np.uint32)
    return mx.array(slots.reshape(*shape[:-1], -1))


class Fused(Stacked):
    """``Stacked`` with gate and up in one buffer: one gather fewer (SwiftLM PR 90)."""

    fuse = True


def by_expert(routed, first=()):
    """Sort (token, expert) pairs by expert.

    Args:
        routed (np.ndarray): ``[..., K]`` expert of every pair.
        first: Experts to put first, so that those held are used before they must leave.

    Returns:
        tuple: ``order [pairs]`` (positions in ``routed`` flattened), ``bounds`` (where in
        ``order`` each expert begins, and the end) and ``experts``, each once, in order.
    """
    flat = routed.ravel()
    experts = np.unique(flat).tolist()
    experts.sort(key=lambda e: e not in first)
    rank = np.empty(max(experts) + 1, np.int64)
    rank[experts] = np.arange(len(experts))
    order = np.argsort(rank[flat], kind="stable")
    bounds = [0, *np.cumsum(np.bincount(rank[flat], minlength=len(experts))).tolist()]
    return order, bounds, experts


def unsort(ys, order, shape):
    """Put rows computed expert by expert back to ``[..., K, D]``.

    Args:
        ys (list[mx.array]): ``[pairs of some experts, 1, D]`` each, in the order of ``order``.
        order (np.ndarray): As ``by_expert`` returned it.
        shape (tuple): ``[..., K]``.
    """
    y = ys[0] if len(ys) == 1 else mx.concatenate(ys)
    y = y.squeeze(-2)[mx.array(np.argsort(order))]
    return y.reshape(*shape, y.shape[-1])


LAYERS = {"serial": Serial, "buffers": Buffers, "stacked": Stacked, "fused": Fused}
