"""tiny-moe: a Qwen3.5-MoE hybrid small enough to ship, in mlx-lm's own format.

    python data/recipes/corpus.py build/corpus/site build/corpus    # text, tokenizer
    python data/recipes/tiny_moe.py build/corpus OUT --minutes 25   # on a CUDA GPU
    python data/recipes/evaluate.py OUT                             # anywhere

Training needs PyTorch and fla-core, and neither MLX nor moelab.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import corpus

# B batch, T tokens, D hidden, F expert hidden, E experts, K experts per token, L layers.
TEXT_CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": corpus.VOCAB_SIZE,
    "hidden_size": 256,  # D
    "num_hidden_layers": 8,  # L: GatedDeltaNet x 3, full attention, twice
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 64,  # E
    "num_experts_per_tok": 8,  # K
    "moe_intermediate_size": 128,  # F
    "shared_expert_intermediate_size": 256,
    "intermediate_size": 256,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    },
    "pad_token_id": 0,
    "eos_token_id": 1,
}
GROUP_SIZE, BITS = 64, 4
CONFIG = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
# Few weights with much influence get eight bits. mlx-lm's own predicate does so for the first two.
EIGHT_BIT = ("mlp.gate", "shared_expert_gate", "embed_tokens", "in_proj_a", "in_proj_b")
NOT_QUANTIZED = ("norm", "conv1d", "A_log", "dt_bias")


def bits_of(path):
    """Bits per weight of the module at ``path``; None where it is not quantized."""
    if path.endswith(NOT_QUANTIZED):
        return None
    return 8 if path.endswith(EIGHT_BIT) else BITS


# A random checkpoint


def random_model(out_dir, seed=0):
    """Write a random checkpoint of tiny-moe's shape, for tests and timing only.

    Args:
        out_dir (str or Path): Folder for weights, config and tokenizer.
        seed (int): Seed of the weights.
    """
    import mlx.core as mx
    from mlx_lm.models.qwen3_5_moe import Model, ModelArgs
    from mlx_lm.utils import quantize_model, save_config, save_model

    mx.random.seed(seed)
    config = copy.deepcopy(CONFIG)
    model = Model(ModelArgs.from_dict(copy.deepcopy(config)))
    model.set_dtype(mx.bfloat16)

    def predicate(path, _):
        return {"group_size": GROUP_SIZE, "bits": 8} if bits_of(path) == 8 else True

    model, config = quantize_model(model, config, GROUP_SIZE, BITS, quant_predicate=predicate)
    save_model(out_dir, model)
    save_config(config, Path(out_dir) / "config.json")
    corpus.train_tokenizer(corpus.stdlib_texts()).save_pretrained(out_dir)


# Quantization: the affine grid of mx.quantize, with scales and biases in bfloat16


def quantize(w, bits):
    """Nearest points of the affine grid, a scale and a bias for ``GROUP_SIZE`` weights in a row.

    Unlike ``mx.quantize`` it rounds scale and bias to bfloat16 before the weights, so that the
    integers fit the scale and bias that are stored.

    Args:
        w (Tensor): Weights [..., out, in], float32.
        bits (int): Bits per weight.

    Returns:
        tuple[Tensor, Tensor, Tensor]: Integers [..., out, in / group, group], scales and biases
        [..., out, in / group].
    """
    import torch

    w = w.unflatten(-1, (-1, GROUP_SIZE))
    low, high = w.amin(-1), w.amax(-1)
    steps = 2**bits - 1
    scale = ((high - low) / steps).clamp(min=1e-7)
    edge = torch.where(low.abs() > high.abs(), low, high)
    scale = torch.where(low.abs() > high.abs(), scale, -scale)
    # The larger end is a point of the grid, and so is zero.
    zero = (edge / scale).round()
    bias = torch.where(zero == 0, 0, edge).bfloat16().float()
    scale = torch.where(zero == 0, scale, edge / zero).bfloat16().float()
    return ((w - bias[..., None]) / scale[..., None]).round().clamp(0, steps), scale, bias


def rounded(w, bits):
    """The weights that the 4- or 8-bit checkpoint stands for, float32."""
    q, scale, bias = quantize(w, bits)
    return (q * scale[..., None] + bias[..., None]).flatten(-2)


def packed(w, bits):
    """``w`` as MLX stores it: uint32 [..., out, in * bits / 32], scales and biases in bfloat16."""
    import torch

    q, scale, bias = quantize(w, bits)
    q = q.flatten(-2).to(torch.int64).unflatten(-1, (-1, 32 // bits))
    weight = (q << (torch.arange(32 // bits, device=w.device) * bits)).sum(-1)
    return weight.to(torch.uint32), scale.bfloat16(), bias.bfloat16()


def export(masters, out_dir, shards=3):
    """Write float32 weights as a 4-bit checkpoint that ``mlx_lm.load`` takes.

    Args:
        masters (dict[str, Tensor]): Weights by mlx-lm's names.
        out_dir (str or Path): Folder for the config and the weights.
        shards (int): Number of weight files.
    """
    from safetensors.torch import save_file

    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(CONFIG)
    config["quantization"] = {"group_size": GROUP_SIZE, "bits": BITS, "mode": "affine"}
    parts = [{} for _ in range(shards)]
    for name, w in masters.items():
        path, _, leaf = name.rpartition(".")
        bits = bits_of(path if leaf == "weight" else name)
        layer = int(path.split(".")[3]) if ".layers." in path else len(parts) * 100
        part = parts[min(layer * shards // TEXT_CONFIG["num_hidden_layers"], shards - 1)]
        if bits is None:
            # mlx-lm keeps A_log in float32.
            part[name] = w.bfloat16().float() if leaf == "A_log" else w.bfloat16()
            continue
        if bits != BITS:
            config["quantization"][path] = {"group_size": GROUP_SIZE, "bits": bits}
        part[name], part[f"{path}.scales"], part[f"{path}.biases"] = packed(w, bits)
    index = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(
            {k: v.contiguous().cpu() for k, v in part.items()},
            out_dir / file,
            metadata={"format": "mlx"},
        )
        index |= dict.fromkeys(part, file)
    nbytes = sum(v.nbytes for part in parts for v in part.values())
    meta = {"total_size": nbytes, "total_parameters": sum(w.numel() for w in masters.values())}
    (out_dir / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": meta, "weight_map": dict(sorted(index.items()))}, indent=1)
    )
    config["quantization_config"] = config["quantization"]
    (out_dir / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=4))


def read(checkpoint):
    """Weights of an exported checkpoint by name, float32: the starting point of a further run.

    Args:
        checkpoint (str or Path): What ``export`` wrote.

    Returns:
        dict[str, Tensor]: Each weight, dequantized.
    """
    import torch
    from safetensors.torch import load_file

    stored = {}
    for file in sorted(Path(checkpoint).glob("model*.safetensors")):
        stored |= load_file(file)
    weights = {}
    for name, w in stored.items():
        path, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases"):
            continue
        if f"{path}.scales" in stored:
            scale, bias = (
                stored[f"{path}.{leaf}"].float()[..., None] for leaf in ("scales", "biases")
            )
            bits = bits_of(path)
            q = w.view(torch.int32)[..., None] >> (torch.arange(32 // bits) * bits) & (2**bits - 1)
            w = (q.flatten(-2).unflatten(-1, (-1, GROUP_SIZE)) * scale + bias).flatten(-2)
        weights[name] = w.float()
    return weights


# Training


def orthogonal(m):
    """Approximately the nearest matrix with orthonormal rows or columns (Muon).

    Args:
        m (Tensor): Matrices [..., out, in].
    """
    x = m.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):  # Newton-Schulz
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Optimizer:
    """Muon for matrices, Adam for the rest, on float32 masters of bfloat16 parameters.

    After each step a parameter is its master rounded to what the checkpoint will hold, or to
    bfloat16 while ``quantized`` is off. The gradient at the rounded weights moves the master
    (straight-through).

    Args:
        model (nn.Module): Its parameters must be bfloat16.
        lr (float): The highest learning rate; the root mean square of Muon's update is 0.2 * lr.
        decay (float): Weight decay of the matrices.
        adam (float): Adam's learning rate as a multiple of Muon's.
    """

    def __init__(self, model, lr, decay, adam=1.0):
        import torch

        self.torch, self.lr, self.decay, self.adam, self.steps = torch, lr, decay, adam, 0
        self.params = dict(model.named_parameters())
        self.masters = {n: p.detach().float().clone() for n, p in self.params.items()}
        self.m = {n: torch.zeros_like(w) for n, w in self.masters.items()}
        matrices = [n for n in self.params if bits_of(n.removesuffix(".weight")) == BITS]
        self.v = {n: torch.zeros_like(w) for n, w in self.masters.items() if n not in matrices}
        shapes = {}
        for n in matrices:
            shapes.setdefault(self.params[n].shape, []).append(n)
        self.groups = list(shapes.values())
        compiled = torch.cuda.is_available()
        self.orthogonal = torch.compile(orthogonal, dynamic=False) if compiled else orthogonal
        self.rounded = torch.compile(rounded, dynamic=False) if compiled else rounded
        self.quantized = False

    def step(self, scale):
        """One update from the parameters' gradients, with the learning rate times ``scale``."""
        with self.torch.no_grad():
            self._step(self.lr * scale)

    def _step(self, lr):
        torch = self.torch
        self.steps += 1
        grads = {n: p.grad.float() for n, p in self.params.items()}
        for names in self.groups:
            g, m, w = ([d[n] for n in names] for d in (grads, self.m, self.masters))
            torch._foreach_lerp_(m, g, 0.05)
            nesterov = torch._foreach_lerp(g, m, 0.95)
            update = self.orthogonal(torch.stack(nesterov))
            size = 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(w, 1 - lr * self.decay)
            torch._foreach_add_(w, list(update.float().unbind()), alpha=-lr * size)
        names = list(self.v)
        g, m, v, w = ([d[n] for n in names] for d in (grads, self.m, self.v, self.masters))
        torch._foreach_lerp_(m, g, 0.1)
        torch._foreach_lerp_(v, torch._foreach_mul(g, g), 0.05)
        root = torch._foreach_sqrt(torch._foreach_div(v, 1 - 0.95**self.steps))
        torch._foreach_add_(root, 1e-10)
        torch._foreach_addcdiv_(w, m, root, value=-lr * self.adam / (1 - 0.9**self.steps))
        self.write(self.quantized)

    def write(self, quantized):
        """Set the model's parameters from the masters, on the checkpoint's grid or not."""
        with self.torch.no_grad():
            for n, p in self.params.items():
                bits = bits_of(n.removesuffix(".weight"))
                w = self.masters[n]
                p.copy_(self.rounded(w, bits) if quantized and bits else w)


def batches(ids, batch, length, device, generator):
    """Endless batches of windows [B, length + 1]; each pass cuts the text at another offset."""
    import torch

    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        starts = torch.arange(offset, len(ids) - length - 1, length)
        starts = starts[torch.randperm(len(starts), generator=generator)].to(device)
        span = torch.arange(length + 1, device=device)
        for i in range(0, len(starts) - batch + 1, batch):
            yield ids[starts[i : i + batch, None] + span].long()


def windows(ids, length, eos):
    """Windows [N, length + 1] over concatenated texts, each from its start, padded with ``eos``.

    Also returns how many targets of each window count.
    """
    import torch

    rows, counts = [], []
    ends = (ids == eos).nonzero().flatten().tolist()
    for start, end in zip([-1, *ends[:-1]], ends):
        text = torch.cat([ids.new_tensor([eos]), ids[start + 1 : end]])
        for i in range(0, len(text) - 1, length):
            row = text[i : i + length + 1]
            counts.append(len(row) - 1)
            rows.append(torch.cat([row, row.new_full((length + 1 - len(row),), eos)]))
    return torch.stack(rows).long(), torch.tensor(counts)


def evaluate(model, rows, counts, nbytes, batch=32):
    """Bits per byte over ``windows``, and the load of every expert [L, E]."""
    import torch

    nats, loads = 0.0, []
    with torch.no_grad():
        for i in range(0, len(rows), batch):
            some = rows[i : i + batch]
            # One shape, one compilation.
            some = torch.cat([some, some[:1].expand(batch - len(some), -1)])
            loss, _, load = model(some)
            kept = torch.zeros(batch, dtype=torch.long, device=rows.device)
            kept[: len(counts[i : i + batch])] = counts[i : i + batch]
            mask = torch.arange(loss.shape[1], device=rows.device) < kept[:, None]
            nats += (loss * mask).double().sum().item()
            loads.append(load)
    return nats / math.log(2) / nbytes, torch.stack(loads).mean(0)


def train(
    data,
    out,
    minutes,
    batch=64,
    length=2048,
    lr=8e-3,
    adam=1.0,
    decay=0.1,
    balance=0.01,
    start=0.4,
    quantize_from=0.6,
    warmup=300,
    seed=0,
    resume=None,
):
    """Train, then export at 4 bits. The schedule follows the clock: a run fits a rented machine.

    Args:
        data (Path): What ``data/recipes/corpus.py`` wrote.
        out (Path): Folder for the checkpoint and ``training.json``.
        minutes (float): Time to train for, compilation apart.
        batch (int): B, sequences in a step.
        length (int): T, tokens in a sequence.
        lr, adam, decay (float): Of the optimizer. The rate is constant after a warm-up and falls to
            zero from ``start`` on.
        balance (float): Weight of the balance loss.
        start, quantize_from (float): When the rate begins to fall, and the weights to be rounded,
            as shares of the time.
        warmup (int): Steps until the rate is at its highest.
        seed (int): Seed of weights and order.
        resume (Path, optional): An exported checkpoint to continue from.
    """
    import numpy as np
    import torch
    from torch_qwen import Model

    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    manifest = json.loads((data / "manifest.json").read_text())["splits"]
    load = lambda name: torch.from_numpy(np.load(data / f"{name}.npy").astype(np.int32)).to(device)  # noqa: E731
    held = {
        name: (*windows(load(name), length, TEXT_CONFIG["eos_token_id"]), manifest[name]["bytes"])
        for name in ("valid", "heldout")
    }
    held = {
        name: (rows.to(device), counts.to(device), nbytes)
        for name, (rows, counts, nbytes) in held.items()
    }
    stream = batches(load("train"), batch, length, device, torch.Generator().manual_seed(seed))

    model = Model(TEXT_CONFIG)
    if resume:
        model.load_state_dict(read(resume))
    model = model.to(device)
    if device == "cuda":
        model.compile()
        model = model.bfloat16()
    optimizer = Optimizer(model, lr, decay, adam)
    log, step, spent = [], 0, 0.0
    for quantized in (True, False):  # compiles before the clock starts, as the first step does
        optimizer.write(quantized)
    evaluate(model, *held["valid"])
    clock = None
    while spent < minutes * 60:
        loss, balanced, _ = model(next(stream))
        loss = loss.mean()
        (loss + balance * balanced).backward()
        done = spent / (minutes * 60)
        if done >= quantize_from and not optimizer.quantized:
            optimizer.quantized = True
        optimizer.step(min(1, (step + 1) / warmup, (1 - done) / (1 - start)))
        model.zero_grad(set_to_none=True)
        step += 1
        if clock is None:
            loss.item()  # waits for the device
            clock = time.perf_counter()
        if step % 20 == 0:
            nats, now = loss.item(), time.perf_counter() - clock
            line = {
                "step": step,
                "tokens": step * batch * length,
                "seconds": round(now, 1),
                "loss": round(nats, 4),
            }
            line |= {
                "balance": round(balanced.item(), 4),
                "tokens_per_s": round(20 * batch * length / (now - spent)),
            }
            spent = now
            if step % 500 == 0:
                line["valid_bpb"] = round(evaluate(model, *held["valid"])[0], 4)
                if step % 2000 == 0:
                    export(optimizer.masters, out)  # to resume from, if the machine is lost
                spent = time.perf_counter() - clock
            if step % 100 == 0:
                log.append(line)
                print(json.dumps(line), flush=True)
    report = {
        "log": log,
        "steps": step,
        "batch": batch,
        "length": length,
        "lr": lr,
        "adam": adam,
        "start": start,
        "decay": decay,
        "seconds": spent,
    }
    report |= {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    for quantized in (False, True):
        optimizer.write(quantized)
        for name in held:
            bpb, load = evaluate(model, *held[name])
            report[f"{name}_bpb_{'4bit' if quantized else 'float'}"] = bpb
    report["heldout_load_most_least"] = [[row.max().item(), row.min().item()] for row in load]
    export(optimizer.masters, out)
    (out / "training.json").write_text(json.dumps(report, indent=1))
    print(json.dumps({k: v for k, v in report.items() if k != "log"}, indent=1), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder that data/recipes/corpus.py wrote")
    parser.add_argument("out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--adam", type=float, default=1.0)
    parser.add_argument(
        "--start",
        type=float,
        default=0.4,
        help="when the rate begins to fall, as a share of the time",
    )
    parser.add_argument(
        "--resume", type=Path, default=None, help="an exported checkpoint to go on from"
    )
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
