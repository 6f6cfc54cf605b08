"""Timing and ``bench``: what they compute and keep. Nothing here asserts a speed."""

import math
import re
import subprocess
from dataclasses import asdict

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from needs import needs_kernels

from moelab import StreamConfig, load, record, stats
from moelab.__main__ import main
from moelab.lab import limit, records, variants
from moelab.lab.arguments import parse_modes
from moelab.lab.decode import decode
from moelab.lab.experiments import bench
from moelab.lab.texts import PROMPTS


def test_parse_modes():
    text = "resident, fused,fused/readers=1/slots=32,stacked/policy=lfu"
    out = parse_modes(text, StreamConfig(slots=20, readers=2))
    assert list(out) == ["resident", "fused", "fused/readers=1/slots=32", "stacked/policy=lfu"]
    assert out["fused"] == StreamConfig(mode="fused", slots=20, readers=2)
    assert out["fused/readers=1/slots=32"] == StreamConfig(mode="fused", slots=32, readers=1)
    for text, message in [
        ("", "expected names"),
        ("fused/slot=3", "expected FIELD=VALUE"),
        ("fused/slots", "expected FIELD=VALUE"),
        ("fused/slots=x", "whole number"),
        ("fused/slots=8/slots=9", "slots is there twice"),
        ("fused/mode=serial", "'mode=serial'"),
        ("fused,fused", "'fused' is there twice"),
        ("resident/slots=8", "slots in 'resident/slots=8' has no effect"),
        ("warp", "got 'warp'"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_modes(text)


def test_decode_writes_what_mlx_lm_writes(model_path):
    model, tok = mlx_lm.load(str(model_path))
    model.set_dtype(mx.float32)
    ids = tok.encode("def f(x):")
    theirs = [int(t) for t, _ in generate_step(mx.array(ids), model, max_tokens=15)]
    got = decode(model, ids, tokens=10, warmup=4)
    assert got.tokens == theirs and got.counters is None
    called, calls = [], ("before_prompt", "before_clock", "before_token")
    told = {name: lambda name=name: called.append(name) for name in calls}
    assert decode(model, ids, tokens=10, warmup=4, **told).tokens == theirs
    assert called == [calls[0], *4 * [calls[2]], calls[1], *10 * [calls[2]]]


@pytest.mark.parametrize("temp", [0.0, 0.7])
def test_a_drafted_text_is_the_undrafted_one_and_its_rounds_add_up(model_path, temp):
    configs = {"fused": StreamConfig(slots=8)}
    variants = bench.crossed(configs, draft="oracle", lengths=(0, 3, "auto"))
    made = bench.measure(model_path, variants, tokens=12, runs=2, warmup=3, temp=temp)
    assert list(variants) == ["fused", "fused, 0 drafts", "fused, 3 drafts", "fused, policy"]
    assert set(records.same_tokens(made, "fused").values()) == {(2, 2)}
    assert made.tokens.map(len).eq(1 + 3 + 12).all() and (made.decode_s > 0).all()
    three = made[made.variant == "fused, 3 drafts"]
    assert (three.accepted <= three.drafted).all() and (three.num_drafts == "3").all()
    plain = made[made.variant == "fused, 0 drafts"]
    assert not plain.drafted.any() and plain.committed.map(len).eq(0).all()
    if not temp:  # the oracle knows the greedy text
        assert three.accepted.sum() > 0 and three.committed.map(sum).between(1, 12).all()
    assert "tau" in bench.report(made)


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_text_is_fed_in_place_of_greedy_tokens(model_path, warmup, tmp_path):
    model, tok = load(model_path, StreamConfig(slots=8))
    ids = tok.encode(PROMPTS[1])
    prompt, fed = ids[: -warmup - 6], ids[-warmup - 6 :]
    with model, record(model) as trace:
        decode(model, prompt, 6, warmup, feed=fed)
        assert stats(model).decode.tokens == 6
        best = mx.argmax(model(mx.array([ids]))[0], axis=-1).tolist()
    n = len(prompt) - 1  # the prompt's last token goes in by itself
    assert trace.tokens.tolist()[: len(ids)] == ids
    assert trace.phase.tolist()[: len(ids)] == ["prefill"] * n + ["decode"] * (1 + len(fed))
    trace[: len(ids)].save(tmp_path / "t.npz")
    amount = {"tokens": 6, "runs": 2, "warmup": warmup, "feed": tmp_path / "t.npz"}
    r = bench.measure(model_path, "resident,fused", StreamConfig(slots=8), **amount)
    assert list(r.tokens) == [best[n - 1 : -1]] * 4 and r.attrs["settings"]["feed"] == "t.npz"
    assert best != ids[1:] + best[-1:], "the text is not the greedy one"


@pytest.mark.parametrize("together", [True, False])
def test_bench(model_path, together, monkeypatch):
    monkeypatch.setattr(bench, "memory_available", lambda: together * 10**12)
    seen, names = [], ["resident", "serial", "fused"]
    base, amount = StreamConfig(slots=8, kernels="mlx"), {"tokens": 6, "runs": 3, "warmup": 2}
    keep = lambda r: seen.append((len(r), r.attrs["partial"]))  # noqa: E731
    r = bench.measure(model_path, ",".join(names), base, **amount, on_round=keep)
    assert seen == [(3, True), (6, True), (9, True)] and "partial" not in r.attrs
    assert r.attrs["settings"]["baseline"] == "resident"
    assert sorted(zip(r["round"], r.variant)) == [(i, n) for i in range(3) for n in sorted(names)]
    assert all(len(tokens) == 9 for tokens in r.tokens) and all(r.decode_tokens == 6)
    assert r.tok_s.tolist() == pytest.approx((6 / r.decode_s).tolist())
    assert min(r.peak_nbytes) > 0 and all(r.rss_end_nbytes > 0)
    assert set(records.same_tokens(r, "resident").values()) == {(3, 3)}
    hits, nbytes = (r.groupby("variant")[c].mean() for c in ("hit_rate", "read_nbytes_per_token"))
    assert hits["serial"] == 0 and 0 <= hits["fused"] < 1 and math.isnan(hits["resident"])
    experts = 4 * 4  # layers x top-k: every one is read by serial
    assert nbytes["serial"] == pytest.approx(experts * 3 * 128 * 64 * 36 / 64)
    text = bench.report(r)
    assert "same" in text and "DIFFER" not in text and "of resident" in text
    records.values(r, "serial", "tokens")[1][2] += 1
    assert "DIFFER in 1 of 3" in bench.report(r)


@needs_kernels
def test_auto_kernels_are_the_same_in_every_mode(model_path):
    modes = "resident,fused/dtype=bfloat16"
    with pytest.raises(ValueError, match="fast in 'resident' and mlx in 'fused/d.*kernels=mlx"):
        bench.measure(model_path, modes, tokens=1, runs=1)


def test_a_cold_bench_times_the_disk_and_the_command_saves_it(model_path, tmp_path, capsys):
    path = tmp_path / "r.json"
    words = "--modes resident,fused --slots 8 --tokens 3 --warmup 1 --runs 2 --cold prompt"
    assert main(["bench", str(model_path), *words.split(), "--json", str(path)]) == 0
    r = records.read(str(path), disturbed=True)
    assert list(records.group(r, "tok_s").n) == [2, 2] and "partial" not in r.attrs
    assert {"command", "load", "machine"} <= r.attrs.keys()
    assert min(r.disk_bytes_per_s) > 0 and r.attrs["settings"]["cache_state"] == "cold"
    assert "tok/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, code, said",
    [
        ("nowhere", 1, "nowhere"),
        ("MODEL --slots 2", 1, "slots"),
        ("MODEL --lengths 2,4,2", 2, "--lengths.*expected"),
        ("MODEL --cold maybe", 2, "--cold.*choose from.*"),
        ("MODEL --draft lookup --lengths 2,x", 2, "--lengths.*expected"),
        ("MODEL --limits 0", 2, "--limits.*expected"),
        ("MODEL --prompt-tokens 12,0", 2, "--prompt-tokens.*expected"),
        # One of the modes must have a use for the option.
        ("MODEL --modes fused/slots=20,stacked/slots=30 --slots 9", 2, "--slots.*fused/slots=20"),
        ("MODEL --draft nonsense", 1, "nonsense.*lookup, self, oracle"),
        ("MODEL --draft EMPTY --limits 900", 1, "lookup, self, oracle"),
        ("MODEL --draft DAMAGED --limits 900", 1, "not JSON"),
    ],
)
def test_what_is_refused_before_any_work(
    words, code, said, model_path, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(limit, "run", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(variants, "load", lambda *_: pytest.fail("the model was loaded"))
    names = {"MODEL": model_path, "EMPTY": tmp_path / "empty", "DAMAGED": tmp_path / "damaged"}
    for folder in (names["EMPTY"], names["DAMAGED"]):
        folder.mkdir()
    (names["DAMAGED"] / "config.json").write_text("{")
    try:
        got = main(["bench", *(str(names.get(w, w)) for w in words.split())])
    except SystemExit as stop:
        got = stop.code
    err = capsys.readouterr().err
    assert got == code and re.search(said, err.splitlines()[-1]) and "Traceback" not in err


@pytest.mark.parametrize("path", ["file/r.json", "file/sub/r.json", "folder", "", "/dev/null"])
def test_an_unwritable_json_is_refused_before_any_work(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("it was measured"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    try:
        assert main(["bench", "M", "--json", path]) == 1
    except SystemExit as stop:
        assert stop.code == 2 and not path
    err = capsys.readouterr().err
    assert "json" in err and path in err and (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


def test_limit_takes_every_prompt_in_turn(model_path, monkeypatch):
    asked = []

    def call_here(function, path, variant, prompt, *rest, what, nbytes):
        asked.append((prompt, variant.config.mode, variant.config.top_k, nbytes))
        return function(path, asdict(variant), prompt, *rest), limit.Limited(0, "", "", "none")

    monkeypatch.setattr(limit, "call", call_here)
    argv = ["bench", str(model_path), "--limits", "900", "--modes", "fused", "--runs", "3"]
    argv += ["--prompt", "def a", "--prompt", "def b", "--top-k", "2"]
    assert main([*argv, "--tokens", "2", "--warmup", "1"]) == 0
    prompts = "def a", "def b", "def a"
    assert [prompt for prompt, *_ in asked[::2]] == [*prompts]
    ways = ("resident", 2, None), ("fused", 2, 900_000_000)
    assert sorted(asked, key=str) == sorted(((p, *way) for p in prompts for way in ways), key=str)


def test_an_error_in_a_process_with_a_limit_is_one_line(model_path, monkeypatch, capsys):
    def run_here(argv, *_):
        done = subprocess.run(argv, capture_output=True, text=True)
        return limit.Limited(done.returncode, done.stdout, done.stderr, "none")

    monkeypatch.setattr(limit, "run", run_here)
    argv = ["bench", str(model_path), "--limits", "900", "--modes", "fused", "--slots", "1"]
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err and "slots" in err and "at least" in err
