"""The command ``bench``: how fast a model decodes in each mode, with noise and ceilings."""

import argparse
import dataclasses
import gc
import os
import random
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from ... import StreamConfig, close, footprint, load
from ...commands.argument_types import zero_or_more
from ...commands.arguments import add_json, add_model, add_number, add_prompts
from ...commands.stream_options import (
    MEASURED_SLOTS,
    add_modes,
    add_stream_options,
    modes_given,
    parse_modes,
)
from ...memory import memory_available
from ...streaming.reading import native
from .. import machine, oscache, records, timing
from ..decode import decode, encode
from ..models import folder
from ..records import BenchMode, BenchRecord, Sample
from ..texts import PROMPTS

OTHER_TOKENS = 3  # the exit status
DISK_READERS, DISK_READS = 16, 1024  # a prompt reads much, many at once
UNKEPT_TOKENS = 16  # at most so many are timed in the round before the first
RSS_UNIT_NBYTES = 1 if sys.platform == "darwin" else 1024  # of getrusage


def resident_like(base: StreamConfig | None = None) -> StreamConfig:
    """The resident baseline of a config: the same dtype, top-k and kernels."""
    base = base or StreamConfig()
    return StreamConfig(mode="resident", dtype=base.dtype, top_k=base.top_k, kernels=base.kernels)


def _resolved(configs):
    """The configs with the kernels that ``auto`` stands for, the same in all of them."""
    resolved = {name: c.resolved() for name, c in configs.items()}
    by_kernels = {r.kernels: n for n, r in resolved.items() if configs[n].kernels == "auto"}
    if len(by_kernels) > 1:
        raise ValueError(
            f"bench: expected the same kernels in every mode, got fast in {by_kernels['fast']!r} "
            f"and mlx in {by_kernels['mlx']!r}, which sets another dtype. Set them: "
            "kernels=mlx, or /kernels=mlx behind each mode."
        )
    return resolved


class _Loaded:
    """The models of a bench: all in memory, or one at a time."""

    def __init__(self, path: Path, configs: Mapping[str, StreamConfig], together: bool):
        self.path, self.configs, self.together = path, configs, together
        self.models, self.nbytes = {}, {}

    def get(self, name: str) -> tuple[nn.Module, TokenizerWrapper]:
        if name not in self.models:
            if not self.together:
                self.drop()
            before = mx.get_active_memory()
            self.models[name] = load(self.path, self.configs[name])
            self.nbytes[name] = mx.get_active_memory() - before
        return self.models[name]

    def drop(self) -> None:
        for model, _ in self.models.values():
            close(model)
        self.models.clear()
        gc.collect()
        mx.clear_cache()


def measure(
    path: str | Path,
    modes: str | Mapping[str, StreamConfig] = "resident,serial,buffers,stacked,fused",
    base: StreamConfig | None = None,
    tokens: int = 64,
    runs: int = 5,
    warmup: int = 16,
    prompts: Sequence[str] = PROMPTS,
    seed: int = 0,
    together: bool | None = None,
    cold: bool = False,
    progress: bool = True,
    on_round: Callable[[BenchRecord], None] | None = None,
    feed: bool = False,
) -> BenchRecord:
    """Decode the same prompts in every mode, in rounds of random order.

    Args:
        path (str or Path): The model.
        modes (str or Mapping): As for ``parse_modes``; or configs by name.
        base (StreamConfig): What the modes have in common.
        tokens (int): Decoded and timed in each run.
        runs (int): Rounds; round i takes prompt i, modulo their number. One more comes first, with
            the last prompt, and is not kept.
        warmup (int): Tokens decoded in each run before the clock starts.
        prompts (Sequence[str]): The prompts.
        seed (int): Of the orders.
        together (bool): Whether to keep all models loaded. Default: if they take less than half of
            the memory available.
        cold (bool): Drop the checkpoint's pages from the page cache before the prompt and the clock
            starts; slots stay as they are.
        progress (bool): Show a bar.
        on_round (Callable): Called with the record after each round, so that an interrupted bench
            is not lost.
        feed (bool): Feed the last ``warmup + tokens`` tokens of each prompt one by one, in place of
            greedy ones. What a sample has are the greedy ones.

    Returns:
        BenchRecord: Raw samples, and what follows from them.

    Raises:
        ValueError: If a prompt is too short to feed, or ``auto`` kernels are not the same in all
            modes.
    """
    path = folder(path)
    configs = parse_modes(modes, base) if isinstance(modes, str) else modes
    configs = _resolved(configs)
    predicted = {name: footprint(path, c).total_nbytes for name, c in configs.items()}
    if together is None:
        together = sum(predicted.values()) < memory_available() / 2
    record = BenchRecord(
        model=path.name,
        machine=machine.card(),
        load_average=list(os.getloadavg()),
        tokens=tokens,
        warmup_tokens=warmup,
        seed=seed,
        prompts=list(prompts),
        models_loaded_together=together,
        order="random in every round; one round before the first is not kept",
        cache_state="cold" if cold else "warm",
        modes={name: BenchMode(config, predicted[name]) for name, config in configs.items()},
    )
    order, loaded = random.Random(seed), _Loaded(path, configs, together)
    drop = partial(oscache.drop_pages, path) if cold else None
    bar = tqdm(
        total=(runs + 1) * len(configs), desc="bench", unit="run", leave=False, disable=not progress
    )
    try:
        for i in range(-1, runs):
            if cold and i >= 0:
                record.disk_speeds.append(disk_speed(path))
            for name in order.sample(list(configs), len(configs)):
                model, tokenizer = loaded.get(name)
                ids = [encode(tokenizer, p) for p in prompts][i % len(prompts)]
                num = tokens if i >= 0 else min(tokens, UNKEPT_TOKENS)
                fed = None
                if feed:
                    if len(ids) <= warmup + tokens:
                        raise ValueError(
                            f"feed: expected prompts of more than {warmup + tokens} tokens, the "
                            f"warm-up's and the timed ones, got {len(ids)}."
                        )
                    ids, fed = ids[: -warmup - tokens], ids[-warmup - tokens :]
                before = mx.get_active_memory()
                mx.reset_peak_memory()
                ran = decode(model, ids, num, warmup, drop, fed, before_prompt=drop)
                bar.update()
                peak = loaded.nbytes[name] + mx.get_peak_memory() - before
                if i >= 0:
                    sample = Sample(round=i, peak_nbytes=peak, **vars(ran))
                    record.modes[name].samples.append(sample)
            if i >= 0 and on_round:
                on_round(record)
    finally:
        bar.close()
        loaded.drop()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    record.process_peak_rss_nbytes = peak * RSS_UNIT_NBYTES
    return record


def ceilings(record: BenchRecord, speeds: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What a mode could reach if reads were all that is added to the resident model's work.

    That work is the resident model's with the same kernels.

    Args:
        record (BenchRecord): With a resident mode, else there are no ceilings.
        speeds (Mapping[str, float]): Bytes per second of reads, by name.

    Returns:
        dict: For every streamed mode, if a resident one with the same kernels is beside it, tokens
        per second by the name of the speed; ``no reads`` is that resident model.
    """
    resident_s = {
        mode.config.kernels: 1 / record.decode_tok_s(name)["median"]
        for name, mode in record.modes.items()
        if mode.config.mode == "resident"
    }
    out = {}
    for name, mode in record.modes.items():
        nbytes, kernels = record.bytes_per_token(name), mode.config.kernels
        if nbytes is not None and kernels in resident_s:
            token_s = resident_s[kernels]
            with_reads = {k: 1 / (token_s + nbytes / v) for k, v in speeds.items()}
            out[name] = {"no reads": 1 / token_s} | with_reads
    return out


def read_speeds(path: str | Path, readers: int = 8, nbytes: int = 1 << 20) -> dict[str, float]:
    """Bytes per second of random reads of the checkpoint's largest file, cold and warm, by name."""
    file, nbytes = _largest(path, nbytes)
    return {
        f"{state} reads": machine.read_speed(file, state == "cold", readers, nbytes)
        for state in ("cold", "warm")
    }


def disk_speed(path: str | Path) -> float:
    """Bytes per second of the disk: a thousand reads of the checkpoint's largest file, cold.

    On Linux past the page cache: through it the system is slower than the disk.
    """
    file, nbytes = _largest(path, 1 << 20)
    nbytes -= nbytes % native.ALIGNED
    return machine.read_speed(file, True, DISK_READERS, nbytes, DISK_READS, direct=True)


def _largest(path, nbytes):
    """The largest file, and how much one read of it takes."""
    file = max(folder(path).glob("*.safetensors"), key=lambda f: f.stat().st_size)
    return file, max(4096, min(nbytes, file.stat().st_size // 32))


def report(record: BenchRecord) -> str:
    """A bench's table and ceilings as text."""
    how = "all loaded at once" if record.models_loaded_together else "loaded one at a time"
    wide = max(map(len, record.modes))
    columns = f"{'tok/s median [quartiles]':26} {'of resident [quartiles]':26} {'hits':>5} "
    lines = [
        machine.card_line(record.machine),
        f"{record.model}: {record.tokens} greedy tokens a run after {record.warmup_tokens} of "
        f"warm-up, models {how}, rounds in random order, page cache {record.cache_state}",
        f"{'mode':{wide}}  {columns}{'MB/token':>9} {'peak MB':>8} {'predicted':>9}  tokens",
    ]
    lines += [f"{name:{wide}}  {_row(record, name)}" for name in record.modes]
    for name, mode in record.modes.items():
        if mode.config.mode != "resident" and (share := record.prompt_of_bound(name)):
            nbytes = timing.summary([s.prompt_nbytes / 1e6 for s in mode.samples])["median"]
            seconds, share = (
                timing.quartiles_text(s, form=".2f") for s in (record.prefill_s(name), share)
            )
            lines.append(
                f"prompt, {name}: {seconds} s, {nbytes:.0f} MB read; the larger of its reads at "
                f"the disk's speed and resident's prompt is {share} of that"
            )
    for name, ceiling in record.ceilings_tok_s.items():
        speeds = ", ".join(f"{v:.1f} tok/s with {k}" for k, v in ceiling.items())
        lines.append(f"ceilings, {name}: {speeds}")
    return "\n".join(lines)


def _row(record, name):
    mode = record.modes[name]
    if not mode.samples:
        return "no samples"
    ratio, same = record.ratio_to_resident(name), record.rounds_with_the_same_tokens(name)
    n, hit_rate = len(mode.samples), record.hit_rate(name)
    reads = f"{'-':>5} {'-':>9}"
    if hit_rate is not None:
        reads = f"{hit_rate:5.0%} {record.bytes_per_token(name) / 1e6:9.2f}"
    tokens = "-" if same is None else "same" if same == n else f"DIFFER in {n - same} of {n} rounds"
    return (
        f"{timing.quartiles_text(record.decode_tok_s(name)):26} "
        f"{timing.quartiles_text(ratio) if ratio else '-':26} {reads} "
        f"{record.peak_nbytes(name) / 1e6:8.0f} {mode.predicted_nbytes / 1e6:9.0f}  {tokens}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Decode the same prompts in every mode, in rounds of random order after one round of "
        "warm-up. Tokens per second are of decoding alone; tokens are checked against the "
        "resident model's. Exit status 3: a mode decoded other tokens."
    )
    add_model(parser)
    add_modes(parser, "resident,serial,buffers,stacked,fused")
    add_number(parser, "--tokens", 64, "timed in each run")
    add_number(parser, "--warmup", 16, "tokens before the clock starts", zero_or_more)
    add_number(parser, "--runs", 5, "rounds that are kept")
    add_prompts(parser)
    parser.add_argument(
        "--together",
        choices=["auto", "yes", "no"],
        default="auto",
        help="all models loaded at once (auto: if half of the memory holds them)",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="drop the checkpoint from the page cache before a prompt and before decoding",
    )
    add_json(parser)
    add_stream_options(parser, MEASURED_SLOTS)


def run(args: argparse.Namespace) -> int:
    """The command."""
    base, configs = modes_given(args)

    def keep(record):
        if args.json:
            records.save(args.json, dataclasses.replace(record, partial=True))

    record = measure(
        args.model,
        configs,
        base,
        args.tokens,
        args.runs,
        args.warmup,
        args.prompt or PROMPTS,
        together={"auto": None, "yes": True, "no": False}[args.together],
        cold=args.cold,
        on_round=keep,
    )
    record.read_speeds = read_speeds(args.model, base.readers)
    record.ceilings_tok_s = ceilings(record, record.read_speeds)
    records.print_and_save(report(record), record, args.json)
    return 0 if _as_resident(record) else OTHER_TOKENS


def _as_resident(record):
    """Whether every mode that was asked for all experts decoded the resident model's tokens.

    On a GPU other tokens are no error: half precision rounds differently there when a prompt's
    experts are grouped differently, which ``exactness.agreement`` measures.
    """
    if record.machine["device"] == "gpu":
        return True
    return all(
        mode.config.top_k is not None
        or record.rounds_with_the_same_tokens(name) in (None, len(mode.samples))
        for name, mode in record.modes.items()
    )
