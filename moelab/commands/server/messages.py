"""Anthropic's ``/v1/messages``, as Claude Code speaks it. No answer is kept."""

import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from ...checkpoint import shorten
from .ask import Ask, Refused
from .requests import Message, Stop, Tool
from .responses import UNSAID, Responses, Translated, called, function, made, returned, texts
from .text import Delta, Splitter

BILLING = "x-anthropic-billing-header:"  # begins a text of Claude Code that no model should read
SIGNATURE = "moelab"  # of thinking; clients may drop what has none
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {500: "api_error", 503: "overloaded_error"}
BLOCKS = {"text": {"type": "text", "text": ""}}
BLOCKS |= {"reasoning": {"type": "thinking", "thinking": "", "signature": ""}}


def _pieces(message):
    """Make a piece of a chat's messages of each block of a message."""
    pieces, blocks = [], message["content"]
    for block in [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks:
        match block["type"]:
            case "text":
                piece = {"content": texts(block["text"])}
            case "thinking":
                piece = {"reasoning": texts(block["thinking"])}
            case "redacted_thinking":
                piece = UNSAID
            case "tool_use":
                given = json.dumps(block["input"], ensure_ascii=False)
                piece = called(block["id"], block["name"], given)
            case "tool_result":
                piece = returned(block["tool_use_id"], block.get("content") or "")
            case kind:
                raise ValueError(f"this server cannot read {shorten(kind, 50)}")
        pieces.append({"role": message["role"]} | piece)
    return pieces


def _system(blocks):
    pieces = _pieces({"role": "system", "content": blocks})
    return [piece for piece in pieces if not piece["content"].startswith(BILLING)]


Turn = made(list[Message], _pieces, "text, thinking, tool_use and tool_result")
System = made(list[Message], _system, "texts")
Own = made(Tool, lambda t: function(t, "input_schema", None, "custom"), "the client's own tools")
Choice = made(Literal["auto", "none"], lambda choice: choice["type"], "a type")


class _Request(Translated):
    messages: list[Turn] = Field(min_length=1)
    system: System = Field([])
    stop: list[Stop] = Field([], max_length=64, alias="stop_sequences")
    tools: list[Own] = Field([])
    tool_choice: Choice = "auto"
    thinking: dict[str, Any] = Field({})
    output_config: dict[Literal["effort"], str | None] = Field({})

    def read(self, served: Any) -> tuple[list[Ask], list[Splitter]]:
        """Make the ask, and what splits its text."""
        pieces = [*self.system, *(piece for pieces in self.messages for piece in pieces)]
        if not pieces or pieces[-1]["role"] == "assistant":
            words = "expected the user's as the last, since no other can be continued"
            raise Refused(f"messages: {words}", "messages")
        off = self.thinking.get("type") == "disabled"
        return self.read_as(pieces, "none" if off else self.output_config.get("effort"), served)


class Messages(Responses):
    """A request and its answer, a list of blocks."""

    paths, names, kind = ("/v1/messages",), ("msg", "message", "message"), _Request

    def __init__(self, body: dict[str, Any], served: Any):
        super().__init__(body, served)
        if (body.get("tool_choice") or {}).get("disable_parallel_tool_use"):
            self.calls = 1
        self.answer = {"id": self.head["id"], "type": "message", "role": "assistant"}
        self.answer |= {"model": served.name, "content": self.items, "stop_reason": None}
        self.answer |= {"stop_sequence": None, "usage": _usage(len(self.asks[0].tokens), 0, 0)}

    def begin(self) -> Iterable[dict[str, Any]]:
        """Begin a stream."""
        yield {"type": "message_start", "message": self.answer | {"content": []}}

    def end(self, deltas: list[Delta]) -> Iterable[dict[str, Any]]:
        """End a stream."""
        yield from self._end_item("")
        finish, usage = deltas[0].finish, _usage(*deltas[0].usage)
        stop = self.stop if finish == "stop" else None
        reason = "stop_sequence" if stop else REASONS.get(finish, "end_turn")
        ended = {"stop_reason": reason, "stop_sequence": stop}
        self.answer |= ended | {"usage": usage}
        yield {"type": "message_delta", "delta": ended, "usage": usage}
        yield {"type": "message_stop"}

    @staticmethod
    def error(words: str, param: str | None, status: int) -> dict[str, Any]:
        """Say what was wrong, instead of an answer or within a stream."""
        kind = ERRORS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": words}}

    def _open(self, kind):
        call = {} if kind in BLOCKS else {"type": "tool_use", "id": kind.id, "name": kind.name}
        self.items.append(call | {"input": {}} if call else {**BLOCKS[kind]})
        yield self._event("start", content_block={**self.items[-1]})

    def _more(self, kind, text):
        name = {"text": "text_delta", "reasoning": "thinking_delta"}.get(kind, "input_json_delta")
        field = {"text": "text", "reasoning": "thinking"}.get(kind, "partial_json")
        return self._event("delta", delta={"type": name, field: text})

    def _close(self, kind, text, status):
        block = self.items[-1]
        if kind == "reasoning":
            block |= {"thinking": text, "signature": SIGNATURE}
            yield self._event("delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        else:
            block |= {"text": text} if kind == "text" else {"input": json.loads(text)}
        yield self._event("stop")

    def _event(self, kind, **fields):
        return {"type": f"content_block_{kind}", "index": len(self.items) - 1} | fields


class CountTokens(Messages):
    """A request for the number of tokens of a prompt."""

    paths = ("/v1/messages/count_tokens",)

    def __init__(self, body: dict[str, Any], served: Any):
        super().__init__(body, served)
        self.answer = {"input_tokens": len(self.asks[0].tokens)}
        self.asks, self.stream = [], False

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """Make the answer, for which nothing is written."""
        return self.answer


def _usage(read, cached, written):
    usage = {"input_tokens": read - cached, "cache_read_input_tokens": cached}
    return usage | {"cache_creation_input_tokens": 0, "output_tokens": written}
