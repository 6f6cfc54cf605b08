"""Programs of several ranks on this machine, over MLX's ring.

start(commands, folder)   starts one process for each
finish(processes)         waits for their ends
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Rank:
    """How one rank ended."""

    code: int
    out: str
    err: str


def hosts(n: int) -> list[list[str]]:
    """Addresses for a ring of n ranks on this machine, with ports that are free now."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [[f"127.0.0.1:{s.getsockname()[1]}"] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def environments(n: int, folder: Path) -> list[dict[str, str]]:
    """What the environment of each rank of a ring says.

    Args:
        n (int): Ranks.
        folder (Path): For the hostfile.
    """
    file = folder / f"hosts-{n}.json"
    file.write_text(json.dumps(hosts(n)))
    ring = {"MLX_HOSTFILE": str(file)} if n > 1 else {}  # MLX takes no ring of one
    return [{**ring, "MLX_RANK": str(rank)} for rank in range(n)]


def start(commands: list[list[str]], folder: Path) -> list[subprocess.Popen]:
    """Start one process for each command, as the ranks of one ring.

    Args:
        commands (list[list[str]]): What follows ``python``, for each rank.
        folder (Path): For the hostfile.
    """
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words, variables in zip(commands, environments(len(commands), folder))
    ]


def finish(processes: list[subprocess.Popen], timeout_s: float = 240) -> list[Rank]:
    """Wait for ranks; none of them is left running."""
    try:
        outs = [p.communicate(timeout=timeout_s) for p in processes]
        return [Rank(p.returncode, *out) for p, out in zip(processes, outs)]
    finally:
        stop(processes)


def stop(processes: list[subprocess.Popen]) -> None:
    """End what still runs."""
    for p in processes:
        p.kill()
        p.wait()
