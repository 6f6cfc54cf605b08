"""The memory of a layer's slots."""

import copy
import ctypes
import io
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ... import kernels
from ...checkpoint import GATE_UP, ExpertTensor, packing_order
from ...experts import expert_parameters
from ...system import HERE, Linux
from ..fused import PADDING_NBYTES, FastFusedSwitchGLU, FusedSwitchGLU, give_room
from ..reading import native
from ..reading.native import ALIGNED, COLUMNS, EXPERT, HUGE_NBYTES, address_of, alignment
from ..reading.ranges import Ranges

# Slots have no ``Record`` if whole blocks would add more than this share to an expert's bytes.
ROOM_SHARE = 1 / 16
MADV_POPULATE_WRITE = 23  # Linux 5.14: take the memory now; Python has no name for it
# Seconds per byte. A layer asks for huge pages if memory for slots so far took less time per byte.
# With huge pages 40 layers in 8 GB decode 1.1 to 1.4 times as fast, and a text of 128 tokens gains
# some 0.5 to 1 s for each GB of slots. A GB of huge pages took 0.2 to 0.5 s, but 1 to 4 s where
# Linux had to move other pages; a GB of small pages took 0.4 to 1.8 s (two cores).
HUGE_S = 1.5e-9


class SlotBank:
    """The bytes of S experts of one layer, in arrays that are written in place.

    A ``Record`` lays out a slot. Without a record each projection's parameter has its own array.
    ``resident`` parameters stay in memory for all E experts; a slot has a copy of its expert's row.
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
        record = Record.of(tensors, parameters)
        fuse = fuse and gate == up and (record is None or record.has_gate_beside_up)
        sizes, parts, whole = _parts({n: parameters[n] for n in order}, fuse, record)
        buffers = {key: _Buffer.of_zeros(num_slots, n, key[-1]) for key, n in sizes.items()}
        if record is not None:
            buffers[record] = _Buffer.for_huge_pages(num_slots, record.nbytes)
        self.experts = _module(module, whole, buffers, fuse)  # its indices are slots
        rows = {
            n: buffers[key].bits(parameters[n].dtype)[:, first:last]
            for n, (key, first, last) in parts.items()
        }
        self._memory = [
            (rows[n], _bits(resident[f"{path}.{n}"])) for n in order if n not in tensors
        ]
        self._converted, as_read = [], {n: rows[n] for n in tensors}
        for n, t in tensors.items():
            if (to := parameters[n].dtype) == t.dtype:
                continue
            size, bits = rows[n].shape[1], f"u{t.dtype.size}"
            if t.dtype.size < to.size:  # the read fills the last bytes of the result
                as_read[n] = rows[n].view(bits)[:, -size:]
            else:
                as_read[n] = np.empty((num_slots, size), bits)
            self._converted.append((rows[n], as_read[n], t.dtype, to))
        self._buffers = list(buffers.values())
        self._empty = set()
        self.as_read = not (self._memory or self._converted)  # then ``arrived`` has nothing to do
        # Parameters that are converted are read into the host's memory, so no GPU copies them.
        self._may_copy = not self._converted
        self.expert_nbytes = sum(b.rows.shape[1] for b in self._buffers)
        self.disk_nbytes = sum(t.nbytes for t in tensors.values())  # the bytes of one expert
        self._files = {file.fd: file for t in tensors.values() for file in t.files}
        groups = ranges(tensors)
        self._firsts = [tensors[names[0]] for names in groups]
        self.num_ranges = len(groups)  # how many ranges of files hold an expert's bytes
        self._names = [t.name for t in self._firsts]
        self.into, self._tables, self._iovecs = _tables([[as_read[n] for n in g] for g in groups])
        self._align = ALIGNED
        if record is not None:
            first, slots = buffers[record].rows.ctypes.data, np.arange(num_slots)[:, None]
            self._tables[..., native.ROOM] = first + slots * record.nbytes + record.rooms
            self._align = record.align

    @property
    def nbytes(self) -> int:
        """The bytes of all slots with memory; an emptied slot has none until it is filled."""
        return (self.num_slots - len(self._empty)) * self.expert_nbytes

    def reads(self, slots: dict[int, int]) -> Ranges:
        """The reads that bring experts into slots; afterwards call ``arrived`` for each expert."""
        self._empty.difference_update(slots.values())
        return self._ranges([*slots], [*slots.values()])

    def places(self, experts: Sequence[int]) -> Ranges:
        """Where the bytes of experts lie in the files, expert by expert. (All rows name slot 0.)"""
        return self._ranges(experts, [0] * len(experts))

    def _ranges(self, experts, slots):
        table = self._tables.take(slots, 0)
        table[..., : EXPERT + 1] = self._places.take(experts, 0)
        table = table.reshape(-1, len(COLUMNS))
        made = Ranges(table, self._files, self._names, self._may_copy, self._align, kept=self)
        made.nbytes = len(slots) * self.disk_nbytes  # a sum over the table takes longer
        return made

    @cached_property
    def _places(self):
        """The file descriptor, first byte and expert of each range, ``[E, ranges, 3]``."""
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

    def populate(self, huge: bool) -> None:
        """Take the slots' memory from the system now, so that a prompt's reads do not wait."""
        for buffer in self._buffers:
            if huge:
                _advise(buffer.rows, HUGE_NBYTES, mmap.MADV_HUGEPAGE)
            _advise(buffer.rows, mmap.PAGESIZE, MADV_POPULATE_WRITE)

    def empty(self, first: int, last: int) -> None:
        """Return the memory of slots ``[first:last]``, which nothing uses, to the system."""
        self._empty.update(range(first, last))
        for buffer in self._buffers:
            _advise(buffer.rows[first:last], mmap.PAGESIZE, mmap.MADV_DONTNEED)


def slot_nbytes(
    path: str, parameters: dict[str, mx.array], located: dict[str, ExpertTensor]
) -> int:
    """The bytes of a slot for ``parameters`` ``[E, ...]``; ``located`` names those on disk."""
    tensors = {n: located[f"{path}.{n}"] for n in parameters if f"{path}.{n}" in located}
    record = Record.of(tensors, parameters) if tensors else None
    alone = [p[0].nbytes for n, p in parameters.items() if record is None or n not in tensors]
    return sum(alone) + (record.nbytes if record is not None else 0)


def can_empty() -> bool:
    """Whether slots can return memory to the system and take it again (on a CPU with Linux)."""
    return isinstance(HERE, Linux) and mx.default_device() == mx.cpu


@dataclass(frozen=True, eq=False)
class Record:
    """The layout of a slot into which the disk writes whole blocks, past the page cache.

    A slot has a room for each range of bytes: a room fits all disk blocks that the range touches.
    If the range begins at the same byte of a block for every expert, and the types may begin there,
    its bytes stay where the read puts them. Otherwise the bytes move to the room's start.
    """

    nbytes: int  # of a slot
    align: int  # of blocks, in bytes
    rooms: list[int]  # the first byte of each range's room
    places: dict[str, int]  # the first byte of each parameter
    sizes: dict[str, int]  # the bytes of each parameter

    @classmethod
    def of(
        cls, tensors: dict[str, ExpertTensor], parameters: dict[str, mx.array]
    ) -> "Record | None":
        """Make the record of ``tensors``; None if these parameters cannot have a record here."""
        files = {str(file) for t in tensors.values() for file in t.files[:1]}
        align = min(map(alignment, files), default=0) and max(map(alignment, files))
        if not can_empty() or any(t.dtype != parameters[n].dtype for n, t in tensors.items()):
            return None
        if not align or HUGE_NBYTES % align:
            return None
        rooms, places, at = [], {}, 0
        for names in ranges(tensors):
            nbytes = [tensors[n].nbytes for n in names]
            before = {offset % align for offset in tensors[names[0]].offsets}
            for shift in [*before, 0] if len(before) == 1 else [0]:
                firsts = at + shift + np.cumsum([0, *nbytes[:-1]])
                sizes = [tensors[n].dtype.size for n in names]
                if is_aligned := not (firsts % sizes).any():
                    break
            if not is_aligned:
                return None
            places |= zip(names, firsts.tolist())
            rooms.append(at)
            at += -(-(max(before) + sum(nbytes)) // align) * align
        # Whole blocks take too much memory if the expert is small.
        sizes = {n: t.nbytes for n, t in tensors.items()}
        small = at > sum(sizes.values()) * (1 + ROOM_SHARE)
        return None if small else cls(at, align, rooms, places, sizes)

    @property
    def has_gate_beside_up(self) -> bool:
        """Whether each parameter of up follows that of gate, so that one matrix can hold both."""
        gate, up = (
            {n.rsplit(".", 1)[1]: n for n in self.places if n.startswith(linear)}
            for linear in GATE_UP
        )
        return all(self.places[up[k]] - self.places[gate[k]] == self.sizes[gate[k]] for k in gate)


def ranges(tensors: dict[str, ExpertTensor]) -> list[list[str]]:
    """Group the names of parameters: those of a group adjoin on disk, for every expert."""
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
    """Return the places of parts, and the reads' tables ``[S, ranges, COLUMNS]`` and iovecs.

    ``groups`` lists, for each range, the parts ``[S, n]`` of memory that the range fills.
    """
    # A part's place is four numbers: its first byte when an expert's ranges are laid end to end,
    # its address in slot 0, the distance from slot to slot, and its size in bytes.
    into, firsts, at = [], [], 0
    for rows in groups:
        firsts.append(len(into))
        for r in rows:
            to, stride, nbytes = r.ctypes.data, r.strides[0], r[0].nbytes
            if into[firsts[-1] :] and into[-1][1:3] == [to - into[-1][3], stride]:
                into[-1][3] += nbytes  # this part follows the part before in each slot
            else:
                into.append([at, to, stride, nbytes])
            at += nbytes
    slots, places = np.arange(len(groups[0][0]))[:, None], np.array(into, np.int64)
    iovecs = np.empty((len(slots), len(into), 2), np.int64)
    iovecs[..., 0], iovecs[..., 1] = places[:, 1] + slots * places[:, 2], places[:, 3]
    tables = np.zeros((len(slots), len(groups), len(COLUMNS)), np.int64)
    tables[..., native.TENSOR] = np.arange(len(groups))
    tables[..., native.IOV] = address_of(iovecs) + iovecs[0, 0].nbytes * (
        slots * len(into) + firsts
    )
    tables[..., native.COUNT] = np.diff([*firsts, len(into)])
    tables[..., native.NBYTES] = np.add.reduceat(places[:, 3], firsts)
    return into, tables, iovecs


def _parts(parameters, fuse, record):
    """Find the part of a flat buffer ``[S, n]`` that each parameter ``[E, ...]`` takes.

    Returns three tables: the number of elements per row of each buffer outside the record; the
    buffer, first element and end of each parameter; and the buffer, first element, shape and type
    of each parameter of the computing module.
    """
    sizes, parts, whole = {}, {}, {}
    for n, p in parameters.items():
        linear, param = n.rsplit(".", 1)
        shape, size = p.shape[1:], prod(p.shape[1:])
        if fuse and linear in GATE_UP:
            linear, shape = "gate_up_proj", (2 * shape[0], *shape[1:])
        if record is not None and n in record.places:
            key, first = record, record.places[n] // p.dtype.size
        else:
            key = linear, param, p.dtype
            first = sizes.get(key, 0)
            sizes[key] = first + size
        parts[n] = key, first, first + size
        whole.setdefault((linear, param), (key, first, shape, p.dtype))
    return sizes, parts, whole


def _module(module, whole, buffers, fuse):
    """Copy a layer's module; the copy computes from ``buffers``; ``fuse`` joins gate and up."""
    linears = {}
    for (linear, param), (key, *part) in whole.items():
        if linear not in linears:
            linears[linear] = copy.copy(module["gate_proj" if linear == "gate_up_proj" else linear])
            give_room(linears[linear])
        linears[linear][param] = buffers[key].part(*part)
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
    """Memory of S rows of bytes (``rows``, numpy), and MLX arrays in it."""

    def __init__(self, array: mx.array, first: int, num_rows: int, nbytes: int):
        mx.eval(array)
        self._array, self._first = array, first
        memory = np.asarray(array).reshape(-1).view(np.uint8)
        self.rows = memory[first : first + num_rows * nbytes].reshape(num_rows, nbytes)

    @classmethod
    def of_zeros(cls, num_rows: int, size: int, dtype: mx.Dtype) -> "_Buffer":
        """Make rows of ``size`` zeros, with padding behind them for MLX's CUDA kernel."""
        # Metal gives memory in whole pages of 16 KB, and padding would take one more page.
        padding = 0 if mx.metal.is_available() else PADDING_NBYTES // dtype.size
        zeros = mx.zeros(num_rows * size + padding, _UNSIGNED[dtype.size])
        return cls(zeros, 0, num_rows, size * dtype.size)

    @classmethod
    def for_huge_pages(cls, num_rows: int, nbytes: int) -> "_Buffer":
        """Make rows of untouched memory. (``mx.zeros`` would write to it and get small pages.)"""
        page = HUGE_NBYTES if num_rows * nbytes >= HUGE_NBYTES else ALIGNED
        shape = -(-(num_rows * nbytes + page) // ALIGNED), ALIGNED
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file := _Unwritten(), header)
        file.seek(0)
        array = mx.load(file, format="npy")
        mx.eval(array)
        return cls(array, -np.asarray(array).ctypes.data % page, num_rows, nbytes)

    def bits(self, dtype: mx.Dtype) -> np.ndarray:
        """The rows as unsigned integers of a type's size."""
        return self.rows.view(f"u{dtype.size}")

    def part(self, first: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """A view ``[S, *shape]`` that begins at element ``first`` of every row."""
        (num, nbytes), size = self.rows.shape, dtype.size
        strides = nbytes // size, *(prod(shape[i + 1 :]) for i in range(len(shape)))
        first += self._first // size
        part = mx.as_strided(self._array.view(dtype), (num, *shape), strides, first)
        mx.eval(part)
        return part


class _Unwritten(io.BytesIO):
    """A file with a header only: reads past the header succeed and leave memory untouched."""

    def readinto(self, memory):
        return super().readinto(memory) or len(memory)


def _advise(rows, pages, advice):
    """Advise the system about the whole pages of contiguous rows; ignore failures."""
    begin = -(-rows.ctypes.data // pages) * pages
    nbytes = (rows.ctypes.data + rows.nbytes - begin) // pages * pages
    if nbytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), advice)


def _bits(array):
    """The memory of an array ``[E, ...]`` as unsigned integers ``[E, n]``."""
    bits = array.view(_UNSIGNED[array.dtype.size])
    mx.eval(bits)
    return np.asarray(bits).reshape(len(array), -1)


_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def _convert(rows, bits, dtype, to):
    """Convert ``bits``, of type ``dtype``, to type ``to`` in ``rows``."""
    if dtype == mx.bfloat16 and to == mx.float32:
        # numpy has no bfloat16, but its bits are the upper half of a float32's.
        np.left_shift(bits, 16, out=rows, dtype=np.uint32)
    else:
        rows[...] = np.asarray(kernels.to_mlx(bits).view(dtype).astype(to).view(_UNSIGNED[to.size]))
