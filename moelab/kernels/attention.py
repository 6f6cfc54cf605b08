"""Attention on a CPU: float32, for mlx-lm's ``scaled_dot_product_attention``.

MLX's own is two products of its BLAS, which in its Linux packages is the reference one. Here scores
come from the kernel of plain matrices, numpy takes their softmax, and a kernel adds up the values,
key after key. To a query that sees some key, one that a mask hides adds exactly nothing (finite
values), so a token's result does not depend on how a text is divided into passes while a cache
holds the keys in their order. A full rotating cache (gpt_oss, afmoe) does not: there, passes of
other lengths round differently.

Values are divided by the sum of the weights at the end: a mean of n values is inf or NaN where they
are above float32's largest number / n, with MLX's above that number. Scores that overflow (a query
times a key above 3e38) are inf or NaN in other places than with MLX.
"""

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..hooks import call_instead
from . import code, quantized
from .code import F32, I64, Code, ir

# Scores that are in memory at once; they stay in a core's cache.
SCORES = 2**17
# Queries times keys times their size. Below this a second thread takes longer to begin.
SHARED_WORK = 2_000_000
CHUNK = 4  # vectors of a value that are added up side by side


def use(module: nn.Module) -> None:
    """Let a layer that calls mlx-lm's attention compute with this one while it is not trained.

    Args:
        module (nn.Module): Any. It is changed in place.
    """
    call_instead(module, "scaled_dot_product_attention", eager_attention, unless_trained=True)


def eager_attention(of_mlx_lm: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's ``scaled_dot_product_attention``, computed when it is called.

    Args:
        of_mlx_lm (Callable): What is called with other types, or a quantized cache.
    """

    def call(queries, keys, values, cache, scale, mask, sinks=None):
        arrays = [a for a in (queries, keys, values, sinks) if a is not None]
        arrays += [mask] if isinstance(mask, mx.array) and mask.dtype != mx.bool_ else []
        if (
            hasattr(cache, "bits")
            or any(a.dtype != mx.float32 for a in arrays)
            or mx.default_device() != mx.cpu
            or queries.shape[-1] % 4
            or values.shape[-1] % 4
            or queries.shape[1] % keys.shape[1]
            or not (queries.size and keys.size)
        ):
            return of_mlx_lm(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
            )
        return attention(queries, keys, values, scale, mask, sinks)

    return call


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """As ``mx.fast.scaled_dot_product_attention``, for float32.

    Args:
        q (mx.array): [B, H, Tq, D].
        k (mx.array): [B, Hk, Tk, D].
        v (mx.array): [B, Hk, Tk, Dv].
        scale (float): Of the scores.
        mask (mx.array, str or None): ``causal``, or what broadcasts to [B, H, Tq, Tk]: bool, or
            float32 that is added.
        sinks (mx.array or None): [H], a score of each head without a value.

    Returns:
        mx.array: [B, H, Tq, Dv], evaluated.
    """
    mx.eval(q, k, v)
    q = np.ascontiguousarray(np.asarray(q) * np.float32(scale))
    k, v = (_in_rows(np.asarray(a)) for a in (k, v))
    (B, H, Tq, D), (Hk, Tk, Dv) = q.shape, v.shape[1:]
    G = H // Hk  # heads that share keys; a row is a query of one of them
    q, y = q.reshape(B, Hk, G * Tq, D), np.empty((B, Hk, G * Tq, Dv), np.float32)
    if isinstance(mask, mx.array):
        mask = np.broadcast_to(np.asarray(mask), (B, H, Tq, Tk))  # a view
    if sinks is not None:
        sinks = np.repeat(np.asarray(sinks).reshape(Hk, G), Tq, axis=1)
    scores_of = quantized.kernel("float", 32, 1, D, quantized.lanes(32, D))
    add_up = _kernel(Dv)

    def block(b, h, first, end):
        """The rows ``first`` to ``end`` of one head of keys."""
        n, hidden, keys = end - first, None, Tk
        head, query = np.divmod(np.arange(first, end), Tq)
        if isinstance(mask, str):
            last = Tk - Tq + query  # the last key that each row sees
            keys = last.max() + 1
            hidden = np.arange(keys) > last[:, None]
        s = np.empty((n, keys), np.float32)
        task = np.zeros(quantized.TASK, np.int64)
        task[[0, 3, 5]] = [a.ctypes.data for a in (k[b, h], q[b, h, first:], s)]
        task[6:] = each, each, n, keys  # rows in their order
        scores_of(task.ctypes.data, 1, keys)
        if isinstance(mask, np.ndarray) and mask.dtype == bool:
            hidden = ~mask[b, h * G + head, query]
        elif isinstance(mask, np.ndarray):
            s += mask[b, h * G + head, query]
        if hidden is not None:
            s[hidden] = np.finfo(np.float32).min
        most, sums = s.max(1), np.zeros(n, np.float32)
        if sinks is not None:
            most = np.maximum(most, sinks[h, first:end])
            sums = np.exp(sinks[h, first:end] - most)
        s -= most[:, None]
        np.exp(s, out=s)
        addresses = s.ctypes.data, v[b, h].ctypes.data, sums.ctypes.data
        add_up(*addresses, y[b, h, first:].ctypes.data, n, keys)

    step = min(max(1, SCORES // Tk), G * Tq)
    # Kept until the end: another thread may put its own in the cache's place.
    _kept, each = quantized.in_order(step)
    starts = range(0, G * Tq, step)
    blocks = [(b, h, i, min(i + step, G * Tq)) for b in range(B) for h in range(Hk) for i in starts]
    n = code.num_threads() if q.size * Tk >= SHARED_WORK else 1

    def run(i):
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN go on, as in MLX
            for one in blocks[i::n]:
                block(*one)

    code.share(run, list(range(n)))
    return mx.array(y.reshape(B, H, Tq, Dv))


def _in_rows(a):
    """``[..., T, D]`` with the rows of a head one after the other."""
    rows = a.strides[-2:] == (a.itemsize * a.shape[-1], a.itemsize)
    return a if rows else np.ascontiguousarray(a)


@cache
def _kernel(Dv):
    return code.built(_AddUp, Dv, quantized.lanes(32, Dv))


class _AddUp(Code):
    """Writes ``run(weights, values, sums, y, rows, keys)``: weighted means of the values.

    weights is [rows, keys], values [keys, Dv], y [rows, Dv]; sums is what the sum of each row's
    weights begins with.
    """

    def __init__(self, Dv, L):
        super().__init__(6, L)
        self.Dv = Dv

    def write(self):
        *addresses, n, self.keys = self.function.args
        pointers = [self.pointer(a, F32) for a in addresses]
        row = I64(0)
        for m in quantized.ROWS:

            def rows(row, _, m=m):
                self._rows([self.add(row, i) for i in range(m)], *pointers)

            row = self.loop(row, n, m, rows)[0]

    def _rows(self, rows, weights, values, sums, y):
        zero = ir.Constant(self.floats, [0.0] * self.L)
        totals = [self.spread(self.load(sums, row, F32)) for row in rows]
        size = self.L * CHUNK
        for first in range(0, self.Dv, size):
            places = range(first, min(first + size, self.Dv), self.L)

            def key(t, held, places=places, first=first):
                held = list(held)
                at = self.mul(t, self.Dv)
                vs = [self.load(values, self.add(at, p), self.floats) for p in places]
                for i, row in enumerate(rows):
                    w = self.load(weights, self.add(self.mul(row, self.keys), t), F32)
                    w = self.spread(w)
                    for j, x in enumerate(vs):
                        c = i * len(vs) + j
                        held[c] = self.fma(w, x, held[c])
                    if not first:
                        c = len(rows) * len(vs) + i
                        held[c] = self.b.fadd(held[c], w)
                return held

            begin = [zero] * (len(rows) * len(places)) + ([] if first else totals)
            held = self.loop(I64(0), self.keys, 1, key, begin)[1]
            if not first:
                totals = held[-len(rows) :]
            for i, row in enumerate(rows):
                for j, p in enumerate(places):
                    mean = self.b.fdiv(held[i * len(places) + j], totals[i])
                    self.store(mean, y, self.add(self.mul(row, self.Dv), p))
