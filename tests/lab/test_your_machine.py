"""Our own speeds and prompts beside what a plan says of them."""

import numpy as np
import planned_own
import pytest

from moelab.lab import records


def test_our_own_record_is_what_is_replayed_now():
    record, now = records.read("cpu_planned_own"), planned_own.own()
    assert record.variant.tolist() == now.variant.tolist()
    assert record.planned_tok_s.to_numpy() == pytest.approx(now.planned_tok_s.to_numpy(), rel=1e-3)
    assert np.median(now.factor) < 1.15


def test_our_own_first_tokens_lie_in_the_planned_range():
    prompts = planned_own.own_prompts()
    assert len(prompts) == 6 and (prompts.factor <= 1.1).all()
