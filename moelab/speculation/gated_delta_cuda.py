"""mlx-lm's gated delta rule as one CUDA kernel, which can give the state after every token.

mlx-lm launches several kernels for each token. Here a warp computes a row of the state.
"""

from functools import cache

import mlx.core as mx

from ..system import on_cuda

SOURCE = """
    const int lane = threadIdx.x, dv = blockIdx.y * blockDim.y + threadIdx.y, n = blockIdx.z;
    const int T = k_shape[1], Hk = k_shape[2], Hv = v_shape[2], Dv = v_shape[3];
    if (dv >= Dv) return;
    const int b = n / Hv, hv = n % Hv, hk = hv / (Hv / Hk);
    constexpr int N = Dk / 32;
    const long row = ((long)n * Dv + dv) * Dk + lane, pass = (long)gridDim.z * Dv * Dk;
    float s[N];
    for (int i = 0; i < N; ++i) s[i] = state[row + 32 * i];
    for (int t = 0; t < T; ++t) {
        const long at = (long)b * T + t, key = (at * Hk + hk) * Dk + lane, head = at * Hv + hv;
        float memory = 0.0f, out = 0.0f;
        for (int i = 0; i < N; ++i) {
            s[i] *= (float)g[vector ? head * Dk + lane + 32 * i : head];
            memory += s[i] * (float)k[key + 32 * i];
        }
        for (int o = 16; o; o /= 2) memory += __shfl_xor_sync(0xffffffff, memory, o);
        const float delta = ((float)v[head * Dv + dv] - memory) * (float)beta[head];
        for (int i = 0; i < N; ++i) {
            s[i] += (float)k[key + 32 * i] * delta;
            out += s[i] * (float)q[key + 32 * i];
        }
        for (int o = 16; o; o /= 2) out += __shfl_xor_sync(0xffffffff, out, o);
        if (lane == 0) y[head * Dv + dv] = (Out)out;
        if (every || t == T - 1) {
            for (int i = 0; i < N; ++i) states[(every ? t * pass : 0) + row + 32 * i] = s[i];
        }
    }
"""


@cache
def _kernel():
    return mx.fast.cuda_kernel(
        name="gated_delta",
        input_names=["q", "k", "v", "g", "beta", "state"],
        output_names=["y", "states"],
        source=SOURCE,
    )


def gated_delta(
    q, k, v, g, beta, state, mask=None, every: bool = False
) -> tuple[mx.array, mx.array]:
    """Compute mlx-lm's ``gated_delta_ops``. If ``every``, return the state after each token."""
    B, T, Hv, Dv = v.shape
    y, states = _kernel()(
        inputs=[q, k, v, g, beta, state],
        template=[("Dk", k.shape[3]), ("vector", g.ndim == 4), ("every", every), ("Out", q.dtype)],
        grid=(32, -(-Dv // 4) * 4, B * Hv),
        threadgroup=(32, 4, 1),
        output_shapes=[v.shape, (T if every else 1, *state.shape)],
        output_dtypes=[q.dtype, mx.float32],
    )
    return y, states if every else states[0]


def fits(k: mx.array, state: mx.array | None = None, mask: mx.array | None = None, **_) -> bool:
    """Whether the kernel applies to these arguments of mlx-lm's ``gated_delta_update``."""
    return (
        on_cuda()
        and mask is None
        and (state is None or state.dtype == mx.float32)
        and k.shape[-1] % 32 == 0
    )
