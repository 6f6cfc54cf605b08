"""What a block computes between its products, row by row: norms, gates, convolutions, the router.

Functions take and give float32 arrays of numpy. The numbers of rows and of threads do not change a
row's result, so a text may be divided into passes in any way.
"""

from functools import reduce

import numpy as np

from . import team
from .code import F32, I32, I64, Code, address, check, empty, ir, kernel_of, lanes

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
    places = [place for a in (x, out, gate) for place in _places(a)]
    numbers = *places, address(weight), address(add), H, n
    team.run(kernel_of(_Norm, lanes(D), *form), *numbers, pieces=team.pieces(2 * x.size, n))
    return out


def _places(a):
    """Return an array's address and the distances from group to group and from row to row."""
    if a is None:
        return 0, 0, 0
    first, second = (a.strides[0], a.strides[1]) if a.ndim == 3 else (a.strides[0], 0)
    return address(a), first // a.itemsize, second // a.itemsize


def gated(
    gate: np.ndarray, x: np.ndarray, silu: bool = True, out: np.ndarray | None = None
) -> np.ndarray:
    """Multiply rows x ``[n, D]`` with the silu (else the sigmoid) of ``gate [n, D]``."""
    check(gate.shape, x=x)
    (n, D), y = x.shape, empty(*x.shape) if out is None else out
    numbers = address(gate), gate.strides[0] // 4, address(x), x.strides[0] // 4, address(y), n
    pieces = team.pieces(NUMBER_WORK * y.size, n * D // 64)
    team.run(kernel_of(_Gated, lanes(D), D, silu), *numbers, pieces=pieces)
    return y


def convolve(before: np.ndarray, x: np.ndarray, taps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the silu ``[B * T, C]`` of a convolution over time, and the next tokens' ``before``.

    Shapes: ``before [B, width - 1, C]``, tokens x ``[B * T, C]``, taps ``[width, C]``.
    """
    (n, C), B = x.shape, len(before)
    y, after = empty(n, C), empty(*before.shape)
    numbers = *map(address, (before, x, taps, y, after)), B, n // B, C
    kernel = kernel_of(_Convolution, lanes(C), len(taps))
    team.run(kernel, *numbers, pieces=team.pieces(NUMBER_WORK * y.size, C // 64))
    return y, after


def gates(
    a: np.ndarray, b: np.ndarray, decay: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return g and beta ``[n, Hv]`` of a gated delta rule; ``decay [Hv]`` is exp(``A_log``)."""
    check(a.shape, b=b)
    g, beta = empty(*a.shape), empty(*a.shape)
    numbers = *map(address, (a, b, decay, bias, g, beta)), a.shape[-1], a.size
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
    numbers = address(logits), address(experts), address(scores), n
    kernel = kernel_of(_Router, lanes(E), E, top_k, bool(normalize))
    team.run(kernel, *numbers, pieces=team.pieces(NUMBER_WORK * logits.size, n))
    return experts, scores


def combine(experts, scores, add=None, shared=None, gate=None) -> np.ndarray:
    """Multiply ``experts [n * K, D]`` by ``scores [n, K]``; sum up each token's K rows: ``[n, D]``.

    If given, ``add [n, D]`` is added, and ``shared [n, D]`` times the sigmoid of ``gate [n, 1]``.
    """
    (n, K), D = scores.shape, experts.shape[-1]
    y = empty(n, D)
    check(y.shape, add=add, shared=shared)
    form = D, K, add is not None, shared is not None, gate is not None
    kernel = kernel_of(_Combination, lanes(D), *form)
    numbers = *map(address, (experts, scores, add, shared, gate, y)), n
    team.run(kernel, *numbers, pieces=team.pieces(experts.size, D // 64))
    return y


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate the first R numbers of rows x ``[n, H, D]`` in place; cos, sin ``[n, R / 2]``."""
    (n, H, D), half = x.shape, cos.shape[-1]
    if 2 * half > D:
        raise ValueError(f"rotary positions: expected at most the {D} of a head, got {2 * half}")
    kernel = kernel_of(_Rotation, lanes(half), half)
    numbers = *_places(x), address(cos), address(sin), H, n * H
    team.run(kernel, *numbers, pieces=team.pieces(4 * n * H * half, n * H))


class _Norm(Code):
    """Norms of rows. x1 is the distance between groups of x, x2 between the rows of a group."""

    form = "D eps scale has_weight has_add has_gate"
    signature = "*x x1 x2 *y y1 y2 *gate g1 g2 *weight *add H rows"

    def write(self):
        b = self.b
        x, x1, x2, y, y1, y2, gate, g1, g2, weight, add, H, rows = self.arguments
        zero = self.all(0)

        def row(i, _):
            group, head = b.udiv(i, H), b.urem(i, H)
            at_x, at_y, at_gate = (
                self.add(self.mul(group, first), self.mul(head, second))
                for first, second in ((x1, x2), (y1, y2), (g1, g2))
            )

            def square(j, held):
                at = self.add(at_x, j)
                v = self.load(x, at, self.floats)
                if self.has_add:
                    v = b.fadd(v, self.load(add, self.add(self.mul(i, self.D), j), self.floats))
                    self.store(v, x, at)
                return [self.fma(v, v, held[0])]

            total = self.sum(self.loop(I64(0), I64(self.D), self.L, square, [zero])[1][0])
            mean = b.fdiv(self.spread(total), self.all(self.D))
            root = self.intrinsic("sqrt", b.fadd(mean, self.all(self.eps)))
            share = b.fdiv(self.all(self.scale), root)

            def scaled(j, _):
                v = b.fmul(self.load(x, self.add(at_x, j), self.floats), share)
                if self.has_weight:
                    v = b.fmul(v, self.load(weight, j, self.floats))
                if self.has_gate:
                    v = b.fmul(v, self.silu(self.load(gate, self.add(at_gate, j), self.floats)))
                self.store(v, y, self.add(at_y, j))

            self.loop(I64(0), I64(self.D), self.L, scaled)

        self.loop(*self.share(rows), 1, row)


class _Gated(Code):
    """y = x times a function of the gate. A step is the distance from one row to the next."""

    form = "D is_silu"
    signature = "*gate gate_step *x x_step *y rows"

    def write(self):
        b = self.b
        gate, gate_step, x, x_step, y, rows = self.arguments
        of_gate = self.silu if self.is_silu else self.sigmoid
        blocks = self.D // self.L

        def block(i, _):
            row, j = b.udiv(i, I64(blocks)), self.mul(b.urem(i, I64(blocks)), self.L)
            at_gate, at_x = (self.add(self.mul(row, step), j) for step in (gate_step, x_step))
            v = of_gate(self.load(gate, at_gate, self.floats))
            v = b.fmul(v, self.load(x, at_x, self.floats))
            self.store(v, y, self.mul(i, self.L))

        self.loop(*self.share(self.mul(rows, blocks)), 1, block)


class _Convolution(Code):
    """Convolutions over ``width`` tokens; ``after`` gets the inputs that the next tokens need."""

    form = "width"
    signature = "*before *x *taps *y *after B T C"

    def write(self):
        b, w = self.b, self.width - 1
        before, x, taps, y, after, B, T, C = self.arguments
        first, end = (self.mul(i, self.L) for i in self.share(b.udiv(C, I64(self.L))))

        def text(i, _):
            past, now = self.mul(self.mul(i, w), C), self.mul(self.mul(i, T), C)

            def row(t):
                """Return the address of row t, counted through ``before`` and then through x."""
                back = b.icmp_signed("<", t, I64(w))
                earlier = b.gep(before, [self.add(past, self.mul(t, C))])
                later = b.gep(x, [self.add(now, self.mul(b.sub(t, I64(w)), C))])
                return b.select(back, earlier, later)

            def token(t, _):
                rows = [row(self.add(t, n)) for n in range(self.width)]
                to = b.gep(y, [self.add(now, self.mul(t, C))])

                def block(c, _):
                    total = None
                    for n, of in enumerate(rows):
                        v = self.load(of, c, self.floats)
                        tap = self.load(taps, self.add(self.mul(C, n), c), self.floats)
                        total = self.fma(v, tap, total) if total else b.fmul(v, tap)
                    self.store(self.silu(total), to, c)

                self.loop(first, end, self.L, block)

            self.loop(I64(0), T, 1, token)
            for n in range(w):
                of = row(self.add(T, n))
                to = b.gep(after, [self.add(past, self.mul(C, n))])

                def copy(c, _, of=of, to=to):
                    self.store(self.load(of, c, self.floats), to, c)

                self.loop(first, end, self.L, copy)

        self.loop(I64(0), B, 1, text)


class _Gates(Code):
    """Computes g and beta, one number after another."""

    signature = "*a *b *decay *bias *g *beta H n"

    def write(self):
        build = self.b
        a, b, decay, bias, g, beta, H, n = self.arguments

        def one(i, _):
            head = build.urem(i, H)
            v = self.spread(build.fadd(self.load(a, i, F32), self.load(bias, head, F32)))
            v = build.fmul(self.softplus(v), self.spread(self.load(decay, head, F32)))
            v = self.exp(build.fneg(v))
            self.store(build.extract_element(v, I32(0)), g, i)
            v = self.sigmoid(self.spread(self.load(b, i, F32)))
            self.store(build.extract_element(v, I32(0)), beta, i)

        self.loop(*self.share(n), 1, one)


class _Router(Code):
    """Finds the K largest of E logits, sorted, and computes their scores."""

    form = "E K normalize"
    signature = "*logits experts *scores rows"

    def write(self):
        b, K = self.b, self.K
        logits, experts, scores, rows = self.arguments
        experts = self.pointer(experts, I64)
        least = ir.Constant(F32, float("-inf"))

        def row(i, _):
            mine = self.mul(i, K)
            for k in range(K):
                at = self.add(mine, k)
                self.store(least, scores, at)
                self.store(I64(k), experts, at)

            def expert(e, _):
                v = self.load(logits, self.add(self.mul(i, self.E), e), F32)
                smallest = self.load(scores, self.add(mine, K - 1), F32)
                with b.if_then(b.fcmp_ordered(">", v, smallest)):
                    # Smaller logits move one place on, and the last is dropped.
                    for k in range(K - 1, -1, -1):
                        at = self.add(mine, k)
                        here = b.fcmp_ordered(">", v, self.load(scores, at, F32))
                        with b.if_then(here):
                            if k < K - 1:
                                for memory, kind in ((scores, F32), (experts, I64)):
                                    self.store(self.load(memory, at, kind), memory, self.add(at, 1))
                            self.store(v, scores, at)
                            self.store(e, experts, at)

            self.loop(I64(0), I64(self.E), 1, expert)
            most = self.spread(self.load(scores, mine, F32))
            parts = [self.load(scores, self.add(mine, k), F32) for k in range(K)]
            parts = [self.exp(b.fsub(self.spread(v), most)) for v in parts]
            if self.normalize:
                total = reduce(b.fadd, parts)
            else:

                def block(e, held):
                    v = self.load(logits, self.add(self.mul(i, self.E), e), self.floats)
                    return [b.fadd(held[0], self.exp(b.fsub(v, most)))]

                total = self.loop(I64(0), I64(self.E), self.L, block, [self.all(0)])[1][0]
                total = self.spread(self.sum(total))
            for k, part in enumerate(parts):
                score = b.extract_element(b.fdiv(part, total), I32(0))
                self.store(score, scores, self.add(mine, k))

        self.loop(*self.share(rows), 1, row)


class _Combination(Code):
    """Computes ``combine``: a sum of K experts' rows, each times its score, and of added rows."""

    form = "D K has_add has_shared has_gate"
    signature = "*experts *scores *add *shared *gate *y rows"

    def write(self):
        b, L = self.b, self.L
        experts, scores, add, shared, gate, y, rows = self.arguments
        first, end = (self.mul(i, L) for i in self.share(I64(self.D // L)))

        def row(i, _):
            mine = self.mul(i, self.K)
            weights = [self.load(scores, self.add(mine, k), F32) for k in range(self.K)]
            weights = [self.spread(w) for w in weights]
            if self.has_gate:
                open_ = self.sigmoid(self.spread(self.load(gate, i, F32)))

            def block(j, _):
                at, total = self.add(self.mul(i, self.D), j), None
                for k, weight in enumerate(weights):
                    of = self.add(self.mul(self.add(mine, k), self.D), j)
                    v = self.load(experts, of, self.floats)
                    total = self.fma(v, weight, total) if total else b.fmul(v, weight)
                if self.has_shared:
                    v = self.load(shared, at, self.floats)
                    total = self.fma(v, open_, total) if self.has_gate else b.fadd(v, total)
                if self.has_add:
                    total = b.fadd(total, self.load(add, at, self.floats))
                self.store(total, y, at)

            self.loop(first, end, L, block)

        self.loop(I64(0), rows, 1, row)


class _Rotation(Code):
    """Rotates rows in place. ``first`` and ``second`` are distances, as x1 and x2 in ``_Norm``."""

    form = "half"
    signature = "*x first second *cos *sin H rows"

    def write(self):
        b = self.b
        x, first, second, cos, sin, H, rows = self.arguments

        def row(i, _):
            group, head = b.udiv(i, H), b.urem(i, H)
            at, angle = self.add(self.mul(group, first), self.mul(head, second)), group

            def block(j, _):
                of = self.add(self.mul(angle, self.half), j)
                c, s = (self.load(p, of, self.floats) for p in (cos, sin))
                places = self.add(at, j), self.add(self.add(at, j), self.half)
                one, two = (self.load(x, p, self.floats) for p in places)
                self.store(self.fma(one, c, b.fneg(b.fmul(two, s))), x, places[0])
                self.store(self.fma(one, s, b.fmul(two, c)), x, places[1])

            self.loop(I64(0), I64(self.half), self.L, block)

        self.loop(*self.share(rows), 1, row)
