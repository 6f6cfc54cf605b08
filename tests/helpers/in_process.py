"""Servers in the process of a test: none has to start."""

import threading
from contextlib import contextmanager
from functools import partial

import openai
import pytest
from serving import Served

from moelab import DATA
from moelab.__main__ import main
from moelab.commands import serve

MODEL = DATA / "models/tiny-moe"
SLOTS = ("--slots", "16")


@contextmanager
def listening(generator):
    """The address of a server in this process, whose answers come from ``generator``."""
    with serve.Server("127.0.0.1", 0) as server:
        server.RequestHandlerClass = partial(serve.Handler, generator)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield "http://127.0.0.1:{1}/v1".format(*server.server_address)
        finally:
            server.shutdown()
            thread.join()


def started(*options, model=MODEL):
    """The command's status and, if that is 0, what computes its answers."""
    made = [None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve.Server, "answer", lambda self, generator: made.append(generator))
        return main(["serve", str(model), "--port", "0", *options]), made[-1]


class Here(Served):
    """The requests of a client to a server in this process."""

    def __init__(self, url):
        self.url = url
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@contextmanager
def serving(*options, **model):
    code, generator = started(*options, **model)
    assert code == 0
    with listening(generator) as url:
        yield Here(url)
    generator.stop_and_join()
