"""Anthropic's ``/v1/messages``, as Claude Code speaks it. No answer is kept."""

import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from .ask import Ask, Refused
from .requests import Stop
from .responses import Responses, Translated
from .text import Delta, Splitter

BILLING = "x-anthropic-billing-header:"  # begins a text of Claude Code that no model should read
SIGNATURE = "moelab"  # of thinking; clients may drop what has none
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {500: "api_error", 503: "overloaded_error"}
DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}


class _Request(Translated):
    stop: list[Stop] = Field([], max_length=64, alias="stop_sequences")
    tool_choice: dict[str, Literal["auto", "none", False]] = Field({"type": "auto"})
    thinking: dict[str, Any] = Field({})
    reasoning: dict[Literal["effort"], str | None] = Field({}, alias="output_config")

    def read(self, served: Any) -> tuple[list[Ask], list[Splitter]]:
        """Make the ask, and what splits its text."""
        self.system = [p for p in self.system if not p.get("content", "").startswith(BILLING)]
        if self.messages[-1]["role"] == "assistant":
            words = "expected the user's as the last, since no other can be continued"
            raise Refused(f"messages: {words}", "messages")
        self.tool_choice = self.tool_choice.get("type", "auto")
        if self.thinking.get("type") == "disabled":
            self.reasoning = {"effort": "none"}
        return super().read(served)


class Messages(Responses):
    """A request and its answer, a list of blocks."""

    paths, names, kind = ("/v1/messages",), ("msg", "message", "message"), _Request

    def __init__(self, body: dict[str, Any], served: Any):
        super().__init__(body, served)
        self.answer = {"id": self.head["id"], "type": "message", "role": "assistant"}
        self.answer |= {"model": served.name, "content": [], "stop_reason": None}
        self.answer |= {"stop_sequence": None, "usage": _usage(len(self.asks[0].tokens), 0, 0)}

    def begin(self) -> Iterable[dict[str, Any]]:
        """Begin a stream."""
        yield {"type": "message_start", "message": self.answer}

    def end(self, deltas: list[Delta]) -> Iterable[dict[str, Any]]:
        """End a stream."""
        yield from self._end_item("completed")
        finish, usage = deltas[0].finish, _usage(*deltas[0].usage)
        stop = self.stop if finish == "stop" else None
        ended = {"stop_reason": "stop_sequence" if stop else REASONS[finish], "stop_sequence": stop}
        self.answer = self.answer | ended | {"usage": usage, "content": self.items}
        yield {"type": "message_delta", "delta": ended, "usage": usage}
        yield {"type": "message_stop"}

    @staticmethod
    def error(words: str, param: str | None, status: int) -> dict[str, Any]:
        """Say what was wrong, instead of an answer or within a stream."""
        kind = ERRORS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": words}}

    def _item(self, kind, text, status="in_progress"):
        if kind == "text":
            return {"type": "text", "text": text}
        if kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": text and SIGNATURE}
        given = json.loads(text or "{}")
        return {"type": "tool_use", "id": kind.id, "name": kind.name, "input": given}

    def _opened(self, kind):
        yield self._event("start", content_block=self._item(kind, ""))

    def _more(self, kind, text):
        name, field = DELTAS.get(kind, ("input_json_delta", "partial_json"))
        return self._event("delta", delta={"type": name, field: text})

    def _closed(self, kind, item):
        if kind == "reasoning":
            yield self._event("delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        yield self._event("stop")

    def _event(self, kind, **fields):
        return {"type": f"content_block_{kind}", "index": len(self.items)} | fields


def _usage(read, cached, written):
    usage = {"input_tokens": read - cached, "cache_read_input_tokens": cached}
    return usage | {"cache_creation_input_tokens": 0, "output_tokens": written}
