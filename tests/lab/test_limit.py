"""A memory limit that is real, the strategies to get one, and the bench under it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import moelab
from moelab.lab import limit, records, variants
from moelab.lab.experiments import bench

REAL = ("cgroup", "systemd-run")
MB = 1 << 20


def run(code, nbytes, strategies=REAL):
    try:
        return limit.run([sys.executable, "-c", code], nbytes, strategies)
    except limit.NoLimit as e:
        pytest.skip(str(e))


def groups(pid):
    """The cgroups that a process made. Other tests, at the same time, make others."""
    return {
        name
        for _, names, _ in os.walk(limit.CGROUPS)
        for name in names
        if name.startswith(f"moelab-{pid}-")
    }


def gone(pid):
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_process_over_its_limit_is_killed_and_one_under_it_is_not():
    big = run("x = b'1' * (400 << 20)", 100 * MB)
    assert big.killed and big.how != "none"
    small = run("x = b'1' * (10 << 20); print(len(x))", 200 * MB)
    assert not small.killed and small.stdout.strip() == str(10 * MB)
    free = limit.run([sys.executable, "-c", "print('no limit')"])
    assert (free.returncode, free.how) == (0, "none")


def test_a_command_that_takes_too_long_is_killed_and_leaves_nothing():
    before = groups(os.getpid())
    with pytest.raises(subprocess.TimeoutExpired):
        try:
            limit.run(
                [sys.executable, "-c", "import time; time.sleep(600)"], 200 * MB, REAL, timeout_s=3
            )
        except limit.NoLimit as e:
            pytest.skip(str(e))
    assert groups(os.getpid()) <= before


def test_killed_in_the_middle_it_leaves_no_process(tmp_path):
    note = tmp_path / "pid"
    rest = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"from moelab.lab import limit; limit.run([{sys.executable!r}, '-c', {rest!r}])"
    victim = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not (note.exists() and note.read_text()):
            assert victim.poll() is None
            time.sleep(0.1)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    assert gone(int(note.read_text()))


def test_version_2_goes_to_the_nearest_group_that_hands_the_controller_on(tmp_path, monkeypatch):
    # A picture of /sys/fs/cgroup: mkdir and files behave as there, only nothing is limited.
    slice_, service = tmp_path / "user.slice", tmp_path / "user.slice" / "a.service"
    service.mkdir(parents=True)
    for folder, handed_on in ((tmp_path, "cpu memory"), (slice_, "cpu memory"), (service, "")):
        (folder / "cgroup.subtree_control").write_text(handed_on)
    own = tmp_path / "own"
    own.write_text("0::/user.slice/a.service\n")
    monkeypatch.setattr(limit, "CGROUPS", tmp_path)
    monkeypatch.setattr(limit, "OWN_CGROUPS", own)
    removed = []
    monkeypatch.setattr(limit, "_remove", removed.append)
    done = limit.run([sys.executable, "-c", ""], 123 * MB, ["cgroup"])
    (group,) = removed
    assert (done.returncode, done.how, group.parent) == (0, "cgroup v2", slice_)
    assert (group / "memory.max").read_text() == str(123 * MB) and (
        group / "cgroup.procs"
    ).read_text()
    (slice_ / "cgroup.subtree_control").write_text("cpu")
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    with pytest.raises(limit.NoLimit, match="memory controller"):
        limit.run(["true"], 123 * MB, ["cgroup"])


def test_systemd_gets_the_limit_and_a_session_that_cannot_limit_is_found_out(tmp_path, monkeypatch):
    tool = tmp_path / "systemd-run"  # no session bus here: a stand-in that runs the command
    tool.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do [ "$1" = -p ] && shift; shift; done\nexec "$@"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(limit, "CGROUPS", tmp_path)
    monkeypatch.setattr(limit, "OWN_CGROUPS", own := tmp_path / "own")
    own.write_text("0::/a scope\n")
    with pytest.raises(limit.NoLimit, match="the user's session may not limit memory"):
        limit.run(["true"], 50 * MB, ["systemd-run"])
    (tmp_path / "a scope").mkdir()
    (tmp_path / "a scope" / "memory.max").write_text("52428800")
    done = limit.run([sys.executable, "-c", "print(7)"], 50 * MB, ["systemd-run"])
    assert (done.stdout.strip(), done.how) == ("7", "systemd-run --user")


@pytest.mark.parametrize("broken", ["no cgroups", "cgroup.procs"])
def test_no_strategy_at_all_says_why_not_each(broken, tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError("not allowed")

    monkeypatch.setattr(limit, "SYSTEMD_RUN", (str(tmp_path / "no-tool"),))
    monkeypatch.setattr(limit, "OWN_CGROUPS", own := tmp_path / "own")
    monkeypatch.setattr(limit, "CGROUPS", tmp_path)
    if broken != "no cgroups":  # a group may be made, but has none of the kernel's files
        own.write_text("0::/a\n")
        (tmp_path / "a" / "cgroup.procs").parent.mkdir()
        (tmp_path / "a" / "cgroup.subtree_control").write_text("memory")
        monkeypatch.setattr(limit.Prepared, "before_exec", refuse)
        monkeypatch.setattr(limit, "_remove", lambda group: None)
    with pytest.raises(limit.NoLimit) as e:
        limit.run(["true"], 1 * MB)
    text = str(e.value)
    assert "cgroup: " in text and "systemd-run: " in text and "It takes Linux" in text
    assert ("this system has no cgroups" if broken == "no cgroups" else "no group may be") in text


# A function in a limited process


def double(x, settings):
    return {"x": 2 * x, "slots": settings["slots"], "pid": os.getpid()}


def fail(words):
    raise ValueError(words)


def hold(nbytes):
    return len(b"1" * nbytes)


def hold_lowered(nbytes, to):
    limit.lower(to)
    return hold(nbytes)


def rest(seconds):
    time.sleep(seconds)


@pytest.fixture
def called(monkeypatch):
    """``limit.call`` of a function of this file, which the new process must find."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, sys.path)]))

    def call(function, *args, **kwargs):
        monkeypatch.setattr(function, "__module__", "test_limit")
        return limit.call(function, *args, what="the test", **kwargs)

    return call


def test_call_brings_what_a_function_returns(called):
    result, done = called(double, 21, moelab.StreamConfig(slots=9))
    assert (result["x"], result["slots"], done.how) == (42, 9, "none")
    assert result["pid"] != os.getpid()


def test_call_says_in_a_line_what_went_wrong(called):
    with pytest.raises(OSError, match="^the test: 3 is too many$"):
        called(fail, "3 is too many")
    with pytest.raises(OSError, match="took more than 0.5 s"):
        called(rest, 60, timeout_s=0.5)


def test_call_is_killed_beyond_its_limit(called):
    try:
        result, done = called(hold, 600 * MB, nbytes=300 * MB)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    assert done.killed and result is None
    result, done = called(hold, 1 * MB, nbytes=600 * MB)
    assert result == MB and not done.killed


def test_a_limit_lowered_from_inside_kills(called):
    try:
        result, done = called(hold_lowered, 400 * MB, 200 * MB, nbytes=900 * MB)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    assert done.killed and result is None
    assert called(hold_lowered, 1 * MB, 600 * MB, nbytes=900 * MB)[0] == MB


TINY_MOE = moelab.DATA / "models" / "tiny-moe"
AMOUNT = {"tokens": 4, "warmup": 2, "runs": 1, "prompts": ["def main():"]}


def under(nbytes):
    """``fused`` with 16 slots and so much memory, beside the resident model."""
    return bench.crossed({"fused": moelab.StreamConfig(slots=16)}, [nbytes])


def call_here(function, path, variant, *rest, what, nbytes):
    return function(path, asdict(variant), *rest), limit.Limited(0, "", "", "none")


def test_bench_under_a_limit():
    try:
        made = bench.measure(TINY_MOE, under(2_000_000_000), **AMOUNT)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    name = "fused, 2000 MB"
    assert {*made.variant} == {variants.RESIDENT, name} and not made.killed.any()
    assert records.same_tokens(made, variants.RESIDENT)[name] == (1, 1)
    (fused,) = made[made.variant == name].to_dict("records")
    assert fused["bytes_read"] > 0 and fused["limited_by"] != "none" and fused["slots"] == 16


def test_what_was_killed_is_not_run_again(monkeypatch):
    def call(function, *rest, what, nbytes):
        killed = limit.Limited(-signal.SIGKILL, "", "", "cgroup")
        return (None, killed) if nbytes else call_here(function, *rest, what=what, nbytes=nbytes)

    monkeypatch.setattr(limit, "call", call)
    made = bench.measure(TINY_MOE, under(1), **AMOUNT | {"runs": 2})
    assert records.group(made, "tok_s").n.to_dict() == {variants.RESIDENT: 2}
    assert list(made.killed) == [name != variants.RESIDENT for name in made.variant]
    assert made.killed.sum() == 1 and "killed for its memory" in bench.report(made)
    again = records.table(json.loads(json.dumps(records.as_json(made), default=records._plain)))
    assert list(again.killed) == list(made.killed) and again.attrs == made.attrs


def test_a_trace_that_is_too_short_is_refused():
    trace = moelab.DATA / "traces" / "code.npz"
    with pytest.raises(ValueError, match="513 tokens behind it .* got 128 and 512"):
        bench.measure(TINY_MOE, under(2e9), tokens=500, runs=1, warmup=13, feed=trace)


def test_a_trace_of_another_vocabulary_is_refused(monkeypatch):
    small = SimpleNamespace(config={"vocab_size": 90})
    monkeypatch.setattr(variants, "Checkpoint", lambda path: small)
    with pytest.raises(ValueError, match="expected tokens below 90, the vocabulary of M, got"):
        variants.texts_of(moelab.DATA / "traces" / "code.npz", 5, "M")
