"""The recipe that counts memory over a long text."""

import memory

from moelab.lab import records


def test_memory_over_a_run(model_path, tmp_path):
    memory.main(out := str(tmp_path / "made.json"), str(model_path), "8", "8", "2")
    made = records.read(out, disturbed=True)
    assert made.tokens.to_list() == [*range(9)] * 2 and (made.rss_nbytes > 0).all()
    assert (made.active_nbytes <= made.peak_nbytes).all()
    assert made.swapped_nbytes.iloc[0] == 0 and made.attrs["settings"]["predicted_nbytes"] > 0
