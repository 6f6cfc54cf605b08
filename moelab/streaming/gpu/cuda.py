"""Moves bytes to a CUDA GPU and routing from it without MLX's unified memory.

An MLX array that the host touches moves to CUDA's managed memory. From then on its pages move
between host and GPU by page faults: bytes written in place take 0.5 ms a MB where the bus needs
0.03, and reading the routing of a layer costs 0.15 ms. Here both go through pinned memory, by
kernels in MLX's own graph. One kernel writes a layer's routing there (``Mailbox.post``). Another
(``Mailbox.send``) copies the bytes that reads bring there (``UploadingReader``) to the slots. It is
started before the reads have ended and waits on the GPU for each of them, so that the host prepares
the next operations meanwhile. The results are the same.

This needs ``cuda-bindings``; ``MOELAB_CUDA_COPIES=0`` turns it off. Two kinds of bytes do not take
this way but are read into unified memory: bytes that are converted after they have arrived, and
bytes that prefetch threads read.
"""

import ctypes
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..reading import native
from ..reading.file import check_unchanged
from ..reading.ranges import Ranges, Read, files_of, read_ranges
from ..reading.reader import Reader

try:
    from cuda.bindings import nvrtc, runtime
except ImportError:  # an optional package
    nvrtc = runtime = None

# Bytes of a block of pinned memory, and blocks of a model; a call that gets none makes one more.
BLOCK_NBYTES, NUM_BLOCKS = 2 * 1024 * 1024, 96
# So many expert numbers fit into a mailbox: a call of 512 tokens with K = 8.
MAILBOX_SIZE = 4096
# The most copies of one kernel, and the bytes that one of its blocks copies at once.
MAX_COPIES, CHUNK_NBYTES = 512, 16 * 1024
# Threads of a kernel's block, and blocks of a kernel that copies: an H200 has 132 multiprocessors.
THREADS, NUM_COPYING = 256, 132
# Seconds. A call that waits longer for its routing asks MLX, which raises if a kernel failed.
PATIENCE_S = 0.02


def on_cuda() -> bool:
    """Whether MLX computes with its CUDA kernels."""
    return mx.cuda.is_available() and mx.default_device() == mx.gpu


def available() -> bool:
    """Whether bytes and routing go through pinned memory here."""
    return os.environ.get("MOELAB_CUDA_COPIES") != "0" and on_cuda() and runtime is not None


@cache
def _may_wait():
    """Whether a kernel may wait for reads. A GPU with a display ends kernels after some seconds."""
    limit = runtime.cudaDeviceAttr.cudaDevAttrKernelExecTimeout
    return not _checked(runtime.cudaDeviceGetAttribute(limit, 0))


def _checked(result, message=None):
    """The result of a CUDA function without its error code; raise if that is not 0."""
    error, *values = result
    if error:
        message = message or runtime.cudaGetErrorString
        raise RuntimeError(f"CUDA: {message(error)[1].decode()}")
    return values[0] if values else None


class Pinned:
    """Memory of the host that never moves and that the GPU reads and writes at one address."""

    def __init__(self, nbytes: int):
        self.address = _checked(runtime.cudaHostAlloc(nbytes, runtime.cudaHostAllocDefault))
        self.bytes = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.address), np.uint8)
        weakref.finalize(self, runtime.cudaFreeHost, self.address)


class Copy(NamedTuple):
    """Bytes that the GPU copies once they have arrived."""

    source: int  # the address of the first byte, in pinned memory
    to: int  # the address that it is copied to
    nbytes: int
    flag: int  # the address of a uint32 in pinned memory that is 0 until the bytes have arrived


class Block(Pinned):
    """Pinned memory that ranges of files are read into, and a flag that says when they arrived."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes + 4)
        self.view = memoryview(self.bytes)[:nbytes]
        self.arrived = self.bytes[nbytes:].view(np.uint32)  # the flag: 0 until the reads have ended
        self.flag = self.address + nbytes  # the flag's address

    def copies(self, reads: Iterable[Read]) -> list[Copy]:
        """The copies that bring the block's bytes to the places of its ranges, in this order."""
        out, source = [], self.address
        all_parts = reads.parts if isinstance(reads, Ranges) else [r.parts for r in reads]
        for to, nbytes in (part for parts in all_parts for part in parts):
            out.append(Copy(source, to, nbytes, self.flag))
            source += nbytes
        return out


class Begun:
    """The reads that one ``start`` began; ``queued`` pieces wait for a block."""

    def __init__(self, queued: Iterable[list[Read]], there: Sequence[Copy] = ()):
        self.uncopied = []  # futures of the reads that need no copy
        self.queued, self.there = deque(queued), there  # ``there``: bytes that need not be read
        self.reading = []  # pieces that are read: (reads, block, future)
        self.in_graph = False  # whether a kernel that was built copies them

    @property
    def futures(self) -> list[Future]:
        """The reads that are running or have ended."""
        return [*self.uncopied, *(future for *_, future in self.reading)]

    def done(self) -> bool:
        """Whether all reads have ended."""
        return not self.queued and all(future.done() for future in self.futures)

    def copies(self) -> list[Copy]:
        """The copies of all bytes that have a block or need not be read."""
        return [*self.there, *(c for reads, block, _ in self.reading for c in block.copies(reads))]


class UploadingReader(Reader):
    """A ``Reader`` whose threads read into pinned memory, from which the GPU copies.

    Ranges without ``parts`` are read as ``Reader`` reads them.
    """

    copies_in_graph = True

    def __init__(self, mailbox: "Mailbox", readers: int = 8):
        super().__init__(readers)
        self._mailbox = mailbox
        self._blocks = []
        self._free = []
        self._copying = []  # blocks that the graph may still copy

    def start(self, reads: Sequence[Read]) -> Begun:
        self._wait()
        if isinstance(reads, Ranges) and (begun := self._start_table(reads)) is not None:
            return begun
        uncopied = [r for r in reads if not r.parts]
        begun = Begun(pieces([r for r in reads if r.parts], self.readers))

        def here():
            if uncopied:
                self.read_here(uncopied)
            self._read_more(begun, _now)

        if reads and not self._read_inline(reads, here):
            begun.uncopied = self._read_in_pool(uncopied)
            self._read_more(begun, self._submit)
        return begun

    def _start_table(self, ranges):
        """Begin to read ranges by their table, if there are blocks for all; else return None.

        This takes little time of Python, which all threads share.
        """
        if not ranges or native.loop() is None or not all(ranges.parts):
            return None
        sizes = ranges.table[:, native.NBYTES]
        firsts = _divide(sizes.tolist(), self.readers)
        if len(firsts) > len(self._free) + NUM_BLOCKS - len(self._blocks):
            return None
        if sizes.max() > BLOCK_NBYTES:
            return None
        lasts = [*firsts[1:], len(sizes)]
        blocks = [self._take(must=True) for _ in firsts]
        starts = sizes.cumsum() - sizes
        shifts = np.array([block.address for block in blocks]) - starts[firsts]
        iovecs = np.stack((starts + shifts.repeat(np.subtract(lasts, firsts)), sizes), 1)
        table = ranges.table.copy()
        table[:, native.IOV] = native.address_of(iovecs) + iovecs[0].nbytes * np.arange(len(sizes))
        table[:, native.COUNT] = 1
        begun = Begun(())

        def begin(submit):
            for first, last, block in zip(firsts, lasts, blocks):
                block.arrived[0] = 0
                piece = ranges.between(first, last)
                args = piece, table[first:last], iovecs, block
                begun.reading.append((piece, block, submit(self._read_table, *args)))

        if not self._read_inline(ranges, lambda: begin(_now)):
            begin(self._submit)
        return begun

    def _read_table(self, ranges, table, iovecs, block):
        """Read ranges into a block, by a table with these ``iovecs``."""
        begin = time.perf_counter()
        try:
            # Native code sets the flag without waiting for the GIL.
            if not native.read(table, arrived=block.flag):
                read_ranges(_into(ranges, block))  # this reads again, or raises
        finally:
            block.arrived[0] = 1  # also after an error: the GPU waits for it
        self._count(len(ranges), ranges.nbytes, begin, ranges.nbytes)

    def _wait(self):
        """Wait until the GPU has copied all blocks that a graph copies."""
        if self._copying:
            self._mailbox.wait()
            self._free += self._copying
            self._copying = []

    def _read_more(self, begun, submit):
        while begun.queued and (block := self._take(must=not begun.reading)) is not None:
            reads = begun.queued.popleft()
            block.arrived[0] = 0
            begun.reading.append((reads, block, submit(self._read_into, reads, block)))

    def _take(self, must):
        """A free block, or a new one; None if there are ``NUM_BLOCKS``, unless it ``must`` be."""
        if self._free:
            return self._free.pop()
        if len(self._blocks) >= NUM_BLOCKS and not must:
            return None
        self._blocks.append(Block(BLOCK_NBYTES))
        return self._blocks[-1]

    def _read_into(self, reads, block):
        begin = time.perf_counter()
        try:
            reads = _into(reads, block)
            if native.loop() is not None:  # native code sets the flag without waiting for the GIL
                reads = Ranges.of(reads)
            read_ranges(reads, block.flag)
        finally:
            block.arrived[0] = 1  # also after an error: the GPU waits for it
        nbytes = sum(r.nbytes for r in reads)
        self._count(len(reads), nbytes, begin, nbytes)

    def copies(self, begun: Begun) -> list[Copy] | None:
        """The copies that one kernel makes in place of ``finish``; None if one kernel cannot.

        Call ``finish`` before the result is used: it raises if a read failed.
        """
        copies = begun.copies()
        if begun.uncopied or begun.queued or len(copies) > MAX_COPIES or not _may_wait():
            return None
        begun.in_graph = True
        return copies

    def finish(self, begun: Begun) -> None:
        files = set().union(*map(files_of, begun.queued))
        files.update(*(files_of(reads) for reads, *_ in begun.reading))
        super().finish(begun.futures)
        if begun.in_graph:
            self._copying += [block for _, block, _ in begun.reading]
        while (begun.there or begun.reading) and not begun.in_graph:
            copies = begun.copies()
            for i in range(0, len(copies), MAX_COPIES):
                self._mailbox.copy(copies[i : i + MAX_COPIES])
            self._free += [block for _, block, _ in begun.reading]
            begun.there, begun.reading = (), []
            self._read_more(begun, self._submit)
            super().finish([future for *_, future in begun.reading])
        check_unchanged(files)

    def stop(self) -> None:
        super().stop()
        for block in self._blocks:
            block.arrived[0] = 1  # the GPU waits for reads that were cancelled, too
        self._mailbox.forget()
        mx.synchronize()
        self._free, self._copying = self._blocks.copy(), []

    def close(self) -> None:
        super().close()
        self._blocks, self._free = [], []


def _now(function, *args):
    """Like a thread pool's ``submit``, but done in this thread."""
    function(*args)
    done = Future()
    done.set_result(None)
    return done


def pieces(reads: list[Read], readers: int) -> list[list[Read]]:
    """Divide ranges with ``parts`` into about as many pieces as readers, each fitting a block."""
    parts = []
    for r in reads:
        for first in range(0, r.nbytes, BLOCK_NBYTES):
            nbytes = min(BLOCK_NBYTES, r.nbytes - first)
            parts.append(r if nbytes == r.nbytes else _cut(r, first, nbytes))
    firsts = _divide([r.nbytes for r in parts], readers)
    return [parts[i:j] for i, j in zip(firsts, [*firsts[1:], len(parts)])]


def _divide(sizes, readers):
    """The first range of each piece."""
    most = min(BLOCK_NBYTES, sum(sizes) / readers)
    firsts, size = [], most
    for i, nbytes in enumerate(sizes):
        if size + nbytes > most:
            firsts.append(i)
            size = 0
        size += nbytes
    return firsts


def _cut(r, first, nbytes):
    """The part of a range with ``nbytes`` bytes from ``first`` on."""
    parts, begin = [], 0
    for address, size in r.parts:
        low, high = max(first, begin), min(first + nbytes, begin + size)
        if low < high:
            parts.append((address + low - begin, high - low))
        begin += size
    return r._replace(offset=r.offset + first, nbytes=nbytes, parts=parts)


def _into(reads, block):
    """The same ranges, to be read into a block one behind the other."""
    out, first = [], 0
    for r in reads:
        out.append(r._replace(views=[block.view[first : first + r.nbytes]]))
        first += r.nbytes
    return out


# ``box`` has a word that says that the numbers have arrived, and then the numbers.
_POST = """
    unsigned int* box = (unsigned int*)(*address);
    for (int i = threadIdx.x; i < n; i += blockDim.x) box[1 + i] = indices[i];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *(volatile unsigned int*)box = 1;
        posted[0] = 1;
    }
"""
# A block of threads copies ``nbytes`` bytes from ``source``, in memory of the host, to ``to``.
COPY = """
        int i = threadIdx.x;
        if ((((word)source | (word)to | (word)nbytes) & 15) == 0) {
            const int4* a = (const int4*)source;
            int4* b = (int4*)to;
            int n = nbytes / 16, step = blockDim.x;
            for (; i + 3 * step < n; i += 4 * step) {
                int4 v = __ldcv(a + i), w = __ldcv(a + i + step);
                int4 x = __ldcv(a + i + 2 * step), y = __ldcv(a + i + 3 * step);
                b[i] = v;
                b[i + step] = w;
                b[i + 2 * step] = x;
                b[i + 3 * step] = y;
            }
            for (; i < n; i += step) b[i] = __ldcv(a + i);
        } else {
            for (; i < nbytes; i += blockDim.x) to[i] = __ldcv(source + i);
        }
"""
# ``list`` has the numbers of copies and of chunks, and then for each copy its first chunk, source,
# destination, bytes and flag. Every block of threads takes the list from the host once, and
# copies every gridDim.x-th chunk.
_SEND = f"""
    __shared__ word list[2 + 5 * {MAX_COPIES}];
    const volatile unsigned int* box = (const volatile unsigned int*)(address[0]);
    const volatile word* list_of_host = (const volatile word*)(address[1]);
    if (threadIdx.x < 2) list[threadIdx.x] = list_of_host[threadIdx.x];
    if (blockIdx.x == 0) {{
        for (int i = threadIdx.x; i < n; i += blockDim.x) slots[i] = box[1 + i];
    }}
    __syncthreads();
    int copies = (int)list[0];
    word chunks = list[1];
    for (int i = threadIdx.x; i < 5 * copies; i += blockDim.x) list[2 + i] = list_of_host[2 + i];
    __syncthreads();
    for (word chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {{
        const word* copy = list + 2;
        while (copy + 5 < list + 2 + 5 * copies && copy[5] <= chunk) copy += 5;
        word first = (chunk - copy[0]) * {CHUNK_NBYTES};
        int nbytes = (int)min(copy[3] - first, (word){CHUNK_NBYTES});
        const char* source = (const char*)copy[1] + first;
        char* to = (char*)copy[2] + first;
        if (threadIdx.x == 0)
            while (*(const volatile unsigned int*)copy[4] == 0) __nanosleep(400);
        __syncthreads();
        __threadfence_system();
        {COPY}
    }}
"""


class Mailbox:
    """Pinned memory through which the host and kernels in MLX's graph exchange small numbers.

    A kernel writes its numbers there when they are computed, and the host watches one word. That
    takes a few microseconds, where MLX's ``eval`` puts the thread to sleep and a read of the array
    moves its page to the host.
    """

    def __init__(self):
        size = 8 * (2 + 5 * MAX_COPIES)
        self._memory = Pinned(size + 4 * (1 + MAILBOX_SIZE))
        self._list = self._memory.bytes[:size].view(np.uint64)
        self._words = self._memory.bytes[size:].view(np.uint32)
        address = self._memory.address
        self._address = mx.array(np.array([address + size, address], np.uint64))
        self._one = mx.zeros(1, mx.uint32)
        mx.eval(self._address, self._one)
        self._posted = self._sent = None

    def post(self, indices: mx.array, after: mx.array) -> None:
        """Begin to compute at most ``MAILBOX_SIZE`` integers, and ``after``, for ``collect``."""
        self._words[0] = 0
        self._posted = kernel("post", "const void* after, const word* address", "posted", _POST)(
            indices, after, self._address, output_shapes=[(1,)], **launch(1)
        )[0]
        mx.async_eval(self._posted)

    def collect(self, indices: mx.array) -> np.ndarray:
        """Wait for the numbers of the array that was posted last; return a copy, uint32."""
        words = self._words
        end = time.perf_counter() + PATIENCE_S
        while not words[0]:
            if time.perf_counter() > end:
                mx.eval(self._posted)
            time.sleep(0)  # lets other threads run
        self._posted = self._sent = None  # the numbers sent before have been received
        return words[1 : 1 + indices.size].reshape(indices.shape).copy()

    def send(
        self,
        numbers: np.ndarray,
        indices: mx.array,
        copies: list[Copy] = (),
        after: mx.array | None = None,
    ) -> mx.array:
        """An array like ``indices`` that a kernel fills with at most ``MAILBOX_SIZE`` host numbers.

        When it is computed, ``indices`` and ``after`` are computed first, and the kernel makes the
        copies (at most ``MAX_COPIES``), each as soon as its bytes have been read.
        """
        self.wait()
        words, chunk = [], 0
        for c in copies:
            words += (chunk, c.source, c.to, c.nbytes, c.flag)
            chunk += -(-c.nbytes // CHUNK_NBYTES)
        self._list[: 2 + len(words)] = (len(copies), chunk, *words)
        self._words[1 : 1 + numbers.size] = numbers.ravel()
        after = indices if after is None else after
        self._sent = kernel("send", "const void* after, const word* address", "slots", _SEND)(
            indices,
            after,
            self._address,
            output_shapes=[indices.shape],
            **launch(min(NUM_COPYING, max(1, chunk))),
        )[0]
        return self._sent

    def copy_after(self, copies: list[Copy], after: mx.array) -> mx.array:
        """Have the GPU make at most ``MAX_COPIES`` copies after ``after``, and do not wait.

        Returns a zero, ``[1]``: arrays that depend on it are computed after the copies.
        """
        return self.send(np.zeros(1, np.uint32), self._one, copies, after)

    def copy(self, copies: list[Copy]) -> None:
        """Copy bytes that have arrived, in at most ``MAX_COPIES`` copies, and wait."""
        self.send(np.zeros(1, np.uint32), self._one, copies)
        self.wait()

    def wait(self) -> None:
        """Wait until the numbers sent last have been received."""
        if self._sent is not None:
            mx.eval(self._sent)
            self._sent = None

    def forget(self) -> None:
        """Do not wait for the array sent last, which is not computed after an error."""
        self._sent = None


@cache
def kernel(name: str, more: str, outputs: str, source: str) -> Callable:
    """Compile a kernel once in a process; call it with ``n`` ``indices`` and more arrays.

    ``more`` declares these in C, where ``word`` is a number of 64 bits. ``outputs`` names the
    uint32 arrays that it writes. ``mx.fast.cuda_kernel`` would take two seconds for each kernel,
    because it compiles MLX's headers.
    """
    name = f"moelab_{name}"
    written = ", ".join(f"unsigned int* {output}" for output in outputs.split())
    parameters = f"const unsigned int* indices, {more}, {written}, int n"
    compiled = _compiled(
        f"typedef unsigned long long word;\n"
        f'extern "C" __global__ void {name}({parameters}) {{{source}}}'
    )

    def call(indices, *arrays, **how):
        if indices.itemsize != 4:
            indices = indices.astype(mx.uint32)
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=compiled,
            inputs=[indices, *arrays],
            scalars=[indices.size],
            ensure_row_contiguous=True,
            **how,
        )

    return call


def _compiled(source):
    """Compile CUDA C to machine code for the first GPU."""
    names = runtime.cudaDeviceAttr
    kinds = (names.cudaDevAttrComputeCapabilityMajor, names.cudaDevAttrComputeCapabilityMinor)
    major, minor = (_checked(runtime.cudaDeviceGetAttribute(kind, 0)) for kind in kinds)
    checked = partial(_checked, message=nvrtc.nvrtcGetErrorString)
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"moelab.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
        checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        made = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, made))
        return bytes(made)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def launch(blocks: int, outputs: int = 1) -> dict:
    """The keywords to call a kernel with so many blocks of threads and uint32 outputs."""
    return {
        "output_dtypes": [mx.uint32] * outputs,
        "grid": (blocks * THREADS, 1, 1),
        "threadgroup": (THREADS, 1, 1),
    }
