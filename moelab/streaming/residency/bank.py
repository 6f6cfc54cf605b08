"""The memory of a layer's slots: arrays that are written in place.

``SlotBank`` says which reads bring an expert into a slot, and completes it when they have ended.
"""

import copy
import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from math import prod
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ... import kernels
from ...checkpoint import GATE_UP, ExpertTensor, packing_order
from ...experts import expert_parameters
from ..fused import PADDING_NBYTES, FastFusedSwitchGLU, FusedSwitchGLU, give_room
from ..reading.file import File
from ..reading.native import COLUMNS, COUNT, IOV, NBYTES, OFFSET
from ..reading.ranges import Ranges, Read


class SlotBank:
    """The bytes of S experts of one layer, in arrays that are written in place.

    ``resident`` has parameters of all E experts that stay in memory; a slot gets a copy of its
    expert's.
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
        self.path, self.num_slots = path, num_slots
        parameters = expert_parameters(module)
        order = packing_order(parameters)
        tensors = {n: located[f"{path}.{n}"] for n in order if f"{path}.{n}" not in resident}
        on_disk = {n: tensors[n].dtype if n in tensors else p.dtype for n, p in parameters.items()}
        gate, up = ([on_disk[n] for n in order if n.startswith(linear)] for linear in GATE_UP)
        fuse = fuse and gate == up
        converted = {n for n in tensors if tensors[n].dtype != parameters[n].dtype}
        # MLX's CUDA kernels refuse a part of a buffer that others share: it is not contiguous.
        shared = set() if mx.cuda.is_available() else converted
        parts, whole = _parts({n: parameters[n] for n in order}, shared, fuse)
        sizes = {}
        for key, _, last in parts.values():
            sizes[key] = max(last, sizes.get(key, 0))
        buffers = {key: _Buffer((num_slots, size), key[1]) for key, size in sizes.items()}
        self.experts = _module(module, whole, buffers, fuse)  # S experts; call it with slots
        self._rows = {
            n: buffers[key].rows[:, first:last] for n, (key, first, last) in parts.items()
        }
        self._tensors, self._ranges = tensors, ranges(tensors)
        self._memory = [
            (self._rows[n], _Buffer.over(resident[f"{path}.{n}"]).rows)
            for n in order
            if n not in tensors
        ]
        self._converted = _joined_conversions(parts, buffers, on_disk, converted)
        self._buffers = list(buffers.values())
        self._slots, self._empty = {}, set()
        self._tables = np.zeros((num_slots, len(self._ranges), len(COLUMNS)), np.int64)
        self.as_read = not (self._memory or self._converted)  # then ``arrived`` has nothing to do
        self.expert_nbytes = sum(rows[0].nbytes for rows in self._rows.values())

    @property
    def num_filled(self) -> int:
        """The number of slots that have memory: not emptied, or written since."""
        return self.num_slots - len(self._empty)

    def reads(self, slots: dict[int, int]) -> Ranges:
        """The reads that bring experts into slots.

        Call ``arrived`` for each expert when they have ended.
        """
        for slot in slots.values():
            self._slot(slot)
        self._empty.difference_update(slots.values())
        places, files, nbytes = self._places
        table = self._tables.take([*slots.values()], 0)
        table[..., : OFFSET + 1] = places.take([*slots], 0)

        def reads():
            return [
                Read(t.files[e], t.offsets[e], nbytes, views, t.name, e, parts)
                for e, slot in slots.items()
                for t, (nbytes, views, parts) in zip(self._firsts, self._slots[slot].disk)
            ]

        table = table.reshape(-1, len(COLUMNS))
        parts = [part for slot in slots.values() for *_, part in self._slots[slot].disk]
        return Ranges(table, nbytes * len(slots), files, reads, parts)

    def places(self, experts: Iterable[int]) -> Iterator[list[tuple[File, int, int]]]:
        """Where the bytes of experts lie: file, first byte and length of each range."""
        sizes = [sum(self._tensors[name].nbytes for name in names) for names in self._ranges]
        for e in experts:
            yield [(t.files[e], t.offsets[e], nbytes) for t, nbytes in zip(self._firsts, sizes)]

    @property
    def disk_nbytes(self) -> int:
        """The bytes of one expert on disk."""
        return self._places[2]

    @cached_property
    def into(self) -> list[tuple[int, int, int, int]]:
        """Where each part of an expert goes, if its ranges (``places``) lie one behind the other.

        For each part: its first byte among these, its address in slot 0, the distance from there
        to its address in slot 1, and its length.
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
        """File descriptors and offsets ``[E, ranges, 2]``, the files, and an expert's bytes."""
        places = [[(f.fd, at) for f, at in zip(t.files, t.offsets)] for t in self._firsts]
        files = {file for t in self._firsts for file in t.files}
        nbytes = sum(t.nbytes for t in self._tensors.values())
        return np.array(places, np.int64).swapaxes(0, 1), files, nbytes

    def arrived(self, expert: int, slot: int) -> None:
        """Complete an expert whose reads have ended: copy resident parameters, convert types."""
        parts = self._slot(slot)
        for rows, source in parts.memory:
            rows[...] = source[expert]
        for rows, bits, dtype, to in parts.converted:
            _convert(rows, bits, dtype, to)

    def empty(self, first: int, last: int) -> None:
        """Return the memory of slots ``[first:last]`` to the system until they are written again.

        Nothing may be reading or computing with one of these slots.
        """
        self._empty.update(range(first, last))
        for buffer in self._buffers:
            rows = buffer.rows[first:last]
            begin = -(-rows.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
            nbytes = (rows.ctypes.data + rows.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
            if nbytes > 0:
                _advise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)

    def _slot(self, slot):
        # The views are kept: slicing nine buffers takes longer than a small read.
        if slot in self._slots:
            return self._slots[slot]
        into = {n: self._rows[n][slot] for n in self._tensors}
        converted, to_convert = [], set()
        for rows, to, dtype, names in self._converted:
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
            # Parameters that are converted are read into the host's memory, so no GPU copies them.
            parts = () if to_convert.intersection(names) else _joined(parts)
            disk.append((sum(map(len, views)), views, parts))
        parts = self._slots[slot] = _Slot(
            disk, [(rows[slot], source) for rows, source in self._memory], converted, iovecs
        )
        return parts


def can_empty() -> bool:
    """Whether slots can return memory to the system and take it again: on a Linux CPU."""
    return sys.platform == "linux" and mx.default_device() == mx.cpu


def _advise(*arguments):
    ctypes.CDLL(None).madvise(*arguments)  # it is advice: a failure changes nothing


def ranges(tensors: dict[str, ExpertTensor]) -> list[list[str]]:
    """Group the names of parameters that follow each other on disk for every expert."""
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
    """Join neighbours among ranges of memory, each an address and its bytes."""
    joined = []
    for address, nbytes in parts:
        if joined and sum(joined[-1]) == address:
            address, nbytes = joined[-1][0], joined.pop()[1] + nbytes
        joined.append((address, nbytes))
    return joined


def _parts(parameters, shared, fuse):
    """Which part of which flat buffer ``[S, n]`` each parameter ``[E, ...]`` is.

    Those in ``shared`` have one buffer together, with ``fuse`` gate and up have one, and each other
    parameter has its own. Returns for each parameter the buffer, the first element and the first
    behind it; and for each parameter of the module the buffer, the first element and the shape.
    """
    sizes, parts, whole = {}, {}, {}
    for n, p in parameters.items():
        linear, param = n.rsplit(".", 1)
        shape, size = p.shape[1:], prod(p.shape[1:])
        if fuse and linear in GATE_UP:
            linear, shape = "gate_up_proj", (2 * shape[0], *shape[1:])
        key = "converted" if n in shared else (linear, param), p.dtype
        first = sizes.get(key, 0)
        sizes[key] = first + size
        parts[n] = key, first, first + size
        whole.setdefault((linear, param), (key, first, shape))
    return parts, whole


def _module(module, whole, buffers, fuse):
    """Copy the layer's module, or join its gate and up, with its parameters in the buffers."""
    linears = {}
    for (linear, param), (key, first, shape) in whole.items():
        if linear not in linears:
            linears[linear] = copy.copy(module["gate_proj" if linear == "gate_up_proj" else linear])
            give_room(linears[linear])
        linears[linear][param] = buffers[key].part(first, shape)
    if fuse:
        fast = isinstance(module, kernels.FastExperts)
        return (FastFusedSwitchGLU if fast else FusedSwitchGLU)(
            linears["gate_up_proj"], linears["down_proj"], module.activation
        )
    experts = copy.copy(module)
    for name, linear in linears.items():
        experts[name] = linear
    return experts


def _joined_conversions(parts, buffers, on_disk, converted):
    """The parameters to convert when they arrive: rows ``[S, n]``, type there, on disk, names.

    Neighbours are joined.
    """
    joined = []  # the buffer, the type on disk, the first element, the first behind, the parameters
    for n, (key, first, last) in parts.items():
        if n not in converted:
            continue
        if joined and joined[-1][:2] == [key, on_disk[n]]:
            joined[-1][3] = last
            joined[-1][4].append(n)
        else:
            joined.append([key, on_disk[n], first, last, [n]])
    return [
        (buffers[key].rows[:, first:last], key[1], dtype, names)
        for key, dtype, first, last, names in joined
    ]


class _Slot(NamedTuple):
    disk: list  # (nbytes, views, addresses and bytes of the views)
    memory: list  # (rows, rows of all E experts)
    converted: list  # (rows, bits as read, type read, type in memory)
    iovecs: list  # addresses and bytes of the views of each range, for native code


class _Buffer:
    """An MLX array, and its bits as a numpy view of unsigned integers."""

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
        rows[...] = np.asarray(kernels.to_mlx(bits).view(dtype).astype(to).view(_UNSIGNED[to.size]))
