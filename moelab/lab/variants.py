"""Ways to load a model and decode, which ``bench`` measures: a mode, maybe with a memory limit, a
draft, a cold page cache, another layout of the model, or reads past the page cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.sample_utils import make_sampler

from .. import StreamConfig, footprint, load, record
from ..checkpoint import Checkpoint
from ..commands.drafting import open_draft
from ..speculation.drafts import ModelDraft
from ..streaming.config import SLOT_MODES
from ..streaming.session import session_of
from ..streaming.trace import Trace
from . import machine
from .arguments import Evicting
from .decode import OracleDraft, decode, decode_drafted, encode, oracle_share
from .models import folder

RESIDENT = "resident, no limit"  # the baseline of runs under a limit
COLD = ("no", "prompt", "token")  # when the checkpoint's pages are dropped: see ``Variant``


@dataclass(frozen=True)
class Variant:
    """One way to load a model and decode, which a bench measures."""

    config: StreamConfig  # how to load the model
    path: str | Path | None = None  # a folder with another layout; None: the bench's folder
    limit_nbytes: int | None = None  # memory of the process, page cache included; None: no limit
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
        """The columns that describe this variant in its rows, without those that do not apply."""
        config, has_slots = self.config, self.config.mode in SLOT_MODES
        facts = {
            "mode": config.mode,
            "slots": config.slots if has_slots and not config.asks_for_slots else None,
            "policy": config.policy if has_slots and isinstance(config, Evicting) else None,
            "top_k": config.top_k,
            "limit_nbytes": self.limit_nbytes,
            "draft": Path(self.draft).name if self.draft else None,
            "num_drafts": str(self.num_drafts) if self.draft else None,
            "cold": None if self.cold == "no" else self.cold,
            "direct": None if config.reads == "auto" else config.reads == "direct",
        }
        return {name: value for name, value in facts.items() if value is not None}


def resident_like(base: StreamConfig) -> StreamConfig:
    """Make the resident baseline of a config, with its dtype, top-k and kernels."""
    return StreamConfig(mode="resident", dtype=base.dtype, top_k=base.top_k, kernels=base.kernels)


def crossed(
    configs: Mapping[str, StreamConfig],
    limits: Sequence[int | None] = (None,),
    drafts: Sequence[str] = (),
    lengths: Sequence[int | str] = (),
    direct: Sequence[bool | None] = (None,),
    layouts: Mapping[str, str | Path | None] = {"": None},
    cold: str = "no",
) -> dict[str, Variant]:
    """Make a variant for each combination of mode, layout, limit, reads, draft and draft length.

    Keys are the variants' names. With drafts, each combination is also made without a draft. With a
    limit, ``RESIDENT`` is added. Modes without slots read only through the page cache.
    """
    out, rounds = {}, [(None, "auto"), *product(drafts, lengths)]
    every = product(configs.items(), layouts.items(), limits, direct, rounds)
    for (name, config), (layout, path), limit_nbytes, past, (draft, n) in every:
        if past and config.mode not in SLOT_MODES:
            continue
        past = past if config.mode in SLOT_MODES else None
        if past is not None:
            config = replace(config, reads="direct" if past else "cached")
        words = [name, layout]
        words += [f"{limit_nbytes / 1e6:.0f} MB"] if limit_nbytes else []
        words += [] if past is None else ["past the page cache" if past else "page cache"]
        words += [draft] if draft and len(drafts) > 1 else []
        words += ["policy" if n == "auto" else f"{n} drafts"] if draft else []
        made = Variant(config, path, limit_nbytes, draft, n, cold)
        out[", ".join(filter(None, words))] = made
    if any(limits):
        out = {RESIDENT: Variant(resident_like(next(iter(configs.values()))))} | out
    return out


def resolved(variants):
    """Replace kernels ``auto`` by ``fast`` or ``mlx``; refuse a mix of both among the variants."""
    given = {name: v.config for name, v in variants.items()}
    made = {name: replace(v, config=v.config.resolved()) for name, v in variants.items()}
    by_kernels = {v.config.kernels: n for n, v in made.items() if given[n].kernels == "auto"}
    if len(by_kernels) > 1:
        raise ValueError(
            f"bench: expected the same kernels in every mode, got fast in {by_kernels['fast']!r} "
            f"and mlx in {by_kernels['mlx']!r}, which sets another dtype. Set "
            "kernels=mlx for all, or write /kernels=mlx behind each mode."
        )
    return made


class Opened:
    """A variant's model and draft, loaded."""

    def __init__(self, path: Path, variant: Variant):
        self.variant, self.path = variant, folder(variant.path) if variant.path else path
        before = mx.get_active_memory()
        self.model, self.tokenizer = load(self.path, variant.config)
        self.draft, self.share = None, oracle_share(variant.draft)
        if variant.draft == "self":
            self.draft = ModelDraft(self.model)
        elif self.share is None:
            self.draft = open_draft(variant.draft, variant.config.kernels, self.path)
        self.nbytes = mx.get_active_memory() - before
        self.predicted_nbytes = footprint(self.path, session_of(self.model).config).total_nbytes

    def sample(self, prompt, tokens, warmup, feed, temp, seed) -> dict[str, Any]:
        """Run once; return the row's columns."""
        model, variant, disk = self.model, self.variant, []
        drop = partial(machine.drop_pages, self.path) if variant.cold != "no" else None
        if feed:
            ids, fed = texts_of(feed, warmup + tokens, self.path)
        else:
            ids = encode(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
            fed = None
        amount = {"tokens": tokens, "warmup": warmup}
        if variant.config.prefetch == "oracle":
            with record(model) as trace:
                decode(model, ids, **amount, feed=fed)
            session_of(model).prefetcher.set_trace(trace)
            if drop or variant.limit_nbytes:  # drop the pages that recording the trace read
                machine.drop_pages(self.path)

        def before_clock():
            if drop:
                drop()
            disk.append(machine.disk_read_nbytes())

        sampled = {**amount, "sampler": make_sampler(temp) if temp else None}
        run = partial(decode, feed=fed, before_token=drop if variant.cold == "token" else None)
        if variant.draft:
            draft = self.draft
            if self.share is not None:  # an oracle needs the text
                mx.random.seed(seed)
                text = fed or decode(model, ids, **sampled).tokens
                draft = OracleDraft([*ids, *text], self.share, seed)
            run = partial(decode_drafted, draft=draft, num_drafts=variant.num_drafts, feed=fed)
        mx.random.seed(seed)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        ran = run(model, ids, **sampled, before_clock=before_clock, before_prompt=drop)
        disk.append(machine.disk_read_nbytes())
        plan, row = session_of(model).plan, vars(ran) | asdict(ran.counters)
        del row["counters"], row["rounds"]
        row |= {
            "tokens": ran.tokens,  # the ids; the counters' ``tokens`` is a number
            "prompt_tokens": len(ids),
            "held_nbytes": self.nbytes,
            **({} if None in disk else {"disk_nbytes": disk[1] - disk[0]}),
            "peak_nbytes": self.nbytes + mx.get_peak_memory() - before,
            "predicted_nbytes": self.predicted_nbytes,
            "rss_end_nbytes": psutil.Process().memory_info().rss,
            **({"plan": plan.reason, "slots": plan.slots} if plan else {}),
            **variant.facts,
        }
        if ran.rounds:
            drafted, accepted, draft_s, verify_s = zip(*ran.rounds)
            row |= {
                "rounds": len(ran.rounds),
                "drafted": sum(drafted),
                "accepted": sum(accepted),
                "committed": [a + 1 for d, a in zip(drafted, accepted) if d],
                "draft_s": sum(draft_s),
                "verify_s": sum(verify_s),
            }
        return row


def texts_of(feed: str | Path, num: int, model_path: str | Path) -> tuple[list[int], list[int]]:
    """Read the prompt of a trace's file, and the ``num`` tokens after the prompt.

    For ``FILE:N`` only the last N tokens of the prompt are returned.
    """
    file, _, last = str(feed).rpartition(":")
    file, last = (file, int(last)) if file and last.isdigit() else (feed, 0)
    trace, config = Trace.load(file), Checkpoint(model_path).config
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
    return ids[max(first - last, 0) if last else 0 : first], ids[first : first + num]
