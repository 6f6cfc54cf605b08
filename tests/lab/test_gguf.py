"""lab.gguf: the weights of a checkpoint, as llama.cpp would read them from a GGUF file."""

import json

import gguf
import mlx.core as mx
import numpy as np
import pytest

from moelab import DATA
from moelab.checkpoint import Checkpoint
from moelab.lab.gguf import write

TINY = DATA / "models" / "tiny-moe"


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """Of tiny-moe: name to float32 values, dequantized by the library."""
    out = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(TINY, out, progress=False)
    assert not list(out.parent.glob("*.partial"))
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(out).tensors}


def weights(name):
    """Of tiny-moe in MLX, float32, with scales and biases in float16 where they have 4 bits."""
    stored = mx.load(str(next(TINY.glob("model*.safetensors"))))
    w = stored[f"{name}.weight"]
    if f"{name}.scales" not in stored:
        return np.array(w.astype(mx.float32))
    given = json.loads((TINY / "config.json").read_text())["quantization"]
    bits = (given | given.get(name, {}))["bits"]
    kind = mx.float16 if bits == 4 else mx.float32
    parts = (stored[f"{name}.{p}"].astype(kind).astype(mx.float32) for p in ("scales", "biases"))
    return np.array(mx.dequantize(w, *parts, given["group_size"], bits))


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("token_embd.weight", "embed_tokens"),
        ("blk.0.ffn_gate_exps.weight", "layers.0.mlp.switch_mlp.gate_proj"),
        ("blk.1.ffn_down_exps.weight", "layers.1.mlp.switch_mlp.down_proj"),
        ("blk.1.ffn_gate_inp.weight", "layers.1.mlp.gate"),
        ("blk.3.attn_q.weight", "layers.3.self_attn.q_proj"),
        ("output_norm.weight", "norm"),
    ],
)
def test_weights_are_the_checkpoints(tensors, theirs, ours):
    np.testing.assert_array_equal(tensors[theirs], weights(f"language_model.model.{ours}"))


def test_value_heads_are_in_the_order_of_llama_cpp(tensors):
    t = Checkpoint(TINY).config["text_config"]
    keys, values = t["linear_num_key_heads"], t["linear_num_value_heads"]
    own = "language_model.model.layers.0.linear_attn."
    assert values > keys  # else the order is the same
    for theirs, ours, axis in (("attn_gate", "in_proj_z", 0), ("ssm_out", "out_proj", 1)):
        w = np.moveaxis(weights(own + ours), axis, 0).reshape(keys, values // keys, -1)
        made = np.moveaxis(tensors[f"blk.0.{theirs}.weight"], axis, 0)
        np.testing.assert_array_equal(made.reshape(w.shape[1], w.shape[0], -1), w.swapaxes(0, 1))


def test_a_model_of_another_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(ValueError, match="expected model_type qwen3_5_moe, got qwen3_moe"):
        write(tmp_path, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
