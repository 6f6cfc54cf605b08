"""Raises the soft limit of open files for a model's files, and leaves the hard limit as it is.

The import of mlx-lm sets both limits to numbers of its own: it fails if the hard limit is below
4096, and lowers a higher one. So this module lets mlx-lm's import set no limits.
"""

import errno
import resource
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

import psutil


def allow_open(n: int, path: Path) -> None:
    """Let the process open ``n`` more files of a model; OSError names a limit that is too low."""
    needed = psutil.Process().num_fds() + n + 64  # for sockets, pipes, libraries, a trace
    _raise_soft_limit(needed)
    allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < needed and allowed != resource.RLIM_INFINITY:
        raise OSError(
            errno.EMFILE,
            f"{path}: expected a limit of at least {needed} open files, got {allowed} "
            f"(hard limit: {hard}). Raise it: ulimit -n {needed}, a container's --ulimit "
            f"nofile={needed}.",
        )


def _raise_soft_limit(n):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = n if hard == resource.RLIM_INFINITY else min(n, hard)
    if soft < goal and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))


class _Finder(PathFinder):
    """Finds the module ``mlx_lm.utils`` before other finders do, and finds no other module."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Return the module's spec; its loader runs the module while ``setrlimit`` does nothing."""
        spec = super().find_spec(name, path, target) if name == "mlx_lm.utils" else None
        if spec:
            spec.loader.exec_module = partial(_run, spec.loader.exec_module)
        return spec


def _run(exec_module: Callable, module) -> None:
    setrlimit, resource.setrlimit = resource.setrlimit, lambda *_: None
    try:
        exec_module(module)
    finally:
        resource.setrlimit = setrlimit
    _raise_soft_limit(2048)  # as mlx-lm does


sys.meta_path.insert(0, _Finder)
