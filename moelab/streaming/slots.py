"""Slots: a few experts' worth of memory that many experts take turns in.

``SlotTable`` knows which expert sits where, ``SlotBank`` holds the bytes.
"""

import copy
import functools
from collections import Counter
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, _gather_sort, _scatter_unsort

from ..checkpoint import expert_parameters
from .reader import Read


class SlotTable:
    """Which expert sits in which slot of one layer.

    A call goes ``hits, misses = table.plan(experts)``, read the missing experts into the
    slots it names, ``table.commit(misses)``. ``plan`` forgets the experts whose slots it
    gives away, so a read that fails leaves those slots free and all others as they were.

    Args:
        num_slots (int): S.
        policy (str): ``lru`` (least recently used leaves first) or ``lfu`` (least often).

    Attributes:
        slot_of (dict[int, int]): The slot of every expert held, least recent first.
    """

    def __init__(self, num_slots, policy="lru"):
        self.num_slots = num_slots
        self.policy = policy
        self.slot_of = {}
        self._free = list(range(num_slots))[::-1]
        self._uses = Counter()

    def plan(self, experts):
        """Choose slots for the experts of one call.

        Args:
            experts (list[int]): The distinct experts needed, at most S.

        Returns:
            tuple[dict, dict]: Expert to slot, for those held and for those to be read.

        Raises:
            ValueError: If there are more experts than slots; the table is unchanged.
        """
        if len(experts) > self.num_slots:
            raise ValueError(
                f"expected at most {self.num_slots} experts (the slots), got {len(experts)}"
            )
        slot_of = self.slot_of
        if self.policy == "lfu":
            self._uses.update(experts)
        hits, missing = {}, []
        for e in experts:
            slot = slot_of.pop(e, None)
            if slot is None:
                missing.append(e)
            else:
                hits[e] = slot_of[e] = slot  # back in as the most recent
        misses = {}
        for e in missing:
            if not self._free:
                self._free.append(slot_of.pop(self._victim(hits)))
            misses[e] = self._free.pop()
        self._free.extend(misses.values())  # nobody's until commit
        return hits, misses

    def commit(self, misses):
        """The bytes have arrived: the experts are held from now on.

        Args:
            misses (dict[int, int]): As ``plan`` returned it.
        """
        for e, slot in misses.items():
            self._free.remove(slot)
            self.slot_of[e] = slot

    def _victim(self, needed):
        candidates = (e for e in self.slot_of if e not in needed)
        if self.policy == "lru":
            return next(candidates)
        return min(candidates, key=self._uses.__getitem__)


class FusedSwitchGLU(nn.Module):
    """``SwitchGLU`` with gate and up in one projection of 2F rows, gate first.

    One ``gather_qmm`` fewer for the same answer (SwiftLM PR 90).

    Args:
        gate_up_proj (nn.Module): As ``SwitchGLU.gate_proj``, ``[S, 2F, D]``.
        down_proj (nn.Module): ``[S, D, F]``.
        activation (nn.Module): Called as ``activation(up, gate)``.
    """

    def __init__(self, gate_up_proj, down_proj, activation):
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation

    def __call__(self, x, indices):
        x = mx.expand_dims(x, (-2, -3))
        idx, do_sort = indices, indices.size >= 64  # as SwitchGLU does
        if do_sort:
            x, idx, inv_order = _gather_sort(x, indices)
        gate, up = mx.split(self.gate_up_proj(x, idx, sorted_indices=do_sort), 2, axis=-1)
        x = self.down_proj(self.activation(up, gate), idx, sorted_indices=do_sort)
        if do_sort:
            x = _scatter_unsort(x, inv_order, indices.shape)
        return x.squeeze(-2)


def can_fuse(experts):
    """Whether gate and up of this module can share a buffer.

    Args:
        experts (SwitchGLU or SwitchMLP): The module.
    """
    if type(experts).__call__ is not SwitchGLU.__call__:
        return False
    gate, up = experts.gate_proj, experts.up_proj

    def form(linear):
        quantization = [getattr(linear, k, None) for k in ("group_size", "bits", "mode")]
        params = {k: (p.shape, p.dtype) for k, p in linear.parameters().items()}
        return type(linear), quantization, params

    # A tensor-wide scale belongs to one projection and cannot be shared.
    return form(gate) == form(up) and getattr(gate, "global_scale", None) is None


class SlotBank:
    """The bytes of S experts of one layer, in arrays that are written in place.

    ``bank.experts`` is the layer's own mlx-lm module with S experts in place of E; call
    it with slots for indices.

    Args:
        module (SwitchGLU or SwitchMLP): The layer's experts, not yet read; their parameters
            give shapes and the types in memory.
        path (str): Its path in the model.
        located (dict[str, ExpertTensor]): Where their bytes lie.
        resident (dict[str, mx.array]): Parameters kept in memory for all E experts,
            in their types there; a slot's part is copied from here.
        num_slots (int): S.
        fuse (bool): Whether to keep gate and up in one buffer.
    """

    def __init__(self, module, path, located, resident, num_slots, fuse=False):
        self.num_slots = num_slots
        self.experts = copy.copy(module)
        # (destination [S, ...], tensor on disk or rows in memory, type in memory)
        self._sources = []
        buffers = {}
        for name, p in expert_parameters(module).items():
            linear, param = name.rsplit(".", 1)
            half = None
            if fuse and linear in ("gate_proj", "up_proj"):
                half = ("gate_proj", "up_proj").index(linear)
                linear = "gate_up_proj"
            if (linear, param) not in buffers:
                rows = p.shape[1:] if half is None else (2 * p.shape[1], *p.shape[2:])
                buffers[linear, param] = _Buffer((num_slots, *rows), p.dtype)
            rows = buffers[linear, param].rows
            if half is not None:
                rows = np.split(rows, 2, axis=1)[half]
            full = f"{path}.{name}"
            source = resident.get(full)
            self._sources.append(
                (rows, located[full] if source is None else _Buffer.over(source).rows, p.dtype)
            )
        linears = {}
        for (linear, param), buffer in buffers.items():
            if linear not in linears:
                linears[linear] = copy.copy(
                    module[linear if linear != "gate_up_proj" else "gate_proj"]
                )
            linears[linear][param] = buffer.array
        if fuse:
            self.experts = FusedSwitchGLU(
                linears["gate_up_proj"], linears["down_proj"], module.activation
            )
        else:
            for name, linear in linears.items():
                self.experts[name] = linear
        self._slots = {}

    @functools.cached_property
    def expert_nbytes(self):
        """The bytes of one slot."""
        return sum(rows[0].nbytes for rows, _, _ in self._sources)

    def reads(self, expert, slot):
        """What brings one expert into one slot.

        Returns:
            list[Read]: The reads; call ``arrived`` after them.
        """
        return [
            Read(t.files[expert], t.offsets[expert], view, t.name, expert)
            for t, view in self._slot(slot).disk
        ]

    def arrived(self, expert, slot):
        """Put in place what ``reads`` did not bring itself."""
        for rows, source in self._slot(slot).memory:
            rows[...] = source[expert]
        for rows, bits, dtype, to in self._slot(slot).converted:
            _convert(rows, bits, dtype, to)

    def _slot(self, slot):
        # Made once: slicing nine buffers takes longer than a small read.
        parts = self._slots.get(slot)
        if parts is None:
            parts = self._slots[slot] = _Slot([], [], [])
            for rows, source, to in self._sources:
                rows = rows[slot]
                if isinstance(source, np.ndarray):
                    parts.memory.append((rows, source))
                    continue
                into = rows
                if source.dtype != to:  # read aside, convert on arrival
                    into = np.empty(rows.shape, _NUMPY[source.dtype.size])
                    parts.converted.append((rows, into, source.dtype, to))
                parts.disk.append((source, memoryview(into.reshape(-1)).cast("B")))
        return parts


class _Slot(NamedTuple):
    disk: list  # (tensor, view)
    memory: list  # (rows, rows of all E experts)
    converted: list  # (rows, bits read aside, type read, type in memory)


class _Buffer:
    """An MLX array and a numpy view of the same memory, its bits as unsigned integers."""

    def __init__(self, shape, dtype):
        bits = mx.zeros(shape, _UNSIGNED[dtype.size])
        mx.eval(bits)
        self.rows = np.asarray(bits)
        self.array = bits.view(dtype)
        mx.eval(self.array)

    @classmethod
    def over(cls, array):
        self = cls.__new__(cls)
        bits = array.view(_UNSIGNED[array.dtype.size])
        mx.eval(bits)
        self.rows, self.array = np.asarray(bits), array
        return self


_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _convert(rows, bits, dtype, to):
    if dtype == mx.bfloat16 and to == mx.float32:
        # numpy has no bfloat16, but its bits are the upper half of a float32's.
        np.left_shift(bits, 16, out=rows, dtype=np.uint32)
    else:
        rows[...] = np.asarray(mx.array(bits).view(dtype).astype(to).view(_UNSIGNED[to.size]))
