"""``StreamConfig``: how to stream, checked when it is made."""

import os
from dataclasses import dataclass, replace

from .. import kernels
from ..checkpoint import MAX_DIMENSION
from .residency.table import POLICIES

MODES = ("resident", "serial", "buffers", "stacked", "fused")
SLOT_MODES = ("stacked", "fused")  # those with S slots in every layer
CHOICES = {  # of the fields that take one of several names
    "mode": MODES,
    "prefetch": ("none", "lookahead", "oracle"),
    "policy": POLICIES,
    "source": ("disk", "host"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kernels": ("auto", "mlx", "fast"),
}
# More bytes than any machine has; more threads help no disk.
MOST_NBYTES, MOST_THREADS = 2**63 - 1, 1024
BOUNDS = {  # the least and the most of the fields that take a whole number
    "slots": (1, MAX_DIMENSION - 1),
    "memory_nbytes": (1, MOST_NBYTES),
    "context": (1, MAX_DIMENSION - 256),  # mlx-lm's key-value caches grow by 256 tokens
    "reserved_nbytes": (0, MOST_NBYTES),
    "top_k": (1, MAX_DIMENSION - 1),
    "readers": (1, MOST_THREADS),
}
UNSET = (("slots", "auto"), ("memory_nbytes", None), ("top_k", None))


@dataclass(frozen=True)
class StreamConfig:
    """How a model's experts are kept in memory and read.

    Args:
        mode (str): ``resident``, ``serial``, ``buffers``, ``stacked`` or ``fused``. Default:
            ``fused``.
        slots (int or str): Experts held in memory in every layer (S), at least K. For ``stacked``
            and ``fused``. Default: ``auto``, as many as ``moelab.plan`` finds right.
        memory_nbytes (int or None): With ``slots="auto"``: what the model may take. Default: what
            is available.
        context (int): With ``slots="auto"``: the tokens, prompt and answer, whose caches must fit.
            Default: ``4096``.
        reserved_nbytes (int): With ``slots="auto"``: what is left free beside that, for a draft's
            caches or those of more texts at once. Default: ``0``.
        top_k (int or None): Experts per token (K). Fewer than the checkpoint's own is lossy.
            Default: the checkpoint's own.
        readers (int): Reads in flight at once. Default: ``8``. On Linux, with slots and more than
            one reader, all reads of a small call may be in flight.
        prefetch (str): Which experts are read before their layer is called: ``none``,
            ``lookahead`` (the next layer's router on this layer's hidden state) or ``oracle``
            (those of a recorded trace). For ``stacked`` and ``fused``. Default: ``none``.
        policy (str): Which expert is evicted first: ``lru`` (the least recently used) or ``lfu``
            (the least frequently used). Default: ``lru``.
        ranks_trace (str or None): With a group of ranks: the file of a trace of this model,
            written by ``Trace.save``, by which experts that tokens use together are different
            ranks'. Default: every N-th expert is the same rank's.
        dtype (str): ``auto`` (float32 on the CPU backend, the checkpoint's own on a GPU),
            ``float32``, ``bfloat16`` or ``float16``. Default: ``auto``.
        kernels (str): What multiplies matrices: ``mlx``, or on the CPU backend ``fast``
            (``moelab/kernels``; needs llvmlite), which is many times as fast, rounds differently,
            uses all cores by itself and has no gradients: call ``model.train()`` for those.
            Default: ``auto``, which is ``fast`` where it can be used and activations are float32.
        lazy_logits (bool): Whether the logits of a prompt wait until somebody uses them, which
            generation does not: that saves their memory and time. Matters with the ``fast``
            kernels, which compute them at once; if they are used after all, MLX's slow ones do.
            The commands set it. Default: ``False``.
        source (str): Where an expert comes from that is in no slot: ``disk``, or with a CUDA GPU
            ``host``, pinned memory into which every expert is read while loading. From there the
            GPU fills its slots by itself, and the host waits for no routing. For ``stacked`` and
            ``fused``; needs cuda-bindings, and host memory for all experts. Default: ``disk``.

    Raises:
        ValueError: If a field is not one of the above, or a number outside ``BOUNDS``.
    """

    mode: str = "fused"
    slots: int | str = "auto"
    memory_nbytes: int | None = None
    context: int = 4096
    reserved_nbytes: int = 0
    top_k: int | None = None
    readers: int = 8
    prefetch: str = "none"
    policy: str = "lru"
    ranks_trace: str | None = None
    dtype: str = "auto"
    kernels: str = "auto"
    lazy_logits: bool = False
    source: str = "disk"

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"StreamConfig.{name}: expected one of {', '.join(allowed)}, got {value!r}."
                )
        if type(self.lazy_logits) is not bool:
            raise ValueError(
                f"StreamConfig.lazy_logits: expected True or False, got {self.lazy_logits!r}."
            )
        if self.source != "disk" and self.mode not in SLOT_MODES:
            raise ValueError(
                f"StreamConfig.source: {self.source!r} needs slots that the GPU fills, got mode "
                f"{self.mode!r}. Use mode 'stacked' or 'fused', or source 'disk'."
            )
        if self.prefetch != "none" and self.mode not in SLOT_MODES:
            raise ValueError(
                f"StreamConfig.prefetch: {self.prefetch!r} needs slots to read into, got mode "
                f"{self.mode!r}. Use mode 'stacked' or 'fused', or prefetch 'none'."
            )
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if (name, value) in UNSET:
                continue
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"StreamConfig.{name}: expected a whole number of at least {least} and at most "
                    f"{most}, got {value!r}."
                )
        if self.ranks_trace is not None:
            if not isinstance(self.ranks_trace, (str, os.PathLike)):
                raise ValueError(
                    f"StreamConfig.ranks_trace: expected the file of a trace, got "
                    f"{self.ranks_trace!r}. Save it first: trace.save('mine.npz')."
                )
            object.__setattr__(self, "ranks_trace", os.fspath(self.ranks_trace))

    @classmethod
    def checked(cls, config: "StreamConfig | None") -> "StreamConfig":
        """The configuration that a caller gave, or the default one for None.

        Raises:
            ValueError: If it is something else.
        """
        if config is None:
            return cls()
        if not isinstance(config, cls):
            raise ValueError(
                f"config: expected a StreamConfig, got {type(config).__name__}. "
                "Write moelab.StreamConfig(mode='fused', slots=16), for example."
            )
        return config

    def resolved(self) -> "StreamConfig":
        """This configuration with the kernels that ``auto`` stands for here."""
        if self.kernels != "auto":
            return self
        fast = self.dtype in ("auto", "float32") and kernels.available()
        return replace(self, kernels="fast" if fast else "mlx")

    @property
    def asks_for_slots(self) -> bool:
        """Whether ``plan`` has to choose the slots."""
        return self.mode in SLOT_MODES and self.slots == "auto"

    def unused(self) -> set[str]:
        """The fields that have no effect in this mode.

        Returns:
            set[str]: Their names.
        """
        auto = {"memory_nbytes", "context", "reserved_nbytes"}  # what slots="auto" goes by
        if self.mode in SLOT_MODES:
            return set() if self.slots == "auto" else auto
        unused = {"slots", "source", "prefetch", "policy"} | auto
        if self.mode != "buffers":
            unused.add("readers")
        if self.mode == "resident":
            unused.add("ranks_trace")
        return unused

    @classmethod
    def from_env(cls, **fields) -> "StreamConfig":
        """Read the environment variables that SwiftLM's users know.

        ``MLX_MOE_STACKED`` and ``MLX_MOE_FUSE_GATEUP`` choose the mode (neither: ``buffers``),
        ``MLX_MOE_CACHE_SLOTS`` or ``TEND_MOE_CACHE_SLOTS`` the slots, ``SWIFTLM_TOP_K`` the top-k.

        Args:
            fields: Fields that override the environment.

        Returns:
            StreamConfig: The configuration.

        Raises:
            ValueError: If a variable has a wrong value, or two contradict each other.
        """

        def number(name, least, most):
            text = os.environ[name]
            try:
                value = int(text)
            except ValueError:
                value = None
            if value is None or not least <= value <= most:
                raise ValueError(
                    f"{name}: expected a whole number from {least} to {most}, got {text!r}."
                )
            return value

        def switch(name):
            return name in os.environ and number(name, 0, 1)

        stacked, fuse = switch("MLX_MOE_STACKED"), switch("MLX_MOE_FUSE_GATEUP")
        if fuse and not stacked:
            raise ValueError("MLX_MOE_FUSE_GATEUP=1 needs MLX_MOE_STACKED=1 as well.")
        found = {"mode": "fused" if fuse else "stacked" if stacked else "buffers"}
        names = ("MLX_MOE_CACHE_SLOTS", "TEND_MOE_CACHE_SLOTS")
        slots = {name: number(name, *BOUNDS["slots"]) for name in names if name in os.environ}
        if len(set(slots.values())) > 1:
            raise ValueError(
                f"{' and '.join(f'{k}={v}' for k, v in slots.items())}: expected the same number "
                "of slots in both. Unset one."
            )
        if slots:
            found["slots"] = next(iter(slots.values()))
        if "SWIFTLM_TOP_K" in os.environ:
            found["top_k"] = number("SWIFTLM_TOP_K", *BOUNDS["top_k"])
        return cls(**found | fields)
