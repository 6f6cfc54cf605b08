"""Notebook 04: what each prefetcher and each layout is worth, and how often experts come again.

    python -m moelab bench-prefetch MODEL PACKED

The same prompt, the same greedy tokens, every variant in turn in each round. Warm: the file is in
the page cache. Cold: its pages are dropped before every token, with the clock stopped, so that
every miss reads the SSD.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ... import StreamConfig, close, load, record
from ...commands.argument_types import not_empty
from ...commands.arguments import add_json, add_model, add_number
from ...replay import locality as routing
from ...streaming.session import session_of
from ...streaming.trace import Trace
from .. import machine, oscache, records, timing
from ..decode import decode
from ..texts import PROMPTS

PREFETCHERS = ("none", "lookahead", "oracle")
STATES = ("warm", "cold")
COUNTERS = (
    "misses",
    "bytes_read",
    "wait_s",
    "prefetch_issued",
    "prefetch_used",
    "prefetch_late",
    "prefetch_wasted",
    "prefetch_saved_s",
    "hits",
)


@dataclass(frozen=True)
class Variant:
    """One prefetcher on one layout in one state of the page cache.

    Attributes:
        state (str): ``warm`` or ``cold``.
        layout (str): The layout's name.
        prefetch (str): As for ``StreamConfig``; in older records also ``last``, which read the last
            token's experts ahead.
        step_s (list[list[float]]): Seconds of each token of each run.
        token_s (Summary): Of the mean seconds a token of each run.
        ratio (Summary): Of the speed over that of the record's baseline, by round.
        per_token (dict[str, float]): ``COUNTERS`` for each token, the mean of the runs.
    """

    state: str
    layout: str
    prefetch: str
    step_s: list[list[float]]
    token_s: timing.Summary
    ratio: timing.Summary
    per_token: dict[str, float]

    @property
    def run_s(self) -> np.ndarray:
        """Mean seconds a token of each run."""
        return np.array([np.mean(steps) for steps in self.step_s])

    @property
    def bound(self) -> float:
        """Speed-up if no token waited for reads any more: what prefetching can give at most."""
        token_s = self.token_s["median"]
        return token_s / (token_s - self.per_token["wait_s"])


@dataclass(frozen=True)
class Record:
    """Of ``measure``. The baseline is the first prefetcher on the first layout, in each state.

    Attributes:
        machine (dict): As ``machine.card`` gives it.
        model (str): Its name.
        slots (int): S.
        tokens (int): Timed in each run.
        warmup_tokens (int): Before them.
        runs (int): Rounds.
        order (str): Of the variants in a round.
        variants (list[Variant]): Every state, layout and prefetcher.
    """

    machine: dict
    model: str
    slots: int
    tokens: int
    warmup_tokens: int
    runs: int
    order: str
    variants: list[Variant]
    kind: str = "prefetch"

    @classmethod
    def recorded(cls, name: str) -> "Record":
        """The record in ``data/results/NAME.json``."""
        fields = records.recorded(name)
        return cls(**fields | {"variants": [Variant(**v) for v in fields["variants"]]})

    @property
    def layouts(self) -> list[str]:
        """The layouts, the baseline's first."""
        return list(dict.fromkeys(v.layout for v in self.variants))

    def get(self, state: str, layout: str, prefetch: str) -> Variant:
        """One variant."""
        key = state, layout, prefetch
        return next(v for v in self.variants if (v.state, v.layout, v.prefetch) == key)

    def gain(self, state: str, layout: str, prefetch: str) -> float:
        """Median speed over no prefetching on the same layout, by round."""
        base = self.get(state, layout, "none")
        return timing.paired_ratio(base.run_s, self.get(state, layout, prefetch).run_s)["median"]


def measure(
    layouts: Mapping[str, str | Path],
    slots: int = 16,
    tokens: int = 48,
    runs: int = 5,
    warmup: int = 4,
    prefetchers: Sequence[str] = PREFETCHERS,
    states: Sequence[str] = STATES,
    prompts: Sequence[str] = PROMPTS,
    seed: int = 0,
    progress: bool = True,
) -> Record:
    """Every prefetcher on every layout, interleaved, warm and cold.

    Args:
        layouts (Mapping): The same model's folders by name: ``as shipped``, ``packed``.
        slots (int): S.
        tokens (int): Timed in each run.
        runs (int): Rounds; round i takes prompt i, modulo their number.
        warmup (int): Tokens before the clock starts.
        prefetchers (Sequence[str]): As for ``StreamConfig``; the first is the baseline.
        states (Sequence[str]): Of ``STATES``.
        prompts (Sequence[str]): The prompts.
        seed (int): Of the orders.
        progress (bool): Show a bar.

    Raises:
        RuntimeError: If a variant decodes other tokens than the model without prefetching.
    """
    layouts = {name: Path(path) for name, path in layouts.items()}
    variants = [(s, layout, p) for s in states for layout in layouts for p in prefetchers]
    samples, order, models = {v: [] for v in variants}, random.Random(seed), {}
    try:
        for layout, path in layouts.items():
            for p in prefetchers:
                config = StreamConfig(slots=slots, prefetch=p)
                models[layout, p], tokenizer = load(path, config)
        # Its routing, recorded with the clock stopped, is what the oracle is given.
        trace_model = models["trace"] = load(path, StreamConfig(slots=slots))[0]
        with tqdm(
            total=len(variants) * runs,
            desc="prefetch",
            unit="run",
            leave=False,
            disable=not progress,
        ) as bar:
            for i in range(runs):
                ids = tokenizer.encode(prompts[i % len(prompts)])
                with record(trace_model) as trace:
                    right = decode(trace_model, ids, tokens, warmup).tokens
                for state, layout, p in order.sample(variants, len(variants)):
                    model = models[layout, p]
                    if p == "oracle":
                        session_of(model).prefetcher.set_trace(trace)
                    cold = layouts[layout] if state == "cold" else None
                    sample = decode(model, ids, tokens, warmup, before_token=_preparation(cold))
                    if sample.tokens != right:
                        raise RuntimeError(
                            f"{state}, {layout}, {p}: other tokens than without prefetching. "
                            "Report this."
                        )
                    samples[state, layout, p].append(sample)
                    bar.update()
    finally:
        for model in models.values():
            close(model)
    return _summarized(samples, Path(next(iter(layouts.values()))).name, slots, tokens, warmup)


def _preparation(folder) -> Callable:
    """What happens before every token with the clock stopped: a cold folder's pages are dropped.

    Before a warm token nothing happens, but the same loop runs.
    """
    return (lambda: oscache.drop_pages(folder)) if folder else (lambda: None)


def _summarized(samples, model, slots, tokens, warmup):
    """The record of the samples of every ``(state, layout, prefetch)``, the baseline's first."""
    run_s = {key: [np.mean(s.step_s) for s in its] for key, its in samples.items()}
    _, layout, prefetch = next(iter(samples))
    variants = [
        Variant(
            *key,
            step_s=[s.step_s for s in its],
            token_s=timing.summary(run_s[key]),
            ratio=timing.paired_ratio(run_s[key[0], layout, prefetch], run_s[key]),
            per_token={
                n: float(np.mean([getattr(s.counters, n) for s in its])) / tokens for n in COUNTERS
            },
        )
        for key, its in samples.items()
    ]
    runs = len(next(iter(samples.values())))
    order = "random in every round"
    return Record(machine.card(), model, slots, tokens, warmup, runs, order, variants)


def report(out: Record) -> str:
    """The record as text: a table for each state of the page cache."""
    lines = [
        machine.card_line(out.machine),
        f"{out.model}: {out.slots} slots, {out.tokens} tokens a run after {out.warmup_tokens}; "
        "experts and MB are for each token",
    ]
    for state in dict.fromkeys(v.state for v in out.variants):
        lines.append(
            f"\n{state:11}{'prefetch':10}{'ms/token [quartiles]':26}{'speed over the first':23}"
            f"{'misses':>7}{'issued':>7}{'used':>6}{'late':>6}{'wasted':>7}{'MB':>6}"
        )
        for v in (v for v in out.variants if v.state == state):
            c = v.per_token
            lines.append(
                f"{v.layout:11}{v.prefetch:10}"
                f"{timing.quartiles_text(v.token_s, 1e3, '.1f'):26}"
                f"{timing.quartiles_text(v.ratio, form='.2f'):23}"
                f"{c['misses']:7.1f}{c['prefetch_issued']:7.1f}{c['prefetch_used']:6.1f}"
                f"{c['prefetch_late']:6.1f}{c['prefetch_wasted']:7.1f}{c['bytes_read'] / 1e6:6.2f}"
            )
    return "\n".join(lines)


# Temporal locality


@dataclass(frozen=True)
class Reuse:
    """How often the decoded tokens of a trace need experts again, in each sense of the word.

    Attributes:
        each (float): Share of a token's experts that the token before used as well (lag 1).
        every (float): Share of the layers' tokens with exactly the last token's experts.
        held (np.ndarray): ``[E + 1]`` share that the S most recently used experts hold, by S.
        union (float): Experts that 4 tokens in a row use together.
        next_layer (float): Share that the choice of the layer before predicts, by counted pairs.
        chance (float): Share if experts were chosen at random, K / E.
        top_k (int): K.
    """

    each: float
    every: float
    held: np.ndarray
    union: float
    next_layer: float
    chance: float
    top_k: int

    @classmethod
    def of(cls, trace: Trace, skip: int) -> "Reuse":
        """Of a trace; its first ``skip`` decoded tokens only fill the slots."""
        t = trace.decode
        kept, top_k = routing.overlap(t), t.experts.shape[2]
        return cls(
            each=float(kept["each"].mean()),
            every=float(kept["all"].mean()),
            held=routing.lru_hit_rate(t, skip).mean(0),
            union=float(routing.union(t, 4).mean()),
            next_layer=float(routing.layer_prediction(t)["pairs"].mean()),
            chance=top_k / t.num_experts,
            top_k=top_k,
        )

    def slots_for(self, share: float) -> int:
        """The least S that holds this share of the needed experts."""
        return int(np.argmax(self.held >= share))


FILLING = 64  # tokens at the start of a trace that only fill the slots


def reuse(traces: Mapping[str, Trace], skip: int = FILLING) -> dict[str, Reuse]:
    """``Reuse`` of each trace, by name."""
    return {name: Reuse.of(trace, skip) for name, trace in traces.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "The same greedy tokens with every prefetcher on both layouts, interleaved: warm, and "
        "cold with the file's pages dropped before every token."
    )
    add_model(parser)
    parser.add_argument(
        "packed",
        type=not_empty,
        metavar="PACKED",
        help="the same model from python -m moelab repack",
    )
    add_number(parser, "--slots", 16, "in each layer")
    add_number(parser, "--tokens", 48, "timed in each run")
    add_number(parser, "--runs", 5, "rounds")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """The command."""
    layouts = {"as shipped": args.model, "packed": args.packed}
    out = measure(layouts, args.slots, args.tokens, args.runs)
    records.print_and_save(report(out), out, args.json)
