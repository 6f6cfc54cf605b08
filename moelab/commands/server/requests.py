"""Requests in OpenAI's form: they are checked and become one ``Ask`` for each text to write.

A field that is null has its default. One that this server does not know is refused.
"""

import inspect
import json
from typing import Annotated, Any, Literal, Self

from mlx_lm.sample_utils import make_logits_processors, make_sampler
from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from ...checkpoint import shorten
from .ask import Ask, Refused
from .template import chat_tokens
from .text import Splitter

DEFAULT = "default_model"  # mlx-lm's name of the model, draft or adapters of the command line
TAKEN = {"user", "metadata", "store", "service_tier", "safety_identifier"}  # without effect
TAKEN |= {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
ONLY = {"response_format": {"type": "text"}, "modalities": ["text"], "functions": []}  # or null
ONLY |= {"function_call": "auto", "reasoning_effort": "medium", "verbosity": "medium"}
ONLY |= {"parallel_tool_calls": True, "best_of": 1, "suffix": ""}


def _object(**fields):
    """Make the type of an object that has these fields and may have others."""
    return with_config(ConfigDict(strict=True, extra="allow"))(TypedDict("_object", fields))


def expect(is_so: bool, name: str, expected: str, got: Any) -> None:
    """Refuse the value of a field, unless all is as expected."""
    if not is_so:
        raise Refused(f"{name}: expected {expected}, got {shorten(got, 100)!r}", name)


Number, Positive = Annotated[float, Field(ge=-100, le=100)], Annotated[float, Field(ge=0, le=100)]
Whole, Share = Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=0, le=1)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Prompt = str | Annotated[list[Whole], Field(fail_fast=True)]
Tool = _object(type=Literal["function"], function=_object(name=str))


class Request(BaseModel):
    """What requests of chats and of completions have in common."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
    model: str = DEFAULT
    draft_model: str = DEFAULT
    adapters: str = DEFAULT
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool | None] = {}
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**64)
    stop: Stop | Annotated[list[Stop], Field(max_length=64, fail_fast=True)] = []
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] | None = None
    temp: Positive | None = Field(None, alias="temperature")
    top_p: Share | None = None
    top_k: Whole | None = None
    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: float | None = Field(None, ge=0, le=0.5)
    logit_bias: dict[Annotated[Whole, Field(strict=False)], Number] = {}
    repetition_penalty: Positive | None = None
    repetition_context_size: Whole | None = None
    presence_penalty: Number | None = None
    presence_context_size: Whole | None = None
    frequency_penalty: Number | None = None
    frequency_context_size: Whole | None = None

    @classmethod
    def of(cls, body: dict[str, Any]) -> Self:
        """Check the fields of a request. ``Refused`` names the first that is wrong."""
        given = {k: v for k, v in body.items() if k not in TAKEN and v not in (None, ONLY.get(k))}
        for name in given.keys() - {field.alias or k for k, field in cls.model_fields.items()}:
            only = f"{json.dumps(ONLY.get(name))} or no such field"
            expect(False, shorten(name, 100), only, given[name])
        try:
            json.dumps(given, ensure_ascii=False).encode()  # an error for half of a character
            return cls.model_validate(given)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
        said = f"{shorten('.'.join(map(str, wrong['loc'])), 100)}: {wrong['msg']}"
        got = "" if wrong["type"] == "missing" else f", got {shorten(wrong['input'], 100)!r}"
        raise Refused(said + got, wrong["loc"][0])

    def make(self, prompts: list[tuple], served: Any, **given: Any) -> list[Ask]:
        """Make ``n`` asks for each prompt, which is a pair of tokens and ``Ask.cuts``."""
        args, size = served.args, served.size
        known = {"model": (served.name, args.model), "draft_model": (args.draft_model,)}
        for name, names in (known | {"adapters": (args.adapter_path,)}).items():
            got = getattr(self, name)
            expect(got in (DEFAULT, *names), name, f"the command line's or {DEFAULT}", got)
        ids = [("top_k", self.top_k or 0), ("logit_bias", max(self.logit_bias, default=0))]
        for tokens, _ in prompts:
            expect(tokens, "prompt", "a text of at least one token", "none")
            ids.append(("prompt", max(tokens)))
        for name, most in ids:
            expect(most < size, name, f"less than {size}, as the vocabulary has", most)
        sampling = {"temp": args.temp, "top_p": args.top_p, "top_k": args.sampling_top_k}
        sampling |= {"min_p": args.min_p} | self._arguments(make_sampler)
        if sampling["top_p"] == 0 or sampling["temp"] < 1e-4:  # logits over less may be infinite
            sampling["temp"] = 0.0
        if sampling.get("xtc_probability"):  # as in mlx-lm's server
            ends = served.tokenizer.encode("\n") + sorted(served.tokenizer.eos_token_ids)
            sampling["xtc_special_tokens"] = ends
        length, drafted = self.max_completion_tokens or self.max_tokens, self.num_draft_tokens
        given |= {
            "max_tokens": args.max_tokens if length is None else length,
            "sampling": sampling,
            "penalties": self._arguments(make_logits_processors),
            "stops": [self.stop] if isinstance(self.stop, str) else self.stop,
            "num_draft_tokens": args.num_draft_tokens if drafted is None else drafted,
        }
        seeds = [None if self.seed is None else (self.seed + i) % 2**64 for i in range(self.n)]
        return [Ask(tokens, seed=s, cuts=cuts, **given) for tokens, cuts in prompts for s in seeds]

    def _arguments(self, function):
        names = {*inspect.signature(function).parameters}
        return self.model_dump(include=names, exclude_none=True)


class ChatRequest(Request):
    """A request of ``/v1/chat/completions``; other dialects translate theirs into one."""

    messages: list[_object(role=str)] = Field(min_length=1, fail_fast=True)
    tools: list[Tool] = Field([], fail_fast=True)
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = {}

    def read(self, served: Any) -> tuple[list[Ask], list[Splitter]]:
        """Make the asks and, for each, what splits its text."""
        tokenizer, args, given = served.tokenizer, served.args, self.chat_template_kwargs
        call = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        wrong = ", ".join(given.keys() & (call.keys() - {"documents"}))
        expect(not wrong, "chat_template_kwargs", "none of the server's own", wrong)
        tools = (self.tool_choice == "auto" and self.tools) or None
        tokens, cuts, state = chat_tokens(
            tokenizer, self.messages, tools, given, args.chat_template_args, served.has_states
        )
        logprobs = self.top_logprobs if self.logprobs or self.top_logprobs else None
        asks = self.make([(tokens, cuts)], served, logprobs=logprobs)
        return asks, [Splitter(tokenizer, tools, state) for _ in asks]


class CompletionRequest(Request):
    """A request of ``/v1/completions``."""

    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=1024, fail_fast=True)]
    max_tokens: Whole | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or tokens."""
        first = self.prompt[0] if self.prompt else 0
        is_one = isinstance(self.prompt, str) or isinstance(first, int)
        return [self.prompt] if is_one else self.prompt

    def read(self, served: Any) -> tuple[list[Ask], list[Splitter]]:
        """Make the asks and, for each, what leaves its text as it is."""
        encode, scores = served.tokenizer.encode, self.logprobs is not None
        prompts = [(encode(p) if isinstance(p, str) else p, []) for p in self.prompts()]
        most, texts = 1024, self.n * len(prompts)
        expect(texts <= most, "n", f"at most {most} texts of a request", texts)
        asks = self.make(prompts, served, logprobs=self.logprobs, echo=self.echo and scores)
        return asks, [Splitter(served.tokenizer, None, "text") for _ in asks]
