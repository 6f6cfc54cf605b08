"""Notebook 02: what each rung gains, where a token's time goes, and how it varies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from ... import StreamConfig, footprint
from .. import oscache, records, timing
from ..decode import same_tokens
from ..experiments.dispatch import Timed
from ..experiments.ladder import (
    REST,
    RUNGS,
    TOKEN_NBYTES_122B,
    TOP,
    WAITING,
    Copies,
    Held,
    PromptReads,
    Recorded,
    Variation,
    decode_once,
    growth_nbytes,
    multiples,
    one_reader_share,
    parts,
    published_multiples,
    rungs,
    waiting_share,
)
from ..experiments.layer import block_ratio
from ..plots import charts, style
from ..records import values
from ..texts import PROMPTS

if TYPE_CHECKING:
    from pandas import DataFrame

WRITTEN, IN_PYTHON = "unified memory", "copies, reads in Python"
WAYS = {  # how a chart names the ways of an expert's bytes to a GPU
    "resident": "resident",
    WRITTEN: "into unified memory",
    IN_PYTHON: "copied, reads in Python",
    "copies": "copied, reads native",
}
LINK_GBs = 50  # PCIe 5.0 x16 between host and device, about


def _sources(here, gpu):
    return {
        f"{style.HERE}, warm": here,
        f"{gpu.name}, warm": gpu.warm,
        f"{gpu.name}, cold": gpu.cold,
    }


def published_bars() -> go.Figure:
    """PR 26's speeds beside what its SSD would allow if every expert were read."""
    told = records.PUBLISHED["PR 26"]
    first, best = told["SSD rate of the original (GB/s)"], told["SSD rate possible (GB/s)"]
    speeds = {
        f"every expert read at {first:.1f} GB/s": first * 1e9 / TOKEN_NBYTES_122B,
        "serial, measured": told["serial, top-8"],
        f"every expert read at {best:.1f} GB/s": best * 1e9 / TOKEN_NBYTES_122B,
        "buffers, measured": told["buffers, top-8"],
    }
    serial, buffers = (
        told[m] * TOKEN_NBYTES_122B / 1e9 for m in ("serial, top-8", "buffers, top-8")
    )
    return charts.bars(
        {"": {name: [tok_s] for name, tok_s in speeds.items()}},
        "PR 26 is faster than its SSD",
        "tok/s",
        f"A token needs {TOKEN_NBYTES_122B / 1e9:.2f} GB of experts: {serial:.1f} GB/s at the "
        f"first speed and {buffers:.1f} GB/s at the last must come from somewhere.",
        note=told["source"],
        card="",
    )


def agreement_table(here: dict[str, Any], gpu: Recorded) -> None:
    """Shows how far each rung's logits are from the resident model's.

    Args:
        here (dict): Of ``exactness.agreement``.
        gpu (Recorded): The recorded run.
    """
    sources = {style.HERE: here["modes"]}
    sources |= {f"{gpu.name}, {d}": gpu.agreement[d] for d in ("float32", "auto")}
    rows = []
    for source, modes in sources.items():
        for mode, a in modes.items():
            exact = "bit for bit" if a["bit_for_bit"] else f"{a['decode_error']:.1e}"
            rows.append(
                (source.replace("auto", "bfloat16"), mode, f"{a['same_tokens']:.0%}", exact)
            )
    charts.table(("", "mode", "same token", "largest error of a logit, over their spread"), rows)


def read_lines(cold: "DataFrame", gpu: Recorded, expert_nbytes: int) -> go.Figure:
    """Read rates against the number of reads in flight.

    Args:
        cold (DataFrame): Of ``reads.bench_reads``.
        gpu (Recorded): The recorded run.
        expert_nbytes (int): One expert.
    """
    mine = records.reads_GBs(cold)
    series = {("the engine, here" if by == "moelab" else by): s for by, s in mine.items()}
    series[f"the engine, {gpu.name}"] = gpu.reads
    best = {n: max(np.median(r) for r in rows) for n, (_, rows) in series.items()}
    direct = [(best["fio direct"], "fio direct")] if "fio direct" in best else []
    told = ", ".join(f"{n} {v:.2f}" for n, v in best.items())
    return charts.lines(
        series,
        f"One read at a time reaches {one_reader_share(mine['moelab']):.0%} of the best rate here, "
        f"{one_reader_share(gpu.reads):.0%} on the recorded host",
        "reads in flight",
        "GB/s, cold",
        f"Best rates in GB/s: {told}.",
        note=f"experts of {expert_nbytes / 1e6:.2f} MB, pages dropped before each run; "
        + charts.recorded_note(gpu.machine),
        ceilings=direct,
    )


def rung_bars(here: "DataFrame", gpu: Recorded) -> go.Figure:
    """Milliseconds of a token on every rung."""
    sources = _sources(here, gpu)
    mine, warm, cold = (multiples(r)[TOP] for r in sources.values())
    mine_ms, gpu_ms = (values(r, "resident", "token_s").median() * 1e3 for r in (here, gpu.warm))
    return charts.bars(
        {label: rungs(r) for label, r in sources.items()},
        f"All steps to {TOP} together: {mine:.1f}x here, {warm:.1f}x on the GPU, {cold:.1f}x there "
        "from a cold disk",
        "ms a token",
        f"Resident takes {mine_ms:.0f} ms here and {gpu_ms:.1f} ms on the GPU.",
        note="layers of 35B-A3B; here float32, there bfloat16; "
        + charts.recorded_note(gpu.machine),
        scale=1e3,
        marks=[(0, mine_ms, "resident")],
    )


def rung_table(here: "DataFrame") -> None:
    """Shows every rung's speed, ratio to resident, hits and bytes."""
    rows = []
    for mode, rung in RUNGS.items():
        mine = here[here.variant == mode]
        ratio = records.paired(here, "resident", mode).median()
        nbytes = mine.read_nbytes_per_token.mean()
        numbers = (mine.tok_s.median(), ratio, mine.hit_rate.mean(), nbytes / 1e6)
        rows.append(
            (
                rung,
                *(f.format(n) for f, n in zip(("{:.2f}", "{:.2f}", "{:.0%}", "{:.0f}"), numbers)),
            )
        )
    charts.table(("rung", "tok/s", "of resident", "hits", "MB read a token"), rows)


def multiple_lines(here: "DataFrame", gpu: Recorded) -> go.Figure:
    """How many times faster than the first each rung is, beside the published ladder."""
    climbs = {label: multiples(r) for label, r in _sources(here, gpu).items()}
    climbs["M1 Ultra, published (PR 26, then PR 90)"] = told = published_multiples()
    on_gpu = multiples(gpu.warm)
    return charts.lines(
        {name: (list(c), [[v] for v in c.values()]) for name, c in climbs.items()},
        f"Parallel reads gain {told['parallel']:.1f}x in the published ladder, "
        f"{on_gpu['parallel']:.1f}x on the GPU, where slots bring {on_gpu['slots']:.1f}x",
        "",
        "times faster than serial",
        f"PR 26's rewrite is {told['parallel']:.1f} times as fast as its first version. From "
        f"parallel reads to slots PR 90 reports {told['slots'] / told['parallel']:.2f} or 1.046; "
        f"the GPU here gives {on_gpu['slots'] / on_gpu['parallel']:.2f}.",
        note="published: Qwen3.5-122B-A10B on an M1 Ultra, top-8 (PR 26) and top-6 (PR 90); "
        + charts.recorded_note(gpu.machine),
        log_x=False,
    )


def part_bars(here: "DataFrame", gpu: Recorded) -> go.Figure:
    """What a token's time is made of on every rung."""
    sources = _sources(here, gpu)
    mine, warm, cold = (f"{waiting_share(r):.0%}" for r in sources.values())
    block = block_ratio(gpu.all_in_slots, "fused").median()
    return charts.parts(
        {label: parts(r) for label, r in sources.items()},
        f"Waiting for reads takes {mine} of a token here, {warm} on the GPU, {cold} there cold",
        "Slow arithmetic hides the reads. Where arithmetic is fast, reads and the wait for the "
        "routing are what is left. With every expert in its slot a fused block takes "
        f"{block:.2f} times the resident block and one evaluation on the GPU.",
        note="the share of the rung gate+up in the title; " + charts.recorded_note(gpu.machine),
    )


def copy_bars(recorded: tuple[dict, dict[str, Copies]]) -> go.Figure:
    """What the host does in a token, by way of the experts' bytes to the recorded GPU.

    Args:
        recorded (tuple): Of ``recorded_copies``.
    """
    card, layouts = recorded
    speed = {
        (layout, way): f"{made.tokens / np.median(seconds):.0f}"
        for layout, made in layouts.items()
        for way, seconds in made.decode_s.items()
    }
    gains = {
        layout: timing.quartiles_text(made.gain, form=".2f") for layout, made in layouts.items()
    }
    told = [
        f"{layout.capitalize()}: {speed[layout, 'copies']} tok/s, {gain} times the "
        f"{speed[layout, WRITTEN]} of unified memory, {speed[layout, IN_PYTHON]} with reads in "
        f"Python, resident {speed[layout, 'resident']}"
        for layout, gain in gains.items()
    ]
    packed, shipped = (gain.partition(" ")[0] for gain in gains.values())
    return charts.parts(
        {
            layout: {WAYS[way]: parts for way, parts in made.host_s.items()}
            for layout, made in layouts.items()
        },
        f"With the GPU copying, decoding is {packed} times as fast repacked, {shipped} times as "
        "shipped",
        f"{'. '.join(told)}. A bar is one text.",
        note="8 layers of 35B-A3B, 64 of 256 slots, file in the page cache",
        card=card,
    )


def host_bars(recorded: tuple[dict, dict[str, Held]]) -> go.Figure:
    """Decoding with every expert in the host's memory, beside reads and resident.

    Args:
        recorded (tuple): Of ``recorded_host``.
    """
    card, layouts = recorded
    made = layouts["repacked"]
    few, *_ = (way for way in made.decode_s if way.startswith("disk"))
    same = few.replace("disk", "host")
    ratio = np.divide(made.decode_s["resident"], made.decode_s[same])
    gain = np.divide(made.decode_s[few], made.decode_s[same])
    links = [LINK_GBs * 1e9 / held.copied_nbytes[same] for held in layouts.values()]
    return charts.bars(
        {
            layout: {way: held.tokens / np.array(s) for way, s in held.decode_s.items()}
            for layout, held in layouts.items()
        },
        f"From the host's memory, decoding is {np.median(ratio):.2f} times as fast as resident",
        "tok/s",
        f"Repacked, {same.partition(', ')[2]}: {timing.quartiles_text(gain, form='.2f')} times as "
        f"fast as with reads, {timing.quartiles_text(ratio, form='.2f')} times as fast as "
        f"resident, and {made.copied_nbytes[same] / 1e6:.0f} MB copied for a token.",
        note=f"8 layers of 35B-A3B, n={len(ratio)}, file in the page cache",
        marks=[
            (i, tok_s, f"{LINK_GBs} GB/s, {same.partition(', ')[2]}")
            for i, tok_s in enumerate(links)
        ],
        card=card,
    )


def write_lines(gpu: Recorded) -> go.Figure:
    """What it costs to put new experts into their slots on the recorded GPU."""
    samples = gpu.writes.samples
    new = sorted({int(name.split(", ")[1].split()[0]) for name in samples})
    writers = list(dict.fromkeys(name.split(", ")[0] for name in samples))
    series = {w: (new, [samples[f"{w}, {m} new"] * 1e3 for m in new]) for w in writers}
    each = {w: (np.median(r[-1]) - np.median(r[0])) / new[-1] for w, (_, r) in series.items()}
    nbytes = gpu.writes.config["expert_nbytes"]
    told = ", ".join(f"{w} {ms:.2f}" for w, ms in each.items())
    return charts.lines(
        series,
        f"On the GPU a new expert's {nbytes / 1e6:.0f} MB takes {each['in place']:.2f} ms to write "
        "into its slot",
        "new experts in a call",
        "ms, with one gather over the slots",
        f"Milliseconds for each new expert: {told} (upload leaves them beside the slots). The link "
        f"alone, at about {LINK_GBs} GB/s, would take {nbytes / LINK_GBs / 1e6:.2f}.",
        note="gate and up of a 35B-A3B expert, from host memory into an array of 64 slots",
        log_x=False,
        card=gpu.machine,
    )


def slot_lines(swept: "DataFrame", gpu: Recorded, slots: int, experts: int) -> go.Figure:
    """Speed and hits against the number of slots.

    Args:
        swept (DataFrame): Of ``sweep``.
        gpu (Recorded): The recorded run.
        slots (int): The number to speak of.
        experts (int): E.
    """
    mine, theirs = (
        t.groupby("variant", sort=False).agg({"tok_s": "median", "hit_rate": "mean"})
        for t in (swept, gpu.slots)
    )
    resident, mode = mine.tok_s["resident"], f"{slots} slots"
    modes = [f"{n} slots" for n in sorted(int(m.split()[0]) for m in mine.index if m != "resident")]
    told = ", ".join(f"{m} {mine.hit_rate[m]:.0%}" for m in modes)
    there = ", ".join(
        f"{m.removeprefix('fused, ')} {made.tok_s:.0f} tok/s and {made.hit_rate:.0%}"
        for m, made in theirs.iterrows()
    )
    settings = swept.attrs["settings"]
    return charts.lines(
        {"fused": ([int(m.split()[0]) for m in modes], [values(swept, m, "tok_s") for m in modes])},
        f"{mode} of {experts}: {mine.hit_rate[mode]:.0%} hits, "
        f"{mine.tok_s[mode] / resident:.2f} of the resident speed",
        "slots in each layer",
        "tok/s",
        f"By chance {slots} slots would hit {slots / experts:.0%}. {gpu.name}, random weights, one "
        f"short prompt: {there}.",
        note=f"{settings['model']}, {settings['tokens']} tokens a run, page cache warm; hits here: "
        f"{told}; " + charts.recorded_note(gpu.machine),
        ceilings=[(resident, "resident")],
    )


def together_lines(timed: Timed, gpu: Recorded, tokens: Sequence[int]) -> go.Figure:
    """Microseconds a token when several tokens share one gather, sorted by expert or not."""
    orders = ("as they come", "sorted")
    series = {
        o: (list(tokens), [timed.samples[f"{t} {o}"] * 1e6 / t for t in tokens]) for o in orders
    }
    us = {o: [float(np.median(r)) for r in rows] for o, (_, rows) in series.items()}
    alone, last = min(us[o][0] for o in orders), min(us[o][-1] for o in orders)
    told = ", ".join(f"{o} {v[-1]:.0f} us" for o, v in us.items())
    there = ", ".join(
        f"{o} {gpu.together.median_s(f'{tokens[-1]} {o}') * 1e6 / tokens[-1]:.0f} us"
        for o in orders
    )
    there_alone = gpu.together.median_s(f"1 {orders[0]}") * 1e6
    return charts.lines(
        series,
        f"A token is {alone / last:.2f} times as fast in a call of {tokens[-1]} as alone",
        "tokens at once (T)",
        "us a token, experts of one layer",
        f"At {tokens[-1]} tokens: {told} a token; alone {us[orders[0]][0]:.0f} us. "
        f"{gpu.name}, 35B-A3B's shape: {there}; alone {there_alone:.0f} us.",
        note=f"D={timed.config['D']}, F={timed.config['F']}, {timed.config['E']} resident experts; "
        + charts.recorded_note(gpu.machine),
    )


def prompt_bars(varied: Variation, model: str) -> go.Figure:
    """Speed and hits of each prompt."""
    hits = {f"prompt {p + 1}": [100 * h] for p, h in varied.hit_rate.items()}
    values = [h for (h,) in hits.values()]
    return charts.bars(
        {"tok/s": {f"prompt {p + 1}": s for p, s in varied.tok_s.items()}, "hit rate (%)": hits},
        f"{varied.between:.0%} between the slowest and the fastest prompt, {varied.within:.0%} "
        "between runs of the same",
        "",
        f"Hit rates go from {min(values):.0f}% to {max(values):.0f}% with the prompt.",
        note=f"{model}, fused, 16 slots",
    )


def memory_lines(memory: dict[str, Any], gpu: Recorded, model: str) -> go.Figure:
    """MLX's memory over one long run.

    Args:
        memory (dict): Of ``memory.measure``.
        gpu (Recorded): The recorded run.
        model (str): The model's name.
    """
    at, predicted = memory["tokens"], memory["predicted_nbytes"] / 1e6
    held, peak = ([m / 1e6 for m in memory[k]] for k in ("active_nbytes", "peak_nbytes"))
    there = gpu.memory
    return charts.lines(
        {
            "MLX memory": (at, [[m] for m in held]),
            "its peak since the last point": (at, [[m] for m in peak]),
        },
        f"From token {at[1]} to token {at[-1]}: {growth_nbytes(memory) / 1e6:+.1f} MB",
        "tokens decoded",
        "MB",
        f"{held[-1]:.1f} MB are held after {at[-1]} tokens; the model alone was predicted to take "
        f"{predicted:.1f}. {gpu.name}, 64 slots: {there['active_nbytes'][-1] / 1e6:.0f} MB after "
        f"{there['tokens'][-1]} tokens, {growth_nbytes(there) / 1e6:+.1f} since token "
        f"{there['tokens'][1]}, {there['predicted_nbytes'] / 1e6:.0f} predicted.",
        note=f"{model}, fused, 16 slots, one run; {charts.recorded_note(gpu.machine)}",
        log_x=False,
        ceilings=[(predicted, "predicted")],
    )


@dataclass(frozen=True)
class Results:
    """What notebook 02 measured, for its verdicts.

    Attributes:
        ladder (DataFrame): Of ``measure``.
        reads (DataFrame): Of ``reads.bench_reads``, cold.
        swept (DataFrame): Of ``sweep``.
        prompt (PromptReads): Of ``prompt_reads``.
        varied (Variation): Of ``measure_prompts``.
        memory (dict): Of ``memory.measure``.
    """

    ladder: "DataFrame"
    reads: "DataFrame"
    swept: "DataFrame"
    prompt: PromptReads
    varied: Variation
    memory: dict[str, Any]


def verdicts(gpu: Recorded, here: Results, slots: int, experts: int) -> list[charts.Verdict]:
    """The verdicts of notebook 02, for ``charts.verdicts``.

    Args:
        gpu (Recorded): The recorded run.
        here (Results): Measured on this machine.
        slots (int): The number of slots to speak of.
        experts (int): E of the model that ``here.swept`` ran.
    """
    device, sources = gpu.machine["gpu"].removeprefix("NVIDIA "), _sources(here.ladder, gpu)
    climbs = {label: multiples(r) for label, r in sources.items()}
    top, share = ([f(r) for r in sources.values()] for f in (_top, waiting_share))
    single = {
        "here": one_reader_share(records.reads_GBs(here.reads)["moelab"]),
        f"the {device}'s host": one_reader_share(gpu.reads),
    }
    steps = "; ".join(
        f"{label}: " + ", ".join(f"{r} {v:.1f}x" for r, v in c.items() if r != "serial")
        for label, c in climbs.items()
    )
    return [
        (
            "A1",
            "streaming rewritten: 8.5 times faster at the full top-k, more with fewer experts",
            "depends on",
            f"what arithmetic leaves to gain: {top[1]:.1f}x on the {device} warm, {top[2]:.1f}x "
            f"cold, {top[0]:.1f}x on this machine (fewer experts: notebook 05)",
        ),
        (
            "A2",
            "one read at a time uses about 5% of the SSD",
            "refuted" if min(single.values()) > 0.15 else "confirmed",
            "one at a time reaches "
            + " and ".join(f"{v:.0%} ({n})" for n, v in single.items())
            + " of the best rate; more in flight do help",
        ),
        (
            "A3",
            "each rung helps: batching, concurrent reads, persistent buffers",
            "depends on",
            steps,
        ),
        (
            "A5",
            "compute is the bottleneck at steady state, not I/O",
            "depends on",
            f"the device: {share[0]:.0%} of a token waits for reads here, {share[1]:.0%} on the "
            f"{device} warm, {share[2]:.0%} cold",
        ),
        (
            "A10",
            "resident memory stays flat",
            "confirmed",
            "caches included: "
            + ", ".join(
                f"{growth_nbytes(m) / 1e6:+.1f} MB over {m['tokens'][-1]} tokens {where}"
                for where, m in (("here", here.memory), (f"on the {device}", gpu.memory))
            ),
        ),
        (
            "B4",
            "16 slots are a good default; at least top-k are needed",
            "depends on",
            f"the experts: {slots} of {experts} slots hit "
            f"{values(here.swept, f'{slots} slots', 'hit_rate').mean():.0%} in "
            f"{here.swept.attrs['settings']['model']}; 64 of 256 hit "
            f"{values(gpu.warm, 'fused', 'hit_rate').mean():.0%} with uniform routing",
        ),
        (
            "B5",
            "the stacked path is for single-token decode; prompts take another",
            "refuted",
            "prompts go through the same slots in waves, each expert read once "
            f"({here.prompt.read} reads for {here.prompt.uses} uses)",
        ),
        (
            "B6",
            "results vary by about 5% between prompts because routing does",
            "depends on",
            f"noise and length, not hits: {here.varied.between:.0%} between prompts, "
            f"{here.varied.within:.0%} between runs of the same",
        ),
    ]


def _top(measured):
    return multiples(measured)[TOP]


def dial(
    path: str | Path, tokens: int, prompt: str = PROMPTS[0], warmup: int = 8
) -> Callable[[int, int, int, str], go.Figure]:
    """The function behind notebook 02's controls: it decodes, resident and streamed.

    Args:
        path (str or Path): A model folder.
        tokens (int): Timed in each run.
        prompt (str): The text to continue.
        warmup (int): Tokens before the clock starts.

    Returns:
        Callable: From top-k, slots, readers and the state of the page cache to a figure of what a
        token is made of.
    """
    full = footprint(path, StreamConfig()).top_k

    def look(top_k: int, slots: int, readers: int, cache: str):
        resident = decode_once(path, StreamConfig(mode="resident"), prompt, tokens, warmup)
        config = StreamConfig(slots=slots, readers=readers)
        if top_k != full:
            config = replace(config, top_k=top_k)
        drop = (lambda: oscache.drop_pages(path)) if cache == "cold" else None
        streamed = decode_once(path, config, prompt, tokens, warmup, drop)
        c = streamed.counters
        resident_s, streamed_s = (r.decode_s / tokens for r in (resident, streamed))
        wait_s = min(c.wait_s / tokens, streamed_s)
        same, num = same_tokens(streamed.tokens, resident.tokens), len(resident.tokens)
        lossy = "" if top_k == full else f" (top-{top_k} in place of {full} is lossy)"
        return charts.parts(
            {
                "": {
                    "resident": {WAITING: 0.0, REST: resident_s},
                    "streamed": {WAITING: wait_s, REST: streamed_s - wait_s},
                }
            },
            f"Top-{top_k}, {slots} slots, {readers} readers, {cache}: {1 / streamed_s:.1f} tok/s, "
            f"{resident_s / streamed_s:.2f} of resident",
            f"{c.hit_rate:.0%} of the experts were in a slot, {c.bytes_per_token / 1e6:.2f} "
            f"MB read for a token; {same} of {num} tokens are the resident model's{lossy}.",
            note=f"{Path(path).name}, one run of {tokens} tokens each after {warmup} of warm-up",
        )

    return look
