"""Slots against the page cache: one model under memory limits, from no slots to as many as fit.

Each point runs in a process of its own, limited before the model is loaded. A trace chooses the
experts there, and three things are measured one after another:

- ``cold``: the first tokens, with the file dropped from the page cache and every slot empty;
- ``reads``: tokens once the caches are full, without arithmetic. Slots, reads, copies and the page
  cache are the real ones, but nothing is computed: what a device would take whose arithmetic takes
  no time;
- ``decode``: tokens with their arithmetic.

    python -m moelab sweep MODEL --limits 450,600,none --runs 5 --json FILE
"""

import argparse
import gc
import random
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil
from mlx_lm.generate import generate_step
from tqdm import tqdm

from ... import close, load, stats
from ...commands.argument_types import not_empty, or_auto, or_none, positive, several, zero_or_more
from ...commands.arguments import add_json, add_model, add_number, flag
from ...replay.costs import Costs
from ...replay.locality import decode_trace, synthesize_like
from ...replay.sizes import ModelSizes
from ...streaming.prefetch import Oracle
from ...streaming.record import route_by
from ...streaming.residency.table import EVICTION
from ...streaming.session import session_of
from ...streaming.trace import Trace
from .. import limit, machine, oscache, records
from .costs import measure_costs
from .sweep_record import Measured, Part, Point, RecordedTrace, Sample, SweepRecord, Tokens, saved

TIMEOUT_S = 600  # of one run; the slowest recorded one took 10
# ``generate_step`` is a token ahead of what it yields, and the first tokens are slower: so many
# are decoded before the clock starts.
DECODE_WARMUP = 3


def recorded(name: str) -> SweepRecord:
    """A sweep of ``data/results``."""
    return SweepRecord.from_json(records.recorded(name))


# In the process of a point


def _time_reads(layers, rows):
    """Bring the experts of each row ``[L, K]`` into the layers, and compute nothing."""
    session = layers[0].session
    seconds, disk, asked, before = [], [], session.reader.nbytes, oscache.disk_read_nbytes()
    misses, cpu_s = session.counters.misses, time.process_time()
    for row in rows.tolist():
        begin = time.perf_counter()
        for layer, experts in zip(layers, row):
            layer.read(list(dict.fromkeys(experts)))
        seconds.append(round(time.perf_counter() - begin, 7))
        now = oscache.disk_read_nbytes()
        disk.append(None if now is None else now - before)
        before = now
    return Part(
        seconds,
        disk,
        session.reader.nbytes - asked,
        session.counters.misses - misses,
        cpu_s=time.process_time() - cpu_s,
    )


def measure(path: str | Path, point: Point, trace: Trace, start: int, tokens: Tokens) -> Measured:
    """Measure one point in this process, limited already.

    Args:
        path (str or Path): A model folder.
        point (Point): The setting.
        trace (Trace): With the model's L, K and E.
        start (int): The row of the trace to begin with; after the last comes the first.
        tokens (Tokens): How many of each part.
    """
    num = tokens.warmup + tokens.reads + tokens.decode + DECODE_WARMUP + 1
    rows = trace.experts[(start + np.arange(num)) % len(trace)]
    begin = time.perf_counter()
    model, _ = load(path, point.config)
    load_s = time.perf_counter() - begin
    layers = session_of(model).layers
    files = {f for t in session_of(model).located.values() for f in t.files}
    oscache.set_read_ahead([f.fd for f in files], point.read_ahead)
    gc.collect()
    oscache.drop_pages(path)
    resident_before_nbytes = oscache.cached_nbytes(path)
    cold = _time_reads(layers, rows[: tokens.cold])
    if point.limit_nbytes is None:
        oscache.fill(path)  # all of it would be cached sooner or later
    _time_reads(layers, rows[tokens.cold : tokens.warmup])
    before = oscache.major_faults()
    timed = _time_reads(layers, rows[tokens.warmup : tokens.warmup + tokens.reads])
    memory = psutil.Process().memory_info()
    measured = Measured(
        load_s=load_s,
        resident_before_nbytes=resident_before_nbytes,
        cold=cold,
        reads=timed,
        faults=oscache.major_faults() - before,
        resident_nbytes=oscache.cached_nbytes(path),
        anonymous_nbytes=memory.rss - getattr(memory, "shared", 0),
        rss_nbytes=memory.rss,
        mlx_nbytes=mx.get_active_memory(),
    )
    if tokens.decode:
        rest = decode_trace(rows[tokens.warmup + tokens.reads :], trace.num_experts)
        measured = replace(measured, decode=_time_decode(model, rest, tokens.decode))
    close(model)
    return measured


def _time_decode(model, trace, num):
    """Decode ``num`` tokens on the clock, routed by a trace."""
    reader = session_of(model).reader
    ends, disk, tokens = [], [], []
    if isinstance(oracle := session_of(model).prefetcher, Oracle):
        oracle.set_trace(trace)
    with route_by(model, trace):
        for token, _ in generate_step(mx.array([1]), model, max_tokens=num + DECODE_WARMUP):
            if len(ends) == DECODE_WARMUP - 1:
                stats(model, reset=True)
                asked, cpu_s = reader.nbytes, time.process_time()
            ends.append(time.perf_counter())
            disk.append(oscache.disk_read_nbytes())
            tokens.append(int(token))
    cpu_s = time.process_time() - cpu_s
    ends, disk = ends[DECODE_WARMUP - 1 :], disk[DECODE_WARMUP - 1 :]
    c = stats(model).decode
    return Part(
        token_s=[round(b - a, 6) for a, b in pairwise(ends)],
        disk_nbytes=[None if a is None else b - a for a, b in pairwise(disk)],
        asked_nbytes=reader.nbytes - asked,
        misses=c.misses,
        wait_s=c.wait_s,
        tokens=tokens,
        cpu_s=cpu_s,
    )


def _measure(path, point, trace_path, start, tokens):
    measured = measure(path, Point(**point), Trace.load(trace_path), start, Tokens(**tokens))
    return measured.to_json()


def _measure_costs(path):
    return asdict(measure_costs(path))


# In the process that asks


def synthetic_trace(path: str | Path, like: str = "code", seed: int = 0) -> Trace:
    """A trace of a model's shape with the locality of a recorded one of tiny-moe."""
    sizes = ModelSizes.of(path)
    return synthesize_like(like, sizes.L, sizes.E, sizes.K, seed=seed)


def points(
    path: str | Path,
    limits: list[int | None],
    slots: list[int] | None = None,
    policies: tuple[str, ...] = ("lru",),
    read_ahead: bool = False,
    count: int = 7,
    oracle: bool = False,
) -> list[Point]:
    """The points of a sweep.

    Args:
        path (str or Path): A model folder.
        limits (list[int or None]): Bytes, None for no limit.
        slots (list[int], optional): The same for every limit. Default: none, K, and more in even
            steps up to what fits; without a limit half as many, up to what fits under the largest
            one, or E.
        policies (tuple[str]): All but the first are measured only at the middle and at the most
            slots of the largest limit.
        read_ahead (bool): Whether to measure all points of the first policy under the largest
            limit with read-ahead, too.
        count (int): How many under one limit, if ``slots`` is not given.
        oracle (bool): Whether to measure all points with slots under a limit with the oracle's
            prefetch, too.

    Returns:
        list[Point]: By limit and slots.

    Raises:
        ValueError: If the model does not fit in a limit.
    """
    sizes, out = ModelSizes.of(path), []
    K, given = sizes.K, [n for n in limits if n is not None]
    most = max([sizes.fits(n) for n in given], default=sizes.E)
    for limit_nbytes in limits:
        top, steps = most, count // 2
        if limit_nbytes is not None:
            top, steps = sizes.fits(limit_nbytes), count - 1
        if top < K:
            raise ValueError(
                f"{path}: expected a limit of at least {sizes.least_nbytes / 1e6:.0f} MB "
                f"(backbone, process, {K} slots, and some to spare), got "
                f"{limit_nbytes / 1e6:.0f} MB. Raise it."
            )
        mine = slots or [0, *np.unique(np.linspace(K, top, steps).astype(int)).tolist()]
        first = Point(0, limit_nbytes, policies[0])
        out += [replace(first, slots=n) for n in mine]
        if oracle and limit_nbytes is not None:
            out += [replace(first, slots=n, prefetch="oracle") for n in mine if n]
        held = [n for n in mine if n > K]
        if held and given and limit_nbytes == max(given):
            extra = sorted({held[len(held) // 2], held[-1]})
            out += [replace(first, slots=n, policy=p) for p in policies[1:] for n in extra]
            out += [replace(first, slots=n, read_ahead=True) for n in mine if read_ahead and n]
    return out


def sweep(
    path: str | Path,
    points: list[Point],
    trace: Trace,
    runs: int = 5,
    tokens: Tokens | None = None,
    json_path: str | Path | None = None,
    seconds: float | None = None,
    seed: int = 0,
    costs: bool = False,
) -> SweepRecord:
    """Measure every point ``runs`` times, each time in a new process, rounds in random order.

    What is in ``json_path`` already is not measured again, so an interrupted sweep goes on.

    Args:
        path (str or Path): A model folder.
        points (list[Point]): The settings.
        trace (Trace): With the model's L, K and E; each round begins at another row.
        runs (int): Rounds.
        tokens (Tokens, optional): Of each run. Default: ``Tokens()``.
        json_path (str or Path, optional): Where the record is kept, after every run.
        seconds (float, optional): Begin nothing that is not likely to end within so many.
        seed (int): Of the orders.
        costs (bool): In every round, measure this machine's costs too, for a replay.

    Raises:
        ValueError: If ``json_path`` holds a sweep with other settings.
        limit.NoLimit: If memory cannot be limited here.
        OSError: If a run failed, and not because it ran out of memory.
    """
    begin, path, tokens = time.perf_counter(), Path(path), tokens or Tokens()
    sizes = ModelSizes.of(path)
    shape = sizes.L, sizes.K, sizes.E
    if (*trace.experts.shape[1:], trace.num_experts) != shape:
        raise ValueError(f"sweep: expected a trace with L, K, E of {shape}, got {trace}.")
    record = SweepRecord(path.name, runs, tokens, seed, RecordedTrace.of(trace), sizes)
    if json_path and Path(json_path).exists():
        before = SweepRecord.load(json_path)
        if wrong := before.differences(record):
            raise ValueError(
                f"{json_path}: expected a sweep with the same {', '.join(wrong)}. Name another "
                "file, or remove it."
            )
        record = before
    done = {(s.point, s.round) for s in record.samples} | {(None, i) for i in record.costs}
    order, todo, what = random.Random(seed), [], [*points, *([None] if costs else [])]
    for i in range(runs):
        todo += [(p, i) for p in order.sample(what, len(what)) if (p, i) not in done]
    longest = 0.0
    with (
        saved(trace) as trace_path,
        tqdm(total=len(todo), desc="sweep", unit="run", leave=False) as bar,
    ):
        for n, (point, i) in enumerate(todo):
            bar.update()
            if point in record.killed:
                continue  # once is enough
            if seconds is not None and time.perf_counter() - begin + longest > seconds:
                break
            start = time.perf_counter()
            if point is None:
                record.costs[i] = _run_costs(path)
            else:
                args = trace_path, record.start(i), tokens
                record.samples.append(_run_point(path, point, i, args))
            longest = max(longest, time.perf_counter() - start)
            record.complete = all(p in record.killed for p, _ in todo[n + 1 :])
            if json_path:
                records.save(json_path, record.to_json())
    return record


def _run_costs(path):
    what = f"costs of {path}"
    costs, done = limit.call(_measure_costs, path, what=what, timeout_s=TIMEOUT_S)
    if done.killed:
        raise OSError(f"{what}: killed")
    return Costs(**costs)


def _run_point(path, point, i, args):
    oscache.write_back(path)  # what is not on disk yet cannot be dropped
    oscache.drop_pages(path)  # pages of another process would be served, and not counted
    begin = time.perf_counter()
    measured, done = limit.call(
        _measure,
        path,
        point,
        *args,
        what=str(point),
        nbytes=point.limit_nbytes,
        timeout_s=TIMEOUT_S,
    )
    return Sample(
        point,
        i,
        done.killed,
        done.how,
        done.refused,
        run_s=round(time.perf_counter() - begin, 2),
        measured=None if done.killed else Measured.from_json(measured),
    )


def report(record: SweepRecord) -> str:
    """The sweep's table as text."""
    size, tokens = record.sizes, record.tokens
    lines = [
        machine.card_line(record.machine),
        f"{record.model}: {size.checkpoint_nbytes / 1e6:.0f} MB of tensors, {size.L} layers of "
        f"{size.E} experts, top-{size.K}; {record.trace.name}",
        f"each run a process of its own: {tokens.cold} cold tokens, {tokens.warmup} to warm up, "
        f"{tokens.reads} of reads, {tokens.decode} decoded",
        "ms a token: medians [quartiles] of n runs; MB a token: asked, disk; MB: cached, process",
        f"{'memory':>8} {'slots':>5} {'policy':10} {'n':>2} {'reads':21} {'decode':24} {'cold':>6} "
        f"{'hits':>4} {'asked':>5} {'disk':>5} {'cached':>6} {'process':>7}",
    ]
    for row in record.rows():
        lines.append(
            f"{_head(row.point)} {len(row.reads.seconds):2d} {row.reads!s:21} "
            f"{row.decode or '-'!s:24} {row.cold.median * 1e3:6.1f} {row.hit_rate:4.0%} "
            f"{row.asked_per_token / 1e6:5.1f} {row.disk_per_token / 1e6:5.1f} "
            f"{row.resident_nbytes / 1e6:6.0f} {row.anonymous_nbytes / 1e6:7.0f}"
        )
    for s in record.samples:
        if s.killed:
            lines.append(f"{_head(s.point)} killed ({s.how})")
    more = "" if record.complete else "; not complete: the same command goes on"
    return "\n".join([*lines, f"{len(record.samples)} runs{more}"])


def _head(point):
    limit = "none" if point.limit_nbytes is None else f"{point.limit_nbytes / 1e6:.0f} MB"
    ahead = "+ahead" if point.read_ahead else ""
    ahead += "+oracle" if point.prefetch == "oracle" else ""
    policy = point.policy + ahead + (f"+{point.pinned_by}" if point.pinned_by else "")
    return f"{limit:>8} {point.slots:5d} {policy:10}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Slots against the page cache: decode under memory limits, slots swept from none to as "
        "many as fit, each run a process of its own."
    )
    add_model(parser)
    parser.add_argument(
        "--limits",
        type=several(or_none(positive)),
        default="600,1500,none",
        metavar="MB",
        help="of process and page cache, divided by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--slots",
        type=or_auto(several(zero_or_more)),
        default="auto",
        help="divided by commas, 0 for none; auto: none, and from top-k to what fits",
    )
    parser.add_argument(
        "--policies",
        type=several(_policy),
        default="lru",
        help="all but the first at two points of the largest limit only (default: %(default)s)",
    )
    parser.add_argument(
        "--read-ahead",
        action="store_true",
        help="measure the points of the largest limit with read-ahead, too",
    )
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="decode under each limit with the trace's experts read a layer ahead, too",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=not_empty,
        help="of Trace.save, with the model's layers and experts (default: a synthetic one)",
    )
    parser.add_argument(
        "--like",
        type=not_empty,
        help="trace of data/traces whose locality the synthetic one has (default: code)",
    )
    parser.add_argument(
        "--trace-seed", type=zero_or_more, metavar="N", help="of the synthetic trace (default: 0)"
    )
    add_number(parser, "--runs", 5, "rounds")
    for name, default, what in (
        ("cold", 8, "from empty slots and a cold file"),
        ("warmup", 60, "before the clock, the cold ones included"),
        ("reads", 44, "timed without their arithmetic"),
        ("decode", 4, "timed with it"),
    ):
        parser.add_argument(
            f"--{name}",
            type=zero_or_more,
            default=default,
            metavar="TOKENS",
            help=f"{what} (default: %(default)s)",
        )
    parser.add_argument(
        "--seconds",
        type=positive,
        metavar="N",
        help="stop in time to end after so many; the same command goes on from there",
    )
    add_json(parser, required=True)


def _policy(name):
    if name not in EVICTION:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(EVICTION)}, got {name!r}")
    return name


def run(args: argparse.Namespace) -> None:
    """The command."""
    if args.trace:
        for name in ("like", "trace_seed"):
            if getattr(args, name) is not None:
                args.error(f"{flag(name)} has no effect with --trace: leave one of them out")
        trace = Trace.load(args.trace)
    else:
        trace = synthetic_trace(args.model, args.like or "code", args.trace_seed or 0)
    which = points(
        args.model,
        [None if n is None else n * 1_000_000 for n in args.limits],
        None if args.slots == "auto" else list(args.slots),
        args.policies,
        args.read_ahead,
        oracle=args.oracle,
    )
    tokens = Tokens(args.cold, args.warmup, args.reads, args.decode)
    record = sweep(args.model, which, trace, args.runs, tokens, args.json, args.seconds, costs=True)
    print(report(record))
