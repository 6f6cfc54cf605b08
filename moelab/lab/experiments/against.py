"""moelab beside what people use instead: the same weights, text and memory limit.

    python -m moelab.lab against OUT.json MODEL TRACE RUNS [MB ...]    (``make peers`` comes first)

All take turns in rounds of random order, each run in a process of its own whose file is dropped
from the page cache before. MB are memory limits of the process, page cache included (Linux); 0, the
default, is none. The text is a trace's: all read the same tokens.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ... import StreamConfig
from .. import limit, oscache, peers, records
from ..models import folder
from . import bench

if TYPE_CHECKING:
    from pandas import DataFrame

CONTEXT = 512  # tokens that moelab leaves room for
# Of the memory that mlx-vlm has for experts: the rest is for its buffers and the page cache.
CACHE_SHARE = 0.5
OURS = {  # in moelab's own loop
    peers.MOELAB: StreamConfig(slots="auto", context=CONTEXT),
    peers.MLX_LM: StreamConfig(mode="resident", kernels="mlx"),
}


def sample_here(
    peer: str, path: str, ids: list[int], feed: list[int], warmup: int, options: dict[str, Any]
) -> dict[str, Any]:
    """In a process of its own: the columns of one run of llama.cpp or mlx-vlm.

    Args:
        peer (str): Its name.
        path (str): What it reads.
        ids (list[int]): The prompt.
        feed (list[int]): Tokens to read behind it; those behind the first ``warmup`` are timed.
        warmup (int): How many are read before the clock starts.
        options (dict): As of ``peers.opened``.
    """
    read = peers.opened(peer, path, len(ids) + len(feed) + 1, **options)()
    begin = time.perf_counter()
    tokens, step_s, disk = [int(read(ids).argmax())], [], []
    prefill_s = time.perf_counter() - begin
    for i, token in enumerate(feed):
        if i == warmup:
            disk.append(oscache.disk_read_nbytes())
        begin = time.perf_counter()
        tokens.append(int(read([token]).argmax()))
        step_s.append(time.perf_counter() - begin)
    disk.append(oscache.disk_read_nbytes())
    return {
        "prompt_tokens": len(ids),
        "tokens": tokens,
        "prefill_s": prefill_s,
        "decode_tokens": len(feed) - warmup,
        "decode_s": sum(step_s[warmup:]),
        "step_s": step_s[warmup:],
        **({} if None in disk else {"disk_nbytes": disk[1] - disk[0]}),
        "rss_end_nbytes": psutil.Process().memory_info().rss,
    }


def against(
    path: str | Path,
    feed: str | Path,
    limits: Sequence[int | None] = (None,),
    runs: int = 5,
    tokens: int = 48,
    warmup: int = 48,
    names: Sequence[str] = (*OURS, *peers.PACKAGES),
    progress: bool = True,
) -> "DataFrame":
    """Decode one text with each of them under each limit.

    Args:
        path (str or Path): The checkpoint.
        feed (str or Path): A trace's file: its prompt, and the tokens behind it.
        limits (Sequence): Bytes of each run's process, page cache included; None for no limit.
        runs (int): Rounds.
        tokens, warmup (int): Tokens that are timed, and read before them.
        names (Sequence[str]): Of the peers.
        progress (bool): Show a bar.

    Returns:
        DataFrame: A row a run: ``variant``, ``peer``, ``limit_nbytes``, ``file_nbytes`` (of what it
        reads), ``prompt_tokens``, ``tokens``, ``prefill_s``, ``decode_tokens``, ``decode_s``,
        ``step_s``, ``disk_nbytes``, ``rss_end_nbytes``, ``limited_by``, ``killed``; of moelab and
        mlx-lm also the columns of ``bench.measure``.

    Raises:
        ValueError: If a trace is too short to feed or of another vocabulary.
        limit.NoLimit: If memory cannot be limited here.
        OSError: If a run failed, and not because it was killed.
    """
    path = folder(path)
    ids, fed = bench.texts_of(feed, warmup + tokens, path)
    files = peers.files(path, names)

    def run(peer, nbytes, i):
        for file in _parts(files[peer]):
            oscache.drop_pages(file)
        if peer in OURS:
            variant = bench.Variant(OURS[peer].resolved(), limit_nbytes=nbytes)
            made = bench.sample_alone(path, peer, variant, None, tokens, warmup, str(feed), 0.0, i)
        else:
            file, options = files[peer], {}
            if peer == peers.MLX_VLM and nbytes:
                options = {"expert_cache_gb": _cache_nbytes(file, nbytes) / 1e9}
            text = str(file), ids, fed, warmup, options
            made, done = limit.call(sample_here, peer, *text, what=peer, nbytes=nbytes)
            made = (made or {}) | {"limited_by": done.how, "killed": done.killed}
        told = {"limit_nbytes": nbytes} if nbytes else {}
        return made | {"peer": peer, "file_nbytes": _nbytes(files[peer])} | told

    variants = {
        f"{peer}, {f'{nbytes / 1e6:.0f} MB' if nbytes else 'no limit'}": partial(run, peer, nbytes)
        for nbytes in limits
        for peer in names
    }
    settings = {"model": path.name, "tokens": tokens, "warmup_tokens": warmup}
    settings |= {"feed": Path(feed).name, "cache_state": "cold", "versions": peers.versions()}
    return records.interleave("against", variants, runs, settings, 0, progress=progress)


def _parts(path):
    """A file, or the tensors' files below a folder."""
    return [path] if path.is_file() else sorted(path.rglob("*.safetensors"))


def _nbytes(path):
    return sum(file.stat().st_size for file in _parts(path))


def _cache_nbytes(file, nbytes):
    """The bytes of experts that mlx-vlm may keep under a limit."""
    others = sum(p.stat().st_size for p in file.glob("*.safetensors"))
    return max(0, int((nbytes - others) * CACHE_SHARE))


def main(out: str, model: str, trace: str, runs: str, *limits: str) -> None:
    """Write the record.

    Args:
        out (str): The record.
        model (str): The checkpoint's folder.
        trace (str): The trace's file.
        runs (str): How many rounds.
        limits (str): In MB; 0 for none.

    Raises:
        ValueError: If a number is none, or as ``against`` raises it.
    """
    if not all(word.isdigit() for word in (runs, *limits)):
        raise ValueError(f"expected RUNS and MB as numbers, got {' '.join((runs, *limits))}")
    given = [int(word) * 1_000_000 or None for word in limits] or [None]
    made = against(model, trace, given, int(runs))
    records.print_and_save(records.group(made, "tok_s").round(2).to_string(), made, out)
