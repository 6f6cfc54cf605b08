"""Dialects of coding agents: OpenAI's ``/v1/responses`` (Codex), Anthropic's ``/v1/messages``.

Both take a conversation as items, which become a chat's messages, and answer with items.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, count
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ...checkpoint import shorten
from .ask import Ask, Body, Part, Run, Served, joined
from .completions import error
from .requests import Asked, ChatRequest, Dialect, Form, Message, leave_out, shown
from .text import Splitter

HEADS = {"content": {"type": "message", "role": "assistant"}}
HEADS |= {"reasoning": {"type": "reasoning", "summary": []}, "call": {"type": "function_call"}}
# Calls of services that this server does not have.
SERVICES = {"web_search_call", "file_search_call", "tool_search_call", "tool_search_output"}
SERVICES |= {"image_generation_call", "code_interpreter_call", "mcp_list_tools"}
_latest = {}  # items of the latest answers, by id: clients may send only an item's id
STATES = {"begin": "in_progress", "more": "in_progress", "end": "completed", "cut": "incomplete"}
TEXTS = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
SIGNATURE = "moelab"  # the signature of thoughts; clients may drop thoughts without one
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {500: "api_error", 503: "overloaded_error"}
DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
DELTAS |= {"call": ("input_json_delta", "partial_json")}


def pieces(value: object, role: str = "user") -> Iterator[Body]:
    """Turn messages, OpenAI's items or Anthropic's blocks into pieces of a chat's messages."""
    match value:
        case str(text) | {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            yield {"role": role, "content": text}
        case {"type": "reasoning_text", "text": str(text)} | {"thinking": str(text)}:
            yield {"role": "assistant", "reasoning": text}
        case {"type": "reasoning" | "redacted_thinking"}:  # thoughts that may be unreadable
            yield from pieces(value.get("content") or [])
        case {"type": "custom_tool_call", "call_id": str(), "name": str(), "input": str(given)}:
            yield from pieces(value | {"type": "function_call", "arguments": {"input": given}})
        case {"type": "local_shell_call", "call_id": str(), "action": dict(given)}:
            yield from pieces({**value, "type": "", "name": "local_shell", "arguments": given})
        case {"call_id": str(number), "name": str(name), "arguments": given} | {
            "id": str(number),
            "name": str(name),
            "input": given,
        }:
            name = f"{value['namespace']}__{name}" if value.get("namespace") else name
            call = {"type": "function", "function": {"name": name, "arguments": given}}
            yield {"role": "assistant", "tool_calls": [{"id": number} | call]}
        case {"call_id": str(number), "output": _} | {"tool_use_id": str(number)}:
            said = value.get("output") or value.get("content") or ""
            output = pieces(shown({"role": "tool", "content": said})["content"])
            text = "".join(piece.get("content", "") for piece in output)
            yield {"role": "tool", "tool_call_id": number, "content": text}
        case {"role": str(role), "content": content}:
            yield from pieces(content, role)
        case list():
            for part in value:
                yield from pieces(part, role)
        case {"type": "item_reference", "id": str(number)} if item := _latest.get(number):
            yield from pieces(item)
        case {"type": "item_reference"}:
            raise ValueError("expected the id of an item of a recent answer, or the item itself")
        case {"type": str(kind)} if kind in SERVICES:
            leave_out(kind)
        case _:
            raise ValueError(f"expected a text, thought, call or result, not {shorten(value, 50)}")


Pieces = Annotated[list[Message], BeforeValidator(lambda value: [*pieces(value)])]
System = Annotated[list[Message], BeforeValidator(lambda value: [*pieces(value, "system")])]


class ItemsRequest(ChatRequest):
    """A request of items or blocks. It becomes a chat's request, without log probabilities."""

    n: Literal[1] = 1
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    messages: Pieces = Field(min_length=1)
    system: System = Field([])
    text: Form = Field({})
    # ``include`` asks for items that no answer here has, or for thoughts, which every answer has.
    include: list[Annotated[str, Field(pattern="^(reasoning|[a-z_]+_call)")]] = Field([])

    def read(self, served: Served) -> tuple[list[Ask], list[Splitter]]:
        """Join the pieces into messages that templates take, and make an ask from the messages.

        Consecutive messages of one role, except tools' results, become one message. System messages
        after another role become user messages.
        """
        messages = []
        for piece in self.system + self.messages:
            role, before = piece.pop("role"), messages[-1]["role"] if messages else "system"
            # Claude Code sends such a text, which no model should read.
            if role == "system" and piece["content"].startswith("x-anthropic-billing-header:"):
                continue
            if role in ("system", "developer"):
                role = "system" if before == "system" else "user"
            if not messages or role == "tool" or role != before:
                messages.append({"role": role, "content": ""})
            for name, more in piece.items():
                said, gap = messages[-1].get(name), more[:0] if role == "assistant" else "\n\n"
                messages[-1][name] = said + gap + more if said else more
        self.messages = messages
        self.response_format = self.text.get("format") or self.response_format
        self.reasoning_effort = self.text.get("effort") or self.reasoning_effort
        return super().read(served)


class _Items:
    """An answer as a list of items. Each call is an item; so are neighbouring runs of one kind."""

    _number, _runs = -1, ()  # the current item's number and runs

    def _steps(self, part: Part) -> Iterator[tuple[str, int, Run]]:
        """Yield triples: a step (``begin``, ``more``, ``end``, ``cut``), item number and run."""
        for run in part.runs:
            if not self._runs or self._runs[0].kind != run.kind or run.kind == "call":
                yield from self._end("end")
                self._number, self._runs = self._number + 1, []
                yield "begin", self._number, run._replace(text="")
            self._runs.append(run)
            yield "more", self._number, run
        if part.finish:
            yield from self._end("cut" if part.finish == "length" else "end")

    def _end(self, step):
        return ((step, self._number, run) for run in joined(self._runs))


class _Response(_Items):
    """An answer of OpenAI's items."""

    def __init__(self, asked: Asked):
        self._numbers, self._output = count(), []  # the events' numbers, the items that ended
        tools = asked.body.get("tools") or ()
        self._spaces = [tool["name"] for tool in tools if tool.get("type") == "namespace"]
        self._answer = {"id": f"resp-{asked.id}", "object": "response", "status": "in_progress"}
        self._answer |= {"created_at": asked.created, "model": asked.served.name, "output": []}
        self._answer |= {"tools": [], "tool_choice": asked.body.get("tool_choice") or "auto"}
        self._answer |= {"parallel_tool_calls": asked.request.parallel_tool_calls}

    def whole(self, parts: list[Part]) -> Body:
        """Make the answer that a stream's last event has."""
        *_, last = chain(self.part(0, parts[0]), self.end(parts))
        return last["response"]

    def begin(self) -> Iterable[Body]:
        yield self._event("created", response=self._answer)
        yield self.idle()

    def idle(self) -> Body:
        return self._event("in_progress", response=self._answer)

    def part(self, index: int, part: Part) -> Iterable[Body]:
        for step, number, run in self._steps(part):
            item, kind = self._item(step, number, run), TEXTS[run.kind]
            place = {"item_id": item["id"], "output_index": number}
            inside = place | {"content_index": 0, "logprobs": []}
            if step == "begin":
                yield self._event("output_item.added", **place, item=item)
            elif step == "more":
                yield self._event(f"{kind}.delta", **inside, delta=run.text)
            else:
                called = {name: item[name] for name in ("name", "arguments") if name in item}
                yield self._event(f"{kind}.done", **inside, **called or {"text": run.text})
                yield self._event("output_item.done", **place, item=item)
                self._output.append(item)

    def end(self, parts: list[Part]) -> Iterable[Body]:
        _latest.update((item["id"], item) for item in self._output)
        for number in [*_latest][:-256]:
            del _latest[number]
        read, cached, written = parts[0].usage
        usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
        usage["input_tokens_details"] = {"cached_tokens": cached, "cache_write_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        cut = {"reason": "max_output_tokens"} if parts[0].finish == "length" else None
        ended = {"status": STATES["cut" if cut else "end"], "incomplete_details": cut}
        ended |= {"output": self._output, "usage": usage}
        yield self._event(ended["status"], response=self._answer | ended)

    def _item(self, step, number, run):
        item = {"id": f"{self._answer['id']}_{number}", "status": STATES[step]} | HEADS[run.kind]
        if run.kind == "call":
            for space in self._spaces:
                if run.name.startswith(space + "__"):
                    item["namespace"], run = space, run._replace(name=run.name[len(space) + 2 :])
            return item | {"call_id": run.id, "name": run.name, "arguments": run.text}
        return item | {"content": [{"type": TEXTS[run.kind], "text": run.text, "annotations": []}]}

    def _event(self, kind, **fields):
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers)} | fields


def _failed(words, param, status, code):
    """Make an error's body, sent alone or within a stream; Codex reads its ``response``."""
    failed = {"status": "failed", "error": {"code": code or "server_error", "message": words}}
    return error(words, param, status, code) | {"type": "response.failed", "response": failed}


class _Message(_Items):
    """An answer of Anthropic's blocks."""

    def __init__(self, asked: Asked):
        self._answer = {"id": f"msg-{asked.id}", "type": "message", "role": "assistant"}
        self._answer |= {"model": asked.served.name, "content": [], "stop_reason": None}
        self._answer |= {"stop_sequence": None, "usage": _usage(len(asked.asks[0].tokens), 0, 0)}

    def whole(self, parts: list[Part]) -> Body:
        if not parts:  # the request only counts tokens
            return {"input_tokens": self._answer["usage"]["input_tokens"]}
        return self._answer | _ended(*parts) | {"content": [*map(_block, parts[0].runs)]}

    def begin(self) -> Iterable[Body]:
        yield {"type": "message_start", "message": self._answer}

    def idle(self) -> Body:
        return {"type": "ping"}

    def part(self, index: int, part: Part) -> Iterable[Body]:
        for step, number, run in self._steps(part):
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
        delta = _ended(*parts)
        yield {"type": "message_delta", "usage": delta.pop("usage"), "delta": delta}
        yield {"type": "message_stop"}


def _ended(part):
    """Make the fields that say why a message ended and how many tokens it took."""
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


NAMES = {"input": "messages", "instructions": "system", "max_output_tokens": "max_tokens"}
RESPONSES = Dialect("/v1/responses", ItemsRequest, _Response, _failed, NAMES, prompt="input")
NAMES = {"stop_sequences": "stop", "output_config": "text"}
LONG = "prompt is too long: {size} tokens > {most} maximum"
MESSAGES = Dialect("/v1/messages", ItemsRequest, _Message, _error, NAMES, too_long=LONG)
COUNT_TOKENS = replace(MESSAGES, path="/v1/messages/count_tokens", writes=False)
