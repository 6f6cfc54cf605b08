"""Attention on a CPU in float32, in place of mlx-lm's ``scaled_dot_product_attention``.

MLX computes attention by two products of a BLAS (in its Linux packages the reference BLAS). Here
values are added key after key, and a masked key adds exactly 0 to a query that sees any other key.
So, if the cache holds the keys in order, a token's result does not depend on how a text is divided
into passes. A full rotating cache (gpt_oss, afmoe) reorders keys: then the result depends on it.

A sum over n keys may overflow if a value exceeds float32's largest number / n. A score may
overflow, too. The result is then inf or NaN, where MLX's result may be finite.
"""

from collections.abc import Callable
from itertools import product

import mlx.core as mx
import numpy as np

from . import code, quantized, team
from .code import F32, I32, I64, Code, address, ir, to_mlx
from .rowwise import NUMBER_WORK

# The most scores in memory at once (or one row, if it has more): a core's cache holds so many.
SCORES = 2**17


def eager_attention(of_mlx_lm: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return mlx-lm's ``scaled_dot_product_attention``, computed at once, not lazily."""

    def call(queries, keys, values, cache, scale, mask, sinks=None):
        arrays = [a for a in (queries, keys, values, sinks) if a is not None]
        arrays += [mask] if isinstance(mask, mx.array) and mask.dtype != mx.bool_ else []
        if (
            hasattr(cache, "bits")
            or any(a.dtype != mx.float32 for a in arrays)
            or mx.default_device() != mx.cpu
            or queries.shape[-1] % 4
            or values.shape[-1] % 4
            or not (queries.size and keys.size)
            or not agree(queries, keys, values, mask, sinks)
        ):
            return of_mlx_lm(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
            )
        mx.eval(queries, keys, values)
        given = queries, keys, values, scale, mask, sinks
        return to_mlx(attend(*(np.asarray(a) if isinstance(a, mx.array) else a for a in given)))

    return call


def agree(q, k, v, mask=None, sinks=None) -> bool:
    """Whether the shapes of queries, keys, values and sinks fit each other."""
    (B, H, Tq, D), Tk = q.shape, k.shape[2]
    return (
        k.shape == (B, k.shape[1], Tk, D)
        and v.shape == (*k.shape[:3], v.shape[3])
        and H % k.shape[1] == 0
        and (Tk >= Tq or not isinstance(mask, str))
        and (sinks is None or sinks.size == H)
    )


@np.errstate(over="ignore", invalid="ignore")  # results may be inf or NaN, as in MLX
def attend(q, k, v, scale: float, mask=None, sinks=None) -> np.ndarray:
    """Compute ``mx.fast.scaled_dot_product_attention`` in float32: ``[B, H, Tq, Dv]``.

    Shapes: q ``[B, H, Tq, D]``; k ``[B, Hk, Tk, D]``; v ``[B, Hk, Tk, Dv]``; a mask array
    broadcasts to ``[B, H, Tq, Tk]``. Sinks ``[H]`` are scores without a value.
    """
    q = np.ascontiguousarray(q * np.float32(scale))
    k, v = code.in_rows(k), code.in_rows(v)
    (B, H, Tq, D), (Hk, Tk, Dv) = q.shape, v.shape[1:]
    G = H // Hk  # heads of queries that share one head of keys; a row is a query of one head
    q, y = q.reshape(B, Hk, G * Tq, D), np.empty((B, Hk, G * Tq, Dv), np.float32)
    if isinstance(mask, np.ndarray):
        mask = np.broadcast_to(mask, (B, H, Tq, Tk))  # a view
    if sinks is not None:
        sinks = np.repeat(sinks.reshape(Hk, G), Tq, axis=1)
    scores_of = quantized.kernel("float", 32, 1, D)
    soften = code.kernel_of(_Softmax, code.widest())
    add_up = code.kernel_of(_AddUp, code.lanes(Dv), Dv)
    step = min(max(1, SCORES // Tk), G * Tq)
    numbers = np.arange(step)
    at = address(numbers)
    for b, h, first in product(range(B), range(Hk), range(0, G * Tq, step)):
        # Compute query rows ``[first:end]`` of the heads that share key head h.
        end = min(first + step, G * Tq)
        n, keys, seen = end - first, Tk, 0
        if isinstance(mask, str):
            # How many keys the first query sees. Each next query sees one key more.
            seen, last = Tk - Tq + 1, (end - 1) % Tq
            keys = seen + last if last >= first % Tq and n <= Tq else Tk
        s = np.empty((n, keys), np.float32)
        task = np.zeros(quantized.TASK, np.int64)
        task[[0, 3, 5]] = address(k[b, h]), address(q[b, h, first:]), address(s)
        task[6:] = at, at, n, keys, keys  # row numbers, then counts (see ``quantized.TASK``)
        work = s.size * D
        team.run(scores_of, task, 1, pieces=team.pieces(work, keys // 2))
        if isinstance(mask, np.ndarray):
            head, query = np.divmod(np.arange(first, end), Tq)
            of_rows = mask[b, h * G + head, query]
            if mask.dtype == bool:
                s[~of_rows] = np.finfo(np.float32).min
            else:
                s += of_rows
        sums = np.full(n, -np.inf, np.float32) if sinks is None else sinks[h, first:end].copy()
        pieces = team.pieces(NUMBER_WORK * s.size, n)
        team.run(soften, s, sums, n, keys, seen, first, Tq, pieces=pieces)
        pieces = team.pieces(work, -(-n // max(quantized.ROWS)))
        team.run(add_up, s, v[b, h], sums, y[b, h, first:], n, keys, pieces=pieces)
    return y.reshape(B, H, Tq, Dv)


class _Softmax(Code):
    """Turns scores into softmax weights that are not yet divided by their sum.

    ``sums`` has each row's sink (a score without a value) or -inf; the sink's weight replaces it.
    If ``seen`` is not 0, query t of Tq sees the first ``seen + t`` keys.
    """

    def write(self, scores, sums, /, rows, keys, seen, first, Tq):
        b = self.b

        def larger(one, other):
            return b.select(b.fcmp_ordered(">", one, other), one, other)

        with self.loop(*self.share(rows)) as i:
            more = self.add(seen, b.urem(self.add(first, i), Tq))
            num = b.select(b.icmp_unsigned("!=", seen, I64(0)), more, keys)
            num = b.select(b.icmp_signed("<", num, keys), num, keys)
            of_places = [self.all("-inf")]
            with self.loop(0, num, self.L, of_places) as j:
                of_places[0] = larger(self.load(scores, self.place(i, keys, j)), of_places[0])
            most = [self.load(sums, i, F32)]
            for n in range(self.L):
                most[0] = larger(b.extract_element(of_places[0], I32(n)), most[0])
            with self.loop(j, num, values=most) as j:
                most[0] = larger(self.load(scores, self.place(i, keys, j), F32), most[0])
            most = self.spread(most[0])
            with self.loop(0, num, self.L) as j:
                at = self.place(i, keys, j)
                self.store(self.exp(b.fsub(self.load(scores, at), most)), scores, at)
            with self.loop(j, num) as j:
                at = self.place(i, keys, j)
                v = self.spread(self.load(scores, at, F32))
                self.store(self.first(self.exp(b.fsub(v, most))), scores, at)
            with self.loop(num, keys) as j:
                self.store(ir.Constant(F32, 0.0), scores, self.place(i, keys, j))
            none = self.spread(self.load(sums, i, F32))
            self.store(self.first(self.exp(b.fsub(none, most))), sums, i)


class _AddUp(Code):
    """Writes weighted means y ``[rows, Dv]`` of the values; ``sums`` has the weights of sinks."""

    form = "Dv"

    def write(self, weights, values, sums, y, /, n, keys):
        size = self.L * 4  # how many of a value's Dv numbers are added up side by side
        for rows in self.in_groups(*self.share(n), quantized.ROWS):
            totals = [self.spread(self.load(sums, row, F32)) for row in rows]
            for first in range(0, self.Dv, size):
                places = range(first, min(first + size, self.Dv), self.L)
                held = [self.all(0)] * (len(rows) * len(places)) + ([] if first else totals)
                with self.loop(0, keys, values=held) as t:
                    vs = [self.load(values, self.place(t, self.Dv, p)) for p in places]
                    for i, row in enumerate(rows):
                        w = self.spread(self.load(weights, self.place(row, keys, t), F32))
                        for c, x in enumerate(vs, i * len(vs)):
                            held[c] = self.fma(w, x, held[c])
                        if not first:
                            c = len(rows) * len(vs) + i
                            held[c] = self.b.fadd(held[c], w)
                if not first:
                    totals = held[-len(rows) :]
                for i, row in enumerate(rows):
                    for c, p in enumerate(places, i * len(places)):
                        mean = self.b.fdiv(held[c], totals[i])
                        self.store(mean, y, self.place(row, self.Dv, p))
