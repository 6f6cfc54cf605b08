"""python -m moelab.lab: each script is found and says its words."""

import pytest

from moelab.lab.__main__ import SCRIPTS, main


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_its_words(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0 and f"python -m moelab.lab {name}" in capsys.readouterr().out
