"""What tokens, reads and arithmetic cost on this machine: what ``pagecache.replay`` reckons with."""

import time
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from .. import StreamConfig, footprint
from ..lab import machine
from ..streaming.model import load_model, session_of
from ..streaming.record import Trace, route_by


@dataclass(frozen=True)
class Costs:
    """What things take on one machine.

    Attributes:
        fixed_s (float): A token's work but for the routed experts: attention, router, head, Python.
        expert_s (float): One expert's arithmetic for one token.
        warm_s_per_byte (float): A byte read from the page cache, with the engine's reads in flight.
        cold_s_per_byte (float): A byte read from the disk, with as many.
        warm_call_s (float): What a layer's reads take besides when all come from the page cache.
        cold_call_s (float): What they take besides when one comes from the disk.
        overlap (float): Of the shorter of a layer's reads and arithmetic, the share that the other hides where the engine
            overlaps them (reads of a millisecond or more), 0 to 1.
    """

    fixed_s: float
    expert_s: float
    warm_s_per_byte: float
    cold_s_per_byte: float
    warm_call_s: float = 0.0
    cold_call_s: float = 0.0
    overlap: float = 0.0


def measure_costs(path, config=None, tokens=12, seed=0, samples=None):
    """Measure what ``pagecache.replay`` needs, with the engine's own calls and as many misses in each as wanted.

    First reads without arithmetic, from the disk and from the page cache, with 1 to K misses in a layer: two straight lines over the
    bytes. Then whole tokens without a miss, and with nothing but misses from the disk: how much of the reading the arithmetic hides.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig, optional): Its ``mode`` (``stacked`` or ``fused``), ``readers``, ``streams``, ``dtype`` and ``scales`` count.
        tokens (int): Samples of each kind; fewer of the cold ones where there are fewer experts to miss.
        seed (int): Of the order of reading.
        samples (dict, optional): Filled with the seconds of every sample by kind, for the record: ``("cold", m)`` and ``("warm", m)`` of a
            layer's reads with m misses, ``"hit"`` and ``"miss"`` of a whole token.

    Returns:
        Costs: From medians.

    Raises:
        ValueError: If the mode has no slots, or every token needs every expert.
    """
    config = config or StreamConfig()
    feet = footprint(path, StreamConfig(mode="resident", top_k=config.top_k))
    L, E, K, nbytes = feet.num_layers, feet.num_experts, feet.top_k, feet.expert_nbytes
    config = replace(config, slots=K, prefetch="none", pinned_nbytes=0)
    if config.mode not in ("stacked", "fused"):
        raise ValueError(f"measure_costs: expected mode stacked or fused, got {config.mode!r}.")
    if E == K:
        raise ValueError(
            f"measure_costs: expected more experts than a token needs, or none is ever read twice; got {E} and {K}."
        )
    samples = {} if samples is None else samples
    rng = np.random.default_rng(seed)
    model, _ = load_model(path, config)
    with model:
        layers = session_of(model).layers

        def rows(m, T):
            return missing(m, T, L, E, K, rng)

        def bring(row):
            for layer, experts in zip(layers, row.tolist()):
                layer.bring(experts)

        most = min(K, E - K)
        counts = sorted({1, -(-most // 4), -(-most // 2), most})
        reads = {
            (state, m): samples.setdefault((state, m), [])
            for state in ("cold", "warm")
            for m in counts
        }
        for m in rng.permutation(np.repeat(counts, 2)).tolist():
            need = rows(m, tokens // 2 + 1)
            for state in ("cold", "warm"):  # the second time they are in the page cache
                if state == "cold":
                    machine.drop_pages(path)
                bring(need[0])
                for row in need[1:]:
                    begin = time.perf_counter()
                    bring(row)
                    reads[state, m].append((time.perf_counter() - begin) / L)
        lines = {}
        for state in ("cold", "warm"):
            x = np.array(counts) * nbytes
            y = np.array([np.median(reads[state, m]) for m in counts])
            slope, call = (
                np.polyfit(x, y, 1, w=1 / y) if len(x) > 1 else (0, -1)
            )  # relative errors count alike
            if call < 0 or slope < 0:
                slope, call = float((x * y).sum() / (x * x).sum()), 0.0
            lines[state] = float(slope), float(call)

        def decode(need):
            trace = Trace(
                need.astype(np.uint16),
                np.full(len(need), "decode"),
                np.zeros(len(need), np.int64),
                E,
            )
            cache, out = make_prompt_cache(model), []
            with route_by(model, trace):
                for i in range(len(need)):
                    begin = time.perf_counter()
                    mx.eval(model(mx.array([[i % 64]]), cache=cache))
                    out.append(time.perf_counter() - begin)
            return out[min(2, len(out) - 1) :]

        hit = samples.setdefault("hit", [])
        miss = samples.setdefault("miss", [])
        for _ in range(2):
            hit += decode(np.repeat(rows(1, 2)[:1], tokens // 2 + 2, axis=0))
            need = rows(most, tokens // 2 + 2)
            machine.drop_pages(path)
            miss += decode(need)
        hit_s, miss_s = np.median(hit), np.median(miss)
        expert_s = _expert_s(model, layers[0], rows(1, 2)[0, 0], tokens)
    cold_s = np.median(reads["cold", most])
    experts_s = K * expert_s
    hidden = 1 - (miss_s - hit_s) / (L * cold_s)  # of the reads
    overlap = hidden * cold_s / min(cold_s, experts_s) if experts_s else 0.0
    return Costs(
        fixed_s=float(max(0.0, hit_s - L * experts_s)),
        expert_s=float(expert_s),
        warm_s_per_byte=lines["warm"][0],
        cold_s_per_byte=lines["cold"][0],
        warm_call_s=lines["warm"][1],
        cold_call_s=lines["cold"][1],
        overlap=float(np.clip(overlap, 0, 1)),
    )


def missing(m, T, L, E, K, rng):
    """Tokens of which each misses m experts in K slots, and no two of them the same while there are any.

    Returns:
        np.ndarray: ``[T, L, K]``; fewer tokens, at least 2, if E would not do.
    """
    T = min(T, max(2, (E - K) // m + 1))
    order = rng.permuted(np.tile(np.arange(E), (L, 1)), axis=1)
    # A window over each layer's experts that moves on by m: the slots hold exactly the last token's.
    return order[:, (np.arange(T)[:, None] * m + np.arange(K)) % E].transpose(1, 0, 2)


def _expert_s(model, layer, experts, tokens):
    """Seconds of one more expert in a layer that holds them all: from K against half as many."""
    K = len(experts)
    module = layer.bank.experts
    D = module["fc2" if "fc2" in module else "down_proj"].weight.shape[1]  # its rows
    x = mx.random.normal((1, 1, D), key=mx.random.key(0)).astype(session_of(model).dtype)
    mx.eval(x)
    half, seconds = max(1, K // 2), {K: [], max(1, K // 2): []}
    for i in range(2 * tokens + 2):
        for k in seconds:
            indices = mx.array(experts[None, None, :k].astype(np.uint32))
            begin = time.perf_counter()
            mx.eval(layer(x, indices))
            if i >= 2:
                seconds[k].append(time.perf_counter() - begin)
    if half == K:
        return float(np.median(seconds[K]))
    return float(max(0.0, np.median(np.subtract(seconds[K], seconds[half]))) / (K - half))
