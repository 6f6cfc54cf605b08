"""Charts of samples, each with its title, note, finding and alternative text."""

import html
import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from IPython.display import display
from plotly.subplots import make_subplots

from . import style

Verdict = tuple[str, str, str, str]  # the claim's id, the claim, one of VERDICTS, why
VERDICTS = ("confirmed", "refuted", "depends on", "cannot be tested here")

# Pixels: of a bar with its gap, of a panel's title and axis, of what labels and numbers need.
BAR, PANEL_TITLE, PANEL_AXIS = 34, 20, 64
WIDTH = 880  # of all panels together, about
LABEL_CHARACTERS = 26
MOST_COLUMNS = 3
COLORS = 6  # of ``style.COLORS``: whiskers are not seen on black, numbers not on yellow


def bars(
    sources: dict,
    title: str,
    axis: str,
    finding: str,
    note: str = "",
    scale: float = 1.0,
    log: bool = False,
    marks=(),
    digits: int = 3,
    card: dict | str | None = None,
) -> go.Figure:
    """A panel for each source, a horizontal bar for each variant: medians and quartiles.

    Args:
        sources (dict): ``{label of the source: {variant: samples}}``. Each panel has its own scale;
            a single one needs no label: ``""``.
        title (str): What was found, short.
        axis (str): What the bars measure, with its unit.
        finding (str): What is to be seen, in one or two sentences.
        note (str): What qualifies the numbers: n, warm-up, cache state, model.
        scale (float): Multiplies the samples (1e6: seconds to microseconds).
        log (bool): Logarithmic axis.
        marks (Sequence): ``(panel, value, label)`` of lines to draw across a panel, from 0.
        digits (int): Significant digits of the numbers at the bars.
        card (dict or str): The machine of recorded numbers. Default: this machine, now.
    """
    names = _names(sources)
    fig = style.figure(title, "", "", note=note, card=card, showlegend=False)
    places = _panels(fig, list(sources), names, axis, headroom=bool(marks))
    words = []
    for i, ((label, variants), place) in enumerate(zip(sources.items(), places)):
        stats = [
            np.percentile(np.asarray(s, float) * scale, (25, 50, 75)) for s in variants.values()
        ]
        low, mid, high = np.array(stats).T
        colors = [style.COLORS[names.index(n) % COLORS] for n in variants]
        numbers = [_number(m, digits) for m in mid]
        y = [_label(n) for n in variants]
        fig.add_bar(
            x=mid,
            y=y,
            orientation="h",
            marker_color=colors,
            error_x=style.whiskers(low, mid, high) if (high > low).any() else None,
            **place,
        )
        _numbers(fig, high, y, numbers, place)  # right of the whisker, not on it
        told = ", ".join(f"{n} {m}" for n, m in zip(variants, numbers))
        words.append(f"{label}: {told}" if label else told)
        here = [(value, text) for panel, value, text in marks if panel == i]
        top = max([high.max()] + [value for value, _ in here])
        if log:
            low_end = np.log10(min(mid.min(), top)) - 0.3
            fig.update_xaxes(type="log", dtick=1, range=[low_end, np.log10(top) + 0.5], **place)
        else:
            fig.update_xaxes(range=[0, top * 1.3], **place)
        for value, text in here:
            side = "left" if value > 0.6 * top else "right"
            style.ceiling(fig, value, text, axis="x", side=side, log=log, **place)
    return style.describe(fig, _told("Bars", axis, words), finding)


def parts(
    sources: dict,
    title: str,
    finding: str,
    note: str = "",
    axis: str = "ms a token",
    scale: float = 1e3,
    card: dict | str | None = None,
) -> go.Figure:
    """A panel for each source, a stacked bar for each mode: what a token's time is made of.

    Args:
        sources (dict): ``{label: {mode: {part: seconds}}}``.
        title, finding, note, axis, scale, card: As for ``bars``.
    """
    names = _names(sources)
    kinds = list(dict.fromkeys(p for modes in sources.values() for m in modes.values() for p in m))
    fig = style.figure(title, "", "", note=note, card=card, barmode="stack", showlegend=True)
    places = _panels(fig, list(sources), names, axis)
    words = []
    for i, ((label, modes), place) in enumerate(zip(sources.items(), places)):
        for k, part in enumerate(kinds):
            fig.add_bar(
                x=[m.get(part, 0) * scale for m in modes.values()],
                y=[_label(m) for m in modes],
                orientation="h",
                name=part,
                legendgroup=part,
                showlegend=i == 0,
                marker=style.fill(k),
                **place,
            )
        totals = [sum(m.values()) * scale for m in modes.values()]
        _numbers(fig, totals, [_label(m) for m in modes], [_number(t) for t in totals], place)
        fig.update_xaxes(range=[0, max(totals) * 1.25], **place)
        told = (
            f"{m} " + ", ".join(f"{p} {v * scale:.3g}" for p, v in x.items())
            for m, x in modes.items()
        )
        words.append((f"{label}: " if label else "") + "; ".join(told))
    return style.describe(fig, _told("Stacked bars", axis, words), finding)


def lines(
    series: dict,
    title: str,
    x: str,
    y: str,
    finding: str,
    note: str = "",
    log_x: bool = True,
    ceilings=(),
    card: dict | str | None = None,
) -> go.Figure:
    """Medians and quartiles over a number or a list of steps.

    Args:
        series (dict): ``{name: (xs, samples for each x)}``.
        title (str): What was found, short.
        x (str): The horizontal axis, with its unit.
        y (str): The vertical axis, with its unit.
        finding (str): What is to be seen, in one or two sentences.
        note (str): What qualifies the numbers.
        log_x (bool): Logarithmic horizontal axis, with a tick at every x.
        ceilings (Sequence): ``(value, label)`` of horizontal lines.
        card (dict or str): The machine of recorded numbers. Default: this machine, now.
    """
    fig = style.figure(title, x, y, note=note, card=card)
    words, top = [], [value for value, _ in ceilings]
    for i, (name, (xs, rows)) in enumerate(series.items()):
        style.band(fig, xs, rows, name, i)
        words.append(f"{name}: {_series(xs, rows)}")
        top += [np.percentile(r, 75) for r in rows]
    starts = [np.median(rows[0]) for _, rows in series.values()]
    for value, label in ceilings:
        room = 0.1 * max(top)  # of a label above the line, where the series begin
        style.ceiling(fig, value, label, below=any(0 <= y0 - value < room for y0 in starts))
        words.append(f"Ceiling, {label}: {value:.3g}")
    if log_x:
        values = sorted({v for xs, _ in series.values() for v in xs})
        fig.update_xaxes(type="log", tickvals=values, ticktext=[str(v) for v in values])
    fig.update_yaxes(range=[0, 1.12 * max(top)])
    over = f"{y} over {x}" if x else y
    return style.describe(fig, f"{over}. " + ". ".join(words) + ".", finding)


def _series(xs, rows):
    """The medians over ``xs`` in words; one number where all read the same."""
    medians = [f"{np.median(r):.3g}" for r in rows]
    if len(xs) > 1 and len(set(medians)) == 1:
        return f"{medians[0]} from {xs[0]} to {xs[-1]}"
    return ", ".join(f"{m} at {x}" for m, x in zip(medians, xs))


def verdicts(rows: Sequence[Verdict]) -> None:
    """Shows a table of claims, each with one of ``VERDICTS`` and the numbers that it rests on.

    Args:
        rows (Sequence[Verdict]): ``(id, claim, verdict, why)``.

    Raises:
        ValueError: If a verdict is none of ``VERDICTS``.
    """
    for row in rows:
        if row[2] not in VERDICTS:
            raise ValueError(f"{row[0]}: verdict {row[2]!r}, expected one of {', '.join(VERDICTS)}")
    plain = "\n".join(f"{i} {verdict}: {claim} ({why})" for i, claim, verdict, why in rows)
    cells = [
        [i, html.escape(claim), f"<b>{verdict.replace(' ', '&nbsp;')}</b>", html.escape(why)]
        for i, claim, verdict, why in rows
    ]
    _display_table(("", "claim", "verdict", "because"), cells, plain)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Shows a table of texts.

    Args:
        head (Sequence[str]): The columns' names.
        rows (Sequence[Sequence[str]]): Its cells.
    """
    plain = "\n".join("  ".join(row) for row in (head, *rows))
    _display_table(head, [[html.escape(cell) for cell in row] for row in rows], plain)


def _display_table(head, rows, plain):
    left = "style='text-align:left'"
    top = "".join(f"<th {left}>{h}</th>" for h in head)
    body = "".join(
        "<tr>" + "".join(f"<td {left}>{cell}</td>" for cell in row) + "</tr>" for row in rows
    )
    display({"text/html": f"<table><tr>{top}</tr>{body}</table>", "text/plain": plain}, raw=True)


def recorded_note(card: dict) -> str:
    """The machine of recorded numbers that stand beside this machine's, short, for a note.

    Args:
        card (dict): Of the recorded run.
    """
    device, versions = card["gpu"] or card["cpu"], f"mlx {card['mlx']}, moelab {card['moelab']}"
    return f"recorded: {device}, {card['backend']}, {versions}, {card['date']}"


# Panels of horizontal bars


def _names(sources):
    """Every variant of any source, in order."""
    return list(dict.fromkeys(name for variants in sources.values() for name in variants))


def _told(kind, axis, words):
    """Alternative text; without an axis for all panels, their labels say what they show."""
    return ". ".join([f"{kind} of {axis}" if axis else kind, *words]) + "."


def _label(name):
    return "<br>".join(style.wrap(name, LABEL_CHARACTERS)) + " "


def _number(value, digits=3):
    """A number with so many significant digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def _numbers(fig, ends, labels, texts, place):
    """Writes a number right of where each bar or its whisker ends."""
    fig.add_scatter(
        x=ends,
        y=labels,
        mode="text",
        text=[f" {t}" for t in texts],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
        **place,
    )


def _panels(fig, titles, names, axis, headroom=False):
    """Lays out panels that share their labels, as high as their bars need; returns their places."""
    columns = len(titles) if len(titles) <= MOST_COLUMNS else 2
    rows = math.ceil(len(titles) / columns)
    labels = [_label(n) for n in names]
    width = style.CHARACTER * max(len(part) for text in labels for part in text.split("<br>"))
    characters = int((WIDTH - width) / columns / style.CHARACTER)
    heads = [style.wrap(t, max(characters, 8)) for t in titles]
    head = PANEL_TITLE * max(map(len, heads)) if any(titles) else 0
    plot = sum(BAR + 12 * text.count("<br>") for text in labels) + 20 * headroom
    height = rows * plot + (rows - 1) * (head + PANEL_AXIS)
    make_subplots(
        rows,
        columns,
        figure=fig,
        subplot_titles=["<br>".join(h) for h in heads],
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=(head + PANEL_AXIS) / height if rows > 1 else 0,
    )
    top = fig.layout.margin.t + head
    fig.update_annotations(font_size=13, yshift=2)
    fig.update_layout(margin={"t": top, "l": 20}, height=top + height + fig.layout.margin.b)
    ends = [len(labels) - 0.5, -0.5 - 0.6 * headroom]  # the first variant on top
    fig.update_yaxes(categoryorder="array", categoryarray=labels, range=ends, showgrid=False)
    fig.update_yaxes(ticks="", tickfont_size=13)
    fig.update_xaxes(nticks=5, title=axis)
    places = [{"row": 1 + i // columns, "col": 1 + i % columns} for i in range(len(titles))]
    return places
