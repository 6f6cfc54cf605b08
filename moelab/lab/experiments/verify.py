"""Notebook 07: what a pass over several positions costs.

python -m moelab.lab passes OUT.json MODEL SLOTS...
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, close, load, stats
from ...speculation import gated_delta_cuda
from ...speculation.rollback import Rollback
from .. import records
from ..models import folder
from ..texts import heldout_ids

if TYPE_CHECKING:
    from pandas import DataFrame

POSITIONS = (1, 2, 4, 8, 16, 17)  # 17: one token and 16 drafts
ROUNDS, TEXT_TOKENS = 20, 512  # rounds and tokens of a record


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
