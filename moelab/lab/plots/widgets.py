"""Controls that drive a pure function from numbers to a figure.

The static figure for the defaults comes first, so that a page reads without a kernel; then the live one. An exception
in the function is shown under the controls, kept, and raised by ``assert_ok``: ipywidgets' own ``interact`` would swallow it.
"""

import html

import ipywidgets
import plotly.graph_objects as go
from IPython.display import display

from . import style as figures

WIDTH = 920  # pixels: a live figure does not follow the page's width by itself
_WIDE = dict(style={"description_width": "110px"}, layout={"width": "460px"})


def slider(label: str, low, high, value, step=1, unit: str = ""):
    """An integer or float slider that reports when it is let go."""
    kind = (
        ipywidgets.IntSlider
        if all(isinstance(v, int) for v in (low, high, value, step))
        else ipywidgets.FloatSlider
    )
    label = f"{label} ({unit})" if unit else label
    return kind(
        value=value,
        min=low,
        max=high,
        step=step,
        description=label,
        continuous_update=False,
        **_WIDE,
    )


def choice(label: str, options, value):
    """A slider over a list of values, for powers of two and names."""
    return ipywidgets.SelectionSlider(
        options=list(options), value=value, description=label, continuous_update=False, **_WIDE
    )


class Explorer:
    """The live half of ``explore``: controls, a figure, and whatever went wrong.

    Attributes:
        figure (go.FigureWidget): Updated in place.
        error (Exception | None): What the last call raised.
    """

    def __init__(self, fn, controls, first: go.Figure, run_button: bool):
        self.fn, self.controls, self.error = fn, controls, None
        self.figure = go.FigureWidget(first)
        self.figure.layout.width = WIDTH
        self._quiet = False
        self._words = ipywidgets.HTML(figures.words(first))
        self._state = ipywidgets.HTML("")
        self._button = (
            ipywidgets.Button(description="Run", button_style="primary", icon="play")
            if run_button
            else None
        )
        if run_button:
            self._button.on_click(lambda _: self.run())
        for control in controls.values():
            control.observe(self._changed, names="value")
        self.view = ipywidgets.VBox(
            [
                *controls.values(),
                *([self._button] if run_button else []),
                self._state,
                self.figure,
                self._words,
            ]
        )

    @property
    def values(self) -> dict:
        """What the controls stand at."""
        return {name: control.value for name, control in self.controls.items()}

    def _changed(self, _):
        if self._quiet:
            return
        if self._button:
            self._state.value = "press Run to measure"
        else:
            self.run()

    def run(self):
        """Calls the function with the controls' values and shows what it gives."""
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
        words = figures.words(new)
        with self.figure.batch_update():
            if [t.type for t in self.figure.data] == [t.type for t in new.data]:
                for old, trace in zip(self.figure.data, new.data):
                    _replace(old, trace.to_plotly_json())
            else:
                self.figure.data = ()
                self.figure.add_traces(new.data)
            _replace(self.figure.layout, {**new.layout.to_plotly_json(), "width": WIDTH})
        self._words.value = words

    def set(self, **values) -> "Explorer":
        """Moves the controls and runs once, as a reader would; returns itself."""
        self._quiet = True
        try:
            for name, value in values.items():
                self.controls[name].value = value
                if self.controls[name].value != value:
                    raise ValueError(
                        f"{name} goes from {self.controls[name].min} to {self.controls[name].max}, got {value}"
                    )
        finally:
            self._quiet = False
        self.run()
        return self

    def assert_ok(self) -> None:
        """Raises what the last run raised."""
        if self.error is not None:
            raise self.error


def _replace(old, new: dict):
    """Updates part of a live figure in place; what the new one does not say goes."""
    gone = {
        key: None for key in old.to_plotly_json() if key not in new and key not in ("type", "uid")
    }
    old.update({**gone, **new}, overwrite=True)


def explore(fn, *, run_button: bool = False, **controls) -> Explorer:
    """Shows ``fn``'s figure for the controls' defaults, then the same figure live under the controls.

    Args:
        fn (Callable): Takes the controls' values by name and returns a figure that ``figures.describe`` has
            described. It holds no widget, so a test can call it.
        run_button (bool): Measure when a button is pressed and not when a control is let go. Default: ``False``.
        **controls: ``slider`` and ``choice``, or any widget with a ``value``.
    """
    first = fn(**{name: control.value for name, control in controls.items()})
    figures.show(first)
    explorer = Explorer(fn, controls, first, run_button)
    display(explorer.view)
    return explorer
