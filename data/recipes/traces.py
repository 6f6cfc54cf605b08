"""Make ``data/traces``: tiny-moe's routing while it reads held-out text, and while it writes.

    python data/recipes/traces.py

The routing of a token whose experts nearly tie may differ on another machine.
"""

import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

import moelab
from moelab import DATA
from moelab.lab.texts import heldout_files

# For each kind of text: the held-out file, and the first character after licence and imports.
TEXTS = {
    "code": ("scrapy__core__downloader__handlers___base_streaming.py", 1500),
    "tests": ("networkx__algorithms__connectivity__tests__test_connectivity.py", 300),
    "prose": ("optuna__README.md", 1000),
    "docs": ("networkx__algorithms__cuts.py", 200),
}
PROMPT, DECODE = 128, 512  # tokens
SEED, TEMPERATURE = 0, 0.8  # of the sampled trace


def texts(model_path) -> dict[str, str]:
    """Read the held-out text of each kind, without its licence and imports."""
    files = heldout_files(Path(model_path) / "heldout")
    return {kind: files[name][start:] for kind, (name, start) in TEXTS.items()}


def record(model, tokenizer, text, name, tokens=DECODE, sampled=False) -> moelab.Trace:
    """Record the routing of a text's first ``PROMPT`` tokens, then of ``tokens`` more, one by one.

    The tokens after the prompt are the text's own, as if the model wrote this text. If ``sampled``,
    the model itself writes these tokens.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, seed = mx.array(ids[:PROMPT]), SEED if sampled else None
    with moelab.record(model, name, seed, tokenizer.decode(ids[:PROMPT])) as trace:
        if sampled:
            mx.random.seed(SEED)
            sampler = make_sampler(TEMPERATURE)
            # One token more, because the model does not read the last sampled token.
            for _ in generate_step(prompt, model, max_tokens=tokens + 1, sampler=sampler):
                pass
        else:
            cache = make_prompt_cache(model)
            mx.eval(model(prompt[None], cache=cache))
            for i in ids[PROMPT : PROMPT + tokens]:
                mx.eval(model(mx.array([[i]]), cache=cache))
    return trace


def main(out=DATA / "traces", model_path=DATA / "models" / "tiny-moe"):
    model, tokenizer = moelab.load(model_path, moelab.StreamConfig(mode="resident"))
    with model:
        every = texts(model_path)
        for kind, text in tqdm(every.items(), desc="traces", disable=None):
            name = f"tiny-moe, {kind}, {TEXTS[kind][0]}"
            record(model, tokenizer, text, name).save(Path(out) / f"{kind}.npz")
        name = f"tiny-moe, code, sampled after {TEXTS['code'][0]}"
        record(model, tokenizer, every["code"], name, sampled=True).save(Path(out) / "sampled.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
