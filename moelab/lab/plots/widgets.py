"""Controls that drive a pure function from numbers to a figure.

An exception in the function is shown under the controls, kept, and raised by ``assert_ok``;
ipywidgets' own ``interact`` would swallow it.
"""

import html
from collections.abc import Callable, Iterable

import ipywidgets
import plotly.graph_objects as go
from IPython.display import display

from . import style

WIDTH = 880  # pixels: a live figure does not follow the page's width by itself
STATE_CLASS = "moelab-state"  # class of the line under the controls, for tests in a browser
NOTE = "<br><span "  # begins the note in a live figure's title
_WIDE = {"style": {"description_width": "150px"}, "layout": {"width": "500px"}}


def slider(label: str, low, high, value, step=1, unit: str = ""):
    """Make a slider that reports when it is released, of whole numbers if all arguments are."""
    whole = all(isinstance(v, int) for v in (low, high, value, step))
    return (ipywidgets.IntSlider if whole else ipywidgets.FloatSlider)(
        value=value,
        min=low,
        max=high,
        step=step,
        description=f"{label} ({unit})" if unit else label,
        continuous_update=False,
        **_WIDE,
    )


def choice(label: str, options: Iterable, value):
    """Make a slider over a list of values, such as powers of two or names."""
    return ipywidgets.SelectionSlider(
        options=list(options), value=value, description=label, continuous_update=False, **_WIDE
    )


class Explorer:
    """Controls, a live ``figure`` and the last call's ``error`` or None, in one ``view``."""

    def __init__(self, fn: Callable, controls: dict, first: go.Figure, run_button: bool):
        self.fn, self.controls, self.error = fn, controls, None
        self.figure = go.FigureWidget(first.data, _live(first))
        self._quiet = False
        self._words = ipywidgets.HTML(style.words(first))
        self._state = ipywidgets.HTML("")
        self._state.add_class(STATE_CLASS)
        self._button = None
        if run_button:
            self._button = ipywidgets.Button(description="Run", button_style="primary", icon="play")
            self._button.on_click(lambda _: self.run())
        for control in controls.values():
            control.observe(self._changed, names="value")
        buttons = [self._button] if run_button else []
        self.view = ipywidgets.VBox(
            [*controls.values(), *buttons, self._state, self.figure, self._words]
        )

    @property
    def values(self) -> dict:
        """The controls' values by name."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def title(self) -> str:
        """The figure's title as text, without the note below it."""
        return self.figure.layout.title.text.partition(NOTE)[0].replace("<br>", " ")

    def _changed(self, _):
        if self._quiet:
            return
        if self._button:
            self._state.value = "press Run to measure"
        else:
            self.run()

    def run(self) -> None:
        """Call the function with the controls' values and show its figure."""
        self.error, self._state.value = None, "running ..."
        if self._button:
            self._button.disabled = True
        try:
            self._draw(self.fn(**self.values))
            self._state.value = ""
        except Exception as error:  # shown and kept, never swallowed
            self.error = error
            self._state.value = f"<b>{type(error).__name__}: {html.escape(str(error))}</b>"
        finally:
            if self._button:
                self._button.disabled = False

    def _draw(self, new: go.Figure):
        words = style.words(new)
        if _labels(new) != _labels(self.figure):  # an axis in a browser keeps its first labels
            live = go.FigureWidget(new.data, _live(new))
            self.view.children = [live if c is self.figure else c for c in self.view.children]
            self.figure = live
        else:
            with self.figure.batch_update():
                if [t.type for t in self.figure.data] == [t.type for t in new.data]:
                    for old, trace in zip(self.figure.data, new.data):
                        _replace(old, trace.to_plotly_json())
                else:
                    self.figure.data = ()
                    self.figure.add_traces(new.data)
                _replace(self.figure.layout, _live(new))
        self._words.value = words

    def set(self, **values) -> "Explorer":
        """Move controls and run once, as a reader would; returns itself."""
        self._quiet = True
        try:
            for name, value in values.items():
                control = self.controls[name]
                control.value = value
                if control.value != value:
                    ends = f"{control.min} to {control.max}"
                    raise ValueError(f"{name} goes from {ends}, got {value}")
        finally:
            self._quiet = False
        self.run()
        return self

    def assert_ok(self) -> None:
        """Raise what the last run raised, if it did."""
        if self.error is not None:
            raise self.error


def _labels(fig):
    """The labels of bars."""
    return [axis.categoryarray for axis in fig.select_yaxes()]


def _live(fig):
    """A figure's layout for the live view, without a subtitle that would cover the title.

    JupyterLab draws a widget before it is visible, and plotly then measures the title as nothing.
    """
    layout = {**fig.layout.to_plotly_json(), "width": WIDTH}
    title = dict(layout["title"])
    note = title.pop("subtitle")["text"]
    span = f"{NOTE}style='font-size:12px;color:{style.GREY}'>{note}</span>"
    top = title["pad"]["t"] + 3 * (1 + note.count("<br>"))  # a longer text begins higher
    return {**layout, "title": {**title, "text": f"{title['text']}{span}", "pad": {"t": top}}}


def _replace(old, new: dict):
    """Update part of a live figure in place; what the new one lacks is removed."""
    gone = {
        key: None for key in old.to_plotly_json() if key not in new and key not in ("type", "uid")
    }
    old.update({**gone, **new}, overwrite=True)


def explore(
    fn: Callable, *, extremes: Iterable[dict] = (), run_button: bool = False, **controls
) -> Explorer:
    """Show ``fn``'s figure live under its controls; a page without a kernel keeps the first one.

    ``fn`` takes the controls' values by name and returns a figure from ``style.describe``; it holds
    no widget, so that a test can call it. It is called for the ``extremes`` too, dicts of values
    that take the place of the first ones: the axes hold all these figures. With ``run_button`` it
    runs when that is pressed.
    """
    values = {name: control.value for name, control in controls.items()}
    first, *_ = (fn(**values | extreme) for extreme in ({}, *extremes))
    explorer = Explorer(fn, controls, first, run_button)
    # One output of two kinds: live where a kernel runs, the first figure on a page without one.
    still = {
        **first._repr_mimebundle_(),
        "text/html": style.words(first),
        "text/plain": first.layout.meta["alt"],
    }
    display({**explorer.view._repr_mimebundle_(), **still}, raw=True)
    return explorer
