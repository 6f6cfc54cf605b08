"""``synthesize``: a random checkpoint with the exact layer shapes of a real model.

The names, shapes, types and order of the tensors are those of mlx-lm's own model of the published
configuration, which is built lazily and never evaluated. The bytes are written in chunks, so that
a 200 GB checkpoint needs little memory. The model writes noise, but each layer costs as much to
read and to compute as the real one. Random routers choose nearly uniformly, where caches hit least;
with ``routing`` they repeat their experts as a recorded trace does.
"""

import contextlib
import copy
import errno
import io
import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checkpoint import read_json
from .configs import CONFIGS
from .partial import begin, clear, finish
from .replay import by_token
from .streaming.trace import Trace

JOURNAL = "synthesize.json"  # in the folder while ``synthesize`` writes there
GROUP_SIZE, BITS = 64, 4  # of the quantization; mlx-lm's own defaults
SHARD_NBYTES = 5 << 30  # the largest file, as in mlx-lm
CHUNK_NBYTES = 16 << 20  # written at once; no more of a tensor is in memory
SPARE_NBYTES = 64 << 20  # kept free on the disk for headers, the configuration, the tokenizer
TOKENIZER = Path(__file__).parent / "tokenizer"  # tiny-moe's, here for those who have no data/
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


# The families of which a part of the layers can be written. Others say what each layer is.
LIKE = tuple(name for name in CONFIGS if name.startswith(("qwen3-", "qwen3.5-")))


@dataclass(frozen=True)
class Tensor:
    """One tensor to write: its name, its dtype as safetensors names it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return int(np.prod(self.shape)) * {"U32": 4, "F32": 4, "BF16": 2}[self.dtype]


def plan(config: dict, bits: int = BITS) -> tuple[list[Tensor], dict]:
    """The tensors of mlx-lm's quantized checkpoint, in the model's order, and its configuration."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes, quantize_model

    config = copy.deepcopy(config)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints the bits per weight
        model, config = quantize_model(model, config, GROUP_SIZE, bits)
    tensors = []
    for name, a in tree_flatten(model.parameters()):
        dtype = "U32" if a.dtype == mx.uint32 else "F32" if name.endswith("A_log") else "BF16"
        tensors.append(Tensor(name, dtype, tuple(a.shape)))
    return tensors, config


def shards(tensors: list[Tensor], limit: int = SHARD_NBYTES) -> list[list[Tensor]]:
    """Divide tensors into files of at most ``limit`` bytes; a larger tensor has its own file."""
    out, size = [[]], 0
    for t in tensors:
        if out[-1] and size + t.nbytes > limit:
            out.append([])
            size = 0
        out[-1].append(t)
        size += t.nbytes
    return out


# A layer's output has this standard deviation if its input has 1. Routed experts get more, because
# eight near-equal scores scale them down and each of them should change the next token. Other
# branches get less, so that the residual stream stays larger than each of them.
GAINS = {
    "switch_mlp.down_proj": 3.0,
    "down_proj": 0.5, "o_proj": 0.5, "out_proj": 0.5,
    "lm_head": 3.0,
}  # fmt: skip


def _bf16(x):
    """The 16 bits of the nearest bfloat16 of each float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _float32(bits):
    """The float32 of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _scale_table(path, fan_in, bits):
    """256 scales and their biases as bfloat16 bits, for weights uniform around zero."""
    levels = 2**bits
    std_of_levels = np.sqrt((levels**2 - 1) / 12)
    gain = next((g for suffix, g in GAINS.items() if path.endswith(suffix)), 1.0)
    std = gain if path.endswith("embed_tokens") else gain / np.sqrt(fan_in)
    scales = _bf16(np.linspace(0.5, 1.5, 256) * std / std_of_levels)
    return scales, _bf16(-(levels - 1) / 2 * _float32(scales))


# These projections write to the residual stream, beside the embedding.
WRITERS = ("o_proj", "out_proj", "down_proj")
# A router's logits of a token's experts, the most frequent first; those of all others are near 0.
LOGITS = (4.0, 3.0)


class Routers:
    """Routers that choose by the token alone, written into a checkpoint's random weights.

    The first R dimensions of the residual stream hold a code for the token's kind: a row of a
    Hadamard matrix, so that all R codes are orthogonal. They come from the embedding, and no layer
    changes them, since the rows of the projections that would write there are zero. Each router
    reads these dimensions only, and its weights are the sum over all kinds of wanted logits times
    code. The other dimensions are as random as without it, so that the text depends on every layer
    as before. The trace is that of a text in the checkpoint's tokenizer.
    """

    def __init__(self, config: dict, tensors: list[Tensor], trace: Trace, seed: int):
        text = config.get("text_config", config)
        D, L, E, K, V = (
            text.get(key, 0)
            for key in (
                "hidden_size",
                "num_hidden_layers",
                "num_experts",
                "num_experts_per_tok",
                "vocab_size",
            )
        )
        gates = [t.name for t in tensors if t.name.endswith(".mlp.gate.scales")]
        if len(gates) != L or D < 2 * GROUP_SIZE:
            raise ValueError(
                "routing: expected a model with a quantized router mlp.gate in each of its "
                f"layers, and a hidden size of at least {2 * GROUP_SIZE}; got {len(gates)} such "
                f"routers in {L} layers, and {D}."
            )
        self.layer_of = {name.removesuffix(".scales"): i for i, name in enumerate(gates)}
        self.bits = {t.name: 32 * t.shape[-1] // D for t in tensors if t.dtype == "U32"}
        self.hidden, self.reserved = D, 1 << (D // 2).bit_length() - 1
        self.routing = by_token.fit(trace, L, E, K, V, self.reserved, seed)
        self.codes = np.ones((1, 1), np.float32)
        while len(self.codes) < self.reserved:
            self.codes = np.block([[self.codes, self.codes], [self.codes, -self.codes]])
        self._last = None, None

    def write(self, path: str, leaf: str, row: int, out: np.ndarray) -> None:
        """Change rows of one tensor in place; the first is number ``row``.

        ``leaf`` is weight, scales or biases. All dimensions but the last count as rows, and a
        weight's rows ``out`` are bytes.
        """
        rows = slice(row, row + len(out))
        if path.endswith("embed_tokens"):
            new = self._quantized(path, lambda: self.codes)[leaf][self.routing.kinds[rows]]
        elif path in self.layer_of:
            new = self._quantized(path, lambda: self._router(self.layer_of[path]))[leaf][rows]
            if leaf != "weight":
                out[:] = 0
        elif path.endswith(WRITERS) and leaf != "weight":
            out[np.arange(row, row + len(out)) % self.hidden < self.reserved] = 0
            return
        else:
            return
        out[:, : new.shape[1]] = new

    def _router(self, layer):
        """A router's weights for the code's dimensions, ``[E, R]``."""
        experts = self.routing.experts[:, layer]
        logits = np.zeros((len(experts), self.routing.num_experts), np.float32)
        np.put_along_axis(logits, experts, np.linspace(*LOGITS, experts.shape[1]), 1)
        return logits.T @ self.codes / len(self.codes)

    def _quantized(self, path, weights):
        """Quantize weights symmetrically around zero; the last path's three tensors are kept."""
        if self._last[0] != path:
            bits = self.bits[f"{path}.weight"]
            half = 1 << bits - 1
            groups = weights().reshape(-1, self.reserved // GROUP_SIZE, GROUP_SIZE)
            scales = _bf16(np.maximum(abs(groups).max(-1), 1e-6) / (half - 1))
            exact = _float32(scales)
            levels = np.rint(groups / exact[..., None]).clip(1 - half, half - 1) + half
            levels = levels.astype(np.uint8).reshape(-1, self.reserved)
            if bits == 4:
                levels = levels[:, ::2] | levels[:, 1::2] << 4
            pieces = {"weight": levels, "scales": scales, "biases": _bf16(-half * exact)}
            self._last = path, pieces
        return self._last[1]


def _chunks(tensor, shapes, seed, silent_rows, routers=None):
    """Yield the bytes of one tensor as numpy arrays of about ``CHUNK_NBYTES``."""
    path, _, leaf = tensor.name.rpartition(".")
    # A bias is -(2^bits - 1) / 2 times its scale, so both draw the same random numbers.
    quantized = f"{path}.scales" in shapes
    draw = "scales" if quantized and leaf == "biases" else leaf
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(f"{path}.{draw}".encode())]))
    count = int(np.prod(tensor.shape))
    if tensor.dtype == "U32":
        width = tensor.shape[-1] * 4  # bytes of a row: whole random numbers, as of 64 weights
        rows_per_chunk = max(1, CHUNK_NBYTES // width)
        for row in range(0, tensor.nbytes // width, rows_per_chunk):
            rows = min(rows_per_chunk, tensor.nbytes // width - row)
            out = rng.integers(0, 2**64, rows * width // 8, np.uint64).view(np.uint8)
            out = out.reshape(rows, width)
            if routers:
                routers.write(path, leaf, row, out)
            yield out
    elif quantized and leaf in ("scales", "biases"):
        groups = tensor.shape[-1]
        fan_in = groups * GROUP_SIZE
        table = _scale_table(path, fan_in, shapes[f"{path}.weight"][-1] * 32 // fan_in)[
            leaf == "biases"
        ]
        rows_per_chunk = max(1, CHUNK_NBYTES // (2 * groups))
        for row in range(0, count // groups, rows_per_chunk):
            rows = min(rows_per_chunk, count // groups - row)
            out = table[rng.integers(0, 256, (rows, groups), np.uint8)]
            if path.endswith("lm_head"):
                out[[r - row for r in silent_rows if row <= r < row + rows]] = 0
            if routers:
                routers.write(path, leaf, row, out)
            yield out
    elif leaf == "A_log":
        yield np.log(rng.uniform(0.01, 16, count)).astype(np.float32)
    elif tensor.name.endswith("conv1d.weight"):
        yield _bf16(rng.normal(0, 0.5, count))
    else:  # norms and dt_bias
        yield _bf16(np.ones(count))


def _header(tensors):
    """The first bytes of a safetensors file."""
    header, offset = {"__metadata__": {"format": "mlx"}}, 0
    for t in tensors:
        header[t.name] = {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [offset, offset + t.nbytes],
        }
        offset += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_headers(folder: Path, config: dict, bits: int = BITS) -> None:
    """Write a checkpoint of real sizes whose weights are a hole in a sparse file, all zero."""
    tensors, config = plan(config, bits)
    header = _header(tensors)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(t.nbytes for t in tensors))
    (folder / "config.json").write_text(json.dumps(config))


def _write_shard(path, tensors, shapes, seed, silent_rows, routers, progress):
    with open(path, "wb") as f:
        f.write(_header(tensors))
        for t in tensors:
            for chunk in _chunks(t, shapes, seed, silent_rows, routers):
                f.write(chunk)
                progress.update(chunk.nbytes)
        f.flush()
        os.fsync(f.fileno())


def _tokenizer_facts(file, text):
    """The size of a ``tokenizer.json``'s vocabulary, and the ids that must never be decoded."""
    spec = read_json(file, {"model": {"vocab": (dict, list)}}, text)
    vocab = spec["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    added = [t["id"] for t in spec.get("added_tokens", [])]
    return max(ids + added) + 1, added


def _set_text(config, **values):
    text = config.get("text_config", config)
    text.update({k: v for k, v in values.items() if v is not None})


def _as_gb(nbytes):
    return f"{nbytes / 1e9:.2f} GB"


def synthesize(
    out: str | Path,
    like: str = "qwen3.5-35b-a3b",
    layers: int | None = None,
    vocab: int | None = None,
    seed: int = 0,
    tokenizer: str | Path | None = None,
    config: dict | None = None,
    progress: bool = True,
    routing: str | Path | Trace | None = None,
) -> Path:
    """Write a random 4-bit checkpoint that ``mlx_lm.load`` loads into a new folder.

    It has the shapes of ``config``, else of the model ``like``, one of ``LIKE``. None means as many
    ``layers`` as the real model, the tokenizer's ``vocab``, tiny-moe's ``tokenizer``. ``routing``
    is a trace, or the file of one, recorded with the same tokenizer: fed its text, the routers
    choose experts with its locality; with None they choose nearly uniformly.
    """
    from tqdm import tqdm

    out = Path(out)
    if config is None:
        if like not in LIKE:
            raise ValueError(f"like={like!r}: expected one of {', '.join(LIKE)}")
        config = CONFIGS[like]
    config = copy.deepcopy(config)
    text = config.get("text_config", config)
    published_layers, published_vocab = text["num_hidden_layers"], text["vocab_size"]
    # mlx-lm's hybrid models need a layer of full attention.
    fewest = text.get("full_attention_interval", 1)
    if layers is not None and not fewest <= layers <= published_layers:
        raise ValueError(
            f"layers={layers}: expected {fewest} to {published_layers}, the depth of {like}"
        )
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists already: remove it or name another folder")

    tokenizer = TOKENIZER if tokenizer is None else Path(tokenizer)
    if not (tokenizer / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"no tokenizer.json in {tokenizer}: name a folder that holds one with --tokenizer "
            "(that of any mlx-lm model)"
        )
    # Read once: it may be replaced while the weights are written.
    copied = {n: (tokenizer / n).read_bytes() for n in TOKENIZER_FILES if (tokenizer / n).is_file()}
    vocab_of_tokenizer, special = _tokenizer_facts(
        tokenizer / "tokenizer.json", copied["tokenizer.json"]
    )
    vocab = vocab_of_tokenizer if vocab is None else vocab
    if vocab < vocab_of_tokenizer:
        raise ValueError(
            f"vocab={vocab}: expected at least {vocab_of_tokenizer}, the tokenizer's own"
        )
    # Ids that the tokenizer cannot decode, and the end of the text, get a logit of zero, so that
    # greedy decoding never picks them.
    silent_rows = sorted({*special, *range(vocab_of_tokenizer, vocab)})
    _set_text(config, num_hidden_layers=layers, vocab_size=vocab)

    tensors, config = plan(config)
    shapes = {t.name: t.shape for t in tensors}
    trace = Trace.load(routing) if isinstance(routing, (str, Path)) else routing
    routers = None if trace is None else Routers(config, tensors, trace, seed)
    nbytes = sum(t.nbytes for t in tensors)
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < nbytes + SPARE_NBYTES:
        raise OSError(
            errno.ENOSPC,
            f"not enough disk in {parent}: the checkpoint takes {_as_gb(nbytes)}, {_as_gb(free)} "
            "is free; ask for fewer layers with --layers or choose another disk",
        )
    config["moelab_synthetic"] = {
        "like": like,
        "seed": seed,
        "layers": text["num_hidden_layers"],
        "layers_of_the_real_model": published_layers,
        "vocab": vocab,
        "vocab_of_the_real_model": published_vocab,
    }
    if routers:
        config["moelab_synthetic"]["routing"] = {
            "trace": trace.model,
            "share_of_experts_in_slots": by_token.SHARE,
            "lru_hit_rate_of_the_trace": float(routers.routing.wanted.mean()),
            "lru_hit_rate": float(routers.routing.hit_rate.mean()),
        }

    parts, index = shards(tensors), {}
    names = ["model.safetensors"]
    if len(parts) > 1:
        names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    written = [*names, "model.safetensors.index.json", "config.json", "README.md", *copied]
    partial = begin(out, JOURNAL, written)
    try:
        bar = tqdm(
            total=nbytes,
            unit="B",
            unit_scale=True,
            desc=out.name,
            disable=not progress,
            leave=False,
        )
        with bar:
            for name, part in zip(names, parts):
                index.update({t.name: name for t in part})
                _write_shard(partial / name, part, shapes, seed, silent_rows, routers, bar)
        (partial / "model.safetensors.index.json").write_text(
            json.dumps(
                {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(index.items()))},
                indent=4,
            )
        )
        (partial / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=4))
        for name, content in copied.items():
            (partial / name).write_bytes(content)
        (partial / "README.md").write_text(_readme(like, config["moelab_synthetic"], nbytes))
        finish(partial, out, JOURNAL)
    except BaseException as error:  # Ctrl-C too
        clear(partial, JOURNAL, written)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC,
                f"the disk of {parent} filled up while {_as_gb(nbytes)} were written; the files "
                "are removed again",
            ) from error
        raise
    return out


def _readme(like, facts, nbytes):
    layers, vocab, seed = facts["layers"], facts["vocab"], facts["seed"]
    command = f"--like {like} --layers {layers} --vocab {vocab} --seed {seed}"
    routes = """Routing is near uniform, so caches hit less often
than with a real model, which repeats its experts more."""
    if routing := facts.get("routing"):
        command += " --routing TRACE"
        routes = f"""But the routers are not noise, nor is the
part of the residual stream that they read: a token's experts depend on the token alone, so that a
text has the locality of a recorded trace:

    {routing["trace"]}

With a quarter of the experts in slots, the LRU hit rate is
{routing["lru_hit_rate_of_the_trace"]:.3f} in the trace and {routing["lru_hit_rate"]:.3f} in this
model fed the trace's text. The first layer's choice tells those of all others, so this model says
nothing about prefetching.
"""
    return f"""# A synthetic checkpoint: random weights

The exact layer shapes of {like}, {layers} of its {facts["layers_of_the_real_model"]} layers,
{_as_gb(nbytes)}, in mlx-lm's 4-bit format (affine, group 64; router and shared expert's gate at 8
bits). Every weight is noise with seed {seed}: the model's text means nothing, and its layers cost
as much to read and to compute as the real ones. {routes}
The vocabulary has {vocab} entries in place of {facts["vocab_of_the_real_model"]}, so the embedding
and the head are smaller than the real ones.

Made by
`python -m moelab synthesize OUT {command}`.
"""
