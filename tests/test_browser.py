"""A reader's first minute: JupyterLab opens notebook 00, runs it, and a slider changes the figure.

Needs Chromium (or Chrome) and its driver, `make browser`; skipped without. The screenshot is build/browser_00.png.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from figures import chromium
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).parent.parent
NOTEBOOK = "00_start_here.ipynb"


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab over a copy of the notebook, with a home of its own."""
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, tmp_path)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--ip=127.0.0.1",
    ]
    command += [
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--LabApp.expose_app_in_browser=True",
    ]
    env = {**os.environ, "HOME": str(tmp_path), "MOELAB_FAST": "1"}
    server = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}/lab"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(address, timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, "JupyterLab ended at once"
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture
def browser(tmp_path):
    chrome = chromium(tmp_path / "profile")
    if chrome is None:
        pytest.skip("no chromedriver: `make browser` installs Chromium and its driver on Debian")
    yield chrome
    chrome.quit()


CELLS = "return window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code').map(c => c.model"


def test_the_first_notebook(lab, browser):
    def until(what, script, seconds=120):
        return WebDriverWait(browser, seconds, ignored_exceptions=()).until(
            lambda b: b.execute_script(script), what
        )

    browser.get(f"{lab}/tree/{NOTEBOOK}")
    until(
        "the notebook's kernel is ready",
        "return window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
    )
    browser.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    until("every cell has run", f"{CELLS}.executionCount).every(n => n)", seconds=300)
    until(
        "the kernel is idle",
        "return window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'",
        seconds=300,
    )
    kinds = browser.execute_script(
        f"{CELLS}.outputs.toJSON()).flat().map(o => o.output_type + ' ' + (o.evalue || ''))"
    )
    assert "display_data " in kinds and not [k for k in kinds if k.startswith("error")], kinds

    # The slider's cell comes into view, and with it the live figure.
    index = browser.execute_script(
        "const n = window.jupyterapp.shell.currentWidget.content;"
        "const i = n.widgets.findIndex(c => c.model.sharedModel.getSource().includes('widgets.explore('));"
        "n.activeCellIndex = i; n.scrollToItem(i, 'start'); return i"
    )
    assert index > 0
    title = "return [...document.querySelectorAll('.widget-vbox .js-plotly-plot .gtitle')].map(t => t.textContent)[0]"
    before = until("the live figure is drawn", title)
    handle = browser.find_element(By.CSS_SELECTOR, ".widget-vbox .noUi-handle")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", handle)
    handle.send_keys(Keys.ARROW_LEFT)
    after = until(
        "the figure has changed", f"const t = (() => {{ {title} }})(); return t !== {before!r} && t"
    )
    assert before.startswith("Top-k 8") and after.startswith("Top-k 7"), (before, after)

    (ROOT / "build").mkdir(exist_ok=True)
    assert browser.save_screenshot(str(ROOT / "build" / "browser_00.png"))
