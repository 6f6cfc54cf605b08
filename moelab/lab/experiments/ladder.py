"""Notebook 02: from one read at a time to slots, one rung at a time.

The ladder and what follows from it, the number of slots, prompts, and two kernels. Agreement with
the resident model, memory and cold reads are measured by modules of their own.
"""

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ... import DATA, StreamConfig, load, record, stats, synthesize
from .. import records
from ..decode import Decoded, decode
from ..texts import PROMPTS
from . import bench
from .dispatch import BITS, GROUP, Timed, default_dtype

if TYPE_CHECKING:
    from pandas import DataFrame

# Each rung adds one thing to the one before. The speculative reads of PR 26 belong to notebook 04.
RUNGS = {
    "serial": "serial",  # read an expert, compute it, then the next
    "buffers/readers=1": "batched",  # persistent buffers; all of a layer's reads come first
    "buffers": "parallel",  # several reads in flight at once
    "stacked": "slots",  # S experts stay, in one array a projection; one gather for each
    "fused": "gate+up",  # gate and up in one array, one gather fewer
}
LADDER = ",".join(RUNGS)
TOP = RUNGS["fused"]
SHORT_PROMPTS = ("def", "class", "import os", "for x in")  # another one each round: other experts
WAITING, REST = "waiting for reads", "the rest"
WARMUP = 2  # tokens before the clock, in layers whose slots fill at once
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

    Args:
        tokenizer (str or Path): Folder to take a tokenizer from.
        layers (int): Layers.
        experts (int): Experts in each; the real number takes 1.8 MB for each one.
        like (str): The real model.

    Returns:
        TemporaryDirectory: With the checkpoint's ``path``; ``cleanup()`` removes it.
    """
    build = DATA.parent / "build"
    build.mkdir(exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix="layers-", dir=build)
    config = copy.deepcopy(synthesize.CONFIGS[like])
    config.get("text_config", config)["num_experts"] = experts
    folder.path = synthesize.synthesize(
        Path(folder.name) / like, like, layers, tokenizer=tokenizer, config=config, progress=False
    )
    return folder


# Measurements


@dataclass(frozen=True)
class Recorded:
    """The sections of a recorded CUDA run that notebook 02 shows.

    Attributes:
        machine (dict): Its card.
        warm (DataFrame): The ladder with the file in the page cache.
        cold (DataFrame): The same with its pages dropped.
        slots (DataFrame): The speed with several numbers of slots.
        all_in_slots (DataFrame): Of ``layer.bench_layer``.
        together (Timed): ``tokens_at_once`` with the shape of 35B-A3B.
        reads (tuple): Reads in flight, and rows of GB/s: experts, cold.
        agreement (dict[str, dict]): ``exactness.agreement`` in float32 and the checkpoint's dtype.
        writes (Timed): ``slot_writes`` of 35B-A3B.
        memory (dict): Of ``memory.measure``: one long run.
    """

    machine: dict[str, Any]
    warm: "DataFrame"
    cold: "DataFrame"
    slots: "DataFrame"
    all_in_slots: "DataFrame"
    together: Timed
    reads: tuple[list[int], list[list[float]]]
    agreement: dict
    writes: Timed
    memory: dict[str, Any]

    @property
    def name(self) -> str:
        """What charts call it."""
        return f"{self.machine['gpu']}, recorded"


def recorded(name: str = "cuda_h200_engine") -> Recorded:
    """Parses a record of ``data/recipes/cuda_run.py``."""
    file = records.recorded(name)
    sections = file["sections"]
    return Recorded(
        machine=file["machine"],
        warm=records.read(name, "sections", "ladder_warm"),
        cold=records.read(name, "sections", "ladder_cold"),
        slots=records.read(name, "sections", "slots"),
        all_in_slots=records.read(name, "sections", "all_in_slots"),
        together=Timed.parse(sections["tokens_at_once"]),
        reads=records.reads_GBs(records.read(name, "sections", "reads", "cold"))["moelab"],
        agreement={d: sections["agreement"][d]["modes"] for d in ("float32", "auto")},
        writes=Timed.parse(sections["slot_writes"]["qwen3.5-35b-a3b"]),
        memory=sections["memory"],
    )


HOST_PARTS = (  # of a token, in cuda_run's section ``copies``
    "waiting for the routing",
    "waiting for reads",
    "beginning reads",
    "scheduling",
    "the rest",
)


@dataclass(frozen=True)
class Copies:
    """How experts' bytes get to a recorded GPU, for one layout of the file.

    Attributes:
        tokens (int): Timed in each run.
        decode_s (dict[str, list[float]]): Seconds of these tokens, by way.
        host_s (dict[str, dict[str, float]]): What the host does in a token, in seconds, by way.
    """

    tokens: int
    decode_s: dict[str, list[float]]
    host_s: dict[str, dict[str, float]]

    @property
    def gain(self) -> np.ndarray:
        """Of each run: copied by the GPU over written into unified memory."""
        return np.divide(self.decode_s["unified memory"], self.decode_s["copies"])


@dataclass(frozen=True)
class Held:
    """Decoding with every expert in the memory of a recorded GPU's host, for one layout.

    Attributes:
        tokens (int): Timed in each run.
        decode_s (dict[str, list[float]]): Seconds of these tokens, by way.
        copied_nbytes (dict[str, float]): Bytes copied to the GPU for a token, by way.
    """

    tokens: int
    decode_s: dict[str, list[float]]
    copied_nbytes: dict[str, float]


def recorded_copies(name: str = "cuda_h200_engine") -> tuple[dict, dict[str, Copies]]:
    """The machine and, by layout, the section ``copies`` of ``data/recipes/cuda_run.py``."""
    file = records.recorded(name)
    found = {}
    for layout in ("repacked", "as shipped"):
        made = file["sections"]["copies"][layout]
        host_s = {
            way: {part: parts[part] / 1e3 for part in HOST_PARTS if part in parts}
            for way, parts in made["host_ms_of_a_token"].items()
        }
        found[layout] = Copies(made["tokens"], made["decode_s"], host_s)
    return file["machine"], found


def recorded_host(name: str = "cuda_h200_host") -> tuple[dict, dict[str, Held]]:
    """The section ``host`` of the GPU's recipe: the machine, and the runs of each layout."""
    file, expert_nbytes = records.recorded(name), EXPERT_NBYTES_35B
    found = {}
    for layout in ("repacked", "as shipped"):
        made = file["sections"]["host"][layout]
        ways = made["decoded"]
        copied = {w: v["misses"] * expert_nbytes / made["tokens"] for w, v in ways.items()}
        seconds = {w: v["decode_s"] for w, v in ways.items()}
        found[layout] = Held(made["tokens"], seconds, copied)
    return file["machine"], found


def measure(path: str | Path, slots: int, tokens: int, runs: int) -> "DataFrame":
    """Decodes the same tokens on every rung, and resident.

    Args:
        path (str or Path): A model folder.
        slots (int): S.
        tokens (int): Timed in each run.
        runs (int): Rounds, each with another prompt.
    """
    base, modes = StreamConfig(slots=slots), f"resident,{LADDER}"
    return bench.measure(
        path, modes, base, tokens, runs, warmup=WARMUP, prompts=SHORT_PROMPTS, progress=False
    )


def sweep(
    path: str | Path, slots: Sequence[int], tokens: int, runs: int, warmup: int = 16
) -> "DataFrame":
    """Decodes with several numbers of slots, and resident.

    Args:
        path (str or Path): A model folder.
        slots (Sequence[int]): The numbers of slots.
        tokens (int): Timed in each run.
        runs (int): Rounds.
        warmup (int): Tokens before the clock starts.
    """
    configs = {"resident": StreamConfig(mode="resident")}
    configs |= {f"{n} slots": StreamConfig(slots=n) for n in slots}
    return bench.measure(path, configs, tokens=tokens, runs=runs, warmup=warmup, progress=False)


@dataclass(frozen=True)
class PromptReads:
    """What one prompt's pass read.

    Attributes:
        tokens (int): T.
        uses (int): Times that an expert was needed.
        distinct (int): Different experts needed, over all layers.
        read (int): Experts read.
    """

    tokens: int
    uses: int
    distinct: int
    read: int


def prompt_reads(path: str | Path, slots: int = 16, tokens: int = 64) -> PromptReads:
    """Passes a prompt that needs more experts than there are slots, and counts its reads.

    Args:
        path (str or Path): A model folder.
        slots (int): S.
        tokens (int): The most tokens of the prompt.
    """
    model, tokenizer = load(path, StreamConfig(slots=slots))
    prompt = tokenizer.encode(" ".join(PROMPTS))[:tokens]
    with model:
        with record(model) as trace:
            mx.eval(model(mx.array([prompt])))
        read = stats(model).prefill.misses
    layers = np.moveaxis(trace.experts, 1, 0)
    distinct = sum(len(np.unique(layer)) for layer in layers)
    return PromptReads(len(prompt), trace.experts.size, distinct, read)


@dataclass(frozen=True)
class Variation:
    """Speeds of one mode, prompt by prompt.

    Attributes:
        tok_s (dict[int, list[float]]): Tokens per second of each run, by prompt.
        hit_rate (dict[int, float]): The mean of the runs, by prompt.
    """

    tok_s: dict[int, list[float]]
    hit_rate: dict[int, float]

    @property
    def between(self) -> float:
        """The fastest prompt's median over the slowest one's, less one."""
        medians = [np.median(v) for v in self.tok_s.values()]
        return float(max(medians) / min(medians) - 1)

    @property
    def within(self) -> float:
        """The fastest run over the slowest of the same prompt, less one: median over prompts."""
        return float(np.median([max(v) / min(v) - 1 for v in self.tok_s.values()]))


def variation(measured: "DataFrame", mode: str = "fused") -> Variation:
    """Sorts a bench's runs by prompt."""
    rows = measured[measured.variant == mode]
    by_prompt = rows.groupby(rows["round"] % len(measured.attrs["settings"]["prompts"]))
    return Variation(by_prompt.tok_s.apply(list).to_dict(), by_prompt.hit_rate.mean().to_dict())


def measure_prompts(path: str | Path, tokens: int, runs: int, slots: int = 16) -> Variation:
    """Decodes the built-in prompts one after the other, streamed.

    Args:
        path (str or Path): A model folder.
        tokens (int): Timed in each run.
        runs (int): Rounds; each takes the next prompt.
        slots (int): S.
    """
    base = StreamConfig(slots=slots)
    return variation(bench.measure(path, "fused", base, tokens, runs, warmup=8, progress=False))


def decode_once(
    path: str | Path,
    config: StreamConfig,
    prompt: str,
    tokens: int,
    warmup: int,
    before_clock: Callable[[], Any] | None = None,
) -> Decoded:
    """Loads a model, decodes behind a prompt and closes it again.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig): How to stream.
        prompt (str): The text to continue.
        tokens (int): How many tokens to time.
        warmup (int): Tokens decoded before the clock starts.
        before_clock (Callable): Called just before it starts, to drop the page cache.
    """
    model, tokenizer = load(path, config)
    with model:
        return decode(model, tokenizer.encode(prompt), tokens, warmup, before_clock)


# Kernels: several tokens in a call, new experts into slots


def tokens_at_once(
    D: int,
    F: int,
    K: int,
    E: int = 64,
    tokens: Sequence[int] = (1, 2, 4, 8, 32),
    rounds: int = 10,
    dtype: mx.Dtype | None = None,
    seed: int = 0,
) -> Timed:
    """Seconds of one layer's experts for T tokens: indices as they come, and sorted by expert.

    mlx-lm sorts from 64 indices on.

    Args:
        D, F, K, E (int): Hidden size, expert hidden size, experts per token, experts.
        tokens (Sequence[int]): The numbers of tokens T.
        rounds (int): Samples of each variant.
        dtype (mx.Dtype): Of activations. Default: ``default_dtype()``.
        seed (int): Of weights and routing.
    """
    from mlx_lm.models.switch_layers import SwitchGLU, _gather_sort, _scatter_unsort

    mx.random.seed(seed)
    dtype = dtype or default_dtype()
    experts = SwitchGLU(D, F, E)
    nn.quantize(experts, GROUP, BITS)
    experts.set_dtype(dtype)
    mx.eval(experts.parameters())
    rng = np.random.default_rng(seed)
    variants = {}
    for T in tokens:
        x = mx.random.normal((1, T, D)).astype(dtype)
        i = mx.array(
            np.stack([rng.choice(E, K, replace=False) for _ in range(T)])[None].astype(np.uint32)
        )
        mx.eval(x, i)

        def as_they_come(x=x, i=i):
            x = mx.expand_dims(x, (-2, -3))
            y = experts.down_proj(
                experts.activation(experts.up_proj(x, i), experts.gate_proj(x, i)), i
            )
            mx.eval(y)

        def by_expert(x=x, i=i):
            x, s, inverse = _gather_sort(mx.expand_dims(x, (-2, -3)), i)
            h = experts.activation(
                experts.up_proj(x, s, sorted_indices=True),
                experts.gate_proj(x, s, sorted_indices=True),
            )
            mx.eval(_scatter_unsort(experts.down_proj(h, s, sorted_indices=True), inverse, i.shape))

        variants[f"{T} as they come"], variants[f"{T} sorted"] = as_they_come, by_expert
    config = {"D": D, "F": F, "K": K, "E": E, "dtype": str(dtype)}
    return Timed.measure(variants, rounds, 2, config)


def slot_writes(
    D: int,
    F: int,
    K: int = 8,
    S: int = 64,
    misses: Sequence[int] = (0, 1, 4, 8),
    rounds: int = 10,
    seed: int = 0,
    dtype: mx.Dtype | None = None,
) -> Timed:
    """Seconds to bring new experts' gate and up from host memory into S slots, and one gather.

    ``in place`` writes through the bank's own memory, as the engine does. ``set by slice`` lets MLX
    do it, one expert at a time. ``one scatter`` uploads the new experts together. ``upload`` brings
    them to the device but not into the bank.

    Args:
        D, F, K, S (int): Hidden size, expert hidden size, experts per token, slots.
        misses (Sequence[int]): The numbers of new experts in a call.
        rounds (int): Samples of each variant.
        seed (int): Of the experts and of the slots.
        dtype (mx.Dtype): Of activations. Default: ``default_dtype()``.
    """
    mx.random.seed(seed)
    dtype = dtype or default_dtype()
    shape = (S, 2 * F, D // 8)
    host = np.random.default_rng(seed).integers(0, 2**32, (max(misses), *shape[1:]), np.uint32)
    scales = mx.full((S, 2 * F, D // GROUP), 1e-3, dtype)
    biases = mx.full((S, 2 * F, D // GROUP), -8e-3, dtype)
    x = mx.random.normal((1, 1, 1, 1, D)).astype(dtype)
    bank = [mx.random.randint(0, 2**31 - 1, shape).astype(mx.uint32)]
    aside = mx.zeros(shape, mx.uint32)  # its own: on CUDA a host write makes memory managed
    mx.eval(scales, biases, x, bank, aside)
    rows = np.asarray(aside)
    rng = np.random.default_rng(seed)
    quantized = {"transpose": True, "group_size": GROUP, "bits": BITS}

    def use(weights, slots):
        i = mx.array(slots.astype(np.uint32)[None, None])
        mx.eval(mx.gather_qmm(x, weights, scales, biases, rhs_indices=i, **quantized))

    def pick():
        return rng.choice(S, K, replace=False)

    def in_place(m):
        slots = pick()
        for j in range(m):
            np.copyto(rows[slots[j]], host[j])
        use(aside, slots)

    def by_slice(m):
        slots = pick()
        for j in range(m):
            bank[0][int(slots[j])] = mx.array(host[j])
        use(bank[0], slots)

    def scatter(m):
        slots = pick()
        if m:
            bank[0][mx.array(slots[:m].astype(np.uint32))] = mx.array(host[:m])
        use(bank[0], slots)

    def upload(m):
        new = mx.array(host[:m]) if m else None
        if m:
            mx.eval(new)
        use(bank[0], pick())

    writers = {
        "in place": in_place,
        "set by slice": by_slice,
        "one scatter": scatter,
        "upload": upload,
    }
    variants = {
        f"{name}, {m} new": partial(write, m) for name, write in writers.items() for m in misses
    }
    config = {"D": D, "F": F, "K": K, "S": S, "dtype": str(dtype)}
    return Timed.measure(variants, rounds, 3, {**config, "expert_nbytes": host[0].nbytes})


# What follows from a ladder


def rungs(measured: "DataFrame") -> dict[str, np.ndarray]:
    """``{rung: seconds of a token in each round}``, in the ladder's order."""
    there = set(measured.variant)
    return {
        rung: records.values(measured, mode, "token_s").to_numpy()
        for mode, rung in RUNGS.items()
        if mode in there
    }


def multiples(measured: "DataFrame") -> dict[str, float]:
    """``{rung: how many times faster than the first}``."""
    times = {rung: np.median(s) for rung, s in rungs(measured).items()}
    first = next(iter(times.values()))
    return {rung: float(first / t) for rung, t in times.items()}


def published_multiples() -> dict[str, float]:
    """``multiples`` by the speeds that PR 26 reports, then PR 90."""
    pr26, pr90 = records.PUBLISHED["PR 26"], records.PUBLISHED["PR 90"]
    rewrite = pr26["buffers, top-8"] / pr26["serial, top-8"]
    steps = {"slots": pr90["stacked"] / pr90["buffers"], TOP: pr90["fused"] / pr90["buffers"]}
    return {"serial": 1.0, "parallel": rewrite} | {n: rewrite * s for n, s in steps.items()}


def parts(measured: "DataFrame") -> dict[str, dict[str, float]]:
    """``{rung: {"waiting for reads": s, "the rest": s}}`` of an average token, resident first."""
    out, names = {}, {"resident": "resident", **RUNGS}
    spent = measured.assign(wait_s=measured.wait_s / measured.decode_tokens)
    spent = spent.groupby("variant")[["wait_s", "token_s"]].median()
    for mode, rung in names.items():
        if mode in spent.index:
            wait, total = spent.loc[mode]
            out[rung] = {WAITING: wait, REST: total - wait}
    return out


def waiting_share(measured: "DataFrame") -> float:
    """Share of a token on the top rung that is spent waiting for reads."""
    top = parts(measured)[TOP]
    return top[WAITING] / sum(top.values())


def one_reader_share(series: tuple[list[int], list[list[float]]]) -> float:
    """The rate with one read in flight over the best rate, of ``(depths, rows)``."""
    medians = [np.median(row) for row in series[1]]
    return float(medians[0] / max(medians))


def growth_nbytes(memory: dict[str, Any]) -> int:
    """How much MLX's memory grew after the first count of ``memory.measure``."""
    return memory["active_nbytes"][-1] - memory["active_nbytes"][1]
