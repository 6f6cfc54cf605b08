"""python -m moelab: check, generate, bench, synthesize, repack, advise.

Arguments only; each command calls one function elsewhere. An option that would have no effect
is an error. Exit status: 1 for an error, 2 for a wrong command line, 130 for Ctrl-C.
"""

import argparse
import os
import sys
from types import SimpleNamespace

from .lab import records
from .streaming.config import CHOICES

STREAM_OPTIONS = (
    "slots", "top_k", "readers", "streams", "scales", "policy", "pinned_nbytes", "pinned_trace",
    "prefetch", "dtype",
)  # fmt: skip
BENCHES = {  # each kind of bench: the options that it takes, with their defaults
    "": dict(
        modes="resident,serial,buffers,stacked,fused", tokens=64, warmup=16, runs=5, prompt=None,
        together="auto", cold=False, json=None,
    ),
    "--layer": dict(modes="stacked,fused", runs=200, json=None),
    "--reads": dict(depth=(1, 4, 8), megabytes=256, runs=3, json=None),
    "--limit": dict(
        modes="resident,fused", tokens=64, warmup=16, runs=5, prompt=None, limit=None, json=None
    ),
    "--draft": dict(
        modes="fused", tokens=64, runs=5, prompt=None, draft=None, lengths=(0, 2, 4, 8, "auto"),
        limit=None, json=None,
    ),
}  # fmt: skip


# Types of arguments


def at_least(least):
    """Whole numbers from ``least`` on."""

    def number(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, got {text!r}"
            )
        return value

    return number


def or_auto(number):
    """``auto``, or what ``number`` takes."""

    def either(text):
        try:
            return text if text == "auto" else number(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or auto") from None

    return either


def several(item):
    """Different items divided by commas."""

    def items(text):
        values = [item(part.strip()) for part in text.split(",")]
        for value in values:
            if values.count(value) > 1:
                raise argparse.ArgumentTypeError(f"expected each item once, got {value} again")
        return tuple(values)

    return items


def prompt_text(text):
    """A text that is not empty; ``-`` reads it from standard input."""
    where = ""
    try:
        if text == "-":
            where = " on standard input"
            text = sys.stdin.buffer.read().decode() if sys.stdin else ""
        text.encode()
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(
            f"expected UTF-8 text{where}, got {error.reason} at position {error.start}: "
            "convert it first, for example with iconv"
        ) from None
    if not text:
        raise argparse.ArgumentTypeError(f"expected some text{where}, got none")
    return text


def not_empty(text):
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got nothing")
    return text


positive, zero_or_more = at_least(1), at_least(0)


# Commands


def _flag(name):
    return "--" + name.replace("_", "-")


def _stream_config(args, **fields):
    from . import StreamConfig

    given = {n: getattr(args, n) for n in STREAM_OPTIONS if getattr(args, n) is not None}
    return StreamConfig(**given, **fields)


def _check_stream_options(args, configs):
    """Every one that was given means something to at least one of the configs."""
    for name in STREAM_OPTIONS:
        given, users = getattr(args, name), [c for c in configs.values() if name not in c.unused()]
        if given is None or any(getattr(c, name) == given for c in users):
            continue
        why = f"has no effect in mode {', '.join(configs)}"
        if name == "pinned_trace" and any("slots" not in c.unused() for c in configs.values()):
            why = "has no effect without --pinned-nbytes"
        args.error(f"{_flag(name)} {why}: leave it out, or change that")


def _add_model(p):
    p.add_argument(
        "model", type=not_empty, metavar="MODEL",
        help="folder or Hub repository, as for mlx_lm.load",
    )  # fmt: skip


def _add_stream_options(p):
    p.add_argument(
        "--slots",
        type=positive,
        help="experts held in memory in each layer, at least top-k (default: 16)",
    )
    p.add_argument(
        "--top-k",
        type=positive,
        help="experts per token; fewer than the checkpoint's own is lossy "
        "(default: the checkpoint's)",
    )
    p.add_argument("--readers", type=positive, help="reads in flight at once (default: 8)")
    p.add_argument(
        "--streams",
        type=or_auto(positive),
        help="MLX streams that the experts' work is spread over (default: auto, the cores on the "
        "CPU backend, 1 on a GPU)",
    )
    p.add_argument(
        "--scales",
        choices=CHOICES["scales"],
        help="read scales with the weights, or keep all in memory (default: streamed)",
    )
    p.add_argument(
        "--policy", choices=CHOICES["policy"], help="which expert is evicted first (default: lru)"
    )
    p.add_argument(
        "--pinned-nbytes",
        type=zero_or_more,
        metavar="BYTES",
        help="memory for the experts that --pinned-trace used most, which are never evicted "
        "(default: 0)",
    )
    p.add_argument(
        "--pinned-trace",
        type=not_empty,
        metavar="FILE",
        help="a trace of this model, as Trace.save wrote it",
    )
    p.add_argument(
        "--prefetch",
        choices=[c for c in CHOICES["prefetch"] if c != "oracle"],
        help="read experts before they are asked for: the last token's, or what the next layer's "
        "router says (default: none)",
    )
    p.add_argument(
        "--dtype", choices=CHOICES["dtype"], help="of activations (default: auto)"
    )  # fmt: skip


def _generate(args):
    from .lab.experiments.bench import generate

    config = _stream_config(args, mode=args.mode)
    _check_stream_options(args, {args.mode: config})
    generate(args.model, args.prompt, config, args.max_tokens)


def _add_generate(add):
    p = add(
        "generate",
        _generate,
        help="continue a prompt",
        description="Print a model's continuation as it comes, then one line of figures.",
    )
    _add_model(p)
    p.add_argument(
        "--prompt",
        type=prompt_text,
        required=True,
        help="the text to continue; - reads it from standard input",
    )
    p.add_argument(
        "--mode", choices=CHOICES["mode"], default="fused", help="(default: %(default)s)"
    )
    p.add_argument("--max-tokens", type=positive, default=128, help="(default: %(default)s)")
    _add_stream_options(p)


def _bench_options(args):
    """The kind of bench, and its options with their defaults filled in."""
    kinds = [k for k in BENCHES if k and getattr(args, k[2:]) is not None]
    if len(kinds) > 1 and set(kinds) != {"--draft", "--limit"}:
        args.error(f"{kinds[0]} does not go with {kinds[1]}: leave one of them out")
    kind = "--draft" if "--draft" in kinds else kinds[0] if kinds else ""
    takes = BENCHES[kind]
    for name in sorted({name for options in BENCHES.values() for name in options}):
        if getattr(args, name) is not None and name not in takes:
            args.error(_does_not_go(name, kind, [k for k in BENCHES if name in BENCHES[k]]))
    for name in STREAM_OPTIONS:
        if kind == "--reads" and getattr(args, name) is not None:
            args.error(_does_not_go(name, kind, [k for k in BENCHES if k != kind]))
    given = {n: getattr(args, n) for n in takes}
    filled = {n: takes[n] if value is None else value for n, value in given.items()}
    return kind, SimpleNamespace(**filled)


def _does_not_go(name, kind, homes):
    if not kind:
        return f"{_flag(name)} goes only with {' or '.join(homes)}: add that, or leave it out"
    return f"{_flag(name)} does not go with {kind}: leave one of them out"


def _bench(args):
    kind, o = _bench_options(args)
    from .lab import limit
    from .lab.experiments import bench, layer, reads
    from .lab.experiments import drafts as draft

    if o.json is not None:
        records.check_writable(o.json)
    if kind == "--reads":
        record = reads.bench_reads(args.model, o.depth, o.megabytes << 20, o.runs)
        return _print_and_save(reads.report_reads(record), o.json, record)
    base = _stream_config(args)
    configs = bench.parse_modes(o.modes, base)
    _check_stream_options(args, configs)
    if kind == "--layer":
        record = layer.bench_layer(args.model, configs, base, o.runs)
        return _print_and_save(layer.report_layer(record), o.json, record)
    if kind == "--limit":
        nbytes = o.limit * 1_000_000
        record = limit.bench_limited(
            args.model, configs, nbytes, o.tokens, o.warmup, o.runs, o.prompt, base
        )
        return _print_and_save(limit.report(record), o.json, record)
    if kind == "--draft":
        if len(configs) > 1:
            args.error(f"--modes: expected one mode with --draft, got {', '.join(configs)}")
        (config,) = configs.values()
        nbytes = None if o.limit is None else o.limit * 1_000_000
        record = draft.bench_draft(
            args.model, config, o.draft, o.lengths, o.tokens, o.runs, o.prompt, limit_nbytes=nbytes
        )
        return _print_and_save(draft.report(record), o.json, record)
    together = {"auto": None, "yes": True, "no": False}[o.together]
    same = bench.run_bench(
        args.model, configs, base, o.tokens, o.runs, o.warmup, tuple(o.prompt or ()), o.json,
        together, o.cold,
    )  # fmt: skip
    return 0 if same else 3


def _print_and_save(report, path, record):

    print(report)
    if path is not None:
        records.save(path, record)


def _add_bench(add):
    p = add(
        "bench",
        _bench,
        help="decode in several modes, interleaved, with quartiles and ceilings",
        description="Decode the same prompts in every mode, in rounds of random order after one "
        "round of warm-up. Tokens per second are of decoding alone; tokens are checked against "
        "the resident model's. Exit status 3: a mode decoded other tokens. --layer, --reads, "
        "--limit and --draft measure something else in its place; an option that they do not "
        "take is an error.",
    )
    _add_model(p)
    p.add_argument(
        "--layer",
        action="store_true",
        default=None,
        help="time one MoE layer with every expert in its slot, against the same layer resident; "
        "takes --modes and --runs",
    )
    p.add_argument(
        "--reads",
        action="store_true",
        default=None,
        help="read whole experts cold, against fio with the same sizes and depth (if it is "
        "installed); takes --depth, --megabytes and --runs",
    )
    p.add_argument(
        "--limit",
        type=positive,
        metavar="MB",
        help="every run in a process of its own with so much memory, page cache included, "
        "against the resident model with all of it; with --draft: all runs in one process",
    )
    p.add_argument(
        "--draft",
        type=not_empty,
        metavar="DRAFT",
        help="decode with drafts of several lengths, against none: lookup, self, oracle, or the "
        "folder of a model or of a DFlash draft",
    )
    p.add_argument(
        "--modes",
        help="divided by commas; fields of StreamConfig may follow a slash: "
        "resident,fused,fused/streams=1/slots=32 (default: resident,serial,buffers,stacked,fused; "
        "with --layer: stacked,fused; with --limit: resident,fused; with --draft one: fused)",
    )
    p.add_argument(
        "--tokens", type=positive, help="decoded and timed in each run (default: 64)"
    )  # fmt: skip
    p.add_argument(
        "--warmup",
        type=zero_or_more,
        help="tokens decoded in each run before the clock starts (default: 16)",
    )
    p.add_argument(
        "--runs",
        type=positive,
        help="rounds that are kept (default: 5; with --layer 200, with --reads 3)",
    )
    p.add_argument(
        "--prompt",
        type=prompt_text,
        action="append",
        help="in place of the built-in ones; may be given again; - reads standard input",
    )
    p.add_argument(
        "--together",
        choices=["auto", "yes", "no"],
        help="keep all models loaded (default: auto, if they take less than half of the memory)",
    )
    p.add_argument(
        "--cold",
        action="store_true",
        default=None,
        help="drop the checkpoint's pages from the page cache each time before the clock starts",
    )
    p.add_argument(
        "--json",
        type=not_empty,
        metavar="FILE",
        help="keep raw samples, machine and settings there",
    )
    p.add_argument(
        "--depth",
        type=several(positive),
        help="with --reads: reads in flight, divided by commas (default: 1,4,8)",
    )
    p.add_argument(
        "--megabytes", type=positive, help="with --reads: MB read in each run (default: 256)"
    )
    p.add_argument(
        "--lengths",
        type=several(or_auto(zero_or_more)),
        help="with --draft: tokens drafted in a round, divided by commas; auto: the policy "
        "(default: 0,2,4,8,auto)",
    )
    _add_stream_options(p)


def _synthesize(args):
    from .synthesize import synthesize

    out = synthesize(
        args.out, args.like, args.layers, args.vocab, args.seed, args.tokenizer,
        progress=not args.quiet,
    )  # fmt: skip
    print(f"{out}: load it with mlx_lm.load, or try: python -m moelab bench {out}")


def _add_synthesize(add):
    from .synthesize import CONFIGS

    p = add(
        "synthesize",
        _synthesize,
        help="a random checkpoint with a real model's layer shapes",
        description="Write a random 4-bit checkpoint that has the exact layer shapes of a real "
        "Mixture-of-Experts model, without holding it in memory. Its text is noise; reading and "
        "computing its layers costs what the real model's cost.",
    )
    p.add_argument("out", type=not_empty, metavar="OUT", help="folder to make (must not exist)")
    p.add_argument(
        "--like",
        default="qwen3.5-35b-a3b",
        choices=list(CONFIGS),
        help="the model whose shapes to take (default: %(default)s)",
    )
    p.add_argument(
        "--layers",
        type=positive,
        help="number of layers (default: all that the real model has: 18 to 220 GB)",
    )
    p.add_argument(
        "--vocab",
        type=positive,
        help="rows of embedding and head (default: the tokenizer's vocabulary, which is smaller "
        "than the real one: the layers are what counts)",
    )
    p.add_argument(
        "--tokenizer",
        type=not_empty,
        help="folder to copy tokenizer.json from (default: data/models/tiny-moe)",
    )
    p.add_argument(
        "--seed", type=zero_or_more, default=0, help="seed of every byte (default: %(default)s)"
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")


def _repack(args):
    from .repack import repack

    out = repack(args.model, args.out, progress=not args.quiet)
    print(
        f"{out}: the same model, each expert in one piece; "
        "use it with moelab.load or python -m moelab"
    )


def _add_repack(add):
    p = add(
        "repack",
        _repack,
        help="put each expert's bytes together on disk",
        description="Write a model folder in which one read brings one expert: the same bytes, "
        "compared after writing. It is for moelab; mlx_lm.load wants the folder that it was made "
        "from. An interrupted run goes on where it stopped.",
    )
    p.add_argument(
        "model", type=not_empty, metavar="MODEL", help="a model folder, as for mlx_lm.load"
    )
    p.add_argument("out", type=not_empty, metavar="OUT", help="folder to make (must not exist)")
    p.add_argument("--quiet", action="store_true", help="no progress bar")


def _advise(args):
    from .lab import advise

    print(advise(args.model, None if args.memory is None else args.memory * 1_000_000))


def _add_advise(add):
    p = add(
        "advise",
        _advise,
        help="slots, policy, prefetch and layout for this machine and model, and why",
        description="Measure this machine for some ten seconds (longer for a large model), replay "
        "a trace with what was found, and say how to stream the model.",
    )
    _add_model(p)
    p.add_argument(
        "--memory",
        type=positive,
        metavar="MB",
        help="for the process and its page cache (default: what is available now)",
    )


def _check(args):
    from .lab.machine import check

    return 0 if check(args.model) else 1


def _add_check(add):
    p = add(
        "check",
        _check,
        help="does this machine have what it takes?",
        description="One line for each thing that is needed, [ok] or [fail] with the remedy. "
        "Exit status 1: something failed.",
    )
    p.add_argument(
        "model",
        type=not_empty,
        metavar="MODEL",
        nargs="?",
        help="a model folder: predict its memory, read its own files",
    )


class _Once(argparse.Action):
    """Stores a value; a second one is an error, since the first would be ignored."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = namespace.__dict__.setdefault("given", set())
        if self.dest in given:
            parser.error(f"{option_string} is there twice: leave one of them out")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def parser():
    p = argparse.ArgumentParser(
        prog="python -m moelab",
        description="Mixture-of-Experts decoding with the experts on disk.",
        allow_abbrev=False,
    )
    commands = p.add_subparsers(required=True, metavar="COMMAND")

    def add(name, run, **texts):
        command = commands.add_parser(name, allow_abbrev=False, **texts)
        command.register("action", None, _Once)
        command.set_defaults(run=run, error=command.error)
        return command

    for add_command in (
        _add_check, _add_generate, _add_bench, _add_synthesize, _add_repack, _add_advise
    ):  # fmt: skip
        add_command(add)
    return p


def main(argv=None):
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))
    try:
        args = parser().parse_args(argv)
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _interrupted()
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11, in an import
            return _interrupted()
        raise
    except BrokenPipeError:  # of stdout, as in "... | head -1": nobody reads on
        return 141  # what a shell says of a command that SIGPIPE ended
    except (ValueError, OSError) as error:  # what, where, expected and got, what to do
        plain = isinstance(error, OSError) and error.strerror and not error.filename
        print(f"moelab: {error.strerror if plain else error}", file=sys.stderr)
        return 1
    finally:
        _flush_or_drop(sys.stdout)


def _interrupted():
    print("interrupted", file=sys.stderr)
    return 130


def _flush_or_drop(out):
    """What cannot be written is dropped here; at its end Python would report it once more."""
    try:
        out.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


if __name__ == "__main__":
    sys.exit(main())
