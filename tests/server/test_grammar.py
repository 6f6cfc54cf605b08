"""Answers of a requested form are valid, in batches and with drafts; some forms are refused."""

import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import anthropic
import mlx.core as mx
import openai
import pytest
import speaker
from common import FAST
from fake_served import fake_served, wrapped
from in_process import SLOTS, chat, serving, user
from jsonschema import Draft202012Validator, FormatChecker
from pydantic import BaseModel

from moelab.commands.server.ask import Refused
from moelab.commands.server.completions import CHAT
from moelab.commands.server.grammar import Mask, grammar

PROMPTS = ["def read_json(path):", "{", "class Stack:", "[1, 2"]
LEAVES = [
    lambda r: {"enum": r.sample(["a", 'b"', "é", "", 5, None, True, [1], {"a": 1}], 3)},
    lambda r: {"const": r.choice(["x y", -1, False])},
    lambda r: {"type": r.choice(["boolean", "null", ["boolean", "null"]])},
    lambda r: {"type": "integer", "minimum": r.randint(-9, 9), "maximum": r.randint(9, 10**6)},
    lambda r: {"type": "number", "minimum": 0, "exclusiveMaximum": 9, "multipleOf": 0.25},
    lambda r: {"type": "string", "minLength": r.randint(0, 5), "maxLength": r.randint(5, 30)},
    lambda r: {"type": "string", "pattern": r.choice(["^[a-f]{2,9}$", "^(ab|c){3}é?$"])},
    lambda r: {"type": "string", "format": r.choice(["ipv4", "uuid"])},
]


def drawn(r, depth=2):
    """A schema whose texts cannot go on for ever."""
    if not depth or r.random() < 0.2:
        return r.choice(LEAVES)(r)
    first, *_ = inner = [drawn(r, depth - 1) for _ in range(r.randint(1, 4))]
    named = {r.choice(["a", "b c", 'd"', "é"]) + str(i): schema for i, schema in enumerate(inner)}
    some, closed = r.sample([*named], r.randint(0, len(named))), {"additionalProperties": False}
    any_names = {"patternProperties": {"^[a-c]{1,3}$": first}, "maxProperties": 3}
    nodes = [
        {"type": "object", "properties": named, "required": some, **closed},
        {"type": "object", **any_names, **closed},
        {"type": "array", "items": first, "minItems": r.randint(0, 2), "maxItems": 3},
        {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)},
        {"anyOf": inner},
        {"allOf": [first], "title": "x"},
    ]
    return r.choice(nodes)


def schema_of(seed):
    """The schema of an object with two drawn schemas, one of them by reference."""
    parts = {"x": drawn(random.Random(seed)), "y": {"$ref": "#/$defs/z"}}
    schema = {"type": "object", "properties": parts, "required": [*parts]}
    schema["$defs"] = {"z": drawn(random.Random(f"z{seed}"))}
    return schema | {"additionalProperties": False}


# Three schemas that together have every kind of leaf and node, or as many as MOELAB_SCHEMAS says.
SEEDS = (11, 15, 53) if FAST else range(int(os.environ.get("MOELAB_SCHEMAS", 12)))
SCHEMAS = [*map(schema_of, SEEDS)]
said = {}  # what the first server wrote, by schema and temperature


def valid(text, schema):
    Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))


@pytest.mark.parametrize("served", ["streamed", "lookup", "tiny-draft"], indirect=True)
def test_each_answer_is_valid(client):
    """Greedy and sampled texts are valid, and equal with any draft, alone and four at once."""

    def ask(which):
        i, temperature = which
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[i]}}
        fields = {"response_format": asked, "max_tokens": 2000, "seed": 5}
        (choice,) = chat(client, user(PROMPTS[i % 4]), temperature=temperature, **fields).choices
        valid(choice.message.content, SCHEMAS[i])
        assert choice.finish_reason == "stop"
        return said.setdefault(which, choice.message.content) == choice.message.content

    asks = [(i, temperature) for i in range(len(SCHEMAS)) for temperature in (0, 1)]
    with ThreadPoolExecutor(4) as threads:
        same = [*map(ask, asks), *threads.map(ask, asks)]
    assert sum(same) == len(same) == 4 * len(SCHEMAS)


class Part(BaseModel):
    kind: Literal["file", "folder"]
    is_open: bool


class Entry(BaseModel):
    first: Part
    last: Part | None


def function(name, schema):
    return {"name": name, "description": "Do", "parameters": schema}


ONE = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
ONE["additionalProperties"] = False
FUNCTIONS = [function("f", ONE), function("g", Entry.model_json_schema())]
CALLED = {"f": lambda given: valid(given, ONE), "g": Entry.model_validate_json}


def test_what_official_clients_ask_for():
    """Clients parse answers, streamed or not, and get calls of any function or of a named one."""
    said, calls = {"model": "default_model"}, []
    told = said | {"messages": [user("x")]}
    in_chat = [{"type": "function", "function": f} for f in FUNCTIONS]
    flat = [{"type": "function"} | f for f in FUNCTIONS]
    blocks = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
    with serving(*SLOTS, "--chat-template", speaker.TEMPLATE) as server:
        client, how = server.client, {"api_key": "x", "max_retries": 0}
        other = anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), **how)
        chats, answers, messages = client.chat.completions, client.responses, other.messages
        message = chats.parse(**told, response_format=Entry).choices[0].message
        with chats.stream(**told, response_format=Entry) as stream:
            streamed = stream.get_final_completion().choices[0].message
        answer = answers.parse(**said, input="x", text_format=Entry).output_parsed
        block = messages.parse(**told, max_tokens=99, output_format=Entry).parsed_output
        for parsed in (message.parsed, streamed.parsed, answer, block):
            assert isinstance(parsed, Entry)
        free = chats.create(**told, response_format={"type": "json_object"}, max_tokens=40)
        assert free.choices[0].message.content.lstrip().startswith("{")
        for name in (None, "f", "g"):
            named = {"type": "function", "name": name}
            fields = {"parallel_tool_calls": False, "tool_choice": named if name else "required"}
            item = answers.create(**said, input="x", tools=flat, **fields).output[-1]
            calls += [(name, item.name, item.arguments)]
            if name:
                fields["tool_choice"] = {"type": "function", "function": {"name": name}}
            (choice,) = chats.create(**told, tools=in_chat, **fields).choices
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            calls += [(name, call.function.name, call.function.arguments)]
            chosen = {"type": "tool", "name": name} if name else {"type": "any"}
            chosen["disable_parallel_tool_use"] = True
            block = messages.create(**told, max_tokens=99, tools=blocks, tool_choice=chosen)
            calls += [(name, block.content[-1].name, json.dumps(block.content[-1].input))]
            assert block.stop_reason == "tool_use"
    assert len(calls) == 9
    for wanted, name, given in calls:
        assert wanted in (None, name)
        CALLED[name](given)


TOOLS = [speaker.CHAT_TOOL, {"type": "function", "function": function('é"', ONE)}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"b": [1]}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "é\\"", "arguments": {"a": 2}}\n</tool_call>'
ANSWER, THOUGHT = '{"a": 1}', 'Hm {"a": 3}</think>'
FORMS = [  # the state after a prompt, what is asked for, texts of that form, others
    ("normal", (ONE,), [ANSWER, f"<think>{THOUGHT}\n\n{ANSWER}"], [CALL, THOUGHT]),
    ("reasoning", (ONE,), [THOUGHT + ANSWER], ["\n" + ANSWER, THOUGHT + THOUGHT, THOUGHT]),
    ("content", (ONE,), [ANSWER], [f"<think>{THOUGHT}{ANSWER}", ANSWER + "x", '{"a": 3}', ""]),
    ("normal", (None, "required", TOOLS), [CALL, OTHER + "\n" + CALL], [ANSWER, "x" + CALL]),
    ("normal", (None, "required", TOOLS, True), [OTHER], [CALL + CALL]),
    ("reasoning", (ONE, ["f"], TOOLS), [THOUGHT + CALL], [OTHER, ANSWER, CALL * 2]),
    ("normal", (ONE, "auto", TOOLS), [ANSWER, CALL], ["x", ANSWER + CALL]),
    ("normal", ({"type": "object"},), ['{"é": "\\n"}', "{}"], ["[]", '{"é": "\n"}']),
]


@pytest.mark.parametrize("state, asked, taken, others", FORMS)
def test_a_form(state, asked, taken, others):
    """The mask allows texts of the form and forbids others, whichever text came before."""
    tokenizer = wrapped(speaker.TEMPLATE)
    (end,), prompt = tokenizer.eos_token_ids, tokenizer.encode("x = [")
    mask = Mask(grammar(tokenizer, state, *asked), tokenizer, len(prompt))

    def may_be(text):
        written = [*prompt, *tokenizer.encode(text, add_special_tokens=False), end]
        places = range(len(prompt), len(written))
        rows = [mask(mx.array(written[:i]), mx.zeros((1, 9000)))[0, written[i]] for i in places]
        return all(row.item() == 0 for row in rows)

    for text in 2 * taken:
        assert may_be(text), text
    for text in others:
        assert not may_be(text), text
        assert may_be(taken[0])


def test_what_a_model_cannot_do():
    tokenizer = wrapped(speaker.TEMPLATE, "qwen3_coder")
    for asked in ((None, "required", TOOLS), (None, ["f"], TOOLS), (ONE, "auto", TOOLS)):
        with pytest.raises(Refused, match="only in json_tools .* format is qwen3_coder"):
            grammar(tokenizer, "normal", *asked)
    with pytest.raises(Refused, match="begin with a header"):
        grammar(tokenizer, "header", ONE)
    with pytest.raises(Refused, match="^tools.f.parameters.properties.a: Unimplemented keys"):
        wrong = function("f", {"properties": {"a": {"not": {}}}})
        grammar(wrapped(), "normal", None, "required", [{"function": wrong}])
    begun = {"messages": [user("x"), {"role": "assistant", "content": "{"}]}
    with pytest.raises(Refused, match="^messages: an answer of a form cannot go on"):
        CHAT.check(begun | {"response_format": {"type": "json_object"}}).read(fake_served())


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for fields in ({"response_format": {"type": "json_object"}}, {"tool_choice": "required"}):
        with pytest.raises(Refused, match="pip install 'moelab.schema.'"):
            chats = {"messages": [user("x")], "tools": TOOLS}
            CHAT.check(chats | fields).read(speaker.caller())


@pytest.mark.parametrize("served", ["streamed"], indirect=True)
def test_a_limit_of_the_library(client):
    """A form beyond the limit ends its text with an error, and other texts go on."""
    fields = [{"k": {"pattern": f"^x*y{{{i % 7}}}$"}, f"v{i}": {}} for i in range(3000)]
    kinds = [{"type": "object", "required": ["k"], "properties": of} for of in fields]
    forms = [{"anyOf": kinds}, ONE, ONE]

    def ask(schema):
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return chat(client, response_format=asked).choices[0].message.content

    with ThreadPoolExecutor(3) as threads:
        failed, *answers = [threads.submit(ask, schema) for schema in forms]
        with pytest.raises(openai.BadRequestError, match="was asked for: Parser Error"):
            failed.result()
        for answer in answers:
            valid(answer.result(), ONE)
