"""One look for every figure: template, machine, ceilings, and the figure in words.

A figure carries its alternative text and its finding in ``layout.meta``, so that a notebook, a
widget or a page can show both.
"""

import html
import math
import re
import textwrap

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
from IPython.display import HTML, display

from ..machine import card_line

# Okabe and Ito's colours, distinct for colour-blind readers; yellow, weak on white, comes last.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
PATTERNS = ("", "/", "x")
GREY = "#595959"

# Pixels, and two counts of characters: a title of so many fits a narrow JupyterLab.
TITLE_CHARACTERS, NOTE_CHARACTERS = 76, 112
TITLE_LINE, NOTE_LINE = 22, 16
PLOT_HEIGHT = 300
HEADER, FOOTER = 34, 54  # above the plot besides title and note; below it: ticks and axis title
LEGEND_LINE, LEGEND_WIDTH, LEGEND_KEY, CHARACTER = 22, 800, 55, 7.5
SPAN, NO_BREAK = re.compile(r"\[[^\[\]]*\]"), "\u00a0"

_AXIS = {
    "gridcolor": "#E6E6E6",
    "linecolor": GREY,
    "showline": True,
    "ticks": "outside",
    "automargin": True,
    "title": {"font": {"size": 14}, "standoff": 8},
}
pio.templates["moelab"] = go.layout.Template(
    layout={
        "colorway": COLORS,
        "font": {"size": 13, "color": "#222"},
        "title": {
            "font": {"size": 17},
            "subtitle": {"font": {"size": 12, "color": GREY}},
            "x": 0.01,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
        },
        "margin": {"l": 70, "r": 30, "b": FOOTER},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hoverlabel": {"font": {"size": 13}},
        "modebar": {"remove": ["select", "lasso", "zoomin", "zoomout", "autoscale", "share"]},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "xaxis": _AXIS,
        "yaxis": {**_AXIS, "rangemode": "tozero"},
    }
)
pio.templates.default = "moelab"


def look(i: int) -> dict:
    """Line and marker of the ``i``-th series, distinct without colour too."""
    i %= len(COLORS)
    return {
        "line": {"color": COLORS[i], "dash": DASHES[i], "width": 2.5},
        "marker": {"color": COLORS[i], "symbol": SYMBOLS[i], "size": 9},
    }


def fill(i: int) -> dict:
    """Colour and pattern of the ``i``-th part of stacked bars, as a trace's ``marker``."""
    pattern = {"shape": PATTERNS[i % len(PATTERNS)], "fgcolor": "white", "fillmode": "overlay"}
    return {"color": COLORS[i % len(COLORS)], "pattern": pattern}


def whiskers(low, mid, high) -> dict:
    """Error bars from the lower to the upper quartile."""
    return {
        "type": "data",
        "array": np.subtract(high, mid),
        "arrayminus": np.subtract(mid, low),
        "thickness": 1.5,
        "width": 4,
    }


def wrap(text: str, characters: int) -> list[str]:
    """The lines of a text for a figure, escaped; HTML entities count as what they show.

    There are as few lines as needed, of about the same length; ``[1.2 - 1.4]`` stays in one.
    """
    text = SPAN.sub(lambda span: span[0].replace(" ", NO_BREAK), text)
    lines = textwrap.wrap(text, characters)
    while len(lines) > 1:
        width = max(map(len, lines)) - 1
        shorter = textwrap.wrap(text, width, break_long_words=False)
        if len(shorter) > len(lines) or max(map(len, shorter)) > width:
            break
        lines = shorter
    return [html.escape(line.replace(NO_BREAK, " "), quote=False) for line in lines] or [""]


def figure(
    title: str,
    x: str,
    y: str,
    note: str = "",
    card: dict | str | None = None,
    height: int = PLOT_HEIGHT,
    **layout,
) -> go.Figure:
    """Make an empty figure whose title says what was found and whose subtitle says where.

    ``card`` is the machine of recorded numbers (None: this machine, now). Title, note and legend
    come on top of ``height``.
    """
    source = "recorded" if card else "here"
    where = card if isinstance(card, str) else f"{source}: {card_line(card)}"
    titles = wrap(title, TITLE_CHARACTERS)
    notes = [line for text in (note, where) if text for line in wrap(text, NOTE_CHARACTERS)]
    top = HEADER + TITLE_LINE * len(titles) + NOTE_LINE * len(notes)
    fig = go.Figure(layout={"template": "moelab", **layout})
    return fig.update_layout(
        title={
            "text": "<br>".join(titles),
            "subtitle": {"text": "<br>".join(notes)},
            "pad": {"t": 12 * len(titles)},  # plotly anchors by the first line
        },
        xaxis_title=x,
        yaxis_title=y,
        meta={"here": card is None},  # measured in this run, not recorded
        margin={"t": top, "b": FOOTER},
        height=top + height + FOOTER,
    )


def band(fig: go.Figure, x, samples, name: str, i: int = 0, **where) -> None:
    """Draw the medians of ``samples``, a row per x, with whiskers from quartile to quartile."""
    low, mid, high = np.array([np.percentile(s, (25, 50, 75)) for s in samples]).T
    trace = go.Scatter(x=list(x), y=mid, name=name, mode="lines+markers", **look(i))
    fig.add_trace(trace.update(error_y=whiskers(low, mid, high)), **where)


def ceiling(
    fig: go.Figure,
    value: float,
    label: str,
    axis: str = "y",
    side: str = "right",
    log: bool = False,
    below: bool = False,
    **where,
) -> None:
    """Draw a limit (of the SSD's rate, of memory) on axis ``x`` or ``y`` as a labelled line."""
    line = {
        "line": {"color": GREY, "dash": "dash", "width": 1.5},
        "annotation_text": label,
        "annotation_font": {"size": 12, "color": GREY},
    }
    if axis == "y":
        fig.add_hline(
            value, annotation_position=f"{'bottom' if below else 'top'} left", **line, **where
        )
    else:
        fig.add_vline(value, annotation_position=f"top {side}", **line, **where)
    if log:  # plotly takes an annotation's place as the logarithm, a shape's as the value
        fig.layout.annotations[-1][axis] = math.log10(value)


def describe(fig: go.Figure, alt: str, finding: str) -> go.Figure:
    """Give a complete figure its alternative text, its finding and room for its legend."""
    bottom = FOOTER + LEGEND_LINE * _legend_lines(fig)
    fig.update_layout(
        meta={**fig.layout.meta, "alt": alt, "finding": finding},
        height=fig.layout.height - fig.layout.margin.b + bottom,
        margin={"b": bottom},
    )
    return fig


def _legend_lines(fig):
    names = [t.name for t in fig.data if t.name and t.showlegend is not False]
    if fig.layout.showlegend is False or not names:
        return 0
    if len(fig.data) == 1 and not (fig.layout.showlegend or fig.data[0].showlegend):
        return 0  # plotly draws no legend for a single trace
    widths = [LEGEND_KEY + CHARACTER * len(name) for name in names]
    if sum(widths) <= LEGEND_WIDTH:
        return 1
    return math.ceil(len(names) / max(LEGEND_WIDTH // max(widths), 1))


def words(fig: go.Figure) -> str:
    """HTML to stand under a figure: its finding and, folded, the figure in words."""
    meta = fig.layout.meta or {}
    if not meta.get("alt") or not meta.get("finding"):
        raise ValueError("a figure needs alt text and a finding: describe(fig, alt, finding)")
    return (
        f"<p><b>{html.escape(meta['finding'])}</b></p>"
        f"<details><summary>The figure in words</summary>{html.escape(meta['alt'])}</details>"
    )


def show(fig: go.Figure) -> None:
    """Display a described figure, its finding and its alternative text."""
    text = words(fig)
    display({**fig._repr_mimebundle_(), "text/plain": fig.layout.meta["alt"]}, raw=True)
    display(HTML(text))
