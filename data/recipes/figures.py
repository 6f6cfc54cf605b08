"""The pictures of docs/figures, of the figures that `make run` drew.

    python data/recipes/figures.py build docs/figures              # every page
    python data/recipes/figures.py build docs/figures 05_top_k     # this one

For each page it writes NAME-1.png, NAME-2.png, ... and NAME.md, which shows them with their words.
Pages of a FAST run (MOELAB_FAST=1) hold small measurements: of these only the figures that show
recorded data are drawn, and NAME.md says how many are left out. Needs kaleido, Pillow and Chromium.
"""

import io
import json
import sys
import warnings
from pathlib import Path

import kaleido
import plotly.graph_objects as go
from PIL import Image
from tqdm import tqdm

SIZE = {"width": 960, "scale": 1.5}  # CSS pixels; pixels of the file to each
# plotly warns that options are ignored, since this script started kaleido's server, not plotly.
warnings.filterwarnings("ignore", "The kopts argument")
PALETTE = 256  # colours of a file, which is then a third as large


def plain(text):
    """Text of a figure without its line breaks and bold."""
    for tag, instead in (("<br>", " "), ("<b>", ""), ("</b>", "")):
        text = text.replace(tag, instead)
    return " ".join(text.split())


def draw(page, out):
    """Draws the figures of one page and writes its gallery. A page without any gets no gallery."""
    read = json.loads(page.read_text())
    if not read["figures"]:
        return
    for old in out.glob(f"{page.stem}-*.png"):
        old.unlink()
    figures = [f for f in read["figures"] if not (read["fast"] and f["layout"]["meta"]["here"])]
    lines = [
        f"# {read['title']}",
        "",
        f"The figures of [{page.stem}](../../notebooks/{page.stem}.ipynb), drawn by `make figures` "
        "from `make run`. Where a figure names no other machine, it was measured on "
        f"{read['machine']}.",
        "",
    ]
    if left_out := len(read["figures"]) - len(figures):
        lines += [f"Drawn from a FAST run, without its {left_out} measurements of small size.", ""]
    for number, figure in enumerate(tqdm(figures, desc=page.stem), 1):
        layout, file = figure["layout"], f"{page.stem}-{number}.png"
        drawn = go.Figure(figure).to_image("png", **SIZE)
        Image.open(io.BytesIO(drawn)).convert("RGB").quantize(PALETTE).save(out / file)
        alt = plain(layout["meta"]["alt"]).replace("[", "(").replace("]", ")")
        lines += [f"## {plain(layout['title']['text'])}", "", f"![{alt}]({file})", ""]
        lines += [plain(layout["meta"]["finding"]), ""]
    (out / f"{page.stem}.md").write_text("\n".join(lines).rstrip() + "\n")


def main(pages, out, *names):
    """Draws the figures of the pages called ``names``, or of every page."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    kaleido.start_sync_server(silence_warnings=True)
    try:
        for name in names or [path.stem for path in sorted(Path(pages).glob("[0-9]*.json"))]:
            draw(Path(pages) / f"{name}.json", out)
    finally:
        kaleido.stop_sync_server(silence_warnings=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
