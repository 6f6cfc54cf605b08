"""A server in a process of its own, as a user starts it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import moelab

START_S = 120  # imports and a model, on a machine that does much else


class Served:
    """``python -m moelab serve MODEL`` at a free port, until the block ends.

    Args:
        model (str or Path): The model.
        log (Path): Gets what the server writes.
        options (str): More of the command line.

    Attributes:
        url (str): The address with ``/v1``.
    """

    def __init__(self, model: str | Path, log: Path, *options: str):
        self.log = log
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moelab", "serve", str(model), "--port", "0", *options],
                stdout=out,
                stderr=out,
                cwd=moelab.DATA.parent,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        end = time.monotonic() + START_S
        while not (found := re.search(r"http://\S+/v1", self.said())):
            assert self.process.poll() is None and time.monotonic() < end, self.said()
            time.sleep(0.05)
        self.url = found[0]

    def said(self) -> str:
        """What the server has written so far."""
        return self.log.read_text()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def interrupt(self, within_s: float = 30) -> int:
        """Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(within_s)

    def post(self, path: str, body: dict | bytes, **headers: str) -> tuple[int, dict]:
        """Status and answer of a request, which may be nonsense."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
