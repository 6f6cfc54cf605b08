"""How to stream a model on this machine: both are measured here, ``replay.advice`` decides."""

from pathlib import Path

from ... import StreamConfig, Trace
from ...replay import advice
from ...replay.advice import Advice
from ...replay.costs import Costs
from ...replay.sizes import ModelSizes
from ...streaming.facts import ModelFacts
from ..machine import cold_gain


def advise(path: Path, memory: float, trace: Trace, costs: Costs) -> Advice:
    """Choose how to stream a model in given memory, by replaying a trace with this machine's costs.

    What packed experts would gain is measured.
    """
    sizes, facts = ModelSizes.of(path, memory), ModelFacts.of(path, StreamConfig())
    gain = cold_gain(facts, costs.reads_direct)
    return advice.advise(sizes, memory, trace, costs, packed_gain=gain)
