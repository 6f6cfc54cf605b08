"""python -m moelab generate, chat and cache-prompt: the texts of mlx-lm's commands, streamed."""

import importlib
import io
import json
import re
import shutil
import sys

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm import cache_prompt

import moelab
from moelab import DATA
from moelab.__main__ import main
from moelab.generate import Template

MODEL = DATA / "models/tiny-moe"
SLOTS = ("--slots", "16")
RESIDENT = moelab.StreamConfig(mode="resident")
MLX_LM_GENERATE = importlib.import_module("mlx_lm.generate")  # mlx_lm.generate is a function
PROMPT = "import numpy as np\n\ndef softmax(x, axis=-1):"
DRAFTS = [None, "lookup", DATA / "models/tiny-draft", DATA / "models/tiny-dflash"]
TEMPLATE = (  # one that adds something
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """tiny-moe with such a template."""
    path = tmp_path_factory.mktemp("chatty") / "m"
    shutil.copytree(MODEL, path, ignore=shutil.ignore_patterns("heldout"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command; what it printed, or the last line of its error."""

    def run(*argv, stdin=None, code=0):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        try:
            got = main([str(a) for a in argv])
        except SystemExit as stop:
            got = stop.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err and got == code, err
        return out if code == 0 else err.splitlines()[-1]

    return run


def theirs(capsys, monkeypatch, *argv):
    """What ``python -m mlx_lm generate`` prints of a text, the model in float32."""

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


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_the_text_is_that_of_mlx_lm(draft, sampled, command, capsys, monkeypatch):
    """Whatever drafts it, and the prompt before it: a template that adds nothing shows nothing."""
    more = ["--prompt", PROMPT, "--max-tokens", 20]
    more += ["--temp", 0.8, "--top-p", 0.9, "--min-p", 0.01, "--seed", 5] if sampled else []
    k = ["50"] if sampled else ["0"]
    wanted = theirs(capsys, monkeypatch, "--model", MODEL, *more, "--top-k", *k)
    drafts = [] if draft is None else ["--draft", draft, "--num-draft-tokens", "3"]
    got = command("generate", MODEL, *SLOTS, *more, "--sampling-top-k", *k, *drafts)
    assert text_of(got) == PROMPT + wanted
    assert ("drafts accepted" in got) == (draft not in (None, "lookup"))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--system-prompt", "Be brief."],
        ["--ignore-chat-template"],
        ["--prefill-response", "def"],
        ["--chat-template-config", '{"mood": "glad"}'],
    ],
)
def test_the_chat_template(options, chatty, command, capsys, monkeypatch):
    more = ["--prompt", "Sort a list.", "--max-tokens", 12, *options]
    wanted = theirs(capsys, monkeypatch, "--model", chatty, *more)
    got = text_of(command("generate", chatty, *SLOTS, *more))
    plain = "--ignore-chat-template" in options
    assert got == ("Sort a list." if plain else "") + wanted


def test_a_template_that_fails(chatty, command, tmp_path):
    """It takes no system prompt, and changes a message, so that nothing can go on behind it."""
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


def test_a_prompt_cache_file(chatty, command, capsys, monkeypatch, tmp_path):
    """Of this command and of mlx-lm's, for this command and for mlx-lm's."""
    for model in (MODEL, chatty):
        whole, begin, end = PROMPT, PROMPT[:-10], PROMPT[-10:]
        wanted = text_of(command("generate", model, *SLOTS, "--prompt", whole, "--max-tokens", 12))
        wanted = wanted.removeprefix(whole)
        file = tmp_path / "p.safetensors"
        said = command(
            "cache-prompt", model, *SLOTS, "--prompt", begin, "--prompt-cache-file", file
        )
        assert "tokens" in said
        for draft in ([], ["--draft", "lookup"]):
            more = ["--prompt", end, "--max-tokens", 12, "--prompt-cache-file", file]
            got = text_of(command("generate", model, *SLOTS, *more, *draft))
            assert got.removeprefix(end) == wanted
        assert theirs(capsys, monkeypatch, "--model", model, *more) == wanted

        monkeypatch.setattr(cache_prompt, "load", lambda path, **_: moelab.load(path, RESIDENT))
        argv = ["--model", str(model), "--prompt", begin, "--prompt-cache-file", str(file)]
        monkeypatch.setattr(sys, "argv", ["cache_prompt", *argv])
        cache_prompt.main()
        capsys.readouterr()
        assert text_of(command("generate", model, *SLOTS, *more)).removeprefix(end) == wanted


def test_prompt_cache_files_that_are_none(command, tmp_path, random_tiny_moe):
    file = tmp_path / "p.safetensors"
    make = ["cache-prompt", MODEL, *SLOTS, "--prompt", "x", "--prompt-cache-file"]
    use = ["generate", MODEL, *SLOTS, "--prompt", "x", "--prompt-cache-file", file]
    assert str(file) in command(*use, code=1)
    file.write_bytes(b"nonsense")
    assert "expected a prompt cache" in command(*use, code=1)
    mx.save_safetensors(str(file), {"a": mx.zeros(3)})
    assert "expected a prompt cache" in command(*use, code=1)
    command(*make, file)
    other = ["generate", random_tiny_moe, *SLOTS, "--prompt", "x", "--prompt-cache-file", file]
    assert "tiny-moe" in command(*other, code=1)
    for wrong in (tmp_path / "no" / "p.safetensors", tmp_path / "p.npz", tmp_path):
        assert str(wrong) in command(*make, wrong, code=1)
    (tmp_path / "folder.safetensors").mkdir()
    assert "cannot be written" in command(*make, tmp_path / "folder.safetensors", code=1)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--draft", "no/such"], "draft 'no/such'"),
        (["--draft", str(DATA)], "config.json"),
        (["--adapter-path", "no/such"], "no/such"),
        (["--chat-template-config", "[]"], "--chat-template-config"),
        (["--temp", "-1"], "--temp"),
        (["--top-p", "2"], "--top-p"),
        (["--seed", "-1"], "--seed"),
        (["--seed", str(2**64)], "--seed"),
        (["--num-draft-tokens", "x"], "--num-draft-tokens"),
        (["--sampling-top-k", "8192", "--temp", "1"], "top_k"),
        (["--top-k", "5"], "--sampling-top-k"),
    ],
)
def test_what_generate_refuses(options, words, command):
    code = 2 if words.startswith("--") else 1
    assert words in command("generate", MODEL, *SLOTS, "--prompt", "x", *options, code=code)


@pytest.mark.parametrize(
    "variables, options, now",
    [
        ({"TEND_MOE_CACHE_SLOTS": "24"}, [], "mode fused, slots 24"),
        ({"MLX_MOE_CACHE_SLOTS": "24"}, ["--slots", "20"], "mode fused, slots 20"),
        ({"MLX_MOE_STACKED": "1", "MLX_MOE_CACHE_SLOTS": "24"}, [], "mode stacked, slots 24"),
        ({"MLX_MOE_STACKED": "1"}, ["--mode", "fused", "--slots", "9"], "mode fused, slots 9"),
        ({"MLX_MOE_STACKED": "0"}, [], "mode buffers"),
        ({"MLX_MOE_CACHE_SLOTS": "24"}, ["--mode", "resident"], "mode resident"),
        ({"SWIFTLM_TOP_K": "4"}, ["--slots", "9"], "mode fused, slots 9, top-k 4"),
        ({}, ["--slots", "9"], None),
    ],
)
def test_the_environment_of_swiftlm(variables, options, now, monkeypatch, capsys):
    """Its variables are honoured and named; the command's own options come first."""
    seen = []
    monkeypatch.setattr("moelab.generate.generate", lambda *args, **_: seen.append(args[2]))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", str(MODEL), "--prompt", "x", *options]) == 0
    err = capsys.readouterr().err.strip()
    if now is None:
        assert not err
        return
    assert all(f"{name}={value}" in err for name, value in variables.items())
    assert err.endswith(now) and seen[0].mode in now
    assert "slots" not in now or f"slots {seen[0].slots}" in now


@pytest.mark.parametrize(
    "variables", [{"MLX_MOE_FUSE_GATEUP": "1"}, {"SWIFTLM_TOP_K": "many"}, {"MLX_MOE_STACKED": "2"}]
)
def test_an_environment_that_is_wrong(variables, monkeypatch, command):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert next(iter(variables)) in command("generate", MODEL, "--prompt", "x", code=1)


def test_a_draft_whose_configuration_is_no_object(command, tmp_path):
    for text in ("5", "[]", "{", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        said = command("generate", MODEL, *SLOTS, "--prompt", "x", "--draft", tmp_path, code=1)
        assert "config.json" in said and "JSON" in said


# Chat


def said(out):
    """What a chat answered, without its lines of figures and its colours."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x01\x02]", "", out)


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_chat(draft, command):
    """Two messages of a conversation, forgotten, and the first again; then the end of the file."""
    first, second = "def read_json(path):", "\ndef write_json(path):"
    with moelab.load(MODEL, moelab.StreamConfig(slots=16))[0] as model:
        tokenizer = mlx_lm.utils.load_tokenizer(MODEL)
        cache, answers = model.make_cache(), []
        for text in (first, second.strip()):
            ids = tokenizer.encode(text)
            answers.append(
                mlx_lm.generate(model, tokenizer, ids, max_tokens=16, prompt_cache=cache)
            )
    drafts = [] if draft is None else ["--draft", draft]
    lines = f"{first}\n\n  \n{second.strip()}\nh\nr\n{first}\n"
    out = said(command("chat", MODEL, *SLOTS, "--max-tokens", 16, *drafts, stdin=lines))
    assert out.count(answers[0]) == 2 and out.count(answers[1]) == 1
    assert "context cleared" in out and out.rstrip().endswith("bye")


def test_chat_with_a_system_prompt(chatty, command):
    out = command("chat", chatty, *SLOTS, "--max-tokens", 4, "--system-prompt", "S", stdin="x\nq\n")
    assert "bye" in said(out)


def test_what_chat_refuses(command, model_path):
    assert "no chat template" in command("chat", model_path, "--slots", 8, stdin="x\n", code=1)
    assert "one machine" in command("chat", MODEL, "--pipeline", code=2)
    assert "--sampling-top-k" in command("chat", MODEL, "--top-k", "3", code=2)
    assert "draft" in command("chat", MODEL, *SLOTS, "--draft", "no/such", stdin="x\n", code=1)


def test_the_template_of_tiny_moe():
    """One message is the prompt as it is; more are written one below another."""
    tokenizer = mlx_lm.utils.load_tokenizer(MODEL)
    assert Template().text(tokenizer, PROMPT) == PROMPT
    assert Template(system_prompt="import re").text(tokenizer, PROMPT) == "import re\n" + PROMPT
    import corpus

    assert (MODEL / "chat_template.jinja").read_text() == corpus.CHAT_TEMPLATE
    assert "chat_template" not in json.loads((MODEL / "tokenizer_config.json").read_text())
