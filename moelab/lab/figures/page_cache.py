"""Notebook 03: milliseconds and bytes over slots, measured and replayed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from ...replay import advice
from ...replay.costs import Costs
from ...replay.locality import Locality, synthesize
from ...replay.sizes import ModelSizes
from .. import timing
from ..experiments.page_cache import (
    ERROR_BOUND,
    Compared,
    PolicyReplays,
    Slowdown,
    agreement,
    arithmetic_ms,
    curve,
    extremes,
    pinning,
    pinning_ratio,
    policy_ratios,
    roofline,
)
from ..experiments.sweep_record import Point, SweepRecord
from ..plots import charts, style

DIAL_POINTS = 9  # numbers of slots replayed for one setting of the sliders


def limit_name(limit_nbytes: int | None, record: SweepRecord) -> str:
    """A limit in words, with its share of the checkpoint."""
    if limit_nbytes is None:
        return "no limit"
    share = limit_nbytes / record.sizes.checkpoint_nbytes
    return f"{limit_nbytes / 1e6:.0f} MB ({share:.0%} of the file)"


def _note(record, part="reads"):
    counts = {len(r.reads.seconds) for r in record.rows()}
    n = "n=" + " to ".join(str(c) for c in sorted({min(counts), max(counts)}))
    kind = "reads without arithmetic" if part == "reads" else "with arithmetic"
    return f"{kind}, {n} runs of {getattr(record.tokens, part)} tokens each"


def _lines(
    record, title, finding, part="reads", compared=(), read_ahead=False, note="", live=False
):
    """Milliseconds of a token over slots, a line for each limit, its replay dotted beside it."""
    x = "slots in each layer (0: none, every expert is read each time)"
    card = None if live else record.machine
    fig = style.figure(title, x, "ms a token", note=note, card=card, height=360)
    fig.update_xaxes(zeroline=False)
    every = [(n, False) for n in record.limits] + [(n, True) for n in record.limits if read_ahead]
    rows = {key: curve(record, key[0], part, read_ahead=key[1]) for key in every}
    words = []
    for i, ((n, ahead), mine) in enumerate((k, r) for k, r in rows.items() if r):
        name = limit_name(n, record) + (", with read-ahead" if ahead else "")
        samples = [np.array(r.runs(part).seconds) * 1e3 for r in mine]
        style.band(fig, [r.point.slots for r in mine], samples, name, i)
        told = ", ".join(f"{np.median(s):.1f} at {r.point.slots}" for r, s in zip(mine, samples))
        words.append(f"{name}: {told}")
        line = Point(0, n, "lru", ahead)
        predicted = [c for c in compared if c.row.point.line == line]
        if predicted:
            look = style.look(i)
            fig.add_scatter(
                x=[c.row.point.slots for c in predicted],
                y=[c.predicted_s * 1e3 for c in predicted],
                name=f"replay, {name}",
                mode="lines+markers",
                line={**look["line"], "dash": "dot", "width": 1.5},
                marker={**look["marker"], "symbol": look["marker"]["symbol"] + "-open", "size": 8},
            )
    return style.describe(fig, f"Milliseconds a token over slots. {'; '.join(words)}.", finding)


def reads_chart(record: SweepRecord, compared: list[Compared]) -> go.Figure:
    """Milliseconds of a token's reads over slots, by memory limit, with the replay beside it."""
    tight, roomy, *_ = record.limits
    e, small = extremes(record, roomy), extremes(record, tight)
    return _lines(
        record,
        f"More slots read up to {e.bytes_ratio:.1f} times the bytes from the SSD, until they hold "
        "most of the experts",
        f"In {limit_name(roomy, record)} a token's reads take {e.ms(e.fewest):.1f} ms with "
        f"{e.fewest.point.slots} slots, {e.ms(e.worst):.1f} with {e.worst.point.slots} (the "
        f"slowest) and {e.ms(e.most):.1f} with {e.most.point.slots}. The most slots are "
        f"within {max(e.most_over_best, small.most_over_best):.0%} of the best under both limits.",
        compared=compared,
        note=f"{_note(record)}; dotted: the replay of section 4",
    )


def decode_chart(record: SweepRecord, kernels: str) -> go.Figure:
    """Milliseconds of a whole token over slots, by memory limit.

    Args:
        record (SweepRecord): Of ``sweep``, with decoding.
        kernels (str): What computed.
    """
    tight, roomy, *_ = record.limits
    e, small = (extremes(record, n, "decode") for n in (roomy, tight))
    roofs = [share for n in (tight, roomy) for share in roofline(record, n).values()]
    return _lines(
        record,
        f"With the arithmetic of {kernels}, slots change {e.range:.0%} of a token in "
        f"{roomy / 1e6:.0f} MB, {small.range:.0%} in {tight / 1e6:.0f} MB",
        f"The arithmetic takes {arithmetic_ms(record):.0f} ms a token and overlaps reads "
        f"within a layer only: decoding reaches {min(roofs):.2f} to {max(roofs):.2f} of its "
        "roofline, the longer of the arithmetic and the missed bytes at the SSD's rate.",
        part="decode",
        note=f"{_note(record, 'decode')}; no slots is the mode buffers, expert by expert",
    )


def read_ahead_chart(record: SweepRecord) -> go.Figure:
    """Milliseconds of a token's reads over slots, with the system's read-ahead and without."""
    roomy = record.limits[1]
    on, off = (extremes(record, roomy, read_ahead=a) for a in (True, False))
    more = [
        r.disk_per_token / p.disk_per_token
        for r in curve(record, roomy, read_ahead=True)
        for p in curve(record, roomy)
        if p.point.slots == r.point.slots
    ]
    return _lines(
        record,
        f"Read-ahead makes the slow middle worse: {on.slowdown:+.0%}, not {off.slowdown:+.0%}",
        f"It brings {min(more):.2f} to {max(more):.2f} times the bytes, for nothing: behind an "
        "expert lies another expert, not the next part of a stream.",
        read_ahead=True,
        note=_note(record),
    )


def live_chart(record: SweepRecord) -> go.Figure:
    """The sweep of this machine now."""
    shown = record.limits[0]
    rows = curve(record, shown)
    best = min(rows, key=lambda r: r.reads.median)
    told = ", ".join(f"{r.reads.median * 1e3:.1f} with {r.point.cache}" for r in rows)
    return _lines(
        record,
        f"This machine, {limit_name(shown, record)}: fastest with {best.point.slots} slots, "
        f"{best.reads.median * 1e3:.1f} ms a token",
        f"Milliseconds: {told}.",
        note=_note(record),
        live=True,
    )


def sources_chart(record: SweepRecord, limit_nbytes: int) -> go.Figure:
    """Where a needed expert comes from, over slots: its slot, the page cache or the SSD."""
    rows, e = curve(record, limit_nbytes), extremes(record, limit_nbytes)
    shown = e.fewest, e.most_read, e.most
    size = record.sizes
    needed = size.L * size.K * size.expert_nbytes
    slot = np.array([r.hit_rate for r in rows]) * 100
    brought = np.array([r.disk_per_token for r in rows]) / needed * 100
    disk = np.minimum(brought, 100 - slot)
    pages = 100 - slot - disk
    few, *others = (f"{r.disk_per_token / 1e6:.1f}" for r in shown)
    rest = ", ".join(f"{mb} with {r.point.slots}" for mb, r in zip(others, shown[1:]))
    fig = style.figure(
        f"From the SSD a token reads {few} MB with {e.fewest.point.slots} slots, {rest}",
        "slots in each layer",
        "share of the needed experts (%)",
        note=f"{limit_name(limit_nbytes, record)}, medians; {_note(record)}",
        card=record.machine,
        barmode="stack",
    )
    names = "in its slot", "copied from the page cache", "read from the SSD"
    x = [str(r.point.slots) for r in rows]
    for i, (name, values) in enumerate(zip(names, (slot, pages, disk))):
        fig.add_bar(x=x, y=values, name=name, marker=style.fill(i))
    fig.update_xaxes(type="category")
    words = "; ".join(
        f"{n} slots: {s:.0f}% in a slot, {p:.0f}% page cache, {d:.0f}% SSD"
        for n, s, p, d in zip(x, slot, pages, disk)
    )
    hits = ", ".join(f"{r.hit_rate:.0%} with {r.point.slots}" for r in shown)
    return style.describe(
        fig,
        f"Stacked bars over slots. {words}.",
        f"The slots' own hit rate only grows ({hits}), while what is left of the page cache serves "
        "less and less: the hit rate says nothing about the SSD.",
    )


def agreement_chart(
    compared: dict[str, list[Compared]], decoded: list[Compared], record: SweepRecord
) -> go.Figure:
    """Predicted against measured milliseconds, every point, with a band of ``ERROR_BOUND``.

    Args:
        compared (dict[str, list[Compared]]): Reads, by kind of routing.
        decoded (list[Compared]): With the arithmetic, told and not drawn.
        record (SweepRecord): The first of them.
    """
    agree = {name: agreement(rows) for name, rows in compared.items()}
    agree["with the arithmetic"] = agreement(decoded)
    first = next(iter(agree.values()))
    fig = style.figure(
        f"The replay is {first.median_error:.0%} off in the median, {first.worst_error:.0%} at "
        "worst",
        "measured ms a token",
        "replayed ms a token",
        note="reads; each point one limit, number of slots and policy",
        card=record.machine,
        height=360,
    )
    for i, (name, rows) in enumerate(compared.items()):
        fig.add_scatter(
            x=[c.runs.median * 1e3 for c in rows],
            y=[c.predicted_s * 1e3 for c in rows],
            text=[f"{c.row.point}: {c.error:+.0%}" for c in rows],
            name=name,
            mode="markers",
            marker=style.look(i)["marker"],
        )
    every = [c for rows in compared.values() for c in rows]
    top = max(max(c.runs.median, c.predicted_s) for c in every) * 1.02e3
    near = f"{ERROR_BOUND:.0%} off"
    for factor, label in ((1, "equal"), (1 + ERROR_BOUND, near), (1 - ERROR_BOUND, "")):
        fig.add_scatter(
            x=[0, top],
            y=[0, top * factor],
            mode="lines",
            name=label,
            showlegend=bool(label),
            hoverinfo="skip",
            line={"color": style.GREY, "width": 1, "dash": "solid" if factor == 1 else "dash"},
        )
    errors = [c.error for c in every]
    off = np.abs([c.disk_error for c in every if c.row.point.limit_nbytes])
    told = "; ".join(
        f"{name}: median error {a.median_error:.0%}, {a.same_order} of {a.neighbours} "
        "neighbouring points in the measured order"
        for name, a in agree.items()
    )
    return style.describe(
        fig,
        f"Replayed against measured milliseconds of {len(every)} points; errors from "
        f"{min(errors):+.0%} to {max(errors):+.0%}.",
        f"{told} (those whose quartiles are apart). The bytes from the SSD are "
        f"{np.median(off):.1%} off in the median, {max(off):.0%} at worst; the slots' hit rates "
        "are exact.",
    )


def slowdown_chart(found: dict[str, Slowdown], record: SweepRecord) -> go.Figure:
    """How much a middling number of slots costs, over the memory, by kind of routing."""
    high = max(max(s.slowest) for s in found.values())
    most_bytes = max(max(s.bytes) for s in found.values())
    off = max(max(s.most) for s in found.values())
    series = {
        name: ([round(100 * x) for x in s.shares], [[100 * y] for y in s.slowest])
        for name, s in found.items()
    }
    return charts.lines(
        series,
        "The more of the file fits and the cheaper a copy, the slower the middle: "
        f"{high:+.0%} at most",
        "memory, % of the file",
        "slowest over fewest slots (%)",
        f"The SSD brings up to {most_bytes:.1f} times the bytes that it brings with the fewest "
        f"slots. With the most slots that fit, a token is at most {off:.0%} off the best.",
        note="replayed, without arithmetic",
        log_x=False,
        card=record.machine,
    )


def _lfu(record, limit_nbytes):
    """How much longer than with ``lru`` reads take with ``lfu``, as measured."""
    ratios = policy_ratios(record, limit_nbytes, "lfu")
    return ", ".join(f"{x:+.0%} with {s} slots" for s, x in ratios.items())


def policies_chart(found: PolicyReplays, record: SweepRecord) -> go.Figure:
    """Milliseconds over slots by eviction policy, in replay."""
    at, limit_nbytes = found.middle, found.limit_nbytes
    hits = ", ".join(f"{p} {100 * r.app_hit_rate:.0f}%" for p, r in found.at_middle.items())
    return charts.lines(
        {p: (found.slots, [[1e3 * r.mean_s] for r in rs]) for p, rs in found.replays.items()},
        f"With {at} of {record.sizes.E} slots: {found.told} ms",
        "slots in each layer",
        "ms a token",
        f"Hits with {at} slots: {hits}. Belady's policy knows the future. Measured, lfu takes "
        f"{_lfu(record, limit_nbytes)}, against lru.",
        note=f"replayed, {limit_name(limit_nbytes, record)}, routed {record.trace.like}, without "
        "arithmetic",
        log_x=False,
        card=record.machine,
    )


def pinning_chart(record: SweepRecord) -> go.Figure:
    """A token with pinned experts, with as many slots that take turns, and with few slots."""
    parts = {part: pinning(record, part) for part in ("reads", "decode")}
    few, many, other, _ = parts["reads"]

    def versus(part, base):
        return timing.paired_ratio(parts[part][other], parts[part][base])

    told = "; ".join(
        f"{name} take {timing.quartiles_text(versus(part, many), form='.2f')} times as long as "
        f"with {many}, {timing.quartiles_text(versus(part, few), form='.2f')} times with {few}"
        for part, name in (("reads", "reads"), ("decode", "whole tokens"))
    )
    return charts.bars(
        {"reads": parts["reads"], "with this CPU's arithmetic": parts["decode"]},
        f"Pinned by another text, a token takes {pinning_ratio(record):.2f} times as long as with "
        "as many slots in turn",
        "ms a token",
        f"Pinned by code, {told} (the rest left to the page cache).",
        note=f"routed like tests, {limit_name(record.limits[0], record)}, n={record.runs}; each "
        "round other tokens, the same for all",
        scale=1e3,
        card=record.machine,
    )


def verdicts(
    record: SweepRecord,
    fast: SweepRecord,
    pinned: SweepRecord,
    found: dict[str, Slowdown],
    policies: PolicyReplays,
) -> list[charts.Verdict]:
    """The claims of notebook 03, each with its verdict and the numbers that it rests on.

    Args:
        record (SweepRecord): ``cpu_sweep_35b``.
        fast (SweepRecord): ``cpu_sweep_35b_fast``.
        pinned (SweepRecord): ``cpu_sweep_pinned``.
        found (dict[str, Slowdown]): Of the replay.
        policies (PolicyReplays): Of the replay.
    """
    tight, roomy = record.limits[:2]
    e, on = extremes(record, roomy), extremes(record, roomy, read_ahead=True)
    free = extremes(record, None)
    off = max(e.most_over_best, extremes(record, tight).most_over_best)
    pages = {n: extremes(record, n).fewest.page_hit_rate for n in (tight, roomy)}
    high = max(max(s.slowest) for s in found.values())
    return [
        (
            "A5",
            "at steady state compute is the bottleneck, not I/O; the page cache serves 90% of "
            "reads",
            "depends on",
            f"the kernels and the memory: {arithmetic_ms(record):.0f} ms of arithmetic by MLX's "
            f"kernels hide the reads here, moelab's take {arithmetic_ms(fast):.0f} ms, the reads "
            f"{e.ms(e.fewest):.0f} ms; with "
            f"{e.fewest.point.slots} slots the page cache serves {pages[roomy]:.0%} of what is "
            f"read in {roomy / 1e6:.0f} MB, {pages[tight]:.0%} in {tight / 1e6:.0f} MB",
        ),
        (
            "A6",
            "an application cache of experts takes memory from the page cache and slows decoding",
            "depends on",
            f"its size: in {limit_name(roomy, record)} the SSD brings {e.bytes_ratio:.1f} times "
            f"the bytes with {e.most_read.point.slots} slots that it brings with "
            f"{e.fewest.point.slots}; a token's reads take {e.slowdown:+.0%} at worst "
            f"({on.slowdown:+.0%} with the system's read-ahead; up to {high:+.0%} in replay) and "
            f"{e.most_over_fewest:+.0%} with {e.most.point.slots} slots",
        ),
        (
            "E1",
            "does an expert cache help or hurt?",
            "depends on",
            "its size: a small one costs or gains little; the largest that fits is within "
            f"{off:.0%} of the best in both limits; with memory for all of the file slots save "
            f"copies ({free.ms(free.fewest):.1f} to {free.ms(free.most):.1f} ms)",
        ),
        (
            "E4",
            "LRU is enough, or LFU or S3-FIFO is better",
            "depends on",
            f"the page cache below: measured, lfu's reads take {_lfu(record, roomy)}, against lru; "
            f"in replay with {policies.middle} slots {policies.told} ms; experts pinned by another "
            f"text's trace take {pinning_ratio(pinned):.2f} times lru's time",
        ),
    ]


def dial(
    sizes: ModelSizes, locality: Locality, costs: Costs, tokens: int = 320, seed: int = 0
) -> Callable[..., go.Figure]:
    """The function behind notebook 03's sliders: a trace replayed through both caches.

    Args:
        sizes (ModelSizes): Of the model.
        locality (Locality): Of the traces; their skew is one of the sliders.
        costs (Costs): Of reads; the SSD's bandwidth and the arithmetic are sliders.
        tokens (int): Of the trace; half of them fill the caches.
        seed (int): Of the traces.

    Returns:
        Callable: From memory (% of the checkpoint), slots, policy, skew, SSD (GB/s) and arithmetic
        (ms a token) to a figure.
    """
    traces = {}

    def look(
        memory: int, slots: int, policy: str, skew: float, ssd: float, arithmetic: int
    ) -> go.Figure:
        if skew not in traces:
            skewed = replace(locality, zipf=tuple(skew for _ in locality.zipf))
            traces[skew] = synthesize(skewed, tokens, sizes.L, sizes.E, sizes.K, seed)
        memory_nbytes = sizes.checkpoint_nbytes * memory / 100
        most = sizes.fits(memory_nbytes)
        if most < sizes.K:
            raise ValueError(
                f"{memory}% of the file: {sizes.K} slots do not fit beside the rest of the model. "
                "Take more memory."
            )
        mine = min(max(slots, sizes.K), most)
        at = sorted({*np.linspace(sizes.K, most, DIAL_POINTS).astype(int).tolist(), mine})
        here = replace(
            costs.without_arithmetic(),
            cold_s_per_byte=1 / (ssd * 1e9),
            overlap=1.0,
            expert_s=arithmetic * 1e-3 / (sizes.L * sizes.K),
        )
        every = [*((n, policy) for n in at), (sizes.K, "none")]
        found = advice.replay_settings(sizes, memory_nbytes, traces[skew], here, every, tokens // 2)
        without_slots, chosen = found.pop((sizes.K, "none")), found[mine, policy]
        ms = {n: r.mean_s * 1e3 for (n, _), r in found.items()}
        best = min(ms, key=ms.get)
        fig = style.figure(
            f"{mine} slots: {ms[mine]:.1f} ms a token; best {ms[best]:.1f} with {best}",
            "slots in each layer",
            "ms a token",
            note=f"replayed: {memory_nbytes / 1e6:.0f} MB, {policy}, zipf {skew:.2f}, SSD "
            f"{ssd:.1f} GB/s, arithmetic {arithmetic} ms a token, overlapped",
        )
        x, y = list(ms), list(ms.values())
        fig.add_scatter(x=x, y=y, name=policy, mode="lines+markers", **style.look(0))
        star = {"symbol": "star", "size": 16, "color": style.COLORS[1]}
        fig.add_scatter(x=[mine], y=[ms[mine]], name="chosen", mode="markers", marker=star)
        style.ceiling(fig, without_slots.mean_s * 1e3, "no slots: only the page cache")
        told = ", ".join(f"{m:.1f} at {n}" for n, m in ms.items())
        return style.describe(
            fig,
            f"Replayed milliseconds a token over slots: {told}.",
            f"{chosen.app_hit_rate:.0%} in a slot; {chosen.page_nbytes / 1e6:.0f} MB of page cache "
            f"serve {np.nan_to_num(chosen.page_hit_rate):.0%} of the rest; "
            f"{chosen.read_per_token / 1e6:.1f} MB a token come from the SSD.",
        )

    return look
