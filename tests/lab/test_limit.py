"""What ``check`` finds on this machine, what the page cache holds, and limits of memory."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from common import cached_nbytes

from moelab import DATA, StreamConfig, kernels, plan
from moelab.checkpoint import read_json
from moelab.lab import check, limit, machine, records, variants
from moelab.lab.experiments import bench
from moelab.memory import FREED_NBYTES
from moelab.system import on_metal

FREED = FREED_NBYTES * on_metal()  # what a plan takes off the memory

MB = 1 << 20
TINY = DATA / "models/tiny-moe"


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
    """Files stand in for cgroups of version 2 and for systemd, and limit nothing."""
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
    for folder in (tmp_path, tmp_path / "user.slice"):  # the nearest folder is taken
        (folder / "cgroup.subtree_control").write_text("cpu memory")
    with limit.limited(123 * MB) as prepared:
        assert (prepared.how, prepared.group.parent) == ("cgroup v2", tmp_path / "user.slice")
        assert (prepared.group / "memory.max").read_text() == str(123 * MB)
        assert (prepared.group / "cgroup.procs").read_text()


def test_call_says_in_a_line_what_went_wrong():
    with pytest.raises(OSError, match="^the test: invalid literal for int.*'x'$"):
        limit.call(int, "x", what="the test")


def test_bench_under_a_limit_says_what_was_killed(limits):
    limited = bench.crossed({"fused": StreamConfig(slots=16)}, [50_000_000, 2_000_000_000])
    made = bench.measure(TINY, limited, tokens=4, warmup=2, prompts=["def main():"], runs=1)
    enough = made[made.variant == "fused, 2000 MB"]
    assert (enough.limited_by != "none").all() and (enough.slots == 16).all() and len(enough) == 1
    assert records.same_tokens(made, variants.RESIDENT)["fused, 2000 MB"] == (1, 1)
    assert made.variant[made.killed].tolist() == ["fused, 50 MB"]
    assert "killed for its memory" in bench.report(made)


def test_check_says_what_to_do_and_plans_a_model(monkeypatch, capsys):
    """``check`` says how many slots commands take and why, and names repack. Or it says why not."""
    want = plan(TINY, StreamConfig(lazy_logits=True))
    check.check(TINY)
    *lines, blocks, chosen = capsys.readouterr().out.splitlines()
    assert len(lines) >= 4 and all(line.startswith(("[ok] ", "[fail] ")) for line in lines)
    assert ("blocks computed as a whole: 8 DecoderLayer, 8 " in blocks) == kernels.available()
    assert chosen.startswith("[ok] tiny-moe, ") and want.reason.partition(". ")[0] in chosen
    monkeypatch.setattr("moelab.streaming.plan._memory", lambda: (16 * 10**7 + FREED, 0))
    check.check(TINY)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("[ok] tiny-moe: a repacked copy (python -m moelab repack) takes one ")
    monkeypatch.setattr("moelab.streaming.plan._memory", lambda: (10**8 + FREED, 5 * 10**7))
    assert not check.check(TINY)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("[fail] ") and "got 100 MB" in last and "Close other programs" in last


@pytest.mark.parametrize("memory", (10**9, 16 * 10**7))
def test_the_file_to_send_says_how_a_model_decodes(memory, monkeypatch, capsys, tmp_path):
    """The file compares streaming with mode resident, or all slots that fit with half of them."""
    monkeypatch.setattr("moelab.streaming.plan._memory", lambda: (memory + FREED, 0))
    for name, few in {"PROMPT": 40, "TOKENS": 4, "WARMUP": 2}.items():
        monkeypatch.setattr(check, name, few)
    S, ways = plan(TINY, StreamConfig(lazy_logits=True)).slots, ["fused/slots=32", "resident"]
    if memory < 10**9:
        assert 16 < S < 64
        ways = [f"fused/slots={S}", f"stacked/slots={S // 2}"]
    good = check.check(TINY, file := tmp_path / "machine.json")
    *_, decoded, link = capsys.readouterr().out.splitlines()
    sent, table = read_json(file), records.read(str(file), disturbed=True)
    assert sent["machine"] == check.card() and good == all(f["ok"] for f in sent["findings"])
    assert {"read_gb_per_s", "dispatch_s", "slots", "K"} < {*sent["settings"]}
    assert sent["findings"][-1]["what"] in decoded and str(file) in link and check.FORM in link
    assert all(f"{way} " in decoded for way in ways) and "; 10 of 10 texts are the same" in decoded
    prompts = table[table.prompt_tokens == check.PROMPT].set_index("variant")
    assert [*prompts.index] == ways and (prompts.prefill_s > 0).all() and {*table} > {"pressure"}
    assert prompts.bits.iloc[0] == prompts.bits.iloc[1] and len(prompts.bits.iloc[0]) == 17
    texts = table[table.text.notna()]
    assert (texts.groupby("variant").tok_s.count() == check.TEXTS).all() and (texts.tok_s > 0).all()
    assert records.same_tokens(texts.assign(round=texts.text), ways[1])[ways[0]] == (10, 10)


@pytest.mark.parametrize("fastest", (5e7, 5e8))
def test_a_busy_machine_is_no_slow_disk(fastest, monkeypatch):
    """A cold read that is too slow is repeated, and the finding names the machine's load."""
    speeds = iter([5e7] * 7 + [fastest])
    monkeypatch.setattr(check, "read_speed", lambda *_: next(speeds))
    monkeypatch.setattr(os, "getloadavg", lambda: (9.5, 1, 1))
    good, what, remedy = check._ssd(TINY, TINY, {})
    assert good == (fastest > 5e7) and f"{fastest / 1e9:.2f} (" in what
    assert "a load of 9.5 on this machine's" in remedy and "put the model on an SSD" in remedy


@pytest.mark.parametrize("device", ("cpu", "gpu"))
def test_a_gpu_that_idled_is_not_busy(device, monkeypatch):
    card = check.card() | {"device": device}
    monkeypatch.setattr(check, "card", lambda: card)
    monkeypatch.setattr(check, "dispatch_cost", lambda: (1e-5, 2e-3))
    found = {what.partition(":")[0]: good for good, what, _ in check.findings(TINY)}
    assert found["dispatch"] == (device == "gpu")


def test_dropped_pages_are_read_again(tmp_path):
    (tmp_path / "empty").touch()
    assert cached_nbytes(tmp_path / "empty") is None
    for name in ("a.safetensors", "b.safetensors", "c.txt"):
        with (tmp_path / name).open("wb") as file:
            file.write(os.urandom(2 * MB))
            os.fsync(file.fileno())
    if cached_nbytes(tmp_path) is None:
        pytest.skip("this system does not say what is cached")
    assert cached_nbytes(tmp_path) == 4 * MB
    how = machine.drop_pages(tmp_path)
    left = cached_nbytes(tmp_path)
    if left == 4 * MB:
        pytest.skip(f"pages cannot be dropped here ({how})")
    before = machine.disk_read_nbytes()
    for file in tmp_path.glob("*.safetensors"):
        file.read_bytes()
    assert cached_nbytes(tmp_path) == 4 * MB
    if before is not None:
        assert machine.disk_read_nbytes() - before >= 4 * MB - left
    assert cached_nbytes(tmp_path / "c.txt") == 2 * MB  # its pages were not dropped
