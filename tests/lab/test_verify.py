"""Verify passes: what is timed is the text's own, and the dial reads what the trace reads."""

import numpy as np
import pytest
from recurrent import ids

import moelab
from moelab.lab.experiments import verify
from moelab.lab.experiments.verify import Pass, PassParts
from moelab.lab.figures import drafts as figures
from moelab.lab.texts import heldout_starts
from moelab.replay import locality
from moelab.streaming.trace import Trace

CODE = moelab.Trace.load(moelab.DATA / "traces" / "code.npz").decode
PARTS = PassParts(fixed_s=0.01, position_s=0.006, expert_s=0.0005, expert_nbytes=1_000_000)


def test_passes(streamed):
    timed = verify.passes(streamed, ids(5, 60)[0].tolist(), [1, 4], 3)
    assert {m: len(samples) for m, samples in timed.items()} == {1: 3, 4: 3}
    assert all(p.pass_s > 0 and p.hits + p.misses > 0 for v in timed.values() for p in v)
    assert "n=3" in figures.passes_chart({"here": timed}, "m").layout.title.subtitle.text
    assert figures.reads_chart(timed, 2, "m").data[0].y[1] > 0


def test_union_and_routing(streamed):
    trace = Trace(np.arange(24).reshape(6, 2, 2) % 8, np.array(["decode"] * 6), np.arange(6))
    found = verify.union(trace, [1, 2])
    assert found.layers[1] == [2.0, 2.0] and found.uniform[1] == pytest.approx(2.0)
    assert "distinct" in figures.union_chart(found, "made up").layout.yaxis.title.text
    assert len(verify.routing(streamed, ids(5, 5)[0].tolist())) == 5


def test_passes_in_turn(streamed):
    models = {2: streamed, 1: streamed}
    timed = verify.passes_in_turn(models, ids(5, 60)[0].tolist(), [1, 4], 4)
    counts = {k: [len(v) for v in by_m.values()] for k, by_m in timed.items()}
    assert counts == {2: [6, 6], 1: [6, 6]}
    assert verify.pass_parts(timed, 7).expert_nbytes == 7


def test_the_parts_of_a_pass_are_found_again():
    timed = {
        k: {
            m: [Pass(s * (0.01 + m * (0.006 + k * 5e-4))) for s in (0.9, 1.0, 1.1)]
            for m in (1, 4, 16)
        }
        for k in (8, 1)
    }
    found = verify.pass_parts(timed, PARTS.expert_nbytes)
    for name in ("fixed_s", "position_s", "expert_s"):
        assert getattr(found, name) == pytest.approx(getattr(PARTS, name))


def test_the_dial():
    look = figures.dial(PARTS, CODE)
    fig = look(length=4, accept=0.8, slots=64, GBs=3.0, top_k=8, arithmetic=figures.FREE)
    assert "1.00 times" not in fig.layout.title.text
    assert fig.data[0].y[0] == 1 and len(fig.data[0].y) == figures.LONGEST + 1


def test_only_the_experts_part_of_a_pass_follows_top_k():
    """The dial took the whole of a position, attention and all, for the experts' part."""
    without_experts = PassParts(PARTS.fixed_s, PARTS.position_s, 0.0, PARTS.expert_nbytes)
    at = dict(length=8, accept=0.8, slots=64, GBs=1e9)
    for parts, same in ((PARTS, False), (without_experts, True)):
        fig = [figures.dial(parts, CODE)(top_k=k, **at) for k in (8, 2)]
        assert np.allclose(fig[0].data[0].y, fig[1].data[0].y) is same
    ratio = figures.dial(PARTS, CODE)(top_k=2, **{**at, "accept": 1.0}).data[0].y
    assert ratio[4] == pytest.approx(5 * 0.017 / (0.01 + 5 * 0.007), rel=1e-3)


def test_the_dial_reads_what_the_trace_reads():
    """It took routing for uniform: 56 experts for 16 positions where text needs 46."""
    free = dict(length=15, accept=1.0, GBs=1.0, top_k=8, arithmetic=figures.FREE)
    for slots in (8, 16, 64):
        reads = [locality.missing(CODE, m, slots, skip=len(CODE) // 4).sum() for m in (1, 16)]
        s = [PARTS.fixed_s + n * 1e-3 for n in reads]
        got = figures.dial(PARTS, CODE)(slots=slots, **free).data[0].y[15]
        assert got == pytest.approx(16 * s[0] / s[1])
    assert verify.reads(CODE, 0)(16) / 8 == pytest.approx(46, abs=1)


def test_fewer_experts_a_token_read_about_what_the_dial_says():
    """Its estimate against the model itself; in proportion to K it is far off."""
    path, traces = moelab.DATA / "models" / "tiny-moe", {}
    for k in (8, 4, 2):
        model, tokenizer = moelab.load(path, moelab.StreamConfig(mode="resident", top_k=k))
        with model:
            text = "".join(heldout_starts(path, 2, 120, tokenizer))
            traces[k] = verify.routing(model, tokenizer.encode(text))
    for k in (4, 2):
        for slots in (0, 8, 16, 48):
            for m in (1, 4, 16):
                want = verify.reads(traces[k], slots)(m)
                rel = 0.25 if k == 4 else 0.3
                assert verify.reads(traces[8], slots, k)(m) == pytest.approx(want, rel=rel)
    assert verify.reads(traces[8], 0)(16) * 4 / 8 < 0.8 * verify.reads(traces[4], 0)(16)


def test_a_thinned_trace_keeps_experts_of_the_token():
    thin = verify.thinned(CODE, 3)
    assert thin.experts.shape == (*CODE.experts.shape[:2], 3)
    for token, kept in zip(CODE.experts[:5, 0], thin.experts[:5, 0]):
        assert set(kept.tolist()) < set(token.tolist()) and len(set(kept.tolist())) == 3
    assert verify.thinned(CODE, CODE.experts.shape[2]) is CODE
