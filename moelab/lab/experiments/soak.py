"""A server at work for long: does its memory stay, its threads and its open files?

    python -m moelab.lab soak OUT.json

The server is a process of its own, streams and drafts. One client asks for a long text, then for
many short ones; every ninth of these hangs up in the middle.
"""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from mlx_lm.utils import load_tokenizer
from tqdm import tqdm

from ...shipped import shipped
from .. import records
from ..serving import Served
from ..texts import heldout_starts

if TYPE_CHECKING:
    from pandas import DataFrame

MODEL, DRAFT = shipped("models", "tiny-moe"), shipped("models", "tiny-dflash")
SLOTS = 16
TEMPERATURE = 0.6
EVERY_S = 1.0  # from one look at the process to the next
HANGS_UP = 9  # every ninth of the short requests, after
HANGS_UP_AFTER = 5  # parts of its answer
SHORT = {"max_tokens": 24, "temperature": TEMPERATURE, "model": "default_model"}


@contextmanager
def watched(process: psutil.Process, every_s: float = EVERY_S) -> Iterator[list[dict]]:
    """Yields a list that gets a row at once, every ``every_s`` seconds, and at the end."""
    rows, end, begin = [], threading.Event(), time.monotonic()

    def look():
        with process.oneshot():
            rows.append(
                {
                    "s": round(time.monotonic() - begin, 2),
                    "rss_nbytes": process.memory_info().rss,
                    "threads": process.num_threads(),
                    "fds": process.num_fds(),
                }
            )

    def go_on():
        while not end.wait(every_s):
            look()

    thread = threading.Thread(target=go_on)
    look()
    thread.start()
    try:
        yield rows
    finally:
        end.set()
        thread.join()
        look()


def long_text(
    server: Served, prompt: str, tokens: int, eos: int, every_s: float
) -> tuple[list[dict], dict]:
    """One streamed text that does not end before ``tokens``.

    Returns:
        tuple: The rows of ``watched``; and the ``usage`` that the server counted with the seconds
        to the first part and to the last.
    """
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": TEMPERATURE,
        "seed": 0,
        "logit_bias": {str(eos): -1000},
        "stream_options": {"include_usage": True},
    }
    begin, times = time.monotonic(), []
    with watched(psutil.Process(server.process.pid), every_s) as rows:
        for part in tqdm(server.stream("/completions", body), unit="part"):
            times.append(time.monotonic() - begin)
            usage = part.get("usage", {})
    return rows, {"usage": usage, "first_s": times[0], "last_s": times[-1]}


def short_texts(server: Served, prompts: list[str], requests: int) -> tuple[list[dict], dict]:
    """Requests in a row: completions and chats, streamed and not, some broken off.

    Returns:
        tuple: A row after every request; and ``answered``, ``hung_up``, ``same``: how often the
        first prompt's greedy text, asked for after every request that hangs up, was the one that it
        was at first.
    """
    process = psutil.Process(server.process.pid)
    greedy = {"prompt": prompts[0], **SHORT, "temperature": 0}
    first = server.post("/completions", greedy)[1]["choices"][0]["text"]
    rows, answered, hung_up, same = [], 0, 0, 0
    for i in tqdm(range(requests), unit="request"):
        prompt = prompts[i % len(prompts)]
        chat = {"messages": [{"role": "user", "content": prompt}], **SHORT}
        if i % HANGS_UP == HANGS_UP - 1:
            with closing(server.stream("/chat/completions", {**chat, "max_tokens": 4000})) as parts:
                list(islice(parts, HANGS_UP_AFTER))
            text = server.post("/completions", greedy)[1]["choices"][0]["text"]
            hung_up, same = hung_up + 1, same + (text == first)
        elif i % 3 == 0:
            answered += len(list(server.stream("/chat/completions", chat))) > 1
        elif i % 3 == 1:
            answered += server.post("/chat/completions", chat)[0] == 200
        else:
            answered += server.post("/completions", {"prompt": prompt, **SHORT})[0] == 200
        with watched(process, 1e9) as row:
            pass
        rows.append(row[-1])
    return rows, {"answered": answered, "hung_up": hung_up, "same": same}


def measure(
    path: str | Path = MODEL,
    draft: str | Path = DRAFT,
    slots: int = SLOTS,
    prompt_tokens: int = 800,
    tokens: int = 4000,
    requests: int = 200,
    every_s: float = EVERY_S,
) -> "DataFrame":
    """A long text, then many short ones, from one server.

    Args:
        path (str or Path): A model with held-out text.
        draft (str or Path): As for ``serve --draft``.
        slots (int): Of each layer.
        prompt_tokens (int): Before the long text.
        tokens (int): Of the long text.
        requests (int): Short ones, after it.
        every_s (float): Seconds between two looks at the server during the long text.

    Returns:
        DataFrame: The server's ``rss_nbytes``, ``threads`` and ``fds`` by ``variant``: ``long``,
        each ``every_s`` seconds, and ``short``, by request. The header has what else ``long_text``
        and ``short_texts`` return, and the exit status at Ctrl-C.
    """
    settings = {"model": Path(path).name, "draft": Path(draft).name, "slots": slots}
    running = records.Running("soak", settings)
    tokenizer = load_tokenizer(Path(path))
    (prompt,) = heldout_starts(path, 1, prompt_tokens, tokenizer)
    prompts = heldout_starts(path, 8, 40, tokenizer)
    eos = min(tokenizer.eos_token_ids)
    with tempfile.TemporaryDirectory() as folder:
        options = ("--slots", str(slots), "--draft", str(draft))
        with Served(path, Path(folder) / "log", *options) as server:
            during, long = long_text(server, prompt, tokens, eos, every_s)
            after, short = short_texts(server, prompts, requests)
            code = server.interrupt()
            traceback = "Traceback" in server.said()
    rows = [
        {"variant": name, "round": i, **row}
        for name, looks in {"long": during, "short": after}.items()
        for i, row in enumerate(looks)
    ]
    return running.table(rows, long=long, short=short, exit_status=code, traceback=traceback)


def main(out: str) -> None:
    """Write the record of ``measure``."""
    records.print_and_save("", measure(), out)
