"""CUDA: bytes to the GPU and routing from it without MLX's unified memory.

An MLX array that the host touches moves to CUDA's managed memory. From then on its pages move
between host and GPU by page faults: bytes written in place take 0.5 ms a MB where the GPU's copy
engine needs 0.03, and reading the routing of a layer costs 0.15 ms (H200, MLX 0.32.4). Here the
experts' bytes are read into pinned memory and copied from there (``UploadingReader``), and a kernel
writes a layer's routing into pinned memory (``Mailbox``). What is computed is the same.

It needs ``cuda-bindings`` and is off unless ``MOELAB_CUDA_COPIES=1``: the long comparison with the
resident model (``cuda_run``, sections ``exactness``, ``texts_twice`` and ``soak``) has not been run
with it yet.
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import wait
from functools import cache

import mlx.core as mx
import numpy as np

from .reader import Read, Reader, ReadError

try:
    from cuda.bindings import runtime
except ImportError:  # an optional package
    runtime = None

# Bytes of a block of pinned memory, and blocks of a model at most.
BLOCK_NBYTES, NUM_BLOCKS = 2 * 1024 * 1024, 32
# Numbers of experts that fit into a mailbox: calls of 512 tokens with K = 8.
MAILBOX_SIZE = 4096
# Seconds. After that a call that waits for its routing asks MLX, which raises if a kernel failed.
PATIENCE_S = 0.02


def on_cuda() -> bool:
    """Whether MLX computes with its CUDA kernels."""
    return mx.cuda.is_available() and mx.default_device() == mx.gpu


def available() -> bool:
    """Whether bytes and routing go through pinned memory here.

    Raises:
        RuntimeError: If they should and ``cuda-bindings`` is missing.
    """
    if os.environ.get("MOELAB_CUDA_COPIES") != "1" or not on_cuda():
        return False
    if runtime is None:
        raise RuntimeError(
            "MOELAB_CUDA_COPIES=1 needs the package cuda-bindings: install it, or unset the "
            "variable."
        )
    return True


def _checked(result):
    """What a function of the CUDA runtime returned, without its error code."""
    error, *values = result
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"CUDA: {runtime.cudaGetErrorString(error)[1].decode()}")
    return values[0] if values else None


class Pinned:
    """Memory of the host that the GPU can read and write, and that never moves.

    Args:
        nbytes (int): Its size.

    Attributes:
        address (int): The same for host and GPU.
        bytes (np.ndarray): ``[nbytes]``, uint8.
    """

    def __init__(self, nbytes: int):
        self.address = _checked(runtime.cudaHostAlloc(nbytes, runtime.cudaHostAllocDefault))
        self.bytes = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.address), np.uint8)
        self._free = runtime.cudaFreeHost

    def __del__(self):
        self._free(self.address)


class Block(Pinned):
    """Pinned memory that ranges of files are read into, and copied from.

    Args:
        nbytes (int): Its size.

    Attributes:
        view (memoryview): Its bytes, writable.
    """

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self.view = memoryview(self.bytes)
        self._copied = _checked(runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming))

    def copy(self, parts: Iterable[tuple[int, int]], stream: object) -> None:
        """Begin to copy the block's first bytes to other memory.

        Args:
            parts (Iterable[tuple[int, int]]): Where to: address and bytes of each part in turn.
            stream (object): The CUDA stream to do it in.
        """
        source, kind = self.address, runtime.cudaMemcpyKind.cudaMemcpyDefault
        for address, nbytes in parts:
            _checked(runtime.cudaMemcpyAsync(address, source, nbytes, kind, stream))
            source += nbytes
        _checked(runtime.cudaEventRecord(self._copied, stream))

    def wait(self) -> None:
        """Wait until the block has been copied."""
        _checked(runtime.cudaEventSynchronize(self._copied))


class Blocks:
    """The blocks of one model and the CUDA stream that copies them, in order."""

    def __init__(self):
        self._stream = _checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
        self._destroy = runtime.cudaStreamDestroy
        self._free, self._copying, self._num_blocks = [], deque(), 0

    def __del__(self):
        self._destroy(self._stream)

    def take(self, must: bool) -> Block | None:
        """A block that is not in use.

        Args:
            must (bool): Make another one if all are being read into; else return None then.
        """
        if self._free:
            return self._free.pop()
        if self._num_blocks < NUM_BLOCKS or (must and not self._copying):
            self._num_blocks += 1
            return Block(BLOCK_NBYTES)
        if not self._copying:
            return None
        block = self._copying.popleft()
        block.wait()
        return block

    def copy(self, block: Block, reads: Iterable[Read]) -> None:
        """Begin to copy a block that has been read to where its ranges belong.

        Args:
            block (Block): From ``take``. It may be taken again once it is copied.
            reads (Iterable[Read]): The ranges, in order.
        """
        block.copy((part for r in reads for part in r.parts), self._stream)
        self._copying.append(block)

    def copy_now(self, block: Block, reads: Iterable[Read]) -> None:
        """Copy a block of the caller's own, and wait.

        Args:
            block (Block): Any.
            reads (Iterable[Read]): As for ``copy``.
        """
        block.copy((part for r in reads for part in r.parts), self._stream)
        block.wait()

    def wait(self) -> None:
        """Wait for all copies."""
        _checked(runtime.cudaStreamSynchronize(self._stream))
        self._free += self._copying
        self._copying.clear()


class _Begun:
    """What one ``start`` began: reads of a block each, waiting for a block or being read."""

    def __init__(self, direct, waiting):
        self.direct, self.waiting, self.reading = direct, waiting, deque()


class UploadingReader(Reader):
    """A ``Reader`` whose threads read into pinned memory, which is copied to the GPU.

    The thread that calls ``finish`` asks for all copies and the others only read: threads that
    call the CUDA runtime at the same time make each other wait (0.26 ms a call of eight threads,
    0.005 of one; H200). Ranges without ``parts`` are read as ``Reader`` reads them.

    Args:
        readers (int): As for ``Reader``.
    """

    def __init__(self, readers: int = 8):
        super().__init__(readers)
        self._blocks = Blocks()
        self._local = threading.local()

    def start(self, reads: list[Read]) -> _Begun:
        if not reads or self._read_inline(reads):
            return _Begun([], deque())
        direct = [r for r in reads if not r.parts]
        copied = [r for r in reads if r.parts]
        begun = _Begun(self._read_in_pool(direct), deque(pieces(copied, self.readers)))
        self._read_more(begun)
        return begun

    def _read_more(self, begun):
        while begun.waiting and (block := self._blocks.take(must=not begun.reading)) is not None:
            reads = begun.waiting.popleft()
            begun.reading.append((reads, block, self._submit(_into(reads, block))))

    def finish(self, begun: _Begun) -> None:
        try:
            while begun.waiting or begun.reading:
                self._read_more(begun)
                reads, block, future = begun.reading.popleft()
                future.result()
                self._blocks.copy(block, reads)
        except ReadError:
            wait([future for *_, future in begun.reading])
            raise
        finally:
            super().finish(begun.direct)
        self._blocks.wait()

    def stop(self) -> None:
        super().stop()
        self._blocks.wait()
        self._blocks = Blocks()  # some may have been in use when an exception came

    def read_here(self, reads: list[Read]) -> None:
        if direct := [r for r in reads if not r.parts]:
            super().read_here(direct)
        for piece in pieces([r for r in reads if r.parts], 1):
            if not hasattr(self._local, "block"):  # of a prefetch thread, or for small reads
                self._local.block = Block(BLOCK_NBYTES)
            block = self._local.block
            super().read_here(_into(piece, block))
            self._blocks.copy_now(block, piece)


def pieces(reads: list[Read], readers: int) -> list[list[Read]]:
    """Divide ranges into pieces that fit into a block.

    Args:
        reads (list[Read]): With ``parts``.
        readers (int): Make at least as many pieces, if there are ranges enough.

    Returns:
        list[list[Read]]: Ranges, or parts of one.
    """
    most = min(BLOCK_NBYTES, sum(r.nbytes for r in reads) / readers)
    found, size = [], most
    for r in reads:
        for first in range(0, r.nbytes, BLOCK_NBYTES):
            nbytes = min(BLOCK_NBYTES, r.nbytes - first)
            part = r if nbytes == r.nbytes else _cut(r, first, nbytes)
            if size + nbytes > most:
                found.append([])
                size = 0
            found[-1].append(part)
            size += nbytes
    return found


def _cut(r, first, nbytes):
    """A part of a range."""
    parts, begin = [], 0
    for address, size in r.parts:
        low, high = max(first, begin), min(first + nbytes, begin + size)
        if low < high:
            parts.append((address + low - begin, high - low))
        begin += size
    return r._replace(offset=r.offset + first, nbytes=nbytes, parts=parts)


def _into(reads, block):
    """The same ranges, read into a block one behind the other."""
    out, first = [], 0
    for r in reads:
        out.append(r._replace(views=[block.view[first : first + r.nbytes]]))
        first += r.nbytes
    return out


# Both write or read ``box``: a word that says that the numbers are there, then the numbers.
_POST = """
    unsigned int* box = (unsigned int*)(*address);
    int n = 1;
    for (int d = 0; d < indices_ndim; ++d) n *= indices_shape[d];
    for (int i = threadIdx.x; i < n; i += blockDim.x) box[1 + i] = (unsigned int)indices[i];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *(volatile unsigned int*)box = 1;
        posted[0] = 1;
    }
"""
_TAKE = """
    const volatile unsigned int* box = (const volatile unsigned int*)(*address);
    int n = 1;
    for (int d = 0; d < indices_ndim; ++d) n *= indices_shape[d];
    for (int i = threadIdx.x; i < n; i += blockDim.x) slots[i] = box[1 + i];
"""


class Mailbox:
    """Pinned memory through which kernels and the host exchange small numbers.

    A kernel writes them there after what it waits for, and the host watches one word of it. That
    takes a few microseconds where MLX's ``eval`` puts the thread to sleep and a read of the array
    moves its page to the host.
    """

    def __init__(self):
        self._memory = Pinned(4 * (1 + MAILBOX_SIZE))
        self._words = self._memory.bytes.view(np.uint32)
        self._address = mx.array(np.array([self._memory.address], np.uint64))
        mx.eval(self._address)

    def fetch(self, indices: mx.array, after: mx.array) -> np.ndarray:
        """The numbers in an array, as soon as they are computed.

        Args:
            indices (mx.array): At most ``MAILBOX_SIZE`` integers.
            after (mx.array): Is evaluated before this returns, too.

        Returns:
            np.ndarray: A copy, uint32, of the same shape.
        """
        words, n = self._words, indices.size
        words[0] = 0
        posted = _kernel("post", ("indices", "after"), "posted", _POST)(
            inputs=[indices, after, self._address], output_shapes=[(1,)], **_launch(n)
        )
        mx.async_eval(posted)
        end = time.perf_counter() + PATIENCE_S
        while not words[0]:
            if time.perf_counter() > end:
                mx.eval(posted)
            time.sleep(0)  # lets other threads run
        return words[1 : 1 + n].reshape(indices.shape).copy()

    def send(self, numbers: np.ndarray, indices: mx.array) -> mx.array:
        """An array that a kernel fills with numbers of the host, when it is computed.

        Args:
            numbers (np.ndarray): At most ``MAILBOX_SIZE`` integers. The next ``fetch`` overwrites
                them, so it must come after an array that was computed with these.
            indices (mx.array): Of the same shape; computed first.

        Returns:
            mx.array: uint32, of the same shape.
        """
        self._words[1 : 1 + numbers.size] = numbers.ravel()
        return _kernel("take", ("indices",), "slots", _TAKE)(
            inputs=[indices, self._address], output_shapes=[indices.shape], **_launch(numbers.size)
        )[0]


@cache
def _kernel(name, inputs, output, source):
    return mx.fast.cuda_kernel(f"moelab_{name}", [*inputs, "address"], [output], source)


def _launch(size):
    threads = min(256, max(32, size))
    return {
        "output_dtypes": [mx.uint32],
        "grid": (threads, 1, 1),
        "threadgroup": (threads, 1, 1),
    }
