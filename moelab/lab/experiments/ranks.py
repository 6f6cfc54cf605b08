"""Measure how fast ranks of this machine decode with the experts divided over them.

    python -m moelab.lab ranks OUT.json MODEL [RUNS [TRACE]]     (on Linux, memory limited)

On CPUs and on Macs the ranks talk over MLX's ring and share this machine's processors, memory bus
and SSD. Each rank has its own memory limit (on Linux), which includes the page cache. In some runs
each rank has a simulated slow SSD: a layer waits as long as its reads would take at a fixed rate.
Where MLX has CUDA, the ranks talk over NCCL, and each has a GPU and no limit.
"""

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig
from ...prompt import vocabulary
from ...streaming.model import load_model
from ...streaming.session import session_of
from ...streaming.trace import Trace
from .. import machine, records
from ..decode import decode
from ..models import folder
from ..ranks import everywhere

if TYPE_CHECKING:
    from pandas import DataFrame

Group = mx.distributed.Group
ALL = 1 << 16  # more slots than any layer has experts
RANDOM = "random"
HELD = "all held"  # every expert has a slot and nothing is read
SETTINGS = {  # arguments of ``divided``, by the backend of the ranks
    "ring": {
        "sizes": (1, 2, 4),
        "slots": (32,),
        "rates": (None, 300e6, 100e6),
        "limit_nbytes": 1_000_000_000,
        "runs": 7,
    },
    "nccl": {"sizes": (1, 2), "slots": (16, 128), "tokens": 64, "prompt_tokens": 512, "runs": 5},
}


def size(n: int) -> str:
    """Write ``1 rank`` or ``2 ranks``."""
    return f"{n} rank" + "s" * (n > 1)


def slow(model: nn.Module, rate: float) -> None:
    """Make layers wait as if reads came one after the other, at ``rate`` bytes a second."""
    reader, free, due = session_of(model).reader, [0.0], WeakKeyDictionary()
    finish = reader.finish

    def slowed(start):
        def started(ranges, step=None):
            reads = start(ranges, step)
            for read, part in zip(reads, ranges.divided(step)):
                free[0] = due[read] = max(free[0], time.perf_counter()) + part.nbytes / rate
            return reads

        return started

    def finished(reads):
        took_s = finish(reads)
        until = max((due[read] for read in reads), default=0.0)
        time.sleep(max(0.0, until - time.perf_counter()))
        return took_s

    reader.start, reader.start_ahead = slowed(reader.start), slowed(reader.start_ahead)
    reader.finish = finished


def _own(layer):
    """Return the experts that this rank may read."""
    owned = np.ones(layer.num_experts, bool) if layer.owned is None else layer.owned
    return np.flatnonzero(owned).tolist()


def decode_here(
    group: Group | None,
    path: str,
    slots: int | None,
    rate: float | None,
    tokens: int,
    warmup: int,
    prompt_tokens: int,
    text: str | None,
    direct: bool,
) -> dict[str, Any]:
    """Decode in this process, as one rank or alone, and return a row for ``divided``."""
    config = StreamConfig(slots=slots or ALL, reads="direct" if direct else "cached")
    model, _ = load_model(path, config, group=group)
    with model:
        if slots is None:
            for layer in session_of(model).layers:
                layer.read(_own(layer))
        if rate:
            slow(model, rate)
        n = prompt_tokens + warmup + tokens
        if text in (None, RANDOM):
            ids = np.random.default_rng(0).integers(0, vocabulary(model), n)
        else:
            ids = Trace.load(text).tokens[:n]
        prompt, feed = ids[:prompt_tokens].tolist(), ids[prompt_tokens:].tolist() if text else None
        logits = model(mx.array([prompt]), cache=make_prompt_cache(model)).astype(mx.float32)
        digest = hashlib.sha256(np.array(logits).tobytes()).hexdigest()[:16]
        found = decode(model, prompt, tokens, warmup, feed=feed)
        experts = len(_own(session_of(model).layers[0]))
    return {
        "experts": experts,
        "prefill_s": found.prefill_s,
        "decode_s": found.decode_s,
        **{k: getattr(found.counters, k) for k in ("hits", "misses", "bytes_read", "wait_s")},
        "tokens": found.tokens,
        "digest": digest,
    }


def divided(
    path: str | Path,
    sizes: Sequence[int] = (1, 2),
    slots: Sequence[int] = (32,),
    rates: Sequence[float | None] = (None,),
    held: bool = True,
    limit_nbytes: int | None = None,
    tokens: int = 24,
    warmup: int = 24,
    prompt_tokens: int = 4,
    text: str | Path | None = RANDOM,
    runs: int = 1,
    backend: str = "ring",
) -> "DataFrame":
    """Decode with one rank and with several; each run has processes of its own.

    ``rates`` are bytes a second of each rank's simulated SSD (None: this machine's SSD). If
    ``limit_nbytes`` is given, ranks read past the page cache, and a run begins without the file's
    pages in memory.
    ``text`` is a trace's file or ``RANDOM``, fed in place of decoded tokens. Raise ValueError if
    the texts of the ranks differ.
    """
    path = folder(path)
    amount = tokens, warmup, prompt_tokens, str(text) if text else None

    def run(n, S, rate, i):
        nbytes = limit_nbytes if S else None
        if nbytes:
            machine.drop_pages(path)
        args = str(path), S, rate, *amount, bool(nbytes)
        each = everywhere(n, decode_here, *args, backend=backend, nbytes=nbytes)
        if len({(*rank["tokens"], rank["digest"]) for rank in each}) > 1:
            raise ValueError(f"{path}: expected the same text of {n} ranks, got several")
        return {
            "ranks": n,
            "size": size(n),
            "where": _where(S, rate),
            **({"slots": S} if S else {}),
            **({"rate_bytes_per_s": rate} if rate else {}),
            **each[0],
            "decode_tokens": tokens,
            "most_nbytes": max(rank["bytes_read"] for rank in each),
        }

    points = [(S, rate) for S in slots for rate in rates] + [(None, None)] * held
    variants = {
        f"{size(n)}, {_where(*point)}": partial(run, n, *point) for point in points for n in sizes
    }
    settings = {"model": path.name, "tokens": tokens, "warmup": warmup, "backend": backend}
    settings |= {"prompt_tokens": prompt_tokens, "limit_nbytes": limit_nbytes}
    settings |= {"text": Path(text).name if text else None}
    return records.interleave("ranks divided", variants, runs, settings, 0)


def _where(slots, rate):
    if slots is None:
        return HELD
    return f"{slots} slots" + (f", {rate / 1e6:.0f} MB/s" if rate else "")


def main(out: str, path: str, *words: str) -> None:
    """Write the record of ``divided``; ``words`` are the number of runs and a trace's file."""
    backend = "nccl" if mx.cuda.is_available() else "ring"
    if len(words) > 2 or not all(n.isdigit() for n in words[:1]):
        raise ValueError(f"expected OUT MODEL [RUNS [TRACE]], got {' '.join((out, path, *words))}")
    given = SETTINGS[backend] | ({"runs": int(words[0])} if words else {})
    given |= {"text": words[1]} if words[1:] else {}
    made = divided(path, backend=backend, **given)
    records.print_and_save(records.group(made, "token_s").to_string(), made, out)
