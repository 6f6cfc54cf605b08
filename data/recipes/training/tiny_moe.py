"""tiny-moe: a Qwen3.5-MoE hybrid small enough to ship, in mlx-lm's own format.

The README of ``data/models/tiny-moe`` has the commands. Training needs a CUDA GPU, PyTorch and
fla-core, and neither MLX nor moelab. Sizes are those of the ``config.json`` that ships: another
model needs another config there.

The letters: B batch, T tokens, D hidden, F expert hidden, E experts, K experts per token, L layers.
"""

import json
from pathlib import Path

MODELS = Path(__file__).parents[2] / "models"
GROUP_SIZE, BITS = 64, 4
# Small modules with much influence get eight bits, the first two by mlx-lm's own predicate, too.
EIGHT_BIT = ("mlp.gate", "shared_expert_gate", "embed_tokens", "in_proj_a", "in_proj_b")
NOT_QUANTIZED = ("norm", "norm_embedding", "norm_hidden", "conv1d", "A_log", "dt_bias")


def config_of(name):
    """Read the config of a model in ``data/models``, without what its quantization added."""
    config = json.loads((MODELS / name / "config.json").read_text())
    return {key: value for key, value in config.items() if not key.startswith("quantization")}


def bits_of(path):
    """Return the bits per weight of the module at ``path``; None if it is not quantized."""
    if path.endswith(NOT_QUANTIZED):
        return None
    return 8 if path.endswith(EIGHT_BIT) else BITS


CONFIG = config_of("tiny-moe")
TEXT_CONFIG = CONFIG["text_config"]
