"""``make test`` says which tests failed, and no test leaves a process running."""

import subprocess
import time

import parts
import psutil
import pytest

PARTS = {
    "good": "def test_a(): pass\n\ndef test_b(): pytest.skip('why')",
    "bad": "def test_c(): assert 0, 'because'\n\ndef test_d(no_such_fixture): pass",
    "damaged": "import no_such_module",
    "killed": "def test_e(): os.kill(os.getpid(), 9)",
    "long": "def test_f(): time.sleep(600)",
}


def test_each_part_is_counted_and_failures_come_last(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parts, "SAY_S", 0.05)
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "PARTS", {part: [f"test_{part}.py"] for part in PARTS})
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take seconds
    for part, code in PARTS.items():
        (tmp_path / f"test_{part}.py").write_text(f"import os, time, pytest\n\n{code}\n")
    assert parts.main("good") == 0
    assert capsys.readouterr().out.endswith("\n1 passed, 0 failed, 1 skipped\n")
    assert parts.main(*[*PARTS][:4]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "1 passed, 4 failed, 1 skipped" and {"bad: begins", "bad: 0%"} <= {*said}
    assert any(line.startswith("bad: 0 passed, 2 failed, 0 skipped in ") for line in said)
    failed = said[said.index("in build/test-bad.log:") :]
    assert failed[1] == "FAILED test_bad.py::test_c - AssertionError: because"
    assert "ERROR test_damaged.py" in failed and "pytest ended with status -9" in failed[-2]
    with pytest.raises(SystemExit, match="expected parts of good, .*, got nothing"):
        parts.main("good", "nothing")

    def interrupt(text):
        if "%" in text:
            raise KeyboardInterrupt

    before = psutil.Process().children()
    monkeypatch.setattr(parts, "say", interrupt)
    with pytest.raises(KeyboardInterrupt):
        parts.main("long")
    assert psutil.Process().children() == before


@pytest.fixture(scope="module")
def left():
    """A list for processes that a test leaves running; none of them may be alive at the end."""
    processes = []
    yield processes
    alive = psutil.wait_procs(processes, 30)[1]
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_what_a_test_leaves_running_is_ended(left):
    """A shell and its child are ended; the fixture ``left`` checks that after the test."""
    shell = psutil.Process(subprocess.Popen(["sh", "-c", "sleep 600 & wait"]).pid)
    while not shell.children():
        time.sleep(0.01)
    left += [shell, *shell.children()]
