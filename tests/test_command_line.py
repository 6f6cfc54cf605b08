"""python -m moelab: no option is ignored, no value is taken for another, no traceback."""

import argparse
import importlib
import inspect
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import mlx_lm.cache_prompt
import mlx_lm.chat
import mlx_lm.server
import pytest
from small import small

import moelab
from moelab import synthesize as synthesize_
from moelab.__main__ import COMMANDS, main
from moelab.commands import cache_prompt, chat, generate, repack, serve, synthesize
from moelab.commands.stream_options import STREAM_OPTIONS
from moelab.lab import check
from moelab.lab.experiments import bench, plan
from moelab.prompt import encode

MLX_LM_GENERATE = importlib.import_module("mlx_lm.generate")  # mlx_lm.generate is a function
WORK = (  # what a command calls to do its work
    (check, "check"), (generate, "generate"), (serve, "serve"), (chat, "chat"),
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


# Options


@pytest.mark.parametrize("command", [generate, cache_prompt, chat, serve])
def test_no_option_is_ignored(command):
    """Each is read by a command here or, of ``chat``, by mlx-lm's module that it builds on."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    source = "".join(p.read_text() for p in Path(serve.__file__).parent.rglob("*.py"))
    source += inspect.getsource(mlx_lm.chat)
    for action in parser._actions:
        name, kind = action.dest, type(action).__name__
        assert (
            kind in ("Refuse", "_HelpAction") or name in STREAM_OPTIONS or f"args.{name}" in source
        )


@pytest.mark.parametrize(
    "command, said",
    [
        ("bench M --port 4", "--port"),
        ("check M --nonsense", "check does not take --nonsense"),
        ("--nonsense check M", "--nonsense"),
        ("bench M --mode fused", "--mode"),  # argparse would take it for --modes
        ("generate M --prompt x --slots 8 --slots 16", "--slots is there twice"),
        ("bench M --tokens 3 --tokens 4", "--tokens is there twice"),
        ("check ", "expected a name, got nothing"),
        ("generate  --prompt x", "expected a name, got nothing"),
        ("generate M --prompt ", "--prompt"),
        ("generate M --prompt caf\udce9", "--prompt"),  # bytes that are no UTF-8
        ("repack M ", "expected a name, got nothing"),
        ("synthesize O --tokenizer ", "expected a name, got nothing"),
        ("bench M --draft ", "expected a name, got nothing"),
        ("serve M --pipeline", "--pipeline: several machines divide the experts"),
        ("serve M --prompt-cache-bytes much", "--prompt-cache-bytes"),
        ("serve M --chat-template-args [1]", "--chat-template-args"),
        # tests/test_bad_input.py has values for every field of StreamConfig.
        ("generate M --prompt x --slots 1.5", "--slots: expected a whole number .* got '1.5'"),
        ("generate M --prompt x --experts-top-k 0", "--experts-top-k: expected .* got '0'"),
        ("generate M --prompt x --max-tokens -5", "--max-tokens: expected .* got '-5'"),
        ("generate M --prompt x --mode warp", "--mode: .* 'warp' .choose from 'resident'"),
        ("plan M --ssd nan", "--ssd: expected a number .* got 'nan'"),
        ("synthesize O --like qwen9", "--like: expected one of qwen3.5-35b-a3b,.* got 'qwen9'"),
    ],
)
def test_a_wrong_command_line(command, said, calls, run):
    got = run(*command.split(" "))
    assert got.code == 2 and re.search(said, got.err) and not calls


def test_what_help_and_the_first_second_need():
    """``--help`` imports no command and no MLX, which takes most of a second."""
    code = (
        "import sys\n"
        "from moelab.__main__ import parse\n"
        "try: parse(['--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    imported = set(done.stderr.split())
    assert not done.returncode, done.stderr
    assert not imported & {"mlx.core", *(f"moelab.{module}" for module, _ in COMMANDS.values())}


def servers_parser():
    """The parser of mlx-lm's server, which makes it in ``main``."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(StopIteration) as stop:
        made = argparse.ArgumentParser()
        made.parse_args = Mock(side_effect=StopIteration(made))
        patched.setattr(mlx_lm.server, "argparse", SimpleNamespace(ArgumentParser=lambda **_: made))
        mlx_lm.server.main()
    return stop.value.value


@pytest.mark.parametrize(
    "ours, theirs, others",
    [
        (generate, MLX_LM_GENERATE.setup_arg_parser,
         {"--prompt", "-p", "--max-tokens", "-m", "--chat-template-config", "--num-draft-tokens",
          "--top-k", "--image", "--quantize-activations", "-qa", "--use-default-chat-template"}),
        (chat, mlx_lm.chat.setup_arg_parser, {"--pipeline"}),
        (cache_prompt, mlx_lm.cache_prompt.setup_arg_parser, set()),
        (serve, servers_parser,
         {"--num-draft-tokens", "--top-k", "--pipeline", "--allowed-origins",
          "--chat-template-args", "--use-default-chat-template"}),
    ],
)  # fmt: skip
def test_the_flags_are_those_of_mlx_lm(ours, theirs, others):
    """All that its command has, with its defaults, but where the two mean different things."""
    parser = argparse.ArgumentParser()
    ours.add_arguments(parser)
    found, wanted = parser._option_string_actions, theirs()._option_string_actions
    assert set(wanted) - set(found) == {"--model"}  # MODEL here
    for name in set(wanted) - {"--model", "-h", "--help", *others}:
        got, action = found[name], wanted[name]
        assert (got.dest, got.default) == (action.dest, action.default), name


@pytest.mark.parametrize(
    "option, field, value, without_use, said",
    [
        ("--slots 9", "slots", 9, "--mode serial", "--slots has no effect in mode serial"),
        ("--experts-top-k 3", "top_k", 3, "--top-k 3", "--top-k.* two meanings here"),
        ("--policy lfu", "policy", "lfu", "--mode buffers", "--policy has no effect in mode buf"),
        ("--readers 7", "readers", 7, "--mode resident", "--readers has no effect in mode res"),
        ("--prefetch lookahead", "prefetch", "lookahead", "--mode serial", "prefetch: .* needs sl"),
        ("--ranks-trace t.npz", "ranks_trace", "t.npz", "--mode resident", "--ranks-trace has no"),
        ("--memory-nbytes 1GB", "memory_nbytes", 10**9, "--slots 9", "without --slots auto"),
        ("--context 512", "context", 512, "--slots 9", "--context .* without --slots auto"),
    ],
)
def test_a_stream_option_counts_or_is_refused(option, field, value, without_use, said, calls, run):
    command = ["generate", "M", "--prompt", "x", *option.split()]
    assert run(*command).code == 0
    assert getattr(calls.pop()[0][1], field) == value
    got = run(*command, *without_use.split())
    assert got.code in (1, 2) and re.search(said, got.err) and not calls


# Text


@pytest.mark.parametrize(
    "data, refused",
    [
        ("def grüße():\n    pass\n".encode(), None),
        (b"", "got none"),
        (b"caf\xe9 au lait", "UTF-8"),
        (None, "got none"),
    ],
)
def test_a_dash_reads_standard_input(data, refused, calls, monkeypatch, run):
    given = None if data is None else io.TextIOWrapper(io.BytesIO(data), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", given)
    got = run("generate", "M", "--prompt", "-")
    if refused is None:
        assert got.code == 0 and calls[0][0][0].prompt == data.decode()
    else:
        assert got.code == 2 and not calls
        assert all(w in got.err for w in ("--prompt", "standard input", refused))


def test_a_prompt_without_a_token():
    """Some tokenizers make nothing of blanks."""
    with pytest.raises(ValueError, match="prompt '   ': .* at least one token"):
        encode(SimpleNamespace(encode=lambda text: []), "   ")


def test_a_current_folder_that_was_removed(tmp_path, run, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PWD", str(gone))
    gone.rmdir()
    got = run("check")
    assert got.code == 1 and f"current folder {gone} was removed: change to another" in got.err


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
    "an old index": ("tiny-moe", with_an_old_index, "check {}", 1, "or remove the index if the 1 "),
    "no model": ("tiny-moe", None, "serve {}/no", 1, "model/no: expected a model folder"),
    "adapters": ("tiny-draft", as_adapters, "generate {} -p hi", 1, "adapters as adapter_path"),
    "200MB": ("tiny-moe", None, "generate {} -p hi -m 1 --memory-nbytes 200MB", 0, "slots=64"),
    "x in a mode": ("tiny-moe", None, "bench {} --modes fused/memory_nbytes=x", 1, "500MB or 2GB"),
    "no size": ("tiny-moe", None, "generate {} -p hi --memory-nbytes 9PB", 2, "as in 500MB or 2GB"),
    "a dangling link": ("tiny-moe", dangling, "check {}", None, r"\[ok\] SSD: .* of model.s"),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_words_say_what_to_do(case, tmp_path, monkeypatch, run):
    name, change, command, code, said = WORDS[case]
    path = shutil.copytree(moelab.DATA / "models" / name, tmp_path / "model")
    if change:
        change(path)
    monkeypatch.setattr(check, "DATA", tmp_path)
    got = run(*command.replace("{}", str(path)).split())
    assert code in (None, got.code) and re.search(said, got.said), got.said


# Signals and pipes


@pytest.mark.parametrize("delay_s", [0.1, 0.3, 1.0])
def test_ctrl_c_in_the_first_second(delay_s, model_path):
    """At first during the imports of what the command needs, which take half a second."""
    script = (
        "import argparse, moelab, runpy, textwrap; print(flush=True); runpy.run_module('moelab'"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{script}, run_name='__main__')", "generate", str(model_path),
         "--prompt", "x", "--max-tokens", "1000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.readline()  # Python has begun, whose own start a Ctrl-C would end in other words
    try:
        process.wait(delay_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1].splitlines()
    assert [line for line in said if not line.startswith("moelab: slots=")] == ["interrupted"]
    assert process.returncode == 130


CTRL_C = """
import ctypes, os, runpy, signal, subprocess, sys, threading, time
from moelab import repack
from moelab.commands import kv_cache
from moelab.streaming import model

class Gone:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def begin(*_):
    subprocess.Popen(["sleep", "1000"])
    Gone()

def wait(*_):
    "In native code, for a lock that nobody gives back."
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    memory = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(memory)
    time.sleep(1000)

save = kv_cache.save_prompt_cache
{}
sys.argv[1:] = {!r}.split()
runpy.run_module("moelab", run_name="__main__")
"""
CUTS = {  # a command of model M: where it is cut off, and what it says
    "generate M -p x": ("model.tokenizer_of = begin", ""),
    "generate M -p y": ("model.tokenizer_of = wait", ""),
    "repack M o": ("repack._Layer.write = begin", ": nothing was written, there is no o"),
    "cache-prompt M --prompt x --prompt-cache-file o.safetensors": (
        "kv_cache.save_prompt_cache = lambda *args: save(*args) or begin()",
        "",
    ),
}


@pytest.mark.parametrize("command", CUTS)
def test_ctrl_c_leaves_nothing(command, model_path, tmp_path):
    """In a destructor, which would lose an exception; a process that stays keeps the pipes open."""
    cut, said = CUTS[command]
    script = CTRL_C.format(cut, command.replace("M", str(model_path)))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, f"interrupted{said}"), done
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "command, code, words",
    [
        ("check nowhere >&-", 1, "nowhere"),
        ("generate MODEL --slots 8 --prompt x --max-tokens 2 <&- 2>&-", 0, ""),
        ("generate MODEL --slots 8 --prompt x --max-tokens 2 > /dev/full", 1, "No space left"),
        (r"generate MODEL --slots 8 --prompt 'x\n' --max-tokens 2000 | head -1", 141, ""),
    ],
)
def test_outputs_that_are_closed_full_or_not_read(command, code, words, model_path):
    command = command.replace("MODEL", str(model_path))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m moelab {command}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert words in done.stderr and done.stderr.count("\n") == bool(words)


def test_a_folder_with_brackets(tokenizer, tmp_path, capsys):
    here, make = tmp_path / "a [x]", dict(config=small(), tokenizer=tokenizer, progress=False)
    model, cache, packed = (str(here / name) for name in ("m [1]", "c [2].safetensors", "p [3]"))
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
    ):
        assert main(argv) == 0, capsys.readouterr()
    texts = [out.partition("[")[0] for out in capsys.readouterr().out.rsplit("def", 2)[1:]]
    assert len({*texts}) == 1, texts
