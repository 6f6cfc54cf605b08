"""Runs the tests in parts, three at a time. Prints a line for each part, what failed, and the sum.

    python tests/helpers/parts.py [--all] [PART ...]

``--all`` also runs the slow tests, which conftest.py lists, and runs all parts at full size except
the notebooks. What pytest says of a part is in build/test-PART.log.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {  # the longest first
    "streaming": ["tests/streaming"],
    "notebooks": ["--nbmake", "--nbmake-timeout=600", "notebooks"],
    "files": [*map(str, sorted(ROOT.glob("tests/test_*.py")))],
    "server": ["tests/server"],
    "speculation": ["tests/speculation", "tests/replay", "tests/kernels"],
    "lab": ["tests/lab"],
}
AT_ONCE = 3  # more than there are cores: tests also wait for processes, reads, clients
SAY_S = 60  # seconds between two lines about how far a part is
say = partial(print, end="", flush=True)  # whole lines, since several threads print


def run(part: str, with_slow: bool, started: list[subprocess.Popen]) -> tuple[Counter, str]:
    """How many tests of a part passed, failed and were skipped, and lines on those that failed."""
    words = [sys.executable, "-m", "pytest", "--durations=20", *PARTS[part]]
    words += [] if with_slow else ["-m", "not slow"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    if part == "notebooks" or not with_slow:
        env |= {"MOELAB_FAST": "1", "MOELAB_FUZZ": "100"}
    log, begin = ROOT / "build" / f"test-{part}.log", time.monotonic()
    log.parent.mkdir(exist_ok=True)
    say(f"{part}: begins\n")
    with log.open("w") as out:
        options = {"stdout": out, "stderr": out, "start_new_session": True}  # ``main`` ends it
        started.append(p := subprocess.Popen(words, cwd=ROOT, env=env, **options))
        while p.poll() is None:
            try:
                p.wait(SAY_S)
            except subprocess.TimeoutExpired:
                done = re.findall(r"\[ *(\d+%)\]", log.read_text(errors="replace"))
                say(f"{part}: {['0%', *done][-1]}\n")
    text = log.read_text(errors="replace").rpartition("short test summary")[2]
    total = "".join(re.findall(r"^=+ (.+ in \d.*) =+$", text, re.M)[-1:])
    counts = Counter({w: int(n) for n, w in re.findall(r"(\d+) (passed|skipped)", total)})
    failed = re.findall(r"^(?:FAILED|ERROR) .*", text, re.M)
    if p.returncode and (p.returncode not in (1, 2) or not failed):
        failed.append(f"pytest ended with status {p.returncode}: {''.join(text.splitlines()[-1:])}")
    counts["failed"] = len(failed)
    say(f"{part}: {told(counts)} in {time.monotonic() - begin:.0f} s\n")
    return counts, "\n".join([f"in build/{log.name}:", *failed] if failed else [])


def told(counts: Counter) -> str:
    """The counts in words."""
    return ", ".join(f"{counts[what]} {what}" for what in ("passed", "failed", "skipped"))


def main(*words: str) -> int:
    """Run parts of the tests; returns 1 if a test failed."""
    parts = [word for word in words if word != "--all"] or [*PARTS]
    if unknown := {*parts} - {*PARTS}:
        sys.exit(f"expected parts of {', '.join(PARTS)}, got {', '.join(unknown)}")
    started = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            runs = pool.map(partial(run, with_slow="--all" in words, started=started), parts)
            counts, failed = zip(*runs)
        except KeyboardInterrupt:
            for process in started:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                with suppress(OSError):  # kill processes that the part left (notebooks)
                    os.killpg(process.pid, signal.SIGKILL)
            raise
    total = sum(counts, Counter())
    print(*filter(None, failed), told(total), sep="\n")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
