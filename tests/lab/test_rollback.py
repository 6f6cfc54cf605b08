"""The faulty remedies of notebooks 06 and 08 are faulty, and only in the recurrent state."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache
from recurrent import build, ids

from moelab.lab.experiments import rollback

TEXT = ids(6, 30)[0].tolist()


@pytest.mark.parametrize("name", rollback.REMEDIES)
def test_only_the_exact_remedy_keeps_the_state(name):
    model = build("qwen3_5_moe")
    cache, true = (rollback.read_ids(model, TEXT[:20]) for _ in range(2))
    remedy = rollback.REMEDIES[name](model, cache)
    mx.eval(remedy(mx.array([TEXT[20:26]])))
    remedy.undo(3)
    remedy.commit()
    for token in TEXT[20:23]:
        mx.eval(model(mx.array([[token]]), cache=true))
    recurrent = [(c, t) for c, t in zip(cache, true) if isinstance(c, ArraysCache)]
    off = max(float(abs(a - b).max()) for c, t in recurrent for a, b in zip(c.cache, t.cache))
    assert off < 1e-5 if name == "exact" else off > 1e-3
    trimmed = [(c.offset, t.offset) for c, t in zip(cache, true) if c.is_trimmable()]
    assert trimmed and all(mine == theirs == 23 for mine, theirs in trimmed)
