"""Files of ``data/``, which the repository has and an installed package has not."""

from pathlib import Path

from . import DATA


def shipped(*names: str, instead: str = "") -> Path:
    """A file or folder of ``data/``.

    Args:
        names (str): The names below ``data/``, such as ``models`` and ``tiny-moe``.
        instead (str): What to do without it, for the error.

    Raises:
        FileNotFoundError: If moelab was installed without ``data/``.
    """
    if not (DATA / names[0]).exists():
        raise FileNotFoundError(
            f"{'/'.join(('data', *names))}: not there, since an installed moelab has no data/. "
            f"Clone its repository and run `pip install -e .` there{instead}."
        )
    return DATA.joinpath(*names)
