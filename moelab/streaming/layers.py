"""The MoE layer, one class for each mode, in the order in which the ideas came up.

A layer takes the place of mlx-lm's ``SwitchGLU`` and is called like it: ``x [..., D]`` and
``indices [..., K]`` give ``[..., K, D]``. Each call evaluates the indices, reads the experts that
are not in memory (``Reader``) into the layer's slots (``SlotBank``) and computes with those.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain, islice
from time import perf_counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..experts import expert_modules, expert_parameters, num_experts
from ..memory import memory_available
from .cuda import BLOCK_NBYTES, MAILBOX_SIZE, MAX_COPIES, NUM_BLOCKS, on_cuda
from .plan import FEW_TOKENS
from .prefetch import Job
from .session import Session
from .slots import SlotBank, SlotTable, can_fuse, can_lend

# Seconds. Overlap compute with reads only when the reads should take at least this long.
OVERLAP_S = 1e-3
# Bytes. With overlap, experts are computed in parts of about this size as they arrive.
PART_NBYTES = 2 * 1024 * 1024
# Parts of a wave at most with the fast kernels. They compute an expert so fast that what a part
# costs beside its arithmetic shows.
NUM_PARTS = 8
# Bytes. Where a GPU copies, experts are read in parts of about this size: two parts fit into the
# blocks of pinned memory.
COPIED_NBYTES = NUM_BLOCKS * BLOCK_NBYTES // 3
# A prompt lets the system read ahead if it has so many (token, expert) pairs for each expert, and
# if the layer before needed at least this share of its experts.
AHEAD_PAIRS, AHEAD_SHARE = 2, 0.5
# Seconds. Below this predicted read time one prefetch thread is enough: handing the work to more
# threads would take as long as the reads.
HANDOVER_S = 1e-4
# Rows (token, expert pairs) of a call. On CUDA they decide which kernel MLX takes, and so how it
# rounds: gather_qmm takes gather_qmv for fewer than 8 rows, and gather_mm takes another kernel for
# sorted rows, which SwitchGLU makes of 64 rows or more.
QUANTIZED_ROWS, DENSE_ROWS = 8, 64


class StreamedExperts(nn.Module):
    """What all modes share: evaluate the routing, read, count.

    Args:
        module (SwitchGLU or SwitchMLP): The experts as mlx-lm built them, weights not read.
        path (str): Their path in the model.
        layer (int): The number of this MoE layer, from 0.
        session (Session): What all layers of a model share.

    Attributes:
        path (str): As above.
        index (int): ``layer``, as above.
        session (Session): As above.
        num_experts (int): E.
        owned (np.ndarray or None): ``[E]``, the experts of this rank; None without ranks.
        probe (Callable or None): If set, a call hands the indices to it and computes nothing: a
            prefetcher asks the router. Not a hook, because ``recover`` has to remove it after an
            interrupt at any line.
    """

    def __init__(self, module: nn.Module, path: str, layer: int, session: Session):
        super().__init__()
        self.path, self.index, self.session = path, layer, session
        parameters = expert_parameters(module)
        linears = {name.split(".")[0] for name in parameters}
        for name, child in module.items():
            if name not in linears:  # a family's code may use what else it put on the module
                self[name] = child
        quantized = all(f"{linear}.scales" in parameters for linear in linears)
        self._least_rows = QUANTIZED_ROWS if quantized else DENSE_ROWS
        self.num_experts = num_experts(module)
        # [E], with ranks: whose each expert is, and whether it is this one's. Then D and the type
        # of a row, for a rank that has none.
        self._owners = self.owned = None
        if session.ranks:
            self._owners = session.ranks.owners(self.num_experts, layer)
            self.owned = session.ranks.owned(self.num_experts, layer)
        last = module["fc2" if "fc2" in linears else "down_proj"]
        self._row = last.output_dims, session.dtype
        self.probe = None

    def _bank(self, module, num_slots, fuse=False):
        s = self.session
        resident = {k: v for k, v in s.resident.items() if k.startswith(self.path + ".")}
        return SlotBank(module, self.path, s.located, resident, num_slots, fuse)

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
        if routed.shape[-1] > session.top_k:
            raise ValueError(
                f"{self.path}: expected at most {session.top_k} experts per token "
                f"(StreamConfig.top_k), its router chose {routed.shape[-1]}: mlx-lm does not let "
                f"this family choose fewer. Load it with top_k={routed.shape[-1]}."
            )
        if session.recorder is not None:
            session.recorder.add(self.index, routed)
        session.counters.calls += 1
        if session.ranks is None:
            y = self._compute(x, indices, routed)
            session.pending = [y]
            if session.fast_experts and routed.size > FEW_TOKENS * session.top_k:
                mx.eval(y)  # the fast kernels did it already
                session.pending = []  # so that nothing here keeps a prompt's, which is large
        else:
            y, after = self._compute_owned(x, indices, routed)
            session.pending = [after]
        mx.async_eval(session.pending)  # compute while Python builds the graph of what follows
        self._prefetch_next(asked)
        return y

    def _compute_owned(self, x, indices, routed):
        """Compute the (token, expert) pairs of this rank's experts, and join those of all ranks."""
        flat = routed.ravel()
        mine = np.flatnonzero(self.owned[flat])
        y = None
        if len(mine):
            # On CUDA enough rows for the kernel of the whole call, as in ``_part``.
            more = max(0, min(flat.size, self._least_rows) - len(mine)) if on_cuda() else 0
            pairs = np.append(mine, mine[-1:].repeat(more))
            rows = x.reshape(-1, x.shape[-1])[mx.array(pairs // routed.shape[-1])]
            some = indices.reshape(-1)[: len(pairs), None]  # for its shape
            y = self._compute(rows, some, flat[pairs][:, None])[: len(mine), 0]
        else:
            self._compute_nothing()
        return self.session.ranks.join(y, self._owners[routed], routed, self._row, self.path)

    def _compute_nothing(self):
        pass

    def expect(self, tokens: int) -> None:
        """Get ready for a prompt, before the layers in front of this one are computed.

        Args:
            tokens (int): Its length.
        """

    def recover(self) -> None:
        """Make the layer usable after a call that an exception ended. No read may be running."""
        self.probe = None

    def count(self) -> None:
        """Count what only the GPU knows so far."""

    def _without_waiting(self, x, indices):
        """Compute a call whose routing the host need not know, else return None."""
        return None

    def _ask(self, x):
        return []

    def _prefetch_next(self, asked):
        pass

    def _one(self, bank, rows, pairs, top_k):
        """Compute one expert, the only one of its bank, for the pairs that chose it."""
        return self._part(bank, rows, pairs, [0] * len(pairs), top_k)

    def _part(self, bank, rows, pairs, slots, top_k, zero=None):
        """Compute some of a call's (token, expert) pairs with the kernels of the whole call.

        ``zero`` is an array that holds a zero: they are computed after it.
        """
        n = len(pairs)
        if on_cuda():  # repeat the last pair until there are enough rows for the same kernel
            more = min(len(rows) * top_k, self._least_rows) - n
            pairs, slots = pairs + pairs[-1:] * more, slots + slots[-1:] * more
        slots = mx.array(slots, mx.uint32)
        slots = slots if zero is None else slots + zero
        y = bank.experts(rows[mx.array(pairs) // top_k], slots[:, None])
        return y[:n] if len(pairs) > n else y


class Serial(StreamedExperts):
    """Read and compute one expert after another, each into new arrays.

    SwiftLM's first ``--stream-experts``: every read waits for the computation before it.
    """

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        self._module = (module,)  # in a tuple, so that its parameters are not the model's

    def _compute(self, x, indices, routed):
        positions = by_expert(routed.ravel().tolist())
        rows = x.reshape(-1, x.shape[-1])
        ys, order = [], []
        for e, pairs in positions.items():
            bank = self._bank(self._module[0], 1)
            with self.session.waiting() as reader:
                for read in bank.reads({e: 0}):  # one read in flight at a time
                    reader.read([read])
            bank.arrived(e, 0)
            self.session.counters.misses += 1
            y = self._one(bank, rows, pairs, routed.shape[-1])
            mx.eval(y)
            ys.append(y)
            order += pairs
        return unsort(ys, order, routed.shape)


class Buffers(StreamedExperts):
    """One buffer for each top-k position, kept for good; all reads of a call in flight together.

    SwiftLM PR 26. From one token to the next only the page cache keeps experts.
    """

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        self._banks = tuple(self._bank(module, 1) for _ in range(session.top_k))

    def _compute(self, x, indices, routed):
        positions = by_expert(routed.ravel().tolist())
        rows = x.reshape(-1, x.shape[-1])
        experts = list(positions)
        ys, order = [], []
        for first in range(0, len(experts), len(self._banks)):
            mx.eval(ys)  # the buffers are about to be overwritten
            for bank, e in self.bring(experts[first : first + len(self._banks)]):
                ys.append(self._one(bank, rows, positions[e], routed.shape[-1]))
                order += positions[e]
        return unsort(ys, order, routed.shape)

    def bring(self, experts: list[int]) -> list[tuple[SlotBank, int]]:
        """Read experts into the buffers, as a call does, and compute nothing.

        Args:
            experts (list[int]): Distinct, at most K.

        Returns:
            list[tuple[SlotBank, int]]: Each buffer with its expert.
        """
        wave = list(zip(self._banks, experts))
        with self.session.waiting() as reader:
            reader.read([r for bank, e in wave for r in bank.reads({e: 0})])
        self.session.counters.misses += len(wave)
        for bank, e in wave:
            bank.arrived(e, 0)
        return wave


class Stacked(StreamedExperts):
    """S slots in one array for each projection, filled in place; one gather for each projection.

    SwiftLM PR 90. An expert stays in its slot until it is evicted. A call that needs more experts
    than there are slots is computed in waves, which read each expert once.

    Attributes:
        bank (SlotBank): The bytes of the slots.
        table (SlotTable): Which expert is in which slot.
        host (HostExperts or None): With ``StreamConfig(source="host")``: the layer's experts, of
            which the GPU brings those into its slots that it needs.
        job (Job or None): What is being prefetched for this layer.
    """

    gate_with_up = False  # not named ``fuse``: mlx_lm.fuse takes such a module for an adapter

    def __init__(self, module, path, layer, session):
        super().__init__(module, path, layer, session)
        self._module = (module,)  # in a tuple, so that its parameters are not the model's
        self.host = None
        self.take(session.config.slots)

    def take(self, slots: int) -> None:
        """Take memory for so many slots in place of those that there are, which are forgotten.

        No call and no read may be running.

        Args:
            slots (int): S; no more than E are taken, or than this rank's experts.
        """
        session, (module,) = self.session, self._module
        self._num_owned = self.num_experts if self.owned is None else int(self.owned.sum())
        slots = min(slots, self._num_owned)
        self.bank = None  # its memory is free before more is taken
        self.bank = self._bank(module, slots, self.gate_with_up and can_fuse(module))
        self.table = SlotTable(slots, session.config.policy)
        self.job, self._fills = None, []
        self._slot_of_all = None  # [E], once every expert is held
        if self.host is not None:
            self.host.bind(self.bank, self.table)

    @property
    def slots_nbytes(self) -> int:
        """Memory of the slots that a layer can give back."""
        return self.bank.num_filled * self.bank.expert_nbytes

    def resize(self, slots: int) -> None:
        """Set how many slots are in use, and free the memory of the others.

        No read and no computation with a slot may be running.

        Args:
            slots (int): At most as many as were taken.
        """
        if not can_lend():
            return self.take(slots)
        self.job, self._slot_of_all, self._fills = None, None, []
        self.table.resize(min(slots, self.bank.num_slots))
        self.bank.empty(self.table.num_slots, self.bank.num_slots)

    def recover(self) -> None:
        super().recover()
        self.job, self._fills = None, []
        if self.host is not None:
            self.host.forget()
        self.table.recover()

    def count(self) -> None:
        if self.host is not None:
            self.host.give_back(self.session.stats)

    def _without_waiting(self, x, indices):
        session, table = self.session, self.table
        if session.recorder is not None or session.prefetcher is not None:
            return None
        if indices.shape[-1] > session.top_k:
            return None
        if self.host is not None and self.host.takes(indices):
            session.counters.calls += 1
            y = self.bank.experts(x, self.host.slots(indices, session.decoding))
            session.pending = [y]
            self.host.after = y
            return y
        # Once every expert is held no slot changes any more. Only a single token's experts can be
        # counted without knowing them.
        alone = indices.size == indices.shape[-1]
        if len(table.slot_of) < self.num_experts or not alone:
            return None
        if self._slot_of_all is None:
            slots = [table.slot_of[e] for e in range(self.num_experts)]
            self._slot_of_all = mx.array(slots, mx.uint32)
            mx.eval(self._slot_of_all)
        session.counters.calls += 1
        session.counters.hits += indices.size
        y = self.bank.experts(x, self._slot_of_all[indices])
        session.pending = [y]  # computed from what was pending
        return y

    def _ask(self, x):
        session = self.session
        return (
            session.prefetcher.ask(self.index, x) if session.prefetcher and session.decoding else []
        )

    def _prefetch_next(self, asked):
        session = self.session
        if not (session.prefetcher and session.decoding):  # a prompt needs nearly all experts
            return
        guess = session.prefetcher.guess(self.index, asked)
        if guess is not None:
            layer, routed = guess
            session.layers[layer].prefetch(list(dict.fromkeys(routed.ravel().tolist())))

    def prefetch(self, experts: list[int]) -> None:
        """Begin to read experts that may be needed and are not held.

        Does nothing while an earlier prefetch is running, or if the experts do not all fit.

        Args:
            experts (list[int]): Distinct.
        """
        if self.owned is not None:
            experts = [e for e in experts if self.owned[e]]
        if self.job is not None or not self.table.fits(experts):
            return
        if len(self.session.layers) == 1:  # with several, the calls of the others have evaluated it
            mx.eval(self.session.pending)
        slots = self.table.reserve(experts)
        if not slots:
            return
        session = self.session
        session.counters.prefetch_issued += len(slots)
        self.job = Job(session.reader, self.bank, slots)
        quick = session.reader.expected_s(len(slots) * self.bank.expert_nbytes) < HANDOVER_S
        session.reader.in_background(self.job.run, 1 if quick else len(slots))

    def _collect_prefetched(self, needed):
        """Hold what has been prefetched, and count how much of it this call needs."""
        if self.job is None:
            return
        crowded = not self.table.fits(needed, len(self.job.experts))
        arrived, free, done = self.job.collect(set(needed), crowded)
        for e, slot in self._count_prefetched(arrived, needed).items():
            self.table.keep(e, slot)
        self.table.release(free)
        if done:
            self.job = None

    def _count_prefetched(self, arrived, needed):
        """Expert to slot, of a job's that have arrived."""
        c = self.session.counters
        for e, (_, took_s, waited_s) in arrived.items():
            if e in needed:
                c.prefetch_used += 1
                c.prefetch_late += waited_s > 0
                c.prefetch_saved_s += max(0.0, took_s - waited_s)
                c.wait_s += waited_s
            else:
                c.prefetch_wasted += 1
        return {e: slot for e, (slot, *_) in arrived.items()}

    def end_fill(self, needed: Collection[int] = ()) -> list[tuple["Stacked", dict[int, int]]]:
        """End what ``fill`` began. Experts in this layer's slots are held from then on.

        Args:
            needed (Collection[int]): Experts that stay in other layers' slots until the caller has
                computed them and releases these slots. All other slots are released here.

        Returns:
            list[tuple[Stacked, dict[int, int]]]: Other layers, and the slots of such experts.
        """
        borrowed, self.session.filling = [], None
        while self._fills:
            layer, job = self._fills.pop(0)
            arrived, free, _ = job.collect(needed, everything=True)
            layer.table.release(free)
            arrived = self._count_prefetched(arrived, needed)
            if layer.index == self.index:
                for e, slot in arrived.items():
                    self.table.keep(e, slot)
                continue
            layer.table.release(slot for e, slot in arrived.items() if e not in needed)
            borrowed.append((layer, {e: slot for e, slot in arrived.items() if e in needed}))
        return borrowed

    def _compute_nothing(self):
        self._collect_prefetched([])
        self.end_fill()

    def _compute(self, x, indices, routed):
        if self.host is None:
            return self._compute_streamed(x, indices, routed)
        self.count()
        self.host.after = self._compute_streamed(x, indices, routed)
        return self.host.after

    def _compute_streamed(self, x, indices, routed):
        session, flat = self.session, routed.ravel().tolist()
        needed = list(dict.fromkeys(flat))
        self._collect_prefetched(needed)
        if session.filling not in (None, self.index):  # the layers were not called in order
            session.layers[session.filling].end_fill()
        call, borrowed = None, []
        if self._fills:
            call = self._begin_call(x, routed.shape)
            borrowed = self.end_fill({*needed} if call else ())
        ahead = self._is_long(routed.size) and len(needed) >= AHEAD_SHARE * self._num_owned
        following = []
        if ahead and session.reader.direct:  # past the page cache: into slots alone
            following = session.layers[self.index + 1 : self.index + 2]
            session.between_s = perf_counter() - session.left_s
        elif ahead:
            self._read_ahead(needed)
        for _, slots in borrowed:
            session.counters.hits += len(slots)
            needed = [e for e in needed if e not in slots]
        if self.table.fits(needed):
            held, misses = self._plan(needed)
            if not misses:
                self._fill(self._unread())
            read_s = session.reader.expected_s(len(misses) * self.bank.expert_nbytes)
            in_parts = read_s >= OVERLAP_S and session.overlap
            in_parts = in_parts or (self._is_copied and len(misses) > self._part_size)
            if not borrowed and (not misses or not in_parts):
                held.update(misses)
                slots = np.array([held[e] for e in flat], np.uint32).reshape(routed.shape)
                return self.bank.experts(x, self._bring_for(slots, indices, misses))
            later = []
        else:
            first, *later = self.table.waves(needed)
            held, misses = self._plan(first)
        call = call or self._begin_call(x, routed.shape)
        if call is not None:
            return self._as_they_arrive(call, flat, held, misses, later, borrowed, following)
        y = self._in_parts(x, flat, routed.shape, held, misses, later)
        for layer in following:
            layer.fill()
        return y

    def _begin_call(self, x, shape):
        """A call that the fast kernels compute part by part, or None."""
        begin = getattr(self.bank.experts, "begin", None)
        return begin(x, shape) if begin and not self._is_copied else None

    def _is_long(self, pairs):
        """Whether a call of so many (token, expert) pairs reads ahead: it needs most experts.

        Not on a GPU: an H200's prompts wait for Python more than for the disk, and a thread that
        asks for ranges takes its time (400 tokens, cold: 3.3 s with it, 2.9 without, n=6).
        """
        return self.session.overlap and pairs >= AHEAD_PAIRS * self._num_owned

    def _read_ahead(self, needed):
        """Let the system read what this call's later waves and the next layer's call will need."""
        room = memory_available() // 2  # pages must still be there when they are needed
        for layer in self.session.layers[self.index : self.index + 2]:
            experts = needed if layer.index == self.index else range(self.num_experts)
            room -= layer.read_ahead(experts, room)

    def expect(self, tokens: int) -> None:
        share = self._num_owned / self.num_experts  # with ranks: of the pairs, too
        if not self._is_long(tokens * self.session.top_k * share):
            return
        if self.session.reader.direct:
            self.fill({} if self.session.fast_experts else None)
        else:
            self.read_ahead(range(self.num_experts), memory_available() // 2)

    def fill(self, busy: Mapping[int, int] | None = None) -> None:
        """Begin to read experts into slots that hold none: a prompt needs nearly all experts.

        Args:
            busy (Mapping[int, int] or None): If given, free slots of other layers are filled, too.
                If attention takes longer than the reads, earlier layers' experts, which the
                prompt no longer needs, are evicted to make room. Not evicted are ``busy`` (expert
                to slot), which the layer before this one has not computed yet. Only the fast
                kernels compute experts in other layers' slots.
        """
        session, i = self.session, self.index
        known = set(self.table.slot_of)
        known = known.union(*(job.experts for _, job in [*self._fills, (self, self.job)] if job))
        experts = [e for e in range(self.num_experts) if e not in known]
        if self.owned is not None:
            experts = [e for e in experts if self.owned[e]]
        if len(session.layers) == 1:  # with several, the calls of the others have evaluated it
            mx.eval(session.pending)
        lenders = [(self, None)]
        if busy is not None:
            front, behind = session.layers[:i], session.layers[i + 1 :]
            lenders += [(layer, None) for layer in (*front[:-1], *behind[:0:-1])]
            num = len(experts) + sum(len(job.experts) for _, job in self._fills)
            if session.reader.expected_s(num * self.bank.expert_nbytes) < session.between_s:
                lenders += [(layer, busy if layer.index == i - 1 else {}) for layer in front]
            lenders += [(layer, None) for layer in behind[:1]]  # it needs them next
        for layer, needed in lenders:
            if not experts or not layer.bank.can_hold(self.bank):
                continue
            if slots := layer.table.lend(len(experts), needed):
                some, experts = experts[: len(slots)], experts[len(slots) :]
                job = Job(session.reader, layer.bank, dict(zip(some, slots)), self.bank)
                self._fills.append((layer, job))
                session.filling = i
                session.counters.prefetch_issued += len(slots)
                session.reader.in_background(job.run, len(slots))

    def read_ahead(self, experts: Iterable[int], nbytes: int) -> int:
        """Let the system read experts that are not held into the page cache.

        Args:
            experts (Iterable[int]): Those that will be needed, in this order.
            nbytes (int): At most so many of their bytes.

        Returns:
            int: The bytes.
        """
        held = self.table.slot_of
        experts = [e for e in experts if e not in held and (self.owned is None or self.owned[e])]
        experts = experts[: max(0, nbytes // self.bank.expert_nbytes)]
        self.session.reader.read_ahead(self.bank.places(experts))
        return len(experts) * self.bank.expert_nbytes

    def _unread(self):
        """Where all E experts have slots, K of those never read: a call that misses none has time.

        Once all are held, calls need not wait for their routing (``_without_waiting``).
        """
        table, E = self.table, self.num_experts
        if table.num_slots < E or self.job is not None:
            return {}
        held = table.slot_of
        unread = [e for e in range(E) if e not in held] if len(held) < E else []
        return table.plan(unread[: self.session.top_k])[1]

    def _bring_for(self, slots, indices, misses):
        """Read the missing experts of a call. Its slots as an array, to compute with."""
        session = self.session
        if not (misses and session.mailbox and self.bank.as_read):
            self._fill(misses)
            return session.to_device(slots, indices)
        reads = self._begin(misses)
        # With a prefetcher the layer's table must be up to date before the next one.
        alone = session.prefetcher is None and slots.size <= MAILBOX_SIZE
        copies = session.reader.copies(reads) if alone else None
        if copies is None:
            self._finish(misses, reads)
            return session.to_device(slots, indices)
        session.unfinished = partial(self._finish, misses, reads)
        return session.to_device(slots, indices, copies)

    def _in_parts(self, x, flat, shape, held, misses, later):
        """Compute the experts that are held while the others are read, part by part.

        Then those of ``later``, wave by wave: each wave takes the slots of the one before.
        """
        waves = chain([(held, misses)], map(self._plan, later))
        if self._is_copied:
            return self._as_copied(x, flat, shape, waves)
        positions, rows = by_expert(flat), x.reshape(-1, x.shape[-1])
        ys, order = [], []
        for held, misses in waves:
            mx.eval(ys)  # this wave overwrites the slots of the wave before
            parts = self._parts(misses)
            reading = [self._begin(part) for part in parts]
            for part, reads in zip([held, *parts], [None, *reading]):
                if reads is not None:
                    self._finish(part, reads)
                if part:
                    pairs = [i for e in part for i in positions[e]]
                    slots = [part[flat[i]] for i in pairs]
                    ys.append(self._part(self.bank, rows, pairs, slots, shape[-1]))
                    mx.async_eval(ys[-1])
                    order += pairs
        return unsort(ys, order, shape)

    def _as_they_arrive(self, call, flat, held, misses, later, borrowed, following):
        """``_in_parts`` with the fast kernels, which compute at once, and into one array.

        Where reads go past the page cache, a slot takes a later expert as soon as its own is
        computed. Else the system reads ahead, and whole waves take less time (8% of a prompt of
        400 tokens, cold, 35B layers, 64 slots, n=8). ``borrowed`` are experts in slots of other
        layers; the layer of ``following`` takes the slots that this one no longer needs.
        """
        positions, later = by_expert(flat), [e for wave in later for e in wave]
        direct, S = self.session.reader.direct, self.table.num_slots
        size = min(S, self._parts_of(S)) if direct else S
        ready, reading = held, deque()

        def begin(misses):
            reading.extend((part, self._begin(part)) for part in self._parts(misses))

        def compute(slots, of=None):
            pairs = [i for e in slots for i in positions[e]]
            call.compute(np.array(pairs), np.array([slots[flat[i]] for i in pairs]), of)

        begin(misses)
        borrowed = deque((layer, part) for layer, slots in borrowed for part in self._parts(slots))
        while ready or reading or borrowed:
            waits = not (ready or borrowed)
            while reading and (waits or all(future.done() for future in reading[0][1])):
                part, reads = reading.popleft()
                self._finish(part, reads)
                ready, waits = ready | part, False
            if borrowed:
                layer, part = borrowed.popleft()
                compute(part, layer.bank.experts)
                layer.table.release(part.values())
            # All that has arrived. If no read is running, one part: its slots are free after it.
            few = later and direct and not reading
            now = dict(islice(ready.items(), size)) if few else ready
            ready = {e: slot for e, slot in ready.items() if e not in now}
            if now:
                compute(now)
            busy = ready | {e: slot for part, _ in reading for e, slot in part.items()}
            while later:
                if not self.table.fits(later[:size], len(busy)):
                    break
                begin(self._plan(later[:size], busy)[1])
                del later[:size]
                busy = ready | {e: slot for part, _ in reading for e, slot in part.items()}
            for layer in [] if later else following:
                layer.fill(busy)
        self.session.left_s = perf_counter()
        return call.result()

    @property
    def _is_copied(self):
        """Whether the GPU copies what is read, in its own order."""
        return self.session.mailbox is not None and self.bank.as_read

    def _as_copied(self, x, flat, shape, waves):
        """``_in_parts`` where the GPU copies what is read.

        It copies a part behind the arithmetic that was scheduled before, which reads the same
        slots, so only the reads are waited for.
        """
        positions, rows = by_expert(flat), x.reshape(-1, x.shape[-1])
        mailbox, reader = self.session.mailbox, self.session.reader
        ys, order, zero = [], [], None

        def compute(part):
            pairs = [i for e in part for i in positions[e]]
            slots = [part[flat[i]] for i in pairs]
            ys.append(self._part(self.bank, rows, pairs, slots, shape[-1], zero))
            mx.async_eval(ys[-1])
            order.extend(pairs)

        for held, misses in waves:
            if held:
                compute(held)
            parts = deque(self._parts(misses))
            begun = self._begin(parts[0]) if parts else None
            while parts:
                part, reads = parts.popleft(), begun
                begun = self._begin(parts[0]) if parts else None
                copies = reader.copies(reads)
                if copies is None:
                    mx.eval(ys)
                    self._finish(part, reads)
                    compute(part)
                else:
                    zero = mailbox.copy_after(copies, ys[-1] if ys else x)
                    compute(part)
                    self._finish(part, reads)
        return unsort(ys, order, shape)

    @property
    def _part_size(self):
        """Experts of a part."""
        if self._is_copied:
            most = MAX_COPIES // len(self.bank.into)
            if self.host is None:
                most = min(most, COPIED_NBYTES // self.bank.expert_nbytes)
            return max(1, most)
        # Large enough to be worth a wait, small enough that computing one hides the next read.
        return max(1, PART_NBYTES // self.bank.expert_nbytes)

    def _parts_of(self, n):
        """Experts of a part where ``n`` are read."""
        size = self._part_size
        return max(size, -(-n // NUM_PARTS)) if self.session.fast_experts else size

    def _parts(self, misses):
        size, misses = self._parts_of(len(misses)), list(misses.items())
        return [dict(misses[i : i + size]) for i in range(0, len(misses), size)]

    def _plan(self, needed, busy=None):
        hits, misses = self.table.plan(needed, busy)
        self.session.counters.hits += len(hits)
        self.session.counters.misses += len(misses)
        return hits, misses

    def _begin(self, misses):
        """Begin to read experts into the slots that ``_plan`` chose for them."""
        if self.host is not None:
            return self.host.start(misses)
        with self.session.waiting() as reader:
            return reader.start(self.bank.reads(misses))

    def _finish(self, misses, reads):
        """Wait for the reads that ``_begin`` began; the experts are held from then on."""
        with self.session.waiting():
            self.session.reader.finish(reads)
        for e, slot in misses.items():
            self.bank.arrived(e, slot)
        self.table.commit(misses)

    def bring(self, experts: list[int]) -> None:
        """Read experts into their slots, as a call does, and compute nothing.

        Args:
            experts (list[int]): Distinct, at most S.
        """
        self.count()
        self._fill(self._plan(experts)[1])

    def _fill(self, misses):
        if misses:
            self._finish(misses, self._begin(misses))


class Fused(Stacked):
    """``Stacked`` with gate and up in one buffer, which saves one gather (SwiftLM PR 90)."""

    gate_with_up = True


def by_expert(flat: list[int]) -> dict[int, list[int]]:
    """Group the (token, expert) pairs of a call by expert.

    Args:
        flat (list[int]): The expert of every pair.

    Returns:
        dict[int, list[int]]: For each expert, in order of first use, its positions in ``flat``.
    """
    positions = {}
    for i, e in enumerate(flat):
        positions.setdefault(e, []).append(i)
    return positions


def unsort(ys: list[mx.array], order: list[int], shape: tuple[int, ...]) -> mx.array:
    """Put rows that were computed expert by expert back in the order of the call.

    Args:
        ys (list[mx.array]): ``[pairs, 1, D]`` of some experts each.
        order (list[int]): The position of each of these pairs in the call.
        shape (tuple[int, ...]): ``[..., K]``, of the call's indices.

    Returns:
        mx.array: ``[..., K, D]``.
    """
    y = ys[0] if len(ys) == 1 else mx.concatenate(ys)
    y = y.squeeze(-2)[mx.array(np.argsort(order))]
    return y.reshape(*shape, y.shape[-1])


LAYERS = {"serial": Serial, "buffers": Buffers, "stacked": Stacked, "fused": Fused}


def expert_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that are called with ``x, indices``: experts in memory or streamed.

    Args:
        model (nn.Module): From ``moelab.load`` or from mlx-lm.

    Returns:
        list[tuple[str, nn.Module]]: Path and module, in layer order.
    """
    streamed = [(m.path, m) for m in model.modules() if isinstance(m, StreamedExperts)]
    return sorted(streamed, key=lambda item: item[1].index) or expert_modules(model)


def moe_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that call the experts: router, experts and shared expert together.

    Args:
        model (nn.Module): As for ``expert_layers``.

    Returns:
        list[nn.Module]: In layer order.
    """
    modules = dict(model.named_modules())
    return [modules[path.rpartition(".")[0]] for path, _ in expert_layers(model)]
