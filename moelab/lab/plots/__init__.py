"""``show`` a chart, or ``explore`` it with sliders; needs the extra ``lab``."""

from importlib.util import find_spec

NEEDED = ("IPython", "anywidget", "ipywidgets", "nbconvert", "pandas", "plotly")
if missing := [name for name in NEEDED if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"the lab's charts and pages need {', '.join(missing)}, found no such package: "
        "pip install 'moelab[lab]'"
    )

from .style import show  # noqa: E402
from .widgets import choice, explore, slider  # noqa: E402

__all__ = ["choice", "explore", "show", "slider"]
