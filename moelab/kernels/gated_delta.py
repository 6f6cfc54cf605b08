"""mlx-lm's gated delta rule (Yang et al., arXiv 2412.06464) on a CPU, over all tokens of a pass.

Without Metal mlx-lm loops over tokens and reads the state several times a token. Here a row of the
state stays in registers. A token's result does not depend on how a text is divided into passes.
"""

from collections.abc import Callable
from functools import partial, wraps

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta as of_mlx_lm

from ..hooks import with_globals
from . import code, team
from .code import F32, Code, empty, to_mlx

CHUNKED = "gated_delta_chunked"


def gated_delta(
    q, k, v, g, beta, state=None, mask=None, steps=None, ops=of_mlx_lm.gated_delta_ops
) -> tuple[mx.array, ...]:
    """Compute mlx-lm's ``gated_delta_ops`` by a kernel, or by ``ops`` if the kernel does not fit.

    Shapes: q, k ``[B, T, Hk, Dk]``; v ``[B, T, Hv, Dv]``; g, beta ``[B, T, Hv]`` (g also
    ``[B, T, Hv, Dk]``); state ``[B, Hv, Dv, Dk]``; mask ``[B, T]``: tokens that change the state.
    """
    if state is None:
        state = mx.zeros((len(q), *v.shape[2:], q.shape[-1]), mx.float32)
    arrays, (B, T, _, Dk), (Hv, Dv) = [q, k, v, g, beta, state], k.shape, v.shape[2:]
    agree = (
        q.shape == k.shape
        and v.shape[:2] == (B, T)
        and g.shape in ((B, T, Hv), (B, T, Hv, Dk))
        and beta.shape == (B, T, Hv)
        and state.shape == (B, Hv, Dv, Dk)
    )
    fits = Dk % 8 == 0 and Hv % k.shape[2] == 0 and mx.default_device() == mx.cpu
    if steps is not None:  # mlx-vlm's argument: the states of this many tokens are wanted too
        return ops(q, k, v, g, beta, state, mask, steps)
    if not fits or not agree or any(a.dtype != mx.float32 for a in arrays):
        return ops(q, k, v, g, beta, state, mask)
    if mask is not None:  # padding in a batch: with g = 1 and beta = 0 the state stays as it is
        decays = mask[..., None] if g.ndim == 3 else mask[..., None, None]
        arrays[3:5] = mx.where(decays, g, 1.0), mx.where(mask[..., None], beta, 0.0)
    mx.eval(arrays)
    y, new = recur(*(np.ascontiguousarray(a) for a in arrays))
    return to_mlx(y), to_mlx(new)


def recur(q, k, v, g, beta, state) -> tuple[np.ndarray, np.ndarray]:
    """Compute ``gated_delta`` of numpy arrays; g, beta and state must be contiguous.

    In q, k and v a token's heads must be contiguous, and the next text must begin where a text's
    tokens end: give copies of a part of several texts' tokens.
    """
    (B, T, Hk, Dk), (Hv, Dv) = q.shape, v.shape[2:]
    y, new = empty(B, T, Hv, Dv), empty(*state.shape)
    # Distances between tokens. (If T = 1: between texts, since the time axis may have any stride.)
    steps = [a.strides[T > 1] // a.itemsize for a in (q, k, v)]
    team.run(
        code.kernel_of(_GatedDelta, code.lanes(Dk), Dk, g.ndim == 4),
        *(q, k, v, g, beta, state, new, y, *steps, T, Hk, Hv, Dv, B * Hv * Dv),
        pieces=team.pieces(2 * T * state.size, B * Hv),
    )
    return y, new


def fast_update(update: Callable) -> Callable:
    """Return mlx-lm's ``gated_delta_update``, computed by ``gated_delta``."""
    # mlx-vlm's ``update`` has a second loop for prompts, and mlx-vlm's cache calls ``update``.
    loops = {n: f for n, f in update.__globals__.items() if n in ("gated_delta_ops", CHUNKED)}
    fast = with_globals(update, {n: partial(gated_delta, ops=f) for n, f in loops.items()})
    fast.__globals__[update.__name__] = fast

    @wraps(update)  # for code that inspects the signature
    def call(*args, use_kernel=True, **kwargs):  # ``use_kernel`` is False in training
        return (fast if use_kernel else update)(*args, use_kernel=use_kernel, **kwargs)

    call.is_fast = True  # ``recurrence`` reruns ``call``: this is faster than keeping every state
    return call


class _GatedDelta(Code):
    """The recurrence for all ``B * Hv * Dv`` rows of the states, two at a time to hide latency."""

    form = "Dk vector"

    def write(
        self, q, k, v, g, beta, state, new, y, /, q_step, k_step, v_step, T, Hk, Hv, Dv, all_rows
    ):
        b, n = self.b, self.Dk // self.L

        def vectors(pointer, first):
            return [self.load(pointer, self.add(first, i * self.L)) for i in range(n)]

        for rows in self.in_groups(*self.share(all_rows), (2, 1)):
            places = []
            for row in rows:
                head = b.udiv(row, Dv)  # among all B * Hv heads
                batch, hv, dv = b.udiv(head, Hv), b.urem(head, Hv), b.urem(row, Dv)
                places.append((batch, hv, b.udiv(hv, b.udiv(Hv, Hk)), dv))
            states = [x for row in rows for x in vectors(state, self.mul(row, self.Dk))]
            with self.loop(0, T, values=states) as t:
                for i, (batch, hv, hk, dv) in enumerate(places):
                    at = self.place(batch, T, t)
                    head = self.place(at, Hv, hv)
                    if self.vector:
                        gates = vectors(g, self.mul(head, self.Dk))
                    else:
                        gates = [self.spread(self.load(g, head, F32))] * n
                    of_q, of_k, of_v = (self.mul(at, step) for step in (q_step, k_step, v_step))
                    key = self.mul(hk, self.Dk)
                    ks, qs = vectors(k, self.add(of_k, key)), vectors(q, self.add(of_q, key))
                    mine = slice(i * n, (i + 1) * n)
                    s = [b.fmul(x, gate) for x, gate in zip(states[mine], gates)]
                    of_v = self.add(of_v, self.place(hv, Dv, dv))
                    delta = b.fsub(self.load(v, of_v, F32), self._dot(s, ks))
                    delta = self.spread(b.fmul(delta, self.load(beta, head, F32)))
                    states[mine] = s = [self.fma(x, delta, y_) for x, y_ in zip(ks, s)]
                    self.store(self._dot(s, qs), y, self.place(head, Dv, dv))
            for i, row in enumerate(rows):
                for j, x in enumerate(states[i * n : (i + 1) * n]):
                    self.store(x, new, self.place(row, self.Dk, j * self.L))

    def _dot(self, a, b):
        """Return the sum of products, in two chains to hide latency."""
        chains = [self.b.fmul(a[i], b[i]) for i in range(min(2, len(a)))]
        for i in range(2, len(a)):
            chains[i % 2] = self.fma(a[i], b[i], chains[i % 2])
        return self.sum(chains[0] if len(chains) == 1 else self.b.fadd(*chains))
