"""A trace says which experts a model chose for every token, and can be kept in a file."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..checkpoint import describe, regular_file

PHASES = ("prefill", "decode")
FORMAT = 1  # version of the file's format
MAX_EXPERTS = 1 << 16  # the most experts of a layer, whose ids are uint16
MEMBERS = {  # the file's members, each with the most bytes that it may unpack to
    "experts.npy": 1 << 29,
    "decode.npy": 1 << 23,
    "tokens.npy": 1 << 26,
    "about.npy": 1 << 23,
}
FORMS = ("iu", 3), ("b", 1), ("iu", 1), ("u", 1)  # of the members: kinds of dtype, dimensions
ABOUT = {"num_experts": (int,), "model": (str,), "seed": (int, type(None)), "prompt": (str,)}


class TraceError(ValueError):
    """A trace is damaged, or does not fit the model that it is used with."""


@dataclass(eq=False)
class Trace:
    """The routing of one run.

    Do not change it: what the replay computes from a trace is cached. Make another one.

    Attributes:
        experts (np.ndarray): ``[T, L, K]`` uint16, the experts of every token in every MoE
            layer, in the order of the router.
        phase (np.ndarray): ``[T]`` of ``prefill`` (in a call with other tokens) or ``decode``.
        tokens (np.ndarray): ``[T]`` token ids that went in; ``prefill.tokens`` are the prompt's.
        num_experts (int): E. Default: one more than the largest expert id.
        model (str): The name of the model, or of what made the trace.
        seed (int or None): Of the sampling or the synthesis; None for a greedy run.
        prompt (str): The text that was continued, or a description of it.
    """

    experts: np.ndarray
    phase: np.ndarray
    tokens: np.ndarray
    num_experts: int = 0
    model: str = ""
    seed: int | None = None
    prompt: str = ""

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
        """The trace of some tokens: a slice, or ``[T]`` of bool."""
        return replace(
            self, experts=self.experts[rows], phase=self.phase[rows], tokens=self.tokens[rows]
        )

    @property
    def prefill(self) -> "Trace":
        """The tokens of calls with several tokens: prompts."""
        return self[self.phase == "prefill"]

    @property
    def decode(self) -> "Trace":
        """The tokens of calls with one token."""
        return self[self.phase == "decode"]

    def save(self, path: str | Path) -> None:
        """Write a compressed ``.npz``. An older file stays until the new one is complete."""
        path = Path(path)
        about = {f: getattr(self, f) for f in ("num_experts", "model", "seed", "prompt")}
        partial = path.with_name(path.name + ".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as f:
            np.savez_compressed(
                f,
                experts=self.experts.astype(np.uint8) if self.num_experts <= 256 else self.experts,
                decode=np.asarray(self.phase == "decode"),
                tokens=np.asarray(self.tokens, np.int32),
                about=np.frombuffer(
                    json.dumps({"moelab_trace": FORMAT, **about}).encode(), np.uint8
                ),
            )
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a file that ``save`` wrote. Sizes, types and the experts' range are checked.

        Args:
            path (str or Path): The file.

        Returns:
            Trace: Its content.

        Raises:
            TraceError: If it is not a trace, or damaged.
            FileNotFoundError: If there is none.
        """
        try:
            regular_file(Path(path))
            trace = cls(**_read(path))  # which checks the range of the experts
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
        infos = file.zip.infolist()
        sizes = {info.filename: info.file_size for info in infos}
        if len(infos) != len(MEMBERS) or sizes.keys() != MEMBERS.keys():
            raise ValueError(f"expected the members {', '.join(MEMBERS)}, got {', '.join(sizes)}")
        for name, most in MEMBERS.items():
            if sizes[name] > most:
                raise ValueError(f"{name} unpacks to {sizes[name]} bytes, expected {most} at most")
        arrays = {name: file[name] for name in MEMBERS}
    for (name, array), (kinds, ndim) in zip(arrays.items(), FORMS):
        if array.dtype.kind not in kinds or array.ndim != ndim:
            raise ValueError(f"{name}: unexpected type {array.dtype} and shape {array.shape}")
    experts, decode, tokens, about = arrays.values()
    about = json.loads(about.tobytes())
    if not isinstance(about, dict) or about.pop("moelab_trace", None) != FORMAT:
        raise ValueError("another version's format")
    if about.keys() != ABOUT.keys():
        raise ValueError(f"expected about {', '.join(ABOUT)}, got {', '.join(map(str, about))}")
    for key, types in ABOUT.items():
        if type(about[key]) not in types:
            raise ValueError(f"expected {key} of type {types[0].__name__}, got {about[key]!r}")
    if not 0 <= about["num_experts"] <= MAX_EXPERTS:
        raise ValueError(f"expected num_experts up to {MAX_EXPERTS}, got {about['num_experts']}")
    return {
        "experts": experts,
        "phase": np.where(decode, "decode", "prefill"),
        "tokens": tokens.astype(np.int64),
        **about,
    }
