"""Anthropic's ``/v1/messages``, as Claude Code speaks it. No answer is kept."""

import json
from collections.abc import Iterable
from dataclasses import replace

from .ask import Body, Items, Part
from .requests import Asked, Dialect
from .responses import ItemsRequest

SIGNATURE = "moelab"  # of thinking; clients may drop what has none
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {500: "api_error", 503: "overloaded_error"}
DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
DELTAS |= {"call": ("input_json_delta", "partial_json")}


class _Message:
    """An answer that is a list of blocks."""

    def __init__(self, asked: Asked):
        self._items = Items()
        self._answer = {"id": f"msg-{asked.id}", "type": "message", "role": "assistant"}
        self._answer |= {"model": asked.served.name, "content": [], "stop_reason": None}
        self._answer |= {"stop_sequence": None, "usage": _usage(len(asked.asks[0].tokens), 0, 0)}

    def whole(self, parts: list[Part]) -> Body:
        if not parts:  # of a request to count
            return {"input_tokens": self._answer["usage"]["input_tokens"]}
        return self._answer | self._ended(*parts) | {"content": [*map(_block, parts[0].runs)]}

    def begin(self) -> Iterable[Body]:
        yield {"type": "message_start", "message": self._answer}

    def idle(self) -> Body:
        return {"type": "ping"}

    def part(self, index: int, part: Part) -> Iterable[Body]:
        for step, number, run in self._items.steps(part):
            kind, field = DELTAS[run.kind]
            if step == "begin":
                yield _event("start", number, content_block=_block(run))
            elif step == "more":
                yield _event("delta", number, delta={"type": kind, field: run.text})
            else:
                if run.kind == "reasoning":
                    signed = {"type": "signature_delta", "signature": SIGNATURE}
                    yield _event("delta", number, delta=signed)
                yield _event("stop", number)

    def end(self, parts: list[Part]) -> Iterable[Body]:
        delta = self._ended(*parts)
        yield {"type": "message_delta", "usage": delta.pop("usage"), "delta": delta}
        yield {"type": "message_stop"}

    @staticmethod
    def _ended(part):
        stop = part.stop if part.finish == "stop" else None
        reason = "stop_sequence" if stop else REASONS[part.finish]
        return {"stop_reason": reason, "stop_sequence": stop, "usage": _usage(*part.usage)}


def _block(run):
    if run.kind == "content":
        return {"type": "text", "text": run.text}
    if run.kind == "reasoning":
        return {"type": "thinking", "thinking": run.text, "signature": run.text and SIGNATURE}
    given = json.loads(run.text or "{}")
    return {"type": "tool_use", "id": run.id, "name": run.name, "input": given}


def _event(kind, number, **fields):
    return {"type": f"content_block_{kind}", "index": number} | fields


def _usage(read, cached, written):
    usage = {"input_tokens": read - cached, "cache_read_input_tokens": cached}
    return usage | {"cache_creation_input_tokens": 0, "output_tokens": written}


def _error(words, param, status, code):
    kind = ERRORS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": words}}


MESSAGES = Dialect(
    "/v1/messages",
    ItemsRequest,
    _Message,
    _error,
    names={"stop_sequences": "stop", "output_config": "reasoning"},
    too_long="prompt is too long: {size} tokens > {most} maximum",
)
COUNT_TOKENS = replace(MESSAGES, path="/v1/messages/count_tokens", writes=False)
