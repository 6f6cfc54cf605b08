"""Record when the host, the reading threads and each layer's experts are at work in a token.

    python -m moelab.lab timeline OUT.json MODEL resident,fused SLOTS warm

On CUDA each streamed mode is also measured with experts read into unified memory, not copied by the
GPU. The host sees only how long it waits for the GPU, not what the GPU does.
"""

import os
import threading
import unittest.mock
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, load
from ...kernels.code import Kernel
from ...streaming import cuda
from ...streaming.reading.ranges import Ranges
from ...streaming.reading.reader import Reader
from ...streaming.reading.uploading import UploadingReader
from ...streaming.residency.residency import Residency
from ...streaming.session import Session
from .. import machine, records
from ..arguments import parse_modes
from ..models import folder
from ..texts import PROMPTS

if TYPE_CHECKING:
    from pandas import DataFrame

# Keys: what a thread does. Values: the column of the seconds in which the host does this.
HOST = {
    "arithmetic": "arithmetic_s",  # moelab's kernels, which compute in the host's thread
    "waiting for MLX": "mlx_s",  # routing and tokens that MLX computes, on a CPU or a GPU
    "reading": "read_here_s",  # reads in the host's own thread
    "waiting for reads": "wait_s",
    "beginning reads": "begin_s",
    "scheduling": "schedule_s",  # handing operations to MLX
    "Python": "python_s",
}
ARITHMETIC, MLX, READING, WAITING, BEGINNING, SCHEDULING, PYTHON = HOST
# A call gets a span only in these outer calls (None: in no call). A kernel that a read calls
# counts as reading.
OUTER = {ARITHMETIC: (PYTHON,), MLX: (PYTHON,), READING: (None, PYTHON, BEGINNING)}
CALLS = {  # the engine's calls that are noted
    ARITHMETIC: [(Kernel, "__call__")],
    MLX: [(mx, "eval"), (Session, "routing")],
    SCHEDULING: [(mx, "async_eval")],
    READING: [(Ranges, "read"), (Reader, "read_here"), (UploadingReader, "_read_piece")],
    BEGINNING: [(Reader, "start"), (UploadingReader, "start")],
    WAITING: [(Reader, "finish"), (UploadingReader, "finish")],
    None: [(Residency, "bring")],  # a layer's experts, in a lane of their own
}
WARMUP = 4  # tokens


class Clock:
    """Records in ``spans`` what threads do; an inner call interrupts the span of its outer call."""

    def __init__(self):
        self.spans, self._local, self._host = [], threading.local(), threading.get_ident()

    def during(self, what: str, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run ``call``, and record it as this thread's span of ``what``."""
        stack, begin = self._local.__dict__.setdefault("stack", []), perf_counter()
        outer = stack[-1][0] if stack else None
        if outer not in OUTER.get(what, (outer,)):
            return call(*args, **kwargs)  # the time counts for the outer call
        if stack:
            self._note(*stack[-1], begin)
        stack.append([what, begin])
        try:
            return call(*args, **kwargs)
        finally:
            end = perf_counter()
            self._note(*stack.pop(), end)
            if stack:
                stack[-1][1] = end

    def bring(self, call: Callable, *args: Any):
        """Run ``Residency.bring``, and record one span for all experts that it brings."""
        begin = perf_counter()
        yield from call(*args)
        self.spans.append(("experts", "a layer's experts", begin, perf_counter()))

    def _note(self, what, begin, end):
        lane = "host" if threading.get_ident() == self._host else threading.current_thread().name
        self.spans.append((lane, what, begin, end))

    def watching(self) -> ExitStack:
        """Return a context that records the engine's calls, of all models."""
        stack = ExitStack()
        for what, calls in CALLS.items():
            for owner, name in calls:
                through = self.bring if what is None else partial(self.during, what)
                noted = _calling(through, getattr(owner, name))
                stack.enter_context(unittest.mock.patch.object(owner, name, noted))
        return stack


def _calling(through, call):
    """Return a method that replaces ``call`` and calls ``through(call, ...)``."""
    return lambda *args, **kwargs: through(call, *args, **kwargs)


def measure(
    path: str | Path,
    modes: str = "resident,fused",
    base: StreamConfig | None = None,
    tokens: int = 8,
    runs: int = 5,
    cold: bool = False,
) -> "DataFrame":
    """Decode in every mode with a ``Clock``; each token is scheduled ahead, as in mlx-lm.

    A row is a run: the columns of ``HOST`` add up to ``decode_s``, and ``spans`` are those of the
    last token. ``cold`` drops the file's pages before the clock starts.
    """
    path, models = folder(path), {}
    configs = {name: (config, "1") for name, config in parse_modes(modes, base).items()}
    if cuda.available():
        streamed = {n: c for n, (c, _) in configs.items() if c.mode != "resident"}
        from_disk = {n: c for n, c in streamed.items() if c.source == "disk"}
        configs |= {f"{name}, unified memory": (c, "0") for name, c in from_disk.items()}
    settings = {"model": path.name, "tokens": tokens, "cache_state": "cold" if cold else "warm"}
    drop = partial(machine.drop_pages, path) if cold else None
    with ExitStack() as stack:
        for name, (config, copies) in configs.items():
            with unittest.mock.patch.dict(os.environ, MOELAB_CUDA_COPIES=copies):
                model, tokenizer = load(path, config)
            models[name] = stack.enter_context(model)
        ids = tokenizer.encode(PROMPTS[0])
        return records.interleave(
            "timeline",
            {n: lambda i, m=m: _sample(m, ids, tokens, drop) for n, m in models.items()},
            runs,
            settings,
        )


def _sample(model, ids, tokens, drop):
    """Time a run; return its columns."""
    clock, cache, begin = Clock(), make_prompt_cache(model), 0.0

    def step(y):
        y = mx.argmax(model(y[None], cache=cache)[:, -1], axis=-1)
        mx.async_eval(y)
        return y

    def decode(y, n):
        """Decode n + 1 tokens; read a token only after the next was scheduled."""
        nonlocal begin
        out = []
        for _ in range(n):
            begin = perf_counter()
            y, before = clock.during(PYTHON, step, y), y
            out.append(clock.during(MLX, before.item))
        return [*out, clock.during(MLX, y.item)]

    with mx.stream(generation_stream):
        *_, last = decode(step(mx.array(ids)), WARMUP)
        if drop:
            drop()
        clock.spans.clear()
        with clock.watching():
            first = perf_counter()
            text = decode(mx.array([last]), tokens)
            decode_s = perf_counter() - first
    spent, readers_s = dict.fromkeys(HOST.values(), 0.0), 0.0
    for lane, what, a, b in clock.spans:
        if lane == "host":
            spent[HOST[what]] += b - a
        readers_s += (b - a) * lane.startswith("moelab-")
    spent[HOST[PYTHON]] += decode_s - sum(spent.values())
    last = [
        (*of, round(a - begin, 7), round(b - begin, 7)) for *of, a, b in clock.spans if a >= begin
    ]
    timed = {"tokens": text, "decode_tokens": tokens, "decode_s": decode_s}
    return timed | spent | {"readers_s": readers_s, "spans": last}


def spans(samples: "DataFrame", round_: int = 0) -> "DataFrame":
    """Tabulate the last token's spans of one round for ``charts.timeline``."""
    rows = [
        {"variant": row.variant, "lane": lane, "what": what, "begin_s": begin, "end_s": end}
        for row in samples[samples["round"] == round_].itertuples()
        for lane, what, begin, end in row.spans
    ]
    threads = sorted({row["lane"] for row in rows} - {"host", "experts"})
    names = {thread: f"reader {i + 1}" for i, thread in enumerate(threads)}
    out = records.table(samples.attrs | {"rows": rows}).sort_values("lane")
    return out.assign(lane=out.lane.replace(names))


def main(out: str, path: str, modes: str, slots: str, cache: str) -> None:
    """Measure with a ``warm`` or ``cold`` page cache and save the record."""
    if cache not in ("warm", "cold"):
        raise ValueError(f"expected warm or cold, got {cache!r}")
    base = StreamConfig(slots=int(slots), prefetch="none")
    samples = measure(path, modes, base, tokens=16, runs=10, cold=cache == "cold")
    shares = samples[[*HOST.values()]].div(samples.decode_s, axis=0).groupby(samples.variant)
    records.print_and_save(f"Shares of a token:\n{shares.median().round(2)}", samples, out)
