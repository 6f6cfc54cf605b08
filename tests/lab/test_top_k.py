"""The measurements of notebook 05, on a small random checkpoint."""

import json

import pytest

import moelab
from moelab import StreamConfig
from moelab.__main__ import main
from moelab.lab import records
from moelab.lab.experiments import top_k
from moelab.lab.figures import top_k as figures
from moelab.lab.plots import charts

TEXT = "def f(x):\n    return x + 1\n" * 9


def test_prediction_is_in_proportion_to_bytes(model_path):
    f = moelab.footprint(model_path, StreamConfig())
    predicted = top_k.predicted_speedup(model_path, [f.top_k, 2, 1], f.top_k)
    assert predicted[f.top_k] == 1 and 1 < predicted[2] < predicted[1] < predicted[0]
    one = f.num_layers * f.expert_nbytes
    rest = f.checkpoint_nbytes - f.num_experts * one
    assert predicted[0] == pytest.approx((rest + f.top_k * one) / rest)
    assert "published" in figures.predictions(model_path, [8, 2])


@pytest.fixture(scope="module")
def ks(model_path):
    return [moelab.footprint(model_path, StreamConfig()).top_k, 2]


@pytest.fixture(scope="module")
def record_path(model_path, ks, tmp_path_factory):
    """What the command writes."""
    folder = tmp_path_factory.mktemp("top_k")
    (folder / "text").mkdir()
    (folder / "text" / "a.py").write_text(TEXT)
    out = folder / "top_k.json"
    sizes = ["--length", "8", "--count", "4", "--tokens", "3", "--runs", "2", "--slots", "8"]
    some = ["--heldout", str(folder / "text"), "--top-k", ",".join(map(str, ks))]
    assert not main(["bench-top-k", str(model_path), "--json", str(out), *some, *sizes])
    return out


def test_a_record_is_what_the_command_wrote(record_path, ks):
    fields = json.loads(record_path.read_text())
    assert fields["kind"] == "top_k"
    record = top_k.Record.from_json(fields)
    assert list(record.scores) == ks == list(record.speeds.ks)
    assert json.loads(json.dumps(record.to_json(), default=records._plain)) == fields
    assert record.speeds.speedup("fused", ks[0])["median"] == 1
    assert [record.speeds.rounds_like_resident(k) for k in ks] == [2, 2]


def test_charts_and_verdicts(record_path, ks, model_path):
    """Every chart says what it shows; a verdict is one of the four."""
    record = top_k.Record.from_json(json.loads(record_path.read_text()))
    speeds, scores = record.speeds, record.scores
    predicted = top_k.predicted_speedup(model_path, ks, ks[0])
    for old in (None, record):
        for fig in (
            figures.speed_chart(speeds, predicted, old),
            figures.gpu_chart(speeds),
            figures.time_chart(speeds),
            figures.quality_chart(scores, [TEXT], "small", old=old),
        ):
            assert fig.layout.meta["alt"] and fig.layout.meta["finding"]
        rows = figures.verdicts(model_path, speeds, scores, old=old)
        assert [r[0] for r in rows] == ["A1", "A11"]
        assert {r[2] for r in rows} <= set(charts.VERDICTS)
    assert "K=2 " in figures.written(speeds, model_path)


def test_whether_quality_holds():
    assert figures._holds(0.002, 0.009, 0.01) == "holds"
    assert figures._holds(0.008, 0.011, 0.01) == "undecided"
    assert figures._holds(0.011, 0.02, 0.01) == "does not hold"


def test_the_dial_works_at_both_ends(model_path, ks):
    look = figures.dial(model_path, [TEXT], tokens=2, length=8, count=2)
    for k in (1, ks[0]):
        assert look(k).layout.meta["finding"]


def test_a_record_of_another_model_is_not_shown(tmp_path):
    assert top_k.recorded(tmp_path / "no-such-model") is None
