"""Reads safetensors headers: safetensors' package does not say where the tensors begin."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from .files import FOR_MLX, CheckpointError, readable, regular_file, shorten

# MLX's type for each dtype name of the safetensors format, as in mx.load.
DTYPES = {
    "F64": mx.float64, "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16,
    "I64": mx.int64, "I32": mx.int32, "I16": mx.int16, "I8": mx.int8,
    "U64": mx.uint64, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8,
    "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8, "BOOL": mx.bool_, "C64": mx.complex64,
}  # fmt: skip

MAX_DIMENSION = 2**31  # MLX counts the elements along a dimension in 32 bits
PAGE_NBYTES = 4096  # each expert's offset in a packed file is a multiple of a page
GATE_UP = ("gate_proj", "up_proj")  # the projections that ``fused`` mode joins

DTYPE_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}


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
    """Where one parameter of a layer's E experts lies; each expert's part is contiguous."""

    name: str  # path in the model
    files: list[Path]  # each expert's file, ``[E]``; a ``Session`` opens them
    offsets: list[int]  # ``[E]``, each expert's first byte in its file
    nbytes: int  # of one expert
    shape: tuple[int, ...]  # of one expert
    dtype: mx.Dtype  # on disk


def read_header(file: Path, remedy: str = "download it again") -> dict[str, Tensor]:
    """Read where the tensors of one safetensors file lie."""

    def wrong(what):
        return CheckpointError(f"{file}: {what}. The file is damaged: {remedy}.")

    size = regular_file(file)
    try:
        with safe_open(file, framework="np"):
            pass
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
            has = f"tensor {shorten(name)} has the dtype {entry['dtype']}, which MLX lacks"
            raise CheckpointError(f"{file}: {has}. {FOR_MLX} If this is one, download it again.")
        if any(n >= MAX_DIMENSION for n in shape):
            raise wrong(f"tensor {shorten(name)} has the shape {shorten(shape, 60)}")
        dtype = DTYPES[entry["dtype"]]
        tensors[name] = Tensor(name, file, 8 + nbytes + first, last - first, tuple(shape), dtype)
    return tensors


def merge_headers(headers: dict[Path, dict]) -> dict:
    """Join the tensors of several files by name; refuse a name that two files have."""
    holder = {}
    for file, tensors in headers.items():
        for name in tensors:
            if name in holder:
                raise CheckpointError(
                    f"{file.parent}: expected each tensor once, got {shorten(name)} in "
                    f"{holder[name].name} and in {file.name}. Remove the file that does not "
                    "belong there, or download the model again."
                )
            holder[name] = file
    return {name: headers[file][name] for name, file in holder.items()}


def packing_order(names: Iterable[str]) -> list[str]:
    """Sort an expert's parameters as ``repack`` packs them: weights first, gate beside up."""

    def place(name):
        linear, param = name.rsplit(".", 1)
        return param != "weight", linear not in GATE_UP, param != "scales", param, linear

    return sorted(names, key=place)


def packed_header(path: str, parameters: list[tuple], E: int) -> dict:
    """Return a packed layer's JSON header; parameters are (name, dtype, shape) in packing order."""
    described, offset = [], 0
    for name, dtype, shape in parameters:
        described.append({"name": name, "dtype": dtype, "shape": list(shape), "offset": offset})
        offset += prod(shape) * DTYPES[dtype].size
    stride = -(-offset // PAGE_NBYTES) * PAGE_NBYTES
    text = json.dumps(described)
    crc = zlib.crc32(json.dumps([path, text, E, stride]).encode())
    return {
        "__metadata__": {"path": path, "parameters": text, "crc32": str(crc)},
        "experts": {"dtype": "U8", "shape": [E, stride], "data_offsets": [0, E * stride]},
    }


def header_bytes(header: dict, align: int = 8) -> bytes:
    """Return a safetensors file's first bytes: the header, padded so that the data is aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def read_packed(file: Path) -> dict[str, ExpertTensor]:
    """Read where experts lie in a repacked layer's file."""
    tensors = read_header(file, "repack the model again")
    lies = f"{file}: expected the experts of a layer as 'python -m moelab repack' writes them, got"
    with readable(lies, "Repack the model again."):
        with safe_open(file, framework="np") as opened:
            metadata = opened.metadata() or {}
        (experts,) = tensors.values()
        E, stride = experts.shape
        path, parameters = metadata["path"], json.loads(metadata["parameters"])
        named = [(p["name"], p["dtype"], p["shape"]) for p in parameters]
        names = [name for name, _, _ in named]
        if names != packing_order(set(names)):
            raise ValueError(f"the parameters {', '.join(names)} in this order")
        wanted = packed_header(path, named, E)
        got = {"dtype": "U8", "shape": [E, stride], "data_offsets": [0, experts.nbytes]}
        if {"__metadata__": metadata, experts.name: got} != wanted or experts.dtype != mx.uint8:
            raise ValueError("sizes, offsets or a checksum that do not fit each other")
        found = {}
        for p in parameters:
            dtype, shape, name = DTYPES[p["dtype"]], tuple(p["shape"]), f"{path}.{p['name']}"
            offsets = [experts.offset + p["offset"] + e * stride for e in range(E)]
            nbytes = prod(shape) * dtype.size
            found[name] = ExpertTensor(name, [file] * E, offsets, nbytes, shape, dtype)
    return found
