"""Fewer experts for each token: what they buy in speed, what they cost in bits per byte. The measurements of notebook 05.

python -m moelab.lab.experiments.top_k MODEL --json data/results/top_k_cpu.json     # the same, recorded, with more samples
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from mlx_lm.utils import load_tokenizer
from plotly.subplots import make_subplots

from ... import StreamConfig, footprint, synthesize
from .. import machine, records, timing
from ..plots import style as figures
from ..quality import Score, at_top_k, xz_bits_per_byte
from ..texts import heldout_files
from . import bench

# SwiftLM PR 26: Qwen3.5-122B-A10B-4bit streamed on an M1 Ultra, 64 GB; tokens per second by top-k. Its author's figures, not run here.
PUBLISHED = {8: 4.95, 6: 5.20, 4: 5.91, 2: 6.52}
PUBLISHED_SHAPE = "qwen3.5-122b-a10b"


def predicted_speedup(path, ks, base) -> dict[int, float]:
    """Speed-up over ``base`` if a token's time were in proportion to the bytes of weights that it uses; K=0: no routed expert at all.

    Args:
        path (str or Path): A model folder, or a key of ``recipes.synthesize.CONFIGS`` for the shapes of a real model.
        ks (list[int]): Values of K.
        base (int): The K to compare with.
    """
    if str(path) in synthesize.CONFIGS:
        tensors, config = synthesize.plan(synthesize.CONFIGS[str(path)])
        E = config["text_config"]["num_experts"]
        rest = sum(
            t.nbytes
            for t in tensors
            if ".switch_mlp." not in t.name and "embed_tokens" not in t.name
        )
        one = sum(t.nbytes for t in tensors if ".switch_mlp." in t.name) / E
    else:
        f = footprint(path, StreamConfig())
        one = f.num_layers * f.expert_nbytes
        rest = f.checkpoint_nbytes - f.num_experts * one
    used = {k: rest + k * one for k in (*ks, 0)}
    return {k: used[base] / nbytes for k, nbytes in used.items()}


class Speeds:
    """Decoding at several top-k in several modes, interleaved.

    Args:
        record (dict): Of ``bench.bench``, its modes named as ``name`` does.
        ks (list[int]): Values of K; the first is the one that others are compared with.
    """

    def __init__(self, record, ks):
        self.record, self.ks = record, list(ks)

    @staticmethod
    def name(mode, k):
        return f"{mode}, K={k}"

    @classmethod
    def measure(
        cls,
        path,
        ks,
        modes=("resident", "fused"),
        slots=16,
        tokens=64,
        runs=5,
        warmup=8,
        progress=True,
    ):
        """Run ``bench`` on every mode at every K, the same prompts, rounds in random order."""
        configs = {
            cls.name(mode, k): StreamConfig(mode=mode, top_k=k, slots=slots)
            for mode in modes
            for k in ks
        }
        return cls(
            bench.bench(path, configs, tokens=tokens, runs=runs, warmup=warmup, progress=progress),
            ks,
        )

    def tok_s(self, mode, k) -> dict:
        """Tokens per second: median, quartiles, n."""
        return self.record["modes"][self.name(mode, k)]["decode_tok_s"]

    def token_s(self, mode, k) -> np.ndarray:
        """Seconds for a token in each run."""
        samples = self.record["modes"][self.name(mode, k)]["samples"]
        return np.array([s["decode_s"] for s in samples]) / self.record["tokens"]

    def speedup(self, mode, k) -> dict:
        """How many times faster than the first K, round by round, so that drift cancels: median, quartiles, n."""
        return timing.paired_ratio(self.token_s(mode, self.ks[0]), self.token_s(mode, k))

    def waiting_s(self, mode, k) -> float:
        """Seconds of a token spent waiting for reads: the median run."""
        samples = self.record["modes"][self.name(mode, k)]["samples"]
        return float(
            np.median([s["counters"]["wait_s"] / s["counters"]["tokens"] for s in samples])
        )

    def reads(self, mode, k) -> tuple[float, float]:
        """Bytes read for a token, and the share of experts that were in a slot."""
        m = self.record["modes"][self.name(mode, k)]
        return m["bytes_per_token"], m["hit_rate"]

    def texts(self, path, mode, i=0) -> dict[int, str]:
        """What was written after the ``i``-th prompt, by K."""
        tokenizer = load_tokenizer(Path(path))
        modes = self.record["modes"]
        return {
            k: tokenizer.decode(modes[self.name(mode, k)]["samples"][i]["tokens"]) for k in self.ks
        }

    def table(self) -> str:
        """Tokens per second of every mode and K as text."""
        lines = [f"{'':14s} tokens a second: median [quartiles]"]
        for name, m in self.record["modes"].items():
            s = m["decode_tok_s"]
            lines.append(
                f"{name:14s} {s['median']:6.1f} [{s['p25']:.1f} - {s['p75']:.1f}], n={s['n']}"
            )
        return "\n".join(lines)


def _note(speeds):
    r = speeds.record
    slots = next(
        m["config"]["slots"] for m in r["modes"].values() if m["config"]["mode"] != "resident"
    )
    return f"{r['model']}, {slots} slots, page cache {r['cache_state']}, {r['tokens']} tokens a run, n={len(speeds.token_s('fused', speeds.ks[0]))}"


def speed_figure(speeds, predicted, recorded=None):
    """Speed over the full K against K: predicted, measured now, recorded, published."""
    ks, full, least = speeds.ks, speeds.ks[0], speeds.ks[-1]
    ratios = {mode: {k: speeds.speedup(mode, k) for k in ks} for mode in ("resident", "fused")}
    published = {
        k: PUBLISHED[k] / PUBLISHED[full] for k in ks if k in PUBLISHED and full in PUBLISHED
    }
    fig = figures.figure(
        f"K={least} in place of {full}: {ratios['fused'][least]['median']:.2f} times as fast streamed, {predicted[least]:.2f} predicted",
        x="experts for each token (K)",
        y=f"speed over K={full}",
        note=_note(speeds) + ", float32; medians and quartiles, paired by round",
    )
    fig.add_scatter(
        x=ks,
        y=[predicted[k] for k in ks],
        name="predicted from bytes",
        mode="lines",
        line=figures.style(6)["line"],
    )
    for i, (mode, by_k) in enumerate(ratios.items()):
        low, mid, high = (np.array([by_k[k][q] for k in ks]) for q in ("p25", "median", "p75"))
        error = dict(type="data", array=high - mid, arrayminus=mid - low)
        style = figures.style(i)
        fig.add_scatter(
            x=ks,
            y=mid,
            error_y=error,
            name=f"{mode}, this machine now",
            mode="lines+markers",
            **style,
        )
    if recorded:
        old = Speeds(recorded["speeds"], ks)
        y = [old.speedup("fused", k)["median"] for k in ks]
        label = f"fused, recorded {recorded['machine']['date']} ({recorded['machine']['cpu']}, n={len(old.token_s('fused', full))})"
        fig.add_scatter(x=ks, y=y, name=label, mode="markers", marker=figures.style(4)["marker"])
    fig.add_scatter(
        x=list(published),
        y=list(published.values()),
        name="published: 122B on M1 Ultra (PR 26)",
        mode="markers",
        marker=figures.style(2)["marker"],
    )
    figures.ceiling(fig, predicted[0], "ceiling: no routed expert at all")
    fig.update_xaxes(tickvals=ks, autorange="reversed")
    return figures.describe(
        fig,
        alt="Speed over the full top-k against K. "
        + " ".join(
            f"K={k}: {predicted[k]:.2f} predicted, {ratios['resident'][k]['median']:.2f} resident, {ratios['fused'][k]['median']:.2f} streamed"
            + (f", {published[k]:.2f} published." if k in published else ".")
            for k in ks[1:]
        ),
        finding=f"Even with no routed expert at all this model would be {predicted[0]:.2f} times as fast: the rest of it stays.",
    )


def time_figure(speeds, mode="fused"):
    """Where a streamed token's time goes, by K: waiting for reads, and the rest."""
    ks, full, least = speeds.ks, speeds.ks[0], speeds.ks[-1]
    total = {k: float(np.median(speeds.token_s(mode, k))) * 1e3 for k in ks}
    waiting = {k: speeds.waiting_s(mode, k) * 1e3 for k in ks}
    reads = {k: speeds.reads(mode, k) for k in ks}
    fig = figures.figure(
        f"K={least} reads {reads[least][0] / reads[full][0]:.0%} of what K={full} reads, and waits {waiting[least]:.1f} ms in place of {waiting[full]:.1f}",
        x="",
        y="time for a token (ms)",
        note=_note(speeds) + "; medians",
        barmode="stack",
    )
    where = [f"K={k}<br>{b / 1e6:.2f} MB read<br>{hits:.0%} hits" for k, (b, hits) in reads.items()]
    rest = [total[k] - waiting[k] for k in ks]
    fig.add_bar(x=where, y=rest, name="computing and dispatching", marker_color=figures.COLORS[4])
    bar = dict(
        color=figures.COLORS[1], pattern=dict(shape="/", fillmode="overlay", fgcolor="white")
    )
    fig.add_bar(x=where, y=[waiting[k] for k in ks], name="waiting for reads", marker=bar)
    return figures.describe(
        fig,
        alt="Stacked bars of a token's time. "
        + " ".join(
            f"K={k}: {total[k]:.1f} ms, {waiting[k]:.1f} of them waiting for reads." for k in ks
        ),
        finding=f"Waiting is {waiting[full] / total[full]:.0%} of a token at K={full} and {waiting[least] / total[least]:.0%} at K={least}; "
        f"the rest falls from {rest[0]:.1f} to {rest[-1]:.1f} ms.",
    )


def quality_table(scores) -> str:
    """Bits per byte of every K, and the increase over the first, as text."""
    base = next(iter(scores.values()))
    lines = ["       bits per byte [95% interval]      increase [95% interval]"]
    for k, s in scores.items():
        (low, high), (rise, a, b) = s.interval(), s.increase(base)
        lines.append(
            f"K={k}:   {s.bits_per_byte:.3f} [{low:.3f} - {high:.3f}]         {rise:+7.2%} [{a:+.2%} to {b:+.2%}]"
        )
    return "\n".join(lines)


def quality_figure(scores, texts, holds, note, recorded=None):
    """The increase of bits per byte over the full K, with what counts as "holds"."""
    ks = list(scores)
    full, least = ks[0], ks[-1]
    rises = {k: s.increase(scores[full]) for k, s in scores.items()}
    fig = figures.figure(
        f"Bits per byte change by {rises[ks[1]][0]:+.1%} at K={ks[1]} and by {rises[least][0]:+.1%} at K={least}",
        x="experts for each token (K)",
        y=f"bits per byte over K={full} (%)",
        note=f"{note}, {int(scores[full].nbytes.sum()):,} bytes in {len(scores[full].bits)} windows; 95% intervals, bootstrap over windows",
    )
    sets = [("this machine now", scores, 0)]
    if recorded:
        size = int(recorded["scores"][full].nbytes.sum())
        sets.append(
            (f"recorded {recorded['machine']['date']}, {size:,} bytes", recorded["scores"], 4)
        )
    for label, some, i in sets:
        mid, low, high = 100 * np.array([some[k].increase(some[full]) for k in ks]).T
        error = dict(type="data", array=high - mid, arrayminus=mid - low)
        fig.add_scatter(
            x=ks, y=mid, error_y=error, name=label, mode="lines+markers", **figures.style(i)
        )
    figures.ceiling(fig, 100 * holds, "what counts as 'holds'")
    fig.update_xaxes(tickvals=ks, autorange="reversed")
    fig.update_layout(showlegend=True)
    return figures.describe(
        fig,
        alt=f"Increase of bits per byte over K={full}. "
        + " ".join(
            f"K={k}: {m:+.2%}, from {a:+.2%} to {b:+.2%}." for k, (m, a, b) in rises.items()
        ),
        finding=f"At K={full} the model needs {scores[full].bits_per_byte:.2f} bits per byte, at K={least} {scores[least].bits_per_byte:.2f}; "
        f"xz -9e needs {xz_bits_per_byte(texts):.2f}.",
    )


def verdicts(speeds, predicted, scores, holds) -> str:
    """One line for each claim and K: A1 (speed, against prediction and publication) and A11 (does quality hold?)."""
    lines, full = [], speeds.ks[0]
    for k in speeds.ks[1:]:
        s, (rise, low, high) = speeds.speedup("fused", k), scores[k].increase(scores[full])
        published = (
            f"{PUBLISHED[k] / PUBLISHED[full]:.2f}" if k in PUBLISHED and full in PUBLISHED else "-"
        )
        holding = (
            "holds"
            if high <= holds
            else "does not hold"
            if low > holds
            else "undecided: more windows"
        )
        lines.append(
            f"A1   K={k}: {s['median']:.2f} [{s['p25']:.2f} - {s['p75']:.2f}] times as fast here, {predicted[k]:.2f} predicted, {published} published"
        )
        lines.append(
            f"A11  K={k}: {holding}: {rise:+.2%} [{low:+.2%} to {high:+.2%}] bits per byte"
        )
    return "\n".join(lines)


def dial(path, texts, tokens=24, length=128, count=4):
    """Makes the function behind the top-k slider: a few windows scored and a few tokens written, at K and at the model's own.

    Returns:
        Callable[[int], go.Figure]: From top-k to a figure of time and bits per byte.
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
        ms = {k: float(np.median(speeds.token_s("fused", k))) * 1e3 for k in ks}
        written = {
            k: speeds.record["modes"][speeds.name("fused", k)]["samples"][0]["tokens"] for k in ks
        }
        rise, low, high = known[top_k].increase(known[own])
        fig = figures.figure(
            f"Top-k {top_k}: {speeds.speedup('fused', top_k)['median']:.2f} times as fast, {rise:+.1%} bits per byte",
            x="",
            y="",
            note=f"{Path(path).name}, streamed, {tokens} tokens three times, {count} windows of {length} tokens",
        )
        make_subplots(1, 2, figure=fig, horizontal_spacing=0.14)
        bars = [
            ("time for a token (ms)", list(ms.values())),
            ("bits per byte", [known[k].bits_per_byte for k in ks]),
        ]
        for column, (title, heights) in enumerate(bars, 1):
            colors = [figures.GREY, figures.COLORS[0]][: len(ks)]
            fig.add_bar(
                x=[f"K={k}" for k in ks],
                y=heights,
                width=0.5,
                texttemplate="%{y:.3g}",
                marker_color=colors,
                row=1,
                col=column,
            )
            fig.update_yaxes(title=title, col=column)
        fig.update_layout(showlegend=False)
        same = next(
            (i for i, (x, y) in enumerate(zip(written[own], written[top_k])) if x != y),
            len(written[own]),
        )
        return figures.describe(
            fig,
            alt=f"Bars for K={own} and K={top_k}. Time for a token: {ms[own]:.1f} and {ms[top_k]:.1f} ms. "
            f"Bits per byte: {known[own].bits_per_byte:.3f} and {known[top_k].bits_per_byte:.3f}.",
            finding=f"K={top_k} needs {rise:+.1%} [{low:+.1%} to {high:+.1%}] bits for the same text; "
            f"the first {same} of {len(written[own])} greedy tokens are those of K={own}.",
        )

    return look


def recorded(path) -> dict | None:
    """A record of ``main``, its scores as ``Score``; None if there is none."""
    path = Path(path)
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    scores = record["scores"].items()
    return record | {
        "scores": {int(k): Score(np.array(s["bits"]), np.array(s["nbytes"])) for k, s in scores}
    }


def main(argv=None):
    """Record speed and quality by top-k, more of both than a notebook has time for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--heldout", type=Path, help="folder of text (default: MODEL/heldout)")
    parser.add_argument(
        "--top-k", type=int, nargs="+", default=[8, 6, 4, 2], help="the first is compared with"
    )
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens in a window")
    parser.add_argument("--count", type=int, default=48, help="windows")
    parser.add_argument("--tokens", type=int, default=64, help="decoded in a run")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args(argv)
    texts = list(heldout_files(a.heldout or a.model / "heldout").values())
    begin = time.perf_counter()
    record = {
        "kind": "top_k",
        "machine": machine.card(),
        "model": a.model.name,
        "length": a.length,
        "scores": {},
    }
    record["xz_bits_per_byte"] = xz_bits_per_byte(texts)
    speeds = Speeds.measure(a.model, a.top_k, slots=a.slots, tokens=a.tokens, runs=a.runs)
    record["speeds"] = speeds.record
    records.save(a.json, record)
    scores = at_top_k(a.model, texts, a.top_k, StreamConfig(slots=a.slots), a.length, a.count)
    record["scores"] = {
        str(k): {"bits": s.bits.tolist(), "nbytes": s.nbytes.tolist()} for k, s in scores.items()
    }
    record["spent_s"] = time.perf_counter() - begin
    records.save(a.json, record)
    print(speeds.table(), quality_table(scores), a.json, sep="\n")


if __name__ == "__main__":
    main()
