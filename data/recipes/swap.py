"""Does a streamed model leave the swap by itself while another program takes memory?

    python data/recipes/swap.py OUT.json MODEL LIMIT TAKEN SECONDS ROUNDS

``LIMIT`` and ``TAKEN`` are bytes. Each round runs the model with and without moelab's watch on
swap, in a cgroup that may swap to a file. From 10% to 60% of the time another program in the group
takes ``TAKEN`` bytes in ten steps, and locks these bytes against swapping.

The model does not see the group's limit, as in a container whose pod has the limit. So free memory
looks sufficient to the model while the model is swapped, as on a Mac. This script needs root.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from moelab import load
from moelab.lab import limit, records
from moelab.lab.models import folder
from moelab.lab.texts import PROMPTS
from moelab.streaming import room
from moelab.streaming.session import session_of

STEPS, WARMUP = 10, 60  # steps in which memory is taken; tokens before the timed ones
NEW_CGROUPS = 0x02000000  # flag of unshare(2): the process sees its own cgroup as the root
VARIANTS = "with the watch", "without it"


class NoSwap(OSError):
    """Raised where a process may not swap to a file of its own."""


@contextmanager
def swapping(nbytes, swap_nbytes):
    """Make a cgroup (``limit.Prepared``) of ``nbytes`` memory that swaps to a file of its own."""
    with TemporaryDirectory(prefix="moelab-swap-") as here:
        file = Path(here, "swap")
        made = ["fallocate", "-l", str(swap_nbytes)], ["chmod", "600"], ["mkswap"], ["swapon"]
        try:
            try:
                for words in made:
                    subprocess.run([*words, file], capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", None) or error
                raise NoSwap(f"this process may not swap to a file: {said}") from None
            with limit.limited(nbytes) as prepared:
                if prepared.group is None:
                    raise NoSwap(f"{prepared.how} makes no cgroup that may swap")
                swaps = prepared.group / limit.FILES[prepared.how][1]
                if not swaps.exists():
                    raise NoSwap("this kernel's cgroups do not count swap")
                swaps.write_text("60" if prepared.how == limit.V1 else "max")
                yield prepared
        finally:  # also after Ctrl-C: a file that still serves as swap cannot be deleted
            with suppress(OSError):  # this system has no swapoff
                subprocess.run(["swapoff", file], capture_output=True)


@contextmanager
def started(prepared, *words, hidden=False):
    """Start this script in a cgroup, with arguments; ``hidden`` hides the cgroup's limit."""

    def before_exec():
        prepared.before_exec()
        if hidden and ctypes.CDLL(None).unshare(NEW_CGROUPS):
            os._exit(os.EX_NOPERM)

    argv, pipes = [sys.executable, __file__, *map(str, words)], {"stdin": -1, "stdout": -1}
    with subprocess.Popen(argv, text=True, bufsize=1, preexec_fn=before_exec, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # the process was killed before it read all lines
                process.stdin.close()


def swapped_nbytes():
    """Return how many bytes of this process are in swap."""
    return int(Path("/proc/self/status").read_text().partition("VmSwap:")[2].split()[0]) * 1024


def decode(path, variant, seconds, row_s, pause_s=0.0):
    """Decode greedily for ``seconds``, and print a row every ``row_s`` seconds."""
    if variant == VARIANTS[1]:
        room.swapped_s = lambda: None
    model, tokenizer = load(path)
    cache, y = make_prompt_cache(model), mx.array(tokenizer.encode(PROMPTS[0]))

    def token(y):
        y = mx.argmax(model(y[None], cache=cache)[:, -1], axis=-1)
        mx.eval(y)
        return y

    for _ in range(WARMUP):
        y = token(y)
    begin = last = now = time.perf_counter()
    tokens, faults = 0, getrusage(RUSAGE_SELF).ru_majflt
    while now < begin + seconds:
        time.sleep(pause_s)
        y, tokens, now = token(y), tokens + 1, time.perf_counter()
        if now - last >= row_s:
            row = {"second": now - begin, "decode_tokens": tokens, "decode_s": now - last}
            before, faults = faults, getrusage(RUSAGE_SELF).ru_majflt
            row |= {"slots": session_of(model).room.slots, "faults": faults - before}
            print(json.dumps(row | {"swapped_nbytes": swapped_nbytes()}), flush=True)
            tokens, last = 0, now


def take(nbytes):
    """Take and lock ``nbytes`` of memory for each line of stdin, until the process is killed."""
    held, libc = [], ctypes.CDLL(None)
    while sys.stdin.readline():
        held.append(np.ones(nbytes, np.uint8))
        if libc.mlock(held[-1].ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(nbytes)):
            sys.exit("mlock: this process may not lock memory")


def rows_of(prepared, path, variant, taken, seconds):
    """Run one variant in processes of its own; return its rows."""
    rows, asked = [], 0
    with (
        started(prepared, "decode", path, variant, seconds, 1.0, hidden=True) as model,
        started(prepared, "take", taken // STEPS) as other,
    ):
        for line in model.stdout:
            rows.append(json.loads(line))
            due = (rows[-1]["second"] / seconds - 0.1) / 0.5 * STEPS
            while asked < min(due, STEPS):
                if other.poll() is not None:
                    raise OSError(f"the other program ended ({other.returncode}): take less")
                other.stdin.write("more\n")
                asked += 1
    if not rows:
        raise NoSwap("the model did not start, or may not hide its cgroup from itself")
    return rows


def main(out, path, nbytes, taken, seconds, rounds):
    path, rows = folder(path), []
    nbytes, taken, seconds = int(nbytes), int(taken), float(seconds)
    settings = {"model": path.name, "limit_nbytes": nbytes, "taken_nbytes": taken}
    settings |= {"seconds": seconds, "hidden": True, "runs": int(rounds)}
    running = records.Running("swap", settings)
    for i in range(int(rounds)):
        for variant in VARIANTS[:: 1 if i % 2 else -1]:
            with swapping(nbytes, 2 * taken) as prepared:
                found = rows_of(prepared, path, variant, taken, seconds)
            rows += [{"variant": variant, "round": i} | row for row in found]
    made = running.table(rows)
    columns = ["tok_s", "slots", "faults", "swapped_nbytes"]
    tenths = made.assign(tenth=made.second * 10 // seconds)
    shown = tenths.pivot_table(columns, "tenth", "variant", "median")
    records.print_and_save(shown.round(1).to_string(), made, out)


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "decode":
        decode(*words[:2], *map(float, words[2:]))
    elif verb == "take":
        take(*map(int, words))
    else:
        main(verb, *words)
