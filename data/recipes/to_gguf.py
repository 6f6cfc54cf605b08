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

ARCHITECTURE, MODEL_TYPE = gguf.MODEL_ARCH.QWEN35MOE, "qwen3_5_moe"
CODE_BYTES, BLOCKS = 16, 2  # bytes of 32 codes; blocks of a group
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
    "full_attention_interval": "full_attention_interval",
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
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[ARCHITECTURE])
    for key, value in _fields(config, path.name).items():
        getattr(writer, f"add_{key}")(value)
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
    rope = t["rope_parameters"]
    return {field: t[key] for field, key in FIELDS.items()} | {
        "name": name,
        "tokenizer_model": "no_vocab",
        "rope_freq_base": rope["rope_theta"],
        "rope_dimension_count": int(t["head_dim"] * rope["partial_rotary_factor"]),
        "rope_dimension_sections": [*rope["mrope_section"], 0],
        "ssm_inner_size": t["linear_value_head_dim"] * t["linear_num_value_heads"],
    }


def _tensors(path, config):
    """Map llama.cpp's names to lazy tensors: uint8 blocks of ``Q4_1``, or float32."""
    stored = {}
    for file in sorted(path.glob("model*.safetensors")):
        stored |= mx.load(str(file))
    t, quantization = config["text_config"], config.get("quantization", {})
    values, value_dim = t["linear_num_value_heads"], t["linear_value_head_dim"]
    all_keys = 2 * t["linear_num_key_heads"] * t["linear_key_head_dim"]
    # Several value heads share a key head. llama.cpp gives value head i the key head i % keys;
    # mlx-lm gives it i // (values / keys), so the value heads of one key head lie together.
    order = np.arange(values).reshape(t["linear_num_key_heads"], -1).T.ravel()

    def reordered(array, width, first=0, axis=0):
        """Put value heads (``width`` entries each, after ``first`` others) in llama.cpp's order."""
        heads = first + (order[:, None] * width + np.arange(width)).ravel()
        return mx.take(array, mx.array(np.concatenate([np.arange(first), heads])), axis)

    def columns(array):  # a column is a byte of blocks, or a weight
        return reordered(array, value_dim * (20 if array.dtype == mx.uint8 else 32) // 32, axis=-1)

    changed = {  # by the last part of mlx-lm's name
        "in_proj_qkv": lambda a: reordered(a, value_dim, all_keys),
        "conv1d": lambda a: reordered(a.squeeze(-1), value_dim, all_keys),
        "in_proj_z": lambda a: reordered(a, value_dim),
        **dict.fromkeys(("in_proj_b", "in_proj_a", "dt_bias"), lambda a: reordered(a, 1)),
        "A_log": lambda a: reordered(-mx.exp(a), 1),
        "out_proj": columns,
        "shared_expert_gate": lambda a: a.reshape(-1),
    }

    def converted(name):
        path, w = name.removesuffix(".weight"), stored[name]
        last = path.rpartition(".")[2]
        if f"{path}.scales" not in stored:
            w = w.astype(mx.float32)
        else:
            scales, biases = (stored[f"{path}.{part}"] for part in ("scales", "biases"))
            given = quantization | quantization.get(path, {})
            bits, size = given["bits"], given["group_size"]
            if bits == 4 and last != "gate":  # llama.cpp's router is not quantized
                if size != 64:
                    raise ValueError(f"{path}: expected groups of 64 weights, got {size}")
                w = _blocks(w, scales, biases)
            else:
                floats = (a.astype(mx.float32) for a in (scales, biases))
                w = mx.dequantize(w, *floats, size, bits)
        return changed.get(last, lambda a: a)(w)

    names = gguf.get_tensor_name_map(ARCHITECTURE, t["num_hidden_layers"])
    found = {}  # gguf knows transformers' names
    for name in stored:
        theirs = name.removeprefix("language_model.").replace("switch_mlp", "experts")
        theirs = theirs.replace("dt_bias", "dt_proj.bias")
        found[names.get_name(theirs, (".weight", ".bias"))] = name
    found.pop(None, None)  # scales, biases, and tensors that llama.cpp lacks
    return {theirs: converted(name) for theirs, name in sorted(found.items())}


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
