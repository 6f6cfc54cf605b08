"""OpenAI's ``/v1/responses``, as Codex speaks it. No answer is kept; ``messages`` builds on it."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...checkpoint import shorten
from .ask import Ask, Part
from .completions import Chat
from .requests import ChatRequest
from .text import Delta, Splitter

ABOUT = {"status": "in_progress", "output": [], "parallel_tool_calls": True, "tools": []}
ABOUT |= {"tool_choice": "auto"}
# What an item has beside its text, and what the part of it that holds the text has.
HEADS = {"text": {"type": "message", "role": "assistant"}}
HEADS |= {"reasoning": {"type": "reasoning", "summary": []}}
PARTS = {"text": {"type": "output_text", "annotations": []}}
PARTS |= {"reasoning": {"type": "reasoning_text"}}


def pieces(value: Any, role: str = "user") -> Iterator[dict[str, Any]]:
    """Read messages, OpenAI's items and Anthropic's blocks as pieces of a chat's messages."""
    match value:
        case str(text) | {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            yield {"role": role, "content": text}
        case {"type": "reasoning_text", "text": str(text)} | {"thinking": str(text)}:
            yield {"role": "assistant", "reasoning": text}
        case {"type": "reasoning" | "redacted_thinking"}:  # thoughts that may be unreadable
            yield {"role": "assistant", "content": ""}
            yield from pieces(value.get("content") or [])
        case {"call_id": str(number), "name": str(name), "arguments": given} | {
            "id": str(number),
            "name": str(name),
            "input": given,
        }:
            call = {"type": "function", "function": {"name": name, "arguments": given}}
            yield {"role": "assistant", "tool_calls": [{"id": number} | call]}
        case {"call_id": str(number), "output": _} | {"tool_use_id": str(number)}:
            output = pieces(value.get("output") or value.get("content") or "")
            text = "".join(piece.get("content", "") for piece in output)
            yield {"role": "tool", "tool_call_id": number, "content": text}
        case {"role": str(role), "content": content}:
            yield from pieces(content, role)
        case list():
            for part in value:
                yield from pieces(part, role)
        case _:
            raise ValueError(f"expected texts, thoughts, calls, results, not {shorten(value, 50)}")


def function(tool: Any) -> dict[str, Any]:
    """Make a chat's tool of one in OpenAI's or Anthropic's form."""
    match tool:
        case {"type": "function", "name": str(name)} | {"name": str(name), "input_schema": dict()}:
            schema = tool.get("parameters") or tool.get("input_schema") or {"type": "object"}
            about = {"name": name, "description": tool.get("description") or ""}
            return {"type": "function", "function": about | {"parameters": schema}}
    raise ValueError("expected a function of the client's own")


Pieces = Annotated[list, BeforeValidator(lambda value: [*pieces(value)]), Field(min_length=1)]
System = Annotated[list, BeforeValidator(lambda value: [*pieces(value, "system")])]
Function = Annotated[dict, BeforeValidator(function)]


class Translated(ChatRequest):
    """A request that becomes a chat's, for one text without log probabilities."""

    n: Literal[1] = 1
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    messages: Pieces
    system: System = Field([])
    tools: list[Function] = Field([])
    reasoning: dict[str, str | None] = Field({})
    parallel_tool_calls: bool = True

    def read(self, served: Any) -> tuple[list[Ask], list[Splitter]]:
        """Make messages of their pieces, which templates take, and then the ask.

        Neighbours of one role become one message; system messages after others become a user's.
        """
        messages = []
        for piece in self.system + self.messages:
            role, before = piece.pop("role"), messages[-1]["role"] if messages else "system"
            if role in ("system", "developer"):
                role = "system" if before == "system" else "user"
            if not messages or role == "tool" or role != before:
                messages.append({"role": role, "content": ""})
            for name, more in piece.items():
                said, gap = messages[-1].get(name), more[:0] if role == "assistant" else "\n\n"
                messages[-1][name] = said + gap + more if said else more
        self.messages = messages
        if effort := self.reasoning.get("effort"):
            given = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            self.chat_template_kwargs = given | self.chat_template_kwargs
        return super().read(served)


class _Request(Translated):
    messages: Pieces = Field(alias="input")
    system: System = Field([], alias="instructions")
    max_tokens: int | None = Field(None, ge=1, lt=2**31, alias="max_output_tokens")
    text: dict[str, Literal["medium"] | dict[Literal["type"], Literal["text"]] | None] = Field({})
    include: list[Literal["reasoning.encrypted_content"]] = Field([])


class Responses(Chat):
    """A request and its answer, a list of items. An item ends where one of another kind begins.

    A kind is "text", "reasoning" or a call, whose text is that of its arguments.
    """

    paths, names = ("/v1/responses", "/responses"), ("resp", "response", "response")
    kind = _Request

    def __init__(self, body: dict[str, Any], served: Any):
        super().__init__(body, served)
        # It splits the text itself: the sum of what was written has no order.
        (self._splitter,), self.splitters = self.splitters, [self]
        self._calls = 2**31 if self.request.parallel_tool_calls else 1  # that can still be made
        self.items, self._kind, self._said, self._events = [], None, [], []
        self._numbers = count(1)  # of a stream's events
        self.answer = ABOUT | self.head | {"created_at": self.head["created"]}

    def add(self, part: Part) -> Delta:
        """Split a part of the text, and put what was written into items, in their order."""
        delta, self.stop = self._splitter.add(part), part.stop
        calls = [(call, call.arguments) for call in delta.calls[: self._calls]]
        self._calls -= len(calls)
        written = [("reasoning", delta.reasoning), ("text", delta.text), *calls]
        self._events = [e for kind, text in written if text for e in self._write(kind, text)]
        return delta

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """Make the answer of all that was written."""
        list(self.end(deltas))
        return self.answer

    def begin(self) -> Iterable[dict[str, Any]]:
        """Begin a stream."""
        yield {"type": "response.created", "sequence_number": 0, "response": self.answer}

    def part(self, index: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """Say in a stream what was written."""
        return self._events

    def end(self, deltas: list[Delta]) -> Iterable[dict[str, Any]]:
        """End a stream."""
        status = "incomplete" if deltas[0].finish == "length" else "completed"
        yield from self._end_item(status)
        read, cached, written = deltas[0].usage
        usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
        usage["input_tokens_details"] = {"cached_tokens": cached, "cache_write_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = {"status": status, "incomplete_details": reason, "usage": usage}
        self.answer = self.answer | ended | {"output": self.items}
        number = next(self._numbers)
        yield {"type": f"response.{status}", "sequence_number": number, "response": self.answer}

    @staticmethod
    def error(words: str, param: str | None, status: int) -> dict[str, Any]:
        """Say what was wrong, instead of an answer or within a stream, in which Codex reads it."""
        failed = {"status": "failed", "error": {"code": "server_error", "message": words}}
        return Chat.error(words, param, status) | {"type": "response.failed", "response": failed}

    def _write(self, kind, text):
        if kind != self._kind:
            yield from self._end_item("completed")
            self._kind, self._said = kind, []
            yield from self._opened(kind)
        self._said.append(text)
        yield self._more(kind, text)

    def _end_item(self, status):
        if self._kind:
            item = self._item(self._kind, "".join(self._said), status)
            yield from self._closed(self._kind, item)
            self.items.append(item)

    def _item(self, kind, text, status="in_progress"):
        item = {"id": f"{self.head['id']}_{len(self.items)}", "status": status}
        if kind in PARTS:
            return item | HEADS[kind] | {"content": [PARTS[kind] | {"text": text}] if text else []}
        call = {"call_id": kind.id, "name": kind.name, "arguments": text}
        return item | {"type": "function_call"} | call

    def _opened(self, kind):
        yield self._event("output_item.added", item=self._item(kind, ""))
        if kind in PARTS:
            yield self._event("content_part.added", part=PARTS[kind] | {"text": ""})

    def _more(self, kind, text):
        name = PARTS[kind]["type"] if kind in PARTS else "function_call_arguments"
        return self._event(f"{name}.delta", delta=text)

    def _closed(self, kind, item):
        if kind in PARTS:
            (part,) = item["content"]
            yield self._event(f"{part['type']}.done", text=part["text"])
            yield self._event("content_part.done", part=part)
        else:
            said = item["arguments"]
            yield self._event("function_call_arguments.done", name=kind.name, arguments=said)
        yield self._event("output_item.done", item=item)

    def _event(self, kind, **fields):
        """Make an event about the item that is being written."""
        place = {"item_id": f"{self.head['id']}_{len(self.items)}", "output_index": len(self.items)}
        place |= {"content_index": 0, "sequence_number": next(self._numbers), "logprobs": []}
        return {"type": f"response.{kind}"} | place | fields
