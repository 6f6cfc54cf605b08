"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``: whole answers and streams."""

import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from .requests import ChatRequest, CompletionRequest
from .text import Delta, token_bytes

LEAST = -9999.0  # OpenAI's log probability of a token that cannot be


class Chat:
    """A request for the next message of a chat, and its answer."""

    paths = ("/v1/chat/completions", "/chat/completions")
    kind, names = ChatRequest, ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def __init__(self, body: dict[str, Any], served: Any):
        self.request, self.tokenizer = self.kind.of(body), served.tokenizer
        self.asks, self.splitters = self.request.read(served)
        self.stream, self._told = self.request.stream, {}
        head = {"id": f"{self.names[0]}-{uuid4().hex}", "object": self.names[1 + self.stream]}
        self.head = head | {"created": int(time.time()), "model": served.name}

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """Make the answer of all that was written."""
        choices = [self._choice(i, delta) for i, delta in enumerate(deltas)]
        return self.head | {"choices": choices, "usage": self._usage(deltas)}

    def begin(self) -> Iterable[dict[str, Any]]:
        """Begin each text of a stream."""
        return (event for i in range(len(self.asks)) for event in self.part(i, Delta()))

    def part(self, index: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """Say in a stream what was written of one text."""
        yield self.head | {"choices": [self._choice(index, delta)]}

    def end(self, deltas: list[Delta]) -> Iterable[dict[str, Any] | str]:
        """End a stream and, if that was asked, say how many tokens it took."""
        if self.request.stream_options.get("include_usage"):
            yield self.head | {"choices": [], "usage": self._usage(deltas)}
        yield "[DONE]"

    @staticmethod
    def error(words: str, param: str | None, status: int) -> dict[str, Any]:
        """Say what was wrong, instead of an answer or within a stream."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": words, "type": kind, "param": param, "code": None}}

    def _choice(self, index, delta):
        """Make a choice of what was written or, in a stream, of what was added."""
        begun = {"role": "assistant", "content": None if delta.calls else ""}
        said = {} if index in self._told else begun
        said |= {"content": delta.text} if delta.text else {}
        said |= {"reasoning": delta.reasoning} if delta.reasoning else {}
        self._told.setdefault(index, 0)
        for call in delta.calls:
            function = {"name": call.name, "arguments": call.arguments}
            made = {"id": call.id, "type": "function", "function": function}
            made |= {"index": self._told[index]} if self.stream else {}
            said.setdefault("tool_calls", []).append(made)
            self._told[index] += 1
        scores = {"content": self._scores(delta.tokens), "refusal": None}
        choice = {"index": index, "delta" if self.stream else "message": said}
        choice["logprobs"] = scores if self.request.logprobs else None
        return choice | {"finish_reason": delta.finish}

    def _scores(self, tokens):
        return [
            self._score(t.id, t.logprob) | {"top_logprobs": [self._score(*top) for top in t.top]}
            for t in tokens
        ]

    def _score(self, token, logprob):
        text = token_bytes(self.tokenizer, token)
        score = None if logprob is None else max(LEAST, logprob)  # in this order of nan, too
        return {"token": text.decode(errors="backslashreplace"), "bytes": [*text], "logprob": score}

    def _usage(self, deltas):
        """Count a prompt once, although ``n`` texts go on after it."""
        prompts = [delta.usage for delta in deltas[:: self.request.n]]
        read, written = sum(u.prompt for u in prompts), sum(d.usage.completion for d in deltas)
        usage = {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }
        return usage | {"prompt_tokens_details": {"cached_tokens": sum(u.cached for u in prompts)}}


class Completions(Chat):
    """A request for texts that go on after prompts, and its answer."""

    paths = ("/v1/completions",)
    kind, names = CompletionRequest, ("cmpl", "text_completion", "text_completion")

    def _choice(self, index, delta):
        """Make a choice of the text or its next part; with ``echo`` the prompt comes before."""
        text, offset, scores = delta.text, self._told.get(index, 0), None
        if self.request.echo and index not in self._told:
            prompt = self.request.prompts()[index // self.request.n]
            text = (prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)) + text
        if self.request.logprobs is not None:
            rows = self._scores(delta.prompt + delta.tokens)
            scores = {"tokens": [row["token"] for row in rows], "text_offset": []}
            scores["token_logprobs"] = [row["logprob"] for row in rows]
            scores["top_logprobs"] = [_by_name(row) for row in rows]
            for row in rows:
                scores["text_offset"].append(offset)
                # Only the first byte of a character has other first bits than 10.
                offset += sum(byte & 0xC0 != 0x80 for byte in row["bytes"])
        self._told[index] = offset
        choice = {"index": index, "text": text, "logprobs": scores}
        return choice | {"finish_reason": delta.finish}


def _by_name(row):
    """Make completions' form of the likeliest tokens and the chosen one; None for the first."""
    rows = [row, *reversed(row["top_logprobs"])]  # of equal names the likeliest stays
    return None if row["logprob"] is None else {r["token"]: r["logprob"] for r in rows}
