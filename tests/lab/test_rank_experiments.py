"""Sums over ranks are timed in real ranks; a simulated SSD delays and changes nothing else."""

import os

import pytest

from moelab import DATA, StreamConfig
from moelab.lab.decode import decode
from moelab.lab.experiments import ranks
from moelab.streaming.model import load_model

LINUX = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="each rank has its cores")


@LINUX
def test_exchange():
    found = ranks.exchange({2: 2})["s"]["2"]
    assert {name: len(samples) for name, samples in found.items()} == dict.fromkeys(found, 2)
    kinds = ("evaluation", "sum", "gather")
    assert found.keys() >= {f"{kind} of {rows}" for kind in kinds for rows in ranks.ROWS}
    assert all(min(samples) > 0 for samples in found.values())


@LINUX
def test_ways_to_join():
    """Rows that are gathered or summed have one bit pattern; scores first differs by rounding."""
    found = ranks.everywhere(2, "joins_here", str(DATA / "models/tiny-moe"), 0)[0]
    gathered, summed, first = (found["ways"][how] for how in ranks.JOINS)
    assert gathered["digest"] == summed["digest"] != first["digest"]
    assert 0 < first["logits"] < 1e-4 * found["std"]
    assert gathered["text"] == summed["text"] == first["text"]


def test_a_slow_ssd():
    """A token takes its bytes' time at least, and is the same."""
    texts = []
    for rate in (None, 10e6):
        with load_model(DATA / "models/tiny-moe", StreamConfig(slots=8))[0] as model:
            if rate:
                ranks.slow(model, rate)
            found = decode(model, [1, 2, 3], 6)
            texts.append(found.tokens)
    assert found.decode_s > found.counters.bytes_read / 10e6 * 0.95
    assert texts[0] == texts[1]
