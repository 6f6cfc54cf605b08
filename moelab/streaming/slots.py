"""Slots: memory for S of a layer's E experts.

``SlotTable`` decides which expert is in which slot, ``SlotBank`` holds the bytes. A new eviction
policy is a line of ``EVICTION`` and a word in ``StreamConfig``'s docstring: ``StreamConfig``, the
commands, ``SlotTable`` and the replay (``moelab/replay/eviction.py``) take it from there, and so do
their tests. What a policy means is tested by a test of its own
(``tests/streaming/test_properties.py``). A policy that needs to know more than how often an expert
was used also changes ``SlotTable._victims``, and has a line of the replay's ``SCORES``.
"""

import copy
import ctypes
import mmap
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from heapq import nsmallest
from itertools import islice
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

from .. import kernels
from ..checkpoint import GATE_UP, ExpertTensor, packing_order
from ..experts import expert_parameters
from .native import COLUMNS, COUNT, IOV, NBYTES, OFFSET
from .reader import File, Ranges, Read


def _count(count):
    return count


# The eviction policies. Of the experts held and not needed now, the one with the lowest rank is
# evicted, and of equal ranks the least recently used. A rank is a whole number, computed from how
# often the expert was used and nothing else: a number here, an array in the replay. None: ranks
# are equal.
EVICTION = {
    "lru": None,  # least recently used
    "lfu": _count,  # least frequently used
}
# Those by which a GPU chooses slots by itself (``host``). With the others the host chooses them.
GPU_POLICIES = ("lru",)


class SlotTable:
    """Which expert is in which slot of one layer.

    Use it in three steps: ``hits, misses = table.plan(experts)``, read the missing experts into
    the slots that it names, ``table.commit(misses)``. ``plan`` forgets the experts that it evicts,
    so a read that fails leaves their slots free and all other experts where they were.

    Args:
        num_slots (int): S.
        policy (str): One of ``EVICTION``.

    Attributes:
        num_slots (int): As above.
        policy (str): As above.
        slot_of (dict[int, int]): The slot of every expert held, least recently used first.
    """

    def __init__(self, num_slots: int, policy: str = "lru"):
        if policy not in EVICTION:
            raise ValueError(f"policy: expected one of {', '.join(EVICTION)}, got {policy!r}.")
        self.num_slots = num_slots
        self.policy = policy
        self.slot_of = {}
        self._free = list(range(num_slots))[::-1]
        self._uses = uses = Counter()
        self._rank = rank = EVICTION[policy]
        # For ``lfu``, without a call of Python for each expert held.
        self._rank_of = uses.__getitem__ if rank is _count else lambda e: rank(uses[e])

    def fits(self, experts: Collection[int], taken: int = 0) -> bool:
        """Whether distinct experts can be held at once.

        Args:
            experts (Collection[int]): The experts.
            taken (int): Slots that are not available.
        """
        return len(experts) + taken <= self.num_slots

    def waves(self, experts: list[int]) -> list[list[int]]:
        """Divide distinct experts into waves that fit.

        Cached experts come first, so that they are used before they are evicted.

        Args:
            experts (list[int]): Distinct.

        Returns:
            list[list[int]]: The experts of each wave, for one ``plan`` after another.
        """
        experts = sorted(experts, key=lambda e: e not in self.slot_of)
        return [experts[i : i + self.num_slots] for i in range(0, len(experts), self.num_slots)]

    def plan(
        self, experts: list[int], busy: Mapping[int, int] | None = None
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Choose slots for the experts of one call.

        Args:
            experts (list[int]): The distinct experts needed, at most S.
            busy (Mapping[int, int]): Expert to slot, of earlier plans: those that are not
                committed yet and those that must not be evicted.

        Returns:
            tuple[dict[int, int], dict[int, int]]: Expert to slot, of those that are held and of
            those that must be read.

        Raises:
            ValueError: If there are more experts than slots; the table is unchanged.
        """
        busy = busy or {}
        if not self.fits(experts, len(busy)):
            raise ValueError(
                f"expected at most {self.num_slots - len(busy)} experts (the slots), "
                f"got {len(experts)}"
            )
        slot_of = self.slot_of
        if self._rank is not None:
            self._uses.update(experts)
        hits, missing = {}, []
        for e in experts:
            slot = slot_of.pop(e, None)
            if slot is None:
                missing.append(e)
            else:
                hits[e] = slot_of[e] = slot  # the last key is the most recently used
        misses, needed, taken, free = {}, hits, [], self._free
        if busy:
            needed, slots = hits | busy, set(busy.values())
            taken = [slot for slot in free if slot in slots]
            free = [slot for slot in free if slot not in slots]
        if missing:
            victims = iter(self._victims(needed, max(0, len(missing) - len(free))))
        for e in missing:
            misses[e] = free.pop() if free else slot_of.pop(next(victims))
        self._free = [*free, *taken, *misses.values()]  # free until ``commit``
        return hits, misses

    def commit(self, misses: dict[int, int]) -> None:
        """Hold experts whose bytes have arrived.

        Args:
            misses (dict[int, int]): As ``plan`` returned it.
        """
        for e, slot in misses.items():
            self._free.remove(slot)
            self.slot_of[e] = slot

    def reserve(self, experts: list[int]) -> dict[int, int]:
        """Choose slots for experts that may be needed, and evict none of them for another.

        The slots are neither held nor free until ``keep`` or ``release``.

        Args:
            experts (list[int]): Distinct, at most S.

        Returns:
            dict[int, int]: Expert to slot, of those that are not held.
        """
        slots = {}
        for e in experts:
            if e in self.slot_of:
                continue
            if not self._free:
                victims = self._victims(experts, 1)
                if not victims:
                    break
                self._free.append(self.slot_of.pop(victims[0]))
            slots[e] = self._free.pop()
        return slots

    def keep(self, expert: int, slot: int) -> None:
        """Hold the expert whose bytes have arrived in its reserved slot.

        Args:
            expert (int): The expert.
            slot (int): As ``reserve`` returned it.
        """
        self.slot_of[expert] = slot

    def lend(self, num: int, busy: Mapping[int, int] | None = None) -> list[int]:
        """Take slots that hold nothing, to fill them with another layer's experts.

        Args:
            num (int): At most so many.
            busy (Mapping[int, int] or None): Expert to slot, planned or held. If given, evict
                other experts for it, by the policy. If not, none may be planned.

        Returns:
            list[int]: The slots, until ``release``.
        """
        kept = set(busy.values()) if busy else ()
        slots = [slot for slot in self._free[::-1] if slot not in kept][:num]
        if busy is not None:
            slots += [self.slot_of.pop(e) for e in self._victims(busy, num - len(slots))]
        self._free = [slot for slot in self._free if slot not in slots]
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Free reserved or lent slots.

        Args:
            slots (Iterable[int]): As ``reserve`` or ``lend`` returned them.
        """
        self._free.extend(slots)

    def recover(self) -> None:
        """After an exception: free every slot that holds no expert, those of prefetches too."""
        held = set(self.slot_of.values())
        self._free = [slot for slot in range(self.num_slots)[::-1] if slot not in held]

    def resize(self, num_slots: int) -> None:
        """Set how many slots are in use, from the first on. Nothing may be planned or reserved.

        Args:
            num_slots (int): At most as many as at first. What is held in the others is forgotten.
        """
        self.num_slots = num_slots
        self.slot_of = {e: slot for e, slot in self.slot_of.items() if slot < num_slots}
        self.recover()

    def _victims(self, needed, num):
        """The experts to evict first, at most so many and none that is needed."""
        candidates = (e for e in self.slot_of if e not in needed)  # least recently used first
        if self._rank is None:
            return list(islice(candidates, num))
        return nsmallest(num, candidates, key=self._rank_of)


class FusedSwitchGLU(nn.Module):
    """``SwitchGLU`` with gate and up in one projection of 2F rows, gate first.

    It gives the same result with one ``gather_qmm`` less (SwiftLM PR 90).

    Args:
        gate_up_proj (nn.Module): Like ``SwitchGLU.gate_proj``, ``[S, 2F, D]``.
        down_proj (nn.Module): ``[S, D, F]``.
        activation (nn.Module): Called as ``activation(up, gate)``.
    """

    def __init__(self, gate_up_proj: nn.Module, down_proj: nn.Module, activation: nn.Module):
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        x = mx.expand_dims(x, (-2, -3))
        idx, do_sort = indices, indices.size >= 64  # SwitchGLU's own threshold
        if do_sort:
            x, idx, inv_order = _gather_sort(x, indices)
        gate, up = mx.split(self.gate_up_proj(x, idx, sorted_indices=do_sort), 2, axis=-1)
        x = self.down_proj(self.activation(up, gate), idx, sorted_indices=do_sort)
        if do_sort:
            x = _scatter_unsort(x, inv_order, indices.shape)
        return x.squeeze(-2)


class FastFusedSwitchGLU(kernels.FastExperts, FusedSwitchGLU):
    """``FusedSwitchGLU`` with the kernels of ``moelab/kernels``."""


# MLX's tiled quantized matmul on CUDA (qmm_sm80) loads three tiles of 64 inputs or more, even of a
# shorter row, so it reads past the last row. ``PaddedLinear`` pads the inputs; the weights are
# followed by PADDING_NBYTES.
TILES, TILE = 3, 64
PADDING_NBYTES = 256


class PaddedLinear(QuantizedSwitchLinear):
    """A projection that pads its input behind the last row, in the same buffer.

    MLX's qmm_sm80 reads there if a row has fewer than three tiles of inputs. If the mapped memory
    ends with the row, that is an illegal memory access.
    """

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        rows = x.reshape(-1, x.shape[-1])
        x = mx.pad(rows, ((0, TILES - 1), (0, 0)))[: len(rows)].reshape(x.shape)
        return super().__call__(x, indices, sorted_indices)


def is_short(linear: nn.Module) -> bool:
    """Whether the CUDA kernel reads past the last row of this projection's input.

    Args:
        linear (nn.Module): A projection of a ``SwitchGLU`` or ``SwitchMLP``.
    """
    quantized = type(linear) is QuantizedSwitchLinear
    return quantized and linear.input_dims < TILES * max(TILE, linear.group_size)


def can_fuse(experts: nn.Module) -> bool:
    """Whether gate and up of this module can share a buffer.

    Args:
        experts (SwitchGLU or SwitchMLP): The module.
    """
    fast = isinstance(experts, kernels.FastExperts)
    if not fast and type(experts).__call__ is not SwitchGLU.__call__:
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

    Args:
        module (SwitchGLU or SwitchMLP): The layer's experts, not read. Their parameters give the
            shapes and the types in memory.
        path (str): Its path in the model.
        located (dict[str, ExpertTensor]): Where the experts' bytes lie.
        resident (dict[str, mx.array]): Parameters kept in memory for all E experts, in their
            types there. A slot gets a copy of its expert's.
        num_slots (int): S.
        fuse (bool): Whether to keep gate and up in one buffer.

    Attributes:
        num_slots (int): As above.
        experts (nn.Module): The layer's own mlx-lm module with S experts in place of E. Call it
            with slots for indices.
        expert_nbytes (int): The bytes of one expert in its slot.
        as_read (bool): Whether a slot holds an expert as its file does, so that ``arrived`` has
            nothing to do.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        located: dict[str, ExpertTensor],
        resident: dict[str, mx.array],
        num_slots: int,
        fuse: bool = False,
    ):
        self.num_slots = num_slots
        self.experts = copy.copy(module)
        parameters = expert_parameters(module)
        order = packing_order(parameters)
        tensors = {n: located[f"{path}.{n}"] for n in order if f"{path}.{n}" not in resident}
        on_disk = {n: tensors[n].dtype if n in tensors else p.dtype for n, p in parameters.items()}
        gate, up = ([on_disk[n] for n in order if n.startswith(linear)] for linear in GATE_UP)
        fuse = fuse and gate == up

        # Each parameter is a part of a flat buffer [S, n]: a buffer of its own, one shared by gate
        # and up, or the one of all parameters that are converted when an expert has arrived. MLX's
        # CUDA kernels refuse a part of the last one: it is not contiguous.
        converted = {n for n in tensors if tensors[n].dtype != parameters[n].dtype}
        shared = set() if mx.cuda.is_available() else converted
        sizes, parts, whole = {}, {}, {}
        for n in order:
            linear, param = n.rsplit(".", 1)
            shape, dtype = parameters[n].shape[1:], parameters[n].dtype
            size = prod(shape)
            if fuse and linear in GATE_UP:
                linear, shape = "gate_up_proj", (2 * shape[0], *shape[1:])
            name = "converted" if n in shared else (linear, param)
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
                    linears[linear].__class__ = PaddedLinear
            linears[linear][param] = buffers[key].part(first, shape)
        if fuse:
            fast = isinstance(module, kernels.FastExperts)
            self.experts = (FastFusedSwitchGLU if fast else FusedSwitchGLU)(
                linears["gate_up_proj"], linears["down_proj"], module.activation
            )
        else:
            for name, linear in linears.items():
                self.experts[name] = linear

        self._rows = {
            n: buffers[key].rows[:, first:last] for n, (key, first, last) in parts.items()
        }
        self._tensors, self._ranges = tensors, sorted(ranges(tensors))  # the order of any layer
        types = {n: (p.shape[1:], p.dtype, on_disk[n]) for n, p in parameters.items()}
        self._form = type(self.experts), types, self._ranges
        self._memory = [
            (self._rows[n], _Buffer.over(resident[f"{path}.{n}"]).rows)
            for n in order
            if n not in tensors
        ]
        # (rows [S, n], type in memory, type on disk, first element, parameters); neighbours joined
        self._converted = []
        joined = None  # the buffer and the type on disk of the last one
        for n, t in tensors.items():
            if n not in converted:
                continue
            key, first, last = parts[n]
            if joined == (key, t.dtype):
                *_, first, names = self._converted.pop()
            else:
                joined, names = (key, t.dtype), []
            rows = buffers[key].rows[:, first:last]
            self._converted.append((rows, key[1], t.dtype, first, [*names, n]))
        self._buffers = list(buffers.values())
        self._slots, self._empty = {}, set()
        self._tables = np.zeros((num_slots, len(self._ranges), len(COLUMNS)), np.int64)
        self.as_read = not (self._memory or self._converted)
        self.expert_nbytes = sum(rows[0].nbytes for rows in self._rows.values())

    @property
    def num_filled(self) -> int:
        """How many slots have memory: those that were not emptied, or were written since."""
        return self.num_slots - len(self._empty)

    def can_hold(self, other: "SlotBank") -> bool:
        """Whether a slot can hold an expert of another layer, and compute it.

        Args:
            other (SlotBank): That layer's.
        """
        return self._form == other._form and not (self._memory or other._memory)

    def reads(self, slots: dict[int, int], of: "SlotBank | None" = None) -> Ranges:
        """The reads that bring experts into slots, one for each range on disk.

        Args:
            slots (dict[int, int]): The slot of each expert.
            of (SlotBank or None): The layer that the experts belong to. Default: this one.

        Returns:
            Ranges: Call ``arrived`` for each expert when they have ended.
        """
        for slot in slots.values():
            self._slot(slot)
        self._empty.difference_update(slots.values())
        places, files, nbytes = (of or self)._places
        tensors = (of or self)._firsts
        table = self._tables.take([*slots.values()], 0)
        table[..., : OFFSET + 1] = places.take([*slots], 0)

        def reads():
            return [
                Read(t.files[e], t.offsets[e], nbytes, views, t.name, e, parts)
                for e, slot in slots.items()
                for t, (nbytes, views, parts) in zip(tensors, self._slots[slot].disk)
            ]

        table = table.reshape(-1, len(COLUMNS))
        parts = [part for slot in slots.values() for *_, part in self._slots[slot].disk]
        return Ranges(table, nbytes * len(slots), files, reads, parts)

    def places(self, experts: Iterable[int]) -> Iterator[list[tuple[File, int, int]]]:
        """Where the bytes of experts lie: file, first byte and length of each range.

        Args:
            experts (Iterable[int]): The experts.
        """
        tensors = [[self._tensors[name] for name in names] for names in self._ranges]
        ranges = [(first, sum(t.nbytes for t in (first, *others))) for first, *others in tensors]
        for e in experts:
            yield [(t.files[e], t.offsets[e], nbytes) for t, nbytes in ranges]

    @property
    def disk_nbytes(self) -> int:
        """The bytes of one expert on disk."""
        return self._places[2]

    @cached_property
    def into(self) -> list[tuple[int, int, int, int]]:
        """The parts of an expert whose ranges (``places``) lie one behind the other.

        Each is its first byte there, its address in slot 0, how far it is from there to the same
        part in slot 1, and its length.
        """
        first = [part for *_, parts in self._slot(0).disk for part in parts]
        second = [
            part for *_, parts in self._slot(min(1, self.num_slots - 1)).disk for part in parts
        ]
        found, at = [], 0
        for (to, nbytes), (next_to, _) in zip(first, second):
            found.append((at, to, next_to - to, nbytes))
            at += nbytes
        return found

    @cached_property
    def _firsts(self):
        """The first tensor of each range."""
        return [self._tensors[names[0]] for names in self._ranges]

    @cached_property
    def _places(self):
        """``[E, ranges, 2]``, file descriptors and offsets; the files; an expert's bytes."""
        places = [[(f.fd, at) for f, at in zip(t.files, t.offsets)] for t in self._firsts]
        files = {file for t in self._firsts for file in t.files}
        nbytes = sum(t.nbytes for t in self._tensors.values())
        return np.array(places, np.int64).swapaxes(0, 1), files, nbytes

    def arrived(self, expert: int, slot: int) -> None:
        """Complete an expert whose reads have ended: copy resident parameters, convert types.

        Args:
            expert (int): The expert.
            slot (int): Its slot.
        """
        parts = self._slot(slot)
        for rows, source in parts.memory:
            rows[...] = source[expert]
        for rows, bits, dtype, to in parts.converted:
            _convert(rows, bits, dtype, to)

    def empty(self, first: int, last: int) -> None:
        """Return the memory of some slots to the system until they are written again.

        Args:
            first (int): The first of them. Nothing may be reading or computing with one.
            last (int): The first behind them.
        """
        self._empty.update(range(first, last))
        for buffer in self._buffers:
            rows = buffer.rows[first:last]
            begin = -(-rows.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
            nbytes = (rows.ctypes.data + rows.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
            if nbytes > 0:
                _advise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)

    def _slot(self, slot):
        # Kept: slicing nine buffers takes longer than a small read.
        if slot in self._slots:
            return self._slots[slot]
        into = {n: self._rows[n][slot] for n in self._tensors}
        converted, to_convert = [], set()
        for rows, to, dtype, _, names in self._converted:
            to_convert.update(names)
            rows = rows[slot]
            if dtype.size < to.size:  # read into the end of the memory that the result will fill
                bits = rows.view(_NUMPY[dtype.size])[-rows.size :]
            else:
                bits = np.empty(rows.size, _NUMPY[dtype.size])
            converted.append((rows, bits, dtype, to))
            ends = np.cumsum([into[n].size for n in names])
            into.update(zip(names, np.split(bits, ends[:-1])))
        disk, iovecs = [], []
        for names, row in zip(self._ranges, self._tables[slot]):
            views = [memoryview(into[n]).cast("B") for n in names]
            parts = [(into[n].ctypes.data, into[n].nbytes) for n in names]
            iovecs.append(np.array(parts, np.int64))
            row[[IOV, COUNT]] = iovecs[-1].ctypes.data, len(parts)
            row[NBYTES] = iovecs[-1][:, 1].sum()
            # What is converted is read into memory of the host.
            parts = () if to_convert.intersection(names) else _joined(parts)
            disk.append((sum(map(len, views)), views, parts))
        parts = self._slots[slot] = _Slot(
            disk, [(rows[slot], source) for rows, source in self._memory], converted, iovecs
        )
        return parts


def can_lend() -> bool:
    """Whether slots can return their memory to the system and take it again (``empty``)."""
    return sys.platform == "linux" and mx.default_device() == mx.cpu


def _advise(*arguments):
    ctypes.CDLL(None).madvise(*arguments)  # it is advice: what fails changes nothing


def ranges(tensors: dict[str, ExpertTensor]) -> list[list[str]]:
    """Group the parameters that follow each other on disk for every expert.

    Args:
        tensors (dict[str, ExpertTensor]): By name.

    Returns:
        list[list[str]]: The names in each range, which one read brings, in the order on disk.
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


def _joined(parts):
    """Address and bytes of ranges of memory, neighbours joined."""
    joined = []
    for address, nbytes in parts:
        if joined and sum(joined[-1]) == address:
            address, nbytes = joined[-1][0], joined.pop()[1] + nbytes
        joined.append((address, nbytes))
    return joined


class _Slot(NamedTuple):
    disk: list  # (nbytes, views, addresses and bytes of the views)
    memory: list  # (rows, rows of all E experts)
    converted: list  # (rows, bits as read, type read, type in memory)
    iovecs: list  # addresses and bytes of the views of each range, for native code


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
        """A buffer ``[E, n]`` over the memory of an array ``[E, ...]``."""
        self = cls.__new__(cls)
        bits = array.view(_UNSIGNED[array.dtype.size])
        mx.eval(bits)
        rows = np.asarray(bits)
        self.rows, self.array = rows.reshape(len(rows), -1), array
        return self

    def part(self, first, shape):
        """A view ``[S, *shape]`` that begins at element ``first`` of every row."""
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
