"""``python -m moelab plan`` with a model's name: before a download, for this or another machine."""

import sys
from math import log

import mlx.core as mx
import published as recipe
import pytest
from common import small

import moelab
from moelab import memory
from moelab.__main__ import main
from moelab.configs import CONFIGS
from moelab.lab.experiments import plan
from moelab.lab.models import named, planned, recorded, settings_of
from moelab.replay.costs import Costs
from moelab.replay.machine import CHIPS, Machine
from moelab.streaming import plan as plans
from moelab.system import Mac

TINY = moelab.DATA / "models" / "tiny-moe"
# Tests on a GPU load models in float32: the scales take more memory than in a user's model.
on_a_cpu = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="needs a user's plans")

# Published parameters, in billions. An n-gram table of 51 with 5 bits each counts as 57 with 4.5.
PUBLISHED_B = {
    "qwen3.5-35b-a3b": 34.7, "qwen3.5-122b-a10b": 122, "qwen3.5-397b-a17b": 397,
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "gpt-oss-20b": 20.9, "gpt-oss-120b": 117,
    "glm-4.5-air": 106, "glm-5": 744, "deepseek-v3": 671, "kimi-k2": 1030,
    "deepseek-v4-flash": 284, "deepseek-v4.1-flash": 552, "minimax-m3": 428,
    "gemma-4-26b-a4b": 25.2, "nemotron-3-nano-30b-a3b": 31.6, "nemotron-3-super-120b-a12b": 120.7,
    "qwen3.8-flash-next": 125 + 57, "laguna-s-2.1": 117.6, "kimi-k3": 2780, "glm-5.3-flash": 313.4,
    "olmoe-1b-7b": 6.9,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_sizes_follow_from_its_configuration(name):
    facts = named(name).facts
    assert facts.checkpoint_nbytes / 0.5625 / 1e9 == pytest.approx(PUBLISHED_B[name], rel=0.03)
    L, K, E = facts.shape
    beside = facts.checkpoint_nbytes - L * E * facts.expert_nbytes * 0.99
    assert facts.num_blocks >= L and K < E and 0 < facts.dense_nbytes < beside


def test_a_forecasts_parts_are_its_token_and_a_better_machine_is_faster(capsys):
    machine = Machine.mac(16 * 2**30, 3e9, CHIPS["M4"] * 1e9)
    found = plan.forecast("gpt-oss-20b", machine)
    assert found.slots == named("gpt-oss-20b", machine.most).slots  # as in the engine
    assert sum(found.parts_s.values()) == pytest.approx(found.advice.token_s, rel=0.01)
    least, most = found.prompt_s(1000)
    assert 0 < least < most and found.prompt_s(1)[0] < least
    changed = dict(plan.changes("gpt-oss-20b", found, 4))
    assert max(changed.values()) <= 1.02 * found.advice.token_s
    assert main(["plan", "gpt-oss-20b", "--ram", "16", "--ssd", "3", "--chip", "M4"]) == 0
    assert f"{plan.rough(1 / found.advice.token_s)} tok/s, likely" in capsys.readouterr().out


@pytest.mark.parametrize("is_mac, gigabyte", [(True, 2**30), (False, 10**9)])
def test_a_macs_gigabytes_are_gibibytes(is_mac, gigabyte, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: is_mac)
    monkeypatch.setattr(plan, "_fitting", lambda name, machine, bits: None)
    monkeypatch.setattr(plan, "this_machine", lambda: Machine.cpu(32e9, 1e9, 2))
    assert plan._machine("gpt-oss-20b", 4, 16, None, None, None).ram_nbytes == 16 * gigabyte


def test_a_draft_saves_waits_and_arithmetic_and_reads_more():
    found = plan.forecast("gpt-oss-120b", Machine.mac(32e9, 6e9, 150e9))
    alone, right, wrong = found.parts_s, found.with_drafts(3, 1.0), found.with_drafts(3, 0.0)
    # All drafts are right: a token reads as much as without drafts, and takes a fourth of a pass.
    assert right["SSD"] == pytest.approx(alone["SSD"])
    assert right["layer overhead"] == pytest.approx(alone["layer overhead"] / 4)
    assert alone["arithmetic"] / 4 < right["arithmetic"] < alone["arithmetic"]
    # All drafts are wrong: a pass gives one token and reads the drafts' experts for nothing.
    assert wrong["SSD"] > alone["SSD"]
    assert sum(right.values()) < sum(alone.values()) < sum(wrong.values())


@pytest.mark.parametrize(
    ("words", "same"),
    (
        ("GPT-OSS-20B --ram 16GB --ssd 3GB/s --chip=apple-M4", "--chip M4"),
        ("gpt_oss_20b --ram 16 --ssd 3 --chip 120GB/s", "--chip M4"),
        ("gpt-oss-20b --ram 16 --ssd 3 --cores 64 --chip 48", "--cores 6 --chip 48"),
    ),
)
def test_names_units_and_machines_by_number(words, same, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    said = []
    for line in (words, f"gpt-oss-20b --ram 16 --ssd 3 {same}"):
        assert main(["plan", *line.split()]) == 0
        out, shown = capsys.readouterr()
        assert shown.startswith("\rmoelab plan starts") and "measured" not in shown
        said.append(out.partition("rates")[0])
    assert said[0] == said[1]


def test_what_is_left_of_a_macs_memory_grows_less_than_the_memory():
    """A slot for every expert is worth more risk than a few more slots are."""
    small, large = (Machine.mac(gb * 2**30, 3e9, 68e9) for gb in (16, 128))
    assert 0.4 * small.ram_nbytes < small.most.some < 0.5 * small.ram_nbytes
    assert 0.6 * large.ram_nbytes < large.most.some < memory.gpu_limit(large.ram_nbytes)
    for mac in (small, large):
        most = memory.most_for_a_model(mac.ram_nbytes, is_mac=True)
        need = memory._log_need(mac.ram_nbytes)
        left = (mac.ram_nbytes - memory.FREED_NBYTES - nbytes for nbytes in most)
        risks = [1 - need.cdf(log(nbytes)) for nbytes in left]
        assert risks == pytest.approx(memory.RISKS)
        assert mac.most == tuple(sorted(mac.most)) and not mac.swaps(mac.most.some)
        assert mac.swaps(1.01 * mac.most.least)
    linux = Machine.cpu(16e9, 3e9, 8)
    assert linux.most == (linux.memory_nbytes,) * 3


@on_a_cpu
def test_a_mac_is_filled_by_what_slots_are_worth():
    some, whole, least = (
        plan.forecast("qwen3.5-35b-a3b", Machine.mac(gb * 2**30, 6e9, 153e9)) for gb in (24, 32, 6)
    )
    assert some.slots == some.plan.fits(some.machine.most.some)
    for i, f, slots in ((1, whole, whole.plan.num_experts), (2, least, least.plan.top_k)):
        taken = f.plan.other_nbytes + slots * f.plan.facts.slot_nbytes
        assert f.slots == slots and f.machine.most.some < taken <= f.plan.memory_nbytes
        assert f.plan.memory_nbytes < f.machine.most[i]  # no more than these slots need
    text = some.table(100)
    assert "left free" in text and "times as long" in text and "stays as it is" in text
    tight = plan.forecast("qwen3.5-35b-a3b", Machine.mac(24 * 2**30, 6e9, 153e9), slots=220)
    assert "sudo sysctl iogpu.wired_limit_mb=" in tight.table(100)
    assert "GPU" not in plan.forecast("gpt-oss-20b", Machine.cpu(24e9, 6e9, 8)).table(100)


def test_a_folder_follows_the_rule_on_a_mac(monkeypatch):
    total = 3 * 10**9  # a plan may fill little of this
    monkeypatch.setattr(memory, "HERE", Mac())
    monkeypatch.setattr(plans.HERE, "memory", lambda: (total, total))
    monkeypatch.setattr(plans, "_memory", lambda: (total - 10**8, 10**8))
    most = memory.most_for_a_model(total)
    planned = moelab.plan(TINY)
    assert planned.memory_nbytes <= int(most.every) and planned.slots == planned.num_experts
    assert planned.memory_nbytes + planned.system_nbytes == total
    assert "times as long" in planned.reason
    assert "may swap" not in moelab.plan(TINY, memory_nbytes=10**9).reason


def test_this_machine_is_measured(monkeypatch, tmp_path, capsys):
    """A small model is timed on the drive of this folder; a terminal shows the progress."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(plan.synthesize.CONFIGS, "small", small())
    monkeypatch.setattr(plan, "STAND_IN", ("small", 4, 16))
    machine = plan.this_machine(4)
    assert machine.disk_bytes_per_s > 0 and machine.weights_bytes_per_s > 0
    assert plan.forecast("olmoe-1b-7b", machine).advice.token_s > 0  # 2.1 GB
    assert not list(tmp_path.iterdir()) and "measuring this machine (" in capsys.readouterr().err


def test_a_folder_is_planned_with_this_machines_costs_and_its_settings_are_compared(monkeypatch):
    """The text says what ``repack`` is for. A record's plan has as many slots as the folder's."""
    monkeypatch.setattr(plan, "measure_costs", lambda _: Costs(1e-2, 5e-5, 1e-9, 4e-9))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)  # no Mac has so little memory
    text, found = plan.of_folder(TINY, ram=0.2), planned(TINY, 150e6)
    slots = found.slots
    assert 8 < slots < 64 and f"slots={slots} of 64 in each of 8 layers" in text
    assert f"\n{slots:6d} " in text and f"\n{slots + 1:6d} " not in text
    assert "\nlayout       a repacked copy (python -m moelab repack) takes one read" in text
    assert recorded(settings_of(found)).fits(150e6) == found.fits(150e6) == slots


@on_a_cpu
def test_what_a_plan_says_of_itself_follows_from_published_speeds_and_our_own(monkeypatch):
    table = recipe.counted().query("side == 'left out'")
    sources = recipe.by_source(recipe.predicted(table)).factor
    assert (sources <= plan.FORMULA_SPREAD).mean() >= 0.8
    assert f"the worst {sources.max():.1f} times off" in plan.FORMULA_NEAR
    near = (sources <= plan.FORMULA_SPREAD).sum()
    number = ["no", "one", "two", "three", "four", "five", "six", "seven"]
    assert plan.FORMULA_NEAR.startswith(f"{number[near]} of {number[len(sources)]} published")
    few = [own for own in recipe.OWN if own[-1] == 4]  # plans of 40 layers take long
    monkeypatch.setattr(recipe, "OWN", few)
    own = recipe.own()
    assert (own.factor <= plan.OWN_SPREAD).mean() > 0.8 and own.factor.median() < 1.15
