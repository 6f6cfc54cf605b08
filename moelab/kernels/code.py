"""What the kernels share: helpers that write LLVM code, and build it for this processor."""

import ctypes
import os
import threading
from functools import cache
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


class Code:
    """A function ``run(arguments, piece, pieces)``, which a subclass's ``write`` writes for LLVM.

    ``form`` names the constants and ``signature`` the arguments; a star marks an address of floats.
    """

    form = signature = ""

    def __init__(self, L: int, *form: Any):
        self.__dict__.update(zip(self.form.split(), form))
        self.L, names = L, self.signature.split()
        self.floats, self.ints = ir.VectorType(F32, L), ir.VectorType(I32, L)
        self._module = ir.Module()
        self._module.triple = llvm.get_default_triple()
        self.function = self._declare("run", ir.VoidType(), [I64] * 3)
        self.b = ir.IRBuilder(self.function.append_basic_block())
        first, self.piece, self.pieces = self.function.args
        first = self.pointer(first, I64)
        numbers = [self.load(first, I64(i), I64, align=8) for i in range(len(names))]
        self.arguments = [
            self.pointer(n, F32) if name.startswith("*") else n for name, n in zip(names, numbers)
        ]

    def _declare(self, name, returns, arguments):
        return ir.Function(self._module, ir.FunctionType(returns, arguments), name)

    def compile(self) -> bytes:
        """Write the function, and return its object code for this processor."""
        self.write()
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

    def loop(self, first, end, step, body, values=()):
        """Repeat ``body(i, values)``, which gives the next values; return the last i and values."""
        before = self.b.block
        head, inside, after = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(first, before)
        held = []
        for v in values:
            held.append(self.b.phi(v.type))
            held[-1].add_incoming(v, before)
        self.b.cbranch(self.b.icmp_signed("<=", self.add(i, step), end), inside, after)
        self.b.position_at_end(inside)
        new = body(i, held) or []
        i.add_incoming(self.add(i, step), self.b.block)
        for phi, v in zip(held, new):
            phi.add_incoming(v, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)
        return i, held

    def in_groups(self, first, end, sizes, body):
        """Call ``body`` with the numbers from ``first`` to ``end`` in groups of these sizes."""
        for size in sizes:

            def group(i, _, size=size):
                body([self.add(i, k) for k in range(size)])

            first, _ = self.loop(first, end, size, group)

    def load(self, pointer, at, kind, align=4):
        value = self.b.load(self.b.bitcast(self.b.gep(pointer, [at]), kind.as_pointer()))
        value.align = align
        return value

    def store(self, value, pointer, at):
        to = self.b.bitcast(self.b.gep(pointer, [at]), value.type.as_pointer())
        self.b.store(value, to).align = 4

    def fma(self, a, b, c):
        return self.intrinsic("fma", a, b, c)

    def spread(self, x):
        """Put a number in every place of a vector."""
        nothing = ir.Constant(self.floats, ir.Undefined)
        one = self.b.insert_element(nothing, x, I32(0))
        return self.b.shuffle_vector(one, nothing, ir.Constant(self.ints, [0] * self.L))

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
        return self.b.extract_element(v, I32(0))

    def add(self, a, b):
        return self.b.add(a, I64(b) if isinstance(b, int) else b)

    def mul(self, a, b):
        return self.b.mul(a, I64(b) if isinstance(b, int) else b)

    def all(self, x):
        """Return a vector with a constant in every place."""
        return ir.Constant(self.floats, [float(x)] * self.L)

    def intrinsic(self, name, *vectors):
        """Call LLVM's function ``name``, which takes vectors of floats and returns one vector."""
        name = f"llvm.{name}.v{self.L}f32"
        found = self._module.globals.get(name)
        found = found or self._declare(name, self.floats, [self.floats] * len(vectors))
        return self.b.call(found, vectors)

    def exp(self, x):
        """Compute e to the power of each number, within 1e-7: 2**n times a polynomial (Cephes)."""
        b, ints = self.b, self.ints
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
        whole = b.fptosi(n, ints)
        half = b.ashr(whole, ir.Constant(ints, [1] * self.L))
        for power in (half, b.sub(whole, half)):
            power = b.add(power, ir.Constant(ints, [127] * self.L))
            power = b.shl(power, ir.Constant(ints, [23] * self.L))
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
