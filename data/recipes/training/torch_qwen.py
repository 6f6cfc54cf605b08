"""Qwen3.5-MoE in PyTorch for training; its parameters have mlx-lm's names and shapes.

It computes what ``mlx_lm.models.qwen3_5_moe`` computes, so that a checkpoint only needs to be
quantized. Letters in shapes are those of ``tiny_moe.py``, and H heads.
"""

import torch
import torch.nn.functional as F
from torch import nn


def rotary_angles(positions, half, theta):
    """Compute the rotary embedding's angles [..., half] at positions [...]."""
    return positions[..., None] * theta ** (-torch.arange(half, device=positions.device) / half)


def rotate(x, angles):
    """Rotate the first 2 * half numbers of x [..., Dh] by angles [..., half]."""
    half = angles.shape[-1]
    a, b, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


class Conv1d(nn.Module):
    """Causal depthwise convolution over T; weight [C, taps, 1] as mlx has it.

    With ``before`` [B, taps - 1, C] it takes one position, and updates ``before`` in place.
    """

    def __init__(self, channels, taps):
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(channels, taps, 1).uniform_(-(taps**-0.5), taps**-0.5)
        )

    def forward(self, x, before=None):
        taps = self.weight.shape[1]
        if before is None:
            x = F.pad(x, (0, 0, taps - 1, 0))
        else:
            x = torch.cat([before, x], dim=1)
            before.copy_(x[:, 1:])
        length = x.shape[1] - taps + 1
        # torch.compile makes these products one kernel; it cannot fuse cuDNN's convolution.
        return sum(x[:, i : i + length] * self.weight[:, i, 0] for i in range(taps))


def delta_rule(q, k, v, g, beta):
    """Apply the gated delta rule over T, with fla on a GPU, else with transformers' reference.

    Shapes: q, k [B, T, Hk, Dk], not yet normalized; v and the result [B, T, Hv, Dv]; log decay g
    (float32) and write strength beta [B, T, Hv].
    """
    if q.is_cuda:
        from fla_hopper import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def delta_step(state, q, k, v, g, beta):
    """Apply the rule to one position, q, k, v [B, H, D]; update state [B, H, Dk, Dv] in place."""
    state.mul_(g.exp()[..., None, None])
    error = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state.add_(k[..., None] * error[..., None, :])
    return (state * q[..., None]).sum(-2)


compiled_delta_step = torch.compile(delta_step, dynamic=False)


def delta_rule_at(state, q, k, v, g, beta):
    """Apply ``delta_rule`` to one position, T = 1, after the positions that ``state`` sums up."""
    q, k, v, g, beta = (x[:, 0].float() for x in (q, k, v, g, beta))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    return (compiled_delta_step if v.is_cuda else delta_step)(state, q, k, v, g, beta)[:, None]


class GatedDeltaNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.k_heads, self.v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.k_dim, self.v_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]
        keys, values = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        self.sizes = [keys, keys, values]
        D = c["hidden_size"]
        self.conv1d = Conv1d(sum(self.sizes), c["linear_conv_kernel_dim"])
        self.in_proj_qkv = nn.Linear(D, sum(self.sizes), bias=False)
        self.in_proj_z = nn.Linear(D, self.sizes[2], bias=False)
        self.in_proj_b = nn.Linear(D, self.v_heads, bias=False)
        self.in_proj_a = nn.Linear(D, self.v_heads, bias=False)
        # Mamba's initial values: a state decays over a few tokens, or over up to thousands.
        dt = torch.exp(torch.empty(self.v_heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.empty(self.v_heads).uniform_(1, 16).log())
        self.norm = nn.RMSNorm(self.v_dim, c["rms_norm_eps"])
        self.out_proj = nn.Linear(self.sizes[2], D, bias=False)

    def forward(self, x, before=None, state=None):
        B, T, _ = x.shape
        q, k, v = F.silu(self.conv1d(self.in_proj_qkv(x), before)).split(self.sizes, dim=-1)
        q, k = (t.reshape(B, T, self.k_heads, self.k_dim) for t in (q, k))
        v, z = (t.reshape(B, T, self.v_heads, self.v_dim) for t in (v, self.in_proj_z(x)))
        beta = self.in_proj_b(x).sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        inputs = q, k, v, g, beta
        y = delta_rule(*inputs) if state is None else delta_rule_at(state, *inputs).to(x.dtype)
        y = (self.norm(y).float() * F.silu(z.float())).to(x.dtype)
        return self.out_proj(y.reshape(B, T, -1))


def attend_chain(q, k, v, chain):
    """Compute attention for one step of all chains of drafts; every position begins a chain.

    A chain of drafts begins at its anchor, position a; its step j (0, 1, ...) is at a + j. A query
    of step j sees the keys of step 0 up to position a, and one key of each step s from 1 to j: the
    key at a + s. ``chain`` has keys and values of earlier steps; those of this step are added. q is
    [B, H, T, Dh], k and v [B, Hk, T, Dh].
    """
    j, at = len(chain), torch.arange(q.shape[2], device=q.device)
    anchor = at[:, None] - j
    mask = torch.cat([at <= anchor, *(at == anchor + s for s in range(1, j + 1))], dim=1)
    chain.append((k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = (torch.cat(t, dim=2).repeat_interleave(repeats, dim=1) for t in zip(*chain))
    mask = mask if j else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not j)


class Heads(nn.Module):
    """The projections of an attention layer; a query is ``width`` times as wide as a key."""

    def __init__(self, c, width):
        super().__init__()
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.dims = c["head_dim"]
        D = c["hidden_size"]
        self.q_proj = nn.Linear(D, self.heads * self.dims * width, bias=False)
        self.k_proj = nn.Linear(D, self.kv_heads * self.dims, bias=False)
        self.v_proj = nn.Linear(D, self.kv_heads * self.dims, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dims, D, bias=False)
        self.q_norm = nn.RMSNorm(self.dims, c["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(self.dims, c["rms_norm_eps"])


class Attention(Heads):
    def __init__(self, c):
        super().__init__(c, width=2)
        rope = c["rope_parameters"]
        self.half = int(self.dims * rope["partial_rotary_factor"]) // 2
        self.theta = rope["rope_theta"]

    def forward(self, x, keys=None, values=None, position=None, chain=None):
        B, T, _ = x.shape
        q, gate = self.q_proj(x).view(B, T, self.heads, 2 * self.dims).chunk(2, dim=-1)
        k = self.k_proj(x).view(B, T, self.kv_heads, self.dims)
        v = self.v_proj(x).view(B, T, self.kv_heads, self.dims).transpose(1, 2)
        positions = torch.arange(T, device=x.device) if position is None else position
        angles = rotary_angles(positions, self.half, self.theta)
        q, k = (rotate(y.transpose(1, 2), angles) for y in (self.q_norm(q), self.k_norm(k)))
        if chain is not None:
            y = attend_chain(q, k, v, chain)
        elif keys is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            seen = (torch.arange(keys.shape[2], device=x.device) <= position)[None, None, None]
            # The query heads of one key/value head become its queries.
            q = q.reshape(B, self.kv_heads, -1, self.dims)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            y = y.reshape(B, self.heads, 1, self.dims)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1) * gate.reshape(B, T, -1).sigmoid())


class Permute(torch.autograd.Function):
    """Repeat each row of x [N, D] k times, in an order [N * k] whose inverse is known.

    Forward and backward are gathers; autograd would scatter with atomics.
    """

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse].view(-1, ctx.k, grad.shape[-1]).sum(1), None, None, None


class Experts(nn.Module):
    """One projection of all experts, weight [E, out, in]."""

    def __init__(self, E, out, into):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(E, out, into).uniform_(-(into**-0.5), into**-0.5))


class SwitchGLU(nn.Module):
    def __init__(self, D, hidden, E):
        super().__init__()
        self.gate_proj = Experts(E, hidden, D)
        self.up_proj = Experts(E, hidden, D)
        self.down_proj = Experts(E, D, hidden)

    def forward(self, x, indices, scores):
        N, K = indices.shape
        E = self.gate_proj.weight.shape[0]
        experts, order = indices.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(N * K, device=x.device))
        ends = torch.searchsorted(experts, torch.arange(E, device=x.device), right=True).int()
        gate_up = torch.cat([self.gate_proj.weight, self.up_proj.weight], dim=1)
        h = F.grouped_mm(Permute.apply(x, order, inverse, K), gate_up.transpose(1, 2), offs=ends)
        gate, up = h.chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down_proj.weight.transpose(1, 2), offs=ends)
        y = Permute.apply(y, inverse, order, 1).view(N, K, -1)
        return (y * scores[..., None].to(y.dtype)).sum(1), ends


class MLP(nn.Module):
    def __init__(self, D, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(D, hidden, bias=False)
        self.up_proj = nn.Linear(D, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, D, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoeBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        D, E = c["hidden_size"], c["num_experts"]
        self.k = c["num_experts_per_tok"]
        self.gate = nn.Linear(D, E, bias=False)
        nn.init.normal_(self.gate.weight, std=0.02)  # near uniform, so that experts start alike
        self.switch_mlp = SwitchGLU(D, c["moe_intermediate_size"], E)
        self.shared_expert = MLP(D, c["shared_expert_intermediate_size"])
        self.shared_expert_gate = nn.Linear(D, 1, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        x = x.view(-1, D)
        probs = self.gate(x).float().softmax(-1)
        scores, indices = probs.topk(self.k, dim=-1)
        scores = scores / scores.sum(-1, keepdim=True)
        y, ends = self.switch_mlp(x, indices, scores)
        y = y + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        # Switch Transformer's balance loss over the whole batch: 1 when the load is even.
        load = torch.diff(ends, prepend=ends.new_zeros(1)) / indices.numel()
        return y.view(B, T, D), probs.shape[-1] * (load * probs.mean(0)).sum()


class DecoderLayer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.is_linear = (index + 1) % c["full_attention_interval"] != 0
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = SparseMoeBlock(c)

    def forward(self, x, *state, **chain):
        mixer = self.linear_attn if self.is_linear else self.self_attn
        x = x + mixer(self.input_layernorm(x), *state, **chain)
        y, balance = self.mlp(self.post_attention_layernorm(x))
        return x + y, balance


class TextModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, ids):
        """Return the last hidden states [B, T, D], and each layer's output and balance loss."""
        x, layers = self.embed_tokens(ids), []
        for layer in self.layers:
            layers.append(layer(x))
            x = layers[-1][0]
        return self.norm(x), layers


def token_loss(hidden, weight, targets):
    """Compute each target's loss in nats [N], from hidden [N, D] and the tied embedding [V, D]."""
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="none")


class Model(nn.Module):
    """The language model of a config's ``text_config``; its head is tied to the embedding."""

    def __init__(self, text_config):
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.model = TextModel(text_config)
        self.token_loss = token_loss

    def compile(self):
        """Compile each layer and the loss: a graph for each kind of layer, not one for all."""
        for layer in self.language_model.model.layers:
            layer.compile(dynamic=False)
        self.token_loss = torch.compile(token_loss, dynamic=False)

    def forward(self, ids):
        """Return the loss in nats of all tokens but the first, [B, T - 1], and the balance loss."""
        x, layers = self.language_model.model(ids[:, :-1])
        weight = self.language_model.model.embed_tokens.weight
        loss = self.token_loss(x.flatten(0, 1), weight, ids[:, 1:].flatten())
        return loss.view(len(ids), -1), torch.stack([balance for _, balance in layers]).mean()


class Writer:
    """Continue many texts at once, all to the same length, with the target, by one CUDA graph.

    The first ``sampled`` texts are sampled, the others greedy; ``head`` is the float32 embedding.
    """

    def __init__(self, model, head, texts, prompt, length, sampled, temperature):
        self.model, self.head = model.language_model.model, head
        self.prompt, self.length = prompt, length
        self.sampled, self.temperature = sampled, temperature
        device, dtype = head.device, self.model.norm.weight.dtype
        self.ids = torch.zeros(texts, length, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.states, self.graph = [], None

        def zeros(*shape, dtype=dtype):
            return torch.zeros(texts, *shape, dtype=dtype, device=device)

        for layer in self.model.layers:
            if layer.is_linear:
                m = layer.linear_attn
                before = zeros(m.conv1d.weight.shape[1] - 1, sum(m.sizes))
                state = zeros(m.v_heads, m.k_dim, m.v_dim, dtype=torch.float32)
                self.states.append((before, state))
            else:
                m = layer.self_attn
                keys, values = (zeros(m.kv_heads, length, m.dims) for _ in range(2))
                self.states.append((keys, values, self.position))

    def _step(self):
        x = self.model.embed_tokens(self.ids.index_select(1, self.position))
        for layer, state in zip(self.model.layers, self.states):
            x = layer.forward(x, *state)[0]  # not compiled: a CUDA graph replays the step
        logits = self.model.norm(x)[:, 0].float() @ self.head.T
        if self.sampled:
            some = logits[: self.sampled]
            some += self.temperature * -torch.empty_like(some).exponential_().log()  # Gumbel noise
        self.position += 1
        token = logits.argmax(-1, keepdim=True)
        known = self.ids.index_select(1, self.position)
        token = torch.where(self.position < self.prompt, known, token)
        self.ids.index_copy_(1, self.position, token)

    def _capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    @torch.no_grad()
    def __call__(self, prompts):
        """Continue prompts [B, P] to texts [B, T]."""
        if self.graph is None and prompts.is_cuda:
            self._capture()
        for state in self.states:
            for t in state:
                t.zero_()
        self.position.zero_()
        self.ids[:, : self.prompt] = prompts
        for _ in range(self.length - 1):
            self.graph.replay() if self.graph else self._step()
        return self.ids.clone()
