"""Servers watched at work, and under little memory."""

import pytest

from moelab import synthesize
from moelab.lab import limit
from moelab.lab.__main__ import main
from moelab.lab.experiments import servers
from moelab.streaming.room import RESERVE_NBYTES

MB = 1_000_000
REQUESTS = 12


def test_a_short_soak():
    """Every request is answered or broken off, and the servers end as they should."""
    r = servers.soak(
        prompt_tokens=40, tokens=40, requests=servers.HANGS_UP + 1, every_s=0.05, runs=1
    ).set_index("variant")
    assert r.answered.to_dict() == {"long": 40, "short": servers.HANGS_UP}
    assert (r.hung_up["short"], r.same["short"]) == (1, 1)
    assert (r.filter(like="own_nbytes") > 1e7).all(None) and (r.filter(like="fds") > 2).all(None)
    assert not r.exit_status.any() and not r.traceback.any()


def check(path, limit_nbytes, spare_nbytes, **sizes):
    try:
        made = servers.crowd(path, [limit_nbytes], requests=REQUESTS, **sizes)
    except limit.NoLimit as e:
        pytest.skip(str(e))
    for row in made.itertuples():
        assert (row.answered, row.died) == (REQUESTS, False)
        assert 100 * MB < row.most_nbytes < limit_nbytes - spare_nbytes
        assert row.plan.startswith("slots=") and row.texts_at_once < REQUESTS


def test_a_server_is_not_killed():
    check(servers.MODEL, 250 * MB, 0, runs=1, tokens=8)


def test_a_server_of_large_experts_is_not_killed(tmp_path):
    synthesize.synthesize(tmp_path / "model", "qwen3.5-35b-a3b", 4, tokenizer=servers.MODEL)
    check(tmp_path / "model", 900 * MB, RESERVE_NBYTES, runs=1)


@pytest.mark.parametrize("words", ["rest o", "crowd o", "crowd o m few", "soak o 1 2"])
def test_wrong_words(words, capsys):
    assert main(["servers", *words.split()]) == 1
    assert "expected soak OUT [RUNS] or crowd OUT MODEL [RUNS]" in capsys.readouterr().err
