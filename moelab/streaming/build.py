"""Build mlx-lm's model as a ``StreamConfig`` asks for it, without reading any weights.

To add a family of mlx-lm with ``SwitchGLU`` or ``SwitchMLP`` modules (``moelab/experts.py``), put
its name for K into ``TOP_K_KEYS`` and its settings into ``tests/helpers/families.py``. The tests
fail until both are there, and then run the family in every mode. For a recurrent family see also
``RECURRENCES`` in ``moelab/speculation/recurrence.py``.
"""

from contextlib import ExitStack
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from .. import kernels
from ..checkpoint import Checkpoint, CheckpointError, describe, mlx_lm_model, try_out
from ..experts import expert_modules, expert_parameters, num_experts
from ..hooks import hooked
from .config import SLOT_MODES, StreamConfig
from .disk_embedding import keep_on_disk

# The families' names for K in their configurations.
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)


def build_model(
    checkpoint: Checkpoint,
    config: StreamConfig,
    model_config: dict | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, dict, int]:
    """Build mlx-lm's model with the top-k and dtype of ``config``.

    Returns the model, the model's configuration, and K (0 for a model without experts).
    """
    given = {"library": config.library, "trust_remote_code": trust_remote_code}
    build = partial(mlx_lm_model, checkpoint, **given)
    own = {**checkpoint.config, **(model_config or {})}
    model, built = build(model_config)
    found, always = _find_top_k(own, model), 0
    if config.top_k is not None and found is not None:
        holder, key, K = found
        # Some families keep a shared expert, which every token takes, among the routed experts.
        always = _most_chosen(checkpoint, model, expert_modules(model)) - K
        changed = dict.fromkeys({key, *holder.keys() & TOP_K_KEYS}, config.top_k)
        if holder is own.get("text_config"):
            changed = {"text_config": {**holder, **changed}}
        try:
            model, built = build({**(model_config or {}), **changed})
        except CheckpointError as e:
            what = f"StreamConfig.top_k: the tensors of {checkpoint.path} take {K} only, got"
            raise ValueError(f"{what} {config.top_k}. {describe(e.__cause__)}") from e
    if config.mode != "resident":
        keep_on_disk(model, checkpoint)
    modules = expert_modules(model)
    if dtype := auto_dtype() if config.dtype == "auto" else getattr(mx, config.dtype):
        _cast(model, modules, config, dtype)
    if modules:
        top_k = _checked_top_k(checkpoint, config, model, modules, found, max(0, always))
    elif config.mode == "resident":
        top_k = 0
    else:
        raise CheckpointError(
            f"{checkpoint.path}: a {own.get('model_type')} model has no experts (expected "
            "SwitchGLU or SwitchMLP modules, found none). Load it with mlx_lm.load, or give it as "
            "the --draft of a model with the same tokenizer."
        )
    return model, built, top_k


def auto_dtype() -> mx.Dtype | None:
    """The type that ``dtype="auto"`` means here; None: the checkpoint's own."""
    # Half precision is 16 times slower on a CPU.
    return mx.float32 if mx.default_device() == mx.cpu else None


def _find_top_k(config, model):
    """Find K in config.json, else in the built model; return where to set K (dict, key), and K."""
    text = config.get("text_config") or {}
    places = [(text, text), (config, config)]
    inside = (getattr(m, name, None) for m in model.modules() for name in ("args", "config"))
    places += [(getattr(args, "__dict__", {}), text or config) for args in inside]
    for values, holder in places:
        for key in TOP_K_KEYS:
            K = values.get(key)
            K = K if isinstance(K, list) else [K]
            if K and all(type(k) is int for k in K):
                return holder, key, max(K)
    return None


def _most_chosen(checkpoint, model, modules):
    """Return the most experts that a router chooses for a token; 0 if a trial call shows none."""
    chosen = [0]

    def note(call, x, indices):
        chosen.append(indices.shape[-1])
        return call(x, indices)

    with ExitStack() as hooks:
        for _, module in modules:
            hooks.enter_context(hooked(module, note))
        try_out(checkpoint, model)
    return max(chosen)


def _checked_top_k(checkpoint, config, model, modules, found, always):
    """Check that K fits the experts and the slots; return the K that the router uses."""
    file, E = checkpoint.path / "config.json", min(num_experts(m) for _, m in modules)
    K = config.top_k if config.top_k is not None else found[2] if found else 1
    if not 1 <= K <= E:
        if config.top_k is None:
            raise CheckpointError(
                f"{file}: {found[1]}: expected 1 to {E} (the experts), got {K}. Download it again."
            )
        raise ValueError(f"StreamConfig.top_k: expected 1 to {E} (the experts), got {K}.")
    chosen = _most_chosen(checkpoint, model, modules)
    if config.top_k is not None and chosen > K + always:
        raise ValueError(
            f"StreamConfig.top_k: this family cannot be asked for fewer experts per token: its "
            f"router chooses {chosen - always}, got {K}. Leave top_k out."
        )
    K = max(K, chosen)
    if config.mode in SLOT_MODES and not config.asks_for_slots and config.slots < K:
        raise ValueError(
            f"StreamConfig.slots: expected at least {K} (the experts per token), got "
            f"{config.slots}. Raise slots or lower top_k."
        )
    return K


def _cast(model, modules, config, dtype):
    """Cast a model's floating parameters to ``dtype``; some parameters keep their own type."""
    keep = getattr(model, "cast_predicate", lambda name: True)
    taken = _half_scales(modules, config) if dtype == mx.float32 else ()

    def cast(name, p):
        if name in taken or not mx.issubdtype(p.dtype, mx.floating):
            return p
        # Parameters that a family keeps in float32 stay so when the others are in half precision.
        return p.astype(dtype) if dtype == mx.float32 or keep(name) else p

    model.update(tree_map_with_path(cast, model.parameters()))


def _half_scales(modules, config):
    """Return the names of streamed scales and biases that stay bfloat16 for the fast kernels."""
    if config.mode == "resident" or config.resolved().kernels != "fast":
        return set()
    names = set()
    for path, module in modules:
        parameters = expert_parameters(module).items()
        halves = {n: p for n, p in parameters if n.endswith((".scales", ".biases"))}
        if all(p.dtype == mx.bfloat16 for p in halves.values()):  # a slot has one type for them
            names |= {f"{path}.{n}" for n in halves if kernels.fits(module[n.split(".")[0]])}
    return names
