"""Rollback: every cache equals that of decoding only the accepted tokens (``play``)."""

import copy
import importlib
from pathlib import Path

import mlx.core as mx
import pytest
from common import loaded, tries, watched
from drafting import DENSE, V, build, difference, ids, trained
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as caching
from mlx_lm.models.gated_delta import gated_delta_ops

import moelab
from moelab.hooks import hooked
from moelab.lab.experiments.rollback import RestoreOnly
from moelab.speculation import gated_delta_cuda, rollback
from moelab.speculation.rollback import Rollback

TOLERANCE = 1e-5
# Without Phase.shrink, which takes minutes.
FEW = tries(40, derandomize=True, phases=(Phase.explicit, Phase.generate))
WITH_EXPERTS = ["bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "granitemoehybrid"]
WITH_EXPERTS += ["jamba", "kimi_k3", "kimi_linear", "lfm2_moe", "longcat_flash_ngram"]
WITH_EXPERTS += ["nemotron_h", "qwen3_5_moe", "qwen3_next"]
ONLY_RESTORED = {"longcat_flash_ngram", "recurrent_gemma", "rwkv7", "baichuan_m1"}
ROUNDS = [(6, 3), (6, 6), (4, 1), (9, 8), (1, 1), (3, 0), (1, 0), (16, 2), (2, 1)]


def one_by_one(model, cache, tokens):
    """Decode tokens [B, T], each in a pass of its own."""
    for t in range(tokens.shape[1]):
        mx.eval(model(tokens[:, t : t + 1], cache=cache))


def play(model, caches, rounds, strategy="auto", seed=0, batch=1, vocab=V):
    """Assert that rounds of (tokens read, tokens kept) leave the same caches as plain decoding."""
    cache, reference = caches
    r = Rollback(model, cache, strategy)
    tokens, i = ids(seed, sum(m for m, _ in rounds), batch, vocab), 0
    for m, keep in rounds:
        mx.eval(r(tokens[:, i : i + m]))
        r.undo(m - keep)
        r.commit()
        one_by_one(model, reference, tokens[:, i : i + keep])
        i += keep
        assert difference(cache, reference) <= TOLERANCE


def start(model, prompt):
    """A cache that has read a prompt [B, T]."""
    cache = caching.make_prompt_cache(model)
    if prompt.shape[1]:
        mx.eval(model(prompt, cache=cache))
    return cache


def pair(model, prompt):
    """Two caches that have read a prompt."""
    return start(model, prompt), start(model, prompt)


@pytest.mark.parametrize("strategy", ["restore", "replay", "states", "auto"])
@pytest.mark.parametrize("name", [*WITH_EXPERTS, *DENSE])
def test_every_recurrent_family(name, strategy):
    model = build(name)
    prompt = ids(1, 5)
    if name in ONLY_RESTORED and strategy in ("replay", "states"):
        with pytest.raises(ValueError, match=f"'{strategy}' is not known for every .*{name}"):
            Rollback(model, start(model, prompt), strategy)(ids(2, 3))
        return
    play(model, pair(model, prompt), ROUNDS, strategy)


def test_no_recurrent_family_is_forgotten():
    folder = Path(importlib.import_module("mlx_lm.models").__path__[0])
    using = {p.stem for p in folder.glob("*.py") if "ArraysCache(" in p.read_text()} - {"cache"}
    inherit = {"qwen3_5", "kimi_k3"}  # qwen3_5 is tested as qwen3_5_moe, kimi_k3 as itself
    assert using - inherit <= {*WITH_EXPERTS, *DENSE}


a_round = st.integers(1, 9).flatmap(lambda m: st.tuples(st.just(m), st.integers(0, m)))
splits = st.lists(a_round, min_size=1, max_size=4)
names = st.sampled_from(["qwen3_5_moe", "qwen3_next", "nemotron_h", "mamba", "falcon_h1"])
strategies = st.sampled_from(["restore", "replay", "states"])


@FEW
@given(names, strategies, st.integers(0, 12), splits, st.integers(1, 3))
def test_any_splits(name, strategy, prompt, rounds, batch):
    model = build(name)
    caches = pair(model, ids(3, prompt, batch))
    play(model, caches, rounds, strategy, len(rounds), batch)


@settings(FEW, max_examples=8)
@given(strategies, st.integers(1, 40), splits, st.integers(1, 3))
@example("replay", 5, [(9, 5)], 2)
@example("states", 5, [(2, 1)], 3)
def test_any_splits_of_the_trained_model(strategy, prompt, rounds, batch):
    """Token ids are random, but states are those of a trained model, on the fast kernels."""
    caches = pair(trained(), ids(prompt, prompt, batch, vocab=8192))
    play(trained(), caches, rounds, strategy, 5, batch, vocab=8192)


@FEW
@given(st.integers(2, 12), st.integers(0, 30), splits, st.booleans())
def test_a_window_that_has_wrapped(size, prompt, rounds, together):
    """A full ``RotatingKVCache`` overwrites its oldest tokens; rollback restores them."""
    model, prompt = build("qwen3_moe"), ids(4, prompt)
    caches = [[caching.RotatingKVCache(size) for _ in model.layers] for _ in range(2)]
    for c in caches:
        one_by_one(model, c, prompt)
    if together:  # several passes before one undo
        r, tokens = Rollback(model, caches[0]), ids(5, sum(m for m, _ in rounds))
        i = 0
        for m, _ in rounds:
            mx.eval(r(tokens[:, i : i + m]))
            i += m
        stay = rounds[0][1]
        r.undo(i - stay)
        one_by_one(model, caches[1], tokens[:, :stay])
        assert difference(*caches) <= TOLERANCE
        rounds = rounds[1:]
    play(model, caches, rounds)
    play(model, caches, [(1, 1), (1, 1), (3, 3)], seed=7)


@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "gemma4_text", "deepseek_v32"])
def test_the_families_own_windows_and_chunks(name):
    play(build(name), pair(build(name), ids(1, 11)), ROUNDS)


@FEW
@given(st.integers(1, 9), splits)
def test_quantized_keys_and_values(prompt, rounds):
    model, prompt = build("qwen3_5_moe", head_dim=32), ids(6, prompt)  # 32: the smallest group
    caches = pair(model, prompt)
    form = {"group_size": 32, "bits": 8}
    for c in caches:
        c[:] = [x.to_quantized(**form) if hasattr(x, "to_quantized") else x for x in c]
    assert any(isinstance(x, caching.QuantizedKVCache) for x in caches[0])
    play(model, caches, rounds)


@pytest.mark.parametrize("strategy", ["restore", "replay", "states"])
def test_a_batch_with_left_padding(strategy):
    model = build("qwen3_5_moe")
    caches = []
    for _ in range(2):
        rows = [start(model, ids(i, n)) for i, n in enumerate((5, 9))]
        caches.append([layer[0].merge(list(layer)) for layer in zip(*rows)])
    play(model, caches, [(4, 2), (3, 3), (5, 0), (6, 1)], strategy, batch=2)

    padded = []
    for _ in range(2):
        fresh = caching.make_prompt_cache(model)
        for i, c in enumerate(fresh):
            if isinstance(c, caching.ArraysCache):
                fresh[i] = caching.ArraysCache(2, left_padding=[3, 0])
            else:
                fresh[i] = both = type(c).merge([c, c])
                both.left_padding, both.offset = mx.array([3, 0]), mx.array([-3, 0])
        padded.append(fresh)
    play(model, padded, [(8, 2), (5, 4), (3, 1), (4, 4)], strategy, batch=2)
    assert padded[0][0].left_padding.tolist() == padded[1][0].left_padding.tolist()


def test_undo_reaches_over_passes():
    model = build("qwen3_5_moe")
    for strategy in ("restore", "replay", "states"):
        for stay in range(10):
            (cache, reference), tokens = pair(model, ids(1, 4)), ids(2, 9)
            r = Rollback(model, cache, strategy)
            for a, b in ((0, 3), (3, 4), (4, 9)):
                r(tokens[:, a:b])
            assert r.undoable == 9 and (strategy == "restore" or r.nbytes > 0)
            more = min(2, 9 - stay)
            r.undo(9 - stay - more)
            r.undo(more)  # in two steps, with the same result
            one_by_one(model, reference, tokens[:, :stay])
            assert r.undoable == stay and difference(cache, reference) <= TOLERANCE
            with pytest.raises(ValueError, match=rf"undo\({stay + 1}\), .* from 0 to {stay}"):
                r.undo(stay + 1)
            r.commit()
            assert r.undoable == r.nbytes == 0


def test_restoring_without_the_accepted_tokens_drifts():
    """The negative control restores the state, as SwiftLM does, and reads no token again."""
    prompt, tokens = ids(1, 20, vocab=8192), ids(2, 8, vocab=8192)
    cache, reference = pair(trained(), prompt)
    faulty = RestoreOnly(trained(), cache)
    faulty(tokens)
    faulty.undo(3)
    one_by_one(trained(), reference, tokens[:, :5])
    assert difference(cache, reference) > 1e-2


def test_one_model_does_not_see_the_other():
    """A recorded pass changes no module of mlx-lm and no other model, and leaves nothing behind."""
    model, other = build("qwen3_5_moe"), copy.deepcopy(build("qwen3_5_moe"))
    kinds, own = [type(m) for _, m in model.named_modules()], type(model.layers[0].linear_attn)
    names = ("qwen3_5", "qwen3_next", "gated_delta")
    modules = [importlib.import_module(f"mlx_lm.models.{n}") for n in names]
    functions = [dict(vars(m)) for m in modules]
    during = {}

    def spy(original, x):
        during["functions"] = [dict(vars(m)) for m in modules]
        during["other"] = [type(m) for _, m in other.named_modules()]
        during["own"] = type(model.layers[0].linear_attn)
        if during.get("fail"):
            raise RuntimeError("in the middle of a pass")
        return original(x)

    cache, reference = pair(model, ids(1, 4))
    with hooked(model.layers[-1].mlp, spy):
        r = Rollback(model, cache, "replay")
        r(ids(2, 3))
        assert during["own"] is not own and during["own"] is not type(other.layers[0].linear_attn)
        assert during["functions"] == functions
        assert during["other"] == [type(m) for _, m in other.named_modules()] == kinds
        r.undo(3)
        during["fail"] = True
        with pytest.raises(RuntimeError, match="middle"):
            r(ids(2, 3))
    assert [type(m) for _, m in model.named_modules()] == kinds
    assert [dict(vars(m)) for m in modules] == functions
    assert r.undoable == 0 and difference(cache, reference) == 0, "caches are as they were"


def test_hooks_of_others_are_called_in_a_recorded_pass():
    """A hook is called if set before the ``Rollback`` or between the ``Rollback`` and the pass."""
    model, calls = build("qwen3_5_moe"), []
    layer = model.layers[0].linear_attn
    own = type(layer)

    def count(original, *args, **kwargs):
        calls.append(original)
        return original(*args, **kwargs)

    prompt, tokens = ids(1, 4), ids(2, 5)
    with hooked(layer, count):
        r = Rollback(model, start(model, prompt), "states")
        calls.clear()
        with hooked(layer, count):
            r(tokens)
    assert len(calls) == 2 and type(layer) is own
    reference = start(model, prompt)
    one_by_one(model, reference, tokens[:, :2])
    r.undo(3)
    assert difference(r.cache, reference) <= TOLERANCE


def test_streamed(hybrid):
    with loaded(hybrid, mode="fused", slots=4) as model:
        for strategy in ("restore", "replay", "states"):
            play(model, pair(model, ids(1, 6)), ROUNDS, strategy)
        before = moelab.stats(model).prefill.calls
        r = Rollback(model, start(model, ids(1, 6)), "auto")
        r(ids(2, 6))
        calls = moelab.stats(model).prefill.calls
        r.undo(3)
        mx.eval([c.state for c in r.cache])
        assert before < calls == moelab.stats(model).prefill.calls, "nothing is routed again"


def test_bad_input():
    model = build("qwen3_5_moe")
    with pytest.raises(ValueError, match="strategy 'undo', expected one of auto, restore"):
        Rollback(model, caching.make_prompt_cache(model), "undo")
    window = build("qwen3_moe")
    batched = [caching.BatchRotatingKVCache(4, [0, 0]) for _ in window.layers]
    with pytest.raises(ValueError, match="BatchRotatingKVCache of 5 tokens cannot be rolled"):
        Rollback(window, batched)(ids(1, 5, 2))
    one_by_one(window, batched, ids(1, 6, 2))
    with pytest.raises(ValueError, match="BatchRotatingKVCache of 6 tokens cannot be rolled back"):
        Rollback(window, batched)
    with pytest.raises(ValueError, match=r"RotatingKVCache with keep=4 .* max_kv_size"):
        Rollback(window, caching.make_prompt_cache(window, max_kv_size=8))
    own = build("deepseek_v41")
    with pytest.raises(ValueError, match="LayerCache of 0 tokens cannot be rolled back"):
        Rollback(own, caching.make_prompt_cache(own))
    for n in (-1, 1, 0.5):
        with pytest.raises(ValueError, match=r"expected a number from 0 to 0"):
            Rollback(model, caching.make_prompt_cache(model)).undo(n)


def test_auto_keeps_states_while_they_are_small(monkeypatch):
    if mx.metal.is_available() and mx.default_device() == mx.gpu:
        pytest.skip("on Metal auto replays")
    model = build("qwen3_5_moe")

    def held():
        r = Rollback(model, start(model, ids(1, 4)))
        r(ids(2, 8))
        return r.nbytes

    states_nbytes = held()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert held() == states_nbytes, "a Mac may compute on its CPU"
    monkeypatch.setattr(rollback, "STATES_NBYTES", 1000)
    assert held() < states_nbytes / 2, "inputs take less"


# The CUDA kernel of the gated delta rule. ``Rollback`` uses its states.


def loop(q, k, v, g, beta, state, mask=None, every=False):
    """Compute the kernel's results with mlx-lm's loop."""
    ys, states = [], []
    for t in range(q.shape[1]):
        y, state = gated_delta_ops(*(x[:, t : t + 1] for x in (q, k, v, g, beta)), state)
        ys.append(y)
        states.append(state)
    return mx.concatenate(ys, axis=1), mx.stack(states) if every else state


@pytest.mark.parametrize("strategy", ["restore", "replay", "states"])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "kimi_linear", "olmo_hybrid"])
def test_rollback_takes_its_states(name, strategy, monkeypatch):
    monkeypatch.setattr(gated_delta_cuda, "fits", lambda mask=None, **_: mask is None)
    monkeypatch.setattr(gated_delta_cuda, "gated_delta", loop)
    asked = watched(monkeypatch, gated_delta_cuda, "gated_delta", lambda *_, every=False: every)
    play(build(name), pair(build(name), ids(3, 5)), ROUNDS, strategy)
    assert set(asked) == {"restore": set(), "replay": {False}, "states": {True}}[strategy]


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(
    "B, T, Hk, Hv, Dk, Dv", [(1, 17, 4, 8, 64, 64), (2, 5, 2, 2, 128, 128), (1, 1, 1, 3, 32, 6)]
)
def test_the_kernel_is_the_loop(B, T, Hk, Hv, Dk, Dv, vector, dtype):
    mx.random.seed(0)
    q, k = (mx.random.normal((B, T, Hk, Dk)).astype(dtype) / Dk**0.5 for _ in range(2))
    v = mx.random.normal((B, T, Hv, Dv)).astype(dtype)
    g = mx.random.uniform(0.5, 1.0, (B, T, Hv, *[Dk] * vector))
    beta = mx.random.uniform(shape=(B, T, Hv)).astype(dtype)
    state = mx.random.normal((B, Hv, Dv, Dk))
    functions = loop, gated_delta_cuda.gated_delta
    a, b = (f(q, k, v, g, beta, state, every=True) for f in functions)
    assert mx.abs(a[1] - b[1]).max().item() <= 1e-5
    assert mx.abs(a[0] - b[0]).max().item() <= (1e-5 if dtype == mx.float32 else 0.02)
    last = gated_delta_cuda.gated_delta(q, k, v, g, beta, state)
    assert mx.array_equal(last[1], b[1][-1]) and mx.array_equal(last[0], b[0])
