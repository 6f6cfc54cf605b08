"""Key-value caches as mlx-lm's options ask for them: of a limited size, or quantized."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from .checkpoint import Checkpoint, describe
from .streaming.build import build_model
from .streaming.config import StreamConfig
from .streaming.model import find


@dataclass(frozen=True)
class KVCacheOptions:
    """What ``mlx_lm.generate`` takes by these names.

    Attributes:
        max_kv_size (int or None): Tokens that attention keeps, the first 4 among them.
        kv_bits (int or None): Bits of keys and values. Default: they are not quantized.
        kv_group_size (int): Values that share a scale.
        quantized_kv_start (int): Tokens in a cache from which on it is quantized.
    """

    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START

    @classmethod
    def given(cls, args: argparse.Namespace) -> "KVCacheOptions":
        """Those of a parser with ``add_kv_cache``."""
        names = cls.__dataclass_fields__
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    @property
    def quantized(self) -> dict[str, Any]:
        """Arguments of ``generate_step``."""
        names = ("kv_bits", "kv_group_size", "quantized_kv_start")
        return {name: getattr(self, name) for name in names}

    def check(
        self,
        model_path: str | Path,
        config: StreamConfig,
        drafted: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Refuse what a model cannot do, before a weight is read.

        mlx-lm would find that out when the cache is long enough, or ignore the option.

        Args:
            model_path (str or Path): As for ``moelab.load``.
            config (StreamConfig): As for ``moelab.load``.
            drafted (bool): Whether there is a draft.
            trust_remote_code (bool): As for ``moelab.load``.

        Raises:
            ValueError: If the options have no effect on the model, or cannot go together.
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
        checkpoint.try_out(model, cache)
        before = list(cache)
        try:
            maybe_quantize_kv_cache(cache, 0, self.kv_group_size, self.kv_bits)
            checkpoint.try_out(model, cache)
        except Exception as error:  # whatever a family's code, or mlx-lm's, raises
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
