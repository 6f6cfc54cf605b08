"""Measure a trace's locality; synthesize traces like it. ``trace.decode`` leaves prompts out."""

from dataclasses import dataclass
from itertools import product

import numpy as np

from ..shipped import shipped
from ..streaming.trace import Trace, TraceError


def recorded_trace(name: str) -> Trace:
    """A trace of tiny-moe from ``data/traces``: ``code``, ``tests``, ``prose``, ``docs``, ..."""
    return Trace.load(shipped("traces", f"{name}.npz"))


def decode_trace(
    experts: np.ndarray, num_experts: int, name: str = "", seed: int | None = None
) -> Trace:
    """Make a trace of decoded tokens from ``experts [T, L, K]`` alone; the token ids are 0."""
    T = len(experts)
    return Trace(experts, np.full(T, "decode"), np.zeros(T, np.int64), num_experts, name, seed)


def popularity(trace: Trace) -> np.ndarray:
    """Count how often each expert was chosen: ``[L, E]``, shares of tokens (a row sums to K)."""
    T, L = trace.experts.shape[:2]
    flat = trace.experts + np.arange(L)[:, None] * trace.num_experts
    return np.bincount(flat.ravel(), minlength=L * trace.num_experts).reshape(L, -1) / T


def overlap(trace: Trace, lag: int = 1) -> dict[str, np.ndarray]:
    """Compare each token's experts with those of the token ``lag`` earlier; return ``[L]`` shares.

    ``each``: share of experts that both tokens need. ``all``: share of tokens with equal experts.
    """
    kept = (trace.experts[lag:, :, :, None] == trace.experts[:-lag, :, None, :]).any(-1)
    return {"each": kept.mean((0, 2)), "all": kept.all(-1).mean(0)}


def _last_use(experts, E):
    """Each expert's last use before each token, ``[T + 1, E]``: token * K + place, or -1."""
    T, K = experts.shape
    last = np.full((T + 1, E), -1, np.int32)
    when = np.arange(T * K, dtype=np.int32).reshape(T, K)
    np.put_along_axis(last[1:], experts.astype(np.intp), when, -1)
    return np.maximum.accumulate(last, axis=0, out=last)


def lru_hit_rate(trace: Trace, skip: int = 0) -> np.ndarray:
    """Hit rates ``[L, E + 1]`` of LRU caches of 0 to E slots, after the first ``skip`` tokens.

    A token's experts count as used one after the other, in the router's order. ``eviction.held``
    orders them differently, so its hit rates may differ by a few uses.
    """
    (T, L, K), E = trace.experts.shape, trace.num_experts
    hits = np.zeros((L, E + 1))
    for layer in range(L):
        experts = trace.experts[:, layer].astype(np.intp)
        last = _last_use(experts, E)[:T]
        mine = np.take_along_axis(last, experts, -1)
        since = [np.count_nonzero(last > mine[:, k, None], axis=-1) for k in range(K)]
        since = np.where(mine < 0, E, np.stack(since, axis=-1))  # a first use misses
        hits[layer, 1:] = np.cumsum(np.bincount(since[skip:].ravel(), minlength=E)[:E])
    return hits / ((T - skip) * K)


def union(trace: Trace, m: int) -> np.ndarray:
    """Count the distinct experts that m consecutive tokens need: ``[L]``, means of windows."""
    return missing(trace, m, slots=0)


def missing(trace: Trace, m: int, slots: int, skip: int = 0) -> np.ndarray:
    """Count the experts that a pass over m consecutive tokens reads with S slots in each layer.

    The slots hold the S experts used last. Returns ``[L]``, means over windows from ``skip`` on.
    """
    T, L, K = trace.experts.shape
    if not (m >= 1 and 0 <= skip <= T - m):
        raise TraceError(f"trace: expected 1 to {T - skip} tokens in a window, got {m}.")
    slots = min(slots, trace.num_experts)
    out = np.empty(L)
    first = np.arange(skip, T - m + 1, dtype=np.int32)[:, None] * K
    for layer in range(L):
        last = _last_use(trace.experts[:, layer], trace.num_experts)
        before, after = last[skip : T - m + 1], last[skip + m :]
        held = np.zeros(before.shape, bool)
        if slots:
            oldest = np.partition(before, -slots, axis=1)[:, -slots, None]
            held = (before >= oldest) & (before >= 0)
        out[layer] = np.count_nonzero((after >= first) & ~held) / len(first)
    return out


def layer_prediction(trace: Trace) -> dict[str, np.ndarray]:
    """Predict a layer's experts from those of the layer before, by counting pairs.

    The first half of the tokens gives counts of pairs of experts in layers l and l + 1. In the
    second half, an expert of layer l + 1 scores the sum of its counts with the token's experts in
    layer l; the K highest scores are predicted. Returns bools ``[T - T // 2, L - 1, K]``:
    ``pairs``, which needed experts were predicted; ``popular``, which are of the K most popular.
    """
    T, L, K = trace.experts.shape
    half, E = T // 2, trace.num_experts
    chosen = np.zeros((T, L, E), np.float32)
    np.put_along_axis(chosen, trace.experts.astype(np.intp), 1, -1)
    before, after = chosen.swapaxes(0, 1)[:-1], chosen.swapaxes(0, 1)[1:]  # [L - 1, T, E]
    pairs = before[:, :half].swapaxes(1, 2) @ after[:, :half]  # [L - 1, E, E]
    popular = after[:, :half].sum(1, keepdims=True).repeat(T - half, 1)
    needed = trace.experts.swapaxes(0, 1)[1:, half:].astype(np.intp)
    out = {}
    for name, score in {"pairs": before[:, half:] @ pairs, "popular": popular}.items():
        best = np.zeros(score.shape, bool)
        np.put_along_axis(best, np.argpartition(-score, K - 1)[..., :K], True, -1)
        out[name] = np.take_along_axis(best, needed, -1).swapaxes(0, 1)
    return out


@dataclass(frozen=True)
class Locality:
    """The parameters of a synthetic trace, for each layer.

    A token draws K distinct experts with probabilities in proportion to
    ``(1 - stickiness) * popularity + stickiness * recency``. Popularity is ``rank ** -zipf``.
    Recency is the share of earlier tokens that used the expert; a token m tokens ago has the weight
    ``exp(-m / memory)``.
    """

    zipf: tuple[float, ...]  # the skew of popularity; 0: all experts alike
    stickiness: tuple[float, ...]  # the weight of recently used experts, 0 to below 1
    memory: tuple[float, ...]  # for how many tokens a use is recent; near 0: for the next one


def synthesize(locality: Locality, T: int, L: int, E: int, K: int, seed: int = 0) -> Trace:
    """Draw a random trace ``[T, L, K]`` with given locality, for any number of layers."""
    rng = np.random.default_rng(seed)
    layer = np.arange(L) * len(locality.zipf) // L
    zipf, sticky, memory = (
        np.array(v, np.float32)[layer, None]
        for v in (locality.zipf, locality.stickiness, locality.memory)
    )
    popular = np.arange(1, E + 1, dtype=np.float32) ** -zipf
    popular = rng.permuted(popular / popular.sum(1, keepdims=True), axis=1) * (1 - sticky)
    decay = np.exp(-1 / memory)
    recent = np.zeros((L, E), np.float32)
    experts = np.empty((T, L, K), np.uint16)
    rows = np.arange(L)[:, None]
    for t in range(-64, T):  # 64 extra tokens come first, to give recency a history
        # Draw K experts without replacement: those with the earliest exponential arrival times.
        rate = popular + sticky * recent
        arrival = rng.standard_exponential((L, E), np.float32) / np.maximum(rate, 1e-30)
        chosen = np.argpartition(arrival, K - 1, axis=1)[:, :K]
        recent *= decay
        recent[rows, chosen] += (1 - decay) / K
        if t >= 0:
            experts[t] = chosen
    return decode_trace(experts, E, "synthetic", seed)


LAGS = (1, 2, 4, 8, 16)  # distances of two compared tokens, in tokens
SIZES = (1.5, 2, 3, 4, 6)  # slots of the hit rates, in units of K


def _features(trace):
    """Compute the overlaps, hit rates and skew ``[L, F]`` that ``fit`` compares."""
    K = trace.experts.shape[2]
    lags = [overlap(trace, m)["each"] for m in LAGS]
    hits = lru_hit_rate(trace)
    sizes = [hits[:, int(s * K)] for s in SIZES if s * K < trace.num_experts]
    skew = (popularity(trace) ** 2).sum(1) / K  # the overlap of two tokens far apart
    return np.stack([*lags, *sizes, skew], axis=1)


def fit(trace: Trace, rounds: int = 3, seed: int = 0) -> Locality:
    """Find the parameters with which ``synthesize`` makes traces like this one.

    Each round keeps the candidate with the nearest ``_features`` for each layer; the next round
    searches around that candidate. Only decoded tokens count, if there are any.
    """
    trace = trace.decode if (trace.phase == "decode").any() else trace
    T, L, K = trace.experts.shape
    if 2 * max(LAGS) > T:
        raise TraceError(f"fit: expected at least {2 * max(LAGS)} tokens, got {T}.")
    want = _features(trace)
    values = np.linspace(0, 1.5, 7), np.linspace(0, 0.9, 7), [0.5, 2, 8, 32, 128]
    grid = np.array(list(product(*values)))
    # Each parameter goes down, stays or goes up; the third parameter's steps are factors.
    step = np.array(list(product((-1, 0, 1), (-1, 0, 1), (0.5, 1, 2))))
    width = np.array([0.25, 0.15, 0.0])  # twice the first step in zipf and stickiness
    best, error = np.zeros((L, 3)), np.full(L, np.inf)
    for i in range(rounds):
        candidates = Locality(*map(tuple, grid.T))
        made = synthesize(candidates, T, len(grid), trace.num_experts, K, seed + i)
        distance = np.square(_features(made)[None] - want[:, None]).sum(-1)  # [L, candidates]
        nearest = distance.argmin(1)
        better = distance[np.arange(L), nearest] < error
        best[better], error[better] = grid[nearest[better]], distance[better, nearest[better]]
        around = best[:, None] + step * width / 2 ** (i + 1)
        around[..., 2] *= step[:, 2] ** (1 / (i + 1))
        grid = np.clip(around.reshape(-1, 3), (0, 0, 0.1), (4, 0.98, 1e4))
    return Locality(*(tuple(float(v) for v in column) for column in best.T))
