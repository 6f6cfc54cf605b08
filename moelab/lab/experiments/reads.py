"""Whole experts read cold through the engine's reader, against fio on the same file."""

import argparse
import json
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoint import Checkpoint, mlx_lm_model
from ...commands.argument_types import positive
from ...commands.arguments import add_model, add_number
from ...experts import expert_modules, locate_experts
from ...streaming.reading.ranges import Ranges
from ...streaming.reading.reader import Reader
from ...streaming.residency.bank import ranges
from .. import machine, oscache, records
from ..arguments import add_json, several
from ..cite import q
from ..models import folder

if TYPE_CHECKING:
    from pandas import DataFrame

EXPERTS, MANY_EXPERTS, WEIGHTS = "experts", "experts, 32 a call", "weights"
A_CALL = {EXPERTS: 8, MANY_EXPERTS: 32, WEIGHTS: 8}  # experts read in each call, by kind
PAGE_NBYTES = 4096  # fio's direct reads are rounded to pages of so many bytes
MOELAB, FIO_BUFFERED, FIO_DIRECT = "moelab", "fio buffered", "fio direct"


def bench_reads(
    path: str | Path,
    depths: Sequence[int] = (1, 4, 8),
    nbytes: int = 256 << 20,
    rounds: int = 3,
    cold: bool = True,
    with_fio: bool = True,
    kinds: Sequence[str] = (EXPERTS, MANY_EXPERTS, WEIGHTS),
    seed: int = 0,
    progress: bool = True,
) -> "DataFrame":
    """Read whole experts through the engine's ``Reader``, against fio on the same file.

    The kinds of reads:

    - ``experts``: all parts of each expert, parts that lie together in one read, as streaming reads
      them: large weights and small scales, or one piece where the model is packed. Eight experts
      in a call, as a layer asks for them.
    - ``experts, 32 a call``: as a prompt asks for them, so that fewer calls wait for a last read.
    - ``weights``: the weights alone.

    fio reads with the same sizes and depth and never waits: each thread reads one block at a time,
    through the page cache as we do (``buffered``) or past it (``direct``, blocks rounded to pages).
    Both start with the file's pages dropped, unless ``cold`` is false: then all are cached, and fio
    is left out.
    """
    path = folder(path)
    file, layers = _experts_of_largest_file(path)
    fio = shutil.which("fio") if cold and with_fio else None
    pieces = {
        kind: [
            _pieces([t for t in parts if kind != WEIGHTS or t.name.endswith("weight")])
            for parts in layers
        ]
        for kind in kinds
    }
    settings = {
        "model": path.name,
        "file": file.name,
        "cache_state": "cold" if cold else "warm",
        "fio": bool(fio),
        "nbytes_a_run": nbytes,
        "block_sizes": {
            kind: sorted({t.nbytes for parts in its for t in parts}) for kind, its in pieces.items()
        },
    }

    def run(by, kind, depth, i):
        order = random.Random(f"{seed}, {i}")
        if by == MOELAB:
            speed = _read_experts(file, pieces[kind], depth, nbytes, order, cold, A_CALL[kind])
        else:
            direct, fio_seed = by == FIO_DIRECT, order.randrange(1 << 30)
            speed = _fio(fio, file, pieces[kind][0], depth, nbytes, direct, fio_seed)
        return {"reader": by, "kind": kind, "depth": depth, "bytes_per_s": speed}

    readers = (MOELAB, FIO_BUFFERED, FIO_DIRECT) if fio else (MOELAB,)
    variants = {
        f"{by}, {kind}, {depth} in flight": partial(run, by, kind, depth)
        for by, kind, depth in product(readers, kinds, depths)
    }
    return records.interleave(
        "reads", variants, rounds, settings, 0 if cold else 1, seed, progress=progress
    )


def _experts_of_largest_file(path):
    """The largest file with experts, and the parts of each layer's experts in it."""
    checkpoint = Checkpoint(path)
    model, _ = mlx_lm_model(checkpoint)
    located = locate_experts(model, checkpoint)
    if not located:
        raise ValueError(f"{path}: no experts that can be read in place")
    file = max({t.files[0] for t in located.values()}, key=lambda f: f.stat().st_size)
    here = {name: t for name, t in located.items() if t.files[0] == file}
    layers = (
        [t for name, t in here.items() if name.startswith(layer + ".")]
        for layer, _ in expert_modules(model)
    )
    return file, [parts for parts in layers if parts]


def _pieces(parts):
    """Join parts that lie together on disk into one tensor."""
    by_name = {t.name: t for t in parts}
    return [
        replace(by_name[names[0]], nbytes=sum(by_name[n].nbytes for n in names))
        for names in ranges(by_name)
    ]


def _read_experts(file, layers, depth, nbytes, order, cold, a_call):
    """Bytes per second of distinct experts in random order, ``a_call`` of them in each call."""
    places = [(parts, e) for parts in layers for e in range(len(parts[0].offsets))]
    order.shuffle(places)
    one = max(sum(t.nbytes for t in parts) for parts in layers)
    places = places[: max(a_call, nbytes // one)]
    buffers = [memoryview(bytearray(one)) for _ in range(a_call)]
    for view in buffers:  # touch the memory, so that it is there before the clock starts
        view[::PAGE_NBYTES] = b"\0" * len(view[::PAGE_NBYTES])
    reader = Reader(depth)
    try:
        opened = reader.open(file)
        if cold:
            oscache.drop_pages(file)
        begin = time.perf_counter()
        for first in range(0, len(places), a_call):
            reads = []
            for (parts, e), view in zip(places[first : first + a_call], buffers):
                for t in parts:
                    reads.append((opened, t.offsets[e], [view[: t.nbytes]]))
                    view = view[t.nbytes :]
            reader.read(Ranges.of(reads))
        return reader.nbytes / (time.perf_counter() - begin)
    finally:
        reader.close()


def _fio(fio, file, parts, depth, nbytes, direct, seed):
    """Bytes per second of fio's random reads of these sizes, ``depth`` threads of one read each."""
    sizes = [-(-t.nbytes // PAGE_NBYTES) * PAGE_NBYTES for t in parts]
    split = {s: 100 * sizes.count(s) // len(sizes) for s in sorted(set(sizes))}
    split[max(split)] += 100 - sum(split.values())
    # Each thread has its own part, so that none finds another's blocks in the page cache.
    part = file.stat().st_size // depth // max(sizes) * max(sizes)
    command = [
        fio,
        "--name=moelab",
        f"--filename={file.resolve()}",
        "--readonly",
        "--rw=randread",
        "--ioengine=psync",
        "--thread",
        f"--numjobs={depth}",
        f"--direct={int(direct)}",
        "--invalidate=1",
        "--group_reporting",
        "--output-format=json",
        f"--size={part}",
        f"--offset_increment={part}",
        f"--io_size={nbytes // depth}",
        f"--randseed={seed}",
        "--randrepeat=0",
        "--bssplit=" + ":".join(f"{s}/{p}" for s, p in split.items()),
        "--fadvise_hint=1",
    ]
    if len(split) > 1:
        # With one size fio can read every block once, as we do. With several it may read a block
        # again, from the page cache.
        command += [f"--blockalign={PAGE_NBYTES}", "--norandommap"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"fio failed: {done.stderr.strip() or done.stdout.strip()[-300:]}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def report(samples: "DataFrame") -> str:
    """Write a line for each kind and depth."""
    s = samples.attrs["settings"]
    lines = [
        machine.card_line(samples.attrs["machine"]),
        f"{s['model']}/{s['file']}, {s['cache_state']}, {s['nbytes_a_run'] / 1e6:.0f} MB a run; "
        "GB/s, median [quartiles] of "
        f"{samples['round'].nunique()} rounds",
    ]
    if not s["fio"] and s["cache_state"] == "cold":
        lines.append("no comparison: fio is not installed (Debian: apt-get install fio)")
    for (kind, depth), rows in samples.groupby(["kind", "depth"]):
        rates = rows.pivot(index="round", columns="reader", values="bytes_per_s")
        parts = [f"{by} {q(rates[by], '.2f', 1e-9)}" for by in rates]
        for by in rates.columns.drop(MOELAB):
            parts.append(f"moelab is x {(rates[MOELAB] / rates[by]).median():.2f} {by}")
        sizes = "+".join(str(nbytes // 1024) for nbytes in s["block_sizes"][kind])
        lines.append(f"{kind} of {sizes} KiB, depth {depth}: {'; '.join(parts)}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Read whole experts cold through the engine's reader, against fio with the same sizes and "
        "depth if it is installed."
    )
    add_model(parser)
    parser.add_argument(
        "--depth",
        type=several(positive),
        default="1,4,8",
        help="reads in flight, divided by commas (default: %(default)s)",
    )
    add_number(parser, "--megabytes", 256, "read in each run")
    add_number(parser, "--runs", 3, "rounds")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    samples = bench_reads(args.model, args.depth, args.megabytes << 20, args.runs)
    records.print_and_save(report(samples), samples, args.json)
