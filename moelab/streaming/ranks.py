"""Divides experts over the ranks of ``mx.distributed``; each rank reads its own experts.

In a MoE layer each rank computes the (token, expert) pairs of its experts, and one ``all_gather``
gives every rank all rows. No partial sums are exchanged, so N ranks give the bits of one process.
Ranks must make the same collective calls in the same order. So they compare settings, headers and
samples of the weights at load, and the routing of every call.
"""

import faulthandler
import hashlib
import json
import os
import platform
import re
import sys
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from time import monotonic

import mlx.core as mx
import numpy as np

from .. import kernels
from ..checkpoint import Checkpoint, ExpertTensor, describe
from .config import StreamConfig

# A rank ends its own process if the others do not answer for this many seconds, since MLX cannot
# stop waiting. (If a rank's process ends, the others notice at once.)
PATIENCE_S = 120  # in a layer: the others may have much to read and compute
LOADING_S = 600  # while the others load
SAY_S = 8  # after this many seconds of waiting for the others to load, a rank says so on stderr
LOOK_S = 0.5  # between two looks at the clock
SAMPLES, SAMPLE_NBYTES = 64, 64  # samples of weights tell models of one shape apart
SETTINGS = (".json", ".jinja", ".txt", ".model", ".py")  # suffixes of files that must be alike
TRANSPORT = re.compile(r"\[(ring|nccl|jaccl|mpi)\]")  # how MLX's messages about other ranks begin


class RankError(OSError):
    """The ranks differ in what must be the same, or one of them has ended."""


def joined() -> mx.distributed.Group | None:
    """Join the ranks that ``mlx.launch`` started with this one; None if this rank is alone.

    MLX would wait forever for a rank that never starts, so the process ends after ``LOADING_S``.
    """
    file, rank = os.environ.get("MLX_HOSTFILE", ""), os.environ.get("MLX_RANK")
    if Path(file).is_file() and not Path(file).read_text().strip():
        del os.environ["MLX_HOSTFILE"]  # MLX refuses the empty file of ``mlx.launch -n 1``
        rank = None
    others = "the other ranks"
    with suppress(OSError, ValueError, TypeError):  # the file is another backend's, or missing
        hosts = [", ".join(addresses) for addresses in json.loads(Path(file).read_text())]
        others = " and ".join(f"rank {i} at {at}" for i, at in enumerate(hosts) if str(i) != rank)
    with open(os.devnull, "w") as nowhere:  # a traceback at the end would add nothing
        if rank is not None:
            _say(
                f"rank {rank} waits for {others} to join. If not all join within {LOADING_S} s, "
                "this rank ends: look then at the others' messages and at the hostfile"
            )
            faulthandler.dump_traceback_later(LOADING_S, exit=True, file=nowhere)
        try:
            group = mx.distributed.init()
        except RuntimeError as e:
            raise RankError(
                f"rank {rank}: expected to reach the other ranks, MLX does not: {e}. Look at the "
                "hostfile, and at whether its ports are free and open."
            ) from e
        finally:
            faulthandler.cancel_dump_traceback_later()
    return group if group.size() > 1 else None


def _say(line):
    print(f"moelab: {line}", file=sys.stderr, flush=True)


def by_number(layers: int, num_experts: int, ranks: int) -> np.ndarray:
    """The rank of each expert, ``[L, E]``: every N-th expert belongs to the same rank."""
    return np.tile(np.arange(num_experts) % ranks, (layers, 1))


class Ranks:
    """This process (``rank``) among the N (``size``) that divide a model's experts."""

    def __init__(self, group: mx.distributed.Group):
        self._group, self.rank, self.size = group, group.rank(), group.size()
        self._told = False  # whether the others know that something failed here
        self._calls = 0  # calls of ``join`` and ``_rows`` so far
        # Of the last ``join``: the layer, the check words of all ranks, and those of this rank.
        self._checks = None
        # The time when this rank gives up, how long it waits, and whether stderr has said so.
        self._until, self._patience_s, self._said = None, 0.0, False
        self._closed = threading.Event()
        watch = threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), daemon=True)
        watch.start()

    @classmethod
    @contextmanager
    def loading(cls, group: mx.distributed.Group | None) -> Iterator["Ranks | None"]:
        """Yield the ranks (None: one process). All ranks end the block, or fail, together."""
        if group is None or group.size() == 1:
            yield None
            return
        ranks = cls(group)
        try:
            yield ranks
            ranks.gather(None)
        except BaseException as e:
            if not ranks._told:
                ranks._told = True
                with suppress(RankError, RuntimeError):
                    ranks.gather({"error": describe(e)})
            raise

    def owners(self, num_experts: int) -> np.ndarray:
        """The rank that holds and reads each expert of a layer, ``[E]``."""
        if num_experts < self.size:
            raise ValueError(
                f"group: expected at most {num_experts} ranks, one for each expert of a layer, got "
                f"{self.size}. Start fewer."
            )
        return by_number(1, num_experts, self.size)[0]

    def gather(self, value: object) -> list:
        """Collect a JSON value from every rank, in rank order; raise if a rank sends an error."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        with self.waiting(LOADING_S):
            sizes = self._rows(np.array([len(text)], np.uint32).view(np.uint8))
            sizes = sizes.view(np.uint32)[:, 0]
            rows = zip(self._rows(np.pad(text, (0, sizes.max() - len(text)))), sizes)
        values = [json.loads(row[:size].tobytes()) for row, size in rows]
        for rank, each in enumerate(values):
            if isinstance(each, dict) and "error" in each and rank != self.rank:
                self._told = True
                raise RankError(f"rank {rank} of {self.size} ended: {each['error']}")
        return values

    def _rows(self, row):
        """Collect and check all ranks' bytes, [N, n]: MLX may give wrong bytes if a rank ended."""
        self._calls += 1

        def check(row):
            return zlib.crc32(row, self._calls).to_bytes(4, "little")

        row = mx.array(np.append(row, np.frombuffer(check(row), np.uint8)))
        rows = np.array(mx.distributed.all_gather(row, group=self._group)).reshape(self.size, -1)
        rows, checks = np.ascontiguousarray(rows[:, :-4]), rows[:, -4:]
        if any(check(row) != sent.tobytes() for row, sent in zip(rows, checks)):
            raise self._lost("its message did not arrive")
        return rows

    def compare(self, facts: dict[str, str]) -> None:
        """Raise the same error on every rank if a fact (name and value) differs between them."""
        everyone = self.gather(facts)
        for name in facts:
            values = [each.get(name) for each in everyone]
            if len(set(values)) > 1:
                self._told = True
                listed = ", ".join(f"{value} on rank {r}" for r, value in enumerate(values))
                raise RankError(f"{name}: expected the same on all ranks, got {listed}.")

    @contextmanager
    def waiting(self, patience_s: float | None = None) -> Iterator[None]:
        """Limit how long the block waits for other ranks.

        The process ends ``patience_s`` seconds after the block or the last call of ``answered``
        began.
        """
        self._patience_s = patience_s or PATIENCE_S
        self._until = monotonic() + self._patience_s
        try:
            yield
        except RuntimeError as e:
            if TRANSPORT.search(str(e)):
                raise self._lost(e) from e
            raise
        finally:
            self._until = None

    def join(
        self, y: mx.array | None, owners: np.ndarray, routed: np.ndarray, like: tuple, path: str
    ) -> tuple[mx.array, mx.array]:
        """Join all pairs' rows, ``[..., K, D]``, from the rows ``[n, D]`` that each rank computed.

        ``owners`` and ``routed``, ``[..., K]``, are the rank and the expert of each pair. ``like``
        is a row's D and type. Evaluate the second result before calling ``answered``.
        """
        D, dtype = like
        if y is not None and y.dtype != dtype:
            raise TypeError(
                f"{path}: expected experts that compute in {dtype}, got {y.dtype}. Set "
                "StreamConfig.dtype."
            )
        # Each rank sends a block of n + 1 rows, where n is the most pairs of any rank. A block's
        # first row has check words of the call and its routing. They are 8-bit numbers, because
        # all types of activations hold these exactly.
        self._calls += 1
        routing = zlib.crc32(np.ascontiguousarray(routed, np.uint32))
        words = [self._calls % 251 + 1, self._calls // 251 % 256, *routing.to_bytes(4, "little")]
        words, owners = np.array(words[:D], np.float32), owners.ravel()
        counts = np.bincount(owners, minlength=self.size).tolist()
        size = max(counts) + 1
        block = np.zeros((size - counts[self.rank], D), np.float32)
        block[0, : len(words)] = words
        block = kernels.to_mlx(block).astype(dtype)
        block = block if y is None else mx.concatenate([block, y])
        blocks = mx.distributed.all_gather(block, group=self._group)
        places = np.empty(len(owners), np.uint32)  # a rank's rows are the last ones of its block
        for rank, n in enumerate(counts):
            places[owners == rank] = np.arange((rank + 1) * size - n, (rank + 1) * size)
        checks = blocks[::size, : len(words)].astype(mx.float32)
        self._checks = path, checks, words
        return blocks[kernels.to_mlx(places)].reshape(*routed.shape, D), checks

    def answered(self) -> None:
        """Check the last layer's rows. Their arrival shows that the other ranks still run."""
        if self._until is not None:
            self._until = monotonic() + self._patience_s
        if self._checks is None:
            return
        (path, checks, words), self._checks = self._checks, None
        differ = (np.array(checks) != words).any(0)
        if differ[:2].any():  # MLX drops an error if nobody waits for its call yet
            raise self._lost("its rows did not arrive")
        if differ.any():
            raise RankError(
                f"{path}: expected the same experts for each token on all ranks, they differ: the "
                "machines round differently. Use machines of one kind with the same versions."
            )

    def close(self) -> None:
        self._closed.set()

    def _lost(self, why):
        self._told = True
        return RankError(
            f"rank {self.rank} of {self.size}: another rank has ended ({why}): its own message "
            "says why. Start all ranks again."
        )

    def _look(self):
        """Say that this rank waits for the others to load, or end this process if they are late."""
        until, patience_s, me = self._until, self._patience_s, f"rank {self.rank} of {self.size}"
        if until is None:
            return
        waits_s = monotonic() - until + patience_s
        if patience_s == LOADING_S and waits_s > SAY_S and not self._said:
            self._said = True
            _say(f"{me} waits for the others to load")
        if waits_s > patience_s:
            _say(f"{me}: no answer from the other ranks for {patience_s:.0f} s, so this rank ends")
            os._exit(1)  # MLX waits in native code, which no exception reaches

    def compare_loading(
        self, checkpoint: Checkpoint, config: StreamConfig, model_config: dict | None
    ) -> None:
        """Refuse mode resident, and ranks that differ in settings, files or samples of weights."""
        if config.mode == "resident":
            raise ValueError(
                "StreamConfig.mode: expected a mode that reads experts (fused, stacked, buffers or "
                "serial) with a group of ranks, got 'resident', which holds all of them."
            )
        fields = {k: str(v) for k, v in vars(config).items() if k != "memory_nbytes"}
        device = mx.default_device().type.name
        settings, samples = _digest(_settings(checkpoint)), _digest(_samples(checkpoint))
        self.compare(
            {
                "moelab": sys.modules["moelab"].__version__,
                "mlx": version("mlx"),
                "mlx-lm": version("mlx-lm"),
                "device": f"{device} of {platform.system()} {platform.machine()}",
                **{f"StreamConfig.{name}": value for name, value in fields.items()},
                "model_config": json.dumps(model_config, sort_keys=True, default=str),
                "tokenizer and settings": f"files with digest {settings}",
                "checkpoint": f"{checkpoint.nbytes / 1e6:.1f} MB, digest {samples}",
            }
        )


def _watch(ranks, closed):
    """Call ``_look`` of the ``Ranks`` behind a weak reference until they are closed or deleted."""
    while not closed.wait(LOOK_S) and (living := ranks()) is not None:
        living._look()
        del living


def _digest(parts):
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def _settings(checkpoint):
    """Yield name and bytes of each file with settings: tokenizer, template and end tokens."""
    for file in sorted(Path(checkpoint.path).iterdir()):
        # macOS writes ``._NAME`` beside files on disks that are not its own.
        is_other = file.name.startswith(".") or file.name.endswith(".index.json")
        if file.suffix in SETTINGS and not is_other and file.is_file():
            yield file.name.encode() + file.read_bytes()


def _samples(checkpoint):
    """Yield config.json and headers, and samples of tensors: all bytes would take too long."""
    tensors = sorted((checkpoint.tensors | checkpoint.packed).items())
    headers = [(name, t.shape, str(t.dtype), t.nbytes) for name, t in tensors]
    yield json.dumps([checkpoint.config, headers], sort_keys=True, default=str).encode()
    for _, t in tensors[:: -(-len(tensors) // SAMPLES)]:
        is_packed = isinstance(t, ExpertTensor)
        with open(t.files[0] if is_packed else t.file, "rb", buffering=0) as f:
            f.seek((t.offsets[0] if is_packed else t.offset) + t.nbytes // 2)
            yield f.read(SAMPLE_NBYTES)
