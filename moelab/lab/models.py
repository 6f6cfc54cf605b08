"""Model folders."""

from pathlib import Path


def folder(path: str | Path) -> Path:
    """The local folder of a model, downloaded first if it is a Hub repository.

    Raises:
        ValueError: If it is neither.
    """
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
