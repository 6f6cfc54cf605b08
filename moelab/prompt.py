"""Turns a prompt into the text and the tokens that a model reads."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .checkpoint import describe


def templated(
    tokenizer: TokenizerWrapper,
    prompt: str,
    system: str | None = None,
    answer: str | None = None,
    config: dict | None = None,
) -> str:
    """Write a prompt as a chat by the tokenizer's template, as ``mlx_lm.generate`` does.

    ``answer`` is how the answer begins; ``config`` has more arguments of the template.
    """
    said = {"system": system, "user": prompt, "assistant": answer}
    messages = [{"role": k, "content": v} for k, v in said.items() if v is not None]
    flags = {"continue_final_message": answer is not None, "add_generation_prompt": answer is None}
    return render(tokenizer, messages, config, **flags)


def render(
    tokenizer: TokenizerWrapper, messages: list[dict], config: dict | None = None, **options: bool
) -> str:
    """Apply the chat template with the user's arguments ``config`` and mlx-lm's ``options``."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options, **config or {})
    except Exception as error:  # a template can raise any error
        given = f" with {', '.join(config)}" if config else ""
        raise ValueError(
            f"chat template of the tokenizer: it fails for messages of "
            f"{', '.join(m['role'] for m in messages)}{given}: {describe(error)}. Leave out what "
            "the template does not take."
        ) from error


def encode(tokenizer: TokenizerWrapper, text: str, special: bool = True) -> list[int]:
    """Return a prompt's tokens, at least one; ``special`` adds the tokens that begin a text."""
    ids = tokenizer.encode(text, **({} if special else {"add_special_tokens": False}))
    if not len(ids):
        raise ValueError(
            f"prompt {text!r}: expected a text of at least one token, but the tokenizer made "
            "none. Give another text."
        )
    return ids


def vocabulary(model: nn.Module) -> int:
    """Return the vocabulary's size V, from a model's configuration or else from its embedding."""
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None) or {}
    text = text if isinstance(text, dict) else vars(text)
    if size := getattr(args, "vocab_size", None) or text.get("vocab_size"):
        return size
    kinds = nn.Embedding, nn.QuantizedEmbedding
    return max(m.weight.shape[0] for m in model.modules() if isinstance(m, kinds))


def check_tokens(tokens: mx.array, model: nn.Module) -> None:
    """Refuse token ids outside the vocabulary, for which MLX would read beyond a table's end."""
    ids, V = np.array(tokens), vocabulary(model)
    if (wrong := ids[(ids < 0) | (ids >= V)]).size:
        raise ValueError(
            f"tokens: expected ids from 0 to {V - 1}, the model's vocabulary, got {wrong[0]}. "
            "Encode the text with the model's own tokenizer."
        )
