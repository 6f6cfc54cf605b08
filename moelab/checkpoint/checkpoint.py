"""A model folder's files, tensors and configuration, and mlx-lm's model of the folder."""

import os
import sys
import threading
from functools import cache
from multiprocessing import parent_process
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from ..hooks import with_globals
from ..open_files import allow_open
from . import vlm
from .files import FOR_MLX, CheckpointError, read_json, readable, regular_file, sample, shorten
from .headers import merge_headers, read_header, read_packed

FORKED = (
    "This process is a fork of one in which MLX had computed, and has none of MLX's threads. Start "
    "it with multiprocessing's 'spawn', and load the model in it."
)
TRIES = threading.Lock()  # held while ``mx.async_eval`` is replaced
FORK_S = 2  # an idle stream that takes longer to synchronize has no thread
# The id of a process that is known to have MLX's threads; None in a child that may be a fork.
_computes = os.getpid() if parent_process() is None else None


class Checkpoint:
    """The tensors of a model folder, each with its place on disk.

    ``tensors`` has the tensors of model*.safetensors by name. ``packed`` has the expert tensors of
    a repacked folder by their paths in the model, and is empty for other folders.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        # For each file: a stamp, which changes if the file is replaced, and its ``sample``.
        self.stamps, self.samples = {}, {}
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if entry.exists() and not entry.is_dir():
                regular_file(entry)
                self.stamps[entry] = _stamp(entry)
        adapters = self.path / "adapter_config.json"
        if not (self.path / "config.json").is_file():
            raise CheckpointError(
                f"{self.path}: expected a model folder with a config.json, found none. "
                "Give the folder that mlx_lm.load would take"
                + (", and these adapters as adapter_path." if adapters.exists() else ".")
            )
        for file in ("config.json", "generation_config.json", "hf_quant_config.json"):
            if (self.path / file).exists():  # the configurations that mlx-lm reads
                read_json(self.path / file)
        self.config = mlx_lm_utils.load_config(self.path)
        kind = "a DFlash draft" if "dflash_config" in self.config else None
        if str(self.config.get("model_type")).endswith("_mtp"):
            kind = "a draft head"
        if kind:
            raise CheckpointError(
                f"{self.path}: expected a model, got {kind}, which writes no text alone. "
                "Give the model that it was trained for, and this folder as its --draft."
            )
        self.files, layers = self._files(), sorted(self.path.glob("experts-*.safetensors"))
        # Streaming opens a file twice (once past the page cache). MLX opens model*.safetensors.
        allow_open(3 * len(self.files) + 2 * len(layers), self.path)
        plain = {file: read_header(file) for file in self.files}
        packed = {file: read_packed(file) for file in layers}
        merge_headers(plain | packed)
        self.tensors, self.packed = merge_headers(plain), merge_headers(packed)
        check_config(self.config, self.path / "config.json", len(self.tensors) + len(self.packed))

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors together."""
        experts = sum(t.nbytes * len(t.offsets) for t in self.packed.values())
        return experts + sum(t.nbytes for t in self.tensors.values())

    def check_unchanged(self, *others: Path) -> None:
        """Raise if the weights, config.json or one of ``others`` changed.

        Stamps show whether a file was replaced since the start. Samples show whether a file was
        written over since the first call.
        """
        packed = (file for tensor in self.packed.values() for file in tensor.files)
        for file in {*self.files, *packed, self.path / "config.json", *others}:
            if same := file.exists() and self.stamps.get(file) == _stamp(file):
                with readable(f"{file}: cannot read it:", "Check the disk."), open(file, "rb") as f:
                    found = sample(f.fileno())
                same = found == self.samples.setdefault(file, found)
            if not same:
                raise CheckpointError(
                    f"{file}: was written or replaced while it was read: expected the same file to "
                    "the end, got another. Try again when nothing writes to the folder any more."
                )

    def _files(self):
        """Return the weight files that mlx-lm reads; the index only says which files must exist."""
        files = sorted(self.path.glob("model*.safetensors"))
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            with readable(f"{index}: expected JSON with a 'weight_map' from tensors to files, got"):
                named = set(read_json(index)["weight_map"].values())
                missing = sorted(n for n in named if not os.path.isfile(self.path / n))
            if missing:
                raise CheckpointError(
                    f"{index} names {len(named)} files, of which {len(missing)} are not in the "
                    f"folder: {shorten(', '.join(missing[:3]))}. Download them again, or remove "
                    f"the index if the {len(files)} model*.safetensors there are the whole model."
                )
        if not files:
            raise CheckpointError(
                f"{self.path}: expected model*.safetensors, found none. Give the folder "
                "that mlx_lm.load would take."
            )
        return files


def _stamp(file):
    s = file.stat()
    return s.st_ino, s.st_size, s.st_mtime_ns


def check_config(config: dict, file: Path, num_tensors: int) -> None:
    """Refuse values that make mlx-lm divide by 0 or build more layers than there are tensors."""
    for key, value in config.items():
        expected = None
        is_depth = key in ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
        if is_depth and type(value) is int and value > num_tensors:
            expected = f"at most {num_tensors}, the tensors of the model"
        if "group" in key and value == 0 and (type(value) is int or key == "group_size"):
            expected = "another number than 0"
        if expected:
            raise CheckpointError(
                f"{file}: {key}: expected {expected}, got {value}. Download it again."
            )
        if isinstance(value, dict):
            check_config(value, file, num_tensors)


def check_fork() -> None:
    """Raise in a fork that lacks MLX's threads: evaluating an array there would wait for ever."""
    global _computes
    if os.getpid() != _computes:
        stream = mx.default_stream(mx.cpu)  # another thread cannot synchronize a GPU's stream
        waits = threading.Thread(target=mx.synchronize, args=[stream], daemon=True)
        waits.start()
        waits.join(FORK_S)
        if waits.is_alive():
            raise RuntimeError(FORKED)
        _computes = os.getpid()


def model_classes(config: dict, library: str = "auto") -> tuple[type, type]:
    """Return a model class and its class of arguments; ``auto`` picks the library that has them."""
    library = vlm.library_of(config) if library == "auto" else library
    return vlm.classes(config) if library == "mlx-vlm" else mlx_lm_utils._get_classes(config)


def checked(cls: type, args: type, config: dict, more: dict | None = None) -> tuple[type, type]:
    """Give a model's class a ``sanitize`` that adds ``more`` weights and refuses wrong scales.

    With scales that do not fit, mlx-lm could divide by 0, which ends the process.
    """
    for name, field in getattr(args, "__dataclass_fields__", {}).items():
        # check_config refuses 0, but not False: some families have booleans under such names.
        if "group" in name and config.get(name) is False and "int" in str(field.type):
            raise ValueError(f"{name}: expected a number, got False")

    def sanitize(model, weights):
        inherited = getattr(super(subclass, model), "sanitize", lambda weights: weights)
        weights = {**inherited(weights), **(more or {})}
        for path, module in model.named_modules():
            scales, own = weights.get(f"{path}.scales"), module.get("weight")
            if scales is None or own is None or not hasattr(module, "to_quantized"):
                continue
            if not 0 < (scales.shape or (0,))[-1] <= own.shape[-1]:
                raise ValueError(
                    f"{path}: expected scales that fit the layer {own.shape} of config.json, got "
                    f"{scales.shape}"
                )
        return weights

    subclass = type(cls.__name__, (cls,), {"sanitize": sanitize, "__module__": cls.__module__})
    return subclass, args


def remedy(path: Path, config: dict) -> str:
    """Say what to do with a folder that mlx-lm cannot load; name a format that mlx-lm lacks."""
    text, key = config.get("text_config"), "quantization_config"
    said = config.get(key) or (text.get(key) if isinstance(text, dict) else None)
    if not said and (path / "hf_quant_config.json").exists():
        said = {"quant_method": "modelopt"}
    method = said.get("quant_method") if isinstance(said, dict) else None
    # mlx-lm reads every form of these formats, so a folder that it cannot load is damaged.
    if "quantization" in config or method in (None, "bitnet", "mxfp4", "mxfp8"):
        return "Download it again."
    name = shorten(f"{method} {said.get('format') or ''}".strip(), 60)
    return f"Its weights are in {name}, of which mlx-lm does not read this form. {FOR_MLX}"


def mlx_lm_model(
    checkpoint: Checkpoint, model_config: dict | None = None, library: str = "auto", **kwargs
) -> tuple[nn.Module, dict]:
    """Build mlx-lm's model and its configuration. The weights are lazy: none is read.

    With ``auto`` the model is mlx-vlm's if mlx-lm lacks the model type or the tensors' names.
    """
    check_fork()
    # mlx-lm globs the folder, and [brackets] in its name would be a pattern.
    files = SimpleNamespace(glob=lambda pattern: list(map(str, checkpoint.files)))
    load_model = with_globals(mlx_lm_utils.load_model, {"glob": files})
    placeholders = {  # for packed experts
        path: mx.broadcast_to(mx.zeros((), t.dtype), (len(t.offsets), *t.shape))
        for path, t in checkpoint.packed.items()
    }

    def classes(config):
        return checked(*model_classes(config, library), config, placeholders)

    given = {"lazy": True, "model_config": model_config, "get_model_classes": classes}
    cannot = f"{checkpoint.path}: cannot build a model from its config.json and tensors:"
    then = remedy(checkpoint.path, checkpoint.config)
    with readable(cannot, then):  # a family's code may raise anything
        try:
            return load_model(checkpoint.path, **given, **kwargs)
        except CheckpointError as e:
            raise CheckpointError(f"{checkpoint.path}: {e}") from e
        except ValueError as e:
            as_of_vlm = any(name.startswith("language_model.") for name in checkpoint.tensors)
            if library != "auto" or not as_of_vlm or "not in model" not in str(e):  # MLX's words
                raise
            try:
                built = mlx_lm_model(checkpoint, model_config, "mlx-vlm", **kwargs)
            except CheckpointError as theirs:
                raise ValueError(f"{e} mlx-vlm's class: {theirs.__cause__}") from e
            say(f"{checkpoint.path}: mlx-vlm's class is used: it has the tensors' names")
            return built
        finally:
            # mlx-lm's initial random weights are never evaluated. Until mx.random's state is
            # evaluated, it keeps 120 kB of these weights' graph for each load.
            mx.eval(mx.random.state)


@cache
def say(line: str) -> None:
    """Print a line to stderr, unless it was printed before."""
    print(f"moelab: {line}", file=sys.stderr)


def try_out(checkpoint: Checkpoint, model: nn.Module, cache: list | None = None) -> mx.array | None:
    """Call the model on two tokens, so that MLX checks types and shapes, and evaluate nothing.

    Each token has a call of its own: some of mlx-vlm's blocks evaluate if they get several tokens.
    mlx-vlm's qwen4_exp calls ``mx.async_eval`` after each layer, which would read every expert.
    The logits are None if the family needs a kernel that this machine does not have.
    """
    caller = threading.get_ident()

    def others_only(*arrays):
        if threading.get_ident() != caller:
            evaluate(*arrays)

    with readable(f"{checkpoint.path}: cannot call the model of its config.json:"), TRIES:
        evaluate = mx.async_eval
        try:
            mx.async_eval = others_only
            for _ in range(2):
                logits = model(mx.zeros((1, 1), mx.int32), cache=cache)
            return logits
        except Exception as e:
            if "_kernel]" in str(e):
                return None
            raise
        finally:
            mx.async_eval = evaluate
