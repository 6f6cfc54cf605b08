"""The command ``bench-limit``: ``bench`` under a memory limit."""

import argparse

from ...commands.argument_types import positive, zero_or_more
from ...commands.arguments import add_json, add_model, add_number, add_prompts
from ...commands.stream_options import MEASURED_SLOTS, add_modes, add_stream_options, modes_given
from .. import records
from . import bench

PROMPTS = ("def main():\n",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Decode with so much memory, page cache included, every run in a process of its own, "
        "against the resident model with all of it."
    )
    add_model(parser)
    parser.add_argument(
        "--limit",
        type=positive,
        metavar="MB",
        required=True,
        help="memory of each run, its page cache included",
    )
    add_modes(parser, "resident,fused")
    add_number(parser, "--tokens", 64, "timed in each run")
    add_number(parser, "--warmup", 16, "tokens before the clock starts", zero_or_more)
    add_number(parser, "--runs", 5, "rounds")
    text = parser.add_mutually_exclusive_group()
    add_prompts(text, "def main():")
    text.add_argument(
        "--feed",
        metavar="TRACE",
        help="read the text of this trace in place of a prompt and of greedy tokens",
    )
    add_json(parser)
    add_stream_options(parser, MEASURED_SLOTS)


def run(args: argparse.Namespace) -> None:
    """The command."""
    base, configs = modes_given(args)
    samples = bench.measure(
        args.model,
        configs,
        base,
        args.tokens,
        args.runs,
        args.warmup,
        args.prompt or PROMPTS,
        feed=args.feed,
        limit_nbytes=args.limit * 1_000_000,
    )
    records.print_and_save(bench.report(samples), samples, args.json)
