"""Notebook 03: what it asks of a bench's rows, and the replay of the same settings."""

import numpy as np
import pytest

from moelab.lab import records
from moelab.lab.arguments import parse_modes
from moelab.lab.experiments import bench, page_cache
from moelab.replay import locality


def row(variant, i=0, **columns):
    same = {"decode_tokens": 2, "decode_s": 0.1, "wait_s": 0.02, "bytes_read": 40}
    return {"variant": variant, "round": i, "mode": "fused", **same, **columns}


def test_how_experts_were_read_follows_from_the_rows():
    counts = {"hits": 4, "misses": 4}
    rows = [
        row("resident", mode="resident", hits=0, misses=0),
        row("buffers", mode="buffers", hits=0, misses=8, disk_nbytes=20),
        row("copied", **counts, slots=8, direct=False, disk_nbytes=20),
        row("again", **counts, slots=8, direct=False, disk_nbytes=90),
        row("past", **counts, slots=90, direct=True, disk_nbytes=40),
        row("past", 1, **counts, slots=80, direct=True, disk_nbytes=40),
        row("killed", direct=True, slots=99, killed=True),
    ]
    found = page_cache.told(records.table({"rows": rows})).set_index("variant")
    ways = page_cache.NO_SLOTS, *[page_cache.THROUGH] * 2, *[page_cache.PAST] * 3
    assert tuple(found["reads"]) == ways
    assert list(found.slots) == [0, 8, 8, 85, 85, 99]
    copied = found.loc["copied"]
    assert (copied.ms, copied.wait_ms) == (50, 10)
    assert (copied.slot_percent, copied.disk_percent, copied.page_percent) == (50, 25, 25)
    assert found.loc["again"].page_percent == 0, "the disk brought more than was needed"


def test_only_what_differs_is_measured():
    modes = "resident,buffers,fused/slots=8,fused/policy=lfu"
    found = bench.crossed(parse_modes(modes), [100, None], direct=(False, True))
    facts = {name: v.facts for name, v in found.items() if "no limit" not in name}
    assert [n for n in facts if "past" in n and "MB" in n] == [
        "fused/slots=8, 0 MB, past the page cache",
        "fused/policy=lfu, 0 MB, past the page cache",
    ]
    assert facts["fused/slots=8, page cache"] == {"mode": "fused", "slots": 8, "direct": False}
    assert facts["fused/policy=lfu, page cache"]["policy"] == "lfu"
    assert facts["buffers"] == {"mode": "buffers"}
    with pytest.raises(ValueError, match="expected True or False, got 'no'"):
        parse_modes("fused/lazy_logits=no")


@pytest.mark.parametrize("mb", (478, 956, 1530))
def test_the_replay_hits_what_the_engine_hit(mb):
    sizes, costs = page_cache.machine_and_model(records.read("cpu_costs_35b"))
    samples = page_cache.told(records.read(f"cpu_slots_{mb}"))
    found = page_cache.replayed(samples, sizes, costs)
    assert set(found["reads"]) == {page_cache.THROUGH, page_cache.PAST}
    assert (found.hit_rate - found.replayed_hit_rate).abs().max() < 0.05
    past = found[found["reads"] == page_cache.PAST]
    assert (past.replayed_disk_MB / past.disk_MB - 1).abs().max() < 0.15
    experts = np.random.default_rng(0).random((len(page_cache.routing()), 4, 256)).argsort(-1)
    other = locality.decode_trace(experts[..., :8].astype(np.uint16), 256)  # repeats nothing
    wrong = page_cache.replayed(samples, sizes, costs, other)
    assert (wrong.hit_rate - wrong.replayed_hit_rate).abs().max() > 0.1
