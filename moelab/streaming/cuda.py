"""Moves experts' bytes to a CUDA GPU, and routing to the host, through pinned memory.

An MLX array that the host wrote moves to the GPU by page faults: 0.5 ms for a MB of experts, for
which the bus needs 0.03 ms. Reading a layer's routing takes 0.15 ms. So this module has kernels
that copy experts and routing, as operations of MLX's graph. The kernel that copies experts starts
before the reads have ended, and waits on the GPU for each read. The kernels need
``cuda-bindings``; ``MOELAB_CUDA_COPIES=0`` turns them off.
"""

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .. import kernels
from ..system import on_cuda

try:
    from cuda.bindings import nvrtc, runtime
except ImportError:  # an optional package
    nvrtc = runtime = None

# This many expert numbers fit into a mailbox: a call of 512 tokens with K = 8.
MAILBOX_SIZE = 4096
# The most copies that a kernel makes, and the bytes that a block of the kernel copies at once.
MAX_COPIES, CHUNK_NBYTES = 512, 16 * 1024
# Threads of a kernel's block, and blocks of a kernel that copies: an H200 has 132 multiprocessors.
THREADS, NUM_COPYING = 256, 132
# A call polls for its routing this long, then calls ``mx.eval``, which raises if a kernel failed.
PATIENCE_S = 0.02


def available() -> bool:
    """Whether bytes and routing go through pinned memory here."""
    return os.environ.get("MOELAB_CUDA_COPIES") != "0" and on_cuda() and runtime is not None


@cache
def may_wait():
    """Whether a kernel may wait for reads. A GPU with a display ends kernels after some seconds."""
    limit = runtime.cudaDeviceAttr.cudaDevAttrKernelExecTimeout
    return not _checked(runtime.cudaDeviceGetAttribute(limit, 0))


def _checked(result, message=None):
    """Return a CUDA function's result without its error code; raise if the code is not 0."""
    error, *values = result
    if error:
        message = message or runtime.cudaGetErrorString
        raise RuntimeError(f"CUDA: {message(error)[1].decode()}")
    return values[0] if values else None


class Pinned:
    """Memory of the host that never moves, and that the GPU reads and writes at ``address`` too."""

    def __init__(self, nbytes: int):
        self.address = _checked(runtime.cudaHostAlloc(nbytes, runtime.cudaHostAllocDefault))
        self.bytes = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.address), np.uint8)
        weakref.finalize(self, runtime.cudaFreeHost, self.address)


class Copy(NamedTuple):
    """Bytes that the GPU copies once they have arrived."""

    source: int  # the address of the first byte, in pinned memory
    to: int  # the address that the first byte is copied to
    nbytes: int
    flag: int  # the address of a uint32 in pinned memory that is 0 until the bytes have arrived


# ``box`` begins with a word that is 1 once the numbers have arrived; the numbers follow.
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
# A block of threads copies ``nbytes`` bytes from ``source`` (in host memory) to ``to``.
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
# ``list`` has the count of copies, the count of chunks, and then for each copy its first chunk,
# source, destination, bytes and flag. Every block of threads reads the list from the host once, and
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
    """Pinned memory through which the host and kernels in MLX's graph exchange small numbers."""

    def __init__(self):
        size = 8 * (2 + 5 * MAX_COPIES)
        self._memory = Pinned(size + 4 * (1 + MAILBOX_SIZE))
        self._list = self._memory.bytes[:size].view(np.uint64)
        self._words = self._memory.bytes[size:].view(np.uint32)
        address = self._memory.address
        self._address = mx.array(np.array([address + size, address], np.uint64))
        self._one = mx.zeros(1, mx.uint32)
        mx.eval(self._address, self._one)
        self._posted = self.sent = None

    def post(self, indices: mx.array, after: mx.array) -> None:
        """Begin to compute ``after``, then post up to ``MAILBOX_SIZE`` indices for ``collect``."""
        self._words[0] = 0
        self._posted = kernel("post", "const void* after, const word* address", "posted", _POST)(
            indices, after, self._address, output_shapes=[(1,)], **launch(1)
        )[0]
        mx.async_eval(self._posted)

    def collect(self, indices: mx.array) -> np.ndarray:
        """Wait for the numbers of the array that was posted last; return a uint32 copy of them."""
        words = self._words  # polled, because MLX's ``eval`` would sleep
        end = time.perf_counter() + PATIENCE_S
        while not words[0]:
            if time.perf_counter() > end:
                mx.eval(self._posted)
            time.sleep(0)  # lets other threads run
        self._posted = self.sent = None  # the numbers sent before have been received
        return words[1 : 1 + indices.size].reshape(indices.shape).copy()

    def send(
        self,
        numbers: np.ndarray,
        indices: mx.array,
        copies: list[Copy] = (),
        after: mx.array | None = None,
    ) -> mx.array:
        """An array like ``indices`` that a kernel fills with at most ``MAILBOX_SIZE`` host numbers.

        The kernel runs after ``indices`` and ``after``. It waits for the bytes of each copy.
        """
        self.wait()
        words, chunk = [], 0
        for c in copies:
            words += (chunk, c.source, c.to, c.nbytes, c.flag)
            chunk += -(-c.nbytes // CHUNK_NBYTES)
        self._list[: 2 + len(words)] = (len(copies), chunk, *words)
        self._words[1 : 1 + numbers.size] = numbers.ravel()
        after = indices if after is None else after
        self.sent = kernel("send", "const void* after, const word* address", "slots", _SEND)(
            indices,
            after,
            self._address,
            output_shapes=[indices.shape],
            **launch(min(NUM_COPYING, max(1, chunk))),
        )[0]
        return self.sent

    def copy(self, copies: list[Copy], after: mx.array | None = None) -> mx.array:
        """Copy (at most ``MAX_COPIES``) after ``after``; return a zero ``[1]`` that needs them."""
        return self.send(np.zeros(1, np.uint32), self._one, copies, after)

    def wait(self) -> None:
        """Wait until the numbers sent last have been received."""
        if self.sent is not None:
            mx.eval(self.sent)
            self.sent = None


class Handover:
    """Hands slot numbers to MLX, through pinned memory if possible. Keeps what reads slots."""

    def __init__(self, through_pinned: bool):
        self.mailbox = Mailbox() if through_pinned and available() else None
        # Arrays whose evaluation reads slots: the last layer's output, or one that depends on it.
        self.pending = []

    def to_device(
        self, numbers: np.ndarray, indices: mx.array, copies: Sequence[Copy] = ()
    ) -> mx.array:
        """Return ``numbers`` as a uint32 array; the GPU makes ``copies`` before it reads them."""
        if self.mailbox and numbers.size <= MAILBOX_SIZE:
            return self.mailbox.send(numbers, indices, copies)
        return kernels.to_mlx(numbers)

    def settle(self) -> None:
        """Evaluate the arrays that read slots."""
        mx.eval(self.pending)
        self.pending = []


@cache
def kernel(name: str, more: str, outputs: str, source: str) -> Callable:
    """Return a kernel, compiled once in a process, to call with ``n`` ``indices`` and more arrays.

    ``more`` declares the other arrays in C (``word``: 64 bits). ``outputs`` names the uint32 arrays
    that the kernel writes. (``mx.fast.cuda_kernel`` would also compile MLX's headers, for 2 s.)
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
    """The keywords to call a kernel with this many blocks of threads and uint32 outputs."""
    return {
        "output_dtypes": [mx.uint32] * outputs,
        "grid": (blocks * THREADS, 1, 1),
        "threadgroup": (THREADS, 1, 1),
    }
