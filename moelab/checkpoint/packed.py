"""The files in which ``python -m moelab repack`` puts the experts, one for each layer."""

import json
import zlib
from collections.abc import Iterable
from math import prod
from pathlib import Path

import mlx.core as mx

from .files import CheckpointError, describe
from .headers import DTYPES, ExpertTensor, header_and_metadata

PAGE_NBYTES = 4096  # every expert of a packed file begins on a page of the disk
GATE_UP = ("gate_proj", "up_proj")  # the projections that ``fused`` mode joins


def packing_order(names: Iterable[str]) -> list[str]:
    """Sort an expert's parameters as ``repack`` packs them: weights first, gate beside up."""

    def place(name):
        linear, param = name.rsplit(".", 1)
        return param != "weight", linear not in GATE_UP, param != "scales", param, linear

    return sorted(names, key=place)


def packed_header(path: str, parameters: list[tuple], E: int) -> dict:
    """The JSON header of a layer's packed file, in which each expert begins on a page.

    ``parameters`` are name, safetensors' dtype and shape of one expert's, in ``packing_order``.
    """
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


def read_packed(file: Path) -> dict[str, ExpertTensor]:
    """Read where the experts of one layer lie in a file that ``repack`` wrote.

    The header must be the one that ``repack`` writes for the same parameters. Files of earlier
    versions have no checksum.
    """
    tensors, metadata = header_and_metadata(file, "repack the model again")
    try:
        (experts,) = tensors.values()
        E, stride = experts.shape
        path, parameters = metadata["path"], json.loads(metadata["parameters"])
        named = [(p["name"], p["dtype"], p["shape"]) for p in parameters]
        names = [name for name, _, _ in named]
        if len(set(names)) < len(names) or names != packing_order(names):
            raise ValueError(f"the parameters {', '.join(names)} in this order")
        wanted = packed_header(path, named, E)
        if "crc32" not in metadata:
            del wanted["__metadata__"]["crc32"]
            _check_types(named)
        got = {"dtype": "U8", "shape": [E, stride], "data_offsets": [0, experts.nbytes]}
        if {"__metadata__": metadata, experts.name: got} != wanted or experts.dtype != mx.uint8:
            raise ValueError("sizes, offsets or a checksum that do not fit each other")
        found = {}
        for p in parameters:
            dtype, shape, name = DTYPES[p["dtype"]], tuple(p["shape"]), f"{path}.{p['name']}"
            first = experts.offset + p["offset"]
            offsets = [first + e * stride for e in range(E)]
            nbytes = prod(shape) * dtype.size
            found[name] = ExpertTensor(name, [file] * E, offsets, nbytes, shape, dtype)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise CheckpointError(
            f"{file}: expected the experts of a layer as 'python -m moelab repack' writes them, "
            f"got {describe(e)}. Repack the model again."
        ) from e
    return found


def _check_types(parameters):
    """Refuse types that contradict each other, in a file that has no checksum."""
    names, floating = {name for name, _, _ in parameters}, set()
    for name, dtype, _ in parameters:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and f"{module}.scales" in names:
            right = dtype == "U32"
        elif kind == "scales" and f"{module}.biases" not in names:
            right = dtype == "U8"
        else:
            right = mx.issubdtype(DTYPES[dtype], mx.floating)
            floating.add(dtype)
        if not right or len(floating) > 1:
            raise ValueError(f"{name} as {dtype}")
