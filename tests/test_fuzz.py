"""Thousands of damaged files: each gives the right text or one error of ours.

None ends the process or makes it hang. The cases are in ``helpers/fuzzing.py``. Run more of them:

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
TIMEOUT_S = 90  # for a case; the slowest takes a second
GOOD = {"same text", "as mlx-lm", "loads", "refused"}


def listen(bases, number, found):
    """Start a worker at case ``number`` and put the outcomes of its cases into ``found``.

    Returns:
        tuple[int, dict]: The first case that it has not done, and how the worker ended.
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
            timer = threading.Timer(TIMEOUT_S, process.kill)
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

    A worker that dies or hangs is replaced, and its case is tried once more, because the system
    may have killed or stopped the worker.
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
