"""Checks of a request to ``serve``, where mlx-lm's server would fail later or not at all.

Each check raises ValueError, which the server answers with status 400.
"""

import json
from collections.abc import Iterable
from typing import Any

from ..checkpoint import shorten

FLOAT32_MAX = 3.4e38
# A request has at most so many bytes, and a prompt so many characters: 16 for each of 256k tokens.
# A token of English takes about 5 bytes, one of Chinese, escaped in JSON, 9.
MOST_TEXT = 2**22
MOST_IMAGES = 2**26  # bytes of a request to a model that takes images
MOST_VALUES = 2**18  # values in a request's JSON; each takes some 100 bytes of memory
MOST_DEPTH = 64  # lists and objects inside each other
MOST_LONG = {  # items in each of these fields
    "messages": 4096,  # a template's time may grow with their square
    "tools": 1024,
    "logit_bias": 4096,
    "stop": 64,
}
MOST_STOP_TEXT = 1024  # characters of all stops; mlx-lm keeps a table for each of 100 requests
MOST = {  # the largest value of each field
    "max_tokens": 2**31 - 1,
    "num_draft_tokens": 64,  # nobody else is answered during a round
    "repetition_context_size": 2**31 - 1,
    "presence_context_size": 2**31 - 1,
    "frequency_context_size": 2**31 - 1,
}
DONE = {  # fields of OpenAI's API that have no effect here: only null and these are accepted
    "n": [1],
    "best_of": [1],
    "echo": [False],
    "suffix": [""],
    "response_format": [{"type": "text"}],
    "tool_choice": ["auto"],
    "parallel_tool_calls": [True],
    "functions": [[]],
    "function_call": ["auto", "none"],
    "modalities": [["text"]],
    "audio": [],
    "prediction": [],
    "web_search_options": [],
    "reasoning_effort": ["medium"],
    "verbosity": ["medium"],
}
NUMBERS = (  # fields for which mlx-lm also takes true, nan, infinity and more than a float32 holds
    *("temperature", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
WHOLE_NUMBERS = (  # fields for which mlx-lm also takes true
    *("max_tokens", "top_k", "num_draft_tokens", "top_logprobs", "seed"),
    *("repetition_context_size", "presence_context_size", "frequency_context_size"),
)
OF_THE_SERVER = {  # arguments of the chat template that a request must not set
    *("tokenize", "tools", "add_generation_prompt", "continue_final_message", "conversation"),
    *("max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    *("tokenizer_kwargs", "truncation", "chat_template", "sanitize_control_tokens"),
}


def finite(name: str, value: float) -> float:
    """Make a float of a number; refuse true, false and what float32 cannot hold."""
    if isinstance(value, bool):
        raise ValueError(f"{name} must be a number, not true or false")
    if not abs(value) <= FLOAT32_MAX:  # true for nan as well
        raise ValueError(f"{name} must be finite, as a float32")
    return float(value)


def whole(name: str, value: Any) -> None:
    """Refuse true and false as a whole number; mlx-lm checks the rest."""
    if isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, not true or false")


def served(field: str, name: str, *known: str | None) -> None:
    """Refuse a request whose ``field`` names a model that the command line does not (``known``)."""
    if name not in ("default_model", *known):
        raise ValueError(
            f"{field}: expected the one of the command line, which default_model names too, got "
            f"{name[:100]!r}. A server loads no other: start one for it"
        )


def check_size(raw: bytes) -> None:
    """Refuse a request whose JSON would take much more memory than its text."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"expected at most {MOST_VALUES} commas and brackets in a request")


def bounded_text(parts: Iterable[str]) -> str:
    """Join the text of a chat template, up to a limit: a template can write without end."""
    kept, size = [], 0
    for part in parts:
        size += len(part) + 1
        if size > MOST_TEXT:
            raise ValueError(f"expected at most {MOST_TEXT} characters from the chat template")
        kept.append(part)
    return "".join(kept)


def check_body(body: dict[str, Any], takes_images: bool) -> None:
    """Check the fields of a request's body that mlx-lm takes unchecked."""
    _check_depth(body)
    for name, most in MOST_LONG.items():
        if isinstance(value := body.get(name), (list, dict)) and len(value) > most:
            raise ValueError(f"{name} must be at most {most}, got {len(value)}")
    for name, values in DONE.items():
        if name == "tool_choice" and not body.get("tools"):
            values = [*values, "none"]
        value = body.get(name)
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            able = " or ".join(json.dumps(v) for v in values) or "no such field"
            raise ValueError(f"{name}: this server can do {able}, got {shorten(value, 100)}")
    if body.get("stream") and (body.get("logprobs") or body.get("top_logprobs", -1) > 0):
        raise ValueError("logprobs, top_logprobs: expected without stream, which has none")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "prompt, messages and all other texts must be Unicode, without lone surrogates"
        ) from error
    stop = body.get("stop")
    if stop is not None and not (
        isinstance(stop, (str, list)) and all(isinstance(text, str) and text for text in stop or ())
    ):
        raise ValueError("stop must be a text or a list of texts, none of them empty")
    if sum(map(len, stop or ())) > MOST_STOP_TEXT:
        raise ValueError(f"stop must have at most {MOST_STOP_TEXT} characters")
    if not isinstance(body.get("prompt", ""), str):
        raise ValueError("prompt must be of type str")
    roles = body.get("role_mapping")
    if roles is not None and not (
        isinstance(roles, dict) and all(isinstance(text, str) for text in roles.values())
    ):
        raise ValueError("role_mapping must be an object of texts")
    if body.get("tools") not in (None, []):
        _objects("tools", body["tools"])
    messages = _objects("messages", body.get("messages", [{"role": "user"}]))
    if sum(map(len, (roles or {}).values())) * len(messages) > MOST_TEXT:
        raise ValueError(f"role_mapping: expected {MOST_TEXT} characters at most with the messages")
    for message in messages:
        _check_message(message, takes_images)


def check_options(options: dict[str, Any] | None, template: dict[str, Any] | None) -> None:
    """Check the two fields; ``options`` gets the ``include_usage`` that mlx-lm expects in it."""
    if options is not None and not isinstance(options.setdefault("include_usage", False), bool):
        raise ValueError("stream_options: include_usage must be true or false")
    if wrong := OF_THE_SERVER.intersection(template or ()):
        raise ValueError(f"chat_template_kwargs: {min(wrong)} is set by the server")


def _check_depth(body):
    level = [body]
    for _ in range(MOST_DEPTH):
        inner = [v for each in level for v in (each.values() if type(each) is dict else each)]
        level = [v for v in inner if isinstance(v, (dict, list))]
    if level:
        raise ValueError(f"expected at most {MOST_DEPTH} lists and objects inside each other")


def _check_message(message, takes_images):
    if not isinstance(message.get("role"), str):
        raise ValueError("messages: role must be of type str in each of them")
    content = message.get("content")
    if isinstance(content, list):
        for part in _objects("messages: content", content):
            _check_part(part, takes_images)
    elif not isinstance(content, (str, type(None))):
        raise ValueError("messages: content must be a text, a list of parts or null")
    if message.get("tool_calls") in (None, []):
        return
    for call in _objects("messages: tool_calls", message["tool_calls"]):
        if not isinstance(function := call.get("function"), dict):
            raise ValueError("messages: tool_calls must have a function each, as an object")
        try:
            if isinstance(arguments := function.get("arguments"), str) and arguments:
                json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"messages: tool_calls: arguments must be JSON: {error}") from error


def _check_part(part, takes_images):
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise ValueError("messages: content of type text must have a text")
        return
    if not takes_images:  # refused before mlx-lm's server fetches an image from its URL
        raise ValueError(f"messages: content must be of type text for this model, got {kind!r:.50}")
    url = part.get("image_url", part.get("image"))
    if not isinstance(url.get("url") if isinstance(url, dict) else url, str):
        raise ValueError("messages: content of another type than text must be an image's URL")


def _objects(name, value):
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{name} must be a list of objects, and not empty")
    return value
