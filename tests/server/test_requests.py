"""Requests in OpenAI's form: what they become, and which are refused."""

import json
import re
from itertools import chain

import mlx.core as mx
import pytest
from common import tries
from fake_served import MODEL, fake_served
from hypothesis import given
from hypothesis import strategies as st
from in_process import user
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from moelab import DATA
from moelab.commands.server import http, requests
from moelab.commands.server.agents import MESSAGES, RESPONSES
from moelab.commands.server.ask import Ask, Refused
from moelab.commands.server.completions import CHAT, COMPLETIONS
from moelab.commands.server.requests import Asked

TALK = {"messages": [user("x")]}
TEXT = {"prompt": "def f(x):"}
BOTH = [(CHAT, TALK), (COMPLETIONS, TEXT)]
both = pytest.mark.parametrize("kind, usual", BOTH, ids=["chat", "completions"])


def fields_of(kind):
    """The names of a dialect's fields."""
    names = {name: own for own, name in kind.names.items()}
    known = [field.alias or name for name, field in kind.kind.model_fields.items()]
    return {names.get(name, name) for name in known}


def asks(kind, usual, *, args=(), **fields):
    return Asked(kind, usual | fields, fake_served(**dict(args))).asks


@both
def test_what_changes_nothing(kind, usual):
    """Null means the default; some fields have no effect."""
    known = fields_of(kind)
    nulls = dict.fromkeys({*known, "response_format", "user", "audio", "role_mapping"})
    taken = {"response_format": {"type": "text"}, "stream_options": {"include_usage": None}}
    taken |= {"user": "u", "suffix": "", "best_of": 1, "stop": [], "logit_bias": {}, "n": 1}
    empty = [{"stop": stop} for stop in ("", [""], None)]
    names = [{"model": name} for name in ("tiny-moe", str(MODEL), "default_model")]
    for fields in (nulls, taken, *names, *empty):
        assert asks(kind, fields | usual) == asks(kind, usual)


@both
def test_what_a_request_becomes(kind, usual):
    """The command line sets defaults; an ``Ask`` survives JSON and has mlx-lm's arguments."""
    args = {"max_tokens": 7, "temp": 0.5, "top_p": 0.9, "sampling_top_k": 3, "min_p": 0.1}
    (ask,) = asks(kind, usual, args=args | {"num_draft_tokens": 4})
    defaults = {"temp": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1}
    assert ask.sampling.items() >= defaults.items()
    assert (ask.max_tokens, ask.num_draft_tokens, ask.seed) == (7, 4, None)
    assert not ask.is_open
    (ask,) = asks(kind, usual)  # a text without a limit may take all positions
    assert (ask.max_tokens, ask.is_open) == (10**6 - len(ask.tokens), True)
    given = {"temperature": 1, "xtc_probability": 1, "top_k": 5, "min_p": 1, "top_p": 1}
    given |= {"repetition_penalty": 2, "presence_penalty": -2, "frequency_penalty": 1, "stop": "a"}
    given |= {"max_completion_tokens": 3, "max_tokens": 5, "num_draft_tokens": 0}
    (ask,) = asks(kind, usual, logit_bias={"5": 100}, repetition_context_size=9, **given)
    assert Ask(**json.loads(json.dumps(vars(ask)))) == ask
    assert (ask.max_tokens, ask.num_draft_tokens, ask.stops) == (3, 0, ["a"])
    logits = mx.random.normal((1, 8192))
    for processor in make_logits_processors(**ask.penalties):
        logits = processor(mx.array([1, 2]), logits)
    assert make_sampler(**ask.sampling)(logits).item() == 5
    assert (ask.penalties["repetition_context_size"], ask.sampling["top_k"]) == (9, 5)
    for likeliest in ({"top_p": 0}, {"temperature": 1e-30}):
        (ask,) = asks(kind, usual, **{"temperature": 1} | likeliest)
        assert ask.sampling["temp"] == 0


@both
def test_several_texts(kind, usual):
    texts = asks(kind, usual, n=3, seed=2**64 - 2)
    assert [ask.seed for ask in texts] == [2**64 - 2, 2**64 - 1, 0]
    assert [ask.seed for ask in asks(kind, usual, n=2)] == [None, None]
    with pytest.raises(Refused, match="n: expected at most 1024 texts"):
        asks(COMPLETIONS, {"prompt": ["x"] * 300}, n=4)


def test_prompts():
    """Prompts may have all forms of OpenAI's API, also those of lm-eval's ``local-completions``."""
    encode = fake_served().tokenizer.encode
    for prompt in ("a b", ["a b", "c"], [1, 2], [[1, 2], [3]], ["a b", [3]]):
        listed = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        wanted = [encode(p) if isinstance(p, str) else p for p in listed for _ in range(2)]
        assert [ask.tokens for ask in asks(COMPLETIONS, {"prompt": prompt}, n=2)] == wanted
    (ask,) = asks(COMPLETIONS, TEXT, max_tokens=0, echo=True, logprobs=3)
    assert (ask.max_tokens, ask.echo, ask.logprobs) == (0, True, 3)
    for fields, most in (({}, None), ({"logprobs": True}, 0), ({"top_logprobs": 20}, 20)):
        assert [ask.logprobs for ask in asks(CHAT, TALK, **fields)] == [most]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert asks(CHAT, TALK, tools=[tool], tool_choice="none") == asks(CHAT, TALK)


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9"}}
INPUT = {"type": "input_image", "image_url": "http://127.0.0.1:9"}
PICTURE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9"}}
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}
SPACE = {"type": "namespace", "name": "m", "tools": [{}]}
ITEMS = [5, {"role": "user"}, user([INPUT]), {"role": 5, "content": "x"}]
ITEMS += [{"type": "item_reference", "id": "x"}]
ITEMS += [{"type": "function_call", "call_id": "x", "name": "f"}]
BLOCKS = [PICTURE, {"type": "tool_use", "id": "x", "name": "f"}]
BLOCKS += [{"type": "tool_result", "content": "x"}]
NAN, HUGE = float("nan"), 10**400  # beyond float64
THIRD = {"previous_response_id": ["resp_1"], "n": [2], "top_logprobs": [2]}
THIRD["text"] = [FORMAT, {"form": {"type": "json_object"}}]
THIRD |= {"tool_choice": [{"type": "web_search"}], "reasoning": ["x"]}
THIRD |= {"tools": [[{"type": "function"}], [SPACE]], "input": [[], *([item] for item in ITEMS)]}
THIRD |= {"include": [["message.output_text.logprobs"]], "messages": [[user("x")]]}
THIRD |= {"max_tokens": [9]}
LAST = {"context_management": [{"edits": [{"type": "clear_tool_uses_20250919"}]}]}
LAST |= {"tool_choice": [{"type": "tool", "name": "web_search"}]}
LAST |= {"messages": [[], *([user([block])] for block in BLOCKS)], "system": [[PICTURE], 5]}
LAST |= {"output_config": [FORMAT], "tools": [[{"name": "f"}]], "stop_sequences": [[5]]}
LAST |= {"text": [{"effort": "low"}], "stop": ["x"]}
BAD = {  # by dialect: values that a field does not take, or that ask for what is not served
    COMPLETIONS: {
        "prompt": [5, None, [], "", [""], [[]], [1, True], [-1], [8192]],
        "max_tokens": [-1, 1.5, True, HUGE, 2**31],
    },
    CHAT: {
        "messages": [5, [], ["hi"], [{}], user("x"), [user([{}])]],
        "temperature": [-1, "hot", NAN, 101, HUGE, True],
        "top_k": [-1, 8192],
        "num_draft_tokens": [-1, 2.5, 65, True, "x"],
        "model": [5, "no/such/folder", "", "x" * 100_000],
        "seed": ["x", -1, 2**64],
        "n": [0, 129, "x"],
        "logit_bias": [5, {"x": 1}, {"8192": 1}, {"-1": 1}, {"3": NAN}, {"3": HUGE}],
        "stop": [5, ["a"] * 65],
        "stream": ["yes", 1],
        "stream_options": [5, {"x": True}, {"include_usage": 1}],
        "top_logprobs": [-1, 21],
        "chat_template_kwargs": [5, {"tokenize": False}, {"chat_template": "x"}, {"tools": []}],
        "tools": [5, {}, [5], [{}], [{"type": "function", "function": {}}]],
        "tool_choice": ["required", "x", {"type": "function", "function": {"name": "f"}}],
        "response_format": ["text", {"type": "json_schema"}, {"type": "json_schema", "schema": []}],
        "x" * 100_000: [1],
    },
    RESPONSES: THIRD,
    MESSAGES: LAST,
}
CALLED = [user("x"), {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]
VALID, CHOICE = "expected a valid string", "tool_choice: expected "
UNKNOWN = {"type": "json_schema", "schema": {"anyOf": [{}, {"items": {"uniqueItems": True}}]}}
SCHEMA = "response_format: schema.anyOf.1.items: Unimplemented keys: [uniqueItems], got"
PART = "messages.0.content.0.type: expected 'text', got 'image_url'"
CALL = "messages.1.tool_calls.0.function.arguments: expected an object in JSON"
SAID = [  # a field, a value, and what is said of it
    ("stop", [5], f"stop.0: {VALID}, got '5'"),
    ("tool_choice", "any", CHOICE + "one of the tools, got required"),
    ("tool_choice", {"type": "tool"}, CHOICE + "auto, none, required, any or a"),
    ("response_format", UNKNOWN, SCHEMA),
    ("messages", [user(5)], f"messages.0.content: {VALID} or a valid list, got '5'"),
    ("messages", [user([IMAGE])], PART),
    ("messages", CALLED, CALL),
    ("audio", {}, "audio: a field that is not permitted, got '{}'"),
]
ROWS = [(of, field, values, "") for of, fields in BAD.items() for field, values in fields.items()]
ROWS += [(CHAT, field, [value], words) for field, value, words in SAID]


@pytest.mark.parametrize(
    "dialect, field, values, words", ROWS, ids=lambda of: getattr(of, "path", str(of))[:30]
)
def test_a_bad_field(dialect, field, values, words):
    """The error names the field, what is expected (perhaps several forms) and what it got."""
    usual = TEXT if dialect is COMPLETIONS else {dialect.prompt: [user("x")]}
    for value in values:
        with pytest.raises(Refused) as refused:
            asks(dialect, usual | {field: value})
        said, param = str(refused.value), refused.value.param
        assert said.startswith(param) and param[:40] == field[:40]
        assert said.replace('"', "").startswith(words)
        assert len(said) < 400 and len(param) < 200


GUIDE = (DATA.parent / "docs/guide.md").read_text()
ROWS = re.findall(r"^\| (done|no effect|taken if|refused)(.*)", GUIDE, re.M)
ROWS = {name: row for row, names in ROWS for name in re.findall("`([a-z_]+)`", names)}


def test_the_guide_says_what_becomes_of_each_field():
    done = {*chain(*map(fields_of, http.DIALECTS))}
    wanted = dict.fromkeys(done, "done") | dict.fromkeys(requests.TAKEN, "no effect")
    wanted |= dict.fromkeys(requests.ONLY, "taken if")
    assert {name: row for name, row in ROWS.items() if row != "refused"} == wanted
    for name, row in ROWS.items():
        value = {"no effect": {"x": 1}, "taken if": requests.ONLY.get(name)}.get(row)
        if row in ("no effect", "taken if"):
            assert asks(CHAT, TALK | {name: value}) == asks(CHAT, TALK)
        if row in ("refused", "taken if"):
            with pytest.raises(Refused, match=name):
                asks(CHAT, TALK | {name: "x"})


WORDS = ["text", "user", "tool", "auto", "function", "tiny-moe", "", "5", "é"]
KEYS = ["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "5"]
LEAVES = st.none() | st.booleans() | st.integers(-2, 9000) | st.floats() | st.sampled_from(WORDS)
JSON = st.recursive(
    LEAVES,
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.sampled_from(KEYS), of, max_size=4),
)
CHATS = st.lists(JSON.map(lambda v: {"role": "user", **(v if isinstance(v, dict) else {})}))
NAMES = st.sampled_from([*fields_of(CHAT), *fields_of(COMPLETIONS)])


@tries(300)
@given(st.dictionaries(NAMES, JSON, max_size=3), st.booleans(), JSON | CHATS)
def test_any_json(body, chats, main):
    """Any JSON gives an ``Ask`` that can be sent to other ranks, or a short error."""
    kind, name = (CHAT, "messages") if chats else (COMPLETIONS, "prompt")
    try:
        made = asks(kind, {name: main} | body)
        assert made and json.dumps([vars(ask) for ask in made], allow_nan=False)
    except ValueError as error:
        assert isinstance(error, Refused) and len(str(error)) < 400
