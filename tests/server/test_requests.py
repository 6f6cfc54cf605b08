"""Requests in OpenAI's form: what they become, and which are refused."""

import json

import mlx.core as mx
import pytest
from fake_served import MODEL, fake_served
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from moelab.commands.server.ask import Ask, Refused
from moelab.commands.server.requests import ChatRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TEXT = {"prompt": "def f(x):"}
BOTH = [(ChatRequest, CHAT), (CompletionRequest, TEXT)]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
both = pytest.mark.parametrize("kind, usual", BOTH, ids=["chat", "completions"])


def asks(kind, usual, *, args=(), **fields):
    return kind.of(usual | fields).read(fake_served(**dict(args)))[0]


@both
def test_null_is_the_default(kind, usual):
    fields = {field.alias or name for name, field in kind.model_fields.items()}
    nulls = dict.fromkeys({*fields, "response_format", "user", "audio", "role_mapping"})
    assert asks(kind, nulls | usual) == asks(kind, usual)


@both
def test_the_command_line_has_the_defaults(kind, usual):
    args = {"max_tokens": 7, "temp": 0.5, "top_p": 0.9, "sampling_top_k": 3, "min_p": 0.1}
    (ask,) = asks(kind, usual, args=args | {"num_draft_tokens": 4})
    assert ask.sampling == {"temp": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1}
    assert (ask.max_tokens, ask.num_draft_tokens, ask.seed) == (7, 4, None)
    given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "num_draft_tokens": 0}
    (ask,) = asks(kind, usual, args=args, max_completion_tokens=3, max_tokens=5, **given)
    assert ask.sampling == {"temp": 0, "top_p": 1, "top_k": 0, "min_p": 0}
    assert (ask.max_tokens, ask.num_draft_tokens) == (3, 0)


@both
def test_arguments_of_mlx_lm(kind, usual):
    """Whole numbers are numbers, and ranks, which share asks as JSON, get what was sent."""
    given = {"temperature": 1, "xtc_probability": 1, "top_k": 5, "min_p": 1, "top_p": 1}
    given |= {"repetition_penalty": 2, "presence_penalty": -2, "frequency_penalty": 1}
    given |= {"repetition_context_size": 9, "logit_bias": {"5": 100}, "stop": "a"}
    (ask,) = asks(kind, usual, **given)
    assert Ask(**json.loads(json.dumps(vars(ask)))) == ask and ask.stops == ["a"]
    logits = mx.random.normal((1, 8192))
    for processor in make_logits_processors(**ask.penalties):
        logits = processor(mx.array([1, 2]), logits)
    assert make_sampler(**ask.sampling)(logits).item() == 5
    assert (ask.penalties["repetition_context_size"], ask.sampling["top_k"]) == (9, 5)
    assert fake_served().tokenizer.encode("\n")[0] in ask.sampling["xtc_special_tokens"]


@both
@pytest.mark.parametrize("given", [{"top_p": 0}, {"top_p": 0.0}, {"temperature": 1e-30}])
def test_what_means_the_likeliest_token(kind, usual, given):
    (ask,) = asks(kind, usual, **{"temperature": 1} | given)
    assert ask.sampling["temp"] == 0


@both
def test_several_texts(kind, usual):
    texts = asks(kind, usual, n=3, seed=2**64 - 2)
    assert [ask.seed for ask in texts] == [2**64 - 2, 2**64 - 1, 0]
    assert [ask.seed for ask in asks(kind, usual, n=2)] == [None, None]
    with pytest.raises(Refused, match="n: expected at most 1024 texts"):
        asks(CompletionRequest, {"prompt": ["x"] * 300}, n=4)


@both
def test_fields_without_effect(kind, usual):
    taken = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    taken |= {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s"}
    taken |= {"response_format": {"type": "text"}, "stream_options": {"include_usage": None}}
    taken |= {"suffix": "", "best_of": 1, "stop": [], "logit_bias": {}, "n": 1}
    for name in ("tiny-moe", str(MODEL), "default_model"):
        assert asks(kind, usual, model=name, **taken) == asks(kind, usual)
    draft = {"draft_model": "lookup", "adapter_path": "a/b"}
    assert asks(kind, usual, args=draft, draft_model="lookup", adapters="a/b")


def test_prompts():
    """Those of lm-eval's ``local-completions`` too."""
    encode = fake_served().tokenizer.encode
    for prompt in ("a b", ["a b", "c"], [1, 2], [[1, 2], [3]], ["a b", [3]]):
        listed = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        wanted = [encode(p) if isinstance(p, str) else p for p in listed for _ in range(2)]
        assert [ask.tokens for ask in asks(CompletionRequest, {"prompt": prompt}, n=2)] == wanted
    body = {"model": "tiny-moe", "prompt": [[1, 2, 3], [4, 5]], "temperature": 0, "max_tokens": 1}
    body |= {"logprobs": 1, "seed": 1234, "echo": True}
    first, second = asks(CompletionRequest, body)
    assert (first.tokens, second.tokens) == ([1, 2, 3], [4, 5]) and first.seed == second.seed
    assert (first.max_tokens, first.logprobs, first.echo) == (1, 1, True)
    body = {"prompt": "x", "max_tokens": 0, "stop": ["\n\n", "</s>"], "echo": True}
    (ask,) = asks(CompletionRequest, body)
    assert (ask.max_tokens, ask.echo, ask.stops) == (0, False, ["\n\n", "</s>"])


def test_tool_choice():
    """With ``none`` the model does not see the tools; tiny-moe cannot call any."""
    assert asks(ChatRequest, CHAT, tools=[TOOL], tool_choice="none") == asks(ChatRequest, CHAT)
    with pytest.raises(Refused, match="tools"):
        asks(ChatRequest, CHAT, tools=[TOOL], tool_choice="auto")


def test_logprobs():
    assert [ask.logprobs for ask in asks(ChatRequest, CHAT)] == [None]
    for fields, most in (({}, 0), ({"top_logprobs": 20}, 20)):
        assert [ask.logprobs for ask in asks(ChatRequest, CHAT, logprobs=True, **fields)] == [most]
    for most in (0, 3):
        assert [ask.logprobs for ask in asks(CompletionRequest, TEXT, logprobs=most)] == [most]


NAN, HUGE = float("nan"), 10**400  # beyond float64
BAD = {  # values that are refused
    "prompt": [5, None, [], "", [""], [[]], [1, True], [-1], [8192], "\ud800"],
    "messages": [5, None, [], ["hi"], [{}], [{"role": 5}], {"role": "user"}],
    "max_tokens": [-1, 1.5, True, HUGE, 2**31],
    "max_completion_tokens": [0, "5"],
    "temperature": [-1, "hot", NAN, 101, HUGE, True],
    "top_p": [-0.1, 1.1],
    "top_k": [-1, 8192],
    "min_p": [2],
    "num_draft_tokens": [-1, 2.5, 65, "x"],
    "presence_penalty": [NAN, 101, float("inf"), -HUGE],
    "repetition_penalty": [-1],
    "xtc_threshold": ["x", 0.7],
    "model": [5, "no/such/folder", "", "x" * 100_000],
    "draft_model": ["no/such/folder", ["lookup"], str(MODEL)],
    "adapters": ["no/such/folder", ""],
    "seed": ["x", -1, 2**64],
    "logit_bias": [5, {"x": 1}, {"8192": 1}, {"-1": 1}, {"3": NAN}, {"3": HUGE}],
    "stop": [5, [5], [""], {"a": 1}, "ab" * 500_000, ["a"] * 65],
    "stream": ["yes", 1],
    "stream_options": [5, {"x": True}, {"include_usage": 1}],
    "n": [0, 129, "x"],
    "logprobs": ["yes", 21],
    "top_logprobs": [-1, 21],
    "chat_template_kwargs": [5, {"tokenize": False}, {"chat_template": "x"}, {"tools": []}],
    "tools": [5, "", {}, [5], [{}], [{"type": "custom", "custom": {"name": "f"}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [False],
    "response_format": ["text", {"type": "json_object"}],
    "functions": [[{"name": "f"}]],
    "reasoning_effort": ["high"],
    "role_mapping": [{}],
    "no_such": [1],
    "x" * 100_000: [1],
}


@pytest.mark.parametrize("field", BAD, ids=lambda name: name[:30])
def test_a_bad_field(field):
    """The error names it, in few words."""
    kind, usual = BOTH[field in ("prompt", "max_tokens")]
    for value in BAD[field]:
        with pytest.raises(ValueError) as refused:
            asks(kind, usual | {field: value})
        said = str(refused.value)
        assert "surrogates" in said if value == "\ud800" else said.startswith(refused.value.param)
        param = getattr(refused.value, "param", field)
        assert field.startswith(param[:40]) and len(said) < 400 and len(param) < 200


WORDS = ["text", "user", "tool", "auto", "function", "tiny-moe", "", "5", "é", "\ud800"]
KEYS = ["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "5"]
LEAVES = st.none() | st.booleans() | st.integers(-2, 9000) | st.floats() | st.sampled_from(WORDS)
JSON = st.recursive(
    LEAVES,
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.sampled_from(KEYS), of, max_size=4),
)
MESSAGES = st.lists(JSON.map(lambda v: {"role": "user", **(v if isinstance(v, dict) else {})}))
NAMES = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields, "temperature"])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, JSON, max_size=3), st.booleans(), JSON | MESSAGES)
def test_any_json(body, chats, main):
    """It becomes asks that ranks can share, or an error of few words."""
    kind, name = (ChatRequest, "messages") if chats else (CompletionRequest, "prompt")
    try:
        made = asks(kind, {name: main} | body)
        assert made and json.dumps([vars(ask) for ask in made], allow_nan=False)
    except ValueError as error:
        assert isinstance(error, (Refused, UnicodeEncodeError)) and len(str(error)) < 400
