"""Recipes whose records notebooks read: what they count, and that texts are the same."""

from functools import partial
from types import SimpleNamespace

import exactness
import numpy as np
import peers
import published
import pytest

from moelab import DATA, StreamConfig
from moelab.lab import records
from moelab.lab.experiments import bench
from moelab.replay.machine import CORE_BYTES_PER_S
from moelab.streaming.layers import Stacked

TINY, CODE = DATA / "models" / "tiny-moe", DATA / "traces" / "code.npz"
IDS = list(range(40, 60))


@pytest.fixture(scope="module")
def logits():
    """What mlx-lm says after the tokens."""
    return peers.opened(peers.MLX_LM, str(TINY), 0)()(IDS)


@pytest.mark.parametrize("peer", peers.NAMES)
def test_a_text_is_read_on_and_begun_anew(peer, logits):
    if not peers.is_built(peer):
        pytest.skip("make peers")
    begin = peers.opened(peer, str(peers.files(TINY, [peer])[peer]), 2 * len(IDS))
    read = begin()
    read(IDS[:-1])
    in_parts = read(IDS[-1:]).copy()
    loose = 0.1 if peer == peers.LLAMA_CPP else 1e-3  # it rounds activations to 8 bits
    for found in (in_parts, begin()(IDS)):
        np.testing.assert_allclose(found, logits, atol=loose * logits.std())


def test_peers_read_the_text_of_the_bench_and_say_its_tokens():
    names = ["moelab/slots=16", *peers.built()[1:]]
    made = peers.against(TINY, CODE, runs=1, tokens=3, warmup=2, ways=names)
    assert made.peer.tolist() == names and not made.killed.any()
    assert made.decode_s.tolist() == pytest.approx(made.step_s.map(sum).tolist())
    ours = bench.measure(TINY, "resident", None, 3, 1, 2, feed=CODE)
    exact = made[made.peer != peers.LLAMA_CPP]
    assert all(tokens == ours.tokens[0] for tokens in exact.tokens)
    for column in ("prompt_tokens", "decode_tokens"):
        assert set(made[column]) == set(ours[column])


def test_the_record_is_what_is_predicted_now():
    record = records.read("cpu_planned_published")
    table = published.rows()
    table = table[table.why_not == ""]
    assert len(record) == len(table) and (record.published_tok_s == table.tok_s.to_numpy()).all()
    row = table.assign(record=record.predicted_tok_s.to_numpy()).iloc[0]
    assert published.predict(row).tok_s == pytest.approx(row.record, rel=1e-3)


def test_a_plan_takes_a_setting_that_does_not_swap():
    """Two Macs of 16 GB and an Air, where too many slots took 4 to 12 times as long."""
    record = records.read("cpu_planned_pairs")
    now = published.settings(("qwisp", "Godwit"))
    known = record[record.variant.isin(now.group)]
    for column in ("slots", "planned", "best_over", "predicted_tok_s"):
        assert known[column].tolist() == pytest.approx(now[column].tolist(), rel=1e-3)
    assert now[now.planned].best_over.max() < 1.15 and now.best_over.max() > 10
    cost = record[record.planned].groupby(["side", "set"]).best_over.max()
    assert cost.groupby("side").median().max() <= 1.15 and cost["fit"].max() <= 2


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


def test_a_pass_that_is_not_exact_is_seen(monkeypatch):
    config = StreamConfig(mode="fused", slots=8)
    made = exactness.soak(TINY, config, passes=2, sizes=(2, 12))
    assert all(row["equal"] == row["n"] for row in made) and len(made) == 2
    compute = Stacked.forward
    monkeypatch.setattr(Stacked, "forward", lambda *args: compute(*args) * 1.01)
    made = exactness.soak(TINY, config, passes=2, sizes=(2, 12))
    assert sum(row["equal"] for row in made) == 0
