"""Everything that can go wrong gives one clear error, and the engine still works.

An error says what is wrong and where, what was expected and found, and what to do. Every test ends
with ``assert_usable``: a model that was loaded before still gives the same tokens.
"""

import ctypes
import errno
import functools
import gc
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import families
import mlx.core as mx
import numpy as np
import pytest
from families import E, K
from faults import patch_preadv, read_in_threads
from greedy import greedy_logits
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

import moelab
from moelab import synthesize
from moelab.checkpoint import Checkpoint
from moelab.experts import expert_modules
from moelab.streaming import model as model_module
from moelab.streaming.build import build_model, place_experts
from moelab.streaming.config import OPTIONS
from moelab.streaming.model import load_model
from moelab.streaming.reading import native, reader
from moelab.streaming.residency import layer, residency

TINY_MOE = moelab.DATA / "models" / "tiny-moe"
STREAMED = ("serial", "buffers", "stacked", "fused")
SLOTS = K + 1
PROMPT = [5, 36, 67, 2, 33, 64, 95, 30, 61]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A valid checkpoint in three shards. Tests damage copies of it."""
    return families.write_checkpoint(
        "qwen3_moe", tmp_path_factory.mktemp("good") / "qwen3_moe", "sharded"
    )


@pytest.fixture
def damaged(good, tmp_path):
    """A copy of the valid checkpoint, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "damaged"))


def generate(model, steps=4):
    return greedy_logits(model, PROMPT, steps)


def num_open():
    """How many files are open, once the objects that a caught exception refers to are freed."""
    gc.collect()
    return len(os.listdir("/dev/fd"))


@pytest.fixture(scope="module")
def want(good):
    """The answer of the resident model."""
    with load_model(good, moelab.StreamConfig(mode="resident"))[0] as model:
        return generate(model)


@pytest.fixture
def assert_usable(good, want):
    """A loaded model. Call the fixture to assert that it answers as the resident one does."""
    model, _ = load_model(good, moelab.StreamConfig(slots=SLOTS))
    np.testing.assert_array_equal(generate(model), want)
    yield lambda: np.testing.assert_array_equal(generate(model), want)
    moelab.close(model)


def failing_load(path, error, match, config=None):
    """Load a bad model. Return the message, which must be short and without a traceback."""
    before = num_open()
    with pytest.raises(error, match=match) as caught:
        load_model(path, config or moelab.StreamConfig(slots=SLOTS))
    message = str(caught.value)
    del caught
    assert num_open() == before, "a failed load left files open"
    assert len(message) < 700 and "Traceback" not in message, message
    return message


def shard(path, i=1):
    return sorted(path.glob("*.safetensors"))[i]


# Files that are missing, truncated or of the wrong kind, or too many

LOADS = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
import moelab
try:
    moelab.plan(sys.argv[1])
except OSError as error:
    print(error)
assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
"""


@pytest.mark.parametrize(
    "soft, hard, said",
    [(256, 256, ""), (64, 1024, ""), (256, "$(ulimit -Hn)", ""), (64, 64, "least 7. open")],
)
def test_limits_of_open_files(soft, hard, said, good):
    limited = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", limited, "sh", sys.executable, "-c", LOADS, good],
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    assert re.search(said, done.stdout) and bool(done.stdout) == bool(said), done.stdout


def test_missing_shard(damaged, assert_usable):
    gone = shard(damaged)
    gone.unlink()
    message = failing_load(damaged, moelab.CheckpointError, "1 are not in the folder")
    assert gone.name in message and "Download" in message
    assert_usable()


NO_INDEX = ("{", '{"metadata": {}}', '{"weight_map": {"a": [1], "b": "c"}}', "[" * 100_000)


@pytest.mark.parametrize("content", NO_INDEX, ids=lambda text: text[:20])
def test_index_is_not_an_index(content, damaged, assert_usable):
    (damaged / "model.safetensors.index.json").write_text(content)
    expected = "expected JSON with a 'weight_map'|not JSON|expected a JSON object"
    message = failing_load(damaged, moelab.CheckpointError, expected)
    assert "model.safetensors.index.json" in message and "Download" in message
    assert_usable()


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_truncated_shard(keep, damaged, assert_usable):
    file = shard(damaged)
    keep %= file.stat().st_size
    os.truncate(file, keep)
    message = failing_load(damaged, moelab.CheckpointError, f"the header of its {keep} bytes")
    assert str(file) in message and "download it again" in message
    assert_usable()


def test_no_safetensors(damaged, assert_usable):
    for file in (*damaged.glob("*.safetensors"), damaged / "model.safetensors.index.json"):
        file.unlink()
    failing_load(damaged, moelab.CheckpointError, r"expected model\*.safetensors, found none. Give")
    assert_usable()


def test_not_a_model_folder(tmp_path, assert_usable):
    failing_load(
        tmp_path,
        moelab.CheckpointError,
        "expected a model folder with a config.json, found none. Give",
    )
    assert_usable()


NOT_OBJECTS = (b"{", b'{"a": "\xff"}', b'{"a": ' + b"1" * 5000 + b"}", b"[1, 2]")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("content", NOT_OBJECTS)
def test_config_is_not_an_object(file, content, damaged, assert_usable):
    (damaged / file).write_bytes(content)
    message = failing_load(damaged, moelab.CheckpointError, "not JSON|expected a JSON object")
    assert str(damaged / file) in message and "Download" in message
    with pytest.raises(moelab.CheckpointError):
        moelab.footprint(damaged)
    assert_usable()


def set_config(path, **changes):
    """Change values of a config.json. ``a__b`` is b in a. The quantization has two names."""
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        *outer, key = key.split("__")
        holder = config
        for name in outer:
            holder = holder[name]
        holder[key] = value
    if "quantization" in config:
        config["quantization_config"] = config["quantization"]
    (path / "config.json").write_text(json.dumps(config))


BAD_VALUES = [
    ("text_config", "x"),
    ("quantization", 4),
    ("quantization__group_size", 33),
    ("quantization__bits", 7),
    ("quantization__mode", "int4"),
    ("rope_theta", "x"),
    ("num_hidden_layers", 4),
    ("num_hidden_layers", 10**9),
    ("num_attention_heads", 3),
    ("hidden_size", 2**31),
    ("num_experts", 10**9),
    ("num_experts_per_tok", True),
    ("num_experts_per_tok", [2, "x"]),
    ("decoder_sparse_step", 0),
    ("model_type", ["qwen3_moe"]),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES, ids=lambda v: repr(v)[:30])
def test_config_with_a_bad_value(key, value, damaged, assert_usable):
    set_config(damaged, **{key: value})
    message = failing_load(damaged, moelab.CheckpointError, "expected|cannot build it|cannot call")
    assert str(damaged) in message
    with pytest.raises(moelab.CheckpointError):
        moelab.footprint(damaged)
    assert_usable()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3_moe", {"quantization__group_size": 0}),
        ("qwen3_5_moe", {"text_config__shared_expert_intermediate_size": 1}),
        ("dots1", {"n_group": 0}),
        ("dots1", {"n_group": False}),
        ("bailing_moe_linear", {"group_norm_size": 0}),
    ],
)
def test_config_that_would_end_the_process(family, change, tmp_path):
    """mlx-lm divides by a group size that it takes, or infers, from config.json."""
    path = families.write_checkpoint(family, tmp_path / family, "affine4")
    set_config(path, **change)
    command = [sys.executable, "-c", "import sys, moelab; moelab.plan(sys.argv[1])", str(path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1, process.returncode  # not a signal
    assert f"CheckpointError: {path}" in process.stderr


def test_a_tensor_in_two_files(damaged, assert_usable):
    """mlx-lm takes the file that the folder lists last, which depends on the file system."""
    first, second = shard(damaged, 0), shard(damaged, 1)
    weights, more = mx.load(str(first)), mx.load(str(second))
    name = next(n for n in weights if "switch_mlp" in n)
    more[name] = mx.zeros_like(weights[name])
    mx.eval(more)
    mx.save_safetensors(str(second), more)
    message = failing_load(damaged, moelab.CheckpointError, "expected each tensor once")
    assert all(part in message for part in (str(damaged), name, first.name, second.name, "Remove"))
    assert_usable()


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors.index.json", "vocab.txt", "shard"],
)
def test_a_fifo_for_a_file(name, damaged, assert_usable, in_time):
    file = shard(damaged) if name == "shard" else damaged / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    message = failing_load(damaged, moelab.CheckpointError, "expected a file, got p")
    assert str(file) in message
    assert_usable()


@pytest.fixture
def with_tokenizer(damaged):
    """A copy of the valid checkpoint, with a tokenizer."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MOE / file, damaged)
    return damaged


def changed(**values):
    return lambda text: json.dumps({**json.loads(text), **values})


def with_strange_merge(text):
    return text.replace('"merges": [', '"merges": [["nothing", "known"],')


BAD_TOKENIZERS = {
    "cut off": ("tokenizer.json", lambda text: text[: len(text) // 2]),
    "merges of nothing": ("tokenizer.json", with_strange_merge),
    "config cut off": ("tokenizer_config.json", lambda text: text[:-5]),
    "class is a list": ("tokenizer_config.json", changed(tokenizer_class=[1])),
    "length is text": ("tokenizer_config.json", changed(model_max_length="long")),
}


@pytest.mark.parametrize("damage", BAD_TOKENIZERS)
def test_tokenizer_is_damaged(damage, with_tokenizer, assert_usable):
    name, change = BAD_TOKENIZERS[damage]
    (with_tokenizer / name).write_text(change((with_tokenizer / name).read_text()))
    moelab.load(TINY_MOE)[
        0
    ].__exit__()  # transformers keeps files of its own open from the first time on
    before = num_open()
    with pytest.raises(moelab.CheckpointError) as caught:
        moelab.load(with_tokenizer, moelab.StreamConfig(slots=SLOTS))
    message = str(caught.value)
    del caught
    assert num_open() == before, "a failed load left files open"
    assert str(with_tokenizer) in message and "Download" in message and len(message) < 700
    assert_usable()


LORA = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
BAD_ADAPTERS = {  # a file, and what it holds in place of its bytes
    "a cut file": ("adapters.safetensors", lambda b: b[:-100]),
    "a length that lies": ("adapters.safetensors", lambda b: b"\xff" * 8 + b[8:]),
    "a header that is not JSON": ("adapters.safetensors", lambda b: b[:8] + b"x" + b[9:]),
    "an empty file": ("adapters.safetensors", lambda b: b""),
    "other names": ("adapters.safetensors", lambda b: b.replace(b"q_proj", b"x_proj")),
    "another rank": ("adapter_config.json", lambda b: b.replace(b": 4", b": 5")),
    "no rank": ("adapter_config.json", lambda b: b.replace(b": 4", b": null")),
    "a rank too large": ("adapter_config.json", lambda b: b.replace(b": 4", b": 1099511627776")),
    "a scale that is a text": ("adapter_config.json", lambda b: b.replace(b"10.0", b'"x"')),
    "settings that are no JSON": ("adapter_config.json", lambda b: b[:-3]),
    "settings that are no text": ("adapter_config.json", lambda b: b"\xff" + b),
    "settings that are a list": ("adapter_config.json", lambda b: b"[]"),
    "settings of nothing": ("adapter_config.json", lambda b: b"{}"),
    "no settings": ("adapter_config.json", None),
    "no weights": ("adapters.safetensors", None),
}


@pytest.mark.parametrize("damage", BAD_ADAPTERS)
def test_adapters_are_damaged(damage, with_tokenizer, good, assert_usable):
    adapters, (name, change) = with_tokenizer / "adapters", BAD_ADAPTERS[damage]
    adapters.mkdir()
    plain = families.load_resident(good)
    linear_to_lora_layers(plain, 2, LORA)
    weights = {n: p for n, p in tree_flatten(plain.parameters()) if ".lora_" in n}
    mx.save_safetensors(str(adapters / "adapters.safetensors"), weights)
    settings = json.dumps({"num_layers": 2, "lora_parameters": LORA})
    (adapters / "adapter_config.json").write_text(settings)
    load = functools.partial(moelab.load, with_tokenizer, moelab.StreamConfig(slots=SLOTS))
    moelab.close(load(adapter_path=str(adapters))[0])
    file = adapters / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    before = num_open()
    with pytest.raises((moelab.CheckpointError, FileNotFoundError), match=str(adapters)) as caught:
        load(adapter_path=str(adapters))
    message = str(caught.value)
    del caught
    assert num_open() == before, "a failed load left files open"
    assert re.search("again|leave", message) and len(message) < 700, message
    assert_usable()


def test_weights_are_missing(damaged, assert_usable):
    """The files are valid, but a part of the model is not in them."""
    file = shard(damaged)
    weights = mx.load(str(file))
    dropped = next(n for n in weights if "switch_mlp" in n)
    del weights[dropped]
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)
    message = failing_load(damaged, moelab.CheckpointError, "cannot build it|is not in the files")
    assert dropped in message
    assert_usable()


def test_unknown_architecture(damaged, assert_usable):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    failing_load(damaged, moelab.CheckpointError, "no_such_model")
    assert_usable()


# Wrong headers


def rewrite_header(file, edit):
    """Change a safetensors header and leave the data as it was.

    Args:
        edit (Callable): Gets the entries and the name of an expert's tensor.
    """
    data = file.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n])
    name = next(k for k in header if "switch_mlp" in k and k.endswith("weight"))
    result = edit(header, name)
    raw = result if isinstance(result, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + n :])


def set_entry(**fields):
    def edit(header, name):
        header[name].update({k: v(header[name]) if callable(v) else v for k, v in fields.items()})

    return edit


def overlap(header, name):
    start, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [start - 64, end - 64]


LIES = {
    "beyond the end": set_entry(data_offsets=lambda t: [o + 10**12 for o in t["data_offsets"]]),
    "over another tensor": overlap,
    "too short for its shape": set_entry(shape=lambda t: [t["shape"][0] + 1, *t["shape"][1:]]),
    "shape beyond 64 bits": set_entry(shape=[2**40, 2**40]),
    "offsets as text": set_entry(data_offsets=["0", "64"]),
    "unknown type": set_entry(dtype="Q4_K"),
    "not JSON": lambda header, name: b'{"a": ',
    "metadata is a list": lambda header, name: header.update(__metadata__=["mlx"]),
    "a name twice": lambda header, name: json.dumps(header)[:-1].encode() + b', "a": 1, "a": 2}',
    "bytes that are no tensor's": lambda header, name: (
        header.pop(max(header, key=lambda n: header[n].get("data_offsets", [-1])[0])) and None
    ),
}
NOT_MLX = {
    "a dimension beyond 32 bits": lambda header, name: header.update(
        empty={"dtype": "U8", "shape": [0, 2**31], "data_offsets": [0, 0]}
    ),
    "a type that MLX has not": set_entry(
        dtype="F8_E5M2", shape=lambda t: [t["data_offsets"][1] - t["data_offsets"][0]]
    ),
}


@pytest.mark.parametrize("lie", LIES | NOT_MLX)
def test_header_lies(lie, damaged, assert_usable):
    file = shard(damaged)
    rewrite_header(file, (LIES | NOT_MLX)[lie])
    match = "safetensors cannot read the header" if lie in LIES else "tensor .* has the"
    message = failing_load(damaged, moelab.CheckpointError, match)
    assert str(file) in message and "download it again" in message
    assert_usable()


@pytest.mark.parametrize("length", [0, 2**64 - 1])
def test_header_length_lies(length, damaged, assert_usable):
    file = shard(damaged)
    with open(file, "r+b") as f:
        f.write(struct.pack("<Q", length))
    message = failing_load(damaged, moelab.CheckpointError, "header")
    assert str(file) in message and "download it again" in message
    assert_usable()


# Impossible configurations


def bad_fields():
    """Every field of ``StreamConfig``, values that it does not take, and what it expects."""
    for name, option in OPTIONS.items():
        if option.choices:
            values = ("nonsense", mx.float32, None)
            expected = f"one of {', '.join(option.choices)}"
        elif option.bounds:
            least, most = option.bounds
            values = (least - 1, -3, most + 1, 2**70, 2.5, float(least), True, "16", "many")
            values += ("auto" if option.default is None else None,)
            expected = f"a whole number of at least {least} and at most {most}"
        elif isinstance(option.default, bool):
            values, expected = (0, "yes", None), "True or False"
        else:
            values, expected = (3, b"t.npz"), "the file of a trace"
        yield from ((name, value, expected) for value in values)


@pytest.mark.parametrize(("field", "value", "expected"), bad_fields(), ids=lambda v: repr(v)[:20])
def test_bad_stream_config(field, value, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        moelab.StreamConfig(**{field: value})
    message = str(caught.value)
    assert f"StreamConfig.{field}" in message and "expected" in message and repr(value) in message


@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_the_longest_context(kernels):
    """The plan for it says what it takes, where it fits and where it does not."""
    config = moelab.StreamConfig(context=2**31 - 256, kernels=kernels)
    began = time.monotonic()
    taken = moelab.plan(TINY_MOE, config, memory_nbytes=2**63 - 1).caches_nbytes
    assert taken / (4 * 2**31) == pytest.approx(768, rel=1e-3)  # two caches, and one copied
    with pytest.raises(ValueError, match=f"caches of {2**31 - 256} tokens 6597.* GB.*got 1.00 GB"):
        moelab.plan(TINY_MOE, config, memory_nbytes=10**9)
    assert time.monotonic() - began < 15


def test_ranks_divided_by_what_is_no_trace_of_the_model(good, tmp_path):
    config = moelab.StreamConfig(ranks_trace=tmp_path / "trace.npz")
    modules = expert_modules(build_model(Checkpoint(good), config)[0])

    def refused(expected):
        with pytest.raises(ValueError, match=expected) as caught:
            place_experts(modules, config, None)
        assert f"StreamConfig.ranks_trace: {config.ranks_trace}: " in str(caught.value)
        return str(caught.value)

    refused("expected a trace as Trace.save writes it.*Record it again")
    layers = len(modules)
    for L, e in ((layers + 1, E), (layers, E + 1)):
        experts, ids = np.zeros((3, L, K), np.uint16), np.zeros(3, np.int64)
        moelab.Trace(experts, np.full(3, "decode"), ids, e).save(config.ranks_trace)
        message = refused(f"expected a trace of {layers} MoE layers and {E} experts")
        assert f"got {L} and {e}" in message and "moelab.record" in message
    file = Path(config.ranks_trace)
    file.write_bytes(file.read_bytes()[:-30])
    refused("a damaged file")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLX_MOE_STACKED", "yes"),
        ("MLX_MOE_STACKED", "2"),
        ("MLX_MOE_FUSE_GATEUP", "-1"),
        ("MLX_MOE_CACHE_SLOTS", "many"),
        ("MLX_MOE_CACHE_SLOTS", "0"),
        ("TEND_MOE_CACHE_SLOTS", "some"),
        ("TEND_MOE_CACHE_SLOTS", "0"),
        ("SWIFTLM_TOP_K", ""),
        ("SWIFTLM_TOP_K", "-2"),
    ],
)
def test_bad_environment(name, value, monkeypatch):
    for variable in (v for option in OPTIONS.values() for v in option.environment):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MLX_MOE_STACKED", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: expected .*got '{value}'"):
        moelab.StreamConfig.from_env()


@pytest.mark.parametrize("mode", ["stacked", "fused"])
def test_fewer_slots_than_top_k(mode, good, assert_usable):
    message = failing_load(
        good, ValueError, f"at least {K} ", moelab.StreamConfig(mode=mode, slots=K - 1)
    )
    assert (
        "StreamConfig.slots" in message
        and f"got {K - 1}" in message
        and "Raise slots or lower top_k" in message
    )
    assert_usable()


@pytest.mark.parametrize("mode", ["resident", *STREAMED])
def test_top_k_beyond_the_experts(mode, good, assert_usable):
    message = failing_load(
        good, ValueError, f"1 to {E} ", moelab.StreamConfig(mode=mode, slots=E + 1, top_k=E + 1)
    )
    assert "StreamConfig.top_k" in message and f"got {E + 1}" in message
    assert_usable()


@pytest.mark.parametrize("mode", STREAMED)
def test_model_without_experts(mode, tmp_path, assert_usable):
    config = families.COMMON | {"model_type": "llama"}
    model_class, args_class = families.mlx_lm_utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    families.write_files(
        tmp_path / "dense", dict(families.tree_flatten(model.parameters())), config
    )
    message = failing_load(
        tmp_path / "dense", moelab.CheckpointError, "has no experts", moelab.StreamConfig(mode=mode)
    )
    assert "llama" in message and "mlx_lm.load" in message
    resident, _ = load_model(tmp_path / "dense", moelab.StreamConfig(mode="resident"))
    assert resident(mx.array([PROMPT])).shape == (1, len(PROMPT), families.VOCAB)
    assert_usable()


def test_not_a_model_from_moelab(good):
    for function in (moelab.stats, moelab.close):
        with pytest.raises(ValueError, match="expected a model from moelab.load"):
            function(families.load_resident(good))


# Failures while a model streams


@pytest.fixture(params=["inline", "threads"])
def reading(request, monkeypatch):
    """All reads in the calling thread, or all in the reader's threads."""
    if request.param == "threads":
        read_in_threads(monkeypatch)
    else:
        monkeypatch.setattr(reader, "INLINE_NBYTES", 1 << 40)


def spoil(view):
    view[:] = b"\xa5" * len(view)


@pytest.mark.parametrize("mode", STREAMED)
def test_read_fails_anywhere(mode, good, want, reading, monkeypatch):
    """The n-th read fails after it wrote wrong bytes into its slot. The next call is right."""
    preadv, count, fail_at = os.preadv, 0, -1

    def flaky(fd, views, offset):
        nonlocal count
        count += 1
        if count - 1 == fail_at:
            spoil(views[0])
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, views, offset)

    model, _ = load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS))
    with model:
        patch_preadv(monkeypatch, flaky)
        np.testing.assert_allclose(generate(model), want, atol=1e-4)
        for n in {0, 1, 2, 5, count // 3, count // 2, count - 1}:
            count, fail_at = 0, n
            with pytest.raises(moelab.ReadError, match="Input/output error") as caught:
                for _ in range(8):  # experts that are held are not read
                    generate(model)
            message = str(caught.value)
            assert caught.value.errno == errno.EIO
            for part in (
                ".safetensors",
                "switch_mlp",
                "expert ",
                "offset ",
                "Try again",
                "check the disk",
            ):
                assert part in message, message
            assert "load" not in message.partition("offset ")[2], "the model goes on without"
            got = generate(model)
            np.testing.assert_allclose(got, want, atol=1e-4)
            if mode in ("stacked", "fused"):
                np.testing.assert_array_equal(got, want)


@pytest.mark.skipif(native.loop() is None, reason="needs llvmlite")
@pytest.mark.parametrize("mode", ["stacked", "fused"])
def test_native_read_fails_anywhere(mode, good, want, monkeypatch):
    """The n-th read of native code fails, and again when it is repeated. The next call is right."""
    loop, count, fail_at, failed = native.loop(), 0, -1, False

    def flaky(table, n, flags, done, arrived):
        nonlocal count, failed
        loop(table, n, flags, done, arrived)
        at, count = 0 if failed else fail_at - count, count + n
        if 0 <= at < n:
            failed = True
            row = (ctypes.c_int64 * len(native.COLUMNS)).from_address(table + 48 * at)
            ctypes.memset(ctypes.c_int64.from_address(row[native.IOV]).value, 0xA5, 8)
            row[native.GOT] = -1
            ctypes.c_uint32.from_address(done).value = 0

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    model, _ = load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS))
    with model:
        np.testing.assert_array_equal(generate(model), want)
        monkeypatch.setattr(native, "loop", lambda: flaky)
        monkeypatch.setattr(os, "preadv", fails)
        np.testing.assert_array_equal(generate(model), want)
        for n in {0, 1, 2, 5, count // 3, count // 2, count - 1}:
            count, fail_at = 0, n
            with pytest.raises(moelab.ReadError, match="expert .*offset .*Input/output error"):
                for _ in range(8):  # experts that are held are not read
                    generate(model)
            fail_at, failed = -1, False
            np.testing.assert_array_equal(generate(model), want)


@pytest.mark.parametrize("mode", STREAMED)
def test_read_comes_back_short(mode, good, want, reading, monkeypatch):
    preadv, end_early = os.preadv, False

    def short(fd, views, offset):
        view = views[0]
        if end_early:
            return 0
        return preadv(
            fd, [view[: max(1, len(view) // 3)]], offset
        )  # a short read is legal: the rest must be read again

    model, _ = load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS))
    with model:
        patch_preadv(monkeypatch, short)
        np.testing.assert_allclose(generate(model), want, atol=1e-4)
        end_early = True
        with pytest.raises(moelab.ReadError, match=r"expected \d+ bytes, got 0") as caught:
            for _ in range(8):
                generate(model)
                model(mx.array([PROMPT[::-1]]))
        message = str(caught.value)
        for part in (".safetensors", "switch_mlp", "expert ", "offset ", "load again"):
            assert part in message, message
        end_early = False
        np.testing.assert_allclose(generate(model), want, atol=1e-4)


def until_it_reads(model):
    """Generate until something must be read."""
    for i in range(20):
        generate(model)
        model(mx.array([[(t + 7 * i) % families.VOCAB for t in PROMPT]]))


def modify(folder, later_ns):
    """Writes over the end of each file, and sets its mtime: so much later than it was."""
    time.sleep(0.02)  # a clock may be coarser than this test
    for file in folder.glob("*.safetensors"):
        status = file.stat()
        with open(file, "r+b") as f:
            f.seek(-64, os.SEEK_END)
            f.write(os.urandom(64))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + later_ns))


def assert_refused(model, folder):
    with pytest.raises(moelab.ReadError, match="changed while it was streamed.* ctime") as caught:
        until_it_reads(model)
    assert str(folder) in str(caught.value) and "Load the model again" in str(caught.value)


@pytest.mark.parametrize("mode", STREAMED)
def test_file_modified_while_streamed(mode, damaged, assert_usable, reading):
    model, _ = load_model(damaged, moelab.StreamConfig(mode=mode, slots=SLOTS))
    with model:
        generate(model)
        modify(damaged, later_ns=1_000_000)
        for _ in range(2):  # refused again: the files hold another model now
            assert_refused(model, damaged)
    assert_usable()


def test_file_modified_with_its_times_put_back(damaged, assert_usable, reading):
    """A restored backup may do so. Only the ctime shows it."""
    model, _ = load_model(damaged, moelab.StreamConfig(slots=SLOTS))
    with model:
        generate(model)
        modify(damaged, later_ns=0)
        assert_refused(model, damaged)
    assert_usable()


def test_file_linked_while_streamed(damaged, want, tmp_path):
    """Making or removing a link changes the ctime, but not the content."""
    model, _ = load_model(damaged, moelab.StreamConfig(slots=SLOTS))
    with model:
        for file in damaged.glob("*.safetensors"):
            os.link(file, tmp_path / file.name)
        np.testing.assert_array_equal(generate(model), want)
        for file in damaged.glob("*.safetensors"):
            file.unlink()
        np.testing.assert_array_equal(generate(model), want)


@pytest.mark.parametrize("mode", STREAMED)
def test_file_truncated_while_streamed(mode, damaged, assert_usable, reading):
    model, _ = load_model(damaged, moelab.StreamConfig(mode=mode, slots=SLOTS))
    with model:
        generate(model)
        for file in damaged.glob("*.safetensors"):
            os.truncate(file, 5000)
        with pytest.raises(
            moelab.ReadError, match="expected|changed while it was streamed"
        ) as caught:
            until_it_reads(model)
        assert str(damaged) in str(caught.value) and "oad" in str(caught.value)
    assert_usable()


CHANGING = """
import os, sys
import mlx.core as mx
import moelab
from moelab.streaming import layers, model

folder, change = sys.argv[1:]
streamed, _ = model.load_model(folder, moelab.StreamConfig(slots=8))
ask = lambda: streamed(mx.array([[5]])).tolist()
want, of = ask(), layers.Pairs.of

def changing(self, arrived):  # when the layer has its experts and is about to compute
    for file in (e.path for e in os.scandir(folder) if e.name.endswith(".safetensors")):
        size = os.path.getsize(file)
        if change == "truncated":
            os.truncate(file, 0)
        else:
            with open(file, "r+b") as f:
                f.write(bytes(size))
    return of(self, arrived)

layers.Pairs.of = changing
try:
    print("right" if ask() == want else "wrong")
except moelab.ReadError:
    print("right")
"""


@pytest.mark.parametrize("change", ("written in place", "truncated"))
def test_file_that_changes_during_a_pass(change, tmp_path):
    config = synthesize.CONFIGS["qwen3-30b-a3b"] | {"num_experts": 16}
    folder = synthesize.synthesize(tmp_path / "model", layers=1, config=config, progress=False)
    command = [sys.executable, "-c", CHANGING, str(folder), change]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize("mode", STREAMED)
def test_file_replaced_while_streamed(mode, damaged, want, assert_usable):
    """A replaced file stays open: the model goes on with the old bytes until it is loaded again."""
    model, _ = load_model(damaged, moelab.StreamConfig(mode=mode, slots=SLOTS))
    with model:
        generate(model)
        for file in damaged.glob("*.safetensors"):
            new = file.with_suffix(".new")
            new.write_bytes(os.urandom(file.stat().st_size))
            new.replace(file)
        np.testing.assert_allclose(generate(model), want, atol=1e-4)
    failing_load(damaged, moelab.CheckpointError, "header")
    assert_usable()


@pytest.mark.parametrize("mode", ("resident", "fused"))
def test_file_replaced_while_loaded(mode, damaged, assert_usable, monkeypatch):
    """After the headers were read, by one whose tensors may lie elsewhere."""

    def replacing(*args):
        os.replace(shutil.copy2(shard(damaged), damaged / "new"), shard(damaged))
        return build_model(*args)

    monkeypatch.setattr(model_module, "build_model", replacing)
    config = moelab.StreamConfig(mode=mode)
    failing_load(damaged, moelab.CheckpointError, "was written or replaced", config)
    monkeypatch.undo()
    assert_usable()


@pytest.mark.parametrize("mode", STREAMED)
def test_closed_model(mode, good, assert_usable):
    """Also one whose slots hold every expert, so that nothing would be read."""
    before = num_open()
    model, _ = load_model(good, moelab.StreamConfig(mode=mode, slots=E))
    until_it_reads(model)
    moelab.close(model)
    moelab.close(model)  # a second call does nothing
    assert num_open() == before
    with pytest.raises(moelab.ReadError, match="closed: load it again"):
        generate(model)
    assert_usable()


def test_stray_dtype_is_named(good, assert_usable):
    """A half-precision activation is an error, not promoted."""
    model, _ = load_model(good, moelab.StreamConfig(slots=SLOTS))
    with model:
        layer = next(m for m in model.modules() if type(m).__name__ == "Fused")
        with pytest.raises(
            TypeError, match="expected mlx.core.float32 activations, got mlx.core.bfloat16"
        ):
            layer(mx.zeros((1, 1, families.D), mx.bfloat16), mx.zeros((1, 1, K), mx.uint32))
    assert_usable()


@pytest.mark.parametrize("mode", STREAMED)
def test_outputs_evaluated_late(mode, good):
    """A caller may evaluate in any order: no slot is overwritten while an output still reads it."""
    resident = families.expert_modules(families.load_resident(good))
    rng = np.random.default_rng(0)
    with load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        layers = dict(model.named_modules())
        for path, want in resident.items():
            for _ in range(5):
                # A miss, a hit, then others: the first outputs are not evaluated when their slots
                # are taken.
                calls = [[0, 1], [1, 0], [0, 2], [5, 6], [7, 4], [0, 1]]
                x = [
                    mx.array(rng.standard_normal((1, 1, families.D), dtype=np.float32))
                    for _ in calls
                ]
                indices = [mx.array([[pair]], dtype=mx.uint32) for pair in calls]
                late = [layers[path](*args) for args in zip(x, indices)]
                for y, *args in zip(late, x, indices):
                    np.testing.assert_allclose(np.array(y), np.array(want(*args)), atol=1e-5)


@pytest.mark.parametrize("mode", STREAMED)
def test_failed_call_leaves_no_read_behind(mode, good, want, monkeypatch):
    """When a read's error is raised, the other reads have ended: none writes to a slot later."""
    read_in_threads(monkeypatch)
    monkeypatch.setattr(residency, "OVERLAP_S", 0)
    monkeypatch.setattr(layer, "PART_NBYTES", 1)  # as with large experts
    preadv, begun, ended, failing = os.preadv, 0, 0, False

    def slow(fd, views, offset):
        nonlocal begun, ended
        begun += 1
        try:
            if failing and begun == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if failing:
                time.sleep(0.02)
            return preadv(fd, views, offset)
        finally:
            ended += 1

    model, _ = load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS, readers=4))
    with model:
        patch_preadv(monkeypatch, slow)
        for _ in range(3):
            begun, ended, failing = 0, 0, True
            with pytest.raises(moelab.ReadError):
                until_it_reads(model)
            assert begun == ended, f"{begun - ended} reads are still in flight"
            at_error = begun
            time.sleep(0.1)
            assert begun == at_error, "reads that were queued went on after the error"
            failing = False
            np.testing.assert_allclose(generate(model), want, atol=1e-4)
