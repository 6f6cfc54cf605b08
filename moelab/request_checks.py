"""What ``serve`` refuses in a request, where mlx-lm's server would fail later or not at all.

Each function raises ValueError, which the server answers with status 400.
"""

import json
from typing import Any

FLOAT32_MAX = 3.4e38
MOST_TOKENS = 2**31 - 1
NUMBERS = (  # which mlx-lm takes as true, nan, infinity and beyond float32 too
    *("temperature", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
WHOLE_NUMBERS = (  # which it takes as true
    *("max_tokens", "top_k", "num_draft_tokens", "top_logprobs", "seed"),
    *("repetition_context_size", "presence_context_size", "frequency_context_size"),
)
OF_THE_SERVER = {  # arguments of the chat template that a request cannot change
    *("tokenize", "tools", "add_generation_prompt", "continue_final_message", "conversation"),
    *("max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    *("tokenizer_kwargs", "truncation"),
}


def finite(name: str, value: float) -> float:
    """A number as float32 can hold it.

    Args:
        name (str): What the error calls it.
        value (float): The number.
    """
    if isinstance(value, bool):
        raise ValueError(f"{name} must be a number, not true or false")
    if not abs(value) <= FLOAT32_MAX:  # nan neither
        raise ValueError(f"{name} must be finite, as a float32")
    return float(value)


def whole(name: str, value: Any) -> None:
    """Refuse true and false for a whole number.

    Args:
        name (str): What the error calls it.
        value (Any): Of a type that mlx-lm takes.
    """
    if isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, not true or false")


def check_body(body: dict[str, Any], takes_images: bool) -> None:
    """Look at the fields that mlx-lm takes from a request's body as they are.

    Args:
        body (dict): The request.
        takes_images (bool): Whether the model does.
    """
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
    if not isinstance(body.get("prompt", ""), str):
        raise ValueError("prompt must be of type str")
    roles = body.get("role_mapping")
    if roles is not None and not (
        isinstance(roles, dict) and all(isinstance(text, str) for text in roles.values())
    ):
        raise ValueError("role_mapping must be an object of texts")
    if body.get("tools") not in (None, []):
        _objects("tools", body["tools"])
    for message in _objects("messages", body.get("messages", [{"role": "user"}])):
        _check_message(message, takes_images)


def check_options(options: dict[str, Any] | None, template: dict[str, Any] | None) -> None:
    """Look into the fields ``stream_options`` and ``chat_template_kwargs``.

    Args:
        options (dict or None): The first, which gets what mlx-lm expects in it.
        template (dict or None): The second.
    """
    if options is not None and not isinstance(options.setdefault("include_usage", False), bool):
        raise ValueError("stream_options: include_usage must be true or false")
    if wrong := OF_THE_SERVER.intersection(template or ()):
        raise ValueError(f"chat_template_kwargs: {min(wrong)} is set by the server")


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
    if not takes_images:  # said before mlx-lm's server fetches an image from where it says
        raise ValueError(f"messages: content must be of type text for this model, got {kind!r:.50}")
    url = part.get("image_url", part.get("image"))
    if not isinstance(url.get("url") if isinstance(url, dict) else url, str):
        raise ValueError("messages: content of another type than text must be an image's URL")


def _objects(name, value):
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{name} must be a list of objects, and not empty")
    return value
