"""Properties that hold for any input, tested by hypothesis: slot table, header, layer."""

import errno
import json
import struct
from math import prod

import families
import mlx.core as mx
import numpy as np
import pytest
from common import TINY_MOE, assert_every_slot_is_there, loaded, needs_kernels, tries
from faults import patch_preadv, read_in_parts, read_in_threads
from fuzzing import damage_header
from hypothesis import event, example, given
from hypothesis import strategies as st

import moelab
from moelab.checkpoint import read_header
from moelab.checkpoint.headers import DTYPES
from moelab.streaming.layers import expert_layers
from moelab.streaming.reading.reader import Reader
from moelab.streaming.residency.table import EVICTION, SlotTable
from moelab.streaming.session import session_of

FEW = tries(150, derandomize=True)

# The slot table


# What happens to which experts; a call or a guess sometimes has more than fit.
STEPS = st.tuples(
    st.sampled_from(["call", "guess", "arrive", "fail"]),
    st.lists(st.integers(0, 7), max_size=3, unique=True),
)


@FEW
@given(st.integers(1, 6), st.sampled_from([*EVICTION]), st.lists(STEPS, min_size=20, max_size=50))
# A failed read after an eviction; an expert in use that was used before another.
@example(
    2, "lru", [("call", [0, 1]), ("arrive", [0, 1]), ("call", [2]), ("fail", [2]), ("call", [0, 1])]
)
@example(2, "lru", [("call", [0]), ("arrive", [0]), ("call", [0]), ("call", [1]),
                    ("arrive", [1]), ("call", [2])])  # fmt: skip
def test_slot_table_never_lies(S, policy, steps):
    """Every held expert has its own bytes and slot, whatever fails; busy ones are not evicted."""
    # ``content``: whose bytes each slot holds. ``busy``: slots of experts that are read or used.
    table, content, busy = SlotTable(S, policy), [None] * S, {}
    for step, experts in steps:
        before = dict(table.slot_of)
        done = {e: busy[e] for e in experts if e in busy}
        experts = [e for e in experts if e not in busy]
        hits, misses = {e: s for e, s in before.items() if e in experts}, {}
        if step == "call" and len(experts) + len(busy) > S:
            most = S - len(busy)
            with pytest.raises(ValueError, match=f"at most {most} experts .*got {len(experts)}"):
                table.choose(experts, busy)
            assert table.slot_of == before, "a refused call changes nothing"
        elif step == "call":
            found, misses = table.choose(experts, busy)
            assert found == hits and set(misses) == set(experts) - set(hits)
            busy |= hits
        elif step == "guess":
            misses = table.reserve(experts, busy)
            assert hits.items() <= table.slot_of.items(), "a guess evicts none of its own experts"
        else:
            busy = {e: s for e, s in busy.items() if e not in done}
            new = {e: s for e, s in done.items() if e not in before}
            if step == "fail":
                table.release(new.values())
            else:
                table.commit(new)
                for e, s in new.items():
                    content[s] = e
        for s in misses.values():
            content[s] = "nonsense"
        busy |= misses
        assert {e: s for e, s in busy.items() if e in before}.items() <= table.slot_of.items()
        flying = [s for e, s in busy.items() if e not in table.slot_of]
        assert sorted([*table.slot_of.values(), *table._free, *flying]) == list(range(S))
        assert all(content[s] == e for e, s in table.slot_of.items()), "each has its own bytes"


CALLS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), max_size=40)
# What keeps an expert in its slot, from the times of its uses. Times in a call are a bit apart.
WORTH = {
    "lru": lambda uses, now: uses[-1],
    "lfu": lambda uses, now: len(uses),
    "lrfu": lambda uses, now: sum(0.98 ** (now - int(at)) for at in uses),
}


@FEW
@given(st.sampled_from([*EVICTION]), st.integers(1, 5), CALLS)
def test_what_is_worth_least_is_evicted(policy, S, calls):
    table, used = SlotTable(S, policy), {}
    for now, experts in enumerate(c[:S] for c in calls * 40):
        held = set(table.slot_of)
        hits, misses = table.choose(experts)
        assert set(hits) == held & set(experts)
        table.commit(misses)
        assert set(experts) <= set(table.slot_of)
        for i, e in enumerate([*hits, *misses]):  # hits are used before misses
            used.setdefault(e, []).append(now + i / 10)
        worth = {e: WORTH[policy](uses, now) for e, uses in used.items()}
        gone, stayed = held - set(table.slot_of), held & set(table.slot_of) - set(experts)
        assert all(worth[g] <= worth[s] * (1 + 1e-9) for g in gone for s in stayed)
        assert len(table.slot_of) == min(S, len(used)), "none is evicted without need"


def test_what_a_use_counts_does_not_overflow():
    table = SlotTable(2, "lrfu")
    for e in [0, 0, 1] * 20_000:
        table.commit(table.choose([e])[1])
    table.commit(table.choose([2])[1])
    assert set(table.slot_of) == {0, 2} and max(table._counts.values()) < 1e200


# The safetensors header

SIZES = {name: dtype.size for name, dtype in DTYPES.items()}


@st.composite
def sound_headers(draw):
    """A valid safetensors header with names in any order, and the number of data bytes."""
    header, at = {}, 0
    if draw(st.booleans()):
        header["__metadata__"] = {"format": "mlx"}
    for i in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(["F32", "BF16", "U32", "U8", "F16", "I64"]))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        nbytes = prod(shape) * SIZES[dtype]
        name = draw(st.sampled_from(["a", "model.layers.0.mlp.weight", "ü", "scales"])) + str(i)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    return header, at


@tries(400, derandomize=True)
@given(sound_headers(), st.randoms(use_true_random=True))
def test_header_is_refused_or_right(tmp_path_factory, sound, random):
    """A sound file has the bytes that MLX loads. A damaged one gives an error that names the file,
    or every tensor is where the header says, without overlap.
    """
    header, nbytes = sound
    file = tmp_path_factory.getbasetemp() / "model.safetensors"
    raw = json.dumps(header).encode()
    content = struct.pack("<Q", len(raw)) + raw + np.random.default_rng(nbytes).bytes(nbytes)
    file.write_bytes(content)
    tensors, loaded = read_header(file), mx.load(str(file))
    assert set(tensors) == set(loaded)
    for name, t in tensors.items():
        assert t.shape == loaded[name].shape and t.dtype == loaded[name].dtype
        plain = loaded[name].reshape(-1).view(mx.uint8) if t.nbytes else b""
        assert content[t.offset : t.offset + t.nbytes] == bytes(memoryview(plain))
    if not header:
        return
    content = damage_header(content, random)
    file.write_bytes(content)
    try:
        tensors = read_header(file)
    except moelab.CheckpointError as e:
        assert str(file) in str(e) and "download it again" in str(e)
        return
    ends = begin = 8 + struct.unpack("<Q", content[:8])[0]
    want = json.loads(content[8:begin])
    want.pop("__metadata__", None)
    assert set(tensors) == set(want)
    for t in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        its, (first, last) = want[t.name], want[t.name]["data_offsets"]
        place = begin + first, last - first, tuple(its["shape"])
        assert (t.offset, t.nbytes, t.shape) == place
        assert t.nbytes == prod(t.shape) * SIZES[its["dtype"]], "its bytes fit its shape"
        assert ends <= t.offset, "it begins after the tensor before"
        assert t.offset + t.nbytes <= len(content), "it is inside the file"
        ends = t.offset + t.nbytes


# The layer


@pytest.fixture(scope="module")
def checkpoint(moe):
    return moe, families.expert_modules(families.load_resident(moe))[0]


calls = st.tuples(
    st.integers(1, 2),  # B
    st.integers(1, 5),  # T
    st.integers(0, 2**32 - 1),  # seed of x and of the routing
    # How many experts the routing draws from: few give hits, all of them give waves.
    st.sampled_from([2, 3, 8]),
    st.booleans(),  # whether to evaluate at once or later
    st.one_of(st.none(), st.integers(0, 6)),  # the read that fails
)


def test_a_layer_that_lost_experts_looks_for_them_again():
    """A layer's map from experts to slots is made anew when its slots change."""
    with loaded(TINY_MOE, slots=64) as model:
        residency = session_of(model).residency
        own, experts, indices = residency.layers[0], list(range(64)), mx.arange(8).reshape(1, 1, 8)
        session_of(model).layers[0].read(experts)
        before = residency.slots_in_graph(0, indices).tolist()
        own.table.release([own.table.slot_of.pop(e) for e in experts[:2]])
        assert residency.slots_in_graph(0, indices) is None
        session_of(model).layers[0].read([e for e in experts if e not in own.table.slot_of])
        want = [[[own.table.slot_of[e] for e in range(8)]]]
        assert residency.slots_in_graph(0, indices).tolist() == want != before


@tries(200, derandomize=True)
@given(
    history=st.lists(calls, min_size=1, max_size=10),
    mode=st.sampled_from(["serial", "buffers", "stacked", "fused"]),
    policy=st.sampled_from([*EVICTION]),
    slots=st.integers(families.K, families.E),
    readers=st.sampled_from([1, 3]),
    in_parts=st.booleans(),  # as with large experts: compute overlaps the reads
    reads=st.sampled_from(["cached", "direct"]),
)
def test_any_history_of_calls(checkpoint, history, mode, policy, slots, readers, in_parts, reads):
    """Calls in any order, evaluated at any time, with failed reads, give the resident answers."""
    path, (name, want) = checkpoint
    fields = {"mode": mode, "slots": slots, "policy": policy, "readers": readers, "reads": reads}
    left = None

    def flaky(preadv, fd, views, offset):
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0:
                views[0][:] = b"\xa5" * len(views[0])  # wrong bytes, then an error
                raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, views, offset)

    pending = []
    with pytest.MonkeyPatch.context() as patch, loaded(path, **fields, kernels="mlx") as model:
        patch_preadv(patch, flaky)
        (read_in_parts if in_parts else read_in_threads)(patch)
        layer = dict(model.named_modules())[name]
        for B, T, seed, among, at_once, fail_at in history:
            rng = np.random.default_rng(seed)
            x = mx.array(rng.standard_normal((B, T, families.D), dtype=np.float32))
            of = rng.permutation(families.E)[:among]
            routed = np.stack([rng.permutation(of)[: families.K] for _ in range(B * T)])
            indices = mx.array(routed.reshape(B, T, families.K).astype(np.uint32))
            left = fail_at
            try:
                y = layer(x, indices)
            except moelab.ReadError:
                left = None
                y = layer(x, indices)  # experts in the table have arrived; others are read again
            left = None
            if at_once:
                mx.eval(y)
            pending.append((y, want(x, indices)))
        for y, right in pending:
            np.testing.assert_allclose(np.array(y), np.array(right), atol=1e-5)


@pytest.fixture(scope="module")
def resident():
    return expert_layers(loaded(TINY_MOE, mode="resident"))


long_calls = st.tuples(
    st.sampled_from([0, 0, 0, 1, 2]),  # layers that are left out or called again
    st.sampled_from([1, 40, 60]),  # tokens; from 40 on most experts are needed
    st.sampled_from([None] * 9 + [0, 5, 30]),  # the read that fails
)


@needs_kernels
@tries(40, derandomize=True)
@given(st.lists(long_calls, min_size=4, max_size=16), st.integers(8, 40))
def test_any_history_of_prompts_past_the_page_cache(resident, history, slots):
    """A layer's free slots are filled ahead, even if another layer is next. Answers are right."""
    left, read_here = None, Reader.read_here

    def flaky(reader, reads):
        nonlocal left
        if left is not None:
            left -= 1
            if left == -1:
                raise moelab.ReadError("Input/output error")
        read_here(reader, reads)

    model = loaded(TINY_MOE, slots=slots, reads="direct")
    with pytest.MonkeyPatch.context() as patch, model:
        patch.setattr(Reader, "read_here", flaky)
        session, i = session_of(model), 0
        for step, (skip, T, fails) in enumerate(history):
            i = (i + skip) % len(session.layers)
            rng = np.random.default_rng(step)
            x = mx.array(rng.standard_normal((1, T, 256), dtype=np.float32))
            routed = np.stack([rng.permutation(64)[:8] for _ in range(T)])[None]
            indices, left = mx.array(routed.astype(np.uint32)), fails
            try:
                y = session.layers[i](x, indices)
            except moelab.ReadError:
                left = None
                y = session.layers[i](x, indices)
            left = None
            assert mx.array_equal(y, resident[i][1](x, indices))
            i += 1
        assert_every_slot_is_there(model)
        event(f"filled: {session.counting.stats.decode.prefetch_used > 0}")
