"""Prefetching changes when experts are read, never the model's output."""

import itertools
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import families
import mlx.core as mx
import numpy as np
import pytest
from common import PROMPT, TINY_MOE, greedy_logits, loaded, needs_kernels
from families import E, K
from faults import patch_preadv, read_in_parts
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab import kernels
from moelab.kernels import modules
from moelab.streaming import prefetch
from moelab.streaming.reading import reader
from moelab.streaming.residency.residency import Residency
from moelab.streaming.residency.table import EVICTION, SlotTable
from moelab.streaming.session import session_of
from moelab.streaming.trial import Trial
from moelab.system import on_metal

SLOTS = 16
PREFETCHERS = ["lookahead", "oracle", *["router"] * modules.available()]
PREFETCHERS += ["auto"] * (modules.available() or on_metal())


def decode(model, steps):
    return greedy_logits(model, PROMPT, steps)[1:]


@pytest.fixture(scope="module")
def want():
    """Logits of 40 steps of tiny-moe without prefetch, their trace and their counters."""
    with loaded(TINY_MOE, slots=SLOTS, prefetch="none") as model:
        with moelab.record(model) as trace:
            logits = decode(model, 40)
        return logits, trace, moelab.stats(model).decode


def run(name, want, steps=40, **fields):
    """Decode, compare with the logits in ``want``, return counters. Closing ends all threads."""
    others = {*threading.enumerate()}
    with loaded(TINY_MOE, **{"slots": SLOTS, **fields}, prefetch=name) as model:
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
        while not all(group.reads.done() for group in self.layers[i].ahead):
            time.sleep(1e-4)

    monkeypatch.setattr(Residency, "prefetch", prefetch)
    oracle, ahead = run("oracle", want), run("lookahead", want)
    assert oracle.prefetch_wasted == 0
    assert oracle.misses < ahead.misses < want[2].misses
    other = moelab.Trace(want[1].experts[:, :-1], want[1].phase, want[1].tokens)
    with pytest.raises(ValueError, match="expected a trace of 8 layers, got 7"):
        run("oracle", (want[0], other))


@pytest.mark.parametrize("name", PREFETCHERS)
def test_slow_reads_are_waited_for(name, want, monkeypatch):
    def slow(preadv, fd, views, offset):
        time.sleep(0.0003)
        views[0][:1] = b"\xa5"  # a slot that is used too early gives a wrong result
        return preadv(fd, views, offset)

    patch_preadv(monkeypatch, slow)
    assert run(name, want, steps=12).prefetch_late > 0


def test_a_prefetch_that_fails_is_read_again(want, monkeypatch):
    count = itertools.count()

    def flaky(preadv, fd, views, offset):
        if next(count) % 20 == 0 and threading.current_thread().name.startswith("moelab-prefetch"):
            views[0][:] = b"\xa5" * len(views[0])
            raise OSError(5, "Input/output error")
        return preadv(fd, views, offset)

    patch_preadv(monkeypatch, flaky)
    c = run("lookahead", want)
    assert c.misses > 0 and c.prefetch_used > 0


def test_prefetching_gives_way_until_all_reads_of_a_layer_have_ended(want, monkeypatch):
    read_in_parts(monkeypatch)
    demanded, start = [], reader.Reader.start

    class Quiet(reader.Event):
        def set(self):
            assert all(read.done() for read in demanded)
            super().set()

    patch_preadv(monkeypatch, lambda preadv, *args: time.sleep(0.0003) or preadv(*args))
    monkeypatch.setattr(
        reader.Reader, "start", lambda *args: demanded.extend(new := start(*args)) or new
    )
    monkeypatch.setattr(reader, "Event", Quiet)
    assert run("lookahead", want, steps=12).prefetch_issued


UNASKED = "lookahead': .*Use prefetch='none'"


@pytest.mark.parametrize("name", sorted(set(families.FAMILIES) - set(families.EXPERTS_ONLY)))
def test_lookahead_in_every_family(name, stored):
    """The router can be asked before its layer is called, or loading the family is refused."""
    path, ahead = stored(name), {"slots": K + 1, "prefetch": "lookahead"}
    # These families' blocks take more than the hidden state: token ids, or the routing itself.
    if name in ("deepseek_v41", "gemma4", "gemma4_text"):
        with pytest.raises(ValueError, match=UNASKED):
            loaded(path, **ahead)
        return
    with loaded(path, slots=K + 1, prefetch="none") as plain, loaded(path, **ahead) as model:
        np.testing.assert_array_equal(decode(model, 4), decode(plain, 4))


@pytest.mark.parametrize("name, own", [
    ("nemotron_h", {"moe_latent_size": 32}),  # as in Nemotron 3 Super
    ("kimi_k3", {"num_hidden_layers": 3}),
])  # fmt: skip
def test_a_block_that_is_wider_than_its_experts(name, own, tmp_path):
    path = families.write_checkpoint(name, tmp_path / name, **own)
    with pytest.raises(ValueError, match=UNASKED):
        loaded(path, slots=K + 1, prefetch="lookahead")
    with loaded(path, slots=K + 1, kernels="mlx") as model:
        decode(model, 4)


@needs_kernels
def test_a_router_asked_early_in_a_pass_of_several_tokens():
    """A verify pass asks the router about all its tokens; logits are as without early reads."""
    tokens, found = mx.array([[*PROMPT, 7, 11, 13]]), []
    for name in ("none", "router"):
        with loaded(TINY_MOE, slots=48, prefetch=name) as model:
            cache = make_prompt_cache(model)
            found.append([np.array(model(tokens[:, i : i + 4], cache=cache)) for i in (0, 4, 8)])
            assert (moelab.stats(model).prefill.prefetch_used > 0) == (name == "router")
    np.testing.assert_array_equal(*found)


@needs_kernels
def test_a_wrong_router_keeps_what_is_likely_and_reads_nothing_more(want, monkeypatch):
    """None of the 2K likeliest experts is evicted. A layer with wrong guesses stops guessing."""
    reserve, kept = SlotTable.reserve, []

    def checked(self, experts, keep=()):
        held = {*keep} & {*self.slot_of}
        slots = reserve(self, experts, keep)
        assert held <= {*self.slot_of}
        kept.append(len(held))
        return slots

    monkeypatch.setattr(SlotTable, "reserve", checked)
    issued = run("router", want).prefetch_issued
    assert any(kept)
    learn = prefetch.Router.learn
    monkeypatch.setattr(prefetch.Router, "learn", lambda self, layer, _: learn(self, layer, set()))
    assert 0 < run("router", want).prefetch_issued < issued / 2


@pytest.mark.parametrize("name, kernels", [("qwen3_moe", "mlx"), ("gpt_oss", "auto")])
def test_a_router_that_cannot_be_asked_early_is_refused(name, kernels, stored):
    fields = {"slots": K + 1, "kernels": kernels}
    with pytest.raises(ValueError, match="router': model.layers.*Use prefetch='lookahead' or"):
        loaded(stored(name), prefetch="router", **fields)
    with loaded(stored(name), prefetch="auto", **fields) as model:
        assert not isinstance(session_of(model).prefetcher, prefetch.Router)  # auto falls back


@needs_kernels
def test_auto_asks_nobody_while_it_is_off_and_records_nothing_anew(moe, small_matrices):
    config = {"slots": K + 1, "kernels": "fast"}
    for fields in {"slots": E}, {"mode": "serial"}, {"mode": "serial", "prefetch": "none"}:
        with loaded(moe, **config | fields) as model:
            assert session_of(model).prefetcher is None  # every expert has a slot, or none has
    with loaded(moe, **config) as model:
        session, cache, passes = session_of(model), make_prompt_cache(model), []
        layers = [m for m in model.modules() if "_passes" in m.__dict__]
        for on in (False, True, False):
            session.auto._trials[1] = SimpleNamespace(on=on, took=lambda *args: None, part=Mock())
            before = moelab.stats(model).decode.prefetch_issued
            for token in range(8):
                mx.eval(model(mx.array([[token]]), cache=cache))
            assert (moelab.stats(model).decode.prefetch_issued > before) == on
            passes.append([*map(id, (m.__dict__["_passes"][1] for m in layers))])
        assert layers and passes[0] == passes[1] == passes[2]
        model(mx.array([[3] * 65]))  # a prompt
        session.auto._trials[1].part.assert_called_once()


def calls(trial, missing, milliseconds, num, rng):
    """Return which of ``num`` calls prefetch; ``milliseconds``: times without, and with it."""
    ons, near = np.zeros(num, int), 0.0
    for i, (m, ms) in enumerate(zip(missing, milliseconds.T)):
        ons[i], near = trial.on, 0.5 * near + rng.normal(0, 0.07)
        busy = 1 + (rng.random() < 0.02) * rng.exponential()
        trial.took(ms[ons[i]] / 1e3 * np.exp(near + rng.normal(0, 0.05)) * busy, m)
    return ons


# Experts that a token misses, milliseconds of waiting for each of them, and the share of the
# waiting that prefetch leaves.
REGIMES = list(itertools.product((120, 12), (0.15, 1.2), (0.37, 1.25)))


@pytest.mark.parametrize("missed, read_ms, share", REGIMES)
def test_auto_is_as_fast_as_the_better(missed, read_ms, share):
    """``auto`` has 98% of the best speed after 256 tokens. Trials cost the first 128 tokens 1%."""
    costs = []
    for begins, seed in itertools.product((False, True), range(8)):
        rng = np.random.default_rng(seed)
        missing = missed * (np.exp(rng.normal(0, 0.35, 1024)) + 3 * np.exp(-np.arange(1024) / 20))
        both = np.array([100 + read_ms * missing, 103 + share * read_ms * missing])
        ons = calls(Trial(begins), missing, both, 1024, rng)
        best, took = both.sum(1).argmin(), both[ons, np.arange(1024)]
        assert both[best, 256:].sum() / took[256:].sum() >= 0.98, (begins, seed)
        if begins == best:
            costs.append((took / both[best] - 1)[:128].sum())
    assert np.mean(costs) <= 1.28


def test_auto_looks_again_when_hits_change_and_rarely_otherwise():
    rng, trial = np.random.default_rng(0), Trial(True)
    assert calls(trial, [20] * 2, np.full((2, 2), 100.0), 2, rng).all() and not trial.on
    trial.part()  # a prompt comes between the two calls of a pair
    assert calls(trial, [20] * 2, np.full((2, 2), 100.0), 2, rng).all() and not trial._pairs
    wins, loses = np.full((2, 1), 100.0), np.full((2, 1), 100.0)
    wins[1], loses[1] = 80, 120
    assert calls(trial, np.full(3000, 20), wins.repeat(3000, 1), 3000, rng)[1000:].mean() > 0.99
    assert calls(trial, np.full(400, 60), loses.repeat(400, 1), 400, rng)[256:].mean() < 0.1
    for slots in (40, 20):  # the same misses, other slots
        for _ in range(100):
            trial.took(0.1 - 0.02 * (trial.on == (slots == 20)), 60, slots)
        assert trial.best == (slots == 20)


@needs_kernels
@pytest.mark.parametrize("layers, top_k, slots", [(1, K, K), (2, 1, 2), (2, E, E), (2, E, 2 * E)])
@pytest.mark.parametrize("name", PREFETCHERS)
def test_any_number_of_experts(name, layers, top_k, slots, tmp_path, small_matrices):
    """No guess evicts an expert of the layer that runs. A guess may be all E experts."""
    path = families.write_checkpoint("qwen3_moe", tmp_path / "model", num_hidden_layers=layers)
    fields = {"slots": slots, "top_k": top_k, "kernels": "fast"}
    with loaded(path, **fields) as model, moelab.record(model) as trace:
        want = decode(model, 20)
    with loaded(path, **fields, prefetch=name) as model:
        if name == "oracle":
            session_of(model).prefetcher.set_trace(trace)
        np.testing.assert_array_equal(decode(model, 20), want)
        assert moelab.stats(model).decode.prefetch_used or (name, layers) != ("oracle", 1)


@needs_kernels
def test_every_text_of_a_batch_is_asked_for_ahead(hybrid, small_matrices):
    with loaded(hybrid, slots=8, kernels="fast", prefetch="lookahead") as model:
        prefetcher = session_of(model).prefetcher
        block = next(m for m in model.modules() if hasattr(m, "route"))
        x = kernels.Rows(np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32))
        layer, routed = prefetcher.guess(0, prefetcher.ask(0, x))
        assert layer == 1 and routed.shape == block.route(x).shape == (3, K)
