"""Products of quantized or plain matrices with float32 rows, by kernels for this processor.

A weight is unpacked once for up to four rows and never stored unpacked. Other rows, matrices and
threads change neither the operations that compute an output nor their order. MLX adds in another
order, so its sums differ by rounding.

For affine weights, inputs are divided by a power of two and results are multiplied by it, so
that sums overflow no earlier than MLX's. The division changes no bit of a result, unless an input
is below 1.2e-35. If an input is inf or -inf, a result may be NaN here and inf or -inf with MLX.
"""

import ctypes
from itertools import chain, product
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import code, team
from .code import F32, I8, I16, I32, I64, Code, Kernel, address, ir

WORD = 32  # bits of a word of packed weights
# Each mode's possible bits of a weight and group sizes. ``float`` is plain float32.
FORMS = {"affine": ((2, 4, 8), (32, 64, 128)), "mxfp4": ((4,), (32,)), "float": ((32,), (1,))}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # mxfp4's weights, without their sign
# For each number of rows of x that share an unpacked weight: how many rows of weights are computed
# side by side, then how many of those left over. Rows side by side lie far apart, so that a
# processor prefetches several streams at once. Two cores of a Xeon read weights from memory at 29
# GB/s if a task takes four rows that lie far apart, and at 16 GB/s if it takes two adjacent rows.
ROWS = {4: (2, 1), 2: (2, 1), 1: (4, 1)}
# The number of int64 fields of a task, which multiplies rows of x with one matrix. Eight are
# addresses: weights, scales, biases, x, sums of x, y, the task's row numbers in x, and those in y.
# Three are counts: rows of x, rows of the matrix, and floats from one row of y to the next.
TASK = 11


def supported(bits: int, group_size: int, inputs: int, mode: str = "affine") -> bool:
    """Whether there is a kernel for such matrices, in a mode of ``mx.quantize`` or ``float``."""
    widths, groups = FORMS.get(mode, ((), ()))
    return (
        code.llvm is not None
        and bits in widths
        and group_size in groups
        and inputs % group_size == 0
        and inputs * bits % (4 * WORD) == 0
    )


def divisor(mode: str, bits: int) -> int:
    """The divisor of inputs: a power of two, at least what a word's affine weights add up to."""
    return (WORD // bits) << bits if mode == "affine" else 1


class Packed(NamedTuple):
    """Rows, divided by ``divisor``, in the order in which a kernel reads them."""

    x: int  # address of ``[rows, D / (L * n), n, L]``, for L lanes and n weights in a word
    sums: int  # address of the sums of each word's inputs, ``[rows, D / (L * n), L]``
    memory: np.ndarray  # the memory of ``x`` and ``sums``


class Parts(NamedTuple):
    """Which rows are multiplied with which matrices; arrays of int64."""

    matrix: np.ndarray  # ``[parts]``, the matrix of each part
    first: np.ndarray  # ``[parts]``, the place in ``x`` and ``y`` where the part begins
    rows: np.ndarray  # ``[parts]``, how many rows the part has
    x: np.ndarray  # row numbers in x, part after part
    y: np.ndarray  # row numbers in y, for the products of these rows of x

    @classmethod
    def of(cls, matrix: np.ndarray, x: np.ndarray, y: np.ndarray) -> "Parts":
        """Group n products by matrix; each product has a matrix, a row of x and a row of y."""
        order = np.argsort(matrix, kind="stable")
        found = np.unique(matrix[order], return_index=True, return_counts=True)
        return cls(*found, x[order], y[order])


class Matrices:
    """Quantized matrices of one shape, in memory that somebody else owns and may write to.

    Shapes: weight ``[E, N, D * bits / 32]`` as ``mx.quantize`` packs it, or float32; scales and
    biases ``[E, N, D / group_size]``, float32, or bfloat16 as uint16 (mxfp4: scales alone, uint8).
    A single matrix may lack the axis E.
    """

    def __init__(self, weight, scales, biases, group_size: int, bits: int, mode: str = "affine"):
        given = [a for a in (weight, scales, biases) if a is not None]
        self._arrays = [a if a.ndim == 3 else a[None] for a in given]
        weight = self._arrays[0]
        self.outputs, self.inputs = weight.shape[1], weight.shape[2] * WORD // bits
        for a in self._arrays:
            if a.strides[2] != a.itemsize or a.strides[1] != a.itemsize * a.shape[2]:
                raise ValueError(f"expected rows one after the other, got strides {a.strides}")
        # ``[E, 3]``: where each matrix's weights, scales and biases begin; 0 for none.
        self.addresses = np.zeros((len(weight), 3), np.int64)
        for i, a in enumerate(self._arrays):
            self.addresses[:, i] = a.ctypes.data + a.strides[0] * np.arange(len(weight))
        self._first = self.addresses[0].tolist()
        half = mode == "affine" and scales.itemsize == 2
        self.kernel, self._pack = kernel(mode, bits, group_size, self.inputs, half), None
        self._words = self.inputs * bits // WORD
        if mode != "float":
            form = bits, self.inputs, divisor(mode, bits)
            self._pack = code.kernel_of(_Packer, code.lanes(self._words), *form)

    def pack(self, x: np.ndarray) -> Packed:
        """Bring rows x ``[n, D]`` into the order in which the kernel takes them."""
        if self._pack is None:
            return Packed(address(x), 0, x)
        memory = code.empty(len(x) * (self.inputs + self._words))
        packed = address(memory)
        sums = packed + len(x) * self.inputs * x.itemsize
        pieces = team.pieces(4 * x.size, len(x))
        team.run(self._pack, x, packed, sums, len(x), pieces=pieces)
        return Packed(packed, sums, memory)

    def multiply(self, x: np.ndarray) -> np.ndarray:
        """Multiply rows x ``[n, D]`` with matrix 0: ``[n, N]``."""
        return Rows(x).multiply(self)[0]

    def multiply_parts(self, packed: Packed, parts: Parts, y: np.ndarray) -> None:
        """Multiply packed rows with several matrices into y ``[n, N]``; y may be strided."""
        if y.shape[1] != self.outputs:
            raise ValueError(f"expected room for rows of {self.outputs}, got {y.shape[1]}")
        tasks = np.empty((len(parts.matrix), TASK), np.int64)
        tasks[:, :3] = self.addresses[parts.matrix]
        tasks[:, 3:6] = packed.x, packed.sums, y.ctypes.data
        for column, numbers in (6, parts.x), (7, parts.y):
            tasks[:, column] = numbers.ctypes.data + parts.first * numbers.itemsize
        tasks[:, 8], tasks[:, 9] = parts.rows, self.outputs
        tasks[:, 10] = y.strides[0] // y.itemsize
        work = len(parts.x) * self.outputs * self.inputs
        pieces = team.pieces(work, self.outputs // 2)
        team.run(self.kernel, tasks, len(tasks), pieces=pieces)


class Rows:
    """Rows x ``[n, D]`` that are multiplied with several matrices, packed once for each form."""

    def __init__(self, x: np.ndarray):
        self.x, self._packed = x, {}

    @classmethod
    def of(cls, x: mx.array) -> "Rows":
        """Make rows of an array ``[..., D]``, which is evaluated, and copied if not contiguous."""
        return cls(np.ascontiguousarray(np.asarray(x).reshape(-1, x.shape[-1])))

    def packed_for(self, matrices: Matrices) -> Packed:
        """The rows in the order in which these matrices' kernel takes them."""
        if self.x.shape[-1] != matrices.inputs:
            raise ValueError(f"expected rows of {matrices.inputs} numbers, got {self.x.shape[-1]}")
        form = matrices._pack
        if form not in self._packed:
            self._packed[form] = matrices.pack(self.x)
        return self._packed[form]

    def multiply(self, *matrices: Matrices) -> list[np.ndarray]:
        """Multiply the rows with matrix 0 of each ``Matrices``: ``[n, N]``."""
        n, ys, calls = len(self.x), [], {}
        each = np.arange(n)
        at = address(each)
        for m in matrices:
            y, packed = code.empty(n, m.outputs), self.packed_for(m)
            ys.append(y)
            task = *m._first, packed.x, packed.sums, address(y), at, at, n, m.outputs, m.outputs
            calls.setdefault(m.kernel, []).append((m, task))
        for kernel, tasks in calls.items():
            table = (ctypes.c_int64 * (TASK * len(tasks)))(*chain(*(task for _, task in tasks)))
            work = n * sum(m.outputs * m.inputs for m, _ in tasks)
            pieces = team.pieces(work, max(m.outputs for m, _ in tasks) // 2)
            team.run(kernel, table, len(tasks), pieces=pieces)
        return ys


def kernel(mode: str, bits: int, group: int, inputs: int, half: bool = False) -> Kernel:
    """The kernel for matrices of one form; it takes the tasks' address and their number."""
    L = code.lanes(inputs * bits // WORD)
    return code.kernel_of(_Product, L, mode, bits, group, inputs, half)


class _Packer(Code):
    """Packs rows x in the order of ``Packed``; a block has L words, so L * n inputs."""

    form = "bits inputs divisor"

    def write(self, x, packed, sums, /, rows):
        share, L, n = self.all(1 / self.divisor), self.L, WORD // self.bits
        size = L * n
        with self.loop(*self.share(self.mul(rows, self.inputs // size))) as k:
            words = self.load(x, self.mul(k, size), ir.VectorType(F32, size))
            nothing, total = ir.Constant(words.type, ir.Undefined), None
            for i in range(n):
                mask = ir.Constant(self.ints, [i + n * lane for lane in range(L)])
                one = self.b.fmul(self.b.shuffle_vector(words, nothing, mask), share)
                self.store(one, packed, self.place(k, size, i * L))
                total = self.b.fadd(total, one) if total else one
            self.store(total, sums, self.mul(k, L))


class _Product(Code):
    """Computes n tasks, tile by tile, with some rows of x and of weights (``ROWS``) at a time."""

    form = "mode bits group inputs half"

    def write(self, tasks, n):
        b, tasks = self.b, self.pointer(tasks, I64)
        self.kind = I8 if self.mode == "mxfp4" else I16 if self.half else F32  # scales and biases
        self.n = WORD // self.bits
        self.words, self.groups = self.inputs // self.n, self.inputs // self.group
        byte = I8.as_pointer()
        self.prefetch = self._declare("llvm.prefetch.p0", ir.VoidType(), [byte, I32, I32, I32])
        if self.L == 16:  # a table in a register: only x86 has registers so wide
            name = "llvm.x86.avx512.permvar.sf.512"
            self._look_up = self._declare(name, self.floats, [self.floats, self.ints])

        def field(i, k):
            return self.load(tasks, self.place(i, TASK, k), I64, align=8)

        def with_work_of(i, before):
            return self.add(before, self.mul(field(i, 8), field(i, 9)))

        def least(one, other):
            return b.select(b.icmp_signed("<", one, other), one, other)

        total = [I64(0)]
        with self.loop(0, n, values=total) as i:
            total[0] = with_work_of(i, total[0])
        # Each piece is an equal, unbroken share of all tasks' work: a thread reads memory in order.
        begin, end = self.share(total[0])
        done = [I64(0)]  # the work of earlier tasks
        with self.loop(0, n, values=done) as i:
            fields, before = [field(i, k) for k in range(TASK)], done[0]
            kinds = [I32, self.kind, self.kind, F32, F32, F32, I64, I64]
            *pointers, of_x, of_y = [self.pointer(f, kind) for f, kind in zip(fields, kinds)]
            rows_of_x, weights, self.y_step = fields[8:]

            def within(bound):
                """Convert a bound of the shared work to a row of this task's weights."""
                at = b.sdiv(b.sub(bound, before), rows_of_x)
                at = b.select(b.icmp_signed("<", bound, before), I64(0), at)
                return least(at, weights)

            start, last = within(begin), within(end)
            # A tile's weights stay in a core's cache while all rows of x are multiplied with them.
            # If there is only one group of rows of x, all weights are one tile.
            alone = b.icmp_signed("<=", rows_of_x, I64(max(ROWS)))
            size = b.select(alone, self.add(b.sub(last, start), 1), I64(64))
            # ``loop`` makes whole steps only: a larger end adds a tile for the rows that remain.
            with self.loop(start, self.add(last, b.sub(size, I64(1))), size) as first:
                stop = least(self.add(first, size), last)
                for rows in self.in_groups(0, rows_of_x, ROWS):
                    xs, ys = ([self.load(of, j, I64, align=8) for j in rows] for of in (of_x, of_y))
                    at = first
                    for r in ROWS[len(rows)]:
                        at = self._rows(r, xs, ys, at, stop, *pointers)
            done[0] = with_work_of(i, before)

    def _rows(self, r, xs, ys, first, end, w, s, t, x, sums, y):
        """Multiply rows ``[first:end]`` of weights, r at a time; return the first row left over."""
        whole = ir.Constant(F32, float(divisor(self.mode, self.bits)))
        stretch = self.b.udiv(self.b.sub(end, first), I64(r))
        with self.loop(first, self.add(first, stretch)) as out:
            outs = [self.add(out, self.mul(stretch, i)) for i in range(r)]
            acc = [self.all(0)] * (r * len(xs))
            with self.loop(0, self.words // self.L, values=acc) as k:
                self._block(k, acc, xs, outs, w, s, t, x, sums)
            for total, (o, row) in zip(acc, product(outs, ys)):
                at = self.add(self.mul(row, self.y_step), o)
                self.store(self.b.fmul(self.sum(total), whole), y, at)
        return self.add(first, self.mul(stretch, r))

    def _block(self, k, acc, rows, outs, w, s, t, x, sums):
        """Multiply L words of some rows of weights with rows of x; add the products to ``acc``."""
        m = len(rows)
        at = [self.place(o, self.words, self.mul(k, self.L)) for o in outs]
        # A slot may begin at any byte of its buffer.
        words = [self.load(w, i, self.ints, align=1) for i in at]
        for i in at:
            # Prefetch 4 KB ahead: processors themselves prefetch only to the end of a page.
            ahead = self.b.gep(w, [self.add(i, 4096 * 8 // WORD)])
            ahead = self.b.bitcast(ahead, I8.as_pointer())
            # The arguments mean: fetch data, for reading, into the second-level cache.
            self.b.call(self.prefetch, [ahead, I32(0), I32(2), I32(1)])
        part = acc if self.mode == "float" else [None] * len(acc)
        for i in range(self.n):
            unpacked = [self._unpack(word, i) for word in words]
            of_block = self.place(k, self.n * self.L, i * self.L)
            for j, row in enumerate(rows):
                xs = self.load(x, self.place(row, self.inputs, of_block))
                for c, q in zip(range(j, len(acc), m), unpacked):
                    part[c] = self.fma(q, xs, part[c]) if part[c] else self.b.fmul(q, xs)
        if self.mode == "float":
            return
        for i, o in enumerate(outs):
            scale = self._scale(s, o, k)
            bias = self._of_group(t, o, k) if self.mode == "affine" else None
            for c, row in enumerate(rows, i * m):
                acc[c] = self.fma(part[c], scale, acc[c])
                if bias is not None:
                    at = self.place(row, self.inputs // self.n, self.mul(k, self.L))
                    acc[c] = self.fma(self.load(sums, at), bias, acc[c])

    def _unpack(self, word, i):
        """Weight i of each of L words."""
        if self.mode == "float":
            return self.b.bitcast(word, self.floats)
        shifted = self.b.lshr(word, self.all_ints(self.bits * i))
        if self.bits == 4 and self.L == 16:
            values = [*E2M1, *(-v for v in E2M1)] if self.mode == "mxfp4" else map(float, range(16))
            table = ir.Constant(self.floats, list(values))
            return self.b.call(self._look_up, [table, shifted])  # uses only the low four bits
        if self.mode == "mxfp4":
            return self._e2m1(shifted)
        return self.b.uitofp(self.b.and_(shifted, self.all_ints(2**self.bits - 1)), self.floats)

    def _e2m1(self, q):
        """The mxfp4 values that the low four bits encode."""
        b, ints = self.b, self.all_ints
        twice = sum(int(2 * v) << 4 * i for i, v in enumerate(E2M1))
        found = b.lshr(ints(twice), b.and_(b.shl(q, ints(2)), ints(28)))
        found = b.fmul(b.uitofp(b.and_(found, ints(15)), self.floats), self.all(0.5))
        sign = b.and_(b.shl(q, ints(28)), ints(1 << 31))
        return b.bitcast(b.or_(b.bitcast(found, self.ints), sign), self.floats)

    def _scale(self, pointer, row, k):
        if self.mode == "affine":
            return self._of_group(pointer, row, k)
        exponent = self.b.zext(self._of_group(pointer, row, k), self.ints)
        bits = self.b.shl(exponent, self.all_ints(23))
        least = self.all_ints(1 << 22)  # exponent 0 is 2^-127, below the normal numbers
        above = self.b.icmp_unsigned(">", bits, least)
        return self.b.bitcast(self.b.select(above, bits, least), self.floats)

    def _of_group(self, pointer, row, k):
        """Return the scale (or bias) of the group of each of L words."""
        each, first = self.L * self.n, self.mul(row, self.groups)
        groups = max(1, each // self.group)
        of_block = self.mul(k, groups)
        if self.group > each:
            of_block = self.b.udiv(k, I64(self.group // each))
        found = ir.VectorType(self.kind, groups)
        values = self.load(pointer, self.add(first, of_block), found, align=1)
        if self.kind is I16:  # the bits of a bfloat16 are the upper half of a float32's
            bits = ir.VectorType(I32, groups)
            found = ir.VectorType(F32, groups)
            values = self.b.shl(self.b.zext(values, bits), ir.Constant(bits, [16] * groups))
            values = self.b.bitcast(values, found)
        mask = ir.Constant(self.ints, [i * groups // self.L for i in range(self.L)])
        return self.b.shuffle_vector(values, ir.Constant(found, ir.Undefined), mask)
