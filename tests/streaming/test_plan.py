"""``plan`` and ``slots="auto"``: how many slots fit, and what happens where too few do."""

from dataclasses import replace
from unittest.mock import Mock

import families
import mlx.core as mx
import pytest
from common import GB, LONG, MB, TINY_MOE
from families import K
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

import moelab
from moelab import kernels
from moelab.commands.drafting import open_draft
from moelab.speculation.generate import speculative_generate_step
from moelab.streaming import model as models
from moelab.streaming import plan as plans
from moelab.streaming.handover import FEW_TOKENS
from moelab.streaming.model import load_model
from moelab.streaming.residency.bank import can_empty
from moelab.streaming.session import session_of


def parts(plan):
    """What a plan reserves, slots apart."""
    return plan.facts.kept_nbytes + plan.caches_nbytes + plan.prompt_nbytes + plan.process_nbytes


def test_all_that_fits_is_in_slots():
    """The more memory the more slots, to the last one that fits, up to one for every expert."""
    found = [moelab.plan(TINY_MOE, memory_nbytes=n * MB) for n in range(140, 176, 4)]
    slots = [p.slots for p in found]
    assert slots == sorted(slots) and 8 <= slots[0] < slots[3] < slots[-1] == 64
    for p in found:  # the other slots lend their memory to a prompt
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
def test_caches_are_counted_as_they_grow(name, tmp_path):
    """For a hybrid, a sliding window, a cache of two, a Mamba and a chunked one: not too few."""
    path = families.write_checkpoint(name, tmp_path / "model", "affine4")
    p = moelab.plan(path, memory_nbytes=GB, context=300)
    with load_model(path, moelab.StreamConfig(slots=K))[0] as model:
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
    assert moelab.plan(TINY_MOE, replace(config, slots=9)) == plain  # its slots are chosen anew
    assert moelab.footprint(TINY_MOE, config) == plain.facts
    said = f"reserved {less.reserved_nbytes / 1e6:.0f} MB"
    assert said in less.reason and "reserved" not in plain.reason
    with pytest.raises(ValueError, match=r"reserved \d+ MB"):
        moelab.plan(TINY_MOE, config, texts=100)


def test_where_slots_take_twice_the_bytes_of_the_file_the_page_cache_gets_the_rest(tmp_path):
    """Experts in bfloat16, float32 in their slots: few slots, until nearly every expert fits."""
    path = families.write_checkpoint("qwen3_moe", tmp_path / "model", "plain")
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
    """Not if the caller names the memory, if few slots leave it room, or if the system has more.

    At 60 MB every expert has a slot, and the file does not fit beside them.
    """
    monkeypatch.setattr(plans, "PROCESS_NBYTES", MB)
    sizes = (50, 0), (50, 5), (50, 200), (60, 0), (60, 60), (GB // MB, 0)
    found = [(MB * n, MB * kept) for n, kept in sizes]
    for (memory, kept), direct in zip(found, (True, True, False, True, False, False)):
        monkeypatch.setattr(plans, "_memory", lambda now=(memory, kept): now)
        assert moelab.plan(TINY_MOE).direct == direct
    assert not moelab.plan(TINY_MOE, memory_nbytes=50 * MB).direct


@pytest.mark.skipif(not kernels.available(), reason="MLX's kernels always wait")
def test_logits_of_a_prompt_wait_until_they_are_used(tmp_path, monkeypatch):
    monkeypatch.setitem(families.COMMON, "vocab_size", 128)  # as many as a layer's query has rows
    path = families.write_checkpoint("qwen3_5_moe", tmp_path / "model", "affine4")
    prompt = mx.array([LONG[: FEW_TOKENS + 1]])

    def run(lazy):
        """Logits of a long and of a short call, the caches, and how often the head multiplied."""
        config = moelab.StreamConfig(slots=K, lazy_logits=lazy)
        with load_model(path, config)[0] as model, monkeypatch.context() as patch:
            head = model["language_model"]["lm_head"]
            products, multiply = [], type(head).multiply
            patch.setattr(
                type(head), "multiply", lambda m, x: products.append(m is head) or multiply(m, x)
            )
            cache = make_prompt_cache(model)
            long, few = model(prompt, cache=cache), model(prompt[:, 1:], cache=cache)
            mx.eval(long, few)
            states = tree_flatten([c.state for c in cache])
            return long, [few, *(a for _, a in states if a is not None)], sum(products)

    (long, rest, products), (long_too, rest_too, products_too) = run(False), run(True)
    assert (products, products_too) == (2, 1)
    assert mx.allclose(long, long_too, atol=1e-4)
    assert all(map(mx.array_equal, rest, rest_too))


def test_logits_take_memory_of_a_prompt_unless_they_wait(tmp_path, monkeypatch):
    """With a large vocabulary they take more, behind the last layer, than a layer does."""
    V, config = 50_000, moelab.StreamConfig(kernels="fast", memory_nbytes=300 * MB)
    monkeypatch.setitem(families.COMMON, "vocab_size", V)
    path = families.write_checkpoint("qwen3_5_moe", tmp_path / "model", "affine4")
    eager, lazy = (moelab.plan(path, replace(config, lazy_logits=n)) for n in (False, True))
    assert lazy.prompt_tokens > 1.5 * eager.prompt_tokens
    assert lazy.prompt_nbytes < 1.2 * eager.prompt_nbytes


@pytest.mark.parametrize("name", ["lookup", "tiny-draft", "tiny-dflash", "tiny-mtp"])
def test_a_draft_is_left_the_memory_of_its_weights_and_caches(name):
    """What it takes in a text as long as the context, and not much more."""
    draft = open_draft(name if name == "lookup" else TINY_MOE.parent / name)
    config = moelab.StreamConfig(memory_nbytes=200 * MB, context=600)
    assert moelab.plan(TINY_MOE, context=600, draft=draft).config.memory_nbytes is None
    with moelab.load(TINY_MOE, config, draft=draft)[0] as model:
        plan, own = session_of(model).plan, make_prompt_cache(model)
        model(mx.array([[1]]), cache=own)
        states = 17 * sum(c.nbytes for c in own if isinstance(c, ArraysCache))  # 1 + 16 tokens'
        assert "reserved" in plan.reason and states > 0
        if name == "lookup":
            assert (plan.reserved_nbytes, plan.memory_nbytes) == (states, 200 * MB)
            return
        weights = sum(p.nbytes for _, p in tree_flatten(draft.model.parameters()))
        assert plan.memory_nbytes == 200 * MB - weights and weights > MB
        caches = make_prompt_cache(model) + draft.make_cache()
        given = {"max_tokens": 8, "prompt_cache": caches}
        list(speculative_generate_step(mx.array(LONG), model, draft, **given))
        caches = caches[-len(draft.make_cache()) :]
        behind = name == "tiny-mtp"  # the first token has no hidden state before it
        assert {c.offset for c in caches if hasattr(c, "offset")} == {598 - behind}
    taken = sum(c.nbytes for c in caches)
    assert taken <= plan.reserved_nbytes - states <= 2.5 * taken


@pytest.mark.parametrize(("mode", "kept"), [("resident", 64), ("serial", 1), ("buffers", 8)])
def test_a_mode_without_slots_has_no_plan(mode, kept):
    facts = moelab.footprint(TINY_MOE, config := moelab.StreamConfig(mode))  # auto does not stop it
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


def test_some_memory_is_left_to_the_system(monkeypatch):
    monkeypatch.setattr(plans, "memory_in_cgroups", lambda: None)
    p = moelab.plan(TINY_MOE)
    total = plans.psutil.virtual_memory().total
    assert p.system_nbytes == min(total // 10, 4 * GB) and p.memory_nbytes + p.system_nbytes < total
