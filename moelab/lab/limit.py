"""Run a command with less memory than the machine has, and bench a model that way.

The limit is a memory cgroup (version 2 or 1) where this process may make one, else
``systemd-run --user``. Both count the page cache, so both make memory pressure real.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from .. import StreamConfig, close, footprint, load
from . import machine, timing

CGROUPS = Path("/sys/fs/cgroup")


class NoLimit(OSError):
    """This process may not limit its children's memory."""


@dataclass
class Limited:
    """How a command under a limit ended.

    Attributes:
        returncode (int): Negative: the signal that ended it.
        stdout (str): What it printed.
        stderr (str): What it complained about.
        how (str): What limited it; ``none`` if nothing did.
    """

    returncode: int
    stdout: str
    stderr: str
    how: str

    @property
    def killed(self):
        """Whether it was killed, as the kernel does when the limit is reached."""
        return self.returncode in (-9, 137)


def run(argv, nbytes=None):
    """Run a command, its memory limited to ``nbytes``, page cache included.

    Args:
        argv (list[str]): The command.
        nbytes (int, optional): The limit. Default: none.

    Returns:
        Limited: How it ended.

    Raises:
        NoLimit: If there is no way to limit it here.
    """
    if nbytes is None:
        return _run(argv, "none")
    try:
        with _cgroup(nbytes) as (join, how):
            return _run(argv, how, preexec_fn=join)
    except OSError as first:
        unit = ["systemd-run", "--user", "--scope", "--quiet"]
        limits = ["-p", f"MemoryMax={nbytes}", "-p", "MemorySwapMax=0"]
        try:
            subprocess.run([*unit, "true"], check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.SubprocessError) as second:
            raise NoLimit(
                f"Cannot limit memory here: no cgroup could be made ({first}), and systemd-run "
                f"--user does not work ({second}). Run as root on Linux, or in a user session."
            ) from None
        return _run([*unit, *limits, *argv], "systemd-run --user")


def _run(argv, how, **kwargs):
    done = subprocess.run(argv, capture_output=True, text=True, **kwargs)
    return Limited(done.returncode, done.stdout, done.stderr, how)


@contextmanager
def _cgroup(nbytes):
    """A cgroup with a limit: how a child joins it, and its name. Gone at the end."""
    groups = dict(
        (line.split(":", 2)[1], line.strip().split(":", 2)[2])
        for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    if "memory" in groups:
        parent, how = CGROUPS / "memory" / groups["memory"].lstrip("/"), "cgroup v1"
        settings = {"memory.limit_in_bytes": nbytes, "memory.swappiness": 0}
    else:
        parent, how = CGROUPS / groups.get("", "/").lstrip("/"), "cgroup v2"
        settings = {"memory.max": nbytes, "memory.swap.max": 0}
    group = Path(tempfile.mkdtemp(prefix="moelab-", dir=parent))
    try:
        for name, value in settings.items():
            (group / name).write_text(str(value))

        def join():
            (group / "cgroup.procs").write_text(str(os.getpid()))

        yield join, how
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:  # the kernel is still tearing the last process down
                time.sleep(0.1)


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

    from .bench import decode

    rss = [psutil.Process().memory_info().rss]
    model, tokenizer = load(model_path, config)
    sample = decode(
        model,
        tokenizer.encode(prompt),
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


def bench_limited(model_path, configs, nbytes, tokens=64, warmup=16, runs=5, prompt=None):
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
        prompt (str, optional): Default: ``def main():``.

    Returns:
        dict: All samples, and a summary for each variant.
    """
    prompt = prompt or "def main():\n"
    variants = {"resident, no limit": (StreamConfig(mode="resident"), None)}
    variants |= {f"{name}, limit": (config, nbytes) for name, config in configs.items()}
    samples = []
    for i in tqdm(range(runs), desc="rounds under the limit", leave=False):
        for name, (config, limit) in variants.items():
            if any(s["variant"] == name and s["killed"] for s in samples):
                continue  # once is enough
            if limit is not None:
                # Pages that another process brought in would be served, and not counted.
                for file in Path(model_path).glob("*.safetensors"):
                    machine.drop_pages(file)
            call = json.dumps([str(model_path), asdict(config), tokens, warmup, prompt])
            done = run([sys.executable, "-m", "moelab.lab.limit", call], limit)
            if done.returncode and not done.killed:
                raise OSError(f"{name}: {done.stderr.strip()[-2000:]}")
            sample = {} if done.killed else json.loads(done.stdout.splitlines()[-1])
            samples.append({"round": i, "variant": name, "killed": done.killed, "how": done.how, **sample})
    return {
        "kind": "limited",
        "model": Path(model_path).name,
        "machine": machine.card(),
        "limit_nbytes": nbytes,
        "checkpoint_nbytes": footprint(model_path).checkpoint_nbytes,
        "tokens": tokens,
        "warmup_tokens": warmup,
        "prompt": prompt,
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
    print(json.dumps(measure(model_path, StreamConfig(**config), *rest)))
