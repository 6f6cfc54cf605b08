"""What people use instead of moelab: fetched from PyPI into a folder of its own, and run.

    python -m moelab.lab peers install            fetches and builds them, under build/peers
    python -m moelab.lab peers same OUT.json      tiny-moe's greedy texts, written by each

Each peer runs in a process of its own, which alone imports it. llama.cpp maps a GGUF file of the
same weights into memory; ``lab.gguf`` writes it. mlx-vlm reads experts from a folder that it writes
itself (``mlx_vlm.moe_offload``), and keeps those that it used last.

Built with CUDA, llama.cpp crashed in a process that had loaded MLX: each brings parts of the C++
library. With ``LD_PRELOAD=libstdc++.so.6`` in the environment both take the system's.
"""

import ctypes
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from .. import DATA, StreamConfig, load
from ..shipped import shipped
from . import gguf, limit, records
from .arguments import parse_modes
from .decode import read_all_but_last, same_tokens
from .machine import card
from .texts import spaced_prompts

if TYPE_CHECKING:
    from pandas import DataFrame

WORK = DATA.parent / "build" / "peers"
LLAMA_CPP, MLX_VLM, MLX_LM, MOELAB = "llama.cpp", "mlx-vlm", "mlx-lm", "moelab"
# What pip installs for each peer. Other dependencies are in moelab's own environment.
PACKAGES = {
    LLAMA_CPP: ("llama-cpp-python==0.3.36", "diskcache==5.6.3"),
    MLX_VLM: ("mlx-vlm==0.7.10",),
}
NAMES = (MOELAB, MLX_LM, *PACKAGES)
LEFT_OUT = ("TESTS", "EXAMPLES", "TOOLS", "SERVER", "APP")  # of llama.cpp's build
BUILD = ["-DGGML_NATIVE=ON", "-DLLAVA_BUILD=OFF", "-DLLAMA_OPENSSL=OFF"]
BUILD += [f"-DLLAMA_BUILD_{part}=OFF" for part in LEFT_OUT]
SLOTS = 16  # slots of moelab's texts
EXPERTS = rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # the names of tensors in a GGUF file


def install(progress: bool = True) -> None:
    """Fetch and build the peers that are not there yet."""
    cuda = ["-DGGML_CUDA=ON"] if card()["backend"] == "CUDA" else []
    environment = os.environ | {"CMAKE_ARGS": " ".join(BUILD + cuda)}
    for name, packages in PACKAGES.items():
        if all(map(installed, packages)):
            print(f"{name}: there, {', '.join(packages)}")
            continue
        begin = time.monotonic()
        words = ["pip", "install", "--no-deps", "--upgrade", "--disable-pip-version-check"]
        words += [] if progress else ["--quiet"]
        words += ["--target", str(WORK), "--no-binary", "llama-cpp-python", *packages]
        if subprocess.run([sys.executable, "-m", *words], env=environment).returncode:
            raise OSError(
                f"{name}: pip could not install {' '.join(packages)}; see its lines above. It "
                "needs PyPI, and a C++ compiler for llama.cpp."
            )
        print(f"{name}: {', '.join(packages)}, {(time.monotonic() - begin) / 60:.1f} min")


def installed(package: str) -> bool:
    """Whether ``build/peers`` has a package, given as ``NAME==VERSION``."""
    name, _, version = package.partition("==")
    found = importlib.metadata.distributions(name=name, path=[str(WORK)])
    return version in [each.version for each in found]


def built() -> list[str]:
    """The peers that can be run here: what ``install`` installed, and what comes with moelab."""
    return [name for name in NAMES if _is_built(name)]


def _is_built(name):
    return all(map(installed, PACKAGES.get(name, ())))


def way(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a peer's name and the options of ``opened`` after it, a slash before each.

    ``moelab/source=host/slots=16`` sets fields of ``StreamConfig``. ``llama.cpp/experts=cpu``: on a
    GPU llama.cpp keeps experts in the host's memory and computes them on the CPU, as its
    ``--n-cpu-moe`` does.
    """
    peer, *settings = text.split("/")
    if peer not in NAMES:
        raise ValueError(f"expected a peer ({', '.join(NAMES)}), got {text!r}")
    if peer == LLAMA_CPP and settings == ["experts=cpu"]:
        return peer, {"experts_on_cpu": True}
    if peer == MOELAB and settings:
        (config,) = parse_modes("/".join(("fused", *settings))).values()
        names = [each.partition("=")[0] for each in settings]
        return peer, {name: getattr(config, name) for name in names}
    if settings:
        raise ValueError(f"{text!r}: {peer} has no such option")
    return peer, {}


# In a process of its own


# Reads further tokens of a text and returns the logits [V] of the token that follows them.
Read = Callable[[Sequence[int]], np.ndarray]


def opened(peer: str, path: str, context: int, **options: Any) -> Callable[[], Read]:
    """Load a peer's model and return a function that begins a text and returns its ``Read``.

    ``path`` is a GGUF file, mlx-vlm's folder or the checkpoint. ``options`` are those of
    ``mlx_vlm.load``, of ``StreamConfig``, or llama.cpp's ``experts_on_cpu``.
    """
    sys.path.append(str(WORK))  # behind moelab's environment, whose packages come first
    if peer == LLAMA_CPP:
        return _llama(path, context, **options)
    if peer == MLX_VLM:
        import mlx_vlm

        model = mlx_vlm.load(path, **options)[0].language_model
        if mx.default_device() == mx.cpu:
            model.set_dtype(mx.float32)  # like other peers; half precision is far slower there
    else:
        resident = {"mode": "resident", "kernels": "mlx"}  # mlx-lm's model and MLX's kernels
        streamed = {"slots": SLOTS, "context": context} | options
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

    # llama.cpp may not copy weights into layouts for some instructions: with those for AMX it
    # crashed, and where memory is short the system can drop pages of the file, but no copies.
    model_params = c.llama_model_default_params()
    model_params.use_extra_bufts = False
    if experts_on_cpu:
        libggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
        overrides = (_Override * 2)((EXPERTS, libggml.ggml_backend_cpu_buffer_type()))  # and an end
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


def texts_here(peer: str, path: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Write a peer's greedy text behind each prompt, in this (new) process."""
    begin = opened(peer, path, max(map(len, prompts)) + tokens)
    out = []
    for ids in prompts:
        read, text = begin(), []
        for _ in range(tokens):
            text.append(int(read(text[-1:] or ids).argmax()))
        out.append(text)
    return out


# The same model?


def same(prompts: int = 20, tokens: int = 100, length: int = 64) -> "DataFrame":
    """Compare greedy texts of tiny-moe by each peer with mlx-lm's.

    llama.cpp rounds activations to 8 bits, so its text parts from mlx-lm's where two tokens are
    nearly as likely: ``gap`` is their distance in standard deviations of the logits.
    """
    path = shipped("models", "tiny-moe")
    texts = spaced_prompts(path, "code", length, prompts)
    settings = {"model": path.name, "prompt_tokens": length, "tokens": tokens}
    running = records.Running("peers same", settings | {"versions": versions()})
    read = files(path)
    made = {
        peer: limit.call(texts_here, peer, str(read[peer]), texts, tokens, what=peer)[0]
        for peer in (MLX_LM, MOELAB, LLAMA_CPP, MLX_VLM)
    }
    begin, rows = opened(MLX_LM, str(path), length + tokens), []
    for peer, written in made.items():
        for i, (ids, text, theirs) in enumerate(zip(texts, made[MLX_LM], written)):
            n = same_tokens(text, theirs)
            row = {"variant": peer, "round": i, "tokens": theirs, "same_tokens": n}
            if n < tokens:
                logits = begin()([*ids, *text[:n]])
                row["gap"] = float((logits[text[n]] - logits[theirs[n]]) / logits.std())
            rows.append(row)
    return running.table(rows)


def versions() -> dict[str, str]:
    """The versions of all peers."""
    pinned = [package.split("==") for names in PACKAGES.values() for package in names[:1]]
    return dict(pinned) | {MLX_LM: card()[MLX_LM]}


def files(path: Path, names: Sequence[str] = tuple(PACKAGES)) -> dict[str, Path]:
    """The files that each peer reads for a checkpoint, written under ``build/peers`` if missing."""
    for name in names:
        if not _is_built(name):
            raise OSError(
                f"{name}: expected it under build/peers, found none. Run make peers first."
            )
    out = WORK / "files" / path.name
    out.mkdir(parents=True, exist_ok=True)
    made = {LLAMA_CPP: out / "model.gguf", MLX_VLM: out / "mlx-vlm"}
    if LLAMA_CPP in names and not made[LLAMA_CPP].exists():
        gguf.write(path, made[LLAMA_CPP])
    if MLX_VLM in names and not made[MLX_VLM].exists():
        _write_mlx_vlm(path, made[MLX_VLM])
    return made | {MLX_LM: path, MOELAB: path}


def _write_mlx_vlm(path, out):
    """Write mlx-vlm's folder, whose other model_type stands for the model without vision tower."""
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
        done = subprocess.run(
            [sys.executable, "-m", *words], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"{path}: mlx-vlm could not write its folder: {done.stderr[-2000:]}")
        partial.rename(out)


def report(samples: "DataFrame") -> str:
    """Write how many texts are the same as mlx-lm's."""
    total = samples.attrs["settings"]["tokens"]
    lines = []
    for peer, rows in samples.groupby("variant", sort=False):
        apart = rows[rows.same_tokens < total]
        told = f"{peer:10} {len(rows) - len(apart)} of {len(rows)} texts of {total} tokens the same"
        if len(apart):
            told += f"; first differences where the gap is {apart.gap.median():.3f} deviations"
            told += f" (at most {apart.gap.max():.3f})"
        lines.append(told)
    return "\n".join(lines)


def main(work: str, *out: str) -> None:
    """Install the peers, or write the record of ``same``."""
    if work == "install" and not out:
        install()
    elif work == "same" and len(out) == 1:
        made = same()
        records.print_and_save(report(made), made, out[0])
    else:
        raise ValueError(f"expected install, or same OUT, got {' '.join((work, *out))}")
