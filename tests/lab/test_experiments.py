"""What notebooks and recipes measure: a token's parts, slots, ranks, peers, bits per byte."""

from functools import partial
from types import SimpleNamespace

import evaluate
import exactness
import mlx.core as mx
import numpy as np
import peers
import published
import pytest
from common import TINY_MOE, needs_kernels
from mlx_lm.utils import load_tokenizer

import moelab
from moelab import DATA, StreamConfig, load
from moelab.lab import quality, records
from moelab.lab import ranks as processes
from moelab.lab.experiments import bench, dispatch, page_cache, ranks, timeline
from moelab.lab.texts import heldout_files
from moelab.replay.machine import CORE_BYTES_PER_S
from moelab.streaming.layers import Stacked
from moelab.streaming.reading.reader import Reader

TINY, CODE = DATA / "models" / "tiny-moe", DATA / "traces" / "code.npz"


def test_the_host_does_one_thing_after_another(model_path):
    read_here, modes = Reader.read_here, "resident,buffers,fused,fused/kernels=mlx/dtype=float32"
    made = timeline.measure(model_path, modes, StreamConfig(slots=8), tokens=2, runs=1, cold=True)
    assert Reader.read_here is read_here
    assert set(records.same_tokens(made, "resident").values()) == {(1, 1)}
    text = bench.measure(model_path, "resident", None, 2, 1, 4).tokens[0]
    assert made.tokens[0] == text[4:]  # after the warm-up
    parts = made[[*timeline.HOST.values()]]
    assert (parts >= 0).all(axis=None)
    assert parts.sum(axis=1).to_numpy() == pytest.approx(made.decode_s.to_numpy())
    reads = made.set_index("variant")[["read_here_s", "wait_s", "begin_s", "readers_s"]].sum(axis=1)
    assert reads["resident"] == 0 and (reads.drop("resident") > 0).all()
    spans = timeline.spans(made)
    for _, host in spans[spans.lane == "host"].sort_values("begin_s").groupby("variant"):
        assert (host.end_s.to_numpy()[:-1] <= host.begin_s.to_numpy()[1:] + 1e-6).all()
    layers = spans[(spans.lane == "experts") & (spans.variant == "fused")]
    assert len(layers) == 4  # as many as the model has


def test_operations_are_counted_and_hooks_see_every_layer_and_leave_none(model_path):
    x = mx.ones((4,))
    mx.eval(x)
    assert dispatch.operations(mx.exp(x) * x + x) == {"Exp": 1, "Multiply": 1, "Add": 1}
    assert dispatch.operations(x.reshape(2, 2)) == {}  # a view
    model, _ = load(model_path, StreamConfig(mode="resident"))
    x, seen = mx.array([[3, 4, 5]]), []
    before = np.array(model(x))
    with dispatch.hooked_experts(model, lambda call, x, i: (seen.append(i.shape), call(x, i))[1]):
        inside = np.array(model(x))
    assert seen == [(1, 3, 4)] * 4
    assert (inside == before).all() and (np.array(model(x)) == before).all() and len(seen) == 4


def test_how_experts_were_read_follows_from_the_rows():
    same = {"mode": "fused", "decode_tokens": 2, "decode_s": 0.1, "wait_s": 0.02, "bytes_read": 40}
    same |= {"hits": 4, "misses": 4, "slots": 8, "direct": False, "disk_nbytes": 20}
    rows = [
        same | {"variant": "resident", "mode": "resident"},
        same | {"variant": "buffers", "mode": "buffers", "hits": 0, "misses": 8},
        same | {"variant": "copied"},
        same | {"variant": "again", "disk_nbytes": 90},
        same | {"variant": "past", "slots": 90, "direct": True},
        same | {"variant": "past", "slots": 80, "direct": True},
    ]
    found = page_cache.told(records.table({"rows": rows})).set_index("variant")
    ways = page_cache.NO_SLOTS, *[page_cache.THROUGH] * 2, *[page_cache.PAST] * 2
    assert tuple(found["reads"]) == ways and list(found.slots) == [0, 8, 8, 85, 85]
    copied = found.loc["copied", ["ms", "wait_ms", "slot_percent", "disk_percent", "page_percent"]]
    assert copied.tolist() == [50, 10, 50, 25, 25]
    assert found.loc["again"].page_percent == 0, "the disk brought more than was needed"


# Ranks of tiny-moe write one text; a simulated SSD delays tokens and changes none


def test_ranks_read_less_and_wait_for_a_slow_ssd():
    fewest = {"tokens": 3, "warmup": 2, "prompt_tokens": 9}
    made = ranks.divided(TINY, (1, 2), (8,), (40e6,), held=False, **fewest)
    assert made.tokens.map(str).nunique() == made.digest.nunique() == 1
    assert made.experts.tolist() == [64, 32]
    one, two = made.most_nbytes
    assert 0 < two < one
    assert (made.decode_s > made.bytes_read / 40e6 * 0.95).all() and (made.wait_s > 0).all()


@pytest.mark.parametrize("wrong", ({"tokens": [2]}, {"digest": "b"}))
def test_texts_that_differ_are_no_record(wrong, monkeypatch):
    row = {"tokens": [1], "digest": "a", "bytes_read": 0, "decode_s": 1.0}
    monkeypatch.setattr(ranks, "everywhere", lambda n, *_, **__: [row, row | wrong][:n])
    with pytest.raises(ValueError, match="the same text of 2 ranks"):
        ranks.divided(TINY)


def test_a_rank_that_fails_says_why():
    with pytest.raises(OSError, match="rank 0 of 1: .*no-model"):
        processes.everywhere(1, ranks.decode_here, "no-model", 8, None, 1, 1, 1, None, False)


IDS = list(range(40, 60))


@pytest.fixture(scope="module")
def logits():
    """mlx-lm's logits after the tokens ``IDS``."""
    return peers.opened(peers.MLX_LM, str(TINY), 0)()(IDS)


@pytest.mark.parametrize("peer", peers.NAMES)
def test_a_text_is_read_on_and_begun_anew(peer, logits):
    if not peers.is_built(peer):
        pytest.skip("make peers")
    begin = peers.opened(peer, str(peers.files(TINY, [peer])[peer]), 2 * len(IDS))
    read = begin()
    read(IDS[:-1])
    in_parts = read(IDS[-1:]).copy()
    loose = 0.1 if peer == peers.LLAMA_CPP else 1e-3  # llama.cpp rounds activations to 8 bits
    for found in (in_parts, begin()(IDS)):
        np.testing.assert_allclose(found, logits, atol=loose * logits.std())


def test_peers_read_the_text_of_the_bench_and_say_its_tokens():
    names = ["moelab/slots=16", *peers.built()[1:]]
    made = peers.against(TINY, CODE, runs=1, tokens=3, warmup=2, ways=names)
    assert made.peer.tolist() == names and (made.decode_s > 0).all()
    # conftest.py changes what "auto" is in this process, not in the peers' processes.
    here = StreamConfig(dtype="float32" if mx.default_device() == mx.cpu else "bfloat16")
    ours = bench.measure(TINY, "resident", here, 3, 1, 2, feed=CODE)
    exact = made[made.peer != peers.LLAMA_CPP]
    assert all(tokens == ours.tokens[0] for tokens in exact.tokens)
    for column in ("prompt_tokens", "decode_tokens"):
        assert set(made[column]) == set(ours[column])


def test_a_plan_takes_a_setting_that_does_not_swap():
    """A token took 4 to 12 times as long with too many slots, on two Macs of 16 GB and an Air."""
    found = published.settings(("qwisp", "Godwit"))
    assert found[found.planned].best_over.max() < 1.15 and found.best_over.max() > 10


def test_machines_that_no_table_has():
    of = partial(SimpleNamespace, ram_gb=8.0, ssd_gb_s=1.5)
    for machine, rate in {
        "Epyc (96 cores, 460 GB/s)": 460e9,
        "Core i5 (6 cores)": 6 * CORE_BYTES_PER_S,
        "MacBook Neo (60 GB/s)": 60e9,
        "a18 pro (Neo)": 60e9,
    }.items():
        assert published.machine_of(of(machine=machine)).weights_bytes_per_s == rate
    with pytest.raises(ValueError, match="N cores, GB/s or one of A18 Pro.*got 'Windows PC'"):
        published.machine_of(of(machine="Windows PC"))


@needs_kernels
def test_a_pass_that_is_not_exact_is_seen(monkeypatch):
    config = StreamConfig(mode="fused", slots=8)
    made = exactness.soak(TINY, config, passes=2, sizes=(2, 12))
    assert all(row["equal"] == row["n"] for row in made) and len(made) == 2
    compute = Stacked.forward
    monkeypatch.setattr(Stacked, "forward", lambda *args: compute(*args) * 1.01)
    made = exactness.soak(TINY, config, passes=2, sizes=(2, 12))
    assert sum(row["equal"] for row in made) == 0


HELDOUT = heldout_files(TINY_MOE / "heldout")
TEXTS = ["def f(x):\n    return x + 1\n" * 9, "# ünïcödé ≠ ≥ 3\nprint('日本')\n" * 4, "", "x"]


@pytest.fixture(scope="module")
def model(model_path):
    model, tokenizer = moelab.load(model_path, StreamConfig(slots=8))
    with model:
        yield model, tokenizer


@pytest.mark.parametrize("length", [1, 7, 64])
def test_windows_hold_every_byte_once(model, length):
    """Windows of any length hold each byte once, also where several tokens make a character."""
    some = quality.windows(model[1], TEXTS, length)
    assert some.nbytes.sum() == sum(len(t.encode()) for t in TEXTS)
    assert some.counts.max() <= length and some.ids.shape[1] == length + 1
    # the predicted tokens of a file's windows, one after another, are the file
    ids = [i for row, n in zip(some.ids, some.counts) for i in row[1 : n + 1]]
    assert model[1].decode(ids) == "".join(TEXTS)
    few = quality.windows(model[1], TEXTS, length, count=3)
    assert len(few.ids) == len(few.counts) == min(3, len(some.ids))


def test_bits_are_those_of_the_definition(model):
    """A token's bits are its surprise after the earlier tokens, at any padding and batch."""
    net, tok = model
    some = quality.windows(tok, TEXTS, 16, count=5)
    bits = []
    for row, n in zip(some.ids, some.counts):
        logits = np.array(net(mx.array(row[None, :n]))[0], np.float64)
        log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        bits.append(-log_p[np.arange(n), row[1 : n + 1]].sum() / np.log(2))
    for batch in (1, 3, 5):
        np.testing.assert_allclose(quality.score(net, some, batch), bits, rtol=1e-4)


def test_the_shipped_tokenizer_is_exact():
    tokenizer = load_tokenizer(TINY_MOE)
    for text in [*HELDOUT.values(), "\t x = 'é漢字😀'\r\n\n  \n"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    specials = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id]
    assert len(set(specials)) == 3 and tokenizer.encode("<|mask|>") == [tokenizer.mask_token_id]
    assert len(tokenizer) == 8192


def test_the_shipped_model_is_trained_and_each_token_uses_its_experts():
    bits_per_byte, shares = evaluate.evaluate(TINY_MOE, [HELDOUT["jinja2__visitor.py"][:200]])
    assert shares.shape == (8, 64) and np.allclose(shares.sum(1), 8)
    assert 0.5 < bits_per_byte < 2, "these characters take 1.03"
