"""Notebook 00: the plan, the runs, the record and what the notebook says of it."""

import json
from pathlib import Path

import pytest

from moelab.lab import cite, records
from moelab.lab.experiments import start_here
from moelab.lab.figures import start_here as figures
from moelab.lab.plots import style

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "00_start_here.ipynb"


@pytest.fixture(scope="module")
def plan(model_path):
    return start_here.plan(model_path, allowed=0.9)


@pytest.fixture(scope="module")
def runs(model_path, plan):
    return start_here.measure(model_path, plan, "def f", tokens=4)


def test_a_plan_takes_the_most_slots_that_fit(model_path, plan):
    sizes = list(plan.nbytes)
    assert plan.top_k <= min(sizes) and max(sizes) <= plan.num_experts
    assert plan.nbytes[plan.slots] <= plan.allowed_nbytes
    assert plan.hit_rate == plan.slots / plan.num_experts
    assert start_here.plan(model_path, allowed=0.0).slots == min(sizes)
    assert "the most that fits" in plan._repr_markdown_()


def test_every_mode_writes_the_same_and_the_memory_is_predicted(runs, tmp_path):
    resident = runs.modes["resident"]
    assert list(runs.modes) == list(start_here.MODES) and list(runs.slots) == list(runs.plan.nbytes)
    assert all(run.same_tokens(resident) == 4 for run in runs.modes.values())
    for fig in (figures.mode_bars(runs), figures.memory_lines(runs)):
        assert style.words(fig)
    records.save(tmp_path / "r.json", runs.record())
    kept = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert kept["modes"]["resident"]["hit_rate"] is None
    assert kept["plan"]["nbytes"][str(runs.plan.slots)] == runs.plan.nbytes[runs.plan.slots]


def test_dial(model_path, plan):
    look = figures.dial(model_path, "def f", tokens=3)
    full = look(top_k=plan.top_k, slots=plan.slots)
    assert "3 of its 3 tokens" in full.layout.meta["finding"]
    assert "is lossy" in look(top_k=1, slots=plan.slots).layout.meta["finding"]


def test_the_notebook_says_what_the_record_says():
    record = records.recorded("cpu_start_here")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    texts = ("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    said = cite.shown(" ".join(texts))
    said = " ".join(said.replace("\n> ", " ").split())
    plan, held = record["plan"], record["slots"]["16"]
    assert f"16 of {plan['num_experts']} experts a layer" in said
    assert (
        f"holds {held['held_nbytes'] / 1e6:.1f} MB in place of {plan['resident_nbytes'] / 1e6:.1f}"
        in said
    )
    assert f"{held['hit_rate']:.0%} of the experts it needs are in a slot" in said
    assert f"would give {16 / plan['num_experts']:.0%}" in said
    assert f"({record['tokens']} tokens of one prompt" in said
    errors = [r["held_nbytes"] / plan["nbytes"][s] - 1 for s, r in record["slots"].items()]
    assert max(map(abs, errors)) < 0.002 and "to within 0.2%" in said
    assert all(m["same_tokens"] == record["tokens"] for m in record["modes"].values())
