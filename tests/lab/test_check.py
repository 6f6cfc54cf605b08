"""This machine: what ``check`` finds, and what the page cache holds."""

import os

import numpy as np
import pytest
from page_cache import cached_nbytes

from moelab import DATA, StreamConfig, kernels, plan
from moelab.checkpoint import read_json
from moelab.lab import check, oscache
from moelab.repack import Gain

MB = 1 << 20
TINY = DATA / "models/tiny-moe"


def test_check_says_what_to_do_and_plans_a_model(monkeypatch, capsys, tmp_path):
    """The slots that the commands take, with the reason, and what repack gains; or why none fit."""
    want = plan(TINY, StreamConfig(lazy_logits=True))
    good = check.check(TINY, tmp_path / "machine.json")
    *lines, blocks, chosen, last = capsys.readouterr().out.splitlines()
    sent = read_json(tmp_path / "machine.json")
    assert sent["machine"] == check.card() and good == all(row["ok"] for row in sent["rows"])
    assert all(row["what"] in s for row, s in zip(sent["rows"], [*lines, blocks, chosen, last]))
    assert len(lines) >= 5 and all(line.startswith(("[ok] ", "[fail] ")) for line in lines)
    assert ("blocks in one piece: 8 DecoderLayer, 8 " in blocks) == kernels.available()
    assert chosen.startswith("[ok] tiny-moe, ") and want.reason.partition(". ")[0] in chosen
    monkeypatch.setattr("moelab.streaming.plan._memory", lambda: (16 * 10**7, 0))
    for packed, so in ((3e9, f"`python -m moelab repack {TINY} OUT`"), (2e9, "would hardly gain")):
        gain = Gain(9, np.array([[2e9, packed]]))  # measured where experts are in no slot
        monkeypatch.setattr(check, "cold_gain", lambda facts, direct, gain=gain: gain)
        check.check(TINY)
        *_, last = capsys.readouterr().out.splitlines()
        assert last.startswith(f"[ok] tiny-moe: {gain}: ") and so in last
    monkeypatch.setattr("moelab.streaming.plan._memory", lambda: (10**8, 5 * 10**7))
    assert not check.check(TINY)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("[fail] ") and "got 100 MB" in last and "Close other programs" in last


@pytest.mark.parametrize("fastest", (5e7, 5e8))
def test_a_busy_machine_is_no_slow_disk(fastest, monkeypatch):
    """A cold read that was too slow is repeated, and the load is said."""
    speeds = iter([5e7] * 7 + [fastest])
    monkeypatch.setattr(check, "read_speed", lambda *_: next(speeds))
    monkeypatch.setattr(os, "getloadavg", lambda: (9.5, 1, 1))
    good, what, remedy = check._ssd(TINY, TINY)
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
    how = oscache.drop_pages(tmp_path)
    left = cached_nbytes(tmp_path)
    if left == 4 * MB:
        pytest.skip(f"pages cannot be dropped here ({how})")
    before = oscache.disk_read_nbytes()
    for file in tmp_path.glob("*.safetensors"):
        file.read_bytes()
    assert cached_nbytes(tmp_path) == 4 * MB
    if before is not None:
        assert oscache.disk_read_nbytes() - before >= 4 * MB - left
    assert cached_nbytes(tmp_path / "c.txt") == 2 * MB  # was left alone
