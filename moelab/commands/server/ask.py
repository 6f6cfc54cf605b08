"""What the server's modules pass to each other: texts to write, and what was written of them."""

from argparse import Namespace
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...speculation.drafts import Draft
from ...streaming.ranks import Ranks

Body = dict[str, Any]  # an object in JSON


class Refused(ValueError):
    """Refuses a request; has a message, the wrong field, HTTP's status and OpenAI's code."""

    def __init__(self, words: str, param: str | None = None, status=400, code: str | None = None):
        super().__init__(words)
        self.param, self.status, self.code = param, status, code


@dataclass
class Served:
    """The model that is served, and the memory for its texts."""

    name: str  # the model's name in requests and answers
    args: Namespace  # the command line, with defaults for requests
    tokenizer: TokenizerWrapper
    size: int  # the number of tokens in the vocabulary
    positions: int  # the number of tokens in the longest text
    model: nn.Module | None = None
    draft: Draft | None = None
    ranks: Ranks | None = None
    has_states: bool = False  # True: caches cannot drop tokens (recurrent states)
    is_batchable: bool = False
    context: float = inf  # memory is planned for texts of this many tokens
    room: float = inf  # the number of texts of ``context`` tokens whose caches fit in memory
    most_texts: int = 1  # how many texts may be written at once

    def fits(self, sizes: list[int]) -> bool:
        """Return whether the caches of texts of ``sizes`` tokens fit in memory together."""
        return sum(max(0.5, n / self.context) for n in sizes) <= self.room  # short texts count half

    def make_cache(self, drafted: bool = True) -> list:
        """Make new caches of the model and, if ``drafted``, of its draft."""
        drafts = self.draft.make_cache() if drafted and self.draft is not None else []
        return make_prompt_cache(self.model) + drafts


@dataclass
class Ask:
    """One text to write after ``tokens``. All values are JSON values, since ranks share them."""

    tokens: list[int]
    max_tokens: int  # 0: the prompt is only scored, with ``echo``
    sampling: Body = field(default_factory=dict)  # arguments of mlx-lm's make_sampler
    penalties: Body = field(default_factory=dict)  # arguments of mlx-lm's make_logits_processors
    seed: int | None = None  # None: the engine draws a seed
    form: str | None = None  # the grammar that the text follows (``grammar.grammar``)
    stops: list[str] = field(default_factory=list)  # the text ends before the first stop string
    logprobs: int | None = None  # the number of top tokens to report; None: no log probabilities
    echo: bool = False  # with ``logprobs``: log probabilities of the prompt's tokens too
    num_draft_tokens: int | str = "auto"
    # Places in ``tokens`` where a later prompt may differ, each with mlx-lm's type of cache.
    cuts: list[tuple[int, str]] = field(default_factory=list)
    is_open: bool = False  # nobody set a limit: ``max_tokens`` is the number of free positions

    def __post_init__(self):
        bias = self.penalties.get("logit_bias", {})  # keys in JSON are strings
        self.penalties = self.penalties | {"logit_bias": {int(k): v for k, v in bias.items()}}


class Token(NamedTuple):
    """A token that was read or chosen."""

    id: int
    logprob: float | None  # None for the prompt's first token
    top: list[tuple[int, float]]  # the likeliest tokens, the likeliest first


class Usage(NamedTuple):
    """How many tokens a finished text took."""

    prompt: int
    cached: int  # tokens of the prompt that were not read again
    completion: int


class Run(NamedTuple):
    """A text, a thought or a call in an answer. A call's ``text`` is a JSON object."""

    kind: str  # content, reasoning or call
    text: str
    id: str = ""  # only calls have an id and a name
    name: str = ""


def joined(runs: list[Run]) -> list[Run]:
    """Join neighbouring runs of one kind, except calls."""
    made = []
    for kind, group in groupby(runs, attrgetter("kind")):
        same = [*group]
        made += same if kind == "call" else [Run(kind, "".join(run.text for run in same))]
    return made


@dataclass
class Part:
    """What was written since the last part, or a whole answer."""

    text: str = ""
    tokens: list[Token] = ()  # if asked for; a text's last token may be an end token
    prompt: list[Token] = ()  # if asked for, in the first part
    finish: str | None = None  # in the last part: stop, length or, after calls, tool_calls
    usage: Usage | None = None  # in the last part
    stop: str | None = None  # the stop string that ended the text
    runs: list[Run] = ()  # what ``Splitter`` made of the text


def total(parts: list[Part]) -> Part:
    """Join an answer's parts into the whole answer."""
    lists = ("text", "tokens", "prompt", "runs")
    sums = {name: [x for part in parts for x in getattr(part, name)] for name in lists}
    sums |= {"text": "".join(sums["text"]), "runs": joined(sums["runs"])}
    return replace(parts[-1], **sums)
