"""What runs when in a token, and the scripts whose records notebook 02 reads."""

import numpy as np
import pytest

from moelab import StreamConfig
from moelab.lab import records
from moelab.lab.__main__ import main
from moelab.lab.experiments import bench, timeline
from moelab.streaming.reading.reader import Reader


@pytest.mark.parametrize("cold", [False, True])
def test_the_host_does_one_thing_after_another(model_path, cold):
    read_here, modes = Reader.read_here, "resident,buffers,fused,fused/kernels=mlx/dtype=float32"
    made = timeline.measure(model_path, modes, StreamConfig(slots=8), tokens=2, runs=1, cold=cold)
    assert Reader.read_here is read_here
    assert set(records.same_tokens(made, "resident").values()) == {(1, 1)}
    text = bench.measure(model_path, "resident", None, 2, 1, 4).tokens[0]
    assert made.tokens[0] == text[4:]  # after the warm-up
    parts = made[[*timeline.HOST.values()]]
    assert (parts >= 0).all(axis=None)
    assert parts.sum(axis=1).to_numpy() == pytest.approx(made.decode_s.to_numpy())
    reads = made.set_index("variant")[["read_here_s", "wait_s", "begin_s", "readers_s"]].sum(axis=1)
    assert reads["resident"] == 0 and (reads.drop("resident") > 0).all()
    spans = timeline.spans(made)
    for _, host in spans[spans.lane == "host"].sort_values("begin_s").groupby("variant"):
        assert (np.diff(host.begin_s) >= 0).all()
        assert (host.end_s.to_numpy()[:-1] <= host.begin_s.to_numpy()[1:] + 1e-6).all()
    layers = spans[(spans.lane == "experts") & (spans.variant == "fused")]
    assert len(layers) == 4  # the model's


@pytest.mark.parametrize(
    "words",
    [
        "timeline OUT MODEL resident,fused 8 warm",
    ],
)
def test_a_command_writes_what_read_reads(model_path, tmp_path, words):
    out = tmp_path / "made.json"
    names = {"OUT": str(out), "MODEL": str(model_path)}
    assert main([names.get(w, w) for w in words.split()]) == 0
    assert len(records.read(str(out), disturbed=True))


@pytest.mark.parametrize(
    "words",
    [
        "timeline OUT.json MODEL resident 8 lukewarm",
        "timeline OUT.json MODEL no-such-mode 8 warm",
    ],
)
def test_a_wrong_command_is_refused(words, capsys):
    assert main(words.split()) == 1
    assert capsys.readouterr().err.startswith("moelab.lab: ")
