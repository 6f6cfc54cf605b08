"""The values of a ``config.json`` that no model can have."""

from pathlib import Path

from .files import CheckpointError, shorten

# Families' names for the number of layers. mlx-lm builds as many as config.json says.
LAYERS_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

# What mlx.core.quantize accepts. A group size of 0 would end the process in mlx-lm's loader.
GROUP_SIZES = (16, 32, 64, 128)
BITS = (1, 2, 3, 4, 5, 6, 8)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


def check_config(config: dict, file: Path, num_tensors: int) -> None:
    """Refuse impossible values of a config.json, before mlx-lm builds a model of that size.

    A model has at most as many layers as tensors.
    """

    def check(key, value, expected, good):
        if not good:
            raise CheckpointError(
                f"{file}: {key}: expected {expected}, got {shorten(repr(value), 60)}. "
                "Download it again."
            )

    for key in ("text_config", "quantization", "quantization_config"):
        value = config.get(key)
        check(key, value, "an object", value is None or isinstance(value, dict))
    for part in (config, config.get("text_config") or {}):
        for key, value in part.items():
            if type(value) is int and key in LAYERS_KEYS:
                most = f"at most {num_tensors}, the tensors of the model"
                check(key, value, most, value <= num_tensors)
            if type(value) is int and "group" in key:  # dividing by 0 would end the process
                check(key, value, "another number than 0", value)
    settings = config.get("quantization") or {}
    for entry in (settings, *settings.values()):
        if isinstance(entry, dict):
            for key, choices in (("group_size", GROUP_SIZES), ("bits", BITS), ("mode", MODES)):
                value = entry.get(key, choices[0])
                right = type(value) is type(choices[0]) and value in choices
                check(f"quantization: {key}", value, f"one of {choices}", right)
