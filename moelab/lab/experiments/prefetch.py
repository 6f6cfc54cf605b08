"""What each prefetcher and each layout is worth: python -m moelab.lab.experiments.prefetch MODEL PACKED --json FILE.

The same prompt, the same greedy tokens, every variant in turn in each round. Warm: the
file is in the page cache. Cold: its pages are dropped before every token, outside the
clock, so that every miss is a read of the SSD.
"""

import argparse
import random
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ... import StreamConfig, close, load, record, stats
from ...replay import locality as routing
from ...replay.pagecache import held
from ...streaming.model import session_of
from .. import machine, records, timing
from ..plots import style as figures
from ..texts import PROMPTS

PREFETCHERS = ("none", "last", "lookahead", "oracle")
COUNTERS = (
    "misses",
    "bytes_read",
    "wait_s",
    *(f"prefetch_{n}" for n in ("issued", "used", "late", "wasted", "saved_s")),
)


def foretell(model, trace):
    """Tell a model with ``prefetch="oracle"`` what the coming tokens will need.

    Args:
        model (nn.Module): From ``moelab.load``.
        trace (Trace): Of the same prompt; its decoded tokens begin with the next one.

    Raises:
        ValueError: If the model has no oracle, or the trace is another model's.
    """
    oracle = session_of(model).prefetcher
    if not hasattr(oracle, "foretell"):
        raise ValueError("foretell: expected a model loaded with StreamConfig(prefetch='oracle').")
    rows = trace.experts[trace.phase == "decode"]
    if rows.shape[1] != len(session_of(model).layers):
        raise ValueError(
            f"foretell: expected a trace of {len(session_of(model).layers)} layers, got {rows.shape[1]}. Record it with this model."
        )
    oracle.foretell(rows)


def decode(model, prompt_ids, tokens, warmup=4, cold=None, trace=None):
    """Greedy tokens one at a time, each on the clock by itself.

    Args:
        model (nn.Module): From ``moelab.load``.
        prompt_ids (list[int]): The prompt.
        tokens (int): Tokens on the clock.
        warmup (int): Tokens before them.
        cold (Path, optional): The model folder, whose pages are dropped before every token.
        trace (Trace): For the oracle: of this prompt.

    Returns:
        dict: ``tokens``, ``step_s`` and ``counters`` of the tokens on the clock.
    """
    cache = make_prompt_cache(model)
    with mx.stream(generation_stream):

        def step(ids):
            y = mx.argmax(model(ids[None], cache=cache)[:, -1, :], axis=-1)
            return y, y.item()

        y, first = step(mx.array(prompt_ids))
        if trace is not None:
            foretell(model, trace)
        out, step_s = [first], []
        for i in range(warmup + tokens):
            if i == warmup:
                stats(model, reset=True)
            if cold:
                machine.drop_pages(cold)
            begin = time.perf_counter()
            y, token = step(y)
            step_s.append(time.perf_counter() - begin)
            out.append(token)
    c = stats(model).decode
    return {
        "tokens": out,
        "step_s": step_s[warmup:],
        "counters": {n: getattr(c, n) for n in COUNTERS} | {"hits": c.hits},
    }


def bench_prefetch(layouts, slots=16, tokens=48, runs=5, warmup=4, prefetchers=PREFETCHERS, states=("warm", "cold"),
                   prompts=PROMPTS, seed=0, streams="auto", progress=True):  # fmt: skip
    """Every prefetcher on every layout, interleaved, warm and cold.

    Args:
        layouts (dict[str, Path]): The same model's folders by name, such as ``as shipped`` and ``packed``.
        slots (int): S.
        tokens (int): Tokens on the clock in each run.
        runs (int): Rounds; round i takes prompt i, modulo their number.
        warmup (int): Tokens before the clock.
        prefetchers (tuple[str]): As for ``StreamConfig``; the first is what the others are compared with.
        states (tuple[str]): ``warm``, ``cold`` or both.
        prompts (tuple[str]): The prompts.
        seed (int): Of the orders.
        streams (int or str): As for ``StreamConfig``.
        progress (bool): Show a bar.

    Returns:
        dict: The record: raw samples by variant (``state, layout, prefetcher``), medians of milliseconds a token, ratios of the
        tokens' time to that of the first prefetcher on the first layout, in the same round and state.
    """
    layouts = {name: Path(path) for name, path in layouts.items()}
    variants = [(s, layout, p) for s in states for layout in layouts for p in prefetchers]
    samples, order, models = {v: [] for v in variants}, random.Random(seed), {}
    try:
        for layout, path in layouts.items():
            for p in prefetchers:
                config = StreamConfig(slots=slots, prefetch=p, streams=streams)
                models[layout, p], tokenizer = load(path, config)
        teller = models["teller", ""] = load(path, StreamConfig(slots=slots, streams=streams))[0]
        with tqdm(
            total=len(variants) * runs,
            desc="prefetch",
            unit="run",
            leave=False,
            disable=not progress,
        ) as bar:
            for i in range(runs):
                ids = tokenizer.encode(prompts[i % len(prompts)])
                with record(teller) as trace:  # what the oracle knows; not on the clock
                    right = decode(teller, ids, tokens, warmup)["tokens"]
                for state, layout, p in order.sample(variants, len(variants)):
                    sample = decode(
                        models[layout, p], ids, tokens, warmup, layouts[layout] if state == "cold" else None,
                        trace if p == "oracle" else None,
                    )  # fmt: skip
                    if sample["tokens"] != right:
                        raise RuntimeError(
                            f"{state}, {layout}, {p}: other tokens than without prefetching. Report this."
                        )
                    samples[state, layout, p].append(sample)
                    bar.update()
    finally:
        for model in models.values():
            close(model)
    out = {
        "kind": "prefetch", "machine": machine.card(), "model": next(iter(layouts.values())).name, "slots": slots, "tokens": tokens,
        "warmup_tokens": warmup, "runs": runs, "order": "random in every round", "variants": [],
    }  # fmt: skip
    for v in variants:
        yard = samples[v[0], next(iter(layouts)), prefetchers[0]]
        counters = {
            n: float(np.mean([s["counters"][n] for s in samples[v]])) / tokens
            for n in (*COUNTERS, "hits")
        }
        out["variants"].append(
            {
                "state": v[0], "layout": v[1], "prefetch": v[2], "step_s": [s["step_s"] for s in samples[v]],
                "token_s": timing.summary([float(np.mean(s["step_s"])) for s in samples[v]]),
                "ratio": timing.paired_ratio([np.mean(s["step_s"]) for s in yard], [np.mean(s["step_s"]) for s in samples[v]]),
                "per_token": counters,
            }
        )  # fmt: skip
    return out


def report(out):
    """The record as a table."""
    lines = [
        figures.card_line(out["machine"]),
        f"{out['model']}: {out['slots']} slots, {out['tokens']} tokens a run after {out['warmup_tokens']}, {out['runs']} rounds; speed relative to "
        "the first line of the same state",
        f"{'state':6}{'layout':12}{'prefetch':11}{'ms/token [quartiles]':24}{'speed [quartiles]':24}{'misses':>7}{'issued':>8}{'used':>7}{'late':>7}"
        f"{'wasted':>8}{'saved ms':>9}{'MB':>7}",
    ]
    for v in out["variants"]:
        t, r, c = v["token_s"], v["ratio"], v["per_token"]
        ms = f"{t['median'] * 1e3:.2f} [{t['p25'] * 1e3:.2f} - {t['p75'] * 1e3:.2f}]"
        speed = f"{r['median']:.3f} [{r['p25']:.3f} - {r['p75']:.3f}]"
        lines.append(
            f"{v['state']:6}{v['layout']:12}{v['prefetch']:11}{ms:24}{speed:24}{c['misses']:7.1f}{c['prefetch_issued']:8.1f}{c['prefetch_used']:7.1f}"
            f"{c['prefetch_late']:7.1f}{c['prefetch_wasted']:8.1f}{c['prefetch_saved_s'] * 1e3:9.2f}{c['bytes_read'] / 1e6:7.2f}"
        )
    return "\n".join(lines)


def figure(out, state):
    """Milliseconds a token of every prefetcher on every layout, with quartiles; the oracle's line is the bound."""
    rows = [v for v in out["variants"] if v["state"] == state]
    layouts = list(dict.fromkeys(v["layout"] for v in rows))
    best = min(rows, key=lambda v: v["token_s"]["median"])
    title = f"{state.capitalize()}: {best['prefetch']}, {best['layout']} is fastest, {best['ratio']['median']:.2f} times the speed of none, {layouts[0]}"
    fig = figures.figure(
        title, "prefetch", "time for a token (ms)", card=out["machine"],
        note=f"{out['model']}, {out['slots']} slots, {out['tokens']} tokens a run, n={out['runs']}, pages "
        + ("dropped before every token" if state == "cold" else "in the page cache"),
    )  # fmt: skip
    words = []
    for i, layout in enumerate(layouts):
        its = [v for v in rows if v["layout"] == layout]
        ms = np.array([[v["token_s"][q] * 1e3 for q in ("p25", "median", "p75")] for v in its])
        fig.add_bar(
            x=[v["prefetch"] for v in its], y=ms[:, 1], name=layout,
            marker=dict(color=figures.COLORS[i], pattern=dict(shape=["", "/", "x"][i % 3], fgcolor="white", fillmode="overlay")),
            error_y=dict(type="data", array=ms[:, 2] - ms[:, 1], arrayminus=ms[:, 1] - ms[:, 0], thickness=1.5, width=5),
        )  # fmt: skip
        words.append(
            f"{layout}: " + ", ".join(f"{v['prefetch']} {m:.2f}" for v, m in zip(its, ms[:, 1]))
        )
    oracles = [v["token_s"]["median"] * 1e3 for v in rows if v["prefetch"] == "oracle"]
    if oracles:
        figures.ceiling(fig, min(oracles), "the oracle's")
    fig.update_layout(barmode="group")
    finding = "; ".join(
        f"{v['prefetch']} on {v['layout']} {v['ratio']['median']:.2f} [{v['ratio']['p25']:.2f} to {v['ratio']['p75']:.2f}]"
        for v in rows if (v["prefetch"], v["layout"]) != ("none", layouts[0])
    )  # fmt: skip
    return figures.describe(
        fig, alt=f"Bars of milliseconds a token, {state}. " + ". ".join(words) + ".",
        finding=f"Speed in proportion to no prefetching {layouts[0]}: {finding}.",
    )  # fmt: skip


def locality(traces, slots, skip=64):
    """Three figures that are all called temporal locality, as text.

    Args:
        traces (dict[str, Trace]): By name; their decoded tokens count.
        slots (int): S, of the bank.
        skip (int): Tokens at the start that only fill the bank.

    Returns:
        str: A table with a line for each trace.
    """
    lines = [
        f"{'trace':10}{'lag 1, each':>14}{'lag 1, all K':>14}{f'in {slots} slots':>14}{'union of 4':>12}{'next layer':>12}{'by chance':>11}"
    ]
    for name, trace in traces.items():
        t = trace.decode
        K, E = t.experts.shape[2], t.num_experts
        kept = routing.overlap(t)
        lines.append(
            f"{name:10}{kept['each'].mean():14.1%}{kept['all'].mean():14.2%}{routing.lru_hit_rate(t, skip)[:, slots].mean():14.1%}"
            f"{routing.union(t, 4).mean():12.1f}{routing.layer_prediction(t)['pairs'].mean():12.1%}{K / E:11.1%}"
        )
    return "\n".join(lines)


def locality_figure(traces, slots, skip=64):
    """Share of the needed experts that a bank of S slots holds, over S, beside the overlap of neighbouring tokens."""
    fig = figures.figure(
        "", "slots a layer (S)", "share of the needed experts that are held",
        note=f"{', '.join(traces)}: decoded tokens of tiny-moe, the first {skip} only fill the slots; least recently used leaves",
    )  # fmt: skip
    each, banks = [], []
    for i, (name, trace) in enumerate(traces.items()):
        t = trace.decode
        curve = routing.lru_hit_rate(t, skip).mean(0)
        K, E = t.experts.shape[2], t.num_experts
        fig.add_scatter(
            x=np.arange(K, E + 1),
            y=curve[K:],
            name=name,
            mode="lines",
            line=figures.style(i)["line"],
        )
        each.append(routing.overlap(t)["each"].mean())
        banks.append((curve[slots], int(np.argmax(curve >= 0.7))))
    figures.ceiling(fig, float(np.mean(each)), "experts of the last token (lag 1)")
    figures.ceiling(fig, 0.7, "the 70% of PR 26")
    where = sorted(s for _, s in banks)
    fig.update_yaxes(range=[0, 1.02], tickformat=".0%")
    fig.update_layout(
        title_text=f"A token repeats {np.mean(each):.0%} of the last one's experts; 70% takes {where[0]} to {where[-1]} slots"
    )
    return figures.describe(
        fig,
        alt=f"Curves of the held share over slots, for {', '.join(traces)}. With {slots} slots: " + ", ".join(f"{h:.0%}" for h, _ in banks)
        + f". Lines at lag 1, {np.mean(each):.0%}, and at 70%.",
        finding=f"With {slots} slots {min(h for h, _ in banks):.0%} to {max(h for h, _ in banks):.0%} of the experts are held, {np.mean(each):.0%} are the last token's.",
    )  # fmt: skip


def verdicts(out, traces, slots, skip=64):
    """The claims on locality and prefetching, for ``views.verdicts``, from a record of ``bench_prefetch`` and recorded traces."""
    decoded = [t.decode for t in traces.values()]
    each = [routing.overlap(t)["each"].mean() for t in decoded]
    every = [routing.overlap(t)["all"].mean() for t in decoded]
    curves = [routing.lru_hit_rate(t, skip).mean(0) for t in decoded]
    bank, enough = [c[slots] for c in curves], [int(np.argmax(c >= 0.7)) for c in curves]
    by = {(v["state"], v["layout"], v["prefetch"]): v for v in out["variants"]}
    plain, packed = list(dict.fromkeys(v["layout"] for v in out["variants"]))
    speed = {
        k: v["ratio"]["median"] / by[k[0], k[1], "none"]["ratio"]["median"] for k, v in by.items()
    }
    guess = by["warm", plain, "lookahead"]["per_token"]
    hits = {
        p: np.mean([held(t.experts, t.num_experts, slots, p)[skip:].mean() for t in decoded])
        for p in ("lru", "lfu", "s3-fifo", "belady")
    }

    def span(values):
        return f"{min(values):.0%} to {max(values):.0%}"

    return [
        ("A4", "a speculative read of the last token's experts hits about 70%", "refuted",
         f"{span(each)} of a token's experts are the last token's; with K slots or more these are held anyway: `last` had nothing to read"),
        ("E2", "temporal locality is 25%, or 70%, or 83%", "depends on",
         f"the definition: lag 1 {span(each)} each and {max(every):.2%} at most for all K; {span(bank)} in {slots} slots, 70% in {min(enough)} to {max(enough)}"),
        ("E3", "prefetching is void, harmful, or worth 5% with a look ahead and a packed layout", "depends on",
         f"layout and disk; speed over none of the same layout, {plain} and packed: lookahead {speed['cold', plain, 'lookahead']:.2f} and "
         f"{speed['cold', packed, 'lookahead']:.2f} cold, {speed['warm', plain, 'lookahead']:.2f} and {speed['warm', packed, 'lookahead']:.2f} warm; the oracle "
         f"{speed['cold', plain, 'oracle']:.2f} and {speed['cold', packed, 'oracle']:.2f} cold, {speed['warm', plain, 'oracle']:.2f} and "
         f"{speed['warm', packed, 'oracle']:.2f} warm; packing alone {by['cold', packed, 'none']['ratio']['median']:.2f} cold, "
         f"{by['warm', packed, 'none']['ratio']['median']:.2f} warm; {guess['prefetch_used'] / max(guess['prefetch_issued'], 1e-9):.0%} of the guesses are used"),
        ("E4", "LRU is enough, or LFU, or S3-FIFO", "confirmed" if max(hits["lfu"], hits["s3-fifo"]) - hits["lru"] < 0.05 else "depends on",
         f"hits with {slots} slots: " + ", ".join(f"{p} {h:.1%}" for p, h in hits.items()) + "; what that is worth in time: notebook 03"),
    ]  # fmt: skip


def dial(layouts, prompt, tokens):
    """The function behind a slider: from slots to a short cold run of every prefetcher."""

    def look(slots: int):
        out = bench_prefetch(
            layouts, slots, tokens, 1, prompts=(prompt,), states=("cold",), progress=False
        )
        return figure(out, "cold")

    return look


def main(argv=None):
    p = argparse.ArgumentParser(
        prog="python -m moelab.lab.experiments.prefetch", description=__doc__.split("\n\n")[0]
    )
    p.add_argument("model", help="a model folder")
    p.add_argument("packed", help="the same model from python -m moelab repack")
    p.add_argument("--slots", type=int, default=16)
    p.add_argument("--tokens", type=int, default=48)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--streams", type=lambda v: v if v == "auto" else int(v), default="auto")
    p.add_argument("--json", metavar="FILE")
    args = p.parse_args(argv)
    layouts = {"as shipped": args.model, "packed": args.packed}
    out = bench_prefetch(layouts, args.slots, args.tokens, args.runs, streams=args.streams)
    out["model"] = Path(args.model).name
    print(report(out))
    if args.json:
        records.save(args.json, out)


if __name__ == "__main__":
    main()
