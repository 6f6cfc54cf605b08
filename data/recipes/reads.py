"""Time cold reads of whole experts by the engine's reader, against fio on the same file.

    python data/recipes/reads.py OUT.json MODEL DEPTHS MEGABYTES ROUNDS

DEPTHS are numbers of reads in flight, as in ``1,4,8``; MEGABYTES are read in each run. As in
streaming, a call reads all parts of eight experts, adjacent parts in one read. If fio is installed,
fio reads with the same sizes and depth without a pause: each of its threads reads one block at a
time, past the page cache. Blocks are rounded to pages.
"""

import json
import random
import shutil
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from itertools import product

from moelab import StreamConfig
from moelab.lab import machine, records
from moelab.lab.models import folder
from moelab.streaming.facts import ModelFacts
from moelab.streaming.reading.native import huge_pages
from moelab.streaming.reading.ranges import Ranges
from moelab.streaming.reading.reader import Reader
from moelab.streaming.residency.bank import ranges

A_CALL = 8  # experts in a call
PAGE_NBYTES = 4096  # fio's direct reads are rounded to pages of this many bytes


def bench_reads(path, depths, nbytes, rounds):
    """Read whole experts with each reader; a row is a run."""
    path, fio = folder(path), shutil.which("fio")
    file, layers = _experts_of_largest_file(path)
    sizes = sorted({n for of in layers for _, n in of})
    settings = {"model": path.name, "file": file.name, "cache_state": "cold", "fio": bool(fio)}
    settings |= {"nbytes_a_run": nbytes, "block_sizes": sizes}

    def run(by, depth, i):
        order = random.Random(f"0, {i}")
        if by == "moelab":
            speed = _read_experts(file, layers, depth, nbytes, order)
        else:
            speed = _fio(fio, file, layers[0], depth, nbytes, order.randrange(1 << 30))
        return {"reader": by, "kind": "experts", "depth": depth, "bytes_per_s": speed}

    variants = {
        f"{by}, experts, {depth} in flight": partial(run, by, depth)
        for by, depth in product(("moelab", "fio direct") if fio else ("moelab",), depths)
    }
    return records.interleave("reads", variants, rounds, settings, 0, progress=True)


def _experts_of_largest_file(path):
    """Return the largest file with experts, and the parts of each layer's experts in the file."""
    parameters = {}
    for name, t in ModelFacts.of(path, StreamConfig()).located.items():
        parameters.setdefault(name.rsplit(".", 2)[0], {})[name] = t
    layers = [
        [(of[names[0]], sum(of[n].nbytes for n in names)) for names in ranges(of)]
        for of in parameters.values()
    ]
    file = max({t.files[0] for of in layers for t, _ in of}, key=lambda f: f.stat().st_size)
    here = ([(t, n) for t, n in of if t.files[0] == file] for of in layers)
    return file, [of for of in here if of]


def _read_experts(file, layers, depth, nbytes, order):
    """Read distinct experts in random order; return bytes per second."""
    places = [(of, e) for of in layers for e in range(len(of[0][0].offsets))]
    order.shuffle(places)
    one = max(sum(n for _, n in of) for of in layers)
    places = places[: max(A_CALL, nbytes // one)]
    memory = huge_pages(A_CALL * one)
    memory[::PAGE_NBYTES] = bytes(len(memory[::PAGE_NBYTES]))  # maps pages before the clock starts
    with closing(Reader(depth)) as reader:
        opened, seconds = reader.open(file), 0
        machine.drop_pages(file)
        for first in range(0, len(places), A_CALL):
            reads, at = [], 0
            for of, e in places[first : first + A_CALL]:
                for t, n in of:
                    reads.append((opened, t.offsets[e], [memory[at : at + n]]))
                    at += n
            call, begin = Ranges.of(reads), time.perf_counter()
            reader.read(call)
            seconds += time.perf_counter() - begin
        return reader.nbytes / seconds


def _fio(fio, file, pieces, depth, nbytes, seed):
    """Run fio's random reads of these sizes in ``depth`` threads; return bytes per second."""
    sizes = [-(-n // PAGE_NBYTES) * PAGE_NBYTES for _, n in pieces]
    split = {s: 100 * sizes.count(s) // len(sizes) for s in sorted(set(sizes))}
    split[max(split)] += 100 - sum(split.values())
    # Each thread has its own part of the file, so that no thread reads another's blocks again.
    part = file.stat().st_size // depth // max(sizes) * max(sizes)
    words = f"""--name=moelab --readonly --thread --group_reporting --output-format=json
        --rw=randread --ioengine=psync --numjobs={depth} --direct=1 --invalidate=1 --fadvise_hint=1
        --size={part} --offset_increment={part} --io_size={nbytes // depth} --randseed={seed}
        --randrepeat=0 --bssplit={":".join(f"{s}/{p}" for s, p in split.items())}"""
    command = [fio, f"--filename={file.resolve()}", *words.split()]
    if len(split) > 1:
        # With one size fio can read every block once, as we do. With several sizes it may read a
        # block again.
        command += [f"--blockalign={PAGE_NBYTES}", "--norandommap"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return float(json.loads(said[said.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def main(out, path, depths, megabytes, rounds):
    made = bench_reads(path, [*map(int, depths.split(","))], int(megabytes) << 20, int(rounds))
    told = records.group(made, "bytes_per_s") / 1e9
    records.print_and_save(told.round(2).to_string(), made, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
