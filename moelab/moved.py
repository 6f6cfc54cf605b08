"""Names that version 0.1.0 told people to type, and what to type now."""

import sys

MODULES = {  # after `python -m`
    "moelab.lab.sweep": "python -m moelab sweep MODEL --json FILE",
    "moelab.lab.top_k": "python -m moelab bench-top-k MODEL --json FILE",
    "moelab.lab.prefetch": "python -m moelab bench-prefetch MODEL PACKED",
    "moelab.lab.suspects": "python -m moelab bench-faults",
    "moelab.lab.pages": "python -m moelab.lab.plots.pages NOTEBOOKS OUT",
    "moelab.recipes.synthesize": "python -m moelab synthesize OUT",
}
RECIPES = "moelab.recipes."  # all others of that folder
OPTIONS = {  # of `python -m moelab bench`
    "--layer": "bench-layer MODEL",
    "--reads": "bench-reads MODEL",
    "--limit": "bench-limit MODEL --limit MB",
    "--draft": "bench-draft MODEL --draft DRAFT",
}


def module(name: str) -> str | None:
    """What ``python -m name`` is now, in a sentence; None if it has not moved."""
    now = MODULES.get(name)
    if now is None and name.startswith(RECIPES):
        now = f"python data/recipes/{name.removeprefix(RECIPES)}.py"
    return now and f"python -m {name} has moved: {now}"


def option(command: str, name: str) -> str | None:
    """What ``python -m moelab command name`` is now; None if it has not moved."""
    now = OPTIONS.get(name) if command == "bench" else None
    return now and f"bench {name} is now a command: python -m moelab {now}"


def stop_if_moved() -> None:
    """End a process that was started as ``python -m`` with an old name, and say the new one."""
    if sys.argv[:1] != ["-m"]:  # what Python has there while it looks for the module
        return
    for word, following in zip(sys.orig_argv, [*sys.orig_argv[1:], ""]):
        if word.startswith("-m"):
            if text := module(word.removeprefix("-m") or following):
                print(text, file=sys.stderr)
                sys.exit(2)
            return
