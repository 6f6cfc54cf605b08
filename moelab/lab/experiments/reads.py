"""Whole experts read cold through the engine's reader, against fio on the same file."""

import dataclasses
import json
import random
import shutil
import subprocess
import time
from pathlib import Path

from mlx_lm.utils import load_model
from tqdm import tqdm

from ...checkpoint import Checkpoint, expert_modules, locate_experts
from ...streaming.reader import Read, Reader
from ...streaming.slots import ranges
from .. import machine, timing
from ..models import folder


def bench_reads(
    path,
    depths=(1, 4, 8),
    nbytes=256 << 20,
    rounds=3,
    cold=True,
    with_fio=True,
    kinds=("experts", "experts, 32 a call", "weights"),
    seed=0,
    progress=True,
):
    """Whole experts read through the engine's ``Reader``, against fio with the same sizes and depth on the same file.

    ``experts`` are all parts of each expert, what lies together at once, as streaming reads them (large weights and small scales, or
    one piece where the model is packed), eight experts a call, as a layer asks for them; ``32 a call`` as a prompt does, which
    waits less often for the last; ``weights`` are the weights alone. fio never waits: it runs with threads that each read one block at a time, through the page
    cache as we do (``buffered``) and past it (``direct``, blocks rounded to 4 KiB). Both start with the file's pages
    dropped, unless ``cold`` is false: then they are all there, and fio is left out.

    Returns:
        dict: Bytes per second, all rounds, by kind, depth and reader (``moelab``, ``fio buffered``, ``fio direct``).
    """
    path = folder(path)
    checkpoint = Checkpoint(path)
    model, _ = load_model(path, lazy=True, get_model_classes=checkpoint.model_classes)
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
                    [t for t in parts if kind != "weights" or t.name.endswith("weight")]
                    for parts in layers.values()
                ]
                keep = [_pieces(parts) for parts in keep]
                sizes = sorted({t.nbytes for parts in keep for t in parts})
                record["block_sizes"][kind] = sizes
                if who == "moelab":
                    a_call = 32 if "32" in kind else 8
                    speed = _read_experts(file, keep, depth, nbytes, order, cold, a_call)
                else:
                    speed = _fio(
                        fio,
                        file,
                        keep[0],
                        depth,
                        nbytes,
                        who == "fio direct",
                        order.randrange(1 << 30),
                    )
                record["samples"].append(
                    {"round": i, "kind": kind, "depth": depth, "by": who, "bytes_per_s": speed}
                )
                bar.update()
    return record


def _largest(files):
    return max(set(files), key=lambda f: f.stat().st_size)


def _pieces(parts):
    """What lies together on disk as one tensor."""
    by_name = {t.name: t for t in parts}
    return [
        dataclasses.replace(by_name[names[0]], nbytes=sum(by_name[n].nbytes for n in names))
        for names in ranges(by_name)
    ]


def _read_experts(file, layers, depth, nbytes, order, cold, a_call):
    """Bytes per second of distinct experts in random order, ``a_call`` of them in each call."""
    places = [(parts, e) for parts in layers for e in range(len(parts[0].offsets))]
    order.shuffle(places)
    one = max(sum(t.nbytes for t in parts) for parts in layers)
    places = places[: max(a_call, nbytes // one)]
    buffers = [memoryview(bytearray(one)) for _ in range(a_call)]
    for view in buffers:
        view[::4096] = b"\0" * len(view[::4096])  # the memory is there before the clock starts
    reader = Reader(depth)
    try:
        opened = reader.open(file)
        if cold:
            machine.drop_pages(file)
        begin = time.perf_counter()
        for first in range(0, len(places), a_call):
            reads = []
            for (parts, e), view in zip(places[first : first + a_call], buffers):
                for t in parts:
                    reads.append(
                        Read(opened, t.offsets[e], t.nbytes, [view[: t.nbytes]], t.name, e)
                    )
                    view = view[t.nbytes :]
            reader.read(reads)
        return reader.nbytes / (time.perf_counter() - begin)
    finally:
        reader.close()


def _fio(fio, file, parts, depth, nbytes, direct, seed):
    """Bytes per second of fio's random reads with the same mix of sizes, ``depth`` threads of one read each."""
    sizes = [-(-t.nbytes // 4096) * 4096 for t in parts]
    split = {s: 100 * sizes.count(s) // len(sizes) for s in sorted(set(sizes))}
    split[max(split)] += 100 - sum(split.values())
    part = (
        file.stat().st_size // depth // max(sizes) * max(sizes)
    )  # each thread's own, so that none finds another's in the cache
    command = [
        fio, "--name=moelab", f"--filename={file.resolve()}", "--readonly", "--rw=randread", "--ioengine=psync", "--thread",
        f"--numjobs={depth}", f"--direct={int(direct)}", "--invalidate=1", "--group_reporting", "--output-format=json",
        f"--size={part}", f"--offset_increment={part}", f"--io_size={nbytes // depth}", f"--randseed={seed}", "--randrepeat=0",
        "--bssplit=" + ":".join(f"{s}/{p}" for s, p in split.items()), "--fadvise_hint=1",
    ]  # fmt: skip
    if (
        len(split) > 1
    ):  # of one size it can read every block once, as we do; of several it may read one again, from the cache
        command += ["--blockalign=4096", "--norandommap"]
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
            **{
                f"of {who}": timing.paired_ratio(by["moelab"], v)["median"]
                for who, v in by.items()
                if who != "moelab"
            },
        }
        for key, by in out.items()
    }


def report_reads(record):
    lines = [machine.card_line(record["machine"])]
    lines.append(
        f"{record['model']}/{record['file']}, {record['cache_state']}, {record['nbytes_a_run'] / 1e6:.0f} MB a run; GB/s, median [quartiles]"
    )
    if not record["fio"] and record["cache_state"] == "cold":
        lines.append(
            "fio is not installed (Debian: apt-get install fio), so there is nothing to compare with"
        )
    for (kind, depth), row in sorted(summarize_reads(record).items()):
        parts = [
            f"{who} {s['median'] / 1e9:.2f} [{s['p25'] / 1e9:.2f} - {s['p75'] / 1e9:.2f}]"
            for who, s in row.items()
            if isinstance(s, dict)
        ]
        parts += [
            f"{who.replace('of', 'moelab is')} x {r:.2f}"
            for who, r in row.items()
            if not isinstance(r, dict)
        ]
        lines.append(
            f"{kind} of {'+'.join(str(b // 1024) for b in record['block_sizes'][kind])} KiB, depth {depth}: "
            + "; ".join(parts)
        )
    return "\n".join(lines)
