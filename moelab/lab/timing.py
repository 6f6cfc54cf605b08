"""Timing with its noise: raw samples, medians and quartiles, variants interleaved in random order."""

import html
import random
import time
from dataclasses import dataclass, field

import numpy as np

CACHE_STATES = ("cold", "warm", "none")  # of the page cache; none: nothing is read


@dataclass(frozen=True)
class Timing:
    """What was timed, under which conditions, and every sample.

    Attributes:
        name (str): The variant.
        samples_s (tuple[float]): Seconds of each timed call, in the order of the rounds.
        n_warmup (int): Calls before them that were not kept.
        cache_state (str): Of the page cache: ``cold``, ``warm``, or ``none`` where nothing is read.
        device (str): ``cpu`` or ``gpu``.
        config (dict): Sizes and settings of the call.
        env (dict): The machine, as ``machine.card`` gives it.
    """

    name: str
    samples_s: tuple
    n_warmup: int = 0
    cache_state: str = "none"
    device: str = "cpu"
    config: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)

    def __post_init__(self):
        if not self.samples_s:
            raise ValueError(f"{self.name}: no samples")
        if self.cache_state not in CACHE_STATES:
            raise ValueError(
                f"{self.name}: cache_state {self.cache_state!r}, expected one of {', '.join(CACHE_STATES)}"
            )

    @property
    def median_s(self):
        return float(np.median(self.samples_s))

    @property
    def quartiles_s(self):
        """(25th, 75th percentile)."""
        return tuple(float(q) for q in np.percentile(self.samples_s, (25, 75)))

    @property
    def warning(self):
        """Why the median deserves distrust, or ``""``."""
        low, high = self.quartiles_s
        if len(self.samples_s) < 3:
            return f"only {len(self.samples_s)} samples"
        if high - low > 0.25 * self.median_s:
            return "noisy: quartiles more than 25% of the median apart"
        return ""

    def __str__(self):
        unit, scale = next(
            (u, s)
            for u, s in (("s", 1), ("ms", 1e3), ("us", 1e6))
            if self.median_s * s >= 1 or u == "us"
        )
        low, high = self.quartiles_s
        text = f"{self.name}: {self.median_s * scale:.3g} {unit} [{low * scale:.3g} - {high * scale:.3g}], n={len(self.samples_s)}"
        return text + (f" ({self.warning})" if self.warning else "")

    def _repr_html_(self):
        return f"<code>{html.escape(str(self))}</code>"


def summary(samples):
    """``{"median", "p25", "p75", "n"}`` of some numbers."""
    p25, median, p75 = (float(q) for q in np.percentile(samples, (25, 50, 75)))
    return {"median": median, "p25": p25, "p75": p75, "n": len(samples)}


def quartiles_text(samples, scale=1, form=".4g"):
    """``"median [p25 - p75] n=N"`` of some numbers.

    Args:
        samples (Sequence[float] or dict): Numbers, or their ``summary``.
        scale (float): What each is multiplied by.
        form (str): How each is formatted.
    """
    s = samples if isinstance(samples, dict) else summary(samples)
    low, mid, high = (format(s[q] * scale, form) for q in ("p25", "median", "p75"))
    return f"{mid} [{low} - {high}] n={s['n']}"


def interleave(variants, rounds, n_warmup=1, seed=0, cache_state="none", config=None):
    """Time several calls in turn, in a new random order every round, so that drift hits all alike.

    Args:
        variants (dict[str, Callable]): Each is called without arguments. What it returns counts as its seconds if it is
            a float; else the call itself is timed, so it must evaluate what it computes.
        rounds (int): Samples of each.
        n_warmup (int): Rounds before them that are not kept.
        seed (int): Of the orders.
        cache_state (str): As in ``Timing``.
        config (dict): Kept with the samples.

    Returns:
        dict[str, Timing]: Sample i of every variant comes from round i.
    """
    from .machine import card

    order, samples = random.Random(seed), {name: [] for name in variants}
    for i in range(n_warmup + rounds):
        for name in order.sample(list(variants), len(variants)):
            begin = time.perf_counter()
            own = variants[name]()
            seconds = own if isinstance(own, float) else time.perf_counter() - begin
            if i >= n_warmup:
                samples[name].append(seconds)
    env = card()
    return {
        name: Timing(name, tuple(s), n_warmup, cache_state, env["device"], config or {}, env)
        for name, s in samples.items()
    }


def paired_ratio(over, under):
    """``summary`` of over[i] / under[i]: the quotient round by round, so that drift cancels."""
    over, under = (np.asarray(getattr(t, "samples_s", t), float) for t in (over, under))
    if over.shape != under.shape:
        raise ValueError(f"expected as many samples of both, got {len(over)} and {len(under)}")
    return summary(over / under)


def per_call(fn, count):
    """A variant for ``interleave``: the mean seconds of ``count`` calls of ``fn`` in a row."""

    def timed():
        begin = time.perf_counter()
        for _ in range(count):
            fn()
        return (time.perf_counter() - begin) / count

    return timed
