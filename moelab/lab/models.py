"""Model folders, and the sizes of models that are not there."""

import functools
from dataclasses import replace

from ..checkpoint import temporary_folder
from ..configs import CONFIGS, one_of
from ..memory import Most
from ..replay.sizes import ModelSizes
from ..streaming.config import MOST_NBYTES, StreamConfig
from ..streaming.facts import ModelFacts
from ..streaming.model import find as folder  # noqa: F401 (the experiments' name for it)
from ..streaming.plan import plan_of
from ..synthesize import BITS, write_headers

CONFIG = StreamConfig(lazy_logits=True, slots="auto").resolved()  # as the commands load a model


def named_sizes(
    name: str, most: Most | None = None, bits: int = BITS, top_k: int | None = None
) -> ModelSizes:
    """The sizes of a published model, from its configuration; it must fit with K slots.

    ``most`` is what a plan may fill (None: no limit).
    """
    config = replace(CONFIG, memory_nbytes=MOST_NBYTES)
    sizes = ModelSizes.planned(plan_of(_facts(one_of(CONFIGS, name), bits), config, most=most))
    return replace(sizes, K=top_k or sizes.K)


@functools.cache
def _facts(name, bits):
    """The facts of a published model, from headers as its checkpoint would have them."""
    with temporary_folder() as path:
        write_headers(path, CONFIGS[name], bits)
        return ModelFacts.of(path, CONFIG)
