"""Slots: a few experts' worth of memory that many experts take turns in.

``SlotTable`` knows which expert sits where, ``SlotBank`` holds the bytes.
"""

import copy
from collections import Counter
from math import prod
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    _gather_sort,
    _scatter_unsort,
)

from ..checkpoint import GATE_UP, expert_parameters, packing_order
from .reader import Read

POLICIES = ("lru", "lfu")  # eviction policies; the replay (lab/pagecache.py) adds its own to these


class SlotTable:
    """Which expert sits in which slot of one layer.

    A call goes ``hits, misses = table.plan(experts)``, read the missing experts into the
    slots it names, ``table.commit(misses)``. ``plan`` forgets the experts whose slots it
    gives away, so a read that fails leaves those slots free and all others as they were.

    Args:
        num_slots (int): S, that experts take turns in.
        policy (str): ``lru`` (least recently used leaves first) or ``lfu`` (least often).
        pinned (list[int]): Experts with slots of their own, which never leave; their bytes must
            be there before the first call.

    Attributes:
        slot_of (dict[int, int]): The slot of every other expert held, least recent first.
        pinned (dict[int, int]): The slot of every pinned expert, from S on.
    """

    def __init__(self, num_slots, policy="lru", pinned=()):
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}.")
        self.num_slots = num_slots
        self.policy = policy
        self.pinned = {e: num_slots + i for i, e in enumerate(pinned)}
        self.slot_of = {}
        self._free = list(range(num_slots))[::-1]
        self._uses = Counter()

    def fits(self, experts, taken=0):
        """Whether distinct experts can be held at once while so many slots are taken."""
        others = sum(e not in self.pinned for e in experts) if self.pinned else len(experts)
        return others + taken <= self.num_slots

    def waves(self, experts):
        """Divide distinct experts into calls that fit; those held come first, before they must leave.

        Returns:
            list[list[int]]: For one ``plan`` after another.
        """
        pinned = [e for e in experts if e in self.pinned]
        others = sorted(
            (e for e in experts if e not in self.pinned), key=lambda e: e not in self.slot_of
        )
        first, *rest = [
            others[i : i + self.num_slots] for i in range(0, len(others), self.num_slots)
        ] or [[]]
        return [pinned + first, *rest]

    def plan(self, experts):
        """Choose slots for the experts of one call.

        Args:
            experts (list[int]): The distinct experts needed, at most S beside the pinned.

        Returns:
            tuple[dict, dict]: Expert to slot, for those held and for those to be read.

        Raises:
            ValueError: If there are more experts than slots; the table is unchanged.
        """
        if not self.fits(experts):
            pinned = f", beside the {len(self.pinned)} pinned" if self.pinned else ""
            raise ValueError(
                f"expected at most {self.num_slots} experts (the slots{pinned}), got {len(experts)}"
            )
        slot_of, pinned = self.slot_of, self.pinned
        if self.policy == "lfu":
            self._uses.update(experts)
        hits, missing = {}, []
        for e in experts:
            if e in pinned:
                hits[e] = pinned[e]
                continue
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

    def reserve(self, experts):
        """Take slots for experts that may be needed, from those that are not among them.

        The slots are nobody's until ``keep`` or ``release``.

        Args:
            experts (list[int]): Distinct; at most S beside the pinned.

        Returns:
            dict[int, int]: The slots of those that are not held.
        """
        slots = {}
        for e in experts:
            if e in self.slot_of or e in self.pinned:
                continue
            if not self._free:
                if all(held in experts for held in self.slot_of):
                    break
                self._free.append(self.slot_of.pop(self._victim(experts)))
            slots[e] = self._free.pop()
        return slots

    def keep(self, expert, slot):
        """A reserved slot holds its expert from now on."""
        self.slot_of[expert] = slot

    def release(self, slots):
        """Reserved slots are free again."""
        self._free.extend(slots)

    def recover(self):
        """After an exception at any point: every slot that holds no expert is free."""
        held = set(self.slot_of.values())
        self._free = [slot for slot in range(self.num_slots)[::-1] if slot not in held]

    def _victim(self, needed):
        candidates = (e for e in self.slot_of if e not in needed)
        if self.policy == "lru":
            return next(candidates)
        return min(candidates, key=self._uses.__getitem__)


def hottest(counts, nbytes, expert_nbytes, room):
    """The experts that are used most, over all layers, as far as a budget goes.

    Args:
        counts (np.ndarray): ``[L, E]``, how often each was used; those that never were are not taken.
        nbytes (int): The budget.
        expert_nbytes (list[int]): The bytes of one expert of each layer.
        room (list[int]): The most that are wanted of each layer.

    Returns:
        list[list[int]]: Of each layer, hottest first.
    """
    chosen = [[] for _ in room]
    for i in np.argsort(-counts, axis=None, kind="stable")[: np.count_nonzero(counts)].tolist():
        layer, e = divmod(i, counts.shape[1])
        if len(chosen[layer]) < room[layer]:
            nbytes -= expert_nbytes[layer]
            if nbytes < 0:
                break
            chosen[layer].append(e)
    return chosen


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


class RoomyLinear(QuantizedSwitchLinear):
    """A projection whose input has room behind its last row, in the same buffer.

    MLX's qmm_sm80 reads there if a row has fewer than three tiles of inputs. Where the buffer ends
    with the row, and the mapped memory with the buffer, that is an illegal memory access.
    """

    def __call__(self, x, indices, sorted_indices=False):
        rows = x.reshape(-1, x.shape[-1])
        x = mx.pad(rows, ((0, TILES - 1), (0, 0)))[: len(rows)].reshape(x.shape)
        return super().__call__(x, indices, sorted_indices)


def is_short(linear):
    """Whether the CUDA kernel reads past the rows of this projection's input.

    Args:
        linear (nn.Module): Of a ``SwitchGLU`` or ``SwitchMLP``.
    """
    quantized = type(linear) is QuantizedSwitchLinear
    return quantized and linear.input_dims < TILES * max(TILE, linear.group_size)


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
        parameters = expert_parameters(module)
        order = packing_order(parameters)
        tensors = {n: located[f"{path}.{n}"] for n in order if f"{path}.{n}" not in resident}
        on_disk = {n: tensors[n].dtype if n in tensors else p.dtype for n, p in parameters.items()}
        gate, up = ([on_disk[n] for n in order if n.startswith(linear)] for linear in GATE_UP)
        fuse = fuse and gate == up

        # Each parameter has a part of a flat buffer [S, n]: one that is its own, one that gate
        # and up share, or the one of all that is converted on arrival, at once for an expert.
        sizes, parts, whole = {}, {}, {}
        for n in order:
            linear, param = n.rsplit(".", 1)
            shape, dtype = parameters[n].shape[1:], parameters[n].dtype
            size = prod(shape)
            if fuse and linear in GATE_UP:
                linear, shape = "gate_up_proj", (2 * shape[0], *shape[1:])
            name = (linear, param) if on_disk[n] == dtype else "converted"
            first = sizes.get((name, dtype), 0)
            sizes[name, dtype] = first + size
            parts[n] = (name, dtype), first, first + size
            whole.setdefault((linear, param), ((name, dtype), first, shape))
        buffers = {key: _Buffer((num_slots, size), key[1]) for key, size in sizes.items()}

        linears = {}
        for (linear, param), (key, first, shape) in whole.items():
            if linear not in linears:
                linears[linear] = copy.copy(
                    module["gate_proj" if linear == "gate_up_proj" else linear]
                )
                if mx.cuda.is_available() and is_short(linears[linear]):
                    linears[linear].__class__ = RoomyLinear
            linears[linear][param] = buffers[key].part(first, shape)
        if fuse:
            self.experts = FusedSwitchGLU(
                linears["gate_up_proj"], linears["down_proj"], module.activation
            )
        else:
            for linear, its in linears.items():
                self.experts[linear] = its

        self._rows = {
            n: buffers[key].rows[:, first:last] for n, (key, first, last) in parts.items()
        }
        self._tensors, self._ranges = tensors, ranges(tensors)
        self._memory = [
            (self._rows[n], _Buffer.over(resident[f"{path}.{n}"]).rows)
            for n in order
            if n not in tensors
        ]
        self._converted = []  # (rows [S, n], their type, type on disk, parameters), neighbours together
        for n, t in tensors.items():
            (name, dtype), first, last = parts[n]
            if name != "converted":
                continue
            rows = buffers[name, dtype].rows
            if self._converted and self._converted[-1][1:3] == (dtype, t.dtype):
                *_, start, names = self._converted.pop()
            else:
                start, names = first, []
            self._converted.append((rows[:, start:last], dtype, t.dtype, start, [*names, n]))
        self._slots = {}
        self.expert_nbytes = sum(rows[0].nbytes for rows in self._rows.values())

    def reads(self, expert, slot):
        """What brings one expert into one slot: one read for what lies together on disk.

        Returns:
            list[Read]: The reads; call ``arrived`` after them.
        """
        return [
            Read(t.files[expert], t.offsets[expert], nbytes, views, t.name, expert)
            for t, nbytes, views in self._slot(slot).disk
        ]

    def arrived(self, expert, slot):
        """Put in place what ``reads`` did not bring itself."""
        parts = self._slot(slot)
        for rows, source in parts.memory:
            rows[...] = source[expert]
        for rows, bits, dtype, to in parts.converted:
            _convert(rows, bits, dtype, to)

    def _slot(self, slot):
        # Made once: slicing nine buffers takes longer than a small read.
        if slot in self._slots:
            return self._slots[slot]
        into = {n: self._rows[n][slot] for n in self._tensors}
        converted = []
        for rows, to, dtype, _, names in self._converted:
            rows = rows[slot]
            if dtype.size < to.size:  # read into the far end of where they will be
                bits = rows.view(_NUMPY[dtype.size])[-rows.size :]
            else:
                bits = np.empty(rows.size, _NUMPY[dtype.size])
            converted.append((rows, bits, dtype, to))
            ends = np.cumsum([into[n].size for n in names])
            into.update(zip(names, np.split(bits, ends[:-1])))
        disk = []
        for names in self._ranges:
            views = [memoryview(into[n]).cast("B") for n in names]
            disk.append((self._tensors[names[0]], sum(map(len, views)), views))
        parts = self._slots[slot] = _Slot(
            disk, [(rows[slot], source) for rows, source in self._memory], converted
        )
        return parts


def ranges(tensors):
    """Which parameters lie one after the other on disk for every expert.

    Args:
        tensors (dict[str, ExpertTensor]): By name.

    Returns:
        list[list[str]]: Those that one read brings, in the order on disk.
    """
    found, last = [], None
    for name, t in sorted(
        tensors.items(), key=lambda item: (str(item[1].files[0]), item[1].offsets[0])
    ):
        if last and last.files == t.files and t.offsets == [o + last.nbytes for o in last.offsets]:
            found[-1].append(name)
        else:
            found.append([name])
        last = t
    return found


class _Slot(NamedTuple):
    disk: list  # (first tensor, nbytes, views)
    memory: list  # (rows, rows of all E experts)
    converted: list  # (rows, bits as read, type read, type in memory)


# MLX's tiled quantized matmul on CUDA (qmm_sm80) loads three tiles of 64 inputs or more even of a
# shorter row. What lies behind the last row of weights is this, behind the inputs ``RoomyLinear``'s.
TILES, TILE = 3, 64
PADDING_NBYTES = 256


class _Buffer:
    """An MLX array and a numpy view of the same memory, its bits as unsigned integers."""

    def __init__(self, shape, dtype):
        size = prod(shape)
        bits = mx.zeros(size + PADDING_NBYTES // dtype.size, _UNSIGNED[dtype.size])
        mx.eval(bits)
        self.rows = np.asarray(bits)[:size].reshape(shape)
        self.array = bits.view(dtype)
        mx.eval(self.array)

    @classmethod
    def over(cls, array):
        """The buffer ``[E, n]`` of an array ``[E, ...]`` that is there already."""
        self = cls.__new__(cls)
        bits = array.view(_UNSIGNED[array.dtype.size])
        mx.eval(bits)
        rows = np.asarray(bits)
        self.rows, self.array = rows.reshape(len(rows), -1), array
        return self

    def part(self, first, shape):
        """``[S, *shape]`` from the first element of every row on, in the same memory."""
        rows, size = self.rows.shape
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        part = mx.as_strided(self.array, (rows, *shape), (size, *strides), first)
        mx.eval(part)
        return part


_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _convert(rows, bits, dtype, to):
    if dtype == mx.bfloat16 and to == mx.float32:
        # numpy has no bfloat16, but its bits are the upper half of a float32's.
        np.left_shift(bits, 16, out=rows, dtype=np.uint32)
    else:
        rows[...] = np.asarray(mx.array(bits).view(dtype).astype(to).view(_UNSIGNED[to.size]))
