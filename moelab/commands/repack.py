"""The command ``repack``: each expert's bytes in one piece on disk."""

import argparse
import sys
from pathlib import Path

from ..checkpoint import JOURNAL
from ..repack import repack
from .argument_types import not_empty


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Write a model folder in which one read brings one expert: the same bytes, compared after "
        "writing. It is for moelab; mlx_lm.load wants the folder that it was made from. An "
        "interrupted run goes on where it stopped."
    )
    parser.add_argument(
        "model", type=not_empty, metavar="MODEL", help="a model folder, as for mlx_lm.load"
    )
    parser.add_argument(
        "out", type=not_empty, metavar="OUT", help="folder to make (must not exist)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    try:
        out = repack(args.model, args.out, progress=not args.quiet)
    except KeyboardInterrupt:
        partial = Path(args.out).with_name(f"{Path(args.out).name}.partial")
        if (partial / JOURNAL).exists():
            print(
                f"moelab: {partial} stays: the same command goes on from there; remove it if you "
                "do not want the copy",
                file=sys.stderr,
            )
        raise
    print(
        f"{out}: the same model, each expert in one piece; "
        "use it with moelab.load or python -m moelab"
    )
