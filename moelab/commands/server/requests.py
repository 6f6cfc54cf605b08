"""Checks requests of all dialects, and makes one ``Ask`` for each text to write."""

import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from itertools import chain
from typing import Annotated, Literal, NotRequired, Protocol
from uuid import uuid4

from mlx_lm.sample_utils import make_logits_processors, make_sampler
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.config import with_config
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict from 3.12 on

from ...checkpoint import shorten
from .ask import Ask, Body, Part, Refused, Served
from .grammar import choice_of, grammar, schema_of
from .template import chat_tokens
from .text import Splitter

DEFAULT = "default_model"  # mlx-lm's name for the command line's model
# Fields that are accepted with any value, without effect; docs/guide.md says why that is safe.
TAKEN = {"user", "metadata", "client_metadata", "safety_identifier", "request_id", "store"}
TAKEN |= {"service_tier", "priority", "speed", "inference_geo", "prediction", "truncation"}
TAKEN |= {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control"}
TAKEN |= {"cache_prompt", "cache_salt", "max_tool_calls", "web_search_options", "verbosity"}
# Fields that are accepted only with this value, which is the default here.
ONLY = {"modalities": ["text"], "suffix": "", "best_of": 1}
ONLY |= {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
ONLY |= {"background": False, "min_tokens": 0, "ignore_eos": False, "length_penalty": 1}
ONLY |= {"use_beam_search": False, "skip_special_tokens": True, "include_reasoning": True}
ONLY |= {"spaces_between_special_tokens": True, "include_stop_str_in_output": False}
ONLY |= {"add_generation_prompt": True, "stop_token_ids": [], "functions": [], "mcp_servers": []}
SAMPLING = {*signature(make_sampler).parameters}
PENALTIES = {*signature(make_logits_processors).parameters}


def _object(**fields):
    """Make the type of an object that has these fields and may have others."""
    return with_config(ConfigDict(strict=True, extra="allow"))(TypedDict("object", fields))


def _place(error, names):
    """Return the names that lead to a wrong value, without the types of a union."""
    first, *rest = error["loc"]
    where = [shorten(name, 100) for name in (names.get(first, first), *rest)]
    return [name for name in where if "[" not in name and name not in ("str", "constrained-int")]


def _expect(is_so, name, expected, got):
    if not is_so:
        raise Refused(f"{name}: expected {expected}, got {shorten(got, 100)!r}", name)


def parsed(text: bytes, where: str = "body: ") -> Body:
    """Read an object in JSON. A lone surrogate, where a client cut a text, becomes U+FFFD."""
    try:
        return OBJECT.validate_json(HALF.sub(lambda found: found[1] or rb"\ufffd", text))
    except ValidationError as error:
        words = error.errors()[0]["msg"]
    # Raised outside ``except``, so that no reference to the text stays.
    raise Refused(f"{where}expected an object in JSON: {words}")


def _arguments(value):
    """Read a call's arguments, which may be a text in JSON or nothing."""
    return parsed((value or "{}").encode(), "") if isinstance(value, str | None) else value


@lru_cache
def leave_out(what: str) -> None:
    """Log once that ``what`` is left out."""
    logging.warning("%s: left out of the prompt, since the model cannot use it", what)


def shown(message: object) -> object:
    """Replace each image in a tool's result by a text, so that the chat can go on."""
    match message:
        case {"role": "tool", "content": list(parts)}:
            images = [isinstance(p, dict) and "image" in str(p.get("type")) for p in parts]
            parts = [IMAGE if is_one else part for part, is_one in zip(parts, images)]
            return message | {"content": parts}
    return message


def functions(tool: object, prefix: str = "") -> list[Body]:
    """List the functions of a tool in OpenAI's or Anthropic's form; a namespace has several.

    Tools of other types, which the client or the service runs, have no functions.
    """
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return [tool]
        case {"type": "namespace", "name": str(name), "tools": list(inner)}:
            return [*chain(*(functions(t, name + "__") for t in inner))]
        case {"type": "function", "name": str(name)} | {"name": str(name), "input_schema": dict()}:
            schema = tool.get("parameters") or tool.get("input_schema") or {"type": "object"}
            about = {"name": prefix + name, "description": tool.get("description") or ""}
            return [{"type": "function", "function": about | {"parameters": schema}}]
        case {"type": str(kind)} if kind not in ("function", "namespace"):
            leave_out(f"tools: {shorten(kind, 50)}")
            return []
    raise ValueError("expected a function with a name")


def _stops(value):
    """Make a list of stop strings, and leave out empty strings, which would end nothing."""
    value = [value] if isinstance(value, str) else value
    return [text for text in value if text != ""] if isinstance(value, list) else value


def _listed(value):
    """Put a single prompt, which is a text or a list of tokens, into a list."""
    is_one = isinstance(value, str) or (isinstance(value, list) and isinstance([*value, 0][0], int))
    return [value] if is_one and value != [] else value


OBJECT, IMAGE = TypeAdapter(Body), {"type": "text", "text": "(an image was left out)"}
# A lone surrogate in JSON. The group matches what is kept: other escapes, and whole pairs.
HALF = re.compile(rb"(?i)(\\[^u]|\\ud[89ab][\da-f]{2}\\ud[c-f][\da-f]{2})|\\ud[89a-f][\da-f]{2}")
Number, Positive = Annotated[float, Field(ge=-100, le=100)], Annotated[float, Field(ge=0, le=100)]
Whole, Share = Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=0, le=1)]
Stop = Annotated[str, Field(max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=64, fail_fast=True), BeforeValidator(_stops)]
StreamOption = Literal["include_usage", "include_obfuscation", "continuous_usage_stats"]
Prompt = str | Annotated[list[Whole], Field(fail_fast=True)]
Functions = Annotated[list[dict], BeforeValidator(functions)]  # of one tool
Content = str | list[_object(type=Literal["text"], text=NotRequired[str | None])] | None
Arguments = Annotated[dict, BeforeValidator(_arguments)]
Calls = list[_object(function=_object(arguments=NotRequired[Arguments]))] | None
Message = _object(role=str, content=NotRequired[Content], tool_calls=NotRequired[Calls])
Message = Annotated[Message, BeforeValidator(shown)]
Schema = Annotated[Body | None, BeforeValidator(schema_of)]
Choice = Annotated[str | list[str], BeforeValidator(choice_of)]
Form = {"format": Schema, "effort": str | None, "verbosity": str | None}
Form = with_config(ConfigDict(strict=True, extra="forbid"))(TypedDict("Form", Form, total=False))


class Request(BaseModel):
    """The fields that requests of chats and of completions share; null means the default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
    model: str = DEFAULT
    stream: bool = False
    stream_options: dict[StreamOption, bool | None] = {}
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**64)
    stop: Stops = []
    response_format: Schema = None
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
    frequency_penalty: Number | None = None

    def make(
        self, prompts: list, served: Served, scores: int | None, form: str | None, echo=False
    ) -> list[Ask]:
        """Make ``n`` asks for each prompt, which is a pair of tokens and ``Ask.cuts``."""
        args, size, bias = served.args, served.size, self.logit_bias
        ids = f"one or more tokens, each less than {size}"
        _expect(self.model in (DEFAULT, served.name, args.model), "model", served.name, self.model)
        _expect((self.top_k or 0) < size, "top_k", f"less than {size}", self.top_k)
        _expect(max(bias, default=0) < size, "logit_bias", ids, bias)
        _expect(self.n * len(prompts) <= 1024, "n", "at most 1024 texts of a request", self.n)
        for tokens, _ in prompts:
            _expect(tokens and max(tokens) < size, "prompt", ids, tokens)
        sampling = {"temp": args.temp, "top_p": args.top_p, "top_k": args.sampling_top_k}
        sampling |= {"min_p": args.min_p} | self.model_dump(include=SAMPLING, exclude_none=True)
        if sampling["top_p"] == 0 or sampling["temp"] < 1e-4:  # lower temperatures make logits inf
            sampling["temp"] = 0.0
        ends = served.tokenizer.encode("\n") + sorted(served.tokenizer.eos_token_ids)
        sampling["xtc_special_tokens"] = ends  # as in mlx-lm's server
        penalties = self.model_dump(include=PENALTIES, exclude_none=True)
        length, drafted = self.max_completion_tokens or self.max_tokens, self.num_draft_tokens
        length = args.max_tokens if length is None else length
        most = served.positions if length is None else length
        drafted = args.num_draft_tokens if drafted is None else drafted
        given = {"sampling": sampling, "penalties": penalties, "form": form, "echo": echo}
        given |= {"stops": self.stop, "logprobs": scores, "num_draft_tokens": drafted}
        given["is_open"] = length is None
        seeds = [None if self.seed is None else (self.seed + i) % 2**64 for i in range(self.n)]
        each = [(ids, min(most, served.positions - len(ids)), cuts) for ids, cuts in prompts]
        return [Ask(ids, n, seed=s, cuts=cuts, **given) for ids, n, cuts in each for s in seeds]


class ChatRequest(Request):
    """A request for the next message of a chat."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    tools: list[Functions] = Field([], fail_fast=True)
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template_kwargs: Body = {}
    reasoning: dict[str, str | None] = {}
    reasoning_effort: str | None = None
    thinking: Body = {}
    enable_thinking: bool | None = None

    def read(self, served: Served) -> tuple[list[Ask], list[Splitter]]:
        """Make the asks and a ``Splitter`` for each."""
        tokenizer, tools = served.tokenizer, [*chain(*self.tools)]
        tools = tools if self.tool_choice != "none" and tools else None
        effort, thinks = self.reasoning.get("effort") or self.reasoning_effort, self.enable_thinking
        thinks = False if self.thinking.get("type") == "disabled" else thinks
        given = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
        given |= {} if thinks is None else {"enable_thinking": thinks}
        given = served.args.chat_template_args | given | self.chat_template_kwargs
        *prompt, state = chat_tokens(tokenizer, self.messages, tools, given, served.has_states)
        scores = self.top_logprobs if self.logprobs or self.top_logprobs else None
        form, one = (self.response_format, self.tool_choice), not self.parallel_tool_calls
        form = grammar(tokenizer, state, *form, tools, one)
        if form and self.messages[-1]["role"] == "assistant":
            words = "messages: an answer of a form cannot go on after an assistant's last message"
            raise Refused(words, "messages")
        asks = self.make([prompt], served, scores, form)
        return asks, [Splitter(tokenizer, tools, state, one) for _ in asks]


class CompletionRequest(Request):
    """A request for texts that go on after prompts."""

    prompt: Annotated[list[Prompt], Field(min_length=1, fail_fast=True), BeforeValidator(_listed)]
    max_tokens: Whole | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    def read(self, served: Served) -> tuple[list[Ask], list[Splitter]]:
        """Make the asks and, for each, a ``Splitter`` that leaves its text as it is."""
        encode, scores = served.tokenizer.encode, self.logprobs is not None
        prompts = [(encode(p) if isinstance(p, str) else p, []) for p in self.prompt]
        form = grammar(served.tokenizer, "content", self.response_format)
        asks = self.make(prompts, served, self.logprobs, form, self.echo and scores)
        return asks, [Splitter(served.tokenizer, None, "content") for _ in asks]


class Answer(Protocol):
    """How a dialect sends an answer: ``whole``, or as a stream of ``begin``, ``part``, ``end``.

    ``idle`` is the event that keeps a silent stream alive; if it is None, the server sends an SSE
    comment. Each of ``parts`` is a whole text.
    """

    def whole(self, parts: list[Part]) -> Body: ...
    def begin(self) -> Iterable[Body]: ...
    def idle(self) -> Body | None: ...
    def part(self, index: int, part: Part) -> Iterable[Body]: ...
    def end(self, parts: list[Part]) -> Iterable[Body | str]: ...


@dataclass(frozen=True, eq=False)
class Dialect:
    """What clients send to a path, and how they are answered."""

    path: str
    kind: type[ChatRequest] | type[CompletionRequest]
    answer: Callable[["Asked"], Answer]
    error: Callable[[str, str | None, int, str | None], Body]  # takes words, field, status and code
    names: dict[str, str] = field(default_factory=dict)  # from the dialect's to ``kind``'s
    prompt: str = "messages"
    too_long: str = (  # the words that clients look for
        "This model's maximum context length is {most} tokens. However, your {prompt} resulted in "
        "{size} tokens. Please reduce the length of the {prompt}."
    )
    writes: bool = True  # False: only the prompt's tokens are counted

    def check(self, body: Body) -> ChatRequest | CompletionRequest:
        """Check the fields of a request. ``Refused`` names a wrong field."""
        match body:
            case {"tool_choice": {"disable_parallel_tool_use": True}}:  # Anthropic's
                body = body | {"parallel_tool_calls": False}
        # The two names of a field, the dialect's and ``kind``'s, are swapped. So the dialect's name
        # is accepted, and ``kind``'s name is refused.
        names = self.names | {name: own for own, name in self.names.items()}
        given = {k: v for k, v in body.items() if k not in TAKEN and v not in (None, ONLY.get(k))}
        try:
            return self.kind.model_validate({names.get(k, k): v for k, v in given.items()})
        except ValidationError as error:
            found = [(_place(wrong, names), wrong) for wrong in error.errors(include_url=False)]
        where, wrong = max(found, key=lambda pair: len(pair[0]))  # a union's deepest error
        said = [other["msg"] for place, other in found if place == where]
        words = " or ".join(dict.fromkeys(said)).removeprefix("Value error, ")
        words = words.replace("Input should be", "expected", 1).replace("Input should be ", "")
        words = words.replace("Extra inputs are", "a field that is")
        got = shorten(wrong["input"], 100)
        raise Refused(f"{'.'.join(where)}: {words}, got {got!r}", where[0])


class Asked:
    """A request that was checked: the texts to write, what splits them, and the answer."""

    def __init__(self, dialect: Dialect, body: Body, served: Served):
        self.body, self.request, self.served = body, dialect.check(body), served
        self.asks, self.splitters = self.request.read(served)
        self.stream, most = self.request.stream and dialect.writes, served.positions
        size = max(len(ask.tokens) for ask in self.asks)
        if dialect.writes and size >= most:
            words = dialect.too_long.format(most=most, prompt=dialect.prompt, size=size)
            raise Refused(words, dialect.prompt, code="context_length_exceeded")
        self.id, self.created = uuid4().hex, int(time.time())
        self.answer = dialect.answer(self)
        self.asks = self.asks if dialect.writes else []
