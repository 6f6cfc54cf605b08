"""Train the drafts in PyTorch: DFlash's block draft, a Qwen3 decoder, a head for MTP.

    python data/recipes/training/torch_drafts.py TEXT MODEL OUT [STEPS [NAME...]]

TEXT is what ``tiny_drafts.py text`` wrote, MODEL the target; without a NAME all drafts are trained.
Parameters have the names of z-lab's files (DFlash), of mlx-lm (decoder) and of mlx-vlm (MTP).

Letters in shapes are those of ``tiny_moe.py``, and P prompt tokens, A anchors, b block size,
V vocabulary, n target layers that are read. MTP is multi-token prediction.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_drafts import BLOCK, DRAFTS, MASK_TOKEN, config_of
from torch import nn
from torch_qwen import MLP, DecoderLayer, Heads, Writer, rotary_angles, rotate
from torch_train import BALANCE, QUANTIZE_FROM, Optimizer, export, opened

GAMMA = 7.0  # the loss of token k of a block is weighted exp(-(k - 1) / GAMMA)
WARMUP = 50  # steps until the rate is at its highest
# A bucket: tokens of a prompt, tokens of a whole text (prompt included), number of texts, texts in
# a step, anchors in a text, share of the steps that use the bucket.
BUCKETS = [
    {"prompt": 64, "length": 384, "texts": 49152, "batch": 128, "anchors": 16, "share": 0.5},
    {"prompt": 448, "length": 768, "texts": 16384, "batch": 64, "anchors": 32, "share": 0.35},
    {"prompt": 1216, "length": 1536, "texts": 4096, "batch": 32, "anchors": 32, "share": 0.15},
]
SAMPLED = 8  # every eighth text is sampled, at TEMPERATURE, the others are greedy
TEMPERATURE = 0.8
AT_ONCE = 8192  # texts written side by side
STEPS = 4000
DEPTHS = [1.0, 0.8, 0.64, 0.512]  # loss weights of tiny-mtp's 1st to 4th draft in a row


class Attention(Heads):
    def forward(self, x, seen, angles, mask):
        def heads(y, n):
            return y.view(len(y), -1, n, self.dims).transpose(1, 2)

        q = self.q_norm(heads(self.q_proj(x), self.heads))
        k = self.k_norm(heads(self.k_proj(seen), self.kv_heads))
        v = heads(self.v_proj(seen), self.kv_heads)
        q, k = rotate(q, angles[:, :, -x.shape[1] :]), rotate(k, angles)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Qwen3's decoder layer; a context adds keys and values and needs a mask."""

    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c, width=1)
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = MLP(c["hidden_size"], c["intermediate_size"])

    def forward(self, x, angles, context=None, mask=None):
        y = self.input_layernorm(x)
        seen = y if context is None else torch.cat([context, y], dim=1)
        x = x + self.self_attn(y, seen, angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.theta, self.dims = c["rope_theta"], c["head_dim"]

    def run(self, x, positions, *inputs):
        """Return hidden states of embedded tokens x [B, T, D], at the last T of the positions."""
        angles = rotary_angles(positions, self.dims // 2, self.theta)[:, None]
        for layer in self.layers:
            x = layer(x, angles, *inputs)
        return self.norm(x)


class Decoder(Draft):
    """An autoregressive draft."""

    def forward(self, x):
        """Return hidden states [B, T, D] of embedded tokens [B, T, D]."""
        return self.run(x, torch.arange(x.shape[1], device=x.device)[None])


class DFlash(Draft):
    """A DFlash draft: all tokens of a block in one pass."""

    def __init__(self, config):
        super().__init__(config)
        D = config["hidden_size"]
        self.ids, self.block = config["dflash_config"]["target_layer_ids"], config["block_size"]
        self.fc = nn.Linear(len(self.ids) * D, D, bias=False)
        self.hidden_norm = nn.RMSNorm(D, config["rms_norm_eps"])

    def forward(self, blocks, features, anchors):
        """Return hidden states [B, A, b, D] of embedded blocks: the anchor's token, then masks.

        A block sees the target's features [B, T, n * D] before its anchor ([B, A], the position of
        the block's first token).
        """
        B, A, b, _ = blocks.shape
        ahead = torch.arange(b, device=blocks.device)
        before = torch.arange(features.shape[1], device=blocks.device)
        inside = torch.arange(A, device=blocks.device).repeat_interleave(b)
        own = (inside[:, None] == inside).expand(B, -1, -1)
        past = (before < anchors[..., None]).repeat_interleave(b, dim=1)
        mask = torch.cat([past, own], dim=-1)[:, None]
        positions = (anchors[..., None] + ahead).flatten(1)
        positions = torch.cat([before.expand(B, -1), positions], dim=1)
        context = self.hidden_norm(self.fc(features))
        return self.run(blocks.flatten(1, 2), positions, context, mask).view(blocks.shape)


class MTP(nn.Module):
    """Qwen3.5's head for multi-token prediction: a decoder layer of the target, after ``fc``."""

    def __init__(self, config):
        super().__init__()
        c = config["text_config"]
        D, eps = c["hidden_size"], c["rms_norm_eps"]
        self.pre_fc_norm_embedding = nn.RMSNorm(D, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(D, eps)
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(c, c["full_attention_interval"] - 1)])
        self.norm = nn.RMSNorm(D, eps)

    def start(self, target):
        """Copy the target's last layer (full attention); let ``fc`` pass the hidden state on."""
        self.layers[0].load_state_dict(target.layers[-1].state_dict())
        nn.init.eye_(self.fc.weight.data[:, len(self.fc.weight) :])

    def forward(self, x, hidden, chain=None):
        """Return hidden states [B, T, D] of embedded tokens x [B, T, D], and the balance loss.

        ``hidden`` is the target's hidden state (after its norm) or the head's own, one position
        before x. ``chain`` has the keys and values of a chain's earlier drafts.
        """
        x = [self.pre_fc_norm_embedding(x), self.pre_fc_norm_hidden(hidden)]
        x, balance = self.layers[0](self.fc(torch.cat(x, dim=-1)), chain=chain)
        return self.norm(x), balance


KINDS = {"tiny-dflash": DFlash, "tiny-draft": Decoder, "tiny-mtp": MTP}


# Training


def write_texts(model, head, train, buckets, generator):
    """Write int16 texts [N, T] for each bucket: the target continues prompts from random places."""
    written = []
    for bucket in buckets:
        P, T, texts = bucket["prompt"], bucket["length"], min(AT_ONCE, bucket["texts"])
        writer = Writer(model, head, texts, P, T, texts // SAMPLED, TEMPERATURE)
        span, parts = torch.arange(P, device=train.device), []
        for _ in range(bucket["texts"] // texts):
            starts = torch.randint(len(train) - P, (texts, 1), generator=generator).to(train.device)
            parts.append(writer(train[starts + span].long()).short())
        written.append(torch.cat(parts))
        del writer  # frees the states of this writer before the next writer makes its own
        print("written", list(written[-1].shape), time.strftime("%H:%M:%S"), flush=True)
    return written


def block_loss(hidden, embedding, targets, weights):
    """Average weighted cross-entropy: hidden [N, b - 1, D], targets [N, b - 1], weights [b - 1]."""
    loss = F.cross_entropy(
        (hidden.flatten(0, 1) @ embedding.T).float(), targets.flatten(), reduction="none"
    )
    return (loss.view(targets.shape) * weights).sum() / (weights.sum() * len(targets))


def distil_loss(hidden, target, embedding):
    """Average the cross-entropies with the target's distribution and with its first choice.

    Inputs are the hidden states of the draft and of the target, [N, D], and the embedding [V, D].
    """
    logits = (target @ embedding.T).float()
    log_q = F.log_softmax((hidden @ embedding.T).float(), dim=-1)
    soft = -(F.softmax(logits, dim=-1) * log_q).sum(-1)
    return (soft + F.nll_loss(log_q, logits.argmax(-1), reduction="none")).mean() / 2


def mtp_loss(head, read, last, some, goal, embedding, distil):
    """Compute the loss of a chain of drafts from each position; drafts read the text's tokens.

    ``read`` and ``last`` [B, T, D] are the embedded text and the target's hidden states; ``goal``
    [N, D] are these hidden states at the indices ``some``.
    """
    hidden, chain, total = last, [], 0
    rows, columns = some
    read = read.roll(-1, 1)  # pairs token i + 1 with hidden state i; the last pair is not used
    for weight in DEPTHS:
        out, balance = head(read, hidden, chain)
        loss = distil(out[rows, columns - 1].flatten(0, 1), goal, embedding)
        total = total + weight * (loss + BALANCE * balance)
        hidden = torch.cat([last[:, :1], out[:, :-1]], dim=1)
    return total / sum(DEPTHS)


def train(model, embedding, texts, buckets, steps, generator, names):
    """Train drafts side by side on the same batches; return their optimizers and the log.

    A rate is constant after the warm-up, then falls to zero over the last 60% of the steps.
    ``texts`` has an array for each bucket. tiny-mtp ends with weights that its 4-bit file can hold.
    """
    device, on_gpu = embedding.device, embedding.is_cuda
    blocks, distil = block_loss, distil_loss
    if on_gpu:
        blocks, distil = (torch.compile(f, dynamic=False) for f in (blocks, distil))
    drafts, optimizers = {}, {}
    for name in names:
        drafts[name] = draft = KINDS[name](config_of(name)).to(device, embedding.dtype)
        # The drafts share the target's head, so their last norm starts as the target's.
        draft.norm.weight.data.copy_(model.language_model.model.norm.weight)
        if isinstance(draft, MTP):
            draft.start(model.language_model.model)
        if on_gpu:
            for layer in draft.layers:
                layer.compile(dynamic=False)
        # The drafts' matrices have too many shapes to compile Muon.
        optimizers[name] = Optimizer(draft, DRAFTS[name][2], compiled=False)
    ahead = torch.arange(BLOCK, device=device)
    weights = torch.exp(-ahead[:-1] / GAMMA)
    shares = torch.tensor([b["share"] for b in buckets])
    left = [torch.empty(0, dtype=torch.long) for _ in buckets]
    log, clock = [], time.perf_counter()
    for step in range(steps):
        i = torch.multinomial(shares, 1, generator=generator).item()
        P, T, B, A = (buckets[i][key] for key in ("prompt", "length", "batch", "anchors"))
        if len(left[i]) < B:
            left[i] = torch.randperm(len(texts[i]), generator=generator)
        rows, left[i] = left[i][:B], left[i][B:]
        ids = texts[i][rows.to(device)].long()
        anchors = torch.randint(P, T - BLOCK + 1, (B, A), generator=generator).to(device)
        every = ids.gather(1, (anchors[..., None] + ahead).flatten(1)).view(B, A, BLOCK)
        masked = torch.where(ahead == 0, every, MASK_TOKEN)
        some = torch.randint(P - 1, T - 1, (B, 8192 // B if on_gpu else 8), generator=generator)
        some = torch.arange(B, device=device)[:, None], some.to(device)
        with torch.no_grad():
            last, layers = model.language_model.model(ids)
            embedded, read = embedding[masked], embedding[ids]
            goal = last[some].flatten(0, 1)
        losses = {}
        for name, draft in drafts.items():
            if isinstance(draft, MTP):
                loss = mtp_loss(draft, read, last, some, goal, embedding, distil)
                optimizers[name].quantized = step >= QUANTIZE_FROM * steps
            elif isinstance(draft, Decoder):
                loss = distil(draft(read)[some].flatten(0, 1), goal, embedding)
            else:
                features = torch.cat([layers[i][0] for i in draft.ids], dim=-1)
                hidden = draft(embedded, features, anchors)[:, :, 1:]
                targets = every[:, :, 1:].flatten(0, 1)
                loss = blocks(hidden.flatten(0, 1), embedding, targets, weights)
            loss.backward()
            optimizers[name].step(min(1, (step + 1) / WARMUP, (1 - step / steps) / 0.6))
            draft.zero_grad(set_to_none=True)
            losses[name] = loss.detach()
        if step % max(steps // 20, 1) == 0 or step == steps - 1:
            line = {"step": step, "seconds": round(time.perf_counter() - clock, 1)}
            log.append(line | {name: round(loss.item(), 4) for name, loss in losses.items()})
            print(json.dumps(log[-1]), flush=True)
    return optimizers, log


def main(data, model_dir, out, steps=STEPS, *names):
    """Write the text with the 4-bit target, dequantized, then train the drafts and save them."""
    buckets = BUCKETS
    if not torch.cuda.is_available():  # small sizes, to try the code
        buckets = [{"prompt": 8, "length": 40, "texts": 4, "batch": 2, "anchors": 2, "share": 1.0}]
    model, head = opened(model_dir)
    model.requires_grad_(False)
    ids = torch.from_numpy(np.load(Path(data) / "train.npy").astype(np.int16)).to(head.device)
    generator = torch.Generator().manual_seed(0)
    texts = write_texts(model, head, ids, buckets, generator)
    embedding = model.language_model.model.embed_tokens.weight
    names = names or DRAFTS
    optimizers, log = train(model, embedding, texts, buckets, int(steps), generator, names)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    report = {"torch": torch.__version__, "buckets": buckets, "log": log}
    (out / "training.json").write_text(json.dumps(report, indent=1))
    for name, optimizer in optimizers.items():
        if KINDS[name] is MTP:
            export(optimizer.masters, out / name, config_of(name))
            continue
        weights = {k: v.detach().bfloat16().cpu() for k, v in optimizer.params.items()}
        save_file(weights, out / f"{name}.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
