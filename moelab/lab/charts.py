"""Charts of a table: ``bars``, ``lines``, ``parts``, ``timeline``, ``table``.

Each takes a table of samples (``records.read``, or what an experiment returned) and names of
columns, or an expression of columns: ``bars(samples, "decode_s * 1e3 / decode_tokens")``. Title and
finding are the caller's words. The note under the title (model, n, page cache), the machine and
the figure's description follow from the table.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from .plots import style  # imported first: its error says which package to install

# isort: split
import plotly.graph_objects as go
from IPython.display import display
from pandas import DataFrame
from plotly.subplots import make_subplots

from . import records
from .machine import card as this_card
from .machine import card_line, made

# Pixels of a bar with its gap, and of a panel's title and axis.
BAR, PANEL_TITLE, PANEL_AXIS = 34, 20, 64
WIDTH = 880  # about so many pixels for all panels together
LABEL_CHARACTERS, NARROW_LABEL_CHARACTERS = 26, 15
MOST_COLUMNS = 3
COLORS = 6  # bars take the first six colors: black hides whiskers, yellow hides numbers


def bars(
    samples: DataFrame,
    x: str,
    y: str = "variant",
    panel: str | None = None,
    *,
    title: str,
    axis: str,
    finding: str,
    note: str = "",
    log: bool = False,
    ceilings: Mapping[str, float] = {},
) -> go.Figure:
    """Draw a horizontal bar for each group of samples: its median, with quartiles as whiskers.

    ``x`` is a column or an expression of columns. ``y`` and ``panel`` are columns: a bar for each
    value of ``y``, a panel for each value of ``panel``. Panels have their own scales unless
    ``log``. ``ceilings`` are limits, drawn as lines.
    """
    grouped = _grouped(samples, x, y, panel)
    names = _names(grouped)
    fig = _figure(samples, grouped, title, "", "", note, showlegend=False)
    places = _panels(fig, list(grouped), names, axis, headroom=bool(ceilings))
    words = []
    for (label, variants), place in zip(grouped.items(), places):
        low, mid, high = _quartiles(variants)
        numbers, labels = [_number(m) for m in mid], [_label(n) for n in variants]
        fig.add_bar(
            x=mid,
            y=labels,
            orientation="h",
            marker_color=[style.COLORS[names.index(n) % COLORS] for n in variants],
            error_x=style.whiskers(low, mid, high) if (high > low).any() else None,
            **place,
        )
        _numbers(fig, np.log10(high) if log else high, labels, numbers, place)
        top = max([high.max(), *ceilings.values()])
        if not log:
            fig.update_xaxes(range=[0, top * 1.3], **place)
        for text, value in ceilings.items():
            lower = value < max(ceilings.values()) or (value > 0.6 * top and not log)
            at = "top left" if lower else "top right"
            style.ceiling(fig, value, text, at, axis="x", log=log, **place)
        words.append(_told(label, (f"{n} {m}" for n, m in zip(variants, numbers))))
    if log:
        drawn = np.log10(np.concatenate([bar.x for bar in fig.select_traces({"type": "bar"})]))
        fig.update_xaxes(type="log", dtick=1, range=[drawn.min() - 0.3, drawn.max() + 0.5])
    of = f" of {axis}" if axis else ""
    return style.describe(fig, f"Bars{of}. " + " ".join(words), finding)


def parts(
    samples: DataFrame,
    columns: Mapping[str, str],
    y: str = "variant",
    panel: str | None = None,
    *,
    title: str,
    axis: str,
    finding: str,
    note: str = "",
) -> go.Figure:
    """Draw a stacked bar for each group of samples: the means of the expressions in ``columns``."""
    grouped = {part: _grouped(samples, x, y, panel) for part, x in columns.items()}
    first = next(iter(grouped.values()))
    names = _names(first)
    fig = _figure(samples, first, title, "", "", note, barmode="stack", showlegend=True)
    words = []
    for i, (label, place) in enumerate(zip(first, _panels(fig, list(first), names, axis))):
        labels = [_label(n) for n in first[label]]
        means = {p: [np.mean(s) for s in of[label].values()] for p, of in grouped.items()}
        for k, (part, values) in enumerate(means.items()):
            fig.add_bar(x=values, y=labels, **_part(part, k, i, place))
        totals = np.sum(list(means.values()), axis=0)
        _numbers(fig, totals, labels, [_number(t) for t in totals], place)
        fig.update_xaxes(range=[0, totals.max() * 1.25], **place)
        told = (
            f"{n}: " + ", ".join(f"{p} {v[j]:.3g}" for p, v in means.items())
            for j, n in enumerate(first[label])
        )
        words.append(_told(label, told, "; "))
    return style.describe(fig, f"Stacked bars of {axis}. " + " ".join(words), finding)


def lines(
    samples: DataFrame,
    x: str,
    y: str,
    by: str | None = "variant",
    *,
    title: str,
    axes: tuple[str, str],
    finding: str,
    note: str = "",
    log_x: bool = False,
    ceilings: Mapping[str, float] = {},
    percent: bool = False,
    chosen: float | None = None,
) -> go.Figure:
    """Draw a line for each value of ``by``: medians over x, with quartiles as whiskers.

    A ring marks each line's point at x = ``chosen``, which a slider sets.
    """
    series = _grouped(samples, y, x, by)
    fig = _figure(samples, series, title, *axes, note, height=360)
    words, top = [], list(ceilings.values())
    for i, (name, points) in enumerate(series.items()):
        low, mid, high = _quartiles(points)
        shown = {"mode": "lines+markers", "name": str(name), **style.look(i)}
        fig.add_scatter(x=list(points), y=mid, error_y=style.whiskers(low, mid, high), **shown)
        words.append(_told(name, [_series(points)]))
        top += [*high]
        if chosen in points:
            ring = {"size": 16, "color": style.GREY, "symbol": "circle-open", "line_width": 3}
            at = {"x": [chosen], "y": [np.median(points[chosen])], "marker": ring}
            fig.add_scatter(**at, mode="markers", name="chosen", showlegend=False)
    starts = [np.median(next(iter(points.values()))) for points in series.values()]
    for label, value in ceilings.items():
        room = 0.1 * max(top)  # room for a label above the line
        is_above = any(0 <= y0 - value < room for y0 in starts)
        style.ceiling(fig, value, label, "bottom left" if is_above else "top left")
        words.append(f"Line, {label}: {value:.3g}.")
    if log_x:
        values = sorted({v for points in series.values() for v in points})
        fig.update_xaxes(type="log", tickvals=values, ticktext=[str(v) for v in values])
    fig.update_yaxes(range=[0, 1.12 * max(top)], tickformat=".0%" if percent else None)
    xs = np.array([x for points in series.values() for x in points])
    if xs.dtype.kind in "iuf":
        xs = np.log10(xs) if log_x else xs
        room = 0.05 * (xs.max() - xs.min()) or 0.5
        low = xs.min() - room if log_x or xs.min() <= 0 else max(xs.min() - room, 0)
        fig.update_xaxes(range=[low, xs.max() + room])
    return style.describe(fig, f"{axes[1]} over {axes[0]}. " + " ".join(words), finding)


def timeline(spans: DataFrame, *, title: str, axis: str, finding: str) -> go.Figure:
    """Draw each span (a row: ``lane``, ``what``, ``begin_s``, ``end_s``) as a bar in ms."""
    spans = spans.assign(begin_ms=spans.begin_s * 1e3, ms=(spans.end_s - spans.begin_s) * 1e3)
    fig = _figure(spans, {}, title, "", "", "", barmode="overlay", showlegend=True)
    (place,) = _panels(fig, [None], list(dict.fromkeys(spans.lane)), axis)
    for k, (what, mine) in enumerate(spans.groupby("what", sort=False)):
        labels = [_label(n) for n in mine.lane]
        fig.add_bar(x=mine.ms, base=mine.begin_ms, y=labels, **_part(what, k, 0, place))
    fig.update_xaxes(range=[0, 1.02e3 * spans.end_s.max()])
    took = spans.groupby("what", sort=False).ms.sum()
    told = ", ".join(f"{what} {ms:.3g}" for what, ms in took.items())
    return style.describe(fig, f"Timeline, {axis}. {told}.", finding)


def table(frame: DataFrame, form: str = "{:.3g}") -> None:
    """Show a table, with its index as the first column; ``form`` is the format of floats."""

    def written(cell):
        return form.format(cell) if isinstance(cell, (float, np.floating)) else str(cell)

    plain = frame.to_string() if len(frame) else "nothing"
    frame = frame.rename_axis([name or "" for name in frame.index.names]).reset_index()
    made = frame.to_html(index=False, border=0, formatters=dict.fromkeys(frame, written))
    made = re.sub("<(t[dh])>", r"<\1 style='text-align:left'>", made)
    display({"text/html": made, "text/plain": plain}, raw=True)


def say(text: str) -> None:
    """Show a Markdown sentence that a notebook's cell made from numbers."""
    display({"text/markdown": text, "text/plain": text}, raw=True)


def _grouped(samples, value, by, panel):
    """Return ``{panel: {group: samples}}`` of a column or expression, without missing values."""
    alive = samples[~samples.killed] if "killed" in samples else samples
    kept = alive.assign(**{"": alive.eval(value)}).dropna(subset=[""])
    if kept.empty:
        raise ValueError(f"expected samples of {value!r}, got none")
    panels = [("", kept)] if panel is None else kept.groupby(panel, sort=False)
    return {
        label: {name: part[""].to_numpy(float) for name, part in rows.groupby(by, sort=False)}
        for label, rows in panels
    }


def _quartiles(groups):
    """Return the lower quartiles, medians and upper quartiles of groups of samples."""
    return np.array([np.percentile(s, (25, 50, 75)) for s in groups.values()]).T


def _figure(samples, grouped, title, x, y, note, height=style.PLOT_HEIGHT, **layout):
    """Make an empty figure with the note and the machines that the table's headers name."""
    headers = samples.attrs.get("headers", [samples.attrs])
    headers = [h for h in headers if "machine" in h] or headers  # computed tables have no machine
    of_each = [h.get("settings") or {} for h in headers if h.get("machine") != ""]
    of_each = of_each or [headers[0].get("settings") or {}]
    settings = {k: v for k, v in of_each[0].items() if all(s.get(k) == v for s in of_each)}
    told = [settings.get("model", "")]
    if "tokens" in settings:
        told.append(f"{settings['tokens']} tokens a run")
    if "cache_state" in settings:
        told.append(f"page cache {settings['cache_state']}")
    counts = sorted({len(s) for groups in grouped.values() for s in groups.values()})
    if counts and counts[-1] > 1:
        told.append("n=" + " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))))
    spoilt = [records.busy(h.get("load", {})) for h in headers if "record" not in h]
    older = dict.fromkeys(h.get("note", "") for h in headers)
    cards = [h["machine"] if "record" in h else None for h in headers]  # None: this machine, now
    cards = list({str(card): card for card in cards if card != ""}.values())
    hosts = {}  # by host: the dates and engines of its records
    for card in cards:
        of = card or this_card()
        host = f"{of['gpu'] or of['cpu']}, {of['backend']} backend"
        hosts.setdefault(host, {})[f"recorded {made(of)}" if card else "here"] = True
    short = (f"{' and '.join(when)}: {host}" for host, when in hosts.items())
    note = "; ".join(filter(None, (*spoilt, ", ".join(filter(None, told)), note, *older, *short)))
    meta = {"title": title, "note": note, "machines": [card_line(card) for card in cards]}
    return _empty(height, **layout).update_layout(xaxis_title=x, yaxis_title=y, meta=meta)


def _empty(height=style.PLOT_HEIGHT, **layout):
    """Make an empty figure. Its plot is ``height`` pixels high; a legend's height comes on top."""
    top, below = style.TOP, style.FOOTER
    around = {"margin": {"t": top, "b": below}, "height": top + height + below}
    return go.Figure(layout={"template": "moelab"} | around | layout)


def _series(points):
    """Write the median at each x in words; a single number if all medians are the same."""
    medians = [f"{np.median(p):.3g}" for p in points.values()]
    xs = [f"{x:g}" if isinstance(x, float) else x for x in points]
    if len(xs) > 1 and len(set(medians)) == 1:
        return f"{medians[0]} from {xs[0]} to {xs[-1]}"
    return ", ".join(f"{m} at {x}" for m, x in zip(medians, xs))


def _told(label, words, between=", "):
    told = between.join(words)
    return f"{label}: {told}." if label not in (None, "") else f"{told}."


def _part(name, k, panel, place):
    """Style the k-th part of stacked bars; only the first panel's part is in the legend."""
    once = {"name": name, "legendgroup": name, "showlegend": panel == 0}
    return {"orientation": "h", "marker": style.fill(k)} | once | place


def _names(grouped):
    """Return the names of all panels' groups, in order."""
    return list(dict.fromkeys(name for groups in grouped.values() for name in groups))


def _label(name):
    return "<br>".join(style.wrap(str(name), LABEL_CHARACTERS)) + " "


def _number(value):
    """Write a number (0.0001 or more) with three significant digits, or all before the point."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def _numbers(fig, ends, labels, texts, place):
    """Write a number right of each bar and its whisker, on white: a limit's line may cross it."""
    shown = {"xanchor": "left", "xshift": 4, "showarrow": False, "bgcolor": "white"} | place
    for x, y, text in zip(ends, labels, texts):
        fig.add_annotation(x=x, y=y, text=text, borderpad=0, **shown)


def _panels(fig, titles, names, axis, headroom=False):
    """Lay out panels with common labels (on a phone in one column); return the panels' places."""
    titles = ["" if t is None else str(t) for t in titles]
    columns = len(titles) if len(titles) <= MOST_COLUMNS else 2
    labels = [_label(n) for n in names]
    width = style.CHARACTER * max(len(part) for text in labels for part in text.split("<br>"))
    characters = int((WIDTH - width) / columns / style.CHARACTER)
    plot = sum(BAR + 12 * text.count("<br>") for text in labels) + 20 * headroom
    _grid(fig, titles, columns, max(characters, 8), plot)
    fig.update_annotations(font_size=13, yshift=2)
    ends = [len(labels) - 0.5, -0.5 - 0.6 * headroom]  # so that the first variant is on top
    fig.update_yaxes(
        type="category", categoryorder="array", categoryarray=labels, range=ends, showgrid=False
    )
    fig.update_yaxes(ticks="", tickfont_size=13)
    fig.update_xaxes(nticks=5, tickangle=0, title=axis)
    fig.update_layout(margin_l=20)
    column = _grid(_empty(), titles, 1, style.NARROW_CHARACTERS, plot).layout
    narrow = {"height": column.height - column.margin.b, "margin.t": column.margin.t}
    short = ["<br>".join(style.wrap(str(n), NARROW_LABEL_CHARACTERS)) + " " for n in names]
    for i, text in enumerate(column.annotations):
        narrow |= {f"annotations[{i}].{key}": text[key] for key in ("x", "y", "text")}
    for i in range(len(titles)):
        x, y = (f"{letter}axis{i + 1 if i else ''}" for letter in "xy")
        narrow |= {f"{name}.domain": column[name].domain for name in (x, y)}
        narrow |= {f"{y}.showticklabels": True, f"{y}.tickfont.size": 12, f"{x}.nticks": 4}
        narrow |= {f"{y}.tickvals": labels, f"{y}.ticktext": short}
    fig.update_layout(meta=fig.layout.meta | {"narrow": narrow})
    return [{"row": 1 + i // columns, "col": 1 + i % columns} for i in range(len(titles))]


def _grid(fig, titles, columns, characters, plot):
    """Divide a figure into ``columns`` columns of panels, each ``plot`` pixels high."""
    heads = [style.wrap(t, characters) for t in titles]
    head = PANEL_TITLE * max(map(len, heads)) if any(titles) else 0
    rows = math.ceil(len(titles) / columns)
    height = rows * plot + (rows - 1) * (head + PANEL_AXIS)
    cells = [{} if i < len(titles) else None for i in range(rows * columns)]
    make_subplots(
        rows,
        columns,
        figure=fig,
        specs=[cells[i : i + columns] for i in range(0, len(cells), columns)],
        subplot_titles=["<br>".join(h) for h in heads],
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=(head + PANEL_AXIS) / height if rows > 1 else 0,
    )
    top = fig.layout.margin.t + head
    return fig.update_layout(margin_t=top, height=top + height + fig.layout.margin.b)
