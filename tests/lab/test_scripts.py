"""python -m moelab.lab: each script is found, says its words, and gets them."""

import subprocess
import sys

import pytest

from moelab.lab.__main__ import SCRIPTS, main, parse


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_its_words(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert stop.value.code == 0 and f"python -m moelab.lab {name}" in usage


def test_words_arrive(capsys):
    assert parse(["call", "m:f", "[]"])[1] == ["m:f", "[]"]
    for words in ([], ["nonsense"], ["passes"], ["timeline", "o", "more"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2 and "usage: python -m moelab.lab" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["plotly", "IPython"])
def test_a_missing_extra_is_one_clear_error(missing):
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "from moelab.lab.__main__ import main\n"
        "sys.exit(main(['pages', 'notebooks', 'build']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = f"need {missing}, found no such package: pip install 'moelab[lab]'\n"
    assert done.returncode == 1 and done.stderr.endswith(said) and done.stderr.count("\n") == 1
