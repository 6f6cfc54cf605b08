"""The two ways to set up ask for the same things, and for no more than they say."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def requirement(text):
    """Returns ``(name, bounds, marker)`` of a requirement, spelled alike for pip and conda."""
    bare, _, marker = text.partition(";")
    name, bounds = re.fullmatch(r"\s*([\w.-]+(?:\[\w+\])?)\s*(.*?)\s*", bare).groups()
    return (
        name.lower().replace("_", "-"),
        frozenset(bounds.replace(" ", "").split(",")),
        marker.strip(),
    )


def test_conda_and_pip_ask_for_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert "moelab[lab]" in extras["test"]
    wanted = {*project["dependencies"], *extras["lab"], *extras["test"]} - {"moelab[lab]"}
    wanted = {requirement(r) for r in wanted}
    wanted.add(requirement("python" + project["requires-python"]))

    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = [entry["pip"] for entry in listed if isinstance(entry, dict)]
    assert pip[-1] == "-e ."
    asked = {
        requirement(r) for r in [r for r in listed if isinstance(r, str) and r != "pip"] + pip[:-1]
    }
    assert asked == wanted


def test_no_torch_comes_in():
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True
    )
    assert not re.search(r"^torch==", listed.stdout, re.M)
