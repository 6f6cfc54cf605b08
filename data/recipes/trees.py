"""Compare the speed of several checkouts of moelab, models or options, which run in turn.

    python data/recipes/trees.py [--rounds 9] [--limit MB] [--first 8] [--warm 20] [--tokens 80]
        [--prompts [126,400]] [--out FILE] NAME=TREE,MODEL[,OPTION=VALUE ...] ...

NAME names one of the compared ways. TREE is a checkout, as ``git worktree add --detach ../other
COMMIT`` makes one; options are those of ``StreamConfig``, ``policy=lru``
(``residency.table.EVICTION``), or ``limit=MB`` (0: none) in place of ``--limit``. A round runs all
ways in random order, each in a new process. Under a limit (memory of the process and its page
cache) the model's pages are dropped from the cache before each run. The command prints medians and
quartiles of each way's figures, and of the ratios of these figures to the first way's.

A run reads a prompt, then a recorded text token by token. All ways do the same work, and must
choose the same tokens. The first ``--warm`` tokens are not timed. The warm-up round records a trace
for ``prefetch=oracle``. ``right=87,found=59`` spoils a router that is always right: of 100 needed
experts without a slot 59 are named, and of 100 named experts 87 are needed.
"""

import json
import random
import sys
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from contextlib import nullcontext
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def measure(model_path, options, file, first, warm, tokens, prompts, record, **_):
    """Time a run of this process's checkout; figures are seconds if they name no other unit."""
    begin = time.perf_counter()
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache

    import moelab

    imported = time.perf_counter()
    if right := options.pop("right", 0) / 100:
        spoil(right, options.pop("found") / 100)
    if policy := options.pop("policy", None):
        moelab.StreamConfig.policy = policy
    model, _ = moelab.load(model_path, moelab.StreamConfig(**options))
    row = {"import": imported - begin, "load": time.perf_counter() - imported}
    if options.get("prefetch") == "oracle":
        model._session.prefetcher.set_trace(moelab.Trace.load(file))
    text = np.load(ROOT / "data" / "traces" / "code.npz")["tokens"].astype(np.int64)
    text, chosen, cache = mx.array(text)[None], [], make_prompt_cache(model)

    def took(begin, end, cache):
        at = time.perf_counter()
        chosen.append(mx.argmax(model(text[:, begin:end], cache=cache)[:, -1]).item())
        return time.perf_counter() - at

    row["first call"] = took(0, first, cache)
    with moelab.record(model) if record else nullcontext() as trace:
        for i in range(warm + tokens):
            if i == warm:
                moelab.stats(model, reset=True)
                begin, cpu = time.perf_counter(), time.process_time()
            took(first + i, first + i + 1, cache)
    took_s, cpu = time.perf_counter() - begin, 1000 * (time.process_time() - cpu)
    did = moelab.stats(model).decode
    if record:
        trace.save(file)
    row |= {"decode_s": took_s, "decode_tokens": tokens, "CPU ms": cpu / tokens}
    row |= {"MB": did.bytes_read / tokens / 1e6, "wait_s": did.wait_s}
    if used := did.prefetch_used:
        row |= {"right": used / did.prefetch_issued, "found": used / (used + did.misses)}
    elif did.read_s:  # with guesses there is no GB/s: some of their reads are not timed
        row["GB/s"] = did.bytes_read / did.read_s / 1e9
    for n in prompts:
        row[f"prompt of {n}"] = min(took(0, n, make_prompt_cache(model)) for _ in "12")
    moelab.close(model)
    return row | {"tokens": chosen}


def spoil(right, found):
    """Spoil the experts named by a router that is always right (see the top of this file)."""
    from moelab.streaming.prefetch import Router

    choose, rng = Router.choose, random.Random(0)

    def spoilt(self, layer, likely, p):
        experts, changed, p = self._layers[layer], likely.copy(), p.copy()
        held = {*experts.slots.table.slot_of}
        taken, num_experts = held.union(likely.ravel().tolist()), experts.num_experts
        top_k = experts.session.top_k if len(taken) < num_experts else 0
        for at in product(range(len(p)), range(top_k)):
            if likely[at] not in held and (drawn := rng.random()) >= found:
                while (other := rng.randrange(num_experts)) in taken:  # quick: few are taken
                    pass
                changed[at] = other
                p[at] = p[at] if drawn < found / right else -1  # -1: the expert is not named
        return choose(self, layer, changed, p)[0], likely.ravel().tolist()

    Router.choose = spoilt


def way(words, args):
    """Return a way's name, and a function that runs it in a new process and returns the row."""
    from moelab.lab import limit, machine  # a compared checkout may lack these modules

    name, tree, model, *words = words.replace("=", ",", 1).split(",")
    words, trace = (word.split("=", 1) for word in words), str(ROOT / "build" / f"trees-{name}.npz")
    options = {key: int(value) if value.isdigit() else value for key, value in words}
    max_mb = options.pop("limit", args.limit)

    def run(i):
        record = i < 0 and options.get("prefetch") == "oracle"
        given = vars(args) | {"model_path": model, "record": record, "file": trace}
        given |= {"options": options | ({"prefetch": "none"} if record else {})}
        if max_mb:
            machine.drop_pages(model)
        words = ["env", f"PYTHONPATH={Path(tree).resolve()}", sys.executable, __file__, "--child"]
        done = limit.run([*words, json.dumps(given)], max_mb * 1_000_000 or None)
        if done.returncode:
            sys.exit(f"{name}: ended with {done.returncode}: {done.stderr[-500:]}")
        return json.loads(done.stdout.splitlines()[-1])

    return name, run


def main():
    from moelab.lab.records import interleave, paired, print_and_save, q, same_tokens, values

    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("ways", nargs="+", metavar="NAME=TREE,MODEL[,OPTION=VALUE ...]")
    for name, default in dict(rounds=9, limit=0, first=8, warm=20, tokens=80).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompts", type=json.loads, default=[126, 400])
    parser.add_argument("--out")
    args = parser.parse_args()
    ways = dict(way(words, args) for words in args.ways)
    settings = {key: value for key, value in vars(args).items() if key not in ("ways", "out")}
    made, (first, *_) = interleave("trees", ways, args.rounds, settings, progress=True), ways
    lines = [f"{made.attrs['machine']}, n={args.rounds}, limit {args.limit} MB"]
    for what, name in product(made.select_dtypes("number").columns.drop("round"), ways):
        if len(found := values(made, name, what).dropna()):
            ratio = paired(made, name, first, what)  # empty if the first way has no such figure
            ratio = q(ratio, ".3f") if len(ratio) else ""
            lines.append(f"{what:15s} {name:15s} {q(found, '.4g'):30s} {ratio}")
    lines.append(f"rounds with the tokens of {first}, of all: {(same := same_tokens(made, first))}")
    print_and_save("\n".join(lines), made, args.out)
    if any(n != rounds for n, rounds in same.values()):
        sys.exit("tokens differ")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
    else:
        main()
