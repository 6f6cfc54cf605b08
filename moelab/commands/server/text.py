"""Decoded text as clients see it: ended by stop strings, split into reasoning and tool calls."""

import json
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .ask import Part, Token, Usage

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE


class Stops:
    """Ends a text before the stop string that starts first in it; none of ``stops`` is empty."""

    def __init__(self, stops: list[str]):
        self._stops, self._held, self.found = stops, "", None

    def add(self, text: str, last: bool = False) -> str:
        """Return what can be sent; what may begin a stop string is held, but by the last piece."""
        text, self._held = self._held + text, ""
        for i in range(len(text)):
            begun = [s for s in self._stops if s.startswith(text[i : i + len(s)])]
            self.found = self.found or next((s for s in begun if text.startswith(s, i)), None)
            if self.found or (begun and not last):
                self._held = text[i:]
                return text[:i]
        return text

    def end(self) -> str:
        return self.add("", last=True)


class Call(NamedTuple):
    """A call of a tool; ``arguments`` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass
class Delta:
    """What was written since the last; the sum of all is the whole answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)
    finish: str | None = None  # stop, length or tool_calls
    usage: Usage | None = None

    def __add__(self, other: "Delta") -> "Delta":
        lists = ("text", "reasoning", "calls", "tokens", "prompt")
        sums = [getattr(self, name) + getattr(other, name) for name in lists]
        return Delta(*sums, other.finish or self.finish, other.usage or self.usage)


class Splitter:
    """Splits a text, in whatever pieces it comes, into reasoning, calls of ``tools`` and the rest.

    ``state`` is where its prompt ends; in the state "text" nothing is split. What is no call, or
    what ``max_tokens`` cut, is read again as text of the state before it.
    """

    def __init__(self, tokenizer: TokenizerWrapper, tools: list[dict] | None, state: str):
        self._tokenizer, self._tools, self._called = tokenizer, tools, False
        self._machine = make_text_state_machine(tokenizer)
        self._state, self._outside = self._machine.make_state(state), "normal"
        self._read = defaultdict(str)  # text by state; that of a message's header is not sent

    def add(self, part: Part) -> Delta:
        """Return what the part adds to the answer; after the last one nothing is held."""
        calls = []
        for character in part.text:  # each alone: after what is no call, the state is another
            before = self._state[0]
            self._state, text, now = self._machine.step(self._state, character)
            self._read[before] += text
            if now != before == "tool":
                calls += self._end_call(self._tokenizer.tool_call_end)
            elif now != before:
                self._outside = "reasoning" if before == "reasoning" else "normal"
                if now == "tool" and not self._tools:
                    self._read[self._outside] += self._tokenizer.tool_call_start
                    self._state = self._machine.make_state(self._outside)
        if part.finish:
            self._state, text, now = self._machine.flush(self._state)
            self._read[now] += text
            calls += self._end_call("", part.finish == "stop") if now == "tool" else []
        self._called |= bool(calls)
        finish = "tool_calls" if self._called and part.finish == "stop" else part.finish
        text, thoughts = self._read["normal"] + self._read["text"], self._read["reasoning"]
        self._read = defaultdict(str, tool=self._read["tool"])
        return Delta(text, thoughts, calls, [*part.tokens], [*part.prompt], finish, part.usage)

    def _end_call(self, end, is_call=True):
        """Return the calls in what was read; anything else than calls is read again."""
        text, calls = self._read.pop("tool", ""), []
        with suppress(Exception):  # mlx-lm's parsers raise all kinds
            parsed = self._tokenizer.tool_parser(text, self._tools) if is_call else []
            calls = [_call(**call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        if not calls:
            again = Splitter(self._tokenizer, None, self._outside)
            delta = again.add(Part(self._tokenizer.tool_call_start + text + end, finish="stop"))
            self._read["normal"] += delta.text
            self._read["reasoning"] += delta.reasoning
            self._state = again._state
        return calls


def _call(name, arguments=None, id=None, **_):
    if not (name and isinstance(name, str) and isinstance(arguments, dict | None)):
        raise ValueError("expected a name and an object")
    arguments = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    return Call(str(id or f"call_{uuid4().hex}"), name, arguments)


def token_bytes(tokenizer: TokenizerWrapper, token: int) -> bytes:
    """Return a token's bytes, of which several tokens may make one character."""
    piece = tokenizer.convert_ids_to_tokens(token) or ""  # None: beyond the vocabulary
    if byte := re.fullmatch("<0x(..)>", piece):
        return bytes.fromhex(byte[1])
    if piece.startswith("▁"):  # a space in SentencePiece, which decoding may strip
        return piece.replace("▁", " ").encode()
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if "\ufffd" in text and BYTES.keys() >= set(piece):
        return bytes(BYTES[c] for c in piece)
    return text.encode()
