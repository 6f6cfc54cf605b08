"""How to stream a model on this machine: slots, policy, prefetch and layout, with the time of a token that each would take."""

import time
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ... import StreamConfig, footprint, load
from ...checkpoint import Checkpoint
from ...replay import costs as cost
from ...replay import pagecache
from ...streaming.model import session_of
from ...streaming.slots import POLICIES
from .. import machine
from ..models import folder
from ..texts import PROMPTS
from . import prefetch, sweep

FLAT = 0.02  # of settings no more than so much apart, the one that moves the fewest bytes is taken
WORTH = 0.03  # a change of layout that saves less is not worth a second copy of the file, a guess not its risk
TOKENS, SKIP = 400, 200


@dataclass(frozen=True)
class Advice:
    """What to do, and what would come of it.

    Attributes:
        config (StreamConfig): Mode, slots, policy and prefetch.
        layout (str): ``packed``: worth a ``python -m moelab repack``; ``as it is``.
        token_s (float): Predicted seconds of a decoded token, so streamed and laid out.
        memory_nbytes (float): The memory that it is for, page cache included.
        settings (dict[tuple, Replay]): By ``(slots, policy)``, every one that was looked at, as the experts lie and without prefetch.
        why (tuple[str]): The reasons, one a sentence.
    """

    config: StreamConfig
    layout: str
    token_s: float
    memory_nbytes: float
    settings: dict
    why: tuple

    def __str__(self):
        c = self.config
        lines = [
            "with all the memory there is:"
            if self.memory_nbytes == float("inf")
            else f"with {self.memory_nbytes / 1e9:.2f} GB for the process and its page cache:",
            f"  mode={c.mode} slots={c.slots} policy={c.policy} prefetch={c.prefetch}, layout {self.layout}: "
            f"{self.token_s * 1e3:.1f} ms a token, {1 / self.token_s:.1f} tok/s predicted",
            *(f"  - {line}" for line in self.why),
            "no prefetch, as the experts lie:",
            f"{'slots':>6} {'policy':6} {'ms/token':>9} {'in a slot':>9} {'page cache':>10} {'SSD, MB/token':>13}",
        ]
        for (slots, policy), r in self.settings.items():
            pages = "all" if r.page_nbytes == float("inf") else f"{r.page_nbytes / 1e6:.0f} MB"
            mark = " <" if (slots, policy) == (c.slots, c.policy) else ""
            lines.append(
                f"{slots:6d} {policy:6} {r.token_s.mean() * 1e3:9.1f} {r.app_hit_rate:9.0%} {pages:>10} "
                f"{r.read_per_token / 1e6:13.1f}{mark}"
            )
        return "\n".join(lines)


def advise(
    model,
    memory=None,
    trace=None,
    costs=None,
    slots=None,
    policies=POLICIES,
    skip=None,
    gain=None,
    foretold=None,
):
    """Choose how to stream a model in given memory, by replaying a trace with this machine's costs.

    Args:
        model (str or Path): A model folder or a Hub repository.
        memory (float, optional): Bytes for the process and its page cache. Default: what is available now.
        trace (Trace, optional): Of the model, by ``moelab.record``. Default: a synthetic one of its shape with the locality of
            tiny-moe's ``code``.
        costs (Costs, optional): Default: measured now, in about ten seconds.
        slots (list[int], optional): Those to choose from. Default: a dozen from K to what fits.
        policies (tuple[str]): Those to choose from.
        skip (int, optional): Tokens of the trace that only fill the caches. Default: half.
        gain (float, optional): How many times faster the SSD brings experts that lie in one piece. Default: measured now.
        foretold (tuple, optional): What a look ahead foretells, as ``look_ahead`` counts it. Default: counted now, where it could pay.

    Returns:
        Advice: The setting, its predicted time and why.

    Raises:
        ValueError: If the model does not fit in the memory with K slots.
    """
    path = folder(model)
    sizes = sweep.sizes_of(path)
    K, E = sizes["K"], sizes["E"]
    memory = machine.memory_available() if memory is None else memory
    if memory < sweep.least_nbytes(sizes):
        raise ValueError(
            f"{path}: expected at least {sweep.least_nbytes(sizes) / 1e9:.2f} GB of memory (the model without its experts, the process, "
            f"{K} slots in each of {sizes['L']} layers), got {memory / 1e9:.2f}. Take more memory, or a smaller model."
        )
    most = E if memory == float("inf") else sweep.fits(sizes, memory)
    trace = sweep.made_up(path, T=TOKENS) if trace is None else trace
    costs = costs or cost.measure_costs(path)
    slots = [
        n
        for n in slots or np.unique(np.linspace(K, most, 12).astype(int)).tolist()
        if K <= n <= most
    ]
    if not slots:
        raise ValueError(
            f"advise: expected slots from {K} (the experts per token) to {most} (what fits), got none."
        )
    skip = len(trace.decode) // 2 if skip is None else skip
    settings = replays(sizes, memory, trace, costs, [(n, p) for p in policies for n in slots], skip)
    n, policy = pick(settings)
    chosen = settings[n, policy]
    token_s = float(chosen.token_s.mean())
    why = [
        f"{n} of {E} slots serve {chosen.app_hit_rate:.0%} of the experts; the page cache serves {np.nan_to_num(chosen.page_hit_rate):.0%} of "
        f"the rest, and {chosen.read_per_token / 1e6:.1f} MB a token come from the SSD.",
        _shape([(m, r) for (m, p), r in settings.items() if p == policy]),
    ]
    others = {p: r.token_s.mean() for (m, p), r in settings.items() if m == n and p != policy}
    why += [f"With {n} slots {p} takes {s / token_s - 1:+.1%}." for p, s in others.items()]
    layout = "packed" if Checkpoint(path).packed else "as it is"
    if layout == "packed":
        why.append("The experts are packed already.")
    else:
        gain = _gain(path, costs) if gain is None else gain
        better = replace(costs, cold_s_per_byte=costs.cold_s_per_byte / gain)
        packed = replays(sizes, memory, trace, better, [(n, policy)], skip)[n, policy]
        saved = 1 - packed.token_s.mean() / token_s
        why.append(
            f"The SSD brings experts in one piece at {gain:.2f} times the rate of these: {saved:+.1%} of a token to gain, "
            + ("worth a repack." if saved >= WORTH else "not worth a repack.")
        )
        if saved >= WORTH:
            layout, chosen, token_s = "packed", packed, float(packed.token_s.mean())
    guess, saved_s, reason = _prefetch(path, n, layout, chosen.parts_s, token_s, foretold)
    why.append(reason)
    if (
        footprint(path, StreamConfig(mode="resident")).total_nbytes
        + sweep.PROCESS_NBYTES
        + sweep.SPARE_NBYTES
        <= memory
    ):
        why.append(
            "All of the model fits: compare mode='resident', which reads nothing and never waits for the routing (python -m moelab bench)."
        )
    return Advice(
        StreamConfig(slots=n, policy=policy, prefetch=guess),
        layout,
        token_s - saved_s,
        memory,
        settings,
        tuple(why),
    )


def replays(sizes, memory, trace, costs, settings, skip):
    """Replay every setting.

    Args:
        sizes (dict): Of ``sweep.sizes_of``.
        memory (float): Bytes.
        trace (Trace): ``[T, L, K]``.
        costs (Costs): Of reads and arithmetic.
        settings (list[tuple]): ``(slots, policy)``.
        skip (int): Tokens that are not counted.

    Returns:
        dict[tuple, Replay]: By setting.
    """
    return {
        (n, policy): pagecache.replay(
            trace, memory, n, policy, expert_nbytes=sizes["expert_nbytes"], costs=costs, slot_nbytes=sizes["slot_nbytes"] // sizes["L"],
            other_nbytes=sweep.other_nbytes(sizes), skip=skip,
        )
        for n, policy in settings
    }  # fmt: skip


def pick(settings):
    """The fastest setting; of those that are as fast, the one that copies and reads least, since reads cost what a replay does not see.

    Args:
        settings (dict[tuple, Replay]): Of ``replays``.

    Returns:
        tuple: ``(slots, policy)``.
    """
    best_s = min(r.token_s.mean() for r in settings.values())
    as_fast = {key: r for key, r in settings.items() if r.token_s.mean() <= best_s * (1 + FLAT)}
    return min(as_fast, key=lambda key: as_fast[key].copied_per_token + as_fast[key].read_per_token)


def _shape(curve):
    """Where the time goes when slots are added, in a sentence."""
    ms = {m: r.token_s.mean() * 1e3 for m, r in curve}
    first, last = curve[0][0], curve[-1][0]
    worst = max(ms, key=ms.get)
    if max(ms.values()) <= min(ms.values()) * (1 + FLAT):
        return f"Slots hardly matter here: {min(ms.values()):.1f} to {max(ms.values()):.1f} ms a token with {first} to {last}."
    if first < worst < last:
        return (
            f"Between few slots and many lies a ridge: {ms[first]:.1f} ms a token with {first}, {ms[worst]:.1f} with {worst}, {ms[last]:.1f} with {last}; "
            "half-way what is in a slot lies in the page cache too."
        )
    return f"{ms[first]:.1f} ms a token with {first} slots, {ms[last]:.1f} with {last}."


def _prefetch(path, slots, layout, part, token_s, foretold):
    """Which prefetch, the seconds of a token that it should save, and why.

    A used guess spares a read that nothing hides, as far as there is arithmetic to read beside; one for nothing delays others by as
    much; and asking takes its time. That is for experts in one piece: with a piece for each parameter the recorded gain was none. It was
    made to agree with the eight recorded variants (data/results/cpu_prefetch_*.json), on one machine.
    """
    left_s = part["copies"] + part["disk"] + part["hidden"]
    idle_s = max(0.0, part["fixed"] + part["experts"] + part["hidden"])
    bound_s = min(left_s, idle_s)
    if bound_s < WORTH * token_s:
        return (
            "none",
            0.0,
            (
                f"No prefetch: {left_s * 1e3:.1f} ms of a token are reads that nothing hides as it is, and not even an oracle could hide more than "
                f"{bound_s * 1e3:.1f} of them."
            ),
        )
    if layout != "packed":
        return (
            "none",
            0.0,
            (
                f"No prefetch: an oracle would hide {bound_s * 1e3:.1f} ms of reads, but where an expert lies in several pieces a guess takes as many reads, "
                "and gained nothing in the recorded runs (notebook 04)."
            ),
        )
    try:
        used, wasted, ask_s = foretold or look_ahead(path, slots)
    except ValueError as e:
        return "none", 0.0, f"No prefetch: {e}"
    saved_s = min(used * left_s, idle_s) - wasted * left_s - ask_s
    worth = saved_s >= WORTH * token_s
    return (
        "lookahead" if worth else "none",
        saved_s if worth else 0.0,
        (
            f"{'Prefetch' if worth else 'No prefetch'}: of {left_s * 1e3:.1f} ms of reads that nothing hides a look ahead foretells {used:.0%}, reads {wasted:.0%} as much "
            f"for nothing and takes {ask_s * 1e3:.1f} ms to ask: {saved_s * 1e3:+.1f} ms a token to gain."
        ),
    )


def look_ahead(path, slots, tokens=16):
    """What the next layer's router foretells of a model, counted while it decodes a prompt.

    Args:
        path (str or Path): A model folder.
        slots (int): S; no more than 2 K are used here.
        tokens (int): Tokens decoded.

    Returns:
        tuple: Of the experts that are not held the share that it brings; those that it brings for nothing, over the same number; the
        seconds of a token that asking takes.

    Raises:
        ValueError: If this family's router cannot be asked.
    """
    spent = []
    config = StreamConfig(
        prefetch="lookahead",
        slots=min(slots, 2 * footprint(path, StreamConfig(mode="resident")).top_k),
    )
    model, tokenizer = load(path, config)
    with model:
        ask = session_of(model).prefetcher.ask

        def timed(layer, x):
            mx.eval(x)
            begin = time.perf_counter()
            asked = ask(layer, x)
            mx.eval(asked)
            spent.append(time.perf_counter() - begin)
            return asked

        session_of(model).prefetcher.ask = timed
        c = prefetch.decode(model, tokenizer.encode(PROMPTS[0]), tokens)["counters"]
        L = len(session_of(model).layers)
    missed = max(1, c["prefetch_used"] + c["misses"])
    return c["prefetch_used"] / missed, c["prefetch_wasted"] / missed, float(np.median(spent)) * L


def _gain(path, costs):
    """How many times faster the SSD brings experts in one piece than as they lie, cold."""
    file = max(path.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    nbytes = footprint(path).expert_nbytes
    speeds = [
        machine.read_speed(file, True, StreamConfig().readers, nbytes, max(8, (64 << 20) // nbytes))
        for _ in range(3)
    ]
    return float(np.median(speeds) * costs.cold_s_per_byte)
