"""The fast kernels beside MLX's: what a product takes, and whether both write the same texts.

python -m moelab.lab kernels products OUT.json        (on Linux)
python -m moelab.lab kernels texts OUT.json
"""

import os
import unittest.mock
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ... import StreamConfig, load
from ...kernels import code, quantized
from ...shipped import shipped
from .. import limit, quality, records
from ..texts import heldout_files, heldout_starts

if TYPE_CHECKING:
    from pandas import DataFrame

OUTPUTS, INPUTS, GROUP = 4096, 2048, 64  # 8.4 M weights, as in the 35B's attention
ROWS, BITS = (1, 2, 4, 8, 16, 64, 128), (4, 8)
COPIED_NBYTES = 256 * 1024 * 1024  # larger than every cache


def products(rounds: int = 9, rows=ROWS, bits=BITS) -> "DataFrame":
    """Time the product of ``x [rows, D]`` with a matrix ``[N, D]``, and a copy in memory.

    One thread and all cores are measured in processes of their own that may use as many cores.
    """
    settings = {"outputs": OUTPUTS, "inputs": INPUTS, "group_size": GROUP, "runs": rounds}
    running, cores, made = records.Running("kernels", settings), os.sched_getaffinity(0), []
    for n in sorted({1, len(cores)}):
        # Otherwise the threads of numpy's BLAS spin on, on cores that the next measurement needs.
        blas = {"OPENBLAS_NUM_THREADS": str(n), "OPENBLAS_THREAD_TIMEOUT": "4"}
        os.sched_setaffinity(0, sorted(cores)[:n])  # the new process inherits it
        try:
            with unittest.mock.patch.dict(os.environ, blas):
                made += limit.call(_products, rounds, rows, bits, what=f"{n} threads")[0]
        finally:
            os.sched_setaffinity(0, cores)
    return running.table(made)


def _products(rounds, rows, bits):
    source, to = np.ones(COPIED_NBYTES, np.uint8), np.empty(COPIED_NBYTES, np.uint8)
    copy = {"variant": "copy", "nbytes": COPIED_NBYTES}
    variants = {"copy": records.timed(lambda: np.copyto(to, source), **copy)}
    for b in bits:
        w = mx.random.normal((1, OUTPUTS, INPUTS), key=mx.random.key(0))
        packed = mx.quantize(w, GROUP, b)
        whole = np.array(mx.dequantize(*packed, GROUP, b)[0])
        made = quantized.Matrices(*map(np.asarray, packed), GROUP, b)
        for r in rows:
            x = mx.random.normal((r, INPUTS), key=mx.random.key(1))
            x_np = np.array(x)
            calls = {
                "fast": partial(made.multiply, x_np),
                "mlx": partial(_mlx, x, [p[0] for p in packed], b),
                "numpy": partial(np.matmul, x_np, whole.T),
            }
            np.testing.assert_allclose(calls["fast"](), calls["mlx"](), rtol=1e-3, atol=1e-2)
            for name, call in calls.items():
                variants[name, b, r] = records.timed(call, variant=name, bits=b, rows=r)
    made = records.interleave("kernels", variants, rounds, progress=False)
    return records.as_json(made.assign(threads=code.num_threads()))["rows"]


def _mlx(x, matrix, bits):
    y = mx.quantized_matmul(x, *matrix, transpose=True, group_size=GROUP, bits=bits)
    mx.eval(y)
    return y


def texts(
    path: str | Path | None = None,
    num: int = 20,
    tokens: int = 300,
    prompt_tokens: int = 64,
    windows: int = 64,
) -> "DataFrame":
    """Compare the texts that a model writes with both kernels, and how well it predicts others.

    Both are fed the text that MLX's kernels write greedily, so that each token is compared after
    the same ones. The fast kernels stream through 16 slots, MLX's have every expert in memory.
    """
    path = shipped("models", "tiny-moe") if path is None else Path(path)
    settings = {"model": path.name, "tokens": tokens, "windows": windows}
    running, models = records.Running("kernels_texts", settings), {}
    configs = {"mlx": StreamConfig(mode="resident", kernels="mlx"), "fast": StreamConfig(slots=16)}
    for name, config in configs.items():
        models[name], tokenizer = load(path, replace(config, kernels=name))
    rows = []
    for i, prompt in enumerate(heldout_starts(path, num, prompt_tokens, tokenizer)):
        caches = {name: make_prompt_cache(model) for name, model in models.items()}
        ids, row = tokenizer.encode(prompt), {"difference": 0.0, "parted": [], "gaps": []}
        for position in tqdm(range(tokens), desc=f"text {i + 1} of {num}", leave=False):
            fast, mlx = (
                np.array(models[name](mx.array([ids]), cache=caches[name])[0, -1])
                for name in ("fast", "mlx")
            )
            row["difference"] = max(row["difference"], np.abs(fast - mlx).max() / mlx.std())
            if fast.argmax() != mlx.argmax():
                second, first = np.sort(mlx)[-2:]
                row["parted"].append(position)
                row["gaps"].append(float((first - second) / mlx.std()))
            ids = [int(mlx.argmax())]
        rows.append({"variant": "fast", "text": i} | row)
    files = heldout_files(path / "heldout")
    cut = quality.windows(tokenizer, list(files.values()), 256, windows)
    scores = {name: quality.score(model, cut).bits_per_byte for name, model in models.items()}
    return running.table([{"variant": n, "bits_per_byte": b} for n, b in scores.items()] + rows)


def main(work: str, out: str) -> None:
    """Write a record of ``products`` or ``texts``."""
    works = {"products": products, "texts": texts}
    if work not in works:
        raise ValueError(f"kernels: expected {' or '.join(works)}, got {work!r}")
    records.print_and_save("", works[work](), out)
