"""Measure what tokens, reads and arithmetic cost on this machine, with the engine's own calls."""

import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, footprint, load
from ...replay.costs import Costs, CostSamples
from ...replay.locality import decode_trace
from ...streaming.record import route_by
from ...streaming.session import session_of
from .. import oscache

DISCARDED = 2  # tokens or calls at the start of a series, slower than the rest
ROUNDS = 2  # of every kind of sample


def measure_costs(
    path: str | Path, config: StreamConfig | None = None, tokens: int = 12, seed: int = 0
) -> Costs:
    """The costs that a replay needs: medians of ``measure_samples``.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig, optional): As for ``measure_samples``.
        tokens (int): Samples of each kind.
        seed (int): Of the order of reading.
    """
    return measure_samples(path, config, tokens, seed).costs()


def measure_samples(
    path: str | Path, config: StreamConfig | None = None, tokens: int = 12, seed: int = 0
) -> CostSamples:
    """Time reads, tokens and one expert's arithmetic.

    First reads without arithmetic, from the disk and from the page cache, with 1 to K misses in a
    layer. Then whole tokens without a miss, and with as many misses from the disk as there can be,
    which shows how much of the reads the arithmetic hides.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig, optional): Its ``mode`` (``stacked`` or ``fused``), ``readers``,
            ``dtype`` and ``top_k`` count.
        tokens (int): Samples of each kind; fewer from the disk if there are too few experts.
        seed (int): Of the order of reading.

    Raises:
        ValueError: If the mode has no slots, or every token needs every expert.
    """
    config = config or StreamConfig()
    size = footprint(path, StreamConfig(mode="resident", top_k=config.top_k))
    L, E, K = size.num_layers, size.num_experts, size.top_k
    if config.mode not in ("stacked", "fused"):
        raise ValueError(f"measure_costs: expected mode stacked or fused, got {config.mode!r}.")
    if E == K:
        raise ValueError(
            "measure_costs: expected more experts than a token needs, or none is ever read twice; "
            f"got {E} and {K}."
        )
    most = min(K, E - K)  # misses in a layer, token after token
    rng = np.random.default_rng(seed)

    def rows(misses, num):
        return rows_with_misses(misses, num, L, E, K, rng)

    config = replace(config, slots=K, prefetch="none")
    model, _ = load(path, config)
    with model:
        warm, cold = _time_reads(model, path, most, rows, tokens, rng)
        hit, miss = [], []
        for _ in range(ROUNDS):
            same = np.repeat(rows(1, 2)[:1], tokens // 2 + DISCARDED, axis=0)
            hit += _time_tokens(model, same, E)
            need = rows(most, tokens // 2 + DISCARDED)
            oscache.drop_pages(path)
            miss += _time_tokens(model, need, E)
        expert_s = _expert_s(model, rows(1, 2)[0, 0], tokens)
    return CostSamples(L, K, size.expert_nbytes, warm, cold, hit, miss, expert_s)


def rows_with_misses(
    misses: int, num: int, L: int, E: int, K: int, rng: np.random.Generator
) -> np.ndarray:
    """Tokens that each miss so many experts in K slots; none twice while there are others.

    Returns:
        np.ndarray: ``[T, L, K]``; T is ``num``, or less, at least 2, if E is too small for it.
    """
    num = min(num, max(2, (E - K) // misses + 1))
    order = rng.permuted(np.tile(np.arange(E), (L, 1)), axis=1)
    # A window over each layer's experts that moves by ``misses``: the slots hold exactly the last
    # token's.
    places = (np.arange(num)[:, None] * misses + np.arange(K)) % E
    return order[:, places].transpose(1, 0, 2)


def _time_reads(model, path, most, rows, tokens, rng):
    """Seconds of a layer's reads by number of misses, from the page cache and from the disk."""
    layers = session_of(model).layers

    def bring(row):
        for layer, experts in zip(layers, row.tolist()):
            layer.read(experts)

    counts = sorted({1, -(-most // 4), -(-most // 2), most})
    warm, cold = ({m: [] for m in counts} for _ in range(2))
    for m in rng.permutation(np.repeat(counts, ROUNDS)).tolist():
        need = rows(m, tokens // 2 + 1)
        oscache.drop_pages(path)
        for samples in (cold, warm):  # the second time they are in the page cache
            bring(need[0])
            for row in need[1:]:
                begin = time.perf_counter()
                bring(row)
                samples[m].append((time.perf_counter() - begin) / len(layers))
    return warm, cold


def _time_tokens(model, rows, E):
    """Seconds of whole tokens that need given experts ``[T, L, K]``."""
    cache, seconds = make_prompt_cache(model), []
    with route_by(model, decode_trace(rows.astype(np.uint16), E)):
        for i in range(len(rows)):
            begin = time.perf_counter()
            mx.eval(model(mx.array([[i % 64]]), cache=cache))
            seconds.append(time.perf_counter() - begin)
    return seconds[min(DISCARDED, len(rows) - 1) :]


def _expert_s(model, experts, tokens):
    """Seconds of one more expert in a layer that holds them all: from K against half as many."""
    session = session_of(model)
    layer, K = session.layers[0], len(experts)
    module = layer.slots.bank.experts
    D = module["fc2" if "fc2" in module else "down_proj"].weight.shape[1]  # rows of the output
    x = mx.random.normal((1, 1, D), key=mx.random.key(0)).astype(session.dtype)
    mx.eval(x)
    half = max(1, K // 2)
    seconds = {k: [] for k in (K, half)}
    for i in range(2 * tokens + DISCARDED):
        for k in seconds:
            indices = mx.array(experts[None, None, :k].astype(np.uint32))
            begin = time.perf_counter()
            mx.eval(layer(x, indices))
            if i >= DISCARDED:
                seconds[k].append(time.perf_counter() - begin)
    if half == K:
        return float(np.median(seconds[K]))
    more_s = np.median(np.subtract(seconds[K], seconds[half]))
    return float(max(0.0, more_s) / (K - half))
