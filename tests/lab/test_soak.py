"""A server watched at work."""

from moelab.lab.experiments import soak


def test_a_short_soak():
    """Every request is answered or broken off, and the server ends as it should."""
    r = soak.measure(prompt_tokens=40, tokens=40, requests=soak.HANGS_UP + 1, every_s=0.1)
    usage = r.attrs["long"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 40)
    assert (r.variant == "long").sum() > 2 and (r.rss_nbytes > 1e7).all() and (r.fds > 2).all()
    assert r.attrs["short"] == {"answered": soak.HANGS_UP, "hung_up": 1, "same": 1}
    assert list(r["round"][r.variant == "short"]) == list(range(soak.HANGS_UP + 1))
    assert r.attrs["exit_status"] == 0 and not r.attrs["traceback"]
