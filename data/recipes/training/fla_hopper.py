"""flash-linear-attention's gated delta rule for Hopper GPUs, with one kernel replaced by PyTorch.

On Hopper, Triton 3.4 to 3.7 miscompiles this kernel, so fla refuses to run it (fla issue 640).
"""

import torch
from fla.ops.gated_delta_rule import chunk, chunk_gated_delta_rule  # noqa: F401


@torch.compile(dynamic=False)
def chunk_bwd_dqkwg(
    q, k, v, do, h, dh, w=None, g=None, g_gamma=None, dv=None, scale=None, state_v_first=False,
    cu_seqlens=None, chunk_size=64, chunk_indices=None,
):  # fmt: skip
    """Return gradients of q, k [B, T, Hk, Dk], w [B, T, Hv, Dk] and g, the cumulative log2 decay.

    v, do and dv are [B, T, Hv, Dv]; g is [B, T, Hv], float32. h (the state before each chunk of C
    tokens) and its gradient dh are [B, T / C, Hv, Dk, Dv].
    """
    Hk = k.shape[2]
    Hv, C = v.shape[2], chunk_size
    repeats = Hv // Hk

    def chunks(x):  # [B, T, H, X] -> [B, T / C, Hv, C, X]
        if x.shape[2] != Hv:
            x = x.repeat_interleave(repeats, dim=2)
        return x.unflatten(1, (-1, C)).transpose(2, 3)

    def unchunk(x):  # undoes ``chunks``
        return x.transpose(2, 3).flatten(1, 2)

    q, k, v, do, dv = map(chunks, (q, k, v, do, dv))
    g = g.unflatten(1, (-1, C)).transpose(2, 3)  # [B, T / C, Hv, C]
    last = g[..., -1:]
    h, dh = h.to(q.dtype), dh.to(q.dtype)

    dw = -(dv @ h.mT)
    dq = (do @ h.mT).float() * (g.exp2()[..., None] * scale)
    dk = (v @ dh.mT).float() * (last - g).exp2()[..., None]
    dlast = (h.float() * dh.float()).sum((-1, -2)) * last[..., 0].exp2() + (dk * k.float()).sum(
        (-1, -2)
    )
    causal = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    decay = torch.where(causal, g[..., :, None] - g[..., None, :], float("-inf")).exp2()
    ds = ((do @ v.mT).float() * decay * scale).to(q.dtype)
    dq = dq + (ds @ k).float()
    dk = dk + (ds.mT @ q).float()
    dg = (dq * q.float()).sum(-1) - (dk * k.float()).sum(-1)
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + dlast[..., None]], dim=-1)

    dq, dk = (unchunk(x).unflatten(2, (Hk, repeats)).sum(3) for x in (dq, dk))
    return dq, dk, unchunk(dw), dg.transpose(2, 3).flatten(1, 2)


chunk.chunk_bwd_dqkwg = chunk_bwd_dqkwg
