"""Make the README's blocks of numbers from the records; ``make numbers`` writes them anew."""

import re
from pathlib import Path

from moelab.lab.experiments.plan import FORMULA_NEAR, FORMULA_SPREAD, rough
from moelab.lab.records import m, paired, q, read, values

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- numbers: make numbers -->\n", "<!-- end -->\n"
PROGRAMS = ("moelab", "llama.cpp", "mlx-vlm", "mlx-lm")


def speed(name, variant):
    """Write a variant's median tok/s; ``killed`` where the system ended the variant."""
    found = values(read(name), variant, "tok_s")
    if found.empty:
        return "killed"
    return m(found, ".2f" if found.median() < 1 else ".1f" if found.median() < 10 else ".0f")


def times(name, slow, fast, form=".2g"):
    """Write how many times as fast ``fast`` decodes as ``slow``, by round."""
    return m(paired(read(name), slow, fast), form)


def against(memories):
    """Tabulate each program's speed; ``memories`` maps a memory to a record and its limit there."""
    return table(
        ["memory", *PROGRAMS],
        *(
            [said, *(speed(name, f"{program}, {limit}") for program in PROGRAMS)]
            for said, (name, limit) in memories.items()
        ),
    )


def table(head, *rows):
    """Write rows of cells in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def planned():
    """Write the block of plans for Macs."""
    plans = read("cpu_planned_macs")
    macs = plans.variant.unique()

    def cell(plan):
        held = "all" if plan.slots == plan.of else f"{plan.slots / plan.of:.0%}"
        return f"{rough(plan.plan_tok_s)} ({held})"

    rows = (
        [name, *map(cell, rows.itertuples())] for name, rows in plans.groupby("model", sort=False)
    )
    return f"""\
{table(["4 bits, planned tok/s", *macs], *rows)}

In brackets: the share of the experts that is in memory. The speeds are likely within a factor of
{FORMULA_SPREAD}: {FORMULA_NEAR}
([record](data/results/cpu_planned_macs.json)).
"""


def numbers():
    """Write the block of what was measured."""
    full, half, host = "cpu_against_35b_full", "cpu_slots_956", "cuda_host_routed_35b"
    auto, plain = "fused/slots=auto/context=512", "fused/slots=48"
    all_layers = {f"{gb} GB": (full, f"{gb}000 MB") for gb in (4, 8, 15)}
    four_layers = {
        "a quarter of the file": ("cpu_against_35b_478", "478 MB"),
        "half of it": ("cpu_against_35b_956", "956 MB"),
        "no limit": ("cpu_against_35b", "no limit"),
    }
    runs = read(full)["round"].nunique()
    least, free = (
        times(full, f"llama.cpp, {limit}", f"moelab, {limit}") for limit in ("4000 MB", "no limit")
    )
    later = [speed("cpu_slots_35b_full", f"{auto}, {gb}000 MB") for gb in (4, 8, 15)]
    cached = "956 MB, page cache"
    past = times(half, f"{auto}, {cached}", f"{auto}, 956 MB, past the page cache", ".2f")
    more = times(half, f"fused/slots=8, {cached}", f"fused/slots=54, {cached}", ".2f")
    kernels = times("cpu_ladder_35b", "resident/kernels=mlx", "resident")
    cpu = read("cpu_ladder_35b").attrs["machine"]["cpu"]
    slots, copied = (
        times(host, "resident", f"fused/{way}slots=64", ".2f") for way in ("", "source=host/")
    )
    block, here, looked_up = (
        q(paired(read(name), plain, f"{plain}, 7 drafts"))
        for name in ("cuda_drafts_dflash", "cpu_drafts_dflash", "cpu_drafts_lookup")
    )
    ours, theirs = "moelab/source=host/slots=64, no limit", "llama.cpp/experts=cpu, no limit"
    on_host = times("cuda_against_35b", ours, theirs)
    return f"""\
40 layers of Qwen3.5-35B-A3B's shapes in 4 bits, 19.5 GB, in tok/s ([records](data/results)):

{against(all_layers | {"24 GiB, no limit": (full, "no limit")})}

In 4 GB moelab decodes {least} times as fast as llama.cpp, without a limit {free} times. These are
medians of {runs} runs over 8 early tokens on two cores of a Xeon, the file not in memory before
(*cold*), the weights random, each token's experts those that the
trained `tiny-moe` chose. *Killed*: out of memory. moelab's slots are still filling: after 96 tokens
it decodes {later[0]}, {later[1]} and {later[2]} tok/s in 4, 8 and 15 GB.

Four such layers, 1.9 GB, after 32 tokens:

{against(four_layers)}

**Which one should I use?** If the model does not fit in memory: moelab. If it fits, on a CPU:
measure. If it fits in the memory of a GPU's host: llama.cpp, which with experts on the CPU decodes
{on_host} times as fast as moelab with its slots filled from there (H100, 16 cores;
[09](notebooks/09_against_others.ipynb)).

What decides it, for these four layers and, last, `tiny-moe`:

- **Where reads go.** In memory for half of the file, slots filled past the page cache decode
  {past} times as fast as filled through it. Through it, 54 slots decode {more} times as fast as 8
  ([03](notebooks/03_page_cache.ipynb)).
- **A CPU's kernels.** With every expert in memory (*resident*; random routing) moelab decodes
  {kernels} times as fast as mlx-lm on an {cpu}
  ([02](notebooks/02_expert_streaming.ipynb)).
- **A GPU's reads.** With a quarter of the experts in slots, an H100 decodes {slots} times as fast
  as resident if the others come from the file in the page cache, {copied} times if moelab keeps
  them in the host's memory ([02](notebooks/02_expert_streaming.ipynb)).
- **A draft's time.** `tiny-moe` (greedy, 48 of 64 experts in slots) decodes with a block draft's 7
  guesses {block} times as fast as without on an H100, where most texts then
  differ, because of rounding. On two CPU cores it is {here}, and
  {looked_up} with 7 guesses looked up in the text: median [quartiles]
  ([07](notebooks/07_speculative_streaming.ipynb)).
"""


def filled(text):
    """Fill the README with fresh blocks."""
    made = iter((planned(), numbers()))
    return re.sub(f"(?s){BEGIN}.*?{END}", lambda _: BEGIN + next(made) + END, text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
