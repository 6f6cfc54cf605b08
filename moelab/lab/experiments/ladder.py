"""From ``serial`` to ``fused``, one rung at a time: what notebook 02 runs, and what it makes of the samples."""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from ... import DATA, StreamConfig, close, footprint, load, synthesize
from .. import machine
from ..decode import decode
from ..plots import style as figures
from ..texts import PROMPTS
from . import bench

# Each rung adds one thing to the one before. The speculative reads of PR 26 belong to notebook 04.
RUNGS = {
    "serial": "serial",  # one read, then its computation, then the next
    "buffers/readers=1": "batched",  # persistent buffers, all of a layer's reads before anything is computed
    "buffers": "parallel",  # several of them in flight at once
    "stacked/streams=1": "slots",  # S experts stay in one array for each projection, one gather for each
    "fused/streams=1": "gate+up",  # gate and up in one array, one gather fewer
    "fused": "cores",  # a CPU's arithmetic on more than one core; nothing new on a GPU
}
LADDER = ",".join(RUNGS)


def checkpoint_of_real_layers(tokenizer, layers=4, experts=256, like="qwen3.5-35b-a3b"):
    """A random checkpoint of a real model's layers, for as long as the object lives: ``.path``, ``.cleanup()``.

    It lies beside ``data/``, since the system's temporary folder may be in memory.

    Args:
        tokenizer (Path): Folder to take a tokenizer from.
        layers (int): Layers.
        experts (int): Experts in each; the real number costs 1.8 MB each and layer.
    """
    build = DATA.parent / "build"
    build.mkdir(exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix="layers-", dir=build)
    config = copy.deepcopy(synthesize.CONFIGS[like])
    config.get("text_config", config)["num_experts"] = experts
    folder.path = synthesize.synthesize(
        Path(folder.name) / like, like, layers, tokenizer=tokenizer, config=config, progress=False
    )
    return folder


def _names(record):
    """The rungs by mode; a GPU's record says nothing of streams, it has one."""
    if "fused/streams=1" in record["modes"]:
        return RUNGS
    return {
        mode.removesuffix("/streams=1"): name for mode, name in RUNGS.items() if name != "cores"
    }


def rungs(record):
    """``{rung's name: seconds of a token, each round}`` of a bench, in the ladder's order."""
    return {name: token_s(record, m) for m, name in _names(record).items() if m in record["modes"]}


def multiples(times):
    """``{rung: how many times faster than the first}`` of ``rungs``, as one sample each."""
    first = np.median(next(iter(times.values())))
    return {name: [float(first / np.median(s))] for name, s in times.items()}


def token_s(record, mode):
    """Seconds that a decoded token took, each round."""
    return np.array([s["decode_s"] for s in record["modes"][mode]["samples"]]) / record["tokens"]


def parts(record, modes=None):
    """``{mode: {"waiting for reads": s, "the rest": s}}`` of an average token."""
    out, names = {}, _names(record)
    for mode in modes or [m for m in ("resident", *names) if m in record["modes"]]:
        samples = record["modes"][mode]["samples"]
        wait = (
            np.median([s["counters"]["wait_s"] for s in samples]) / record["tokens"]
            if samples[0]["counters"]
            else 0.0
        )
        out[names.get(mode, mode)] = {
            "waiting for reads": float(wait),
            "the rest": float(np.median(token_s(record, mode)) - wait),
        }
    return out


def read_GBs(record, mode):
    """GB/s of the reads while the model waited for them, each round."""
    counters = [s["counters"] for s in record["modes"][mode]["samples"]]
    return np.array([c["bytes_read"] / c["wait_s"] / 1e9 for c in counters])


def sweep(path, slots, tokens, runs, base=None, warmup=16, resident=True):
    """``bench`` of ``fused`` with several numbers of slots, and of the resident model."""
    base = base or StreamConfig()
    configs = {"resident": replace(base, mode="resident")} if resident else {}
    configs |= {f"{n} slots": replace(base, mode="fused", slots=n) for n in slots}
    return bench.bench(path, configs, tokens=tokens, runs=runs, warmup=warmup, progress=False)


def between_prompts(record, mode="fused"):
    """How far apart a mode's speeds are from prompt to prompt, and from run to run of the same prompt.

    Returns:
        dict: ``prompts`` (median tok/s of each), ``hit_rates``, ``between`` and ``within``: largest over smallest median less one; and the
        median over prompts of largest over smallest run less one.
    """
    n = len(record["prompts"])
    speeds, hits = {}, {}
    for s in record["modes"][mode]["samples"]:
        speeds.setdefault(s["round"] % n, []).append(record["tokens"] / s["decode_s"])
        hits.setdefault(s["round"] % n, []).append(s["counters"]["hit_rate"])
    medians = {p: float(np.median(v)) for p, v in sorted(speeds.items())}
    return {
        "prompts": medians,
        "samples": {p: v for p, v in sorted(speeds.items())},
        "hit_rates": {p: float(np.mean(v)) for p, v in sorted(hits.items())},
        "between": max(medians.values()) / min(medians.values()) - 1,
        "within": float(np.median([max(v) / min(v) - 1 for v in speeds.values()])),
    }


def dial(path, tokens, prompt=PROMPTS[0], warmup=8):
    """The function behind notebook 02's controls: it decodes, resident and streamed, and draws what a token is made of.

    Returns:
        Callable: From top-k, slots, readers and the state of the page cache to a figure.
    """
    plan = footprint(path, StreamConfig())
    pages = [lambda: machine.drop_pages(path), None]

    def once(config, cold):
        model, tokenizer = load(path, config)
        try:
            return decode(model, tokenizer.encode(prompt), tokens, warmup, pages[not cold])
        finally:
            close(model)

    def look(top_k: int, slots: int, readers: int, cache: str):
        resident = once(StreamConfig(mode="resident"), False)
        streamed = once(
            StreamConfig(
                top_k=None if top_k == plan.top_k else top_k, slots=slots, readers=readers
            ),
            cache == "cold",
        )
        c = streamed["counters"]
        all_ms, streamed_ms = (r["decode_s"] / tokens * 1e3 for r in (resident, streamed))
        wait_ms = min(c["wait_s"] / tokens * 1e3, streamed_ms)
        same = next(
            (i for i, (a, b) in enumerate(zip(streamed["tokens"], resident["tokens"])) if a != b),
            len(resident["tokens"]),
        )
        fig = figures.figure(
            f"Top-{top_k}, {slots} slots, {readers} readers, {cache}: {1e3 / streamed_ms:.1f} tok/s, {all_ms / streamed_ms:.2f} of resident",
            "", "ms a token", note=f"{Path(path).name}, one run of {tokens} tokens each after {warmup} of warm-up", barmode="stack",
        )  # fmt: skip
        where = ["resident", "streamed"]
        fig.add_bar(
            x=where,
            y=[all_ms, streamed_ms - wait_ms],
            name="the rest",
            marker_color=figures.COLORS[4],
            width=0.5,
        )
        fig.add_bar(
            x=where, y=[0, wait_ms], name="waiting for reads", width=0.5,
            marker=dict(color=figures.COLORS[1], pattern=dict(shape="x", fgcolor="white", fillmode="overlay")),
        )  # fmt: skip
        lossy = "" if top_k == plan.top_k else f" (top-{top_k} in place of {plan.top_k} is lossy)"
        return figures.describe(
            fig,
            alt=f"Two stacked bars. Resident {all_ms:.1f} ms a token; streamed {streamed_ms:.1f} ms, of which {wait_ms:.1f} waiting for reads.",
            finding=f"{c['hit_rate']:.0%} of the experts were in a slot, {c['bytes_per_token'] / 1e6:.2f} MB read for a token; "
            f"{same} of {len(resident['tokens'])} tokens are the resident model's{lossy}.",
        )

    return look
