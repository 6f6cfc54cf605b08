"""Decoded text as clients see it: ended by stop strings, split into reasoning and tool calls."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .ask import Part, Token, Usage

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE


class Stops:
    """Ends a text before the stop string that starts first in it; none of ``stops`` is empty."""

    def __init__(self, stops: list[str]):
        self._stops, self._held, self.found = stops, "", None

    def add(self, text: str, last: bool = False) -> str:
        """Take the next piece; return what can be sent. What may begin a stop string is held."""
        text, self._held = self._held + text, ""
        for i in range(len(text)):
            begun = [s for s in self._stops if s.startswith(text[i : i + len(s)])]
            self.found = self.found or next((s for s in begun if text.startswith(s, i)), None)
            if self.found or (begun and not last):
                self._held = text[i:]
                return text[:i]
        return text

    def end(self) -> str:
        """Return what is held where the text ends; a stop string may be ``found`` in it."""
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
        sums = {name: getattr(self, name) + getattr(other, name) for name in lists}
        return Delta(**sums, finish=other.finish or self.finish, usage=other.usage or self.usage)


class Splitter:
    """Splits a text, in whatever pieces it comes, into reasoning, calls of ``tools`` and the rest.

    ``state`` is where its prompt ends; in the state "text" nothing is split. What is no call, or
    what ``max_tokens`` cut, is read on as text.
    """

    def __init__(self, tokenizer: TokenizerWrapper, tools: list[dict] | None, state: str):
        self._tokenizer, self._tools, self._ids, self._called = tokenizer, tools, set(), False
        self._machine, self._before, self._held = make_text_state_machine(tokenizer), state, ""
        self._state = self._machine.make_state(state)

    def add(self, part: Part) -> Delta:
        """Return what the part adds to the answer; after the last one nothing is held."""
        delta = Delta(tokens=[*part.tokens], prompt=[*part.prompt], usage=part.usage)
        for character in part.text:  # each alone: after what is no call, the state is another
            self._take(delta, *self._machine.step(self._state, character))
        if part.finish:
            self._take(delta, *self._machine.flush(self._state))
            if self._state[0] == "tool":
                self._end_call(delta, "", is_call=part.finish == "stop")
            delta.text, self._held = delta.text + self._held, ""
        delta.finish = "tool_calls" if self._called and part.finish == "stop" else part.finish
        return delta

    def _take(self, delta, state, text, now):
        """Put the text that was read in the state before; the next state's name is ``now``."""
        before, self._state = self._state[0], state
        if before in ("normal", "text"):
            delta.text += text
        elif before == "reasoning":
            delta.reasoning += text
        else:  # a call, or a header between messages
            self._held += text
        if now != before:
            if before == "tool":
                self._end_call(delta, self._tokenizer.tool_call_end)
            self._before, self._held = before, ""
            if now == "tool" and not self._tools:
                self._end_call(delta, "", is_call=False)

    def _end_call(self, delta, end, is_call=True):
        """Parse the held text; what is no call is read again, as text of the state before it."""
        text, self._held, calls = self._held, "", []
        with suppress(Exception):  # mlx-lm's parsers raise all kinds
            calls = self._parse(text) if is_call else []
        self._called |= bool(calls)
        delta.calls += calls
        if not calls:
            thinks, start = self._before == "reasoning", self._tokenizer.tool_call_start
            rest = Splitter(self._tokenizer, None, "reasoning" if thinks else "normal")
            read = rest.add(Part(text + end, finish="stop"))
            delta.text += start * (not thinks) + read.text
            delta.reasoning += start * thinks + read.reasoning
            self._state = self._machine.make_state(rest._state[0])

    def _parse(self, text):
        """Return the calls; raise an error if one has no name or if arguments are no object."""
        parsed, calls = self._tokenizer.tool_parser(text, self._tools), []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            name, given, number = call["name"], call.get("arguments"), call.get("id")
            if not (name and isinstance(name, str) and isinstance(given, dict | None)):
                raise ValueError("no call")
            if not isinstance(number, str) or number in self._ids:
                number = f"call_{uuid4().hex}"
            self._ids.add(number)
            given = json.dumps(given or {}, ensure_ascii=False, allow_nan=False)
            f"{number}{name}{given}".encode()  # an error for half a character, as in "\ud800"
            calls.append(Call(number, name, given))
        return calls


def token_bytes(tokenizer: TokenizerWrapper, token: int) -> bytes:
    """Return a token's bytes, of which several tokens may make one character."""
    piece = tokenizer.convert_ids_to_tokens(token) or ""  # None: beyond the vocabulary
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if piece.startswith("▁"):  # a space in SentencePiece, which decoding may strip
        text = piece.replace("▁", " ")
    if piece[:3] == "<0x" and piece[5:] == ">" and text != piece:
        return bytes.fromhex(piece[3:5])
    if "\ufffd" in text and _BYTES.keys() >= set(piece):
        return bytes(_BYTES[c] for c in piece)
    return text.encode()
