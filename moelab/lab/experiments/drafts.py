"""What a draft costs and brings: passes over several positions, their experts, rounds, and the speed against not drafting."""

import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, close, load, record, stats
from ...replay import locality as lab_routing
from ...speculation.generate import LookupDraft, ModelDraft, speculative_generate_step
from ...speculation.policy import Always, Policy
from ...speculation.rollback import Rollback
from .. import limit, machine, timing
from ..decode import encode
from ..models import folder
from ..plots import style as figures
from ..texts import PROMPTS, heldout_starts

STRATEGIES = ("lookup", "self", "oracle")  # drafts that need no folder


class OracleDraft:
    """Knows the text and errs on purpose: every draft is right with one probability, and costs nothing. What the best of drafts could bring.

    Args:
        tokens (list[int]): Prompt and continuation.
        accept (float): How often a draft is right.
        seed (int): Of the errors.
    """

    layer_ids = ()

    def __init__(self, tokens, accept, seed=0):
        self.tokens, self.accept, self.cache = list(tokens), accept, []
        self._rng = np.random.default_rng(seed)

    def make_cache(self):
        return []

    def bind(self, model, cache=None):
        self._read = 0

    def extend(self, tokens, features=None):
        self._read += tokens.size

    def propose(self, last, n, choose):
        guesses = self.tokens[self._read + 1 :][:n]
        wrong = self._rng.random(len(guesses)) >= self.accept
        return mx.array([(t + 1) % 2 if w else t for t, w in zip(guesses, wrong)], mx.uint32)


class _Clocked:
    """A policy that notes when the first round begins."""

    def __init__(self, policy):
        self._policy, self.begin_s = policy, None

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def choose(self, *args):
        if self.begin_s is None:
            self.begin_s = time.perf_counter()
        return self._policy.choose(*args)


def drafted(model, ids, draft, num_draft_tokens, tokens, sampler=None, policy=None):
    """Decode with a draft; the clock runs from the first round to the last token.

    Returns:
        dict: ``tokens``, ``decode_s``, ``rounds`` (lists of drafted, accepted, draft_s, verify_s) and ``counters`` of the target.
    """
    clock = _Clocked(
        policy or (Policy() if num_draft_tokens == "auto" else Always(num_draft_tokens))
    )
    before, rounds, out = _counted(model), {}, []
    steps = speculative_generate_step(
        mx.array(ids), model, draft, num_draft_tokens=clock, max_tokens=tokens, sampler=sampler
    )
    for token, _, _, r in steps:
        out.append(token)
        rounds[r.number] = [r.drafted, r.accepted, r.draft_s, r.verify_s]
        if len(out) == tokens:
            end = time.perf_counter()
    mx.synchronize(generation_stream)
    return {
        "tokens": out, "decode_s": end - clock.begin_s, "rounds": list(rounds.values()), "counters": _since(model, before),
    }  # fmt: skip


def undrafted(model, ids, tokens, sampler=None):
    """The same without a draft, by mlx-lm's own loop; the prompt but its last token is read before the clock starts."""
    cache = make_prompt_cache(model)
    with mx.stream(generation_stream):
        if len(ids) > 1:
            model(mx.array([ids[:-1]]), cache=cache)
        mx.eval([c.state for c in cache])
    before, begin, out = _counted(model), time.perf_counter(), []
    for token, _ in generate_step(
        mx.array(ids[-1:]), model, max_tokens=tokens, prompt_cache=cache, sampler=sampler
    ):
        out.append(int(token))
        end = time.perf_counter()
    mx.synchronize(generation_stream)
    return {"tokens": out, "decode_s": end - begin, "rounds": [], "counters": _since(model, before)}


def compare(model, tokenizer, make_draft, lengths, prompts, tokens, runs, seed=0):
    """Speed of several numbers of drafts over that of none, in rounds of random order.

    Args:
        model (nn.Module): The target.
        make_draft (Callable): From the prompt's ids and the text that follows without a draft to a draft.
        lengths (list): Numbers of drafts, and ``auto``: one policy, which remembers from run to run as it does in ``speculative_generate``.
        prompts (list[str]): Run i takes prompt i, modulo their number; one run more comes first and is not kept.
        tokens (int): Decoded in each run.

    Returns:
        dict: ``variants``: ``{name: [sample, ...]}``, with ``mlx-lm`` the plain one; see ``summary``.
    """
    names, prompts_ids = ["mlx-lm", *lengths], [encode(tokenizer, p) for p in prompts]
    rng, samples, policy = np.random.default_rng(seed), {str(n): [] for n in names}, Policy()
    for i in range(-1, runs):
        ids = prompts_ids[i % len(prompts)]
        text = undrafted(model, ids, tokens)["tokens"]
        for n in rng.permutation(np.array(names, object)):
            sample = (
                undrafted(model, ids, tokens)
                if n == "mlx-lm"
                else drafted(
                    model,
                    ids,
                    make_draft(ids, text),
                    n,
                    tokens,
                    policy=policy if n == "auto" else None,
                )
            )
            sample["same"] = sample.pop("tokens") == text
            if i >= 0:
                samples[str(n)].append(sample)
    return {
        "kind": "draft",
        "machine": machine.card(),
        "tokens": tokens,
        "runs": runs,
        "variants": samples,
    }


def summary(compared):
    """By variant: ``ratio`` (speed over mlx-lm's, run by run), ``tok_s``, ``tau`` (tokens of a round with drafts), ``histogram`` of what it committed, ``same``."""
    out, yard = {}, [s["decode_s"] for s in compared["variants"]["mlx-lm"]]
    for name, samples in compared["variants"].items():
        committed = [a + 1 for s in samples for d, a, *_ in s["rounds"] if d]
        out[name] = {
            "ratio": timing.paired_ratio(yard, [s["decode_s"] for s in samples]),
            "tok_s": timing.summary([compared["tokens"] / s["decode_s"] for s in samples]),
            "tau": float(np.mean(committed)) if committed else 1.0,
            "histogram": dict(sorted(Counter(committed).items())),
            "same": all(s["same"] for s in samples),
        }
    return out


def speeds(compared):
    """Speed over not drafting, run by run: ``{"8 drafts" or "policy": [ratio, ...]}``; the loop that drafts 0 is left out."""
    plain = [s["decode_s"] for s in compared["variants"]["mlx-lm"]]
    return {
        "policy" if n == "auto" else f"{n} draft" + "s" * (n != "1"): [
            p / s["decode_s"] for p, s in zip(plain, samples)
        ]
        for n, samples in compared["variants"].items()
        if n not in ("mlx-lm", "0")
    }


def verify_ms(compared):
    """Milliseconds of the target's pass over m positions, in all rounds of a ``compare`` with a fixed number of drafts.

    Returns:
        dict: ``{m: [ms, ...]}``, m ascending.
    """
    fixed = sorted(int(n) for n in compared["variants"] if n not in ("mlx-lm", "auto", "0"))
    return {
        n + 1: [1e3 * r[3] for s in compared["variants"][str(n)] for r in s["rounds"] if r[0] == n]
        for n in fixed
    }


def passes(model, ids, positions, rounds):
    """Seconds of a pass over m positions, at successive places of a text, taken back each time but for one token.

    Args:
        ids (list[int]): A text, long enough for all rounds.
        positions (list[int]): The m's, in random order in each round.

    Returns:
        dict: ``{m: [sample, ...]}`` of ``pass_s``, ``wait_s``, ``misses``, ``hits``; every sample is of the text's own tokens.
    """
    cache, out, rng = make_prompt_cache(model), {m: [] for m in positions}, np.random.default_rng(0)
    start = max(8, len(ids) - (rounds + 1) * len(positions) - max(positions))
    with mx.stream(generation_stream):
        model(mx.array([ids[:start]]), cache=cache)
        mx.eval([c.state for c in cache])
        rollback, at = Rollback(model, cache), start
        for i in range(-1, rounds):
            for m in rng.permutation(positions).tolist():
                before, begin = _counted(model), time.perf_counter()
                mx.eval(mx.argmax(rollback(mx.array([ids[at : at + m]])), axis=-1))
                pass_s, counted = time.perf_counter() - begin, _since(model, before)
                rollback.undo(m - 1)
                rollback.commit()
                at += 1
                if i >= 0:
                    out[m].append({"pass_s": pass_s, **counted})
    return out


def passes_in_turn(models, ids, positions, rounds):
    """``passes`` of several models, a few rounds of one and then of the next, so that drift hits all alike.

    Args:
        models (dict): The models, by whatever tells them apart.

    Returns:
        dict: By the same, what ``passes`` returns.
    """
    out = {name: {m: [] for m in positions} for name in models}
    for _ in range(3):
        for name, model in models.items():
            for m, samples in passes(model, ids, positions, -(-rounds // 3)).items():
                out[name][m] += samples
    return out


def union(trace, positions):
    """Distinct experts of a layer over m tokens in a row, as routed and as independent tokens would be.

    Args:
        trace (Trace): Of decoded text.

    Returns:
        dict: ``{m: ([mean of each layer], expected of independent uniform tokens)}``.
    """
    K, E = trace.experts.shape[2], trace.num_experts
    return {
        m: (lab_routing.union(trace, m).tolist(), E * (1 - (1 - K / E) ** m)) for m in positions
    }


def routing(model, ids):
    """The ``Trace`` of a text read one token at a time, as decoding would."""
    cache = make_prompt_cache(model)
    with record(model) as trace:
        for i in ids:
            mx.eval(model(mx.array([[i]]), cache=cache))
    return trace


def soak(model, ids, draft, num_draft_tokens, tokens, every=250):
    """One long text: MLX's memory as it grows, and whether the target's counters account for every position.

    Returns:
        dict: ``tokens``, ``active_nbytes``, ``peak_nbytes`` at every step; ``positions`` read by the target and ``expected``; ``decode_s``.
    """
    before, out, rounds = (
        _counted(model),
        {"tokens": [], "active_nbytes": [], "peak_nbytes": []},
        {},
    )
    begin = time.perf_counter()
    steps = speculative_generate_step(
        mx.array(ids), model, draft, num_draft_tokens=num_draft_tokens, max_tokens=tokens
    )
    for n, (_, _, _, r) in enumerate(steps, 1):
        rounds[r.number] = r.drafted
        if n % every == 0:
            out["tokens"].append(n)
            out["active_nbytes"].append(mx.get_active_memory())
            out["peak_nbytes"].append(mx.get_peak_memory())
            mx.reset_peak_memory()
    out["decode_s"] = time.perf_counter() - begin
    out["positions"] = _since(model, before)["tokens"]
    out["expected"] = len(ids) - 1 + sum(1 + d for d in rounds.values())
    return out


def pass_parts(timed):
    """What a pass over m positions is made of, fitted to passes with two or more top-k.

    Args:
        timed (dict): By top-k, what ``passes`` returns of a resident model.

    Returns:
        dict: Seconds: ``fixed_s`` of a pass, ``position_s`` of a position but for its experts,
        ``expert_s`` of the arithmetic of one expert (of all layers) for one position.
    """
    rows, seconds = [], []
    for k, by_m in timed.items():
        for m, samples in by_m.items():
            rows.append((1, m, m * k))
            seconds.append(np.median([s["pass_s"] for s in samples]))
    fitted = np.linalg.lstsq(np.array(rows, float), np.array(seconds), rcond=None)[0]
    # Noise can make a part negative.
    return dict(zip(("fixed_s", "position_s", "expert_s"), np.maximum(fitted, 1e-6).tolist()))


def reads(trace, slots, top_k=None):
    """The experts that a pass over m positions reads in all layers, by a recorded trace.

    For a smaller top-k the trace's number is scaled by what independent, uniform routing would
    give. Compared with ``tiny-moe`` itself at top-6 and top-4 (400 tokens), the estimate was
    between 3% too low and 16% too high with up to 16 slots, and up to 41% too high with 32 or 48.

    Args:
        trace (Trace): Of decoded text; its first quarter only fills the slots.
        slots (int): S, evicted least recent first.
        top_k (int, optional): Default: the trace's.

    Returns:
        Callable: From m to a number of experts.
    """
    K, E = trace.experts.shape[2], trace.num_experts

    def chance(m, k):
        return E * (1 - (1 - k / E) ** m)

    return lambda m: _reads(trace, slots, m) * chance(m, top_k or K) / chance(m, K)


@lru_cache(maxsize=512)
def _reads(trace, slots, m):
    return float(lab_routing.missing(trace, m, slots, skip=len(trace) // 4).sum())


def dial(parts, trace):
    """The function behind the sliders of notebook 07: from draft length, acceptance, slots, SSD and top-k to a figure of the ratio.

    A model, not a measurement. The time of a pass is a fixed part, a part for each position, a
    part for each expert of a position, and the reads of the experts that are not in slots, which
    the trace gives. Drafts cost nothing.

    Args:
        parts (dict): Of ``pass_parts``, and ``expert_nbytes``.
        trace (Trace): Of decoded text, for ``reads``.
    """
    K = trace.experts.shape[2]

    def look(
        length: int, accept: float, slots: int, GBs: float, top_k: int, arithmetic: str = "as here"
    ):
        missing, read_s = reads(trace, slots, top_k), parts["expert_nbytes"] / (GBs * 1e9)
        each_s = parts["position_s"] + top_k * parts["expert_s"] if arithmetic == "as here" else 0.0

        def speed(m):
            return parts["fixed_s"] + m * each_s + missing(m) * read_s

        n = np.arange(0, 17)
        accepts = {"as set": accept, "every draft right": 1.0}
        fig = figures.figure(
            "",
            "tokens drafted",
            "speed over not drafting",
            note="a model with this machine's parts and a recorded trace; drafts cost nothing"
            + (f"; reads at top-{top_k} estimated from top-{K}" if top_k != K else ""),
        )
        best = {}
        for i, (name, a) in enumerate(accepts.items()):
            tokens = np.array([sum(a**j for j in range(k + 1)) for k in n])
            ratio = tokens * speed(1) / np.array([speed(k + 1) for k in n])
            best[name] = ratio
            fig.add_scatter(x=n, y=ratio, name=name, mode="lines+markers", **figures.style(i))
        figures.ceiling(fig, 1, "not drafting")
        figures.ceiling(fig, length, "as set", axis="x")
        here, tau = best["as set"][length], sum(accept**j for j in range(length + 1))
        need = speed(length + 1) / speed(1)
        fig.update_layout(
            title_text=f"{length} drafts, {accept:.0%} right: {here:.2f} times the speed; break-even at {need:.1f} tokens a round"
        )
        return figures.describe(
            fig,
            alt="Speed over not drafting against the tokens drafted: "
            + ", ".join(f"{k}: {r:.2f}" for k, r in zip(n, best["as set"]))
            + ".",
            finding=f"A round commits {tau:.1f} tokens and costs {need:.1f} tokens' time; the best length is {int(np.argmax(best['as set']))}.",
        )

    return look


def bench_draft(
    path,
    config=None,
    draft="lookup",
    lengths=(0, 2, 4, 8, "auto"),
    tokens=128,
    runs=5,
    prompts=None,
    accept=0.8,
    limit_nbytes=None,
):
    """The command ``bench --draft``: load, compare, report.

    Args:
        draft (str): ``lookup``, ``self``, ``oracle``, or the folder of a model or of a DFlash draft.
        prompts (list[str], optional): Default: the model's held-out text, or what ``bench`` takes where there is none.
        limit_nbytes (int, optional): All runs in one process of its own with so much memory, page cache included.

    Returns:
        dict: The record of ``compare`` with its ``summary``.

    Raises:
        limit.NoLimit: If memory cannot be limited here.
        OSError: If the process with the limit did not get through.
    """
    config, path = config or StreamConfig(), folder(path)
    if draft not in STRATEGIES:
        _draft_config(draft)  # refuses what is none before any work
    if limit_nbytes is not None:
        machine.drop_pages(
            path
        )  # pages that another process brought in would be served, and not counted
        call = json.dumps(
            [str(path), asdict(config), str(draft), list(lengths), tokens, runs, prompts, accept]
        )
        done = limit.run(
            [sys.executable, "-m", "moelab.lab.experiments.drafts", call],
            limit_nbytes,
            ways=("cgroup", "systemd-run"),
        )
        if done.returncode:
            why = (
                "killed: it needs more than the limit"
                if done.killed
                else done.stderr.strip()[-2000:]
            )
            raise OSError(f"{Path(path).name} in {limit_nbytes / 1e6:.0f} MB: {why}")
        record = json.loads(done.stdout.splitlines()[-1])
        return {
            **record,
            "limit_nbytes": limit_nbytes,
            "cache_state": f"what {limit_nbytes / 1e6:.0f} MB leave it ({done.how})",
        }
    model, tokenizer = load(path, config)
    try:
        if not prompts:
            prompts = (
                heldout_starts(path, 8, 64, tokenizer)
                if (Path(path) / "heldout").is_dir()
                else PROMPTS
            )

        def make(ids, text):
            if draft == "lookup":
                return LookupDraft()
            if draft == "oracle":
                return OracleDraft([*ids, *text], accept)
            return opened

        opened = None
        if draft == "self":
            opened = ModelDraft(model)
        elif draft not in STRATEGIES:
            opened = open_draft(draft)

        out = compare(model, tokenizer, make, list(lengths), prompts, tokens, runs)
        out.update(
            model=Path(path).name,
            draft=Path(draft).name,
            config=vars(config),
            cache_state="warm",
        )
        out["summary"] = summary(out)
        return out
    finally:
        close(model)


def _draft_config(path):
    """The configuration of a draft's folder."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"draft {str(path)!r}: expected {', '.join(STRATEGIES)}, or the folder of a model or "
            "of a DFlash draft with its config.json; found no such folder."
        )
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file}: not JSON ({error}). Make or download the draft again."
        ) from error


def open_draft(path):
    """A draft from its folder: a DFlash draft if its configuration says so, else an mlx-lm model."""
    if "dflash_config" in _draft_config(path):
        from ...speculation import dflash

        return dflash.DFlashDraft(path)
    model, _ = load(path, StreamConfig(mode="resident"))
    return ModelDraft(model)


def report(record):
    """The table of a record of ``bench_draft``."""
    lines = [machine.card_line(record["machine"])]
    lines.append(
        f"{record['model']} with {record['draft']}: {record['tokens']} greedy tokens a run, page cache {record['cache_state']}, runs in random order"
    )
    lines.append(
        f"{'drafts':8} {'tok/s median [quartiles]':32} {'over mlx-lm [quartiles]':32} {'tau':>5}  tokens"
    )
    for name, s in record["summary"].items():
        lines.append(
            f"{name:8} {timing.quartiles_text(s['tok_s']):32} {timing.quartiles_text(s['ratio']):32} {s['tau']:5.2f}  {'same' if s['same'] else 'DIFFER'}"
        )
    return "\n".join(lines)


def _counted(model):
    if not hasattr(model, "_session"):
        return None
    both = stats(model)
    return {
        k: getattr(both.prefill, k) + getattr(both.decode, k)
        for k in ("tokens", "hits", "misses", "bytes_read", "wait_s")
    }


def _since(model, before):
    return {} if before is None else {k: v - before[k] for k, v in _counted(model).items()}


if __name__ == "__main__":
    path, config, *rest = json.loads(sys.argv[1])
    try:
        print(json.dumps(bench_draft(path, StreamConfig(**config), *rest)))
    except (ValueError, OSError) as error:  # the process above prints it
        sys.exit(str(error))
