"""Bits per byte, on a small random checkpoint; and the recipe that evaluates the shipped one."""

import evaluate
import mlx.core as mx
import numpy as np
import pytest
from common import TINY_MOE
from mlx_lm.utils import load_tokenizer

import moelab
from moelab import StreamConfig
from moelab.lab import quality
from moelab.lab.texts import heldout_files

HELDOUT = heldout_files(TINY_MOE / "heldout")
TEXTS = ["def f(x):\n    return x + 1\n" * 9, "# ünïcödé ≠ ≥ 3\nprint('日本')\n" * 4, "", "x"]


@pytest.fixture(scope="module")
def model(model_path):
    model, tokenizer = moelab.load(model_path, StreamConfig(slots=8))
    with model:
        yield model, tokenizer


@pytest.mark.parametrize("length", [1, 7, 64])
def test_windows_hold_every_byte_once(model, length):
    """Whatever the length, also where a character is cut in several tokens."""
    some = quality.windows(model[1], TEXTS, length)
    assert some.nbytes.sum() == sum(len(t.encode()) for t in TEXTS)
    assert some.counts.max() <= length and some.ids.shape[1] == length + 1
    # what is predicted in all windows of a file, in a row, is the file
    ids = [i for row, n in zip(some.ids, some.counts) for i in row[1 : n + 1]]
    assert model[1].decode(ids) == "".join(TEXTS)
    assert len(quality.windows(model[1], TEXTS, length, count=3)) == min(3, len(some))


def test_bits_are_those_of_the_definition(model):
    """Each token's surprise given those before it in its window, whatever the padding and batch."""
    net, tok = model
    some = quality.windows(tok, TEXTS, 16, count=5)
    bits = []
    for row, n in zip(some.ids, some.counts):
        logits = np.array(net(mx.array(row[None, :n]))[0], np.float64)
        log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        bits.append(-log_p[np.arange(n), row[1 : n + 1]].sum() / np.log(2))
    for batch in (1, 3, 5):
        np.testing.assert_allclose(quality.score(net, some, batch), bits, rtol=1e-4)


def test_the_shipped_tokenizer_is_exact():
    tokenizer = load_tokenizer(TINY_MOE)
    for text in [*HELDOUT.values(), "\t x = 'é漢字😀'\r\n\n  \n"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    specials = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id]
    assert len(set(specials)) == 3 and tokenizer.encode("<|mask|>") == [tokenizer.mask_token_id]
    assert len(tokenizer) == 8192


def test_the_shipped_model_is_trained_and_each_token_uses_its_experts():
    bits_per_byte, shares = evaluate.evaluate(TINY_MOE, [HELDOUT["jinja2__visitor.py"][:200]])
    assert shares.shape == (8, 64) and np.allclose(shares.sum(1), 8)
    assert 0.5 < bits_per_byte < 2, "1.03 of these characters"
