"""How anything is drawn: ``show`` a chart, ``explore`` a function with sliders.

The look of charts, the widgets and the pages; ``lab.charts`` has the kinds of charts. All need the
packages of the extra ``lab``.
"""

from importlib.util import find_spec

NEEDED = ("IPython", "anywidget", "ipywidgets", "nbconvert", "plotly")
if missing := [name for name in NEEDED if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"the lab's charts and pages need {', '.join(missing)}, found no such package: "
        "pip install 'moelab[lab]'"
    )

from .style import show  # noqa: E402
from .widgets import choice, explore, slider  # noqa: E402

__all__ = ["choice", "explore", "show", "slider"]
