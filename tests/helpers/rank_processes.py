"""Commands as the ranks of one ring on this machine, for tests: started, waited for, stopped."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from moelab.lab.ranks import environments, hosts

__all__ = ["environments", "finish", "hosts", "start", "stop"]


@dataclass
class Rank:
    """How the process of one rank ended."""

    code: int
    out: str
    err: str


def start(commands: list[list[str]], folder: Path) -> list[subprocess.Popen]:
    """Start ``python`` with each list of words, as the ranks of one ring."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, *words], env={**os.environ, **variables}, **pipes)
        for words, variables in zip(commands, environments(len(commands), folder))
    ]


def finish(processes: list[subprocess.Popen], timeout_s: float = 240) -> list[Rank]:
    """Wait for ranks; in the end none is left running."""
    try:
        outs = [p.communicate(timeout=timeout_s) for p in processes]
        return [Rank(p.returncode, *out) for p, out in zip(processes, outs)]
    finally:
        stop(processes)


def stop(processes: list[subprocess.Popen]) -> None:
    """End the processes that still run."""
    for p in processes:
        p.kill()
        p.wait()
