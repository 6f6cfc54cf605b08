"""Why a resident model's token takes longer on a GPU than its arithmetic: what can be fused.

    python data/recipes/compiled.py OUT.json MODEL             parts of the layers compiled by MLX
    python data/recipes/compiled.py OUT.json MODEL kernels     the GPU's seconds by kernel

For each token MLX builds a new graph: Python calls every operation, and each kernel becomes a node
of a CUDA graph. ``mx.compile`` traces a part of the model once and fuses neighbouring operations. A
kernel of moelab's own computes a recurrence in one operation. Both round differently. CUPTI counts
the seconds by kernel, through ``torch.profiler``.
"""

import re
import sys
import unittest.mock
from collections import Counter
from contextlib import ExitStack

import mlx.core as mx
from buffers import loop
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache

import moelab
from moelab.hooks import hooked, with_globals
from moelab.lab import records
from moelab.lab.decode import same_tokens
from moelab.lab.experiments.dispatch import operations_of_layers
from moelab.lab.models import folder
from moelab.speculation import gated_delta_cuda

PLAIN = "as it is"
MOE, LAYERS = "MoE compiled", "recurrent layers and MoE compiled"
KERNEL, ALL = "recurrence in one kernel", "all of these"
PROMPT = (1, 2, 3, 4)
KINDS = {  # kinds of kernels, by words in their names
    "products of experts": "qmm_",
    "other products": "qmv|gemv|gemm",
    "norms, softmax, sums": "rms_norm|softmax|reduce",
    "sorts": "sort",
    "copies": "copy|gather|scatter|arange|concat",
    "recurrence, convolution": "gated_delta|conv",
}
OTHER_KIND = "other elementwise"


def _compiled(module):
    """A module that is called with x [B, T, D] alone, compiled where T is 1."""
    made = mx.compile(module.__call__)  # the module's own, not the hooked one
    return hooked(module, lambda call, x: made(x) if x.shape[1] == 1 else call(x))


def _compiled_layer(layer):
    """A layer whose cache is an ``ArraysCache`` of two arrays, compiled where T is 1."""
    own = layer.__call__

    @mx.compile
    def made(x, *state):
        cache = ArraysCache(size=2)
        cache[0], cache[1] = state
        return own(x, None, cache), cache[0], cache[1]

    def hook(call, x, mask=None, cache=None):
        if x.shape[1] > 1 or mask is not None or cache is None or cache[0] is None:
            return call(x, mask, cache)
        x, cache[0], cache[1] = made(x, cache[0], cache[1])
        cache.advance(1)
        return x

    return hooked(layer, hook)


def _hooks(model, recurrent):
    """The MoE of each layer compiled, or with it the whole of each recurrent layer."""
    return [
        _compiled_layer(layer) if recurrent and layer.is_linear else _compiled(layer.mlp)
        for layer in model.layers
    ]


def _one_kernel():
    kernel = {"gated_delta_ops": gated_delta_cuda.gated_delta}
    update = with_globals(qwen3_5.gated_delta_update, kernel)
    return unittest.mock.patch.object(qwen3_5, "gated_delta_update", update)


def variants(model):
    """The context managers of each variant, for a model with the layers of Qwen3.5 or Qwen3.6."""
    ways = {PLAIN: [], MOE: _hooks(model, False), LAYERS: _hooks(model, True)}
    if mx.cuda.is_available():
        ways |= {KERNEL: [_one_kernel()], ALL: [_one_kernel(), *_hooks(model, True)]}
    return ways


def _resident(path):
    """A model with every expert in memory and MLX's kernels, which do not evaluate early."""
    return moelab.load(path, moelab.StreamConfig(mode="resident", kernels="mlx"))[0]


def compiled(path, tokens=64, rounds=15):
    """Decode with parts of the layers compiled; ``same_tokens`` compares with the plain model."""
    path, model = folder(path), _resident(path)

    def inside(ways, function, *args):
        with ExitStack() as stack:
            for way in ways:
                stack.enter_context(way)
            return function(model, *args)

    named, facts, plain = variants(model), {}, None
    for name, ways in named.items():
        text = inside(ways, _text, tokens)
        plain = plain or text
        counts = inside(ways, lambda model: [*operations_of_layers(model)])
        facts[name] = {
            "operations": sum(sum(kinds.values()) for kinds in counts),
            "same_tokens": same_tokens(plain, text),
        }
    runs = {
        name: lambda _, name=name, ways=ways: inside(ways, loop, tokens) | facts[name]
        for name, ways in named.items()
    }
    settings = {"model": path.name, "tokens": tokens}
    return records.interleave("compiled", runs, rounds, settings, warmup=2)


def _text(model, tokens):
    return [int(y) for y, _ in generate_step(mx.array(PROMPT), model, max_tokens=tokens)]


def kernels(path, tokens=64, rounds=5):
    """The GPU's seconds in a decoded token by kind of kernel, those of a short prompt included."""
    from torch.profiler import ProfilerActivity, profile

    path, model = folder(path), _resident(path)
    loop(model, tokens)
    running, rows = records.Running("kernels", {"model": path.name, "tokens": tokens}), []
    for i in range(rounds):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            loop(model, tokens)
            mx.synchronize()
        count, seconds = Counter(), Counter()
        for event in profiled.key_averages():
            if event.self_device_time_total:
                count[kind(event.key)] += event.count / tokens
                seconds[kind(event.key)] += event.self_device_time_total / 1e6 / tokens
        rows += [
            {"variant": name, "round": i, "kernels": count[name], "device_s": seconds[name]}
            for name in (*KINDS, OTHER_KIND)
        ]
    return running.table(rows)


def kind(kernel):
    """The kind of a kernel by its name: one of ``KINDS``, or ``OTHER_KIND``."""
    name = kernel.partition("(")[0].partition("<")[0]
    return next((kind for kind, found in KINDS.items() if re.search(found, name)), OTHER_KIND)


def main(out, model, work="compiled"):
    made = kernels(model) if work == "kernels" else compiled(model)
    told = records.group(made, "device_s" if work == "kernels" else "token_s") * 1e3
    records.print_and_save(told.round(3).to_string(), made, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
