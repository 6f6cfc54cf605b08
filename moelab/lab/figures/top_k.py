"""Notebook 05: speed and bits per byte over the experts for each token."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from mlx_lm.utils import load_tokenizer

from ... import StreamConfig, footprint
from .. import records, timing
from ..decode import same_tokens
from ..experiments.top_k import (
    PUBLISHED,
    PUBLISHED_SHAPE,
    Record,
    Speeds,
    predicted_speedup,
    published_speedup,
)
from ..plots import charts, style
from ..quality import Score, at_top_k, xz_bits_per_byte

HOLDS = 0.01  # "quality holds": at most so many more bits per byte, as a share
GPU_RECORD = "cuda_h200_engine"  # in data/results
LARGE_RECORD = "cpu_top_k_35b"


def predictions(path: str | Path, ks: Sequence[int]) -> str:
    """Speed over the first K as a table: predicted here and for the published model, published."""
    rows = {
        f"predicted, {Path(path).name}": predicted_speedup(path, ks, ks[0]),
        "predicted, the 122B's shapes": predicted_speedup(PUBLISHED_SHAPE, ks, ks[0]),
        "published, 122B (not run here)": published_speedup(ks),
    }
    columns = (*ks, 0)
    lines = [f"{f'speed over K={ks[0]}':32}" + "".join(f"{f'K={k}':>7}" for k in columns)]
    for name, row in rows.items():
        cells = (f"{row[k]:7.2f}" if k in row else f"{'-':>7}" for k in columns)
        lines.append(f"{name:32}" + "".join(cells))
    return "\n".join(lines)


def speed_chart(
    speeds: Speeds, predicted: dict[int, float], old: Record | None = None
) -> go.Figure:
    """Speed over the full K against K: predicted, measured now, recorded, published."""
    ks, least = speeds.ks, speeds.ks[-1]
    ratios = {mode: {k: speeds.speedup(mode, k) for k in ks} for mode in ("resident", "fused")}
    published = published_speedup(ks)
    fig = style.figure(
        f"K={least} instead of {ks[0]}: {ratios['fused'][least]['median']:.2f} times as fast "
        f"streamed, {predicted[least]:.2f} predicted from bytes",
        "experts per token (K)",
        f"speed over K={ks[0]}",
        note=f"{speeds.note()}; medians and quartiles, paired by round",
    )
    line = style.look(6)["line"]
    fig.add_scatter(
        x=ks, y=[predicted[k] for k in ks], name="predicted from bytes", mode="lines", line=line
    )
    for i, (mode, by_k) in enumerate(ratios.items()):
        low, mid, high = ([by_k[k][q] for k in ks] for q in ("p25", "median", "p75"))
        fig.add_scatter(
            x=ks,
            y=mid,
            error_y=style.whiskers(low, mid, high),
            name=f"{mode}, this machine now",
            mode="lines+markers",
            **style.look(i),
        )
    if old:
        shared = [k for k in ks if k in old.speeds.ks]
        fig.add_scatter(
            x=shared,
            y=[old.speeds.speedup("fused", k)["median"] for k in shared],
            name=f"fused, recorded {old.machine['date']}",
            mode="markers",
            marker=style.look(4)["marker"],
        )
    fig.add_scatter(
        x=list(published),
        y=list(published.values()),
        name="published: 122B on an M1 Ultra (PR 26)",
        mode="markers",
        marker=style.look(2)["marker"],
    )
    style.ceiling(fig, predicted[0], "no routed expert at all")
    fig.update_xaxes(tickvals=ks, autorange="reversed")
    told = [
        f"K={k}: {predicted[k]:.2f} predicted, {ratios['resident'][k]['median']:.2f} resident, "
        f"{ratios['fused'][k]['median']:.2f} streamed"
        + (f", {published[k]:.2f} published." if k in published else ".")
        for k in ks[1:]
    ]
    return style.describe(
        fig,
        "Speed over the full top-k against K. " + " ".join(told),
        f"Without any routed expert this model would be {predicted[0]:.2f} times as fast: "
        "every token still uses the rest of it.",
    )


def large_chart(predicted: dict[int, float], name: str = LARGE_RECORD) -> go.Figure:
    """Speed over the full K of layers of a 35B model on a CPU, recorded.

    Args:
        predicted (dict[int, float]): By the bytes of that model.
        name (str): A record of ``bench`` in ``data/results``, with modes at several K.
    """
    samples = records.read(name)
    settings = samples.attrs["settings"]
    full = {c["mode"]: n for n, c in settings["variants"].items() if c["top_k"] is None}
    ratios = {mode: {} for mode in full}
    for variant, c in settings["variants"].items():
        if c["top_k"] is not None:
            ratios[c["mode"]][c["top_k"]] = records.paired(samples, full[c["mode"]], variant)
    ks = sorted(ratios["fused"], reverse=True)
    medians = {m: {k: r[k].median() for k in ks} for m, r in ratios.items()}
    speeds = {m: records.values(samples, name, "tok_s") for m, name in full.items()}
    bars = {m: {f"K={k}": r[k].to_numpy() for k in ks} for m, r in ratios.items()}
    bars["predicted from bytes"] = {f"K={k}": [predicted[k]] for k in ks}
    told = ", ".join(
        f"K={k} {medians['resident'][k]:.2f} resident, {medians['fused'][k]:.2f} streamed, "
        f"{predicted[k]:.2f} from bytes"
        for k in ks
    )
    return charts.bars(
        bars,
        f"Layers of 35B-A3B on a CPU: K={ks[-1]} is {medians['fused'][ks[-1]]:.2f} times as fast "
        f"streamed, {predicted[ks[-1]]:.2f} predicted from bytes",
        "speed over the full K",
        f"{told}. All K: {speeds['resident'].median():.0f} tok/s resident, "
        f"{speeds['fused'].median():.0f} streamed.",
        note=f"4 layers of 35B-A3B, random weights, {settings['variants'][full['fused']]['slots']} "
        f"of 256 slots, warm, {settings['tokens']} tokens a run, n={len(speeds['fused'])}; "
        + charts.recorded_note(samples.attrs["machine"]),
        card="",
    )


def gpu_chart(speeds: Speeds, name: str = GPU_RECORD) -> go.Figure:
    """Streamed speed over the full K: measured now, and recorded on a GPU.

    Args:
        speeds (Speeds): Of this machine.
        name (str): A record of ``cuda_run.py`` in ``data/results``.
    """
    gpu = records.read(name, "sections", "top_k")
    machine, tokens = gpu.attrs["machine"], gpu.attrs["settings"]["tokens"]
    by_k = {int(mode.partition("top-")[2]): mode for mode in gpu.variant}
    full, least = max(by_k), min(by_k)
    ratios = {
        k: records.paired(gpu, by_k[full], mode).to_numpy()
        for k, mode in sorted(by_k.items())[::-1]
    }
    rates = {k: records.values(gpu, by_k[k], "hit_rate").mean() for k in ratios}
    base = speeds.token_s("fused", speeds.ks[0])
    here = {k: base / speeds.token_s("fused", k) for k in speeds.ks[1:]}
    hits = ", ".join(f"K={k} {rate:.0%}" for k, rate in rates.items())
    told = ", ".join(f"K={k} {records.values(gpu, by_k[k], 'tok_s').median():.0f}" for k in ratios)
    device = machine["gpu"]
    return charts.bars(
        {
            style.HERE: {f"K={k}": r for k, r in here.items()},
            f"{device}, recorded": {f"K={k}": ratios[k] for k in ratios if k != full},
        },
        f"On the {device} K={least} is {np.median(ratios[least]):.2f} times as fast as K={full}, "
        f"with {rates[least]:.0%} hits",
        "speed over the full K",
        f"On the GPU, in tok/s: {told}; hits: {hits}.",
        note=f"{device}: 8 layers of 35B-A3B, random weights, 64 of 256 slots, bfloat16, warm, "
        f"{tokens} tokens a run, n={len(ratios[full])}; " + charts.recorded_note(machine),
    )


def time_chart(speeds: Speeds, mode: str = "fused") -> go.Figure:
    """What a streamed token's time is made of, by K: waiting for reads, and the rest."""
    ks, full, least = speeds.ks, speeds.ks[0], speeds.ks[-1]
    total = {k: float(np.median(speeds.token_s(mode, k))) for k in ks}
    waiting = {k: speeds.waiting_s(mode, k) for k in ks}
    reads = {k: speeds.reads(mode, k) for k in ks}
    bars = {
        f"K={k}, {nbytes / 1e6:.2f} MB, {hits:.0%} hits": {
            "computing and dispatching": total[k] - waiting[k],
            "waiting for reads": waiting[k],
        }
        for k, (nbytes, hits) in reads.items()
    }
    return charts.parts(
        {"streamed, this machine now": bars},
        f"K={least} reads {reads[least][0] / reads[full][0]:.0%} of what K={full} reads and waits "
        f"{waiting[least] * 1e3:.1f} ms instead of {waiting[full] * 1e3:.1f}",
        f"Waiting is {waiting[full] / total[full]:.0%} of a token at K={full} and "
        f"{waiting[least] / total[least]:.0%} at K={least}; the rest changes from "
        f"{(total[full] - waiting[full]) * 1e3:.1f} to "
        f"{(total[least] - waiting[least]) * 1e3:.1f} ms.",
        note=f"{speeds.note()}; MB read for a token; medians",
        axis="time for a token (ms)",
    )


def quality_chart(
    scores: dict[int, Score],
    texts: list[str],
    note: str,
    holds: float = HOLDS,
    old: Record | None = None,
) -> go.Figure:
    """The increase of bits per byte over the full K, with the limit up to which quality "holds"."""
    ks = list(scores)
    full, least = ks[0], ks[-1]
    rises = {k: s.increase(scores[full]) for k, s in scores.items()}
    fig = style.figure(
        f"Bits per byte change by {rises[ks[1]][0]:+.1%} at K={ks[1]} and by "
        f"{rises[least][0]:+.1%} at K={least}",
        "experts per token (K)",
        f"bits per byte over K={full} (%)",
        note=f"{note}, {int(scores[full].nbytes.sum()):,} bytes in {len(scores[full].bits)} "
        "windows; 95% intervals, bootstrap over windows",
    )
    sets = [("this machine now", scores, 0)]
    if old:
        size = int(old.scores[full].nbytes.sum())
        known = {k: old.scores[k] for k in ks if k in old.scores}
        sets.append((f"recorded {old.machine['date']}, {size:,} bytes", known, 4))
    for label, some, i in sets:
        mid, low, high = 100 * np.array([s.increase(some[full]) for s in some.values()]).T
        fig.add_scatter(
            x=list(some),
            y=mid,
            error_y=style.whiskers(low, mid, high),
            name=label,
            mode="lines+markers",
            **style.look(i),
        )
    style.ceiling(fig, 100 * holds, "quality holds below")
    fig.update_xaxes(tickvals=ks, autorange="reversed")
    fig.update_layout(showlegend=True)
    told = [f"K={k}: {m:+.2%}, from {a:+.2%} to {b:+.2%}." for k, (m, a, b) in rises.items()]
    return style.describe(
        fig,
        f"Increase of bits per byte over K={full}. " + " ".join(told),
        f"At K={full} the model needs {scores[full].bits_per_byte:.2f} bits per byte, at "
        f"K={least} {scores[least].bits_per_byte:.2f}; xz -9e needs {xz_bits_per_byte(texts):.2f}.",
    )


def written(speeds: Speeds, path: str | Path, mode: str = "fused") -> str:
    """What each K decoded after the first prompt."""
    tokenizer = load_tokenizer(Path(path))
    parts = [f"prompt: {speeds.samples.attrs['settings']['prompts'][0]}"]
    for k in speeds.ks:
        parts.append(f"--- K={k} {'-' * 60}\n{tokenizer.decode(speeds.tokens(mode, k)[0])}")
    return "\n\n".join(parts)


def verdicts(
    path: str | Path,
    speeds: Speeds,
    scores: dict[int, Score],
    holds: float = HOLDS,
    old: Record | None = None,
) -> list[charts.Verdict]:
    """The claims on top-k, for ``charts.verdicts``: from the record where there is one.

    Args:
        path (str or Path): The model folder.
        speeds (Speeds): Measured now.
        scores (dict[int, Score]): Measured now.
        holds (float): "Quality holds": at most so many more bits per byte, as a share.
        old (Record, optional): A longer run.
    """
    source = "this machine now"
    if old:
        speeds, scores, source = old.speeds, old.scores, f"recorded {old.machine['date']}"
    ks, full = speeds.ks[1:], speeds.ks[0]
    here, theirs = (predicted_speedup(p, speeds.ks, full) for p in (path, PUBLISHED_SHAPE))
    published = published_speedup(speeds.ks)
    explained = all(ratio <= theirs[k] for k, ratio in published.items())
    fast = [
        f"K={k} {timing.quartiles_text(speeds.speedup('fused', k), form='.2f')} "
        f"({here[k]:.2f} from bytes)"
        for k in ks
    ]
    theirs = [
        f"K={k} {published[k]:.2f} ({theirs[k]:.2f} from bytes)" for k in ks if k in published
    ]
    rises = {k: scores[k].increase(scores[full]) for k in ks}
    held = {k: _holds(low, high, holds) for k, (_, low, high) in rises.items()}
    if len(set(held.values())) == 1:
        judged = {"holds": "confirmed", "does not hold": "refuted"}.get(held[ks[0]], "depends on")
    else:
        judged = "depends on"
    worse = [f"K={k} {rises[k][0]:+.1%} [{_span(*rises[k][1:])}], {held[k]}" for k in ks]
    return [
        (
            "A1",
            "with fewer experts per token a streamed 122B model decodes at 5.20 (K=6), 5.91 (4) "
            f"and 6.52 (2) instead of {PUBLISHED[8]} tok/s",
            "depends on" if explained else "cannot be tested here",
            f"how much of a token the experts are. Published speed over K={full}: "
            f"{', '.join(theirs)}. Measured here, streamed ({source}): {', '.join(fast)}",
        ),
        (
            "A11",
            "quality holds at reduced top-k",
            judged,
            f"more bits per byte than K={full} ({source}; it holds up to {holds:.0%}): "
            + "; ".join(worse),
        ),
    ]


def _holds(low, high, limit):
    """Whether an interval of the increase lies below the limit."""
    if high <= limit:
        return "holds"
    return "does not hold" if low > limit else "undecided"


def _span(low, high):
    return f"{low:+.1%} to {high:+.1%}"


def dial(
    path: str | Path, texts: list[str], tokens: int = 24, length: int = 128, count: int = 4
) -> Callable[[int], go.Figure]:
    """The function behind the top-k slider: speed, bits per byte and text at K and the model's own.

    Args:
        path (str or Path): A model folder.
        texts (list[str]): Held-out text.
        tokens (int): Decoded in each of three runs.
        length (int): T, tokens predicted in a window.
        count (int): Windows.
    """
    own = footprint(path, StreamConfig()).top_k
    known = {}

    def look(top_k: int):
        ks = [own] if top_k == own else [own, top_k]
        for k in set(ks) - known.keys():
            known[k] = at_top_k(path, texts, [k], length=length, count=count, progress=False)[k]
        speeds = Speeds.measure(
            path, ks, modes=("fused",), tokens=tokens, runs=3, warmup=4, progress=False
        )
        rise, low, high = known[top_k].increase(known[own])
        full, fewer = (speeds.tokens("fused", k)[0] for k in (own, top_k))
        return charts.bars(
            {
                "time for a token (ms)": {f"K={k}": speeds.token_s("fused", k) * 1e3 for k in ks},
                "bits per byte": {f"K={k}": [known[k].bits_per_byte] for k in ks},
            },
            f"K={top_k}: {speeds.speedup('fused', top_k)['median']:.2f} times as fast, "
            f"{rise:+.1%} bits per byte",
            "",
            f"K={top_k} needs {rise:+.1%} [{_span(low, high)}] bits for the same text; the "
            f"first {same_tokens(full, fewer)} of {len(full)} greedy tokens are those of K={own}.",
            note=f"{Path(path).name}, streamed, {tokens} tokens three times, {count} windows of "
            f"{length} tokens",
        )

    return look
