"""Prefetching changes when experts are read, never the model's output."""

import dataclasses
import os
import threading
import time

import families
import mlx.core as mx
import numpy as np
import pytest
from families import E, K
from faults import patch_preadv, read_in_threads
from greedy import greedy_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from needs import needs_kernels

import moelab
from moelab import kernels
from moelab.kernels import modules
from moelab.streaming import prefetch
from moelab.streaming.model import load_model
from moelab.streaming.reading import reader
from moelab.streaming.residency import layer
from moelab.streaming.residency.residency import Residency
from moelab.streaming.residency.table import EVICTION, SlotTable
from moelab.streaming.session import session_of

TINY_MOE = moelab.DATA / "models" / "tiny-moe"
SLOTS = 16
PROMPT = [5, 36, 67, 2, 33, 64, 95, 30, 61]
PREFETCHERS = ("lookahead", "oracle", *(["router"] if modules.available() else []))


def decode(model, steps):
    return greedy_logits(model, PROMPT, steps)[1:]


@pytest.fixture(scope="module")
def want():
    """Logits of 40 steps of tiny-moe, their trace and what they cost."""
    with load_model(TINY_MOE, moelab.StreamConfig(slots=SLOTS))[0] as model:
        with moelab.record(model) as trace:
            logits = decode(model, 40)
        return logits, trace, moelab.stats(model).decode


def run(name, want, steps=40, **fields):
    """Counters of decoding to the logits of ``want``; closing the model ends its threads."""
    config = moelab.StreamConfig(**{"slots": SLOTS, **fields}, prefetch=name)
    others = {*threading.enumerate()}
    with load_model(TINY_MOE, config)[0] as model:
        if name == "oracle":
            session_of(model).prefetcher.set_trace(want[1])
        np.testing.assert_array_equal(decode(model, steps), want[0][:steps])
        found = moelab.stats(model).decode
    assert not any(t.name.startswith("moelab") for t in {*threading.enumerate()} - others)
    return found


SETTINGS = {policy: {"policy": policy} for policy in EVICTION}
SETTINGS |= {"direct": {"reads": "direct"}, "stacked": {"mode": "stacked"}}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("slots", [8, 16, 40])
@pytest.mark.parametrize("name", PREFETCHERS)
def test_the_same_logits_and_counters_that_add_up(name, slots, setting, want):
    c = run(name, want, slots=slots, **SETTINGS[setting])
    assert c.hits + c.misses == want[2].hits + want[2].misses
    assert c.prefetch_used + c.prefetch_wasted <= c.prefetch_issued
    assert c.prefetch_late <= c.prefetch_used <= c.hits
    assert c.prefetch_used > 0 and c.prefetch_saved_s > 0


def test_the_oracle_is_the_bound(want, monkeypatch):
    real = Residency.prefetch

    def prefetch(self, i, *args):
        """Every read ends before its layer's call, however busy the machine is."""
        real(self, i, *args)
        if (job := self.layers[i].job) is not None:
            job.wait()

    monkeypatch.setattr(Residency, "prefetch", prefetch)
    oracle, ahead = run("oracle", want), run("lookahead", want)
    assert oracle.prefetch_wasted == 0
    assert oracle.misses < ahead.misses < want[2].misses
    other = moelab.Trace(want[1].experts[:, :-1], want[1].phase, want[1].tokens)
    with pytest.raises(ValueError, match="expected a trace of 8 layers, got 7"):
        run("oracle", (want[0], other))


@pytest.mark.parametrize("name", PREFETCHERS)
def test_slow_reads_are_waited_for(name, want, monkeypatch):
    """A slow disk: some experts arrive late, none is used before it has arrived."""
    preadv = os.preadv

    def slow(fd, views, offset):
        time.sleep(0.0003)
        views[0][:1] = b"\xa5"  # a slot that is used too early gives a wrong result
        return preadv(fd, views, offset)

    patch_preadv(monkeypatch, slow)
    assert run(name, want, steps=12).prefetch_late > 0


def test_a_prefetch_that_fails_is_read_again(want, monkeypatch):
    preadv, count = os.preadv, [0]

    def flaky(fd, views, offset):
        count[0] += 1
        if threading.current_thread().name.startswith("moelab-prefetch") and count[0] % 20 == 0:
            views[0][:] = b"\xa5" * len(views[0])
            raise OSError(5, "Input/output error")
        return preadv(fd, views, offset)

    patch_preadv(monkeypatch, flaky)
    c = run("lookahead", want)
    assert c.misses > 0 and c.prefetch_used > 0


def test_prefetching_gives_way_until_all_reads_of_a_layer_have_ended(want, monkeypatch):
    read_in_threads(monkeypatch)
    monkeypatch.setattr(layer, "PART_NBYTES", 1)  # as with large experts, which are read in parts
    demanded, preadv = [], os.preadv
    start, end = reader.Reader.start, reader.Reader._end_demand

    def ends(self):
        assert all(read.done() for read in demanded)
        end(self)

    def starts(*args):
        demanded.extend(reads := start(*args))
        return reads

    patch_preadv(monkeypatch, lambda *args: time.sleep(0.0003) or preadv(*args))
    monkeypatch.setattr(reader.Reader, "start", starts)
    monkeypatch.setattr(reader.Reader, "_end_demand", ends)
    assert run("lookahead", want, steps=12).prefetch_issued


@needs_kernels
def test_what_a_prompt_reads_ahead_is_counted_as_its_own():
    config = moelab.StreamConfig(slots=SLOTS, reads="direct", prefetch="lookahead")
    with load_model(TINY_MOE, config)[0] as model:
        model(mx.array([PROMPT * 40]))
        stats = moelab.stats(model)
        assert stats.prefill.prefetch_issued and stats.decode == type(stats.decode)()


# Their blocks take more than the hidden state: token ids, or the routing itself.
REFUSED = {"deepseek_v41", "gemma4", "gemma4_text"}


@pytest.mark.parametrize("name", sorted(set(families.FAMILIES) - set(families.EXPERTS_ONLY)))
def test_lookahead_in_every_family(name, tmp_path):
    """The router can be asked before its layer is called, or loading the family is refused."""
    path = families.write_checkpoint(name, tmp_path / name, "affine4")
    config = moelab.StreamConfig(slots=K + 1)
    ahead = dataclasses.replace(config, prefetch="lookahead")
    if name in REFUSED:
        with pytest.raises(ValueError, match="lookahead': .*Use prefetch='none'"):
            load_model(path, ahead)
        return
    with load_model(path, config)[0] as plain, load_model(path, ahead)[0] as model:
        np.testing.assert_array_equal(decode(model, 4), decode(plain, 4))


@settings(deadline=None, max_examples=150, derandomize=True)
@given(data=st.data(), slots=st.integers(K, E), policy=st.sampled_from([*EVICTION]))
def test_reserved_slots(data, slots, policy):
    """Whatever the order of calls and guesses, no slot holds two experts and none gets lost.

    Reserving slots for a guess evicts no expert that the guess contains.
    """
    table, reserved = SlotTable(slots, policy), {}
    some = st.lists(st.integers(0, E - 1), unique=True, max_size=min(slots, E))
    for _ in range(data.draw(st.integers(1, 12))):
        experts = data.draw(some)
        if data.draw(st.booleans()) and not reserved:
            held = set(table.slot_of)
            reserved = table.reserve(experts)
            assert held & set(experts) <= set(table.slot_of)
            assert not set(reserved) & set(table.slot_of)
        elif len(experts) + len(reserved) <= slots:
            _, misses = table.choose(experts)
            assert not set(misses.values()) & set(reserved.values())
            table.commit(misses)
        for e in list(reserved):
            kind = data.draw(st.sampled_from(["keep", "release", "wait"]))
            if kind == "keep" and e not in table.slot_of:
                table.commit({e: reserved.pop(e)})
            elif kind != "wait":
                table.release([reserved.pop(e)])
        taken = [*table.slot_of.values(), *table._free, *reserved.values()]
        assert sorted(taken) == list(range(slots))


@needs_kernels
def test_a_router_asked_early_in_a_pass_of_several_tokens(want):
    """A verify pass asks for all its tokens; the logits are those of the same pass without."""
    tokens = mx.array([[*PROMPT, 7, 11, 13]])
    found = []
    for name in ("none", "router"):
        config = moelab.StreamConfig(slots=48, prefetch=name)
        with load_model(TINY_MOE, config)[0] as model:
            cache = make_prompt_cache(model)
            found.append([np.array(model(tokens[:, i : i + 4], cache=cache)) for i in (0, 4, 8)])
            assert (moelab.stats(model).prefill.prefetch_used > 0) == (name == "router")
    np.testing.assert_array_equal(*found)


@needs_kernels
def test_a_wrong_router_keeps_what_is_likely_and_reads_nothing_more(want, monkeypatch):
    """Of the 2K likeliest none is evicted; a layer whose guesses are wrong stops reading."""
    reserve, kept = SlotTable.reserve, []

    def checked(self, experts, keep=()):
        held = {*keep} & {*self.slot_of}
        slots = reserve(self, experts, keep)
        assert held <= {*self.slot_of}
        kept.append(len(held))
        return slots

    def wrong(self, layer, needed):
        learn(self, layer, set())

    monkeypatch.setattr(SlotTable, "reserve", checked)
    issued = run("router", want).prefetch_issued
    assert any(kept)
    learn = prefetch.Router.learn
    monkeypatch.setattr(prefetch.Router, "learn", wrong)
    assert 0 < run("router", want).prefetch_issued < issued / 2


@pytest.mark.parametrize("name, kernels", [("qwen3_moe", "mlx"), ("gpt_oss", "auto")])
def test_a_router_that_cannot_be_asked_early_is_refused(name, kernels, tmp_path):
    path = families.write_checkpoint(name, tmp_path / name, "affine4")
    config = moelab.StreamConfig(slots=K + 1, prefetch="router", kernels=kernels)
    with pytest.raises(ValueError, match="router': model.layers.*Use prefetch='lookahead' or"):
        load_model(path, config)


@needs_kernels
@pytest.mark.parametrize("layers, top_k, slots", [(1, K, K), (2, 1, 2), (2, E, E), (2, E, 2 * E)])
@pytest.mark.parametrize("name", PREFETCHERS)
def test_one_layer_and_any_number_of_experts(
    name, layers, top_k, slots, tmp_path, small_matrices, monkeypatch
):
    """A layer that is guessed while it runs keeps its experts; of all E none is left out."""
    family = families.Family({"num_hidden_layers": layers})
    monkeypatch.setitem(families.FAMILIES, "qwen3_moe", family)
    path = families.write_checkpoint("qwen3_moe", tmp_path / "model", "affine4")
    config = moelab.StreamConfig(slots=slots, top_k=top_k, kernels="fast")
    with load_model(path, config)[0] as model, moelab.record(model) as trace:
        want = decode(model, 20)
    with load_model(path, dataclasses.replace(config, prefetch=name))[0] as model:
        if name == "oracle":
            session_of(model).prefetcher.set_trace(trace)
        np.testing.assert_array_equal(decode(model, 20), want)
        assert moelab.stats(model).decode.prefetch_used or (name, layers) != ("oracle", 1)


@needs_kernels
def test_every_text_of_a_batch_is_asked_for_ahead(hybrid, small_matrices):
    """A look-ahead guesses for all tokens of a call, not for the first alone."""
    config = moelab.StreamConfig(slots=8, kernels="fast", prefetch="lookahead")
    with load_model(hybrid, config)[0] as model:
        prefetcher = session_of(model).prefetcher
        block = next(m for m in model.modules() if hasattr(m, "route"))
        x = kernels.Rows(np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32))
        layer, routed = prefetcher.guess(0, prefetcher.ask(0, x))
        assert layer == 1 and routed.shape == block.route(x).shape == (3, K)
