"""Notebook 07, second half: what drafts bring, against mlx-lm's own loop without any.

python -m moelab bench-draft data/models/tiny-moe --draft lookup --json FILE
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ... import StreamConfig, close, load
from ...commands.argument_types import not_empty, or_auto, positive, several, zero_or_more
from ...commands.arguments import add_json, add_model, add_number, add_prompts, add_sampling
from ...commands.drafting import draft_config, open_draft
from ...commands.stream_options import MEASURED_SLOTS, add_mode, add_stream_options, mode_given
from ...shipped import shipped
from ...speculation.drafts import Draft, LookupDraft, ModelDraft
from ...speculation.generate import speculative_generate_step
from ...speculation.policy import Always, Policy
from .. import limit, machine, oscache, records, timing
from ..decode import encode
from ..models import folder
from ..texts import PROMPTS, heldout_starts
from .verify import Pass, Passes, counters, since

BUILT_IN = ("lookup", "self", "oracle")  # drafts that need no folder
TRAINED = ("tiny-draft", "tiny-dflash")  # of data/models, for tiny-moe
PLAIN, POLICY = "mlx-lm", "auto"  # variants of a comparison that are no number of drafts


class OracleDraft:
    """Knows the text and errs at random: what the best of drafts could bring, at no cost.

    Args:
        tokens (list[int]): Prompt and continuation.
        accept (float): How often a draft is right.
        seed (int): Of the errors.
    """

    layer_ids = ()

    def __init__(self, tokens: list[int], accept: float, seed: int = 0):
        self.tokens, self.accept, self.cache = list(tokens), accept, []
        self._rng = np.random.default_rng(seed)

    def make_cache(self) -> list:
        return []

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        self._read = 0

    def extend(self, tokens: mx.array, features: mx.array | None = None) -> None:
        self._read += tokens.size

    def propose(self, last: int, n: int, choose: Callable) -> mx.array:
        guesses = self.tokens[self._read + 1 :][:n]
        wrong = self._rng.random(len(guesses)) >= self.accept
        return mx.array([(t + 1) % 2 if w else t for t, w in zip(guesses, wrong)], mx.uint32)


# Records


class RoundTime(NamedTuple):
    """One round: tokens drafted, accepted, and the seconds of draft and target."""

    drafted: int
    accepted: int
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class Sample:
    """One text decoded against the clock.

    Attributes:
        decode_s (float): Seconds from the first round to the last token.
        rounds (list[RoundTime]): Empty without a draft.
        counters (dict): What the target counted meanwhile, see ``verify.COUNTED``.
        same (bool): Whether the text is the one that is written without drafts.
    """

    decode_s: float
    rounds: list[RoundTime]
    counters: dict[str, float]
    same: bool


@dataclass(frozen=True)
class Comparison:
    """Speeds with several numbers of drafts and with none.

    Attributes:
        tokens (int): Decoded in each run.
        runs (int): Samples of each variant.
        variants (dict): ``{name: [Sample]}``: ``mlx-lm`` without a draft, numbers of drafts,
            ``auto`` for the policy.
        machine (dict): As ``machine.card`` gives it; empty where the file has it elsewhere.
        model (str): The target's folder.
        draft (str): The draft's folder, or one of ``BUILT_IN``.
        config (dict): Of ``StreamConfig``.
        cache_state (str): Of the page cache.
        limit_nbytes (int): Memory of the process. Default: no limit.
        temp (float): The temperature; 0 if the text is greedy.
    """

    tokens: int
    runs: int
    variants: dict[str, list[Sample]]
    machine: dict = field(default_factory=dict)
    model: str = ""
    draft: str = ""
    config: dict = field(default_factory=dict)
    cache_state: str = "warm"
    limit_nbytes: int | None = None
    temp: float = 0.0

    @classmethod
    def from_json(cls, record: dict) -> "Comparison":
        """Of what ``to_json`` returned, or a part of a larger record."""
        variants = {
            name: [Sample(**{**s, "rounds": [RoundTime(*r) for r in s["rounds"]]}) for s in samples]
            for name, samples in record["variants"].items()
        }
        names = set(cls.__dataclass_fields__) - {"variants"}
        return cls(variants=variants, **{k: v for k, v in record.items() if k in names})

    def to_json(self) -> dict:
        """What ``bench-draft`` keeps."""
        record = {"kind": "draft", **asdict(self), "summary": self.summary()}
        if self.limit_nbytes is None:
            del record["limit_nbytes"]
        return record

    @property
    def label(self) -> str:
        """The draft and how the target is loaded."""
        slots = f"{self.config['slots']} slots"
        return f"{self.draft}, {'resident' if self.config['mode'] == 'resident' else slots}"

    def ratios(self, name: str) -> list[float]:
        """Speed over not drafting, run by run."""
        plain, own = self.variants[PLAIN], self.variants[name]
        return [p.decode_s / s.decode_s for p, s in zip(plain, own)]

    def tok_s(self, name: str) -> list[float]:
        """Tokens per second of each run."""
        return [self.tokens / s.decode_s for s in self.variants[name]]

    def committed(self, name: str) -> list[int]:
        """Tokens that each round with drafts committed."""
        return [r.accepted + 1 for s in self.variants[name] for r in s.rounds if r.drafted]

    def tau(self, name: str) -> float:
        """Mean of ``committed``; 1 if no round drafted."""
        return float(np.mean(self.committed(name) or [1]))

    def same(self, name: str) -> bool:
        """Whether every text is the one that is written without drafts."""
        return self.equal_texts(name) == len(self.variants[name])

    def equal_texts(self, name: str) -> int:
        """How many texts are the one that is written without drafts."""
        return sum(s.same for s in self.variants[name])

    def drafted_share(self) -> list[float]:
        """Share of each text under the policy that rounds with drafts wrote."""
        return [
            sum(r.accepted + 1 for r in s.rounds if r.drafted) / self.tokens
            for s in self.variants[POLICY]
        ]

    def speeds(self) -> dict[str, list[float]]:
        """``ratios`` of the policy and of each number of drafts but 0."""
        fixed = [n for n in self.variants if n not in (PLAIN, POLICY, "0")]
        named = {f"{n} draft" + "s" * (n != "1"): self.ratios(n) for n in fixed}
        return {"policy": self.ratios(POLICY), **named}

    def verify_ms(self) -> dict[int, list[float]]:
        """Milliseconds of the target's passes by positions, with fixed numbers of drafts."""
        fixed = sorted(int(n) for n in self.variants if n not in (PLAIN, POLICY, "0"))
        return {
            n + 1: [
                1e3 * r.verify_s for s in self.variants[str(n)] for r in s.rounds if r.drafted == n
            ]
            for n in fixed
        }

    def summary(self) -> dict[str, dict]:
        """Medians and quartiles of each variant, for the file."""
        return {
            name: {
                "ratio": timing.summary(self.ratios(name)),
                "tok_s": timing.summary(self.tok_s(name)),
                "tau": self.tau(name),
                "histogram": dict(sorted(Counter(self.committed(name)).items())),
                "same": self.same(name),
            }
            for name in self.variants
        }


@dataclass(frozen=True)
class DraftsRecord:
    """Several comparisons of one machine: ``cpu_drafts.json`` or a run of ``cuda_run.py``.

    Attributes:
        machine (dict): As ``machine.card`` gives it.
        comparisons (dict): ``{name: Comparison}``.
        passes (dict): ``{model: Passes}``, where the record has them.
    """

    machine: dict
    comparisons: dict[str, Comparison]
    passes: dict[str, Passes]

    @classmethod
    def from_json(cls, record: dict) -> "DraftsRecord":
        """Of such a file, or of one of the ``environments`` of ``cuda_h200_drafts.json``."""
        sections = record.get("runs") or record["sections"]
        passes = {
            name: {int(m): [Pass(s) for s in seconds] for m, seconds in by_m.items()}
            for name, by_m in sections.get("passes", {}).items()
            if isinstance(by_m, dict)
        }
        found = {name: Comparison.from_json(s) for name, s in sections.items() if "variants" in s}
        if "sections" in record:
            found = {c.label: c for c in found.values()}
        return cls(record.get("machine", {}), found, passes)

    def only(self, *starts: str) -> dict[str, Comparison]:
        """The comparisons whose names begin with one of these."""
        return {name: c for name, c in self.comparisons.items() if name.startswith(starts)}


# Measuring


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


def drafted(
    model: nn.Module,
    ids: list[int],
    draft: Draft,
    num_draft_tokens: int | str,
    tokens: int,
    policy: Policy | None = None,
    sampler: Callable | None = None,
) -> tuple[list[int], Sample]:
    """Decode with a draft; the clock runs from the first round to the last token.

    Args:
        model (nn.Module): The target.
        ids (list[int]): The prompt.
        draft (Draft): What guesses.
        num_draft_tokens (int or str): In each round, or ``auto`` for a policy.
        tokens (int): How many to decode.
        policy (Policy): One that has learned already. Default: a new one.
        sampler (Callable): As for ``speculative_generate_step``. Default: the most likely token.

    Returns:
        tuple[list[int], Sample]: The text, and how it came about; ``same`` is left True.
    """
    fresh = Policy() if num_draft_tokens == POLICY else Always(num_draft_tokens)
    clock, before, rounds, out = _Clocked(policy or fresh), counters(model), {}, []
    steps = speculative_generate_step(
        mx.array(ids), model, draft, num_draft_tokens=clock, max_tokens=tokens, sampler=sampler
    )
    for token, _, _, r in steps:
        out.append(token)
        rounds[r.number] = RoundTime(r.drafted, r.accepted, r.draft_s, r.verify_s)
        if len(out) == tokens:
            end = time.perf_counter()
    mx.synchronize(generation_stream)
    took = end - clock.begin_s
    return out, Sample(took, list(rounds.values()), since(model, before), True)


def undrafted(
    model: nn.Module, ids: list[int], tokens: int, sampler: Callable | None = None
) -> tuple[list[int], Sample]:
    """The same by mlx-lm's own loop, the baseline: what a user without drafts would run.

    All of the prompt but its last token is read before the clock starts, as in ``drafted``.
    """
    cache = make_prompt_cache(model)
    with mx.stream(generation_stream):
        if len(ids) > 1:
            model(mx.array([ids[:-1]]), cache=cache)
        mx.eval([c.state for c in cache])
    before, begin, out = counters(model), time.perf_counter(), []
    given = {"max_tokens": tokens, "prompt_cache": cache, "sampler": sampler}
    for token, _ in generate_step(mx.array(ids[-1:]), model, **given):
        out.append(int(token))
        end = time.perf_counter()
    mx.synchronize(generation_stream)
    return out, Sample(end - begin, [], since(model, before), True)


MakeDraft = Callable[[list[int], list[int]], Draft]  # from a prompt and the text that follows it


def compare(
    model: nn.Module,
    tokenizer,
    make_draft: MakeDraft,
    lengths: Sequence[int | str],
    prompts: Sequence[str],
    tokens: int,
    runs: int,
    seed: int = 0,
    temp: float = 0.0,
) -> Comparison:
    """Speed of several numbers of drafts over that of none, in rounds of random order.

    Args:
        model (nn.Module): The target.
        tokenizer (TokenizerWrapper): Its tokenizer.
        make_draft (MakeDraft): Makes the draft of a run.
        lengths (Sequence): Numbers of drafts, and ``auto``: one policy, which remembers from run
            to run as it does in ``speculative_generate``.
        prompts (Sequence[str]): Run i takes prompt i, modulo their number; one run more comes
            first and is not kept.
        tokens (int): Decoded in each run.
        runs (int): Samples of each variant.
        seed (int): Of the orders.
        temp (float): The temperature. All texts of a run are sampled with the same seed.
    """
    sampler = make_sampler(temp) if temp else None
    names, prompts_ids = [PLAIN, *lengths], [encode(tokenizer, p) for p in prompts]
    rng, samples, policy = np.random.default_rng(seed), {str(n): [] for n in names}, Policy()
    for i in range(-1, runs):
        ids = prompts_ids[i % len(prompts)]
        mx.random.seed(i + 1)
        text, _ = undrafted(model, ids, tokens, sampler)
        for n in rng.permutation(np.array(names, object)):
            mx.random.seed(i + 1)
            if n == PLAIN:
                written, sample = undrafted(model, ids, tokens, sampler)
            else:
                own, draft = policy if n == POLICY else None, make_draft(ids, text)
                written, sample = drafted(model, ids, draft, n, tokens, own, sampler)
            if i >= 0:
                samples[str(n)].append(replace(sample, same=written == text))
    return Comparison(tokens, runs, samples, machine.card(), temp=temp)


def maker(
    draft: str | Path, accept: float, model: nn.Module | None = None, kernels: str = "auto"
) -> MakeDraft:
    """What makes the draft of a run.

    Args:
        draft (str or Path): One of ``BUILT_IN``, or the folder of a model or of a DFlash draft.
        accept (float): How often the oracle is right.
        model (nn.Module): The target, which drafts for itself if ``draft`` is ``self``.
        kernels (str): As in ``StreamConfig``, of a draft that is a model.
    """
    if draft == "lookup":
        return lambda ids, text: LookupDraft()
    if draft == "oracle":
        return lambda ids, text: OracleDraft([*ids, *text], accept)
    opened = ModelDraft(model) if draft == "self" else open_draft(draft, kernels)
    return lambda ids, text: opened


def makers(model: Path, accept: float) -> dict[str, MakeDraft]:
    """The drafts of notebook 07: lookup, oracle, and the trained ones if they fit the model.

    Args:
        model (Path): The target's folder.
        accept (float): How often the oracle is right.
    """
    trained = TRAINED if Path(model).name == "tiny-moe" else ()
    places = {"lookup": "lookup", "oracle": "oracle"}
    places |= {name: shipped("models", name) for name in trained}
    return {name: maker(place, accept) for name, place in places.items()}


def committed(
    model: nn.Module,
    tokenizer,
    makers: Mapping[str, MakeDraft],
    prompts: Sequence[str],
    num_draft_tokens: int,
    tokens: int,
) -> dict[str, list[int]]:
    """Tokens that each round with drafts commits, for each draft.

    Args:
        model (nn.Module): The target.
        tokenizer (TokenizerWrapper): Its tokenizer.
        makers (Mapping[str, MakeDraft]): Drafts by name.
        prompts (Sequence[str]): Texts to go on from.
        num_draft_tokens (int): In each round.
        tokens (int): Decoded behind each prompt.

    Raises:
        ValueError: If a draft changes the text.
    """
    out = {name: [] for name in makers}
    for ids in (encode(tokenizer, p) for p in prompts):
        text, _ = undrafted(model, ids, tokens)
        for name, make in makers.items():
            written, sample = drafted(model, ids, make(ids, text), num_draft_tokens, tokens)
            if written != text:
                raise ValueError(f"draft {name}: expected the text without drafts, got another.")
            out[name] += [r.accepted + 1 for r in sample.rounds if r.drafted]
    return {name: n or [1] for name, n in out.items()}


# The command


def bench_draft(
    path: str | Path,
    config: StreamConfig | None = None,
    draft: str = "lookup",
    lengths: Sequence[int | str] = (0, 2, 4, 8, POLICY),
    tokens: int = 128,
    runs: int = 5,
    prompts: Sequence[str] | None = None,
    accept: float = 0.8,
    limit_nbytes: int | None = None,
    temp: float = 0.0,
) -> Comparison:
    """The command ``bench-draft``: load and compare.

    Args:
        path (str or Path): The target.
        config (StreamConfig): How to stream it.
        draft (str): One of ``BUILT_IN``, or the folder of a model or of a DFlash draft.
        lengths (Sequence): As for ``compare``.
        tokens (int): Decoded in each run.
        runs (int): Samples of each variant.
        prompts (Sequence[str]): Default: the model's held-out text, else the built-in prompts.
        accept (float): How often the oracle is right.
        limit_nbytes (int): All runs in one process of its own with so much memory, page cache
            included. Default: in this process.
        temp (float): As for ``compare``.

    Raises:
        limit.NoLimit: If memory cannot be limited here.
        OSError: If the process with the limit did not get through.
    """
    config, path = config or StreamConfig(slots=MEASURED_SLOTS), folder(path)
    if draft not in BUILT_IN:
        draft_config(draft, BUILT_IN)  # refuses what is none before any work
    if limit_nbytes is not None:
        # Pages that another process brought in would be served, and not counted.
        oscache.drop_pages(path)
        given = (path, config, str(draft), list(lengths), tokens, runs, prompts, accept, None, temp)
        what = f"{path.name} in {limit_nbytes / 1e6:.0f} MB"
        record, done = limit.call(_in_this_process, *given, what=what, nbytes=limit_nbytes)
        if done.killed:
            raise OSError(f"{what}: killed: it needs more than the limit")
        return replace(
            Comparison.from_json(record),
            limit_nbytes=limit_nbytes,
            cache_state=f"what {limit_nbytes / 1e6:.0f} MB leave it ({done.how})",
        )
    model, tokenizer = load(path, config)
    try:
        if not prompts:
            held_out = (path / "heldout").is_dir()
            prompts = heldout_starts(path, 8, 64, tokenizer) if held_out else PROMPTS
        make = maker(draft, accept, model, config.kernels)
        compared = compare(model, tokenizer, make, lengths, prompts, tokens, runs, temp=temp)
        return replace(
            compared, model=path.name, draft=Path(draft).name, config=vars(config.resolved())
        )
    finally:
        close(model)


def _in_this_process(path, config, *rest):
    return bench_draft(path, StreamConfig(**config), *rest).to_json()


def report(compared: Comparison) -> str:
    """The table that ``bench-draft`` prints."""
    wide = 32
    chosen = f"at temperature {compared.temp:g}" if compared.temp else "greedy"
    lines = [
        machine.card_line(compared.machine),
        f"{compared.model} with {compared.draft}: {compared.tokens} tokens a run, {chosen}, page "
        f"cache {compared.cache_state}, runs in random order",
        f"{'drafts':8} {'tok/s median [quartiles]':{wide}} {'over mlx-lm [quartiles]':{wide}} "
        f"{'tau':>5}  tokens",
    ]
    for name in compared.variants:
        tok_s, ratio = (
            timing.quartiles_text(v) for v in (compared.tok_s(name), compared.ratios(name))
        )
        same = "same" if compared.same(name) else "DIFFER"
        lines.append(f"{name:8} {tok_s:{wide}} {ratio:{wide}} {compared.tau(name):5.2f}  {same}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Decode with drafts of several lengths, against none, in rounds of random order."
    )
    add_model(parser)
    parser.add_argument(
        "--draft",
        type=not_empty,
        metavar="DRAFT",
        required=True,
        help="lookup, self, oracle, or the folder of a model or of a DFlash draft",
    )
    parser.add_argument(
        "--lengths",
        type=several(or_auto(zero_or_more)),
        default="0,2,4,8,auto",
        help="tokens drafted in a round, divided by commas; auto: the policy "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        metavar="MB",
        help="all runs in one process with so much memory, page cache included",
    )
    add_mode(parser)
    add_number(parser, "--tokens", 64, "decoded in each run")
    add_number(parser, "--runs", 5, "rounds")
    add_sampling(parser, ("--temp",))
    add_prompts(parser, "the model's held-out text")
    add_json(parser)
    add_stream_options(parser, MEASURED_SLOTS)


def run(args: argparse.Namespace) -> None:
    """The command."""
    compared = bench_draft(
        args.model,
        mode_given(args),
        args.draft,
        args.lengths,
        args.tokens,
        args.runs,
        args.prompt,
        limit_nbytes=None if args.limit is None else args.limit * 1_000_000,
        temp=args.temp,
    )
    records.print_and_save(report(compared), compared, args.json)
