"""Every mlx-lm family streams, and answers as plain mlx-lm does with every expert in memory.

Each family is a tiny random checkpoint (tests/helpers/families.py) in one or more variants. The
prompt needs more experts than there are slots, so the prompt runs in waves.
"""

import families
import mlx.core as mx
import numpy as np
import pytest
from common import LONG, STREAMED, greedy_logits, loaded, watched
from families import EVERY_VARIANT, VOCAB, E, K
from faults import read_in_parts

import moelab

SLOTS = K + 1
PROMPT, LONG_PROMPT = LONG[:20], LONG[:40]  # mlx-lm sorts 64 or more indices by expert
NUM_STEPS = 5

ON_CPU = set(families.VARIANTS) - {"nvfp4_global"}  # a CPU takes no scale for a whole tensor
NAMES = families.FAMILIES.keys() - families.EXPERTS_ONLY
# One variant for every family and name, and every variant for a few families.
CASES = sorted(
    {(name, families.variant_of(name)) for name in NAMES | families.ALIASES.keys()}
    | {(name, variant) for name in EVERY_VARIANT for variant in ON_CPU}
)


def assert_streams(path, prompt=PROMPT):
    """Every streamed mode must answer as plain mlx-lm does."""
    resident = families.load_resident(path)
    T, want = len(prompt), greedy_logits(resident, prompt, NUM_STEPS, every=True)
    assert np.isfinite(want).all() and np.ptp(want[T:]) > 0, "the logits are all the same"
    num_layers = len(families.expert_modules(resident))
    del resident
    for mode in STREAMED:
        with loaded(path, mode=mode, slots=SLOTS, kernels="mlx") as model:
            assert not families.expert_modules(model), f"{mode}: some experts were left resident"
            got = greedy_logits(model, prompt, NUM_STEPS, every=True)
            stats = moelab.stats(model)
        atol = 1e-4 * np.abs(want[:T]).max()
        np.testing.assert_allclose(got[:T], want[:T], atol=atol, rtol=0, err_msg=mode)
        atol = 0 if mode in ("stacked", "fused") else atol  # one token's logits are exact
        np.testing.assert_allclose(got[T:], want[T:], atol=atol, rtol=0, err_msg=mode)
        assert stats.prefill.misses > num_layers * SLOTS, "the prompt needed no waves"
        assert stats.prefill.bytes_read > 0 and stats.decode.calls == NUM_STEPS * num_layers, mode


def test_every_family_of_this_mlx_lm_is_listed():
    """A new family in mlx-lm fails this test until helpers/families.py lists it or says why not."""
    assert families.discover() == set(families.FAMILIES)
    # Files that name experts, but neither SwitchGLU nor SwitchMLP.
    named = {name for name, text in families.MODEL_FILES.items() if "experts" in text}
    assert named - families.discover() - {"switch_layers"} == families.NOT_STREAMED


@pytest.mark.parametrize("name, variant", CASES)
def test_family_streams(name, variant, stored):
    path = stored(name, variant)
    assert_streams(path)
    if name in EVERY_VARIANT and variant == "affine4":
        assert_streams(path, prompt=LONG_PROMPT)


def test_nothing_compiled_reads_lazy_weights(stored, monkeypatch):
    """On Metal kimi_k3 compiles a step that ``load`` tries before it reads the weights."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    compiled = watched(monkeypatch, mx, "compile", lambda f, **_: f.__name__)
    with loaded(stored("kimi_k3"), slots=K + 1, kernels="mlx") as model:
        assert "_decode_core" in compiled and not any(
            getattr(m, "_step", None) for m in model.modules()
        )


@pytest.mark.parametrize("name", sorted(families.EXPERTS_ONLY))
def test_experts_of_a_family_that_the_cpu_cannot_run(name, stored):
    """mlx-lm needs Metal for the rest of these models, so only their experts are compared."""
    path = stored(name)
    resident = families.load_resident(path)
    x, indices = mx.random.normal((1, 9, 64)), mx.arange(9 * K).reshape(1, 9, K) % E
    for mode in STREAMED:
        with loaded(path, mode=mode, slots=SLOTS, kernels="mlx") as model:
            streamed = dict(model.named_modules())
            for module_path, want in families.expert_modules(resident):
                got = streamed[module_path]
                for a, its in ((x, indices), (x[:, :1], indices[:, :1])):
                    assert mx.allclose(got(a, its), want(a, its), atol=1e-5), mode
                # Other modules that mlx-lm keeps in the experts' module must stay.
                assert want.keys() - {"gate_proj", "up_proj", "down_proj"} <= got.keys()


@pytest.mark.parametrize("name", sorted(families.HUGGING_FACE))
def test_hugging_face_layout(name, tmp_path):
    path = families.write_hugging_face(name, tmp_path / name)
    if name in families.REARRANGED:
        with pytest.raises(moelab.CheckpointError, match="not contiguous") as error:
            loaded(path, slots=SLOTS)
        message = str(error.value)
        assert str(path) in message and name in message and "mlx_lm.convert" in message, message
    else:
        assert_streams(path)


# qwen3_moe has K = 2, llama4 K = 1, nemotron_h fc1 and fc2, deepseek_v41 inputs [T, D].
@pytest.mark.parametrize("name", ["qwen3_moe", "llama4", "nemotron_h", "deepseek_v41"])
def test_batches(name, stored):
    """A batch of any B, T and K gives mlx-lm's logits, with MLX's kernels."""
    path = stored(name)
    resident = families.load_resident(path)
    for mode in ("stacked", "fused"):
        for slots in (SLOTS, E):
            with loaded(path, mode=mode, slots=slots, kernels="mlx") as model:
                for B, T in ((1, 1), (2, 1), (1, 2), (1, 3), (3, 5), (1, 40)):
                    tokens = mx.array(np.random.default_rng(B * T).integers(0, VOCAB, (B, T)))
                    want, got = np.array(resident(tokens)), np.array(model(tokens))
                    worst = np.abs(got - want).max() / np.abs(want).max()
                    assert worst <= 1e-4, (mode, slots, B, T)


@pytest.mark.parametrize("variant", ["affine4", "plain"])
@pytest.mark.parametrize("name", [*EVERY_VARIANT, "llama4", "deepseek_v41"])
def test_experts_as_if_large(name, variant, stored, monkeypatch):
    """Logits stay the same if threads read experts and calls are split, as for large experts."""
    read_in_parts(monkeypatch)
    path = stored(name, variant)
    assert_streams(path)
    assert_streams(path, prompt=LONG_PROMPT)


# bailing_moe of mlx-lm 0.32.2 compiles a sum over one expert with shapeless=True. On a CPU
# mlx 0.32.4 then ends the process.
RUN = sorted(NAMES - {"bailing_moe"})


@pytest.mark.parametrize(
    "name, variant, dtype",
    # MLX's mxfp4 products of float16 arrays are float32, so float32 reaches the experts.
    [(n, "affine4", "auto") for n in RUN] + [(n, "mxfp4", "float16") for n in EVERY_VARIANT],
)
def test_fewer_experts_per_token(name, variant, dtype, stored):
    """``top_k`` reaches the router of every family, whatever the family calls K."""
    path, logits = stored(name, variant), {}
    for mode in ("resident", "fused"):
        model = loaded(path, mode=mode, top_k=1, slots=SLOTS, dtype=dtype)
        with model, moelab.record(model) as trace:
            logits[mode] = greedy_logits(model, PROMPT[:3], 2)[1:]
        assert trace.experts.shape[1:] == (moelab.footprint(path).num_layers, 1)
    np.testing.assert_array_equal(logits["fused"], logits["resident"])
