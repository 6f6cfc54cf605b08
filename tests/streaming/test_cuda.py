"""The way of bytes through pinned memory, with a CUDA runtime that copies on the host."""

import ctypes
import gc
import itertools
import os
import threading
from types import SimpleNamespace

import families
import mlx.core as mx
import pytest
from families import K
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab.repack import repack
from moelab.streaming import cuda, reader, session
from moelab.streaming.model import load_model
from moelab.streaming.reader import ReadError
from moelab.streaming.session import session_of

PROMPT = mx.array([[5, 36, 67, 2, 33, 64, 95, 30, 61]])


class Runtime:
    """The calls that the module makes. A copy is made when its stream or event is waited for."""

    cudaHostAllocDefault = cudaStreamNonBlocking = cudaEventDisableTiming = 0
    cudaError_t = SimpleNamespace(cudaSuccess=0)
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)

    def __init__(self):
        self.memory, self.begun, self.streams, self.copied = {}, {}, 0, 0
        self.lock = threading.Lock()

    def cudaHostAlloc(self, nbytes, flags):
        memory = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(memory)] = memory
        return 0, ctypes.addressof(memory)

    def cudaFreeHost(self, address):
        del self.memory[address]
        return (0,)

    def cudaStreamCreateWithFlags(self, flags):
        self.streams += 1
        self.begun[self.streams] = []
        return 0, self.streams

    def cudaStreamDestroy(self, stream):
        del self.begun[stream]
        return (0,)

    def cudaEventCreateWithFlags(self, flags):
        return 0, {}

    def cudaEventRecord(self, event, stream):
        event["stream"] = stream
        return (0,)

    def cudaEventSynchronize(self, event):
        return self.cudaStreamSynchronize(event["stream"]) if event else (0,)

    def cudaMemcpyAsync(self, to, source, nbytes, kind, stream):
        with self.lock:
            self.begun[stream].append((to, source, nbytes))
        return (0,)

    def cudaStreamSynchronize(self, stream):
        with self.lock:
            for to, source, nbytes in self.begun[stream]:
                ctypes.memmove(to, source, nbytes)
                self.copied += nbytes
            self.begun[stream] = []
        return (0,)


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(cuda, "runtime", runtime)
    return runtime


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return families.write_checkpoint(
        "qwen3_5_moe", tmp_path_factory.mktemp("cuda") / "model", "affine4"
    )


@pytest.fixture
def uploading(runtime, monkeypatch):
    """Loads a model whose experts are copied."""

    def load(path, **config):
        monkeypatch.setattr(session, "Reader", cuda.UploadingReader)
        model, _ = load_model(path, moelab.StreamConfig(**{"dtype": "bfloat16", **config}))
        monkeypatch.undo()
        monkeypatch.setattr(cuda, "runtime", runtime)
        return model

    return load


@pytest.mark.parametrize("layout", ("stacked", "packed"))
@pytest.mark.parametrize("mode", ("serial", "buffers", "stacked", "fused"))
def test_experts_that_are_copied_are_the_same(mode, layout, path, tmp_path, runtime, uploading):
    if layout == "packed":
        path = repack(path, tmp_path / "packed", progress=False)
    with load_model(path, moelab.StreamConfig(dtype="bfloat16", mode=mode, slots=K))[0] as model:
        want = model(PROMPT)
        mx.eval(want)
    with uploading(path, mode=mode, slots=K) as model:
        assert mx.array_equal(model(PROMPT), want)
        assert runtime.copied == moelab.stats(model).prefill.bytes_read > 0
        assert not any(runtime.begun.values())


@pytest.mark.parametrize("block_nbytes, blocks", [(1 << 21, 32), (10_000, 3), (700, 1)])
def test_few_and_small_blocks_are_used_again_and_freed(
    block_nbytes, blocks, path, runtime, uploading, monkeypatch
):
    with load_model(path, moelab.StreamConfig(dtype="bfloat16", slots=K))[0] as model:
        want = model(PROMPT)
        mx.eval(want)
    model = uploading(path, slots=K, readers=2)
    monkeypatch.setattr(cuda, "BLOCK_NBYTES", block_nbytes)
    monkeypatch.setattr(cuda, "NUM_BLOCKS", blocks)
    monkeypatch.setattr(reader, "INLINE_NBYTES", 0)
    for _ in range(2):
        assert mx.array_equal(model(PROMPT), want)
    assert 0 < len(runtime.memory) <= blocks
    moelab.close(model)
    del model
    gc.collect()
    assert not runtime.memory


def test_prefetched_experts_are_copied(path, runtime, uploading):
    def logits(model):
        cache = make_prompt_cache(model)
        return [model(PROMPT[:, i : i + 1], cache=cache) for i in range(PROMPT.size)]

    with load_model(path, moelab.StreamConfig(dtype="bfloat16", slots=K))[0] as model:
        want = mx.stack(logits(model))
        mx.eval(want)
    with uploading(path, slots=2 * K, prefetch="lookahead") as model:
        assert mx.array_equal(mx.stack(logits(model)), want)
        assert moelab.stats(model).decode.prefetch_used > 0
        assert runtime.copied == moelab.stats(model).decode.bytes_read


def test_what_is_converted_is_not_copied(path, runtime, uploading):
    with load_model(path, moelab.StreamConfig(dtype="float32", slots=K))[0] as model:
        want = model(PROMPT)
        mx.eval(want)
    with uploading(path, dtype="float32", slots=K) as model:
        assert mx.array_equal(model(PROMPT), want)
        assert 0 < runtime.copied < moelab.stats(model).prefill.bytes_read


def test_a_copy_that_fails_is_an_error_and_the_next_call_is_right(
    path, runtime, uploading, monkeypatch
):
    runtime.cudaGetErrorString = lambda error: (0, b"out of memory")
    with uploading(path, slots=K) as model:
        want = model(PROMPT)
        mx.eval(want)
        monkeypatch.setattr(runtime, "cudaMemcpyAsync", lambda *_: (2,))
        with pytest.raises(RuntimeError, match="CUDA: out of memory"):
            mx.eval(model(PROMPT))
        monkeypatch.delattr(runtime, "cudaMemcpyAsync")
        assert mx.array_equal(model(PROMPT), want)


def test_a_read_that_fails_is_an_error_and_the_next_call_is_right(
    path, runtime, uploading, monkeypatch
):
    with uploading(path, slots=K) as model:
        want = model(PROMPT)
        mx.eval(want)
        preadv, calls = os.preadv, itertools.count()
        monkeypatch.setattr(os, "preadv", lambda *a: preadv(*a) if next(calls) < 40 else 0)
        with pytest.raises(ReadError, match="got 0"):
            mx.eval(model(PROMPT))
        monkeypatch.setattr(os, "preadv", preadv)
        assert mx.array_equal(model(PROMPT), want)


def test_nothing_of_this_is_used_unless_asked_for(path):
    with load_model(path)[0] as model:
        assert session_of(model).mailbox is None
        assert type(session_of(model).reader) is reader.Reader


def test_asked_for_without_cuda_bindings_is_an_error(path, monkeypatch):
    monkeypatch.setenv("MOELAB_CUDA_COPIES", "1")
    assert cuda.available() == (cuda.on_cuda() and cuda.runtime is not None)
    monkeypatch.setattr(cuda, "runtime", None)
    monkeypatch.setattr(cuda, "on_cuda", lambda: True)
    with pytest.raises(RuntimeError, match="install it"):
        cuda.available()


@pytest.mark.skipif(
    not (cuda.on_cuda() and cuda.runtime), reason="needs a CUDA GPU and cuda-bindings"
)
def test_numbers_come_and_go_through_the_mailbox():
    box = cuda.Mailbox()
    for n in (1, 8, 33, 600):
        numbers = mx.random.randint(0, 1 << 20, (n, 4), key=mx.random.key(n)).astype(mx.uint32)
        got = box.fetch(numbers, numbers)
        assert mx.array_equal(mx.array(got), numbers)
        sent = box.send(got[::-1], numbers)
        assert mx.array_equal(sent, numbers[::-1])
