"""OpenAI's ``/v1/responses``, as Codex speaks it. No answer is kept; ``messages`` builds on it."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field

from ...checkpoint import shorten
from .ask import Ask, Part
from .completions import Chat
from .requests import ChatRequest, Message, Tool
from .text import Call, Delta, Splitter

Format = dict[Literal["type"], Literal["text"]]
UNSAID = {"role": "assistant", "reasoning": ""}  # thoughts that cannot be read
# What an item has beside its text, and what the part of it that holds the text has.
HEADS = {"text": {"type": "message", "role": "assistant"}}
HEADS |= {"reasoning": {"type": "reasoning", "summary": []}}
PARTS = {"text": {"type": "output_text", "annotations": []}}
PARTS |= {"reasoning": {"type": "reasoning_text"}}


def made(kind: Any, by: Callable, expected: str) -> Any:
    """Make the type of what becomes a part of a chat, of type ``kind``, made ``by``."""

    def make(value):
        try:
            return by(value)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"expected {expected}, with all fields") from error

    return Annotated[kind, BeforeValidator(make)]


def texts(parts: Any) -> str:
    """Join the texts of a message, which is a text or a list of parts."""
    return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)


def called(number: str, name: str, arguments: str) -> dict[str, Any]:
    """Make a piece of an assistant's message: the call of a tool."""
    call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def returned(number: str, output: Any) -> dict[str, Any]:
    """Make the message that says what a tool returned."""
    return {"role": "tool", "tool_call_id": number, "content": texts(output)}


def function(tool: dict[str, Any], schema: str, *kinds: str | None) -> dict[str, Any]:
    """Make a chat's tool of one of the ``kinds``, whose parameters are the field ``schema``."""
    if tool.get("type") not in kinds:
        raise KeyError
    about = {"name": tool["name"], "description": tool.get("description") or ""}
    about["parameters"] = tool.get(schema) or {"type": "object", "properties": {}}
    return {"type": "function", "function": about}


class Translated(ChatRequest):
    """A request that becomes a chat's."""

    n: Literal[1] = 1
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    messages: list = Field([], max_length=0)
    parallel_tool_calls: bool = True

    def read_as(self, pieces: list[dict], effort: str | None, served: Any) -> tuple:
        """Make messages of their pieces, and the rest as ``read`` does.

        Neighbours of one role become one message, since templates may want turns. Many take a
        system message only as the first, so that later ones become a user's.
        """
        self.messages = messages = []
        for piece in pieces:
            if piece == UNSAID:
                continue
            role, last = piece["role"], messages[-1] if messages else {"role": "system"}
            if role in ("system", "developer"):
                role = "system" if last["role"] == "system" else "user"
            if not messages or role == "tool" or role != last["role"]:
                messages.append({"content": ""} | piece | {"role": role})
                continue
            for name in piece.keys() - {"role"}:
                gap = "\n\n" if role != "assistant" else type(piece[name])()
                last[name] = last[name] + gap + piece[name] if last.get(name) else piece[name]
        if effort:
            given = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            self.chat_template_kwargs = given | self.chat_template_kwargs
        return super().read(served)


def _piece(item):
    match item.get("type") or "message":
        case "message":
            return {"role": item["role"], "content": texts(item["content"])}
        case "reasoning":
            return {"role": "assistant", "reasoning": texts(item.get("content") or "")}
        case "function_call":
            return called(item["call_id"], item["name"], item["arguments"])
        case "function_call_output":
            return returned(item["call_id"], item["output"])
        case kind:
            raise ValueError(f"this server cannot read {shorten(kind, 50)}")


def _items(value):
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Item = made(Message, _piece, "texts, reasoning, calls of functions and what they returned")
Function = made(Tool, lambda t: function(t, "parameters", "function"), "functions, no other tools")


class _Request(Translated):
    input: Annotated[list[Item], BeforeValidator(_items)] = Field(min_length=1)
    instructions: str = ""
    max_tokens: int | None = Field(None, ge=1, lt=2**31, alias="max_output_tokens")
    reasoning: dict[str, Any] = Field({})
    text: dict[Literal["format", "verbosity"], Format | Literal["medium"] | None] = Field({})
    tools: list[Function] = Field([])
    include: list[Literal["reasoning.encrypted_content"]] = Field([])

    def read(self, served: Any) -> tuple[list[Ask], list[Splitter]]:
        """Make the ask, and what splits its text."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return self.read_as(system + self.input, self.reasoning.get("effort"), served)


class Responses(Chat):
    """A request and its answer, a list of items. An item ends where one of another kind begins."""

    paths, names = ("/v1/responses", "/responses"), ("resp", "response", "response")
    kind = _Request

    def __init__(self, body: dict[str, Any], served: Any):
        super().__init__(body, served)
        # It splits the text itself: the sum of what was written has no order.
        (self._splitter,), self.splitters = self.splitters, [self]
        self.calls = 2**31 if self.request.parallel_tool_calls else 1  # that can still be made
        self.items, self._kind, self._said, self._space, self._events = [], None, [], "", []
        self._numbers = count(2)  # of a stream's events, after those that begin it
        self.answer = {"id": self.head["id"], "object": "response", "model": served.name}
        self.answer |= {"created_at": self.head["created"], "status": "in_progress"}
        self.answer |= {"tool_choice": self.request.tool_choice, "tools": body.get("tools") or []}
        self.answer |= {"parallel_tool_calls": self.calls > 1, "output": self.items}

    def add(self, part: Part) -> Delta:
        """Split a part of the text, and put what was written into items, in their order.

        White space alone is held: it makes no item before or after a call.
        """
        delta, self.stop = self._splitter.add(part), part.stop
        text, self._space = self._space + delta.text, ""
        if text.isspace() and self._kind != "text":
            if delta.calls or isinstance(self._kind, Call):
                text = ""
            elif not delta.finish:
                text, self._space = "", text
        calls = [(call, call.arguments) for call in delta.calls[: self.calls]]
        self.calls -= len(calls)
        written = [("reasoning", delta.reasoning), ("text", text), *calls]
        self._events = [e for kind, text in written if text for e in self._write(kind, text)]
        return delta

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """Make the answer of all that was written."""
        for _ in self.end(deltas):
            pass
        return self.answer

    def begin(self) -> Iterable[dict[str, Any]]:
        """Begin a stream."""
        for number, kind in enumerate(("response.created", "response.in_progress")):
            begun = self.answer | {"output": []}
            yield {"type": kind, "sequence_number": number, "response": begun}

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
        self.answer |= {"status": status, "usage": usage, "incomplete_details": reason}
        yield self._event(status, response=self.answer)

    @staticmethod
    def error(words: str, param: str | None, status: int) -> dict[str, Any]:
        """Say what was wrong, instead of an answer or within a stream, in which Codex reads it."""
        failed = {"status": "failed", "error": {"code": "server_error", "message": words}}
        return Chat.error(words, param, status) | {"type": "response.failed", "response": failed}

    def _write(self, kind, text):
        if kind != self._kind:
            yield from self._end_item("completed")
            self._kind, self._said = kind, []
            yield from self._open(kind)
        self._said.append(text)
        yield self._more(kind, text)

    def _end_item(self, status):
        if self._kind is not None:
            yield from self._close(self._kind, "".join(self._said), status)

    def _open(self, kind):
        item = {"id": f"item_{uuid4().hex}", "status": "in_progress"}
        if kind in PARTS:
            item |= HEADS[kind] | {"content": []}
        else:
            item |= {"type": "function_call", "call_id": kind.id, "name": kind.name}
            item["arguments"] = ""
        self.items.append(item)
        yield self._event("output_item.added", item={**item})
        if kind in PARTS:
            yield self._event("content_part.added", part=PARTS[kind] | {"text": ""})

    def _more(self, kind, text):
        name = PARTS[kind]["type"] if kind in PARTS else "function_call_arguments"
        return self._event(f"{name}.delta", delta=text)

    def _close(self, kind, text, status):
        item = self.items[-1]
        if kind in PARTS:
            part = PARTS[kind] | {"text": text}
            item["content"] = [part]
            yield self._event(f"{part['type']}.done", text=text)
            yield self._event("content_part.done", part=part)
        else:
            item["arguments"] = text
            yield self._event("function_call_arguments.done", name=kind.name, arguments=text)
        item["status"] = status
        yield self._event("output_item.done", item=item)

    def _event(self, kind, **fields):
        """Make an event of a stream; one without the answer is about the last item."""
        if "response" not in fields:
            fields |= {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}
            fields |= {"content_index": 0, "logprobs": []}
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers)} | fields
