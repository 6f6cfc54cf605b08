"""Taking tokens back: what goes wrong without it, and what three exact ways cost."""

import time

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ...speculation.rollback import Rollback
from ..plots import style as figures

WAYS = ("restore", "replay", "states")


class Restored:
    """SwiftLM's rollback: the state from before the pass comes back, the accepted tokens do not."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache

    def __call__(self, tokens):
        self._before = [list(c.cache) if isinstance(c, ArraysCache) else None for c in self.cache]
        return self.model(tokens, cache=self.cache)

    def undo(self, n):
        for c, before in zip(self.cache, self._before):
            if before is None:
                c.trim(n)
            elif n:
                c.cache = before

    def commit(self):
        pass


class Left(Restored):
    """No rollback of the recurrent state: rejected tokens stay in it."""

    def undo(self, n):
        for c in self.cache:
            if not isinstance(c, ArraysCache):
                c.trim(n)


REMEDIES = {"left in the state": Left, "restored only": Restored, "exact": Rollback}


def drift(model, ids, drafted, wrong_at, rounds):
    """Speculate on a given text whose drafts are right up to one: how far is the recurrent state from sequential decoding after each round?

    Args:
        ids (list[int]): A prompt and what the drafts are taken from.
        drafted (int): Tokens drafted in each round.
        wrong_at (Callable): From the round's number to how many of its drafts are right.
        rounds (int): How many.

    Returns:
        dict: ``{remedy: ([distance after each round], [largest probability difference of the next token])}``; a distance is the norm of
        the difference of all recurrent states over the norm of the states.
    """
    start = len(ids) - rounds * (drafted + 1) - 1
    out = {name: ([], []) for name in REMEDIES}
    caches = {name: _read(model, ids[:start]) for name in (*REMEDIES, "plain")}
    remedies = {name: make(model, caches[name]) for name, make in REMEDIES.items()}
    at = start
    for i in range(rounds):
        right = wrong_at(i)
        block = ids[at : at + 1 + drafted]
        tried = mx.array([[t if k <= right else (t + 1) % 100 for k, t in enumerate(block)]])
        for name, r in remedies.items():
            mx.eval(r(tried))
            r.undo(drafted - right)
            r.commit()
        for t in block[: right + 1]:
            mx.eval(model(mx.array([[t]]), cache=caches["plain"]))
        at += right + 1
        truth = _next(model, caches["plain"], ids[at])
        for name in REMEDIES:
            out[name][0].append(_distance(caches[name], caches["plain"]))
            out[name][1].append(float(np.abs(_next(model, caches[name], ids[at]) - truth).max()))
    return out


def tokens_until_wrong(model, ids, drafted, accepted, tokens):
    """Greedy speculation with drafts that are right ``accepted`` times in each round: tokens equal to plain decoding before the first that is not.

    Returns:
        dict: ``{remedy: tokens}``, ``tokens`` if all are.
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
        while len(written) < tokens:
            true = plain[len(written) :][:drafted]
            drafts = [t if k < accepted else (t + 1) % 100 for k, t in enumerate(true)]
            own = mx.argmax(r(mx.array([[last, *drafts]]))[0], axis=-1).tolist()
            n = next((k for k, d in enumerate(drafts) if d != own[k]), len(drafts))
            r.undo(len(drafts) - n)
            r.commit()
            written += own[: n + 1]
            last = own[n]
        out[name] = next((k for k, (a, b) in enumerate(zip(written, plain)) if a != b), tokens)
    return out


def ways(model, ids, positions, keep, rounds):
    """Seconds of a pass over some positions and of taking all but ``keep`` of them back, and the bytes held for it.

    Returns:
        tuple[dict, dict]: ``{way: [seconds, ...]}``, with ``no undo`` the pass alone, and ``{way: bytes}``.
    """
    names = ("no undo", *WAYS)
    start = len(ids) - (rounds + 1) * keep - positions
    rng, out, held = np.random.default_rng(0), {way: [] for way in names}, {}
    with mx.stream(generation_stream):
        remedies = {
            way: Rollback(model, _read(model, ids[:start]), "restore" if way == "no undo" else way)
            for way in names
        }
        for i in range(-1, rounds):
            at = start + (i + 1) * keep
            for way in rng.permutation(names).tolist():
                r, begin = remedies[way], time.perf_counter()
                mx.eval(r(mx.array([ids[at : at + positions]])))
                alone_s = time.perf_counter() - begin
                held[way] = 0 if way == "no undo" else r.nbytes + state_nbytes(r.cache)
                r.undo(positions - keep)
                r.commit()
                mx.eval([c.state for c in r.cache])
                if i >= 0:
                    out[way].append(alone_s if way == "no undo" else time.perf_counter() - begin)
    return out, held


def state_nbytes(cache):
    """Bytes of the recurrent states of a cache."""
    return sum(c.nbytes for c in cache if isinstance(c, ArraysCache))


def memory_dial(models):
    """The function behind the sliders of notebook 06: from a model and the positions of a pass to the bytes that each way holds.

    Args:
        models (dict): ``{name: (recurrent layers, value heads, key heads, key and value dimension)}``.
    """

    def look(model: str, positions: int):
        layers, heads, key_heads, d = models[model]
        state = layers * heads * d * d * 4
        inputs = (
            layers * (2 * key_heads * d + heads * d + 2 * heads + 2 * key_heads * d + heads * d) * 2
        )  # recurrence and convolution, 16 bits
        held = {
            "restore": state,
            "replay": state + positions * inputs,
            "states": (1 + positions) * state,
        }
        fig = figures.figure(
            "",
            "",
            "MB held to take tokens back",
            note=f"{model}: {layers} GatedDeltaNet layers, state {state / 1e6:.1f} MB; arithmetic, not a measurement",
        )
        fig.add_bar(
            x=list(held),
            y=[v / 1e6 for v in held.values()],
            text=[f"{v / 1e6:.4g} MB" for v in held.values()],
            marker_color=figures.COLORS[:3],
        )
        fig.update_layout(
            title_text=f"{positions} positions: every state takes {held['states'] / 1e6:.0f} MB, replay {held['replay'] / 1e6:.0f}",
            showlegend=False,
        )
        return figures.describe(
            fig,
            alt="Bars of megabytes held: "
            + ", ".join(f"{k} {v / 1e6:.1f}" for k, v in held.items())
            + ".",
            finding=f"Keeping every state costs {held['states'] / held['replay']:.1f} times the memory of replaying.",
        )

    return look


def _read(model, ids):
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache), [c.state for c in cache])
    return cache


def _states(cache):
    return [
        np.array(a.astype(mx.float32)) for c in cache if isinstance(c, ArraysCache) for a in c.cache
    ]


def _distance(cache, other):
    pairs = list(zip(_states(cache), _states(other)))
    return float(
        np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs))
    )


def _next(model, cache, token):
    """Probabilities of what follows a token, the cache left as it was."""
    r = Rollback(model, cache)
    p = np.array(mx.softmax(r(mx.array([[token]]))[0, -1].astype(mx.float32)))
    r.undo(1)
    return p
