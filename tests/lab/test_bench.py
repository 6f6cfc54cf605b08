"""Timing, bench and generate: what they compute and keep. Nothing here asserts a speed."""

import json
import math
import re
import subprocess
from dataclasses import asdict
from types import SimpleNamespace

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


def test_save_replaces_only_with_a_whole_file(tmp_path):
    path = tmp_path / "sub" / "r.json"
    made = records.table({"settings": {}, "rows": [{"variant": "a", "round": 0, "seconds": 1.0}]})
    records.save(path, made)
    before = path.read_text()
    made.attrs["self"] = made.attrs
    with pytest.raises(ValueError):
        records.save(path, made)
    assert path.read_text() == before and json.loads(before)["rows"][0]["seconds"] == 1.0


# bench


def test_parse_modes():
    out = parse_modes(
        "resident, fused,fused/readers=1/slots=32,stacked/policy=lfu",
        StreamConfig(slots=20, readers=2),
    )
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


@pytest.mark.parametrize("temp", [0.0, 0.7])
def test_a_drafted_text_is_the_undrafted_one_and_its_rounds_add_up(model_path, temp):
    configs = {"fused": StreamConfig(slots=8)}
    variants = bench.crossed(configs, draft="oracle", lengths=(0, 3, "auto"))
    amount = {"tokens": 12, "runs": 2, "warmup": 3, "temp": temp}
    made = bench.measure(model_path, variants, **amount)
    assert list(variants) == ["fused", "fused, 0 drafts", "fused, 3 drafts", "fused, policy"]
    assert set(records.same_tokens(made, "fused").values()) == {(2, 2)}
    assert made.tokens.map(len).eq(1 + 3 + 12).all() and (made.decode_s > 0).all()
    three = made[made.variant == "fused, 3 drafts"]
    assert (three.accepted <= three.drafted).all() and (three.num_drafts == "3").all()
    plain = made[made.variant == "fused, 0 drafts"]
    assert not plain.drafted.any() and plain.committed.map(len).eq(0).all()
    if not temp:  # the oracle knows the greedy text
        assert three.accepted.sum() > 0
        assert three.committed.map(sum).between(1, 12).all()
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
    r = bench.measure(
        model_path,
        "resident,fused",
        StreamConfig(slots=8),
        tokens=6,
        runs=2,
        warmup=warmup,
        feed=tmp_path / "t.npz",
    )
    assert list(r.tokens) == [best[n - 1 : -1]] * 4 and r.attrs["settings"]["feed"] == "t.npz"
    assert best != ids[1:] + best[-1:], "the text is not the greedy one"


@pytest.mark.parametrize("together", [True, False])
def test_bench(model_path, together, monkeypatch):
    monkeypatch.setattr(bench, "memory_available", lambda: together * 10**12)
    seen = []
    r = bench.measure(
        model_path,
        "resident,serial,fused",
        StreamConfig(slots=8, kernels="mlx"),
        tokens=6,
        runs=3,
        warmup=2,
        on_round=lambda r: seen.append((len(r), r.attrs["partial"])),
    )
    names, settings = ["resident", "serial", "fused"], r.attrs["settings"]
    assert seen == [(3, True), (6, True), (9, True)] and "partial" not in r.attrs
    assert settings["baseline"] == "resident"
    assert sorted(zip(r["round"], r.variant)) == [(i, n) for i in range(3) for n in sorted(names)]
    assert all(len(tokens) == 9 for tokens in r.tokens) and all(r.decode_tokens == 6)
    assert r.tok_s.tolist() == pytest.approx((6 / r.decode_s).tolist())
    assert min(r.peak_nbytes) > 0 and all(r.rss_end_nbytes > 0)
    assert set(records.same_tokens(r, "resident").values()) == {(3, 3)}
    assert list(records.ratios(r, "resident").n) == [3, 3, 3]
    hits, nbytes = (r.groupby("variant")[c].mean() for c in ("hit_rate", "read_nbytes_per_token"))
    assert hits["serial"] == 0 and 0 <= hits["fused"] < 1 and math.isnan(hits["resident"])
    experts = 4 * 4  # layers x top-k: every one is read by serial
    assert nbytes["serial"] == pytest.approx(experts * 3 * 128 * 64 * 36 / 64)
    text = bench.report(r)
    assert "same" in text and "DIFFER" not in text and "of resident" in text


@needs_kernels
def test_auto_kernels_are_the_same_in_every_mode(model_path):
    modes = "resident,fused/dtype=bfloat16"
    with pytest.raises(ValueError, match="fast in 'resident' and mlx in 'fused/d.*kernels=mlx"):
        bench.measure(model_path, modes, tokens=1, runs=1)


def test_a_mode_with_other_tokens_is_called_out(model_path):
    r = bench.measure(model_path, "resident,serial", tokens=4, runs=2, warmup=0)
    records.values(r, "serial", "tokens")[1][2] += 1
    assert records.same_tokens(r, "resident")["serial"] == (1, 2)
    assert "DIFFER in 1 of 2" in bench.report(r)


# the commands


def test_generate_writes_the_same_text_in_every_mode(model_path, capsys):
    argv, texts = ["generate", str(model_path), "-p", "def f(x):", "-m", "12"], []
    for mode in ("resident", "serial", "buffers", "stacked", "fused"):
        slots = ["--slots", "8"] if mode in ("stacked", "fused") else []
        assert main([*argv, "--mode", mode, *slots]) == 0
        texts.append(capsys.readouterr().out.rpartition("\n\n[")[0])
    assert len(set(texts)) == 1


def test_bench_command_saves_samples_and_machine(model_path, tmp_path, capsys):
    path = tmp_path / "r.json"
    words = "--modes resident,fused --slots 8 --tokens 3 --warmup 1 --runs 2"
    args = ["bench", str(model_path), *words.split()]
    assert main([*args, "--json", str(path)]) == 0
    r = records.read(str(path), disturbed=True)
    assert list(records.group(r, "tok_s").n) == [2, 2] and "partial" not in r.attrs
    assert {"command", "load", "machine"} <= r.attrs.keys()
    assert "tok/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bench", "nowhere"], "nowhere"),
        (["bench", "MODEL", "--slots", "2"], "slots"),
        (["bench", "MODEL", "--modes", "warp"], "warp"),
        (["generate", "MODEL", "--prompt", "x", "--experts-top-k", "99"], "top_k"),
    ],
)
def test_errors_are_one_line(model_path, arguments, message, capsys):
    code = main([str(model_path) if a == "MODEL" else a for a in arguments])
    err = capsys.readouterr().err
    assert code == 1 and err.startswith("moelab: ") and message in err and "Traceback" not in err


def test_limit_takes_every_prompt_in_turn(model_path, monkeypatch):
    asked = []

    def call_here(function, path, variant, prompt, *rest, what, nbytes):
        asked.append((prompt, variant.config.mode, variant.config.top_k, nbytes))
        return function(path, asdict(variant), prompt, *rest), done

    done = limit.Limited(0, "", "", "none")
    monkeypatch.setattr(limit, "call", call_here)
    argv = ["bench", str(model_path), "--limits", "900", "--modes", "fused", "--runs", "3"]
    argv += ["--prompt", "def a", "--prompt", "def b", "--top-k", "2"]
    assert main([*argv, "--tokens", "2", "--warmup", "1"]) == 0
    assert [prompt for prompt, *_ in asked[::2]] == ["def a", "def b", "def a"]
    assert sorted(asked, key=str) == sorted(
        (
            (prompt, mode, 2, nbytes)
            for prompt in ("def a", "def b", "def a")
            for mode, nbytes in (("resident", None), ("fused", 900_000_000))
        ),
        key=str,
    )


def test_an_error_in_a_process_with_a_limit_is_one_line(model_path, monkeypatch, capsys):
    def run_here(argv, *_):
        done = subprocess.run(argv, capture_output=True, text=True)
        return limit.Limited(done.returncode, done.stdout, done.stderr, "none")

    monkeypatch.setattr(limit, "run", run_here)
    argv = ["bench", str(model_path), "--limits", "900", "--modes", "fused", "--slots", "1"]
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err and "slots" in err and "at least" in err


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The arguments of each measurement that ``bench`` asks for; nothing is measured."""
    seen = []

    def measure(*args, **kwargs):
        seen.append((args, kwargs))
        made = {"machine": {"device": "cpu"}, "settings": {"baseline": None}, "rows": []}
        made = records.table(made)
        made["variant"] = []
        return made

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "report", lambda *_: "")
    monkeypatch.setattr(bench, "heldout_ids", lambda model, lengths, runs: list(lengths))
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.fixture
def asked(capsys):
    """A function that runs a command, and gives its exit status and the last line of stderr."""

    def run(*argv):
        try:
            code = main([str(a) for a in argv])
        except SystemExit as stop:
            code = stop.code
        return SimpleNamespace(code=code, err=["", *capsys.readouterr().err.splitlines()][-1])

    return run


@pytest.mark.parametrize(
    "option",
    ["--lengths 2,4,2", "--cold maybe", "--draft lookup --lengths 2,x", "--tokens 0",
     "--limits 0", "--prompt-tokens 12,0"],
)  # fmt: skip
def test_values_that_cannot_be(option, calls, asked):
    *_, name, value = option.split()
    got = asked("bench", "M", *option.split())
    assert got.code == 2 and not calls and name in got.err
    assert re.search("expected|choose from", got.err) and (value in got.err or "," in value)


def test_a_stream_option_for_several_modes(calls, asked):
    """One of them must have a use for it."""
    for modes in ("resident,serial,fused", "fused/slots=20,fused"):
        assert asked("bench", "M", "--modes", modes, "--slots", "9").code == 0
    assert len(calls) == 2
    got = asked("bench", "M", "--modes", "fused/slots=20,stacked/slots=30", "--slots", "9")
    assert got.code == 2 and len(calls) == 2
    assert "--slots" in got.err and "fused/slots=20" in got.err


def test_a_draft_that_is_none(model_path, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(limit, "run", lambda *_, **__: pytest.fail("a process was started first"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    monkeypatch.setattr(variants, "load", lambda *_: pytest.fail("the model was loaded first"))
    for name in ("nonsense", tmp_path / "empty", tmp_path / "damaged"):
        for more in ([], ["--limits", "900"]):
            got = asked("bench", model_path, "--draft", name, *more)
            assert got.code == 1 and str(name) in got.err
            assert "lookup, self, oracle" in got.err or "not JSON" in got.err


def test_an_unwritable_json_is_refused_before_any_work(calls, asked, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for path in ("file/r.json", "file/sub/r.json", "folder", "", "/dev/null", "/proc/r.json"):
        got = asked("bench", "M", "--json", path)
        assert got.code == (1 if path else 2) and not calls
        assert "json" in got.err and path in got.err
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]
    path, there = tmp_path / "a" / "b" / "r.json", []  # a writable one is not made before the work
    monkeypatch.setattr(bench, "report", lambda _: there.extend(tmp_path.glob("a")) or "")
    assert asked("bench", "M", "--json", path).code == 0
    assert calls and not there and path.is_file()


def test_a_cold_bench_times_the_disk(model_path):
    configs = {"resident": StreamConfig(mode="resident"), "fused": StreamConfig(slots=8)}
    made = bench.crossed(configs, cold="prompt")
    made = bench.measure(model_path, made, tokens=2, runs=2, warmup=1)
    assert min(made.disk_bytes_per_s) > 0 and made.attrs["settings"]["cache_state"] == "cold"
