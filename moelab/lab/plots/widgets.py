"""Controls for a pure function from numbers to a figure; the function's exceptions are shown."""

import html
import time
from collections.abc import Callable, Iterable

import anywidget
import ipywidgets
import plotly.graph_objects as go
import traitlets
from IPython.display import display
from plotly.offline import get_plotlyjs

from . import style

STATE_CLASS = "moelab-state"  # class of the line under the controls, for tests in a browser
_WIDE = {
    "style": {"description_width": "150px"},
    "layout": {"width": "100%", "max_width": "500px", "height": "auto", "flex_flow": "row wrap"},
    "continuous_update": False,
}
# A visible text over a hidden text; the taller of the two sets the height.
PLACE = (
    "<div style='display:grid;line-height:1.4;font-size:14px'>"
    "<div style='grid-area:1/1'>{}</div>"
    "<div style='grid-area:1/1;visibility:hidden' aria-hidden='true'>{}</div></div>"
)


def slider(label: str, low, high, value, step=1, unit: str = ""):
    """Make a slider; its values are whole numbers if all arguments are whole numbers."""
    whole = all(isinstance(v, int) for v in (low, high, value, step))
    return (ipywidgets.IntSlider if whole else ipywidgets.FloatSlider)(
        value=value,
        min=low,
        max=high,
        step=step,
        description=f"{label} ({unit})" if unit else label,
        **_WIDE,
    )


def choice(label: str, options: Iterable, value):
    """Make a slider over a list of values, such as powers of two or names."""
    return ipywidgets.SelectionSlider(
        options=list(options), value=value, description=label, **_WIDE
    )


class Plot(anywidget.AnyWidget):
    """A figure, given as JSON, drawn as wide as the element that holds it."""

    _esm = f"""{get_plotlyjs()}
{style.DRAW}
export default {{render({{model, el}}) {{
  const redraw = draw(el, () => JSON.parse(model.get('figure')));
  model.on('change:figure', redraw);
}}}}"""
    figure = traitlets.Unicode().tag(sync=True)


class Explorer:
    """Has a ``view`` (controls and a plot), the last ``figure``, and the last ``error`` or None."""

    def __init__(self, fn: Callable, controls: dict, extremes: Iterable[dict], run_button, follow):
        self.fn, self.controls, self.error, self._follow = fn, controls, None, follow
        self._axes, self._longest = {}, {"title": "", "note": ""}
        self._heading, self._words, self._plot = ipywidgets.HTML(), ipywidgets.HTML(), Plot()
        # The state line keeps its height, so that nothing below the line moves.
        self._state = ipywidgets.HTML(layout={"min_height": "28px", "margin": "0"})
        self._state.add_class(STATE_CLASS)
        self._button = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self._button.on_click(lambda _: self.run())
        seconds = []
        for values in (*extremes, {}):
            started = time.perf_counter()
            figure = fn(**self.values | values)
            seconds.append(time.perf_counter() - started)
            self._draw(figure)
        for control in controls.values():
            # A quick function is called while the pointer moves.
            control.continuous_update = min(seconds) < 0.15 and not run_button
            control.observe(self._changed, names="value")
        buttons = [self._button] if run_button else []
        parts = [*buttons, self._state, self._heading, self._plot, self._words]
        self.view = ipywidgets.VBox([*controls.values(), *parts])
        self._measures = run_button

    @property
    def values(self) -> dict:
        return {name: control.value for name, control in self.controls.items()}

    def _changed(self, _):
        if self._measures:
            self._state.value = "press Run to measure"
        else:
            self.run()

    def run(self) -> None:
        """Call the function with the controls' values and show its figure."""
        self.error, self._state.value, self._button.disabled = None, "running ...", True
        try:
            self._draw(self.fn(**self.values))
            self._state.value = ""
        except Exception as error:  # the error is shown and kept
            self.error = error
            self._state.value = f"<b>{type(error).__name__}: {html.escape(str(error))}</b>"
        finally:
            self._button.disabled = False

    def _draw(self, fig: go.Figure):
        """Show a figure. The title's height never shrinks; axes shrink only with ``follow``."""
        self.figure, words = fig, style.words(fig.layout.meta)
        for axis in (*fig.select_xaxes(), *fig.select_yaxes()):
            if axis.range and not self._follow:
                axis.range = self._axes[axis.plotly_name] = _held(
                    axis.range, self._axes.get(axis.plotly_name, axis.range)
                )
        for name, text in self._longest.items():
            self._longest[name] = max(text, fig.layout.meta[name], key=len)
        room = style.heading({**fig.layout.meta, **self._longest})
        self._heading.value = PLACE.format(style.heading(fig.layout.meta), room)
        self._plot.figure, self._words.value = fig.to_json(), words


def _held(wanted, held):
    """Return the axis range ``held``, or widen it if ``wanted`` exceeds it by over a tenth."""
    room = 0.1 * abs(held[1] - held[0])
    if min(wanted) >= min(held) - room and max(wanted) <= max(held) + room:
        return held
    ends = min(*wanted, *held), max(*wanted, *held)
    return ends if wanted[0] <= wanted[1] else ends[::-1]


def explore(
    fn: Callable, *, extremes: Iterable[dict] = (), run_button=False, follow=False, **controls
) -> Explorer:
    """Show ``fn``'s figure live under its controls; a page without a kernel keeps the first figure.

    ``fn`` takes the controls' values by name and returns a figure from ``style.describe``. ``fn``
    uses no widget, so that a test can call ``fn``. Each dict in ``extremes`` has values for some
    controls; the axes have room for the figures that ``fn`` returns for these. With
    ``run_button``, ``fn`` is called again only when the button is pressed. With ``follow``, each
    figure has its own axes; use it if the figures' numbers differ too much for common axes.
    """
    explorer = Explorer(fn, controls, extremes, run_button, follow)
    # The output has two forms: live controls, and the first figure for a page without a kernel.
    meta = explorer.figure.layout.meta
    text = {"text/html": style.heading(meta) + style.words(meta), "text/plain": meta["alt"]}
    live, still = explorer.view._repr_mimebundle_(), explorer.figure._repr_mimebundle_()
    display({**live, **still, **text}, raw=True)
    return explorer
