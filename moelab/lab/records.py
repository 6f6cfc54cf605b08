"""Figures that were not measured here and now: recorded runs in ``data/results``, and published ones with their source."""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from .. import DATA
from .timing import Timing

# tok/s unless the name says otherwise; what the sources say of their own runs, not checked by us.
PUBLISHED = {
    "PR 26": {
        "source": "SwiftLM PR 26, Qwen3.5-122B-A10B 4-bit, M1 Ultra 64 GB",
        "serial, top-8": 0.58, "buffers, top-8": 4.95, "buffers, top-6": 5.20, "buffers, top-4": 5.91, "buffers, top-2": 6.52,
        "resident memory (GB)": 10.6, "SSD rate of the original (GB/s)": 0.3, "SSD rate possible (GB/s)": 5.0, "ms of GPU in a token": 190.0,
    },
    "PR 90": {
        "source": "SwiftLM PR 90, Qwen3.5-122B-A10B 4-bit, top-6, 16 slots, M1 Ultra 64 GB",
        "buffers": 5.12, "stacked": 5.92, "fused": 5.64, "stacked, by its own percentage": 5.12 * 1.046, "one dispatch (us)": 30.0,
    },
    "issue 124": {
        "source": "mlx-swift-lm issue 124, M4 Max 96 GB",
        "dense, Python": 70.2, "dense, Swift": 52.8, "moe, Python": 85.1, "moe, Swift": 11.7, "dense layers": 36, "moe layers": 40,
    },
    "Anemll": {
        "source": "anemll-flash-mlx, Qwen3.5-35B-A3B 4-bit, top-4, M5 Max 128 GB",
        "resident": 94.5, "16 slots": 17.1, "64 slots": 42.8, "128 slots": 47.1,
    },
}  # fmt: skip


def recorded(name):
    """A record of ``data/results/NAME.json``."""
    path = DATA / "results" / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such record; there are {', '.join(sorted(p.stem for p in path.parent.glob('*.json'))) or 'none'}"
        )
    return json.loads(path.read_text())


def samples(timings):
    """``{name: array of seconds}`` of timings, fresh or recorded."""
    return {
        n: np.asarray(t["samples_s"] if isinstance(t, dict) else t.samples_s)
        for n, t in timings.items()
    }


def median(timings, name):
    """Median seconds of one variant."""
    return float(np.median(samples(timings)[name]))


def token_s(bench_record, mode):
    """Seconds a decoded token took in each round of a bench."""
    return (
        np.array([s["decode_s"] for s in bench_record["modes"][mode]["samples"]])
        / bench_record["tokens"]
    )


def reads_GBs(reads_record, kind="experts"):
    """``{reader: (depths, samples in GB/s for each depth)}`` of a reads record."""
    out = {}
    for s in reads_record["samples"]:
        if s["kind"] == kind:
            out.setdefault(s["by"], {}).setdefault(s["depth"], []).append(s["bytes_per_s"] / 1e9)
    return {by: (sorted(d), [d[k] for k in sorted(d)]) for by, d in out.items()}


def save(path, record):
    """Write a record (dicts, lists, numbers, ``Timing``) as JSON; the old file stays until the new one is whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1, default=_plain) + "\n")
    os.replace(partial, path)


def check_writable(path):
    """Whether ``save`` could write a file; none is made.

    Raises:
        ValueError: If not.
    """
    path = Path(path)
    parent = next((p for p in path.absolute().parents if os.path.lexists(p)), Path("/"))
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is there and is no plain file")
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ValueError(
            f"json {str(path)!r}: expected a file that can be written, "
            f"but {error.strerror or error}. Name another."
        ) from error


def _plain(value):
    if isinstance(value, Timing):
        return asdict(value)
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    return str(value)
