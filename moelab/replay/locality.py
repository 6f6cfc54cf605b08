"""What a trace says about locality, and synthetic traces that say the same for other shapes.

Every statistic takes the trace as it is: pass ``trace.decode`` where prompts should not count.
"""

from dataclasses import dataclass

import numpy as np

from ..streaming.record import Trace, TraceError


def popularity(trace):
    """How often each expert was chosen.

    Returns:
        np.ndarray: ``[L, E]``, shares of the tokens; each row sums to K.
    """
    T, L, K = trace.experts.shape
    flat = trace.experts + np.arange(L)[:, None] * trace.num_experts
    return np.bincount(flat.ravel(), minlength=L * trace.num_experts).reshape(L, -1) / T


def overlap(trace, lag=1):
    """How many of a token's experts were those of the token ``lag`` before it.

    Two figures that are often taken for one another: with K experts of which each is kept with probability p, all are
    kept with about ``p ** K``.

    Args:
        trace (Trace): ``[T, L, K]``.
        lag (int): 1: the token before.

    Returns:
        dict[str, np.ndarray]: ``[L]`` each, means over the T - lag tokens that have one before them. ``each``: the share of a
        token's experts that were there; ``all``: the share of tokens of which all K were.
    """
    if not 1 <= lag < len(trace):
        raise TraceError(
            f"overlap: expected a lag of 1 to {len(trace) - 1}, with {len(trace)} tokens, got {lag}."
        )
    kept = (trace.experts[lag:, :, :, None] == trace.experts[:-lag, :, None, :]).any(-1)
    return {"each": kept.mean((0, 2)), "all": kept.all(-1).mean(0)}


def _last_use(experts, E):
    """``[T + 1, L, E]``: when each expert was last used before token t, as t' * K + its place; -1: never."""
    T, L, K = experts.shape
    last = np.full((T + 1, L, E), -1, np.int32)
    when = np.arange(T * K, dtype=np.int32).reshape(T, 1, K)
    np.put_along_axis(last[1:], experts.astype(np.intp), np.broadcast_to(when, experts.shape), -1)
    return np.maximum.accumulate(last, axis=0, out=last)


def reuse_distance(trace):
    """How many other experts of the layer came between two uses of one.

    The distance of a use is the number of distinct experts used in its layer after the expert's last use, before this
    token; of the experts of one token, the later in the router's order counts as the later used. A least-recently-used
    cache of S experts has it if and only if the distance is below S.

    Returns:
        np.ndarray: ``[T, L, K]``, 0 to E - 1; E for a first use, which no cache has.
    """
    T, L, K = trace.experts.shape
    E, out = trace.num_experts, np.empty(trace.experts.shape, np.int32)
    for layer in range(L):
        last = _last_use(trace.experts[:, layer : layer + 1], E)[:T, 0]
        mine = np.take_along_axis(last, trace.experts[:, layer].astype(np.intp), -1)
        for k in range(K):
            out[:, layer, k] = np.count_nonzero(last > mine[:, k, None], axis=-1)
        out[:, layer][mine < 0] = E
    return out


def lru_hit_rate(trace, skip=0):
    """What a least-recently-used cache would hold, for every size at once, by ``reuse_distance``.

    ``pagecache.held`` follows ``SlotTable`` to the order within one token and may differ by a few uses.

    Args:
        trace (Trace): ``[T, L, K]``.
        skip (int): Tokens at the start that are not counted.

    Returns:
        np.ndarray: ``[L, E + 1]``, the share of uses that are hits with S slots, S from 0 to E. Below K slots an engine that
        needs all K at once could not run.
    """
    distance = reuse_distance(trace)[skip:]
    T, L, K = distance.shape
    E = trace.num_experts
    flat = distance + np.arange(L)[:, None] * (E + 1)
    counts = np.bincount(flat.ravel(), minlength=L * (E + 1)).reshape(L, E + 1)
    return np.concatenate([np.zeros((L, 1)), np.cumsum(counts, axis=1)[:, :E]], axis=1) / (T * K)


def union(trace, m):
    """How many experts m consecutive tokens need together: what a pass over m tokens reads.

    Args:
        trace (Trace): ``[T, L, K]``.
        m (int): Tokens in a row, 1 to T.

    Returns:
        np.ndarray: ``[L]``, the mean number of distinct experts over all T - m + 1 windows; K for m = 1.
    """
    T, L, K = trace.experts.shape
    if not 1 <= m <= T:
        raise TraceError(f"union: expected 1 to {T} tokens, got {m}.")
    out = np.empty(L)
    first = np.arange(T - m + 1, dtype=np.int32)[:, None] * K
    for layer in range(L):
        last = _last_use(trace.experts[:, layer : layer + 1], trace.num_experts)[m:, 0]
        out[layer] = np.count_nonzero(last >= first) / len(first)
    return out


def missing(trace, m, slots, skip=0):
    """How many experts a pass over m consecutive tokens reads with S slots in each layer.

    Before the pass the slots hold the S experts used most recently (LRU). The pass reads every
    other expert that it needs, once.

    Args:
        trace (Trace): ``[T, L, K]``.
        m (int): Tokens in a row.
        slots (int): S; 0: every expert is read, so it is ``union``.
        skip (int): Tokens at the start that only fill the slots.

    Returns:
        np.ndarray: ``[L]``, means over all windows of m tokens after the first ``skip``.
    """
    T, L, K = trace.experts.shape
    if not (m >= 1 and 0 <= skip <= T - m):
        raise TraceError(f"missing: expected 1 to {T - skip} tokens after {skip}, got {m}.")
    slots = min(slots, trace.num_experts)
    out = np.empty(L)
    first = np.arange(skip, T - m + 1, dtype=np.int32)[:, None] * K
    for layer in range(L):
        last = _last_use(trace.experts[:, layer : layer + 1], trace.num_experts)[:, 0]
        before, after = last[skip : T - m + 1], last[skip + m :]
        held = np.zeros(before.shape, bool)
        if slots:
            oldest = np.partition(before, -slots, axis=1)[:, -slots, None]
            held = (before >= oldest) & (before >= 0)
        out[layer] = np.count_nonzero((after >= first) & ~held) / len(first)
    return out


def layer_overlap(trace):
    """How many of a token's experts in one layer have the same number as some of its experts in another.

    Experts of different layers are different weights, so this is no locality: it says whether numbers repeat from layer to
    layer. By chance it is K / E. Whether one layer's choice tells the next one's is ``layer_prediction``.

    Returns:
        np.ndarray: ``[L, L]``, means over tokens; 1 on the diagonal.
    """
    T, L, K = trace.experts.shape
    chosen = np.zeros((T, L, trace.num_experts), np.float32)
    np.put_along_axis(chosen, trace.experts.astype(np.intp), 1, -1)
    by_layer = chosen.transpose(1, 0, 2).reshape(L, -1)
    return by_layer @ by_layer.T / (T * K)


def layer_prediction(trace, ahead=1):
    """Which experts of a layer could have been told from an earlier one, by counting.

    The first half of the tokens counts how often expert f of layer l + ahead was chosen together with expert e of layer l; in the
    second half the K experts with the largest sum of counts over the token's experts in layer l are the prediction.

    Args:
        trace (Trace): ``[T, L, K]``.
        ahead (int): Layers ahead, at least 1.

    Returns:
        dict[str, np.ndarray]: ``[T - T // 2, L - ahead, K]`` of bool each: which of the experts needed in layers ahead to L, in the second half,
        were predicted. ``pairs`` as above; ``popular`` by the K most popular of the first half, whatever the token, which pairs
        must beat to tell anything.
    """
    T, L, K = trace.experts.shape
    if not 1 <= ahead < L:
        raise TraceError(f"layer_prediction: expected 1 to {L - 1} layers ahead, got {ahead}.")
    half, E = T // 2, trace.num_experts
    chosen = np.zeros((T, L, E), np.float32)
    np.put_along_axis(chosen, trace.experts.astype(np.intp), 1, -1)
    out = {name: np.zeros((T - half, L - ahead, K), bool) for name in ("pairs", "popular")}
    for layer in range(L - ahead):
        here, there = chosen[:half, layer], chosen[:half, layer + ahead]
        needed = trace.experts[half:, layer + ahead].astype(np.intp)
        scores = {
            "pairs": chosen[half:, layer] @ (here.T @ there),
            "popular": there.sum(0)[None].repeat(T - half, 0),
        }
        for name, score in scores.items():
            best = np.zeros((T - half, E), bool)
            np.put_along_axis(best, np.argpartition(-score, K - 1, axis=1)[:, :K], True, 1)
            out[name][:, layer] = np.take_along_axis(best, needed, 1)
    return out


@dataclass(frozen=True)
class Locality:
    """What a synthetic trace is made from, for each layer.

    A token draws K distinct experts with chances in proportion to ``(1 - stickiness) * popularity + stickiness * recency``:
    popularity is ``rank ** -zipf``, recency the share of the tokens before that used the expert, a token m back weighing
    ``exp(-m / memory)``.

    Attributes:
        zipf (tuple[float]): The skew of popularity; 0: all alike.
        stickiness (tuple[float]): How much of the chance goes to experts used of late, 0 to below 1.
        memory (tuple[float]): How long of late is, in tokens; near 0: only the last one counts.
    """

    zipf: tuple
    stickiness: tuple
    memory: tuple

    def __post_init__(self):
        n = len(self.zipf)
        if not n or (len(self.stickiness), len(self.memory)) != (n, n):
            raise ValueError(
                f"Locality: expected as many layers of each, at least one, got {n}, {len(self.stickiness)} and {len(self.memory)}."
            )
        for name, low, high in (("zipf", 0, 20), ("stickiness", 0, 0.999), ("memory", 1e-3, 1e6)):
            bad = [v for v in getattr(self, name) if not low <= v <= high]
            if bad:
                raise ValueError(f"Locality.{name}: expected {low:g} to {high:g}, got {bad[0]}.")


def synthesize(locality, T, L, E, K, seed=0, warmup=64):
    """A random trace with given locality, for any number of layers and experts.

    Args:
        locality (Locality): From ``fit`` or made by hand. With n layers of parameters, layer l of L takes those of ``l * n // L``.
        T (int): Tokens, all decoded.
        L (int): Layers.
        E (int): Experts.
        K (int): Experts per token, distinct, in random order.
        seed (int): The same seed gives the same trace.
        warmup (int): Tokens before the first, so that it has some behind it.

    Returns:
        Trace: ``[T, L, K]``.

    Raises:
        ValueError: If the sizes make no trace.
    """
    if min(T, L, K) < 1 or not K <= E <= 1 << 16:
        raise ValueError(
            f"synthesize: expected T, L and K of 1 or more, and E of K to 65536, got {T=}, {L=}, {E=}, {K=}."
        )
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
    for t in range(-warmup, T):
        # The K earliest of exponential arrivals with these rates are K draws without replacement.
        rate = popular + sticky * recent
        arrival = rng.standard_exponential((L, E), np.float32) / np.maximum(rate, 1e-30)
        chosen = np.argpartition(arrival, K - 1, axis=1)[:, :K]
        recent *= decay
        recent[rows, chosen] += (1 - decay) / K
        if t >= 0:
            experts[t] = chosen
    name = f"synthetic, zipf {np.mean(zipf):.2f}, stickiness {np.mean(sticky):.2f}, memory {np.mean(memory):.1f}"
    return Trace(experts, np.full(T, "decode"), np.zeros(T, np.int64), E, name, seed)


LAGS = (1, 2, 4, 8, 16)  # tokens
SIZES = (1.5, 2, 3, 4, 6)  # slots, in K


def _features(trace):
    """``[L, F]``: overlaps and hit rates, what a synthetic trace should share with a recorded one."""
    T, L, K = trace.experts.shape
    lags = [overlap(trace, m)["each"] for m in LAGS if m < T]
    hits = lru_hit_rate(trace)
    sizes = [hits[:, int(s * K)] for s in SIZES if s * K < trace.num_experts]
    skew = (popularity(trace) ** 2).sum(1) / K  # the overlap of two tokens far apart
    return np.stack([*lags, *sizes, skew], axis=1)


def fit(trace, rounds=3, seed=0):
    """The parameters with which ``synthesize`` makes traces like this one.

    Every round makes a trace with as many tokens and experts whose layers are candidates, and keeps for each layer the one
    nearest in overlap at lags 1 to 16, LRU hit rates at 1.5 K to 6 K slots, and skew; the next round looks around it.

    Args:
        trace (Trace): Its decoded tokens count, at least 32; all of them if none is decoded.
        rounds (int): Rounds.
        seed (int): Of the candidates.

    Returns:
        Locality: For each of the trace's layers.
    """
    trace = trace.decode if (trace.phase == "decode").any() else trace
    T, L, K = trace.experts.shape
    if T < 32:
        raise TraceError(f"fit: expected at least 32 tokens, got {T}.")
    want = _features(trace)
    grid = np.stack(
        [
            v.ravel()
            for v in np.meshgrid(
                np.linspace(0, 1.5, 7), np.linspace(0, 0.9, 7), [0.5, 2, 8, 32, 128], indexing="ij"
            )
        ],
        1,
    )
    spread = np.array([0.25, 0.15, 0.0])
    best, error = np.zeros((L, 3)), np.full(L, np.inf)
    for i in range(rounds):
        made = synthesize(
            Locality(*map(tuple, grid.T)), T, len(grid), trace.num_experts, K, seed + i
        )
        distance = np.square(_features(made)[None] - want[:, None]).sum(-1)  # [L, candidates]
        nearest = distance.argmin(1)
        better = distance[np.arange(L), nearest] < error
        best[better], error[better] = grid[nearest[better]], distance[better, nearest[better]]
        # Around each layer's best: every combination of a step down, none, up.
        step = np.stack(
            [v.ravel() for v in np.meshgrid([-1, 0, 1], [-1, 0, 1], [0.5, 1, 2], indexing="ij")], 1
        )
        around = best[:, None] + np.concatenate(
            [step[:, :2] * spread[:2] / 2 ** (i + 1), np.zeros((len(step), 1))], 1
        )
        around[..., 2] *= step[:, 2] ** (1 / (i + 1))
        grid = np.clip(around.reshape(-1, 3), (0, 0, 0.1), (4, 0.98, 1e4))
    return Locality(*(tuple(float(v) for v in column) for column in best.T))
