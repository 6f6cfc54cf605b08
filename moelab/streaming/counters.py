"""``Stats`` says what a model's calls have cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from .reading.reader import Reader


@dataclass
class Counters:
    """What the calls of one phase have cost since load or reset."""

    tokens: int = 0  # tokens that went in
    calls: int = 0  # calls of MoE layers
    hits: int = 0  # experts that were in a slot when needed
    misses: int = 0  # experts that had to be read
    reads: int = 0  # ranges of files read
    bytes_read: int = 0
    read_s: float = 0.0  # seconds in reads, summed over the threads
    wait_s: float = 0.0  # seconds in which the model waited for reads
    # Of prefetches that began in this phase. The call that needs a prefetched expert may be in the
    # other phase.
    prefetch_issued: int = 0  # guessed experts, also those whose reads were then cancelled
    prefetch_used: int = 0  # prefetched experts that their call needed; they also count as hits
    prefetch_late: int = 0  # used experts whose read had not ended when their call began
    prefetch_wasted: int = 0  # prefetched experts that their call did not need
    prefetch_saved_s: float = 0.0  # seconds of the used experts' reads, less the wait for them

    @property
    def hit_rate(self) -> float:
        """The share of needed experts that were hits, 0 to 1; nan if none was needed."""
        needed = self.hits + self.misses
        return self.hits / needed if needed else float("nan")

    @property
    def bytes_per_token(self) -> float:
        """The bytes read for each token; nan before the first token."""
        return self.bytes_read / self.tokens if self.tokens else float("nan")


@dataclass
class Stats:
    """Counters of prompts, and separate counters of decoding."""

    # Of calls with several tokens of a text: prompts, verify passes.
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)  # of calls with one token of each text
    # How many modules compute with each kind of kernels, ``fast`` or ``mlx``; {} if kernels="mlx".
    kernels: dict[str, int] = field(default_factory=dict, compare=False)


class Counting:
    """Adds to the counters of the phase that runs, a prompt or decoding."""

    def __init__(self, kernels: dict[str, int]):
        self.stats = Stats(kernels=kernels)
        self.now = self.stats.decode  # the counters of the last call's phase
        self._read = (0, 0, 0.0)  # the reader's totals when they were last counted

    @property
    def decoding(self) -> bool:
        """Whether the running call has one token of each of its texts."""
        return self.now is self.stats.decode

    def begin(self, tokens: int, is_prompt: bool) -> None:
        """Count a call of the whole model; a prompt has more than one token of a text."""
        self.now = self.stats.prefill if is_prompt else self.stats.decode
        self.now.tokens += tokens

    def reads_of(self, reader: Reader) -> None:
        """Add the reads since the last ``reads_of`` to the counters of the last call's phase."""
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
        """A copy of the counters of both phases; ``reset`` begins new ones at zero."""
        stats = self.stats
        if reset:
            self.stats = Stats(kernels=stats.kernels)
            self.now = self.stats.decode
        return Stats(replace(stats.prefill), replace(stats.decode), stats.kernels)
