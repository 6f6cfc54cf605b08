"""Speeds that others publish, against what the planner predicts for their machines.

The rows are ``data/published.csv``'s. This was fixed before anything was fitted: which rows count
(``why_not``), on which sources the planner's constants are fitted and on which it is judged
(``side``), and how (``by_source``, ``GOALS``).
"""

import csv
import hashlib
import re
from typing import TYPE_CHECKING

import numpy as np

from ..shipped import shipped

if TYPE_CHECKING:
    from pandas import DataFrame, Series

# What the planner has to reach on the sources that it was not fitted to. A factor is the larger of
# predicted / published and published / predicted; a source's is the median of its rows.
GOALS = {"median": 1.25, "four of five": 1.6, "worst": 2.0}
# Sources by one author, or of one thread, count as one.
ONE_SOURCE = {"z-lab issue 91": "SwiftLM", "mlx-swift-lm issue 124": "SwiftLM"}
# What the rows call a model, and what ``moelab.plan`` does.
MODELS = {
    "Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen3.6-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen3.5-122B-A10B": "qwen3.5-122b-a10b",
    "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3.8-Flash-Next": "qwen3.8-flash-next",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "Gemma4-26B-A4B": "gemma-4-26b-a4b",
    "DeepSeek-V4-Flash": "deepseek-v4-flash",
    "GLM-5.2": "glm-5",
    "GLM-5.2 744B": "glm-5",
    "Kimi-K3 2.78T": "kimi-k3",
    "Laguna-S2.1 117B": "laguna-s2.1",
    "OLMoE 7B": "olmoe",
}
MOST_CONTEXT = 8192  # tokens: with more, caches take much of a token's time
# Other arithmetic than a streaming engine's, or answers that are not the model's.
OTHER_METHODS = ("serial", "TurboQuant", "skipped", "top-p", "mmap")
OTHER_DEVICES = ("RTX", "Vulkan", "phone")


def rows() -> "DataFrame":
    """The table, with ``group``, ``side`` and ``why_not`` beside its own columns."""
    import pandas as pd

    with open(shipped("published.csv"), newline="") as file:
        table = pd.DataFrame(list(csv.DictReader(file)))
    for name in ("ram_gb", "ssd_gb_s", "top_k", "held_gb", "hit_rate", "tok_s", "context"):
        table[name] = pd.to_numeric(table[name])
    table["group"] = table.source.map(group)
    table["side"] = table.group.map(side)
    table["slots"] = table.slots_or_cache.map(slots)
    table["why_not"] = table.apply(why_not, axis=1)
    return table


def group(source: str) -> str:
    """The source, or what it is one with."""
    if source.startswith("mlx-lm"):  # issues and requests of many authors
        return source
    return ONE_SOURCE.get(source) or re.split(r" (?:README|docs|PR|issue)", source)[0]


def side(group: str) -> str:
    """``fit`` or ``left out``, by the source's name alone: half of all names each."""
    return "left out" if hashlib.sha256(group.encode()).digest()[0] % 2 else "fit"


def slots(said: str) -> float:
    """Slots in each layer, where a row says them; else nan."""
    found = re.match(r"(\d+) (?:slots|experts a layer|a layer)", said)
    return float(found[1]) if found else float("nan")


def why_not(row: "Series") -> str:
    """Why a row does not count; empty if it does."""
    held = row.held_gb == row.held_gb or row.slots == row.slots
    in_memory = row.slots_or_cache == "all" or row.hit_rate == 1
    device = f"{row.machine} {row.method}"
    if not row.draft.startswith("none"):
        return "a draft"
    if row.model not in MODELS:
        return "the model's shapes are not known"
    if any(word in device for word in OTHER_DEVICES):
        return "not a Mac's GPU or a computer's CPU"
    if any(word in f"{row.method} {row.note}" for word in OTHER_METHODS):
        return "another method"
    if row.context > MOST_CONTEXT:
        return "a long context"
    if row.verified == "not read again":
        return "its source was not found again"
    if not row.bits or not row.machine or row.ram_gb != row.ram_gb:
        return "bits or machine not stated"
    if not (held or in_memory or row.slots_or_cache == "page cache"):
        return "memory for experts not stated"
    if row.ssd_gb_s != row.ssd_gb_s and not in_memory:
        return "the SSD's rate is not known"
    return ""


def by_source(table: "DataFrame") -> "DataFrame":
    """How far the predictions are off, source by source.

    Args:
        table (DataFrame): Rows that count, with ``predicted_tok_s``.

    Returns:
        DataFrame: A row for each source: its ``side``, ``n``, the median ``factor`` of its rows,
        the worst, ``bias`` (median of predicted / published), and ``floor``: the median factor of
        the best single number for each setting that its rows give several speeds for.
    """
    import pandas as pd

    ratio = table.predicted_tok_s / table.tok_s
    table = table.assign(ratio=ratio, factor=np.exp(abs(np.log(ratio))))
    setting = ["model", "bits", "machine", "ram_gb", "ssd_gb_s", "top_k", "slots_or_cache"]
    same = table.groupby(["group", *setting], dropna=False).tok_s
    table["floor"] = np.exp(abs(np.log(table.tok_s / same.transform("median"))))
    found = table.groupby("group")
    return pd.DataFrame(
        {
            "side": found.side.first(),
            "n": found.size(),
            "factor": found.factor.median(),
            "worst": found.factor.max(),
            "bias": found.ratio.median(),
            "floor": found.floor.median(),
        }
    ).sort_values(["side", "factor"])


def reached(sources: "DataFrame") -> dict[str, float]:
    """What ``GOALS`` ask for, of the sources that are left out."""
    factor = sources[sources.side == "left out"].factor
    return {
        "median": float(factor.median()),
        "four of five": float(factor.quantile(0.8)),
        "worst": float(factor.max()),
    }
