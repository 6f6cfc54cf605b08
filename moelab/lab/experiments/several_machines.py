"""Notebook 11: tiny-moe in ranks of this machine, where experts lie, and machines we do not have.

What takes longer was recorded by ``experiments.ranks``.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from ... import StreamConfig
from ...replay import ranks as replay
from ...replay.locality import popularity
from ...streaming.model import load_model
from ...streaming.placement import balanced, by_number
from ...streaming.ranks import joined
from ...streaming.session import session_of
from ...streaming.trace import Trace
from .. import ranks
from ..decode import decode
from .ladder import EXPERT_NBYTES_122B, L_122B
from .ranks import EXPERT_NBYTES, HELD, bound

FILLING = 64  # tokens at the start of a trace that only fill the slots
HOT = 2  # experts of a layer that all ranks hold, in one of the placements
PLACEMENTS = (
    "by number",
    "balanced by a trace",
    f"{HOT} hot experts on all",
    "whoever reads least",
)
D_122B, E_122B, VALUE_NBYTES = 3072, 256, 2  # of Qwen3.5-122B-A10B; a row is sent in bfloat16


@dataclass(frozen=True)
class Rank:
    """What one rank of ``live`` did.

    Attributes:
        tokens (list[int]): What it wrote.
        experts (int): Of each layer, that it may read.
        nbytes (int): Read for the timed tokens.
        step_s (list[float]): Seconds of each of these.
    """

    tokens: list[int]
    experts: int
    nbytes: int
    step_s: list[float]


def live(path: str | Path, sizes: Sequence[int], slots: int, tokens: int) -> dict[int, list[Rank]]:
    """Greedy text of a model in one rank, and in several that divide its experts.

    Args:
        path (str or Path): A model.
        sizes (Sequence[int]): How many ranks.
        slots (int): Of each rank.
        tokens (int): To time.

    Returns:
        dict[int, list[Rank]]: For each number of ranks, what each did.
    """
    found, arguments = {}, json.dumps([str(path), slots, tokens])
    command = ["-m", "moelab.lab", "call", f"{__name__}:live_here", arguments]
    with tempfile.TemporaryDirectory() as folder:
        for n in sizes:
            ended = ranks.finish(ranks.start([command] * n, Path(folder)))
            for rank, each in enumerate(ended):
                if each.code:
                    raise OSError(f"rank {rank} of {n}: {each.err[-2000:]}")
            found[n] = [Rank(**json.loads(each.out.splitlines()[-1])) for each in ended]
    return found


def live_here(path: str, slots: int, tokens: int) -> dict:
    """In one rank: the fields of its ``Rank``."""
    mx.set_default_device(mx.cpu)
    model, _ = load_model(path, StreamConfig(slots=slots), group=joined())
    with model:
        made = decode(model, [1, 2, 3, 4], tokens, warmup=4)
        first = session_of(model).layers[0]
        experts = first.num_experts if first.owned is None else int(first.owned.sum())
    return asdict(Rank(made.tokens, experts, made.counters.bytes_read, made.step_s))


def placements(
    traces: Mapping[str, Trace], slots: int, n: int
) -> dict[str, list[tuple[float, float]]]:
    """Reads that n ranks wait for, by where the experts lie.

    Args:
        traces (Mapping[str, Trace]): Each is replayed with what the others say.
        slots (int): Of each rank and layer.
        n (int): Ranks.

    Returns:
        dict[str, list[tuple[float, float]]]: For each of ``PLACEMENTS`` and each trace
        ``replay.ranks.waited`` of its decoded tokens but for the first ``FILLING``.
    """
    found = {name: [] for name in PLACEMENTS}
    for name, trace in traces.items():
        experts, E = trace.decode.experts, trace.num_experts
        others = [t.decode for other, t in traces.items() if other != name]
        seen = np.concatenate([t.experts for t in others])
        counts = sum(popularity(t) for t in others)
        number = by_number(experts.shape[1], E, n)
        hot = np.argsort(-counts, axis=1)[:, :HOT].tolist()
        for placement, owners, shared in zip(
            PLACEMENTS, (number, balanced(seen, E, n), number, None), ((), (), hot, ())
        ):
            read = replay.reads(experts, owners, slots, n, shared)[FILLING:]
            found[placement].append(replay.waited(read))
    return found


@dataclass(frozen=True)
class Point:
    """A measured token and what the model says of it.

    Attributes:
        ranks (int): N.
        rate (float): Bytes a second of each SSD.
        token_s (list[float]): Measured.
        model_s (float): By the model.
    """

    ranks: int
    rate: float
    token_s: list[float]
    model_s: float

    @property
    def error(self) -> float:
        """The model's time over the measured median, less 1."""
        return self.model_s / float(np.median(self.token_s)) - 1


def checked(record: dict, tokens: int = 200) -> list[Point]:
    """The model against every measured point with a simulated SSD.

    Random weights route nearly at random, so a random routing is replayed. Arithmetic and exchange
    are those of as many ranks that hold every expert: it is the reads that are predicted.

    Args:
        record (dict): Of ``experiments.ranks.divided``.
        tokens (int): Replayed.
    """
    random, points = np.random.default_rng(0), []
    layers, top_k, num_experts = 4, 8, E_122B  # of both models
    experts = random.random((tokens + FILLING, layers, num_experts)).argsort(2)[:, :, :top_k]
    pairs = {(run["ranks"], run["rate"]) for run in record["runs"]}
    for n, rate in sorted((n, r) for n, r in pairs if r not in (None, HELD)):
        owners = by_number(layers, num_experts, n)
        read = replay.waited(replay.reads(experts, owners, record["slots"], n)[FILLING:])[0]
        b = bound(record, n, rate)
        points.append(Point(n, rate, b.token_s, read * EXPERT_NBYTES / rate + b.compute_s))
    return points


def parts_122b(
    trace: Trace, n: int, slots: int, disk: float, link: float, latency_s: float, compute_s: float
) -> dict[str, float]:
    """Seconds of a token of Qwen3.5-122B-A10B on n machines, by the model.

    Its experts are taken to repeat as those of the trace do, with the same share of them in slots.
    All machines compute all the arithmetic, which is too much: experts are divided.

    Args:
        trace (Trace): The routing.
        n (int): Machines.
        slots (int): Of each machine and layer; no more than its experts are taken.
        disk, link (float): Bytes a second.
        latency_s (float): Of a message.
        compute_s (float): A token's arithmetic.
    """
    held = max(1, min(slots * trace.num_experts // E_122B, -(-trace.num_experts // n)))
    read, rows = _replayed(trace, n, held)
    layers = trace.experts.shape[1]
    machines = replay.Machines(n, disk, link, latency_s, compute_s)
    row_nbytes = D_122B * VALUE_NBYTES
    return machines.parts(read / layers * L_122B, EXPERT_NBYTES_122B, L_122B, rows, row_nbytes)


@cache
def _replayed(trace, n, slots):
    """Reads that are waited for, and the rows of the largest block of a layer."""
    experts = trace.decode.experts
    owners = by_number(experts.shape[1], trace.num_experts, n)
    read = replay.waited(replay.reads(experts, owners, slots, n)[FILLING:])[0]
    of = np.take_along_axis(owners[None], experts.astype(np.intp), 2)
    pairs = np.stack([(of == rank).sum(2) for rank in range(n)]).max(0)
    return read, float(pairs.mean()) + 1  # and the row of checks
