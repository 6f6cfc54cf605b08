"""The lab looks on from outside: measure, show, explain. The engine knows nothing of it."""

import os
from types import SimpleNamespace

FAST = os.environ.get("MOELAB_FAST") == "1"


def preset(**sizes) -> SimpleNamespace:
    """The sizes of a notebook, in its one ``parameters`` cell; printed, so that every page says which it ran.

    Args:
        **sizes: For each name ``(full, fast)``; the second holds when ``MOELAB_FAST=1``. A value that
            is no pair holds in both.

    Example:
        >>> P = preset(tokens=(128, 16), slots=16)  # P.tokens == 128, P.slots == 16
    """
    chosen = {
        name: v[FAST] if isinstance(v, tuple) and len(v) == 2 else v for name, v in sizes.items()
    }
    print(
        f"preset={'fast (a smoke run, not a measurement)' if FAST else 'full'}:",
        *(f"{k}={v!r}" for k, v in chosen.items()),
    )
    return SimpleNamespace(**chosen)


def advise(model, memory=None, **options):
    """How to stream a model on this machine: slots, policy, prefetch and layout, with predicted seconds and why.

    Args:
        model (str or Path): A model folder or a Hub repository.
        memory (float, optional): Bytes for the process and its page cache. Default: what is available now.
        **options: As for ``advice.advise``.

    Returns:
        Advice: ``print`` it.
    """
    from .experiments.advise import advise

    return advise(model, memory, **options)
