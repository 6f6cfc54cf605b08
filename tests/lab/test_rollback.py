"""What notebook 06 measures: only the exact remedy keeps state and text, and its costs add up."""

import json

import families
import pytest
from recurrent import build, ids

import moelab
from moelab.lab import records
from moelab.lab.experiments import rollback
from moelab.lab.figures import rollback as figures

TEXT = ids(6, 80)[0].tolist()


@pytest.fixture(scope="module")
def record():
    model = build("qwen3_5_moe")
    return rollback.RollbackRecord(
        "m",
        rollback.drift(model, TEXT, 4, [0, 1, 2, 3, 4]),
        rollback.first_wrong(model, TEXT[:20], 4, 2, 12),
        [rollback.cost(model, TEXT, m, m // 2, 2) for m in (4, 6)],
        {"cpu": "none"},
    )


def test_drift(record):
    distance = record.drift.distance
    assert max(distance["exact"]) < 1e-5 < min(distance["restore only"][1:4])
    assert min(distance["stale state"][:3]) > 1e-3 and record.drift.backwards > 1e-3
    assert max(record.drift.probability["exact"]) < 1e-4


def test_only_exact_rollback_writes_the_greedy_text(record):
    assert record.first_wrong.right["exact"] == 12
    assert all(0 <= n <= 12 for n in record.first_wrong.right.values())


def test_cost(record):
    cost = record.costs[-1]
    assert (cost.positions, cost.keep, len(cost.pass_s)) == (6, 3, 2)
    assert set(cost.strategy_s) == set(cost.nbytes) == set(rollback.STRATEGIES)
    assert 0 < cost.nbytes["restore"] < cost.nbytes["states"]
    assert len(cost.overhead("replay")) == 2


def test_the_strategies_are_exact():
    worst = rollback.exactness(build("qwen3_5_moe"), TEXT, 6, read=5)
    assert set(worst) == set(rollback.STRATEGIES) and max(worst.values()) <= 1e-5


def test_only_restoring_reads_experts_again(tmp_path):
    path = families.write_checkpoint("qwen3_5_moe", tmp_path / "m", "affine4")
    model, _ = moelab.streaming.model.load_model(path, moelab.StreamConfig(slots=4))
    with model:
        read = rollback.bytes_read(model, TEXT, 8, 4)
    assert read["replay"] == read["states"] == 0 < read["restore"]


def test_a_record_is_read_as_it_was_written(record, tmp_path):
    records.save(tmp_path / "r.json", record)
    kept = rollback.RollbackRecord.from_json(json.loads((tmp_path / "r.json").read_text()))
    assert kept == record
    assert [row[0] for row in kept.verdicts()] == ["A8", "A9", "D4"]


def test_charts(record):
    for fig in (
        figures.drift_chart(record.drift, "m"),
        figures.first_wrong_chart(record.first_wrong, "m"),
        figures.time_chart(record.costs, "m"),
        figures.memory_chart(record.costs, "m"),
        figures.bytes_read_chart({"restore": 10, "replay": 0, "states": 0}, 8, 4, "m"),
    ):
        assert fig.layout.meta["alt"] and fig.layout.meta["finding"]


def test_the_memory_dial():
    shape = rollback.SHAPES["Qwen3.5-122B-A10B"]
    assert shape.nbytes(16)["states"] == 17 * 36 * 64 * 128 * 128 * 4
    for model in rollback.SHAPES:
        held = figures.memory_dial(model=model, positions=8).data[0].x
        assert held[0] < held[1] < held[2]
