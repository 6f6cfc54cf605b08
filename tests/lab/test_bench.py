"""Timing, bench and costs: what they compute and keep. Nothing here asserts a speed."""

import math
import time

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step

import moelab
from moelab import DATA, StreamConfig, record, stats
from moelab.__main__ import main
from moelab.lab import FAST, limit, records
from moelab.lab.arguments import Evicting, parse_modes
from moelab.lab.decode import OracleDraft, decode, decode_drafted
from moelab.lab.experiments import bench
from moelab.lab.experiments import costs as cost
from moelab.repack import repack
from moelab.replay import eviction
from moelab.replay.costs import Costs
from moelab.speculation.drafts import LookupDraft


def test_modes_have_their_own_fields_and_without_slots_no_other_reads():
    text = "buffers, fused/readers=1/slots=32, fused/policy=lfu"
    modes = parse_modes(text, StreamConfig(slots=20, readers=2))
    made = bench.crossed(modes, [10**8], direct=(True,))
    (_, resident), (name, fused), (_, by_use) = made.items()
    assert name == "fused/readers=1/slots=32, 100 MB, past the page cache"
    assert fused.config == StreamConfig(mode="fused", slots=32, readers=1, reads="direct")
    assert by_use.config == Evicting(slots=20, readers=2, reads="direct", policy="lfu")
    assert by_use.facts["policy"] == "lfu" and "policy" not in fused.facts
    assert (resident.config.mode, resident.limit_nbytes) == ("resident", None)


def test_decode_writes_what_mlx_lm_writes(model_path):
    model, tok = mlx_lm.load(str(model_path))
    model.set_dtype(mx.float32)
    ids = tok.encode("def f(x):")
    theirs = [int(t) for t, _ in generate_step(mx.array(ids), model, max_tokens=15)]
    called, calls = [], ("before_prompt", "before_clock", "before_token")
    told = {name: lambda name=name: called.append(name) for name in calls}
    assert decode(model, ids, tokens=10, warmup=4, **told).tokens == theirs
    assert called == [calls[0], *4 * [calls[2]], calls[1], *10 * [calls[2]]]


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_text_is_fed_in_place_of_greedy_tokens(streamed, warmup):
    prompt, fed = [3, 1, 4, 1], [5, 9, 2, 6, 5, 3, 5, 8, 9]
    ids = prompt + fed
    with record(streamed) as trace:
        got = decode(streamed, prompt, 9 - warmup, warmup, feed=fed)
    assert stats(streamed).decode.tokens == 9 - warmup
    n = len(prompt) - 1  # the prompt's last token is read by itself
    assert trace.tokens.tolist()[: len(ids)] == ids
    assert trace.phase.tolist()[: len(ids)] == ["prefill"] * n + ["decode"] * 10
    best = mx.argmax(streamed(mx.array([ids]))[0], axis=-1).tolist()
    assert got.tokens == best[n:] and best[n:-1] != fed, "the text is not the greedy one"


def test_the_clock_starts_after_the_draft_is_ready(streamed):
    class Slow(LookupDraft):
        def bind(self, model, cache=None):
            super().bind(model, cache)
            time.sleep(0.5)

    begin = time.perf_counter()
    ran = decode_drafted(streamed, [1, 2], Slow(), 2, 4)
    assert ran.decode_s < time.perf_counter() - begin - 0.4


def test_rounds_on_a_gpu_accept_as_many_drafts_resident_as_streamed():
    """Streaming changes no text. Only rounding makes a text differ from the one without drafts."""
    made = records.read("cuda_drafts_dflash").query("num_drafts in ('1', '3', '7', '15')")
    for _, rounds in made.groupby(["num_drafts", "round"]):
        assert len(rounds) == 3 and rounds.committed.map(tuple).nunique() == 1


@pytest.mark.parametrize("temp, lengths", [(0.0, (0, 3, "auto")), (0.7, (3,))])
def test_a_drafted_text_is_the_undrafted_one_and_its_rounds_add_up(model_path, temp, lengths):
    variants = bench.crossed({"fused": StreamConfig(slots=8)}, drafts=("oracle",), lengths=lengths)
    made = bench.measure(model_path, variants, tokens=12, runs=1, warmup=3, temp=temp)
    assert set(records.same_tokens(made, "fused").values()) == {(1, 1)}
    assert made.tokens.map(len).eq(1 + 3 + 12).all() and (made.decode_s > 0).all()
    three = made[made.variant == "fused, 3 drafts"]
    assert (three.accepted <= three.drafted).all() and (three.num_drafts == "3").all()
    if not temp:  # the oracle knows the greedy text
        assert 4 * three.accepted.sum() > three.drafted.sum()
        assert three.committed.map(sum).between(1, 12).all()
        assert not made[made.variant == "fused, 0 drafts"].drafted.any()


def test_guesses_of_a_given_quality_for_a_text_that_is_fed(random_tiny_moe):
    """The target reads the trace's tokens and chooses as without drafts, whatever is drafted."""
    drafts, code = ("oracle:0.5", "oracle:1", "oracle:0"), DATA / "traces" / "code.npz"
    variants = bench.crossed({"fused": StreamConfig(slots=64)}, drafts=drafts, lengths=(3, "auto"))
    amount = {"tokens": 40, "runs": 1, "warmup": 2, "feed": f"{code}:16"}
    made = bench.measure(random_tiny_moe, variants, **amount)
    assert made.prompt_tokens.eq(16).all() and len(made) == 7
    assert set(records.same_tokens(made, "fused").values()) == {(1, 1)}
    three = made[made.num_drafts == "3"].set_index("draft")
    assert three.tau["oracle:1"] > 3.5 and three.tau["oracle:0"] == 1
    assert 1.3 < three.tau["oracle:0.5"] < 2.7, "1.875 expected"


def test_the_oracles_guess_for_a_place_does_not_depend_on_who_asks():
    text = np.random.default_rng(0).integers(0, 9, 4000)

    def guesses(n, seed=1):
        """Return the guesses of a round after each place of the text."""
        draft, made = OracleDraft(text, 0.7, seed), []
        draft.bind(None)
        for last in text[:3000].tolist():
            made.append(draft.propose(last, n, None).tolist())
            draft.extend(mx.array([last]))
        return np.array(made)

    three, after = guesses(3), np.stack([text[i : i + 3000] for i in (1, 2, 3)], axis=-1)
    right = three == after
    assert (guesses(1) == three[:, :1]).all() and (guesses(3, seed=2) != three).any()
    assert np.abs(right.mean(0) - 0.7 ** np.arange(1, 4)).max() < 0.03
    assert (right[:, 1:] <= right[:, :-1]).all(), "nothing is right behind a wrong one"


@pytest.mark.parametrize("together, runs", [(True, 2), (False, 1)])
def test_bench(model_path, together, runs, monkeypatch):
    monkeypatch.setattr(bench, "memory_available", lambda: together * 10**12)
    seen, base = [], StreamConfig(slots=8, kernels="mlx")
    keep = lambda r: seen.append((len(r), r.attrs["partial"]))  # noqa: E731
    amount = {"tokens": 6, "runs": runs, "warmup": 2, "on_round": keep}
    r = bench.measure(model_path, "resident,serial,fused", base, **amount)
    assert seen == [(3 * i, True) for i in range(1, runs + 1)] and "partial" not in r.attrs
    assert all(len(tokens) == 9 for tokens in r.tokens) and all(r.decode_tokens == 6)
    assert min(r.peak_nbytes) > 0 and all(r.rss_end_nbytes > 0)
    assert set(records.same_tokens(r, "resident").values()) == {(runs, runs)}
    hits, nbytes = (r.groupby("variant")[c].mean() for c in ("hit_rate", "read_nbytes_per_token"))
    assert hits["serial"] == 0 and 0 <= hits["fused"] < 1 and math.isnan(hits["resident"])
    experts = 4 * 4  # layers x top-k: serial reads every one of them
    assert nbytes["serial"] == pytest.approx(experts * 3 * 128 * 64 * 36 / 64)
    assert "same" in (text := bench.report(r)) and "DIFFER" not in text
    records.values(r, "serial", "tokens")[0][2] += 1
    assert f"DIFFER in 1 of {runs}" in bench.report(r)


def test_prefetchers_of_both_layouts_in_the_bench(model_path, tmp_path, monkeypatch):
    """All prefetchers write the same tokens. The oracle reads no expert in vain."""
    packed, dropped = repack(model_path, tmp_path / "packed", progress=False), []
    monkeypatch.setattr(bench.machine, "drop_pages", dropped.append)
    variants = {
        f"{p}, {path.name}": bench.Variant(StreamConfig(slots=6, prefetch=p), path, cold="token")
        for path in (model_path, packed)
        for p in ("none", "lookahead", "oracle")
    }
    made = bench.measure(model_path, variants, tokens=3, runs=1, warmup=1)
    assert set(records.same_tokens(made, next(iter(variants))).values()) == {(1, 1)}
    assert min(made.disk_bytes_per_s) > 0 and made.attrs["settings"]["cache_state"] == "cold"
    oracle = made[made.variant.str.startswith("oracle")]
    assert (oracle.prefetch_issued > 0).all() and (oracle.prefetch_wasted == 0).all()
    assert not made[made.variant.str.startswith("none")].prefetch_issued.any()
    each = 1 + 1 + (1 + 3)  # before the prompt, before the clock and before each token
    assert dropped.count(packed) == (2 - FAST) * (3 * each + 1)  # once more for the oracle


def test_the_command_takes_every_prompt_in_turn_and_saves(model_path, tmp_path, monkeypatch):
    asked, file = [], str(tmp_path / "r.json")

    def call(function, path, variant, prompt, *rest, what, nbytes):
        asked.append((prompt, variant.config.mode, variant.config.top_k, nbytes, variant.cold))
        row = {"decode_s": 1.0, "decode_tokens": 2, "tokens": [1, 2]} | variant.facts
        return row, limit.Limited(0, "", "", "none")

    monkeypatch.setattr(limit, "call", call)
    words = "--limits 900 --modes fused --runs 3 --top-k 2 --cold prompt --prompt a --prompt b"
    assert main(["bench", str(model_path), *words.split(), "--json", file]) == 0
    ways = ("resident", 2, None, "no"), ("fused", 2, 900_000_000, "prompt")
    for i, prompt in enumerate("aba"):
        assert {*asked[2 * i : 2 * i + 2]} == {(prompt, *way) for way in ways}
    made = records.read(file, disturbed=True)
    assert list(records.group(made, "tok_s").n) == [3, 3] and "partial" not in made.attrs


def test_tokens_made_to_miss():
    rows = cost.rows_with_misses(3, 5, 2, 24, 4, np.random.default_rng(0))
    hit = eviction.held(rows, 24, 4, "lru")
    assert rows.shape == (5, 2, 4) and (hit[1:].sum(-1) == 4 - 3).all()
    for layer in range(2):  # no expert is read twice: the page cache would have it
        assert np.unique(rows[:, layer][~hit[:, layer]], return_counts=True)[1].max() == 1


def test_costs_are_measured_and_a_busy_machine_is_said(moe, monkeypatch, capsys):
    with pytest.raises(ValueError, match="more experts than a token needs.*got 8 and 8"):
        cost.samples_of(moe, moelab.StreamConfig(top_k=8, slots=8))
    for top_k, misses, disturbed in ((1, {1}, True), (4, {1, 2, 4}, False), (7, {1}, False)):
        record = cost.samples_of(moe, moelab.StreamConfig(top_k=top_k), tokens=4)
        record["load"] = {"disturbed": disturbed, "cores_of_others": 1.5}
        monkeypatch.setattr(cost, "samples_of", lambda *_, made=record, **__: made)
        costs = cost.measure_costs(moe)
        monkeypatch.undo()
        assert ("others used 1.5 cores" in capsys.readouterr().err) is disturbed
        unknown = set() if costs.reads_direct else {"direct_s_per_byte"}
        assert all(0 <= s < np.inf for name, s in vars(costs).items() if name not in unknown)
        assert costs.warm_s_per_byte > 0 and costs.cold_s_per_byte > 0 and costs.overlap <= 1
        counts = records.table(record).groupby(["what", "variant"]).misses.unique().map(set)
        for way in (cost.PAGES, cost.DISK, *[cost.DIRECT] * costs.reads_direct):
            assert counts["reads", way] == misses


def test_costs_follow_from_the_samples():
    """Overlap hides half (with direct reads a quarter) of the shorter of reads and arithmetic."""
    L, K, nbytes, hit_s = 2, 4, 10, 0.01
    own = {"fixed_s": 7e-3, "held_fixed_s": 6e-3, "expert_s": 1e-4, "prompt_token_s": 1e-3}
    warm = {"warm_call_s": 1e-5, "warm_s_per_byte": 1e-6}
    cold = {"cold_call_s": 1e-4, "cold_s_per_byte": 1e-5, "overlap": 0.5}
    direct = {"direct_call_s": 2e-5, "direct_s_per_byte": 9e-6, "direct_overlap": 0.25}
    want = Costs(**own, **warm, **cold, **direct)
    experts_s, rows = K * want.expert_s, [("expert", "slots", 0, want.expert_s)]
    for way, known in {cost.PAGES: warm, cost.DISK: cold, cost.DIRECT: direct}.items():
        call_s, byte_s, *hidden = known.values()
        rows += [("reads", way, m, call_s + m * nbytes * byte_s) for m in (1, K)]
        for share in hidden:
            reads_s = rows[-1][-1]
            seconds = hit_s + L * (reads_s - share * min(reads_s, experts_s))
            rows.append(("token", way, K, seconds))
    held_s, prompt_s = want.held_fixed_s + L * experts_s, cost.PROMPT * want.prompt_token_s
    rows += [("token", "slots", 0, hit_s), ("token", cost.OWN, 0, want.fixed_s + L * experts_s)]
    rows += [("token", cost.HELD, 0, held_s), ("prompt", cost.HELD, 0, prompt_s)]
    names = "what", "variant", "misses", "seconds"
    record = {"settings": {"L": L, "K": K, "expert_nbytes": nbytes}}
    record["rows"] = [dict(zip(names, row)) for row in rows]
    assert vars(cost.costs_of(record)) == pytest.approx(vars(want))
    record["rows"] = [r for r in record["rows"] if r["variant"] != cost.DIRECT]
    assert not cost.costs_of(record).reads_direct
