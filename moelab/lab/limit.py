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
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is what a shell makes of it
SYSTEMD_RUN = ("systemd-run", "--user", "--scope", "--quiet")


class NoLimit(OSError):
    """This process may not limit its children's memory."""


class _Refused(OSError):
    """One strategy does not work here."""


@dataclass(frozen=True)
class Limited:
    """How a command ended.

    Attributes:
        returncode (int): Negative: the signal that ended it.
        stdout (str): What it printed.
        stderr (str): What it printed there.
        how (str): What limited it; ``none`` if nothing did.
        refused (dict[str, str]): Why each strategy that comes first could not be used.
    """

    returncode: int
    stdout: str
    stderr: str
    how: str
    refused: dict = field(default_factory=dict)

    @property
    def killed(self) -> bool:
        """Whether it was killed, as the kernel does with what goes over its limit."""
        return self.returncode in KILLED


@dataclass(frozen=True)
class Prepared:
    """How to start a command under a limit.

    Attributes:
        prefix (Sequence[str]): The words before it.
        group (Path, optional): Its cgroup.
        how (str): The strategy; ``none`` without a limit.
    """

    prefix: Sequence[str]
    group: Path | None
    how: str

    def before_exec(self) -> None:
        """What the child does first: ask to be killed when this process ends, join its cgroup."""
        if PRCTL is not None:
            PRCTL(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def move(self, nbytes: int) -> None:
        """Set the limit of a cgroup in which a command runs. The kernel may kill it at once.

        Raises:
            OSError: If it may not be set. With cgroups of version 1 also if so much is in use.
        """
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

    On Linux it is killed when this process ends.

    Args:
        argv (list[str]): The command.
        nbytes (int): The limit. Default: none.
        strategies (tuple[str]): What may limit it, the first that works.
        timeout_s (float): Kill it after so long. Default: never.

    Returns:
        Limited: How it ended.

    Raises:
        NoLimit: If it cannot be limited here, with the reason for each strategy.
        subprocess.TimeoutExpired: If it was killed for taking too long.
    """
    with limited(nbytes, strategies) as (prepared, refused):
        return replace(_run(argv, prepared, timeout_s), refused=refused)


@contextmanager
def limited(
    nbytes: int | None = None, strategies: Sequence[str] = ("cgroup", "systemd-run")
) -> Iterator[tuple[Prepared, dict[str, str]]]:
    """Prepare a limit for the commands that are started inside the block.

    Args:
        nbytes (int): As for ``run``.
        strategies (tuple[str]): As for ``run``.

    Yields:
        tuple[Prepared, dict[str, str]]: How to start them, and why each strategy that comes first
        could not be used.

    Raises:
        NoLimit: As ``run`` does.
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
    """Call a function in a new process with a memory limit.

    Args:
        function (Callable): At the top of a module. It takes and returns what JSON can hold.
        *args: Its arguments; a dataclass arrives as a dict.
        what (str): What is run, for errors.
        nbytes (int): The limit, page cache included. Default: none.
        strategies (tuple[str]): As for ``run``.
        timeout_s (float): Kill it after so long. Default: never.

    Returns:
        tuple[Any, Limited]: What it returned (None if it was killed), and how it ended.

    Raises:
        NoLimit: If memory cannot be limited here.
        OSError: If it failed, and not because it was killed for its memory.
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
    """In a process that ``call`` started with a limit: set it anew.

    The kernel kills the process if it cannot take back what is over the limit. Version 1 of cgroups
    refuses such a limit instead, so the process then kills itself.

    Raises:
        OSError: If a limit may not be set.
    """
    _, own, how = _own_cgroup()
    try:
        Prepared((), own, how).move(nbytes)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        os.kill(os.getpid(), signal.SIGKILL)


def main(function: str, arguments: str) -> None:
    """What ``call`` runs in the new process: it prints in JSON what a function returns.

    Args:
        function (str): Its module and its name, with a colon between them.
        arguments (str): In JSON.
    """
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
        print(json.dumps(result))
    except (ValueError, OSError) as error:  # the process that called reports it
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
    """A cgroup with a limit, removed at the end."""
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
    """Where cgroups that limit memory are, the one of this process, and their version."""
    groups = dict(line.split(":", 2)[1:] for line in OWN_CGROUPS.read_text().splitlines())
    first = "memory" in groups
    top = CGROUPS / "memory" if first else CGROUPS
    own = top / groups.get("memory" if first else "", "/").lstrip("/")
    return top, own, "cgroup v1" if first else "cgroup v2"


def _make_group(parents, settings, how):
    """A new group that a process can join, in the first parent that allows it."""
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
                if value or (group / name).exists():  # no swap, no file, nothing to forbid
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
    """A scope in the user's systemd session."""
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
