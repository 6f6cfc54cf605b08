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
# A visible and a hidden text in one place, which is as high as the higher text.
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
    """A figure, as JSON, that is as wide as its place."""

    _esm = f"""{get_plotlyjs()}
{style.DRAW}
export default {{render({{model, el}}) {{
  const redraw = draw(el, () => JSON.parse(model.get('figure')));
  model.on('change:figure', redraw);
}}}}"""
    figure = traitlets.Unicode().tag(sync=True)


class Explorer:
    """Controls over a plot, as one ``view``; the last ``figure``; the last ``error`` or None."""

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
        """Show a figure. Room for titles never shrinks; without ``follow``, axes do not shrink."""
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
    """Return ``held`` if ``wanted`` exceeds it by at most a tenth, else a range that holds both."""
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
    uses no widget, so that a test can call ``fn``. Each dict in ``extremes`` replaces some of the
    controls' first values: ``fn`` is called with each, and the axes hold all these figures. With
    ``run_button``, ``fn`` is called again only when the button is pressed. With ``follow``, each
    figure has its own axes, because the figures' numbers differ too much for common axes.
    """
    explorer = Explorer(fn, controls, extremes, run_button, follow)
    # The output has two forms: live where a kernel runs, the first figure on a page without one.
    meta = explorer.figure.layout.meta
    text = {"text/html": style.heading(meta) + style.words(meta), "text/plain": meta["alt"]}
    live, still = explorer.view._repr_mimebundle_(), explorer.figure._repr_mimebundle_()
    display({**live, **still, **text}, raw=True)
    return explorer
