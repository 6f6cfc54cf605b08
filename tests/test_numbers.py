"""Numbers in prose follow from records.

A number with an expression behind it (``moelab.lab.cite``) is what a fresh fill gives. The others:
``PASSAGES`` lists the parts of documents that are held to that: the README's findings and the page
of the records. An entry is a piece of the text with ``{}`` for every number, and a function that
reads these numbers from the records, formatted as in the text. A test fails when text and record
part, and when a passage has a number that no entry covers. ``STATED`` holds the notebooks to the
same: every number of an opening (but for how long the notebook runs) and of a takeaway, and some of
what their sections say of records.
"""

import json
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest

from moelab import DATA, StreamConfig, Trace, footprint
from moelab.lab import cite
from moelab.lab.experiments import (
    dispatch,
    faults,
    page_cache,
    rollback,
    several_machines,
    top_k,
)
from moelab.lab.experiments import sweep as sweeps
from moelab.lab.plots.pages import summary
from moelab.lab.records import PUBLISHED, recorded
from moelab.replay import locality
from moelab.speculation.policy import Policy
from moelab.speculation.rollback import STATES_NBYTES

ROOT = DATA.parent
NOTEBOOKS = ROOT / "notebooks"
TINY_MOE = DATA / "models" / "tiny-moe"
NUMBER = re.compile(r"(?<![\w.:/-])-?\d+(?:[.,]\d+)*(?!\w)")  # not in a name: H200, 35B, top-6
MEMORY = 1_500_000_000  # bytes: the larger limit of the sweep of notebook 03
FINE, LEFT = "nothing wrong", "rejected tokens left in the state"  # in cpu_suspects
MOE, BIG = "cpu_prefetch_tiny_moe", "cpu_prefetch_35b"
LAYOUTS = ("as shipped", "packed")  # in both
ENGINE = "cuda_h200_engine"  # the run of today's engine on a GPU
ROUTING_READ = "every layer's routing read"  # in cuda_h200


def span(low, high, form=".2f"):
    return f"[{low:{form}}, {high:{form}}]"


def quartiles(samples, form=".2f", scale=1.0):
    """``median [p25, p75]`` of samples, or of a record's summary of them."""
    if isinstance(samples, dict):
        low, mid, high = (samples[key] for key in ("p25", "median", "p75"))
    else:
        low, mid, high = np.percentile(samples, (25, 50, 75))
    return f"{mid * scale:{form}} {span(low * scale, high * scale, form)}"


def median(samples, form, scale=1.0):
    return quartiles(samples, form, scale).partition(" ")[0]


# The records, read


def training(model):
    return json.loads((DATA / "models" / model / "training.json").read_text())


def ranks_runs(n, rate=None):
    runs = recorded("cpu_ranks_35b")["runs"]
    assert len({tuple(each["tokens"]) for run in runs for each in run["each"]}) == 1
    return [run["each"] for run in runs if (run["ranks"], run["rate"]) == (n, rate)]


def ranks_row(rate):
    """Milliseconds a token of 1, 2 and 4 ranks with SSDs of so many bytes a second; the gains."""
    each = [np.array([e[0]["step_s"] for e in ranks_runs(n, rate)]) for n in (1, 2, 4)]
    ms = (quartiles(s.ravel(), ".1f", 1e3) for s in each)
    return *ms, *(quartiles(each[0].sum(1) / more.sum(1)) for more in each[1:])


def ranks_settings():
    made, each = recorded("cpu_ranks_35b"), ranks_runs(2)[0]
    assert each[0]["experts"] == each[1]["experts"] and made["limit_nbytes"] == 1e9
    counts = (ranks_runs(n)[0][0]["experts"] for n in (2, 1, 4))
    return made["slots"], 1000, *counts


def ranks_timed():
    runs = ranks_runs(1)
    return len(runs), len(runs[0][0]["step_s"])


def ranks_exchange():
    """Samples with two ranks and with four; the share of the gathers in a token of 4 layers."""
    made = recorded("cpu_ranks_exchange")["s"]
    token_s = np.median([each[0]["step_s"] for each in ranks_runs(2)])
    share = 4 * np.median(made["2"]["gather of 9"]) / token_s
    return len(made["2"]["sum of 1"]), len(made["4"]["sum of 1"]), 4, f"{share:.1%}"[:-1]


def ranks_joins_row(model, how):
    """ms a token and ms of a prompt, two ranks; the largest difference of a logit, 2 and 3."""
    made = recorded("cpu_ranks_joins")["models"][model]
    ways = [made[n]["ways"][how] for n in ("2", "3")]
    alone = made["1"]["ways"]["rows gathered"]
    assert all(way["text"] == alone["text"] for way in ways)
    same = [way["digest"] == alone["digest"] for way in ways]
    assert same == [how != "scores first"] * 2
    ms = (quartiles(ways[0][k], ".1f", 1e3) for k in ("token_s", "prompt_s"))
    return *ms, *(f"{way['logits']:.1e}" if way["logits"] else 0 for way in ways)


def placed(n, slots):
    """Reads waited for that a trace of other texts saves, least and most of five texts, in %."""
    names = ("code", "tests", "prose", "docs", "sampled")
    traces = {name: Trace.load(DATA / "traces" / f"{name}.npz") for name in names}
    found = several_machines.placements(traces, slots, n)
    number, trace = (np.array(found[p])[:, 0] for p in several_machines.PLACEMENTS[:2])
    saved = 1 - trace / number
    return f"{min(saved):.0%} to {max(saved):.0%}"


def several_gains():
    """Of two and four ranks at 100 MB/s, and of two with this machine's SSD."""
    two, four = (gain.partition(" ")[0] for gain in ranks_row(100e6)[3:])
    return two, four, ranks_row(None)[3].partition(" ")[0]


def copied_drafts_found():
    """The README's: drafts, speeds and equal texts with 48 slots, the policy's with 16."""
    return 7, *gpu_drafts("dflash_48_slots"), 16, *gpu_drafts("dflash_16_slots")[2:]


def exact_lengths():
    """The shortest and the longest pass of these settings."""
    sections = recorded("cuda_h200_exactness")["sections"]["exactness"].values()
    lengths = [row["T"] for rows in sections for row in rows]
    return min(lengths), max(lengths)


def agreement():
    """Layers, tokens, and the modes and types in which all logits are equal, of all."""
    sections = recorded(ENGINE)["sections"]
    made = [sections["agreement"][dtype] for dtype in ("float32", "auto")]
    (tokens,) = {m["tokens"] for m in made}
    modes = [a for m in made for a in m["modes"].values()]
    equal = sum(a["bit_for_bit"] and a["prefill_error"] == 0 for a in modes)
    return sections["checkpoint"]["layers"], tokens, equal, len(modes)


def cpu_cores():
    return [recorded("cpu_bench_35b")["machine"]["cores"]]


def drafted(record, section, variant):
    """Speed over not drafting, run by run: ``median [quartiles]``."""
    sections = recorded(record)["runs" if record.startswith("cpu_drafts") else "sections"]
    variants = sections[section]["variants"]
    plain, drafts = (
        np.array([sample["decode_s"] for sample in variants[name]]) for name in ("mlx-lm", variant)
    )
    return quartiles(plain / drafts)


def cpu_drafts(draft, *lengths, slots=(48, 16)):
    """Speeds over not drafting on the CPU, with 3 and 7 drafts and the policy; texts are equal."""
    out = []
    for n in slots:
        variants = recorded("cpu_drafts")["runs"][f"{draft}, {n} slots"]["variants"]
        assert all(run["same"] for runs in variants.values() for run in runs)
        names = lengths or ("3", "7", "auto")
        out += [drafted("cpu_drafts", f"{draft}, {n} slots", name) for name in names]
    return out


def cpu_draft_settings():
    """Tokens and runs of every comparison."""
    (settings,) = {(r["tokens"], r["runs"]) for r in recorded("cpu_drafts")["runs"].values()}
    return settings


def cpu_draft_gains():
    """Slots, drafts, speeds of tiny-dflash and lookup, with few slots, tokens, runs."""
    (trained, few), (lookup, few_lookup) = (
        cpu_drafts(draft, "7") for draft in ("tiny-dflash", "lookup")
    )
    return 48, 7, trained, lookup, 16, few, few_lookup, *cpu_draft_settings()


def equal_texts(record, section, variant):
    """How many texts of a variant are the undrafted one."""
    samples = recorded(record)["sections"][section]["variants"][variant]
    return sum(sample["same"] for sample in samples)


def gpu_drafts(section):
    """With 7 drafts a round and under the policy: the speed, and the texts that are equal."""
    return [
        read(ENGINE, section, name) for name in ("7", "auto") for read in (drafted, equal_texts)
    ]


def gpu_settings():
    """Tokens and runs of every comparison."""
    sections = recorded(ENGINE)["sections"].values()
    (settings,) = {(s["tokens"], s["runs"]) for s in sections if "variants" in s}
    return settings


def drafted_share(section):
    """Of each text under the policy, the share of tokens that rounds with drafts wrote."""
    made = recorded(ENGINE)["sections"][section]
    return [
        sum(accepted + 1 for drafted, accepted, *_ in sample["rounds"] if drafted) / made["tokens"]
        for sample in made["variants"]["auto"]
    ]


def mostly_undrafted():
    """With 48 slots, of all texts those of which drafts wrote less than half, with either draft."""
    both = [drafted_share(f"{draft}_48_slots") for draft in ("dflash", "draft")]
    (found,) = {(sum(share < 0.5 for share in shares), len(shares)) for shares in both}
    return found


def prompts(text):
    return training("tiny-dflash")["sets"][text]["texts"]


def sweep(slots, value="disk_nbytes", ahead=False, limit_nbytes=MEMORY):
    """A value of the sweep without arithmetic: the mean over tokens, of every run of a point."""
    point = (slots, limit_nbytes, ahead, "lru")
    found = [
        np.mean(sample["reads"][value])
        for sample in recorded("cpu_sweep_35b")["samples"]
        if tuple(sample[k] for k in ("slots", "limit_nbytes", "ahead", "policy")) == point
    ]
    assert found, f"no run at {point}"
    return found


def sweep_mb(*slots):
    return [median(sweep(s), ".1f", 1e-6) for s in slots]


def share_of_the_file(limit_nbytes=MEMORY):
    return f"{100 * limit_nbytes / recorded('cpu_sweep_35b')['sizes']['checkpoint_nbytes']:.0f}"


def start_here():
    """Slots, experts, and MB with those slots and with all experts of tiny-moe."""
    some, all_ = (
        footprint(TINY_MOE, StreamConfig(mode=m, slots=16)) for m in ("fused", "resident")
    )
    return 16, some.num_experts, *(f"{f.total_nbytes / 1e6:.1f}" for f in (some, all_))


def sweep_flat():
    """The fastest and slowest setting with slots and the smaller memory, in ms."""
    record, limit = recorded("cpu_sweep_35b"), 600_000_000
    slots = {s["slots"] for s in record["samples"] if s["limit_nbytes"] == limit} - {0}
    ms = [np.median(sweep(s, "token_s", limit_nbytes=limit)) * 1e3 for s in slots]
    return share_of_the_file(limit), f"{min(ms):.0f}", f"{max(ms):.0f}"


def pinned_over_slots():
    """A token's time with pinned experts of another text, over the same memory in slots."""
    record = recorded("cpu_sweep_pinned")
    times = {}
    for sample in record["samples"]:
        key = (sample["slots"], sample["pinned_by"])
        times.setdefault(key, {})[sample["round"]] = np.mean(sample["reads"]["token_s"])
    pinned, slots = times[8, "code"], times[32, ""]
    return quartiles([pinned[r] / slots[r] for r in sorted(slots)])


def pinned_sizes():
    """The limit and the file's size in MB, and the runs."""
    record = recorded("cpu_sweep_pinned")
    sizes = record["samples"][0]["limit_nbytes"], record["sizes"]["checkpoint_nbytes"]
    return *(f"{nbytes / 1e6:.0f}" for nbytes in sizes), record["runs"]


def prefetch(record, layout, name, state="cold"):
    """Speed over no prefetch in the checkpoint's own layout."""
    return quartiles(_prefetch(record, layout, name, state)["ratio"])


def _prefetch(record, layout, name, state):
    (found,) = (
        variant
        for variant in recorded(record)["variants"]
        if (variant["state"], variant["layout"], variant["prefetch"]) == (state, layout, name)
    )
    return found


def guesses_used():
    made = _prefetch("cpu_prefetch_tiny_moe", "packed", "lookahead", "cold")["per_token"]
    return f"{100 * made['prefetch_used'] / made['prefetch_issued']:.0f}"


def locality_of_traces():
    """Least and most over the traces: slots for 70% hits, and % of a token's experts used again."""
    decoded = [Trace.load(path).decode for path in sorted((DATA / "traces").glob("*.npz"))]
    held = [locality.lru_hit_rate(trace, skip=64).mean(0) for trace in decoded]
    slots = [int(np.argmax(rates >= 0.7)) for rates in held]
    last = [locality.overlap(trace)["each"].mean() for trace in decoded]
    return 70, min(slots), max(slots), *(f"{100 * share:.0f}" for share in (min(last), max(last)))


def expert_mb(record):
    return f"{recorded(record)['sizes']['expert_nbytes'] / 1e6:.1f}"


def tau(name, spread=False):
    """Tokens a round of the block draft under a fault, with its 95% interval if asked for."""
    made = recorded("cpu_suspects")["results"][name]
    return f"{made['tau']:.1f}" + spread * f" {span(made['low'], made['high'], '.1f')}"


def at_most_one(name):
    """The share of rounds that accept 0 or 1 draft, in %."""
    counts = recorded("cpu_suspects")["results"][name]["histogram"]
    return f"{100 * sum(counts[:2]) / sum(counts):.0f}"


def layer_ms(name):
    """A layer's share of a token on the H200, in ms."""
    made = recorded("cuda_h200")["sections"]
    return np.median(made["loops_of_the_checkpoint"]["timings"][name]["samples_s"]) / 8 * 1e3


def operation_us(name):
    timings = recorded("cuda_h200")["sections"]["one_operation"]["timings"]
    return median(timings[name]["samples_s"], ".0f", 1e6)


def promotion():
    """A token with one float32 scalar over one without, on the H200."""
    timings = recorded(ENGINE)["sections"]["promotion"]["timings"]
    stray, clean = (timings[n]["samples_s"] for n in ("one float32 scalar", "as it is"))
    return quartiles(np.divide(stray, clean))


# The passages

PASSAGES = {
    ("README.md", "## Five findings", "Numbers are medians"): [
        ("With {} of {} experts of each layer in memory, `tiny-moe` takes {} MB instead of {} ",
         start_here),
        ("On two CPU cores, drafting {1} tokens a round with `tiny-dflash`, {0} of 64 experts in "
         "slots, decodes {2} times as fast as not drafting; looking them up in the text, {3};",
         cpu_draft_gains),
        ("memory for {}% of the file, going from {} slots to {} takes the reads from {} MB a token "
         "to {}", lambda: (share_of_the_file(), 8, 97, *sweep_mb(8, 97))),
        ("drafting {} tokens a round with `tiny-dflash`, 48 of 64 experts in slots, decodes {} "
         "times as fast as not drafting ({} of 5 texts equals the undrafted one: that is rounding, "
         "since resident as many do); with the policy that chooses the number it is {} ({} of 5), "
         "and with {} slots {} ({} of 5).", copied_drafts_found),
    ],
    ("README.md", "## What was measured where", "## Licence"): [
        ("The recorded runs come from {} cores", cpu_cores),
        ("in passes of {} to {} tokens", exact_lengths),
    ],
    ("data/results/README.md", "## Decoding on a CPU", None): [],  # all are cited in place
}  # fmt: skip


# The notebooks: what an opening or a takeaway states, and what the sections state of records


def hits_and_error():
    """In %: the largest error of the predicted memory, hits, and hits by chance."""
    record = recorded("cpu_start_here")
    planned = record["plan"]["nbytes"]
    off = max(abs(made["held_nbytes"] / planned[s] - 1) for s, made in record["slots"].items())
    hits, chance = record["modes"]["fused"]["hit_rate"], 16 / record["plan"]["num_experts"]
    return f"{np.ceil(1000 * off) / 10:.1f}", f"{100 * hits:.0f}", f"{100 * chance:.0f}"


def published(source, *names):
    return [PUBLISHED[source][name] for name in names]


def issue_124():
    """How many times slower its MoE model was in Swift."""
    python, swift = published("issue 124", "moe, Python", "moe, Swift")
    return f"{python / swift:.1f}"


def calls_saved():
    """What PR 90's own speeds say: tok/s, the gain in % by them and as stated, us of a call."""
    buffers, stacked, stated = published(
        "PR 90", "buffers", "stacked", "stacked, by its own percentage"
    )
    us = dispatch.implied_call_us()
    gain, said = (f"{100 * (speed / buffers - 1):.1f}" for speed in (stacked, stated))
    least, most = (f"{f(us.values()):.0f}" for f in (min, max))
    return stacked, gain, buffers, said, least, most


def layers_of_the_run():
    return recorded(ENGINE)["sections"]["checkpoint"]["layers"]


def twice_the_reads():
    return f"{np.median(sweep(97)) / np.median(sweep(8)):.1f}", share_of_the_file()


def sweep_ms(*slots, ahead=False):
    form = median if ahead else quartiles
    return [form(sweep(s, "token_s", ahead=ahead), ".1f", 1e3) for s in slots]


def sweep_sizes():
    """GB on disk and of the larger limit."""
    sizes = recorded("cpu_sweep_35b")["sizes"]
    return f"{sizes['checkpoint_nbytes'] / 1e9:.1f}", f"{MEMORY / 1e9:.1f}"


def pinned_slots():
    """How many slots the pinned experts' memory would be."""
    record = recorded("cpu_sweep_pinned")
    (pinned,) = {s["pinned_nbytes"] for s in record["samples"]} - {0}
    return pinned // record["sizes"]["slot_nbytes"]


def replay_error():
    """The worst error of the replay's predictions, in %."""
    agreed = page_cache.agreement(page_cache.compare(sweeps.recorded("cpu_sweep_35b")))
    return f"{100 * agreed.worst_error:.0f}"


def tiny_prefetch(*variants, state="cold"):
    """Slots, experts and cores of the record, speeds of some variants, and its runs."""
    record = recorded(MOE)
    speeds = [prefetch(MOE, *variant, state) for variant in variants]
    return record["slots"], 64, record["machine"]["cores"], speeds, record["runs"]


def guesses():
    slots, experts, cores, speeds, _ = tiny_prefetch(
        *(("packed", name) for name in ("none", "lookahead", "oracle"))
    )
    return slots, experts, cores, *(speed.partition(" ")[0] for speed in speeds)


def guesses_with_quartiles():
    slots, experts, cores, speeds, runs = tiny_prefetch(
        *(("packed", name) for name in ("none", "lookahead", "oracle")),
        *(("as shipped", name) for name in ("lookahead", "oracle")),
    )
    return *speeds, slots, experts, cores, runs


def random_routing():
    oracles = [prefetch(BIG, layout, "oracle") for layout in LAYOUTS]
    return guesses_used(), expert_mb("cpu_sweep_35b"), *oracles, recorded(BIG)["runs"]


def copied_expert():
    """KB of an expert, GB/s of copies in memory, and us that one takes."""
    nbytes, rate = footprint(TINY_MOE, StreamConfig()).expert_nbytes, 5
    return f"{nbytes / 1e3:.0f}", rate, f"{nbytes / rate / 1e3:.0f}"


def speedups(*ks):
    """By bytes, at each K."""
    return [f"{top_k.predicted_speedup(TINY_MOE, (8, *ks), 8)[k]:.2f}" for k in ks]


def more_bits(k, digits=".1f"):
    """How many more bits per byte K experts need, in %, with the 95% interval."""
    scores = top_k.recorded(TINY_MOE).scores
    more, low, high = (100 * x for x in scores[k].increase(scores[8]))
    return f"{more:{digits}}% [{low:{digits}}, {high:{digits}}%]"


def bits(k):
    return more_bits(k, ".0f").partition("%")[0]


def at_two():
    """At K=2: speeds by bytes of two models, the published one, and the bits."""
    shape = top_k.predicted_speedup(top_k.PUBLISHED_SHAPE, (8, 2), 8)[2]
    made = top_k.published_speedup((8, 2))[2]
    return 2, 8, *speedups(2), f"{shape:.2f}", f"{made:.2f}", more_bits(2, ".0f")


def windows():
    """The K trained with, windows and their tokens."""
    record = top_k.recorded(TINY_MOE)
    return 8, len(record.scores[8].bits), record.length


def bytes_used():
    """MB of backbone and of one expert in every layer, and of a token at K=8 and K=4."""
    plan = footprint(TINY_MOE, StreamConfig())
    one = plan.num_layers * plan.expert_nbytes
    rest = plan.checkpoint_nbytes - plan.num_experts * one
    used = {k: f"{(rest + k * one) / 1e6:.1f}" for k in (0, 8, 4)}
    return used[0], f"{one / 1e6:.2f}", used[8], used[4], *speedups(4)


def rollback_record():
    return rollback.RollbackRecord.from_json(recorded("cpu_rollback"))


def first_wrong():
    """Tokens before the first wrong one, with the state restored only."""
    return rollback_record().first_wrong.right["restore only"]


def states_kept():
    """MB here and GB on the 122B that keeping every state takes, with the positions."""
    held = {cost.positions: cost.nbytes["states"] for cost in rollback_record().costs}
    big = rollback.SHAPES["Qwen3.5-122B-A10B"].nbytes(16)["states"]
    return f"{held[8] / 1e6:.1f}", 8, f"{big / 1e9:.1f}", 16


def one_state():
    """MB of one state, and of 16."""
    one = rollback_record().costs[0].nbytes["restore"]
    return f"{one / 1e6:.2f}", 16, 16, f"{16 * one / 1e6:.0f}"


def drafts_on_a_gpu():
    """Slots and drafts; speeds and equal texts; those with fewer slots; tokens, runs."""
    few = gpu_drafts("dflash_16_slots")
    return 48, 7, *gpu_drafts("dflash_48_slots"), 16, *few, *gpu_settings()


def gpu_medians():
    """With 48 slots: median speeds and equal texts with 7 drafts and under the policy."""
    return [str(x).partition(" ")[0] for x in gpu_drafts("dflash_48_slots")]


def rounds_and_prompts():
    """Of each fault: all rounds, and the prompts that they are behind."""
    record = recorded("cpu_suspects")
    return record["rounds"] * record["prompts"], record["prompts"]


def prompts_and_rounds_of_each():
    rounds, prompts = rounds_and_prompts()
    return prompts, rounds // prompts


def state_faults():
    """Tau with nothing wrong and with each fault; after the first the rounds that accept 0 or 1."""
    left, restored, off = (
        tau(name, True)
        for name in (LEFT, "state restored, accepted not replayed", "features off by one layer")
    )
    return tau(FINE, True), left, at_most_one(LEFT), 0, 1, restored, off


def routing_faults():
    """Tau at top-k 6, 4 and 2, and with SwiftLM's faults together."""
    ks = (6, 4, 2)
    together = tau("left + off by one + top-k 6", True)
    return *(tau(f"top-k {k}") for k in ks), *ks, together


STATED = {
    "00_start_here": [
        ("With {} of the {} experts of each layer in memory, `tiny-moe` holds {} MB in place of {}",
         start_here),
        ("With {} of {} experts a layer in memory, `tiny-moe` holds {} MB in place of {} ",
         start_here),
        ("to within {}%. {}% of the experts it needs are in a slot, where equally likely experts "
         "would give {}%", hits_and_error),
        ("({} tokens of one prompt", lambda: [recorded("cpu_start_here")["tokens"]]),
    ],
    "01_dispatch_overhead": [
        ("puts each at {:.0f} us", lambda: published("PR 90", "one dispatch (us)")),
        ("saw a model {} times slower", lambda: [issue_124()]),
        ("operation in a chain costs {} us, one that the host waits for {} us, and a layer of "
         "Qwen3.5-35B-A3B goes from {:.2f} ms to {:.1f} ms",
         lambda: (operation_us("chained"), operation_us("evaluated"),
                  layer_ms("next token scheduled ahead"), layer_ms(ROUTING_READ))),
        ("a plain 35B-A3B layer takes {:.2f} ms, and {:.1f} ms when the host reads its routing; an "
         "operation in a chain takes {} us; one stray float32 scalar makes a resident token of {} "
         "such layers take {} times as long",
         lambda: (layer_ms("next token scheduled ahead"), layer_ms(ROUTING_READ),
                  operation_us("chained"), layers_of_the_run(), promotion())),
        ("{} tok/s are {}% more than {}, not {}%. Read either way, a call saved is worth {} to {} "
         "us", calls_saved),
    ],
    "02_expert_streaming": [],  # all are cited in place
    "03_page_cache": [
        ("made decoding {}% faster by *deleting* its cache", lambda: [38]),  # SwiftLM PR 26
        ("the SSD brings {} times the bytes that it brings with few slots (memory for {}% of the "
         "file)", twice_the_reads),
        ("In memory for {}% of the file ({} GB", lambda: (share_of_the_file(), sweep_sizes()[1])),
        ("going from {} slots to {} doubles what the SSD brings for a token: {} to {} MB; with {}, "
         "nearly all of the memory, it is {}.",
         lambda: (8, 97, *sweep_mb(8, 97), 157, *sweep_mb(157))),
        ("a token takes {}, {} and {} ms (n={}); where",
         lambda: (*sweep_ms(8, 97, 157), recorded("cpu_sweep_35b")["runs"])),
        ("reads ahead, {1} with {0} slots, {3} with {2}, {5} with {4}.",
         lambda: [n for s in (8, 67, 157) for n in (s, *sweep_ms(s, ahead=True))]),
        ("In memory for {}% of the file slots hardly matter: {} to {} ms", sweep_flat),
        ("the memory of {0} slots, make a token's reads take {1} times as long as {0} more slots",
         lambda: (pinned_slots(), pinned_over_slots())),
        ("would ({} MB for a file of {}, n={})", pinned_sizes),
        ("Qwen3.5-35B-A3B, {} GB on disk. Under a limit of {} GB", sweep_sizes),
        ("the worst point is off by {}%", lambda: [replay_error()]),
    ],
    "04_prefetch": [
        ("storing each expert in one piece gives {3} times the speed, and with the best guess on "
         "top of it {4} times (`tiny-moe`, {0} of {1} slots, two CPU cores)", guesses),
        ("With experts of {0} MB, knowing every choice gives {2} times, but",
         lambda: [speed.partition(" ")[0] for speed in random_routing()[1:4]]),
        ("so the oracle gains: {} times as shipped and {} packed", lambda: random_routing()[2:4]),
        ("gained {} times by packing and {} times with the look-ahead on top of it",
         lambda: [prefetch(f"{MOE}_mlx", "packed", n) for n in ("none", "lookahead")]),
        ("the look-ahead lost as shipped ({})",
         lambda: [prefetch(MOE, "as shipped", "lookahead", "cold")]),
        ("into one piece gave {} times the speed, the next layer's router on top of it {}, and "
         "knowing every choice {}; as shipped, the look-ahead gave {} and the oracle {} "
         "(`tiny-moe`, {} of {} slots, {} CPU cores, n={})", guesses_with_quartiles),
        ("guesses {}% were used. With experts of {} MB that route at random the oracle gave {}, "
         "packed {} (n={})", random_routing),
        ("the look-ahead gave {}, and `last`, which reads nothing ahead, {}: what",
         lambda: [prefetch(MOE, "as shipped", name, "warm") for name in ("lookahead", "last")]),
        ("are {3} to {4}% of a token's; {0}% takes {1} to {2} slots", locality_of_traces),
        ("{} KB at {} GB/s take {} µs", copied_expert),
    ],
    "05_top_k": [
        ("trained with K={0}, can be {2} times as fast with K={1}, and it needs {3}% more bits for "
         "the same text; with K={4} it can be {5} times as fast, and needs {6}% more",
         lambda: (8, 4, *speedups(4), bits(4), 2, *speedups(2), bits(2))),
        ("At K={} instead of {} a token uses a quarter of the expert bytes, yet bytes allow only "
         "{} times the speed ({} with the 122B's shapes, {} published), for {} more bits per byte",
         at_two),
        ("at K={} it is {} times for {}, at K={} {} times for {}",
         lambda: (4, *speedups(4), more_bits(4), 6, *speedups(6), more_bits(6))),
        ("trained with K={}; {} windows of {} tokens", windows),
        ('"Full quality" is K={} alone', lambda: [8]),
        ("{} MB of backbone and {} MB of experts for each of the K. So K=8 uses",
         lambda: bytes_used()[:2]),
        ("{} = {} MB and K=4 uses {} MB: {} times the speed", lambda: bytes_used()[1:]),
    ],
    "06_rollback": [
        ("greedy text is wrong after {} tokens. Three", lambda: [first_wrong()]),
        ("recurrent states are {:.0f}% off, and greedy text is wrong after {} tokens. Keeping",
         lambda: (100 * rollback_record().drift.distance["restore only"][0], first_wrong())),
        ("costs memory: {} MB for {} positions here, {} GB for {} on Qwen3.5-122B-A10B",
         states_kept),
        ("state is {} MB, so {} positions hold {} states more, {} MB", one_state),
        ("take no more than {} MiB", lambda: [STATES_NBYTES >> 20]),
    ],
    "07_speculative_streaming": [
        ("On one H200 with {} of {} experts in slots, {} drafts a round ran at {} times the speed "
         "of not drafting ({} of 5 texts equals the undrafted one: rounding). moelab's policy, "
         "which chooses the number, reached {} ({} of 5):", lambda: (48, 64, 7, *gpu_medians())),
        ("With {0} of 64 experts in slots, {1} drafts a round of a trained block draft ran at {2} "
         "times the speed of not drafting on two CPU cores, and {1} tokens looked up in the text "
         "itself at {3}.", lambda: [str(x).partition(" ")[0] for x in cpu_draft_gains()[:4]]),
        ("kernels and {0} slots, {1} drafts of tiny-dflash run at {2} times the speed of not "
         "drafting and {1} tokens of lookup at {3}; with {4} slots at {5} and {6} ({7} greedy "
         "tokens of text that repeats itself, n={8}", cpu_draft_gains),
        ("On one H200 with {} slots, {} drafts of tiny-dflash run at {} ({} of 5 texts equal to "
         "the undrafted one: rounding) and the policy at {} ({} of 5); with {} slots {} ({} of 5) "
         "and {} ({} of 5) ({} tokens, n={})", drafts_on_a_gpu),
        ("in {} of {} texts it drafts little", mostly_undrafted),
        ("may lose {:.0f}% at most on a long text", lambda: [200 * Policy().risk]),
    ],
    "08_dflash": [
        ("a block of {} tokens at once. Its paper reports {} to {} accepted; SwiftLM's issue 91 "
         "reports {} or {} on a streamed", lambda: (faults.BLOCK, 5, 6, 0, 1)),
        ("falls from {} to {} on `tiny-moe` ({} held-out prompts, {} rounds behind each",
         lambda: (tau(FINE), tau(LEFT), *prompts_and_rounds_of_each())),
        ("over {} rounds behind {} held-out code prompts", rounds_and_prompts),
        ("; {}% intervals over prompts", lambda: [95]),  # `low` and `high`: experiments/faults.py
        ("tau is {} with nothing wrong, {} with rejected tokens left in the recurrent state ({}% "
         "of the rounds accept {} or {}), {} with the state restored only, {} with features off by "
         "one layer,", state_faults),
        ("{}, {} and {} at top-k {}, {} and {}, and {} with SwiftLM's three faults together",
         routing_faults),
        ("Weights rounded again to {} bits cost little ({}), to {} bits most of it ({})",
         lambda: (3, tau("3-bit target"), 2, tau("2-bit target"))),
    ],
    "11_several_machines": [
        ("With slow SSDs ({} MB/s each, simulated) two ranks decode {} times as fast as one, with "
         "this machine's one fast SSD {} times.", lambda: (100, *several_gains()[::2])),
        ("Two ranks decode {} times as fast as one where reads bind ({} MB/s each, simulated), "
         "four {} times, and two {} times with this machine's one SSD ({} layers of "
         "Qwen3.5-35B-A3B shapes, {} slots, n={} runs of {} tokens",
         lambda: (several_gains()[0], 100, *several_gains()[1:], 4, ranks_settings()[0],
                  *ranks_timed())),
        ("The exchange of {} layers is {}% of a token of two ranks.",
         lambda: ranks_exchange()[2:]),
        ("a logit then differs by up to {},",
         lambda: ranks_joins_row("tiny-moe", "scores first")[3:]),
        ("({} with two ranks, {} with four)", lambda: (placed(2, 16), placed(4, 8))),
    ],
}  # fmt: skip


def test_resident_rounds_accept_as_many_drafts_as_streamed_ones():
    sections = recorded(ENGINE)["sections"]

    def rounds(section, drafts):
        runs = sections[section]["variants"][drafts]
        return [(run["same"], [r[:2] for r in run["rounds"]]) for run in runs]

    for slots in (16, 48):
        for drafts in ("1", "3", "7", "15"):
            streamed = rounds(f"dflash_{slots}_slots", drafts)
            assert streamed == rounds("dflash_resident", drafts), (slots, drafts)
    for drafts in ("1", "3", "7", "15"):
        assert rounds("draft_48_slots", drafts) == rounds("draft_resident", drafts), drafts


def test_texts_that_the_policy_hardly_drafts_begin_with_nothing_accepted():
    runs = recorded(ENGINE)["sections"]["dflash_48_slots"]["variants"]["auto"]
    for share, run in zip(drafted_share("dflash_48_slots"), runs):
        first = next(r for r in run["rounds"] if r[0])
        assert share > 0.5 or first[1] == 0


def normal(text):
    """One line, spans as ``[low, high]``, without links and the numbers of notebooks."""
    text = " ".join(text.split())
    text = re.sub(
        r"\[\d\d\]\([^)]*\)|[Nn]otebook \d\d|(PR|issue|section) \d+|[A-Z]+(_[A-Z]+)+=\d", "", text
    )
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"\[([\d.]+)%? ?- ?([\d.]+)(%?)\]", r"[\1, \2\3]", text)


def passage(document, begin, end, view=cite.shown):
    """The text between two words of a document."""
    _, begun, text = (ROOT / document).read_text().partition(begin)
    text, ended, _ = text.partition(end) if end else (text, True, "")
    assert begun and ended, f"{document} has no {begin!r}, or no {end!r} after it"
    return normal(re.sub(r"^\d\. ", "", view(text), flags=re.M))


def uncovered(text, entries):
    """Where a text without its cited numbers has numbers that no entry covers; code has names."""
    for form, read in entries:
        text = text.replace(normal(form.format(*read())), " ... ")
    text = re.sub(r"`[^`]*`", "", text)
    return [text[max(0, m.start() - 40) : m.end() + 20] for m in NUMBER.finditer(text)]


ENTRIES = [(where, *entry) for where, entries in PASSAGES.items() for entry in entries]


@pytest.mark.parametrize("where, form, read", ENTRIES, ids=lambda value: str(value)[:50])
def test_text_and_record_agree(where, form, read):
    said = normal(form.format(*read()))
    assert said in passage(*where), f"{where[0]}: the records say {said!r}"


@pytest.mark.parametrize("where", PASSAGES, ids=lambda where: where[0])
def test_every_number_has_a_record(where):
    left = uncovered(passage(*where, cite.uncited), PASSAGES[where])
    assert not left, f"{where[0]}: numbers without an expression or an entry of PASSAGES: {left}"


DOCUMENTS = ["README.md", "data/results/README.md", *sorted(NOTEBOOKS.glob("*.ipynb"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: Path(path).name)
def test_cited_numbers_are_those_of_the_records(document):
    path = ROOT / document
    assert cite.fill_file(path) == path.read_text(), f"python -m moelab.lab cite {document}"


def read_notebook(name, view=cite.shown):
    """The opening without its times and the takeaway; and all of the notebook's text."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    texts = [view(cell.source) for cell in notebook.cells if cell.cell_type == "markdown"]
    opening = [p for p in texts[0].split("\n\n") if not re.search(r"\b(minutes?|seconds)\b", p)]
    stated = "\n\n".join([*opening[1:], view(summary(notebook).answer)])  # without the title
    return normal(stated), normal(re.sub(r"^> ?", "", "\n\n".join(texts), flags=re.M))


SENTENCES = [(name, *entry) for name, entries in STATED.items() for entry in entries]


@pytest.mark.parametrize("name, form, read", SENTENCES, ids=lambda value: str(value)[:50])
def test_notebook_and_record_agree(name, form, read):
    said = normal(form.format(*read()))
    assert said in read_notebook(name)[1], f"{name}: the records say {said!r}"


@pytest.mark.parametrize("name", STATED)
def test_every_number_of_an_opening_and_a_takeaway_has_a_record(name):
    left = uncovered(read_notebook(name, cite.uncited)[0], STATED[name])
    assert not left, f"{name}: numbers without an expression or an entry of STATED: {left}"


def test_numbers_are_found_in_a_text():
    text = normal("H200, v0.1, 35B, [02](a/02_x.ipynb) 1.5 [1 - 2%] K=4, A_B=0, 3x, 13% [12 - 15%]")
    assert NUMBER.findall(text) == ["1.5", "1", "2", "4", "13", "12", "15"]
    assert text.endswith("13% [12, 15%]")
