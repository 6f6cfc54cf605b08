"""Prompts that are kept: what a prompt finds, and what is forgotten."""

import families
import mlx.core as mx
import pytest
import recurrent
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from moelab.commands.server import prompts as module
from moelab.commands.server.prompts import Prompts

TEXT = recurrent.ids(0, 60, vocab=families.VOCAB - 4)[0].tolist()


@pytest.fixture(scope="module", params=["hybrid", "attention"])
def model(request):
    """tiny-moe's recurrent states cannot be trimmed; a small attention-only model's can."""
    return recurrent.tiny() if request.param == "hybrid" else families.build("qwen3_moe")[0]


def read(model, tokens, cache=None):
    """Caches after tokens, and the logits after the last."""
    cache = cache or make_prompt_cache(model)
    logits = model(mx.array([tokens]), cache=cache)[0, -1]
    mx.eval(logits, [c.state for c in cache])
    return cache, logits


def is_hybrid(model):
    return not all(c.is_trimmable() for c in make_prompt_cache(model))


def test_what_a_prompt_finds(model):
    """The logits after a prompt that goes on from kept caches are those after the whole."""
    prompts = Prompts()
    assert prompts.fetch(TEXT) == (None, 0) == prompts.fetch([]) == prompts.fetch(TEXT[:1])
    prompts.keep(TEXT[:40], read(model, TEXT[:40])[0])
    other = TEXT[:30] + [t + 1 for t in TEXT[30:59]]
    cut = 0 if is_hybrid(model) else 30  # where no token can be taken back
    begin = 0 if is_hybrid(model) else 38  # mlx-lm's store leaves one more token to read
    for prompt, cached in ((TEXT, 40), (TEXT[:41], 40), (other, cut), (TEXT[:40], begin)):
        cache, n = prompts.fetch(prompt)
        assert n == cached and (cache is None) == (n == 0)
        wanted = read(model, prompt)[1]
        assert mx.allclose(read(model, prompt[n:], cache)[1], wanted, atol=1e-3)
    assert prompts.fetch(TEXT)[1] == 40  # what was fetched went on and is a copy


def test_the_caches_that_are_kept_may_go_on(model):
    prompts, cache = Prompts(), read(model, TEXT[:40])[0]
    prompts.keep(TEXT[:40], cache, "user")
    read(model, TEXT[50:], cache)
    wanted = read(model, TEXT)[1]
    assert mx.allclose(read(model, TEXT[40:], prompts.fetch(TEXT)[0])[1], wanted, atol=1e-3)


def test_a_view_of_a_batch_keeps_no_more_than_itself(model):
    """The text's part of a batch's arrays is copied, and the caches of the caller stay views."""
    texts = mx.array([TEXT[:40]] * 8)
    batch, prompts = make_prompt_cache(model), Prompts()
    mx.eval(model(texts, cache=batch), [c.state for c in batch])
    for c in batch:
        c.state = tree_map(lambda a: a[:1] if type(a) is mx.array else a, c.state)
    prompts.keep(TEXT[:40], batch)
    before, nbytes = mx.get_active_memory(), sum(c.nbytes for c in batch)
    del batch, c
    assert before - mx.get_active_memory() >= 7 * nbytes


def test_where_prompts_part(model):
    prompts = Prompts()
    other = TEXT[:30] + [t + 1 for t in TEXT[30:]]
    assert prompts.shared(TEXT) == 0
    assert prompts.shared(other) == 30  # with one that was read, and none is kept yet
    prompts.keep(TEXT[:30], read(model, TEXT[:30])[0], "system")
    assert prompts.shared(other[:-1]) == 58  # but for the last token of ``other[:-1]``
    assert prompts.shared(TEXT[:30] + [t + 2 for t in TEXT]) == 0  # where a kept one ends
    assert prompts.shared(TEXT[:10] + [t + 3 for t in TEXT]) == 0  # too few to be kept
    text = TEXT[::-1]
    prompts.keep(text, read(model, text)[0])
    # A kept cache that can be trimmed serves every prompt that begins so.
    assert prompts.shared(text[:50] + TEXT) == (50 if is_hybrid(model) else 0)


def test_what_is_forgotten(model, monkeypatch):
    texts = [[t + i for t in TEXT] for i in range(4)]
    caches = [read(model, text)[0] for text in texts]
    nbytes = sum(c.nbytes for c in caches[0])

    def left(prompts):
        return [i for i, text in enumerate(texts) if prompts.fetch([*text, 0])[1]]

    def of(*given):
        prompts = Prompts(*given)
        for text, cache in zip(texts, caches):
            prompts.keep(text, cache)
        return prompts

    assert left(of(2)) == left(of(10, 2 * nbytes + 1)) == [2, 3]
    assert left(of(0)) == left(of(10, nbytes - 1)) == []
    prompts = of()
    prompts.trim(nbytes)
    assert left(prompts) == [3]

    # Memory in which, beside 10 bytes left free, two of them fit.
    prompts = Prompts(free_nbytes=10)
    room = 10 + 2 * nbytes
    monkeypatch.setattr(module, "memory_now", lambda: (0, room - prompts._lru.nbytes))
    for text, cache in zip(texts, caches):
        prompts.keep(text, cache)
    assert left(prompts) == [2, 3]
    room = 10 + nbytes
    assert prompts.make_way() and left(prompts) == [3]
    room = nbytes
    prompts.keep(texts[0], caches[0])
    assert left(prompts) == [] and not prompts.make_way(nbytes)
