"""The recorded sweeps beside their replay, and what notebook 03 shows of them."""

from dataclasses import replace

import numpy as np
import pytest

from moelab.lab import limit
from moelab.lab.experiments import page_cache, sweep
from moelab.lab.experiments.sweep_record import Point, Runs, Tokens
from moelab.lab.figures import page_cache as figures
from moelab.lab.plots import style
from moelab.replay import locality
from moelab.replay.costs import Costs

CODE, PROSE, PINNED = "cpu_sweep_35b", "cpu_sweep_35b_prose", "cpu_sweep_pinned"
FLAT = locality.Locality((0.9,), (0.2,), (2.0,))


@pytest.fixture(scope="module", params=[CODE, PROSE])
def record(request):
    return sweep.recorded(request.param)


@pytest.fixture(scope="module")
def code():
    return sweep.recorded(CODE)


@pytest.fixture(scope="module")
def found(code):
    return {
        "like code": page_cache.slowdown(FLAT, code.median_costs, code.sizes, [0.4, 0.8], 80, 4)
    }


def test_a_record_is_whole(record):
    assert sum(n is not None for n in record.limits) >= 2
    for n in record.limits:
        slots = [r.point.slots for r in page_cache.curve(record, n)]
        assert len(slots) >= 3 and slots == sorted(slots)
    assert min(n for n in record.limits if n) * 3 < record.sizes.checkpoint_nbytes
    assert all(len(r.reads.seconds) >= 5 for r in record.rows())
    assert len(record.costs) >= 2


def test_the_replay_hits_what_the_engine_hit_and_reads_what_the_disk_brought(record):
    compared = page_cache.compare(record)
    for c in compared:
        assert c.predicted_hit_rate == pytest.approx(c.row.hit_rate, abs=1e-9)
    off = [abs(c.disk_error) for c in compared if c.row.point.limit_nbytes]
    assert np.median(off) < 0.05 and max(off) < 0.25


def test_the_replay_is_near_the_measured_time(record):
    a = page_cache.agreement(page_cache.compare(record))
    assert a.median_error <= page_cache.ERROR_BOUND, a


@pytest.mark.parametrize("name", [CODE, PINNED])
def test_with_its_arithmetic_every_setting_wrote_the_same(name):
    record = sweep.recorded(name)
    assert record.same_tokens()
    first = record.samples[0].measured
    other = replace(first, decode=replace(first.decode, tokens=[-1]))
    record.samples.append(replace(record.samples[0], measured=other))
    assert not record.same_tokens()


def test_the_slow_middle_is_in_the_record(code):
    e = page_cache.extremes(code, code.limits[1])
    # Half-way the SSD is read more than with the fewest slots, and the most slots are the fastest.
    assert e.bytes_ratio > 1.5 and e.most_over_fewest < 0 and e.most_over_best < 0.05
    free = page_cache.extremes(code, None)
    assert free.most == free.best and np.isnan(free.bytes_ratio)


def test_pinning_recorded():
    """A trace of other code pins fewer hits than the text's own; no replay pins."""
    record = sweep.recorded(PINNED)
    hits = {(r.point.slots, r.point.pinned_by): r.hit_rate for r in record.rows()}
    assert set(hits) == {(8, ""), (32, ""), (8, "code"), (8, "tests")}
    assert hits[8, ""] < hits[8, "code"] < hits[32, ""] < hits[8, "tests"]
    assert [c.row.point.slots for c in page_cache.compare(record)] == [8, 32]
    seconds = page_cache.pinning(record)
    assert list(seconds)[:2] == ["8 slots", "32 slots"]
    assert all(len(s) == 5 for s in seconds.values())


def test_neighbours_count_only_where_their_quartiles_are_apart(code):
    row = code.rows()[0]

    def compared(slots, low, high, predicted):
        runs = Runs({0: low, 1: (low + high) / 2, 2: high})
        return page_cache.Compared(
            replace(row, point=Point(slots, 10)), runs, predicted, row.hit_rate, 0.0
        )

    a = page_cache.agreement([
        compared(8, 1.0, 1.2, 1.1),
        compared(16, 1.0, 1.3, 1.0),
        compared(32, 2.0, 2.2, 2.5),
        compared(64, 1.0, 1.1, 3.0),
    ])  # fmt: skip
    assert (a.neighbours, a.same_order) == (2, 1)
    assert a.worst_error == pytest.approx(3.0 / 1.05 - 1)


def test_the_sliders_go_to_their_ends(code):
    few = locality.Locality((0.5,), (0.3,), (1.5,))
    look = figures.dial(code.sizes, few, code.median_costs, 60)
    for memory, slots, policy, skew, ssd, work in (
        (25, 8, "lru", 0.0, 0.5, 0),
        (95, 256, "belady", 1.5, 8.0, 200),
        (60, 60, "lfu", 0.5, 1.0, 20),
    ):
        fig = look(memory, slots, policy, skew, ssd, work)
        assert "ms a token" in fig.layout.title.text and style.words(fig)
        assert np.isfinite(fig.data[0].y).all()
    slow, fast = (look(60, 60, "lru", 0.5, ssd, 0).data[0].y for ssd in (0.5, 4.0))
    assert (np.array(slow) > np.array(fast)).all()


def test_cheaper_copies_make_the_middle_slower(code):
    few = locality.Locality((0.4,), (0.3,), (1.5,))
    dear, free = (
        page_cache.slowdown(few, Costs(0, 0, copy, 1e-9), code.sizes, [0.8], 160)
        for copy in (1e-9, 0)
    )
    assert free.slowest[0] > dear.slowest[0]
    assert free.bytes == dear.bytes and free.bytes[0] > 1


def test_without_a_way_to_limit_memory_the_live_sweep_says_so(monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise limit.NoLimit("Cannot limit memory here: because.")

    monkeypatch.setattr(page_cache, "sweep", refuse)
    monkeypatch.setattr(page_cache, "points", lambda *a: [])
    assert page_cache.live("model", [1], [8], None, 1, Tokens()) is None
    assert "No live sweep" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["reads", "decode"])
def test_advice_is_within_5_percent_of_the_best_point_of_the_sweep(record, part):
    if part == "decode" and not record.tokens.decode:
        pytest.skip("this sweep did not decode")
    found = page_cache.advised(record, part)
    assert len(found) == 2
    for f in found:
        assert f.slower <= 0.05, f


def test_every_chart_says_what_it_shows(code, found):
    roomy = code.limits[1]
    compared = page_cache.compare(code)
    policies = page_cache.replay_policies(code, roomy, [8, 97, 157], 40)
    charts = [
        figures.reads_chart(code, compared),
        figures.decode_chart(code, "MLX's kernels"),
        figures.decode_chart(sweep.recorded("cpu_sweep_35b_fast"), "moelab's kernels"),
        figures.read_ahead_chart(code),
        figures.live_chart(code),
        figures.sources_chart(code, roomy),
        figures.agreement_chart({"like code": compared}, compared, code),
        figures.slowdown_chart(found, code),
        figures.policies_chart(policies, code),
        figures.pinning_chart(sweep.recorded(PINNED)),
    ]
    assert all(style.words(fig) and fig.layout.title.text for fig in charts)
    assert policies.middle == 97 and set(policies.at_middle) == set(policies.replays)
    fast = sweep.recorded("cpu_sweep_35b_fast")
    rows = figures.verdicts(code, fast, sweep.recorded(PINNED), found, policies)
    assert [id for id, *_ in rows] == ["A5", "A6", "E1", "E4"]
    assert all(verdict == "depends on" for _, _, verdict, _ in rows)
