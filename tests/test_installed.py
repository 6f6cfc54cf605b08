"""moelab where only the wheel is: no ``data/``, and no package of the extra ``lab``."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import moelab
from moelab import shipped
from moelab.__main__ import main
from moelab.lab import records
from moelab.replay import locality

LAB = (
    *("IPython", "anywidget", "ipywidgets", "jupyter_core", "jupyterlab"),
    *("nbconvert", "nbformat", "pandas", "plotly"),
)
COMMANDS = f"""
import sys
sys.modules |= dict.fromkeys({LAB})
from moelab.__main__ import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as stop:
        assert stop.code == 0, command
sys.exit(main(sys.argv[1:]))
"""


def run(folder, *argv):
    package = Path(moelab.__file__).parent
    shutil.copytree(package, folder / "moelab", dirs_exist_ok=True)  # links are files in a wheel
    return subprocess.run(
        [sys.executable, "-c", COMMANDS, *argv],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_commands_without_the_extra(model_path, tmp_path):
    done = run(tmp_path, "generate", str(model_path), "--prompt", "def f(x):", "--max-tokens", "2")
    assert done.returncode == 0 and "tok/s, 2 tokens" in done.stdout, done.stderr
    for model in (str(model_path), *(["gpt-oss-120b"] if not mx.cuda.is_available() else [])):
        done = run(tmp_path, "plan", model)  # a name is planned with what synthesize writes
        assert done.returncode == 0 and "tok/s; expect" in done.stdout, done.stderr
    done = run(tmp_path, "bench", str(model_path))
    assert done.returncode == 1 and done.stderr.endswith(
        "moelab: records need pandas, found no such package: pip install 'moelab[lab]'\n"
    ), done.stderr


def test_what_data_has_is_said_to_be_in_the_repository(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(shipped, "DATA", tmp_path / "data")
    for ask in (
        lambda: records.read("cpu_bench"),
        lambda: locality.recorded_trace("code"),
    ):
        with pytest.raises(FileNotFoundError, match="^data/.* no data/. Clone its repository"):
            ask()
    assert main(["bench-faults", "--json", str(tmp_path / "r.json")]) == 1
    assert capsys.readouterr().err.startswith("moelab: data/models/tiny-moe: not there")
    assert not list(tmp_path.iterdir())
