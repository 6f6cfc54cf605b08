"""The figures of docs/figures, as the README shows them: drawn by Chromium from the pages that `make run` wrote.

    python data/recipes/figures.py build docs/figures 02_expert_streaming:1 05_top_k:1

Each name is a page and the number of a figure on it, from 1; without names, every figure of every page.
"""

import base64
import shutil
import sys
from pathlib import Path

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
WIDTH, HEIGHT, SCALE = 960, 460, 2  # pixels, and how many of them to a pixel of the file
TO_IMAGE = """
    const done = arguments[arguments.length - 1], plot = document.querySelectorAll('.js-plotly-plot')[arguments[0]];
    Plotly.toImage(plot, {format: 'png', width: arguments[1], height: plot.layout.height || arguments[2], scale: arguments[3]}).then(done);
"""


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


def main(pages, out, *names):
    """Writes ``out/PAGE-N.png`` for each ``PAGE:N``."""
    browser = chromium()
    if browser is None:
        sys.exit("no chromedriver: `make browser` installs Chromium and its driver on Debian")
    Path(out).mkdir(parents=True, exist_ok=True)
    wanted = {}
    for name in names or [path.stem for path in sorted(Path(pages).glob("[0-9]*.html"))]:
        page, _, number = name.partition(":")
        wanted.setdefault(page, []).append(int(number) if number else None)
    try:
        for page, numbers in wanted.items():
            browser.get((Path(pages) / f"{page}.html").resolve().as_uri())
            count = browser.execute_script(
                "return document.querySelectorAll('.js-plotly-plot').length"
            )
            for number in range(1, count + 1) if None in numbers else numbers:
                image = browser.execute_async_script(TO_IMAGE, number - 1, WIDTH, HEIGHT, SCALE)
                path = Path(out) / f"{page}-{number}.png"
                path.write_bytes(base64.b64decode(image.partition(",")[2]))
                print(path)
    finally:
        browser.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
