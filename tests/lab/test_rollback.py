"""What notebook 06 measures: only the exact remedy keeps state and text, and its costs add up."""

import families
import pytest
from recurrent import build, ids

import moelab
from moelab.lab import records
from moelab.lab.experiments import rollback

TEXT = ids(6, 80)[0].tolist()


@pytest.fixture(scope="module")
def model():
    return build("qwen3_5_moe")


def test_faulty_states_drift_and_the_exact_one_does_not(model):
    drifted = rollback.drift(model, TEXT, 4, 5)
    rejected = drifted[drifted.accepted < 4]
    largest, least = (rejected.groupby("variant").state_distance.agg(f) for f in ("max", "min"))
    assert largest["exact"] < 1e-5 and least["stale state"] > 1e-3 < least["restore only"]
    assert drifted[drifted.variant == "exact"].probability_change.max() < 1e-4
    assert drifted[drifted.variant == "prompt read backwards"].state_distance.min() > 1e-3


def test_only_exact_ways_write_the_greedy_text(model):
    made = rollback.texts(model, [TEXT[:20], TEXT[20:50]], 4, 2, 12, progress=False)
    for name in rollback.WAYS:
        of = made[made.variant == name]
        assert len(of) == 2 and of.right_tokens.between(3, 12).all()  # the first round is right
        if name in rollback.STRATEGIES:
            assert (of.right_share == 1).all() and (of.state_distance < 1e-5).all()
        else:
            assert (of.state_distance > 1e-3).all()
    assert rollback.report(made).count("of 12 tokens right") == 5


def test_cost(model):
    samples = rollback.cost(model, TEXT, [4, 6], 2)
    assert len(samples) == 2 * 2 * 4
    assert (samples[samples.strategy == rollback.ALONE].passes == 1).all()
    held = samples[samples.positions == 6].groupby("strategy").held_nbytes.max()
    assert 0 < held["restore"] < held["states"]
    mine = records.paired(samples, "replay, 6 positions", f"{rollback.ALONE}, 6 positions")
    assert list(mine) == list(records.values(samples, "replay, 6 positions", "passes"))


def test_the_strategies_are_exact_at_every_cut(model):
    made = rollback.exactness(model, TEXT, 6, read=5)
    assert set(made.variant) == set(rollback.STRATEGIES) and set(made.keep) == {0, 3, 6}
    assert made.difference.max() <= 1e-5


def test_only_restoring_reads_experts_again(tmp_path):
    path = families.write_checkpoint("qwen3_5_moe", tmp_path / "m", "affine4")
    model, _ = moelab.streaming.model.load_model(path, moelab.StreamConfig(slots=4))
    with model:
        read = rollback.bytes_read(model, TEXT, 8, 4).set_index("variant").bytes_read
    assert read["replay"] == read["states"] == 0 < read["restore"]


def test_the_memory_dial():
    assert rollback.held_nbytes("Qwen3.5-122B-A10B", 16)["states"] == 17 * 36 * 64 * 128 * 128 * 4
    for model in rollback.SHAPES:
        held = rollback.memory_dial(model=model, positions=8).data[0].x
        assert held[0] < held[1] < held[2]
