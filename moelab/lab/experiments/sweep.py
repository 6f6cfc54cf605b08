"""Slots against the page cache, for real: one model under memory limits, slots swept from none to as many as fit.

Each point runs in a process of its own, limited before the model is loaded. There a trace chooses the experts, and three
things are measured after one another:

- ``cold``: the first tokens, with the file dropped from the page cache and every slot empty;
- ``reads``: tokens once the caches are full, the arithmetic left out. Slots, tables, reads, copies and the page cache are the
  engine's own; nothing is computed. It is what a device that computes in no time would see of the SSD;
- ``decode``: tokens with their arithmetic.

    python -m moelab.lab.experiments.sweep CHECKPOINT --limits 450,600,none --runs 5 --json FILE
"""

import argparse
import base64
import ctypes
import gc
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from ... import DATA, StreamConfig, close, footprint, load, stats
from ...replay import costs as cost
from ...replay import locality as routing
from ...streaming.layers import Buffers, Stacked
from ...streaming.model import session_of
from ...streaming.record import Trace, route_by
from .. import limit, machine, records, timing

PROCESS_NBYTES = 80_000_000  # the interpreter and MLX
SPARE_NBYTES = 70_000_000  # activations, the caches of a short text, the pages that are being read
TIMEOUT_S = 600


@dataclass(frozen=True)
class Point:
    """One setting of a sweep.

    Attributes:
        slots (int): S; 0 is no application cache at all, the mode ``buffers``.
        limit_nbytes (int, optional): Of process and page cache; None: no limit.
        policy (str): As in ``StreamConfig``.
        ahead (bool): Whether the system may read ahead of what is asked for.
        pinned_nbytes (int): Memory beside the slots for experts that never leave.
        pinned_by (str): The trace of ``data/traces`` that says which.
    """

    slots: int
    limit_nbytes: int | None = None
    policy: str = "lru"
    ahead: bool = False
    pinned_nbytes: int = 0
    pinned_by: str = ""

    @property
    def config(self):
        """The ``StreamConfig`` of this point."""
        if self.slots == 0:
            return StreamConfig(mode="buffers")
        file = DATA / "traces" / f"{self.pinned_by}.npz" if self.pinned_by else None
        return StreamConfig(
            mode="fused",
            slots=self.slots,
            policy=self.policy,
            pinned_nbytes=self.pinned_nbytes,
            pinned_trace=file,
        )

    def __str__(self):
        limit = "no limit" if self.limit_nbytes is None else f"{self.limit_nbytes / 1e6:.0f} MB"
        slots = "no slots" if self.slots == 0 else f"{self.slots} slots"
        slots += (
            f" and {self.pinned_nbytes / 1e6:.0f} MB pinned by {self.pinned_by}"
            if self.pinned_nbytes
            else ""
        )
        return (
            f"{limit}, {slots}"
            + ("" if self.policy == "lru" else f", {self.policy}")
            + (", read-ahead" if self.ahead else "")
        )


# In the process of a point


def bring(layer, experts):
    """Bring experts into a streamed layer's memory as a call of it would, and compute nothing.

    Args:
        layer (Stacked or Buffers): The layer.
        experts (list[int]): Distinct, at most S (or K).
    """
    if not isinstance(layer, (Stacked, Buffers)):
        raise TypeError(
            f"bring: expected a layer with slots or buffers, got {type(layer).__name__}."
        )
    layer.bring(experts)


def read_ahead(model, on):
    """Let the system read ahead in a model's files, or not; where it takes no advice (macOS) nothing changes."""
    if hasattr(os, "posix_fadvise"):
        for file in {f for t in session_of(model).located.values() for f in t.files}:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_NORMAL if on else os.POSIX_FADV_RANDOM)


def disk_nbytes():
    """Bytes that the disk has brought for this process so far; None where the system does not say."""
    try:
        with open("/proc/self/io") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("read_bytes"))
    except OSError:
        return None


def resident_nbytes(path):
    """Bytes of a file that are in the page cache, by ``mincore``; None where that cannot be known.

    Linux answers truly only to the file's owner and to who may write it.
    """
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    size = os.path.getsize(path)
    if (
        mincore is None
        or not size
        or not (os.stat(path).st_uid == os.geteuid() or os.access(path, os.W_OK))
    ):
        return None
    with open(path, "rb") as f:
        file = np.frombuffer(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    if mincore(*map(ctypes.c_void_p, (file.ctypes.data, size, pages.ctypes.data))):
        return None
    return min(size, int((pages & 1).sum()) * mmap.PAGESIZE)


def _anonymous_nbytes():
    m = psutil.Process().memory_info()
    return m.rss - getattr(m, "shared", 0)


def _timed(layers, rows):
    """Bring the experts of each row ``[L, K]``; what each took."""
    reader = layers[0].session.reader
    seconds, disk, asked, before = [], [], reader.nbytes, disk_nbytes()
    misses = layers[0].session.counters.misses
    for row in rows.tolist():
        begin = time.perf_counter()
        for layer, experts in zip(layers, row):
            bring(layer, list(dict.fromkeys(experts)))
        seconds.append(round(time.perf_counter() - begin, 7))
        now = disk_nbytes()
        disk.append(None if now is None else now - before)
        before = now
    return {
        "token_s": seconds,
        "disk_nbytes": disk,
        "asked_nbytes": reader.nbytes - asked,
        "misses": layers[0].session.counters.misses - misses,
    }


def measure(path, point, trace, start, cold, warmup, reads, decode):
    """Measure one point in this process, limited already.

    Args:
        path (str): A model folder.
        point (Point): The setting.
        trace (Trace): With the model's L, K and E.
        start (int): The row of the trace to begin with; it goes round.
        cold, warmup, reads, decode (int): Tokens of each part; ``warmup`` counts the cold ones.

    Returns:
        dict: ``cold``, ``reads`` and ``decode``, each with ``token_s``, ``disk_nbytes`` (by token), ``asked_nbytes`` and
        ``misses``; ``resident_nbytes`` of the file, ``anonymous_nbytes`` and ``rss_nbytes`` of the process after ``reads``,
        ``faults`` (pages of the process that had to be read again) during it, ``load_s``.
    """
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    files = sorted(Path(path).glob("*.safetensors"))
    rows = trace.experts[(start + np.arange(warmup + reads + decode + 4)) % len(trace)]
    begin = time.perf_counter()
    model, _ = load(path, point.config)
    out = {"load_s": time.perf_counter() - begin}
    layers = session_of(model).layers
    read_ahead(model, point.ahead)
    gc.collect()
    machine.drop_pages(path)
    out["resident_before_nbytes"] = _residency(files)
    out["cold"] = _timed(layers, rows[:cold])
    if point.limit_nbytes is None:
        for file in files:  # with memory for all of it, all of it will be there sooner or later
            with open(file, "rb", buffering=0) as f:
                while f.read(16 << 20):
                    pass
    _timed(layers, rows[cold:warmup])
    faults = _faults()
    out["reads"] = _timed(layers, rows[warmup : warmup + reads])
    out |= {
        "faults": _faults() - faults,
        "resident_nbytes": _residency(files),
        "anonymous_nbytes": _anonymous_nbytes(),
        "rss_nbytes": psutil.Process().memory_info().rss,
        "mlx_nbytes": mx.get_active_memory(),
    }
    if decode:
        rest = rows[warmup + reads :]
        left = Trace(
            rest, np.full(len(rest), "decode"), np.zeros(len(rest), np.int64), trace.num_experts
        )
        ends, disk, tokens = [], [], []
        with route_by(model, left):
            for token, _ in generate_step(mx.array([1]), model, max_tokens=decode + 3):
                if len(ends) == 2:
                    stats(model, reset=True)
                    asked = session_of(model).reader.nbytes
                ends.append(time.perf_counter())
                disk.append(disk_nbytes())
                tokens.append(int(token))
        c = stats(model).decode
        out["decode"] = {
            "token_s": [round(b - a, 6) for a, b in zip(ends[2:], ends[3:])],
            "disk_nbytes": [None if a is None else b - a for a, b in zip(disk[2:], disk[3:])],
            "asked_nbytes": session_of(model).reader.nbytes - asked,
            "misses": c.misses,
            "wait_s": c.wait_s,
            "tokens": tokens,
        }
    close(model)
    return out


def _residency(files):
    sizes = [resident_nbytes(f) for f in files]
    return None if None in sizes else sum(sizes)


def _faults():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


# In the process that asks


def points(path, limits, slots=None, policies=("lru",), ahead=False, count=7, pinned=()):
    """The points of a sweep.

    Args:
        path (str or Path): A model folder.
        limits (list[int or None]): Bytes, None for no limit.
        slots (list[int], optional): The same for every limit. Default: none, K, and more in even steps up to what fits;
            without a limit half as many, up to what fits under the largest one, or E.
        policies (tuple[str]): All but the first are measured at the middle and at the most slots of the largest limit only.
        ahead (bool): Whether to measure all points of the first policy under the largest limit with read-ahead, too.
        count (int): How many under one limit, if ``slots`` is not given.
        pinned (tuple[str]): Traces of ``data/traces``, of the model's L and E: for each a point that has the memory of the most slots,
            but K slots only, and in the rest the experts that the trace used most.

    Returns:
        list[Point]: By limit and slots.
    """
    sizes, out = sizes_of(path), []
    K = sizes["K"]
    most = max([fits(sizes, n) for n in limits if n is not None], default=sizes["E"])
    for limit_nbytes in limits:
        top, steps = (
            (most, count // 2) if limit_nbytes is None else (fits(sizes, limit_nbytes), count - 1)
        )
        if top < K:
            raise ValueError(
                f"{path}: expected a limit of at least {least_nbytes(sizes) / 1e6:.0f} MB (backbone, process, {K} slots, and some to "
                f"spare), got {limit_nbytes / 1e6:.0f} MB. Raise it."
            )
        mine = slots or [0, *np.unique(np.linspace(K, top, steps).astype(int)).tolist()]
        out += [Point(n, limit_nbytes, policies[0]) for n in mine]
        held = [n for n in mine if n > K]
        out += [
            Point(K, limit_nbytes, policies[0], False, (max(held) - K) * sizes["slot_nbytes"], by)
            for by in pinned
        ]
        if (
            held
            and limit_nbytes is not None
            and limit_nbytes == max(n for n in limits if n is not None)
        ):
            extra = sorted({held[len(held) // 2], held[-1]})
            out += [Point(n, limit_nbytes, policy) for policy in policies[1:] for n in extra]
            out += [Point(n, limit_nbytes, policies[0], True) for n in mine if ahead and n]
    return out


def made_up(path, like="code", T=640, seed=0):
    """A synthetic trace with a model's layers and experts, and the locality of a recorded one of tiny-moe.

    Args:
        path (str or Path): A model folder.
        like (str): Of ``data/traces``.
        T (int): Tokens.
        seed (int): Of the draw.

    Returns:
        Trace: ``[T, L, K]``.
    """
    feet = footprint(path)
    recorded = Trace.load(DATA / "traces" / f"{like}.npz")
    trace = routing.synthesize(
        routing.fit(recorded), T, feet.num_layers, feet.num_experts, feet.top_k, seed
    )
    return replace(trace, prompt=f"like {like}")


def trace_of(record):
    """The trace that a recorded sweep was driven by."""
    with tempfile.NamedTemporaryFile(suffix=".npz") as f:
        f.write(base64.b64decode(record["trace"]["npz"]))
        f.flush()
        return Trace.load(f.name)


def sizes_of(path):
    """What a model's memory is made of.

    Returns:
        dict: ``checkpoint_nbytes``, ``backbone_nbytes`` (in memory), ``expert_nbytes`` (on disk), ``slot_nbytes`` (one slot more in
        every layer), ``L``, ``E``, ``K``.
    """
    feet = footprint(path)
    return {
        "checkpoint_nbytes": feet.checkpoint_nbytes, "backbone_nbytes": feet.backbone_nbytes, "expert_nbytes": feet.expert_nbytes,
        "slot_nbytes": footprint(path, StreamConfig(slots=feet.top_k)).slots_nbytes // feet.top_k,
        "L": feet.num_layers, "E": feet.num_experts, "K": feet.top_k,
    }  # fmt: skip


def other_nbytes(sizes):
    """Bytes that the process takes beside its slots: backbone, interpreter, MLX."""
    return sizes["backbone_nbytes"] + PROCESS_NBYTES


def least_nbytes(sizes):
    """The smallest memory in which a model decodes."""
    return other_nbytes(sizes) + SPARE_NBYTES + sizes["K"] * sizes["slot_nbytes"]


def fits(sizes, limit_nbytes):
    """The most slots with which a model decodes in so much memory."""
    return int(
        min(sizes["E"], (limit_nbytes - other_nbytes(sizes) - SPARE_NBYTES) // sizes["slot_nbytes"])
    )


def sweep(
    path,
    points,
    trace,
    runs=5,
    cold=8,
    warmup=60,
    reads=44,
    decode=4,
    json_path=None,
    seconds=None,
    seed=0,
    ways=None,
    costs=False,
):
    """Measure every point ``runs`` times, each time in a new process, rounds in random order.

    What is in ``json_path`` already is not measured again, so a sweep that was interrupted goes on.

    Args:
        path (str or Path): A model folder.
        points (list[Point]): The settings.
        trace (Trace): With the model's L, K and E; round i begins at row ``i * len(trace) // runs``.
        runs (int): Rounds.
        cold, warmup, reads, decode (int): Tokens, as in ``measure``.
        json_path (str or Path, optional): Where the record is kept, after every run.
        seconds (float, optional): Begin nothing that is not likely to end within so many.
        seed (int): Of the orders.
        ways (tuple[str], optional): As for ``limit.run``.
        costs (bool): In every round, measure this machine's costs too (``cost.measure_costs``), for a replay.

    Returns:
        dict: The record; ``complete`` says whether all is there.

    Raises:
        ValueError: If ``json_path`` holds a sweep with other settings.
        limit.NoLimit: If memory cannot be limited here.
        OSError: If a run failed, and not because it ran out of memory.
    """
    begin, path = time.perf_counter(), Path(path)
    sizes = sizes_of(path)
    shape = tuple(sizes[n] for n in "LKE")
    if (*trace.experts.shape[1:], trace.num_experts) != shape:
        raise ValueError(f"sweep: expected a trace with L, K, E of {shape}, got {trace}.")
    settings = {
        "kind": "sweep", "model": path.name, "runs": runs, "cold": cold, "warmup": warmup, "reads": reads, "decode": decode, "seed": seed,
        "trace": {"name": str(trace), "like": trace.prompt, "seed": trace.seed, "npz": _packed(trace)}, "sizes": sizes,
    }  # fmt: skip
    record = {**settings, "machine": machine.card(), "costs": [], "samples": []}
    if json_path and Path(json_path).exists():
        record = json.loads(Path(json_path).read_text())
        wrong = [k for k in settings if record.get(k) != json.loads(json.dumps(settings[k]))]
        if wrong:
            raise ValueError(
                f"{json_path}: expected a sweep with the same {', '.join(wrong)}. Name another file, or remove it."
            )
    done = {(point_of(s), s["round"]) for s in record["samples"]} | {
        (None, c["round"]) for c in record["costs"]
    }
    killed = {point_of(s) for s in record["samples"] if s["killed"]}
    order, todo, what = random.Random(seed), [], [*points, *([None] if costs else [])]
    for i in range(runs):
        todo += [
            (p, i) for p in order.sample(what, len(what)) if (p, i) not in done and p not in killed
        ]
    longest = 0.0
    with (
        _saved(trace) as trace_path,
        tqdm(total=len(todo), desc="sweep", unit="run", leave=False) as bar,
    ):
        for n, (point, i) in enumerate(todo):
            if point in killed:
                continue  # once is enough
            if seconds is not None and time.perf_counter() - begin + longest > seconds:
                break
            start = time.perf_counter()
            if point is None:
                record["costs"].append({"round": i, **_run_costs(path)})
            else:
                tokens = (i * len(trace) // runs, cold, warmup, reads, decode)
                sample = {
                    **asdict(point),
                    "round": i,
                    **_run_point(path, point, trace_path, tokens, ways),
                }
                record["samples"].append(sample)
                if sample["killed"]:
                    killed.add(point)
            longest = max(longest, time.perf_counter() - start)
            record["complete"] = all(p in killed for p, _ in todo[n + 1 :])
            bar.update()
            if json_path:
                records.save(json_path, record)
    return record


def _run_costs(path):
    done = limit.run(
        [sys.executable, "-m", "moelab.lab.experiments.sweep", "--costs", str(path)],
        timeout_s=TIMEOUT_S,
    )
    if done.returncode:
        raise OSError(f"{path}: its costs could not be measured: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _run_point(path, point, trace_path, tokens, ways):
    for file in path.glob("*.safetensors"):
        with open(file, "rb") as f:
            os.fsync(f.fileno())  # what is not on disk yet cannot be dropped
        machine.drop_pages(file)  # what another process brought in would be served for free
    call = json.dumps([str(path), asdict(point), str(trace_path), *tokens])
    begin = time.perf_counter()
    try:
        done = limit.run(
            [sys.executable, "-m", "moelab.lab.experiments.sweep", "--point", call],
            point.limit_nbytes,
            timeout_s=TIMEOUT_S,
            **({"ways": ways} if ways else {}),
        )
    except subprocess.TimeoutExpired:
        raise OSError(
            f"{point}: took more than {TIMEOUT_S} s and was ended. Take fewer tokens, or fewer slots."
        ) from None
    if done.returncode and not done.killed:
        raise OSError(f"{point}: {done.stderr.strip()[-2000:]}")
    out = {
        "killed": done.killed,
        "how": done.how,
        "refused": done.refused,
        "run_s": round(time.perf_counter() - begin, 2),
    }
    return out if done.killed else {**out, **json.loads(done.stdout.splitlines()[-1])}


def point_of(sample):
    """The point that a sample of a record was taken at."""
    return Point(**{f.name: sample.get(f.name, f.default) for f in fields(Point)})


def _packed(trace):
    with _saved(trace) as file:
        return base64.b64encode(file.read_bytes()).decode()


@contextmanager
def _saved(trace):
    with tempfile.TemporaryDirectory(prefix="moelab-") as folder:
        trace.save(Path(folder, "trace.npz"))
        yield Path(folder, "trace.npz")


def summarize(record):
    """What follows from a sweep's samples, point by point.

    Returns:
        list[dict]: ``point`` and ``killed``; for ``cold``, ``reads`` and ``decode`` a ``timing.summary`` of a token's seconds
        (each run's mean), with ``runs`` (those means, by round); ``hit_rate`` of the slots, ``page_hit_rate`` of what was asked
        of the page cache, ``asked_per_token`` and ``disk_per_token`` (bytes, of ``reads``), ``resident_nbytes``,
        ``anonymous_nbytes``: medians. Points in the order of limit and slots.
    """
    by, tokens = {}, {}
    for s in record["samples"]:
        by.setdefault(point_of(s), []).append(s)
    out = []
    needed = record["reads"] * record["sizes"]["L"] * record["sizes"]["K"]
    largest = [float("inf") if p.limit_nbytes is None else p.limit_nbytes for p in by]
    order = sorted(
        zip(largest, by),
        key=lambda x: (
            x[0],
            x[1].ahead,
            x[1].policy != "lru",
            x[1].policy,
            x[1].pinned_by,
            x[1].slots,
        ),
    )
    for _, point in order:
        samples = by[point]
        row = {
            "point": point,
            "killed": any(s["killed"] for s in samples),
            "how": samples[0]["how"],
        }
        if not row["killed"]:
            for part in ("cold", "reads", "decode"):
                if part in samples[0]:
                    runs = {s["round"]: float(np.mean(s[part]["token_s"])) for s in samples}
                    row[part] = {**timing.summary(list(runs.values())), "runs": runs}
            r = [s["reads"] for s in samples]
            disk = [np.sum(x["disk_nbytes"]) if None not in x["disk_nbytes"] else np.nan for x in r]
            row["hit_rate"] = 1 - float(np.median([x["misses"] for x in r])) / needed
            row["asked_per_token"] = (
                float(np.median([x["asked_nbytes"] for x in r])) / record["reads"]
            )
            row["disk_per_token"] = float(np.median(disk)) / record["reads"]
            row["page_hit_rate"] = (
                float(np.maximum(0, 1 - row["disk_per_token"] / row["asked_per_token"]))
                if row["asked_per_token"]
                else np.nan
            )
            for name in ("resident_nbytes", "anonymous_nbytes"):
                values = [s[name] for s in samples if s[name] is not None]
                row[name] = float(np.median(values)) if values else np.nan
            for s in samples:
                if "decode" in s:
                    tokens.setdefault(s["round"], set()).add(tuple(s["decode"]["tokens"]))
            row["same_tokens"] = all(len(t) == 1 for t in tokens.values())
        out.append(row)
    return out


def report(record):
    """The sweep's table as text."""
    size = record["sizes"]
    lines = [
        machine.card_line(record["machine"]),
        f"{record['model']}: {size['checkpoint_nbytes'] / 1e6:.0f} MB of tensors, {size['L']} layers of {size['E']} experts, top-{size['K']}; {record['trace']['name']}; "
        f"each run a process of its own: {record['cold']} cold tokens, {record['warmup']} to warm up, {record['reads']} of reads, {record['decode']} decoded",
        f"{'memory':>9} {'slots':>6} {'policy':9} {'reads, ms/token [quartiles]':30} {'decode, ms/token':26} {'cold':>6} {'hits':>5} {'asked':>6} {'disk':>6} {'cached':>7} {'process':>7} (MB)",
    ]

    def spread(s):
        return f"{s['median'] * 1e3:.2f} [{s['p25'] * 1e3:.2f} - {s['p75'] * 1e3:.2f}] n={s['n']}"

    for row in summarize(record):
        p = row["point"]
        head = f"{'none' if p.limit_nbytes is None else f'{p.limit_nbytes / 1e6:.0f} MB':>9} {p.slots:6d} {p.policy + ('+ahead' if p.ahead else '') + (p.pinned_by and '+' + p.pinned_by):9}"
        if row["killed"]:
            lines.append(f"{head} killed ({row['how']})")
            continue
        lines.append(
            f"{head} {spread(row['reads']):30} {spread(row['decode']) if 'decode' in row else '-':26} {row['cold']['median'] * 1e3:6.1f} {row['hit_rate']:5.0%} "
            f"{row['asked_per_token'] / 1e6:6.1f} {row['disk_per_token'] / 1e6:6.1f} {row['resident_nbytes'] / 1e6:7.0f} {row['anonymous_nbytes'] / 1e6:7.0f}"
        )
    return "\n".join(lines)


def main(argv=None):
    p = argparse.ArgumentParser(
        prog="python -m moelab.lab.experiments.sweep",
        description="Slots against the page cache under memory limits.",
    )
    p.add_argument("model", metavar="CHECKPOINT", help="a model folder")
    p.add_argument(
        "--limits",
        default="600,1500,none",
        help="MB of process and page cache, divided by commas (default: %(default)s)",
    )
    p.add_argument(
        "--slots",
        default="auto",
        help="divided by commas, 0 for none; auto: none, top-k and steps up to what fits (default: %(default)s)",
    )
    p.add_argument(
        "--policies",
        default="lru",
        help="all but the first at two points of the largest limit only (default: %(default)s)",
    )
    p.add_argument(
        "--read-ahead",
        action="store_true",
        help="measure the points of the largest limit with read-ahead, too",
    )
    p.add_argument(
        "--pinned",
        default="",
        metavar="TRACES",
        help="of data/traces, divided by commas: by each, pin what the most slots hold more than top-k",
    )
    p.add_argument(
        "--trace",
        metavar="FILE",
        help="of Trace.save, with the model's layers and experts (default: a synthetic one)",
    )
    p.add_argument(
        "--like",
        default="code",
        help="trace of data/traces whose locality the synthetic one has (default: %(default)s)",
    )
    p.add_argument(
        "--trace-seed", type=int, default=0, help="of the synthetic trace (default: %(default)s)"
    )
    p.add_argument("--runs", type=int, default=5)
    for name, default in (("cold", 8), ("warmup", 60), ("reads", 44), ("decode", 4)):
        p.add_argument(f"--{name}", type=int, default=default, metavar="TOKENS")
    p.add_argument(
        "--json",
        metavar="FILE",
        required=True,
        help="the record; what it has already is not measured again",
    )
    p.add_argument(
        "--seconds",
        type=float,
        help="stop in time to end after so many; the same command goes on from there",
    )
    args = p.parse_args(argv)
    limits = [None if n == "none" else int(n) * 1_000_000 for n in args.limits.split(",")]
    slots = None if args.slots == "auto" else [int(n) for n in args.slots.split(",")]
    try:
        trace = (
            Trace.load(args.trace)
            if args.trace
            else made_up(args.model, args.like, seed=args.trace_seed)
        )
        pinned = tuple(filter(None, args.pinned.split(",")))
        which = points(
            args.model,
            limits,
            slots,
            tuple(args.policies.split(",")),
            args.read_ahead,
            pinned=pinned,
        )
        record = sweep(
            args.model, which, trace, args.runs, args.cold, args.warmup, args.reads, args.decode, args.json, args.seconds, costs=True,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        sys.exit(f"sweep: {error}")
    print(report(record))
    print(
        f"{len(record['samples'])} runs in {args.json}"
        + ("" if record.get("complete") else "; not complete: the same command goes on")
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--point"]:
        path, point, trace_path, *tokens = json.loads(sys.argv[2])
        print(json.dumps(measure(path, Point(**point), Trace.load(trace_path), *tokens)))
    elif sys.argv[1:2] == ["--costs"]:
        print(json.dumps(asdict(cost.measure_costs(sys.argv[2]))))
    else:
        main()
