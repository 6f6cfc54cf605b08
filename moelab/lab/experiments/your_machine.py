"""Notebook 12: published models on this machine and on others, by ``plan``'s forecasts."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ...configs import CONFIGS
from ...replay.machine import Machine, typical_trace
from ...replay.pagecache import replay
from .. import charts
from ..models import named_sizes
from ..records import pandas
from .advise import TOKENS
from .plan import forecast, speed_text

if TYPE_CHECKING:
    from pandas import DataFrame


def table(machine: Machine, names: Iterable[str] = CONFIGS) -> "DataFrame":
    """What to expect of several models on a machine, one row for each that fits.

    Returns:
        DataFrame: ``model``, ``gb`` of its file, ``slots`` of ``experts``, ``tok_s``, ``low_tok_s``
        and ``high_tok_s``, ``in_memory_tok_s`` (if memory held every expert), ``first_s`` and
        ``first_most_s`` of a prompt of 1,000 tokens, ``binds``, and ``SSD``, ``page cache``,
        ``arithmetic`` and ``layers and waits`` of a token, in ms. The header's ``too_large`` names
        the others.
    """
    rows, too_large = [], []
    for name in tqdm(names, desc="models", leave=False):
        try:
            found = forecast(name, machine)
        except ValueError:
            too_large.append(name)
            continue
        speed, sizes = 1 / found.advice.token_s, found.sizes
        first_s, first_most_s = found.prompt_s(1000)
        in_memory = machine.costs(sizes)
        rows.append(
            {
                **{"model": name, "gb": sizes.checkpoint_nbytes / 1e9},
                **{"slots": found.advice.config.slots, "experts": sizes.E, "tok_s": speed},
                **{"low_tok_s": speed / found.spread, "high_tok_s": speed * found.spread},
                "in_memory_tok_s": 1 / (in_memory.fixed_s + sizes.L * sizes.K * in_memory.expert_s),
                **{"first_s": first_s, "first_most_s": first_most_s},
                "binds": max(found.parts_s, key=found.parts_s.get),
                **{part: s * 1e3 for part, s in found.parts_s.items()},
            }
        )
    out = pandas().DataFrame(rows)
    out.attrs = {"too_large": too_large}
    return out


def by_slots(name: str, machine: Machine, count: int = 12, tokens: int = TOKENS) -> "DataFrame":
    """A model's speed by its slots, beyond those that fit: ``slots``, ``held_gb``, ``tok_s``."""
    sizes, rows = named_sizes(name), []
    for slots in np.unique(np.linspace(sizes.K, sizes.E, count).astype(int)).tolist():
        held = sizes.other_nbytes + slots * sizes.slot_nbytes
        if held > machine.ram_nbytes:
            break
        found = replay(
            typical_trace(sizes, tokens),
            max(machine.memory_nbytes, held),
            slots,
            expert_nbytes=sizes.expert_nbytes,
            costs=machine.costs(sizes, held),
            other_nbytes=sizes.other_nbytes,
            skip=tokens // 2,
        )
        rows.append({"slots": slots, "held_gb": held / 1e9, "tok_s": found.tok_s})
    return pandas().DataFrame(rows)


def dial(name: str) -> Callable[..., Any]:
    """The function behind the sliders: what a model's token takes on a Mac of given rates.

    Args:
        name (str): A key of ``configs.CONFIGS``.
    """

    def look(ram, ssd, memory, top_k):
        found = forecast(name, Machine.mac(ram * 1e9, ssd * 1e9, memory * 1e9), top_k=top_k)
        rows = [{"variant": name, **{part: s * 1e3 for part, s in found.parts_s.items()}}]
        samples = pandas().DataFrame(rows)
        samples.attrs = {"record": "none: a model", "machine": ""}
        speed, parts = 1 / found.advice.token_s, list(found.parts_s)
        return charts.parts(
            samples,
            {part: f"`{part}`" for part in parts},
            title=f"{name}: {speed_text(speed)} tok/s, probably "
            f"{speed_text(speed / found.spread)} to {speed_text(speed * found.spread)}",
            axis="ms a token",
            finding=f"{found.advice.config.slots} of {found.sizes.E} experts of each layer are in "
            f"memory. Most of a token: {max(found.parts_s, key=found.parts_s.get)}.",
            note=f"a Mac of {ram} GB, SSD {ssd:g} GB/s, memory {memory} GB/s, top-k {top_k}",
        )

    return look
