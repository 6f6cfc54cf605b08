"""Slots against the page cache: a sweep beside its replay, and the charts of notebook 03."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go

from ...replay import advice, eviction, pagecache
from ...replay.costs import Costs
from ...replay.locality import Locality, decode_trace, recorded_trace, synthesize
from ...replay.pagecache import Replay
from ...replay.sizes import ModelSizes
from ...streaming.trace import Trace
from .. import limit, timing
from ..plots import charts, style
from .sweep import DECODE_WARMUP, points, sweep
from .sweep_record import Point, Row, Runs, SweepRecord, Tokens

ERROR_BOUND = 0.15  # what a replay may be off and still be called near
# Below this the disk brought next to nothing, and a ratio of its bytes says nothing.
SOME_NBYTES = 100_000
DIAL_POINTS = 9  # numbers of slots replayed for one setting of the sliders


# A sweep beside its replay


def replay_run(
    record: SweepRecord,
    point: Point,
    i: int,
    part: str = "reads",
    costs: Costs | None = None,
    **how,
) -> Replay:
    """Replay the tokens that one run of a sweep timed.

    Args:
        record (SweepRecord): The sweep.
        point (Point): The setting.
        i (int): The round.
        part (str): ``reads`` or ``decode``.
        costs (Costs, optional): Default: those in the record.
        **how: As for ``pagecache.replay``.
    """
    tokens, sizes, trace = record.tokens, record.sizes, record.trace.trace
    skip, num = tokens.warmup, tokens.reads
    if part == "decode":
        skip, num = skip + tokens.reads + DECODE_WARMUP + 1, tokens.decode
    rows = trace.experts[(record.start(i) + np.arange(skip + num)) % len(trace)]
    costs = costs or record.median_costs
    if part == "reads":
        costs = costs.without_arithmetic()
    if point.limit_nbytes is None:  # the whole file was read before the clock started
        costs = costs.all_cached()
    pinned = ()
    if point.pinned_by:
        by, one = recorded_trace(point.pinned_by), sizes.held_expert_nbytes
        pinned = eviction.pin(by, point.pinned_nbytes, point.slots, one)
    return pagecache.replay(
        decode_trace(rows, trace.num_experts),
        float("inf") if point.limit_nbytes is None else point.limit_nbytes,
        point.slots or sizes.K,
        point.policy if point.slots else "none",
        expert_nbytes=sizes.expert_nbytes,
        slot_nbytes=sizes.held_expert_nbytes,
        other_nbytes=sizes.other_nbytes,
        costs=costs,
        skip=skip,
        pinned=pinned,
        **how,
    )


@dataclass(frozen=True)
class Compared:
    """A point of a sweep and its replay.

    Attributes:
        row (Row): What was measured.
        runs (Runs): Of the part that was replayed.
        predicted_s (float): Seconds of a token, the median over replays of the same tokens.
        predicted_hit_rate (float): Of the slots.
        predicted_disk (float): Bytes from the disk for each token.
    """

    row: Row
    runs: Runs
    predicted_s: float
    predicted_hit_rate: float
    predicted_disk: float

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less 1."""
        return self.predicted_s / self.runs.median - 1

    @property
    def disk_error(self) -> float:
        """Predicted over measured bytes from the disk, less 1."""
        return self.predicted_disk / self.row.disk_per_token - 1


def compare(
    record: SweepRecord, part: str = "reads", costs: Costs | None = None, **how
) -> list[Compared]:
    """A sweep beside its replay, point by point.

    Left out are points with read-ahead, which is not replayed, and of ``decode`` those without
    slots: they compute in another mode than the one whose costs were measured.

    Args:
        record (SweepRecord): The sweep.
        part (str): ``reads`` or ``decode``.
        costs (Costs, optional): Default: those in the record.
        **how: As for ``pagecache.replay``.
    """
    out = []
    for row in record.rows():
        point, runs = row.point, row.runs(part)
        if runs is None or point.read_ahead or (part == "decode" and not point.slots):
            continue
        replays = [replay_run(record, point, i, part, costs, **how) for i in runs.by_round]
        disk = 0.0
        if point.limit_nbytes is not None:
            disk = float(np.median([r.read_per_token for r in replays]))
        out.append(
            Compared(
                row,
                runs,
                predicted_s=float(np.median([r.mean_s for r in replays])),
                predicted_hit_rate=float(np.median([r.app_hit_rate for r in replays])),
                predicted_disk=disk,
            )
        )
    return out


@dataclass(frozen=True)
class Agreement:
    """How far the replay's predictions are from the measurements.

    Attributes:
        median_error (float): Of the absolute errors.
        worst_error (float): The largest absolute one.
        neighbours (int): Pairs of points with the next number of slots whose quartiles are apart.
        same_order (int): Of these, how many the replay puts in the measured order.
    """

    median_error: float
    worst_error: float
    neighbours: int
    same_order: int


def agreement(compared: list[Compared]) -> Agreement:
    """How far the predictions of all compared points are from the measurements."""
    errors = np.abs([c.error for c in compared])
    pairs = [
        (a, b)
        for a, b in pairwise(compared)
        if a.row.point.line == b.row.point.line and a.runs.apart(b.runs)
    ]
    same = sum((a.runs.median < b.runs.median) == (a.predicted_s < b.predicted_s) for a, b in pairs)
    return Agreement(float(np.median(errors)), float(errors.max()), len(pairs), same)


# What a sweep says


def limit_name(limit_nbytes: int | None, record: SweepRecord) -> str:
    """A limit in words, with its share of the checkpoint."""
    if limit_nbytes is None:
        return "no limit"
    share = limit_nbytes / record.sizes.checkpoint_nbytes
    return f"{limit_nbytes / 1e6:.0f} MB ({share:.0%} of the file)"


def curve(
    record: SweepRecord,
    limit_nbytes: int | None,
    part: str = "reads",
    policy: str = "lru",
    read_ahead: bool = False,
) -> list[Row]:
    """The points of one line of a sweep, by slots."""
    line = Point(0, limit_nbytes, policy, read_ahead)
    return [r for r in record.rows() if r.point.line == line and r.runs(part)]


@dataclass(frozen=True)
class Extremes:
    """Where a line of a sweep is fastest and slowest; each row has slots.

    Attributes:
        part (str): ``reads`` or ``decode``.
        fewest, most (Row): The fewest and the most slots.
        best, worst (Row): The fastest and the slowest.
        most_read (Row): Where the disk brought the most bytes.
    """

    part: str
    fewest: Row
    most: Row
    best: Row
    worst: Row
    most_read: Row

    def ms(self, row: Row) -> float:
        """Milliseconds of a token of one of the rows."""
        return row.runs(self.part).median * 1e3

    @property
    def slowdown(self) -> float:
        """The slowest over the fewest slots, less 1."""
        return self.ms(self.worst) / self.ms(self.fewest) - 1

    @property
    def most_over_best(self) -> float:
        """The most slots over the best, less 1."""
        return self.ms(self.most) / self.ms(self.best) - 1

    @property
    def most_over_fewest(self) -> float:
        """The most slots over the fewest, less 1."""
        return self.ms(self.most) / self.ms(self.fewest) - 1

    @property
    def range(self) -> float:
        """The slowest over the fastest, less 1."""
        return self.ms(self.worst) / self.ms(self.best) - 1

    @property
    def bytes_ratio(self) -> float:
        """The most bytes from the disk over those with the fewest slots; nan if those are none."""
        few = self.fewest.disk_per_token
        return self.most_read.disk_per_token / few if few > SOME_NBYTES else float("nan")


def extremes(
    record: SweepRecord, limit_nbytes: int | None, part: str = "reads", read_ahead: bool = False
) -> Extremes:
    """The fastest and slowest points of a line of a sweep, the one without slots left out."""
    rows = [r for r in curve(record, limit_nbytes, part, read_ahead=read_ahead) if r.point.slots]

    def seconds(row):
        return row.runs(part).median

    return Extremes(
        part,
        fewest=rows[0],
        most=rows[-1],
        best=min(rows, key=seconds),
        worst=max(rows, key=seconds),
        most_read=max(rows, key=lambda r: r.disk_per_token),
    )


def roofline(record: SweepRecord, limit_nbytes: int) -> dict[int, float]:
    """How near decoding comes to the longer of its arithmetic and of its bytes at the SSD's rate.

    The arithmetic is the fastest decoding without a limit. The SSD's rate is the one measured with
    the sweep, cold.

    Returns:
        dict[int, float]: By slots, the roof's seconds over the measured ones.

    Raises:
        ValueError: If the sweep has no points without a limit.
    """
    free = curve(record, None, "decode")
    if not free:
        raise ValueError(
            "roofline: expected a sweep with points without a limit, which say what the "
            "arithmetic takes."
        )
    arithmetic_s = min(r.decode.median for r in free)
    s_per_byte = record.median_costs.cold_s_per_byte
    rows = [r for r in curve(record, limit_nbytes, "decode") if r.point.slots]
    return {
        r.point.slots: max(arithmetic_s, r.decode_disk_per_token * s_per_byte) / r.decode.median
        for r in rows
    }


@dataclass(frozen=True)
class Picked:
    """The slots and policy that ``advise`` chooses for one limit, and the fastest measured ones.

    Attributes:
        routing (str): How the sweep's trace routes.
        part (str): ``reads`` or ``decode``.
        limit_nbytes (int): The memory.
        picked, best (tuple): ``(slots, policy)``.
        picked_s, best_s (float): What was measured there.
        predicted_s (float): What the replay said of the pick.
    """

    routing: str
    part: str
    limit_nbytes: int
    picked: tuple[int, str]
    best: tuple[int, str]
    picked_s: float
    best_s: float
    predicted_s: float

    @property
    def slower(self) -> float:
        """The pick over the best, less 1."""
        return self.picked_s / self.best_s - 1

    def __str__(self):
        return (
            f"{self.routing}, {self.part}, {self.limit_nbytes / 1e6:.0f} MB: advises "
            f"{self.picked[0]} slots, {self.picked[1]}; measured {self.picked_s * 1e3:.1f} ms, "
            f"{self.slower:+.1%} of the best ({self.best[0]} slots, {self.best[1]})"
        )


def advised(record: SweepRecord, part: str = "reads", costs: Costs | None = None) -> list[Picked]:
    """Let ``advise`` choose among the points of a sweep, for each of its limits.

    Args:
        record (SweepRecord): Only its sizes, trace and costs are used to choose.
        part (str): ``reads``: for a device that computes in no time; ``decode``: for this one.
        costs (Costs, optional): Default: the record's.
    """
    costs = costs or record.median_costs
    costs = costs.without_arithmetic() if part == "reads" else costs
    out = []
    for n in record.limits:
        measured = {
            (r.point.slots, r.point.policy): r.runs(part).median
            for r in record.rows()
            if r.runs(part) and r.point.limit_nbytes == n and r.point.slots
            if not r.point.read_ahead
        }
        if n is None or not measured:
            continue
        settings = advice.replay_settings(
            record.sizes, n, record.trace.trace, costs, list(measured), record.tokens.warmup
        )
        picked, best = advice.pick(settings), min(measured, key=measured.get)
        out.append(
            Picked(
                record.trace.like,
                part,
                n,
                picked,
                best,
                measured[picked],
                measured[best],
                settings[picked].mean_s,
            )
        )
    return out


def pinned_hits(traces: dict[str, Trace], slots: int, skip: int) -> dict[str, dict[str, float]]:
    """Hit rates of so many slots that experts take turns in, or K of them and the others pinned.

    Args:
        traces (dict[str, Trace]): Recorded ones of one model, by name.
        slots (int): S, pinned ones included.
        skip (int): Decoded tokens that do not count, and that ``beginning`` pins by.

    Returns:
        dict[str, dict[str, float]]: By trace: ``lru`` and ``lfu``; pinned by the trace ``itself``,
        by its ``beginning``, and by each other trace, ``by NAME``.
    """
    decoded, out = {name: t.decode for name, t in traces.items()}, {}
    for name, trace in decoded.items():
        L, K = trace.experts.shape[1:]

        def rate(policy="lru", by=None, trace=trace, L=L, K=K):
            pinned = () if by is None else eviction.pin(by, (slots - K) * L, K, 1)
            num = slots if by is None else K
            hit = eviction.held(trace.experts, trace.num_experts, num, policy, pinned)
            return float(hit[skip:].mean())

        out[name] = {
            "lru": rate(),
            "lfu": rate("lfu"),
            "itself": rate(by=trace),
            "beginning": rate(by=trace[:skip]),
            **{f"by {other}": rate(by=t) for other, t in decoded.items() if other != name},
        }
    return out


def pinning(record: SweepRecord, part: str = "reads") -> dict[str, list[float]]:
    """A token's seconds in every round of a sweep with pinned experts, by the cache in words."""
    return {row.point.cache: row.runs(part).seconds for row in record.rows()}


# In replay


@dataclass(frozen=True)
class PolicyReplays:
    """Eviction policies in replay, under one memory limit and without arithmetic.

    Attributes:
        limit_nbytes (int): The memory.
        slots (list[int]): What was replayed.
        replays (dict[str, list[Replay]]): By policy, one for each number of slots.
    """

    limit_nbytes: int
    slots: list[int]
    replays: dict[str, list[Replay]]

    @property
    def middle(self) -> int:
        """The slots at which the policies are compared in words."""
        return self.slots[len(self.slots) // 2]

    @property
    def at_middle(self) -> dict[str, Replay]:
        """Each policy's replay there."""
        return {p: rs[len(self.slots) // 2] for p, rs in self.replays.items()}

    @property
    def told(self) -> str:
        """Milliseconds of a token there."""
        return ", ".join(f"{p} {1e3 * r.mean_s:.1f}" for p, r in self.at_middle.items())


def replay_policies(
    record: SweepRecord, limit_nbytes: int, slots: list[int], tokens: int
) -> PolicyReplays:
    """Replay every eviction policy with a sweep's trace and costs.

    Args:
        record (SweepRecord): The sweep.
        limit_nbytes (int): The memory.
        slots (list[int]): Numbers of slots.
        tokens (int): Of the trace; half of them fill the caches.
    """
    policies = [p for p in eviction.POLICIES if p != "none"]
    found = advice.replay_settings(
        record.sizes,
        limit_nbytes,
        record.trace.trace[:tokens],
        record.median_costs.without_arithmetic(),
        [(n, p) for p in policies for n in slots],
        tokens // 2,
    )
    return PolicyReplays(limit_nbytes, slots, {p: [found[n, p] for n in slots] for p in policies})


@dataclass(frozen=True)
class Slowdown:
    """How much a middling number of slots costs in replay, over the memory.

    Attributes:
        shares (list[float]): Memory over the checkpoint's size.
        slowest (list[float]): The slowest over the fewest slots, less 1.
        bytes (list[float]): The most bytes from the SSD over those with the fewest slots.
        most (list[float]): The most slots over the best, less 1.
    """

    shares: list[float]
    slowest: list[float]
    bytes: list[float]
    most: list[float]


def slowdown(
    locality: Locality,
    costs: Costs,
    sizes: ModelSizes,
    shares: list[float],
    tokens: int = 320,
    count: int = 9,
    seed: int = 0,
) -> Slowdown:
    """Replay every number of slots for several sizes of memory, without arithmetic.

    Args:
        locality (Locality): Of the trace.
        costs (Costs): Of reads.
        sizes (ModelSizes): Of the model.
        shares (list[float]): Memory over the checkpoint's size.
        tokens (int): Of the trace; half of them fill the caches.
        count (int): Numbers of slots, from K to what fits.
        seed (int): Of the trace.
    """
    trace = synthesize(locality, tokens, sizes.L, sizes.E, sizes.K, seed)
    slowest, most_bytes, most = [], [], []
    for share in shares:
        memory = share * sizes.checkpoint_nbytes
        slots = np.unique(np.linspace(sizes.K, sizes.fits(memory), count).astype(int)).tolist()
        settings = [(n, "lru") for n in slots]
        replays = advice.replay_settings(
            sizes, memory, trace, costs.without_arithmetic(), settings, tokens // 2
        ).values()
        s, disk = [r.mean_s for r in replays], [r.read_per_token for r in replays]
        slowest.append(max(s) / s[0] - 1)
        most_bytes.append(max(disk) / max(disk[0], 1.0))
        most.append(s[-1] / min(s) - 1)
    return Slowdown(shares, slowest, most_bytes, most)


# Live, on this machine


def live(
    path, limits: list[int | None], slots: list[int], trace: Trace, runs: int, tokens: Tokens
) -> SweepRecord | None:
    """A small sweep here and now; None where memory cannot be limited, after printing why."""
    try:
        record = sweep(path, points(path, limits, slots), trace, runs, tokens)
    except limit.NoLimit as error:
        print(f"No live sweep, only the recorded one and the replay. {error}")
        return None
    first = next(s for s in record.samples if s.point.limit_nbytes is not None)
    print(f"memory limited by: {first.how}")
    for strategy, why in first.refused.items():
        print(f"  not by {strategy}: {why}")
    return record


# Charts


def _note(record, part="reads"):
    counts = {len(r.reads.seconds) for r in record.rows()}
    n = "n=" + " to ".join(str(c) for c in sorted({min(counts), max(counts)}))
    kind = "reads without arithmetic" if part == "reads" else "with arithmetic"
    return f"{kind}, {n} runs of {getattr(record.tokens, part)} tokens each"


def _lines(record, title, finding, part="reads", compared=(), read_ahead=False, note=""):
    """Milliseconds of a token over slots, a line for each limit, its replay dotted beside it."""
    x = "slots in each layer (0: none, every expert is read each time)"
    fig = style.figure(title, x, "ms a token", note=note, card=record.machine, height=360)
    fig.update_xaxes(zeroline=False)
    every = [(n, False) for n in record.limits] + [(n, True) for n in record.limits if read_ahead]
    rows = {key: curve(record, key[0], part, read_ahead=key[1]) for key in every}
    words = []
    for i, ((n, ahead), mine) in enumerate((k, r) for k, r in rows.items() if r):
        name = limit_name(n, record) + (", with read-ahead" if ahead else "")
        samples = [np.array(r.runs(part).seconds) * 1e3 for r in mine]
        style.band(fig, [r.point.slots for r in mine], samples, name, i)
        told = ", ".join(f"{np.median(s):.1f} at {r.point.slots}" for r, s in zip(mine, samples))
        words.append(f"{name}: {told}")
        line = Point(0, n, "lru", ahead)
        predicted = [c for c in compared if c.row.point.line == line]
        if predicted:
            look = style.look(i)
            fig.add_scatter(
                x=[c.row.point.slots for c in predicted],
                y=[c.predicted_s * 1e3 for c in predicted],
                name=f"replay, {name}",
                mode="lines+markers",
                line={**look["line"], "dash": "dot", "width": 1.5},
                marker={**look["marker"], "symbol": look["marker"]["symbol"] + "-open", "size": 8},
            )
    return style.describe(fig, f"Milliseconds a token over slots. {'; '.join(words)}.", finding)


def reads_chart(record: SweepRecord, compared: list[Compared]) -> go.Figure:
    """Milliseconds of a token's reads over slots, by memory limit, with the replay beside it."""
    tight, roomy, *_ = record.limits
    e, small = extremes(record, roomy), extremes(record, tight)
    return _lines(
        record,
        f"More slots read up to {e.bytes_ratio:.1f} times the bytes from the SSD, until they hold "
        "most of the experts",
        f"In {limit_name(roomy, record)} a token's reads take {e.ms(e.fewest):.1f} ms with "
        f"{e.fewest.point.slots} slots, {e.ms(e.worst):.1f} with {e.worst.point.slots} (the "
        f"slowest) and {e.ms(e.most):.1f} with {e.most.point.slots}. The most slots are "
        f"within {max(e.most_over_best, small.most_over_best):.0%} of the best under both limits.",
        compared=compared,
        note=f"{_note(record)}; dotted: the replay of section 4",
    )


def decode_chart(record: SweepRecord) -> go.Figure:
    """Milliseconds of a whole token over slots, by memory limit."""
    tight, roomy, *_ = record.limits
    e, small = (extremes(record, n, "decode") for n in (roomy, tight))
    roofs = [share for n in (tight, roomy) for share in roofline(record, n).values()]
    return _lines(
        record,
        f"With its arithmetic on two cores, slots change {e.range:.0%} of a token in "
        f"{roomy / 1e6:.0f} MB, {small.range:.0%} in {tight / 1e6:.0f} MB",
        f"The arithmetic takes {arithmetic_ms(record):.0f} ms a token, and reads go on beside it: "
        f"decoding reaches {min(roofs):.2f} to {max(roofs):.2f} of its roofline, the longer of the "
        "arithmetic and the missed bytes at the SSD's rate.",
        part="decode",
        note=f"{_note(record, 'decode')}; no slots is the mode buffers, expert by expert",
    )


def read_ahead_chart(record: SweepRecord) -> go.Figure:
    """Milliseconds of a token's reads over slots, with the system's read-ahead and without."""
    roomy = record.limits[1]
    on, off = (extremes(record, roomy, read_ahead=a) for a in (True, False))
    more = [
        r.disk_per_token / p.disk_per_token
        for r in curve(record, roomy, read_ahead=True)
        for p in curve(record, roomy)
        if p.point.slots == r.point.slots
    ]
    return _lines(
        record,
        f"Read-ahead makes the slow middle worse: {on.slowdown:+.0%}, not {off.slowdown:+.0%}",
        f"It brings {min(more):.2f} to {max(more):.2f} times the bytes, for nothing: behind an "
        "expert lies another expert, not the next part of a stream.",
        read_ahead=True,
        note=_note(record),
    )


def live_chart(record: SweepRecord) -> go.Figure:
    """The sweep of this machine now."""
    shown = record.limits[0]
    rows = curve(record, shown)
    best = min(rows, key=lambda r: r.reads.median)
    told = ", ".join(f"{r.reads.median * 1e3:.1f} with {r.point.cache}" for r in rows)
    return _lines(
        record,
        f"This machine, {limit_name(shown, record)}: fastest with {best.point.slots} slots, "
        f"{best.reads.median * 1e3:.1f} ms a token",
        f"Milliseconds: {told}.",
        note=_note(record),
    )


def sources_chart(record: SweepRecord, limit_nbytes: int) -> go.Figure:
    """Where a needed expert comes from, over slots: its slot, the page cache or the SSD."""
    rows, e = curve(record, limit_nbytes), extremes(record, limit_nbytes)
    shown = e.fewest, e.most_read, e.most
    size = record.sizes
    needed = size.L * size.K * size.expert_nbytes
    slot = np.array([r.hit_rate for r in rows]) * 100
    brought = np.array([r.disk_per_token for r in rows]) / needed * 100
    disk = np.minimum(brought, 100 - slot)
    pages = 100 - slot - disk
    few, *others = (f"{r.disk_per_token / 1e6:.1f}" for r in shown)
    rest = ", ".join(f"{mb} with {r.point.slots}" for mb, r in zip(others, shown[1:]))
    fig = style.figure(
        f"From the SSD a token reads {few} MB with {e.fewest.point.slots} slots, {rest}",
        "slots in each layer",
        "share of the needed experts (%)",
        note=f"{limit_name(limit_nbytes, record)}, medians; {_note(record)}",
        card=record.machine,
        barmode="stack",
    )
    names = "in its slot", "copied from the page cache", "read from the SSD"
    x = [str(r.point.slots) for r in rows]
    for i, (name, values) in enumerate(zip(names, (slot, pages, disk))):
        fig.add_bar(x=x, y=values, name=name, marker=style.fill(i))
    fig.update_xaxes(type="category")
    words = "; ".join(
        f"{n} slots: {s:.0f}% in a slot, {p:.0f}% page cache, {d:.0f}% SSD"
        for n, s, p, d in zip(x, slot, pages, disk)
    )
    hits = ", ".join(f"{r.hit_rate:.0%} with {r.point.slots}" for r in shown)
    return style.describe(
        fig,
        f"Stacked bars over slots. {words}.",
        f"The slots' own hit rate only grows ({hits}), while what is left of the page cache serves "
        "less and less: the hit rate says nothing about the SSD.",
    )


def agreement_chart(
    compared: dict[str, list[Compared]], decoded: list[Compared], record: SweepRecord
) -> go.Figure:
    """Predicted against measured milliseconds, every point, with a band of ``ERROR_BOUND``.

    Args:
        compared (dict[str, list[Compared]]): Reads, by kind of routing.
        decoded (list[Compared]): With the arithmetic, told and not drawn.
        record (SweepRecord): The first of them.
    """
    agree = {name: agreement(rows) for name, rows in compared.items()}
    agree["with the arithmetic"] = agreement(decoded)
    first = next(iter(agree.values()))
    fig = style.figure(
        f"The replay is {first.median_error:.0%} off in the median, {first.worst_error:.0%} at "
        "worst",
        "measured ms a token",
        "replayed ms a token",
        note="reads; each point one limit, number of slots and policy",
        card=record.machine,
        height=360,
    )
    for i, (name, rows) in enumerate(compared.items()):
        fig.add_scatter(
            x=[c.runs.median * 1e3 for c in rows],
            y=[c.predicted_s * 1e3 for c in rows],
            text=[f"{c.row.point}: {c.error:+.0%}" for c in rows],
            name=name,
            mode="markers",
            marker=style.look(i)["marker"],
        )
    every = [c for rows in compared.values() for c in rows]
    top = max(max(c.runs.median, c.predicted_s) for c in every) * 1.02e3
    near = f"{ERROR_BOUND:.0%} off"
    for factor, label in ((1, "equal"), (1 + ERROR_BOUND, near), (1 - ERROR_BOUND, "")):
        fig.add_scatter(
            x=[0, top],
            y=[0, top * factor],
            mode="lines",
            name=label,
            showlegend=bool(label),
            hoverinfo="skip",
            line={"color": style.GREY, "width": 1, "dash": "solid" if factor == 1 else "dash"},
        )
    errors = [c.error for c in every]
    off = np.abs([c.disk_error for c in every if c.row.point.limit_nbytes])
    told = "; ".join(
        f"{name}: median error {a.median_error:.0%}, {a.same_order} of {a.neighbours} "
        "neighbouring points in the measured order"
        for name, a in agree.items()
    )
    return style.describe(
        fig,
        f"Replayed against measured milliseconds of {len(every)} points; errors from "
        f"{min(errors):+.0%} to {max(errors):+.0%}.",
        f"{told} (those whose quartiles are apart). The bytes from the SSD are "
        f"{np.median(off):.1%} off in the median, {max(off):.0%} at worst; the slots' hit rates "
        "are exact.",
    )


def slowdown_chart(found: dict[str, Slowdown], record: SweepRecord) -> go.Figure:
    """How much a middling number of slots costs, over the memory, by kind of routing."""
    high = max(max(s.slowest) for s in found.values())
    most_bytes = max(max(s.bytes) for s in found.values())
    off = max(max(s.most) for s in found.values())
    series = {
        name: ([round(100 * x) for x in s.shares], [[100 * y] for y in s.slowest])
        for name, s in found.items()
    }
    return charts.lines(
        series,
        "The more of the file fits and the cheaper a copy, the slower the middle: "
        f"{high:+.0%} at most",
        "memory, % of the file",
        "slowest over fewest slots (%)",
        f"The SSD brings up to {most_bytes:.1f} times the bytes that it brings with the fewest "
        f"slots. With the most slots that fit, a token is at most {off:.0%} off the best.",
        note="replayed, without arithmetic",
        log_x=False,
        card=record.machine,
    )


def policies_chart(found: PolicyReplays, record: SweepRecord) -> go.Figure:
    """Milliseconds over slots by eviction policy, in replay."""
    at, limit_nbytes = found.middle, found.limit_nbytes
    measured = policy_ratios(record, limit_nbytes, "lfu")
    lfu = ", ".join(f"{x:+.0%} with {s} slots" for s, x in measured.items())
    hits = ", ".join(f"{p} {100 * r.app_hit_rate:.0f}%" for p, r in found.at_middle.items())
    return charts.lines(
        {p: (found.slots, [[1e3 * r.mean_s] for r in rs]) for p, rs in found.replays.items()},
        f"With {at} of {record.sizes.E} slots: {found.told} ms",
        "slots in each layer",
        "ms a token",
        f"Hits with {at} slots: {hits}. Belady's policy knows the future. Measured, lfu takes "
        f"{lfu}, against lru.",
        note=f"replayed, {limit_name(limit_nbytes, record)}, routed {record.trace.like}, without "
        "arithmetic",
        log_x=False,
        card=record.machine,
    )


def pinning_chart(record: SweepRecord) -> go.Figure:
    """A token with pinned experts, with as many slots that take turns, and with few slots."""
    parts = {part: pinning(record, part) for part in ("reads", "decode")}
    few, many, other, _ = parts["reads"]

    def versus(part, base):
        return timing.paired_ratio(parts[part][other], parts[part][base])

    told = "; ".join(
        f"{name} take {timing.quartiles_text(versus(part, many), form='.2f')} times as long as "
        f"with {many}, {timing.quartiles_text(versus(part, few), form='.2f')} times with {few}"
        for part, name in (("reads", "reads"), ("decode", "whole tokens"))
    )
    return charts.bars(
        {"reads": parts["reads"], "with this CPU's arithmetic": parts["decode"]},
        f"Pinned by another text, a token takes {pinning_ratio(record):.2f} times as long as with "
        "as many slots in turn",
        "ms a token",
        f"Pinned by code, {told} (the rest left to the page cache).",
        note=f"routed like tests, {limit_name(record.limits[0], record)}, n={record.runs}; each "
        "round other tokens, the same for all",
        scale=1e3,
        card=record.machine,
    )


# The verdicts


def arithmetic_ms(record: SweepRecord) -> float:
    """Milliseconds of a token's arithmetic: the fastest decoding of the sweep."""
    rows = [r for r in record.rows() if r.decode and r.point.slots and r.point.policy == "lru"]
    return min(r.decode.median for r in rows if not r.point.read_ahead) * 1e3


def pinning_ratio(record: SweepRecord) -> float:
    """Reads pinned by another text over those with as many slots in turn, paired by round."""
    _, many, other, _ = pinning(record).values()
    return timing.paired_ratio(other, many)["median"]


def policy_ratios(record: SweepRecord, limit_nbytes: int, policy: str) -> dict[int, float]:
    """A measured policy's reads over those of ``lru``, less 1, by slots."""
    lru = {r.point.slots: r for r in curve(record, limit_nbytes)}
    rows = curve(record, limit_nbytes, policy=policy)
    return {r.point.slots: r.reads.median / lru[r.point.slots].reads.median - 1 for r in rows}


def verdicts(
    record: SweepRecord, pinned: SweepRecord, found: dict[str, Slowdown], policies: PolicyReplays
) -> list[tuple[str, str, str, str]]:
    """The claims of notebook 03, each with its verdict and the numbers that it rests on.

    Args:
        record (SweepRecord): ``cpu_sweep_35b``.
        pinned (SweepRecord): ``cpu_sweep_pinned``.
        found (dict[str, Slowdown]): Of the replay.
        policies (PolicyReplays): Of the replay.
    """
    tight, roomy = record.limits[:2]
    e, on = extremes(record, roomy), extremes(record, roomy, read_ahead=True)
    free = extremes(record, None)
    off = max(e.most_over_best, extremes(record, tight).most_over_best)
    pages = {n: extremes(record, n).fewest.page_hit_rate for n in (tight, roomy)}
    lfu = ", ".join(
        f"{x:+.0%} with {s} slots" for s, x in policy_ratios(record, roomy, "lfu").items()
    )
    high = max(max(s.slowest) for s in found.values())
    return [
        (
            "A5",
            "at steady state compute is the bottleneck, not I/O; the page cache serves 90% of "
            "reads",
            "depends on",
            f"the device and the memory: {arithmetic_ms(record):.0f} ms of arithmetic hide the "
            f"reads here, a fast device would wait {e.ms(e.fewest):.0f} ms for them; with "
            f"{e.fewest.point.slots} slots the page cache serves {pages[roomy]:.0%} of what is "
            f"read in {roomy / 1e6:.0f} MB, {pages[tight]:.0%} in {tight / 1e6:.0f} MB",
        ),
        (
            "A6",
            "an application cache of experts takes memory from the page cache and slows decoding",
            "depends on",
            f"its size: in {limit_name(roomy, record)} the SSD brings {e.bytes_ratio:.1f} times "
            f"the bytes with {e.most_read.point.slots} slots that it brings with "
            f"{e.fewest.point.slots}; a token's reads take {e.slowdown:+.0%} at worst "
            f"({on.slowdown:+.0%} with the system's read-ahead; up to {high:+.0%} in replay) and "
            f"{e.most_over_fewest:+.0%} with {e.most.point.slots} slots",
        ),
        (
            "E1",
            "does an expert cache help or hurt?",
            "depends on",
            "its size: a small one costs or gains little; the largest that fits is within "
            f"{off:.0%} of the best in both limits; with memory for all of the file slots save "
            f"copies ({free.ms(free.fewest):.1f} to {free.ms(free.most):.1f} ms)",
        ),
        (
            "E4",
            "LRU is enough, or LFU or S3-FIFO is better",
            "depends on",
            f"the page cache below: measured, lfu's reads take {lfu}, against lru; in replay with "
            f"{policies.middle} slots {policies.told} ms; experts pinned by another text's trace "
            f"take {pinning_ratio(pinned):.2f} times lru's time",
        ),
    ]


# Sliders


def dial(
    sizes: ModelSizes, locality: Locality, costs: Costs, tokens: int = 320, seed: int = 0
) -> Callable[..., go.Figure]:
    """The function behind notebook 03's sliders: a trace replayed through both caches.

    Args:
        sizes (ModelSizes): Of the model.
        locality (Locality): Of the traces; their skew is one of the sliders.
        costs (Costs): Of reads; the SSD's bandwidth and the arithmetic are sliders.
        tokens (int): Of the trace; half of them fill the caches.
        seed (int): Of the traces.

    Returns:
        Callable: From memory (% of the checkpoint), slots, policy, skew, SSD (GB/s) and arithmetic
        (ms a token) to a figure.
    """
    traces = {}

    def look(
        memory: int, slots: int, policy: str, skew: float, ssd: float, arithmetic: int
    ) -> go.Figure:
        if skew not in traces:
            skewed = replace(locality, zipf=tuple(skew for _ in locality.zipf))
            traces[skew] = synthesize(skewed, tokens, sizes.L, sizes.E, sizes.K, seed)
        memory_nbytes = sizes.checkpoint_nbytes * memory / 100
        most = sizes.fits(memory_nbytes)
        if most < sizes.K:
            raise ValueError(
                f"{memory}% of the file: {sizes.K} slots do not fit beside the rest of the model. "
                "Take more memory."
            )
        mine = min(max(slots, sizes.K), most)
        at = sorted({*np.linspace(sizes.K, most, DIAL_POINTS).astype(int).tolist(), mine})
        here = replace(
            costs.without_arithmetic(),
            cold_s_per_byte=1 / (ssd * 1e9),
            overlap=1.0,
            expert_s=arithmetic * 1e-3 / (sizes.L * sizes.K),
        )
        every = [*((n, policy) for n in at), (sizes.K, "none")]
        found = advice.replay_settings(sizes, memory_nbytes, traces[skew], here, every, tokens // 2)
        without_slots, chosen = found.pop((sizes.K, "none")), found[mine, policy]
        ms = {n: r.mean_s * 1e3 for (n, _), r in found.items()}
        best = min(ms, key=ms.get)
        fig = style.figure(
            f"{mine} slots: {ms[mine]:.1f} ms a token; best {ms[best]:.1f} with {best}",
            "slots in each layer",
            "ms a token",
            note=f"replayed: {memory_nbytes / 1e6:.0f} MB, {policy}, zipf {skew:.2f}, SSD "
            f"{ssd:.1f} GB/s, arithmetic {arithmetic} ms a token, overlapped",
        )
        x, y = list(ms), list(ms.values())
        fig.add_scatter(x=x, y=y, name=policy, mode="lines+markers", **style.look(0))
        star = {"symbol": "star", "size": 16, "color": style.COLORS[1]}
        fig.add_scatter(x=[mine], y=[ms[mine]], name="chosen", mode="markers", marker=star)
        style.ceiling(fig, without_slots.mean_s * 1e3, "no slots: only the page cache")
        told = ", ".join(f"{m:.1f} at {n}" for n, m in ms.items())
        return style.describe(
            fig,
            f"Replayed milliseconds a token over slots: {told}.",
            f"{chosen.app_hit_rate:.0%} in a slot; {chosen.page_nbytes / 1e6:.0f} MB of page cache "
            f"serve {np.nan_to_num(chosen.page_hit_rate):.0%} of the rest; "
            f"{chosen.read_per_token / 1e6:.1f} MB a token come from the SSD.",
        )

    return look
