"""Notebook 05: fewer experts per token, in speed and bits per byte.

    python -m moelab bench-top-k MODEL --json FILE

The command takes more samples than the notebook has time for.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import DATA, StreamConfig, footprint, synthesize
from ...commands.argument_types import not_empty, positive, several
from ...commands.arguments import add_json, add_model, add_number
from .. import machine, records, timing
from ..quality import Score, at_top_k, xz_bits_per_byte
from ..texts import heldout_files
from . import bench

if TYPE_CHECKING:
    from pandas import DataFrame, Series

# Tokens per second by top-k, not run here.
PUBLISHED = {k: records.PUBLISHED["PR 26"][f"buffers, top-{k}"] for k in (8, 6, 4, 2)}
PUBLISHED_SHAPE = "qwen3.5-122b-a10b"
RECORD = "top_k_cpu"  # in data/results


def predicted_speedup(path: str | Path, ks: Sequence[int], base: int) -> dict[int, float]:
    """Speed over ``base`` if a token's time were in proportion to the bytes of weights it uses.

    Args:
        path (str or Path): A model folder, or a key of ``synthesize.CONFIGS`` for the shapes of a
            real model.
        ks (Sequence[int]): Values of K.
        base (int): The K to compare with.

    Returns:
        dict[int, float]: By K; also for K=0, a token without any routed expert.
    """
    if str(path) in synthesize.CONFIGS:
        tensors, config = synthesize.plan(synthesize.CONFIGS[str(path)])
        experts = [t.nbytes for t in tensors if ".switch_mlp." in t.name]
        one = sum(experts) / config["text_config"]["num_experts"]
        used = [t.nbytes for t in tensors if "embed_tokens" not in t.name]
        rest = sum(used) - sum(experts)
    else:
        f = footprint(path, StreamConfig())
        one = f.num_layers * f.expert_nbytes
        rest = f.checkpoint_nbytes - f.num_experts * one
    nbytes = {k: rest + k * one for k in (*ks, 0)}
    return {k: (rest + base * one) / n for k, n in nbytes.items()}


def published_speedup(ks: Sequence[int]) -> dict[int, float]:
    """The published speed over that of the first K, where both were published."""
    full = ks[0]
    known = [k for k in ks if k in PUBLISHED and full in PUBLISHED]
    return {k: PUBLISHED[k] / PUBLISHED[full] for k in known}


@dataclass(frozen=True)
class Speeds:
    """Decoding at several top-k in several modes, interleaved.

    Attributes:
        samples (DataFrame): Of ``bench.measure``, its modes named as ``name`` does.
        ks (tuple[int]): Values of K; the first is what the others are compared with.
    """

    samples: "DataFrame"
    ks: tuple[int, ...]

    @staticmethod
    def name(mode: str, k: int) -> str:
        """What a mode at one K is called in the table."""
        return f"{mode}, K={k}"

    @classmethod
    def measure(
        cls,
        path: str | Path,
        ks: Sequence[int],
        modes: Sequence[str] = ("resident", "fused"),
        slots: int = 16,
        tokens: int = 64,
        runs: int = 5,
        warmup: int = 8,
        progress: bool = True,
    ) -> "Speeds":
        """Decode in every mode at every K: the same prompts, rounds in random order.

        Args:
            path (str or Path): A model folder.
            ks (Sequence[int]): Values of K.
            modes (Sequence[str]): As for ``StreamConfig``.
            slots (int): S.
            tokens (int): Timed in each run.
            runs (int): Rounds.
            warmup (int): Tokens before the clock starts.
            progress (bool): Show a bar.
        """
        configs = {
            cls.name(mode, k): StreamConfig(mode=mode, top_k=k, slots=slots)
            for mode in modes
            for k in ks
        }
        samples = bench.measure(
            path, configs, tokens=tokens, runs=runs, warmup=warmup, progress=progress
        )
        return cls(samples, tuple(ks))

    def values(self, mode: str, k: int, column: str) -> "Series":
        """A column of one mode at one K, by round."""
        return records.values(self.samples, self.name(mode, k), column)

    def token_s(self, mode: str, k: int) -> np.ndarray:
        """Seconds for a token in each run."""
        return self.values(mode, k, "token_s").to_numpy()

    def speedup(self, mode: str, k: int) -> timing.Summary:
        """Speed over the first K, by round, so that drift cancels."""
        return timing.paired_ratio(self.token_s(mode, self.ks[0]), self.token_s(mode, k))

    def waiting_s(self, mode: str, k: int) -> float:
        """Seconds of a token spent waiting for reads: the median run."""
        return (self.values(mode, k, "wait_s") / self.values(mode, k, "decode_tokens")).median()

    def reads(self, mode: str, k: int) -> tuple[float, float]:
        """Bytes read for a token, and the share of experts that were in a slot."""
        columns = ("read_nbytes_per_token", "hit_rate")
        return tuple(self.values(mode, k, column).mean() for column in columns)

    def tokens(self, mode: str, k: int) -> list[list[int]]:
        """What was decoded in each run."""
        return list(self.values(mode, k, "tokens"))

    def rounds_like_resident(self, k: int) -> int:
        """Rounds in which the streamed model decoded the resident model's tokens."""
        return sum(a == b for a, b in zip(self.tokens("resident", k), self.tokens("fused", k)))

    def table(self) -> str:
        """Tokens per second of every mode and K."""
        lines = [f"{'':14} tok/s: median [quartiles]"]
        for name, rows in self.samples.groupby("variant", sort=False):
            lines.append(f"{name:14} {timing.quartiles_text(rows.tok_s, form='.1f')}")
        return "\n".join(lines)

    def note(self) -> str:
        """What qualifies the numbers."""
        s, streamed = self.samples.attrs["settings"], self.name("fused", self.ks[0])
        return (
            f"{s['model']}, {s['variants'][streamed]['slots']} slots, page cache "
            f"{s['cache_state']}, {s['tokens']} tokens a run, "
            f"n={(self.samples.variant == streamed).sum()}"
        )


@dataclass(frozen=True)
class Record:
    """Speed and quality by top-k, as ``python -m moelab bench-top-k`` records them.

    Attributes:
        machine (dict): As ``machine.card`` gives it.
        model (str): Its name.
        length (int): T, tokens predicted in a window.
        xz_bits_per_byte (float): Of the same text.
        speeds (Speeds): Resident and streamed.
        scores (dict[int, Score]): By K.
        spent_s (float): How long it took.
    """

    machine: dict
    model: str
    length: int
    xz_bits_per_byte: float
    speeds: Speeds
    scores: dict[int, Score]
    spent_s: float

    @classmethod
    def from_json(cls, fields: dict) -> "Record":
        """A record file's contents."""
        scores = {
            int(k): Score(np.array(s["bits"]), np.array(s["nbytes"]))
            for k, s in fields["scores"].items()
        }
        names = cls.__dataclass_fields__
        speeds = Speeds(records.table(fields["speeds"]), tuple(scores))
        return cls(**{n: fields[n] for n in names} | {"speeds": speeds, "scores": scores})

    def to_json(self) -> dict:
        """The record as the file has it."""
        scores = {
            str(k): {name: values.tolist() for name, values in asdict(s).items()}
            for k, s in self.scores.items()
        }
        own = {n: getattr(self, n) for n in self.__dataclass_fields__}
        return {"kind": "top_k", **own, "speeds": self.speeds.samples, "scores": scores}


def recorded(model: str | Path) -> Record | None:
    """The record in ``data/results`` if there is one, and it is of this model.

    Args:
        model (str or Path): A model folder.
    """
    if not (DATA / "results" / f"{RECORD}.json").is_file():
        return None
    made = Record.from_json(records.recorded(RECORD))
    return made if made.model == Path(model).name else None


def measure(
    path: str | Path,
    ks: Sequence[int],
    heldout: str | Path | None = None,
    slots: int = 16,
    length: int = 256,
    count: int = 48,
    tokens: int = 64,
    runs: int = 9,
    on_speeds: Callable[[Record], None] | None = None,
) -> Record:
    """Speed and bits per byte by top-k.

    Args:
        path (str or Path): A model folder.
        ks (Sequence[int]): Values of K; the first is what the others are compared with.
        heldout (str or Path, optional): A folder of text. Default: ``heldout`` in the model's.
        slots (int): S.
        length (int): T, tokens predicted in a window.
        count (int): Windows.
        tokens (int): Decoded in each run.
        runs (int): Rounds.
        on_speeds (Callable, optional): Called with the record when the speeds are known and the
            scores are not, so that an interrupted run keeps them.
    """
    path, begin = Path(path), time.perf_counter()
    texts = list(heldout_files(heldout or path / "heldout").values())
    xz = xz_bits_per_byte(texts)
    speeds = Speeds.measure(path, ks, slots=slots, tokens=tokens, runs=runs)

    def made(scores):
        spent_s = time.perf_counter() - begin
        return Record(machine.card(), path.name, length, xz, speeds, scores, spent_s)

    if on_speeds:
        on_speeds(made({}))
    return made(at_top_k(path, texts, ks, StreamConfig(slots=slots), length, count))


# The command


def quality_table(scores: dict[int, Score]) -> str:
    """Bits per byte of every K, and the increase over the first."""
    base = next(iter(scores.values()))
    lines = ["       bits per byte [95% interval]      increase [95% interval]"]
    for k, s in scores.items():
        (low, high), (rise, a, b) = s.interval(), s.increase(base)
        lines.append(
            f"K={k}:   {s.bits_per_byte:.3f} [{low:.3f} - {high:.3f}]         "
            f"{rise:+7.2%} [{a:+.2%} to {b:+.2%}]"
        )
    return "\n".join(lines)


def report(out: Record) -> str:
    """The record's tables."""
    return f"{out.speeds.table()}\n\n{quality_table(out.scores)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Record speed and bits per byte by top-k, more samples of both than notebook 05 has time "
        "for."
    )
    add_model(parser)
    parser.add_argument(
        "--heldout", type=not_empty, metavar="FOLDER", help="of text (default: MODEL/heldout)"
    )
    parser.add_argument(
        "--top-k",
        type=several(positive),
        default="8,6,4,2,1",
        help="divided by commas; the first is compared with (default: %(default)s)",
    )
    add_number(parser, "--slots", 16, "in each layer")
    add_number(parser, "--length", 256, "tokens in a window")
    add_number(parser, "--count", 48, "windows")
    add_number(parser, "--tokens", 64, "decoded in a run")
    add_number(parser, "--runs", 9, "rounds")
    add_json(parser, required=True)


def run(args: argparse.Namespace) -> None:
    """The command."""

    out = measure(
        args.model,
        args.top_k,
        args.heldout,
        args.slots,
        args.length,
        args.count,
        args.tokens,
        args.runs,
        on_speeds=lambda out: records.save(args.json, out),
    )
    records.print_and_save(report(out), out, args.json)
