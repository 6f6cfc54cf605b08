"""How the tests are run: ``make test`` says what failed, and nothing is left running."""

import subprocess
import time
from types import SimpleNamespace

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


@pytest.fixture
def run_parts(tmp_path, monkeypatch):
    """Runs some of ``PARTS``."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which would take seconds
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "PARTS", {part: [f"test_{part}.py"] for part in PARTS})
    for part, code in PARTS.items():
        (tmp_path / f"test_{part}.py").write_text(f"import os, time, pytest\n\n{code}\n")
    return parts.main


def test_each_part_is_counted_and_failures_come_last(run_parts, capsys):
    assert run_parts("good") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "good: begins" and said[-1] == "1 passed, 0 failed, 1 skipped"
    assert run_parts("good", "bad", "damaged", "killed") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "1 passed, 4 failed, 1 skipped"
    assert any(line.startswith("bad: 0 passed, 2 failed, 0 skipped in ") for line in said)
    last = said[next(i for i, line in enumerate(said) if line.startswith("in build/")) :]
    for line in (
        "in build/test-bad.log:",
        "FAILED test_bad.py::test_c - AssertionError: because",
        "ERROR test_bad.py::test_d",
        "ERROR test_damaged.py",
        "pytest ended with status -9: test_killed.py ",
    ):
        assert sum(found.startswith(line) for found in last) == 1, last
    with pytest.raises(SystemExit, match="expected parts of good, .*, got nothing"):
        run_parts("good", "nothing")


def test_an_interrupt_ends_the_parts(run_parts, capsys, monkeypatch):
    """After a line for each about how far it is."""
    slept, before = [], psutil.Process().children()

    def interrupt(_):
        if slept:
            raise KeyboardInterrupt
        slept.append(1)

    monkeypatch.setattr(parts, "SAY_S", -1)
    monkeypatch.setattr(parts, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        run_parts("long", "good")
    assert capsys.readouterr().out.splitlines()[2:] == ["long: 0%", "good: 0%"]
    assert psutil.Process().children() == before


@pytest.fixture(scope="module")
def left():
    """Processes that a test leaves."""
    processes = []
    yield processes
    alive = psutil.wait_procs(processes, 30)[1]
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_what_a_test_leaves_running_is_ended(left):
    """Also what a shell started. The fixture looks at it after the test."""
    shell = psutil.Process(subprocess.Popen(["sh", "-c", "sleep 600 & wait"]).pid)
    while not shell.children():
        time.sleep(0.01)
    left += [shell, *shell.children()]
