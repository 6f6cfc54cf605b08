"""python -m moelab.lab: each script is found, says its words, and gets them."""

import re
import subprocess
import sys

import pytest

from moelab.lab import cite
from moelab.lab.__main__ import SCRIPTS, main, parse


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_its_words(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert stop.value.code == 0 and f"python -m moelab.lab {name}" in usage
    assert len(re.findall(r"\b[A-Z]{2,}\b", usage)) >= 1


def test_words_arrive():
    assert parse(["cite", "a", "b"]) == (cite.main, ["a", "b"])
    assert parse(["cite"])[1] == [] and parse(["call", "m:f", "[]"])[1] == ["m:f", "[]"]


@pytest.mark.parametrize("words", [[], ["nonsense"], ["memory"], ["memory", "o", "more"]])
def test_words_that_cannot_be(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2 and "usage: python -m moelab.lab" in capsys.readouterr().err


def test_help_imports_no_script():
    code = (
        "import sys\n"
        "from moelab.lab.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('mlx.core' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "False\n" and all(name in done.stdout for name in SCRIPTS)


@pytest.mark.parametrize("missing", ["plotly", "ipywidgets", "anywidget", "nbconvert", "IPython"])
def test_a_missing_extra_is_one_clear_error(missing):
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "from moelab.lab.__main__ import main\n"
        "code = main(['pages', 'notebooks', 'build'])\n"
        "try: import moelab.lab.charts\n"
        "except ModuleNotFoundError as error: print(error)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = f"need {missing}, found no such package: pip install 'moelab[lab]'\n"
    assert done.returncode == 1 and done.stdout.endswith(said) and done.stderr.endswith(said)
    assert done.stderr.count("\n") == 1
