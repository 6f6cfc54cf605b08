"""Many requests at once for a server with little memory."""

import pytest

from moelab import synthesize
from moelab.lab import limit
from moelab.lab.experiments import crowd
from moelab.streaming.room import LEFT_NBYTES

MB = 1_000_000
REQUESTS = 12


def measured(path, limit_nbytes, **sizes):
    try:
        return crowd.measure(path, [limit_nbytes], requests=REQUESTS, **sizes).to_dict("records")
    except limit.NoLimit as e:
        pytest.skip(str(e))


def check(rows, limit_nbytes, spare_nbytes):
    for row in rows:
        assert (row["answered"], row["killed"]) == (REQUESTS, False)
        assert 100 * MB < row["most_nbytes"] < limit_nbytes - spare_nbytes
        assert row["plan"].startswith("slots=") and row["texts_at_once"] < REQUESTS


def test_a_server_is_not_killed():
    rows = measured(crowd.MODEL, 250 * MB, rounds=1, prompt_tokens=300, tokens=8)
    check(rows, 250 * MB, 0)


def test_a_server_of_large_experts_is_not_killed(tmp_path):
    synthesize.synthesize(tmp_path / "model", "qwen3.5-35b-a3b", 4, tokenizer=crowd.MODEL)
    rows = measured(tmp_path / "model", 900 * MB, rounds=1)
    check(rows, 900 * MB, LEFT_NBYTES)
