"""Run a command with less memory than the machine has, and bench a model that way.

Four ways, the first that works is taken: a memory cgroup (version 2 or 1), ``systemd-run --user``, ballast (memory locked
by a process of ours until only the limit is left), and where none works, none: ``NoLimit`` says why not each. The first two
limit the command alone, its page cache included, and kill it beyond. Ballast leaves the limit to all that runs, and is given
up before anything is killed.

A page that another process brought into the page cache is charged to that process and served for free: drop the files'
pages (``machine.drop_pages``) before a run that is to feel its limit.
"""

import ctypes
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from tqdm import tqdm

from .. import StreamConfig, close, footprint, load
from . import machine, timing
from .ballast import Ballast

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
BALLAST_MB = 4096  # more is not locked unasked: it is the user's machine


class NoLimit(OSError):
    """This process may not limit its children's memory."""


class _Refused(OSError):
    """One way does not work here."""


@dataclass
class Limited:
    """How a command under a limit ended.

    Attributes:
        returncode (int): Negative: the signal that ended it.
        stdout (str): What it printed.
        stderr (str): What it complained about.
        how (str): What limited it; ``none`` if nothing did.
        refused (dict[str, str]): Why each way that would have come first could not be used.
        over (bool): Whether memory ran out and ballast was given up.
    """

    returncode: int
    stdout: str
    stderr: str
    how: str
    refused: dict = field(default_factory=dict)
    over: bool = False

    @property
    def killed(self):
        """Whether it went over the limit: the kernel killed it, or what held the rest of the memory."""
        return self.over or self.returncode in (-9, 137)


def run(argv, nbytes=None, ways=("cgroup", "systemd-run", "ballast"), timeout_s=None):
    """Run a command, its memory limited to ``nbytes``, page cache included.

    It is killed when this process is (Linux).

    Args:
        argv (list[str]): The command.
        nbytes (int, optional): The limit. Default: none.
        ways (tuple[str]): What may limit it, the first that works.
        timeout_s (float, optional): Kill it after so long.

    Returns:
        Limited: How it ended.

    Raises:
        NoLimit: If there is no way to limit it here, with the reason for each.
        subprocess.TimeoutExpired: If it was killed for taking too long.
    """
    if nbytes is None:
        return _run(argv, "none", timeout_s)
    refused = {}
    for name in ways:
        way = {"cgroup": _cgroup, "systemd-run": _scope, "ballast": _ballast}[name](nbytes)
        try:
            before, group, how, ballast = way.__enter__()
        except _Refused as e:
            refused[name] = str(e)
            continue
        try:
            done = _run([*before, *argv], how, timeout_s, group)
            done.refused, done.over = refused, ballast is not None and ballast.lost
            return done
        finally:
            way.__exit__(None, None, None)
    raise NoLimit(
        "Cannot limit memory here: " + "; ".join(f"{n}: {why}" for n, why in refused.items()) + "."
    )


def _run(argv, how, timeout_s=None, group=None):
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=timeout_s, preexec_fn=_before_exec(group)
    )
    return Limited(done.returncode, done.stdout, done.stderr, how)


def _before_exec(group=None):
    """What a child does first: it ends when we do, and joins its cgroup."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # not on macOS

    def before():
        if prctl is not None:
            prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return before


@contextmanager
def _cgroup(nbytes):
    """A cgroup with a limit, gone at the end."""
    try:
        groups = dict(line.split(":", 2)[1:] for line in OWN_CGROUPS.read_text().splitlines())
    except OSError:
        raise _Refused("this system has no cgroups") from None
    if "memory" in groups:
        top, how = CGROUPS / "memory", "cgroup v1"
        parents = [top / groups["memory"].lstrip("/")]
        settings = {"memory.limit_in_bytes": nbytes, "memory.swappiness": 0}
    else:
        top, how = CGROUPS, "cgroup v2"
        own = top / groups.get("", "/").lstrip("/")
        # A group that has processes cannot limit its children: take the nearest above that does.
        parents = [g for g in (own, *own.parents) if g.is_relative_to(top) and _limits_children(g)]
        settings = {"memory.max": nbytes, "memory.swap.max": 0}
        if not parents:
            raise _Refused("cgroup v2: no group above this process hands on the memory controller")
    _remove_stale(top)
    why = None
    for parent in parents:
        group = None
        try:
            new = parent / f"moelab-{os.getpid()}-{_started(os.getpid())}-{time.monotonic_ns()}"
            new.mkdir()
            group = new
            for name, value in settings.items():
                if value or (group / name).exists():  # without swap there is nothing to forbid
                    (group / name).write_text(str(value))
            subprocess.run(["true"], check=True, preexec_fn=_before_exec(group))
            break
        except (OSError, subprocess.SubprocessError) as e:
            why = (
                why
                or f"no group may be made in {parent} ({how}: {getattr(e, 'strerror', None) or e})"
            )
            if group is not None:
                _remove(group)
    else:
        raise _Refused(why)
    try:
        yield [], group, how, None
    finally:
        _remove(group)


def _limits_children(group):
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _started(pid):
    """When a process was started, in ticks since boot; None if it is no more."""
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


@contextmanager
def _scope(nbytes):
    """systemd's own way, in a user's session."""
    before = [
        "systemd-run",
        "--user",
        "--scope",
        "--quiet",
        "-p",
        f"MemoryMax={nbytes}",
        "-p",
        "MemorySwapMax=0",
    ]
    why = _no_systemd()
    if why:
        raise _Refused(why)
    yield before, None, "systemd-run --user", None


@functools.cache
def _no_systemd():
    """Why ``systemd-run --user`` cannot limit memory here, or ``""``."""
    command = [
        "systemd-run",
        "--user",
        "--scope",
        "--quiet",
        "-p",
        "MemoryMax=64M",
        "cat",
        "/proc/self/cgroup",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as e:
        return str(e)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    # Where the user's session was not given the memory controller, the scope is made and limits nothing.
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


@contextmanager
def _ballast(nbytes):
    """All memory but ``nbytes`` of what is available, held by a process of ours."""
    too_much = machine.memory_available() - nbytes
    allowed = int(os.environ.get("MOELAB_BALLAST_MB", BALLAST_MB)) * 1_000_000
    if too_much > allowed:
        raise _Refused(
            f"{too_much / 1e9:.1f} GB would have to be locked, and no more than {allowed / 1e9:.1f} are without being "
            f"asked (set MOELAB_BALLAST_MB={-(-too_much // 1_000_000)} to let it)"
        )
    try:
        ballast = Ballast(max(0, too_much))
    except OSError as e:
        raise _Refused(str(e)) from None
    with ballast:
        yield [], None, f"ballast, {ballast.held_nbytes / 1e9:.2f} GB {ballast.how}", ballast


def measure(model_path, config, tokens, warmup, prompt):
    """Decode once and say what it took; meant for a process of its own.

    Args:
        model_path (str): As for ``moelab.load``.
        config (StreamConfig): How to stream.
        tokens (int): Tokens timed.
        warmup (int): Tokens decoded before.
        prompt (str): What to continue.

    Returns:
        dict: ``decode_s``, ``tokens``, ``counters``, ``mlx_peak_nbytes`` (load and prompt
        included), ``predicted_nbytes`` and ``rss_nbytes`` of this process, before MLX held
        anything, after the warm-up and at the end.
    """
    import mlx.core as mx

    from .decode import decode, encode

    rss = [psutil.Process().memory_info().rss]
    model, tokenizer = load(model_path, config)
    sample = decode(
        model,
        encode(tokenizer, prompt),
        tokens,
        warmup,
        before_clock=lambda: rss.append(psutil.Process().memory_info().rss),
    )
    rss.append(psutil.Process().memory_info().rss)
    close(model)
    return {
        **sample,
        "mlx_peak_nbytes": mx.get_peak_memory(),
        "predicted_nbytes": footprint(model_path, config).total_nbytes,
        "rss_nbytes": rss,
    }


def bench_limited(
    model_path, configs, nbytes, tokens=64, warmup=16, runs=5, prompts=None, base=None
):
    """Every mode under a memory limit, against the resident model with all the memory.

    Each run is a fresh process, limited before it loads anything; the rounds take the
    variants in turn.

    Args:
        model_path (str): The model.
        configs (dict[str, StreamConfig]): The modes, by name.
        nbytes (int): The limit, page cache included.
        tokens (int): Tokens timed in a run.
        warmup (int): Tokens decoded before.
        runs (int): Rounds.
        prompts (list[str], optional): Round i takes prompt i, modulo their number. Default:
            ``def main():``.
        base (StreamConfig, optional): Its dtype and top-k are the resident model's.

    Returns:
        dict: All samples, and a summary for each variant.
    """
    from .experiments.bench import resident_like
    from .models import folder

    prompts, model_path = prompts or ["def main():\n"], folder(model_path)
    for config in configs.values():
        footprint(model_path, config)  # refuses what cannot be before any work
    variants = {"resident, no limit": (resident_like(base), None)}
    variants |= {f"{name}, limit": (config, nbytes) for name, config in configs.items()}
    samples = []
    for i in tqdm(range(runs), desc="rounds under the limit", leave=False):
        for name, (config, limit) in variants.items():
            if any(s["variant"] == name and s["killed"] for s in samples):
                continue  # once is enough
            if limit is not None:
                # Pages that another process brought in would be served, and not counted.
                machine.drop_pages(model_path)
            prompt = prompts[i % len(prompts)]
            call = json.dumps([str(model_path), asdict(config), tokens, warmup, prompt])
            done = run(
                [sys.executable, "-m", "moelab.lab.limit", call],
                limit,
                ways=("cgroup", "systemd-run"),
            )
            if done.returncode and not done.killed:
                raise OSError(f"{name}: {done.stderr.strip()[-2000:]}")
            sample = {} if done.killed else json.loads(done.stdout.splitlines()[-1])
            samples.append(
                {"round": i, "variant": name, "killed": done.killed, "how": done.how, **sample}
            )
    return {
        "kind": "limited",
        "model": Path(model_path).name,
        "machine": machine.card(),
        "limit_nbytes": nbytes,
        "checkpoint_nbytes": footprint(model_path).checkpoint_nbytes,
        "tokens": tokens,
        "warmup_tokens": warmup,
        "prompts": prompts,
        "samples": samples,
        "summary": summarize(samples),
    }


def summarize(samples):
    """Medians and quartiles by variant; ratios are taken round by round.

    Args:
        samples (list[dict]): Of ``bench_limited``.
    """
    first = samples[0]["variant"]
    yard = {s["round"]: s for s in samples if s["variant"] == first}
    out = {}
    for name in dict.fromkeys(s["variant"] for s in samples):
        mine = [s for s in samples if s["variant"] == name]
        out[name] = {"killed": mine[0]["killed"], "how": mine[0]["how"]}
        if mine[0]["killed"]:
            continue
        out[name] |= {
            "decode_tok_s": timing.summary([s["counters"]["tokens"] / s["decode_s"] for s in mine]),
            "ratio": timing.paired_ratio(
                [yard[s["round"]]["decode_s"] for s in mine], [s["decode_s"] for s in mine]
            ),
            "same_tokens": all(s["tokens"] == yard[s["round"]]["tokens"] for s in mine),
            "hit_rate": statistics.median(s["counters"]["hit_rate"] for s in mine),
            "bytes_per_token": statistics.median(s["counters"]["bytes_per_token"] for s in mine),
            "peak_of_predicted": max(s["mlx_peak_nbytes"] / s["predicted_nbytes"] for s in mine),
            "rss_growth_nbytes": max(s["rss_nbytes"][2] - s["rss_nbytes"][1] for s in mine),
            "rss_nbytes": max(s["rss_nbytes"][2] for s in mine),
        }
    return out


def report(record):
    """The record of ``bench_limited`` as text."""
    lines = [
        machine.card_line(record["machine"]),
        f"{record['model']}: {record['checkpoint_nbytes'] / 1e6:.0f} MB of tensors, limit "
        f"{record['limit_nbytes'] / 1e6:.0f} MB with the page cache; {record['tokens']} greedy tokens "
        f"after {record['warmup_tokens']} of warm-up, each run a process of its own",
    ]
    for name, s in record["summary"].items():
        if s["killed"]:
            lines.append(f"{name}: killed ({s['how']})")
            continue
        t, r = s["decode_tok_s"], s["ratio"]
        lines.append(
            f"{name}: {t['median']:.4g} [{t['p25']:.4g} - {t['p75']:.4g}] tok/s, "
            f"{r['median']:.3f} [{r['p25']:.3f} - {r['p75']:.3f}] of resident without limit, n={t['n']}; "
            f"tokens {'same' if s['same_tokens'] else 'DIFFER'}; hit rate {s['hit_rate']:.0%}, "
            f"{s['bytes_per_token'] / 1e6:.1f} MB/token; MLX peak {s['peak_of_predicted']:.3f} of predicted; "
            f"process {s['rss_nbytes'] / 1e6:.0f} MB, {s['rss_growth_nbytes'] / 1e6:+.1f} MB over the timed tokens ({s['how']})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    model_path, config, *rest = json.loads(sys.argv[1])
    try:
        print(json.dumps(measure(model_path, StreamConfig(**config), *rest)))
    except (ValueError, OSError) as error:  # the process above prints it
        sys.exit(str(error))
