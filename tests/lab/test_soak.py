"""A server watched at work."""

from moelab.lab.experiments import soak


def test_a_short_soak():
    """Every request is answered or broken off, and the server ends as it should."""
    r = soak.measure(prompt_tokens=40, tokens=40, requests=soak.HANGS_UP + 1, every_s=0.1)
    usage, rows = r["long"]["usage"], r["long"]["rows"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 40)
    assert len(rows) > 2 and all(row["rss_nbytes"] > 1e7 and row["fds"] > 2 for row in rows)
    short = r["short"]
    assert (short["answered"], short["hung_up"], short["same"]) == (soak.HANGS_UP, 1, 1)
    assert [row["request"] for row in short["rows"]] == list(range(soak.HANGS_UP + 1))
    assert r["exit_status"] == 0 and not r["traceback"]
