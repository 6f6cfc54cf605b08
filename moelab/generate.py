"""The command ``generate``: continue a prompt, then one line of figures."""

import argparse
import sys
from pathlib import Path
from typing import TextIO

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import StreamConfig, load, stats
from .arguments import (
    add_mode,
    add_model,
    add_stream_options,
    mode_given,
    positive,
    prompt_text,
)
from .streaming.session import session_of


def encode(tokenizer: TokenizerWrapper, prompt: str) -> list[int]:
    """The tokens of a prompt, of which there must be some.

    Raises:
        ValueError: If there are none.
    """
    ids = tokenizer.encode(prompt)
    if not len(ids):
        raise ValueError(
            f"prompt {prompt!r}: expected a text of at least one token, the tokenizer made none. "
            "Give another."
        )
    return ids


def generate(
    model_path: str | Path,
    prompt: str,
    config: StreamConfig | None = None,
    max_tokens: int = 128,
    out: TextIO | None = None,
) -> None:
    """Print a model's continuation as it comes, then one line of figures.

    Args:
        model_path (str or Path): As for ``moelab.load``.
        prompt (str): The text to continue, as it is.
        config (StreamConfig): How to stream. Default: ``StreamConfig()``.
        max_tokens (int): Where to stop.
        out (TextIO): Where to print. Default: standard output.
    """
    out = out or sys.stdout
    model, tokenizer = load(model_path, config or StreamConfig())
    with model:
        encode(tokenizer, prompt)  # refuses a prompt without a token
        mx.reset_peak_memory()
        out.write(prompt)
        for r in stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
            out.write(r.text)
            out.flush()
        c = stats(model).decode
        line = (
            f"{r.generation_tps:.1f} tok/s, {r.generation_tokens} tokens; "
            f"prompt {r.prompt_tps:.1f} tok/s, {r.prompt_tokens} tokens"
        )
        if c.hits + c.misses:
            read = f"{c.bytes_per_token / 1e6:.2f} MB read for each token"
            line += f"; hit rate {c.hit_rate:.0%}, {read}"
        out.write(f"\n\n[{line}; peak memory {mx.get_peak_memory() / 1e6:.0f} MB]\n")
        if plan := session_of(model).plan:
            out.write(f"[{plan}]\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = "Print a model's continuation as it comes, then one line of figures."
    add_model(parser)
    parser.add_argument(
        "--prompt",
        type=prompt_text,
        required=True,
        metavar="TEXT",
        help="the text to continue; - reads it from standard input",
    )
    add_mode(parser)
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N", default=128, help="(default: %(default)s)"
    )
    add_stream_options(parser)


def run(args: argparse.Namespace) -> None:
    """The command."""
    generate(args.model, args.prompt, mode_given(args), args.max_tokens)
