"""Time a dense and an MoE model of equal size on a GPU, with each setting of command buffers.

    python data/recipes/buffers.py OUT.json                  a token's seconds, by setting
    python data/recipes/buffers.py OUT.json MODEL            operations in each layer, also of MODEL
    python data/recipes/buffers.py OUT.json MODEL kernels    a token's seconds on the GPU, by kernel

Notebook 10 reads the records. MLX reads its settings once, so each setting has its own process.
``torch.profiler`` counts and times the kernels.
"""

import os
import re
import sys
import unittest.mock
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3, qwen3_moe

import moelab
from moelab.configs import CONFIGS
from moelab.lab import limit, records
from moelab.lab.decode import decode
from moelab.lab.experiments.dispatch import default_dtype, hooked_experts, operations_of_layers

AHEAD, ROUTING_READ = "next token scheduled ahead", "every layer's routing read"
SETTINGS = {
    "as it is": {},
    "1 a buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "5 a buffer": {"MLX_MAX_OPS_PER_BUFFER": "5"},
    "1000 a buffer": {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "100000"},
    "no CUDA graphs": {"MLX_USE_CUDA_GRAPHS": "0"},
}
KINDS = {  # kinds of kernels, by words in their names
    "products of experts": "qmm_",
    "other products": "qmv|gemv|gemm",
    "norms, softmax, sums": "rms_norm|softmax|reduce",
    "sorts": "sort",
    "copies": "copy|gather|scatter|arange|concat",
    "recurrence, convolution": "gated_delta|conv",
    "other elementwise": "",
}


def dense_and_moe(layers=8):
    """Make random 4-bit models: Qwen3 with an MLP of size K * F, Qwen3-MoE with K experts of F.

    For each token both do the same amount of arithmetic and read the same number of bytes.
    """
    mx.random.seed(0)
    K, F = 8, 512
    size = {"hidden_size": 2048, "num_hidden_layers": layers, "vocab_size": 8192}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
    experts = {"num_experts": 32, "num_experts_per_tok": K, "moe_intermediate_size": F}
    config = CONFIGS["qwen3-30b-a3b"] | size | heads | experts | {"intermediate_size": K * F}
    models = {
        name: of.Model(of.ModelArgs.from_dict(config))
        for name, of in (("dense", qwen3), ("moe", qwen3_moe))
    }
    for model in models.values():
        model.set_dtype(default_dtype())
        nn.quantize(model, 64, 4)
        for layer in model.layers:  # one at a time: an unquantized layer takes 8 times the memory
            mx.eval(layer.parameters())
        mx.eval(model.parameters())
        model.eval()
    return models


def loop(model, tokens, hook=None):
    """Time greedy decoding that schedules the next token before it reads the current one.

    ``hook(call, x, indices)`` is called in place of each layer's experts.
    """
    with hooked_experts(model, hook) if hook else nullcontext():
        found = decode(model, [1, 2, 3, 4], tokens)
    return {"decode_tokens": found.decode_tokens, "decode_s": found.decode_s}


def here(tokens=48, rounds=10):
    """Time the models in this process, whose environment has one of ``SETTINGS``."""
    models = dense_and_moe()
    hooks = {AHEAD: None, ROUTING_READ: lambda call, x, i: (np.array(i), call(x, i))[1]}
    variants = {
        (name, way): lambda _, name=name, way=way: (
            loop(models[name], tokens, hooks[way]) | {"model": name, "loop": way}
        )
        for name, way in (("dense", AHEAD), ("moe", AHEAD), ("moe", ROUTING_READ))
    }
    made = records.interleave("loops", variants, rounds, warmup=2)
    return records.as_json(made.drop(columns="variant"))["rows"]


def resident(path):
    """Load a model with every expert in memory and MLX's kernels."""
    return moelab.load(path, moelab.StreamConfig(mode="resident", kernels="mlx"))[0]


def count(path):
    """Count each layer's operations in MLX's graph, for both models and for a checkpoint."""
    models = dense_and_moe(layers=1) | {Path(path).name: resident(path)}
    rows = [
        {"variant": name, "layer": layer, "operations": sum(kinds.values())} | kinds
        for name, counted in models.items()
        for layer, kinds in enumerate(operations_of_layers(counted))
    ]
    return records.Running("count").table(rows)


def kernels(path, tokens=64, rounds=5):
    """Measure GPU seconds per token by kind of kernel, a short prompt's seconds included."""
    from torch.profiler import ProfilerActivity, profile

    model = resident(path)
    loop(model, tokens)
    running, rows = records.Running("kernels", {"model": Path(path).name, "tokens": tokens}), []
    for i in range(rounds):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            loop(model, tokens)
            mx.synchronize()
        num, seconds = Counter(), Counter()
        for event in profiled.key_averages():
            name = re.split("[(<]", event.key)[0]
            kind = next(kind for kind, words in KINDS.items() if re.search(words, name))
            if event.self_device_time_total:
                num[kind] += event.count / tokens
                seconds[kind] += event.self_device_time_total / 1e6 / tokens
        rows += [
            {"variant": kind, "round": i, "kernels": num[kind], "device_s": seconds[kind]}
            for kind in KINDS
        ]
    return running.table(rows)


def main(out, path=None, work="count"):
    if path:
        return records.save(out, {"count": count, "kernels": kernels}[work](path))
    running, rows = records.Running("buffers"), []
    for setting, environment in SETTINGS.items():
        with unittest.mock.patch.dict(os.environ, environment):
            found, _ = limit.call(here, what=setting)
        rows += [
            {"variant": f"{row['model']}, {setting}", "setting": setting} | row for row in found
        ]
    records.save(out, running.table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
