"""The records of the fast kernels: what they hold, small."""

import os

import pytest
from needs import needs_kernels

from moelab.lab.experiments import kernels


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are given on Linux alone")
def test_products_by_threads():
    cores = os.sched_getaffinity(0)
    made = kernels.products(rounds=1, rows=(1, 2), bits=(4,))
    assert set(made.threads) == {1, len(cores)} and os.sched_getaffinity(0) == cores
    of_a_run = made[made.threads == 1].value_counts(["variant", "rows"], dropna=False)
    assert len(of_a_run) == 3 * 2 + 1 and (of_a_run == 1).all()


@needs_kernels
def test_both_kernels_write_the_same_texts():
    made = kernels.texts(num=1, tokens=3, prompt_tokens=8, windows=1)
    (text,) = made.dropna(subset="difference").itertuples()
    assert text.difference < 1e-3 and text.parted == [] == text.gaps
    mlx, fast = made.dropna(subset="bits_per_byte").bits_per_byte
    assert fast == pytest.approx(mlx, rel=1e-4)


def test_what_is_no_record_of_kernels(tmp_path):
    with pytest.raises(ValueError, match="expected products or texts, got 'nonsense'"):
        kernels.main("nonsense", str(tmp_path / "r.json"))
