"""A memory limit that is real, and the bench under it."""

import sys

import pytest

import moelab
from moelab.lab import limit


def run(code, nbytes):
    try:
        return limit.run([sys.executable, "-c", code], nbytes)
    except limit.NoLimit as e:
        pytest.skip(str(e))


def test_a_process_over_its_limit_is_killed_and_one_under_it_is_not():
    big = run("x = b'1' * (400 << 20)", 100 << 20)
    assert big.killed and big.how != "none"
    small = run("x = b'1' * (10 << 20); print(len(x))", 200 << 20)
    assert not small.killed and small.stdout.strip() == str(10 << 20)
    free = limit.run([sys.executable, "-c", "print('no limit')"])
    assert (free.returncode, free.how) == (0, "none")


def test_bench_under_a_limit():
    path = moelab.DATA / "models" / "tiny-moe"
    try:
        record = limit.bench_limited(path, {"fused": moelab.StreamConfig()}, 2_000_000_000, tokens=4, warmup=2, runs=1)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    assert [s["variant"] for s in record["samples"]] == ["resident, no limit", "fused, limit"]
    assert record["summary"]["fused, limit"]["same_tokens"]
    assert record["summary"]["fused, limit"]["bytes_per_token"] > 0
    assert "tokens same" in limit.report(record)
