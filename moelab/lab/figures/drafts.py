"""Notebook 07: what a pass over several positions costs, and what drafts commit and gain."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ...streaming.trace import Trace
from .. import timing
from ..experiments.drafts import PLAIN, POLICY, Comparison, DraftsRecord
from ..experiments.verify import (
    Passes,
    PassParts,
    Union,
    break_even,
    growth,
    pass_ms,
    reads,
    uniform_union,
)
from ..plots import charts, style

AS_HERE, FREE = "as here", "free"
LONGEST = 16  # drafts in the dial's figure


# Passes


def union_chart(union: Union, note: str) -> go.Figure:
    """Distinct experts over the tokens in a row, routed and uniform."""
    m, K, mean = union.most, union.top_k, union.mean(union.most)
    xs = list(union.layers)
    return charts.lines(
        {
            "text of this model": (xs, list(union.layers.values())),
            "independent and uniform": (xs, [[v] for v in union.uniform.values()]),
        },
        f"{m} tokens need {mean:.0f} of {union.num_experts} experts, {mean / K:.1f} times one "
        f"token's; uniform routing would need {union.uniform[m]:.0f}",
        "tokens in a row (m)",
        "distinct experts of a layer",
        f"Each of {m} positions adds {(mean - K) / (m - 1):.1f} experts to the first one's {K}.",
        note=f"{note}; whiskers: quartiles over the layers",
        ceilings=[(union.num_experts, "all experts")],
    )


def passes_chart(timed: Mapping[str, Passes], note: str, card: dict | None = None) -> go.Figure:
    """Milliseconds a pass over its positions, one line for each model.

    Args:
        timed (Mapping[str, Passes]): By the model's name.
        note (str): What qualifies the numbers.
        card (dict): The machine of recorded ones. Default: this machine, now.
    """
    ms = {name: pass_ms(passes) for name, passes in timed.items()}
    most = max(m for by_m in ms.values() for m in by_m)
    grown = "; ".join(f"{name} {growth(passes):.1f}" for name, passes in timed.items())
    each = "; ".join(
        f"{name} {np.median(by_m[1]):.1f} at 1 and {np.median(by_m[most]) / most:.1f} at {most}"
        for name, by_m in ms.items()
    )
    samples = min(len(s) for by_m in ms.values() for s in by_m.values())
    return charts.lines(
        {name: (list(by_m), list(by_m.values())) for name, by_m in ms.items()},
        f"A pass over {most} positions, in passes over one: {grown}",
        "positions in the pass (m)",
        "ms a pass",
        f"Milliseconds for each position: {each}.",
        note=f"{note}, page cache warm, n={samples}, m in random order, 1 warm-up",
        card=card,
    )


def reads_chart(passes: Passes, num_layers: int, note: str) -> go.Figure:
    """Experts read in a layer by a streamed pass, over its positions.

    Args:
        passes (Passes): Of a streamed model.
        num_layers (int): L.
        note (str): What qualifies the numbers.
    """
    waits = ", ".join(
        f"{np.median([p.wait_s / p.pass_s for p in samples]):.0%} at {m}"
        for m, samples in passes.items()
    )
    most = max(passes)
    experts = {m: [p.misses / num_layers for p in samples] for m, samples in passes.items()}
    return charts.lines(
        {"read": (list(experts), list(experts.values()))},
        f"{most} positions read {np.median(experts[most]):.0f} experts in a layer, "
        f"one reads {np.median(experts[1]):.1f}",
        "positions in the pass (m)",
        "experts read in a layer",
        f"Share of the pass spent waiting for reads: {waits}.",
        note=f"{note}, page cache warm, n={len(passes[most])}",
    )


def reads_table(trace: Trace, slots: int, positions: Sequence[int]) -> str:
    """Experts read in a layer by the trace, and as uniform routing would need them."""
    _, L, K = trace.experts.shape
    E, by_trace = trace.num_experts, reads(trace, slots)
    lines = [f"experts read in a layer with {slots} slots:"]
    for m in positions:
        uniform = uniform_union(E, K, m) * (1 - min(slots, E) / E)
        lines.append(f"m = {m:2d}: {by_trace(m) / L:4.1f} by the trace, {uniform:4.1f} uniform")
    return "\n".join(lines)


# Drafts


def break_even_chart(
    committed: Mapping[str, list[int]], passes: Passes, drafts: int, note: str
) -> go.Figure:
    """Tokens that a round commits, for each draft, against what it must commit to pay.

    Args:
        committed (Mapping[str, list[int]]): Of ``committed``.
        passes (Passes): Of the streamed target.
        drafts (int): In each round.
        note (str): What qualifies the numbers.
    """
    need = break_even(passes)
    at = min(need, key=lambda m: abs(m - drafts - 1))
    tau = {name: float(np.mean(n)) for name, n in committed.items()}
    best = max(tau, key=tau.get)
    told = ", ".join(f"{v:.1f} at {m}" for m, v in need.items())
    return charts.bars(
        {"": {name: [t] for name, t in tau.items()}},
        f"A round of {at} positions must commit {need[at]:.1f} tokens to pay; "
        f"the best draft here, {best}, commits {tau[best]:.1f}",
        "tau, tokens committed in a round",
        f"Break-even by positions: {told}, drafts not counted.",
        note=f"{note}, greedy, up to {drafts} drafts a round",
        marks=[(0, need[at], f"break-even at {at} positions, streamed")],
    )


def speeds_chart(
    compared: Mapping[str, Comparison], note: str, card: dict | None = None
) -> go.Figure:
    """Speed over not drafting, a panel for each comparison, a bar for each number of drafts.

    Args:
        compared (Mapping[str, Comparison]): By name.
        note (str): What qualifies the numbers.
        card (dict): The machine of recorded ones. Default: this machine, now.
    """
    medians = {name: _medians(c) for name, c in compared.items()}
    policy = [m["policy"] for m in medians.values()]
    fixed = [v for m in medians.values() for k, v in m.items() if k != "policy"]
    best = {name: max(m, key=m.get) for name, m in medians.items()}
    told = "; ".join(
        f"{name}: {b}, {medians[name][b]:.2f}{_equal(compared[name], b)}"
        for name, b in best.items()
    )
    n = ", ".join(dict.fromkeys(str(c.runs) for c in compared.values()))
    return charts.bars(
        {name: c.speeds() for name, c in compared.items()},
        f"Speed over not drafting: the policy {_span(policy)}, fixed lengths {_span(fixed)}",
        "speed over not drafting",
        f"Fastest of each: {told}.",
        note=f"{note}, page cache warm, greedy, n={n}",
        marks=[(i, 1.0, "") for i in range(len(compared))],
        card=card,
    )


def _span(values):
    low, high = (f"{v:.2f}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def speeds_table(compared: Mapping[str, Comparison]) -> str:
    """Speed over not drafting and texts equal to the undrafted one, for each comparison."""
    lines = []
    for name, c in compared.items():
        lines.append(f"{name}: largest tau {max(map(c.tau, c.variants)):.2f}")
        variants = [POLICY, *(n for n in c.variants if n not in (PLAIN, POLICY, "0"))]
        for variant, (label, ratios) in zip(variants, c.speeds().items()):
            equal = f"{c.equal_texts(variant)} of {c.runs} texts equal"
            lines.append(f"    {label:10} {timing.quartiles_text(ratios, form='.3f')}  {equal}")
    return "\n".join(lines)


def policy_table(compared: Mapping[str, Comparison]) -> str:
    """How much of each text the policy wrote in rounds with drafts, for each comparison."""
    lines = ["tokens from rounds with drafts, text by text, under the policy:"]
    for name, c in compared.items():
        shares = ", ".join(f"{share:.0%}" for share in c.drafted_share())
        lines.append(f"    {name:24} {shares}")
    return "\n".join(lines)


def gpu_details(now: DraftsRecord, planned: DraftsRecord, free: DraftsRecord) -> str:
    """What stood in the way on CUDA, from the records.

    Args:
        now (DraftsRecord): ``cuda_h200_engine.json``.
        planned (DraftsRecord): Of ``cuda_h200_drafts.json``, attention as MLX plans it.
        free (DraftsRecord): Of the same, with ``MLX_CUDA_USE_CUDNN_SDPA=0``.
    """
    positions, name = 3, "tiny-dflash, resident"
    plan, none = (np.median(r.comparisons[name].verify_ms()[positions]) for r in (planned, free))
    alone_ms = 1e3 / np.median(now.comparisons["tiny-draft, resident"].tok_s(PLAIN))
    return (
        f"Planning attention for each new length adds {plan - none:.0f} ms to a pass over "
        f"{positions} positions; resident, a token takes {alone_ms:.0f} ms (recorded on H200s)."
    )


def verdicts(
    union: Union,
    resident: Passes,
    streamed_reads: float,
    compared: Mapping[str, Comparison],
    trained: str,
    gpu: Comparison,
) -> list[charts.Verdict]:
    """The rows of notebook 07's table.

    Args:
        union (Union): Of the model's own text.
        resident (Passes): Of the resident model.
        streamed_reads (float): Experts of a layer that the largest streamed pass read.
        compared (Mapping[str, Comparison]): On this machine, by draft.
        trained (str): Which of them is a trained draft.
        gpu (Comparison): Recorded, streamed.
    """
    most, mean = union.most, union.mean(union.most)
    here = {name: _medians(c) for name, c in compared.items()}
    mine, there = here[trained], _medians(gpu)
    best = max(there, key=there.get)
    fastest = max(v for medians in here.values() for v in medians.values())
    pays = 1.1  # times the speed: less is taken for none
    return [
        (
            "A7",
            "speculation is counterproductive when streaming, because a pass reads the union of "
            "all positions' experts",
            "depends on",
            f"what a pass costs and how many drafts are right: a pass over {most} positions takes "
            f"{growth(resident):.1f} times one with no read at all, and the union of their experts "
            f"is {mean / union.top_k:.1f} times one token's, not {most}. Speed over not drafting, "
            f"streamed: here {_told(mine)}; on the recorded GPU {best} {there[best]:.2f}, policy "
            f"{there['policy']:.2f}{_equal(gpu, best, 'policy')}",
        ),
        (
            "D3",
            "a pass over 16 positions fans out to 136 expert reads a layer against 8",
            "depends on",
            f"overlap: {most} positions need {mean:.0f} distinct experts here, and each is read "
            f"once, {streamed_reads:.0f} of them from the file",
        ),
        (
            "D5",
            "a smaller block would change the picture",
            "depends on",
            f"the device: here {_told(mine)}; on the recorded GPU, streamed: {_told(there)}"
            f"{_equal(gpu, *there)}",
        ),
        (
            "E5",
            "the best block size is 16, or 5 to 6 for a Mixture of Experts",
            "refuted" if fastest < pays else "depends on",
            "the draft and the device: here "
            + ", ".join(f"{draft} is fastest with {max(m, key=m.get)}" for draft, m in here.items())
            + f"; on the recorded GPU it is {best}. A block of 16 is 15 drafts",
        ),
    ]


def _medians(comparison):
    return {k: float(np.median(v)) for k, v in comparison.speeds().items()}


def _told(medians):
    return ", ".join(f"{k} {v:.2f}" for k, v in medians.items())


def _equal(comparison, *speeds):
    """How many texts behind these speeds are the undrafted ones, where not all are."""
    variants = (POLICY if name == "policy" else name.partition(" ")[0] for name in speeds)
    counts = [comparison.equal_texts(variant) for variant in variants]
    if min(counts) == comparison.runs:
        return ""
    return f" ({', '.join(map(str, counts))} of {comparison.runs} texts equal)"


# Sliders


def dial(parts: PassParts, trace: Trace) -> Callable[..., go.Figure]:
    """The function behind the sliders of notebook 07: a model, not a measurement.

    A pass takes a fixed time, a time for each position and for each of its experts, and the reads
    of the experts that are not in slots. Drafts cost nothing.

    Args:
        parts (PassParts): The times.
        trace (Trace): Of decoded text, for ``reads``.

    Returns:
        Callable: From draft length, acceptance, slots, SSD rate (GB/s), top-k and arithmetic
        (``AS_HERE`` or ``FREE``) to a figure of the speed over not drafting.
    """
    K = trace.experts.shape[2]

    def look(
        length: int,
        accept: float,
        slots: int,
        GBs: float,
        top_k: int,
        arithmetic: str = AS_HERE,
    ) -> go.Figure:
        missing, read_s = reads(trace, slots, top_k), parts.expert_nbytes / (GBs * 1e9)
        position_s = parts.position_s + top_k * parts.expert_s if arithmetic == AS_HERE else 0.0
        drafts = np.arange(LONGEST + 1)
        pass_s = np.array(
            [parts.fixed_s + (n + 1) * position_s + missing(n + 1) * read_s for n in drafts]
        )
        ratios = {}
        for name, chance in {"as set": accept, "every draft right": 1.0}.items():
            tokens = np.cumsum(chance**drafts)
            ratios[name] = tokens * pass_s[0] / pass_s
        tau, need = np.cumsum(accept**drafts)[length], pass_s[length] / pass_s[0]
        own = ratios["as set"]
        estimated = f"; reads at top-{top_k} estimated from top-{K}" if top_k != K else ""
        fig = style.figure(
            f"{length} drafts, {accept:.0%} right: {own[length]:.2f} times the speed; "
            f"break-even at {need:.1f} tokens a round",
            "tokens drafted",
            "speed over not drafting",
            note="a model with this machine's times and a recorded trace; drafts cost nothing"
            + estimated,
        )
        for i, (name, ratio) in enumerate(ratios.items()):
            fig.add_scatter(x=drafts, y=ratio, name=name, mode="lines+markers", **style.look(i))
        style.ceiling(fig, 1, "not drafting", below=True)
        style.ceiling(fig, length, "as set", axis="x")
        fig.update_xaxes(range=[-0.5, LONGEST + 0.5], zeroline=False)
        told = ", ".join(f"{n}: {r:.2f}" for n, r in zip(drafts, own))
        return style.describe(
            fig,
            alt=f"Speed over not drafting by tokens drafted: {told}.",
            finding=f"A round commits {tau:.1f} tokens in the time of {need:.1f}; "
            f"the best length is {int(np.argmax(own))}.",
        )

    return look
