"""Notebook 06: what goes wrong without rollback, and what three exact strategies cost.

python -m moelab bench-rollback --json FILE
"""

import argparse
import functools
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ... import StreamConfig, load, stats
from ...commands.arguments import add_number
from ...shipped import shipped
from ...speculation.rollback import Rollback
from ...speculation.sampling import num_accepted
from .. import machine, records
from ..arguments import add_json
from ..decode import same_tokens
from ..texts import heldout_starts

if TYPE_CHECKING:
    from pandas import DataFrame

STRATEGIES = ("restore", "replay", "states")  # those of ``Rollback``, all exact
ALONE = "the pass alone"
WRONG = 100  # a wrong draft is (the right token + 1) % WRONG, in any vocabulary


class RestoreOnly:
    """A faulty rollback: the recurrent state from before the pass, without the accepted tokens.

    It is SwiftLM's ``MambaCache.trim``. Attention caches are trimmed as they should be.
    """

    def __init__(self, model: nn.Module, cache: list):
        self.model, self.cache = model, cache

    def __call__(self, tokens: mx.array) -> mx.array:
        self._before = [list(c.cache) if isinstance(c, ArraysCache) else None for c in self.cache]
        return self.model(tokens, cache=self.cache)

    def undo(self, n: int) -> None:
        for c, before in zip(self.cache, self._before):
            if before is None:
                c.trim(n)
            elif n:
                c.cache = before

    def commit(self) -> None:
        pass


class StaleState(RestoreOnly):
    """A faulty rollback: rejected tokens stay in the recurrent state, as in SwiftLM's DFlash path.

    Only caches that can be trimmed are trimmed.
    """

    def undo(self, n: int) -> None:
        for c in self.cache:
            if not isinstance(c, ArraysCache):
                c.trim(n)


REMEDIES = {"stale state": StaleState, "restore only": RestoreOnly, "exact": Rollback}
WAYS = {
    "stale state": StaleState,
    "restore only": RestoreOnly,
    **{name: partial(Rollback, strategy=name) for name in STRATEGIES},
}


# Without rollback


def drift(
    model: nn.Module, ids: list[int], drafted: int, rounds: int, seed: int = 0
) -> "DataFrame":
    """Speculate on a given text, each draft right up to a random token; track how states drift.

    ``ids`` has a prompt and ``rounds * (drafted + 1) + 1`` more tokens, which the drafts are taken
    from. Distances are from the state of sequential decoding, over its norm.
    """
    at = len(ids) - rounds * (drafted + 1) - 1
    caches = {name: _read(model, ids[:at]) for name in (*REMEDIES, "sequential")}
    backwards = _distance(_read(model, ids[at - 1 :: -1]), caches["sequential"])
    remedies = {name: make(model, caches[name]) for name, make in REMEDIES.items()}
    settings = {"drafted": drafted, "prompt_tokens": at, "seed": seed}
    running, rows = records.Running("rollback_drift", settings), []
    for i, right in enumerate(np.random.default_rng(seed).integers(0, drafted + 1, rounds), 1):
        block = ids[at : at + 1 + drafted]
        tried = mx.array([[t if k <= right else (t + 1) % WRONG for k, t in enumerate(block)]])
        for r in remedies.values():
            mx.eval(r(tried))
            r.undo(int(drafted - right))
            r.commit()
        for t in block[: right + 1]:
            mx.eval(model(mx.array([[t]]), cache=caches["sequential"]))
        at += int(right) + 1
        truth = _next(model, caches["sequential"], ids[at])
        for name in REMEDIES:
            change = np.abs(_next(model, caches[name], ids[at]) - truth).max()
            row = {"state_distance": _distance(caches[name], caches["sequential"])}
            row |= {"probability_change": float(change), "accepted": int(right)}
            rows.append({"variant": name, "round": i} | row)
        rows.append({"variant": "prompt read backwards", "round": i, "state_distance": backwards})
    return running.table(rows)


def texts(
    model: nn.Module,
    prompts: Sequence[list[int]],
    drafted: int = 6,
    accepted: int = 3,
    tokens: int = 40,
    progress: bool = True,
) -> "DataFrame":
    """Write greedy text behind prompts in each of ``WAYS``, ``accepted`` drafts a round right."""

    @functools.cache
    def plain(i):
        """The plain text, and a cache with the prompt and the first round's accepted tokens."""
        cache, y, out = _read(model, prompts[i][:-1]), prompts[i][-1], []
        for n in range(tokens + drafted + 1):
            if n == accepted + 1:
                states = _states(cache)
            y = int(mx.argmax(model(mx.array([[y]]), cache=cache)[0, -1]))
            out.append(y)
        return out, states

    def write(make, i):
        (true, states), last, written, distance = plain(i), prompts[i][-1], [], None
        cache = _read(model, prompts[i][:-1])
        r = make(model, cache)
        while len(written) < tokens and written == true[: len(written)]:
            following = true[len(written) :][:drafted]
            drafts = [t if k < accepted else (t + 1) % WRONG for k, t in enumerate(following)]
            own = mx.argmax(r(mx.array([[last, *drafts]]))[0], axis=-1).tolist()
            n = num_accepted(drafts, own)
            r.undo(len(drafts) - n)
            r.commit()
            distance = _off(_states(cache), states) if distance is None else distance
            written += own[: n + 1]
            last = own[n]
        right = same_tokens(written[:tokens], true)
        return {
            "right_tokens": right,
            "right_share": right / tokens,
            "state_distance": distance,
        }

    settings = {"drafted": drafted, "accepted": accepted, "tokens": tokens}
    ways = {name: partial(write, make) for name, make in WAYS.items()}
    runs = len(prompts)
    return records.interleave("rollback", ways, runs, settings, warmup=0, progress=progress)


# The exact strategies


def exactness(
    model: nn.Module, ids: list[int], positions: int, read: int = 20, step: int = 3
) -> "DataFrame":
    """Compare each strategy's state with sequential decoding at every ``step``-th cut."""
    block, rows = ids[read : read + positions], []
    running = records.Running("rollback_exactness", {"positions": positions})
    for keep in range(0, positions + 1, step):
        sequential = _read(model, ids[:read])
        for t in block[:keep]:
            mx.eval(model(mx.array([[t]]), cache=sequential))
        for strategy in STRATEGIES:
            cache = _read(model, ids[:read])
            rollback = Rollback(model, cache, strategy)
            rollback(mx.array([block]))
            rollback.undo(positions - keep)
            pairs = zip(_states(cache), _states(sequential))
            difference = max(float(np.abs(a - b).max()) for a, b in pairs)
            rows.append({"variant": strategy, "keep": keep, "difference": difference})
    return running.table(rows)


def cost(model: nn.Module, ids: list[int], positions: Sequence[int], runs: int) -> "DataFrame":
    """Time passes and rollbacks of half their tokens, at successive places of a text."""

    def variant(strategy, m):
        keep = m // 2
        begin = len(ids) - (runs + 1) * keep - m
        how = "restore" if strategy == ALONE else strategy
        r = Rollback(model, _read(model, ids[:begin]), how)

        def run(i):
            at, started = begin + (i + 1) * keep, time.perf_counter()
            mx.eval(r(mx.array([ids[at : at + m]])))
            pass_s = time.perf_counter() - started
            held_nbytes = r.nbytes + sum(c.nbytes for c in r.cache if isinstance(c, ArraysCache))
            r.undo(m - keep)
            r.commit()
            mx.eval([c.state for c in r.cache])
            both_s = time.perf_counter() - started
            took = {"seconds": pass_s} if strategy == ALONE else {"seconds": both_s}
            return took | {"strategy": strategy, "positions": m, "held_nbytes": held_nbytes}

        return run

    with mx.stream(generation_stream):
        variants = {
            f"{strategy}, {m} positions": variant(strategy, m)
            for m in positions
            for strategy in (ALONE, *STRATEGIES)
        }
        samples = records.interleave("rollback_cost", variants, runs)
    alone = samples.groupby(["positions", "round"]).seconds.transform("first")
    return samples.assign(passes=samples.seconds / alone)


def bytes_read(model: nn.Module, ids: list[int], positions: int, keep: int) -> "DataFrame":
    """Count the bytes of experts that a streamed model reads to take tokens back."""
    running, rows = records.Running("rollback_reads", {"positions": positions, "keep": keep}), []
    for strategy in STRATEGIES:
        cache = _read(model, ids[:20])
        rollback = Rollback(model, cache, strategy)
        mx.eval(rollback(mx.array([ids[20 : 20 + positions]])))
        before = stats(model).prefill.bytes_read
        rollback.undo(positions - keep)
        mx.eval([c.state for c in cache])
        rows.append({"variant": strategy, "bytes_read": stats(model).prefill.bytes_read - before})
    return running.table(rows)


# Real models, by arithmetic

# By model: GatedDeltaNet layers, their value heads and key heads, and numbers in a head.
SHAPES = {
    "Qwen3.5-35B-A3B": (30, 32, 16, 128),
    "Qwen3.5-122B-A10B": (36, 64, 16, 128),
    "Qwen3.5-397B-A17B": (45, 64, 16, 128),
}


def held_nbytes(model: str, positions: int) -> dict[str, int]:
    """Bytes that each strategy holds between a pass over some positions and its rollback."""
    layers, value_heads, key_heads, head_dim = SHAPES[model]
    keys, values = key_heads * head_dim, value_heads * head_dim
    state = 4 * layers * values * head_dim  # float32
    recurrence = 2 * keys + values + 2 * value_heads  # q, k; v; a, b
    convolution = 2 * keys + values
    inputs = 2 * layers * (recurrence + convolution)  # 16 bits, for each position
    return {
        "restore": state,
        "replay": state + positions * inputs,
        "states": state + positions * state,
    }


def memory_dial(model: str, positions: int) -> Any:
    """Make the function behind the sliders of notebook 06, with ``held_nbytes``'s arguments."""
    from ..charts import bars

    held = held_nbytes(model, positions)
    rows = [{"variant": name, "held_nbytes": n} for name, n in held.items()]
    return bars(
        records.table({"rows": rows, "machine": "arithmetic, not a measurement", "record": ""}),
        "held_nbytes / 1e6",
        title=f"{positions} positions: states hold {held['states'] / 1e6:.0f} MB, "
        f"replay {held['replay'] / 1e6:.0f} MB",
        axis="MB held to take tokens back",
        finding=f"Keeping every state takes {held['states'] / held['replay']:.1f} times the "
        "memory of replaying.",
        note=f"{model}: {SHAPES[model][0]} GatedDeltaNet layers",
        digits=4,
    )


# The command


def heldout_text(model: str, tokenizer, tokens: int) -> list[int]:
    """So many tokens of a model's held-out code."""
    starts = heldout_starts(model, 4, tokens, tokenizer)
    return tokenizer.encode(" ".join(starts))[:tokens]


def bench_rollback(prompts: int = 10) -> "DataFrame":
    """Measure what each way to take tokens back does to the text and state of tiny-moe.

    With MLX's kernels: moelab's blocks replay where ``states`` is asked for, too.
    """
    path = shipped("models", "tiny-moe")
    model, tokenizer = load(path, StreamConfig(mode="resident", kernels="mlx"))
    starts = heldout_starts(path, prompts, 200, tokenizer)
    samples = texts(model, [tokenizer.encode(text) for text in starts])
    samples.attrs["settings"] |= {"model": path.name, "kernels": "mlx"}
    return samples


def report(samples: "DataFrame") -> str:
    """Write how long each way keeps text and states right."""
    lines = [machine.card_line(samples.attrs["machine"])]
    right, off = (records.group(samples, c) for c in ("right_tokens", "state_distance"))
    for name in right.index:
        lines.append(
            f"{name:13} {right['median'][name]:4.0f} of {samples.attrs['settings']['tokens']} "
            f"tokens right, states {off['median'][name]:8.1e} off after a round, "
            f"n={right.n[name]:.0f}"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "What rejected tokens do to the state and the text of tiny-moe, by how they are taken "
        "back. Counted, not timed."
    )
    add_number(parser, "--runs", 10, "prompts")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    samples = bench_rollback(args.runs)
    records.print_and_save(report(samples), samples, args.json)


# Of caches


def _read(model, ids):
    """Make a cache that has read some tokens."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache), [c.state for c in cache])
    return cache


def _states(cache):
    """The recurrent states, as NumPy arrays."""
    layers = (c for c in cache if isinstance(c, ArraysCache))
    return [np.array(a.astype(mx.float32)) for c in layers for a in c.cache]


def _distance(cache, other):
    return _off(_states(cache), _states(other))


def _off(states, truth):
    """The norm of the difference of states over the norm of the true ones."""
    difference = sum(((a - b) ** 2).sum() for a, b in zip(states, truth))
    return float(np.sqrt(difference / sum((b**2).sum() for b in truth)))


def _next(model, cache, token):
    """The probabilities of the token after one more; the cache is left as it was."""
    r = Rollback(model, cache)
    p = np.array(mx.softmax(r(mx.array([[token]]))[0, -1].astype(mx.float32)))
    r.undo(1)
    return p
