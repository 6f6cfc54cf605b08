"""python -m moelab: no option is ignored, no value is taken for another, no traceback."""

import io
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from small import small

import moelab
from moelab import synthesize
from moelab.__main__ import main
from moelab.lab import limit, machine, records
from moelab.lab.experiments import advise as advice
from moelab.lab.experiments import bench, layer, reads
from moelab.lab.experiments import drafts as draft

KINDS = {
    "bench": [],
    "--layer": ["--layer"],
    "--reads": ["--reads"],
    "--limit": ["--limit", "500"],
    "--draft": ["--draft", "lookup"],
}
STREAM = {
    "--slots": "21", "--top-k": "3", "--readers": "5", "--streams": "2", "--scales": "resident",
    "--policy": "lfu", "--pinned-nbytes": "77", "--pinned-trace": "t.npz", "--prefetch": "last",
    "--dtype": "bfloat16",
}  # fmt: skip
OPTIONS = {
    "--modes": "stacked", "--tokens": "37", "--warmup": "13", "--runs": "7", "--prompt": "hello",
    "--together": "no", "--cold": None, "--json": "r.json", "--depth": "2,6", "--megabytes": "9",
    "--lengths": "3,auto", "--limit": "500", "--layer": None, "--reads": None, "--draft": "lookup",
    **STREAM,
}  # fmt: skip
TAKES = {  # as in `python -m moelab bench --help`
    "bench": {"--modes", "--tokens", "--warmup", "--runs", "--prompt", "--together", "--cold",
              "--json", *STREAM},
    "--layer": {"--modes", "--runs", "--json", *STREAM},
    "--reads": {"--depth", "--megabytes", "--runs", "--json"},
    "--limit": {"--modes", "--tokens", "--warmup", "--runs", "--prompt", "--json", *STREAM},
    "--draft": {"--modes", "--tokens", "--runs", "--prompt", "--lengths", "--limit", "--json",
                *STREAM},
}  # fmt: skip
SHOWN = {  # how a value looks where it arrives, if not as it was given
    "--modes": "mode='stacked'", "--together": "False", "--cold": "True", "--depth": "(2, 6)",
    "--megabytes": str(9 << 20), "--lengths": "(3, 'auto')", "--limit": "500000000",
}  # fmt: skip


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer):
    out = tmp_path_factory.mktemp("command_line") / "m"
    return synthesize.synthesize(out, config=small(), tokenizer=tokenizer, progress=False)


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What the commands call, in place of working; files of --json go to ``tmp_path``."""
    seen = []

    def note(*args, **kwargs):
        seen.append((args, kwargs))
        return {}

    for module, name in (
        (bench, "generate"), (bench, "run_bench"), (layer, "bench_layer"), (reads, "bench_reads"),
        (limit, "bench_limited"), (draft, "bench_draft"), (synthesize, "synthesize"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, note)
    for module, name in (
        (layer, "report_layer"), (reads, "report_reads"), (limit, "report"), (draft, "report")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda record: "")
    monkeypatch.setattr(bench, "folder", lambda path: path, raising=False)
    monkeypatch.chdir(tmp_path)
    return seen


def run(capsys, *argv):
    """The exit status and the last line of stderr."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err.strip()
    assert "Traceback" not in err
    return SimpleNamespace(code=code, err=err.splitlines()[-1] if err else "")


def option(name):
    return [name] if OPTIONS[name] is None else [name, OPTIONS[name]]


# Every option of bench with every kind of bench


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_arrives_or_is_refused(kind, name, calls, capsys):
    if name == kind:
        return
    given = option(name)
    if name in ("--pinned-nbytes", "--pinned-trace"):
        given = [*option("--pinned-nbytes"), *option("--pinned-trace")]
    if name in ("--pinned-nbytes", "--pinned-trace", "--prefetch") and kind in ("bench", "--limit"):
        given += ["--modes", "fused"]
    of_another = name in KINDS and kind != "bench"
    got = run(capsys, "bench", "M", *KINDS[kind], *given)
    if name in TAKES[kind] or (kind == "bench" and name in KINDS):
        assert got.code in (0, 3) and len(calls) == 1, got.err
        if name == "--json":
            assert os.path.exists("r.json") or "r.json" in repr(calls)
        elif name not in KINDS or of_another:
            assert SHOWN.get(name, OPTIONS[name]) in repr(calls)
    elif {kind, name} == {"--draft", "--limit"}:
        assert got.code == 0 and "500000000" in repr(calls) and "lookup" in repr(calls)
    else:
        assert got.code == 2 and not calls
        assert name in got.err or "--pinned-nbytes" in got.err
        assert kind in got.err or (kind == "bench" and "goes only with --" in got.err)


def test_several_prompts_arrive(calls, capsys):
    for kind in ("bench", "--limit", "--draft"):
        calls.clear()
        assert run(capsys, "bench", "M", *KINDS[kind], "--prompt", "a", "--prompt", "b").code in (
            0,
            3,
        )
        assert "'a', 'b'" in repr(calls)


@pytest.mark.parametrize(
    "mode, refused",
    [
        ("resident", {*STREAM} - {"--top-k", "--dtype"}),
        ("serial", {*STREAM} - {"--top-k", "--dtype", "--scales"}),
        ("buffers", {*STREAM} - {"--top-k", "--dtype", "--scales", "--readers"}),
        ("stacked", {"--pinned-trace", "--pinned-nbytes"}),  # one without the other
        ("fused", {"--pinned-trace", "--pinned-nbytes"}),
    ],
)
def test_a_stream_option_that_a_mode_has_no_use_for(mode, refused, calls, capsys):
    for command in (
        ["generate", "M", "--prompt", "x", "--mode", mode],
        ["bench", "M", "--modes", mode],
    ):
        for name in STREAM:
            calls.clear()
            got = run(capsys, *command, *option(name))
            if name in refused:
                assert got.code in (1, 2) and not calls, (name, got)
                word = name[2:].replace("-", "_")
                assert name in got.err or word in got.err, got.err
                assert mode in got.err or "pinned" in name, got.err
            else:
                assert got.code in (0, 3) and OPTIONS[name] in repr(calls), (name, got)


def test_a_stream_option_that_one_of_the_modes_has_a_use_for(calls, capsys):
    run(capsys, "bench", "M", "--modes", "resident,serial,fused", "--slots", "9")
    run(capsys, "bench", "M", "--modes", "fused/slots=20,fused", "--slots", "9")
    assert len(calls) == 2


def test_a_stream_option_that_every_mode_sets_otherwise(calls, capsys):
    got = run(capsys, "bench", "M", "--modes", "fused/slots=20,stacked/slots=30", "--slots", "9")
    assert got.code == 2 and not calls
    assert "--slots" in got.err and "fused/slots=20" in got.err


# Values


@pytest.mark.parametrize(
    "command",
    [
        "generate M --prompt x --max-tokens -5",
        "generate M --prompt x --max-tokens 0",
        "generate M --prompt x --max-tokens many",
        "generate M --prompt x --slots 0",
        "generate M --prompt x --top-k 0",
        "generate M --prompt x --readers 0",
        "generate M --prompt x --streams 0",
        "generate M --prompt x --streams x",
        "generate M --prompt x --policy mru",
        "generate M --prompt x --prefetch oracle",
        "generate M --prompt x --pinned-nbytes -1",
        "generate M --prompt x --dtype int4",
        "generate M --prompt x --mode warp",
        "bench M --tokens 0",
        "bench M --tokens -1",
        "bench M --warmup -1",
        "bench M --runs 0",
        "bench M --runs -1",
        "bench M --runs 1.5",
        "bench M --layer --runs 0",
        "bench M --reads --runs 0",
        "bench M --limit 0",
        "bench M --limit -100",
        "bench M --draft lookup --limit 0",
        "bench M --draft lookup --lengths -1",
        "bench M --draft lookup --lengths 2,,4",
        "bench M --draft lookup --lengths 2,x",
        "bench M --draft lookup --lengths 2,4,2",
        "bench M --reads --megabytes -5",
        "bench M --reads --megabytes 0",
        "bench M --reads --depth 0",
        "bench M --reads --depth 1,-1",
        "bench M --reads --depth 4,4",
        "advise M --memory 0",
        "advise M --memory -1",
        "synthesize O --layers 0",
        "synthesize O --seed -1",
        "synthesize O --vocab 0",
        "synthesize O --like qwen9",
    ],
)
def test_a_value_that_cannot_be(command, calls, monkeypatch, capsys):
    monkeypatch.setattr(advice, "advise", lambda *_: calls.append("advise"))
    *_, name, value = command.split()
    got = run(capsys, *command.split())
    assert (got.code, calls) == (2, [])
    assert name in got.err and (value in got.err or "," in value)
    assert "expected" in got.err or "choose from" in got.err


@pytest.mark.parametrize("value", ["-1", "2,,4"])
def test_a_list_may_begin_with_a_dash_or_have_a_gap(value, capsys):
    assert "--lengths" in run(capsys, "bench", "M", "--draft", "lookup", f"--lengths={value}").err


@pytest.mark.parametrize(
    "modes, words",
    [
        ("", "expected names"),
        ("fused,,resident", "expected names"),
        ("fused,", "expected names"),
        ("fused,fused", "'fused' is there twice"),
        ("warp", "warp"),
        ("fused/slot=3", "'slot=3'"),
        ("fused/slots", "'slots'"),
        ("fused/slots=", "'slots='"),
        ("fused/slots=x", "slots=x"),
        ("fused/slots=²", "slots=²"),
        ("fused/slots=0", "slots"),
        ("fused/streams=x", "streams=x"),
        ("fused/slots=8/slots=9", "slots is there twice"),
        ("fused/mode=serial", "'mode=serial'"),
        ("fused/prefetch=oracle", "oracle"),
        ("resident/slots=8", "slots"),
        ("serial/readers=8", "readers"),
        ("fused/pinned_trace=t.npz", "pinned_trace"),
    ],
)
def test_modes_that_cannot_be(modes, words, calls, capsys):
    for kind in ("bench", "--layer", "--limit", "--draft"):
        got = run(capsys, "bench", "M", *KINDS[kind], "--modes", modes)
        assert got.code == 1 and not calls
        assert words in got.err


def test_draft_takes_one_mode(calls, capsys):
    got = run(capsys, "bench", "M", "--draft", "lookup", "--modes", "fused,stacked")
    assert got.code == 2 and not calls
    assert all(word in got.err for word in ("--modes", "--draft", "fused, stacked"))


def test_a_draft_that_is_none(model_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(draft, "load", lambda *_: pytest.fail("the model was loaded first"))
    monkeypatch.setattr(limit, "run", lambda *_, **__: pytest.fail("a process was started first"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    for name in ("nonsense", tmp_path / "empty", tmp_path / "damaged"):
        for more in ([], ["--limit", "900"]):
            got = run(capsys, "bench", model_path, "--draft", name, *more)
            assert got.code == 1 and str(name) in got.err
            assert "lookup, self, oracle" in got.err or "not JSON" in got.err


# Text


def stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def test_a_dash_reads_standard_input(calls, monkeypatch, capsys):
    text = "def grüße():\n    pass\n"
    stdin(monkeypatch, text.encode())
    assert run(capsys, "generate", "M", "--prompt", "-").code == 0
    stdin(monkeypatch, text.encode())
    assert run(capsys, "bench", "M", "--prompt", "-", "--prompt", "x").code in (0, 3)
    assert calls[0][0][1] == text and (text, "x") in calls[1][0]


@pytest.mark.parametrize(
    "data, words", [(b"", "got none"), (b"caf\xe9 au lait", "UTF-8"), (None, "got none")]
)
def test_standard_input_that_is_no_text(data, words, calls, monkeypatch, capsys):
    stdin(monkeypatch, data) if data is not None else monkeypatch.setattr(sys, "stdin", None)
    got = run(capsys, "generate", "M", "--prompt", "-")
    assert got.code == 2 and not calls
    assert all(w in got.err for w in ("--prompt", "standard input", words))


def test_a_prompt_that_is_no_text(calls, capsys):
    for command in ("generate", "bench"):
        for prompt in ("", b"caf\xe9".decode(errors="surrogateescape")):
            got = run(capsys, command, "M", "--prompt", prompt)
            assert got.code == 2 and "--prompt" in got.err and not calls


class Strips:
    """A tokenizer that makes nothing of blanks, as some do."""

    def __init__(self, inner):
        self._inner = inner

    def encode(self, text):
        return self._inner.encode(text) if text.strip() else []

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.parametrize("kind", ["generate", "bench", "--draft"])
def test_a_prompt_without_a_token(kind, model_path, monkeypatch, capsys):
    real = moelab.load

    def load(*args):
        model, its = real(*args)
        return model, Strips(its)

    for module in (bench, draft, limit):
        monkeypatch.setattr(module, "load", load)
    argv = ["generate", model_path]
    if kind != "generate":
        argv = ["bench", model_path, *KINDS[kind], "--tokens", "2", "--modes", "fused"]
        argv += ["--prompt", "x"]
    got = run(capsys, *argv, "--prompt", "   ")
    assert got.code == 1 and "prompt '   '" in got.err and "at least one token" in got.err
    with pytest.raises(ValueError, match="at least one token"):
        limit.measure(model_path, moelab.StreamConfig(), 2, 0, "   ")


# Files


def test_an_unwritable_json_is_refused_before_any_work(calls, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for kind in KINDS.values():
        for path in ("file/r.json", "file/sub/r.json", "folder", "", "/dev/null", "/proc/r.json"):
            got = run(capsys, "bench", "M", *kind, "--json", path)
            assert got.code == (1 if path else 2) and not calls
            assert "json" in got.err and path in got.err
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_writable_json_is_not_made_before_the_work(calls, tmp_path, capsys):
    path = tmp_path / "a" / "b" / "r.json"
    assert run(capsys, "bench", "M", "--json", path).code == 3
    assert calls and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ["check", ""], ["generate", "", "--prompt", "x"], ["bench", ""], ["advise", ""],
        ["repack", "", "O"], ["repack", "M", ""], ["synthesize", ""],
        ["synthesize", "O", "--tokenizer", ""], ["bench", "M", "--draft", ""],
    ],
)  # fmt: skip
def test_an_empty_name_is_not_the_current_folder(command, calls, monkeypatch, capsys):
    monkeypatch.setattr(machine, "check", lambda *_: calls.append("check"))
    monkeypatch.setattr(advice, "advise", lambda *_: calls.append("advise"))
    got = run(capsys, *command)
    assert got.code == 2 and "expected a name, got nothing" in got.err and not calls


def test_check_names_a_model_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(machine, "read_speed", lambda *_: pytest.fail("another model was read"))
    for name in ("nowhere", __file__):
        got = run(capsys, "check", name)
        assert got.code == 1 and name in got.err and "folder" in got.err


# What the commands pass on


def test_layer_compares_with_a_resident_model_of_the_same_dtype_and_top_k(model_path, monkeypatch):
    loaded, real = [], layer.load

    def load(path, config):
        loaded.append(config)
        return real(path, config)

    monkeypatch.setattr(layer, "load", load)
    base = moelab.StreamConfig(top_k=2, dtype="bfloat16", slots=8)
    layer.bench_layer(model_path, "fused", base, rounds=2)
    assert [(c.mode, c.top_k, c.dtype) for c in loaded] == [
        ("resident", 2, "bfloat16"), ("fused", 2, "bfloat16")
    ]  # fmt: skip


def test_limit_takes_every_prompt_in_turn(model_path, monkeypatch, capsys):
    asked = []

    def run_here(argv, nbytes=None, **_):
        path, config, tokens, warmup, prompt = json.loads(argv[-1])
        asked.append((config["mode"], config["top_k"], nbytes, prompt))
        sample = limit.measure(path, moelab.StreamConfig(**config), tokens, warmup, prompt)
        return limit.Limited(0, json.dumps(sample), "", "none")

    monkeypatch.setattr(limit, "run", run_here)
    got = run(
        capsys, "bench", model_path, "--limit", "900", "--modes", "fused", "--runs", "3",
        "--tokens", "2", "--warmup", "1", "--prompt", "def a", "--prompt", "def b", "--top-k", "2",
    )  # fmt: skip
    assert got.code == 0, got.err
    assert asked == [
        (mode, 2, nbytes, prompt)
        for prompt in ("def a", "def b", "def a")
        for mode, nbytes in (("resident", None), ("fused", 900_000_000))
    ]


def test_an_error_in_a_process_with_a_limit_is_one_line(model_path, monkeypatch, capsys):
    def run_here(argv, nbytes=None, **_):
        done = subprocess.run(argv, capture_output=True, text=True)
        return limit.Limited(done.returncode, done.stdout, done.stderr, "none")

    monkeypatch.setattr(limit, "run", run_here)
    for kind in (["--limit", "900"], ["--limit", "900", "--draft", "lookup"]):
        got = run(capsys, "bench", model_path, *kind, "--modes", "fused", "--slots", "1")
        assert got.code == 1 and "slots" in got.err and "at least" in got.err


# Signals and pipes


@pytest.mark.parametrize("module", ["mlx_lm", "psutil"])
def test_ctrl_c_during_the_imports(module, tmp_path):
    """The first half second is imports, of the package and then of the command."""
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-m", "moelab", "check"], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("delay_s", [0.3, 0.6, 1.0])
def test_ctrl_c_in_the_first_second(delay_s, model_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "moelab", "generate", str(model_path), "--prompt", "x",
         "--max-tokens", "1000000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        process.wait(delay_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted\n"
    assert process.returncode == 130


@pytest.mark.parametrize("command", ["generate", "check"])
def test_a_reader_that_goes_away(command, model_path):
    """As ``... | head -1`` does."""
    argv = [sys.executable, "-m", "moelab", command, str(model_path)]
    if command == "generate":
        argv += ["--prompt", "line\n", "--max-tokens", "2000"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if command == "generate":
        process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141


@pytest.mark.parametrize(
    "command, code, words",
    [
        ("bench --help | true", 0, ""),
        ("check nowhere >&-", 1, "nowhere"),
        ("generate MODEL --prompt x --max-tokens 2 >&-", 0, ""),
        ("generate MODEL --prompt x --max-tokens 2 <&- 2>&-", 0, ""),
        ("generate MODEL --prompt x --max-tokens 2 > /dev/full", 1, "No space left"),
    ],
)
def test_closed_and_full_outputs(command, code, words, model_path):
    command = command.replace("MODEL", str(model_path))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m moelab {command}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert words in done.stderr and done.stderr.count("\n") == bool(words)


@pytest.mark.parametrize(
    "command",
    ["generate M --prompt x --slots 8 --slots 16", "bench M --tokens 3 --tokens 4",
     "generate M --prompt x --prompt y"],
)  # fmt: skip
def test_an_option_that_is_there_twice(command, calls, capsys):
    """The first of the two was ignored."""
    got = run(capsys, *command.split())
    assert got.code == 2 and not calls
    assert command.split()[-2] in got.err and "twice" in got.err


def test_every_option_is_in_this_file(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = {
        w.strip(",:;()[]") for w in capsys.readouterr().out.split() if w.strip("[").startswith("--")
    }
    assert {w for w in shown if w[2:3].isalpha()} - {"--help"} == set(OPTIONS)


def test_an_option_is_written_in_full(calls, capsys):
    """``--mode`` would be taken for ``--modes`` by argparse."""
    got = run(capsys, "bench", "M", "--mode", "fused")
    assert got.code == 2 and "--mode" in got.err and not calls


def test_writable_leaves_nothing(tmp_path):
    records.check_writable(tmp_path / "new" / "r.json")
    (tmp_path / "r.json").write_text("old")
    records.check_writable(tmp_path / "r.json")
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert (tmp_path / "r.json").read_text() == "old"
