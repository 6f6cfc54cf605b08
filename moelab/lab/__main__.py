"""python -m moelab.lab NAME: scripts that make a record or pages.

A script is a function of the lab. It takes the words that follow NAME, and returns the exit status
or None (success). Only the named script's module is imported. Exit status: 1 for an error, 2 for a
wrong command line.
"""

import argparse
import inspect
import pkgutil
import sys

SCRIPTS = {  # a script's name: its function, its help
    "call": ("limit:main", "call a function in this process, as ranks and memory limits need it"),
    "costs": ("experiments.costs:main", "measure what reads, tokens and arithmetic cost"),
    "index": ("plots.pages:write_index", "write the index of a folder of pages again"),
    "pages": ("plots.pages:main", "run the notebooks and write an HTML page for each"),
    "ranks": ("experiments.ranks:main", "measure decoding with the experts divided over ranks"),
    "timeline": ("experiments.timeline:main", "record what runs when in a token"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one script and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m moelab.lab", description="Scripts that make a record or pages."
    )
    scripts = parser.add_subparsers(required=True, metavar="NAME")
    form = argparse.RawDescriptionHelpFormatter
    try:
        for name, (where, help_text) in SCRIPTS.items():
            words = scripts.add_parser(name, help=help_text, formatter_class=form)
            if name in argv[:1]:
                run = pkgutil.resolve_name(f"{__package__}.{where}")
                words.description = inspect.getmodule(run).__doc__
                for word in inspect.signature(run).parameters.values():
                    nargs = "*" if word.kind is word.VAR_POSITIONAL else None
                    words.add_argument(word.name, metavar=word.name.upper(), nargs=nargs)
        parser.parse_args(argv)  # checks the words
        return run(*argv[1:]) or 0
    except (ModuleNotFoundError, OSError, ValueError) as error:
        print(f"moelab.lab: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
