"""Make the README's blocks of numbers from the records; ``make numbers`` writes them anew."""

import re
from pathlib import Path

import published

import moelab
from moelab.lab.experiments.plan import FORMULA_NEAR, FORMULA_SPREAD, rough
from moelab.lab.machine import engine_of
from moelab.lab.records import paired, read, same_tokens, span, values

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- numbers: make numbers -->\n", "<!-- end -->\n"
PROGRAMS = {"moelab, repacked": "moelab, repacked", "moelab, as published": "moelab"}
PROGRAMS |= {"llama.cpp": "llama.cpp", "mlx-lm": "mlx-lm"}


def speed(name, variant, column="tok_s"):
    """Write the median and interval of a variant's column, or ``killed`` if the system ended it."""
    found = values(read(name), variant, column)
    if found.empty:
        return "killed"
    return span(found, ".2f" if found.median() < 1 else ".1f" if found.median() < 50 else ".0f")


def times(name, slow, fast, form=".2f"):
    """Write the speed of ``fast`` divided by the speed of ``slow``, paired by round."""
    return span(paired(read(name), slow, fast), form)


def host(name):
    """Write which machine made a record, and whether its engine was an earlier one."""
    of = read(name).attrs["machine"]
    age = " (an earlier engine)" if engine_of(of) < moelab.ENGINE else ""
    return f"{of['cores']} cores {'with' if of['gpu'] else 'of'} an {of['gpu'] or of['cpu']}{age}"


def against(name, memories, column="tok_s"):
    """Make a table of a record's programs; ``memories`` maps a row's label to a limit."""
    rows = (
        [said, *(speed(name, f"{peer}, {limit}", column) for peer in PROGRAMS.values())]
        for said, limit in memories.items()
    )
    return table(["memory", *PROGRAMS], *rows)


def table(head, *rows):
    """Write rows of cells in Markdown; ``/`` replaces ``|``, which would end a cell."""
    rows = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(str(c).replace('|', '/') for c in row)} |" for row in rows)


def planned():
    """Write the block of plans for Macs."""
    plans = published.macs()
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
([12](notebooks/12_your_machine.ipynb)).
"""


def numbers():
    """Write the block of measured numbers."""
    full, half = "cpu_against_35b_full", "cpu_slots_956"
    auto, plain = "fused/slots=auto/context=512/prefetch=none", "fused/slots=48"
    memories = {f"{gb} GB": f"{gb}000 MB" for gb in (4, 8, 15)} | {"24 GiB, all": "no limit"}
    record = read(full)
    nbytes = record[record.peer == "moelab"].file_nbytes.max()
    runs, prompt = record["round"].nunique(), record.prompt_tokens.max()
    warm, timed, most_s = (
        record.attrs["settings"][k] for k in ("warmup_tokens", "tokens", "most_s")
    )
    least, free = (
        times(full, f"llama.cpp, {limit}", f"moelab, repacked, {limit}", ".2g")
        for limit in ("4000 MB", "no limit")
    )
    cached = "956 MB, page cache"
    past = times(half, f"{auto}, {cached}", f"{auto}, 956 MB, past the page cache")
    more = times(half, *(f"fused/slots={n}/prefetch=none, {cached}" for n in (8, 54)))
    kernels = times("cpu_ladder_35b", "resident/kernels=mlx", "resident", ".0f")
    slots = times("cuda_timeline_35b", "resident", "fused")
    copied = times("cuda_timeline_35b", "resident", "fused/source=host")
    drafts = "cuda_drafts_dflash", "cpu_drafts_dflash", "cpu_drafts_lookup"
    block, here, looked_up = (times(name, plain, f"{plain}, 7 drafts") for name in drafts)
    gpu, cpu_alone, _ = (speed(name, plain) for name in drafts)
    same, texts = same_tokens(read(drafts[0]), plain)[f"{plain}, 7 drafts"]
    ours, theirs = "moelab/source=host/slots=64, no limit", "llama.cpp/experts=cpu, no limit"
    on_host = times("cuda_against_35b", ours, theirs, ".1f")
    return f"""\
40 layers of Qwen3.5-35B-A3B's shapes in 4 bits, {nbytes / 1e9:.1f} GB, in tok/s, median [interval]
([record](data/results/{full}.json)):

{against(full, memories)}

In 4 GB moelab decodes {least} times as fast as llama.cpp, without a limit
{free} times. Each program ran {runs} times, in turn, on {host(full)}. The file
was not in memory before (*cold*). A run reads {prompt:.0f} tokens of a prompt and {warm} tokens to
warm up. Then it is timed for {timed} tokens. Warm-up and timing each end after {most_s} s at most.
*Killed*: out of memory. The weights are random, and each token's experts are those that the trained
`tiny-moe` chose. So moelab's early guesses of experts are always right here. With a trained model
they are not ([04](notebooks/04_prefetch.ipynb)). mlx-vlm needs a second copy on disk; only
[09](notebooks/09_against_others.ipynb) has it, with four layers.

Seconds to the first token:

{against(full, memories, "prefill_s")}

**Which one should I use?** If the model does not fit in memory: moelab. If it fits, on a CPU:
measure. If it fits in the memory of a GPU's host: llama.cpp. With experts on the CPU llama.cpp
decodes {on_host} times as fast as moelab whose slots are filled from the host's memory, on
{host("cuda_against_35b")} ([09](notebooks/09_against_others.ipynb)).

What decides the speed? The first three points are about four such layers (1.9 GB), the last one
about `tiny-moe`:

- **Where reads go.** With memory for half of the file, slots filled past the page cache decode
  {past} times as fast as slots filled through it. Filled through it, 54 slots
  decode {more} times as fast as 8, on {host(half)}. Nothing was read early
  ([03](notebooks/03_page_cache.ipynb)).
- **A CPU's kernels.** With every expert in memory (*resident*; random routing) moelab decodes
  {kernels} times as fast as mlx-lm on {host("cpu_ladder_35b")}
  ([02](notebooks/02_expert_streaming.ipynb)).
- **A GPU's reads.** With a quarter of the experts in slots, {host("cuda_timeline_35b")} decode
  {slots} times as fast as resident if the other experts come from the file in the
  page cache, {copied} times if moelab keeps them in the host's memory
  ([02](notebooks/02_expert_streaming.ipynb)).
- **A draft's time.** `tiny-moe` decodes greedy text with 48 of 64 experts in slots. On
  {host(drafts[0])} it decodes {gpu} tok/s. A block draft's 7 guesses
  make it {block} times as fast, and {texts - same} of {texts} texts differ, because of rounding. On
  {host(drafts[1])} it decodes {cpu_alone} tok/s. The same guesses
  make it {here} times as fast, 7 guesses looked up in the text {looked_up} times
  ([07](notebooks/07_speculative_streaming.ipynb)).
"""


def filled(text):
    """Return the README's text with fresh blocks of numbers."""
    made = iter((planned(), numbers()))
    return re.sub(f"(?s){BEGIN}.*?{END}", lambda _: BEGIN + next(made) + END, text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
