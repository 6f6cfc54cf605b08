"""A memory limit that is real, the strategies to get one, and the bench under it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moelab import DATA, StreamConfig
from moelab.lab import limit, records, variants
from moelab.lab.experiments import bench

MB = 1 << 20


def test_a_command_that_takes_too_long_leaves_no_group(limits):
    with pytest.raises(subprocess.TimeoutExpired):
        limit.run(["sleep", "600"], 200 * MB, timeout_s=0.5)
    made = (d for _, dirs, _ in os.walk(limit.CGROUPS) for d in dirs)
    assert not [d for d in made if d.startswith(f"moelab-{os.getpid()}-")]


@pytest.mark.skipif(limit.PRCTL is None, reason="only Linux ends it")
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


def test_strategies_of_other_systems(tmp_path, monkeypatch):
    """Version 2 of cgroups and systemd: files behave as there, only nothing is limited."""
    own = tmp_path / "user.slice" / "a.service"
    own.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/user.slice/a.service\n")
    monkeypatch.setattr(limit, "CGROUPS", tmp_path)
    monkeypatch.setattr(limit, "OWN_CGROUPS", tmp_path / "own")
    tool = tmp_path / "systemd-run"
    monkeypatch.setattr(limit, "SYSTEMD_RUN", (str(tool),))
    monkeypatch.setattr(limit, "_remove", lambda group: None)
    with pytest.raises(limit.NoLimit, match="cgroup: no group .* systemd-run: .* takes Linux"):
        limit.run(["true"], 50 * MB)
    tool.write_text('#!/bin/sh\nwhile [ "$1" = -p ]; do shift 2; done\nexec "$@"\n')
    tool.chmod(0o755)
    with pytest.raises(limit.NoLimit, match="the user's session may not limit memory"):
        limit.run(["true"], 50 * MB)
    (own / "memory.max").write_text(str(50 * MB))
    done = limit.run(["echo", "7"], 50 * MB)
    assert (done.stdout.strip(), done.how) == ("7", "systemd-run --user")
    for folder in (tmp_path, tmp_path / "user.slice"):  # the nearest is taken
        (folder / "cgroup.subtree_control").write_text("cpu memory")
    with limit.limited(123 * MB) as prepared:
        assert (prepared.how, prepared.group.parent) == ("cgroup v2", tmp_path / "user.slice")
        assert (prepared.group / "memory.max").read_text() == str(123 * MB)
        assert (prepared.group / "cgroup.procs").read_text()


def test_call_says_in_a_line_what_went_wrong():
    with pytest.raises(OSError, match="^the test: invalid literal for int.*'x'$"):
        limit.call(int, "x", what="the test")


@pytest.mark.parametrize(
    "lowered_to, takes, killed",
    [(None, "600 << 20", True), ("200 << 20", "250 << 20", True), ("250 << 20", "9", False)],
)
def test_call_is_killed_beyond_its_limit_or_one_lowered_from_inside(
    limits, lowered_to, takes, killed
):
    code = f"from moelab.lab import limit; limit.lower({lowered_to})\n" if lowered_to else ""
    _, done = limit.call(exec, f"{code}b'1' * ({takes})", what="the test", nbytes=300 * MB)
    assert done.killed == killed and done.how != "none"


def test_bench_under_a_limit_says_what_was_killed(limits):
    limited = bench.crossed({"fused": StreamConfig(slots=16)}, [50_000_000, 2_000_000_000])
    made = bench.measure(
        DATA / "models/tiny-moe", limited, tokens=4, warmup=2, prompts=["def main():"], runs=1
    )
    enough = made[made.variant == "fused, 2000 MB"]
    assert (enough.limited_by != "none").all() and (enough.slots == 16).all() and len(enough) == 1
    assert records.same_tokens(made, variants.RESIDENT)["fused, 2000 MB"] == (1, 1)
    assert made.variant[made.killed].tolist() == ["fused, 50 MB"]
    assert "killed for its memory" in bench.report(made)
