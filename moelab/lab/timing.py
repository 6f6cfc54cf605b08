"""Timing with its noise: raw samples, medians and quartiles, variants in random order."""

import html
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

CACHE_STATES = ("cold", "warm", "none")  # of the page cache; none: nothing is read
NOISY = 0.25  # quartiles further apart than this share of the median deserve a warning
FEW = 3  # fewer samples have no quartiles to speak of
UNITS = (("s", 1), ("ms", 1e3), ("us", 1e6))


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
    samples_s: tuple[float, ...]
    n_warmup: int = 0
    cache_state: str = "none"
    device: str = "cpu"
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.samples_s:
            raise ValueError(f"{self.name}: no samples")
        if self.cache_state not in CACHE_STATES:
            raise ValueError(
                f"{self.name}: cache_state: expected one of {', '.join(CACHE_STATES)}, "
                f"got {self.cache_state!r}"
            )

    @property
    def median_s(self) -> float:
        """The median."""
        return float(np.median(self.samples_s))

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """(25th, 75th percentile)."""
        return tuple(float(q) for q in np.percentile(self.samples_s, (25, 75)))

    @property
    def warning(self) -> str:
        """Why not to trust the median, or ``""``."""
        low, high = self.quartiles_s
        if len(self.samples_s) < FEW:
            return f"only {len(self.samples_s)} samples"
        if high - low > NOISY * self.median_s:
            return f"noisy: quartiles more than {NOISY:.0%} of the median apart"
        return ""

    def __str__(self):
        fits = (u for u in UNITS if self.median_s * u[1] >= 1)
        unit, scale = next(fits, UNITS[-1])
        low, mid, high = (
            f"{s * scale:.3g}" for s in (self.quartiles_s[0], self.median_s, self.quartiles_s[1])
        )
        warning = f" ({self.warning})" if self.warning else ""
        return f"{self.name}: {mid} {unit} [{low} - {high}], n={len(self.samples_s)}{warning}"

    def _repr_html_(self):
        return f"<code>{html.escape(str(self))}</code>"


class Summary(TypedDict):
    """Median, quartiles and number of some samples, as records have it."""

    median: float
    p25: float
    p75: float
    n: int


def summary(samples: Sequence[float]) -> Summary:
    """Median, quartiles and number of some samples."""
    p25, median, p75 = (float(q) for q in np.percentile(samples, (25, 50, 75)))
    return {"median": median, "p25": p25, "p75": p75, "n": len(samples)}


def quartiles_text(samples: Sequence[float] | Summary, scale: float = 1, form: str = ".4g") -> str:
    """``"median [p25 - p75] n=N"`` of some numbers.

    Args:
        samples (Sequence[float] or dict): Numbers, or their ``summary``.
        scale (float): What each is multiplied by.
        form (str): How each is formatted.
    """
    s = samples if isinstance(samples, dict) else summary(samples)
    low, mid, high = (format(s[q] * scale, form) for q in ("p25", "median", "p75"))
    return f"{mid} [{low} - {high}] n={s['n']}"


def interleave(
    variants: Mapping[str, Callable[[], Any]],
    rounds: int,
    n_warmup: int = 1,
    seed: int = 0,
    cache_state: str = "none",
    config: dict[str, Any] | None = None,
) -> dict[str, Timing]:
    """Time several calls in turn, in a new random order every round.

    So a machine that becomes slower or faster does so for all of them alike.

    Args:
        variants (Mapping[str, Callable]): Each is called without arguments. A float that it returns
            counts as its seconds; else the call is timed, so it must evaluate what it computes.
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


def paired_ratio(over: Sequence[float] | Timing, under: Sequence[float] | Timing) -> Summary:
    """The ratio of two variants, round by round, so that drift cancels.

    Args:
        over (Sequence[float] or Timing): Seconds of each round.
        under (Sequence[float] or Timing): What they are divided by.

    Returns:
        Summary: Of ``over[i] / under[i]``.

    Raises:
        ValueError: If one has more samples than the other.
    """
    over, under = (np.asarray(getattr(t, "samples_s", t), float) for t in (over, under))
    if over.shape != under.shape:
        raise ValueError(f"expected as many samples of both, got {len(over)} and {len(under)}")
    return summary(over / under)
