"""Chat in the terminal: q ends the chat, r forgets what was said, h lists these letters."""

import argparse
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import mlx_lm
from mlx_lm import chat as mlx_lm_chat
from tqdm import tqdm

from ..hooks import with_globals
from ..interrupts import undone
from ..prompt import templated
from ..streaming.model import load
from ..streaming.session import session_of
from . import arguments
from .argument_types import at_least, not_utf8
from .drafting import open_draft, write


class ChatUI(mlx_lm_chat.ChatUI):
    """mlx-lm's terminal, which also ends at the end of standard input and skips empty messages."""

    def prompt(self) -> str:
        text = ""
        while not text.strip():
            try:
                with undone(print, after=False):  # else the shell overwrites the frame's end
                    text = super().prompt()
                text.encode()
            except EOFError:
                return "q"
            except UnicodeError as error:
                raise ValueError(f"chat: {not_utf8(error, ' on standard input')}") from error
        return text


def run(args: argparse.Namespace) -> None:
    """Chat until ``q``, Ctrl-C or the end of standard input."""
    config = arguments.streaming_given(args)
    with ExitStack() as stack:
        draft = open_draft(args.draft_model, config.kernels, args.model)

        def load_streamed(_, **kwargs):
            model, tokenizer = load(args.model, config, draft=draft, **kwargs)
            stack.enter_context(model)
            arguments.say_plan(model)
            if not tokenizer.has_chat_template:
                raise ValueError(
                    f"chat: the tokenizer of {args.model} has no chat template. Use generate."
                )
            # Try the template: its error would end the chat at the first message.
            templated(tokenizer, "x", args.system_prompt)
            if draft is not None:
                draft.bind(model)  # raises if the draft does not fit
            args.prefill_step_size = session_of(model).room.step(args.prefill_step_size)
            return model, tokenizer

        def make_prompt_cache(model, _):
            cache = mlx_lm_chat.make_prompt_cache(model)
            return cache + (draft.make_cache() if draft else [])

        def answer(model, tokenizer, prompt, **kwargs):
            _say_beyond(model, prompt, kwargs["prompt_cache"])
            kwargs["prompt_progress_callback"] = _progress(len(prompt), args.prefill_step_size)
            return write(model, tokenizer, prompt, draft, args.num_draft_tokens, **kwargs)

        seams = {
            "setup_arg_parser": lambda: SimpleNamespace(parse_args=lambda: args),
            "load": load_streamed,
            "ChatUI": ChatUI,
            "make_prompt_cache": make_prompt_cache,
            "stream_generate": answer,
        }
        if missing := seams.keys() - {*mlx_lm_chat.main.__code__.co_names}:
            raise ValueError(
                f"chat: mlx-lm {mlx_lm.__version__}'s chat does not use {min(missing)}, which "
                "this command needs. Install mlx-lm 0.32."
            )
        with_globals(mlx_lm_chat.main, seams)()


def _say_beyond(model, prompt, cache):
    """Warn on stderr if a conversation is longer than the context that memory was planned for."""
    plan = session_of(model).plan
    tokens = len(prompt) + max((getattr(c, "offset", 0) for c in cache), default=0)
    if plan and tokens > plan.context:
        print(
            f"moelab: {tokens} tokens are more than the {plan.context} that memory is planned for, "
            f"so memory may run short. Start with --context {tokens + 4096} for such texts.",
            file=sys.stderr,
        )


def _progress(tokens, step):
    """Make a callback that shows progress on stderr while a prompt of several steps is read."""
    bar = tqdm(total=tokens, unit=" tokens", desc="prompt", disable=tokens <= step or None)

    def show(done, _):
        bar.update(done - bar.n)
        if done >= tokens - 1:  # the last token is read with the answer
            bar.close()

    return show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="instructions before every message")
    arguments.add_draft(parser)
    arguments.add_number(parser, "-m --max-tokens", 256, "most tokens of an answer")
    arguments.add_sampling(parser, ("--temp", "--top-p"))
    arguments.add_number(parser, "--seed", 0, "seed of sampling", at_least(0, 2**64 - 1))
    arguments.add_hidden(parser, *arguments.XTC, *arguments.LOADING)
    arguments.add_refused(parser, arguments.NO_LIMIT, "--max-kv-size")
    arguments.add_refused(parser, arguments.NO_PIPELINE, "--pipeline")
    arguments.add_stream_options(parser)
