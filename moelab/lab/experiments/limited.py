"""Decode under a memory limit, every run in a process of its own, against the resident model."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from tqdm import tqdm

from ... import StreamConfig, footprint, load
from ...checkpoint import Checkpoint
from ...commands.argument_types import positive, zero_or_more
from ...commands.arguments import add_json, add_model, add_number, add_prompts
from ...commands.stream_options import MEASURED_SLOTS, add_modes, add_stream_options, modes_given
from ...streaming.session import session_of
from ...streaming.trace import Trace
from .. import limit, machine, oscache, records, timing
from ..decode import decode, encode
from ..models import folder
from ..records import Sample
from .bench import disk_speed, resident_like

RESIDENT = "resident, no limit"
SIZES = ("mlx_peak_nbytes", "predicted_nbytes", "rss_nbytes")
PROMPTS = ("def main():\n",)


@dataclass(frozen=True)
class Run:
    """One run, in a process of its own.

    Attributes:
        variant (str): The mode, and whether it was limited.
        round (int): Its round.
        killed (bool): Whether it went over the limit.
        how (str): What limited it.
        sample (Sample, optional): What it decoded; None if it was killed.
        mlx_peak_nbytes (int): The most that MLX held, load and prompt included.
        predicted_nbytes (int): What ``footprint`` says that the model takes.
        rss_nbytes (list[int]): Of the process: before MLX held anything, after the warm-up and at
            the end.
        plan (str, optional): The reason of ``moelab.plan`` for its slots, if it chose them.
    """

    variant: str
    round: int
    killed: bool
    how: str
    sample: Sample | None = None
    mlx_peak_nbytes: int = 0
    predicted_nbytes: int = 0
    rss_nbytes: list[int] = field(default_factory=list)
    plan: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The run as record files have it."""
        out = {
            "round": self.round,
            "variant": self.variant,
            "killed": self.killed,
            "how": self.how,
        }
        if self.sample is None:
            return out
        sample = self.sample.to_json()
        del sample["peak_nbytes"]
        return (
            sample
            | out
            | {
                "mlx_peak_nbytes": self.mlx_peak_nbytes,
                "predicted_nbytes": self.predicted_nbytes,
                "rss_nbytes": self.rss_nbytes,
            }
            | ({} if self.plan is None else {"plan": self.plan})
        )


@dataclass(frozen=True)
class Variant:
    """What follows from the runs of a variant that was not killed.

    Attributes:
        how (str): What limited it.
        decode_tok_s (Summary): Decoded tokens per second.
        ratio (Summary): Speed over the resident model's without a limit, round by round.
        same_tokens (bool): Whether it decoded that model's tokens in every round.
        hit_rate (float): Share of the needed experts that were in their slots, the median run.
        bytes_per_token (float): Bytes read for a token, the median run.
        peak_of_predicted (float): MLX's peak over ``footprint``'s prediction, the largest.
        rss_growth_nbytes (int): What the process grew by over the timed tokens, the most.
        rss_nbytes (int): Memory of the process at the end, the most.
    """

    how: str
    decode_tok_s: timing.Summary
    ratio: timing.Summary
    same_tokens: bool
    hit_rate: float
    bytes_per_token: float
    peak_of_predicted: float
    rss_growth_nbytes: int
    rss_nbytes: int


@dataclass(frozen=True)
class LimitedRecord:
    """What ``bench_limited`` measured.

    Attributes:
        model (str): The folder's name.
        limit_nbytes (int): Of a limited run, page cache included.
        checkpoint_nbytes (int): Of the model's tensors on disk.
        tokens (int): Timed in each run.
        warmup_tokens (int): Decoded in each run before the clock starts.
        prompts (list[str]): Round i took prompt i, modulo their number; none with ``feed``.
        machine (dict): Of ``machine.card``.
        samples (list[Run]): Every run.
        disk_speeds (list[float]): Bytes per second of the disk, before each round; older records
            have none.
        feed (str or None): The file of the trace whose text was read; None for greedy tokens.
    """

    model: str
    limit_nbytes: int
    checkpoint_nbytes: int
    tokens: int
    warmup_tokens: int
    prompts: list[str]
    machine: dict[str, Any]
    samples: list[Run] = field(default_factory=list)
    disk_speeds: list[float] = field(default_factory=list)
    feed: str | None = None

    @cached_property
    def killed(self) -> dict[str, str]:
        """The variants that went over the limit, each with what limited it."""
        return {r.variant: r.how for r in self.samples if r.killed}

    @cached_property
    def variants(self) -> dict[str, Variant]:
        """The other variants, by name."""
        names = dict.fromkeys(r.variant for r in self.samples)
        return {name: self._variant(name) for name in names if name not in self.killed}

    def _variant(self, name):
        runs = [r for r in self.samples if r.variant == name]
        mine = [r.sample for r in runs]
        resident = {r.round: r.sample for r in self.samples if r.variant == RESIDENT}
        theirs = [resident[r.round] for r in runs]
        return Variant(
            how=runs[0].how,
            decode_tok_s=timing.summary([s.counters.tokens / s.decode_s for s in mine]),
            ratio=timing.paired_ratio([s.decode_s for s in theirs], [s.decode_s for s in mine]),
            same_tokens=all(a.tokens == b.tokens for a, b in zip(mine, theirs)),
            hit_rate=statistics.median(s.counters.hit_rate for s in mine),
            bytes_per_token=statistics.median(s.counters.bytes_per_token for s in mine),
            peak_of_predicted=max(r.mlx_peak_nbytes / r.predicted_nbytes for r in runs),
            rss_growth_nbytes=max(r.rss_nbytes[2] - r.rss_nbytes[1] for r in runs),
            rss_nbytes=max(r.rss_nbytes[2] for r in runs),
        )

    def to_json(self) -> dict[str, Any]:
        """The record as files have it."""
        out = {"kind": "limited"} | asdict(self)
        out["samples"] = [r.to_json() for r in self.samples]
        if self.feed is None:
            del out["feed"]
        variants = {name: {"killed": False} | asdict(v) for name, v in self.variants.items()}
        killed = {name: {"killed": True, "how": how} for name, how in self.killed.items()}
        return out | {"summary": variants | killed}


def texts_of(feed: str | Path, num: int, model_path: Path) -> tuple[list[int], list[int]]:
    """The prompt of a trace, and the tokens that follow it.

    Args:
        feed (str or Path): The trace's file.
        num (int): How many tokens must follow.
        model_path (Path): The model that will read them.

    Raises:
        ValueError: If there are fewer, or if the model's vocabulary lacks one of them.
    """
    trace, config = Trace.load(feed), Checkpoint(model_path).config
    ids, first = trace.tokens.tolist(), int((trace.phase == "prefill").sum())
    if not first or len(ids) - first < num:
        raise ValueError(
            f"--feed {feed}: expected a prompt and {num} tokens behind it (--warmup and --tokens), "
            f"got {first} and {len(ids) - first}. Take fewer tokens or another trace."
        )
    size = config.get("text_config", config)["vocab_size"]
    if max(ids) >= size:
        raise ValueError(
            f"--feed {feed}: expected tokens below {size}, the vocabulary of {model_path}, got "
            f"{max(ids)}. Take a trace of a model with the same tokenizer."
        )
    return ids[:first], ids[first : first + num]


def measure(
    model_path: str | Path,
    config: StreamConfig,
    tokens: int,
    warmup: int,
    prompt: str,
    feed: str | Path | None = None,
) -> dict[str, Any]:
    """Decode once and say what it took; meant for a process of its own.

    Args:
        model_path (str or Path): As for ``moelab.load``.
        config (StreamConfig): How to stream.
        tokens (int): Tokens timed.
        warmup (int): Tokens decoded before.
        prompt (str): What to continue.
        feed (str or Path or None): A trace: its prompt is read in place of ``prompt``, and the
            tokens behind it in place of the greedy ones.

    Returns:
        dict: The fields of ``Decoded``, and the last three attributes of ``Run``.
    """
    rss_nbytes = []

    def note_rss():
        rss_nbytes.append(psutil.Process().memory_info().rss)

    note_rss()
    model, tokenizer = load(model_path, config)
    with model:
        if feed is None:
            ids, fed = encode(tokenizer, prompt), None
        else:
            ids, fed = texts_of(feed, warmup + tokens, folder(model_path))
        ran = decode(model, ids, tokens, warmup, before_clock=note_rss, feed=fed)
        note_rss()
        taken = session_of(model)
    return {
        **asdict(ran),
        "mlx_peak_nbytes": mx.get_peak_memory(),
        "predicted_nbytes": footprint(model_path, taken.config).total_nbytes,
        "rss_nbytes": rss_nbytes,
        "plan": taken.plan and taken.plan.reason,
    }


def _measure(model_path, config, *rest):
    """``measure``, its config as JSON has it."""
    return measure(model_path, StreamConfig(**config), *rest)


def bench_limited(
    model_path: str | Path,
    configs: Mapping[str, StreamConfig],
    nbytes: int,
    tokens: int = 64,
    warmup: int = 16,
    runs: int = 5,
    prompts: Sequence[str] | None = None,
    base: StreamConfig | None = None,
    feed: str | Path | None = None,
) -> LimitedRecord:
    """Decode in every mode under a memory limit, and resident with all the memory.

    Each run is a new process, limited before it loads anything. In every round the variants take
    turns.

    Args:
        model_path (str or Path): The model.
        configs (Mapping[str, StreamConfig]): The modes, by name.
        nbytes (int): The limit, page cache included.
        tokens (int): Timed in a run.
        warmup (int): Decoded before.
        runs (int): Rounds.
        prompts (Sequence[str]): Round i takes prompt i, modulo their number. Default: ``PROMPTS``.
        base (StreamConfig): Its dtype and top-k are the resident model's.
        feed (str or Path or None): As for ``measure``.

    Returns:
        LimitedRecord: Every run, and what follows from them.

    Raises:
        limit.NoLimit: If memory cannot be limited here.
        OSError: If a run failed, and not because it was killed.
    """
    prompts, model_path = list(prompts or PROMPTS), folder(model_path)
    if feed is not None:
        texts_of(feed, warmup + tokens, model_path)  # refuses what cannot be before any work
        prompts = []
    for config in configs.values():
        if not config.asks_for_slots:
            footprint(model_path, config)  # refuses what cannot be before any work
    variants = {RESIDENT: (resident_like(base), None)}
    variants |= {f"{name}, limit": (config, nbytes) for name, config in configs.items()}
    samples, disk_speeds = [], []
    for i in tqdm(range(runs), desc="rounds under the limit", leave=False):
        disk_speeds.append(disk_speed(model_path))
        for name, (config, limit_nbytes) in variants.items():
            if any(r.variant == name and r.killed for r in samples):
                continue  # once is enough
            if limit_nbytes is not None:
                # Pages that another process brought in would be served, and not counted.
                oscache.drop_pages(model_path)
            prompt = prompts[i % len(prompts)] if prompts else ""
            call = (model_path, config, tokens, warmup, prompt, feed)
            ran, done = limit.call(_measure, *call, what=name, nbytes=limit_nbytes)
            if not done.killed:
                sizes = {n: ran[n] for n in (*SIZES, "plan")}
                sample = Sample.from_json(ran | {"round": i})
                samples.append(Run(name, i, False, done.how, sample, **sizes))
            elif limit_nbytes is None:
                raise OSError(f"{name}: killed: this machine has too little memory for it")
            else:
                samples.append(Run(name, i, True, done.how))
    return LimitedRecord(
        model=model_path.name,
        limit_nbytes=nbytes,
        checkpoint_nbytes=Checkpoint(model_path).nbytes,
        tokens=tokens,
        warmup_tokens=warmup,
        prompts=prompts,
        machine=machine.card(),
        samples=samples,
        disk_speeds=disk_speeds,
        feed=feed and Path(feed).name,
    )


def _prompt_s(record, name):
    return timing.summary([r.sample.prefill_s for r in record.samples if r.variant == name])


def report(record: LimitedRecord) -> str:
    """A line for each variant."""
    lines = [
        machine.card_line(record.machine),
        f"{record.model}: {record.checkpoint_nbytes / 1e6:.0f} MB of tensors, limit "
        f"{record.limit_nbytes / 1e6:.0f} MB with the page cache; {record.tokens} "
        f"{f'tokens of {record.feed}' if record.feed else 'greedy tokens'} after "
        f"{record.warmup_tokens} of warm-up, each run a process of its own",
    ]
    for name, v in record.variants.items():
        lines.append(
            f"{name}: {timing.quartiles_text(v.decode_tok_s)} tok/s, "
            f"{timing.quartiles_text(v.ratio, form='.3f')} of resident without limit; "
            f"prompt {timing.quartiles_text(_prompt_s(record, name))} s; "
            f"tokens {'same' if v.same_tokens else 'DIFFER'}; hit rate {v.hit_rate:.0%}, "
            f"{v.bytes_per_token / 1e6:.1f} MB/token; "
            f"MLX peak {v.peak_of_predicted:.3f} of predicted; "
            f"process {v.rss_nbytes / 1e6:.0f} MB, "
            f"{v.rss_growth_nbytes / 1e6:+.1f} MB over the timed tokens ({v.how})"
        )
    plans = {r.variant: r.plan for r in record.samples if r.plan}
    lines += [f"{name}: {plan}" for name, plan in plans.items()]
    lines += [f"{name}: killed ({how})" for name, how in record.killed.items()]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Decode with so much memory, page cache included, every run in a process of its own, "
        "against the resident model with all of it."
    )
    add_model(parser)
    parser.add_argument(
        "--limit",
        type=positive,
        metavar="MB",
        required=True,
        help="memory of each run, its page cache included",
    )
    add_modes(parser, "resident,fused")
    add_number(parser, "--tokens", 64, "timed in each run")
    add_number(parser, "--warmup", 16, "tokens before the clock starts", zero_or_more)
    add_number(parser, "--runs", 5, "rounds")
    text = parser.add_mutually_exclusive_group()
    add_prompts(text, "def main():")
    text.add_argument(
        "--feed",
        metavar="TRACE",
        help="read the text of this trace in place of a prompt and of greedy tokens",
    )
    add_json(parser)
    add_stream_options(parser, MEASURED_SLOTS)


def run(args: argparse.Namespace) -> None:
    """The command."""
    base, configs = modes_given(args)
    record = bench_limited(
        args.model,
        configs,
        args.limit * 1_000_000,
        args.tokens,
        args.warmup,
        args.runs,
        args.prompt,
        base,
        args.feed,
    )
    records.print_and_save(report(record), record, args.json)
