"""Notebook 05: fewer experts per token, in bytes and in bits per byte.

    python -m moelab bench-top-k MODEL --json FILE

The command scores more windows of text than the notebook has time for. Speeds are those of
``python -m moelab bench MODEL --modes fused/top_k=8,fused/top_k=4``.
"""

import argparse
import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.utils import load_tokenizer
from tqdm import tqdm

from ... import StreamConfig, footprint, load, synthesize
from ...commands.argument_types import not_empty, positive
from ...commands.arguments import add_model, add_number
from .. import machine, quality, records
from ..arguments import add_json, several
from ..decode import same_tokens
from ..models import folder
from ..texts import heldout_files
from . import bench

if TYPE_CHECKING:
    from pandas import DataFrame

HOLDS = 0.01  # quality "holds" up to this share of more bits; fixed before the measurement
# Published tokens per second by top-k, not run here.
PUBLISHED = {k: records.PUBLISHED["PR 26"][f"buffers, top-{k}"] for k in (8, 6, 4, 2)}
PUBLISHED_SHAPE = "qwen3.5-122b-a10b"
TINY_VOCAB = 8192  # rows of tiny-moe's head


# Speed


def token_nbytes(model: str | Path, layers: int | None = None) -> tuple[int, int]:
    """Bytes that a token uses without routed experts, and of one more expert in each layer.

    ``model`` may be a key of ``synthesize.CONFIGS``, of which ``layers`` takes only so many.
    """
    if str(model) not in synthesize.CONFIGS:
        f = footprint(model, StreamConfig())
        one = f.num_layers * f.expert_nbytes
        return f.checkpoint_nbytes - f.num_experts * one, one
    config = copy.deepcopy(synthesize.CONFIGS[str(model)])
    if layers:
        config["text_config"] |= {"num_hidden_layers": layers, "vocab_size": TINY_VOCAB}
    tensors, config = synthesize.plan(config)
    experts = sum(t.nbytes for t in tensors if ".switch_mlp." in t.name)
    used = sum(t.nbytes for t in tensors if "embed_tokens" not in t.name)
    return used - experts, experts // config["text_config"]["num_experts"]


def by_bytes(model: str | Path, ks: Sequence[int], layers: int | None = None) -> "DataFrame":
    """Speed over the first K if a token's time were in proportion to the bytes that it uses.

    The last row is K=0, a token without routed experts.
    """
    rest, one = token_nbytes(model, layers)
    mode = f"by the bytes of {Path(model).name}" + (f", {layers} layers" if layers else "")
    return _speedups(mode, {k: (rest + ks[0] * one) / (rest + k * one) for k in (*ks, 0)})


def published(ks: Sequence[int]) -> "DataFrame":
    """The published speeds over that of the first K, as a table like that of ``by_bytes``."""
    known = {k: PUBLISHED[k] / PUBLISHED[ks[0]] for k in ks if {k, ks[0]} <= PUBLISHED.keys()}
    return _speedups("published, 122B (PR 26)", known)


def _speedups(mode, speedups):
    rows = [{"mode": mode, "top_k": k, "speedup": v} for k, v in speedups.items()]
    return records.table({"rows": rows or [{"mode": mode}]})


def with_speedup(samples: "DataFrame") -> "DataFrame":
    """Add ``speedup`` to samples of ``bench``: over the same mode's largest K, by round."""
    most = samples[samples.top_k == samples.top_k.max()].set_index(["mode", "round"]).token_s
    keys = records.pandas().MultiIndex.from_frame(samples[["mode", "round"]])
    return samples.assign(speedup=most.reindex(keys).to_numpy() / samples.token_s)


# Quality


def measure(
    path: str | Path,
    ks: Sequence[int],
    heldout: str | Path | None = None,
    slots: int = 16,
    length: int = 256,
    count: int = 64,
    batch: int = 4,
    progress: bool = True,
) -> "DataFrame":
    """Measure the bits that a streamed model needs for windows of held-out text, for each K."""
    path = folder(path)
    texts = list(heldout_files(heldout or path / "heldout").values())
    some, rows = quality.windows(load_tokenizer(path), texts, length, count), []
    settings: dict[str, Any] = {"model": path.name, "slots": slots, "window_tokens": length}
    settings["xz_bits_per_byte"] = quality.xz_bits_per_byte(texts)
    running = records.Running("top_k", settings)
    total = int(some.counts.sum()) * len(ks)
    with tqdm(total=total, desc="bits", unit="token", leave=False, disable=not progress) as bar:
        for k in ks:
            with load(path, StreamConfig(slots=slots, top_k=k))[0] as model:
                bits = quality.score(model, some, batch, bar).bits
            for i, (b, n) in enumerate(zip(bits.tolist(), some.nbytes.tolist())):
                rows.append({"variant": f"K={k}", "round": i, "top_k": k, "bits": b, "nbytes": n})
    return running.table(rows)


def with_increase(scores: "DataFrame") -> "DataFrame":
    """Add ``increase`` to samples of ``measure``: the share of bits beyond those of the first K."""
    first = records.values(scores, scores.variant.iloc[0], "bits")
    return scores.assign(increase=scores.bits / scores["round"].map(first) - 1)


def more_bits(scores: "DataFrame") -> "DataFrame":
    """Bits per byte of each K, and the median window's increase over the first K, with interval."""
    whole = scores.groupby("variant", sort=False)[["bits", "nbytes"]].sum()
    windows = with_increase(scores).groupby("variant", sort=False).increase
    ends = windows.apply(records.interval).unstack()
    columns = {"bits_per_byte": whole.bits / whole.nbytes, "increase": windows.median()}
    return records.pandas().DataFrame(columns).join(ends).loc[whole.index]


def dial(
    path: str | Path, slots: int = 16, tokens: int = 24, length: int = 128, count: int = 4
) -> Callable[[int], Any]:
    """Make the function behind the top-k slider: speed and bits per byte at K and at the own K."""
    from ..charts import bars

    own = footprint(path, StreamConfig()).top_k
    score = functools.cache(
        lambda k: measure(path, [k], None, slots, length, count, progress=False)
    )

    def look(top_k: int):
        ks = list(dict.fromkeys((own, top_k)))
        modes = {f"K={k}": StreamConfig(slots=slots, top_k=k) for k in ks}
        speeds = bench.measure(path, modes, tokens=tokens, runs=3, warmup=4, progress=False)
        scores = records.together({k: score(k) for k in ks})
        full, fewer = (records.values(speeds, f"K={k}", "tokens")[0] for k in (own, top_k))
        ratio = records.paired(speeds, f"K={own}", f"K={top_k}").median()
        rise = more_bits(scores).increase[f"K={top_k}"]
        timed = speeds.assign(shown=speeds.token_s * 1e3)
        scored = scores.assign(shown=scores.bits / scores.nbytes)
        return bars(
            records.together({"time for a token (ms)": timed, "bits per byte": scored}, "panel"),
            "shown",
            panel="panel",
            title=f"K={top_k}: {ratio:.2f} times as fast, {rise:+.1%} bits for the same text",
            axis="median",
            finding=f"The first {same_tokens(full, fewer)} of {len(full)} greedy tokens are those "
            f"of K={own}.",
            note=f"streamed, {slots} slots, {count} windows of {length} tokens",
        )

    return look


# The command


def report(scores: "DataFrame") -> str:
    """Write what each K costs."""
    s = scores.attrs["settings"]
    lines = [
        machine.card_line(scores.attrs["machine"]),
        f"{s['model']}, {scores['round'].nunique()} windows of {s['window_tokens']} tokens; "
        f"xz -9e needs {s['xz_bits_per_byte']:.3f} bits per byte",
        "        bits per byte   more than the first K: median window [interval]",
    ]
    for name, row in more_bits(scores).iterrows():
        lines.append(
            f"{name:6} {row.bits_per_byte:14.3f}   {row.increase:+7.2%} "
            f"[{row.low:+.2%} to {row.high:+.2%}] {row.confidence:.0%}"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Bits per byte of held-out text by top-k, with more windows than notebook 05 has time for."
    )
    add_model(parser)
    parser.add_argument(
        "--heldout", type=not_empty, metavar="FOLDER", help="of text (default: MODEL/heldout)"
    )
    parser.add_argument(
        "--top-k",
        type=several(positive),
        default="8,6,4,2,1",
        help="divided by commas; the first is compared with (default: %(default)s)",
    )
    add_number(parser, "--slots", 16, "in each layer")
    add_number(parser, "--length", 256, "tokens in a window")
    add_number(parser, "--count", 64, "windows")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    scores = measure(args.model, args.top_k, args.heldout, args.slots, args.length, args.count)
    records.print_and_save(report(scores), scores, args.json)
