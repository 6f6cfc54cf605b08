"""Verify passes: what is timed is the text's own."""

import passes
import pytest
from recurrent import ids

from moelab.lab import records


def test_passes_are_recorded(model_path, tmp_path, monkeypatch):
    text = ids(5, 60)[0].tolist()
    for name, value in {"POSITIONS": (1, 4), "ROUNDS": 3, "heldout_ids": lambda *_: [text]}.items():
        monkeypatch.setattr(passes, name, value)
    passes.main(str(tmp_path / "r.json"), str(model_path), "4")
    made = records.read(str(tmp_path / "r.json"), disturbed=True)
    assert made.attrs["kind"] == "passes" and made.attrs["settings"]["model"] == model_path.name
    assert made.groupby(["model", "positions"]).size().tolist() == [3] * 4
    made = made[made.model == "4 slots"]
    assert (made.pass_s > made.wait_s).all() and (made.bytes_read > 0).any()
    distinct = made.groupby("positions").experts.min() / 2  # layers
    assert distinct[1] < distinct[4] <= 4 * distinct[1]
    with pytest.raises(ValueError, match="expected a text of 13 tokens, got 5"):
        passes.passes({}, text[:5])
