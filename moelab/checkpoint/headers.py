"""Where each tensor lies in the safetensors files of a model folder.

``safetensors`` checks a header. Its Python package does not say where a tensor begins, so the
header is parsed again here.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from .files import CheckpointError, regular_file, shorten

# The safetensors format's names of dtypes, as mx.load maps them.
DTYPES = {
    "F64": mx.float64,
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "I64": mx.int64,
    "I32": mx.int32,
    "I16": mx.int16,
    "I8": mx.int8,
    "U64": mx.uint64,
    "U32": mx.uint32,
    "U16": mx.uint16,
    "U8": mx.uint8,
    "BOOL": mx.bool_,
    "F8_E4M3": mx.uint8,
    "F8_E8M0": mx.uint8,
    "C64": mx.complex64,
}

MAX_DIMENSION = 2**31  # MLX counts the elements along a dimension in 32 bits


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: ``nbytes`` bytes at ``offset`` of ``file``."""

    name: str
    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


@dataclass(frozen=True)
class ExpertTensor:
    """Where one parameter of all E experts of a layer lies. Each expert's part is contiguous."""

    name: str  # path in the model
    files: list[Path]  # of each expert, ``[E]``; a ``Session`` has them opened
    offsets: list[int]  # ``[E]``, each expert's first byte in its file
    nbytes: int  # of one expert
    shape: tuple[int, ...]  # of one expert
    dtype: mx.Dtype  # on disk


def read_header(file: Path, remedy: str = "download it again") -> dict[str, Tensor]:
    """Read where the tensors of one safetensors file lie."""
    return header_and_metadata(file, remedy)[0]


def header_and_metadata(file: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read where the tensors of one safetensors file lie, and its metadata."""

    def wrong(what):
        return CheckpointError(f"{file}: {what}. The file is damaged: {remedy}.")

    size = regular_file(file)
    try:
        with safe_open(file, framework="np") as opened:
            metadata = opened.metadata() or {}
    except SafetensorError as e:
        raise wrong(f"safetensors cannot read the header of its {size} bytes ({shorten(e)})") from e
    with open(file, "rb") as f:
        nbytes = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(nbytes))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        shape, (first, last) = entry["shape"], entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise wrong(f"tensor {shorten(name)} has the dtype {entry['dtype']}, which MLX has not")
        if any(n >= MAX_DIMENSION for n in shape):
            raise wrong(f"tensor {shorten(name)} has the shape {shorten(shape, 60)}")
        dtype = DTYPES[entry["dtype"]]
        tensors[name] = Tensor(name, file, 8 + nbytes + first, last - first, tuple(shape), dtype)
    return tensors, metadata


def merge_headers(headers: dict[Path, dict]) -> dict:
    """Join the tensors of several files by name, and refuse a name that two files have."""
    merged, holder = {}, {}
    for file, tensors in headers.items():
        for name, tensor in tensors.items():
            if name in merged:
                raise CheckpointError(
                    f"{file.parent}: expected each tensor once, got {shorten(name)} in "
                    f"{holder[name].name} and in {file.name}. Remove the file that does not "
                    "belong there, or download the model again."
                )
            merged[name], holder[name] = tensor, file
    return merged
