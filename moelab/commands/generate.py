"""The command ``generate``: continue a prompt, then one line of figures."""

import argparse
import io
import secrets
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from .. import StreamConfig, load, stats
from ..prompt import Template, encode
from ..speculation.generate import check_tokens
from ..speculation.target import vocabulary
from ..streaming.ranks import joined
from ..streaming.session import session_of
from .argument_types import at_least, json_object, not_empty, positive, prompt_text
from .arguments import (
    add_draft,
    add_kv_cache,
    add_loading,
    add_model,
    add_number,
    add_refused,
    add_sampling,
    add_xtc,
    loading_given,
)
from .drafting import leave_room, open_draft, prompt_step, say_plan, write
from .kv_cache import KVCacheOptions, open_prompt_cache
from .stream_options import add_mode, add_stream_options, streaming_given


def generate(
    model_path: str | Path,
    prompt: str,
    config: StreamConfig | None = None,
    max_tokens: int = 128,
    out: TextIO | None = None,
    *,
    template: Template | None = None,
    draft: str | Path | None = None,
    num_draft_tokens: int | str = "auto",
    sampling: dict | None = None,
    seed: int | None = None,
    prompt_cache_file: str | Path | None = None,
    kv_cache: KVCacheOptions | None = None,
    extra_eos_tokens: Sequence[str] = (),
    prefill_step_size: int = 2048,
    verbose: bool = True,
    loading: dict | None = None,
) -> None:
    """Print a model's continuation as it comes and, with ``verbose``, one line of figures.

    ``sampling`` has arguments of mlx-lm's ``make_sampler``, ``loading`` more of ``moelab.load``.
    With a ``group`` in ``loading``, only rank 0 prints. Each rank samples for itself: its logits
    have the same bits and its seed is the same, so no token has to be sent.
    """
    check_tokens(max_tokens, prefill_step_size)
    out, template, config = out or sys.stdout, template or Template(), config or StreamConfig()
    kv_cache, loading, cache = kv_cache or KVCacheOptions(), dict(loading or {}), None
    trust = loading.get("trust_remote_code", False)
    if prompt_cache_file is not None:
        cache, tokenizer_config = open_prompt_cache(
            prompt_cache_file, model_path, config, kv_cache, trust
        )
        loading["tokenizer_config"] = tokenizer_config | (loading.get("tokenizer_config") or {})
    group = loading.get("group")
    if group is not None and group.rank():
        verbose, out = False, io.StringIO()
    kv_cache.check(model_path, config, draft is not None, trust)
    drafted_by = draft
    if draft is not None:
        draft = open_draft(draft, config.kernels)
        config = leave_room(config, draft)
    if seed is not None:
        # Loading draws random numbers, so seed where mlx-lm does: after the draft is loaded and
        # before the model is.
        mx.random.seed(seed)
    model, tokenizer = load(model_path, config, **loading)
    with model:
        if verbose:
            say_plan(model)
        text = template.text(tokenizer, prompt)
        if cache is not None:
            text = template.text_after(tokenizer, prompt)
        elif kv_cache.max_kv_size is not None:
            cache = make_prompt_cache(model, kv_cache.max_kv_size)
        ids = encode(tokenizer, text, not template.applies(tokenizer))
        sampling = sampling or {}
        _check_tokens(vocabulary(model), tokenizer, extra_eos_tokens, sampling)
        if ranks := session_of(model).ranks:
            given = {
                "prompt": f"{len(ids)} tokens with checksum {zlib.crc32(np.array(ids)):08x}",
                "max_tokens": max_tokens,
                "draft": drafted_by,
                "num_draft_tokens": num_draft_tokens,
                "sampling": sampling,
                "seed": seed,
                "prompt_cache_file": prompt_cache_file,
                "kv_cache": kv_cache,
                "extra_eos_tokens": extra_eos_tokens,
                "prefill_step_size": prefill_step_size,
            }
            ranks.compare({name: str(value) for name, value in given.items()})
            if seed is None:
                mx.random.seed(ranks.gather(secrets.randbits(32))[0])
        special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
        responses = write(
            model,
            tokenizer,
            ids,
            draft,
            num_draft_tokens,
            max_tokens=max_tokens,
            sampler=make_sampler(**sampling, xtc_special_tokens=special),
            prompt_cache=cache,
            prefill_step_size=prompt_step(model, prefill_step_size),
            **kv_cache.quantized,
        )
        mx.reset_peak_memory()
        if verbose and text == prompt:
            out.write(prompt)
        for r in responses:
            if r.generation_tokens == 1:
                before = _needed(model)
            out.write(r.text)
            out.flush()
        out.write(f"\n\n[{_figures(r, _needed(model) - before)}]\n" if verbose else "\n")


def _check_tokens(size, tokenizer, extra_eos_tokens, sampling):
    """Add tokens that end the text; refuse tokens and numbers beyond the vocabulary."""
    for token in extra_eos_tokens:
        number = int(token) if token.isdecimal() else tokenizer.get_vocab().get(token, -1)
        if not 0 <= number < size:
            raise ValueError(
                f"extra_eos_tokens: expected a token of the vocabulary, or a number from 0 to "
                f"{size - 1}, got {token!r}"
            )
        tokenizer.add_eos_token(token)
    for name in ("top_k", "min_tokens_to_keep"):
        # mlx-lm would fail inside a compiled function, and the random state would stay broken.
        if sampling.get(name, 0) >= size:
            raise ValueError(
                f"{name} of sampling: expected less than {size} tokens, got {sampling[name]}"
            )


def _needed(model):
    """Count so far: experts found in slots, experts missing there, bytes read."""
    phases = stats(model)
    return np.sum([(c.hits, c.misses, c.bytes_read) for c in (phases.prefill, phases.decode)], 0)


def _figures(r, needed):
    """One line of figures from a text's last response and ``_needed`` since its first token."""
    line = (
        f"{r.generation_tps:.1f} tok/s, {r.generation_tokens} tokens; "
        f"prompt {r.prompt_tps:.1f} tok/s, {r.prompt_tokens} tokens"
    )
    if getattr(r, "drafted", 0):
        line += f"; {r.accepted} of {r.drafted} drafts accepted"
    hits, misses, nbytes = needed
    if hits + misses and r.generation_tokens > 1:
        read = f"{nbytes / (r.generation_tokens - 1) / 1e6:.2f} MB read for each token"
        line += f"; hit rate {hits / (hits + misses):.0%}, {read}"
    return f"{line}; peak memory {mx.get_peak_memory() / 1e6:.0f} MB"


def add_template(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mlx_lm.generate`` that put a prompt into a chat template."""
    parser.add_argument("--system-prompt", metavar="TEXT", help="a message before the prompt's")
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="the prompt as it is, without the tokenizer's chat template",
    )
    parser.add_argument(
        "--chat-template-config", type=json_object, metavar="JSON", help="more for the template"
    )


def _escaped(text):
    r"""``prompt_text`` after ``\n`` became a line break and ``\t`` a tab."""
    return prompt_text(text.replace("\\n", "\n").replace("\\t", "\t"))


def _yes_or_no(text):
    """Parse the values of mlx-lm's ``--verbose``."""
    if text.lower() not in ("t", "true", "f", "false"):
        raise argparse.ArgumentTypeError(f"expected T or F, got {text!r}")
    return text.lower().startswith("t")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "python -m moelab generate [options] MODEL --prompt TEXT"
    parser.description = "Print a model's continuation as it comes, then one line of figures."
    add_model(parser)
    parser.add_argument(
        "-p",
        "--prompt",
        type=_escaped,
        required=True,
        metavar="TEXT",
        help="text to continue, or message to answer; - reads standard input",
    )
    add_template(parser)
    add_mode(parser)
    add_number(parser, "--max-tokens", 128, "where to stop", short="-m")
    add_draft(parser)
    add_sampling(parser)
    parser.add_argument("--seed", type=at_least(0, 2**64 - 1), metavar="N", help="of sampling")
    parser.add_argument(
        "--prompt-cache-file",
        type=not_empty,
        metavar="FILE",
        help="the prompt goes on from there (cache-prompt writes such files)",
    )
    for name, options in {
        "--extra-eos-token": {"nargs": "+", "default": ()},
        "--min-tokens-to-keep": {"type": positive, "default": 1},
        "--prefill-response": {},
        "--verbose": {"type": _yes_or_no, "default": True},
    }.items():
        parser.add_argument(name, help=argparse.SUPPRESS, **options)
    add_xtc(parser)
    add_kv_cache(parser)
    more = ("--draft-model", "--extra-eos-token", "--min-tokens-to-keep", "--prefill-response")
    more += ("--max-kv-size", "--kv-bits", "--kv-group-size", "--quantized-kv-start", "--verbose")
    add_loading(parser, "mlx_lm.generate", *more, "--xtc-probability", "--xtc-threshold")
    add_refused(parser, "images are not streamed, mlx_lm.generate takes them", "--image")
    why = "a streamed model computes with activations that are not quantized"
    add_refused(parser, why, "--quantize-activations", "-qa")
    why = "mlx_lm.generate takes this and goes by --ignore-chat-template alone"
    add_refused(parser, why, "--use-default-chat-template")
    add_stream_options(parser, sampling=True)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    generate(
        args.model,
        args.prompt,
        streaming_given(args),
        args.max_tokens,
        template=Template(
            args.ignore_chat_template,
            args.system_prompt,
            args.prefill_response,
            args.chat_template_config,
        ),
        draft=args.draft_model,
        num_draft_tokens=args.num_draft_tokens,
        sampling={
            "temp": args.temp,
            "top_p": args.top_p,
            "min_p": args.min_p,
            "min_tokens_to_keep": args.min_tokens_to_keep,
            "top_k": args.sampling_top_k,
            "xtc_probability": args.xtc_probability,
            "xtc_threshold": args.xtc_threshold,
        },
        seed=args.seed,
        prompt_cache_file=args.prompt_cache_file,
        kv_cache=KVCacheOptions.given(args),
        extra_eos_tokens=args.extra_eos_token,
        prefill_step_size=args.prefill_step_size,
        verbose=args.verbose,
        loading={**loading_given(args), "group": joined()},
    )
