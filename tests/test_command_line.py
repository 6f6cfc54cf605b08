"""The command line ignores no option, refuses wrong values, and prints no traceback."""

import argparse
import inspect
import io
import json
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import mlx_lm.chat
import mlx_lm.server
import pytest
from common import small
from mlx_lm.generate import setup_arg_parser

import moelab
from moelab import kernels
from moelab import synthesize as synthesize_
from moelab.__main__ import COMMANDS, main, start
from moelab.commands import chat, generate, serve, synthesize
from moelab.commands.arguments import STREAM_OPTIONS
from moelab.lab import limit, variants
from moelab.lab.experiments import bench, plan
from moelab.prompt import encode
from moelab.streaming.ranks import RankError


@pytest.fixture
def work(monkeypatch):
    """A mock that ends ``generate`` once the command has its arguments and configuration."""
    monkeypatch.setattr(generate, "check_kv_cache", work := Mock(side_effect=SystemExit(0)))
    return work


# Options


@pytest.mark.parametrize("command", [generate, chat, serve, bench, plan, synthesize])
def test_no_option_is_ignored_and_a_number_is_finite_and_has_bounds(command):
    """Options of generate, chat and serve are read by moelab's commands or by mlx-lm's ``chat``."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    source = "".join(p.read_text() for p in Path(serve.__file__).parent.rglob("*.py"))
    source += inspect.getsource(mlx_lm.chat)
    for action in parser._actions:
        name, kind = action.dest, type(action).__name__
        if command not in (bench, plan, synthesize) and name not in STREAM_OPTIONS:
            assert kind in ("Refuse", "_HelpAction") or f"args.{name}" in source
        for text in ("nan", "inf", "1e300", "-1", "9" * 400):
            with suppress(argparse.ArgumentTypeError, ValueError):
                value = action.type(text) if action.type else text
                assert action.choices or isinstance(value, (str, list, tuple)), action.dest


# Mistakes: ``GOOD`` has a valid line for each command. With a model of ``MODELS`` or the words
# of ``MORE`` the line is a mistake. ``OWN`` has each command's own mistakes, and the error.
GOOD = {
    "check": "m",
    "generate": "m --prompt x",
    "chat": "m",
    "serve": "m --port 0",
    "bench": "m",
    "plan": "m",
    "synthesize": "new",
    "repack": "m new",
}
MODELS = {
    "''": "expected a name, got nothing",
    "no/no/m": "no such folder, seen from .*: check the path|a model folder, .* got 'm'",
    "no": "no such folder.* none downloaded.*: check the name|a model folder, .* got 'no'",
    "text.txt": "got a file. Give the folder",
    "dangling": "got a link that leads nowhere",
    "empty": "expected a model folder with a config.json, found none. Give",
    "broken": "broken/config.json: not JSON.*Download it again",
    "old": "1 are not in the folder.*Download .* or remove the index if the 1 ",
    "adapters": "these adapters as",
    "tiny-draft": "no experts.*as the --draft of a model|a model with experts",
    "tiny-dflash": "got a DFlash draft.*its --draft",
    "tiny-mtp": "got a draft head.*its --draft",
}
MORE = {
    "--nonsense 3": "does not take --nonsense: leave it out",
    "--nonsense=--": "--nonsense: expected a value",
    "third": "does not take third: leave it out, or put quotes around",
    "-z": "does not take -z: leave it out",
}
OWN = """
check --model m | MODEL], without a flag
generate --prompt x | MODEL is required
generate m | required: -p/--prompt
generate m --promt x | did you mean --prompt
generate m --prompt '' | --prompt: expected some text
generate m --prompt caf\udce9 | --prompt: expected UTF-8
generate m --prompt x --max-token 3 | did you mean --max-tokens
generate m --prompt x --slots 1.5 | --slots: expected a whole number .* got '1.5', or auto
generate m --prompt x --mode serial --slots 9 | --slots has no effect in mode serial
generate m --prompt x --policy lfu | --policy
generate m --prompt x --slots 9 --memory-nbytes 1GB | --memory-nbytes .* without --slots auto
generate m --prompt x --slots 3 | --slots: expected at least 8 .* lower --experts-top-k
generate m --prompt x --memory-nbytes 9PB | as in 500MB or 2GB
generate m --prompt x --memory-nbytes 1MB | expected at least .* of memory .* got 1 MB
generate m --prompt x --temperature 1 | did you mean --temp
generate m --prompt x --top-k 3 | two meanings .* --sampling-top-k .* --experts-top-k
generate m --prompt x --experts-top-k 99 | --experts-top-k: expected 1 to 64
generate m --prompt x --mode warp | --mode: .* 'warp' .choose from .?resident
generate m --prompt x --mode serial --prefetch lookahead | --prefetch: 'lookahead' needs slots
generate m --prompt x --draft no | draft 'no': expected lookup, mtp
generate m --prompt x --draft empty | draft 'empty': .* no config.json there
generate m --prompt x --draft mtp | mlx_lm.convert drops them
generate m --prompt x --adapter-path m | found no adapter_config.json and no adapters
generate m --prompt x --sampling-top-k 8192 --temp 1 | --sampling-top-k=8192: expected less
generate m --prompt x --min-tokens-to-keep 9000 | --min-tokens-to-keep=9000: expected less
generate m --prompt x --kv-bits 4 --kv-group-size 128 | --kv-group-size=128: mlx-lm cannot quantize
generate m --prompt x --extra-eos-token nonsuch | --extra-eos-token: expected a token
generate m --prompt x --max-kv-size 64 | --max-kv-size: .* --context .* leave it out
chat m --max-kv-size 64 | --max-kv-size: .* --context .* leave it out
generate m --prompt x --chat-template-config [] | --chat-template-config: expected an object in JSON
generate m --prompt x --prompt-cache-file c | --prompt-cache-file: serve keeps prompts
generate bare --prompt x | tokenizer.json may
serve m --pipeline | --pipeline: several machines divide the experts
serve m --port 99999 | --port: expected a whole number from 0 to 65535
serve m --port 0 --prompt-cache-dir text.txt | --prompt-cache-dir text.txt: cannot be written
serve m --port 0 --memory-nbytes 170MB --decode-concurrency 20 | expected at least .* reserved
serve m --port 0 --host no.such.host.invalid | --host no.such.host.invalid
serve m --prompt-cache-bytes much | --prompt-cache-bytes: expected bytes
serve m --chat-template-args [1] | --chat-template-args: expected an object in JSON
bench m --modes fused/slot=3 | expected FIELD=VALUE
bench m --modes fused/lazy_logits=no | expected True or False, got 'no'
bench m --modes buffers/policy=lfu | modes: policy in 'buffers/policy=lfu' has no effect
bench m --modes fused/policy=mru | policy: expected one of lru, lfu, lrfu, got 'mru'
bench m --modes fused/memory_nbytes=x | modes: 'memory_nbytes=x' in .* 500MB or 2GB
bench m --modes fused/slots=8/slots=9 | slots is there twice
bench m --modes fused/slots=20,stacked/slots=30 --slots 9 | --slots.*fused/slots=20
bench m --slots 2 | --slots: expected at least 8
bench m --tokens 3 --tokens 4 | --tokens is given twice
bench m --lengths 2,4,2 | --lengths.*expected
bench m --feed traces/code.npz --tokens 500 | 516 tokens behind it .* got 128 and 512
bench moe --feed traces/code.npz | expected tokens below .*, the vocabulary of
bench m --feed text.txt | expected a trace
bench m --draft nonsense | nonsense.*lookup, mtp, self, oracle
bench m --draft oracle:1.5 | expected a share from 0 to 1
bench m --draft broken --limits 900 | not JSON
bench m --json /dev/null | no plain file
plan | required: MODEL
plan Qwen3.5-35b | expected a model folder, .* or qwen3.5-35b-a3b or
plan no/Qwen3.5-35B-A3B-4bit --ssd 3 | a downloaded Hub repository, or qwen3.5-35b-a3b
plan m --ssd 16 | --ssd: expected a model by name
plan gpt-oss-20b --ram 16 --chip M4 | give its --ram and --ssd
plan gpt-oss-20b --ram 16 --ssd 3 --chip M4 --cores 4 | expected --chip or --cores
plan gpt-oss-20b --chip M9 --ram 1 --ssd 1 | the GB/s of its memory, or one of A18 Pro
plan gpt-oss-20b --ram 1TB | --ram: expected a number of GB from 1 .* got '1TB'
plan gpt-oss-20b --prompt 1000000000000 | --prompt: expected a whole number from 1 to 1000000
plan kimi-k3 --ram 8 --ssd 1 --cores 4 | kimi-k3 does not fit: even
plan Kimi-K3 --ram 8 | kimi-k3 does not fit: even
synthesize | required: OUT
synthesize '' | expected a name, got nothing
synthesize empty | empty exists already: remove it or name another
synthesize text.txt/new | text.txt/new: no folder can be made
synthesize new --like qwen9 | --like: expected one of qwen3.5-35b-a3b,.* got 'qwen9'
synthesize new --layers 0 | --layers: expected a whole number from 1
synthesize new --layers 41 | --layers=41: expected 4 to 40
synthesize new --vocab 10 | --vocab=10: expected at least
synthesize new --tokenizer '' | expected a name, got nothing
synthesize new --tokenizer empty | no tokenizer.json in empty
synthesize new --routing no | no: No such file
synthesize new --routing text.txt | expected a trace
repack m | required: OUT
repack m '' | expected a name, got nothing
repack m empty | empty exists already: remove it or name another
repack m new --from hf | --from: invalid choice
--nonsense check m | does not take --nonsense
generat m | COMMAND: invalid choice: 'generat' .choose from
"""


def mistakes():
    for command, words in GOOD.items():
        yield from ((f"{command} {words} {more}", said) for more, said in MORE.items())
        for model, said in MODELS.items() if "m" in words.split() else ():
            yield f"{command} {model}{words.removeprefix('m')}", said
    yield from (line.rsplit(" | ", 1) for line in OWN.strip().splitlines())
    if kernels.available():
        yield "bench m --modes resident,fused/dtype=bfloat16", "=mlx"


@pytest.fixture(scope="module")
def place(tmp_path_factory, moe, model_path):
    """A folder with models, and with files and folders that are no models."""
    here = tmp_path_factory.mktemp("place")
    for name in ("tiny-draft", "tiny-dflash", "tiny-mtp"):
        (here / name).symlink_to(moelab.DATA / "models" / name)
    for name, target in (("m", "models/tiny-moe"), ("traces", "traces"), ("dangling", "no")):
        (here / name).symlink_to(moelab.DATA / target)
    (here / "moe").symlink_to(moe)
    for name in ("bare", "old"):
        shutil.copytree(model_path, here / name)
    (here / "bare" / "tokenizer.json").unlink()
    index = {"weight_map": {"norm.weight": "model-00001-of-00009.safetensors"}}
    (here / "old" / "model.safetensors.index.json").write_text(json.dumps(index))
    (here / "text.txt").write_text("no JSON")
    for file in ("empty/x", "broken/config.json", "adapters/adapter_config.json"):
        (here / file).parent.mkdir()
        (here / file).write_text("{")
    return here


@pytest.mark.parametrize("command, said", mistakes())
@pytest.mark.usefixtures("in_time")
def test_a_mistake_gets_one_line_that_says_what_to_do(command, said, place, run, monkeypatch):
    """The error comes before any work: nothing is downloaded, measured or written."""
    offline = partial(mlx_lm.utils.snapshot_download, local_files_only=True)
    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", offline)
    for module, work in ((limit, "run"), (variants, "load"), (plan, "measure_costs")):
        monkeypatch.setattr(module, work, lambda *_, **__: pytest.fail("it began"))
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    got = run(*shlex.split(command))
    assert got.code in (1, 2) and re.search(said, got.err) and not got.out
    assert not re.search(r"^moelab: .Errno|HFValidation|LocalEntry|StreamConfig\.", got.err)
    beside = "usage: | |moelab: slots="
    assert [s for s in got.said.splitlines() if not re.match(beside, s)] == [got.err]
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    "words, flag",
    (
        ("[metal::malloc] Attempting to allocate 9 bytes", "--memory-nbytes"),
        ("[METAL] Command buffer execution failed: Insufficient Memory.", "--memory-nbytes"),
        ("[METAL] Command buffer execution failed: GPU Timeout Error.", "--prefill-step-size"),
    ),
)
def test_a_gpu_that_lacks_memory_or_time_is_told_in_one_line(words, flag, run, monkeypatch):
    monkeypatch.setattr(plan, "run", Mock(side_effect=RuntimeError(words)))
    got = run("plan", "gpt-oss-20b")
    assert got.code == 1 and got.err == f"moelab: {words} Close other programs, or lower {flag}."


def test_a_rank_that_ends_is_told_in_one_line_if_mlx_fails_too(run, monkeypatch):
    def ends(_):
        try:
            raise RankError("another rank has ended")
        finally:
            raise RuntimeError("[ring] connection to a peer was lost")  # by mlx-lm's wired_limit

    monkeypatch.setattr(plan, "run", ends)
    got = run("plan", "gpt-oss-20b")
    assert got.code == 1 and got.err == "moelab: another rank has ended"


@pytest.mark.parametrize("started_as", ("moelab", "python -m moelab"))
def test_usage_says_how_it_was_started(started_as, run, monkeypatch):
    project = tomllib.loads((moelab.DATA.parent / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["moelab"]) is start
    path = "/a/bin/moelab" if started_as == "moelab" else "/a/moelab/__main__.py"
    monkeypatch.setattr(sys, "argv", [path])
    assert run("--version").out == f"moelab {moelab.__version__}\n"
    for command in GOOD:
        assert f"usage: {started_as} {command} [" in run(command, "--help").out


def test_what_help_and_the_first_second_need():
    """``--help`` imports neither a command nor MLX, whose import takes most of a second."""
    command = [sys.executable, "-X", "importtime", "-m", "moelab", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not done.returncode and "moelab.interrupts" in imported, done.stderr
    assert not imported & {"mlx.core", *(f"moelab.{module}" for module, _ in COMMANDS.values())}


def servers_parser():
    """The parser that mlx-lm's server makes in its ``main``."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(StopIteration) as stop:
        made = argparse.ArgumentParser()
        made.parse_args = Mock(side_effect=StopIteration(made))
        patched.setattr(mlx_lm.server, "argparse", SimpleNamespace(ArgumentParser=lambda **_: made))
        mlx_lm.server.main()
    return stop.value.value


@pytest.mark.parametrize(
    "ours, theirs, others",
    [
        (generate, setup_arg_parser,
         {"--prompt", "-p", "--max-tokens", "-m", "--chat-template-config", "--num-draft-tokens",
          "--top-k", "--image", "--quantize-activations", "-qa", "--use-default-chat-template"}),
        (chat, mlx_lm.chat.setup_arg_parser, {"--pipeline"}),
        (serve, servers_parser,
         {"--max-tokens", "--num-draft-tokens", "--top-k", "--pipeline", "--allowed-origins",
          "--chat-template-args", "--use-default-chat-template"}),
    ],
)  # fmt: skip
def test_the_flags_are_those_of_mlx_lm(ours, theirs, others):
    """Our parser has mlx-lm's flags and defaults, except flags that mean something else here."""
    parser = argparse.ArgumentParser()
    ours.add_arguments(parser)
    found, wanted = parser._option_string_actions, theirs()._option_string_actions
    assert set(wanted) <= set(found)
    for name in set(wanted) - {"--model", "-h", "--help", *others}:
        got, action = found[name], wanted[name]
        assert (got.dest, got.default) == (action.dest, action.default), name


@pytest.mark.parametrize(
    "option, value",
    [
        ("slots", 9), ("experts-top-k", 3), ("reads", "direct"), ("readers", 7), ("context", 512),
        ("prefetch", "lookahead"), ("memory-nbytes", 10**9),
    ],
)  # fmt: skip
def test_a_stream_option_counts(option, value, work, run):
    assert run("generate", "M", "--prompt", "x", f"--{option}", value).code == 0
    field = option.removeprefix("experts-").replace("-", "_")
    assert getattr(work.call_args.args[1], field) == value


@pytest.mark.parametrize(
    "variables, now",
    [
        (["MLX_MOE_STACKED=1", "MLX_MOE_CACHE_SLOTS=24"], "mode stacked, slots 24"),
        (["SWIFTLM_TOP_K=4"], "mode fused, slots 9, top-k 4"),
        ([], ""),
    ],
)
def test_the_environment_of_swiftlm(variables, now, work, monkeypatch, run):
    """SwiftLM's variables are honoured and named; the command's own options override them."""
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))
    options = [] if "24" in now else ["--slots", "9"]
    err = run("generate", "M", "--prompt", "x", *options).said.strip()
    assert all(variable in err for variable in variables) and err.endswith(now)
    config = work.call_args.args[1]
    assert f"mode {config.mode}, slots {config.slots}" in now if variables else not err


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
def test_a_dash_reads_standard_input(data, refused, work, monkeypatch, run):
    given = None if data is None else io.TextIOWrapper(io.BytesIO(data), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", given)
    got = run("generate", "M", "--prompt", "-")
    if refused is None:
        assert got.code == 0 and work.call_args.args[0].prompt == data.decode()
    else:
        assert got.code == 2 and not work.called
        assert all(w in got.err for w in ("--prompt", "standard input", refused))


def test_a_prompt_without_a_token():
    """Some tokenizers make no token from blanks."""
    with pytest.raises(ValueError, match="prompt '   ': .* at least one token"):
        encode(SimpleNamespace(encode=lambda text: []), "   ")


def test_check_measures_a_file_that_is_there(tmp_path, run):
    model = shutil.copytree(moelab.DATA / "models" / "tiny-moe", tmp_path / "m")
    (model / "a.safetensors").symlink_to("nowhere")
    assert re.search(r"\[ok\] SSD: .* of model.s", run("check", model).out)


# Signals and pipes


AT_IMPORT = """
import signal, sys

class Finder:
    def find_spec(self, name, *_):
        name == "moelab.interrupts" and signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


def test_ctrl_c_while_the_package_is_imported(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    command = [sys.executable, "-m", "moelab", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


CTRL_C = """
import ctypes, os, runpy, signal, subprocess, sys, threading, time
from moelab import repack
from moelab.streaming import model, session

class Gone:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def begin(*_):
    subprocess.Popen(["sleep", "1000"])
    Gone()

def wait(*_):
    "Wait in native code for a lock that nobody releases."
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    memory, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_init(memory, None)
    for _ in range(2):
        libc.pthread_mutex_lock(memory)
    time.sleep(1000)

class Imported:
    def find_spec(self, name, *_):
        name == "moelab.commands.generate" and begin()

{}
sys.argv[1:] = {!r}.split()
runpy.run_module("moelab", run_name="__main__")
"""
CUTS = {  # a command on model M: where Ctrl-C ends the command, and what the command says
    "check M --json o.json": ("from moelab.lab import check\ncheck.swapped_s = begin", ""),
    "generate M -p v": ("sys.meta_path.insert(0, Imported())", ""),
    "generate M -p w": ("session.Room.parts = begin", ""),
    "generate M -p x": ("model.tokenizer_of = begin", ""),
    "generate M -p y": ("model.tokenizer_of = wait", ""),
    "bench M --modes fused --tokens 1 --runs 1 --json o.json": ("os.replace = begin", ""),
    "repack M o": ("repack._Layer.write = begin", ": nothing was written, there is no o"),
}


@pytest.mark.parametrize("command", CUTS)
def test_ctrl_c_leaves_nothing(command, model_path, tmp_path):
    """Ctrl-C counts in a destructor, too, where Python loses it. No child keeps a pipe open."""
    cut, said = CUTS[command]
    script = CTRL_C.format(cut, command.replace("M", str(model_path)))
    pipes = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, **pipes)
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
    if "/dev/full" in command and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    command = command.replace("MODEL", str(model_path))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shlex.quote(sys.executable)} -m moelab {command}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert words in done.stderr and done.stderr.count("\n") == bool(words)


def test_a_folder_with_brackets(tokenizer, tmp_path, capsys):
    here, make = tmp_path / "a [x]", dict(config=small(), tokenizer=tokenizer, progress=False)
    model, packed = (str(here / name) for name in ("m [1]", "p [2]"))
    synthesize_.synthesize(model, **make)
    synthesize_.synthesize(tmp_path / "a x" / "m 1", seed=1, **make)  # as globs, [x] and [1] match
    say = ("--prompt", "def", "--max-tokens", "4")
    for argv in (
        ("plan", model),
        ("repack", model, packed),
        ("generate", model, "--draft", model, *say),
        ("generate", packed, *say),
    ):
        assert main(argv) == 0, capsys.readouterr()
    out, err = capsys.readouterr()
    assert "%|" not in err  # no progress bar: stderr is no terminal
    texts = [text.partition("[")[0] for text in out.rsplit("def", 2)[1:]]
    assert len({*texts}) == 1, texts
