"""The server's HTTP: routes, errors, and clients that are not polite."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from in_process import MODEL, listening

from moelab.__main__ import main
from moelab.commands.server import http
from moelab.commands.server.ask import Part, Progress, Refused


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


LETTERS = [Progress(1, 1), *map(Part, "abc"), Part("d", finish="stop")]
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
        self.splitters = [SimpleNamespace(add=lambda part: part.text)] * n

    def begin(self):
        yield {"type": "begin"}

    def part(self, index, text):
        yield {index: text}

    def end(self, texts):
        yield {"whole": texts}
        yield "[DONE]"

    def whole(self, texts):
        return {"whole": texts}

    @staticmethod
    def error(words, param, status):
        return {"error": {"message": words, "param": param, "status": status}}


@contextmanager
def fakes(*origins):
    """A server of fakes: its address, a client and the engine."""
    engine, Dialect.busy, Dialect.most = Engine(), 0, 0
    app = http.app(engine, SimpleNamespace(name="m"), [Dialect], list(origins))
    with listening(app, engine) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield SimpleNamespace(url=url, client=client, engine=engine)


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
        ("POST", "/fake", b"{" * 20_000_000, 413, "at most 4194304 bytes, got 20000000"),
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
    monkeypatch.setattr(http, "SILENT_S", 1)
    monkeypatch.setitem(EVENTS, "long", [*ENDLESS[:12_800], Part("d" * 70_000, finish="stop")])
    with fakes() as fake, connected(fake.url) as idle:
        idle.sendall(request_bytes(say="endless", pause_s=0, stream=True))
        wait_for(lambda: fake.engine.ended)
    with fakes() as fake, connected(fake.url) as slow:
        slow.sendall(request_bytes(say="long", pause_s=0, stream=True))
        answer, begin, got = slow.makefile("rb"), time.monotonic(), b""
        while b"[DONE]" not in got:
            got = answer.read(2**16)
            time.sleep(0.01)
        assert time.monotonic() > begin + 2


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
