"""Where every expert's bytes lie on disk.

A checkpoint is a folder of safetensors files. mlx-lm loads it whole and lets the
model's ``sanitize`` rename, split or stack what it finds. This module finds out which
bytes of which file each expert of the finished model came from, without reading them.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
from huggingface_hub import parse_local_safetensors_file_metadata
from huggingface_hub.errors import SafetensorsParsingError
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.utils import load_config

# safetensors' dtype names, as mx.load maps them.
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

JOURNAL = "repack.json"  # lies in the folder for as long as ``repack`` is at work there

# What the parser raises at a malformed header.
PARSE_ERRORS = (
    SafetensorsParsingError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    RecursionError,
)


class CheckpointError(ValueError):
    """Something in a checkpoint's files is missing, damaged or cannot be streamed."""


@dataclass(frozen=True)
class Tensor:
    """One tensor's place: ``nbytes`` bytes at ``offset`` of ``file``."""

    name: str
    file: Path
    offset: int
    nbytes: int
    shape: tuple
    dtype: mx.Dtype


@dataclass(frozen=True)
class ExpertTensor:
    """One parameter of all E experts of a layer, each expert's part contiguous on disk.

    Attributes:
        name (str): The parameter's path in the model.
        files (list[Path]): The file of each expert, E entries.
        offsets (list[int]): Its first byte there, E entries.
        nbytes (int): The bytes of one expert.
        shape (tuple): The shape of one expert.
        dtype (mx.Dtype): The type on disk.
    """

    name: str
    files: list
    offsets: list
    nbytes: int
    shape: tuple
    dtype: mx.Dtype


class Checkpoint:
    """The tensors of a model folder, each with its place on disk.

    Args:
        path (str or Path): A folder as ``mlx_lm.load`` takes it.

    Attributes:
        config (dict): The folder's ``config.json``.
        tensors (dict[str, Tensor]): Every tensor by its name in the files.
        packed (dict[str, ExpertTensor]): The experts' parameters by their path in the model,
            where ``python -m moelab repack`` has put them together; else empty.

    Raises:
        CheckpointError: If a file is missing, truncated, or its header does not fit it.
    """

    def __init__(self, path):
        self.path = Path(path)
        if (self.path / JOURNAL).exists():
            raise CheckpointError(
                f"{self.path}: an unfinished copy that an interrupted 'python -m moelab repack' left. "
                "Run the same command again, it goes on from there."
            )
        if not (self.path / "config.json").is_file():
            raise CheckpointError(
                f"{self.path}: expected a model folder with a config.json, found none. "
                "Give the folder that mlx_lm.load would take."
            )
        try:
            self.config = load_config(self.path)
        except json.JSONDecodeError as e:
            raise CheckpointError(
                f"{self.path / 'config.json'}: not JSON ({e}). Download it again."
            ) from e
        self.tensors, self.packed = {}, {}
        for file in self._files():
            self.tensors.update(read_header(file))
        for file in sorted(self.path.glob("experts-*.safetensors")):
            self.packed.update(read_packed(file))

    @property
    def nbytes(self):
        """The bytes of all tensors together."""
        experts = sum(t.nbytes * len(t.offsets) for t in self.packed.values())
        return experts + sum(t.nbytes for t in self.tensors.values())

    def model_classes(self, config):
        """For mlx-lm's ``load_model``: its classes, with stand-ins for packed experts.

        Returns:
            tuple: The model's class and that of its arguments.
        """
        cls, args = mlx_lm_utils._get_classes(config)
        stand_ins = {
            path: mx.broadcast_to(mx.zeros((), t.dtype), (len(t.offsets), *t.shape))
            for path, t in self.packed.items()
        }

        def sanitize(model, weights):
            if hasattr(cls, "sanitize"):
                weights = cls.sanitize(model, weights)
            return {**weights, **stand_ins}

        return type(cls.__name__, (cls,), {"sanitize": sanitize}) if stand_ins else cls, args

    def _files(self):
        # The same files as mlx-lm reads; the index only says which must be there.
        files = sorted(self.path.glob("model*.safetensors"))
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            try:
                named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as e:
                raise CheckpointError(
                    f"{index}: expected JSON with a 'weight_map', got {e!r}. "
                    "Download it again."
                ) from e
            missing = [n for n in named if not (self.path / n).is_file()]
            if missing:
                raise CheckpointError(
                    f"{index} names {len(named)} files, of which {len(missing)} are not "
                    f"in the folder: {', '.join(missing[:3])}. Download them again."
                )
        if not files:
            raise CheckpointError(
                f"{self.path}: expected model*.safetensors, found none. Give the folder "
                "that mlx_lm.load would take."
            )
        return files


def read_header(file):
    """Read where the tensors of one safetensors file lie.

    Args:
        file (Path): The file.

    Returns:
        dict[str, Tensor]: Every tensor by name.

    Raises:
        CheckpointError: If the header cannot be parsed, or places a tensor outside the
            file, over another one, or in a length that its shape does not have.
    """

    def wrong(what):
        return CheckpointError(f"{file}: {what}. The file is damaged: download it again.")

    size = file.stat().st_size
    with open(file, "rb") as f:
        header_nbytes = int.from_bytes(f.read(8), "little")
    if size < 8 or header_nbytes > size - 8:
        raise wrong(
            f"expected a header of {header_nbytes} bytes, the file has only {size}"
        )
    try:
        metadata = parse_local_safetensors_file_metadata(file)
        entries = sorted(metadata.tensors.items(), key=lambda kv: kv[1].data_offsets[0])
    except PARSE_ERRORS as e:
        raise wrong(f"its header is not a safetensors header ({e})") from e

    data = 8 + header_nbytes
    tensors, end = {}, 0
    for name, info in entries:
        if info.dtype not in DTYPES:
            raise wrong(f"tensor {name} has the unknown dtype {info.dtype!r}")
        dtype = DTYPES[info.dtype]
        numbers = (*info.shape, *info.data_offsets)
        if len(info.data_offsets) != 2 or not all(type(n) is int and n >= 0 for n in numbers):
            raise wrong(f"tensor {name} has shape {info.shape}, offsets {info.data_offsets}")
        first, last = info.data_offsets
        nbytes = prod(info.shape) * dtype.size
        if last - first != nbytes:
            raise wrong(
                f"tensor {name} {info.dtype}{list(info.shape)} needs {nbytes} bytes, "
                f"its offsets {first} to {last} hold {last - first}"
            )
        if first < end:
            raise wrong(f"tensor {name} starts at {first}, inside the one before it")
        end = last
        if data + last > size:
            raise wrong(
                f"tensor {name} ends at byte {data + last}, the file has only {size} "
                "(truncated?)"
            )
        tensors[name] = Tensor(name, file, data + first, nbytes, tuple(info.shape), dtype)
    return tensors


def read_packed(file):
    """Read where the experts of one layer lie in a file that ``repack`` wrote.

    Args:
        file (Path): The file.

    Returns:
        dict[str, ExpertTensor]: By the parameter's path in the model.

    Raises:
        CheckpointError: If the file is damaged.
    """
    tensors = read_header(file)
    try:
        metadata = parse_local_safetensors_file_metadata(file).metadata
        E, stride = tensors["experts"].shape
        found = {}
        for p in json.loads(metadata["parameters"]):
            dtype, shape, name = DTYPES[p["dtype"]], tuple(p["shape"]), f"{metadata['path']}.{p['name']}"
            nbytes = prod(shape) * dtype.size
            if not 0 <= p["offset"] <= stride - nbytes:
                raise ValueError(f"{name} takes {nbytes} bytes from {p['offset']} on, an expert has {stride}")
            first = tensors["experts"].offset + p["offset"]
            offsets = [first + e * stride for e in range(E)]
            found[name] = ExpertTensor(name, [file] * E, offsets, nbytes, shape, dtype)
    except PARSE_ERRORS as e:
        raise CheckpointError(
            f"{file}: expected the experts of a layer as 'python -m moelab repack' writes them, got {e!r}. "
            "Repack the model again."
        ) from e
    return found


def read_experts(tensor):
    """Read one parameter of all experts.

    Args:
        tensor (ExpertTensor): Where they lie.

    Returns:
        mx.array: ``[E, ...]`` in the type on disk.
    """
    rows = np.empty((len(tensor.offsets), tensor.nbytes), np.uint8)
    for row, file, offset in zip(rows, tensor.files, tensor.offsets):
        with open(file, "rb", buffering=0) as f:
            f.seek(offset)
            if f.readinto(row) != tensor.nbytes:
                raise CheckpointError(f"{file}: {tensor.name}: the file ends before byte {offset + tensor.nbytes}.")
    return mx.array(rows).view(tensor.dtype).reshape(len(rows), *tensor.shape)


def expert_modules(model):
    """The modules that hold experts: ``[(path, SwitchGLU or SwitchMLP)]`` in layer order."""
    return [
        (path, m)
        for path, m in reversed(list(model.named_modules()))
        if isinstance(m, (SwitchGLU, SwitchMLP))
    ]


def expert_parameters(module):
    """What a ``SwitchGLU`` or ``SwitchMLP`` holds for each expert.

    A family may hang more on the module; that is not the experts'.

    Returns:
        dict[str, mx.array]: ``[E, ...]`` by name, such as ``up_proj.weight``.
    """
    names = ("fc1", "fc2") if isinstance(module, SwitchMLP) else PROJECTIONS
    return {
        f"{name}.{k}": p
        for name in names
        for k, p in tree_flatten(module[name].parameters())
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
GATE_UP = PROJECTIONS[:2]


def packing_order(names):
    """The order in which an expert's parameters are packed: weights first, gate beside up.

    Args:
        names (Iterable[str]): As ``expert_parameters`` names them.
    """

    def place(name):
        linear, param = name.rsplit(".", 1)
        return param != "weight", linear not in GATE_UP, param != "scales", param, linear

    return sorted(names, key=place)


def locate_experts(model, checkpoint):
    """Find where the experts' parameters lie in the files.

    Runs the model's own ``sanitize`` over stand-ins: what comes out untouched is a whole
    tensor of the file; what was split or stacked is followed row by row.

    Args:
        model (nn.Module): The model as mlx-lm built it, experts still in place.
        checkpoint (Checkpoint): Its files.

    Returns:
        dict[str, ExpertTensor]: By the parameter's path in the model. A parameter whose
        rows are not contiguous in the files is left out.
    """
    wanted = {
        f"{path}.{name}": p
        for path, module in expert_modules(model)
        for name, p in expert_parameters(module).items()
    }
    if checkpoint.packed:
        return {path: t for path, t in checkpoint.packed.items() if path in wanted}
    stand_ins = {
        name: mx.broadcast_to(mx.zeros((), t.dtype), t.shape)
        for name, t in checkpoint.tensors.items()
    }
    sanitize = getattr(model, "sanitize", lambda weights: weights)
    sanitized = sanitize(dict(stand_ins))
    names = {id(v): name for name, v in stand_ins.items()}

    found, rest = {}, []
    for path, p in wanted.items():
        tensor = checkpoint.tensors.get(names.get(id(sanitized.get(path))))
        if tensor is not None and tensor.shape == p.shape:
            nbytes = tensor.nbytes // p.shape[0]
            found[path] = ExpertTensor(
                path,
                [tensor.file] * p.shape[0],
                [tensor.offset + e * nbytes for e in range(p.shape[0])],
                nbytes,
                p.shape[1:],
                tensor.dtype,
            )
        elif path in sanitized:
            rest.append(path)
    if rest:
        untouched = {id(v) for v in sanitized.values()}
        changed = [n for n, v in stand_ins.items() if id(v) not in untouched]
        found.update(_follow_rows(checkpoint, sanitize, stand_ins, changed, wanted, rest))
    return found


def _follow_rows(checkpoint, sanitize, stand_ins, changed, wanted, paths):
    # Each changed tensor is stood in for by the numbers of its rows, two equal columns
    # wide: cheap, and a transposition or any arithmetic shows.
    numbered, starts, sources = dict(stand_ins), [], []
    row = 1 << 40  # no narrower type can hold these, so a cast shows too
    for name in changed:
        t = checkpoint.tensors[name]
        if len(t.shape) < 2:
            rows, unit, view = t.shape, t.dtype.size, t.shape
        else:
            rows, unit = t.shape[:-1], t.shape[-1] * t.dtype.size
            view = (*rows, 2)
        ids = row + mx.arange(prod(rows)).astype(mx.int64)
        ids = ids.reshape(rows if len(t.shape) < 2 else (*rows, 1))
        numbered[name] = mx.broadcast_to(ids, view)
        starts.append(row)
        sources.append((t, unit, prod(rows)))
        row += prod(rows) + 1  # a gap, so that two tensors never look like one
    try:
        sanitized = sanitize(numbered)
    except Exception:  # a sanitize that computes on its weights cannot be followed
        return {}

    found, starts = {}, np.array(starts)
    for path in paths:
        ids, p = sanitized.get(path), wanted[path]
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
        source = np.searchsorted(starts, ids[:, 0], side="right") - 1
        if (np.diff(ids, axis=1) != 1).any():
            continue
        parts = [sources[s] for s in source]
        nbytes = {ids.shape[1] * unit for _, unit, _ in parts}
        dtypes = {t.dtype for t, _, _ in parts}
        if len(nbytes) > 1 or len(dtypes) > 1 or min(nbytes) != _nbytes(p, min(dtypes, key=str)):
            continue
        found[path] = ExpertTensor(
            path,
            [t.file for t, _, _ in parts],
            [
                t.offset + int(i - starts[s]) * unit
                for (t, unit, _), s, i in zip(parts, source, ids[:, 0])
            ],
            nbytes.pop(),
            p.shape[1:],
            dtypes.pop(),
        )
    return found


def _nbytes(p, dtype):
    return prod(p.shape[1:]) * dtype.size
