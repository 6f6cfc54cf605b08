"""Turns decoded text into answers: stop strings end the text, thoughts and calls are split off."""

import json
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .ask import Part, Run, joined


class Stops:
    """Ends a text before its first stop string; no string in ``stops`` is empty."""

    def __init__(self, stops: list[str]):
        self._stops, self._held, self.found = stops, "", None

    def add(self, text: str, last: bool = False) -> str:
        """Return text to send; hold back an end that may begin a stop string, unless ``last``."""
        text, self._held = self._held + text, ""
        for i in range(len(text)):
            begun = [s for s in self._stops if s.startswith(text[i : i + len(s)])]
            self.found = self.found or next((s for s in begun if text.startswith(s, i)), None)
            if self.found or (begun and not last):
                self._held = text[i:]
                return text[:i]
        return text


class Splitter:
    """Splits a text that comes in pieces into reasoning, calls of ``tools`` and the rest.

    ``state`` is the state at the prompt's end; in the state "content" nothing is split. A call's
    text that does not parse, or that ``max_tokens`` cut, is read again as text in the state before
    the call. Only the first call is kept if ``one`` is set.
    """

    def __init__(self, tokenizer: TokenizerWrapper, tools: list | None, state: str, one=False):
        self._tokenizer, self._tools, self._one = tokenizer, tools, one
        self._machine = make_text_state_machine(tokenizer)
        self._state, self._outside = self._machine.make_state(state), "normal"
        self._runs, self._tool, self._called = [], "", False

    def add(self, part: Part) -> Part:
        """Return the part with its ``runs``; after the last part nothing is held."""
        self._runs = []
        self._read(part.text, self._tools)
        if part.finish and self._flush() == "tool":
            self._end_tool("", part.finish == "stop")
            self._flush()
        finish = "tool_calls" if self._called and part.finish == "stop" else part.finish
        return replace(part, runs=joined(self._runs), finish=finish)

    def _read(self, text, tools):
        said = ""
        for character in text:  # one by one, because text that is not a call resets the state
            before = self._state[0]
            self._state, more, now = self._machine.step(self._state, character)
            said += more
            if now == before:
                continue
            self._say(before, said)
            said = ""
            if before == "tool":
                self._end_tool(self._tokenizer.tool_call_end)
                continue
            self._outside = "reasoning" if before == "reasoning" else "normal"
            if now == "tool" and not tools:
                said = self._tokenizer.tool_call_start
                self._state = self._machine.make_state(self._outside)
        self._say(self._state[0], said)

    def _flush(self):
        self._state, said, now = self._machine.flush(self._state)
        self._say(now, said)
        return now

    def _say(self, state, text):
        if state == "tool":
            self._tool += text
        elif text and state != "header":  # a message's header is not sent
            self._runs.append(Run("reasoning" if state == "reasoning" else "content", text))

    def _end_tool(self, end, is_call=True):
        """Add the calls in a tool's text; if there is none, read the text again as plain text."""
        text, self._tool, calls = self._tool, "", []
        with suppress(Exception):  # mlx-lm's parsers may raise any error
            parsed = self._tokenizer.tool_parser(text, self._tools) if is_call else []
            calls = [_call(**call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        if not calls:
            self._state = self._machine.make_state(self._outside)
            self._read(self._tokenizer.tool_call_start + text + end, None)
        self._runs += calls[: not self._called] if self._one else calls
        self._called |= bool(calls)


def _call(name, arguments=None, id=None, **_):
    if not (name and isinstance(name, str) and isinstance(arguments, dict | None)):
        raise ValueError("expected a name and an object")
    arguments = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    arguments = arguments.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Run("call", arguments, str(id or f"call_{uuid4().hex}"), name)
