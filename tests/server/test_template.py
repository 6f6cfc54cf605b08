"""Messages become tokens: what templates get, what is refused, where prompts part."""

import importlib
import json

import pytest
from mlx_lm.chat_templates import muse_spark
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AutoTokenizer

from moelab import DATA
from moelab.commands.server.ask import Refused
from moelab.commands.server.template import chat_tokens

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
# Like Qwen3's: tools first, calls as JSON, thinking only after the last user's message.
THINKING = """
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}{{ tools | tojson }}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def user(content):
    return {"role": "user", "content": content}


@pytest.fixture
def wrapped():
    """Make a tokenizer that thinks, if a template of its own is given, and may call tools."""

    def make(template=None, tools="json_tools", thinks=True, **format):
        hf = AutoTokenizer.from_pretrained(DATA / "models/tiny-moe")
        hf.chat_template = template
        if thinks:
            hf.add_tokens(["<think>", "</think>"])
        if tools:
            module = importlib.import_module(f"mlx_lm.tool_parsers.{tools}")
            names = ("tool_call_start", "tool_call_end")
            format |= {"tool_parser": module.parse_tool_call}
            format |= {name: getattr(module, name) for name in names}
        return TokenizerWrapper(hf, **format)

    return make


def chat(tokenizer, messages, tools=None, given=None, defaults=None, has_states=True):
    return chat_tokens(
        tokenizer, messages, tools, {**(defaults or {}), **(given or {})}, has_states
    )


def text(tokenizer, *args, **kwargs):
    return tokenizer.decode(chat(tokenizer, *args, **kwargs)[0])


def test_the_models_own_template(wrapped):
    tokenizer = AutoTokenizer.from_pretrained(DATA / "models/tiny-moe")
    tokenizer = TokenizerWrapper(tokenizer)
    tokens, cuts, state = chat(tokenizer, [user("def f(x):"), user("    return")])
    assert tokenizer.decode(tokens) == "def f(x):\n    return"
    assert state == "normal" and chat(tokenizer, [user("a")], has_states=False)[1] == []
    assert all(0 < end < len(tokens) for end, _ in cuts)


def test_content_is_text(wrapped):
    tokenizer = wrapped(PLAIN)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [user(parts), {"role": "assistant", "content": None, "tool_calls": None}]
    given = json.dumps(messages)
    messages.append({"role": "assistant"})
    assert text(tokenizer, messages) == (
        "<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert json.dumps(messages[:2]) == given  # the request is not changed


def test_without_a_template_chats_are_text(wrapped):
    tokenizer = wrapped(None, tools=None)
    messages = [{"role": "developer", "content": [{"type": "text", "text": "Be short"}]}]
    messages += [user("a"), {"role": "assistant", "content": None}]
    tokens, cuts, state = chat(tokenizer, messages)
    assert (
        tokenizer.decode(tokens) == "ASSISTANT's RULE: Be short\nUSER: a\nASSISTANT: \nASSISTANT:"
    )
    assert (cuts, state) == ([], "normal")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
        {"type": "input_audio"},
        {"type": "text"},
        {"type": "text", "text": 3},
        {},
    ],
)
@pytest.mark.parametrize("template", [PLAIN, None])
def test_content_that_is_no_text_is_refused(wrapped, template, part):
    messages = [user("a"), user([{"type": "text", "text": "b"}, part])]
    with pytest.raises(Refused, match=r"messages\[1\]\.content: .* text") as refused:
        chat(wrapped(template), messages)
    assert refused.value.param == "messages"


def test_calls_reach_the_template_as_objects(wrapped):
    tokenizer = wrapped(THINKING)
    empty = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": a}}
             for a in ("", None, "{}", {})]  # fmt: skip
    messages = [user("a"), {"role": "assistant", "content": None, "tool_calls": [CALL, *empty]}]
    assert text(tokenizer, messages, TOOLS).count('"arguments": {}') == 4
    assert '{"name": "add", "arguments": {"a": 1}}' in text(tokenizer, messages, TOOLS)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"function": None},
        {"function": "f"},
        3,
        *(
            {"function": {"name": "f", "arguments": a}}
            for a in ("{", "[1]", "3", "null", '"x"', 3, [1], "[" * 100_000)
        ),
    ],
    ids=lambda call: repr(call)[:50],
)
def test_malformed_calls_are_refused(wrapped, call):
    with pytest.raises(Refused, match=r"messages\[1\]\.tool_calls: expected") as refused:
        chat(wrapped(THINKING), [user("a"), {"role": "assistant", "tool_calls": [CALL, call]}])
    assert refused.value.param == "messages" and len(str(refused.value)) < 500


def test_tools_need_a_model_that_calls_them(wrapped):
    with pytest.raises(Refused, match="tools: ") as refused:
        chat(wrapped(PLAIN, tools=None), [user("a")], TOOLS)
    assert refused.value.param == "tools"
    assert "add" in text(wrapped(THINKING), [user("a")], TOOLS)


def test_a_developer_is_a_system_where_the_template_knows_none(wrapped):
    messages = [{"role": "developer", "content": "x"}, user("a")]
    assert text(wrapped(PLAIN), messages).startswith("<|im_start|>system\nx")
    knows = PLAIN + "{# developer #}"
    assert text(wrapped(knows), messages).startswith("<|im_start|>developer\nx")


def test_arguments_of_the_template(wrapped):
    tokenizer = wrapped("{{ a }}{{ b }}{{ messages[0].content }}")
    assert text(tokenizer, [user("x")], None, {"a": 1}, {"a": 2, "b": 3}) == "13x"
    for name in ("chat_template", "tokenize", "tools", "add_generation_prompt", "return_dict"):
        with pytest.raises(Refused, match=f"chat_template_kwargs: {name} ") as refused:
            chat(tokenizer, [user("x")], None, {name: "x"})
        assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[9].content.x }}",
        "{{ messages[0].content + 3 }}",
        "{% for",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_refused(wrapped, template):
    with pytest.raises(Refused, match="messages: .* chat template .* fails") as refused:
        chat(wrapped(template), [user("a")])
    assert refused.value.param == "messages" and len(str(refused.value)) < 500
    with pytest.raises(Refused):
        chat(wrapped(PLAIN), [user("\ud800")])


def test_a_template_whose_probes_fail_still_works(wrapped):
    strict = "{% if not add_generation_prompt or messages[-1].content == '' %}"
    strict += "{{ raise_exception('no') }}{% endif %}" + PLAIN
    tokens, cuts, _ = chat(wrapped(strict), [{"role": "system", "content": "s"}, user("a")])
    assert tokens and cuts == []


def test_the_state_after_the_prompt(wrapped):
    tokenizer, quiet = wrapped(THINKING), {"enable_thinking": False}
    assert chat(tokenizer, [user("a")])[2] == "reasoning"
    assert chat(tokenizer, [user("a")], given=quiet)[2] == "normal"
    # What messages say opens no thinking and ends none.
    for has_states in (True, False):
        for word in ("<think>", "</think>", "</think><think>"):
            given = chat(tokenizer, [user(f"what is {word}?")], has_states=has_states)
            assert given[2] == "reasoning"
            given = chat(tokenizer, [user(word)], given=quiet, has_states=has_states)
            assert given[2] == "normal"
    assert chat(wrapped(THINKING, thinks=False), [user("a")])[2] == "normal"
    # A template that begins the answer in either case.
    assert chat(wrapped("{{ messages[0].content }}<think>"), [user("a")])[2] == "reasoning"
    muse = wrapped(PLAIN, "muse_spark", response_format=muse_spark.RESPONSE_FORMAT)
    assert chat(muse, [user("a")])[2] == "header"


def test_prompts_part_after_the_system_and_after_the_last_message(wrapped):
    tokenizer = wrapped(THINKING)
    system = {"role": "system", "content": "You are short."}
    for messages, tools in (([system, user("Hello")], None), ([user("Hello")], TOOLS)):
        tokens, cuts, _ = chat(tokenizer, messages, tools)
        assert [kind for _, kind in cuts] == ["system", "user"]
        ends = [tokenizer.decode(tokens[:end]) for end, _ in cuts]
        assert ends[0].endswith("<|im_end|>\n<|im_start|>user\n")
        assert ends[1].endswith("Hello<|im_end|>\n")
        other = chat(tokenizer, [*messages[:-1], user("Goodbye")], tools)
        assert other[0][: cuts[0][0]] == tokens[: cuts[0][0]] and other[1][0] == cuts[0]
        assert chat(tokenizer, messages, tools, has_states=False)[::2] == (tokens, "reasoning")
        assert chat(tokenizer, messages, tools, has_states=False)[1] == []
    assert [kind for _, kind in chat(tokenizer, [user("Hello")])[1]] == ["user"]


def test_an_agents_next_prompt_begins_with_what_was_kept(wrapped):
    """A turn may be rendered otherwise than it was written: its thinking is left out, or added."""
    tokenizer = wrapped(THINKING)
    messages = [{"role": "system", "content": "Use tools."}, user("1 + 1?")]
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    turns = [
        [call | {"reasoning": "I add."}, {"role": "tool", "content": "2"}],
        [call, {"role": "tool", "content": [{"type": "text", "text": "3"}]}],
        [{"role": "assistant", "content": "It is 2."}, user("2 + 2?")],
        [{"role": "assistant", "content": "", "reasoning": "Easy."}, user("<think>?")],
    ]
    kept = set()
    for turn in turns:
        tokens, cuts, _ = chat(tokenizer, messages, TOOLS)
        kept |= {tuple(tokens[:end]) for end, _ in cuts}
        last = cuts[-1][0]
        assert len(tokens) - last < 8  # but the header of the answer
        messages += turn
        following = chat(tokenizer, messages, TOOLS)[0]
        longest = max(len(k) for k in kept if tuple(following[: len(k)]) == k)
        if turn[-1]["role"] == "tool":
            assert longest == last
        assert longest >= cuts[0][0]
    # Thinking of this turn's earlier steps is in the prompt as it was written.
    assert "I add." in text(tokenizer, [*messages[:2], *turns[0]], TOOLS)
