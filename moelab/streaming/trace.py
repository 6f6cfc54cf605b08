"""A trace says which experts a model chose for every token, and can be kept in a file."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..checkpoint import describe, regular_file

FORMAT = 1  # version of the file's format
MAX_EXPERTS = 1 << 16  # the most experts of a layer: their ids are uint16
# Of each member of the file: the most bytes when unpacked, the kinds of dtype, how many axes.
MEMBERS = {
    "experts.npy": (1 << 29, "iu", 3),
    "decode.npy": (1 << 23, "b", 1),
    "tokens.npy": (1 << 26, "iu", 1),
    "about.npy": (1 << 23, "u", 1),
}
ABOUT = {"num_experts": (int,), "model": (str,), "seed": (int, type(None)), "prompt": (str,)}


class TraceError(ValueError):
    """A trace is damaged, or does not fit the model that it is used with."""


@dataclass(eq=False)
class Trace:
    """The routing of one run.

    Do not change a trace, make another one: the replay caches what it computes from a trace.
    """

    experts: np.ndarray  # [T, L, K] uint16: each token's experts in each layer, in router order
    phase: np.ndarray  # [T] "decode", or "prefill" if the call had other tokens too
    tokens: np.ndarray  # [T] the model's input token ids; ``prefill.tokens`` are the prompt's
    num_experts: int = 0  # E; 0 means the largest expert id plus one
    model: str = ""  # the name of the model, or of what made the trace
    seed: int | None = None  # the seed of the sampling or the synthesis; None for a greedy run
    prompt: str = ""  # the text that was continued, or a description of it

    def __post_init__(self):
        if self.experts.ndim != 3:
            raise TraceError(f"Trace.experts: expected [T, L, K], got shape {self.experts.shape}.")
        T = len(self.experts)
        if (len(self.phase), len(self.tokens)) != (T, T):
            raise TraceError(
                f"Trace: expected {T} phases and tokens, as experts has, got {len(self.phase)} "
                f"and {len(self.tokens)}."
            )
        most = int(self.experts.max()) + 1 if self.experts.size else 0
        if self.experts.size and self.experts.min() < 0:
            raise TraceError(f"Trace.experts: expected 0 or more, got {self.experts.min()}.")
        self.num_experts = self.num_experts or most
        if most > self.num_experts:
            raise TraceError(
                f"Trace.num_experts: expected at least {most}, as experts has them, "
                f"got {self.num_experts}."
            )

    def __len__(self):
        return len(self.experts)

    def __str__(self):
        T, L, K = self.experts.shape
        n = int((self.phase == "decode").sum())
        shape = f"{L} layers, top-{K} of {self.num_experts} experts"
        return f"{self.model or 'trace'}: {T} tokens ({n} decoded), {shape}"

    def __getitem__(self, rows: slice | np.ndarray) -> "Trace":
        """The trace of some tokens; ``rows`` is a slice or an array ``[T]`` of bool."""
        return replace(
            self, experts=self.experts[rows], phase=self.phase[rows], tokens=self.tokens[rows]
        )

    @property
    def prefill(self) -> "Trace":
        """The tokens of calls with several tokens: prompts."""
        return self[self.phase == "prefill"]

    @property
    def decode(self) -> "Trace":
        """The decoded tokens: those of calls with one token."""
        return self[self.phase == "decode"]

    def save(self, path: str | Path) -> None:
        """Write a compressed ``.npz``. An older file stays until the new one is complete."""
        path = Path(path)
        about = {"moelab_trace": FORMAT, **{name: getattr(self, name) for name in ABOUT}}
        partial = path.with_name(path.name + ".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as f:
            np.savez_compressed(
                f,
                experts=self.experts.astype(np.uint8) if self.num_experts <= 256 else self.experts,
                decode=np.asarray(self.phase == "decode"),
                tokens=np.asarray(self.tokens, np.int32),
                about=np.frombuffer(json.dumps(about).encode(), np.uint8),
            )
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a file that ``save`` wrote; ``TraceError`` if it is something else or damaged."""
        try:
            regular_file(Path(path))
            trace = cls(**_read(path))  # the class checks the range of the experts
            trace.experts = trace.experts.astype(np.uint16)
            return trace
        except FileNotFoundError:
            raise
        except Exception as e:  # zipfile, zlib, numpy and json raise many types of errors
            raise TraceError(
                f"{path}: expected a trace as Trace.save writes it, got something else or a "
                f"damaged file ({describe(e)}). Record it again, or restore the file."
            ) from e


def _read(path):
    """Read a trace's fields from its file. Nothing is unpacked before its size is checked."""
    with np.load(path, allow_pickle=False) as file:
        sizes = [(info.filename, info.file_size) for info in file.zip.infolist()]
        if sorted(name for name, _ in sizes) != sorted(MEMBERS):
            raise ValueError(f"expected the members {', '.join(MEMBERS)}, got {dict(sizes)}")
        for name, size in sizes:
            if size > (most := MEMBERS[name][0]):
                raise ValueError(f"{name} unpacks to {size} bytes, expected {most} at most")
        arrays = {name: file[name] for name in MEMBERS}
    for name, (_, kinds, ndim) in MEMBERS.items():
        if arrays[name].dtype.kind not in kinds or arrays[name].ndim != ndim:
            raise ValueError(f"{name}: unexpected {arrays[name].dtype} {arrays[name].shape}")
    experts, decode, tokens, about = arrays.values()
    about = json.loads(about.tobytes())
    if not isinstance(about, dict) or about.pop("moelab_trace", None) != FORMAT:
        raise ValueError("another version's format")
    if about.keys() != ABOUT.keys() or any(type(about[k]) not in ABOUT[k] for k in ABOUT):
        raise ValueError(f"expected {', '.join(ABOUT)} of their types, got {about}")
    if not 0 <= about["num_experts"] <= MAX_EXPERTS:
        raise ValueError(f"expected num_experts up to {MAX_EXPERTS}, got {about['num_experts']}")
    phase = np.where(decode, "decode", "prefill")
    return {"experts": experts, "phase": phase, "tokens": tokens.astype(np.int64), **about}
