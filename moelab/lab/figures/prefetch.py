"""Notebook 04: how often experts are needed again, and what each prefetcher gains."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from ...replay.eviction import held
from ...streaming.trace import Trace
from ..experiments.prefetch import FILLING, Record, Reuse, measure, reuse
from ..plots import charts, style

CLAIMED = 0.7  # SwiftLM PR 26: share of the last token's experts that are needed again


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


def chart(out: Record, state: str, recorded: bool = False) -> go.Figure:
    """Milliseconds a token of every prefetcher on every layout, with quartiles.

    Args:
        out (Record): Measured now, or ``recorded``.
        state (str): Of the page cache.
        recorded (bool): Whether to name the record's machine.
    """
    rows = [v for v in out.variants if v.state == state]
    base, best = rows[0], min(rows, key=lambda v: v.token_s["median"])
    sources = {
        layout: {v.prefetch: v.run_s for v in rows if v.layout == layout} for layout in out.layouts
    }
    names = {v.prefetch: "no prefetch" if v.prefetch == "none" else v.prefetch for v in rows}
    speeds = []
    for layout in out.layouts:
        speed = [
            f"{names[v.prefetch]} {v.ratio['median']:.2f}" for v in rows[1:] if v.layout == layout
        ]
        speeds.append(f"{layout.capitalize()}: {', '.join(speed)}.")
    baseline = f"{names[base.prefetch]} ({base.layout})"
    pages = "dropped before every token" if state == "cold" else "in the page cache"
    fig = charts.bars(
        sources,
        f"{state.capitalize()}: {names[best.prefetch]} ({best.layout}) is fastest, "
        f"{best.ratio['median']:.2f} times the speed of {baseline}",
        "time for a token (ms)",
        f"Speed over {baseline}. {' '.join(speeds)}",
        note=f"{out.model}, {out.slots} slots, {out.tokens} tokens a run, n={out.runs}, "
        f"pages {pages}",
        scale=1e3,
        card=out.machine if recorded else None,
    )
    longest = max(np.percentile(v.run_s, 75) for v in rows) * 1e3
    return fig.update_xaxes(range=[0, 1.3 * longest])  # layouts are compared: one scale


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


def verdicts(out: Record, traces: Mapping[str, Trace], skip: int = FILLING) -> list[charts.Verdict]:
    """The claims on locality and prefetching, for ``charts.verdicts``.

    Args:
        out (Record): Of a model as shipped and packed, warm and cold.
        traces (Mapping[str, Trace]): Of the same model's routing, by name.
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
            "cached anyway, so there is nothing to read ahead",
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


def dial(layouts: Mapping[str, str | Path], prompt: str, tokens: int) -> Callable[[int], go.Figure]:
    """The function behind the slider: from slots to a short cold run of every prefetcher."""

    def look(slots: int):
        out = measure(
            layouts, slots, tokens, runs=1, prompts=(prompt,), states=("cold",), progress=False
        )
        return chart(out, "cold")

    return look
