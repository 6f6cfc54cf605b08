"""Make tiny-moe's drafts: tiny-dflash (blocks), tiny-draft (tokens), tiny-mtp (a draft head).

The README of ``data/models/tiny-dflash`` has the commands. The drafts learn what the 4-bit target
itself writes. ``torch_drafts`` needs a CUDA GPU, PyTorch and fla-core, and neither MLX nor moelab;
``pack`` needs MLX. ``python -m moelab bench --draft`` measures how many tokens are accepted.
"""

import hashlib
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import corpus
from tiny_moe import GROUP_SIZE, TEXT_CONFIG

BLOCK = 16  # b
MASK_TOKEN = 2
AS_TARGET = ("hidden_size", "num_attention_heads", "head_dim", "hidden_act", "rms_norm_eps")
AS_TARGET += ("attention_bias", "max_position_embeddings", "vocab_size")
AS_TARGET += ("pad_token_id", "eos_token_id")
CONFIG = {name: TEXT_CONFIG[name] for name in AS_TARGET} | {
    "model_type": "qwen3",
    "intermediate_size": 768,
    "num_key_value_heads": 4,
    "rope_theta": 100000.0,
    "rope_scaling": None,
}
# Number of decoder layers, target layers that the draft reads (None: an autoregressive draft),
# and highest learning rate.
DRAFTS = {
    "tiny-dflash": (4, [1, 2, 4, 5], 0.016),
    "tiny-draft": (3, None, 0.008),
    "tiny-mtp": (1, None, 0.008),
}
NBYTES = 187_000_000  # of text


def config_of(name):
    """Make the config of a draft as its ``config.json`` will have it."""
    depth, ids, _ = DRAFTS[name]
    if name == "tiny-mtp":  # as mlx-community writes the heads of Qwen3.5
        more = {"mtp_num_hidden_layers": depth, "mtp_use_dedicated_embeddings": False}
        config = {"text_config": TEXT_CONFIG | more, "tie_word_embeddings": True}
        return config | {"model_type": "qwen3_5_mtp", "block_size": 3}
    config = CONFIG | {"num_hidden_layers": depth}
    if ids is None:
        return config | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    return config | {
        "architectures": ["DFlashDraftModel"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * depth,
        "sliding_window": None,
        "use_sliding_window": False,
        "block_size": BLOCK,
        "num_target_layers": TEXT_CONFIG["num_hidden_layers"],
        "dflash_config": {"target_layer_ids": ids, "mask_token_id": MASK_TOKEN},
    }


def write_text(site, model_dir, out):
    """Write token ids of the corpus in the target's vocabulary, and ``manifest.json``.

    ``site`` is the folder that ``pip install --target`` filled. Files are taken in the order of
    their names' hashes, until they have ``NBYTES`` of text.
    """
    from transformers import AutoTokenizer

    packages, documents = corpus.documents(site)
    splits = corpus.split(documents)
    # The held-out packages need not be installed here.
    heldout = (path.read_text(encoding="utf-8") for path in (model_dir / "heldout").glob("*.*"))
    reserved = set().union(*map(corpus.shingles, heldout))
    splits["train"].sort(key=lambda d: hashlib.sha256(f"{d[0]}/{d[1]}".encode()).digest())
    train, used = [], Counter()
    for package, _, text in splits["train"]:
        if used.total() > NBYTES:
            break
        if corpus.overlap(text, reserved) <= 0.05:
            train.append(text)
            used[package] += len(text.encode())
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    manifest = {"packages": [p | {"train_bytes": used[p["name"]]} for p in packages]}
    for name, texts in (("train", train), ("valid", [text for _, _, text in splits["valid"]])):
        manifest[name] = corpus.save(out / f"{name}.npy", tokenizer, texts)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))


def pack(trained, model_dir, out):
    """Write the drafts that were trained; tiny-draft has the target's tokenizer and embedding."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.models.qwen3 import Model, ModelArgs
    from mlx_lm.utils import quantize_model, save_config, save_model

    if (trained / "tiny-mtp").exists():  # its weights are already quantized
        shutil.copytree(trained / "tiny-mtp", out / "tiny-mtp", dirs_exist_ok=True)
    if (weights := trained / "tiny-dflash.safetensors").exists():
        (dflash := out / "tiny-dflash").mkdir(parents=True, exist_ok=True)
        shutil.copy(weights, dflash / "model.safetensors")
        (dflash / "config.json").write_text(json.dumps(config_of("tiny-dflash"), indent=2) + "\n")
    if not (weights := trained / "tiny-draft.safetensors").exists():
        return
    draft = out / "tiny-draft"
    target, _ = mlx_lm.load(str(model_dir))
    e = target.language_model.model.embed_tokens
    embedding = mx.dequantize(e.weight, e.scales, e.biases, e.group_size, e.bits)
    config = config_of("tiny-draft")
    model = Model(ModelArgs.from_dict(config))
    weights = {f"model.{name}": w for name, w in mx.load(str(weights)).items()}
    model.load_weights([*weights.items(), ("model.embed_tokens.weight", embedding)])
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, GROUP_SIZE, 8)
    save_model(draft, model)
    save_config(config, draft / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, draft)


if __name__ == "__main__":
    {"text": write_text, "pack": pack}[sys.argv[1]](*map(Path, sys.argv[2:]))
