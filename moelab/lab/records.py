"""Records: what a measurement keeps as JSON, read back into types, and published figures.

A recorded run is ``data/results/NAME.json``. An experiment returns a record of a type below or of
its own module. A notebook that shows a recorded run parses the file once, with the type's
``from_json``.
"""

import json
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import StreamConfig
from ..shipped import shipped
from ..streaming.session import Counters
from .timing import Summary, paired_ratio, summary

# What the sources say of their own runs, not checked by us; tok/s unless the name says otherwise.
PUBLISHED = {
    "PR 26": {
        "source": "SwiftLM PR 26, Qwen3.5-122B-A10B 4-bit, M1 Ultra 64 GB",
        "serial, top-8": 0.58,
        "buffers, top-8": 4.95,
        "buffers, top-6": 5.20,
        "buffers, top-4": 5.91,
        "buffers, top-2": 6.52,
        "resident memory (GB)": 10.6,
        "SSD rate of the original (GB/s)": 0.3,
        "SSD rate possible (GB/s)": 5.0,
        "ms of GPU in a token": 190.0,
    },
    "PR 90": {
        "source": "SwiftLM PR 90, Qwen3.5-122B-A10B 4-bit, top-6, 16 slots, M1 Ultra 64 GB",
        "buffers": 5.12,
        "stacked": 5.92,
        "fused": 5.64,
        "stacked, by its own percentage": 5.12 * 1.046,
        "one dispatch (us)": 30.0,
    },
    "issue 124": {
        "source": "mlx-swift-lm issue 124, M4 Max 96 GB",
        "dense, Python": 70.2,
        "dense, Swift": 52.8,
        "moe, Python": 85.1,
        "moe, Swift": 11.7,
        "dense layers": 36,
        "moe layers": 40,
    },
    "Anemll": {
        "source": "anemll-flash-mlx, Qwen3.5-35B-A3B 4-bit, top-4, M5 Max 128 GB",
        "resident": 94.5,
        "16 slots": 17.1,
        "64 slots": 42.8,
        "128 slots": 47.1,
    },
}


@dataclass(frozen=True)
class Sample:
    """One greedy run against the clock: ``decode.Decoded`` as a record keeps it.

    Attributes:
        round (int): Its round. Runs of one round had the same prompt and are compared.
        tokens (list[int]): All that it decoded, warm-up included.
        prefill_s (float): Seconds of the prompt.
        decode_s (float): Seconds of the timed tokens.
        counters (Counters, optional): Of the timed tokens; None for a model that is not ours.
        step_s (list[float], optional): Seconds of each timed token; older records have none.
        peak_nbytes (int): The most that MLX held during the run.
        prompt_nbytes (int, optional): Bytes read for the prompt; older records have none.
    """

    round: int
    tokens: list[int]
    prefill_s: float
    decode_s: float
    counters: Counters | None
    step_s: list[float] | None = None
    peak_nbytes: int = 0
    prompt_nbytes: int | None = None

    @classmethod
    def from_json(cls, json_sample: dict[str, Any]) -> "Sample":
        """A sample of a record file; keys that are not its own are left out."""
        own = {f.name: json_sample[f.name] for f in fields(cls) if f.name in json_sample}
        if counters := own["counters"]:
            known = {f.name for f in fields(Counters)} & counters.keys()
            own["counters"] = Counters(**{name: counters[name] for name in known})
        return cls(**own)

    def to_json(self) -> dict[str, Any]:
        """The sample as record files have it."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.step_s is None:
            del out["step_s"]
        if c := self.counters:
            rates = {"hit_rate": c.hit_rate, "bytes_per_token": c.bytes_per_token}
            out["counters"] = asdict(c) | rates
        return out


@dataclass
class BenchMode:
    """One mode of a bench.

    Attributes:
        config (StreamConfig): How it streams.
        predicted_nbytes (int): What ``footprint`` says that it takes.
        samples (list[Sample]): Its runs.
    """

    config: StreamConfig
    predicted_nbytes: int
    samples: list[Sample] = field(default_factory=list)


@dataclass
class BenchRecord:
    """What ``bench.measure`` measured: raw samples, and what follows from them mode by mode.

    Attributes:
        model (str): The folder's name.
        tokens (int): Timed in each run.
        warmup_tokens (int): Decoded in each run before the clock starts.
        modes (dict[str, BenchMode]): By name.
        machine (dict): Of ``machine.card``.
        prompts (list[str]): Round i took prompt i, modulo their number.
        seed (int): Of the orders.
        models_loaded_together (bool): Whether all models were in memory at once.
        cache_state (str): Of the page cache: ``cold`` or ``warm``.
        order (str): How the modes took turns.
        load_average (list[float]): Of the system, when it began.
        process_peak_rss_nbytes (int, optional): The most memory that the process held.
        read_speeds (dict[str, float]): Bytes per second of reads, by name.
        disk_speeds (list[float]): With a cold page cache, those of the disk, before each round.
        ceilings_tok_s (dict[str, dict[str, float]]): Of ``ceilings``.
        partial (bool): Whether rounds are missing.
    """

    model: str
    tokens: int
    warmup_tokens: int
    modes: dict[str, BenchMode]
    machine: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    seed: int = 0
    models_loaded_together: bool = True
    cache_state: str = "warm"
    order: str = ""
    load_average: list[float] = field(default_factory=list)
    process_peak_rss_nbytes: int | None = None
    read_speeds: dict[str, float] = field(default_factory=dict)
    disk_speeds: list[float] = field(default_factory=list)
    ceilings_tok_s: dict[str, dict[str, float]] = field(default_factory=dict)
    partial: bool = False

    @property
    def resident(self) -> str | None:
        """The name of the resident mode, if there is one with samples."""
        modes = self.modes.items()
        return next((n for n, m in modes if m.config.mode == "resident" and m.samples), None)

    def token_s(self, name: str) -> np.ndarray:
        """Seconds of a token, in each round."""
        return np.array([s.decode_s for s in self.modes[name].samples]) / self.tokens

    def decode_tok_s(self, name: str) -> Summary:
        """Decoded tokens per second."""
        return summary([self.tokens / s.decode_s for s in self.modes[name].samples])

    def prefill_s(self, name: str) -> Summary:
        """Seconds of the prompts."""
        return summary([s.prefill_s for s in self.modes[name].samples])

    def prompt_of_bound(self, name: str) -> Summary | None:
        """How near a cold prompt comes to its bound: the bound's seconds over the measured ones.

        The bound is what reading alone or computing alone would take, whichever is more: the
        prompt's bytes at the disk's speed in that round, or the resident model's prompt. None if
        the record lacks a resident mode or the disk's speeds.
        """
        if not (self.resident and self.disk_speeds):
            return None
        resident = {s.round: s.prefill_s for s in self.modes[self.resident].samples}
        return summary(
            [
                max(s.prompt_nbytes / self.disk_speeds[s.round], resident[s.round]) / s.prefill_s
                for s in self.modes[name].samples
            ]
        )

    def peak_nbytes(self, name: str) -> int:
        """The most memory that MLX held for this mode."""
        return max(s.peak_nbytes for s in self.modes[name].samples)

    def counters(self, name: str) -> list[Counters]:
        """Of each run; none of a resident model, which reads nothing."""
        mode = self.modes[name]
        counted = [s.counters for s in mode.samples if s.counters]
        return [] if mode.config.mode == "resident" else counted

    def hit_rate(self, name: str) -> float | None:
        """Share of the needed experts that were in their slots; None if none was asked for."""
        counters = self.counters(name)
        needed = sum(c.hits + c.misses + c.in_pages for c in counters)
        return sum(c.hits for c in counters) / max(1, needed) if counters else None

    def bytes_per_token(self, name: str) -> float | None:
        """Bytes read for a token, the mean of the runs; None for a resident model."""
        counters = self.counters(name)
        return statistics.mean(c.bytes_per_token for c in counters) if counters else None

    def ratio_to_resident(self, name: str) -> Summary | None:
        """Speed over the resident model's, round by round; None if there is none to compare."""
        pairs = self._pairs(name)
        return pairs and paired_ratio(
            [theirs.decode_s for theirs, _ in pairs], [mine.decode_s for _, mine in pairs]
        )

    def rounds_with_the_same_tokens(self, name: str) -> int | None:
        """Rounds in which the resident model decoded the same; None if there is none."""
        pairs = self._pairs(name)
        return pairs and sum(theirs.tokens == mine.tokens for theirs, mine in pairs)

    def _pairs(self, name):
        """The resident model's and this mode's samples of the same rounds."""
        if self.resident in (None, name):
            return None
        theirs = {s.round: s for s in self.modes[self.resident].samples}
        return [(theirs[s.round], s) for s in self.modes[name].samples if s.round in theirs]

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "BenchRecord":
        """A record of kind ``bench``, or a section of a ``cuda_run`` that is one.

        Raises:
            ValueError: If it is of another kind.
        """
        if record.get("kind") != "bench":
            raise ValueError(f"expected a record of kind 'bench', got {record.get('kind')!r}.")
        own = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        own["modes"] = {
            name: BenchMode(
                _config(m["config"]),
                m["predicted_nbytes"],
                [Sample.from_json(s) for s in m["samples"]],
            )
            for name, m in record["modes"].items()
        }
        return cls(**own)

    def to_json(self) -> dict[str, Any]:
        """The record as files have it, with what follows from its samples."""
        out = {"kind": "bench"} | {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("process_peak_rss_nbytes", "read_speeds", "ceilings_tok_s", "partial"):
            if not out[name]:  # not measured yet
                del out[name]
        return out | {"modes": {name: self._mode_to_json(name) for name in self.modes}}

    def _mode_to_json(self, name):
        mode = self.modes[name]
        out = {"config": asdict(mode.config), "predicted_nbytes": mode.predicted_nbytes}
        out["samples"] = [s.to_json() for s in mode.samples]
        if mode.samples:
            for what in (
                "decode_tok_s",
                "prefill_s",
                "peak_nbytes",
                "hit_rate",
                "bytes_per_token",
                "ratio_to_resident",
                "rounds_with_the_same_tokens",
            ):
                value = getattr(self, what)(name)
                if value is not None:
                    out[what] = value
        return out


def _config(recorded):
    """How a recorded model streamed, without settings that the engine no longer has."""
    own = {f.name: recorded[f.name] for f in fields(StreamConfig) if f.name in recorded}
    # What the first records do not name was not there, and the only policy was LRU.
    return StreamConfig(**{"kernels": "mlx", "zero_copy": False, "policy": "lru"} | own)


@dataclass(frozen=True)
class ReadSample:
    """Bytes per second of one run of reads.

    Attributes:
        round (int): Its round.
        kind (str): What was read: ``experts``, ``experts, 32 a call`` or ``weights``.
        depth (int): Reads in flight.
        by (str): ``moelab``, ``fio buffered`` or ``fio direct``.
        bytes_per_s (float): The rate.
    """

    round: int
    kind: str
    depth: int
    by: str
    bytes_per_s: float


@dataclass
class ReadsRecord:
    """What ``reads.bench_reads`` measured.

    Attributes:
        model (str): The folder's name.
        file (str): The file that was read.
        cache_state (str): ``cold`` or ``warm``.
        fio (bool): Whether fio was there to compare with.
        nbytes_a_run (int): Bytes read in each run.
        block_sizes (dict[str, list[int]]): Bytes of the reads, by kind.
        samples (list[ReadSample]): Every run.
        machine (dict): Of ``machine.card``.
    """

    model: str
    file: str
    cache_state: str
    fio: bool
    nbytes_a_run: int
    block_sizes: dict[str, list[int]] = field(default_factory=dict)
    samples: list[ReadSample] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def rates(self) -> dict[tuple[str, int], dict[str, list[float]]]:
        """``{(kind, depth): {by: bytes per second of each round}}``."""
        out = {}
        for s in self.samples:
            out.setdefault((s.kind, s.depth), {}).setdefault(s.by, []).append(s.bytes_per_s)
        return out

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "ReadsRecord":
        """A record of kind ``reads``, or a section of a ``cuda_run`` that is one."""
        own = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        return cls(**own | {"samples": [ReadSample(**s) for s in record["samples"]]})

    def to_json(self) -> dict[str, Any]:
        """The record as files have it."""
        return {"kind": "reads"} | asdict(self)


def recorded(name: str) -> dict[str, Any]:
    """The record ``data/results/NAME.json``, as it is in the file.

    Raises:
        FileNotFoundError: If there is none, with the names of those that there are.
    """
    path = shipped("results", f"{name}.json")
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in path.parent.glob("*.json")))
        raise FileNotFoundError(f"{path}: no such record; there are {names or 'none'}")
    return json.loads(path.read_text())


def reads_GBs(
    record: ReadsRecord | dict, kind: str = "experts"
) -> dict[str, tuple[list[int], list[list[float]]]]:
    """``{by: (depths, samples in GB/s for each depth)}`` of a reads record."""
    if isinstance(record, dict):
        record = ReadsRecord.from_json(record)
    out = {}
    for (its_kind, depth), rates in record.rates().items():
        for by, values in rates.items() if its_kind == kind else ():
            out.setdefault(by, {})[depth] = [v / 1e9 for v in values]
    return {by: (sorted(d), [d[k] for k in sorted(d)]) for by, d in out.items()}


def save(path: str | Path, record: Any) -> None:
    """Write a record as JSON; the old file stays until the new one is whole.

    Args:
        path (str or Path): The file. Its folder is made.
        record (Any): With ``to_json``, a dataclass, or what JSON can hold.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1, default=_plain) + "\n")
    os.replace(partial, path)


def print_and_save(text: str, record: Any, path: str | Path | None = None) -> None:
    """Print a record's report, and save the record if there is a path."""
    print(text)
    if path is not None:
        save(path, record)


def check_writable(path: str | Path) -> None:
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
    """What ``json`` cannot write by itself."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return asdict(value)
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    return str(value)
