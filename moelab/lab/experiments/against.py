"""moelab beside what people use instead: the same weights, text and memory limit.

    python -m moelab.lab against OUT.json MODEL TEXT RUNS [WORD ...]    (``make peers`` comes first)

All take turns in rounds of random order, each run in a process of its own whose file is dropped
from the page cache before. TEXT is a trace's file, whose tokens all read one by one, or lengths of
prompts (``126,400,800``). A WORD is

- a memory limit of the process in MB, page cache included (Linux). 0, the default, is none;
  ``1530-956`` falls by 200 MB a second while tokens are read;
- a peer, with options behind slashes: ``mlx-lm``, ``moelab/source=host/slots=16``. Default: all
  that ``make peers`` installs;
- ``prompt=16``: how many tokens of a trace's prompt are read, the last ones. Default: all;
- ``warmup=32`` or ``tokens=32``: tokens behind it, read before the clock starts or timed.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from .. import charts, limit, oscache, peers, records
from ..models import folder
from ..texts import heldout_ids
from .bench import texts_of

if TYPE_CHECKING:
    from pandas import DataFrame

# mlx-vlm uses this share of memory for experts; the rest is for its buffers and the page cache.
CACHE_SHARE = 0.5
STEP_NBYTES, STEP_S = 10_000_000, 0.05  # a falling limit loses 10 MB every 0.05 s
FALLING = 256  # at most so many tokens are read while the limit falls


def sample_here(
    peer: str,
    path: str,
    ids: list[int],
    feed: list[int],
    warmup: int,
    tokens: int,
    limits: list[int],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Make one run in this (new) process and return its columns.

    With two ``limits`` the memory limit falls from the first to the second, and the last
    ``tokens`` after that are timed, too.
    """
    read = peers.opened(peer, path, len(ids) + len(feed) + 1, **options)()
    said = []

    def timed(ids):
        took = []
        for given in ids:
            begin = time.perf_counter()
            said.append(int(read(given).argmax()))
            took.append(time.perf_counter() - begin)
        return took

    (prefill_s,) = timed([ids])
    one_by_one = [[token] for token in feed]
    timed(one_by_one[:warmup])
    disk = [oscache.disk_read_nbytes()]
    step_s = timed(one_by_one[warmup : warmup + tokens])
    disk.append(oscache.disk_read_nbytes())
    row = {
        "prompt_tokens": len(ids),
        "prefill_s": prefill_s,
        "decode_tokens": tokens,
        "decode_s": sum(step_s),
        "step_s": step_s,
        **({} if None in disk else {"disk_nbytes": disk[1] - disk[0]}),
    }
    if len(limits) == 2:
        with ThreadPoolExecutor(1) as pool:
            falling = pool.submit(_fall, *limits)
            between = one_by_one[warmup + tokens : -tokens]
            falling_s = timed(takewhile(lambda _: not falling.done(), between))
            falling.result()  # raises the error if the limit could not fall
        row |= {"falling_s": falling_s, "fallen_s": timed(one_by_one[-tokens:])}
        row |= {"fallen_tok_s": tokens / sum(row["fallen_s"])}
    return row | {"tokens": said, "rss_end_nbytes": psutil.Process().memory_info().rss}


def _fall(first, last):
    """Lower the limit of this process in steps."""
    for nbytes in range(first, last, -STEP_NBYTES):
        limit.lower(nbytes)
        time.sleep(STEP_S)
    limit.lower(last)


def against(
    path: str | Path,
    text: str | Path | Sequence[int],
    limits: Sequence[Sequence[int]] = ((),),
    runs: int = 5,
    tokens: int = 32,
    warmup: int = 32,
    prompt: int = 0,
    ways: Sequence[str] = peers.NAMES,
    progress: bool = True,
) -> "DataFrame":
    """Read the same text with each peer under each limit.

    ``text`` is a trace's file, or lengths of prompts. A limit has the bytes of a run's process,
    page cache included, and then those that they fall to; none if empty. A row is a run.
    """
    path = folder(path)
    if isinstance(text, str | Path):
        more = FALLING + tokens if any(len(given) == 2 for given in limits) else 0
        ids, behind = texts_of(text, warmup + tokens + more, path)
        texts = {"": (ids[-prompt:], behind, warmup, tokens)}
    else:
        prompts = heldout_ids(path, text, len(text))
        texts = {f", prompt of {len(ids)}": (ids, ids[-1:], 0, 1) for ids in prompts}
    opened = {given: peers.way(given) for given in ways}
    files = peers.files(path, [peer for peer, _ in opened.values()])

    def run(given, text, limits, _):
        peer, options = opened[given]
        file = files[peer]
        told = dict(zip(("limit_nbytes", "lowered_nbytes"), limits))
        nbytes = told.get("limit_nbytes")
        for part in _parts(file):
            oscache.drop_pages(part)
        if peer == peers.MOELAB:
            options = {"slots": "auto"} | options
        elif peer == peers.MLX_VLM and nbytes:
            options = {"expert_cache_gb": _cache_nbytes(file, nbytes) / 1e9}
        arguments = peer, str(file), *text, limits, options
        made, done = limit.call(sample_here, *arguments, what=given, nbytes=nbytes)
        told |= {"peer": given, "file_nbytes": _nbytes(file), "limited_by": done.how}
        return (made or {}) | told | {"killed": done.killed}

    def words(nbytes):
        return " to ".join(f"{n / 1e6:.0f} MB" for n in nbytes) or "no limit"

    variants = {
        f"{given}, {words(nbytes)}{name}": partial(run, given, text, nbytes)
        for nbytes, (name, text), given in product(limits, texts.items(), ways)
    }
    settings = {"model": path.name, "tokens": tokens, "warmup_tokens": warmup}
    feed = Path(text).name if isinstance(text, str | Path) else None
    settings |= {"feed": feed, "cache_state": "cold", "versions": peers.versions()}
    return records.interleave("against", variants, runs, settings, 0, progress=progress)


def _parts(path):
    """The files that a peer reads: the given file, or a folder's files of tensors."""
    return [path] if path.is_file() else sorted(path.rglob("*.safetensors"))


def _nbytes(path):
    return sum(file.stat().st_size for file in _parts(path))


def _cache_nbytes(file, nbytes):
    """The bytes of experts that mlx-vlm may keep under a limit."""
    others = sum(p.stat().st_size for p in file.glob("*.safetensors"))
    return max(0, int((nbytes - others) * CACHE_SHARE))


def dial(samples: "DataFrame", disk_bytes_per_s: float) -> Callable[[int, float], charts.go.Figure]:
    """The function behind the sliders: each peer's speed by memory, and by the SSD in a model.

    Between two memories that were measured, a token's time is interpolated on a logarithmic scale.
    A token takes longer than with the whole file in memory because it waits for the disk. In the
    model, an SSD of twice the rate halves these waits.
    """
    by_share = samples.pivot_table("token_s", "share", "peer", "median", sort=True)
    measured = {peer: by_share[peer].dropna() for peer in samples.peer.unique()}

    def look(percent: int, ssd_GBs: float):
        share, tok_s, killed = percent / 100, {}, []
        for peer, token_s in measured.items():
            if share < token_s.index[0]:
                killed.append(f"{peer} was killed with less than {token_s.index[0]:.0%}.")
                continue
            here = np.exp(np.interp(share, token_s.index, np.log(token_s)))
            waits = max(0.0, here - token_s[1.0]) * disk_bytes_per_s / (ssd_GBs * 1e9)
            tok_s[peer] = 1 / (token_s[1.0] + waits)
        rows = sorted(tok_s.items(), key=lambda row: -row[1])
        (first, most), (second, next_most) = rows[:2]
        table = records.pandas().DataFrame(rows, columns=["peer", "tok_s"])
        table.attrs = {"record": "none: a model", "machine": ""}
        told = ", ".join(f"{peer} {speed:.3g} tok/s" for peer, speed in rows)
        return charts.bars(
            table,
            "tok_s",
            "peer",
            title=f"Memory for {percent}% of the file: {first} decodes "
            f"{most / next_most:.1f} times as fast as {second}",
            axis="tok/s",
            finding=" ".join([f"{told}.", *killed]),
            note=f"between measured memories, on an SSD of {disk_bytes_per_s / 1e9:.1f} GB/s; "
            f"waits scaled to {ssd_GBs:g} GB/s",
        )

    return look


def main(out: str, model: str, text: str, runs: str, *words: str) -> None:
    """Write the record; the words are limits, peers and numbers of tokens."""
    counts, limits, ways = {}, [], []
    for word in words:
        name, _, n = word.partition("=")
        parts = word.split("-")
        if word.split("/")[0] in peers.NAMES:
            ways.append(word)
        elif name in ("prompt", "warmup", "tokens") and n.isdigit():
            counts[name] = int(n)
        elif all(map(str.isdigit, parts)):
            limits.append([int(n) * 1_000_000 for n in parts if int(n)])
        else:
            raise ValueError(
                "against: expected MB, prompt=N, warmup=N, tokens=N or a peer "
                f"({', '.join(peers.NAMES)}), got {word}"
            )
    if not runs.isdigit():
        raise ValueError(f"against: expected RUNS as a number, got {runs}")
    lengths = text.split(",")
    read = [*map(int, lengths)] if all(word.isdigit() for word in lengths) else text
    made = against(model, read, limits or [[]], int(runs), ways=ways or peers.NAMES, **counts)
    told = ["tok_s" if read is text else "prefill_s"]
    told += ["fallen_tok_s"] if "fallen_tok_s" in made else []
    table = "\n".join(f"{one}\n{records.group(made, one).round(2).to_string()}" for one in told)
    records.print_and_save(table, made, out)
