"""python -m moelab serve: mlx-lm's server on a streamed model, used as an agent would."""

import argparse
import copy
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import mlx.core as mx
import mlx_lm
import mlx_lm.server
import numpy as np
import openai
import psutil
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import _merge_caches
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import moelab
from moelab import DATA
from moelab.__main__ import main
from moelab.commands import serve
from moelab.commands.drafting import leave_room
from moelab.lab import limit
from moelab.lab.serving import Served
from moelab.streaming.room import LEFT_NBYTES, RESERVE_NBYTES, Room
from moelab.streaming.session import session_of

MODEL = DATA / "models/tiny-moe"
SLOTS = ("--slots", "16")
SERVERS = {  # how the model is served
    "resident": ("--mode", "resident"),
    "streamed": SLOTS,
    "lookup": (*SLOTS, "--draft", "lookup", "--num-draft-tokens", "4"),
    "tiny-draft": (*SLOTS, "--draft", str(DATA / "models/tiny-draft")),
    "tiny-dflash": (*SLOTS, "--draft-model", str(DATA / "models/tiny-dflash")),
}
PROMPTS = [
    'def read_json(path):\n    """Read a JSON file and return its content."""',
    "import numpy as np\n\ndef softmax(x, axis=-1):",
    "class Stack:",
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return",
    "for i in range(10):",
    "from pathlib import Path",
    "try:\n    import json",
    "if __name__ ==",
]
TOKENS = 16


@pytest.fixture(scope="module")
def texts():
    """What mlx-lm writes after each prompt, resident and with its own kernels."""
    model, tokenizer = mlx_lm.load(str(MODEL))
    model.set_dtype(mx.float32)
    return [mlx_lm.generate(model, tokenizer, p, max_tokens=TOKENS) for p in PROMPTS]


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    """The server of a parameter's name."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with Served(MODEL, log, *SERVERS[request.param]) as server:
        yield server
        assert "Traceback" not in server.said()


@pytest.fixture
def client(served):
    """The client that agents use. It does not try again, so that an error shows."""
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=60)


every_server = pytest.mark.parametrize("served", SERVERS, indirect=True)
two_servers = pytest.mark.parametrize("served", ["streamed", "tiny-draft"], indirect=True)
DEFAULT = {"model": "default_model", "max_tokens": TOKENS}


def complete(client, prompt, **fields):
    return client.completions.create(prompt=prompt, **DEFAULT | fields).choices[0].text


def user(text):
    return {"role": "user", "content": text}


def chat(client, *messages, **fields):
    return client.chat.completions.create(messages=list(messages), **DEFAULT | fields)


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


@every_server
def test_the_text_is_that_of_mlx_lm(client, texts):
    for prompt, text in zip(PROMPTS[:2], texts):
        assert complete(client, prompt) == text
        parts = client.completions.create(prompt=prompt, stream=True, **DEFAULT)
        assert "".join(part.choices[0].text for part in parts) == text

        answer = chat(client, user(prompt))
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == TOKENS
        stream = chat(client, user(prompt), stream=True, stream_options={"include_usage": True})
        *parts, last = stream
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text
        assert last.usage.completion_tokens == TOKENS


@every_server
def test_eight_at_once(client, texts):
    with ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            assert list(threads.map(lambda p: complete(client, p), PROMPTS)) == texts


@every_server
def test_a_shared_prefix_is_read_once(client):
    """The same prompt again, and the same instructions before another."""
    rules = {
        "role": "system",
        "content": '"""Notes about a queue of jobs, and how it is emptied.\n',
    }
    first, second = user("class Queue:\n    def push(self):"), user("def empty(jobs):\n")
    answer = chat(client, rules, first)
    text, length = answer.choices[0].message.content, answer.usage.prompt_tokens

    again = chat(client, rules, first)
    assert (cached(again), again.choices[0].message.content) == (length - 1, text)

    other, alone = chat(client, rules, second), chat(client, second)
    assert 8 <= cached(other) < length and cached(alone) == 0
    assert other.choices[0].message.content != alone.choices[0].message.content


@two_servers
@pytest.mark.parametrize("ask", ["completions", "chat"])
def test_prompts_that_begin_alike(served, client, ask):
    """The second shows where they part. The third is read from there, and its text is right."""
    begin = f"{ask} = 1  # What this file of settings says, and where each of them is read\n"
    begin += "def of(values, names, defaults):\n    return"
    with moelab.load(MODEL, moelab.StreamConfig(slots=16))[0] as model:
        tokenizer = mlx_lm.utils.load_tokenizer(MODEL)
        shared = len(tokenizer.encode(begin))
        for i, end in enumerate((" values + names", " sorted(names)", " {name: 1", " [name for")):
            prompt = begin + end
            if ask == "chat":
                answer = chat(client, user(prompt))
                text = answer.choices[0].message.content
            else:
                answer = client.completions.create(prompt=prompt, **DEFAULT)
                text = answer.choices[0].text
            assert text == mlx_lm.generate(model, tokenizer, prompt, max_tokens=TOKENS)
            assert shared > 24 and cached(answer) == (0 if i < 2 else shared)


@every_server
def test_a_prompt_that_is_cached_whole(client):
    """One token is read again; mlx-lm's server has none left to read then, and ends."""
    for text in ("import json\nimport re", "import json\nimport", "import json\nimport"):
        answer = client.completions.create(prompt=text, **DEFAULT)
    assert cached(answer) == answer.usage.prompt_tokens - 1 > 0


@two_servers
def test_what_is_cached_does_not_change_the_text(served, client, tmp_path):
    """Every answer of a conversation, on a server that has seen it before and on a new one."""
    messages, answers = [], []
    for text in ("def parse(line):", "def write(line):", "def main():"):
        messages.append(user(text))
        answers.append(chat(client, *messages).choices[0].message.content)
        assert chat(client, *messages).choices[0].message.content == answers[-1]
        messages.append({"role": "assistant", "content": answers[-1]})
    with moelab.load(MODEL, moelab.StreamConfig(slots=16))[0] as model:
        tokenizer = mlx_lm.utils.load_tokenizer(MODEL)
        for i, answer in enumerate(answers):
            prompt = tokenizer.apply_chat_template(
                messages[: 2 * i + 1], add_generation_prompt=True
            )
            assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=TOKENS) == answer


@every_server
def test_a_seed_writes_the_text(client):
    """With a penalty, which looks at the whole prompt, cached or not."""
    fields = {"temperature": 0.8, "seed": 7, "extra_body": {"top_k": 50}}
    first = complete(client, PROMPTS[0], **fields)
    assert complete(client, PROMPTS[0], **fields) == first
    model, tokenizer = mlx_lm.load(str(MODEL))
    model.set_dtype(mx.float32)
    mx.random.seed(7)
    sampler = make_sampler(0.8, top_p=1.0, top_k=50)
    wanted = mlx_lm.generate(model, tokenizer, PROMPTS[0], max_tokens=TOKENS, sampler=sampler)
    assert first == wanted

    penalty = {"extra_body": {"repetition_penalty": 1.5, "repetition_context_size": 200}}
    texts = [complete(client, PROMPTS[0], **penalty) for _ in range(2)]
    assert texts[0] == texts[1] != complete(client, PROMPTS[0])


# Clients that are not polite


def request_bytes(path, **body):
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@two_servers
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up(served, client, texts, stream):
    """Its answer, which would take a minute, ends; the next request is answered, and right."""
    where = urlsplit(served.url)
    said = len(served.said())
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(
            request_bytes("/v1/completions", prompt=PROMPTS[1], max_tokens=20_000, stream=stream)
        )
        if stream:
            while b"data" not in connection.recv(1000):
                pass
        else:
            time.sleep(1)
    begin = time.monotonic()
    assert complete(client, PROMPTS[0]) == texts[0]
    assert time.monotonic() - begin < 30
    while "has gone" not in served.said()[said:]:
        assert time.monotonic() - begin < 30, served.said()
        time.sleep(0.1)


def image(url):
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]


def called(tool_calls):
    return [{"role": "assistant", "content": "x", "tool_calls": tool_calls}]


HUGE = 10**400  # beyond float64
BAD = {  # fields of a request, and what the error names
    "prompt": [5, None, ["a"], [1, 2], "", "\ud800"],
    "max_tokens": [0, 1.5, "many", True, 2**31, HUGE],
    "temperature": [-1, "hot", float("nan"), None, 10**39, HUGE],
    "top_p": [1.1, "x"],
    "top_k": [-1, 8192, HUGE],
    "num_draft_tokens": [-1, 2.5, 65],
    "repetition_penalty": [-1, float("nan"), 1e39],
    "repetition_context_size": [-1, "x", 2**31],
    "presence_penalty": ["x", float("inf"), -HUGE],
    "logprobs": ["yes", 3],
    "top_logprobs": [12, "x"],
    "xtc_threshold": ["x", 0.7],
    "model": [5, "no/such/folder", "", str(DATA / "models/tiny-draft"), "x" * 100_000],
    "draft_model": [5, "no/such/folder", ["lookup"], str(MODEL)],
    "adapters": [5, "no/such/folder", "", str(DATA)],
    "seed": ["x", -1, 2**64],
    "logit_bias": [5, {"x": 1}, {"8192": 1}, {"3": float("nan")}, {"3": HUGE}, {"1.5": 1},
                   {str(i): 1 for i in range(100_000)}],
    "stop": [5, [5], [""], {"a": 1}, ["a"] * 65, "ab" * 500_000],
    "stream": ["yes", None],
    "stream_options": [5, {"include_usage": 1}],
    "chat_template_kwargs": [5, {"tokenize": False}, {"return_dict": True},
                             {"chat_template": "{{ 'x' * 20000000000 }}"}],
    "messages": [5, [], ["hi"], [{}], [{"role": "user", "content": [5]}], {"role": "user"}, None,
                 [user([{}])], [user("\ud800")], [user([{"type": "input_audio"}])], [user("")],
                 [user(None)], image("file:///x"), image({"url": [5]}),
                 image({"url": "http://127.0.0.1:1/x.png"}), called("x"), called([{}]),
                 called([{"function": {"arguments": "{"}}]), [user("")] * 4097],
    "tools": [5, "", {}, [5], [{}] * 1025],
    "role_mapping": [5, {"user": 5}],
    "n": [2, "x"],
    "response_format": ["text", {"type": "json_object"}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "modalities": [["text", "audio"]],
    "reasoning_effort": ["low"],
}  # fmt: skip
NAMED = {
    "draft_model": "draft",
    "adapters": "adapter",
    "messages": "message|prompt: expected",
}  # else the field


@two_servers
@pytest.mark.parametrize("field", BAD)
def test_a_bad_field(served, client, texts, field):
    chatting = field in list(BAD)[list(BAD).index("chat_template_kwargs") :]
    path = "/chat/completions" if chatting else "/completions"
    usual = {"messages": [user("x")]} if chatting else {"prompt": "x"}
    for value in BAD[field]:
        status, answer = served.post(path, usual | {"max_tokens": 4, field: value})
        assert status == 400, (value, status, answer)
        assert list(answer) == ["error"] and len(answer["error"]) < 400, answer
        assert re.search(NAMED.get(field, field), answer["error"]), (value, answer)
        assert not re.search("' object|instance|urlopen|NoneType", answer["error"]), answer
    assert complete(client, PROMPTS[0]) == texts[0]


@pytest.mark.parametrize("served", ["streamed"], indirect=True)
@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400), (b"{", 400), (b"\xff\xfe", 400), (b"[1]", 400), (b"5", 400), (b"null", 400),
        (b"[" * 100_000, 400), (b"{}", 400), (b'{"prompt": "x", "temperature": 1e999}', 400),
        (b'{"prompt": "x", "temperature": ' + b"9" * 400 + b"}", 400),
        (b'{"prompt": "x", "user": ' + b"[" * 65 + b"]" * 65 + b"}", 400),
        (b'{"prompt": "x", "user": [' + b"{}," * 200_000 + b"{}]}", 400),
        (b'{"prompt": "x", "stream": true, "logprobs": true}', 400),
        (b"{" * 3_000_000, 400), (b"{" * 100_000_000, 413),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_a_body_that_is_no_request(served, client, body, status):
    said = len(served.said())
    assert served.post("/completions", body)[0] == status
    assert served.post("/chat/completions", body)[0] == status
    assert len(served.said()) - said < 10_000
    assert complete(client, "x", max_tokens=2)


@pytest.mark.parametrize("served", ["streamed"], indirect=True)
def test_requests_that_are_not_http(served, client):
    where = urlsplit(served.url)
    for data in (
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: +2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 0_2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1" + b"0" * 17 + b"\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"DELETE /v1/completions HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
            connection.sendall(data)
            assert re.search(rb"4\d\d|501", connection.recv(1000))
    assert complete(client, "x", max_tokens=2)


@pytest.mark.parametrize("served", ["streamed"], indirect=True)
def test_fields_that_ask_for_what_is_done(client, texts):
    """Defaults of OpenAI's API, and fields that are of no consequence."""
    done = {"n": 1, "stop": None, "logit_bias": None, "user": "u", "seed": None}
    fields = {"best_of": 1, "echo": False, "suffix": None, "metadata": {"a": "b"}, "store": True}
    assert complete(client, PROMPTS[0], **done, extra_body=fields) == texts[0]
    fields = {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "none"}
    answer = chat(client, user(PROMPTS[0]), **done, **fields, reasoning_effort="medium")
    assert answer.choices[0].message.content == texts[0]


def test_a_template_that_does_not_end(tmp_path):
    """A model's own: another client is answered, Ctrl-C ends the server. Its text has a bound."""
    often = "{% for a in range(99999) %}"
    template = "{% if messages[0].content == 'slow' %}" + often * 2 + "{% endfor %}{% endfor %}"
    again = "{% for b in messages %}{{ b.content }}{% endfor %}"
    template += "{% endif %}{% for a in messages %}" + again + "{% endfor %}"
    with Served(MODEL, tmp_path / "log", *SLOTS, "--chat-template", template) as server:
        where, body = urlsplit(server.url), {"messages": [user("x" * 1000)] * 3000}
        status, answer = server.post("/chat/completions", body)
        assert status == 400 and "characters from the chat template" in answer["error"]
        with socket.create_connection((where.hostname, where.port)) as connection:
            path = "/v1/chat/completions"
            connection.sendall(request_bytes(path, messages=[user("slow")]))
            time.sleep(0.5)
            begin = time.monotonic()
            for _ in range(3):
                assert server.post("/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
            assert time.monotonic() - begin < 30
            assert server.interrupt(within_s=20) == 0


def attack(url, rng):
    """One request of a hostile client: sent whole, damaged or in half. The status, if one came."""
    where, timeout_s = urlsplit(url), 60
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    asked = {"prompt": "def f(x):", "messages": [user("x = 1")], "max_tokens": rng.randint(1, 8)}
    asked |= {"stream": rng.random() < 0.3, "temperature": rng.choice([0, 0, 0.7, 1e-300, 1e38])}
    if rng.random() < 0.5:
        field = rng.choice(list(BAD))
        asked[field] = rng.choice(BAD[field])
    data = bytearray(request_bytes(path, **asked))
    kind = rng.choice(["whole", "whole", "damaged", "half", "gone", "origin", "long"])
    if kind == "damaged":
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(data.index(b"\r\n") + 2, len(data))] = rng.choice(b'{}[]",:0\xff\0')
    elif kind == "half":
        data, timeout_s = data[: rng.randrange(len(data))], 0.2
    elif kind == "origin":
        data = data.replace(b"\r\n", b"\r\nOrigin: http://a.org\r\n", 1)
    elif kind == "long":
        data = data.replace(b"Content-Length: ", b"Content-Length: 9999999", 1)
    with socket.create_connection((where.hostname, where.port), timeout=timeout_s) as connection:
        connection.sendall(data)
        if kind == "gone":
            return None
        if kind == "damaged":  # perhaps it says that more comes
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(TimeoutError if kind == "half" else ()):
            while more := connection.recv(1 << 16):
                answer += more
    assert kind == "half" or answer or kind == "damaged", (kind, data)
    assert b'data: {"error' not in answer or b"memory is short" in answer, (data, answer)
    return int(answer.split()[1]) if answer else None


def test_a_text_whose_tokens_do_not_fit_in_memory(tmp_path, texts):
    """The tokenizer takes 250 MB for a text of 1 MB. Other clients are answered."""
    try:
        server = Served(MODEL, tmp_path / "log", *SLOTS, limit_nbytes=300_000_000)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    with server, ThreadPoolExecutor(4) as threads:
        long = {"prompt": "a " * 500_000, "max_tokens": 1}
        chat = {"messages": [user(long["prompt"])], "max_tokens": 1}
        asked = [threads.submit(server.post, "/completions", long) for _ in range(2)]
        asked += [threads.submit(server.post, "/chat/completions", chat) for _ in range(2)]
        for prompt, text in zip(PROMPTS[:3], texts):
            short = {"prompt": prompt, "max_tokens": TOKENS}
            assert server.post("/completions", short)[1]["choices"][0]["text"] == text
        for answer in asked:
            status, body = answer.result()
            assert status == 503 and "memory is short: reading the request" in body["error"]
        assert server.interrupt() == 0


def test_memory_for_requests_that_are_read(monkeypatch):
    """All of them together take what there is beside the call that runs. Small ones are read."""
    left = [100_000_000]
    monkeypatch.setattr("moelab.streaming.room.memory_now", lambda: (left[0], left[0]))
    room = Room(None, 1, None, False)
    with room.beside(50_000_000, "it"):
        with pytest.raises(MemoryError, match="up to 40 MB, and there are 30 MB. Send a shorter"):
            room.beside(40_000_000, "it").__enter__()
        with room.beside(20_000_000, "it"):
            pass
    with room.beside(70_000_000, "it"):
        left[0] = 0
        with room.beside(1000, "it"):
            pass
    left[0] = 10**9
    with moelab.load(MODEL, moelab.StreamConfig())[0] as model:
        room = session_of(model).room
        needs = session_of(model).plan.call_nbytes(64, is_first=True)
        with room.beside(100_000_000, "it"):
            assert room.make(64) == 64
        free = left[0] - needs - LEFT_NBYTES
        with pytest.raises(MemoryError, match="it takes up to"):
            room.beside(free + 1, "it").__enter__()
        with room.beside(free, "it"):
            pass
        room.begin(64)
        left[0] = 60_000_000  # 4 of these are for the logits of the 64 tokens that are computed
        with pytest.raises(MemoryError, match="it takes up to 39 MB, and there are 36 MB"):
            room.beside(39_000_000, "it").__enter__()
        left[0] = 10**9
        room.end()
        with room.beside(left[0] - LEFT_NBYTES, "it"):
            pass


class Crowd:
    """Hostile clients of a server, and clients that check the text that they get.

    Args:
        server (Served): The server.
        asked (list[tuple[dict, str]]): Requests for greedy text, each with the right text.
        end (float): When all clients stop, by ``time.monotonic``.
    """

    def __init__(self, server, asked, end):
        self.server, self.asked, self.end = server, asked, end
        self.statuses, self.good, self.refused, self.wrong = Counter(), 0, 0, []
        self.silence_s = 0.0  # the longest time that a client waited for the next part of its text

    def attack(self, seed):
        rng = random.Random(seed)
        while time.monotonic() < self.end:
            self.statuses[attack(self.server.url, rng)] += 1

    def ask(self, seed):
        rng = random.Random(seed)
        while time.monotonic() < self.end:
            fields, text = rng.choice(self.asked)
            self.ask_one(fields, text, hangs_up=rng.random() < 0.1)

    def ask_one(self, fields, text, hangs_up=False):
        path, got, last = "completions", "", time.monotonic()
        if "messages" in fields:
            path = f"chat/{path}"
        body = json.dumps({**DEFAULT, "temperature": 0, "stream": True, **fields}).encode()
        try:
            request = urllib.request.Request(f"{self.server.url}/{path}", body)
            with urllib.request.urlopen(request, timeout=60) as answer:
                for line in answer:
                    now = time.monotonic()
                    self.silence_s, last = max(self.silence_s, now - last), now
                    if b'"error"' in line[:20]:
                        assert b"memory is short" in line, line
                        self.refused += 1
                        return
                    if line.startswith(b"data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        got += choice.get("text") or choice.get("delta", {}).get("content") or ""
                        if hangs_up and got:
                            return
        except urllib.error.HTTPError as error:
            assert error.code == 503, error.read()
            self.refused += 1
            return
        self.good += 1
        if got != text:
            self.wrong.append((fields, got, text))


@pytest.mark.parametrize("draft", [True, False])
def test_a_hostile_crowd(draft, tmp_path):
    """Four hostile clients, and two that compare their text with a fresh model's. The server has a
    draft and a memory limit that moves, or batches and no limit. Each request is answered or
    refused. MOELAB_CROWD_S=3600 makes it an hour.

    The limit stays 80 MB above the memory in use: a layer of the longest prompt takes up to 45 MB
    and a request that is read up to 33, and the server cannot look at the memory meanwhile."""
    seconds, low, high, spare = float(os.environ.get("MOELAB_CROWD_S", 10)), 190, 400, 80
    rng, rss, moves = random.Random(0), [], 0
    with moelab.load(MODEL, moelab.StreamConfig(slots=16))[0] as model:
        tokenizer = mlx_lm.utils.load_tokenizer(MODEL)
        files = sorted(MODEL.glob("heldout/*.py"), key=lambda path: path.stat().st_size)
        ids = [tokenizer.encode(path.read_text()) for path in files[-6:]]
        prompts = [tokenizer.decode(i[:n]) for i in ids[:2] for n in (60, 300, 928)]
        asked = [({"prompt": prompt}, tokenizer.encode(prompt)) for prompt in prompts]
        for told in ([user("x = 1")], [user("def f"), {"role": "assistant", "content": "(x)"}]):
            told = [*told, user(tokenizer.decode(ids[4][:200]))]
            tokens = tokenizer.apply_chat_template(told, add_generation_prompt=True)
            asked.append(({"messages": told}, tokens))
        asked = [
            (fields, mlx_lm.generate(model, tokenizer, tokens, max_tokens=TOKENS))
            for fields, tokens in asked
        ]
    options, limit_nbytes = SLOTS, None
    if draft:
        options = ("--context", "2048", "--draft", str(DATA / "models/tiny-dflash"))
        limit_nbytes = high * 10**6
    try:
        server = Served(MODEL, tmp_path / "log", *options, limit_nbytes=limit_nbytes)
    except limit.NoLimit:
        server = Served(MODEL, tmp_path / "log", *options)
    with server, ThreadPoolExecutor(6) as threads:
        crowd = Crowd(server, asked, end := time.monotonic() + seconds)
        work = [threads.submit(crowd.attack, seed) for seed in range(4)]
        work += [threads.submit(crowd.ask, seed) for seed in range(2)]
        memory = psutil.Process(server.process.pid)
        while time.monotonic() < end and server.process.poll() is None:
            time.sleep(rng.uniform(0.5, min(12, seconds / 5)))
            memory.suspend()  # on a busy machine it would grow between the look and the new limit
            info = memory.memory_info()
            rss.append((info.rss - getattr(info, "shared", 0)) // 10**6)  # without files
            if server.limit.group:
                with suppress(OSError):  # the kernel could not free enough pages
                    server.limit.move(max(rng.randint(low, high), rss[-1] + spare) * 10**6)
                    moves += 1
            memory.resume()
        lived_s = time.monotonic() - end + seconds
        said, status = server.said(), server.process.poll()
        figures = f"{lived_s:.0f} s, {crowd.good} good, {len(crowd.wrong)} wrong, "
        figures += f"{crowd.refused} refused, {crowd.statuses}, silence {crowd.silence_s:.2f} s, "
        figures += f"{moves} moves, {said.count('memory is short by')} warnings, rss "
        eighths = [rss[len(rss) * i // 8 : len(rss) * (i + 1) // 8] for i in range(8)]
        figures += f"{[max(part, default=0) for part in eighths]} MB"
        print(figures)
        assert status is None, (figures, said[-2000:])
        for done in work:
            done.result()
        if server.limit.group:
            server.limit.move(limit_nbytes)
        good = crowd.good
        for fields, text in asked:
            crowd.ask_one(fields, text)
        assert crowd.good == good + len(asked) and not crowd.wrong, (figures, crowd.wrong[:1])
        assert {200, 400, 403, 413} <= set(crowd.statuses)
        assert {status // 100 for status in set(crowd.statuses) - {None, 503}} == {2, 4}
        assert server.interrupt() == 0 and "Traceback" not in server.said()


@contextmanager
def listening(allowed=()):
    """The URL of a server in this process. It answers, and has no model."""
    provider = SimpleNamespace(processor=None, name="m")
    generator = SimpleNamespace(
        cli_args=SimpleNamespace(allowed_origins=allowed),
        model_provider=provider,
        room=Room(None, 1, None, False),
    )
    with serve.Server("127.0.0.1", 0) as server:
        server.RequestHandlerClass = partial(serve.Handler, generator)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield "http://127.0.0.1:{1}/v1/models".format(*server.server_address)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "allowed, origin, status, shown",
    [
        ([], None, 200, None),
        ([], "http://127.0.0.1:8888", 403, None),
        ([], "null", 403, None),
        (["http://a.org"], "http://a.org", 200, "http://a.org"),
        (["http://a.org"], "http://b.org", 403, None),
        (["http://a.org"], None, 200, None),
        (["*"], "http://b.org", 200, "*"),
    ],
)
def test_web_pages_may_ask_if_allowed(allowed, origin, status, shown):
    """Not even a request whose answer the page could not read is answered."""
    with listening(allowed) as url:
        for method, path in (("GET", ""), ("OPTIONS", ""), ("POST", "/x")):
            headers = {"Origin": origin} if origin else {}
            body = b"x" * 2_000_000 if method == "POST" else None
            asked = urllib.request.Request(url + path, body, headers, method=method)
            try:
                with urllib.request.urlopen(asked, timeout=30) as answer:
                    got = answer.status, answer.headers["Access-Control-Allow-Origin"]
            except urllib.error.HTTPError as error:
                got = error.code, error.headers["Access-Control-Allow-Origin"]
            known = {"GET": 200, "OPTIONS": 204, "POST": 404}[method]
            assert got == (known if status == 200 else status, shown)


def test_a_client_that_is_silent(monkeypatch):
    """It is left, whether it has sent nothing or half a request."""
    monkeypatch.setattr(serve.Handler, "timeout", 0.3)
    with listening() as url:
        where = urlsplit(url)
        for half in (
            b"",
            b"POST /v1",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
        ):
            with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
                connection.sendall(half)
                assert connection.recv(1000) == b""


def test_many_clients_at_once():
    """While nobody accepts them they wait, and none is turned away."""
    with serve.Server("127.0.0.1", 0) as server, ExitStack() as connections:
        for _ in range(200):
            connection = socket.create_connection(server.server_address, timeout=10)
            connections.enter_context(connection)


@two_servers
def test_models_by_name(served, client, texts):
    """The served model has its folder's name, which is the list's and that of answers."""
    (model,) = client.models.list()
    assert model == client.models.retrieve("tiny-moe") and model.id == "tiny-moe"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-9")
    assert "tiny-moe" in refused.value.body
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, PROMPTS[0], model="gpt-9")
    assert "gpt-9" in refused.value.body
    for name in (model.id, str(MODEL), "default_model"):
        answer = client.completions.create(prompt=PROMPTS[0], **DEFAULT | {"model": name})
        assert (answer.choices[0].text, answer.model) == (texts[0], "tiny-moe")


def test_a_quantized_cache(tmp_path):
    """What ``mlx_lm.generate`` writes, with a draft; again with the prompt cached."""
    options = ("--kv-bits", "4", "--quantized-kv-start", "20", "--draft", "lookup")
    model, tokenizer = mlx_lm.load(str(MODEL))
    model.set_dtype(mx.float32)
    kwargs = {"max_tokens": 40, "kv_bits": 4, "quantized_kv_start": 20}
    wanted = mlx_lm.generate(model, tokenizer, PROMPTS[1], **kwargs)
    with Served(MODEL, tmp_path / "log", *SLOTS, *options) as server:
        body = {"prompt": PROMPTS[1], "max_tokens": 40}
        for _ in range(2):
            assert server.post("/completions", body)[1]["choices"][0]["text"] == wanted
        assert "Traceback" not in server.said()


# Files and command lines


def test_a_read_that_fails(tmp_path, random_tiny_moe):
    """Every request that needs it gets an error, in its stream too; the server goes on."""
    model = tmp_path / "m"
    shutil.copytree(random_tiny_moe, model)
    with Served(model, tmp_path / "log", "--slots", "8") as server:
        assert server.post("/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        weights = model / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        body = {"prompt": "def f(x):", "max_tokens": 50}
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
        for _ in range(2):
            status, answer = server.post("/completions", body)
            assert status == 500 and "model.safetensors" in answer["error"]
            with pytest.raises(openai.APIError):
                list(client.completions.create(model="default_model", stream=True, **body))
        health = server.url.replace("/v1", "/health")
        assert json.load(urllib.request.urlopen(health, timeout=60)) == {"status": "ok"}
        assert "Traceback" not in server.said()


def test_the_flags_are_those_of_mlx_lm(monkeypatch):
    """All that its server has, with its defaults, but where the two mean different things."""
    found = {}

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *_):
            raise StopIteration

        def add_argument(self, *names, **options):
            action = super().add_argument(*names, **options)
            found.update({name: action for name in names})
            return action

    monkeypatch.setattr(mlx_lm.server, "argparse", SimpleNamespace(ArgumentParser=Parser))
    with pytest.raises(StopIteration):
        mlx_lm.server.main()
    theirs, found = found, {}
    serve.add_arguments(Parser())
    assert set(theirs) - set(found) == {"--model"}  # MODEL here
    for name in set(theirs) & set(found) - {
        *("--num-draft-tokens", "--top-k", "--pipeline", "--allowed-origins")
    }:
        default = theirs[name].default
        default = json.loads(default) if name == "--chat-template-args" else default
        assert (found[name].dest, found[name].default) == (theirs[name].dest, default), name
    assert theirs["--top-k"].default == found["--sampling-top-k"].default


@pytest.mark.parametrize(
    "options, words",
    [
        (["no/such/model"], "no/such/model: expected a model folder"),
        ([MODEL, "--draft", "no/such"], "draft 'no/such'"),
        ([MODEL, "--draft", DATA / "models"], "config.json"),
        ([MODEL, "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        ([MODEL, "--slots", "3"], "slots"),
        ([MODEL, "--adapter-path", "no/such"], "no/such"),
        ([MODEL, "--kv-bits", "4", "--kv-group-size", "128"], "kv_group_size=128: mlx-lm cannot"),
        ([MODEL, "--use-default-chat-template", "--slots", "8"], None),  # it has one
    ],
)
def test_a_server_that_cannot_start(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve.Server, "serve_forever", lambda self: None)
    code = main(["serve", *map(str, options), "--port", "0"])
    err = capsys.readouterr().err
    assert code == (1 if words else 0) and (words or "answers") in err and "Traceback" not in err


def test_the_memory_of_a_draft_and_of_kept_prompts_is_planned(monkeypatch):
    """The draft is there before the model's slots are chosen; kept prompts have a limit."""
    made, opened = [], []
    prompts, open_draft, load = serve.Prompts, serve.open_draft, serve.load
    monkeypatch.setattr(serve, "Prompts", lambda *a: made.append(a[:3]) or prompts(*a))
    monkeypatch.setattr(serve, "open_draft", lambda *a: opened.append(a) or open_draft(*a))
    monkeypatch.setattr(serve, "load", lambda *a, **k: opened.append("model") or load(*a, **k))
    monkeypatch.setattr(serve.Server, "serve_forever", lambda self: None)
    argv = ["serve", str(MODEL), "--port", "0", "--prompt-cache-size", "3"]
    memory = ["--memory-nbytes", "205000000", "--decode-concurrency", "1"]
    draft = str(DATA / "models/tiny-dflash")
    assert main([*argv, *memory, "--draft", draft]) == 0
    assert opened == [(draft, "auto"), "model"]
    config = moelab.StreamConfig(memory_nbytes=205_000_000, lazy_logits=True)
    drafted = moelab.plan(MODEL, leave_room(config, open_draft(draft)))
    plan = moelab.plan(MODEL, config)
    assert drafted.slots < plan.slots == 64 and drafted.reserved_nbytes > 0 == plan.reserved_nbytes
    assert main([*argv, *SLOTS]) == main([*argv, *memory]) == 0
    assert main([*argv, *memory, "--prompt-cache-bytes", "0"]) == 0
    kept = [p.all_caches_nbytes for p in (drafted, plan)]
    free = [p.reserved_nbytes + RESERVE_NBYTES for p in (drafted, plan)]
    assert made == [
        (3, kept[0], free[0]),
        (3, sys.maxsize, 0),
        (3, kept[1], free[1]),
        (3, 0, free[1]),
    ]
    for p in (drafted, plan):
        left = p.all_caches_nbytes - p.caches_nbytes - p.reserved_nbytes
        assert left >= 0 and (p.slots == 64 or left < sum(p.expert_nbytes))


def test_kept_prompts_make_way_where_memory_is_short(monkeypatch):
    """Old prompts are forgotten before a new one is copied. If it still does not fit, it is not
    kept."""
    cache = KVCache()
    cache.update_and_fetch(*[mx.zeros((1, 1, 4, 8))] * 2)
    one, evaluate = cache.nbytes, mx.eval
    most = 5 * one + 100
    prompts = serve.Prompts(free_nbytes=100, memory=lambda: (0, most - prompts.nbytes))

    def copying(states):
        assert prompts.nbytes <= most - 100 - one
        evaluate(states)

    with monkeypatch.context() as patched:
        patched.setattr(mx, "eval", copying)
        for i in range(7):
            prompts.insert_cache("model", [i, 0], [copy.deepcopy(cache)])
            assert len(prompts) == min(i + 1, 5)
    assert prompts.fetch_nearest_cache("model", [1, 0])[0] is None
    assert prompts.make_way() and len(prompts) == 5
    most = 99 + 3 * one
    assert prompts.make_way() and len(prompts) == 2
    most = one + 99
    prompts.insert_cache("model", [9, 0], [cache])
    assert len(prompts) == prompts.nbytes == 0 and not prompts.make_way(one)


def test_a_kept_prompt_takes_its_own_memory_only():
    """And not that of the batch that its text was in, nor of what is computed to take it out."""
    model, _ = moelab.load(MODEL, moelab.StreamConfig(slots=16))
    prompts, tokens = serve.Prompts(), list(range(4))
    with model:
        caches = [make_prompt_cache(model) for _ in range(8)]
        batch = _merge_caches(caches)
        model(mx.array([tokens] * 8), cache=batch)
        mx.eval([c.state for c in batch])
        want = [c.extract(3) for c in batch]
        mx.eval(states := [c.state for c in want])
        states = [np.array(a) for _, a in tree_flatten(states)]
        before = mx.get_active_memory()
        prompts.insert_cache("model", tokens, [c.extract(3) for c in batch])
        taken = mx.get_active_memory() - before
        assert prompts.nbytes <= taken < 1.2 * prompts.nbytes
        kept, rest = prompts.fetch_nearest_cache("model", [*tokens, 5])
        got = [np.array(a) for _, a in tree_flatten([c.state for c in kept])]
        assert rest == [5] and len(got) == len(states)
        assert all((a == b).all() for a, b in zip(got, states))
        one = model(mx.array([[5]]), cache=kept)
        caches = make_prompt_cache(model)
        model(mx.array([tokens]), cache=caches)
        assert mx.allclose(one, model(mx.array([[5]]), cache=caches), atol=1e-4)


@pytest.mark.parametrize(
    "options, texts",
    [
        (["--memory-nbytes", "170000000"], range(1, 2)),
        (["--memory-nbytes", "400000000"], range(5, 12)),
        (["--memory-nbytes", "9000000000"], range(32, 33)),
        (["--memory-nbytes", "260000000", "--decode-concurrency", "3"], range(3, 4)),
        (["--memory-nbytes", "170000000", "--decode-concurrency", "20"], None),
        (["--memory-nbytes", "170000000", "--draft", "lookup"], range(1, 2)),
        ([*SLOTS], range(32, 33)),
    ],
)
def test_the_caches_of_texts_decoded_at_once_are_planned(options, texts, monkeypatch, capsys):
    """No more than fit. Those of the command line must: else it says what they take."""
    seen = []
    monkeypatch.setattr(serve.Server, "answer", lambda self, made: seen.append(made) or stop(made))

    def stop(generator):
        generator.stop_and_join()

    code = main(["serve", str(MODEL), "--port", "0", *options])
    err = capsys.readouterr().err
    if texts is None:
        assert code == 1 and "reserved" in err and "expected at least" in err
        return
    args = seen[0].cli_args
    assert code == 0 and args.decode_concurrency in texts
    assert ("decoded at once" in err) == (args.decode_concurrency not in (3, 32))
    if args.decode_concurrency < 32:
        assert args.prompt_concurrency <= args.decode_concurrency


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(MODEL), "--port", port]) == 1
    assert f"--port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [
        (["--pipeline"], "--pipeline: several machines divide the experts"),
        (["--top-k", "5"], "--sampling-top-k"),
        (["--port", "70000"], "--port"),
        (["--num-draft-tokens", "-1"], "--num-draft-tokens"),
        (["--prompt-cache-bytes", "much"], "--prompt-cache-bytes"),
        (["--chat-template-args", "[1]"], "--chat-template-args"),
        (["--draft", "lookup", "--draft-model", "D"], "is there twice"),
    ],
)
def test_a_wrong_command_line(options, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["serve", "M", *options])
    assert stop.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


# Ends


@pytest.mark.parametrize("how", ["streamed", "tiny-draft"])
@pytest.mark.parametrize("busy, again_s", [(False, None), (True, None), (True, 0.05)])
def test_ctrl_c(how, busy, again_s, tmp_path):
    """With requests of which only half has come, too."""
    with ExitStack() as stack:
        server = stack.enter_context(Served(MODEL, tmp_path / "log", *SERVERS[how]))
        where = urlsplit(server.url)
        half = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{"
        asked = {"prompt": PROMPTS[1], "max_tokens": 20_000, "stream": True}
        for i in range(16 if busy else 1):
            connection = socket.create_connection((where.hostname, where.port))
            stack.enter_context(connection).sendall(
                half if i else request_bytes("/v1/completions", **asked) if busy else b""
            )
            while busy and not i and b"data" not in connection.recv(1000):
                pass
        if again_s:
            server.process.send_signal(signal.SIGINT)
            time.sleep(again_s)
        assert server.interrupt(within_s=20) == 0
        assert "Traceback" not in server.said()
