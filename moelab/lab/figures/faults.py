"""Notebook 08: acceptance with each fault, by block size and by prompt."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from ...speculation.dflash import DFlashDraft
from .. import machine
from ..experiments.faults import (
    BLOCK,
    RIGHT,
    SWIFTLM,
    Fault,
    FaultsRecord,
    Training,
    Trial,
    speedup,
    target,
    trial,
)
from ..plots import charts, style


def faults_chart(here: FaultsRecord, recorded: FaultsRecord) -> go.Figure:
    """Tau of each fault, measured now and recorded."""
    alone = {n: r.tau for n, r in recorded.results.items() if "+" not in n}
    worst = min(alone, key=alone.get)
    return charts.bars(
        {
            f"{where}, {r.prompts * r.rounds} rounds each": {
                name: [t.low, t.tau, t.high] for name, t in r.results.items()
            }
            for where, r in (("now", here), ("recorded", recorded))
        },
        f"Recorded tau: {alone[RIGHT]:.2f} with nothing wrong, {alone[worst]:.2f} with '{worst}'",
        "tau, tokens committed in a round",
        f"SwiftLM's three faults together: tau {recorded.results[SWIFTLM].tau:.2f} recorded, "
        f"{here.results[SWIFTLM].tau:.2f} now. Whiskers reach half way to the 95% interval.",
        note=f"tiny-moe, float32, block {BLOCK}, temperature 0; prompts of {here.prompt} tokens: "
        f"{here.prompts} now, {recorded.prompts} recorded "
        f"({machine.card_line(recorded.machine)})",
    )


def histogram_chart(
    results: Mapping[str, Trial], title: str, note: str, card: dict | str | None = None
) -> go.Figure:
    """Shares of the rounds by accepted drafts, one line for each result.

    Args:
        results (Mapping[str, Trial]): Or ``Acceptance``, by name.
        title (str): What was found, short.
        note (str): What qualifies the numbers.
        card (dict or str): The machine of recorded ones. Default: this machine, now.
    """
    none = ", ".join(f"{name} {100 * r.share(0):.0f}%" for name, r in results.items())
    every = ", ".join(
        f"{name} {100 * r.share(len(r.histogram) - 1):.0f}%" for name, r in results.items()
    )
    fig = style.figure(title, "drafts accepted in a round", "% of the rounds", note, card)
    for i, (name, r) in enumerate(results.items()):
        share = [100 * r.share(n) for n in range(len(r.histogram))]
        fig.add_scatter(
            x=list(range(len(share))), y=share, name=f"{name} (tau {r.tau:.2f})", **style.look(i)
        )
    fig.update_xaxes(zeroline=False)
    return style.describe(
        fig,
        alt=f"Lines of the share of rounds. None accepted: {none}. All accepted: {every}.",
        finding=f"Rounds that accept none: {none}.",
    )


def fault_histogram(record: FaultsRecord) -> go.Figure:
    """``histogram_chart`` of the faults in SwiftLM's report."""
    names = [RIGHT, "rejected tokens left in the state", "features off by one layer", "top-k 6"]
    right, swiftlm = record.results[RIGHT], record.results[SWIFTLM]
    return histogram_chart(
        {name: record.results[name] for name in (*names, SWIFTLM)},
        f"Rounds that accept 0 or 1 draft: {right.share(0, 1):.0%} with nothing wrong, "
        f"{swiftlm.share(0, 1):.0%} with SwiftLM's faults together",
        f"tiny-moe, {record.prompts} prompts of {record.prompt} tokens, {record.rounds} rounds "
        "each",
        card=record.machine,
    )


def tau_chart(trials: Mapping[int, Trial], x: str, note: str) -> go.Figure:
    """Tau over a number: the block size, or the prompt's tokens."""
    told = ", ".join(f"{t.tau:.2f} at {n}" for n, t in trials.items())
    return charts.lines(
        {"tau": (list(trials), [[t.low, t.tau, t.high] for t in trials.values()])},
        f"Tau by {x}: {told}",
        x,
        "tau, tokens committed in a round",
        f"From {min(trials)} to {max(trials)}, tau changes by "
        f"{trials[max(trials)].tau - trials[min(trials)].tau:+.2f}.",
        note=f"{note}; whiskers reach half way to the 95% interval",
    )


def speed_chart(
    trials: Mapping[int, Trial], plain: Mapping[int, Sequence[float]], x: str, note: str
) -> go.Figure:
    """Speed over not drafting, over a number.

    Args:
        trials (Mapping[int, Trial]): By block size, or by tokens of the prompt.
        plain (Mapping[int, Sequence[float]]): Tokens per second without a draft, by the same.
        x (str): What the numbers are.
        note (str): What qualifies them.
    """
    ratios = {n: speedup(t, plain[n]) for n, t in trials.items()}
    medians = {n: float(np.median(r)) for n, r in ratios.items()}
    best = max(medians, key=medians.get)
    told = ", ".join(f"{v:.2f} at {n}" for n, v in medians.items())
    return charts.lines(
        {"speed over not drafting": (list(ratios), list(ratios.values()))},
        f"Speed over not drafting by {x}: {told}",
        x,
        "speed over not drafting",
        f"Fastest at {best}: {medians[best]:.2f} times the speed of not drafting.",
        note=f"{note}, resident; {np.median(plain[best]):.0f} tok/s without a draft at {best}",
        ceilings=[(1.0, "not drafting")],
    )


CANDIDATES = {
    "dflash2": "2 layers",
    "dflash3": "3 layers",
    "dflash4": "4 layers",
    "dflash4late": "4 layers, later features",
}


def training_chart(training: Training) -> go.Figure:
    """Tau on held-out code over the training steps, one line for each depth of draft."""
    steps = list(training.steps)
    final = ", ".join(
        f"{training.final[d]['code_256'].tau:.2f} with {d[-1]} layers"
        for d in ("dflash2", "dflash3", "dflash4")
    )
    return charts.lines(
        {
            label: (steps, [[training.steps[n][name]["code_256"].tau] for n in steps])
            for name, label in CANDIDATES.items()
        },
        f"Tau on held-out code: {final}",
        "training steps",
        "tau, tokens committed in a round",
        "Both depth and training still help at their ends; the paper's plateau past three layers "
        "is not seen at this size.",
        note=f"recorded: {training.texts['code_256']} prompts, 320 tokens each, bfloat16, "
        "temperature 0; one training run each",
        card=training.card,
    )


def draft_histogram(training: Training) -> go.Figure:
    """``histogram_chart`` of the shipped draft, and of an autoregressive one beside it."""
    final = training.final
    code, autoregressive = final["dflash4"]["code_256"], final["draft3"]["code_256"]
    last = len(code.histogram) - 1
    return histogram_chart(
        {
            "code": code,
            "docstrings": final["dflash4"]["prose_256"],
            "autoregressive draft, code": autoregressive,
        },
        f"All {last} drafts accepted on code: in {code.share(last):.0%} of the rounds, by an "
        f"autoregressive draft in {autoregressive.share(last):.0%}",
        "recorded: bfloat16, temperature 0; in the first 100 tokens of a text tau is "
        f"{code.tau_first_100:.2f} on code and "
        f"{final['dflash4']['prose_256'].tau_first_100:.2f} in docstrings",
        card=training.card,
    )


def dial(
    path: Path, draft: DFlashDraft, prompts: Sequence[list[int]], num_rounds: int
) -> Callable[..., go.Figure]:
    """The function behind the sliders of notebook 08, which measures at each call.

    Args:
        path (Path): The target's folder.
        draft (DFlashDraft): Its draft.
        prompts (Sequence[list[int]]): Token ids.
        num_rounds (int): Rounds behind each.

    Returns:
        Callable: From block size, top-k and the two faults to a histogram.
    """
    models = {}

    def look(block: int, top_k: int, rollback: str, features: str) -> go.Figure:
        if top_k not in models:
            models.clear()
            models[top_k] = target(path, Fault(top_k=top_k))
        fault = Fault(rollback, int(features == "off by one"))
        found = trial(models[top_k], draft, prompts, num_rounds, block - 1, fault)
        name = f"block {block}, top-k {top_k}, rollback {rollback}, features {features}"
        note = f"measured just now: {len(prompts)} prompts, {num_rounds} rounds each"
        title = f"Tau {found.tau:.2f} of at most {block}"
        return histogram_chart({name: found}, title, note)

    return look


def verdicts(
    recorded: FaultsRecord,
    blocks: Mapping[int, Trial],
    block_plain: Mapping[int, Sequence[float]],
    lengths: Mapping[int, Trial],
    length_plain: Mapping[int, Sequence[float]],
) -> list[charts.Verdict]:
    """The rows of notebook 08's table.

    Args:
        recorded (FaultsRecord): With more rounds than the notebook's.
        blocks (Mapping[int, Trial]): By block size.
        block_plain (Mapping[int, Sequence[float]]): Tokens per second without a draft, by the same.
        lengths (Mapping[int, Trial]): By tokens of the prompt.
        length_plain (Mapping[int, Sequence[float]]): As ``block_plain``.
    """
    tau = {name: trial.tau for name, trial in recorded.results.items()}
    right, swiftlm = tau[RIGHT], tau[SWIFTLM]
    ratios = {b: np.median(speedup(t, block_plain[b])) for b, t in blocks.items()}
    best, small, large = max(ratios, key=ratios.get), min(blocks), max(blocks)
    by_length = ", ".join(f"{t.tau:.2f} at {n}" for n, t in lengths.items())
    speeds = ", ".join(
        f"{np.median(speedup(t, length_plain[n])):.2f} at {n}" for n, t in lengths.items()
    )
    return [
        (
            "D1",
            "DFlash on a streamed hybrid accepts 0 or 1 of 16",
            "depends on",
            f"not with exact rollback and the right features: tau {right:.2f} of {BLOCK} here; "
            f"with SwiftLM's faults together {swiftlm:.2f}, and "
            f"{recorded.results[SWIFTLM].share(0):.0%} of the rounds accept nothing",
        ),
        (
            "D2",
            "because the draft mismatches the target's routing or weights",
            "refuted" if tau["top-k 6"] > (right + swiftlm) / 2 else "depends on",
            f"top-k 6 in place of 8: tau {tau['top-k 6']:.2f}; top-k 4: {tau['top-k 4']:.2f}; "
            f"2: {tau['top-k 2']:.2f}; 3-bit weights {tau['3-bit target']:.2f}, 2-bit "
            f"{tau['2-bit target']:.2f}; with nothing wrong {right:.2f}",
        ),
        (
            "D3",
            "because streaming fans a verify pass out",
            "refuted",
            "what is read does not change what is accepted: streamed logits are the resident "
            "ones bit for bit; what it costs is notebook 07",
        ),
        (
            "D4",
            "because rejected tokens stay in the recurrent state, or features are off by a layer",
            "depends on",
            f"left in the state: tau {tau['rejected tokens left in the state']:.2f}; restored "
            f"only: {tau['state restored, accepted not replayed']:.2f}; off by one layer: "
            f"{tau['features off by one layer']:.2f}; all with top-k 6: {swiftlm:.2f}",
        ),
        (
            "D5",
            "a smaller block would change the picture",
            "depends on",
            f"not acceptance: tau {blocks[small].tau:.2f} at block {small}, "
            f"{blocks[large].tau:.2f} at {large}; speed, yes: best at block {best} on this machine",
        ),
        (
            "D6",
            "parity on short prompts, slower on medium ones, a crash on long ones",
            "refuted",
            f"no crash; tau {by_length}; speed over not drafting {speeds}",
        ),
        (
            "E5",
            "best block size: 16, or 5 to 6 for an MoE",
            "depends on",
            f"what a position costs: block {best} here, where a verify pass over {large} positions "
            f"takes {np.median(blocks[large].verify_s) * 1e3:.0f} ms and a token "
            f"{1e3 / np.median(block_plain[large]):.0f} ms",
        ),
    ]
