"""What each prefetcher and each layout is worth: python -m moelab.lab.prefetch MODEL PACKED --json FILE.

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

from .. import StreamConfig, close, load, record, stats
from . import figures, machine, timing
from .bench import PROMPTS

PREFETCHERS = ("none", "last", "lookahead", "oracle")
COUNTERS = ("misses", "bytes_read", "wait_s", *(f"prefetch_{n}" for n in ("issued", "used", "late", "wasted", "saved_s")))


def foretell(model, trace):
    """Tell a model with ``prefetch="oracle"`` what the coming tokens will need.

    Args:
        model (nn.Module): From ``moelab.load``.
        trace (Trace): Of the same prompt; its decoded tokens begin with the next one.

    Raises:
        ValueError: If the model has no oracle, or the trace is another model's.
    """
    oracle = model._session.prefetcher
    if not hasattr(oracle, "foretell"):
        raise ValueError("foretell: expected a model loaded with StreamConfig(prefetch='oracle').")
    rows = trace.experts[trace.phase == "decode"]
    if rows.shape[1] != len(model._session.layers):
        raise ValueError(
            f"foretell: expected a trace of {len(model._session.layers)} layers, got {rows.shape[1]}. Record it with this model."
        )
    oracle.foretell(rows)


def decode(model, prompt_ids, tokens, warmup=4, cold=(), trace=None):
    """Greedy tokens one at a time, each on the clock by itself.

    Args:
        model (nn.Module): From ``moelab.load``.
        prompt_ids (list[int]): The prompt.
        tokens (int): Tokens on the clock.
        warmup (int): Tokens before them.
        cold (list[Path]): Files whose pages are dropped before every token.
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
            for file in cold:
                machine.drop_pages(file)
            begin = time.perf_counter()
            y, token = step(y)
            step_s.append(time.perf_counter() - begin)
            out.append(token)
    c = stats(model).decode
    return {"tokens": out, "step_s": step_s[warmup:], "counters": {n: getattr(c, n) for n in COUNTERS} | {"hits": c.hits}}


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
    files = {name: sorted(path.glob("*.safetensors")) for name, path in layouts.items()}
    variants = [(s, layout, p) for s in states for layout in layouts for p in prefetchers]
    samples, order, models = {v: [] for v in variants}, random.Random(seed), {}
    try:
        for layout, path in layouts.items():
            for p in prefetchers:
                config = StreamConfig(slots=slots, prefetch=p, streams=streams)
                models[layout, p], tokenizer = load(path, config)
        first = models[next(iter(layouts)), prefetchers[0]]
        with tqdm(total=len(variants) * runs, desc="prefetch", unit="run", leave=False, disable=not progress) as bar:
            for i in range(runs):
                ids = tokenizer.encode(prompts[i % len(prompts)])
                with record(first) as trace:  # what the oracle knows; not on the clock
                    right = decode(first, ids, tokens, warmup)["tokens"]
                for state, layout, p in order.sample(variants, len(variants)):
                    sample = decode(
                        models[layout, p], ids, tokens, warmup, files[layout] if state == "cold" else (),
                        trace if p == "oracle" else None,
                    )  # fmt: skip
                    if sample["tokens"] != right:
                        raise RuntimeError(f"{state}, {layout}, {p}: other tokens than without prefetching. Report this.")
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
        counters = {n: float(np.mean([s["counters"][n] for s in samples[v]])) / tokens for n in (*COUNTERS, "hits")}
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
        words.append(f"{layout}: " + ", ".join(f"{v['prefetch']} {m:.2f}" for v, m in zip(its, ms[:, 1])))
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


def main(argv=None):
    p = argparse.ArgumentParser(prog="python -m moelab.lab.prefetch", description=__doc__.split("\n\n")[0])
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
        timing.save(args.json, out)


if __name__ == "__main__":
    main()
