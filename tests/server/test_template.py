"""Messages become tokens: what templates get, what is refused, where prompts part."""

import pytest
from fake_served import wrapped
from in_process import user
from mlx_lm.chat_templates import muse_spark

from moelab.commands.server.ask import Refused
from moelab.commands.server.completions import CHAT
from moelab.commands.server.template import chat_tokens

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
# Like Qwen3's: tools first, calls as JSON, thinking only after the last user's message.
THINKING = """
{%- set system = messages[0].content if messages[0].role == 'system' %}
{%- if tools or system %}<|im_start|>system
{{ system }}{{ tools | tojson if tools }}<|im_end|>
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


def chat(tokenizer, messages, tools=None, has_states=True, **given):
    messages = CHAT.check({"messages": messages}).messages
    return chat_tokens(tokenizer, messages, tools, given, has_states)


def text(tokenizer, *args, **kwargs):
    return tokenizer.decode(chat(tokenizer, *args, **kwargs)[0])


def refused(*args, **kwargs):
    """The field that the refusal names, and its words."""
    with pytest.raises(Refused) as error:
        chat(*args, **kwargs)
    assert len(str(error.value)) < 500
    return error.value.param, str(error.value)


def function(arguments):
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


AB = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
EMPTY, BEGUN = "<|im_start|>assistant\n<|im_end|>\n", "<|im_start|>assistant\n"
SILENT, SAID = {"role": "assistant"}, {"role": "assistant", "content": "Once "}
NONE, SHOWN = SILENT | {"content": None}, {"role": "tool", "content": [AB[0], IMAGE]}
RULE = [user(AB), SILENT, {"role": "developer", "content": "Be short"}]
READ = [  # a template, messages, and the end of what the model reads
    (PLAIN, [user(AB), NONE, SILENT], f"user\nab<|im_end|>\n{2 * EMPTY}{BEGUN}"),
    (PLAIN, RULE, f"<|im_start|>system\nBe short<|im_end|>\n{BEGUN}"),
    (PLAIN + "{# developer #}", RULE, f"<|im_start|>developer\nBe short<|im_end|>\n{BEGUN}"),
    (None, RULE, "USER: ab\nASSISTANT: \nASSISTANT's RULE: Be short\nASSISTANT:"),
    # The model continues an assistant's last message (with its last blanks) if it has no call.
    (PLAIN, [user("a"), SAID], "assistant\nOnce "),
    (None, [user("a"), SAID], "USER: a\nASSISTANT: Once "),
    (PLAIN, [user("a"), SAID | {"tool_calls": [function("{}")]}], f"Once <|im_end|>\n{BEGUN}"),
    # A text replaces an image in a tool's result; other images are refused.
    (PLAIN, [SHOWN], f"a(an image was left out)<|im_end|>\n{BEGUN}"),
    ("{{ a }}{{ messages[0].content }}", [user("x")], "1x"),
]


@pytest.mark.parametrize("template, messages, end", READ)
def test_what_the_model_reads(template, messages, end):
    """Content becomes text, and the template gets its arguments."""
    parser = None if template is None else "json_tools"
    read = text(wrapped(template, parser=parser), messages, a=1)
    assert read.endswith(end)


def test_calls_reach_the_template_as_objects():
    calls = [*map(function, ('{"a": 1}', "", None, "{}", {}))]
    messages = [user("a"), {"role": "assistant", "content": None, "tool_calls": calls}]
    got = text(wrapped(THINKING), messages, TOOLS)
    assert got.count('"arguments": {}') == 4 and '{"name": "add", "arguments": {"a": 1}}' in got
    wrong = map(function, ("{", "[1]", "3", "null", 3, [1], "[" * 100_000))
    for call in ({}, {"function": None}, 3, *wrong):
        messages = [user("a"), {"role": "assistant", "tool_calls": [call]}]
        param, words = refused(wrapped(THINKING), messages)
        assert param == "messages" and words.startswith("messages.1.tool_calls.0")
    assert refused(wrapped(PLAIN, parser=None), [user("a")], TOOLS)[0] == "tools"


def test_a_template_that_fails_is_refused():
    endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    wrong = ("{{ raise_exception('no') }}", "{{ messages[9].content.x }}", "{% for", "{{ 1 // 0 }}")
    for template in (*wrong, endless):
        param, words = refused(wrapped(template), [user("a")])
        assert param == "messages" and "chat template" in words


def test_a_template_whose_probes_fail_still_works():
    strict = "{% if not add_generation_prompt or messages[-1].content == '' %}"
    strict += "{{ raise_exception('no') }}{% endif %}" + PLAIN
    tokens, cuts, _ = chat(wrapped(strict), [{"role": "system", "content": "s"}, user("a")])
    assert cuts == [(len(tokens) - 1, "user")]


def test_the_state_after_the_prompt():
    tokenizer = wrapped(THINKING)
    tokens, cuts, state = chat(tokenizer, [user("a"), SAID])
    assert state == "normal" and cuts[-1][0] == len(tokens) - 1
    assert chat(wrapped(None, parser=None), RULE)[1:] == ([], "normal")
    # Words in a message neither open nor end a thought.
    for word in ("a", "what is <think>?", "</think>", "</think><think>"):
        for has_states in (True, False):
            given = {"messages": [user(word)], "has_states": has_states}
            assert chat(tokenizer, **given)[2] == "reasoning"
            assert chat(tokenizer, **given, enable_thinking=False)[2] == "normal"
    # A template may open a thought or a header for the answer.
    assert chat(wrapped("{{ messages[0].content }}<think>"), [user("a")])[2] == "reasoning"
    muse = wrapped(PLAIN, response_format=muse_spark.RESPONSE_FORMAT)
    assert chat(muse, [user("a")])[2] == "header"


def test_prompts_part_after_the_system_and_after_the_last_message():
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
        assert chat(tokenizer, messages, tools, has_states=False) == (tokens, [], "reasoning")
    assert [kind for _, kind in chat(tokenizer, [user("Hello")])[1]] == ["user"]


def test_an_agents_next_prompt_begins_with_what_was_kept():
    """A template may leave out or add a turn's thinking; the prompt then differs from the text."""
    tokenizer = wrapped(THINKING)
    messages = [{"role": "system", "content": "Use tools."}, user("1 + 1?")]
    call = {"role": "assistant", "content": None, "tool_calls": [function('{"a": 1}')]}
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
        assert len(tokens) - last < 8  # only the answer's header is not kept
        messages += turn
        following = chat(tokenizer, messages, TOOLS)[0]
        longest = max(len(k) for k in kept if tuple(following[: len(k)]) == k)
        if turn[-1]["role"] == "tool":
            assert longest == last
        assert longest >= cuts[0][0]
    # The prompt has the thinking of this turn's earlier steps as it was written.
    assert "I add." in text(tokenizer, [*messages[:2], *turns[0]], TOOLS)
