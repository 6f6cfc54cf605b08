"""Memory of a long run."""

from moelab import StreamConfig
from moelab.lab.experiments import memory


def test_memory_over_a_run(model_path):
    r = memory.measure(model_path, StreamConfig(slots=8), tokens=8, every=4)
    assert r["tokens"] == [0, 4, 8] and r["predicted_nbytes"] > 0 and len(r["rss_nbytes"]) == 3
