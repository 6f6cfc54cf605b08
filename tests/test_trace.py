"""Traces: kept exactly, and put in a router's place."""

import io

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab.lab.trace import Trace, TraceError, driven
from moelab.recipes import tiny_moe
from moelab.streaming.model import load_model

L, E, K = 8, 64, 8
PROMPT = mx.array([[5, 9, 2, 7]])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("random")
    tiny_moe.random_model(path)
    return path


def random_trace(prefill=6, decode=5, seed=0, L=L, E=E, K=K):
    rng = np.random.default_rng(seed)
    T = prefill + decode
    experts = rng.permuted(np.broadcast_to(np.arange(E, dtype=np.uint16), (T, L, E)), axis=-1)[..., :K]
    phase = np.repeat(("prefill", "decode"), (prefill, decode))
    return Trace(experts.copy(), phase, rng.integers(0, 4096, T), E, "made up", seed, "def f():\n\té")


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
    whole = tmp_path / "whole.npz"
    random_trace().save(whole)
    data = whole.read_bytes()
    bad = tmp_path / "bad.npz"
    contents = [b"", b"not a trace", data[: len(data) // 2], data[:-30]]
    rng = np.random.default_rng(0)
    for _ in range(40):  # one byte changed in a member's data
        at = int(rng.integers(60, len(data) - 400))
        contents.append(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
    refused = 0
    for content in contents:
        bad.write_bytes(content)
        try:
            same(Trace.load(bad), Trace.load(whole))  # a byte that says nothing, such as a time
        except TraceError as e:
            refused += 1
            assert str(bad) in str(e) and "expected a trace" in str(e)
    assert refused >= len(contents) - 8
    np.savez(bad, experts=np.zeros((2, 2, 2)))
    with pytest.raises(TraceError, match="bad.npz"):
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


def test_phases_apart():
    t = random_trace(6, 5)
    assert len(t.prefill) == 6 and len(t.decode) == 5 and len(t) == 11
    np.testing.assert_array_equal(t.decode.experts, t.experts[6:])
    assert t.decode.num_experts == E and t.decode.model == "made up"


@pytest.mark.parametrize("mode", ("resident", "serial", "buffers", "stacked", "fused"))
def test_a_driven_model_runs_the_trace(path, mode):
    trace = random_trace(6, 5)
    model, _ = load_model(path, moelab.StreamConfig(mode=mode, slots=K))
    before = run(model)
    with moelab.record(model) as seen, driven(model, trace):
        with pytest.raises(ValueError, match="recorded already"), moelab.record(model):
            pass
    with driven(model, trace), moelab.record(model) as seen:
        after = run(model, steps=7)
    # four prompt rows of six, seven decoded rows of five: the trace starts over
    want = np.concatenate([trace.prefill.experts[:4], trace.decode.experts, trace.decode.experts[:2]])
    np.testing.assert_array_equal(seen.experts, want)
    assert list(seen.phase) == ["prefill"] * 4 + ["decode"] * 7
    assert np.abs(after - before).max() > 1e-3  # its experts did compute
    np.testing.assert_array_equal(run(model), before)  # and nothing is left
    assert not [m for m in model.modules() if hasattr(m, "_taps")]
    if mode != "resident":
        with driven(model, trace):
            moelab.stats(model, reset=True)
            run(model)
        stats = moelab.stats(model)
        assert stats.decode.hits + stats.decode.misses == 7 * L * K
    moelab.close(model)


@pytest.mark.parametrize("mode", ("resident", "serial", "fused"))
def test_a_pass_that_fails_keeps_its_error_and_the_calls_before_it(path, mode, monkeypatch):
    """The recorder was handed half of the layers of the last call, and raised in place of the error."""
    model, _ = load_model(path, moelab.StreamConfig(mode=mode, slots=K))
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
        with moelab.record(model) as seen:  # a call that the caller survives is left out, too
            calls_left = 0
            with pytest.raises(OSError, match="on fire"):
                run(model)
            calls_left = None
            run(model, steps=2)
        same(seen, whole)


def test_streamed_and_resident_write_the_same_when_driven(path):
    trace, out = random_trace(6, 5), []
    for mode in ("resident", "fused"):
        model, _ = load_model(path, moelab.StreamConfig(mode=mode, slots=K))
        with driven(model, trace):
            out.append(run(model))
        moelab.close(model)
    np.testing.assert_array_equal(out[0][1:].argmax(1), out[1][1:].argmax(1))
    np.testing.assert_allclose(out[0], out[1], atol=1e-4, rtol=1e-4)


def test_recorded_around_driven_is_the_trace_too(path):
    trace = random_trace(6, 5)
    for mode in ("resident", "fused"):
        model, _ = load_model(path, moelab.StreamConfig(mode=mode, slots=K))
        with moelab.record(model) as seen, driven(model, trace):
            run(model, steps=3)
        np.testing.assert_array_equal(seen.decode.experts, trace.decode.experts[:3])
        moelab.close(model)


def test_a_phase_that_the_trace_lacks_takes_the_others_rows(path):
    model, _ = load_model(path, moelab.StreamConfig(slots=K))
    trace = random_trace(0, 5)
    with model, driven(model, trace), moelab.record(model) as seen:
        run(model, steps=2)
    np.testing.assert_array_equal(seen.experts, np.concatenate([trace.experts[:4], trace.experts[:2]]))


@pytest.mark.parametrize("wrong", ({"L": L + 1}, {"E": E - 1}, {"K": K - 1}))
def test_a_trace_of_another_shape_is_refused(path, wrong):
    model, _ = load_model(path, moelab.StreamConfig(slots=K))
    (name, value), own = *wrong.items(), {"L": L, "E": E, "K": K}
    with model:
        with pytest.raises(TraceError, match=rf"{name} \(.*\) {own[name]} of the model, {value} of the trace"):
            with driven(model, random_trace(**wrong)):
                pass
        with pytest.raises(TraceError, match="no tokens"):
            with driven(model, random_trace()[:0]):
                pass
        assert not [m for m in model.modules() if hasattr(m, "_taps")]


def test_nothing_is_left_after_an_error(path):
    model, _ = load_model(path, moelab.StreamConfig(slots=K))
    with model:
        before = run(model, 2)
        with pytest.raises(ValueError, match="batch of 1, got 2"), driven(model, random_trace()):
            mx.eval(model(mx.array([[1], [2]])))
        np.testing.assert_array_equal(run(model, 2), before)
    with pytest.raises(ValueError, match="from moelab.load"), driven(object(), random_trace()):
        pass


def test_driven_waits_for_the_router(path):
    """Else a driven model would skip what a real one waits for in every layer."""
    model, _ = load_model(path, moelab.StreamConfig(mode="resident"))
    with driven(model, random_trace(0, 3)):
        router = mx.array(np.arange(K, dtype=np.uint32)).reshape(1, 1, K)
        graph = io.StringIO()
        mx.export_to_dot(graph, model.layers[0].mlp.switch_mlp._taps.each[0](router))
    assert "Depends" in graph.getvalue()
