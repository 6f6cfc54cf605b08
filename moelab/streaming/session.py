"""``Session``: one loaded model's calls, and what they share."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList

from ..checkpoint import FORKED, ExpertTensor, describe
from .config import StreamConfig
from .counters import Counters, Counting, Stats
from .handover import Handover
from .heap import keep_no_holes, return_free_memory
from .plan import FEW_TOKENS, Plan
from .ranks import RankError, Ranks
from .residency.residency import Residency
from .room import Room

# Tokens that count as a long prompt. When decoding begins after one, free memory is
# returned to the system, which takes 90 ms after a prompt of 2,000 tokens that took 20 s (2 cores).
LONG_PROMPT = 256


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
            list in ``resident`` mode.
        reader (Reader): Reads the experts of all layers.
        handover (Handover): Brings routing to the host and slots to the device.
        residency (Residency): Which experts are in the slots, of the modes with slots.
        room (Room): How many slots are in use.
        counting (Counting): The counters; ``stats(model)`` returns a copy that is up to date.
        prefetcher (Prefetcher or None): None without ``StreamConfig.prefetch``.
        lock (threading.RLock): Held during every call of the model, so that threads take turns.
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
        self.ranks, self.fast_experts = ranks, fast_experts
        self.handover = Handover(through_pinned=bool(located))
        open_reader = config.source_module.open_reader
        self.reader = open_reader(config.readers, self.handover.mailbox, ranks)
        self.reader.direct = plan is not None and plan.direct
        self.located = {
            name: replace(t, files=[self.reader.open(f) for f in t.files])
            for name, t in located.items()
        }
        self.resident, self.layers = resident, []
        self.counting = Counting(found or {})
        # On a CPU computing an expert takes about as long as reading it; on a GPU far less.
        overlap = mx.default_device() == mx.cpu
        self.residency = Residency(self.reader, self.handover, self.counting, top_k, overlap)
        self.room = Room(plan, config.slots, self.residency, together=ranks is not None)
        self.lock = threading.RLock()
        self._caller = None  # the thread whose call is running
        self._unfinished = False  # set while a call runs, and left set by an exception
        self._error = None  # that exception, with ranks
        self._prompt_tokens = 0  # since a token was decoded
        self._caches = []  # of the prompt that is being computed
        self._process = os.getpid()
        self.recorder = self.prefetcher = None
        if plan is not None and plan.slots < plan.num_experts:
            keep_no_holes()

    @property
    def counters(self) -> Counters:
        """The counters of the last call's phase."""
        return self.counting.now

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
            raise RuntimeError(FORKED)
        with self.lock:
            try:
                self._caller = threading.get_ident()
                if self._unfinished:
                    self._recover()
                if self.layers:  # without them, nothing is read
                    self.reader.check_open()
                self._unfinished = True
                with self.ranks.waiting() if self.ranks else nullcontext():
                    yield
                    # Another thread can wait for this one's arrays, but it cannot schedule them.
                    mx.async_eval(self.handover.pending)
                    self.residency.settle()
                    if self.ranks:
                        mx.eval(self.handover.pending)
                        self.ranks.answered()
                self._unfinished = False
            except BaseException as error:
                self._error = error if self.ranks else None
                self.reader.stop()  # nothing writes to a slot after a call that failed
                raise
            finally:
                self._caller, self._caches = None, []
                self.room.end()

    def check_ranks(self) -> None:
        """Raise if a call failed on this rank. Without ranks it does nothing.

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
            mx.eval(self.handover.pending)
        self.handover.pending = []
        self.residency.recover()
        for layer in self.layers:
            layer.recover()

    def make_room(self, tokens: int, caches: list, divisible: bool) -> int:
        """As ``Room.make``; the configuration says how many slots there are from then on."""
        try:
            return self.room.make(tokens, caches, divisible)
        finally:
            if self.plan is not None and self.room.slots != self.config.slots:
                self.config = replace(self.config, slots=self.room.slots)

    def begin(self, inputs: mx.array, caches: list | None = None) -> None:
        """A call of the whole model, or a part of one, begins: count it.

        Args:
            inputs (mx.array): ``[B, T]`` token ids.
            caches (list or None): Of the call. Where MLX brings the routing, a prompt's recurrent
                states are evaluated layer by layer: until then each keeps its layer's whole input
                in memory.
        """
        self._caches = caches if caches and inputs.size > FEW_TOKENS else []
        self.room.begin(inputs.size)
        self.counting.reads_of(self.reader)
        is_prompt = inputs.ndim > 1 and inputs.shape[1] > 1
        if is_prompt:
            self._prompt_tokens += inputs.size
            self.residency.ahead.expect(inputs.size)
        elif self._prompt_tokens:
            if self._prompt_tokens >= LONG_PROMPT:
                return_free_memory()
            self._prompt_tokens = 0
        self.counting.begin(inputs.size, is_prompt)
        if self.recorder is not None:
            self.recorder.begin(inputs, "prefill" if is_prompt else "decode")

    def settle(self) -> None:
        """Get ready for a layer's call whose routing the host knows: nothing reads slots."""
        self.residency.settle()
        if self.handover.pending:
            self.handover.settle()
        self.room.look_in_prompt()

    def routing(self, indices: mx.array, asked: list[mx.array]) -> np.ndarray:
        """The routing of a layer's call.

        Args:
            indices (mx.array): ``[..., K]``, the experts of the call.
            asked (list[mx.array]): What else to evaluate.

        Returns:
            np.ndarray: ``[..., K]``.
        """
        beside = [*asked, *recurrent_states(self._caches)]
        routed = self.handover.routing(indices, beside, self.residency.settle, bool(asked))
        self.room.look_in_prompt()
        if self.ranks:
            self.ranks.answered()
        return routed


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
        session.counting.reads_of(session.reader)
        session.residency.report()
        return session.counting.result(reset)


def recurrent_states(caches: list) -> Iterator[list[mx.array]]:
    """The arrays of recurrent caches. (The logits need those of attention caches, so these are
    evaluated with them.)

    Args:
        caches (list): Of a model's layers.
    """
    for c in caches:
        if isinstance(c, CacheList):
            yield from recurrent_states(c.caches)
        elif isinstance(c, ArraysCache):
            yield [a for a in c.cache if a is not None]
