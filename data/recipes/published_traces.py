"""Make ``data/traces/published``: the routing of three models, as BigMoeOnEdge recorded it.

    git clone https://github.com/Helldez/BigMoeOnEdge
    python data/recipes/published_traces.py BigMoeOnEdge

The script reads files of one commit of that clone (a bare clone will do). See the traces' README.
"""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from moelab import DATA, Trace

COMMIT = "2d4f2b11db128cbe32da738ce114c0479542f458"
FOLDER = "docs/bench-data/2026-07-15-route-trace"
PROMPT = "Explain how a mixture-of-experts model decides which experts handle each token."
# The name of a new file: the name of its source file, and the model with its recorded top-k.
TRACES = {
    "qwen3-30b-a3b": ("qwen", "Qwen3-30B-A3B-Q4_K_M, top-6 in place of 8"),
    "gemma-4-26b-a4b": ("gemma", "gemma-4-26B-A4B-it-Q4_K_M, top-6 in place of 8"),
    "gpt-oss-120b": ("gptoss", "gpt-oss-120b-Q4_K_M, top-2 in place of 4"),
}


def committed(clone, path) -> str:
    """Read a file of the commit."""
    return subprocess.check_output(["git", "-C", clone, "show", f"{COMMIT}:{path}"], text=True)


def decoded(text) -> tuple[np.ndarray, int]:
    """Parse a route trace: return decoded tokens' experts ``[T, L, K]``, in router order, and E."""
    about = next(line for line in text.splitlines() if line.startswith("# model="))
    sizes = dict(word.split("=") for word in about.split() if word.count("=") == 1)
    L, E, K = (int(sizes[name]) for name in ("n_layer", "n_expert", "n_expert_used"))
    rows = pd.read_csv(io.StringIO(text), comment="#").query("phase == 1")
    chosen = rows.pivot(index="step", columns=["layer", "slot"], values="expert").sort_index(axis=1)
    experts = chosen.to_numpy().reshape(-1, L, K)
    assert (np.diff(chosen.index) == 1).all(), "a token is missing"
    assert (experts < E).all(), "a token has fewer than K experts in a layer"
    assert np.diff(np.sort(experts, axis=-1), axis=-1).all(), "a token has an expert twice"
    return experts.astype(int), E


def main(clone, out=DATA / "traces" / "published"):
    for name, (source, model) in TRACES.items():
        experts, E = decoded(committed(clone, f"{FOLDER}/{source}.route.csv"))
        T = len(experts)
        no_ids = np.zeros(T, np.int64)
        trace = Trace(experts, np.full(T, "decode"), no_ids, E, model, None, PROMPT)
        trace.save(Path(out) / f"{name}.npz")
        print(trace)
    (Path(out) / "LICENSE").write_text(committed(clone, "LICENSE"))


if __name__ == "__main__":
    main(*sys.argv[1:])
