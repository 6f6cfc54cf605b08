"""Notebook 04: which experts the slots hold, by replay, and prefetchers in the bench."""

import numpy as np
import pytest

from moelab import StreamConfig
from moelab.lab import records
from moelab.lab.experiments import bench, prefetch
from moelab.repack import repack
from moelab.replay import locality
from moelab.streaming.trace import Trace

CODE = locality.recorded_trace("code")


def test_k_slots_hold_the_last_tokens_experts_and_no_policy_beats_belady():
    found = prefetch.reuse({"code": CODE}, slots=(8, 16), skip=64)
    held = found.set_index(["policy", "slots"])
    last = locality.overlap(CODE.decode[63:])
    assert held.hit_rate["lru", 8] == pytest.approx(last["each"].mean())
    assert held.all_held["lru", 8] == pytest.approx(last["all"].mean())
    chance = 8 / CODE.num_experts
    assert held.all_held["lru", 8] < chance < held.hit_rate["lru", 8] < held.hit_rate["lru", 16]
    best = found[found.slots == 16].set_index("policy").hit_rate
    assert best.idxmax() == "belady" and len(best) == len(prefetch.POLICIES)


def test_a_text_that_repeats_itself_and_one_that_never_does():
    experts = {"again": np.tile(np.arange(2), (9, 1, 1)), "new": np.arange(18).reshape(9, 1, 2)}
    traces = {n: Trace(e, np.array(["decode"] * 9), np.arange(9), 20) for n, e in experts.items()}
    found = prefetch.reuse(traces, slots=(2, 4), policies=("lru",), skip=1)
    assert found.groupby("text").hit_rate.mean().to_dict() == {"again": 1, "new": 0}
    assert found.groupby("text")["round"].first().to_dict() == {"again": 0, "new": 1}


def test_the_script_writes_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prefetch, "recorded_trace", lambda _: CODE[-100:])
    monkeypatch.setattr(prefetch, "SLOTS", (8,))
    prefetch.main(str(tmp_path / "r.json"))
    made = records.read(str(tmp_path / "r.json"), disturbed=True)
    assert list(dict.fromkeys(made.text)) == list(prefetch.TEXTS)
    assert set(made.policy) == set(prefetch.POLICIES) and "belady" in capsys.readouterr().out


def test_prefetchers_of_both_layouts_in_the_bench(model_path, tmp_path, monkeypatch):
    """The same tokens; the oracle reads ahead, and nothing in vain; cold is cold for each token."""
    packed, dropped = repack(model_path, tmp_path / "packed", progress=False), []
    monkeypatch.setattr(bench.oscache, "drop_pages", dropped.append)
    monkeypatch.setattr(bench, "disk_speed", lambda _: 1.0)
    variants = {
        f"{p}, {path.name}": bench.Variant(StreamConfig(slots=6, prefetch=p), path, cold="token")
        for path in (model_path, packed)
        for p in ("none", "lookahead", "oracle")
    }
    made = bench.measure(model_path, variants, tokens=3, runs=2, warmup=1)
    assert made.attrs["settings"]["variants"][f"none, {packed.name}"]["path"] == packed.name
    first = next(iter(variants))
    assert set(records.same_tokens(made, first).values()) == {(2, 2)}
    oracle = made[made.variant.str.startswith("oracle")]
    assert (oracle.prefetch_issued > 0).all() and (oracle.prefetch_wasted == 0).all()
    assert not made[made.variant.str.startswith("none")].prefetch_issued.any()
    each = 1 + 1 + (1 + 3)  # before the prompt and the clock, and before each token
    assert dropped.count(packed) == 3 * 3 * each + 3  # 3 rounds; the oracle drops once more
