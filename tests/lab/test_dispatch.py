"""The measurements behind notebook 01: what they run, not how fast."""

import mlx.core as mx
import numpy as np
import pytest

from moelab import StreamConfig, load
from moelab.lab import records
from moelab.lab.experiments import dispatch

SMALL = {"D": 256, "F": 64, "K": 4, "E": 16, "layers": 2, "vocab": 64}


def test_one_operation():
    made = dispatch.one_operation(count=20, rounds=2)
    n = records.group(made, "operation_s").n.to_dict()
    assert n == dict.fromkeys(["built", "chained", "scheduled", "evaluated"], 2)


def test_operations_counts_what_is_computed():
    x = mx.ones((4,))
    mx.eval(x)
    assert dispatch.operations(mx.exp(x) * x + x) == {"Exp": 1, "Multiply": 1, "Add": 1}
    assert dispatch.operations(x.reshape(2, 2)) == {}  # a view


def test_the_same_experts_in_fewer_calls():
    made = dispatch.expert_calls(["tiny-moe"], E=8, layers=2, rounds=2)
    calls = made.set_index("variant").calls.to_dict()
    assert list(calls.values()) == [24, 3, 2, 3] and list(calls)[:3] == [
        dispatch.K_CALLS, dispatch.ONE_GATHER, dispatch.FUSED
    ]  # fmt: skip
    assert set(made.nbytes) == {8 * 3 * 256 * 128 * 9 // 16} and len(made) == 4 * 2


def test_dense_and_moe_differ_in_their_mlps_alone(model_path):
    made = dispatch.count(model_path).fillna(0).set_index("variant")
    dense, moe = made.loc["dense"], made.loc["moe"]
    assert (dense.GatherQMM, moe.GatherQMM) == (0, 3)
    assert (dense.QuantizedMatmul, moe.QuantizedMatmul) == (7, 5)  # four of attention, the router
    assert dense.operations < moe.operations and len(made) == 2 + 4


def test_loops(model_path):
    made = dispatch.loops(model_path, tokens=2, rounds=1)
    assert sorted(made.variant) == sorted(dispatch.LOOPS) and (made.decode_tokens == 2).all()
    assert made.attrs["settings"]["model"] == model_path.name


def test_buffers_give_each_setting_a_process_that_has_it():
    settings = ["as it is", "1 a buffer"]
    made = dispatch.buffers(tokens=2, rounds=2, settings=settings, sizes=SMALL)
    assert list(dict.fromkeys(made.setting)) == settings and len(made) == 2 * 2 * 3
    slower = records.paired(
        made.query("loop == @dispatch.AHEAD"), "moe, 1 a buffer", "moe, as it is"
    )
    assert len(slower) == 2 and "disturbed" in made.attrs["load"]


def test_hooks_see_every_layer_and_leave_the_model_as_it_was(model_path):
    model, _ = load(model_path, StreamConfig(mode="resident"))
    x, seen = mx.array([[3, 4, 5]]), []
    before = np.array(model(x))
    with dispatch.hooked_experts(model, dispatch.before(lambda x, i: seen.append(i.shape))):
        inside = np.array(model(x))
    assert seen == [(1, 3, 4)] * 4
    assert (inside == before).all() and (np.array(model(x)) == before).all() and len(seen) == 4


def test_loop_decodes_the_same_either_way(model_path, monkeypatch):
    model, _ = load(model_path, StreamConfig(mode="resident"))
    real, tokens = mx.argmax, {True: [], False: []}

    def listening(seen):
        return lambda *a, **k: seen.append(real(*a, **k)) or seen[-1]

    for ahead, seen in tokens.items():
        monkeypatch.setattr(mx, "argmax", listening(seen))
        assert dispatch.loop(model, 5, ahead=ahead)["decode_s"] > 0
    tokens = {ahead: [y.item() for y in seen] for ahead, seen in tokens.items()}
    assert tokens[True] == tokens[False] and len(tokens[True]) == 6


def test_a_stray_scalar_reaches_the_last_layer(model_path):
    made = dispatch.stray_scalar(model_path, tokens=2, rounds=1).set_index("variant")
    assert made.last_dtype.to_dict() == {"as it is": "bfloat16", "one float32 scalar": "float32"}


@pytest.mark.parametrize(
    "words", [["nonsense"], ["loops"], ["operation", "M"], ["loops", "M", "M"]]
)
def test_a_record_that_cannot_be_made(words, tmp_path):
    out = tmp_path / "r.json"
    with pytest.raises(ValueError, match="dispatch: expected operation, .*loops"):
        dispatch.main(words[0], str(out), *words[1:])
    assert not out.exists()


def test_a_record_is_what_was_measured(model_path, tmp_path):
    dispatch.main("count", str(tmp_path / "r.json"), str(model_path))
    made = records.read(str(tmp_path / "r.json"), disturbed=True)
    assert made.operations.equals(dispatch.count(model_path).operations)


@pytest.mark.parametrize("top_k", [1, 16])
@pytest.mark.parametrize("bandwidth", [50, 4800])
def test_the_slower_of_sending_and_moving_sets_the_pace(top_k, bandwidth):
    fig = dispatch.dial(D=3072, F=1024)(top_k=top_k, layers=48, bandwidth=bandwidth)
    move_ms = 48 * top_k * 3 * 3072 * 1024 * 9 / 16 / bandwidth / 1e6
    assert len(fig.data) == 3 and fig.layout.meta["finding"] and not fig.layout.meta["here"]
    for line, calls in zip(fig.data, (3 * top_k, 3, 2)):
        assert line.y[0] == pytest.approx(move_ms)
        assert line.y[-1] == pytest.approx(max(move_ms, 48 * (calls + 40) * 0.06))
