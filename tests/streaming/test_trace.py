"""Traces: what is recorded and saved, and a trace in a router's place."""

import io
import itertools
import os
import zipfile

import mlx.core as mx
import numpy as np
import pytest
from common import loaded
from families import E, K
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab.hooks import hooked
from moelab.lab.decode import route_by
from moelab.streaming.trace import MEMBERS, Trace, TraceError

L = 2
PROMPT = mx.array([[5, 9, 2, 7]])


def random_trace(prefill=6, decode=5, seed=0, E=E, K=K):
    rng, T = np.random.default_rng(seed), prefill + decode
    every = rng.permuted(np.broadcast_to(np.arange(E, dtype=np.uint16), (T, L, E)), axis=-1)
    phase, tokens = np.repeat(("prefill", "decode"), (prefill, decode)), rng.integers(0, 4096, T)
    return Trace(every[..., :K].copy(), phase, tokens, E, "made up", seed, "def f():\n\té")


def run(model, steps=7):
    calls, cache = [PROMPT, *mx.arange(3, 3 + steps).reshape(-1, 1, 1)], make_prompt_cache(model)
    return np.stack([np.array(model(tokens, cache=cache)[0, -1]) for tokens in calls])


def same(a, b):
    for field in ("experts", "phase", "tokens"):
        x, y = getattr(a, field), getattr(b, field)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    assert (a.num_experts, a.model, a.seed, a.prompt) == (b.num_experts, b.model, b.seed, b.prompt)


@pytest.mark.parametrize("trace", (random_trace(E=256), random_trace(E=300), random_trace()[:0]))
def test_a_file_gives_the_trace_back(tmp_path, trace):
    """``test_bad_input.py`` damages such files."""
    trace.save(tmp_path / "a.npz")
    same(Trace.load(tmp_path / "a.npz"), trace)
    same(trace.decode, trace[len(trace.prefill) :])
    first = (tmp_path / "a.npz").read_bytes()
    Trace.load(tmp_path / "a.npz").save(tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none.npz")


def test_what_is_no_trace(tmp_path, in_time, monkeypatch):
    """A trace that contradicts itself, a FIFO and a file that unpacks to gigabytes are refused."""
    t = random_trace()
    for args, said in (
        ((t.experts[0], t.phase, t.tokens), r"expected \[T, L, K\]"),
        ((t.experts, t.phase[1:], t.tokens), "expected 11 phases"),
        ((t.experts, t.phase, t.tokens, 5), f"expected at least {E}"),
        ((np.full((1, 1, 1), -1), t.phase[:1], t.tokens[:1]), "expected 0 or more, got -1"),
    ):
        with pytest.raises(TraceError, match=said):
            Trace(*args)
    os.mkfifo(tmp_path / "fifo.npz")
    t.save(tmp_path / "bomb.npz")
    monkeypatch.setitem(MEMBERS, "experts.npy", (100, "iu", 3))
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("unpacked"))
    for name, said in ("fifo", "expected a file"), ("bomb", "experts.npy unpacks to .* bytes"):
        with pytest.raises(TraceError, match=said):
            Trace.load(tmp_path / f"{name}.npz")


@pytest.mark.parametrize("mode", ("resident", "serial", "buffers", "stacked", "fused"))
def test_a_routed_model_runs_the_trace(moe, mode):
    trace = random_trace(4, 7)
    model = loaded(moe, mode=mode, slots=K)
    before = run(model)
    with (
        moelab.record(model),
        route_by(model, []),
        pytest.raises(ValueError, match="recorded already"),
        moelab.record(model),
    ):
        pass
    calls = [trace.prefill.experts, *trace.decode.experts[:, None]]
    with route_by(model, calls), moelab.record(model) as seen:
        after = run(model, steps=7)
    np.testing.assert_array_equal(seen.experts, trace.experts)
    with moelab.record(model) as around, route_by(model, calls):
        run(model, steps=2)
    np.testing.assert_array_equal(around.experts, trace.experts[:6])
    assert list(seen.phase) == ["prefill"] * 4 + ["decode"] * 7
    assert list(seen.tokens) == [*PROMPT[0].tolist(), *range(3, 10)]
    assert np.abs(after - before).max() > 1e-3  # other experts were computed
    wrong = random_trace(K=K - 1).experts[None]
    with pytest.raises(ValueError, match="reshape"), route_by(model, wrong):
        mx.eval(model(mx.array([[1]])))
    np.testing.assert_array_equal(run(model), before)  # nothing is left of either trace
    moelab.close(model)


@pytest.mark.parametrize("mode", ("resident", "serial", "fused"))
def test_a_pass_that_fails_keeps_its_error_and_the_calls_before_it(moe, mode, monkeypatch):
    """The recorder gets half of the last call's layers and must not raise an error of its own."""
    model = loaded(moe, mode=mode, slots=K)
    block = [m for m in model.modules() if "gate" in m and "switch_mlp" in m][1]
    real, fails = type(block).__call__, itertools.repeat(False)

    def failing(self, x):
        if self is block and next(fails):
            raise OSError("the disk is on fire")
        return real(self, x)

    monkeypatch.setattr(type(block), "__call__", failing)
    with moelab.record(model) as whole:
        run(model, steps=2)
    for calls in (0, 3):
        fails = iter([*[False] * calls, True])
        with pytest.raises(OSError, match="on fire"), moelab.record(model) as seen:
            run(model)
        assert len(seen) == (len(whole) if calls else 0)
        np.testing.assert_array_equal(seen.experts, whole.experts[: len(seen)])
    fails = itertools.chain([True], itertools.repeat(False))
    with moelab.record(model) as seen:  # a failed call whose error is caught is left out, too
        with pytest.raises(OSError, match="on fire"):
            run(model)
        run(model, steps=2)
    same(seen, whole)


def test_routed_waits_for_the_router(moe):
    model = loaded(moe, mode="resident")
    experts, chosen, graph = model.layers[0].mlp.switch_mlp, [], io.StringIO()
    router = mx.arange(K, dtype=mx.uint32).reshape(1, 1, K)
    with (
        route_by(model, random_trace(0, 1).experts[None]),
        hooked(experts, lambda _, x, indices: chosen.append(indices), innermost=True),
    ):
        experts(mx.zeros((1, 1, 1)), router)
    mx.export_to_dot(graph, chosen[0])
    assert "Depends" in graph.getvalue()
