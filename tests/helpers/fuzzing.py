"""Damaged files and their outcomes. ``test_bad_input.py`` runs this module in worker processes.

    python tests/helpers/fuzzing.py BASES FIRST STEP LAST

tries cases FIRST, FIRST + STEP, ... and prints a line of JSON before and after each. A case
follows from its number alone: kind of file, file and damage are drawn from
``random.Random(number)``.
"""

import faulthandler
import gc
import io
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import families
import mlx.core as mx
import numpy as np
from common import PROMPT, greedy_logits
from draft_files import target, write_draft
from mlx_lm.utils import load_adapters

import moelab
from moelab.commands.drafting import open_draft
from moelab.repack import repack
from moelab.speculation.generate import speculative_generate_step
from moelab.streaming.model import load_model

STEPS = 6
MAX_MESSAGE = 1000  # characters of an error message
MEMORY_NBYTES = 24 << 30  # address space for a case
TIMEOUT_S = 90  # time for a case; the slowest case takes a second
# Families whose config.json is damaged.
CONFIGS = ("qwen3_moe", "qwen3_5_moe", "deepseek_v3", "gpt_oss")
CONFIG = moelab.StreamConfig(slots=families.K + 1, dtype="float32")  # on a GPU, too
ERRORS = (moelab.CheckpointError, moelab.ReadError, moelab.TraceError)


# Damage

DECODER = json.JSONDecoder()
TOKEN, COLON = re.compile(r'"(?:[^"\\]|\\.)*"|[-\w.+]+|[\[{]'), re.compile(r"\s*:\s*")
VALUES = [  # JSON, and what looks like it
    *map(json.dumps, (
        None, True, False, 0, 1, -1, 2, 3, 7, 8, 64, 1.5, -0.5, 2**31 - 1, 2**31, 10**9, 2**63,
        10**18, 10**30, "", "x", "8", [], [1], [1, "a"], {}, {"a": 1}, "y" * 20000,
    )),
    *("NaN", "1e400", "[" * 5000 + "]" * 5000, '{"a":' * 2000 + "1" + "}" * 2000, "1" * 5000),
    '"\\ud800"',
]  # fmt: skip


def places(text):
    """Yield where each JSON value is: the start of its key, its own start, and its end."""
    key = None
    for token in TOKEN.finditer(text):
        start, end = token.span()
        if COLON.match(text, end):
            key = start
            continue
        if token[0] in "[{":
            end = DECODER.raw_decode(text, start)[1]
        yield start if key is None else key, start, end
        key = None


def edit(text, rng):
    """Edit the structure of a JSON document once."""
    spots = list(places(text))[:500]  # else nearly all spots are in a tokenizer's vocabulary
    first, start, end = rng.choice(spots)
    other_first, other_start, other_end = rng.choice(spots)
    key, old, other = text[first:start], text[start:end], text[other_start:other_end]
    how = rng.choice(("delete", "value", "value", "number", "swap", "duplicate", "rename"))
    if old.startswith('"[') and rng.random() < 0.8:  # packed parameters
        old = json.dumps(edit(json.loads(old), rng))
    elif how == "delete":
        before, after = text[:first], text[end:]
        if after.lstrip().startswith(","):
            return before + after.lstrip()[1:]
        return before.rstrip(", \n") + after
    elif how == "value":
        old = rng.choice(VALUES)
    elif how == "number":
        numbers = [spot for spot in spots if text[spot[1]] in "-0123456789"]
        first, start, end = rng.choice(numbers or spots)
        key, n = text[first:start], json.loads(text[start:end]) if numbers else 1
        near = (n + 1, n - 1, n * 2, n // 2, -n, n + 8, n + 64, n - 64)
        old = json.dumps(rng.choice((*near, float(n), n * 10**9, 0, str(n))))
    elif how == "swap" and end <= other_start:
        return text[:start] + other + text[end:other_start] + old + text[other_end:]
    elif how == "swap":
        old = other
    elif how == "duplicate":
        old = f"{other}, {key}{old}"
    elif how == "rename" and key:
        key = rng.choice((text[other_first:other_start] or key, key.replace('":', 'x":'), '"": '))
    return text[:first] + key + old + text[end:]


def spoil(data, rng):
    """Change a few bytes, or cut some off."""
    how = rng.choice(("bit", "bit", "byte", "insert", "delete", "cut", "repeat"))
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 3))):
        at = rng.randrange(len(out))
        byte = rng.choice((rng.randrange(256), *b'0129-,:"[]{}. '))
        if how == "cut":
            return data[:at]
        if how == "bit":
            out[at] ^= 1 << rng.randrange(8)
        elif how == "byte":
            out[at] = byte
        elif how == "insert":
            out.insert(at, byte)
        elif how == "delete" and len(out) > 1:
            del out[at]
        elif how == "repeat":
            out[at:at] = out[max(0, at - rng.randrange(1, 40)) : at]
    return bytes(out)


def damage_json(data, rng):
    if rng.random() < 0.4:
        return spoil(data, rng)
    return edit(data.decode(), rng).encode(errors="surrogatepass")


def damage_header(data, rng):
    """Damage the header of a safetensors file, or cut the file anywhere."""
    n = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + n], data[8 + n :]
    how = rng.choices(("cut", "length", "bytes", "edit"), (2, 2, 10, 6))[0]
    if how == "cut":
        return data[: rng.randrange(len(data))]
    if how == "length":
        return spoil(data[:8], rng) + header + rest
    if how == "bytes":
        header = spoil(header, rng)
    else:
        header = edit(header.decode(), rng).encode(errors="surrogatepass").ljust(n)
    return len(header).to_bytes(8, "little") + header + rest


SHAPES = (b"(10000000000, 1, 1)", b"(-1, 1, 1)", b"(2, 2)", b"()", b"(True,)", b"(1e9,)")
SHAPES += (b"(" * 200 + b")" * 200,)


def damage_trace(data, rng):
    """Change bytes of a trace, or one of its arrays: the type, shape, values or header."""
    if rng.random() < 0.5:
        return spoil(data, rng)
    with np.load(io.BytesIO(data)) as z:
        files = {name: z[name] for name in z.files}
    name = rng.choice([*files, "about"])
    a, how = files[name], rng.choice(("drop", "shape", "dtype", "value", "header"))
    if name == "about":
        files[name] = np.frombuffer(damage_json(bytes(a), rng), np.uint8)
    elif how == "drop":
        del files[name]
    elif how == "shape":
        files[name] = rng.choice((a[None], a[:-1], a.reshape(-1), a[:0], a[0]))
    elif how == "dtype":
        files[name] = a.astype(rng.choice(("f4", "i8", "u1", "U4", "?", "c8", "O", "M8[s]", ">i4")))
    elif how == "value":
        files[name] = b = a.astype(np.int64)
        b.flat[rng.randrange(b.size)] = rng.choice((-1, 300, 2**40, families.E, 7, -(2**62)))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, array in files.items():
            np.save(npy := io.BytesIO(), array)
            content = npy.getvalue()
            if how == "header" and array is a:
                header = re.sub(rb"\(.*\)", rng.choice(SHAPES), content[10:128].rstrip()).ljust(118)
                content = content[:8] + len(header).to_bytes(2, "little") + header + content[128:]
            z.writestr(f"{name}.npy", content)
    return out.getvalue()


def difference(old, new):
    """Where two files begin to differ, in words."""
    at = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    near = slice(max(0, at - 30), at + 30)
    return f"{old[near]} became {new[near]}"


# Valid files, written once


def write_bases(path):
    """Write the valid checkpoints, draft, adapters and trace. Cases damage copies of them."""
    path = Path(path)
    for name in CONFIGS:
        families.write_checkpoint(name, path / name, "sharded" if name == CONFIGS[0] else "affine4")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(moelab.DATA / "models" / "tiny-moe" / file, path / name)
        settings = '{"eos_token_id": [3, 4], "temperature": 0.6}'
        (path / name / "generation_config.json").write_text(settings)
    repack(path / CONFIGS[0], path / "packed", progress=False)
    sizes = {"hidden_size": families.D, "num_target_layers": 6, "vocab_size": families.VOCAB}
    write_draft(path / "draft", **sizes)
    shutil.copytree(moelab.DATA / "models" / "tiny-mtp", path / "tiny-mtp")
    families.write_adapters(path / "adapters", path / CONFIGS[0], "lora", "self_attn.q_proj")
    L, rng = moelab.footprint(path / CONFIGS[0]).num_layers, np.random.default_rng(0)
    experts = rng.integers(0, families.E, (40, L, families.K)).astype(np.uint16)
    phase = np.repeat(("prefill", "decode"), 20)
    trace = moelab.Trace(experts, phase, np.arange(40), families.E, "made up", None, "text")
    (path / "trace").mkdir()
    trace.save(path / "trace" / "trace.npz")


# Outcomes


def greedy(model):
    return greedy_logits(model, PROMPT, STEPS).argmax(-1).tolist()


def num_open():
    """How many files are open, once the objects that a caught exception refers to are freed."""
    gc.collect()
    return len(os.listdir("/dev/fd"))


def is_closed(before):
    """Whether no more files are open than before. MLX's threads close files a moment later."""
    for _ in range(50):
        if num_open() <= before:
            return True
        time.sleep(0.02)
    return False


def run(number, bases):
    """Run a case; return its kind, what was damaged and how, the outcome and the message."""
    rng = random.Random(number)
    kind = rng.choice(list(KINDS))
    folders, files, damage, attempt = KINDS[kind]
    base = bases / rng.choice(folders)
    file = rng.choice(sorted(base.glob(files)))
    old = file.read_bytes()
    new = damage(old, rng)
    with tempfile.TemporaryDirectory() as folder:
        damaged, message, before = Path(folder) / "case", "", num_open()
        damaged.mkdir()
        for entry in base.iterdir():
            (damaged / entry.name).symlink_to(entry)
        (damaged / file.name).unlink()
        (damaged / file.name).write_bytes(new)
        try:
            outcome = attempt(base, damaged)
        except (*ERRORS, ValueError) as e:
            named = any(o in str(e) for o in (str(damaged), "StreamConfig", "draft:"))
            outcome = "refused" if named else "raw"
            message = f"{type(e).__name__}: {e}"
        except BaseException as e:
            outcome, message = "raw", f"{type(e).__name__}: {e}"
        if outcome == "refused" and len(message) > MAX_MESSAGE:
            outcome = "long"
        if not is_closed(before):
            outcome = "leaves files open"
    what = f"{base.name}/{file.name}: {difference(old, new)}"
    return kind, what, outcome, message[: MAX_MESSAGE + 1]


def text(path, **adapters):
    """The tokens that a streamed model writes."""
    load = moelab.load if adapters else load_model
    with load(path, CONFIG, **adapters)[0] as model:
        return greedy(model)


right_text = cache(text)


def model(base, damaged):
    """Compare the text with the undamaged folder's, or mlx-lm's: a damaged file may be valid."""
    moelab.footprint(damaged)
    if (got := text(damaged)) == right_text(base):
        return "same text"
    right = base.name != "packed" and got == greedy(families.load_resident(damaged))
    return "as mlx-lm" if right else "WRONG TEXT"


def tokenizer(_, damaged):
    model, tokenizer = moelab.load(damaged, CONFIG)
    with model:
        tokenizer.decode(tokenizer.encode("def f(x):\n    return x"))
        return "loads"


def adapted(base, damaged):
    path = base.with_name(CONFIGS[0])
    if (got := text(path, adapter_path=str(damaged))) == right_text(path, adapter_path=str(base)):
        return "same text"
    plain = load_adapters(families.load_resident(path), damaged)
    plain.eval()
    return "as mlx-lm" if got == greedy(plain) else "WRONG TEXT"


@cache
def drafts_target():
    """The dense model that the draft is for, and its text."""
    made = target(hidden=families.D, vocab=families.VOCAB)
    return made, greedy(made)[:STEPS]


def drafted(_, damaged):
    (made, want), sizes = drafts_target(), {"num_draft_tokens": 3, "max_tokens": STEPS}
    steps = speculative_generate_step(mx.array(PROMPT), made, open_draft(damaged), **sizes)
    return "same text" if [int(t) for t, *_ in steps] == want else "WRONG TEXT"


def trace(_, damaged):
    t = moelab.Trace.load(damaged / "trace.npz")
    assert len(t) == len(t.phase) == len(t.tokens) == len(t.experts)
    assert t.experts.size == 0 or int(t.experts.max()) < t.num_experts
    assert set(t.phase) <= {"prefill", "decode"} and t.tokens.dtype == np.int64
    types = type(t.model), type(t.prompt), type(t.num_experts)
    assert types == (str, str, int) and (t.seed is None or type(t.seed) is int)
    return "loads"


KINDS = {  # the folder, the file in it, its damage, and what is done with it
    "header": (CONFIGS[:1], "*.safetensors", damage_header, model),
    "packed": (("packed",), "*.safetensors", damage_header, model),
    "index": (CONFIGS[:1], "model.safetensors.index.json", damage_json, model),
    "config": (CONFIGS, "[cg]*config.json", damage_json, model),
    "tokenizer": (CONFIGS[:1], "tokenizer*.json", damage_json, tokenizer),
    "draft config": (("draft", "tiny-mtp"), "config.json", damage_json, drafted),
    "draft header": (("draft", "tiny-mtp"), "*.safetensors", damage_header, drafted),
    "adapter config": (("adapters",), "*.json", damage_json, adapted),
    "adapter header": (("adapters",), "*.safetensors", damage_header, adapted),
    "trace": (("trace",), "*.npz", damage_trace, trace),
}


def main():
    bases, first, step, last = Path(sys.argv[1]), *map(int, sys.argv[2:])
    with suppress(ValueError):  # a Mac's processes map more from the start
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is not an outcome
    with moelab.load(bases / CONFIGS[0], CONFIG)[0] as model:
        greedy(model)  # transformers keeps files open, and so does Metal, which compiles kernels
    gc.freeze()  # makes num_open faster
    for number in range(first, last, step):
        faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
        print(json.dumps({"case": number}), file=out)
        found = dict(zip(("kind", "what", "outcome", "message"), run(number, bases)))
        print(json.dumps({"case": number, **found}), file=out)


if __name__ == "__main__":
    main()
