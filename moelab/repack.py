"""``repack``: write a checkpoint in which one read brings one expert.

In mlx-lm's layout an expert is nine ranges of a file, gigabytes apart. In the packed layout each
MoE layer has a safetensors file with one tensor of bytes, ``experts [E, stride]``: row e begins on
a page and holds expert e's parameters in ``packing_order``. ``moelab.load`` reads both layouts.
"""

import errno
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils as mlx_lm_utils

from .checkpoint import Checkpoint, CheckpointError, mlx_lm_model, new_folder, try_out
from .checkpoint.headers import DTYPE_NAMES, PAGE_NBYTES, header_bytes, packed_header, packing_order
from .experts import expert_modules, expert_parameters


def repack(
    model: str | Path, out: str | Path, progress: bool = True, library: str = "auto"
) -> Path:
    """Write a model folder for ``moelab.load`` with each expert's bytes in one piece.

    ``library`` is as in ``StreamConfig``. ``out`` appears only when all its bytes are on disk and
    were compared with the source.
    """
    out = Path(out)
    source = Checkpoint(model)
    if source.packed:
        raise CheckpointError(
            f"{source.path}: its experts are packed already, there is nothing to do."
        )
    loaded, config = mlx_lm_model(source, library=library)
    try_out(source, loaded)
    experts = expert_modules(loaded)
    if not experts:
        raise CheckpointError(
            f"{source.path}: expected a model with experts, found none: there is nothing to pack."
        )
    layers = [_Layer(path, module) for path, module in experts]
    packed = {f"{layer.path}.{name}" for layer in layers for name in layer.names}
    backbone = {n: p for n, p in tree_flatten(loaded.parameters()) if n not in packed}

    total = sum(layer.nbytes for layer in layers) + sum(p.nbytes for p in backbone.values())
    made = ("config.json", "model.safetensors.index.json")
    others = (f for f in source.path.iterdir() if f.suffix != ".safetensors" and f.name not in made)
    copied = [f for f in others if f.is_file() and f.name[0] != "."]  # not Finder's .DS_Store
    # The files of a Hub snapshot link into one folder. Another link may lead to a secret file.
    places = {source.path.resolve(), *(file.resolve().parent for file in source.files)}
    for file in copied:
        if file.resolve().parent not in places:
            raise CheckpointError(
                f"{file}: expected a file beside the weights, got a link to {file.resolve()}. Copy "
                "it to its place, or remove the link."
            )
    source.check_unchanged(*copied)
    with new_folder(out, total, progress) as (folder, bar):
        for i, layer in enumerate(layers):
            try:
                layer.write(folder / f"experts-{i:05d}.safetensors")
            except RuntimeError as error:  # MLX failed to read
                raise OSError(f"{source.path}: {layer.path}: {error}. Check the disk.") from error
            finally:
                source.check_unchanged()
            bar.update(layer.nbytes)
        mx.save_safetensors(str(folder / "model.safetensors"), backbone, metadata={"format": "mlx"})
        written = mx.load(str(folder / "model.safetensors"))
        for name, p in backbone.items():
            _compare(np.array_equal(_bits(written[name]), _bits(p)), folder, name)
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        mlx_lm_utils.save_config(config, folder / "config.json")
        source.check_unchanged(*copied)
    return out


class _Layer:
    """The experts of one layer. ``write`` reads parameter by parameter, each for all experts."""

    def __init__(self, path, module):
        self.path, self._module, parameters = path, module, expert_parameters(module)
        # Vectors, such as biases, are a few KB for each expert and stay with the backbone.
        self.names = packing_order(name for name, p in parameters.items() if p.ndim > 2)
        self._E = parameters[self.names[0]].shape[0]
        named = [(n, DTYPE_NAMES[parameters[n].dtype], parameters[n].shape[1:]) for n in self.names]
        header = packed_header(path, named, self._E)
        self._header = header_bytes(header, PAGE_NBYTES)  # so that the data begins on a page
        self._stride = header["experts"]["shape"][1]
        self.nbytes = self._E * self._stride

    def write(self, file):
        """Write the packed file, and compare it with the source."""
        with open(file, "wb+") as f:
            offset = f.write(self._header)
            f.truncate(offset + self.nbytes)
            for name in self.names:
                rows = _bits(expert_parameters(self._module)[name]).reshape(self._E, -1)
                for e, row in enumerate(rows):
                    f.seek(offset + e * self._stride)
                    f.write(row)
                for e, row in enumerate(rows):
                    f.seek(offset + e * self._stride)
                    _compare(f.read(len(row)) == row.tobytes(), file, f"{name}, expert {e}")
                offset += rows.shape[1]
                self._module.update(tree_unflatten([(name, mx.array(0))]))  # frees its memory


def _compare(is_same, file, what):
    if not is_same:
        raise OSError(errno.EIO, f"{file}: {what} is not what was written: check the disk")


def _bits(array):
    # MLX counts an axis in 32 bits: too few for the bytes of a large parameter of all experts.
    return np.asarray(mx.contiguous(mx.atleast_1d(array)).view(mx.uint8)).reshape(-1)
