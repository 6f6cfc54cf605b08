"""python -m moelab generate and bench: how fast a model decodes in each mode, with the noise and the ceilings."""

import dataclasses
import gc
import os
import random
import resource
import statistics
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ... import StreamConfig, close, footprint, load, stats
from .. import machine, records, timing
from ..decode import decode, encode
from ..models import folder
from ..texts import PROMPTS

INTEGERS = ("slots", "top_k", "readers", "pinned_nbytes")


def generate(model_path, prompt, config=None, max_tokens=128, out=None):
    """Print a model's continuation as it comes, then one line of figures.

    Args:
        model_path (str): As for ``moelab.load``.
        prompt (str): The text to continue, as it is.
        config (StreamConfig): Default: ``StreamConfig()``.
        max_tokens (int): Where to stop.
        out (file): Where to print. Default: standard output.
    """
    out = out or sys.stdout
    model, tokenizer = load(model_path, config or StreamConfig())
    with model:
        encode(tokenizer, prompt)
        mx.reset_peak_memory()
        out.write(prompt)
        for r in stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
            out.write(r.text)
            out.flush()
        c = stats(model).decode
        line = f"{r.generation_tps:.1f} tok/s, {r.generation_tokens} tokens; prompt {r.prompt_tps:.1f} tok/s, {r.prompt_tokens} tokens"
        if c.hits + c.misses:
            line += (
                f"; hit rate {c.hit_rate:.0%}, {c.bytes_per_token / 1e6:.2f} MB read for each token"
            )
        out.write(f"\n\n[{line}; peak memory {mx.get_peak_memory() / 1e6:.0f} MB]\n")


def parse_modes(text, base=None):
    """``"resident,fused,fused/streams=1"`` -> ``{name: StreamConfig}``; what follows a slash changes one field.

    Args:
        text (str): Modes, divided by commas.
        base (StreamConfig): Every other field. Default: ``StreamConfig()``.
    """
    base, out = base or StreamConfig(), {}
    known = sorted({f.name for f in dataclasses.fields(StreamConfig)} - {"mode"})
    for name in (part.strip() for part in text.split(",")):
        mode, *settings = name.split("/")
        if not mode:
            raise ValueError(
                f"modes: expected names divided by commas, such as resident,fused; got {text!r}"
            )
        if name in out:
            raise ValueError(f"modes: expected each mode once, {name!r} is there twice in {text!r}")
        fields = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in known or not value:
                raise ValueError(
                    f"modes: {setting!r} in {name!r}, expected FIELD=VALUE with a field of StreamConfig ({', '.join(known)})"
                )
            if key in fields:
                raise ValueError(
                    f"modes: expected each field once, {key} is there twice in {name!r}"
                )
            fields[key] = _field(key, value, f"modes: {setting!r} in {name!r}")
        config = dataclasses.replace(base, mode=mode, **fields)
        for key in config.unused().intersection(fields):
            raise ValueError(f"modes: {key} in {name!r} has no effect there: leave it out")
        if config.prefetch == "oracle":
            raise ValueError(
                f"modes: {name!r}: an oracle needs a trace (moelab.lab.experiments.prefetch); expected none, last or lookahead"
            )
        out[name] = config
    return out


def resident_like(base=None):
    """The resident baseline of a config: the same dtype and top-k."""
    base = base or StreamConfig()
    return StreamConfig(mode="resident", dtype=base.dtype, top_k=base.top_k)


def _field(key, value, where):
    """The value of a field of ``StreamConfig`` that was given as text."""
    if key not in INTEGERS and (key != "streams" or value == "auto"):
        return value
    if not value.isdecimal():
        raise ValueError(f"{where}, expected a whole number")
    return int(value)


class _Loaded:
    """The models of a bench: all in memory, or one at a time."""

    def __init__(self, path, configs, together):
        self.path, self.configs, self.together = path, configs, together
        self.models, self.nbytes = {}, {}

    def get(self, name):
        if name not in self.models:
            if not self.together:
                self.drop()
            before = mx.get_active_memory()
            model, self.tokenizer = load(self.path, self.configs[name])
            self.models[name] = model
            self.nbytes[name] = mx.get_active_memory() - before
        return self.models[name]

    def drop(self):
        for model in self.models.values():
            close(model)
        self.models.clear()
        gc.collect()
        mx.clear_cache()


def bench(path, modes="resident,serial,buffers,stacked,fused", base=None, tokens=64, runs=5, warmup=16, prompts=PROMPTS,
          seed=0, together=None, cold=False, progress=True, on_round=None):  # fmt: skip
    """Decode the same prompts in every mode, in rounds of random order.

    Args:
        path (str): The model.
        modes (str): As for ``parse_modes``; or a dict of configs by name.
        base (StreamConfig): What the modes have in common.
        tokens (int): Decoded and timed in each run.
        runs (int): Rounds; round i takes prompt i, modulo their number. One more comes first, with the last prompt, and is not kept.
        warmup (int): Tokens decoded in each run before the clock starts.
        prompts (tuple[str]): The prompts.
        seed (int): Of the orders.
        together (bool): Whether to keep all models loaded. Default: if they take less than half of the memory available.
        cold (bool): Drop the checkpoint's pages from the page cache each time before the clock starts; slots stay as they are.
        progress (bool): Show a bar.
        on_round (Callable): Called with the record after each round, so that an interrupted bench is not lost.

    Returns:
        dict: The record: raw samples, machine, summaries (see ``summarize``).
    """
    path = folder(path)
    configs = parse_modes(modes, base) if isinstance(modes, str) else modes
    feet = {name: footprint(path, c) for name, c in configs.items()}
    needed, available = sum(f.total_nbytes for f in feet.values()), machine.memory_available()
    if together is None:
        together = needed < available / 2
    record = {
        "kind": "bench",
        "model": Path(path).name,
        "machine": machine.card(),
        "load_average": os.getloadavg(),
        "tokens": tokens, "warmup_tokens": warmup, "seed": seed, "prompts": list(prompts), "models_loaded_together": together,
        "order": "random in every round; one round before the first is not kept", "cache_state": "cold" if cold else "warm",
        "modes": {
            name: {"config": dataclasses.asdict(c), "predicted_nbytes": feet[name].total_nbytes, "samples": []}
            for name, c in configs.items()
        },
    }  # fmt: skip
    order, loaded = random.Random(seed), _Loaded(path, configs, together)

    bar = tqdm(
        total=(runs + 1) * len(configs), desc="bench", unit="run", leave=False, disable=not progress
    )
    try:
        for i in range(-1, runs):
            for name in order.sample(list(configs), len(configs)):
                model = loaded.get(name)
                ids = [encode(loaded.tokenizer, p) for p in prompts][i % len(prompts)]
                before = mx.get_active_memory()
                mx.reset_peak_memory()
                sample = decode(model, ids, tokens if i >= 0 else min(tokens, 16), warmup,
                                partial(machine.drop_pages, path) if cold else None)  # fmt: skip
                bar.update()
                if i < 0:
                    continue
                sample["round"] = i
                sample["peak_nbytes"] = loaded.nbytes[name] + mx.get_peak_memory() - before
                record["modes"][name]["samples"].append(sample)
            if i >= 0 and on_round:
                on_round(record)
    finally:
        bar.close()
        loaded.drop()
    record["process_peak_rss_nbytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return summarize(record)


def agreement(path, modes="serial,buffers,stacked,fused", base=None, tokens=32, prompt=PROMPTS[0]):
    """How near every mode's logits are to the resident model's, both fed the resident model's greedy tokens.

    Returns:
        dict: By mode: ``prefill_error`` and ``decode_error``, the largest difference of a logit over the standard deviation of the
        logits; ``same_tokens``, the share of steps with the same best token; ``bit_for_bit`` of the decoded steps.
    """
    path = folder(path)
    configs = {"resident": resident_like(base), **parse_modes(modes, base)}
    out, yard, ids = {}, None, None
    for name, config in configs.items():
        model, tokenizer = load(path, config)
        with model:
            prompt_ids = tokenizer.encode(prompt)
            cache = make_prompt_cache(model)
            logits = [
                np.array(model(mx.array([prompt_ids]), cache=cache)[0, -1].astype(mx.float32))
            ]
            for i in range(tokens):
                y = int(logits[-1].argmax()) if yard is None else ids[i]
                logits.append(
                    np.array(model(mx.array([[y]]), cache=cache)[0, -1].astype(mx.float32))
                )
        logits = np.stack(logits)
        if yard is None:
            yard, ids = logits, logits.argmax(1).tolist()
            continue
        error = np.abs(logits - yard).max(1) / yard.std(1)
        out[name] = {
            "prefill_error": float(error[0]), "decode_error": float(error[1:].max()), "bit_for_bit": bool((logits == yard)[1:].all()),
            "same_tokens": float((logits.argmax(1) == yard.argmax(1)).mean()),
        }  # fmt: skip
    return {
        "kind": "agreement",
        "machine": machine.card(),
        "dtype": (base or StreamConfig()).dtype,
        "tokens": tokens,
        "modes": out,
    }


def memory_over(path, config, tokens=256, every=32, prompt=PROMPTS[0]):
    """Memory of one long greedy run: does it grow, and does it stay at what ``footprint`` predicts?

    Returns:
        dict: ``tokens``, ``active_nbytes``, ``peak_nbytes`` (MLX's own count) and ``rss_nbytes`` at every step, and ``predicted_nbytes``.
    """
    import psutil

    path = folder(path)
    before = mx.get_active_memory()
    model, tokenizer = load(path, config)
    out = {
        "kind": "memory",
        "machine": machine.card(),
        "config": dataclasses.asdict(config),
        "tokens": [],
        "active_nbytes": [],
        "peak_nbytes": [],
        "rss_nbytes": [],
    }
    out["predicted_nbytes"] = footprint(path, config).total_nbytes
    with model:
        cache = make_prompt_cache(model)
        y = mx.argmax(model(mx.array([tokenizer.encode(prompt)]), cache=cache)[:, -1], axis=-1)
        mx.eval(y)
        for i in range(tokens + 1):
            if i % every == 0:
                out["tokens"].append(i)
                out["active_nbytes"].append(mx.get_active_memory() - before)
                out["peak_nbytes"].append(mx.get_peak_memory() - before)
                out["rss_nbytes"].append(psutil.Process().memory_info().rss)
                mx.reset_peak_memory()
            y = mx.argmax(model(y[None], cache=cache)[:, -1], axis=-1)
            mx.eval(y)
    return out


def summarize(record):
    """Add to a bench's record what follows from its samples: medians, ratios to resident, whether the tokens are the same."""
    resident = next(
        (n for n, m in record["modes"].items() if m["config"]["mode"] == "resident"), None
    )
    for name, m in record["modes"].items():
        samples = m["samples"]
        if not samples:
            continue
        m["decode_tok_s"] = timing.summary([record["tokens"] / s["decode_s"] for s in samples])
        m["prefill_s"] = timing.summary([s["prefill_s"] for s in samples])
        m["peak_nbytes"] = max(s["peak_nbytes"] for s in samples)
        counters = [s["counters"] for s in samples if s["counters"]]
        if m["config"]["mode"] != "resident" and counters:
            m["hit_rate"] = sum(c["hits"] for c in counters) / max(
                1, sum(c["hits"] + c["misses"] for c in counters)
            )
            m["bytes_per_token"] = statistics.mean(c["bytes_per_token"] for c in counters)
        if resident and name != resident:
            yard = {s["round"]: s for s in record["modes"][resident]["samples"]}
            pairs = [(s, yard[s["round"]]) for s in samples if s["round"] in yard]
            m["ratio_to_resident"] = timing.paired_ratio(
                [r["decode_s"] for _, r in pairs], [s["decode_s"] for s, _ in pairs]
            )
            m["rounds_with_the_same_tokens"] = sum(s["tokens"] == r["tokens"] for s, r in pairs)
    return record


def ceilings(record, speeds):
    """What a mode could reach if reads were all that is added to the resident model's work, spread evenly over its streams.

    Args:
        record (dict): Of ``bench``.
        speeds (dict): Bytes per second of reads, by name.

    Returns:
        dict: For every streamed mode, tokens per second by the name of the speed; ``no reads`` with one stream is the resident model.
    """
    resident = next(
        (m for m in record["modes"].values() if m["config"]["mode"] == "resident" and m["samples"]),
        None,
    )
    if resident is None:
        return {}
    out = {}
    for name, m in record["modes"].items():
        if m.get("bytes_per_token") is not None:
            token_s = (
                1
                / resident["decode_tok_s"]["median"]
                / _num_streams(m["config"], record["machine"])
            )
            out[name] = {
                "no reads": 1 / token_s,
                **{k: 1 / (token_s + m["bytes_per_token"] / v) for k, v in speeds.items()},
            }
    return out


def _num_streams(config, card):
    if config["mode"] not in ("stacked", "fused"):
        return 1
    if config["streams"] != "auto":
        return config["streams"]
    return card["cores"] if card["device"] == "cpu" else 1


def read_speeds(path, readers=8, nbytes=1 << 20):
    """Bytes per second of random reads of the checkpoint's largest file, cold and warm, by name."""
    file = max(folder(path).glob("*.safetensors"), key=lambda f: f.stat().st_size)
    nbytes = max(4096, min(nbytes, file.stat().st_size // 32))
    return {
        f"{state} reads": machine.read_speed(file, state == "cold", readers, nbytes)
        for state in ("cold", "warm")
    }


def report(record):
    """The bench's table and ceilings as text."""
    lines = [machine.card_line(record["machine"])]
    how = "all loaded at once" if record["models_loaded_together"] else "loaded one at a time"
    lines.append(
        f"{record['model']}: {record['tokens']} greedy tokens a run after {record['warmup_tokens']} of warm-up, models {how}, rounds in random order, page cache {record['cache_state']}"
    )
    wide = max(map(len, record["modes"]))
    lines.append(
        f"{'mode':{wide}}  {'tok/s median [quartiles]':26} {'of resident [quartiles]':26} {'hits':>5} {'MB/token':>9} {'peak MB':>8} {'predicted':>9}  tokens"
    )
    for name, m in record["modes"].items():
        if not m["samples"]:
            lines.append(f"{name:{wide}}  no samples")
            continue
        ratio, same, n = (
            m.get("ratio_to_resident"),
            m.get("rounds_with_the_same_tokens"),
            len(m["samples"]),
        )
        lines.append(
            f"{name:{wide}}  {timing.quartiles_text(m['decode_tok_s']):26} {timing.quartiles_text(ratio) if ratio else '-':26} "
            + (
                f"{m['hit_rate']:5.0%} {m['bytes_per_token'] / 1e6:9.2f}"
                if "hit_rate" in m
                else f"{'-':>5} {'-':>9}"
            )
            + f" {m['peak_nbytes'] / 1e6:8.0f} {m['predicted_nbytes'] / 1e6:9.0f}  "
            + (
                "-"
                if same is None
                else "same"
                if same == n
                else f"DIFFER in {n - same} of {n} rounds"
            )
        )
    for name, c in record.get("ceilings_tok_s", {}).items():
        lines.append(
            f"ceilings, {name}: " + ", ".join(f"{v:.1f} tok/s with {k}" for k, v in c.items())
        )
    return "\n".join(lines)


def run_bench(
    path,
    modes,
    base,
    tokens,
    runs,
    warmup,
    prompts,
    json_path=None,
    together=None,
    cold=False,
    progress=True,
):
    """The command: bench, print, save.

    Returns:
        bool: Whether every mode that was asked for all experts decoded the resident model's tokens. Always true on a GPU: there half
        precision rounds otherwise when a prompt's experts are grouped otherwise, which ``agreement`` measures.
    """

    def keep(record):
        if json_path:
            records.save(json_path, {**record, "partial": True})

    record = bench(
        path,
        modes,
        base,
        tokens,
        runs,
        warmup,
        prompts or PROMPTS,
        together=together,
        cold=cold,
        progress=progress,
        on_round=keep,
    )
    record["read_speeds"] = read_speeds(path, base.readers if base else 8)
    record["ceilings_tok_s"] = ceilings(record, record["read_speeds"])
    print(report(record))
    if json_path:
        records.save(json_path, record)
        print(f"samples: {json_path}")
    return record["machine"]["device"] == "gpu" or all(
        m.get("rounds_with_the_same_tokens", len(m["samples"])) == len(m["samples"])
        or m["config"]["top_k"] is not None
        for m in record["modes"].values()
    )
