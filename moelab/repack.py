"""``repack``: write a checkpoint in which one read brings one expert.

In mlx-lm's layout the nine parameters of an expert are nine ranges of a file, gigabytes apart. In
the packed layout each MoE layer has a file of its own, a safetensors file with one tensor
``experts [E, stride]`` of bytes. Expert e is row e, which begins on a page of the disk and holds
its parameters in the order of ``packing_order``. ``moelab.load`` reads both layouts.
"""

import errno
import os
import shutil
from contextlib import ExitStack
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from .checkpoint import (
    DTYPES,
    PAGE_NBYTES,
    Checkpoint,
    CheckpointError,
    header_bytes,
    mlx_lm_model,
    new_folder,
    packed_header,
    packing_order,
    try_out,
)
from .experts import expert_modules, expert_parameters, locate_experts

DTYPE_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}


def repack(model: str | Path, out: str | Path, progress: bool = True) -> Path:
    """Write a model folder for ``moelab.load`` with each expert's bytes in one piece.

    There is no ``out`` until its last byte is on disk and has been compared.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists already: remove it or name another folder")
    source = Checkpoint(model)
    if source.packed:
        raise CheckpointError(
            f"{source.path}: its experts are packed already, there is nothing to do."
        )
    loaded, config = mlx_lm_model(source)
    try_out(source, loaded)
    experts = expert_modules(loaded)
    if not experts:
        raise CheckpointError(
            f"{source.path}: expected a model with experts, found none: there is nothing to pack."
        )
    located = locate_experts(loaded, source)
    layers = [_Layer(path, module, located) for path, module in experts]
    packed = {f"{layer.path}.{name}" for layer in layers for name in layer.names}
    backbone = {n: p for n, p in tree_flatten(loaded.parameters()) if n not in packed}

    total = sum(layer.nbytes for layer in layers) + sum(p.nbytes for p in backbone.values())
    made = ("config.json", "model.safetensors.index.json")
    others = (f for f in source.path.iterdir() if f.suffix != ".safetensors" and f.name not in made)
    copied = [file for file in others if file.is_file()]
    writing = new_folder(out, total, "the packed model", "choose another disk", progress)
    with writing as (folder, bar):
        for i, layer in enumerate(layers):
            file = folder / f"experts-{i:05d}.safetensors"
            try:
                layer.write(file)
                layer.compare(file)
            finally:
                source.check_unchanged()
            bar.update(layer.nbytes)
        mx.save_safetensors(str(folder / "model.safetensors"), backbone, metadata={"format": "mlx"})
        _compare_backbone(folder / "model.safetensors", backbone)
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        mlx_lm_utils.save_config(config, folder / "config.json")
        source.check_unchanged(*copied)
    return out


class _Layer:
    """The experts of one layer: where they lie in the source and in the packed file."""

    def __init__(self, path, module, located):
        self.path = path
        # The other parameters are a few bytes for each expert and stay with the backbone.
        parameters = {n: p for n, p in expert_parameters(module).items() if p.ndim > 2}
        self.E = next(iter(parameters.values())).shape[0]
        self._sources, named = [], []
        for name in packing_order(parameters):
            p, tensor = parameters[name], located.get(f"{path}.{name}")
            dtype = tensor.dtype if tensor else p.dtype
            nbytes = prod(p.shape[1:]) * dtype.size
            self._sources.append((tensor, p, nbytes))
            named.append((name, DTYPE_NAMES[dtype], p.shape[1:]))
        self.names = [name for name, _, _ in named]
        header = packed_header(path, named, self.E)
        self.header = header_bytes(header, PAGE_NBYTES)  # so that the data begins on a page
        self.stride = header["experts"]["shape"][1]
        self.nbytes = self.E * self.stride

    def experts(self):
        """Yield the bytes of one expert after another, padded to whole pages."""
        files, arrays = {}, {}
        with ExitStack() as opened:
            for e in range(self.E):
                row = bytearray(self.stride)
                view, offset = memoryview(row), 0
                for i, (tensor, p, nbytes) in enumerate(self._sources):
                    part = view[offset : offset + nbytes]
                    offset += nbytes
                    if tensor is None:  # mlx-lm rearranges it when it loads: take its result
                        if i not in arrays:
                            arrays[i] = np.asarray(_bits(p)).reshape(self.E, -1)
                        part[:] = arrays[i][e].tobytes()
                        continue
                    path, first = tensor.files[e], tensor.offsets[e]
                    if path not in files:
                        files[path] = opened.enter_context(open(path, "rb", buffering=0))
                    files[path].seek(first)
                    if files[path].readinto(part) != nbytes:
                        raise CheckpointError(
                            f"{path}: {tensor.name}, expert {e}: expected {nbytes} bytes at "
                            f"offset {first}, the file is shorter: download it again."
                        )
                yield row

    def write(self, file):
        """Write the packed file."""
        with open(file, "wb") as f:
            f.write(self.header)
            f.writelines(self.experts())

    def compare(self, file):
        """Read the packed file back and raise if it differs from the source."""
        with open(file, "rb") as f:
            f.seek(len(self.header))
            for e, row in enumerate(self.experts()):
                if f.read(self.stride) != row:
                    raise OSError(
                        errno.EIO,
                        f"{file}: expert {e} is not what was written: check the disk",
                    )


def _compare_backbone(file, backbone):
    written = mx.load(str(file))
    for name, p in backbone.items():
        if name not in written or not mx.array_equal(_bits(written[name]), _bits(p)):
            raise OSError(errno.EIO, f"{file}: {name} is not what was written: check the disk")


def _bits(array):
    return mx.contiguous(array).reshape(-1).view(mx.uint8)
