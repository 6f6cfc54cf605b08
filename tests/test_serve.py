"""python -m moelab serve: mlx-lm's server on a streamed model, used as an agent would."""

import json
import os
import random
import re
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import mlx.core as mx
import mlx_lm
import openai
import pytest
from in_process import MODEL, SLOTS, Served, listening, serving
from mlx_lm.sample_utils import make_sampler

from moelab import DATA
from moelab.__main__ import main
from moelab.commands import serve
from moelab.lab import limit

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
DEFAULT = {"model": "default_model", "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def mlx():
    """Writes what mlx-lm does after a prompt, resident and with its own kernels."""
    model, tokenizer = mlx_lm.load(str(MODEL))
    model.set_dtype(mx.float32)
    write = partial(mlx_lm.generate, model, tokenizer, max_tokens=TOKENS)
    return SimpleNamespace(write=write, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def texts(mlx):
    return [mlx.write(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def asked(mlx, texts):
    """Prompts and their texts; one prompt has 300 tokens."""
    long = mlx.tokenizer.encode(max(MODEL.glob("heldout/*.py")).read_text())[:300]
    long = mlx.tokenizer.decode(long)
    return [*zip(PROMPTS, texts), (long, mlx.write(long))]


@pytest.fixture(scope="module")
def served(request):
    """The server of a parameter's name."""
    with serving(*SERVERS[request.param]) as server:
        yield server


@pytest.fixture
def client(served):
    return served.client


every_server = pytest.mark.parametrize("served", SERVERS, indirect=True)
two_servers = pytest.mark.parametrize("served", ["streamed", "tiny-draft"], indirect=True)
one_server = pytest.mark.parametrize("served", ["streamed"], indirect=True)


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
    """Of eight at once, and of one in every form."""
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda p: complete(client, p), PROMPTS)) == texts
    prompt, text = PROMPTS[0], texts[0]
    parts = client.completions.create(prompt=prompt, stream=True, **DEFAULT)
    assert "".join(part.choices[0].text for part in parts) == text
    answer = chat(client, user(prompt))
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == TOKENS
    *parts, last = chat(client, user(prompt), stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert last.usage.completion_tokens == TOKENS


@two_servers
def test_what_was_read_before_is_not_read_again(client, mlx):
    """The same prompt, a conversation that goes on, the same instructions before another text; and
    a prompt that begins a kept one, of which one token is read (mlx-lm's server ends there)."""
    rules = {"role": "system", "content": '"""Notes about a queue of jobs, and how it empties.\n'}
    messages, length = [rules], 0
    for text in ("class Queue:\n    def push(self):", "def write(line):"):
        messages.append(user(text))
        first, again = (chat(client, *messages) for _ in range(2))
        assert length <= cached(first) < cached(again) == again.usage.prompt_tokens - 1
        answers = {answer.choices[0].message.content for answer in (first, again)}
        prompt = mlx.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert answers == {mlx.write(prompt)}
        messages.append({"role": "assistant", "content": answers.pop()})
        length = len(prompt) - 1
    other = user("def empty(jobs):\n")
    assert 8 <= cached(chat(client, rules, other)) < length and not cached(chat(client, other))
    for text in ("import json\nimport re", "import json\nimport", "import json\nimport"):
        answer = client.completions.create(prompt=text, **DEFAULT)
    assert cached(answer) == answer.usage.prompt_tokens - 1 > 0


@two_servers
def test_prompts_that_begin_alike(client, mlx):
    """The second shows where they part. The third is read from there, and its text is right."""
    begin = "x = 1  # What this file of settings says, and where each of them is read\n"
    begin += "def of(values, names, defaults):\n    return"
    shared = len(mlx.tokenizer.encode(begin))
    assert shared > 24
    for i, end in enumerate((" values + names", " sorted(names)", " {name: 1")):
        answer = client.completions.create(prompt=begin + end, **DEFAULT)
        assert cached(answer) == (0 if i < 2 else shared)
    assert answer.choices[0].text == mlx.write(begin + end)


@two_servers
def test_a_seed_writes_the_text(client, mlx):
    """With a penalty, which looks at the whole prompt, cached or not."""
    fields = {"temperature": 0.8, "seed": 7, "extra_body": {"top_k": 50}}
    texts = {complete(client, PROMPTS[0], **fields) for _ in range(2)}
    mx.random.seed(7)
    assert texts == {mlx.write(PROMPTS[0], sampler=make_sampler(0.8, top_p=1.0, top_k=50))}
    penalty = {"extra_body": {"repetition_penalty": 1.5, "repetition_context_size": 200}}
    texts = [complete(client, PROMPTS[0], **penalty) for _ in range(2)]
    assert texts[0] == texts[1] != complete(client, PROMPTS[0])


def test_a_quantized_cache(mlx):
    """With a draft; again with the prompt cached."""
    options = ("--kv-bits", "4", "--quantized-kv-start", "20", "--draft", "lookup")
    wanted = mlx.write(PROMPTS[1], max_tokens=40, kv_bits=4, quantized_kv_start=20)
    with serving(*SLOTS, *options) as server:
        for _ in range(2):
            assert complete(server.client, PROMPTS[1], max_tokens=40) == wanted


@one_server
def test_fields_that_ask_for_what_is_done(client, texts):
    """The model by its names, defaults of OpenAI's API, fields that are of no consequence."""
    (model,) = client.models.list()
    assert model == client.models.retrieve("tiny-moe") and model.id == "tiny-moe"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-9")
    assert "tiny-moe" in refused.value.body
    for name in (model.id, str(MODEL), "default_model"):
        assert complete(client, PROMPTS[0], model=name) == texts[0]
    done = {"n": 1, "stop": None, "logit_bias": None, "user": "u", "seed": None}
    fields = {"best_of": 1, "echo": False, "suffix": None, "metadata": {"a": "b"}, "store": True}
    assert complete(client, PROMPTS[0], **done, extra_body=fields) == texts[0]
    fields = {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "none"}
    answer = chat(client, user(PROMPTS[0]), **done, **fields)
    assert (answer.choices[0].message.content, answer.model) == (texts[0], "tiny-moe")


# Clients that are not polite


def request_bytes(path, **body):
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def connected(url):
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=60)


@two_servers
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up(served, texts, stream, caplog):
    """Its answer, which would take a minute, ends; the next request is answered, and right."""
    caplog.set_level("INFO")
    asked = {"prompt": PROMPTS[1], "max_tokens": 20_000, "stream": stream}
    with connected(served.url) as connection:
        connection.sendall(request_bytes("/v1/completions", **asked))
        while stream and b"data" not in connection.recv(1000):
            pass
        time.sleep(0.5)
    begin = time.monotonic()
    assert complete(served.client, PROMPTS[0]) == texts[0]
    while "has gone" not in caplog.text:
        assert time.monotonic() - begin < 30, caplog.text
        time.sleep(0.1)


def image(url):
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]


def called(tool_calls):
    return [{"role": "assistant", "content": "x", "tool_calls": tool_calls}]


NAN, HUGE = float("nan"), 10**400  # beyond float64
NAMES = "draft|adapter|message|prompt: expected|tokenize"  # what else an error calls a field
BAD = {  # fields of a request, and values that are refused
    "prompt": [5, None, ["a"], [1, 2], "", "\ud800"],
    "max_tokens": [0, 1.5, True, HUGE],
    "temperature": [-1, "hot", NAN, None, 10**39, HUGE],
    "top_k": [-1, 8192],
    "num_draft_tokens": [-1, 2.5, 65],
    "presence_penalty": [NAN, 1e39, float("inf"), -HUGE],
    "logprobs": ["yes", 3],
    "xtc_threshold": ["x", 0.7],
    "model": [5, "no/such/folder", "", "x" * 100_000],
    "draft_model": [5, "no/such/folder", ["lookup"], str(MODEL)],
    "adapters": [5, "no/such/folder", "", str(DATA)],
    "seed": ["x", -1, 2**64],
    "logit_bias": [5, {"x": 1}, {"8192": 1}, {"3": NAN}, {"3": HUGE}],
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
    "n": [2, "x"],
    "response_format": ["text", {"type": "json_object"}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
}  # fmt: skip


@one_server
@pytest.mark.parametrize("field", BAD)
def test_a_bad_field(served, field):
    chatting = field in list(BAD)[list(BAD).index("chat_template_kwargs") :]
    path = "/chat/completions" if chatting else "/completions"
    usual = {"messages": [user("x")]} if chatting else {"prompt": "x"}
    for value in BAD[field]:
        status, answer = served.post(path, usual | {"max_tokens": 4, field: value})
        assert status == 400, (value, status, answer)
        assert list(answer) == ["error"] and len(answer["error"]) < 400, answer
        assert re.search(f"{field}|{NAMES}", answer["error"]), (value, answer)
        assert not re.search("instance|urlopen|NoneType", answer["error"]), answer


@one_server
def test_what_is_no_request(served):
    """Bodies, and bytes that are no HTTP."""
    for body in (b"", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b"{" * 3_000_000, b"{}"):
        for path in ("/completions", "/chat/completions"):
            assert served.post(path, body)[0] == 400, body[:40]
    assert served.post("/completions", b"{" * 100_000_000)[0] == 413
    body = b'{"prompt": "x", "stream": true, "logprobs": true}'
    assert served.post("/completions", body)[0] == 400
    post = b"POST /v1/completions HTTP/1.1\r\n"
    lengths = [b"-5", b"x", b"1" + b"0" * 17, b"9" * 5000]
    lines = [b"nonsense\r\n", post.replace(b"POST", b"DELETE")]
    lines += [post + b"Transfer-Encoding: chunked\r\n"]
    for line in [*lines, *(post + b"Content-Length: %s\r\n" % length for length in lengths)]:
        with connected(served.url) as connection:
            connection.sendall(line + b"\r\n{}")
            connection.shutdown(socket.SHUT_WR)
            assert re.search(rb"4\d\d|501", connection.recv(1000)), line
    assert complete(served.client, "x", max_tokens=2)


def attack(url, rng):
    """Send one request of a hostile client, whole, damaged or in half; the status, if one came."""
    field = rng.choice(list(BAD))
    asked = {"prompt": "def f(x):", "max_tokens": rng.randint(1, 8), "stream": rng.random() < 0.3}
    asked |= {field: rng.choice(BAD[field])} if rng.random() < 0.5 else {}
    data = request_bytes("/v1/completions", **asked)
    long = data.replace(b"Content-Length: ", b"Content-Length: 9999999", 1)
    with connected(url) as connection:
        connection.sendall(rng.choice((data, data, long, data[: rng.randrange(len(data))])))
        if rng.random() < 0.2:
            return None
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert b'data: {"error' not in answer or b"memory is short" in answer, (data, answer)
    return int(answer.split()[1]) if answer.startswith(b"HTTP") else None


@pytest.mark.parametrize("draft", [True, False])
def test_a_hostile_crowd(draft, tmp_path, asked):
    """Four hostile clients, and two whose text must be right or refused. The server has a draft and
    a memory limit, or batches and no limit. MOELAB_CROWD_S=3600 makes it an hour."""
    statuses, options, limit_nbytes = set(), SLOTS, None
    if draft:
        options = ("--context", "2048", "--draft", str(DATA / "models/tiny-dflash"))
        limit_nbytes = 300_000_000
    try:
        server = Served(MODEL, tmp_path / "log", *options, limit_nbytes=limit_nbytes)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    end = time.monotonic() + float(os.environ.get("MOELAB_CROWD_S", 3))

    def hostile(seed):
        attacks = random.Random(seed)
        while time.monotonic() < end:
            statuses.add(attack(server.url, attacks))

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
        for done in [threads.submit(f, i) for i, f in enumerate([hostile] * 4 + [polite] * 2)]:
            done.result()
        if draft:  # the tokens of a text of 1 MB would take 250 MB
            status, answer = server.post("/completions", {"prompt": "a " * 500_000})
            assert status == 503 and "memory is short: reading the request" in answer["error"]
        for prompt, text in asked:
            ask(prompt, text)
        assert {200, 400, 413} <= statuses
        assert {status // 100 for status in statuses - {None, 503}} == {2, 4}
        assert server.interrupt() == 0 and "Traceback" not in server.said()
        assert max(map(len, server.said().splitlines())) < 1200


def without_a_model(*allowed):
    """It answers every request with an error."""
    args, provider = SimpleNamespace(allowed_origins=allowed), SimpleNamespace(processor=None)
    return SimpleNamespace(cli_args=args, model_provider=provider)


@pytest.mark.parametrize("origin, status", [(None, 404), ("http://a.org", 404), ("null", 403)])
def test_web_pages_may_ask_if_allowed(origin, status):
    """Nothing is computed for others, and they may not read any answer."""
    headers = {"Origin": origin} if origin else {}
    with listening(without_a_model("http://a.org")) as url:
        asked = urllib.request.Request(f"{url}/models", b"x" * 2_000_000, headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=30)
    shown = refused.value.headers["Access-Control-Allow-Origin"]
    assert (refused.value.code, shown) == (status, origin if status == 404 else None)


def test_clients_that_are_silent(monkeypatch):
    """One that has sent nothing or half a request is left; 200 that nobody accepts may wait."""
    monkeypatch.setattr(serve.Handler, "timeout", 0.3)
    half = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"
    with listening(without_a_model()) as url:
        for sent in (b"", half[:8], half):
            with connected(url) as connection:
                connection.sendall(sent)
                assert connection.recv(1000) == b""
    with serve.Server("127.0.0.1", 0) as server, ExitStack() as connections:
        for _ in range(200):
            connection = socket.create_connection(server.server_address, timeout=10)
            connections.enter_context(connection)


def test_a_read_that_fails(tmp_path, random_tiny_moe):
    """Every request that needs it gets an error, in its stream too; the server goes on."""
    model = tmp_path / "m"
    shutil.copytree(random_tiny_moe, model)
    with serving("--slots", "8", model=model) as server:
        assert complete(server.client, "x", max_tokens=2)
        weights = model / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        body = {"prompt": "def f(x):", "max_tokens": 50}
        for _ in range(2):
            status, answer = server.post("/completions", body)
            assert status == 500 and "model.safetensors" in answer["error"]
            with pytest.raises(openai.APIError):
                list(server.client.completions.create(stream=True, **DEFAULT | body))
        health = server.url.replace("/v1", "/health")
        assert json.load(urllib.request.urlopen(health, timeout=60)) == {"status": "ok"}


def test_an_address_that_cannot_be_had(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for address in (["--port", port], ["--host", "no.such.host.invalid"]):
            assert main(["serve", str(MODEL), *address]) == 1
            assert " ".join(address) in capsys.readouterr().err


SLOW = "{% if messages[0].content == 'slow' %}" + "{% for a in range(99999) %}" * 2
SLOW += "{% endfor %}" * 2 + "{% endif %}x"  # a template that does not end


@pytest.mark.parametrize(
    "how, busy, again_s",
    [("streamed", False, None), ("tiny-draft", True, None), ("streamed", True, 0.05)],
)
def test_ctrl_c(how, busy, again_s, tmp_path):
    """With an answer, a template that does not end and requests of which only half has come."""
    half = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{"
    text = request_bytes("/v1/completions", prompt=PROMPTS[1], max_tokens=20_000, stream=True)
    slow = request_bytes("/v1/chat/completions", messages=[user("slow")])
    options = (*SERVERS[how], "--chat-template", SLOW)
    with ExitStack() as stack:
        server = stack.enter_context(Served(MODEL, tmp_path / "log", *options))
        for sent in (slow, text, *[half] * 14) if busy else (b"",):
            connection = stack.enter_context(connected(server.url))
            connection.sendall(sent)
            while sent == text and b"data" not in connection.recv(1000):
                pass
        if again_s:
            server.process.send_signal(signal.SIGINT)
            time.sleep(again_s)
        assert server.interrupt(within_s=20) == 0
        assert "Traceback" not in server.said()
