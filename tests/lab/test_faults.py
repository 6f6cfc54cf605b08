"""Notebook 08's trials: faults reach loop and target, tables say what was counted."""

import json
from types import SimpleNamespace

import pytest

import moelab
from moelab.lab import records
from moelab.lab.experiments import faults
from moelab.lab.experiments.faults import RIGHT, SWIFTLM, Fault

TARGET, DRAFT = (moelab.DATA / "models" / name for name in ("tiny-moe", "tiny-dflash"))


def measure(prompts, rounds, length, named):
    return faults.measure(TARGET, DRAFT, prompts, rounds, length, faults=named, progress=False)


@pytest.fixture(scope="module")
def samples():
    names = (RIGHT, "streamed, 8 slots", "rejected tokens left in the state")
    return measure(1, 6, 32, {name: faults.FAULTS[name] for name in names})


def test_every_round_is_counted_and_a_stale_state_accepts_less(samples):
    right, streamed, stale = samples.to_dict("records")
    for row in (right, streamed, stale):
        assert len(row["committed"]) == row["rounds"] == 6 and row["drafted"] == 90
        assert row["tau"] == pytest.approx(sum(row["committed"]) / 6)
        assert row["prompt_tokens"] == 32 and row["block"] == 16
    assert right["committed"] == streamed["committed"] and streamed["slots"] == 8
    assert right["tau"] > stale["tau"] and stale["rollback"] == "stale state"


def test_shares_of_the_rounds(samples):
    spread = faults.shares(samples)
    assert list(dict.fromkeys(spread.variant)) == list(dict.fromkeys(samples.variant))
    assert spread.groupby("variant").share.sum().tolist() == pytest.approx([1, 1, 1])
    mine = spread[spread.variant == RIGHT]
    assert mine.committed.tolist() == list(range(1, 17))
    assert (mine.committed * mine.share).sum() == pytest.approx(samples.tau[0])
    assert f"{samples.tau[0]:.2f}" in faults.report(samples)


def test_faults_of_the_target():
    modules = dict(faults.target(TARGET, Fault(bits=2)).named_modules()).values()
    assert 2 in {m.bits for m in modules if hasattr(m, "bits")}


def test_the_command_keeps_a_table_that_no_other_work_disturbs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(faults, "FAULTS", {RIGHT: Fault(block=4)})
    monkeypatch.setattr(faults.measure, "__defaults__", (1, 1, 12, "code", faults.FAULTS, None, 0))
    monkeypatch.setattr(records, "_others_s", iter(range(0, 10**6, 10**4)).__next__)
    path = str(tmp_path / "r.json")
    args = SimpleNamespace(prompts=2, rounds=2, length=12, kind="prose", json=path)
    faults.run(args)
    assert "DISTURBED" not in capsys.readouterr().out
    kept = records.read(path)
    assert kept["round"].tolist() == [0, 1] and kept.attrs["settings"]["kind"] == "prose"
    assert kept.drafted.tolist() == [6, 6]


def test_the_record_has_the_faults_of_today():
    recorded = records.read("cpu_faults")
    assert list(dict.fromkeys(recorded.variant)) == list(faults.FAULTS)
    assert records.paired(recorded, "streamed, 8 slots", RIGHT, "tau").eq(1).all()
    assert (records.paired(recorded, SWIFTLM, RIGHT, "tau") < 1).mean() > 0.5


def test_the_drafts_training():
    found = faults.training(DRAFT)
    assert set(found.draft) == set(faults.DRAFTS.values())
    assert len(found) == len(found.drop_duplicates(["steps", "draft", "texts"]))
    given = json.loads((DRAFT / "training.json").read_text())["runs"][-1]["acceptance"]
    (row,) = found[
        (found.steps == found.steps.max()) & (found.draft == "4 layers") & (found.texts == "valid")
    ].to_dict("records")
    assert row["tau"] == given["dflash4"]["valid"]["tau"]
    assert sum(row["committed"]) / len(row["committed"]) == pytest.approx(row["tau"], rel=0.01)


def test_the_dial_measures():
    look = faults.dial(TARGET, DRAFT, 1, 1)
    fig = look(block=2, top_k=6, rollback="restore only", features="off by one")
    assert fig.layout.title.text.endswith("of at most 2")
