"""The run on a CUDA GPU that made ``data/results/cuda_*.json``.

Real layer shapes, and every section of notebooks 01 and 02.

    python data/recipes/cuda_run.py OUT.json [--folder FOLDER] [--only SECTION,...] [--tiny]

It synthesizes the checkpoints that it needs under FOLDER (8 GB), saves the record after each
section, and goes on when a section fails. Sections are added to an OUT.json of the same machine, so
that a run may take several calls. It runs without a CUDA GPU, too: on Metal the same
sections, on a CPU ``--tiny``, to try it out.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from moelab import DATA, StreamConfig, close, footprint, load, plan, stats
from moelab.lab import machine, records
from moelab.lab.decode import decode
from moelab.lab.experiments import (
    bench,
    dispatch,
    exactness,
    ladder,
    layer,
    memory,
    reads,
)
from moelab.lab.texts import heldout_starts
from moelab.repack import repack
from moelab.replay.locality import lru_hit_rate, recorded_trace
from moelab.speculation.drafts import ModelDraft
from moelab.streaming.gpu import cuda
from moelab.streaming.reading import native
from moelab.streaming.residency.layer import LayerSlots
from moelab.streaming.session import Session
from moelab.synthesize import synthesize

SHORT = ("def",)  # a longer prompt makes MLX compile another kernel for over a minute
LIKE, LAYERS = "qwen3.5-35b-a3b", 8
# Each starts a process of its own: MLX reads these once.
ENVIRONMENTS = {
    "as it is": {},
    "one operation a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "no CUDA graphs": {"MLX_USE_CUDA_GRAPHS": "0"},
    "5 operations a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "5"},
    "1000 operations a command buffer": {
        "MLX_MAX_OPS_PER_BUFFER": "1000",
        "MLX_MAX_MB_PER_BUFFER": "100000",
    },
}


class Run:
    """The sections, in order. Each returns what goes into the record under its name."""

    def __init__(self, folder, tokenizer, tiny):
        self.folder, self.tokenizer, self.tiny = Path(folder), tokenizer, tiny
        self.shapes = {k: v for k, v in dispatch.SHAPES.items() if (k == "tiny-moe") == tiny}
        self.shape = next(iter(self.shapes.values()))
        self.rounds = 2 if tiny else 7
        self.base = StreamConfig(slots=8 if tiny else 64, kernels="mlx")  # as on a GPU
        self.path = self.folder / ("tiny" if tiny else f"{LIKE}-{LAYERS}")

    def checkpoint(self):
        begin = time.perf_counter()
        self._write(self.path, tokenizer=self.tokenizer)
        nbytes = sum(f.stat().st_size for f in self.path.iterdir())
        return {
            "like": LIKE,
            "layers": LAYERS,
            "nbytes": nbytes,
            "write_s": time.perf_counter() - begin,
        }

    def _write(self, path, **kwargs):
        config = None
        if self.tiny:
            from tiny_moe import CONFIG as config
        layers = None if self.tiny else LAYERS
        synthesize(path, LIKE, layers, config=config, progress=False, **kwargs)

    def one_operation(self):
        return dispatch.one_operation(rounds=self.rounds * 3)

    def expert_calls(self):
        return {
            k: dispatch.expert_calls(**s, rounds=self.rounds * 2) for k, s in self.shapes.items()
        }

    def loops_of_the_checkpoint(self):
        model, _ = load(self.path, StreamConfig(mode="resident"))
        timed = dispatch.loops(model, 8 if self.tiny else 48, self.rounds)
        return {**vars(timed), "operations_of_a_layer": dispatch.operations_of_a_layer(model)}

    def promotion(self):
        model, _ = load(self.path, StreamConfig(mode="resident", dtype="bfloat16"))
        return dispatch.promotion(model, 4 if self.tiny else 32, self.rounds)

    def dense_and_moe(self):
        """Loops of a dense and of an MoE model, in processes with MLX's settings changed."""
        out = {}
        for name, variables in list(ENVIRONMENTS.items())[: 2 if self.tiny else None]:
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder) / "loops.json"
                command = [
                    sys.executable,
                    __file__,
                    str(target),
                    "--loops",
                    *(["--tiny"] if self.tiny else []),
                ]
                done = subprocess.run(
                    command,
                    env={**os.environ, **variables},
                    capture_output=True,
                    text=True,
                    timeout=150,
                )
                out[name] = (
                    {"environment": variables, "error": done.stderr[-800:]}
                    if done.returncode
                    else json.loads(target.read_text())
                )
        return out

    def loops_of_both(self):
        sizes = (
            dict(D=256, F=64, K=4, E=16, layers=2)
            if self.tiny
            else dict(**self.shape, E=32, layers=8)
        )
        out = {}
        for name, model in dispatch.dense_and_moe(**sizes).items():
            timed = dispatch.loops(
                model,
                4 if self.tiny else 48,
                2 if self.tiny else 5,
                routing=name == "moe",
                config=sizes,
            )
            operations = dispatch.operations_of_a_layer(model)[1]
            out[name] = {**vars(timed), "operations_of_a_layer": operations}
        return out

    def reads(self):
        depths, nbytes = ((1, 2), 1 << 20) if self.tiny else ((1, 2, 4, 8, 16, 32), 512 << 20)
        return {
            state: reads.bench_reads(
                self.path, depths, nbytes, 3, cold=state == "cold", progress=False
            )
            for state in ("cold", "warm")
        }

    def _ladder(self, modes, tokens, runs, **kwargs):
        tokens, runs = (3, 1) if self.tiny else (tokens, runs)
        return bench.measure(
            self.path, modes, self.base, tokens, runs, warmup=4, progress=False, **kwargs
        )

    def ladder_warm(self):
        return self._ladder(
            "resident,serial,buffers/readers=1,buffers,buffers/readers=16,stacked,fused",
            24,
            4,
        )

    def locality(self):
        """Random routers and a trace's, fed the trace's text, by the share of experts in slots.

        Both checkpoints are repacked: one read brings one expert.
        """
        whole = recorded_trace("code")
        prompt, warmup, tokens, runs = 128, *((2, 4, 1) if self.tiny else (32, 96, 5))
        trace = whole[: prompt + warmup + tokens]
        E = footprint(self.path).num_experts
        configs = {"resident": bench.resident_like(self.base)}
        configs |= {f"fused, {n} slots": replace(self.base, slots=n) for n in (E // 4, E // 2, E)}
        if cuda.available():
            host = replace(self.base, source="host")
            configs |= {f"host, {n} slots": replace(host, slots=n) for n in (E // 4, E // 2)}
        hits, E0 = lru_hit_rate(trace, prompt + warmup).mean(0).tolist(), trace.num_experts
        hits = {f"{n} of {E0} slots": hits[n] for n in (E0 // 4, E0 // 2, E0)}
        out = {"trace": trace.model, "hit_rate_of_the_trace": hits}
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            routed = Path(folder) / self.path.name
            begin = time.perf_counter()
            self._write(routed, routing=whole)
            out["write_s"] = time.perf_counter() - begin
            for name, path in {"random routers": self.path, "routers of the trace": routed}.items():
                out[name] = bench.measure(
                    repack(path, Path(folder) / name, progress=False),
                    configs,
                    self.base,
                    tokens,
                    runs,
                    warmup,
                    progress=False,
                    feed=DATA / "traces" / "code.npz",
                )
        return out

    def copies(self):
        """Experts that the GPU copies from pinned memory against reads into unified memory.

        In turn, with a quarter of the experts in slots, and where the host's time goes in each;
        and copies of what loops in Python read, not native code.
        """
        tokens, rounds = (4, 1) if self.tiny else (24, 7)
        config = replace(self.base, slots=footprint(self.path).num_experts // 4)
        in_python = partial(unittest.mock.patch.object, native, "loop", lambda: None)
        ways = {
            "resident": (bench.resident_like(self.base), "1", nullcontext),
            "unified memory": (config, "0", nullcontext),
            "copies, reads in Python": (config, "1", in_python),
            "copies": (config, "1", nullcontext),
        }
        out = {}
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            packed = repack(self.path, Path(folder) / "packed", progress=False)
            for layout, path in {"repacked": packed, "as shipped": self.path}.items():
                models = {}
                for name, (c, variable, _) in ways.items():
                    with unittest.mock.patch.dict(os.environ, MOELAB_CUDA_COPIES=variable):
                        models[name], tokenizer = load(path, c)
                ids = tokenizer.encode(SHORT[0])
                decode_s, texts, order = {n: [] for n in models}, {}, random.Random(0)
                for i in range(rounds + 1):
                    for name in order.sample(list(models), len(models)):
                        with ways[name][2]():
                            run = decode(models[name], ids, tokens, warmup=4)
                        texts.setdefault(name, []).append(run.tokens)
                        if i:
                            decode_s[name].append(run.decode_s)
                same = {n: [t == texts["resident"][0] for t in texts[n]] for n in models}
                spent = {}
                for name, model in models.items():
                    with ways[name][2]():
                        spent[name] = host_ms(model, ids, tokens)
                counters = vars(stats(models["copies"]).decode)
                out[layout] = {
                    "tokens": tokens,
                    "decode_s": decode_s,
                    "same": same,
                    "host_ms_of_a_token": spent,
                    "counters": counters,
                }
                for model in models.values():
                    close(model)
        return out

    def host(self):
        """Experts from pinned memory of the host against reads of them and resident, in turn."""
        tokens, rounds, lengths = (4, 1, (16,)) if self.tiny else (24, 7, (128, 400, 1600))
        E = footprint(self.path).num_experts
        ways = {
            "resident": bench.resident_like(self.base),
            f"disk, {E // 4} slots": replace(self.base, slots=E // 4),
        }
        if cuda.available():
            for n in (E // 16, E // 4, E // 2, E):
                ways[f"host, {n} slots"] = replace(self.base, slots=n, source="host")
        out = {}
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            packed = repack(self.path, Path(folder) / "packed", progress=False)
            for layout, path in {"repacked": packed, "as shipped": self.path}.items():
                begin, models, load_s = time.perf_counter(), {}, {}
                for name, config in ways.items():
                    models[name], tokenizer = load(path, config)
                    begin, load_s[name] = time.perf_counter(), time.perf_counter() - begin
                ids = tokenizer.encode(" ".join(heldout_starts(self._model, 8, 400, tokenizer)))
                out[layout] = {
                    "tokens": tokens,
                    "load_s": load_s,
                    "decoded": self._decoded(models, ids[:8], tokens, rounds),
                    "prompts_of": {n: self._prompts(models, ids[:n], rounds) for n in lengths},
                    "host_ms_of_a_token": {
                        name: host_ms(model, ids[:8], tokens) for name, model in models.items()
                    },
                }
                for model in models.values():
                    close(model)
                models.clear()
        return out

    def _planned(self, share):
        """Slots that the plan chooses for a part of the file's size, and half of them, in turn."""
        tokens, rounds, lengths = (4, 1, (16, 40)) if self.tiny else (48, 3, (126, 400, 800, 4000))
        memory = int(share * sum(f.stat().st_size for f in self.path.iterdir()))
        if self.tiny:  # the plan keeps a fixed part, larger than this file
            memory += 170_000_000 if cuda.available() else 120_000_000
        auto = replace(self.base, slots="auto", memory_nbytes=memory, context=lengths[-1] + tokens)
        chosen = plan(self.path, auto)
        ways = {
            "resident": bench.resident_like(self.base),
            "auto": auto,
            f"{chosen.slots // 2} slots": replace(self.base, slots=chosen.slots // 2),
        }
        if cuda.available():
            ways["auto, host"] = replace(auto, source="host")
        models, peaks, first = {}, {}, None
        for name, config in ways.items():
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            models[name], tokenizer = load(self.path, config)
            first = first or heldout_starts(self._model, 16, 400, tokenizer)
            ids = (tokenizer.encode(" ".join(first)) * 2)[: lengths[-1]]
            run = decode(models[name], ids, tokens)
            peaks[name] = mx.get_peak_memory() - before
            print(f"  {name}: {run.prefill_s:.1f} s, {peaks[name] / 1e6:.0f} MB", flush=True)
        record = {
            "memory_nbytes": memory,
            "reason": chosen.reason,
            "prompt_tokens": chosen.prompt_tokens,
            "peak_nbytes": peaks,
            "prompts_of": {n: self._prompts(models, ids[:n], rounds) for n in lengths},
            "decoded": self._decoded(models, ids[: lengths[1]], tokens, rounds),
        }
        for model in models.values():
            close(model)
        return record

    planned_quarter = partialmethod(_planned, 0.25)
    planned_half = partialmethod(_planned, 0.5)
    planned_most = partialmethod(_planned, 0.8)

    def _decoded(self, models, ids, tokens, rounds):
        """By model, resident first: seconds, whether the text is resident's, hits and misses."""
        out = {n: {"decode_s": [], "same": []} for n in models}
        order, text = random.Random(0), None
        for i in range(rounds + 1):
            for name in order.sample(list(models), len(models)) if i else models:
                stats(models[name], reset=True)
                run = decode(models[name], ids, tokens, warmup=4)
                text = run.tokens if text is None else text
                out[name]["same"].append(run.tokens == text)
                if i:
                    out[name]["decode_s"].append(run.decode_s)
                c = stats(models[name]).decode
                out[name] |= {"hits": c.hits, "misses": c.misses}
        return out

    def _prompts(self, models, ids, rounds):
        """By model, resident first: seconds, and whether the last logits are resident's."""
        out, logits = {n: {"prompt_s": [], "same": []} for n in models}, None
        order = random.Random(0)
        for i in range(rounds + 1):
            for name in order.sample(list(models), len(models)) if i else models:
                cache = make_prompt_cache(models[name])
                begin = time.perf_counter()
                y = models[name](mx.array([ids]), cache=cache)[0, -1]
                mx.eval(y)
                took = time.perf_counter() - begin
                logits = y if logits is None else logits
                out[name]["same"].append(mx.array_equal(y, logits).item())
                if i:
                    out[name]["prompt_s"].append(took)
        return out

    def ladder_cold(self):
        return self._ladder(
            "serial,buffers/readers=1,buffers,stacked,fused,fused/readers=16", 12, 3, cold=True
        )

    def readers(self):
        """Fewer and more reads in flight, warm in turn with resident, and from a cold disk."""
        modes = "fused,fused/readers=16,fused/readers=32"
        return {
            "warm": self._ladder(f"resident,{modes}", 24, 7),
            "cold": self._ladder(modes, 12, 7, cold=True),
        }

    def slots(self):
        sizes = (8, 16) if self.tiny else (16, 64, 128)
        configs = {f"fused, {n} slots": replace(self.base, slots=n) for n in sizes}
        return self._ladder(configs, 16, 3, prompts=SHORT)

    def top_k(self):
        sizes = (8, 2) if self.tiny else (8, 6, 4, 2)
        configs = {f"fused, top-{n}": replace(self.base, top_k=n) for n in sizes}
        return self._ladder(configs, 16, 3, prompts=SHORT)

    def all_in_slots(self):
        """The same token again and again, so that every expert is in its slot and none is read."""
        return layer.bench_layer(self.path, "stacked,fused", self.base, 5 if self.tiny else 100)

    def tokens_at_once(self):
        return ladder.tokens_at_once(**self.shape, runs=self.rounds)

    def agreement(self):
        """Logits in single precision, and in the checkpoint's.

        Half precision rounds differently when experts are grouped differently; single precision
        shows that nothing else differs.
        """
        n, modes = (4, "serial,fused") if self.tiny else (32, "serial,buffers,stacked,fused")
        return {
            d: exactness.agreement(self.path, modes, replace(self.base, dtype=d), n)
            for d in ("float32", "auto")
        }

    def memory(self):
        n = 8 if self.tiny else 128
        return memory.measure(self.path, self.base, n, n // 8, prompt=SHORT[0])

    def texts_twice(self):
        """Greedy texts without and with drafts, each written twice."""
        amount = {"drafts": (0, 4), "n": 2, "tokens": 8} if self.tiny else {}

        def make_draft():
            return ModelDraft(mlx_lm.load(str(DATA / "models" / "tiny-draft"))[0])

        return self._trained(
            lambda config: exactness.texts(self._model, config, make_draft, **amount)
        )

    def soak(self):
        """2,004 passes of mixed lengths and 20,004 decoded tokens, all against resident."""
        amount = {"passes": 3, "tokens": 8} if self.tiny else {}
        return self._trained(
            lambda config: exactness.soak(self._model, config, **amount), (16, 48, 64)
        )

    _model = DATA / "models" / "tiny-moe"
    _source = "disk"

    def exactness_host(self):
        """``texts_twice`` and ``soak`` with experts from the host's memory."""
        self._source = "host"
        try:
            return {f.__name__: f() for f in (self.texts_twice, self.soak)}
        finally:
            self._source = "disk"

    def _trained(self, measure, slots=(16, 48)):
        configs = {
            f"{m}, {s} slots": StreamConfig(mode=m, slots=s, source=self._source)
            for s in slots
            for m in ("stacked", "fused")
        }
        return {name: measure(config) for name, config in configs.items()}


def host_ms(model, ids, tokens):
    """Where the host's time goes: ms a token in each kind of call, without the calls inside it."""
    spent, inside = {}, []

    def timed(name, function):
        def call(*args, **kwargs):
            begin = time.perf_counter()
            inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took, within = time.perf_counter() - begin, inside.pop()
                spent[name] = spent.get(name, 0.0) + took - within
                if inside:
                    inside[-1] += took

        return call

    calls = {
        "scheduling": (mx, "async_eval"),
        "beginning reads": (LayerSlots, "begin"),
        "waiting for reads": (LayerSlots, "finish"),
        "waiting for the routing": (Session, "routing"),
    }
    with ExitStack() as patches:
        for name, (owner, function) in calls.items():
            patch = unittest.mock.patch.object(
                owner, function, timed(name, getattr(owner, function))
            )
            patches.enter_context(patch)
        begin = time.perf_counter()
        decode(model, ids, tokens)
        spent["all"] = time.perf_counter() - begin
    spent["the rest"] = spent["all"] - sum(v for k, v in spent.items() if k != "all")
    return {k: 1e3 * v / (tokens + 1) for k, v in spent.items()}


SECTIONS = (
    "checkpoint",
    "one_operation",
    "expert_calls",
    "loops_of_the_checkpoint",
    "dense_and_moe",
    "ladder_warm",
    "copies",
    "locality",
    "host",
    "planned_quarter",
    "planned_half",
    "planned_most",
    "ladder_cold",
    "readers",
    "reads",
    "agreement",
    "promotion",
    "all_in_slots",
    "slots",
    "top_k",
    "tokens_at_once",
    "memory",
    "texts_twice",
    "soak",
    "exactness_host",
)


def main(argv=None):
    p = argparse.ArgumentParser(
        prog="python data/recipes/cuda_run.py", description=__doc__.split("\n\n")[0]
    )
    p.add_argument("out", metavar="OUT.json")
    p.add_argument(
        "--folder",
        help="where the checkpoint is written and removed again (default: a temporary folder)",
    )
    p.add_argument("--tokenizer", help="folder of a tokenizer (default: data/models/tiny-moe)")
    p.add_argument("--only", help=f"sections, divided by commas: {', '.join(SECTIONS)}")
    p.add_argument("--seconds", type=float, default=1e9, help="start no section after that many")
    p.add_argument("--tiny", action="store_true", help="small shapes, to try the command out")
    p.add_argument("--loops", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.loops:
        records.save(args.out, Run(".", None, args.tiny).loops_of_both())
        return 0
    begin = time.perf_counter()
    folder = args.folder or tempfile.mkdtemp(prefix="moelab-")
    run = Run(folder, args.tokenizer, args.tiny)
    if run.path.exists():  # it would be removed at the end
        sys.exit(f"{run.path} exists already: remove it or name another --folder")
    record = {
        "kind": "cuda_run",
        "machine": machine.card(),
        "device": {k: v for k, v in mx.device_info().items() if k not in ("uuid", "pci_bus_id")},
        "driver": _driver(),
        "tiny": args.tiny,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("MLX_", "MOELAB_C"))},
        "sections": {},
    }
    if Path(args.out).exists():
        record["sections"] = _earlier_sections(args.out, record)
    try:
        for name in args.only.split(",") if args.only else SECTIONS:
            if time.perf_counter() - begin > args.seconds:
                record["sections"][name] = {"skipped": f"more than {args.seconds:.0f} s had passed"}
                continue
            started = time.perf_counter()
            try:
                result = _without_env(getattr(run, name)())  # one machine: its card stands once
            except Exception as error:  # say what failed and go on
                result = {
                    "error": f"{type(error).__name__}: {error}",
                    "traceback": traceback.format_exc()[-1500:],
                }
            mx.clear_cache()
            result["section_s"] = round(time.perf_counter() - started, 2)
            record["sections"][name] = result
            records.save(args.out, record)
            print(
                f"{name}: {result['section_s']} s"
                + (f": {result['error']}" if "error" in result else ""),
                flush=True,
            )
    finally:
        shutil.rmtree(run.path, ignore_errors=True)
    return 0


def _earlier_sections(path, record):
    """The sections of the run that this one goes on with."""
    earlier = json.loads(Path(path).read_text())
    for key in ("kind", "driver", "tiny", "environment"):
        if earlier.get(key) != record[key]:
            sys.exit(
                f"{path}: expected a run with {key} {record[key]!r}, to add sections to, got "
                f"{earlier.get(key)!r}: name another file."
            )
    return earlier["sections"]


def _without_env(record):
    """A section's result as JSON has it, without the machine and the prompts that all share."""
    if records.is_table(record):
        record = records.as_json(record)
    if hasattr(record, "to_json"):
        record = record.to_json()
    if dataclasses.is_dataclass(record):
        record = dataclasses.asdict(record)
    if isinstance(record, dict):
        return {
            str(k): _without_env(v)
            for k, v in record.items()
            if k not in ("env", "machine", "prompts")
        }
    if isinstance(record, (list, tuple)):
        return [_without_env(v) for v in record]
    return record


def _driver():
    if shutil.which("nvidia-smi"):
        return subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        ).stdout.strip()
    return None


if __name__ == "__main__":
    sys.exit(main())
