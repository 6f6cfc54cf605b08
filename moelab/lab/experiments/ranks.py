"""Experts divided over ranks of this machine: what a sum takes, how fast they decode, how they end.

    python -m moelab.lab.experiments.ranks exchange OUT.json            (on Linux)
    python -m moelab.lab.experiments.ranks divided OUT.json MODEL       (on Linux, memory limited)
    python -m moelab.lab.experiments.ranks ends OUT.json

The ranks share this machine's cores, memory bus and SSD. In ``divided`` each has a memory limit of
its own, its page cache included. Its slow SSD is simulated: each rank has one of its own, of which
bytes come at a fixed rate, so a layer waits until its reads would have taken that long.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from ... import DATA, StreamConfig
from ...speculation.target import vocabulary
from ...streaming.model import load_model
from ...streaming.ranks import joined
from ...streaming.session import session_of
from .. import limit, machine, oscache, ranks, records
from ..decode import decode

D, K = 2048, 8  # of Qwen3.5-35B-A3B
BLOCK = 20  # sums in one sample
SAMPLES = {2: 60, 4: 15}  # by ranks; four take their turns on two cores
NBYTES, SLOTS = 1_000_000_000, 32  # of each rank's memory, and slots in each layer
RATES = (None, 300e6, 100e6)  # bytes a second of a rank's SSD; None: this machine's
TOKENS, WARMUP, ROUNDS = 24, 24, 3
MODEL = DATA / "models" / "tiny-moe"
KILLED_AFTER = 12  # characters of the answer


def exchange_here(samples: int) -> dict[str, list[float]]:
    """In one rank: how many seconds a sum over the ranks takes, for each kind of sum.

    Args:
        samples (int): Of each, the mean of ``BLOCK`` sums.
    """
    group = joined()
    rows = {"token": mx.ones((1, 1, D)), "experts": mx.ones((K + 1, D))}
    mx.eval(rows)
    works = {f"sum of {name}": partial(mx.distributed.all_sum, x) for name, x in rows.items()}
    works["evaluation alone"] = lambda: rows["token"] + 1
    found = {name: [] for name in works}
    for i in range(samples + 2):
        for name, work in works.items():
            mx.eval(mx.distributed.all_sum(mx.array(1), group=group))  # begin together
            begin = time.perf_counter()
            for _ in range(BLOCK):
                mx.eval(work())
            if i >= 2:
                found[name].append((time.perf_counter() - begin) / BLOCK)
    return found


def slow(model, rate: float) -> None:
    """Let a model's layers wait as if their reads came at a rate, one after the other.

    Args:
        model (nn.Module): From ``load_model``.
        rate (float): Bytes a second.
    """
    reader, free = session_of(model).reader, [0.0]
    start, finish = reader.start, reader.finish

    def started(reads):
        nbytes = reads.nbytes if hasattr(reads, "nbytes") else sum(r.nbytes for r in reads)
        free[0] = max(free[0], time.perf_counter()) + nbytes / rate
        return start(reads)

    def finished(futures):
        finish(futures)
        time.sleep(max(0.0, free[0] - time.perf_counter()))

    reader.start, reader.finish = started, finished


def decode_here(path: str, rate: float | None) -> dict:
    """In one rank: decode the tokens of a fixed text, with whatever ranks there are.

    Args:
        path (str): A model.
        rate (float or None): Bytes a second of the simulated SSD; None for the real one.
    """
    mx.set_default_device(mx.cpu)
    config = StreamConfig(slots=SLOTS)
    model, _ = load_model(path, config, group=joined())
    with model:
        if rate:
            slow(model, rate)
        feed = np.random.default_rng(0).integers(0, vocabulary(model), WARMUP + TOKENS).tolist()
        disk = []  # bytes read from the SSD before and after

        def mark():
            disk.append(oscache.disk_read_nbytes())

        found = decode(model, feed[:4], TOKENS, WARMUP, before_clock=mark, feed=feed)
        mark()
        first = session_of(model).layers[0]
        experts = first.num_experts if first.owned is None else int(first.owned.sum())
    return {
        "tokens": found.tokens,
        "step_s": found.step_s,
        "experts": experts,
        "disk_nbytes": disk[1] - disk[0],
        "counters": asdict(found.counters),
    }


def _everywhere(n: int, work: str, *args, nbytes: int | None = None) -> list[dict]:
    """What ``work`` of this module returns in each of n ranks, each on a core of its own.

    More ranks than there are cores share them.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", __spec__.name, work, json.dumps(args)]
        commands = [
            ["taskset", "-c", str(cores[rank % len(cores)]), "env"]
            + [f"{name}={value}" for name, value in variables.items()]
            + argv
            for rank, variables in enumerate(ranks.environments(n, Path(folder)))
        ]
        with ThreadPoolExecutor(n) as threads:
            run = partial(limit.run, nbytes=nbytes, timeout_s=120)
            done = list(threads.map(run, commands))
    for rank, each in enumerate(done):
        if each.returncode:
            raise OSError(f"rank {rank} of {n}: {each.returncode}: {each.stderr[-2000:]}")
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]


def exchange(samples: Mapping[int, int] = SAMPLES) -> dict:
    """A sum over the ranks; the samples are rank 0's.

    Args:
        samples (Mapping[int, int]): How many, by the number of ranks.
    """
    found = {str(n): _everywhere(n, "exchange_here", k)[0] for n, k in tqdm(samples.items())}
    return {"kind": "ranks exchange", "machine": machine.card(), "D": D, "K": K, "s": found}


def divided(path: str, rounds: int = ROUNDS) -> dict:
    """One rank and two, with the SSD as it is and with a slow one, in turn.

    Args:
        path (str): A model.
        rounds (int): Runs of each.
    """
    runs = []
    for i in tqdm(range(rounds)):
        for rate in RATES:
            for n in (1, 2) if i % 2 else (2, 1):
                oscache.drop_pages(path)
                each = _everywhere(n, "decode_here", path, rate, nbytes=NBYTES)
                runs.append({"round": i, "ranks": n, "rate": rate, "each": each})
    return {
        "kind": "ranks divided",
        "machine": machine.card(),
        "model": Path(path).name,
        "slots": SLOTS,
        "limit_nbytes": NBYTES,
        "warmup": WARMUP,
        "runs": runs,
    }


def _another(path, folder):
    """The same model with other weights."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:begin] + content[begin:][::-1])


def _short(path, folder):
    """The same model without one of its files."""
    shutil.copytree(path, folder)
    (folder / "model.safetensors").unlink()


def _says(err, folder):
    """The lines that are not MLX's own."""
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith("[ring]")]
    return [line.replace(f"{folder}/", "") for line in lines]


def ends(path: str | Path = MODEL) -> dict:
    """How two ranks of ``generate`` end when the second is killed or was started differently.

    Returns:
        dict: For each case the seconds until both had ended, and what each printed and returned.
    """
    cases, path = {}, Path(path)
    options = ["--prompt", "def read_json(path):", "--max-tokens", "2000", "--slots", "16"]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        _another(path, folder / "other")
        _short(path, folder / "short")
        for case, model, more in (
            ("killed", path, ()),
            ("other slots", path, ("--slots", "12")),
            ("another checkpoint", folder / "other", ()),
            ("a missing file", folder / "short", ()),
        ):
            command = ["-m", "moelab", "generate"]
            second = options[: -2 if more else None] + list(more)
            begin = time.monotonic()
            started = ranks.start(
                [[*command, str(path), *options], [*command, str(model), *second]], folder
            )
            try:
                if case == "killed":
                    started[0].stdout.read(KILLED_AFTER)
                    started[1].kill()
                    begin = time.monotonic()
                ended = ranks.finish(started, 120)
            finally:
                ranks.stop(started)
            cases[case] = {
                "s": round(time.monotonic() - begin, 2),
                "ranks": [{"status": e.code, "says": _says(e.err, folder)} for e in ended],
            }
    return {"kind": "ranks ends", "machine": machine.card(), "model": path.name, "cases": cases}


if __name__ == "__main__":
    work, *words = sys.argv[1:]
    if work in ("exchange_here", "decode_here"):
        print(json.dumps(globals()[work](*json.loads(words[0]))))
    else:
        record = {"exchange": exchange, "divided": divided, "ends": ends}[work](*words[1:])
        records.save(words[0], record)
