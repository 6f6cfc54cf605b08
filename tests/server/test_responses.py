"""OpenAI's responses: what a request becomes, and answers by the types of the official client."""

import json
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx_lm
import openai
import pytest
from fake_served import fake_served
from in_process import MODEL, SLOTS, serving
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from speaker import ANSWERS, CALLS, CHAT_TOOL, SAID, answered, caller, speaking

from moelab.commands.server.ask import Refused
from moelab.commands.server.completions import Chat
from moelab.commands.server.responses import Responses
from moelab.commands.server.text import Call

TOOL = {"type": "function", "name": "f", "description": "Do", "parameters": {"type": "object"}}


def asked(**body):
    return Responses({"input": "x"} | body, fake_served())


def content(item):
    if item.type == "function_call":
        return Call(item.call_id, item.name, item.arguments)
    (part,) = item.content
    return part.text if item.type == "message" else "*" + part.text


@pytest.mark.parametrize("deltas, items", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_streamed_and_not(deltas, items):
    """The client makes the same of both; in a stream each item ends before the next begins."""
    request = asked()
    _, delta = answered(request, deltas)
    whole = Response.model_validate(json.loads(json.dumps(request.whole([delta]))), strict=True)
    request = asked(stream=True)
    events, delta = answered(request, deltas)
    state, written = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit), None
    for number, event in enumerate([*events, *request.end([delta])]):
        event = TypeAdapter(ResponseStreamEvent).validate_python(json.loads(json.dumps(event)))
        state.handle_event(event)
        assert event.sequence_number == number
        if event.type == "response.output_item.added":
            assert written is None
            written = event.item.id
        elif hasattr(event, "item_id"):
            assert event.item_id == written
        if event.type == "response.output_item.done":
            written = None
    streamed = event.response
    assert written is None and event.type == f"response.{whole.status}"
    assert [content(item) for item in whole.output] == items
    assert [content(item) for item in streamed.output] == items
    states = ["completed"] * len(items)
    if delta.finish == "length":
        states[-1:] = ["incomplete"]
        assert whole.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in whole.output] == states
    assert [item.status for item in streamed.output] == states
    assert streamed.usage == whole.usage and whole.usage.total_tokens == 37
    assert whole.usage.input_tokens_details.cached_tokens == 20


def test_one_call_if_that_is_asked():
    deltas, _ = ANSWERS["all in turns"]
    request = asked(parallel_tool_calls=False)
    _, delta = answered(request, deltas)
    made = Response.model_validate(request.whole([delta]))
    assert [content(item) for item in made.output] == ["*B", "AC", CALLS[0], "D", "*E"]


def test_a_conversation_of_codex():
    """Its fields are taken; items become the messages of a chat, whose tokens are the same."""
    usual = {  # as it sends them
        "model": "default_model",
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "client_metadata": {"x": "y"},
        "service_tier": None,
        "previous_response_id": None,
        "temperature": None,
        "tools": [TOOL | {"strict": False}],
    }
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    thought = {"type": "reasoning_text", "text": "Hm"}
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": None, "id": "rs_1"}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        said,
        reasoning | {"content": [thought]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Ok", "annotations": []}],
        },
        call,
        call | {"call_id": "c2", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": said["content"]},
        reasoning | {"content": None},
        {"type": "message", "role": "developer", "content": "C"},
        said,
    ]
    body = usual | {"instructions": "A", "input": items, "max_output_tokens": 5}
    request = Responses(body, caller()).request
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": i, "type": "function", "function": function} for i in ("c1", "c2")]
    assert request.messages == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning": "Hm", "content": "Ok", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "Hi"},
        {"role": "user", "content": "C\n\nHi"},
    ]
    assert request.tools == [CHAT_TOOL] and request.max_tokens == 5
    assert request.chat_template_kwargs == {"reasoning_effort": "medium", "enable_thinking": True}


def test_the_ask_is_that_of_a_chat():
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3}
    chat = Chat(
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9} | same, fake_served()
    )
    assert asked(max_output_tokens=9, **same).asks == chat.asks


PARTS = [{"type": "input_image", "image_url": "http://127.0.0.1/x.png"}]
REFUSED = {  # a field, and a value that would change the answer or that is none
    "previous_response_id": ["resp_1"],
    "conversation": ["conv_1"],
    "prompt": [{"id": "x"}],
    "background": [True],
    "truncation": ["auto"],
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
        [{"role": "user"}],
        [{"role": "user", "content": PARTS}],
        [{"role": "user", "content": [{"type": "input_text"}]}],
        [{"role": "user", "content": [5]}],
        [{"role": 5, "content": "x"}],
        [{"type": "item_reference", "id": "x"}],
        [{"type": "function_call", "name": "f", "arguments": "{}"}],
        [{"type": "function_call_output", "call_id": "x", "output": PARTS}],
        [{"type": "reasoning", "content": 5}],
    ],
    "instructions": [["x"]],
    "reasoning": ["x"],
    "max_output_tokens": [0, "x"],
    "max_tokens": [5],
    "messages": [[{"role": "user", "content": "x"}]],
    "n": [2],
    "model": ["gpt-9"],
    "temperature": [-1],
    "gibberish": [1],
}


@pytest.mark.parametrize("field, value", [(f, v) for f, values in REFUSED.items() for v in values])
def test_what_is_refused(field, value):
    with pytest.raises(Refused) as refused:
        asked(**{field: value})
    assert refused.value.param == field and str(refused.value).startswith(field)


@pytest.mark.parametrize("arguments", ["{oops", "[1]", 5])
def test_arguments_of_an_earlier_call(arguments):
    with pytest.raises(Refused):
        asked(
            input=[{"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}]
        )


def client_of(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("said, items", SAID.values(), ids=SAID)
def test_tools(said, items):
    """Calls reach the client; what is none is text."""
    usual = {"model": "default_model", "input": "x", "tools": [TOOL | {"strict": True}]}
    with speaking(*said) as url, client_of(url) as client:
        answers = [client.responses.create(**usual)]
        with client.responses.stream(**usual) as stream:
            *_, last = stream
            answers.append(last.response)
        for answer in answers:
            calls = [item for item in answer.output if item.type == "function_call"]
            assert all(json.loads(call.arguments) == {"a": [1, "é"]} for call in calls)
            contents = ["call" if c in calls else content(c) for c in answer.output]
            assert contents == items
            assert answer.status == ("incomplete" if "length" in said else "completed")
        if "length" not in said:
            assert stream.get_final_response().output_text == answers[0].output_text


def test_errors():
    """The client says what is wrong, also in a stream, whose last event Codex reads."""
    with speaking("Hello", OSError(5, "the disk", "x")) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="default_model", input="x", background=True)
        assert refused.value.param == "background" and "background" in refused.value.message
        with pytest.raises(openai.InternalServerError, match="the disk"):
            client.responses.create(model="default_model", input="x")
        with pytest.raises(openai.APIError, match="the disk"):
            [*client.responses.create(model="default_model", input="x", stream=True)]
    assert Responses.error("x", None, 500)["response"]["error"]["message"] == "x"


@pytest.mark.parametrize("draft", [(), ("--draft", "lookup")], ids=["alone", "lookup"])
def test_the_text_is_that_of_mlx_lm(draft):
    """Streamed and not, alone and four at once; the second time its prompt is not read again."""
    model, tokenizer = mlx_lm.load(str(MODEL))
    model.set_dtype(mx.float32)
    prompt = "def read_json(path):"
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=16)
    fields = {"model": "default_model", "max_output_tokens": 16, "input": prompt}

    def ask(_):
        *_, last = served.client.responses.create(**fields, stream=True)
        return served.client.responses.create(**fields), last.response

    with serving(*SLOTS, *draft) as served:
        with ThreadPoolExecutor(4) as threads:
            answers = [answer for pair in [ask(0), *threads.map(ask, range(4))] for answer in pair]
        for answer in answers:
            Response.model_validate(answer.model_dump(), strict=True)
            assert [content(item) for item in answer.output] == [text] == [answer.output_text]
            assert answer.usage.output_tokens == 16 and answer.status == "incomplete"
        usage = answers[0].usage
        assert usage.input_tokens_details.cached_tokens == usage.input_tokens - 1
