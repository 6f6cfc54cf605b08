"""Commands as the ranks of one ring on this machine, for tests: started, waited for."""

import os
import sys
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

from moelab.lab.ranks import environments


def start(commands: list[list[str]], folder: Path) -> list[Popen]:
    """Start ``python`` with each list of words, as the ranks of one ring."""
    pipes = {"stdout": PIPE, "stderr": PIPE, "text": True}
    return [
        Popen([sys.executable, *words], env={**os.environ, **variables}, **pipes)
        for words, variables in zip(commands, environments(len(commands), folder))
    ]


def finish(processes: list[Popen], timeout_s: float = 240) -> list[CompletedProcess]:
    """Wait for ranks; conftest.py ends those that still run after the test."""
    outs = [p.communicate(timeout=timeout_s) for p in processes]
    return [CompletedProcess(p.args, p.returncode, *out) for p, out in zip(processes, outs)]
