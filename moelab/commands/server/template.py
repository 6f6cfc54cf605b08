"""Messages become the tokens that the model reads, by its chat template."""

import json
from contextlib import suppress
from inspect import signature
from itertools import takewhile

from mlx_lm.server import convert_chat
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from ...checkpoint import describe, shorten
from .ask import Refused

# Arguments of the template that a request must not set.
OURS = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}


def chat_tokens(
    tokenizer: TokenizerWrapper,
    messages: list[dict],
    tools: list[dict] | None,
    given: dict,
    defaults: dict,
    has_states: bool,
) -> tuple[list[int], list[tuple[int, str]], str]:
    """Return a chat's tokens, ``Ask.cuts`` if the model ``has_states``, and ``Splitter``'s state.

    ``messages`` and ``tools`` have the form of OpenAI's chat; ``given`` are the template's
    arguments in the request, ``defaults`` those of the command line. Raises ``Refused``.
    """
    if tools and not tokenizer.has_tool_calling:
        raise Refused("tools: this model has no known format to call them. Send none.", "tools")
    if wrong := OURS.intersection(given):
        name = "chat_template_kwargs"
        raise Refused(f"{name}: {min(wrong)} is set by the server. Leave it out.", name)
    knows = "developer" in str(tokenizer.chat_template)
    messages = [_message(m, f"messages[{i}]", knows) for i, m in enumerate(messages)]
    if not tokenizer.has_chat_template:
        return tokenizer.encode(convert_chat(messages)), [], "normal"
    options = {**defaults, **given, "tools": tools or None}

    def shared(messages):
        """Count the tokens that the prompt shares with other messages, without a new turn."""
        with suppress(Exception):  # the template need not take these
            other = tokenizer.apply_chat_template(messages, add_generation_prompt=False, **options)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other)))
        return 0

    try:
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except MemoryError:
        raise
    except Exception as error:  # a template and its arguments may raise anything
        words = "messages: expected some that the chat template takes, it fails: "
        raise Refused(words + describe(error), "messages") from error
    opened = tokenizer.rfind_think_start(tokens) if tokenizer.has_thinking else -1
    thinks = opened >= 0 and opened > tokenizer.rfind_think_end(tokens)
    end = shared(messages) if has_states or thinks else 0
    thinks = thinks and not opened < end < len(tokens)  # a message that says <think> does not
    state = tokenizer.response_initial_state or ("reasoning" if thinks else "normal")
    # The state after a user's message serves longest: its answer may be rendered without thinking.
    cuts = {end: "user" if messages[-1]["role"] == "user" else "assistant"}
    leading = len([*takewhile(lambda m: m["role"] in ("system", "developer"), messages)])
    if has_states and (leading or tools):
        cuts[shared([*messages[:leading], {"role": "user", "content": ""}])] = "system"
    cuts = [(end, kind) for end, kind in sorted(cuts.items()) if 0 < end < len(tokens)]
    return tokens, cuts if has_states else [], state


def _message(message, where, knows_developer):
    """Check a message and make it what templates expect: text, and arguments that are objects."""
    message = {name: value for name, value in message.items() if value is not None}
    parts, calls = message.get("content", ""), message.pop("tool_calls", None)
    parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            got = shorten(part.get("type"), 50)
            raise Refused(f"{where}.content: expected parts of type text, got {got}.", "messages")
    message["content"] = "".join(part["text"] for part in parts)
    if message["role"] == "developer" and not knows_developer:
        message["role"] = "system"
    if "reasoning" in message:  # as this server's answers have it; templates know the other name
        message.setdefault("reasoning_content", message["reasoning"])
    try:
        for call in calls or ():
            arguments = call["function"].get("arguments") or {}
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            function = {**call["function"], "arguments": {**arguments}}
            message.setdefault("tool_calls", []).append({**call, "function": function})
    except Exception as error:
        words = f"{where}.tool_calls: expected a function, its arguments the JSON text of an object"
        raise Refused(f"{words}: {describe(error)}", "messages") from error
    return message
