"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``: whole answers and streams."""

from collections.abc import Iterable
from itertools import accumulate

from .ask import Body, Part
from .requests import Asked, ChatRequest, CompletionRequest, Dialect

NAMES = [("cmpl", "text_completion", "text_completion")]  # id prefix, objects of answers and parts
NAMES += [("chatcmpl", "chat.completion", "chat.completion.chunk")]


class _Choices:
    """An answer that has a choice for each text."""

    def __init__(self, asked: Asked):
        # ``asked`` is not kept: it refers to this answer, and cycles are freed late.
        self._asks, self._request = asked.asks, asked.request
        self._tokenizer = asked.served.tokenizer
        self._detokenizer, self._told = self._tokenizer.detokenizer, {}
        self._is_chat, self._stream = isinstance(asked.request, ChatRequest), asked.stream
        name, *kinds = NAMES[self._is_chat]
        self._head = {"id": f"{name}-{asked.id}", "object": kinds[asked.stream]}
        self._head |= {"created": asked.created, "model": asked.served.name}

    def whole(self, parts: list[Part]) -> Body:
        choices = [self._choice(i, part) for i, part in enumerate(parts)]
        return self._head | {"choices": choices, "usage": self._usage(parts)}

    def begin(self) -> Iterable[Body]:
        """Send an empty part first: OpenAI's client counts the first log probabilities twice."""
        return (event for i in range(len(self._asks)) for event in self.part(i, Part()))

    def idle(self) -> None: ...

    def part(self, index: int, part: Part) -> Iterable[Body]:
        yield self._head | {"choices": [self._choice(index, part)]}

    def end(self, parts: list[Part]) -> Iterable[Body | str]:
        if self._request.stream_options.get("include_usage"):
            yield self._head | {"choices": [], "usage": self._usage(parts)}
        yield "[DONE]"

    def _choice(self, index, part):
        return self._message(index, part) if self._is_chat else self._text(index, part)

    def _message(self, index, part):
        """Make a choice of a whole message or, in a stream, of what was added."""
        said = {} if index in self._told else {"role": "assistant", "content": ""}
        told, stream = self._told.get(index, 0), self._stream
        for kind, text, id, name in part.runs:
            if kind == "call":
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
                said.setdefault("tool_calls", []).append(call | ({"index": told} if stream else {}))
                told += 1
            else:
                said[kind] = said.get(kind, "") + text
        self._told[index] = told
        scores = {"content": [self._score(*token) for token in part.tokens]}
        scores = None if self._asks[index].logprobs is None else scores
        choice = {"index": index, "logprobs": scores, "finish_reason": part.finish}
        return choice | {"delta" if stream else "message": said}

    def _text(self, index, part):
        """Make a choice of a text or of its next part; ``echo`` puts the prompt before it."""
        text, begun = part.text, self._request.prompt[index // self._request.n]
        if self._request.echo and index not in self._told:
            if not isinstance(begun, str):
                half = self._detokenizer.begin(begun)  # the answer completes this character
                begun = self._tokenizer.decode(begun).rstrip("\ufffd" * half)
            text = begun + text
        rows = [self._score(*token) for token in [*part.prompt, *part.tokens]]
        # In UTF-8 each byte of a character, except the first, begins with the bits 10.
        sizes = [sum(byte & 0xC0 != 0x80 for byte in row["bytes"]) for row in rows]
        *offsets, self._told[index] = accumulate(sizes, initial=self._told.get(index, 0))
        scores = {"tokens": [row["token"] for row in rows], "text_offset": offsets}
        scores["token_logprobs"] = [row["logprob"] for row in rows]
        # Of tokens with equal text the likeliest stays. A prompt's first token has no probability.
        tops = [(row, *reversed(row["top_logprobs"])) for row in rows]
        tops = [{row["token"]: row["logprob"] for row in top} for top in tops]
        scores["top_logprobs"] = [None if None in top.values() else top for top in tops]
        scores = None if self._request.logprobs is None else scores
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": part.finish}

    def _score(self, token, logprob, top=None):
        """Make OpenAI's form of a token, its log probability and the likeliest tokens."""
        data = self._detokenizer.bytes_of(token)
        # -9999 is OpenAI's log probability of an impossible token; ``max`` turns nan into it, too.
        score = None if logprob is None else max(-9999.0, logprob)
        row = {"token": data.decode(errors="backslashreplace"), "bytes": [*data], "logprob": score}
        return row if top is None else row | {"top_logprobs": [self._score(*t) for t in top]}

    def _usage(self, parts):
        """Count the tokens; a prompt counts once, even if ``n`` texts continue it."""
        prompts = [part.usage for part in parts[:: self._request.n]]
        read, written = sum(u.prompt for u in prompts), sum(part.usage.completion for part in parts)
        usage = dict(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)
        return usage | {"prompt_tokens_details": {"cached_tokens": sum(u.cached for u in prompts)}}


def error(words: str, param: str | None, status: int, code: str | None) -> Body:
    """Make the body of an error, sent instead of an answer or within a stream."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": words, "type": kind, "param": param, "code": code}}


CHAT = Dialect("/v1/chat/completions", ChatRequest, _Choices, error)
COMPLETIONS = Dialect("/v1/completions", CompletionRequest, _Choices, error, prompt="prompt")
