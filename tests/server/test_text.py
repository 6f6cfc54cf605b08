"""Stop strings, reasoning and tool calls, as functions of decoded text alone."""

import importlib
import json
import pkgutil
from dataclasses import replace
from itertools import pairwise

import mlx_lm.tool_parsers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moelab import DATA
from moelab.commands.server.ask import Part, Token, Usage
from moelab.commands.server.text import Call, Delta, Splitter, Stops, token_bytes

PARSERS = [m.name for m in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
        },
    }
]
GOOD = {  # a call of ``add`` with {"a": 1}, with its markers
    "function_gemma": "<start_function_call>call:add{a:1}<end_function_call>",
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "json_tools": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="add"<|sep|><|open|>argument key="a" '
    'type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "laguna": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "longcat": "<longcat_tool_call>add<longcat_arg_key>a</longcat_arg_key>"
    "<longcat_arg_value>1</longcat_arg_value></longcat_tool_call>",
    "minicpm5": '<function name="add"><param name="a">1</param></function>',
    "minimax_m2": '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter>'
    "</invoke></minimax:tool_call>",
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "muse_spark": '<atem:function_calls><atem:invoke name="add"><atem:parameter name="a">1'
    "</atem:parameter></atem:invoke></atem:function_calls>",
    "pythonic": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "qwen3_coder": "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
}


@pytest.fixture(scope="module")
def hf():
    tokenizer = AutoTokenizer.from_pretrained(DATA / "models/tiny-moe")
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@pytest.fixture(scope="module")
def wrapped(hf):
    """Make the tokenizer of a model that thinks and calls tools in a parser's format."""

    def make(parser, **format):
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        names = ("tool_call_start", "tool_call_end")
        given = {name: getattr(module, name) for name in names}
        return TokenizerWrapper(hf, tool_parser=module.parse_tool_call, **given, **format)

    return make


def cut(text, places):
    """Cut a text at places given as numbers of any size."""
    places = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(places)]


def split(tokenizer, pieces, tools=TOOLS, state="normal", finish="stop"):
    """Sum the deltas of a text in pieces; a made up id of a call becomes "made"."""
    splitter = Splitter(tokenizer, tools, state)
    parts = [Part(text=piece) for piece in pieces]
    parts.append(Part(finish=finish, usage=Usage(1, 0, 2)))
    delta = sum((splitter.add(part) for part in parts), Delta())
    assert delta.usage == Usage(1, 0, 2)
    made = [c._replace(id="made") if c.id.startswith("call_") else c for c in delta.calls]
    return replace(delta, calls=made, usage=None)


# Few letters, so that stop strings are found, overlap and begin one another.
letters = st.text("aab é<\U0001f600", max_size=40) | st.text(max_size=30)
stops = st.lists(st.text("ab é<\U0001f600", min_size=1, max_size=5), max_size=5)
cuts = st.lists(st.integers(0, 1000), max_size=12)


@settings(max_examples=1000, deadline=None)
@given(letters, stops, cuts)
def test_a_text_ends_before_the_first_stop_string(text, stops, places):
    begins = [text.find(stop) for stop in stops if stop in text]
    expected = text[: min(begins)] if begins else text
    ends, taken, sent = Stops(stops), "", ""
    for piece in cut(text, places):
        sent += ends.add(piece)
        assert expected.startswith(sent)  # nothing was sent that is taken back
        taken += piece
        held = taken[len(sent) :]
        assert ends.found or not held or any(stop.startswith(held) for stop in stops)
    sent += ends.end()
    assert (sent, bool(ends.found)) == (expected, bool(begins))
    assert ends.add("more") == ("" if begins else "more")


def test_a_stop_string_that_may_begin_earlier_is_waited_for():
    for rest, expected in (("d", ""), ("x", "a"), ("", "a")):
        ends = Stops(["abcd", "bc"])
        assert ends.add("abc") == "" and not ends.found
        assert ends.add(rest) + ends.end() == expected and ends.found


def test_what_cannot_begin_a_stop_string_is_sent_at_once():
    ends = Stops(["\n\n", "return"])
    assert [ends.add(piece) for piece in ("def f", "(): r", "est", "\n", "x\n", "\n\n")] == [
        "def f",
        "(): ",
        "rest",
        "",
        "\nx",
        "",
    ]
    assert ends.found


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<", "\n", "é"]
MARKERS += [*GOOD.values(), '{"name": "add"}', '{"name": 1}', "{}", "null", "if a <"]
texts = st.lists(st.sampled_from(MARKERS) | st.text("<>/{}a", max_size=4), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(PARSERS),
    texts,
    cuts,
    st.sampled_from(["normal", "reasoning"]),
    st.sampled_from(["stop", "length"]),
    st.sampled_from([TOOLS, None]),
)
def test_any_cut_of_a_text_gives_the_same_answer(
    wrapped, parser, text, places, state, finish, tools
):
    tokenizer = wrapped(parser)
    whole = split(tokenizer, [text], tools, state, finish)
    assert split(tokenizer, cut(text, places), tools, state, finish) == whole
    assert split(tokenizer, text, tools, state, finish) == whole
    # No character is lost but the markers of thinking and what became a call.
    if not whole.calls:
        assert finish == whole.finish
        sent = whole.reasoning + whole.text
        lost = text.replace("<think>", "").replace("</think>", "")
        assert sorted(sent.replace("<think>", "").replace("</think>", "")) == sorted(lost)
    else:
        assert tools and whole.finish == ("tool_calls" if finish == "stop" else "length")
        assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("text", ["if a <", "x = 1\n``", "a <tool_cal", "[TOOL", "<", "a "])
def test_text_that_is_held_at_the_end_is_not_lost(wrapped, text, finish):
    for parser in PARSERS:
        for tools in (TOOLS, None):
            assert split(wrapped(parser), text, tools, finish=finish) == Delta(text, finish=finish)
    assert split(wrapped("mistral"), text, None, "reasoning") == Delta("", text, finish="stop")


@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_in_each_format(wrapped, parser):
    tokenizer, good = wrapped(parser), GOOD[parser]
    numbers = {"kimi_k2": "functions.add:0"}
    call = Call(numbers.get(parser, "made"), "add", '{"a": 1}')
    assert split(tokenizer, "so " + good) == Delta("so ", calls=[call], finish="tool_calls")
    assert split(tokenizer, "I think " + good, state="reasoning") == Delta(
        reasoning="I think ", calls=[call], finish="tool_calls"
    )
    # Without tools all of it is text. What the limit cut is, too.
    assert split(tokenizer, "so " + good, None) == Delta("so " + good, finish="stop")
    assert split(tokenizer, good[:-1], finish="length") == Delta(good[:-1], finish="length")
    assert split(tokenizer, good, finish="length").finish == "length"


def test_calls_have_ids_of_their_own(wrapped):
    for parser in ("json_tools", "kimi_k2"):
        splitter = Splitter(wrapped(parser), TOOLS, "normal")
        delta = splitter.add(Part(text=2 * GOOD[parser], finish="stop"))
        assert len({call.id for call in delta.calls}) == 2
    text = '[TOOL_CALLS][{"name": "f"}, {"name": "g", "arguments": {"x": "é"}, "id": "abc"}]'
    calls = [Call("made", "f", "{}"), Call("abc", "g", '{"x": "é"}')]
    assert split(wrapped("mistral"), text) == Delta(calls=calls, finish="tool_calls")
    text = '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}'
    calls = [Call("made", "f", '{"x": 1}'), Call("made", "g", "{}")]
    assert split(wrapped("mistral"), text) == Delta(calls=calls, finish="tool_calls")


@pytest.mark.parametrize("call", ['{"name": "f"}', '{"name": "f", "arguments": null}'])
def test_arguments_that_are_missing_are_an_empty_object(wrapped, call):
    delta = split(wrapped("json_tools"), f"<tool_call>{call}</tool_call>")
    assert delta == Delta(calls=[Call("made", "f", "{}")], finish="tool_calls")


@pytest.mark.parametrize(
    ("parser", "inside"),
    [
        *(
            ("json_tools", words)
            for words in (
                "",
                "f",
                "{",
                "[]",
                "3",
                '"f"',
                "null",
                "{}",
                '[{"name": "f"}, 3]',
                '{"name": 1, "arguments": {}}',
                '{"name": "", "arguments": {}}',
                '{"name": null}',
                '{"name": ["f"]}',
                '{"arguments": {}}',
                '{"name": "f", "arguments": []}',
                '{"name": "f", "arguments": 3}',
                '{"name": "f", "arguments": false}',
                '{"name": "f", "arguments": "{}"}',
                '{"name": "f", "arguments": {"x": NaN}}',
                '{"name": "f", "arguments": {"x": 1e999}}',
                '{"name": "f", "arguments": {"x": "\\ud800"}}',
                '{"name": "\\ud800"}',
                '{"name": "f", "arguments": {"x": ' + 100_000 * "[" + "}}",
                '{"name": "f", "arguments": {"x": ' + 5000 * "1" + "}}",
            )
        ),
        ("qwen3_coder", "<function=add><parameter=a>x</parameter></function>"),
        ("qwen3_coder", "<function=add><parameter=a>inf</parameter></function>"),
        ("qwen3_coder", "<function=add>"),
        ("kimi_k2", "functions.add:0<|tool_call_argument_begin|>{"),
        ("kimi_k2", "functions.add:0<|tool_call_argument_begin|>[1]"),
        ("kimi_k2", 'functions.add:0<|tool_call_argument_begin|>{"x": {1}}'),
        ("kimi_k2", "functions.add:0<|tool_call_argument_begin|>{(1, 2): 3}"),
        ("kimi_k2", "functions.add:0<|tool_call_argument_begin|>{" + 300 * "(" + "}"),
        ("kimi_k2", "functions.add:0<|tool_call_argument_begin|>" + 90_000 * "-" + "1"),
        ("kimi_k2", "add"),
        ("mistral", "add[ARGS]{"),
        ("mistral", "add[ARGS]3"),
        ("mistral", '[{"name": 3}]'),
        ("mistral", ""),
        ("longcat", "add"),
        ("function_gemma", "call:add{a}"),
        ("pythonic", "[" + 90_000 * "-" + "add(a=1)]"),
        ("minimax_m2", "<invoke name=></invoke>"),
        ("minimax_m2", '<invoke name="add"><parameter name="a">1e999</parameter></invoke>'),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_no_call_is_text(wrapped, parser, inside):
    tokenizer = wrapped(parser)
    text = tokenizer.tool_call_start + inside + tokenizer.tool_call_end
    assert split(tokenizer, [text]) == Delta(text, finish="stop")
    if tokenizer.tool_call_end:
        text += " and on"
        assert split(tokenizer, [text]) == Delta(text, finish="stop")


def test_tools_that_parsers_do_not_expect_end_no_answer(wrapped):
    for tools in ([{}], [{"function": {}}], [{"function": {"name": "add", "parameters": 3}}]):
        for parser in PARSERS:
            delta = split(wrapped(parser), [GOOD[parser]], tools)
            assert delta.calls or delta == Delta(GOOD[parser], finish="stop")


def test_thinking_goes_on_after_what_is_no_call(wrapped):
    tokenizer = wrapped("json_tools")
    text = "I write <tool_call> for {}</tool_call> a tool</think>Yes"
    assert split(tokenizer, [text], state="reasoning") == Delta(
        "Yes", "I write <tool_call> for {}</tool_call> a tool", finish="stop"
    )
    text = "the tag <tool_call></think>is a tag"
    assert split(tokenizer, [text], state="reasoning") == Delta(
        "is a tag", "the tag <tool_call>", finish="stop"
    )
    text = "<think>so <tool_call>1</tool_call></think>" + GOOD["json_tools"]
    delta = split(tokenizer, [text])
    assert delta.reasoning == "so <tool_call>1</tool_call>" and len(delta.calls) == 1
    assert delta.text == "" and delta.finish == "tool_calls"


def test_text_that_is_not_split(wrapped):
    text = "<think>a</think>" + GOOD["json_tools"]
    assert split(wrapped("json_tools"), [text], None, "text") == Delta(text, finish="stop")


def test_messages_with_headers(wrapped):
    from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT

    tokenizer = wrapped("muse_spark", response_format=RESPONSE_FORMAT)
    text = "to=self<|message|>I think<|eom|> assistant to=user<|message|>Hello<|eot|>"
    for tools in (TOOLS, None):
        delta = split(tokenizer, [text], tools, "header")
        assert delta == Delta("Hello", "I think", finish="stop")
        assert split(tokenizer, ["Hello"], tools, "header") == Delta("Hello", finish="stop")
    delta = split(tokenizer, ["to=f" + GOOD["muse_spark"] + "<|eom|>"], TOOLS, "header")
    assert delta == Delta(calls=[Call("made", "add", '{"a": 1}')], finish="tool_calls")
    delta = split(tokenizer, ["to=f<atem:function_calls></atem:function_calls>"], TOOLS, "header")
    assert delta == Delta("<atem:function_calls></atem:function_calls>", finish="stop")


def test_tokens_and_usage_pass_through(wrapped):
    tokens = [Token(1, -0.5, []), Token(2, -1.5, [])]
    parts = [
        Part("<", tokens=tokens[:1], prompt=[Token(0, None, [])]),
        Part("b", tokens=tokens[1:], finish="length", usage=Usage(1, 0, 2)),
    ]
    splitter = Splitter(wrapped("json_tools"), TOOLS, "normal")
    deltas = [splitter.add(part) for part in parts]
    assert [delta.text for delta in deltas] == ["", "<b"]
    assert sum(deltas, Delta()) == Delta(
        "<b", "", [], tokens, [Token(0, None, [])], "length", Usage(1, 0, 2)
    )


def test_bytes_of_byte_level_tokens(hf, wrapped):
    tokenizer = wrapped("json_tools")
    for text in ("def f(x):\n\treturn 'é😀'  # \u2581 \ufffd .", " a ."):
        tokens = hf.encode(text, add_special_tokens=False)
        assert b"".join(token_bytes(tokenizer, token) for token in tokens) == text.encode()
    for token in ("<|im_end|>", "<think>"):
        assert token_bytes(tokenizer, hf.convert_tokens_to_ids(token)) == token.encode()
    assert token_bytes(tokenizer, len(hf) + 3) == b""
    assert {bytes([b]) for b in range(256)} <= {token_bytes(tokenizer, t) for t in range(len(hf))}


def test_bytes_of_sentencepiece_tokens():
    pieces = [
        "<unk>",
        "<s>",
        "▁",
        "▁▁▁",
        "▁def",
        "é",
        "ing",
        "<0x0A>",
        "<0x20>",
        "<0xF0>",
        "<0x9F>",
        "�",
    ]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    hf.add_special_tokens({"bos_token": "<s>"})
    expected = ["<unk>", "<s>", " ", "   ", " def", "é", "ing", "\n", " ", b"\xf0", b"\x9f", "�"]
    expected = [e if isinstance(e, bytes) else e.encode() for e in expected]
    assert [token_bytes(hf, i) for i in range(len(pieces))] == expected
