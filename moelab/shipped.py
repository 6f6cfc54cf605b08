"""Finds files of ``data/``, which the repository has and an installed package has not."""

from pathlib import Path

from . import DATA


def shipped(*names: str) -> Path:
    """Return a path below ``data/``; raise FileNotFoundError if moelab is installed without it."""
    if not (DATA / names[0]).exists():
        raise FileNotFoundError(
            f"{'/'.join(('data', *names))}: not there, since an installed moelab has no data/. "
            "Clone its repository and run `pip install -e .` there."
        )
    return DATA.joinpath(*names)
