"""Experts divided over ranks of this machine: the exchange, how fast they decode, how they end.

    python -m moelab.lab ranks exchange OUT.json            (on Linux)
    python -m moelab.lab ranks joins OUT.json MODEL ...     (on Linux)
    python -m moelab.lab ranks divided OUT.json MODEL       (on Linux, memory limited)
    python -m moelab.lab ranks ends OUT.json

The ranks share this machine's cores, memory bus and SSD. In ``divided`` each has a memory limit of
its own, its page cache included. Its slow SSD is simulated: each rank has one of its own, of which
bytes come at a fixed rate, so a layer waits until its reads would have taken that long.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ... import StreamConfig
from ...hooks import hooked
from ...shipped import shipped
from ...speculation.target import vocabulary
from ...streaming.layers import moe_blocks
from ...streaming.model import load_model
from ...streaming.ranks import joined
from ...streaming.session import session_of
from .. import limit, machine, oscache, ranks, records
from ..decode import decode

ALL = 1 << 16  # slots, more than there are experts
D = 2048  # of Qwen3.5-35B-A3B
# Rows of one call: a token's whose K = 8 rows are summed first, all of a token's and the row of
# checks, those of 8 tokens and of 64.
ROWS = (1, 9, 64, 512)
BLOCK = 20  # calls in one sample
SAMPLES = {2: 60, 4: 10}  # by ranks; four take their turns on two cores
# How rows are joined: as the engine does, and two ways that were tried.
JOINS = ("rows gathered", "rows summed", "scores first")
JOIN_ROUNDS, JOIN_TOKENS, JOIN_PROMPT, JOIN_TEXT = 7, 12, 128, 48
NBYTES, SLOTS = 1_000_000_000, 32  # of each rank's memory, and slots in each layer
RATES = (None, 300e6, 100e6)  # bytes a second of a rank's SSD; None: this machine's
HELD = "held"  # in place of a rate: every expert has a slot, nothing is read, no memory limit
TOKENS, WARMUP, ROUNDS, RANKS = 24, 24, 3, (1, 2, 4)
EXPERT_NBYTES, READS = 1769472, 8  # of one read of the file to time the SSD, and in flight
MODEL = shipped("models", "tiny-moe")
KILLED_AFTER = 12  # characters of the answer


def exchange_here(samples: int) -> dict[str, list[float]]:
    """In one rank: how many seconds an exchange takes, for each kind and number of rows.

    Args:
        samples (int): Of each, the mean of ``BLOCK`` calls.
    """
    group = joined()
    works = {}
    for n in ROWS:
        x = mx.ones((n, D))
        own = mx.ones((-(-n // group.size()), D))  # together the ranks have n rows
        mx.eval(x, own)
        works[f"sum of {n}"] = partial(mx.distributed.all_sum, x)
        works[f"gather of {n}"] = partial(mx.distributed.all_gather, own)
        works[f"evaluation of {n}"] = partial(mx.add, x, 1)
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


@contextmanager
def joining(model: nn.Module, how: str, group: mx.distributed.Group) -> Iterator[None]:
    """Inside, the ranks join the rows of a layer in another way.

    Args:
        model (nn.Module): From ``load_model`` with this group.
        how (str): One of ``JOINS``. ``rows summed`` sums the rows of all pairs, with zeros where
            a rank has none. ``scores first`` does what mlx-lm's block does with the rows of the
            others as zeros, the router's scores and the sum over K, and sums one row a token; the
            shared expert is rank 0's.
        group (mx.distributed.Group): The ranks.
    """

    def placed(_, y, owners, routed, like, path):
        mine = np.flatnonzero(owners == group.rank())
        rows = np.full(routed.size, len(mine))
        rows[mine] = np.arange(len(mine))
        zeros = mx.zeros((1, like[0]), like[1])
        y = (zeros if y is None else mx.concatenate([y, zeros]))[mx.array(rows)]
        if how == "rows summed":
            y = mx.distributed.all_sum(y, group=group)
        y = y.reshape(*routed.shape, like[0])
        return y, y

    def summed(call, x):
        return mx.distributed.all_sum(call(x), group=group)

    def first_only(call, x):
        return call(x) * (group.rank() == 0)

    with ExitStack() as hooks:
        if how != "rows gathered":
            hooks.enter_context(hooked(session_of(model).ranks, placed, "join"))
        for block in moe_blocks(model) if how == "scores first" else ():
            hooks.enter_context(hooked(block, summed))
            hooks.enter_context(hooked(block.shared_expert, first_only))
        yield


def joins_here(path: str, rounds: int) -> dict:
    """In one rank, or alone: tokens, logits and seconds with each way to join the rows.

    Every expert has a slot, and all of them are read before the clock starts.

    Args:
        path (str): A model.
        rounds (int): Timed ones, after one that compares the logits.
    """
    mx.set_default_device(mx.cpu)
    group = joined()
    model, _ = load_model(path, StreamConfig(slots=ALL), group=group)
    random = np.random.default_rng(0)
    with model:
        vocab = vocabulary(model)
        long = random.integers(0, vocab, (1, JOIN_PROMPT))
        feed = random.integers(0, vocab, JOIN_TOKENS).tolist()
        for layer in session_of(model).layers:
            layer.read(
                np.flatnonzero(layer.owned).tolist() if group else [*range(layer.num_experts)]
            )
        found, first = {}, None
        for i in range(rounds + 1):
            for how in (JOINS[i % 3 :] + JOINS[: i % 3]) if group else JOINS[:1]:
                made = found.setdefault(how, {"token_s": [], "prompt_s": []})
                with joining(model, how, group):
                    if group:
                        mx.eval(mx.distributed.all_sum(mx.array(1), group=group))
                    begin = time.perf_counter()
                    logits = model(mx.array(long), cache=make_prompt_cache(model))
                    mx.eval(logits)
                    prompt_s = time.perf_counter() - begin
                    if not i:
                        logits = np.array(logits[0])
                        first = logits if first is None else first
                        made["logits"] = float(abs(logits - first).max())
                        made["digest"] = hashlib.sha256(logits.tobytes()).hexdigest()[:16]
                        made["text"] = decode(model, long[0].tolist(), JOIN_TEXT).tokens
                        continue
                    made["prompt_s"].append(prompt_s)
                    made["token_s"] += decode(model, feed[:2], JOIN_TOKENS, feed=feed).step_s
        return {"ways": found, "std": float(first.std())}


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


def hold_all(model: nn.Module) -> None:
    """Read every expert of this rank into its slot; there must be enough of them."""
    for layer in session_of(model).layers:
        owned = np.ones(layer.num_experts, bool) if layer.owned is None else layer.owned
        layer.read(np.flatnonzero(owned).tolist())


def decode_here(path: str, rate: float | str | None) -> dict:
    """In one rank: decode the tokens of a fixed text, with whatever ranks there are.

    Args:
        path (str): A model.
        rate (float, str or None): Bytes a second of the simulated SSD; None for the real one;
            ``HELD``: no reads.
    """
    mx.set_default_device(mx.cpu)
    model, _ = load_model(path, StreamConfig(slots=ALL if rate == HELD else SLOTS), group=joined())
    with model:
        if rate == HELD:
            hold_all(model)
        elif rate:
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


def everywhere(n: int, work: str, *args, nbytes: int | None = None) -> list[dict]:
    """What ``work`` of this module returns in each of n ranks, each on a core of its own.

    More ranks than there are cores share them.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "moelab.lab", "call", f"{__name__}:{work}", json.dumps(args)]
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
    """One sum or gather over the ranks; the samples are rank 0's.

    Args:
        samples (Mapping[int, int]): How many, by the number of ranks.
    """
    found = {str(n): everywhere(n, "exchange_here", k)[0] for n, k in tqdm(samples.items())}
    return {"kind": "ranks exchange", "machine": machine.card(), "D": D, "s": found}


def joins(*paths: str) -> dict:
    """The ways to join rows, against one rank: bits and text with 2 and 3, time with 2.

    Args:
        *paths (str): Models.
    """
    rounds = {1: JOIN_ROUNDS, 2: JOIN_ROUNDS, 3: 0}
    found = {
        Path(path).name: {
            str(n): everywhere(n, "joins_here", path, k)[0] for n, k in rounds.items()
        }
        for path in tqdm(paths)
    }
    return {
        "kind": "ranks joins",
        "machine": machine.card(),
        "prompt_tokens": JOIN_PROMPT,
        "models": found,
    }


def divided(path: str, rounds: int | str = ROUNDS) -> dict:
    """One rank, two and four, with the SSD as it is, with slow ones and without reads, in turn.

    Args:
        path (str): A model.
        rounds (int or str): Runs of each.
    """
    runs, speeds = [], []
    for i in tqdm(range(int(rounds))):
        file = max(oscache.tensor_files(path), key=os.path.getsize)
        speeds.append(machine.read_speed(file, True, READS, EXPERT_NBYTES, SLOTS * READS))
        for rate in (*RATES, HELD):
            for n in RANKS if i % 2 else RANKS[::-1]:
                if rate != HELD:
                    oscache.drop_pages(path)
                limit_nbytes = None if rate == HELD else NBYTES
                each = everywhere(n, "decode_here", path, rate, nbytes=limit_nbytes)
                runs.append({"round": i, "ranks": n, "rate": rate, "each": each})
    return {
        "kind": "ranks divided",
        "machine": machine.card(),
        "model": Path(path).name,
        "slots": SLOTS,
        "limit_nbytes": NBYTES,
        "warmup": WARMUP,
        "disk_bytes_per_s": speeds,
        "runs": runs,
    }


@dataclass(frozen=True)
class Bound:
    """What a token of ``divided`` takes, and what it must take.

    Attributes:
        token_s (list[float]): The first rank's, of all rounds.
        read_s (float): What its reads take at least: the bytes of the rank that reads most at its
            simulated rate; what the ranks read from this machine's one SSD, at its rate.
        compute_s (float): A token of as many ranks that hold every expert, exchange included.
    """

    token_s: list[float]
    read_s: float
    compute_s: float

    @property
    def larger(self) -> float:
        """The larger of both over the measured median: 1 where they overlap completely."""
        return float(max(self.read_s, self.compute_s) / np.median(self.token_s))

    @property
    def sum(self) -> float:
        """Their sum over the measured median: 1 where nothing overlaps, and nothing else waits."""
        return float((self.read_s + self.compute_s) / np.median(self.token_s))


def bound(record: dict, ranks: int, rate: float | None) -> Bound:
    """What the runs of a record of ``divided`` must take at least.

    Args:
        record (dict): As ``divided`` returns it.
        ranks (int): How many.
        rate (float or None): Of their SSDs; None for this machine's.
    """

    def runs(rate):
        chosen = (r for r in record["runs"] if (r["ranks"], r["rate"]) == (ranks, rate))
        return [run["each"] for run in chosen]

    made = runs(rate)
    tokens = len(made[0][0]["step_s"])
    if rate:
        nbytes = max(each["counters"]["bytes_read"] for each in made[0])
    else:
        nbytes = np.median([sum(each["disk_nbytes"] for each in run) for run in made])
        rate = np.median(record["disk_bytes_per_s"])
    return Bound(
        token_s=[s for run in made for s in run[0]["step_s"]],
        read_s=float(nbytes / tokens / rate),
        compute_s=float(np.median([run[0]["step_s"] for run in runs(HELD)])),
    )


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


def ends(path: str | Path = MODEL, rounds: int = 3) -> dict:
    """How two ranks of ``generate`` end when the second is killed or was started differently.

    Args:
        path (str): A checkpoint.
        rounds (int): Times that every case is tried.

    Returns:
        dict: For each case a list of its rounds: the seconds until both ranks had ended, and what
            each printed and returned.
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
            commands = [[*command, str(path), *options], [*command, str(model), *second]]
            cases[case] = []
            for _ in range(int(rounds)):
                took, ended = _end(commands, folder, case == "killed")
                told = [{"status": e.code, "says": _says(e.err, folder)} for e in ended]
                cases[case].append({"s": round(took, 2), "ranks": told})
    return {"kind": "ranks ends", "machine": machine.card(), "model": path.name, "cases": cases}


def _end(commands, folder, kill):
    """Seconds from the start, or from killing the second rank, until both ended; how they did."""
    begin = time.monotonic()
    started = ranks.start(commands, folder)
    try:
        if kill:
            started[0].stdout.read(KILLED_AFTER)
            started[1].kill()
            begin = time.monotonic()
        ended = ranks.finish(started, 120)
    finally:
        ranks.stop(started)
    return time.monotonic() - begin, ended


def main(work: str, out: str, *words: str) -> None:
    """Write a record of ranks.

    Args:
        work (str): ``exchange``, ``joins``, ``divided`` or ``ends``.
        out (str): The record.
        words (str): What the work takes.
    """
    works = {"exchange": exchange, "joins": joins, "divided": divided, "ends": ends}
    records.save(out, works[work](*words))
