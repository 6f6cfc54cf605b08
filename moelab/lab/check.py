"""``python -m moelab check``: does this machine have what moelab and its notebooks need?"""

import argparse
import os
import shutil
import statistics
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from .. import StreamConfig, kernels, plan
from ..checkpoint import Checkpoint
from ..commands.argument_types import not_empty
from ..memory import memory_available, memory_limit, swapped_s
from ..shipped import shipped
from ..streaming.build import build_model
from ..streaming.facts import ModelFacts
from ..streaming.model import find, tokenizer_of
from ..streaming.plan import DoesNotFit
from ..system import HERE
from . import records
from .decode import read_all_but_last
from .machine import READ_NBYTES, card, card_line, drop_pages, read_speed
from .models import repack_hint, settings_of
from .variants import Opened, Variant, resident_like

MIN_MEMORY_NBYTES = 3 << 30  # enough for tiny-moe, JupyterLab and a browser
MIN_DISK_NBYTES = 2 << 30  # enough for notebook 02's synthesized checkpoint
MIN_COLD_BYTES_PER_S = 0.2e9  # a network or a spinning disk is slower
MORE_RUNS = 4  # repeats of a cold read that was too slow
# ``--json``: tokens of the prompt, number of texts, seconds after which no further text begins.
PROMPT, TEXTS, MOST_S = 400, 10, 60
START, TOKENS, WARMUP = 8, 24, 8  # tokens of each text: given, timed, decoded as warm-up
FORM = "https://github.com/OWNER/moelab/issues/new?template=machine.yml"


def dispatch_cost() -> tuple[float, float]:
    """Return a small operation's seconds: in a chain evaluated once, and evaluated by itself."""

    def timed(each):
        x, started = mx.zeros((1, 8)), time.perf_counter()
        for _ in range(200):
            x = x + 1
            if each:
                mx.eval(x)
        mx.eval(x)
        return (time.perf_counter() - started) / 200

    timed(True)  # warm-up
    return tuple(statistics.median(timed(each) for _ in range(5)) for each in (False, True))


def findings(
    model: str | Path | None = None, settings: dict | None = None, rows: list | None = None
) -> Iterator[tuple[bool, str, str]]:
    """Yield (is well, finding, remedy) for each check; fill ``settings`` and ``rows`` if given."""
    c, settings = card(), settings if settings is not None else {}
    yield True, f"Python {c['python']} on {card_line(c)}", ""
    if c["device"] == "cpu":
        yield True, f"kernels: {kernels.describe()}", ""

    free, limit = memory_available(), memory_limit()
    of = f"{HERE.memory()[0] / 2**30:.1f} GiB"
    of += f", cgroup limit {limit / 2**30:.1f} GiB" if limit else ""
    yield (
        # macOS compresses other programs' memory: at a memory pressure of 1 there is enough.
        free >= MIN_MEMORY_NBYTES or HERE.pressure() == 1,
        f"memory: {free / 2**30:.1f} GiB available of {of}",
        f"{MIN_MEMORY_NBYTES >> 30} GiB are needed: close other programs or raise the limit",
    )
    try:
        folder, lacks = Path(model or shipped("models", "tiny-moe")), None
    except FileNotFoundError as error:  # an installed moelab has no data
        folder, lacks = Path.cwd(), str(error).partition(". ")[0]
    disk = shutil.disk_usage(folder).free
    yield (
        disk >= MIN_DISK_NBYTES,
        f"disk: {disk / 2**30:.1f} GiB free where {folder.name}/ lies",
        f"{MIN_DISK_NBYTES >> 30} GiB are needed for synthesized checkpoints: make room",
    )
    yield _ssd(folder, lacks, settings)

    chained, evaluated = settings["dispatch_s"] = dispatch_cost()
    yield (
        evaluated < 1e-3 or c["device"] == "gpu",  # a GPU that was idle may take longer
        f"dispatch: one small operation {chained * 1e6:.0f} us in a chain, "
        f"{evaluated * 1e6:.0f} us evaluated by itself, with a {_load()}",
        "over 1 ms: the machine is busy, so timings will mean little; stop other work",
    )
    if model:
        yield from _slots_of(Path(model), settings, rows)


def _load():
    return f"load of {os.getloadavg()[0]:.1f} on this machine's {card()['cores']} cores"


def _ssd(folder, lacks, settings):
    """Measure how fast the SSD reads the largest model file, if this file is large enough."""
    files = [f for f in folder.glob("*.safetensors") if f.is_file()]  # no dead link, no FIFO
    path = max(files, key=lambda f: f.stat().st_size, default=None)
    if path is None or path.stat().st_size < 8 * READ_NBYTES:
        what = lacks or f"{folder.name}/ has no model file of 8 MB or more"
        return not lacks, f"SSD: not measured, {what}", "name a model: python -m moelab check MODEL"
    how = drop_pages(path)
    cold, cold_4, warm, warm_4 = (
        read_speed(path, cold, n) / 1e9 for cold in (True, False) for n in (1, 4)
    )
    for _ in range(MORE_RUNS):  # other work only slows a run, so the fastest run counts
        if cold_4 * 1e9 < MIN_COLD_BYTES_PER_S:
            cold_4 = max(cold_4, read_speed(path, True, 4) / 1e9)
    settings["read_gb_per_s"] = {"cold": (cold, cold_4), "warm": (warm, warm_4), "dropped": how}
    return (
        cold_4 * 1e9 >= MIN_COLD_BYTES_PER_S,
        f"SSD: random 1 MiB reads of {path.name}, GB/s with 1 and 4 at a time: "
        f"cold {cold:.2f}, {cold_4:.2f} ({how}); warm {warm:.2f}, {warm_4:.2f}",
        f"under {MIN_COLD_BYTES_PER_S / 1e9:.1f} GB/s cold in each of {1 + MORE_RUNS} runs, with a "
        f"{_load()}: if other programs are busy, check again later; else put the model on an SSD, "
        "not on a network drive or a hard disk",
    )


def _slots_of(model, settings, rows):
    """Yield a model's findings: its plan, its blocks, a hint and, with ``rows``, texts."""
    tokenizer_of(model)
    try:
        p = plan(model, StreamConfig(lazy_logits=True))
    except DoesNotFit as error:  # the error's last sentence says what to do
        what, _, remedy = str(error).rstrip(".").rpartition(". ")
        yield False, what, remedy
        return
    settings |= {"slots": p.slots, **settings_of(p)}
    if p.config.kernels == "fast":
        built = build_model(Checkpoint(model), p.config)[0]
        kernels.use(built, half_scales=True)
        blocks = kernels.blocks_of(built).items()
        found = ", ".join(f"{n} {name}" for name, n in blocks) or "none that is known"
        yield True, f"{model.name}: blocks computed as a whole: {found}; others: by module", ""
    sizes = p.facts.checkpoint_nbytes, p.top_k * p.facts.slot_nbytes
    disk, token = (f"{nbytes / 1e6:,.0f} MB" for nbytes in sizes)
    yield True, f"{model.name}, {disk} on disk, needs {token} of experts for a token: {p}", ""
    if hint := repack_hint(model, p):
        yield True, f"{model.name}: {hint}", ""
    if rows is not None:
        yield _compared(model, p, rows)


def _compared(model, p, rows):
    """Compare streamed texts to resident ones, or to ``stacked`` ones if not all experts fit."""
    few = max(p.top_k, p.slots // 2)
    ways = p.config, replace(p.config, mode="stacked", slots=few)
    if p.slots == p.num_experts:  # every expert fits: stream the model with fewer slots
        ways = replace(p.config, slots=few), resident_like(p.config)
    bar = tqdm(total=2 * (1 + TEXTS), desc="decoding", unit=" texts", leave=False, disable=None)
    both = [list(_decoded(model, config, bar)) for config in ways]
    rows += [*both[0], *both[1]]
    said = (
        f"{prompt['variant']} {TOKENS * len(texts) / sum(row['decode_s'] for row in texts):.3g} "
        f"tok/s, a first token after {prompt['prefill_s']:.2g} s"
        for prompt, *texts in both
    )
    (ours, theirs), *texts = zip(*both)
    same = [a["tokens"] == b["tokens"] for a, b in texts]
    bits = [a == b for a, b in zip(ours["bits"], theirs["bits"])]
    return (
        all(same),
        f"{model.name}: {'; '.join(said)}; {sum(same)} of {len(same)} texts are the same; "
        f"{sum(bits)} of a prompt's {len(bits)} states and logits are the same bit for bit",
        "greedy texts must be the same: send the file",
    )


def _decoded(path, config, bar):
    """Drop the files' pages, read a prompt and yield its row; then yield a row for each text."""
    name = config.mode + (f"/slots={config.slots}" if config.mode != "resident" else "")
    begin, opened = time.monotonic(), Opened(path, Variant(config))
    with opened.model as model:
        ids = opened.tokenizer.encode(Path(records.__file__).read_text())  # always installed
        prompt, cache = mx.array([ids[:PROMPT]]), make_prompt_cache(model)
        drop_pages(path)
        started = time.perf_counter()
        read_all_but_last(model, prompt, cache)
        made = model(prompt[:, -1:], cache=cache), [c.state for c in cache]
        arrays = [a for _, a in tree_flatten(made) if isinstance(a, mx.array)]
        mx.eval(arrays)
        row = {"prompt_tokens": PROMPT, "prefill_s": time.perf_counter() - started}
        row["bits"] = [zlib.crc32(np.asarray(a.reshape(-1).view(mx.uint8))) for a in arrays]
        yield {"variant": name} | row
        for i in range(TEXTS):
            bar.update()
            if i and time.monotonic() - begin > MOST_S:
                break
            start = ids[i * len(ids) // TEXTS :][:START]
            row = opened.sample(start, TOKENS, WARMUP, feed=None, temp=0, seed=0)
            row |= {"pressure": HERE.pressure(), "swapped_s": swapped_s()}
            yield {"variant": name, "text": i} | row


def check(model: str | Path | None = None, file: str | Path | None = None) -> bool:
    """Print each finding, write all to ``file`` as a record, and return whether all is well."""
    if model is not None:  # refuse at once a draft model or a model without experts
        model = find(model, download=False)
        ModelFacts.of(model, StreamConfig())
    rows, found, settings = [], [], {"model": model and model.name}
    running = records.Running("check", settings)
    for ok, what, remedy in findings(model, settings, rows if file else None):
        print(f"[{'ok' if ok else 'fail'}] {what}" + ("" if ok else f" -> {remedy}"), flush=True)
        found.append({"ok": ok, "what": what} | ({} if ok else {"remedy": remedy}))
    if file is not None:
        records.write(file, running.record(rows, findings=found))
        print(f"Send {file}: {FORM} (OWNER: as in the address of moelab's page)")
    return all(one["ok"] for one in found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a line for each thing that moelab needs: [ok], or [fail] and the remedy. Exit "
        "status 1: something failed."
    )
    what = "a model folder: check its plan and how fast its files are read, too"
    parser.add_argument("model", type=not_empty, metavar="[MODEL]", nargs="?", help=what)
    kept = "also decode for some minutes; write all findings to FILE, which you can send"
    parser.add_argument("--json", type=not_empty, metavar="FILE", help=kept)


def run(args: argparse.Namespace) -> int:
    return 0 if check(args.model, args.json) else 1
