"""A server at work for long, and one with little memory that is asked much at once.

    python -m moelab.lab servers soak OUT.json [RUNS]
    python -m moelab.lab servers crowd OUT.json MODEL [RUNS]     (on Linux, memory limited)

Each server is a process of its own. In ``soak`` it streams and drafts, and one client asks for a
long text or for many short ones. In ``crowd`` it chooses its slots and how many texts it decodes at
once, and the client is outside of the memory limit.
"""

import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from mlx_lm.utils import load_tokenizer

from ...shipped import shipped
from .. import oscache, records
from ..serving import Served
from ..texts import heldout_starts

if TYPE_CHECKING:
    from pandas import DataFrame

MODEL, DRAFT = shipped("models", "tiny-moe"), shipped("models", "tiny-dflash")  # with texts
TEMPERATURE = 0.6
HANGS_UP = 9  # every ninth short request hangs up
HANGS_UP_AFTER = 5  # parts of its answer
SHORT = {"max_tokens": 24, "temperature": TEMPERATURE, "model": "default_model"}
RUNS = 5
LOOKED_AT = ("rss_nbytes", "own_nbytes", "threads", "fds")


def look(process: psutil.Process) -> dict[str, int]:
    """A process's memory with and without shared libraries, its threads and its open files."""
    with process.oneshot():
        memory = process.memory_info()
        own_nbytes = memory.rss - getattr(memory, "shared", 0)
        seen = memory.rss, own_nbytes, process.num_threads(), process.num_fds()
    return dict(zip(LOOKED_AT, seen))


@contextmanager
def watched(server: Served, every_s: float) -> Iterator[list[dict[str, int]]]:
    """Yields a list that gets what ``look`` gives every ``every_s`` seconds while it lives."""
    process, looks, end = psutil.Process(server.process.pid), [], threading.Event()

    def go_on():
        while not end.wait(every_s):
            try:
                looks.append(look(process))
            except psutil.Error:  # killed
                return

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield looks
    finally:
        end.set()
        thread.join()


def _halves(looks):
    """The most of each thing in the first half of the looks, and in the second."""
    half = -(-len(looks) // 2)
    parts = {"early": looks[:half], "late": looks[half:]}
    return {f"{p}_{k}": max(s[k] for s in seen) for p, seen in parts.items() for k in LOOKED_AT}


def long_text(
    server: Served, prompt: str, tokens: int, eos: int, every_s: float = 1.0
) -> dict[str, Any]:
    """Ask for one streamed text of ``tokens``; returns its times and the most memory."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": TEMPERATURE,
        "seed": 0,
        "logit_bias": {str(eos): -1000},
        "stream_options": {"include_usage": True},
    }
    begin = time.monotonic()
    parts = server.stream("/completions", body)
    next(parts)
    first = time.monotonic()
    with watched(server, every_s) as looks:
        *_, last = parts
    return {
        "answered": last["usage"]["completion_tokens"],
        "first_s": first - begin,
        "writing_s": time.monotonic() - first,
        **_halves(looks),
    }


def short_texts(server: Served, prompts: Sequence[str], requests: int) -> dict[str, Any]:
    """Send requests in a row: completions and chats, streamed and not, some broken off.

    ``same``: how often the first prompt's greedy text, asked for after each hang-up, was the same.
    """
    process = psutil.Process(server.process.pid)
    greedy = {"prompt": prompts[0], **SHORT, "temperature": 0}
    first = server.post("/completions", greedy)[1]["choices"][0]["text"]
    looks, answered, hung_up, same = [], 0, 0, 0
    for i in range(requests):
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
        looks.append(look(process))
    return {"answered": answered, "hung_up": hung_up, "same": same, **_halves(looks)}


def soak(
    path: str | Path = MODEL,
    draft: str | Path = DRAFT,
    slots: int = 16,
    prompt_tokens: int = 800,
    tokens: int = 4000,
    requests: int = 200,
    every_s: float = 1.0,
    runs: int = RUNS,
) -> "DataFrame":
    """Servers that write a long text, and servers that write many short ones."""
    path, tokenizer = Path(path), load_tokenizer(Path(path))
    (prompt,) = heldout_starts(path, 1, prompt_tokens, tokenizer)
    prompts = heldout_starts(path, 8, 40, tokenizer)
    works = {
        "long": (long_text, prompt, tokens, min(tokenizer.eos_token_ids), every_s),
        "short": (short_texts, prompts, requests),
    }

    def run(work, *args):
        options = ("--slots", str(slots), "--draft", str(draft))
        with (
            tempfile.TemporaryDirectory() as folder,
            Served(path, Path(folder) / "log", *options) as server,
        ):
            made = work(server, *args[:-1])  # the last is the round
            code = server.interrupt()
            traceback = "Traceback" in server.said()
        return {**made, "exit_status": code, "traceback": traceback}

    variants = {name: partial(run, *work) for name, work in works.items()}
    settings = {"model": path.name, "draft": Path(draft).name, "slots": slots}
    settings |= {"prompt_tokens": prompt_tokens, "tokens": tokens, "requests": requests}
    return records.interleave("soak", variants, runs, settings, warmup=0)


def asked_at_once(
    model: Path, limit_nbytes: int, prompts: Sequence[str], tokens: int
) -> dict[str, Any]:
    """Ask one server all requests at once and return its row of ``crowd``."""

    def ask(prompt):
        try:
            status, answer = server.post("/completions", {"prompt": prompt, "max_tokens": tokens})
        except OSError:  # the server has ended
            return False
        return status == 200 and answer["usage"]["completion_tokens"] == tokens

    oscache.drop_pages(model)  # the limit does not count pages that another process brought in
    with (
        tempfile.TemporaryDirectory() as folder,
        Served(model, Path(folder) / "log", limit_nbytes=limit_nbytes) as server,
        ThreadPoolExecutor(len(prompts)) as pool,
        watched(server, 0.05) as looks,
    ):
        begin = time.monotonic()
        answered = sum(pool.map(ask, prompts))
        took_s = time.monotonic() - begin
        said = server.said()
        died = server.process.poll() is not None
    at_once = re.search(r"decoded at once: (\d+)", said)
    return {
        "limit_nbytes": limit_nbytes,
        "answered": answered,
        "died": died,
        "took_s": took_s,
        "most_nbytes": max(seen["own_nbytes"] for seen in looks),
        "texts_at_once": int(at_once[1]) if at_once else None,
        "plan": re.search(r"moelab: (slots=.*)", said)[1],
    }


def crowd(
    path: str | Path,
    limits_nbytes: Sequence[int] = (900_000_000, 1_300_000_000),
    runs: int = RUNS,
    requests: int = 12,
    prompt_tokens: int = 300,
    tokens: int = 16,
) -> "DataFrame":
    """Start one server after another under each limit, and ask each all requests at once."""
    path = Path(path)
    prompts = heldout_starts(MODEL, requests, prompt_tokens, load_tokenizer(path))
    variants = {
        f"{nbytes / 1e6:.0f} MB": lambda i, nbytes=nbytes: asked_at_once(
            path, nbytes, prompts, tokens
        )
        for nbytes in limits_nbytes
    }
    settings = {"model": path.name, "requests": requests, "prompt_tokens": prompt_tokens}
    return records.interleave("crowd", variants, runs, settings | {"tokens": tokens}, warmup=0)


def main(work: str, out: str, *words: str) -> None:
    """Write the record of ``soak``, or of ``crowd`` with a model; the last word is the runs."""
    given = work, len(words), all(n.isdigit() for n in words[work == "crowd" :])
    if given in (("soak", 0, True), ("soak", 1, True)):
        made = soak(runs=int(words[0]) if words else RUNS)
        shown = ["variant", "answered", "early_rss_nbytes", "late_rss_nbytes", "exit_status"]
    elif given in (("crowd", 1, True), ("crowd", 2, True)):
        made = crowd(words[0], runs=int(words[1]) if words[1:] else RUNS)
        shown = ["variant", "answered", "died", "took_s", "most_nbytes", "texts_at_once"]
    else:
        raise ValueError(
            "expected soak OUT [RUNS] or crowd OUT MODEL [RUNS], got "
            f"{' '.join((work, out, *words))}"
        )
    records.print_and_save(made[shown].to_string(index=False), made, out)
