"""Repacked checkpoints, and synthetic ones of real shapes, are written whole or not at all."""

import io
import json
import os
import pkgutil
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import families
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from common import PROMPT, greedy_logits, small
from families import COMMON_VARIANTS, EVERY_VARIANT, E
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.qwen3_5_moe import Model, ModelArgs
from mlx_lm.utils import quantize_model, save_model

import moelab
from moelab import repack as repack_module
from moelab import synthesize as S
from moelab.checkpoint import Checkpoint
from moelab.lab.arguments import Evicting
from moelab.lab.decode import decode
from moelab.repack import PAGE_NBYTES, repack
from moelab.replay import by_token
from moelab.replay.locality import recorded_trace
from moelab.streaming.disk_embedding import DiskEmbedding
from moelab.streaming.facts import ModelFacts
from moelab.streaming.model import load_model


def assert_same_answer(path, out, modes):
    for mode in modes:
        config = moelab.StreamConfig(mode=mode, slots=families.K + 1)
        with load_model(path, config)[0] as plain, load_model(out, config)[0] as packed:
            got, want = (greedy_logits(model, PROMPT, 3) for model in (packed, plain))
            np.testing.assert_array_equal(got, want, err_msg=mode)
            if mode == "fused":
                c = moelab.stats(packed).prefill
                rows = any(isinstance(m, DiskEmbedding) for m in packed.modules())  # also read
                assert c.misses and (rows or c.reads == c.misses), "one read brings one expert"


NAMES = set(families.FAMILIES) - set(families.EXPERTS_ONLY)
CASES = sorted(
    {(name, families.variant_of(name)) for name in NAMES}
    | {(EVERY_VARIANT[0], variant) for variant in COMMON_VARIANTS}
)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_every_family_gives_the_same_answer_packed(name, variant, stored, tmp_path):
    out = repack(stored(name, variant), tmp_path / "packed", progress=False)
    assert [*tmp_path.iterdir()] == [out]
    assert_same_answer(stored(name, variant), out, ("resident", "fused"))


@pytest.fixture(scope="module")
def packed(moe, tmp_path_factory):
    """A small packed checkpoint."""
    return repack(moe, tmp_path_factory.mktemp("packed") / "m", progress=False)


def test_the_same_bytes_on_pages_of_their_own(moe, packed):
    source = ModelFacts.of(moe, moelab.StreamConfig(mode="serial")).located
    target = Checkpoint(packed).packed
    assert set(target) == set(source)
    for name, t in target.items():
        with open(t.files[0], "rb") as f, open(source[name].files[0], "rb") as g:
            for e in range(E):
                f.seek(t.offsets[e]), g.seek(source[name].offsets[e])
                assert f.read(t.nbytes) == g.read(t.nbytes), (name, e)
    assert_same_answer(moe, packed, ("serial", "buffers", "stacked"))
    assert moelab.footprint(packed).total_nbytes == moelab.footprint(moe).total_nbytes
    first = [min(t.offsets[e] for t in target.values() if ".layers.0." in t.name) for e in range(E)]
    assert all(offset % PAGE_NBYTES == 0 for offset in first)


class Spoilt(io.BufferedRandom):
    """A file that returns other bytes than were written."""

    def read(self, n):
        return bytes(n)


def test_bad_input(moe, packed, tmp_path, monkeypatch):
    def refused(error, said, source=moe):
        with pytest.raises(error, match=said):
            repack(source, tmp_path / "new", progress=False)

    refused(moelab.CheckpointError, f"{packed}.*packed already", packed)
    with monkeypatch.context() as m:
        m.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
        refused(OSError, "not enough disk .* is free; choose another disk")
    with monkeypatch.context() as m:  # the disk returns other bytes than it got
        m.setattr(repack_module, "open", lambda *args: Spoilt(io.FileIO(*args)), raising=False)
        refused(OSError, "proj.weight, expert 0 is not what was written: check the disk")
    assert not list(tmp_path.iterdir())


STEPS = ("repack._Layer.write", "repack._compare", "checkpoint.files._to_disk")
STEPS = (*(f"moelab.{step}" for step in STEPS), "os.rename")


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupted_run_leaves_nothing(step, moe, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as m:
        m.setattr(step, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt, match=f"nothing was written, there is no {out}"):
            repack(moe, out, progress=False)
    assert not list(tmp_path.iterdir())
    repack(moe, out, progress=False)
    assert list(tmp_path.iterdir()) == [out]
    assert out.stat().st_mode == moe.stat().st_mode


@pytest.mark.parametrize("step", (STEPS[0], "mlx.core.save_safetensors"))
def test_a_disk_that_takes_no_more(step, moe, tmp_path, monkeypatch, run):
    """From ``step`` on no file may be larger than 10 kB, as when a user's quota is nearly full."""
    limits, write = resource.getrlimit(resource.RLIMIT_FSIZE), pkgutil.resolve_name(step)

    def limited(*args, **kwargs):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        return write(*args, **kwargs)

    monkeypatch.setattr(step, limited)
    try:
        got = run("repack", moe, out := tmp_path / "out", "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert got.code == 1 and f"moelab: nothing was written, there is no {out}: " in got.err
    assert got.said == got.err + "\n" and not list(tmp_path.iterdir())


def test_links_in_a_source(moe, tmp_path):
    """A Hub snapshot's links are followed. A link to elsewhere, perhaps to a secret, is refused."""
    blobs, source = shutil.copytree(moe, tmp_path / "blobs"), tmp_path / "snapshots" / "main"
    (blobs / "notes.txt").write_text("ours")
    (blobs / ".DS_Store").write_text("Finder's")  # Finder may write it at any time
    (secret := tmp_path / "secret").write_text("mine")
    source.mkdir(parents=True)
    for file in blobs.iterdir():
        (source / file.name).symlink_to(file)
    out = repack(source, tmp_path / "out", progress=False)
    assert (out / "notes.txt").read_text() == "ours" and not (out / ".DS_Store").exists()
    assert not any(file.is_symlink() for file in out.iterdir())
    (source / "folder").symlink_to(tmp_path)
    (source / "token").symlink_to(secret)
    with pytest.raises(moelab.CheckpointError, match=f"{source}/token: .*a link to {secret}"):
        repack(source, tmp_path / "other", progress=False)
    (source / "token").unlink()
    repack(source, tmp_path / "other", progress=False)
    assert {f.name for f in (tmp_path / "other").iterdir()} == {f.name for f in out.iterdir()}


@pytest.mark.parametrize("name", ("model.safetensors", "tokenizer.json"))
def test_a_source_that_is_replaced_meanwhile(name, model_path, tmp_path, monkeypatch):
    source, out = tmp_path / "m", tmp_path / "out"
    shutil.copytree(model_path, source)
    write, layers = repack_module._Layer.write, []

    def replacing(layer, file):
        write(layer, file)
        layers.append(layer)
        if len(layers) == 1:  # only the ctime changes, as when Finder sets an attribute
            (source / name).chmod(0o640)
        if len(layers) == 2:  # replaced by a file of the same size and time
            os.replace(shutil.copy2(source / name, tmp_path / name), source / name)

    monkeypatch.setattr(repack_module._Layer, "write", replacing)
    with pytest.raises(moelab.CheckpointError, match=f"{name}: was written or replaced"):
        repack(source, out, progress=False)
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_a_layer_in_no_file(packed, tmp_path):
    damaged = shutil.copytree(packed, tmp_path / "damaged")
    (damaged / "experts-00001.safetensors").unlink()
    with pytest.raises(moelab.CheckpointError, match="Missing .* parameters.*model.layers.1."):
        load_model(damaged)


@pytest.fixture
def write(tmp_path, tokenizer):
    """A function that writes a small checkpoint into a folder."""

    def write(name="m", config=None, **kwargs):
        kwargs = {"config": small() if config is None else config, "tokenizer": tokenizer} | kwargs
        return S.synthesize(tmp_path / name, progress=False, **kwargs)

    return write


def says_something(model, prompt):
    """Return whether a model generates more than a few different tokens, and no NaN."""
    model.set_dtype(mx.float32)
    steps = [*generate_step(mx.array(prompt), model, max_tokens=32)]
    return all(mx.isfinite(p).all() for _, p in steps) and len({int(t) for t, _ in steps}) > 8


@pytest.mark.parametrize("like", ["qwen3.5-35b-a3b", "qwen3-30b-a3b"])
def test_mlx_lm_loads_and_decodes_it(write, like):
    model, tok = mlx_lm.load(str(write(config=small(like))))
    model.set_dtype(mx.float32)
    prompt = tok.encode("def f(x):")
    logits = model(mx.array([prompt]))[0, -1]
    assert mx.std(logits).item() > 0.5  # else a comparison of greedy tokens would test little
    assert says_something(model, prompt)


def test_the_layout_is_the_one_that_mlx_lm_writes(tmp_path, write):
    """Names, shapes, types and bits are those of mlx-lm's own quantize and save."""
    out = write()
    ours = mx.load(str(out / "model.safetensors"))
    config = json.loads((out / "config.json").read_text())
    added = ("quantization", "quantization_config", "moelab_synthetic")
    plain = {k: v for k, v in config.items() if k not in added}
    model = Model(ModelArgs.from_dict(plain))
    model.set_dtype(mx.bfloat16, lambda d: d == mx.float32)
    model, theirs_config = quantize_model(model, plain, 64, 4)
    save_model(str(tmp_path / "theirs"), model)
    theirs = mx.load(str(tmp_path / "theirs" / "model.safetensors"))
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    differ = {k for k in ours if ours[k].dtype != theirs[k].dtype}
    # mlx-lm's convert leaves these in float32, set_dtype above does not
    assert all(k.endswith("A_log") for k in differ)
    assert config["quantization"] == theirs_config["quantization"]
    assert config["quantization"]["language_model.model.layers.0.mlp.gate"]["bits"] == 8


def test_shards_and_seeds(write, monkeypatch):
    whole, again, other = (write(f"{seed}{i}", seed=seed) for i, seed in enumerate((1, 1, 2)))
    one_by_one = lambda tensors: [{name: t} for name, t in tensors.items()]  # noqa: E731
    monkeypatch.setattr(mlx_lm.utils, "make_shards", one_by_one)
    cut = write("cut", seed=1)
    files = sorted(cut.glob("model-*.safetensors"))
    assert len(files) > 2 and not (cut / "model.safetensors").exists()
    index = json.loads((cut / "model.safetensors.index.json").read_text())["weight_map"]
    a, b = (dict(tree_flatten(mlx_lm.load(str(p))[0].parameters())) for p in (whole, cut))
    assert a.keys() == b.keys() and all(mx.array_equal(a[k], b[k]) for k in a)
    assert {index[k] for k in index} == {f.name for f in files}
    blobs = [(folder / "model.safetensors").read_bytes() for folder in (whole, again, other)]
    assert blobs[0] == blobs[1] != blobs[2]


def test_larger_vocabulary_never_decodes_what_the_tokenizer_cannot_write(write):
    model, tok = mlx_lm.load(str(write(vocab=512)))
    logits = model(mx.array([[5, 6, 7]]))[0, -1]
    assert logits.shape == (512,)
    assert mx.all(logits[len(tok) :] == 0) and logits[tok.eos_token_id].item() == 0
    assert mx.argmax(logits).item() < len(tok)


def test_memory_stays_small(tmp_path, tokenizer):
    """A checkpoint of 230 MB is written by a process that grows by far less than that."""
    code = """
import resource, sys
from moelab import synthesize as S
S.CHUNK_NBYTES = 4 << 20
config = dict(S.CONFIGS["qwen3-30b-a3b"], num_experts=64)
S.plan(dict(config, num_hidden_layers=1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
S.synthesize(sys.argv[1], config=config, layers=1, tokenizer=sys.argv[2], progress=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    out = tmp_path / "m"
    printed = subprocess.check_output([sys.executable, "-c", code, str(out), str(tokenizer)])
    grown = int(printed) * (1 if sys.platform == "darwin" else 1024)
    nbytes = (out / "model.safetensors").stat().st_size
    assert nbytes > 150e6 and grown < 0.3 * nbytes


# Routers that follow a trace


def test_fed_the_traces_text_the_routers_choose_with_its_locality(write):
    """The model has enough dimensions and experts to tell apart the trace's 192 tokens (types)."""
    trace = recorded_trace("code")[:400]
    few = np.unique(trace.tokens, return_inverse=True)[1]  # ids below a small vocabulary
    trace, config = replace(trace, tokens=few), small()
    config["text_config"].update(hidden_size=512, num_experts=32)
    path = write(config=config, vocab=400, routing=trace)
    ids = trace.tokens.tolist()
    config = Evicting(slots=8, policy="lru", dtype="float32", prefetch="none")
    model, _ = moelab.load(path, config)
    with model, moelab.record(model) as routed:
        decode(model, ids[:128], 272, feed=ids[128:])
        engine = moelab.stats(model).decode
    assert routed.tokens.tolist() == ids
    layers = trace.experts.shape[1]
    planned = by_token.fit(trace, 4, 32, 4, 400, 256).route(trace.tokens)
    assert np.array_equal(np.sort(routed.experts, -1), np.sort(planned.experts, -1))
    wanted = by_token.hit_rate(trace, 128)[np.arange(4) * layers // 4].mean()
    facts = json.loads((path / "config.json").read_text())["moelab_synthetic"]["routing"]
    rates = facts["lru_hit_rate_of_the_trace"], facts["lru_hit_rate"], engine.hit_rate
    for rate in (*rates, by_token.hit_rate(routed, 128).mean()):
        assert rate == pytest.approx(wanted, abs=0.06)
    assert says_something(mlx_lm.load(str(path))[0], ids[:32])


def test_a_trace_that_does_not_fit_is_refused(tmp_path, write):
    trace = recorded_trace("code")[:200]
    trace = replace(trace, tokens=trace.tokens % 400)
    for vocab, said, changes in (
        (400, "hidden size of at least 128", dict(hidden_size=64)),
        (400, "at least 100 experts", dict(num_experts=4096, num_experts_per_tok=100)),
        (300, "token ids below 300", {}),
    ):
        config = small()
        config["text_config"].update(changes)
        with pytest.raises(ValueError, match=said):
            write(config=config, vocab=vocab, routing=trace)
    assert list(tmp_path.iterdir()) == []
