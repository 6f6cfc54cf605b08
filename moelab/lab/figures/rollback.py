"""Notebook 06: what stays wrong without rollback, and what each strategy takes."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from ...speculation.rollback import STATES_NBYTES
from ..experiments.rollback import SHAPES, STRATEGIES, Cost, Drift, FirstWrong
from ..plots import charts


def drift_chart(drift: Drift, model: str) -> go.Figure:
    """Distance of the recurrent states over the rounds, one line for each remedy."""
    rounds = range(1, len(drift.accepted) + 1)
    first = ", ".join(f"{name} {100 * d[0]:.3g}%" for name, d in drift.distance.items())
    changes = ", ".join(f"{name} {np.mean(p):.2f}" for name, p in drift.probability.items())
    lines = {**drift.distance, "prompt read backwards": [drift.backwards] * len(rounds)}
    return charts.lines(
        {name: (list(rounds), [[100 * x] for x in d]) for name, d in lines.items()},
        f"Distance of the states after round 1: {first}",
        "rounds of speculation",
        "distance of the states (% of their norm)",
        f"Largest change of a next token's probability, mean over the rounds: {changes}.",
        note=f"{model}, {drift.drafted} drafts a round, 0 to {drift.drafted} right, one run",
        log_x=False,
    )


def first_wrong_chart(found: FirstWrong, model: str) -> go.Figure:
    """Tokens written before the first wrong one, one bar for each remedy."""
    right = ", ".join(f"{name} {n}" for name, n in found.right.items())
    return charts.bars(
        {"": {name: [n] for name, n in found.right.items()}},
        f"Correct greedy tokens, of {found.tokens}: {right}",
        "tokens before the first wrong one",
        "A rollback that is nearly right does not write nearly the same text.",
        note=f"{model}, {found.drafted} drafts a round, {found.accepted} of them right",
    )


def time_chart(costs: Sequence[Cost], model: str) -> go.Figure:
    """Time of pass and rollback over the positions of the pass, in passes alone."""
    most = max(costs, key=lambda c: c.positions)
    extra = ", ".join(f"{s} {np.median(most.overhead(s)):+.0f}%" for s in STRATEGIES)
    ms = ", ".join(f"{s} {np.median(most.strategy_s[s]) * 1e3:.0f}" for s in STRATEGIES)
    positions = [c.positions for c in costs]
    return charts.lines(
        {s: (positions, [1 + c.overhead(s) / 100 for c in costs]) for s in STRATEGIES},
        f"Taking back {most.positions - most.keep} of {most.positions} positions: {extra}",
        "positions in the pass",
        "time of pass and rollback, in passes",
        f"Milliseconds of pass and rollback, {most.positions} positions: {ms}; "
        f"the pass alone {np.median(most.pass_s) * 1e3:.0f}.",
        note=f"{model}, resident, half of the tokens stay, strategies in random order, "
        f"n={len(most.pass_s)}, 1 warm-up",
        log_x=False,
        ceilings=[(1.0, "the pass alone")],
    )


def memory_chart(costs: Sequence[Cost], model: str) -> go.Figure:
    """Megabytes held between pass and rollback, over the positions of the pass."""
    most = max(costs, key=lambda c: c.positions)
    held = ", ".join(f"{s} {most.nbytes[s] / 1e6:.1f} MB" for s in STRATEGIES)
    positions = [c.positions for c in costs]
    return charts.lines(
        {s: (positions, [[c.nbytes[s] / 1e6] for c in costs]) for s in STRATEGIES},
        f"Held for {most.positions} positions: {held}",
        "positions in the pass",
        "MB held",
        "The default on this device keeps states while those of a pass take no more than "
        f"{STATES_NBYTES / 2**20:.0f} MiB, and replays beyond.",
        note=f"{model}, arrays held between pass and rollback",
        log_x=False,
    )


def bytes_read_chart(read: dict[str, int], positions: int, keep: int, model: str) -> go.Figure:
    """Megabytes of experts that each strategy reads again."""
    mb = ", ".join(f"{s} {n / 1e6:.2f} MB" for s, n in read.items())
    return charts.bars(
        {"": {s: [n / 1e6] for s, n in read.items()}},
        f"Experts read to take back {positions - keep} of {positions} tokens: {mb}",
        "MB of experts read",
        "Restoring runs the accepted tokens through the model again; the others route nothing.",
        note=f"{model}, streamed, counted, not timed",
    )


def memory_dial(model: str, positions: int) -> go.Figure:
    """The function behind the sliders of notebook 06: bytes that each strategy would hold.

    Args:
        model (str): Of ``SHAPES``.
        positions (int): In a pass.
    """
    shape, held = SHAPES[model], SHAPES[model].nbytes(positions)
    return charts.bars(
        {"": {strategy: [n / 1e6] for strategy, n in held.items()}},
        f"{positions} positions: states hold {held['states'] / 1e6:.0f} MB, "
        f"replay {held['replay'] / 1e6:.0f} MB",
        "MB held to take tokens back",
        f"Keeping every state takes {held['states'] / held['replay']:.1f} times the memory of "
        "replaying.",
        note=f"{model}: {shape.layers} GatedDeltaNet layers, a state of "
        f"{held['restore'] / 1e6:.1f} MB; arithmetic, not a measurement",
        digits=4,
        card="",
    )
