"""Notebook 03: slots against the page cache, a recorded sweep beside its replay."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...replay import advice, eviction, pagecache
from ...replay.costs import Costs
from ...replay.locality import Locality, decode_trace, synthesize
from ...replay.pagecache import Replay
from ...replay.sizes import ModelSizes
from ...streaming.trace import Trace
from .. import limit, timing
from .sweep import DECODE_WARMUP, points, sweep
from .sweep_record import Point, Row, Runs, SweepRecord, Tokens

ERROR_BOUND = 0.15  # what a replay may be off and still be called near
# Below this the disk brought next to nothing, and a ratio of its bytes says nothing.
SOME_NBYTES = 100_000


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

    Left out are points with read-ahead, an oracle or pinned experts, which are not replayed, and of
    ``decode`` those without slots: they compute in another mode than the one whose costs were
    measured.

    Args:
        record (SweepRecord): The sweep.
        part (str): ``reads`` or ``decode``.
        costs (Costs, optional): Default: those in the record.
        **how: As for ``pagecache.replay``.
    """
    out = []
    for row in record.rows():
        point, runs = row.point, row.runs(part)
        if runs is None or not point.is_replayed or (part == "decode" and not point.slots):
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


def curve(
    record: SweepRecord,
    limit_nbytes: int | None,
    part: str = "reads",
    policy: str = "lru",
    read_ahead: bool = False,
    prefetch: str = "none",
) -> list[Row]:
    """The points of one line of a sweep, by slots."""
    line = Point(0, limit_nbytes, policy, read_ahead, prefetch=prefetch)
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


def roofline(record: SweepRecord, limit_nbytes: int, prefetch: str = "none") -> dict[int, float]:
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
    rows = curve(record, limit_nbytes, "decode", prefetch=prefetch)
    return {
        r.point.slots: max(arithmetic_s, r.decode_disk_per_token * s_per_byte) / r.decode.median
        for r in rows
        if r.point.slots
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
            if r.point.is_replayed
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


def pinning(record: SweepRecord, part: str = "reads") -> dict[str, list[float]]:
    """A token's seconds in every round of a sweep with pinned experts, by the cache in words."""
    return {row.point.cache: row.runs(part).seconds for row in record.rows()}


def pinning_ratio(record: SweepRecord) -> float:
    """Reads pinned by another text over those with as many slots in turn, paired by round."""
    _, many, other, _ = pinning(record).values()
    return timing.paired_ratio(other, many)["median"]


def policy_ratios(record: SweepRecord, limit_nbytes: int, policy: str) -> dict[int, float]:
    """A measured policy's reads over those of ``lru``, less 1, by slots."""
    lru = {r.point.slots: r for r in curve(record, limit_nbytes)}
    rows = curve(record, limit_nbytes, policy=policy)
    return {r.point.slots: r.reads.median / lru[r.point.slots].reads.median - 1 for r in rows}


def arithmetic_ms(record: SweepRecord) -> float:
    """Milliseconds of a token's arithmetic: the fastest decoding of the sweep."""
    rows = [r for r in record.rows() if r.decode and r.point.slots and r.point.policy == "lru"]
    return min(r.decode.median for r in rows if r.point.is_replayed) * 1e3


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
    policies = [p for p in eviction.policies() if p != "none"]
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
    path: str | Path,
    limits: list[int | None],
    slots: list[int],
    trace: Trace,
    runs: int,
    tokens: Tokens,
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
