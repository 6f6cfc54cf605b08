"""Runs the tests in parts, two at a time: a line for each, then what failed, then the sum.

    python tests/helpers/parts.py [--all] [PART ...]

``--all`` runs the slow tests too (conftest.py lists them), everything but the notebooks at full
size. What pytest says of a part is in build/test-PART.log.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {  # the longest first
    "notebooks": ["--nbmake", "--nbmake-timeout=600", "notebooks"],
    "streaming": ["tests/streaming", "tests/kernels"],
    "files": [*map(str, sorted(ROOT.glob("tests/test_*.py"))), "tests/server"],
    "lab": ["tests/lab"],
    "speculation": ["tests/speculation", "tests/replay"],
}
AT_ONCE = 2  # MLX uses one core for each on a CPU
FAST = {"MOELAB_FAST": "1", "MOELAB_FUZZ": "200"}
SAY_S = 60  # seconds between two lines about what still runs


def start(part: str, log: Path, with_slow: bool) -> subprocess.Popen:
    """Start pytest for a part; Ctrl-C does not reach it, ``end`` does."""
    command = [sys.executable, "-m", "pytest", *PARTS[part]]
    command += [] if with_slow else ["-m", "not slow"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    env |= FAST if part == "notebooks" or not with_slow else {}
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as out:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        return subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)


def result(log: Path, status: int) -> tuple[Counter, list[str]]:
    """How many tests of a part passed, failed and were skipped, and a line for each that failed."""
    lines = log.read_text(errors="replace").rpartition("short test summary")[2].splitlines()
    sums = [line for line in lines if re.search(r"\d (passed|failed|skipped|error).* in \d", line)]
    counts = Counter()
    for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", "".join(sums[-1:])):
        counts["failed" if what == "error" else what] += int(number)
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if status and (status not in (1, 2) or not counts["failed"]):  # 2: a file is damaged
        counts["failed"] += 1
        failed.append(f"pytest ended with status {status}: {''.join(lines[-1:])}")
    return counts, failed


def end(processes: list[subprocess.Popen]) -> None:
    """End parts that still run, with the processes that they started."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(OSError):  # none is left
            os.killpg(process.pid, signal.SIGKILL)


def told(counts: Counter) -> str:
    """The counts in words."""
    return ", ".join(f"{counts[what]} {what}" for what in ("passed", "failed", "skipped"))


def main(*words: str) -> int:
    """Run parts of the tests; returns whether a test failed."""
    waiting = [word for word in words if word != "--all"] or [*PARTS]
    if unknown := {*waiting} - {*PARTS}:
        sys.exit(f"expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    running, total, failures, said = {}, Counter(), [], time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                part = waiting.pop(0)
                log = ROOT / "build" / f"test-{part}.log"
                running[part] = start(part, log, "--all" in words), log, time.monotonic()
                print(f"{part}: begins", flush=True)
            time.sleep(0.2)
            for part, (process, log, began) in [*running.items()]:
                if process.poll() is not None:
                    del running[part]
                    counts, failed = result(log, process.returncode)
                    total += counts
                    failures += [f"in build/{log.name}:", *failed] if failed else []
                    took = time.monotonic() - began
                    print(f"{part}: {told(counts)} in {took:.0f} s", flush=True)
            if running and time.monotonic() > said + SAY_S:
                said = time.monotonic()
                for part, (_, log, _) in running.items():
                    share = re.findall(r"\[ *(\d+%)\]", log.read_text(errors="replace"))
                    print(f"{part}: {share[-1] if share else '0%'}", flush=True)
    finally:
        end([process for process, *_ in running.values()])
    print(*failures, told(total), sep="\n")
    return total["failed"] > 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
