"""Damaged files in great numbers: each gives the right text or one error of ours.

None ends the process or holds it up. The cases are in ``fuzzing.py``. More of them:

    MOELAB_FUZZ=5000 python -m pytest tests/test_fuzz.py
"""

import collections
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import fuzzing

import moelab

CASES = int(os.environ.get("MOELAB_FUZZ", 3000))
FIRST = int(os.environ.get("MOELAB_FUZZ_FIRST", 0))
WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
PATIENCE_S = 90  # without a word from a worker; the slowest case takes a second
GOOD = {"same text", "as mlx-lm", "loads", "refused"}


def listen(bases, number, found):
    """Have a new worker do case ``number`` and those after it, and put their outcomes into ``found``.

    Returns:
        tuple: The first case that it has not done, and how it ended there.
    """
    command = [sys.executable, fuzzing.__file__, bases, number, WORKERS, FIRST + CASES]
    root = str(Path(moelab.__file__).parents[1])
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"},
        )
        while True:
            timer = threading.Timer(PATIENCE_S, process.kill)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                break
            record = json.loads(line)
            number = record["case"]
            if "outcome" in record:
                found.put(record)
                number += WORKERS
        code = process.wait()
        process.stdout.close()
        errors.seek(0)
        message = errors.read().decode(errors="replace")[-1000:]
    outcome = "hangs" if code == -signal.SIGKILL else f"ends the process ({code})"
    return number, {"kind": "?", "what": "?", "outcome": outcome, "message": message}


def work(bases, number, found):
    """Put the outcome of cases ``number``, ``number + WORKERS`` ... into ``found``.

    A worker that dies, or says nothing for long, is replaced. The case is tried once more: the
    system may have killed or stopped the worker.
    """
    tried = None
    while number < FIRST + CASES:
        number, end = listen(bases, number, found)
        if number == tried:
            found.put({"case": number, **end})
            number += WORKERS
        tried = number


def test_damaged_files(tmp_path):
    fuzzing.write_bases(tmp_path)
    found = queue.Queue()
    workers = [
        threading.Thread(target=work, args=(tmp_path, FIRST + i, found)) for i in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    records = [found.get() for _ in range(found.qsize())]
    if "MOELAB_FUZZ_RECORD" in os.environ:
        Path(os.environ["MOELAB_FUZZ_RECORD"]).write_text("\n".join(map(json.dumps, records)))
    counts = collections.Counter((r["kind"], r["outcome"]) for r in records)
    print()
    print(
        *(f"{kind:13} {outcome:12} {n}" for (kind, outcome), n in sorted(counts.items())), sep="\n"
    )
    assert sorted(r["case"] for r in records) == list(range(FIRST, FIRST + CASES))
    bad = [r for r in records if r["outcome"] not in GOOD]
    text = "\n".join(
        f"case {r['case']}, {r['what'][:120]}: {r['outcome']}: {r['message'][:300]}"
        for r in bad[:10]
    )
    assert not bad, f"{len(bad)} of {CASES} cases:\n{text}"
    assert {kind for kind, _ in counts} == set(fuzzing.KINDS)
    assert sum(n for (_, outcome), n in counts.items() if outcome == "refused") > CASES / 3
