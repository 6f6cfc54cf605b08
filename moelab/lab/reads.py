"""Whole experts read cold through the engine's reader, against fio on the same file."""

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

from mlx_lm.utils import load_model
from tqdm import tqdm

from ..checkpoint import Checkpoint, expert_modules, locate_experts
from ..streaming.reader import Read, Reader
from . import machine, timing
from .bench import folder


def bench_reads(
    path,
    depths=(1, 4, 8),
    nbytes=256 << 20,
    rounds=3,
    cold=True,
    with_fio=True,
    kinds=("experts", "weights"),
    seed=0,
    progress=True,
):
    """Whole experts read through the engine's ``Reader``, against fio with the same sizes and depth on the same file.

    Two kinds of reads: ``experts`` (all parts of each expert, as streaming reads them: large weights and small scales) and
    ``weights`` (the weights alone, one size). fio runs with threads that each read one block at a time, through the page
    cache as we do (``buffered``) and past it (``direct``, blocks rounded to 4 KiB). Both start with the file's pages
    dropped, unless ``cold`` is false: then they are all there, and fio is left out.

    Returns:
        dict: Bytes per second, all rounds, by kind, depth and reader (``moelab``, ``fio buffered``, ``fio direct``).
    """
    path = folder(path)
    checkpoint = Checkpoint(path)
    model, _ = load_model(path, lazy=True)
    located = locate_experts(model, checkpoint)
    if not located:
        raise ValueError(f"{path}: no experts that can be read in place")
    file = _largest(t.files[0] for t in located.values())
    tensors = {n: t for n, t in located.items() if t.files[0] == file}
    layers = {}
    for path_of_layer, _ in expert_modules(model):
        parts = [t for n, t in tensors.items() if n.startswith(path_of_layer + ".")]
        if parts:
            layers[path_of_layer] = parts
    fio = shutil.which("fio") if cold and with_fio else None
    plan = []
    for kind in kinds:
        for depth in depths:
            plan.append((kind, depth, "moelab"))
            if fio:
                plan += [(kind, depth, "fio buffered"), (kind, depth, "fio direct")]
    record = {
        "kind": "reads", "model": Path(path).name, "file": file.name, "machine": machine.card(), "cache_state": "cold" if cold else "warm",
        "fio": bool(fio), "nbytes_a_run": nbytes, "block_sizes": {}, "samples": [],
    }  # fmt: skip
    order = random.Random(seed)
    bar = tqdm(total=rounds * len(plan), desc="reads", leave=False, disable=not progress)
    with bar:
        for i in range(rounds):
            for kind, depth, who in order.sample(plan, len(plan)):
                keep = [
                    [t for t in parts if kind == "experts" or t.name.endswith("weight")] for parts in layers.values()
                ]
                sizes = sorted({t.nbytes for parts in keep for t in parts})
                record["block_sizes"][kind] = sizes
                if who == "moelab":
                    speed = _read_experts(file, keep, depth, nbytes, order, cold)
                else:
                    speed = _fio(fio, file, keep[0], depth, nbytes, who == "fio direct", order.randrange(1 << 30))
                record["samples"].append({"round": i, "kind": kind, "depth": depth, "by": who, "bytes_per_s": speed})
                bar.update()
    return record


def _largest(files):
    return max(set(files), key=lambda f: f.stat().st_size)


def _read_experts(file, layers, depth, nbytes, order, cold):
    """Bytes per second of distinct experts in random order, eight a call, as a layer asks for them."""
    places = [(parts, e) for parts in layers for e in range(len(parts[0].offsets))]
    order.shuffle(places)
    one = sum(t.nbytes for t in layers[0])
    places = places[: max(8, nbytes // one)]
    buffers = [[memoryview(bytearray(t.nbytes)) for t in layers[0]] for _ in range(8)]
    for views in buffers:
        for v in views:
            v[::4096] = b"\0" * len(v[::4096])  # the memory is there before the clock starts
    reader = Reader(depth)
    try:
        opened = reader.open(file)
        if cold:
            machine.drop_pages(file)
        begin = time.perf_counter()
        for first in range(0, len(places), 8):
            reads = [
                Read(opened, t.offsets[e], t.nbytes, [view], t.name, e)
                for (parts, e), views in zip(places[first : first + 8], buffers)
                for t, view in zip(parts, views)
            ]
            reader.read(reads)
        return reader.nbytes / (time.perf_counter() - begin)
    finally:
        reader.close()


def _fio(fio, file, parts, depth, nbytes, direct, seed):
    """Bytes per second of fio's random reads with the same mix of sizes, ``depth`` threads of one read each."""
    sizes = [-(-t.nbytes // 4096) * 4096 for t in parts]
    split = {s: 100 * sizes.count(s) // len(sizes) for s in sorted(set(sizes))}
    split[max(split)] += 100 - sum(split.values())
    command = [
        fio, "--name=moelab", f"--filename={file.resolve()}", "--readonly", "--rw=randread", "--ioengine=psync", "--thread",
        f"--numjobs={depth}", f"--direct={int(direct)}", "--invalidate=1", "--group_reporting", "--output-format=json",
        f"--size={file.stat().st_size // 4096 * 4096}", f"--io_size={nbytes // depth}", f"--randseed={seed}", "--randrepeat=0",
        "--bssplit=" + ":".join(f"{s}/{p}" for s, p in split.items()), "--blockalign=4096", "--norandommap", "--fadvise_hint=1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"fio failed: {done.stderr.strip() or done.stdout.strip()[-300:]}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def summarize_reads(record):
    """``{(kind, depth): {by: summary, "ratio to fio buffered": ..., ...}}``."""
    out = {}
    for s in record["samples"]:
        out.setdefault((s["kind"], s["depth"]), {}).setdefault(s["by"], []).append(s["bytes_per_s"])
    return {
        key: {
            **{who: timing.summary(v) for who, v in by.items()},
            **{f"of {who}": timing.paired_ratio(by["moelab"], v)["median"] for who, v in by.items() if who != "moelab"},
        }
        for key, by in out.items()
    }


def report_reads(record):
    lines = [machine.card_line(record["machine"])]
    lines.append(
        f"{record['model']}/{record['file']}, {record['cache_state']}, {record['nbytes_a_run'] / 1e6:.0f} MB a run; GB/s, median [quartiles]"
    )
    if not record["fio"] and record["cache_state"] == "cold":
        lines.append("fio is not installed (Debian: apt-get install fio), so there is nothing to compare with")
    for (kind, depth), row in sorted(summarize_reads(record).items()):
        parts = [
            f"{who} {s['median'] / 1e9:.2f} [{s['p25'] / 1e9:.2f} - {s['p75'] / 1e9:.2f}]"
            for who, s in row.items()
            if isinstance(s, dict)
        ]
        parts += [f"{who.replace('of', 'moelab is')} x {r:.2f}" for who, r in row.items() if not isinstance(r, dict)]
        lines.append(
            f"{kind} of {'+'.join(str(b // 1024) for b in record['block_sizes'][kind])} KiB, depth {depth}: "
            + "; ".join(parts)
        )
    return "\n".join(lines)
