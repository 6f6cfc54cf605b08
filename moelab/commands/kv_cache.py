"""Key-value caches, made by mlx-lm's options or read from a prompt cache file."""

import argparse
import copy
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
)

from ..checkpoint import Checkpoint, describe, read_header, try_out
from ..streaming.build import build_model
from ..streaming.config import StreamConfig
from ..streaming.model import find


def _unread(args, config):
    """The command line's folder, and the model that mlx-lm builds of it without reading weights."""
    checkpoint = Checkpoint(find(args.model))
    return checkpoint, build_model(checkpoint, config, trust_remote_code=args.trust_remote_code)[0]


def quantized_given(args: argparse.Namespace) -> dict[str, Any]:
    """Turn mlx-lm's options of a quantized cache into arguments of its ``generate_step``."""
    names = ("kv_bits", "kv_group_size", "quantized_kv_start")
    return {name: getattr(args, name) for name in names}


def check_kv_cache(args: argparse.Namespace, config: StreamConfig) -> None:
    """Refuse, before a weight is read, cache options that mlx-lm would ignore or fail at later."""
    size, bits = getattr(args, "max_kv_size", None), getattr(args, "kv_bits", None)
    if size is None and bits is None:
        return
    checkpoint, model = _unread(args, config)
    family = type(model).__module__.rpartition(".")[2]
    if size is not None:
        if hasattr(model, "make_cache"):
            raise ValueError(
                f"max_kv_size={size}: expected a model whose caches mlx-lm makes, {family} makes "
                "its own, so that the limit would have no effect. Leave it out."
            )
        drafted = getattr(args, "draft_model", None) is not None
        other = "kv_bits" if bits is not None else "a draft" if drafted else None
        if other:
            raise ValueError(
                f"max_kv_size={size} cannot go with {other}: mlx-lm can neither quantize a cache "
                "of a limited size nor take tokens back from a full one. Leave one of them out."
            )
        return
    cache = make_prompt_cache(model)
    try_out(checkpoint, model, cache)
    before = list(cache)
    try:
        maybe_quantize_kv_cache(cache, 0, args.kv_group_size, bits)
        try_out(checkpoint, model, cache)
        if all(old is new for old, new in zip(before, cache)):
            raise ValueError("it has none that mlx-lm quantizes")
    except Exception as error:  # the code of a family, or mlx-lm's, may raise anything
        raise ValueError(
            f"kv_bits={bits}, kv_group_size={args.kv_group_size}: mlx-lm cannot "
            f"quantize the caches of {family}: {describe(error.__cause__ or error)}. Leave "
            "kv_bits out."
        ) from error


def checksum(caches: list, metadata: dict[str, str]) -> str:
    """A checksum of caches and metadata (without its own ``checksum``), to notice damage."""
    known = {name: text for name, text in metadata.items() if name != "checksum"}
    crc = zlib.crc32(json.dumps(known, sort_keys=True).encode())
    for name, value in tree_flatten([[type(c).__name__, c.state] for c in caches]):
        described = value
        if isinstance(value, mx.array):
            described = value.dtype, value.shape
            crc = zlib.crc32(np.array(value.reshape(-1).view(mx.uint8)), crc)
        crc = zlib.crc32(f"{name}: {described}".encode(), crc)
    return f"crc32 {crc:08x}"


def open_prompt_cache(args: argparse.Namespace, config: StreamConfig) -> tuple[list, dict]:
    """Read a prompt cache file: caches, ``tokenizer_config``. Refuse a damaged or unfit one."""
    file, bits = args.prompt_cache_file, args.kv_bits
    checkpoint, model = _unread(args, config)
    try:
        held = read_header(Path(file), "make it again")
        cache, metadata = load_prompt_cache(str(file), return_metadata=True)
        tokenizer_config = json.loads(metadata["tokenizer_config"])
        tokenizer_config.pop("trust_remote_code", None)  # only the user may say so, not a file
        if held.keys() != {name for name, _ in tree_flatten([c.state for c in cache])}:
            raise ValueError("it holds other arrays than those of its caches")
        expected, found = metadata.get("checksum"), checksum(cache, metadata)
        if expected not in (None, found):
            raise ValueError(f"the file is damaged: its checksum is {found}, it was {expected}")
        if Path(metadata["model"]).resolve() != Path(args.model).resolve():
            raise ValueError(f"it is one of {metadata['model']}")
        _check_caches(cache, model)
        try_out(checkpoint, model, copy.deepcopy(cache))
    except Exception as error:  # mlx-lm's code and MLX may raise anything for a strange file
        raise ValueError(
            f"{file}: expected a prompt cache of {args.model}, as cache-prompt writes it "
            f"({describe(error)}). Make it again with cache-prompt."
        ) from error
    if args.max_kv_size is not None:
        raise ValueError(
            f"{file}: its caches are made, so max_kv_size={args.max_kv_size} would have no "
            "effect. Give it to cache-prompt."
        )
    wanted = bits, args.kv_group_size
    for c in cache:
        if hasattr(c, "bits") and bits is not None and wanted != (c.bits, c.group_size):
            raise ValueError(
                f"{file}: its caches are quantized with kv_bits={c.bits} and "
                f"kv_group_size={c.group_size}, expected {bits} and {args.kv_group_size}. Leave "
                "kv_bits out, or make it again with cache-prompt."
            )
    if expected is None:
        print(
            f"moelab: {file}: without a checksum, as mlx_lm.cache_prompt writes it: damage to its "
            "numbers would not be noticed",
            file=sys.stderr,
        )
    return cache, tokenizer_config


def _check_caches(caches, model):
    """Refuse caches whose types or tokens are not those that the model has after a text."""
    limits = {c.max_size for c in caches if isinstance(c, RotatingKVCache)}
    for c, like in zip(caches, make_prompt_cache(model, max(limits, default=None)), strict=True):
        quantized = isinstance(c, QuantizedKVCache) and hasattr(like, "to_quantized")
        if type(c) is not type(like) and not quantized:
            raise ValueError(f"expected a {type(like).__name__}, got a {type(c).__name__}")
    lengths = {c.offset for c in caches if hasattr(c, "offset")}
    if len(lengths) > 1:
        raise ValueError(f"expected layers of one length, got {sorted(lengths)} tokens")
