"""A server whose model says what a test wants: it thinks and calls tools."""

import threading
import time
from contextlib import contextmanager
from functools import partial

import agents
from fake_served import fake_served, wrapped
from in_process import listening

from moelab.commands.server import http
from moelab.commands.server.ask import Part, Usage

USAGE = Usage(30, 20, 7)
PROMPT = "def read_json(path):"
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>'
ALL = f"<think>Hm</think>\n\nA{CALL}\n{CALL}<think>I</think>B"
SAID = {  # what the model says and how it ends; the answer's items (* marks a thought)
    "text": (["Hello"], ["Hello"]),
    "nothing": ([""], []),
    "a cut thought": (["<think>Hm", "length"], ["*Hm"]),
    "all in turns": ([ALL], ["*Hm", "\n\nA", "call", "\n", "call", "*I", "B"]),
    "all at once": ([[ALL]], ["*Hm", "\n\nA", "call", "\n", "call", "*I", "B"]),
    "malformed": (["A<tool_call>{oops</tool_call>"], ["A<tool_call>{oops</tool_call>"]),
    "a cut call": ([f"{CALL}<tool_call>", "length"], ["call", "<tool_call>"]),
}
CHAT_TOOL = {"type": "function", "function": agents.DOES}
# mlx-lm infers from the comment how calls are written.
TEMPLATE = """{# <tool_call> tool_call.name #}{{ tools | tojson if tools }}
{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{{ 'off' if enable_thinking is false }}{{ reasoning_effort }}"""


def caller():
    """The ``Served`` of a model that thinks and calls tools."""
    served = fake_served()
    served.tokenizer = wrapped(TEMPLATE)
    return served


class Speaker:
    """An engine that answers each request in letters or pieces, one every ``pause_s`` seconds."""

    def __init__(self, *said, pause_s=0):
        self.pause_s, self.tells, self.ended = pause_s, [], []
        self.says(*said)

    def says(self, said="abcd", end="stop"):
        end = Part(finish=end, usage=USAGE) if isinstance(end, str) else end  # or an error
        self.events = [*map(Part, said), end]

    def begin(self, ask, tell):
        self.tells.append(tell)
        threading.Thread(target=self._write, args=(tell,), daemon=True).start()
        return partial(self.ended.append, tell)

    def _write(self, tell):
        for event in self.events:
            time.sleep(self.pause_s)
            if tell not in self.ended:
                tell(event)

    check = stop = lambda self: None


@contextmanager
def speaking(engine):
    """The address of a server that has this engine and speaks all dialects."""
    with listening(http.app(engine, caller()), engine) as url:
        yield url
