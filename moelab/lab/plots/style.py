"""What figures share: template, lines for limits, and the text around them."""

import html
import math
import textwrap

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
from IPython.display import HTML, display

# Okabe and Ito's colours, distinct for colour-blind readers; yellow, weak on white, comes last.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
PATTERNS = ("", "/", "x")
GREY = "#595959"

# Sizes are in pixels. Lines of a legend, and of an axis title on a phone, are in characters.
PLOT_HEIGHT = 300
TOP, FOOTER = 22, 54  # room above the plot; below it, for ticks and axis title
LEGEND_LINE, LEGEND_KEY, CHARACTER = 22, 55, 7.5
WIDE, NARROW = 800, 260  # room for a legend on a page and on a phone
NARROW_CHARACTERS, LEGEND_CHARACTERS = 28, 38

# This script draws a figure in a notebook or on a page, as wide as the element that holds it.
DRAW = """
function draw(el, figure) {
  const plot = el.appendChild(document.createElement('div'));
  let width;
  const redraw = () => {
    if (!width) return;
    const {data, layout} = figure();
    const narrow = width < 600;
    for (const [path, value] of Object.entries(narrow ? layout.meta.narrow : {})) {
      const keys = path.match(/[^.[\\]]+/g), last = keys.pop();
      keys.reduce((place, key) => place[key] ??= {}, layout)[last] = value;
    }
    const config = {displaylogo: false, displayModeBar: !narrow};
    Plotly.react(plot, data, {...layout, width}, config);
  };
  new ResizeObserver(() => {
    if (el.clientWidth !== width) { width = el.clientWidth; redraw(); }
  }).observe(el);
  return redraw;
}
"""

_AXIS = {
    "gridcolor": "#E6E6E6",
    "linecolor": GREY,
    "showline": True,
    "zeroline": False,
    "ticks": "outside",
    "automargin": True,
    "title": {"font": {"size": 14}, "standoff": 8},
}
pio.templates["moelab"] = go.layout.Template(
    layout={
        "colorway": COLORS,
        "font": {"size": 13, "color": "#222"},
        "margin": {"l": 70, "r": 30, "b": FOOTER},
        "modebar": {"remove": ["select", "lasso", "zoomin", "zoomout", "autoscale", "share"]},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "tracegroupgap": 0,
        },
        "xaxis": _AXIS,
        "yaxis": {**_AXIS, "rangemode": "tozero"},
    }
)
pio.templates.default = "moelab"


def look(i: int) -> dict:
    """Return line and marker of the ``i``-th series; series differ even without colour."""
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
        "array": np.subtract(high, mid),
        "arrayminus": np.subtract(mid, low),
        "thickness": 1.5,
        "width": 4,
    }


def wrap(text: str, characters: int) -> list[str]:
    """Wrap and escape a figure's text: as few lines as needed, of about the same length."""
    lines = textwrap.wrap(text, characters)
    while len(lines) > 1:
        width = max(map(len, lines)) - 1
        shorter = textwrap.wrap(text, width, break_long_words=False)
        if len(shorter) > len(lines) or max(map(len, shorter)) > width:
            break
        lines = shorter
    return [html.escape(line, quote=False) for line in lines] or [""]


def ceiling(
    fig: go.Figure, value: float, label: str, at: str, axis: str = "y", log: bool = False, **where
) -> None:
    """Draw a limit, such as the SSD's rate, as a line; its label stands ``at`` one end."""
    look = {
        "line": {"color": GREY, "dash": "dash", "width": 1.5},
        "annotation_text": label,
        "annotation_font": {"size": 12, "color": GREY},
        "annotation_position": at,
    }
    (fig.add_hline if axis == "y" else fig.add_vline)(value, **look, **where)
    if log:  # plotly wants the logarithm for an annotation, but the value for a line
        fig.layout.annotations[-1][axis] = math.log10(value)


def describe(fig: go.Figure, alt: str, finding: str) -> go.Figure:
    """Give a complete figure its alternative text, a finding, and room for the legend."""
    for trace in fig.data:
        trace.name = trace.name and "<br>".join(wrap(trace.name, LEGEND_CHARACTERS))
    meta, above = fig.layout.meta, fig.layout.height - fig.layout.margin.b
    narrow = {"margin.l": min(fig.layout.margin.l or 50, 50), **meta.get("narrow", {})}
    # On a phone, a legend may be as wide as the plot and its axis labels together.
    narrow |= {"legend.xref": "container", "legend.maxheight": 0.9}
    bottom, low = (FOOTER + LEGEND_LINE * _legend_lines(fig, width) for width in (WIDE, NARROW))
    most = 1
    for axis in fig.select_xaxes():
        lines = wrap(axis.title.text or "", NARROW_CHARACTERS)
        narrow[f"{axis.plotly_name}.title.text"] = "<br>".join(lines)
        most = max(most, len(lines))
    narrow["margin.b"] = low + 18 * (most - 1)
    narrow["height"] = narrow.get("height", above) + narrow["margin.b"]
    meta = {**meta, "alt": alt, "finding": finding, "narrow": narrow}
    return fig.update_layout(meta=meta, height=above + bottom, margin={"b": bottom})


def _legend_lines(fig, width):
    names = [t.name for t in fig.data if t.name and t.showlegend is not False]
    if fig.layout.showlegend is False or not names:
        return 0
    if len(fig.data) == 1 and not (fig.layout.showlegend or fig.data[0].showlegend):
        return 0  # plotly draws no legend for a single trace
    widths = [LEGEND_KEY + CHARACTER * max(map(len, name.split("<br>"))) for name in names]
    breaks = sum(name.count("<br>") for name in names)
    if sum(widths) <= width:
        return 1 + (breaks > 0)
    return math.ceil(len(names) / max(width // max(widths), 1)) + breaks


def heading(meta: dict) -> str:
    """HTML to stand above a figure: its title and its note."""
    title, note = (html.escape(meta[name], quote=False) for name in ("title", "note"))
    return f"<b>{title}</b><br><small style='color:{GREY}'>{note}</small>"


def words(meta: dict) -> str:
    """HTML to stand under a figure: its finding and, folded, the figure in words."""
    told = "<br>".join(map(html.escape, (meta["alt"], *meta["machines"])))
    return (
        f"<p>{html.escape(meta['finding'])}</p>"
        f"<details><summary>The figure in words</summary>{told}</details>"
    )


def show(fig: go.Figure) -> None:
    """Display a described figure under its title and above its finding."""
    meta = fig.layout.meta
    text = words(meta)
    display(HTML(heading(meta)))
    display({**fig._repr_mimebundle_(), "text/plain": meta["alt"]}, raw=True)
    display(HTML(text))
