"""The replay against slow references: the engine's own slot table, exhaustive search, a page-by-page cache, and the kernel."""

import json
import os
import re
import sys
import time
from dataclasses import replace as changed
from functools import cache
from itertools import combinations
from pathlib import Path

import families
import mlx.core as mx
import numpy as np
import pytest
import tiny_moe
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab import DATA
from moelab.lab import limit, machine
from moelab.lab.experiments import advise as advice
from moelab.lab.experiments import sweep
from moelab.replay import costs as cost
from moelab.replay import locality as routing
from moelab.replay import pagecache
from moelab.streaming import config, slots
from moelab.streaming.layers import OVERLAP_S
from moelab.streaming.model import load_model
from moelab.streaming.record import Trace, route_by
from moelab.streaming.slots import SlotTable

COSTS = pagecache.Costs(0.01, 1e-4, 1e-10, 1e-9, 1e-5, 1e-4)
MB = 1_000_000


def made(T=60, L=3, E=16, K=4, seed=0, zipf=0.7, sticky=0.3, memory=3.0):
    return routing.synthesize(routing.Locality((zipf,), (sticky,), (memory,)), T, L, E, K, seed)


# --- the slots ---


@pytest.mark.parametrize("policy", ("lru", "lfu"))
@pytest.mark.parametrize("S", (4, 5, 9, 16, 20))
@pytest.mark.parametrize("seed", (0, 1, 2))
def test_lru_and_lfu_are_the_engines(policy, S, seed):
    t = made(seed=seed)
    want = np.zeros(t.experts.shape, bool)
    for layer in range(3):
        table = SlotTable(S, policy)
        for i, need in enumerate(t.experts[:, layer].tolist()):
            hits, misses = table.plan(need)
            table.commit(misses)
            want[i, layer] = [e in hits for e in need]
    np.testing.assert_array_equal(pagecache.held(t.experts, 16, S, policy), want)


@pytest.mark.parametrize("S", (4, 7, 16))
def test_fifo(S):
    t = made()
    want = np.zeros(t.experts.shape, bool)
    for layer in range(3):
        queue = []
        for i, need in enumerate(t.experts[:, layer].tolist()):
            want[i, layer] = [e in queue for e in need]
            missing = [e for e in need if e not in queue]
            while len(queue) + len(missing) > S:
                queue.remove(next(e for e in queue if e not in need))
            queue += missing
    np.testing.assert_array_equal(pagecache.held(t.experts, 16, S, "fifo"), want)


@pytest.mark.parametrize("policy", ("lru", "lfu"))
@pytest.mark.parametrize("S", (4, 7, 12))
@pytest.mark.parametrize("count", (1, 5, 14, 100))
def test_pinned_are_the_engines(count, S, policy):
    t = made(T=120)
    stay = pagecache.pin(made(seed=1), count * 10, S, 10)
    assert sum(map(len, stay)) == min(count, 3 * (16 - S)) and max(map(len, stay)) <= 16 - S
    want = np.zeros(t.experts.shape, bool)
    for layer in range(3):
        table = SlotTable(S, policy, stay[layer])
        for i, need in enumerate(t.experts[:, layer].tolist()):
            hits, misses = table.plan(need)
            table.commit(misses)
            want[i, layer] = [e in hits for e in need]
    np.testing.assert_array_equal(pagecache.held(t.experts, 16, S, policy, stay), want)
    best = pagecache.held(t.experts, 16, S, "belady", stay)
    assert best.sum() >= want.sum() and all(
        best[:, i][np.isin(t.experts[:, i], stay[i])].all() for i in range(3)
    )


def test_pinned_take_their_bytes():
    t = made()
    stay = pagecache.pin(t, 7 * MB, 4, MB)
    a, b = (
        pagecache.replay(t, 40 * MB, 4, expert_nbytes=MB, costs=COSTS, pinned=p) for p in ((), stay)
    )
    assert b.page_nbytes == a.page_nbytes - 7 * MB and b.app_hit_rate > a.app_hit_rate
    with pytest.raises(ValueError, match="pinned: expected a policy of lru, .* got 'none'"):
        pagecache.replay(t, 40 * MB, 4, "none", expert_nbytes=MB, costs=COSTS, pinned=stay)


def fewest_misses(rows, S):
    """By trying every choice."""

    @cache
    def best(i, content):
        if i == len(rows):
            return 0
        need = frozenset(rows[i])
        missing = len(need - content)
        others = content - need
        room = min(len(others), S - len(need))
        return missing + min(
            best(i + 1, need | frozenset(keep)) for keep in combinations(sorted(others), room)
        )

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("S", (2, 3, 4))
def test_belady_is_the_best_there_is(seed, S):
    t = made(T=14, L=1, E=7, K=2, seed=seed)
    hit = pagecache.held(t.experts, 7, S, "belady")
    assert (~hit).sum() == fewest_misses(tuple(map(tuple, t.experts[:, 0].tolist())), S)


def s3_fifo(rows, S):
    """As the paper has it, with lists; experts that the token needs are passed over."""
    room = max(1, S // 10)
    small, main, ghost, freq, hits = [], [], [], {}, []

    def from_small(need):
        for e in list(small):
            if e in need:
                small.remove(e)
                small.append(e)
            elif freq[e] > 1:
                small.remove(e)
                main.append(e)
                freq[e] = 0
            else:
                small.remove(e)
                ghost.append(e)
                del freq[e]
                if len(ghost) > S - room:
                    ghost.pop(0)
                return True
        return False

    def from_main(need):
        turns = 0
        while main and turns < 4 * len(main) + 4:
            turns += 1
            e = main.pop(0)
            if e in need:
                main.append(e)
            elif freq[e]:
                freq[e] -= 1
                main.append(e)
            else:
                del freq[e]
                return True
        return False

    for need in rows:
        missing = []
        for e in need:
            hits.append(e in freq)
            if e in freq:
                freq[e] = min(3, freq[e] + 1)
            else:
                missing.append(e)
        for e in missing:
            if len(freq) >= S:
                order = (from_small, from_main) if len(small) >= room else (from_main, from_small)
                assert order[0](need) or order[1](need)
            if e in ghost:
                ghost.remove(e)
                main.append(e)
            else:
                small.append(e)
            freq[e] = 0
            assert len(freq) <= S
    return hits


@pytest.mark.parametrize("S", (4, 5, 6, 12, 15, 16))
@pytest.mark.parametrize("sticky", (0.1, 0.3, 0.7))
@pytest.mark.parametrize("seed", (0, 1))
def test_s3_fifo(S, sticky, seed):
    t = made(T=200, seed=seed, sticky=sticky)
    hit = pagecache.held(t.experts, 16, S, "s3-fifo")
    for layer in range(3):
        want = s3_fifo(t.experts[:, layer].tolist(), S)
        np.testing.assert_array_equal(hit[:, layer].ravel(), want)


@pytest.mark.parametrize("policy", pagecache.POLICIES)
def test_every_policy_on_a_recorded_trace(policy):
    t = Trace.load(DATA / "traces" / "code.npz").decode
    rate = [pagecache.held(t.experts, 64, S, policy).mean() for S in (8, 16, 32, 64)]
    best = [pagecache.held(t.experts, 64, S, "belady").mean() for S in (8, 16, 32, 64)]
    assert (np.array(rate) <= np.array(best) + 1e-12).all()
    if policy == "none":
        assert rate == [0] * 4
        return
    seen = 1 - sum(len(np.unique(t.experts[:, i])) for i in range(8)) / t.experts.size
    assert rate[-1] == pytest.approx(seen)  # with every slot only the first use misses
    if policy == "lru":
        want = routing.lru_hit_rate(t).mean(0)[[8, 16, 32, 64]]
        np.testing.assert_allclose(rate, want, atol=0.003)


def test_a_policy_or_a_size_that_is_none():
    t = made()
    with pytest.raises(ValueError, match="expected one of lru, lfu, .* got 'mru'"):
        pagecache.held(t.experts, 16, 8, "mru")
    with pytest.raises(ValueError, match="slots: expected at least 4 .* got 3"):
        pagecache.held(t.experts, 16, 3, "lru")
    with pytest.raises(ValueError, match="distinct experts"):
        pagecache.held(np.zeros((2, 1, 4), np.uint16), 16, 8)
    with pytest.raises(ValueError, match="pages: expected one of linux, lru"):
        pagecache.cached(np.arange(3), 3, 5, pages="bsd")


def test_the_policies_are_listed_once():
    """The engine's list is the beginning of the replay's, and everything else asks these two."""
    assert pagecache.POLICIES[: len(slots.POLICIES)] == slots.POLICIES == ("lru", "lfu")
    assert advice.POLICIES is slots.POLICIES and config.CHOICES["policy"] is slots.POLICIES
    written = re.compile(r"""[(\[]["']lru["'],\s*["']lfu["'],?\s*[)\]]""")
    files = [*Path(moelab.__file__).parent.rglob("*.py")]
    assert [f.name for f in files if written.search(f.read_text())] == ["slots.py"]


@pytest.mark.parametrize("policy", ("mru", "LRU", "", None))
def test_an_unknown_policy_is_refused_everywhere(policy):
    """The slot table took it for LFU, the loop of the replay for LRU."""
    t, expected = made(), "policy: expected one of lru, lfu.* got "
    sizes = {
        "L": 3,
        "K": 4,
        "E": 16,
        "expert_nbytes": 1,
        "slot_nbytes": 3,
        "checkpoint_nbytes": 48,
        "backbone_nbytes": 0,
    }
    for call in (
        lambda: SlotTable(4, policy),
        lambda: moelab.StreamConfig(policy=policy),
        lambda: pagecache.held(t.experts, 16, 8, policy),
        lambda: pagecache._scored(t.experts, 16, 8, policy),
        lambda: pagecache.replay(t, 1e9, 8, policy, expert_nbytes=1, costs=COSTS),
        lambda: advice.replays(sizes, 1e12, t, COSTS, [(8, policy)], 0),
    ):
        with pytest.raises(ValueError, match=expected):
            call()
    for policy in ("s3-fifo", "belady", "none"):  # the replay has them, the engine does not
        with pytest.raises(ValueError, match=expected):
            SlotTable(4, policy)


@pytest.mark.parametrize("policy", ("lru", "lfu"))
@pytest.mark.parametrize("count", (0, 50))
def test_hits_are_those_of_a_driven_model(count, policy, tmp_path):
    tiny_moe.random_model(tmp_path)
    t, other = made(T=30, L=8, E=64, K=8), made(T=30, L=8, E=64, K=8, seed=1)
    other.save(tmp_path / "trace.npz")
    one = moelab.footprint(tmp_path, moelab.StreamConfig(slots=8)).slots_nbytes // 64
    config = moelab.StreamConfig(
        slots=14, policy=policy, pinned_nbytes=count * one, pinned_trace=tmp_path / "trace.npz"
    )
    model, _ = load_model(tmp_path, config)
    with model, route_by(model, t):
        cache = make_prompt_cache(model)
        for i in range(len(t)):
            mx.eval(model(mx.array([[i]]), cache=cache))
        got = moelab.stats(model).decode
    stay = pagecache.pin(other, count * one, 14, one)
    assert sum(map(len, stay)) == count
    assert got.hits == pagecache.held(t.experts, 64, 14, policy, stay).sum()


# --- the page cache ---


def reference(units, capacity, ratio, ahead=0, row=10**9):
    """Linux's two lists, spelled out: newest first, one set of flags."""
    inactive, active, referenced, shadow, marks = [], [], set(), {}, set()
    age, found, brought = 0, [], []

    def cached(v):
        return v in inactive or v in active

    def add(v):
        nonlocal age
        if v in shadow and age - shadow.pop(v) <= len(active):
            active.insert(0, v)
            age += 1
        else:
            inactive.insert(0, v)

    def mark_accessed(v):
        nonlocal age
        if v in inactive and v in referenced:
            inactive.remove(v)
            active.insert(0, v)
            referenced.discard(v)
            age += 1
        else:
            referenced.add(v)

    for u in units:
        there, wanted, end = cached(u), [], u - u % row + row
        found.append(there)
        if ahead and u in marks:
            marks.remove(u)
            streak = 0
            while u + streak < end and streak < ahead and cached(u + streak):
                streak += 1
            if u + streak < end and streak < ahead:
                size = min(ahead, 2 * (streak + 1))
                wanted = list(range(u + streak, u + streak + size))
                mark = u + streak
                if streak == 0:
                    mark = u + size
                    wanted += range(mark, mark + min(ahead, 2 * size))
                if mark < end and not cached(mark):
                    marks.add(mark)
        elif ahead and not there:
            streak = 0
            while (u - streak) % row and streak < ahead and cached(u - streak - 1):
                streak += 1
            if streak:
                wanted = list(range(u + 1, min(u + 1 + streak, u + ahead)))
                mark = wanted[-1] + 1 if wanted else u + 1
                if mark < end and not cached(mark):
                    marks.add(mark)
        wanted = [v for v in wanted if v < end and v != u and not cached(v)]
        for v in ([] if there else [u]) + wanted:
            add(v)
        brought.append(len(wanted))
        mark_accessed(u)
        while len(inactive) + len(active) > capacity:
            while len(inactive) * ratio < len(active):
                inactive.insert(0, active.pop())
            v = inactive.pop()
            referenced.discard(v)
            marks.discard(v)
            shadow[v] = age
            age += 1
    return np.array(found), np.array(brought)


def reads(n=3000, units=60, seed=0):
    rng = np.random.default_rng(seed)
    p = np.arange(1, units + 1) ** -0.8
    return rng.permutation(units)[rng.choice(units, n, p=p / p.sum())]


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize("capacity", (1, 2, 5.5, 20, 45, 59, 60, 100))
@pytest.mark.parametrize("ahead", (0, 1, 4))
def test_linux_lists(capacity, ahead, seed):
    units = reads(seed=seed)
    found, brought = pagecache.cached(units, 60, capacity * 10, 10, "linux", ahead, 30)
    want = reference(units.tolist(), int(capacity), 1, ahead, 30)
    np.testing.assert_array_equal(found, want[0])
    np.testing.assert_array_equal(brought, want[1])
    assert ahead or not brought.any()


def test_from_1_gib_on_the_active_list_may_be_longer():
    units, one = reads(), 1 << 26
    for capacity, ratio in ((15, 1), (16, 3), (33, 4), (50, 5)):
        found, _ = pagecache.cached(units, 60, capacity * one, one)
        np.testing.assert_array_equal(found, reference(units.tolist(), capacity, ratio)[0])


@pytest.mark.parametrize("capacity", (0, 1, 7, 60, float("inf")))
def test_one_list(capacity):
    units, order, want = reads(), [], []
    for u in units.tolist():
        want.append(u in order)
        if u in order:
            order.remove(u)
        order.append(u)
        order = order[-int(min(capacity, 99)) :] if capacity else []
    np.testing.assert_array_equal(pagecache.cached(units, 60, capacity, pages="lru")[0], want)


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
where = "/sys/fs/cgroup/memory" + group["memory"] if "memory" in group else "/sys/fs/cgroup" + group[""]
stat = dict(l.split() for l in open(where + "/memory.stat"))
print(json.dumps([disk, int(stat["cache"] if "cache" in stat else stat["file"])]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's page cache")
def test_the_kernel_reads_what_the_model_says(tmp_path):
    """Bytes from the disk under a memory limit, to a tenth; skipped where no cgroup may be made, or no disk is under the folder."""
    size, n = 1 << 20, 96
    file = tmp_path / "units"
    with open(file, "wb") as f:
        for _ in range(n):
            f.write(os.urandom(size))
        os.fsync(f.fileno())
    for _ in range(10):  # what stays cached is another group's, and would be served from there
        if sweep.resident_nbytes(file) and machine.drop_pages(file):
            time.sleep(0.2)
    if sweep.resident_nbytes(file):
        pytest.skip("this system keeps the file's pages")
    units = reads(1500, n, seed=3)
    try:
        argv = [sys.executable, "-c", CHILD, str(file), str(size), json.dumps(units.tolist())]
        done = limit.run(argv, 64 << 20, ways=("cgroup",), timeout_s=600)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    assert done.returncode == 0, done.stderr
    disk, cache = json.loads(done.stdout)
    if disk < 10 * size:
        pytest.skip("the folder is not on a disk")
    found, _ = pagecache.cached(units, n, cache, size)
    assert disk == pytest.approx((~found).sum() * size, rel=0.1), (
        disk / size,
        (~found).sum(),
        cache / size,
    )


# --- both, and time ---


@pytest.mark.parametrize("policy", ("lru", "none", "belady"))
def test_replay_is_the_two_caches_and_the_costs(policy):
    t, one, S, memory, skip = made(T=80), MB, 6, 60 * MB, 20
    costs = changed(COSTS, overlap=0.5, cold_s_per_byte=2e-9)
    got = pagecache.replay(
        t,
        memory,
        S,
        policy,
        expert_nbytes=one,
        slot_nbytes=2 * one,
        other_nbytes=3 * MB,
        skip=skip,
        costs=costs,
    )
    S = 4 if policy == "none" else S
    assert got.page_nbytes == memory - 3 * MB - 3 * S * 2 * one
    hit = pagecache.held(t.experts, 16, S, policy)
    order = [
        (i, j, int(e) + 16 * j)
        for i in range(80)
        for j in range(3)
        for e in t.experts[i, j][~hit[i, j]]
    ]
    found, _ = reference([u for *_, u in order], got.page_nbytes // one, 1)
    seconds, warm_all, cold_all, hidden = [], 0, 0, 0
    for i in range(skip, 80):
        total = costs.fixed_s + 3 * 4 * costs.expert_s
        for j in range(3):
            mine = [f for (a, b, _), f in zip(order, found) if (a, b) == (i, j)]
            warm, cold = mine.count(True), mine.count(False)
            spent = warm * one * costs.warm_s_per_byte + cold * one * costs.cold_s_per_byte
            spent += costs.cold_call_s if cold else costs.warm_call_s if warm else 0
            saved = 0.5 * min(spent, 4 * costs.expert_s) if spent >= OVERLAP_S else 0
            total += spent - saved
            warm_all, cold_all, hidden = warm_all + warm, cold_all + cold, hidden + saved
        seconds.append(total)
    np.testing.assert_allclose(got.token_s, seconds)
    assert hidden > 0 and cold_all > 0 and warm_all > 0, "or this tests nothing"
    assert got.app_hit_rate == pytest.approx(hit[skip:].mean())
    assert got.page_hit_rate == pytest.approx(warm_all / (warm_all + cold_all))
    assert got.copied_per_token == pytest.approx(warm_all * one / 60)
    assert got.read_per_token == pytest.approx(cold_all * one / 60)
    assert (
        sum(got.parts_s.values())
        == pytest.approx(got.token_s.mean())
        == pytest.approx(1 / got.tok_s)
    )
    assert got.parts_s["hidden"] == pytest.approx(-hidden / 60)


def test_only_decoded_tokens_count():
    t = made()
    more = Trace(
        np.concatenate([t.experts[:7], t.experts]),
        np.repeat(("prefill", "decode"), (7, 60)),
        np.zeros(67),
        t.num_experts,
    )
    a, b = (pagecache.replay(x, 40 * MB, 6, expert_nbytes=MB, costs=COSTS) for x in (t, more))
    np.testing.assert_array_equal(a.token_s, b.token_s)


def test_without_a_limit_nothing_is_read_twice():
    t = made()
    got = pagecache.replay(t, float("inf"), 4, expert_nbytes=MB, costs=COSTS)
    distinct = sum(len(np.unique(t.experts[:, i])) for i in range(3))
    assert got.read_per_token * 60 == pytest.approx(distinct * MB)
    every = pagecache.replay(t, float("inf"), 16, expert_nbytes=MB, costs=COSTS, skip=59)
    assert every.read_per_token == 0 == every.copied_per_token and np.isnan(every.page_hit_rate)


def test_more_slots_can_be_slower():
    """What the lab is about must be able to show in the model: the same memory, moved from the page cache to the slots."""
    t = made(T=400, L=4, E=64, K=8, zipf=0.3, sticky=0.1)
    speed = [
        pagecache.replay(t, 240 * MB, S, expert_nbytes=MB, costs=COSTS, skip=100).tok_s
        for S in (8, 24, 52)
    ]
    assert speed[0] > 1.2 * speed[1] < speed[2]
    free = [
        pagecache.replay(t, 1e12, S, expert_nbytes=MB, costs=COSTS, skip=100).tok_s
        for S in (8, 24, 52)
    ]
    assert free == sorted(free)


@pytest.mark.parametrize(
    "wrong, match",
    (
        (dict(slots=3), "expected at least 4"),
        (dict(slots=16), "16 slots in each of 3 layers take 48 MB and the rest 0 MB, of 40 MB"),
        (dict(skip=60), "fewer tokens to skip than the 60"),
        (dict(policy="mru"), "expected one of"),
    ),
)
def test_bad_input(wrong, match):
    call = dict(trace=made(), memory_nbytes=40 * MB, slots=6, expert_nbytes=MB, costs=COSTS) | wrong
    with pytest.raises(ValueError, match=match):
        pagecache.replay(**call)


# --- what things cost ---


@pytest.mark.parametrize("m", (1, 3, 4))
def test_tokens_made_to_miss(m):
    rows = cost.missing(m, 5, 2, 24, 4, np.random.default_rng(0))
    assert rows.shape == (5, 2, 4)
    hit = pagecache.held(rows, 24, 4, "lru")
    assert (hit[1:].sum(-1) == 4 - m).all()
    for layer in range(2):
        mine = rows[:, layer][~hit[:, layer]]
        assert len(set(mine.tolist())) == len(mine)
    assert len(cost.missing(4, 50, 2, 24, 4, np.random.default_rng(0))) == 6


def test_costs_are_measured(tmp_path):
    tiny_moe.random_model(tmp_path)
    samples = {}
    got = cost.measure_costs(tmp_path, tokens=6, samples=samples)
    values = vars(got)
    assert all(np.isfinite(v) and v >= 0 for v in values.values()) and got.overlap <= 1
    assert got.warm_s_per_byte > 0 and got.cold_s_per_byte > 0 and got.fixed_s > 0
    assert {k for k in samples if k not in ("hit", "miss")} == {
        (s, m) for s in ("cold", "warm") for m in (1, 2, 4, 8)
    }
    assert all(len(s) == 6 for s in samples.values())
    # The line is that of the samples: a layer with K misses from the page cache.
    nbytes = moelab.footprint(tmp_path).expert_nbytes
    line = got.warm_call_s + 8 * nbytes * got.warm_s_per_byte
    assert line == pytest.approx(np.median(samples["warm", 8]), rel=0.5)
    t = made(L=8, E=64, K=8)
    assert pagecache.replay(t, 1e9, 8, expert_nbytes=nbytes, costs=got).token_s.min() >= got.fixed_s
    with pytest.raises(ValueError, match="expected mode stacked or fused, got 'buffers'"):
        cost.measure_costs(tmp_path, moelab.StreamConfig(mode="buffers"))


@pytest.mark.parametrize("top_k", (1, 3, 7, 8))
def test_costs_of_few_experts(top_k, tmp_path):
    path = families.write_checkpoint("qwen3_moe", tmp_path / "m", "affine4")
    E = moelab.footprint(path).num_experts
    if top_k == E:
        with pytest.raises(ValueError, match=f"more experts than a token needs.*got {E} and {E}"):
            cost.measure_costs(path, moelab.StreamConfig(top_k=E, slots=E))
        return
    got = cost.measure_costs(path, moelab.StreamConfig(top_k=top_k), tokens=4)
    assert all(np.isfinite(v) and v >= 0 for v in vars(got).values())
