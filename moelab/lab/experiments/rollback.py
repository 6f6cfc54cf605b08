"""Notebook 06: what goes wrong without rollback, and what three exact strategies cost.

python -m moelab bench-rollback --json data/results/cpu_rollback.json
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ... import StreamConfig, load, stats
from ...commands.arguments import add_json, add_number
from ...shipped import shipped
from ...speculation.rollback import Rollback
from ...speculation.sampling import num_accepted
from .. import machine, records, timing
from ..decode import same_tokens
from ..texts import heldout_starts

STRATEGIES = ("restore", "replay", "states")  # those of ``Rollback``, all exact
WRONG = 100  # a wrong draft is (the right token + 1) % WRONG, in any vocabulary


class RestoreOnly:
    """A fault: the recurrent state of before the pass, without the accepted tokens.

    This is SwiftLM's ``MambaCache.trim``. Attention caches are trimmed as they should be.

    Args:
        model (nn.Module): The target.
        cache (list): Its prompt cache.
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
    """A fault: rejected tokens stay in the recurrent state, as in SwiftLM's DFlash path."""

    def undo(self, n: int) -> None:
        for c in self.cache:
            if not isinstance(c, ArraysCache):
                c.trim(n)


REMEDIES = {"stale state": StaleState, "restore only": RestoreOnly, "exact": Rollback}


# Without rollback


@dataclass(frozen=True)
class Drift:
    """How far each remedy is from sequential decoding, after each round.

    Attributes:
        drafted (int): Tokens drafted in each round.
        accepted (list[int]): How many of them are right, for each round.
        distance (dict): ``{remedy: [distance]}``: the norm of the difference of all recurrent
            states over the norm of the states.
        probability (dict): ``{remedy: [change]}``: the largest change of a next token's
            probability.
        backwards (float): The distance of the states after the prompt read backwards.
    """

    drafted: int
    accepted: list[int]
    distance: dict[str, list[float]]
    probability: dict[str, list[float]]
    backwards: float


def drift(model: nn.Module, ids: list[int], drafted: int, accepted: Sequence[int]) -> Drift:
    """Speculate on a given text with drafts that are right up to a given one.

    Args:
        model (nn.Module): The target.
        ids (list[int]): A prompt, and after it the tokens that the drafts are taken from.
        drafted (int): Tokens drafted in each round.
        accepted (Sequence[int]): How many of them are right, for each round.
    """
    at = len(ids) - len(accepted) * (drafted + 1) - 1
    caches = {name: _read(model, ids[:at]) for name in (*REMEDIES, "sequential")}
    backwards = _distance(_read(model, ids[at - 1 :: -1]), caches["sequential"])
    remedies = {name: make(model, caches[name]) for name, make in REMEDIES.items()}
    distance, probability = ({name: [] for name in REMEDIES} for _ in range(2))
    for right in map(int, accepted):
        block = ids[at : at + 1 + drafted]
        tried = mx.array([[t if k <= right else (t + 1) % WRONG for k, t in enumerate(block)]])
        for r in remedies.values():
            mx.eval(r(tried))
            r.undo(drafted - right)
            r.commit()
        for t in block[: right + 1]:
            mx.eval(model(mx.array([[t]]), cache=caches["sequential"]))
        at += right + 1
        truth = _next(model, caches["sequential"], ids[at])
        for name in REMEDIES:
            distance[name].append(_distance(caches[name], caches["sequential"]))
            change = np.abs(_next(model, caches[name], ids[at]) - truth).max()
            probability[name].append(float(change))
    return Drift(drafted, [int(n) for n in accepted], distance, probability, backwards)


@dataclass(frozen=True)
class FirstWrong:
    """Greedy text written by speculation, compared with plain decoding.

    Attributes:
        drafted (int): Tokens drafted in each round.
        accepted (int): How many of them are right.
        tokens (int): Tokens written with each remedy.
        right (dict): ``{remedy: tokens before the first wrong one}``, ``tokens`` if none is.
    """

    drafted: int
    accepted: int
    tokens: int
    right: dict[str, int]


def first_wrong(
    model: nn.Module, ids: list[int], drafted: int, accepted: int, tokens: int
) -> FirstWrong:
    """Write greedy text behind a prompt, with drafts that are right ``accepted`` times a round.

    Args:
        model (nn.Module): The target.
        ids (list[int]): The prompt.
        drafted (int): Tokens drafted in each round.
        accepted (int): How many of them are the model's own choice.
        tokens (int): How many to write.
    """
    cache = _read(model, ids[:-1])
    y, plain = ids[-1], []
    for _ in range(tokens + drafted + 1):
        y = int(mx.argmax(model(mx.array([[y]]), cache=cache)[0, -1]))
        plain.append(y)
    out = {}
    for name, make in REMEDIES.items():
        cache = _read(model, ids[:-1])
        r, last, written = make(model, cache), ids[-1], []
        while len(written) < tokens and written == plain[: len(written)]:
            true = plain[len(written) :][:drafted]
            drafts = [t if k < accepted else (t + 1) % WRONG for k, t in enumerate(true)]
            own = mx.argmax(r(mx.array([[last, *drafts]]))[0], axis=-1).tolist()
            n = num_accepted(drafts, own)
            r.undo(len(drafts) - n)
            r.commit()
            written += own[: n + 1]
            last = own[n]
        out[name] = same_tokens(written[:tokens], plain)
    return FirstWrong(drafted, accepted, tokens, out)


# The exact strategies


def exactness(
    model: nn.Module, ids: list[int], positions: int, read: int = 20, step: int = 3
) -> dict[str, float]:
    """The largest difference of a recurrent state from sequential decoding, for each strategy.

    Args:
        model (nn.Module): The target.
        ids (list[int]): At least ``read + positions`` tokens.
        positions (int): Tokens of the pass.
        read (int): Tokens read before it.
        step (int): Every so many tokens of the pass, one cut is tried.
    """
    block, worst = ids[read : read + positions], dict.fromkeys(STRATEGIES, 0.0)
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
            worst[strategy] = max(worst[strategy], difference)
    return worst


@dataclass(frozen=True)
class Cost:
    """A pass, and the same pass with its last tokens taken back by each strategy.

    Attributes:
        positions (int): Tokens in the pass.
        keep (int): How many of them stay.
        pass_s (list[float]): Seconds of the pass alone.
        strategy_s (dict): ``{strategy: [seconds]}`` of pass and rollback.
        nbytes (dict): ``{strategy: bytes held between pass and rollback}``.
    """

    positions: int
    keep: int
    pass_s: list[float]
    strategy_s: dict[str, list[float]]
    nbytes: dict[str, int]

    def overhead(self, strategy: str) -> np.ndarray:
        """Time beyond the median pass alone, in % of it, for each sample."""
        return 100 * (np.array(self.strategy_s[strategy]) / np.median(self.pass_s) - 1)


def cost(model: nn.Module, ids: list[int], positions: int, keep: int, rounds: int) -> Cost:
    """Time passes and rollbacks at successive places of a text, strategies in random order.

    Args:
        model (nn.Module): The target.
        ids (list[int]): At least ``(rounds + 1) * keep + positions`` tokens.
        positions (int): Tokens in each pass.
        keep (int): How many of them stay.
        rounds (int): Samples of each; one more comes first and is not kept.
    """
    alone = "the pass alone"
    at = len(ids) - (rounds + 1) * keep - positions
    rng, seconds, held = np.random.default_rng(0), {}, {}
    with mx.stream(generation_stream):
        rollbacks = {
            name: Rollback(model, _read(model, ids[:at]), "restore" if name == alone else name)
            for name in (alone, *STRATEGIES)
        }
        for i in range(-1, rounds):
            for name in rng.permutation(list(rollbacks)).tolist():
                r, begin = rollbacks[name], time.perf_counter()
                mx.eval(r(mx.array([ids[at : at + positions]])))
                pass_s = time.perf_counter() - begin
                held[name] = r.nbytes + _state_nbytes(r.cache)
                r.undo(positions - keep)
                r.commit()
                mx.eval([c.state for c in r.cache])
                whole_s = time.perf_counter() - begin
                if i >= 0:
                    seconds.setdefault(name, []).append(pass_s if name == alone else whole_s)
            at += keep
    pass_s = seconds.pop(alone)
    return Cost(positions, keep, pass_s, seconds, {name: held[name] for name in STRATEGIES})


def bytes_read(model: nn.Module, ids: list[int], positions: int, keep: int) -> dict[str, int]:
    """Bytes of experts that a streamed model reads to take tokens back, for each strategy.

    Args:
        model (nn.Module): From ``moelab.load``.
        ids (list[int]): At least ``20 + positions`` tokens.
        positions (int): Tokens in the pass.
        keep (int): How many of them stay.
    """
    out = {}
    for strategy in STRATEGIES:
        cache = _read(model, ids[:20])
        rollback = Rollback(model, cache, strategy)
        mx.eval(rollback(mx.array([ids[20 : 20 + positions]])))
        before = stats(model).prefill.bytes_read
        rollback.undo(positions - keep)
        mx.eval([c.state for c in cache])
        out[strategy] = stats(model).prefill.bytes_read - before
    return out


# Real models, by arithmetic


@dataclass(frozen=True)
class Shape:
    """The GatedDeltaNet layers of a model."""

    layers: int
    value_heads: int
    key_heads: int
    head_dim: int  # of keys and of values

    def nbytes(self, positions: int) -> dict[str, int]:
        """Bytes that each strategy holds between a pass over some positions and its rollback."""
        keys, values = self.key_heads * self.head_dim, self.value_heads * self.head_dim
        state = 4 * self.layers * values * self.head_dim  # float32
        recurrence = 2 * keys + values + 2 * self.value_heads  # q, k; v; a, b
        convolution = 2 * keys + values
        inputs = 2 * self.layers * (recurrence + convolution)  # 16 bits, for each position
        return {
            "restore": state,
            "replay": state + positions * inputs,
            "states": state + positions * state,
        }


SHAPES = {
    "Qwen3.5-35B-A3B": Shape(30, 32, 16, 128),
    "Qwen3.5-122B-A10B": Shape(36, 64, 16, 128),
    "Qwen3.5-397B-A17B": Shape(45, 64, 16, 128),
}


# The record


@dataclass(frozen=True)
class RollbackRecord:
    """All that notebook 06 measures of one model.

    Attributes:
        model (str): Its folder's name.
        drift (Drift): Distance of the states, round by round.
        first_wrong (FirstWrong): How long the text stays right.
        costs (list[Cost]): Of passes of several lengths.
        machine (dict): As ``machine.card`` gives it.
    """

    model: str
    drift: Drift
    first_wrong: FirstWrong
    costs: list[Cost]
    machine: dict

    @classmethod
    def from_json(cls, record: dict) -> "RollbackRecord":
        """Of what ``to_json`` returned."""
        return cls(
            record["model"],
            Drift(**record["drift"]),
            FirstWrong(**record["first_wrong"]),
            [Cost(**c) for c in record["costs"]],
            record["machine"],
        )

    def to_json(self) -> dict:
        """What ``bench-rollback`` keeps."""
        return {"kind": "rollback", **asdict(self)}

    def verdicts(self) -> list[tuple[str, str, str, str]]:
        """The rows of notebook 06's table; here, since the command prints them too."""
        most = max(self.costs, key=lambda c: c.positions)
        extra = {s: f"{np.median(most.overhead(s)):+.0f}%" for s in STRATEGIES}
        off = {name: f"{d[0]:.0%}" for name, d in self.drift.distance.items()}
        right, of = self.first_wrong.right, self.first_wrong.tokens
        return [
            (
                "A8",
                "recurrent state cannot be trimmed; it needs checkpoint and restore",
                "depends on",
                "the second half: it cannot be trimmed, but replaying "
                f"({extra['replay']} of a pass over {most.positions}) and keeping states "
                f"({extra['states']}) are exact too; restoring and running again costs "
                f"{extra['restore']}",
            ),
            (
                "A9",
                "restoring the checkpoint is enough for a correct rollback",
                "refuted",
                f"the states are {off['restore only']} off after one round, and the first "
                f"{right['restore only']} of {of} greedy tokens are right",
            ),
            (
                "D4",
                "rejected tokens left in the recurrent state spoil what follows",
                "confirmed",
                f"the states are {off['stale state']} off after one round, and the first "
                f"{right['stale state']} of {of} greedy tokens are right; what that does to "
                "acceptance is notebook 08",
            ),
        ]


# Sizes of the notebook's full run: prompt, rounds, drafts, tokens, positions, samples.
PROMPT, ROUNDS, DRAFTED, TEXT, POSITIONS, RUNS = 200, 12, 6, 40, (2, 4, 8, 16), 7


def text(model: str, tokenizer, tokens: int) -> list[int]:
    """So many tokens of a model's held-out code."""
    starts = heldout_starts(model, 4, tokens, tokenizer)
    return tokenizer.encode(" ".join(starts))[:tokens]


def accepted(rounds: int, drafted: int, seed: int = 0) -> list[int]:
    """How many drafts are right, for each round, at random from 0 to all."""
    return np.random.default_rng(seed).integers(0, drafted + 1, rounds).tolist()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "What rejected tokens do to the state and the text of tiny-moe, and what taking them back "
        "costs. Notebook 06's measurements."
    )
    add_number(parser, "--runs", RUNS, "samples")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """The command."""
    record = bench_rollback(args.runs)
    records.print_and_save(report(record), record, args.json)


def bench_rollback(runs: int = RUNS) -> RollbackRecord:
    """All measurements of notebook 06, of the model in ``data``."""
    path = shipped("models", "tiny-moe")
    model, tokenizer = load(path, StreamConfig(mode="resident"))
    ids = text(path, tokenizer, PROMPT + ROUNDS * (DRAFTED + 1) + 1)
    return RollbackRecord(
        path.name,
        drift(model, ids, DRAFTED, accepted(ROUNDS, DRAFTED)),
        first_wrong(model, ids[:PROMPT], DRAFTED, DRAFTED // 2, TEXT),
        [cost(model, ids, m, m // 2, runs) for m in POSITIONS],
        machine.card(),
    )


def report(record: RollbackRecord) -> str:
    """The table that ``bench-rollback`` prints."""
    lines = [machine.card_line(record.machine)]
    lines += [f"{claim} {verdict}: {why}" for claim, _, verdict, why in record.verdicts()]
    for c in record.costs:
        told = ", ".join(
            f"{s} {timing.quartiles_text(c.overhead(s), form='.0f')}" for s in STRATEGIES
        )
        lines.append(f"{c.positions} positions, % beyond the pass: {told}")
    return "\n".join(lines)


# Of caches


def _state_nbytes(cache):
    return sum(c.nbytes for c in cache if isinstance(c, ArraysCache))


def _read(model, ids):
    """A cache that has read some tokens."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache), [c.state for c in cache])
    return cache


def _states(cache):
    """The recurrent states, as NumPy arrays."""
    layers = (c for c in cache if isinstance(c, ArraysCache))
    return [np.array(a.astype(mx.float32)) for c in layers for a in c.cache]


def _distance(cache, other):
    pairs = list(zip(_states(cache), _states(other)))
    difference = sum(((a - b) ** 2).sum() for a, b in pairs)
    return float(np.sqrt(difference / sum((b**2).sum() for _, b in pairs)))


def _next(model, cache, token):
    """Probabilities of what follows a token; the cache is left as it was."""
    r = Rollback(model, cache)
    p = np.array(mx.softmax(r(mx.array([[token]]))[0, -1].astype(mx.float32)))
    r.undo(1)
    return p
