"""Notebook 03: slots against the page cache, measured by ``bench`` and replayed."""

import copy
import json
from functools import cache

import numpy as np
from pandas import DataFrame

from ... import synthesize
from ...replay import advice, by_token
from ...replay.costs import Costs
from ...replay.locality import recorded_trace
from ...shipped import shipped
from ...streaming.config import StreamConfig
from ...streaming.plan import Plan
from ...streaming.trace import Trace
from .. import models
from .costs import costs_of

LIKE, LAYERS, TEXT = "qwen3.5-35b-a3b", 4, "code"  # model, layers and text of the records
# How experts outside slots are read.
THROUGH, PAST = "through the page cache", "past the page cache"
NO_SLOTS = "no slots"


@cache
def routing(layers: int = LAYERS, vocab: int | None = None) -> Trace:
    """Return the experts ``[T, L, 8]`` that model ``LIKE`` needs to decode all of ``TEXT``."""
    config, trace = copy.deepcopy(synthesize.CONFIGS[LIKE]), recorded_trace(TEXT)
    tiny = json.loads(shipped("models", "tiny-moe", "config.json").read_text())
    vocab = vocab or tiny["text_config"]["vocab_size"]
    config["text_config"] |= {"vocab_size": vocab, "num_hidden_layers": layers}
    tensors, config = synthesize.plan(config)
    return by_token.Routers(config, tensors, trace, seed=0).routing.route(trace.tokens)


def told(samples: DataFrame) -> DataFrame:
    """Add this notebook's columns to a bench's samples, and drop the rows of the resident model.

    The columns are ``reads`` (how experts outside slots are read), ``slots``, ``cache`` (in words),
    ``ms`` (of a token), ``wait_ms`` (a token's wait for reads), and the percentages of experts that
    were found in slots, in the page cache and on disk.
    """
    out = samples[samples["mode"] != "resident"].copy()
    without = out["mode"] == "buffers"
    out["reads"] = np.select([without, out.direct.eq(True)], [NO_SLOTS, PAST], THROUGH)
    slots = out.slots.mask(without, 0).astype(float)
    out["slots"] = slots.groupby(out.variant).transform("median")  # slots vary between runs
    out["cache"] = out.slots.map("{:.0f} slots".format).mask(without, NO_SLOTS)
    out["ms"], out["wait_ms"] = out.token_s * 1e3, 1e3 * out.wait_s / out.decode_tokens
    needed = out.hits + out.misses
    out["slot_percent"] = 100 * out.hits / needed
    if "disk_nbytes" in out:
        brought = out.disk_nbytes / (out.bytes_read / out.misses) / needed  # in experts
        out["disk_percent"] = np.minimum(100 * brought, 100 - out.slot_percent)
        out["page_percent"] = 100 - out.slot_percent - out.disk_percent
    return out.sort_values("slots", kind="stable")


def machine_and_model(samples: DataFrame) -> tuple[Plan, Costs]:
    """Return the model's plan and the machine's costs, from a record of the script ``costs``."""
    return models.recorded(samples.attrs["settings"]), costs_of(samples)


def replayed(samples: DataFrame, plan: Plan, costs: Costs, trace: Trace | None = None) -> DataFrame:
    """Replay each measured setting that has slots and a memory limit; a row is a setting.

    Columns named ``replayed_...`` come from the replay; ``off`` is the replay's relative error.
    """
    trace, rows = trace or routing(), []
    kept = samples[~samples.killed & samples["reads"].isin((THROUGH, PAST))]
    for (limit_nbytes, name), part in kept.groupby(["limit_nbytes", "variant"], sort=False):
        one, tokens = part.iloc[0], int(part.decode_tokens.iloc[0])
        skip = int(one.prompt_tokens) + len(one.tokens) - 1 - tokens
        slots = int(one.slots)
        memory = max(limit_nbytes, plan.other_nbytes + slots * plan.facts.slot_nbytes)
        asked = [(slots, StreamConfig().policy, one.reads == PAST)]
        text = trace[: skip + tokens]
        (r,) = advice.replay_settings(plan, memory, text, costs, asked, skip).values()
        disk_nbytes = part.disk_nbytes.median() if "disk_nbytes" in part else 0.0
        row = {
            "variant": name,
            "limit_mb": limit_nbytes / 1e6,
            "slots": slots,
            "reads": one.reads,
            "ms": part.ms.median(),
            "replayed_ms": r.mean_s * 1e3,
            "hit_rate": part.hit_rate.median(),
            "replayed_hit_rate": r.app_hit_rate,
            "disk_MB": disk_nbytes / tokens / 1e6,
            "replayed_disk_MB": r.read_per_token / 1e6,
        }
        rows.append(row | {"off": row["replayed_ms"] / row["ms"] - 1})
    out = DataFrame(rows)
    out.attrs = samples.attrs
    return out
