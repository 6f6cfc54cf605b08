"""The server's HTTP: routes, errors, and clients that are not polite."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from http import client
from typing import ClassVar
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from common import FAST
from fake_served import fake_served, wrapped
from in_process import MODEL, SERVERS, SLOTS, Here, listening, serving
from speaker import Speaker

from moelab import DATA
from moelab.commands.server import http, requests
from moelab.commands.server.ask import Part
from moelab.commands.server.completions import CHAT, COMPLETIONS
from moelab.commands.server.requests import CompletionRequest
from moelab.lab import limit


class Slow(CompletionRequest):
    """A request that may take long to check."""

    busy: ClassVar = 0
    slow_s: ClassVar = 0

    def read(self, served):
        Slow.busy += 1
        time.sleep(self.slow_s)
        Slow.busy -= 1
        return super().read(served)


SLOW = "{% if messages[0].content == 'slow' %}" + "{% for a in range(99999) %}" * 2
SLOW += "{% endfor %}" * 2 + "{% endif %}x"  # a template that does not end


@pytest.fixture
def fake(monkeypatch):
    """A client of a server with a fake ``engine``. Web pages of one origin may ask, too."""
    engine, served = Speaker(pause_s=0.01), fake_served()
    served.tokenizer = wrapped(SLOW)
    monkeypatch.setattr(http, "DIALECTS", [replace(COMPLETIONS, kind=Slow), CHAT])
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
    """A connection with a small buffer for bytes that the client has not taken yet."""
    where, connection = urlsplit(str(url)), socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    connection.connect((where.hostname, where.port))
    return connection


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


def test_what_all_requests_hold_together(fake, monkeypatch):
    """Requests that ended free their room. Large requests leave room for small requests."""
    held = http._held
    monkeypatch.setattr(http, "memory_now", lambda: (0, 2 * 260 * 300_000))

    def fill(part, most):
        """Send whole or partial requests that hold their places; return the first connection."""
        first, *others = (stack.enter_context(connected(fake.base_url)) for _ in range(most))
        for n, connection in enumerate((first, *others), 1):
            connection.sendall(part)
            wait_for(lambda n=n: [*held.values()] == [len(part.partition(b"\r\n\r\n")[2])] * n)
        return first

    def asked(size):
        return ask(fake, prompt="x" * size)

    with ExitStack() as stack:
        large = request_bytes(prompt="x" * 120_000)
        first = fill(large[:-1], 2)
        refused = asked(120_000)
        assert refused.status_code == 503 and "try again" in refused.text and len(held) == 2
        assert asked(10).status_code == 200
        first.sendall(large[-1:])
        assert b" 200 OK" in first.makefile("rb").readline()
        wait_for(lambda: len(held) == 1)
        assert asked(120_000).status_code == 200
    wait_for(lambda: not held)
    with ExitStack() as stack:
        fake.engine.pause_s = 30
        fill(request_bytes(prompt="x" * 16_000), 18)
        assert asked(16_000).status_code == 503
    wait_for(lambda: not held)
    fake.engine.pause_s = 0
    assert asked(16_000).status_code == 200


def test_a_template_that_does_not_end(fake, monkeypatch):
    """A request whose template does not end keeps neither its place nor a thread."""
    messages = [{"role": "user", "content": said} for said in ("slow", "x" * 20_000)]
    monkeypatch.setattr(http, "CHECK_S", 0.5)
    answer = fake.post("/chat/completions", json={"messages": messages})
    assert answer.status_code == 503 and "endless template" in answer.text
    monkeypatch.setattr(http, "CHECK_S", 60)
    assert fake.post("/chat/completions", json={"messages": messages[1:]}).status_code == 200
    wait_for(lambda: not (http._held or any("_check" in t.name for t in threading.enumerate())))


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


def test_clients_that_send_nothing(fake, monkeypatch):
    """The server drops clients that send nothing, part of a request, or a byte now and then."""
    monkeypatch.setattr(http, "SILENT_S", 0.3)
    post, large = request_bytes(), request_bytes(prompt="x" * 10**6)
    for sent in (b"", post[:8], post[:-1], post + post[:8], large[:-1]):
        with connected(fake.base_url) as connection:
            connection.sendall(sent)
            answer = connection.makefile("rb").read()
            assert (b"abcd" in answer) == (sent[: len(post)] == post), sent[:100]
    begin = time.monotonic()
    with connected(fake.base_url) as slow, pytest.raises(OSError):
        for i in range(len(post)):
            slow.sendall(post[i : i + 1])
            time.sleep(0.1)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("takes", [True, False])
def test_clients_that_take_nothing_or_little(fake, monkeypatch, takes):
    """A client that takes nothing is dropped; a client that takes little is not."""
    monkeypatch.setattr(http, "SILENT_S", 0.5)
    fake.engine.events, fake.engine.pause_s = Speaker("x" * (5000 if takes else 100_000)).events, 0
    with connected(fake.base_url) as connection:
        connection.sendall(request_bytes(prompt="x", stream=True))
        answer, begin, got = connection.makefile("rb"), time.monotonic(), b""
        while takes and b"[DONE]" not in got:
            got = got[-10:] + answer.read1(2**13)
            time.sleep(0.01)
        assert not takes or time.monotonic() > begin + 1
        wait_for(lambda: fake.engine.ended)


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
def process(folder, *options, limit_nbytes=None, ends=(signal.SIGINT,), nohup=False):
    """Run the command as a user does, with its log in the folder, and end it by signals."""
    command, log = (sys.executable, "-m", "moelab", "serve", str(MODEL)), folder / "log"
    with ExitStack() as stack:
        out = stack.enter_context(open(log, "w"))
        try:
            prepared = stack.enter_context(limit.limited(limit_nbytes))
        except limit.NoLimit as error:
            pytest.skip(str(error))
        command = [*prepared.prefix, *["nohup"] * nohup, *command, "--port", "0", *options]
        how = {"stderr": out, "cwd": DATA.parent, "preexec_fn": prepared.before_exec}
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


def test_the_text_of_a_client_that_hangs_up():
    """The text would take a minute. The next text, which waits for the first, comes soon."""
    with serving(*DRAFT) as server:
        with connected(server.url) as connection:
            connection.sendall(request_bytes(prompt=PROMPTS[0], max_tokens=20_000))
            time.sleep(1)
        begin = time.monotonic()
        assert completion(server)[0] == 200 and time.monotonic() < begin + 20


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


WRONG = (None, True, -1, 10**400, float("nan"), "", "\ud800", "a" * 5_000_000, [], [5], {"x": 1})
FIELDS = ("prompt", "max_tokens", "temperature", "seed", "stop", "stream", "logit_bias", "messages")


def attack(url, rng):
    """Send a hostile request, whole, damaged or in half; return the status, if one came."""
    asked = {"prompt": "def f(x):", "max_tokens": rng.randint(1, 8), "stream": rng.random() < 0.3}
    asked |= {rng.choice(FIELDS): rng.choice(WRONG)} if rng.random() < 0.5 else {}
    data, wait_s = bytearray(request_bytes(**asked)), rng.choice((60, 60, 0.1, 0.1, 1e-3))
    if wait_s == 0.1:
        data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randrange(2 * len(data))]
    with connected(url) as connection, nullcontext() if wait_s == 60 else suppress(OSError):
        connection.settimeout(wait_s)
        connection.sendall(data)
        answer = client.HTTPResponse(connection)
        answer.begin()
        said = answer.read()
        assert b'"error"' not in said or answer.status != 200 or b"memory is short" in said, data
        return answer.status


@pytest.mark.parametrize("draft", [True, False])
def test_a_hostile_crowd(draft, tmp_path):
    """Four clients are hostile. Two others get the text that a lone client gets, or a refusal. The
    server has a draft and a memory limit, or batches and no limit. MOELAB_CROWD_S=3600: an hour."""
    drafted = ("--context", "2048", "--draft", str(DATA / "models/tiny-dflash"))
    options, most = (drafted, 300_000_000) if draft else (SLOTS, None)
    options += ("--dtype", "float32")  # in half precision a GPU writes other texts in a batch
    statuses = set()

    def text(prompt):
        status, answer = completion(server, prompt, 8)
        assert status in (200, 503), answer
        return answer["choices"][0]["text"] if status == 200 else None

    def hostile(rng):
        while (late := time.monotonic() - end) < 0 or (late < 60 and not {200, 400} <= statuses):
            statuses.add(attack(server.url, rng))

    def polite(rng):
        while time.monotonic() < end:
            prompt = rng.choice(PROMPTS)
            assert text(prompt) in (texts[prompt], None)

    with process(tmp_path, *options, limit_nbytes=most) as server, ThreadPoolExecutor(6) as threads:
        texts = {prompt: text(prompt) for prompt in PROMPTS}
        end = time.monotonic() + float(os.environ.get("MOELAB_CROWD_S", 1 if FAST else 3))
        runs = [hostile] * 4 + [polite] * 2
        runs = [threads.submit(run, random.Random(seed)) for seed, run in enumerate(runs)]
        assert not any(run.result() for run in runs)
        if draft:  # the tokens of a text of 1 MB would take 250 MB
            assert completion(server, "a " * 500_000)[0] == 413
        assert {prompt: text(prompt) for prompt in PROMPTS} == texts
        assert {200, 400} <= statuses <= {None, 200, 400, 404, 405, 413, 503}


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


@pytest.mark.parametrize("options, times", [(DRAFT, 1), (SLOTS, 3)])
def test_ctrl_c(options, times, tmp_path):
    """Ctrl-C comes once or thrice, amid answers, endless templates, half requests and silence."""
    text = request_bytes(prompt=PROMPTS[1], max_tokens=20_000, stream=True)
    slow = request_bytes("/v1/chat/completions", messages=[{"role": "user", "content": "slow"}])
    answers = []
    with ExitStack() as stack:
        ends = [signal.SIGINT] * times
        with process(tmp_path, *options, "--chat-template", SLOW, ends=ends) as server:
            for sent in (b"", text[:40], *[text[:-1]] * 14, slow, text):
                connection = stack.enter_context(connected(server.url))
                connection.sendall(sent)
                answers.append(connection.makefile("rb"))
            while b"data" not in answers[-1].readline():
                pass  # the server has accepted all earlier clients by then
        told = [b"the server was stopped" in answer.read() for answer in answers]
    assert told == [False] * 2 + [True] * 16
