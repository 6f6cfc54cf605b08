"""Verify passes: what is timed is the text's own, and the model of a pass reads as a trace."""

import numpy as np
import pytest
from recurrent import ids

from moelab.lab import records
from moelab.lab.experiments import verify
from moelab.replay import locality
from moelab.streaming.trace import Trace

CODE = locality.recorded_trace("code").decode
PARTS = records.pandas().Series({"fixed_s": 0.01, "position_s": 0.006})


def test_passes(streamed):
    text = ids(5, 60)[0].tolist()
    made = verify.passes({"4 slots": streamed}, text, [1, 4], 3)
    assert list(made.groupby("positions").size()) == [3, 3] and (made.model == "4 slots").all()
    assert (made.pass_s > made.wait_s).all() and (made.bytes_read > 0).any()
    distinct = made.experts.groupby(made.positions).min() / 2  # layers
    trace = verify.routing(streamed, text)
    K = trace.experts.shape[2]
    assert distinct[1] == K and K < distinct[4] <= min(4 * K, trace.num_experts)
    with pytest.raises(ValueError, match="expected a text of 13 tokens, got 5"):
        verify.passes({"4 slots": streamed}, text[:5], [1, 4], 3)


def test_union_and_routing(streamed):
    trace = Trace(np.arange(24).reshape(6, 2, 2) % 8, np.array(["decode"] * 6), np.arange(6))
    found = verify.union(trace, [1, 2]).groupby(["variant", "positions"]).experts.mean()
    assert found["this text", 1] == 2 and found["this text", 2] == 4
    assert found["independent and uniform", 1] == pytest.approx(2.0)
    assert found["independent and uniform", 2] == pytest.approx(8 * (1 - 0.75**2))
    assert len(verify.routing(streamed, ids(5, 5)[0].tolist())) == 5


def test_the_script_writes_a_record(model_path, tmp_path, monkeypatch, capsys):
    text = ids(5, 60)[0].tolist()
    for name, value in {"POSITIONS": (1, 3), "ROUNDS": 2, "heldout_ids": lambda *_: [text]}.items():
        monkeypatch.setattr(verify, name, value)
    verify.main(str(tmp_path / "r.json"), str(model_path), "6")
    made = records.read(str(tmp_path / "r.json"), disturbed=True)
    assert made.attrs["kind"] == "passes" and made.attrs["settings"]["model"] == model_path.name
    assert made.groupby("variant").size().to_dict() == {
        f"{name}, {m} positions": 2 for name in ("resident", "6 slots") for m in (1, 3)
    }
    assert "resident" in capsys.readouterr().out


def test_the_parts_of_a_pass_are_found_again():
    rows = [
        {"positions": m, "pass_s": s * (0.01 + m * 0.006)}
        for m in (1, 4, 16)
        for s in (0.9, 1, 1.1)
    ]
    found = verify.pass_parts(records.pandas().DataFrame(rows))
    assert found.to_dict() == pytest.approx(PARTS.to_dict())


def test_free_arithmetic_that_reads_nothing_gains_all_tokens():
    made = verify.modelled(PARTS, CODE, 64, 1e-12, 0.5, verify.FREE).set_index("variant")
    best = made.loc["every draft right"]
    assert len(best) == 1 + verify.LONGEST and best.speed.tolist() == pytest.approx(best.tokens)
    assert made.loc["as set"].tokens.iloc[-1] == pytest.approx(2, abs=1e-4)
    here = verify.modelled(PARTS, CODE, 64, 1e-12, 1.0).query("variant == 'as set'").speed
    assert here.iloc[4] == pytest.approx(5 * 0.016 / (0.01 + 5 * 0.006), rel=1e-3)


def test_the_model_of_a_pass_reads_what_the_trace_reads():
    """It took routing for uniform: 56 experts for 16 positions where text needs 46."""
    for slots in (8, 16, 64):
        n = [locality.missing(CODE, m, slots, skip=len(CODE) // 4).sum() for m in (1, 16)]
        s = [PARTS.fixed_s + reads * 1e-3 for reads in n]
        made = verify.modelled(PARTS, CODE, slots, 1e-3, 1.0, verify.FREE)
        got = made[(made.variant == "as set") & (made.drafts == 15)].speed.item()
        assert got == pytest.approx(16 * s[0] / s[1])
    assert verify.reads(CODE, 0)(16) / 8 == pytest.approx(46, abs=1)
