"""``make run``: every notebook executed top to bottom, and one HTML page for each.

A page needs neither kernel nor network. All share one file, ``plotly.min.js``. The index says each
notebook's question and answer. ``NAME.json`` beside a page has its figures, for
``data/recipes/figures.py``.
"""

import base64
import html
import json
import mimetypes
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import plotly.io as pio
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from ..machine import card_line

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
STARTUP_S = 600  # a kernel starts in seconds, unless the machine is busy
PLOTLY_FILE = "plotly.min.js"
NO_SLIDERS = "<p><i>Run the notebook in JupyterLab to get the sliders.</i></p>"
# A bar as tqdm draws it, up to its clock: "runs: 50%|███     | 1/2 [00:01<00:01, 1.0 s/run]".
BAR = re.compile(r"[^\r\n]*\[[\d:]+[<,][^\]\r\n]*\]")
STYLE = "body{max-width:48em;margin:2em auto;padding:0 1em;font:16px/1.5 system-ui,sans-serif}"


@dataclass(frozen=True)
class Summary:
    """A notebook's question and answer, as Markdown.

    Attributes:
        title (str): The text of its first heading.
        answer (str): Its takeaway, without the word.
    """

    title: str
    answer: str


def summary(notebook) -> Summary:
    """Reads the question and the answer of a notebook: its title and its takeaway.

    Raises:
        ValueError: If it has no title, or no block quote that begins with ``**Takeaway.**``.
    """
    text = "\n\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    title = re.search(r"^# (.+)$", text, re.M)
    takeaway = re.search(r"^> \*\*Takeaway\.\*\*(.+(?:\n>.*)*)", text, re.M)
    if title is None or takeaway is None:
        raise ValueError(
            "the notebook needs a title (`# ...`) and a takeaway (`> **Takeaway.** ...`)"
        )
    return Summary(title[1].strip(), re.sub(r"\n>", "\n", takeaway[1]).strip())


def embed_drawings(source: str, folder: Path) -> str:
    """Puts each picture that a Markdown cell shows from ``folder`` or beside it into the text."""

    def embedded(match):
        kind, _ = mimetypes.guess_type(match[2])
        data = base64.b64encode((folder / match[2]).read_bytes()).decode()
        return f"{match[1]}data:{kind};base64,{data}"

    return re.sub(r'(!\[[^\]]*\]\(|<img[^>]* src=")(?!\w+:)([^)"\s]+)', embedded, source)


def drop_progress(notebook) -> None:
    """Removes what progress bars left on stderr; a page shows even blanks as a coloured band."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_progress(output)]


def _is_progress(output):
    stderr = output.output_type == "stream" and output.name == "stderr"
    return stderr and not BAR.sub("", output.text).strip()


def _still(output, name: str):
    """Turns a plotly or widget output into HTML that stands by itself, in place."""
    data = output.get("data", {})
    if PLOTLY in data:
        alt = html.escape("".join(data.get("text/plain", "")), quote=True)
        body = pio.to_html(
            {key: data[PLOTLY][key] for key in ("data", "layout")},
            include_plotlyjs=False,
            full_html=False,
            div_id=name,
            validate=False,
            config={"responsive": True},
        )
        body = f'<div role="img" aria-label="{alt}">{body}</div>'
        if WIDGET in data:  # from ``explore``: its first figure, and the finding as HTML
            body += "".join(data["text/html"]) + NO_SLIDERS
        output["data"] = {"text/html": body}
    elif WIDGET in data:
        output["data"] = {"text/html": "".join(data.get("text/html", "")) + NO_SLIDERS}


def _fast() -> bool:
    return bool(os.environ.get("MOELAB_FAST"))


def page(source: Path, target: Path) -> tuple[Summary, str | None]:
    """Runs one notebook and writes its page, up to the cell that failed if one did.

    Returns:
        tuple: The notebook's ``Summary``, and the error of the cell that failed or None.
    """
    notebook = nbformat.read(source, as_version=4)
    said = summary(notebook)
    client = NotebookClient(
        notebook,
        timeout=None,
        startup_timeout=STARTUP_S,
        kernel_name="python3",
        store_widget_state=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=40"],
        resources={"metadata": {"path": str(source.parent)}},
    )
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    failed = None
    with tqdm(total=cells, desc=source.stem, unit="cell", leave=False, disable=None) as progress:
        client.on_cell_executed = lambda **_: progress.update()
        try:
            client.execute()
        except CellExecutionError as error:
            failed = str(error)
    drop_progress(notebook)
    figures = [
        {key: output["data"][PLOTLY][key] for key in ("data", "layout")}
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if PLOTLY in output.get("data", {})
    ]
    for c, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            text = embed_drawings(cell.source, source.parent)
            cell.source = re.sub(r"(\]\(\d\d_\w+)\.ipynb", r"\1.html", text)
        for o, output in enumerate(cell.get("outputs", [])):
            _still(output, f"figure-{c}-{o}")
    body, _ = HTMLExporter().from_notebook_node(
        notebook, resources={"metadata": {"name": source.stem}}
    )
    body = re.sub(r'<script[^>]* src="https?:.*?</script>', "", body, flags=re.S)
    head = f'<script src="{PLOTLY_FILE}"></script></head>'
    target.write_text(body.replace("</head>", head, 1), encoding="utf-8")
    drawn = {"title": said.title, "machine": card_line(), "fast": _fast(), "figures": figures}
    target.with_suffix(".json").write_text(json.dumps(drawn), encoding="utf-8")
    return said, failed


def index(pages: list[tuple[str, Summary]]) -> str:
    """The index as HTML: each page's question, linked, and its answer.

    Args:
        pages (list): ``(file name, summary)`` of each page.
    """
    entries = [
        f'<h2><a href="{name}">{html.escape(said.title)}</a></h2>{markdown2html(said.answer)}'
        for name, said in pages
    ]
    where = f"<p>Run on {html.escape(card_line())}.</p>"
    if _fast():
        where += "<p><b>Small sizes (MOELAB_FAST=1): a check that all runs, no measurement.</b></p>"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>moelab</title>'
        f"<style>{STYLE}</style><h1>moelab</h1>{where}{''.join(entries)}</html>"
    )


def main(notebooks: str, out: str, *names: str) -> int:
    """Runs the notebooks of a folder and writes ``out/NAME.html`` for each, and an index.

    Args:
        notebooks (str): Their folder.
        out (str): The folder of the pages.
        *names (str): Which to run, ``02_expert_streaming`` and so on. Default: all. The index lists
            the others too if their pages are there.

    Returns:
        int: How many failed.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")
    failures, pages = 0, []
    for source in sorted(Path(notebooks).glob("*.ipynb")):
        target = folder / f"{source.stem}.html"
        if not names or source.stem in names:
            started = time.perf_counter()
            said, error = page(source, target)
            failures += error is not None
            print(
                f"[{'fail' if error else 'ok'}] {target}, "
                f"{time.perf_counter() - started:.0f} s, {target.stat().st_size / 1e6:.2f} MB",
                flush=True,
            )
            if error:
                print(error, file=sys.stderr)
        elif target.exists():
            said = summary(nbformat.read(source, as_version=4))
        else:
            continue
        pages.append((target.name, said))
    (folder / "index.html").write_text(index(pages), encoding="utf-8")
    return failures
