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
from itertools import product
from pathlib import Path

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import load_tokenizer
from tqdm import tqdm

from ... import StreamConfig, close, load
from ...commands.drafting import open_draft, write
from ...shipped import shipped
from ...streaming.session import session_of
from .. import machine, records
from ..texts import heldout_starts

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
        dict: Seconds to the first token, tokens a second after it, how many tokens were drafted and
        accepted, and the ``text``.
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
    took_s = time.perf_counter() - begin - first_s
    return {
        "first_s": first_s,
        "tok_s": (tokens - 1) / took_s,
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
    keep: Callable[[dict], None] = lambda record: None,
) -> dict:
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
        keep (Callable): Called with the record so far after each prompt.

    Returns:
        dict: A row of ``answer`` for each, and how it was measured. In place of the text it has
        ``same``: whether it is that of the resident model without a draft.
    """
    tokenizer, rows = load_tokenizer(Path(path)), []
    configs = {
        "resident": StreamConfig(mode="resident"),
        "streamed": StreamConfig(memory_nbytes=memory_nbytes, context=max(prompt_tokens) + tokens),
    }
    models = {name: load(path, config)[0] for name, config in configs.items()}
    opened = {(name, None): (None, 0) for name in models}
    for name, draft in product(models, drafts):
        path_or_lookup, _, number = draft.partition("=")
        opened[name, draft] = open_draft(path_or_lookup), int(number or 0) or "auto"
    made = {
        "kind": "workload",
        "machine": machine.card(),
        "model": Path(path).name,
        "temperature": TEMPERATURE,
        "plan": session_of(models["streamed"]).plan.reason,
        "rows": rows,
    }
    sizes, order = [16, *[tokens] * rounds, long_tokens], deque(opened.items())
    for i, size in enumerate(tqdm(sizes, unit="round"), -1):
        for length in prompt_tokens[-1:] if i == rounds else prompt_tokens:
            text = heldout_starts(TEXTS, i + 2, length, tokenizer)[-1]
            prompt = tokenizer.encode(text)[:length]
            answers = {
                key: answer(models[key[0]], tokenizer, prompt, size, i + 1, *guesses)
                for key, guesses in order
            }
            order.rotate(-1)
            texts = {key: row.pop("text") for key, row in answers.items()}
            for (name, draft), row in answers.items() if i >= 0 else ():
                same = texts[name, draft] == texts["resident", None]
                row = row | {"round": i, "model": name, "draft": draft, "tokens": size}
                rows.append(row | {"prompt_tokens": len(prompt), "same": same})
            keep(made)
    for model in models.values():
        close(model)
    return made


def main(out: str, model: str, mb: str, *drafts: str) -> None:
    """Write the record of ``measure``.

    Args:
        out (str): The record.
        model (str): A model folder.
        mb (str): Megabytes, as a number.
        drafts (str): As for ``measure``.
    """
    nbytes = int(mb) * 1_000_000
    measure(model, nbytes, drafts, keep=lambda record: records.save(out, record))
