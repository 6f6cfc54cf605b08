"""A memory limit that is real, the strategies to get one, and the bench under it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import moelab
from moelab.lab import limit, records, variants
from moelab.lab.experiments import bench

MB = 1 << 20
TINY_MOE, CODE = moelab.DATA / "models" / "tiny-moe", moelab.DATA / "traces" / "code.npz"


@pytest.fixture
def limits():
    """Skips where memory cannot be limited."""
    try:
        limit.run(["true"], 100 * MB)
    except limit.NoLimit as e:
        pytest.skip(str(e))


def python(code, *args, **kwargs):
    return limit.run([sys.executable, "-c", code], *args, **kwargs)


def test_a_process_over_its_limit_is_killed_and_one_under_it_is_not(limits):
    big = python("x = b'1' * (400 << 20)", 100 * MB)
    assert big.killed and big.how != "none"
    small = python("x = b'1' * (10 << 20); print(len(x))", 200 * MB)
    assert not small.killed and small.stdout.strip() == str(10 * MB)
    assert python("print('no limit')").how == "none"


def test_a_command_that_takes_too_long_leaves_no_group(limits):
    with pytest.raises(subprocess.TimeoutExpired):
        python("import time; time.sleep(600)", 200 * MB, timeout_s=1)
    made = (d for _, dirs, _ in os.walk(limit.CGROUPS) for d in dirs)
    assert not [d for d in made if d.startswith(f"moelab-{os.getpid()}-")]


def test_killed_in_the_middle_it_leaves_no_process(tmp_path):
    note = tmp_path / "pid"
    rest = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"from moelab.lab import limit; limit.run([{sys.executable!r}, '-c', {rest!r}])"
    victim = subprocess.Popen([sys.executable, "-c", code])
    while not (note.exists() and note.read_text()):
        assert victim.poll() is None
        time.sleep(0.1)
    victim.kill()
    victim.wait()
    stat, end = Path(f"/proc/{note.read_text()}/stat"), time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A picture of /sys/fs/cgroup, version 2: files behave as there, only nothing is limited."""
    (tmp_path / "own").write_text("0::/user.slice/a.service\n")
    (tmp_path / "user.slice" / "a.service").mkdir(parents=True)
    monkeypatch.setattr(limit, "CGROUPS", tmp_path)
    monkeypatch.setattr(limit, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(limit, "SYSTEMD_RUN", (str(tmp_path / "systemd-run"),))
    monkeypatch.setattr(limit, "_remove", lambda group: None)
    return tmp_path


def test_version_2_goes_to_the_nearest_group_that_hands_the_controller_on(system, monkeypatch):
    with pytest.raises(limit.NoLimit, match="cgroup: no group .* systemd-run: .* takes Linux"):
        limit.run(["true"], 123 * MB)
    for folder in (system, system / "user.slice"):
        (folder / "cgroup.subtree_control").write_text("cpu memory")
    with limit.limited(123 * MB) as prepared:
        assert (prepared.how, prepared.group.parent) == ("cgroup v2", system / "user.slice")
        assert (prepared.group / "memory.max").read_text() == str(123 * MB)
        assert (prepared.group / "cgroup.procs").read_text()
    monkeypatch.setattr(limit, "FILES", {limit.V2: ("no-such-folder/memory.max", "")})
    with pytest.raises(limit.NoLimit, match="no group may be made in .*user.slice"):
        limit.run(["true"], 123 * MB)
    (system / "own").unlink()
    with pytest.raises(limit.NoLimit, match="this system has no cgroups"):
        limit.run(["true"], 123 * MB)


def test_systemd_gets_the_limit_and_a_session_that_cannot_limit_is_found_out(system):
    tool = system / "systemd-run"  # no session bus here: a stand-in that runs the command
    tool.write_text('#!/bin/sh\nwhile [ "$1" = -p ]; do shift 2; done\nexec "$@"\n')
    tool.chmod(0o755)
    with pytest.raises(limit.NoLimit, match="the user's session may not limit memory"):
        limit.run(["true"], 50 * MB)
    (system / "user.slice" / "a.service" / "memory.max").write_text("52428800")
    done = python("print(7)", 50 * MB)
    assert (done.stdout.strip(), done.how) == ("7", "systemd-run --user")


def hold(nbytes, lowered_to=None, config=None):
    """Take memory in a process of its own, which may lower its limit first."""
    if config and config["slots"] != 9:
        raise ValueError("expected 9 slots")
    if lowered_to:
        limit.lower(lowered_to)
    return len(b"1" * nbytes)


@pytest.fixture
def call(monkeypatch):
    """``limit.call`` of ``hold``, which the new process must find."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, sys.path)]))
    monkeypatch.setattr(hold, "__module__", "test_limit")
    return lambda *args, **kwargs: limit.call(hold, *args, what="the test", **kwargs)


def test_call_brings_what_a_function_returns_and_says_in_a_line_what_went_wrong(call):
    result, done = call(1, None, moelab.StreamConfig(slots=9))
    assert (result, done.how) == (1, "none")
    with pytest.raises(OSError, match="^the test: expected 9 slots$"):
        call(1, None, moelab.StreamConfig(slots=8))
    with pytest.raises(OSError, match=r"took more than 0.1 s"):
        call(1, timeout_s=0.1)


@pytest.mark.parametrize("lowered_to", [None, 200 * MB])
def test_call_is_killed_beyond_its_limit_or_one_lowered_from_inside(call, limits, lowered_to):
    result, done = call(600 * MB, lowered_to, nbytes=900 * MB if lowered_to else 300 * MB)
    assert done.killed and result is None
    assert call(1 * MB, 600 * MB, nbytes=900 * MB)[0] == MB


def test_bench_under_a_limit_does_not_run_again_what_was_killed(limits):
    limited = bench.crossed({"fused": moelab.StreamConfig(slots=16)}, [50_000_000, 2_000_000_000])
    made = bench.measure(TINY_MOE, limited, tokens=4, warmup=2, prompts=["def main():"], runs=2)
    enough = made[made.variant == "fused, 2000 MB"]
    assert (enough.limited_by != "none").all() and (enough.slots == 16).all() and len(enough) == 2
    assert records.same_tokens(made, variants.RESIDENT)["fused, 2000 MB"] == (2, 2)
    assert made.variant[made.killed].tolist() == ["fused, 50 MB"]
    assert "killed for its memory" in bench.report(made)


def test_a_trace_that_is_too_short_or_of_another_vocabulary_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="513 tokens behind it .* got 128 and 512"):
        bench.measure(TINY_MOE, {}, tokens=500, runs=1, warmup=13, feed=CODE)
    monkeypatch.setattr(variants, "Checkpoint", lambda _: SimpleNamespace(config={"vocab_size": 9}))
    with pytest.raises(ValueError, match="expected tokens below 9, the vocabulary of M, got"):
        variants.texts_of(CODE, 5, "M")
