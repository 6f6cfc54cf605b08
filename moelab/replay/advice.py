"""Decide from given numbers how to stream a model: with which slots, and how to read."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..streaming.config import StreamConfig
from ..streaming.plan import Plan
from ..streaming.trace import Trace
from .costs import Costs
from .pagecache import Replay, replay

# Settings whose times are within this share of the shortest time are equal. Of equal settings, the
# one that moves the fewest bytes is taken, as reads have costs that a replay does not know. On a
# Mac (no reads past the page cache), that with the fewest slots is taken: too many slots cost more
# than too few.
EQUAL = 0.02
NUM_SLOTS = 12  # as many are compared if none are given


class Setting(NamedTuple):
    """A choice that a replay compares with others."""

    slots: int
    policy: str  # the eviction policy
    direct: bool = False  # whether experts are read past the page cache


@dataclass(frozen=True)
class Advice:
    """How to stream a model, and what to expect."""

    config: StreamConfig
    direct: bool  # whether experts should be read past the page cache
    token_s: float  # predicted seconds of a decoded token with this config
    memory_nbytes: float  # the advice is for this memory, page cache included
    chosen: Replay  # the replay of this config, without prefetch
    settings: dict[Setting, Replay]  # every setting, without prefetch
    why: tuple[str, ...]  # the reasons, one a sentence

    def __str__(self):
        c, memory = self.config, "without a memory limit:"
        if self.memory_nbytes < float("inf"):
            memory = f"with {self.memory_nbytes / 1e9:.2f} GB for the process and its page cache:"
        lines = [
            memory,
            f"  mode={c.mode} slots={c.slots}, reads {_way(self.direct)}: "
            f"{self.token_s * 1e3:.1f} ms a token, {1 / self.token_s:.1f} tok/s predicted",
            *(f"  - {line}" for line in self.why),
            "other slots, without prefetch (<: chosen; page cache: the memory left for it):",
            f"{'slots':>6} {'ms/token':>9} {'in a slot':>9} {'page cache':>10} "
            f"{'SSD, MB/token':>13}",
        ]
        for setting, r in self.settings.items():
            slots, _, direct = setting
            pages = "past it" if direct else "all"
            if not direct and r.page_nbytes < float("inf"):
                pages = f"{r.page_nbytes / 1e6:.0f} MB"
            mark = " <" if (slots, direct) == (c.slots, self.direct) else ""
            lines.append(
                f"{slots:6d} {r.mean_s * 1e3:9.1f} {r.app_hit_rate:9.0%} {pages:>10} "
                f"{r.read_per_token / 1e6:13.1f}{mark}"
            )
        return "\n".join(lines)


def advise(
    plan: Plan,
    memory_nbytes: float,
    trace: Trace,
    costs: Costs,
    slots: list[int] | None = None,
    policy: str = StreamConfig().policy,
) -> Advice:
    """Choose slots by replaying a trace, without prefetch.

    ``memory_nbytes`` is for the process and its page cache (inf: no limit). The first half of the
    trace only fills the caches.
    """
    K, E, most = plan.top_k, plan.num_experts, plan.fits(memory_nbytes)
    if slots is None:
        slots = np.unique(np.linspace(K, most, NUM_SLOTS).astype(int)).tolist()
    slots = [n for n in slots if K <= n <= most]
    if not slots:
        raise ValueError(
            f"advise: expected slots from {K} (the experts per token) to {most} (what fits), "
            "got none."
        )
    skip = len(trace.decode) // 2
    ways = (False, True) if costs.reads_direct and memory_nbytes < float("inf") else (False,)
    every = [Setting(n, policy, direct) for direct in ways for n in slots]
    settings = replay_settings(plan, memory_nbytes, trace, costs, every, skip)
    n, _, direct = picked = pick(settings, fewest_slots=not costs.reads_direct)
    chosen = settings[picked]
    page_hit_rate = np.nan_to_num(chosen.page_hit_rate)
    of_pages = _way(True) if direct else f"the page cache serves {page_hit_rate:.0%} of the rest"
    why = [
        f"{n} of {E} slots serve {chosen.app_hit_rate:.0%} of the experts; {of_pages}, and "
        f"{chosen.read_per_token / 1e6:.1f} MB a token come from the SSD."
    ]
    for other, r in settings.items():
        if other.slots == n and other != picked:
            way = _way(other.direct)
            why.append(f"Reads {way} change a token's time by {r.mean_s / chosen.mean_s - 1:+.1%}.")
    if most == E:
        why.append(
            "All of the model fits: compare mode='resident', which reads nothing and never waits "
            "for the routing (python -m moelab bench)."
        )
    config = StreamConfig(slots=n)
    return Advice(config, direct, chosen.mean_s, memory_nbytes, chosen, settings, tuple(why))


def replay_settings(
    plan: Plan,
    memory_nbytes: float,
    trace: Trace,
    costs: Costs,
    settings: Iterable[tuple],
    skip: int,
) -> dict[Setting, Replay]:
    """Replay a trace with each setting; count tokens from ``skip`` on. E slots read nothing."""
    facts = plan.facts

    def is_held(setting):
        return setting.slots >= plan.num_experts and setting.policy != "none"

    return {
        setting: replay(
            trace,
            memory_nbytes,
            setting.slots,
            setting.policy,
            expert_nbytes=facts.expert_nbytes,
            costs=costs.without_reads() if is_held(setting) else costs,
            slot_nbytes=facts.slot_nbytes // facts.num_layers,
            other_nbytes=plan.other_nbytes,
            skip=skip,
            direct=setting.direct and not is_held(setting),
        )
        for setting in (Setting(*given) for given in settings)
    }


def pick(settings: dict[Setting, Replay], fewest_slots: bool = False) -> Setting:
    """Among settings as fast as the fastest return that with the fewest bytes moved or slots."""
    best_s = min(r.mean_s for r in settings.values())
    equal = {key: r for key, r in settings.items() if r.mean_s <= best_s * (1 + EQUAL)}
    moved = {key: r.copied_per_token + r.read_per_token for key, r in equal.items()}
    return min(equal, key=lambda key: (fewest_slots and key.slots, moved[key]))


def _way(direct):
    return "past the page cache" if direct else "through the page cache"
