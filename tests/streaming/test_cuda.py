"""Experts are copied through pinned memory to a GPU, whose kernels run here on the host."""

import ctypes
import functools
import gc
import itertools
import os
import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from common import PROMPT, assert_every_slot_is_there, greedy_logits, loaded, watched
from families import K
from faults import patch_preadv, read_in_threads

import moelab
from moelab.commands import drafting
from moelab.repack import repack
from moelab.streaming import cuda, prefetch
from moelab.streaming.reading import native, ranges, reader, uploading
from moelab.streaming.reading.file import ReadError
from moelab.streaming.residency import layer as layer_slots
from moelab.streaming.residency.table import EVICTION
from moelab.streaming.session import session_of

pytestmark = pytest.mark.skipif(mx.cuda.is_available(), reason="a GPU runs its own kernels")
answer = functools.partial(greedy_logits, prompt=PROMPT, steps=4)


class Runtime:
    """A stand-in for CUDA: the calls that ``streaming.cuda`` makes, and its kernels in Python."""

    cudaHostAllocDefault = 0
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrKernelExecTimeout=17)

    def __init__(self):
        self.memory, self.time_limit = {}, 0
        self.copied = self.fetched = self.in_graph = 0

    def cudaHostAlloc(self, nbytes, flags):
        memory = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(memory)] = memory
        return 0, ctypes.addressof(memory)

    def cudaFreeHost(self, address):
        del self.memory[address]
        return (0,)

    def cudaDeviceGetAttribute(self, attribute, device):
        return 0, self.time_limit

    def cudaGetErrorString(self, error):
        return 0, b"out of memory"

    def kernel(self, name, more, outputs, source):
        call, *sizes = name.split("_")
        return functools.partial(getattr(self, call), *map(int, sizes))

    def post(self, indices, after, address, **_):
        mx.eval(after)
        box = words(address[0].item(), 1 + indices.size, np.uint32)
        box[1:] = np.array(indices).ravel()
        box[0] = 1
        return [mx.zeros(1)]

    def send(self, indices, after, addresses, **_):
        mx.eval(after)
        box, first = addresses.tolist()
        copies, total = words(first, 2, np.uint64).tolist()
        chunks, entries = total, words(first + 16, 5 * copies, np.uint64).reshape(-1, 5).tolist()
        end = time.monotonic() + 20
        for first, source, to, nbytes, flag in entries:
            assert first + chunks == total
            while not words(flag, 1, np.uint32)[0]:
                assert time.monotonic() < end, "no read says that these bytes are there"
                self.in_graph += 1
                time.sleep(1e-4)
            ctypes.memmove(to, source, nbytes)
            self.copied += nbytes
            chunks -= -(-nbytes // cuda.CHUNK_NBYTES)
        assert chunks == 0
        return [mx.array(words(box + 4, indices.size, np.uint32).reshape(indices.shape).copy())]

    def fetch(self, E, S, indices, state, phase, place, after, **_):
        mx.eval(after)
        state, needed = np.array(state), np.array(indices).ravel().tolist()
        slot_of, expert_of, used = state[:E], state[E : E + S], state[E + S : E + 2 * S]
        clock, counts = state[E + 2 * S], state[-4:].reshape(2, 2)[phase.item()]
        held = {int(slot_of[e]) for e in needed if slot_of[e] < S}
        counts += np.array([len(held), len({*needed}) - len(held)], np.uint32)
        for i, e in enumerate(needed):
            if slot_of[e] < S:
                used[slot_of[e]] = clock + i
        base, nbytes, chunks, *rows = np.array(place).tolist()
        assert len(rows) == 4 * chunks
        for i, e in enumerate(needed):
            if slot_of[e] < S:
                continue
            slot = int(used.argmin())
            slot_of[slot_of == slot] = S
            slot_of[e], expert_of[slot], used[slot] = slot, e, clock + len(needed) + i
            for first, to, stride, size in np.reshape(rows, (-1, 4)).tolist():
                ctypes.memmove(to + slot * stride, base + e * nbytes + first, size)
                self.fetched += size
        state[E + 2 * S] += 2 * len(needed)
        return mx.array(slot_of[needed].reshape(indices.shape)), mx.array(state)


def words(address, n, dtype):
    memory = (ctypes.c_uint8 * (n * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(cuda, "runtime", runtime)
    monkeypatch.setattr(cuda, "kernel", runtime.kernel)
    monkeypatch.setattr(cuda, "available", lambda: True)
    monkeypatch.setattr(prefetch, "on_cuda", lambda: True)  # a Mac's GPU would read ahead
    cuda.may_wait.cache_clear()
    yield runtime
    cuda.may_wait.cache_clear()


@pytest.fixture(scope="module")
def want(hybrid):
    """Logits of a prompt and four tokens for each dtype, from experts that are not copied."""
    logits = {}
    for dtype in ("bfloat16", "float32"):
        with loaded(hybrid, dtype=dtype, slots=K, kernels="mlx") as model:  # as on a GPU
            logits[dtype] = answer(model)
    return logits


@pytest.fixture(params=("stacked", "packed"))
def path(request, hybrid, tmp_path):
    packed = request.param == "packed"
    return repack(hybrid, tmp_path / "packed", progress=False) if packed else hybrid


def copying(path, **config):
    """A model that copies experts and computes no expert during reads, as on a GPU."""
    model = loaded(path, **{"dtype": "bfloat16", "slots": K, **config})
    session_of(model).residency._overlap = False
    return model


def assert_same(model, want):
    assert np.array_equal(answer(model), want["bfloat16"])


@pytest.mark.parametrize("mode", ("serial", "buffers", "stacked", "fused", "ahead"))
def test_experts_that_are_copied_are_the_same(mode, any_reads, path, runtime, want):
    ahead = {"slots": 2 * K, "prefetch": "lookahead"}
    with copying(path, **(ahead if mode == "ahead" else {"mode": mode})) as model:
        assert_same(model, want)
        stats = moelab.stats(model)
        if mode == "ahead":
            assert stats.decode.prefetch_used > 0
        else:
            assert runtime.copied == stats.prefill.bytes_read + stats.decode.bytes_read > 0


@pytest.mark.parametrize("piece_nbytes, copies", [(1 << 21, 512), (700, 512), (10_000, 5)])
def test_pinned_memory_is_freed(piece_nbytes, copies, hybrid, runtime, want, monkeypatch):
    """Pinned memory is reused, also for ranges in pieces. Reads begin before earlier reads end."""
    slots = layer_slots.LayerSlots
    begun = watched(monkeypatch, slots, "finish", lambda layer, group: len(layer.awaited))
    monkeypatch.setattr(layer_slots, "COPIED_NBYTES", 1)
    monkeypatch.setattr(ranges, "PIECE_NBYTES", piece_nbytes)
    monkeypatch.setattr(cuda, "MAX_COPIES", copies)
    read_in_threads(monkeypatch)
    model = copying(hybrid, readers=2)
    for _ in range(2):
        assert_same(model, want)
        assert 1 < len(runtime.memory) <= 4  # the mailbox included
    assert begun[0] == 2
    moelab.close(model)
    del model
    gc.collect()
    assert not runtime.memory


@pytest.mark.parametrize("time_limit", (0, 1))
def test_the_gpu_waits_unless_it_ends_long_kernels(time_limit, hybrid, runtime, want, monkeypatch):
    read_in_threads(monkeypatch)
    patch_preadv(monkeypatch, lambda preadv, *a: time.sleep(2e-3) or preadv(*a))
    runtime.time_limit = time_limit
    with copying(hybrid) as model:
        assert_same(model, want)
    assert (runtime.in_graph == 0) == bool(time_limit)


@pytest.mark.skipif(native.loop() is None, reason="needs llvmlite")
def test_native_code_is_given_the_flag_to_set(any_reads, hybrid, runtime, monkeypatch):
    """It sets the flag (``test_reader.py``) without the GIL, for which Python might wait."""
    flags = watched(monkeypatch, native, "read", lambda table, flag=0, arrived=None: arrived)
    with copying(hybrid) as model:
        answer(model)
    assert any(flags)


@pytest.mark.parametrize("slots", [K, 2 * K])
def test_what_is_converted_is_not_copied(any_reads, slots, hybrid, runtime, want, monkeypatch):
    """The experts come in parts, and the engine asks for each part whether its reads have ended."""
    monkeypatch.setattr(layer_slots, "PART_NBYTES", 1)
    with copying(hybrid, dtype="float32", kernels="mlx", slots=slots) as model:
        assert np.array_equal(answer(model), want["float32"])
        assert not runtime.copied


def no_memory(patch, runtime, _):
    patch.setattr(runtime, "cudaHostAlloc", lambda *_: (2, 0))


def no_read(first, patch, *_):
    calls = itertools.count()
    patch_preadv(patch, lambda preadv, *a: preadv(*a) if next(calls) < first else 0)


def no_slots(patch, _, model):
    patch.setattr(session_of(model).layers[-1].slots.host, "slots", lambda *_: 1 / 0)


@pytest.mark.parametrize(
    "fails, source, error, said",
    [
        (no_memory, "disk", RuntimeError, "CUDA: out of memory"),
        *((functools.partial(no_read, n), "disk", ReadError, "got 0") for n in (0, 40, 120)),
        (no_slots, "host", ZeroDivisionError, "division"),  # the GPU's slots forget their experts
    ],
)
def test_after_an_error_the_next_call_is_right(
    fails, source, error, said, any_reads, hybrid, runtime, want, monkeypatch
):
    with copying(hybrid, source=source) as model:
        if source == "host":
            assert_same(model, want)
        with monkeypatch.context() as patch, pytest.raises(error, match=said):
            fails(patch, runtime, model)
            answer(model)
        assert_same(model, want)


def test_an_interrupt_leaves_no_kernel_waiting(hybrid, runtime, want, monkeypatch):
    read_in_threads(monkeypatch)
    seen, real = [], uploading.UploadingReader.start

    def interrupted(self, *args):
        seen.extend(b.memory for b in real(self, *args))
        raise KeyboardInterrupt

    with copying(hybrid, readers=2) as model:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(uploading.UploadingReader, "start", interrupted)
            answer(model)
        assert seen and all(memory.flags.all() for memory in seen)
        assert_same(model, want)


@pytest.mark.parametrize("mode", ("stacked", "fused"))
@pytest.mark.parametrize("slots", (K, 3 * K, 64))
def test_experts_from_the_hosts_memory_are_the_same(slots, mode, path, runtime, want, monkeypatch):
    """Answers stay the same when experts replace others, and when some slots are given back."""
    monkeypatch.setattr(layer_slots, "can_empty", lambda: False)
    with copying(path, mode=mode, slots=slots, source="host") as model:
        for _ in range(2):
            assert_same(model, want)
        assert runtime.fetched > 0 and moelab.stats(model).decode.bytes_read == 0
        session_of(model).residency.resize(K)
        assert_same(model, want)


@pytest.mark.parametrize("policy", EVICTION)
def test_host_and_gpu_agree_on_what_the_slots_hold(policy, hybrid, runtime):
    """Long and recorded calls use the host's table, short calls use the state on the GPU."""
    read = {}
    for source in ("disk", "host"):
        with copying(hybrid, slots=2 * K, policy=policy, source=source) as model:
            for tokens in (PROMPT, [3], [8], [3, 9], PROMPT[::-1], [8], [60]):
                mx.eval(model(mx.array([tokens])))
            with moelab.record(model):
                mx.eval(model(mx.array([[60]])))
            stats = moelab.stats(model)
            phases = stats.prefill, stats.decode
            read[source] = [(c.tokens, c.calls, c.hits, c.misses) for c in phases]
            assert_every_slot_is_there(model)
    assert read["host"] == read["disk"]


@pytest.mark.parametrize(
    "config, patched, error",
    [
        ({"dtype": "float32", "kernels": "mlx"}, {}, "lie in a slot as they do on disk"),
        ({"mode": "buffers"}, {}, "needs slots"),
        ({"prefetch": "lookahead"}, {}, "reads experts from the disk"),
        ({}, {"residency.host.memory_available": 1000}, r"the host has 0\.00 GB available"),
        ({}, {"cuda.available": False}, "needs a CUDA GPU"),
    ],
)
def test_what_the_host_cannot_give(config, patched, error, hybrid, runtime, monkeypatch):
    for name, value in patched.items():
        monkeypatch.setattr(f"moelab.streaming.{name}", lambda value=value: value)
    with pytest.raises(ValueError, match=error):
        copying(hybrid, **{"slots": K, "source": "host", **config})


@pytest.mark.parametrize("runtime, copies", [(None, "1"), (Runtime(), "0")])
def test_without_cuda_bindings_or_turned_off(runtime, copies, hybrid, monkeypatch):
    monkeypatch.setattr(cuda, "runtime", Runtime())
    monkeypatch.setattr(cuda, "on_cuda", lambda: True)
    assert cuda.available()
    monkeypatch.setattr(cuda, "runtime", runtime)
    monkeypatch.setenv("MOELAB_CUDA_COPIES", copies)
    with loaded(hybrid) as model:
        assert session_of(model).handover.mailbox is None
        assert type(session_of(model).reader) is reader.Reader


@pytest.mark.parametrize("given", [None, "1"])
def test_a_draft_turns_cudnns_attention_off_unless_told(given, monkeypatch):
    # monkeypatch restores the variable, also after open_draft has set it
    monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", given or "")
    if given is None:
        del os.environ["MLX_CUDA_USE_CUDNN_SDPA"]
    monkeypatch.setattr(drafting, "on_cuda", lambda: True)
    drafting.open_draft("lookup")
    assert os.environ["MLX_CUDA_USE_CUDNN_SDPA"] == (given or "0")
