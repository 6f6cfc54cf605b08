"""A server in a process of its own, as a user starts it, and the requests of a client."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from moelab import DATA
from moelab.lab import limit

START_S = 120  # seconds to import and load a model on a busy machine
ANSWER_S = 600  # seconds until an answer comes


class Served:
    """Runs ``python -m moelab serve MODEL`` at a free port until the block ends.

    ``log`` gets what the server writes::

        with Served(model, log, "--slots", "16") as server:
            server.post("/completions", {"prompt": "def f(x):"})
    """

    def __init__(
        self, model: str | Path, log: Path, *options: str, limit_nbytes: int | None = None
    ):
        self.log, self._stack = Path(log), ExitStack()
        prepared = self._stack.enter_context(limit.limited(limit_nbytes))

        def before_exec():
            # What a shell starts in the background ignores Ctrl-C, and so would the server.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if limit_nbytes is not None:
                prepared.before_exec()

        command = (sys.executable, "-m", "moelab", "serve")
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(
                [*prepared.prefix, *command, str(model), "--port", "0", *options],
                stdout=out,
                stderr=out,
                cwd=DATA.parent,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                preexec_fn=before_exec,
            )
        end = time.monotonic() + START_S
        while not (found := re.search(r"http://\S+/v1", self.said())):
            if self.process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise OSError(f"{model}: the server did not start: {self.said()}")
            time.sleep(0.05)
        self.url = found[0]  # the address with ``/v1``

    def said(self) -> str:
        """What the server has written so far."""
        return self.log.read_text()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        self._stack.close()

    def interrupt(self, within_s: float = 30) -> int:
        """Send Ctrl-C and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(within_s)

    def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
        """The status and answer of a request, which may be nonsense."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = httpx.post(self.url + path, content=data, timeout=ANSWER_S)
        return answer.status_code, answer.json()
