"""OpenAI's responses: what a request becomes, and answers by the types of the official client."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from fake_served import fake_served
from in_process import SLOTS, serving
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
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
from moelab.commands.server.responses import Responses
from moelab.commands.server.text import Call

TOOL = {"type": "function", "name": "f", "description": "Do", "parameters": {"type": "object"}}


def content(item):
    if item.type == "function_call":
        return Call(item.call_id, item.name, item.arguments)
    (part,) = item.content
    return part.text if item.type == "message" else "*" + part.text


@pytest.mark.parametrize("deltas, items", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_streamed_and_not(deltas, items):
    """The client makes the same of both; in a stream each item ends before the next begins."""
    request = Responses({"input": "x"}, fake_served())
    _, delta = answered(request, deltas)
    whole = Response.model_validate(json.loads(json.dumps(request.whole([delta]))), strict=True)
    request = Responses({"input": "x", "stream": True}, fake_served())
    events, delta = answered(request, deltas)
    state, written = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit), None
    for number, event in enumerate([*events, *request.end([delta])]):
        event = TypeAdapter(ResponseStreamEvent).validate_python(json.loads(json.dumps(event)))
        state.handle_event(event)
        assert event.sequence_number == number
        if event.type == "response.output_item.added":
            assert written is None
            written = event.item.id
        assert getattr(event, "item_id", None) in (None, written)
        if event.type == "response.output_item.done":
            written = None
    assert written is None and event.type == f"response.{whole.status}"
    is_cut = delta.finish == "length"
    assert (whole.incomplete_details is not None) == is_cut == (whole.status == "incomplete")
    for answer in (whole, event.response):
        assert [content(item) for item in answer.output] == items
        states = ["completed"] * (len(items) - 1) + [whole.status] * bool(items)
        assert [item.status for item in answer.output] == states
        assert (answer.usage.total_tokens, answer.usage.input_tokens_details.cached_tokens) == (
            37,
            20,
        )


def test_a_conversation_of_codex():
    """Its fields are taken; items become the messages of a chat, whose tokens are the same."""
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    developer = {"type": "message", "role": "developer"}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": None, "id": "rs_1"}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    ok = {"type": "output_text", "text": "Ok", "annotations": []}
    items = [
        developer | {"content": [{"type": "input_text", "text": "B"}]},
        said,
        thought | {"content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [ok]},
        call,
        thought | {"content": None},
        call | {"call_id": "c2", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": said["content"]},
        developer | {"content": "C"},
        said,
    ]
    same = {"model": "default_model", "temperature": 0.5, "top_p": 0.9, "seed": 3, "stream": True}
    body = same | {
        "instructions": "A",
        "input": items,
        "max_output_tokens": 5,
        "tool_choice": "auto",
        "tools": [TOOL | {"strict": False}],
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "client_metadata": {"x": "y"},
    }
    body |= {"store": False, "prompt_cache_key": "0199", "service_tier": None}
    request = Responses(body | {"previous_response_id": None}, caller())
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": i, "type": "function", "function": function} for i in ("c1", "c2")]
    assert request.request.messages == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning": "Hm", "content": "Ok", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "Hi"},
        {"role": "user", "content": "C\n\nHi"},
    ]
    effort = {"reasoning_effort": "medium", "enable_thinking": True}
    chat = same | {"messages": request.request.messages, "tools": [CHAT_TOOL], "max_tokens": 5}
    assert request.asks == Chat(chat | {"chat_template_kwargs": effort}, caller()).asks
    _, delta = answered(request, ANSWERS["all in turns"][0])  # one call, since that is asked
    made = Response.model_validate(request.whole([delta]))
    assert [content(item) for item in made.output] == ["*B", "AC", CALLS[0], "D", "*E", "\n"]


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/x"}]}
REFUSED = {  # a field, and a value that would change the answer or that is none
    "previous_response_id": ["resp_1"],
    "background": [True],
    "truncation": ["auto"],
    "n": [2],
    "top_logprobs": [2],
    "include": [["message.output_text.logprobs"], "x"],
    "text": [{"format": {"type": "json_schema", "name": "x", "schema": {}}}, "x"],
    "tool_choice": ["required", {"type": "function", "name": "f"}],
    "tools": [
        [{"type": "web_search"}],
        [{"type": "custom", "name": "f"}],
        [5],
        "x",
        [{"name": "f"}],
    ],
    "input": [
        [],
        5,
        [5],
        [IMAGE],
        [{"role": "user"}],
        [{"role": 5, "content": "x"}],
        [{"type": "x"}],
    ],
    "reasoning": ["x", {"effort": 5}],
    "max_output_tokens": [0, "x"],
    "max_tokens": [5],
    "messages": [[{"role": "user", "content": "x"}]],
    "gibberish": [1],
}
REFUSED["input"] += [
    [{"type": "function_call", "call_id": "x", "name": "f"}],
    [{"type": "function_call_output", "call_id": "x", "output": IMAGE["content"]}],
    [{"type": "reasoning", "content": 5}],
]


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_refused(field):
    for value in REFUSED[field]:
        with pytest.raises(Refused, match=field) as refused:
            Responses({"input": "x", field: value}, fake_served())
        assert refused.value.param == field


@pytest.mark.parametrize("said, items", SAID.values(), ids=SAID)
def test_tools(said, items):
    """Calls reach the client; what is none is text."""
    usual = {"model": "default_model", "input": "x", "tools": [TOOL | {"strict": True}]}
    with speaking(*said) as url, openai.OpenAI(base_url=url, api_key="none") as client:
        with client.responses.stream(**usual) as stream:
            *_, last = stream
        for answer in (client.responses.create(**usual), last.response):
            calls = [item for item in answer.output if item.type == "function_call"]
            assert all(json.loads(call.arguments) == {"a": [1, "é"]} for call in calls)
            assert ["call" if c in calls else content(c) for c in answer.output] == items


def test_errors():
    """The client says what is wrong, also in a stream, whose last event Codex reads."""
    said = speaking("Hello", OSError(5, "the disk", "x"))
    with said as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="background") as refused:
            client.responses.create(model="default_model", input="x", background=True)
        assert refused.value.param == "background"
        with pytest.raises(openai.APIError, match="the disk"):
            [*client.responses.create(model="default_model", input="x", stream=True)]
    assert Responses.error("x", None, 500)["response"]["error"]["message"] == "x"


@pytest.mark.parametrize("draft", [(), ("--draft", "lookup")], ids=["alone", "lookup"])
def test_the_text_is_that_of_mlx_lm(draft):
    """Streamed and not, alone and four at once; the second time its prompt is not read again."""
    text, size = written(PROMPT)
    fields = {"model": "default_model", "max_output_tokens": 16, "input": PROMPT, "tools": [TOOL]}

    def ask(_):
        *_, last = served.client.responses.create(**fields, stream=True)
        return served.client.responses.create(**fields), last.response

    serves = serving(*SLOTS, "--chat-template", TEMPLATE, *draft)
    with serves as served, ThreadPoolExecutor(4) as threads:
        answers = [answer for pair in [ask(0), *threads.map(ask, range(4))] for answer in pair]
    for answer in answers:
        assert [content(item) for item in answer.output] == [text] == [answer.output_text]
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (size, 16)
    assert answers[0].usage.input_tokens_details.cached_tokens > size // 2
