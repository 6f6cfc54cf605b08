"""Notebook 03: slots against the page cache, measured by ``bench`` and replayed.

The records ``cpu_slots_LIMIT`` are of ``bench`` with ``--limits``, ``--direct`` and ``--feed``: a
number of slots, and how the experts that they miss are read. ``cpu_costs_35b`` (``lab costs``) has
what the replay needs of that machine, and the model's sizes.
"""

import copy
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import DATA, synthesize
from ...replay import advice, by_token
from ...replay.costs import Costs
from ...replay.locality import Locality
from ...replay.locality import synthesize as synthetic_trace
from ...replay.sizes import ModelSizes
from ...shipped import shipped
from ...streaming.residency.table import policy_of
from ...streaming.trace import Trace
from .. import charts, limit, records
from ..arguments import parse_modes
from . import bench
from .costs import costs_of

if TYPE_CHECKING:
    from pandas import DataFrame

LIKE, LAYERS, TEXT = "qwen3.5-35b-a3b", 4, "code"  # of the records' model; its text
# How experts outside slots are read. Those that are copied were read from the disk before, through
# the page cache.
COPIED, DIRECT = "copied from page cache", "past the page cache"
HOST = "copied from the host's memory"  # GPUs alone
NO_SLOTS = "no slots"
DIAL_POINTS = 9  # numbers of slots replayed for one setting of the sliders


def trace_of(text: str = TEXT) -> Trace:
    """Load a trace of ``data/traces``."""
    return Trace.load(shipped("traces", f"{text}.npz"))


@cache
def routing(layers: int = LAYERS, vocab: int | None = None) -> Trace:
    """The experts that the records' model routes its text to: ``[T, L, 8]``, all as decoded.

    ``synthesize`` wrote this routing into its routers, so no checkpoint is needed.
    """
    config, trace = copy.deepcopy(synthesize.CONFIGS[LIKE]), trace_of()
    tiny = json.loads(shipped("models", "tiny-moe", "config.json").read_text())
    vocab = vocab or tiny["text_config"]["vocab_size"]
    same = {"vocab_size": vocab, "num_hidden_layers": layers}
    config["text_config"] |= same
    tensors, config = synthesize.plan(config)
    return by_token.Routers(config, tensors, trace, seed=0).routing.route(trace.tokens)


# What was measured


def recorded(*limits_mb: int) -> "DataFrame":
    """The records of some limits as one table, with the columns of ``told``."""
    return records.together(
        {mb: told(records.read(f"cpu_slots_{mb}")) for mb in limits_mb}, "limit_mb"
    )


def told(samples: "DataFrame") -> "DataFrame":
    """Add this notebook's columns to a bench's samples, without the resident model's rows.

    They are ``reads`` (how experts outside slots are read), ``slots``, ``cache`` (in words), ``ms``
    of a token, ``wait_ms`` for reads, and the percentages of experts found in slots, in the page
    cache and on disk.
    """
    out = samples[samples["mode"] != "resident"].copy()
    without = out["mode"] == "buffers"
    host = out.variant.str.contains("source=host")
    kinds = [without, host, out.direct.eq(True)]
    out["reads"] = np.select(kinds, [NO_SLOTS, HOST, DIRECT], COPIED)
    out["slots"] = out.slots.mask(without, 0).astype(float)
    out["slots"] = out.groupby("variant").slots.transform("median")  # a plan's vary
    out["cache"] = out.slots.map("{:.0f} slots".format).mask(without, NO_SLOTS)
    out["ms"], out["wait_ms"] = out.token_s * 1e3, 1e3 * out.wait_s / out.decode_tokens
    needed = out.hits + out.misses
    out["slot_percent"] = 100 * out.hits / needed
    if "disk_nbytes" in out:
        brought = out.disk_nbytes / (out.bytes_read / out.misses) / needed  # experts
        out["disk_percent"] = np.minimum(100 * brought, 100 - out.slot_percent)
        out["page_percent"] = 100 - out.slot_percent - out.disk_percent
    return out.sort_values("slots", kind="stable")


def fastest(samples: "DataFrame") -> str:
    """Say in words which setting is the fastest."""
    medians = records.group(samples, "tok_s", ["reads", "slots"])["median"].astype(float)
    reads, slots = medians.idxmax()
    return f"{medians.max():.1f} tok/s with {slots:.0f} slots, {reads}"


def live(
    limits_mb: Sequence[int], slots: Sequence[int], experts: int, runs: int, tokens: int
) -> "DataFrame | None":
    """Repeat the records' experiment on this machine, with a small model of so many experts.

    None where memory cannot be limited, after printing why.
    """
    build, config = DATA.parent / "build", copy.deepcopy(synthesize.CONFIGS[LIKE])
    config["text_config"]["num_experts"] = experts
    build.mkdir(exist_ok=True)
    configs = parse_modes(",".join(f"fused/slots={n}" for n in slots))
    variants = bench.crossed(configs, [mb * 1_000_000 for mb in limits_mb], direct=(False, True))
    feed = shipped("traces", f"{TEXT}.npz")
    with tempfile.TemporaryDirectory(prefix="slots-", dir=build) as folder:
        path = synthesize.synthesize(
            Path(folder) / LIKE, LIKE, LAYERS, config=config, progress=False, routing=feed
        )
        try:
            return told(bench.measure(path, variants, None, tokens, runs, tokens, feed=feed))
        except limit.NoLimit as error:
            print(f"Nothing is measured here, only what was recorded and the replay. {error}")


# In replay


def machine_and_model(samples: "DataFrame") -> tuple[ModelSizes, Costs]:
    """The model's sizes and the machine's costs, from a record of ``lab costs``."""
    given = samples.attrs["settings"]
    known = {f.name: given[f.name] for f in fields(ModelSizes) if f.name in given}
    return ModelSizes(**known), costs_of(samples)


def replayed(
    samples: "DataFrame", sizes: ModelSizes, costs: Costs, trace: Trace | None = None
) -> "DataFrame":
    """Replay each setting that was measured; a row has measured and ``replayed_`` columns.

    It knows reads that are copied from the page cache, reads past it, and copies from the host's
    memory. Without a limit of memory the whole file is in the page cache.
    """
    trace, rows = trace or routing(), []
    kept = samples[~samples.killed & samples["reads"].isin((COPIED, DIRECT, HOST))]
    for (mb, name), part in kept.groupby(
        [kept.limit_nbytes.fillna(float("inf")) / 1e6, "variant"], sort=False
    ):
        one, tokens = part.iloc[0], int(part.decode_tokens.iloc[0])
        skip = int(one.prompt_tokens) + len(one.tokens) - 1 - tokens
        slots, given = int(one.slots), costs if mb < float("inf") else costs.all_warm()
        source = "host" if one.reads == HOST else "disk"
        given = costs.from_host() if source == "host" else given
        memory = max(mb * 1e6, sizes.other_nbytes + slots * sizes.slot_nbytes)
        setting = slots, policy_of("auto", source), one.reads == DIRECT
        part_of_trace = trace[: skip + tokens]
        (r,) = advice.replay_settings(sizes, memory, part_of_trace, given, [setting], skip).values()
        ms, disk = part.ms.median(), part.get("disk_nbytes", part.ms * 0).median() / tokens / 1e6
        rows.append(
            {
                **{"variant": name, "limit_mb": mb, "slots": slots, "reads": one.reads},
                **{"ms": ms, "replayed_ms": r.mean_s * 1e3, "off": r.mean_s * 1e3 / ms - 1},
                **{"hit_rate": part.hit_rate.median(), "replayed_hit_rate": r.app_hit_rate},
                **{"disk_MB": disk, "replayed_disk_MB": r.read_per_token / 1e6},
            }
        )
    out = records.pandas().DataFrame(rows)
    out.attrs = samples.attrs
    return out


def by_memory(
    routings: Mapping[str, tuple[Locality, Costs]],
    sizes: ModelSizes,
    percents: Sequence[int],
    tokens: int = 320,
    count: int = 7,
    seed: int = 0,
) -> "DataFrame":
    """Replay several numbers of slots in several sizes of memory (percent of the checkpoint's)."""
    rows = []
    for name, (locality, costs) in routings.items():
        trace = synthetic_trace(locality, tokens, sizes.L, sizes.E, sizes.K, seed)
        for percent in percents:
            memory = percent / 100 * sizes.checkpoint_nbytes
            slots = np.unique(np.linspace(sizes.K, sizes.fits(memory), count).astype(int)).tolist()
            ways = (False, True) if costs.reads_direct else (False,)
            asked = [(n, "lru", direct) for direct in ways for n in slots]
            found = advice.replay_settings(
                sizes, memory, trace, costs.without_arithmetic(), asked, tokens // 2
            )
            fewest_s = next(iter(found.values())).mean_s
            rows += [
                {
                    **{"routing": name, "percent": percent, "slots": s.slots},
                    **{"reads": DIRECT if s.direct else COPIED, "ms": r.mean_s * 1e3},
                    **{"disk_MB": r.read_per_token / 1e6, "of_fewest": r.mean_s / fewest_s},
                }
                for s, r in found.items()
            ]
    return records.pandas().DataFrame(rows)


def dial(
    sizes: ModelSizes, locality: Locality, costs: Costs, tokens: int = 320, seed: int = 0
) -> Callable[..., Any]:
    """Make the function behind the sliders, which replays a trace through slots and page cache.

    A byte takes its time on the disk; through the page cache, also that of a copy.
    """

    @cache
    def trace(skew):
        skewed = replace(locality, zipf=tuple(skew for _ in locality.zipf))
        return synthetic_trace(skewed, tokens, sizes.L, sizes.E, sizes.K, seed)

    def look(memory, slots, policy, skew, ssd, arithmetic):
        nbytes = sizes.checkpoint_nbytes * memory / 100
        most = sizes.fits(nbytes)
        if most < sizes.K:
            raise ValueError(
                f"{memory}% of the file: {sizes.K} slots do not fit beside the rest of the model. "
                "Take more memory."
            )
        mine, byte_s = min(max(slots, sizes.K), most), 1 / (ssd * 1e9)
        at = sorted({*np.linspace(sizes.K, most, DIAL_POINTS).astype(int).tolist(), mine})
        here = replace(
            costs.without_arithmetic(),
            **{"cold_s_per_byte": byte_s + costs.warm_s_per_byte, "direct_s_per_byte": byte_s},
            **{"overlap": 1.0, "direct_overlap": 1.0},
            expert_s=arithmetic * 1e-3 / (sizes.L * sizes.K),
        )
        play = partial(advice.replay_settings, sizes, nbytes, trace(skew), here)
        found = play([(n, policy, d) for d in (False, True) for n in at], tokens // 2)
        (none,) = play([(sizes.K, "none")], tokens // 2).values()
        ways = {False: COPIED, True: DIRECT}
        rows = [{"slots": s.slots, "reads": ways[s.direct], "ms": 1e3 * r.mean_s}
                for s, r in found.items()]  # fmt: skip
        chosen, best = (found[mine, policy, d] for d in (False, True)), min(rows, key=_ms)
        copied, past = chosen
        return charts.lines(
            records.pandas().DataFrame(rows),
            *("slots", "ms", "reads"),
            title=f"{mine} slots: {copied.mean_s * 1e3:.1f} ms a token, {past.mean_s * 1e3:.1f} "
            f"past the page cache; best {best['ms']:.1f} with {best['slots']}, {best['reads']}",
            axes=("slots in each layer", "ms a token"),
            finding=f"{copied.app_hit_rate:.0%} in a slot; {copied.page_nbytes / 1e6:.0f} MB of "
            f"page cache serve {np.nan_to_num(copied.page_hit_rate):.0%} of the rest; "
            f"{copied.read_per_token / 1e6:.1f} MB a token come from the SSD, "
            f"{past.read_per_token / 1e6:.1f} past the page cache.",
            note=f"replayed: {nbytes / 1e6:.0f} MB, {policy}, zipf {skew:.2f}, SSD {ssd:.1f} GB/s, "
            f"arithmetic {arithmetic} ms a token, overlapped",
            ceilings={"no slots: only the page cache": none.mean_s * 1e3},
        )

    return look


def _ms(row):
    return row["ms"]
