"""Write a checkpoint of mlx-lm's ``qwen3_5_moe`` as GGUF, with the same weights, for llama.cpp.

    python data/recipes/to_gguf.py MODEL OUT.gguf

Each of MLX's 4-bit groups of 64 weights becomes two ``Q4_1`` blocks of 32 with the same codes; the
group's scale and bias are rounded to float16. Other weights, also those in 8 bits, become float32.
"""

import json
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

from moelab.lab.models import folder

ARCHITECTURE, MODEL_TYPE = "qwen35moe", "qwen3_5_moe"
PREFIX = "language_model.model."
CODE_BYTES, BLOCKS = 16, 2  # bytes of 32 codes; blocks of a group
# llama.cpp's names of a layer's tensors: mlx-lm's names.
EVERY_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{p}_exps": f"mlp.switch_mlp.{p}_proj" for p in ("gate", "up", "down")},
    **{f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
}
ATTENTION = {
    **{f"attn_{p}": f"self_attn.{p}_proj" for p in ("q", "k", "v")},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{p}_norm": f"self_attn.{p}_norm" for p in ("q", "k")},
}
RECURRENCE = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
FIELDS = {  # names of a GGUF file's fields: names in mlx-lm's config
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "layer_norm_rms_eps": "rms_norm_eps",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "feed_forward_length": "moe_intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm_conv_kernel": "linear_conv_kernel_dim",
    "ssm_state_size": "linear_key_head_dim",
    "ssm_group_count": "linear_num_key_heads",
    "ssm_time_step_rank": "linear_num_value_heads",
}


def write(path, out):
    """Write a checkpoint (4 bits, groups of 64) as a GGUF file, which appears once it is whole."""
    path, out = folder(path), Path(out)
    config = json.loads((path / "config.json").read_text())
    if (found := config.get("model_type")) != MODEL_TYPE:
        raise ValueError(f"{path}: expected model_type {MODEL_TYPE}, got {found}. Take another.")
    tensors, partial = _tensors(path, config), out.with_name(out.name + ".partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    for key, values in _fields(config, path.name).items():
        getattr(writer, f"add_{key}")(*values)
    for name, array in tensors.items():
        is_blocks = array.dtype == mx.uint8
        kind = gguf.GGMLQuantizationType.Q4_1 if is_blocks else None
        dtype = np.dtype(np.uint8 if is_blocks else np.float32)
        writer.add_tensor_info(name, array.shape, dtype, array.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in list(tensors):
        writer.write_tensor_data(np.array(tensors.pop(name)))  # evaluated one at a time
    writer.close()
    partial.replace(out)


def _fields(config, name):
    """Map the names of ``GGUFWriter``'s ``add_`` methods to their arguments."""
    t = config["text_config"]
    rope, values = t["rope_parameters"], t["linear_num_value_heads"]
    rotated = int(t["head_dim"] * rope["partial_rotary_factor"])
    return {field: (t[key],) for field, key in FIELDS.items()} | {
        "name": (name,),
        "tokenizer_model": ("no_vocab",),
        "rope_freq_base": (rope["rope_theta"],),
        "rope_dimension_count": (rotated,),
        "rope_dimension_sections": ([*rope["mrope_section"], 0],),
        "ssm_inner_size": (t["linear_value_head_dim"] * values,),
        "uint32": (f"{ARCHITECTURE}.full_attention_interval", t["full_attention_interval"]),
    }


def _tensors(path, config):
    """Map llama.cpp's names to lazy tensors: uint8 blocks of ``Q4_1``, or float32."""
    stored = {}
    for file in sorted(path.glob("model*.safetensors")):
        stored |= mx.load(str(file))
    t, quantization = config["text_config"], config.get("quantization", {})
    keys, key_dim = t["linear_num_key_heads"], t["linear_key_head_dim"]
    values, value_dim = t["linear_num_value_heads"], t["linear_value_head_dim"]

    def get(path, as_floats=False):
        w = stored.pop(f"{path}.weight")
        if f"{path}.scales" not in stored:
            return w.astype(mx.float32)
        scales, biases = (stored.pop(f"{path}.{part}") for part in ("scales", "biases"))
        given = quantization | quantization.get(path, {})
        bits, size = given["bits"], given["group_size"]
        if bits == 4 and not as_floats:
            if size != 64:
                raise ValueError(f"{path}: expected groups of 64 weights, got {size}")
            return _blocks(w, scales, biases)
        floats = (a.astype(mx.float32) for a in (scales, biases))
        return mx.dequantize(w, *floats, size, bits)

    # Several value heads share a key head. llama.cpp gives value head i the key head i % keys;
    # mlx-lm gives it i // (values / keys), so the value heads of one key head lie together.
    order = np.arange(values).reshape(keys, -1).T.ravel()

    def reordered(array, width, first=0, axis=0):
        """Put value heads (``width`` entries each, after ``first`` others) in llama.cpp's order."""
        heads = first + (order[:, None] * width + np.arange(width)).ravel()
        return mx.take(array, mx.array(np.concatenate([np.arange(first), heads])), axis)

    def columns(array):  # a column is a byte of blocks, or a weight
        return reordered(array, value_dim * (20 if array.dtype == mx.uint8 else 32) // 32, axis=-1)

    all_keys = 2 * keys * key_dim
    ordered = {
        "attn_qkv": lambda a: reordered(a, value_dim, all_keys),
        "attn_gate": lambda a: reordered(a, value_dim),
        "ssm_beta": lambda a: reordered(a, 1),
        "ssm_alpha": lambda a: reordered(a, 1),
        "ssm_out": columns,
        "ffn_gate_inp_shexp": lambda a: a.reshape(-1),
    }
    out = {"token_embd.weight": get(f"{PREFIX}embed_tokens")}
    out["output_norm.weight"] = get(f"{PREFIX}norm")
    if "language_model.lm_head.weight" in stored:
        out["output.weight"] = get("language_model.lm_head")
    for i in range(t["num_hidden_layers"]):
        layer, block = f"{PREFIX}layers.{i}.", f"blk.{i}."
        is_attention = (i + 1) % t["full_attention_interval"] == 0
        for name, path in (EVERY_LAYER | (ATTENTION if is_attention else RECURRENCE)).items():
            made = get(layer + path, name == "ffn_gate_inp")  # llama.cpp's router is not quantized
            out[f"{block}{name}.weight"] = ordered.get(name, lambda a: a)(made)
        if not is_attention:
            own = f"{layer}linear_attn."
            taps, a_log = get(f"{own}conv1d").squeeze(-1), stored.pop(f"{own}A_log")
            out[f"{block}ssm_conv1d.weight"] = reordered(taps, value_dim, all_keys)
            dt = stored.pop(f"{own}dt_bias").astype(mx.float32)
            out[f"{block}ssm_dt.bias"] = reordered(dt, 1)
            out[f"{block}ssm_a"] = reordered(-mx.exp(a_log.astype(mx.float32)), 1)
    return out


def _blocks(w, scales, biases):
    """Turn codes ``[..., groups * 8]`` (uint32), scales and biases ``[..., groups]`` into blocks.

    The result is ``[..., groups * 40]`` (uint8). A block has a float16 scale and bias, then 16
    bytes of codes: byte j has codes j and j + 16.
    """
    groups = scales.shape
    packed = w.view(mx.uint8).reshape(*groups, BLOCKS, CODE_BYTES)
    codes = mx.stack([packed & 15, packed >> 4], -1).reshape(*groups, BLOCKS, 2 * CODE_BYTES)
    codes = codes[..., :CODE_BYTES] | (codes[..., CODE_BYTES:] << 4)
    header = mx.stack([scales, biases], -1).astype(mx.float16).view(mx.uint8)[..., None, :]
    header = mx.broadcast_to(header, (*codes.shape[:-1], 4))
    return mx.concatenate([header, codes], -1).reshape(*groups[:-1], -1)


if __name__ == "__main__":
    write(*sys.argv[1:])
