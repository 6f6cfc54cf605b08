"""Call a function in several ranks on this machine, over MLX's ring or over NCCL."""

import json
import os
import pkgutil
import random
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoint import temporary_folder
from ..streaming.ranks import joined
from . import limit

TIMEOUT_S = 300  # seconds that ranks may take


def hosts(n: int) -> list[list[str]]:
    """Find addresses for a ring of n ranks on this machine: consecutive ports, free now."""
    while True:  # ports below the system's ephemeral ports
        ports = range(first := random.randrange(10_000, 32_000), first + n)
        with ExitStack() as sockets, suppress(OSError):
            for port in ports:
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return [[f"127.0.0.1:{port}"] for port in ports]


def environments(n: int, folder: Path, backend: str = "ring") -> list[dict[str, str]]:
    """Make each rank's environment, as ``mlx.launch`` does; ``folder`` gets the hostfile."""
    addresses = hosts(n)
    if backend == "nccl":
        host, port = addresses[0][0].split(":")
        shared = {"NCCL_HOST_IP": host, "NCCL_PORT": port, "MLX_WORLD_SIZE": str(n)}
        own = [{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(n)]
    else:
        file = folder / f"hosts-{n}.json"
        file.write_text(json.dumps(addresses))
        shared, own = {"MLX_HOSTFILE": str(file)}, [{} for _ in range(n)]
    if n == 1:  # MLX takes no ring of one rank
        return own
    return [{**shared, "MLX_RANK": str(rank), **mine} for rank, mine in enumerate(own)]


def everywhere(
    n: int, function: Callable, *args: Any, backend: str = "ring", nbytes: int | None = None
) -> list[Any]:
    """Call a function in each of n ranks, in processes of their own, and return their results.

    The function takes the group (None if n is 1) and ``args``. ``args`` and results are passed as
    JSON. A rank on the ring is pinned to a CPU core if the system can; a rank of NCCL has a GPU.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    named = json.dumps((f"{function.__module__}:{function.__name__}", backend, *args))
    call = [sys.executable, "-m", "moelab.lab", "call", f"{__name__}:in_rank", named]
    with temporary_folder() as folder, ThreadPoolExecutor(n) as threads:
        commands = []
        for rank, variables in enumerate(environments(n, folder, backend)):
            core = cores[rank % len(cores)] if cores and backend == "ring" else None
            pinned = [] if core is None else ["taskset", "-c", str(core)]
            commands.append([*pinned, "env", *map("=".join, variables.items()), *call])
        done = list(threads.map(partial(limit.run, nbytes=nbytes, timeout_s=TIMEOUT_S), commands))
    for rank, each in enumerate(done):
        if each.returncode:
            raise OSError(f"rank {rank} of {n}: {each.returncode}: {each.stderr[-2000:]}")
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]


def in_rank(function: str, backend: str, *args: Any) -> Any:
    """Run the function of ``everywhere`` in this rank."""
    if backend == "ring" and mx.cuda.is_available():
        mx.set_default_device(mx.cpu)
    return pkgutil.resolve_name(function)(joined(), *args)
