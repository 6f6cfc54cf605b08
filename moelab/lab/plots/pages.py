"""``make run``: every notebook executed top to bottom, and one HTML page each that needs neither kernel nor network."""

import html
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from plotly.offline import get_plotlyjs

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


def _still(output, name: str):
    """Turns a plotly or widget output into HTML that stands by itself, in place."""
    import plotly.io as pio

    data = output.get("data", {})
    if PLOTLY in data:
        alt = html.escape("".join(data.get("text/plain", "")), quote=True)
        fig = {key: data[PLOTLY][key] for key in ("data", "layout")}
        body = pio.to_html(
            fig,
            include_plotlyjs=False,
            full_html=False,
            div_id=name,
            validate=False,
            config={"responsive": True},
        )
        output["data"] = {"text/html": f'<div role="img" aria-label="{alt}">{body}</div>'}
    elif WIDGET in data:
        output["data"] = {
            "text/html": "<p><i>Live controls stand here when the notebook runs in JupyterLab.</i></p>"
        }


def page(source: Path, target: Path) -> str | None:
    """Runs one notebook and writes its page, up to the cell that failed if one did; returns that cell's error."""
    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        store_widget_state=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=40"],
        resources={"metadata": {"path": str(source.parent)}},
    )
    failed = None
    try:
        client.execute()
    except CellExecutionError as error:
        failed = str(error)
    for c, cell in enumerate(notebook.cells):
        for o, output in enumerate(cell.get("outputs", [])):
            _still(output, f"figure-{c}-{o}")
    body, _ = HTMLExporter(embed_images=True).from_notebook_node(
        notebook, resources={"metadata": {"name": source.stem}}
    )
    body = re.sub(r'<script[^>]* src="https?:.*?</script>', "", body, flags=re.S)
    target.write_text(
        body.replace("</head>", f"<script>{get_plotlyjs()}</script></head>", 1), encoding="utf-8"
    )
    return failed


def main(notebooks: str, out: str) -> int:
    """Writes ``out/NAME.html`` for every notebook and an ``index.html``; returns how many failed."""
    Path(out).mkdir(parents=True, exist_ok=True)
    failures, links = 0, []
    for source in sorted(Path(notebooks).glob("*.ipynb")):
        started = time.perf_counter()
        target = Path(out) / f"{source.stem}.html"
        error = page(source, target)
        failures += error is not None
        print(
            f"[{'fail' if error else 'ok'}] {target} in {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        if error:
            print(error, file=sys.stderr)
        links.append(f'<li><a href="{target.name}">{source.stem}</a></li>')
    (Path(out) / "index.html").write_text(
        f"<!doctype html><title>moelab</title><h1>moelab</h1><ul>{''.join(links)}</ul>"
    )
    return failures


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
