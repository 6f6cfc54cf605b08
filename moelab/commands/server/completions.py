"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``: whole answers and streams."""

import time
from collections.abc import Iterable
from itertools import accumulate
from typing import Any
from uuid import uuid4

from .ask import Part, Refused
from .requests import ChatRequest, CompletionRequest

LEAST = -9999.0  # OpenAI's log probability of a token that cannot be


class Chat:
    """A request for the next message of a chat, and its answer."""

    path, field = "/v1/chat/completions", "messages"
    kind, names = ChatRequest, ("chatcmpl", "chat.completion", "chat.completion.chunk")
    too_long = (
        "This model's maximum context length is {most} tokens. However, your {field} resulted in "
        "{size} tokens. Please reduce the length of the {field}."
    )

    def __init__(self, body: dict[str, Any], served: Any):
        self.request, self.tokenizer = self.kind.of(body), served.tokenizer
        self.detokenizer = self.tokenizer.detokenizer
        self.asks, self.splitters = self.request.read(served)
        self._limit(served.positions)
        self.stream, self._told = self.request.stream, {}
        head = {"id": f"{self.names[0]}-{uuid4().hex}", "object": self.names[1 + self.stream]}
        self.head = head | {"created": int(time.time()), "model": served.name}

    def _limit(self, most):
        """Refuse prompts that leave no position to the answer, in words that clients look for."""
        size = max(len(ask.tokens) for ask in self.asks)
        if size >= most:
            words = self.too_long.format(most=most, field=self.field, size=size)
            raise Refused(words, self.field, code="context_length_exceeded")

    def whole(self, parts: list[Part]) -> dict[str, Any]:
        """Make the answer in one piece."""
        choices = [self._choice(i, part) for i, part in enumerate(parts)]
        return self.head | {"choices": choices, "usage": self._usage(parts)}

    def begin(self) -> Iterable[dict[str, Any]]:
        """Begin each text: the official client counts log probabilities of a first event twice."""
        return (event for i in range(len(self.asks)) for event in self.part(i, Part()))

    def idle(self) -> dict[str, Any] | None:
        """Say in a stream that the answer goes on; None makes a comment."""

    def part(self, index: int, part: Part) -> Iterable[dict[str, Any]]:
        """Say in a stream what was written of one text."""
        yield self.head | {"choices": [self._choice(index, part)]}

    def end(self, parts: list[Part]) -> Iterable[dict[str, Any] | str]:
        """End a stream and, if that was asked, say how many tokens it took."""
        if self.request.stream_options.get("include_usage"):
            yield self.head | {"choices": [], "usage": self._usage(parts)}
        yield "[DONE]"

    @staticmethod
    def error(words: str, param: str | None, status: int, code: str | None) -> dict[str, Any]:
        """Say what was wrong, instead of an answer or within a stream."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": words, "type": kind, "param": param, "code": code}}

    def _choice(self, index, part):
        """Make a choice of what was written or, in a stream, of what was added."""
        said = {} if index in self._told else {"role": "assistant", "content": ""}
        told = self._told.get(index, 0)
        for kind, text, id, name in part.runs:
            if kind == "call":
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
                call |= {"index": told} if self.stream else {}
                said.setdefault("tool_calls", []).append(call)
                told += 1
            else:
                said[kind] = said.get(kind, "") + text
        self._told[index] = told
        scores = {"content": [self._score(*token) for token in part.tokens]}
        scores = None if self.asks[index].logprobs is None else scores
        name = "delta" if self.stream else "message"
        return {"index": index, name: said, "logprobs": scores, "finish_reason": part.finish}

    def _score(self, token, logprob, top=None):
        """Make OpenAI's form of a token, its log probability and the likeliest tokens."""
        data = self.detokenizer.bytes_of(token)
        score = None if logprob is None else max(LEAST, logprob)  # in this order of nan, too
        row = {"token": data.decode(errors="backslashreplace"), "bytes": [*data], "logprob": score}
        return row if top is None else row | {"top_logprobs": [self._score(*t) for t in top]}

    def _usage(self, parts):
        """Count a prompt once, although ``n`` texts go on after it."""
        prompts = [part.usage for part in parts[:: self.request.n]]
        read, written = sum(u.prompt for u in prompts), sum(part.usage.completion for part in parts)
        usage = dict(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)
        return usage | {"prompt_tokens_details": {"cached_tokens": sum(u.cached for u in prompts)}}


class Completions(Chat):
    """A request for texts that go on after prompts, and its answer."""

    path, field = "/v1/completions", "prompt"
    kind, names = CompletionRequest, ("cmpl", "text_completion", "text_completion")

    def _choice(self, index, part):
        """Make a choice of a text or of its next part; with ``echo`` the prompt comes before."""
        text, begun = part.text, self.request.prompt[index // self.request.n]
        if self.request.echo and index not in self._told:
            if not isinstance(begun, str):
                half = self.detokenizer.begin(begun)  # the answer begins with that character
                begun = self.tokenizer.decode(begun).rstrip("\ufffd" * half)
            text = begun + text
        rows = [self._score(*token) for token in [*part.prompt, *part.tokens]]
        # Only the first byte of a character has other first bits than 10.
        sizes = [sum(byte & 0xC0 != 0x80 for byte in row["bytes"]) for row in rows]
        *offsets, self._told[index] = accumulate(sizes, initial=self._told.get(index, 0))
        scores = {"tokens": [row["token"] for row in rows], "text_offset": offsets}
        scores["token_logprobs"] = [row["logprob"] for row in rows]
        # Of tokens with one name the likeliest stays; the prompt's first has no probability.
        tops = [(row, *reversed(row["top_logprobs"])) for row in rows]
        tops = [{row["token"]: row["logprob"] for row in top} for top in tops]
        scores["top_logprobs"] = [None if None in top.values() else top for top in tops]
        scores = None if self.request.logprobs is None else scores
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": part.finish}
