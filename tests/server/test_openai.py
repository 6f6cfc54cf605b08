"""OpenAI's client gets answers and streams, from prescribed parts and from a real model."""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
import speaker
from fake_served import TOKENIZER, parsed
from in_process import MODEL, PROMPTS, SERVERS, Here, chat, complete, serving, two_servers, user
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from moelab.commands.server.ask import Part, Token

SAID = speaker.SAID
USAGE = {"stream_options": {"include_usage": True}}
SAMPLED = {"temperature": 2, "max_tokens": 8}  # no two texts are alike by chance
TOOLS = [speaker.CHAT_TOOL]


def whole(client, *messages, **fields):
    """A chat's answer in one piece; it has all fields of its type."""
    answer = chat(client, *messages, **fields).model_dump(exclude_unset=True)
    return parsed(ChatCompletion, answer, ["reasoning"])


def streamed(client, *messages, **fields):
    """What the client makes of a streamed chat; each event has all fields of its type."""
    state = ChatCompletionStreamState()
    for event in chat(client, *messages, stream=True, **USAGE, **fields):
        event = event.model_dump(exclude_unset=True)
        state.handle_chunk(parsed(ChatCompletionChunk, event, ["reasoning"]))
        assert event["object"] == "chat.completion.chunk"
    assert not event["choices"]  # the last event has the usage
    return state.current_completion_snapshot


def content(choice):
    """All that a client sees of a choice, streamed or not, except log probabilities."""
    said = choice.message
    calls = [(c.function.name, c.function.arguments) for c in said.tool_calls or ()]
    return said.content or "", getattr(said, "reasoning", None) or "", calls, choice.finish_reason


@pytest.mark.parametrize("said, items", SAID.values(), ids=SAID)
def test_thoughts_and_calls(said, items, speak):
    """All but calls is text. Calls are text, too, without tools or outside a chat."""
    texts = [item for item in items if item != "call" and item[0] != "*"]
    thoughts = [item[1:] for item in items if item[0] == "*"]
    calls = [("f", '{"a": [1, "é"]}')] * items.count("call")
    finish = "length" if "length" in said else "tool_calls" if calls else "stop"
    client = Here(speak(*said)).client
    for ask in (whole, streamed):
        answer = ask(client, tools=TOOLS)
        (choice,) = answer.choices
        assert answer.usage.total_tokens == sum(speaker.USAGE[::2])
        assert content(choice) == ("".join(texts), "".join(thoughts), calls, finish)
        assert len({call.id for call in choice.message.tool_calls or ()}) == len(calls)
        assert choice.logprobs is None
    bare = content(chat(client).choices[0])[0]
    text = parsed(Completion, complete(client).model_dump(exclude_unset=True)).choices[0].text
    assert text == "".join(said[0]) and re.sub("<think>.*?(</think>|$)", "", text) == bare


@pytest.mark.parametrize("score", [-math.inf, math.nan])
def test_log_probabilities_that_json_does_not_have(score):
    engine = speaker.Speaker()
    engine.events[:1] = [Part("a", [Token(5, score, [(5, score)])])]
    with speaker.speaking(engine) as url:
        client = Here(url).client
        (row,) = chat(client, logprobs=True, top_logprobs=1).choices[0].logprobs.content
        row = [row.logprob, row.top_logprobs[0].logprob]
        assert row == complete(client, logprobs=1).choices[0].logprobs.token_logprobs * 2
    assert max(row) == -9999


@two_servers
def test_echo(client):
    """Each text and its tokens begin with the prompt, whole and in a stream."""
    text = "# ü€\ndef é(x"
    prompts, size = [text, TOKENIZER.encode(text)], len(TOKENIZER.encode(text))
    fields = {"echo": True, "n": 2, "logprobs": 1}
    whole = complete(client, prompts, **fields)
    parts = [*complete(client, prompts, stream=True, **fields, **USAGE)]
    assert {part.object for part in parts} == {"text_completion"}
    for usage in (whole.usage, parts[-1].usage):  # a prompt counts once for its texts
        assert (usage.prompt_tokens, usage.completion_tokens) == (2 * size, 4 * 16)
    for index, choice in enumerate(whole.choices):
        mine = [c for part in parts for c in part.choices if c.index == index]
        assert "".join(part.text for part in mine) == choice.text and choice.text.startswith(text)
        names, scores, tops, offsets = columns = [
            [x for part in mine for x in getattr(part.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        ]
        assert (choice.logprobs.tokens, choice.logprobs.text_offset) == (names, offsets)
        assert {*map(len, columns)} == {size + 16} and scores[0] is tops[0] is None
        for top, token, score, offset in [*zip(tops, names, scores, offsets)][1:]:
            assert top[token] == score <= max(top.values()) and len(top) <= 2
            assert "\\x" in token or choice.text[offset:].startswith(token)


@two_servers
def test_seeds(client):
    """The ``n`` texts have consecutive seeds, also beside other requests; unseeded texts differ."""
    fields = {"seed": 7, **SAMPLED}
    texts = [choice.text for choice in complete(client, **fields, n=3).choices]
    with ThreadPoolExecutor(6) as threads:
        others = [threads.submit(complete, client, **SAMPLED) for _ in range(3)]
        seeded = [threads.submit(complete, client, **fields | {"seed": 7 + i}) for i in range(3)]
        assert [text.result().choices[0].text for text in seeded] == texts
        texts += [text.result().choices[0].text for text in others]
    for _ in range(2):  # unseeded texts differ after the same seed, too
        complete(client, **fields)
        texts += [choice.text for choice in complete(client, n=2, **SAMPLED).choices]
    assert len({*texts}) == len(texts)


@two_servers
@pytest.mark.parametrize("of, fields", [(whole, {}), (streamed, {"temperature": 1.5, "seed": 1})])
def test_log_probabilities_of_what_was_chosen(client, mlx, of, fields):
    """The log probabilities are mlx-lm's, for the tokens of the text, which begins with a space."""
    fields |= {"logprobs": True, "top_logprobs": 20, "n": 2}
    answer = of(client, user(PROMPTS[3]), **fields).choices[1]
    scores, encode = answer.logprobs.content, mlx.tokenizer.encode
    text = b"".join(bytes(score.bytes) for score in scores).decode()
    assert answer.message.content == text and ("seed" in fields or text.startswith(" "))
    (*ids,) = (token for score in scores for token in encode(score.token))
    rows = mlx.scores((*encode(PROMPTS[3]), *ids))[-len(ids) :]
    for score, row, id in zip(scores, rows, ids, strict=True):
        best = mx.sort(row)[-20:][::-1].tolist()
        assert math.isclose(score.logprob, row[id].item(), abs_tol=1e-3)
        assert [top.logprob for top in score.top_logprobs] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("echo", [False, True])
@two_servers
def test_a_prompt_of_tokens_that_ends_in_half_a_character(client, echo):
    number = TOKENIZER.convert_tokens_to_ids
    fields = {"prompt": [*TOKENIZER.encode("caf"), number("Ã")], "logit_bias": {number("©"): 100}}
    text = complete(client, echo=echo, max_tokens=1, **fields).choices[0].text
    assert text == ("café" if echo else "é")


# lm-eval's requests (``local-completions``), and the log-likelihoods that it reads from answers

PAIRS = [  # a context and what may follow it
    ("def add(a, b):", "\n    return a + b\n"),
    ("def add(a, b):", "\n    return"),
    ("import numpy", " as np"),
    ("for i in range(10", "):\n"),
    ("# größer", " — 日本"),
    ("<|endoftext|>", "class Stack:\n    def __init__(self):"),  # as lm-eval scores whole texts
]


@pytest.mark.parametrize("name", ["streamed", "lookup"])
def test_log_likelihoods(name, mlx):
    """A continuation gets mlx-lm's log probability, and the answer says if it is the greedy one."""
    fixed = {"model": MODEL.name, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    texts, encode = ["".join(pair) for pair in PAIRS], mlx.tokenizer.encode
    ids = [*map(encode, texts)]
    with serving(*SERVERS[name]) as server:

        def ask(prompt, max_tokens=1):
            body = {"prompt": prompt, "max_tokens": max_tokens, **fixed}
            status, answer = server.post("/completions", body)
            assert status == 200, answer
            return answer["choices"]

        # Prompts come all at once as tokens, then one by one as tokens and as text, then all again.
        ways = [ask(ids), *zip(*((ask([t])[0], ask(text)[0]) for t, text in zip(ids, texts)))]
        ways.append(ask(ids))
    seen = set()
    for (context, _), text, tokens, *choices in zip(PAIRS, texts, ids, *ways, strict=True):
        size = len(encode(context))
        logprobs, follow = mlx.scores((*tokens,))[size - 1 :], mx.array(tokens[size:])
        total = mx.take_along_axis(logprobs, follow[:, None], axis=-1).sum().item()
        greedy = mx.all(logprobs.argmax(-1) == follow).item()
        seen.add(greedy)
        for choice in choices:
            scores = choice["logprobs"]
            assert len(scores["token_logprobs"]) == len(tokens) + 1
            assert choice["text"].startswith(text)
            # lm-eval's ``parse_logprobs`` finds the continuation's scores in this way.
            own = scores["token_logprobs"][size:-1]
            best = [max(top.values()) for top in scores["top_logprobs"][size:-1]]
            assert (sum(own), own == best) == (pytest.approx(total, abs=1e-3), greedy)
    assert seen == {True, False}
