"""``make run``: execute every notebook, and write an HTML page for each and their index.

    python -m moelab.lab pages NOTEBOOKS FOLDER [NAME...]
    python -m moelab.lab index FOLDER [OWNER/REPOSITORY]

A page needs neither a Jupyter kernel nor a network. All pages share one file, ``plotly.min.js``.
``NAME.json`` beside a page has the page's title and answer, for the index. Pages from another
machine may lie in a folder inside FOLDER, such as ``macos-15``. Both folders get an index with a
link to the other one.
"""

import html
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mistune
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from ...checkpoint import read_json
from ..machine import card_line
from . import style

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
STARTUP_S = 600  # a kernel starts in seconds, unless the machine is busy
LIVE = "<p><i>The sliders move once the cell has run: <code>make lab</code>, notebook {}.</i></p>"
# A progress bar of tqdm, up to its clock: "runs: 50%|███     | 1/2 [00:01<00:01, 1.0 s/run]".
BAR = re.compile(r"[^\r\n]*\[[\d:]+[<,][^\]\r\n]*\]")
INTRODUCTION = """# moelab

moelab runs Mixture-of-Experts language models that are larger than memory, with their experts on
the SSD. These notebooks measure what decides the speed.

Begin with 00, which explains the words. Then take any question: 01 to 05 are about streaming
experts, 06 to 08 about drafts, 09 about other programs, 10 about what an operation costs, 11 about
several machines, 12 about yours: what runs there, and how fast."""
FIGURES = """A figure names its machine under its title: *here* is the computer that ran the
notebooks, *recorded* is the computer of an earlier run, sometimes with an H100 GPU. On a phone,
tables and code scroll sideways."""
LIKE = {"title": str, "answer": str, "machine": str, "fast": bool, "failed": bool}
SMALL = "Small sizes (MOELAB_FAST=1): this run checks the code and measures nothing."
FAILED = "A cell failed: the page ends there."
ESCAPING = {"markdown2html": mistune.create_markdown(escape=True)}  # shows raw HTML as text


def summary(notebook, name: str = "") -> dict[str, str]:
    """Return a notebook's ``title`` (or ``name``), and its ``answer`` behind ``**Takeaway.**``."""
    texts = []
    for cell in notebook.cells:
        texts += [cell.source] * (cell.cell_type == "markdown")
        shown = (output.get("data", {}).get("text/markdown") for output in cell.get("outputs", []))
        texts += filter(None, shown)
    text = "\n\n".join(texts)
    title = re.findall(r"^# (.+)$", text, re.M) or [name]
    takeaway = re.findall(r"^> \*\*Takeaway\.\*\*(.+(?:\n>.*)*)", text, re.M) or [""]
    return {"title": title[0].strip(), "answer": re.sub(r"\n>", "\n", takeaway[0]).strip()}


def for_page(source: str) -> str:
    """Point a cell's links to notebooks at their pages; drop other links into the repository."""
    text = re.sub(r"(\]\(\d\d_\w+)\.ipynb", r"\1.html", source)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#|\d\d_\w+\.html)[^)\s]+\)", r"\1", text)


def run(source: Path) -> tuple[nbformat.NotebookNode, str | None]:
    """Execute a notebook up to a cell that fails; return the notebook, and the error or None."""
    notebook, failed = nbformat.read(source, as_version=4), None
    client = NotebookClient(
        notebook,
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
    for cell in code:  # a page would show a progress bar's blanks as a coloured band
        cell.outputs = [output for output in cell.outputs if not _is_progress(output)]
    return notebook, failed


def _is_progress(output):
    stderr = output.output_type == "stream" and output.name == "stderr"
    return stderr and not BAR.sub("", output.text).strip()


def still(notebook, picture: Callable, name: str) -> None:
    """Replace a notebook's charts and sliders by HTML: ``picture(plotly's JSON)`` and text."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [new for old in cell.outputs for new in _still(old, picture, name)]


def _still(output, picture, name):
    data, shown = output.get("data", {}), [output]
    live = LIVE.format(name) if WIDGET in data else ""
    if PLOTLY in data:
        shown = [picture(data[PLOTLY])]
        if live:  # made by ``explore``: keep its first figure, with title and finding
            meta = data[PLOTLY]["layout"]["meta"]
            shown = [_html(style.heading(meta)), *shown, _html(style.words(meta) + live)]
    elif live:
        shown = [_html("".join(data.get("text/html", "")) + live)]
    return shown


def _html(text):
    return nbformat.v4.new_output("display_data", {"text/html": text, "text/plain": ""})


def _drawn(figure):
    """Write a figure as HTML with its JSON; the page's script draws the figure."""
    layout = {**figure["layout"], "dragmode": False}  # so that dragging scrolls
    written = json.dumps({"data": figure["data"], "layout": layout}).replace("</", r"<\/")
    return _html(
        f'<div role="img" aria-label="{html.escape(layout["meta"]["alt"])}"></div>'
        f"<script>draw(document.currentScript.previousElementSibling, () => ({written}))</script>"
    )


def html_of(notebook: nbformat.NotebookNode, title: str, filters: dict, **resources: Any) -> str:
    """Write a notebook as HTML; ``page.html.j2`` gets the ``filters`` and the ``resources``."""
    exporter = HTMLExporter(
        filters=filters,
        template_file=str(Path(__file__).with_name("page.html.j2")),
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    resources |= {"metadata": {"name": title}}
    return exporter.from_notebook_node(notebook, resources=resources)[0]


def page(sources: list[Path], at: int, target: Path) -> str | None:
    """Run a notebook up to a cell that fails and write its page; return the error or None."""
    source, names = sources[at], [source.stem for source in sources]
    notebook, failed = run(source)
    said = summary(notebook, source.stem)
    still(notebook, _drawn, source.stem)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = for_page(cell.source)
    body = html_of(notebook, said["title"], {}, sources=names, at=at, draw=style.DRAW)
    target.write_text(body, encoding="utf-8")
    said |= {"machine": card_line(), "failed": bool(failed)}
    said |= {"fast": bool(os.environ.get("MOELAB_FAST"))}
    target.with_suffix(".json").write_text(json.dumps(said), encoding="utf-8")
    return failed


def main(notebooks: str, out: str, *names: str) -> int:
    """Run a folder's notebooks (or those named), write pages and index; return how many failed."""
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
    write_index(out)
    return failures


def described(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the ``NAME.json`` of each page in a folder; keys are the pages' file names."""
    found = {path.with_suffix(".html"): path for path in sorted(folder.glob("[0-9]*.json"))}
    return {page.name: read_json(j, LIKE) for page, j in found.items() if page.exists()}


def index(folder: Path, repository: str = "") -> str:
    """Write a folder's index as HTML, with links to ``repository`` (``owner/name`` on GitHub)."""
    pages = described(folder)
    machines = sorted({page["machine"] for page in pages.values()})
    text = [INTRODUCTION, *(f"Run on {machine}." for machine in machines), FIGURES]
    for other in (folder.parent, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if there := list(described(other).values()):
            link = quote(Path(os.path.relpath(other, folder), "index.html").as_posix())
            text.append(f"[The same notebooks, run on {there[-1]['machine']}]({link}).")
    if repository:
        link = f"[{repository}](https://github.com/{repository})"
        text.append(f"The notebooks with their sliders: {link}.")
    for name, page in pages.items():
        notes = [f"**{FAILED}**"] * page["failed"] + [f"**{SMALL}**"] * page["fast"]
        text += [f"## [{page['title']}]({quote(name)})", *notes, page["answer"]]
    cell = nbformat.v4.new_markdown_cell("\n\n".join(text))
    return html_of(nbformat.v4.new_notebook(cells=[cell]), "moelab", ESCAPING)


def write_index(folder: str, *repository: str) -> None:
    """Write ``index.html`` into a folder of pages, and into each folder of pages in it."""
    top = Path(folder).resolve()
    for place in (top, *(path for path in top.iterdir() if path.is_dir() and described(path))):
        (place / "index.html").write_text(index(place, *repository), encoding="utf-8")
