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
BOUND = {"least": 1.05, "within": 1.1}  # an effect smaller than 1.1 is none


@pytest.mark.parametrize(
    "figures, verdict, because",
    [
        ({}, "cannot be tested here", "no such disk"),
        ({"here": at([2.0, 2.5, 3.0], least=1.5)}, "confirmed", r"2\.5 \[2, 3\], n=3 \(at least"),
        ({"here": at([2.0, 2.5, 3.0], least=5)}, "refuted", "here"),
        ({"here": at([2.0, 2.5, 3.0], most=2.2)}, "open", r"Open: here: 2\.5 .*at most 2.2"),
        ({"here": at(3, most=4)}, "confirmed", "here: 3 "),  # a count
        ({"warm": YES, "cold": NO}, "depends", r"Confirmed: warm: 2 .*Refuted: cold: 0\.5 "),
        # What no interval decides stands beside the verdict by its name, and does not undo it.
        ({"a": YES, "b": OPEN}, "confirmed", r"a: 2 .* Open: b\."),
        ({"a": YES, "b": NO, "c": OPEN}, "depends", r"Open: c\."),
        ({"a": OPEN, "b": OPEN}, "open", "a: .*b: "),
        ({"a": OPEN | {"claimed": 7}, "b": YES}, "confirmed", "Open: a 1.25\\."),
        # An equivalence bound refutes what is too small, and the gate comes first.
        ({"here": at([0.95, 1.07], least=1.05)}, "open", ""),
        ({"here": at([0.95, 1.07], **BOUND)}, "refuted", ""),
        ({"here": at([0.95, 1.12], **BOUND)}, "open", ""),
        ({"here": at([1.06, 1.09], **BOUND)}, "confirmed", ""),
        ({"here": at([0.92, 1.3], most=0.95, within=1.1)}, "refuted", ""),
        ({"here": at([0.85, 1.3], most=0.95, within=1.1)}, "open", ""),
        # No record of that name.
        ({"a": {"is": "read('cpu_nothing')", "most": 3}}, "open", "not measured yet, cpu_nothing"),
    ],
)
def test_a_verdict_follows_from_the_intervals(figures, verdict, because):
    judged = claims.judge(claim(**figures) | {"why": {"depends": "Warm it does."}})
    assert judged.verdict == verdict
    assert re.search(because, judged.because), judged.because
    assert judged.because.startswith("Warm it does. ") is (verdict == "depends")


def test_a_record_changed_by_hand_changes_its_verdict(tmp_path):
    """The seconds of one variant of a shipped record are doubled, as a wrong edit would."""
    (made,) = (c for c in claims.read() if c["id"] == "C2")
    assert claims.judge(made).verdict == "confirmed"
    text, ahead = json.dumps(made), "next token scheduled ahead"
    for name in ("cpu_loops_tiny_moe", "cuda_loops_35b"):
        samples, file = records.read(name), tmp_path / f"{name}.json"
        seconds = [c for c in samples if c.endswith(("seconds", "_s"))]
        samples.loc[samples.variant == ahead, seconds] *= 2
        records.save(file, samples)
        text = text.replace(f'\\"{name}\\"', f'\\"{file}\\"')
    assert claims.judge(json.loads(text)).verdict == "refuted"
    other = claims.judge(json.loads(text.replace(ahead, "none")))
    assert other.verdict == "open" and " in the record" in other.because
    for file in tmp_path.iterdir():  # a trial decides nothing
        file.write_text(json.dumps(json.loads(file.read_text()) | {"trial": "few runs"}))
    trial = claims.judge(json.loads(text))
    assert trial.verdict == "open" and "is a trial" in trial.because


def test_a_figure_that_fails_names_its_claim():
    with pytest.raises(ValueError, match="claim X1, here: .*NameError.*Correct it in"):
        claims.judge(claim(here={"is": "nothing", "least": 1}))
    with pytest.raises(ValueError, match="claim X1, here: expected least or most, got is"):
        claims.judge(claim(here={"is": "[1.0]"}))


def test_a_scorecard_is_filtered(tmp_path, monkeypatch):
    both = [claim() | {"notebook": "02"}, claim(here=YES) | {"id": "X2"}]
    (tmp_path / "claims.json").write_text(json.dumps(both))
    monkeypatch.setattr("moelab.shipped.DATA", tmp_path)
    verdict, notebook, shown = claims.browse(claims.scorecard(), "verdict", "notebook").children
    for control, value, there in ((verdict, "confirmed", "X2"), (notebook, "02", "")):
        control.value = value
        assert "".join(re.findall("X[12]", shown.value)) == there
    with pytest.raises(ValueError, match="expected claims of X1, X2, got X3"):
        claims.show("X3")
