"""The figures of notebooks 01 and 02: numbers in, a described figure out."""

import html

import numpy as np
from IPython.display import display
from plotly.subplots import make_subplots

from . import style as figures

VERDICTS = ("confirmed", "refuted", "depends on", "cannot be tested here")


def bars(sources, title, y, finding, note="", scale=1.0, log=False, marks=(), digits=3, card=None):
    """One column for each source, one bar for each variant: medians with whiskers from quartile to quartile.

    Args:
        sources (dict): ``{label of the source: {variant: samples}}``. Every column has its own axis.
        title, y, finding, note (str): As for ``figures``.
        scale (float): Multiplies the samples (1e6: seconds to microseconds).
        log (bool): Logarithmic axis.
        marks (list): ``(column, value, label)`` of lines to draw across a column, from 0.
        card (dict): The machine of recorded numbers.
    """
    fig = figures.figure(title, "", "", note=note, card=card, height=480, showlegend=False)
    _columns(fig, list(sources))
    words, wide = [], {1: 16, 2: 16, 3: 10}.get(len(sources), 6)
    for column, (label, variants) in enumerate(sources.items(), 1):
        stats = {
            n: np.percentile(np.asarray(s, float) * scale, (25, 50, 75))
            for n, s in variants.items()
        }
        low, mid, high = np.array(list(stats.values())).T
        x = [_wrap(n, wide) for n in stats]
        colors = [figures.COLORS[i % len(figures.COLORS)] for i in range(len(stats))]
        whiskers = dict(type="data", array=high - mid, arrayminus=mid - low, thickness=1.5, width=4)
        fig.add_bar(x=x, y=mid, marker_color=colors, error_y=whiskers, row=1, col=column)
        numbers = [f"{m:.{digits}g}" for m in mid]  # above the whisker, not on it
        fig.add_scatter(
            x=x,
            y=high,
            mode="text",
            text=numbers,
            textposition="top center",
            cliponaxis=False,
            hoverinfo="skip",
            row=1,
            col=column,
        )
        words.append(f"{label}: " + ", ".join(f"{n} {m}" for n, m in zip(stats, numbers)))
        top = max([high.max()] + [v for c, v, _ in marks if c == column - 1])
        if log:
            fig.update_yaxes(type="log", dtick=1, row=1, col=column)
        else:
            fig.update_yaxes(range=[0, top * 1.15], row=1, col=column)
    for column, value, label in marks:
        figures.ceiling(fig, value, label, row=1, col=column + 1)
    fig.update_yaxes(title=y, col=1)
    fig.update_xaxes(tickangle=0, tickfont=dict(size=12 if len(sources) < 3 else 10))
    return figures.describe(
        fig, alt=f"Bars of {y or title}. " + ". ".join(words) + ".", finding=finding
    )


def _columns(fig, titles):
    """One column of axes for each title, under a margin that holds title, subtitle and these."""
    make_subplots(1, len(titles), figure=fig, subplot_titles=titles, horizontal_spacing=0.1)
    fig.update_annotations(font_size=13, yshift=2)
    fig.update_layout(margin=dict(t=130))


def _wrap(text, width=16):
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) + 1 > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "<br>".join([*lines, line])


def parts(sources, title, finding, note="", y="ms a token"):
    """One column for each source: what a token's time is made of, stacked.

    Args:
        sources (dict): ``{label: {mode: {part: seconds}}}``.
    """
    fig = figures.figure(title, "", "", note=note, height=480, barmode="stack")
    _columns(fig, list(sources))
    words, names = (
        [],
        list(dict.fromkeys(p for modes in sources.values() for m in modes.values() for p in m)),
    )
    for column, (label, modes) in enumerate(sources.items(), 1):
        for i, part in enumerate(names):
            heights = [m.get(part, 0) * 1e3 for m in modes.values()]
            fig.add_bar(
                x=[_wrap(m, 10) for m in modes], y=heights, name=part, showlegend=column == 1,
                marker=dict(color=figures.COLORS[i], pattern=dict(shape=["", "/", "x"][i % 3], fgcolor="white", fillmode="overlay")), row=1, col=column,
            )  # fmt: skip
        words.append(
            f"{label}: "
            + "; ".join(
                f"{m} " + ", ".join(f"{p} {v * 1e3:.3g} ms" for p, v in x.items())
                for m, x in modes.items()
            )
        )
    fig.update_yaxes(title=y, col=1)
    fig.update_xaxes(tickangle=0, tickfont=dict(size=10))
    return figures.describe(
        fig, alt=f"Stacked bars of {y}. " + ". ".join(words) + ".", finding=finding
    )


def lines(series, title, x, y, finding, note="", log_x=True, ceilings=(), card=None):
    """Medians and quartiles over a number: ``series`` is ``{name: (xs, samples for each x)}``; ``ceilings`` are ``(value, label)``."""
    fig = figures.figure(title, x, y, note=note, card=card)
    words = []
    for i, (name, (xs, rows)) in enumerate(series.items()):
        figures.band(fig, xs, rows, name, i)
        words.append(
            f"{name}: " + ", ".join(f"{np.median(r):.3g} at {v}" for v, r in zip(xs, rows))
        )
    for value, label in ceilings:
        figures.ceiling(fig, value, label)
        words.append(f"Ceiling, {label}: {value:.3g}")
    if log_x:
        values = sorted({v for xs, _ in series.values() for v in xs})
        fig.update_xaxes(type="log", tickvals=values, ticktext=[str(v) for v in values])
    fig.update_yaxes(
        range=[
            0,
            1.12
            * max(
                [np.percentile(r, 75) for _, rows in series.values() for r in rows]
                + [c for c, _ in ceilings]
            ),
        ]
    )
    return figures.describe(fig, alt=f"{y} over {x}. " + ". ".join(words) + ".", finding=finding)


def verdicts(rows):
    """Shows a table of claims, each with one of ``VERDICTS`` and the numbers that it rests on.

    Args:
        rows (list): ``(id, claim, verdict, why)``.
    """
    for row in rows:
        if row[2] not in VERDICTS:
            raise ValueError(f"{row[0]}: verdict {row[2]!r}, expected one of {', '.join(VERDICTS)}")
    cells = "".join(
        f"<tr><td>{i}</td><td style='text-align:left'>{html.escape(claim)}</td><td><b>{verdict}</b></td>"
        f"<td style='text-align:left'>{html.escape(why)}</td></tr>"
        for i, claim, verdict, why in rows
    )
    head = "".join(
        f"<th style='text-align:left'>{h}</th>" for h in ("", "claim", "verdict", "because")
    )
    plain = "\n".join(f"{i} {verdict}: {claim} ({why})" for i, claim, verdict, why in rows)
    display({"text/html": f"<table><tr>{head}</tr>{cells}</table>", "text/plain": plain}, raw=True)


def recorded_note(record, what=""):
    """A recorded run's machine, short, for a figure's note."""
    m = record["machine"]
    return (
        f"recorded: {m['gpu'] or m['cpu']}, {m['backend']}, mlx {m['mlx']}, moelab {m['moelab']}, {m['date']}"
        + (f"; {what}" if what else "")
    )


def show(fig):
    """Display a described figure."""
    figures.show(fig)


# A model to turn dials on


def token_model(calls, layers, dispatch_us, other_operations, bytes_per_layer, GBs):
    """Seconds of a token whose operations are sent one after the other and whose weights stream through memory.

    Whichever is slower sets the pace: sending the operations or moving the bytes.
    """
    send_s = layers * (calls + other_operations) * dispatch_us * 1e-6
    move_s = layers * bytes_per_layer / (GBs * 1e9)
    return max(send_s, move_s)


def dispatch_dial(D, F, other_operations=40, GBs=800):
    """The function behind the sliders of notebook 01: from top-k, layers and memory bandwidth to tok/s over the cost of a dispatch."""

    def look(top_k: int, layers: int, bandwidth: int):
        cost = np.arange(0, 61, 2.0)
        ways = {
            "K calls a projection": 3 * top_k,
            "one gather a projection": 3,
            "gate and up fused": 2,
        }
        nbytes = top_k * 3 * D * F * 9 / 16
        fig = figures.figure(
            "A model, not a measurement: what a dispatch may cost before it sets the pace",
            "cost of one dispatch (us)",
            "tok/s",
            note=f"D={D}, F={F}, {layers} layers, top-{top_k}, {other_operations} other operations a layer; experts' bytes at {bandwidth} GB/s, all in memory",
        )
        at30 = {}
        for i, (name, calls) in enumerate(ways.items()):
            tok_s = [
                1 / token_model(calls, layers, c, other_operations, nbytes, bandwidth) for c in cost
            ]
            fig.add_scatter(x=cost, y=tok_s, name=name, mode="lines", line=figures.style(i)["line"])
            at30[name] = 1 / token_model(calls, layers, 30, other_operations, nbytes, bandwidth)
        top = bandwidth * 1e9 / (layers * nbytes)
        figures.ceiling(fig, top, "memory bandwidth")
        figures.ceiling(fig, 30, "30 us (PR 90)", axis="x")
        fig.update_yaxes(type="log", range=[0, float(np.log10(top * 1.5))])
        gain = at30["one gather a projection"] / at30["K calls a projection"]
        return figures.describe(
            fig,
            alt="Lines of tok/s over the cost of a dispatch. At 30 us: "
            + ", ".join(f"{n} {v:.1f}" for n, v in at30.items())
            + f". Ceiling {top:.0f} tok/s.",
            finding=f"At 30 us a dispatch, one gather for each projection would give {gain:.2f} times the speed of K calls.",
        )

    return look
