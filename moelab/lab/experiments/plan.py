"""``python -m moelab plan``: how fast would a model decode on this machine, or on another one?

A model on disk is measured on this machine, and ``advise`` compares settings. A model that is not
on disk is planned from its published configuration. ``replay.machine`` computes a token's costs on
another machine from a few numbers. Every forecast replays a trace with ``moelab.plan``'s slots.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from ... import synthesize
from ...checkpoint import CheckpointError, temporary_folder
from ...commands.argument_types import at_least, gigabytes, not_empty
from ...commands.arguments import add_number
from ...configs import CONFIGS, one_of
from ...memory import WHY_LEFT, gpu_limit
from ...replay import advice
from ...replay.advice import Advice
from ...replay.machine import CHIPS, DISK_SHARE, Machine, distinct, taken_of, typical_trace
from ...streaming.facts import ModelFacts
from ...streaming.plan import DoesNotFit, Plan, memory_for_a_model, plan_of
from ...system import HERE
from ..models import CONFIG, folder, named, planned, repack_hint
from .costs import measure_costs

# A speed is probably within this factor of its plan. ``FORMULA_NEAR``: how many published speeds
# were so near to a formula that was fitted to other speeds. ``OWN_NEAR``: how many of our own were
# so near to plans with measured costs (data/recipes/published.py).
FORMULA_SPREAD = 1.5
FORMULA_NEAR = (
    "six of seven published sources left out of the fit were so near, the worst 3.3 times off"
)
OWN_SPREAD = 1.2
OWN_NEAR = "four of five of our own settings were that near"
TOKENS = 400  # tokens of the synthetic trace; half of them fill the caches
# A rejected token adds only this share of a token's reads to a pass, since the right token often
# needs the same experts (data/results/cpu_drafts_dflash.json).
REJECTED_READS = 1 / 3
DRAFTS, ACCEPTED = 3, 0.7  # length and acceptance of a draft that would help
WORTH_A_LINE = 1.2  # a change with a smaller speedup is not named
STAND_IN = "qwen3.5-35b-a3b", 4, 32  # shapes of this model, number of layers, experts per layer


@dataclass(frozen=True)
class Forecast:
    """The expected speed of a model on a machine."""

    name: str  # the model, and its bits if there is a choice
    plan: Plan
    machine: Machine
    advice: Advice  # how to stream the model, and a token's time
    spread: float = FORMULA_SPREAD  # the speed probably lies within this factor of the expected one
    near: str = FORMULA_NEAR  # how many speeds lay within the factor, in words

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts of a token's time, in seconds."""
        machine, chosen = self.machine, self.advice.chosen
        each_s = machine.held_layer_s if self.slots == self.plan.num_experts else machine.layer_s
        layers_s = self.plan.facts.num_blocks * (machine.layer_s if math.isnan(each_s) else each_s)
        ssd_s, copies_s, waits_s = machine.reads_s(chosen)
        return {
            "SSD": ssd_s,
            "page cache": copies_s,
            "read latency": waits_s,
            "arithmetic": chosen.parts_s["fixed"] - layers_s + chosen.parts_s["experts"],
            "layer overhead": layers_s,
        }

    def with_drafts(self, drafts: int, accepted: float) -> dict[str, float]:
        """Return ``parts_s`` if each pass verifies ``drafts`` tokens, drafted in no time."""
        if not drafts:
            return self.parts_s
        parts, facts, machine = self.parts_s, self.plan.facts, self.machine
        L = facts.num_layers
        positions = drafts + 1
        tau = float(sum(accepted**i for i in range(positions)))  # tokens that a pass commits
        read = tau + REJECTED_READS * (positions - tau)  # a pass's reads; a token's are 1
        experts_nbytes = L * distinct(facts, positions) * facts.expert_nbytes
        share = 0.0 if math.isnan(machine.prompt_share) else machine.prompt_share
        nbytes = max(facts.dense_nbytes + experts_nbytes, share * positions * facts.active_nbytes)
        per_pass = {
            "SSD": read * parts["SSD"],
            "page cache": read * parts["page cache"],
            "read latency": min(read * parts["read latency"], L * max(machine.wait_s)),
            "arithmetic": max(parts["arithmetic"], nbytes / machine.weights_bytes_per_s),
            "layer overhead": parts["layer overhead"],
        }
        return {name: seconds / tau for name, seconds in per_pass.items()}

    @property
    def binds(self) -> str:
        """The part that takes most of a token's time."""
        parts, m = self.parts_s, self.machine
        missing_s = parts["SSD"] + parts["page cache"] + parts["read latency"]
        rate = "the memory's rate" if m.is_mac or m.memory_binds else "the cores"
        causes = {
            "reading experts that are not in memory": missing_s,
            f"going through the weights ({rate})": parts["arithmetic"],
            "the layers themselves (a fixed time each)": parts["layer overhead"],
        }
        return max(causes, key=causes.get)

    @property
    def slots(self) -> int:
        return self.advice.config.slots

    def prompt_s(self, tokens: int) -> tuple[float, float]:
        return self.machine.prompt_s(self.plan, tokens, self.slots)

    def table(self, prompt: int, more: Mapping[str, str] = {}) -> str:
        """Write the forecast: a line for each question of a user, and the lines of ``more``."""
        plan, facts, slots, machine = self.plan, self.plan.facts, self.slots, self.machine
        speed, (first_s, last_s) = 1 / self.advice.token_s, self.prompt_s(prompt)
        parts = {name: rough(s * 1e3) for name, s in self.parts_s.items() if s >= 0.01 / speed}
        if "SSD" in parts:
            parts["SSD"] += f" ({_gb(self.advice.chosen.read_per_token)})"
        filled = plan.other_nbytes + slots * facts.slot_nbytes
        most, E = plan.fits(machine.most.some), plan.num_experts
        held = f"{slots} of each layer's {E} experts ({_gb(slots * facts.slot_nbytes)})"
        held += ", the others stay on the SSD" if slots < E else ""
        if slots < most:
            held += f"; {most} would fit and gain little" + " for the risk" * machine.is_mac
        rows = {
            self.name: f"{_gb(facts.checkpoint_nbytes)} on disk; each token needs "
            f"{_gb(facts.active_nbytes)} of it",
            "in memory": held,
            "also there": f"{_gb(plan.other_nbytes)} for the rest of the model, a context of "
            "4,096 tokens and the program",
            **(_left_free(machine, filled) if machine.is_mac else {}),
            "speed": f"{rough(speed)} tok/s, likely {range_text(speed, self.spread)}: {self.near}",
            "a token": f"{rough(1e3 / speed)} ms: " + ", ".join(map(" ".join, parts.items())),
            "bottleneck": self.binds,
            "first token": f"after {rough(first_s)} to {rough(last_s)} s, for a prompt of {prompt} "
            "tokens and with none of the model in memory yet",
            **more,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows.items())


def forecast(
    name: str,
    machine: Machine,
    bits: int = synthesize.BITS,
    top_k: int | None = None,
    slots: int | None = None,
) -> Forecast:
    """Forecast a published model on a machine; defaults: the model's top-k, the plan's slots."""
    plan = _fitting(name, machine, bits, top_k)
    facts, slots = plan.facts, slots or plan.slots
    held = plan.other_nbytes + slots * facts.slot_nbytes  # may be more than fits
    memory, trace = max(machine.memory_nbytes, held), typical_trace(facts, TOKENS)
    costs = machine.costs(facts, held)
    found = advice.advise(plan, memory, trace, costs, slots=[slots], policy="lru")
    return Forecast(f"{name}, {bits} bits", plan, machine, found)


def _fitting(name, machine, bits, top_k=None):
    """Plan a published model; raise ValueError if it does not fit into the machine's memory."""
    try:
        return named(name, machine.most, bits, top_k)
    except DoesNotFit as error:
        raise ValueError(
            f"{name} does not fit: even with its experts on the SSD it needs {_gb(error.nbytes)} "
            f"of memory, and of this machine's {_gb(machine.ram_nbytes)} a model may take "
            f"{_gb(machine.most.least)}. Take a machine with more memory or a smaller model."
        ) from error


def changes(name: str, of: Forecast, bits: int) -> Iterator[tuple[str, float]]:
    """Yield changes of the machine or the model, and a token's seconds with each change."""
    m, top_k = of.machine, of.plan.top_k

    def token_s(machine=m, **given):
        return forecast(name, machine, **{"bits": bits, "top_k": top_k} | given).advice.token_s

    yield "twice the memory", token_s(replace(m, ram_nbytes=2 * m.ram_nbytes))
    yield "an SSD of twice the rate", token_s(replace(m, disk_bytes_per_s=2 * m.disk_bytes_per_s))
    what = f"{'' if m.is_mac else 'cores and '}memory of twice the rate"
    yield what, token_s(replace(m, weights_bytes_per_s=2 * m.weights_bytes_per_s))
    if bits > 3:
        yield "3 bits a weight (answers change)", token_s(bits=3)
    if top_k > 4:
        yield f"top-k {top_k - 2} for {top_k} (answers change)", token_s(top_k=top_k - 2)


def this_machine(tokens: int = 12, tell: Callable | None = None) -> Machine:
    """Measure this machine's rates in about ten seconds, with a small random model."""
    if mx.cuda.is_available():
        raise ValueError(
            "plan: expected a CPU or a Mac, got a CUDA GPU, whose own memory a plan by name does "
            "not know. Give a model folder, or another machine with --ram, --ssd and --cores."
        )
    like, layers, experts = STAND_IN
    config = synthesize.CONFIGS[like]
    config = {**config, "text_config": {**config["text_config"], "num_experts": experts}}
    with temporary_folder(parent=_here()) as work:
        path = synthesize.synthesize(work / "model", like, layers, config=config, progress=False)
        costs = measure_costs(path, tokens, tell)
        return Machine.measured(costs, planned(path).facts, *_memory(), mx.metal.is_available())


def _here():
    """Return the folder whose drive is measured: the current one if writable, else another."""
    return Path.cwd() if os.access(".", os.W_OK) else Path(tempfile.gettempdir())


def _memory(ram=None):
    """Return this machine's bytes of memory (or ``ram``), and the bytes that no model may take."""
    total = ram or HERE.memory()[0]
    return total, taken_of(ram) if ram else total - memory_for_a_model()


def _unmeasured(ram=None):
    """Describe this machine without its rates, with ``ram`` bytes of memory (None: its own)."""
    total, taken = _memory(ram)
    return replace(Machine.cpu(total, 1, 1), taken_nbytes=taken, is_mac=mx.metal.is_available())


def describe(
    name: str,
    ram: float | None = None,
    ssd: float | None = None,
    chip: str | float | None = None,
    cores: int | None = None,
    bits: int = synthesize.BITS,
    prompt: int = 1000,
) -> str:
    """Say what to expect of a published model here or elsewhere (``ram`` GB, ``ssd`` GB/s).

    ``chip`` is a Mac's chip (one of ``CHIPS``), or the memory's GB/s. With ``cores``, so many CPU
    cores compute, and ``chip`` must be GB/s. Values that are None are measured on this machine.
    """
    name = one_of(CONFIGS, name, "a model folder, a downloaded Hub repository, or ")
    chip = one_of(CHIPS, chip) if isinstance(chip, str) else chip
    machine = _machine(name, bits, ram, ssd, chip, cores)
    found = forecast(name, machine, bits)
    token_s = found.advice.token_s
    times = {what: token_s / changed_s for what, changed_s in changes(name, found, bits)}
    what = max(times, key=times.get)
    drafted = token_s / sum(found.with_drafts(DRAFTS, ACCEPTED).values())
    gain = f"at most {drafted:.1f} times as fast" if drafted >= WORTH_A_LINE else "hardly faster"
    of = f"{DISK_SHARE:.0%} of the {ssd:g} GB/s given" if ssd else f"the drive of {_here()}"
    by = f" ({cores} cores{'' if chip else ' and memory that fast'})" if cores else ""
    more = {
        "helps most": f"{what}: {times[what]:.1f} times as fast"
        if times[what] >= WORTH_A_LINE
        else "nothing by much",
        "with drafts": f"{gain}, if a small draft model guesses {DRAFTS} tokens ahead and "
        f"{ACCEPTED:.0%} are right",
        "rates": f"{'estimated' if chip or cores else 'measured here'}: SSD "
        f"{_gb(machine.disk_bytes_per_s)}/s ({of}), page cache {_gb(machine.copy_bytes_per_s)}/s, "
        f"weights {_gb(machine.weights_bytes_per_s)}/s{by}; a layer takes "
        f"{machine.layer_s * 1e3:.2f} ms, and {machine.wait_s[0] * 1e3:.2f} more if it reads",
    }
    if chip or cores:
        of = "what others publish" if machine.is_mac else "two cores of a Xeon; newer ones differ"
        more["rates"] += f". They follow from {of}"
    return found.table(prompt, more)


def _machine(name, bits, ram, ssd, chip, cores):
    """Return the described machine, or this machine with its memory and SSD as given."""
    if isinstance(chip, str) and cores:
        raise ValueError(
            "plan: expected --chip or --cores, got both; with --cores, --chip takes GB/s."
        )
    if (chip or cores) and not (ram and ssd):
        raise ValueError(
            "plan: --chip and --cores describe another machine: give its --ram and --ssd, too."
        )
    rate = CHIPS.get(chip, chip or math.inf) * 1e9
    if cores:
        return Machine.cpu(ram * 1e9, ssd * 1e9, cores, rate)
    if chip:
        return Machine.mac(_ram_nbytes(ram, True), ssd * 1e9, rate)
    ram = _ram_nbytes(ram)
    if not mx.cuda.is_available():  # a model that does not fit is refused before measuring
        _fitting(name, _unmeasured(ram), bits)
    machine = this_machine()
    if ram:
        machine = replace(machine, ram_nbytes=ram, taken_nbytes=taken_of(ram))
    return replace(machine, disk_bytes_per_s=ssd * 1e9 * DISK_SHARE) if ssd else machine


def _ram_nbytes(ram, is_mac=None):
    """Return the bytes of ``ram`` GB; a Mac's are GiB (``is_mac`` None: as on this machine)."""
    is_mac = mx.metal.is_available() if is_mac is None else is_mac
    return ram and ram * (2**30 if is_mac else 10**9)


def of_folder(path: Path, ram: float | None = None, prompt: int = 1000) -> str:
    """Say what to expect of a model on disk, measured here, and which settings were compared."""
    ram = _ram_nbytes(ram)
    most = _unmeasured(ram).most if ram else None
    # Too little memory is refused here, before anything is measured.
    plan = plan_of(ModelFacts.of(path, CONFIG), CONFIG, most=most)
    memory, slots = plan.memory_nbytes, [plan.slots]
    costs, trace = measure_costs(path), typical_trace(plan.facts, TOKENS)
    best = advice.advise(plan, memory, trace, costs)
    chosen = advice.advise(plan, memory, trace, costs, slots=slots)
    machine = Machine.measured(costs, plan.facts, *_memory(ram), mx.metal.is_available())
    found = Forecast(path.name, plan, machine, chosen, OWN_SPREAD, OWN_NEAR)
    hint = repack_hint(path, plan)
    compared = "What a replay finds best of the settings that can be chosen by hand,"
    return f"{plan}\n{found.table(prompt, {'layout': hint} if hint else {})}\n{compared}\n{best}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say how fast a model decodes, and why. A model folder is measured on this machine for "
        "some ten seconds, and a trace is replayed with what was found. A model by name is planned "
        "from its published shapes, before you download it: for this machine, or for another one, "
        "which --ram, --ssd and --chip (or --cores) describe."
    )
    add = parser.add_argument
    known = f"a model folder, a downloaded Hub repository, or one of {', '.join(CONFIGS)}"
    add("model", type=not_empty, metavar="MODEL", help=known)
    memory = (
        "the machine's memory, of which the system keeps a quarter, at most 4 GB; for a Mac the "
        "plan says how much is left free (default: what is available)"
    )
    add("--ram", type=gigabytes(1), metavar="GB", help=memory)
    rate = "the rate of the SSD with the model (default: measured on the drive of this folder)"
    add("--ssd", type=gigabytes(0.01), metavar="GB/s", help=rate)
    what = "a Mac's chip, such as 'M5 Pro', or the GB/s of the memory, also beside --cores"
    add("--chip", type=_chip, metavar="CHIP", help=what)
    add("--cores", type=at_least(1, 1024), metavar="N", help="cores of a machine without a GPU")
    bits = {"type": int, "choices": (2, 3, 4, 6, 8), "metavar": "N", "default": synthesize.BITS}
    add("--bits", **bits, help="bits of a weight: 2, 3, 4, 6 or 8 (default: %(default)s)")
    what = "tokens of a prompt; the plan says how soon its first token follows"
    add_number(parser, "--prompt", 1000, what, at_least(1, 10**6))


def run(args: argparse.Namespace) -> None:
    path = None
    if args.model not in CONFIGS:
        try:
            path = folder(args.model, download=False)
        except CheckpointError:  # a model that is not here is planned by its name
            if os.path.lexists(args.model):
                raise
    if path is None:
        given = {name: getattr(args, name) for name in ("ram", "ssd", "chip", "cores")}
        print(describe(Path(args.model).name, **given, bits=args.bits, prompt=args.prompt))
        return
    only = [flag for flag in ("--ssd", "--chip", "--cores") if getattr(args, flag[2:]) is not None]
    if only:
        args.error(
            f"{' and '.join(only)}: expected a model by name (see --help), got {args.model}, "
            "which is on this disk and measured on this machine"
        )
    print(of_folder(path, args.ram, args.prompt))


def _chip(text):
    """Parse a chip's name, or a number of GB/s."""
    try:
        return gigabytes(1)(text)
    except argparse.ArgumentTypeError:
        return one_of(CHIPS, text, "the GB/s of its memory, or ")


def _left_free(machine, filled):
    """Say how much of a Mac's memory stays free and why, and which GPU limit a plan needs."""
    ram, limit = machine.ram_nbytes, gpu_limit(machine.ram_nbytes)
    own = f"sudo sysctl iogpu.wired_limit_mb={int(filled * 1.05) >> 20}"
    wired = f"the GPU may use {_gb(limit)}, which is enough: iogpu.wired_limit_mb stays as it is"
    if filled > limit:
        wired = (
            f"the GPU may use {_gb(limit)}, which is too little: `{own}` allows more until the "
            "next start, which is your own decision"
        )
    return {"left free": f"{_gb(ram - filled)} of {_gb(ram)} {WHY_LEFT}", "GPU": wired}


def _gb(nbytes):
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def range_text(tok_s: float, spread: float = FORMULA_SPREAD) -> str:
    """Write the range in which a speed probably lies."""
    return f"{rough(tok_s / spread)} to {rough(tok_s * spread)}"


def rough(number: float) -> str:
    """Write a number of a forecast with about two digits."""
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}" if number >= 1 else f"{number:.2f}"
