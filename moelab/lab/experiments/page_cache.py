"""Slots against the page cache: a sweep beside its replay, and what notebook 03 draws of both."""

from dataclasses import fields, replace

import numpy as np

from ... import DATA
from ...replay import locality as routing
from ...replay import pagecache
from ...streaming.record import Trace
from .. import limit
from ..plots import style as figures
from . import advise as advice
from . import sweep

NO_LIMIT = "no limit"


def costs_of(record):
    """The costs measured with a recorded sweep, the median of its rounds."""
    return pagecache.Costs(
        **{
            f.name: float(np.median([c[f.name] for c in record["costs"]]))
            for f in fields(pagecache.Costs)
        }
    )


def bare(costs):
    """The same costs with the arithmetic left out: what the part ``reads`` of a sweep takes."""
    return replace(costs, fixed_s=0.0, expert_s=0.0, overlap=0.0)


def replayed(record, point, i, part="reads", costs=None, **how):
    """Replay the tokens of one run of a sweep.

    Args:
        record (dict): Of ``sweep.sweep``.
        point (Point): The setting.
        i (int): The round.
        part (str): ``reads`` or ``decode``.
        costs (Costs, optional): Default: those in the record.
        how: As for ``pagecache.replay``.

    Returns:
        Replay: Of the tokens that the run timed.
    """
    trace, size = sweep.trace_of(record), record["sizes"]
    before = (
        record["warmup"] if part == "reads" else record["warmup"] + record["reads"] + 4
    )  # as measure goes ahead
    rows = trace.experts[
        (i * len(trace) // record["runs"] + np.arange(before + record[part])) % len(trace)
    ]
    rows = Trace(
        rows, np.full(len(rows), "decode"), np.zeros(len(rows), np.int64), trace.num_experts
    )
    costs = costs or costs_of(record)
    if part == "reads":
        costs = bare(costs)
    if point.limit_nbytes is None:  # the whole file was read before: nothing comes from the disk
        costs = replace(costs, cold_s_per_byte=costs.warm_s_per_byte, cold_call_s=costs.warm_call_s)
    one = size["slot_nbytes"] // size["L"]
    stay = (
        pagecache.pin(
            Trace.load(DATA / "traces" / f"{point.pinned_by}.npz"),
            point.pinned_nbytes,
            point.slots,
            one,
        )
        if point.pinned_by
        else ()
    )
    return pagecache.replay(
        rows,
        float("inf") if point.limit_nbytes is None else point.limit_nbytes,
        point.slots or size["K"],
        point.policy if point.slots else "none",
        expert_nbytes=size["expert_nbytes"],
        slot_nbytes=one,
        other_nbytes=sweep.other_nbytes(size),
        costs=costs,
        skip=before,
        pinned=stay,
        **how,
    )


def compare(record, part="reads", costs=None, **how):
    """A sweep beside its replay, point by point.

    Points with read-ahead are left out, which is not replayed; of ``decode`` those without slots, which compute in another way
    (``buffers``) than the costs are of.

    Returns:
        list[dict]: As ``sweep.summarize``, of the points that ran, with ``token_s`` (median of the runs) and ``predicted_s``
        (median of the replays of the same tokens), ``error`` (predicted over measured, less 1), ``predicted_hit_rate``,
        ``predicted_disk`` (bytes a token).
    """
    out = []
    for row in sweep.summarize(record):
        if (
            row["killed"]
            or part not in row
            or row["point"].ahead
            or (part == "decode" and not row["point"].slots)
        ):
            continue
        runs = [replayed(record, row["point"], i, part, costs, **how) for i in row[part]["runs"]]
        row["token_s"] = row[part]["median"]
        row["predicted_s"] = float(np.median([r.token_s.mean() for r in runs]))
        row["error"] = row["predicted_s"] / row["token_s"] - 1
        row["predicted_hit_rate"] = float(np.median([r.app_hit_rate for r in runs]))
        row["predicted_disk"] = (
            0.0
            if row["point"].limit_nbytes is None
            else float(np.median([r.read_per_token for r in runs]))
        )
        out.append(row)
    return out


def agreement(rows, part="reads"):
    """How well the replay does over the points of ``compare``.

    Neighbours are points of one limit and policy with the next number of slots; they count where their quartiles are apart.

    Returns:
        dict: ``median_error`` (of the absolute ones), ``worst_error``, ``neighbours`` and how many have the ``same_sign``.
    """
    errors = np.abs([r["error"] for r in rows])
    pairs = [
        (a, b)
        for a, b in zip(rows, rows[1:])
        if replace(a["point"], slots=0) == replace(b["point"], slots=0)
        and (a[part]["p75"] < b[part]["p25"] or b[part]["p75"] < a[part]["p25"])
    ]
    same = sum(
        (a["token_s"] < b["token_s"]) == (a["predicted_s"] < b["predicted_s"]) for a, b in pairs
    )
    return {
        "median_error": float(np.median(errors)), "worst_error": float(errors.max()), "neighbours": len(pairs), "same_sign": same,
    }  # fmt: skip


def name(limit_nbytes, record):
    """A limit in words: how much of the checkpoint it is."""
    if limit_nbytes is None:
        return NO_LIMIT
    return f"{limit_nbytes / 1e6:.0f} MB ({limit_nbytes / record['sizes']['checkpoint_nbytes']:.0%} of the file)"


def limits(record):
    """The limits of a sweep, smallest first, None last."""
    return sorted({s["limit_nbytes"] for s in record["samples"]}, key=lambda n: (n is None, n))


def curve(record, limit_nbytes, part="reads", policy="lru", ahead=False):
    """The points of one line of a sweep that ran.

    Returns:
        list[dict]: As ``sweep.summarize``, by slots.
    """
    line = sweep.Point(0, limit_nbytes, policy, ahead)
    return [
        r
        for r in sweep.summarize(record)
        if not r["killed"] and part in r and replace(r["point"], slots=0) == line
    ]


def valley(record, limit_nbytes, part="reads", ahead=False):
    """Where a line of a sweep is best and worst, slots of 0 left out.

    Returns:
        dict: ``least`` (fewest slots), ``most``, ``best`` and ``worst``: ``(slots, seconds)``; ``ridge``: the slowest over the fewest slots,
        less 1; ``of_best``: the most slots over the best, less 1; ``bytes``: the most bytes from the SSD over those with the fewest slots (nan if these are none to speak of).
    """
    rows = [r for r in curve(record, limit_nbytes, part, ahead=ahead) if r["point"].slots]
    points = [(r["point"].slots, r[part]["median"]) for r in rows]
    best, worst = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    disk = [r["disk_per_token"] for r in rows]
    return {
        "best": best, "worst": worst, "least": points[0], "most": points[-1], "ridge": worst[1] / points[0][1] - 1,
        "of_best": points[-1][1] / best[1] - 1, "bytes": max(disk) / disk[0] if disk[0] > 1e5 else float("nan"),
    }  # fmt: skip


def curves(record, title, finding, part="reads", rows=None, note="", ahead=False):
    """Milliseconds of a token over slots, a line for each limit, the replay of each beside it.

    Args:
        record (dict): Of ``sweep.sweep``.
        title, finding, note (str): As for ``figures``.
        part (str): ``reads`` or ``decode``.
        rows (list[dict], optional): Of ``compare``: the replay.
        ahead (bool): Whether to show what was measured with read-ahead, too.
    """
    fig = figures.figure(
        title,
        "slots in each layer (0: none, every expert is read each time)",
        "ms a token",
        note=note,
        card=record["machine"],
    )
    words = []
    lines = [(n, False) for n in limits(record)] + [(n, True) for n in limits(record) if ahead]
    lines = [(n, on, mine) for n, on in lines if (mine := curve(record, n, part, ahead=on))]
    for i, (n, on, mine) in enumerate(lines):
        what = name(n, record) + (", with read-ahead" if on else "")
        figures.band(
            fig,
            [r["point"].slots for r in mine],
            [np.array(list(r[part]["runs"].values())) * 1e3 for r in mine],
            what,
            i,
        )
        words.append(
            f"{what}: "
            + ", ".join(f"{r[part]['median'] * 1e3:.1f} at {r['point'].slots}" for r in mine)
        )
        theirs = [
            r
            for r in rows or []
            if replace(r["point"], slots=0) == sweep.Point(0, n, "lru", on) and not on
        ]
        if theirs:
            look = figures.style(i)
            fig.add_scatter(
                x=[r["point"].slots for r in theirs], y=[r["predicted_s"] * 1e3 for r in theirs], name=f"replay, {what}",
                mode="lines+markers", line=dict(color=look["line"]["color"], dash="dot", width=1.5),
                marker=dict(symbol=look["marker"]["symbol"] + "-open", size=8, color=look["marker"]["color"]),
            )  # fmt: skip
    fig.update_layout(height=520, margin=dict(b=130))
    return figures.describe(
        fig, alt="Milliseconds a token over slots. " + "; ".join(words) + ".", finding=finding
    )


def sources(record, limit_nbytes, title, finding, note=""):
    """Where an expert that is needed comes from, over slots, under one limit: its slot, the page cache or the SSD."""
    rows = curve(record, limit_nbytes)
    fig = figures.figure(
        title,
        "slots in each layer",
        "share of the experts needed (%)",
        note=note,
        card=record["machine"],
        barmode="stack",
    )
    size = record["sizes"]
    needed = size["L"] * size["K"] * size["expert_nbytes"]
    x = [str(r["point"].slots) for r in rows]
    slot = np.array([r["hit_rate"] for r in rows]) * 100
    disk = np.minimum([r["disk_per_token"] / needed * 100 for r in rows], 100 - slot)
    ahead = np.array([r["disk_per_token"] / needed * 100 for r in rows]) - disk
    for i, (what, values, pattern) in enumerate(
        [("in its slot", slot, ""), ("copied from the page cache", 100 - slot - disk, "/"), ("read from the SSD", disk, "x"),
         ("read ahead, for nothing", ahead, ".")]
    ):  # fmt: skip
        fig.add_bar(
            x=x, y=values, name=what,
            marker=dict(color=figures.COLORS[i], pattern=dict(shape=pattern, fgcolor="white", fillmode="overlay")),
        )  # fmt: skip
    fig.update_xaxes(type="category")
    words = "; ".join(
        f"{r['point'].slots} slots: {s:.0f}% in a slot, {100 - s - d:.0f}% page cache, {d:.0f}% SSD"
        for r, s, d in zip(rows, slot, disk)
    )
    return figures.describe(fig, alt=f"Stacked bars over slots. {words}.", finding=finding)


def residuals(compared, title, finding, note="", card=None, bound=0.15):
    """Predicted against measured time, every point of ``{name: rows of compare}``, with a band of ``bound`` each way."""
    fig = figures.figure(title, "measured ms a token", "replayed ms a token", note=note, card=card)
    top = 0
    for i, (what, rows) in enumerate(compared.items()):
        x, y = (np.array([r[k] for r in rows]) * 1e3 for k in ("token_s", "predicted_s"))
        text = [f"{r['point']}: {r['error']:+.0%}" for r in rows]
        fig.add_scatter(
            x=x, y=y, text=text, name=what, mode="markers", marker=figures.style(i)["marker"]
        )
        top = max(top, x.max(), y.max()) * 1.02
    for factor, label in ((1, "equal"), (1 + bound, f"{bound:.0%} apart"), (1 - bound, "")):
        fig.add_scatter(
            x=[0, top], y=[0, top * factor], mode="lines", name=label, showlegend=bool(label), hoverinfo="skip",
            line=dict(color=figures.GREY, width=1, dash="solid" if factor == 1 else "dash"),
        )  # fmt: skip
    errors = [r["error"] for rows in compared.values() for r in rows]
    alt = f"Replayed against measured milliseconds of {len(errors)} points; errors from {min(errors):+.0%} to {max(errors):+.0%}."
    return figures.describe(fig, alt=alt, finding=finding)


# Policies, in replay


def policies(trace, sizes, slots, memory_nbytes, costs, skip, names=pagecache.POLICIES):
    """``{policy: [Replay for each number of slots]}`` under one memory limit; sizes as in a sweep's record."""
    return {
        policy: [
            pagecache.replay(
                trace, memory_nbytes, n, policy, expert_nbytes=sizes["expert_nbytes"], costs=costs,
                slot_nbytes=sizes["slot_nbytes"] // sizes["L"], other_nbytes=sweep.other_nbytes(sizes), skip=skip,
            )
            for n in slots
        ]
        for policy in names
    }  # fmt: skip


def pinned_hits(traces, slots, skip):
    """Share of the needed experts that so many slots in each layer hold, if they all take turns, or K do and the others are pinned.

    Args:
        traces (dict[str, Trace]): Recorded ones of one model, by name.
        slots (int): S, pinned ones included.
        skip (int): Decoded tokens that are not counted, and that ``its beginning`` pins by.

    Returns:
        dict[str, dict[str, float]]: By trace: ``lru`` and ``lfu``; pinned by ``hindsight`` (the trace itself), by ``its beginning``, and by each other
        trace, ``by NAME``.
    """
    out = {}
    for name, trace in traces.items():
        trace = trace.decode
        L, K = trace.experts.shape[1:]

        def rate(policy="lru", by=None):
            stay = () if by is None else pagecache.pin(by, (slots - K) * L, K, 1)
            return float(
                pagecache.held(
                    trace.experts, trace.num_experts, slots if by is None else K, policy, stay
                )[skip:].mean()
            )

        out[name] = {
            "lru": rate(),
            "lfu": rate("lfu"),
            "hindsight": rate(by=trace),
            "its beginning": rate(by=trace[:skip]),
        }
        out[name] |= {f"by {other}": rate(by=t) for other, t in traces.items() if other != name}
    return out


def pinning(record, part="reads"):
    """The points of a sweep with pinned experts and of its slots, by name: a token's seconds in every round, the fewest slots first."""
    out = {}
    for row in sweep.summarize(record):
        p = row["point"]
        what = f"{p.slots} slots" + (
            f", {p.pinned_nbytes / 1e6:.0f} MB pinned by {p.pinned_by}" if p.pinned_nbytes else ""
        )
        out[what] = list(row[part]["runs"].values())
    return out


def depth(kinds, sizes, shares, tokens=320, skip=160, count=9, seed=0):
    """How high the ridge is, in replay with the arithmetic left out.

    Args:
        kinds (dict[str, tuple]): ``(Locality, Costs)`` by name.
        sizes (dict): As in a sweep's record.
        shares (list[float]): Memory over the checkpoint's size.
        tokens, skip (int): Of each trace, and how many of them fill the caches.
        count (int): Numbers of slots looked at, from K to what fits.
        seed (int): Of the traces.

    Returns:
        dict[str, dict]: By name, lists over ``shares``: ``ridge``, how much slower the slowest is than the fewest slots; ``bytes``, the most
        that come from the SSD over those with the fewest; ``most``, how much slower the most slots are than the best.
    """
    out = {}
    for what, (locality, costs) in kinds.items():
        trace = routing.synthesize(locality, tokens, sizes["L"], sizes["E"], sizes["K"], seed)
        rows = out[what] = {"ridge": [], "bytes": [], "most": []}
        for share in shares:
            memory = share * sizes["checkpoint_nbytes"]
            at = np.unique(
                np.linspace(sizes["K"], sweep.fits(sizes, memory), count).astype(int)
            ).tolist()
            replays = policies(trace, sizes, at, memory, bare(costs), skip, ("lru",))["lru"]
            s, disk = [r.token_s.mean() for r in replays], [r.read_per_token for r in replays]
            rows["ridge"].append(max(s) / s[0] - 1)
            rows["bytes"].append(max(disk) / max(disk[0], 1.0))
            rows["most"].append(s[-1] / min(s) - 1)
    return out


def roofline(record, limit_nbytes):
    """Decoding under a limit against what could not be beaten: the longer of its arithmetic and of its bytes at the SSD's rate.

    Arithmetic is the fastest decoding without a limit; the SSD's rate is the one measured with the sweep, cold.

    Returns:
        list[dict]: By slots: ``slots``, ``token_s``, ``roof_s`` and ``share``, roof over measured.
    """
    rows = [
        r
        for r in sweep.summarize(record)
        if not r["killed"] and "decode" in r and not r["point"].ahead
    ]
    free = [r["decode"]["median"] for r in rows if r["point"].limit_nbytes is None]
    if not free:
        raise ValueError(
            "roofline: expected a sweep with points without a limit, which say what the arithmetic takes."
        )
    out = []
    for r in rows:
        if (
            r["point"].limit_nbytes != limit_nbytes
            or r["point"].policy != "lru"
            or not r["point"].slots
        ):
            continue
        runs = [s for s in record["samples"] if sweep.point_of(s) == r["point"]]
        disk = np.median([np.mean(s["decode"]["disk_nbytes"]) for s in runs])
        roof = max(min(free), disk * costs_of(record).cold_s_per_byte)
        out.append(
            {
                "slots": r["point"].slots,
                "token_s": r["decode"]["median"],
                "roof_s": roof,
                "share": roof / r["decode"]["median"],
            }
        )
    return out


def advised(record, part="reads", costs=None):
    """What ``advise`` would have picked for each limit of a sweep, among its points, and how near to the best that is.

    Args:
        record (dict): Of ``sweep.sweep``; only its sizes, trace and costs are used to choose.
        part (str): ``reads``: for a device that computes in no time; ``decode``: for this one.
        costs (Costs, optional): Default: the record's.

    Returns:
        list[dict]: By limit: ``limit_nbytes``, ``picked`` and ``best`` (``(slots, policy)``), ``picked_s`` and ``best_s`` (medians),
        ``slower`` (picked over best, less 1), ``predicted_s``.
    """
    costs = costs or costs_of(record)
    costs, out = bare(costs) if part == "reads" else costs, []
    for n in limits(record):
        measured = {
            (r["point"].slots, r["point"].policy): r[part]["median"]
            for r in sweep.summarize(record)
            if not r["killed"]
            and part in r
            and r["point"].limit_nbytes == n
            and r["point"].slots
            and not r["point"].ahead
        }
        if n is None or not measured:
            continue
        settings = advice.replays(
            record["sizes"], n, sweep.trace_of(record), costs, list(measured), record["warmup"]
        )
        picked, best = advice.pick(settings), min(measured, key=measured.get)
        out.append({
            "limit_nbytes": n, "picked": picked, "best": best, "picked_s": measured[picked], "best_s": measured[best],
            "slower": measured[picked] / measured[best] - 1, "predicted_s": float(settings[picked].token_s.mean()),
        })  # fmt: skip
    return out


# Live, on this machine


def live(path, limits, slots, trace, runs=1, **tokens):
    """A small sweep here and now; None where memory cannot be limited, after saying why.

    Args:
        As for ``sweep.sweep``; ``limits`` in bytes.
    """
    try:
        record = sweep.sweep(path, sweep.points(path, limits, slots), trace, runs, **tokens)
    except limit.NoLimit as e:
        print(f"No live sweep, only the recorded one and the replay. {e}")
        return None
    first = next(s for s in record["samples"] if s["limit_nbytes"] is not None)
    print(f"memory limited by: {first['how']}")
    for way, why in first["refused"].items():
        print(f"  not by {way}: {why}")
    return record


# A cache to turn dials on


def dial(sizes, locality, costs, tokens=320, skip=160, seed=0):
    """The function behind notebook 03's sliders: it replays a trace through both caches, for every number of slots.

    Args:
        sizes (dict): As in a sweep's record.
        locality (Locality): Of the traces; its skew is one of the dials.
        costs (Costs): Of reads and arithmetic; the SSD's speed is one of the dials.

    Returns:
        Callable: From memory (% of the checkpoint), slots, policy, skew, SSD speed (GB/s) and arithmetic (ms a token) to a figure.
    """
    traces = {}

    def look(memory: int, slots: int, policy: str, skew: float, ssd: float, arithmetic: int):
        if skew not in traces:
            skewed = replace(locality, zipf=tuple(skew for _ in locality.zipf))
            traces[skew] = routing.synthesize(
                skewed, tokens, sizes["L"], sizes["E"], sizes["K"], seed
            )
        memory_nbytes = sizes["checkpoint_nbytes"] * memory / 100
        top = sweep.fits(sizes, memory_nbytes)
        if top < sizes["K"]:
            raise ValueError(
                f"{memory}% of the file: {sizes['K']} slots do not fit beside the rest of the model. Take more memory."
            )
        at = sorted(
            {
                *np.linspace(sizes["K"], top, 9).astype(int).tolist(),
                min(max(slots, sizes["K"]), top),
            }
        )
        here = replace(
            bare(costs), cold_s_per_byte=1 / (ssd * 1e9), overlap=1.0,
            expert_s=arithmetic * 1e-3 / (sizes["L"] * sizes["K"]),
        )  # fmt: skip
        (replays,) = policies(
            traces[skew], sizes, at, memory_nbytes, here, skip, (policy,)
        ).values()
        (none,) = policies(traces[skew], sizes, at[:1], memory_nbytes, here, skip, ("none",))[
            "none"
        ]
        ms = np.array([r.token_s.mean() for r in replays]) * 1e3
        mine = at.index(min(max(slots, sizes["K"]), top))
        best, chosen = int(ms.argmin()), replays[mine]
        fig = figures.figure(
            f"{at[mine]} slots: {ms[mine]:.1f} ms a token; best {ms[best]:.1f} with {at[best]}",
            "slots in each layer", "ms a token",
            note=f"replayed: {memory_nbytes / 1e6:.0f} MB, {policy}, zipf {skew:.2f}, SSD {ssd:.1f} GB/s, arithmetic {arithmetic} ms a token, overlapped",
        )  # fmt: skip
        fig.add_scatter(x=at, y=ms, name=policy, mode="lines+markers", **figures.style(0))
        fig.add_scatter(
            x=[at[mine]],
            y=[ms[mine]],
            name="chosen",
            mode="markers",
            marker=dict(symbol="star", size=16, color=figures.COLORS[1]),
        )
        figures.ceiling(fig, none.token_s.mean() * 1e3, "no slots: only the page cache")
        return figures.describe(
            fig,
            alt="Replayed milliseconds a token over slots: "
            + ", ".join(f"{m:.1f} at {n}" for n, m in zip(at, ms))
            + ".",
            finding=f"{chosen.app_hit_rate:.0%} in a slot; {chosen.page_nbytes / 1e6:.0f} MB of page cache serve "
            f"{np.nan_to_num(chosen.page_hit_rate):.0%} of the rest; {chosen.read_per_token / 1e6:.1f} MB a token come from the SSD.",
        )

    return look
