"""The index of a folder of pages, made of the ``NAME.json`` beside each.

    python -m moelab.lab index build

Pages of another machine may lie in a folder in it, such as ``macos-15``: both indexes are written
and link each other.
"""

import html
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mistune

from ...checkpoint import read_json

STYLE = (
    "body{max-width:60em;margin:1em auto;padding:0 1em;font:16px/1.5 system-ui,sans-serif;"
    "overflow-wrap:break-word}h1,h2,h3{line-height:1.3;margin:1.5em 0 .5em}h1{font-size:1.5em}"
    "h2{font-size:1.2em}h3{font-size:1em}p,main ul,blockquote{max-width:48em}"
    "blockquote{margin:1em 0;padding:0 1em;border-left:4px solid #0072B2}img{max-width:100%}"
    "nav{display:flex;justify-content:space-between;gap:1em;margin:1em 0}a{color:#04a}"
    "pre,.output_html:has(>div>table),.output_html:has(>table){overflow-x:auto}"
    "pre{background:#f6f6f6;padding:.5em;font-size:13px;line-height:1.4}.output_stderr pre"
    "{background:#fdd}summary{color:#595959;font-size:14px;cursor:pointer}.code{margin:.5em 0}"
    "table{border-collapse:collapse;font-size:14px;margin:.5em 0}td,th{padding:.2em .6em;"
    "text-align:left;min-width:4em}tr:nth-child(even){background:#f6f6f6}"
)
PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>moelab</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
    + STYLE.replace("{", "{{").replace("}", "}}")
    + "</style><h1>moelab</h1><p>moelab runs Mixture-of-Experts language models that are larger "
    "than memory, with their experts on the SSD; these notebooks measure what decides how fast.</p>"
    "<p>Begin with 00, which explains the words. Then take any question: 01 to 05 are about "
    "streaming experts, 06 to 08 about drafts, 09 and 10 about other programs and claims, 11 about "
    "several machines, 12 about yours: what runs there, and how fast.</p>{}<p>A figure names its "
    "machine under its title: <i>here</i> is the computer that ran the notebooks, <i>recorded</i> "
    "the one of an earlier run, some with an H100 GPU. On a phone, tables and code scroll "
    "sideways.</p>{}{}</html>"
)
SOURCE = '<p>The notebooks with their sliders: <a href="https://github.com/{0}">{0}</a>.</p>'
LIKE = {"title": str, "answer": str, "machine": str, "fast": bool, "failed": bool}
markdown2html = mistune.create_markdown(escape=True)  # raw HTML is shown, not followed
SMALL = "<p><b>Small sizes (MOELAB_FAST=1): a check that it runs, no measurement.</b></p>"
FAILED = "<p><b>A cell failed: the page ends there.</b></p>"


def described(folder: Path) -> dict[str, dict[str, Any]]:
    """The contents of each page's ``NAME.json`` in a folder, by the page's file name."""
    found = {path.with_suffix(".html"): path for path in sorted(folder.glob("[0-9]*.json"))}
    return {page.name: read_json(j, LIKE) for page, j in found.items() if page.exists()}


def index(folder: Path, repository: str = "") -> str:
    """The index of one folder as HTML, with links to ``repository`` (``owner/name`` on GitHub)."""
    pages, links = described(folder), []
    lines = sorted({page["machine"] for page in pages.values()})
    where = "".join(f"<p>Run on {html.escape(line)}.</p>" for line in lines)
    for other in (folder.parent, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if there := list(described(other).values()):
            line = f"The same notebooks, run on {html.escape(there[-1]['machine'])}"
            link = Path(os.path.relpath(other, folder), "index.html").as_posix()
            links.append(f'<p><a href="{quote(link)}">{line}</a>.</p>')
    if repository:
        links.append(SOURCE.format(html.escape(repository)))
    entries = [
        f'<h2><a href="{quote(name)}">{html.escape(page["title"])}</a></h2>'
        f"{FAILED * page['failed']}{SMALL * page['fast']}{markdown2html(page['answer'])}"
        for name, page in pages.items()
    ]
    return PAGE.format(where, "".join(links), "".join(entries))


def main(folder: str, *repository: str) -> None:
    """Write ``index.html`` into a folder of pages, and into each folder of pages in it."""
    top = Path(folder).resolve()
    for place in (top, *(path for path in top.iterdir() if path.is_dir() and described(path))):
        (place / "index.html").write_text(index(place, *repository), encoding="utf-8")
