"""Decode the same prompts in several modes, and what of it is the reads.

The commands ``bench`` and ``bench-limit``: in this process, or each run in one of its own with a
memory limit.
"""

import argparse
import gc
import random
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from ... import StreamConfig, close, footprint, load
from ...checkpoint import Checkpoint
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
from ...streaming.session import session_of
from ...streaming.trace import Trace
from .. import limit, machine, oscache, records, timing
from ..decode import decode, encode
from ..models import folder
from ..texts import PROMPTS

if TYPE_CHECKING:
    from pandas import DataFrame, Series

OTHER_TOKENS = 3  # the exit status
DISK_READERS, DISK_READS = 16, 1024  # a prompt reads much, many at once
UNKEPT_TOKENS = 16  # at most so many are timed in the round before the first
RSS_UNIT_NBYTES = 1 if sys.platform == "darwin" else 1024  # of getrusage
RESIDENT = "resident, no limit"  # what runs under a limit are compared with


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

    def get(self, name: str) -> tuple[nn.Module, TokenizerWrapper, int]:
        """The model, its tokenizer, and the bytes that it holds in MLX."""
        if name not in self.models:
            if not self.together:
                self.drop()
            before = mx.get_active_memory()
            self.models[name] = load(self.path, self.configs[name])
            self.nbytes[name] = mx.get_active_memory() - before
        return *self.models[name], self.nbytes[name]

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
    on_round: Callable[["DataFrame"], None] | None = None,
    feed: str | Path | None = None,
    limit_nbytes: int | None = None,
) -> "DataFrame":
    """Decode the same prompts in every mode, in rounds of random order.

    Args:
        path (str or Path): The model.
        modes (str or Mapping): As for ``parse_modes``; or configs by name.
        base (StreamConfig): What the modes have in common.
        tokens (int): Decoded and timed in each run.
        runs (int): Rounds; round i takes prompt i, modulo their number. Without a limit one more
            comes first, with the last prompt, and is not kept.
        warmup (int): Tokens decoded in each run before the clock starts.
        prompts (Sequence[str]): The prompts.
        seed (int): Of the orders.
        together (bool): Whether to keep all models loaded. Default: if they take less than half of
            the memory available.
        cold (bool): Drop the checkpoint's pages from the page cache before the prompt and the clock
            starts; slots stay as they are.
        progress (bool): Show a bar.
        on_round (Callable): Called with the table after each round, so that an interrupted bench
            is not lost.
        feed (str or Path): A trace's file: its prompt in place of ``prompts``, and the tokens
            behind it in place of greedy ones. The tokens of a sample are the greedy ones.
        limit_nbytes (int): Decode with so much memory, page cache included, each run in a new
            process whose page cache is empty. The modes are then called ``NAME, limit``, and
            ``RESIDENT`` runs beside them without a limit. A mode that was killed is not run again.

    Returns:
        DataFrame: A row a run: ``variant``, ``round``, ``tokens`` (list: the prompt's next token,
        the warm-up and the timed ones), ``prefill_s``, ``prompt_nbytes`` (read for the prompt),
        ``decode_tokens``, ``decode_s``, ``step_s`` (list), the ``Counters`` of the timed tokens,
        ``peak_nbytes`` (the most that MLX held), ``predicted_nbytes`` (of ``footprint``),
        ``rss_warm_nbytes`` and ``rss_end_nbytes`` (of the process, before and after the timed
        tokens), ``plan`` (why so many slots, if ``moelab.plan`` chose them) and, cold or with a
        limit, ``disk_bytes_per_s`` before the round. With a limit also ``rss_begin_nbytes``,
        ``limited_by`` and ``killed``.

    Raises:
        ValueError: If a trace is too short to feed or of another vocabulary, or ``auto`` kernels
            are not the same in all modes.
        limit.NoLimit: If memory cannot be limited here.
        OSError: If a run with a limit failed, and not because it was killed.
    """
    path = folder(path)
    configs = _resolved(parse_modes(modes, base) if isinstance(modes, str) else modes)
    if feed is not None:
        texts_of(feed, warmup + tokens, path)  # refuses what cannot be before any work
    known = [c for c in configs.values() if limit_nbytes is None or not c.asks_for_slots]
    predicted = [footprint(path, c).total_nbytes for c in known]  # refuses, too
    if limit_nbytes is not None:
        configs = {f"{name}, limit": c for name, c in configs.items()}
        configs = {RESIDENT: resident_like(base).resolved()} | configs
    elif together is None:
        together = sum(predicted) < memory_available() / 2
    running = records.Running(
        "bench",
        {
            "model": path.name,
            "checkpoint_nbytes": Checkpoint(path).nbytes,
            "tokens": tokens,
            "warmup_tokens": warmup,
            **({"prompts": list(prompts)} if feed is None else {"feed": Path(feed).name}),
            "seed": seed,
            "cache_state": "cold" if cold or limit_nbytes else "warm",
            **({"limit_nbytes": limit_nbytes} if limit_nbytes else {"together": together}),
            "baseline": next((n for n, c in configs.items() if c.mode == "resident"), None),
            "variants": {name: asdict(c) for name, c in configs.items()},
        },
    )
    rows, order, loaded = [], random.Random(seed), _Loaded(path, configs, together)
    drop, alone = partial(oscache.drop_pages, path), limit_nbytes is not None

    def run(name, num, prompt):
        """A row of the table."""
        if not alone:
            model, tokenizer, nbytes = loaded.get(name)
            dropped = drop if cold else None
            return _sample(model, tokenizer, path, num, warmup, prompt, feed, nbytes, dropped)
        limited = None if name == RESIDENT else limit_nbytes
        if limited:
            drop()  # pages of another process do not count towards this one's limit
        call = (path, configs[name], num, warmup, prompt, feed)
        made, done = limit.call(in_own_process, *call, what=name, nbytes=limited)
        if done.killed and not limited:
            raise OSError(f"{name}: killed: this machine has too little memory for it")
        return (made or {}) | {"limited_by": done.how, "killed": done.killed}

    killed, first = set(), 0 if alone else -1
    total = (runs - first) * len(configs)
    bar = tqdm(total=total, desc="bench", unit="run", leave=False, disable=not progress)
    try:
        for i in range(first, runs):
            measured = i >= 0 and (cold or alone)
            disk = {"disk_bytes_per_s": disk_speed(path)} if measured else {}
            for name in order.sample(list(configs), len(configs)):
                if name not in killed:
                    num = tokens if i >= 0 else min(tokens, UNKEPT_TOKENS)
                    row = run(name, num, prompts[i % len(prompts)])
                    killed |= {name} if row.get("killed") else set()
                    rows += [{"variant": name, "round": i} | row | disk] if i >= 0 else []
                bar.update()
            if i >= 0 and on_round:
                on_round(running.table(rows, partial=True))
    finally:
        bar.close()
        loaded.drop()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return running.table(rows, process_peak_rss_nbytes=peak * RSS_UNIT_NBYTES)


def _sample(model, tokenizer, path, tokens, warmup, prompt, feed, nbytes, drop=None):
    """The columns of a run. ``nbytes`` of MLX's memory are the model's before it."""
    rss_nbytes = []

    def before_clock():
        rss_nbytes.append(psutil.Process().memory_info().rss)
        if drop:
            drop()

    ids, fed = texts_of(feed, warmup + tokens, path) if feed else (encode(tokenizer, prompt), None)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ran = decode(model, ids, tokens, warmup, before_clock, fed, before_prompt=drop)
    peak, taken, counters = mx.get_peak_memory(), session_of(model), asdict(ran.counters)
    del counters["tokens"]
    return {
        "tokens": ran.tokens,
        "prefill_s": ran.prefill_s,
        "prompt_nbytes": ran.prompt_nbytes,
        "decode_tokens": tokens,
        "decode_s": ran.decode_s,
        "step_s": ran.step_s,
        **counters,
        "peak_nbytes": nbytes + peak - before,
        "predicted_nbytes": footprint(path, taken.config).total_nbytes,
        "rss_warm_nbytes": rss_nbytes[0],
        "rss_end_nbytes": psutil.Process().memory_info().rss,
        **({"plan": taken.plan.reason} if taken.plan else {}),
    }


def in_own_process(
    path: str, config: dict, tokens: int, warmup: int, prompt: str, feed: str | None
) -> dict[str, Any]:
    """One run of ``measure``, for ``limit.call``: the columns of its row.

    ``peak_nbytes`` includes what loading held at most.
    """
    begin = psutil.Process().memory_info().rss
    model, tokenizer = load(path, StreamConfig(**config))
    loading = mx.get_peak_memory()
    with model:
        held = mx.get_active_memory()
        row = _sample(model, tokenizer, folder(path), tokens, warmup, prompt, feed, held)
    row["peak_nbytes"] = max(row["peak_nbytes"], loading)
    return row | {"rss_begin_nbytes": begin}


def texts_of(feed: str | Path, num: int, model_path: str | Path) -> tuple[list[int], list[int]]:
    """The prompt of a trace, and the tokens that follow it.

    Args:
        feed (str or Path): The trace's file.
        num (int): How many tokens must follow.
        model_path (str or Path): The model that will read them.

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


def ceilings(samples: "DataFrame") -> dict[str, dict[str, float]]:
    """What a mode could reach if reads were all that is added to the resident model's work.

    That work is the resident model's with the same kernels.

    Args:
        samples (DataFrame): Of ``measure``, with ``read_bytes_per_s`` by name in its header.

    Returns:
        dict: For every streamed mode, if a resident one with the same kernels is beside it, tokens
        per second by the name of the speed; ``no reads`` is that resident model.
    """
    configs, speeds = samples.attrs["settings"]["variants"], samples.attrs["read_bytes_per_s"]
    token_s = {
        config["kernels"]: records.values(samples, name, "token_s").median()
        for name, config in configs.items()
        if config["mode"] == "resident"
    }
    out = {}
    for name, config in configs.items():
        if config["mode"] != "resident" and config["kernels"] in token_s:
            nbytes = records.values(samples, name, "read_nbytes_per_token").mean()
            alone = token_s[config["kernels"]]
            with_reads = {k: 1 / (alone + nbytes / speed) for k, speed in speeds.items()}
            out[name] = {"no reads": 1 / alone} | with_reads
    return out


def prompt_of_bound(samples: "DataFrame", variant: str) -> "Series":
    """How near a prompt comes to its bound, by round: the bound's seconds over the measured ones.

    The bound is what reading alone or computing alone would take, whichever is more: the prompt's
    bytes at the disk's speed before the round, or the resident model's prompt.

    Args:
        samples (DataFrame): Of ``measure``, cold or with a limit, with a resident mode.
        variant (str): A streamed mode.
    """
    baseline = samples.attrs["settings"]["baseline"]
    rows = samples[samples.variant == variant].set_index("round")
    read_s = rows.prompt_nbytes / rows.disk_bytes_per_s
    computed_s = records.values(samples, baseline, "prefill_s")
    return read_s.clip(lower=computed_s.reindex(read_s.index)) / rows.prefill_s


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


def report(samples: "DataFrame") -> str:
    """A bench's table, what was killed, prompts against their bound, and ceilings, as text."""
    s, machine_card = samples.attrs["settings"], samples.attrs["machine"]
    baseline, names = s["baseline"], [n for n in s["variants"] if n in set(samples.variant)]
    if limited := s.get("limit_nbytes"):
        how = f"{limited / 1e6:.0f} MB with the page cache, each run a process of its own"
    else:
        how = "models loaded " + ("all at once" if s["together"] else "one at a time")
    text = f"tokens of {s['feed']}" if "feed" in s else "greedy tokens"
    ratio = records.ratios(samples, baseline) if baseline else {}
    same = records.same_tokens(samples, baseline) if baseline else {}
    wide = max(map(len, names))
    lines = [
        machine.card_line(machine_card),
        f"{s['model']} ({s['checkpoint_nbytes'] / 1e6:.0f} MB of tensors): {s['tokens']} {text} a "
        f"run after {s['warmup_tokens']} of warm-up, {how}, rounds in random order, page cache "
        f"{s['cache_state']}",
        f"{'mode':{wide}}  {'tok/s median [quartiles]':26} {'of resident [interval]':26} "
        f"{'hits':>5} {'MB/token':>9} {'peak MB':>8} {'predicted':>9}  {'prompt s':>8}  tokens",
    ]
    for name in names:
        rows = samples[(samples.variant == name) & ~samples.killed]
        if rows.empty or samples[samples.variant == name].killed.any():
            lines.append(f"{name:{wide}}  killed for its memory")
            continue
        streamed = s["variants"][name]["mode"] != "resident"
        reads = f"{'-':>5} {'-':>9}"
        if streamed:
            nbytes = rows.read_nbytes_per_token.mean()
            reads = f"{rows.hit_rate.mean():5.0%} {nbytes / 1e6:9.2f}"
        equal, n = same.get(name, (0, 0))
        said = "-" if name == baseline or not n else "same"
        said = f"DIFFER in {n - equal} of {n} rounds" if n != equal else said
        lines.append(
            f"{name:{wide}}  {timing.quartiles_text(rows.tok_s):26} "
            f"{_interval(ratio.loc[name]) if name != baseline and n else '-':26} {reads} "
            f"{rows.peak_nbytes.max() / 1e6:8.0f} {rows.predicted_nbytes.max() / 1e6:9.0f}  "
            f"{rows.prefill_s.median():8.3g}  {said}"
        )
    for name in names:
        rows = samples[(samples.variant == name) & ~samples.killed]
        if rows.empty:
            continue
        if limited:
            grown = (rows.rss_end_nbytes - rows.rss_warm_nbytes).max() / 1e6
            lines.append(
                f"{name}: process {rows.rss_end_nbytes.max() / 1e6:.0f} MB, {grown:+.1f} MB over "
                f"the timed tokens ({rows.limited_by.iloc[0]})"
            )
        if "plan" in rows and not rows.plan.isna().all():
            lines.append(f"{name}: {rows.plan.dropna().iloc[0]}")
        if baseline and "disk_bytes_per_s" in rows and s["variants"][name]["mode"] != "resident":
            share = timing.quartiles_text(prompt_of_bound(samples, name).dropna(), form=".2f")
            lines.append(
                f"prompt, {name}: {timing.quartiles_text(rows.prefill_s, form='.2f')} s, "
                f"{rows.prompt_nbytes.median() / 1e6:.0f} MB read; the larger of its reads at the "
                f"disk's speed and resident's prompt is {share} of that"
            )
    for name, ceiling in ceilings(samples).items() if "read_bytes_per_s" in samples.attrs else ():
        speeds = ", ".join(f"{v:.1f} tok/s with {k}" for k, v in ceiling.items())
        lines.append(f"ceilings, {name}: {speeds}")
    return "\n".join(lines)


def _interval(ratio):
    return (
        f"{ratio['median']:.3g} [{ratio['low']:.3g} - {ratio['high']:.3g}] "
        f"{ratio['confidence']:.0%}"
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
    samples = measure(
        args.model,
        configs,
        base,
        args.tokens,
        args.runs,
        args.warmup,
        args.prompt or PROMPTS,
        together={"auto": None, "yes": True, "no": False}[args.together],
        cold=args.cold,
        on_round=partial(records.save, args.json) if args.json else None,
    )
    samples.attrs["read_bytes_per_s"] = read_speeds(args.model, base.readers)
    records.print_and_save(report(samples), samples, args.json)
    return 0 if _as_resident(samples) else OTHER_TOKENS


def _as_resident(samples):
    """Whether every mode that was asked for all experts decoded the resident model's tokens.

    On a GPU other tokens are no error: half precision rounds differently there when a prompt's
    experts are grouped differently, which ``exactness.agreement`` measures.
    """
    settings = samples.attrs["settings"]
    if samples.attrs["machine"]["device"] == "gpu" or settings["baseline"] is None:
        return True
    same = records.same_tokens(samples, settings["baseline"])
    configs = settings["variants"]
    return all(equal == n or configs[m]["top_k"] is not None for m, (equal, n) in same.items())
