"""OpenAI's chat and completions: answers and streams, by the types of the official client."""

import json
import math

import pytest
from fake_served import fake_served, parsed, tokenizer
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from moelab.commands.server.ask import Part, Token, Usage
from moelab.commands.server.completions import Chat, Completions
from moelab.commands.server.text import Call, Delta

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TEXT = "def é(x):  # ü€\n    return"


def written(text=TEXT, finish="length", top=2):
    """The deltas of a text: each token is one, and its likeliest tokens are 0, 1, ..."""
    ids = tokenizer().encode(text)
    begin = 0
    for i, id in enumerate(ids):
        end = len(tokenizer().decode(ids[: i + 1]).rstrip("\ufffd"))
        chosen = Token(id, -0.5 - i, [(k, -0.25 - k) for k in range(top)])
        yield Delta(text[begin:end], tokens=[chosen])
        begin = end
    yield Delta(text[begin:], finish=finish, usage=Usage(9, 4, len(ids)))


def whole(asked, *texts):
    return asked.whole([sum(text, Delta()) for text in texts])


def stream(asked, *texts):
    texts = [list(text) for text in texts]
    yield from asked.begin()
    for i, text in enumerate(texts):
        for delta in text:
            yield from asked.part(i, delta)
    yield from asked.end([sum(text, Delta()) for text in texts])


def chat(**fields):
    return Chat(CHAT | fields, fake_served())


def summed(events):
    """What the official client makes of a stream."""
    *events, done = events
    assert done == "[DONE]"
    state = ChatCompletionStreamState()
    for event in events:
        assert json.loads(json.dumps(event, allow_nan=False)) == event
        state.handle_chunk(parsed(ChatCompletionChunk, event, ["reasoning"]))
    return state.current_completion_snapshot


CALLS = [Call("call_1", "f", '{"a": 1}'), Call("call_2", "g", "{}")]
ANSWERS = {
    "a text": [*written()],
    "nothing": [Delta(finish="stop", usage=Usage(9, 0, 1))],
    "thoughts": [Delta(reasoning="hm"), Delta(reasoning="m"), *written(finish="stop")],
    "calls": [Delta("a", calls=CALLS[:1]), Delta(calls=CALLS[1:]), *written("b", "tool_calls")],
    "a call": [Delta(calls=CALLS[:1], finish="tool_calls", usage=Usage(9, 0, 5))],
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("scores", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_a_chat_streamed_and_not(answer, scores):
    """Two texts of a request, by what the client makes of both."""
    usage = {"stream_options": {"include_usage": True}}
    asked = chat(n=2, **scores)
    made = whole(asked, answer, answer)
    made = parsed(ChatCompletion, made, ["reasoning"])
    got = summed(stream(chat(n=2, stream=True, **usage, **scores), answer, answer))
    assert [c.index for c in made.choices] == [c.index for c in got.choices] == [0, 1]
    for one, other in zip(made.choices, got.choices):
        message, streamed = one.message, other.message
        assert (message.content or "") == (streamed.content or "")
        assert getattr(message, "reasoning", None) == getattr(streamed, "reasoning", None)
        assert one.finish_reason == other.finish_reason == answer[-1].finish
        calls = [[(c.id, c.function) for c in m.tool_calls or ()] for m in (message, streamed)]
        assert [(i, f.name, f.arguments) for i, f in calls[0]] == [
            (i, f.name, f.arguments) for i, f in calls[1]
        ]
        assert len(calls[0]) == sum(len(delta.calls) for delta in answer)
        assert bool(one.logprobs) == bool(scores)
        if scores:
            assert one.logprobs.content == (other.logprobs.content or [])
    assert made.usage == got.usage and made.usage.prompt_tokens == 9
    assert made.usage.completion_tokens == 2 * answer[-1].usage.completion
    assert made.usage.prompt_tokens_details.cached_tokens == answer[-1].usage.cached


def test_content_is_null_only_beside_calls():
    contents = {
        name: whole(chat(), answer)["choices"][0]["message"]["content"]
        for name, answer in ANSWERS.items()
    }
    assert contents.pop("a call") is None and contents.pop("nothing") == ""
    assert all(contents.values())


def test_the_usage_chunk():
    """Its object is that of the other chunks, and it comes if it was asked for."""
    for kind, name in ((Chat, "chat.completion.chunk"), (Completions, "text_completion")):
        for asks, number in (({}, 0), ({"include_usage": None}, 0), ({"include_usage": True}, 1)):
            body = CHAT if kind is Chat else {"prompt": "x"}
            asked = kind(body | {"stream": True, "stream_options": asks}, fake_served())
            *events, done = stream(asked, written())
            assert {event["object"] for event in events} == {name} and done == "[DONE]"
            assert [not event["choices"] for event in events].count(True) == number
            assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1


def test_log_probabilities_of_a_chat():
    """The chosen token's own, with bytes that make the text, and the likeliest ones beside it."""
    answer = whole(chat(logprobs=True, top_logprobs=2), written())
    scores = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(score["bytes"]) for score in scores).decode() == TEXT
    assert [score["logprob"] for score in scores] == [-0.5 - i for i in range(len(scores))]
    assert "return" in "".join(score["token"] for score in scores)
    for score in scores:
        assert [top["logprob"] for top in score["top_logprobs"]] == [-0.25, -1.25]
        assert score["token"].encode() == bytes(score["bytes"]) or "\\x" in score["token"]


def test_log_probabilities_that_json_does_not_have():
    for score in (-math.inf, math.nan):
        delta = Delta("x", tokens=[Token(5, score, [(5, score)])], finish="stop")
        delta.usage = Usage(1, 0, 1)
        for kind, body in ((Chat, CHAT), (Completions, {"prompt": "x"})):
            scores = {"logprobs": True, "top_logprobs": 1} if kind is Chat else {"logprobs": 1}
            json.dumps(whole(kind(body | scores, fake_served()), [delta]), allow_nan=False)


@pytest.mark.parametrize("streams", [True, False])
def test_echo(streams):
    """The prompt before the text, with log probabilities from its second token on."""
    ids = tokenizer().encode(TEXT)
    prompt = [Token(id, -i if i else None, [(7, -0.25)] if i else []) for i, id in enumerate(ids)]
    first, *rest = written("x y", "stop", top=1)
    first.prompt = prompt
    body = {"prompt": [TEXT, ids], "echo": True, "logprobs": 1, "max_tokens": 4, "stream": streams}
    asked = Completions(body, fake_served())
    if streams:
        *answers, _ = stream(asked, [first, *rest], [first, *rest])
    else:
        answers = [whole(asked, [first, *rest], [first, *rest])]
    choices = [choice for answer in answers for choice in answer["choices"]]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == TEXT + "x y"
        scores = {
            name: [x for choice in mine for x in choice["logprobs"][name]]
            for name in mine[0]["logprobs"]
        }
        new = tokenizer().encode("x y")
        assert len(scores["tokens"]) == len(ids) + len(new)
        assert scores["token_logprobs"][: len(ids)] == [None, *range(-1, -len(ids), -1)]
        assert scores["token_logprobs"][len(ids) :] == [-0.5 - i for i in range(len(new))]
        assert scores["top_logprobs"][0] is None
        rows = zip(scores["top_logprobs"], scores["tokens"], scores["token_logprobs"])
        for top, token, score in [*rows][1:]:
            assert top[token] == score and max(top.values()) == -0.25 and len(top) == 2
        for offset, token in zip(scores["text_offset"], scores["tokens"]):
            assert "\\x" in token or (TEXT + "x y")[offset:].startswith(token)
    parsed(Completion, whole(Completions({"prompt": "x", "logprobs": 1}, fake_served()), written()))


def test_several_prompts():
    """Choices come in the order of the prompts; a prompt counts once for its ``n`` texts."""
    asked = Completions({"prompt": ["a", "b c"], "n": 2, "echo": True}, fake_served())
    answer = parsed(Completion, whole(asked, *[[*written("x")]] * 4))
    assert [choice.text for choice in answer.choices] == ["ax", "ax", "b cx", "b cx"]
    assert answer.usage.prompt_tokens == 18 and answer.usage.completion_tokens == 4
    assert answer.choices[0].logprobs is None


def test_errors():
    for status, kind in ((400, "invalid_request_error"), (404, None), (500, "server_error")):
        error = Chat.error("words", "model", status)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"] == "words"
        assert kind in (None, error["type"])


def test_completions_leave_the_text_whole():
    """Also where it has the markers of thoughts or calls."""
    asked = Completions({"prompt": "x"}, fake_served())
    text = "<think>a</think><tool_call>{}</tool_call>"
    deltas = [asked.splitters[0].add(Part(c)) for c in text]
    deltas.append(asked.splitters[0].add(Part("", finish="stop", usage=Usage(1, 0, 9))))
    assert asked.whole([sum(deltas, Delta())])["choices"][0]["text"] == text
