"""How results are drawn and shown: ``show`` a chart, ``explore`` a function with sliders."""

from .style import show
from .widgets import choice, explore, slider

__all__ = ["choice", "explore", "show", "slider"]
