"""An mlx-lm model whose experts stay on disk."""

import ctypes
import os
import threading
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import ArraysCache, CacheList

from ..checkpoint import (
    Checkpoint,
    CheckpointError,
    describe,
    expert_modules,
    expert_parameters,
    locate_experts,
    read_experts,
    read_json,
)
from .config import StreamConfig
from .layers import LAYERS, num_experts
from .parallel import spread
from .prefetch import PREFETCHERS
from .reader import Reader
from .slots import hottest
from .trace import Trace, TraceError

# What the families call K in their configuration.
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)

# A call with at least this many tokens is a long prompt. When decoding begins after one, free
# memory is returned to the system: 90 ms after a prompt of 2,000 tokens that took 20 s (2 cores).
LONG_PROMPT = 256


@dataclass
class Counters:
    """What one phase has cost since load or reset.

    Attributes:
        tokens (int): Tokens that went in.
        calls (int): Calls of MoE layers.
        hits (int): Experts that were in their slot when needed.
        misses (int): Experts that had to be read.
        reads (int): Ranges of files read.
        bytes_read (int): Their bytes.
        read_s (float): Seconds in reads, summed over the threads.
        wait_s (float): Seconds in which the model waited for reads.
        prefetch_issued (int): Experts asked for ahead. Those not begun in time are given up.
        prefetch_used (int): Read ahead and needed by the call they were meant for; hits.
        prefetch_late (int): Of these, still on their way then.
        prefetch_wasted (int): Read ahead and not needed then.
        prefetch_saved_s (float): Seconds that the reads of those used took, less the wait.
    """

    tokens: int = 0
    calls: int = 0
    hits: int = 0
    misses: int = 0
    reads: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    wait_s: float = 0.0
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_saved_s: float = 0.0

    @property
    def hit_rate(self):
        """Hits among the experts needed, 0 to 1; nan if none was needed."""
        needed = self.hits + self.misses
        return self.hits / needed if needed else float("nan")

    @property
    def bytes_per_token(self):
        """Bytes read for each token; nan before the first."""
        return self.bytes_read / self.tokens if self.tokens else float("nan")


@dataclass
class Stats:
    """Counters of prompts (calls with more than one token) and of decoding, apart."""

    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)


class Session:
    """What the streamed layers of one model share.

    Attributes:
        lock (threading.RLock): Held during every call of the model, so that threads take turns.
        layers (list[StreamedExperts]): In order; empty in ``resident`` mode.
        pending (list[mx.array]): The last layer's output, which reads its slots until evaluated.
    """

    def __init__(self, config, dtype, top_k, located, resident, pinned):
        self.config, self.dtype, self.top_k = config, dtype, top_k
        self.reader = Reader(config.readers)
        self.located = {
            name: replace(t, files=[self.reader.open(f) for f in t.files])
            for name, t in located.items()
        }
        self.resident, self.pinned = resident, pinned
        self.layers, self.pending = [], []
        self.lock = threading.RLock()
        self._caller = None  # the thread whose call this is
        self._unfinished = False  # whether an exception ended the last call
        self._long_prompt = False  # whether memory is to be given back when decoding begins
        self._process = os.getpid()
        self._more_streams = _more_streams(config)
        # On a CPU arithmetic takes about as long as a read; on a GPU far less.
        self.overlap = mx.default_device() == mx.cpu
        self.stats = Stats()
        self.counters = self.stats.decode
        self.recorder = None
        self.prefetcher = None
        self._booked = (0, 0, 0.0)

    @property
    def is_in_call(self):
        """Whether the thread that asks is in a call of this model."""
        return self._caller == threading.get_ident()

    @contextmanager
    def call(self):
        """A call of the model, or of a layer by itself: one thread after another.

        Raises:
            RuntimeError: In a process that was forked after loading.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"This model was loaded in process {self._process}, this is process {os.getpid()}, a "
                "fork of it: MLX's threads and the reader's did not come along. Load the model in "
                "this process, or start it with multiprocessing's 'spawn'."
            )
        with self.lock:
            try:
                self._caller = threading.get_ident()
                if self._unfinished:
                    self._recover()
                self._unfinished = True
                yield
                # Another thread can wait for this one's arrays, but it cannot schedule them.
                mx.async_eval(self.pending)
                self._unfinished = False
            except BaseException:
                self.reader.stop()  # nothing writes to a slot after a call that failed
                raise
            finally:
                self._caller = None

    def _recover(self):
        """After a call that an exception ended: no read in flight, every slot held or free."""
        self.reader.stop()
        with suppress(RuntimeError):  # arrays that another thread built and never scheduled
            mx.eval(self.pending)
        self.pending = []
        for layer in self.layers:
            layer.recover()

    def begin(self, inputs):
        """A call of the whole model starts, with token ids ``[B, T]``."""
        self.settle()
        prefill = inputs.ndim > 1 and inputs.shape[1] > 1
        self._long_prompt |= inputs.size >= LONG_PROMPT
        if self._long_prompt and not prefill:
            self._long_prompt = False
            _give_back_memory()
        self.counters = self.stats.prefill if prefill else self.stats.decode
        self.counters.tokens += inputs.size
        if self.recorder is not None:
            self.recorder.begin(inputs, "prefill" if prefill else "decode")

    @property
    def streams(self):
        """The caller's stream and those that share its work."""
        return [mx.default_stream(mx.default_device()), *self._more_streams]

    @property
    def decoding(self):
        """Whether the call that runs now is of a single token."""
        return self.counters is self.stats.decode

    @contextmanager
    def waiting(self):
        """Count the time inside as waiting for reads."""
        begin = perf_counter()
        try:
            yield self.reader
        finally:
            self.counters.wait_s += perf_counter() - begin

    def settle(self):
        """Book what has been read since the last time to the phase that asked for it."""
        r = self.reader
        total = (r.reads, r.nbytes, r.read_s)
        c, before, self._booked = self.counters, self._booked, total
        c.reads += total[0] - before[0]
        c.bytes_read += total[1] - before[1]
        c.read_s += total[2] - before[2]


class LoadedModel:
    """Mixed into the class of a model that ``load`` returns: threads take turns; counts calls.

    Attributes:
        lock (threading.RLock): Held during a call. Hold it to keep other threads out for longer.
    """

    @property
    def lock(self):
        return self._session.lock

    def __call__(self, inputs, *args, **kwargs):
        with self._session.call():
            self._session.begin(inputs)
            out = super().__call__(inputs, *args, **kwargs)
            # The next token's call may come from another thread, which could not schedule these.
            mx.async_eval(list(_states(kwargs.get("cache") or [])))
            return out

    def __enter__(self):
        return self

    def __exit__(self, *_):
        close(self)


class StreamedModel(LoadedModel):
    """The same with experts on disk: what would need them all in memory is refused by name."""

    def load_weights(self, file_or_weights, strict=True):
        weights = file_or_weights
        if not isinstance(weights, list):
            weights = list(mx.load(str(weights)).items())
        self._refuse_experts(name for name, _ in weights)
        return super().load_weights(weights, strict)

    def update(self, parameters, strict=True):
        self._refuse_experts(name for name, _ in tree_flatten(parameters))
        return super().update(parameters, strict)

    def save_weights(self, file):
        raise self._refusal("saved")

    def train(self, mode=True):
        if mode:
            raise self._refusal("trained")
        return super().train(mode)

    def leaf_modules(self):
        # mlx-lm asks for these to save, quantize or count, and nowhere else.
        raise self._refusal("saved, quantized or counted")

    def _refuse_experts(self, names):
        streamed = tuple(layer.path + "." for layer in self._session.layers)
        name = next((n for n in names if n.startswith(streamed)), None)
        if name is not None:
            raise ValueError(
                f"{name}: the weights of a streamed expert are read from the checkpoint's files and "
                "cannot be replaced in memory. Fuse them into a checkpoint with mlx_lm.fuse first, "
                "or load with StreamConfig(mode='resident')."
            )

    def _refusal(self, done):
        return ValueError(
            f"{type(self).__name__}: a streamed model cannot be {done}: its experts are on disk, "
            f"only the rest is in memory. Use mlx_lm.load or StreamConfig(mode='resident')."
        )


def load(
    path_or_hf_repo,
    config=None,
    *,
    tokenizer_config=None,
    model_config=None,
    adapter_path=None,
    lazy=False,
    return_config=False,
    revision=None,
    trust_remote_code=False,
):
    """Load a model whose experts stay on disk, and its tokenizer.

    What comes back works wherever what ``mlx_lm.load`` returns does, in any thread; threads
    that call at the same time take turns, call by call.

    Args:
        path_or_hf_repo (str or Path): A model folder or a Hub repository.
        config (StreamConfig, optional): How to stream. Default: ``StreamConfig()``.
        tokenizer_config (dict, optional): As for ``mlx_lm.load``.
        model_config (dict, optional): As for ``mlx_lm.load``.
        adapter_path (str, optional): As for ``mlx_lm.load``; adapters of streamed experts are
            refused.
        lazy (bool): Only False: the backbone is read while loading.
        return_config (bool): As for ``mlx_lm.load``.
        revision (str, optional): As for ``mlx_lm.load``.
        trust_remote_code (bool): As for ``mlx_lm.load``.

    Returns:
        tuple[nn.Module, TokenizerWrapper]: The model and the tokenizer; with ``return_config``
        the model's configuration too.

    Raises:
        CheckpointError: If the files are damaged or their experts cannot be streamed.
        ValueError: If ``config`` does not fit the model.
    """
    if lazy:
        raise ValueError(
            "load: lazy=True is not possible: a streamed model evaluates its backbone while it is "
            "loaded, so that any thread can use it. Leave lazy out; the experts stay on disk anyway."
        )
    try:
        path = Path(mlx_lm_utils._download(path_or_hf_repo, revision=revision))
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"{path_or_hf_repo}: expected a model folder or a Hub repository, found no such "
            f"folder, and the Hub does not give it ({describe(e)})."
        ) from e
    model, model_config = load_model(
        path, config, model_config=model_config, trust_remote_code=trust_remote_code
    )
    try:
        if adapter_path is not None:
            _load_adapters(model, adapter_path)
        tokenizer = _tokenizer(path, tokenizer_config, model_config.get("eos_token_id"))
    except BaseException:
        close(model)
        raise
    return (model, tokenizer, model_config) if return_config else (model, tokenizer)


def _tokenizer(path, tokenizer_config, eos_token_ids):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).exists():
            read_json(path / name)
    try:
        tokenizer = mlx_lm_utils.load_tokenizer(path, tokenizer_config, eos_token_ids=eos_token_ids)
        tokenizer.decode(tokenizer.encode("a"))
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # tokenizers is Rust: what it panics with is no Exception
        raise CheckpointError(
            f"{path}: transformers cannot read its tokenizer files: {describe(e)}. "
            "Download them again."
        ) from e


def load_model(path, config=None, *, model_config=None, trust_remote_code=False):
    """``load`` without the tokenizer.

    Returns:
        tuple[nn.Module, dict]: The model and its configuration.
    """
    config = _checked(config)
    checkpoint = Checkpoint(path)
    model, model_config, top_k = _build(checkpoint, config, model_config, trust_remote_code)
    experts = expert_modules(model)
    pinned = _pinned(experts, config)
    if config.mode == "resident":
        located, resident = {}, {}
        modules = dict(model.named_modules())
        for path, tensor in checkpoint.packed.items():
            owner, param = path.rsplit(".", 1)
            module = modules[owner]
            module[param] = read_experts(tensor).astype(module[param].dtype)
    else:
        located, resident = _sources(model, checkpoint, config)
    session = Session(config, _dtype(model), top_k, located, resident, pinned)
    try:
        if config.mode != "resident":
            layer = LAYERS[config.mode]
            streamed = [
                (path, layer(module, path, i, session)) for i, (path, module) in enumerate(experts)
            ]
            model.update_modules(tree_unflatten(streamed))
            # Weak: the layers own the session, and a model without cycles goes when its last name does.
            session.layers = [weakref.proxy(module) for _, module in streamed]
            if config.prefetch != "none":
                modules = dict(model.named_modules())
                parents = [weakref.proxy(modules[path.rpartition(".")[0]]) for path, _ in streamed]
                session.prefetcher = PREFETCHERS[config.prefetch](session.layers, parents)
        _evaluate(model)
        if config.mode in ("stacked", "fused"):
            spread(model, session)
    except BaseException:
        session.reader.close()
        raise
    model._session = session
    cls = type(model)
    mixin = LoadedModel if config.mode == "resident" else StreamedModel
    model.__class__ = type(cls.__name__, (mixin, cls), {})
    stats(model, reset=True)  # what is pinned has been read by now, and is not decoding's
    return model, model_config


def _checked(config):
    if config is None:
        return StreamConfig()
    if not isinstance(config, StreamConfig):
        raise ValueError(
            f"config: expected a StreamConfig, got {type(config).__name__}. "
            "Write moelab.StreamConfig(mode='fused', slots=16), for example."
        )
    return config


def _evaluate(model):
    """Read every weight, and what a module computed for itself: another thread could not."""
    mx.eval([list(module.values()) for module in model.modules()])


def _load_adapters(model, path):
    file = Path(path) / "adapters.safetensors"
    if isinstance(model, StreamedModel) and file.is_file():
        model._refuse_experts(mx.load(str(file)))
    mlx_lm_utils.load_adapters(model, path)
    model.eval()
    _evaluate(model)


def stats(model, reset=False):
    """What the model has read since it was loaded or reset.

    Args:
        model (nn.Module): As ``load`` returned it.
        reset (bool): Start again from zero.

    Returns:
        Stats: ``prefill`` and ``decode`` counters.
    """
    session = session_of(model)
    with session.lock:
        session.settle()
        result = session.stats
        if reset:
            session.stats = Stats()
            session.counters = session.stats.decode
            return result
        return Stats(replace(result.prefill), replace(result.decode))


def close(model):
    """End the model's threads and close its files. It cannot be called afterwards."""
    session = session_of(model)
    with session.lock:
        session.reader.close()


@dataclass(frozen=True)
class Footprint:
    """The memory that a model will take, in bytes, by ``load``'s own arithmetic.

    Attributes:
        backbone_nbytes (int): Everything but the experts.
        slots_nbytes (int): The slots, pinned ones too (or buffers; in ``resident`` mode all experts).
        scales_nbytes (int): Parameters kept for all E experts.
        checkpoint_nbytes (int): The tensors on disk.
        expert_nbytes (int): One expert on disk.
        num_layers (int): MoE layers.
        num_experts (int): E, the most of any layer.
        top_k (int): K.
    """

    backbone_nbytes: int
    slots_nbytes: int
    scales_nbytes: int
    checkpoint_nbytes: int
    expert_nbytes: int
    num_layers: int
    num_experts: int
    top_k: int

    @property
    def total_nbytes(self):
        """Backbone, slots and resident parameters together."""
        return self.backbone_nbytes + self.slots_nbytes + self.scales_nbytes


def footprint(path, config=None):
    """Predict the memory of ``load(path, config)`` without reading any weights.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig, optional): How to stream.

    Returns:
        Footprint: The bytes. A prompt's activations and the caches come on top.
    """
    config = _checked(config)
    checkpoint = Checkpoint(path)
    model, _, top_k = _build(checkpoint, config)
    modules = expert_modules(model)
    slots = scales = one = total_experts = 0
    for (path, m), pinned in zip(modules, _pinned(modules, config)):
        E = num_experts(m)
        held = min(config.slots, E) + len(pinned)
        rows = {"resident": E, "serial": 1, "buffers": top_k, "stacked": held, "fused": held}[
            config.mode
        ]
        for name, p in expert_parameters(m).items():
            total_experts += p.nbytes
            slots += p.nbytes // E * rows
            if config.mode != "resident" and _stays(name, p, config):
                scales += p.nbytes
    everything = sum(p.nbytes for _, p in tree_flatten(model.parameters()))
    located = locate_experts(model, checkpoint)
    if modules:
        first = modules[0][0] + "."
        one = sum(t.nbytes for name, t in located.items() if name.startswith(first))
    return Footprint(
        everything - total_experts,
        slots,
        scales,
        checkpoint.nbytes,
        one,
        len(modules),
        max((num_experts(m) for _, m in modules), default=0),
        top_k,
    )


def _build(checkpoint, config, model_config=None, trust_remote_code=False):
    """mlx-lm's model, no weight read yet, with the top-k that ``config`` asks for."""

    def build(changes):
        try:
            return checkpoint.build(changes, trust_remote_code=trust_remote_code)
        finally:
            # The random weights that mlx-lm begins with are never evaluated, and the state of
            # mx.random keeps 120 kB of their graph for each load until it is.
            mx.eval(mx.random.state)

    own = {**checkpoint.config, **(model_config or {})}
    found, built = _find_top_k(own), None
    if found is None:  # the family's default
        built = build(model_config)
        found = _default_top_k(built[0], own)
    if config.top_k is not None and found is not None:
        holder, key, _ = found
        changed = {key: config.top_k}
        if holder is own.get("text_config"):
            changed = {"text_config": {**holder, **changed}}
        built = build({**(model_config or {}), **changed})
    model, model_config = built or build(model_config)
    if config.dtype != "auto":
        _cast(model, getattr(mx, config.dtype))
    elif mx.default_device() == mx.cpu:
        _cast(model, mx.float32)  # half precision is 16 times slower on the CPU backend
    modules = expert_modules(model)
    if config.mode == "resident" and not modules:
        checkpoint.try_out(model)
        return model, model_config, 0
    if not modules:
        raise CheckpointError(
            f"{checkpoint.path}: a {own.get('model_type')} model has no experts (expected "
            "SwitchGLU or SwitchMLP modules, found none). Load it with mlx_lm.load."
        )
    E = min(num_experts(m) for _, m in modules)
    own_k = found[2] if found else None
    K = config.top_k if config.top_k is not None else own_k
    if K is None:
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: expected the experts per token under one of "
            f"{', '.join(TOP_K_KEYS)}, found none. Set StreamConfig.top_k to the number that the "
            "model was trained with; this family cannot be asked for fewer."
        )
    if not 1 <= K <= E:
        if config.top_k is None:
            raise CheckpointError(
                f"{checkpoint.path / 'config.json'}: {found[1]}: expected 1 to {E} (the experts), "
                f"got {K}. Download it again."
            )
        raise ValueError(f"StreamConfig.top_k: expected 1 to {E} (the experts), got {K}.")
    if config.mode in ("stacked", "fused") and config.slots < K:
        raise ValueError(
            f"StreamConfig.slots: expected at least {K} (the experts per token), got "
            f"{config.slots}. Raise slots or lower top_k."
        )
    checkpoint.try_out(model)
    return model, model_config, K


def _pinned(modules, config):
    """The experts of each MoE layer that never leave: none where every expert has a slot anyway."""
    if not config.pinned_nbytes:
        return [[] for _ in modules]
    file, sizes = config.pinned_trace, [num_experts(m) for _, m in modules]
    counts = np.zeros((len(sizes), max(sizes)), np.int64)
    try:
        trace = Trace.load(file)
    except TraceError as e:
        raise ValueError(f"StreamConfig.pinned_trace: {e}") from e
    except OSError as e:
        raise ValueError(
            f"StreamConfig.pinned_trace: {file}: expected a trace as Trace.save writes it, got "
            f"none ({describe(e)}). Record it again, or restore the file."
        ) from e
    if (trace.experts.shape[1], trace.num_experts) != counts.shape:
        raise ValueError(
            f"StreamConfig.pinned_trace: {file}: expected a trace of {counts.shape[0]} MoE layers "
            f"and {counts.shape[1]} experts, as the model has, got {trace.experts.shape[1]} and "
            f"{trace.num_experts}. Record one with this model (moelab.record)."
        )
    rows = trace.decode.experts if (trace.phase == "decode").any() else trace.experts
    np.add.at(counts, (np.arange(len(sizes))[:, None], rows), 1)
    one = [
        sum(p.nbytes for p in expert_parameters(m).values()) // E
        for (_, m), E in zip(modules, sizes)
    ]
    return hottest(counts, config.pinned_nbytes, one, [max(0, E - config.slots) for E in sizes])


def _find_top_k(config):
    for holder in (config.get("text_config") or {}, config):
        for key in TOP_K_KEYS:
            values = holder.get(key)
            values = values if isinstance(values, list) else [values]
            if values and all(type(value) is int for value in values):
                return holder, key, max(values)
    return None


def _default_top_k(model, config):
    """As ``_find_top_k``, from what the family's class assumes where the config does not say."""
    for module in model.modules():
        for name in ("args", "config"):
            args = getattr(module, name, None)
            for key in TOP_K_KEYS:
                if type(value := getattr(args, key, None)) is int:
                    text = config.get("text_config")
                    return text if isinstance(text, dict) else config, key, value
    return None


def _cast(model, dtype):
    """Cast the floating point parameters; nothing is read yet."""
    keep = getattr(model, "cast_predicate", lambda name: True)

    def cast(name, p):
        # What a family keeps in float32 it keeps there in any half precision.
        if mx.issubdtype(p.dtype, mx.floating) and (dtype == mx.float32 or keep(name)):
            return p.astype(dtype)
        return p

    model.update(tree_map_with_path(cast, model.parameters()))


def _dtype(model):
    """The type of activations: the embedding decides what the residual stream is."""
    floating = {
        name: p.dtype
        for name, p in tree_flatten(model.parameters())
        if mx.issubdtype(p.dtype, mx.floating)
    }
    return next((d for name, d in floating.items() if "embed" in name), None) or next(
        iter(floating.values())
    )


def _stays(name, p, config):
    """Whether all E experts' parts of this parameter are kept in memory."""
    if p.ndim <= 2:  # additive biases and tensor-wide scales: a few bytes an expert
        return True
    return config.scales == "resident" and not name.endswith(".weight")


def _sources(model, checkpoint, config):
    """Which parameters are read from disk, which stay in memory for all experts."""
    located = locate_experts(model, checkpoint)
    resident = {}
    for path, module in expert_modules(model):
        for name, p in expert_parameters(module).items():
            full = f"{path}.{name}"
            if _stays(name, p, config):
                if full in checkpoint.packed:
                    p = read_experts(checkpoint.packed[full]).astype(p.dtype)
                resident[full] = p
                mx.eval(p)
                located.pop(full, None)
            elif full not in located:
                raise CheckpointError(
                    f"{checkpoint.path}: {full}: the bytes of an expert are not contiguous in "
                    f"the files ({checkpoint.config.get('model_type')} in a layout that mlx-lm "
                    "rearranges on load), so they cannot be read in place. Convert it first: "
                    f"mlx_lm.convert --hf-path {checkpoint.path} --mlx-path NEW_FOLDER"
                )
            # Only the shape is wanted from here on; the array keeps its file open.
            linear, param = name.rsplit(".", 1)
            module[linear][param] = mx.broadcast_to(mx.zeros((), p.dtype), p.shape)
    return located, resident


def _more_streams(config):
    n = config.streams
    if n == "auto":
        cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )  # not on macOS
        n = cores or 1 if mx.default_device() == mx.cpu else 1
    return [_side_stream(mx.default_device().type, i) for i in range(n - 1)]


def _states(cache):
    """Arrays of recurrent caches; those of attention caches are evaluated with the logits."""
    for c in cache:
        if isinstance(c, CacheList):
            yield from _states(c.caches)
        elif isinstance(c, ArraysCache):
            yield [a for a in c.cache if a is not None]


def _give_back_memory():
    """Return to the system what a prompt's arrays left in the C library's heap.

    glibc keeps it otherwise: 400 MB after 2,000 tokens of tiny-moe, which the page cache needs.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others do not
    if trim is not None:
        trim(0)


@cache
def _side_stream(device_type, i):
    # MLX never ends a stream's thread, so all models share these; each thread has its own of them.
    return mx.new_thread_local_stream(device_type)


def session_of(model):
    """What the layers of a loaded model share: for measuring, in and out of this package.

    Args:
        model (nn.Module): As ``load`` returned it.

    Returns:
        Session: Its layers, reader, counters and prefetcher.

    Raises:
        ValueError: If the model is not from ``moelab.load``.
    """
    session = getattr(model, "_session", None)
    if session is None:
        raise ValueError(f"{type(model).__name__}: expected a model from moelab.load.")
    return session
