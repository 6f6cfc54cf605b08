"""Prefetchers in the bench, from a cold disk."""

from moelab import StreamConfig
from moelab.lab import records
from moelab.lab.experiments import bench
from moelab.repack import repack


def test_prefetchers_of_both_layouts_in_the_bench(model_path, tmp_path, monkeypatch):
    """The same tokens; the oracle reads ahead, and nothing in vain; cold is cold for each token."""
    packed, dropped = repack(model_path, tmp_path / "packed", progress=False), []
    monkeypatch.setattr(bench.oscache, "drop_pages", dropped.append)
    monkeypatch.setattr(bench, "disk_speed", lambda _: 1.0)
    variants = {
        f"{p}, {path.name}": bench.Variant(StreamConfig(slots=6, prefetch=p), path, cold="token")
        for path in (model_path, packed)
        for p in ("none", "lookahead", "oracle")
    }
    made = bench.measure(model_path, variants, tokens=3, runs=2, warmup=1)
    assert made.attrs["settings"]["variants"][f"none, {packed.name}"]["path"] == packed.name
    first = next(iter(variants))
    assert set(records.same_tokens(made, first).values()) == {(2, 2)}
    oracle = made[made.variant.str.startswith("oracle")]
    assert (oracle.prefetch_issued > 0).all() and (oracle.prefetch_wasted == 0).all()
    assert not made[made.variant.str.startswith("none")].prefetch_issued.any()
    each = 1 + 1 + (1 + 3)  # before the prompt and the clock, and before each token
    assert dropped.count(packed) == 3 * 3 * each + 3  # 3 rounds; the oracle drops once more
