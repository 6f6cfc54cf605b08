"""Long texts and passes of many lengths, streamed, against the resident model's, bit for bit.

    python data/recipes/exactness.py OUT.json MODEL stacked,fused SLOTS

Made for a GPU, on which the number of rows decides which kernel MLX takes and so how it rounds.
"""

import random
import sys
from functools import partial

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from moelab import StreamConfig, load
from moelab.lab import records
from moelab.lab.arguments import parse_modes
from moelab.lab.models import folder
from moelab.lab.texts import heldout_code
from moelab.lab.variants import resident_like
from moelab.speculation.drafts import LookupDraft
from moelab.speculation.generate import speculative_generate_step


def texts(path, config, make_draft, drafts=(0, 4, 8), n=20, tokens=64, written=None):
    """Write greedy texts twice, with others between, and compare them with the resident model's.

    For each number of ``drafts`` (0: mlx-lm's own loop): how many of n texts are ``equal`` to the
    resident model's with as many drafts, ``repeated`` word by word, ``equal_undrafted`` to the
    resident model's without; ``resident_undrafted``: how many it writes alike with and without.
    ``written`` keeps the resident model's texts between calls.
    """
    resident, tokenizer = load(path, resident_like(config))
    model, _ = load(path, config)
    files = [tokenizer.encode(t) for t in heldout_code(path).values()]
    prompts = [ids[: 40 + 7 * (i % 10)] for i, ids in enumerate(files * n)][:n]
    out, written = [], {} if written is None else written
    with resident, model:
        for k in {0, *drafts} - written.keys():
            draft = make_draft() if k else None
            written[k] = [_write(resident, p, k, draft, tokens) for p in prompts]
        for k in drafts:
            write = partial(_write, drafts=k, draft=make_draft() if k else None, tokens=tokens)
            first = [write(model, p) for p in prompts]
            again = [write(model, p) for p in prompts[::-1]][::-1]
            pairs = {
                "equal": (first, written[k]),
                "repeated": (first, again),
                "equal_undrafted": (first, written[0]),
                "resident_undrafted": (written[k], written[0]),
            }
            row = {"what": "greedy texts", "drafts": k, "n": len(prompts), "tokens": tokens}
            same = {key: sum(x == y for x, y in zip(*pair)) for key, pair in pairs.items()}
            out.append(row | same)
    return out


def soak(path, config, passes=334, tokens=3334, sizes=(1, 2, 4, 8, 16, 40, 160)):
    """Compare many passes of random length, then many greedy texts, with the resident model's."""
    resident, tokenizer = load(path, resident_like(config))
    model, _ = load(path, config)
    ids = [t for text in heldout_code(path).values() for t in tokenizer.encode(text)]
    by_size = {T: [0, 0] for T in sizes}
    rng, at = random.Random(config.slots), 0
    with resident, model:
        for i in range(passes):
            if i % 25 == 0:
                caches = [make_prompt_cache(m) for m in (model, resident)]
            T = rng.choice(sizes)
            inputs, at = mx.array([ids[at : at + T]]), (at + T) % (len(ids) - max(sizes))
            y, want = (m(inputs, cache=c) for m, c in zip((model, resident), caches))
            by_size[T][0] += 1
            by_size[T][1] += mx.array_equal(y, want).item()
        texts, wrote = [], 0
        while wrote < tokens:
            begin = rng.randrange(len(ids) - 50)
            prompt, n = ids[begin : begin + 40 + len(texts) % 7], min(250, tokens - wrote)
            got, want = (_write(m, prompt, 0, None, n) for m in (model, resident))
            texts, wrote = [*texts, got == want], wrote + len(got)
    rows = [
        {"what": "random passes", "positions": T, "n": n, "equal": equal}
        for T, (n, equal) in by_size.items()
    ]
    text = {"what": "long texts", "n": len(texts), "equal": sum(texts), "tokens": wrote}
    return [*rows, text]


def passes(path, modes, base):
    """The rows of ``texts``, with drafts looked up in the text, and of ``soak``, for every mode."""
    path, rows, written = folder(path), [], {}
    running = records.Running("exactness", {"model": path.name})
    for name, config in parse_modes(modes, base).items():
        facts = {"variant": name, "slots": config.slots, "source": config.source}
        made = texts(path, config, LookupDraft, written=written) + soak(path, config)
        rows += [facts | row for row in made]
    return running.table(rows)


def _write(model, prompt, drafts, draft, tokens):
    prompt = mx.array(prompt)
    if not drafts:
        return [t for t, _ in generate_step(prompt, model, max_tokens=tokens)]
    steps = speculative_generate_step(
        prompt, model, draft, num_draft_tokens=drafts, max_tokens=tokens
    )
    return [t for t, *_ in steps]


def main(out, path, modes, slots):
    records.print_and_save("", passes(path, modes, StreamConfig(slots=int(slots))), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
