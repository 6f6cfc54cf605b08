"""A model folder: its files, their tensors and its configuration."""

import os
from pathlib import Path

from mlx_lm.utils import load_config

from ..open_files import allow_open
from .files import CheckpointError, describe, read_json, regular_file, shorten
from .headers import merge_headers, read_header, read_packed

# Families' names for the number of layers. mlx-lm builds as many as config.json says.
LAYERS_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

# What mlx.core.quantize accepts. A group size of 0 would end the process in mlx-lm's loader.
GROUP_SIZES = (16, 32, 64, 128)
BITS = (1, 2, 3, 4, 5, 6, 8)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


class Checkpoint:
    """The tensors of a model folder, each with its place on disk.

    ``tensors`` are those of model*.safetensors by name. ``packed`` are the experts' parameters by
    path in the model if ``python -m moelab repack`` wrote the folder, else it is empty.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.stamps = {}  # by file: what tells it from a file that replaces it
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if entry.exists() and not entry.is_dir():
                regular_file(entry)
                self.stamps[entry] = _stamp(entry)
        adapters = self.path / "adapter_config.json"
        if not (self.path / "config.json").is_file():
            raise CheckpointError(
                f"{self.path}: expected a model folder with a config.json, found none. "
                "Give the folder that mlx_lm.load would take"
                + (", and these adapters as adapter_path." if adapters.exists() else ".")
            )
        for file in ("config.json", "generation_config.json", "hf_quant_config.json"):
            if (self.path / file).exists():  # all that mlx-lm reads
                read_json(self.path / file)
        self.config = load_config(self.path)
        if "dflash_config" in self.config:
            raise CheckpointError(
                f"{self.path}: expected a model, got a DFlash draft, which writes no text alone. "
                "Give the model that it was trained for, and this folder as its --draft."
            )
        self.files, layers = self._files(), sorted(self.path.glob("experts-*.safetensors"))
        # Streaming opens each file, and again past the page cache; MLX opens model*.safetensors.
        allow_open(3 * len(self.files) + 2 * len(layers), self.path)
        plain = {file: read_header(file) for file in self.files}
        packed = {file: read_packed(file) for file in layers}
        merge_headers(plain | packed)
        self.tensors, self.packed = merge_headers(plain), merge_headers(packed)
        check_config(self.config, self.path / "config.json", len(self.tensors) + len(self.packed))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors together."""
        experts = sum(t.nbytes * len(t.offsets) for t in self.packed.values())
        return experts + sum(t.nbytes for t in self.tensors.values())

    def check_unchanged(self, *others: Path) -> None:
        """Raise if the weights, config.json or one of ``others`` were replaced since the start."""
        packed = (file for tensor in self.packed.values() for file in tensor.files)
        for file in {*self.files, *packed, self.path / "config.json", *others}:
            if not file.exists() or self.stamps.get(file) != _stamp(file):
                raise CheckpointError(
                    f"{file}: was written or replaced while it was read: expected the same file to "
                    "the end, got another. Try again when nothing writes to the folder any more."
                )

    def _files(self):
        # The files that mlx-lm reads. The index only says which of them must exist.
        files = sorted(self.path.glob("model*.safetensors"))
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            content = read_json(index)
            try:
                named = sorted(set(content["weight_map"].values()))
                missing = [n for n in named if not os.path.isfile(self.path / n)]
            except (ValueError, KeyError, AttributeError, TypeError) as e:
                raise CheckpointError(
                    f"{index}: expected JSON with a 'weight_map' from tensors to files, got "
                    f"{describe(e)}. Download it again."
                ) from e
            if missing:
                raise CheckpointError(
                    f"{index} names {len(named)} files, of which {len(missing)} are not in the "
                    f"folder: {shorten(', '.join(missing[:3]))}. Download them again, or remove "
                    f"the index if the {len(files)} model*.safetensors there are the whole model."
                )
        if not files:
            raise CheckpointError(
                f"{self.path}: expected model*.safetensors, found none. Give the folder "
                "that mlx_lm.load would take."
            )
        return files


def _stamp(file):
    s = file.stat()
    return s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


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
