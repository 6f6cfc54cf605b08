"""The shipped tiny-moe: its tokenizer, and the recipe that evaluates it."""

from pathlib import Path

import evaluate
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from moelab.lab.texts import heldout_files

MODEL = Path(__file__).parents[2] / "data" / "models" / "tiny-moe"
HELDOUT = heldout_files(MODEL / "heldout")


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = mlx_lm.load(str(MODEL))
    model.set_dtype(mx.float32)
    return model, tokenizer


def test_tokenizer_is_exact(loaded):
    _, tokenizer = loaded
    for text in [*HELDOUT.values(), "\t x = 'é漢字😀'\r\n\n  \n"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    specials = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id]
    assert len(set(specials)) == 3 and tokenizer.encode("<|mask|>") == [tokenizer.mask_token_id]
    assert len(tokenizer) == 8192


def test_evaluation_is_the_models_own(loaded):
    """It is what plain mlx-lm says, and each token uses its experts."""
    model, tokenizer = loaded
    text = HELDOUT["jinja2__visitor.py"][:200]
    bpb, shares = evaluate.evaluate(MODEL, [text])
    assert shares.shape == (8, 64) and np.allclose(shares.sum(1), 8)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    ids = mx.array([[tokenizer.eos_token_id, *encoded]])
    logits = model(ids[:, :-1])
    picked = mx.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    nats = (mx.logsumexp(logits, axis=-1) - picked).sum().item()
    assert bpb == pytest.approx(nats / np.log(2) / len(text.encode()), rel=1e-4)
