"""The recurrence's kernel against mlx-lm's loop, and against itself."""

import mlx.core as mx
import pytest
from common import near, needs_kernels
from mlx_lm.models import gated_delta as of_mlx_lm

from moelab.kernels import code, gated_delta, team

pytestmark = needs_kernels


def inputs(B=1, T=5, Hk=2, Hv=4, Dk=32, Dv=16, vector=False, seed=0):
    keys = mx.random.split(mx.random.key(seed), 6)
    q, k = (mx.random.normal((B, T, Hk, Dk), key=keys[i]) * Dk**-0.5 for i in (0, 1))
    v = mx.random.normal((B, T, Hv, Dv), key=keys[2])
    g = mx.random.uniform(0.7, 1.0, (B, T, Hv, Dk) if vector else (B, T, Hv), key=keys[3])
    beta = mx.random.uniform(0, 1, (B, T, Hv), key=keys[4])
    state = mx.random.normal((B, Hv, Dv, Dk), key=keys[5])
    return [q, k, v, g, beta, state]


@pytest.mark.parametrize("vector", (False, True))
@pytest.mark.parametrize(
    "shape",
    [dict(T=1), dict(T=7), dict(B=3, T=4), dict(Hk=1, Hv=6, Dv=9), dict(Dk=8, Dv=1), dict(Dk=128)],
    ids=str,
)
def test_as_the_loop(shape, vector):
    arrays = inputs(**shape, vector=vector)
    assert all(map(near, gated_delta.gated_delta(*arrays), of_mlx_lm.gated_delta_ops(*arrays)))
    arrays[-1] = None
    assert all(map(near, gated_delta.gated_delta(*arrays), of_mlx_lm.gated_delta_ops(*arrays)))


@pytest.mark.parametrize("threads", (1, 2, 5))
def test_passes_of_any_length_and_threads_give_the_same_bits(threads, monkeypatch):
    *arrays, state = inputs(B=2, T=9)
    want, last = gated_delta.gated_delta(*arrays, state)
    monkeypatch.setattr(team, "SHARED_WORK", 0)
    monkeypatch.setattr(code, "num_threads", lambda: threads)
    for parts in ((9,), (1,) * 9, (4, 5), (2, 3, 4)):
        s, ys, at = state, [], 0
        for n in parts:
            y, s = gated_delta.gated_delta(*(a[:, at : at + n] for a in arrays), s)
            ys.append(y)
            at += n
        assert mx.array_equal(mx.concatenate(ys, axis=1), want) and mx.array_equal(s, last)


@pytest.mark.parametrize("vector", (False, True))
def test_masked_tokens_leave_the_state(vector):
    """Rows of a batch, as if their masked tokens were not there: bit for bit."""
    *arrays, state = inputs(B=2, vector=vector)
    mask = mx.array([[True] * 5, [False, False, True, False, True]])
    y, last = gated_delta.gated_delta(*arrays, state, mask)
    wanted = of_mlx_lm.gated_delta_ops(*arrays, state, mask)
    assert near(last, wanted[1])
    for b, kept in enumerate(([0, 1, 2, 3, 4], [2, 4])):
        assert near(y[b, mx.array(kept)], wanted[0][b, mx.array(kept)])
        alone = [a[b : b + 1, mx.array(kept)] for a in arrays]
        y_alone, last_alone = gated_delta.gated_delta(*alone, state[b : b + 1])
        assert mx.array_equal(last[b : b + 1], last_alone)
        assert mx.array_equal(y[b : b + 1, mx.array(kept)], y_alone)


def test_what_does_not_fit_is_the_loops():
    half = [a.astype(mx.bfloat16) for a in inputs(B=2)[:5]] + inputs(B=2)[5:]
    for arrays in (inputs(Dk=12), half):
        want = of_mlx_lm.gated_delta_ops(*arrays)
        assert all(map(mx.array_equal, gated_delta.gated_delta(*arrays), want))
