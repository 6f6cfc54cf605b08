"""Whether another checkout of moelab is as fast as this one: both run in turn, in new processes.

    python data/recipes/trees.py OTHER MODEL [--rounds 9] [--limit MB] [--option slots=16 ...]
                                 [--tokens 100] [--prompts 126,400]

OTHER is a checkout, as ``git worktree add --detach ../other COMMIT`` makes one. Each round runs
both in random order. Under a limit (memory of the process and its page cache) the model's pages
are dropped from the cache before each run. It prints medians of both and the quartiles of OTHER's
seconds over this tree's: above 1, this tree is faster.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENS = ROOT / "data" / "traces" / "code.npz"


def measure(model_path, options, tokens, warm, prompts):
    """Seconds of this process's tree: import, load, the first call, prompts, and each token."""
    begin = time.perf_counter()
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache

    import moelab

    imported = time.perf_counter()
    model, _ = moelab.load(model_path, moelab.StreamConfig(**options))
    seconds = {"import": imported - begin, "load": time.perf_counter() - imported}
    text = mx.array(np.load(TOKENS)["tokens"][: max([tokens + 9, *prompts])].astype(np.int64))[None]

    def took(ids, cache):
        begin = time.perf_counter()
        mx.eval(model(ids, cache=cache)[:, -1])
        return time.perf_counter() - begin

    cache = make_prompt_cache(model)
    seconds["first call"] = took(text[:, :8], cache)
    each = [took(text[:, i : i + 1], cache) for i in range(8, 8 + tokens)]
    seconds["token"] = statistics.mean(each[warm:])
    for n in prompts:
        seconds[f"prompt of {n}"] = min(took(text[:, :n], make_prompt_cache(model)) for _ in "12")
    moelab.close(model)
    return seconds


def run(tree, arguments, nbytes):
    """The seconds of one run in a new process, which imports moelab from ``tree``."""
    from moelab.lab import limit, oscache  # not in the child: OTHER may lack them

    if nbytes:
        oscache.drop_pages(arguments[0])
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = limit.run(["env", f"PYTHONPATH={tree}", *command], nbytes)
    if done.returncode:
        sys.exit(f"{tree}: ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    from moelab.lab.records import interleave, paired, q, values

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=int, help="MB")
    parser.add_argument("--option", action="append", default=[], help="of StreamConfig: name=value")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--prompts", default="126,400")
    args = parser.parse_args()
    options = {}
    for name, _, value in (option.partition("=") for option in args.option):
        options[name] = int(value) if value.isdigit() else value
    prompts = [int(n) for n in args.prompts.split(",") if n]
    arguments = [str(args.model.resolve()), options, args.tokens, args.tokens // 5, prompts]
    nbytes = args.limit and args.limit * 1_000_000
    trees = {"other": args.other.resolve(), "this": ROOT}
    ways = {name: lambda _, tree=tree: run(tree, arguments, nbytes) for name, tree in trees.items()}
    made = interleave("trees", ways, args.rounds, progress=True)
    print(made.attrs["machine"], f"n={args.rounds}", sep="\n")
    for what in made.select_dtypes("number").columns.drop("round"):
        said = [f"{name} {q(values(made, name, what), '.4g')}" for name in trees]
        said.append(f"other/this {q(paired(made, 'other', 'this', what), '.3f')}")
        print(f"{what:30s}", *(f"{cell:36s}" for cell in said))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
    else:
        main()
