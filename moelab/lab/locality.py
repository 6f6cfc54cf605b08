"""A synthetic model's locality to turn dials on, for notebook 04."""

import numpy as np

from . import figures, pagecache, routing

POLICIES = ("lru", "lfu", "s3-fifo", "belady")


def bank_sizes(E, K):
    """Slots to draw a curve over: K to E."""
    return sorted({K, *(int(s) for s in np.linspace(K, E, 9))})


def hit_curves(trace, policies=POLICIES, sizes=None, skip=0):
    """Hit rates of slots over their number.

    Args:
        trace (Trace): ``[T, L, K]``.
        policies (tuple[str]): Of ``pagecache.POLICIES``.
        sizes (list[int], optional): Slots. Default: nine from K to E.
        skip (int): Tokens at the start that are not counted.

    Returns:
        dict[str, tuple[list, list]]: By policy the sizes, and for each of them the hit rates of the layers in percent.
    """
    T, L, K = trace.experts.shape
    sizes = sizes or bank_sizes(trace.num_experts, K)
    return {
        p: (sizes, [100 * pagecache.held(trace.experts, trace.num_experts, S, p)[skip:].mean((0, 2)) for S in sizes]) for p in policies
    }


def smallest_bank(trace, rate, skip=0):
    """The fewest slots whose LRU hit rate, averaged over layers, is at least ``rate``; None if none has it."""
    rates = routing.lru_hit_rate(trace, skip).mean(0)
    return int(np.argmax(rates >= rate)) if rates.max() >= rate else None


def dial(K=8, tokens=300, layers=4, skip=60):
    """The function behind notebook 04's sliders: from locality and experts to what slots would hit.

    Returns:
        Callable: From Zipf exponent, stickiness, memory (tokens) and E to a figure.
    """

    def look(zipf: float, stickiness: float, memory: int, experts: int):
        trace = routing.synthesize(routing.Locality((zipf,), (stickiness,), (memory,)), tokens, layers, experts, K)
        lag1 = routing.overlap(trace)["each"].mean()
        curves = hit_curves(trace, ("lru", "belady"), skip=skip)
        bank = smallest_bank(trace, 0.7, skip)
        has = f"{bank} slots hit 70%" if bank else "no number of slots hits 70%"
        fig = figures.figure(
            f"{lag1:.0%} of a token's experts are the last one's; {has}", "slots in each layer", "hits (%)",
            note=f"synthetic: top-{K} of {experts}, Zipf {zipf:.1f}, stickiness {stickiness:.1f}, memory {memory} tokens; {tokens} tokens, {layers} layers",
        )  # fmt: skip
        words = []
        for i, (name, (xs, rows)) in enumerate(curves.items()):
            figures.band(fig, xs, rows, name, i)
            words.append(f"{name} " + ", ".join(f"{np.median(r):.0f}% at {x}" for x, r in zip(xs, rows)))
        figures.ceiling(fig, 100 * lag1, "with the last token, lag 1")
        fig.update_yaxes(range=[0, 105])
        return figures.describe(
            fig,
            alt="Hit rates over slots: " + "; ".join(words) + f". Overlap with the last token: {lag1:.0%}.",
            finding=f"By chance {K / experts:.0%} of the experts would be the last token's; here {lag1:.0%} are, and {has} with LRU.",
        )

    return look
