"""The index of a folder of pages, made of the ``NAME.json`` beside each.

    python -m moelab.lab index build

Pages of another machine may lie in a folder in it, such as ``macos-15``: both indexes are written
and link each other.
"""

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mistune
import nbformat
from nbconvert import HTMLExporter

from ...checkpoint import read_json

INTRODUCTION = """# moelab

moelab runs Mixture-of-Experts language models that are larger than memory, with their experts on
the SSD; these notebooks measure what decides how fast.

Begin with 00, which explains the words. Then take any question: 01 to 05 are about streaming
experts, 06 to 08 about drafts, 09 and 10 about other programs and claims, 11 about several
machines, 12 about yours: what runs there, and how fast."""
FIGURES = """A figure names its machine under its title: *here* is the computer that ran the
notebooks, *recorded* the one of an earlier run, some with an H100 GPU. On a phone, tables and code
scroll sideways."""
LIKE = {"title": str, "answer": str, "machine": str, "fast": bool, "failed": bool}
SMALL = "Small sizes (MOELAB_FAST=1): a check that it runs, no measurement."
FAILED = "A cell failed: the page ends there."
ESCAPING = {"markdown2html": mistune.create_markdown(escape=True)}  # shows raw HTML


def html_of(notebook: nbformat.NotebookNode, title: str, filters: dict, **resources: Any) -> str:
    """A notebook as HTML, by ``page.html.j2``: with other filters, and what else it takes."""
    exporter = HTMLExporter(
        filters=filters,
        template_file=str(Path(__file__).with_name("page.html.j2")),
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    resources |= {"metadata": {"name": title}}
    return exporter.from_notebook_node(notebook, resources=resources)[0]


def described(folder: Path) -> dict[str, dict[str, Any]]:
    """The contents of each page's ``NAME.json`` in a folder, by the page's file name."""
    found = {path.with_suffix(".html"): path for path in sorted(folder.glob("[0-9]*.json"))}
    return {page.name: read_json(j, LIKE) for page, j in found.items() if page.exists()}


def index(folder: Path, repository: str = "") -> str:
    """The index of one folder as HTML, with links to ``repository`` (``owner/name`` on GitHub)."""
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


def main(folder: str, *repository: str) -> None:
    """Write ``index.html`` into a folder of pages, and into each folder of pages in it."""
    top = Path(folder).resolve()
    for place in (top, *(path for path in top.iterdir() if path.is_dir() and described(path))):
        (place / "index.html").write_text(index(place, *repository), encoding="utf-8")
