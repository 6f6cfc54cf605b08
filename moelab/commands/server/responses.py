"""OpenAI's ``/v1/responses``, as Codex speaks it. No answer is kept; ``messages`` builds on it."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...checkpoint import shorten
from .ask import Ask, Part, joined
from .completions import Chat
from .requests import ChatRequest, Message, leave_out, shown
from .text import Splitter

HEADS = {"content": {"type": "message", "role": "assistant"}}
HEADS |= {"reasoning": {"type": "reasoning", "summary": []}, "call": {"type": "function_call"}}
SERVICES = {"web_search_call", "file_search_call", "tool_search_call", "tool_search_output"}
SERVICES |= {"image_generation_call", "code_interpreter_call", "mcp_list_tools"}  # not here
MOST_ITEMS = 256  # of the latest answers, which clients may name by their id alone
_latest = {}
TEXTS = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


def pieces(value: Any, role: str = "user") -> Iterator[dict[str, Any]]:
    """Read messages, OpenAI's items and Anthropic's blocks as pieces of a chat's messages."""
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
            raise ValueError("expected an item of a late answer, or the item itself (store: false)")
        case {"type": str(kind)} if kind in SERVICES:
            leave_out(kind)
        case _:
            raise ValueError(f"expected texts, thoughts, calls, results, not {shorten(value, 50)}")


Pieces = Annotated[list[Message], BeforeValidator(lambda value: [*pieces(value)])]
System = Annotated[list[Message], BeforeValidator(lambda value: [*pieces(value, "system")])]


class Translated(ChatRequest):
    """A request that becomes a chat's, for one text without log probabilities."""

    n: Literal[1] = 1
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    messages: Pieces = Field(min_length=1)
    system: System = Field([])
    reasoning: dict[str, str | None] = Field({})

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
        self.reasoning_effort = self.reasoning.get("effort") or self.reasoning_effort
        return super().read(served)


class _Request(Translated):
    messages: Pieces = Field(alias="input", min_length=1)
    system: System = Field([], alias="instructions")
    max_tokens: int | None = Field(None, ge=1, lt=2**31, alias="max_output_tokens")
    text: dict[str, str | dict[Literal["type"], Literal["text"]] | None] = Field({})
    # Of items that no answer here has, but for the thoughts, which it always has.
    include: list[Annotated[str, Field(pattern="^(reasoning|[a-z_]+_call)")]] = Field([])


class Responses(Chat):
    """A request and its answer, a list of items: one for each run of what was written."""

    path, field, names = "/v1/responses", "input", ("resp", "response", "response")
    kind = _Request

    def __init__(self, body: dict[str, Any], served: Any):
        super().__init__(body, served)
        self._runs, self._numbers = [], count(1)  # each item's in a stream, and its events
        tools = body.get("tools") or ()
        self._spaces = [tool["name"] for tool in tools if tool.get("type") == "namespace"]
        self.answer = self.head | {"created_at": self.head["created"], "status": "in_progress"}
        self.answer |= {"output": [], "tools": [], "tool_choice": "auto"}
        self.answer |= {"parallel_tool_calls": self.request.parallel_tool_calls}

    def whole(self, parts: list[Part]) -> dict[str, Any]:
        runs, status, reason = parts[0].runs, "completed", None
        if parts[0].finish == "length":
            status, reason = "incomplete", {"reason": "max_output_tokens"}
        states = ["completed"] * (len(runs) - 1) + [status]
        ended = {"output": [*map(self._item, count(), runs, states)], "status": status}
        _latest.update({item["id"]: item for item in ended["output"]})
        for number in [*_latest][:-MOST_ITEMS]:
            del _latest[number]
        read, cached, written = parts[0].usage
        usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
        usage["input_tokens_details"] = {"cached_tokens": cached, "cache_write_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        return self.answer | ended | {"incomplete_details": reason, "usage": usage}

    def begin(self) -> Iterable[dict[str, Any]]:
        yield {"type": "response.created", "sequence_number": 0, "response": self.answer}
        yield self.idle()

    def idle(self) -> dict[str, Any]:
        number = next(self._numbers)
        return {"type": "response.in_progress", "sequence_number": number, "response": self.answer}

    def part(self, index: int, part: Part) -> Iterable[dict[str, Any]]:
        """Say in a stream what was written. An item ends where the next one begins."""
        for run in part.runs:
            if self._runs and self._runs[-1][0].kind == run.kind != "call":
                self._runs[-1].append(run)
            else:
                yield from self._end_item("completed")
                self._runs.append([run])
                yield from self._opened(len(self._runs) - 1, run)
            yield self._more(len(self._runs) - 1, run)

    def end(self, parts: list[Part]) -> Iterable[dict[str, Any]]:
        answer = self.whole(parts)
        yield from self._end_item(answer["status"])
        kind, number = f"response.{answer['status']}", next(self._numbers)
        yield {"type": kind, "sequence_number": number, "response": answer}

    @staticmethod
    def error(words: str, param: str | None, status: int, code: str | None) -> dict[str, Any]:
        """Say what was wrong, instead of an answer or within a stream, in which Codex reads it."""
        error = Chat.error(words, param, status, code)
        failed = {"status": "failed", "error": {"code": code or "server_error", "message": words}}
        return error | {"type": "response.failed", "response": failed}

    def _end_item(self, status):
        if self._runs:
            yield from self._closed(len(self._runs) - 1, *joined(self._runs[-1]), status)

    def _item(self, number, run, status="in_progress"):
        item = {"id": f"{self.head['id']}_{number}", "status": status} | HEADS[run.kind]
        if run.kind == "call":
            for space in self._spaces:
                if run.name.startswith(space + "__"):
                    item["namespace"], run = space, run._replace(name=run.name[len(space) + 2 :])
            return item | {"call_id": run.id, "name": run.name, "arguments": run.text}
        return item | {"content": [{"type": TEXTS[run.kind], "text": run.text, "annotations": []}]}

    def _opened(self, number, run):
        item = self._item(number, run._replace(text=""))
        yield self._event("output_item.added", number, item=item)

    def _more(self, number, run):
        return self._event(f"{TEXTS[run.kind]}.delta", number, delta=run.text)

    def _closed(self, number, run, status):
        item, said = self._item(number, run, status), {"text": run.text}
        if run.kind == "call":
            said = {name: item[name] for name in ("name", "arguments")}
        yield self._event(f"{TEXTS[run.kind]}.done", number, **said)
        yield self._event("output_item.done", number, item=item)

    def _event(self, kind, number, **fields):
        """Make an event about an item."""
        place = {"item_id": f"{self.head['id']}_{number}", "output_index": number}
        place |= {"content_index": 0, "sequence_number": next(self._numbers), "logprobs": []}
        return {"type": f"response.{kind}"} | place | fields
