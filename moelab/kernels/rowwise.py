"""What a block computes between its products, row by row: norms, gates, convolutions, the router.

Functions take and give float32 arrays of numpy. The numbers of rows and of threads do not change a
row's result, so a text may be divided into passes in any way.
"""

from functools import reduce

import numpy as np

from . import team
from .code import F32, I64, Code, check, empty, ir, kernel_of, lanes

# One number here needs an exponential, which takes as long as this many multiplications.
NUMBER_WORK = 16


def rms_norm(
    x, weight, eps: float, *, add=None, gate=None, scale: float = 1.0, out=None
) -> np.ndarray:
    """Divide rows ``[n, H, D]`` or ``[n, D]`` by the root of their mean square, as MLX does.

    ``add`` is first added to x in place; ``scale`` and the silu of ``gate`` multiply the result.
    """
    D = x.shape[-1]
    out = empty(*x.shape) if out is None else out
    check(x.shape, add=add, gate=gate, out=out)
    form = D, float(eps), scale, weight is not None, add is not None, gate is not None
    n, H = x.size // D, x.shape[1] if x.ndim == 3 else 1
    numbers = x, out, gate, weight, add, *_steps(x), *_steps(out), *_steps(gate), H, n
    team.run(kernel_of(_Norm, lanes(D), *form), *numbers, pieces=team.pieces(2 * x.size, n))
    return out


def _steps(a):
    """Return an array's distances from group to group and from row to row of a group."""
    if a is None:
        return 0, 0
    return a.strides[0] // a.itemsize, a.strides[1] // a.itemsize if a.ndim == 3 else 0


def gated(
    gate: np.ndarray, x: np.ndarray, silu: bool = True, out: np.ndarray | None = None
) -> np.ndarray:
    """Multiply rows x ``[n, D]`` with the silu (else the sigmoid) of ``gate [n, D]``."""
    check(gate.shape, x=x)
    (n, D), y = x.shape, empty(*x.shape) if out is None else out
    numbers = gate, x, y, gate.strides[0] // 4, x.strides[0] // 4, n
    pieces = team.pieces(NUMBER_WORK * y.size, n * D // 64)
    team.run(kernel_of(_Gated, lanes(D), D, silu), *numbers, pieces=pieces)
    return y


def convolve(before: np.ndarray, x: np.ndarray, taps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the silu ``[B * T, C]`` of a convolution over time, and the next tokens' ``before``.

    Shapes: ``before [B, width - 1, C]``, tokens x ``[B * T, C]``, taps ``[width, C]``.
    """
    (n, C), B = x.shape, len(before)
    y, after = empty(n, C), empty(*before.shape)
    kernel, numbers = kernel_of(_Convolution, lanes(C), len(taps)), (B, n // B, C)
    pieces = team.pieces(NUMBER_WORK * y.size, C // 64)
    team.run(kernel, before, x, taps, y, after, *numbers, pieces=pieces)
    return y, after


def gates(
    a: np.ndarray, b: np.ndarray, decay: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return g and beta ``[n, Hv]`` of a gated delta rule; ``decay [Hv]`` is exp(``A_log``)."""
    check(a.shape, b=b)
    g, beta = empty(*a.shape), empty(*a.shape)
    numbers = a, b, decay, bias, g, beta, a.shape[-1], a.size
    team.run(kernel_of(_Gates, 8), *numbers, pieces=team.pieces(NUMBER_WORK**2 * a.size, a.size))
    return g, beta


def route(logits: np.ndarray, top_k: int, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the K experts (int64) of the largest logits ``[n, E]``, sorted, and scores ``[n, K]``.

    Equal logits stay in order. Scores are a softmax over these K if ``normalize``, else over E.
    """
    n, E = logits.shape
    if top_k > E:
        raise ValueError(f"top_k: expected at most the router's {E} experts, got {top_k}")
    experts, scores = np.empty((n, top_k), np.int64), empty(n, top_k)
    kernel = kernel_of(_Router, lanes(E), E, top_k, bool(normalize))
    pieces = team.pieces(NUMBER_WORK * logits.size, n)
    team.run(kernel, logits, scores, experts, n, pieces=pieces)
    return experts, scores


def combine(experts, scores, add=None, shared=None, gate=None) -> np.ndarray:
    """Multiply ``experts [n * K, D]`` by ``scores [n, K]``; sum up each token's K rows: ``[n, D]``.

    If given, ``add [n, D]`` is added, and ``shared [n, D]`` times the sigmoid of ``gate [n, 1]``.
    """
    (n, K), D = scores.shape, experts.shape[-1]
    y = empty(n, D)
    check(y.shape, add=add, shared=shared)
    form = D, K, add is not None, shared is not None, gate is not None
    kernel, pieces = kernel_of(_Combination, lanes(D), *form), team.pieces(experts.size, D // 64)
    team.run(kernel, experts, scores, add, shared, gate, y, n, pieces=pieces)
    return y


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate the first R numbers of rows x ``[n, H, D]`` in place; cos, sin ``[n, R / 2]``."""
    (n, H, D), half = x.shape, cos.shape[-1]
    if 2 * half > D:
        raise ValueError(f"rotary positions: expected at most the {D} of a head, got {2 * half}")
    kernel, pieces = kernel_of(_Rotation, lanes(half), half), team.pieces(4 * n * H * half, n * H)
    team.run(kernel, x, cos, sin, *_steps(x), H, n * H, pieces=pieces)


class _Norm(Code):
    """Norms of rows. x1 is the distance between groups of x, x2 between the rows of a group."""

    form = "D eps scale has_weight has_add has_gate"

    def write(self, x, y, gate, weight, add, /, x1, x2, y1, y2, g1, g2, H, rows):
        b = self.b
        with self.loop(*self.share(rows)) as i:
            group, head = b.udiv(i, H), b.urem(i, H)
            at_x, at_y, at_gate = (
                self.add(self.mul(group, first), self.mul(head, second))
                for first, second in ((x1, x2), (y1, y2), (g1, g2))
            )
            total = [self.all(0)]
            with self.loop(0, self.D, self.L, total) as j:
                at = self.add(at_x, j)
                v = self.load(x, at)
                if self.has_add:
                    v = b.fadd(v, self.load(add, self.place(i, self.D, j)))
                    self.store(v, x, at)
                total[0] = self.fma(v, v, total[0])
            mean = b.fdiv(self.spread(self.sum(total[0])), self.all(self.D))
            root = self.intrinsic("sqrt", b.fadd(mean, self.all(self.eps)))
            share = b.fdiv(self.all(self.scale), root)
            with self.loop(0, self.D, self.L) as j:
                v = b.fmul(self.load(x, self.add(at_x, j)), share)
                if self.has_weight:
                    v = b.fmul(v, self.load(weight, j))
                if self.has_gate:
                    v = b.fmul(v, self.silu(self.load(gate, self.add(at_gate, j))))
                self.store(v, y, self.add(at_y, j))


class _Gated(Code):
    """y = x times a function of the gate. A step is the distance from one row to the next."""

    form = "D is_silu"

    def write(self, gate, x, y, /, gate_step, x_step, rows):
        b, blocks = self.b, self.D // self.L
        of_gate = self.silu if self.is_silu else self.sigmoid
        with self.loop(*self.share(self.mul(rows, blocks))) as i:
            row, j = b.udiv(i, I64(blocks)), self.mul(b.urem(i, I64(blocks)), self.L)
            at_gate, at_x = (self.place(row, step, j) for step in (gate_step, x_step))
            v = b.fmul(of_gate(self.load(gate, at_gate)), self.load(x, at_x))
            self.store(v, y, self.mul(i, self.L))


class _Convolution(Code):
    """Convolutions over ``width`` tokens; ``after`` gets the inputs that the next tokens need."""

    form = "width"

    def write(self, before, x, taps, y, after, /, B, T, C):
        b, w = self.b, self.width - 1
        first, end = (self.mul(i, self.L) for i in self.share(b.udiv(C, I64(self.L))))
        with self.loop(0, B) as i:
            past, now = self.mul(self.mul(i, w), C), self.mul(self.mul(i, T), C)

            def row(t):
                """Return the address of row t, counted through ``before`` and then through x."""
                back = b.icmp_signed("<", t, I64(w))
                earlier = b.gep(before, [self.add(past, self.mul(t, C))])
                later = b.gep(x, [self.add(now, self.mul(b.sub(t, I64(w)), C))])
                return b.select(back, earlier, later)

            with self.loop(0, T) as t:
                rows = [row(self.add(t, n)) for n in range(self.width)]
                to = b.gep(y, [self.add(now, self.mul(t, C))])
                with self.loop(first, end, self.L) as c:
                    total = None
                    for n, of in enumerate(rows):
                        v, tap = self.load(of, c), self.load(taps, self.place(C, n, c))
                        total = self.fma(v, tap, total) if total else b.fmul(v, tap)
                    self.store(self.silu(total), to, c)
            for n in range(w):
                of = row(self.add(T, n))
                to = b.gep(after, [self.add(past, self.mul(C, n))])
                with self.loop(first, end, self.L) as c:
                    self.store(self.load(of, c), to, c)


class _Gates(Code):
    """Computes g and beta, one number after another."""

    def write(self, a, b, decay, bias, g, beta, /, H, n):
        build = self.b
        with self.loop(*self.share(n)) as i:
            head = build.urem(i, H)
            v = self.spread(build.fadd(self.load(a, i, F32), self.load(bias, head, F32)))
            v = build.fmul(self.softplus(v), self.spread(self.load(decay, head, F32)))
            self.store(self.first(self.exp(build.fneg(v))), g, i)
            self.store(self.first(self.sigmoid(self.spread(self.load(b, i, F32)))), beta, i)


class _Router(Code):
    """Finds the K largest of E logits, sorted, and computes their scores."""

    form = "E K normalize"

    def write(self, logits, scores, /, experts, rows):
        b, K, experts = self.b, self.K, self.pointer(experts, I64)
        with self.loop(*self.share(rows)) as i:
            places = [self.place(i, K, k) for k in range(K)]
            for k, at in enumerate(places):
                self.store(ir.Constant(F32, float("-inf")), scores, at)
                self.store(I64(k), experts, at)
            with self.loop(0, self.E) as e:
                v = self.load(logits, self.place(i, self.E, e), F32)
                smallest = self.load(scores, places[-1], F32)
                with b.if_then(b.fcmp_ordered(">", v, smallest)):
                    # Smaller logits move one place on, and the last is dropped.
                    for k, at in reversed([*enumerate(places)]):
                        with b.if_then(b.fcmp_ordered(">", v, self.load(scores, at, F32))):
                            if k < K - 1:
                                for memory, kind in ((scores, F32), (experts, I64)):
                                    self.store(self.load(memory, at, kind), memory, self.add(at, 1))
                            self.store(v, scores, at)
                            self.store(e, experts, at)
            parts = [self.spread(self.load(scores, at, F32)) for at in places]
            most = parts[0]
            parts = [self.exp(b.fsub(v, most)) for v in parts]
            if self.normalize:
                total = reduce(b.fadd, parts)
            else:
                sums = [self.all(0)]
                with self.loop(0, self.E, self.L, sums) as e:
                    v = self.load(logits, self.place(i, self.E, e))
                    sums[0] = b.fadd(sums[0], self.exp(b.fsub(v, most)))
                total = self.spread(self.sum(sums[0]))
            for at, part in zip(places, parts):
                self.store(self.first(b.fdiv(part, total)), scores, at)


class _Combination(Code):
    """Computes ``combine``: a sum of K experts' rows, each times its score, and of added rows."""

    form = "D K has_add has_shared has_gate"

    def write(self, experts, scores, add, shared, gate, y, /, rows):
        b, L = self.b, self.L
        first, end = (self.mul(i, L) for i in self.share(I64(self.D // L)))
        with self.loop(0, rows) as i:
            mine = [self.place(i, self.K, k) for k in range(self.K)]
            weights = [self.spread(self.load(scores, k, F32)) for k in mine]
            if self.has_gate:
                open_ = self.sigmoid(self.spread(self.load(gate, i, F32)))
            with self.loop(first, end, L) as j:
                at, total = self.place(i, self.D, j), None
                for k, weight in zip(mine, weights):
                    v = self.load(experts, self.place(k, self.D, j))
                    total = self.fma(v, weight, total) if total else b.fmul(v, weight)
                if self.has_shared:
                    v = self.load(shared, at)
                    total = self.fma(v, open_, total) if self.has_gate else b.fadd(v, total)
                if self.has_add:
                    total = b.fadd(total, self.load(add, at))
                self.store(total, y, at)


class _Rotation(Code):
    """Rotates rows in place. ``first`` and ``second`` are distances, as x1 and x2 in ``_Norm``."""

    form = "half"

    def write(self, x, cos, sin, /, first, second, H, rows):
        b = self.b
        with self.loop(*self.share(rows)) as i:
            group, head = b.udiv(i, H), b.urem(i, H)
            at = self.add(self.mul(group, first), self.mul(head, second))
            with self.loop(0, self.half, self.L) as j:
                c, s = (self.load(p, self.place(group, self.half, j)) for p in (cos, sin))
                places = self.add(at, j), self.add(self.add(at, j), self.half)
                one, two = (self.load(x, p) for p in places)
                self.store(self.fma(one, c, b.fneg(b.fmul(two, s))), x, places[0])
                self.store(self.fma(one, s, b.fmul(two, c)), x, places[1])
