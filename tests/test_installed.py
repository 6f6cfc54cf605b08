"""moelab as its wheel installs it: without ``data/``, and without the packages of the extras."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
from committed import NOTEBOOKS

import moelab
from moelab import shipped
from moelab.lab import claims, records
from moelab.replay import locality

EXTRAS = (
    *("starlette", "uvicorn", "llguidance"),
    *("IPython", "anywidget", "ipywidgets", "jupyter_core", "jupyterlab"),
    *("nbconvert", "nbformat", "pandas", "plotly"),
)
COMMANDS = f"""
import json, sys
sys.modules |= dict.fromkeys({EXTRAS})
from moelab.__main__ import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as stop:
        assert stop.code == 0, command
for line in json.loads(sys.argv[1]):
    print("rc", main(line))
"""


def test_commands_without_the_extras(model_path, tmp_path):
    shutil.copytree(Path(moelab.__file__).parent, tmp_path / "moelab")  # its links become files
    machine = ["--ram", "64", "--ssd", "3", "--cores", "8"]
    lines = [
        ["generate", str(model_path), "--prompt", "def f(x):", "--max-tokens", "2"],
        ["plan", str(model_path)],
        ["plan", "GPT-OSS-120B", *machine],
        ["serve", str(model_path)],
        ["bench", str(model_path)],
    ]
    command = [sys.executable, "-c", COMMANDS, json.dumps(lines)]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    said = "tok/s, 2 tokens.*rc 0" + ".*tok/s, likely.*rc 0" * 2 + ".*rc 1" * 2
    assert done.returncode == 0 and re.search(said, done.stdout, re.DOTALL), done
    assert done.stderr.splitlines()[-2:] == [
        "moelab: serve: expected the packages of moelab[serve], uvicorn is missing: pip install "
        "'moelab[serve]'",
        "moelab: records need pandas, found no such package: pip install 'moelab[lab]'",
    ]


def test_what_data_has_is_said_to_be_in_the_repository(monkeypatch, tmp_path, run):
    for module in (shipped, moelab):
        monkeypatch.setattr(module, "DATA", tmp_path / "data")
    asks = [lambda: records.read("cpu_bench"), lambda: locality.recorded_trace("code"), claims.read]
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        asks.append(partial(exec, code, {}))
    for ask in asks:
        with pytest.raises(FileNotFoundError, match="^data/.* no data/. Clone its repository"):
            ask()
    assert not list(tmp_path.iterdir())
    got = run("check")
    assert got.code == 1 and "not measured, data/models/tiny-moe: not there, since an" in got.out
