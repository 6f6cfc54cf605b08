"""Notebook 11: experts divided over ranks: who reads what, what a token is made of, a model."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ...streaming.trace import Trace
from ..experiments.ranks import ROWS, bound
from ..experiments.several_machines import PLACEMENTS, Point, Rank, parts_122b
from ..plots import charts

RATES = {"this machine's SSD": None, "300 MB/s each": 300e6, "100 MB/s each": 100e6}
LAYERS = 4  # of the recorded model
GBIT = 1e9 / 8  # bytes a second


def _ranks(n):
    return f"{n} rank" + "s" * (n > 1)


def live_chart(found: Mapping[int, Sequence[Rank]], model: str, slots: int) -> go.Figure:
    """Megabytes that each rank reads for a token."""
    texts = {tuple(rank.tokens) for each in found.values() for rank in each}
    bars = {
        f"rank {r} of {n}": [rank.nbytes / len(rank.step_s) / 1e6]
        for n, each in found.items()
        for r, rank in enumerate(each)
    }
    one, most = found[1][0], max(found)
    alone = one.nbytes / len(one.step_s)
    more = max(rank.nbytes / len(rank.step_s) for rank in found[most])
    same = "All ranks wrote one text" if len(texts) == 1 else f"{len(texts)} texts were written"
    return charts.bars(
        {"": bars},
        f"{same}; each of {most} ranks reads at most {more / alone:.0%} of what one alone reads",
        "MB read for a token",
        f"One rank holds {slots} of {one.experts} experts of a layer; of {most} ranks each has as "
        f"many slots and reads {found[most][0].experts} experts at most.",
        note=f"{model}, {slots} slots in each layer of each rank, {len(one.step_s)} tokens",
    )


def parts_chart(record: dict, exchange: dict) -> go.Figure:
    """What a token of 1, 2 and 4 ranks is made of, with slow SSDs.

    Args:
        record (dict): Of ``experiments.ranks.divided``.
        exchange (dict): Of ``experiments.ranks.exchange``.
    """
    sources, total_s = {}, {}
    for label, rate in RATES.items():
        for n in (1, 2, 4):
            b = bound(record, n, rate)
            runs = [r["each"] for r in record["runs"] if (r["ranks"], r["rate"]) == (n, rate)]
            tokens = len(runs[0][0]["step_s"])
            wait_s = np.median([run[0]["counters"]["wait_s"] for run in runs]) / tokens
            sent_s = 0.0
            if n > 1:
                sent_s = LAYERS * float(np.median(exchange["s"][str(n)][f"gather of {ROWS[1]}"]))
            token_s = float(np.median(b.token_s))
            total_s[rate, n] = np.array([sum(run[0]["step_s"]) for run in runs])
            sources.setdefault(label, {})[_ranks(n)] = {
                "own reads": wait_s,
                "arithmetic": b.compute_s - sent_s,
                "exchange": sent_s,
                "the rest: reads of other ranks, copies": max(0.0, token_s - wait_s - b.compute_s),
            }
    slow, fast = (np.median(total_s[r, 1] / total_s[r, 2]) for r in (100e6, None))
    return charts.parts(
        sources,
        f"Two ranks: {slow:.2f} times the speed at 100 MB/s, {fast:.2f} with this machine's SSD",
        "Dividing the experts divides the reads; arithmetic and exchange stay. Four ranks share "
        "two cores here, which is where their arithmetic and exchange come from.",
        note=f"4 layers of Qwen3.5-35B-A3B shapes, {record['slots']} slots and "
        f"{record['limit_nbytes'] / 1e6:.0f} MB for each rank, slow SSDs simulated, the first "
        f"rank's, n={len(runs)} runs of {tokens} tokens",
        card=record["machine"],
    )


def exchange_chart(exchange: dict) -> go.Figure:
    """Microseconds of a sum and of a gather over two ranks, over the rows."""
    two = exchange["s"]["2"]
    series = {
        f"all_{kind}": (list(ROWS), [np.multiply(two[f"{kind} of {n}"], 1e6) for n in ROWS])
        for kind in ("sum", "gather")
    }
    ratio = np.median(two[f"sum of {ROWS[-1]}"]) / np.median(two[f"gather of {ROWS[-1]}"])
    return charts.lines(
        series,
        f"For the rows of 64 tokens a gather takes {1 / ratio:.2f} of a sum's time",
        "rows of 2048 values that every rank has in the end",
        "time of the exchange (us)",
        f"A gather sends each rank's own rows once. For one token ({ROWS[1]} rows) both take as "
        "long: that is the time of waking threads.",
        note=f"two ranks on one host over MLX's ring, a core each, n={len(two['sum of 1'])}",
        card=exchange["machine"],
    )


def placement_chart(found: Mapping[str, Mapping[str, Sequence]]) -> go.Figure:
    """Reads that the ranks wait for, over those of experts placed by number.

    Args:
        found (Mapping): Of ``several_machines.placements``, by a label.
    """
    sources, medians = {}, {}
    for label, ways in found.items():
        base = np.array(ways[PLACEMENTS[0]])[:, 0]
        sources[label] = {name: np.array(ways[name])[:, 0] / base for name in PLACEMENTS[1:]}
        sources[label]["perfect balance"] = np.array(ways[PLACEMENTS[0]])[:, 1] / base
        for name, ratios in sources[label].items():
            medians.setdefault(name, []).append(f"{np.median(ratios):.2f}")
    _, trace, hot, least = PLACEMENTS
    return charts.bars(
        sources,
        f"Reads waited for, over placing by number: {trace} {' and '.join(medians[trace])}, "
        f"{least} {' and '.join(medians[least])}",
        "reads waited for, over those by number",
        f"A trace of other texts balances a little; {hot} costs slots and loses. Reading where "
        "least is read gains most, but then every machine needs the whole file.",
        note=f"tiny-moe, replayed, {len(base)} kinds of text, LRU; a layer waits for the rank "
        "that reads most",
    )


def checked_chart(points: Sequence[Point], record: dict) -> go.Figure:
    """Measured tokens beside what the model says of them."""
    sources = {}
    for p in points:
        panel = sources.setdefault(f"{p.rate / 1e6:.0f} MB/s each", {})
        panel[f"{_ranks(p.ranks)}, measured"] = p.token_s
        panel[f"{_ranks(p.ranks)}, model"] = [p.model_s]
    errors = [p.error for p in points]
    return charts.bars(
        sources,
        f"The model is {min(errors):+.0%} to {max(errors):+.0%} off what was measured",
        "time for a token (ms)",
        "Reads of a replayed random routing at the SSD's rate, and a token with every expert held, "
        "added up.",
        note=f"4 layers of Qwen3.5-35B-A3B shapes, {record['slots']} slots, simulated SSDs",
        scale=1e3,
        card=record["machine"],
    )


def dial(trace: Trace) -> Callable[..., go.Figure]:
    """The function behind the sliders: a token on one machine and on several, by the model."""

    def look(ranks: int, slots: int, ssd_GBs: float, link_Gbits: float, latency_us: int, ms: int):
        def token(n):
            return parts_122b(
                trace, n, slots, ssd_GBs * 1e9, link_Gbits * GBIT, latency_us / 1e6, ms / 1e3
            )

        sizes = sorted({1, 2, ranks})
        rows = {f"{n} machine" + "s" * (n > 1): token(n) for n in sizes}
        one, more = (1e3 * sum(token(n).values()) for n in (1, ranks))
        return charts.parts(
            {"": rows},
            f"{_ranks(ranks)}: {one / more:.2f} times the speed of one",
            f"{one:.0f} ms a token on one machine, {more:.0f} on {ranks}: "
            + ", ".join(f"{part} {s * 1e3:.1f} ms" for part, s in token(ranks).items())
            + ".",
            note="a model, not a measurement: Qwen3.5-122B-A10B, "
            f"{slots} of 256 experts of a layer in slots, SSDs of {ssd_GBs:g} GB/s, "
            f"{link_Gbits:g} Gbit/s, {latency_us} us a message",
            card="",
        )

    return look
