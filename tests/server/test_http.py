"""The server's HTTP: routes, errors, and clients that are not polite."""

import json
import os
import random
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from http import client
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from in_process import MODEL, SLOTS, Served, listening, serving

from moelab import DATA
from moelab.__main__ import main
from moelab.commands.server import http
from moelab.commands.server.ask import Part, Refused
from moelab.commands.server.text import Delta
from moelab.lab import limit


class Engine:
    """Writes a letter each hundredth of a second, in a thread for each text."""

    def __init__(self):
        self.texts, self.ended, self._lock = {}, [], threading.Lock()

    def begin(self, ask, tell):
        with self._lock:
            number = len(self.texts)
            self.texts[number] = tell
        threading.Thread(target=self._write, args=(number, *ask), daemon=True).start()
        return number

    def _write(self, number, events, pause_s):
        for event in events:
            time.sleep(pause_s)
            if self.texts[number]:
                self.texts[number](event)

    def cancel(self, number):
        self.ended.append(number)
        self.texts[number] = None

    def check(self):
        pass

    def stop(self):
        for number, tell in self.texts.items():
            if tell:
                self.cancel(number)
                tell(RuntimeError("the server was stopped"))


LETTERS = [*map(Part, "abc"), Part("d", finish="stop")]
ENDLESS = [Part("x" * 1000)] * 100_000
EVENTS = {  # what is told after a request with such a word
    "short": LETTERS,
    "endless": ENDLESS,
    "memory": [MemoryError("memory is short")],
    "broken": [Part("a"), OSError(5, "cannot read", "model.safetensors")],
    "timed out": [TimeoutError("the disk")],
}


class Dialect:
    """A dialect whose answers are the text alone."""

    paths = ("/v1/fake",)
    busy = 0

    def __init__(self, body, served):
        if wrong := body.keys() - {"stream", "say", "pause_s", "texts", "slow", "x"}:
            raise Refused(f"{min(wrong)}: unknown", min(wrong))
        Dialect.busy += 1
        Dialect.most = max(Dialect.busy, Dialect.most)
        time.sleep(body.get("slow", 0))
        Dialect.busy -= 1
        n, self.stream = body.get("texts", 1), body.get("stream", False)
        self.asks = [(EVENTS[body.get("say", "short")], body.get("pause_s", 0.01))] * n
        self.splitters = [self] * n

    def add(self, part):
        return Delta(part.text, finish=part.finish)

    def begin(self):
        yield {"type": "begin"}

    def part(self, index, text):
        yield {index: text.text}

    def end(self, texts):
        yield self.whole(texts)
        yield "[DONE]"

    def whole(self, texts):
        return {"whole": [text.text for text in texts]}

    @staticmethod
    def error(words, param, status):
        return {"error": {"message": words, "param": param, "status": status}}


@contextmanager
def fakes(*origins):
    """A server of fakes: its address, a client and the engine."""
    engine, Dialect.busy, Dialect.most = Engine(), 0, 0
    app = http.app(engine, SimpleNamespace(name="m"), [Dialect], list(origins))
    with listening(app, engine) as url, httpx.Client(base_url=url, timeout=30) as asks:
        yield SimpleNamespace(url=url, client=asks, engine=engine)


@pytest.fixture
def fake():
    with fakes() as server:
        yield server


def request_bytes(path="/v1/fake", **body):
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def connected(url):
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=60)


def wait_for(what):
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


def test_an_answer_in_both_forms(fake):
    whole = ["abcd"] * 2
    assert fake.client.post("/fake", json={"texts": 2}).json() == {"whole": whole}
    begin, *parts, end, done = fake.client.post("/fake", json={"stream": True}).text.split("\n\n")[
        :-1
    ]
    assert begin == 'event: begin\ndata: {"type": "begin"}' and done == "data: [DONE]"
    parts = [json.loads(part.removeprefix("data: "))["0"] for part in parts]
    assert (parts, end) == ([*"abcd"], 'data: {"whole": ["abcd"]}')
    wait_for(lambda: len(fake.engine.ended) == 3)
    assert fake.client.get("/models").json()["data"] == [fake.client.get("/models/m").json()]
    assert fake.client.get("../health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "method, path, body, status, words",
    [
        ("GET", "/nothing", b"", 404, "GET /v1/nothing"),
        ("GET", "/models/other", b"", 404, "expected the model 'm', got 'other'"),
        ("POST", "/nothing", b"x" * 2_000_000, 404, "POST /v1/nothing"),
        ("GET", "/fake", b"", 405, "GET /v1/fake: Method Not Allowed"),
        ("POST", "/fake", b'{"z": 1}', 400, "z: unknown"),
        *(("POST", "/fake", b, 400, "body: ") for b in (b"", b"{", b"\xff", b"[1]", b"[" * 10**5)),
        ("POST", "/fake", b"{" * 20_000_000, 413, "at most 4194304 bytes, got more"),
        ("POST", "/fake", b'{"slow": "x"}', 500, "TypeError"),
        ("POST", "/fake", b'{"say": "memory"}', 503, "memory is short"),
        ("POST", "/fake", b'{"say": "memory", "stream": true}', 503, "memory is short"),
        ("POST", "/fake", b'{"say": "broken"}', 500, "model.safetensors"),
        ("POST", "/fake", b'{"say": "timed out", "stream": true}', 500, "the disk"),
    ],
)
def test_an_error(fake, caplog, method, path, body, status, words):
    answer = fake.client.request(method, path, content=body)
    error = answer.json()["error"]
    assert answer.status_code == error["status"] == status and words in error["message"]
    assert error["param"] == ("z" if "unknown" in words else None)
    assert words in caplog.text and "Traceback" not in caplog.text


def test_an_error_in_a_stream(fake):
    answer = fake.client.post("/fake", json={"say": "broken", "stream": True})
    *_, letter, error = answer.text.split("\n\n")[:-1]
    assert letter == 'data: {"0": "a"}' and "model.safetensors" in error


def test_what_is_no_http(fake):
    post = b"POST /v1/fake HTTP/1.1\r\nHost: x\r\n"
    lengths = (b"-5", b"x", b"9" * 5000)
    for said in (b"nonsense\r\n", *(post + b"Content-Length: %s\r\n" % n for n in lengths)):
        with connected(fake.url) as connection:
            connection.sendall(said + b"\r\n{}")
            assert b" 400 " in connection.recv(1000).split(b"\r\n")[0], said


def test_bodies_without_a_length_or_with_little_memory(fake, monkeypatch):
    post = lambda body: fake.client.post("/fake", content=iter(body)).status_code  # noqa: E731
    assert post([b'{"texts"', b": 1}"]) == 200 and post([b"x" * 2**20] * 5) == 413
    monkeypatch.setattr(http, "memory_now", lambda: (0, 2 * 260 * 20_000))
    assert fake.client.post("/fake", json={"x": "x" * 19_000}).status_code == 200
    assert "at most 20000 bytes" in fake.client.post("/fake", json={"x": "x" * 21_000}).text
    monkeypatch.setattr(http, "memory_now", lambda: (0, -1))
    assert fake.client.post("/fake", json={"x": "x" * 15_000}).status_code == 200


@pytest.mark.parametrize("size, alone", [(20_000, True), (10, False)])
def test_large_requests_are_read_one_after_another(fake, size, alone):
    with ThreadPoolExecutor(4) as threads:
        ask = lambda _: httpx.post(f"{fake.url}/fake", json={"slow": 0.1, "x": "x" * size})  # noqa: E731
        assert {answer.status_code for answer in threads.map(ask, range(4))} == {200}
    assert (Dialect.most == 1) == alone


@pytest.mark.parametrize("origin, status", [(None, 200), ("http://a.org", 200), ("null", 403)])
def test_web_pages_may_ask_if_allowed(origin, status):
    """Nothing is computed for others, and they may not read any answer. With urllib, which closes
    the connection: it would not get an answer that comes before it has sent all."""
    with fakes("http://a.org") as fake:
        body = json.dumps({"x": "x" * 2_000_000}).encode()
        asked = urllib.request.Request(
            f"{fake.url}/fake", body, {"Origin": origin} if origin else {}
        )
        try:
            answer = urllib.request.urlopen(asked, timeout=30)
        except urllib.error.HTTPError as error:
            answer = error
        assert answer.status == status and len(fake.engine.texts) == (status == 200)
        allowed = origin if origin and status == 200 else None
        assert answer.headers["Access-Control-Allow-Origin"] == allowed
        asked = {"Origin": origin or "x", "Access-Control-Request-Method": "POST"}
        assert fake.client.options("/fake", headers=asked).is_success == bool(allowed)


@pytest.mark.parametrize(
    "body",
    [{"slow": 1}, {"pause_s": 30}, {"pause_s": 30, "stream": True}, {"say": "endless"},
     {"say": "endless", "stream": True}],
)  # fmt: skip
def test_a_client_that_hangs_up(fake, caplog, body):
    """While its request is checked, its prompt is read or its answer comes."""
    caplog.set_level("INFO")
    with connected(fake.url) as connection:
        connection.sendall(request_bytes(**body))
        while body.get("say") and body.get("stream") and b'"0"' not in connection.recv(10_000):
            pass
        wait_for(lambda: fake.engine.texts or Dialect.busy)
    wait_for(lambda: "the client has gone" in caplog.text)
    wait_for(lambda: not Dialect.busy and len(fake.engine.ended) == len(fake.engine.texts))
    assert ("slow" in body) == (not fake.engine.texts)


def test_clients_that_send_nothing(monkeypatch):
    """Also half of a second request, or a byte now and then."""
    monkeypatch.setattr(http, "SILENT_S", 0.3)
    post = request_bytes(x="x")
    with fakes() as fake, ExitStack() as stack:
        large = request_bytes(x="x" * 10**6)
        for sent in (b"", post[:8], post[:-1], post + post[:8], large[:-1]):
            connection = stack.enter_context(connected(fake.url))
            connection.sendall(sent)
            answer = connection.makefile("rb").read()
            assert (b"abcd" in answer) == (sent[: len(post)] == post), sent[:100]
        slow, begin = stack.enter_context(connected(fake.url)), time.monotonic()
        with pytest.raises(OSError):
            for i in range(len(post)):
                slow.sendall(post[i : i + 1])
                time.sleep(0.1)
        assert time.monotonic() - begin < 5


def test_clients_that_take_nothing_or_little(monkeypatch):
    """The first is dropped, the second is not."""
    monkeypatch.setattr(http, "SILENT_S", 0.5)
    monkeypatch.setitem(EVENTS, "long", [*ENDLESS[:8000], Part("d" * 70_000, finish="stop")])
    with fakes() as fake, connected(fake.url) as idle:
        idle.sendall(request_bytes(say="endless", pause_s=0, stream=True))
        wait_for(lambda: fake.engine.ended)
    with fakes() as fake, connected(fake.url) as slow:
        slow.sendall(request_bytes(say="long", pause_s=0, stream=True))
        answer, begin, got = slow.makefile("rb"), time.monotonic(), b""
        while b"[DONE]" not in got:
            got = answer.read(2**16)
            time.sleep(0.01)
        assert time.monotonic() > begin + 1


def test_a_prompt_that_takes_long(monkeypatch, fake):
    monkeypatch.setattr(http, "KEEPALIVE_S", 0.05)
    answer = fake.client.post("/fake", json={"pause_s": 0.2, "stream": True}).text
    assert answer.startswith("event: begin") and ": keepalive\n\n" in answer
    assert answer.endswith("data: [DONE]\n\n")


def test_an_address(capsys):
    """That is taken or unknown, of IPv6, and one where 200 clients wait to be accepted."""
    with http.listen("127.0.0.1", 0) as taken, ExitStack() as stack:
        port = str(taken.getsockname()[1])
        for address in (["--port", port], ["--host", "no.such.host.invalid"]):
            assert main(["serve", str(MODEL), *address]) == 1
            assert " ".join(address) in capsys.readouterr().err
        for _ in range(200):
            stack.enter_context(socket.create_connection(taken.getsockname(), timeout=10))


def test_an_address_of_ipv6(monkeypatch, capsys):
    """The line that says where the server is found, and Ctrl-C before a request."""
    monkeypatch.setattr(http.Server, "run", lambda self, _: self.handle_exit(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with http.listen("::1", 0) as listens:
        port = listens.getsockname()[1]
        http.Server(None, Engine(), listens).answer()
    assert f"moelab: http://[::1]:{port}/v1 answers; Ctrl-C ends it" in capsys.readouterr().err
    signal.signal(signal.SIGINT, before)


# With a model

DRAFT = (*SLOTS, "--draft", str(DATA / "models/tiny-draft"))
PROMPTS = ["class Stack:", "for i in range(10):", "import numpy as np\n\ndef softmax(x):"]


def completion(server, prompt="def f(x):", max_tokens=16, **fields):
    return server.post("/completions", {"prompt": prompt, "max_tokens": max_tokens, **fields})


@pytest.mark.parametrize("stream", [True, False])
def test_the_text_of_a_client_that_hangs_up(stream):
    """It would take a minute, and the next, which must wait, is soon there."""
    with serving(*DRAFT) as server:
        asked = {"prompt": PROMPTS[0], "max_tokens": 20_000, "stream": stream}
        with connected(server.url) as connection:
            connection.sendall(request_bytes("/v1/completions", **asked))
            time.sleep(1)
        begin = time.monotonic()
        assert completion(server)[0] == 200 and time.monotonic() < begin + 20


def test_a_read_that_fails(tmp_path, random_tiny_moe):
    """Every request that needs it gets an error, in its stream too; the server goes on."""
    model = tmp_path / "m"
    shutil.copytree(random_tiny_moe, model)
    with serving("--slots", "8", model=model) as server:
        assert completion(server, max_tokens=2)[0] == 200
        weights = model / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        for _ in range(2):
            status, answer = completion(server)
            assert status == 500 and "model.safetensors" in answer["error"]["message"]
            with pytest.raises(openai.APIError, match="model.safetensors"):
                list(server.client.completions.create(model="m", prompt="def f(x):", stream=True))
        assert httpx.get(server.url.replace("/v1", "/health")).json() == {"status": "ok"}


WRONG = (None, True, -1, 10**400, float("nan"), "", "\ud800", "a" * 5_000_000, [], [5], {"x": 1})
FIELDS = ("prompt", "max_tokens", "temperature", "seed", "stop", "stream", "logit_bias", "messages")


def attack(url, rng):
    """Send a request of a hostile client, whole, damaged or in half; the status, if one came."""
    asked = {"prompt": "def f(x):", "max_tokens": rng.randint(1, 8), "stream": rng.random() < 0.3}
    asked |= {rng.choice(FIELDS): rng.choice(WRONG)} if rng.random() < 0.5 else {}
    data = bytearray(request_bytes("/v1/completions", **asked))
    kind = rng.choice(("whole", "whole", "damaged", "long", "half", "gone"))
    if kind == "damaged":
        data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "long":
        data = data.replace(b"Content-Length: ", b"Content-Length: 9999999", 1)
    elif kind == "half":
        del data[rng.randrange(len(data)) :]
    with connected(url) as connection, nullcontext() if kind == "whole" else suppress(OSError):
        connection.settimeout({"whole": 60, "gone": 1e-3}.get(kind, 0.1))
        connection.sendall(data)
        answer = client.HTTPResponse(connection)
        answer.begin()
        said = answer.read()
        assert b'"error"' not in said or answer.status != 200 or b"memory is short" in said, data
        return answer.status


@pytest.mark.parametrize("draft", [True, False])
def test_a_hostile_crowd(draft, tmp_path):
    """Four hostile clients, and two whose text must be that of a client alone, or refused. The
    server has a draft and a memory limit, or batches and no limit. MOELAB_CROWD_S=3600: an hour."""
    statuses, options, limit_nbytes = set(), SLOTS, None
    if draft:
        options = ("--context", "2048", "--draft", str(DATA / "models/tiny-dflash"))
        limit_nbytes = 300_000_000
    options = ("--max-tokens", "8", *options)
    try:
        server = Served(MODEL, tmp_path / "log", *options, limit_nbytes=limit_nbytes)
    except limit.NoLimit as e:
        pytest.skip(str(e))

    def hostile(seed):
        attacks = random.Random(seed)
        while time.monotonic() < end:
            statuses.add(attack(server.url, attacks))

    def polite(seed):
        asks = random.Random(seed)
        while time.monotonic() < end:
            prompt = asks.choice(PROMPTS)
            status, answer = completion(server, prompt)
            assert status == 503 or text_of(answer) == texts[prompt], answer

    def text_of(answer):
        return answer["choices"][0]["text"]

    with server, ThreadPoolExecutor(6) as threads:
        texts = {prompt: text_of(completion(server, prompt)[1]) for prompt in PROMPTS}
        end = time.monotonic() + float(os.environ.get("MOELAB_CROWD_S", 3))
        for done in [threads.submit(f, i) for i, f in enumerate([hostile] * 4 + [polite] * 2)]:
            done.result()
        assert server.post("/completions", b"{" * 100_000_000)[0] == 413
        if draft:  # the tokens of a text of 1 MB would take 250 MB
            assert completion(server, "a " * 500_000)[0] == 413
        assert {prompt: text_of(completion(server, prompt)[1]) for prompt in PROMPTS} == texts
        assert {200, 400} <= statuses <= {None, 200, 400, 404, 405, 413, 503}
        assert server.interrupt() == 0 and "Traceback" not in server.said()
        assert max(map(len, server.said().splitlines())) < 1200


SLOW = "{% if messages[0].content == 'slow' %}" + "{% for a in range(99999) %}" * 2
SLOW += "{% endfor %}" * 2 + "{% endif %}x"  # a template that does not end


@pytest.mark.parametrize(
    "options, busy, again_s", [(SLOTS, False, None), (DRAFT, True, None), (SLOTS, True, 0.05)]
)
def test_ctrl_c(options, busy, again_s, tmp_path):
    """With an answer, a template that does not end and requests of which only half has come."""
    text = request_bytes("/v1/completions", prompt=PROMPTS[1], max_tokens=20_000, stream=True)
    slow = request_bytes("/v1/chat/completions", messages=[{"role": "user", "content": "slow"}])
    with ExitStack() as stack:
        log = tmp_path / "log"
        server = stack.enter_context(Served(MODEL, log, *options, "--chat-template", SLOW))
        answers = []
        for sent in (slow, text, text[:40], *[text[:-1]] * 14) if busy else (b"",):
            connection = stack.enter_context(connected(server.url))
            connection.sendall(sent)
            answers.append(connection.makefile("rb"))
        while busy and b"data" not in answers[1].readline():
            pass
        if again_s:
            server.process.send_signal(signal.SIGINT)
            time.sleep(again_s)
        assert server.interrupt(within_s=20) == 0 and "Traceback" not in server.said()
        told = [b"the server was stopped" in answer.read() for answer in answers]
        assert told == ([True, True, False] + [True] * 14 if busy else [False])
