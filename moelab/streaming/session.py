"""What the layers of one loaded model share: its files, its lock and its counters."""

import ctypes
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from time import perf_counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList

from ..checkpoint import ExpertTensor, describe
from . import cuda
from .config import StreamConfig
from .plan import BESIDE_NBYTES, FEW_TOKENS, LEAST_PROMPT_TOKENS, Plan, memory_now
from .ranks import RankError, Ranks
from .reading.reader import Reader
from .slots import can_lend

# Tokens that count as a long prompt. When decoding begins after one, free memory is
# returned to the system, which takes 90 ms after a prompt of 2,000 tokens that took 20 s (2 cores).
LONG_PROMPT = 256
# Where memory is short, glibc gives each array of this size or more a mapping of its own, which
# goes back to the system when the array is freed. glibc's own limit rises to 32 MB, and below it
# freed arrays stay in the heap: 100 to 200 MB after a prompt. The price is a page fault for each
# new page: from 256 KB on a prompt of 400 tokens at 956 MB takes 2.96 s, from 8 MB on 2.57, with
# glibc's own limit 2.48, and it needs 876, 891 and 913 MB (35B layers, n=4).
MAPPED_NBYTES, M_MMAP_THRESHOLD = 8 << 20, -3
LOOK_S = 0.05  # from one look at the memory that is left to the next, which takes 0.2 ms
# Kept free beside what a token takes: others may take it between two looks. A prompt takes it.
RESERVE_NBYTES = BESIDE_NBYTES // 2
# Of what a prompt takes for computing, how much one layer takes and frees again. The four layers
# of notebook 03 took 0.1 to 0.7.
IN_LAYER_SHARE = 0.75


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
    """Counters of prompts (calls with more than one token) and of decoding, apart.

    Attributes:
        prefill (Counters): Of prompts.
        decode (Counters): Of single tokens.
        kernels (dict[str, int]): How many modules compute with the ``fast`` kernels and how many
            with ``mlx``'s; empty with ``StreamConfig(kernels="mlx")``.
    """

    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    kernels: dict[str, int] = field(default_factory=dict, compare=False)


class Session:
    """What the layers of one loaded model share.

    ``session_of(model)`` returns it. In ``resident`` mode it has no layers, nothing to read and
    no prefetcher.

    Args:
        config (StreamConfig): How the model was loaded.
        dtype (mx.Dtype): The type of the activations.
        top_k (int): K.
        located (dict[str, ExpertTensor]): Where the experts' bytes lie.
        resident (dict[str, mx.array]): Parameters kept in memory for all E experts.
        found (dict[str, int] or None): What ``kernels.use`` returned.
        fast_experts (bool): Whether the experts compute with the fast kernels.
        plan (Plan or None): Why there are so many slots, if ``plan`` chose them.
        ranks (Ranks or None): Those that divide the experts.

    Attributes:
        config, dtype, top_k, resident, plan, fast_experts, ranks: As above.
        located (dict[str, ExpertTensor]): As above, each file a ``File`` that ``reader`` opened.
        layers (list[StreamedExperts]): The streamed layers, in the order of the model; an empty
            list in ``resident`` mode. Those with slots (``Stacked``) have a ``bank`` and a
            ``table``.
        reader (Reader): Reads the experts of all layers.
        mailbox (cuda.Mailbox or None): Brings routing to the host and slots to the GPU; None where
            MLX does (see ``cuda``).
        prefetcher (Prefetcher or None): None without ``StreamConfig.prefetch``.
        stats (Stats): The counters; ``stats(model)`` returns a copy that is up to date.
        counters (Counters): Those of the phase of the last call.
        lock (threading.RLock): Held during every call of the model, so that threads take turns.
        filling (int or None): The layer for which slots are being filled (``Stacked.fill``).
        left_s (float): When a prompt left a layer's experts, or began; as ``perf_counter``.
        between_s (float): Seconds from there to the next layer's experts: of attention.
        unfinished (Callable or None): Finishes the reads that the GPU waits for (``finish_reads``).
        pending (list[mx.array]): The last layer's output or what follows from it, or nothing.
            Until it is evaluated it reads slots.
        overlap (bool): Whether layers compute while they read.
        recorder: Gets the routing of every call while ``record`` runs; else None.
    """

    def __init__(
        self,
        config: StreamConfig,
        dtype: mx.Dtype,
        top_k: int,
        located: dict[str, ExpertTensor],
        resident: dict[str, mx.array],
        found: dict[str, int] | None = None,
        fast_experts: bool = False,
        plan: Plan | None = None,
        ranks: Ranks | None = None,
    ):
        self.config, self.dtype, self.top_k, self.plan = config, dtype, top_k, plan
        self.ranks = ranks
        self.mailbox = cuda.Mailbox() if located and cuda.available() else None
        self.reader = (
            cuda.UploadingReader(self.mailbox, config.readers)
            if self.mailbox
            else Reader(config.readers)
        )
        self.located = {
            name: replace(t, files=[self.reader.open(f) for f in t.files])
            for name, t in located.items()
        }
        self.resident = resident
        self.layers, self.pending, self.unfinished = [], [], None
        self.filling, self.left_s, self.between_s = None, 0.0, 0.0
        self.lock = threading.RLock()
        self._caller = None  # the thread whose call is running
        self._unfinished = False  # set while a call runs, and left set by an exception
        self._error = None  # that exception, with ranks
        self._prompt_tokens = 0  # since a token was decoded
        self._in_use = config.slots  # fewer while slots lend their memory to a prompt
        self._told = config.slots  # as the last warning said
        self._caches = []  # of the prompt that is being computed
        self._part = 0  # tokens of the last call that began
        self._look_s = 0.0  # when to look at the memory again
        self._process = os.getpid()
        self.fast_experts = fast_experts
        # On a CPU computing an expert takes about as long as reading it; on a GPU far less.
        self.overlap = mx.default_device() == mx.cpu
        self.stats = Stats(kernels=found or {})
        self.counters = self.stats.decode
        self.recorder = None
        self.prefetcher = None
        self.reader.direct = plan is not None and plan.direct
        self._counted = (0, 0, 0.0)  # the reader's totals when they were last counted
        if plan is not None and plan.slots < plan.num_experts:
            _keep_no_holes()

    @property
    def is_in_call(self) -> bool:
        """Whether the thread that asks is in a call of this model."""
        return self._caller == threading.get_ident()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the model, or of a layer by itself: one thread after another.

        Raises:
            RuntimeError: In a process that was forked after loading.
            RankError: If another rank has ended, or a call of this one failed before.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"This model was loaded in process {self._process}, this is process "
                f"{os.getpid()}, a fork of it, which has no threads of MLX and of the reader. "
                "Load the model in this process, or start it with multiprocessing's 'spawn'."
            )
        with self.lock:
            try:
                self._caller = threading.get_ident()
                if self._unfinished:
                    self._recover()
                self._unfinished = True
                with self.ranks.waiting() if self.ranks else nullcontext():
                    yield
                    # Another thread can wait for this one's arrays, but it cannot schedule them.
                    mx.async_eval(self.pending)
                    self.finish_reads()
                    if self.ranks:
                        mx.eval(self.pending)
                        self.ranks.answered()
                self._unfinished = False
            except BaseException as error:
                self._error = error if self.ranks else None
                self.reader.stop()  # nothing writes to a slot after a call that failed
                raise
            finally:
                self._caller, self._caches = None, []

    def check_ranks(self) -> None:
        """Nothing, if this is not one of several ranks or its calls went well.

        Raises:
            RankError: If a call failed here, so that the ranks are no longer at the same place.
        """
        if isinstance(self._error, RankError):
            raise self._error
        if self._error is not None:
            raise RankError(
                f"rank {self.ranks.rank} of {self.ranks.size}: a call failed here, so the others "
                f"cannot go on: {describe(self._error)}"
            )

    def _recover(self):
        """After a call that an exception ended: end all reads, make every slot held or free."""
        self.check_ranks()
        self.reader.stop()
        with suppress(RuntimeError):  # arrays that another thread built and never scheduled
            mx.eval(self.pending)
        self.pending, self.unfinished, self.filling = [], None, None
        for layer in self.layers:
            layer.recover()

    def parts(self, inputs: mx.array, step: int | None = None) -> list[mx.array]:
        """Divide a long prompt into parts of equal length that there is memory for.

        Args:
            inputs (mx.array): ``[B, T]`` token ids.
            step (int): Of which so many may be computed at once. Default: the plan's number.
        """
        if step is None:
            step = self.plan.prompt_tokens if self.plan else inputs.size
        if inputs.ndim != 2 or inputs.size <= step:
            return [inputs]
        T = inputs.shape[1]
        num = min(-(-inputs.size // step), max(1, T // 2))
        ends = [T * i // num for i in range(num + 1)]
        return [inputs[:, a:b] for a, b in pairwise(ends)]

    def make_room(self, tokens: int, caches: Sequence = (), divisible: bool = True) -> int:
        """Set how many slots are in use in a call that begins, by the memory that there is now.

        Slots lend their memory to a prompt, and use it again after it. Where memory got short
        since ``plan`` chose them, slots are given back; where ``can_lend``, they are used again
        once there is memory for them.

        Args:
            tokens (int): Of the call.
            caches (Sequence): The call's.
            divisible (bool): Whether it may be computed in parts.

        Returns:
            int: How many of the tokens may be computed at once.

        Raises:
            MemoryError: If there is too little even with K slots in each layer.
        """
        plan, now = self.plan, perf_counter()
        if plan is None:
            return tokens
        is_prompt = tokens > FEW_TOKENS
        if not is_prompt and now < self._look_s and self._in_use == self.config.slots:
            return tokens
        self._look_s = now + LOOK_S
        step = min(tokens, plan.prompt_tokens) if divisible else tokens
        slots = self.config.slots
        if is_prompt:  # slots stay lent in a prompt's last part
            slots = min(slots, self._in_use, plan.slots_beside(step))
        needs = partial(plan.call_nbytes, caches=caches, is_first=not self._part)
        room, _ = memory_now()
        taken = needs(step) + (0 if is_prompt else RESERVE_NBYTES)
        if self._fitting(taken, room) < slots:
            mx.clear_cache()  # what a prompt left free may be enough
            return_free_memory()
            room, _ = memory_now()
        # Where slots cannot lend, what a prompt needs stays free of them.
        self._keep(self._fitting(needs(1 if can_lend() else step) + RESERVE_NBYTES, room))
        fitting = self._fitting(taken, room)
        self._use(max(self._least, min(self.config.slots, slots, fitting)))
        if fitting >= self._least:
            return step
        _, most = memory_now()
        fewest = step if self.ranks or not divisible else LEAST_PROMPT_TOKENS
        while self._fitting(needs(step), most) < self._least:
            if step <= fewest:
                raise self._no_room(needs(step), most)
            step = max(fewest, step // 2)  # fewer tokens at once take less
        return step

    @property
    def _least(self):
        """Slots without which a token cannot be computed."""
        return min(self.top_k, self.plan.slots)

    def _fitting(self, nbytes, room):
        """How many slots fit in each layer beside ``nbytes`` if there are ``room`` bytes."""
        held = sum(layer.slots_nbytes for layer in self.layers)
        return (held + room - nbytes) // sum(self.plan.expert_nbytes)

    def _keep(self, fitting):
        """Set how many slots there are from now on, by how many fit."""
        slots, most = self.config.slots, self.plan.slots if can_lend() else self.config.slots
        more = fitting - -(-BESIDE_NBYTES // sum(self.plan.expert_nbytes))  # so that it stays so
        kept = max(self._least, min(most, fitting if fitting < slots else max(slots, more)))
        self.config = replace(self.config, slots=kept)
        if kept > slots:
            self._told = kept
        told = self._told
        if fitting >= told - told // 8:  # a line for each eighth
            return
        self._told = kept if fitting >= kept else 0  # if none is left to give back, say so once
        missing = (told - fitting) * sum(self.plan.expert_nbytes)
        what = f"slots {told} -> {kept}" if kept < told else f"no more than {kept} slots left"
        warnings.warn(
            f"memory is short by {missing / 1e6:.0f} MB: {what} in each layer. Other programs, or "
            f"a text longer than the {self.plan.context} tokens planned for (StreamConfig.context),"
            " took it.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _use(self, slots):
        """Use so many slots in each layer. No call may be computing with one."""
        if slots == self._in_use:
            return
        self.reader.stop()  # prefetches
        mx.eval(self.pending)
        self.pending, self.filling = [], None
        if slots > self._in_use:
            mx.clear_cache()
            return_free_memory()
        self._in_use = slots
        for layer in self.layers:
            layer.resize(slots)
            mx.clear_cache()
        return_free_memory()

    def _no_room(self, nbytes, most):
        self._look_s = 0.0
        slots = sum(self.plan.expert_nbytes) * self._in_use
        held = sum(layer.slots_nbytes for layer in self.layers)
        return MemoryError(
            f"memory is short: with {self._in_use} slots in each layer, the fewest, the call takes "
            f"{(nbytes + slots - held) / 1e6:.0f} MB, and there are {max(0, most) / 1e6:.0f} MB. "
            "Close other programs, raise the limit or take a shorter prompt."
        )

    def _look_in_prompt(self):
        """Give slots back where memory got short while a prompt is computed, between two layers.

        Raises:
            MemoryError: If there is too little even with K slots in each layer.
        """
        now = perf_counter()
        if self.plan is None or self._part <= FEW_TOKENS or now < self._look_s or not can_lend():
            return
        self._look_s = now + LOOK_S
        nbytes = int(IN_LAYER_SHARE * self._part * self.plan.token_nbytes)
        fitting = self._fitting(nbytes, memory_now()[0])
        if fitting >= self._in_use:
            return
        self._use(max(self._least, fitting))
        if self._fitting(nbytes, most := memory_now()[1]) < self._least:
            raise self._no_room(nbytes, most)

    def begin(self, inputs: mx.array, caches: list | None = None) -> None:
        """Count a call of the whole model.

        Args:
            inputs (mx.array): ``[B, T]`` token ids.
            caches (list or None): Of the call. A prompt's recurrent states are evaluated layer by
                layer: until then each keeps its layer's whole input in memory.
        """
        self._caches = caches if caches and inputs.size > FEW_TOKENS else []
        self._part = inputs.size
        self.count_reads()
        prefill = inputs.ndim > 1 and inputs.shape[1] > 1
        if prefill:
            self._prompt_tokens += inputs.size
            self.left_s = perf_counter()
            if self.layers:
                self.layers[0].expect(inputs.size)
        elif self._prompt_tokens:
            if self._prompt_tokens >= LONG_PROMPT:
                return_free_memory()
            self._prompt_tokens = 0
        self.counters = self.stats.prefill if prefill else self.stats.decode
        self.counters.tokens += inputs.size
        if self.recorder is not None:
            self.recorder.begin(inputs, "prefill" if prefill else "decode")

    @property
    def decoding(self) -> bool:
        """Whether the call that runs now has a single token."""
        return self.counters is self.stats.decode

    @contextmanager
    def waiting(self) -> Iterator[Reader]:
        """Count the time inside the block as waiting for reads.

        Yields:
            Reader: ``reader``.
        """
        begin = perf_counter()
        try:
            yield self.reader
        finally:
            self.counters.wait_s += perf_counter() - begin

    def routing(self, indices: mx.array, asked: list[mx.array]) -> np.ndarray:
        """The routing of a call: the one evaluation of a layer, because the host needs it.

        What the layer before computed is evaluated too: a later call may overwrite its slots. By
        now it nearly always is.

        Args:
            indices (mx.array): ``[..., K]``, the experts of the call.
            asked (list[mx.array]): What else to evaluate.

        Returns:
            np.ndarray: ``[..., K]``.
        """
        if self.mailbox and indices.size <= cuda.MAILBOX_SIZE and not asked:
            self.mailbox.post(indices, *(self.pending or [indices]))
            # Before this thread watches the mailbox, which would keep others from the GIL.
            self.finish_reads()
            routed = self.mailbox.collect(indices)
        else:
            self.finish_reads()
            mx.eval(indices, self.pending, asked, list(recurrent_states(self._caches)))
            routed = np.array(indices)
        self.pending = []
        self._look_in_prompt()
        if self.ranks:
            self.ranks.answered()
        return routed

    def finish_reads(self) -> None:
        """Wait for the reads of the layer before, if the GPU waits for them.

        Raises:
            ReadError: If one failed: what was computed since is not used.
        """
        finish, self.unfinished = self.unfinished, None
        if finish is not None:
            finish()

    def to_device(
        self, numbers: np.ndarray, indices: mx.array, copies: list[cuda.Copy] = ()
    ) -> mx.array:
        """Small numbers of the host as an array, for the call whose routing was evaluated last.

        Args:
            numbers (np.ndarray): uint32.
            indices (mx.array): Of the same shape, the experts of that call.
            copies (list[cuda.Copy]): What the GPU copies before; only with a ``mailbox``.

        Returns:
            mx.array: uint32.
        """
        if self.mailbox and numbers.size <= cuda.MAILBOX_SIZE:
            return self.mailbox.send(numbers, indices, copies)
        return mx.array(numbers)

    def count_reads(self) -> None:
        """Add what has been read since the last time to the counters of the last call's phase."""
        r = self.reader
        total = (r.reads, r.nbytes, r.read_s)
        c, before, self._counted = self.counters, self._counted, total
        c.reads += total[0] - before[0]
        c.bytes_read += total[1] - before[1]
        c.read_s += total[2] - before[2]


def is_loaded(model: nn.Module) -> bool:
    """Whether a model is from ``moelab.load`` (in any mode, ``resident`` too).

    Args:
        model (nn.Module): Any model.
    """
    return hasattr(model, "_session")


def session_of(model: nn.Module) -> Session:
    """The session of a loaded model.

    Args:
        model (nn.Module): From ``moelab.load``.

    Returns:
        Session: Its layers, reader, counters and prefetcher.

    Raises:
        ValueError: If the model is not from ``moelab.load``.
    """
    if not is_loaded(model):
        raise ValueError(f"{type(model).__name__}: expected a model from moelab.load.")
    return model._session


def stats(model: nn.Module, reset: bool = False) -> Stats:
    """What the model has read since it was loaded or reset.

    Args:
        model (nn.Module): From ``moelab.load``.
        reset (bool): Start again from zero.

    Returns:
        Stats: ``prefill`` and ``decode`` counters.
    """
    session = session_of(model)
    with session.lock:
        session.count_reads()
        for layer in session.layers:
            layer.count()
        result = session.stats
        if reset:
            session.stats = Stats(kernels=result.kernels)
            session.counters = session.stats.decode
            return result
        return Stats(replace(result.prefill), replace(result.decode), result.kernels)


def return_free_memory():
    """Return to the system what a prompt's arrays left free in the C library's heap.

    glibc keeps it otherwise: 400 MB after 2,000 tokens of tiny-moe, which the page cache needs.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def _keep_no_holes():
    """Have the C library map large arrays by themselves, in this process and from now on."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_NBYTES)


def recurrent_states(caches: list) -> Iterator[list[mx.array]]:
    """The arrays of recurrent caches. Those of attention caches are evaluated with the logits.

    Args:
        caches (list): Of a model's layers.
    """
    for c in caches:
        if isinstance(c, CacheList):
            yield from recurrent_states(c.caches)
        elif isinstance(c, ArraysCache):
            yield [a for a in c.cache if a is not None]
