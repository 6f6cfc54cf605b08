"""OpenAI's responses and Anthropic's messages, asked for by the official clients."""

import json
from itertools import groupby

import agents
import anthropic
import httpx
import openai
import pytest
import speaker
from anthropic.types import Message, RawMessageStreamEvent
from in_process import user
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from moelab.commands.server import http, requests
from moelab.commands.server.agents import MESSAGES as ANTHROPIC
from moelab.commands.server.agents import RESPONSES
from moelab.commands.server.completions import CHAT
from moelab.commands.server.requests import Asked

HOW = {"api_key": "none", "max_retries": 0, "timeout": 60}
ASK = {"model": "default_model", "input": "x", "tools": agents.CODEX["tools"]}
MESSAGES = {"messages": [user("x")], "max_tokens": 9}
MESSAGES |= {"model": "default_model", "tools": agents.CLAUDE_CODE["tools"]}
STATUS = {"stop": "completed", "length": "incomplete", "tool_calls": "completed"}
REASON = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class OpenAI:
    """OpenAI's client of responses."""

    library, kind, types = openai, RESPONSES, (Response, ResponseStreamEvent)
    usual, conversation, endings = ASK, agents.CODEX, STATUS

    def __init__(self, url):
        self.client = openai.OpenAI(base_url=url, **HOW)
        self.asks = self.client.responses

    def summed(self, **fields):
        """The answer that the client makes of a stream."""
        with self.asks.stream(**self.usual | fields) as stream:
            *events, last = stream
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == last.response.output_text
        return last.response

    def facts(self, answer):
        """An answer's items, its end, and its numbers of tokens: prompt, cached, written."""
        used, items = answer.usage, []
        for item in answer.output:
            if item.type == "function_call":
                assert json.loads(item.arguments) == {"a": [1, "é"]} and item.name == "f"
                items.append("call")
            else:
                (part,) = item.content
                items.append(part.text if item.type == "message" else "*" + part.text)
            is_last = item is answer.output[-1]
            assert item.status == (answer.status if is_last else "completed")
        cached = used.input_tokens_details.cached_tokens
        return items, answer.status, (used.input_tokens, cached, used.output_tokens)


class Anthropic:
    """Anthropic's client of messages."""

    library, kind, types = anthropic, ANTHROPIC, (Message, RawMessageStreamEvent)
    usual, conversation, endings = MESSAGES, agents.CLAUDE_CODE, REASON

    def __init__(self, url):
        self.client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), **HOW)
        self.asks = self.client.messages

    def summed(self, **fields):
        """The answer that the client makes of a stream."""
        with self.asks.stream(**self.usual | fields) as stream:
            return stream.get_final_message()

    def facts(self, answer):
        """An answer's blocks, its end, and its numbers of tokens: prompt, cached, written."""
        used, items = answer.usage, []
        for block in answer.content:
            if block.type == "tool_use":
                assert block.input == {"a": [1, "é"]} and block.name == "f"
                items.append("call")
            else:
                items.append(block.text if block.type == "text" else "*" + block.thinking)
        cached = used.cache_read_input_tokens
        return items, answer.stop_reason, (used.input_tokens + cached, cached, used.output_tokens)


both = pytest.mark.parametrize("dialect", [OpenAI, Anthropic])


@both
@pytest.mark.parametrize("said, items", speaker.SAID.values(), ids=speaker.SAID)
def test_an_answer(dialect, said, items, speak):
    """A streamed answer equals the whole answer, and each item ends before the next item begins."""
    whole, event = dialect.types
    client = dialect(speak(*said))
    events = [made.to_dict() for made in client.asks.create(**client.usual, stream=True)]
    answers = [client.asks.create(**client.usual), client.summed()]
    finish = said[1] if said[1:] else "tool_calls" if "call" in items else "stop"
    for answer in answers:
        assert client.facts(answer) == (items, client.endings[finish], speaker.USAGE)
    whole.model_validate(answers[0].to_dict(), strict=True)
    for made in events:
        TypeAdapter(event).validate_python(made)
    places = [(made.get("output_index", made.get("index")), made["type"]) for made in events]
    for number, group in groupby(places, lambda place: place[0]):
        kinds = [kind for _, kind in group]
        if number is not None:
            assert kinds[0].endswith(("added", "start")) and kinds[-1].endswith(("done", "stop"))
    numbers = [made.get("sequence_number", number) for number, made in enumerate(events)]
    assert numbers == [*range(len(events))]


@both
def test_a_conversation(dialect):
    """The fields of Codex and Claude Code are taken, and become a chat."""
    asked = Asked(dialect.kind, dialect.conversation, speaker.caller())
    chat = Asked(CHAT, agents.CHAT | {"stop": asked.request.stop}, speaker.caller())
    assert asked.request.messages == chat.request.messages and asked.asks == chat.asks


@both
def test_a_form_by_the_chats_name_is_kept(dialect):
    form = {"response_format": {"type": "json_object"}}
    (ask,) = Asked(dialect.kind, dialect.usual | form, speaker.caller()).asks
    assert ask.form and "%json" in ask.form


def test_a_response_says_which_tools_were_asked_for():
    for choice in ("auto", "none"):
        asked = Asked(RESPONSES, {"input": "x", "tool_choice": choice}, speaker.caller())
        assert next(iter(asked.answer.begin()))["response"]["tool_choice"] == choice


def test_what_the_model_cannot_use(caplog):
    """The log names each kind of tool and item once."""
    requests.leave_out.cache_clear()
    for _ in range(2):
        Asked(RESPONSES, agents.CODEX, speaker.caller())
    kinds = ("web_search", "custom", "local_shell", "tool_search")
    said = ["web_search_call", *(f"tools: {kind}" for kind in kinds)]
    assert [record.args[0] for record in caplog.records] == said


def test_a_call_in_a_namespace(speak):
    """A call's item has the namespace, streamed or not; a later request may send the item's id."""
    client = OpenAI(speak(speaker.CALL.replace('"f"', '"m__f"')))
    for answer in (client.summed(), client.asks.create(**client.usual)):
        (call,) = answer.output
        assert (call.name, call.to_dict()["namespace"]) == ("f", "m")
    given = [user("x"), {"type": "item_reference", "id": call.id}]
    client.asks.create(**client.usual | {"input": given})
    chat = Asked(RESPONSES, client.usual | {"input": given}, speaker.caller()).request.messages
    assert chat[-1]["tool_calls"][0]["function"] == {"name": "m__f", "arguments": {"a": [1, "é"]}}


SILENCE = {
    "chat/completions": ({"messages": [user("x")]}, "choices", ": keepalive"),
    "responses": ({"input": "x"}, "response.created", "event: response.in_progress"),
    "messages": ({"messages": [user("x")]}, "message_start", "event: ping"),
}


@pytest.mark.parametrize("path", SILENCE)
def test_silence(path, monkeypatch):
    """A stream begins before any text, and sends signs of life while a call is incomplete."""
    monkeypatch.setattr(http, "KEEPALIVE_S", 0.01)
    engine = speaker.Speaker(["ABC", speaker.CALL[:30], speaker.CALL[30:]], pause_s=0.2)
    body, first, idle = SILENCE[path]
    body |= {"stream": True, "tools": [agents.CHAT["tools"][0]]}
    with speaker.speaking(engine) as url:
        said = httpx.post(f"{url}/{path}", json=body, timeout=60).text
    before, text, after = said.partition("ABC")
    assert text and first in before.partition(idle)[0] and idle in before and idle in after


OFF, LOW = {"type": "disabled"}, {"effort": "low"}
HARD, MILD = {"type": "enabled"}, {"reasoning_effort": "low"}
THOUGHTS = [  # fields, and what the template writes: "off" if thinking is off, then the effort
    (ANTHROPIC, {"thinking": OFF, "output_config": LOW}, "offlow"),
    (ANTHROPIC, {"thinking": HARD, "output_config": LOW}, "low"),
    (RESPONSES, {"reasoning": {"effort": "none"}}, "offnone"),
    (RESPONSES, {"reasoning": {"effort": "minimal", "summary": "auto"}}, "minimal"),
    (RESPONSES, {"enable_thinking": False}, "off"),
    (ANTHROPIC, {"reasoning_effort": "xhigh", "enable_thinking": True}, "xhigh"),
    (ANTHROPIC, MILD | {"chat_template_kwargs": {"enable_thinking": False}}, "offlow"),
    (CHAT, {"thinking": OFF, "reasoning": LOW}, "offlow"),
    (CHAT, MILD, "low"),
]


@pytest.mark.parametrize("dialect, fields, said", THOUGHTS)
def test_how_hard_a_model_thinks(dialect, fields, said):
    caller = speaker.caller()
    (ask,) = Asked(dialect, {dialect.prompt: [user("x")]} | fields, caller).asks
    assert caller.tokenizer.decode(ask.tokens).rpartition("\n")[2] == said


ONE = [(OpenAI, {"parallel_tool_calls": False})]
ONE += [(Anthropic, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})]


@pytest.mark.parametrize("dialect, fields", ONE)
def test_one_call_if_that_is_asked(dialect, fields, speak):
    client = dialect(speak(speaker.CALL * 2))
    assert client.facts(client.summed(**fields))[0] == ["call"]


@both
def test_errors(dialect, speak):
    """The client says what is wrong, also amid a stream; Codex reads the stream's last event."""
    client = dialect(speak("Hello", OSError(5, "the disk", "x")))
    with pytest.raises(client.library.BadRequestError, match="top_k: ") as refused:
        client.asks.create(**client.usual, extra_body={"top_k": -1})
    assert "invalid_request_error" in str(refused.value.body)
    with pytest.raises(client.library.APIError, match="the disk"):
        [*client.asks.create(**client.usual, stream=True)]
    assert RESPONSES.error("x", None, 500, None)["response"]["error"]["message"] == "x"


@pytest.mark.parametrize("served", ["streamed"], indirect=True)
def test_the_stop_string_that_ended_a_text_is_named(served, mlx):
    messages = [user(speaker.PROMPT)]
    text = mlx.write((*mlx.tokenizer.apply_chat_template(messages, add_generation_prompt=True),))
    body = {"messages": messages, "max_tokens": 16, "stop_sequences": [text[12:14], text[5:8]]}
    status, answer = served.post("/messages", body)
    assert (status, answer["stop_reason"]) == (200, "stop_sequence")
    assert (answer["content"][0]["text"], answer["stop_sequence"]) == (text[:5], text[5:8])
