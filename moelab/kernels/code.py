"""What the kernels share: LLVM code written with a few helpers, and built for this processor."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

try:
    from llvmlite import binding as llvm
    from llvmlite import ir

    llvm.get_host_cpu_name()  # loads LLVM
except (ImportError, OSError):  # an optional package, and its library
    llvm = ir = F32 = I8 = I16 = I32 = I64 = None
else:
    from . import stored

    F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(n) for n in (8, 16, 32, 64))


@cache
def widest() -> int:
    """Floats in a vector: 16 with AVX-512, else 8, for which some processors take two steps."""
    return 16 if llvm.get_host_cpu_features().get("avx512f") else 8


def num_threads() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _pool():
    return ThreadPoolExecutor(max(1, num_threads() - 1), thread_name_prefix="moelab-kernel")


def share(run: Callable, shares: list) -> None:
    """Call ``run(share)`` for each share, the first here and the others in threads of their own.

    A share that no thread has begun by then runs here too. An interrupt leaves none running.
    """
    begun = []
    try:
        for one in shares[1:]:
            begun.append((_submit(run, one), one))
        run(shares[0])
        for future, one in begun:
            if future is None or future.cancel():
                run(one)
            else:
                future.result()
    finally:
        futures = [future for future, _ in begun if future is not None]
        wait([future for future in futures if not future.cancel() and not future.cancelled()])


def _submit(run, share):
    try:
        return _pool().submit(run, share)
    except RuntimeError:  # the interpreter is shutting down
        return None


def built(kind: type["Code"], *args) -> Callable:
    """A kernel: what an earlier process stored, else built now and stored.

    Args:
        kind (type[Code]): What writes it.
        *args: Its arguments, of which the code follows; no addresses.
    """
    writer, name = kind(*args), f"{kind.__name__}{args}"
    found = stored.load(name)
    if found is None:
        found = writer.compile()
        stored.save(name, found)
    return writer.link(found)


class Code:
    """A function ``run`` of numbers and addresses (all int64), in LLVM's language.

    A subclass writes it in ``write``.

    Args:
        num_arguments (int): How many it takes.
        L (int): Floats in a vector.
    """

    def __init__(self, num_arguments: int, L: int):
        self.L = L
        self.floats, self.ints = ir.VectorType(F32, L), ir.VectorType(I32, L)
        self._module = ir.Module()
        self._module.triple = llvm.get_default_triple()
        self._signature = [ctypes.c_int64] * num_arguments
        self.function = self._declare("run", ir.VoidType(), [I64] * num_arguments)
        self._fma = self._declare(f"llvm.fma.v{L}f32", self.floats, [self.floats] * 3)
        self.b = ir.IRBuilder(self.function.append_basic_block())

    def _declare(self, name, returns, arguments):
        return ir.Function(self._module, ir.FunctionType(returns, arguments), name)

    def compile(self) -> bytes:
        """Write the function. Its object code for this processor."""
        self.write()
        self.b.ret_void()
        machine = _machine()
        parsed = llvm.parse_assembly(str(self._module))
        parsed.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(parsed, passes)
        return machine.emit_object(parsed)

    def link(self, code: bytes) -> Callable:
        """The function, as something to call.

        Args:
            code (bytes): From ``compile``.
        """
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        function = ctypes.CFUNCTYPE(None, *self._signature)(engine.get_function_address("run"))
        function.engine = engine  # owns the code
        return function

    def pointer(self, address, kind):
        return self.b.inttoptr(address, kind.as_pointer())

    def loop(self, first, end, step, body, values=()):
        """While ``step`` fit before ``end``: ``body(i, values)`` gives the next values.

        Returns:
            tuple: Where it ended, and the values.
        """
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

    def load(self, pointer, at, kind, align=4):
        value = self.b.load(self.b.bitcast(self.b.gep(pointer, [at]), kind.as_pointer()))
        value.align = align
        return value

    def store(self, value, pointer, at):
        to = self.b.bitcast(self.b.gep(pointer, [at]), value.type.as_pointer())
        self.b.store(value, to).align = 4

    def fma(self, a, b, c):
        return self.b.call(self._fma, [a, b, c])

    def spread(self, x):
        """A number in every place of a vector."""
        nothing = ir.Constant(self.floats, ir.Undefined)
        one = self.b.insert_element(nothing, x, I32(0))
        return self.b.shuffle_vector(one, nothing, ir.Constant(self.ints, [0] * self.L))

    def sum(self, v):
        """The sum of a vector: halves are added until one number is left."""
        half = self.L
        while half > 1:
            half //= 2
            nothing = ir.Constant(v.type, ir.Undefined)
            low, high = (
                ir.Constant(ir.VectorType(I32, half), list(range(a, a + half))) for a in (0, half)
            )
            v = self.b.fadd(
                self.b.shuffle_vector(v, nothing, low), self.b.shuffle_vector(v, nothing, high)
            )
        return self.b.extract_element(v, I32(0))

    def add(self, a, b):
        return self.b.add(a, I64(b) if isinstance(b, int) else b)

    def mul(self, a, b):
        return self.b.mul(a, I64(b) if isinstance(b, int) else b)


def _machine():
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
