"""A ``Served`` without a model, and checks of answers by the types of official clients."""

from argparse import Namespace
from functools import cache
from importlib import import_module

import pydantic
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AutoTokenizer

from moelab import DATA
from moelab.commands.server.ask import Served
from moelab.detokenizer import Detokenizer
from moelab.streaming.model import tokenizer_of

MODEL = DATA / "models/tiny-moe"
TOKENIZER = tokenizer_of(MODEL)
ARGS = {"model": str(MODEL), "max_tokens": None, "temp": 0.0, "top_p": 1.0, "sampling_top_k": 0}
ARGS |= {"min_p": 0.0, "num_draft_tokens": "auto", "chat_template_args": {}}


def fake_served(**args):
    """The ``Served`` of tiny-moe that ``serve`` makes of these command-line arguments."""
    return Served("tiny-moe", Namespace(**ARGS | args), TOKENIZER, size=8192, positions=10**6)


@cache
def _thinker(template):
    hf = AutoTokenizer.from_pretrained(MODEL)
    hf.chat_template = template
    hf.add_tokens(["<think>", "</think>"])
    return hf


def wrapped(template=None, parser="json_tools", **format):
    """The tokenizer of a model that thinks, and calls tools in a parser's format."""
    if parser:
        module = import_module(f"mlx_lm.tool_parsers.{parser}")
        format["tool_parser"] = module.parse_tool_call
        format |= {name: getattr(module, name) for name in ("tool_call_start", "tool_call_end")}
    return TokenizerWrapper(_thinker(template), Detokenizer, **format)


def parsed(kind, value, may_have=()):
    """Return a value as an official client's type, which must have all of the value's fields."""
    try:
        kind.model_validate(value, strict=True, extra="forbid")
    except pydantic.ValidationError as error:
        assert {wrong["loc"][-1] for wrong in error.errors()} <= {*may_have}, error
    return kind.model_validate(value, strict=True)
