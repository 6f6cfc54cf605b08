"""Numbers of a text, filled in from the records that they cite.

    python -m moelab.lab cite README.md data/results/README.md notebooks/*.ipynb

A number carries its expression in an HTML comment behind it, which does not show:

    <!--: fast = read("cpu_ladder_35b") -->
    `fused` decodes 52.1 [49.6, 54.4]<!--=q(of(fast, "fused", "tok_s"), ".1f")--> tok/s

``<!--: ... -->`` is Python that is executed where it stands; names hold until the document ends.
``<!--given-->`` behind a number says that no record decides it. An expression has no ``|``, which
would end a table's cell. It may use ``read``, ``group``, ``ratios``, ``ratio`` (``paired``),
``of`` (``values``), ``same_tokens`` and ``PUBLISHED`` of ``records``, ``np``, and ``q``, ``m``,
``times`` and ``claimed`` of this module.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import records

if TYPE_CHECKING:
    from pandas import DataFrame

VALUE = r"-?\d+(?:[.,]\d+)*(?:e-?\d+)?(?: ?\[-?[\d.,]*\d, -?[\d.,]*\d\])?"  # 1,024 or 1.5 [1, 2]
COMMENT = re.compile(
    rf"(?P<value>{VALUE})?<!--(?::(?P<code>.+?)-->\n?|(?:=(?P<cited>.+?)|given)-->)", re.S
)


def times(table: "DataFrame", over: str, under: str, form: str = ".1f") -> str:
    """One variant's median tokens a second over another's."""
    over, under = (records.values(table, name, "tok_s").median() for name in (over, under))
    return f"{over / under:{form}}"


@cache
def _verdicts() -> list[str]:
    """The verdicts of all claims of others."""
    from . import claims  # documents count claims

    card = claims.scorecard()
    return card[card.source != "moelab"].verdict.tolist()


def claimed(*verdicts: str) -> int:
    """How many claims of others have one of these verdicts, or any verdict."""
    return sum(not verdicts or verdict in verdicts for verdict in _verdicts())


def fill(text: str, names: dict[str, Any] | None = None) -> str:
    """Replace a text's cited numbers by the records'; what the text defines joins ``names``."""
    names = NAMES.copy() if names is None else names

    def filled(match):
        value, code, cited = match["value"], match["code"], match["cited"]
        said = match[0].removeprefix(value or "")
        try:
            if code:
                exec(code.strip(), names)
                return match[0]
            if value is None:
                raise ValueError("no number stands before it")
            fresh = value if cited is None else str(eval(cited.strip(), names))
            if not re.fullmatch(VALUE, fresh):
                raise ValueError(f"it gives {fresh!r}, which is no number")
        except Exception as error:
            what = error if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"{said}: {what}. Correct the expression.") from error
        return fresh + said

    return COMMENT.sub(filled, text)


def uncited(text: str) -> str:
    """A text without comments and with ``...`` in place of each cited number."""
    return COMMENT.sub(lambda match: "..." if match["value"] else "", text)


def shown(text: str) -> str:
    """A text as a reader sees it, without the comments."""
    return COMMENT.sub(lambda match: match["value"] or "", text)


def fill_file(path: str | Path) -> str:
    """The contents of a Markdown file or a notebook with fresh numbers; nothing is written."""
    path, names = Path(path), NAMES.copy()
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix != ".ipynb":
            return fill(text, names)
        notebook = json.loads(text)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = fill("".join(cell["source"]), names).splitlines(keepends=True)
        return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def main(*files: str) -> int:
    """Fill the numbers of files in, and say which files changed."""
    for file in files:
        fresh, old = fill_file(file), Path(file).read_text(encoding="utf-8")
        if fresh != old:
            Path(file).write_text(fresh, encoding="utf-8")
            lines = zip(old.splitlines(), fresh.splitlines())
            changed = sum(a != b for a, b in lines)
            print(f"{file}: numbers of {changed} lines filled in")
    return 0


NAMES = records.NAMES | {"m": records.m, "q": records.q, "times": times, "claimed": claimed}
