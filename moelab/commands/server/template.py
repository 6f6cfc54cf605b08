"""Turns messages into the tokens that a model reads, with the model's chat template."""

from contextlib import suppress
from functools import partial
from inspect import signature
from itertools import takewhile

from mlx_lm.server import convert_chat
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from ...checkpoint import describe
from .ask import Refused

OURS = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}


def chat_tokens(
    tokenizer: TokenizerWrapper, messages: list, tools: list | None, given: dict, has_states: bool
) -> tuple[list[int], list[tuple[int, str]], str]:
    """Return a chat's tokens, its cuts (``Ask.cuts``) and the state in which ``Splitter`` begins.

    ``given`` are the template's arguments. Cuts are [] without ``has_states``. Raises ``Refused``.
    """
    if tools and not tokenizer.has_tool_calling:
        raise Refused("tools: this model has no known format of calls. Send no tools.", "tools")
    if wrong := OURS.intersection(given):
        name = "chat_template_kwargs"
        raise Refused(f"{name}: {min(wrong)} is set by the server. Leave it out.", name)
    system = "developer" if "developer" in str(tokenizer.chat_template) else "system"
    messages = [_message(message, system) for message in messages]
    last, begun, first = messages[-1], {"add_generation_prompt": True}, ""
    if last["role"] == "assistant" and last["content"] and not last.get("tool_calls"):
        # The answer continues the last message. Without a template, mlx-lm would add ``first``.
        begun = {"add_generation_prompt": False, "continue_final_message": True}
        first = "\nASSISTANT:"
    if not tokenizer.has_chat_template:
        return tokenizer.encode(convert_chat(messages).removesuffix(first)), [], "normal"
    render = partial(tokenizer.apply_chat_template, tools=tools or None, **given)

    def shared(messages):
        """Count the leading tokens that ``tokens`` and the rendered ``messages`` share."""
        with suppress(Exception):  # the template may refuse them
            pairs = zip(tokens, render(messages, add_generation_prompt=False))
            return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        return 0

    try:
        tokens = render(messages, **begun)
    except Exception as error:  # a template and its arguments may raise anything
        words = f"messages: the chat template fails for them: {describe(error)}"
        raise Refused(words, "messages") from error
    opened = tokenizer.rfind_think_start(tokens) if tokenizer.has_thinking else -1
    thinks = opened >= 0 and opened > tokenizer.rfind_think_end(tokens)
    end = shared(messages) if has_states or thinks else 0
    thinks = thinks and not opened < end < len(tokens)  # a <think> in a message does not count
    state = not first and tokenizer.response_initial_state
    state = state or ("reasoning" if thinks else "normal")
    # A cache that ends with a user's message serves longest: later prompts may omit the thinking.
    last = min(end or len(tokens), len(tokens) - 1)  # some templates always begin the next turn
    cuts = {last: "user" if messages[-1]["role"] == "user" else "assistant"}
    leading = [*takewhile(lambda m: m["role"] in ("system", "developer"), messages)]
    if has_states and (leading or tools):
        cuts[shared([*leading, {"role": "user", "content": ""}])] = "system"
    cuts = [(at, kind) for at, kind in sorted(cuts.items()) if has_states and 0 < at < len(tokens)]
    return tokens, cuts, state


def _message(message, system):
    """Convert a message for templates: its content to text, each call's arguments to an object."""
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content", "")
    parts = [{"text": content}] if isinstance(content, str) else content
    message["content"] = "".join(part.get("text") or "" for part in parts)
    message["role"] = system if message["role"] == "developer" else message["role"]
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = call["function"].get("arguments") or {}
    if "reasoning" in message:  # this server's name for ``reasoning_content``
        message.setdefault("reasoning_content", message["reasoning"])
    return message
