"""Which parts of a model are experts, and where each expert's bytes lie in the files.

A model's ``sanitize`` renames, splits or stacks tensors. ``locate_experts`` finds where each
expert's tensors came from, and reads none. ``streaming/build.py`` says what a new family needs.
"""

from math import prod

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from .checkpoint import GATE_UP, Checkpoint, CheckpointError, ExpertTensor, Tensor


def expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of each ``SwitchGLU`` and ``SwitchMLP`` of a model, in layer order."""
    return [
        (path, m)
        for path, m in reversed(list(model.named_modules()))
        if isinstance(m, (SwitchGLU, SwitchMLP))
    ]


def expert_parameters(module: nn.Module) -> dict[str, mx.array]:
    """The parameters ``[E, ...]`` of a module's experts, by names such as ``up_proj.weight``."""
    names = ("fc1", "fc2") if isinstance(module, SwitchMLP) else (*GATE_UP, "down_proj")
    return {f"{name}.{k}": p for name in names for k, p in tree_flatten(module[name].parameters())}


def num_experts(module: nn.Module) -> int:
    """The number of experts in a ``SwitchGLU`` or ``SwitchMLP``."""
    return (module.fc1 if "fc1" in module else module.gate_proj).num_experts


def read_experts(tensor: ExpertTensor) -> mx.array:
    """Read one parameter of all experts: ``[E, ...]`` in the type on disk."""
    rows, nbytes = [], tensor.nbytes
    for file, offset in zip(tensor.files, tensor.offsets):
        rows.append(np.fromfile(file, np.uint8, nbytes, offset=offset))
        if len(rows[-1]) < nbytes:
            raise CheckpointError(f"{file}: {tensor.name}: it ends before byte {offset + nbytes}.")
    return mx.array(np.stack(rows)).view(tensor.dtype).reshape(len(rows), *tensor.shape)


def locate_experts(
    model: nn.Module, checkpoint: Checkpoint, wanted: dict[str, mx.array]
) -> dict[str, ExpertTensor]:
    """Find where the experts' parameters lie in the files; ``wanted`` has the parameters by path.

    The model's ``sanitize`` runs on placeholders. A placeholder that comes out unchanged is a whole
    tensor on disk. Other placeholders are followed row by row; a parameter is left out if an
    expert's rows are not contiguous in a file.
    """
    if checkpoint.packed:
        return {path: t for path, t in checkpoint.packed.items() if path in wanted}
    placeholders, sanitize, sanitized, same = _sanitized(model, checkpoint)

    found, rest = {}, {}
    for path, p in wanted.items():
        tensor = same.get(path)
        if tensor is not None and tensor.shape == p.shape:
            nbytes = tensor.nbytes // p.shape[0]
            places = [(tensor, e * nbytes) for e in range(p.shape[0])]
            found[path] = _expert_tensor(path, places, nbytes, p)
        elif path in sanitized:
            rest[path] = p
    if rest:
        untouched = {id(v) for v in sanitized.values()}
        changed = [n for n, v in placeholders.items() if id(v) not in untouched]
        found |= _follow_rows(checkpoint, sanitize, placeholders, changed, rest)
    return found


def _sanitized(model, checkpoint):
    """Run a model's ``sanitize`` on placeholders, and find the tensors that it only renames."""
    placeholders = {
        name: mx.broadcast_to(mx.zeros((), t.dtype), t.shape)
        for name, t in checkpoint.tensors.items()
    }
    sanitize = getattr(model, "sanitize", lambda weights: weights)
    sanitized = sanitize(dict(placeholders))
    tensors = {id(v): checkpoint.tensors[name] for name, v in placeholders.items()}
    same = {path: tensors[id(v)] for path, v in sanitized.items() if id(v) in tensors}
    return placeholders, sanitize, sanitized, same


def unchanged(
    model: nn.Module, checkpoint: Checkpoint, wanted: dict[str, mx.array]
) -> dict[str, Tensor]:
    """Return, by path, the tensors of wanted parameters that ``sanitize`` does not change."""
    *_, same = _sanitized(model, checkpoint)
    return {p: same[p] for p, a in wanted.items() if p in same and same[p].shape == a.shape}


def _expert_tensor(path, places, nbytes, p):
    """Make an ``ExpertTensor``; ``places`` has each expert's tensor and first byte in it."""
    files, offsets = [t.file for t, _ in places], [t.offset + first for t, first in places]
    return ExpertTensor(path, files, offsets, nbytes, p.shape[1:], places[0][0].dtype)


def _follow_rows(checkpoint, sanitize, placeholders, changed, wanted):
    # The placeholder of each changed tensor holds row numbers in two equal columns. Two columns
    # take little memory, and reveal a transposition or any arithmetic.
    numbered, starts, sources = dict(placeholders), [], []
    row = 1 << 40  # so large that a cast to a narrower type would change it
    for name in changed:
        t = checkpoint.tensors[name]
        *rows, width = t.shape if len(t.shape) > 1 else (*t.shape, 1)
        ids = (row + mx.arange(prod(rows)).astype(mx.int64)).reshape(rows)
        numbered[name] = mx.broadcast_to(ids[..., None], (*rows, 2)) if len(t.shape) > 1 else ids
        starts.append(row)
        sources.append((t, width * t.dtype.size))
        row += prod(rows) + 1  # a gap, so that two tensors are never taken for one
    try:
        sanitized = sanitize(numbered)
    except Exception:  # a sanitize that computes with its weights cannot be followed
        return {}

    found, starts = {}, np.array(starts)
    for path, p in wanted.items():
        ids = sanitized.get(path)
        if ids is None or ids.dtype != mx.int64 or ids.ndim != p.ndim:
            continue
        ids = np.array(ids)
        if p.ndim > 2:
            if (ids[..., :1] != ids).any():
                continue
            ids = ids[..., 0]
        if ids.shape[0] != p.shape[0] or ids.shape[1:] != p.shape[1 : max(p.ndim - 1, 2)]:
            continue
        ids = ids.reshape(p.shape[0], -1)
        if (np.diff(ids, axis=1) != 1).any():
            continue
        of = np.searchsorted(starts, ids[:, 0], side="right") - 1
        rows = [(*sources[s], int(i - starts[s])) for s, i in zip(of, ids[:, 0])]
        (nbytes, dtype), *others = {(ids.shape[1] * unit, t.dtype) for t, unit, _ in rows}
        if not others and nbytes == prod(p.shape[1:]) * dtype.size:
            places = [(t, row * unit) for t, unit, row in rows]
            found[path] = _expert_tensor(path, places, nbytes, p)
    return found
