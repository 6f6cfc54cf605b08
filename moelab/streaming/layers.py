"""The MoE layer, once for each mode.

Each is called as mlx-lm's ``SwitchGLU``: ``x [..., D]``, ``indices [..., K]``, returns
``[..., K, D]``. Read them in this order; they are the history of the idea.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..checkpoint import expert_parameters
from .prefetch import Job
from .slots import SlotBank, SlotTable, can_fuse

# Where reads take so long, what is there is computed meanwhile ...
OVERLAP_S = 1e-3
# ... and what comes is computed in parts of about so many bytes.
PART_NBYTES = 2 * 1024 * 1024
# What several threads read in less time, one reads as soon.
HANDOVER_S = 1e-4
# On CUDA the number of rows decides how MLX rounds. gather_qmm takes gather_qmv for fewer than 8
# rows; gather_mm takes another kernel where rows are sorted, and SwitchGLU sorts 64 and more.
QUANTIZED_ROWS, DENSE_ROWS = 8, 64


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
        self.path, self.index, self.session = path, layer, session
        parameters = expert_parameters(module)
        held = {name.split(".")[0] for name in parameters}
        for name, child in module.items():
            if name not in held:  # what the family hangs on it may be asked for
                self[name] = child
        quantized = all(f"{linear}.scales" in parameters for linear in held)
        self._least_rows = QUANTIZED_ROWS if quantized else DENSE_ROWS
        self.num_experts = num_experts(module)
        self.probe = None  # takes the indices of a call in place of computing it

    def _bank(self, module, num_slots, fuse=False):
        s = self.session
        resident = {k: v for k, v in s.resident.items() if k.startswith(self.path + ".")}
        return SlotBank(module, self.path, s.located, resident, num_slots, fuse)

    def __call__(self, x, indices):
        if self.session.is_in_call:
            return self._call(x, indices)
        with self.session.call():  # a layer by itself
            return self._call(x, indices)

    def _call(self, x, indices):
        session = self.session
        if x.dtype != session.dtype:
            raise TypeError(
                f"{self.path}: expected {session.dtype} activations, got {x.dtype}. "
                "Something before this layer promoted the graph: cast it back."
            )
        if self.probe is not None:
            self.probe(indices)
            return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)
        asked = self._ask(x)
        # The one evaluation of a layer: the host learns the routing. The output before this one
        # still reads its slots until it is evaluated; by now it nearly always is.
        mx.eval(indices, session.pending, asked)
        session.pending = []
        routed = np.array(indices)
        if routed.shape[-1] > session.top_k:
            raise ValueError(
                f"{self.path}: expected at most {session.top_k} experts per token (StreamConfig.top_k), "
                f"its router chose {routed.shape[-1]}: mlx-lm does not let this family choose fewer. "
                f"Load it with top_k={routed.shape[-1]}."
            )
        if session.recorder is not None:
            session.recorder.add(self.index, routed)
        session.counters.calls += 1
        y = self._compute(x, routed)
        session.pending = [y]
        if len(session.streams) == 1:  # with more, no core is free meanwhile
            mx.async_eval(y)  # it runs while Python writes the graph of what follows
        self._prefetch(asked)
        return y

    def recover(self):
        """Be ready for the next call after one that an exception ended; no thread reads any more."""
        self.probe = None

    def _ask(self, x):
        return []

    def _prefetch(self, asked):
        pass

    def _one(self, bank, rows, pairs, top_k):
        """One expert, the only one of its bank, for the pairs that want it."""
        return self._part(bank, rows, pairs, [0] * len(pairs), top_k)

    def _part(self, bank, rows, pairs, slots, top_k):
        """Some of a call's (token, expert) pairs, with the kernels that the whole call would get."""
        n = len(pairs)
        if on_cuda():  # repeat the last pair until there are rows enough
            more = min(len(rows) * top_k, self._least_rows) - n
            pairs, slots = pairs + pairs[-1:] * more, slots + slots[-1:] * more
        y = bank.experts(rows[mx.array(pairs) // top_k], mx.array(slots, mx.uint32)[:, None])
        return y[:n] if len(pairs) > n else y


def on_cuda():
    """Whether MLX's CUDA kernels compute."""
    return mx.cuda.is_available() and mx.default_device() == mx.gpu


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
        positions = by_expert(routed.ravel().tolist())
        rows = x.reshape(-1, x.shape[-1])
        ys, order = [], []
        for e, pairs in positions.items():
            bank = self._bank(self._module[0], 1)
            with self.session.waiting() as reader:
                for read in bank.reads(e, 0):  # one at a time, waiting for each
                    reader.read([read])
            bank.arrived(e, 0)
            self.session.counters.misses += 1
            y = self._one(bank, rows, pairs, routed.shape[-1])
            mx.eval(y)
            ys.append(y)
            order += pairs
        return unsort(ys, order, routed.shape)


class Buffers(StreamedExperts):
    """One persistent buffer for each top-k position, all reads of a call in flight together.

    SwiftLM PR 26. Nothing is kept from one token to the next but the page cache.
    """

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        self._banks = tuple(self._bank(module, 1) for _ in range(session.top_k))

    def _compute(self, x, routed):
        positions = by_expert(routed.ravel().tolist())
        rows = x.reshape(-1, x.shape[-1])
        experts = list(positions)
        ys, order = [], []
        for first in range(0, len(experts), len(self._banks)):
            mx.eval(ys)  # the buffers are needed again
            for bank, e in self.bring(experts[first : first + len(self._banks)]):
                ys.append(self._one(bank, rows, positions[e], routed.shape[-1]))
                order += positions[e]
        return unsort(ys, order, routed.shape)

    def bring(self, experts):
        """Read experts, at most K, into the buffers.

        Returns:
            list[tuple]: Each buffer with its expert.
        """
        wave = list(zip(self._banks, experts))
        with self.session.waiting() as reader:
            reader.read([r for bank, e in wave for r in bank.reads(e, 0)])
        self.session.counters.misses += len(wave)
        for bank, e in wave:
            bank.arrived(e, 0)
        return wave


class Stacked(StreamedExperts):
    """S slots in one array for each projection, filled in place; one gather for each.

    SwiftLM PR 90. Experts stay in their slots until others need them, pinned ones for good.
    A call that needs more experts than there are slots goes in waves that read each once.
    """

    fuse = False

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        slots = min(session.config.slots, self.num_experts)
        pinned = session.pinned[layer]
        self.bank = self._bank(module, slots + len(pinned), self.fuse and can_fuse(module))
        self.table = SlotTable(slots, session.config.policy, pinned)
        pinned = self.table.pinned.items()
        session.reader.read([r for e, slot in pinned for r in self.bank.reads(e, slot)])
        for e, slot in pinned:
            self.bank.arrived(e, slot)
        self.job = None  # what is being read ahead for this layer
        self.routed = None  # the experts of the last call

    def recover(self):
        super().recover()
        self.job = None
        self.table.recover()

    def _ask(self, x):
        session = self.session
        return (
            session.prefetcher.ask(self.index, x) if session.prefetcher and session.decoding else []
        )

    def _prefetch(self, asked):
        session = self.session
        if not (session.prefetcher and session.decoding):  # a prompt needs nearly all of them
            return
        guess = session.prefetcher.guess(self.index, asked)
        if guess is not None:
            layer, routed = guess
            session.layers[layer].read_ahead(list(dict.fromkeys(routed.ravel().tolist())))

    def read_ahead(self, experts):
        """Begin to read those of some experts that are not held; a long list is not worth it.

        Args:
            experts (list[int]): Distinct.
        """
        if self.job is not None or not self.table.fits(experts):
            return
        if len(self.session.layers) == 1:  # else another layer has been called since
            mx.eval(self.session.pending)
        slots = self.table.reserve(experts)
        if not slots:
            return
        session = self.session
        session.counters.prefetch_issued += len(slots)
        self.job = Job(session.reader, self.bank, slots)
        quick = session.reader.expected_s(len(slots) * self.bank.expert_nbytes) < HANDOVER_S
        session.reader.ahead(self.job.run, 1 if quick else len(slots))

    def _settle(self, needed):
        """Hold what was read ahead, and count what it was worth to this call."""
        if self.job is None:
            return
        crowded = not self.table.fits(needed, self.job.num_slots)
        arrived, free, done = self.job.settle(set(needed), crowded)
        c = self.session.counters
        for e, (slot, took_s, waited_s) in arrived.items():
            self.table.keep(e, slot)
            if e in needed:
                c.prefetch_used += 1
                c.prefetch_late += waited_s > 0
                c.prefetch_saved_s += max(0.0, took_s - waited_s)
                c.wait_s += waited_s
            else:
                c.prefetch_wasted += 1
        self.table.release(free)
        if done:
            self.job = None

    def _compute(self, x, routed):
        flat = routed.ravel().tolist()
        needed = list(dict.fromkeys(flat))
        self.routed = routed
        self._settle(needed)
        if self.table.fits(needed):
            held, misses = self._plan(needed)
            read_s = self.session.reader.expected_s(len(misses) * self.bank.expert_nbytes)
            if not misses or read_s < OVERLAP_S or not self.session.overlap:
                self._fill(misses)
                held.update(misses)
                slots = np.array([held[e] for e in flat], np.uint32)
                return self._gather(x, mx.array(slots.reshape(routed.shape)))
            waves = ((held, misses),)
        else:
            waves = (self._plan(wave) for wave in self.table.waves(needed))
        return self._in_parts(x, flat, routed.shape, waves)

    def _gather(self, x, slots):
        """The experts' work, spread over the session's streams along K or along rows."""
        streams = self.session.streams
        if len(streams) == 1:
            return self.bank.experts(x, slots)
        # Experts are independent: split them and the result is the same bit for bit.
        axis = -1 if slots.ndim < 2 or slots.shape[-1] >= slots.shape[-2] else -2
        n = min(len(streams), slots.shape[axis])
        if n == 1:
            return self.bank.experts(x, slots)
        ys = []
        # The first stream has the rest of the model to do: the larger parts go to the last.
        for i, stream in enumerate(streams[::-1][:n]):
            a, b = (-(-slots.shape[axis] * j // n) for j in (i, i + 1))
            with mx.stream(stream):
                if axis == -1:
                    ys.append(self.bank.experts(x, slots[..., a:b]))
                else:
                    ys.append(self.bank.experts(x[..., a:b, :], slots[..., a:b, :]))
        return mx.concatenate(ys, axis=axis - 1)

    def _in_parts(self, x, flat, shape, waves):
        """Compute what is there while the rest is being read, part by part."""
        positions = by_expert(flat)
        streams = self.session.streams
        ys, order, work = [], [], [0] * len(streams)
        for held, misses in waves:
            mx.eval(ys)  # this wave takes the slots of the last one
            parts = self._parts(misses)
            reading = [self._begin(part) for part in parts]
            for part, reads in zip([held, *parts], [None, *reading]):
                if reads is not None:
                    self._finish(part, reads)
                shares = [[] for _ in streams]
                for e in part:  # to the stream with least to do; the first has the model's rest
                    i = min(range(len(streams)), key=lambda i: (work[i], -i))
                    shares[i].append(e)
                    work[i] += len(positions[e])
                for stream, share in zip(streams, shares):
                    if share:
                        pairs = [i for e in share for i in positions[e]]
                        slots = [part[flat[i]] for i in pairs]
                        with mx.stream(stream):  # all of it: a stream waits for others' work
                            rows = x.reshape(-1, x.shape[-1])
                            y = self._part(self.bank, rows, pairs, slots, shape[-1])
                        mx.async_eval(y)
                        ys.append(y)
                        order += pairs
        return unsort(ys, order, shape)

    def _parts(self, misses):
        # Large enough that a part's read is worth a pause, small enough to hide it.
        size = max(len(self.session.streams), PART_NBYTES // self.bank.expert_nbytes)
        misses = list(misses.items())
        return [dict(misses[i : i + size]) for i in range(0, len(misses), size)]

    def _plan(self, needed):
        hits, misses = self.table.plan(needed)
        self.session.counters.hits += len(hits)
        self.session.counters.misses += len(misses)
        return hits, misses

    def _begin(self, misses):
        """Begin to read experts into the slots that ``_plan`` chose."""
        return self.session.reader.start(
            [r for e, slot in misses.items() for r in self.bank.reads(e, slot)]
        )

    def _finish(self, misses, reads):
        """Wait for what ``_begin`` began, and hold it."""
        with self.session.waiting():
            self.session.reader.finish(reads)
        for e, slot in misses.items():
            self.bank.arrived(e, slot)
        self.table.commit(misses)

    def bring(self, experts):
        """Have distinct experts, at most S, in their slots."""
        self._fill(self._plan(experts)[1])

    def _fill(self, misses):
        if misses:
            with self.session.waiting():
                reads = self._begin(misses)
            self._finish(misses, reads)


class Fused(Stacked):
    """``Stacked`` with gate and up in one buffer: one gather fewer (SwiftLM PR 90)."""

    fuse = True


def by_expert(flat):
    """The (token, expert) pairs of each expert.

    Args:
        flat (list[int]): The expert of every pair.

    Returns:
        dict[int, list[int]]: The positions in ``flat`` of every expert, in order of
        first use.
    """
    positions = {}
    for i, e in enumerate(flat):
        positions.setdefault(e, []).append(i)
    return positions


def unsort(ys, order, shape):
    """Put rows computed expert by expert back to ``[..., K, D]``.

    Args:
        ys (list[mx.array]): ``[pairs of some experts, 1, D]`` each.
        order (list[int]): The pairs in the order of ``ys``.
        shape (tuple): ``[..., K]``.
    """
    y = ys[0] if len(ys) == 1 else mx.concatenate(ys)
    y = y.squeeze(-2)[mx.array(np.argsort(order))]
    return y.reshape(*shape, y.shape[-1])


LAYERS = {"serial": Serial, "buffers": Buffers, "stacked": Stacked, "fused": Fused}
