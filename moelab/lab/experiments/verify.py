"""Notebook 07, first half: what a verify pass over m positions costs, and a model of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ... import record, stats
from ...replay import locality
from ...speculation.rollback import Rollback
from ...streaming.session import is_loaded
from ...streaming.trace import Trace

COUNTED = ("tokens", "hits", "misses", "bytes_read", "wait_s")


def counters(model: nn.Module) -> dict[str, float]:
    """``COUNTED`` of prefill and decode together; empty for a model that ``load`` did not make."""
    if not is_loaded(model):
        return {}
    both = stats(model)
    return {k: getattr(both.prefill, k) + getattr(both.decode, k) for k in COUNTED}


def since(model: nn.Module, before: Mapping[str, float]) -> dict[str, float]:
    """What ``counters`` has gained."""
    return {k: v - before[k] for k, v in counters(model).items()}


# The experts of several tokens


def routing(model: nn.Module, ids: list[int]) -> Trace:
    """The routing of a text read one token at a time, as decoding would."""
    cache = make_prompt_cache(model)
    with record(model) as trace:
        for i in ids:
            mx.eval(model(mx.array([[i]]), cache=cache))
    return trace


@dataclass(frozen=True)
class Union:
    """Distinct experts of a layer over m tokens in a row.

    Attributes:
        top_k (int): K of the trace.
        num_experts (int): E of the trace.
        layers (dict): ``{m: [mean of each layer]}``.
        uniform (dict): ``{m: number}`` if tokens chose independently and uniformly.
    """

    top_k: int
    num_experts: int
    layers: dict[int, list[float]]
    uniform: dict[int, float]

    @property
    def most(self) -> int:
        """The largest m."""
        return max(self.layers)

    def mean(self, m: int) -> float:
        """Distinct experts over m tokens, mean of the layers."""
        return float(np.mean(self.layers[m]))


def uniform_union(E: int, K: int, m: int) -> float:
    """Distinct experts of E over m tokens that choose K each, independently and uniformly."""
    return E * (1 - (1 - K / E) ** m)


def union(trace: Trace, positions: Sequence[int]) -> Union:
    """Distinct experts of a layer for each m in ``positions``.

    Args:
        trace (Trace): Of decoded text.
        positions (Sequence[int]): Tokens in a row.
    """
    K, E = trace.experts.shape[2], trace.num_experts
    return Union(
        K,
        E,
        {m: locality.union(trace, m).tolist() for m in positions},
        {m: uniform_union(E, K, m) for m in positions},
    )


# Passes


@dataclass(frozen=True)
class Pass:
    """One pass over several positions.

    Attributes:
        pass_s (float): Seconds.
        wait_s (float): Of these, waiting for experts.
        misses (int): Experts read, in all layers.
        hits (int): Experts found in slots, in all layers.
    """

    pass_s: float
    wait_s: float = 0.0
    misses: int = 0
    hits: int = 0


Passes = dict[int, list[Pass]]  # by positions


def passes(model: nn.Module, ids: list[int], positions: Sequence[int], rounds: int) -> Passes:
    """Time passes at successive places of a text; each time all tokens but one are taken back.

    Args:
        model (nn.Module): Resident or streamed.
        ids (list[int]): A text, long enough for all rounds.
        positions (Sequence[int]): The m's, in random order in each round.
        rounds (int): Samples of each; one more comes first and is not kept.
    """
    cache, out, rng = make_prompt_cache(model), {m: [] for m in positions}, np.random.default_rng(0)
    at = max(8, len(ids) - (rounds + 1) * len(positions) - max(positions))
    with mx.stream(generation_stream):
        model(mx.array([ids[:at]]), cache=cache)
        mx.eval([c.state for c in cache])
        rollback = Rollback(model, cache)
        for i in range(-1, rounds):
            for m in rng.permutation(positions).tolist():
                before, begin = counters(model), time.perf_counter()
                mx.eval(mx.argmax(rollback(mx.array([ids[at : at + m]])), axis=-1))
                pass_s, counted = time.perf_counter() - begin, since(model, before)
                rollback.undo(m - 1)
                rollback.commit()
                at += 1
                if i >= 0:
                    kept = {k: counted[k] for k in ("wait_s", "misses", "hits") if counted}
                    out[m].append(Pass(pass_s, **kept))
    return out


def passes_in_turn(
    models: Mapping, ids: list[int], positions: Sequence[int], rounds: int, turns: int = 3
) -> dict[Any, Passes]:
    """``passes`` of several models, a few rounds of each in turn, so that drift hits all alike.

    Args:
        models (Mapping): The models, by whatever tells them apart.
        ids (list[int]): A text.
        positions (Sequence[int]): The m's.
        rounds (int): Samples of each, rounded up to a multiple of ``turns``.
        turns (int): How often each model has its turn.

    Returns:
        dict: ``{name: Passes}``.
    """
    out = {name: {m: [] for m in positions} for name in models}
    for _ in range(turns):
        for name, model in models.items():
            for m, samples in passes(model, ids, positions, -(-rounds // turns)).items():
                out[name][m] += samples
    return out


def pass_ms(passes: Passes) -> dict[int, np.ndarray]:
    """Milliseconds of each pass, by positions."""
    return {m: 1e3 * np.array([p.pass_s for p in samples]) for m, samples in passes.items()}


def growth(passes: Passes) -> float:
    """How many times as long the largest pass takes as a pass over one position (medians)."""
    ms = pass_ms(passes)
    return float(np.median(ms[max(ms)]) / np.median(ms[1]))


def break_even(passes: Passes) -> dict[int, float]:
    """Tokens that a round of m positions must commit to pay, drafts not counted."""
    ms = pass_ms(passes)
    return {m: float(np.median(t) / np.median(ms[1])) for m, t in ms.items() if m > 1}


# A model of a pass


@dataclass(frozen=True)
class PassParts:
    """What a pass is made of.

    Attributes:
        fixed_s (float): Seconds of any pass.
        position_s (float): Seconds of a position, but for its experts.
        expert_s (float): Seconds of arithmetic for one expert, of all layers, for one position.
        expert_nbytes (int): Bytes of one expert.
    """

    fixed_s: float
    position_s: float
    expert_s: float
    expert_nbytes: int

    def __str__(self):
        seconds = (self.fixed_s, self.position_s, self.expert_s)
        pass_ms, position_ms, expert_ms = (1e3 * s for s in seconds)
        return (
            f"{pass_ms:.2g} ms of any pass, {position_ms:.2g} ms of a position, {expert_ms:.2g} ms "
            f"of each of its experts in all layers; {self.expert_nbytes / 1e3:.0f} kB an expert"
        )


def pass_parts(timed: Mapping[int, Passes], expert_nbytes: int) -> PassParts:
    """Fit the parts of a pass to resident passes with two or more top-k.

    Args:
        timed (Mapping[int, Passes]): By top-k.
        expert_nbytes (int): Bytes of one expert.
    """
    rows, seconds = [], []
    for k, by_m in timed.items():
        for m, samples in by_m.items():
            rows.append((1, m, m * k))
            seconds.append(np.median([p.pass_s for p in samples]))
    fitted = np.linalg.lstsq(np.array(rows, float), np.array(seconds), rcond=None)[0]
    least_s = 1e-6  # noise can make a part negative
    return PassParts(*np.maximum(fitted, least_s).tolist(), expert_nbytes)


def reads(trace: Trace, slots: int, top_k: int | None = None) -> Callable[[int], float]:
    """The experts that a pass over m positions reads in all layers, by a recorded trace.

    Args:
        trace (Trace): Of decoded text; its first quarter only fills the slots.
        slots (int): S, evicted least recent first.
        top_k (int): Fewer than the trace's: an estimate, from ``thinned``. Default: the trace's.

    Returns:
        Callable: From m to a number of experts.
    """
    kept = thinned(trace, top_k or trace.experts.shape[2])
    return lambda m: _reads(kept, slots, m)


@lru_cache(maxsize=512)
def _reads(trace, slots, m):
    return float(locality.missing(trace, m, slots, skip=len(trace) // 4).sum())


@lru_cache(maxsize=16)
def thinned(trace: Trace, top_k: int) -> Trace:
    """An estimate of a trace at a lower top-k: of each token's experts, some at random.

    Chances are in proportion to how often an expert is used, since the router tends to give the
    popular ones the larger weights. Compared with ``tiny-moe`` itself at top-6, 4, 2 and 1 (400
    tokens, 8 to 48 slots, 1 to 16 positions), reads came out between 7% too low and 26% too high.

    Args:
        trace (Trace): ``[T, L, K]``.
        top_k (int): 1 to K.
    """
    _, L, K = trace.experts.shape
    if top_k == K:
        return trace
    used = locality.popularity(trace)[np.arange(L)[:, None], trace.experts]
    arrival = np.random.default_rng(0).standard_exponential(used.shape) / used
    first = np.argsort(arrival, axis=-1)[..., :top_k]  # draws without replacement
    experts = np.take_along_axis(trace.experts, first, axis=-1)
    return Trace(experts, trace.phase, trace.tokens, trace.num_experts, trace.model)


def shipped_trace(model: Path, measured: Trace) -> Trace:
    """The recorded trace in ``data`` if it is the model's, else the one that was just measured."""
    return locality.recorded_trace("code").decode if model.name == "tiny-moe" else measured
