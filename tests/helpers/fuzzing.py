"""Damaged files and their outcomes. ``test_fuzz.py`` runs this module in worker processes.

    python tests/helpers/fuzzing.py BASES FIRST STEP LAST

works on cases FIRST, FIRST + STEP, ... and prints a line of JSON for each. A case is a function of
its number alone: kind of file, file and damage are drawn from ``random.Random(number)``.
"""

import copy
import io
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import families
import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab.repack import repack
from moelab.speculation.dflash import DFlashDraft
from moelab.speculation.generate import speculative_generate_step
from moelab.streaming.model import load_model

PROMPT = [5, 36, 67, 2, 33, 64, 95, 30, 61]
STEPS = 6
MAX_MESSAGE = 1000  # characters of an error message
MEMORY_NBYTES = 24 << 30  # of address space for a case
# Families whose config.json is damaged.
CONFIGS = ("qwen3_moe", "qwen3_5_moe", "deepseek_v3", "gpt_oss")
DRAFTED = ("draft config", "draft header")
KINDS = ("header", "packed", "index", "config", "tokenizer", *DRAFTED, "trace")
SLOTS = families.K + 1
ERRORS = (moelab.CheckpointError, moelab.ReadError, moelab.TraceError)


# Damage


class Pairs(list):
    """A JSON object as its pairs, so that a key may occur twice."""


def parse(text):
    return json.loads(text, object_pairs_hook=Pairs)


def dump(node):
    if isinstance(node, Pairs):
        return "{" + ", ".join(f"{json.dumps(k)}: {dump(v)}" for k, v in node) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(dump, node)) + "]"
    return node.raw if isinstance(node, Raw) else json.dumps(node)


class Raw:
    """Text that is written into the file unchanged."""

    def __init__(self, raw):
        self.raw = raw

    def __deepcopy__(self, memo):
        return self


VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 64, 1.5, -0.5, 2**31 - 1, 2**31, 10**9, 2**63, 10**18,
    10**30, "", "x", "8", [], [1], [1, "a"], Pairs(), Pairs([("a", 1)]), Raw("NaN"), Raw("1e400"),
    Raw("[" * 5000 + "]" * 5000), Raw('{"a":' * 2000 + "1" + "}" * 2000), Raw("1" * 5000),
    Raw('"' + "y" * 20000 + '"'), Raw('"\\ud800"'),
)  # fmt: skip


def places(node):
    """Every (container, position) of a document."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield node, i
            yield from places(item[1] if isinstance(node, Pairs) else item)


def get(container, i):
    return container[i][1] if isinstance(container, Pairs) else container[i]


def put(container, i, value):
    container[i] = (container[i][0], value) if isinstance(container, Pairs) else value


def edit(text, rng):
    """A JSON document with one edit of its structure, and what the edit was."""
    tree = parse(text)
    spots = list(places(tree))
    if len(spots) > 2000:  # else a tokenizer's vocabulary is nearly always chosen
        spots = [s for s in spots if len(s[0]) < 40]
    container, i = rng.choice(spots)
    old = get(container, i)
    how = rng.choice(["delete", "value", "value", "number", "swap", "duplicate", "rename", "root"])
    if isinstance(old, str) and old.startswith("[") and rng.random() < 0.8:  # packed parameters
        inner, what = edit(old, rng)
        put(container, i, inner)
        return dump(tree), what
    what = f"{how} {container[i][0] if isinstance(container, Pairs) else i!r}"
    if how == "delete":
        del container[i]
    elif how == "value":
        new = copy.deepcopy(rng.choice(VALUES))
        put(container, i, new)
        what += f" = {dump(new)[:40]}"
    elif how == "number":
        numbers = [s for s in spots if type(get(*s)) in (int, float)]
        container, i = rng.choice(numbers or spots)
        n = get(container, i)
        n = n if type(n) in (int, float) else 1
        new = rng.choice(
            (n + 1, n - 1, n * 2, n // 2, -n, n + 8, n + 64, n - 64, float(n), n * 10**9, 0, str(n))
        )
        put(container, i, new)
        what = f"number {container[i][0] if isinstance(container, Pairs) else i!r}: {n} = {new}"
    elif how == "swap":
        other, j = rng.choice(spots)
        a, b = copy.deepcopy(get(container, i)), copy.deepcopy(get(other, j))
        put(container, i, b), put(other, j, a)
        what += f" with {other[j][0] if isinstance(other, Pairs) else j!r}"
    elif how == "duplicate":
        other = copy.deepcopy(container[rng.randrange(len(container))])
        container.insert(
            rng.randrange(len(container) + 1),
            (container[i][0], other[1]) if isinstance(container, Pairs) else other,
        )
    elif how == "rename" and isinstance(container, Pairs):
        other = container[rng.randrange(len(container))][0]
        key = rng.choice((other, container[i][0] + "x", container[i][0][:-1], ""))
        container[i] = (key, container[i][1])
        what += f" to {key!r}"
    elif how == "root" and rng.random() < 0.2:
        tree = copy.deepcopy(rng.choice(VALUES))
        what = f"root = {dump(tree)[:40]}"
    return dump(tree), what


def spoil(data, rng):
    """Some bytes with a few of them changed, and what was done."""
    how = rng.choice(("bit", "bit", "byte", "insert", "delete", "cut", "repeat"))
    if how == "cut":
        at = rng.randrange(len(data))
        return data[:at], f"cut at {at}"
    out, whats = bytearray(data), []
    for _ in range(rng.choice((1, 1, 1, 3))):
        at = rng.randrange(len(out))
        if how == "bit":
            out[at] ^= 1 << rng.randrange(8)
        elif how == "byte":
            out[at] = rng.choice((rng.randrange(256), *b'0129-,:"[]{}.'))
        elif how == "insert":
            out[at:at] = bytes([rng.choice((rng.randrange(256), *b'0129-,:"[]{}. '))])
        elif how == "delete" and len(out) > 1:
            del out[at]
        elif how == "repeat":
            out[at:at] = out[max(0, at - rng.randrange(1, 40)) : at]
        whats.append(f"{how} {at}")
    return bytes(out), ", ".join(whats)


def damage_json(data, rng):
    if rng.random() < 0.4:
        return spoil(data, rng)
    text, what = edit(data.decode(), rng)
    return text.encode(errors="surrogatepass"), what


def damage_header(data, rng):
    """Damage the header of a safetensors file. Its data is unchanged."""
    n = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + n], data[8 + n :]
    if rng.random() < 0.1:
        end = rng.randrange(len(data))
        return data[:end], f"cut at {end}"
    if rng.random() < 0.1:
        head, what = spoil(data[:8], rng)
        return head + header + rest, f"length: {what}"
    if rng.random() < 0.5:
        out, at = bytearray(header), rng.randrange(len(header.rstrip()))
        out[at] ^= 1 << rng.randrange(8)
        return data[:8] + bytes(out) + rest, f"bit at {at}"
    if rng.random() < 0.3:
        header, what = spoil(header, rng)
    else:
        text, what = edit(header.decode(), rng)
        header = text.encode(errors="surrogatepass").ljust(n)
    return len(header).to_bytes(8, "little") + header + rest, what


def npz(members, compression=zipfile.ZIP_DEFLATED):
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", compression) as z:
        warnings.simplefilter("ignore")  # a name that occurs twice
        for name, content in members:
            if not isinstance(content, bytes):
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, content, allow_pickle=True)
                content = buffer.getvalue()
            z.writestr(name, content)
    return out.getvalue()


def damage_trace(data, rng):
    if rng.random() < 0.5:
        return spoil(data, rng)
    with np.load(io.BytesIO(data)) as z:
        arrays = {name: z[name] for name in z.files}
    name = rng.choice(list(arrays))
    how = rng.choice(
        ["drop", "twice", "shape", "dtype", "value", "about", "about", "raw", "header"]
    )
    members = {f"{k}.npy": v for k, v in arrays.items()}
    key, a = f"{name}.npy", arrays[name]
    if how == "drop":
        del members[key]
    elif how == "twice":
        return npz([*members.items(), (f"{rng.choice(list(arrays))}.npy", a)]), f"twice {name}"
    elif how == "shape":
        longer = np.broadcast_to(a[:1], (5000, *a.shape[1:]))
        members[key] = rng.choice((a[None], a[:-1], a.reshape(-1), a[:0], longer, a[0]))
    elif how == "dtype":
        members[key] = a.astype(
            rng.choice(["f4", "i8", "u1", "U4", "?", "c8", "O", "i2", "M8[s]", ">i4"])
        )
    elif how == "value":
        b = a.copy().astype(np.int64)
        b.flat[rng.randrange(max(b.size, 1)) if b.size else 0] = rng.choice(
            (-1, 300, 2**40, families.E, 7, -(2**62))
        )
        members[key] = b
    elif how == "about":
        text, what = damage_json(bytes(arrays["about"]), rng)
        members["about.npy"] = np.frombuffer(text, np.uint8)
        return npz(members.items()), f"about: {what}"
    else:
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, a)
        raw = buffer.getvalue()
        if how == "header":
            shapes = ("(10000000000, 1, 1)", "(-1, 1, 1)", "(2, 2)", "()", "(True,)", "(1e9,)")
            new = rng.choice((*shapes, "(" * 200 + ")" * 200))
            text = f"{{'descr': '{a.dtype.str}', 'fortran_order': False, 'shape': {new}, }}"
            text = text.ljust(118).encode()
            raw = raw[:8] + len(text).to_bytes(2, "little") + text + raw[128:]
        else:
            raw, _ = spoil(raw, rng)
        members[key] = raw
    return npz(members.items()), f"{how} {name}"


# Valid files, written once


def write_bases(path):
    """Write the valid checkpoints, draft and trace. Cases damage copies of them."""
    path = Path(path)
    for name in CONFIGS:
        families.write_checkpoint(name, path / name, "sharded" if name == CONFIGS[0] else "affine4")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(moelab.DATA / "models" / "tiny-moe" / file, path / name)
        (path / name / "generation_config.json").write_text(
            '{"eos_token_id": [3, 4], "temperature": 0.6}'
        )
    repack(path / CONFIGS[0], path / "packed", progress=False)
    from draft_files import write_draft

    write_draft(
        path / "draft", hidden_size=families.D, num_target_layers=6, vocab_size=families.VOCAB
    )
    num_layers = moelab.footprint(path / CONFIGS[0]).num_layers
    experts = (
        np.random.default_rng(0)
        .integers(0, families.E, (40, num_layers, families.K))
        .astype(np.uint16)
    )
    phase = np.repeat(("prefill", "decode"), 20)
    moelab.Trace(experts, phase, np.arange(40), families.E, "made up", None, "text").save(
        path / "trace.npz"
    )


def target():
    """The dense model that the draft is for."""
    mx.random.seed(3)
    args = {
        k: families.COMMON[k]
        for k in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    }
    model = qwen3.Model(
        qwen3.ModelArgs(
            **args,
            model_type="qwen3",
            num_hidden_layers=6,
            num_key_value_heads=1,
            head_dim=16,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    )
    mx.eval(model.parameters())
    return model


# Outcomes


def greedy(model):
    cache, tokens = make_prompt_cache(model), PROMPT
    out = []
    for _ in range(STEPS):
        tokens = [int(model(mx.array([tokens]), cache=cache)[0, -1].argmax())]
        out += tokens
    return out


class Cases:
    def __init__(self, bases):
        self.bases, self.known = Path(bases), {}

    def once(self, key, make):
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def run(self, number):
        """One case: (kind, what was damaged and how, outcome, message)."""
        rng = random.Random(number)
        kind = rng.choice(KINDS)
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder) / "case"
            what, attempt = getattr(self, kind.replace(" ", "_"))(rng)
            try:
                outcome, message = attempt(), ""
            except ERRORS as e:
                outcome, message = "refused", f"{type(e).__name__}: {e}"
            except ValueError as e:
                ours = (str(self.folder), "StreamConfig", "draft:")
                outcome = "refused" if any(o in str(e) for o in ours) else "raw"
                message = f"{type(e).__name__}: {e}"
            except BaseException as e:
                outcome, message = "raw", f"{type(e).__name__}: {e}"
            if outcome == "refused" and len(message) > MAX_MESSAGE:
                outcome = "long"
        return kind, what, outcome, message[: MAX_MESSAGE + 1]

    def damaged(self, base, file, damage, rng):
        """A folder of links to a base's files, one of them damaged."""
        self.folder.mkdir()
        for entry in (self.bases / base).iterdir():
            if entry.name != file:
                (self.folder / entry.name).symlink_to(entry)
        content, what = damage((self.bases / base / file).read_bytes(), rng)
        (self.folder / file).write_bytes(content)
        return f"{base}/{file}: {what}"

    def text_is(self, base):
        """The text must be the undamaged folder's, or plain mlx-lm's from the damaged one.

        Some damage gives another valid model, for example another rope_theta.
        """

        def tokens(path, mode="fused"):
            with load_model(path, moelab.StreamConfig(slots=SLOTS, mode=mode))[0] as model:
                return greedy(model)

        want = self.once(base, lambda: tokens(self.bases / base))
        got = tokens(self.folder)
        if got == want:
            return "same text"
        if base == "packed":
            return "WRONG TEXT"
        return "as mlx-lm" if got == greedy(families.load_resident(self.folder)) else "WRONG TEXT"

    def model(self, base, file, damage, rng):
        what = self.damaged(base, file, damage, rng)
        alone = rng.random() < 0.2

        def attempt():
            if alone:
                moelab.footprint(self.folder)
            return self.text_is(base)

        return what, attempt

    def header(self, rng):
        file = rng.choice(sorted(f.name for f in (self.bases / CONFIGS[0]).glob("*.safetensors")))
        return self.model(CONFIGS[0], file, damage_header, rng)

    def packed(self, rng):
        file = rng.choice(sorted(f.name for f in (self.bases / "packed").glob("*.safetensors")))
        return self.model("packed", file, damage_header, rng)

    def index(self, rng):
        return self.model(CONFIGS[0], "model.safetensors.index.json", damage_json, rng)

    def config(self, rng):
        file = rng.choice(("config.json",) * 9 + ("generation_config.json",))
        return self.model(rng.choice(CONFIGS), file, damage_json, rng)

    def tokenizer(self, rng):
        file = rng.choice(("tokenizer.json", "tokenizer_config.json"))
        what = self.damaged(CONFIGS[0], file, damage_json, rng)

        def attempt():
            model, tokenizer = moelab.load(self.folder, moelab.StreamConfig(slots=SLOTS))
            with model:
                tokenizer.decode(tokenizer.encode("def f(x):\n    return x"))
                return "loads"

        return what, attempt

    def drafted(self, file, damage, rng):
        what = self.damaged("draft", file, damage, rng)
        model = self.once("target", target)
        want = self.once("text", lambda: greedy(model))

        def attempt():
            steps = speculative_generate_step(
                mx.array(PROMPT),
                model,
                DFlashDraft(self.folder),
                num_draft_tokens=3,
                max_tokens=STEPS,
            )
            return "same text" if [int(t) for t, *_ in steps] == want else "WRONG TEXT"

        return what, attempt

    def draft_config(self, rng):
        return self.drafted("config.json", damage_json, rng)

    def draft_header(self, rng):
        return self.drafted("model.safetensors", damage_header, rng)

    def trace(self, rng):
        content, what = damage_trace((self.bases / "trace.npz").read_bytes(), rng)
        self.folder.mkdir()
        file = self.folder / "trace.npz"
        file.write_bytes(content)

        def attempt():
            t = moelab.Trace.load(file)
            T = len(t)
            assert (
                t.experts.shape == (T, *t.experts.shape[1:]) and len(t.phase) == len(t.tokens) == T
            )
            assert t.experts.size == 0 or int(t.experts.max()) < t.num_experts
            assert set(t.phase) <= {"prefill", "decode"} and t.tokens.dtype == np.int64
            assert (
                isinstance(t.model, str)
                and isinstance(t.prompt, str)
                and type(t.num_experts) is int
            )
            assert t.seed is None or type(t.seed) is int
            return "loads"

        return what, attempt


def main():
    bases, first, step, last = sys.argv[1], *map(int, sys.argv[2:])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    cases, out = Cases(bases), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is not an outcome
    for number in range(first, last, step):
        print(json.dumps({"case": number}), file=out)
        kind, what, outcome, message = cases.run(number)
        print(
            json.dumps(
                {"case": number, "kind": kind, "what": what, "outcome": outcome, "message": message}
            ),
            file=out,
        )


if __name__ == "__main__":
    main()
