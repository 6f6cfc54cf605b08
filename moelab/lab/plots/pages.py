"""``make run``: every notebook executed top to bottom, and one HTML page for each.

A page needs neither kernel nor network. All share one file, ``plotly.min.js``. ``NAME.json`` beside
a page has its question and answer, for the index.
"""

import html
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from ..machine import card_line
from . import index, style

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
STARTUP_S = 600  # a kernel starts in seconds, unless the machine is busy
LIVE = "<p><i>To move the sliders: <code>make lab</code>, notebook {}.</i></p>"
# A bar as tqdm draws it, up to its clock: "runs: 50%|███     | 1/2 [00:01<00:01, 1.0 s/run]".
BAR = re.compile(r"[^\r\n]*\[[\d:]+[<,][^\]\r\n]*\]")


def summary(notebook) -> dict[str, str]:
    """Read a notebook's ``title`` and, as its ``answer``, its quote after ``**Takeaway.**``.

    The quote stands in a Markdown cell, or a code cell showed it (``charts.say``).
    """
    texts = []
    for cell in notebook.cells:
        texts += [cell.source] * (cell.cell_type == "markdown")
        shown = (output.get("data", {}).get("text/markdown") for output in cell.get("outputs", []))
        texts += filter(None, shown)
    text = "\n\n".join(texts)
    title = re.search(r"^# (.+)$", text, re.M)
    takeaway = re.search(r"^> \*\*Takeaway\.\*\*(.+(?:\n>.*)*)", text, re.M)
    if title is None or takeaway is None:
        raise ValueError(
            "the notebook needs a title (`# ...`) and a takeaway (`> **Takeaway.** ...`)"
        )
    return {"title": title[1].strip(), "answer": re.sub(r"\n>", "\n", takeaway[1]).strip()}


def for_page(source: str) -> str:
    """Lead a Markdown cell's links to notebooks to their pages; drop others into the repository."""
    text = re.sub(r"(\]\(\d\d_\w+)\.ipynb", r"\1.html", source)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#|\d\d_\w+\.html)[^)\s]+\)", r"\1", text)


def run(source: Path) -> tuple[nbformat.NotebookNode, str | None]:
    """Execute a notebook; returns it, up to a cell that failed, and that cell's error or None."""
    notebook, failed = nbformat.read(source, as_version=4), None
    client = NotebookClient(
        notebook,
        timeout=None,
        startup_timeout=STARTUP_S,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=40"],
        resources={"metadata": {"path": str(source.parent)}},
    )
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = []
    total = {"total": len(code), "desc": source.stem, "unit": "cell"}
    with tqdm(**total, leave=False, disable=None) as progress:
        client.on_cell_executed = lambda **_: progress.update()
        try:
            client.execute()
        except CellExecutionError as error:
            failed = str(error)
    for cell in code:  # a page shows even a bar's blanks as a coloured band
        cell.outputs = [output for output in cell.outputs if not _is_progress(output)]
    return notebook, failed


def _is_progress(output):
    stderr = output.output_type == "stream" and output.name == "stderr"
    return stderr and not BAR.sub("", output.text).strip()


def still(notebook, picture: Callable, name: str) -> None:
    """Replace a notebook's live outputs by a ``picture(plotly's JSON)`` and text in HTML."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [new for old in cell.outputs for new in _still(old, picture, name)]


def _still(output, picture, name):
    data, shown = output.get("data", {}), [output]
    live = LIVE.format(name) if WIDGET in data else ""
    if PLOTLY in data:
        shown = [picture(data[PLOTLY])]
        if live:  # from ``explore``: its first figure, with title and finding
            meta = data[PLOTLY]["layout"]["meta"]
            shown = [_html(style.heading(meta)), *shown, _html(style.words(meta) + live)]
    elif live:
        shown = [_html("".join(data.get("text/html", "")) + live)]
    return shown


def _html(text):
    return nbformat.v4.new_output("display_data", {"text/html": text, "text/plain": ""})


def _drawn(figure):
    """A figure that the page's script draws."""
    layout = {**figure["layout"], "dragmode": False}  # a finger scrolls the page
    written = json.dumps({"data": figure["data"], "layout": layout}).replace("</", r"<\/")
    return _html(
        f'<div role="img" aria-label="{html.escape(layout["meta"]["alt"])}"></div>'
        f"<script>draw(document.currentScript.previousElementSibling, () => ({written}))</script>"
    )


def page(sources: list[Path], at: int, target: Path) -> str | None:
    """Run one of the notebooks and write its page, up to a cell that failed.

    The page links those before and after it. Returns the cell's error or None.
    """
    source, names = sources[at], [source.stem for source in sources]
    notebook, failed = run(source)
    try:
        said = summary(notebook)
    except ValueError:
        if not failed:
            raise
        said = {"title": source.stem, "answer": ""}
    still(notebook, _drawn, source.stem)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = for_page(cell.source)
    body = index.html_of(notebook, said["title"], {}, sources=names, at=at, draw=style.DRAW)
    target.write_text(body, encoding="utf-8")
    said |= {"machine": card_line(), "failed": bool(failed)}
    said |= {"fast": bool(os.environ.get("MOELAB_FAST"))}
    target.with_suffix(".json").write_text(json.dumps(said), encoding="utf-8")
    return failed


def main(notebooks: str, out: str, *names: str) -> int:
    """Run a folder's notebooks (or those named), write a page for each and an index.

    Returns how many failed.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    failures, sources = 0, sorted(Path(notebooks).glob("*.ipynb"))
    for i, source in enumerate(sources):
        if names and source.stem not in names:
            continue
        target, started = folder / f"{source.stem}.html", time.perf_counter()
        error = page(sources, i, target)
        failures += error is not None
        print(
            f"[{'fail' if error else 'ok'}] {target}, "
            f"{time.perf_counter() - started:.0f} s, {target.stat().st_size / 1e6:.2f} MB",
            flush=True,
        )
        if error:
            print(error, file=sys.stderr)
    index.main(out)
    return failures
