"""Synthetic checkpoints: mlx-lm's layout, real shapes, little memory, no incomplete files."""

import json
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.qwen3_5_moe import Model, ModelArgs
from mlx_lm.utils import quantize_model, save_model
from small import small

import moelab
from moelab import synthesize as S
from moelab.lab.arguments import Evicting
from moelab.lab.decode import decode
from moelab.replay import by_token
from moelab.replay.locality import recorded_trace


@pytest.fixture
def write(tmp_path, tokenizer):
    """Write a small checkpoint into a folder of a name."""

    def write(name="m", config=None, **kwargs):
        kwargs = {"config": small() if config is None else config, "tokenizer": tokenizer} | kwargs
        return S.synthesize(tmp_path / name, progress=False, **kwargs)

    return write


def says_something(model, prompt):
    """Generate without NaN, and more than a few words again and again."""
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
    """With enough dimensions for codes of 192 tokens of the trace, and enough experts."""
    trace = recorded_trace("code")[:400]
    few = np.unique(trace.tokens, return_inverse=True)[1]  # ids below a small vocabulary
    trace, config = replace(trace, tokens=few), small()
    config["text_config"].update(hidden_size=512, num_experts=32)
    path = write(config=config, vocab=400, routing=trace)
    ids = trace.tokens.tolist()
    model, _ = moelab.load(path, Evicting(slots=8, policy="lru", dtype="float32"))
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
