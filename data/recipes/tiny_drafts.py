"""tiny-dflash and tiny-draft: a DFlash block draft and a small autoregressive draft for tiny-moe.

    pip install --no-deps --target build/drafts/site -r data/recipes/draft_packages.txt
    python data/recipes/tiny_drafts.py text build/drafts/site data/models/tiny-moe build/drafts
    python data/recipes/tiny_drafts.py train build/drafts data/models/tiny-moe OUT  # on a CUDA GPU
    python data/recipes/tiny_drafts.py pack OUT data/models/tiny-moe data/models    # anywhere

The drafts learn what the 4-bit target itself writes. ``text`` and ``train`` need PyTorch; ``train``
also fla-core and moelab (any build of MLX) for the prompts to measure on; ``pack`` needs MLX.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import corpus
import tiny_moe
from tiny_moe import TEXT_CONFIG

# B batch, T tokens, P prompt tokens, D hidden, A anchors, b block size, V vocabulary.
BLOCK = 16  # b
GAMMA = 7.0  # of the loss weights exp(-(k - 1) / GAMMA)
MASK_TOKEN = 2
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": TEXT_CONFIG["hidden_size"],
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "max_position_embeddings": TEXT_CONFIG["max_position_embeddings"],
    "vocab_size": TEXT_CONFIG["vocab_size"],
    "pad_token_id": TEXT_CONFIG["pad_token_id"],
    "eos_token_id": TEXT_CONFIG["eos_token_id"],
}
# What is trained side by side: name, decoder layers, and target layers read (evenly spaced from 1
# to L - 3, except in dflash4late).
CANDIDATES = {
    "dflash2": (2, [1, 5]),
    "dflash3": (3, [1, 3, 5]),
    "dflash4": (4, [1, 2, 4, 5]),
    "dflash4late": (4, [1, 3, 5, 7]),
    "draft3": (3, None),
}
# Prompt and whole length of a text, texts, texts in a step, anchors in each, share of the steps.
BUCKETS = [
    {"prompt": 64, "length": 384, "texts": 49152, "batch": 128, "anchors": 16, "share": 0.5},
    {"prompt": 448, "length": 768, "texts": 16384, "batch": 64, "anchors": 32, "share": 0.35},
    {"prompt": 1216, "length": 1536, "texts": 4096, "batch": 32, "anchors": 32, "share": 0.15},
]
SAMPLED = 8  # every eighth text is sampled, at TEMPERATURE, the others are greedy
TEMPERATURE = 0.8
WRITTEN = 320  # tokens of the target behind a prompt


def config_of(name):
    """Config of a candidate as its ``config.json`` will have it."""
    depth, ids = CANDIDATES[name]
    config = CONFIG | {"num_hidden_layers": depth}
    if ids is None:
        return config | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    return config | {
        "architectures": ["DFlashDraftModel"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * depth,
        "sliding_window": None,
        "use_sliding_window": False,
        "block_size": BLOCK,
        "num_target_layers": TEXT_CONFIG["num_hidden_layers"],
        "dflash_config": {"target_layer_ids": ids, "mask_token_id": MASK_TOKEN},
    }


# Text


def write_text(site, model_dir, out, nbytes):
    """Token ids of the corpus in the target's vocabulary: two ``.npy`` files and ``manifest.json``.

    Args:
        site (Path): Folder that ``pip install --target`` filled.
        model_dir (Path): The target, for its tokenizer.
        out (Path): Folder to write.
        nbytes (int): Text to take for training, in the order of the names' hashes.
    """
    from multiprocessing import Pool

    import numpy as np
    from transformers import AutoTokenizer

    packages, files = corpus.sources([site])
    with Pool() as pool:
        texts = pool.map(corpus.read, [path for _, _, path in files], chunksize=200)
    splits = corpus.split(
        [
            (package, name, text)
            for (package, name, _), text in zip(files, texts)
            if text is not None
        ]
    )
    reserved = set()  # the held-out packages need not be installed here
    for path in Path(model_dir, "heldout").glob("*.*"):
        reserved |= corpus.shingles(path.read_text(encoding="utf-8"))
    train, used = [], dict.fromkeys((p["name"] for p in packages), 0)
    for document in sorted(
        splits["train"], key=lambda d: hashlib.sha256(f"{d[0]}/{d[1]}".encode()).digest()
    ):
        if nbytes < 0:
            break
        if corpus.overlap(document[2], reserved) > 0.05:
            continue
        train.append(document)
        used[document[0]] += len(document[2].encode())
        nbytes -= len(document[2].encode())
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    manifest = {"packages": [p | {"train_bytes": used[p["name"]]} for p in packages]}
    for name, documents in (("train", train), ("valid", splits["valid"])):
        ids = corpus.encode(tokenizer, [text for _, _, text in documents])
        np.save(out / f"{name}.npy", ids)
        manifest[name] = {"files": len(documents), "tokens": len(ids)}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))


# The target: all positions at once, and one at a time


def load_target(model_dir, device):
    """The 4-bit target, dequantized, and its tied embedding [V, D] in float32."""
    from torch_qwen import Model

    model = Model(TEXT_CONFIG)
    model.load_state_dict(tiny_moe.read(model_dir))
    model = model.to(device)
    head = model.language_model.model.embed_tokens.weight.detach().clone()
    return model.requires_grad_(False), head


def outputs(model, ids):
    """Outputs of every decoder layer for ids [B, T], each [B, T, D], and the last hidden states."""
    inner = model.language_model.model
    x, layers = inner.embed_tokens(ids), []
    for layer in inner.layers:
        x = layer(x)[0]
        layers.append(x)
    return layers, inner.norm(x)


def delta_step(state, q, k, v, g, beta):
    """One position of the gated delta rule, [B, H, Dv]; updates state [B, H, Dk, Dv] in place."""
    state.mul_(g.exp()[..., None, None])
    error = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state.add_(k[..., None] * error[..., None, :])
    return (state * q[..., None]).sum(-2)


class Writer:
    """The target continuing many texts of one length at once, with one CUDA graph for a position.

    Args:
        model, head: What ``load_target`` returned.
        texts (int): B; the last one of every ``SAMPLED`` of them is sampled if ``sampled``.
        prompt, length (int): P and T.
        sampled (bool): Sample some of them.
    """

    def __init__(self, model, head, texts, prompt, length, sampled):
        import torch

        self.torch, self.model, self.head = torch, model.language_model.model, head
        self.length, self.sampled = length, texts // SAMPLED if sampled else 0
        c, device = TEXT_CONFIG, head.device
        self.dtype = dtype = self.model.norm.weight.dtype
        self.ids = torch.zeros(texts, length, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.prompt = prompt
        self.states = []
        for layer in self.model.layers:
            if layer.is_linear:
                m = layer.linear_attn
                conv = torch.zeros(
                    texts, m.conv1d.weight.shape[1] - 1, sum(m.sizes), dtype=dtype, device=device
                )
                self.states.append(
                    (conv, torch.zeros(texts, m.v_heads, m.k_dim, m.v_dim, device=device))
                )
            else:
                shape = (texts, c["num_key_value_heads"], length, c["head_dim"])
                self.states.append(
                    tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
                )
        self.delta_step = (
            torch.compile(delta_step, dynamic=False) if device.type == "cuda" else delta_step
        )
        self.graph = None

    def _linear(self, m, x, conv, state):
        torch = self.torch
        F = torch.nn.functional
        seen = torch.cat([conv, m.in_proj_qkv(x)[:, None]], dim=1)
        conv.copy_(seen[:, 1:])
        mixed = F.silu(sum(seen[:, i] * m.conv1d.weight[:, i, 0] for i in range(seen.shape[1])))
        q, k, v = mixed.float().split(m.sizes, dim=-1)
        q, k = (t.unflatten(-1, (m.k_heads, m.k_dim)) for t in (q, k))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(m.v_heads // m.k_heads, dim=1) for t in (q * m.k_dim**-0.5, k))
        g = -m.A_log.float().exp() * F.softplus(m.in_proj_a(x).float() + m.dt_bias.float())
        y = self.delta_step(
            state, q, k, v.unflatten(-1, (m.v_heads, m.v_dim)), g, m.in_proj_b(x).sigmoid().float()
        )
        z = m.in_proj_z(x).unflatten(-1, (m.v_heads, m.v_dim))
        y = (m.norm(y.to(x.dtype)).float() * F.silu(z.float())).to(x.dtype)
        return m.out_proj(y.flatten(1))

    def _rope(self, m, x):  # [B, H, Dh]
        torch = self.torch
        half = m.rotary // 2
        angles = self.position * m.theta ** (-torch.arange(half, device=x.device) / half)
        a, b, rest = x.float().split([half, half, m.dims - m.rotary], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)

    def _attention(self, m, x, keys, values):
        B = len(x)
        q, gate = m.q_proj(x).view(B, m.heads, 2 * m.dims).chunk(2, dim=-1)
        k, v = (p(x).view(B, m.kv_heads, m.dims) for p in (m.k_proj, m.v_proj))
        q, k = self._rope(m, m.q_norm(q)), self._rope(m, m.k_norm(k))
        keys.index_copy_(2, self.position, k[:, :, None])
        values.index_copy_(2, self.position, v[:, :, None])
        seen = (self.torch.arange(self.length, device=x.device) <= self.position)[None, None, None]
        q = q.reshape(B, m.kv_heads, -1, m.dims)  # the heads of one key/value head are its queries
        y = self.torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return m.o_proj((y.reshape(B, m.heads, m.dims) * gate.sigmoid()).flatten(1))

    def _step(self):
        torch = self.torch
        x = self.model.embed_tokens(self.ids.index_select(1, self.position)[:, 0])
        for layer, state in zip(self.model.layers, self.states):
            mixer = self._linear if layer.is_linear else self._attention
            x = x + mixer(
                layer.linear_attn if layer.is_linear else layer.self_attn,
                layer.input_layernorm(x),
                *state,
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x)[:, None])[0][:, 0]
        logits = self.model.norm(x).float() @ self.head.T
        if self.sampled:
            some = logits[: self.sampled]
            some += TEMPERATURE * -torch.empty_like(some).exponential_().log()  # Gumbel
        self.position += 1
        token = logits.argmax(-1, keepdim=True)
        known = self.ids.index_select(1, self.position)
        self.ids.index_copy_(
            1, self.position, torch.where(self.position < self.prompt, known, token)
        )

    def __call__(self, prompts):
        """Texts [B, T] that go on from prompts [B, P]; the sampled ones come first."""
        torch = self.torch
        with torch.no_grad():
            if self.graph is None and prompts.is_cuda:
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
            for state in self.states:
                for t in state:
                    t.zero_()
            self.position.zero_()
            self.ids[:, : self.prompt] = prompts
            for _ in range(self.length - 1):
                self.graph.replay() if self.graph else self._step()
        return self.ids.clone()


# Acceptance, at temperature 0: how many of the draft's tokens are those the target wrote


def runs_dflash(draft, embedding, ids, features, prompt, ends):
    """Accepted tokens of every cycle over texts that the target wrote greedily.

    Args:
        draft (DFlash): The draft.
        embedding (Tensor): The target's embedding [V, D].
        ids (Tensor): Texts [B, T].
        features (Tensor): The target's features of them [B, T, n * D].
        prompt (int): P; the first cycle starts there.
        ends (Tensor): Where each text ends, [B].

    Returns:
        list[tuple[int, int, int]]: Text, position and accepted tokens (0 to b - 1) of each cycle.
    """
    import torch

    at, cycles = torch.full_like(ends, prompt), []
    span = torch.arange(1, draft.block, device=ids.device)
    while True:
        live = (at + draft.block <= ends).nonzero()[:, 0]
        if not len(live):
            return cycles
        anchors = at[live, None]
        block = torch.full((len(live), draft.block), MASK_TOKEN, device=ids.device)
        block[:, 0] = ids[live].gather(1, anchors)[:, 0]
        hidden = draft(embedding[block][:, None], features[live], anchors)[:, 0, 1:]
        guesses = (hidden.float() @ embedding.float().T).argmax(-1)
        right = guesses == ids[live].gather(1, anchors + span)
        accepted = right.long().cumprod(1).sum(1)
        cycles += zip(live.tolist(), at[live].tolist(), accepted.tolist())
        at[live] += accepted + 1


def runs_decoder(draft, embedding, ids, prompt, ends):
    """``runs_dflash`` of an autoregressive draft, in one pass: accepted tokens are the target's."""
    guesses = (draft(embedding[ids]).float() @ embedding.float().T).argmax(-1)
    right = (guesses[:, :-1] == ids[:, 1:]).tolist()
    cycles = []
    for i, (row, end) in enumerate(zip(right, ends.tolist())):
        at = prompt
        while at + BLOCK <= end:
            wrong = [j for j in range(BLOCK - 1) if not row[at + j]]
            accepted = wrong[0] if wrong else BLOCK - 1
            cycles.append((i, at, accepted))
            at += accepted + 1
    return cycles


def summary(cycles, prompt):
    """tau, its histogram [b], cycles, and tau of the cycles that start in the first 100 tokens."""
    accepted = [a for _, _, a in cycles]
    early = [a for _, at, a in cycles if at < prompt + 100]
    return {
        "tau": 1 + sum(accepted) / max(len(accepted), 1),
        "tau_first_100": 1 + sum(early) / max(len(early), 1),
        "cycles": len(accepted),
        "histogram": [accepted.count(k) for k in range(BLOCK)],
    }


def write_sets(model, head, model_dir, data, texts=256):
    """Texts to measure on, written by the target: {name: (ids [B, T], P, ends [B])}.

    Decisions may rest on ``valid`` only; the others are held out.
    """
    import numpy as np
    import torch

    valid = np.load(data / "valid.npy").astype(np.int64)
    starts = np.linspace(0, len(valid) - 257, texts).astype(int)
    prompts = {"valid": [valid[i : i + 256].tolist() for i in starts]}
    for kind, length in (("code", 256), ("prose", 256), ("code", 64), ("code", 1024)):
        from moelab.lab.texts import heldout_prompts

        prompts[f"{kind}_{length}"] = heldout_prompts(model_dir, kind, length)[:texts]
    sets = {}
    for name, rows in prompts.items():
        rows = torch.tensor(rows, device=head.device)
        P = rows.shape[1]
        ids = Writer(model, head, len(rows), P, P + WRITTEN, False)(rows)
        after = (ids == TEXT_CONFIG["eos_token_id"]) & (
            torch.arange(ids.shape[1], device=ids.device) >= P
        )
        ends = torch.where(after.any(1), after.int().argmax(1), ids.shape[1])
        sets[name] = (ids, P, ends)
    return sets


def measure(drafts, model, embedding, sets):
    """Acceptance of every draft on every set: {draft: {set: summary}}."""
    import torch

    report = {name: {} for name in drafts}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for which, (ids, P, ends) in sets.items():
            layers, _ = outputs(model, ids)
            for name, draft in drafts.items():
                if CANDIDATES[name][1] is None:
                    cycles = runs_decoder(draft, embedding, ids, P, ends)
                else:
                    features = torch.cat([layers[i] for i in draft.ids], dim=-1)
                    cycles = runs_dflash(draft, embedding, ids, features, P, ends)
                report[name][which] = summary(cycles, P)
    return report


# Training


def block_loss(hidden, embedding, targets, weights):
    """Weighted cross-entropy of blocks: hidden [N, b - 1, D], targets the same, weights [b - 1]."""
    import torch.nn.functional as F

    loss = F.cross_entropy(
        (hidden.flatten(0, 1) @ embedding.T).float(), targets.flatten(), reduction="none"
    )
    return (loss.view(targets.shape) * weights).sum() / (weights.sum() * len(targets))


def distil_loss(hidden, target, embedding):
    """Mean of the cross-entropies with the target's distribution and with its first choice.

    Args:
        hidden (Tensor): Of the draft, [N, D].
        target (Tensor): Of the target, [N, D].
        embedding (Tensor): [V, D].
    """
    import torch.nn.functional as F

    logits = (target @ embedding.T).float()
    log_q = F.log_softmax((hidden @ embedding.T).float(), dim=-1)
    soft = -(F.softmax(logits, dim=-1) * log_q).sum(-1)
    return (soft + F.nll_loss(log_q, logits.argmax(-1), reduction="none")).mean() / 2


def write_texts(model, head, train, buckets, at_once, generator):
    """Texts [N, T] for each bucket, int16: prompts from random places of the corpus, continued."""
    import torch

    written = []
    for bucket in buckets:
        P, T, texts = bucket["prompt"], bucket["length"], min(at_once, bucket["texts"])
        writer = Writer(model, head, texts, P, T, True)
        parts = []
        for _ in range(bucket["texts"] // texts):
            starts = torch.randint(len(train) - P, (texts, 1), generator=generator).to(train.device)
            parts.append(
                writer(train[starts + torch.arange(P, device=train.device)].long()).short()
            )
        written.append(torch.cat(parts))
        del writer
        print(
            json.dumps({"written": list(written[-1].shape), "at": time.strftime("%H:%M:%S")}),
            flush=True,
        )
    return written


def train_all(steps, lr, model, embedding, texts, buckets, seed=0, warmup=50):
    """Train the candidates side by side on the same batches.

    Args:
        steps (int): Steps; after the warm-up the rate is constant, then falls to zero over the last
            60%.
        lr (dict[str, float]): The highest learning rate of each candidate.
        model, embedding: The target and its embedding in its own precision.
        texts (list[Tensor]): Of each bucket.
        buckets (list[dict]): As ``BUCKETS``.
        seed (int): Seed of the weights and the batches.
        warmup (int): Steps until the rate is at its highest.

    Returns:
        tuple[dict, list[dict]]: The trained drafts by name, and the log.
    """
    import torch
    from torch_drafts import Decoder, DFlash

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    device, on_gpu = embedding.device, embedding.is_cuda
    blocks, distil = (
        torch.compile(f, dynamic=False) if on_gpu else f for f in (block_loss, distil_loss)
    )
    drafts, optimizers = {}, {}
    for name, rate in lr.items():
        draft = (Decoder if CANDIDATES[name][1] is None else DFlash)(config_of(name)).to(
            device, embedding.dtype
        )
        # The head is the target's own, and so is its scale.
        draft.norm.weight.data.copy_(model.language_model.model.norm.weight)
        if on_gpu:
            draft.compile()
        drafts[name], optimizers[name] = draft, tiny_moe.Optimizer(draft, rate, decay=0.1)
        optimizers[name].orthogonal = tiny_moe.orthogonal  # too many shapes to compile
    weights = torch.exp(-torch.arange(BLOCK - 1, device=device) / GAMMA)
    shares = torch.tensor([b["share"] for b in buckets])
    left = [torch.empty(0, dtype=torch.long) for _ in buckets]
    log, clock = [], time.perf_counter()
    for step in range(steps):
        i = torch.multinomial(shares, 1, generator=generator).item()
        bucket, (B, A) = buckets[i], (buckets[i]["batch"], buckets[i]["anchors"])
        P, T = bucket["prompt"], bucket["length"]
        if len(left[i]) < B:
            left[i] = torch.randperm(len(texts[i]), generator=generator)
        rows, left[i] = left[i][:B], left[i][B:]
        ids = texts[i][rows.to(device)].long()
        anchors = torch.randint(P, T - BLOCK + 1, (B, A), generator=generator).to(device)
        every = ids.gather(
            1, (anchors[..., None] + torch.arange(BLOCK, device=device)).flatten(1)
        ).view(B, A, BLOCK)
        masked = torch.where(torch.arange(BLOCK, device=device) == 0, every, MASK_TOKEN)
        some = torch.randint(P - 1, T - 1, (B, 8192 // B if on_gpu else 8), generator=generator).to(
            device
        )
        with torch.no_grad():
            layers, last = outputs(model, ids)
            embedded, read = embedding[masked], embedding[ids]
            row = torch.arange(B, device=device)[:, None]
            goal = last[row, some].flatten(0, 1)
        losses = {}
        for name, draft in drafts.items():
            if CANDIDATES[name][1] is None:
                loss = distil(draft(read)[row, some].flatten(0, 1), goal, embedding)
            else:
                features = torch.cat([layers[j] for j in draft.ids], dim=-1)
                hidden = draft(embedded, features, anchors)[:, :, 1:].flatten(0, 1)
                loss = blocks(hidden, embedding, every[:, :, 1:].flatten(0, 1), weights)
            loss.backward()
            optimizers[name].step(min(1, (step + 1) / warmup, (1 - step / steps) / 0.6))
            draft.zero_grad(set_to_none=True)
            losses[name] = loss.detach()
        if step % max(steps // 20, 1) == 0 or step == steps - 1:
            seconds = round(time.perf_counter() - clock, 1)
            log.append(
                {"step": step, "seconds": seconds}
                | {n: round(v.item(), 4) for n, v in losses.items()}
            )
            print(json.dumps(log[-1]), flush=True)
    return drafts, log


def train(data, model_dir, out, steps, lr, names, at_once=8192, seed=0):
    """Write the text, train the candidates for each number of steps, measure and save them.

    Args:
        data (Path): What ``write_text`` wrote.
        model_dir (Path): The target.
        out (Path): Folder for ``<name>.safetensors`` and ``training.json``.
        steps (list[int]): Lengths to train for; the longest last.
        lr (list[float]): Learning rates, tried at the first length; the others take the one that
            was best on the validation text.
        names (list[str]): Of ``CANDIDATES``.
        at_once (int): B of the writer.
        seed (int): Seed.
    """
    import numpy as np
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    buckets = BUCKETS
    if device.type == "cpu":  # to try the code
        buckets = [{"prompt": 8, "length": 40, "texts": 4, "batch": 2, "anchors": 2, "share": 1.0}]
    model, head = load_target(model_dir, device)
    if device.type == "cuda":
        model.compile()
        model = model.bfloat16()
    embedding = model.language_model.model.embed_tokens.weight
    ids = torch.from_numpy(np.load(data / "train.npy").astype(np.int16)).to(device)
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    report |= {"buckets": buckets, "runs": []}
    out.mkdir(parents=True, exist_ok=True)
    clock = time.perf_counter()
    sets = write_sets(model, head, model_dir, data, texts=256 if device.type == "cuda" else 2)
    report["sets"] = {
        k: {"texts": len(i), "prompt": P, "mean_length": (e - P).float().mean().item()}
        for k, (i, P, e) in sets.items()
    }
    cache = data / "texts.pt"  # a second call on the same host need not write them again
    if cache.exists():
        texts = [t.to(device) for t in torch.load(cache)]
    else:
        texts = write_texts(model, head, ids, buckets, at_once, torch.Generator().manual_seed(seed))
        torch.save([t.cpu() for t in texts], cache)
    report["writing_seconds"] = time.perf_counter() - clock
    best = {}  # tau on the validation text and the rate that gave it
    for n, rate in [(steps[0], rate) for rate in lr] + [(n, None) for n in steps[1:]]:
        rates = {name: rate or best[name][1] for name in names}
        clock = time.perf_counter()
        drafts, log = train_all(n, rates, model, embedding, texts, buckets, seed)
        run = {"steps": n, "lr": rates, "seconds": time.perf_counter() - clock, "log": log}
        run["acceptance"] = measure(drafts, model, embedding, sets)
        report["runs"].append(run)
        (out / "training.json").write_text(json.dumps(report, indent=1))
        for name, figures in run["acceptance"].items():
            best[name] = max(best.get(name, (0, 0)), (figures["valid"]["tau"], rates[name]))
            taus = {
                k: (round(v["tau"], 2), round(v["tau_first_100"], 2)) for k, v in figures.items()
            }
            print(n, rates[name], name, json.dumps(taus), flush=True)
        for name, draft in drafts.items():
            weights = {
                k: v.detach().bfloat16().contiguous().cpu() for k, v in draft.state_dict().items()
            }
            save_file(weights, out / f"{name}.safetensors", metadata={"format": "pt"})


# Packing: what is shipped


def pack(trained, model_dir, out, dflash, draft):
    """Write ``tiny-dflash`` and ``tiny-draft`` from two trained candidates.

    Args:
        trained (Path): What ``train`` wrote.
        model_dir (Path): The target, whose tokenizer and, for the autoregressive draft, embedding
            are used.
        out (Path): Folder of both.
        dflash, draft (str): Of ``CANDIDATES``.
    """
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.models.qwen3 import Model, ModelArgs
    from mlx_lm.utils import quantize_model, save_config, save_model

    folder = out / "tiny-dflash"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes((trained / f"{dflash}.safetensors").read_bytes())
    (folder / "config.json").write_text(json.dumps(config_of(dflash), indent=2) + "\n")

    target, _ = mlx_lm.load(str(model_dir))
    e = target.language_model.model.embed_tokens
    embedding = mx.dequantize(e.weight, e.scales, e.biases, e.group_size, e.bits)
    model = Model(ModelArgs.from_dict(config_of(draft)))
    weights = {f"model.{k}": w for k, w in mx.load(str(trained / f"{draft}.safetensors")).items()}
    model.load_weights([*weights.items(), ("model.embed_tokens.weight", embedding)])
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config_of(draft), tiny_moe.GROUP_SIZE, 8)
    folder = out / "tiny-draft"
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(model_dir) / name).read_bytes())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("text", help="token ids of the corpus")
    p.add_argument("site", type=Path)
    p.add_argument("model_dir", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--nbytes", type=int, default=187_000_000)
    p = commands.add_parser("train", help="write text with the target, train, measure")
    p.add_argument("data", type=Path)
    p.add_argument("model_dir", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, nargs="+", default=[400, 1600, 4000])
    p.add_argument("--lr", type=float, nargs="+", default=[8e-3, 16e-3])
    p.add_argument("--names", nargs="+", default=list(CANDIDATES))
    p.add_argument("--at-once", type=int, default=8192)
    p = commands.add_parser("pack", help="the two folders that are shipped")
    p.add_argument("trained", type=Path)
    p.add_argument("model_dir", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--dflash", default="dflash4")
    p.add_argument("--draft", default="draft3")
    args = vars(parser.parse_args())
    {"text": write_text, "train": train, "pack": pack}[args.pop("command")](**args)


if __name__ == "__main__":
    main()
