"""Notebook 08: why a draft gets nothing accepted, each fault switched on alone and together.

    python -m moelab bench-faults --json data/results/cpu_suspects.json

SwiftLM's issue 91 reports 0 or 1 accepted drafts of 16. The faults are the causes it suspects.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import plotly.graph_objects as go
from mlx_lm.models.cache import make_prompt_cache

from ... import DATA, StreamConfig, load
from ...arguments import add_json, add_number
from ...speculation.dflash import DFlashDraft
from ...speculation.sampling import num_accepted
from ...speculation.target import Capture
from .. import machine, records
from ..decode import decode
from ..plots import charts, style
from ..texts import heldout_prompts
from .rollback import REMEDIES

BLOCK = 16  # tokens of a DFlash block: the last accepted one and 15 drafts


@dataclass(frozen=True)
class Fault:
    """What is wrong with target or loop; the defaults are right.

    Attributes:
        rollback (str): Of ``rollback.REMEDIES``: what happens to rejected tokens.
        shift (int): The draft's features come from so many layers too far on.
        top_k (int): Experts per token. Default: the target's own.
        bits (int): The target's 4-bit weights are rounded again, to so many.
        dtype (str): Of activations. Default: the engine's choice.
    """

    rollback: str = "exact"
    shift: int = 0
    top_k: int | None = None
    bits: int | None = None
    dtype: str | None = None


RIGHT, SWIFTLM = "nothing wrong", "left + off by one + top-k 6"
FAULTS = {  # by the names in data/results/cpu_suspects.json
    RIGHT: Fault(),
    "rejected tokens left in the state": Fault(rollback="stale state"),
    "state restored, accepted not replayed": Fault(rollback="restore only"),
    "features off by one layer": Fault(shift=1),
    "top-k 6": Fault(top_k=6),
    "top-k 4": Fault(top_k=4),
    "top-k 2": Fault(top_k=2),
    "3-bit target": Fault(bits=3),
    "2-bit target": Fault(bits=2),
    SWIFTLM: Fault("stale state", 1, 6),
    "restored + off by one + top-k 6": Fault("restore only", 1, 6),
}
# float16 is several times slower still on a CPU.
HALF = {"float32": Fault(), "bfloat16": Fault(dtype="bfloat16")}


@dataclass(frozen=True)
class Trial:
    """Rounds of draft and verify behind several prompts.

    Attributes:
        tau (float): Tokens committed in a round, mean over the prompts.
        low (float): Of tau's 95% interval over the prompts.
        high (float): Of the same.
        histogram (list[int]): Rounds with 0, 1, ... accepted drafts.
        tok_s (list[float]): Tokens per second of the loop, for each prompt.
        draft_s (list[float]): Seconds to draft, for each round.
        verify_s (list[float]): Seconds of the target's pass and rollback, for each round.
    """

    tau: float
    low: float
    high: float
    histogram: list[int]
    tok_s: list[float]
    draft_s: list[float]
    verify_s: list[float]

    def share(self, *accepted: int) -> float:
        """The share of the rounds that accept one of these numbers of drafts."""
        return sum(self.histogram[n] for n in accepted) / max(sum(self.histogram), 1)


@dataclass(frozen=True)
class FaultsRecord:
    """A trial of each fault.

    Attributes:
        prompts (int): Prompts behind each.
        rounds (int): Rounds behind each prompt.
        results (dict): ``{fault: Trial}``.
        machine (dict): As ``machine.card`` gives it; empty: this machine, now.
        text (str): Of the prompts: ``code`` or ``prose``.
        prompt (int): Tokens of each.
    """

    prompts: int
    rounds: int
    results: dict[str, Trial]
    machine: dict
    text: str = "code"
    prompt: int = 64

    @classmethod
    def from_json(cls, record: dict) -> "FaultsRecord":
        """Of what ``bench-faults`` kept."""
        results = {name: Trial(**trial) for name, trial in record["results"].items()}
        fields = (record[k] for k in ("prompts", "rounds"))
        return cls(*fields, results, record["machine"], record["text"], record["prompt"])

    def to_json(self) -> dict:
        """What ``bench-faults`` keeps."""
        # Version 0.1.0 called faults suspects; records keep that name.
        return {"kind": "suspects", **asdict(self)}


def target(path: Path, fault: Fault = Fault()) -> nn.Module:
    """The target, resident, with the faults that it has itself: top-k, bits, dtype."""
    model, _ = load(path, StreamConfig(mode="resident", top_k=fault.top_k))
    if fault.bits:
        for _, m in model.named_modules():
            if getattr(m, "bits", None) == 4:
                w = mx.dequantize(m.weight, m.scales, m.biases, m.group_size, 4)
                m.weight, m.scales, m.biases = mx.quantize(w, m.group_size, fault.bits)
                m.bits = fault.bits
    if fault.dtype:
        model.set_dtype(getattr(mx, fault.dtype))
    return model


def rounds(
    model: nn.Module,
    draft: DFlashDraft,
    ids: list[int],
    num_rounds: int,
    drafted: int,
    fault: Fault = Fault(),
) -> list[tuple[int, float, float]]:
    """Speculate greedily behind one prompt, with the fault's rollback and features.

    Args:
        model (nn.Module): The target, from ``target``.
        draft (DFlashDraft): Its draft.
        ids (list[int]): The prompt.
        num_rounds (int): Rounds.
        drafted (int): Tokens drafted in each.
        fault (Fault): Default: none.

    Returns:
        list[tuple[int, float, float]]: Accepted drafts, the draft's and the target's seconds of
        each round.
    """
    cache, layers, out = make_prompt_cache(model), [i + fault.shift for i in draft.layer_ids], []
    draft.bind(model)
    with Capture(model, layers) as seen:
        mx.eval(model(mx.array([ids[:-1]]), cache=cache), seen.features)
    draft.extend(mx.array(ids[:-1]), seen.features[0])
    draft.propose(0, 0, None)
    rollback, last = REMEDIES[fault.rollback](model, cache), ids[-1]
    for _ in range(num_rounds):
        begin = time.perf_counter()
        guesses = draft.propose(last, drafted, lambda logits: mx.argmax(logits, axis=-1)).tolist()
        middle = time.perf_counter()
        with Capture(model, layers) as seen:
            own = mx.argmax(rollback(mx.array([[last, *guesses]]))[0], axis=-1).tolist()
        features = seen.features[0]
        accepted = num_accepted(guesses, own)
        rollback.undo(len(guesses) - accepted)
        rollback.commit()
        out.append((accepted, middle - begin, time.perf_counter() - middle))
        draft.extend(mx.array([last, *guesses[:accepted]]), features[: accepted + 1])
        last = own[accepted]
    return out


def trial(
    model: nn.Module,
    draft: DFlashDraft,
    prompts: Sequence[list[int]],
    num_rounds: int,
    drafted: int = BLOCK - 1,
    fault: Fault = Fault(),
) -> Trial:
    """``rounds`` behind each prompt."""
    runs = [rounds(model, draft, ids, num_rounds, drafted, fault) for ids in prompts]
    taus = np.array([1 + np.mean([a for a, *_ in run]) for run in runs])
    # Rounds behind one prompt depend on each other, so prompts are resampled, not rounds.
    again = np.random.default_rng(0).choice(taus, (2000, len(taus))).mean(1)
    low, high = np.percentile(again, (2.5, 97.5))
    accepted = [a for run in runs for a, *_ in run]
    return Trial(
        tau=float(taus.mean()),
        low=float(low),
        high=float(high),
        histogram=[accepted.count(k) for k in range(drafted + 1)],
        tok_s=[sum(a + 1 for a, *_ in run) / sum(d + v for _, d, v in run) for run in runs],
        draft_s=[d for run in runs for _, d, _ in run],
        verify_s=[v for run in runs for *_, v in run],
    )


def trials(
    path: Path,
    draft: DFlashDraft,
    prompts: Sequence[list[int]],
    num_rounds: int,
    faults: Mapping[str, Fault] = FAULTS,
    on_result: Callable[[FaultsRecord], None] | None = None,
) -> FaultsRecord:
    """A ``trial`` of each fault.

    Args:
        path (Path): The target's folder.
        draft (DFlashDraft): Its draft.
        prompts (Sequence[list[int]]): Token ids.
        num_rounds (int): Rounds behind each.
        faults (Mapping[str, Fault]): By name.
        on_result (Callable): Called with the record so far, after each fault.
    """
    results, made, model = {}, None, None
    record = FaultsRecord(len(prompts), num_rounds, results, machine.card(), prompt=len(prompts[0]))
    for name, fault in faults.items():
        own = fault.top_k, fault.bits, fault.dtype
        if model is None or own != made:
            model, made = None, own  # one at a time in memory
            model = target(path, fault)
        results[name] = trial(model, draft, prompts, num_rounds, fault=fault)
        if on_result:
            on_result(record)
    return record


def plain_tok_s(model: nn.Module, prompts: Sequence[list[int]], tokens: int) -> list[float]:
    """Tokens per second without a draft, behind each prompt."""
    return [tokens / decode(model, ids, tokens).decode_s for ids in prompts]


# Charts


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


def speedup(trial: Trial, plain: Sequence[float]) -> np.ndarray:
    """Speed over not drafting, for each prompt.

    Args:
        trial (Trial): With a draft.
        plain (Sequence[float]): Tokens per second without.
    """
    return np.array(trial.tok_s) / np.median(plain)


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


# The draft's training


@dataclass(frozen=True)
class Acceptance:
    """What a trained draft gets accepted on one set of texts.

    Attributes:
        tau (float): Tokens committed in a round.
        tau_first_100 (float): The same in the first 100 tokens of each text.
        histogram (list[int]): Rounds with 0, 1, ... accepted drafts.
        cycles (int): Rounds.
    """

    tau: float
    tau_first_100: float
    histogram: list[int]
    cycles: int

    share = Trial.share


@dataclass(frozen=True)
class Training:
    """``training.json`` of a draft: acceptance after several lengths of training.

    Attributes:
        card (str): The machine.
        texts (dict): ``{set: number of texts}``.
        steps (dict): ``{training steps: {draft: {set: Acceptance}}}``.
    """

    card: str
    texts: dict[str, int]
    steps: dict[int, dict[str, dict[str, Acceptance]]]

    @classmethod
    def load(cls, path: Path) -> "Training":
        """From a draft's folder."""
        record = json.loads((Path(path) / "training.json").read_text())
        steps = {  # of two runs of the same length the later has the better learning rate
            run["steps"]: {
                draft: {name: Acceptance(**a) for name, a in sets.items()}
                for draft, sets in run["acceptance"].items()
            }
            for run in record["runs"]
        }
        return cls(
            f"{record['device']}, PyTorch {record['torch']}, {record['date']}",
            {name: s["texts"] for name, s in record["sets"].items()},
            steps,
        )

    @property
    def final(self) -> dict[str, dict[str, Acceptance]]:
        """After the longest training, by draft and set."""
        return self.steps[max(self.steps)]


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


# Sliders and verdicts


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
) -> list[tuple[str, str, str, str]]:
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


# The command


def some(path: Path, kind: str, length: int, num: int) -> list[list[int]]:
    """Held-out prompts, evenly spaced over all.

    Args:
        path (Path): The target's folder.
        kind (str): ``code`` or ``prose``.
        length (int): Tokens of each.
        num (int): How many.
    """
    every = heldout_prompts(path, kind, length)
    return every[:: max(1, len(every) // num)][:num]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Each fault switched on alone, and together, for the drafts of data/models: how many "
        "tokens are accepted. Notebook 08's table, with more rounds."
    )
    add_number(parser, "--prompts", 8, "how many")
    add_number(parser, "--rounds", 16, "after each prompt")
    add_number(parser, "--length", 64, "prompt tokens")
    parser.add_argument(
        "--kind", default="code", choices=("code", "prose"), help="of text (default: %(default)s)"
    )
    add_json(parser)


def bench_faults(
    num_prompts: int, num_rounds: int, length: int, kind: str, json_path: str | None = None
) -> None:
    """``trials`` of the models in ``data``, printed and saved fault by fault."""
    path = DATA / "models" / "tiny-moe"
    prompts = some(path, kind, length, num_prompts)
    draft = DFlashDraft(DATA / "models" / "tiny-dflash")

    def on_result(record):
        name, t = list(record.results.items())[-1]
        print(f"{name:40} tau {t.tau:.2f} [{t.low:.2f}, {t.high:.2f}]  {t.histogram}", flush=True)
        if json_path:
            records.save(json_path, replace(record, text=kind))

    trials(path, draft, prompts, num_rounds, on_result=on_result)


def run(args: argparse.Namespace) -> None:
    """The command."""
    bench_faults(args.prompts, args.rounds, args.length, args.kind, args.json)
