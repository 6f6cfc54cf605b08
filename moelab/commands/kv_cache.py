"""Checks mlx-lm's ``--kv-bits``, and keeps a server's prompts in files."""

import argparse
import copy
import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import make_prompt_cache

from ..checkpoint import Checkpoint, check_writable, describe, read_header, shorten, try_out
from ..interrupts import written
from ..speculation.drafts import Draft, LookupDraft, TokenCache
from ..streaming.build import build_model
from ..streaming.config import StreamConfig
from ..streaming.model import find

Prompt = tuple[list[int], list, str]  # a text's tokens, the caches after it, its ``cache_type``


def _unread(args, config):
    """Return the checkpoint that a command line names, and mlx-lm's model without weights."""
    checkpoint = Checkpoint(find(args.model))
    return checkpoint, build_model(checkpoint, config, trust_remote_code=args.trust_remote_code)[0]


def quantized_given(args: argparse.Namespace) -> dict[str, Any]:
    """Turn mlx-lm's options of a quantized cache into arguments of its ``generate_step``."""
    names = ("kv_bits", "kv_group_size", "quantized_kv_start")
    return {name: getattr(args, name) for name in names}


def check_kv_cache(args: argparse.Namespace, config: StreamConfig) -> None:
    """Refuse ``kv_bits`` that mlx-lm would ignore or fail at later; this reads no weights."""
    if (bits := args.kv_bits) is None:
        return
    checkpoint, model = _unread(args, config)
    family = type(model).__module__.rpartition(".")[2]
    cache = make_prompt_cache(model)
    try_out(checkpoint, model, cache)
    before = list(cache)
    try:
        maybe_quantize_kv_cache(cache, 0, args.kv_group_size, bits)
        try_out(checkpoint, model, cache)
        if all(old is new for old, new in zip(before, cache)):
            raise ValueError("mlx-lm quantizes none of them")
    except Exception as error:  # the code of a family, or mlx-lm's, may raise anything
        raise ValueError(
            f"kv_bits={bits}, kv_group_size={args.kv_group_size}: mlx-lm cannot "
            f"quantize the caches of {family}: {describe(error.__cause__ or error)}. Leave "
            "kv_bits out."
        ) from error


def checksum(caches: list, metadata: dict[str, str]) -> str:
    """Return a checksum of caches and metadata, without the metadata's field ``checksum``."""
    known = {name: text for name, text in metadata.items() if name != "checksum"}
    crc = zlib.crc32(json.dumps(known, sort_keys=True).encode())
    for name, value in tree_flatten([[type(c).__name__, c.state] for c in caches]):
        described = value
        if isinstance(value, mx.array):
            described = value.dtype, value.shape
            crc = zlib.crc32(np.array(value.reshape(-1).view(mx.uint8)), crc)
        crc = zlib.crc32(f"{name}: {described}".encode(), crc)
    return f"crc32 {crc:08x}"


def write_prompt_cache(file: Path, cache: list, metadata: dict[str, str]) -> None:
    """Write caches, metadata and a ``checksum``; the file appears once it is complete."""
    metadata = metadata | {"checksum": checksum(cache, metadata)}
    with written(file) as beside:
        mlx_lm_cache.save_prompt_cache(str(beside), cache, metadata)


def _read(file, made):
    """Read a file's caches and metadata; refuse a file that is damaged or has another ``made``."""
    held = read_header(file, "make it again")
    cache, metadata = mlx_lm_cache.load_prompt_cache(str(file), return_metadata=True)
    if held.keys() != {key for key, _ in tree_flatten([c.state for c in cache])}:
        raise ValueError("it holds other arrays than those of its caches")
    if metadata.get("made") != made or "checksum" not in metadata:
        raise ValueError("the weights, adapter, draft or options differ from those of this server")
    expected, found = metadata["checksum"], checksum(cache, metadata)
    if expected != found:
        raise ValueError(f"the file is damaged: its checksum is {found}, expected {expected}")
    return cache, metadata


def _check_fit(cache, checkpoint, model):
    """Raise an error (of any type) if this model cannot have made the caches."""
    likes = make_prompt_cache(model)
    if len(cache) != len(likes):
        raise ValueError(f"expected {len(likes)} caches, got {len(cache)}")
    for c, like in zip(cache, likes):
        quantized = isinstance(c, mlx_lm_cache.QuantizedKVCache) and hasattr(like, "to_quantized")
        if type(c) is not type(like) and not quantized:
            raise ValueError(f"expected a {type(like).__name__}, got a {type(c).__name__}")
    lengths = {c.offset for c in cache if hasattr(c, "offset")}
    if len(lengths) > 1:
        raise ValueError(f"expected caches of one length, got {sorted(lengths)} tokens")
    try_out(checkpoint, model, copy.deepcopy(cache))


class PromptFiles:
    """A folder of prompt cache files, which a server reads at its start and writes at its end.

    Damaged files, and files of another model, another draft or other options, are left alone, and
    stderr says why. A ValueError says why ``--prompt-cache-dir`` cannot be used.
    """

    def __init__(self, args: argparse.Namespace, config: StreamConfig, draft: Draft | None = None):
        self._draft, self._made, self._unread = draft, _made_by(args, config), _unread(args, config)
        self._folder, self._found = Path(args.prompt_cache_dir), set()
        check_writable(self._folder / "prompt", f"--prompt-cache-dir {self._folder}")
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self, most: int, nbytes: int) -> list[Prompt]:
        """Return the newest prompts, oldest first: at most ``most``, ``nbytes`` or less in all."""
        prompts, files = [], []
        for file in self._folder.glob("prompt-????????????????.safetensors"):
            with _left_alone(file):
                files.append((file.stat().st_mtime_ns, file.stat().st_size, file))
        for _, size, file in sorted(files, reverse=True)[:most]:
            nbytes -= size
            if nbytes < 0:
                break
            with _left_alone(file):
                prompts.append(self._prompt(file))
                self._found.add(file)
        return prompts[::-1]

    def _prompt(self, file):
        cache, about = _read(file, self._made)
        checkpoint, model = self._unread
        of_model = cache[: len(make_prompt_cache(model))]  # a draft's caches come after the model's
        _check_fit(of_model, checkpoint, model)
        tokens, kind = json.loads(about["tokens"]), about["kind"]
        kinds = mlx_lm_cache.LRUPromptCache().stats_by_type()
        if {*map(type, tokens)} != {int} or kind not in kinds:
            raise ValueError(f"expected tokens and mlx-lm's kind of text, got {tokens} and {kind}")
        if isinstance(self._draft, LookupDraft):
            cache += self._draft.make_cache()
            cache[-1].tokens = tokens[:]
        return tokens, cache, kind

    def write(self, prompts: Iterable[Prompt]) -> None:
        """Write prompts, oldest first; delete files whose prompts were read and then forgotten."""
        for tokens, cache, kind in prompts:
            about = {"made": self._made, "tokens": json.dumps(tokens), "kind": kind}
            name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
            file = self._folder / f"prompt-{name}.safetensors"
            self._found.discard(file)
            with _left_alone(file):
                if not file.exists():
                    arrays = [c for c in cache if not isinstance(c, TokenCache)]
                    write_prompt_cache(file, arrays, about)
                os.utime(file, ns=(time.time_ns(),) * 2)  # ``read`` finds the newest by this time
        for file in self._found:
            with _left_alone(file):
                file.unlink(missing_ok=True)


@contextmanager
def _left_alone(file):
    """Print an error about this file to stderr; other files are still read or written."""
    try:
        yield
    except Exception as error:  # mlx-lm's code and MLX may raise anything
        print(f"moelab: {shorten(file)}: left alone: {describe(error)}", file=sys.stderr)


def _made_by(args, config):
    """Hash what a text's caches depend on: the options, and the files' sizes and times."""
    folders = find(args.model), args.adapter_path, args.draft_model
    files = [f.resolve() for folder in folders if folder for f in Path(folder).glob("*")]
    files = sorted(f for f in files if f.suffix in (".safetensors", ".json"))
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    options = [args.draft_model, args.kv_bits, args.kv_group_size, args.quantized_kv_start]
    config, device = config.resolved(), str(mx.default_device())
    options += [config.top_k, config.dtype, config.kernels, config.library, device]
    options.append(mlx_lm.__version__)
    return hashlib.sha256(json.dumps([stats, options]).encode()).hexdigest()
