"""Compare speeds that others publish, and our own, with what the planner predicts.

    python data/recipes/published.py
    python data/recipes/published.py settings    several settings of a machine, and the planned one
    python data/recipes/published.py macs        plans for Macs, which the README shows
    python data/recipes/published.py own         our own speeds, and plans with measured costs

Nothing is measured: the tables are computed and printed.

The rows are those of ``data/published.csv``. Three things were fixed before ``fit`` and
``fit_zipf`` (of this file at 6fe0031) fitted the planner's constants: which rows count
(``why_not``), which sources are for the fit and which for judging the planner (``side``), and how
the planner is judged (``by_source``, ``GOALS``).

The column ``verified`` says ``record read`` (the authors' dated records or benchmark pages),
``claim`` (a thread or a README) or ``not read again`` (from an earlier list of ours). ``ssd_from``
names the source of the SSD's rate; ``contradicts`` names a row with another figure. Figures are
those of the authors. If a field is empty, the source does not state it.
"""

import hashlib
import re
import sys
from itertools import product

import numpy as np
import pandas as pd

from moelab.configs import CONFIGS, one_of
from moelab.lab import records
from moelab.lab.experiments import page_cache
from moelab.lab.experiments.plan import forecast
from moelab.lab.models import named
from moelab.replay.machine import CHIPS, Machine, typical_trace
from moelab.replay.pagecache import replay
from moelab.shipped import shipped

# The largest factors allowed on sources that the planner was not fitted to. A factor is the larger
# of predicted / published and published / predicted; a source's factor is the median over its rows.
GOALS = {"median": 1.25, "four of five": 1.6, "worst": 2.0}
# Sources by one author, or of one thread, count as one source.
ONE_SOURCE = {"z-lab issue 91": "SwiftLM", "mlx-swift-lm issue 124": "SwiftLM"}
# A model's name in the rows: its name in ``moelab.plan``, if that is not the same in lower case
NAMES = {
    "Qwen3.6-35B-A3B": "qwen3.5-35b-a3b",
    "Gemma4-26B-A4B": "gemma-4-26b-a4b",
    "GLM-5.2": "glm-5",
    "GLM-5.2 744B": "glm-5",
    "Kimi-K3 2.78T": "kimi-k3",
    "Laguna-S2.1 117B": "laguna-s-2.1",
    "OLMoE 7B": "olmoe-1b-7b",
}
MOST_CONTEXT = 8192  # tokens; with a longer context caches take much of a token's time
# Methods whose arithmetic is not a streaming engine's, or whose answers are not the model's.
OTHER_METHODS = ("serial", "TurboQuant", "skipped", "top-p", "mmap")
OTHER_DEVICES = ("RTX", "Vulkan", "phone")
# Cores of computers that are not Macs
CORES = {"4 vCPU Xeon 2.8 GHz VM": 4, "Ryzen AI Max+ 395 (Strix Halo)": 16}
# GB/s of a chip's slower version, by the GB of its memory
SLOWER = {("M4 Max", 36): 410, ("M5 Max", 36): 460, ("M3 Max", 36): 300}
TOKENS = 400  # tokens of the trace; the first half only fills the caches
# A row's prediction depends on these columns.
SETTING = ["model", "bits", "top_k", "machine", "ram_gb", "ssd_gb_s"]
SETTING += ["slots_or_cache", "slots", "held_gb", "hit_rate"]


def rows():
    """Read the table of published speeds; add ``config``, ``group``, ``side`` and ``why_not``."""
    table = pd.read_csv(shipped("published.csv"), dtype=str, keep_default_na=False)
    numbers = ["ram_gb", "ssd_gb_s", "top_k", "held_gb", "hit_rate", "tok_s", "context"]
    table[numbers] = table[numbers].apply(pd.to_numeric)
    table["config"] = [NAMES.get(name, name.lower()) for name in table.model]
    table["group"] = table.source.map(group)
    table["side"] = table.group.map(side)
    # The slots in each layer, where a row states them
    said = table.slots_or_cache.str.extract(r"^(\d+) (?:slots|experts a layer|a layer)")[0]
    table["slots"] = said.astype(float)
    table["why_not"] = table.apply(why_not, axis=1)
    return table


def group(source):
    """Return the group that this source belongs to: sources of one author or of one thread."""
    if source.startswith("mlx-lm"):  # issues and pull requests of many authors
        return source
    return ONE_SOURCE.get(source) or re.split(r" (?:README|docs|PR|issue)", source)[0]


def side(group):
    """Return ``fit`` or ``left out``, by a hash of the source's name alone."""
    return "left out" if hashlib.sha256(group.encode()).digest()[0] % 2 else "fit"


def why_not(row):
    """Return why a row does not count; an empty text if the row counts."""
    stated = row.held_gb == row.held_gb or row.slots == row.slots
    stated |= row.slots_or_cache == "page cache"
    in_memory = row.slots_or_cache == "all" or row.hit_rate == 1
    device = f"{row.machine} {row.method}"
    about = f"{row.method} {row.note}"
    reasons = {
        "a draft": not row.draft.startswith("none"),
        "the model's shapes are not known": row.config not in CONFIGS,
        "not a Mac's GPU or a computer's CPU": any(word in device for word in OTHER_DEVICES),
        "another method": any(word in about for word in OTHER_METHODS),
        "a long context": row.context > MOST_CONTEXT,
        "its source was not found again": row.verified == "not read again",
        "bits or machine not stated": not row.bits or not row.machine or row.ram_gb != row.ram_gb,
        "memory for experts not stated": not (stated or in_memory),
        "the SSD's rate is not known": row.ssd_gb_s != row.ssd_gb_s and not in_memory,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def by_source(table):
    """Tabulate how far the predicted speeds are from each source's published ones."""
    off = factor(table.predicted_tok_s, table.tok_s)
    found = table.assign(factor=off).groupby("group")
    sources = {"side": found.side.first(), "n": found.size(), "factor": found.factor.median()}
    return pd.DataFrame(sources | {"worst": found.factor.max()}).sort_values(["side", "factor"])


def factor(a, b):
    """Divide the larger of two speeds by the smaller."""
    return np.exp(abs(np.log(a / b)))


def reached(sources):
    """Compute the figures that ``GOALS`` limits, from the sources that the fit left out."""
    off = sources[sources.side == "left out"].factor
    found = off.median(), off.quantile(0.8), off.max()
    return dict(zip(GOALS, map(float, found)))


def machine_of(row):
    """Return the machine that a row was measured on."""
    ram, disk = row.ram_gb * 1e9, (row.ssd_gb_s if row.ssd_gb_s == row.ssd_gb_s else 1.0) * 1e9
    # A machine's name may say its cores and its memory's rate: "Epyc (64 cores, 205 GB/s)".
    cores, rate = (re.search(rf"([\d.]+) {unit}", row.machine) for unit in ("cores", "GB/s"))
    rate = float(rate[1]) * 1e9 if rate else np.inf
    if cores or row.machine in CORES:
        return Machine.cpu(ram, disk, int(cores[1]) if cores else CORES[row.machine], rate)
    if np.isinf(rate):
        chip = one_of(CHIPS, row.machine.split(" (")[0], "N cores, GB/s or ")
        rate = SLOWER.get((chip, row.ram_gb), CHIPS[chip]) * 1e9
    return Machine.mac(row.ram_gb * 2**30, disk, rate)


def plan_of(row):
    """Plan a row's model."""
    top_k = None if row.top_k != row.top_k else int(row.top_k)
    return named(row.config, bits=int(row.bits[0]), top_k=top_k)


def _held(row, plan):
    """Return how many experts of each layer were in memory, as a row states it."""
    if row.slots_or_cache == "all" or row.hit_rate == 1:
        return plan.num_experts
    if row.held_gb == row.held_gb:
        one = plan.facts.num_layers * plan.facts.expert_nbytes
        return min(plan.num_experts, int(row.held_gb * 1e9 / one))
    return 0 if row.slots != row.slots else min(plan.num_experts, int(row.slots))


def predict(row):
    """Predict a token's time with a row's model, machine and slots, by a replay."""
    plan, machine = plan_of(row), machine_of(row)
    facts, (L, K, E) = plan.facts, plan.facts.shape
    one, held = L * facts.expert_nbytes, _held(row, plan)
    other = facts.checkpoint_nbytes - one * E
    slots, policy = (held, "lru") if held >= K else (K, "none")
    arrays = 0 if row.slots_or_cache == "page cache" else plan.other_nbytes + held * one
    costs = machine.costs(facts, arrays)
    costs = costs.without_reads() if slots == E else costs
    # The replay has the row's number of slots; the page cache gets the rest of the memory.
    memory = max(machine.memory_nbytes, other + slots * one)
    sizes = {"expert_nbytes": facts.expert_nbytes, "other_nbytes": other}
    trace = typical_trace(facts, TOKENS)
    return replay(trace, memory, slots, policy, costs=costs, skip=TOKENS // 2, **sizes)


def counted():
    """Return the rows that count."""
    table = rows()
    return table[table.why_not == ""]


def predicted(table):
    """Add ``predicted_tok_s`` to rows; rows of equal settings share a prediction."""
    of = table.groupby(SETTING, dropna=False).ngroup()
    speeds = {n: predict(part.iloc[0]).tok_s for n, part in table.groupby(of)}
    return table.assign(predicted_tok_s=of.map(speeds))


# ``settings`` compares rows that are equal in these columns.
SAME = ["group", "side", "machine", "ram_gb", "model", "bits", "top_k", "method", "draft"]
SAME += ["prompt_tokens", "context"]


def settings(groups=None):
    """Tabulate settings that one source measured on the same Mac, with the same model and method.

    ``groups`` names groups of sources (None: all). ``best_over`` is the fastest setting's speed
    divided by this setting's. ``planned`` marks the setting nearest to the plan's slots, if a plan
    fits.
    """
    table = rows()
    known = table.machine.str.split(" (", regex=False).str[0].isin(CHIPS)
    known &= table.config.isin(CONFIGS) & table.bits.str.match(r"\d") & table.ram_gb.notna()
    known &= (table.held_gb.notna() | table.slots.notna()) & table.group.isin(groups or table.group)
    table = table[known]
    table = table.assign(holds=[_held(row, plan_of(row)) for _, row in table.iterrows()])
    found = []
    for _, part in table.groupby(SAME, dropna=False, sort=False):
        each = part.drop_duplicates("holds").set_index("holds", drop=False)
        each = each.assign(tok_s=part.groupby("holds").tok_s.median()).sort_index()
        planned = _nearest(each.holds, each.iloc[0])
        for holds, one in each.iterrows() if len(each) > 1 else ():
            has_rate = one.ssd_gb_s == one.ssd_gb_s
            found.append(
                {name: one[name] for name in SAME}
                | {"slots": holds, "of": plan_of(one).num_experts, "planned": holds == planned}
                | {"published_tok_s": one.tok_s, "best_over": each.tok_s.max() / one.tok_s}
                | {"predicted_tok_s": predict(one).tok_s if has_rate else float("nan")}
            )
    return pd.DataFrame(found)


def _nearest(holds, row):
    """Return the number of held experts that is nearest to a row's plan; None if no plan fits."""
    try:
        plan = named(row.config, machine_of(row).most, int(row.bits[0]))
    except ValueError:
        return None
    return abs(holds - plan.slots).idxmin()


# Macs (GB, chip, GB/s of the SSD) and models of the table ``macs``.
MACS = (16, "M4", 2.9), (24, "M4", 3.4), (32, "M5", 6.0), (64, "M5 Pro", 12.8)
PLANNED = "gpt-oss-20b", "qwen3.5-35b-a3b", "gpt-oss-120b", "qwen3.5-122b-a10b"


def macs():
    """Tabulate slots and speeds of plans for Macs."""
    found = []
    for (ram, chip, ssd), name in product(MACS, PLANNED):
        machine = Machine.mac(ram * 2**30, ssd * 1e9, CHIPS[chip] * 1e9)
        plan = named(name, machine.most)
        speed = 1 / forecast(name, machine, slots=plan.slots).advice.token_s
        row = {"slots": plan.slots, "of": plan.num_experts, "plan_tok_s": speed}
        found.append({"variant": f"{chip}, {ram} GB", "model": name} | row)
    return pd.DataFrame(found)


def speeds():
    """Tabulate how far the predicted speeds are from the published ones."""
    sources = by_source(predicted(counted()))
    return f"{sources.round(2).to_string()}\n\nleft out: {reached(sources)}"


# Our own speeds: the place of measurement, its records of costs and of speeds, number of layers.
OWN = (
    ("2 cores, 4 layers", "cpu_costs_35b", "cpu_slots_478", 4),
    ("2 cores, 4 layers", "cpu_costs_35b", "cpu_slots_956", 4),
    ("2 cores, 4 layers", "cpu_costs_35b", "cpu_slots_1530", 4),
    ("2 cores, 40 layers", "cpu_costs_35b_full", "cpu_slots_35b_full", 40),
)
FULL_VOCABULARY = 248_320


def own():
    """Tabulate our own speeds beside the speeds planned from the same machine's costs."""
    rows = []
    for where, costs, speeds, layers in OWN:
        plan, found = page_cache.machine_and_model(records.read(costs))
        samples = records.read(speeds)
        # If a record does not say how experts were read, the engine chose.
        samples = samples if "direct" in samples else samples.assign(direct=found.reads_direct)
        trace = page_cache.routing(layers, FULL_VOCABULARY if layers == 40 else None)
        for one in page_cache.replayed(page_cache.told(samples), plan, found, trace).itertuples():
            variant = f"{one.limit_mb / 1e3:.2g} GB, {one.slots} slots, {one.reads}"
            rows.append((where, variant, 1e3 / one.ms, 1e3 / one.replayed_ms))
    out = pd.DataFrame(rows, columns=["where", "variant", "measured_tok_s", "planned_tok_s"])
    return out.assign(factor=factor(out.planned_tok_s, out.measured_tok_s))


def main(what="speeds"):
    found = {"speeds": speeds, "settings": settings, "macs": macs, "own": own}[what]()
    print(found if isinstance(found, str) else found.round(2).to_string())


if __name__ == "__main__":
    main(*sys.argv[1:])
