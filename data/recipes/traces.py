"""``data/traces``: what tiny-moe routes to while it reads held-out text, and while it writes.

Run again: ``python data/recipes/traces.py``. The routing of a token whose experts nearly tie may differ on another machine.
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

# Kind of text: the held-out file, and the character to start at (after its licence and imports).
TEXTS = {
    "code": ("scrapy__core__downloader__handlers___base_streaming.py", 1500),
    "tests": ("networkx__algorithms__connectivity__tests__test_connectivity.py", 300),
    "prose": ("optuna__README.md", 1000),
    "docs": ("networkx__algorithms__cuts.py", 200),
}
PROMPT, DECODE, SEED, TEMPERATURE = 128, 512, 0, 0.8


def record(
    model, tokenizer, text, name, prompt_tokens=PROMPT, tokens=DECODE, sampled=False, seed=SEED
):
    """The routing of a prompt, and of the tokens after it, one at a time.

    Args:
        model, tokenizer: As ``moelab.load`` returned them.
        text (str): The text; its first tokens are the prompt.
        name (str): Kept with the trace.
        prompt_tokens (int): How many.
        tokens (int): Decoded, at most: the text's own if not ``sampled``, which is what a model that wrote this text would route to.
        sampled (bool): Let the model write, at temperature 0.8.
        seed (int): Of the sampling.

    Returns:
        Trace: Prompt and decoded tokens.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = mx.array(ids[:prompt_tokens])
    with moelab.record(
        model, name, seed if sampled else None, tokenizer.decode(ids[:prompt_tokens])
    ) as trace:
        if sampled:
            mx.random.seed(seed)
            # One more, since the last token sampled does not go in.
            for _ in generate_step(
                prompt, model, max_tokens=tokens + 1, sampler=make_sampler(TEMPERATURE)
            ):
                pass
        else:
            cache = make_prompt_cache(model)
            mx.eval(model(prompt[None], cache=cache))
            for i in ids[prompt_tokens : prompt_tokens + tokens]:
                mx.eval(model(mx.array([[i]]), cache=cache))
    return trace


def main(out=DATA / "traces", model_path=DATA / "models" / "tiny-moe"):
    """Record every trace of ``data/traces``."""
    model, tokenizer = moelab.load(model_path, moelab.StreamConfig(mode="resident"))
    with model:
        for kind, (file, start) in tqdm(TEXTS.items(), desc="traces"):
            text = (Path(model_path) / "heldout" / file).read_text(encoding="utf-8")[start:]
            record(model, tokenizer, text, f"tiny-moe, {kind}, {file}").save(
                Path(out) / f"{kind}.npz"
            )
        kind = "code"
        text = (Path(model_path) / "heldout" / TEXTS[kind][0]).read_text(encoding="utf-8")[
            TEXTS[kind][1] :
        ]
        name = f"tiny-moe, {kind}, sampled after {TEXTS[kind][0]}"
        record(model, tokenizer, text, name, sampled=True).save(Path(out) / "sampled.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
