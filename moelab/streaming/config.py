"""``StreamConfig`` says how to stream a model's experts. The constructor checks the fields."""

import os
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from inspect import formatannotation
from textwrap import fill
from typing import Any

from .. import kernels
from ..checkpoint import MAX_DIMENSION

MODES = ("resident", "serial", "buffers", "stacked", "fused")
SLOT_MODES = ("stacked", "fused")  # the modes that keep S slots in every layer
FOR_AUTO = {"modes": SLOT_MODES, "for_auto": True}  # for fields that matter only with slots auto
# Upper bounds: more bytes than any machine has, more threads than any disk needs.
MOST_NBYTES, MOST_THREADS = 2**63 - 1, 1024
# SwiftLM's environment variables, and the field that ``StreamConfig.from_env`` sets from each.
ENVIRONMENT = {
    "MLX_MOE_STACKED": "mode",
    "MLX_MOE_FUSE_GATEUP": "mode",
    "MLX_MOE_CACHE_SLOTS": "slots",
    "TEND_MOE_CACHE_SLOTS": "slots",
    "SWIFTLM_TOP_K": "top_k",
}


@dataclass(frozen=True)
class Option:
    """A field's help and the values that it takes, as the class and the commands show them."""

    default: Any
    help: str  # one line; ``{default}`` stands for the default
    more: str = ""  # what else a user of the class must know; the commands do not show it
    command: bool = True  # whether the commands have an option with the field's name
    metavar: str | None = None  # the value's name in a command's help; None: the choices
    choices: Collection[str] = ()  # the names that the field takes
    only_in_python: Collection[str] = ()  # the choices that the commands do not take
    # The least and the greatest number. A field without bounds and choices takes True or False.
    bounds: tuple[int, int] | None = None
    modes: Collection[str] = MODES  # the modes in which the field has an effect
    needs: str = ""  # what other modes lack, so that they refuse the field; "": they ignore it
    for_auto: bool = False  # whether the field has an effect only with ``slots="auto"``

    def check(self, name: str, value: Any) -> None:
        """Raise if the field ``name`` does not take ``value``."""
        if type(value) is type(self.default) and value == self.default:
            return
        if self.choices:
            takes, expected = value in [*self.choices], f"one of {', '.join(self.choices)}"
        elif self.bounds:
            least, most = self.bounds
            takes = type(value) is int and least <= value <= most
            expected = f"a whole number of at least {least} and at most {most}"
        else:
            takes, expected = type(value) is bool, "True or False"
        if not takes:
            raise ValueError(f"StreamConfig.{name}: expected {expected}, got {value!r}.")


def _option(default, help, more="", **facts):
    facts = {"metavar": "N"} | facts if "bounds" in facts else facts
    return field(default=default, metadata={"option": Option(default, help, more, **facts)})


@dataclass(frozen=True)
class StreamConfig:
    """How a model's experts are kept in memory and read."""

    mode: str = _option(
        "fused",
        "where experts are and how a layer computes them (default: {default})",
        command=False,  # the commands have ``--mode``, or ``--modes`` for several
        choices=MODES,
    )
    slots: int | str = _option(
        "auto",
        "experts held in each layer, or auto (default: {default})",
        "A layer takes at least K. auto: as many as moelab.plan chooses.",
        bounds=(1, MAX_DIMENSION - 1),
        modes=SLOT_MODES,
    )
    memory_nbytes: int | None = _option(
        None,
        "for slots auto: bytes to take, such as 2GB in a command (default: all free)",
        metavar="BYTES",
        bounds=(1, MOST_NBYTES),
        **FOR_AUTO,
    )
    context: int = _option(
        4096,
        "for slots auto: tokens to leave room for (default: {default})",
        "These are the tokens of prompt and answer, whose caches must fit. For the caches of a "
        "draft, or of several texts decoded at once, moelab.load has arguments.",
        bounds=(1, MAX_DIMENSION - 256),  # mlx-lm's key-value caches grow by 256 tokens
        **FOR_AUTO,
    )
    top_k: int | None = _option(
        None,
        "experts per token; fewer than the checkpoint's change the text",
        bounds=(1, MAX_DIMENSION - 1),
    )
    readers: int = _option(
        8,
        "reads in flight at once (default: {default})",
        "Threads that read what a layer waits for; the same number of other threads read ahead. On "
        "Linux, with slots and more than one reader, all reads of a small call may be in flight.",
        bounds=(1, MOST_THREADS),
        modes=("buffers", *SLOT_MODES),
    )
    reads: str = _option(
        "auto",
        "cached: through the page cache; direct: past it (default: {default})",
        "direct (on Linux, with llvmlite; elsewhere the same as cached): a read takes less of a "
        "core's time, and leaves nothing in the page cache. auto: as Plan.direct says, or cached "
        "if there is no plan.",
        choices=("auto", "cached", "direct"),
        modes=SLOT_MODES,
    )
    source: str = _option(
        "disk",
        "where missing experts come from; host: a CUDA GPU's host keeps all (default: {default})",
        "host keeps every expert in pinned memory, filled at load; it needs cuda-bindings and "
        "has no prefetch. While no routing is recorded, the GPU fills its slots by itself in a "
        "call of at most S (token, expert) pairs.",
        choices=("disk", "host"),
        modes=SLOT_MODES,
        needs="slots that the GPU fills",
    )
    prefetch: str = _option(
        "auto",
        "whom to ask for experts to read early: router (the layer's own), lookahead (the next "
        "layer's router), none or auto (default: {default})",
        "router asks a layer's router before the layer's attention or recurrence, in a short call "
        "of one text, if the fast kernels compute the whole layer; lookahead gives this layer's "
        "hidden state to the next layer's router; oracle takes a recorded trace. auto: short calls "
        "alternate between none and router (lookahead on a Mac's GPU), and the faster stays; none "
        "on CUDA, with ranks, with source host and with a slot for every expert.",
        metavar="WHICH",
        choices=("auto", "none", "router", "lookahead", "oracle"),
        only_in_python=("oracle",),  # it needs a trace of the same prompt
        modes=SLOT_MODES,
        needs="slots to read into",
    )
    dtype: str = _option(
        "auto",
        "the type of the activations (default: {default})",
        "auto: float32 on the CPU backend, the checkpoint's own on a GPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kernels: str = _option(
        "auto",
        "kernels that compute on a CPU: MLX's, or fast (default: {default})",
        "fast (needs llvmlite) computes matrices, attention and recurrences. It is many times as "
        "fast, rounds differently and has no gradients: in mode resident, model.train() gives "
        "gradients. auto: fast where it can be used and activations are float32.",
        choices=("auto", "mlx", "fast"),
    )
    library: str = _option(
        "auto",
        "the library whose model classes are used (default: {default})",
        "mlx-vlm (moelab[vlm]) has families that mlx-lm does not; only their text model is built. "
        "auto: mlx-lm's, or mlx-vlm's where only mlx-vlm has the model type or tensor names.",
        choices=("auto", "mlx-lm", "mlx-vlm"),
    )
    lazy_logits: bool = _option(
        False,
        "logits of a call of more than 64 tokens wait until somebody uses them",
        "Generation uses no logits of a prompt, so True saves memory and time; commands set it. "
        "It matters with the fast kernels: logits that waited are computed by MLX's slow kernels "
        "and differ by rounding. A call of more than Plan.prompt_tokens tokens is divided, and the "
        "logits of all parts but the last always wait. For the resident model's bits at every "
        "position, call the model with at most Plan.prompt_tokens tokens at once, on a CPU (MLX's "
        "kernels for GPUs round calls of other lengths differently).",
        command=False,
    )

    def __post_init__(self):
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            option.check(name, value)
            asks = value not in (option.default, "none")
            if option.needs and asks and self.mode not in option.modes:
                raise ValueError(
                    f"StreamConfig.{name}: {value!r} needs {option.needs}, got mode "
                    f"{self.mode!r}. Use mode {' or '.join(map(repr, option.modes))}, or {name} "
                    f"{option.default!r}."
                )
        if self.source == "host" and self.prefetch not in ("auto", "none"):
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
    def asks_for_slots(self) -> bool:
        """Whether ``plan`` has to choose the slots."""
        return self.mode in SLOT_MODES and self.slots == "auto"

    @property
    def policy(self) -> str:
        """The eviction policy of the slots, one of ``residency.table.EVICTION``."""
        return "lru" if self.source == "host" else "lrfu"

    def unused(self) -> set[str]:
        """The fields that have no effect in this mode."""
        return {
            name
            for name, option in OPTIONS.items()
            if self.mode not in option.modes or (option.for_auto and self.slots != "auto")
        }

    @classmethod
    def from_env(cls, **fields) -> "StreamConfig":
        """Make a configuration from the environment variables that SwiftLM's users know.

        ``MLX_MOE_STACKED`` and ``MLX_MOE_FUSE_GATEUP`` choose the mode (neither: ``buffers``).
        ``MLX_MOE_CACHE_SLOTS`` or ``TEND_MOE_CACHE_SLOTS`` chooses the slots, and
        ``SWIFTLM_TOP_K`` chooses the top-k. ``fields`` override the variables.
        """
        given = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        for variable, text in given.items():
            least, most = OPTIONS[ENVIRONMENT[variable]].bounds or (0, 1)
            if not text.strip().isdecimal() or not least <= int(text) <= most:
                raise ValueError(
                    f"{variable}: expected a whole number from {least} to {most}, got {text!r}."
                )
        stacked, fused = (int(given.pop(v, 0)) for v in [*ENVIRONMENT][:2])
        if fused and not stacked:
            raise ValueError("MLX_MOE_FUSE_GATEUP=1 needs MLX_MOE_STACKED=1 as well.")
        found = {"mode": "fused" if fused else "stacked" if stacked else "buffers"}
        for variable, text in given.items():
            name = ENVIRONMENT[variable]
            if found.setdefault(name, int(text)) != int(text):
                both = " and ".join(f"{v}={t}" for v, t in given.items() if ENVIRONMENT[v] == name)
                raise ValueError(f"{both}: expected the same {name} in both. Unset one.")
        return cls(**found | fields)


OPTIONS = {f.name: f.metadata["option"] for f in fields(StreamConfig)}


def _documented(f):
    """Return a field's lines for the class's docstring."""
    option = f.metadata["option"]
    text = f"{f.name} ({formatannotation(f.type)}): {option.help.format(default=option.default)}. "
    text += f"One of {', '.join(option.choices)}. " if option.choices else ""
    text += f"In modes {', '.join(option.modes)}. " if len(option.modes) < len(MODES) else ""
    return fill(text + option.more, 100, initial_indent="    ", subsequent_indent="        ")


StreamConfig.__doc__ += "\n\nArgs:\n" + "\n".join(map(_documented, fields(StreamConfig)))
StreamConfig.__doc__ += "\n\nRaises:\n    ValueError: If a field does not take its value here."
