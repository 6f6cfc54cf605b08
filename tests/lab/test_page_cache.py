"""The recorded sweeps beside their replay, and what notebook 03 draws of them."""

import numpy as np
import pytest

from moelab.lab import limit
from moelab.lab import records as results
from moelab.lab.experiments import page_cache as pressure
from moelab.lab.experiments import sweep
from moelab.replay import locality as routing
from moelab.replay import pagecache

CODE, PROSE = "cpu_sweep_35b", "cpu_sweep_35b_prose"
FLAT = routing.Locality((0.9,), (0.2,), (2.0,))


@pytest.fixture(scope="module", params=[CODE, PROSE])
def record(request):
    return results.recorded(request.param)


def test_a_record_is_whole(record):
    limits = pressure.limits(record)
    assert sum(n is not None for n in limits) >= 2
    for n in limits:
        slots = [r["point"].slots for r in pressure.curve(record, n)]
        assert len(slots) >= 3 and slots == sorted(slots)
    assert min(n for n in limits if n) * 3 < record["sizes"]["checkpoint_nbytes"]
    assert all(r["reads"]["n"] >= 5 for r in sweep.summarize(record) if not r["killed"])
    assert len(record["costs"]) >= 2


def test_the_replay_hits_what_the_engine_hit_and_reads_what_the_disk_brought(record):
    off = []
    for row in pressure.compare(record):
        assert row["predicted_hit_rate"] == pytest.approx(row["hit_rate"], abs=1e-9)
        if row["point"].limit_nbytes:
            off.append(abs(row["predicted_disk"] / row["disk_per_token"] - 1))
    assert np.median(off) < 0.05 and max(off) < 0.25


def test_the_replay_is_near_the_measured_time(record):
    a = pressure.agreement(pressure.compare(record))
    assert a["median_error"] <= 0.15, a


def test_with_its_arithmetic_every_setting_wrote_the_same():
    record = results.recorded(CODE)
    with_slots = {}
    for s in record["samples"]:
        if s["slots"] and not s["killed"]:
            with_slots.setdefault(s["round"], set()).add(tuple(s["decode"]["tokens"]))
    assert len(with_slots) >= 3 and all(len(t) == 1 for t in with_slots.values())


def test_the_ridge_the_field_argues_about():
    record = results.recorded(CODE)
    roomy = max(n for n in pressure.limits(record) if n)
    v = pressure.valley(record, roomy)
    assert v["bytes"] > 1.5  # half-way the SSD is read more than with the fewest slots ...
    assert (
        v["most"][1] < v["least"][1] and v["of_best"] < 0.05
    )  # ... and with the most a token is fastest
    free = pressure.valley(record, None)
    assert free["most"] == free["best"] and np.isnan(free["bytes"])


def test_pinning_recorded():
    """The replay pins what the engine pinned; the tokens are the same with it and without; another text's hottest are not this one's."""
    record = results.recorded("cpu_sweep_pinned")
    rows = {(r["point"].slots, r["point"].pinned_by): r for r in pressure.compare(record)}
    assert set(rows) == {(8, ""), (32, ""), (8, "code"), (8, "tests")} and all(
        r["reads"]["n"] == 5 for r in rows.values()
    )
    for row in rows.values():
        assert row["same_tokens"] and row["predicted_hit_rate"] == pytest.approx(
            row["hit_rate"], abs=1e-9
        )
        assert row["predicted_disk"] == pytest.approx(row["disk_per_token"], rel=0.05)
    assert rows[8, "code"]["hit_rate"] < rows[32, ""]["hit_rate"] < rows[8, "tests"]["hit_rate"]
    seconds = pressure.pinning(record)
    assert list(seconds)[:2] == ["8 slots", "32 slots"] and all(
        len(s) == 5 for s in seconds.values()
    )


def test_pinned_by_itself_is_an_upper_bound_of_pinning():
    a, b = (routing.synthesize(FLAT, 60, 2, 16, 4, seed) for seed in (0, 1))
    hits = pressure.pinned_hits({"a": a, "b": b}, 8, 30)
    assert set(hits["a"]) == {"lru", "lfu", "hindsight", "its beginning", "by b"}
    assert all(h["hindsight"] > h[f"by {o}"] for h, o in ((hits["a"], "b"), (hits["b"], "a")))


def test_neighbours_count_only_where_their_quartiles_are_apart():
    def row(slots, p25, p75, measured, predicted):
        return {
            "point": sweep.Point(slots, 10), "reads": {"p25": p25, "p75": p75}, "token_s": measured, "predicted_s": predicted,
            "error": predicted / measured - 1,
        }  # fmt: skip

    rows = [
        row(8, 1.0, 1.2, 1.1, 1.1),
        row(16, 1.1, 1.3, 1.2, 1.0),
        row(32, 2.0, 2.2, 2.1, 2.5),
        row(64, 1.0, 1.1, 1.05, 3.0),
    ]
    a = pressure.agreement(rows)
    assert (a["neighbours"], a["same_sign"]) == (2, 1)
    assert a["worst_error"] == pytest.approx(3.0 / 1.05 - 1)


def test_the_dials_go_to_their_ends():
    sizes, costs = results.recorded(CODE)["sizes"], pressure.costs_of(results.recorded(CODE))
    look = pressure.dial(sizes, routing.Locality((0.5,), (0.3,), (1.5,)), costs, 60, 30)
    for memory, slots, policy, skew, ssd, work in (
        (25, 8, "lru", 0.0, 0.5, 0),
        (95, 256, "belady", 1.5, 8.0, 200),
        (60, 60, "lfu", 0.5, 1.0, 20),
    ):
        fig = look(memory, slots, policy, skew, ssd, work)
        assert "ms a token" in fig.layout.title.text and fig.layout.meta["alt"]
        assert np.isfinite(fig.data[0].y).all()
    slow, fast = (look(60, 60, "lru", 0.5, ssd, 0).data[0].y for ssd in (0.5, 4.0))
    assert (np.array(slow) > np.array(fast)).all()


def test_the_ridge_is_higher_where_copies_are_cheap():
    sizes = results.recorded(CODE)["sizes"]
    flat, dear = routing.Locality((0.4,), (0.3,), (1.5,)), pagecache.Costs(0, 0, 1e-9, 1e-9)
    deep = pressure.depth(
        {"dear": (flat, dear), "free": (flat, pagecache.Costs(0, 0, 0, 1e-9))},
        sizes,
        [0.8],
        160,
        80,
    )
    assert deep["free"]["ridge"][0] > deep["dear"]["ridge"][0]
    assert deep["free"]["bytes"] == deep["dear"]["bytes"] and deep["free"]["bytes"][0] > 1


def test_without_a_way_to_limit_memory_the_live_sweep_says_so(monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise limit.NoLimit("Cannot limit memory here: because.")

    monkeypatch.setattr(sweep, "sweep", refuse)
    monkeypatch.setattr(sweep, "points", lambda *a: [])
    assert pressure.live("model", [1], [8], None) is None
    assert "No live sweep" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["reads", "decode"])
def test_advice_is_within_5_percent_of_the_best_point_of_the_sweep(record, part):
    if part == "decode" and not record["decode"]:
        pytest.skip("this sweep did not decode")
    found = pressure.advised(record, part)
    assert len(found) == 2
    for f in found:
        assert f["slower"] <= 0.05, f
