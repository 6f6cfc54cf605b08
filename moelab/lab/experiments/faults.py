"""Why does a draft get nothing accepted? Each suspect of the seeds' DFlash failure switched on alone, and together.

python -m moelab.lab.experiments.faults --json data/results/cpu_suspects.json     # notebook 08's table, recorded, with more rounds
"""

import argparse
import json
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ... import DATA, StreamConfig, load
from ...speculation.dflash import Capture, DFlashDraft
from .. import machine, timing
from ..plots import style as figures
from ..texts import heldout_prompts
from .rollback import REMEDIES

OWN = {"rollback": "exact", "shift": 0, "top_k": None, "bits": None, "dtype": None}
SUSPECTS = {
    "nothing wrong": {},
    "rejected tokens left in the state": {"rollback": "left in the state"},
    "state restored, accepted not replayed": {"rollback": "restored only"},
    "features off by one layer": {"shift": 1},
    "top-k 6": {"top_k": 6},
    "top-k 4": {"top_k": 4},
    "top-k 2": {"top_k": 2},
    "3-bit target": {"bits": 3},
    "2-bit target": {"bits": 2},
    "left + off by one + top-k 6": {"rollback": "left in the state", "shift": 1, "top_k": 6},
    "restored + off by one + top-k 6": {"rollback": "restored only", "shift": 1, "top_k": 6},
}
HALF = {"bfloat16": {"dtype": mx.bfloat16}}  # float16 is several times slower still on a CPU


def target(path, top_k=None, bits=None, dtype=None):
    """The target as a suspect would have it, resident.

    Args:
        path (str or Path): The checkpoint.
        top_k (int): Experts for a token. Default: its own.
        bits (int): Its 4-bit weights rounded again, to so many.
        dtype (mx.Dtype): Of activations. Default: the engine's choice.
    """
    model, _ = load(path, StreamConfig(mode="resident", top_k=top_k))
    if bits:
        for _, m in model.named_modules():
            if getattr(m, "bits", None) == 4:
                w = mx.dequantize(m.weight, m.scales, m.biases, m.group_size, 4)
                m.weight, m.scales, m.biases = mx.quantize(w, m.group_size, bits)
                m.bits = bits
    if dtype:
        model.set_dtype(dtype)
    return model


def rounds(model, draft, ids, num_rounds, drafted, rollback="exact", shift=0):
    """Speculate greedily after one prompt, with a fault or without.

    Args:
        model (nn.Module): The target.
        draft (DFlashDraft): Its draft.
        ids (list[int]): The prompt.
        num_rounds (int): Rounds.
        drafted (int): Tokens drafted in each.
        rollback (str): Of ``undo.REMEDIES``: what is done about rejected tokens in the recurrent state.
        shift (int): Features are taken from so many layers further on.

    Returns:
        list[tuple[int, float, float]]: Accepted tokens, the draft's and the target's seconds of each round.
    """
    cache, layers, out = make_prompt_cache(model), [i + shift for i in draft.layer_ids], []
    draft.bind(model)
    with Capture(model, layers) as seen:
        mx.eval(model(mx.array([ids[:-1]]), cache=cache), seen.features)
    draft.extend(mx.array(ids[:-1]), seen.features[0])
    draft.propose(0, 0, None)
    remedy, last = REMEDIES[rollback](model, cache), ids[-1]
    for _ in range(num_rounds):
        begin = time.perf_counter()
        guesses = draft.propose(last, drafted, lambda logits: mx.argmax(logits, axis=-1)).tolist()
        middle = time.perf_counter()
        with Capture(model, layers) as seen:
            own = mx.argmax(remedy(mx.array([[last, *guesses]]))[0], axis=-1).tolist()
        features = seen.features[0]
        accepted = next((k for k, g in enumerate(guesses) if g != own[k]), len(guesses))
        remedy.undo(len(guesses) - accepted)
        remedy.commit()
        out.append((accepted, middle - begin, time.perf_counter() - middle))
        draft.extend(mx.array([last, *guesses[:accepted]]), features[: accepted + 1])
        last = own[accepted]
    return out


def trial(model, draft, prompts, num_rounds, drafted=15, **fault):
    """``rounds`` after each prompt.

    Returns:
        dict: ``tau``, its 95% interval over prompts and rounds (``low``, ``high``), ``histogram`` [drafted + 1], ``tok_s`` of the loop (median of prompts).
    """
    runs = [rounds(model, draft, ids, num_rounds, drafted, **fault) for ids in prompts]
    taus = np.array([1 + np.mean([a for a, *_ in run]) for run in runs])
    # Rounds after one prompt depend on each other: prompts are drawn again, not rounds.
    again = np.random.default_rng(0).choice(taus, (2000, len(taus))).mean(1)
    accepted = [a for run in runs for a, *_ in run]
    tok_s = [sum(a + 1 for a, *_ in run) / sum(d + v for _, d, v in run) for run in runs]
    return {
        "tau": float(taus.mean()), "low": float(np.percentile(again, 2.5)), "high": float(np.percentile(again, 97.5)),
        "histogram": [accepted.count(k) for k in range(drafted + 1)], "tok_s": tok_s,
        "draft_s": [d for run in runs for _, d, _ in run], "verify_s": [v for run in runs for *_, v in run],
    }  # fmt: skip


def table(path, draft, prompts, num_rounds, suspects=SUSPECTS):
    """``trial`` for each suspect: ``{name: result}``."""
    out, models = {}, {}
    for name, fault in suspects.items():
        fault = OWN | fault
        made = fault["top_k"], fault["bits"], fault["dtype"]
        if made not in models:
            models = {made: target(path, *made)}  # one at a time
        out[name] = trial(
            models[made],
            draft,
            prompts,
            num_rounds,
            rollback=fault["rollback"],
            shift=fault["shift"],
        )
    return out


def plain_tok_s(model, ids, tokens):
    """Tokens per second without a draft, after the prompt."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids[:-1]]), cache=cache))
    y, begin = mx.array([ids[-1]]), time.perf_counter()
    for _ in range(tokens):
        y = mx.argmax(model(y[None], cache=cache)[0, -1:], axis=-1)
        mx.async_eval(y)
    mx.eval(y)
    return tokens / (time.perf_counter() - begin)


def histogram(results, title, finding, note="", card=None):
    """Shares of rounds by accepted tokens, one line for each result: a described figure."""
    fig = figures.figure(
        title, "drafts accepted in a round", "% of the rounds", note=note, card=card
    )
    words = []
    for i, (name, r) in enumerate(results.items()):
        counts = np.array(r["histogram"])
        share = 100 * counts / max(counts.sum(), 1)
        fig.add_scatter(
            x=list(range(len(share))),
            y=share,
            name=f"{name} (tau {r['tau']:.2f})",
            **figures.style(i),
        )
        words.append(
            f"{name}: {share[0]:.0f}% with none accepted, {share[-1]:.0f}% with all, tau {r['tau']:.2f}"
        )
    return figures.describe(
        fig, alt=f"Lines of {title}. " + ". ".join(words) + ".", finding=finding
    )


def recorded_card(record):
    """What ``data/models/tiny-dflash/training.json`` says of its machine, as a figure's subtitle."""
    return f"{record['device']}, PyTorch {record['torch']}, {record['date']}"


def dial(path, draft, prompts, num_rounds):
    """The function behind the sliders of notebook 08: from block size, top-k and the two faults to a histogram that was just measured."""
    models = {}

    def look(block: int, top_k: int, rollback: str, features: str):
        if top_k not in models:
            models.clear()
            models[top_k] = target(path, top_k=top_k)
        shift = int(features == "off by one")
        r = trial(
            models[top_k], draft, prompts, num_rounds, block - 1, rollback=rollback, shift=shift
        )
        what = f"block {block}, top-k {top_k}, rollback {rollback}, features {features}"
        return histogram(
            {what: r},
            f"tau {r['tau']:.2f} of at most {block}",
            f"{r['histogram'][0] / sum(r['histogram']):.0%} of the rounds accept nothing.",
            note=f"measured just now: {len(prompts)} prompts, {num_rounds} rounds each",
        )

    return look


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="prompt tokens")
    parser.add_argument("--kind", default="code", choices=("code", "prose"))
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    path = DATA / "models" / "tiny-moe"
    every = heldout_prompts(path, args.kind, args.length)
    prompts = every[:: len(every) // args.prompts][: args.prompts]
    draft = DFlashDraft(DATA / "models" / "tiny-dflash")
    record = {
        "kind": "suspects",
        "machine": machine.card(),
        "text": args.kind,
        "prompt": args.length,
    }
    record |= {"prompts": len(prompts), "rounds": args.rounds, "results": {}}
    for name in SUSPECTS:
        record["results"] |= table(path, draft, prompts, args.rounds, {name: SUSPECTS[name]})
        r = record["results"][name]
        print(
            f"{name:40s} tau {r['tau']:.2f} [{r['low']:.2f}, {r['high']:.2f}]  {r['histogram']}",
            flush=True,
        )
        if args.json:
            args.json.write_text(
                json.dumps(record | {"verify": timing.summary(r["verify_s"])}) + "\n"
            )


if __name__ == "__main__":
    main()
