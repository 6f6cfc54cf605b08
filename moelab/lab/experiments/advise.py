"""How to stream a model on this machine: both are measured here, ``replay.advice`` decides."""

from pathlib import Path

import numpy as np

from ... import StreamConfig, Trace, footprint, load
from ...checkpoint import Checkpoint
from ...hooks import hooked
from ...replay import advice
from ...replay.advice import Advice, Lookahead
from ...replay.costs import Costs
from ...replay.sizes import ModelSizes
from ...streaming.session import session_of
from ..decode import decode, encode
from ..machine import read_speed
from ..texts import PROMPTS

# Reads that compare layouts: bytes, more than the cache inside a disk; the fewest reads; runs.
GAIN_NBYTES, GAIN_READS, GAIN_RUNS = 64 << 20, 8, 3


def advise(path: Path, memory: float, trace: Trace, costs: Costs) -> Advice:
    """Choose how to stream a model in given memory, by replaying a trace with this machine's costs.

    What packed experts and a prefetch would gain is measured.
    """
    packed_gain = None if Checkpoint(path).packed else measure_packed_gain(path, costs)
    sizes = ModelSizes.of(path, memory)
    found = advice.advise(sizes, memory, trace, costs, packed_gain=packed_gain)
    if not found.prefetch_may_pay:
        return found
    try:
        return advice.with_lookahead(found, measure_lookahead(path, found.config.slots))
    except ValueError as error:  # this family's router cannot be asked
        return found.because(f"No prefetch: {error}")


def measure_packed_gain(path: Path, costs: Costs) -> float:
    """How many times faster the SSD reads experts in one piece than in their parts, cold."""
    file = max(path.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    nbytes = footprint(path, StreamConfig()).expert_nbytes
    count = max(GAIN_READS, GAIN_NBYTES // nbytes)
    readers = StreamConfig().readers
    speeds = [read_speed(file, True, readers, nbytes, count) for _ in range(GAIN_RUNS)]
    return float(np.median(speeds) * costs.cold_s_per_byte)


def measure_lookahead(path: str | Path, slots: int, tokens: int = 16) -> Lookahead:
    """Measure what a lookahead predicts and costs, decoding with at most 2 K slots per layer."""
    slots, token_s = min(slots, 2 * footprint(path, StreamConfig()).top_k), {}
    for prefetch in ("none", "lookahead"):
        model, tokenizer = load(path, StreamConfig(prefetch=prefetch, slots=slots))
        with model:
            ids = encode(tokenizer, PROMPTS[0])
            token_s[prefetch] = np.median(decode(model, ids, tokens, warmup=4).step_s)
            if prefetch == "lookahead":
                counters = _counted(model, ids, tokens)
    used, wasted = counters.prefetch_used, counters.prefetch_wasted
    needed = max(1, used + counters.misses)
    return Lookahead(used / needed, wasted / needed, float(token_s["lookahead"] - token_s["none"]))


def _counted(model, ids, tokens):
    """Count a text's reads when every prefetched read ends before its layer runs."""
    residency = session_of(model).residency
    layers = residency.layers

    def and_wait(prefetch, i, experts):
        prefetch(i, experts)
        if layers[i].job is not None:
            layers[i].job.wait()

    with hooked(residency, and_wait, "prefetch"):
        return decode(model, ids, tokens, warmup=4).counters
