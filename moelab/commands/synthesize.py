"""Write a random 4-bit checkpoint that has the exact layer shapes of a real model.

The checkpoint is written in parts, so it need not fit in memory. Its text is noise, but its layers
cost as much to read and compute as those of the real Mixture-of-Experts model.
"""

import argparse
from functools import partial

from ..configs import one_of
from ..synthesize import LIKE, synthesize
from .argument_types import at_least, not_empty, positive
from .arguments import add_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=not_empty, metavar="OUT", help="folder that does not exist yet")
    parser.add_argument(
        "--like",
        default=LIKE[0],
        type=partial(one_of, LIKE),
        metavar="NAME",
        help=f"model with the shapes to take: {', '.join(LIKE)} (default: %(default)s)",
    )
    for name, kind, metavar, what in (
        ("--layers", positive, "N", "number of layers (default: all that the real model has)"),
        ("--vocab", positive, "N", "rows of embedding and head (default: the tokenizer's)"),
        ("--tokenizer", not_empty, "FOLDER", "folder of the tokenizer (default: tiny-moe's)"),
        ("--routing", not_empty, "TRACE", "trace: routers that read its text choose its experts"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=what)
    add_number(parser, "--seed", 0, "seed of all random bytes", at_least(0, 2**64 - 1))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> None:
    names = ("out", "like", "layers", "vocab", "seed", "tokenizer", "routing")
    out = synthesize(**{name: getattr(args, name) for name in names}, progress=not args.quiet)
    print(f"{out}: load it with mlx_lm.load, or try: python -m moelab bench {out}")
