"""Verify passes: what is timed is the text's own."""

import pytest
from recurrent import ids

from moelab.lab import records
from moelab.lab.experiments import verify


def test_passes(streamed):
    text = ids(5, 60)[0].tolist()
    made = verify.passes({"4 slots": streamed}, text, [1, 4], 3)
    assert list(made.groupby("positions").size()) == [3, 3] and (made.model == "4 slots").all()
    assert (made.pass_s > made.wait_s).all() and (made.bytes_read > 0).any()
    distinct = made.experts.groupby(made.positions).min() / 2  # layers
    assert distinct[1] < distinct[4] <= 4 * distinct[1]
    with pytest.raises(ValueError, match="expected a text of 13 tokens, got 5"):
        verify.passes({"4 slots": streamed}, text[:5], [1, 4], 3)


def test_the_script_writes_a_record(model_path, tmp_path, monkeypatch, capsys):
    text = ids(5, 60)[0].tolist()
    for name, value in {"POSITIONS": (1, 3), "ROUNDS": 2, "heldout_ids": lambda *_: [text]}.items():
        monkeypatch.setattr(verify, name, value)
    verify.main(str(tmp_path / "r.json"), str(model_path), "6")
    made = records.read(str(tmp_path / "r.json"), disturbed=True)
    assert made.attrs["kind"] == "passes" and made.attrs["settings"]["model"] == model_path.name
    assert made.groupby("variant").size().to_dict() == {
        f"{name}, {m} positions": 2 for name in ("resident", "6 slots") for m in (1, 3)
    }
    assert "resident" in capsys.readouterr().out
