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
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, load
from ...commands.arguments import add_json, add_number
from ...shipped import shipped
from ...speculation.dflash import DFlashDraft
from ...speculation.sampling import num_accepted
from ...speculation.target import Capture
from .. import machine, records
from ..decode import decode
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


def speedup(trial: Trial, plain: Sequence[float]) -> np.ndarray:
    """Speed over not drafting, for each prompt.

    Args:
        trial (Trial): With a draft.
        plain (Sequence[float]): Tokens per second without.
    """
    return np.array(trial.tok_s) / np.median(plain)


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
    path = shipped("models", "tiny-moe")
    prompts = some(path, kind, length, num_prompts)
    draft = DFlashDraft(shipped("models", "tiny-dflash"))

    def on_result(record):
        name, t = list(record.results.items())[-1]
        print(f"{name:40} tau {t.tau:.2f} [{t.low:.2f}, {t.high:.2f}]  {t.histogram}", flush=True)
        if json_path:
            records.save(json_path, replace(record, text=kind))

    trials(path, draft, prompts, num_rounds, on_result=on_result)


def run(args: argparse.Namespace) -> None:
    """The command."""
    bench_faults(args.prompts, args.rounds, args.length, args.kind, args.json)
