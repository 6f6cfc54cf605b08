"""OpenAI's client and ``serve``: answers and streams, of written parts and of a real model."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import openai
import pytest
from fake_served import TOKENIZER, fake_served, parsed
from in_process import MODEL, SLOTS, Here, listening, serving
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from speaker import Speaker, caller

from moelab import DATA
from moelab.commands.server import http
from moelab.commands.server.ask import Part, Token, Usage
from moelab.commands.server.completions import Chat, Completions
from moelab.commands.server.text import Call, Delta

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TEXT = "def é(x):  # ü€\n    return"


def written(text=TEXT, finish="length", top=2):
    """The deltas of a text: each token is one, and its likeliest tokens are 0, 1, ..."""
    ids, begin = TOKENIZER.encode(text), 0
    for i, id in enumerate(ids):
        end = len(TOKENIZER.decode(ids[: i + 1]).rstrip("\ufffd"))
        chosen = Token(id, -0.5 - i, [(k, -0.25 - k) for k in range(top)])
        yield Delta(text[begin:end], tokens=[chosen])
        begin = end
    yield Delta(text[begin:], finish=finish, usage=Usage(9, 4, len(ids)))


def whole(asked, *texts):
    return asked.whole([sum(text, Delta()) for text in texts])


def events(asked, *texts):
    texts = [list(text) for text in texts]
    yield from asked.begin()
    for i, text in enumerate(texts):
        for delta in text:
            yield from asked.part(i, delta)
    yield from asked.end([sum(text, Delta()) for text in texts])


def summed(stream):
    """What the official client makes of a stream."""
    *stream, done = stream
    state = ChatCompletionStreamState()
    for event in stream:
        state.handle_chunk(parsed(ChatCompletionChunk, event, ["reasoning"]))
    assert done == "[DONE]" and {event["object"] for event in stream} == {"chat.completion.chunk"}
    assert not stream[-1]["choices"]  # it has the usage
    return state.current_completion_snapshot


def content(choice):
    """All that a client sees of a choice, streamed or not."""
    said, scores = choice.message, choice.logprobs and choice.logprobs.content
    calls = [(c.id, c.function.name, c.function.arguments) for c in said.tool_calls or ()]
    said = said.content or "", getattr(said, "reasoning", None), calls
    return choice.index, choice.finish_reason, said, scores or []


CALLS = [Call("call_1", "f", '{"a": 1}'), Call("call_2", "g", "{}")]
ANSWERS = {
    "a text": [*written()],
    "nothing": [Delta(finish="stop", usage=Usage(9, 0, 1))],
    "thoughts": [Delta(reasoning="hm"), Delta(reasoning="m"), *written(finish="stop")],
    "calls": [Delta("a", calls=CALLS[:1]), Delta(calls=CALLS[1:]), *written("b", "tool_calls")],
    "a call": [Delta(calls=CALLS[:1], finish="tool_calls", usage=Usage(9, 0, 5))],
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("scores", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_a_chat_streamed_and_not(name, scores):
    """Two texts of a request, by what the client makes of both."""
    answer, body = ANSWERS[name], CHAT | {"n": 2} | scores
    made = parsed(ChatCompletion, whole(Chat(body, fake_served()), answer, answer), ["reasoning"])
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    got = summed(events(Chat(body, fake_served()), answer, answer))
    assert [*map(content, made.choices)] == [*map(content, got.choices)]
    for i, choice in enumerate(made.choices):
        calls = [call for delta in answer for call in delta.calls]
        assert content(choice)[:2] == (i, answer[-1].finish) and content(choice)[2][2] == calls
        assert (choice.message.content is None) == (name == "a call")
        assert bool(choice.logprobs) == bool(scores)
    assert made.usage == got.usage and made.usage.prompt_tokens == 9
    assert made.usage.completion_tokens == 2 * answer[-1].usage.completion
    assert made.usage.prompt_tokens_details.cached_tokens == answer[-1].usage.cached


def test_log_probabilities_that_json_does_not_have():
    for score in (-math.inf, math.nan):
        delta = Delta("x", tokens=[Token(5, score, [(5, score)])], finish="stop")
        delta.usage = Usage(1, 0, 1)
        for kind, body in ((Chat, CHAT), (Completions, {"prompt": "x"})):
            body = body | ({"top_logprobs": 1} if kind is Chat else {"logprobs": 1})
            json.dumps(whole(kind(body, fake_served()), [delta]), allow_nan=False)


@pytest.mark.parametrize("streams", [True, False])
def test_echo(streams):
    """The prompt before the text, with log probabilities from its second token on."""
    ids, new = TOKENIZER.encode(TEXT), TOKENIZER.encode("x y")
    first, *rest = written("x y", "stop", top=1)
    first.prompt = [
        Token(i, -n if n else None, [(7, -0.25)] if n else []) for n, i in enumerate(ids)
    ]
    body = {"prompt": [TEXT, ids], "echo": True, "logprobs": 1, "max_tokens": 4, "stream": streams}
    make, texts = events if streams else whole, ([first, *rest], [first, *rest])
    made = make(Completions(body, fake_served()), *texts)
    # The client's own way: its types do not know that a value may be null.
    answers = [Completion.construct(**a) for a in ([*made][:-1] if streams else [made])]
    for index in (0, 1):
        mine = [c for answer in answers for c in answer.choices if c.index == index]
        assert "".join(choice.text for choice in mine) == TEXT + "x y"
        names, scores, tops, offsets = (
            [x for choice in mine for x in getattr(choice.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        assert scores == [None, *range(-1, -len(ids), -1), *(-0.5 - i for i in range(len(new)))]
        assert tops[0] is None and len(names) == len(scores)
        for top, token, score in [*zip(tops, names, scores)][1:]:
            assert top[token] == score and max(top.values()) == -0.25 and len(top) == 2
        for offset, token in zip(offsets, names):
            assert "\\x" in token or (TEXT + "x y")[offset:].startswith(token)


def test_several_prompts():
    """Choices come in the order of the prompts; a prompt counts once for its ``n`` texts."""
    asked = Completions({"prompt": ["a", "b c"], "n": 2, "echo": True}, fake_served())
    text = "<think>x</think><tool_call>{}</tool_call>"  # of a completion all is text
    deltas = [splitter.add(Part(text, finish="stop")) for splitter in asked.splitters]
    for delta in deltas:
        delta.usage = Usage(9, 0, 1)
    answer = parsed(Completion, asked.whole(deltas))
    assert [choice.text for choice in answer.choices] == ["a" + text] * 2 + ["b c" + text] * 2
    assert answer.usage.prompt_tokens == 18 and answer.usage.completion_tokens == 4
    assert answer.choices[0].logprobs is None


SERVERS = {  # how the model is served: in batches, and with a draft
    "streamed": SLOTS,
    "tiny-draft": (*SLOTS, "--draft", str(DATA / "models/tiny-draft")),
}
PROMPTS = [
    'def read_json(path):\n    """Read a JSON file and return its content."""',
    "import numpy as np\n\ndef softmax(x, axis=-1):",
    "class Stack:",
    "for i in range(10):",
]
USUAL = {"model": "default_model", "max_tokens": 16}
SAMPLED = {"temperature": 2, "max_tokens": 12}  # no two texts are alike by chance
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def mlx():
    """Writes what mlx-lm does after a prompt, resident and with its own kernels."""
    model, tokenizer = mlx_lm.load(str(MODEL))
    model.set_dtype(mx.float32)
    write = partial(mlx_lm.generate, model, tokenizer, max_tokens=16)

    def scores(tokens):
        """Log probabilities [T - 1, V] of what follows each token."""
        return nn.log_softmax(model(mx.array([tokens]))[0, :-1], axis=-1)

    return SimpleNamespace(write=write, scores=scores, tokenizer=tokenizer)


@pytest.fixture(scope="module", params=SERVERS)
def served(request):
    with serving(*SERVERS[request.param]) as server:
        yield server


@pytest.fixture
def client(served):
    return served.client


def complete(client, prompt=PROMPTS[0], **fields):
    return client.completions.create(prompt=prompt, **USUAL | fields)


def chat(client, text=PROMPTS[0], **fields):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(messages=messages, **USUAL | fields)


def streamed(client, text=PROMPTS[0], **fields):
    """What the client's helper makes of a streamed chat."""
    messages = [{"role": "user", "content": text}]
    fields = USUAL | {"stream_options": {"include_usage": True}} | fields
    with client.chat.completions.stream(messages=messages, **fields) as stream:
        for _ in stream:
            pass
        return stream.current_completion_snapshot


def test_an_answer_of_a_model(client, mlx):
    """It is mlx-lm's, streamed or not, four at once; all but names and what was cached is alike."""
    texts = {prompt: mlx.write(prompt) for prompt in PROMPTS}

    def ask(prompt):
        for fields in ({}, {"stop": "return"}, {"seed": 3, **SAMPLED}):
            fields |= {"logprobs": True, "top_logprobs": 20, "n": 2}
            one, other = chat(client, prompt, **fields), streamed(client, prompt, **fields)
            parsed(ChatCompletion, one.model_dump(exclude_unset=True))
            for a, b in zip(one.choices, other.choices, strict=True):
                assert content(a)[:3] == content(b)[:3]
                assert [t.bytes for t in content(a)[3]] == [t.bytes for t in content(b)[3]]
            assert one.usage.total_tokens == other.usage.total_tokens
            expected = texts[prompt].split(fields.get("stop", "\0"))[0]
            assert "seed" in fields or one.choices[0].message.content == expected

    with ThreadPoolExecutor(4) as threads:
        [*threads.map(ask, PROMPTS)]


def test_seeds(client):
    """The ``n`` texts have seeds that follow, beside others too; those without differ."""
    fields = {"seed": 7, **SAMPLED}
    texts = [choice.text for choice in complete(client, **fields, n=3).choices]
    with ThreadPoolExecutor(6) as threads:
        others = [threads.submit(complete, client, **SAMPLED) for _ in range(3)]
        seeded = [threads.submit(complete, client, **fields | {"seed": 7 + i}) for i in range(3)]
        assert [text.result().choices[0].text for text in seeded] == texts
        texts += [text.result().choices[0].text for text in others]
    texts += [choice.text for choice in complete(client, n=3, **SAMPLED).choices]
    assert len({*texts}) == len(texts)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.5, "seed": 1}])
def test_log_probabilities_of_what_was_chosen(client, mlx, fields):
    """They are mlx-lm's, of the tokens that make the text (mlx-lm drops a first space of it)."""
    answer = chat(client, PROMPTS[1], logprobs=True, top_logprobs=20, **fields).choices[0]
    scores, encode = answer.logprobs.content, mlx.tokenizer.encode
    text = b"".join(bytes(score.bytes) for score in scores).decode()
    assert answer.message.content in (text, text.removeprefix(" "))
    (*ids,) = (token for score in scores for token in encode(score.token))
    rows = mlx.scores(encode(PROMPTS[1]) + ids)[-len(ids) :]
    for score, row, id in zip(scores, rows, ids, strict=True):
        best = mx.sort(row)[-20:][::-1].tolist()
        assert math.isclose(score.logprob, row[id].item(), abs_tol=1e-3)
        assert [top.logprob for top in score.top_logprobs] == pytest.approx(best, abs=1e-3)


def test_content_in_parts_and_errors(client, mlx):
    parts = [{"type": "text", "text": text} for text in (PROMPTS[0][:9], PROMPTS[0][9:])]
    assert chat(client, parts).choices[0].message.content == mlx.write(PROMPTS[0])
    wrong = {"temperature": -1, "tools": [TOOL], "model": "x", "response_format": {"type": "x"}}
    for name, value in wrong.items():
        for stream in (True, False):
            with pytest.raises(openai.BadRequestError, match=name) as refused:
                chat(client, **{"stream": stream, name: value})
            assert (refused.value.param, refused.value.type) == (name, "invalid_request_error")


CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>'
SPOKEN = {  # what a model writes, and what a client of it gets
    "call": (f"I add.{CALL}", "I add.", ['{"a": [1, "é"]}'], "tool_calls"),
    "calls": (CALL + CALL, None, 2 * ['{"a": [1, "é"]}'], "tool_calls"),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', None, ["{}"], "tool_calls"),
    "malformed": ("a<tool_call>{oops</tool_call>", "a<tool_call>{oops</tool_call>", [], "stop"),
    "half": ("if a <", "if a <", [], "stop"),
}


@pytest.mark.parametrize("spoken", SPOKEN.values(), ids=SPOKEN)
def test_tools(spoken):
    """Calls that the client can parse; what is none is text."""
    text, said, calls, finish = spoken
    engine = Speaker(text)
    with listening(http.app(engine, caller(), (Chat, Completions), ()), engine) as url:
        client = Here(url).client
        answers = [ask(client, tools=[TOOL]).choices[0] for ask in (chat, streamed)]
        bare = chat(client).choices[0]
    for answer in answers:
        assert (answer.message.content or None, answer.finish_reason) == (said, finish)
        made = answer.message.tool_calls or []
        assert [call.function.arguments for call in made] == calls
        assert len({call.id for call in made}) == len(calls)
    assert (bare.message.content, bare.finish_reason) == (text, "stop")
