"""Experts divided over the ranks of ``mx.distributed``: each rank reads its own.

Every rank computes the backbone for the same tokens. In a MoE layer it computes the (token,
expert) pairs of the experts that it owns, and one ``all_gather`` gives every rank the rows of all.
Nothing is added up on the way, so N ranks give the bits that one gives for the same calls.

An ``all_sum`` of these rows, with zeros for those of the others, sends twice as many messages. A
token takes as long with it; the rows of 64 tokens took ten times as long. If each rank summed its
rows over K first, less would be sent. But logits would differ by some 1e-5, and no token was faster
(``data/results/cpu_ranks_joins.json``).

All ranks must make the same collective calls in the same order. What decides about them is the
same everywhere: settings, headers and samples of the weights are compared at load (see ``facts``),
the routing of every call with its rows.
"""

import faulthandler
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from time import monotonic

import mlx.core as mx
import numpy as np

from .. import kernels
from ..checkpoint import Checkpoint, describe
from .placement import by_number

# Seconds without an answer of the other ranks after which a rank ends its process. A rank whose
# process ends is noticed at once; this is for one that hangs. MLX cannot stop waiting.
PATIENCE_S = 120  # in a layer, in which the others may have much to read and compute
LOADING_S = 600  # while they load
SAY_S = 8  # until a rank says on stderr that it waits for the others to start or to load
LOOK_S = 0.5  # between two looks at the clock
OWN_MEMORY = ("memory_nbytes", "reserved_nbytes")  # fields that may differ between ranks
SAMPLES, SAMPLE_NBYTES = 64, 64  # of a checkpoint's tensors, to tell models of one shape apart
SETTINGS = (".json", ".jinja", ".txt", ".model", ".py")  # of files that ranks must have alike
# Says the first line after SAY_S, the second at the end, unless its standard input is closed first.
SAYS = """
import select, sys
for after, line in zip(map(float, sys.argv[1::2]), sys.argv[2::2]):
    if select.select([0], [], [], after)[0]:
        break
    print(line, file=sys.stderr, flush=True)
"""
TRANSPORT = re.compile(r"\[(ring|nccl|jaccl|mpi)\]")  # how MLX's messages about other ranks begin


class RankError(OSError):
    """The ranks differ in what must be the same, or one of them has ended."""


def joined() -> mx.distributed.Group | None:
    """The ranks that were started with this one, by ``mlx.launch`` for example.

    MLX cannot tell a rank that has ended from one that is yet to start. After ``SAY_S`` a line on
    stderr names the ranks that this one waits for, after ``LOADING_S`` another, and the process
    ends with status 1.

    Returns:
        mx.distributed.Group or None: None if this process is alone.

    Raises:
        RankError: If they cannot be reached.
    """
    file = os.environ.get("MLX_HOSTFILE")
    if file and Path(file).is_file() and not Path(file).read_text().strip():
        del os.environ["MLX_HOSTFILE"]  # of ``mlx.launch -n 1``, which MLX does not take
    try:
        with _saying() if "MLX_RANK" in os.environ else nullcontext():
            group = mx.distributed.init()
    except RuntimeError as e:
        raise RankError(
            f"rank {os.environ.get('MLX_RANK')}: expected to reach the other ranks, MLX does not: "
            f"{e}. Look at the hostfile, and at whether its ports are free and open."
        ) from e
    return group if group.size() > 1 else None


@contextmanager
def _saying():
    """Inside, MLX waits for the others, and no other thread of Python runs. A process says for
    whom, and ``faulthandler`` ends this one after ``LOADING_S``."""
    rank, others = os.environ["MLX_RANK"], "the other ranks"
    with suppress(OSError, ValueError, TypeError):  # another backend's file, or none
        hosts = json.loads(Path(os.environ.get("MLX_HOSTFILE", "")).read_text())
        at = [f"rank {i} at {', '.join(host)}" for i, host in enumerate(hosts) if str(i) != rank]
        others = " and ".join(at)
    lines = [
        str(SAY_S),
        f"moelab: rank {rank} waits for {others} to join: was each of them started, and does it "
        f"still run? In {LOADING_S - SAY_S} s this one ends",
        str(LOADING_S - SAY_S),
        f"moelab: rank {rank}: expected {others} to join within {LOADING_S} s, not all did. Look "
        "at their messages and at the hostfile, and start all of them again.",
    ]
    with (
        open(os.devnull, "w") as nowhere,
        subprocess.Popen([sys.executable, "-IS", "-c", SAYS, *lines], stdin=subprocess.PIPE) as say,
    ):
        faulthandler.dump_traceback_later(LOADING_S + 1, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            say.kill()


class Ranks:
    """This process among those that divide a model's experts.

    Args:
        group (mx.distributed.Group): Of two ranks or more.

    Attributes:
        rank (int): The number of this one.
        size (int): How many there are (N).
    """

    def __init__(self, group: mx.distributed.Group):
        self._group, self.rank, self.size = group, group.rank(), group.size()
        self._told = False  # whether the others know that something failed here
        self._owners = None  # of each layer's experts; None: by number
        self._calls = 0  # of ``join``, so far
        self._checks = None  # of the last one: the layer's path, what each rank said, what this did
        self._until = None  # when to give the others up
        self._patience_s = 0.0
        self._said = False  # whether stderr knows that this one waits for the others to load
        self._closed = threading.Event()
        watch = threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), daemon=True)
        watch.start()

    @classmethod
    def of(cls, group: mx.distributed.Group | None) -> "Ranks | None":
        """None for no group, and for a group of one."""
        return cls(group) if group is not None and group.size() > 1 else None

    def place(self, owners: list[np.ndarray]) -> None:
        """Divide the experts otherwise than by number.

        Args:
            owners (list[np.ndarray]): For each MoE layer ``[E]``, the rank of each expert; each
                rank has as many as by number.

        Raises:
            RankError: If the other ranks divide them otherwise.
        """
        digest = zlib.crc32(np.concatenate(owners).astype(np.uint32))
        self.compare({"StreamConfig.ranks_trace": f"a placement with digest {digest:08x}"})
        self._owners = owners

    def owners(self, num_experts: int, layer: int | None = None) -> np.ndarray:
        """Which rank holds and reads each expert of a layer.

        Args:
            num_experts (int): E.
            layer (int or None): The number of the MoE layer. Default: by number, which gives each
                rank as many.

        Returns:
            np.ndarray: ``[E]``, whole numbers.

        Raises:
            ValueError: If there are fewer experts than ranks.
        """
        if num_experts < self.size:
            raise ValueError(
                f"group: expected at most {num_experts} ranks, one for each expert of a layer, got "
                f"{self.size}. Start fewer."
            )
        if self._owners is None or layer is None:
            return by_number(1, num_experts, self.size)[0]
        return self._owners[layer]

    def owned(self, num_experts: int, layer: int | None = None) -> np.ndarray:
        """Which experts of a layer this rank holds and reads: ``[E]``, bool."""
        return self.owners(num_experts, layer) == self.rank

    def any(self, *flags: bool) -> list[bool]:
        """For each flag whether some rank has set it.

        Raises:
            RankError: If a rank has ended.
        """
        with self.waiting(LOADING_S):
            mine = mx.array(flags, mx.int32)
            return [n > 0 for n in mx.distributed.all_sum(mine, group=self._group).tolist()]

    def gather(self, value: object) -> list:
        """What every rank gave, in their order.

        Args:
            value (object): For JSON.

        Raises:
            RankError: If a rank has ended, or told of an error in place of its value.
        """
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        with self.waiting(LOADING_S):
            sizes = np.array(mx.distributed.all_gather(mx.array([len(text)]), group=self._group))
            padded = np.zeros(sizes.max(), np.uint8)
            padded[: len(text)] = text
            texts = np.array(mx.distributed.all_gather(mx.array(padded), group=self._group))
        rows = zip(texts.reshape(self.size, -1), sizes)
        values = [json.loads(row[:size].tobytes()) for row, size in rows]
        for rank, each in enumerate(values):
            if isinstance(each, dict) and "error" in each and rank != self.rank:
                self._told = True
                raise RankError(f"rank {rank} of {self.size} ended: {each['error']}")
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks leave the block, or none: an error of one is raised by all of them."""
        try:
            yield
            self.gather(None)
        except BaseException as e:
            if not self._told:
                self._told = True
                with suppress(RankError, RuntimeError):
                    self.gather({"error": describe(e)})
            raise

    def compare(self, facts: dict[str, str]) -> None:
        """Refuse ranks that were started differently.

        Args:
            facts (dict[str, str]): What must be the same on all ranks: names and values.

        Raises:
            RankError: If a value differs. Every rank raises the same error.
        """
        everyone = self.gather(facts)
        for name in facts:
            values = [each.get(name) for each in everyone]
            if len(set(values)) > 1:
                self._told = True
                listed = ", ".join(f"{value} on rank {r}" for r, value in enumerate(values))
                raise RankError(f"{name}: expected the same on all ranks, got {listed}.")

    @contextmanager
    def waiting(self, patience_s: float | None = None) -> Iterator[None]:
        """A time in which this rank may wait for the others. If it waits too long, it ends.

        Args:
            patience_s (float or None): Seconds. Default: ``PATIENCE_S`` from each ``answered`` on.

        Raises:
            RankError: If another rank has ended.
        """
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
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
        """The rows of all (token, expert) pairs, from the rows that each rank computed.

        Args:
            y (mx.array or None): ``[n, D]``, those of this rank; None if there are none.
            owners (np.ndarray): ``[..., K]``, the rank that computes each pair.
            routed (np.ndarray): ``[..., K]``, the routing, which must be the same on all ranks.
            like (tuple): D and the type of the rows.
            path (str): Of the layer, for messages.

        Returns:
            tuple[mx.array, mx.array]: The rows, ``[..., K, D]``; an array to evaluate before
            ``answered``, which needs all rows.

        Raises:
            TypeError: If the rows have another type, which a rank without rows cannot know.
        """
        D, dtype = like
        if y is not None and y.dtype != dtype:
            raise TypeError(
                f"{path}: expected experts that compute in {dtype}, got {y.dtype}. Set "
                "StreamConfig.dtype."
            )
        # Each rank sends a block of as many rows as the one with the most pairs has, and one more.
        # Its first row says which call this is and for which routing, in numbers of 8 bits: all
        # types of activations hold these exactly.
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
        """The rows of the last layer have arrived: the others still take part.

        Raises:
            RankError: If a rank chose other experts. It computes with other bits.
        """
        if self._until is not None:
            self._until = monotonic() + self._patience_s
        if self._checks is None:
            return
        (path, checks, words), self._checks = self._checks, None
        differ = (np.array(checks) != words).any(0)
        # MLX drops the error of a call that it had begun before somebody waited for it.
        if differ[:2].any():
            raise self._lost("its rows did not arrive")
        if differ.any():
            raise RankError(
                f"{path}: expected the same experts for each token on all ranks, they differ: the "
                "machines round differently. Use machines of one kind with the same versions."
            )

    def close(self) -> None:
        """No longer watch the others."""
        self._closed.set()

    def _lost(self, why):
        self._told = True
        return RankError(
            f"rank {self.rank} of {self.size}: another rank has ended ({why}): its own message "
            "says why. Start all of them again."
        )

    def _look(self):
        until, loads = self._until, self._patience_s == LOADING_S
        if until is None:
            return
        if loads and not self._said and monotonic() > until - LOADING_S + SAY_S:
            self._said = True
            print(
                f"moelab: rank {self.rank} of {self.size} waits for the others to load",
                file=sys.stderr,
                flush=True,
            )
        if monotonic() > until:
            print(
                f"moelab: rank {self.rank} of {self.size}: no answer from the other ranks for "
                f"{self._patience_s:.0f} s: this one ends, too.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # MLX waits in native code, which no exception reaches


def _watch(ranks, closed):
    while not closed.wait(LOOK_S):
        if (living := ranks()) is None:
            return
        living._look()
        del living


def facts(checkpoint: Checkpoint, config: object, model_config: dict | None) -> dict[str, str]:
    """What must be the same on all ranks, for ``Ranks.compare``; of the weights, samples.

    Args:
        checkpoint (Checkpoint): The files.
        config (StreamConfig): How to stream, ``resolved``.
        model_config (dict or None): What ``load`` was given.
    """
    return {
        "moelab": sys.modules["moelab"].__version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "device": f"{mx.default_device().type.name} of {platform.system()} {platform.machine()}",
        **{
            f"StreamConfig.{name}": str(value)
            for name, value in vars(config).items()
            if name not in OWN_MEMORY
        },
        "model_config": json.dumps(model_config, sort_keys=True, default=str),
        "tokenizer and settings": f"files with digest {_digest_of_files(checkpoint.path)}",
        "checkpoint": f"{checkpoint.nbytes / 1e6:.1f} MB with digest {_digest(checkpoint)}",
    }


def _digest_of_files(path):
    """Tells tokenizers, templates and the tokens that end a text apart."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.suffix in SETTINGS and not file.name.endswith(".index.json") and file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _digest(checkpoint):
    """Tells checkpoints apart by their headers, their config.json and bytes of some tensors.

    So other numbers in one expert of one rank's file may not be noticed: reading all bytes would
    take as long as copying the model. A checksum of the files on each machine compares all.
    """
    tensors = {**checkpoint.tensors, **checkpoint.packed}
    names = sorted(tensors)
    described = [(n, tensors[n].shape, str(tensors[n].dtype), tensors[n].nbytes) for n in names]
    digest = hashlib.sha256(
        json.dumps([checkpoint.config, described], sort_keys=True, default=str).encode()
    )
    for name in names[:: -(-len(names) // SAMPLES)]:
        t = tensors[name]
        file, offset = (
            (t.file, t.offset) if name in checkpoint.tensors else (t.files[0], t.offsets[0])
        )
        with open(file, "rb", buffering=0) as f:
            f.seek(offset + t.nbytes // 2)
            digest.update(f.read(SAMPLE_NBYTES))
    return digest.hexdigest()[:12]
