"""What a user waits for: prompts of some length, sampled answers, with a draft and without.

    python -m moelab.lab workload OUT.json MODEL MB [DRAFT ...]

The model is resident, and streamed with the slots that ``slots="auto"`` chooses for MB megabytes.
A draft is a folder or ``lookup``, and behind ``=`` how many tokens it drafts (default: the policy
decides). With and without a draft the same seed writes the same text. OUT.json is written after
each prompt, so that a run that is cut off keeps what it has.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import load_tokenizer
from tqdm import tqdm

from ... import StreamConfig, close, load
from ...commands.drafting import open_draft, write
from ...shipped import shipped
from ...streaming.session import session_of
from .. import records
from ..texts import heldout_starts

if TYPE_CHECKING:
    from pandas import DataFrame

TEXTS = shipped("models", "tiny-moe")  # has the text of the prompts
TEMPERATURE = 0.6
PROMPT_TOKENS = (126, 400, 800)


def answer(model, tokenizer, prompt: list[int], tokens: int, seed: int, draft, number) -> dict:
    """One sampled answer that does not end before ``tokens``.

    Args:
        model (nn.Module): From ``moelab.load``.
        tokenizer (TokenizerWrapper): Its tokenizer.
        prompt (list[int]): Token ids.
        tokens (int): Of the answer.
        seed (int): Of the sampler.
        draft (Draft or None): What guesses.
        number (int or str): How many tokens, or ``auto``.

    Returns:
        dict: Seconds to the first token, tokens and seconds after it, how many tokens were drafted
        and accepted, and the ``text``.
    """
    mx.random.seed(seed)
    never = {token: -1e4 for token in tokenizer.eos_token_ids}
    begin, first_s, text = time.perf_counter(), None, ""
    responses = write(
        model,
        tokenizer,
        prompt,
        draft,
        number,
        max_tokens=tokens,
        sampler=make_sampler(TEMPERATURE),
        logits_processors=make_logits_processors(logit_bias=never),
    )
    for response in responses:
        first_s = first_s or time.perf_counter() - begin
        text += response.text
    return {
        "first_s": first_s,
        "decode_tokens": tokens - 1,
        "decode_s": time.perf_counter() - begin - first_s,
        "drafted": getattr(response, "drafted", 0),
        "accepted": getattr(response, "accepted", 0),
        "text": text,
    }


def measure(
    path: str | Path,
    memory_nbytes: int,
    drafts: Sequence[str] = (),
    tokens: int = 200,
    long_tokens: int = 800,
    rounds: int = 3,
    prompt_tokens: Sequence[int] = PROMPT_TOKENS,
    keep: Callable[["DataFrame"], None] = lambda samples: None,
) -> "DataFrame":
    """Every prompt with every draft, resident and streamed; each prompt begins with another one.

    Args:
        path (str or Path): The model.
        memory_nbytes (int): For the streamed one.
        drafts (Sequence[str]): By name and number. No draft is always tried.
        tokens (int): Of each answer.
        long_tokens (int): Of the answers to the last prompt in one more round.
        rounds (int): Each with other prompts and another seed. One more, of few tokens, comes
            first and is not kept.
        prompt_tokens (Sequence[int]): Lengths of the prompts.
        keep (Callable): Called with the table so far after each prompt.

    Returns:
        DataFrame: A row an answer: ``variant`` (``resident`` or ``streamed``, and the draft),
        ``round`` (each has one prompt), ``prompt_tokens``, the columns of ``answer`` and, in place
        of the text, ``same``: whether it is that of the resident model without a draft.
    """
    tokenizer, rows = load_tokenizer(Path(path)), []
    configs = {
        "resident": StreamConfig(mode="resident"),
        "streamed": StreamConfig(memory_nbytes=memory_nbytes, context=max(prompt_tokens) + tokens),
    }
    models = {name: load(path, config)[0] for name, config in configs.items()}
    opened = {name: (model, None, 0) for name, model in models.items()}
    for (name, model), draft in product(models.items(), drafts):
        path_or_lookup, _, number = draft.partition("=")
        guesses = open_draft(path_or_lookup), int(number or 0) or "auto"
        opened[f"{name}, {Path(draft).name}"] = model, *guesses
    running = records.Running(
        "workload",
        {
            "model": Path(path).name,
            "temperature": TEMPERATURE,
            "memory_nbytes": memory_nbytes,
            "plan": session_of(models["streamed"]).plan.reason,
            "baseline": "resident",
            "drafts": [Path(draft).name for draft in drafts],
        },
    )
    sizes, order = [16, *[tokens] * rounds, long_tokens], deque(opened.items())
    for i, size in enumerate(tqdm(sizes, unit="round"), -1):
        for length in prompt_tokens[-1:] if i == rounds else prompt_tokens:
            text = heldout_starts(TEXTS, i + 2, length, tokenizer)[-1]
            prompt = tokenizer.encode(text)[:length]
            answers = {
                name: answer(model, tokenizer, prompt, size, i + 1, *guesses)
                for name, (model, *guesses) in order
            }
            order.rotate(-1)
            texts = {name: row.pop("text") for name, row in answers.items()}
            if i >= 0:
                rows += [
                    {"variant": name, "round": len(rows) // len(order)}
                    | {
                        "prompt_tokens": len(prompt),
                        **row,
                        "same": texts[name] == texts["resident"],
                    }
                    for name, row in answers.items()
                ]
                keep(running.table(rows, partial=True))
    for model in models.values():
        close(model)
    return running.table(rows)


def main(out: str, model: str, mb: str, *drafts: str) -> None:
    """Write the record of ``measure``.

    Args:
        out (str): The record.
        model (str): A model folder.
        mb (str): Megabytes, as a number.
        drafts (str): As for ``measure``.
    """
    nbytes = int(mb) * 1_000_000
    made = measure(model, nbytes, drafts, keep=partial(records.save, out))
    records.print_and_save("", made, out)
