"""Servers in a test's own process (no other has to start), and a client's requests."""

import json
import threading
from contextlib import contextmanager

import httpx
import openai
import pytest

from moelab import DATA
from moelab.__main__ import main
from moelab.commands.server import http

MODEL = DATA / "models/tiny-moe"
SLOTS = ("--slots", "16")
SERVERS = {  # options of ``serve``
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
USUAL = {"model": "default_model", "max_tokens": 16}
# Runs a test with two servers (fixture ``served``) in turn: one writes in batches, one has a draft.
two_servers = pytest.mark.parametrize("served", ["streamed", "tiny-draft"], indirect=True)


def user(content):
    return {"role": "user", "content": content}


def complete(client, prompt=PROMPTS[0], **fields):
    """What a server answers to a prompt."""
    return client.completions.create(prompt=prompt, **USUAL | fields)


def chat(client, *messages, **fields):
    """What a server answers to messages."""
    messages = messages or (user(PROMPTS[0]),)
    return client.chat.completions.create(messages=messages, **USUAL | fields)


class Here:
    """A server at ``url``, which ends with /v1, and OpenAI's client for it."""

    def __init__(self, url):
        self.url = url
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def post(self, path, body):
        """The status and the answer of a request. The request may be nonsense."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = httpx.post(self.url + path, content=data, timeout=600)
        return answer.status_code, answer.json()


@contextmanager
def listening(app, engine):
    """The address of a server of this application."""
    with http.listen("127.0.0.1", 0) as listens:
        url = "http://127.0.0.1:{1}/v1".format(*listens.getsockname())
        server = http.Server(app, engine, listens)
        thread = threading.Thread(target=server.run, args=([listens],))
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join()


def started(*options, model=MODEL):
    """The application and the engine that ``serve`` makes; no socket takes requests yet."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http.Server, "answer", lambda self: made.append(self))
        assert main(["serve", str(model), "--port", "0", *options]) == 0
    return made[0].config.app, made[0].engine


@contextmanager
def serving(*options, **model):
    """A server as the command ``serve`` starts it."""
    app, engine = started(*options, **model)
    try:
        with listening(app, engine) as url:
            yield Here(url)
    finally:  # the engine's thread would keep the tests from ending
        engine.stop()
