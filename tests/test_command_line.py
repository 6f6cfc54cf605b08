"""python -m moelab: no option is ignored, no value is taken for another, no traceback."""

import argparse
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx_lm.chat
import mlx_lm.server
import pytest
from small import small

import moelab
from moelab import synthesize as synthesize_
from moelab.__main__ import COMMANDS, main
from moelab.commands import cache_prompt, chat, generate, repack, serve, synthesize
from moelab.commands.arguments import flag
from moelab.commands.stream_options import STREAM_OPTIONS
from moelab.lab import machine
from moelab.lab.experiments import bench, plan
from moelab.streaming.config import MODES


def other(name, option):
    """A value that is not the option's default. No other option is given the same value."""
    if option.choices:
        return [c for c in option.choices if c not in (option.default, *option.only_in_python)][-1]
    return str(1021 - [*STREAM_OPTIONS].index(name)) if option.bounds else "t.npz"


BY_FLAG = {flag(name): option for name, option in STREAM_OPTIONS.items()}
VALUES = {flag(name): other(name, option) for name, option in STREAM_OPTIONS.items()}
AUTO = {name: v for name, v in VALUES.items() if BY_FLAG[name].for_auto}  # slots auto goes by it
STREAM = {name: v for name, v in VALUES.items() if name not in AUTO}
WORK = (  # what a command calls to do its work
    (machine, "check"), (generate, "generate"), (serve, "serve"), (chat, "chat"),
    (cache_prompt, "cache_prompt"), (bench, "measure"), (plan, "advise"), (plan, "describe"),
    (synthesize, "synthesize"), (repack, "repack"),
)  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """What the commands call, in place of working."""
    seen = []
    for module, name in WORK:
        monkeypatch.setattr(module, name, lambda *args, **kwargs: seen.append((args, kwargs)))
    return seen


def run(capsys, *argv):
    """The exit status, the last line of stderr, and all that was said."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return SimpleNamespace(code=code, err=["", *err.strip().splitlines()][-1], said=out + err)


# Options


@pytest.mark.parametrize("command", [generate, cache_prompt, chat, serve])
def test_no_option_is_ignored(command):
    """Each is read by a command here or by the mlx-lm module that the command builds on."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    source = "".join(p.read_text() for p in Path(serve.__file__).parent.glob("*.py"))
    source += inspect.getsource(mlx_lm.server) + inspect.getsource(mlx_lm.chat)
    for action in parser._actions:
        name, kind = action.dest, type(action).__name__
        assert (
            kind in ("Refuse", "_HelpAction") or name in STREAM_OPTIONS or f"args.{name}" in source
        )


def test_an_option_of_another_command_names_it(calls, capsys):
    got = run(capsys, "bench", "M", "--port", "4")
    assert got.code == 2 and "--port is an option of serve" in got.err
    got = run(capsys, "check", "M", "--nonsense")
    assert got.code == 2 and "check does not take --nonsense" in got.err
    got = run(capsys, "--nonsense", "check", "M")
    assert got.code == 2 and "--nonsense" in got.err and not calls


def test_no_import_that_loses_ctrl_c_is_left_to_the_command():
    """numpy.random loads itself at its first use, and its compiled modules drop exceptions."""
    code = (
        "import signal, sys, numpy\n"
        "from moelab.__main__ import end_at_ctrl_c, raise_at_ctrl_c\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "end_at_ctrl_c()\n"
        "assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler\n"
        "raise_at_ctrl_c()\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "print('numpy.random' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_only_the_module_of_the_command_is_imported():
    """``--help`` alone imports none of them, and no MLX, which takes most of a second."""
    code = (
        "import sys\n"
        "from moelab.__main__ import parse\n"
        "try: parse(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    for argv, modules in (
        (["--help"], set()),
        (["check", "--help"], {"moelab.lab.machine"}),
    ):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
        imported = set(done.stderr.split())
        commands = {f"moelab.{module}" for module, _ in COMMANDS.values()} & imported
        assert commands == modules and ("mlx.core" in imported) == bool(modules)


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_option_that_a_mode_has_no_use_for(mode, calls, capsys):
    for name, value in STREAM.items():
        calls.clear()
        given = "--experts-top-k" if name == "--top-k" else name
        got = run(capsys, "generate", "M", "--prompt", "x", "--mode", mode, given, value)
        if mode in BY_FLAG[name].modes:
            assert got.code == 0 and value in repr(calls[0][0][1]), (name, got)
        else:
            assert got.code in (1, 2) and not calls, (name, got)
            assert name in got.err or name[2:].replace("-", "_") in got.err, got.err
            assert mode in got.err, got.err


def test_what_slots_auto_goes_by_needs_it(calls, capsys):
    for name, value in AUTO.items():
        for more, refused in (([], None), (["--slots", "9"], "--slots auto")):
            got = run(capsys, "generate", "M", "--prompt", "x", name, value, *more)
            assert (got.code, len(calls)) == ((2, 1) if refused else (0, 1)), got.err
            assert not refused or (name in got.err and refused in got.err)
        calls.clear()


# Values


def impossible():
    """Values that the fields of ``StreamConfig`` do not take."""
    for name, option in STREAM_OPTIONS.items():
        values = ["nonsense", *option.only_in_python]
        if option.bounds:
            least, most = option.bounds
            values += ["1.5", least - 1, most + 1]
        if option.bounds or option.choices:
            given = "--experts-top-k" if name == "top_k" else flag(name)
            yield from (f"generate M --prompt x {given} {value}" for value in values)


@pytest.mark.parametrize(
    "command",
    [
        *impossible(),
        "generate M --prompt x --max-tokens -5",
        "generate M --prompt x --mode warp",
        "plan M --ssd nan",
        "synthesize O --like qwen9",
    ],
)
def test_a_value_that_cannot_be(command, calls, capsys):
    *_, name, value = command.split()
    got = run(capsys, *command.split())
    assert (got.code, calls) == (2, [])
    assert name in got.err and (value in got.err or "," in value)
    assert "expected" in got.err or "choose from" in got.err


# Text


def stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def test_a_dash_reads_standard_input(calls, monkeypatch, capsys):
    text = "def grüße():\n    pass\n"
    stdin(monkeypatch, text.encode())
    assert run(capsys, "generate", "M", "--prompt", "-").code == 0
    assert calls[0][0][0].prompt == text


@pytest.mark.parametrize(
    "data, words", [(b"", "got none"), (b"caf\xe9 au lait", "UTF-8"), (None, "got none")]
)
def test_standard_input_that_is_no_text(data, words, calls, monkeypatch, capsys):
    stdin(monkeypatch, data) if data is not None else monkeypatch.setattr(sys, "stdin", None)
    got = run(capsys, "generate", "M", "--prompt", "-")
    assert got.code == 2 and not calls
    assert all(w in got.err for w in ("--prompt", "standard input", words))


def test_a_prompt_that_is_no_text(calls, capsys):
    for prompt in ("", b"caf\xe9".decode(errors="surrogateescape")):
        got = run(capsys, "generate", "M", "--prompt", prompt)
        assert got.code == 2 and "--prompt" in got.err and not calls


class Strips:
    """A tokenizer that makes nothing of blanks, as some do."""

    def __init__(self, inner):
        self._inner = inner

    def encode(self, text, **kwargs):
        return self._inner.encode(text, **kwargs) if text.strip() else []

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_a_prompt_without_a_token(model_path, monkeypatch, capsys):
    def load_stripping(*args, **kwargs):
        model, its = moelab.load(*args, **kwargs)
        return model, Strips(its)

    monkeypatch.setattr(generate, "load", load_stripping)
    got = run(capsys, "generate", model_path, "--prompt", "   ")
    assert got.code == 1 and "prompt '   '" in got.err and "at least one token" in got.err


@pytest.mark.parametrize(
    "command",
    [
        ["check", ""], ["generate", "", "--prompt", "x"], ["repack", "M", ""], ["synthesize", ""],
        ["synthesize", "O", "--tokenizer", ""], ["bench", "M", "--draft", ""],
    ],
)  # fmt: skip
def test_an_empty_name_is_not_the_current_folder(command, calls, capsys):
    got = run(capsys, *command)
    assert got.code == 2 and "expected a name, got nothing" in got.err and not calls


def test_check_names_a_model_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(machine, "read_speed", lambda *_: pytest.fail("another model was read"))
    for name in ("nowhere", __file__):
        got = run(capsys, "check", name)
        assert got.code == 1 and name in got.err and "folder" in got.err


def without_tokenizer(path):
    (path / "tokenizer.json").unlink()


def with_an_old_index(path):
    index = {"weight_map": {"norm.weight": "model-00001-of-00009.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def dangling(path):
    (path / "a.safetensors").symlink_to("nowhere")


def as_adapters(path):
    (path / "config.json").rename(path / "adapter_config.json")


# What is done to a copy of a folder of data/models, a command, its exit status, and what it says.
WORDS = {
    "no tokenizer": ("tiny-moe", without_tokenizer, "generate {} -p hi", 1, "tokenizer.json may"),
    "no tokenizer, check": ("tiny-moe", without_tokenizer, "check {}", 1, "tokenizer.json may"),
    "an old index": ("tiny-moe", with_an_old_index, "check {}", 1, "or remove the index if the 1 "),
    "a DFlash draft": ("tiny-dflash", None, "generate {} -p hi", 1, "DFlash draft, .* as its --dr"),
    "a DFlash draft, plan": ("tiny-dflash", None, "plan {}", 1, "DFlash draft, .* as its --draft"),
    "a draft": ("tiny-draft", None, "generate {} -p hi", 1, "no experts .* as the --draft of a "),
    "a draft, check": ("tiny-draft", None, "check {}", 1, r"\[ok\] SSD: not measured, model/ has"),
    "adapters": ("tiny-draft", as_adapters, "generate {} -p hi", 1, "adapters as adapter_path"),
    "200MB": ("tiny-moe", None, "generate {} -p hi -m 1 --memory-nbytes 200MB", 0, "slots=64"),
    "x in a mode": ("tiny-moe", None, "bench {} --modes fused/memory_nbytes=x", 1, "500MB or 2GB"),
    "no size": ("tiny-moe", None, "generate {} -p hi --memory-nbytes 9PB", 2, "as in 500MB or 2GB"),
    "a dangling link": (
        "tiny-moe",
        dangling,
        "check {}",
        None,
        r"\[ok\] SSD: random .* of model.s",
    ),
    "one elsewhere": ("tiny-moe", dangling, "check", None, "SSD: not measured"),
    "Ctrl-C": (
        "tiny-moe",
        None,
        "repack {} {}2",
        130,
        "interrupted: nothing was written, there is no .*model2",
    ),
    "here": (
        "tiny-moe",
        lambda path: (path.parent / "gone").mkdir(),
        "check",
        1,
        "current folder .*/gone was removed: change to another",
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_words_say_what_to_do(case, tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    name, change, command, code, said = WORDS[case]
    path = shutil.copytree(moelab.DATA / "models" / name, tmp_path / "model")
    if change:
        change(path)
    if case == "here":
        monkeypatch.chdir(gone := tmp_path / "gone")
        monkeypatch.setenv("PWD", str(gone))
        gone.rmdir()
    monkeypatch.setattr("moelab.repack._Layer.write", interrupt)
    monkeypatch.setattr(machine, "DATA", tmp_path)
    got = run(capsys, *command.replace("{}", str(path)).split())
    assert code in (None, got.code) and re.search(said, got.said), got.said


# Signals and pipes


@pytest.mark.parametrize("module", ["mlx_lm", "psutil"])
def test_ctrl_c_during_the_imports(module, tmp_path):
    """The first half second is imports of what the command needs."""
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
    said = process.communicate(timeout=60)[1].splitlines()
    assert [line for line in said if not line.startswith("moelab: slots=")] == ["interrupted"]
    assert process.returncode == 130


@pytest.mark.parametrize("command", ["generate", "check"])
def test_a_reader_that_goes_away(command, model_path):
    """As ``... | head -1`` does."""
    argv = [sys.executable, "-m", "moelab", command, str(model_path)]
    if command == "generate":
        argv += ["--prompt", "line\n", "--max-tokens", "2000", "--slots", "8"]
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
        ("generate MODEL --slots 8 --prompt x --max-tokens 2 >&-", 0, ""),
        ("generate MODEL --slots 8 --prompt x --max-tokens 2 <&- 2>&-", 0, ""),
        ("generate MODEL --slots 8 --prompt x --max-tokens 2 > /dev/full", 1, "No space left"),
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


def test_an_option_that_is_there_twice(calls, capsys):
    """The first of the two was ignored."""
    for command in ("generate M --prompt x --slots 8 --slots 16", "bench M --tokens 3 --tokens 4"):
        got = run(capsys, *command.split())
        assert got.code == 2 and not calls
        assert command.split()[-2] in got.err and "twice" in got.err


def test_an_option_is_written_in_full(calls, capsys):
    """``--mode`` would be taken for ``--modes`` by argparse."""
    got = run(capsys, "bench", "M", "--mode", "fused")
    assert got.code == 2 and "--mode" in got.err and not calls


def test_a_folder_with_brackets(tokenizer, tmp_path, capsys):
    here = tmp_path / "a [x]"
    model, cache, packed = (str(here / name) for name in ("m [1]", "c [2].safetensors", "p [3]"))
    make = dict(config=small(), tokenizer=tokenizer, progress=False)
    synthesize_.synthesize(model, **make)
    synthesize_.synthesize(tmp_path / "a x" / "m 1", seed=1, **make)  # what the pattern matches
    say = ("--prompt", "def", "--max-tokens", "4")
    for argv in (
        ("plan", model),
        ("cache-prompt", model, "--prompt", "x", "--prompt-cache-file", cache),
        ("generate", model, "--prompt-cache-file", cache, *say),
        ("repack", model, packed, "--quiet"),
        ("generate", model, "--draft", model, *say),
        ("generate", packed, *say),
        ("generate", model, "--mode", "resident", *say),
    ):
        assert main(argv) == 0, capsys.readouterr()
    texts = [out.partition("[")[0] for out in capsys.readouterr().out.rsplit("def", 3)[1:]]
    assert len({*texts}) == 1, texts
    main(("check", model))  # its status tells of the machine, too
    assert "m [1]: the slots hold" in capsys.readouterr().out
