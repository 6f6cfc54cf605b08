"""Model folders, and the sizes of models that are not there."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

from ..configs import CONFIGS
from ..replay.sizes import ModelSizes
from ..streaming.model import find as folder  # noqa: F401 (the experiments' name for it)
from ..synthesize import BITS, write_headers


@functools.lru_cache
def named_sizes(
    name: str, memory_nbytes: float = float("inf"), bits: int = BITS, top_k: int | None = None
) -> ModelSizes:
    """The sizes of a published model, from its configuration; it must fit with K slots."""
    with tempfile.TemporaryDirectory() as path:
        write_headers(Path(path), CONFIGS[name], bits)
        sizes = ModelSizes.of(path, memory_nbytes)
    return replace(sizes, K=top_k or sizes.K)
