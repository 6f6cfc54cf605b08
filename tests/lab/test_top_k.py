"""The measurements of notebook 05, on a small random checkpoint."""

import numpy as np
import pytest

import moelab
from moelab import StreamConfig
from moelab.__main__ import main
from moelab.lab import quality, records
from moelab.lab.experiments import bench, top_k
from moelab.lab.texts import heldout_files

TEXT = "def f(x):\n    return x + 1\n" * 9


@pytest.fixture(scope="module")
def own(model_path):
    return moelab.footprint(model_path, StreamConfig()).top_k


def test_prediction_is_in_proportion_to_bytes(model_path, own):
    by_k = top_k.by_bytes(model_path, [own, 2, 1]).set_index("top_k").speedup
    rest, one = top_k.token_nbytes(model_path)
    assert by_k[own] == 1 and 1 < by_k[2] < by_k[1] < by_k[0] == pytest.approx(1 + own * one / rest)
    few, many = (top_k.token_nbytes("qwen3.5-35b-a3b", n) for n in (4, 8))
    assert many[1] == 2 * few[1] and few[0] < many[0] < 2 * few[0], "one head, twice the layers"


def test_published_speeds_are_over_the_first_k():
    assert list(top_k.published([8, 6, 1]).speedup) == [1, 5.20 / 4.95]
    assert "speedup" not in top_k.published([5, 2])


def test_speedup_is_over_the_most_experts_of_the_same_mode_and_round():
    seconds = {("resident", 8): (4, 8), ("resident", 2): (2, 2), ("fused", 8): (6, 6)}
    rows = [
        {"variant": f"{mode} {k}", "mode": mode, "top_k": k, "round": i, "decode_s": s[i]}
        | {"decode_tokens": 1}
        for (mode, k), s in seconds.items()
        for i in (1, 0)
    ]
    made = top_k.with_speedup(records.table({"rows": rows}))
    assert list(made.speedup) == [1, 1, 4, 2, 1, 1]


def test_speeds_of_bench_have_the_columns(model_path, own):
    configs = {f"K={k}": StreamConfig(slots=8, top_k=k) for k in (own, 2)}
    speeds = bench.measure(model_path, configs, tokens=2, runs=1, warmup=0, progress=False)
    assert list(speeds.top_k) == [own, 2] and top_k.with_speedup(speeds).speedup[0] == 1


@pytest.fixture(scope="module")
def scores(model_path, own, tmp_path_factory):
    """What the command writes, as read."""
    folder = tmp_path_factory.mktemp("top_k")
    (folder / "text").mkdir()
    (folder / "text" / "a.py").write_text(TEXT)
    out = str(folder / "top_k.json")
    sizes = ["--length", "8", "--count", "4", "--slots", "8", "--top-k", f"{own},2"]
    words = ["bench-top-k", str(model_path), "--json", out, "--heldout", str(folder / "text")]
    assert not main([*words, *sizes])
    return records.read(out, disturbed=True)


def test_a_record_has_a_row_for_each_window_and_k(scores, model_path, own):
    model, tokenizer = moelab.load(model_path, StreamConfig(slots=8, top_k=2))
    some = quality.windows(tokenizer, [TEXT], 8, 4)
    mine = scores[scores.top_k == 2]
    with model:
        np.testing.assert_allclose(mine.bits, quality.score(model, some).bits, rtol=1e-5)
    assert list(mine.nbytes) == list(some.nbytes)
    assert list(dict.fromkeys(scores.variant)) == [f"K={own}", "K=2"]
    settings = scores.attrs["settings"]
    assert settings["xz_bits_per_byte"] == quality.xz_bits_per_byte([TEXT])
    with pytest.raises(FileNotFoundError, match="expected files of text"):
        top_k.measure(model_path, [2])


def test_an_increase_is_paired_by_window():
    rng = np.random.default_rng(0)
    hard = rng.uniform(500, 1500, 64)  # some text is three times as hard as other text
    worse = hard * rng.normal(1.02, 0.002, 64)
    rows = [
        {"variant": name, "round": i, "bits": bits, "nbytes": 500}
        for name, all_bits in {"K=8": hard, "K=4": worse}.items()
        for i, bits in enumerate(all_bits)
    ]
    cost = top_k.more_bits(records.table({"rows": rows}))
    assert list(cost.loc["K=8", ["low", "increase", "high"]]) == [0, 0, 0]
    assert 0.018 < cost.low["K=4"] < cost.increase["K=4"] < cost.high["K=4"] < 0.022
    assert cost.bits_per_byte["K=4"] == pytest.approx(worse.sum() / 500 / 64)


def test_the_dial_works_at_both_ends(model_path, own, monkeypatch):
    monkeypatch.setattr(top_k, "heldout_files", lambda _: {"a.py": TEXT})
    look = top_k.dial(model_path, 8, tokens=2, length=8, count=2)
    for k in (1, own):
        assert f"K={k}" in look(k).layout.meta["alt"]


def test_no_text(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected files of text"):
        heldout_files(tmp_path)
