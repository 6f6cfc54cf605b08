"""Thousands of damaged files: each gives the right text or one error of ours.

None ends the process, makes it hang or leaves files open. ``helpers/fuzzing.py`` has the cases. Run
more of them:

    MOELAB_FUZZ=5000 python -m pytest tests/test_fuzz.py
"""

import collections
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import fuzzing

import moelab

CASES = int(os.environ.get("MOELAB_FUZZ", 3000))
WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
GOOD = {"same text", "as mlx-lm", "loads", "refused"}


def test_damaged_files(tmp_path):
    fuzzing.write_bases(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(Path(moelab.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}

    def work(i):
        command = [sys.executable, fuzzing.__file__, tmp_path, *map(str, (i, WORKERS, CASES))]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        code = done.returncode
        assert not code, f"ended with {code} in {lines[-1:]}: {done.stderr[-2000:]}"
        return [line for line in lines if "outcome" in line]

    with ThreadPoolExecutor(WORKERS) as threads:
        records = [*chain(*threads.map(work, range(WORKERS)))]
    counts = collections.Counter((r["kind"], r["outcome"]) for r in records)
    print(*(f"\n{kind:14} {outcome:12} {n}" for (kind, outcome), n in sorted(counts.items())))
    assert sorted(r["case"] for r in records) == list(range(CASES))
    bad = [r for r in records if r["outcome"] not in GOOD]
    shown = [[r["case"], r["what"][:200], r["outcome"], r["message"][:300]] for r in bad[:10]]
    assert not bad, (len(bad), CASES, *shown)
    assert {kind for kind, _ in counts} == set(fuzzing.KINDS)
    assert sum(n for (_, outcome), n in counts.items() if outcome == "refused") > CASES / 3
