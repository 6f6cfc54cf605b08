"""``python -m moelab plan``: how fast would a model decode on this machine, or on another one?

A model that is on disk is measured here, and ``advise`` decides. A model that is not there is known
by its published configuration, another machine by a few numbers: ``replay.machine`` says what its
tokens cost, and the same replay decides.
"""

import argparse
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from ... import synthesize
from ...commands.argument_types import between, not_empty, positive
from ...configs import CONFIGS
from ...memory import memory_available
from ...replay import advice
from ...replay.advice import Advice
from ...replay.machine import CHIPS, DISK_SHARE, Machine, left_of, typical_trace
from ...replay.sizes import ModelSizes
from ..machine import card
from ..models import named_sizes
from .advise import TOKENS, advise
from .costs import measure_costs
from .share import of_such_a_machine

# Four of five sources that the formula was not fitted to lie within this factor of it
# (data/results/cpu_planned_published.json).
FORMULA_SPREAD = 1.5
NUM_SLOTS = 8  # numbers of slots to choose from
WORTH = 1.2  # a change that makes a token less than this times as fast is not told
STAND_IN = "qwen3.5-35b-a3b", 4, 32  # of whose layers, how many, and experts in each


@dataclass(frozen=True)
class Forecast:
    """What to expect of a model on a machine.

    Attributes:
        name (str): The model.
        bits (int): Of a weight.
        sizes (ModelSizes): The model's.
        machine (Machine): The machine.
        advice (Advice): How to stream it, and a token's time.
    """

    name: str
    bits: int
    sizes: ModelSizes
    machine: Machine
    advice: Advice

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of a token by what they go to."""
        found, machine, layers_s = self.advice.chosen, self.machine, self._layers_s
        reads_s = found.parts_s["copies"] + found.parts_s["disk"]
        ssd_s = found.read_per_token / machine.disk_bytes_per_s if reads_s else 0.0
        copies_s = found.copied_per_token / machine.copy_bytes_per_s if reads_s else 0.0
        return {
            "SSD": ssd_s,
            "page cache": copies_s,
            "waiting for both": reads_s - ssd_s - copies_s,
            "weights": found.parts_s["fixed"] - layers_s + found.parts_s["experts"],
            "layers": layers_s,
        }

    @property
    def binds(self) -> str:
        """What most of a token's time goes to."""
        parts = self.parts_s
        missing_s = parts["SSD"] + parts["page cache"] + parts["waiting for both"]
        rate = "the memory's rate" if self.machine.is_mac else "the cores"
        causes = {
            "experts that are not in memory": missing_s,
            rate: parts["weights"],
            "what each layer takes anyway": parts["layers"],
        }
        return max(causes, key=causes.get)

    @property
    def _layers_s(self):
        machine, all_held = self.machine, self.advice.config.slots == self.sizes.E
        held_s = machine.held_layer_s if all_held else math.nan
        return self.sizes.layers * (machine.layer_s if math.isnan(held_s) else held_s)

    def prompt_s(self, tokens: int) -> tuple[float, float]:
        """As ``Machine.prompt_s``, of a prompt of so many tokens."""
        return self.machine.prompt_s(self.sizes, tokens, self.advice.config.slots)

    def __str__(self):
        sizes, slots, machine = self.sizes, self.advice.config.slots, self.machine
        speed, token_s = 1 / self.advice.token_s, self.advice.token_s
        parts = ", ".join(f"{name} {s * 1e3:.0f}" for name, s in self.parts_s.items())
        held = f"({_gb(slots * sizes.slot_nbytes)})"
        most = sizes.fits(machine.model_nbytes)
        lines = [
            f"{self.name}, {self.bits} bits: {_gb(sizes.checkpoint_nbytes)}. A token needs "
            f"{_gb(sizes.active_nbytes)} of it",
            f"  memory holds all {sizes.E} experts of each layer {held}"
            if slots == sizes.E
            else f"  runs: memory holds {slots} of the {sizes.E} experts of each layer {held}, the "
            "SSD has all of them",
            f"  {_gb(sizes.other_nbytes)} more for the rest of the model, a context of 4,096 "
            "tokens and the program",
            f"  {speed_text(speed)} tok/s; {range_text(speed)} is within a factor of "
            f"{FORMULA_SPREAD:g}, as four of five published sources are",
            f"  a token takes {token_s * 1e3:.0f} ms: {parts}",
            f"  most of it: {self.binds}",
        ]
        if slots < most:
            lines.append(
                f"  {most} experts of each layer would fit; the system's page cache makes as good "
                "use of the memory"
            )
        elif machine.is_mac and slots < sizes.E:
            swapped_s = token_s + sizes.token_nbytes / machine.disk_bytes_per_s
            lines.append(
                f"  with more than {slots} the system would swap: {speed_text(1 / swapped_s)} "
                "tok/s or less"
            )
        return "\n".join(lines)


def forecast(
    name: str,
    machine: Machine,
    bits: int = synthesize.BITS,
    top_k: int | None = None,
) -> Forecast:
    """What to expect of a published model on a machine.

    Args:
        name (str): A key of ``configs.CONFIGS``.
        machine (Machine): Measured, or by its numbers.
        bits (int): Of a weight.
        top_k (int, optional): Experts per token. Default: the model's.

    Raises:
        ValueError: If the model does not fit with K slots.
    """
    try:
        sizes = named_sizes(name, machine.model_nbytes, bits, top_k)
    except ValueError as error:
        needs = re.search(r"expected at least ([\d.]+ [GM]B)", str(error))
        if not needs:
            raise
        whose = "lets its GPU have" if machine.is_mac else "leaves a model"
        raise ValueError(
            f"{name} does not fit: it needs {needs[1]} beside the SSD, and this machine of "
            f"{_gb(machine.ram_nbytes)} {whose} {_gb(machine.model_nbytes)}. Take more memory or a "
            "smaller model."
        ) from error
    most, costs = sizes.fits(machine.model_nbytes), machine.costs(sizes)
    slots = np.unique(np.linspace(sizes.K, most, NUM_SLOTS).astype(int)).tolist()
    if most == sizes.E:
        slots, costs = [most], costs.without_reads()
    trace = typical_trace(sizes, TOKENS)
    found = advice.advise(
        sizes, machine.memory_nbytes, trace, costs, slots=slots, policies=("lru",)
    )
    return Forecast(name, bits, sizes, machine, found)


def changes(of: Forecast) -> Iterator[tuple[str, Forecast]]:
    """Changes of the machine or the model, and what to expect with each."""
    m, top_k = of.machine, of.sizes.K
    given = {"bits": of.bits, "top_k": top_k}
    yield "twice the memory", forecast(of.name, replace(m, ram_nbytes=2 * m.ram_nbytes), **given)
    faster = replace(m, disk_bytes_per_s=2 * m.disk_bytes_per_s)
    yield "an SSD of twice the rate", forecast(of.name, faster, **given)
    what = "memory of twice the rate" if m.is_mac else "twice the cores"
    faster = replace(m, weights_bytes_per_s=2 * m.weights_bytes_per_s)
    yield what, forecast(of.name, faster, **given)
    if of.bits > 3:
        yield "3 bits a weight (another text)", forecast(of.name, m, **given | {"bits": 3})
    if top_k > 4:
        fewer = f"top-k {top_k - 2} for {top_k} (another text)"
        yield fewer, forecast(of.name, m, **given | {"top_k": top_k - 2})


def this_machine() -> Machine:
    """This machine's rates, measured in about ten seconds with a small random model.

    Raises:
        OSError: If there is no room for it.
        ValueError: On a CUDA GPU, whose own memory a plan by name does not know.
    """
    if mx.cuda.is_available():
        raise ValueError(
            "plan: expected a CPU or a Mac, got a CUDA GPU, whose own memory a plan by name does "
            "not know. Give a model folder, or another machine with --ram, --ssd and --cores."
        )
    like, layers, experts = STAND_IN
    config = synthesize.CONFIGS[like]
    config = {**config, "text_config": {**config["text_config"], "num_experts": experts}}
    with tempfile.TemporaryDirectory() as work:
        path = synthesize.synthesize(
            Path(work) / "model", like, layers, config=config, progress=False
        )
        costs, sizes = measure_costs(path), ModelSizes.of(path)
    return Machine.measured(costs, sizes, memory_available())


def describe(
    name: str,
    ram: float | None = None,
    ssd: float | None = None,
    chip: str | None = None,
    cores: int | None = None,
    bits: int = synthesize.BITS,
    prompt: int = 1000,
) -> str:
    """What to expect of a published model on this machine, or on another one.

    Args:
        name (str): A key of ``configs.CONFIGS``.
        ram (float, optional): GB of memory. Default: this machine's.
        ssd (float, optional): GB/s of the SSD. Default: this machine's, measured.
        chip (str, optional): A Mac's, of ``CHIPS``. Default: this machine's rates, measured.
        cores (int, optional): Of a computer whose CPU computes, in place of a chip.
        bits (int): Of a weight.
        prompt (int): Tokens of the prompt whose first token is timed.

    Raises:
        ValueError: If it does not fit, or there are a chip and cores, or one without ram and ssd.
    """
    if chip and cores:
        raise ValueError("plan: expected a chip or cores, got both: a GPU computes, or a CPU.")
    if (chip or cores) and not (ram and ssd):
        raise ValueError("plan: a chip or cores are another machine's: give its ram and ssd, too.")
    if chip:
        machine = Machine.mac(ram * 1e9, ssd * 1e9, CHIPS[chip] * 1e9)
    elif cores:
        machine = Machine.cpu(ram * 1e9, ssd * 1e9, cores)
    else:
        machine = this_machine()
        machine = replace(machine, ram_nbytes=ram * 1e9) if ram else machine
        machine = replace(machine, disk_bytes_per_s=ssd * 1e9 * DISK_SHARE) if ssd else machine
    found = forecast(name, machine, bits)
    least, most = found.prompt_s(prompt)
    better = {what: found.advice.token_s / other.advice.token_s for what, other in changes(found)}
    what = max(better, key=better.get)
    helps = (
        f"{what}, {better[what]:.1f} times as fast" if better[what] >= WORTH else "nothing by much"
    )
    sent = []
    if chip:
        mac = {"cpu": f"Apple {chip}", "gpu": f"Apple {chip}", "memory_nbytes": ram * 1e9}
        sent = of_such_a_machine(found.sizes, mac)
    elif not (ram or ssd or cores):
        sent = of_such_a_machine(found.sizes, card())
    return "\n".join(
        (
            str(found),
            *(f"  measured on such a machine, which counts more: {line}" for line in sent),
            f"  first token of a prompt of {prompt} tokens: {least:.0f} to {most:.0f} s, the file "
            "not in memory before",
            f"  what would help most: {helps}",
            f"{'estimated' if chip or cores else 'with rates measured here'}: SSD "
            f"{_gb(machine.disk_bytes_per_s)}/s{f' ({DISK_SHARE:.0%} of {ssd:g})' if ssd else ''}, "
            f"page cache {_gb(machine.copy_bytes_per_s)}/s, weights "
            f"{_gb(machine.weights_bytes_per_s)}/s, a layer {machine.layer_s * 1e3:.2f} ms, one "
            f"that reads {machine.wait_s[0] * 1e3:.2f} ms more",
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Say how fast a model decodes, and why. A model folder is measured on this machine for "
        "some ten seconds, and a trace is replayed with what was found. A model by name is planned "
        "from its published shapes, before you download it: for this machine, or for another one, "
        "which --ram, --ssd and --chip (or --cores) describe."
    )
    parser.add_argument(
        "model",
        type=not_empty,
        metavar="MODEL",
        help=f"a model folder, a Hub repository, or one of {', '.join(CONFIGS)}",
    )
    parser.add_argument(
        "--ram",
        type=between(1),
        metavar="GB",
        help="the machine's memory, of which the system keeps a quarter, at most 4 GB (default: "
        "what is available)",
    )
    parser.add_argument(
        "--ssd", type=between(0.01), metavar="GB/s", help="the SSD's rate (default: measured)"
    )
    parser.add_argument("--chip", choices=CHIPS, metavar="CHIP", help="a Mac's, such as 'M5 Pro'")
    parser.add_argument("--cores", type=positive, metavar="N", help="of a machine without a GPU")
    parser.add_argument(
        "--bits",
        type=int,
        choices=(2, 3, 4, 6, 8),
        metavar="N",
        default=synthesize.BITS,
        help="of a weight: 2, 3, 4, 6 or 8 (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt",
        type=positive,
        metavar="N",
        default=1000,
        help="tokens of the prompt whose first token is timed (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """The command."""
    if args.model in CONFIGS:
        given = {name: getattr(args, name) for name in ("ram", "ssd", "chip", "cores")}
        print(describe(args.model, **given, bits=args.bits, prompt=args.prompt))
        return
    only = [flag for flag in ("--ssd", "--chip", "--cores") if getattr(args, flag[2:]) is not None]
    if only:
        args.error(
            f"{' and '.join(only)}: expected a model by name (see --help), got {args.model}: a "
            "folder is measured on this machine"
        )
    print(advise(args.model, args.ram and left_of(args.ram * 1e9)))


def _gb(nbytes):
    return f"{nbytes / 1e9:.1f} GB"


def range_text(tok_s: float) -> str:
    """Where a speed probably lies."""
    return f"{speed_text(tok_s / FORMULA_SPREAD)} to {speed_text(tok_s * FORMULA_SPREAD)}"


def speed_text(tok_s: float) -> str:
    """Tokens a second, as exactly as a forecast is."""
    return f"{tok_s:.0f}" if tok_s >= 10 else f"{tok_s:.1f}" if tok_s >= 1 else f"{tok_s:.2f}"
