"""What may be changed in a model after ``load``, what is refused, and what mlx-lm's keywords do."""

import contextlib
import functools
import inspect
import json
import shutil

import families
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from common import greedy_logits, loaded
from families import K
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.switch_layers import SwitchGLU

import moelab
from moelab.streaming.model import load_model

FIELDS = {"slots": K, "kernels": "mlx"}
answer = functools.partial(greedy_logits, prompt=[5, 36, 67, 2], steps=2)


def by_file(model, weights, file):
    mx.save_safetensors(file, weights)
    model.load_weights(file, strict=False)


def by_assignment(model, weights, _):
    modules = dict(model.named_modules())
    for name, w in weights.items():
        owner, param = name.rsplit(".", 1)
        setattr(modules[owner], param, w)


def in_place(model, weights, _):
    have = dict(tree_flatten(model.parameters()))
    for name, w in weights.items():
        have[name][...] = w


CHANGES = (
    lambda model, weights, _: model.load_weights([*weights.items()], strict=False),
    lambda model, weights, _: model.update(tree_unflatten([*weights.items()]), strict=False),
    by_file,
    by_assignment,
    in_place,
)


def test_new_weights_take_effect(hybrid, tmp_path):
    """Each way to set scales and biases of the backbone takes effect as in a resident model."""
    resident, file = families.load_resident(hybrid), str(tmp_path / "w.safetensors")
    experts = tuple(k for k, m in resident.named_modules() if isinstance(m, SwitchGLU))
    weights = {
        k: p + 0.01 * mx.random.normal(p.shape, key=mx.random.key(0)).astype(p.dtype)
        for k, p in tree_flatten(resident.parameters())
        if not k.startswith(experts) and mx.issubdtype(p.dtype, mx.floating)
    }
    before = answer(resident)
    CHANGES[0](resident, weights, file)
    want = answer(resident)
    assert np.abs(want - before).max() > 0.01
    for change in CHANGES:
        with loaded(hybrid, **FIELDS) as model:
            np.testing.assert_allclose(answer(model), before, atol=1e-4)
            change(model, weights, file)
            np.testing.assert_allclose(answer(model), want, atol=1e-4, err_msg=str(change))


def test_set_dtype_takes_effect_or_is_refused(hybrid):
    """The next call is an error if activations do not fit the slots after ``set_dtype``."""
    with loaded(hybrid, **FIELDS) as model:
        before = answer(model)
        model.set_dtype(mx.float32)
        np.testing.assert_array_equal(answer(model), before)
        model.set_dtype(mx.bfloat16)
        with pytest.raises(TypeError, match="activations"):
            answer(model)


@pytest.mark.parametrize("mode", ["serial", "fused"])
def test_what_needs_every_expert_in_memory_is_refused(hybrid, mode, tmp_path):
    with loaded(hybrid, mode=mode, slots=K) as model:
        before = answer(model)
        config = json.loads((hybrid / "config.json").read_text())
        parameters = tree_flatten(families.load_resident(hybrid).parameters())
        experts = {k: p * 2 for k, p in parameters if "switch_mlp" in k}
        file = tmp_path / "w.safetensors"
        for needs_all in (
            *(functools.partial(c, model, experts, str(file)) for c in CHANGES[:3]),
            lambda: mlx_lm_utils.save_model(tmp_path / "a", model),
            lambda: mlx_lm_utils.save_model(tmp_path / "a", model, donate_model=True),
            lambda: model.save_weights(str(tmp_path / "b.safetensors")),
            lambda: mlx_lm_utils.quantize_model(model, config, 32, 4),
            lambda: nn.quantize(model, 32, 4),
            lambda: mlx_lm_utils.get_total_parameters(model),
            lambda: model.train(),
            lambda: nn.value_and_grad(model, lambda x: model(x).sum())(mx.array([[5, 36]])),
            lambda: model.shard(),
        ):
            said = "switch_mlp.*cannot be replaced in memory|a streamed model cannot be .*resident'"
            with pytest.raises(ValueError, match=said):
                needs_all()
        assert [f for f in tmp_path.rglob("*") if f.is_file()] == [file], "something was written"
        np.testing.assert_array_equal(answer(model), before)


def test_a_resident_model_saves_what_mlx_lm_saves(hybrid, tmp_path):
    with loaded(hybrid, mode="resident", kernels="mlx") as model:
        want = answer(model)
        mlx_lm_utils.save_model(tmp_path, model)
    (tmp_path / "config.json").write_text((hybrid / "config.json").read_text())
    np.testing.assert_array_equal(answer(families.load_resident(tmp_path)), want)


def test_load_takes_what_mlx_lm_takes(random_tiny_moe):
    """``load`` has the keywords of mlx-lm's ``load``, with their defaults, and four of its own."""
    theirs, ours = (inspect.signature(f).parameters for f in (mlx_lm.load, moelab.load))
    assert next(iter(ours)) == next(iter(theirs))
    own = {"config", "group", "draft", "texts"}
    assert ours.keys() - theirs.keys() == own and not theirs.keys() - ours.keys()
    assert all(ours[name].default == parameter.default for name, parameter in theirs.items())
    given = {"return_config": True, "tokenizer_config": {}, "lazy": False}
    model, _, config = moelab.load(random_tiny_moe, **given)
    with model:
        assert config == mlx_lm.load(str(random_tiny_moe), return_config=True)[2]
    with pytest.raises(ValueError, match="lazy=True is not possible"):
        moelab.load(random_tiny_moe, lazy=True)
    with pytest.raises(ValueError, match="expected a StreamConfig, got dict"):
        moelab.load(random_tiny_moe, {"trust_remote_code": True})


def test_model_config_changes_what_mlx_lm_lets_it_change(hybrid):
    text = json.loads((hybrid / "config.json").read_text())["text_config"]
    rope = {"rope_theta": 100.0, "rope_parameters": {"rope_theta": 100.0, "type": "default"}}
    changes = {"text_config": {**text, **rope}}

    def answers(model_config, **fields):
        config = moelab.StreamConfig(**FIELDS | fields)
        with load_model(hybrid, config, model_config=model_config)[0] as model:
            return answer(model)

    changed, _ = mlx_lm_utils.load_model(hybrid, model_config=changes)
    changed.set_dtype(mx.float32)
    np.testing.assert_allclose(answers(changes), answer(changed), atol=1e-4)
    streamed, resident = answers(changes, top_k=1), answers(changes, top_k=1, mode="resident")
    np.testing.assert_allclose(streamed, resident, atol=1e-4)
    assert np.abs(answers(None, top_k=1) - streamed).max() > 1e-3


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_adapters_of_the_backbone(kind, random_tiny_moe, tmp_path):
    """A model with adapters, given to ``load`` or loaded later, answers as mlx-lm's model does."""
    keys = "self_attn.q_proj", "self_attn.o_proj", "linear_attn.out_proj"
    adapters = families.write_adapters(tmp_path / "adapters", random_tiny_moe, kind, *keys)
    plain = families.load_resident(random_tiny_moe)
    before = answer(plain)
    mlx_lm_utils.load_adapters(plain, str(adapters))
    plain.set_dtype(mx.float32)
    want = answer(plain)
    assert np.abs(want - before).max() > 1e-3
    config = moelab.StreamConfig(slots=16)
    with moelab.load(random_tiny_moe, config, adapter_path=str(adapters))[0] as model:
        assert mx.default_device() != mx.cpu or moelab.stats(model).kernels["fast"]
        np.testing.assert_allclose(answer(model), want, atol=1e-3)
    with moelab.load(random_tiny_moe, config)[0] as model:
        answer(model)
        mlx_lm_utils.load_adapters(model, str(adapters))
        model.set_dtype(mx.float32)
        np.testing.assert_allclose(answer(model), want, atol=1e-3, err_msg="loaded later")


def test_adapters_of_streamed_experts_are_refused(random_tiny_moe, tmp_path):
    """A LoRA scale that is no number is refused, too. ``test_bad_input.py`` draws other damage."""
    made = tmp_path / "experts", random_tiny_moe, "lora", "mlp.switch_mlp.gate_proj"
    adapters = str(families.write_adapters(*made))
    streamed, resident = (moelab.StreamConfig(mode, slots=16) for mode in ("fused", "resident"))
    with pytest.raises(ValueError, match="switch_mlp.*streamed expert"):
        moelab.load(random_tiny_moe, streamed, adapter_path=adapters)
    moelab.close(moelab.load(random_tiny_moe, resident, adapter_path=adapters)[0])
    made = tmp_path / "scale", random_tiny_moe, "lora", "self_attn.q_proj"
    adapters = families.write_adapters(*made)
    settings = adapters / "adapter_config.json"
    settings.write_text(settings.read_text().replace("10.0", '"x"'))
    with pytest.raises(moelab.CheckpointError, match=f"{adapters}: .* a scale of 'x'"):
        moelab.load(random_tiny_moe, streamed, adapter_path=str(adapters))


@pytest.mark.parametrize("mode", ["resident", "fused"])
def test_fewer_experts_where_the_config_leaves_it_to_the_family(mode, tmp_path):
    """ernie4_5_moe calls K ``moe_k``. ``top_k`` counts even if config.json has no name for K."""
    path = families.write_checkpoint("ernie4_5_moe", tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    answers = []
    for left_out in ("nothing", "moe_k", "num_experts_per"):
        config = {k: v for k, v in config.items() if not k.startswith(left_out)}
        (path / "config.json").write_text(json.dumps(config))
        with loaded(path, mode=mode, slots=K, top_k=1) as model:
            answers.append(answer(model))
    np.testing.assert_array_equal(answers, answers[:1] * 3)


def test_a_router_that_does_not_choose_fewer_is_an_error(hybrid, monkeypatch):
    """If a family's name for K is unknown, K is the number of experts that the router chooses."""
    monkeypatch.setattr("moelab.streaming.build.TOP_K_KEYS", ("unknown_word",))
    assert moelab.footprint(hybrid, moelab.StreamConfig(**FIELDS)).top_k == K
    with pytest.raises(ValueError, match="cannot be asked for fewer .* chooses 2, got 1"):
        loaded(hybrid, slots=K, top_k=1)


def test_no_code_of_a_checkpoint_runs_unasked(random_tiny_moe, tmp_path):
    for file, key, value in (
        ("config.json", "model_file", "own.py"),
        ("tokenizer_config.json", "auto_map", {"AutoTokenizer": [None, "own.Tokenizer"]}),
    ):
        folder = shutil.copytree(random_tiny_moe, tmp_path / key)
        (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**config, key: value, "tokenizer_class": "Own"}))
        with contextlib.suppress(moelab.CheckpointError):
            moelab.close(moelab.load(folder)[0])
        assert not (tmp_path / "ran").exists(), file
        if key == "model_file":
            with pytest.raises(SystemExit):
                moelab.load(folder, trust_remote_code=True)
            assert (tmp_path / "ran").exists(), "the file runs if the caller asks for it"
            (tmp_path / "ran").unlink()
