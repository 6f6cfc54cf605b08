"""Builds text models of mlx-vlm's families for mlx-lm's loader, caches and generation.

The model is mlx-vlm's own, without vision and audio. The model's experts become mlx-lm's modules,
which compute the same. The model's caches become mlx-lm's caches where mlx-lm has that kind of
cache. So streaming, rollback and prompt cache files need not know mlx-vlm. A family whose experts
have a known shape needs no code here.
"""

import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models import cache as caches
from mlx_lm.models import switch_layers

from .files import CheckpointError, describe

TRIED = "0.7.10"  # the version of mlx-vlm that the tests run with
DRAFTERS = "speculative/drafters"  # mlx-vlm's folder of draft heads
# mlx-vlm's other dependencies are for images and audio: --no-deps leaves them out.
INSTALL = f"pip install 'moelab[vlm]' && pip install --no-deps mlx-vlm=={TRIED}"
PARTS = ["text", "vision", "perceiver", "projector", "audio"]  # parts with configuration objects
ARRAYS = nn.Module, list, dict, tuple, mx.array  # types that a module searches for parameters
# Families with a compiled function that keeps the length of the first text: texts of other lengths
# get wrong tokens (mlx-vlm 0.7.10). Loading such a model turns off MLX's compiling.
COMPILED_ONCE = {"hy_v4"}
# Families for which mlx-vlm writes a wrong text (0.7.10), and why.
WRONG = {"granitemoe": "it multiplies embeddings of a prompt only. mlx-lm has this family"}
# The known shapes of experts: the names of a module's matrices ``[E, out, in]``. The rows of
# ``gate_up_proj`` are those of gate, then those of up.
SHAPES = {"down_proj gate_proj up_proj", "down_proj gate_up_proj", "fc1 fc2"}


class TextModel:
    """A mixin for the class of an mlx-vlm model; ``library`` is the Python module of the family."""

    batches = False  # mlx-lm's caches of several texts cannot do what mlx-vlm's blocks need

    def __init__(self, args: SimpleNamespace):
        super().__init__(args.config)
        for name, child in [*self.items()]:
            held = child.modules() if isinstance(child, nn.Module) else ()
            if isinstance(child, ARRAYS) and not any(m is self.language_model for m in held):
                del self[name]
                object.__setattr__(self, name, child)  # for ``sanitize`` only; no weights are read
        found = [(path, _experts(m)) for path, m in self.named_modules()]
        self.update_modules(tree_unflatten([(path, m) for path, m in found if m is not None]))

    def __call__(self, inputs: mx.array, cache: list | None = None, **kwargs: Any) -> mx.array:
        """Compute the logits ``[B, T, V]`` of token ids ``[B, T]``."""
        model = self.language_model
        if hasattr(model, "_rope_deltas"):  # left by the last text or its images
            model._position_ids, model._rope_deltas = None, mx.zeros((len(inputs), 1), mx.int32)
        for c in leaves(cache or ()):
            if type(c) is caches.ArraysCache:
                c.__class__ = _states()
        return model(inputs, cache=cache, **kwargs).logits

    def make_cache(self) -> list:
        """Make new caches, of mlx-lm's classes where mlx-lm has that kind of cache."""
        if hasattr(self.language_model, "make_cache"):
            return [_ours(c) for c in self.language_model.make_cache()]
        return [caches.KVCache() for _ in self.layers]

    @property
    def layers(self):
        return self.language_model.layers

    @property
    def cast_predicate(self):
        try:
            return self.language_model.cast_predicate
        except (AttributeError, TypeError):  # glm_moe_dsa calls a property as a function
            return lambda path: True

    @property
    def quant_predicate(self):
        own = getattr(self.language_model, "quant_predicate", lambda path, module: True)

        def predicate(path, module):
            said = own(path, module)
            # mlx-vlm takes this group size if the usual one does not divide a row's length.
            least = said.get("fallback_group_size") if isinstance(said, dict) else None
            return said if least is None else {"group_size": least, "bits": 4, "mode": "affine"}

        return predicate

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Rename a checkpoint's tensors, and leave out those that are not of the text model."""
        weights = getattr(super(), "sanitize", dict)(weights)
        if hasattr(self.library, "LanguageModel") and hasattr(self.config, "text_config"):
            weights = getattr(self.language_model, "sanitize", dict)(weights)
        named, kept = dict(self.named_modules()), {}
        for name, value in weights.items():
            parent, _, rest = name.partition(".gate_up_proj.")
            if rest and isinstance(named.get(parent), switch_layers.SwitchGLU):
                names = [f"{parent}.{half}.{rest}" for half in ("gate_proj", "up_proj")]
                kept |= zip(names, mx.split(value, 2, axis=1))
            elif name.partition(".")[0] in self:
                kept[name] = value
        return kept


def _experts(module):
    """Return mlx-lm's experts for a module of mlx-vlm's; None if the module has no experts."""
    matrices = {n: m for n, m in module.children().items() if hasattr(m, "num_experts")}
    matrices = {n: m for n, m in matrices.items() if "weight" in m and m.weight.ndim == 3}
    if not matrices:
        return None
    names, others = " ".join(sorted(matrices)), module.keys() - matrices - {"activation"}
    given = [*inspect.signature(type(module).__call__).parameters.values()][1:]
    needed = [p.name for p in given if p.default is p.empty]
    if names not in SHAPES or others or len(needed) != 2:
        raise CheckpointError(
            f"{type(module).__name__} of {type(module).__module__}: expected experts of the shape "
            f"{' or '.join(sorted(SHAPES))} and activation, called with x and indices, got "
            f"{', '.join(sorted(module.keys()))}, called with {', '.join(needed)}. moelab cannot "
            "stream this family."
        )
    last = matrices.get("down_proj", matrices.get("fc2"))
    num_experts, outputs, inputs = last.weight.shape
    kind = switch_layers.SwitchMLP if "fc1" in matrices else switch_layers.SwitchGLU
    return kind(outputs, inputs, num_experts, module.activation, "bias" in last)


@cache
def _states():
    """Return mlx-lm's class of recurrent states, with the methods that mlx-vlm's blocks call."""
    theirs = import_module("mlx_vlm.models.cache").ArraysCache
    methods = {name: getattr(theirs, name) for name in ("update_window", "update_recurrent")}
    return type("ArraysCache", (caches.ArraysCache,), {"history_capacity": 0} | methods)


def _ours(cache):
    """Convert an empty cache of mlx-vlm to mlx-lm's class, if mlx-lm has that kind of cache."""
    kind = type(cache).__name__ if type(cache).__module__ == "mlx_vlm.models.cache" else ""
    makers = {
        "KVCache": caches.KVCache,
        "RotatingKVCache": lambda: caches.RotatingKVCache(cache.max_size, cache.keep),
        "ChunkedKVCache": lambda: caches.ChunkedKVCache(cache.chunk_size),
        "ArraysCache": lambda: caches.ArraysCache(len(cache.cache)),
        "CacheList": lambda: caches.CacheList(*map(_ours, cache.caches)),
    }
    return makers[kind]() if kind in makers else cache


def leaves(given: Iterable) -> Iterator:
    """Yield the caches of a list, and the inner caches in place of a ``CacheList``."""
    for c in given:
        yield from leaves(c.caches) if isinstance(c, caches.CacheList) else [c]


def classes(config: dict[str, Any]) -> tuple[type, Any]:
    """Return the classes of a text model and its arguments, for mlx-lm's ``load_model``."""
    kind = config.get("model_type")
    if find_spec("mlx_vlm") is None:
        raise CheckpointError(
            f"{kind}: expected mlx-vlm, which has this model, found it not installed. {INSTALL}"
        )
    have = metadata.version("mlx-vlm")
    try:
        utils = import_module("mlx_vlm.utils")
        library, _ = utils.get_model_and_args(dict(config))
        given = {"vision_config": {}, "audio_config": {}} | config
        given.setdefault("text_config", given.get("llm_config", {}))
        update, model = utils.update_module_configs, library.Model
        _states()
    except Exception as error:
        raise CheckpointError(
            f"{kind}: mlx-vlm {have} has no text model of this family that moelab can build "
            f"({describe(error)}). moelab was tried with mlx-vlm {TRIED}: {INSTALL}"
        ) from error
    if not library.__name__.startswith("mlx_vlm.models."):
        raise CheckpointError(
            f"{kind}: expected a model, got a draft head of mlx-vlm's, which writes no text alone. "
            "Give the model that it was trained for."
        )

    if kind in WRONG:
        raise CheckpointError(f"{kind}: mlx-vlm {have} gives another text: {WRONG[kind]}.")
    if kind in COMPILED_ONCE:
        mx.disable_compile()

    def from_dict(_):
        own = dict(given)  # a copy: some families add the text's part to it
        made = library.ModelConfig.from_dict(own)
        return SimpleNamespace(config=update(made, library, own, PARTS))

    text = type(model.__name__, (TextModel, model), {"library": library})
    return text, SimpleNamespace(from_dict=from_dict)


def library_of(config: dict[str, Any]) -> str:
    """Return the library that has a model type, mlx-lm first; CheckpointError if none has it."""
    kind = str(config.get("model_type"))
    known = mlx_lm_utils.MODEL_REMAPPING.get(kind, kind)
    if "model_file" in config or _has("mlx_lm", "models", known):
        return "mlx-lm"
    is_there = find_spec("mlx_vlm") is not None
    names = import_module("mlx_vlm.utils").MODEL_REMAPPING if is_there else {}
    if any(_has("mlx_vlm", folder, names.get(kind, kind)) for folder in ("models", DRAFTERS)):
        return "mlx-vlm"
    which = f" {metadata.version('mlx-vlm')}" if is_there else ", which is not installed"
    raise CheckpointError(
        f"model_type {kind}: expected a family of mlx-lm {metadata.version('mlx-lm')} or of "
        f"mlx-vlm{which}. A newer version may have it{'' if is_there else ': ' + INSTALL}."
    )


def _has(package, folder, kind):
    """Return whether a package's folder has a model type; no code of the folder is imported."""
    spec = find_spec(package)
    for path in spec.submodule_search_locations if spec else ():
        file = Path(path) / folder / kind
        if file.is_dir() or file.with_name(f"{kind}.py").is_file():
            return True
    return False
