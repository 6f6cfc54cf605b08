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
        keep=lambda samples: kept.append(len(samples)),
    )
    assert kept == [6, 12, 18] and len(made) == 3 * 2 * 3 and made.same.all()
    first = made.groupby("round").first()
    assert first.variant.nunique() == 3  # each prompt begins with another
    sizes = zip(first.prompt_tokens, first.decode_tokens)
    assert list(sizes) == [(10, 11), (40, 11), (40, 19)]
    assert (made.first_s > 0).all() and (made.tok_s > 0).all()
    drafts = made.variant.str.contains(", ")
    assert (made.accepted <= made.drafted).all() and not made.drafted[~drafts].any()
    assert (made.drafted[made.variant.str.endswith("=7")] > 7).all() and made.accepted.any()
    plan = made.attrs["settings"]["plan"]
    assert plan.startswith("slots=") and "of 64" in plan
