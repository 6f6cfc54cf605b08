"""The memory of a layer's slots."""

import copy
import ctypes
import mmap
import sys
from collections.abc import Sequence
from functools import cached_property
from math import prod

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ... import kernels
from ...checkpoint import GATE_UP, ExpertTensor, packing_order
from ...experts import expert_parameters
from ..fused import PADDING_NBYTES, FastFusedSwitchGLU, FusedSwitchGLU, give_room
from ..reading.native import COLUMNS, COUNT, EXPERT, IOV, NBYTES, TENSOR, address_of
from ..reading.ranges import Ranges


class SlotBank:
    """The bytes of S experts of one layer, in arrays that are written in place.

    ``resident`` parameters stay in memory for all E experts; a slot gets a copy of its expert's.
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
        shared = {} if mx.cuda.is_available() else {n: on_disk[n] for n in converted}
        sizes, parts, whole = _parts({n: parameters[n] for n in order}, shared, fuse)
        buffers = {key: _Buffer((num_slots, size), key[1]) for key, size in sizes.items()}
        self.experts = _module(module, whole, buffers, fuse)  # S experts; call it with slots
        rows = {n: buffers[key].rows[:, first:last] for n, (key, first, last) in parts.items()}
        self._memory = [
            (rows[n], _bits(resident[f"{path}.{n}"])) for n in order if n not in tensors
        ]
        self._converted, as_read = [], {n: rows[n] for n in tensors}
        for key, buffer in buffers.items():
            names = [n for n in parts if n in converted and parts[n][0] == key]
            if not names:
                continue
            dtype, to, size = on_disk[names[0]], key[1], buffer.rows.shape[1]
            if dtype.size < to.size:  # read into the end of the memory that the result will fill
                bits = buffer.rows.view(f"u{dtype.size}")[:, -size:]
            else:
                bits = np.empty(buffer.rows.shape, f"u{dtype.size}")
            self._converted.append((buffer.rows, bits, dtype, to))
            as_read |= {n: bits[:, slice(*parts[n][1:])] for n in names}
        self._buffers = list(buffers.values())
        self._empty = set()
        self.as_read = not (self._memory or converted)  # then ``arrived`` has nothing to do
        # Parameters that are converted are read into the host's memory, so no GPU copies them.
        self._may_copy = not converted
        self.expert_nbytes = sum(r[0].nbytes for r in rows.values())
        self.disk_nbytes = sum(t.nbytes for t in tensors.values())  # the bytes of one expert
        self._files = {file.fd: file for t in tensors.values() for file in t.files}
        groups = ranges(tensors)
        self._firsts = [tensors[names[0]] for names in groups]
        self._names = [t.name for t in self._firsts]
        self.into, self._tables, self._iovecs = _tables([[as_read[n] for n in g] for g in groups])

    @property
    def nbytes(self) -> int:
        """The bytes of the slots that have memory: not emptied, or written since."""
        return (self.num_slots - len(self._empty)) * self.expert_nbytes

    def reads(self, slots: dict[int, int]) -> Ranges:
        """The reads that bring experts into slots; call ``arrived`` for each once they ended."""
        self._empty.difference_update(slots.values())
        return self._ranges([*slots], [*slots.values()])

    def places(self, experts: Sequence[int]) -> Ranges:
        """Where the bytes of experts lie, one expert after the other; reads would fill slot 0."""
        return self._ranges(experts, [0] * len(experts))

    def _ranges(self, experts, slots):
        table = self._tables.take(slots, 0)
        table[..., : EXPERT + 1] = self._places.take(experts, 0)
        table = table.reshape(-1, len(COLUMNS))
        made = Ranges(table, self._files, self._names, self._may_copy, kept=self)
        made.nbytes = len(slots) * self.disk_nbytes  # adding them up takes longer
        return made

    @cached_property
    def _places(self):
        """Descriptor, first byte and expert of each expert's ranges, ``[E, ranges, 3]``."""
        places = np.empty((len(self._firsts[0].files), len(self._firsts), 3), np.int64)
        for i, t in enumerate(self._firsts):
            places[:, i, 0], places[:, i, 1] = [file.fd for file in t.files], t.offsets
        places[..., 2] = np.arange(len(places))[:, None]
        return places

    def arrived(self, expert: int, slot: int) -> None:
        """Complete an expert whose reads have ended: copy resident parameters, convert types."""
        for rows, source in self._memory:
            rows[slot] = source[expert]
        for rows, bits, dtype, to in self._converted:
            _convert(rows[slot], bits[slot], dtype, to)

    def empty(self, first: int, last: int) -> None:
        """Return the memory of slots ``[first:last]``, which nothing uses, to the system."""
        self._empty.update(range(first, last))
        for buffer in self._buffers:
            rows = buffer.rows[first:last]
            begin = -(-rows.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
            nbytes = (rows.ctypes.data + rows.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
            if nbytes > 0:  # it is advice: a failure changes nothing
                begin, nbytes = ctypes.c_void_p(begin), ctypes.c_size_t(nbytes)
                ctypes.CDLL(None).madvise(begin, nbytes, mmap.MADV_DONTNEED)


def can_empty() -> bool:
    """Whether slots can return memory to the system and take it again: on a Linux CPU."""
    return sys.platform == "linux" and mx.default_device() == mx.cpu


def ranges(tensors: dict[str, ExpertTensor]) -> list[list[str]]:
    """Group the names of parameters that follow each other on disk for every expert."""
    found, last = [], None
    for name in sorted(tensors, key=lambda n: (str(tensors[n].files[0]), tensors[n].offsets[0])):
        t = tensors[name]
        if last and last.files == t.files and t.offsets == [o + last.nbytes for o in last.offsets]:
            found[-1].append(name)
        else:
            found.append([name])
        last = t
    return found


def _tables(groups):
    """The tables ``[S, ranges, COLUMNS]`` that read experts into slots, and their iovecs.

    ``groups`` lists for each range the parts ``[S, n]`` of memory that it fills. Also returns where
    each part of an expert goes, if its ranges lie one behind the other: its first byte among these,
    its address in slot 0, the distance from there to its address in slot 1, and its length.
    """
    into, firsts, at = [], [], 0
    for rows in groups:
        firsts.append(len(into))
        for r in rows:
            to, stride, nbytes = r.ctypes.data, r.strides[0], r[0].nbytes
            if into[firsts[-1] :] and into[-1][1:3] == [to - into[-1][3], stride]:
                into[-1][3] += nbytes  # it follows the part before it in each slot
            else:
                into.append([at, to, stride, nbytes])
            at += nbytes
    slots, places = np.arange(len(groups[0][0]))[:, None], np.array(into, np.int64)
    iovecs = np.empty((len(slots), len(into), 2), np.int64)
    iovecs[..., 0], iovecs[..., 1] = places[:, 1] + slots * places[:, 2], places[:, 3]
    tables = np.zeros((len(slots), len(groups), len(COLUMNS)), np.int64)
    tables[..., TENSOR] = np.arange(len(groups))
    tables[..., IOV] = address_of(iovecs) + iovecs[0, 0].nbytes * (slots * len(into) + firsts)
    tables[..., COUNT] = np.diff([*firsts, len(into)])
    tables[..., NBYTES] = np.add.reduceat(places[:, 3], firsts)
    return into, tables, iovecs


def _parts(parameters, shared, fuse):
    """Which part of which flat buffer ``[S, n]`` each parameter ``[E, ...]`` is.

    Parameters in ``shared`` with the same types there and in memory share a buffer, with ``fuse``
    gate and up share one, and any other has its own. Returns the size of each buffer; for each
    parameter the buffer, the first element and the first behind it; and for each parameter of the
    module the buffer, the first element and the shape.
    """
    sizes, parts, whole = {}, {}, {}
    for n, p in parameters.items():
        linear, param = n.rsplit(".", 1)
        shape, size = p.shape[1:], prod(p.shape[1:])
        if fuse and linear in GATE_UP:
            linear, shape = "gate_up_proj", (2 * shape[0], *shape[1:])
        key = shared.get(n, (linear, param)), p.dtype
        first = sizes.get(key, 0)
        sizes[key] = first + size
        parts[n] = key, first, first + size
        whole.setdefault((linear, param), (key, first, shape))
    return sizes, parts, whole


def _module(module, whole, buffers, fuse):
    """A copy of the layer's module with parameters in ``buffers``; ``fuse`` joins gate and up."""
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


class _Buffer:
    """An MLX array, and its bits as a numpy view of unsigned integers."""

    def __init__(self, shape, dtype):
        size = prod(shape)
        bits = mx.zeros(size + PADDING_NBYTES // dtype.size, _UNSIGNED[dtype.size])
        mx.eval(bits)
        self.rows = np.asarray(bits)[:size].reshape(shape)
        self.array = bits.view(dtype)
        mx.eval(self.array)

    def part(self, first, shape):
        """A view ``[S, *shape]`` that begins at element ``first`` of every row."""
        rows, size = self.rows.shape
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        part = mx.as_strided(self.array, (rows, *shape), (size, *strides), first)
        mx.eval(part)
        return part


def _bits(array):
    """The memory of an array ``[E, ...]`` as unsigned integers ``[E, n]``."""
    bits = array.view(_UNSIGNED[array.dtype.size])
    mx.eval(bits)
    return np.asarray(bits).reshape(len(array), -1)


_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def _convert(rows, bits, dtype, to):
    if dtype == mx.bfloat16 and to == mx.float32:
        # numpy has no bfloat16, but its bits are the upper half of a float32's.
        np.left_shift(bits, 16, out=rows, dtype=np.uint32)
    else:
        rows[...] = np.asarray(kernels.to_mlx(bits).view(dtype).astype(to).view(_UNSIGNED[to.size]))
