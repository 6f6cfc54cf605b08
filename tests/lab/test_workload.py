"""Sampled answers, resident and streamed, with a draft and without."""

from moelab import DATA
from moelab.lab.experiments import workload


def test_every_answer_is_the_resident_models():
    draft = str(DATA / "models" / "tiny-dflash")
    kept = []
    made = workload.measure(
        workload.TEXTS,
        175_000_000,
        ["lookup", f"{draft}=7"],
        12,
        20,
        rounds=1,
        prompt_tokens=(10, 40),
        keep=lambda record: kept.append(len(record["rows"])),
    )
    rows = made["rows"]
    assert kept == [0, 0, 6, 12, 18]
    begins = [(row["model"], row["draft"]) for row in rows[:: 2 * 3]]
    assert len(set(begins)) == 3  # each prompt begins with another
    assert len(rows) == 3 * 2 * 3 and all(row["same"] for row in rows)
    sizes = [(row["prompt_tokens"], row["tokens"]) for row in rows[:: 2 * 3]]
    assert sizes == [(10, 12), (40, 12), (40, 20)]
    for row in rows:
        assert row["first_s"] > 0 and row["tok_s"] > 0
        assert 0 <= row["accepted"] <= row["drafted"] and (row["draft"] or not row["drafted"])
    assert all(row["drafted"] > 7 for row in rows if row["draft"] == f"{draft}=7")
    assert any(row["accepted"] for row in rows)
    assert made["plan"].startswith("slots=") and "of 64" in made["plan"]
