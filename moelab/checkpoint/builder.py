"""mlx-lm's model of a model folder, built without reading its weights."""

import os
import threading
from functools import partial
from multiprocessing import parent_process
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from ..hooks import with_globals
from .checkpoint import Checkpoint
from .files import CheckpointError, describe

FORKED = (
    "This process is a fork of one in which MLX had computed, and has none of MLX's threads. Start "
    "it with multiprocessing's 'spawn', and load the model in it."
)
FORK_S = 2  # until a stream that has nothing to do counts as one without its thread
# The latest process that is no fork, or has MLX's threads; None in a child that may be a fork.
_computes = os.getpid() if parent_process() is None else None


def check_fork() -> None:
    """Raise in a fork without MLX's threads, where evaluating an array would wait for ever."""
    global _computes
    if os.getpid() != _computes:
        stream = mx.default_stream(mx.default_device())
        waits = threading.Thread(target=mx.synchronize, args=[stream], daemon=True)
        waits.start()
        waits.join(FORK_S)
        if waits.is_alive():
            raise RuntimeError(FORKED)
        _computes = os.getpid()


def model_classes(checkpoint: Checkpoint, config: dict) -> tuple[type, type]:
    """The model's class and its arguments' for mlx-lm, with placeholders for packed experts.

    The model's ``sanitize`` also refuses scales that do not fit their layer: mlx-lm infers a
    group size from them and divides by it, and a division by 0 would end the process.
    """
    cls, args = mlx_lm_utils._get_classes(config)
    for name, field in getattr(args, "__dataclass_fields__", {}).items():
        # check_config refuses a 0. Some families have truth values under such names.
        if "group" in name and config.get(name) is False and "int" in str(field.type):
            raise CheckpointError(
                f"{checkpoint.path / 'config.json'}: {name}: expected a number, got False. "
                "Download it again."
            )
    placeholders = {
        path: mx.broadcast_to(mx.zeros((), t.dtype), (len(t.offsets), *t.shape))
        for path, t in checkpoint.packed.items()
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
                    f"{checkpoint.path}: {path}: expected scales that fit the layer {own.shape} of "
                    f"config.json, got {scales.shape}. Download it again."
                )
        return weights

    methods = {"sanitize": sanitize, "__module__": cls.__module__}
    checked = type(cls.__name__, (cls,), methods)
    return checked, args


def mlx_lm_model(
    checkpoint: Checkpoint, model_config: dict | None = None, **kwargs
) -> tuple[nn.Module, dict]:
    """Build mlx-lm's model and its configuration. The weights are lazy: none is read."""
    check_fork()
    # mlx-lm globs the folder, and [brackets] in its name would be a pattern.
    files = SimpleNamespace(glob=lambda pattern: list(map(str, checkpoint.files)))
    try:
        return with_globals(mlx_lm_utils.load_model, {"glob": files})(
            checkpoint.path,
            lazy=True,
            model_config=model_config,
            get_model_classes=partial(model_classes, checkpoint),
            **kwargs,
        )
    except CheckpointError:
        raise
    except Exception as e:  # a family's code may raise anything
        raise CheckpointError(
            f"{checkpoint.path}: mlx-lm cannot build it from its config.json and tensors: "
            f"{describe(e)}. Download it again."
        ) from e


def try_out(checkpoint: Checkpoint, model: nn.Module, cache: list | None = None) -> mx.array | None:
    """Call the model on two tokens, so that MLX checks types and shapes, and evaluate nothing.

    The logits are None if the family needs a kernel that this machine does not have.
    """
    try:
        return model(mx.zeros((1, 2), mx.int32), cache=cache)
    except Exception as e:
        if "_kernel]" in str(e):
            return None
        raise CheckpointError(
            f"{checkpoint.path}: mlx-lm cannot call the model that its config.json describes: "
            f"{describe(e)}. Download it again."
        ) from e
