"""Run a command, or call a function in a new process, with less memory than the machine has.

The first strategy that works is used: a memory cgroup (version 2 or 1), or ``systemd-run --user``.
Both limit the new process together with its page cache, and the kernel kills it when it needs more.
Where neither works, ``NoLimit`` says why.

A page that another process brought into the page cache does not count as this command's memory. So
drop the files' pages (``machine.drop_pages``) before a run under a limit.
"""

import ctypes
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from ..interrupts import undone

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
V1, V2 = "cgroup v1", "cgroup v2"
FILES = {  # a cgroup's files: one sets the memory limit, one the use of swap
    V1: ("memory.limit_in_bytes", "memory.swappiness"),
    V2: ("memory.max", "memory.swap.max"),
}
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # not on macOS
SYSTEMD_RUN = ("systemd-run", "--user", "--scope", "--quiet")


class NoLimit(OSError):
    """Raised where a process may not limit its children's memory."""


@dataclass(frozen=True)
class Limited:
    """How a command ended."""

    returncode: int  # if negative, minus the signal that ended the command
    stdout: str
    stderr: str
    how: str  # the strategy that limited the command's memory, or ``none``

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended the command: the kernel sends it to a process over its limit."""
        return self.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is a shell's


@dataclass(frozen=True)
class Prepared:
    """How to start a command under a limit."""

    prefix: Sequence[str] = ()  # words before the command's own
    group: Path | None = None  # the command's cgroup, if a cgroup limits it
    how: str = "none"  # the strategy

    def before_exec(self) -> None:
        """In the child: ask to be killed when the parent ends, and join the cgroup."""
        if PRCTL is not None:
            PRCTL(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def move(self, nbytes: int) -> None:
        """Set the cgroup's limit; the kernel may then kill a command that runs in the group."""
        (self.group / FILES[self.how][0]).write_text(str(nbytes))


def run(argv: Sequence[str], nbytes: int | None = None, timeout_s: float | None = None) -> Limited:
    """Run a command that may take ``nbytes`` of memory, page cache included."""
    with limited(nbytes) as prepared:
        done = subprocess.run(
            [*prepared.prefix, *argv],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            preexec_fn=prepared.before_exec,
        )
    return Limited(done.returncode, done.stdout, done.stderr, prepared.how)


@contextmanager
def limited(nbytes: int | None = None) -> Iterator[Prepared]:
    """Prepare a limit for commands that are started inside the block."""
    prepared = Prepared() if nbytes is None else _prepare(nbytes)
    with undone(lambda: _remove(prepared.group)):
        yield prepared


def _prepare(nbytes):
    """Prepare a limit by the first strategy that works."""
    refused = []
    for name, strategy in (("cgroup", _cgroup), ("systemd-run", _systemd_run)):
        try:
            return strategy(nbytes)
        except (OSError, subprocess.SubprocessError) as error:
            refused.append(f"{name}: {error}")
    raise NoLimit(
        f"cannot limit memory here: {'; '.join(refused)}. It takes Linux, and either root or a "
        "user's systemd session with the memory controller."
    )


def call(function: Callable, *args, what: str, nbytes: int | None = None) -> tuple[Any, Limited]:
    """Call a function in a new process with a memory limit; return its result and a ``Limited``.

    The result is None if the process was killed for its memory. The function stands at the top of
    a module or script. Arguments and result are passed as JSON; a dataclass arrives as a dict.
    ``what`` names the call in an error.
    """
    module = function.__module__
    if module == "__main__":  # the new process imports the script by its file's name
        module = Path(sys.modules[module].__file__).stem
    arguments = json.dumps(args, default=lambda v: asdict(v) if is_dataclass(v) else str(v))
    words = "call", f"{module}:{function.__name__}", arguments
    path = f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"
    done = run(["env", path, sys.executable, "-m", "moelab.lab", *words], nbytes)
    if done.killed and nbytes:
        return None, done
    if done.returncode:
        raise OSError(f"{what}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), done


def main(function: str, arguments: str) -> None:
    """Run a function ``module:name`` for ``call`` and print its result as JSON."""
    try:
        print(json.dumps(pkgutil.resolve_name(function)(*json.loads(arguments))))
    except (ValueError, OSError) as error:  # the calling process reports the error
        sys.exit(str(error))


def _cgroup(nbytes):
    """Make a cgroup with a limit, in the nearest group in which this process may make one."""
    try:
        groups = dict(line.split(":", 2)[1:] for line in OWN_CGROUPS.read_text().splitlines())
    except OSError:
        raise OSError("this system has no cgroups") from None
    how, name, top = (V1, "memory", CGROUPS / "memory") if "memory" in groups else (V2, "", CGROUPS)
    own = top / groups.get(name, "/").lstrip("/")
    # In version 2 a group with processes cannot limit its children, but a group above it may.
    above = [g for g in (own, *own.parents) if g.is_relative_to(top) and _limits_children(g)]
    whys = []
    for parent in [own] if how == V1 else above:
        group = parent / f"moelab-{os.getpid()}-{time.monotonic_ns()}"
        prepared = Prepared((), group, how)
        try:
            group.mkdir()
            prepared.move(nbytes)
            swap = group / FILES[how][1]
            if swap.exists():  # a kernel without swap has no such file
                swap.write_text("0")
            subprocess.run(["true"], check=True, preexec_fn=prepared.before_exec)
            return prepared
        except (OSError, subprocess.SubprocessError) as error:
            whys.append(f"no group may be made in {parent}: {error}")
            _remove(group)
    raise OSError(whys[0] if whys else "no group above this process hands on the memory controller")


def _limits_children(group):
    """Whether a group of version 2 gives its children the memory controller."""
    file = group / "cgroup.subtree_control"
    return file.exists() and "memory" in file.read_text().split()


def _remove(group):
    """Remove a cgroup, if there is one, once the kernel has ended the group's last process."""
    for _ in range(50 if group else 0):
        try:
            return group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)


def _systemd_run(nbytes):
    """Prepare a limit by a scope of the user's systemd session."""
    prefix = (*SYSTEMD_RUN, "-p", f"MemoryMax={nbytes}", "-p", "MemorySwapMax=0")
    # A session without the memory controller makes the scope, but the scope limits nothing.
    path = f'{CGROUPS}"$(sed -n s/^0:://p {OWN_CGROUPS})"/memory.max'
    words = [*prefix, "sh", "-c", f"cat {path}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise OSError(f"the user's session may not limit memory: {said}")
    return Prepared(prefix, how="systemd-run --user")
