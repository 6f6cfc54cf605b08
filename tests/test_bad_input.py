"""Everything that can go wrong gives one clear error, and the engine still works.

An error says what is wrong and where, what was expected and found, and what to do.
``test_fuzz.py`` draws damage to files; here is what it cannot draw.
"""

import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import families
import mlx.core as mx
import numpy as np
import pytest
from families import E, K
from faults import edit_header, patch_preadv, read_in_threads
from fuzzing import is_closed, num_open
from greedy import greedy_logits

import moelab
from moelab import synthesize
from moelab.checkpoint import Checkpoint
from moelab.experts import expert_modules
from moelab.streaming import model as model_module
from moelab.streaming.build import build_model, place_experts
from moelab.streaming.config import OPTIONS
from moelab.streaming.model import load_model
from moelab.streaming.reading import native, reader
from moelab.streaming.residency import layer

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
    """Load a bad model, and return the message. The model that was loaded before still answers."""

    def fails(path, match, error=moelab.CheckpointError, **config):
        before = num_open()
        with pytest.raises(error, match=match) as caught:
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


# Files that are missing, too many, of the wrong kind, or those of another model

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
    command = ["sh", "-c", limited, "sh", sys.executable, "-c", LOADS, good]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert re.search(said, done.stdout) and bool(done.stdout) == bool(said), done.stdout


def no_weights(path):
    for file in (*path.glob("*.safetensors"), path / "model.safetensors.index.json"):
        file.unlink()


def change_tensors(path, change):
    """Let a function change the tensors of one file, by the name of an expert's in another."""
    weights, other = mx.load(str(shard(path, 1))), mx.load(str(shard(path, 0)))
    change(weights, *(next(n for n in w if "switch_mlp" in n) for w in (weights, other)))
    mx.eval(weights)
    mx.save_safetensors(str(shard(path, 1)), weights)


def twice(weights, name, other):
    """mlx-lm takes the file that the folder lists last, which depends on the file system."""
    weights[other] = mx.zeros_like(weights[name])


def fifo(name, path):
    file = shard(path) if name == "shard" else path / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def wide(header):
    header["empty"] = {"dtype": "U8", "shape": [0, 2**31], "data_offsets": [0, 0]}


def strange(header):
    tensor = next(t for name, t in header.items() if "switch_mlp" in name)
    first, last = tensor["data_offsets"]
    tensor.update(dtype="F8_E5M2", shape=[last - first])


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


FIFOS = ("config.json", "generation_config.json", "model.safetensors.index.json", "vocab.txt")
BAD_FOLDERS = {  # what becomes of a valid folder, and what must be said
    "no shard": (lambda path: shard(path).unlink(), "1 are not in the folder.*Download"),
    "no weights": (no_weights, r"expected model\*.safetensors, found none. Give"),
    "no model": (lambda path: (path / "config.json").unlink(), "config.json, found none. Give"),
    "no tensor": (
        partial(change_tensors, change=lambda w, n, _: w.pop(n)),
        "cannot build it.*proj",
    ),
    "a tensor twice": (partial(change_tensors, change=twice), "each tensor once.*Remove"),
    "no family": (partial(set_config, model_type="no_such_model"), "no_such_model"),
    "no dimension of MLX's": (lambda path: edit_header(shard(path), wide), "tensor empty has the"),
    "no type of MLX's": (lambda path: edit_header(shard(path), strange), "F8_E5M2, which MLX"),
    "no JSON of hf": (lambda path: (path / "hf_quant_config.json").write_text("{"), "not JSON"),
    "more layers": (partial(set_config, num_hidden_layers=4), "cannot build it"),
    "10**9 layers": (partial(set_config, num_hidden_layers=10**9), "expected at most"),
    "K of all kinds": (partial(set_config, num_experts_per_tok=[2, "x"]), "expected|cannot call"),
    **{f"a FIFO: {n}": (partial(fifo, n), f"{n}: expected a file, got p") for n in FIFOS},
    "a FIFO: shard": (partial(fifo, "shard"), "safetensors: expected a file, got p"),
}


@pytest.mark.parametrize("damage", BAD_FOLDERS)
def test_a_bad_folder(damage, damaged, failing_load, in_time):
    change, said = BAD_FOLDERS[damage]
    change(damaged)
    assert str(damaged) in failing_load(damaged, said)
    with pytest.raises(moelab.CheckpointError):
        moelab.footprint(damaged)


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
def test_a_config_that_would_end_the_process(family, change, tmp_path):
    """mlx-lm divides by a group size that it takes, or infers, from config.json."""
    path = families.write_checkpoint(family, tmp_path / family, "affine4")
    set_config(path, **change)
    with pytest.raises(moelab.CheckpointError, match=str(path)):
        moelab.plan(path)


# Impossible configurations


def bad_fields():
    """Every field of ``StreamConfig``, and values that it does not take."""
    for name, option in OPTIONS.items():
        values = (3, b"t.npz")
        if option.choices:
            values = ("nonsense", mx.float32, None)
        elif option.bounds:
            least, most = option.bounds
            values = (least - 1, most + 1, 2**70, 2.5, float(least), True, "16", "many")
            values += ("auto",) * (option.default is None)
        elif isinstance(option.default, bool):
            values = (0, "yes", None)
        yield from ((name, value) for value in values)


def test_bad_stream_configs():
    for field, value in bad_fields():
        said = re.escape(f"StreamConfig.{field}: expected ") + f".*{re.escape(repr(value))}"
        with pytest.raises(ValueError, match=said):
            moelab.StreamConfig(**{field: value})


@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_the_longest_context(kernels, in_time):
    """The plan for it says what it takes, where it fits and where it does not."""
    config = moelab.StreamConfig(context=2**31 - 256, kernels=kernels)
    taken = moelab.plan(TINY_MOE, config, memory_nbytes=2**63 - 1).caches_nbytes
    assert taken / (4 * 2**31) == pytest.approx(768, rel=1e-3)  # two caches, and one copied
    with pytest.raises(ValueError, match=f"caches of {2**31 - 256} tokens 6597.* GB.*got 1.00 GB"):
        moelab.plan(TINY_MOE, config, memory_nbytes=10**9)


def test_a_ranks_trace_of_no_or_another_model(good, tmp_path):
    config = moelab.StreamConfig(ranks_trace=tmp_path / "trace.npz")
    file, modules = tmp_path / "trace.npz", expert_modules(build_model(Checkpoint(good), config)[0])
    experts = np.zeros((3, len(modules) + 1, K), np.uint16)
    trace = moelab.Trace(experts, np.full(3, "decode"), np.zeros(3, np.int64), E)
    other = f"of {len(modules)} MoE layers and {E} experts.*got {len(modules) + 1} and {E}"
    for write, said in (
        (lambda: None, "got none.*Record it again"),
        (lambda: trace.save(file), other),
        (lambda: os.truncate(file, 99), "a damaged file"),
    ):
        write()
        with pytest.raises(ValueError, match=f"StreamConfig.ranks_trace: {file}: .*{said}"):
            place_experts(modules, config, None)


def test_bad_environment(monkeypatch):
    variables = [v for option in OPTIONS.values() for v in option.environment]
    for name in variables:
        for value in ("many", "", "-1", "4294967296"):
            with monkeypatch.context() as patch:
                for variable in variables:
                    patch.delenv(variable, raising=False)
                patch.setenv(name, value)
                with pytest.raises(ValueError, match=f"{name}: expected .*got '{value}'"):
                    moelab.StreamConfig.from_env()


@pytest.mark.parametrize("mode", ["resident", *STREAMED])
def test_numbers_that_do_not_fit_the_model(mode, good, failing_load):
    fails = partial(failing_load, good, error=ValueError, mode=mode)
    fails(rf"StreamConfig.top_k: .* 1 to {E} .*got {E + 1}", slots=E + 1, top_k=E + 1)
    if mode in ("stacked", "fused"):
        fails(rf"StreamConfig.slots: .* at least {K} .*got {K - 1}.* lower top_k", slots=K - 1)


def test_model_without_experts(tmp_path, failing_load):
    config = families.COMMON | {"model_type": "llama"}
    model_class, args_class = families.mlx_lm_utils._get_classes(config)
    weights = dict(families.tree_flatten(model_class(args_class.from_dict(config)).parameters()))
    families.write_files(tmp_path, weights, config)
    failing_load(tmp_path, "llama model has no experts.*mlx_lm.load")
    resident, _ = load_model(tmp_path, moelab.StreamConfig(mode="resident"))
    assert resident(mx.array([PROMPT])).shape == (1, len(PROMPT), families.VOCAB)


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


class Disk:
    """Reads, of which one fails after it wrote wrong bytes into its slot.

    ``preadv`` stands for ``os.preadv``, ``loop`` for native code, whose read is tried again.
    """

    def __init__(self):
        self.count, self.fail_at = 0, -1
        self._preadv, self._loop = os.preadv, native.loop()

    def _fails(self, n=1):
        """Count n reads, and say which of them fails."""
        at, self.count = self.fail_at - self.count, self.count + n
        return at if 0 <= at < n else None

    def preadv(self, fd, views, offset):
        if self._fails() is None:
            return self._preadv(fd, views, offset)
        views[0][:] = b"\xa5" * len(views[0])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def loop(self, table, n, flags, done, arrived):
        self._loop(table, n, flags, done, arrived)
        if (at := self._fails(n)) is not None:
            self.fail_at = self.count  # what the caller tries again
            at = table + 8 * len(native.COLUMNS) * at
            row = (ctypes.c_int64 * len(native.COLUMNS)).from_address(at)
            ctypes.memset(ctypes.c_int64.from_address(row[native.IOV]).value, 0xA5, 8)
            row[native.GOT] = -1
            ctypes.c_uint32.from_address(done).value = 0


def assert_reads_may_fail(model, disk, want, exactly):
    """The n-th read fails. The next call is right."""

    def assert_right():
        np.testing.assert_allclose(generate(model), want, atol=0 if exactly else 1e-4, rtol=0)

    disk.count = 0
    assert_right()
    count = disk.count
    assert count > 10
    for n in {0, 1, 2, 5, count // 3, count // 2, count - 1}:
        disk.count, disk.fail_at = 0, n
        with pytest.raises(moelab.ReadError, match="Input/output error") as caught:
            for _ in range(8):  # experts that are held are not read
                generate(model)
        disk.fail_at = -1
        assert caught.value.errno == errno.EIO
        message = str(caught.value)
        parts = (".safetensors", "switch_mlp", "expert ", "offset ", "Try again", "check the disk")
        assert all(part in message for part in parts), message
        assert "load" not in message.partition("offset ")[2], "the model goes on without"
        assert_right()


@pytest.mark.parametrize("mode", STREAMED)
def test_read_fails_anywhere(mode, good, want, reading, monkeypatch):
    disk = Disk()
    with load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        patch_preadv(monkeypatch, disk.preadv)
        assert_reads_may_fail(model, disk, want, mode in ("stacked", "fused"))


@pytest.mark.skipif(native.loop() is None, reason="needs llvmlite")
@pytest.mark.parametrize("mode", ["stacked", "fused"])
def test_native_read_fails_anywhere(mode, good, want, monkeypatch):
    """The read fails again when it is repeated."""
    disk, preadv = Disk(), os.preadv

    def fails(*args):
        if disk.fail_at < 0:
            return preadv(*args)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        monkeypatch.setattr(native, "loop", lambda: disk.loop)
        monkeypatch.setattr(os, "preadv", fails)
        assert_reads_may_fail(model, disk, want, True)


@pytest.mark.parametrize("mode", STREAMED)
def test_read_comes_back_short(mode, good, want, reading, monkeypatch):
    preadv, end_early = os.preadv, False

    def short(fd, views, offset):  # which is legal: the rest must be read again
        view = views[0]
        return 0 if end_early else preadv(fd, [view[: max(1, len(view) // 3)]], offset)

    with load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        patch_preadv(monkeypatch, short)
        np.testing.assert_allclose(generate(model), want, atol=1e-4)
        end_early = True
        with pytest.raises(moelab.ReadError, match=r"expected \d+ bytes, got 0.*load again"):
            until_it_reads(model)
        end_early = False
        np.testing.assert_allclose(generate(model), want, atol=1e-4)


def until_it_reads(model):
    """Generate until something must be read."""
    for i in range(20):
        generate(model)
        model(mx.array([[(t + 7 * i) % families.VOCAB for t in PROMPT]]))


def modify(file, later_ns=1_000_000):
    """Write over the end of a file, and set its mtime: so much later than it was."""
    status = file.stat()
    with open(file, "r+b") as f:
        f.seek(-64, os.SEEK_END)
        f.write(os.urandom(64))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + later_ns))


CHANGES = {
    "modified": modify,
    "restored": partial(modify, later_ns=0),  # by a backup, say: only the ctime shows it
    "truncated": lambda file: os.truncate(file, 5000),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", STREAMED)
def test_file_changed_while_streamed(mode, change, damaged, reading):
    with load_model(damaged, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        generate(model)
        time.sleep(0.02)  # a clock may be coarser than this test
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
    """An open file stays: the model goes on with its bytes until it is loaded again."""
    files = [*damaged.glob("*.safetensors")]
    with load_model(damaged, moelab.StreamConfig(mode=mode, slots=SLOTS))[0] as model:
        for file in files:  # another link changes the ctime, but not the content
            os.link(file, tmp_path / file.name)
        np.testing.assert_allclose(generate(model), want, atol=1e-4)
        for file in files:
            new = file.with_suffix(".new")
            new.write_bytes(os.urandom(file.stat().st_size))
            new.replace(file)
        np.testing.assert_allclose(generate(model), want, atol=1e-4)
    failing_load(damaged, "header")


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
    config = synthesize.CONFIGS["qwen3-30b-a3b"] | {"num_experts": 8}
    folder = synthesize.synthesize(tmp_path / "model", layers=1, config=config, progress=False)
    command = [sys.executable, "-c", CHANGING, str(folder), change]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize("mode", ("resident", "fused"))
def test_file_replaced_while_loaded(mode, damaged, failing_load, monkeypatch):
    """After the headers were read, by one whose tensors may lie elsewhere."""

    def replacing(*args):
        os.replace(shutil.copy2(shard(damaged), damaged / "new"), shard(damaged))
        return build_model(*args)

    monkeypatch.setattr(model_module, "build_model", replacing)
    failing_load(damaged, "was written or replaced", mode=mode)


@pytest.mark.parametrize("mode", STREAMED)
def test_closed_model(mode, good):
    """Also one whose slots hold every expert, so that nothing would be read."""
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
    """When a read's error is raised, the other reads have ended: none writes to a slot later."""
    read_in_threads(monkeypatch)
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

    with load_model(good, moelab.StreamConfig(mode=mode, slots=SLOTS, readers=4))[0] as model:
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
