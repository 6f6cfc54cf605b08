"""Drafts against none: the same text, counters that add up, records that are read as written."""

import json
import time

import mlx.core as mx
import pytest
from recurrent import ids

import moelab
from moelab.lab import records
from moelab.lab.experiments import drafts, verify
from moelab.lab.figures import drafts as figures
from moelab.lab.texts import heldout_starts
from moelab.speculation.drafts import LookupDraft
from moelab.speculation.generate import speculative_generate_step


class Words:
    """A tokenizer as far as the lab asks."""

    def encode(self, text):
        return [int(t) for t in text.split()]


PROMPTS = [" ".join(map(str, ids(i, 6)[0].tolist())) for i in range(2)]


def oracle(accept):
    return lambda prompt, text: drafts.OracleDraft([*prompt, *text], accept)


def test_compare(streamed):
    compared = drafts.compare(streamed, Words(), oracle(0.7), [0, 3, "auto"], PROMPTS, 24, 2)
    assert set(compared.variants) == {"mlx-lm", "0", "3", "auto"}
    assert all(compared.same(name) for name in compared.variants)
    assert compared.ratios("mlx-lm") == [1, 1] and compared.tau("0") == 1
    assert 1.5 < compared.tau("3") <= 4 and len(compared.committed("3")) > 5
    assert set(compared.speeds()) == {"3 drafts", "policy"}
    assert drafts.report(compared).count("same") == 4


def test_texts_that_are_sampled_are_the_same_too(streamed):
    greedy, sampled = (
        drafts.compare(streamed, Words(), oracle(0.7), [0, 3, "auto"], PROMPTS, 24, 2, temp=temp)
        for temp in (0.0, 1.0)
    )
    assert all(sampled.same(name) for name in sampled.variants)
    assert "at temperature 1" in drafts.report(sampled) and "greedy" in drafts.report(greedy)


def test_a_perfect_draft_is_always_accepted(streamed):
    text, _ = drafts.undrafted(streamed, [1, 2], 24)
    written, sample = drafts.drafted(streamed, [1, 2], oracle(1.0)([1, 2], text), 3, 24)
    assert written == text and all(r.accepted == r.drafted for r in sample.rounds)


def test_a_record_is_read_as_it_was_written(streamed, tmp_path):
    compared = drafts.compare(streamed, Words(), oracle(0.7), [3, "auto"], PROMPTS, 8, 1)
    records.save(tmp_path / "r.json", compared)
    kept = json.loads((tmp_path / "r.json").read_text())
    assert {"kind", "machine", "tokens", "runs", "variants", "summary"} <= set(kept)
    assert drafts.Comparison.from_json(kept) == compared


def test_committed(streamed):
    makers = {"oracle": oracle(0.7), "lookup": lambda prompt, text: LookupDraft()}
    found = drafts.committed(streamed, Words(), makers, PROMPTS, 3, 12)
    assert 1 < sum(found["oracle"]) / len(found["oracle"]) <= 4 and found["lookup"]


def test_a_long_run_accounts_for_every_position(streamed):
    prompt, tokens, every = [3, 1, 4, 1, 5], 120, 40
    before, rounds, active = verify.counters(streamed), {}, []
    steps = speculative_generate_step(
        mx.array(prompt), streamed, LookupDraft(), num_draft_tokens=3, max_tokens=tokens
    )
    for n, (_, _, _, r) in enumerate(steps, 1):
        rounds[r.number] = r.drafted
        if n % every == 0:
            active.append(mx.get_active_memory())
    read = verify.since(streamed, before)["tokens"]
    assert read == len(prompt) - 1 + sum(1 + d for d in rounds.values())
    assert len(active) == 3 and active[-1] - active[0] < 5e6


def test_the_clock_starts_with_the_first_round(streamed):
    class Slow(LookupDraft):
        def bind(self, model, cache=None):
            super().bind(model, cache)
            time.sleep(0.5)

    begin = time.perf_counter()
    _, sample = drafts.drafted(streamed, [1, 2], Slow(), 2, 4)
    assert sample.decode_s < time.perf_counter() - begin - 0.4


CPU = drafts.DraftsRecord.from_json(records.recorded("cpu_drafts"))
GPU = drafts.DraftsRecord.from_json(records.recorded("cuda_h200_engine"))
H200 = [
    drafts.DraftsRecord.from_json(e)
    for e in records.recorded("cuda_h200_drafts")["environments"].values()
]


def test_recorded_runs():
    assert len(CPU.comparisons) == 6 and not CPU.passes
    assert CPU.comparisons["lookup, 48 slots"].label == "lookup, 48 slots"
    assert {"tiny-dflash, 48 slots", "tiny-draft, resident"} <= set(GPU.comparisons)
    assert verify.growth(GPU.passes["48 slots, loop"]) > 2
    assert "H200" in figures.gpu_details(GPU, *H200)
    assert set(CPU.only("lookup")) == {f"lookup, {n} slots" for n in (48, 16)}


def test_charts_and_verdicts():
    trace = moelab.Trace.load(moelab.DATA / "traces" / "code.npz").decode
    fig = figures.speeds_chart(CPU.only("lookup"), "recorded", CPU.machine)
    assert "1.75" in fig.layout.meta["alt"] and fig.layout.meta["finding"]
    fig = figures.break_even_chart({"a": [1, 4]}, GPU.passes["48 slots, kernel"], 7, "note")
    assert "commits 2.5" in fig.layout.title.text.replace("<br>", " ")
    rows = figures.verdicts(
        verify.union(trace, [1, 16]),
        GPU.passes["resident, kernel"],
        31,
        {"lookup": CPU.comparisons["lookup, 16 slots"]},
        "lookup",
        GPU.comparisons["tiny-dflash, 48 slots"],
    )
    assert [row[0] for row in rows] == ["A7", "D3", "D5", "E5"]
    assert "recorded GPU 7 drafts 2.40, policy 2.01 (1, 1 of 5 texts equal)" in rows[0][3]
    assert rows[2][3].endswith("15 drafts 1.97 (1, 1, 2, 1, 1 of 5 texts equal)")
    assert "lookup is fastest with 7 drafts" in rows[3][3]


def test_tables_of_the_recorded_gpu():
    streamed = {"streamed": GPU.comparisons["tiny-dflash, 48 slots"]}
    assert "2.401 [1.797 - 2.482] n=5  1 of 5 texts equal" in figures.speeds_table(streamed)
    assert figures.policy_table(streamed).endswith(" 98%, 100%, 2%, 95%, 100%")
    assert all(c.same("mlx-lm") for c in GPU.comparisons.values())


def test_bad_input(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected files of text"):
        heldout_starts(tmp_path, 1, 8, Words())
