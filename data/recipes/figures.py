"""The pictures of docs/figures, drawn by Chromium from the pages that `make run` wrote.

    python data/recipes/figures.py build docs/figures              # every page
    python data/recipes/figures.py build docs/figures 05_top_k     # this one

For each page it writes NAME-1.png, NAME-2.png, ... and NAME.md, which shows them with their words.
Pages of a FAST run (MOELAB_FAST=1) hold small measurements: of these only the figures that show
recorded data are drawn, and NAME.md says how many are left out.
"""

import base64
import shutil
import struct
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import nbformat
import numpy as np

from moelab.lab.plots.pages import summary

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FLAGS = [
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "disable-dev-shm-usage",
    "window-size=1400,1100",
]
WIDTH, HEIGHT = 960, 460  # CSS pixels; a figure's own height goes first
SCALE = 1.5  # pixels of the file to a CSS pixel
PALETTE = 256  # colours of a file, which is then a third as large
READ_PAGE = """
const meta = name => document.querySelector(`meta[name=moelab-${name}]`).content;
return {machine: meta('machine'), fast: meta('fast') === '1',
        figures: [...document.querySelectorAll('.js-plotly-plot')].map(plot => ({
            title: plot.layout.title.text,
            alt: plot.layout.meta?.alt || '',
            finding: plot.layout.meta?.finding || '',
            here: plot.layout.meta?.here ?? true}))};
"""
DRAW = """
const [number, width, height, scale, done] = arguments;
const plot = document.querySelectorAll('.js-plotly-plot')[number];
const size = {width, height: plot.layout.height || height, scale};
const image = new Image();
image.onload = () => {
    const {width, height} = image, canvas = new OffscreenCanvas(width, height);
    const context = canvas.getContext('2d');
    context.drawImage(image, 0, 0);
    const {data} = context.getImageData(0, 0, width, height), reader = new FileReader();
    reader.onload = () => done({width, height, pixels: reader.result});
    reader.readAsDataURL(new Blob([data]));
};
Plotly.toImage(plot, {format: 'png', ...size}).then(url => { image.src = url; });
"""


@dataclass(frozen=True)
class Figure:
    """A figure of a page.

    Attributes:
        title, alt, finding (str): Its words.
        here (bool): Whether the run that wrote the page measured it; else its data was recorded.
    """

    title: str
    alt: str
    finding: str
    here: bool


def chromium(profile=None):
    """A headless Chromium (or Chrome) under selenium, or None where there is no driver for one."""
    from selenium import webdriver

    driver = shutil.which("chromedriver")
    if not driver:
        return None
    options = webdriver.ChromeOptions()
    for flag in [*FLAGS, *([f"user-data-dir={profile}"] if profile else [])]:
        options.add_argument(f"--{flag}")
    if binary := shutil.which("chromium"):
        options.binary_location = binary
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def plain(text):
    """Text of a figure without its line breaks and bold."""
    for tag, instead in (("<br>", " "), ("<b>", ""), ("</b>", "")):
        text = text.replace(tag, instead)
    return " ".join(text.split())


def gallery(name, title, pictures, machine, left_out):
    """The Markdown of ``NAME.md``.

    Args:
        name, title (str): The page, and its question.
        pictures (list): ``(file name, Figure)`` of each picture.
        machine (str): The machine that ran the notebook, in one line.
        left_out (int): Figures of a FAST run that are not drawn.
    """
    lines = [
        f"# {title}",
        "",
        f"The figures of [{name}](../../notebooks/{name}.ipynb), drawn by `make figures` from the "
        f"page of `make run`. Where a figure names no other machine, it was measured on {machine}.",
        "",
    ]
    if left_out:
        lines += [f"Drawn from a FAST run, without its {left_out} measurements of small size.", ""]
    for file, figure in pictures:
        alt = plain(figure.alt or figure.title).replace("[", "(").replace("]", ")")
        lines += [f"## {plain(figure.title)}", "", f"![{alt}]({file})", ""]
        if figure.finding:
            lines += [plain(figure.finding), ""]
    return "\n".join(lines).rstrip() + "\n"


def png(pixels):
    """A PNG file with the commonest colours of an image; others become the nearest of these.

    Args:
        pixels (np.ndarray): ``[height, width, 3]`` bytes.
    """
    height, width, _ = pixels.shape
    codes = (pixels.astype(int) @ (1 << 16, 1 << 8, 1)).ravel()
    colors, at, counts = np.unique(codes, return_inverse=True, return_counts=True)
    colors = np.stack([colors >> 16, colors >> 8 & 255, colors & 255], axis=1)
    palette = colors[np.argsort(-counts)[:PALETTE]]
    nearest = [np.square(palette - color).sum(1).argmin() for color in colors]
    rows = np.array(nearest, np.uint8)[at].reshape(height, width)
    rows = np.pad(rows, ((0, 0), (1, 0)))  # each begins with the number of its filter: none
    chunks = {
        b"IHDR": struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0),  # 8 bits, a palette
        b"PLTE": palette.astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(rows.tobytes(), 9),
        b"IEND": b"",
    }
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks.items():
        file += struct.pack(">I", len(data)) + kind + data
        file += struct.pack(">I", zlib.crc32(kind + data))
    return file


def draw(browser, page, out):
    """Draws the figures of one page and writes its gallery; returns the files' paths."""
    browser.get(page.resolve().as_uri())
    read = browser.execute_script(READ_PAGE)
    figures = [Figure(**figure) for figure in read["figures"]]
    for old in out.glob(f"{page.stem}-*.png"):
        old.unlink()
    pictures, left_out = [], 0
    for number, figure in enumerate(figures):
        if read["fast"] and figure.here:
            left_out += 1
            continue
        image = browser.execute_async_script(DRAW, number, WIDTH, HEIGHT, SCALE)
        pixels = np.frombuffer(base64.b64decode(image["pixels"].partition(",")[2]), np.uint8)
        path = out / f"{page.stem}-{len(pictures) + 1}.png"
        path.write_bytes(png(pixels.reshape(image["height"], image["width"], 4)[..., :3]))
        pictures.append((path.name, figure))
    title = summary(nbformat.read(NOTEBOOKS / f"{page.stem}.ipynb", as_version=4)).title
    text = gallery(page.stem, title, pictures, read["machine"], left_out)
    (out / f"{page.stem}.md").write_text(text)
    return [out / file for file, _ in pictures]


def main(pages, out, *names):
    """Draws the figures of the pages called ``names``, or of every page."""
    browser = chromium()
    if browser is None:
        sys.exit("no chromedriver: `make browser` installs Chromium and its driver on Debian")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        for name in names or [path.stem for path in sorted(Path(pages).glob("[0-9]*.html"))]:
            for path in draw(browser, Path(pages) / f"{name}.html", out):
                print(f"{path}, {path.stat().st_size / 1e3:.0f} kB")
    finally:
        browser.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
