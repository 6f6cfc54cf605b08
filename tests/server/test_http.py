"""The server's HTTP: routes, errors, clients that hang up, and Ctrl-C."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import ClassVar
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fake_served import fake_served
from in_process import MODEL, SERVERS, SLOTS, Here, listening, serving
from speaker import Speaker

from moelab import DATA
from moelab.commands.server import http, requests
from moelab.commands.server.ask import Part
from moelab.commands.server.completions import COMPLETIONS
from moelab.commands.server.requests import CompletionRequest


class Slow(CompletionRequest):
    """A request that may take long to check."""

    busy: ClassVar = 0
    slow_s: ClassVar = 0

    def read(self, served):
        Slow.busy += 1
        time.sleep(self.slow_s)
        Slow.busy -= 1
        return super().read(served)


@pytest.fixture
def fake(monkeypatch):
    """A client of a server with a fake ``engine``. Web pages of one origin may ask, too."""
    engine, served = Speaker(pause_s=0.01), fake_served()
    monkeypatch.setattr(http, "DIALECTS", [replace(COMPLETIONS, kind=Slow)])
    with (
        listening(http.app(engine, served, ["http://a.org"]), engine) as url,
        httpx.Client(base_url=url, timeout=30) as fake,
    ):
        fake.engine = engine
        yield fake


def ask(fake, **fields):
    return fake.post("/completions", json={"prompt": "x"} | fields)


def request_bytes(path="/v1/completions", **body):
    data = json.dumps(body or {"prompt": "x"}).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def connected(url):
    where = urlsplit(str(url))
    return socket.create_connection((where.hostname, where.port), timeout=60)


def wait_for(what):
    end = time.monotonic() + 120
    while not (came := what()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)
    return came


def test_answers(fake):
    """Answers come whole and in a stream."""
    assert [c["text"] for c in ask(fake, n=2).json()["choices"]] == ["abcd"] * 2
    *parts, done, _ = ask(fake, stream=True).text.split("\n\n")
    parts = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert "".join(part["choices"][0]["text"] for part in parts) == "abcd"
    assert done == "data: [DONE]"
    wait_for(lambda: len(fake.engine.ended) == 3)
    assert fake.get("/models").json()["data"] == [fake.get("/models/tiny-moe").json()]
    assert fake.get("../health").json() == {"status": "ok"}
    assert fake.get("../models").json() == fake.get("/models").json()
    assert fake.post("../completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    "method, path, body, status, words",
    [
        ("GET", "/models/other", b"", 404, "GET /v1/models/other: Not Found"),
        ("POST", "/nothing", b"x" * 2_000_000, 404, "POST /v1/nothing"),
        ("GET", "/completions", b"", 405, "GET /v1/completions: Method Not Allowed"),
        ("POST", "/completions", b'{"prompt": "x", "z": 1, "stream": true}', 400, "z: "),
        ("POST", "/completions", b"{" * 20_000_000, 413, "at most 4194304 bytes"),
        *(
            ("POST", "/completions", body, 400, "body: ")
            for body in (b"", b"{", b"\xff", b"[1]", b"[" * 10**5, b'{"prompt": "\\ud8"}')
        ),
    ],
)
def test_a_wrong_request(fake, caplog, method, path, body, status, words):
    caplog.set_level("INFO")
    answer = fake.request(method, path, content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, "z" if words == "z: " else None)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"] and words in caplog.text and "Traceback" not in caplog.text


HALVES = [r"\ud800", r"\uDc00", r"a\\\ud83d", r"\ud83d\u0041", r"\ud800\ud83d\ude00", r"\\ud800"]


@pytest.mark.parametrize("half", HALVES)
def test_half_a_character(half):
    """Python's decoder can return a lone surrogate: half of a character. U+FFFD replaces it."""
    wanted = re.sub("[\ud800-\udfff]", "\ufffd", json.loads(f'"{half}"'))
    assert requests.parsed(f'{{"x": "{half}"}}'.encode()) == {"x": wanted}


@pytest.mark.parametrize("error", [MemoryError("memory is short"), TimeoutError("the disk")])
def test_an_error_of_the_engine(fake, caplog, error):
    """The error comes before anything is written, or after it."""
    status = 503 if isinstance(error, MemoryError) else 500
    for stream, written in ((False, ()), (True, ()), (False, "a"), (True, "a")):
        fake.engine.events = [*map(Part, written), error]
        answer = ask(fake, stream=stream)
        told = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert answer.status_code == (200 if stream else status)
        assert str(error) in told["error"]["message"] and str(error) in caplog.text
    assert "Traceback" not in caplog.text


def test_large_bodies(fake, monkeypatch):
    """Smaller bodies are refused, too, if memory is short."""
    for parts, status in (([b'{"prompt"', b': "x"}'], 200), ([b"x" * 2**20] * 5, 413)):
        assert fake.post("/completions", content=iter(parts)).status_code == status
    for free, most in ((2 * 260 * 20_000, 20_000), (-1, 2**14)):
        monkeypatch.setattr(http, "memory_now", lambda free=free: (0, free))
        assert ask(fake, prompt="x" * (most - 100)).status_code == 200
        assert ask(fake, prompt="x" * most).status_code == 413


ORIGINS = [(None, 200), ("http://a.org", 200), ("null", 403), ("\x1b[2Jred", 403)]


@pytest.mark.parametrize("origin, status", ORIGINS)
def test_web_pages_may_ask_if_allowed(fake, caplog, origin, status):
    """Other pages may not read any answer, and nothing is computed for them. With
    ``Connection: close`` an answer arrives, too."""
    caplog.set_level("INFO")
    headers = {"Connection": "close"} | ({"Origin": origin} if origin else {})
    answer = fake.post("/completions", json={"prompt": "x" * 10**6}, headers=headers)
    assert answer.status_code == status and len(fake.engine.tells) == (status == 200)
    allowed = origin if status == 200 else None
    assert answer.headers.get("Access-Control-Allow-Origin") == allowed
    assert ("--allowed-origins" in caplog.text) == (status == 403) and "\x1b" not in caplog.text
    headers = {"Origin": origin or "x", "Access-Control-Request-Method": "POST"}
    assert fake.options("/completions", headers=headers).is_success == bool(allowed)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("slow_s, pause_s", [(1, 0), (0, 30), (0, 0.01)])
def test_a_client_that_hangs_up(fake, caplog, monkeypatch, slow_s, pause_s, stream):
    """A client hangs up while its request is checked, its prompt is read or its answer comes."""
    caplog.set_level("INFO")
    monkeypatch.setattr(Slow, "slow_s", slow_s)
    fake.engine.events, fake.engine.pause_s = [Part("x")] * 100_000, pause_s
    with connected(fake.base_url) as connection:
        connection.sendall(request_bytes(prompt="x", stream=stream))
        while pause_s == 0.01 and stream and b"data: " not in connection.recv(10_000):
            pass
        wait_for(lambda: Slow.busy if slow_s else fake.engine.tells)
    wait_for(lambda: "the client has gone" in caplog.text)
    wait_for(lambda: not Slow.busy and len(fake.engine.ended) == len(fake.engine.tells))
    assert bool(slow_s) == (not fake.engine.tells)


def test_a_client_that_sends_half_a_request(fake, caplog):
    """Half of a head, or of a body: a client that hangs up leaves nothing behind."""
    caplog.set_level("INFO")
    for sent in (request_bytes()[:8], request_bytes()[:-1]):
        with connected(fake.base_url) as connection:
            connection.sendall(sent)
            assert ask(fake).status_code == 200
    wait_for(lambda: "the client has gone" in caplog.text)
    assert ask(fake).status_code == 200 and len(fake.engine.tells) == 3


def test_an_address(run):
    """A taken address is refused; 100 clients can wait at a free one, 200 on Linux."""
    with http.listen("127.0.0.1", 0) as taken, ExitStack() as stack:
        address = f"--port {taken.getsockname()[1]}"
        got = run("serve", MODEL, *address.split())
        assert got.code == 1 and address in got.err
        for _ in range(100 if sys.platform == "darwin" else 200):
            stack.enter_context(socket.create_connection(taken.getsockname(), timeout=10))


# With a model

DRAFT = SERVERS["tiny-draft"]
PROMPTS = ["class Stack:", "for i in range(10):", "import numpy as np\n\ndef softmax(x):"]


@contextmanager
def process(folder, *options, ends=(signal.SIGINT,), nohup=False):
    """Run the command as a user does, with its log in the folder, and end it by signals."""
    command, log = (sys.executable, "-m", "moelab", "serve", str(MODEL)), folder / "log"
    with ExitStack() as stack:
        out = stack.enter_context(open(log, "w"))
        command = [*["nohup"] * nohup, *command, "--port", "0", *options]
        how = {"stderr": out, "cwd": DATA.parent}
        process = stack.enter_context(subprocess.Popen(command, **how))
        stack.callback(process.kill)
        server = Here(wait_for(lambda: re.search(r"http://\S+/v1", log.read_text()))[0])
        server.send_signal = process.send_signal
        yield server
        for end in ends:
            process.send_signal(end)
            time.sleep(0.05)
        assert process.wait(30) == 0 and "Traceback" not in log.read_text()
        assert max(map(len, log.read_text().splitlines())) < 1200


def completion(server, prompt="def f(x):", max_tokens=16):
    return server.post("/completions", {"prompt": prompt, "max_tokens": max_tokens})


@pytest.mark.parametrize("options", [DRAFT, SLOTS], ids=["draft", "batch"])
def test_the_text_of_a_client_that_hangs_up(options):
    """The text would take a minute. Another text, which waits for it or is written in a batch with
    it, comes soon and is a lone client's text."""
    with serving(*options, "--dtype", "float32") as server, ThreadPoolExecutor(1) as threads:
        alone = completion(server, max_tokens=100)
        with connected(server.url) as connection:
            connection.sendall(request_bytes(prompt=PROMPTS[0], max_tokens=20_000))
            time.sleep(1)
            other = threads.submit(completion, server, max_tokens=100)
            time.sleep(0.1)
        assert alone[0] == 200 and other.result(20)[1]["choices"] == alone[1]["choices"]


def test_a_read_that_fails(tmp_path, random_tiny_moe):
    """Every request that needs the read gets an error, in its stream too; the server goes on."""
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


@pytest.mark.parametrize("end, nohup", [(signal.SIGHUP, False), (signal.SIGTERM, True)])
def test_a_hang_up(end, nohup, tmp_path):
    """The server saves its prompts and ends if its terminal closes, unless nohup keeps it alive."""
    kept = tmp_path / "kept"
    options = (*SLOTS, "--prompt-cache-dir", str(kept))
    with process(tmp_path, *options, ends=[end], nohup=nohup) as server:
        for _ in range(1 + nohup):
            assert completion(server, PROMPTS[2] * 9)[0] == 200 and not any(kept.iterdir())
            if nohup:
                server.send_signal(signal.SIGHUP)
                time.sleep(0.3)
    assert any(kept.iterdir())


ENDLESS = "{% if messages[0].content == 'endless' %}" + "{% for a in range(99999) %}" * 2
ENDLESS += "{% endfor %}" * 2 + "{% endif %}x"


@pytest.mark.parametrize("options, times", [(DRAFT, 1), (SLOTS, 3)])
def test_ctrl_c(options, times, tmp_path):
    """Ctrl-C comes once or thrice, amid answers, an endless check, half requests and silence."""
    text = request_bytes(prompt=PROMPTS[1], max_tokens=20_000, stream=True)
    messages = [{"role": "user", "content": "endless"}]
    endless = request_bytes("/v1/chat/completions", messages=messages)
    answers = []
    with ExitStack() as stack:
        ends = [signal.SIGINT] * times
        with process(tmp_path, *options, "--chat-template", ENDLESS, ends=ends) as server:
            for sent in (b"", text[:40], *[text[:-1]] * 14, endless, text):
                connection = stack.enter_context(connected(server.url))
                connection.sendall(sent)
                answers.append(connection.makefile("rb"))
            while b"data" not in answers[-1].readline():
                pass  # the server has accepted all earlier clients by then
        told = [b"the server was stopped" in answer.read() for answer in answers]
    assert told == [False] * 2 + [True] * 16
