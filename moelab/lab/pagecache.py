"""A trace replayed through two caches: the application's slots, and the operating system's page cache below them.

Which of them should have the memory is the question of notebook 03. ``replay`` answers it for any memory, policy and
cost in a fraction of a second; ``measure_costs`` says what the costs are on this machine.
"""

from dataclasses import dataclass

import numpy as np

POLICIES = ("lru", "lfu", "fifo", "s3-fifo", "belady", "none")


@dataclass(frozen=True)
class Costs:
    """What things take on one machine.

    Attributes:
        fixed_s (float): A token's work but for the routed experts: attention, router, head, Python.
        expert_s (float): One expert's arithmetic for one token.
        warm_s_per_byte (float): A byte read from the page cache, with the engine's reads in flight.
        cold_s_per_byte (float): A byte read from the disk, with as many.
        warm_call_s (float): What a layer's reads take at least when all come from the page cache.
        cold_call_s (float): What they take at least when one comes from the disk.
        overlap (float): Of the shorter of a layer's reads and arithmetic, the share that the other hides, 0 to 1.
        ahead (float): Bytes that the disk brings beyond a byte asked for (read-ahead).
    """

    fixed_s: float
    expert_s: float
    warm_s_per_byte: float
    cold_s_per_byte: float
    warm_call_s: float = 0.0
    cold_call_s: float = 0.0
    overlap: float = 0.0
    ahead: float = 0.0


@dataclass(frozen=True)
class Replay:
    """What a trace would have done.

    Attributes:
        token_s (np.ndarray): ``[T]`` seconds of each token counted.
        app_hit_rate (float): Share of the experts needed that were in a slot.
        page_hit_rate (float): Share of the bytes asked of the page cache that it had; nan if nothing was asked.
        copied_per_token (float): Bytes that came out of the page cache.
        read_per_token (float): Bytes that came from the disk, read-ahead included.
        parts_s (dict[str, float]): Seconds of an average token by ``fixed``, ``experts``, ``copies``, ``disk``;
            ``hidden`` (not positive) is what overlap saved.
        page_nbytes (int): What the memory left for the page cache.
    """

    token_s: np.ndarray
    app_hit_rate: float
    page_hit_rate: float
    copied_per_token: float
    read_per_token: float
    parts_s: dict
    page_nbytes: int

    @property
    def tok_s(self):
        """Tokens per second, from the mean of ``token_s``."""
        return 1 / self.token_s.mean()


def replay(trace, memory_nbytes, slots, policy="lru", *, expert_nbytes, costs, other_nbytes=0, skip=0, pages="linux"):
    """Replay a trace's decoded tokens through slots over a page cache.

    Args:
        trace (Trace): ``[T, L, K]``.
        memory_nbytes (float): What the process and its page cache may take; ``inf``: no limit.
        slots (int): S, experts held in each layer; at least K.
        policy (str): Which leaves first: ``lru``, ``lfu`` (both exactly as ``SlotTable`` does it), ``fifo``, ``s3-fifo``,
            ``belady`` (the one needed last: no policy can do better), or ``none``: nothing is held, every expert is read
            each time, as ``buffers`` does, and ``slots`` counts only K.
        expert_nbytes (int): What a miss reads: one expert, all projections.
        costs (Costs): From ``measure_costs``, or made up.
        other_nbytes (int): What else the process holds: backbone, caches, the interpreter.
        skip (int): Tokens at the start that fill the caches and are not counted.
        pages (str): ``linux``: two lists, active and inactive, as Linux keeps them; ``lru``: one.

    Returns:
        Replay: Hit rates, bytes and seconds.

    Raises:
        ValueError: If the slots and the rest do not fit in the memory, or an argument is not one of the above.
    """
    raise NotImplementedError


def measure_costs(path, config=None, trace=None):
    """What reads and arithmetic take on this machine, with this model and this way to stream it.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig, optional): Its ``readers``, ``streams``, ``dtype`` and ``scales`` count.
        trace (Trace, optional): To decode with. Default: a made-up one.

    Returns:
        Costs: Medians; about ten seconds and 256 MB of cold reads.
    """
    raise NotImplementedError
