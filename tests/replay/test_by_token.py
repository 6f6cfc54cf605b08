"""A routing by token: the locality of a trace, in other shapes."""

import numpy as np
import pytest

from moelab.replay import by_token
from moelab.replay.locality import lru_hit_rate, recorded_trace


@pytest.mark.parametrize("name", ["code", "tests", "prose", "docs", "sampled"])
def test_four_times_the_experts_have_the_hit_rate_of_the_trace(name):
    trace = recorded_trace(name)
    routing = by_token.fit(trace, 8, 256, 8, 8192, 1024)
    routed, prompt = routing.route(trace.tokens), (trace.phase == "prefill").sum()
    wanted = lru_hit_rate(trace, prompt)[:, 16].mean()
    assert lru_hit_rate(routed, prompt)[:, 64].mean() == pytest.approx(wanted, abs=0.03)
    assert routing.wanted.mean() == wanted and routed.num_experts == 256
    assert routing.hit_rate.mean() == lru_hit_rate(routed, prompt)[:, 64].mean()


def test_without_room_for_variants_a_token_takes_its_most_frequent_experts():
    trace = recorded_trace("code")
    routing = by_token.fit(trace, 8, 64, 8, 8192, 1024)
    token = np.bincount(trace.tokens).argmax()
    for layer, chosen in enumerate(routing.experts[routing.kinds[token]]):
        counts = np.bincount(trace.experts[trace.tokens == token, layer].ravel(), minlength=64)
        assert counts[chosen].min() >= np.sort(counts)[-8]
        assert (np.diff(counts[chosen]) <= 0).all() and len(set(chosen)) == 8


def test_other_tokens_share_kinds_with_experts_as_popular():
    trace = recorded_trace("code")
    routing = by_token.fit(trace, 8, 64, 8, 8192, 1024)
    known = np.unique(trace.tokens)
    others = np.setdiff1d(np.arange(8192), known)
    assert not set(routing.kinds[known]) & set(routing.kinds[others])
    assert len(set(routing.kinds[known])) == len(known)
    shares = [
        np.bincount(routing.route(tokens).experts[:, 0].ravel(), minlength=64)
        for tokens in (trace.tokens, others)
    ]
    assert np.corrcoef(*shares)[0, 1] > 0.9


@pytest.mark.parametrize("experts", [16, 48, 100, 512])
def test_any_number_of_experts(experts):
    trace = recorded_trace("code")[:200]
    routing = by_token.fit(trace, 3, experts, 5, 8192, 64)
    routed = routing.route(np.arange(8192)).experts
    assert routed.shape == (8192, 3, 5) and 0 <= routed.min() <= routed.max() < experts
    assert np.diff(np.sort(routed, -1), axis=-1).all()
    assert (routed.max() >= 64) == (experts > 64)
