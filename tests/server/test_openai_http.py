"""OpenAI's client against ``serve``: answers and streams of a real model."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import openai
import pytest
from fake_served import fake_served, parsed
from in_process import MODEL, SLOTS, Here, listening, serving
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from openai.types import Completion
from openai.types.chat import ChatCompletion

from moelab import DATA
from moelab.commands.server import http
from moelab.commands.server.ask import Part, Usage
from moelab.commands.server.completions import Chat, Completions

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
TOKENS = 16
USUAL = {"model": "default_model", "max_tokens": TOKENS}
SAMPLED = {"temperature": 2, "max_tokens": 12}  # no two texts are alike by chance


@pytest.fixture(scope="module")
def mlx():
    """Writes what mlx-lm does after a prompt, resident and with its own kernels."""
    model, tokenizer = mlx_lm.load(str(MODEL))
    model.set_dtype(mx.float32)
    write = partial(mlx_lm.generate, model, tokenizer, max_tokens=TOKENS)

    def scores(tokens):
        """Log probabilities [T - 1, V] of what follows each token."""
        return nn.log_softmax(model(mx.array([tokens]))[0, :-1], axis=-1)

    return SimpleNamespace(write=write, scores=scores, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def texts(mlx):
    return [mlx.write(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def served(request):
    with serving(*SERVERS[request.param]) as server:
        yield server


@pytest.fixture
def client(served):
    return served.client


two_servers = pytest.mark.parametrize("served", SERVERS, indirect=True)
one_server = pytest.mark.parametrize("served", ["streamed"], indirect=True)


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


def text_of(client, *args, **fields):
    return complete(client, *args, **fields).choices[0].text


@two_servers
def test_the_text_is_that_of_mlx_lm(client, texts):
    """Alone and of four at once, of completions and chats, streamed and not."""

    def ask(prompt):
        parts = complete(client, prompt, stream=True)
        yield "".join(part.choices[0].text for part in parts)
        yield text_of(client, prompt)
        yield chat(client, prompt).choices[0].message.content
        yield streamed(client, prompt).choices[0].message.content

    assert {*ask(PROMPTS[0])} == {texts[0]}
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda p: {*ask(p)}, PROMPTS)] == [{text} for text in texts]


@two_servers
def test_an_answer_streamed_and_not(client):
    """All that the client sees of both is the same, but for names and what was cached."""
    scores = {"logprobs": True, "top_logprobs": 20, "n": 2}
    for fields in ({"stop": "return"}, {"seed": 3, **SAMPLED}):
        one, other = chat(client, **scores, **fields), streamed(client, **scores, **fields)
        parsed(ChatCompletion, one.model_dump(exclude_unset=True))
        for a, b in zip(one.choices, other.choices, strict=True):
            assert a.message.content == b.message.content and a.finish_reason == b.finish_reason
            assert [(t.token, t.bytes) for t in a.logprobs.content] == [
                (t.token, t.bytes) for t in b.logprobs.content
            ]
        assert one.usage.completion_tokens == other.usage.completion_tokens
        assert one.usage.prompt_tokens == other.usage.prompt_tokens


@two_servers
def test_the_tokens_that_a_request_took(client, mlx):
    """Of a prompt that was read twice, which shows where others may go on, one token is read."""
    text = max(MODEL.glob("heldout/*.py")).read_text()[:300]
    number = len(mlx.tokenizer.encode(text))
    for ask in (complete, chat, streamed):
        *_, usage = [ask(client, text).usage for _ in range(3)]
        assert usage.prompt_tokens_details.cached_tokens == number - 1
        assert (usage.prompt_tokens, usage.completion_tokens) == (number, TOKENS)
        assert usage.total_tokens == number + TOKENS


@two_servers
def test_a_seed_writes_the_text(client, mlx):
    """The ``n`` texts have seeds that follow, alone and beside others."""
    fields = {"seed": 7, **SAMPLED, "extra_body": {"top_k": 50}}
    texts = [choice.text for choice in complete(client, **fields, n=3).choices]
    assert len({*texts}) == 3
    with ThreadPoolExecutor(6) as threads:
        others = [threads.submit(text_of, client, **SAMPLED) for _ in range(3)]
        seeds = [threads.submit(text_of, client, **fields | {"seed": 7 + i}) for i in range(3)]
        assert [text.result() for text in seeds] == texts
        assert not {text.result() for text in others} & {*texts}


@two_servers
def test_a_seed_decides_nobody_elses_text(client):
    """Texts without a seed, each after or beside a seeded one, differ."""
    seeded = {"seed": 7, **SAMPLED}
    texts = []
    for _ in range(3):
        text_of(client, **seeded)
        texts.append(text_of(client, **SAMPLED))
        with ThreadPoolExecutor(2) as threads:
            threads.submit(text_of, client, **seeded)
            texts.append(threads.submit(text_of, client, **SAMPLED).result())
    texts += [choice.text for choice in complete(client, n=3, **SAMPLED).choices]
    assert len({*texts}) == len(texts)


@two_servers
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
        tops, best = score.top_logprobs, mx.sort(row)[-20:][::-1].tolist()
        assert math.isclose(score.logprob, row[id].item(), abs_tol=1e-3)
        assert all(
            math.isclose(t.logprob, b, abs_tol=1e-3) for t, b in zip(tops, best, strict=True)
        )


@two_servers
def test_a_prompt_is_scored(client, mlx):
    """As lm-eval asks and reads: prompts of tokens, one token more."""
    prompts = [mlx.tokenizer.encode(prompt) for prompt in PROMPTS]
    for most in (0, 1):
        answer = complete(client, prompts, echo=True, logprobs=1, max_tokens=most, temperature=0)
        parsed(Completion, answer.model_dump(exclude_unset=True) | {"choices": []})
        for ids, prompt, choice in zip(prompts, PROMPTS, answer.choices, strict=True):
            got, rows = choice.logprobs, mlx.scores(ids)
            wanted = [row[id].item() for row, id in zip(rows, ids[1:])]
            assert len(got.tokens) == len(got.text_offset) == len(ids) + most
            assert got.token_logprobs[0] is None and choice.text.startswith(prompt)
            scored = got.token_logprobs[1 : len(ids)]
            assert all(
                math.isclose(a, b, abs_tol=1e-3) for a, b in zip(scored, wanted, strict=True)
            )
            greedy = [max(top.values()) == own for top, own in zip(got.top_logprobs[1:], scored)]
            assert greedy == [mx.argmax(r).item() == id for r, id in zip(rows, ids[1:])]


@one_server
def test_null_and_what_templates_do_not_take(served, texts):
    """Null is the default; content in parts is one text, and null none."""
    names = ("max_completion_tokens", "temperature", "top_p", "n", "logprobs", "stream", "stop")
    nulls = dict.fromkeys([*names, "model", "seed", "tools", "presence_penalty", "response_format"])
    parts = [{"type": "text", "text": text} for text in (PROMPTS[0][:9], PROMPTS[0][9:])]
    for content in (parts, PROMPTS[0]):
        body = nulls | {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
        status, answer = served.post("/chat/completions", body)
        assert status == 200 and answer["choices"][0]["message"]["content"] == texts[0], answer
    body["messages"].append({"role": "assistant", "content": None})
    assert served.post("/chat/completions", body)[0] == 200


@one_server
def test_errors_say_what_is_wrong(client):
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, temperature=-1, stream=stream)
        assert "temperature" in refused.value.message and refused.value.param == "temperature"
        assert refused.value.type == "invalid_request_error"
    for fields in (
        {"tools": [TOOL]},
        {"model": "gpt-9"},
        {"response_format": {"type": "json_object"}},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, **fields)
        assert refused.value.param in fields


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": [1, "é"]}}</tool_call>'
SPOKEN = {  # what a model writes, and what a client of it gets
    "call": (f"I add.{CALL}", "I add.", 1, "tool_calls"),
    "calls": (CALL + CALL, None, 2, "tool_calls"),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', None, 1, "tool_calls"),
    "malformed": ("a<tool_call>{oops</tool_call>", "a<tool_call>{oops</tool_call>", 0, "stop"),
    "half": ("if a <", "if a <", 0, "stop"),
}


class Speaker:
    """An engine that writes one text, a letter at a time."""

    def __init__(self, text):
        self.text = text

    def begin(self, ask, tell):
        for letter in self.text:
            tell(Part(letter))
        tell(Part(finish="stop", usage=Usage(len(ask.tokens), 0, len(self.text))))
        return 1

    def cancel(self, number):
        pass

    check = stop = lambda self: None


@pytest.fixture(scope="module")
def caller():
    """What is served of a model that calls tools."""
    served = fake_served()
    hf = mlx_lm.utils.load_tokenizer(MODEL)._tokenizer
    served.tokenizer = TokenizerWrapper(
        hf,
        tool_parser=json_tools.parse_tool_call,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
    )
    return served


@pytest.mark.parametrize("spoken", SPOKEN.values(), ids=SPOKEN)
def test_tools(caller, spoken):
    """Calls that the client can parse; what is none is text."""
    text, content, calls, finish = spoken
    engine = Speaker(text)
    with listening(http.app(engine, caller, (Chat, Completions), ()), engine) as url:
        client = Here(url).client
        answers = [ask(client, tools=[TOOL]) for ask in (chat, streamed)]
        bare = chat(client).choices[0]
    for answer in answers:
        message = answer.choices[0].message
        assert (message.content or None, answer.choices[0].finish_reason) == (content, finish)
        made = message.tool_calls or []
        assert [call.function.name for call in made] == ["add"] * calls
        assert len({call.id for call in made}) == calls
        arguments = '{"a": [1, "é"]}' if "é" in text else "{}"
        assert all(call.function.arguments == arguments for call in made)
    assert (bare.message.content, bare.finish_reason) == (text, "stop")
