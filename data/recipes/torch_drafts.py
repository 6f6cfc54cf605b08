"""Two drafts in PyTorch for training: DFlash's block draft and a Qwen3 decoder.

Parameters are named as in z-lab's files and in mlx-lm's.

B batch, T tokens, D hidden, A anchors, b block size, n target layers that are read.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_qwen import MLP, RMSNorm


def rotate(x, angles):
    """Rotary embedding of x [B, H, T, Dh] by angles [B or 1, 1, T, Dh / 2]."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.dims = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        D = c["hidden_size"]
        self.q_proj = nn.Linear(D, self.heads * self.dims, bias=False)
        self.k_proj = nn.Linear(D, self.kv_heads * self.dims, bias=False)
        self.v_proj = nn.Linear(D, self.kv_heads * self.dims, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dims, D, bias=False)
        self.q_norm = RMSNorm(self.dims, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.dims, c["rms_norm_eps"])

    def forward(self, x, context, angles, context_angles, mask):
        def heads(y, n):
            return y.view(B, -1, n, self.dims).transpose(1, 2)

        B = x.shape[0]
        seen = x if context is None else torch.cat([context, x], dim=1)
        seen_angles = (
            angles
            if context is None
            else torch.cat([context_angles.expand(B, -1, -1, -1), angles], dim=2)
        )
        q = rotate(self.q_norm(heads(self.q_proj(x), self.heads)), angles)
        k = rotate(self.k_norm(heads(self.k_proj(seen), self.kv_heads)), seen_angles)
        v = heads(self.v_proj(seen), self.kv_heads)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Qwen3's decoder layer; a context gives it further keys and values, and needs a mask."""

    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = MLP(c["hidden_size"], c["intermediate_size"])

    def forward(self, x, context, angles, context_angles, mask):
        x = x + self.self_attn(self.input_layernorm(x), context, angles, context_angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.theta, self.dims = c["rope_theta"], c["head_dim"]

    def compile(self):
        for layer in self.layers:
            layer.compile(dynamic=False)

    def angles(self, positions):
        """Rotary angles [B, 1, T, Dh / 2] of positions [B, T]."""
        half = self.dims // 2
        freqs = self.theta ** (-torch.arange(half, device=positions.device) / half)
        return (positions[..., None] * freqs)[:, None]


class DFlash(Draft):
    """A DFlash draft: all tokens of a block in one pass.

    Args:
        config (dict): As in the draft's config.json.
    """

    def __init__(self, config):
        super().__init__(config)
        D = config["hidden_size"]
        self.ids, self.block = config["dflash_config"]["target_layer_ids"], config["block_size"]
        self.fc = nn.Linear(len(self.ids) * D, D, bias=False)
        self.hidden_norm = RMSNorm(D, config["rms_norm_eps"])

    def forward(self, blocks, features, anchors):
        """Hidden states [B, A, b, D] of blocks that start at ``anchors`` [B, A].

        Args:
            blocks (Tensor): Embedded blocks [B, A, b, D]: the token at the anchor, then masks.
            features (Tensor): Target's features [B, T, n * D]; a block sees those before its
                anchor.
            anchors (Tensor): Position of the first token of each block.
        """
        B, A, b, D = blocks.shape
        T = features.shape[1]
        context = self.hidden_norm(self.fc(features))
        inside = torch.arange(A, device=blocks.device).repeat_interleave(b)
        before = torch.arange(T, device=blocks.device) < anchors[..., None]
        mask = torch.cat(
            [before.repeat_interleave(b, dim=1), (inside[:, None] == inside).expand(B, -1, -1)],
            dim=-1,
        )[:, None]
        angles = self.angles(
            (anchors[..., None] + torch.arange(b, device=blocks.device)).flatten(1)
        )
        context_angles = self.angles(torch.arange(T, device=blocks.device)[None])
        x = blocks.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, angles, context_angles, mask)
        return self.norm(x).view(B, A, b, D)


class Decoder(Draft):
    """An autoregressive draft.

    Args:
        config (dict): As in the draft's config.json.
    """

    def forward(self, x):
        """Hidden states [B, T, D] of embedded tokens [B, T, D]."""
        angles = self.angles(torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers:
            x = layer(x, None, angles, None, None)
        return self.norm(x)
