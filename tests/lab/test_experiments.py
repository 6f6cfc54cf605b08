"""What notebooks measure: the parts of a token, operations, calls of experts, slots, ranks."""

import mlx.core as mx
import numpy as np
import pytest

from moelab import DATA, StreamConfig, load
from moelab.lab import ranks as processes
from moelab.lab import records
from moelab.lab.experiments import bench, dispatch, page_cache, ranks, timeline
from moelab.streaming.reading.reader import Reader

TINY = DATA / "models" / "tiny-moe"


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
    assert len(layers) == 4  # the model's


def test_operations_counts_what_is_computed():
    x = mx.ones((4,))
    mx.eval(x)
    assert dispatch.operations(mx.exp(x) * x + x) == {"Exp": 1, "Multiply": 1, "Add": 1}
    assert dispatch.operations(x.reshape(2, 2)) == {}  # a view


def test_hooks_see_every_layer_and_leave_the_model_as_it_was(model_path):
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


# Ranks of tiny-moe write one text; a simulated SSD delays and changes no token


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
    """A rank that decodes other tokens, or with other bits, is an error."""
    row = {"tokens": [1], "digest": "a", "bytes_read": 0, "decode_s": 1.0}
    monkeypatch.setattr(ranks, "everywhere", lambda n, *_, **__: [row, row | wrong][:n])
    with pytest.raises(ValueError, match="the same text of 2 ranks"):
        ranks.divided(TINY)


def test_a_rank_that_fails_says_why():
    with pytest.raises(OSError, match="rank 0 of 1: .*no-model"):
        processes.everywhere(1, ranks.decode_here, "no-model", 8, None, 1, 1, 1, None, False)
