"""generate, chat and cache-prompt write the texts of mlx-lm's commands, with streamed experts."""

import importlib
import io
import json
import re
import shutil
import sys

import mlx.core as mx
import mlx_lm
import pytest
from common import small
from mlx_lm import cache_prompt

import moelab
from moelab import DATA, synthesize
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


@pytest.mark.parametrize("size", ["7", "500"])
def test_a_cache_of_a_limited_size(size, tokenizer, command, capsys, monkeypatch, tmp_path):
    """The model makes no caches of its own: mlx-lm makes them, and can limit their size."""
    made = {"config": small("qwen3-30b-a3b"), "tokenizer": tokenizer, "progress": False}
    plain = synthesize.synthesize(tmp_path / "m", **made)
    more = ["--prompt", "def f(x): return x", "--max-tokens", 12]
    limited = theirs(capsys, monkeypatch, "--model", plain, *more, "--max-kv-size", size)
    assert (limited == theirs(capsys, monkeypatch, "--model", plain, *more)) == (size == "500")
    for options in (["--slots", "16"], ["--slots", "auto", "--context", "100"]):
        got = command("generate", plain, *options, *more, "--max-kv-size", size)
        assert text_of(got) == more[1] + limited


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
    """A template refuses a system prompt; another changes a prompt that should be continued."""
    model, file = tmp_path / "m", tmp_path / "p.safetensors"
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
    cache = ["cache-prompt", "--prompt", "x", "--prompt-cache-file", file, *SLOTS]
    assert "chat template" in command(*cache, model, code=1)
    (model / "chat_template.jinja").write_text("{{ messages[0].content | replace('<', '[') }}")
    command(*cache, model)
    assert "chat template" in command(*generate, "--prompt-cache-file", file, code=1)


def test_a_prompt_cache_file(chatty, random_tiny_moe, command, capsys, monkeypatch, tmp_path):
    """A file written by moelab or mlx-lm works in both, but not with another model."""
    for model in (MODEL, chatty):
        whole, begin, end = PROMPT, PROMPT[:-10], PROMPT[-10:]
        wanted = text_of(command("generate", model, *SLOTS, "--prompt", whole, "--max-tokens", 12))
        wanted = wanted.removeprefix(whole)
        file = tmp_path / "p.safetensors"
        make = ["cache-prompt", model, *SLOTS, "--prompt", begin, "--prompt-cache-file", file]
        assert "tokens" in command(*make)
        for draft in ([], ["--draft", "lookup"]):
            more = ["--prompt", end, "--max-tokens", 12, "--prompt-cache-file", file]
            got = text_of(command("generate", model, *SLOTS, *more, *draft))
            assert got.removeprefix(end) == wanted
        assert theirs(capsys, monkeypatch, "--model", model, *more) == wanted
        assert str(model) in command("generate", random_tiny_moe, *SLOTS, *more, code=1)

        monkeypatch.setattr(cache_prompt, "load", lambda path, **_: moelab.load(path, RESIDENT))
        argv = ["--model", str(model), "--prompt", begin, "--prompt-cache-file", str(file)]
        monkeypatch.setattr(sys, "argv", ["cache_prompt", *argv])
        cache_prompt.main()
        capsys.readouterr()
        assert text_of(command("generate", model, *SLOTS, *more)).removeprefix(end) == wanted


def replaced(name, change):
    return lambda arrays, about: ({**arrays, name: change(arrays[name])}, {**about})


CHANGES = {  # of a file's arrays and metadata; layer 0 has a state, layer 7 keys and values
    "another class": lambda arrays, about: (arrays, {**about, "1.7": "ArraysCache"}),
    "smaller heads": replaced("7.0", lambda a: a[..., :-1]),
    "too many tokens": replaced("7.2", lambda a: a + 1000),
    "a smaller state": replaced("0.0.1", lambda a: a[:, :-1]),  # the kernels would read beyond it
    "other numbers": replaced("0.0.1", lambda a: -a),
}


def test_a_prompt_cache_that_is_damaged(command, tmp_path, run):
    """The checksum or sizes show damage; without a checksum changed numbers get only a warning."""
    file = tmp_path / "p.safetensors"
    more = [MODEL, *SLOTS, "--prompt", PROMPT[:-10], "--prompt-cache-file", file]
    command("cache-prompt", *more)
    whole = mx.load(str(file), return_metadata=True)
    for name, change in CHANGES.items():
        arrays, about = change(*whole)
        for _ in range(1 + (name != "other numbers")):
            mx.save_safetensors(str(file), arrays, about)
            said = command("generate", *more, code=1)
            assert re.search(f"{file}: .*[Mm]ake it again", said), name
            about.pop("0.checksum", None)
    mx.save_safetensors(str(file), arrays, about)
    got = run("generate", *more, "--max-tokens", 1)
    assert got.code == 0 and "has no checksum" in got.said


def test_a_prompt_cache_is_replaced_behind_its_link(command, tmp_path):
    file, link = tmp_path / "p.safetensors", tmp_path / "link.safetensors"
    make = ["cache-prompt", MODEL, *SLOTS, "--prompt-cache-file", link, "--prompt"]
    link.symlink_to(file)
    command(*make, "import")
    old = file.read_bytes()
    command(*make, "from")
    assert sorted(tmp_path.iterdir()) == [link, file] and link.is_symlink()
    assert file.read_bytes() != old


def test_a_prompt_cache_that_is_quantized(command, capsys, monkeypatch, tmp_path):
    """Both commands use the quantized cache as it is; other bits are refused."""
    file = tmp_path / "p.safetensors"
    make = ["cache-prompt", MODEL, *SLOTS, "--prompt", PROMPT[:-10], "--prompt-cache-file", file]
    kv = ["--kv-bits", "4", "--quantized-kv-start", "0"]
    command(*make, *kv, "--eos-token", "<|endoftext|>")
    use = ["--prompt", PROMPT[-10:], "--max-tokens", 12, "--prompt-cache-file", file]
    wanted = theirs(capsys, monkeypatch, "--model", MODEL, *use, *kv)
    for options in (kv, [], ["--draft", "lookup"]):
        got = text_of(command("generate", MODEL, *SLOTS, *use, *options))
        assert got == PROMPT[-10:] + wanted
    for wrong in (["--kv-bits", "8"], ["--kv-bits", "4", "--kv-group-size", "32"]):
        said = command("generate", MODEL, *SLOTS, *use, *wrong, code=1)
        assert "--kv-bits=4 and --kv-group-size=64" in said
    said = command("generate", MODEL, *SLOTS, *use, "--max-kv-size", "64", code=1)
    assert "--max-kv-size" in said and "no effect" in said


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
