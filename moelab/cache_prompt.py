"""The command ``cache-prompt``: keep the state after a prompt's beginning in a file."""

import argparse
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from . import StreamConfig, load
from .arguments import (
    add_mode,
    add_model,
    add_stream_options,
    not_empty,
    prompt_text,
    streaming_given,
)
from .drafting import prompt_step, say_plan
from .generate import add_loading, encode, loading_given, render


def cache_prompt(
    model_path: str | Path,
    prompt: str,
    file: str | Path,
    config: StreamConfig | None = None,
    prefill_step_size: int = 2048,
    loading: dict | None = None,
) -> int:
    """Read a text and save the model's state after it, as ``mlx_lm.cache_prompt`` does.

    ``mlx_lm.generate`` can go on from it, too.

    Args:
        model_path (str or Path): As for ``moelab.load``.
        prompt (str): How a message begins.
        file (str or Path): Is written, a ``.safetensors`` file.
        config (StreamConfig): How to stream. Default: ``StreamConfig()``.
        prefill_step_size (int): Tokens in one pass, at most.
        loading (dict): More arguments of ``moelab.load``.

    Returns:
        int: The tokens in the file.
    """
    if Path(file).suffix != ".safetensors" or not Path(file).parent.is_dir():
        raise ValueError(
            f"{file}: expected a file that ends in .safetensors, in a folder that there is"
        )
    model, tokenizer = load(model_path, config or StreamConfig(), **loading or {})
    with model:
        say_plan(model)
        if tokenizer.has_chat_template:
            message = {"role": "user", "content": prompt}
            prompt = render(tokenizer, [message], continue_final_message=True)
        ids = encode(tokenizer, prompt, not tokenizer.has_chat_template)
        cache = make_prompt_cache(model)
        for _ in generate_step(
            mx.array(ids),
            model,
            max_tokens=0,
            prompt_cache=cache,
            prefill_step_size=prompt_step(model, prefill_step_size),
        ):
            pass
        known = {"model": str(model_path), "tokenizer_config": "{}"}  # as mlx-lm writes them
        try:
            save_prompt_cache(str(file), cache, known)
        except RuntimeError as error:
            raise ValueError(f"{file}: cannot be written ({error})") from error
    return len(ids)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.usage = (
        "python -m moelab cache-prompt [options] MODEL --prompt TEXT --prompt-cache-file FILE"
    )
    parser.description = "Read how a prompt begins, for generate --prompt-cache-file to go on."
    add_model(parser)
    parser.add_argument(
        "--prompt",
        type=prompt_text,
        required=True,
        metavar="TEXT",
        help="how a message begins; - reads it from standard input",
    )
    parser.add_argument(
        "--prompt-cache-file",
        type=not_empty,
        required=True,
        metavar="FILE",
        help="is written; ends in .safetensors",
    )
    add_mode(parser)
    add_loading(parser, "mlx_lm.cache_prompt")
    add_stream_options(parser, sampling=True)  # names as generate has them


def run(args: argparse.Namespace) -> None:
    """The command."""
    tokens = cache_prompt(
        args.model,
        args.prompt,
        args.prompt_cache_file,
        streaming_given(args),
        args.prefill_step_size,
        loading_given(args),
    )
    print(f"{args.prompt_cache_file}: {tokens} tokens")
