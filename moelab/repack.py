"""``repack``: write a checkpoint in which one read brings one expert.

In mlx-lm's layout the nine parameters of an expert are nine ranges of a file, gigabytes apart. In
the packed layout each MoE layer has a file of its own, a safetensors file with one tensor
``experts [E, stride]`` of bytes. Expert e is row e, which begins on a page of the disk and holds
its parameters in the order of ``packing_order``. ``moelab.load`` reads both layouts.
"""

import errno
import json
import os
import shutil
from contextlib import ExitStack
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from tqdm import tqdm

from .checkpoint import (
    DTYPES,
    JOURNAL,
    PAGE_NBYTES,
    Checkpoint,
    CheckpointError,
    mlx_lm_model,
    packed_header,
    packing_order,
    try_out,
)
from .experts import expert_modules, expert_parameters, locate_experts
from .partial import begin, finish

DTYPE_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}
SPARE_NBYTES = 64 << 20  # kept free on the disk for headers, the configuration, the tokenizer


def repack(model: str | Path, out: str | Path, progress: bool = True) -> Path:
    """Write a model folder for ``moelab.load`` with each expert's bytes in one piece.

    Until its last byte is on disk and has been compared, the folder is called ``OUT.partial``. A
    run that was interrupted goes on where it stopped.
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
    copied = [file for file in source.path.iterdir() if _is_copied(file)]
    written = ["model.safetensors", "config.json", *(file.name for file in copied)]
    for i in range(len(layers)):
        written += [_file_name(i), _file_name(i, "writing")]
    partial = begin(out, JOURNAL, written, _identity(source))
    (partial / "config.json").unlink(missing_ok=True)
    free = shutil.disk_usage(partial).free + sum(f.stat().st_size for f in partial.iterdir())
    if free < total + SPARE_NBYTES:
        raise OSError(
            errno.ENOSPC,
            f"not enough disk in {out.absolute().parent}: the packed model takes "
            f"{total / 1e9:.2f} GB, {free / 1e9:.2f} GB is free",
        )
    with tqdm(
        total=total, unit="B", unit_scale=True, desc=out.name, disable=not progress, leave=False
    ) as bar:
        for i, layer in enumerate(layers):
            file, half = partial / _file_name(i), partial / _file_name(i, "writing")
            if not file.exists():  # it gets this name only when it is complete
                try:
                    layer.write(half)
                    layer.compare(half)
                finally:
                    source.check_unchanged()
                os.replace(half, file)
            bar.update(layer.nbytes)
        mx.save_safetensors(
            str(partial / "model.safetensors"), backbone, metadata={"format": "mlx"}
        )
        bar.update(bar.total - bar.n)
    for file in copied:
        shutil.copyfile(file, partial / file.name)
    mlx_lm_utils.save_config(config, partial / "config.json")
    _compare_backbone(partial, backbone)
    for file in partial.iterdir():
        _to_disk(file)
    source.check_unchanged(*copied)
    finish(partial, out, JOURNAL)
    _to_disk(out.absolute().parent)
    return out


def _file_name(layer, suffix="safetensors"):
    return f"experts-{layer:05d}.{suffix}"


def _is_copied(file):
    """Whether a file of the source is copied unchanged."""
    made = ("config.json", "model.safetensors.index.json", JOURNAL)
    return file.is_file() and file.suffix != ".safetensors" and file.name not in made


def _identity(source):
    """The source's files and their stamps. A run goes on only if they are the same."""
    files = (*source.files, source.path / "config.json")
    return json.dumps([[str(file.resolve()), *source.stamps[file]] for file in files])


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
        self._header = packed_header(path, named, self.E)
        self.stride = self._header["experts"]["shape"][1]
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

    def header(self):
        """A safetensors header, padded so that the data begins on a page."""
        text = json.dumps(self._header).encode()
        text += b" " * (-(8 + len(text)) % PAGE_NBYTES)
        return len(text).to_bytes(8, "little") + text

    def write(self, file):
        """Write the packed file, and return when it is on disk."""
        with open(file, "wb") as f:
            f.write(self.header())
            for row in self.experts():
                f.write(row)
            f.flush()
            os.fsync(f.fileno())

    def compare(self, file):
        """Read the packed file back and raise if it differs from the source."""
        with open(file, "rb") as f:
            f.seek(len(self.header()))
            for e, row in enumerate(self.experts()):
                if f.read(self.stride) != row:
                    raise OSError(
                        errno.EIO,
                        f"{file}: expert {e} is not what was written: check the disk",
                    )


def _compare_backbone(partial, backbone):
    written = mx.load(str(partial / "model.safetensors"))
    for name, p in backbone.items():
        if name not in written or not mx.array_equal(_bits(written[name]), _bits(p)):
            raise OSError(
                errno.EIO,
                f"{partial / 'model.safetensors'}: {name} is not what was written: check the disk",
            )


def _bits(array):
    return mx.contiguous(array).reshape(-1).view(mx.uint8)


def _to_disk(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
