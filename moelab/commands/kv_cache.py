"""Key-value caches, made by mlx-lm's options or read from a prompt cache file."""

import argparse
import json
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    CacheList,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
)

from ..checkpoint import Checkpoint, describe, read_header, try_out
from ..streaming.build import build_model
from ..streaming.config import StreamConfig
from ..streaming.model import find


@dataclass(frozen=True)
class KVCacheOptions:
    """Options of the key-value cache, with the names that ``mlx_lm.generate`` gives them."""

    max_kv_size: int | None = None  # tokens that attention keeps, the first 4 among them
    kv_bits: int | None = None  # bits of keys and values; None: not quantized
    kv_group_size: int = 64  # values that share a scale
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START  # a cache of more tokens is quantized

    @classmethod
    def given(cls, args: argparse.Namespace) -> "KVCacheOptions":
        """Take the options from a command line whose parser has ``add_kv_cache``."""
        names = cls.__dataclass_fields__
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    @property
    def quantized(self) -> dict[str, Any]:
        """The options of quantization, as arguments of mlx-lm's ``generate_step``."""
        names = ("kv_bits", "kv_group_size", "quantized_kv_start")
        return {name: getattr(self, name) for name in names}

    def check(
        self,
        model_path: str | Path,
        config: StreamConfig,
        drafted: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Refuse options that the model's caches cannot follow, before a weight is read.

        mlx-lm would fail only when the cache is long enough, or ignore the option.
        """
        if self.max_kv_size is None and self.kv_bits is None:
            return
        checkpoint = Checkpoint(find(model_path))
        model = build_model(checkpoint, config, trust_remote_code=trust_remote_code)[0]
        family = type(model).__module__.rpartition(".")[2]
        if self.max_kv_size is not None:
            limited = f"max_kv_size={self.max_kv_size}"
            if hasattr(model, "make_cache"):
                raise ValueError(
                    f"{limited}: expected a model whose caches mlx-lm makes, {family} makes its "
                    "own, so that the limit would have no effect. Leave it out."
                )
            if self.kv_bits is not None:
                raise ValueError(
                    f"{limited} cannot go with kv_bits: mlx-lm cannot quantize its caches of a "
                    "limited size. Leave one of them out."
                )
            if drafted:
                raise ValueError(
                    f"{limited} cannot go with a draft: a full cache of this kind cannot be rolled "
                    "back exactly. Leave one of them out."
                )
            return
        cache = make_prompt_cache(model)
        try_out(checkpoint, model, cache)
        before = list(cache)
        try:
            maybe_quantize_kv_cache(cache, 0, self.kv_group_size, self.kv_bits)
            try_out(checkpoint, model, cache)
        except Exception as error:  # the code of a family, or mlx-lm's, may raise anything
            error = error.__cause__ or error
            raise ValueError(
                f"kv_bits={self.kv_bits}, kv_group_size={self.kv_group_size}: mlx-lm cannot "
                f"quantize the caches of {family}: {describe(error)}. Leave kv_bits out."
            ) from error
        if all(old is new for old, new in zip(before, cache)):
            raise ValueError(
                f"kv_bits={self.kv_bits}: expected key-value caches, {family} has none that mlx-lm "
                "quantizes. Leave it out."
            )


# Prompt cache files


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


def open_prompt_cache(
    file: str | Path,
    model_path: str | Path,
    config: StreamConfig,
    kv_cache: KVCacheOptions,
    trust_remote_code: bool = False,
) -> tuple[list, dict]:
    """Read a file of ``cache-prompt`` or ``mlx_lm.cache_prompt``: the caches, ``tokenizer_config``.

    A file that is damaged or does not fit model and options is refused. Files of mlx-lm have no
    checksum; a line on stderr says so.
    """
    again = "Make it again with cache-prompt."
    try:
        held = read_header(Path(file), "make it again")
        cache, metadata = load_prompt_cache(str(file), return_metadata=True)
        made_by, tokenizer_config = metadata["model"], json.loads(metadata["tokenizer_config"])
        tokenizer_config.pop("trust_remote_code", None)  # only the user may say so, not a file
        if held.keys() != {name for name, _ in tree_flatten([c.state for c in cache])}:
            raise ValueError("it holds other arrays than those of its caches")
        expected, found = metadata.get("checksum"), checksum(cache, metadata)
    except Exception as error:  # mlx-lm's code may raise anything for a strange file
        raise ValueError(
            f"{file}: expected a prompt cache, as cache-prompt writes it ({describe(error)}). "
            f"{again}"
        ) from error
    if expected not in (None, found):
        raise ValueError(
            f"{file}: expected what cache-prompt wrote, with checksum {expected}, got {found}: the "
            f"file is damaged. {again}"
        )
    if Path(made_by).resolve() != Path(model_path).resolve():
        raise ValueError(
            f"{file}: expected a prompt cache of {model_path}, it is one of {made_by}. {again}"
        )
    if kv_cache.max_kv_size is not None:
        raise ValueError(
            f"{file}: its caches are made, so max_kv_size={kv_cache.max_kv_size} would have no "
            "effect. Give it to cache-prompt."
        )
    wanted = kv_cache.kv_bits, kv_cache.kv_group_size
    for c in cache:
        if hasattr(c, "bits") and wanted[0] is not None and wanted != (c.bits, c.group_size):
            raise ValueError(
                f"{file}: its caches are quantized with kv_bits={c.bits} and "
                f"kv_group_size={c.group_size}, expected {wanted[0]} and {wanted[1]}. Leave "
                "kv_bits out, or make it again with cache-prompt."
            )
    checkpoint = Checkpoint(find(model_path))
    model = build_model(checkpoint, config, trust_remote_code=trust_remote_code)[0]
    try:
        _check_caches(cache, model, checkpoint)
    except Exception as error:  # a damaged file may say any sizes and bits
        raise ValueError(
            f"{file}: its caches are not those of {model_path}: {describe(error)}. {again}"
        ) from error
    if expected is None:
        print(
            f"moelab: {file}: without a checksum, as mlx_lm.cache_prompt writes it: damage to its "
            "numbers would not be noticed",
            file=sys.stderr,
        )
    return cache, tokenizer_config


def _check_caches(caches, model, checkpoint):
    """Refuse caches that the model would not have after a text: kernels trust their shapes."""
    limits = {c.max_size for c in caches if isinstance(c, RotatingKVCache)}
    made = make_prompt_cache(model, limits.pop() if limits else None)
    if len(caches) != len(made):
        raise ValueError(f"expected the caches of {len(made)} layers, got {len(caches)}")
    if try_out(checkpoint, model, made) is None:
        return
    lengths = set()
    for i, (cache, like) in enumerate(zip(caches, made)):
        if isinstance(cache, QuantizedKVCache) and hasattr(like, "to_quantized"):
            like = like.to_quantized(cache.group_size, cache.bits)
        _check_cache(f"layer {i}", cache, like, lengths)
    if len(lengths) > 1:
        raise ValueError(f"expected layers of one length, got {sorted(lengths)} tokens")


def _check_cache(where, cache, like, lengths):
    """Refuse a cache unless its type and shapes match ``like``; its tokens go into ``lengths``."""

    def expect(right, wanted, got):
        if not right:
            raise ValueError(f"{where}: expected {wanted}, got {got}")

    expect(type(cache) is type(like), type(like).__name__, type(cache).__name__)
    if isinstance(like, CacheList):
        expect(len(cache.caches) == len(like.caches), len(like.caches), len(cache.caches))
        for i, pair in enumerate(zip(cache.caches, like.caches)):
            _check_cache(f"{where}, {i}", *pair, lengths)
        return
    held, usual = (dict(tree_flatten(c.state)) for c in (cache, like))
    expect(held.keys() == usual.keys(), f"{len(usual)} values", len(held))
    tokens = set()
    for name, value in usual.items():
        got = held[name]
        expect(type(got) is type(value), type(value).__name__, type(got).__name__)
        if not isinstance(value, mx.array):
            continue
        floating = [mx.issubdtype(a.dtype, mx.floating) for a in (got, value)]
        expect(all(floating) or got.dtype == value.dtype, value.dtype, got.dtype)
        shape = list(value.shape)
        expect(got.ndim == len(shape), shape, list(got.shape))
        if hasattr(like, "keys"):
            shape[-2] = got.shape[-2]
            tokens.add(shape[-2])
        elif not any(floating):  # whole numbers are token ids: as many as there are
            shape[-1] = got.shape[-1]
        expect(list(got.shape) == shape, shape, list(got.shape))
    for name, value in vars(like).items():
        if type(value) is int and name not in ("offset", "_idx", "start_position"):
            expect(vars(cache)[name] == value, f"{name} {value}", vars(cache)[name])
    if tokens:
        expect(len(tokens) == 1, "keys for as many tokens as values", sorted(tokens))
        end = getattr(cache, "_idx", cache.offset - getattr(cache, "start_position", 0))
        expect(0 < end <= min(*tokens, cache.offset), f"1 to {min(tokens)} tokens", cache.offset)
        lengths.add(cache.offset)
