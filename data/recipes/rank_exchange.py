"""What ranks exchange in a layer: seconds of it, and three ways to join their rows.

    python data/recipes/rank_exchange.py exchange OUT.json
    python data/recipes/rank_exchange.py joins OUT.json MODEL

On CPUs the ranks share this machine's cores, over MLX's ring. Where MLX has CUDA, each rank has a
GPU, over NCCL. Notebook 11 reads the records.
"""

import os
import sys
import time
import unittest.mock
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from moelab import StreamConfig
from moelab.hooks import hooked
from moelab.lab import records
from moelab.lab.decode import decode
from moelab.lab.experiments.ranks import ALL, digest_of, hold_all, logits_of, size
from moelab.lab.models import folder
from moelab.lab.ranks import everywhere
from moelab.speculation.target import vocabulary
from moelab.streaming.layers import moe_blocks
from moelab.streaming.model import load_model
from moelab.streaming.session import session_of

D = 2048  # hidden size of Qwen3.5-35B-A3B
# Rows of one exchange: 1 for a token whose K = 8 rows are summed before, 9 for all of them and
# a row of checks, and those of 8 tokens and of 64.
ROWS = (1, 9, 64, 512)
BLOCK = 20  # exchanges in one sample
SAMPLES = {"ring": {2: 60, 4: 10}, "nccl": {2: 60}}  # by ranks: four share two cores
# How rows are joined: as the engine does, and two ways that were tried.
JOINS = ("rows gathered", "rows summed", "scores first")
JOIN_RUNS, JOIN_PROMPT, JOIN_TEXT = {1: 7, 2: 7, 3: 1}, 128, 48


def meet(group):
    """Let the ranks begin together."""
    if group:
        mx.eval(mx.distributed.all_sum(mx.array(1), group=group))


def exchange_here(group, samples, dtype):
    """Time exchanges in this rank and return the rows of ``exchange``."""
    n, variants = group.size(), {}

    def sample(call, what, rows, i):
        meet(group)
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


def exchange(samples=SAMPLES["ring"], backend="ring", dtype="float32"):
    """Time one sum or gather over the ranks by itself; ``samples`` are by the number of ranks."""
    running = records.Running("ranks exchange", {"D": D, "dtype": dtype, "backend": backend})
    return running.table(_of_first(exchange_here, samples, backend, dtype))


def _of_first(function, counts, backend, *args):
    """The rows of the first rank, for each number of ranks and of samples."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=path):  # so that ranks find this file
        each = [everywhere(n, function, k, *args, backend=backend) for n, k in counts.items()]
    return [row for ranks in each for row in ranks[0]]


@contextmanager
def joining(model, how, group):
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


def joins_here(group, runs, path):
    """Run in this process, one rank or alone, and return the rows of ``joins``."""
    model, _ = load_model(path, StreamConfig(slots=ALL), group=group)
    n = group.size() if group else 1
    with model:
        prompt = np.random.default_rng(0).integers(0, vocabulary(model), JOIN_PROMPT).tolist()
        hold_all(model)
        first = logits_of(model, prompt)

        def sample(how, i):
            with joining(model, how, group):
                meet(group)
                begin = time.perf_counter()
                logits = logits_of(model, prompt)
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
                "digest": digest_of(logits),
            }

        ways = {
            f"{how}, {size(n)}": partial(sample, how) for how in (JOINS if group else JOINS[:1])
        }
        return records.as_json(records.interleave("", ways, runs))["rows"]


def joins(path, runs=JOIN_RUNS, backend="ring"):
    """Compare the ways to join rows, with every expert held; rounds are by the number of ranks."""
    path = folder(path)
    settings = {"model": path.name, "prompt_tokens": JOIN_PROMPT, "backend": backend}
    running = records.Running("ranks joins", settings)
    return running.table(_of_first(joins_here, runs, backend, str(path)))


def main(work, out, *model):
    backend = "nccl" if mx.cuda.is_available() else "ring"
    if work == "exchange":
        made = exchange(SAMPLES[backend], backend, "float32" if backend == "ring" else "bfloat16")
    else:
        made = joins(*model, backend=backend)
    records.save(out, made)


if __name__ == "__main__":
    import rank_exchange  # so that ranks find the functions by this file's name

    rank_exchange.main(*sys.argv[1:])
