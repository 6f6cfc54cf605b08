"""Measure what tokens, reads and arithmetic cost on this machine, with the engine's own calls.

python -m moelab.lab costs OUT.json MODEL
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ... import StreamConfig, footprint
from ...memory import memory_available
from ...replay.costs import Costs
from ...streaming.model import load_model
from ...streaming.reading import native
from ...streaming.residency.bank import can_empty
from ...streaming.session import session_of
from .. import machine, records
from ..decode import decode, route_by
from ..models import folder, planned, settings_of

if TYPE_CHECKING:
    from pandas import DataFrame

DISCARDED = 2  # how many first tokens or calls of a series do not count: they are slower
ROUNDS = 2  # rounds of every kind of sample
SAMPLES = 24  # samples of each kind in a record
PROMPT = 128  # tokens of a prompt that is computed at once
# Variants of a record: where a layer's misses come from. OWN: the model's router chooses experts.
PAGES, DISK, DIRECT, OWN = "page cache", "disk", "past the page cache", "own routing"
# Tokens without reads are measured only if the experts take fewer bytes than ``HELD_NBYTES``.
HELD, HELD_NBYTES = "all in slots", 4e9


def measure_costs(path: str | Path, tokens: int = 12, tell: Callable | None = None) -> Costs:
    """Measure costs for a replay, without pandas; ``tell`` reports disturbances (None: stderr)."""
    record = samples_of(path, tokens=tokens)
    if told := records.busy(record["load"]):
        said = f"{told}, so this machine looks slower than it is. Close other programs, try again."
        tell(said) if tell else print(f"moelab: {said}", file=sys.stderr)
    return costs_of(record)


def samples_of(path: str | Path, config: StreamConfig | None = None, tokens: int = 12) -> dict:
    """Time reads, tokens and one expert's arithmetic, and return the record.

    Tokens with as many misses as possible are timed, and also their reads alone and their
    arithmetic alone. The sum of both, less the whole token's time, is what overlap hides. A
    terminal shows a progress bar.
    """
    config = config or StreamConfig()
    size = footprint(path, StreamConfig(mode="resident", top_k=config.top_k))
    L, E, K = size.num_layers, size.num_experts, size.top_k
    if E == K:
        raise ValueError(
            "measure_costs: expected more experts than a token needs, else each is read only once; "
            f"got {E} and {K}."
        )
    settings = {"model": Path(path).name, **settings_of(planned(path)), "K": K, "samples": tokens}
    running, rng = records.Running("costs", settings), np.random.default_rng(0)
    most, rows, models = min(K, E - K), [], {}  # the most misses that a token can have in a layer

    def made(misses, num):
        return rows_with_misses(misses, num, L, E, K, rng)

    def add(what, variant, misses, seconds):
        same = {"what": what, "variant": variant, "misses": misses}
        rows.extend(same | {"seconds": float(s)} for s in seconds)
        bar.update(len(seconds))

    config = replace(config, slots=K, prefetch="none")
    bar = tqdm(desc="measuring this machine (10-40 s)", unit=" samples", leave=False, disable=None)
    with ExitStack() as stack:
        past = can_empty() and native.direct_loop() is not None  # on a CPU under Linux
        for variant in (DISK, DIRECT) if past else (DISK,):
            reads = "direct" if variant == DIRECT else "cached"
            model, _ = load_model(path, replace(config, reads=reads))
            models[variant] = stack.enter_context(model)
        for variant, misses, seconds in _time_reads(models, path, most, made, tokens, rng):
            add("reads", variant, misses, [seconds])
        model, num = models[DISK], tokens // 2 + DISCARDED
        for _ in range(ROUNDS):
            add("token", "slots", 0, _time_tokens(model, np.repeat(made(1, 2)[:1], num, axis=0)))
            add("token", OWN, 0, _repeat_token(model, num))
            for variant, of in models.items():
                need = made(most, num)
                machine.drop_pages(path)
                add("token", variant, most, _time_tokens(of, need))
        add("expert", "slots", 0, _expert_s(model, made(1, 2)[0, 0], tokens))
    if L * E * size.expert_nbytes < min(HELD_NBYTES, memory_available() / 2):
        for what, seconds in _time_without_reads(path, config, tokens, E):
            add(what, HELD, 0, [seconds])
    bar.close()
    return running.record(rows)


def costs_of(samples: "DataFrame | dict") -> Costs:
    """Compute costs from ``samples_of``: medians, and a line through each source's reads."""
    record = samples if isinstance(samples, dict) else records.as_json(samples)
    given, seconds = record["settings"], {}
    L, K, nbytes = given["L"], given["K"], given["expert_nbytes"]
    for row in record["rows"]:
        key = row["what"], row["variant"], row["misses"]
        seconds.setdefault(key, []).append(row["seconds"])
    medians = {key: np.median(found) for key, found in seconds.items()}

    def by_misses(what, variant):
        """Return the sorted numbers of misses, and the median seconds for each number."""
        found = sorted((key[2], s) for key, s in medians.items() if key[:2] == (what, variant))
        return np.array(found, float).reshape(-1, 2).T

    expert_s = max(0.0, float(medians["expert", "slots", 0]))
    hit_s, experts_s = medians["token", "slots", 0], K * expert_s

    def line(variant):
        """Fit non-negative seconds per byte and per call by least squares of relative errors."""
        misses, reads = by_misses("reads", variant)
        sizes = misses * nbytes
        if len(sizes) > 1:
            slope, call_s = np.polyfit(sizes, reads, 1, w=1 / reads)
            if slope >= 0 and call_s >= 0:
                return float(slope), float(call_s)
        return float((sizes * reads).sum() / (sizes * sizes).sum()), 0.0

    def beside(variant):
        """Return the seconds per byte, the seconds per call, and the overlap of reads and
        arithmetic: the hidden share (0 to 1) of the shorter one. A token can take longer than its
        reads plus its arithmetic; the seconds per byte then include this excess."""
        byte_s, call_s = line(variant)
        (misses, reads), miss_s = by_misses("reads", variant), by_misses("token", variant)[1, 0]
        hidden_s = reads[-1] - (miss_s - hit_s) / L
        byte_s += max(0.0, -float(hidden_s)) / float(misses[-1] * nbytes)
        shorter_s = min(reads[-1], experts_s)
        return byte_s, call_s, float(np.clip(hidden_s / shorter_s, 0, 1)) if experts_s else 0.0

    fixed_s, known = float(max(0.0, medians["token", OWN, 0] - L * experts_s)), {}
    if by_misses("reads", DIRECT).size:
        names = "direct_s_per_byte", "direct_call_s", "direct_overlap"
        known = dict(zip(names, beside(DIRECT)))
    if ("token", HELD, 0) in medians:
        held_s = medians["token", HELD, 0]
        known["held_fixed_s"] = min(fixed_s, float(max(0.0, held_s - L * experts_s)))
        known["prompt_token_s"] = float(medians["prompt", HELD, 0]) / PROMPT
    known |= dict(zip(("warm_s_per_byte", "warm_call_s"), line(PAGES)))
    known |= dict(zip(("cold_s_per_byte", "cold_call_s", "overlap"), beside(DISK)))
    return Costs(fixed_s=fixed_s, expert_s=expert_s, **known)


def rows_with_misses(misses, num, L, E, K, rng):
    """Choose experts for up to ``num`` tokens, each with ``misses`` misses in a layer's K slots."""
    num = min(num, max(2, (E - K) // misses + 1))
    order = rng.permuted(np.tile(np.arange(E), (L, 1)), axis=1)
    # A window of K experts moves by ``misses``: the slots hold exactly the last token's experts.
    places = (np.arange(num)[:, None] * misses + np.arange(K)) % E
    return order[:, places].transpose(1, 0, 2)


def _time_reads(models, path, most, made, tokens, rng):
    """Time reads of a layer's misses; yield the source, the number of misses and the seconds."""
    layers = {variant: session_of(model).layers for variant, model in models.items()}
    # PAGES reads, from the page cache, the experts that DISK has just read from the disk.
    ways = {DISK: layers[DISK], PAGES: layers[DISK]} | layers

    def bring(layers, row):
        for layer, experts in zip(layers, row.tolist()):
            layer.read(experts)

    counts = sorted({1, -(-most // 4), -(-most // 2), most})
    for m in rng.permutation(np.repeat(counts, ROUNDS)).tolist():
        need = made(m, tokens // 2 + 1)
        machine.drop_pages(path)
        for variant, of in ways.items():
            bring(of, need[0])
            for row in need[1:]:
                begin = time.perf_counter()
                bring(of, row)
                yield variant, m, (time.perf_counter() - begin) / len(of)


def _time_tokens(model, rows):
    """Time whole tokens that need given experts ``[T, L, K]``."""
    cache, seconds = make_prompt_cache(model), []
    with route_by(model, rows[:, None]):
        for i in range(len(rows)):
            begin = time.perf_counter()
            mx.eval(model(mx.array([[i % 64]]), cache=cache))
            seconds.append(time.perf_counter() - begin)
    return seconds[min(DISCARDED, len(rows) - 1) :]


def _repeat_token(model, num):
    """Time one token ``num`` times, with its experts in slots and each pass scheduled ahead."""
    last, seconds = None, []
    for _ in range(num + 1):
        begin = time.perf_counter()
        scheduled = model(mx.array([[0]]), cache=make_prompt_cache(model))
        mx.async_eval(scheduled)
        if last is not None:
            mx.eval(last)
            seconds.append(time.perf_counter() - begin)
        last = scheduled
    mx.eval(last)
    return seconds[min(DISCARDED, num - 1) :]


def _time_without_reads(path, config, tokens, E):
    """Time tokens and a prompt with every expert in a slot; yield ``what`` and ``seconds``."""
    ids = np.arange(PROMPT + 1 + tokens + DISCARDED) % 64
    prompt, fed = ids[: PROMPT + 1].tolist(), ids[PROMPT + 1 :].tolist()
    model, _ = load_model(path, replace(config, slots=E))
    with model:
        for i in range(1 + ROUNDS):
            found = decode(model, prompt, tokens, DISCARDED, feed=fed)
            if i:  # the first run is slower than the rest
                yield "token", found.decode_s / tokens
                yield "prompt", found.prefill_s


def _expert_s(model, experts, tokens):
    """Time one expert's arithmetic: compare a layer's calls with K and with K / 2 experts."""
    session = session_of(model)
    layer, K = session.layers[0], len(experts)
    module = layer.slots.bank.experts
    D = module["fc2" if "fc2" in module else "down_proj"].weight.shape[1]  # rows of the output
    x = mx.random.normal((1, 1, D), key=mx.random.key(0)).astype(session.dtype)
    mx.eval(x)
    half = max(1, K // 2)
    seconds = {k: [] for k in (K, half)}
    for i in range(2 * tokens + DISCARDED):
        for k in seconds:
            indices = mx.array(experts[None, None, :k].astype(np.uint32))
            begin = time.perf_counter()
            mx.eval(layer(x, indices))
            if i >= DISCARDED:
                seconds[k].append(time.perf_counter() - begin)
    if half == K:
        return seconds[K]
    return np.subtract(seconds[K], seconds[half]) / (K - half)


def main(out: str, model: str) -> None:
    """Measure a model's costs and save their record."""
    records.pandas()  # fail before any work if pandas is missing
    samples = records.table(samples_of(folder(model), tokens=SAMPLES))
    costs = costs_of(samples)
    text = "\n".join(f"{name} {value:.4g}" for name, value in vars(costs).items())
    records.print_and_save(text, samples, out)
