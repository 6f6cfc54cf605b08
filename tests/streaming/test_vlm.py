"""mlx-vlm's families stream, and answer as mlx-vlm does with every expert in memory."""

import functools
import json

import families
import mlx.core as mx
import numpy as np
import pytest
from common import loaded
from families import VOCAB

import moelab
from moelab import kernels
from moelab.checkpoint import vlm
from moelab.repack import repack
from moelab.speculation.rollback import Rollback
from moelab.streaming.disk_embedding import ROW_NBYTES, DiskEmbedding

pytest.importorskip("mlx_vlm", reason="pip install --no-deps mlx-vlm")

import vlm_families
from mlx_vlm.models.cache import make_prompt_cache as theirs

PROMPT = mx.array([[(7 * i + 3) % VOCAB for i in range(40)]])
TEXT = [(11 * i + 5) % VOCAB for i in range(12)]


def load(path, **fields):
    """Load with mlx-vlm's class, which ``auto`` need not choose if mlx-lm has the family, too."""
    library = "mlx-vlm" if path.name in families.FAMILIES else "auto"
    return loaded(path, **{"slots": 4, "kernels": "mlx", "library": library} | fields)


def logits(model, cache, prompt=PROMPT):
    """Read a prompt of 40 tokens at once, then 12 tokens one by one; all logits ``[52, V]``."""
    rows = [model(prompt, cache=cache)] + [model(mx.array([[t]]), cache=cache) for t in TEXT]
    return np.array(mx.concatenate(rows, axis=1)[0])


def resident(model):
    if model.config.model_type in vlm.COMPILED_ONCE:
        mx.disable_compile()
    cache = theirs(model.language_model)
    images = {"pixel_values": None, "mask": None}
    rows = [model(PROMPT, cache=cache, **images).logits]
    rows += [model.language_model(mx.array([[t]]), cache=cache).logits for t in TEXT]
    return np.array(mx.concatenate(rows, axis=1)[0].astype(mx.float32))


@pytest.fixture(autouse=True)
def compiles():
    yield
    mx.enable_compile()  # ``resident`` turned compiling off for families of COMPILED_ONCE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(name):
        path = tmp_path_factory.mktemp("vlm") / name
        return path, resident(vlm_families.write_checkpoint(name, path))

    return make


@pytest.mark.parametrize("name", vlm_families.NAMES)
@pytest.mark.parametrize("mode", ["fused", "stacked", "serial"])
def test_family_of_mlx_vlm(name, mode, checkpoint):
    path, want = checkpoint(name)
    with load(path, mode=mode) as model:
        np.testing.assert_array_equal(logits(model, model.make_cache()), want)
        assert moelab.stats(model).prefill.bytes_read > 0
    if mode == "fused" and kernels.available():
        with load(path, kernels="fast") as model:
            got = logits(model, model.make_cache())
            np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("name", vlm_families.NAMES)
def test_lookahead_in_mlx_vlm(name, checkpoint):
    """On a Mac's GPU each family reads ahead like this by default, if routers can be asked."""
    path, want = checkpoint(name)
    if name in ("deepseek_v4", "gemma4", "gemma4_text"):  # they take token ids, or the routing
        with pytest.raises(ValueError, match="lookahead': .*Use prefetch='none'"):
            load(path, prefetch="lookahead")
        return
    with load(path, prefetch="lookahead") as model:
        np.testing.assert_array_equal(logits(model, model.make_cache()), want)


@pytest.mark.parametrize("name", vlm_families.NAMES)
def test_tokens_are_taken_back(name, checkpoint):
    """Two texts are read in turn, one of them with drafts that are accepted in part."""
    model, rng = load(checkpoint(name)[0], slots=8), np.random.default_rng(3)
    plain, drafted = model.make_cache(), model.make_cache()
    for cache in (plain, drafted):
        model(PROMPT[:, :20], cache=cache)
    if name in vlm_families.UNDRAFTED:
        with pytest.raises(ValueError, match="cannot be rolled back"):
            Rollback(model, drafted)(PROMPT[:, :3])
        return
    rollback = Rollback(model, drafted)
    for given, kept in (5, 2), (4, 4), (6, 0), (9, 5), (2, 1), (1, 1):
        tokens = mx.array(rng.integers(0, VOCAB, (1, given)))
        got = np.array(rollback(tokens))[0, :kept]
        rollback.undo(given - kept)
        rollback.commit()
        for i in range(kept):
            want = model(tokens[:, i : i + 1], cache=plain)[0, 0]
            np.testing.assert_allclose(got[i], np.array(want), atol=1e-5, rtol=0)


REFUSED = {name: (name, "mlx-vlm", said) for name, said in vlm_families.REFUSED.items()}
REFUSED["of no library"] = ("qwen9", "auto", "model_type qwen9: .* or of mlx-vlm [0-9.]+ A newer")
REFUSED["not installed"] = ("qwen9", "auto", "type qwen9: .*which is not installed.* pip install")
CHANGED = "olmoe: mlx-vlm .* has no text model .*update_module_configs.* was tried with"
REFUSED["another version"] = ("olmoe", "mlx-vlm", CHANGED)


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_refused(case, tmp_path, monkeypatch):
    vlm_families.write_checkpoint("olmoe", tmp_path)
    name, library, said = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(vlm_families.config_of(name)))
    if case == "not installed":
        monkeypatch.setattr(vlm, "find_spec", lambda name: None)
    if case == "another version":
        monkeypatch.delattr("mlx_vlm.utils.update_module_configs")
    with pytest.raises(moelab.CheckpointError, match=f"{tmp_path}: .*{said}"):
        loaded(tmp_path, library=library)


def test_auto_takes_the_class_that_has_the_names(checkpoint, tmp_path, capsys, monkeypatch):
    """mlx-lm's olmoe has other tensor names; in qwen3_5_moe both libraries' names are the same."""
    vlm_families.write_checkpoint("olmoe", tmp_path)
    moelab.footprint(tmp_path)
    assert isinstance(loaded(tmp_path), vlm.TextModel)
    said = f"moelab: {tmp_path}: mlx-vlm's class is used: it has the tensors' names\n"
    assert capsys.readouterr().err == said  # once
    assert not isinstance(loaded(checkpoint("qwen3_5_moe")[0]), vlm.TextModel)
    assert vlm.library_of({"model_type": "nemotron_h_puzzle"}) == "mlx-vlm"  # as its nemotron_h
    monkeypatch.setattr(vlm, "find_spec", {"mlx_lm": vlm.find_spec("mlx_lm")}.get)
    for library, words in ("mlx-lm", ""), ("auto", "not installed. pip install"):
        words = f"{tmp_path}: cannot build .* 39 parameters not in model: language_model.*{words}"
        with pytest.raises(moelab.CheckpointError, match=words):
            loaded(tmp_path, library=library)


@pytest.mark.parametrize("top_k, K", [(None, 3), (1, 2)])
def test_a_shared_expert_among_the_others(top_k, K, checkpoint):
    """The router of minimax_m3 chooses one expert more than its config.json says."""
    model = load(checkpoint("minimax_m3")[0], top_k=top_k)
    with moelab.record(model) as trace:
        logits(model, model.make_cache())
    assert trace.experts.shape[-1] == model._session.top_k == K
    assert (trace.experts == 8).sum() == len(trace)  # each token takes the last of 9 experts
    if top_k:  # a table of deepseek_v4 has K experts for each word
        with pytest.raises(ValueError, match="top_k: the tensors of .* take 2 only, got 1"):
            load(checkpoint("deepseek_v4")[0], top_k=top_k)


def test_an_ngram_table_stays_on_disk(checkpoint, monkeypatch):
    """Only the most recently used rows are in memory."""
    path, want = checkpoint("qwen4_exp")
    model = load(path)
    (table,) = (m for m in model.modules() if isinstance(m, DiskEmbedding))
    assert not table.parameters()
    row_nbytes = table._row_nbytes + ROW_NBYTES
    monkeypatch.setattr("moelab.streaming.disk_embedding.HOT_NBYTES", 30 * row_nbytes)
    np.testing.assert_array_equal(logits(model, model.make_cache()), want)
    assert len(table._hot) == 30
    with pytest.raises(IndexError, match="expected rows from 0 to"):
        table(mx.array([10**6]))


def test_a_plan_evaluates_no_layer(checkpoint, monkeypatch):
    """mlx-vlm's qwen4_exp would evaluate each layer, with all its experts."""
    path, _ = checkpoint("qwen4_exp")
    monkeypatch.setattr(mx, "async_eval", lambda *_: pytest.fail("evaluated"))
    moelab.footprint(path)


def test_a_text_begins_anew(checkpoint):
    """An earlier text, or a cache of another process, does not move a text's positions."""
    path, want = checkpoint("qwen3_5_moe")
    first = load(path)
    cache = first.make_cache()
    first(PROMPT, cache=cache)
    other = load(path)
    other(PROMPT[:, :7], cache=other.make_cache())
    got = np.array(other(mx.array([TEXT[:1]]), cache=cache)[0, 0])
    np.testing.assert_array_equal(got, want[40])


@pytest.mark.parametrize("name, layout", [("laguna", "packed"), ("qwen3_5_moe", "authors'")])
def test_gate_and_up_in_one_tensor(name, layout, checkpoint, tmp_path):
    """Packed: two tensors. The authors' layout: one ``[E, 2F, D]``, other names, and images."""
    if layout == "packed":
        path, want = checkpoint(name)
        repack(path, path := tmp_path / "packed", progress=False)
    else:
        path = families.write_hugging_face(name, tmp_path / name)
        whole = load(path, mode="resident")
        want = logits(whole, whole.make_cache())
    model = load(path)
    np.testing.assert_array_equal(logits(model, model.make_cache()), want)
    assert moelab.stats(model).decode.bytes_read > 0
