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
from pathlib import Path

import fuzzing

import moelab

CASES = int(os.environ.get("MOELAB_FUZZ", 3000))
WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
GOOD = {"same text", "as mlx-lm", "loads", "refused"}


def test_damaged_files(tmp_path):
    fuzzing.write_bases(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(Path(moelab.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    outs = [(tmp_path / f"{i}.jsonl", tmp_path / f"{i}.txt") for i in range(WORKERS)]
    workers, records = [], []
    for i, (out, errors) in enumerate(outs):
        cases = map(str, (i, WORKERS, CASES))
        command = [sys.executable, fuzzing.__file__, str(tmp_path), *cases]
        with out.open("w") as stdout, errors.open("w") as stderr:
            workers.append(subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env))
    for worker, (out, errors) in zip(workers, outs):
        code = worker.wait()
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert not code, f"ended with {code} in {lines[-1:]}: {errors.read_text()[-2000:]}"
        records += [line for line in lines if "outcome" in line]
    counts = collections.Counter((r["kind"], r["outcome"]) for r in records)
    print(*(f"\n{kind:14} {outcome:12} {n}" for (kind, outcome), n in sorted(counts.items())))
    assert sorted(r["case"] for r in records) == list(range(CASES))
    bad = [r for r in records if r["outcome"] not in GOOD]
    shown = [[r["case"], r["what"][:200], r["outcome"], r["message"][:300]] for r in bad[:10]]
    assert not bad, (len(bad), CASES, *shown)
    assert {kind for kind, _ in counts} == set(fuzzing.KINDS)
    assert sum(n for (_, outcome), n in counts.items() if outcome == "refused") > CASES / 3
