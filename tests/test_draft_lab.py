"""The lab's side of drafting: what it times is the same text, its counters add up, and what it shows is drawn."""

import families
import numpy as np
import pytest
from test_rollback import build, ids

import moelab
from moelab.lab import draft, undo
from moelab.lab.trace import Trace


class Words:
    """A tokenizer as far as the lab asks."""

    def encode(self, text):
        return [int(t) for t in text.split()]


PROMPTS = [" ".join(map(str, ids(i, 6)[0].tolist())) for i in range(2)]


@pytest.fixture
def streamed(tmp_path):
    path = families.write_checkpoint("qwen3_5_moe", tmp_path / "m", "affine4")
    model, _ = moelab.streaming.model.load_model(path, moelab.StreamConfig(mode="fused", slots=4))
    with model:
        yield model


def test_compare(streamed):
    def oracle(prompt, text):
        return draft.OracleDraft([*prompt, *text], 0.7)

    compared = draft.compare(streamed, Words(), oracle, [0, 3, "auto"], PROMPTS, 24, 2)
    sums = draft.summary(compared)
    assert set(sums) == {"mlx-lm", "0", "3", "auto"} and all(s["same"] for s in sums.values())
    assert sums["mlx-lm"]["ratio"]["median"] == 1 and sums["0"]["tau"] == 1
    assert 1.5 < sums["3"]["tau"] <= 4 and sum(sums["3"]["histogram"].values()) > 5
    perfect = draft.drafted(
        streamed, [1, 2], draft.OracleDraft([1, 2, *draft.undrafted(streamed, [1, 2], 24)["tokens"]], 1.0), 3, 24
    )
    assert all(accepted == drafted for drafted, accepted, *_ in perfect["rounds"])
    record = {**compared, "summary": sums, "model": "m", "draft": "oracle", "cache_state": "warm"}
    assert draft.report(record).count("same") == 4


def test_a_long_run_accounts_for_every_position(streamed):
    out = draft.soak(streamed, [3, 1, 4, 1, 5], draft.LookupDraft(), 3, 120, every=40)
    assert out["positions"] == out["expected"] and out["tokens"] == [40, 80, 120]
    assert out["active_nbytes"][-1] - out["active_nbytes"][0] < 5e6


def test_passes_and_union(streamed):
    text = ids(5, 60)[0].tolist()
    timed = draft.passes(streamed, text, [1, 4], 3)
    assert [len(v) for v in timed.values()] == [3, 3]
    assert all(s["tokens"] == m and s["pass_s"] > 0 for m, v in timed.items() for s in v)
    trace = Trace(np.arange(24).reshape(6, 2, 2) % 8, np.array(["decode"] * 6), np.arange(6))
    assert draft.union(trace, [1, 2])[1] == ([2.0, 2.0], pytest.approx(2.0))
    assert draft.routing(streamed, text[:5]).experts.shape[0] == 5


def test_drift_and_ways():
    model, text = build("qwen3_5_moe"), ids(6, 80)[0].tolist()
    drifted = undo.drift(model, text, 4, lambda i: i % 5, 5)
    assert max(drifted["exact"][0]) < 1e-5 < min(drifted["restored only"][0][1:4])
    assert min(drifted["left in the state"][0][:3]) > 1e-3
    assert undo.tokens_until_wrong(model, text[:20], 4, 2, 12)["exact"] == 12
    timed, held = undo.ways(model, text, 6, 3, 2)
    assert all(len(t) == 2 for t in timed.values()) and held["no undo"] == 0 < held["restore"] < held["states"]


def test_dials():
    parts = {"fixed_s": 0.01, "position_s": 0.01, "expert_nbytes": 1e6, "overlap": 0.3}
    look = draft.dial(parts, 8, 64, 8)
    assert (
        "1.00 times" not in look(length=4, accept=0.8, slots=64, GBs=3.0, top_k=8, arithmetic="free").layout.title.text
    )
    free = draft.speed_model(0.01, 0.0, 0.0, 8, 64, 1.0, 8)
    assert free(16) == free(1)
    fig = undo.memory_dial({"m": (6, 8, 4, 64)})(model="m", positions=8)
    assert fig.data[0].y[2] == pytest.approx(9 * 6 * 8 * 64 * 64 * 4 / 1e6)


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="expected held-out text"):
        draft.heldout(tmp_path, 1, 8, Words())
