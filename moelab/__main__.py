"""The command line ``python -m moelab COMMAND``: each command is a module of the table below.

Only the given command's module is imported, so ``--help`` alone does not wait for MLX. The exit
status is 1 after an error, 2 after a wrong command line, 130 after Ctrl-C, and 141 if nobody reads
the output.
"""

import argparse
import importlib
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

from . import __version__, interrupts

DIVIDED = ("generate", "serve")  # commands that ``mlx.launch`` may start in several processes
COMMANDS = {  # each command's module, and what the command does
    "check": ("lab.check", "does this machine have what it takes?"),
    "generate": ("commands.generate", "continue a prompt"),
    "chat": ("commands.chat", "talk in a terminal"),
    "serve": ("commands.serve", "answer clients of OpenAI's and Anthropic's APIs over HTTP"),
    "bench": ("lab.experiments.bench", "time decoding in several modes, beside the resident model"),
    "plan": ("lab.experiments.plan", "how fast would a model decode here, or on another machine?"),
    "synthesize": ("commands.synthesize", "write a random checkpoint of a real model's shapes"),
    "repack": ("commands.repack", "copy a model, with each expert's bytes in one piece"),
}


class _Help(argparse.HelpFormatter):
    """Puts a long option and its help on one line, and breaks no option at a hyphen."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=32)

    def _fill_text(self, text, width, indent):
        return textwrap.fill(text, width, break_on_hyphens=False)


class _Once(argparse.Action):
    """Stores an option's value. A second value is an error: argparse would ignore the first."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = namespace.__dict__.setdefault("given", set())
        if self.dest in given:
            parser.error(f"{option_string or self.metavar} is given twice: leave one of them out")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line; the result also has the command's function ``run``."""
    prog = "moelab" if Path(sys.argv[0]).stem == "moelab" else "python -m moelab"
    what = "Mixture-of-Experts decoding with the experts on disk."
    how = {"allow_abbrev": False, "formatter_class": _Help}
    parser = argparse.ArgumentParser(prog=prog, description=what, **how)
    parser.add_argument("--version", action="version", version=f"moelab {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    given = next((word for word in argv if word in COMMANDS), None)
    for name, (module_name, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, **how)
        if name == given:
            command.register("action", None, _Once)
            from tqdm import tqdm  # not at the top: ``interrupts.end`` must handle Ctrl-C first

            with tqdm(desc=f"moelab {name} starts", bar_format="{desc}", leave=False, disable=None):
                module = importlib.import_module(f"{__package__}.{module_name}")
            command.description = " ".join((module.__doc__ or "").split())
            module.add_arguments(command)
            needed = [a for a in command._actions if a.required or not a.option_strings]
            needed = [" ".join([*a.option_strings[-1:], a.metavar]) for a in needed]
            command.usage = f"%(prog)s [options] {' '.join(needed)}"
            _check_options(name, command, argv[argv.index(name) + 1 :])
            flags = {a.dest: a.option_strings[-1] for a in command._actions if a.option_strings}
            command.set_defaults(run=module.run, error=command.error, flags=flags)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        advice = "leave it out, or put quotes around a value with blanks"
        args.error(f"{given} does not take {unknown[0]}: {advice}")
    if given not in DIVIDED and "MLX_RANK" in os.environ:
        args.error(
            f"{given} runs in one process, but mlx.launch started this process: only "
            f"{' and '.join(DIVIDED)} divide a model's experts. Start it without mlx.launch"
        )
    return args


def _check_options(name, command, words):
    """End the command if a given option is none of its own; name the option that may be meant."""
    from difflib import get_close_matches

    known = {option: option for action in command._actions for option in action.option_strings}
    for action in command._actions:
        if not action.option_strings:
            known.setdefault(f"--{action.dest}", f"{action.metavar}, without a flag before it")
    for word in words[: words.index("--") if "--" in words else None]:
        option, _, value = word.partition("=")
        if not option.startswith("--") or " " in option:  # a value, not an option
            continue
        if value == "--":  # argparse of Python 3.11 turns ``--`` into an empty list
            command.error(f"argument {option}: expected a value, got '--'")
        if known.get(option) != option:
            near = [o for o in known if o.startswith(option) or option.startswith(o)]
            near = near[:3] or get_close_matches(option, known, 1, 0.75)
            meant = " or ".join(known[o] for o in near)
            advice = f"did you mean {meant}?" if near else f"leave it out ({command.prog} --help)"
            command.error(f"{name} does not take {option}: {advice}")


def _as_typed(text, flags):
    """Return an error's text with the command's options in place of Python's field names."""

    def flag(found):
        name = found[1] or found[2] or found[3]
        return flags.get(name, name)

    text = re.sub(r"StreamConfig\((\w+)='(\w+)'\)", r"StreamConfig.\1 \2", text)
    names = r"StreamConfig\.(\w+)|(?<![\w/.'-])(?:(\w+)(?==)|(\w+_\w+)\b(?![/-]))"  # not in paths
    return re.sub(names, flag, text)


def main(argv: list[str] | None = None) -> int:
    """Run the command of ``argv`` (None: this process's arguments) and return its exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed this stream
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    flags = {}
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        flags = args.flags
        if getattr(args, "json", None) is not None:
            from .checkpoint import check_writable

            check_writable(args.json, f"--json {args.json!r}")
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # nobody reads stdout any more, as in "... | head -1"
        return 141  # as shells report a command that SIGPIPE ended
    except (ValueError, OSError, MemoryError, ModuleNotFoundError) as error:  # printed as one line
        said = str(error)
        if isinstance(error, OSError) and error.strerror:  # without Python's "[Errno 2]"
            said = f"{error.filename}: " * bool(error.filename) + error.strerror
        said = f"moelab: {_as_typed(said, flags)}"
        # A file's name may hold control characters.
        said = "".join(c if c.isprintable() or c == "\n" else "?" for c in said)
        print(said, file=sys.stderr)
        return 1
    except RuntimeError as error:
        from .streaming.ranks import RankError

        if isinstance(error.__context__, RankError):  # MLX fails, too, once another rank has ended
            print(f"moelab: {error.__context__}", file=sys.stderr)
            return 1
        # MLX lacks memory, or macOS ended a computation that kept the GPU busy for too long.
        if not re.match(r"\[(METAL|malloc|metal::malloc)\]", str(error)):
            raise
        long = re.search("Timeout|Interactivity", str(error))
        flag = "--prefill-step-size" if long else "--memory-nbytes"
        print(f"moelab: {error} Close other programs, or lower {flag}.", file=sys.stderr)
        return 1
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # drop the text: Python would report the error again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def start() -> None:
    """Run the command line of ``moelab`` or ``python -m moelab``, and end the process."""
    interrupts.end_at_ctrl_c()
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C must not kill Python during its exit
    sys.exit(code)


if __name__ == "__main__":
    start()
