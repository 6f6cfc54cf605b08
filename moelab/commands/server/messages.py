"""Anthropic's ``/v1/messages``, as Claude Code speaks it. No answer is kept."""

import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from .ask import Ask, Part
from .requests import Stops
from .responses import Responses, Translated
from .text import Splitter

BILLING = "x-anthropic-billing-header:"  # begins a text of Claude Code that no model should read
SIGNATURE = "moelab"  # of thinking; clients may drop what has none
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {500: "api_error", 503: "overloaded_error"}
DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
DELTAS |= {"call": ("input_json_delta", "partial_json")}


class _Request(Translated):
    stop: Stops = Field([], alias="stop_sequences")
    thinking: dict[str, Any] = Field({})
    reasoning: dict[Literal["effort"], str | None] = Field({}, alias="output_config")

    def read(self, served: Any) -> tuple[list[Ask], list[Splitter]]:
        self.system = [p for p in self.system if not p.get("content", "").startswith(BILLING)]
        if self.thinking.get("type") == "disabled":
            self.enable_thinking = False
        return super().read(served)


class Messages(Responses):
    """A request and its answer, a list of blocks."""

    path, kind, names = "/v1/messages", _Request, ("msg", "message", "message")
    field, too_long = "messages", "prompt is too long: {size} tokens > {most} maximum"

    def __init__(self, body: dict[str, Any], served: Any):
        super().__init__(body, served)
        self.answer = {"id": self.head["id"], "type": "message", "role": "assistant"}
        self.answer |= {"model": served.name, "content": [], "stop_reason": None}
        self.answer |= {"stop_sequence": None, "usage": _usage(len(self.asks[0].tokens), 0, 0)}

    def whole(self, parts: list[Part]) -> dict[str, Any]:
        part = parts[0]
        stop = part.stop if part.finish == "stop" else None
        ended = {"stop_reason": "stop_sequence" if stop else REASONS[part.finish]}
        ended |= {"stop_sequence": stop, "usage": _usage(*part.usage)}
        return self.answer | ended | {"content": [self._block(run) for run in part.runs]}

    def begin(self) -> Iterable[dict[str, Any]]:
        yield {"type": "message_start", "message": self.answer}

    def idle(self) -> dict[str, Any]:
        return {"type": "ping"}

    def end(self, parts: list[Part]) -> Iterable[dict[str, Any]]:
        yield from self._end_item("completed")
        answer = self.whole(parts)
        ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": answer["usage"]}
        yield {"type": "message_stop"}

    @staticmethod
    def error(words: str, param: str | None, status: int, code: str | None) -> dict[str, Any]:
        kind = ERRORS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": words}}

    def _block(self, run):
        if run.kind == "content":
            return {"type": "text", "text": run.text}
        if run.kind == "reasoning":
            return {"type": "thinking", "thinking": run.text, "signature": run.text and SIGNATURE}
        given = json.loads(run.text or "{}")
        return {"type": "tool_use", "id": run.id, "name": run.name, "input": given}

    def _opened(self, number, run):
        yield self._event("start", number, content_block=self._block(run._replace(text="")))

    def _more(self, number, run):
        name, field = DELTAS[run.kind]
        return self._event("delta", number, delta={"type": name, field: run.text})

    def _closed(self, number, run, status):
        if run.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            yield self._event("delta", number, delta=signed)
        yield self._event("stop", number)

    def _event(self, kind, number, **fields):
        return {"type": f"content_block_{kind}", "index": number} | fields


class CountTokens(Messages):
    """A request to count the tokens of a prompt, of whatever size."""

    path = "/v1/messages/count_tokens"

    def __init__(self, body: dict[str, Any], served: Any):
        super().__init__(body | {"stream": False}, served)
        self.asks = []

    def _limit(self, most):
        pass

    def whole(self, parts: list[Part]) -> dict[str, Any]:
        return {"input_tokens": self.answer["usage"]["input_tokens"]}


def _usage(read, cached, written):
    usage = {"input_tokens": read - cached, "cache_read_input_tokens": cached}
    return usage | {"cache_creation_input_tokens": 0, "output_tokens": written}
