"""The CUDA kernel of the gated delta rule: rollback uses its states, and it is mlx-lm's loop."""

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops
from recurrent import ROUNDS, TOLERANCE, build, ids, play, start

from moelab.speculation import gated_delta_cuda


def loop(q, k, v, g, beta, state, mask=None, every=False):
    """What the kernel does, by mlx-lm's loop."""
    ys, states = [], []
    for t in range(q.shape[1]):
        y, state = gated_delta_ops(*(x[:, t : t + 1] for x in (q, k, v, g, beta)), state)
        ys.append(y)
        states.append(state)
    return mx.concatenate(ys, axis=1), mx.stack(states) if every else state


@pytest.mark.parametrize("strategy", ["restore", "replay", "states"])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "kimi_linear", "olmo_hybrid"])
def test_rollback_takes_its_states(name, strategy, monkeypatch):
    asked = []

    def kernel(*args, every=False):
        asked.append(every)
        return loop(*args, every=every)

    model = build(name)
    prompt = ids(3, 5)
    cache, reference = start(model, prompt), start(model, prompt)
    monkeypatch.setattr(gated_delta_cuda, "fits", lambda mask=None, **_: mask is None)
    monkeypatch.setattr(gated_delta_cuda, "gated_delta", kernel)
    assert play(model, cache, reference, ROUNDS, strategy) <= TOLERANCE
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
