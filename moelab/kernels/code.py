"""What the kernels share: helpers that write LLVM code, and build it for this processor."""

import ctypes
import os
import threading
from contextlib import contextmanager
from functools import cache
from inspect import signature
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

try:
    from llvmlite import binding as llvm
    from llvmlite import ir

    llvm.get_host_cpu_name()  # loads LLVM
except (ImportError, OSError):  # the package is optional, or its library is missing
    llvm = ir = F32 = I8 = I16 = I32 = I64 = None
else:
    from . import stored

    F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(n) for n in (8, 16, 32, 64))


@cache
def widest() -> int:
    """Floats in a vector: 16 with AVX-512, else 8, which some processors compute in two steps."""
    return 16 if llvm.get_host_cpu_features().get("avx512f") else 8


def lanes(size: int) -> int:
    """Return how many numbers a kernel handles side by side in a row of this size."""
    return next(L for L in (16, 8, 4, 2, 1) if widest() >= L and size % L == 0)


def num_threads() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


FLOAT32 = frozenset((mx.float32, np.dtype("float32")))
BLOCK = 2**16  # floats that ``Memory`` asks for at once
recording = threading.local()  # ``program``: the ``team.Program`` that a thread records


def recorded() -> Any:
    """The ``team.Program`` that this thread records, or None."""
    return getattr(recording, "program", None)


class Memory:
    """Memory for consecutive arrays; after ``rewind`` the next arrays get the same memory."""

    def __init__(self):
        self._blocks, self._now, self._at = [], 0, 0

    def rewind(self) -> None:
        """Start over: the next arrays share the memory of the earlier arrays."""
        self._now = self._at = 0

    def empty(self, *shape: int) -> np.ndarray:
        """Return an uninitialized float32 array."""
        n = prod(shape)
        while self._now < len(self._blocks) and self._at + n > self._blocks[self._now].size:
            self._now, self._at = self._now + 1, 0
        if self._now == len(self._blocks):
            block = np.empty(max(n, BLOCK) + 16, np.float32)
            self._blocks.append(block[-block.ctypes.data % 64 // 4 :])
        a = self._blocks[self._now][self._at : self._at + n]
        self._at += -(-n // 16) * 16  # each array begins in a cache line of its own
        return a.reshape(shape)


def empty(*shape: int) -> np.ndarray:
    """Return an uninitialized float32 array, in the recorded program's memory if there is one."""
    memory = getattr(recorded(), "memory", None)
    return np.empty(shape, np.float32) if memory is None else memory.empty(*shape)


def keep(a: object) -> None:
    """Keep ``a`` alive as long as the program that is being recorded."""
    if (program := recorded()) is not None:
        program.kept.append(a)


def address(a: np.ndarray | None) -> int:
    """The address of an array; 0 for None."""
    if a is None:
        return 0
    keep(a)
    try:  # takes a third of the time of ``a.ctypes``
        return ctypes.addressof(ctypes.c_char.from_buffer(a))
    except (TypeError, ValueError):  # a read-only or non-contiguous array
        return a.ctypes.data


def check(shape: tuple[int, ...], **arrays: np.ndarray | mx.array | None) -> None:
    """Raise ValueError if one of these arrays is given and is not float32 of this shape."""
    for name, a in arrays.items():
        if a is not None and (a.shape != shape or a.dtype not in FLOAT32):
            kind = str(a.dtype).removeprefix("mlx.core.")
            raise ValueError(f"{name}: expected float32 {shape}, got {kind} {a.shape}")


def to_mlx(a: np.ndarray) -> mx.array:
    """Copy an array by its buffer: ``mx.array(a)`` goes through DLPack, where a Ctrl-C is lost."""
    return mx.array(a.data)


def in_rows(a: np.ndarray) -> np.ndarray:
    """Return an array ``[..., T, D]``, copied if the rows of its matrices are not contiguous."""
    in_order = a.strides[-2:] == (a.itemsize * a.shape[-1], a.itemsize)
    return a if in_order else np.ascontiguousarray(a)


@cache
def kernel_of(kind: type["Code"], *args: Any) -> "Kernel":
    """Return a class's kernel for L lanes and a form. It has no addresses, so it can be stored."""
    writer, name = kind(*args), f"{kind.__name__}{args}"
    found = stored.load(name)
    if found is None:
        found = writer.compile()
        stored.save(name, found)
    return writer.link(found)


class Kernel:
    """A function of native code. Call it with numbers and addresses."""

    def __init__(self, address: int, num_arguments: int, engine: object):
        self.address, self._engine = address, engine
        self._function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)
        self.arguments = ctypes.c_int64 * num_arguments

    def __call__(self, *numbers: int) -> None:
        """Compute all of the work in this thread, with the GIL released."""
        arguments = self.arguments(*numbers)
        self._function(ctypes.addressof(arguments), 0, 1)


def i64(x):
    """Return a constant if x is an int of Python, else x."""
    return I64(x) if isinstance(x, int) else x


class Code:
    """A function ``run(arguments, piece, pieces)``, which a subclass's ``write`` writes for LLVM.

    ``form`` names the constants. The parameters of ``write`` are the arguments: addresses of floats
    before the ``/``, other numbers after it.
    """

    form = ""

    def __init__(self, L: int, *form: Any):
        self.__dict__.update(zip(self.form.split(), form))
        self.L, self.floats, self.ints = L, ir.VectorType(F32, L), ir.VectorType(I32, L)
        self._module = ir.Module()
        self._module.triple = llvm.get_default_triple()
        self.function = self._declare("run", ir.VoidType(), [I64] * 3)
        self.b = ir.IRBuilder(self.function.append_basic_block())
        first, self.piece, self.pieces = self.function.args
        first = self.pointer(first, I64)
        kinds = [p.kind for p in signature(self.write).parameters.values()]
        numbers = [self.load(first, i, I64, align=8) for i in range(len(kinds))]
        self.arguments = [
            self.pointer(n, F32) if kind.name == "POSITIONAL_ONLY" else n
            for n, kind in zip(numbers, kinds)
        ]

    def _declare(self, name, returns, arguments):
        return ir.Function(self._module, ir.FunctionType(returns, arguments), name)

    def compile(self) -> bytes:
        """Write the function, and return its object code for this processor."""
        self.write(*self.arguments)
        self.b.ret_void()
        machine = _machine()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        passes = llvm.create_pass_builder(machine, options)
        # Free the module here: a Ctrl-C in its ``__del__`` would be lost.
        with llvm.parse_assembly(str(self._module)) as parsed:
            parsed.verify()
            passes.getModulePassManager().run(parsed, passes)
            return machine.emit_object(parsed)

    def link(self, code: bytes) -> Kernel:
        """Make a kernel of object code."""
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return Kernel(engine.get_function_address("run"), len(self.arguments), engine)

    def pointer(self, address, kind):
        return self.b.inttoptr(address, kind.as_pointer())

    @contextmanager
    def loop(self, first, end, step=1, values=None):
        """Repeat the block's code for i = first, first + step, ..., while i + step <= end.

        The block may change the list ``values``: the next step and the code after the loop get what
        is in it. After the loop, i is the first number that is left over.
        """
        before, values = self.b.block, [] if values is None else values
        head, inside, after = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        i, *held = phis = [self.b.phi(kind) for kind in (I64, *(v.type for v in values))]
        for phi, v in zip(phis, (i64(first), *values)):
            phi.add_incoming(v, before)
        more = self.b.icmp_signed("<=", self.add(i, step), i64(end))
        self.b.cbranch(more, inside, after)
        self.b.position_at_end(inside)
        values[:] = held
        yield i
        for phi, v in zip(phis, (self.add(i, step), *values)):
            phi.add_incoming(v, self.b.block)
        values[:] = held
        self.b.branch(head)
        self.b.position_at_end(after)

    def in_groups(self, first, end, sizes):
        """Yield the numbers from ``first`` to ``end`` in groups of these sizes."""
        for size in sizes:
            with self.loop(first, end, size) as i:
                yield [self.add(i, k) for k in range(size)]
            first = i

    def load(self, pointer, at, kind=None, align=4):
        """Load a value; a vector of floats if ``kind`` is None."""
        kind = self.floats if kind is None else kind
        at = self.b.gep(pointer, [i64(at)])
        value = self.b.load(self.b.bitcast(at, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value, pointer, at):
        at = self.b.gep(pointer, [i64(at)])
        self.b.store(value, self.b.bitcast(at, value.type.as_pointer())).align = 4

    def fma(self, a, b, c):
        return self.intrinsic("fma", a, b, c)

    def spread(self, x):
        """Put a number in every place of a vector."""
        nothing = ir.Constant(self.floats, ir.Undefined)
        one = self.b.insert_element(nothing, x, I32(0))
        return self.b.shuffle_vector(one, nothing, self.all_ints(0))

    def sum(self, v):
        """The sum of a vector: halves are added until one number is left."""
        half = self.L
        while half > 1:
            half //= 2
            nothing, places = ir.Constant(v.type, ir.Undefined), ir.VectorType(I32, half)
            low, high = (
                self.b.shuffle_vector(v, nothing, ir.Constant(places, list(range(a, a + half))))
                for a in (0, half)
            )
            v = self.b.fadd(low, high)
        return self.first(v)

    def first(self, v):
        """The first number of a vector."""
        return self.b.extract_element(v, I32(0))

    def add(self, a, b):
        return self.b.add(a, i64(b))

    def mul(self, a, b):
        return self.b.mul(a, i64(b))

    def place(self, row, size, j):
        """The place of number j of a row, among rows of this size."""
        return self.add(self.mul(row, size), j)

    def all(self, x):
        """Return a vector with a constant in every place."""
        return ir.Constant(self.floats, [float(x)] * self.L)

    def all_ints(self, x):
        return ir.Constant(self.ints, [x] * self.L)

    def intrinsic(self, name, *vectors):
        """Call LLVM's function ``name``, which takes vectors of floats and returns one vector."""
        name = f"llvm.{name}.v{self.L}f32"
        found = self._module.globals.get(name)
        found = found or self._declare(name, self.floats, [self.floats] * len(vectors))
        return self.b.call(found, vectors)

    def exp(self, x):
        """Compute e to the power of each number, within 1e-7: 2**n times a polynomial (Cephes)."""
        b = self.b
        low, high = self.all(-104), self.all(89)  # beyond these the result is 0 or inf
        within = b.select(b.fcmp_ordered("<", x, low), low, x)
        within = b.select(b.fcmp_ordered(">", within, high), high, within)
        n = self.intrinsic("floor", self.fma(within, self.all(1.44269504), self.all(0.5)))
        rest = self.fma(n, self.all(-0.693359375), within)
        rest = self.fma(n, self.all(2.12194440e-4), rest)
        y = self.all(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.5):
            y = self.fma(y, rest, self.all(c))
        y = b.fadd(self.fma(b.fmul(y, rest), rest, rest), self.all(1))
        # Multiply in two steps: 2**128 and powers below 2**-126 are no normal float32 numbers.
        whole = b.fptosi(n, self.ints)
        half = b.ashr(whole, self.all_ints(1))
        for power in (half, b.sub(whole, half)):
            power = b.add(power, self.all_ints(127))
            power = b.shl(power, self.all_ints(23))
            y = b.fmul(y, b.bitcast(power, self.floats))
        return b.select(b.fcmp_unordered("uno", x, x), x, y)

    def sigmoid(self, x):
        return self.b.fdiv(self.all(1), self.b.fadd(self.all(1), self.exp(self.b.fneg(x))))

    def silu(self, x):
        return self.b.fdiv(x, self.b.fadd(self.all(1), self.exp(self.b.fneg(x))))

    def softplus(self, x):
        """Compute log(1 + e**x), by the logarithm's series in u / (2 + u) for u = e**-abs(x)."""
        b = self.b
        u = self.exp(b.fneg(self.intrinsic("fabs", x)))
        z = b.fdiv(u, b.fadd(u, self.all(2)))
        square, y = b.fmul(z, z), self.all(1 / 17)
        for n in range(15, 0, -2):
            y = self.fma(y, square, self.all(1 / n))
        above = b.select(b.fcmp_ordered("<", x, self.all(0)), self.all(0), x)  # NaN stays
        return self.fma(b.fmul(self.all(2), z), y, above)

    def share(self, n):
        """Return the range (first, end) of this piece's items among n items."""
        first, end = (self.mul(n, self.add(self.piece, i)) for i in (0, 1))
        return self.b.udiv(first, self.pieces), self.b.udiv(end, self.pieces)


def _machine():
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
