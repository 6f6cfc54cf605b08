"""repack: the same model with one read for each expert, after any interruption."""

import functools
import json
import os
import random
import shutil
import subprocess
import sys
import time

import families
import mlx.core as mx
import numpy as np
import pytest
from families import COMMON_VARIANTS, EVERY_VARIANT
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab import repack as repack_module
from moelab.checkpoint import Checkpoint
from moelab.experts import locate_experts
from moelab.repack import JOURNAL, PAGE_NBYTES, repack
from moelab.streaming.model import load_model

PROMPT = mx.array([[5, 36, 67, 2, 33, 64, 95, 30, 61]])
TINY_MOE = moelab.DATA / "models" / "tiny-moe"


def logits(model):
    cache = make_prompt_cache(model)
    model(PROMPT, cache=cache)
    return [np.array(model(mx.array([[t]]), cache=cache)) for t in (3, 40, 41)]


NAMES = set(families.FAMILIES) - set(families.EXPERTS_ONLY)
CASES = sorted(
    {(name, families.variant_of(name)) for name in NAMES}
    | {(EVERY_VARIANT[0], variant) for variant in COMMON_VARIANTS}
)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_every_family_gives_the_same_answer_packed(name, variant, tmp_path):
    path = families.write_checkpoint(name, tmp_path / "plain", variant)
    out = repack(path, tmp_path / "packed", progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["packed", "plain"]
    for mode in ("resident", "fused"):
        config = moelab.StreamConfig(mode=mode, slots=families.K + 1)
        with load_model(path, config)[0] as plain, load_model(out, config)[0] as packed:
            for a, b in zip(logits(plain), logits(packed)):
                np.testing.assert_array_equal(a, b, err_msg=mode)
            if mode == "fused":
                c = moelab.stats(packed).prefill
                assert c.misses and c.reads == c.misses, "one read brings one expert"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return repack(TINY_MOE, tmp_path_factory.mktemp("repack") / "packed", progress=False)


def test_the_same_bytes_on_pages_of_their_own(packed):
    model, _ = mx_load(TINY_MOE)
    source = locate_experts(model, Checkpoint(TINY_MOE))
    target = Checkpoint(packed).packed
    assert set(target) == set(source)
    for name, t in target.items():
        with open(t.files[0], "rb") as f, open(source[name].files[0], "rb") as g:
            for e in (0, 1, len(t.offsets) - 1):
                f.seek(t.offsets[e]), g.seek(source[name].offsets[e])
                assert f.read(t.nbytes) == g.read(t.nbytes), (name, e)
    first = [min(t.offsets[e] for t in target.values() if ".layers.0." in t.name) for e in range(3)]
    assert all(offset % PAGE_NBYTES == 0 for offset in first)


def mx_load(path):
    from mlx_lm.utils import load_model as plain

    return plain(path, lazy=True)


@pytest.mark.parametrize("mode", ["serial", "buffers", "stacked", "fused"])
def test_modes(packed, mode):
    config = moelab.StreamConfig(mode=mode, slots=16)
    with load_model(TINY_MOE, config)[0] as a, load_model(packed, config)[0] as b:
        for x, y in zip(logits(a), logits(b)):
            np.testing.assert_array_equal(x, y)
    assert (
        moelab.footprint(packed, config).total_nbytes
        == moelab.footprint(TINY_MOE, config).total_nbytes
    )


RUN = """
import sys
from moelab.repack import repack
print("begin", flush=True)
repack(*sys.argv[1:], progress=False)
"""


def test_killed_at_ten_moments(tmp_path):
    """OUT exists only when it is complete. What a killed run left is refused; the next goes on."""
    out, rng = tmp_path / "packed", random.Random(0)
    command = [sys.executable, "-c", RUN, str(TINY_MOE), str(out)]

    def start():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "begin\n"
        return process, time.monotonic()

    process, begin = start()
    assert process.wait() == 0
    takes_s = time.monotonic() - begin
    shutil.rmtree(out)
    killed = 0
    for _ in range(60):
        process, _ = start()
        time.sleep(rng.uniform(0, takes_s))
        process.kill()
        process.wait()
        process.stdout.close()
        if out.exists():  # the run ended before it was killed
            takes_s *= 0.9  # the machine was slower during the first run
            load_model(out)[0].__exit__()
            shutil.rmtree(out)
            continue
        killed += 1
        for folder in (out, tmp_path / "packed.partial"):
            if (folder / "config.json").exists() and not (folder / JOURNAL).exists():
                continue  # complete, but not renamed yet
            with pytest.raises((moelab.CheckpointError, ValueError)) as error:
                moelab.load(folder)
            assert str(folder) in str(error.value)
        if killed == 10:
            break
    assert killed == 10
    repack(TINY_MOE, out, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["packed"]
    config = moelab.StreamConfig(slots=16)
    with load_model(TINY_MOE, config)[0] as a, load_model(out, config)[0] as b:
        for x, y in zip(logits(a), logits(b)):
            np.testing.assert_array_equal(x, y)


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    """Finished layers are kept if they were made from the same files; else repack starts again."""
    path = families.write_checkpoint("qwen3_moe", tmp_path / "plain", "affine4")
    written, real = [], repack_module._Layer.write

    def write(layer, file):
        written.append(layer.path)
        if len(written) == 2:
            raise KeyboardInterrupt
        real(layer, file)

    monkeypatch.setattr(repack_module._Layer, "write", write)
    with pytest.raises(KeyboardInterrupt):
        repack(path, tmp_path / "packed", progress=False)
    assert not (tmp_path / "packed").exists()
    repack(path, tmp_path / "packed", progress=False)
    assert len(written) == len(set(written)) + 1, "only the interrupted layer was written again"

    shutil.rmtree(tmp_path / "packed")
    written.clear()
    with pytest.raises(KeyboardInterrupt):
        repack(path, tmp_path / "packed", progress=False)
    file = next(path.glob("model*.safetensors"))
    os.utime(file, ns=(1, 1))
    repack(path, tmp_path / "packed", progress=False)
    assert written.count(written[0]) == 2, "the source has changed: nothing of before is trusted"


def test_bad_input(tmp_path, packed, monkeypatch):
    path = families.write_checkpoint("qwen3_moe", tmp_path / "plain", "affine4")

    def refused(kind, *words, call):
        with pytest.raises(kind) as error:
            call()
        for word in words:
            assert word in str(error.value), error.value

    (tmp_path / "there").mkdir()
    again = functools.partial(repack, packed, tmp_path / "again")
    wrong = functools.partial(repack, path, tmp_path / "wrong")
    there = functools.partial(repack, path, tmp_path / "there")
    refused(FileExistsError, "there exists already", "name another", call=there)
    refused(moelab.CheckpointError, str(packed), "packed already", call=again)
    with monkeypatch.context() as m:
        m.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
        refused(OSError, "not enough disk", "is free", call=wrong)
    with monkeypatch.context() as m:
        rows = repack_module._Layer.experts
        calls = []

        def other(self):
            calls.append(self)
            for row in rows(self):
                row[0] ^= len(calls) == 2  # the disk returns another byte
                yield row

        m.setattr(repack_module._Layer, "experts", other)
        refused(OSError, "not what was written", "check the disk", call=wrong)
        assert not (tmp_path / "wrong").exists()


def _own_files(folder):
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    return folder


def _a_file(path):
    path.write_text("mine")
    return path


def _a_link(path):
    path.symlink_to(_own_files(path.with_name("elsewhere")), target_is_directory=True)
    return path


def _a_dangling_link(path):
    path.symlink_to(path.with_name("nowhere"))
    return path


def _a_journal_of_another(path):
    _own_files(path)
    (path / JOURNAL).write_text('{"entries": []}')
    return path


def _everything(folder):
    return {
        p.relative_to(folder): p.is_symlink() or p.is_dir() or p.read_bytes()
        for p in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(
    "there", [_own_files, _a_file, _a_link, _a_dangling_link, _a_journal_of_another]
)
def test_a_partial_folder_of_somebody_else_is_refused_and_left_alone(there, tmp_path):
    path = families.write_checkpoint("qwen3_moe", tmp_path / "plain", "affine4")
    partial = there(tmp_path / "packed.partial")
    before = _everything(tmp_path)
    with pytest.raises(FileExistsError) as error:
        repack(path, tmp_path / "packed", progress=False)
    assert str(partial) in str(error.value) and "move it" in str(error.value)
    assert _everything(tmp_path) == before


def test_only_files_that_repack_wrote_are_removed(tmp_path, monkeypatch):
    path = families.write_checkpoint("qwen3_moe", tmp_path / "plain", "affine4")
    (path / "notes.md").write_text("copied")
    monkeypatch.setattr(repack_module, "_compare_backbone", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        repack(path, tmp_path / "packed", progress=False)
    monkeypatch.undo()
    partial = tmp_path / "packed.partial"
    assert (partial / "notes.md").exists()
    own = partial / "thesis.txt"
    own.write_text("mine")
    before = _everything(partial)
    for change in (lambda: None, lambda: os.utime(next(path.glob("*.safetensors")), ns=(1, 1))):
        change()
        with pytest.raises(FileExistsError, match="thesis.txt.*[Mm]ove"):
            repack(path, tmp_path / "packed", progress=False)
        assert _everything(partial) == before
    own.unlink()
    (path / "notes.md").unlink()
    out = repack(path, tmp_path / "packed", progress=False)
    assert not (out / "notes.md").exists(), "it was copied from the source as it was before"
    assert not list(out.glob("*.writing")) and not (out / JOURNAL).exists()


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ("rename", "unlink"))
def test_interrupted_at_the_very_end_it_can_be_run_again(call, tmp_path, monkeypatch):
    """Complete, but not renamed to OUT yet: repack knows the folder as its own."""
    path = families.write_checkpoint("qwen3_moe", tmp_path / "plain", "affine4")
    out, real = tmp_path / "packed", os.rename

    def rename(old, new):
        if call == "unlink":
            real(old, new)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        repack(path, out, progress=False)
    monkeypatch.undo()
    whole = out if call == "unlink" else tmp_path / "packed.partial"
    load_model(whole)[0].__exit__()
    if call == "rename":
        repack(path, out, progress=False)
        assert not [p for p in out.iterdir() if p.name.startswith(JOURNAL)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["packed", "plain"]


@pytest.mark.parametrize("name", ("model.safetensors", "config.json", "tokenizer.json"))
def test_a_source_that_is_replaced_meanwhile(name, model_path, tmp_path, monkeypatch):
    source, out = tmp_path / "m", tmp_path / "out"
    shutil.copytree(model_path, source)
    write, layers = repack_module._Layer.write, []

    def replacing(layer, file):
        write(layer, file)
        layers.append(layer)
        if len(layers) == 2:  # by a file of the same size and time
            os.replace(shutil.copy2(source / name, tmp_path / name), source / name)

    monkeypatch.setattr(repack_module._Layer, "write", replacing)
    with pytest.raises(moelab.CheckpointError, match=f"{name}: was written or replaced"):
        repack(source, out, progress=False)
    assert not out.exists()
    repack(source, out, progress=False)
    assert not out.with_name("out.partial").exists()
    kept = name == "tokenizer.json"  # what the layers are not made from
    assert len(layers) == (4 if kept else 2 + 4)


def test_an_empty_partial_folder_is_taken(tmp_path):
    """A run that was killed before it wrote its journal leaves one."""
    path = families.write_checkpoint("qwen3_moe", tmp_path / "plain", "affine4")
    (tmp_path / "packed.partial").mkdir()
    assert repack(path, tmp_path / "packed", progress=False).is_dir()


def test_a_dangling_link_called_out_is_refused_before_the_work(tmp_path):
    path = families.write_checkpoint("qwen3_moe", tmp_path / "plain", "affine4")
    _a_dangling_link(tmp_path / "packed")
    with pytest.raises(FileExistsError, match="packed exists already"):
        repack(path, tmp_path / "packed", progress=False)
    assert not (tmp_path / "packed.partial").exists()


def test_a_journal_cannot_name_files_elsewhere(tmp_path):
    path = families.write_checkpoint("qwen3_moe", tmp_path / "plain", "affine4")
    (tmp_path / "packed.partial").mkdir()
    (tmp_path / "thesis.txt").write_text("mine")
    journal = {"files": ["../thesis.txt"], "made_from": "another"}
    (tmp_path / "packed.partial" / JOURNAL).write_text(json.dumps(journal))
    repack(path, tmp_path / "packed", progress=False)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small packed checkpoint. Tests damage copies of it."""
    path = families.write_checkpoint(
        "qwen3_moe", tmp_path_factory.mktemp("small") / "plain", "affine4"
    )
    return repack(path, path.with_name("packed"), progress=False)


def header_of(file):
    content = file.read_bytes()
    n = int.from_bytes(content[:8], "little")
    return content[8 : 8 + n].rstrip(), content


def write_header(file, header):
    """Replace a file's header. The data stays where it is."""
    _, content = header_of(file)
    n = int.from_bytes(content[:8], "little")
    file.write_bytes(content[:8] + header.ljust(n) + content[8 + n :])


def extents(path):
    """Where a packed checkpoint says that every expert lies, for comparison."""
    return {
        k: ([f.name for f in t.files], t.offsets, t.nbytes, t.shape, t.dtype)
        for k, t in Checkpoint(path).packed.items()
    }


def without_checksum(file):
    """Write the header as versions before 0.2 did."""
    header = json.loads(header_of(file)[0])
    header["__metadata__"].pop("crc32", None)
    write_header(file, json.dumps(header).encode())


def swap(key, i, j):
    def edit(header, parameters):
        parameters[i][key], parameters[j][key] = parameters[j][key], parameters[i][key]

    return edit


def set_dtype(dtype, kind):
    def edit(header, parameters):
        next(p for p in parameters if p["name"].endswith(kind))["dtype"] = dtype

    return edit


def shift(header, parameters):
    for p in parameters:
        p["offset"] += 64


def set_shape(*shape):
    def edit(header, parameters):
        header["experts"]["shape"] = list(shape)

    return edit


E, STRIDE = families.E, 2 * PAGE_NBYTES


def set_path(path):
    return lambda header, parameters: header["__metadata__"].update(path=path)


def another_shape(header, parameters):
    parameters[0].update(shape=[1, 512])


STRUCTURE = {
    "two offsets swapped": swap("offset", 0, 1),
    "all offsets moved": shift,
    "a weight as another type": set_dtype("F32", "gate_proj.weight"),
    "scales as another type": set_dtype("F16", "gate_proj.scales"),
    "a parameter twice": lambda header, parameters: parameters.append(dict(parameters[-1])),
    "a shape transposed": lambda header, parameters: parameters[0]["shape"].reverse(),
    "another shape of as many bytes": another_shape,
    "more experts": set_shape(2 * E, STRIDE // 2),
    "another layer's path": set_path("model.layers.0.mlp.switch_mlp"),
    "no layer's path": set_path("model.layers.9.mlp.switch_mlp"),
}  # fmt: skip


@pytest.mark.parametrize("edit", STRUCTURE)
def test_a_packed_header_that_lies(small, tmp_path, edit):
    """Also one of version 0.1, which has no checksum. Those with one are damaged by the fuzzer."""
    path = tmp_path / "damaged"
    shutil.copytree(small, path)
    for file in path.glob("experts-*"):
        without_checksum(file)
    assert extents(path) == extents(small)
    file = path / "experts-00001.safetensors"
    header = json.loads(header_of(file)[0])
    assert header["experts"]["shape"] == [E, STRIDE]
    parameters = json.loads(header["__metadata__"]["parameters"])
    STRUCTURE[edit](header, parameters)
    header["__metadata__"]["parameters"] = json.dumps(parameters)
    write_header(file, json.dumps(header).encode())
    with pytest.raises(moelab.CheckpointError) as caught:
        load_model(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


def test_a_layer_in_two_files_or_in_none(small, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(small, path)
    first, second = (path / f"experts-0000{i}.safetensors" for i in range(2))
    shutil.copy(first, second)
    with pytest.raises(moelab.CheckpointError, match="expected each tensor once") as caught:
        load_model(path)
    assert all(part in str(caught.value) for part in ("model.layers.0.", first.name, second.name))
    second.unlink()
    with pytest.raises(moelab.CheckpointError, match="Missing .* parameters") as caught:
        load_model(path)
    assert "model.layers.1." in str(caught.value) and len(str(caught.value)) < 1000


def test_a_damaged_model_is_refused_here_too(tmp_path):
    path = families.write_checkpoint("qwen3_moe", tmp_path / "plain", "affine4")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 40}))
    with pytest.raises(moelab.CheckpointError, match="cannot build it") as caught:
        repack(path, tmp_path / "packed", progress=False)
    assert len(str(caught.value)) < 1000 and [p.name for p in tmp_path.iterdir()] == ["plain"]
