"""What each prefetcher and each layout is worth: python -m moelab bench-prefetch MODEL PACKED.

The same prompt, the same greedy tokens, every variant in turn in each round. Warm: the file is in
the page cache. Cold: its pages are dropped before every token, with the clock stopped, so that
every miss reads the SSD.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from tqdm import tqdm

from ... import StreamConfig, close, load, record
from ...arguments import add_json, add_model, add_number, not_empty, or_auto, positive
from ...replay import locality as routing
from ...replay.eviction import held
from ...streaming.session import session_of
from .. import machine, oscache, records, timing
from ..decode import decode
from ..plots import charts, style
from ..texts import PROMPTS

PREFETCHERS = ("none", "last", "lookahead", "oracle")
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
        prefetch (str): As for ``StreamConfig``.
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
    layouts,
    slots: int = 16,
    tokens: int = 48,
    runs: int = 5,
    warmup: int = 4,
    prefetchers=PREFETCHERS,
    states=STATES,
    prompts=PROMPTS,
    seed: int = 0,
    streams: int | str = "auto",
    progress: bool = True,
) -> Record:
    """Every prefetcher on every layout, interleaved, warm and cold.

    Args:
        layouts (dict[str, Path]): The same model's folders by name: ``as shipped``, ``packed``.
        slots (int): S.
        tokens (int): Timed in each run.
        runs (int): Rounds; round i takes prompt i, modulo their number.
        warmup (int): Tokens before the clock starts.
        prefetchers (Sequence[str]): As for ``StreamConfig``; the first is the baseline.
        states (Sequence[str]): Of ``STATES``.
        prompts (Sequence[str]): The prompts.
        seed (int): Of the orders.
        streams (int or str): As for ``StreamConfig``.
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
                config = StreamConfig(slots=slots, prefetch=p, streams=streams)
                models[layout, p], tokenizer = load(path, config)
        # Its routing, recorded with the clock stopped, is what the oracle is given.
        trace_model = models["trace"] = load(path, StreamConfig(slots=slots, streams=streams))[0]
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
    """What happens before every token, with the clock stopped: a folder's pages are dropped.

    Warm tokens are prepared by nothing, so that both states run the same loop.
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
        style.card_line(out.machine),
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


def bounds(out: Record, state: str = "cold") -> str:
    """What prefetching can give at most on each layout, from the time spent waiting for reads."""
    lines = []
    for layout in out.layouts:
        v = out.get(state, layout, "none")
        token_ms, wait_ms = v.token_s["median"] * 1e3, v.per_token["wait_s"] * 1e3
        lines.append(
            f"{state}, {layout}: {token_ms:.1f} ms a token, {wait_ms:.1f} ms of it waiting for "
            f"reads; at most {token_ms:.1f} / {token_ms - wait_ms:.1f} = {v.bound:.2f}x"
        )
    return "\n".join(lines)


def chart(out: Record, state: str) -> go.Figure:
    """Milliseconds a token of every prefetcher on every layout, with quartiles."""
    rows = [v for v in out.variants if v.state == state]
    base, best = rows[0], min(rows, key=lambda v: v.token_s["median"])
    sources = {
        layout: {v.prefetch: v.run_s for v in rows if v.layout == layout} for layout in out.layouts
    }
    speeds = [f"{v.prefetch} {v.ratio['median']:.2f} ({v.layout})" for v in rows[1:]]
    pages = "dropped before every token" if state == "cold" else "in the page cache"
    fig = charts.bars(
        sources,
        f"{state.capitalize()}: {best.prefetch} ({best.layout}) is fastest, "
        f"{best.ratio['median']:.2f} times the speed of {base.prefetch} ({base.layout})",
        "time for a token (ms)",
        f"Speed over {base.prefetch} ({base.layout}): {', '.join(speeds)}.",
        note=f"{out.model}, {out.slots} slots, {out.tokens} tokens a run, n={out.runs}, "
        f"pages {pages}",
        scale=1e3,
        card=out.machine,
    )
    longest = max(np.percentile(v.run_s, 75) for v in rows) * 1e3
    return fig.update_xaxes(range=[0, 1.3 * longest])  # layouts are compared: one scale


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
    def of(cls, trace, skip: int) -> "Reuse":
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


CLAIMED = 0.7  # SwiftLM PR 26: share of the last token's experts that are needed again
FILLING = 64  # tokens at the start of a trace that only fill the slots


def reuse(traces, skip: int = FILLING) -> dict[str, Reuse]:
    """``Reuse`` of each trace, by name."""
    return {name: Reuse.of(trace, skip) for name, trace in traces.items()}


def reuse_table(found: dict[str, Reuse], slots: int) -> str:
    """One line for each trace, one column for each sense of temporal locality."""
    lines = [
        f"{'trace':10}{'lag 1, each':>14}{'lag 1, all K':>14}{f'in {slots} slots':>14}"
        f"{'union of 4':>12}{'next layer':>12}{'by chance':>11}"
    ]
    for name, r in found.items():
        lines.append(
            f"{name:10}{r.each:14.1%}{r.every:14.2%}{r.held[slots]:14.1%}"
            f"{r.union:12.1f}{r.next_layer:12.1%}{r.chance:11.1%}"
        )
    return "\n".join(lines)


def reuse_chart(found: dict[str, Reuse], slots: int) -> go.Figure:
    """Share of the needed experts that S slots hold, over S, beside that of the last token's."""
    rows = list(found.values())
    each, enough = np.mean([r.each for r in rows]), [r.slots_for(CLAIMED) for r in rows]
    held = {name: r.held[slots] for name, r in found.items()}
    fig = style.figure(
        f"A token repeats {each:.0%} of the last one's experts; "
        f"{CLAIMED:.0%} takes {min(enough)} to {max(enough)} slots",
        "slots a layer (S)",
        "share of the needed experts in a slot",
        note=f"decoded tokens of tiny-moe, {len(rows)} kinds of text; LRU; "
        f"the first {FILLING} tokens only fill the slots",
    )
    for i, (name, r) in enumerate(found.items()):
        S = np.arange(r.top_k, len(r.held))
        fig.add_scatter(x=S, y=r.held[S], name=name, mode="lines", line=style.look(i)["line"])
    style.ceiling(fig, each, "experts of the last token (lag 1)")
    fig.layout.annotations[0].update(x=1, xanchor="right")  # where no line crosses it
    style.ceiling(fig, CLAIMED, f"the {CLAIMED:.0%} of PR 26")
    fig.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return style.describe(
        fig,
        f"Lines of the share held over slots, for {', '.join(found)}. With {slots} slots: "
        + ", ".join(f"{name} {h:.0%}" for name, h in held.items())
        + f". Horizontal lines at lag 1, {each:.0%}, and at {CLAIMED:.0%}.",
        f"{slots} slots hold {min(held.values()):.0%} to {max(held.values()):.0%} of the needed "
        f"experts; the last token's alone are {each:.0%}.",
    )


def verdicts(out: Record, traces, skip: int = FILLING) -> list[tuple[str, str, str, str]]:
    """The claims on locality and prefetching, for ``charts.verdicts``.

    Args:
        out (Record): Of a model as shipped and packed, warm and cold.
        traces (dict[str, Trace]): Of the same model's routing, by name.
        skip (int): Tokens at the start of each that only fill the slots.
    """
    found, slots = list(reuse(traces, skip).values()), out.slots
    enough = [r.slots_for(CLAIMED) for r in found]
    plain, packed = out.layouts
    guess = out.get("warm", plain, "lookahead").per_token
    used = guess["prefetch_used"] / max(guess["prefetch_issued"], 1e-9)
    decoded = [t.decode for t in traces.values()]
    hits = {
        p: float(np.mean([held(t.experts, t.num_experts, slots, p)[skip:].mean() for t in decoded]))
        for p in ("lru", "lfu", "s3-fifo", "belady")
    }
    each, bank = _span([r.each for r in found]), _span([r.held[slots] for r in found])
    gains = "; ".join(
        f"{state}, "
        + ", ".join(
            f"{p} {out.gain(state, plain, p):.2f} {plain} and {out.gain(state, packed, p):.2f} "
            f"{packed}"
            for p in ("lookahead", "oracle")
        )
        for state in ("cold", "warm")
    )
    alone = {state: out.get(state, packed, "none").ratio["median"] for state in ("cold", "warm")}
    lru_is_enough = max(hits["lfu"], hits["s3-fifo"]) - hits["lru"] < 0.05
    return [
        (
            "A4",
            f"a speculative read of the last token's experts hits about {CLAIMED:.0%}",
            "refuted",
            f"{each} of a token's experts are the last token's; with K slots or more these are "
            "cached anyway, so prefetch='last' has nothing to read",
        ),
        (
            "E2",
            "temporal locality is 25%, or 70%, or 83%",
            "depends on",
            f"the definition: lag 1 is {each} for each expert and at most "
            f"{max(r.every for r in found):.2%} for all K; {slots} slots hold {bank}; "
            f"{CLAIMED:.0%} takes {min(enough)} to {max(enough)} slots",
        ),
        (
            "E3",
            "prefetching does nothing, does harm, or gains 5% with a look-ahead and packing",
            "depends on",
            f"layout and disk. Speed over no prefetching on the same layout: {gains}. Packing "
            f"alone: {alone['cold']:.2f} cold, {alone['warm']:.2f} warm. {used:.0%} of the "
            "look-ahead's guesses are used",
        ),
        (
            "E4",
            "LRU is enough, or LFU, or S3-FIFO",
            "confirmed" if lru_is_enough else "depends on",
            f"hit rate with {slots} slots: "
            + ", ".join(f"{p} {h:.1%}" for p, h in hits.items())
            + "; what that is worth in time: notebook 03",
        ),
    ]


def _span(values):
    return f"{min(values):.0%} to {max(values):.0%}"


def dial(layouts, prompt: str, tokens: int) -> Callable[[int], go.Figure]:
    """The function behind the slider: from slots to a short cold run of every prefetcher."""

    def look(slots: int):
        out = measure(
            layouts, slots, tokens, runs=1, prompts=(prompt,), states=("cold",), progress=False
        )
        return chart(out, "cold")

    return look


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
    parser.add_argument(
        "--streams",
        type=or_auto(positive),
        metavar="N",
        default="auto",
        help="MLX streams for the experts' work (default: %(default)s)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """The command."""
    layouts = {"as shipped": args.model, "packed": args.packed}
    out = measure(layouts, args.slots, args.tokens, args.runs, streams=args.streams)
    records.print_and_save(report(out), out, args.json)
