"""Experts divided over ranks of this machine: how fast they decode, and what the exchange takes.

    python -m moelab.lab ranks divided OUT.json MODEL [RUNS [TRACE]]     (on Linux, memory limited)
    python -m moelab.lab ranks exchange OUT.json
    python -m moelab.lab ranks joins OUT.json MODEL

On CPUs the ranks share this machine's cores, memory bus and SSD, over MLX's ring. In ``divided``
each has a memory limit of its own, page cache included, and in some runs a slow SSD of its own,
which is simulated: a layer waits until its reads would have come at a fixed rate. Where MLX has
CUDA, each rank has a GPU, over NCCL, without limits.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig
from ...hooks import hooked
from ...speculation.target import vocabulary
from ...streaming.layers import moe_blocks
from ...streaming.model import load_model
from ...streaming.session import session_of
from ...streaming.trace import Trace
from .. import machine, oscache, records
from ..decode import decode
from ..models import folder
from ..ranks import everywhere

if TYPE_CHECKING:
    from pandas import DataFrame

Group = mx.distributed.Group
ALL = 1 << 16  # slots, more than there are experts
RANDOM = "random"
HELD = "all held"  # every expert has a slot and nothing is read
EXPERT_NBYTES, READS = 1769472, 8  # to time the SSD: bytes of a read, and reads in flight
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
D = 2048  # hidden size of Qwen3.5-35B-A3B
# Rows of one exchange: 1 for a token whose K = 8 rows are summed before, 9 for all of them and
# a row of checks, and those of 8 tokens and of 64.
ROWS = (1, 9, 64, 512)
BLOCK = 20  # exchanges in one sample
SAMPLES = {"ring": {2: 60, 4: 10}, "nccl": {2: 60}}  # by ranks: four share two cores
# How rows are joined: as the engine does, and two ways that were tried.
JOINS = ("rows gathered", "rows summed", "scores first")
JOIN_RUNS, JOIN_PROMPT, JOIN_TEXT = {1: 7, 2: 7, 3: 1}, 128, 48


def size(n: int) -> str:
    """Write ``1 rank`` or ``2 ranks``."""
    return f"{n} rank" + "s" * (n > 1)


def _meet(group):
    """Let the ranks begin together."""
    if group:
        mx.eval(mx.distributed.all_sum(mx.array(1), group=group))


def _digest(logits):
    return hashlib.sha256(logits.tobytes()).hexdigest()[:16]


def _logits(model, ids):
    """The logits ``[T, V]`` of a prompt, on the host."""
    return np.array(model(mx.array([ids]), cache=make_prompt_cache(model))[0].astype(mx.float32))


def slow(model: nn.Module, rate: float) -> None:
    """Make layers wait as if reads came one after the other, at ``rate`` bytes a second."""
    reader, free = session_of(model).reader, [0.0]
    start, finish = reader.start, reader.finish

    def started(reads):
        nbytes = reads.nbytes if hasattr(reads, "nbytes") else sum(r.nbytes for r in reads)
        free[0] = max(free[0], time.perf_counter()) + nbytes / rate
        return start(reads)

    def finished(futures):
        finish(futures)
        time.sleep(max(0.0, free[0] - time.perf_counter()))

    reader.start, reader.finish = started, finished


def _own(layer):
    """The experts that this rank may read."""
    owned = np.ones(layer.num_experts, bool) if layer.owned is None else layer.owned
    return np.flatnonzero(owned).tolist()


def hold_all(model: nn.Module) -> None:
    """Read every expert of this rank into its slot; there must be enough of them."""
    for layer in session_of(model).layers:
        layer.read(_own(layer))


# How fast ranks decode


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
    """Decode in this process, one rank or alone, and return a row for ``divided``."""
    config = StreamConfig(slots=slots or ALL, reads="direct" if direct else "cached")
    model, _ = load_model(path, config, group=group)
    with model:
        if slots is None:
            hold_all(model)
        if rate:
            slow(model, rate)
        n = prompt_tokens + warmup + tokens
        if text in (None, RANDOM):
            ids = np.random.default_rng(0).integers(0, vocabulary(model), n)
        else:
            ids = Trace.load(text).tokens[:n]
        prompt, feed = ids[:prompt_tokens].tolist(), ids[prompt_tokens:].tolist() if text else None
        digest, disk = _digest(_logits(model, prompt)), []  # bytes from the SSD before and after

        def mark():
            disk.append(oscache.disk_read_nbytes() or 0)

        found = decode(model, prompt, tokens, warmup, before_clock=mark, feed=feed)
        mark()
        layers = session_of(model).layers
        experts = len(_own(layers[0]))
    return {
        "experts": experts,
        "layers": len(layers),
        "layer_s": found.decode_s / tokens / len(layers),
        "prefill_s": found.prefill_s,
        "decode_s": found.decode_s,
        **{k: getattr(found.counters, k) for k in ("hits", "misses", "bytes_read", "wait_s")},
        "disk_nbytes": disk[1] - disk[0],
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

    ``rates`` are bytes a second of each rank's simulated SSD (None: this machine's SSD). With
    ``limit_nbytes`` ranks read past the page cache, which is dropped before. ``text`` is a trace's
    file or ``RANDOM``, fed in place of decoded tokens. Disagreeing ranks are an error.
    """
    path = folder(path)
    amount = tokens, warmup, prompt_tokens, str(text) if text else None

    def run(n, S, rate, i):
        nbytes = limit_nbytes if S else None
        if nbytes:
            oscache.drop_pages(path)
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
            "prompt_tokens": prompt_tokens,
            "decode_tokens": tokens,
            "most_nbytes": max(rank["bytes_read"] for rank in each),
            "disk_nbytes": sum(rank["disk_nbytes"] for rank in each),
        }

    def ssd(i):
        file = max(oscache.tensor_files(path), key=os.path.getsize)
        speed = machine.read_speed(file, True, READS, EXPERT_NBYTES, 256)
        return {"disk_bytes_per_s": speed}

    points = [(S, rate) for S in slots for rate in rates] + [(None, None)] * held
    variants = {
        f"{size(n)}, {_where(*point)}": partial(run, n, *point) for point in points for n in sizes
    }
    settings = {"model": path.name, "tokens": tokens, "warmup": warmup}
    settings |= {"text": Path(text).name if text else None}
    settings |= {"backend": backend, "limit_nbytes": limit_nbytes}
    before = ssd if limit_nbytes else None
    return records.interleave("ranks divided", variants, runs, settings, 0, each_round=before)


def _where(slots, rate):
    if slots is None:
        return HELD
    return f"{slots} slots" + (f", {rate / 1e6:.0f} MB/s" if rate else "")


# What the exchange takes


def exchange_here(group: Group, samples: int, dtype: str) -> list[dict[str, Any]]:
    """Time exchanges in this rank and return the rows of ``exchange``."""
    n, variants = group.size(), {}

    def sample(call, what, rows, i):
        _meet(group)
        begin = time.perf_counter()
        for _ in range(BLOCK):
            mx.eval(call())
        seconds = (time.perf_counter() - begin) / BLOCK
        return {"what": what, "rows": rows, "ranks": n, "seconds": seconds}

    for rows in ROWS:
        for what, own in (("sum", rows), ("gather", -(-rows // n))):
            x = mx.ones((own, D), getattr(mx, dtype))
            mx.eval(x)
            call = partial(getattr(mx.distributed, f"all_{what}"), x, group=group)
            variants[f"{what} of {rows}, {size(n)}"] = partial(sample, call, what, rows)
    made = records.interleave("", variants, samples, warmup=2)  # alike in all ranks
    return records.as_json(made)["rows"]


def exchange(
    samples: Mapping[int, int] = SAMPLES["ring"], backend: str = "ring", dtype: str = "float32"
) -> "DataFrame":
    """Time one sum or gather over the ranks by itself; ``samples`` are by the number of ranks."""
    running = records.Running("ranks exchange", {"D": D, "dtype": dtype, "backend": backend})
    return running.table(_of_first(exchange_here, samples, backend, dtype))


def _of_first(function, counts, backend, *args):
    """The rows of the first rank, for each number of ranks and of samples."""
    each = (everywhere(n, function, k, *args, backend=backend) for n, k in counts.items())
    return [row for ranks in each for row in ranks[0]]


@contextmanager
def joining(model: nn.Module, how: str, group: Group) -> Iterator[None]:
    """Inside the block, the ranks join the rows of a layer in another way, one of ``JOINS``.

    ``rows summed`` sums the rows of all pairs, with zeros where a rank has none. ``scores first``
    applies the scores and sums over K on each rank, then sums one row a token over the ranks; rank
    0 computes the shared expert.
    """

    def placed(_, y, owners, routed, like, path):
        mine = np.flatnonzero(owners == group.rank())
        rows = np.full(routed.size, len(mine))
        rows[mine] = np.arange(len(mine))
        zeros = mx.zeros((1, like[0]), like[1])
        y = (zeros if y is None else mx.concatenate([y, zeros]))[mx.array(rows)]
        if how == "rows summed":
            y = mx.distributed.all_sum(y, group=group)
        y = y.reshape(*routed.shape, like[0])
        return y, y

    def summed(call, x):
        return mx.distributed.all_sum(call(x), group=group)

    def first_only(call, x):
        return call(x) * (group.rank() == 0)

    with ExitStack() as hooks:
        if how != "rows gathered":
            hooks.enter_context(hooked(session_of(model).ranks, placed, "join"))
        for block in moe_blocks(model) if how == "scores first" else ():
            hooks.enter_context(hooked(block, summed))
            hooks.enter_context(hooked(block.shared_expert, first_only))
        yield


def joins_here(group: Group | None, runs: int, path: str) -> list[dict[str, Any]]:
    """Run in this process, one rank or alone, and return the rows of ``joins``."""
    model, _ = load_model(path, StreamConfig(slots=ALL), group=group)
    n = group.size() if group else 1
    with model:
        prompt = np.random.default_rng(0).integers(0, vocabulary(model), JOIN_PROMPT).tolist()
        hold_all(model)
        first = _logits(model, prompt)

        def sample(how, i):
            with joining(model, how, group):
                _meet(group)
                begin = time.perf_counter()
                logits = _logits(model, prompt)
                prompt_s = time.perf_counter() - begin
                made = decode(model, prompt[:2], JOIN_TEXT)
            return {
                "how": how,
                "ranks": n,
                "prompt_s": prompt_s,
                "decode_tokens": JOIN_TEXT,
                "decode_s": made.decode_s,
                "tokens": made.tokens,
                "off": float(abs(logits - first).max() / first.std()),
                "digest": _digest(logits),
            }

        ways = {
            f"{how}, {size(n)}": partial(sample, how) for how in (JOINS if group else JOINS[:1])
        }
        return records.as_json(records.interleave("", ways, runs))["rows"]


def joins(
    path: str | Path, runs: Mapping[int, int] = JOIN_RUNS, backend: str = "ring"
) -> "DataFrame":
    """Compare the ways to join rows, with every expert held; rounds are by the number of ranks."""
    path = folder(path)
    settings = {"model": path.name, "prompt_tokens": JOIN_PROMPT, "backend": backend}
    running = records.Running("ranks joins", settings)
    return running.table(_of_first(joins_here, runs, backend, str(path)))


def main(work: str, out: str, *words: str) -> None:
    """Write a record of ``divided``, ``exchange`` or ``joins``."""
    backend = "nccl" if mx.cuda.is_available() else "ring"
    column = "seconds" if work == "exchange" else "token_s"
    if work == "divided" and len(words) in (1, 2, 3) and all(n.isdigit() for n in words[1:2]):
        given = SETTINGS[backend] | ({"runs": int(words[1])} if words[1:] else {})
        given |= {"text": words[2]} if words[2:] else {}
        made = divided(words[0], backend=backend, **given)
    elif work == "exchange" and not words:
        dtype = "float32" if backend == "ring" else "bfloat16"
        made = exchange(SAMPLES[backend], backend, dtype)
    elif work == "joins" and len(words) == 1:
        made = joins(words[0], backend=backend)
    else:
        raise ValueError(
            "expected divided OUT MODEL [RUNS [TRACE]], exchange OUT, or joins OUT MODEL, got "
            f"{' '.join((work, out, *words))}"
        )
    records.print_and_save(records.group(made, column).to_string(), made, out)
