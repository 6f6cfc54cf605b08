"""moelab beside what people use instead: the same weights, text and memory limit.

    python -m moelab.lab against OUT.json MODEL TEXT RUNS [MB ...]    (``make peers`` comes first)

All take turns in rounds of random order, each run in a process of its own whose file is dropped
from the page cache before. TEXT is a trace's file, whose tokens all read one by one, or lengths of
prompts (``126,400,800``). MB are memory limits of the process, page cache included (Linux); 0, the
default, is none; ``1530-956`` is lowered when half of the timed tokens are read.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from .. import limit, oscache, peers, records
from ..models import folder
from ..texts import heldout_ids
from .bench import texts_of

if TYPE_CHECKING:
    from pandas import DataFrame

NAMES = (peers.MOELAB, peers.MLX_LM, *peers.PACKAGES)
# Of the memory that mlx-vlm has for experts: the rest is for its buffers and the page cache.
CACHE_SHARE = 0.5


def sample_here(
    peer: str,
    path: str,
    ids: list[int],
    feed: list[int],
    warmup: int,
    lowered_nbytes: int | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """In a process of its own: the columns of one run.

    Args:
        peer (str): Its name.
        path (str): What it reads.
        ids (list[int]): The prompt.
        feed (list[int]): Tokens to read behind it; those behind the first ``warmup`` are timed.
        warmup (int): How many are read before the clock starts.
        lowered_nbytes (int): The memory limit from half of the timed tokens on. Default: as before.
        options (dict): As of ``peers.opened``.
    """
    read = peers.opened(peer, path, len(ids) + len(feed) + 1, **options)()
    begin = time.perf_counter()
    tokens, step_s, disk = [int(read(ids).argmax())], [], []
    prefill_s = time.perf_counter() - begin
    for i, token in enumerate(feed):
        if i == warmup:
            disk.append(oscache.disk_read_nbytes())
        if lowered_nbytes and i == (warmup + len(feed)) // 2:
            limit.lower(lowered_nbytes)
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
    text: str | Path | Sequence[int],
    limits: Sequence[Sequence[int]] = ((),),
    runs: int = 5,
    tokens: int = 32,
    warmup: int = 32,
    names: Sequence[str] = NAMES,
    progress: bool = True,
) -> "DataFrame":
    """Read the same text with each of them under each limit.

    Args:
        path (str or Path): The checkpoint.
        text (str, Path or Sequence): A trace's file: its prompt, and the tokens behind it. Or
            lengths of prompts of held-out code, with one token behind each.
        limits (Sequence): Each with the bytes of a run's process, page cache included, and the
            bytes that these are lowered to, where they are; empty for no limit.
        runs (int): Rounds.
        tokens, warmup (int): Tokens of a trace that are timed, and read before them.
        names (Sequence[str]): Of the peers.
        progress (bool): Show a bar.

    Returns:
        DataFrame: A row a run: ``variant``, ``peer``, ``limit_nbytes``, ``lowered_nbytes``,
        ``file_nbytes`` (of what it reads), ``prompt_tokens``, ``tokens``, ``prefill_s``,
        ``decode_tokens``, ``decode_s``, ``step_s``, ``disk_nbytes`` (that the disk brought for the
        timed tokens), ``rss_end_nbytes``, ``limited_by``, ``killed``.

    Raises:
        ValueError: If a trace is too short to feed or of another vocabulary.
        limit.NoLimit: If memory cannot be limited here.
        OSError: If a run failed, and not because it was killed.
    """
    path = folder(path)
    if isinstance(text, str | Path):
        texts = {"": (*texts_of(text, warmup + tokens, path), warmup)}
    else:
        prompts = heldout_ids(path, text, len(text))
        texts = {f", prompt of {len(ids)}": (ids, ids[-1:], 0) for ids in prompts}
    files = peers.files(path, names)

    def run(peer, text, limits, _):
        (nbytes, lowered_nbytes), file = [*limits, None, None][:2], files[peer]
        options = {}
        for part in _parts(file):
            oscache.drop_pages(part)
        if peer == peers.MOELAB:
            options = {"slots": "auto"}
        elif peer == peers.MLX_VLM and nbytes:
            options = {"expert_cache_gb": _cache_nbytes(file, nbytes) / 1e9}
        given = peer, str(file), *text, lowered_nbytes, options
        made, done = limit.call(sample_here, *given, what=peer, nbytes=nbytes)
        told = {"peer": peer, "file_nbytes": _nbytes(file), "limited_by": done.how}
        told |= {"limit_nbytes": nbytes} if nbytes else {}
        told |= {"lowered_nbytes": lowered_nbytes} if lowered_nbytes else {}
        return (made or {}) | told | {"killed": done.killed}

    def words(nbytes):
        return " to ".join(f"{n / 1e6:.0f} MB" for n in nbytes) or "no limit"

    variants = {
        f"{peer}, {words(nbytes)}{name}": partial(run, peer, text, nbytes)
        for nbytes, (name, text), peer in product(limits, texts.items(), names)
    }
    settings = {"model": path.name, "tokens": tokens, "warmup_tokens": warmup}
    feed = Path(text).name if isinstance(text, str | Path) else None
    settings |= {"feed": feed, "cache_state": "cold", "versions": peers.versions()}
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


def main(out: str, model: str, text: str, runs: str, *limits: str) -> None:
    """Write the record.

    Args:
        out (str): The record.
        model (str): The checkpoint's folder.
        text (str): A trace's file, or lengths of prompts with commas between them.
        runs (str): How many rounds.
        limits (str): In MB; 0 for none; two with a hyphen between them: lowered on the way.

    Raises:
        ValueError: If a number is none, or as ``against`` raises it.
    """
    words = [word.split("-") for word in limits]
    if not all(word.isdigit() for word in (runs, *(n for word in words for n in word))):
        raise ValueError(f"expected RUNS and MB as numbers, got {' '.join((runs, *limits))}")
    given = [[int(n) * 1_000_000 for n in word if int(n)] for word in words] or [[]]
    lengths = text.split(",")
    read = [*map(int, lengths)] if all(word.isdigit() for word in lengths) else text
    made = against(model, read, given, int(runs))
    column = "tok_s" if read is text else "prefill_s"
    records.print_and_save(records.group(made, column).round(2).to_string(), made, out)
