"""Train tiny-moe in PyTorch: rounding to 4 bits, Muon for rounded weights, training loop.

    python data/recipes/training/torch_train.py TEXT OUT [MINUTES [CHECKPOINT]]

TEXT is the folder that ``corpus.py`` wrote. MINUTES are without compilation. Training continues
from CHECKPOINT, which an earlier run exported.
"""

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_moe import BITS, CONFIG, GROUP_SIZE, TEXT_CONFIG, bits_of
from torch_qwen import Model

DECAY = 0.1  # weight decay of the matrices
BALANCE = 0.01  # weight of the balance loss
WARMUP = 300  # steps until the rate is at its highest
# Shares of the time: after the first the rate falls (at the end to zero), after the second
# weights are rounded.
FALL_FROM, QUANTIZE_FROM = 0.4, 0.6
RATE = 8e-3  # the highest learning rate
BATCH, LENGTH = 64, 2048  # sequences in a step, tokens in a sequence


# Quantization: the affine grid of mx.quantize, with scales and biases in bfloat16


def quantize(w, bits):
    """Return integers [..., out, groups, group], scales and biases [..., out, groups] of ``w``.

    Unlike ``mx.quantize`` this function rounds scale and bias to bfloat16 before it rounds the
    weights, so that the integers fit the stored scale and bias.
    """
    w = w.unflatten(-1, (-1, GROUP_SIZE))
    low, high = w.amin(-1), w.amax(-1)
    steps = 2**bits - 1
    scale = ((high - low) / steps).clamp(min=1e-7)
    edge = torch.where(low.abs() > high.abs(), low, high)
    scale = torch.where(low.abs() > high.abs(), scale, -scale)
    # The grid contains zero, and of ``low`` and ``high`` the one farther from zero.
    zero = (edge / scale).round()
    bias = torch.where(zero == 0, 0, edge).bfloat16().float()
    scale = torch.where(zero == 0, scale, edge / zero).bfloat16().float()
    return ((w - bias[..., None]) / scale[..., None]).round().clamp(0, steps), scale, bias


def rounded(w, bits):
    """Round weights to the float32 values that a 4- or 8-bit checkpoint of them has."""
    q, scale, bias = quantize(w, bits)
    return (q * scale[..., None] + bias[..., None]).flatten(-2)


def packed(w, bits):
    """Pack ``w`` as MLX does: uint32 [..., out, in * bits / 32], scales and biases in bfloat16."""
    q, scale, bias = quantize(w, bits)
    q = q.flatten(-2).to(torch.int64).unflatten(-1, (-1, 32 // bits))
    weight = (q << (torch.arange(32 // bits, device=w.device) * bits)).sum(-1)
    return weight.to(torch.uint32), scale.bfloat16(), bias.bfloat16()


def export(masters, out, config=CONFIG):
    """Write float32 weights, by mlx-lm's names, as a 4-bit checkpoint for ``mlx_lm.load``."""
    quantization = {"group_size": GROUP_SIZE, "bits": BITS, "mode": "affine"}
    tensors = {}
    for name, w in masters.items():
        path = name.removesuffix(".weight")
        if (bits := bits_of(path)) is None:
            # mlx-lm keeps A_log in float32.
            tensors[name] = w.bfloat16().float() if path.endswith("A_log") else w.bfloat16()
            continue
        if bits != BITS:
            quantization[path] = {"group_size": GROUP_SIZE, "bits": bits}
        keys = name, f"{path}.scales", f"{path}.biases"
        tensors |= zip(keys, packed(w, bits))
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.contiguous().cpu() for name, t in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "mlx"})
    config = config | {"quantization": quantization, "quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=4))


def read(checkpoint):
    """Read an exported checkpoint's weights by name, dequantized to float32."""
    stored = {}
    for file in sorted(Path(checkpoint).glob("model*.safetensors")):
        stored |= load_file(file)
    weights = {}
    for name, w in stored.items():
        path, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases"):
            continue
        if f"{path}.scales" in stored:
            scale, bias = (stored[f"{path}.{k}"].float()[..., None] for k in ("scales", "biases"))
            bits = bits_of(path)
            q = w.view(torch.int32)[..., None] >> (torch.arange(32 // bits) * bits) & (2**bits - 1)
            w = (q.flatten(-2).unflatten(-1, (-1, GROUP_SIZE)) * scale + bias).flatten(-2)
        weights[name] = w.float()
    return weights


# Training


def orthogonal(m):
    """Approximate the nearest matrices [..., out, in] with orthonormal rows or columns (Muon)."""
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

    ``torch.optim.Muon`` takes no stacks of experts. After each step a parameter is its master,
    rounded to what the checkpoint will hold, or to bfloat16 while ``quantized`` is off. The
    gradient at the rounded weights moves the master (straight-through). ``lr`` is the highest rate,
    also for Adam; the root mean square of Muon's update is 0.2 * lr.
    """

    def __init__(self, model, lr, compiled=True):
        self.lr, self.quantized = lr, False
        self.params = dict(model.named_parameters())
        self.masters = {n: p.detach().float().clone() for n, p in self.params.items()}
        self.m = {n: torch.zeros_like(w) for n, w in self.masters.items()}
        self.others, self.groups = [], {}  # names: Adam's; Muon's, by shape
        for n, p in self.params.items():
            is_matrix = bits_of(n.removesuffix(".weight")) == BITS
            (self.groups.setdefault(p.shape, []) if is_matrix else self.others).append(n)
        others = [self.masters[n] for n in self.others]
        self.adam = torch.optim.Adam(others, betas=(0.9, 0.95), eps=1e-10)
        self.orthogonal, self.rounded = orthogonal, rounded
        if torch.cuda.is_available():
            self.rounded = torch.compile(rounded, dynamic=False)
            if compiled:
                self.orthogonal = torch.compile(orthogonal, dynamic=False)

    @torch.no_grad()
    def step(self, scale):
        """Update once from the parameters' gradients, with the learning rate times ``scale``."""
        lr = self.lr * scale
        grads = {n: p.grad.float() for n, p in self.params.items()}
        for names in self.groups.values():
            g, m, w = ([d[n] for n in names] for d in (grads, self.m, self.masters))
            torch._foreach_lerp_(m, g, 0.05)
            nesterov = torch._foreach_lerp(g, m, 0.95)
            update = self.orthogonal(torch.stack(nesterov))
            size = 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(w, 1 - lr * DECAY)
            torch._foreach_add_(w, list(update.float().unbind()), alpha=-lr * size)
        for n in self.others:
            self.masters[n].grad = grads[n]
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        self.write(self.quantized)

    @torch.no_grad()
    def write(self, quantized):
        """Copy the masters to the model's parameters; round for 4 or 8 bits if ``quantized``."""
        for n, p in self.params.items():
            bits, w = bits_of(n.removesuffix(".weight")), self.masters[n]
            p.copy_(self.rounded(w, bits) if quantized and bits else w)


def batches(ids):
    """Yield batches of windows [B, LENGTH + 1] for ever; each pass has another offset."""
    generator, span = torch.Generator().manual_seed(0), torch.arange(LENGTH + 1, device=ids.device)
    while True:
        offset = int(torch.randint(LENGTH, (1,), generator=generator))
        starts = torch.arange(offset, len(ids) - LENGTH - 1, LENGTH)
        starts = starts[torch.randperm(len(starts), generator=generator)].to(ids.device)
        for i in range(0, len(starts) - BATCH + 1, BATCH):
            yield ids[starts[i : i + BATCH, None] + span].long()


@torch.no_grad()
def evaluate(model, ids, nbytes, batch=8):
    """Compute bits per byte of texts that are joined and cut into windows of LENGTH tokens."""
    rows = ids.unfold(0, LENGTH + 1, LENGTH)
    losses = [model(some.long())[0].mean() for some in rows.split(batch) if len(some) == batch]
    return torch.stack(losses).mean().item() / math.log(2) * len(ids) / nbytes


def opened(checkpoint=None):
    """Make the model, with a checkpoint's weights if given; return it and its float32 embedding.

    On a GPU the model is compiled and in bfloat16.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    model = Model(TEXT_CONFIG)
    if checkpoint:
        model.load_state_dict(read(checkpoint))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    embedding = model.language_model.model.embed_tokens.weight.detach().clone()
    if embedding.is_cuda:
        model.compile()
        model = model.bfloat16()
    return model, embedding


def main(data, out, minutes=25, checkpoint=None):
    """Train, then export at 4 bits. The schedule follows the clock: training takes MINUTES."""
    data, out, minutes = Path(data), Path(out), float(minutes)
    manifest = json.loads((data / "manifest.json").read_text())["splits"]
    model, embedding = opened(checkpoint)

    def load(name):
        return torch.from_numpy(np.load(data / f"{name}.npy").astype(np.int32)).to(embedding.device)

    held = {n: (load(n), manifest[n]["bytes"]) for n in ("valid", "heldout")}
    stream, optimizer = batches(load("train")), Optimizer(model, RATE)
    log, step, spent = [], 0, 0.0
    for quantized in (True, False):  # compiles before the clock starts, as the first step does
        optimizer.write(quantized)
    evaluate(model, *held["valid"])
    clock = None
    while spent < minutes * 60:
        loss, balance = model(next(stream))
        loss = loss.mean()
        (loss + BALANCE * balance).backward()
        done = spent / (minutes * 60)
        optimizer.quantized = done >= QUANTIZE_FROM
        optimizer.step(min(1, (step + 1) / WARMUP, (1 - done) / (1 - FALL_FROM)))
        model.zero_grad(set_to_none=True)
        step += 1
        if clock is None:
            loss.item()  # waits for the device
            clock = time.perf_counter()
        if step % 20:
            continue
        nats, before, spent = loss.item(), spent, time.perf_counter() - clock
        if step % 100:
            continue
        line = {
            "step": step,
            "tokens": step * BATCH * LENGTH,
            "seconds": round(spent, 1),
            "loss": round(nats, 4),
            "balance": round(balance.item(), 4),
            "tokens_per_s": round(20 * BATCH * LENGTH / (spent - before)),
        }
        if step % 500 == 0:
            line["valid_bpb"] = round(evaluate(model, *held["valid"]), 4)
            if step % 2000 == 0:
                export(optimizer.masters, out)  # to resume from, if the machine is lost
            spent = time.perf_counter() - clock
        log.append(line)
        print(json.dumps(line), flush=True)
    report = {"log": log, "steps": step, "batch": BATCH, "length": LENGTH, "lr": RATE}
    report |= {"start": FALL_FROM, "decay": DECAY, "seconds": spent, "torch": torch.__version__}
    report["device"] = torch.cuda.get_device_name() if embedding.is_cuda else "cpu"
    for quantized in (False, True):
        optimizer.write(quantized)
        for name in held:
            how = "4bit" if quantized else "float"
            report[f"{name}_bpb_{how}"] = evaluate(model, *held[name])
    export(optimizer.masters, out)
    (out / "training.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report | {"log": len(log)}, indent=1), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
