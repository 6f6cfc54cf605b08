"""Text of tokens, its stop strings, reasoning and tool calls, without a model."""

from functools import cache, partial
from itertools import chain, pairwise

import pytest
from common import tries
from fake_served import wrapped
from hypothesis import assume, example, given
from hypothesis import strategies as st
from mlx_lm.chat_templates import muse_spark
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moelab.commands.server.ask import Part, Run, total
from moelab.commands.server.text import Splitter, Stops
from moelab.detokenizer import Detokenizer

PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}}
ADD = {"name": "add", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": ADD}]
GOOD = {  # a call of ``add`` with {"a": 1}, with its markers
    "function_gemma": "<start_function_call>call:add{a:1}<end_function_call>",
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "json_tools": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "minicpm5": '<function name="add"><param name="a">1</param></function>',
    "minimax_m2": '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter>'
    "</invoke></minimax:tool_call>",
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "muse_spark": '<atem:function_calls><atem:invoke name="add"><atem:parameter name="a">1'
    "</atem:parameter></atem:invoke></atem:function_calls>",
    "pythonic": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "qwen3_coder": "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
}


def cut(text, places):
    """Cut a text at ``places``; numbers beyond the text count again from its beginning."""
    places = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(places)]


def split(tokenizer, pieces, tools=TOOLS, state="normal", finish="stop", one=False):
    """Return a text's runs and finish reason; "made" replaces each id made by the splitter."""
    splitter = Splitter(tokenizer, tools, state, one)
    answer = total([*map(splitter.add, [*map(Part, pieces), Part(finish=finish)])])
    assert answer.text == "".join(pieces)
    runs = [r._replace(id="made") if r.id.startswith("call_") else r for r in answer.runs]
    return runs, answer.finish


def text_of(text):
    return [Run("content", text)], "stop"


def thought(text):
    return Run("reasoning", text)


# Few letters, so that stop strings are found, overlap, or are the beginning of others.
letters = st.text("aab é<\U0001f600", max_size=40) | st.text(max_size=30)
stops = st.lists(st.text("ab é<\U0001f600", min_size=1, max_size=5), max_size=5)
cuts = st.lists(st.integers(0, 1000), max_size=12)


@tries(1000)
@given(letters, stops, cuts)
@example("abcd", ["abcd", "bc"], [3])  # a stop that begins earlier may still come
@example("abcx", ["abcd", "bc"], [3])
def test_a_text_ends_before_the_first_stop_string(text, stops, places):
    """What cannot begin a stop string is sent at once."""
    begins = [text.find(stop) for stop in stops if stop in text]
    expected = text[: min(begins)] if begins else text
    ends, taken, sent = Stops(stops), "", ""
    for piece in cut(text, places):
        sent += ends.add(piece)
        assert expected.startswith(sent)  # no sent text is taken back
        taken += piece
        held = taken[len(sent) :]
        assert ends.found or not held or any(stop.startswith(held) for stop in stops)
    sent += ends.add("", last=True)
    assert (sent, bool(ends.found)) == (expected, bool(begins))


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<", "\n", "é"]
MARKERS += [*GOOD.values(), '{"name": "add"}', '{"name": 1}', "{}", "null", "if a <"]
texts = st.lists(st.sampled_from(MARKERS) | st.text("<>/{}a", max_size=4), max_size=12).map("".join)
states, finishes = st.sampled_from(["normal", "reasoning"]), st.sampled_from(["stop", "length"])


@tries(300)
@given(st.sampled_from([*GOOD]), texts, cuts, states, finishes, st.sampled_from([TOOLS, None]))
def test_any_cut_of_a_text_gives_the_same_answer(parser, text, places, state, finish, tools):
    tokenizer = wrapped(parser=parser)
    whole = split(tokenizer, [text], tools, state, finish)
    assert split(tokenizer, cut(text, places), tools, state, finish) == whole
    runs, ended = whole
    if any(run.kind == "call" for run in runs):
        assert tools and ended == ("tool_calls" if finish == "stop" else "length")
    else:  # only the markers of thinking are lost
        assert ended == finish
        sent, lost = "".join(run.text for run in runs), text
        for marker in ("<think>", "</think>"):
            sent, lost = sent.replace(marker, ""), lost.replace(marker, "")
        assert sorted(sent) == sorted(lost)


@pytest.mark.parametrize("parser", GOOD)
def test_a_call_in_each_format(parser):
    tokenizer, good = wrapped(parser=parser), GOOD[parser]
    call = Run("call", '{"a": 1}', "functions.add:0" if parser == "kimi_k2" else "made", "add")
    assert split(tokenizer, "so " + good) == ([Run("content", "so "), call], "tool_calls")
    runs, _ = split(tokenizer, "hm " + good, state="reasoning")
    assert runs == [thought("hm "), call]
    if parser == "json_tools":  # half a character
        runs, _ = split(tokenizer, good.replace("1", r'"\ud83dx"'))
        assert runs[0].text == '{"a": "\ufffdx"}'
    # A call is text if there are no tools, or if the token limit cut the call.
    assert split(tokenizer, "so " + good, None) == text_of("so " + good)
    assert split(tokenizer, good[:-1], finish="length")[0] == text_of(good[:-1])[0]
    # Tools of a form that the parser does not expect cause no error.
    for tools in ([{}], [{"function": {"name": "add", "parameters": 3}}]):
        runs, finish = split(tokenizer, [good], tools)
        assert finish == "tool_calls" or (runs, finish) == text_of(good)


def test_several_calls():
    """Each call has an id and arguments (maybe ``{}``); ``one`` keeps only the first call."""
    text = '[TOOL_CALLS][{"name": "f"}, {"name": "g", "arguments": {"x": "é"}, "id": "abc"}]'
    calls = [Run("call", "{}", "made", "f"), Run("call", '{"x": "é"}', "abc", "g")]
    assert split(wrapped(parser="mistral"), text) == (calls, "tool_calls")
    assert split(wrapped(parser="mistral"), text, one=True) == (calls[:1], "tool_calls")
    text = 2 * GOOD["json_tools"]
    runs = Splitter(wrapped(), TOOLS, "normal").add(Part(text, finish="stop")).runs
    assert len({run.id for run in runs}) == 2
    runs, _ = split(wrapped(), [text + "b"], one=True)
    assert [run.kind for run in runs] == ["call", "content"]


KIMI = "functions.add:0<|tool_call_argument_begin|>"
NO_CALLS = {
    "json_tools": [
        *("", "f", "{", "[]", "3", "null", "{}", '[{"name": "f"}, 3]'),
        *('{"name": 1, "arguments": {}}', '{"name": ""}', '{"arguments": {}}'),
        *('{"name": "f", "arguments": ' + a + "}" for a in ("[]", "false", '"{}"', '{"x": NaN}')),
        '{"name": "f", "arguments": {"x": ' + 100_000 * "[" + "}}",
    ],
    "qwen3_coder": ["<function=add><parameter=a>x</parameter></function>", "<function=add>"],
    "kimi_k2": [KIMI + "[1]", KIMI + '{"x": {1}}', KIMI + 90_000 * "-" + "1", "add"],
    "mistral": ["add[ARGS]{", '[{"name": 3}]', ""],
    "pythonic": ["[" + 90_000 * "-" + "add(a=1)]"],
    "minimax_m2": ["<invoke name=></invoke>"],
}


@pytest.mark.parametrize("parser", NO_CALLS)
def test_what_is_no_call_is_text(parser):
    tokenizer = wrapped(parser=parser)
    for inside in NO_CALLS[parser]:
        end = tokenizer.tool_call_end and tokenizer.tool_call_end + " and on"
        text = tokenizer.tool_call_start + inside + end
        assert split(tokenizer, [text]) == text_of(text), inside[:50]


def test_thinking_goes_on_after_what_is_no_call():
    tokenizer = wrapped()
    for text in ("I write <tool_call> for {}</tool_call> a tool", "the tag <tool_call>"):
        runs, _ = split(tokenizer, [text + "</think>Yes"], state="reasoning")
        assert runs == [thought(text), Run("content", "Yes")]


def test_messages_with_headers():
    tokenizer = wrapped(parser="muse_spark", response_format=muse_spark.RESPONSE_FORMAT)
    text = "to=self<|message|>I think<|eom|> assistant to=user<|message|>Hello<|eot|>"
    for tools in (TOOLS, None):
        runs, _ = split(tokenizer, [text], tools, "header")
        assert runs == [thought("I think"), Run("content", "Hello")]
    called = split(tokenizer, ["to=f" + GOOD["muse_spark"] + "<|eom|>"], TOOLS, "header")
    assert called == ([Run("call", '{"a": 1}', "made", "add")], "tool_calls")
    text = "<atem:function_calls></atem:function_calls>"
    assert split(tokenizer, ["to=f" + text], TOOLS, "header") == text_of(text)


# A text of tokens, one by one

BYTES = [f"<0x{byte:02X}>" for byte in " \né😀".encode()]  # of SentencePiece
PIECES = ["<s>", "▁", "▁▁▁▁", "▁▁\n", "▁def", "▁'ve", "▁n", "▁.", "don", "�", *"axé'tsnve.,"]
WORDS = ["<s>", "ve", "don", "don't", "##t", "##'", "##s", "##ve", "##re", *"axé'tsnmve.,!?"]
LEVEL = ["<s>", "ĠĠĠĠ", "Ġdef", "ĊĠ", "©ð", "Ãa", "Ġ.", *pre_tokenizers.ByteLevel.alphabet()]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
BPE = partial(models.BPE, merges=[], unk_token="<s>")
WORD_PIECE = partial(models.WordPiece, unk_token="<s>")


def level(space):
    return BPE, LEVEL, pre_tokenizers.ByteLevel(space), decoders.ByteLevel()


def spaced(scheme, steps=None):
    """SentencePiece, which puts a space before a text as ``scheme`` says."""
    steps = steps or [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    cut = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return BPE, PIECES + BYTES, cut, decoders.Sequence(steps)


def words(decoder):
    return WORD_PIECE, WORDS, pre_tokenizers.BertPreTokenizer(), decoder


KINDS = {
    "byte-level": level(False),
    "byte-level with a space": level(True),
    "space first": spaced("first"),
    "space always": spaced("always"),
    "space never": spaced("never"),
    "no byte tokens": (BPE, PIECES, pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "llama": spaced("first", [*LLAMA, decoders.Strip(" ", 1, 0)]),
    "gemma": spaced("never", LLAMA),
    "wordpiece": words(decoders.WordPiece(cleanup=False)),
    "wordpiece that cleans up": words(decoders.WordPiece()),
    "no decoder": words(None),
}


@cache
def made(kind, cleans=False):
    """A tokenizer with added and special tokens."""
    options = {"clean_up_tokenization_spaces": cleans}
    model, pieces, cut, decoder = KINDS[kind]
    tokenizer = Tokenizer(model({piece: i for i, piece in enumerate(pieces)}))
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoder
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **options)
    hf.add_tokens(["<think>", " two ", "é+", "ï"])
    return hf


CHARACTERS = ["é", "日", "😀", "\n", "    ", " 't", "don't", " ' ' ' "]


@tries(500)
@given(st.sampled_from([*KINDS]), st.booleans(), st.data())
def test_a_text_is_what_decoding_gives_after_its_prompt(kind, cleans, data):
    """Only half a character, or text that clean-up may change, waits for more tokens."""
    hf = made(kind, cleans)
    names = hf.convert_ids_to_tokens([*range(400)])
    # Byte tokens form whole characters here; the next test has incomplete characters.
    pieces = st.sampled_from([[i] for i, p in enumerate(names) if p not in (None, *BYTES)])
    pieces |= st.sampled_from([hf.encode(c, add_special_tokens=False) for c in CHARACTERS])
    tokens = st.lists(pieces, max_size=12).map(lambda lists: [*chain(*lists)])
    prompt, text = data.draw(tokens.filter(len)), data.draw(tokens)
    ours = Detokenizer(hf)
    before = hf.decode(prompt).removesuffix("\ufffd" if ours.begin(prompt) else "")
    whole, told = hf.decode(prompt + text), before
    assume(whole.startswith(before))  # else clean-up changes the prompt's text
    for i, token in enumerate(text, 1):
        ours.add_token(token)
        told += ours.last_segment
        held = hf.decode(prompt + text[:i]).removeprefix(told)
        assert {*held} <= {"\ufffd", *(" 'nvr" if cleans else "")}
    ours.finalize()
    assert told + ours.last_segment == whole == before + ours.text


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_characters_of_byte_tokens_that_do_not_end(kind):
    """Characters before an incomplete one stay, as in mlx-lm; unknown ids give no text."""
    hf = made(kind)
    ours, theirs = Detokenizer(hf), SPMStreamingDetokenizer(hf, trim_space=False)
    for token in hf.convert_tokens_to_ids(["a", "<0x0A>", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>"]):
        for detokenizer in (ours, theirs):
            detokenizer.add_token(token)
        assert ours.text == theirs.text
    ours.add_token(len(hf) + 3)
    for detokenizer in (ours, theirs):
        detokenizer.finalize()
    assert ours.text == theirs.text == "a\né\ufffd"
