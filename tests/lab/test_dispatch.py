"""Operations counted, experts listened to, and the recipe's dense and MoE models and loop."""

import buffers
import mlx.core as mx
import numpy as np

from moelab import StreamConfig, load
from moelab.lab.experiments import dispatch


def test_operations_counts_what_is_computed():
    x = mx.ones((4,))
    mx.eval(x)
    assert dispatch.operations(mx.exp(x) * x + x) == {"Exp": 1, "Multiply": 1, "Add": 1}
    assert dispatch.operations(x.reshape(2, 2)) == {}  # a view


def test_dense_and_moe_differ_in_their_mlps_alone():
    pair = buffers.dense_and_moe(D=256, F=64, K=4, E=16, layers=1, vocab=64)
    dense, moe = (next(dispatch.operations_of_layers(model)) for model in pair.values())
    assert "GatherQMM" not in dense and moe["GatherQMM"] == 3
    # four of attention, the router
    assert (dense["QuantizedMatmul"], moe["QuantizedMatmul"]) == (7, 5)
    assert buffers.loop(pair["moe"], 2)["decode_s"] > 0


def test_hooks_see_every_layer_and_leave_the_model_as_it_was(model_path):
    model, _ = load(model_path, StreamConfig(mode="resident"))
    x, seen = mx.array([[3, 4, 5]]), []
    before = np.array(model(x))
    with dispatch.hooked_experts(model, lambda call, x, i: (seen.append(i.shape), call(x, i))[1]):
        inside = np.array(model(x))
    assert seen == [(1, 3, 4)] * 4
    assert (inside == before).all() and (np.array(model(x)) == before).all() and len(seen) == 4
