"""What notebook 02 measures beside the command ``bench``."""

import json

import numpy as np
import pytest

from moelab import StreamConfig
from moelab.lab import records
from moelab.lab.__main__ import main
from moelab.lab.experiments import bench, ladder, timeline
from moelab.streaming.reading.reader import Reader


def test_a_climb_is_the_ratio_of_the_same_round(model_path):
    base = StreamConfig(slots=8)
    here = bench.measure(model_path, ladder.MODES, base, 2, 2, warmup=1, progress=False)
    rungs = ladder.climbs({"here": here}).set_index(["source", "rung"]).times
    assert list(rungs["here", "slots"]) == list(records.paired(here, "serial", "stacked"))
    assert (rungs["here", "serial"] == 1).all() and len(rungs["here"]) == 2 * len(ladder.RUNGS)
    (told,) = rungs.drop("here").xs("parallel", level="rung")
    assert told == pytest.approx(4.95 / 0.58)


def test_a_prompt_reads_each_expert_once(model_path):
    (prompt,) = ladder.prompt_reads(model_path, slots=4, tokens=16).itertuples()
    assert prompt.read == prompt.distinct and prompt.uses == 16 * 4 * 4


def test_prompts_take_turns(model_path):
    few, many = (
        ladder.prompt_speeds(model_path, StreamConfig(slots=n), 3, 2, 4, 6, 1, progress=False)
        for n in (4, 16)
    )
    assert few.groupby("round").variant.nunique().to_list() == [3, 3]
    assert (few.calls == 4 * 4).all() and (many.hits == 4 * 4 * 4).all()
    assert few.hit_rate.mean() < many.hit_rate.mean() == 1


def test_tokens_at_once():
    made = ladder.tokens_at_once(64, 64, 2, E=4, tokens=(1, 2), runs=2)
    assert (made.seconds > 0).all()
    assert made.groupby(["order", "positions"]).size().to_list() == [2] * 4


@pytest.mark.parametrize("at", [(1, 4, 1, "cold"), (4, 16, 16, "warm")])
def test_dial(model_path, at):
    finding = ladder.dial(model_path, tokens=2)(*at).layout.meta["finding"]
    assert "the text is" in finding and ("lossy" in finding) == (at[0] == 1)


def test_checkpoint_of_real_layers_is_gone_afterwards(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "DATA", tmp_path / "data")
    big = ladder.checkpoint_of_real_layers(tokenizer, experts=8)
    assert json.loads((big.path / "config.json").read_text())["text_config"]["hidden_size"] == 2048
    big.cleanup()
    assert not big.path.exists() and (tmp_path / "build").is_dir()


@pytest.mark.parametrize("cold", [False, True])
def test_the_host_does_one_thing_after_another(model_path, cold):
    read_here, modes = Reader.read_here, "resident,buffers,fused,fused/kernels=mlx/dtype=float32"
    made = timeline.measure(
        model_path, modes, StreamConfig(slots=8), tokens=2, runs=1, cold=cold, progress=False
    )
    assert Reader.read_here is read_here
    assert set(records.same_tokens(made, "resident").values()) == {(1, 1)}
    text = bench.measure(model_path, "resident", None, 2, 1, 4, progress=False).tokens[0]
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
        "ladder OUT prompts MODEL",
        "ladder OUT tokens-at-once tiny-moe",
        "timeline OUT MODEL resident,fused 8 warm",
        "memory OUT MODEL 8 4 2",
        "exactness OUT agreement MODEL stacked 8",
    ],
)
def test_a_command_writes_what_read_reads(model_path, tmp_path, monkeypatch, words):
    monkeypatch.setattr(ladder.prompt_speeds, "__defaults__", (None, 2, 1, 2, 6, 1, False))
    out = tmp_path / "made.json"
    names = {"OUT": str(out), "MODEL": str(model_path)}
    assert main([names.get(w, w) for w in words.split()]) == 0
    assert len(records.read(str(out), disturbed=True))


@pytest.mark.parametrize(
    "words",
    [
        "ladder OUT.json everything tiny-moe",
        "ladder OUT.json tokens-at-once no-such-shape",
        "timeline OUT.json MODEL resident 8 lukewarm",
        "timeline OUT.json MODEL no-such-mode 8 warm",
        "exactness OUT.json proofs MODEL fused 8",
        "memory OUT.json MODEL 8 many 1",
    ],
)
def test_a_wrong_command_is_refused(words, capsys):
    assert main(words.split()) == 1
    assert capsys.readouterr().err.startswith("moelab.lab: ")
