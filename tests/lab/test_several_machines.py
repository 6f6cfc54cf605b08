"""Notebook 11: ranks of tiny-moe write one text; a simulated SSD delays and changes no token."""

import pytest

from moelab import DATA
from moelab.lab import ranks as processes
from moelab.lab.experiments import ranks

TINY_MOE = DATA / "models" / "tiny-moe"


def test_ranks_read_less_and_wait_for_a_slow_ssd():
    fewest = {"tokens": 3, "warmup": 2, "prompt_tokens": 9}
    made = ranks.divided(TINY_MOE, (1, 2), (8,), (40e6,), held=False, **fewest)
    assert made.tokens.map(str).nunique() == made.digest.nunique() == 1
    assert made.experts.tolist() == [64, 32]
    one, two = made.most_nbytes
    assert 0 < two < one
    assert (made.decode_s > made.bytes_read / 40e6 * 0.95).all() and (made.wait_s > 0).all()


@pytest.mark.parametrize("wrong", ({"tokens": [2]}, {"digest": "b"}))
def test_texts_that_differ_are_no_record(wrong, monkeypatch):
    """A rank that decodes other tokens, or with other bits, is an error."""
    row = {"tokens": [1], "digest": "a", "bytes_read": 0, "decode_s": 1.0}
    monkeypatch.setattr(ranks, "everywhere", lambda n, *_, **__: [row, row | wrong][:n])
    with pytest.raises(ValueError, match="the same text of 2 ranks"):
        ranks.divided(TINY_MOE)


def test_a_rank_that_fails_says_why():
    with pytest.raises(OSError, match="rank 0 of 1: .*no-model"):
        processes.everywhere(1, ranks.decode_here, "no-model", 8, None, 1, 1, 1, None, False)
