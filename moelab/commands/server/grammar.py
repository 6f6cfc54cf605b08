"""Keeps a text to the form that a request asks for: JSON of a schema, or calls.

llguidance (the extra ``moelab[schema]``) is needed, and is imported only for such a request.
"""

import json
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .ask import Body, Refused
from .prompts import same

CALLS = "json_tools"  # mlx-lm's parser of calls that are JSON in tags


def _library():
    try:
        import llguidance
    except ImportError as e:
        raise Refused("an answer of a form needs llguidance: pip install 'moelab[schema]'") from e
    return llguidance


def check(schema: Body, *path: str) -> None:
    """Refuse an unsupported schema; the error says where, by a path that begins with ``path``."""
    matcher = _library().LLMatcher
    known = {name: schema[name] for name in ("$defs", "definitions") if name in schema}

    def wrong(part):
        return matcher.validate_grammar(matcher.grammar_from_json_schema(known | part))

    def innermost(part):
        """Return the names that lead to the innermost part with the same error."""
        for name, inner in part.items() if isinstance(part, dict) else enumerate(part):
            names = innermost(inner) if isinstance(inner, dict | list) else []
            if names or (isinstance(inner, dict) and wrong(inner) == words):
                return [str(name), *names]
        return []

    if words := wrong(schema):
        raise Refused(f"{'.'.join([*path, *innermost(schema)])}: {' '.join(words.split())}")


def schema_of(value: Any) -> Body | None:
    """Return the schema that a request's field asks for; None if the field allows any text."""
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": dict(inner)}:
            return schema_of({**inner, "type": "json_schema"})
        case {"type": "json_schema", "schema": dict(schema)}:
            check(schema, "schema")
            return schema
    raise ValueError("expected text, json_object, or json_schema with a schema")


def choice_of(value: Any) -> str | list[str]:
    """Read a ``tool_choice``: auto, none, required, or a list with a function's name."""
    match {"type": value} if isinstance(value, str) else value:
        case {"type": "auto" | "none" | "required" as kind}:
            return kind
        case {"type": "any"}:
            return "required"
        case {"function": {"name": str(name)}} | {"type": "function" | "tool", "name": str(name)}:
            return [name]
    raise ValueError("expected auto, none, required, any or a function's name")


def grammar(
    tokenizer: TokenizerWrapper,
    state: str,
    schema: Body | None,
    choice: str | list[str] = "auto",
    tools: list[Body] | None = None,
    one: bool = False,
) -> str | None:
    """Write the grammar of an answer or of calls in llguidance's Lark; None allows any text.

    A thought may come first, unless ``state`` (of ``Splitter``) is "content".
    """
    forced = choice not in ("auto", "none")
    if schema is None and not forced:
        return None
    if state not in ("normal", "reasoning", "content"):
        raise Refused(f"this model's answers begin with a {state}, so no form can be asked for")
    named = [tool["function"] for tool in tools or ()]
    named = [f for f in named if not isinstance(choice, list) or f["name"] in choice]
    if forced and not named:
        raise Refused(f"tool_choice: expected one of the tools, got {choice}", "tool_choice")
    rules, thought = [r"WS: /[ \n]{1,2}/"], ""
    if tokenizer.has_thinking and state != "content":
        begun, end = tokenizer.think_start_tokens, tokenizer.think_end_tokens
        ends = ",".join(map(str, [end[0], *sorted(tokenizer.eos_token_ids)]))
        thought = "thought" if state == "reasoning" else f"({_exactly(begun)} thought)?"
        rules.append(f"thought: <[^{ends}]>* {_exactly(end)} WS?")
    forms = [] if forced else [_json(schema)]
    if named:
        forms.append("call" if one or isinstance(choice, list) else "call (WS? call){0,63}")
        rules.append(_call(tokenizer, named))
    text = "\n".join([f"start: {thought} ({' | '.join(forms)})", *rules])
    if words := _matcher(text, tokenizer).get_error():
        raise Refused(f"the form that was asked for: {words}")
    return text


def _call(tokenizer, functions):
    """Write the rule for a call of one of the functions."""
    parser = tokenizer.tool_parser.__module__.rpartition(".")[2]
    if parser != CALLS:
        words = f"calls can be forced or go with a form only in {CALLS} (JSON in tags)"
        raise Refused(f"tools: {words}; this model's format is {parser}", "tools")
    calls = []
    for function in functions:
        schema = (function.get("parameters") or {}) | {"type": "object"}
        check(schema, "tools", function["name"], "parameters")
        name = json.dumps(function["name"], ensure_ascii=False)
        begun = f'\n{{"name": {name}, "arguments": '
        calls.append(f"{json.dumps(begun)} {_json(schema)}")
    tags = (tokenizer.tool_call_start, tokenizer.tool_call_start_tokens)
    tags = tags, (tokenizer.tool_call_end, tokenizer.tool_call_end_tokens)
    begun, end = (_exactly(ids) if len(ids) == 1 else json.dumps(tag) for tag, ids in tags)
    return f'call: {begun} ({" | ".join(calls)}) "}}\\n" {end}'


def _json(schema):
    one_space = {"whitespace_pattern": " "}  # at most one: some models write spaces without end
    return f"%json {json.dumps(schema | {'x-guidance': one_space})}"


def _exactly(tokens):
    return " ".join(f"<[{token}]>" for token in tokens)


@lru_cache(maxsize=64)
def _matcher(text, tokenizer):
    return _library().LLMatcher(_vocabulary(tokenizer), text, log_level=0)


@lru_cache(maxsize=2)
def _vocabulary(tokenizer):
    known, ends = getattr(tokenizer, "backend_tokenizer", None), sorted(tokenizer.eos_token_ids)
    if known is None:
        raise Refused("no form of the answer can be asked for: this needs a fast tokenizer")
    return _library().LLTokenizer(known.to_str(), eos_token=ends)


class Mask:
    """A logits processor that allows only a grammar's texts after a prompt of ``size`` tokens."""

    def __init__(self, text: str, tokenizer: TokenizerWrapper, size: int):
        self._matcher, self._size = _matcher(text, tokenizer).deep_copy(), size
        self._written = np.array([], np.uint32)  # what the matcher has read

    @property
    def error(self) -> str:
        """The error that stopped llguidance (as at one of its limits), or an empty text."""
        return self._matcher.get_error().partition("\n")[0]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the logits [1, V], with -inf for tokens that cannot follow ``tokens`` [T]."""
        written = np.array(tokens)[self._size :]
        kept = same(self._written, written)  # less than was read, if a draft was rejected
        self._matcher.rollback(len(self._written) - kept)
        kept += self._matcher.try_consume_tokens(written[kept:].tolist())
        self._written = written[:kept]
        if kept < len(written):  # a draft that will be rejected, or tokens after the end
            return logits
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        may = np.unpackbits(bits, count=logits.shape[-1], bitorder="little").astype(bool)
        return mx.where(mx.array(may), logits, -mx.inf)
