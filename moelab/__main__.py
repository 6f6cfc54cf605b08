"""python -m moelab: check, generate, bench, synthesize, repack, advise. Arguments only; each command calls one function elsewhere."""

import argparse
import sys


def _synthesize(args):
    from .recipes.synthesize import synthesize

    out = synthesize(args.out, args.like, args.layers, args.vocab, args.seed, args.tokenizer, progress=not args.quiet)
    print(f"{out}: load it with mlx_lm.load, or try: python -m moelab bench {out}")


def _stream_config(args, **fields):
    from . import StreamConfig

    names = ("slots", "top_k", "readers", "streams", "scales", "policy", "pinned_nbytes", "pinned_trace", "prefetch", "dtype")
    return StreamConfig(**{n: getattr(args, n) for n in names if getattr(args, n) is not None}, **fields)


def _add_stream_options(p):
    p.add_argument("--slots", type=int, help="experts held in memory in each layer, at least top-k (default: 16)")
    p.add_argument(
        "--top-k",
        type=int,
        help="experts per token; fewer than the checkpoint's own is lossy (default: the checkpoint's)",
    )
    p.add_argument("--readers", type=int, help="reads in flight at once (default: 8)")
    p.add_argument(
        "--streams",
        type=lambda v: v if v == "auto" else int(v),
        help="MLX streams that the experts' work is spread over (default: auto, the cores on the CPU backend, 1 on a GPU)",
    )
    p.add_argument(
        "--scales",
        choices=["streamed", "resident"],
        help="read scales with the weights, or keep all in memory (default: streamed)",
    )
    p.add_argument("--policy", choices=["lru", "lfu"], help="which expert leaves its slot (default: lru)")
    p.add_argument("--pinned-nbytes", type=int, metavar="BYTES", help="memory for the experts that --pinned-trace used most, which never leave (default: 0)")
    p.add_argument("--pinned-trace", metavar="FILE", help="a trace of this model, as Trace.save wrote it")
    p.add_argument(
        "--prefetch",
        choices=["none", "last", "lookahead"],
        help="read experts before they are asked for: the last token's, or what the next layer's router says (default: none)",
    )
    p.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], help="of activations (default: auto)")


def _generate(args):
    from .lab.bench import generate

    generate(args.model, args.prompt, _stream_config(args, mode=args.mode), args.max_tokens)


def _add_generate(commands):
    p = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Print a model's continuation as it comes, then one line of figures.",
    )
    p.add_argument("model", metavar="MODEL", help="folder or Hub repository, as for mlx_lm.load")
    p.add_argument("--prompt", required=True, help="the text to continue; - reads it from standard input")
    p.add_argument("--mode", default="fused", help="resident, serial, buffers, stacked or fused (default: %(default)s)")
    p.add_argument("--max-tokens", type=int, default=128, help="(default: %(default)s)")
    _add_stream_options(p)
    p.set_defaults(run=_generate)


def _bench(args):
    from .lab import bench, layer, reads, timing

    base = _stream_config(args)
    if args.layer:
        record = layer.bench_layer(args.model, args.modes or "stacked,fused", base, args.runs or 200)
        print(layer.report_layer(record))
    elif args.reads:
        depths = tuple(int(d) for d in args.depth.split(","))
        record = reads.bench_reads(args.model, depths, args.megabytes << 20, args.runs or 3)
        print(reads.report_reads(record))
    elif args.limit and not args.draft:
        from .lab import limit

        configs = bench.parse_modes(args.modes or "resident,fused", base)
        record = limit.bench_limited(
            args.model, configs, args.limit * 1_000_000, args.tokens, args.warmup, args.runs or 5, (args.prompt or [None])[0]
        )
        print(limit.report(record))
    elif args.draft:
        from .lab import draft

        if args.cold:
            raise ValueError("--cold does not go with --draft: reading the prompt brings the pages back before the clock starts. Leave one out.")
        (config,) = bench.parse_modes(args.modes or "fused", base).values()
        lengths = [n if n == "auto" else int(n) for n in args.lengths.split(",")]
        record = draft.bench_draft(
            args.model, config, args.draft, lengths, args.tokens, args.runs or 5, args.prompt,
            limit_nbytes=args.limit and args.limit * 1_000_000,
        )  # fmt: skip
        print(draft.report(record))
    else:
        same = bench.run_bench(
            args.model, args.modes or "resident,serial,buffers,stacked,fused", base, args.tokens, args.runs or 5, args.warmup,
            tuple(args.prompt or ()), args.json, {"auto": None, "yes": True, "no": False}[args.together], args.cold,
        )  # fmt: skip
        return 0 if same else 3
    if args.json:
        timing.save(args.json, record)


def _add_bench(commands):
    p = commands.add_parser(
        "bench",
        help="decode in several modes, interleaved, with quartiles and ceilings",
        description="Decode the same prompts in every mode, in rounds of random order after one round of warm-up. Tokens per second are of decoding "
        "alone; tokens are checked against the resident model's. Exit status 3: a mode decoded other tokens.",
    )
    p.add_argument("model", metavar="MODEL", help="folder or Hub repository, as for mlx_lm.load")
    p.add_argument(
        "--modes",
        help="divided by commas; fields of StreamConfig may follow a slash: resident,fused,fused/streams=1/slots=32 "
        "(default: resident,serial,buffers,stacked,fused; with --layer: stacked,fused)",
    )
    p.add_argument("--tokens", type=int, default=64, help="decoded and timed in each run (default: %(default)s)")
    p.add_argument(
        "--warmup",
        type=int,
        default=16,
        help="tokens decoded in each run before the clock starts (default: %(default)s)",
    )
    p.add_argument("--runs", type=int, help="rounds that are kept (default: 5; --layer 200, --reads 3)")
    p.add_argument("--prompt", action="append", help="in place of the eight built-in ones; may be given again")
    p.add_argument(
        "--together",
        choices=["auto", "yes", "no"],
        default="auto",
        help="keep all models loaded (auto: if they take less than half of the memory)",
    )
    p.add_argument(
        "--cold",
        action="store_true",
        help="drop the checkpoint's pages from the page cache each time before the clock starts",
    )
    p.add_argument("--json", metavar="FILE", help="keep raw samples, machine and settings there")
    p.add_argument(
        "--layer",
        action="store_true",
        help="time one MoE layer with every expert in its slot, against the same layer resident",
    )
    p.add_argument(
        "--reads",
        action="store_true",
        help="read whole experts cold, against fio with the same sizes and depth (if it is installed)",
    )
    p.add_argument(
        "--limit",
        type=int,
        metavar="MB",
        help="every run in a process of its own with so much memory, page cache included, against the resident model with all of it; with --draft: all runs in one process",
    )
    p.add_argument(
        "--depth", default="1,4,8", help="with --reads: reads in flight, divided by commas (default: %(default)s)"
    )
    p.add_argument(
        "--megabytes", type=int, default=256, help="with --reads: MB read in each run (default: %(default)s)"
    )
    p.add_argument(
        "--draft",
        metavar="DRAFT",
        help="decode with drafts of several lengths, against none: lookup, self, oracle, or the folder of a model or of a DFlash draft",
    )
    p.add_argument(
        "--lengths",
        default="0,2,4,8,auto",
        help="with --draft: tokens drafted in a round, divided by commas; auto: the policy (default: %(default)s)",
    )
    _add_stream_options(p)
    p.set_defaults(run=_bench)


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


def _repack(args):
    from .repack import repack

    out = repack(args.model, args.out, progress=not args.quiet)
    print(f"{out}: the same model, each expert in one piece; use it with moelab.load or python -m moelab")


def _add_repack(commands):
    p = commands.add_parser(
        "repack",
        help="put each expert's bytes together on disk",
        description="Write a model folder in which one read brings one expert: the same bytes, compared after writing. It is for moelab; "
        "mlx_lm.load wants the folder that it was made from. An interrupted run goes on where it stopped.",
    )
    p.add_argument("model", metavar="MODEL", help="a model folder, as for mlx_lm.load")
    p.add_argument("out", metavar="OUT", help="folder to make (must not exist)")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.set_defaults(run=_repack)


def _advise(args):
    from .lab import advise

    memory = None if args.memory is None else args.memory * 1_000_000
    print(advise(args.model, memory))


def _add_advise(commands):
    p = commands.add_parser(
        "advise",
        help="slots, policy, prefetch and layout for this machine and model, and why",
        description="Measure this machine for some ten seconds (longer for a large model), replay a trace with what was found, and say how to stream the model.",
    )
    p.add_argument("model", metavar="MODEL", help="folder or Hub repository, as for mlx_lm.load")
    p.add_argument("--memory", type=int, metavar="MB", help="for the process and its page cache (default: what is available now)")
    p.set_defaults(run=_advise)


def _check(args):
    from .lab.machine import check

    return 0 if check(args.model) else 1


def _add_check(commands):
    p = commands.add_parser(
        "check",
        help="does this machine have what it takes?",
        description="One line for each thing that is needed, [ok] or [fail] with the remedy. Exit status 1: something failed.",
    )
    p.add_argument("model", metavar="MODEL", nargs="?", help="a model folder: predict its memory, read its own files")
    p.set_defaults(run=_check)


def parser():
    p = argparse.ArgumentParser(
        prog="python -m moelab", description="Mixture-of-Experts decoding with the experts on disk."
    )
    commands = p.add_subparsers(required=True, metavar="COMMAND")
    _add_check(commands)
    _add_generate(commands)
    _add_bench(commands)
    _add_synthesize(commands)
    _add_repack(commands)
    _add_advise(commands)
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
