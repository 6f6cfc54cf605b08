"""The command ``synthesize``: a random checkpoint with the layer shapes of a real model."""

import argparse

from ..synthesize import LIKE, synthesize
from .argument_types import not_empty, positive, zero_or_more
from .arguments import add_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Write a random 4-bit checkpoint that has the exact layer shapes of a real "
        "Mixture-of-Experts model, without holding it in memory. Its text is noise; reading and "
        "computing its layers costs what the real model's cost."
    )
    parser.add_argument(
        "out", type=not_empty, metavar="OUT", help="folder to make (must not exist)"
    )
    parser.add_argument(
        "--like",
        default="qwen3.5-35b-a3b",
        choices=LIKE,
        metavar="NAME",
        help=f"whose shapes to take: {', '.join(LIKE)} (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        type=positive,
        metavar="N",
        help="number of layers (default: all that the real model has: 18 to 220 GB)",
    )
    parser.add_argument(
        "--vocab",
        type=positive,
        metavar="N",
        help="rows of embedding and head (default: the tokenizer's vocabulary, which is smaller "
        "than the real one: the layers are what counts)",
    )
    parser.add_argument(
        "--tokenizer",
        type=not_empty,
        help="folder to copy tokenizer.json from (default: tiny-moe's)",
    )
    add_number(parser, "--seed", 0, "seed of every byte", zero_or_more)
    parser.add_argument(
        "--routing",
        type=not_empty,
        metavar="TRACE",
        help="a trace of a text, such as data/traces/code.npz: fed this text, the routers choose "
        "experts with its locality (default: nearly uniformly)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    out = synthesize(
        args.out,
        args.like,
        args.layers,
        args.vocab,
        args.seed,
        args.tokenizer,
        progress=not args.quiet,
        routing=args.routing,
    )
    print(f"{out}: load it with mlx_lm.load, or try: python -m moelab bench {out}")
