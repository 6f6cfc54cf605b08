"""``StreamConfig`` says how to stream, and is checked when it is made."""

import os
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from types import ModuleType
from typing import Any

from .. import kernels
from ..checkpoint import MAX_DIMENSION
from .residency.table import POLICIES

MODES = ("resident", "serial", "buffers", "stacked", "fused")
SLOT_MODES = ("stacked", "fused")  # those with S slots in every layer
# More bytes than any machine has; more threads help no disk.
MOST_NBYTES, MOST_THREADS = 2**63 - 1, 1024
# The places that an expert in no slot comes from, each with the module that brings it. A new place
# is a module with ``open_reader`` and ``hold`` (see ``residency/disk.py``), a line here and a word
# in ``StreamConfig``'s docstring. If it takes memory from the slots, ``plan`` must know.
SOURCES = {"disk": "residency.disk", "host": "gpu.host"}


@dataclass(frozen=True)
class Option:
    """What a field of ``StreamConfig`` takes, and how the commands show it.

    A field takes its default. It also takes one of ``choices`` if there are any, else a whole
    number within ``bounds`` if there are, else True or False if its default is one, else the file
    of a trace.
    """

    default: Any
    help: str = ""  # ``{default}`` stands for the default; empty: the commands have no such option
    metavar: str | None = None  # the name of the value in the help; None: the choices
    choices: Collection[str] = ()  # the names that the field takes
    only_in_python: Collection[str] = ()  # the choices that the commands do not take
    bounds: tuple[int, int] | None = None  # the least and the most of a whole number
    modes: Collection[str] = MODES  # the modes in which the field has an effect
    # What the other modes lack: they refuse any value but the default. If empty, they ignore it.
    needs: str = ""
    for_auto: bool = False  # whether the field has an effect with ``slots="auto"`` alone
    environment: tuple[str, ...] = ()  # the variables that ``StreamConfig.from_env`` reads

    def refusal(self, value: Any) -> str:
        """Say what is wrong with a value; empty if the field takes it."""
        advice = ""
        if type(value) is type(self.default) and value == self.default:
            return ""
        if self.choices:
            takes, expected = value in [*self.choices], f"one of {', '.join(self.choices)}"
        elif self.bounds:
            least, most = self.bounds
            takes = type(value) is int and least <= value <= most
            expected = f"a whole number of at least {least} and at most {most}"
        elif type(self.default) is bool:
            takes, expected = type(value) is bool, "True or False"
        else:
            takes, expected = isinstance(value, (str, os.PathLike)), "the file of a trace"
            advice = " Save it first: trace.save('mine.npz')."
        return "" if takes else f"expected {expected}, got {value!r}.{advice}"


def _option(default, help="", **facts):
    return field(default=default, metadata={"option": Option(default, help, **facts)})


@dataclass(frozen=True)
class StreamConfig:
    """How a model's experts are kept in memory and read.

    Args:
        mode (str): ``resident``, ``serial``, ``buffers``, ``stacked`` or ``fused``. Default:
            ``fused``.
        slots (int or str): Slots in each layer (S), at least K; no layer takes more than it has
            experts here. For ``stacked`` and ``fused``. Default: ``auto``, as many as
            ``moelab.plan`` finds right.
        memory_nbytes (int or None): With ``slots="auto"``: what the model may take. Default: what
            is available.
        context (int): With ``slots="auto"``: the tokens, prompt and answer, whose caches must fit.
            Default: ``4096``.
        reserved_nbytes (int): With ``slots="auto"``: what is left free beside that, for a draft's
            caches or those of more texts at once. Default: ``0``.
        top_k (int or None): Experts per token (K). Fewer than the checkpoint's own is lossy.
            Default: the checkpoint's own.
        readers (int): Threads that read what a layer waits for; as many again read ahead.
            Default: ``8``. On Linux, with slots and more than one reader, all reads of a small
            call may be in flight at once.
        source (str): Where an expert comes from that is in no slot: ``disk``, or with a CUDA GPU
            ``host``, pinned memory into which every expert is read while loading. If the policy
            is ``lru`` and nothing is recorded, the GPU fills its slots from there by itself in a
            call of at most S (token, expert) pairs, and the host does not wait for its routing.
            For ``stacked`` and ``fused``, without ``prefetch``; needs cuda-bindings, and host
            memory for all experts. Default: ``disk``.
        policy (str): Which expert is evicted first: ``lru`` (the least recently used), ``lfu`` (the
            least frequently used), ``lrfu`` (by both: a use counts 2% less with each later call of
            the layer) or ``auto``: ``lrfu``, with ``source="host"`` ``lru``. Default: ``auto``.
        ranks_trace (str or None): With a group of ranks: the file of a trace of this model, which
            ``Trace.save`` wrote. Experts that its tokens use together go to different ranks.
            Default: every N-th expert goes to the same rank.
        prefetch (str): Which experts of a decoded token are read before their layer is called:
            ``none``, ``lookahead`` (the next layer's router on this layer's hidden state) or
            ``oracle`` (those of a recorded trace). For ``stacked`` and ``fused``. Default:
            ``none``.
        dtype (str): ``auto`` (float32 on the CPU backend, the checkpoint's own on a GPU),
            ``float32``, ``bfloat16`` or ``float16``. Default: ``auto``.
        kernels (str): What computes matrices, attention and recurrences: ``mlx``, or on the CPU
            backend ``fast`` (``moelab/kernels``; needs llvmlite), which is many times as fast,
            rounds differently, divides large products over the cores and has no gradients: in
            mode ``resident``, call ``model.train()`` for those.
            Default: ``auto``, which is ``fast`` where it can be used and activations are float32.
        lazy_logits (bool): Whether the logits of a call of more than 64 tokens wait until
            somebody uses them. Generation does not use a prompt's, so that saves memory and time.
            Matters with the ``fast`` kernels, which compute them at once; logits that waited are
            computed by MLX's slow kernels and differ by rounding (``tiny-moe``: up to 3e-5). A call
            of more than ``Plan.prompt_tokens`` tokens is divided, and the logits of all parts but
            the last always wait: for the resident model's bits at every position, call it with at
            most so many tokens at once. The commands set it for their model. Default: ``False``.

    Raises:
        ValueError: If a field does not take its value (``OPTIONS``), or not in this mode.
    """

    mode: str = _option(
        "fused", choices=MODES, environment=("MLX_MOE_STACKED", "MLX_MOE_FUSE_GATEUP")
    )
    slots: int | str = _option(
        "auto",
        "experts held in each layer, or auto (default: {default})",
        metavar="N",
        bounds=(1, MAX_DIMENSION - 1),
        modes=SLOT_MODES,
        environment=("MLX_MOE_CACHE_SLOTS", "TEND_MOE_CACHE_SLOTS"),
    )
    memory_nbytes: int | None = _option(
        None,
        "for slots auto: what may be taken, as in 2GB (default: what there is)",
        metavar="BYTES",
        bounds=(1, MOST_NBYTES),
        modes=SLOT_MODES,
        for_auto=True,
    )
    context: int = _option(
        4096,
        "for slots auto: tokens to leave room for (default: {default})",
        metavar="N",
        bounds=(1, MAX_DIMENSION - 256),  # mlx-lm's key-value caches grow by 256 tokens
        modes=SLOT_MODES,
        for_auto=True,
    )
    reserved_nbytes: int = _option(0, bounds=(0, MOST_NBYTES), modes=SLOT_MODES, for_auto=True)
    top_k: int | None = _option(
        None,
        "experts per token; fewer than the checkpoint's are lossy",
        metavar="N",
        bounds=(1, MAX_DIMENSION - 1),
        environment=("SWIFTLM_TOP_K",),
    )
    readers: int = _option(
        8,
        "reads in flight at once (default: {default})",
        metavar="N",
        bounds=(1, MOST_THREADS),
        modes=("buffers", *SLOT_MODES),
    )
    source: str = _option(
        "disk",
        "of misses; host: a CUDA GPU's host keeps all experts (default: {default})",
        choices=SOURCES,
        modes=SLOT_MODES,
        needs="slots that the GPU fills",
    )
    policy: str = _option(
        "auto",
        "which expert is evicted first (default: {default})",
        choices=POLICIES,
        modes=SLOT_MODES,
    )
    ranks_trace: str | None = _option(
        None,
        "with several ranks: a trace of this model that divides the experts",
        metavar="FILE",
        modes=MODES[1:],
    )
    prefetch: str = _option(
        "none",
        "read early: none, or lookahead (the next router's experts)",
        metavar="WHICH",
        choices=("none", "lookahead", "oracle"),
        only_in_python=("oracle",),  # it needs a trace of the same prompt
        modes=SLOT_MODES,
        needs="slots to read into",
    )
    dtype: str = _option(
        "auto",
        "of activations (default: {default})",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kernels: str = _option(
        "auto",
        "what computes on a CPU: MLX's, or fast (default: {default})",
        choices=("auto", "mlx", "fast"),
    )
    lazy_logits: bool = _option(False)

    def __post_init__(self):
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if refusal := option.refusal(value):
                raise ValueError(f"StreamConfig.{name}: {refusal}")
            if option.needs and value != option.default and self.mode not in option.modes:
                raise ValueError(
                    f"StreamConfig.{name}: {value!r} needs {option.needs}, got mode "
                    f"{self.mode!r}. Use mode {' or '.join(map(repr, option.modes))}, or {name} "
                    f"{option.default!r}."
                )
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        if self.source == "host" and self.prefetch != "none":
            raise ValueError(
                f"StreamConfig.prefetch: {self.prefetch!r} reads experts from the disk, and with "
                "source 'host' they are in memory. Use prefetch 'none', or source 'disk'."
            )

    @classmethod
    def checked(cls, config: "StreamConfig | None") -> "StreamConfig":
        """The configuration that a caller gave, or the default one for None."""
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
    def source_module(self) -> ModuleType:
        """The module that brings experts from ``source``."""
        return import_module(f".{SOURCES[self.source]}", __package__)

    @property
    def asks_for_slots(self) -> bool:
        """Whether ``plan`` has to choose the slots."""
        return self.mode in SLOT_MODES and self.slots == "auto"

    def unused(self) -> set[str]:
        """The fields that have no effect in this mode."""
        return {
            name
            for name, option in OPTIONS.items()
            if self.mode not in option.modes or (option.for_auto and self.slots != "auto")
        }

    @classmethod
    def from_env(cls, **fields) -> "StreamConfig":
        """Read the environment variables that SwiftLM's users know.

        ``MLX_MOE_STACKED`` and ``MLX_MOE_FUSE_GATEUP`` choose the mode (neither: ``buffers``),
        ``MLX_MOE_CACHE_SLOTS`` or ``TEND_MOE_CACHE_SLOTS`` the slots, ``SWIFTLM_TOP_K`` the top-k.
        ``fields`` override them.
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

        stacked, fuse = map(switch, OPTIONS["mode"].environment)
        if fuse and not stacked:
            raise ValueError("MLX_MOE_FUSE_GATEUP=1 needs MLX_MOE_STACKED=1 as well.")
        found = {"mode": "fused" if fuse else "stacked" if stacked else "buffers"}
        for name, option in OPTIONS.items():
            variables = [v for v in option.environment if v in os.environ and name != "mode"]
            values = [
                number(v, *option.bounds) if option.bounds else os.environ[v] for v in variables
            ]
            if len({*values}) > 1:
                raise ValueError(
                    f"{' and '.join(f'{v}={n}' for v, n in zip(variables, values))}: expected "
                    f"the same {name} in both. Unset one."
                )
            if values:
                found[name] = values[0]
        return cls(**found | fields)


OPTIONS = {f.name: f.metadata["option"] for f in fields(StreamConfig)}
