"""Notebook 02: from one read at a time to slots, one rung at a time.

The command ``bench`` measures the ladder (``MODES``). Here stand the names of its rungs and what
else the notebook asks: what a prompt reads, how the speed differs from prompt to prompt, and
whether the order of experts in a call matters. A record of the last two:

    python -m moelab.lab ladder OUT.json prompts MODEL
    python -m moelab.lab ladder OUT.json tokens-at-once qwen3.5-35b-a3b
"""

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ... import DATA, StreamConfig, footprint, load, record, stats, synthesize
from .. import charts, records
from ..decode import decode
from ..models import folder
from ..texts import PROMPTS, heldout_ids
from . import bench
from .dispatch import BITS, GROUP, SHAPES, default_dtype

if TYPE_CHECKING:
    from pandas import DataFrame

# Each rung adds one thing to the one before. The speculative reads of PR 26 belong to notebook 04.
RUNGS = {
    "serial": "serial",  # read an expert, compute it, go on to the next
    "buffers/readers=1": "batched",  # persistent buffers; all of a layer's reads come first
    "buffers": "parallel",  # several reads in flight at once
    "stacked": "slots",  # S experts stay in one array per projection, each with one gather
    "fused": "gate+up",  # gate and up are in one array: one gather fewer
}
LADDER = ",".join(RUNGS)
MODES = f"resident,{LADDER}"
SHORT_PROMPTS = ("def", "class", "import os", "for x in")  # each needs other experts
# The parts of a token's milliseconds, as expressions of ``bench``'s columns.
PARTS = {
    "waiting for reads": "wait_s * 1e3 / decode_tokens",
    "the rest": "(decode_s - wait_s) * 1e3 / decode_tokens",
}
# Qwen3.5-122B-A10B: layers, experts per token, and bytes of an expert: three matrices of 4 bits
# with two 16-bit numbers for each 64 weights.
L_122B, K_122B, EXPERT_NBYTES_122B = 48, 8, 3 * 3072 * 1024 * 36 // 64
EXPERT_NBYTES_35B = 3 * 2048 * 512 * 36 // 64
TOKEN_NBYTES_122B = L_122B * K_122B * EXPERT_NBYTES_122B


def checkpoint_of_real_layers(
    tokenizer: str | Path, layers: int = 4, experts: int = 256, like: str = "qwen3.5-35b-a3b"
) -> tempfile.TemporaryDirectory:
    """A random checkpoint of a real model's layers, for as long as the object lives.

    It lies beside ``data/``, since the system's temporary folder may be in memory.
    """
    build = DATA.parent / "build"
    build.mkdir(exist_ok=True)
    made = tempfile.TemporaryDirectory(prefix="layers-", dir=build)
    config = copy.deepcopy(synthesize.CONFIGS[like])
    config.get("text_config", config)["num_experts"] = experts
    made.path = synthesize.synthesize(
        Path(made.name) / like, like, layers, tokenizer=tokenizer, config=config, progress=False
    )
    return made


def climbs(ladders: "Mapping[str, DataFrame]") -> "DataFrame":
    """How many times faster than ``serial`` each rung is, here and as PR 26 and PR 90 report."""
    pr26, pr90 = records.PUBLISHED["PR 26"], records.PUBLISHED["PR 90"]
    rewrite = pr26["buffers, top-8"] / pr26["serial, top-8"]
    steps = {"slots": pr90["stacked"] / pr90["buffers"], "gate+up": pr90["fused"] / pr90["buffers"]}
    told = {"serial": 1.0, "parallel": rewrite} | {n: rewrite * s for n, s in steps.items()}

    def rows(samples):
        every = {rung: records.paired(samples, "serial", mode) for mode, rung in RUNGS.items()}
        return [{"rung": rung, "times": t} for rung, times in every.items() for t in times]

    made = {n: records.table(s.attrs | {"rows": rows(s)}) for n, s in ladders.items()}
    made["M1 Ultra, published (PR 26, then PR 90)"] = records.computed(
        [{"rung": rung, "times": t} for rung, t in told.items()], pr26["source"]
    )
    return records.together(made)


def prompt_reads(path: str | Path, slots: int = 16, tokens: int = 64) -> "DataFrame":
    """Read a prompt that needs more experts than there are slots, and count uses and reads."""
    model, tokenizer = load(path, StreamConfig(slots=slots))
    prompt = tokenizer.encode(" ".join(PROMPTS))[:tokens]
    with model:
        with record(model) as trace:
            mx.eval(model(mx.array([prompt])))
        read = stats(model).prefill.misses
    row = {
        "prompt_tokens": len(prompt),
        "uses": trace.experts.size,
        "distinct": sum(len(np.unique(layer)) for layer in np.moveaxis(trace.experts, 1, 0)),
        "read": read,
    }
    return records.Running("prompt reads", {"model": folder(path).name, "slots": slots}).table(
        [row]
    )


def prompt_speeds(
    path: str | Path,
    config: StreamConfig | None = None,
    prompts: int = 16,
    runs: int = 10,
    tokens: int = 32,
    length: int = 64,
    warmup: int = 8,
    progress: bool = True,
) -> "DataFrame":
    """Decode in turn behind several prompts of one length, from tiny-moe's held-out code."""
    config = config or StreamConfig(slots=footprint(path).num_experts // 4)
    settings = {"model": folder(path).name, "tokens": tokens, "slots": config.slots}
    texts = heldout_ids(path, (length,), prompts)
    model, _ = load(path, config)

    def run(ids, i):
        ran = decode(model, ids, tokens, warmup)
        counters = asdict(ran.counters)
        del counters["tokens"]
        return {"decode_tokens": ran.decode_tokens, "decode_s": ran.decode_s, **counters}

    variants = {f"prompt {p + 1}": partial(run, ids) for p, ids in enumerate(texts)}
    with model:
        return records.interleave(
            "prompts", variants, runs, settings | {"cache_state": "warm"}, progress=progress
        )


def tokens_at_once(
    D: int,
    F: int,
    K: int,
    E: int = 64,
    tokens: Sequence[int] = (1, 2, 4, 8, 32),
    runs: int = 10,
    dtype: mx.Dtype | None = None,
    seed: int = 0,
) -> "DataFrame":
    """Time one layer's experts for T tokens, with indices in routing order and sorted by expert.

    mlx-lm sorts from 64 indices on.
    """
    from mlx_lm.models.switch_layers import SwitchGLU, _gather_sort, _scatter_unsort

    mx.random.seed(seed)
    dtype = dtype or default_dtype()
    experts = SwitchGLU(D, F, E)
    nn.quantize(experts, GROUP, BITS)
    experts.set_dtype(dtype)
    mx.eval(experts.parameters())
    rng, variants = np.random.default_rng(seed), {}

    def as_they_come(x, i):
        x = mx.expand_dims(x, (-2, -3))
        h = experts.activation(experts.up_proj(x, i), experts.gate_proj(x, i))
        mx.eval(experts.down_proj(h, i))

    def by_expert(x, i):
        x, s, inverse = _gather_sort(mx.expand_dims(x, (-2, -3)), i)
        up, gate = (p(x, s, sorted_indices=True) for p in (experts.up_proj, experts.gate_proj))
        y = experts.down_proj(experts.activation(up, gate), s, sorted_indices=True)
        mx.eval(_scatter_unsort(y, inverse, i.shape))

    for T in tokens:
        x = mx.random.normal((1, T, D)).astype(dtype)
        chosen = [rng.choice(E, K, replace=False) for _ in range(T)]
        i = mx.array(np.stack(chosen)[None].astype(np.uint32))
        mx.eval(x, i)
        for order, call in {"as they come": as_they_come, "sorted": by_expert}.items():
            timed = records.timed(partial(call, x, i), positions=T, order=order)
            variants[f"{order}, {T}"] = timed
    settings = {"D": D, "F": F, "K": K, "E": E, "dtype": str(dtype)}
    return records.interleave("tokens at once", variants, runs, settings, 2, progress=False)


def dial(
    path: str | Path, tokens: int, prompt: str = PROMPTS[0]
) -> Callable[[int, int, int, str], charts.go.Figure]:
    """Make the function behind notebook 02's controls, which decodes, resident and streamed."""
    full = footprint(path, StreamConfig()).top_k

    def look(top_k: int, slots: int, readers: int, cache: str):
        config = StreamConfig(slots=slots, readers=readers)
        config = config if top_k == full else replace(config, top_k=top_k)
        cold = {"cold": "prompt"} if cache == "cold" else {}
        ways = {
            "resident": StreamConfig(mode="resident"),
            "streamed": bench.Variant(config, **cold),
        }
        made = bench.measure(path, ways, None, tokens, 1, 8, (prompt,), progress=False)
        (streamed,) = made[made.variant == "streamed"].itertuples()
        is_same = records.same_tokens(made, "resident")["streamed"][0]
        same = f"the text is {'' if is_same else 'not '}the resident model's"
        lossy = "" if top_k == full else f" (top-{top_k} in place of {full} is lossy)"
        ratio = records.paired(made, "resident", "streamed").median()
        return charts.parts(
            made,
            PARTS,
            title=f"Top-{top_k}, {slots} slots, {readers} readers, {cache}: "
            f"{streamed.tok_s:.1f} tok/s, {ratio:.2f} of resident",
            axis="ms a token",
            finding=f"{streamed.hit_rate:.0%} of the experts were in a slot, "
            f"{streamed.read_nbytes_per_token / 1e6:.2f} MB read for a token; {same}{lossy}.",
        )

    return look


def main(out: str, what: str, where: str) -> None:
    """Measure ``prompts`` of a model, or ``tokens-at-once`` of a shape, and save the record."""
    if what == "prompts":
        samples = prompt_speeds(where)
    elif what == "tokens-at-once" and where in SHAPES:
        samples = tokens_at_once(**SHAPES[where])
    else:
        raise ValueError(
            f"expected prompts MODEL, or tokens-at-once and one of {', '.join(SHAPES)}, got {what} "
            f"{where}"
        )
    column = "tok_s" if what == "prompts" else "seconds"
    records.print_and_save(records.group(samples, column).to_string(), samples, out)
