"""lab.experiments.against: one text by several, each in a process of its own."""

import pytest

from moelab import DATA
from moelab.lab import peers, records
from moelab.lab.experiments import against, bench

TINY, CODE = DATA / "models" / "tiny-moe", DATA / "traces" / "code.npz"
AMOUNT = {"tokens": 3, "warmup": 2}
BUILT = [p for p, names in peers.PACKAGES.items() if all(map(peers.installed, names))]


def test_all_read_one_text_and_say_one_continuation():
    names = (*against.OURS, *BUILT)
    made = against.against(TINY, CODE, runs=1, **AMOUNT, names=names, progress=False)
    assert made.peer.tolist() == list(names) and not made.killed.any()
    assert (made.tok_s > 0).all() and (made.prefill_s > 0).all() and (made.file_nbytes > 0).all()
    assert set(made.decode_tokens) == {3} and made.prompt_tokens.nunique() == 1
    exact = made[made.peer != peers.LLAMA_CPP]  # which rounds activations to 8 bits
    assert len(set(map(tuple, exact.tokens))) == 1
    assert made.attrs["settings"]["versions"] == peers.versions()


def test_a_peers_run_has_the_tokens_and_the_clock_of_ours():
    ids, fed = bench.texts_of(CODE, 5, TINY)
    row = against.sample_here(peers.MLX_LM, str(TINY), ids, fed, 2, {})
    ours = bench.measure(TINY, "resident", None, 3, 1, 2, feed=CODE, progress=False)
    assert row["tokens"] == ours.tokens[0] and row["prompt_tokens"] == len(ids)
    assert row["decode_tokens"] == len(row["step_s"]) == 3
    assert row["decode_s"] == sum(row["step_s"])


def test_mlx_vlm_gets_a_share_of_what_the_limit_leaves(tmp_path):
    (tmp_path / "experts").mkdir()
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "experts" / "layer_0.safetensors").write_bytes(bytes(900))
    assert against._cache_nbytes(tmp_path, 300) == 200 * against.CACHE_SHARE
    assert against._cache_nbytes(tmp_path, 50) == 0 and against._nbytes(tmp_path) == 1000


def test_the_command_writes_a_record(tmp_path, monkeypatch, capsys):
    asked = []

    def made(model, trace, limits, runs):
        asked.append((model, trace, limits, runs))
        rows = [{"variant": "a", "round": 0, "decode_s": 2.0, "decode_tokens": 4}]
        return records.Running("against", {}).table(rows)

    monkeypatch.setattr(against, "against", made)
    out = str(tmp_path / "r.json")
    against.main(out, "model", "trace", "3", "0", "956")
    against.main(out, "model", "trace", "3")
    assert asked == [("model", "trace", [None, 956_000_000], 3), ("model", "trace", [None], 3)]
    assert records.read(out, disturbed=True).tok_s.tolist() == [2.0]
    with pytest.raises(ValueError, match="RUNS and MB as numbers, got 3 many"):
        against.main(out, "model", "trace", "3", "many")
