"""``load`` makes an mlx-lm model whose experts stay on disk."""

import os
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from threading import RLock
from time import perf_counter

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import tokenizer_utils
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import kernels
from ..checkpoint import Checkpoint, CheckpointError, describe, read_header, read_json, readable
from ..detokenizer import Detokenizer
from ..experts import read_experts
from ..hooks import with_globals
from ..interrupts import held, look
from ..kernels.code import num_threads
from ..memory import return_free_memory
from ..prompt import check_tokens
from .build import build_model
from .config import SLOT_MODES, StreamConfig
from .disk_embedding import EMBEDDINGS, DiskEmbedding
from .facts import FEW_TOKENS, facts_of
from .fused import give_room
from .layers import Buffers, Stacked
from .plan import AnyDraft, plan_of
from .prefetch import PREFETCHERS, Auto, auto
from .ranks import Ranks
from .residency import host
from .residency.bank import HUGE_S, can_empty
from .session import Session, recurrent_states, session_of, stats


class LoadedModel:
    """The mixin of loaded models: counts calls, and lets one thread at a time call the model.

    Hold ``lock`` to keep other threads out for longer than a call.
    """

    @property
    def lock(self) -> RLock:
        return self._session.lock

    def __call__(self, inputs: mx.array, *args, **kwargs) -> mx.array:
        # For an id beyond the vocabulary MLX would end the process. A single uint32 id comes from a
        # sampler, and is not checked: the check would wait until the id is computed.
        if inputs.shape[-1] > 1 or inputs.dtype != mx.uint32:
            check_tokens(inputs, self)
        with self._session.call():
            cache, outs = kwargs.get("cache"), []
            # With too few cache entries mlx-lm would skip layers.
            if cache is not None and len(cache) != self._num_caches:
                raise ValueError(
                    f"cache: expected {self._num_caches} entries, as make_prompt_cache(model) "
                    f"gives, got {len(cache)}: the cache is another model's."
                )
            alone = cache is not None and not args and kwargs.keys() == {"cache"}
            last = False
            while not last:
                step = self._session.room.make(inputs.size, cache or (), alone)
                part, *more = self._session.room.parts(inputs, step) if alone else [inputs]
                last, inputs = not more, inputs[..., part.shape[-1] :]
                self._session.begin(part, cache)
                waits = self._session.config.lazy_logits and part.shape[-1] > FEW_TOKENS
                # Only the last part's logits are sure to be used.
                with _lazy(self._heads) if waits or not last else nullcontext():
                    outs.append(super().__call__(part, *args, **kwargs))
                if not last:
                    mx.eval([c.state for c in cache])
                    return_free_memory()  # else the heap would grow a little with each part
            # Begin to compute the states: the next call may run in a thread that cannot begin it.
            mx.async_eval(list(recurrent_states(cache or [])))
            return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)

    @cached_property
    def _num_caches(self):
        return len(make_prompt_cache(self))

    @property
    def _heads(self):
        """Return the modules that compute logits by fast kernels, which are never lazy."""
        named = self.named_modules()
        words = {len(m["weight"]) for _, m in named if isinstance(m, EMBEDDINGS)}
        # A matrix in a layer may have as many rows as the vocabulary, but its path has a number.
        outside = [m for name, m in named if not any(map(str.isdigit, name.split(".")))]
        fast = [m for m in outside if hasattr(m, "takes") and "weight" in m]
        return [m for m in fast if m["weight"].ndim == 2 and len(m["weight"]) in words]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        close(self)


def _refused(done):
    """Return a method that raises ``ValueError``; ``done`` says what is refused, as "saved"."""

    def refuse(self, *args, **kwargs):
        raise ValueError(
            f"{type(self).__name__}: a streamed model cannot be {done}: its experts are not among "
            "its weights in memory. Use mlx_lm.load or StreamConfig(mode='resident')."
        )

    return refuse


class StreamedModel(LoadedModel):
    """A loaded model with its experts on disk. It refuses calls that need all experts in memory."""

    save_weights = _refused("saved")
    shard = _refused("divided over machines")
    # Gradients and optimizers call this. ``parameters`` still returns all arrays in memory.
    trainable_parameters = _refused("trained")
    # mlx-lm calls this only to save, quantize or count parameters.
    leaf_modules = _refused("saved, quantized or counted")

    def train(self, mode: bool = True) -> nn.Module:
        return self.trainable_parameters() if mode else super().train(mode)

    def update(self, parameters: dict, strict: bool = True) -> nn.Module:
        self.refuse_experts(name for name, _ in tree_flatten(parameters))
        return super().update(parameters, strict)

    def refuse_experts(self, names: Iterable[str]) -> None:
        """Raise if one of the parameters ``names`` belongs to a streamed expert."""
        streamed = tuple(layer.path + "." for layer in self._session.layers)
        name = next((n for n in names if n.startswith(streamed)), None)
        if name is not None:
            raise ValueError(
                f"{name}: the weights of a streamed expert are read from the checkpoint's files "
                "and cannot be replaced in memory. Fuse them into a checkpoint with mlx_lm.fuse "
                "first, or load with StreamConfig(mode='resident')."
            )


def load(
    path_or_hf_repo: str | Path,
    config: StreamConfig | None = None,
    *,
    tokenizer_config: dict | None = None,
    model_config: dict | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    group: mx.distributed.Group | None = None,
    draft: AnyDraft | None = None,
    texts: int = 1,
) -> tuple[nn.Module, TokenizerWrapper] | tuple[nn.Module, TokenizerWrapper, dict]:
    """Load a model whose experts stay on disk, and its tokenizer.

    Model and tokenizer can be used like those of ``mlx_lm.load``, in any thread. Threads that
    call the model at the same time take turns, call by call.

    With a group, each rank reads its own share of each layer's experts, and every rank computes the
    rest of the model. All ranks must call the model with the same tokens in the same order.

    Args:
        path_or_hf_repo (str or Path): A model folder or a Hub repository.
        config (StreamConfig or None): How to stream. Default: ``StreamConfig()``.
        tokenizer_config, model_config, return_config, revision, trust_remote_code: As for
            ``mlx_lm.load``.
        adapter_path (str or None): As for ``mlx_lm.load``. Adapters of streamed experts are
            refused.
        lazy (bool): Must be False: the backbone is read while loading.
        group (mx.distributed.Group or None): The ranks that divide the experts, from
            ``mx.distributed.init()``. Default: this process holds all experts.
        draft (Draft or None): The draft to use later. ``slots="auto"`` leaves memory for the
            draft's caches, and for the recurrent states that verify passes keep.
        texts (int): How many texts are decoded together. ``slots="auto"`` leaves memory for each
            text's caches of ``StreamConfig.context`` tokens.

    Returns:
        tuple[nn.Module, TokenizerWrapper]: The model and the tokenizer. ``return_config`` adds
        the model's configuration.

    Raises:
        CheckpointError: If the files are damaged or their experts cannot be streamed, or if the
            adapters are another model's.
        FileNotFoundError: If there are no adapters in ``adapter_path``.
        ValueError: If ``config`` does not fit the model, or the model does not fit in memory.
        RankError: If the ranks differ in files, settings or versions, or one of them failed.
    """
    if lazy:
        raise ValueError(
            "load: lazy=True is not possible: a streamed model evaluates its backbone while it "
            "is loaded, so that any thread can use it. Leave lazy out; the experts stay on disk "
            "anyway."
        )
    with Ranks.loading(group) as ranks:
        path = find(path_or_hf_repo, revision)
        with held():
            model, model_config = _load_model(
                path, config, model_config, trust_remote_code, ranks, draft, texts
            )
            try:
                if adapter_path is not None:
                    _load_adapters(model, adapter_path)
                tokenizer = tokenizer_of(path, tokenizer_config, model_config.get("eos_token_id"))
                look()
            except BaseException:
                close(model)
                raise
    return (model, tokenizer, model_config) if return_config else (model, tokenizer)


def find(path_or_hf_repo: str | Path, revision: str | None = None, download: bool = True) -> Path:
    """Return a model's folder. A Hub repository that is not on this machine is downloaded first."""
    path, name = Path(path_or_hf_repo), str(path_or_hf_repo)
    what = f"{name}: expected a model folder or a Hub repository, OWNER/NAME,"
    if path.is_dir():
        return path
    if os.path.lexists(path):
        found = "a file" if path.exists() else "a link that leads nowhere"
        raise CheckpointError(f"{what} got {found}. Give the folder that has the config.json.")
    try:
        if not download:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        return Path(mlx_lm_utils._download(name, revision=revision))
    except HFValidationError:
        wrong = f", seen from {Path.cwd()}: check the path."
    except RepositoryNotFoundError:
        wrong = ", and the Hub shows none: check the name; for a closed one run `hf auth login`."
    except LocalEntryNotFoundError:
        wrong = ", none downloaded, and the Hub is out of reach: check the name, or go online."
        if not download:
            wrong = " and none downloaded: check the name, or plan a model by name (plan --help)."
    except Exception as error:  # whatever the Hub's client raises
        wrong = f", and the Hub does not give it: {describe(error)}. Check the name."
    raise CheckpointError(f"{what} found no such folder{wrong}")


def tokenizer_of(
    path: Path, tokenizer_config: dict | None = None, eos_token_ids: int | list[int] | None = None
) -> TokenizerWrapper:
    """Load the tokenizer of a model folder, and check that it turns a text into tokens."""
    if (path / "tokenizer.json").exists():
        read_json(path / "tokenizer.json")  # checks the JSON; the large vocabulary is not kept
    config = path / "tokenizer_config.json"
    config = read_json(config) if config.exists() else {}
    newer = (path / "chat_template.jinja").exists() or config.get("chat_template")
    older = path / "chat_template.json"  # transformers reads it for image models only
    if older.exists() and not newer:
        template = {"chat_template": read_json(older, {"chat_template": str})["chat_template"]}
        tokenizer_config = template | (tokenizer_config or {})
    try:
        # This is mlx-lm's loader with ``Detokenizer`` in place of its own detokenizers.
        read = with_globals(
            tokenizer_utils.load,
            {"TokenizerWrapper": lambda own, _, **more: TokenizerWrapper(own, Detokenizer, **more)},
        )
        read = with_globals(mlx_lm_utils.load_tokenizer, {"_load_tokenizer": read})
        tokenizer = read(path, tokenizer_config, eos_token_ids=eos_token_ids)
        tokenizer.decode(ids := tokenizer.encode("a"))
        if not set(ids).difference(tokenizer.all_special_ids):  # the vocabulary is empty
            raise ValueError("expected tokens of 'a', got none: tokenizer.json may be missing")
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # tokenizers is Rust, and its panics are not Exceptions
        raise CheckpointError(
            f"{path}: transformers cannot read its tokenizer files: {describe(e)}. "
            "Download them again."
        ) from e


def load_model(
    path: str | Path,
    config: StreamConfig | None = None,
    *,
    model_config: dict | None = None,
    group: mx.distributed.Group | None = None,
) -> tuple[nn.Module, dict]:
    """Load a model as ``load`` does, but without a tokenizer; return model and configuration."""
    with Ranks.loading(group) as ranks, held():
        return _load_model(path, config, model_config, False, ranks)


def _load_model(path, config, model_config, trust_remote_code, ranks, draft=None, texts=1):
    config = StreamConfig.checked(config).resolved()
    if config.kernels == "fast":
        kernels.check()
    checkpoint = Checkpoint(path)
    checkpoint.check_unchanged()
    if ranks:
        ranks.compare_loading(checkpoint, config, model_config)
    model, model_config, top_k = build_model(checkpoint, config, model_config, trust_remote_code)
    facts = facts_of(model, checkpoint, config, top_k)
    chosen = None
    if config.asks_for_slots:
        chosen = plan_of(facts, config, ranks, draft=draft, texts=texts)
        if ranks:  # ranks may differ in slots, but must divide a prompt alike
            chosen = replace(chosen, prompt_tokens=min(ranks.gather(chosen.prompt_tokens)))
        config, facts = chosen.config, chosen.facts
    # Experts' modules get the kernels, too: a slot bank computes with a copy of such a module.
    fast = config.kernels == "fast"
    found = kernels.use(model, half_scales=facts.dtype == mx.float32) if fast else {}
    modules = dict(model.named_modules())
    experts = [(path, modules[path]) for path in facts.experts]
    resident = _read_experts(modules, facts, checkpoint, config)
    session = Session(config, facts, resident, found, chosen, ranks)
    session.fast_experts = any(kernels.used(module) for _, module in experts)
    try:
        if config.mode == "resident":
            for _, module in experts:
                give_room(module)
        else:
            _stream(model, experts, session)
        for module in model.modules():
            if isinstance(module, DiskEmbedding):
                module.open(session.reader, facts.dtype)
            if "_step" in vars(module):  # what kimi_k3 compiled in ``facts_of`` reads lazy weights
                module._step = None
        mx.eval(model.state)  # another thread cannot compute what this thread leaves lazy
        checkpoint.check_unchanged()
    except BaseException:
        session.reader.close()
        raise
    model._session, cls = session, type(model)
    mixin = LoadedModel if config.mode == "resident" else StreamedModel
    model.__class__ = type(cls.__name__, (mixin, cls), {})
    stats(model, reset=True)  # no call made the reads of ``host.hold``
    return model, model_config


def _stream(model, experts, session):
    """Replace the experts' modules by streamed layers, with their slots and prefetcher."""
    config = session.config
    layer = Stacked if config.mode in SLOT_MODES else Buffers
    streamed = [(path, layer(module, path, i, session)) for i, (path, module) in enumerate(experts)]
    model.update_modules(tree_unflatten(streamed))
    # Weak references: layers refer to the session, and a cycle would delay a model's deletion.
    session.layers = [weakref.proxy(module) for _, module in streamed]
    if can_empty():  # not on a GPU: there MLX allocates the slots, and the host must not touch them
        _populate(session.residency.layers)
    modules = dict(model.named_modules())  # a block: router, experts and shared expert
    blocks = [weakref.proxy(modules[path.rpartition(".")[0]]) for path, _ in experts]
    if config.prefetch in PREFETCHERS:
        session.prefetcher = PREFETCHERS[config.prefetch](session.layers, blocks)
        session.residency.prefetches = True
    elif config.prefetch == "auto":
        session.prefetcher = auto(session, blocks)
        if session.prefetcher is not None:
            session.auto = Auto(session.residency, session.counting, session.reader.direct)
    if config.source == "host":
        host.hold(session.residency.layers, session.reader)


def _populate(layers):
    """Allocate the slots' memory now, in huge pages while Linux gives them fast (``HUGE_S``)."""
    begin = perf_counter()

    def take(layer, nbytes):
        layer.bank.populate(perf_counter() - begin < HUGE_S * nbytes)

    with ThreadPoolExecutor(num_threads()) as pool:
        [*pool.map(take, layers, accumulate(layer.bank.nbytes for layer in layers))]


def _load_adapters(model, path):
    settings, weights = (Path(path) / f for f in ("adapter_config.json", "adapters.safetensors"))
    if missing := [file.name for file in (settings, weights) if not file.is_file()]:
        raise FileNotFoundError(
            f"{path}: expected a folder with adapters, as mlx_lm.lora writes it, found no "
            f"{' and no '.join(missing)} there. Give another, or leave the adapters out."
        )
    given, names = read_json(settings).get("lora_parameters"), read_header(weights)
    if isinstance(model, StreamedModel):
        model.refuse_experts(names)
    what = f"{path}: expected adapters of this model, mlx-lm cannot load them:"
    with readable(what, "Train them again with mlx_lm.lora, or leave them out."):
        if given and not isinstance(given.get("scale", 1), (int, float)):
            raise ValueError(f"a scale of {given['scale']!r}")  # mlx-lm would fail later, in a call
        mlx_lm_utils.load_adapters(model, path)
        mx.eval(model.eval().state)


def close(model: nn.Module) -> None:
    """End the model's reading threads and close its files. Do not call the model afterwards."""
    session = session_of(model)
    with session.lock, held():
        session.reader.close()
        if session.ranks:
            session.ranks.close()


def _read_experts(modules, facts, checkpoint, config):
    """Read the experts' parameters that stay in memory; return them if slots copy from them."""
    if facts.scattered:
        raise CheckpointError(
            f"{checkpoint.path}: {facts.scattered[0]}: the bytes of an expert are not contiguous "
            f"in the files ({checkpoint.config.get('model_type')} in a layout that mlx-lm "
            "rearranges on load), so they cannot be read in place. Convert the model first: "
            f"mlx_lm.convert --hf-path {checkpoint.path} --mlx-path NEW_FOLDER"
        )
    resident = {}
    for name in (*facts.located, *facts.resident):
        look()
        owner, param = name.rsplit(".", 1)
        p = modules[owner][param]
        if name in facts.located:
            # From here on only shape and type are needed; the lazy array would keep a file open.
            p = mx.broadcast_to(mx.zeros((), p.dtype), p.shape)
        elif name in checkpoint.packed:
            p = read_experts(checkpoint.packed[name]).astype(p.dtype)
            mx.eval(p)
        modules[owner][param] = p
        if name not in facts.located:
            resident[name] = p
    if config.mode == "resident":  # MLX reads all weights together, which takes less time
        return {}
    mx.eval(resident)
    return resident


@contextmanager
def _lazy(heads):
    """Let MLX compute these heads' logits lazily inside the block: only if they are used."""

    def takes(x):
        mx.eval(x)  # else the lazy logits would keep all arrays before them in memory
        return False

    for head in heads:
        head.takes = takes  # this attribute hides the class's method
    try:
        yield
    finally:
        for head in heads:
            del head.takes
