"""Notebook 08's trials: faults reach the loop and the target, records are read as written."""

import json
from functools import cache

import pytest

import moelab
from moelab.lab import records
from moelab.lab.experiments import faults
from moelab.lab.experiments.faults import Fault
from moelab.lab.figures import faults as figures
from moelab.speculation.dflash import DFlashDraft

MODELS = moelab.DATA / "models"
TARGET = MODELS / "tiny-moe"
RECORDED = faults.FaultsRecord.from_json(records.recorded("cpu_suspects"))
TRAINING = faults.Training.load(MODELS / "tiny-dflash")


@cache
def code():
    return [ids[-12:] for ids in faults.some(TARGET, "code", 64, 1)]


@pytest.fixture(scope="module")
def draft():
    return DFlashDraft(MODELS / "tiny-dflash")


@pytest.fixture(scope="module")
def model():
    return faults.target(TARGET)


def test_a_trial_counts_every_round(model, draft):
    found = faults.trial(model, draft, code(), 4)
    assert sum(found.histogram) == 4 and len(found.draft_s) == len(found.verify_s) == 4
    assert found.low <= found.tau <= found.high
    accepted = sum(n * rounds for n, rounds in enumerate(found.histogram))
    assert found.tau == pytest.approx(1 + accepted / 4)
    assert faults.speedup(found, [1.0])[0] == pytest.approx(found.tok_s[0])


def test_what_is_right_accepts_more_than_a_stale_state(model, draft):
    prompts = [faults.some(TARGET, "code", 64, 1)[0][-32:]]
    right, stale = (
        faults.trial(model, draft, prompts, 6, fault=f) for f in (Fault(), Fault("stale state"))
    )
    assert right.tau > stale.tau


def test_faults_of_the_target():
    modules = dict(faults.target(TARGET, Fault(bits=2)).named_modules()).values()
    assert 2 in {m.bits for m in modules if hasattr(m, "bits")}


def test_a_record_is_read_as_it_was_written(draft, tmp_path):
    some = {name: faults.FAULTS[name] for name in (faults.RIGHT, faults.SWIFTLM)}
    seen = []
    record = faults.trials(TARGET, draft, code(), 1, some, lambda r: seen.append(len(r.results)))
    assert seen == [1, 2] and set(record.results) == set(some)
    records.save(tmp_path / "r.json", record)
    assert faults.FaultsRecord.from_json(json.loads((tmp_path / "r.json").read_text())) == record


def test_the_recorded_faults_are_those_of_today():
    assert list(RECORDED.results) == list(faults.FAULTS)
    assert RECORDED.results[faults.RIGHT].share(0) == pytest.approx(28 / 128)


def test_charts():
    blocks = {2: RECORDED.results["top-k 6"], 16: RECORDED.results[faults.RIGHT]}
    plain = {2: [30.0], 16: [30.0]}
    for fig in (
        figures.faults_chart(RECORDED, RECORDED),
        figures.fault_histogram(RECORDED),
        figures.tau_chart(blocks, "block size", "note"),
        figures.speed_chart(blocks, plain, "block size", "note"),
        figures.training_chart(TRAINING),
        figures.draft_histogram(TRAINING),
    ):
        assert fig.layout.meta["alt"] and fig.layout.meta["finding"]
    rows = figures.verdicts(RECORDED, blocks, plain, blocks, plain)
    assert [row[0] for row in rows] == ["D1", "D2", "D3", "D4", "D5", "D6", "E5"]


def test_the_dial_measures(draft):
    look = figures.dial(TARGET, draft, code(), 1)
    fig = look(block=2, top_k=6, rollback="restore only", features="off by one")
    assert fig.layout.title.text.endswith("of at most 2")
