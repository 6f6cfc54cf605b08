"""Streamed passes and texts against the resident model's: how near, and how many are equal."""

from moelab import DATA, StreamConfig
from moelab.lab.experiments import exactness
from moelab.speculation.drafts import LookupDraft


def test_agreement_is_exact_where_nothing_is_rounded_otherwise(model_path):
    r = exactness.agreement(model_path, "stacked,fused", StreamConfig(slots=8), tokens=4)
    for m in r["modes"].values():
        assert m["same_tokens"] == 1 and m["decode_error"] < 1e-4 and m["prefill_error"] < 1e-4


def test_exactness_on_this_machine():
    """Every pass equals the resident model's, and every text; the loops that record it on a GPU."""
    path, config = DATA / "models" / "tiny-moe", StreamConfig(slots=8)
    for row in exactness.chunks(path, config, sizes=(40,), histories=(40, 200)):
        assert row == {"T": 40, "off": [0.0, 0.0], "runs_equal": True}
    for row in exactness.texts(path, config, LookupDraft, drafts=(0, 2), n=1, tokens=6):
        counts = ("twice", "as_resident", "as_resident_undrafted", "resident_as_undrafted")
        assert [row[c] for c in counts] == [1] * 4
    made = exactness.soak(path, config, passes=3, tokens=6, sizes=(2, 12))
    assert (made["passes"], made["equal"]) == (3, 3) and made["texts_equal"] == made["texts"] > 0
    assert sum(n for n, _ in made["by_size"].values()) == 3 and made["tokens"] >= 6
