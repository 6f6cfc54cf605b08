"""The record of a sweep: points, runs and what follows from them, as the files in data/results."""

import base64
import json
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ... import StreamConfig
from ...replay.costs import Costs
from ...replay.sizes import ModelSizes
from ...streaming.trace import Trace
from .. import machine, timing


@dataclass(frozen=True)
class Point:
    """One setting of a sweep.

    Attributes:
        slots (int): S; 0 is no application cache at all, the mode ``buffers``.
        limit_nbytes (int, optional): Of process and page cache; None: no limit.
        policy (str): As in ``StreamConfig``.
        read_ahead (bool): Whether the system may read ahead in the file.
        pinned_nbytes (int): Of ``cpu_sweep_pinned``, from an engine that could do it: memory beside
            the slots for experts that were never evicted.
        pinned_by (str): The trace of ``data/traces`` that said which.
        prefetch (str): ``none``, or ``oracle``: while decoding, a layer's experts are read while
            the layer before computes.
    """

    slots: int
    limit_nbytes: int | None = None
    policy: str = "lru"
    read_ahead: bool = False
    pinned_nbytes: int = 0
    pinned_by: str = ""
    prefetch: str = "none"

    @classmethod
    def from_json(cls, data: dict) -> "Point":
        """The point that a sample of a record was taken at; early records had no pinning."""
        names = {f.name: "ahead" if f.name == "read_ahead" else f.name for f in fields(cls)}
        return cls(**{name: data[key] for name, key in names.items() if key in data})

    def to_json(self) -> dict:
        """As ``from_json`` takes it."""
        own = {("ahead" if k == "read_ahead" else k): v for k, v in asdict(self).items()}
        if self.prefetch == "none":
            del own["prefetch"]
        return own

    @property
    def is_replayed(self) -> bool:
        """Whether the replay knows this setting."""
        return not self.read_ahead and self.prefetch == "none" and not self.pinned_by

    @property
    def line(self) -> "Point":
        """What the points of one line of a chart have in common: all but the slots."""
        return replace(self, slots=0)

    @property
    def config(self) -> StreamConfig:
        """The ``StreamConfig`` of this point."""
        if self.slots == 0:
            return StreamConfig(mode="buffers")
        return StreamConfig(slots=self.slots, policy=self.policy, prefetch=self.prefetch)

    def __str__(self):
        parts = [
            "no limit" if self.limit_nbytes is None else f"{self.limit_nbytes / 1e6:.0f} MB",
            self.cache,
            "" if self.policy == "lru" else self.policy,
            "read-ahead" if self.read_ahead else "",
            "" if self.prefetch == "none" else self.prefetch,
        ]
        return ", ".join(filter(None, parts))

    @property
    def cache(self) -> str:
        """The application's cache, in words."""
        slots = "no slots" if self.slots == 0 else f"{self.slots} slots"
        if not self.pinned_nbytes:
            return slots
        return f"{slots} and {self.pinned_nbytes / 1e6:.0f} MB pinned by {self.pinned_by}"


@dataclass(frozen=True)
class Tokens:
    """How many tokens each part of a run takes.

    Attributes:
        cold (int): From empty slots and a cold file.
        warmup (int): Until the caches are full, the cold ones included.
        reads (int): Timed without their arithmetic.
        decode (int): Timed with it.
    """

    cold: int = 8
    warmup: int = 60
    reads: int = 44
    decode: int = 4


@dataclass(frozen=True)
class Part:
    """What was measured of some tokens of a run.

    Attributes:
        token_s (list[float]): Seconds of each token.
        disk_nbytes (list): Bytes that the disk brought for each; None where unknown.
        asked_nbytes (int): Bytes that were read, from the disk or the page cache.
        misses (int): Experts that were read.
        wait_s (float, optional): Of ``decode``: seconds in which the model waited for reads.
        tokens (list[int], optional): Of ``decode``: what was decoded.
        cpu_s (float, optional): Seconds that all cores together spent on it, in the system and in
            the process. Early records have none.
    """

    token_s: list[float]
    disk_nbytes: list[int | None]
    asked_nbytes: int
    misses: int
    wait_s: float | None = None
    tokens: list[int] | None = None
    cpu_s: float | None = None

    def to_json(self) -> dict:
        """As in the file: without what this part does not have."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    @property
    def disk_per_token(self) -> float:
        """Bytes from the disk for each token; nan where the system does not say."""
        known = None not in self.disk_nbytes
        return float(np.mean(self.disk_nbytes)) if known else float("nan")


@dataclass(frozen=True)
class Measured:
    """What one run measured.

    Attributes:
        load_s (float): Seconds to load the model.
        resident_before_nbytes (int, optional): Of the file, in the page cache before ``cold``.
        cold, reads, decode (Part): The three parts; ``decode`` may be missing.
        faults (int): Pages of the process that had to be read again during ``reads``.
        resident_nbytes (int, optional): Of the file, in the page cache after ``reads``.
        anonymous_nbytes, rss_nbytes, mlx_nbytes (int): Of the process, then.
    """

    load_s: float
    resident_before_nbytes: int | None
    cold: Part
    reads: Part
    faults: int
    resident_nbytes: int | None
    anonymous_nbytes: int
    rss_nbytes: int
    mlx_nbytes: int
    decode: Part | None = None

    @classmethod
    def from_json(cls, data: dict) -> "Measured":
        """Of a sample of a record, whatever else is in it."""
        own = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        parts = {k: Part(**own[k]) for k in ("cold", "reads", "decode") if k in own}
        return cls(**{**own, **parts})

    def to_json(self) -> dict:
        """As in the file."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.decode is None:
            del plain["decode"]
        return {k: v.to_json() if isinstance(v, Part) else v for k, v in plain.items()}


@dataclass(frozen=True)
class Sample:
    """One run of one point.

    Attributes:
        point (Point): The setting.
        round (int): Which round.
        killed (bool): Whether it ran out of memory.
        how (str): What limited the memory.
        refused (dict[str, str]): Why other strategies to limit it could not be used.
        run_s (float): Seconds that the process took.
        measured (Measured, optional): None if it was killed.
    """

    point: Point
    round: int
    killed: bool
    how: str
    refused: dict[str, str]
    run_s: float
    measured: Measured | None = None

    @classmethod
    def from_json(cls, data: dict) -> "Sample":
        """Of a record's file."""
        own = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        measured = None if data["killed"] else Measured.from_json(data)
        return cls(**own, point=Point.from_json(data), measured=measured)

    def to_json(self) -> dict:
        """As in the file."""
        own = {k: getattr(self, k) for k in ("round", "killed", "how", "refused", "run_s")}
        return {**self.point.to_json(), **own, **(self.measured.to_json() if self.measured else {})}


@dataclass(frozen=True)
class RecordedTrace:
    """The trace that chose the experts, as a record keeps it.

    Attributes:
        name (str): The trace in words.
        like (str): Its prompt, or whose locality it has.
        seed (int, optional): Of its draw.
        npz (str): What ``Trace.save`` wrote, in base 64.
    """

    name: str
    like: str
    seed: int | None
    npz: str

    @classmethod
    def of(cls, trace: Trace) -> "RecordedTrace":
        """Keep a trace."""
        with saved(trace) as file:
            npz = base64.b64encode(file.read_bytes()).decode()
        return cls(str(trace), trace.prompt, trace.seed, npz)

    @cached_property
    def trace(self) -> Trace:
        """The trace itself."""
        with tempfile.NamedTemporaryFile(suffix=".npz") as f:
            f.write(base64.b64decode(self.npz))
            f.flush()
            return Trace.load(f.name)


@dataclass(frozen=True)
class Runs:
    """A token's mean seconds in every run of a point, by round."""

    by_round: dict[int, float]

    @property
    def seconds(self) -> list[float]:
        """In the order of the rounds as they were run."""
        return list(self.by_round.values())

    @property
    def median(self) -> float:
        """Of the runs."""
        return float(np.median(self.seconds))

    def apart(self, other: "Runs") -> bool:
        """Whether the two ranges from quartile to quartile do not meet."""
        (a, b), (c, d) = (np.percentile(r.seconds, (25, 75)) for r in (self, other))
        return bool(b < c or d < a)

    def __str__(self):
        return timing.quartiles_text(self.seconds, 1e3, ".2f").rpartition(" n=")[0]


@dataclass(frozen=True)
class Row:
    """What follows from all runs of a point. Numbers are medians over the runs, of ``reads``.

    Attributes:
        point (Point): The setting.
        how (str): What limited the memory.
        cold, reads, decode (Runs): Seconds of a token; ``decode`` may be missing.
        hit_rate (float): Share of the needed experts that were in a slot.
        page_hit_rate (float): Share of the bytes read that the page cache had.
        asked_per_token (float): Bytes read for a token, from the disk or the page cache.
        disk_per_token (float): Bytes that the disk brought for a token.
        decode_disk_per_token (float): The same of ``decode``.
        resident_nbytes (float): Of the file, in the page cache.
        anonymous_nbytes (float): Of the process.
    """

    point: Point
    how: str
    cold: Runs
    reads: Runs
    decode: Runs | None
    hit_rate: float
    page_hit_rate: float
    asked_per_token: float
    disk_per_token: float
    decode_disk_per_token: float
    resident_nbytes: float
    anonymous_nbytes: float

    def runs(self, part: str) -> Runs | None:
        """``cold``, ``reads`` or ``decode`` by name."""
        return getattr(self, part)


@dataclass
class SweepRecord:
    """A sweep: its settings, the machine, and every run.

    Attributes:
        model (str): The name of the model's folder.
        runs (int): Rounds.
        tokens (Tokens): Of each run.
        seed (int): Of the orders.
        trace (RecordedTrace): What chose the experts.
        sizes (ModelSizes): Of the model.
        machine (dict): ``machine.card``.
        costs (dict[int, Costs]): This machine's, by round.
        samples (list[Sample]): The runs, in the order in which they were taken.
        complete (bool, optional): Whether all is there.
    """

    model: str
    runs: int
    tokens: Tokens
    seed: int
    trace: RecordedTrace
    sizes: ModelSizes
    machine: dict = field(default_factory=machine.card)
    costs: dict[int, Costs] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    complete: bool | None = None

    @classmethod
    def from_json(cls, data: dict) -> "SweepRecord":
        """Of a record's file."""
        if data.get("kind") != "sweep":
            raise ValueError(f"expected the record of a sweep, got {data.get('kind')!r}.")
        costs = {c["round"]: {k: v for k, v in c.items() if k != "round"} for c in data["costs"]}
        return cls(
            model=data["model"],
            runs=data["runs"],
            tokens=Tokens(**{f.name: data[f.name] for f in fields(Tokens)}),
            seed=data["seed"],
            trace=RecordedTrace(**data["trace"]),
            sizes=ModelSizes(**data["sizes"]),
            machine=data["machine"],
            costs={i: Costs(**c) for i, c in costs.items()},
            samples=[Sample.from_json(s) for s in data["samples"]],
            complete=data.get("complete"),
        )

    def to_json(self) -> dict:
        """As in the file."""
        done = {} if self.complete is None else {"complete": self.complete}
        return {
            "kind": "sweep",
            "model": self.model,
            "runs": self.runs,
            **asdict(self.tokens),
            "seed": self.seed,
            "trace": {f.name: getattr(self.trace, f.name) for f in fields(RecordedTrace)},
            "sizes": asdict(self.sizes),
            "machine": self.machine,
            "costs": [{"round": i, **asdict(c)} for i, c in self.costs.items()],
            "samples": [s.to_json() for s in self.samples],
            **done,
        }

    @classmethod
    def load(cls, path: str | Path) -> "SweepRecord":
        """Read a record's file."""
        return cls.from_json(json.loads(Path(path).read_text()))

    def differences(self, other: "SweepRecord") -> list[str]:
        """The settings in which two sweeps differ."""
        names = ("model", "runs", "tokens", "seed", "trace", "sizes")
        return [n for n in names if getattr(self, n) != getattr(other, n)]

    @property
    def median_costs(self) -> Costs:
        """This machine's costs, the median of the rounds."""
        return Costs.median(list(self.costs.values()))

    @property
    def limits(self) -> list[int | None]:
        """The memory limits, smallest first, None last."""
        found = {s.point.limit_nbytes for s in self.samples}
        return sorted(found, key=lambda n: (n is None, n))

    @property
    def killed(self) -> list[Point]:
        """The points that ran out of memory."""
        return list(dict.fromkeys(s.point for s in self.samples if s.killed))

    def start(self, i: int) -> int:
        """The row of the trace that round ``i`` begins with."""
        return i * len(self.trace.trace) // self.runs

    def runs_of(self, point: Point) -> list[Sample]:
        """The samples of one point that were not killed."""
        return [s for s in self.samples if s.point == point and not s.killed]

    def rows(self) -> list[Row]:
        """Medians by point, in the order of limit and slots; killed points are left out."""

        def order(p):
            limit = float("inf") if p.limit_nbytes is None else p.limit_nbytes
            by = p.policy != "lru", p.policy, p.pinned_by
            return limit, p.read_ahead, p.prefetch != "none", *by, p.slots

        found = {s.point for s in self.samples} - set(self.killed)
        return [self._row(point) for point in sorted(found, key=order)]

    def _row(self, point):
        samples = self.runs_of(point)
        runs = {s.round: s.measured for s in samples}
        every = list(runs.values())
        reads = [m.reads for m in every]
        disk = float(np.median([r.disk_per_token for r in reads]))
        asked = float(np.median([r.asked_nbytes for r in reads])) / self.tokens.reads
        needed = self.tokens.reads * self.sizes.L * self.sizes.K

        def seconds(part):
            parts = {i: getattr(m, part) for i, m in runs.items()}
            return Runs({i: float(np.mean(p.token_s)) for i, p in parts.items()})

        def median(values):
            known = [v for v in values if v is not None]
            return float(np.median(known)) if known else float("nan")

        decoded = every[0].decode is not None
        return Row(
            point=point,
            how=samples[0].how,
            cold=seconds("cold"),
            reads=seconds("reads"),
            decode=seconds("decode") if decoded else None,
            hit_rate=1 - float(np.median([r.misses for r in reads])) / needed,
            page_hit_rate=float(np.maximum(0, 1 - disk / asked)) if asked else float("nan"),
            asked_per_token=asked,
            disk_per_token=disk,
            decode_disk_per_token=float(np.median([m.decode.disk_per_token for m in every]))
            if decoded
            else float("nan"),
            resident_nbytes=median(m.resident_nbytes for m in every),
            anonymous_nbytes=median(m.anonymous_nbytes for m in every),
        )

    def same_tokens(self) -> bool:
        """Whether all points with slots decoded the same tokens in each round."""
        seen = {}
        for s in self.samples:
            if s.point.slots and s.measured and s.measured.decode:
                seen.setdefault(s.round, set()).add(tuple(s.measured.decode.tokens))
        return all(len(tokens) == 1 for tokens in seen.values())


@contextmanager
def saved(trace: Trace):
    """A trace's file, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="moelab-") as folder:
        trace.save(Path(folder, "trace.npz"))
        yield Path(folder, "trace.npz")
