"""Anthropic's messages: what a request becomes, and answers by the types of the official client."""

import json
from concurrent.futures import ThreadPoolExecutor

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from fake_served import fake_served
from in_process import SLOTS, serving
from pydantic import TypeAdapter
from speaker import (
    ANSWERS,
    CALLS,
    CHAT_TOOL,
    PROMPT,
    SAID,
    TEMPLATE,
    answered,
    caller,
    speaking,
    written,
)

from moelab.commands.server.ask import Refused
from moelab.commands.server.completions import Chat
from moelab.commands.server.messages import Messages
from moelab.commands.server.text import Call

USER = {"role": "user", "content": "x"}
USUAL = {"model": "default_model", "max_tokens": 9, "messages": [USER]}
TOOL = {"name": "f", "description": "Do", "input_schema": {"type": "object"}}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def asked(**body):
    return Messages(USUAL | body, fake_served())


def content(block):
    if block.type == "tool_use":
        return Call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
    return block.text if block.type == "text" else "*" + block.thinking


@pytest.mark.parametrize("deltas, items", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_streamed_and_not(deltas, items):
    """The client makes the same of both; in a stream each block ends before the next begins."""
    request = asked()
    _, delta = answered(request, deltas)
    whole = Message.model_validate(json.loads(json.dumps(request.whole([delta]))), strict=True)
    assert [content(block) for block in whole.content] == items
    usage = whole.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (10, 20, 7)
    assert whole.stop_reason == REASONS[delta.finish]
    request = asked(stream=True)
    events, delta = answered(request, deltas)
    number, is_open, kinds = -1, False, []
    for event in [*events, *request.end([delta])]:
        event = TypeAdapter(RawMessageStreamEvent).validate_python(json.loads(json.dumps(event)))
        kinds.append(event.type)
        if event.type == "content_block_start":
            assert not is_open
            number, is_open = number + 1, True
        if event.type.startswith("content_block"):
            assert is_open and event.index == number
        if event.type == "content_block_stop":
            is_open = False
    assert not is_open and number == len(items) - 1
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


def test_one_call_if_that_is_asked():
    deltas, _ = ANSWERS["calls"]
    request = asked(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    _, delta = answered(request, deltas)
    made = Message.model_validate(request.whole([delta]))
    assert [content(block) for block in made.content] == CALLS[:1]


def test_a_conversation_of_claude_code():
    """Its fields are taken; blocks become the messages of a chat."""
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = "x-anthropic-billing-header: cc_version=2; cch=abc;"
    system = [{"type": "text", "text": text} | cached for text in (billing, "A", "B")]
    text = {"type": "text", "text": "Hi"} | cached
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "é"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": billing}, text]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "abc"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "Ok"},
                call,
                call | {"id": "c2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "1", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c2", "content": [text]} | cached,
                text,
            ],
        },
        {"role": "system", "content": "C"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "abc"}]},
        {"role": "user", "content": "D"},
    ]
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = USUAL | {
        "system": system,
        "messages": messages,
        "stream": True,
        "temperature": 1,
        "stop_sequences": ["z"],
        "tool_choice": {"type": "auto"},
        "tools": [TOOL | cached | {"strict": True}, TOOL | {"type": "custom", "name": "g"}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": kept,
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "top_k": None,
    }
    request = Messages(body, caller()).request
    function = {"name": "f", "arguments": '{"a": "é"}'}
    calls = [{"id": i, "type": "function", "function": function} for i in ("c1", "c2")]
    assert request.messages == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": f"{billing}\n\nHi"},
        {"role": "assistant", "reasoning": "Hm", "content": "Ok", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "Hi"},
        {"role": "user", "content": "Hi\n\nC\n\nD"},
    ]
    assert request.tools[0] == CHAT_TOOL and len(request.tools) == 2
    assert request.chat_template_kwargs == {"reasoning_effort": "high", "enable_thinking": True}
    assert request.stop == ["z"] and request.max_tokens == 9


def test_the_ask_is_that_of_a_chat():
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "messages": [USER], "max_tokens": 9}
    chat = Chat(same | {"stop": ["z"]}, fake_served())
    assert asked(stop_sequences=["z"], **same).asks == chat.asks


def test_thinking_can_be_off():
    def kwargs(**body):
        return asked(**body).request.chat_template_kwargs

    off = {"type": "disabled"}
    assert kwargs(thinking=off)["enable_thinking"] is False
    assert kwargs(thinking=off, output_config={"effort": "low"})["enable_thinking"] is False
    assert kwargs(thinking={"type": "enabled", "budget_tokens": 1024}) == {} == kwargs()


def block(kind, **fields):
    return [{"role": "user", "content": [{"type": kind} | fields]}]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
REFUSED = {  # a field, and a value that would change the answer or that is none
    "container": ["x"],
    "mcp_servers": [[{"name": "x"}]],
    "context_management": [{"edits": [{"type": "clear_tool_uses_20250919"}]}],
    "output_config": [{"format": {"type": "json_schema", "schema": {}}}],
    "tool_choice": [{"type": "any"}, {"type": "tool", "name": "f"}, "auto", {}],
    "tools": [[{"type": "web_search_20250305", "name": "web_search"}], [5], [{"name": 5}], "x"],
    "messages": [
        [],
        "x",
        [5],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [5]}],
        [{"role": 5, "content": "x"}],
        block("image", source=IMAGE["source"]),
        block("document", source={"type": "text", "data": "x"}),
        block("text"),
        block("text", text=5),
        block("thinking", thinking=5),
        block("tool_use", id="x", name="f"),
        block("tool_result", content="x"),
        block("tool_result", tool_use_id="x", content=[IMAGE]),
        [USER, {"role": "assistant", "content": "{"}],
    ],
    "system": [[IMAGE], 5],
    "stop_sequences": ["x", [""]],
    "stop": ["x"],
    "thinking": ["x"],
    "max_tokens": [0, "x"],
    "n": [2],
    "model": ["claude-9"],
    "input": ["x"],
    "gibberish": [1],
}


@pytest.mark.parametrize("field, value", [(f, v) for f, values in REFUSED.items() for v in values])
def test_what_is_refused(field, value):
    with pytest.raises(Refused) as refused:
        asked(**{field: value})
    assert refused.value.param == field and str(refused.value).startswith(field)


def client_of(url):
    url = url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("said, items", SAID.values(), ids=SAID)
def test_tools(said, items):
    """Calls reach the client; what is none is text."""
    usual = USUAL | {"tools": [TOOL]}
    with speaking(*said) as url, client_of(url) as client:
        answers = [client.messages.create(**usual)]
        with client.messages.stream(**usual) as stream:
            answers.append(stream.get_final_message())
    for answer in answers:
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert all(call.input == {"a": [1, "é"]} for call in calls)
        assert ["call" if b in calls else content(b) for b in answer.content] == items
        reason = "max_tokens" if "length" in said else "tool_use" if calls else "end_turn"
        assert answer.stop_reason == reason
    one, other = (a.model_dump(exclude={"id": True, "content": {"__all__": "id"}}) for a in answers)
    assert one == other


def test_errors():
    """The client says what is wrong, also in a stream."""
    with speaking("Hello", OSError(5, "the disk", "x")) as url, client_of(url) as client:
        with pytest.raises(anthropic.BadRequestError, match="top_k: ") as refused:
            client.messages.create(**USUAL, extra_body={"top_k": -1})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.InternalServerError, match="the disk"):
            client.messages.create(**USUAL)
        with pytest.raises(anthropic.APIStatusError, match="the disk"):
            [*client.messages.create(**USUAL, stream=True)]
    for status, name in ((503, "overloaded"), (404, "not_found"), (405, "invalid_request")):
        assert Messages.error("x", None, status)["error"]["type"] == f"{name}_error"


def test_count_tokens():
    with speaking("") as url, client_of(url) as client:
        fields = {"model": "default_model", "messages": [USER], "system": "A", "tools": [TOOL]}
        number = client.messages.count_tokens(**fields).input_tokens
        assert number == client.messages.create(**fields, max_tokens=9).usage.input_tokens + 1


@pytest.mark.parametrize("draft", [(), ("--draft", "lookup")], ids=["alone", "lookup"])
def test_the_text_is_that_of_mlx_lm(draft):
    """Streamed and not, alone and four at once; the second time its prompt is not read again."""
    text, size = written(PROMPT)
    usual = {"model": "default_model", "messages": [{"role": "user", "content": PROMPT}]}
    usual["tools"] = [TOOL]

    def ask(_, **fields):
        fields |= usual | {"max_tokens": 16}
        answer = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            return answer, stream.get_final_message()

    serves = serving(*SLOTS, "--chat-template", TEMPLATE, *draft)
    with serves as served, client_of(served.url) as client:
        assert client.messages.count_tokens(**usual).input_tokens == size
        with ThreadPoolExecutor(4) as threads:
            answers = [answer for pair in [ask(0), *threads.map(ask, range(4))] for answer in pair]
        stops = [text[5:8], text[12:14]]
        stopped = ask(0, stop_sequences=stops)
    for answer in (*answers, *stopped):
        Message.model_validate(answer.model_dump(), strict=True)
        used = answer.usage
        assert used.input_tokens + used.cache_read_input_tokens == size
    for answer in answers:
        assert [content(block) for block in answer.content] == [text]
        assert (answer.usage.output_tokens, answer.stop_reason) == (16, "max_tokens")
    assert answers[1].usage.cache_read_input_tokens > size // 2
    first = min(stops, key=text.find)
    for answer in stopped:
        assert "".join(map(content, answer.content)) == text[: text.find(first)]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", first)
