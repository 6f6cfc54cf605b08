"""The measurements behind notebook 01 and the CUDA run: what they run, not how fast."""

import json

import cuda_run
import mlx.core as mx
import numpy as np
import pytest

from moelab import StreamConfig, load
from moelab.lab import records
from moelab.lab.experiments import dispatch
from moelab.lab.figures import dispatch as figures
from moelab.lab.plots import charts, style


def test_one_operation():
    t = dispatch.one_operation(count=20, rounds=2).timings
    assert set(t) == {"built", "chained", "scheduled", "evaluated"} and all(
        len(x.samples_s) == 2 for x in t.values()
    )


def test_operations_counts_what_is_computed():
    x = mx.ones((4,))
    mx.eval(x)
    assert dispatch.operations(mx.exp(x) * x + x) == {"Exp": 1, "Multiply": 1, "Add": 1}
    assert dispatch.operations(x.reshape(2, 2)) == {}  # a view


def test_expert_calls_have_four_ways():
    r = dispatch.expert_calls(64, 64, 2, E=4, layers=2, rounds=2)
    assert set(r.timings) == {
        "K calls a projection",
        "one gather a projection",
        "gate and up fused",
        "dense",
    }
    assert r.config["nbytes"] == 2 * 3 * 64 * 64 * 9 // 16


def test_dense_and_moe_differ_in_their_mlps_alone():
    models = dispatch.dense_and_moe(D=128, F=64, K=2, E=4, layers=2, vocab=64)
    counts = {n: dispatch.operations_of_a_layer(m)[1] for n, m in models.items()}
    assert counts["moe"]["GatherQMM"] == 3 and "GatherQMM" not in counts["dense"]
    assert (
        counts["dense"]["QuantizedMatmul"] == 7 and counts["moe"]["QuantizedMatmul"] == 5
    )  # four of attention, the router
    r = dispatch.loops(models["moe"], tokens=2, rounds=1)
    assert (
        len(r.timings) == 8
        and len(dispatch.loops(models["dense"], 2, 1, routing=False).timings) == 5
    )


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
        assert dispatch.loop(model, 5, ahead=ahead) > 0
    tokens = {ahead: [y.item() for y in seen] for ahead, seen in tokens.items()}
    assert tokens[True] == tokens[False] and len(tokens[True]) == 6


def test_promotion_reaches_the_last_layer(model_path):
    model, _ = load(model_path, StreamConfig(mode="resident", dtype="bfloat16"))
    r = dispatch.promotion(model, tokens=2, rounds=1)
    assert r.config["dtype_in_the_last_layer"] == ["mlx.core.float32"]


def test_cuda_run_removes_no_folder_that_it_did_not_make(tmp_path):
    own = tmp_path / "f" / "tiny" / "thesis.txt"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    argv = [
        str(tmp_path / "r.json"),
        "--tiny",
        "--folder",
        str(tmp_path / "f"),
        "--only",
        "expert_calls",
    ]
    with pytest.raises(SystemExit) as stop:
        cuda_run.main(argv)
    assert str(own.parent) in str(stop.value) and own.read_text() == "mine"
    assert not (tmp_path / "r.json").exists()


def test_cuda_run_goes_on_when_a_section_fails(tmp_path, monkeypatch, capsys):
    def fails(self):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(cuda_run.Run, "expert_calls", fails)
    out = tmp_path / "r.json"
    sections = "checkpoint,one_operation,expert_calls,memory,copies,locality"
    cuda_run.main(
        [
            str(out),
            "--tiny",
            "--folder",
            str(tmp_path / "f"),
            "--only",
            sections,
        ]
    )
    r = json.loads(out.read_text())["sections"]
    assert r["expert_calls"]["error"] == "RuntimeError: no such kernel"
    assert (
        r["memory"]["rows"][-1]["tokens"] == 8
        and r["one_operation"]["timings"]["built"]["samples_s"]
    )
    assert "no such kernel" in capsys.readouterr().out
    for layout in ("repacked", "as shipped"):
        made = r["copies"][layout]
        assert all(all(same) for same in made["same"].values()) and made["counters"]["misses"] > 0
        spent = made["host_ms_of_a_token"]["copies"]
        assert spent["waiting for the routing"] > 0 and spent["waiting for reads"] > 0
        assert sum(ms for name, ms in spent.items() if name != "all") == pytest.approx(spent["all"])
    assert "error" not in r["locality"], r["locality"]
    assert r["locality"]["hit_rate_of_the_trace"].keys() == {
        f"{n} of 64 slots" for n in (16, 32, 64)
    }
    for name in ("random routers", "routers of the trace"):
        made = records.table(r["locality"][name])
        ways = ["resident", *(f"fused, {n} slots" for n in (16, 32, 64))]
        assert sorted(made.variant) == sorted(ways)
        hits = [records.values(made, way, "hit_rate")[0] for way in ways[1:]]
        assert 0 < hits[0] <= hits[1] <= hits[2] <= 1
    assert list((tmp_path / "f").iterdir()) == []  # the checkpoint is gone


def test_cuda_run_adds_sections_to_a_file_of_the_same_machine(tmp_path, monkeypatch):
    out = tmp_path / "r.json"

    def run(section):
        cuda_run.main([str(out), "--tiny", "--folder", str(tmp_path / "f"), "--only", section])
        return json.loads(out.read_text())["sections"]

    first = run("one_operation")
    both = run("tokens_at_once")
    assert list(both) == ["one_operation", "tokens_at_once"]
    assert both["one_operation"] == first["one_operation"]
    before = out.read_text()
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "3")
    with pytest.raises(SystemExit, match="environment"):
        run("memory")
    assert out.read_text() == before


def test_charts_and_verdicts_of_the_recorded_run(model_path):
    """What notebook 01 shows can be drawn, with the record's own numbers."""
    gpu = dispatch.recorded()
    record = records.recorded("cuda_h200")["sections"]
    raw = record["one_operation"]["timings"]["chained"]["samples_s"]
    assert gpu.operation.median_s("chained") == np.median(raw)
    assert list(gpu.experts) == list(record["expert_calls"])[:-1]  # without section_s
    assert 10 < gpu.operations["dense"] < gpu.operations["moe"] < min(gpu.layer_operations)

    model, _ = load(model_path, StreamConfig(mode="resident", dtype="bfloat16"))
    experts = dispatch.expert_calls(64, 64, 2, E=4, layers=2, rounds=1)
    promoted = dispatch.promotion(model, tokens=2, rounds=1)
    shown = [
        figures.operation_bars(dispatch.one_operation(4, 1), gpu),
        figures.expert_bars(experts, gpu, "small"),
        figures.count_bars(model, gpu),
        figures.alone_bars(gpu),
        figures.loop_bars(dispatch.loops(model, 2, 1), gpu, "small"),
        figures.buffer_bars(gpu),
        figures.promotion_bars(promoted, gpu, "small"),
    ]
    assert all(style.words(fig) for fig in shown)
    assert all("recorded:" in fig.layout.title.subtitle.text for fig in shown)
    rows = {r[0]: r for r in figures.verdicts(gpu, experts, promoted)}
    assert list(rows) == ["B1", "B2", "B3", "C1", "C2", "C3", "C4"]
    assert f"{np.median(raw) * 1e6:.1f} us in a chain" in rows["B1"][3]
    assert "1.26x the time on NVIDIA H200, recorded" in rows["C4"][3]
    assert {r[2] for r in rows.values()} <= set(charts.VERDICTS)


def test_what_the_sources_imply():
    """(1 / 5.12 - 1 / 5.92) s over 48 layers of 15 calls fewer is 37 us a call."""
    implied = dispatch.implied_call_us()
    assert implied["stacked"] == pytest.approx((1 / 5.12 - 1 / 5.92) / (48 * 15) * 1e6)
    assert min(implied.values()) == implied["stacked, by its own percentage"]
    operation = dispatch.implied_operation_us(dispatch.recorded())
    assert operation["moe"] > 5 * operation["dense"]


@pytest.mark.parametrize("top_k", [1, 16])
@pytest.mark.parametrize("bandwidth", [50, 4800])
def test_dispatch_dial_at_its_ends(top_k, bandwidth):
    fig = figures.dial(D=3072, F=1024)(top_k=top_k, layers=48, bandwidth=bandwidth)
    assert len(fig.data) == 3 and fig.layout.meta["finding"]
    assert all(np.isfinite(t.y).all() for t in fig.data)


def test_the_slower_of_sending_and_moving_sets_the_pace():
    assert dispatch.token_model(3, 10, 30, 40, 1, 100) == pytest.approx(10 * 43 * 30e-6)
    assert dispatch.token_model(3, 10, 0, 40, 1e9, 100) == pytest.approx(10 * 1e9 / 100e9)
