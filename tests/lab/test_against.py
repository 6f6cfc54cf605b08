"""lab.experiments.against: one text by several, each in a process of its own."""

import pytest

from moelab import DATA
from moelab.lab import limit, peers, records
from moelab.lab.experiments import against, bench

TINY, CODE = DATA / "models" / "tiny-moe", DATA / "traces" / "code.npz"
AMOUNT = {"prompt": 7, "tokens": 3, "warmup": 2}


def test_all_read_one_text_and_say_one_continuation():
    names = peers.built()
    made = against.against(TINY, CODE, runs=1, **AMOUNT, ways=names, progress=False)
    assert made.peer.tolist() == names and not made.killed.any()
    assert (made.tok_s > 0).all() and (made.prefill_s > 0).all() and (made.file_nbytes > 0).all()
    assert set(made.decode_tokens) == {3} and set(made.prompt_tokens) == {7}
    exact = made[made.peer != peers.LLAMA_CPP]  # which rounds activations to 8 bits
    assert len(set(map(tuple, exact.tokens))) == 1
    assert made.attrs["settings"]["versions"] == peers.versions()


def test_a_peers_run_has_the_tokens_and_the_clock_of_ours():
    ids, fed = bench.texts_of(CODE, 5, TINY)
    row = against.sample_here(peers.MLX_LM, str(TINY), ids, fed, 2, 3, [], {})
    ours = bench.measure(TINY, "resident", None, 3, 1, 2, feed=CODE, progress=False)
    assert row["tokens"] == ours.tokens[0] and row["prompt_tokens"] == len(ids)
    assert row["decode_tokens"] == len(row["step_s"]) == 3
    assert row["decode_s"] == sum(row["step_s"])


def test_prompts_are_read_with_one_token_behind_each():
    names = [peers.MOELAB]
    made = against.against(TINY, [5, 9], runs=1, ways=names, progress=False)
    assert made.variant.tolist() == [f"moelab, no limit, prompt of {n}" for n in (5, 9)]
    assert made.prompt_tokens.tolist() == [5, 9] and set(made.decode_tokens) == {1}


def test_a_limit_is_lowered_on_the_way():
    try:
        limits, names = [(900_000_000, 800_000_000)], [peers.MOELAB]
        made = against.against(TINY, CODE, limits, 1, **AMOUNT, ways=names, progress=False)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    assert made.variant.tolist() == ["moelab, 900 MB to 800 MB"] and not made.killed.any()
    assert made.limit_nbytes.tolist() == [9e8] and made.lowered_nbytes.tolist() == [8e8]
    assert len(made.fallen_s[0]) == 3
    assert made.fallen_tok_s[0] * sum(made.fallen_s[0]) == pytest.approx(3)
    assert len(made.tokens[0]) == 1 + 2 + 3 + len(made.falling_s[0]) + 3


def test_a_limit_that_does_not_fall_is_an_error(monkeypatch):
    def refuse(nbytes):
        raise OSError("no limit may be set")

    monkeypatch.setattr(limit, "lower", refuse)
    ids, fed = bench.texts_of(CODE, 12, TINY)
    with pytest.raises(OSError, match="no limit may be set"):
        against.sample_here(peers.MOELAB, str(TINY), ids, fed, 2, 3, [9 * 10**8, 8 * 10**8], {})


def test_mlx_vlm_gets_a_share_of_what_the_limit_leaves(tmp_path):
    (tmp_path / "experts").mkdir()
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "experts" / "layer_0.safetensors").write_bytes(bytes(900))
    assert against._cache_nbytes(tmp_path, 300) == 200 * against.CACHE_SHARE
    assert against._cache_nbytes(tmp_path, 50) == 0 and against._nbytes(tmp_path) == 1000


def test_a_faster_disk_shortens_what_less_memory_added():
    rows = [
        {"peer": peer, "share": share, "variant": "", "round": 0, "token_s": token_s}
        for peer, share, token_s in (
            ("a", 1.0, 0.01),
            ("b", 1.0, 0.02),
            ("c", 1.0, 0.03),
            ("a", 0.5, 0.04),
            ("b", 0.5, 0.22),
            ("c", 0.5, None),
        )
    ]
    look = against.dial(records.pandas().DataFrame(rows), 1e9)
    assert list(look(50, 2.0).data[0].x) == pytest.approx([1 / 0.025, 1 / 0.12])
    assert "a decodes 4.8 times as fast as b" in look(50, 2.0).layout.title.text
    assert list(look(75, 1.0).data[0].x) == pytest.approx([1 / 0.02, 1 / (0.02 * 0.22) ** 0.5])
    assert list(look(100, 2.0).data[0].x) == pytest.approx([100, 50, 100 / 3])


def test_the_command_writes_a_record(tmp_path, monkeypatch, capsys):
    asked = []

    def made(*given, **more):
        asked.append((*given, more))
        rows = [{"variant": "a", "round": 0, "decode_s": 2.0, "decode_tokens": 4, "prefill_s": 1.0}]
        return records.Running("against", {}).table(rows)

    monkeypatch.setattr(against, "against", made)
    out = str(tmp_path / "r.json")
    against.main(out, "model", "trace", "3", "0", "956", "1530-956")
    against.main(out, "model", "126,400", "3")
    ways = ["mlx-lm", "moelab/slots=9"]
    against.main(out, "model", "trace", "3", "tokens=9", *ways, "warmup=0")
    limits = [[], [956_000_000], [1_530_000_000, 956_000_000]]
    assert asked == [
        ("model", "trace", limits, 3, {"ways": peers.NAMES}),
        ("model", [126, 400], [[]], 3, {"ways": peers.NAMES}),
        (
            "model",
            "trace",
            [[]],
            3,
            {"ways": ["mlx-lm", "moelab/slots=9"], "tokens": 9, "warmup": 0},
        ),
    ]
    assert records.read(out, disturbed=True).tok_s.tolist() == [2.0]
    with pytest.raises(ValueError, match="expected MB, prompt=N, .* mlx-vlm\\), got many"):
        against.main(out, "model", "trace", "3", "many")
    with pytest.raises(ValueError, match="RUNS as a number, got few"):
        against.main(out, "model", "trace", "few")
