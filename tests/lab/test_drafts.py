"""The lab's side of drafting: what it times is the same text, its counters add up, and what it shows is drawn."""

import json
import re

import families
import numpy as np
import pytest
from recurrent import build, ids

import moelab
from moelab.lab import records as results
from moelab.lab.experiments import drafts as draft
from moelab.lab.experiments import rollback as undo
from moelab.lab.texts import heldout_starts
from moelab.replay import locality as routing
from moelab.streaming.record import Trace


class Words:
    """A tokenizer as far as the lab asks."""

    def encode(self, text):
        return [int(t) for t in text.split()]


PROMPTS = [" ".join(map(str, ids(i, 6)[0].tolist())) for i in range(2)]


@pytest.fixture
def streamed(tmp_path):
    path = families.write_checkpoint("qwen3_5_moe", tmp_path / "m", "affine4")
    model, _ = moelab.streaming.model.load_model(path, moelab.StreamConfig(mode="fused", slots=4))
    with model:
        yield model


def test_compare(streamed):
    def oracle(prompt, text):
        return draft.OracleDraft([*prompt, *text], 0.7)

    compared = draft.compare(streamed, Words(), oracle, [0, 3, "auto"], PROMPTS, 24, 2)
    sums = draft.summary(compared)
    assert set(sums) == {"mlx-lm", "0", "3", "auto"} and all(s["same"] for s in sums.values())
    assert sums["mlx-lm"]["ratio"]["median"] == 1 and sums["0"]["tau"] == 1
    assert 1.5 < sums["3"]["tau"] <= 4 and sum(sums["3"]["histogram"].values()) > 5
    perfect = draft.drafted(
        streamed,
        [1, 2],
        draft.OracleDraft([1, 2, *draft.undrafted(streamed, [1, 2], 24)["tokens"]], 1.0),
        3,
        24,
    )
    assert all(accepted == drafted for drafted, accepted, *_ in perfect["rounds"])
    record = {**compared, "summary": sums, "model": "m", "draft": "oracle", "cache_state": "warm"}
    assert draft.report(record).count("same") == 4


def test_a_long_run_accounts_for_every_position(streamed):
    out = draft.soak(streamed, [3, 1, 4, 1, 5], draft.LookupDraft(), 3, 120, every=40)
    assert out["positions"] == out["expected"] and out["tokens"] == [40, 80, 120]
    assert out["active_nbytes"][-1] - out["active_nbytes"][0] < 5e6


def test_passes_and_union(streamed):
    text = ids(5, 60)[0].tolist()
    timed = draft.passes(streamed, text, [1, 4], 3)
    assert [len(v) for v in timed.values()] == [3, 3]
    assert all(s["tokens"] == m and s["pass_s"] > 0 for m, v in timed.items() for s in v)
    trace = Trace(np.arange(24).reshape(6, 2, 2) % 8, np.array(["decode"] * 6), np.arange(6))
    assert draft.union(trace, [1, 2])[1] == ([2.0, 2.0], pytest.approx(2.0))
    assert draft.routing(streamed, text[:5]).experts.shape[0] == 5


def test_passes_in_turn(streamed):
    timed = draft.passes_in_turn({2: streamed, 1: streamed}, ids(5, 60)[0].tolist(), [1, 4], 4)
    assert {k: [len(v) for v in by_m.values()] for k, by_m in timed.items()} == {
        2: [6, 6],
        1: [6, 6],
    }
    assert draft.pass_parts(timed).keys() == {"fixed_s", "position_s", "expert_s"}


def test_drift_and_ways():
    model, text = build("qwen3_5_moe"), ids(6, 80)[0].tolist()
    drifted = undo.drift(model, text, 4, lambda i: i % 5, 5)
    assert max(drifted["exact"][0]) < 1e-5 < min(drifted["restored only"][0][1:4])
    assert min(drifted["left in the state"][0][:3]) > 1e-3
    assert undo.tokens_until_wrong(model, text[:20], 4, 2, 12)["exact"] == 12
    timed, held = undo.ways(model, text, 6, 3, 2)
    assert (
        all(len(t) == 2 for t in timed.values())
        and held["no undo"] == 0 < held["restore"] < held["states"]
    )


CODE = moelab.Trace.load(moelab.DATA / "traces" / "code.npz").decode
PARTS = {"fixed_s": 0.01, "position_s": 0.006, "expert_s": 0.0005, "expert_nbytes": 1e6}


def test_dials():
    look = draft.dial(PARTS, CODE)
    at = dict(length=4, accept=0.8, slots=64, GBs=3.0, top_k=8)
    assert "1.00 times" not in look(**at, arithmetic="free").layout.title.text
    fig = undo.memory_dial({"m": (6, 8, 4, 64)})(model="m", positions=8)
    assert fig.data[0].y[2] == pytest.approx(9 * 6 * 8 * 64 * 64 * 4 / 1e6)


def test_only_the_experts_part_of_a_pass_follows_top_k():
    """The dial took the whole of a position, attention and all, for the experts' part."""
    without_experts = {**PARTS, "expert_s": 0.0}
    for parts, same in ((PARTS, False), (without_experts, True)):
        fig = [
            draft.dial(parts, CODE)(length=8, accept=0.8, slots=64, GBs=1e9, top_k=k)
            for k in (8, 2)
        ]
        assert np.allclose(fig[0].data[0].y, fig[1].data[0].y) is same
    ratio = draft.dial(PARTS, CODE)(length=8, accept=1.0, slots=64, GBs=1e9, top_k=2).data[0].y
    assert ratio[4] == pytest.approx(5 * 0.017 / (0.01 + 5 * 0.007), rel=1e-3)


def test_the_dial_reads_what_the_trace_reads():
    """It took routing for uniform: 56 experts for 16 positions where text needs 46."""
    free = dict(length=15, accept=1.0, GBs=1.0, top_k=8, arithmetic="free")
    for slots in (8, 16, 64):
        reads = [routing.missing(CODE, m, slots, skip=len(CODE) // 4).sum() for m in (1, 16)]
        s = [PARTS["fixed_s"] + n * 1e-3 for n in reads]
        got = draft.dial(PARTS, CODE)(slots=slots, **free).data[0].y[15]
        assert got == pytest.approx(16 * s[0] / s[1])
    assert draft.reads(CODE, 0)(16) / 8 == pytest.approx(46, abs=1)


def test_fewer_experts_a_token_read_about_what_the_dial_says():
    """Its assumption against the model itself at top-4; in proportion to K it is far off."""
    path, traces = moelab.DATA / "models" / "tiny-moe", {}
    for k in (8, 4):
        model, tokenizer = moelab.load(path, moelab.StreamConfig(mode="resident", top_k=k))
        with model:
            text = "".join(heldout_starts(path, 2, 120, tokenizer))
            traces[k] = draft.routing(model, tokenizer.encode(text))
    for slots in (0, 8, 16):
        for m in (1, 4, 16):
            want = draft.reads(traces[4], slots)(m)
            assert draft.reads(traces[8], slots, 4)(m) == pytest.approx(want, rel=0.25)
    assert draft.reads(traces[8], 0)(16) * 4 / 8 < 0.8 * draft.reads(traces[4], 0)(16)


def test_the_parts_of_a_pass_are_found_again():
    timed = {
        k: {
            m: [{"pass_s": s * (0.01 + m * (0.006 + k * 5e-4))} for s in (0.9, 1.0, 1.1)]
            for m in (1, 4, 16)
        }
        for k in (8, 1)
    }
    assert draft.pass_parts(timed) == pytest.approx(
        {k: PARTS[k] for k in ("fixed_s", "position_s", "expert_s")}
    )


def test_the_takeaway_of_notebook_07_is_recorded():
    """Each of its numbers follows from a record of data/results."""
    cells = json.loads(
        (moelab.DATA.parent / "notebooks" / "07_speculative_streaming.ipynb").read_text()
    )["cells"]
    text = "".join(cells[-1]["source"]).partition("**Limits.**")[0]
    lookup = draft.summary(results.recorded("cpu_drafts")["runs"]["lookup, 64 slots"])
    gpu = {
        k: draft.summary(s)
        for k, s in results.recorded("cuda_h100_drafts")["sections"].items()
        if k.endswith("48_slots")
    }
    said = []
    for s in (lookup, gpu["draft_48_slots"], gpu["dflash_48_slots"]):
        for variant in ("7", "auto"):
            r = s[variant]["ratio"]
            said.append(f"{r['median']:.2f} [{r['p25']:.2f} - {r['p75']:.2f}]")
    assert all(words in text for words in said), said
    assert re.findall(r"\d+\.\d+(?: \[.*?\])?", text) == said, "a number that no record has"


def test_bad_input(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected files of text"):
        heldout_starts(tmp_path, 1, 8, Words())
