"""Everything that can go wrong gives one clear error, and the engine still works.

An error says what is wrong and where, what was expected and found, and what to do. One test damages
thousands of files (``helpers/fuzzing.py``): each file gives the right text or one
error of moelab; no file ends the process, lets it hang or stays open. To try more files:

    MOELAB_FUZZ=5000 python -m pytest tests/test_bad_input.py -k damaged_files
"""

import collections
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import families
import fuzzing
import mlx.core as mx
import numpy as np
import pytest
from common import PROMPT, STREAMED, TINY_MOE, greedy_logits
from families import E, K
from faults import edit_header, patch_preadv, read_in_parts
from fuzzing import is_closed, num_open
from mlx_lm.generate import generate_step

import moelab
from moelab import StreamConfig, kernels
from moelab.kernels import code, modules, quantized
from moelab.speculation.drafts import LookupDraft
from moelab.speculation.generate import speculative_generate_step
from moelab.streaming import model as model_module
from moelab.streaming.build import build_model
from moelab.streaming.config import OPTIONS
from moelab.streaming.model import load_model

SLOTS = K + 1
generate = partial(greedy_logits, prompt=PROMPT, steps=4)


@pytest.fixture(scope="module")
def good(stored):
    """A valid checkpoint in three shards. Tests damage copies of it."""
    return stored("qwen3_moe", "sharded")


@pytest.fixture
def damaged(good, tmp_path):
    """A copy of the valid checkpoint, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "damaged"))


@pytest.fixture(scope="module")
def want(good):
    """The answer of the resident model."""
    with load_model(good, moelab.StreamConfig(mode="resident"))[0] as model:
        return generate(model)


@pytest.fixture(scope="module")
def loaded(good):
    """A model that was loaded before anything went wrong."""
    with load_model(good, moelab.StreamConfig(slots=SLOTS))[0] as model:
        yield model


@pytest.fixture
def failing_load(loaded, want):
    """A function that loads a bad model and returns the error; a good model still answers."""

    def fails(path, match, **config):
        before = num_open()
        with pytest.raises(moelab.CheckpointError, match=match) as caught:
            load_model(path, moelab.StreamConfig(**{"slots": SLOTS, **config}))
        message = str(caught.value)
        del caught
        assert is_closed(before), "a failed load left files open"
        assert len(message) < 700 and "Traceback" not in message, message
        np.testing.assert_array_equal(generate(loaded), want)
        return message

    return fails


def shard(path, i=1):
    return sorted(path.glob("*.safetensors"))[i]


# Files that are missing, too many, of the wrong kind, or of another model

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


LIMITS = [(64, 1024, ""), (256, "$(ulimit -Hn)", ""), (64, 64, "least 7. open")]


@pytest.mark.parametrize("soft, hard, said", LIMITS)
def test_limits_of_open_files(soft, hard, said, good):
    limited = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"'
    command = ["sh", "-c", limited, "sh", sys.executable, "-c", LOADS, good]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert re.search(said, done.stdout) and bool(done.stdout) == bool(said), done.stdout


def twice(path):
    """Put a tensor into two files. The file system decides which of the two mlx-lm reads."""
    weights, other = mx.load(str(shard(path, 1))), mx.load(str(shard(path, 0)))
    weights |= {next(n for n in other if "switch_mlp" in n): mx.zeros(8)}
    mx.eval(weights)
    mx.save_safetensors(str(shard(path, 1)), weights)


def fifo(name, path):
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)


def wide(header):
    header["empty"] = {"dtype": "U8", "shape": [0, 2**31], "data_offsets": [0, 0]}


def f8(header):
    tensor = next(t for name, t in header.items() if "switch_mlp" in name)
    first, last = tensor["data_offsets"]
    tensor.update(dtype="F8_E5M2", shape=[last - first])


def set_config(path, **changes):
    """Change values in config.json (``a__b``: b in a); keep both quantization entries equal."""
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        *outer, key = key.split("__")
        (config[outer[0]] if outer else config)[key] = value
    if "quantization" in config:
        config["quantization_config"] = config["quantization"]
    (path / "config.json").write_text(json.dumps(config))


def of_another_library(said, path):
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": said}
    del config["quantization"]
    (path / "config.json").write_text(json.dumps(config))


FORMATS = ("fp8", "awq", "gptq", "modelopt", "compressed-tensors float-quantized")
FIFOS = ("config.json", "vocab.txt", "model-00002-of-00003.safetensors")
BAD_FOLDERS = {  # damage to a valid folder, and the words of the error
    "no weights": (
        lambda path: [file.unlink() for file in path.glob("model*")],
        r"expected model\*.safetensors, found none. Give",
    ),
    "a tensor twice": (twice, "each tensor once.*Remove"),
    "no family": (partial(set_config, model_type="no_such_model"), "no_such_model"),
    "no dimension of MLX's": (lambda path: edit_header(shard(path), wide), "tensor empty has the"),
    "no type of MLX's": (lambda path: edit_header(shard(path), f8), "F8_E5M2, which MLX.*made for"),
    "no JSON of hf": (lambda path: (path / "hf_quant_config.json").write_text("{"), "not JSON"),
    **{
        name: (
            partial(of_another_library, dict(zip(("quant_method", "format"), name.split()))),
            f"weights are in {name}, of which.*Take a version made for MLX.*convert.$",
        )
        for name in FORMATS
    },
    **{f"a FIFO: {n}": (partial(fifo, n), f"{n}: expected a file, got p") for n in FIFOS},
}


@pytest.mark.parametrize("damage", BAD_FOLDERS)
def test_a_bad_folder(damage, damaged, failing_load, in_time):
    change, said = BAD_FOLDERS[damage]
    change(damaged)
    assert str(damaged) in failing_load(damaged, said)
    with pytest.raises(moelab.CheckpointError):
        moelab.footprint(damaged)


CRASHES = {  # mlx-lm divides by a size that it reads in config.json or infers from it
    "qwen3_moe": {"quantization__group_size": 0},
    "qwen3_5_moe": {"text_config__shared_expert_intermediate_size": 1},
    "dots1": {"n_group": False},
    "bailing_moe_linear": {"group_norm_size": 0},
}


@pytest.mark.parametrize("family", CRASHES)
def test_a_config_that_would_end_the_process(family, tmp_path):
    path = families.write_checkpoint(family, tmp_path / family, "affine4")
    set_config(path, **CRASHES[family])
    with pytest.raises(moelab.CheckpointError, match=str(path)):
        moelab.plan(path)


# Impossible configurations


def test_bad_stream_configs():
    for field, option in OPTIONS.items():
        if option.choices:
            values = ("nonsense", mx.float32, None)
        elif option.bounds:
            least, most = option.bounds
            values = (least - 1, most + 1, 2**70, 2.5, float(least), True, "16", "many")
            values += ("auto",) * (option.default is None)
        else:
            values = (0, "yes", None)
        for value in values:
            said = re.escape(f"StreamConfig.{field}: expected ") + f".*{re.escape(repr(value))}"
            with pytest.raises(ValueError, match=said):
                moelab.StreamConfig(**{field: value})


def test_the_longest_context(in_time):
    """The plan shows the size of the caches, whether the caches fit or not."""
    config = moelab.StreamConfig(context=2**31 - 256)
    taken = moelab.plan(TINY_MOE, config, memory_nbytes=2**63 - 1).caches_nbytes
    assert taken / (4 * 2**31) == pytest.approx(768, rel=1e-3)  # two caches, and one copied
    with pytest.raises(ValueError, match=f"caches of {2**31 - 256} tokens 6597.* GB.*got 1.00 GB"):
        moelab.plan(TINY_MOE, config, memory_nbytes=10**9)


def test_model_without_experts(tmp_path, failing_load):
    config = families.COMMON | {"model_type": "llama"}
    model_class, args_class = families.mlx_lm_utils._get_classes(config)
    weights = dict(families.tree_flatten(model_class(args_class.from_dict(config)).parameters()))
    families.write_files(tmp_path, weights, config)
    failing_load(tmp_path, "llama model has no experts.*mlx_lm.load")
    resident, _ = load_model(tmp_path, moelab.StreamConfig(mode="resident"))
    assert resident(mx.array([PROMPT])).shape == (1, len(PROMPT), families.VOCAB)
    for function in (moelab.stats, moelab.close):
        with pytest.raises(ValueError, match="expected a model from moelab.load"):
            function(families.load_resident(tmp_path))


WRONG_IDS = ([10**6], [5, 10**6], [2**40, 5], [5, 6, -1], [5] * 2049 + [families.VOCAB])


@pytest.mark.parametrize("ids", WRONG_IDS, ids=lambda ids: str(ids[-2:]))
@pytest.mark.parametrize("mode", ["resident", "fused"])
def test_token_ids_beyond_the_vocabulary(mode, ids, good, monkeypatch):
    """Without the error MLX would read beyond the embedding and end the process."""
    plain, lookup = families.load_resident(good), LookupDraft()
    with load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        for use in (
            lambda ids: model(mx.array([ids])),
            lambda ids: [*generate_step(mx.array(ids), model, max_tokens=5)],
            lambda ids: [*speculative_generate_step(mx.array(ids), plain, lookup, max_tokens=5)],
        ):
            with pytest.raises(ValueError, match=f"ids from 0 to {families.VOCAB - 1}, .* got "):
                use(ids)
            use(PROMPT)
        checked = []
        monkeypatch.setattr(model_module, "check_tokens", lambda ids, _: checked.append(ids.size))
        mx.eval([token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=5)])
        assert checked == [len(PROMPT) - 1, 1], "a decoded token is not waited for"


# Failures while a model streams


@pytest.mark.parametrize("mode", STREAMED)
def test_read_fails_anywhere(mode, good, want, any_reads, monkeypatch):
    """The n-th read fails, after it wrote wrong bytes into its slot. The next call is right."""
    count, fail_at = 0, -1

    def failing(preadv, fd, views, offset):
        nonlocal count
        count += 1
        if count != fail_at:
            return preadv(fd, views, offset)
        views[0][:] = b"\xa5" * len(views[0])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    config = moelab.StreamConfig(mode=mode, slots=SLOTS, prefetch="none")  # equal reads each time
    with load_model(good, config)[0] as model:
        patch_preadv(monkeypatch, failing)
        near = {"atol": 0 if mode in ("stacked", "fused") else 1e-4, "rtol": 0}
        np.testing.assert_allclose(generate(model), want, **near)
        reads = count
        assert reads > 10
        for n in {1, 2, 3, 6, reads // 3, reads // 2, reads}:
            count, fail_at = 0, n
            with pytest.raises(moelab.ReadError, match="Input/output error") as caught:
                for _ in range(8):  # experts in slots are not read
                    generate(model)
            assert caught.value.errno == errno.EIO
            message = str(caught.value)
            parts = (".safetensors", "switch_mlp", "expert ", "offset ", "Try again", "check the d")
            assert all(part in message for part in parts), message
            assert "load" not in message.partition("offset ")[2], "no need to load it again"
            np.testing.assert_allclose(generate(model), want, **near)


def until_it_reads(model):
    """Generate until an expert must be read."""
    for i in range(20):
        generate(model)
        model(mx.array([[(t + 7 * i) % families.VOCAB for t in PROMPT]]))


def modify(file, later_ns=1_000_000):
    """Write over the end of a file, and set its mtime ``later_ns`` after the old one."""
    status = file.stat()
    with open(file, "r+b") as f:
        f.seek(-64, os.SEEK_END)
        f.write(os.urandom(64))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + later_ns))


CHANGES = {
    "modified": modify,
    "restored": partial(modify, later_ns=0),  # as by a backup: only the ctime differs
    "restored and linked": lambda file: (modify(file, 0), os.link(file, file.with_suffix(".2"))),
    "truncated": partial(os.truncate, length=5000),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", STREAMED)
def test_file_changed_while_streamed(mode, change, damaged, any_reads):
    with load_model(damaged, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        generate(model)
        time.sleep(0.02)  # else a coarse clock shows the same time
        for file in damaged.glob("*.safetensors"):
            CHANGES[change](file)
        said = "changed while it was streamed.* ctime.*Load the model again"
        said = f"{said}|got 0.*load again" if change == "truncated" else said
        for _ in range(2):  # refused again: the files hold another model now
            with pytest.raises(moelab.ReadError, match=said) as caught:
                until_it_reads(model)
            assert str(damaged) in str(caught.value)


@pytest.mark.parametrize("mode", STREAMED)
def test_file_linked_or_replaced_while_streamed(mode, damaged, want, tmp_path, failing_load):
    """A loaded model goes on with the bytes of its open files, until the model is loaded again."""
    files = [*damaged.glob("*.safetensors")]
    with load_model(damaged, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        # Both changes leave the content and give the file a new ctime.
        for change in (lambda file: os.link(file, tmp_path / file.name), attribute):
            [*map(change, files)]
            np.testing.assert_allclose(generate(model), want, atol=1e-4)
        for file in files:
            new = file.with_suffix(".new")
            new.write_bytes(os.urandom(file.stat().st_size))
            new.replace(file)
        np.testing.assert_allclose(generate(model), want, atol=1e-4)
    failing_load(damaged, "header")


def attribute(file):
    """Set an attribute, as Finder, Spotlight or a quarantine do: only the ctime changes."""
    before = file.stat()
    time.sleep(0.02)
    if hasattr(os, "setxattr"):
        os.setxattr(file, "user.com.apple.FinderInfo", os.urandom(32))
    else:
        file.chmod(before.st_mode ^ 0o040)
    after = file.stat()
    assert after.st_ctime_ns > before.st_ctime_ns and after.st_mtime_ns == before.st_mtime_ns


WHILE_LOADED = {
    "replaced": lambda file: os.replace(shutil.copy2(file, file.with_name("new")), file),
    "restored": CHANGES["restored"],
    "attribute": attribute,
}


@pytest.mark.parametrize("change", WHILE_LOADED)
@pytest.mark.parametrize("mode", ("resident", "fused"))
def test_file_changed_while_loaded(mode, change, damaged, want, failing_load, monkeypatch):
    """The file changes after its headers were read: its tensors may now lie elsewhere."""

    def changing(*args):
        time.sleep(0.02)
        WHILE_LOADED[change](shard(damaged))
        return build_model(*args)

    monkeypatch.setattr(model_module, "build_model", changing)
    if change != "attribute":
        failing_load(damaged, "was written or replaced", mode=mode)
        return
    with load_model(damaged, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        attribute(shard(damaged))
        np.testing.assert_allclose(generate(model), want, atol=1e-4)


@pytest.mark.parametrize("mode", STREAMED)
def test_closed_model(mode, good):
    """A closed model answers no call, although every expert is in a slot and need not be read."""
    before = num_open()
    model, _ = load_model(good, moelab.StreamConfig(mode=mode, slots=E))
    model(mx.arange(40)[None])
    moelab.close(model)
    moelab.close(model)  # a second call does nothing
    assert is_closed(before)
    with pytest.raises(moelab.ReadError, match="closed: load it again"):
        generate(model)


@pytest.mark.parametrize("mode", STREAMED)
def test_failed_call_leaves_no_read_behind(mode, good, want, monkeypatch):
    """All other reads end before a read's error is raised: none writes to a slot later."""
    read_in_parts(monkeypatch)
    begun, ended, failing = 0, 0, False

    def slow(preadv, fd, views, offset):
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

    with load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS, readers=4))[0] as model:
        patch_preadv(monkeypatch, slow)
        begun, ended, failing = 0, 0, True
        with pytest.raises(moelab.ReadError):
            until_it_reads(model)
        assert begun == ended, f"{begun - ended} reads are still in flight"
        at_error = begun
        time.sleep(0.1)
        assert begun == at_error, "reads that were queued went on after the error"
        failing = False
        np.testing.assert_allclose(generate(model), want, atol=1e-4)


CASES = int(os.environ.get("MOELAB_FUZZ", 3000))
WORKERS = code.num_threads()
GOOD = {"same text", "as mlx-lm", "loads", "refused"}


def test_damaged_files(tmp_path):
    fuzzing.write_bases(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(Path(moelab.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}

    def work(i):
        command = [sys.executable, fuzzing.__file__, tmp_path, *map(str, (i, WORKERS, CASES))]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        status = done.returncode
        assert not status, f"ended with {status} in {lines[-1:]}: {done.stderr[-2000:]}"
        return [line for line in lines if "outcome" in line]

    with ThreadPoolExecutor(WORKERS) as threads:
        records = [*chain(*threads.map(work, range(WORKERS)))]
    counts = collections.Counter((r["kind"], r["outcome"]) for r in records)
    print(*(f"\n{kind:14} {outcome:12} {n}" for (kind, outcome), n in sorted(counts.items())))
    assert sorted(r["case"] for r in records) == list(range(CASES))
    bad = [r for r in records if r["outcome"] not in GOOD]
    shown = [[r["case"], r["what"][:200], r["outcome"], r["message"][:300]] for r in bad[:10]]
    assert not bad, (len(bad), CASES, *shown)
    assert {kind for kind, _ in counts} == set(fuzzing.KINDS)
    assert sum(n for (_, outcome), n in counts.items() if outcome == "refused") > CASES / 3


def test_without_llvmlite_and_on_a_gpu(moe, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(modules.mx, "default_device", lambda: mx.gpu)
        assert not kernels.available()
        with pytest.raises(ValueError, match="for the CPU backend"):
            kernels.check()
    monkeypatch.setattr(code, "llvm", None)
    assert not kernels.available() and not quantized.supported(4, 64, 128)
    assert StreamConfig().resolved().kernels == "mlx"
    asked = StreamConfig(kernels="fast")
    assert asked.resolved() == asked
    with pytest.raises(ValueError, match="StreamConfig.kernels: 'fast'"):
        load_model(moe, asked)
    with load_model(moe, StreamConfig(kernels="auto"))[0] as model:
        assert not kernels.used(model)
        assert model(mx.array([[5, 6, 7]])).shape[:2] == (1, 3)
    monkeypatch.setattr(modules.mx, "default_device", lambda: mx.cpu)
    with pytest.raises(ValueError, match="pip install llvmlite"):
        kernels.check()
