"""Run a command, or call a function in a new process, with less memory than the machine has.

It takes the first of two strategies that works: a memory cgroup (version 2 or 1), or ``systemd-run
--user``. Both limit the new process together with its page cache, and kill it when it needs more.
Where neither works, ``NoLimit`` says why.

A page that another process brought into the page cache is charged to that process and served for
free: drop the files' pages (``oscache.drop_pages``) before a run under a limit.
"""

import ctypes
import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # not on macOS
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is a shell's exit status for it
SYSTEMD_RUN = ("systemd-run", "--user", "--scope", "--quiet")
STRATEGIES = ("cgroup", "systemd-run")


class NoLimit(OSError):
    """Raised where a process may not limit its children's memory."""


@dataclass(frozen=True)
class Limited:
    """How a command ended."""

    returncode: int  # negative: the signal that ended it
    stdout: str
    stderr: str
    how: str  # the strategy that limited it, or ``none``

    @property
    def killed(self) -> bool:
        """Whether it was killed, as the kernel kills a process that goes over its limit."""
        return self.returncode in KILLED


@dataclass(frozen=True)
class Prepared:
    """How to start a command under a limit."""

    prefix: Sequence[str] = ()  # words before the command's own
    group: Path | None = None  # the command's cgroup, if that limits it
    how: str = "none"  # the strategy

    def before_exec(self) -> None:
        """Let the child ask to be killed when this process ends, and join its cgroup."""
        if PRCTL is not None:
            PRCTL(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def move(self, nbytes: int) -> None:
        """Set the limit of a cgroup in which a command runs, which the kernel may kill at once."""
        names = ("memory.max", "memory.limit_in_bytes")
        (file,) = [f for name in names if (f := self.group / name).exists()]
        file.write_text(str(nbytes))


def run(
    argv: Sequence[str],
    nbytes: int | None = None,
    strategies: Sequence[str] = STRATEGIES,
    timeout_s: float | None = None,
) -> Limited:
    """Run a command, its memory limited to ``nbytes``, page cache included.

    On Linux it is killed when this process ends.
    """
    with limited(nbytes, strategies) as (prepared, _):
        done = subprocess.run(
            [*prepared.prefix, *argv],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            preexec_fn=prepared.before_exec,
        )
    return Limited(done.returncode, done.stdout, done.stderr, prepared.how)


@contextmanager
def limited(
    nbytes: int | None = None, strategies: Sequence[str] = STRATEGIES
) -> Iterator[tuple[Prepared, dict[str, str]]]:
    """Prepare a limit for commands that are started inside the block.

    Yields how to start them, and why earlier strategies could not be used.
    """
    prepared, refused = Prepared() if nbytes is None else None, {}
    for name in strategies if prepared is None else ():
        try:
            prepared = _cgroup(nbytes) if name == "cgroup" else _systemd_run(nbytes)
            break
        except (OSError, subprocess.SubprocessError) as error:
            refused[name] = str(error)
    if prepared is None:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise NoLimit(
            f"cannot limit memory here: {reasons}. It takes Linux, and either root or a user's "
            "systemd session with the memory controller."
        )
    try:
        yield prepared, refused
    finally:
        if prepared.group:
            _remove(prepared.group)


def call(
    function: Callable,
    *args,
    what: str,
    nbytes: int | None = None,
    timeout_s: float | None = None,
) -> tuple[Any, Limited]:
    """Call a function in a new process with a memory limit: its result, and how the process ended.

    The result is None if it was killed for its memory. The function, at the top of a module, takes
    and returns what JSON can hold; a dataclass arrives as a dict.
    """
    name = f"{function.__module__}:{function.__name__}"
    arguments = json.dumps(args, default=lambda v: asdict(v) if is_dataclass(v) else str(v))
    argv = [sys.executable, "-m", "moelab.lab", "call", name, arguments]
    try:
        done = run(argv, nbytes, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        raise OSError(
            f"{what}: took more than {timeout_s} s and was killed. Give it less to do."
        ) from None
    if done.killed:
        return None, done
    if done.returncode:
        raise OSError(f"{what}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), done


def lower(nbytes: int) -> None:
    """Set the limit of this process, which ``call`` started with one, anew.

    The kernel kills the process if it cannot take back what is over the limit. Version 1 of cgroups
    refuses such a limit instead, so the process then kills itself.
    """
    try:
        Prepared(group=_own_cgroup()[1]).move(nbytes)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        os.kill(os.getpid(), signal.SIGKILL)


def main(function: str, arguments: str) -> None:
    """Run, for ``call``, a function ``module:name`` and print in JSON what it returns."""
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
        print(json.dumps(result))
    except (ValueError, OSError) as error:  # the calling process reports it
        sys.exit(str(error))


# The strategy "cgroup"


def _cgroup(nbytes):
    """Make a cgroup with a limit, in the nearest group that a process may join from here."""
    try:
        top, own, is_first = _own_cgroup()
    except OSError:
        raise OSError("this system has no cgroups") from None
    # A group that has processes cannot limit its children: take the nearest above that does.
    above = [g for g in (own, *own.parents) if g.is_relative_to(top) and _limits_children(g)]
    if not (parents := [own] if is_first else above):
        raise OSError("cgroup v2: no group above this process hands on the memory controller")
    whys, how = [], f"cgroup v{1 if is_first else 2}"
    for parent in parents:
        group = parent / f"moelab-{os.getpid()}-{time.monotonic_ns()}"
        try:
            group.mkdir()
        except OSError as error:
            whys.append(error.strerror)
            continue
        try:
            prepared = Prepared(group=group, how=how)
            limit = group / ("memory.limit_in_bytes" if is_first else "memory.max")
            limit.write_text(str(nbytes))
            swap = group / ("memory.swappiness" if is_first else "memory.swap.max")
            if swap.exists():  # without swap there is no file, and nothing to forbid
                swap.write_text("0")
            subprocess.run(["true"], check=True, preexec_fn=prepared.before_exec)
            return prepared
        except (OSError, subprocess.SubprocessError) as error:
            whys.append(getattr(error, "strerror", None) or str(error))
            _remove(group)
    raise OSError(f"no group may be made in {parents[0]} ({how}: {whys[0]})")


def _own_cgroup():
    """The folder of cgroups that limit memory, this process's own, whether of version 1."""
    groups = dict(line.split(":", 2)[1:] for line in OWN_CGROUPS.read_text().splitlines())
    is_first = "memory" in groups
    top = CGROUPS / "memory" if is_first else CGROUPS
    return top, top / groups.get("memory" if is_first else "", "/").lstrip("/"), is_first


def _limits_children(group):
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _remove(group):
    for _ in range(50):
        try:
            return group.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # the kernel is still tearing the last process down
            time.sleep(0.1)


# The strategy "systemd-run"


def _systemd_run(nbytes):
    """The words that start a command in a scope of the user's systemd session."""
    limits = ("-p", f"MemoryMax={nbytes}", "-p", "MemorySwapMax=0")
    prefix = (*SYSTEMD_RUN, *limits)
    # A session without the memory controller makes the scope, which then limits nothing.
    path = f'{CGROUPS}"$(sed -n s/^0:://p {OWN_CGROUPS})"/memory.max'
    words = [*prefix, "sh", "-c", f"cat {path}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise OSError(f"the user's session may not limit memory: {said}")
    return Prepared(prefix, how="systemd-run --user")
