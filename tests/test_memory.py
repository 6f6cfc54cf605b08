"""How much memory is left in cgroups and on a GPU, and what a server takes of it."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import mlx.core as mx
import psutil
import pytest
from in_process import MODEL, SLOTS, started

import moelab
from moelab import DATA, memory
from moelab.commands.drafting import open_draft
from moelab.commands.server.prompts import Prompts
from moelab.streaming.residency.bank import can_empty
from moelab.streaming.room import RESERVE_NBYTES

MB = 1 << 20


def test_the_tightest_group_above_decides_else_the_system(tmp_path, monkeypatch):
    own = tmp_path / "own"
    monkeypatch.setattr(memory, "OWN_CGROUPS", own)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)

    def cgroups(line, groups):
        """Write ``/proc/self/cgroup`` and files of groups as the kernel has them."""
        own.write_text("1:name=systemd:/\n" + line + "\n")
        for folder, files in groups.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / folder / name).write_text(f"{text}\n")

    cgroups("0::/", {})
    assert memory.memory_limit() is None and memory.memory_in_cgroups() is None
    stat = f"anon {60 * MB}\ninactive_file {20 * MB}\nactive_file {10 * MB}\nslab_reclaimable {MB}"
    job = {"memory.max": 500 * MB, "memory.current": 100 * MB, "memory.stat": stat}
    above = {"memory.max": 300 * MB, "memory.current": 190 * MB, "memory.stat": "inactive_file 0"}
    cgroups("0::/user/job", {"user/job": job, "user": above})
    assert memory.memory_limit() == 300 * MB
    assert memory.memory_in_cgroups() == 110 * MB  # less than the inner group's 431 MB
    cgroups("0::/user/job", {"user": {"memory.high": 200 * MB}})
    assert memory.memory_limit() == 200 * MB and memory.memory_in_cgroups() == 10 * MB
    cgroups("0::/user/job", {"user": {"memory.max": "max", "memory.high": "max"}})
    assert memory.memory_limit() == 500 * MB
    assert memory.memory_in_cgroups() == (500 - 100 + 31) * MB
    assert memory.memory_available() == min(431 * MB, psutil.virtual_memory().available)
    # In version 1, too, the page cache counts as free.
    stat = f"inactive_file 1\ntotal_inactive_file {30 * MB}\ntotal_active_file {20 * MB}"
    files = {"memory.limit_in_bytes": 200 * MB, "memory.usage_in_bytes": 150 * MB}
    root = {"memory.limit_in_bytes": 9223372036854771712}
    cgroups("4:memory:/a", {"memory/a": {**files, "memory.stat": stat}, "memory": root})
    assert memory.memory_limit() == 200 * MB
    assert memory.memory_in_cgroups() == 100 * MB
    memory.OWN_CGROUPS.unlink()  # not on Linux
    assert memory.memory_in_cgroups() is None
    assert 0 < memory.memory_available() <= psutil.virtual_memory().total


def test_on_a_gpu(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 3)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 5)
    for is_metal, left in ((True, 97), (False, 45)):
        monkeypatch.setattr(mx, "metal", SimpleNamespace(is_available=lambda m=is_metal: m))
        info = {"max_recommended_working_set_size": 100} if is_metal else {"free_memory": 40}
        monkeypatch.setattr(mx, "device_info", lambda info=info: info)
        assert memory.memory_on_gpu() == left
    monkeypatch.undo()
    if mx.default_device() == mx.cpu:
        assert memory.memory_on_gpu() is None


# What a server takes of memory


def stopped(*options):
    """The ``Served`` of a server that was started and stopped."""
    _, engine = started(*options)
    engine.stop()
    return engine.served


def test_the_memory_of_a_draft_and_of_kept_prompts_is_planned(capsys, monkeypatch):
    """A plan counts the draft before it chooses slots; kept prompts have a limit."""
    draft, size = str(DATA / "models/tiny-dflash"), ("--prompt-cache-size", "3")
    memory = ("--memory-nbytes", "222000000", "--decode-concurrency", "1")
    config = moelab.StreamConfig(memory_nbytes=222_000_000, lazy_logits=True)
    plan = moelab.plan(MODEL, config)
    drafted = moelab.plan(MODEL, config, draft=open_draft(draft))
    assert drafted.slots < plan.slots == 64 and drafted.reserved_nbytes > 0 == plan.reserved_nbytes
    kept = Mock(side_effect=Prompts)
    monkeypatch.setattr("moelab.commands.serve.Prompts", kept)

    def prompts(*options):
        """Return how many prompts a server keeps, their memory, and what they leave free."""
        stopped(*options)
        return kept.call_args.args

    for planned, options in ((plan, ()), (drafted, ("--draft", draft))):
        free = planned.reserved_nbytes + RESERVE_NBYTES
        assert prompts(*memory, *size, *options) == (3, planned.all_caches_nbytes, free)
        assert f"slots={planned.slots} of 64" in capsys.readouterr().err
    assert prompts(*SLOTS) == (10, sys.maxsize, 0)
    assert prompts(*memory, "--prompt-cache-bytes", "0")[1] == 0


@pytest.mark.parametrize(
    "options, whole, most",
    [
        (["170000000"], range(1, 2), 2),
        (["400000000"], range(6, 25), None),
        (["9000000000"], range(32, 41), 32),
        (["260000000", "--decode-concurrency", "3"], range(3, 5 - can_empty()), 3),
        (["222000000", "--kv-bits", "8"], range(40, 41), 32),  # one after another
    ],
)
def test_the_caches_of_texts_written_at_once_are_planned(options, whole, most):
    """A server begins no more texts than fit; a short text counts as half a long one."""
    served = stopped("--memory-nbytes", *options)
    texts = [served.context] * 40
    fit = max(n for n in range(41) if served.fits(texts[:n]))
    assert fit in whole and served.most_texts == (most or min(32, 2 * fit))
    assert served.fits([1] * min(40, 2 * fit))
    assert fit == 40 or not served.fits([1] * (2 * fit + 1))
