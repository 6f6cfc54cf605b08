"""Compare moelab with the programs that people use instead: llama.cpp, mlx-vlm, mlx-lm (peers).

    python data/recipes/peers.py install            (``make peers``) llama.cpp, mlx-vlm from PyPI
    python data/recipes/peers.py against OUT.json MODEL TEXT RUNS [WORD ...]

llama.cpp maps a GGUF file of the same weights into memory. mlx-vlm reads experts from a folder that
it writes itself (``mlx_vlm.moe_offload``), and keeps the experts that it used last. Each peer runs
in a process of its own, and no other process imports it.

``against`` reads one text with each peer, in rounds of random order; the model's file is dropped
from the page cache before each run. TEXT is a trace's file, whose tokens the peers read one by one
(``FILE:16``: only the last 16 tokens of its prompt), or lengths of prompts (``126,400,800``). A
WORD is

- a memory limit of the process in MB, page cache included (Linux). 0, the default, means no limit;
- a peer, with options after slashes: ``mlx-lm``, ``moelab/source=host/slots=16``,
  ``llama.cpp/experts=cpu`` (on a GPU: experts in the host's memory, computed on the CPU, as
  ``--n-cpu-moe`` does). Default: every peer, moelab included;
- ``warmup=32``: tokens after the prompt that are read before the clock starts; ``tokens=32``:
  tokens that are timed then; ``seconds=30``: warm-up and timing each end after 30 s at most;
- ``repacked=FOLDER``: one more peer, moelab with the model as ``moelab repack`` wrote it.

If built with CUDA, llama.cpp crashed in a process that had loaded MLX: each has its own parts of
the C++ library. With ``LD_PRELOAD=libstdc++.so.6`` in the environment both use the system's.
"""

import ctypes
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil
import to_gguf
from mlx_lm.models.cache import make_prompt_cache

from moelab import DATA, StreamConfig, load
from moelab.lab import limit, machine, records
from moelab.lab.arguments import parse_modes
from moelab.lab.decode import read_all_but_last
from moelab.lab.machine import card
from moelab.lab.models import folder
from moelab.lab.texts import heldout_ids
from moelab.lab.variants import texts_of

WORK = DATA.parent / "build" / "peers"
LLAMA_CPP, MLX_VLM, MLX_LM, MOELAB = "llama.cpp", "mlx-vlm", "mlx-lm", "moelab"
REPACKED = "moelab, repacked"
# What pip installs for each peer. Other dependencies are in moelab's own environment.
PACKAGES = {
    LLAMA_CPP: ("llama-cpp-python==0.3.36", "diskcache==5.6.3"),
    MLX_VLM: ("mlx-vlm==0.7.10",),
}
NAMES = (MOELAB, MLX_LM, *PACKAGES)
BUILD = ["-DGGML_NATIVE=ON", "-DLLAVA_BUILD=OFF", "-DLLAMA_OPENSSL=OFF"]
BUILD += [f"-DLLAMA_BUILD_{p}=OFF" for p in ("TESTS", "EXAMPLES", "TOOLS", "SERVER", "APP")]
EXPERTS = rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # experts' tensors in a GGUF file


def install():
    """Fetch and build the peers that are not in build/peers yet."""
    cuda = ["-DGGML_CUDA=ON"] if card()["backend"] == "CUDA" else []
    environment = os.environ | {"CMAKE_ARGS": " ".join(BUILD + cuda)}
    for name, packages in PACKAGES.items():
        if is_built(name):
            print(f"{name}: is installed, {', '.join(packages)}")
            continue
        words = ["pip", "install", "--no-deps", "--upgrade", "--disable-pip-version-check"]
        words += ["--target", str(WORK), "--no-binary", "llama-cpp-python", *packages]
        if subprocess.run([sys.executable, "-m", *words], env=environment).returncode:
            raise OSError(f"{name}: pip failed. It needs PyPI, and a C++ compiler for llama.cpp.")


def is_built(name):
    """Whether a peer's packages have their pinned versions; moelab and mlx-lm pin none."""
    pinned = (package.split("==") for package in PACKAGES.get(name, ()))
    found = importlib.metadata.distributions
    return all(v in [d.version for d in found(name=n, path=[str(WORK)])] for n, v in pinned)


def built():
    """Return the peers that can be run here."""
    return [name for name in NAMES if is_built(name)]


def way(text):
    """Parse a peer's name and the options for ``opened`` that follow it, each after a slash."""
    peer, *settings = text.split("/")
    if peer == REPACKED:
        return MOELAB, {}
    if peer == LLAMA_CPP and settings == ["experts=cpu"]:
        return peer, {"experts_on_cpu": True}
    if peer == MOELAB and settings:
        (config,) = parse_modes("/".join(("fused", *settings))).values()
        return peer, {name: getattr(config, name) for name in re.findall(r"/(\w+)=", text)}
    if peer not in NAMES or settings:
        raise ValueError(f"expected a peer ({', '.join(NAMES)}) with its options, got {text!r}")
    return peer, {}


# What runs in a peer's own process


def opened(peer, path, context, **options):
    """Load a peer's model; return a function ``begin`` that begins a text.

    ``begin()`` returns a function that reads tokens and returns the next token's logits [V].
    ``path`` is a GGUF file, mlx-vlm's folder or the checkpoint. ``options`` are those of
    ``mlx_vlm.load``, of ``StreamConfig``, or llama.cpp's ``experts_on_cpu``.
    """
    sys.path.append(str(WORK))  # last: packages of moelab's environment come first
    if peer == LLAMA_CPP:
        return _llama(path, context, **options)
    if peer == MLX_VLM:
        import mlx_vlm

        model = mlx_vlm.load(path, **options)[0].language_model
        if mx.default_device() == mx.cpu:
            model.set_dtype(mx.float32)  # as other peers; half precision is far slower on a CPU
    else:
        resident = {"mode": "resident", "kernels": "mlx"}  # mlx-lm's model and MLX's kernels
        streamed = {"slots": 16, "context": context} | options
        model = load(path, StreamConfig(**(resident if peer == MLX_LM else streamed)))[0]

    def begin():
        cache = make_prompt_cache(model)

        def read(ids):
            ids = mx.array([ids])
            read_all_but_last(model, ids, cache)
            logits = model(ids[:, -1:], cache=cache)
            logits = getattr(logits, "logits", logits)[0, -1]
            return np.array(logits.astype(mx.float32))

        return read

    return begin


def _llama(path, context, experts_on_cpu=False):
    """Open llama.cpp, for ``opened``."""
    from llama_cpp import llama_cpp as c
    from llama_cpp._ggml import libggml

    # llama.cpp must not copy weights into layouts for special instructions. With AMX's layout it
    # crashed. The system can drop pages of the file if memory is short, but it cannot drop copies.
    model_params = c.llama_model_default_params()
    model_params.use_extra_bufts = False
    if experts_on_cpu:
        libggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
        overrides = (_Override * 2)((EXPERTS, libggml.ggml_backend_cpu_buffer_type()))  # null-ended
        model_params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    model = c.llama_model_load_from_file(path.encode(), model_params)
    if model is None:
        raise OSError(f"{path}: llama.cpp could not load it")
    params = c.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = context, *[card()["cores"]] * 2
    llama = c.llama_init_from_model(model, params)
    V = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    def read(ids):
        for at in range(0, len(ids), params.n_batch):
            some = ids[at : at + params.n_batch]
            some = (c.llama_token * len(some))(*some)
            if status := c.llama_decode(llama, c.llama_batch_get_one(some, len(some))):
                raise OSError(f"{path}: llama_decode returned {status}")
        return np.ctypeslib.as_array(c.llama_get_logits_ith(llama, -1), (V,))

    def begin():
        c.llama_memory_clear(c.llama_get_memory(llama), True)
        return read

    return begin


class _Override(ctypes.Structure):
    """llama.cpp's ``llama_model_tensor_buft_override``, which its Python binding lacks."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def sample_here(peer, path, ids, feed, warmup, tokens, seconds, options):
    """Make one run of ``against`` in this (new) process and return the run's columns.

    ``seconds`` limits the time of the warm-up, and separately that of the timed tokens.
    """
    read, said = opened(peer, path, len(ids) + len(feed) + 1, **options)(), []

    def timed(ids):
        took = []
        for given in ids:
            begin = time.perf_counter()
            said.append(int(read(given).argmax()))
            took.append(time.perf_counter() - begin)
            if seconds and sum(took) > seconds:
                break
        return took

    (prefill_s,), one_by_one = timed([ids]), [[token] for token in feed]
    warmup = len(timed(one_by_one[:warmup]))
    before = machine.disk_read_nbytes()
    took = timed(one_by_one[warmup : warmup + tokens])
    row = {"prompt_tokens": len(ids), "prefill_s": prefill_s, "warmup_tokens": warmup}
    row |= {"decode_tokens": len(took), "decode_s": sum(took)}
    row |= {} if before is None else {"disk_nbytes": machine.disk_read_nbytes() - before}
    return row | {"tokens": said, "rss_end_nbytes": psutil.Process().memory_info().rss}


# What makes the records


def against(
    path, text, limits=(None,), runs=5, tokens=32, warmup=32, seconds=0, repacked="", ways=NAMES
):
    """Read the same text with each peer under each limit (bytes or None); a row is a run.

    ``text`` is a trace's file, or lengths of prompts; ``FILE:N`` means the last N tokens of the
    trace's prompt. The other arguments are the words of the command line.
    """
    path, ways = folder(path), (*ways, REPACKED) if repacked else ways
    if isinstance(text, str | Path):
        ids, behind = texts_of(text, warmup + tokens, path)
        texts, feed = {"": (ids, behind, warmup, tokens)}, Path(text).name
    else:
        prompts, feed = heldout_ids(path, text, len(text)), None
        texts = {f", prompt of {len(ids)}": (ids, ids[-1:], 0, 1) for ids in prompts}
    opened = {given: way(given) for given in ways}
    read = files(path, [peer for peer, _ in opened.values()]) | {REPACKED: Path(repacked)}

    def run(given, text, nbytes, _):
        (peer, options), told = opened[given], {"limit_nbytes": nbytes} if nbytes else {}
        file = read.get(given, read[peer])
        parts = [file] if file.is_file() else sorted(file.rglob("*.safetensors"))
        for part in parts:
            machine.drop_pages(part)
        if peer == MOELAB:
            options = {"slots": "auto"} | options
        elif peer == MLX_VLM and nbytes:
            others = sum(p.stat().st_size for p in file.glob("*.safetensors"))
            # Experts get half of the memory that is left; buffers and the page cache get the rest.
            options = {"expert_cache_gb": max(0, nbytes - others) / 2e9}
        arguments = peer, str(file), *text, seconds, options
        made, done = limit.call(sample_here, *arguments, what=given, nbytes=nbytes)
        told |= {"peer": given, "file_nbytes": sum(p.stat().st_size for p in parts)}
        return (made or {}) | told | {"limited_by": done.how, "killed": done.killed}

    variants = {
        f"{given}, {memory}{name}": partial(run, given, text, nbytes)
        for nbytes, (name, text), given in product(limits, texts.items(), ways)
        for memory in [f"{nbytes / 1e6:.0f} MB" if nbytes else "no limit"]
    }
    settings = {"model": path.name, "tokens": tokens, "warmup_tokens": warmup, "most_s": seconds}
    pinned = dict(packages[0].split("==") for packages in PACKAGES.values())
    settings |= {"versions": pinned | {MLX_LM: card()[MLX_LM]}}
    settings |= {"feed": feed, "cache_state": "cold"}
    return records.interleave("against", variants, runs, settings, 0)


def files(path, names):
    """Return each peer's files of a checkpoint; write them under ``build/peers`` if missing."""
    if missing := [name for name in names if not is_built(name)]:
        raise OSError(f"{', '.join(missing)}: not under build/peers. Run make peers first.")
    out = WORK / "files" / path.name
    out.mkdir(parents=True, exist_ok=True)
    made = {LLAMA_CPP: out / "model.gguf", MLX_VLM: out / "mlx-vlm"}
    if LLAMA_CPP in names and not made[LLAMA_CPP].exists():
        to_gguf.write(path, made[LLAMA_CPP])
    if MLX_VLM in names and not made[MLX_VLM].exists():
        _write_mlx_vlm(path, made[MLX_VLM])
    return made | {MLX_LM: path, MOELAB: path}


def _write_mlx_vlm(path, out):
    """Write mlx-vlm's folder, with the model_type of the model without a vision tower."""
    config = json.loads((path / "config.json").read_text())
    own = {"model_type": f"{config['model_type']}_text", "quantization": config["quantization"]}
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        source, partial = Path(temporary, "source"), Path(temporary, "out")
        source.mkdir()
        for file in path.glob("*.*"):
            (source / file.name).symlink_to(file.resolve())
        (source / "config.json").unlink()
        (source / "config.json").write_text(json.dumps(config["text_config"] | own))
        words = ["mlx_vlm.moe_offload", "--build", str(source), "--out", str(partial)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(WORK)])}
        subprocess.run([sys.executable, "-m", *words], env=environment, check=True)
        partial.rename(out)


def main(work, out="", path="", text="", runs=0, *words):
    if work == "install":
        return install()
    counts, limits, ways = {}, [], []
    for word in words:
        name, equals, value = word.partition("=")
        if word.split("/")[0] in NAMES:
            ways.append(word)
        elif equals:
            counts[name] = value if name == "repacked" else int(value)
        else:
            limits.append(int(word) * 1_000_000 or None)
    if text.replace(",", "").isdigit():
        text = [int(n) for n in text.split(",")]
    made = against(path, text, limits or [None], int(runs), ways=ways or NAMES, **counts)
    column = "tok_s" if isinstance(text, str) else "prefill_s"
    records.print_and_save(records.group(made, column).round(2).to_string(), made, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
