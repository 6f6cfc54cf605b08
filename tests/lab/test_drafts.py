"""Drafts in the lab: an oracle that is always right, a long run's positions, GPU records."""

import time

import mlx.core as mx
import pytest

from moelab import stats
from moelab.lab import records
from moelab.lab.decode import OracleDraft, decode, decode_drafted, open_any
from moelab.speculation.drafts import LookupDraft
from moelab.speculation.generate import speculative_generate_step


def test_a_perfect_draft_is_always_accepted(streamed):
    text = decode(streamed, [1, 2], 23).tokens
    right = decode_drafted(streamed, [1, 2], OracleDraft([1, 2, *text], 1.0), 3, 23)
    wrong = decode_drafted(streamed, [1, 2], OracleDraft([1, 2, *text], 0.0), 3, 23)
    assert right.tokens == wrong.tokens == text
    assert all(drafted == accepted for drafted, accepted, *_ in right.rounds)
    assert wrong.rounds and not any(accepted for _, accepted, *_ in wrong.rounds)


def test_a_long_run_accounts_for_every_position(streamed):
    prompt, tokens, every = [3, 1, 4, 1, 5], 120, 40
    rounds, active = {}, []
    stats(streamed, reset=True)
    steps = speculative_generate_step(
        mx.array(prompt), streamed, LookupDraft(), num_draft_tokens=3, max_tokens=tokens
    )
    for n, (_, _, _, r) in enumerate(steps, 1):
        rounds[r.number] = r.drafted
        if n % every == 0:
            active.append(mx.get_active_memory())
    both = stats(streamed)
    read = both.prefill.tokens + both.decode.tokens
    assert read == len(prompt) - 1 + sum(1 + d for d in rounds.values())
    assert len(active) == 3 and active[-1] - active[0] < 5e6


def test_the_clock_starts_after_the_draft_is_ready(streamed):
    class Slow(LookupDraft):
        def bind(self, model, cache=None):
            super().bind(model, cache)
            time.sleep(0.5)

    begin = time.perf_counter()
    ran = decode_drafted(streamed, [1, 2], Slow(), 2, 4)
    assert ran.decode_s < time.perf_counter() - begin - 0.4


def test_what_drafts(streamed):
    assert isinstance(open_any("oracle", streamed)([1], [2]), OracleDraft)
    assert open_any("lookup", streamed)([1], []) is not None


@pytest.mark.parametrize("drafts", ["1", "3", "7", "15"])
def test_rounds_on_a_gpu_accept_as_many_drafts_resident_as_streamed(drafts):
    """Streaming changes no text: what differs from the undrafted one is rounding."""
    of = records.read("cuda_drafts_dflash").query("num_drafts == @drafts")
    of = of.set_index(["variant", "round"])
    for (variant, i), row in of.iterrows():
        assert row.committed == of.loc[f"resident, {drafts} drafts", i].committed, variant
