"""The command ``bench``: decode the same prompts in each ``Variant``, in rounds of random order."""

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ... import StreamConfig, close, footprint
from ...checkpoint import Checkpoint
from ...commands import arguments
from ...commands.argument_types import (
    not_empty,
    or_auto,
    or_word,
    positive,
    prompt_text,
    zero_or_more,
)
from ...commands.drafting import draft_config
from ...memory import memory_available
from ...streaming.reading import native
from .. import limit, machine, records
from ..arguments import MEASURED_SLOTS, Evicting, parse_modes, several
from ..decode import BUILT_IN, oracle_share
from ..models import folder
from ..texts import PROMPTS, heldout_ids
from ..variants import COLD, Opened, Variant, crossed, resolved, texts_of

if TYPE_CHECKING:
    from pandas import DataFrame


def measure(
    path: str | Path,
    modes: str | Mapping[str, StreamConfig | Variant] = "resident,serial,buffers,stacked,fused",
    base: StreamConfig | None = None,
    tokens: int = 64,
    runs: int = 5,
    warmup: int = 16,
    prompts: Sequence[str] = PROMPTS,
    progress: bool = False,
    on_round: Callable[["DataFrame"], None] | None = None,
    feed: str | Path | None = None,
    temp: float = 0.0,
) -> "DataFrame":
    """Decode the same prompts in every mode, in rounds of random order.

    If any variant has a memory limit, each run has a process of its own. Before a limited run the
    file's pages are dropped, and a killed variant is not run again. Without limits a round of
    warm-up comes first, except with ``MOELAB_FAST=1``. The rounds take the prompts in turn;
    with ``feed`` (a trace's file) the trace's prompt and tokens are read instead. If all models
    together take less than half of the memory, each is loaded once and kept. ``on_round`` gets the
    table after each round. A row is a run.
    """
    path = folder(path)
    given = parse_modes(modes, base) if isinstance(modes, str) else modes
    variants = {n: v if isinstance(v, Variant) else Variant(v) for n, v in given.items()}
    variants = resolved(variants)
    alone = any(v.limit_nbytes for v in variants.values())
    if feed is not None:
        texts_of(feed, warmup + tokens, path)  # refuses an unfit trace before any work
    for v in variants.values():
        if v.draft and oracle_share(v.draft) is None and v.draft not in BUILT_IN:
            draft_config(v.draft, BUILT_IN)  # refuses an unfit draft
    known = [v.config for v in variants.values() if not (alone and v.config.asks_for_slots)]
    predicted = [footprint(path, c).total_nbytes for c in known]  # refuses unfit fields
    together = not alone and sum(predicted) < memory_available() / 2
    cold = {v.cold for v in variants.values()} | ({"prompt"} if alone else set())
    told = [p if isinstance(p, str) else f"{len(p)} tokens of held-out text" for p in prompts]
    settings = {
        "model": path.name,
        "checkpoint_nbytes": Checkpoint(path).nbytes,
        "tokens": tokens,
        "warmup_tokens": warmup,
        **({"feed": Path(feed).name} if feed else {"prompts": told}),
        **({"temp": temp} if temp else {}),
        "cache_state": "warm" if cold == {"no"} else "cold",
        "baseline": next((n for n, v in variants.items() if v.config.mode == "resident"), None),
        "variants": {name: _as_dict(v) for name, v in variants.items()},
    }
    opened = {}

    def run(name, i):
        prompt, num = prompts[i % len(prompts)], tokens if i >= 0 else min(tokens, 16)
        text = prompt, num, warmup, feed, temp, i + 1
        if alone:
            return _sample_alone(path, name, variants[name], *text)
        if name not in opened:
            if not together:
                drop()
            opened[name] = Opened(path, variants[name])
        return opened[name].sample(*text)

    def drop():
        for one in opened.values():
            close(one.model)
        opened.clear()
        gc.collect()
        mx.clear_cache()

    def disk(i):
        return {"disk_bytes_per_s": disk_speed(path)} if i >= 0 and cold != {"no"} else {}

    try:
        return records.interleave(
            "bench",
            {name: partial(run, name) for name in variants},
            runs,
            settings,
            warmup=0 if alone else records.WARMUP,
            each_round=disk,
            keep=on_round,
            progress=progress,
        )
    finally:
        drop()


def _as_dict(variant):
    """Turn a variant into a dict: its config's fields, and other fields that are no defaults."""
    own = {k: v for k, v in vars(variant).items() if k != "config" and v != getattr(Variant, k)}
    return asdict(variant.config) | {k: Path(str(v)).name for k, v in own.items()}


def _sample_alone(path, name, variant, *text):
    """Run a variant in a new process, and return the columns of its row."""
    if variant.limit_nbytes or variant.cold != "no":
        machine.drop_pages(folder(variant.path or path))  # a page counts for its first reader
    made, done = limit.call(
        in_own_process, path, variant, *text, what=name, nbytes=variant.limit_nbytes
    )
    if done.killed and not variant.limit_nbytes:
        raise OSError(f"{name}: killed: this machine has too little memory for it")
    return (made or variant.facts) | {"limited_by": done.how, "killed": done.killed}


def in_own_process(path: str, variant: dict, *text: Any) -> dict[str, Any]:
    """Return the columns of one run, for ``limit.call``; the peak includes the peak of loading."""
    config = variant.pop("config")
    config = (Evicting if "policy" in config else StreamConfig)(**config)
    opened = Opened(folder(path), Variant(config, **variant))
    loading = mx.get_peak_memory()
    with opened.model:
        row = opened.sample(*text)
    return row | {"peak_nbytes": max(row["peak_nbytes"], loading)}


def disk_speed(path: str | Path) -> float:
    """Measure the disk's bytes per second: cold reads of the largest file, past the page cache."""
    file = max(folder(path).glob("*.safetensors"), key=lambda f: f.stat().st_size)
    nbytes = max(4096, min(1 << 20, file.stat().st_size // 32))
    nbytes -= nbytes % native.ALIGNED
    return machine.read_speed(file, True, 16, nbytes, 1024, direct=True)  # 16 reads at once


SHOWN = {  # columns of the report's table
    "tok/s": "tok_s",
    "hits": "hit_rate",
    "MB/token": "read_nbytes_per_token / 1e6",
    "peak MB": "peak_nbytes / 1e6",
    "predicted": "predicted_nbytes / 1e6",
    "prompt s": "prefill_s",
    "tau": "tau",
}


def report(samples: "DataFrame") -> str:
    """Write a bench's medians, each mode's speed relative to the resident model, and its plan."""
    s, alive = samples.attrs["settings"], samples[~samples.killed]
    shown = {n: alive.eval(c) for n, c in SHOWN.items() if c.partition(" ")[0] in samples}
    by_variant = alive[["variant"]].assign(**shown).groupby("variant", sort=False)
    table, baseline = by_variant.median(), s["baseline"]
    if baseline in table.index:
        ratios = records.ratios(samples, baseline)[["median", "low", "high"]]
        table = table.join(ratios.add_prefix("of resident, "))
        same = records.same_tokens(samples, baseline)
        said = {n: "same" if a == b else f"DIFFER in {b - a} of {b}" for n, (a, b) in same.items()}
        table["tokens"] = table.index.map(said)
    plans = alive.dropna(subset="plan").drop_duplicates("variant") if "plan" in alive else alive[:0]
    return "\n".join(
        [
            machine.card_line(samples.attrs["machine"]),
            f"{s['model']}, {s['tokens']} tokens a run, page cache {s['cache_state']}, medians of "
            f"{samples['round'].nunique()} rounds in random order",
            table.to_string(float_format="{:.4g}".format, na_rep="-"),
            *(f"{row.variant}: {row.plan}" for row in plans.itertuples()),
            *(
                f"killed for its memory: {name}"
                for name in samples.variant[samples.killed].unique()
            ),
        ]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Decode the same prompts in every mode, in rounds of random order after one of warm-up. "
        "Tokens are checked against the resident model's. With --limits each run has a process "
        "of its own; the resident model has no limit. Exit status 3: a mode wrote other tokens."
    )
    arguments.add_model(parser)
    add, texts = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    fields_too = (
        "separated by commas; fields of StreamConfig may follow a slash, as in "
        "resident,fused,fused/readers=1/slots=32 (default: %(default)s)"
    )
    add("--modes", default="resident,serial,buffers,stacked,fused", help=fields_too)
    arguments.add_number(parser, "--tokens", 64, "tokens that are timed in each run")
    arguments.add_number(parser, "--warmup", 16, "tokens before the clock starts", zero_or_more)
    arguments.add_number(parser, "--runs", 5, "rounds that are kept")
    again = "give it again for more prompts; - reads standard input (default: built-in prompts)"
    texts("--prompt", type=prompt_text, action="append", metavar="TEXT", help=again)
    heldout = "prompts of N tokens of tiny-moe's held-out text; several lengths take turns"
    texts("--prompt-tokens", type=several(positive), metavar="N", help=heldout)
    fed = "read a trace's text in place of prompt and decoded tokens; TRACE:N: the prompt's last N"
    texts("--feed", metavar="TRACE", help=fed)
    arguments.add_sampling(parser, ("--temp",))
    limits = {"type": several(or_word("none", None, positive)), "metavar": "MB", "default": (None,)}
    memory = "memory of a run, page cache included; or several; none: no limit"
    add("--limits", **limits, help=memory)
    drafts = "lookup, mtp, self, oracle:SHARE, or a folder (model, DFlash draft, head); or several"
    add("--draft", type=several(not_empty), metavar="DRAFT", default=(), help=drafts)
    lengths = {"type": several(or_auto(zero_or_more)), "metavar": "N", "default": (4, "auto")}
    add("--lengths", **lengths, help="drafts in a round; auto: a policy decides (default: 4,auto)")
    packed = "also measure this copy, which python -m moelab repack wrote"
    add("--packed", type=not_empty, metavar="FOLDER", help=packed)
    past = "measure reads through the page cache and past it (Linux)"
    add("--direct", action="store_true", help=past)
    cold = "no, prompt or token: before what to drop the model's files from the page cache"
    add("--cold", choices=COLD, default="no", metavar="WHEN", help=cold)
    kept = "write samples, machine and settings to FILE"
    add("--json", type=not_empty, metavar="FILE", help=kept)
    arguments.add_stream_options(parser, MEASURED_SLOTS)


def run(args: argparse.Namespace) -> int:
    configs = parse_modes(args.modes, arguments.stream_config(args))
    arguments.check_stream_options(args, configs)  # an option without effect is an error
    variants = crossed(
        configs,
        [limit if limit is None else limit * 1_000_000 for limit in args.limits],
        args.draft,
        args.lengths,
        (False, True) if args.direct else (None,),
        {"": None, "packed": args.packed} if args.packed else {"": None},
        args.cold,
    )
    prompts = args.prompt or PROMPTS
    if args.prompt_tokens:
        prompts = heldout_ids(args.model, args.prompt_tokens, args.runs)
    given = {name: getattr(args, name) for name in ("tokens", "runs", "warmup", "feed", "temp")}
    keep = partial(records.save, args.json) if args.json else None
    samples = measure(args.model, variants, prompts=prompts, on_round=keep, progress=True, **given)
    records.print_and_save(report(samples), samples, args.json)
    return 0 if _as_resident(samples) else 3


def _as_resident(samples):
    """Whether every mode with the model's own top-k decoded the same tokens as the resident model.

    Always true on a GPU: half precision rounds differently there if a prompt's experts are grouped
    differently, so different tokens are no error.
    """
    settings = samples.attrs["settings"]
    if samples.attrs["machine"]["device"] == "gpu" or settings["baseline"] is None:
        return True
    same = records.same_tokens(samples, settings["baseline"])
    configs = settings["variants"]
    return all(equal == n or configs[m]["top_k"] is not None for m, (equal, n) in same.items())
