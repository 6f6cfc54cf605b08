"""A dense and an MoE model of the same size under MLX's settings of command buffers, on a GPU.

    python data/recipes/buffers.py OUT.json

Notebook 01 reads the record. MLX reads these settings once, so each has a process of its own.
"""

import json
import os
import subprocess
import sys

from moelab.lab import records
from moelab.lab.experiments.dispatch import dense_and_moe, loop

AHEAD, ROUTING_READ = "next token scheduled ahead", "every layer's routing read"
SETTINGS = {
    "as it is": {},
    "1 a buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "5 a buffer": {"MLX_MAX_OPS_PER_BUFFER": "5"},
    "1000 a buffer": {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "100000"},
    "no CUDA graphs": {"MLX_USE_CUDA_GRAPHS": "0"},
}


def here(tokens=48, rounds=10):
    """The rows of this process, whose environment has a setting."""
    import numpy as np

    models, how = dense_and_moe(), {AHEAD: {}, ROUTING_READ: {"listen": lambda x, i: np.array(i)}}
    variants = {
        (name, way): lambda _, name=name, way=way: (
            loop(models[name], tokens, **how[way]) | {"model": name, "loop": way}
        )
        for name, way in (("dense", AHEAD), ("moe", AHEAD), ("moe", ROUTING_READ))
    }
    made = records.interleave("loops", variants, rounds, warmup=2)
    return records.as_json(made.drop(columns="variant"))["rows"]


def main(out):
    if out == "here":
        return print(json.dumps(here()))
    running, rows = records.Running("buffers"), []
    for setting, environment in SETTINGS.items():
        words, environment = [sys.executable, __file__, "here"], os.environ | environment
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True)
        rows += [
            {"variant": f"{row['model']}, {setting}", "setting": setting} | row
            for row in json.loads(done.stdout)
        ]
    records.save(out, running.table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
