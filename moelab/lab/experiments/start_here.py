"""Notebook 00: the memory that a model should take, and its dials."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import StreamConfig, footprint
from .. import records
from ..decode import same_tokens
from .bench import measure

if TYPE_CHECKING:
    from pandas import DataFrame

MODES = ("resident", "serial", "buffers", "stacked", "fused")
SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def plan(path: str | Path, allowed: float) -> "DataFrame":
    """Predict a model's memory by slots from its file's header; no weights are read.

    ``allowed`` is the share of the resident model's memory that may be used. Hit rate and reads are
    those of experts that are equally likely.
    """
    whole = footprint(path, StreamConfig(mode="resident"))
    sizes = [s for s in SLOTS if whole.top_k <= s <= whole.num_experts]
    nbytes = [footprint(path, StreamConfig(slots=s)).total_nbytes for s in sizes]
    out = records.pandas().DataFrame({"predicted_nbytes": nbytes}, index=sizes).rename_axis("slots")
    out["fits"] = out.predicted_nbytes <= allowed * whole.total_nbytes
    out["hit_rate"] = out.index / whole.num_experts
    needed = whole.num_layers * whole.top_k * whole.expert_nbytes
    out["read_nbytes_per_token"] = (1 - out.hit_rate) * needed
    return out


def dial(path: str | Path, prompt: str, tokens: int) -> Callable[[int, int], Any]:
    """Make the function behind two sliders, which draws the model resident and streamed."""
    from ..charts import bars

    def look(top_k: int, slots: int):
        ways = {
            "resident": StreamConfig(mode="resident"),
            "streamed": StreamConfig(top_k=top_k, slots=slots),
        }
        given = {"tokens": tokens, "runs": 1, "warmup": 0, "prompts": [prompt], "progress": False}
        found = measure(path, ways, **given).set_index("variant")
        here, there = found.loc["streamed"], found.loc["resident"]
        lossy = f" (top-k {top_k} is lossy)" if top_k < footprint(path).top_k else ""
        same = same_tokens(here.tokens, there.tokens)
        told = {
            "MLX memory once loaded (MB)": found.held_nbytes / 1e6,
            "time of a token (ms)": found.token_s * 1e3,
            "read for a token (MB)": found.read_nbytes_per_token / 1e6,
        }
        rows = records.pandas().DataFrame(told).melt(var_name="what", ignore_index=False)
        rows.attrs = found.attrs
        return bars(
            rows.reset_index(),
            "value",
            panel="what",
            title=f"Top-k {top_k}, {slots} slots: {here.held_nbytes / 1e6:.1f} MB in place of "
            f"{there.held_nbytes / 1e6:.1f}, {there.token_s / here.token_s:.2f} times as fast",
            axis="",
            finding=f"{here.hit_rate:.0%} of the experts were in a slot; the first "
            f"{same} of {len(here.tokens)} tokens are the resident model's{lossy}.",
        )

    return look
