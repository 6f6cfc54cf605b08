"""How much memory is left in cgroups and on a GPU, and what a server takes of it."""

import copy
import sys
from types import SimpleNamespace

import mlx.core as mx
import psutil
import pytest
from in_process import MODEL, SLOTS, started
from mlx_lm.generate import _merge_caches
from mlx_lm.models.cache import KVCache, make_prompt_cache

import moelab
from moelab import DATA, memory
from moelab.commands import answers
from moelab.commands.drafting import leave_room, open_draft
from moelab.streaming.room import RESERVE_NBYTES

MB = 1 << 20


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Writes ``/proc/self/cgroup`` and the files of a group, as the kernel shows them."""
    own = tmp_path / "own"
    monkeypatch.setattr(memory, "OWN_CGROUPS", own)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)

    def write(line, groups):
        own.write_text("1:name=systemd:/\n" + line + "\n")
        for folder, files in groups.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / folder / name).write_text(f"{text}\n")

    return write


def test_version_2_the_tightest_group_above_decides(cgroups):
    stat = f"anon {60 * MB}\ninactive_file {20 * MB}\nactive_file {10 * MB}\nslab_reclaimable {MB}"
    job = {"memory.max": 500 * MB, "memory.current": 100 * MB, "memory.stat": stat}
    above = {"memory.max": 300 * MB, "memory.current": 190 * MB, "memory.stat": "inactive_file 0"}
    cgroups("0::/user/job", {"user/job": job, "user": above})
    assert memory.memory_limit() == 300 * MB
    assert memory.memory_in_cgroups() == 110 * MB  # less than the 431 MB of the inner one
    cgroups("0::/user/job", {"user": {"memory.high": 200 * MB}})
    assert memory.memory_limit() == 200 * MB and memory.memory_in_cgroups() == 10 * MB
    cgroups("0::/user/job", {"user": {"memory.max": "max", "memory.high": "max"}})
    assert memory.memory_limit() == 500 * MB
    assert memory.memory_in_cgroups() == (500 - 100 + 31) * MB
    assert memory.memory_available() == min(431 * MB, psutil.virtual_memory().available)


def test_version_1_the_page_cache_counts_as_free(cgroups):
    stat = f"inactive_file 1\ntotal_inactive_file {30 * MB}\ntotal_active_file {20 * MB}"
    files = {"memory.limit_in_bytes": 200 * MB, "memory.usage_in_bytes": 150 * MB}
    root = {"memory.limit_in_bytes": 9223372036854771712}
    cgroups("4:memory:/a", {"memory/a": {**files, "memory.stat": stat}, "memory": root})
    assert memory.memory_limit() == 200 * MB
    assert memory.memory_in_cgroups() == 100 * MB


def test_without_a_limit_the_system_decides(cgroups):
    cgroups("0::/", {"": {}})
    assert memory.memory_limit() is None and memory.memory_in_cgroups() is None
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


# What a server takes of it


def test_the_memory_of_a_draft_and_of_kept_prompts_is_planned(capsys):
    """The draft is there before the model's slots are chosen; kept prompts have a limit."""
    draft, size = str(DATA / "models/tiny-dflash"), ("--prompt-cache-size", "3")
    memory = ("--memory-nbytes", "205000000", "--decode-concurrency", "1")
    config = moelab.StreamConfig(memory_nbytes=205_000_000, lazy_logits=True)
    plan = moelab.plan(MODEL, config)
    drafted = moelab.plan(MODEL, leave_room(config, open_draft(draft)))
    assert drafted.slots < plan.slots == 64 and drafted.reserved_nbytes > 0 == plan.reserved_nbytes

    def kept(*options):
        code, made = started(*options)
        prompts = made.prompt_cache
        made.stop_and_join()
        return code, prompts.max_size, prompts.max_bytes, prompts.free_nbytes

    for planned, options in ((plan, ()), (drafted, ("--draft", draft))):
        free = planned.reserved_nbytes + RESERVE_NBYTES
        assert kept(*memory, *size, *options) == (0, 3, planned.all_caches_nbytes, free)
        assert f"slots={planned.slots} of 64" in capsys.readouterr().err
    assert kept(*SLOTS, "--use-default-chat-template") == (0, 10, sys.maxsize, 0)
    assert kept(*memory, "--prompt-cache-bytes", "0")[2] == 0


@pytest.mark.parametrize(
    "options, texts",
    [
        (["170000000"], range(1, 2)),
        (["400000000"], range(5, 12)),
        (["9000000000"], range(32, 33)),
        (["260000000", "--decode-concurrency", "3"], range(3, 4)),
        (["170000000", "--decode-concurrency", "20"], None),
    ],
)
def test_the_caches_of_texts_decoded_at_once_are_planned(options, texts, capsys):
    """No more than fit. Those of the command line must: else it says what they take."""
    code, made = started("--memory-nbytes", *options)
    err = capsys.readouterr().err
    if texts is None:
        assert code == 1 and "reserved" in err and "expected at least" in err
        return
    made.stop_and_join()
    args = made.cli_args
    assert args.decode_concurrency in texts and args.prompt_concurrency <= max(texts)
    assert ("decoded at once" in err) == (args.decode_concurrency not in (3, 32))


def test_kept_prompts_make_way_where_memory_is_short(monkeypatch):
    """Old prompts are forgotten; a new one that still does not fit is not kept."""
    cache = KVCache()
    cache.update_and_fetch(*[mx.zeros((1, 1, 4, 8))] * 2)
    one = cache.nbytes
    most, prompts = 5 * one + 100, answers.Prompts(free_nbytes=100)
    monkeypatch.setattr(answers, "memory_now", lambda: (0, most - prompts.nbytes))
    for i in range(7):
        prompts.insert_cache("model", [i, 0], [copy.deepcopy(cache)])
        assert len(prompts) == min(i + 1, 5)
    assert prompts.fetch_nearest_cache("model", [1, 0])[0] is None
    most = 99 + 3 * one
    assert prompts.make_way() and len(prompts) == 2
    most = one + 99
    prompts.insert_cache("model", [9, 0], [cache])
    assert len(prompts) == prompts.nbytes == 0 and not prompts.make_way(one)


def test_a_kept_prompt_takes_its_own_memory_only():
    """And not that of the batch that its text was in, nor of what is computed to take it out."""
    tokens, prompts = list(range(4)), answers.Prompts()
    with moelab.load(MODEL, moelab.StreamConfig(slots=16))[0] as model:
        batch = _merge_caches([make_prompt_cache(model) for _ in range(8)])
        model(mx.array([tokens] * 8), cache=batch)
        mx.eval([c.state for c in batch])
        before = mx.get_active_memory()
        prompts.insert_cache("model", tokens, [c.extract(3) for c in batch])
        assert prompts.nbytes <= mx.get_active_memory() - before < 1.2 * prompts.nbytes
        kept, rest = prompts.fetch_nearest_cache("model", [*tokens, 5])
        caches = make_prompt_cache(model)
        model(mx.array([tokens]), cache=caches)
        want, got = (model(mx.array([rest]), cache=c) for c in (caches, kept))
        assert rest == [5] and mx.allclose(want, got, atol=1e-4)
