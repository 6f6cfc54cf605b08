"""What a model's calls have cost: ``Stats``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from .reading.reader import Reader


@dataclass
class Counters:
    """What one phase has cost since load or reset.

    Attributes:
        tokens (int): Tokens that went in.
        calls (int): Calls of MoE layers.
        hits (int): Experts that were in their slot when needed.
        misses (int): Experts that had to be read.
        reads (int): Ranges of files read.
        bytes_read (int): Their bytes.
        read_s (float): Seconds in reads, summed over the threads.
        wait_s (float): Seconds in which the model waited for reads.
        prefetch_issued (int): Experts handed to prefetch threads. Those not begun in time are
            cancelled.
        prefetch_used (int): Prefetched and needed by the call they were meant for; also hits.
        prefetch_late (int): Of these, the ones whose read had not ended by then.
        prefetch_wasted (int): Prefetched and not needed by that call.
        prefetch_saved_s (float): Seconds of the used experts' reads, less the wait for them.
    """

    tokens: int = 0
    calls: int = 0
    hits: int = 0
    misses: int = 0
    reads: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    wait_s: float = 0.0
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_saved_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Hits among the experts needed, 0 to 1; nan if none was needed."""
        needed = self.hits + self.misses
        return self.hits / needed if needed else float("nan")

    @property
    def bytes_per_token(self) -> float:
        """Bytes read for each token; nan before the first."""
        return self.bytes_read / self.tokens if self.tokens else float("nan")


@dataclass
class Stats:
    """Counters of prompts and of decoding, apart.

    Attributes:
        prefill (Counters): Of calls with several tokens of a text: prompts, verify passes.
        decode (Counters): Of calls with one token of each of their texts.
        kernels (dict[str, int]): How many modules compute with the ``fast`` kernels and how many
            with ``mlx``'s; empty with ``StreamConfig(kernels="mlx")``.
    """

    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    kernels: dict[str, int] = field(default_factory=dict, compare=False)


class Counting:
    """Counts into the counters of the phase that runs: a prompt, or decoding.

    Args:
        kernels (dict[str, int]): For ``Stats``.

    Attributes:
        stats (Stats): The counters of both phases.
        now (Counters): Those of the last call's phase.
    """

    def __init__(self, kernels: dict[str, int]):
        self.stats = Stats(kernels=kernels)
        self.now = self.stats.decode
        self._read = (0, 0, 0.0)  # the reader's totals when they were last counted

    @property
    def decoding(self) -> bool:
        """Whether the call that runs now has one token of each of its texts."""
        return self.now is self.stats.decode

    def begin(self, tokens: int, is_prompt: bool) -> None:
        """Count a call of the whole model.

        Args:
            tokens (int): Of the call.
            is_prompt (bool): Whether it has more than one token of a text.
        """
        self.now = self.stats.prefill if is_prompt else self.stats.decode
        self.now.tokens += tokens

    def reads_of(self, reader: Reader) -> None:
        """Add the bytes read since the last time to the counters of the last call's phase.

        Args:
            reader (Reader): The one that read them.
        """
        total = (reader.reads, reader.nbytes, reader.read_s)
        before, self._read = self._read, total
        self.now.reads += total[0] - before[0]
        self.now.bytes_read += total[1] - before[1]
        self.now.read_s += total[2] - before[2]

    @contextmanager
    def read_wait(self) -> Iterator[None]:
        """Count the time inside the block as waiting for reads (``wait_s``)."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.now.wait_s += perf_counter() - begin

    def result(self, reset: bool) -> Stats:
        """The counters of both phases.

        Args:
            reset (bool): Begin again at zero. Else a copy is returned.
        """
        stats = self.stats
        if not reset:
            return Stats(replace(stats.prefill), replace(stats.decode), stats.kernels)
        self.stats = Stats(kernels=stats.kernels)
        self.now = self.stats.decode
        return stats
