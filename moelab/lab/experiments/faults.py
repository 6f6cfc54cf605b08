"""Notebook 08: why a draft gets nothing accepted, each fault switched on alone and together.

    python -m moelab bench-faults --json data/results/cpu_faults.json

SwiftLM's issue 91 reports 0 or 1 accepted drafts of 16. The faults are the causes it suspects. What
is counted does not depend on the machine's speed.
"""

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, load
from ...checkpoint import read_json
from ...commands.arguments import add_number
from ...commands.drafting import open_draft
from ...shipped import shipped
from ...speculation.dflash import DFlashDraft
from ...speculation.sampling import num_accepted
from ...speculation.target import Capture
from .. import machine, records
from ..arguments import add_json
from ..texts import spaced_prompts
from .rollback import REMEDIES

if TYPE_CHECKING:
    from pandas import DataFrame

BLOCK = 16  # tokens of a DFlash block: the last accepted one and 15 drafts


@dataclass(frozen=True)
class Fault:
    """What is wrong with the target or the loop; with the defaults nothing is."""

    rollback: str = "exact"  # what happens to rejected tokens: one of ``rollback.REMEDIES``
    shift: int = 0  # the draft's features come from so many layers too far on
    top_k: int | None = None  # experts per token; None: the target's own
    bits: int | None = None  # the target's 4-bit weights are rounded again, to so many bits
    slots: int | None = None  # the target is streamed with so many slots; None: resident
    block: int = BLOCK  # tokens of a block, the last accepted one included

    @property
    def of_target(self) -> tuple[int | None, ...]:
        """The faults of the target itself."""
        return self.top_k, self.bits, self.slots


RIGHT, SWIFTLM = "nothing wrong", "left + off by one + top-k 6"
FAULTS = {
    RIGHT: Fault(),
    "streamed, 8 slots": Fault(slots=8),
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


def target(path: str | Path, fault: Fault = Fault()) -> nn.Module:
    """Load the target with its own faults: top-k, bits, slots."""
    streaming = {"slots": fault.slots} if fault.slots else {"mode": "resident"}
    model, _ = load(path, StreamConfig(**streaming, top_k=fault.top_k))
    if fault.bits:
        for _, m in model.named_modules():
            if getattr(m, "bits", None) == 4:
                w = mx.dequantize(m.weight, m.scales, m.biases, m.group_size, 4)
                m.weight, m.scales, m.biases = mx.quantize(w, m.group_size, fault.bits)
                m.bits = fault.bits
    return model


def speculate(
    model: nn.Module, draft: DFlashDraft, ids: list[int], rounds: int, fault: Fault = Fault()
) -> list[int]:
    """Speculate greedily behind a prompt with a fault; returns tokens committed by each round."""
    cache, layers, out = make_prompt_cache(model), [i + fault.shift for i in draft.layer_ids], []
    draft.bind(model)
    with Capture(model, layers) as seen:
        mx.eval(model(mx.array([ids[:-1]]), cache=cache), seen.features)
    draft.extend(mx.array(ids[:-1]), seen.features[0])
    draft.propose(0, 0, None)
    rollback, last = REMEDIES[fault.rollback](model, cache), ids[-1]
    for _ in range(rounds):
        choose = partial(mx.argmax, axis=-1)
        guesses = draft.propose(last, fault.block - 1, choose).tolist()
        with Capture(model, layers) as seen:
            own = mx.argmax(rollback(mx.array([[last, *guesses]]))[0], axis=-1).tolist()
        features = seen.features[0]
        accepted = num_accepted(guesses, own)
        rollback.undo(len(guesses) - accepted)
        rollback.commit()
        out.append(accepted + 1)
        draft.extend(mx.array([last, *guesses[:accepted]]), features[: accepted + 1])
        last = own[accepted]
    return out


def measure(
    path: str | Path,
    draft: str | Path,
    prompts: int = 48,
    rounds: int = 16,
    length: int = 64,
    kind: str = "code",
    faults: Mapping[str, Fault] = FAULTS,
    keep: Callable[["DataFrame"], None] | None = None,
    progress: bool = True,
) -> "DataFrame":
    """Call ``speculate`` with each fault behind each of several held-out prompts."""
    texts, opened = spaced_prompts(path, kind, length, prompts), open_draft(draft)
    targets: dict[tuple, nn.Module] = {}

    def run(fault: Fault, i: int) -> dict[str, Any]:
        if fault.of_target not in targets:
            targets[fault.of_target] = stack.enter_context(target(path, fault))
        committed = speculate(targets[fault.of_target], opened, texts[i], rounds, fault)
        return {
            "prompt_tokens": length,
            **asdict(fault),
            "rounds": rounds,
            "drafted": rounds * (fault.block - 1),
            "accepted": sum(committed) - rounds,
            "committed": committed,
        }

    settings = {"model": Path(path).name, "draft": Path(draft).name, "kind": kind}
    with ExitStack() as stack:
        variants = {name: partial(run, fault) for name, fault in faults.items()}
        return records.interleave(
            "faults", variants, len(texts), settings, warmup=0, keep=keep, progress=progress
        )


def shares(samples: "DataFrame", by: str = "variant") -> "DataFrame":
    """The share of each group's rounds that committed 1, 2, ... tokens."""
    rounds = samples.explode("committed")
    most = max(BLOCK, *rounds.committed)
    counts = records.pandas().crosstab(rounds[by], rounds.committed, normalize="index")
    counts = counts.loc[list(dict.fromkeys(rounds[by]))]
    out = counts.reindex(columns=range(1, most + 1), fill_value=0.0).stack()
    out = out.rename("share").reset_index()
    out.attrs = samples.attrs
    return out


DRAFTS = {  # names of notebook 08 for the candidates that were trained
    "dflash2": "2 layers",
    "dflash3": "3 layers",
    "dflash4": "4 layers",
    "dflash4late": "4 layers, later features",
    "draft3": "autoregressive",
}


def training(draft: str | Path) -> "DataFrame":
    """A table of acceptance after several lengths of training, from a draft's ``training.json``."""
    record = read_json(Path(draft) / "training.json")
    rows = {  # of two runs of one length the later counts: its learning rate is better
        (run["steps"], name, texts): {
            "tau": found["tau"],
            "tau_first_100": found["tau_first_100"],
            "committed": np.repeat(np.arange(len(h)) + 1, h).tolist(),
        }
        for run in record["runs"]
        for name, sets in run["acceptance"].items()
        for texts, found in sets.items()
        for h in [found["histogram"]]
    }
    keys = ({"steps": steps, "draft": DRAFTS[name], "texts": texts} for steps, name, texts in rows)
    out = records.pandas().DataFrame([k | row for k, row in zip(keys, rows.values())])
    card = f"{record['device']}, PyTorch {record['torch']}, {record['date']}"
    out.attrs = {"record": "training.json", "machine": f"recorded: {card}"}
    return out


def dial(path: str | Path, draft: str | Path, prompts: int, rounds: int) -> Callable[..., Any]:
    """Make the function behind the sliders of notebook 08, which measures at each call."""
    from ..charts import lines

    def look(block: int, top_k: int, rollback: str, features: str):
        fault = Fault(rollback, int(features == "off by one"), top_k, block=block)
        name = f"block {block}, top-k {top_k}, rollback {rollback}, features {features}"
        found = measure(path, draft, prompts, rounds, faults={name: fault}, progress=False)
        spread = shares(found)
        return lines(
            spread,
            "committed",
            "share",
            title=f"Tau {found.tau.mean():.2f} of at most {block}",
            axes=("tokens committed in a round", "share of the rounds"),
            finding=f"{spread.share[0]:.0%} of the rounds accept no draft.",
            note=f"{name}; {prompts} prompts, {rounds} rounds each",
            percent=True,
        )

    return look


# The command


def report(samples: "DataFrame") -> str:
    """Write the tau of each fault (tokens committed in a round) as text."""
    settings = samples.attrs["settings"]
    lines = [
        machine.card_line(samples.attrs["machine"]),
        f"{settings['model']}, {settings['draft']}: tokens committed in a round, median over "
        f"{samples['round'].nunique()} prompts [its interval], rounds that accept 0 or 1 draft",
    ]
    spread = shares(samples).query("committed <= 2").groupby("variant").share.sum()
    for name, rows in samples.groupby("variant", sort=False):
        ends = records.interval(rows.tau)
        told = f"{rows.tau.median():5.2f} [{ends['low']:.2f}, {ends['high']:.2f}]"
        lines.append(f"{name:40} {told}  {spread[name]:4.0%}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Each fault switched on alone, and together, for the drafts of data/models: how many "
        "tokens are accepted. Notebook 08's table, with more rounds."
    )
    add_number(parser, "--prompts", 48, "how many")
    add_number(parser, "--rounds", 16, "after each prompt")
    add_number(parser, "--length", 64, "prompt tokens")
    parser.add_argument(
        "--kind", default="code", choices=("code", "prose"), help="of text (default: %(default)s)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    samples = measure(
        shipped("models", "tiny-moe"),
        shipped("models", "tiny-dflash"),
        args.prompts,
        args.rounds,
        args.length,
        args.kind,
        keep=partial(records.save, args.json) if args.json else None,
    )
    records.print_and_save(report(samples), samples, args.json)
