"""Tests eviction by all choices, the page cache by lists and by Linux, the replay by a loop."""

import json
import os
import sys
import time
from dataclasses import replace as changed
from functools import cache, partial
from itertools import combinations

import mlx.core as mx
import numpy as np
import pytest
from committed import ROOT
from common import cached_nbytes
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab.lab import limit, machine, records
from moelab.lab.arguments import Evicting
from moelab.lab.decode import route_by
from moelab.replay import eviction, locality, pagecache
from moelab.replay.costs import Costs
from moelab.streaming.model import load_model
from moelab.streaming.residency import table as slots
from moelab.streaming.residency.layer import PART_NBYTES
from moelab.streaming.residency.table import SlotTable
from moelab.streaming.trace import Trace


def made(T=60, L=3, E=16, K=4, seed=0, zipf=0.7, sticky=0.3, memory=3.0):
    return locality.synthesize(locality.Locality((zipf,), (sticky,), (memory,)), T, L, E, K, seed)


@pytest.mark.parametrize("S", (10, 24, 56))
def test_the_default_reads_less_than_lru_in_each_trace_that_we_have(S):
    for path in (ROOT / "data" / "traces").glob("*.npz"):
        experts = moelab.Trace.load(path).experts.astype(int)
        hits = {p: eviction.held(experts, 64, S, p)[64:].sum() for p in ("lru", "lrfu")}
        assert hits["lrfu"] > hits["lru"], path


def fewest_misses(rows, S):
    """The fewest misses, by trying every choice."""

    @cache
    def best(i, content):
        if i == len(rows):
            return 0
        need = frozenset(rows[i])
        missing = len(need - content)
        others = content - need
        keeps = combinations(sorted(others), min(len(others), S - len(need)))
        return missing + min(best(i + 1, need | frozenset(keep)) for keep in keeps)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("S", (2, 3, 4))
def test_belady_is_the_best_there_is(seed, S):
    t = made(T=14, L=1, E=7, K=2, seed=seed)
    hit = eviction.held(t.experts, 7, S, "belady")
    assert (~hit).sum() == fewest_misses(tuple(map(tuple, t.experts[:, 0].tolist())), S)


@pytest.mark.parametrize("policy", ("lru", "lfu", "lrfu", "s3-fifo", "belady"))
def test_the_record_of_notebook_04_is_replayed_again(policy):
    samples, t = records.read("cpu_locality"), locality.recorded_trace("code").decode
    for row in samples[(samples.policy == policy) & (samples.text == "code")].itertuples():
        assert eviction.held(t.experts, 64, row.slots, policy)[64:].sum() == row.hits, row.slots


def test_the_policy_of_the_engine():
    policies = [moelab.StreamConfig(source=source).policy for source in ("disk", "host")]
    assert policies[1] in slots.GPU_POLICIES, "a GPU chooses slots by itself"
    assert policies == ["lrfu", "lru"] and Evicting(source="host", policy="lfu").policy == "lfu"


@pytest.mark.parametrize("policy", slots.EVICTION)
def test_hits_are_those_of_a_driven_model(policy, random_tiny_moe):
    t = made(T=30, L=8, E=64, K=8)
    config = Evicting(slots=14, policy=policy, prefetch="none")
    model, _ = load_model(random_tiny_moe, config)
    with model, route_by(model, t.experts[:, None]):
        cache = make_prompt_cache(model)
        for i in range(len(t)):
            mx.eval(model(mx.array([[i]]), cache=cache))
        hits = moelab.stats(model).decode.hits
    assert hits == eviction.held(t.experts, 64, 14, policy).sum()


COSTS = Costs(0.01, 1e-4, 1e-10, 1e-9, 1e-5, 1e-4)
MB = 1_000_000


def reference(units, capacity, ratio):
    """Linux's two lists of pages in plain Python, newest first, with one set of flags."""
    inactive, active, referenced, shadow, age, found = [], [], set(), {}, 0, []
    for u in units:
        found.append(u in inactive or u in active)
        if not found[-1]:
            again = u in shadow and age - shadow.pop(u) <= len(active)
            (active if again else inactive).insert(0, u)
            age += again
        if u in inactive and u in referenced:
            inactive.remove(u)
            active.insert(0, u)
            referenced.discard(u)
            age += 1
        else:
            referenced.add(u)
        while len(inactive) + len(active) > capacity:
            while len(inactive) * ratio < len(active):
                inactive.insert(0, active.pop())
            v = inactive.pop()
            referenced.discard(v)
            shadow[v] = age
            age += 1
    return np.array(found)


def reads(n=3000, units=60, seed=0):
    rng = np.random.default_rng(seed)
    p = np.arange(1, units + 1) ** -0.8
    return rng.permutation(units)[rng.choice(units, n, p=p / p.sum())]


SMALL = [(capacity, 10, 1) for capacity in (1, 2, 5.5, 20, 45, 59, 60, 100)]
FROM_1_GIB = [(n, 1 << 26, ratio) for n, ratio in ((15, 1), (16, 3), (33, 4), (50, 5))]


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize(("capacity", "nbytes", "ratio"), SMALL + FROM_1_GIB)
def test_linux_lists(capacity, nbytes, ratio, seed):
    units = reads(seed=seed)
    found = pagecache.cached(units, 60, capacity * nbytes, nbytes)
    np.testing.assert_array_equal(found, reference(units.tolist(), int(capacity), ratio))


CHILD = """
import json, os, sys
path, size, units = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
fd, buffer = os.open(path, os.O_RDONLY), bytearray(size)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
def read_bytes():
    return int(next(l for l in open("/proc/self/io") if l.startswith("read_bytes")).split()[1])
before = read_bytes()
for u in units:
    os.preadv(fd, [buffer], u * size)
disk = read_bytes() - before
group = dict(l.strip().split(":", 2)[1:] for l in open("/proc/self/cgroup"))
v1 = "memory" in group
where = "/sys/fs/cgroup" + ("/memory" + group["memory"] if v1 else group[""])
stat = dict(l.split() for l in open(where + "/memory.stat"))
print(json.dumps([disk, int(stat["cache"] if "cache" in stat else stat["file"])]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's page cache")
def test_the_kernel_reads_what_the_model_says(limits, tmp_path):
    """Under a memory limit the kernel reads the bytes that the model predicts, to 10%."""
    size, n = 1 << 20, 96
    file = tmp_path / "units"
    with open(file, "wb") as f:
        for _ in range(n):
            f.write(os.urandom(size))
        os.fsync(f.fileno())
    for _ in range(10):  # pages that stay cached belong to another group, and save reads
        if cached_nbytes(file) and machine.drop_pages(file):
            time.sleep(0.2)
    if cached_nbytes(file):
        pytest.skip("this system keeps the file's pages")
    units = reads(1500, n, seed=3)
    argv = [sys.executable, "-c", CHILD, str(file), str(size), json.dumps(units.tolist())]
    done = limit.run(argv, 64 << 20, timeout_s=600)
    assert done.returncode == 0, done.stderr
    disk, cache = json.loads(done.stdout)
    if disk < 10 * size:
        pytest.skip("the folder is not on a disk")
    found = pagecache.cached(units, n, cache, size)
    assert disk == pytest.approx((~found).sum() * size, rel=0.1), cache / size


@pytest.mark.parametrize("policy, direct", [("lru", 0), ("none", 0), ("belady", 0), ("lru", 1)])
def test_replay_is_the_two_caches_and_the_costs(policy, direct):
    t, one, S, memory, skip = made(T=80), MB, 6, 60 * MB, 20
    costs = changed(COSTS, overlap=0.5, cold_s_per_byte=2e-9)
    past = dict(direct_s_per_byte=5e-10, direct_call_s=2e-5, direct_overlap=0.7)
    nbytes = dict(expert_nbytes=one, slot_nbytes=2 * one, other_nbytes=3 * MB, direct=direct)
    got = pagecache.replay(t, memory, S, policy, costs=changed(costs, **past), skip=skip, **nbytes)
    if direct:
        costs = changed(COSTS, overlap=0.7, cold_s_per_byte=5e-10, cold_call_s=2e-5)
    S = 4 if policy == "none" else S
    assert got.page_nbytes == (0 if direct else memory - 3 * MB - 3 * S * 2 * one)
    hit = eviction.held(t.experts, 16, S, policy)
    places = [(i, j) for i in range(80) for j in range(3) for _ in range((~hit[i, j]).sum())]
    units = (t.experts + np.arange(3)[:, None] * 16)[~hit]
    found = reference(units.tolist(), got.page_nbytes // one, 1)
    seconds, warm_all, cold_all, hidden = [], 0, 0, 0
    for i in range(skip, 80):
        total = costs.fixed_s + 3 * 4 * costs.expert_s
        for j in range(3):
            mine = [f for place, f in zip(places, found) if place == (i, j)]
            warm, cold = mine.count(True), mine.count(False)
            spent = warm * one * costs.warm_s_per_byte + cold * one * costs.cold_s_per_byte
            spent += costs.cold_call_s if cold else costs.warm_call_s if warm else 0
            overlaps = len(mine) >= PART_NBYTES // one
            saved = costs.overlap * min(spent, 4 * costs.expert_s) if overlaps else 0
            total += spent - saved
            warm_all, cold_all, hidden = warm_all + warm, cold_all + cold, hidden + saved
        seconds.append(total)
    np.testing.assert_allclose(got.token_s, seconds)
    assert hidden > 0 and cold_all > 0 and (warm_all > 0) != direct, "or this tests nothing"
    assert got.app_hit_rate == pytest.approx(hit[skip:].mean())
    assert got.page_hit_rate == pytest.approx(warm_all / (warm_all + cold_all))
    assert got.copied_per_token == pytest.approx(warm_all * one / 60)
    assert got.read_per_token == pytest.approx(cold_all * one / 60)
    assert [sum(got.parts_s.values()), 1 / got.tok_s] == pytest.approx([got.token_s.mean()] * 2)
    assert got.parts_s["hidden"] == pytest.approx(-hidden / 60)


def test_only_decoded_tokens_count():
    t = made()
    experts, phase = np.concatenate([t.experts[:7], t.experts]), ("prefill", "decode")
    more = Trace(experts, np.repeat(phase, (7, 60)), np.zeros(67), t.num_experts)
    a, b = (pagecache.replay(x, 40 * MB, 6, expert_nbytes=MB, costs=COSTS) for x in (t, more))
    np.testing.assert_array_equal(a.token_s, b.token_s)


def replayed(**changes):
    usual = dict(trace=made(), memory_nbytes=40 * MB, slots=6, expert_nbytes=MB, costs=COSTS)
    return pagecache.replay(**usual | changes)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: eviction.held(made().experts, 16, 3), "slots: expected at least 4 .* got 3"),
        (lambda: eviction.held(np.zeros((2, 1, 4), np.uint16), 16, 8), "distinct experts"),
        (lambda: eviction.held(made().experts, 16, 8, "mru"), "expected one of lru.* got 'mru'"),
        # The replay has policies that the engine does not have.
        *((partial(SlotTable, 4, p), f"lru, .* got {p!r}") for p in ("s3-fifo", "belady", "none")),
        (lambda: replayed(slots=16), "16 slots in each of 3 layers take 48 MB and the rest 0 MB"),
        (lambda: replayed(skip=60), "fewer tokens to skip than the 60"),
        (lambda: replayed(costs=Costs(0, 0, 0, 1e-9), direct=True), "reads past the page cache"),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
