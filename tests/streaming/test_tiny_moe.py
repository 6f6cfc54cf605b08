"""The shipped tiny-moe: its size, its held-out text against xz, and its use of experts."""

from pathlib import Path

import evaluate
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU
from tiny_moe import CONFIG, EIGHT_BIT

from moelab.lab.quality import xz_bits_per_byte
from moelab.lab.texts import heldout_files

MODEL = Path(__file__).parents[2] / "data" / "models" / "tiny-moe"
TEXT = CONFIG["text_config"]


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = mlx_lm.load(str(MODEL))
    model.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture(scope="module")
def heldout():
    return heldout_files(MODEL / "heldout")


def test_size():
    assert sum(p.stat().st_size for p in MODEL.rglob("*") if p.is_file()) <= 40_000_000


def test_heldout_text_and_licences(heldout):
    assert sum(len(t.encode()) for t in heldout.values()) >= 200_000
    licences = {p.stem for p in (MODEL / "heldout" / "licences").iterdir()}
    assert {name.split("__")[0] for name in heldout} <= licences


def test_shape_and_bits(loaded):
    model, _ = loaded
    assert len(model.layers) == TEXT["num_hidden_layers"]
    assert [layer.is_linear for layer in model.layers] == [True, True, True, False] * 2
    for layer in model.layers:
        experts = layer.mlp.switch_mlp.gate_proj
        assert (experts.num_experts, experts.bits, experts.group_size) == (
            TEXT["num_experts"],
            4,
            64,
        )
        assert layer.mlp.top_k == TEXT["num_experts_per_tok"]
        assert layer.mlp.gate.bits == 8 and "mlp.gate" in EIGHT_BIT


def test_tokenizer_is_exact(loaded, heldout):
    _, tokenizer = loaded
    for text in [*heldout.values(), "\t x = 'é漢字😀'\r\n\n  \n"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    specials = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id]
    assert len(set(specials)) == 3 and tokenizer.encode("<|mask|>") == [tokenizer.mask_token_id]
    assert len(tokenizer) == TEXT["vocab_size"]


def test_beats_xz_and_routing_has_not_collapsed(loaded, heldout):
    names = ["jinja2__visitor.py", "scrapy__utils__spider.py"]
    bpb, shares = evaluate.evaluate(*loaded, [heldout[n] for n in names])
    # xz compresses all of the text, which is harder to beat than a part of it.
    xz = xz_bits_per_byte(list(heldout.values()))
    assert bpb < 0.6 * xz, (bpb, xz)
    even = TEXT["num_experts_per_tok"] / TEXT["num_experts"]
    assert np.allclose(shares.sum(1), TEXT["num_experts_per_tok"])
    # A few thousand tokens of one kind of text: over all of it the shares differ less.
    assert shares.max() < 6 * even and (shares < even / 50).mean() < 0.05, (
        shares.max(1),
        shares.min(1),
    )


def test_evaluation_is_the_models_own(loaded, heldout):
    """The expert-by-expert product gives plain mlx-lm's result, and the model is unchanged."""
    model, tokenizer = loaded
    text = heldout["jinja2__visitor.py"][:700]
    bpb, _ = evaluate.evaluate(model, tokenizer, [text])
    assert all(type(layer.mlp.switch_mlp) is SwitchGLU for layer in model.layers)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    ids = mx.array([[tokenizer.eos_token_id, *encoded]])
    logits = model(ids[:, :-1])
    picked = mx.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    nats = (mx.logsumexp(logits, axis=-1) - picked).sum().item()
    assert bpb == pytest.approx(nats / np.log(2) / len(text.encode()), rel=1e-4)
