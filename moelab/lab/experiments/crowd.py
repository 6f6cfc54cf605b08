"""Many requests at once for a server with little memory: is it killed, and how near is it?

    python -m moelab.lab crowd OUT.json MODEL

Every server is a process of its own under a memory limit, page cache included. It chooses its slots
and how many texts it decodes at once; the client is outside of the limit.
"""

import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from mlx_lm.utils import load_tokenizer
from tqdm import tqdm

from ...shipped import shipped
from .. import oscache, records
from ..serving import Served
from ..texts import heldout_starts

if TYPE_CHECKING:
    from pandas import DataFrame

MODEL = shipped("models", "tiny-moe")  # has the text of the prompts
EVERY_S = 0.05  # from one look at the server's memory to the next


@contextmanager
def _most(process: psutil.Process) -> Iterator[list[int]]:
    """Yields a list whose one number is the most memory a process had to itself."""
    most, end = [0], threading.Event()

    def look():
        while not end.wait(EVERY_S):
            try:
                memory = process.memory_info()
            except psutil.Error:  # killed
                return
            most[0] = max(most[0], memory.rss - memory.shared)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        end.set()
        thread.join()


def crowd(model: Path, limit_nbytes: int, prompts: Sequence[str], tokens: int) -> dict:
    """One server, asked everything at once.

    Args:
        model (Path): The model.
        limit_nbytes (int): Of the server, page cache included.
        prompts (Sequence[str]): A request each.
        tokens (int): Of each answer.

    Returns:
        dict: How many requests were ``answered`` with all their tokens, whether the server was
        ``killed``, the seconds, the most memory that it had to itself (shared libraries and page
        cache left out), how many texts it decoded at once, and its plan.
    """

    def ask(prompt):
        try:
            status, answer = server.post("/completions", {"prompt": prompt, "max_tokens": tokens})
        except OSError:  # the server is gone
            return False
        return status == 200 and answer["usage"]["completion_tokens"] == tokens

    oscache.drop_pages(model)  # pages that another process brought in would be served for free
    with (
        tempfile.TemporaryDirectory() as folder,
        Served(model, Path(folder) / "log", limit_nbytes=limit_nbytes) as server,
        ThreadPoolExecutor(len(prompts)) as pool,
        _most(psutil.Process(server.process.pid)) as most,
    ):
        begin = time.monotonic()
        answered = sum(pool.map(ask, prompts))
        took_s = time.monotonic() - begin
        said = server.said()
        killed = server.process.poll() is not None
    at_once = re.search(r"decoded at once: (\d+)", said)
    return {
        "limit_nbytes": limit_nbytes,
        "answered": answered,
        "killed": killed,
        "took_s": took_s,
        "most_nbytes": most[0],
        "texts_at_once": int(at_once[1]) if at_once else None,
        "plan": re.search(r"moelab: (slots=.*)", said)[1],
    }


def measure(
    path: str | Path,
    limits_nbytes: Sequence[int] = (900_000_000, 1_300_000_000),
    rounds: int = 5,
    requests: int = 12,
    prompt_tokens: int = 300,
    tokens: int = 16,
) -> "DataFrame":
    """One server after another, the limits in turn.

    Args:
        path (str or Path): The model.
        limits_nbytes (Sequence[int]): Of memory, page cache included.
        rounds (int): Servers with each limit.
        requests (int): At once.
        prompt_tokens (int): Of each prompt, all of them different.
        tokens (int): Of each answer.

    Returns:
        DataFrame: A row of ``crowd`` for each server, the limit as its ``variant``.
    """
    path = Path(path)
    sizes = {"requests": requests, "prompt_tokens": prompt_tokens, "tokens": tokens}
    running = records.Running("crowd", {"model": path.name, **sizes})
    starts = heldout_starts(MODEL, requests, prompt_tokens, load_tokenizer(path))
    rows = [
        {"variant": f"{nbytes / 1e6:.0f} MB", "round": i, **crowd(path, nbytes, starts, tokens)}
        for i in tqdm(range(rounds), unit="round")
        for nbytes in limits_nbytes
    ]
    return running.table(rows)


def main(out: str, model: str) -> None:
    """Write the record of ``measure``."""
    records.print_and_save("", measure(model), out)
