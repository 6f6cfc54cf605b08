"""``make notebooks``: run the notebooks anew and keep what they show, for GitHub.

    python data/recipes/notebooks.py                    # every notebook
    python data/recipes/notebooks.py 03_page_cache      # this one

A figure becomes a picture. A widget becomes its first figure, with a line that says how to move its
sliders. A drawing of docs/drawings becomes an attached picture, which a copy of the notebook keeps.
A notebook stays as it was if a cell fails. With MOELAB_FAST=1 the sizes are small, and the
notebooks go to build/notebooks. The script needs kaleido, Pillow and Chromium.
"""

import base64
import io
import os
import re
import sys
import warnings
from pathlib import Path

import kaleido
import nbformat
import plotly.graph_objects as go
from PIL import Image

from moelab.lab.plots import pages

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 800  # CSS pixels
# Matches a path of the machine that ran the notebook; tests/test_docs.py forbids such paths. JSON
# writes a path's backslash twice.
MACHINE = re.compile(r"(?<![\w./])(/home/|/Users/|/root/|/tmp/|/work/|/private/|[A-Z]:\\\\)")
# plotly warns that its options are ignored, because this script starts kaleido's server itself.
warnings.filterwarnings("ignore", "The kopts argument")


def png(figure, width, height=None):
    """Draw a figure of plotly as a small PNG file, in base64."""
    made = go.Figure(figure).to_image("png", width=width, height=height, scale=1.5)
    drawn, file = Image.open(io.BytesIO(made)), io.BytesIO()
    # With 256 colours a file is a third as large.
    drawn.convert("RGB").quantize(256).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def picture(figure):
    """Make an output with the picture of a figure and its alternative text."""
    alt = figure["layout"]["meta"]["alt"]
    data = {"image/png": png({k: figure[k] for k in ("data", "layout")}, WIDTH), "text/plain": alt}
    told = {"image/png": {"alt": alt, "width": WIDTH}}
    return nbformat.v4.new_output("display_data", data, metadata=told)


def drawing(name):
    """Turn a drawing of docs/drawings into a PNG, since JupyterLab shows no attached SVG."""
    file = ROOT / "docs/drawings" / f"{name}.svg"
    _, _, width, height = map(float, re.search('viewBox="([^"]*)"', file.read_text())[1].split())
    source = f"data:image/svg+xml;base64,{base64.b64encode(file.read_bytes()).decode()}"
    place = dict(x=0, y=1, sizex=1, sizey=1, xref="paper", yref="paper", sizing="stretch")
    bare = {"images": [{"source": source, **place}], "margin": dict.fromkeys("lrtb", 0)}
    bare |= {"xaxis": {"visible": False}, "yaxis": {"visible": False}}
    return png({"layout": bare}, width, height)


def embed(cell):
    """Attach the drawings of a Markdown cell to the cell."""
    cell.source = re.sub(r"\(\.\./docs/drawings/(\w+)\.svg\)", r"(attachment:\1.png)", cell.source)
    for name in re.findall(r"\(attachment:(\w+)\.png\)", cell.source):
        cell.setdefault("attachments", {})[f"{name}.png"] = {"image/png": drawing(name)}


def executed(source):
    """Run a notebook; return its file's text for GitHub and "", or "" and an error."""
    notebook, failed = pages.run(source)
    if failed:
        return "", failed
    pages.still(notebook, picture, source.stem)
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            embed(cell)
        for counted in (cell, *cell.get("outputs", [])):
            if "execution_count" in counted:
                counted.execution_count = None
    text = nbformat.writes(notebook).replace(f"{ROOT}/", "") + "\n"
    if found := MACHINE.search(text):
        told = text[max(0, found.start() - 60) : found.end() + 60]
        return "", f"expected no path of this machine, got {told!r}: print a relative path"
    return text, ""


def main(*names):
    """Run the notebooks called ``names``, or every one; return how many failed."""
    sources, failures = sorted((ROOT / "notebooks").glob("*.ipynb")), 0
    if unknown := {*names} - {source.stem for source in sources}:
        sys.exit(f"expected names of {', '.join(s.stem for s in sources)}, got {unknown}")
    out = ROOT / ("build/notebooks" if os.environ.get("MOELAB_FAST") else "notebooks")
    out.mkdir(parents=True, exist_ok=True)
    kaleido.start_sync_server(silence_warnings=True)
    try:
        for source in (source for source in sources if not names or source.stem in names):
            text, failed = executed(source)
            if not failed:
                new = out / f"{source.stem}.new"
                new.write_text(text)
                new.replace(out / source.name)
            failures += bool(failed)
            print(source.stem, failed or "written", len(text))
    finally:
        kaleido.stop_sync_server(silence_warnings=True)
    return failures


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
