"""Memory of a long run."""

from moelab import StreamConfig
from moelab.lab.experiments import memory


def test_memory_over_a_run(model_path):
    made = memory.measure(model_path, StreamConfig(slots=8), tokens=8, every=4)
    assert made.tokens.to_list() == [0, 4, 8] and (made["round"] == 0).all()
    assert (made.active_nbytes <= made.peak_nbytes).all() and (made.rss_nbytes > 0).all()
    assert made.swapped_nbytes.iloc[0] == 0 and made.attrs["settings"]["predicted_nbytes"] > 0
