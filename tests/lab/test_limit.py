"""A memory limit that is real, the ways to get one, and the bench under it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import moelab
from moelab.lab import limit, machine

REAL = ("cgroup", "systemd-run")
MB = 1 << 20


def run(code, nbytes, ways=REAL):
    try:
        return limit.run([sys.executable, "-c", code], nbytes, ways)
    except limit.NoLimit as e:
        pytest.skip(str(e))


def groups():
    return {
        name
        for _, names, _ in os.walk(limit.CGROUPS)
        for name in names
        if name.startswith("moelab-")
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
    before = groups()
    with pytest.raises(subprocess.TimeoutExpired):
        try:
            limit.run(
                [sys.executable, "-c", "import time; time.sleep(600)"], 200 * MB, REAL, timeout_s=3
            )
        except limit.NoLimit as e:
            pytest.skip(str(e))
    assert groups() <= before


def test_killed_in_the_middle_it_leaves_no_process_and_the_next_run_removes_its_cgroup(tmp_path):
    run("", 100 * MB, ["cgroup"])  # skips where there is none
    note = tmp_path / "pid"
    command = [
        sys.executable,
        "-c",
        f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)",
    ]
    before = groups()
    victim = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from moelab.lab import limit; limit.run({command!r}, {200 * MB}, ['cgroup'])",
        ]
    )
    try:
        while not (note.exists() and note.read_text()):
            assert victim.poll() is None
            time.sleep(0.1)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    assert gone(int(note.read_text()))
    stale = {name for name in groups() - before if f"moelab-{victim.pid}-" in name}
    assert stale
    limit._remove_stale.cache_clear()
    assert not run("", 100 * MB, ["cgroup"]).killed
    assert not stale & groups()


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
    limit._no_systemd.cache_clear()
    try:
        why = limit._no_systemd()
        if not why:  # cgroup v1: nothing to check
            done = limit.run([sys.executable, "-c", "print(7)"], 50 * MB, ["systemd-run"])
            assert (done.stdout.strip(), done.how) == ("7", "systemd-run --user")
        else:
            assert "delegated" in why
            with pytest.raises(limit.NoLimit, match="delegated"):
                limit.run(["true"], 50 * MB, ["systemd-run"])
    finally:
        limit._no_systemd.cache_clear()


def test_ballast_holds_memory_and_lets_go_when_its_owner_is_killed():
    def held(pid):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            pytest.skip("no /proc")
        return next(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS")
        )

    code = (
        "from moelab.lab.ballast import Ballast; import time; b = Ballast(100 << 20); "
        "print(b._process.pid, b.held_nbytes, b.how, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = owner.stdout.readline()
    if not line and "Refused" in (error := owner.stderr.read()):
        pytest.skip(error.strip().splitlines()[-1])
    pid, nbytes, how = line.split()
    assert int(nbytes) == 100 * MB and how in ("locked", "touched")
    assert held(pid) >= 100 * MB
    owner.kill()
    owner.communicate()
    assert gone(pid)


def test_ballast_is_refused_beyond_what_is_allowed_and_limits_where_it_is(monkeypatch):
    with pytest.raises(limit.NoLimit, match="MOELAB_BALLAST_MB="):
        monkeypatch.setenv("MOELAB_BALLAST_MB", "0")
        limit.run(["true"], 1 * MB, ["ballast"])
    monkeypatch.setenv("MOELAB_BALLAST_MB", "400")
    leave = machine.memory_available() - 60 * MB
    try:
        done = limit.run([sys.executable, "-c", "print(1)"], leave, ["ballast"])
    except limit.NoLimit as e:
        if "MOELAB_BALLAST_MB" in str(e):
            raise
        pytest.skip(str(e))
    assert done.how.startswith("ballast") and done.stdout.strip() == "1" and not done.over


def test_ballast_evicts_the_page_cache_and_goes_first_when_memory_runs_out(tmp_path):
    # A small machine: a cgroup in which ballast is all there is to limit with.
    file = tmp_path / "file"
    with open(file, "wb") as f:
        f.write(os.urandom(MB) * 160)
        os.fsync(f)  # dirty pages cannot be dropped
    code = f"""
import os, sys
from moelab.lab import limit, machine
machine.drop_pages({str(file)!r})
read = "import os; f = os.open({str(file)!r}, 0); [os.pread(f, 1 << 20, i << 20) for _ in 'ab' for i in range(160)]; print(open('/proc/self/io').read())"
def disk(done):
    return next(int(l.split()[1]) for l in done.stdout.splitlines() if l.startswith("read_bytes"))
free = disk(limit.run([sys.executable, "-c", read]))
machine.drop_pages({str(file)!r})
tight = limit.run([sys.executable, "-c", read], 90 << 20, ["ballast"])
over = limit.run([sys.executable, "-c", "import time; x = b'1' * (300 << 20); time.sleep(1); print('still here')"], 60 << 20, ["ballast"])
print(free >> 20, disk(tight) >> 20, over.over, over.stdout.strip(), sep="|")
"""
    done = run(code, 700 * MB, ["cgroup"])
    assert not done.killed, done.stderr
    if "NoLimit" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    free, tight, over, text = done.stdout.strip().split("|")
    assert 150 <= int(free) <= 230, "read twice with room for it: from disk once"
    assert int(tight) >= 260, "read twice without room: from disk twice"
    assert (over, text) == ("True", "still here")


def test_no_way_at_all_says_why_not_each(monkeypatch):
    monkeypatch.setattr(limit, "OWN_CGROUPS", Path("/nowhere"))
    monkeypatch.setenv("MOELAB_BALLAST_MB", "0")
    monkeypatch.setattr(limit, "_no_systemd", lambda: "no bus")
    with pytest.raises(limit.NoLimit) as e:
        limit.run(["true"], 1 * MB)
    assert all(why in str(e.value) for why in ("no cgroups", "no bus", "MOELAB_BALLAST_MB"))


def test_bench_under_a_limit():
    path = moelab.DATA / "models" / "tiny-moe"
    try:
        record = limit.bench_limited(
            path, {"fused": moelab.StreamConfig()}, 2_000_000_000, tokens=4, warmup=2, runs=1
        )
    except limit.NoLimit as e:
        pytest.skip(str(e))
    assert [s["variant"] for s in record["samples"]] == ["resident, no limit", "fused, limit"]
    assert record["summary"]["fused, limit"]["same_tokens"]
    assert record["summary"]["fused, limit"]["bytes_per_token"] > 0
    assert "tokens same" in limit.report(record)
