"""Write a model folder in which one read brings one expert.

The experts' bytes stay the same and are compared after writing. Only moelab reads the new folder;
mlx_lm.load needs the original.
"""

import argparse

from ..repack import repack
from ..streaming.model import find
from .argument_types import not_empty
from .arguments import add_field


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=not_empty, metavar="MODEL", help="folder, as for mlx_lm.load")
    parser.add_argument("out", type=not_empty, metavar="OUT", help="folder that does not exist yet")
    add_field(parser, "library")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> None:
    path = find(args.model, download=False)
    out = repack(path, args.out, progress=not args.quiet, library=args.library or "auto")
    print(f"{out}: the same model, each expert in one piece, for moelab.load and python -m moelab")
