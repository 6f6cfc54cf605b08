"""Options that several commands have."""

import argparse
from collections.abc import Callable

from .argument_types import (
    at_least,
    between,
    not_empty,
    or_auto,
    positive,
    prompt_text,
    zero_or_more,
)

LEAST_KV_SIZE = 5  # tokens: a limited cache never drops its first 4


def flag(name: str) -> str:
    """Spell a field's name as an option: ``top_k`` becomes ``--top-k``."""
    return "--" + name.replace("_", "-")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument ``model``."""
    parser.add_argument(
        "model",
        type=not_empty,
        metavar="MODEL",
        help="folder or Hub repository, as for mlx_lm.load",
    )


def add_number(
    parser: argparse.ArgumentParser,
    name: str,
    default: int,
    what: str,
    kind: Callable[[str], int] = positive,
    short: str | None = None,
) -> None:
    """Add an option that takes a whole number; its help is ``what`` and the default."""
    names = (name,) if short is None else (short, name)
    parser.add_argument(
        *names, type=kind, metavar="N", default=default, help=f"{what} (default: %(default)s)"
    )


def add_json(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add ``--json``; ``__main__`` checks that the file can be written before the command runs."""
    parser.add_argument(
        "--json",
        type=not_empty,
        metavar="FILE",
        required=required,
        help="keep raw samples, machine and settings there",
    )


def add_prompts(parser: argparse.ArgumentParser, default: str = "the built-in ones") -> None:
    """Add ``--prompt``, which may be given several times: ``args.prompt`` is a list, or None."""
    parser.add_argument(
        "--prompt",
        type=prompt_text,
        action="append",
        metavar="TEXT",
        help=f"again for more; - reads standard input (default: {default})",
    )


NO_PIPELINE = "several machines divide the experts of each layer, not the layers"


def add_refused(parser: argparse.ArgumentParser, why: str, *names: str) -> None:
    """Add an option of mlx-lm's command that the help hides and that ends this one, saying why."""

    class Refuse(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            parser.error(f"{option_string}: {why}, so leave it out")

    parser.add_argument(*names, nargs="*", action=Refuse, default=False, help=argparse.SUPPRESS)


def add_kv_cache(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add mlx-lm's options of the key-value cache (``names``, or all), hidden in the help."""
    for name, options in {
        "--max-kv-size": {"type": at_least(LEAST_KV_SIZE)},
        "--kv-bits": {"type": int, "choices": (2, 3, 4, 5, 6, 8)},
        "--kv-group-size": {"type": int, "choices": (32, 64, 128), "default": 64},
        "--quantized-kv-start": {"type": zero_or_more, "default": 5000},
    }.items():
        if name in (names or (name,)):
            parser.add_argument(name, help=argparse.SUPPRESS, **options)


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add ``--draft``, also under mlx-lm's name ``--draft-model``, and ``--num-draft-tokens``."""
    parser.add_argument("--draft-model", type=not_empty, help=argparse.SUPPRESS)
    parser.add_argument(
        "--draft",
        dest="draft_model",
        type=not_empty,
        metavar="DRAFT",
        help="lookup, or the folder of a model or of a DFlash draft",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=or_auto(zero_or_more),
        metavar="N",
        default="auto",
        help="drafted in a round; auto decides by what it gains (default: %(default)s)",
    )


def add_sampling(parser: argparse.ArgumentParser, names: tuple[str, ...] | None = None) -> None:
    """Add mlx-lm's options of sampling (None: all); its ``--top-k`` is ``--sampling-top-k``."""
    for name, kind, default, what in (
        ("--temp", between(0), 0.0, "temperature; 0: always the most likely token"),
        ("--top-p", between(0, 1), 1.0, "only the likeliest, of this probability together"),
        ("--min-p", between(0, 1), 0.0, "only tokens of this share of the likeliest one's"),
        ("--sampling-top-k", zero_or_more, 0, "only the N likeliest tokens; 0: all"),
    ):
        if names is None or name in names:
            parser.add_argument(
                name, type=kind, metavar="N", default=default, help=f"{what} (default: %(default)s)"
            )


def add_loading(parser: argparse.ArgumentParser, like: str, *others: str) -> None:
    """Add mlx-lm's options of loading, and name them with ``others`` at the end of the help."""
    for name, options in {
        "--adapter-path": {"type": not_empty},
        "--prefill-step-size": {"type": positive, "default": 2048},
        "--trust-remote-code": {"action": "store_true"},
    }.items():
        parser.add_argument(name, help=argparse.SUPPRESS, **options)
        others += (name,)
    parser.epilog = f"As {like} has them: {' '.join(sorted(others))}"


def add_xtc(parser: argparse.ArgumentParser) -> None:
    """Add mlx-lm's options of XTC sampling, hidden in the help."""
    for name, most, default in (("--xtc-probability", 1, 0.0), ("--xtc-threshold", 0.5, 0.1)):
        parser.add_argument(name, type=between(0, most), default=default, help=argparse.SUPPRESS)


def loading_given(args: argparse.Namespace) -> dict:
    """Turn the options of ``add_loading`` into arguments of ``moelab.load``."""
    trust = {"trust_remote_code": args.trust_remote_code}
    return {"adapter_path": args.adapter_path, "tokenizer_config": dict(trust), **trust}
