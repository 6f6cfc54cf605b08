"""Notebook 11: ranks of tiny-moe write one text; the model against the record."""

import numpy as np

from moelab import DATA, Trace
from moelab.lab.experiments import several_machines as several
from moelab.lab.figures import several_machines as figures
from moelab.lab.records import recorded


def test_ranks_of_this_machine():
    found = several.live(DATA / "models" / "tiny-moe", (1, 2), 8, 3)
    assert [len(each) for each in found.values()] == [1, 2]
    assert len({tuple(rank.tokens) for each in found.values() for rank in each}) == 1
    assert [rank.experts for each in found.values() for rank in each] == [64, 32, 32]
    assert max(rank.nbytes for rank in found[2]) < found[1][0].nbytes
    assert figures.live_chart(found, "tiny-moe", 8).layout.meta["alt"]


def test_the_model_is_near_the_record():
    points = several.checked(recorded("cpu_ranks_35b"), tokens=60)
    assert {(p.ranks, p.rate) for p in points} == {(n, r) for n in (1, 2, 4) for r in (1e8, 3e8)}
    assert max(abs(p.error) for p in points) < 0.2


def test_more_machines_read_less_and_exchange_more():
    trace = Trace.load(DATA / "traces" / "code.npz")
    one, two, four = (several.parts_122b(trace, n, 32, 3e9, 1e9, 5e-5, 0.05) for n in (1, 2, 4))
    assert one["reads"] > two["reads"] > four["reads"] and one["exchange"] == 0
    assert four["exchange"] > two["exchange"] > 0
    figure = figures.dial(trace)(4, 32, 3.0, 8, 50, 50)
    speed = sum(one.values()) / sum(four.values())
    assert f"{speed:.2f} times" in figure.layout.title.text


def test_placements():
    names = ("code", "prose")
    traces = {name: Trace.load(DATA / "traces" / f"{name}.npz") for name in names}
    found = several.placements(traces, 16, 2)
    number, trace, hot, least = (np.array(found[name])[:, 0] for name in several.PLACEMENTS)
    assert (trace < number).all() and (hot > number).all() and (least < trace).all()
