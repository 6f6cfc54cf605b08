"""How anything is drawn: ``show`` a chart, ``explore`` a function with sliders.

The kinds of charts, their look, the widgets and the pages. What is drawn of which record is in
``lab.figures``.
"""

from .style import show
from .widgets import choice, explore, slider

__all__ = ["choice", "explore", "show", "slider"]
