"""Notebook 11: ranks of tiny-moe write one text; a simulated SSD delays and changes no token."""

import pytest

from moelab import DATA
from moelab.lab import ranks as processes
from moelab.lab.__main__ import main
from moelab.lab.experiments import ranks

TINY_MOE = DATA / "models" / "tiny-moe"


def test_ranks_of_this_machine():
    made = ranks.divided(TINY_MOE, (1, 2), (8,), (40e6,), tokens=3, warmup=2, prompt_tokens=9)
    assert made.tokens.map(str).nunique() == made.digest.nunique() == 1
    assert set(made.experts[made.ranks == 1]) == {64} and set(made.experts[made.ranks == 2]) == {32}
    assert not made.most_nbytes[made["where"] == ranks.HELD].any()
    slow = made[made.rate_bytes_per_s == 40e6]
    one, two = slow.most_nbytes
    assert 0 < two < one
    assert (slow.decode_s > slow.bytes_read / 40e6 * 0.95).all() and (slow.wait_s > 0).all()


def test_texts_that_differ_are_no_record(monkeypatch):
    """A rank that decodes other tokens, or with other bits, is an error."""
    row = {"tokens": [1], "digest": "a", "bytes_read": 0, "decode_s": 1.0}
    for wrong in ({"tokens": [2]}, {"digest": "b"}):
        monkeypatch.setattr(ranks, "everywhere", lambda n, *_, w=wrong, **__: [row, row | w][:n])
        with pytest.raises(ValueError, match="the same text of 2 ranks"):
            ranks.divided(TINY_MOE)


def test_a_rank_that_fails():
    with pytest.raises(OSError, match="rank 0 of 1: .*no-model"):
        processes.everywhere(1, ranks.decode_here, "no-model", 8, None, 1, 1, 1, None, False)


def test_the_environment_of_two_gpus(tmp_path):
    first, second = processes.environments(2, tmp_path, "nccl")
    assert [first["MLX_RANK"], second["MLX_RANK"]] == ["0", "1"]
    assert [first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]] == ["0", "1"]
    assert first["NCCL_PORT"] == second["NCCL_PORT"] and first["MLX_WORLD_SIZE"] == "2"


def test_wrong_words(capsys):
    assert main(["ranks", "o", "m", "few"]) == 1
    assert "expected OUT MODEL" in capsys.readouterr().err
