"""The fast kernels beside MLX's: what a product takes, and whether both write the same texts.

    python -m moelab.lab kernels products OUT.json        (on Linux)
    python -m moelab.lab kernels texts OUT.json

Each number of threads is measured in a process of its own that may use as many cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ... import StreamConfig, load
from ...kernels import code, quantized
from ...shipped import shipped
from .. import machine, quality, records
from ..texts import heldout_files, heldout_starts
from ..timing import interleave

OUTPUTS, INPUTS, GROUP = 4096, 2048, 64  # 8.4 M weights, as in the 35B's attention
ROWS, BITS = (1, 2, 4, 8, 16, 64, 128), (4, 8)
ROUNDS = 9
COPIED_NBYTES = 256 * 1024 * 1024  # larger than every cache


def products(bits: int, rows: int, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of ``x [rows, D]`` with a matrix ``[N, D]``, by what computes it.

    Args:
        bits (int): Of a weight.
        rows (int): Of x.
        rounds (int): Samples of each.

    Returns:
        dict[str, list[float]]: ``fast``, ``mlx``, and ``numpy`` on the dequantized matrix.
    """
    w = mx.random.normal((1, OUTPUTS, INPUTS), key=mx.random.key(0))
    packed = mx.quantize(w, GROUP, bits)
    floats = mx.dequantize(*packed, GROUP, bits)[0]
    x = mx.random.normal((rows, INPUTS), key=mx.random.key(1))
    mx.eval(packed, floats, x)
    made = quantized.Matrices(*map(np.asarray, packed), GROUP, bits)
    whole, x_np = np.array(floats), np.array(x)
    one_matrix = [p[0] for p in packed]

    def fast():
        return made.multiply(x_np)

    def mlx():
        y = mx.quantized_matmul(x, *one_matrix, transpose=True, group_size=GROUP, bits=bits)
        mx.eval(y)
        return y

    np.testing.assert_allclose(fast(), np.array(mlx()), rtol=1e-3, atol=1e-2)
    timed = interleave({"fast": fast, "mlx": mlx, "numpy": lambda: x_np @ whole.T}, rounds)
    return {name: list(t.samples_s) for name, t in timed.items()}


def copy_rate(rounds: int = ROUNDS) -> list[float]:
    """The rate of a copy in memory: bytes read in a second. It writes as many."""
    source, to = np.ones(COPIED_NBYTES, np.uint8), np.empty(COPIED_NBYTES, np.uint8)
    timed = interleave({"copy": lambda: np.copyto(to, source)}, rounds)
    return [COPIED_NBYTES / s for s in timed["copy"].samples_s]


def measure(rounds: int = ROUNDS) -> dict:
    """All of them with the cores that this process may use."""
    return {
        "threads": code.num_threads(),
        "copy_bytes_per_s": copy_rate(rounds),
        "seconds": {
            str(bits): {str(rows): products(bits, rows, rounds) for rows in ROWS} for bits in BITS
        },
    }


def texts(
    path: str | Path | None = None,
    num: int = 20,
    tokens: int = 300,
    prompt_tokens: int = 64,
    windows: int = 64,
) -> dict:
    """Whether a model writes the same with both kernels, and predicts held-out text as well.

    Both are fed the text that MLX's kernels write greedily, so that each token is compared after
    the same ones. The fast kernels stream through 16 slots, MLX's have every expert in memory.

    Args:
        path (str or Path): A model with held-out text. Default: tiny-moe.
        num (int): Texts.
        tokens (int): Of each.
        prompt_tokens (int): Held-out tokens before them.
        windows (int): Of 256 tokens, for the bits per byte.

    Returns:
        dict: ``texts``: of each the ``difference``, the largest of a logit over the logits'
        standard deviation, and ``parted``, for every token that is another one its ``position``
        and the ``gap`` of MLX's two best logits, over the same. ``bits_per_byte`` by kernels.
    """
    path = shipped("models", "tiny-moe") if path is None else path
    configs = {"mlx": StreamConfig(mode="resident", kernels="mlx"), "fast": StreamConfig(slots=16)}
    models = {}
    for name, config in configs.items():
        models[name], tokenizer = load(path, replace(config, kernels=name))
    found = []
    for prompt in tqdm(heldout_starts(path, num, prompt_tokens, tokenizer), unit="text"):
        caches = {name: make_prompt_cache(model) for name, model in models.items()}
        ids, difference, parted = tokenizer.encode(prompt), 0.0, []
        for position in range(tokens):
            logits = {
                name: np.array(model(mx.array([ids]), cache=caches[name])[0, -1])
                for name, model in models.items()
            }
            mlx, std = logits["mlx"], logits["mlx"].std()
            difference = max(difference, float(np.abs(logits["fast"] - mlx).max() / std))
            if logits["fast"].argmax() != mlx.argmax():
                second, first = np.sort(mlx)[-2:]
                parted.append({"position": position, "gap": float((first - second) / std)})
            ids = [int(mlx.argmax())]
        found.append({"difference": difference, "parted": parted})
    cut = quality.windows(
        tokenizer, list(heldout_files(Path(path) / "heldout").values()), 256, windows
    )
    return {
        "kind": "kernels_texts",
        "machine": machine.card(),
        "model": Path(path).name,
        "tokens": tokens,
        "texts": found,
        "windows": len(cut),
        "bits_per_byte": {n: quality.score(m, cut).bits_per_byte for n, m in models.items()},
    }


def products_by_threads() -> dict:
    """``measure`` with one thread and with all cores."""
    cores = sorted(os.sched_getaffinity(0))
    runs = []
    for n in sorted({1, len(cores)}):
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "part.json"
            program = (
                f"import os; os.sched_setaffinity(0, {cores[:n]}); "
                "from moelab.lab import records; from moelab.lab.experiments import kernels; "
                f"records.save({str(part)!r}, kernels.measure())"
            )
            # numpy's BLAS otherwise keeps its threads spinning, on the cores of what comes next.
            blas = {"OPENBLAS_NUM_THREADS": str(n), "OPENBLAS_THREAD_TIMEOUT": "4"}
            subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | blas)
            runs.append(json.loads(part.read_text()))
    return {
        "kind": "kernels",
        "machine": machine.card(),
        "outputs": OUTPUTS,
        "inputs": INPUTS,
        "group_size": GROUP,
        "runs": runs,
    }


def main(work: str, out: str) -> None:
    """Write a record of the kernels.

    Args:
        work (str): ``products`` or ``texts``.
        out (str): The record.
    """
    records.save(out, {"products": products_by_threads, "texts": texts}[work]())
