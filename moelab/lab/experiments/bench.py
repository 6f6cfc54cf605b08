"""Decode the same prompts in several ways, in rounds of random order: the command ``bench``.

A way is a ``Variant``: a mode, and with it a memory limit, a draft, a cold page cache, another
layout of the model, or reads past the page cache.
"""

import argparse
import gc
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import psutil
from mlx_lm.sample_utils import make_sampler

from ... import StreamConfig, close, footprint, load, record
from ...checkpoint import Checkpoint
from ...commands.argument_types import not_empty, or_auto, positive, zero_or_more
from ...commands.arguments import add_model, add_number, add_sampling
from ...commands.drafting import draft_config
from ...commands.stream_options import add_stream_options
from ...memory import memory_available
from ...streaming.config import SLOT_MODES
from ...streaming.reading import native
from ...streaming.session import session_of
from ...streaming.trace import Trace
from .. import limit, machine, oscache, records
from ..arguments import (
    MEASURED_SLOTS,
    add_json,
    add_modes,
    add_prompts,
    modes_given,
    or_none,
    parse_modes,
    several,
)
from ..decode import BUILT_IN, decode, decode_drafted, encode, open_any
from ..models import folder
from ..texts import PROMPTS, heldout_ids

if TYPE_CHECKING:
    from pandas import DataFrame

OTHER_TOKENS = 3  # the exit status if other tokens were decoded
DISK_READERS, DISK_READS = 16, 1024  # as many as a prompt reads, and as many at once
UNKEPT_TOKENS = 16  # at most so many are timed in the round before the first
RSS_UNIT_NBYTES = 1 if sys.platform == "darwin" else 1024  # unit of getrusage
RESIDENT = "resident, no limit"  # runs under a limit are compared with it
COLD = ("no", "prompt", "token")  # when the checkpoint's pages are dropped: see ``Variant``


@dataclass(frozen=True)
class Variant:
    """One way to load a model and decode, which a bench measures."""

    config: StreamConfig  # how to load the model
    path: str | Path | None = None  # a folder with another layout; None: the bench's
    limit_nbytes: int | None = None  # of the process, page cache included; None: no limit
    draft: str | None = None  # one of ``decode.BUILT_IN``, or a draft's folder
    num_drafts: int | str = "auto"  # tokens drafted in a round; ``auto``: the policy decides
    # When the checkpoint's pages are dropped from the page cache: ``no``, never; ``prompt``, before
    # the prompt and before the clock starts; ``token``, before each token.
    cold: str = "no"

    def __post_init__(self):
        if self.cold not in COLD:
            raise ValueError(f"cold: expected one of {', '.join(COLD)}, got {self.cold!r}")
        if self.draft and self.cold == "token":
            raise ValueError("cold: expected no or prompt with a draft, got token")

    @property
    def facts(self) -> dict[str, Any]:
        """The columns that tell this variant's rows apart, without those it has no use for."""
        drafts = {"draft": Path(self.draft or "").name, "num_drafts": str(self.num_drafts)}
        config, cache = self.config, {}
        if config.mode in SLOT_MODES:
            cache |= {} if config.asks_for_slots else {"slots": config.slots}
            cache |= {} if config.policy == "auto" else {"policy": config.policy}
        return {
            "mode": config.mode,
            **cache,
            **({"top_k": config.top_k} if config.top_k else {}),
            **({"limit_nbytes": self.limit_nbytes} if self.limit_nbytes else {}),
            **(drafts if self.draft else {}),
            **({"cold": self.cold} if self.cold != "no" else {}),
            **({} if config.reads == "auto" else {"direct": config.reads == "direct"}),
        }


def resident_like(base: StreamConfig | None = None) -> StreamConfig:
    """Make the resident baseline of a config, with its dtype, top-k and kernels."""
    base = base or StreamConfig()
    return StreamConfig(mode="resident", dtype=base.dtype, top_k=base.top_k, kernels=base.kernels)


def crossed(
    configs: Mapping[str, StreamConfig],
    limits: Sequence[int | None] = (None,),
    draft: str | None = None,
    lengths: Sequence[int | str] = (),
    direct: Sequence[bool | None] = (None,),
    layouts: Mapping[str, str | Path | None] = {"": None},
    cold: str = "no",
) -> dict[str, Variant]:
    """Combine every mode, layout, limit, way to read and number of drafts (and none), by name.

    With a limit, ``RESIDENT`` comes first. Modes without slots read only through the page cache.
    """
    out, drafts = {}, [None, *lengths] if draft else [None]
    every = product(configs.items(), layouts.items(), limits, direct, drafts)
    for (name, config), (layout, path), limit_nbytes, past, n in every:
        if past and config.mode not in SLOT_MODES:
            continue
        past = past if config.mode in SLOT_MODES else None
        if past is not None:
            config = replace(config, reads="direct" if past else "cached")
        words = [name, layout]
        words += [f"{limit_nbytes / 1e6:.0f} MB"] if limit_nbytes else []
        words += [] if past is None else ["past the page cache" if past else "page cache"]
        words += [] if n is None else ["policy" if n == "auto" else f"{n} drafts"]
        drafted = {} if n is None else {"draft": draft, "num_drafts": n}
        made = Variant(config, path, limit_nbytes, cold=cold, **drafted)
        out[", ".join(filter(None, words))] = made
    if any(limits) and configs:
        first = next(iter(configs.values()))
        out = {RESIDENT: Variant(resident_like(first))} | out
    return out


def _resolved(variants):
    """The variants with the kernels that ``auto`` stands for, the same in all of them."""
    given = {name: v.config for name, v in variants.items()}
    made = {name: replace(v, config=v.config.resolved()) for name, v in variants.items()}
    by_kernels = {v.config.kernels: n for n, v in made.items() if given[n].kernels == "auto"}
    if len(by_kernels) > 1:
        raise ValueError(
            f"bench: expected the same kernels in every mode, got fast in {by_kernels['fast']!r} "
            f"and mlx in {by_kernels['mlx']!r}, which sets another dtype. Set them: "
            "kernels=mlx, or /kernels=mlx behind each mode."
        )
    return made


class _Opened:
    """A variant's model and draft, loaded."""

    def __init__(self, path: Path, variant: Variant):
        self.variant, self.path = variant, folder(variant.path) if variant.path else path
        before = mx.get_active_memory()
        self.model, self.tokenizer = load(self.path, variant.config)
        self.make_draft = None
        if variant.draft:
            self.make_draft = open_any(variant.draft, self.model, variant.config.kernels)
        self.nbytes = mx.get_active_memory() - before

    def sample(self, prompt, tokens, warmup, feed, temp, seed) -> dict[str, Any]:
        """The columns of a run."""
        model, variant, rss_nbytes, disk = self.model, self.variant, [], []
        drop = partial(oscache.drop_pages, self.path) if variant.cold != "no" else None
        if feed:
            ids, fed = texts_of(feed, warmup + tokens, self.path)
        else:
            is_text = isinstance(prompt, str)
            ids, fed = encode(self.tokenizer, prompt) if is_text else list(prompt), None
        amount = {"tokens": tokens, "warmup": warmup}
        if variant.config.prefetch == "oracle":
            with record(model) as trace:
                decode(model, ids, **amount, feed=fed)
            session_of(model).prefetcher.set_trace(trace)
            if drop or variant.limit_nbytes:  # the pages that it read
                oscache.drop_pages(self.path)

        def before_clock():
            rss_nbytes.append(psutil.Process().memory_info().rss)
            if drop:
                drop()
            disk.append(oscache.disk_read_nbytes())

        given = {**amount, "before_clock": before_clock, "before_prompt": drop}
        given["sampler"] = make_sampler(temp) if temp else None
        if self.make_draft:
            is_oracle = variant.draft == "oracle"  # an oracle needs the text beforehand
            mx.random.seed(seed)
            text = (
                decode(model, ids, **amount, sampler=given["sampler"]).tokens if is_oracle else []
            )
            draft, number = self.make_draft(ids, text), variant.num_drafts
        mx.random.seed(seed)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        if self.make_draft:
            ran = decode_drafted(model, ids, draft, number, **given)
        else:
            ran = decode(
                model,
                ids,
                **given,
                feed=fed,
                before_token=drop if variant.cold == "token" else None,
            )
        disk.append(oscache.disk_read_nbytes())
        peak, taken, counters = mx.get_peak_memory(), session_of(model), asdict(ran.counters)
        del counters["tokens"]
        row = {
            "prompt_tokens": len(ids),
            "tokens": ran.tokens,
            "prefill_s": ran.prefill_s,
            "prompt_nbytes": ran.prompt_nbytes,
            "decode_tokens": ran.decode_tokens,
            "decode_s": ran.decode_s,
            "step_s": ran.step_s,
            **counters,
            "held_nbytes": self.nbytes,
            **({} if None in disk else {"disk_nbytes": disk[1] - disk[0]}),
            "peak_nbytes": self.nbytes + peak - before,
            "predicted_nbytes": footprint(self.path, taken.config).total_nbytes,
            "rss_warm_nbytes": rss_nbytes[0],
            "rss_end_nbytes": psutil.Process().memory_info().rss,
            **({"plan": taken.plan.reason, "slots": taken.plan.slots} if taken.plan else {}),
            **variant.facts,
        }
        if ran.rounds:
            drafted, accepted, draft_s, verify_s = zip(*ran.rounds)
            with_drafts = [a + 1 for d, a in zip(drafted, accepted) if d]
            row |= {
                "rounds": len(ran.rounds),
                "drafted": sum(drafted),
                "accepted": sum(accepted),
                "committed": with_drafts,
                "draft_s": sum(draft_s),
                "verify_s": sum(verify_s),
            }
        return row


def measure(
    path: str | Path,
    modes: str | Mapping[str, StreamConfig | Variant] = "resident,serial,buffers,stacked,fused",
    base: StreamConfig | None = None,
    tokens: int = 64,
    runs: int = 5,
    warmup: int = 16,
    prompts: Sequence[str] = PROMPTS,
    seed: int = 0,
    progress: bool = False,
    on_round: Callable[["DataFrame"], None] | None = None,
    feed: str | Path | None = None,
    temp: float = 0.0,
) -> "DataFrame":
    """Decode the same prompts in every mode, in rounds of random order.

    Where a variant has a memory limit, each run of each variant has a process of its own, whose
    page cache is empty, and a variant that was killed is not run again. Else a first round is not
    kept. Round i takes prompt i, modulo their number; with ``feed``, a trace's file, its prompt and
    tokens are read instead. All models stay loaded if they take less than half of the memory.
    ``on_round`` gets the table after each round. A row is a run.
    """
    path = folder(path)
    given = parse_modes(modes, base) if isinstance(modes, str) else modes
    variants = {n: v if isinstance(v, Variant) else Variant(v) for n, v in given.items()}
    variants = _resolved(variants)
    alone = any(v.limit_nbytes for v in variants.values())
    if feed is not None:
        texts_of(feed, warmup + tokens, path)  # refuses an unfit trace before any work
    for v in variants.values():
        if v.draft and v.draft not in BUILT_IN:
            draft_config(v.draft, BUILT_IN)  # refuses an unfit draft
    known = [v.config for v in variants.values() if not (alone and v.config.asks_for_slots)]
    predicted = [footprint(path, c).total_nbytes for c in known]  # refuses unfit fields
    together = not alone and sum(predicted) < memory_available() / 2
    cold = {v.cold for v in variants.values()} | ({"prompt"} if alone else set())
    settings = {
        "model": path.name,
        "checkpoint_nbytes": Checkpoint(path).nbytes,
        "tokens": tokens,
        "warmup_tokens": warmup,
        **({"feed": Path(feed).name} if feed else {"prompts": list(map(_words, prompts))}),
        **({"temp": temp} if temp else {}),
        "cache_state": "warm" if cold == {"no"} else "cold",
        "baseline": next((n for n, v in variants.items() if v.config.mode == "resident"), None),
        "variants": {name: _as_dict(v) for name, v in variants.items()},
    }
    opened = {}

    def run(name, i):
        prompt, num = prompts[i % len(prompts)], tokens if i >= 0 else min(tokens, UNKEPT_TOKENS)
        text = prompt, num, warmup, feed, temp, seed + i + 1
        if alone:
            return _sample_alone(path, name, variants[name], *text)
        if name not in opened:
            if not together:
                drop()
            opened[name] = _Opened(path, variants[name])
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
        samples = records.interleave(
            "bench",
            {name: partial(run, name) for name in variants},
            runs,
            settings,
            warmup=0 if alone else 1,
            seed=seed,
            each_round=disk,
            keep=on_round,
            progress=progress,
        )
    finally:
        drop()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    samples.attrs["process_peak_rss_nbytes"] = peak * RSS_UNIT_NBYTES
    return samples


def _words(prompt):
    return prompt if isinstance(prompt, str) else f"{len(prompt)} tokens of held-out text"


def _as_dict(variant):
    """A variant as a dict for a header: its config's fields and its own that are set."""
    own = {f.name: getattr(variant, f.name) for f in fields(variant)}
    default = Variant(own.pop("config"))
    set_here = {k: Path(str(v)).name for k, v in own.items() if v != getattr(default, k)}
    return asdict(variant.config) | set_here


def _sample_alone(path, name, variant, *text):
    """Run a variant in a new process, and return the columns of its row."""
    if variant.limit_nbytes or variant.cold != "no":
        oscache.drop_pages(folder(variant.path or path))  # pages that others read would be free
    made, done = limit.call(
        in_own_process, path, variant, *text, what=name, nbytes=variant.limit_nbytes
    )
    if done.killed and not variant.limit_nbytes:
        raise OSError(f"{name}: killed: this machine has too little memory for it")
    return (made or variant.facts) | {"limited_by": done.how, "killed": done.killed}


def in_own_process(path: str, variant: dict, *text: Any) -> dict[str, Any]:
    """One run of ``measure``, for ``limit.call``: the columns of its row.

    ``peak_nbytes`` includes what loading held at most.
    """
    begin = psutil.Process().memory_info().rss
    config = StreamConfig(**variant.pop("config"))
    opened = _Opened(folder(path), Variant(config, **variant))
    loading = mx.get_peak_memory()
    with opened.model:
        row = opened.sample(*text)
    row["peak_nbytes"] = max(row["peak_nbytes"], loading)
    return row | {"rss_begin_nbytes": begin}


def texts_of(feed: str | Path, num: int, model_path: str | Path) -> tuple[list[int], list[int]]:
    """The prompt of a trace's file, and the ``num`` tokens or more that follow it."""
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


def disk_speed(path: str | Path) -> float:
    """Bytes per second of the disk: a thousand reads of the checkpoint's largest file, cold.

    On Linux they go past the page cache, with which the system is slower than the disk.
    """
    file = max(folder(path).glob("*.safetensors"), key=lambda f: f.stat().st_size)
    nbytes = max(4096, min(1 << 20, file.stat().st_size // 32))
    nbytes -= nbytes % native.ALIGNED
    return machine.read_speed(file, True, DISK_READERS, nbytes, DISK_READS, direct=True)


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
    """Write the medians of a bench, each mode's speed over the resident model's, and its plan."""
    s, alive = samples.attrs["settings"], samples[~samples.killed]
    shown = {n: c for n, c in SHOWN.items() if c.partition(" ")[0] in samples}
    columns = {label: alive.eval(column) for label, column in shown.items()}
    columns = records.pandas().DataFrame(columns)
    table = columns.groupby(alive.variant, sort=False).median()
    if s["baseline"] in table.index:
        ratios = records.ratios(samples, s["baseline"])[["median", "low", "high"]]
        table = table.join(ratios.add_prefix("of resident, "))
        same = records.same_tokens(samples, s["baseline"])
        said = {n: "same" if a == b else f"DIFFER in {b - a} of {b}" for n, (a, b) in same.items()}
        table["tokens"] = table.index.map(said)
    lines = [
        machine.card_line(samples.attrs["machine"]),
        f"{s['model']}, {s['tokens']} tokens a run, page cache {s['cache_state']}, medians of "
        f"{samples['round'].nunique()} rounds in random order",
        table.to_string(float_format="{:.4g}".format, na_rep="-"),
    ]
    if "plan" in alive:
        plans = alive.dropna(subset="plan").groupby("variant", sort=False).plan.first()
        lines += [f"{name}: {plan}" for name, plan in plans.items()]
    dead = dict.fromkeys(samples[samples.killed].variant)
    return "\n".join(lines + [f"killed for its memory: {name}" for name in dead])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "python -m moelab bench [options] MODEL"
    parser.description = (
        "Decode the same prompts in every mode, in rounds of random order after one of warm-up. "
        "Tokens are checked against the resident model's. With --limits each run has a process "
        "of its own, and the resident model one without a limit. Exit status 3: other tokens."
    )
    add_model(parser)
    add_modes(parser, "resident,serial,buffers,stacked,fused")
    add_number(parser, "--tokens", 64, "timed in each run")
    add_number(parser, "--warmup", 16, "tokens before the clock starts", zero_or_more)
    add_number(parser, "--runs", 5, "rounds that are kept")
    text = parser.add_mutually_exclusive_group()
    add_prompts(text)
    text.add_argument(
        "--prompt-tokens",
        type=several(positive),
        metavar="N",
        help="so many of tiny-moe's held-out text; several lengths take turns",
    )
    text.add_argument(
        "--feed",
        metavar="TRACE",
        help="read this trace's text in place of a prompt and of decoded tokens",
    )
    add_sampling(parser, ("--temp",))
    parser.add_argument(
        "--limits",
        type=several(or_none(positive)),
        metavar="MB",
        default=(None,),
        help="memory of each run, page cache included; or several, and none",
    )
    parser.add_argument(
        "--draft",
        type=not_empty,
        metavar="DRAFT",
        help="lookup, self, oracle, or the folder of a model or a DFlash draft",
    )
    parser.add_argument(
        "--lengths",
        type=several(or_auto(zero_or_more)),
        metavar="N",
        default=(4, "auto"),
        help="drafts in a round; auto: the policy (default: 4,auto)",
    )
    parser.add_argument(
        "--packed",
        type=not_empty,
        metavar="FOLDER",
        help="measure this copy from python -m moelab repack, too",
    )
    parser.add_argument(
        "--direct",
        action="store_true",
        help="measure reads through the page cache and past it (Linux)",
    )
    parser.add_argument(
        "--cold",
        choices=COLD,
        default="no",
        metavar="WHEN",
        help="no, or drop the file from the page cache before a prompt or token",
    )
    add_json(parser)
    add_stream_options(parser, MEASURED_SLOTS)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    configs = modes_given(args)
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
    samples = measure(
        args.model,
        variants,
        tokens=args.tokens,
        runs=args.runs,
        warmup=args.warmup,
        prompts=prompts,
        on_round=partial(records.save, args.json) if args.json else None,
        feed=args.feed,
        temp=args.temp,
        progress=True,
    )
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
