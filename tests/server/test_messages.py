"""Anthropic's messages: what a request becomes, and answers by the types of the official client."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import agents
import anthropic
import pytest
import speaker
from anthropic.types import Message, RawMessageStreamEvent
from in_process import SLOTS, serving
from pydantic import TypeAdapter

from moelab.commands.server.ask import Refused
from moelab.commands.server.completions import Chat
from moelab.commands.server.messages import Messages
from moelab.commands.server.text import Call

ANSWERS, SAID = speaker.ANSWERS, speaker.SAID
USUAL = {"model": "default_model", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
USUAL |= {"tools": agents.CLAUDE_CODE["tools"]}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def client_of(url):
    url = url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


def content(block):
    if block.type == "tool_use":
        return Call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
    return block.text if block.type == "text" else "*" + block.thinking


@pytest.mark.parametrize("deltas, items", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_streamed_and_not(deltas, items):
    """In a stream each block ends before the next begins; that it says the same, ``test_tools``."""
    whole, events, delta = speaker.answered(Messages, USUAL | {"tools": []}, deltas)
    whole = Message.model_validate(whole, strict=True)
    assert [content(block) for block in whole.content] == items
    usage = whole.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (10, 20, 7)
    assert whole.stop_reason == REASONS[delta.finish]
    events = [TypeAdapter(RawMessageStreamEvent).validate_python(event) for event in events]
    begun, *blocks, ended, stopped = [(e.type, getattr(e, "index", None)) for e in events]
    kinds = [f"content_block_{kind}" for kind in ("start", "delta", "stop")]
    expected = [(kind, number) for number in range(len(items)) for kind in kinds]
    assert [block for block, _ in groupby(blocks)] == expected
    assert [begun[0], ended[0], stopped[0]] == ["message_start", "message_delta", "message_stop"]


def test_a_conversation_of_claude_code():
    """Its fields are taken, and its blocks become the messages of a chat."""
    asked = Messages(agents.CLAUDE_CODE, speaker.caller())
    assert asked.request.messages == agents.chat({"a": 1})
    chat = agents.CHAT | {"messages": agents.chat('{"a": 1}'), "stop": ["z"]}
    assert asked.asks == Chat(chat, speaker.caller()).asks


def test_thinking_can_be_off():
    off = USUAL | {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
    for body, given in ((off, False), (USUAL | {"thinking": {"type": "enabled"}}, None)):
        request = Messages(body, speaker.caller()).request
        assert request.chat_template_kwargs.get("enable_thinking") is given


def block(kind, **fields):
    return [{"role": "user", "content": [{"type": kind} | fields]}]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
REFUSED = [  # a field, and a value that would change the answer or that is none
    ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("output_config", {"format": {"type": "json_schema", "schema": {}}}),
    ("tool_choice", {"type": "any"}),
    ("tool_choice", {"type": "auto", "disable_parallel_tool_use": True}),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
    ("messages", []),
    ("messages", [*USUAL["messages"], {"role": "assistant", "content": "{"}]),
    ("messages", block("image", source=IMAGE["source"])),
    ("messages", block("tool_use", id="x", name="f")),
    ("messages", block("tool_result", content="x")),
    ("messages", block("tool_result", tool_use_id="x", content=[IMAGE])),
    ("system", [IMAGE]),
    ("system", 5),
    ("stop_sequences", [""]),
]


@pytest.mark.parametrize("field, value", REFUSED)
def test_what_is_refused(field, value):
    with pytest.raises(Refused, match=field) as refused:
        Messages(USUAL | {field: value}, speaker.caller())
    assert refused.value.param == field


@pytest.mark.parametrize("said, items", SAID.values(), ids=SAID)
def test_tools(said, items):
    """Calls reach the client; what is none is text. Streamed equals not streamed."""
    said = speaker.speaking(*said)
    with said as url, client_of(url) as client, client.messages.stream(**USUAL) as stream:
        answers = [client.messages.create(**USUAL), stream.get_final_message()]
    for answer in answers:
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert all(call.input == {"a": [1, "é"]} for call in calls)
        assert ["call" if b in calls else content(b) for b in answer.content] == items
    one, other = (a.model_dump(exclude={"id": True, "content": {"__all__": "id"}}) for a in answers)
    assert one == other


def test_errors():
    """The client says what is wrong, also in a stream."""
    with speaker.speaking("Hello", OSError(5, "the disk", "x")) as url, client_of(url) as client:
        with pytest.raises(anthropic.BadRequestError, match="top_k: ") as refused:
            client.messages.create(**USUAL, extra_body={"top_k": -1})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.APIStatusError, match="the disk"):
            [*client.messages.create(**USUAL, stream=True)]


@pytest.mark.parametrize("draft", [(), ("--draft", "lookup")], ids=["alone", "lookup"])
def test_the_text_is_that_of_mlx_lm(draft):
    """Streamed and not, alone and four at once; the second time its prompt is not read again."""
    text, size = speaker.written(speaker.PROMPT)
    fields = USUAL | {"messages": [{"role": "user", "content": speaker.PROMPT}], "max_tokens": 16}

    def ask(_, **stops):
        with client.messages.stream(**fields, **stops) as stream:
            return client.messages.create(**fields, **stops), stream.get_final_message()

    serves = serving(*SLOTS, "--chat-template", speaker.TEMPLATE, *draft)
    with serves as served, client_of(served.url) as client:
        with ThreadPoolExecutor(4) as threads:
            answers = [answer for pair in [ask(0), *threads.map(ask, range(4))] for answer in pair]
        stops = [text[5:8], text[12:14]]
        stopped = ask(0, stop_sequences=stops)
    for answer in (*answers, *stopped):
        assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == size
    for answer in answers:
        assert [content(block) for block in answer.content] == [text]
        assert (answer.usage.output_tokens, answer.stop_reason) == (16, "max_tokens")
    assert answers[0].usage.cache_read_input_tokens > size // 2
    first = min(stops, key=text.find)
    for answer in stopped:
        assert "".join(map(content, answer.content)) == text[: text.find(first)]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", first)
