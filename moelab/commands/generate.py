"""Print a model's continuation as it comes, then one line of figures."""

import argparse
import io
import secrets
import sys

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler

from .. import load, stats
from ..prompt import encode, templated, vocabulary
from ..streaming.ranks import joined
from ..streaming.session import session_of
from . import arguments
from .argument_types import at_least, json_object, prompt_text
from .drafting import open_draft, write
from .kv_cache import check_kv_cache, quantized_given


def run(args: argparse.Namespace) -> None:
    """Print a model's continuation and, with ``verbose``, a line of figures; only rank 0 prints.

    Each rank samples for itself, with the same logits and seed, so no token has to be sent.
    """
    config, loading = arguments.streaming_given(args), arguments.loading_given(args)
    check_kv_cache(args, config)
    draft, group = open_draft(args.draft_model, config.kernels, args.model), joined()
    follows = group is not None and group.rank() > 0
    out, verbose = io.StringIO() if follows else sys.stdout, args.verbose and not follows
    if args.seed is not None:
        # Loading draws random numbers, so seed where mlx-lm does: after the draft is loaded and
        # before the model is.
        mx.random.seed(args.seed)
    model, tokenizer = load(args.model, config, group=group, draft=draft, **loading)
    with model:
        if verbose:
            arguments.say_plan(model)
        text, as_it_is = args.prompt, args.ignore_chat_template or not tokenizer.has_chat_template
        if not as_it_is:
            said = {"system": args.system_prompt, "answer": args.prefill_response}
            text = templated(tokenizer, text, **said, config=args.chat_template_config)
        ids = encode(tokenizer, text, as_it_is)
        _check_tokens(vocabulary(model), tokenizer, args)
        session = session_of(model)
        if session.ranks:
            arguments.compare_arguments(session.ranks, args)
            if args.seed is None:
                mx.random.seed(session.ranks.gather(secrets.randbits(32))[0])
        likely = args.temp, args.top_p, args.min_p, args.min_tokens_to_keep, args.sampling_top_k
        ends = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
        sampler = make_sampler(*likely, args.xtc_probability, args.xtc_threshold, ends)
        options = {"max_tokens": args.max_tokens, "sampler": sampler}
        options["prefill_step_size"] = session.room.step(args.prefill_step_size)
        options |= quantized_given(args)
        responses = write(model, tokenizer, ids, draft, args.num_draft_tokens, **options)
        mx.reset_peak_memory()
        if verbose and text == args.prompt:
            out.write(text)
        for r in responses:
            if r.generation_tokens == 1:
                before = _needed(model)
            out.write(r.text)
            out.flush()
        out.write(f"\n\n[{_figures(r, _needed(model) - before)}]\n" if verbose else "\n")
        out.flush()


def _check_tokens(size, tokenizer, args):
    """Add the tokens that shall end the text; refuse tokens and numbers beyond the vocabulary."""
    for token in args.extra_eos_token:
        number = int(token) if token.isdecimal() else tokenizer.get_vocab().get(token, -1)
        if not 0 <= number < size:
            raise ValueError(
                f"extra_eos_token: expected a token of the vocabulary, or a number from 0 to "
                f"{size - 1}, got {token!r}"
            )
        tokenizer.add_eos_token(token)
    for name in ("sampling_top_k", "min_tokens_to_keep"):
        # mlx-lm would fail inside a compiled function, and the random state would stay broken.
        if (number := getattr(args, name)) >= size:
            raise ValueError(f"{name}={number}: expected less than {size}, the vocabulary's size")


def _needed(model):
    """Return the model's counts so far: hits, misses and bytes read."""
    phases = (stats(model).prefill, stats(model).decode)
    return np.sum([(c.hits, c.misses, c.bytes_read) for c in phases], 0)


def _figures(r, needed):
    """Return the line of figures from the last response and the counts since the first token."""
    # mlx-lm counts the first token, but not its time.
    speed = r.generation_tps * (r.generation_tokens - 1) / r.generation_tokens
    line = f"{speed:.1f} tok/s, " if speed else ""
    line += f"{r.generation_tokens} token{'s' * (r.generation_tokens > 1)}; "
    line += f"prompt {r.prompt_tps:.1f} tok/s, {r.prompt_tokens} tokens"
    if getattr(r, "drafted", 0):
        line += f"; {r.accepted} of {r.drafted} drafts accepted"
    hits, misses, nbytes = needed
    if hits + misses and r.generation_tokens > 1:
        read = f"{nbytes / (r.generation_tokens - 1) / 1e6:.2f} MB read for each token"
        line += f"; hit rate {hits / (hits + misses):.0%}, {read}"
    return f"{line}; arrays took at most {mx.get_peak_memory() / 1e6:.0f} MB"


def _escaped(text):
    r"""Replace ``\n`` by a line break and ``\t`` by a tab, and pass the text to ``prompt_text``."""
    return prompt_text(text.replace("\\n", "\n").replace("\\t", "\t"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    what = "text to continue, or message to answer; - reads standard input"
    parser.add_argument("-p", "--prompt", type=_escaped, required=True, metavar="TEXT", help=what)
    parser.add_argument("--system-prompt", metavar="TEXT", help="instructions before the prompt")
    as_it_is = "read the prompt as it is, without the chat template"
    parser.add_argument("--ignore-chat-template", action="store_true", help=as_it_is)
    parser.add_argument(
        "--chat-template-config", type=json_object, metavar="JSON", help="arguments of the template"
    )
    arguments.add_number(parser, "-m --max-tokens", 128, "most tokens to write")
    arguments.add_draft(parser)
    arguments.add_sampling(parser)
    parser.add_argument("--seed", type=at_least(0, 2**64 - 1), metavar="N", help="seed of sampling")
    names = ["--extra-eos-token", "--min-tokens-to-keep", "--prefill-response", "--verbose"]
    names += [*arguments.XTC, *arguments.KV_CACHE, *arguments.LOADING]
    arguments.add_hidden(parser, *names)
    arguments.add_refused(parser, "images are not streamed, mlx_lm.generate takes them", "--image")
    why = "a streamed model computes with activations that are not quantized"
    arguments.add_refused(parser, why, "--quantize-activations", "-qa")
    arguments.add_refused(parser, arguments.NO_LIMIT, "--max-kv-size")
    why = "serve keeps prompts, over a restart with its --prompt-cache-dir"
    arguments.add_refused(parser, why, "--prompt-cache-file")
    why = "mlx_lm.generate takes this and goes by --ignore-chat-template alone"
    arguments.add_refused(parser, why, "--use-default-chat-template")
    arguments.add_stream_options(parser)
