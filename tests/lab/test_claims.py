"""Verdicts that follow from records, by one rule."""

import json
import re

import pytest

from moelab.lab import claims, records


def claim(**figures):
    made = {"id": "X1", "claim": "c", "source": "s", "notebook": "01", "figures": figures}
    return made if figures else made | {"cannot": "no such disk"}


def at(values, **gate):
    return {"is": repr(values), **gate}


YES, NO, OPEN = (at(v, least=1) for v in ([2.0], [0.5], [0.5, 2.0]))


@pytest.mark.parametrize(
    "figures, verdict, because",
    [
        ({}, "cannot be tested here", "no such disk"),
        ({"here": at([2.0, 2.5, 3.0], least=1.5)}, "confirmed", r"2\.5 \[2, 3\], n=3 \(at least"),
        ({"here": at([2.0, 2.5, 3.0], least=5)}, "refuted", "here"),
        ({"here": at([2.0, 2.5, 3.0], most=2.2)}, "open", r"Open: here: 2\.5 .*at most 2.2"),
        ({"here": at(3, most=4)}, "confirmed", "here: 3 "),
        ({"warm": YES, "cold": NO}, "depends", r"Confirmed: warm: 2 .*Refuted: cold: 0\.5 "),
        # What no interval decides stands beside the verdict by its name, and does not undo it.
        ({"a": YES, "b": OPEN}, "confirmed", r"a: 2 .* Open: b\."),
        ({"a": NO, "b": OPEN}, "refuted", r"a: 0\.5 .* Open: b\."),
        ({"a": YES, "b": NO, "c": OPEN}, "depends", r"Open: c\."),
        ({"a": OPEN, "b": OPEN}, "open", "a: .*b: "),
        ({"a": YES, "b": YES, "c": YES}, "confirmed", "a: .*b: .*and 1 more"),
        ({"a": OPEN | {"claimed": 7}, "b": YES}, "confirmed", "Open: a 1.25\\."),
    ],
)
def test_a_verdict_follows_from_the_intervals(figures, verdict, because):
    judged = claims.judge(claim(**figures))
    assert judged.verdict == verdict
    assert re.search(because, judged.because), judged.because


@pytest.mark.parametrize(
    "values, gate, verdict",
    [
        ([0.95, 1.07], {"least": 1.05}, "open"),
        ([0.95, 1.07], {"least": 1.05, "within": 1.1}, "refuted"),  # no effect worth the name
        ([0.95, 1.12], {"least": 1.05, "within": 1.1}, "open"),
        ([1.06, 1.09], {"least": 1.05, "within": 1.1}, "confirmed"),  # the gate comes first
        ([0.92, 1.3], {"most": 0.95, "within": 1.1}, "refuted"),
        ([0.85, 1.3], {"most": 0.95, "within": 1.1}, "open"),
    ],
)
def test_an_effect_smaller_than_the_bound_is_none(values, gate, verdict):
    assert claims.judge(claim(here=at(values, **gate))).verdict == verdict


def test_a_sentence_stands_only_under_the_verdict_it_was_written_for():
    made = claim(warm=YES, cold=NO) | {"why": {"depends": "Warm it does."}}
    assert claims.judge(made).because.startswith("Warm it does. Confirmed: warm")
    assert "Warm it does" not in claims.judge(made | {"figures": {"warm": YES}}).because


def test_a_record_changed_by_hand_changes_its_verdict(tmp_path):
    """The seconds of one variant of a shipped record are doubled, as a wrong edit would."""
    (made,) = (c for c in claims.read() if c["id"] == "C2")
    assert claims.judge(made).verdict == "confirmed"
    for name in ("cpu_loops_tiny_moe", "cuda_loops_35b"):
        samples = records.read(name)
        ahead = samples.variant == "next token scheduled ahead"
        samples.loc[ahead, [c for c in samples if c.endswith(("seconds", "_s"))]] *= 2
        records.save(tmp_path / f"{name}.json", samples)
        made = json.loads(
            json.dumps(made).replace(f'\\"{name}\\"', f'\\"{tmp_path}/{name}.json\\"')
        )
    assert claims.judge(made).verdict == "refuted"


def test_a_figure_that_fails_names_its_claim():
    with pytest.raises(ValueError, match="claim X1, here: .*NameError.*Correct it in"):
        claims.judge(claim(here={"is": "nothing", "least": 1}))
    with pytest.raises(ValueError, match="claim X1, here: expected least or most, got is"):
        claims.judge(claim(here={"is": "[1.0]"}))


def test_what_is_not_measured_yet_is_open(tmp_path):
    made = records.table(
        {"settings": {}, "rows": [{"variant": "a", "round": 0, "seconds": 1.0}], "trial": "few"}
    )
    records.save(tmp_path / "r.json", made)
    read = f"read({str(tmp_path / 'r.json')!r})"
    figures = {"none": "read('cpu_nothing')", "trial": f"of({read}, 'a', 'seconds')"}
    judged = claims.judge(claim(**{k: {"is": v, "most": 3} for k, v in figures.items()}))
    assert judged.verdict == "open" and "not measured yet, cpu_nothing.json" in judged.because
    assert "is a trial" in judged.because
    del made.attrs["trial"]
    records.save(tmp_path / "r.json", made)
    assert claims.judge(claim(here={"is": figures["trial"], "most": 3})).verdict == "confirmed"
    other = claims.judge(claim(here={"is": f"of({read}, 'c', 'seconds')", "most": 3}))
    assert other.verdict == "open" and "no 'c' in the record" in other.because


def test_the_scorecard_has_the_claims_of_others_each_with_its_reason():
    card = claims.scorecard()
    assert len(card) == 40 and "moelab" not in set(card.source)
    assert set(card.verdict) <= set(claims.VERDICTS) == set(claims.COLORS)
    assert card.because.str.len().max() < 450
    assert set(claims.regimes("A6", "C3").index) == {"A6", "C3"}


def test_a_scorecard_is_filtered(tmp_path, monkeypatch):
    both = [claim() | {"notebook": "02"}, claim(here=YES) | {"id": "X2"}]
    (tmp_path / "claims.json").write_text(json.dumps(both))
    monkeypatch.setattr(claims, "DATA", tmp_path)
    view = claims.browse(claims.scorecard(), "verdict", "notebook")
    verdict, notebook, shown = view.children
    assert "X1" in shown.value and "X2" in shown.value
    verdict.value = "confirmed"
    assert "X1" not in shown.value and "X2" in shown.value
    notebook.value = "02"
    assert "X2" not in shown.value
    with pytest.raises(ValueError, match="expected claims of X1, X2, got X3"):
        claims.show("X3")
