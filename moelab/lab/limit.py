"""Run a command, or call a function in a new process, with less memory than the machine has.

It takes the first of two strategies that works: a memory cgroup (version 2 or 1), or ``systemd-run
--user``. Both limit the new process together with its page cache, and kill it when it needs more.
Where neither works, ``NoLimit`` says why.

A page that another process brought into the page cache is charged to that process and served for
free: drop the files' pages (``oscache.drop_pages``) before a run under a limit.
"""

import ctypes
import errno
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # not on macOS
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is a shell's exit status for it
SYSTEMD_RUN = ("systemd-run", "--user", "--scope", "--quiet")


class NoLimit(OSError):
    """Raised where a process may not limit its children's memory."""


class _Refused(OSError):
    """Raised if one strategy does not work here."""


@dataclass(frozen=True)
class Limited:
    """How a command ended."""

    returncode: int  # negative: the signal that ended it
    stdout: str
    stderr: str
    how: str  # the strategy that limited it, or ``none``
    refused: dict = field(default_factory=dict)  # strategies that could not be used, and why

    @property
    def killed(self) -> bool:
        """Whether it was killed, as the kernel kills a process that goes over its limit."""
        return self.returncode in KILLED


@dataclass(frozen=True)
class Prepared:
    """How to start a command under a limit."""

    prefix: Sequence[str]  # words before the command's own
    group: Path | None  # the command's cgroup, if that limits it
    how: str  # the strategy; ``none`` without a limit

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
    strategies: Sequence[str] = ("cgroup", "systemd-run"),
    timeout_s: float | None = None,
) -> Limited:
    """Run a command, its memory limited to ``nbytes``, page cache included.

    On Linux it is killed when this process ends. The first of ``strategies`` that works is used;
    if none does, ``NoLimit`` says why.
    """
    with limited(nbytes, strategies) as (prepared, refused):
        return replace(_run(argv, prepared, timeout_s), refused=refused)


@contextmanager
def limited(
    nbytes: int | None = None, strategies: Sequence[str] = ("cgroup", "systemd-run")
) -> Iterator[tuple[Prepared, dict[str, str]]]:
    """Prepare a limit for commands that are started inside the block.

    Yields how to start them, and why earlier strategies could not be used.
    """
    refused = {}
    with ExitStack() as stack:
        prepared = Prepared((), None, "none") if nbytes is None else None
        for name in strategies if prepared is None else ():
            try:
                prepared = stack.enter_context(_STRATEGIES[name](nbytes))
                break
            except _Refused as error:
                refused[name] = str(error)
        if prepared is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
            raise NoLimit(
                f"cannot limit memory here: {reasons}. It takes Linux, and either root or a user's "
                "systemd session with the memory controller."
            )
        yield prepared, refused


def call(
    function: Callable,
    *args,
    what: str,
    nbytes: int | None = None,
    strategies: Sequence[str] = ("cgroup", "systemd-run"),
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
        done = run(argv, nbytes, strategies, timeout_s)
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
    _, own, how = _own_cgroup()
    try:
        Prepared((), own, how).move(nbytes)
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


def _run(argv, prepared, timeout_s):
    done = subprocess.run(
        [*prepared.prefix, *argv],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        preexec_fn=prepared.before_exec,
    )
    return Limited(done.returncode, done.stdout, done.stderr, prepared.how)


# The strategy "cgroup"


@contextmanager
def _cgroup(nbytes):
    """Make a cgroup with a limit, which is removed at the end."""
    try:
        top, own, how = _own_cgroup()
    except OSError:
        raise _Refused("this system has no cgroups") from None
    if how == "cgroup v1":
        parents = [own]
        settings = {"memory.limit_in_bytes": nbytes, "memory.swappiness": 0}
    else:
        # A group that has processes cannot limit its children: take the nearest above that does.
        parents = [g for g in (own, *own.parents) if g.is_relative_to(top) and _limits_children(g)]
        settings = {"memory.max": nbytes, "memory.swap.max": 0}
        if not parents:
            raise _Refused("cgroup v2: no group above this process hands on the memory controller")
    _remove_stale(top)
    group = _make_group(parents, settings, how)
    try:
        yield Prepared((), group, how)
    finally:
        _remove(group)


def _own_cgroup():
    """The folder of cgroups that limit memory, this process's own cgroup, and their version."""
    groups = dict(line.split(":", 2)[1:] for line in OWN_CGROUPS.read_text().splitlines())
    first = "memory" in groups
    top = CGROUPS / "memory" if first else CGROUPS
    own = top / groups.get("memory" if first else "", "/").lstrip("/")
    return top, own, "cgroup v1" if first else "cgroup v2"


def _make_group(parents, settings, how):
    """Make a group that a process can join, in the first parent that allows it."""
    whys = []
    for parent in parents:
        group = parent / f"moelab-{os.getpid()}-{_started(os.getpid())}-{time.monotonic_ns()}"
        try:
            group.mkdir()
        except OSError as error:
            whys.append(error)
            continue
        try:
            for name, value in settings.items():
                if value or (group / name).exists():  # no swap: no file, nothing to forbid
                    (group / name).write_text(str(value))
            subprocess.run(["true"], check=True, preexec_fn=Prepared((), group, how).before_exec)
            return group
        except (OSError, subprocess.SubprocessError) as error:
            whys.append(error)
            _remove(group)
    why = getattr(whys[0], "strerror", None) or whys[0]
    raise _Refused(f"no group may be made in {parents[0]} ({how}: {why})")


def _limits_children(group):
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _started(pid):
    """When a process was started, in ticks since boot; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _remove(group):
    for _ in range(50):
        try:
            return group.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # the kernel is still tearing the last process down
            time.sleep(0.1)


@functools.cache
def _remove_stale(top):
    """Remove the cgroups of runs that were killed before they could."""
    for folder, names, _ in os.walk(top):
        for name in names:
            pid, _, started = name.removeprefix("moelab-").partition("-")
            if name == pid or not pid.isdigit() or _started(pid) == started.partition("-")[0]:
                continue
            group = Path(folder, name)
            try:
                for child in (group / "cgroup.procs").read_text().split():
                    os.kill(int(child), signal.SIGKILL)
            except OSError:
                pass
            _remove(group)


# The strategy "systemd-run"


@contextmanager
def _systemd_run(nbytes):
    """The words that start a command in a scope of the user's systemd session."""
    if why := _no_systemd():
        raise _Refused(why)
    limits = ("-p", f"MemoryMax={nbytes}", "-p", "MemorySwapMax=0")
    yield Prepared((*SYSTEMD_RUN, *limits), None, "systemd-run --user")


@functools.cache
def _no_systemd():
    """Why ``systemd-run --user`` cannot limit memory here, or ``""``."""
    command = [*SYSTEMD_RUN, "-p", "MemoryMax=64M", "cat", "/proc/self/cgroup"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as e:
        return str(e)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    # A session without the memory controller makes the scope, which then limits nothing.
    path = next(
        (line.split(":", 2)[2] for line in done.stdout.splitlines() if line.startswith("0::")), None
    )
    if path is not None:
        here = CGROUPS / path.strip().lstrip("/")
        handed_on = [
            _limits_children(g) for g in here.parents if g.is_relative_to(CGROUPS) and g.exists()
        ]
        if not handed_on or not handed_on[0]:
            return (
                "the user's session may not limit memory (its memory controller is not delegated)"
            )
    return ""


_STRATEGIES = {"cgroup": _cgroup, "systemd-run": _systemd_run}
