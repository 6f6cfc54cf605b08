"""Servers in the process of a test: none has to start."""

import threading
from contextlib import contextmanager

import openai
import pytest
from serving import Served

from moelab import DATA
from moelab.__main__ import main
from moelab.commands.server import http

MODEL = DATA / "models/tiny-moe"
SLOTS = ("--slots", "16")


@contextmanager
def listening(app, engine):
    """The address of a server in this process."""
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
    """The command's status and, if that is 0, the application and the engine that it made."""
    made = [None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http.Server, "answer", lambda self: made.append(self))
        code = main(["serve", str(model), "--port", "0", *options])
    return code, made[-1] and (made[-1].config.app, made[-1].engine)


class Here(Served):
    """The requests of a client to a server in this process."""

    def __init__(self, url):
        self.url = url
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@contextmanager
def serving(*options, **model):
    code, made = started(*options, **model)
    assert code == 0
    with listening(*made) as url:
        yield Here(url)
    made[1].stop()
