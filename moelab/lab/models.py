"""Model folders, and the sizes of models that are not there."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

from ..configs import CONFIGS
from ..replay.sizes import ModelSizes
from ..synthesize import BITS, write_headers


def folder(path: str | Path) -> Path:
    """The local folder of a model, downloaded first if it is a Hub repository."""
    from mlx_lm.utils import _download

    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(_download(str(path)))
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path}: no such folder, and the Hub did not give it ({why}). Check the name."
        ) from error


@functools.lru_cache
def named_sizes(
    name: str, memory_nbytes: float = float("inf"), bits: int = BITS, top_k: int | None = None
) -> ModelSizes:
    """The sizes of a published model, from its configuration; it must fit with K slots."""
    with tempfile.TemporaryDirectory() as path:
        write_headers(Path(path), CONFIGS[name], bits)
        sizes = ModelSizes.of(path, memory_nbytes)
    return replace(sizes, K=top_k or sizes.K)
