"""Read the beginning of a prompt and save it for generate --prompt-cache-file."""

import argparse
import json
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from .. import load
from ..checkpoint import check_writable
from ..prompt import encode, render, vocabulary
from ..streaming.session import session_of
from . import arguments
from .argument_types import not_empty, prompt_text
from .kv_cache import check_kv_cache, quantized_given, write_prompt_cache


def run(args: argparse.Namespace) -> None:
    """Read a prompt and save the model's state after it."""
    config = arguments.streaming_given(args)
    file, loading = Path(args.prompt_cache_file).resolve(), arguments.loading_given(args)
    _check_file(file)
    check_kv_cache(args, config)
    known = {} if args.eos_token is None else {"eos_token": args.eos_token}
    loading["tokenizer_config"] |= known
    model, tokenizer = load(args.model, config, **loading)
    with model:
        arguments.say_plan(model)
        token, size = args.eos_token, vocabulary(model)
        # A tokenizer would add an unknown end token to its vocabulary.
        if token is not None and not 0 <= tokenizer.convert_tokens_to_ids(token) < size:
            raise ValueError(f"eos_token: expected a token of the model's {size}, got {token!r}")
        prompt = args.prompt
        if tokenizer.has_chat_template:
            message = {"role": "user", "content": prompt}
            prompt = render(tokenizer, [message], continue_final_message=True)
        ids = encode(tokenizer, prompt, not tokenizer.has_chat_template)
        cache = make_prompt_cache(model, args.max_kv_size)
        step = session_of(model).room.step(args.prefill_step_size)
        options = {"max_tokens": 0, "prompt_cache": cache, "prefill_step_size": step}
        for _ in generate_step(mx.array(ids), model, **options, **quantized_given(args)):
            pass
        metadata = {"model": args.model, "tokenizer_config": json.dumps(known)}
        write_prompt_cache(file, cache, metadata)
    print(f"{args.prompt_cache_file}: {len(ids)} tokens")


def _check_file(file):
    """Refuse a file that could not be written or is no prompt cache, before the prompt is read."""
    if file.suffix != ".safetensors" or not file.parent.is_dir():
        raise ValueError(f"{file}: expected a name ending in .safetensors, in an existing folder")
    check_writable(file, str(file))
    is_ours = not file.exists()
    with suppress(OSError, RuntimeError):  # ``run`` stores the model's name in each prompt cache
        is_ours = is_ours or "0.model" in mx.load(str(file), return_metadata=True)[1]
    if not is_ours:
        raise ValueError(
            f"{file}: expected no file, or a prompt cache to replace, but found something else. "
            "Name another file."
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    for name, kind, metavar, what in (
        ("--prompt", prompt_text, "TEXT", "how a message begins; - reads it from standard input"),
        ("--prompt-cache-file", not_empty, "FILE", "file to write; its name ends in .safetensors"),
    ):
        parser.add_argument(name, type=kind, required=True, metavar=metavar, help=what)
    names = ["--eos-token", "--max-kv-size", *arguments.KV_CACHE, *arguments.LOADING]
    arguments.add_hidden(parser, *names)
    arguments.add_stream_options(parser)  # options are named as in generate
