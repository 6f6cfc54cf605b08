"""Make ``docs/scorecard.md`` (``make numbers``): each claim, with its verdict from the records."""

import re
from collections import Counter
from pathlib import Path

from readme import table

from moelab.lab import claims

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/scorecard.md"
ABOUT = """\
# Which claims about streaming experts are true?

Pull requests, issues and papers make claims about Mixture-of-Experts models whose experts stay on
the SSD. Some contradict each other. Here each one is tested. `make numbers` writes this page from
[the claims](../data/claims.json) and [the records](../data/results).

**Few hold everywhere.** Most are refuted, or depend on a condition that they leave out, such as the
device or how an expert without a slot is read.

A claim is tested in several *regimes*: a device, a memory limit, a state of the page cache. Each
regime has a *gate*, the bound that the samples must keep to. The interval of their median is the
sign test's: it goes from one of the sorted samples to another.

- A regime is *confirmed* if the whole interval keeps to the gate, *refuted* if none of it does, or
  if the claimed effect is so small that it counts as none, else *open*.
- A claim is said without a condition. So one regime is enough to refute it, and most regimes have
  to confirm it. It *depends* if some confirm and others refute it, and is *open* otherwise.
- What only Apple's Metal decides is *not testable here*, whatever our regimes say.

Gates were set after some of these records were made. They stay as they are for records that are
made again. *n* is the number of samples; a number without an interval was counted.
"""
LIMITS = """\
**Limits.** Two CPU cores and two kinds of GPU, all under Linux; no Apple hardware, on which most of
the claims were made. Layers have random weights where a trained model of that size cannot be had
here; each regime says so. A verdict holds for these regimes, not for all machines.
"""


def notebooks(numbers):
    """Write links to notebooks given by their numbers: ``02, 05``."""
    files = {path.name[:2]: path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    return re.sub(r"\d\d", lambda n: f"[{n[0]}](../notebooks/{files[n[0]]})", numbers)


def page():
    """Write the page's text."""
    judged = claims.judge(*claims.read())
    counts = Counter(j.verdict for j in judged)
    counts = ", ".join(f"{counts[v]} *{v}*" for v in claims.VERDICTS if v in counts)
    verdicts, parts = [], []
    for j in judged:
        c, verdict = j.claim, f"*{j.verdict}*"
        source, shown = c["source"], notebooks(c["notebook"])
        verdicts.append((f"[{c['id']}](#{c['id'].lower()})", c["claim"], verdict, source, shown))
        parts.append(f"### {c['id']}\n\n{c['claim'].rstrip('.')}: {verdict}. {j.because}")
        if j.figures:
            measured = ((f.regime, f.measured, f.gate, f.says) for f in j.figures)
            parts.append(table(("regime", "measured", "gate", "says"), *measured))
    verdicts = table(("", "claim", "verdict", "source", "notebook"), *verdicts)
    about = ABOUT, f"Of {len(judged)} claims: {counts}.", verdicts, "## The numbers"
    return "\n\n".join([*about, *parts, LIMITS])


if __name__ == "__main__":
    PAGE.write_text(page())
