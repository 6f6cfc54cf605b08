"""Traces: what is recorded and saved, and a trace in a router's place."""

import io
import json
import os
import subprocess
import sys
import zipfile

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab.hooks import hooked
from moelab.streaming.model import load_model
from moelab.streaming.record import route_by
from moelab.streaming.trace import Trace, TraceError

L, E, K = 8, 64, 8
PROMPT = mx.array([[5, 9, 2, 7]])


def random_trace(prefill=6, decode=5, seed=0, L=L, E=E, K=K):
    rng = np.random.default_rng(seed)
    T = prefill + decode
    experts = rng.permuted(np.broadcast_to(np.arange(E, dtype=np.uint16), (T, L, E)), axis=-1)[
        ..., :K
    ]
    phase = np.repeat(("prefill", "decode"), (prefill, decode))
    return Trace(
        experts.copy(), phase, rng.integers(0, 4096, T), E, "made up", seed, "def f():\n\té"
    )


def run(model, steps=7):
    cache = make_prompt_cache(model)
    logits = [np.array(model(PROMPT, cache=cache)[0, -1])]
    for t in range(steps):
        logits.append(np.array(model(mx.array([[t + 3]]), cache=cache)[0, -1]))
    return np.stack(logits)


def same(a, b):
    for field in ("experts", "phase", "tokens"):
        x, y = getattr(a, field), getattr(b, field)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    assert (a.num_experts, a.model, a.seed, a.prompt) == (b.num_experts, b.model, b.seed, b.prompt)


@pytest.mark.parametrize("E", (64, 256, 300))
def test_a_file_gives_the_trace_back(tmp_path, E):
    trace = random_trace(E=E)
    trace.save(tmp_path / "a.npz")
    same(Trace.load(tmp_path / "a.npz"), trace)
    first = (tmp_path / "a.npz").read_bytes()
    Trace.load(tmp_path / "a.npz").save(tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_an_empty_trace_is_kept_too(tmp_path):
    trace = random_trace()[:0]
    trace.save(tmp_path / "a.npz")
    same(Trace.load(tmp_path / "a.npz"), trace)


def test_a_damaged_or_foreign_file_is_refused_by_name(tmp_path):
    random_trace().save(bad := tmp_path / "bad.npz")
    data = bad.read_bytes()
    for content in (b"not a trace", data[: len(data) // 2]):
        bad.write_bytes(content)
        with pytest.raises(TraceError, match=f"{bad}: expected a trace"):
            Trace.load(bad)
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none.npz")


def test_a_trace_that_contradicts_itself_is_refused():
    t = random_trace()
    with pytest.raises(TraceError, match=r"expected \[T, L, K\]"):
        Trace(t.experts[0], t.phase, t.tokens)
    with pytest.raises(TraceError, match="expected 11 phases"):
        Trace(t.experts, t.phase[1:], t.tokens)
    with pytest.raises(TraceError, match="expected at least 64"):
        Trace(t.experts, t.phase, t.tokens, num_experts=10)
    with pytest.raises(TraceError, match="expected 0 or more, got -1"):
        Trace(np.full((1, 1, 1), -1), t.phase[:1], t.tokens[:1])


def members(**changes):
    """The members of a sound file, some replaced: by an array, by bytes; or ``about`` changed."""
    t = random_trace()
    about = {"moelab_trace": 1, "num_experts": E, "model": "", "seed": None, "prompt": ""}
    about |= changes.pop("about", {})
    arrays = {
        "experts": t.experts.astype(np.uint8),
        "decode": t.phase == "decode",
        "tokens": t.tokens.astype(np.int32),
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
    }
    return arrays | changes


def write(path, arrays):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, a in arrays.items():
            data = io.BytesIO()
            if isinstance(a, bytes):
                data.write(a)
            else:
                np.lib.format.write_array(data, a, allow_pickle=True)
            z.writestr(f"{name}.npy", data.getvalue())


def npy(shape, descr="|u1", rest=b""):
    """A member with any header."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + rest


EXPERTS = random_trace().experts
STRANGE = {
    "negative experts": {
        "experts": np.where(EXPERTS[0, 0, 0] == EXPERTS, -1, EXPERTS.astype(np.int64))
    },
    "experts beyond E": {"experts": EXPERTS.astype(np.int64) + E},
    "experts as fractions": {"experts": EXPERTS.astype(np.float32)},
    "experts of rank 2": {"experts": EXPERTS[0]},
    "experts of 2**80 bytes": {"experts": npy(f"({2**40}, {2**40}, 1)")},
    "a header that is no Python": {"experts": npy("((((")},
    "decode of another length": {"decode": np.zeros(12, bool)},
    "tokens of another length": {"tokens": np.zeros(10, np.int32)},
    "about nests": {"about_": b"[" * 100_000},
    "num_experts as text": {"about": {"num_experts": "64"}},
    "model is not text": {"about": {"model": None}},
    "a key of its own": {"about": {"self": 1}},
    "a member of its own": {"more": np.zeros(3)},
}


@pytest.mark.parametrize("strange", STRANGE)
def test_a_strangers_trace_is_refused(strange, tmp_path):
    file, changes = tmp_path / "strange.npz", dict(STRANGE[strange])
    write(file, members())
    assert len(Trace.load(file)) == 11
    if "about_" in changes:
        arrays = members() | {"about": np.frombuffer(changes["about_"], np.uint8)}
    else:
        arrays = members(**changes)
    write(file, arrays)
    with pytest.raises(TraceError) as caught:
        Trace.load(file)
    assert str(file) in str(caught.value) and len(str(caught.value)) < 1000


def test_a_small_file_that_unpacks_to_gigabytes(tmp_path):
    """It is refused before it is unpacked, in less memory than that."""
    file = tmp_path / "bomb.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as z:
        for name, a in members().items():
            with z.open(f"{name}.npy", "w", force_zip64=True) as f:
                if name == "experts":
                    f.write(npy("(4000000000, 1, 1)"))
                    for _ in range(2000):
                        f.write(bytes(2_000_000))
                else:
                    np.lib.format.write_array(f, a)
    assert file.stat().st_size < 5_000_000
    code = "import sys, resource, moelab\n"
    code += "try: moelab.Trace.load(sys.argv[1])\nexcept ValueError as e: print(e)\n"
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    process = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
    )
    message, used = process.stdout.splitlines()
    used = int(used) * (1 if sys.platform == "darwin" else 1024)
    assert str(file) in message and "unpacks to 4000000128 bytes" in message
    assert used < 2 << 30


def test_a_fifo_is_no_trace(tmp_path):
    os.mkfifo(tmp_path / "trace.npz")
    code = "import sys, moelab; moelab.Trace.load(sys.argv[1])"
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "trace.npz")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "TraceError" in process.stderr and "expected a file" in process.stderr


def test_phases_apart():
    t = random_trace(6, 5)
    assert len(t.prefill) == 6 and len(t.decode) == 5 and len(t) == 11
    np.testing.assert_array_equal(t.decode.experts, t.experts[6:])
    assert t.decode.num_experts == E and t.decode.model == "made up"


@pytest.mark.parametrize("mode", ("resident", "serial", "buffers", "stacked", "fused"))
def test_a_routed_model_runs_the_trace(random_tiny_moe, mode):
    trace = random_trace(6, 5)
    model, _ = load_model(random_tiny_moe, moelab.StreamConfig(mode=mode, slots=K))
    before = run(model)
    with (
        moelab.record(model),
        route_by(model, trace),
        pytest.raises(ValueError, match="recorded already"),
        moelab.record(model),
    ):
        pass
    with route_by(model, trace), moelab.record(model) as seen:
        after = run(model, steps=7)
    # four prompt rows of six, seven decoded rows of five: the trace starts over
    want = np.concatenate(
        [trace.prefill.experts[:4], trace.decode.experts, trace.decode.experts[:2]]
    )
    np.testing.assert_array_equal(seen.experts, want)
    assert list(seen.phase) == ["prefill"] * 4 + ["decode"] * 7
    assert np.abs(after - before).max() > 1e-3  # other experts were computed
    np.testing.assert_array_equal(run(model), before)  # nothing is left of the trace
    assert not [m for m in model.modules() if hasattr(m, "_hooks")]
    if mode != "resident":
        with route_by(model, trace):
            moelab.stats(model, reset=True)
            run(model)
        stats = moelab.stats(model)
        assert stats.decode.hits + stats.decode.misses == 7 * L * K
    moelab.close(model)


@pytest.mark.parametrize("mode", ("resident", "serial", "fused"))
def test_a_pass_that_fails_keeps_its_error_and_the_calls_before_it(
    random_tiny_moe, mode, monkeypatch
):
    """The recorder gets half of the last call's layers and must not raise an error of its own."""
    model, _ = load_model(random_tiny_moe, moelab.StreamConfig(mode=mode, slots=K))
    block = [m for m in model.modules() if "gate" in m and "switch_mlp" in m][3]
    real, calls_left = type(block).__call__, None

    def failing(self, x):
        nonlocal calls_left
        if self is block and calls_left is not None:
            calls_left -= 1
            if calls_left < 0:
                raise OSError("the disk is on fire")
        return real(self, x)

    monkeypatch.setattr(type(block), "__call__", failing)
    with model:
        with moelab.record(model) as whole:
            run(model, steps=2)
        calls_left = 0
        with pytest.raises(OSError, match="on fire"), moelab.record(model) as seen:
            run(model)
        assert seen.experts.shape == (0, L, K)
        calls_left = 3
        with pytest.raises(OSError, match="on fire"), moelab.record(model) as seen:
            run(model)
        same(seen, whole)
        with moelab.record(model) as seen:  # a failed call whose error is caught is left out, too
            calls_left = 0
            with pytest.raises(OSError, match="on fire"):
                run(model)
            calls_left = None
            run(model, steps=2)
        same(seen, whole)


def test_recorded_around_routed_is_the_trace_too(random_tiny_moe):
    trace = random_trace(6, 5)
    for mode in ("resident", "fused"):
        model, _ = load_model(random_tiny_moe, moelab.StreamConfig(mode=mode, slots=K))
        with moelab.record(model) as seen, route_by(model, trace):
            run(model, steps=3)
        np.testing.assert_array_equal(seen.decode.experts, trace.decode.experts[:3])
        moelab.close(model)


def test_a_phase_that_the_trace_lacks_takes_the_others_rows(random_tiny_moe):
    model, _ = load_model(random_tiny_moe, moelab.StreamConfig(slots=K))
    trace = random_trace(0, 5)
    with model, route_by(model, trace), moelab.record(model) as seen:
        run(model, steps=2)
    np.testing.assert_array_equal(
        seen.experts, np.concatenate([trace.experts[:4], trace.experts[:2]])
    )


@pytest.mark.parametrize("wrong", ({"L": L + 1}, {"E": E - 1}, {"K": K - 1}))
def test_a_trace_of_another_shape_is_refused(random_tiny_moe, wrong):
    model, _ = load_model(random_tiny_moe, moelab.StreamConfig(slots=K))
    (name, value), own = *wrong.items(), {"L": L, "E": E, "K": K}
    with model:
        with (
            pytest.raises(
                TraceError, match=rf"{name} \(.*\) {own[name]} of the model, {value} of the trace"
            ),
            route_by(model, random_trace(**wrong)),
        ):
            pass
        with pytest.raises(TraceError, match="no tokens"), route_by(model, random_trace()[:0]):
            pass
        assert not [m for m in model.modules() if hasattr(m, "_hooks")]


def test_nothing_is_left_after_an_error(random_tiny_moe):
    model, _ = load_model(random_tiny_moe, moelab.StreamConfig(slots=K))
    with model:
        before = run(model, 2)
        with pytest.raises(ValueError, match="batch of 1, got 2"), route_by(model, random_trace()):
            mx.eval(model(mx.array([[1], [2]])))
        np.testing.assert_array_equal(run(model, 2), before)
    with pytest.raises(ValueError, match="from moelab.load"), route_by(object(), random_trace()):
        pass


def test_routed_waits_for_the_router(random_tiny_moe):
    """A model waits for its router in every layer, and it must do so with a trace, too."""
    model, _ = load_model(random_tiny_moe, moelab.StreamConfig(mode="resident"))
    experts, chosen, graph = model.layers[0].mlp.switch_mlp, [], io.StringIO()
    router = mx.array(np.arange(K, dtype=np.uint32)).reshape(1, 1, K)

    def keep(original, x, indices):
        chosen.append(indices)

    with route_by(model, random_trace(0, 3)), hooked(experts, keep, innermost=True):
        experts(mx.zeros((1, 1, 1)), router)
    mx.export_to_dot(graph, chosen[0])
    assert "Depends" in graph.getvalue()
