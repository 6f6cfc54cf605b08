"""OpenAI's responses: what a request becomes, and answers by the types of the official client."""

import json
from concurrent.futures import ThreadPoolExecutor

import agents
import openai
import pytest
import speaker
from in_process import SLOTS, serving
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from moelab.commands.server.ask import Refused
from moelab.commands.server.completions import Chat
from moelab.commands.server.responses import Responses
from moelab.commands.server.text import Call

ANSWERS, SAID = speaker.ANSWERS, speaker.SAID
USUAL = {"model": "default_model", "input": "x", "tools": agents.CODEX["tools"]}


def content(item):
    if item.type == "function_call":
        return Call(item.call_id, item.name, item.arguments)
    (part,) = item.content
    return part.text if item.type == "message" else "*" + part.text


@pytest.mark.parametrize("deltas, items", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_streamed_and_not(deltas, items):
    """The client makes the same of both; in a stream each item ends before the next begins."""
    whole, events, delta = speaker.answered(Responses, {"input": "x"}, deltas)
    whole = Response.model_validate(whole, strict=True)
    state, written = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit), None
    for number, event in enumerate(events):
        event = TypeAdapter(ResponseStreamEvent).validate_python(event)
        state.handle_event(event)
        assert event.sequence_number == number
        if event.type == "response.output_item.added":
            assert written is None
            written = event.item.id
        assert getattr(event, "item_id", None) in (None, written)
        if event.type == "response.output_item.done":
            written = None
    status = "incomplete" if delta.finish == "length" else "completed"
    assert written is None and event.type == f"response.{status}"
    for answer in (whole, event.response):
        assert [content(item) for item in answer.output] == items and answer.status == status
        states = ["completed"] * (len(items) - 1) + [status] * bool(items)
        assert [item.status for item in answer.output] == states
        assert answer.usage.input_tokens_details.cached_tokens == 20


def test_a_conversation_of_codex():
    """Its fields are taken, and its items become the messages of a chat."""
    asked = Responses(agents.CODEX, speaker.caller())
    assert asked.request.messages == agents.chat('{"a": 1}')
    chat = Chat(agents.CHAT | {"messages": asked.request.messages}, speaker.caller())
    assert asked.asks == chat.asks


def test_one_call_if_that_is_asked():
    body = {"input": "x", "parallel_tool_calls": False}
    whole, *_ = speaker.answered(Responses, body, ANSWERS["all in turns"][0])
    made = [content(item) for item in Response.model_validate(whole).output]
    assert made == ANSWERS["all in turns"][1][:-1]


IMAGE = [{"type": "input_image", "image_url": "http://127.0.0.1/x.png"}]
REFUSED = [  # a field, and a value that would change the answer or that is none
    ("previous_response_id", "resp_1"),
    ("n", 2),
    ("top_logprobs", 2),
    ("include", ["message.output_text.logprobs"]),
    ("text", {"format": {"type": "json_schema", "name": "x", "schema": {}}}),
    ("tool_choice", "required"),
    ("tools", [{"type": "web_search"}]),
    ("tools", [{"type": "custom", "name": "f"}]),
    ("input", []),
    ("input", [5]),
    ("input", [{"role": "user"}]),
    ("input", [{"role": "user", "content": IMAGE}]),
    ("input", [{"role": 5, "content": "x"}]),
    ("input", [{"type": "item_reference", "id": "x"}]),
    ("input", [{"type": "function_call", "call_id": "x", "name": "f"}]),
    ("input", [{"type": "function_call_output", "call_id": "x", "output": IMAGE}]),
    ("reasoning", "x"),
    ("messages", [{"role": "user", "content": "x"}]),
]


@pytest.mark.parametrize("field, value", REFUSED)
def test_what_is_refused(field, value):
    with pytest.raises(Refused, match=field) as refused:
        Responses(USUAL | {field: value}, speaker.caller())
    assert refused.value.param == field


@pytest.mark.parametrize("said, items", SAID.values(), ids=SAID)
def test_tools(said, items):
    """Calls reach the client; what is none is text."""
    with speaker.speaking(*said) as url, openai.OpenAI(base_url=url, api_key="none") as client:
        with client.responses.stream(**USUAL) as stream:
            *_, last = stream
        for answer in (client.responses.create(**USUAL), last.response):
            calls = [item for item in answer.output if item.type == "function_call"]
            assert all(json.loads(call.arguments) == {"a": [1, "é"]} for call in calls)
            assert ["call" if c in calls else content(c) for c in answer.output] == items


def test_errors():
    """The client says what is wrong, also in a stream, whose last event Codex reads."""
    said = speaker.speaking("Hello", OSError(5, "the disk", "x"))
    with said as url, openai.OpenAI(base_url=url, api_key="none") as client:
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.create(**USUAL, background=True)
        with pytest.raises(openai.APIError, match="the disk"):
            [*client.responses.create(**USUAL, stream=True)]
    assert Responses.error("x", None, 500)["response"]["error"]["message"] == "x"


@pytest.mark.parametrize("draft", [(), ("--draft", "lookup")], ids=["alone", "lookup"])
def test_the_text_is_that_of_mlx_lm(draft):
    """Streamed and not, alone and four at once; the second time its prompt is not read again."""
    text, size = speaker.written(speaker.PROMPT)
    fields = USUAL | {"max_output_tokens": 16, "input": speaker.PROMPT}

    def ask(_):
        *_, last = served.client.responses.create(**fields, stream=True)
        return served.client.responses.create(**fields), last.response

    serves = serving(*SLOTS, "--chat-template", speaker.TEMPLATE, *draft)
    with serves as served, ThreadPoolExecutor(4) as threads:
        answers = [answer for pair in [ask(0), *threads.map(ask, range(4))] for answer in pair]
    for answer in answers:
        assert [content(item) for item in answer.output] == [text] == [answer.output_text]
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (size, 16)
    assert answers[0].usage.input_tokens_details.cached_tokens > size // 2
