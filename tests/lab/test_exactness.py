"""Streamed passes and texts against the resident model's: how near, and how many are equal."""

from functools import partial

from moelab import DATA, StreamConfig
from moelab.lab.experiments import exactness
from moelab.streaming.layers import Stacked


def test_agreement_is_exact_where_nothing_is_rounded_otherwise(model_path):
    made = exactness.agreement(model_path, "stacked,fused", StreamConfig(slots=8), tokens=4)
    assert made.variant.to_list() == ["stacked", "fused"] and (made.same_tokens == 1).all()
    assert (made[["decode_error", "prefill_error"]] < 1e-4).all(axis=None)


def test_exactness_on_this_machine(monkeypatch):
    """Every pass equals the resident model's, and every text; the loops that record it on a GPU."""
    few = {"drafts": (0, 2), "n": 1, "tokens": 6}
    monkeypatch.setattr(exactness, "texts", partial(exactness.texts, **few))
    few = {"passes": 3, "tokens": 6, "sizes": (2, 12)}
    monkeypatch.setattr(exactness, "soak", partial(exactness.soak, **few))
    made = exactness.passes(DATA / "models" / "tiny-moe", "fused", StreamConfig(slots=8))
    assert (made.equal == made.n).all()
    assert set(made.what) == {"greedy texts", "random passes", "long texts"}
    assert made[made.what == "random passes"].n.sum() == 3
    texts = made[made.what == "greedy texts"]
    assert (texts[["repeated", "equal_undrafted", "resident_undrafted"]] == 1).all(axis=None)

    compute = Stacked.forward
    monkeypatch.setattr(Stacked, "forward", lambda *args: compute(*args) * 1.01)
    made = exactness.passes(DATA / "models" / "tiny-moe", "fused", StreamConfig(slots=8))
    assert made[made.what == "random passes"].equal.sum() == 0
