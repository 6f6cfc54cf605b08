"""Notebook 07: the experts of a pass over several positions, what it costs, and a model of it.

python -m moelab.lab passes OUT.json MODEL SLOTS...
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, close, load, record, stats
from ...replay import locality
from ...speculation import gated_delta_cuda
from ...speculation.rollback import Rollback
from ...streaming.trace import Trace
from .. import records
from ..models import folder
from ..texts import heldout_ids

if TYPE_CHECKING:
    from pandas import DataFrame, Series

POSITIONS = (1, 2, 4, 8, 16, 17)  # 17: one token and 16 drafts
ROUNDS, TEXT_TOKENS = 20, 512  # rounds and tokens of a record
AS_HERE, FREE = "as here", "free"  # what arithmetic costs in the model of a pass
LONGEST = 16  # the most drafts in that model


# The experts of several tokens


def routing(model: nn.Module, ids: Sequence[int]) -> Trace:
    """Record the routing of a text that is read one token at a time, as in decoding."""
    cache = make_prompt_cache(model)
    with record(model) as trace:
        for i in ids:
            mx.eval(model(mx.array([[i]]), cache=cache))
    return trace


def uniform_union(E: int, K: int, m: int) -> float:
    """Distinct experts of E over m tokens that choose K each, independently and uniformly."""
    return E * (1 - (1 - K / E) ** m)


def union(trace: Trace, positions: Sequence[int]) -> "DataFrame":
    """Distinct experts of a layer over m tokens in a row, in this text and with uniform routing."""
    rows = []
    for m in positions:
        uniform = uniform_union(trace.num_experts, trace.experts.shape[2], m)
        for layer, experts in enumerate(locality.union(trace, m).tolist()):
            own = {"positions": m, "layer": layer}
            rows.append({"variant": "this text", **own, "experts": experts})
            rows.append({"variant": "independent and uniform", **own, "experts": uniform})
    return records.Running("union", {}).table(rows)


# Passes


class _Reading:
    """A model that has read ``at`` tokens of a text and reads on."""

    def __init__(self, model: nn.Module, ids: Sequence[int], at: int):
        cache = make_prompt_cache(model)
        with mx.stream(generation_stream):
            model(mx.array([ids[:at]]), cache=cache)
            mx.eval([c.state for c in cache])
        self.model, self.ids, self.at = model, ids, at
        self.rollback = Rollback(model, cache)

    def verify(self, m: int) -> dict[str, float]:
        """Time a pass over the next m tokens, then roll back all but the first of them."""
        stats(self.model, reset=True)
        with mx.stream(generation_stream):
            begin = time.perf_counter()
            logits = self.rollback(mx.array([self.ids[self.at : self.at + m]]))
            mx.eval(mx.argmax(logits, axis=-1))
            pass_s = time.perf_counter() - begin
            self.rollback.undo(m - 1)
            self.rollback.commit()
        self.at += 1
        parts = stats(self.model)  # a pass over many positions counts as a prompt's
        counted = {
            name: getattr(parts.decode, name) + getattr(parts.prefill, name)
            for name in ("hits", "misses", "bytes_read", "wait_s")
        }
        experts = counted["hits"] + counted["misses"]
        return {"pass_s": pass_s, "experts": experts, **counted}


def passes(
    models: Mapping[str, nn.Module], ids: Sequence[int], positions: Sequence[int], rounds: int
) -> "DataFrame":
    """Time passes over m tokens at successive places of a text; the first round is not kept."""
    at = len(ids) - (rounds + 1) * len(positions) - max(positions)
    if at < 1:
        raise ValueError(f"passes: expected a text of {len(ids) + 1 - at} tokens, got {len(ids)}")
    reading = {name: _Reading(model, ids, at) for name, model in models.items()}

    def run(name, m, _):
        return {"model": name, "positions": m, **reading[name].verify(m)}

    variants = {f"{n}, {m} positions": partial(run, n, m) for n in models for m in positions}
    return records.interleave("passes", variants, rounds, {"context_tokens": at})


def main(out: str, model: str, *slots: str) -> None:
    """Time passes of a model, resident and with several numbers of slots, and save the record.

    On CUDA with moelab's kernel of the recurrence and with mlx-lm's loop over tokens.
    """
    configs = {"resident": StreamConfig(mode="resident")}
    configs |= {f"{n} slots": StreamConfig(slots=int(n)) for n in slots}
    models = {name: load(model, config)[0] for name, config in configs.items()}
    ids, fits, made = heldout_ids(folder(model), [TEXT_TOKENS], 1)[0], gated_delta_cuda.fits, {}
    on_cuda = {", kernel": fits, ", loop": lambda **_: False}
    try:
        for recurrence, use in on_cuda.items() if mx.cuda.is_available() else [("", fits)]:
            gated_delta_cuda.fits = use
            named = {name + recurrence: loaded for name, loaded in models.items()}
            made[recurrence] = passes(named, ids, POSITIONS, ROUNDS)
    finally:
        gated_delta_cuda.fits = fits
        for loaded in models.values():
            close(loaded)
    samples = records.together(made).drop(columns="source")
    samples.attrs = samples.attrs.pop("headers")[0]
    samples.attrs["settings"] |= {"model": folder(model).name, "cache_state": "warm"}
    found = records.group(samples, "pass_s", ["model", "positions"])
    records.print_and_save((found * 1e3).round(2).to_string(), samples, out)


# A model of a pass


def pass_parts(samples: "DataFrame") -> "Series":
    """Fit a resident pass as ``fixed_s`` plus ``position_s`` for each position."""
    median = samples.groupby("positions").pass_s.median()
    position_s, fixed_s = np.polyfit(median.index, median, 1)
    least_s = 1e-6  # noise can make a part negative
    return records.pandas().Series(
        {"fixed_s": max(fixed_s, least_s), "position_s": max(position_s, least_s)}
    )


def reads(trace: Trace, slots: int) -> Callable[[int], float]:
    """A function from m to the experts that a pass over m positions of a trace reads in all layers.

    The trace's first quarter only fills the slots; the least recent expert is evicted.
    """
    return lambda m: _reads(trace, slots, m)


@lru_cache(maxsize=512)
def _reads(trace, slots, m):
    return float(locality.missing(trace, m, slots, skip=len(trace) // 4).sum())


def modelled(
    parts: "Series",
    trace: Trace,
    slots: int,
    expert_s: float,
    accept: float,
    arithmetic: str = AS_HERE,
) -> "DataFrame":
    """Model, not measure, the speed with drafts that cost nothing.

    A pass takes a fixed time, a time for each position (none if ``arithmetic`` is ``FREE``), and
    the reads of experts outside slots. ``accept`` is the chance that a draft is right.
    """
    position_s = parts.position_s if arithmetic == AS_HERE else 0.0
    drafts, missing = np.arange(LONGEST + 1), reads(trace, slots)
    read_s = np.array([missing(n + 1) for n in drafts]) * expert_s
    pass_s = parts.fixed_s + (drafts + 1) * position_s + read_s
    rows = []
    for name, chance in {"as set": accept, "every draft right": 1.0}.items():
        for n, tokens in enumerate(np.cumsum(chance**drafts)):
            cost = pass_s[n] / pass_s[0]
            own = {"tokens": tokens, "passes": cost, "speed": tokens / cost}
            rows.append({"variant": name, "drafts": n, **own})
    return records.Running("model of a pass", {}).table(rows)
