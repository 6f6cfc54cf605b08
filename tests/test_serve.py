"""python -m moelab serve: mlx-lm's server on a streamed model, used as an agent would."""

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
from serving import Served

import moelab
from moelab import DATA
from moelab.__main__ import main
from moelab.commands import answers, serve
from moelab.commands.drafting import leave_room, open_draft
from moelab.lab import limit
from moelab.streaming.room import RESERVE_NBYTES

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
    "max_tokens": [0, 1.5, True, HUGE],
    "temperature": [-1, "hot", float("nan"), None, 10**39, HUGE],
    "top_k": [-1, 8192, HUGE],
    "num_draft_tokens": [-1, 2.5, 65],
    "repetition_penalty": [float("nan"), 1e39],
    "presence_penalty": [float("inf"), -HUGE],
    "logprobs": ["yes", 3],
    "xtc_threshold": ["x", 0.7],
    "model": [5, "no/such/folder", "", "x" * 100_000],
    "draft_model": [5, "no/such/folder", ["lookup"], str(MODEL)],
    "adapters": [5, "no/such/folder", "", str(DATA)],
    "seed": ["x", -1, 2**64],
    "logit_bias": [5, {"x": 1}, {"8192": 1}, {"3": float("nan")}, {"3": HUGE}],
    "stop": [5, [5], [""], {"a": 1}, "ab" * 500_000],
    "stream": ["yes", None],
    "stream_options": [5],
    "chat_template_kwargs": [5, {"tokenize": False}, {"return_dict": True},
                             {"chat_template": "{{ 'x' * 20000000000 }}"}],
    "messages": [5, [], ["hi"], [{}], [{"role": "user", "content": [5]}], {"role": "user"}, None,
                 [user([{}])], [user("\ud800")], [user([{"type": "input_audio"}])], [user("")],
                 image("file:///x"), image("http://127.0.0.1:1/x.png"), called("x"), called([{}]),
                 called([{"function": {"arguments": "{"}}])],
    "tools": [5, "", {}, [5]],
    "role_mapping": [5],
    "n": [2, "x"],
    "response_format": ["text", {"type": "json_object"}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
}  # fmt: skip
NAMED = {  # else the field
    "draft_model": "draft",
    "adapters": "adapter",
    "messages": "message|prompt: expected",
    "chat_template_kwargs": "chat_template_kwargs|tokenize",
}


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
        assert not re.search("instance|urlopen|NoneType", answer["error"]), answer
    assert complete(client, PROMPTS[0]) == texts[0]


@pytest.mark.parametrize("served", ["streamed"], indirect=True)
def test_what_is_no_request(served, client):
    """Bodies, and bytes that are no HTTP."""
    said, where = len(served.said()), urlsplit(served.url)
    for body in (b"", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b"{" * 3_000_000, b"{}"):
        for path in ("/completions", "/chat/completions"):
            assert served.post(path, body)[0] == 400, body[:40]
    assert served.post("/completions", b"{" * 100_000_000)[0] == 413
    body = b'{"prompt": "x", "stream": true, "logprobs": true}'
    assert served.post("/completions", body)[0] == 400
    for line in (
        b"nonsense\r\n",
        b"DELETE /v1/completions HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n",
        *(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %s\r\n" % length
          for length in (b"-5", b"x", b"1" + b"0" * 17, b"9" * 5000)),
    ):  # fmt: skip
        with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
            connection.sendall(line + b"\r\n{}")
            connection.shutdown(socket.SHUT_WR)
            assert re.search(rb"4\d\d|501", connection.recv(1000)), line
    assert len(served.said()) - said < 20_000
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
    """A model's own: another client is answered, and Ctrl-C ends the server."""
    often = "{% for a in range(99999) %}"
    template = "{% if messages[0].content == 'slow' %}" + often * 2 + "{% endfor %}{% endfor %}"
    template += "{% endif %}x"
    with Served(MODEL, tmp_path / "log", *SLOTS, "--chat-template", template) as server:
        where = urlsplit(server.url)
        with socket.create_connection((where.hostname, where.port)) as connection:
            path = "/v1/chat/completions"
            connection.sendall(request_bytes(path, messages=[user("slow")]))
            time.sleep(0.5)
            assert server.post("/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
            assert server.interrupt(within_s=20) == 0


def test_a_text_whose_tokens_do_not_fit_in_memory(tmp_path, texts):
    """The tokenizer takes 250 MB for a text of 1 MB. Other clients are answered."""
    try:
        server = Served(MODEL, tmp_path / "log", *SLOTS, limit_nbytes=300_000_000)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    with server, ThreadPoolExecutor(2) as threads:
        long = {"prompt": "a " * 500_000, "max_tokens": 1}
        asked = [threads.submit(server.post, "/completions", long) for _ in range(2)]
        for prompt, text in zip(PROMPTS[:3], texts):
            short = {"prompt": prompt, "max_tokens": TOKENS}
            assert server.post("/completions", short)[1]["choices"][0]["text"] == text
        for answer in asked:
            status, body = answer.result()
            assert status == 503 and "memory is short: reading the request" in body["error"]
        assert server.interrupt() == 0


def attack(url, rng):
    """Send one request of a hostile client, whole, damaged or in half; the status, if one came."""
    where, field = urlsplit(url), rng.choice(list(BAD))
    asked = {"prompt": "def f(x):", "max_tokens": rng.randint(1, 8), "stream": rng.random() < 0.3}
    asked |= {field: rng.choice(BAD[field])} if rng.random() < 0.5 else {}
    data, kind = (
        request_bytes("/v1/completions", **asked),
        rng.choice(["", "", "cut", "gone", "long"]),
    )
    if kind == "cut":
        data = data[: rng.randrange(len(data))]
    elif kind == "long":
        data = data.replace(b"Content-Length: ", b"Content-Length: 9999999", 1)
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(data)
        if kind == "gone":
            return None
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert b'data: {"error' not in answer or b"memory is short" in answer, (data, answer)
    return int(answer.split()[1]) if answer.startswith(b"HTTP") else None


@pytest.mark.parametrize("draft", [True, False])
def test_a_hostile_crowd(draft, tmp_path, texts):
    """Four hostile clients, and two whose text must be right or refused. The server has a draft and
    a memory limit that moves, or batches and no limit. MOELAB_CROWD_S=3600 makes it an hour.

    The limit stays 80 MB above the memory in use: a layer of the longest prompt takes up to 45 MB,
    and the server cannot look at the memory meanwhile."""
    seconds, low, high, spare = float(os.environ.get("MOELAB_CROWD_S", 10)), 190, 400, 80
    rng, statuses, asked = random.Random(0), Counter(), list(zip(PROMPTS, texts))
    with moelab.load(MODEL, moelab.StreamConfig(slots=16))[0] as model:
        tokenizer = mlx_lm.utils.load_tokenizer(MODEL)
        long = tokenizer.decode(tokenizer.encode(max(MODEL.glob("heldout/*.py")).read_text())[:928])
        asked += [(long, mlx_lm.generate(model, tokenizer, long, max_tokens=TOKENS))]
    options, limit_nbytes = SLOTS, None
    if draft:
        options = ("--context", "2048", "--draft", str(DATA / "models/tiny-dflash"))
        limit_nbytes = high * 10**6
    try:
        server = Served(MODEL, tmp_path / "log", *options, limit_nbytes=limit_nbytes)
    except limit.NoLimit:
        server = Served(MODEL, tmp_path / "log", *options)
    end = time.monotonic() + seconds

    def hostile(seed):
        attacks = random.Random(seed)
        while time.monotonic() < end:
            statuses[attack(server.url, attacks)] += 1

    def ask(prompt, text, *may_be):
        body = {"prompt": prompt, "max_tokens": TOKENS}
        status, answer = server.post("/completions", body)
        assert status in (200, *may_be), answer
        assert status != 200 or answer["choices"][0]["text"] == text

    def polite(seed):
        asks = random.Random(seed)
        while time.monotonic() < end:
            ask(*asks.choice(asked), 503)

    with server, ThreadPoolExecutor(6) as threads:
        work = [threads.submit(hostile, seed) for seed in range(4)]
        work += [threads.submit(polite, seed) for seed in range(2)]
        memory = psutil.Process(server.process.pid)
        while time.monotonic() < end and server.process.poll() is None:
            time.sleep(rng.uniform(0.5, min(12, seconds / 5)))
            memory.suspend()  # on a busy machine it would grow between the look and the new limit
            info = memory.memory_info()
            rss = (info.rss - getattr(info, "shared", 0)) // 10**6  # without files
            if server.limit.group:
                with suppress(OSError):  # the kernel could not free enough pages
                    server.limit.move(max(rng.randint(low, high), rss + spare) * 10**6)
            memory.resume()
        assert server.process.poll() is None, server.said()[-2000:]
        for done in work:
            done.result()
        if server.limit.group:
            server.limit.move(limit_nbytes)
        for prompt, text in asked:
            ask(prompt, text)
        assert {200, 400, 413} <= set(statuses)
        assert {status // 100 for status in set(statuses) - {None, 503}} == {2, 4}
        assert server.interrupt() == 0 and "Traceback" not in server.said()


@contextmanager
def listening(allowed=()):
    """The URL of a server in this process. It answers, and has no model."""
    generator = SimpleNamespace(
        cli_args=SimpleNamespace(allowed_origins=allowed),
        model_provider=SimpleNamespace(processor=None, name="m"),
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
        ([], None, 404, None),
        ([], "null", 403, None),
        (["http://a.org"], "http://a.org", 404, "http://a.org"),
        (["http://a.org"], "http://b.org", 403, None),
        (["*"], "http://b.org", 404, "*"),
    ],
)
def test_web_pages_may_ask_if_allowed(allowed, origin, status, shown):
    """Nothing is computed for others, and they may not read any answer."""
    headers = {"Origin": origin} if origin else {}
    with listening(allowed) as url:
        asked = urllib.request.Request(url, b"x" * 2_000_000, headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=30)
    error = refused.value
    assert (error.code, error.headers["Access-Control-Allow-Origin"]) == (status, shown)


def test_a_client_that_is_silent(monkeypatch):
    """It is left, whether it has sent nothing or half a request."""
    monkeypatch.setattr(serve.Handler, "timeout", 0.3)
    half = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"
    with listening() as url:
        where = urlsplit(url)
        for sent in (b"", half[:8], half):
            with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
                connection.sendall(sent)
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


@pytest.mark.parametrize(
    "options, words",
    [
        (["no/such/model"], "no/such/model: expected a model folder"),
        ([MODEL, "--draft", DATA / "models"], "config.json"),
        ([MODEL, "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        ([MODEL, "--slots", "3"], "slots"),
        ([MODEL, "--adapter-path", "no/such"], "no/such"),
        ([MODEL, "--kv-bits", "4", "--kv-group-size", "128"], "kv_group_size=128: mlx-lm cannot"),
        ([MODEL, "--pipeline"], "--pipeline: several machines divide the experts"),
        ([MODEL, "--prompt-cache-bytes", "much"], "--prompt-cache-bytes"),
        ([MODEL, "--chat-template-args", "[1]"], "--chat-template-args"),
        ([MODEL, "--use-default-chat-template", "--slots", "8"], None),  # it has one
    ],
)
def test_a_server_that_cannot_start(options, words, monkeypatch, capsys):
    monkeypatch.setattr(serve.Server, "serve_forever", lambda self: None)
    try:
        code = main(["serve", "--port", "0", *map(str, options)])
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err
    assert bool(code) == bool(words) and (words or "answers") in err and "Traceback" not in err


@pytest.fixture
def started(monkeypatch):
    """Starts the command, which ends before it answers: its status, arguments, kept prompts."""
    seen = []
    monkeypatch.setattr(serve.Server, "answer", lambda self, made: seen.append(made))

    def start(*options):
        code = main(["serve", str(MODEL), "--port", "0", *options])
        if code:
            return code, None, None
        kept = seen[-1].prompt_cache
        seen[-1].stop_and_join()
        return code, seen[-1].cli_args, (kept.max_size, kept.max_bytes, kept.free_nbytes)

    return start


def test_the_memory_of_a_draft_and_of_kept_prompts_is_planned(started, capsys):
    """The draft is there before the model's slots are chosen; kept prompts have a limit."""
    draft, size = str(DATA / "models/tiny-dflash"), ("--prompt-cache-size", "3")
    memory = ("--memory-nbytes", "205000000", "--decode-concurrency", "1")
    config = moelab.StreamConfig(memory_nbytes=205_000_000, lazy_logits=True)
    plan, drafted = (
        moelab.plan(MODEL, config),
        moelab.plan(MODEL, leave_room(config, open_draft(draft))),
    )
    assert drafted.slots < plan.slots == 64 and drafted.reserved_nbytes > 0 == plan.reserved_nbytes
    for planned, options in ((plan, ()), (drafted, ("--draft", draft))):
        code, _, kept = started(*memory, *size, *options)
        free = planned.reserved_nbytes + RESERVE_NBYTES
        assert (code, kept) == (0, (3, planned.all_caches_nbytes, free))
        assert f"slots={planned.slots} of 64" in capsys.readouterr().err
    assert started(*SLOTS)[2] == (10, sys.maxsize, 0)
    assert started(*memory, "--prompt-cache-bytes", "0")[2][1] == 0


def test_kept_prompts_make_way_where_memory_is_short(monkeypatch):
    """Old prompts are forgotten; a new one that still does not fit is not kept."""
    cache = KVCache()
    cache.update_and_fetch(*[mx.zeros((1, 1, 4, 8))] * 2)
    one = cache.nbytes
    most, prompts = 5 * one + 100, answers.Prompts(free_nbytes=100)
    monkeypatch.setattr(answers, "memory_now", lambda: (0, most - prompts.nbytes))
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
    prompts, tokens = answers.Prompts(), list(range(4))
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
def test_the_caches_of_texts_decoded_at_once_are_planned(options, texts, started, capsys):
    """No more than fit. Those of the command line must: else it says what they take."""
    code, args, _ = started(*options)
    err = capsys.readouterr().err
    if texts is None:
        assert code == 1 and "reserved" in err and "expected at least" in err
        return
    assert code == 0 and args.decode_concurrency in texts
    assert ("decoded at once" in err) == (args.decode_concurrency not in (3, 32))
    if args.decode_concurrency < 32:
        assert args.prompt_concurrency <= args.decode_concurrency


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(MODEL), "--port", port]) == 1
    assert f"--port {port}" in capsys.readouterr().err


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
