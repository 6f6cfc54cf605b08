"""generate and chat write the texts of mlx-lm's commands, with streamed experts."""

import importlib
import io
import json
import re
import shutil
import sys

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

import moelab
from moelab import DATA
from moelab.__main__ import main
from moelab.streaming.model import tokenizer_of

MODEL = DATA / "models/tiny-moe"
SLOTS = ("--slots", "16")
RESIDENT = moelab.StreamConfig(mode="resident")
MLX_LM_GENERATE = importlib.import_module("mlx_lm.generate")  # mlx_lm.generate is a function
PROMPT = "import numpy as np\n\ndef softmax(x, axis=-1):"
DRAFTS = [None, "lookup", DATA / "models/tiny-draft", DATA / "models/tiny-dflash"]
TEMPLATE = (  # a chat template that adds something to messages
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The model tiny-moe with the chat template ``TEMPLATE``."""
    path = tmp_path_factory.mktemp("chatty") / "m"
    shutil.copytree(MODEL, path, ignore=shutil.ignore_patterns("heldout"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def command(run):
    """A function that runs a command; it returns the output, or the error's last line."""

    def command(*argv, stdin=None, code=0):
        got = run(*argv, stdin=stdin)
        assert got.code == code, got.said
        return got.out if code == 0 else got.err

    return command


def theirs(capsys, monkeypatch, *argv):
    """Return the text that ``python -m mlx_lm generate`` prints with the model in float32."""

    def load(path, **kwargs):
        kwargs.pop("model_config", None)
        return moelab.load(path, RESIDENT, **kwargs)

    monkeypatch.setattr(MLX_LM_GENERATE, "load", load)
    monkeypatch.setattr(sys, "argv", ["generate", *map(str, argv), "--verbose", "F"])
    MLX_LM_GENERATE.main()
    return capsys.readouterr().out.removesuffix("\n")


def text_of(out):
    """A command's text, without its last lines of figures."""
    return out.partition("\n\n[")[0]


def drafted(draft, n):
    return [] if draft is None else ["--draft", draft, "--num-draft-tokens", n]


SAMPLED = ["--temp", 0.8, "--top-p", 0.9, "--min-p", 0.01, "--seed", 5]
WAYS = {  # options, and the drafts that leave the text as it is
    "greedy": ([], DRAFTS),
    "sampled": (SAMPLED, DRAFTS),
    "4 bits": (["--kv-bits", 4, "--kv-group-size", 32, "--quantized-kv-start", 0], DRAFTS[:1]),
    "2 bits amid the answer": (["--kv-bits", 2, "--quantized-kv-start", 24], DRAFTS),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_that_of_mlx_lm(way, command, capsys, monkeypatch):
    """With any draft and with quantized caches the text and the shown prompt are mlx-lm's."""
    (options, drafts), k = WAYS[way], 50 if way == "sampled" else 0
    same = ["--prompt", PROMPT, "--max-tokens", 24, *options]
    wanted = theirs(capsys, monkeypatch, "--model", MODEL, *same, "--top-k", k)
    for draft in drafts:
        options = [*SLOTS, *same, "--sampling-top-k", k, *drafted(draft, 5)]
        got = command("generate", MODEL, *options)
        assert text_of(got) == PROMPT + wanted, draft
        assert ("drafts accepted" in got) == (draft not in (None, "lookup"))
    plain = text_of(command("generate", MODEL, *SLOTS, *same[:4]))
    assert (plain == PROMPT + wanted) == (way == "greedy")


def test_what_ends_a_text(command, capsys, monkeypatch):
    """End tokens, given as text or as a number, end a text; --verbose F prints the bare text."""
    more = ["-p", "def f(x):\\n", "-m", 12]
    whole = text_of(command("generate", MODEL, *SLOTS, *more))
    assert whole.startswith("def f(x):\n    ") and ").diff" in whole  # ").diff" is two tokens
    for ends in ([").", "505"], ["4390"]):
        more[4:] = ["--extra-eos-token", *ends]
        wanted = theirs(capsys, monkeypatch, "--model", MODEL, *more)
        assert "def f(x):\n" + wanted == whole.partition("diff" if len(ends) == 1 else ").")[0]
        got = command("generate", MODEL, *SLOTS, *more)
        assert text_of(got) == "def f(x):\n" + wanted
    assert command("generate", MODEL, *SLOTS, *more, "--verbose", "F") == wanted + "\n"
    said = command("generate", MODEL, *SLOTS, "-p", "-", "-m", 1, stdin="a\\nb")
    assert said.startswith("a\\nb")  # standard input is read as it is


def test_the_plan_is_told_on_stderr(capsys):
    """stdout has the answer and the figures; stderr has the plan."""
    argv = ["generate", "--model", str(MODEL), "-p", PROMPT, "-m", "32"]
    argv += ["--memory-nbytes", "200MB"]
    assert main(argv) == main([*argv, "--verbose", "f"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"\[.* tok/s, 32 tokens; prompt .*; arrays took at most \d+ MB\]", out)
    assert "slots=" not in out and err.count("slots=") == 1 == err.count("slots=64")


@pytest.mark.parametrize(
    "options",
    [
        ["--system-prompt", "Be brief.", "--prefill-response", "def"],
        ["--ignore-chat-template"],
        ["--chat-template-config", '{"mood": "glad"}'],
    ],
)
def test_the_chat_template(options, chatty, command, capsys, monkeypatch):
    more = ["--prompt", "Sort a list.", "--max-tokens", 12, *options]
    wanted = theirs(capsys, monkeypatch, "--model", chatty, *more)
    got = text_of(command("generate", chatty, *SLOTS, *more))
    plain = "--ignore-chat-template" in options
    assert got == ("Sort a list." if plain else "") + wanted


@pytest.mark.parametrize("newer", [None, "chat_template.jinja", "tokenizer_config.json"])
def test_an_older_template(newer, tmp_path):
    """chat_template.json is used if no newer file has a template and no option gives one."""
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    config, name = json.loads((MODEL / "tokenizer_config.json").read_text()), "chat_template"
    files = {"chat_template.json": json.dumps({name: "old"}), "chat_template.jinja": "new"}
    files["tokenizer_config.json"] = json.dumps(config)
    if newer != "chat_template.jinja":
        del files["chat_template.jinja"]
        files["tokenizer_config.json"] = json.dumps(config | {name: newer and "new"})
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    assert tokenizer_of(tmp_path).chat_template == ("new" if newer else "old")
    assert tokenizer_of(tmp_path, {name: "given"}).chat_template == "given"


def test_a_template_that_fails(chatty, command, tmp_path):
    """A template refuses a system prompt, or an argument."""
    model = tmp_path / "m"
    shutil.copytree(chatty, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content | upper if m.role == 'user' "
        "else raise_exception('no system prompt here') }}{% endfor %}"
    )
    generate = ["generate", model, *SLOTS, "--max-tokens", 2, "--prompt", "x"]
    for argv in (generate, ["chat", model, *SLOTS]):
        said = command(*argv, "--system-prompt", "s", stdin="x\n", code=1)
        assert "chat template" in said and "no system prompt here" in said
    assert "tokenize" in command(*generate, "--chat-template-config", '{"tokenize": 1}', code=1)


def test_a_prompt_that_is_kept_in_a_file(tmp_path):
    """mlx-lm saves a streamed model's caches; a model that is loaded later goes on from them."""
    file, ids = str(tmp_path / "p.safetensors"), tokenizer_of(MODEL).encode(PROMPT)
    with moelab.load(MODEL, moelab.StreamConfig(slots=16))[0] as model:
        model(mx.array([ids[:-5]]), cache=(cache := make_prompt_cache(model)))
        save_prompt_cache(file, cache)
    for config in (moelab.StreamConfig(slots=16), RESIDENT):
        model, tokenizer = moelab.load(MODEL, config)
        with model:
            wanted = mlx_lm.generate(model, tokenizer, ids, max_tokens=12)
            given = {"max_tokens": 12, "prompt_cache": load_prompt_cache(file)}
            assert mlx_lm.generate(model, tokenizer, ids[-5:], **given) == wanted


# Chat


def said(out):
    """What a chat printed, without the codes of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x01\x02]", "", out)


def test_chat(chatty, command):
    """Two messages come, ``r`` forgets them, the first message comes again, and the input ends."""
    first, second = "def read_json(path):", "\ndef write_json(path):"
    model, tokenizer = moelab.load(MODEL, moelab.StreamConfig(slots=16))
    with model:
        given = {"max_tokens": 16, "prompt_cache": model.make_cache()}
        prompts = [tokenizer.encode(text) for text in (first, second.strip())]
        answers = [mlx_lm.generate(model, tokenizer, prompt, **given) for prompt in prompts]
    lines = f"{first}\n\n  \n{second.strip()}\nh\nr\n{first}\n"
    for draft in DRAFTS:
        options = ["--max-tokens", 16, *drafted(draft, 4)]
        out = said(command("chat", MODEL, *SLOTS, *options, stdin=lines))
        assert out.count(answers[0]) == 2 and out.count(answers[1]) == 1, draft
        assert "context cleared" in out and out.rstrip().endswith("bye")
    options = ["--max-tokens", 4, "--system-prompt", "S"]
    assert "bye" in said(command("chat", chatty, *SLOTS, *options, stdin="x\nq\n"))


@pytest.mark.parametrize("draft", [[], ["--draft", "lookup"]], ids=str)
def test_chat_with_a_long_message(draft, run, monkeypatch):
    """A terminal shows how far a long message is read. It and later messages get a warning."""
    long = "def f(x): return x + 1; " * 40
    monkeypatch.setattr(sys.stderr, "isatty", lambda: not draft)
    options = ["--context", "128", "--prefill-step-size", "64", "--max-tokens", "2", *draft]
    got = run("chat", MODEL, *options, stdin=f"x\n{long}\nx")
    beyond = [s for s in got.said.splitlines() if "more than the 128" in s]
    assert got.code == 0 and len(beyond) == 2 and "--context" in beyond[0]
    assert ("prompt: 100%" in got.said) == (not draft)


def test_a_chat_without_a_template_or_with_bytes_that_are_no_text(command, model_path, monkeypatch):
    assert "no chat template" in command("chat", model_path, "--slots", 8, stdin="x\n", code=1)
    for errors in ("strict", "surrogateescape"):
        lines = io.TextIOWrapper(io.BytesIO(b"x\nab\xff\nq\n"), "utf-8", errors)
        monkeypatch.setattr(sys, "stdin", lines)
        said = command("chat", MODEL, *SLOTS, "--max-tokens", 2, code=1)
        assert "expected UTF-8 text on standard input" in said
