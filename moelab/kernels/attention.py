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

    def block(b, h, first, end):
        """Compute the attention of query rows ``[first:end]`` of heads that share key head h."""
        n, keys, seen = end - first, Tk, 0
        if isinstance(mask, str):
            # How many keys the first query sees. Each next query sees one key more.
            seen, last = Tk - Tq + 1, (end - 1) % Tq
            keys = seen + last if last >= first % Tq and n <= Tq else Tk
        s = np.empty((n, keys), np.float32)
        task = np.zeros(quantized.TASK, np.int64)
        task[[0, 3, 5]] = address(k[b, h]), address(q[b, h, first:]), address(s)
        task[6:] = each, each, n, keys, keys  # row numbers, then counts (see ``quantized.TASK``)
        work = s.size * D
        team.run(scores_of, address(task), 1, pieces=team.pieces(work, keys // 2))
        if isinstance(mask, np.ndarray):
            head, query = np.divmod(np.arange(first, end), Tq)
            of_rows = mask[b, h * G + head, query]
            if mask.dtype == bool:
                s[~of_rows] = np.finfo(np.float32).min
            else:
                s += of_rows
        sums = np.full(n, -np.inf, np.float32) if sinks is None else sinks[h, first:end].copy()
        numbers = address(s), address(sums), n, keys, seen, first, Tq
        team.run(soften, *numbers, pieces=team.pieces(NUMBER_WORK * s.size, n))
        addresses = map(address, (s, v[b, h], sums, y[b, h, first:]))
        team.run(
            add_up, *addresses, n, keys, pieces=team.pieces(work, -(-n // max(quantized.ROWS)))
        )

    step = min(max(1, SCORES // Tk), G * Tq)
    # Keep the row numbers until the end: another thread may replace those that ``_numbers`` caches.
    _kept, each = quantized.in_order(step)
    starts = range(0, G * Tq, step)
    with np.errstate(over="ignore", invalid="ignore"):  # results may be inf or NaN, as in MLX
        for b, h, i in product(range(B), range(Hk), starts):
            block(b, h, i, min(i + step, G * Tq))
    return y.reshape(B, H, Tq, Dv)


class _Softmax(Code):
    """Turns scores into softmax weights that are not yet divided by their sum.

    ``sums`` has each row's sink (a score without a value) or -inf; the sink's weight replaces it.
    If ``seen`` is not 0, query t of Tq sees the first ``seen + t`` keys.
    """

    signature = "*scores *sums rows keys seen first Tq"

    def write(self):
        b, L = self.b, self.L
        scores, sums, rows, keys, seen, first, Tq = self.arguments

        def row(i, _):
            begin = self.mul(i, keys)
            more = self.add(seen, b.urem(self.add(first, i), Tq))
            num = b.select(b.icmp_unsigned("!=", seen, I64(0)), more, keys)
            num = b.select(b.icmp_signed("<", num, keys), num, keys)

            def larger(one, other):
                return b.select(b.fcmp_ordered(">", one, other), one, other)

            def most_of(j, held):
                return [larger(self.load(scores, self.add(begin, j), held[0].type), held[0])]

            at, held = self.loop(I64(0), num, L, most_of, [self.all("-inf")])
            most = self.load(sums, i, F32)
            for n in range(L):
                most = larger(b.extract_element(held[0], I32(n)), most)
            most = self.spread(self.loop(at, num, 1, most_of, [most])[1][0])

            def weigh(j, _, kind=self.floats):
                place = self.add(begin, j)
                v = self.load(scores, place, kind)
                v = self.exp(b.fsub(v if kind is self.floats else self.spread(v), most))
                v = v if kind is self.floats else b.extract_element(v, I32(0))
                self.store(v, scores, place)

            at, _ = self.loop(I64(0), num, L, weigh)
            self.loop(at, num, 1, lambda j, _: weigh(j, _, F32))
            zero = ir.Constant(F32, 0.0)
            self.loop(num, keys, 1, lambda j, _: self.store(zero, scores, self.add(begin, j)))
            none = self.exp(b.fsub(self.spread(self.load(sums, i, F32)), most))
            self.store(b.extract_element(none, I32(0)), sums, i)

        self.loop(*self.share(rows), 1, row)


class _AddUp(Code):
    """Writes weighted means y ``[rows, Dv]`` of the values; ``sums`` has the weights of sinks."""

    form = "Dv"
    signature = "*weights *values *sums *y rows keys"

    def write(self):
        *pointers, n, self.keys = self.arguments
        self.in_groups(*self.share(n), quantized.ROWS, lambda rows: self._rows(rows, *pointers))

    def _rows(self, rows, weights, values, sums, y):
        zero = ir.Constant(self.floats, [0.0] * self.L)
        totals = [self.spread(self.load(sums, row, F32)) for row in rows]
        size = self.L * 4  # how many of a value's Dv numbers are added up side by side
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
