"""One look for every figure: a plotly template, the machine in the subtitle, ceilings, words beside pictures.

A figure carries its alternative text and its one-line finding in ``layout.meta``, so that whatever shows it
(a notebook, a widget, a page) can say both.
"""

import html

import plotly.graph_objects as go
import plotly.io as pio
from IPython.display import HTML, display

from ..machine import card_line

# Okabe and Ito's colours, told apart by colour-blind readers; the yellow, weak on white, comes last.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
GREY = "#595959"

_AXIS = dict(
    gridcolor="#E6E6E6",
    linecolor=GREY,
    showline=True,
    ticks="outside",
    automargin=True,
    title=dict(font=dict(size=14), standoff=8),
)
pio.templates["moelab"] = go.layout.Template(
    layout=dict(
        colorway=COLORS,
        font=dict(size=13, color="#222"),
        title=dict(
            font=dict(size=17),
            subtitle=dict(font=dict(size=12, color=GREY)),
            x=0,
            xref="paper",
            xanchor="left",
        ),
        margin=dict(l=70, r=30, t=105, b=95),
        height=460,
        paper_bgcolor="white",
        plot_bgcolor="white",
        hoverlabel=dict(font=dict(size=13)),
        legend=dict(orientation="h", yref="container", y=0.02, yanchor="bottom", x=0),
        xaxis=_AXIS,
        yaxis=dict(**_AXIS, rangemode="tozero"),
    )
)
pio.templates.default = "moelab"


def style(i: int) -> dict:
    """Line, marker and bar pattern of the ``i``-th series: never told apart by colour alone.

    Example:
        >>> go.Scatter(x=x, y=y, name="fused", mode="lines+markers", **style(0))
    """
    i %= len(COLORS)
    return dict(
        line=dict(color=COLORS[i], dash=DASHES[i], width=2.5),
        marker=dict(color=COLORS[i], symbol=SYMBOLS[i], size=9),
    )


def figure(
    title: str, x: str, y: str, note: str = "", card: dict | str | None = None, **layout
) -> go.Figure:
    """An empty figure whose title says what was found and whose subtitle says where.

    Args:
        title (str): The finding, short.
        x, y (str): Axis titles with their units.
        note (str): What qualifies the numbers: n, warm-up, cache state, model. Default: none.
        card (dict or str): The machine of recorded numbers. Default: this machine, now.
        **layout: More of ``go.Layout``.
    """
    subtitle = "<br>".join(
        html.escape(line)
        for line in (note, card if isinstance(card, str) else card_line(card))
        if line
    )
    fig = go.Figure(layout=dict(template="moelab", **layout))
    fig.update_layout(
        title=dict(text=title, subtitle=dict(text=subtitle)), xaxis_title=x, yaxis_title=y
    )
    return fig


def band(fig: go.Figure, x, samples, name: str, i: int = 0, **where) -> None:
    """Adds a line through the medians of ``samples`` (one row for each x) with whiskers from quartile to quartile."""
    import numpy as np

    low, mid, high = np.array([np.percentile(s, (25, 50, 75)) for s in samples]).T
    error = dict(type="data", array=high - mid, arrayminus=mid - low, thickness=1.5, width=4)
    fig.add_trace(
        go.Scatter(x=list(x), y=mid, name=name, error_y=error, mode="lines+markers", **style(i)),
        **where,
    )


def ceiling(fig: go.Figure, value: float, label: str, axis: str = "y", **where) -> None:
    """Draws what cannot be passed (an SSD's speed, the memory there is) as a labelled line."""
    line = dict(
        line=dict(color=GREY, dash="dash", width=1.5),
        annotation_text=label,
        annotation_font=dict(size=12, color=GREY),
    )
    if axis == "y":
        fig.add_hline(value, annotation_position="top left", **line, **where)
    else:
        fig.add_vline(value, annotation_position="top right", **line, **where)


def describe(fig: go.Figure, alt: str, finding: str) -> go.Figure:
    """Gives ``fig`` its alternative text and its one-line finding; returns it."""
    return fig.update_layout(meta=dict(alt=alt, finding=finding))


def words(fig: go.Figure) -> str:
    """The finding and, folded, the figure in words: HTML to stand under it."""
    meta = fig.layout.meta or {}
    if not meta.get("alt") or not meta.get("finding"):
        raise ValueError("a figure needs alt text and a finding: describe(fig, alt, finding)")
    return (
        f"<p><b>{html.escape(meta['finding'])}</b></p>"
        f"<details><summary>The figure in words</summary>{html.escape(meta['alt'])}</details>"
    )


def show(fig: go.Figure, alt: str | None = None, finding: str | None = None) -> None:
    """Displays ``fig``, then its finding and its alternative text (those it carries unless given)."""
    if alt or finding:
        describe(fig, alt, finding)
    text = words(fig)
    meta = fig.layout.meta
    display({**fig._repr_mimebundle_(), "text/plain": meta["alt"]}, raw=True)
    display(HTML(text))
