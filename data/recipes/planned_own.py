"""Our own speeds beside what a plan with costs of the same machine says of them.

    python data/recipes/planned_own.py OUT.json

The record is computed from others; nothing is measured.
"""

import sys

import numpy as np
import pandas as pd

from moelab.lab import records
from moelab.lab.experiments import page_cache

# Where, and the records of the machine's costs and of speeds by slots; layers of the model.
OWN = (
    ("2 cores, 4 layers", "cpu_costs_35b", "cpu_slots_478", 4),
    ("2 cores, 4 layers", "cpu_costs_35b", "cpu_slots_956", 4),
    ("2 cores, 4 layers", "cpu_costs_35b", "cpu_slots_1530", 4),
    ("2 cores, 40 layers", "cpu_costs_35b_full", "cpu_slots_35b_full", 40),
    ("H100, 4 layers", "cuda_costs_35b", "cuda_host_routed_35b", 4),
)
FULL_VOCABULARY = 248_320


def own():
    """Speeds of our own, beside those that follow from costs measured on the same machine."""
    rows = []
    for where, costs, speeds, layers in OWN:
        sizes, found = page_cache.machine_and_model(records.read(costs))
        samples = records.read(speeds)
        # If a record does not say how to read, the engine chose.
        usual = {"direct": found.reads_direct, "limit_nbytes": float("inf")}
        samples = samples.assign(**{n: v for n, v in usual.items() if n not in samples})
        trace = page_cache.routing(layers, FULL_VOCABULARY if layers == 40 else None)
        for one in page_cache.replayed(page_cache.told(samples), sizes, found, trace).itertuples():
            memory = f"{one.limit_mb / 1e3:.2g} GB" if one.limit_mb < float("inf") else "no limit"
            variant = f"{memory}, {one.slots} slots, {one.reads}"
            rows.append((where, variant, 1e3 / one.ms, 1e3 / one.replayed_ms))
    out = pd.DataFrame(rows, columns=["where", "variant", "measured_tok_s", "planned_tok_s"])
    return out.assign(factor=np.exp(abs(np.log(out.planned_tok_s / out.measured_tok_s))))


def main(out):
    running = records.Running("own", {"records": [speeds for _, _, speeds, _ in OWN]})
    samples = running.table(own().to_dict("records"))
    text = samples.groupby("where", sort=False).factor.describe().round(2).to_string()
    records.print_and_save(text, samples, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
