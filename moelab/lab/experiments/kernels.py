"""How long a quantized product takes on a CPU: with the fast kernels, with MLX's and with numpy.

    python -m moelab.lab.experiments.kernels OUT.json        (on Linux)

Each number of threads is measured in a process of its own that may use as many cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...kernels import code, quantized
from .. import machine, records
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
    """Bytes a second read by a copy in memory that writes as many."""
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


def main(out: str) -> None:
    """Writes ``data/results/cpu_kernels.json``."""
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
    record = {
        "kind": "kernels",
        "machine": machine.card(),
        "outputs": OUTPUTS,
        "inputs": INPUTS,
        "group_size": GROUP,
        "runs": runs,
    }
    records.save(out, record)


if __name__ == "__main__":
    main(sys.argv[1])
