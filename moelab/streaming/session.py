"""``Session``: one loaded model's calls, and what they share."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache

from .. import interrupts
from ..checkpoint import FORKED, describe, leaves
from ..memory import few_freed, keep_no_holes, return_free_memory
from ..system import on_metal
from .config import SLOT_MODES, StreamConfig
from .counters import Counting, Stats
from .cuda import MAILBOX_SIZE, Handover
from .facts import FEW_TOKENS, ModelFacts
from .plan import Plan
from .ranks import RankError, Ranks
from .reading import native
from .reading.reader import Reader
from .reading.uploading import UploadingReader
from .residency import host
from .residency.residency import Residency
from .room import Room

# Free memory is returned to the system when decoding begins after a prompt of this many tokens or
# more. The return takes 90 ms after a prompt of 2,000 tokens that took 20 s (2 cores).
LONG_PROMPT = 256


class Session:
    """What a loaded model's layers share; ``found`` counts modules by their kind of kernels."""

    def __init__(
        self,
        config: StreamConfig,
        facts: ModelFacts,
        resident: dict[str, mx.array],
        found: dict[str, int],
        plan: Plan | None,
        ranks: Ranks | None,
    ):
        self.config, self.dtype, self.top_k, self.plan = config, facts.dtype, facts.top_k, plan
        self.facts, self.ranks, self.resident, self.layers = facts, ranks, resident, []
        self.fast_experts = False  # whether a layer's experts compute with the fast kernels
        self.handover = Handover(through_pinned=bool(facts.located))
        mailbox = self.handover.mailbox
        if config.source == "host":
            host.check(mailbox, ranks)
        read = partial(UploadingReader, mailbox) if mailbox else Reader
        direct = plan.direct if plan else config.mode in SLOT_MODES and config.reads == "direct"
        self.reader = read(config.readers, direct and native.direct_loop() is not None)
        self.located = {
            name: replace(t, files=[self.reader.open(f) for f in t.files])
            for name, t in facts.located.items()
        }
        self.counting = Counting(found)
        # A CPU takes about as long to compute an expert as to read it; a GPU takes far less.
        overlap = mx.default_device() == mx.cpu
        self.residency = Residency(self.reader, self.handover, self.counting, self.top_k, overlap)
        self.room = Room(plan, config.slots, self.residency, together=ranks is not None)
        self.lock = threading.RLock()  # held during every call of the model
        self._caller = None  # the thread whose call is running
        self._unfinished = False  # set while a call runs; an exception leaves it set
        self._error = None  # with ranks: the exception that ended the call
        self._prompt_tokens = 0  # a prompt's tokens since the last decoded token
        self._caches = []  # caches of the prompt that is being computed
        self._process = os.getpid()
        # The recorder gets the routing of every call while ``record`` runs.
        # ``auto`` turns the prefetcher on and off.
        self.recorder = self.prefetcher = self.auto = None
        if plan is not None and plan.slots < plan.num_experts:
            keep_no_holes()

    @property
    def is_in_call(self) -> bool:
        """Whether the calling thread is in a call of this model."""
        return self._caller == threading.get_ident()

    @property
    def _lacks_slots(self):
        """Whether Metal computes experts in parts, since some have no slot."""
        if not on_metal() or self.config.mode == "resident":
            return False
        return self.config.mode not in SLOT_MODES or self.room.slots < self.facts.num_experts

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run the block as a call of the model or of one layer; other threads' calls wait."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        # Only layers look for a held Ctrl-C. Mode resident has no layers, so it holds none.
        held = interrupts.held() if self.layers else nullcontext()
        with self.lock, held, few_freed() if self._lacks_slots else nullcontext():
            try:
                self._caller = threading.get_ident()
                if self._unfinished:
                    self._recover()
                if self.layers:
                    self.reader.check_open()
                self._unfinished = True
                with self.ranks.waiting() if self.ranks else nullcontext():
                    yield
                    # Another thread can wait for these arrays, but it cannot begin to compute them.
                    mx.async_eval(self.handover.pending)
                    self.residency.settle()
                    if self.ranks:
                        mx.eval(self.handover.pending)
                        self.ranks.answered()
                    if self.auto is not None:
                        self.auto.end()
                self._unfinished = False
            except BaseException as error:
                self._error = error if self.ranks else None
                self.reader.stop()  # nothing writes to a slot after a call that failed
                raise
            finally:
                self._caller, self._caches = None, []

    def _recover(self):
        """End all reads and make every slot held or free, after a call that an exception ended."""
        if isinstance(self._error, RankError):
            raise self._error
        if self._error is not None:
            raise RankError(
                f"rank {self.ranks.rank} of {self.ranks.size}: a call failed here, so the others "
                f"cannot go on: {describe(self._error)}"
            )
        self.reader.stop()
        with suppress(RuntimeError):  # from arrays that another thread built and never scheduled
            mx.eval(self.handover.pending)
        self.handover.pending = []
        self.residency.recover()
        for layer in self.layers:
            layer.probe = None

    def begin(self, inputs: mx.array, caches: list | None = None) -> None:
        """Begin a call of the model for token ids ``[B, T]``, or one part of a longer call."""
        # A lazy recurrent state keeps its layer's whole input in memory. So, in a prompt, states
        # are evaluated with each layer's routing, unless the routing goes through the mailbox.
        self._caches = caches if caches and inputs.size > FEW_TOKENS else []
        self.room.tokens = inputs.size
        self.counting.reads_of(self.reader)
        is_prompt = inputs.ndim > 1 and inputs.shape[1] > 1
        if is_prompt:
            self._prompt_tokens += inputs.size
        elif self._prompt_tokens:
            if self._prompt_tokens >= LONG_PROMPT:
                return_free_memory()
            self._prompt_tokens = 0
        self.counting.begin(inputs.size, is_prompt)
        if self.auto is not None:
            self.auto.begin(inputs.size)
        if is_prompt:
            self.residency.expect(inputs.size)
        if self.recorder is not None:
            self.recorder.begin(inputs, "prefill" if is_prompt else "decode")

    def count(self, layer: int, routed: np.ndarray) -> None:
        """Count a layer's call with its routing ``[..., K]``."""
        if self.recorder is not None:
            self.recorder.add(layer, routed)
        self.counting.now.calls += 1

    def settle(self) -> None:
        """Wait until nothing reads slots, before a call whose routing the host knows."""
        interrupts.look()
        self.residency.settle()
        if self.handover.pending:
            self.handover.settle()
        if self.room.tokens > FEW_TOKENS:
            self.room.look_in_prompt()

    def routing(self, indices: mx.array, asked: list[mx.array]) -> np.ndarray:
        """Evaluate routing ``[..., K]``, a prefetcher's ``asked``, and arrays that read slots."""
        interrupts.look()
        handover, mailbox = self.handover, self.handover.mailbox
        if mailbox and indices.size <= MAILBOX_SIZE and not asked:
            mailbox.post(indices, *(handover.pending or [indices]))
            # Settle first: the reader's threads do not get the GIL while ``collect`` polls.
            self.residency.settle()
            routed = mailbox.collect(indices)
        else:
            self.residency.settle()
            states = recurrent_states(self._caches) if self._caches else ()
            mx.eval(indices, handover.pending, asked, *states)
            routed = np.array(indices)
        handover.pending = []
        self.room.look_in_prompt()
        if self.ranks:
            self.ranks.answered()
        return routed


def is_loaded(model: nn.Module) -> bool:
    """Whether ``moelab.load`` made this model, in any mode."""
    return hasattr(model, "_session")


def session_of(model: nn.Module) -> Session:
    if not is_loaded(model):
        raise ValueError(f"{type(model).__name__}: expected a model from moelab.load.")
    return model._session


def stats(model: nn.Module, reset: bool = False) -> Stats:
    """What a model's calls have cost since ``load``, or since the last ``reset``."""
    session = session_of(model)
    with session.lock:
        session.counting.reads_of(session.reader)
        session.residency.report()
        return session.counting.result(reset)


def recurrent_states(caches: list) -> Iterator[list[mx.array]]:
    """The arrays of recurrent caches. (Attention caches are evaluated with the logits.)"""
    for c in leaves(caches):
        if isinstance(c, ArraysCache):
            yield [a for a in c.cache if a is not None]
