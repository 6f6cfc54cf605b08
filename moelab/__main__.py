"""python -m moelab: check, generate, bench, synthesize. Arguments only; each command calls one function elsewhere."""

import argparse
import sys


def _synthesize(args):
    from .recipes.synthesize import synthesize

    out = synthesize(args.out, args.like, args.layers, args.vocab, args.seed, args.tokenizer, progress=not args.quiet)
    print(f"{out}: load it with mlx_lm.load, or try: python -m moelab bench {out}")


def _add_synthesize(commands):
    p = commands.add_parser(
        "synthesize",
        help="a random checkpoint with a real model's layer shapes",
        description="Write a random 4-bit checkpoint that has the exact layer shapes of a real Mixture-of-Experts model, without holding it in "
        "memory. Its text is noise; reading and computing its layers costs what the real model's cost.",
    )
    p.add_argument("out", metavar="OUT", help="folder to make (must not exist)")
    p.add_argument(
        "--like",
        default="qwen3.5-35b-a3b",
        choices=["qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b", "qwen3-30b-a3b"],
        help="the model whose shapes to take (default: %(default)s)",
    )
    p.add_argument("--layers", type=int, help="number of layers (default: all that the real model has: 18 to 220 GB)")
    p.add_argument(
        "--vocab",
        type=int,
        help="rows of embedding and head (default: the tokenizer's vocabulary, which is smaller than the real one: the layers are what counts)",
    )
    p.add_argument("--tokenizer", help="folder to copy tokenizer.json from (default: data/models/tiny-moe)")
    p.add_argument("--seed", type=int, default=0, help="seed of every byte (default: %(default)s)")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.set_defaults(run=_synthesize)


def parser():
    p = argparse.ArgumentParser(
        prog="python -m moelab", description="Mixture-of-Experts decoding with the experts on disk."
    )
    commands = p.add_subparsers(required=True, metavar="COMMAND")
    _add_synthesize(commands)
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:  # ours say what, where, expected and got, and what to do
        message = error.strerror if isinstance(error, OSError) and error.strerror and not error.filename else error
        print(f"moelab: {message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
