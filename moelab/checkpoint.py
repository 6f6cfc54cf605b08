"""Where every expert's bytes lie on disk.

A checkpoint is a folder of safetensors files. mlx-lm loads it whole and lets the
model's ``sanitize`` rename, split or stack what it finds. This module finds out which
bytes of which file each expert of the finished model came from, without reading them.
"""

import json
import os
import stat
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
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

PAGE = 4096  # an expert of a packed file begins on a page of the disk
HEADER_NBYTES = 100_000_000  # the longest header that the safetensors format allows
MOST = 2**31  # MLX counts the elements along a dimension in 32 bits

# What families call the number of layers, of which mlx-lm makes as many as config.json says.
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

# What mlx.core.quantize takes; mlx-lm's loader ends the process at a group size of 0.
GROUP_SIZES = (16, 32, 64, 128)
BITS = (1, 2, 3, 4, 5, 6, 8)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


class CheckpointError(ValueError):
    """Something in a checkpoint's files is missing, damaged or cannot be streamed."""


def shorten(text, most=300):
    """A text on one line, its middle left out where it is long."""
    text = " ".join(str(text).split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def describe(error):
    """An exception of another library in one short line."""
    return f"{type(error).__name__}: {shorten(error)}"


def regular_file(file):
    """The size of a file, which must be one: opening a FIFO would wait for ever.

    Raises:
        CheckpointError: If it is a folder, a FIFO, a socket or a device.
        OSError: If there is none.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: expected a file, got {stat.filemode(status.st_mode)}.")
    return status.st_size


def read_json(file):
    """The object in a JSON file.

    Raises:
        CheckpointError: If the file is not JSON, or holds something else than an object.
    """
    regular_file(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, MemoryError) as e:
        raise CheckpointError(f"{file}: not JSON ({describe(e)}). Download it again.") from e
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file}: expected a JSON object, got {shorten(content, 60)}. Download it again."
        )
    return content


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
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if entry.exists() and not entry.is_dir():
                regular_file(entry)
        if not (self.path / "config.json").is_file():
            raise CheckpointError(
                f"{self.path}: expected a model folder with a config.json, found none. "
                "Give the folder that mlx_lm.load would take."
            )
        for file in ("config.json", "generation_config.json", "hf_quant_config.json"):
            if (self.path / file).exists():  # all that mlx-lm reads
                read_json(self.path / file)
        self.config = load_config(self.path)
        plain = {file: read_header(file) for file in self._files()}
        packed = {
            file: read_packed(file) for file in sorted(self.path.glob("experts-*.safetensors"))
        }
        merge_headers(plain | packed)
        self.tensors, self.packed = merge_headers(plain), merge_headers(packed)
        check_config(self.config, self.path / "config.json", len(self.tensors) + len(self.packed))

    @property
    def nbytes(self):
        """The bytes of all tensors together."""
        experts = sum(t.nbytes * len(t.offsets) for t in self.packed.values())
        return experts + sum(t.nbytes for t in self.tensors.values())

    def model_classes(self, config):
        """For mlx-lm's ``load_model``: its classes, with stand-ins for packed experts.

        The model's ``sanitize`` also refuses what would end the process: mlx-lm divides by
        the group size that it infers from a layer and its scales.

        Returns:
            tuple: The model's class and that of its arguments.
        """
        cls, args = mlx_lm_utils._get_classes(config)
        for name, field in getattr(args, "__dataclass_fields__", {}).items():
            # As check_config does with 0. Some families have truth values under such names.
            if "group" in name and config.get(name) is False and "int" in str(field.type):
                raise CheckpointError(
                    f"{self.path / 'config.json'}: {name}: expected a number, got False. "
                    "Download it again."
                )
        stand_ins = {
            path: mx.broadcast_to(mx.zeros((), t.dtype), (len(t.offsets), *t.shape))
            for path, t in self.packed.items()
        }

        def sanitize(model, weights):
            inherited = getattr(super(checked, model), "sanitize", lambda weights: weights)
            weights = {**inherited(weights), **stand_ins}
            for path, module in model.named_modules():
                scales, packed = (weights.get(f"{path}.{name}") for name in ("scales", "weight"))
                own = module.get("weight") if hasattr(module, "to_quantized") else None
                if own is None or scales is None or packed is None or packed.dtype != mx.uint32:
                    continue
                if not 0 < scales.shape[-1] <= own.shape[-1]:
                    raise CheckpointError(
                        f"{self.path}: {path}: expected scales that fit the layer {own.shape} of "
                        f"config.json, got {scales.shape}. Download it again."
                    )
            return weights

        methods = {"sanitize": sanitize, "__module__": cls.__module__}
        checked = type(cls.__name__, (cls,), methods)
        return checked, args

    def build(self, model_config=None, **kwargs):
        """mlx-lm's model with its weights, none of them read yet.

        Args:
            model_config (dict, optional): As for ``mlx_lm.utils.load_model``.
            kwargs: ``trust_remote_code``, as there.

        Returns:
            tuple: The model and its configuration.

        Raises:
            CheckpointError: If mlx-lm cannot build it from the files.
        """
        try:
            return mlx_lm_utils.load_model(
                self.path,
                lazy=True,
                model_config=model_config,
                get_model_classes=self.model_classes,
                **kwargs,
            )
        except CheckpointError:
            raise
        except Exception as e:  # a family's code may raise anything at what it does not expect
            raise CheckpointError(
                f"{self.path}: mlx-lm cannot build it from its config.json and tensors: "
                f"{describe(e)}. Download it again."
            ) from e

    def try_out(self, model):
        """Call the model on two tokens, evaluating nothing.

        MLX checks types and shapes as operations are called, before they are evaluated.

        Args:
            model (nn.Module): As ``build`` returned it.

        Raises:
            CheckpointError: If that fails.
        """
        try:
            model(mx.zeros((1, 2), mx.int32))
        except Exception as e:
            if "_kernel]" in str(e):  # one that this machine does not have
                return
            raise CheckpointError(
                f"{self.path}: mlx-lm cannot call the model that its config.json describes: "
                f"{describe(e)}. Download it again."
            ) from e

    def _files(self):
        # The same files as mlx-lm reads; the index only says which must be there.
        files = sorted(self.path.glob("model*.safetensors"))
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            content = read_json(index)
            try:
                named = sorted(set(content["weight_map"].values()))
                missing = [n for n in named if not os.path.isfile(self.path / n)]
            except (ValueError, KeyError, AttributeError, TypeError) as e:
                raise CheckpointError(
                    f"{index}: expected JSON with a 'weight_map' from tensors to files, got "
                    f"{describe(e)}. Download it again."
                ) from e
            if missing:
                raise CheckpointError(
                    f"{index} names {len(named)} files, of which {len(missing)} are not in the "
                    f"folder: {shorten(', '.join(missing[:3]))}. Download them again."
                )
        if not files:
            raise CheckpointError(
                f"{self.path}: expected model*.safetensors, found none. Give the folder "
                "that mlx_lm.load would take."
            )
        return files


def merge_headers(headers):
    """The tensors of several files together.

    Args:
        headers (dict[Path, dict]): For each file, its tensors by name.

    Raises:
        CheckpointError: If a name occurs in two files.
    """
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


def check_config(config, file, num_tensors):
    """Refuse what a config.json cannot mean, before mlx-lm builds a model of that size.

    Args:
        config (dict): Its content.
        file (Path): For messages.
        num_tensors (int): A model has no more layers than this.

    Raises:
        CheckpointError: If the values cannot be.
    """

    def check(key, value, expected, good):
        if not good:
            raise CheckpointError(
                f"{file}: {key}: expected {expected}, got {shorten(repr(value), 60)}. "
                "Download it again."
            )

    for key in ("text_config", "quantization", "quantization_config"):
        value = config.get(key)
        check(key, value, "an object", value is None or isinstance(value, dict))
    for part in (config, config.get("text_config") or {}):
        for key, value in part.items():
            if type(value) is int and key in LAYERS:
                most = f"at most {num_tensors}, the tensors of the model"
                check(key, value, most, value <= num_tensors)
            if type(value) is int and "group" in key:  # MLX divides by it and ends the process
                check(key, value, "another number than 0", value)
    settings = config.get("quantization") or {}
    for entry in (settings, *settings.values()):
        if isinstance(entry, dict):
            for key, choices in (("group_size", GROUP_SIZES), ("bits", BITS), ("mode", MODES)):
                value = entry.get(key, choices[0])
                right = type(value) is type(choices[0]) and value in choices
                check(f"quantization: {key}", value, f"one of {choices}", right)


def read_header(file):
    """Read where the tensors of one safetensors file lie.

    Args:
        file (Path): The file.

    Returns:
        dict[str, Tensor]: Every tensor by name.

    Raises:
        CheckpointError: If the header cannot be parsed, or places a tensor outside the
            file, over or apart from the one before it, or in a length that its shape does
            not have.
    """
    return _read_header(file)[0]


def _read_header(file, remedy="download it again"):
    """The tensors of a safetensors file, and its metadata."""

    def wrong(what):
        return CheckpointError(f"{file}: {what}. The file is damaged: {remedy}.")

    def once(pairs):
        names = [name for name, _ in pairs]
        for name in names if len(set(names)) < len(names) else ():
            if names.count(name) > 1:
                raise ValueError(f"{name} occurs twice")
        return dict(pairs)

    size = regular_file(file)
    with open(file, "rb") as f:
        header_nbytes = int.from_bytes(f.read(8), "little")
        if size < 8 or header_nbytes > size - 8:
            raise wrong(f"expected a header of {header_nbytes} bytes, the file has only {size}")
        if header_nbytes > HEADER_NBYTES:
            raise wrong(f"expected a header of up to {HEADER_NBYTES} bytes, got {header_nbytes}")
        text = f.read(header_nbytes)
    try:
        header = json.loads(text.decode(), object_pairs_hook=once)
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is not text")
        entries = sorted(header.items(), key=lambda entry: tuple(entry[1]["data_offsets"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise wrong(f"its header is not a safetensors header ({describe(e)})") from e

    data = 8 + header_nbytes
    tensors, end, hole = {}, 0, None
    for name, entry in entries:
        shape, offsets, short = entry.get("shape"), entry["data_offsets"], shorten(name)
        try:
            dtype = DTYPES[entry.get("dtype")]
        except (KeyError, TypeError):
            kind = shorten(repr(entry.get("dtype")), 60)
            raise wrong(f"tensor {short} has the unknown dtype {kind}") from None
        if not (
            isinstance(shape, list)
            and isinstance(offsets, list)
            and len(offsets) == 2
            and all(type(n) is int and n >= 0 for n in (*shape, *offsets))
            and all(n < MOST for n in shape)
        ):
            what = f"shape {shorten(shape, 60)}, offsets {shorten(offsets, 60)}"
            raise wrong(f"tensor {short} has {what}")
        first, last = offsets
        nbytes = prod(shape) * dtype.size
        if last - first != nbytes:
            raise wrong(
                f"tensor {short} {entry['dtype']}{shorten(shape, 60)} needs {nbytes} bytes, "
                f"its offsets {first} to {last} hold {last - first}"
            )
        if first < end:
            raise wrong(f"tensor {short} starts at {first}, inside the one before it")
        if data + last > size:
            raise wrong(
                f"tensor {short} ends at byte {data + last}, the file has only {size} (truncated?)"
            )
        if first > end:
            hole = hole or f"tensor {short} starts at {first}, the one before it ends at {end}"
        end = last
        tensors[name] = Tensor(name, file, data + first, nbytes, tuple(shape), dtype)
    if hole:
        raise wrong(hole)
    if data + end != size:
        raise wrong(f"its tensors end at byte {data + end}, the file at {size}")
    return tensors, metadata


def packed_header(path, parameters, E):
    """The header of the file in which ``repack`` puts the experts of a layer.

    Args:
        path (str): The layer's in the model.
        parameters (list): Of an expert, in the order of ``packing_order``: name, dtype (as
            safetensors names it) and shape of each.
        E (int): The experts.

    Returns:
        dict: JSON. An expert's parameters follow each other; experts begin on whole pages.
    """
    described, offset = [], 0
    for name, dtype, shape in parameters:
        described.append({"name": name, "dtype": dtype, "shape": list(shape), "offset": offset})
        offset += prod(shape) * DTYPES[dtype].size
    stride = -(-offset // PAGE) * PAGE
    text = json.dumps(described)
    crc = zlib.crc32(json.dumps([path, text, E, stride]).encode())
    return {
        "__metadata__": {"path": path, "parameters": text, "crc32": str(crc)},
        "experts": {"dtype": "U8", "shape": [E, stride], "data_offsets": [0, E * stride]},
    }


def read_packed(file):
    """Read where the experts of one layer lie in a file that ``repack`` wrote.

    The header must be the one that ``repack`` writes for the same parameters. Files of
    earlier versions lack the checksum.

    Args:
        file (Path): The file.

    Returns:
        dict[str, ExpertTensor]: By the parameter's path in the model.

    Raises:
        CheckpointError: If the file is damaged.
    """
    tensors, metadata = _read_header(file, "repack the model again")
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
    """Refuse types that contradict each other, where no checksum vouches for them.

    Args:
        parameters (list): Of an expert, as for ``packed_header``.
    """
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
                raise CheckpointError(
                    f"{file}: {tensor.name}: the file ends before byte {offset + tensor.nbytes}."
                )
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
    return {f"{name}.{k}": p for name in names for k, p in tree_flatten(module[name].parameters())}


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
