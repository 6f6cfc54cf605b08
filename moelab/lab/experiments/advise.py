"""How to stream a model on this machine: both are measured here, ``replay.advice`` decides."""

from pathlib import Path

from ... import Trace
from ...replay import advice
from ...replay.advice import Advice
from ...replay.costs import Costs
from ..machine import cold_gain
from ..models import planned


def advise(path: Path, memory: float, trace: Trace, costs: Costs) -> Advice:
    """Choose how to stream a model in given memory, by replaying a trace with this machine's costs.

    What packed experts would gain is measured.
    """
    plan = planned(path, memory)
    gain = cold_gain(plan.facts, costs.reads_direct)
    return advice.advise(plan, memory, trace, costs, packed_gain=gain)
