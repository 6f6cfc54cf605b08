"""Notebook 12's tables: forecasts of several models, a cliff, our own speeds beside a replay's."""

import numpy as np
import pytest

from moelab.lab import records
from moelab.lab.experiments import your_machine
from moelab.replay.machine import Machine

MAC = Machine.mac(24e9, 5e9, 153e9)


def test_models_that_fit_are_told_and_the_others_named():
    found = your_machine.table(MAC, ["kimi-k3", "gpt-oss-120b", "gpt-oss-20b"])
    assert found.model.tolist() == ["gpt-oss-20b", "gpt-oss-120b"]  # the fastest first
    assert found.attrs["too_large"] == ["kimi-k3"]
    assert (found.low_tok_s < found.tok_s).all() and (found.tok_s < found.high_tok_s).all()
    assert (found.tok_s <= 1.001 * found.in_memory_tok_s).all()
    parts = found[["SSD", "page cache", "waits for reads", "weights", "layers"]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(1e3 / found.tok_s.to_numpy(), rel=0.01)


def test_more_slots_are_faster_until_the_system_swaps():
    cliff = your_machine.by_slots("qwen3.5-35b-a3b", MAC, 8)
    best = cliff.tok_s.to_numpy().argmax()
    assert cliff.held_gb[best] <= 16 < cliff.held_gb[best + 1]
    assert cliff.tok_s[best] > 3 * cliff.tok_s[best + 1]
    assert cliff.tok_s.max() < your_machine.in_memory("qwen3.5-35b-a3b", MAC)


def test_our_own_record_is_what_is_replayed_now():
    record, now = records.read("cpu_planned_own"), your_machine.own()
    assert record.variant.tolist() == now.variant.tolist()
    assert record.planned_tok_s.to_numpy() == pytest.approx(now.planned_tok_s.to_numpy(), rel=1e-3)
    assert np.median(now.factor) < 1.15


def test_where_no_model_fits_the_table_is_empty():
    found = your_machine.table(Machine.cpu(1e9, 1e9, 1), ["gpt-oss-20b"])
    assert found.empty and found.attrs["too_large"] == ["gpt-oss-20b"]


def test_our_own_first_tokens_lie_in_the_planned_range():
    prompts = your_machine.own_prompts()
    assert len(prompts) == 6 and (prompts.factor <= 1.1).all()
