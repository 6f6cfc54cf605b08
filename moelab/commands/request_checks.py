"""Checks of a request to ``serve``, where mlx-lm's server would fail later or not at all."""

import json
from typing import Any

from ..checkpoint import check_parts, shorten

# A request has at most so many bytes: 16 for each of 256k tokens. An English token takes about 5,
# a Chinese one 9 (escaped in JSON). Requests to a model that takes images may be longer.
MOST_TEXT, MOST_IMAGES = 2**22, 2**26
TOKENS_NBYTES = 260  # bytes of memory that a tokenizer takes for each byte of a text
SMALL_NBYTES = 1_000_000  # a request that takes less is not refused for memory
MOST_STOP_TEXT = 1024  # characters of all stops; mlx-lm keeps a table for each of 100 requests
AUTO = "auto"  # as num_draft_tokens: the policy decides
DEFAULT = "default_model"  # mlx-lm's name of the model, draft or adapters of the command line
FLOATS = ("temperature", "top_p", "min_p", "xtc_probability", "xtc_threshold")
FLOATS += ("repetition_penalty", "presence_penalty", "frequency_penalty")
INTS = ("max_tokens", "max_completion_tokens", "top_k", "top_logprobs", "repetition_context_size")
INTS += ("presence_context_size", "frequency_context_size")
MOST = {  # the largest value of each number, and with the other sign the least
    **dict.fromkeys(FLOATS, 3.4e38),  # a float32's
    **dict.fromkeys(INTS, 2**31 - 1),
    "xtc_threshold": 0.5,
    "num_draft_tokens": 64,  # nobody else is answered during a round
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
LIKE = {  # the kinds of other fields; a list has the kind of its items
    "prompt": str,
    "messages": [{"role": str}],
    "tools": [{}],
    "stream_options": {},
    "chat_template_kwargs": {},
    "role_mapping": {},
}
# Arguments of the chat template that a request must not set. mlx-lm refuses those it sets itself.
OF_THE_SERVER = {"chat_template", "return_dict", "return_tensors", "tokenizer_kwargs", "max_length"}
OF_THE_SERVER |= {"padding", "truncation", "return_assistant_tokens_mask"}
OF_THE_SERVER |= {"sanitize_control_tokens"}


class Refused(ValueError):
    """A request that is answered with another status than 400."""

    def __init__(self, words: str, status: int):
        super().__init__(words)
        self.status = status


def status_of(error: Exception) -> int:
    """The status to answer an error with: 400 if the request is wrong, 503 if memory is short."""
    if isinstance(error, MemoryError):
        return 503
    is_wrong = isinstance(error, (ValueError, RecursionError))
    return getattr(error, "status", 400 if is_wrong else 500)


def check_size(size: int, takes_images: bool, free_nbytes: int) -> None:
    """Refuse a request that is too long, or whose text may take more than half of free memory."""
    most = MOST_IMAGES if takes_images else MOST_TEXT
    if size > most:
        raise Refused(f"Content-Length: expected at most {most} bytes, got {size}", 413)
    needs, free = TOKENS_NBYTES * size, max(0, free_nbytes // 2)
    if needs > max(free, SMALL_NBYTES) and not takes_images:
        raise MemoryError(
            f"memory is short: reading the request takes up to {needs / 1e6:.0f} MB, and there are "
            f"{free / 1e6:.0f} MB. Send a shorter one, or try again."
        )


def check_origin(origin: str | None, allowed: list[str]) -> None:
    """Refuse web pages of other origins: CORS hides answers from them, but sends their requests."""
    if origin is not None and not {"*", origin}.intersection(allowed):
        origin = origin[:100]
        words = f"Origin: {origin} may not ask. Start the server with --allowed-origins {origin}"
        raise Refused(words, 403)


def check_name(field: str, name: str | None, *known: str | None) -> None:
    """Refuse a request whose ``field`` names a model that the command line does not (``known``)."""
    if name not in (DEFAULT, *known):
        raise ValueError(
            f"{field}: expected the one of the command line, which {DEFAULT} names too, got "
            f"{shorten(name, 100)!r}. A server loads no other: start one for it"
        )


def check_tokens(prompt: Any, args: Any, size: int) -> None:
    """Refuse a prompt without tokens, and numbers beyond a vocabulary of ``size`` tokens."""
    if not prompt:
        raise ValueError("prompt: expected a text of at least one token, got none")
    if args.sampling.top_k >= size:
        raise ValueError(f"top_k: expected less than the vocabulary's {size} tokens")
    if wrong := [token for token in args.logits.logit_bias or () if not 0 <= token < size]:
        raise ValueError(f"logit_bias: expected token ids from 0 to {size - 1}, got {wrong[0]}")


def check_body(body: dict[str, Any], takes_images: bool) -> None:
    """Check the fields of a request's body that mlx-lm takes unchecked."""
    for name, most in MOST.items():
        if body.get(name) not in (None, AUTO):
            _check_number(name, body[name], most)
    if not 0 <= (body.get("seed") or 0) < 2**64:
        raise ValueError("seed: expected a whole number from 0 to 2**64 - 1")
    for value in (body.get("logit_bias") or {}).values():
        _check_number("logit_bias", float(value), MOST["temperature"])
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # a lone surrogate
        raise ValueError("prompt, messages and all other texts must be Unicode") from error
    for name, values in DONE.items():
        value = body.get(name)
        if name == "tool_choice" and not body.get("tools"):
            values = [*values, "none"]
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            able = " or ".join(json.dumps(v) for v in values) or "no such field"
            raise ValueError(f"{name}: this server can do {able}, got {shorten(value, 100)}")
    if body.get("stream") and (body.get("logprobs") or body.get("top_logprobs", -1) > 0):
        raise ValueError("logprobs, top_logprobs: expected without stream, which has none")
    stop = body.get("stop") or []
    texts = [stop] if isinstance(stop, str) else stop
    check_parts(texts, [str], "stop:")
    if "" in texts or sum(map(len, texts)) > MOST_STOP_TEXT:
        raise ValueError(f"stop: expected texts of 1 to {MOST_STOP_TEXT} characters in all")
    for name, like in LIKE.items():
        if body.get(name) is not None or (name in body and name in ("prompt", "messages")):
            check_parts(body[name], like, f"{name}:")
    if wrong := OF_THE_SERVER.intersection(body.get("chat_template_kwargs") or ()):
        raise ValueError(f"chat_template_kwargs: {min(wrong)} is set by the server")
    if body.get("stream_options") is not None:  # mlx-lm reads include_usage
        body["stream_options"].setdefault("include_usage", False)
    if body.get("messages") == []:
        raise ValueError("messages: expected at least one, got none")
    for message in body.get("messages", ()):
        _check_message(message, takes_images)


def _check_number(name, value, most):
    """Refuse what is no number (true and false, too), nan, and a number that is too large."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not -most <= value <= most:  # true for nan as well
        raise ValueError(f"{name} must be a number of at most {most}, got {shorten(value, 100)}")


def _check_message(message, takes_images):
    content = message.get("content")
    if not isinstance(content, (str, type(None))):
        check_parts(content, [{"type": str}], "messages: content:")
        for part in content:
            if part["type"] == "text":
                check_parts(part, {"text": str}, "messages: content:")
            elif not takes_images:  # before mlx-lm fetches an image from its URL
                raise ValueError(
                    "messages: content must be of type text for this model, got "
                    f"{shorten(part['type'], 50)!r}"
                )
    check_parts(message.get("tool_calls") or [], [{"function": {}}], "messages: tool_calls:")
