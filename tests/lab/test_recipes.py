"""Recipes whose records notebooks read: peers, GGUF, compiled layers, published speeds."""

import json

import compiled
import exactness
import gguf
import mlx.core as mx
import numpy as np
import peers
import published
import pytest
import reads
import to_gguf

from moelab import DATA, StreamConfig
from moelab.lab import limit, records, variants
from moelab.lab.experiments import bench
from moelab.speculation.drafts import LookupDraft
from moelab.streaming.layers import Stacked

TINY, CODE = DATA / "models" / "tiny-moe", DATA / "traces" / "code.npz"
IDS = list(range(40, 60))
AMOUNT = {"prompt": 7, "tokens": 3, "warmup": 2}


@pytest.mark.parametrize("way", [*peers.NAMES, "llama.cpp/experts=cpu"])
def test_a_text_is_read_on_and_begun_anew(way):
    peer, options = peers.way(way)
    if not peers.is_built(peer):
        pytest.skip("make peers")
    path = str(peers.files(TINY, [peer])[peer])
    begin = peers.opened(peer, path, 2 * len(IDS), **options)
    read = begin()
    read(IDS[:-1])
    in_parts = read(IDS[-1:]).copy()
    at_once = begin()(IDS).copy()
    loose = 0.1 if peer == peers.LLAMA_CPP else 1e-3  # it rounds activations to 8 bits
    np.testing.assert_allclose(in_parts, at_once, atol=loose * at_once.std())
    ours = peers.opened(peers.MLX_LM, str(TINY), 0)()(IDS)
    np.testing.assert_allclose(at_once, ours, atol=loose * ours.std())


def test_options_follow_a_peers_name():
    assert peers.way("moelab/slots=16/source=host")[1] == {"slots": 16, "source": "host"}
    with pytest.raises(ValueError, match="expected a peer"):
        peers.way("mlx-lm/slots=16")


def test_all_read_one_text_and_say_one_continuation():
    names = peers.built()
    made = peers.against(TINY, CODE, runs=1, **AMOUNT, ways=names)
    assert made.peer.tolist() == names and not made.killed.any()
    assert set(made.decode_tokens) == {3} and set(made.prompt_tokens) == {7}
    exact = made[made.peer != peers.LLAMA_CPP]
    assert len(set(map(tuple, exact.tokens))) == 1


def test_a_peers_run_has_the_tokens_and_the_clock_of_ours():
    ids, fed = variants.texts_of(CODE, 5, TINY)
    row = peers.sample_here(peers.MLX_LM, str(TINY), ids, fed, 2, 3, [], {})
    ours = bench.measure(TINY, "resident", None, 3, 1, 2, feed=CODE)
    assert row["tokens"] == ours.tokens[0] and row["prompt_tokens"] == len(ids)
    assert row["decode_tokens"] == len(row["step_s"]) == 3
    assert row["decode_s"] == sum(row["step_s"])


def test_a_limit_is_lowered_on_the_way():
    try:
        made = peers.against(TINY, CODE, [(9 * 10**8, 8 * 10**8)], 1, **AMOUNT, ways=["moelab"])
    except limit.NoLimit as e:
        pytest.skip(str(e))
    assert made.variant.tolist() == ["moelab, 900 MB to 800 MB"] and not made.killed.any()
    assert made.fallen_tok_s[0] * sum(made.fallen_s[0]) == pytest.approx(3)
    assert len(made.tokens[0]) == 1 + 2 + 3 + len(made.falling_s[0]) + 3


def weights(name):
    """A matrix of tiny-moe in float32, its scales in float16 where it has 4 bits."""
    stored = mx.load(str(next(TINY.glob("model*.safetensors"))))
    w = stored[f"{name}.weight"]
    if f"{name}.scales" not in stored:
        return np.array(w.astype(mx.float32))
    given = json.loads((TINY / "config.json").read_text())["quantization"]
    bits = (given | given.get(name, {}))["bits"]
    kind = mx.float16 if bits == 4 else mx.float32
    parts = (stored[f"{name}.{p}"].astype(kind).astype(mx.float32) for p in ("scales", "biases"))
    return np.array(mx.dequantize(w, *parts, given["group_size"], bits))


def test_gguf_weights_are_the_checkpoints(tmp_path):
    to_gguf.write(TINY, tmp_path / "tiny.gguf")
    made = gguf.GGUFReader(tmp_path / "tiny.gguf").tensors
    made = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in made}
    for theirs, ours in (
        ("token_embd.weight", "embed_tokens"),
        ("blk.0.ffn_gate_exps.weight", "layers.0.mlp.switch_mlp.gate_proj"),
        ("blk.1.ffn_gate_inp.weight", "layers.1.mlp.gate"),
        ("blk.3.attn_q.weight", "layers.3.self_attn.q_proj"),
    ):
        np.testing.assert_array_equal(made[theirs], weights(f"language_model.model.{ours}"))
    t = json.loads((TINY / "config.json").read_text())["text_config"]
    keys, values = t["linear_num_key_heads"], t["linear_num_value_heads"]
    assert values > keys  # else llama.cpp's order of value heads is the same
    for theirs, ours, axis in (("attn_gate", "in_proj_z", 0), ("ssm_out", "out_proj", 1)):
        w = weights(f"language_model.model.layers.0.linear_attn.{ours}")
        w = np.moveaxis(w, axis, 0).reshape(keys, values // keys, -1)
        theirs = np.moveaxis(made[f"blk.0.{theirs}.weight"], axis, 0)
        np.testing.assert_array_equal(theirs.reshape(w.swapaxes(0, 1).shape), w.swapaxes(0, 1))


def test_fewer_operations_write_the_same_text():
    made = compiled.compiled(TINY, tokens=4, rounds=1).set_index("variant")
    plain, moe, layers = made.operations[[compiled.PLAIN, compiled.MOE, compiled.LAYERS]]
    assert plain > moe > layers
    if not mx.cuda.is_available():  # in bfloat16 a fused operation can round to another token
        assert (made.same_tokens == 4).all()


def test_the_record_is_what_is_predicted_now():
    record = records.read("cpu_planned_published")
    table = published.rows()
    table = table[table.why_not == ""]
    assert len(record) == len(table) and (record.published_tok_s == table.tok_s.to_numpy()).all()
    sample = table.assign(record=record.predicted_tok_s.to_numpy()).groupby("group").head(1)
    for _, row in sample[sample.model != "Kimi-K3 2.78T"].head(2).iterrows():
        assert published.predict(row).tok_s == pytest.approx(row.record, rel=1e-3)
    table = table.head(4).assign(group=[*"aaab"], side="left out", tok_s=[1, 2, 3, 4])
    found = published.by_source(table.assign(predicted_tok_s=2 * table.tok_s))
    assert found.factor.to_numpy() == pytest.approx(2)
    assert found.engine_known["a"] == pytest.approx(1) and np.isnan(found.engine_known["b"])


def test_whole_experts_are_read(model_path, monkeypatch):
    monkeypatch.setattr(reads.shutil, "which", lambda _: None)  # fio
    made = reads.bench_reads(model_path, (1, 2), 1 << 18, 2)
    assert len(made) == 3 * 2 * 2 and (made.bytes_per_s > 0).all()


def test_a_pass_that_is_not_exact_is_seen(monkeypatch):
    few = {"passes": 3, "tokens": 6, "sizes": (2, 12)}
    made = exactness.soak(TINY, config := StreamConfig(mode="fused", slots=8), **few)
    made += exactness.texts(TINY, config, LookupDraft, drafts=(0, 2), n=1, tokens=6)
    assert all(row["equal"] == row["n"] for row in made) and len(made) == 5
    compute = Stacked.forward
    monkeypatch.setattr(Stacked, "forward", lambda *args: compute(*args) * 1.01)
    made = exactness.soak(TINY, config, **few)
    assert sum(row["equal"] for row in made if row["what"] == "random passes") == 0
