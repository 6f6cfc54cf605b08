"""``plan`` and ``slots="auto"``: how many slots fit, lend their memory or are given back."""

import ctypes
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from unittest.mock import Mock

import common
import families
import mlx.core as mx
import mlx_lm
import psutil
import pytest
import swap
from common import GB, LONG, MB, PROMPT, TINY_MOE, greedy_logits, loaded, watched
from drafting import steps
from families import K
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

import moelab
from moelab.commands.drafting import open_draft
from moelab.lab import limit
from moelab.memory import FREED_NBYTES, PAGE_S
from moelab.streaming import model as models
from moelab.streaming import plan as plans
from moelab.streaming.facts import FEW_TOKENS
from moelab.streaming.model import load_model
from moelab.streaming.residency.bank import can_empty
from moelab.streaming.room import RESERVE_NBYTES, REST_S, SWAPPED_SHARE, WATCH_S
from moelab.streaming.session import session_of


def parts(plan):
    """The bytes that a plan reserves for everything but slots."""
    return plan.facts.kept_nbytes + plan.caches_nbytes + plan.prompt_nbytes + plan.process_nbytes


def test_all_that_fits_is_in_slots():
    """More memory gives more slots: as many as fit, up to one for every expert."""
    found = [moelab.plan(TINY_MOE, memory_nbytes=n * MB) for n in (*range(140, 176, 4), 240)]
    slots = [p.slots for p in found]
    assert slots == sorted(slots) and 8 <= slots[0] < slots[3] < slots[-1] == 64
    for p in found:  # slots beyond ``prompt_slots`` lend their memory to a prompt
        left = p.memory_nbytes - parts(p) - p.prompt_slots * p.facts.slot_nbytes
        assert left >= 0 and (p.slots == p.num_experts or left < p.facts.slot_nbytes)
        assert p.facts.shape == (8, 8, 64)
        assert p.config.slots == p.slots and p.reason == str(p)
        assert "\n" not in p.reason and f"slots={p.slots} of 64 in each of 8 layers" in p.reason
    assert "nearly all of the memory" in found[3].reason and "every expert" in found[-1].reason


def test_more_slots_than_experts_are_said(run, model_path):
    for slots in (16, 17):
        done = run("generate", model_path, "-p", "a", "-m", 1, "--slots", slots)
        assert done.code is None or done.code == 0
        assert ("slots=16 of 16 in each layer" in done.said) == (slots > 16)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss", "deepseek_v32", "jamba", "llama4"])
def test_caches_are_counted_as_they_grow(name, stored):
    """A plan counts enough bytes for caches of each kind, and at most 2.5 times what they take."""
    path = stored(name)
    p = moelab.plan(path, memory_nbytes=GB, context=300)
    with loaded(path, slots=K) as model:
        caches = make_prompt_cache(model)
        for _ in range(3):
            mx.eval(model(mx.zeros((1, 100), mx.int32), cache=caches))
        taken = sum(c.nbytes for c in caches)
    assert taken <= p.caches_nbytes <= 2.5 * taken
    longer = moelab.plan(path, memory_nbytes=GB, context=3000)
    assert longer.caches_nbytes > p.caches_nbytes and longer.context == 3000


def test_a_long_context_and_what_is_reserved_leave_fewer_slots():
    config = moelab.StreamConfig(memory_nbytes=150 * MB, context=100)
    plain, long = moelab.plan(TINY_MOE, config), moelab.plan(TINY_MOE, config, context=2000)
    less, one = moelab.plan(TINY_MOE, config, texts=10), plain.facts.slot_nbytes
    assert less.reserved_nbytes == 9 * plain.caches_nbytes > one and not plain.reserved_nbytes
    assert plain.slots > long.slots
    assert 0 < plain.slots - less.slots <= -(-less.reserved_nbytes // one)
    assert moelab.plan(TINY_MOE, replace(config, context=2000)) == long
    assert moelab.plan(TINY_MOE, replace(config, slots=9)) == plain  # ``plan`` chooses slots anew
    assert moelab.footprint(TINY_MOE, config) == plain.facts
    said = f"reserved {less.reserved_nbytes / 1e6:.0f} MB"
    assert said in less.reason and "reserved" not in plain.reason
    with pytest.raises(ValueError, match=r"reserved \d+ MB"):
        moelab.plan(TINY_MOE, config, texts=100)


def test_where_slots_take_twice_the_bytes_of_the_file_the_page_cache_gets_the_rest(stored):
    """Experts are bfloat16 on disk, float32 in slots: slots are few until nearly all would fit."""
    path = stored("qwen3_moe", "plain")
    config = moelab.StreamConfig(top_k=1, context=8, kernels="mlx")
    free = moelab.plan(path, config, memory_nbytes=GB)
    found = [
        moelab.plan(path, config, memory_nbytes=parts(free) + n * free.facts.slot_nbytes)
        for n in range(1, 9)
    ]
    slots = [p.slots for p in found]
    few = [i for i, p in enumerate(found) if "few" in p.reason]
    assert few and all(slots[i] == 1 for i in few), slots
    assert all(slots[i] == i + 1 for i in range(8) if i not in few) and slots[-1] == 8


def test_too_little_memory_is_refused_before_a_weight_is_read(monkeypatch):
    no = Mock(side_effect=AssertionError("a weight was read"))
    monkeypatch.setattr(models, "Session", no)
    monkeypatch.setattr(models, "_read_experts", no)
    config = moelab.StreamConfig(memory_nbytes=110 * MB)
    for call in (load_model, moelab.load, moelab.plan, moelab.footprint):
        with pytest.raises(ValueError) as error:
            call(TINY_MOE, config)
        text = str(error.value)
        assert "expected at least 1" in text and "got 110 MB" in text and str(TINY_MOE) in text
        assert "8 slots in each of 8 layers" in text and "backbone" in text and "\n" not in text


@pytest.mark.skipif(not can_empty(), reason="O_DIRECT is Linux's")
def test_the_page_cache_is_left_out_where_it_has_no_room(monkeypatch):
    """The page cache is used if slots or the system leave room or if ``memory_nbytes`` is given."""
    monkeypatch.setattr(plans, "PROCESS_NBYTES", MB)
    # At 60 MB every expert has a slot, and the file does not fit beside the slots.
    sizes = (50, 0), (50, 5), (50, 200), (60, 0), (60, 60), (GB // MB, 0)
    found = [(MB * n, MB * kept) for n, kept in sizes]
    for (memory, kept), direct in zip(found, (True, True, False, True, False, False)):
        monkeypatch.setattr(plans, "_memory", lambda now=(memory, kept): now)
        assert moelab.plan(TINY_MOE).direct == direct
        with loaded(TINY_MOE) as model:
            assert session_of(model).reader.direct == direct
    assert not moelab.plan(TINY_MOE, memory_nbytes=50 * MB).direct


@common.needs_kernels  # MLX's kernels compute logits only if they are used
def test_logits_of_a_prompt_wait_until_they_are_used(tmp_path):
    # The head has 128 rows, as many as a layer's query has.
    path = families.write_checkpoint("qwen3_5_moe", tmp_path / "model", vocab_size=128)
    prompt = mx.array([LONG[: FEW_TOKENS + 1]])

    def run(lazy):
        """Logits of a long and of a short call, the caches, and how often the head multiplied."""
        model = loaded(path, slots=K, lazy_logits=lazy)
        with model, pytest.MonkeyPatch.context() as patch:
            head = model["language_model"]["lm_head"]
            products = watched(patch, type(head), "multiply", lambda m, x: m is head)
            cache = make_prompt_cache(model)
            long, few = model(prompt, cache=cache), model(prompt[:, 1:], cache=cache)
            mx.eval(long, few)
            states = tree_flatten([c.state for c in cache])
            return long, [few, *(a for _, a in states if a is not None)], sum(products)

    (long, rest, products), (long_too, rest_too, products_too) = run(False), run(True)
    assert (products, products_too) == (2, 1)
    assert mx.allclose(long, long_too, atol=1e-4)
    assert all(map(mx.array_equal, rest, rest_too))


def test_logits_take_memory_of_a_prompt_unless_they_wait(tmp_path):
    """A prompt's logits take more memory than a layer if the vocabulary is large."""
    path = families.write_checkpoint("qwen3_5_moe", tmp_path / "model", vocab_size=50_000)
    config = moelab.StreamConfig(kernels="fast", memory_nbytes=300 * MB)
    eager, lazy = (moelab.plan(path, replace(config, lazy_logits=n)) for n in (False, True))
    assert lazy.prompt_tokens > 1.5 * eager.prompt_tokens
    assert lazy.prompt_nbytes < 1.2 * eager.prompt_nbytes


@pytest.mark.parametrize("name", ["lookup", "tiny-draft", "tiny-dflash", "tiny-mtp"])
def test_a_draft_is_left_the_memory_of_its_weights_and_caches(name):
    """A plan reserves the memory that a draft takes at full context, and not much more."""
    draft = open_draft(name if name == "lookup" else TINY_MOE.parent / name)
    config = moelab.StreamConfig(memory_nbytes=200 * MB, context=600)
    assert moelab.plan(TINY_MOE, context=600, draft=draft).config.memory_nbytes is None
    with moelab.load(TINY_MOE, config, draft=draft)[0] as model:
        plan, own = session_of(model).plan, make_prompt_cache(model)
        model(mx.array([[1]]), cache=own)
        states = 17 * sum(c.nbytes for c in own if isinstance(c, ArraysCache))  # for 1 + 16 tokens
        assert "reserved" in plan.reason and states > 0
        if name == "lookup":
            assert (plan.reserved_nbytes, plan.memory_nbytes) == (states, 200 * MB)
            return
        weights = sum(p.nbytes for _, p in tree_flatten(draft.model.parameters()))
        assert plan.memory_nbytes == 200 * MB - weights and weights > MB
        caches = make_prompt_cache(model) + draft.make_cache()
        steps(model, LONG, draft, "auto", 8, prompt_cache=caches)
        caches = caches[-len(draft.make_cache()) :]
        behind = name == "tiny-mtp"  # the first token has no hidden state before it
        assert {c.offset for c in caches if hasattr(c, "offset")} == {598 - behind}
    taken = sum(c.nbytes for c in caches)
    assert taken <= plan.reserved_nbytes - states <= 2.5 * taken


@pytest.mark.parametrize(("mode", "kept"), [("resident", 64), ("serial", 1), ("buffers", 8)])
def test_a_mode_without_slots_has_no_plan(mode, kept):
    config = moelab.StreamConfig(mode)  # slots="auto" is no error
    facts = moelab.footprint(TINY_MOE, config)
    assert facts.slots_nbytes == kept * facts.slot_nbytes > 0
    with pytest.raises(ValueError, match="expected a mode with slots"):
        moelab.plan(TINY_MOE, config)


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_on_a_gpu_its_own_limit_counts(backend, monkeypatch):
    monkeypatch.setattr(plans, "memory_on_gpu", lambda: 300 * MB)
    monkeypatch.setattr(plans, "can_empty", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: backend == "metal")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: backend == "cuda")
    p = moelab.plan(TINY_MOE, moelab.StreamConfig(kernels="mlx"))
    want = (300 * MB, 0) if backend == "metal" else (270 * MB, 30 * MB)
    assert (p.memory_nbytes, p.system_nbytes) == want
    shared = backend == "metal"  # the process and its arrays are in the same memory
    assert p.process_nbytes == (plans.PROCESS_NBYTES if shared else plans.GPU_NBYTES)
    monkeypatch.undo()  # elsewhere some memory is left to the system
    monkeypatch.setattr(plans, "memory_in_cgroups", lambda: None)
    total, free = plans.HERE.memory()
    monkeypatch.setattr(plans.HERE, "memory", lambda: (total, free))  # a host may change the total
    p = moelab.plan(TINY_MOE)
    assert p.memory_nbytes + p.system_nbytes < total
    if not mx.metal.is_available():  # on a Mac more is left
        assert p.system_nbytes == min(total // 10, 4 * GB)


def test_on_a_macs_cpu_a_prompt_keeps_every_state(monkeypatch):
    """The default device decides, not whether the machine has a GPU."""
    if mx.default_device() != mx.cpu:
        pytest.skip("needs the CPU backend")
    config = moelab.StreamConfig(kernels="mlx")
    want = moelab.ModelFacts.of(TINY_MOE, config).token_nbytes
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert moelab.ModelFacts.of(TINY_MOE, config).token_nbytes == want
    monkeypatch.setattr("moelab.streaming.facts.on_metal", lambda: True)
    assert moelab.ModelFacts.of(TINY_MOE, config).token_nbytes < want


def lengths_of(session, patch):
    """A list to which the length of each later call of a model is added."""
    return watched(patch, session, "begin", lambda part, *_: part.shape[1])


def test_a_prompt_longer_than_the_memory_allows_is_computed_in_parts(monkeypatch):
    """Logits and counters are those of one call. The next call gets the same bits, too."""
    # A GPU's kernels depend on a call's length, and the rounding depends on the kernels.
    equal = mx.array_equal if mx.default_device() == mx.cpu else partial(mx.allclose, atol=1e-4)
    prompt = mx.array([LONG[:150]])
    with loaded(TINY_MOE, slots=64) as model:
        cache = make_prompt_cache(model)
        want = [model(prompt, cache=cache), model(prompt[:, :9], cache=cache)]
        mx.eval(want)
        assert session_of(model).plan is None
        tokens = moelab.stats(model).prefill.tokens
    with loaded(TINY_MOE, memory_nbytes=GB, context=40) as model:
        session = session_of(model)
        assert (session.plan.prompt_tokens, session.plan.slots) == (40, 64)
        lengths, cache = lengths_of(session, monkeypatch), make_prompt_cache(model)
        got = [model(prompt, cache=cache), model(prompt[:, :9], cache=cache)]
        assert lengths == [37, 37, 38, 38, 9]
        # MLX computes the logits of all parts but the last, and only when they are used.
        assert mx.allclose(got[0], want[0], atol=1e-4)
        assert equal(got[1], want[1]) and equal(got[0][:, 112:], want[0][:, 112:])
        assert moelab.stats(model).prefill.tokens == tokens == 159
        assert equal(common.in_passes(model, prompt, 40), want[0])  # undivided calls are exact
        lengths.clear()
        mx.eval(model(mx.concatenate([prompt[:, :30]] * 2), cache=make_prompt_cache(model)))
        mx.eval(model(prompt))  # a call without caches cannot be divided
        assert lengths == [15, 15, 150]


@pytest.mark.skipif(not can_empty(), reason="MADV_DONTNEED is Linux's")
@pytest.mark.parametrize("settings", [{}, {"prefetch": "lookahead", "policy": "lfu"}])
def test_slots_lend_their_memory_to_a_prompt(settings):
    """A short prompt borrows less memory. A prompt's last part returns no slot. Texts are equal."""

    def text(model, look):
        cache, tokens = make_prompt_cache(model), []
        for step, *lengths in ((31, 150, 70), (17, 70), (13, 150)):
            for length in lengths:
                ids = [(step * i + 5) % 96 for i in range(length)]
                y = model(mx.array([ids]), cache=cache)
                look(lengths[0])
            for _ in range(6):
                tokens.append(y[:, -1].argmax(-1).item())
                y = model(mx.array([tokens[-1:]]), cache=cache)
                look(1)
        return tokens

    with loaded(TINY_MOE, **settings, slots=60) as model:
        want = text(model, lambda tokens: None)
    with loaded(TINY_MOE, **settings, memory_nbytes=152 * MB) as model:
        session, used = session_of(model), set()
        assert session.config.slots == session.plan.slots
        few, some, many = (session.plan.slots_beside(tokens) for tokens in (150, 70, FEW_TOKENS))
        assert 8 <= session.plan.prompt_slots <= few < some < many == session.plan.slots < 60

        def look(tokens):
            for layer in session.layers:
                assert layer.slots.table.num_slots == {150: few, 70: some, 1: many}[tokens]
                used.add((tokens, max(layer.slots.table.slot_of.values())))

        assert text(model, look) == want
        assert max(slot for tokens, slot in used if tokens == 150) < few
        assert few <= max(slot for _, slot in used) < many


@pytest.mark.skipif(not can_empty(), reason="MADV_DONTNEED is Linux's")
def test_an_empty_slot_has_no_memory_and_can_be_written_again():
    with loaded(TINY_MOE, slots=40) as model:
        bank = session_of(model).layers[0].slots.bank
        for written in (7, 9):
            for buffer in bank._buffers:
                buffer.rows[:] = written
            before = psutil.Process().memory_info().rss
            bank.empty(8, 40)
            freed = before - psutil.Process().memory_info().rss
            assert freed > 0.8 * 32 * bank.expert_nbytes and bank.nbytes == 8 * bank.expert_nbytes
            assert all((buffer.rows[:8] == written).all() for buffer in bank._buffers)


@pytest.fixture
def room(monkeypatch):
    """A function that lets each call find memory for ``slots`` slots and ``more`` bytes."""
    monkeypatch.setattr("moelab.streaming.room.LOOK_S", 0.0)

    def set_room(model, slots, more=0):
        session = session_of(model)
        nbytes = slots * session.plan.facts.slot_nbytes + more

        def memory_now():
            left = nbytes - session.residency.nbytes
            return left, left

        monkeypatch.setattr("moelab.streaming.room.memory_now", memory_now)

    return set_room


@pytest.mark.parametrize("prefetch", ["none", "lookahead"])
def test_slots_are_given_back_when_memory_gets_short(prefetch, room):
    """Slots fall to K, each time with a warning, and return with free memory. Texts stay equal."""
    fields = {"prefetch": prefetch, "kernels": "mlx"}
    with loaded(TINY_MOE, **fields, slots=64) as model:
        want = greedy_logits(model, PROMPT, 12).argmax(-1).tolist()
    with loaded(TINY_MOE, **fields) as model:
        session, used = session_of(model), []
        greedy_logits(model, PROMPT, 1)  # the first call takes more memory
        few = session.plan.call_nbytes(len(PROMPT)) + RESERVE_NBYTES + MB

        def text(slots, more=few):
            room(model, slots, more)
            assert greedy_logits(model, PROMPT, 12).argmax(-1).tolist() == want
            used.append(session.room.slots)
            assert {layer.slots.table.num_slots for layer in session.layers} == {used[-1]}

        text(64)
        slots, before = session.plan.facts.slot_nbytes, mx.get_active_memory()
        with pytest.warns(RuntimeWarning, match="memory is short") as said:
            text(40)
            text(8)
            for more in (0, -MB, -2 * MB):
                with pytest.raises(MemoryError, match="with 8 slots in each layer, the fewest"):
                    text(8, more)
        more = session.plan.call_nbytes(len(PROMPT)) / slots  # more than a token takes
        assert all(0 <= n - want <= more + 1 for n, want in zip(used, (64, 40, 8))), used
        lines = [str(w.message) for w in said if w.category is RuntimeWarning]
        assert "slots 64 -> " in lines[0] and "-> 8 in each layer" in lines[-1]
        text(64, 200 * MB)
        assert used[-1] == (64 if can_empty() else 8)
        assert can_empty() or before - mx.get_active_memory() >= 50 * slots


@pytest.mark.skipif(not can_empty(), reason="MADV_DONTNEED is Linux's")
def test_a_prompt_gets_along_with_less_memory(room, monkeypatch):
    """A prompt gets fewer slots (even between two layers) or smaller parts, or is refused."""
    prompt = mx.array([LONG[:500]])
    with loaded(TINY_MOE) as model:
        session = session_of(model)
        lengths = lengths_of(session, monkeypatch)

        def logits():
            lengths.clear()
            return model(prompt, cache=make_prompt_cache(model))[:, -1]

        want, need = logits(), session.plan.call_nbytes
        mx.eval(want)
        room(model, 20, need(500) + RESERVE_NBYTES + MB)
        assert mx.allclose(logits(), want, atol=1e-4) and lengths == [500]
        assert 8 < session.layers[0].slots.table.num_slots <= 22
        room(model, 8, need(200) + MB)
        assert mx.allclose(logits(), want, atol=1e-4) and max(lengths) <= 200 < sum(lengths)
        room(model, 8, need(32) // 2)
        with pytest.raises(MemoryError, match="Close other programs"):
            logits()
        room(model, 64, 200 * MB)
        assert mx.allclose(logits(), want, atol=1e-4) and lengths == [500]
        model(prompt[:, :1])  # after a token all slots are there again
        many, looks = session.layers[0].slots.table.num_slots, count(1)
        now = "moelab.streaming.room.memory_now"
        monkeypatch.setattr(now, lambda: ((-50 if next(looks) == 3 else 200) * MB,) * 2)
        assert mx.allclose(logits(), want, atol=1e-4)
        assert 8 <= session.layers[0].slots.table.num_slots < many


@pytest.mark.parametrize("empties", [True, False])
def test_slots_are_given_back_while_they_are_swapped(empties, room, monkeypatch):
    """Swapping both in and out reduces slots to K, with one warning. Slots return after a rest."""
    clock, swapped = [0.0], [0.0, 0.0]
    monkeypatch.setattr("moelab.streaming.room.perf_counter", lambda: clock[0])
    monkeypatch.setattr("moelab.streaming.room.swapped_s", lambda: tuple(swapped))
    with loaded(TINY_MOE) as model:
        session, cache = session_of(model), make_prompt_cache(model)
        kept = session.room
        if not (can_empty() or mx.metal.is_available()):
            pytest.skip("a GPU's own memory is not swapped")
        room(model, 64, 900 * MB)  # the system reports enough free memory

        def slots(seconds, back, out, every=WATCH_S):
            """The slots after ``seconds``, of which swapping in and out takes these shares."""
            for _ in range(round(seconds / every)):
                clock[0] += every
                swapped[:] = swapped[0] + back * every, swapped[1] + out * every
                mx.eval(model(mx.array([[5]]), cache=cache))
            assert {layer.slots.table.num_slots for layer in session.layers} == {kept.slots}
            return kept.slots

        assert slots(5, 0.01, 0.9) == slots(5, 0.9, 0.01) == slots(5, 0.01, 0.01) == 64
        monkeypatch.setattr("moelab.streaming.room.can_empty", lambda: empties)
        with pytest.warns(RuntimeWarning, match="swaps this model's memory: slots 64 -> ") as said:
            first = slots(2 * WATCH_S, 0.03, 0.03)
            assert first == (56 if empties else 48)
            soon = slots(5, 0.03, 0.03)
            assert soon < 40 if empties else soon == 48
            assert slots(60, 0.03, 0.03) == session.plan.top_k == 8
        assert len([w for w in said if w.category is RuntimeWarning]) == 1
        assert slots(REST_S - 1, 0, 0) == 8  # a rest counts from the last swapping
        if empties and can_empty():
            assert 8 < slots(REST_S, 0, 0) < 12
            with pytest.warns(RuntimeWarning, match="swaps"):
                assert slots(3, 0.03, 0.03) == 8  # the next rest is twice as long
            assert slots(2 * REST_S - 3, 0, 0) == 8
            assert slots(60 * REST_S, 0, 0, every=10.0) == 64


def test_on_metal_few_freed_arrays_are_kept_and_planned(room, monkeypatch):
    """Prompts leave arrays of many sizes, and MLX would keep gigabytes of them."""
    monkeypatch.setattr(plans, "_memory", lambda: (4 * GB, GB))
    for module in ("session", "plan"):
        monkeypatch.setattr(f"moelab.streaming.{module}.on_metal", lambda: True)
    assert plans._for_a_model()[0].some <= 4 * GB - FREED_NBYTES
    limits = watched(monkeypatch, mx, "set_cache_limit", lambda nbytes: nbytes)
    with loaded(TINY_MOE, slots=8) as model:
        model(mx.array([[5]]))
    assert len(limits) == 2 and limits[0] == FREED_NBYTES != limits[1]  # the limit, MLX's own again
    with loaded(TINY_MOE, memory_nbytes=GB) as model:
        token = mx.array([[5]])
        model(token)
        few = session_of(model).plan.call_nbytes(1) + RESERVE_NBYTES + MB
        for slots, calls in (64, 2), (40, 4):  # no limit while each expert has a slot
            room(model, slots, few)
            model(token)
            model(token)
            assert len(limits) == calls


def test_a_gpu_that_is_short_of_a_slot_gives_an_eighth(room, monkeypatch):
    """A GPU's slots are made anew, and all experts are read again."""
    monkeypatch.setattr("moelab.streaming.room.can_empty", lambda: False)
    with loaded(TINY_MOE) as model:
        mx.eval(model(mx.array([[5]])))
        room(model, 63, session_of(model).plan.call_nbytes(1) + RESERVE_NBYTES)
        mx.eval(model(mx.array([[5]])))
        assert session_of(model).room.slots == 56


IN_A_CGROUP = """
import json, sys, moelab, mlx_lm, numpy as np
from moelab.streaming.session import session_of
model, tokenizer = moelab.load(sys.argv[1])
session, slots, taken = session_of(model), [], []
text = mlx_lm.generate(model, tokenizer, sys.argv[2], max_tokens=8)
for _ in mlx_lm.stream_generate(model, tokenizer, "def main():", max_tokens=120):
    slots.append(session.room.slots)
    if slots[-1] > 16:
        taken.append(np.ones(1_500_000, np.uint8))
print(json.dumps([session.plan.slots, session.plan.reason, text, slots]))
"""


def test_in_a_cgroup_it_runs_or_is_refused_and_is_never_killed(limits):
    """Each process has a cgroup of its own. A process that fills its cgroup gives slots back."""
    text = next((TINY_MOE / "heldout").glob("*.py")).read_text()[:1200]
    argv = [sys.executable, "-c", IN_A_CGROUP, str(TINY_MOE), text]
    refused, few = (limit.run(argv, nbytes) for nbytes in (150 * MB, 250 * MB))
    assert not refused.killed and refused.returncode == 1 and "DoesNotFit: " in refused.stderr
    assert "expected at least 1" in refused.stderr.splitlines()[-1]
    assert not few.killed and few.returncode == 0 and "memory is short" in few.stderr, few.stderr
    planned, reason, few_text, slots = json.loads(few.stdout.splitlines()[-1])
    assert 16 < planned <= 64 and f"slots={planned} of 64" in reason
    assert slots == sorted(slots, reverse=True) and slots[0] > 16 >= slots[-1] >= 8
    model, tokenizer = moelab.load(TINY_MOE)
    with model:
        assert mlx_lm.generate(model, tokenizer, text, max_tokens=8) == few_text


def test_a_system_without_the_programs_of_swap_says_so(monkeypatch, tmp_path):
    """Debian has ``swapon`` and ``swapoff`` on the PATH of root only."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(swap.NoSwap, match="may not swap to a file"), swap.swapping(MB, MB):
        pass


@pytest.mark.skipif(
    os.environ.get("MOELAB_SYSTEM_TESTS") != "1", reason="swaps only with MOELAB_SYSTEM_TESTS=1"
)
def test_a_model_that_is_swapped_gives_slots_back():
    """A real swap file is used. The system reports enough free memory."""
    rows = []
    try:
        with (
            swap.swapping(600 * MB, 900 * MB) as prepared,
            swap.started(
                prepared, "decode", TINY_MOE, swap.VARIANTS[0], 14, 0.25, hidden=True
            ) as model,
            swap.started(prepared, "take", 10 * MB) as other,
        ):
            for line in model.stdout:
                rows.append(json.loads(line))
                if len(rows) == 1:
                    group = prepared.group
                    held = next(group.glob("memory.current"), group / "memory.usage_in_bytes")
                    prepared.move(int(held.read_text()))
                if rows[-1]["slots"] < rows[0]["slots"]:
                    return
                if rows[-1]["faults"] * PAGE_S < SWAPPED_SHARE * rows[-1]["decode_s"]:
                    with suppress(BrokenPipeError):
                        other.stdin.write("more\n")
            if model.wait() < 0 or other.poll() is not None:
                pytest.skip("the system killed a program before the model was swapped for long")
    except (swap.NoSwap, limit.NoLimit) as e:
        pytest.skip(str(e))
    raise AssertionError(f"no slot was given back: {rows}")


HOLES = """
import ctypes, sys, moelab
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]
libc.mallinfo2.restype = Info
moelab.load(sys.argv[1], moelab.StreamConfig(memory_nbytes=int(sys.argv[2])))
libc.free(libc.malloc(31 << 20))  # after which glibc keeps arrays of up to 31 MB in its heap
before = libc.mallinfo2().d  # how many are mapped by themselves
libc.malloc(30 << 20)  # larger than any hole that loading left
print(libc.mallinfo2().d - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_where_memory_is_short_large_arrays_are_returned_at_once():
    sizes = GB, 155 * MB
    assert [moelab.plan(TINY_MOE, memory_nbytes=n).slots < 64 for n in sizes] == [False, True]
    for nbytes, mapped in zip(sizes, "01"):
        done = limit.run([sys.executable, "-c", HOLES, str(TINY_MOE), str(nbytes)])
        assert done.stdout.strip() == mapped, done
