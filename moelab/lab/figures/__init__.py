"""Figures: what the notebooks show of a record, one module for each notebook.

Charts that write their own titles and findings, tables, the verdicts on the claims, and the
functions behind the sliders. A module is named like the notebook's experiment. Whoever measures
needs none of this: figures import experiments, never the other way, and a command draws nothing.
"""

from .. import plots as plots  # says what to install where a package of the extra is missing
