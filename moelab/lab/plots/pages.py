"""``make run``: every notebook executed top to bottom, and one HTML page for each.

A page needs neither kernel nor network. All share one file, ``plotly.min.js``. ``NAME.json`` beside
a page has its question and answer, for the index, and its figures, for ``data/recipes/figures.py``.
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
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from ..machine import card_line
from . import index

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
STARTUP_S = 600  # a kernel starts in seconds, unless the machine is busy
PLOTLY_FILE = "plotly.min.js"
NO_SLIDERS = "<p><i>Run the notebook in JupyterLab to get the sliders.</i></p>"
# A bar as tqdm draws it, up to its clock: "runs: 50%|███     | 1/2 [00:01<00:01, 1.0 s/run]".
BAR = re.compile(r"[^\r\n]*\[[\d:]+[<,][^\]\r\n]*\]")
# A figure narrower than its title cannot be read: on a phone it scrolls, as tables and code do.
STYLE = (
    "<style>main{max-width:1024px;margin:auto}main>nav{padding:8px}main>nav a{color:#04a;"
    "text-decoration:underline}"
    "[role=img],.jp-InputArea-editor,.jp-RenderedMarkdown{overflow-x:auto!important}"
    "@media(max-width:760px){.js-plotly-plot{min-width:900px}.modebar{display:none!important}"
    ".jp-RenderedHTMLCommon table{width:max-content;max-width:60em}}</style>"
)
BACK = '<nav><a href="index.html">All notebooks</a></nav>'  # on top of a page


@dataclass(frozen=True)
class Summary:
    """A notebook's question and answer, as Markdown."""

    title: str  # the text of its first heading
    answer: str  # its takeaway, without the word "Takeaway"


def summary(notebook) -> Summary:
    """Read a notebook's question and answer: its title, and its quote after ``**Takeaway.**``."""
    text = "\n\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    title = re.search(r"^# (.+)$", text, re.M)
    takeaway = re.search(r"^> \*\*Takeaway\.\*\*(.+(?:\n>.*)*)", text, re.M)
    if title is None or takeaway is None:
        raise ValueError(
            "the notebook needs a title (`# ...`) and a takeaway (`> **Takeaway.** ...`)"
        )
    return Summary(title[1].strip(), re.sub(r"\n>", "\n", takeaway[1]).strip())


def for_page(source: str, folder: Path) -> str:
    """Turn a Markdown cell's text into a page's, with the pictures of its folder inside.

    Citations of numbers and the link to the figures are dropped. A link to a notebook leads to its
    page; of other links into the repository only the words stay.
    """

    def embedded(match):
        kind, _ = mimetypes.guess_type(match[2])
        data = base64.b64encode((folder / match[2]).read_bytes()).decode()
        return f"{match[1]}data:{kind};base64,{data}"

    text = re.sub(r"\[Figures as pictures\]\([^)]*\)\.", "", source)
    text = re.sub(r"(\]\(\d\d_\w+)\.ipynb", r"\1.html", text)
    text = re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#|\d\d_\w+\.html)[^)\s]+\)", r"\1", text)
    return re.sub(r'(!\[[^\]]*\]\(|<img[^>]* src=")(?!\w+:)([^)"\s]+)', embedded, text)


def drop_progress(notebook) -> None:
    """Remove the traces of progress bars on stderr: a page shows even blanks as a coloured band."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_progress(output)]


def _is_progress(output):
    stderr = output.output_type == "stream" and output.name == "stderr"
    return stderr and not BAR.sub("", output.text).strip()


def _still(output, name: str):
    """Turn a plotly or widget output in place into HTML that stands by itself."""
    data = output.get("data", {})
    if PLOTLY in data:
        alt = html.escape("".join(data.get("text/plain", "")), quote=True)
        layout = {**data[PLOTLY]["layout"], "dragmode": False}  # a finger scrolls the page
        body = pio.to_html(
            {"data": data[PLOTLY]["data"], "layout": layout},
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


def page(source: Path, target: Path) -> str | None:
    """Run one notebook and write its page, up to a cell that failed; returns its error or None."""
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
            cell.source = for_page(cell.source, source.parent)
        for o, output in enumerate(cell.get("outputs", [])):
            _still(output, f"figure-{c}-{o}")
    body, _ = HTMLExporter().from_notebook_node(
        notebook, resources={"metadata": {"name": source.stem}}
    )
    body = re.sub(r'<script[^>]* src="https?:.*?</script>', "", body, flags=re.S)
    head = f'{STYLE}<script src="{PLOTLY_FILE}"></script></head>'
    body = body.replace("</head>", head, 1).replace("<main>", f"<main>{BACK}", 1)
    target.write_text(body, encoding="utf-8")
    described = {
        **{"title": said.title, "answer": said.answer, "machine": card_line()},
        **{"fast": bool(os.environ.get("MOELAB_FAST")), "failed": bool(failed), "figures": figures},
    }
    target.with_suffix(".json").write_text(json.dumps(described), encoding="utf-8")
    return failed


def main(notebooks: str, out: str, *names: str) -> int:
    """Run a folder's notebooks (or those named), write a page for each and an index.

    Returns how many failed.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")
    failures = 0
    for source in sorted(Path(notebooks).glob("*.ipynb")):
        if names and source.stem not in names:
            continue
        target, started = folder / f"{source.stem}.html", time.perf_counter()
        error = page(source, target)
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
