"""The command ``repack``: each expert's bytes in one piece on disk."""

import argparse

from ..repack import repack
from ..streaming.config import OPTIONS
from ..streaming.model import find
from .argument_types import not_empty
from .arguments import flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a model folder in which one read brings one expert: the same bytes, compared after "
        "writing. It is for moelab; mlx_lm.load wants the folder that it was made from."
    )
    parser.add_argument("model", type=not_empty, metavar="MODEL", help="folder, as for mlx_lm.load")
    parser.add_argument("out", type=not_empty, metavar="OUT", help="folder that does not exist yet")
    of = OPTIONS["library"]
    parser.add_argument(
        flag("library"),
        dest="library",
        choices=of.choices,
        default=of.default,
        help=of.help.format(default=of.default),
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> None:
    path = find(args.model, download=False)
    out = repack(path, args.out, progress=not args.quiet, library=args.library)
    print(f"{out}: the same model, each expert in one piece, for moelab.load and python -m moelab")
