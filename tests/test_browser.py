"""Move each slider in JupyterLab: the figure must change, and no callback may fail.

Only the cells that a notebook's sliders need are run; nbmake runs the others. Without Chromium (or
Chrome) and its driver (``make browser`` installs both) these tests are skipped. Screenshots are
``build/browser_NN.png``, ``browser_NN_390.png`` on a screen as narrow as a phone's, and
``browser_NN_failed.png`` where a wait timed out.
"""

import dis
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import committed
import nbformat
import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from moelab.lab.plots.widgets import STATE_CLASS

FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run")
FLAGS += ("disable-background-networking", "disable-component-update", "window-size=1400,1100")
ROOT = Path(__file__).parent.parent
SECONDS = 120  # for a notebook's cells or for one move; a busy machine needs 120
# The notebooks with sliders.
NOTEBOOKS = [path for path in committed.NOTEBOOKS if "explore(" in path.read_text()]
NOTEBOOK = "window.jupyterapp?.shell.currentWidget"
STATUS = f"{NOTEBOOK}?.sessionContext?.session?.kernel?.status"
CELLS = f"{NOTEBOOK}.content.widgets.filter(c => c.model.type === 'code').map(c => c.model"
PLOT = "document.querySelector('.widget-vbox .js-plotly-plot')"
# What the live figure shows, once it is drawn: its data, its title, its finding.
FIGURE = f"""
const plot = {PLOT};
const words = [...document.querySelectorAll('.widget-vbox .widget-html')].map(w => w.innerText);
return plot?.querySelector('.cartesianlayer .trace') && JSON.stringify([plot.data, words.slice(1)]);
"""
# Texts of the live figure that do not lie within it.
CUT = f"""
const plot = {PLOT}, {{left, right}} = plot.getBoundingClientRect();
const within = box => box.left >= left - 1 && box.right <= right + 1;
const texts = [...plot.querySelectorAll('.main-svg text')].filter(t => t.textContent.trim());
const cut = texts.filter(t => !within(t.getBoundingClientRect())).map(t => t.textContent);
return plot.querySelector('.main-svg').clientWidth > plot.parentElement.clientWidth ? ['all'] : cut;
"""
READS = ("LOAD_NAME", "LOAD_GLOBAL")
# Labels of bars that the live figure should show and does not.
MISSING = """
const plot = document.querySelector('.widget-vbox .js-plotly-plot');
const shown = [...plot.querySelectorAll('.ytick text')].map(t => t.textContent);
const labels = plot.layout.yaxis?.categoryarray ?? [];
return labels.filter(label => !shown.includes(label.replaceAll('<br>', '')));
"""


def names(cell, *how):
    """Global names that a cell reads or binds with the bytecode instructions in ``how``."""
    codes = [compile(cell.source, "cell", "exec")]
    for code in codes:
        codes += [const for const in code.co_consts if hasattr(const, "co_code")]
    return {i.argval for code in codes for i in dis.get_instructions(code) if i.opname in how}


def of_the_sliders(notebook):
    """Cut a notebook down to the cell with its sliders and the cells that this cell needs."""
    code = [c for c in notebook.cells if c.cell_type == "code"]
    last = next(i for i, c in enumerate(code) if "explore(" in c.source)
    kept, needed = [code[last]], names(code[last], *READS)
    for cell in reversed(code[:last]):
        if names(cell, "STORE_NAME") & needed:
            kept.insert(0, cell)
            needed |= names(cell, *READS)
    return nbformat.v4.new_notebook(cells=kept, metadata=notebook.metadata)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab that has the cut notebooks and a home folder of its own."""
    if shutil.which("chromedriver") is None:
        pytest.skip("no chromedriver: `make browser` installs Chromium and its driver on Debian")
    folder = tmp_path_factory.mktemp("lab")
    for path in NOTEBOOKS:
        nbformat.write(of_the_sliders(nbformat.read(path, as_version=4)), folder / path.name)
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--port={port}", "--ip=127.0.0.1", "--ServerApp.port_retries=0"]
    command += ["--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True"]
    env = {**os.environ, "HOME": str(folder), "MOELAB_FAST": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, cwd=folder, env=env, **quiet)
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
def browser(lab, tmp_path):
    """A headless Chromium (or Chrome) under selenium."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(f"--{flag}")
    if binary := shutil.which("chromium"):
        options.binary_location = binary
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as chrome:
        # JupyterLab's current widget follows the focus, and a headless window may have no focus.
        chrome.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        yield chrome
        chrome.execute_script(f"{NOTEBOOK}?.sessionContext?.shutdown()")


def save(browser, picture):
    """Save a screenshot in ``build``; return its path."""
    path = ROOT / "build" / f"{picture}.png"
    path.parent.mkdir(exist_ok=True)
    assert browser.save_screenshot(str(path))
    return path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_slider_changes_the_figure(path, lab, browser):
    picture = f"browser_{path.stem[:2]}"

    def until(what, script):
        """Wait until a script returns something true, and return it."""
        try:
            return WebDriverWait(browser, SECONDS, 0.2).until(lambda b: b.execute_script(script))
        except TimeoutException:
            pytest.fail(f"not after {SECONDS} s: {what}. See {save(browser, f'{picture}_failed')}")

    browser.get(f"{lab}/workspaces/{path.stem}/tree/{path.name}")  # without other notebooks' tabs
    until("the notebook's kernel is ready", f"return {STATUS} === 'idle'")
    browser.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    until(
        "every cell has run or one has failed",
        f"const cells = {CELLS}); const done = c => c.executionCount && c.executionState !== "
        "'running'; const failed = c => c.outputs.toJSON().some(o => o.output_type === 'error');"
        "return cells.every(done) || cells.some(failed)",
    )
    until("the kernel is idle", f"return {STATUS} === 'idle'")
    outputs = browser.execute_script(f"return {CELLS}.outputs.toJSON()).flat()")
    errors = [o for o in outputs if o["output_type"] == "error"]
    assert not errors, errors[0]["evalue"]

    # The live figure comes into view with the last cell.
    browser.execute_script(
        f"const n = {NOTEBOOK}.content; const i = n.widgets.length - 1;"
        "n.activeCellIndex = i; n.scrollToItem(i, 'start')"
    )
    before = until("the live figure is drawn", FIGURE)
    last = f"{NOTEBOOK}.content.widgets.at(-1).node"
    plots = browser.execute_script(f"return {last}.querySelectorAll('.js-plotly-plot').length")
    assert plots == 1, "the same figure stands there twice"
    handles = browser.find_elements(By.CSS_SELECTOR, ".widget-vbox .noUi-handle")
    assert handles
    for i, handle in enumerate(handles):
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", handle)
        if not moved(handle):
            continue  # in a FAST run the slider has a single choice
        for button in browser.find_elements(By.CSS_SELECTOR, ".widget-vbox button.jupyter-button"):
            browser.execute_script("arguments[0].click()", button)
        state = f"document.querySelector('.{STATE_CLASS}').textContent.trim()"
        until(
            f"slider {i}: the figure has changed, or an error is shown",
            f"const state = {state}; const now = (() => {{ {FIGURE} }})();"
            f"return state.includes('Error') || !state && now && now !== {json.dumps(before)}",
        )
        said = browser.execute_script(f"return {state}")
        assert not said, f"slider {i}: {said}"
        before = browser.execute_script(FIGURE)
        missing = browser.execute_script(MISSING)
        assert not missing, f"slider {i}: no label {missing}"
    save(browser, picture)

    screen = {"width": 390, "height": 1100, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.execute_script(
        "window.jupyterapp.shell.collapseLeft(); window.jupyterapp.shell.mode = 'single-document'"
    )
    until("the figure is narrow", f"return {PLOT}.clientWidth < 390")
    save(browser, f"{picture}_390")
    cut = browser.execute_script(CUT)
    assert not cut, f"at 390 pixels the figure cuts {cut}"


def moved(handle):
    """Move a slider one step down, or up if it is at its end; return whether it moved."""
    before = handle.get_attribute("aria-valuenow")
    for key in (Keys.ARROW_LEFT, Keys.ARROW_RIGHT):
        handle.send_keys(key)
        if handle.get_attribute("aria-valuenow") != before:
            return True
    return False
