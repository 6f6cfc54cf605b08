"""Find model folders, and plan models, also models that are not on this disk."""

import functools
from dataclasses import replace
from pathlib import Path

from ..checkpoint import Checkpoint, temporary_folder
from ..configs import CONFIGS, one_of
from ..memory import Most
from ..streaming.config import MOST_NBYTES, StreamConfig
from ..streaming.facts import ModelFacts
from ..streaming.model import find as folder  # noqa: F401 (experiments call it ``folder``)
from ..streaming.plan import Plan, plan, plan_of
from ..synthesize import BITS, write_headers

CONFIG = StreamConfig(lazy_logits=True, slots="auto").resolved()  # the commands' settings


def planned(path: str | Path, memory_nbytes: float = MOST_NBYTES) -> Plan:
    """Plan the model in a folder for memory that the process and the page cache share."""
    return plan(path, CONFIG, memory_nbytes=int(min(memory_nbytes, MOST_NBYTES)))


def named(name: str, most: Most | None = None, bits: int = BITS, top_k: int | None = None) -> Plan:
    """Plan a published model by its configuration, within ``most`` (None: no limit)."""
    config = replace(CONFIG, memory_nbytes=MOST_NBYTES)
    found = plan_of(_facts(one_of(CONFIGS, name), bits), config, most=most)
    return replace(found, facts=replace(found.facts, top_k=top_k or found.top_k))


@functools.cache
def _facts(name, bits):
    """Return a published model's facts, from the headers that its checkpoint would have."""
    with temporary_folder() as path:
        write_headers(path, CONFIGS[name], bits)
        return ModelFacts.of(path, CONFIG)


def repack_hint(path: str | Path, plan: Plan) -> str:
    """Say what ``repack`` does, for a model that is not repacked and not all in slots; or ""."""
    if plan.slots == plan.num_experts or Checkpoint(path).packed:
        return ""
    return (
        "a repacked copy (python -m moelab repack) takes one read for an expert; `bench --packed` "
        "shows what it gains"
    )


def settings_of(plan: Plan) -> dict[str, int]:
    """Return what a record keeps of a plan."""
    facts, (L, K, E) = plan.facts, plan.facts.shape
    return {
        "checkpoint_nbytes": facts.checkpoint_nbytes,
        "other_nbytes": plan.other_nbytes,
        "expert_nbytes": facts.expert_nbytes,
        "slot_nbytes": facts.slot_nbytes,
        **{"L": L, "E": E, "K": K},
    }


def recorded(settings: dict) -> Plan:
    """Rebuild a plan from a record; all layers of the model must have equally many experts."""
    L, E, K = (settings[name] for name in "LEK")
    facts = ModelFacts(
        experts=dict.fromkeys(map(str, range(L)), E),
        top_k=K,
        checkpoint_nbytes=settings["checkpoint_nbytes"],
        expert_nbytes=settings["expert_nbytes"],
        layers_nbytes=(settings["slot_nbytes"] // L,) * L,
        num_blocks=L,
    )
    return Plan(facts, CONFIG, settings["other_nbytes"])
