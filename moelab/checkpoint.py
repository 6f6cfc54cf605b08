"""A model folder: where each tensor lies in its files, and mlx-lm's model of it.

A checkpoint is a folder of safetensors files. Their headers are read and checked here, the
tensors are not. ``python -m moelab repack`` writes a second layout, in which the experts of a
layer have a file of their own: ``packing_order``, ``packed_header`` and ``read_packed``.
"""

import json
import os
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.utils import load_config

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

JOURNAL = "repack.json"  # in the folder while ``repack`` writes there

PAGE_NBYTES = 4096  # every expert of a packed file begins on a page of the disk
HEADER_NBYTES = 100_000_000  # the longest header that the safetensors format allows
MAX_DIMENSION = 2**31  # MLX counts the elements along a dimension in 32 bits

# What families call the number of layers. mlx-lm builds as many as config.json says.
LAYERS_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

GATE_UP = ("gate_proj", "up_proj")  # the projections that ``fused`` mode joins

# What mlx.core.quantize accepts. A group size of 0 would end the process in mlx-lm's loader.
GROUP_SIZES = (16, 32, 64, 128)
BITS = (1, 2, 3, 4, 5, 6, 8)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


class CheckpointError(ValueError):
    """A checkpoint's file is missing or damaged, or the model cannot be streamed."""


def shorten(text: object, most: int = 300) -> str:
    """Put a text on one line and leave out the middle of a long one.

    Args:
        text (object): Its ``str`` is taken.
        most (int): Characters of each of which half are kept at either end.
    """
    text = " ".join(str(text).split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def describe(error: BaseException) -> str:
    """Describe an exception of another library in one short line.

    Args:
        error (BaseException): The exception.
    """
    return f"{type(error).__name__}: {shorten(error)}"


def regular_file(file: Path) -> int:
    """The size of a regular file. Opening a FIFO in its place would wait for ever.

    Args:
        file (Path): The file.

    Returns:
        int: Bytes.

    Raises:
        CheckpointError: If it is a folder, a FIFO, a socket or a device.
        OSError: If it does not exist.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: expected a file, got {stat.filemode(status.st_mode)}.")
    return status.st_size


def read_json(file: Path) -> dict:
    """Read the object in a JSON file.

    Args:
        file (Path): The file.

    Returns:
        dict: The object.

    Raises:
        CheckpointError: If the file is not JSON, or is not an object.
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
    """Where one tensor lies: ``nbytes`` bytes at ``offset`` of ``file``."""

    name: str
    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


@dataclass(frozen=True)
class ExpertTensor:
    """Where one parameter of all E experts of a layer lies. Each expert's part is contiguous.

    Attributes:
        name (str): The parameter's path in the model.
        files (list[Path]): The file of each expert, E entries. In a ``Session``, opened.
        offsets (list[int]): The first byte of each expert there, E entries.
        nbytes (int): The bytes of one expert's part.
        shape (tuple[int, ...]): The shape of one expert's part.
        dtype (mx.Dtype): The type on disk.
    """

    name: str
    files: list[Path]
    offsets: list[int]
    nbytes: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


class Checkpoint:
    """The tensors of a model folder, each with its place on disk.

    Args:
        path (str or Path): A folder as ``mlx_lm.load`` takes it.

    Attributes:
        path (Path): As above.
        config (dict): The folder's ``config.json``.
        tensors (dict[str, Tensor]): Every tensor by its name in the files.
        packed (dict[str, ExpertTensor]): The experts' parameters by their path in the model, if
            ``python -m moelab repack`` wrote the folder; else empty.

    Raises:
        CheckpointError: If a file is missing or truncated, or its header does not fit it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if (self.path / JOURNAL).exists():
            raise CheckpointError(
                f"{self.path}: an unfinished copy that an interrupted 'python -m moelab repack' "
                "left. Run the same command again, it goes on from there."
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
    def nbytes(self) -> int:
        """The bytes of all tensors together."""
        experts = sum(t.nbytes * len(t.offsets) for t in self.packed.values())
        return experts + sum(t.nbytes for t in self.tensors.values())

    def model_classes(self, config: dict) -> tuple[type, type]:
        """The classes for mlx-lm's ``load_model``, with placeholders for packed experts.

        The model's ``sanitize`` also refuses scales that do not fit their layer: mlx-lm infers a
        group size from them and divides by it, and a division by 0 would end the process.

        Args:
            config (dict): As mlx-lm hands it over.

        Returns:
            tuple[type, type]: The class of the model and that of its arguments.
        """
        cls, args = mlx_lm_utils._get_classes(config)
        for name, field in getattr(args, "__dataclass_fields__", {}).items():
            # check_config refuses a 0. Some families have truth values under such names.
            if "group" in name and config.get(name) is False and "int" in str(field.type):
                raise CheckpointError(
                    f"{self.path / 'config.json'}: {name}: expected a number, got False. "
                    "Download it again."
                )
        placeholders = {
            path: mx.broadcast_to(mx.zeros((), t.dtype), (len(t.offsets), *t.shape))
            for path, t in self.packed.items()
        }

        def sanitize(model, weights):
            inherited = getattr(super(checked, model), "sanitize", lambda weights: weights)
            weights = {**inherited(weights), **placeholders}
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

    def build(self, model_config: dict | None = None, **kwargs) -> tuple[nn.Module, dict]:
        """Build mlx-lm's model. Its weights are lazy, none is read.

        Args:
            model_config (dict or None): As for ``mlx_lm.utils.load_model``.
            kwargs: ``trust_remote_code``, as for ``mlx_lm.utils.load_model``.

        Returns:
            tuple[nn.Module, dict]: The model and its configuration.

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
        except Exception as e:  # a family's code may raise anything
            raise CheckpointError(
                f"{self.path}: mlx-lm cannot build it from its config.json and tensors: "
                f"{describe(e)}. Download it again."
            ) from e

    def try_out(self, model: nn.Module, cache: list | None = None) -> mx.array | None:
        """Call the model on two tokens and evaluate nothing.

        MLX checks types and shapes when an operation is called, before it is evaluated.

        Args:
            model (nn.Module): From ``build``.
            cache (list or None): As ``make_prompt_cache`` makes it.

        Returns:
            mx.array or None: The logits; None if the family needs a kernel that this machine does
            not have.

        Raises:
            CheckpointError: If the call fails.
        """
        try:
            return model(mx.zeros((1, 2), mx.int32), cache=cache)
        except Exception as e:
            if "_kernel]" in str(e):
                return None
            raise CheckpointError(
                f"{self.path}: mlx-lm cannot call the model that its config.json describes: "
                f"{describe(e)}. Download it again."
            ) from e

    def _files(self):
        # The files that mlx-lm reads. The index only says which of them must exist.
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


def merge_headers(headers: dict[Path, dict]) -> dict:
    """Join the tensors of several files.

    Args:
        headers (dict[Path, dict]): For each file, its tensors by name.

    Returns:
        dict: All tensors by name.

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


def check_config(config: dict, file: Path, num_tensors: int) -> None:
    """Refuse impossible values of a config.json, before mlx-lm builds a model of that size.

    Args:
        config (dict): Its content.
        file (Path): For messages.
        num_tensors (int): The tensors of the model, which cannot have more layers.

    Raises:
        CheckpointError: If a value is impossible.
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
            if type(value) is int and key in LAYERS_KEYS:
                most = f"at most {num_tensors}, the tensors of the model"
                check(key, value, most, value <= num_tensors)
            if type(value) is int and "group" in key:  # dividing by 0 would end the process
                check(key, value, "another number than 0", value)
    settings = config.get("quantization") or {}
    for entry in (settings, *settings.values()):
        if isinstance(entry, dict):
            for key, choices in (("group_size", GROUP_SIZES), ("bits", BITS), ("mode", MODES)):
                value = entry.get(key, choices[0])
                right = type(value) is type(choices[0]) and value in choices
                check(f"quantization: {key}", value, f"one of {choices}", right)


def read_header(file: Path, remedy: str = "download it again") -> dict[str, Tensor]:
    """Read where the tensors of one safetensors file lie.

    Args:
        file (Path): The file.
        remedy (str): What to do if it is damaged, for the error.

    Returns:
        dict[str, Tensor]: Every tensor by name.

    Raises:
        CheckpointError: If the header cannot be parsed, or a tensor does not lie right behind the
            one before it, inside the file and in the length of its shape.
    """
    return _read_header(file, remedy)[0]


def _read_header(file, remedy):
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
            and all(n < MAX_DIMENSION for n in shape)
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


def packing_order(names: Iterable[str]) -> list[str]:
    """Sort an expert's parameters as ``repack`` packs them: weights first, gate beside up.

    Args:
        names (Iterable[str]): As ``expert_parameters`` names them.
    """

    def place(name):
        linear, param = name.rsplit(".", 1)
        return param != "weight", linear not in GATE_UP, param != "scales", param, linear

    return sorted(names, key=place)


def packed_header(path: str, parameters: list[tuple], E: int) -> dict:
    """The header of the file in which ``repack`` puts the experts of a layer.

    Args:
        path (str): The layer's path in the model.
        parameters (list[tuple]): Name, dtype (as safetensors names it) and shape of each
            parameter of an expert, in the order of ``packing_order``.
        E (int): The number of experts.

    Returns:
        dict: For JSON. An expert's parameters follow each other, and each expert begins on a page.
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
