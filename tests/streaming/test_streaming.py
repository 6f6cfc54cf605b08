"""What the engine reads, counts, evaluates and holds, whatever the family."""

import contextlib
import itertools
from types import SimpleNamespace

import common
import mlx.core as mx
import numpy as np
import pytest
from common import STREAMED, TINY_MOE, in_passes, loaded, needs_kernels, tries, watched
from families import E, K
from faults import read_in_parts
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

import moelab
from moelab.kernels.experts import ExpertCall
from moelab.repack import repack
from moelab.streaming import layers
from moelab.streaming import model as engine
from moelab.streaming.config import ENVIRONMENT
from moelab.streaming.fused import FusedSwitchGLU, PaddedLinear
from moelab.streaming.reading import native
from moelab.streaming.reading.flight import Flight
from moelab.streaming.residency import bank, layer, residency
from moelab.streaming.session import session_of

PROMPT = mx.array([common.PROMPT])

# MLX 0.32.4's CUDA kernels give small quantized models other logits in each call, in mlx-lm, too.
on_host = pytest.mark.skipif(mx.cuda.is_available(), reason="quantized models are too small")
WEIGHTS = "plain32" if mx.cuda.is_available() else "affine4"


@pytest.fixture(scope="module")
def path(stored):
    return stored("qwen3_5_moe", WEIGHTS)


def answer(model, steps=4):
    return common.greedy_logits(model, common.PROMPT, steps)


@pytest.mark.parametrize("mode", STREAMED)
def test_counters(path, mode):
    """A prompt reads each needed expert once."""
    with loaded(path, mode=mode, slots=K) as model:
        with moelab.record(model) as trace:
            mx.eval(model(PROMPT))
        L = trace.experts.shape[1]
        needed = sum(len(np.unique(trace.experts[:, i])) for i in range(L))
        got = moelab.stats(model, reset=True)
        assert needed > L * K, "more than the slots hold"
        assert (got.prefill.hits, got.prefill.misses) == (0, needed)
        assert got.prefill.bytes_read == needed * moelab.footprint(path).expert_nbytes
        assert (got.prefill.tokens, got.decode.tokens) == (PROMPT.size, 0)
        answer(model, steps=7)
        got = moelab.stats(model)
        assert (got.prefill.tokens, got.decode.tokens, got.decode.calls) == (PROMPT.size, 7, 7 * L)
        assert got.decode.hits + got.decode.misses == 7 * L * K
        assert got.decode.hit_rate == got.decode.hits / (7 * L * K)
        assert got.decode.bytes_per_token == got.decode.bytes_read / 7


@on_host
@pytest.mark.parametrize("kernel", [pytest.param("fast", marks=needs_kernels), "mlx"])
def test_a_verify_pass_reads_each_missing_expert_once(path, kernel, monkeypatch):
    monkeypatch.setattr(layer, "PART_NBYTES", 1)
    begun, read, begin, bring = [], [], layer.LayerSlots.begin, residency.Residency.bring

    def begins(self, misses):
        begun.extend(misses)
        return begin(self, misses)

    def brings(self, i, pairs, *rest):
        begun.clear()
        union, computed = {*pairs.needed}, []
        held = union & self.layers[i].table.slot_of.keys()
        for arrived in bring(self, i, pairs, *rest):
            assert sorted(begun) == sorted(union - held), "all reads come before arithmetic"
            assert computed or held <= set(arrived.slots)
            computed += arrived.slots
            yield arrived
        assert sorted(computed) == sorted(union)
        read.append(len(begun))

    monkeypatch.setattr(layer.LayerSlots, "begin", begins)
    monkeypatch.setattr(residency.Residency, "bring", brings)
    with loaded(path, slots=E - 1, kernels=kernel) as model:
        cache = make_prompt_cache(model)
        mx.eval(model(PROMPT[:, :1], cache=cache))
        moelab.stats(model, reset=True)
        read.clear()
        mx.eval(model(PROMPT[:, 1:5], cache=cache))  # as in a verify pass of three drafts
        nbytes = moelab.stats(model).prefill.bytes_read
    assert len(read) == moelab.footprint(path).num_layers
    assert sum(read) > K and nbytes == sum(read) * moelab.footprint(path).expert_nbytes


@needs_kernels
@pytest.mark.skipif(native.direct_loop() is None, reason="needs Linux and llvmlite")
def test_some_slots_are_filled_while_others_are_computed(monkeypatch):
    """A long call computes a quarter of its slots at a time, and the disk is busy meanwhile."""
    read_in_parts(monkeypatch)
    parts, compute = [], ExpertCall.compute

    def counted(call, places, its):
        parts.append((len({*its.tolist()}), len(slots.awaited)))
        compute(call, places, its)

    monkeypatch.setattr(ExpertCall, "compute", counted)
    with loaded(TINY_MOE, slots=16, reads="direct") as model:
        streamed = session_of(model).layers[0]
        slots, x = streamed.slots, mx.random.normal((1, 64, 256))
        streamed.read([*range(16)])  # these are computed first
        routed = (mx.arange(64)[:, None] + mx.arange(0, 64, 8)) % 64
        streamed(x, routed[None].astype(mx.uint32))
    assert sum(n for n, _ in parts) == 64
    # Each of the 48 experts without a slot gets the slot of an expert that was computed.
    assert all(n <= 4 for n, _ in parts[:12]) and all(flying for _, flying in parts[1:12])


@pytest.mark.skipif(native.direct_loop() is None, reason="needs Linux and llvmlite")
@pytest.mark.parametrize("align", (512, 4096, 0))
@pytest.mark.parametrize("kernel", ("fast", "mlx"))
@pytest.mark.parametrize("packed", (False, True))
def test_bytes_land_in_slots(path, packed, kernel, align, tmp_path, monkeypatch):
    """Direct reads go into slots if these have room for whole blocks, else through a buffer."""
    source = repack(path, tmp_path / "packed", progress=False) if packed else path
    config = {"slots": K, "kernels": kernel, "dtype": "auto" if kernel == "fast" else "bfloat16"}
    with loaded(source, **config) as model:
        want = answer(model)
    monkeypatch.setattr(bank, "ROOM_SHARE", 100)
    monkeypatch.setattr(bank, "alignment", lambda path: align)
    read, real = [], native.read_direct
    monkeypatch.setattr(native, "read_direct", lambda table: read.append(real(table)))
    with loaded(source, reads="direct", **config) as model:
        assert np.array_equal(answer(model), want)
        slots = session_of(model).residency.layers[0]
        rooms = slots.bank.places([0]).table[:, native.ROOM]
        assert bool(rooms.all()) == bool(align) == (not read)
        assert not align or not (rooms % align).any()
        populated = []
        monkeypatch.setattr(bank.SlotBank, "populate", lambda own, huge: populated.append(huge))
        for huge_s in (0, 1):  # huge pages are too slow at 0 and fast enough at 1
            monkeypatch.setattr(engine, "HUGE_S", huge_s)
            engine._populate([slots])
        assert populated == [False, True]
        if align:  # a read in flight ends before a slot is given back or freed
            session = session_of(model)
            missing = slots.missing(range(E))[:2]
            session.residency.prefetch(0, missing)
            assert session.reader._queue._flying
            session.residency.resize(K)
            assert not session.reader._queue._flying
            session.residency.prefetch(0, missing)
            monkeypatch.setattr(Flight, "done", lambda flight: False)
            slots.collect(missing)
            assert {*missing} <= slots.table.slot_of.keys()  # so that none is evicted
            session.reader.stop()
            session.residency.recover()
            assert not {*missing} & slots.table.slot_of.keys()


@needs_kernels
@pytest.mark.parametrize("room", (1 << 40, 3))
def test_a_prompt_lets_the_system_read_what_comes_next(path, room, monkeypatch):
    """The system is asked to read this and the next layer's missing experts, as many as fit."""
    with loaded(path, slots=K) as model:
        session, asked = session_of(model), []
        bank, L = session.layers[0].slots.bank, len(session.layers)
        monkeypatch.setattr(residency, "memory_available", lambda: 2 * room * bank.expert_nbytes)
        monkeypatch.setattr(type(bank), "places", lambda bank, experts: (bank, experts))
        monkeypatch.setattr(session.reader, "read_ahead", asked.append)
        mx.eval(model(PROMPT[:, :1]))
        held = [layer.slots.table.slot_of for layer in session.layers]
        missing = [[e for e in range(E) if e not in slot_of] for slot_of in held]
        mx.eval(model(mx.repeat(PROMPT, 5, axis=1)))
        index_of = {layer.slots.bank: layer.index for layer in session.layers}
        found = [(index_of[bank], experts) for bank, experts in asked]
        # One call precedes the first layer. Then each layer calls for itself and the next, if any.
        assert [i for i, _ in found] == [0, *(n for i in range(L) for n in (i, i + 1))][:-1]
        assert found[0] == (0, missing[0][:room])
        for (_, here), (i, following) in zip(found[1::2], found[2::2]):
            assert following == missing[i][: max(0, room - len(here))]
        asked.clear()
        mx.eval(model(PROMPT[:, :4]))
        assert not asked, "4 tokens need few experts"


@pytest.mark.parametrize("mode", ("stacked", "fused"))
@pytest.mark.parametrize("slots", (E - 1, E))
def test_the_host_learns_the_routing_once_a_layer(path, mode, slots, monkeypatch):
    """The host learns no routing if every expert has a slot; each layer then reads all experts."""
    num_layers = moelab.footprint(path).num_layers
    with loaded(path, mode=mode, slots=slots, kernels="mlx", prefetch="none") as model:
        for _ in range(1 + -(-E // K)):
            mx.eval(model(mx.array([[3]]), cache=make_prompt_cache(model)))
        held = {len(layer.slots.table.slot_of) for layer in session_of(model).layers}
        assert held == {E if slots == E else K}
        got = moelab.stats(model, reset=True).decode
        assert got.misses == num_layers * K
        assert got.bytes_read == num_layers * held.pop() * moelab.footprint(path).expert_nbytes
        evaluations = watched(monkeypatch, mx, "eval")
        y = model(mx.array([[3]]), cache=make_prompt_cache(model))
        monkeypatch.undo()
        got = moelab.stats(model).decode
        assert (got.calls, got.hits, got.misses) == (num_layers, num_layers * K, 0)
        mx.eval(model(PROMPT))  # 18 uses of at most E experts
        assert 0 < moelab.stats(model).prefill.hits <= num_layers * E
        # On CUDA the GPU writes the routing to pinned memory, without an evaluation.
        assert len(evaluations) == (num_layers if slots < E and not mx.cuda.is_available() else 0)
        resident = loaded(path, mode="resident", kernels="mlx")
        assert mx.array_equal(y, resident(mx.array([[3]]), cache=make_prompt_cache(resident)))


@pytest.mark.parametrize("mode", ("resident", *STREAMED))
def test_footprint_is_what_load_takes(stored, mode):
    """gpt_oss's experts have biases, which stay in memory."""
    path = stored("gpt_oss", WEIGHTS)
    predicted = moelab.footprint(path, moelab.StreamConfig(mode=mode, slots=K + 1))
    with loaded(path, mode=mode, slots=K + 1) as model:
        session = session_of(model)
        held = sum(p.nbytes for _, p in tree_flatten(model.parameters()))
        if mode == "resident":
            assert held == predicted.total_nbytes
            return
        kept = sum(p.nbytes for p in session.resident.values())
        assert (held, kept) == (predicted.backbone_nbytes, predicted.resident_nbytes) and kept
        assert predicted.total_nbytes == held + kept + predicted.slots_nbytes
        if mode in ("stacked", "fused"):
            banks = [own.bank for own in session.residency.layers]
            assert sum(b.expert_nbytes * b.num_slots for b in banks) == predicted.slots_nbytes


@pytest.mark.parametrize(
    "variables, fields",
    [  # variables, and the configuration that they stand for
        ("", {"mode": "buffers"}),
        ("MLX_MOE_STACKED=1 MLX_MOE_FUSE_GATEUP=1 SWIFTLM_TOP_K=6", {"top_k": 6}),
        ("TEND_MOE_CACHE_SLOTS=24 MLX_MOE_CACHE_SLOTS=24", {"mode": "buffers", "slots": 24}),
    ],
)
def test_from_env(variables, fields, monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert moelab.StreamConfig.from_env(readers=2) == moelab.StreamConfig(**fields, readers=2)
    if "slots" in fields:
        monkeypatch.setenv("TEND_MOE_CACHE_SLOTS", "16")
        with pytest.raises(ValueError, match="SLOTS=24 and TEND_MOE_CACHE_SLOTS=16.*Unset one"):
            moelab.StreamConfig.from_env()
    for name in () if variables else ENVIRONMENT:
        for value in ("many", "", "-1", "4294967296"):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                with pytest.raises(ValueError, match=f"{name}: expected .*got '{value}'"):
                    moelab.StreamConfig.from_env()


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", STREAMED)
def test_a_pass_on_cuda_is_the_resident_one_whatever_came_before(mode):
    """Logits are equal bit for bit, one token at a time and in waves of 32 and of 128 pairs."""
    ids, other = (mx.random.randint(0, 8000, (1, 16), key=mx.random.key(i)) for i in range(2))

    resident = loaded(TINY_MOE, mode="resident")
    with loaded(TINY_MOE, mode=mode, slots=16) as model:
        for T in (1, 4, 16):
            want = in_passes(resident, ids, T)
            for history in (2, 16):
                assert mx.array_equal(in_passes(model, ids, T), want), (T, history)
                mx.eval(in_passes(model, other, history))


def mlx_kernel(gpu, rows, matrices, quantized):
    """Return which of two kernels MLX 0.32's source chooses for SwitchGLU's projections."""
    if quantized and gpu == "cuda":
        return rows < 8
    return rows >= 64 and (not quantized or rows // matrices >= 4)


@pytest.mark.parametrize("gpu", ("cuda", "metal"))
@tries(300)
@given(data=st.data(), E=st.integers(1, 512), size=st.integers(1, 4096), quantized=st.booleans())
def test_a_gpus_kernel_is_the_resident_models(data, gpu, E, size, quantized):
    """Each part of a call takes the resident model's kernel, with any number of slots."""
    S, part = data.draw(st.integers(1, E)), data.draw(st.integers(1, size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, f"on_{gpu}", lambda: True)
        least, most = layers.kernel_rows(size, E, S, quantized)
    for n in {min(part, most), part % most or most}:
        got = mlx_kernel(gpu, max(n, least), S, quantized)
        assert got == mlx_kernel(gpu, size, E, quantized)


# A stand-in for ``Ranks`` without the results of the other ranks.
ONE_RANK = SimpleNamespace(
    waiting=contextlib.nullcontext,
    answered=lambda: None,
    join=lambda y, owners, routed, row, path: [mx.zeros((*routed.shape, row[0]), row[1])],
)


@on_host
@pytest.mark.parametrize("weights", ("affine4", "plain"))
@pytest.mark.parametrize("gpu", ("cuda", "metal"))
@pytest.mark.parametrize("mode", STREAMED)
def test_every_part_of_a_call_takes_a_gpus_kernel_of_the_whole(
    mode, gpu, weights, stored, monkeypatch
):
    """A rank that owns half of the experts takes the kernel of the whole call, too."""
    path, calls = stored("qwen3_5_moe", weights), []
    monkeypatch.setattr(layers, f"on_{gpu}", lambda: True)

    def note(self, x, indices):
        calls.append((indices.size, self.down_proj.weight.shape[0]))

    for cls in (SwitchGLU, FusedSwitchGLU):
        watched(monkeypatch, cls, "__call__", note)
    resident = loaded(path, mode="resident")
    for slots, tokens in itertools.product((K, E - 1, E), (9, 24, 40)):
        with loaded(path, mode=mode, slots=slots, kernels="mlx") as model:
            prompt = mx.arange(tokens)[None]
            want = resident(prompt)
            calls.clear()
            got = model(prompt)
            found = {mlx_kernel(gpu, *call, weights == "affine4") for call in calls}
            assert found == {mlx_kernel(gpu, tokens * K, E, weights == "affine4")}
            assert mx.abs(got - want).max().item() <= 1e-5
            calls.clear()
            with monkeypatch.context() as patch:
                patch.setattr(session_of(model), "ranks", ONE_RANK)
                for _, layer in layers.expert_layers(model):
                    layer.owned = layer._owners = np.arange(E) < E // 2
                model(prompt)
            assert {mlx_kernel(gpu, *call, weights == "affine4") for call in calls} == found


@on_host
def test_a_gpu_computes_together_what_a_wave_reads(path, monkeypatch):
    """A part is padded to its kernel's rows: parts of one expert each would be mostly padding."""
    read_in_parts(monkeypatch)
    added = watched(monkeypatch, layers.Parts, "add")
    with loaded(path, slots=E // 2, kernels="mlx") as model:
        session_of(model).residency._overlap = False  # as on a GPU
        mx.eval(model(PROMPT))
        assert 0 < len(added) <= 2 * len(layers.expert_layers(model))


@on_host
@pytest.mark.parametrize("mode", ["resident", *STREAMED])
def test_on_cuda_parameters_are_contiguous_and_short_rows_have_room(path, monkeypatch, mode):
    """Without CUDA a slot may be one record. The arrays in a record are not contiguous."""
    monkeypatch.setattr(bank, "ROOM_SHARE", 100)

    def form(layer, *args, **kwargs):
        parameters = (p for _, p in tree_flatten(layer.parameters()))
        return type(layer), all(memoryview(p).c_contiguous for p in parameters)

    def run():
        with loaded(path, mode=mode, dtype="bfloat16", kernels="mlx", slots=E) as model:
            called.clear()  # calls that ask for types while loading do not count
            return answer(model, 3)

    called = watched(monkeypatch, QuantizedSwitchLinear, "__call__", form)
    want = run()
    is_record = mode not in ("resident", "serial") and bank.can_empty()
    assert (QuantizedSwitchLinear, not is_record) in called, "this tests nothing"
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bank, "can_empty", lambda: False)
    assert np.array_equal(run(), want) and {*called} == {(PaddedLinear, True)}


@pytest.mark.parametrize("on_metal", (False, True))
def test_on_metal_slots_take_no_page_more(on_metal, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: on_metal)
    made = bank._Buffer.of_zeros(4, 1024, mx.uint32)
    assert made.rows.shape == (4, 4096) and not made.rows.any()
    assert made._array.nbytes - made.rows.nbytes == (0 if on_metal else 256)


def test_a_cache_of_another_model_is_refused(path):
    model = loaded(path, mode="resident")
    with pytest.raises(ValueError, match="cache: expected 2 entries, .* got 1"):
        model(PROMPT, cache=make_prompt_cache(model)[:1])


def test_a_prompt_takes_less_memory_than_resident():
    """The engine with 8 slots keeps a layer's output no longer than the resident model does."""
    ids = mx.array([[(i * 37) % 500 + 5 for i in range(400)]])
    peak = {}
    for mode in ("resident", "fused"):
        with loaded(TINY_MOE, mode=mode, slots=8) as model:
            cache = make_prompt_cache(model)
            mx.clear_cache()
            mx.reset_peak_memory()
            mx.eval(model(ids, cache=cache), [c.state for c in cache])
            peak[mode] = mx.get_peak_memory()
    assert peak["fused"] < peak["resident"]


def test_memory_is_given_back_once_after_a_long_prompt(path, monkeypatch):
    given = []
    monkeypatch.setattr("moelab.streaming.session.return_free_memory", lambda: given.append(1))
    monkeypatch.setattr("moelab.streaming.session.LONG_PROMPT", 9)
    with loaded(path, slots=K) as model:
        for tokens, expected in ((9, 0), (3, 0), (1, 1), (4, 1), (1, 1)):
            mx.eval(model(PROMPT[:, :tokens]))
            assert len(given) == expected
