"""``synthesize``: a random checkpoint with the exact layer shapes of a real model.

The tensors have the names and shapes that mlx-lm's model has with the published configuration. The
model writes noise, but each layer costs as much to read and to compute as the real one.
"""

import contextlib
import copy
import io
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from tokenizers import Tokenizer

from .checkpoint import model_classes, new_folder, readable
from .checkpoint.headers import DTYPE_NAMES, DTYPES, header_bytes
from .configs import CONFIGS, one_of
from .replay.by_token import GROUP_SIZE, SHARE, Routers, bf16, float32
from .streaming.trace import Trace

BITS = 4  # bits of a weight; mlx-lm's own default
CHUNK_NBYTES = 16 << 20  # a tensor is made and written in pieces of about this size
TOKENIZER = Path(__file__).parent / "tokenizer"  # tiny-moe's; an installed moelab has no data/
# Families that can be written with fewer layers. Configurations of other families list every layer.
LIKE = tuple(name for name in CONFIGS if name.startswith(("qwen3-", "qwen3.5-", "qwen3.8-")))
# The standard deviation of a matrix's outputs if that of its inputs is 1. Routed experts get more,
# because eight near-equal scores scale them down, and each expert should change the next token.
# Other branches get less, so that the residual stream stays larger than each branch.
GAINS = {
    "switch_mlp.down_proj": 3.0,
    "down_proj": 0.5, "o_proj": 0.5, "out_proj": 0.5,
    "lm_head": 3.0,
}  # fmt: skip


@dataclass(frozen=True)
class NewTensor:
    """One tensor to write."""

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    # The values of a tensor that is not random, such as the sizes of an n-gram table.
    given: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPES[self.dtype].size


def plan(config: dict, bits: int = BITS) -> tuple[list[NewTensor], dict]:
    """The tensors (in the model's order) and configuration of mlx-lm's quantized checkpoint."""
    config = copy.deepcopy(config)
    model_class, args_class = model_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    # mlx-lm quantizes only rows of whole groups; the rows of an n-gram table get smaller groups.
    small = {"group_size": GROUP_SIZE // 2, "bits": bits, "mode": "affine"}
    embeddings = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.Embedding)]
    odd = [p for p, m in embeddings if m.weight.shape[-1] % GROUP_SIZE == small["group_size"]]
    nn.quantize(model, small["group_size"], bits, class_predicate=lambda path, _: path in odd)
    with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints the bits per weight
        model, config = mlx_lm_utils.quantize_model(model, config, GROUP_SIZE, bits)
    config["quantization"] |= dict.fromkeys(odd, small)
    tensors = []
    for name, a in tree_flatten(model.parameters()):
        if not mx.issubdtype(a.dtype, mx.floating) and a.dtype != mx.uint32:
            tensors.append(NewTensor(name, DTYPE_NAMES[a.dtype], tuple(a.shape), np.array(a)))
            continue
        dtype = "U32" if a.dtype == mx.uint32 else "F32" if name.endswith("A_log") else "BF16"
        tensors.append(NewTensor(name, dtype, tuple(a.shape)))
    return tensors, config


def _scale_table(path, fan_in, bits):
    """Return 256 scales and their biases as bfloat16 bits, for weights uniform around zero."""
    levels = 2**bits
    std_of_levels = np.sqrt((levels**2 - 1) / 12)
    gain = next((g for suffix, g in GAINS.items() if path.endswith(suffix)), 1.0)
    std = gain if path.endswith("embed_tokens") else gain / np.sqrt(fan_in)
    scales = bf16(np.linspace(0.5, 1.5, 256) * std / std_of_levels)
    return scales, bf16(-(levels - 1) / 2 * float32(scales))


def _chunks(tensor, shapes, sizes, seed, silent_rows, routers=None):
    """Yield the bytes of one tensor as numpy arrays of about ``CHUNK_NBYTES``."""
    if tensor.given is not None:
        yield tensor.given
        return
    path, _, leaf = tensor.name.rpartition(".")
    # A bias is -(2^bits - 1) / 2 times its scale, so both draw the same random numbers.
    scaled = f"{path}.scales" in shapes and leaf in ("scales", "biases")
    draw = "scales" if scaled else leaf
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(f"{path}.{draw}".encode())]))
    count = int(np.prod(tensor.shape))
    if tensor.dtype != "U32" and not scaled:
        if leaf == "A_log":
            yield np.log(rng.uniform(0.01, 16, count)).astype(np.float32)
        elif tensor.name.endswith("conv1d.weight"):
            yield bf16(rng.normal(0, 0.5, count))
        elif len(tensor.shape) > 1:
            yield bf16(rng.normal(0, tensor.shape[-1] ** -0.5, count))
        else:  # norms and dt_bias
            yield bf16(np.ones(count))
        return
    columns = tensor.shape[-1]
    if scaled:
        own = sizes.get(path)
        fan_in = columns * (own["group_size"] if isinstance(own, dict) else GROUP_SIZE)
        bits = shapes[f"{path}.weight"][-1] * 32 // fan_in
        table = _scale_table(path, fan_in, bits)[leaf == "biases"]
    width = tensor.nbytes * columns // count  # bytes of a row
    step = max(1, CHUNK_NBYTES // width)
    for row in range(0, count // columns, step):
        rows = min(step, count // columns - row)
        if scaled:
            out = table[rng.integers(0, 256, (rows, columns), np.uint8)]
            if path.endswith("lm_head"):
                out[[r - row for r in silent_rows if row <= r < row + rows]] = 0
        else:  # a row has a multiple of 32 weights, so whole 8-byte numbers fill it
            out = rng.integers(0, 2**64, rows * width // 8, np.uint64)
            out = out.view(np.uint8).reshape(rows, width)
        if routers:
            routers.write(path, leaf, row, out)
        yield out


def _header(tensors):
    """Return the first bytes of a safetensors file with these tensors."""
    header, offset = {"__metadata__": {"format": "mlx"}}, 0
    for t in tensors:
        place = [offset, offset + t.nbytes]
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": place}
        offset += t.nbytes
    return header_bytes(header)


def write_headers(folder: Path, config: dict, bits: int = BITS) -> None:
    """Write a checkpoint of real sizes. Its weights are a hole in a sparse file: all zeros."""
    tensors, config = plan(config, bits)
    header = _header(tensors)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(t.nbytes for t in tensors))
    (folder / "config.json").write_text(json.dumps(config))


def _read_tokenizer(folder):
    """Read a tokenizer's files, its vocabulary's size, and the ids that must never be picked."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"no tokenizer.json in {folder}: name with --tokenizer a folder that has one, such as "
            "that of any mlx-lm model"
        )
    names = [file.name, "tokenizer_config.json", "special_tokens_map.json"]
    names += ["chat_template.jinja", "chat_template.json"]
    # The files are read before the weights are written, since they may be replaced meanwhile.
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    with readable(f"{file}: expected a tokenizer, got"):
        known = Tokenizer.from_buffer(files[file.name])
    return files, max(known.get_vocab().values()) + 1, list(known.get_added_tokens_decoder())


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
    """Write into a new folder a random 4-bit checkpoint that ``mlx_lm.load`` can load.

    The checkpoint has the shapes of ``config``, or else of the model ``like`` (one of ``LIKE``). By
    default it has as many ``layers`` as the real model, ``vocab`` is the tokenizer's, and
    ``tokenizer`` is tiny-moe's. ``routing`` is a trace (or its file) recorded with the same
    tokenizer: the routers choose experts with the trace's locality for the trace's text. If
    ``routing`` is None, they choose nearly uniformly, so that caches hit least.
    """
    out = Path(out)
    config = copy.deepcopy(CONFIGS[one_of(LIKE, like)] if config is None else config)
    text = config.get("text_config", config)
    published_layers, published_vocab = text["num_hidden_layers"], text["vocab_size"]
    # mlx-lm's hybrid models need a layer of full attention.
    fewest = text.get("full_attention_interval", 1)
    if layers is None:
        layers = published_layers
    elif not fewest <= layers <= published_layers:
        raise ValueError(
            f"layers={layers}: expected {fewest} to {published_layers}, the depth of {like}"
        )
    files, least, special = _read_tokenizer(TOKENIZER if tokenizer is None else Path(tokenizer))
    vocab = least if vocab is None else vocab
    if vocab < least:
        raise ValueError(f"vocab={vocab}: expected at least {least}, the tokenizer's own")
    # Ids that end a text and ids that the tokenizer cannot decode get a logit of zero, so that
    # greedy decoding never picks them.
    silent_rows = sorted({*special, *range(least, vocab)})
    text.update(num_hidden_layers=layers, vocab_size=vocab)

    tensors, config = plan(config)
    shapes, sizes = {t.name: t.shape for t in tensors}, config["quantization"]
    trace = Trace.load(routing) if isinstance(routing, (str, Path)) else routing
    routers = None if trace is None else Routers(config, tensors, trace, seed)
    nbytes = sum(t.nbytes for t in tensors)
    facts = {"like": like, "seed": seed, "layers": layers, "vocab": vocab}
    facts["layers_of_the_real_model"] = published_layers
    facts["vocab_of_the_real_model"] = published_vocab
    config["moelab_synthetic"] = facts
    if routers:
        facts["routing"] = {
            "trace": trace.model,
            "share_of_experts_in_slots": SHARE,
            "lru_hit_rate_of_the_trace": float(routers.routing.wanted.mean()),
            "lru_hit_rate": float(routers.routing.hit_rate.mean()),
        }
    shards = mlx_lm_utils.make_shards({t.name: t for t in tensors})
    n = len(shards)
    names = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    parts = dict(zip(names if n > 1 else ["model.safetensors"], (s.values() for s in shards)))
    index = {
        "metadata": {"total_size": nbytes},
        "weight_map": {t.name: name for name, part in parts.items() for t in part},
    }
    files["model.safetensors.index.json"] = json.dumps(index, indent=4, sort_keys=True).encode()
    files["config.json"] = json.dumps(dict(sorted(config.items())), indent=4).encode()

    with new_folder(out, nbytes, progress) as (folder, bar):
        for name, part in parts.items():
            with open(folder / name, "wb") as f:
                f.write(_header(part))
                for t in part:
                    for chunk in _chunks(t, shapes, sizes, seed, silent_rows, routers):
                        f.write(chunk)
                        bar.update(chunk.nbytes)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return out
