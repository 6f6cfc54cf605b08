"""Time passes over several positions, resident and streamed, as notebook 07 does with tiny-moe.

python data/recipes/passes.py OUT.json MODEL SLOTS...
"""

import sys
import time
from contextlib import ExitStack
from functools import partial

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from moelab import StreamConfig, load, stats
from moelab.lab import records
from moelab.lab.models import folder
from moelab.lab.texts import heldout_ids
from moelab.speculation.rollback import Rollback

POSITIONS = (1, 2, 4, 8, 16, 17)  # 17: one token and 16 drafts
ROUNDS = 20


def reader(name, model, ids, at):
    """Return a function that times a pass over the next tokens, then undoes all but one."""
    kv = make_prompt_cache(model)
    mx.eval(model(mx.array([ids[:at]]), cache=kv), [c.state for c in kv])
    rollback = Rollback(model, kv)

    def verify(positions, _):
        nonlocal at
        stats(model, reset=True)
        begin = time.perf_counter()
        mx.eval(mx.argmax(rollback(mx.array([ids[at : at + positions]])), axis=-1))
        pass_s = time.perf_counter() - begin
        rollback.undo(positions - 1)
        rollback.commit()
        at += 1
        both = stats(model)  # a pass over many positions counts as prefill
        row = {
            field: getattr(both.decode, field) + getattr(both.prefill, field)
            for field in ("hits", "misses", "bytes_read", "wait_s")
        }
        row |= {"model": name, "positions": positions, "pass_s": pass_s}
        return row | {"experts": row["hits"] + row["misses"]}

    return verify


def main(out, path, *slots):
    """Time passes of each model at successive places of a text; the first round is not kept."""
    path = folder(path)
    ids = heldout_ids(path, [512], 1)[0]
    at = len(ids) - (ROUNDS + 1) * len(POSITIONS) - max(POSITIONS)
    if at < 1:
        raise ValueError(f"passes: expected a text of {len(ids) + 1 - at} tokens, got {len(ids)}")
    configs = {"resident": StreamConfig(mode="resident")}
    configs |= {f"{n} slots": StreamConfig(slots=int(n)) for n in slots}
    with ExitStack() as stack:
        models = {n: stack.enter_context(load(path, config)[0]) for n, config in configs.items()}
        read = {name: reader(name, model, ids, at) for name, model in models.items()}
        ways = {f"{n}, {m} positions": partial(read[n], m) for n in read for m in POSITIONS}
        settings = {"context_tokens": at, "model": path.name, "cache_state": "warm"}
        samples = records.interleave("passes", ways, ROUNDS, settings)
    found = records.group(samples, "pass_s", ["model", "positions"])
    records.print_and_save((found * 1e3).round(2).to_string(), samples, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
