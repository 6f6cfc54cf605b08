"""The run on two GPUs of one host that made ``data/results/cuda_h200x2_ranks.json``.

    MLX_CUDA_USE_CUDNN_SDPA=0 python data/recipes/cuda_ranks.py OUT.json [--folder FOLDER] [--tiny]

It synthesizes 8 layers of Qwen3.5-35B-A3B shapes under FOLDER (3.8 GB), decodes with one process
alone, then with two ranks under mlx.launch over NCCL, and compares their bits. ``--tiny`` is a
short trial without a GPU: tiny-moe, over the ring.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab.lab import machine, records
from moelab.synthesize import synthesize

TINY_MOE = moelab.DATA / "models" / "tiny-moe"
LAYERS, PROMPT = 8, "def"
ROWS = (1, 9, 8193)  # of an exchange: one, a token's, a long prompt's
LAUNCH = (sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()")
PATIENCE_S = 400  # for each of the two programs


def measure(path: Path, group: mx.distributed.Group | None, tiny: bool) -> dict:
    """What one process measures: sums, and by slots tokens, a prompt and a digest of all bits."""
    slots, tokens, runs, length = (8, 16), 8, 1, 64
    if not tiny:
        slots, tokens, runs, length = (16, 64, 128, 256), 64, 5, 512
    out = {"rank": group.rank() if group else 0, "ranks": group.size() if group else 1}
    if group:
        for name, n in (("all_sum", 1), ("all_gather", group.size())):
            out[f"{name}_s_quartiles"] = {
                str(rows): _exchange(name, -(-rows // n), group) for rows in ROWS
            }
    out["slots"] = {}
    for S in slots:
        model, tokenizer = moelab.load(path, moelab.StreamConfig(slots=S), group=group)
        with model:
            out["slots"][str(S)] = _decode(model, tokenizer.encode(PROMPT), tokens, runs, length)
    return out | {"tokens": tokens, "prompt_tokens": length}


def _exchange(name, rows, group):
    x, seconds = mx.ones((rows, 2048), mx.bfloat16), []
    mx.eval(x)
    for _ in range(220 if rows < 10 else 30):
        begin = time.perf_counter()
        mx.eval(getattr(mx.distributed, name)(x, group=group))
        seconds.append(time.perf_counter() - begin)
    return np.percentile(seconds[10:], (25, 50, 75)).tolist()


def _decode(model, ids, tokens, runs, length):
    digest, decode_s, prompt_s = hashlib.sha256(), [], []
    for run in range(runs + 1):  # the first compiles
        cache = make_prompt_cache(model)
        logits = model(mx.array([ids]), cache=cache)
        mx.eval(logits)
        moelab.stats(model, reset=True)
        begin = time.perf_counter()
        for _ in range(tokens):
            last = logits[0, -1].astype(mx.float32)
            if run == 0:
                digest.update(np.array(last).tobytes())
            logits = model(mx.argmax(last)[None, None], cache=cache)
        mx.eval(logits)
        decode_s += [time.perf_counter() - begin] if run else []
    counters = moelab.stats(model).decode
    long = mx.array([[(7 * i + 3) % 1000 for i in range(length)]])
    for _ in range(3):
        begin = time.perf_counter()
        last = model(long, cache=make_prompt_cache(model))[0, -1].astype(mx.float32)
        mx.eval(last)
        prompt_s.append(time.perf_counter() - begin)
    digest.update(np.array(last).tobytes())
    counted = {name: getattr(counters, name) for name in ("hits", "misses", "bytes_read")}
    return {"decode_s": decode_s, **counted, "prompt_s": prompt_s, "digest": digest.hexdigest()}


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("--folder", default=tempfile.gettempdir(), type=Path)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--ranks", type=int, help=argparse.SUPPRESS)  # of the program that this one is
    args = p.parse_args(argv)
    if args.tiny:
        mx.set_default_device(mx.cpu)
    path = TINY_MOE if args.tiny else args.folder / "qwen3.5-35b-a3b-8"
    if args.ranks:
        group = mx.distributed.init(strict=True) if args.ranks > 1 else None
        found = measure(path, group, args.tiny)
        args.out.with_suffix(f".{found['ranks']}.{found['rank']}").write_text(json.dumps(found))
        return
    if not path.exists():
        synthesize(path, "qwen3.5-35b-a3b", LAYERS, tokenizer=TINY_MOE)
    found = []
    for n in (1, 2):
        this = [sys.executable, __file__, str(args.out), "--folder", str(args.folder)]
        this += ["--ranks", str(n), *(["--tiny"] if args.tiny else [])]
        backend = "ring" if args.tiny else "nccl"
        before = [] if n == 1 else [*LAUNCH, "-n", str(n), "--backend", backend, "--"]
        only = {"CUDA_VISIBLE_DEVICES": "0"} if n == 1 else {}
        subprocess.run([*before, *this], env=os.environ | only, check=True, timeout=PATIENCE_S)
        files = [args.out.with_suffix(f".{n}.{rank}") for rank in range(n)]
        found += [json.loads(file.read_text()) for file in files]  # mlx.launch ends with 0 always
        for file in files:
            file.unlink()
    tokens, prompt_tokens = (found[0][name] for name in ("tokens", "prompt_tokens"))
    for each in found:
        del each["tokens"], each["prompt_tokens"]
    record = {
        "kind": "cuda_ranks",
        "machine": machine.card(),
        "layers": LAYERS,
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "ranks": found,
    }
    records.save(args.out, record)


if __name__ == "__main__":
    main()
