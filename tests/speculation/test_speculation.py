"""Speculative generation gives the target's own text with any draft, and mlx-lm's caches."""

import copy

import mlx.core as mx
import mlx_lm
import pytest
from common import FAST, TINY_MOE, loaded
from drafting import PROMPT, Guess, V, build, difference, ids, plain, repeat, steps, told, trained
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

import moelab
from moelab.speculation.drafts import LookupDraft, ModelDraft
from moelab.speculation.generate import speculative_generate, speculative_generate_step

# These arguments are refused. max_tokens=-1 is not: mlx-lm documents it as no limit.
NUMBERS = {"num_draft_tokens": (-1, 1.5, "many"), "max_tokens": (-2, 2.5, None)}
NUMBERS |= {"prefill_step_size": (0, "8")}
HYBRIDS = ["qwen3_5_moe", "qwen3_next", "nemotron_h", "jamba", "gpt_oss", "qwen3_moe", "mamba"]


@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_tokens_are_the_targets(name):
    model, other = build(name), build("qwen3_moe")
    expected = plain(model, PROMPT)
    drafts = [ModelDraft(model), ModelDraft(other), Guess(repeat), LookupDraft()]
    drafts += [Guess(told(PROMPT + expected)), Guess(lambda *_: [])]
    for n in (0, 1, 2, 4, 7, 15) if FAST else range(0, 17):
        for draft in drafts if n in (1, 4, 15) else drafts[n % len(drafts) :][:1]:
            got = steps(model, PROMPT, draft, n)
            assert [t for t, *_ in got] == expected, (n, type(draft))
            rounds = list(dict.fromkeys(r for *_, r in got))
            assert [r.number for r in rounds] == list(range(len(rounds)))
            assert all(0 <= r.accepted <= r.drafted <= n for r in rounds)
            assert sum(d for _, _, d, _ in got) <= sum(r.accepted for r in rounds)
            if draft is drafts[0]:
                assert all(r.accepted == r.drafted for r in rounds), "a model agrees with itself"


@pytest.mark.parametrize(
    "sampling, processing",
    [
        (dict(temp=1.0), {}),
        (dict(temp=0.7, top_p=0.9, min_p=0.01, top_k=50), {}),
        (dict(temp=1.0, xtc_probability=0.5, xtc_threshold=0.05), {}),
        ({}, dict(repetition_penalty=1.5, logit_bias={3: 2.0})),
        (dict(temp=1.0), dict(presence_penalty=1.0, frequency_penalty=0.5)),
    ],
)
def test_the_same_seed_writes_the_same_text(sampling, processing):
    """With any sampler and processors the text is what mlx-lm writes without a draft."""

    def chosen(seed, write, *args):
        mx.random.seed(seed)
        sampler = make_sampler(**sampling) if sampling else None
        processors = make_logits_processors(**processing)
        return write(model, PROMPT, *args, sampler=sampler, logits_processors=processors)

    model, other = build("qwen3_5_moe"), build("qwen3_moe")
    for seed in range(2):
        expected = chosen(seed, plain)
        drafts = ModelDraft(model), ModelDraft(other), Guess(repeat), Guess(told(PROMPT + expected))
        for draft in drafts:
            for n in (0, 1, 6):
                got = chosen(seed, steps, draft, n)
                assert [t for t, *_ in got] == expected
                # The same distribution and random numbers give the same choice.
                assert draft is not drafts[0] or all(r.accepted == r.drafted for *_, r in got)


def test_stop_tokens_inside_a_block():
    model, tokenizer = trained(), load_tokenizer(TINY_MOE)
    prompt = "import numpy as np\n\ndef softmax(x, axis=-1):"
    expected = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=20)]
    for i in (2, 5, 6):
        wrapper = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[expected[i]])
        cache, other = make_prompt_cache(model), make_prompt_cache(model)
        given = model, wrapper, prompt
        reference = [*mlx_lm.stream_generate(*given, max_tokens=20, prompt_cache=other)]
        options = dict(max_tokens=20, num_draft_tokens=5, prompt_cache=cache)
        got = [*speculative_generate(*given, ModelDraft(model), **options)]
        assert [r.token for r in got] == [r.token for r in reference]
        assert got[-1].finish_reason == "stop"
        assert "".join(r.text for r in got) == "".join(r.text for r in reference)
        assert difference(cache, other) <= 1e-5


@pytest.mark.parametrize("n", [0, 1, 3, 8, "auto"])
def test_the_prompt_cache_is_left_as_mlx_lm_leaves_it(n):
    """A limit or the caller stops a text after any token; target and draft reuse the caches."""
    model = build("qwen3_5_moe")
    expected = plain(model, PROMPT, 30)
    for stop in range(1, 14):
        for by_limit in (True, False):
            reference = make_prompt_cache(model)
            model(mx.array([PROMPT + expected[:stop]]), cache=reference)
            draft = ModelDraft(model) if stop % 2 else Guess(told(PROMPT + expected))
            cache = make_prompt_cache(model) + draft.make_cache()
            options = dict(num_draft_tokens=n, max_tokens=stop if by_limit else -1)
            options |= dict(prompt_cache=cache)
            generator = speculative_generate_step(mx.array(PROMPT), model, draft, **options)
            assert [next(generator)[0] for _ in range(stop)] == expected[:stop]
            if by_limit:
                assert next(generator, None) is None
            else:
                generator.close()
            own = len(make_prompt_cache(model))
            assert difference(cache[:own], reference) <= 1e-5
            if cache[own:]:
                assert difference(cache[own:], reference) <= 1e-5, "this draft is the same model"
            again = [9, 4]
            model_alone = plain(model, again, 12, prompt_cache=copy.deepcopy(reference))
            if isinstance(draft, Guess):
                draft = Guess(repeat)
            got = steps(model, again, draft, n, 12, prompt_cache=cache)
            assert [t for t, *_ in got] == model_alone
            if n in (1, 3, 8) and isinstance(draft, ModelDraft):
                assert all(r.accepted == r.drafted for *_, r in got), "its context is complete"


def test_no_pass_reads_past_where_a_cache_is_quantized():
    """With 2 bits the probabilities show whether a token was read with a quantized cache."""
    model = build("qwen3_5_moe", head_dim=32)  # the smallest group that can be quantized
    kwargs = dict(kv_bits=2, kv_group_size=32, quantized_kv_start=15, max_tokens=20)
    expected = list(generate_step(mx.array(PROMPT), model, **kwargs))
    text = PROMPT + [t for t, _ in expected]
    draft = Guess(lambda tokens, n, choose: text[len(tokens) :][:n])
    got = steps(model, PROMPT, draft, 6, **kwargs)
    assert [t for t, *_ in got] == text[len(PROMPT) :]
    for (_, logprobs, *_), (_, wanted) in zip(got, expected):
        assert mx.allclose(logprobs, wanted, atol=1e-4)
    assert max(round.drafted for *_, round in got) == 6


def test_long_prompts_go_in_parts():
    model = build("qwen3_5_moe")
    prompt = ids(3, 1200)[0].tolist()
    expected = plain(model, prompt, 10)
    for step in (7, 512, 5000):
        got = steps(model, prompt, ModelDraft(model), 4, 10, prefill_step_size=step)
        assert [t for t, *_ in got] == expected


def test_a_lookup_proposes_half_of_what_matched():
    draft = LookupDraft()
    draft.bind(None)
    draft.extend(mx.array([*range(20), 99, *range(50, 54), 98, *range(10)]), None)
    assert draft.propose(10, 16, None).tolist() == [11, 12, 13, 14, 15]  # 0 to 10 match
    assert draft.propose(10, 3, None).tolist() == [11, 12, 13]
    assert draft.propose(53, 3, None).tolist() == draft.propose(10, 0, None).tolist() == []
    draft.extend(mx.array([10, 50, 51, 52]), None)
    assert draft.propose(53, 8, None).tolist() == [98, 0]  # only four match
    draft.extend(mx.array([53, 97, 51, 52]), None)
    assert draft.propose(53, 8, None).tolist() == []  # only three match
    # A kept cache holds the tokens that were read, without those that were taken back.
    draft = LookupDraft()
    (cache,) = draft.make_cache()
    draft.bind(None, [cache])
    draft.extend(mx.array([*range(20), 90, 91]))
    draft.propose(0, 0, None)
    assert cache.trim(2) == 2 and cache.nbytes == 8 * 20
    draft.bind(None, [copy.deepcopy(cache)])
    draft.extend(mx.array([2, 3, 4, 5, 6, 7]))
    assert draft.propose(8, 9, None).tolist() == [9, 10, 11]
    draft.bind(None)
    draft.extend(mx.array([2, 3, 4, 5, 6, 7]))
    assert draft.propose(8, 9, None).tolist() == []


def test_a_draft_serves_one_generation_at_a_time():
    model, draft = build("qwen3_5_moe"), Guess(repeat)
    expected = plain(model, PROMPT)

    def begin():
        return speculative_generate_step(mx.array(PROMPT), model, draft, num_draft_tokens=2)

    first, second = begin(), begin()
    assert next(first)[0] == next(second)[0] == expected[0]
    with pytest.raises(ValueError, match="another generation has begun with this draft"):
        list(first)
    assert [t for t, *_ in [next(second) for _ in range(10)]] == expected[1:11]


@pytest.mark.parametrize("bad", [V, 2**31, 2**32 - 1])
def test_guesses_that_are_no_tokens_are_dropped(bad):
    """Guesses count up to the first that is outside the vocabulary; the text is the target's."""
    model = build("qwen3_5_moe")
    expected = plain(model, PROMPT)
    for good in range(3):

        def guess(tokens, n, choose, good=good):
            following = (PROMPT + expected)[len(tokens) :]
            return [*following[:good], bad, *following[good + 1 : n]]

        got = steps(model, PROMPT, Guess(guess), 4)
        assert [t for t, *_ in got] == expected
        assert max(r.drafted for *_, r in got) == good


def test_a_draft_that_fails_leaves_the_target_whole():
    model, cache = build("qwen3_5_moe"), make_prompt_cache(build("qwen3_5_moe"))
    calls = []

    def guess(tokens, n, choose):
        calls.append(tokens)
        if len(calls) == 3:
            raise RuntimeError("the draft failed")
        return repeat(tokens, n, choose)

    kinds = [type(m) for _, m in model.named_modules()]
    with pytest.raises(RuntimeError, match="the draft failed"):
        steps(model, PROMPT, Guess(guess), 4, prompt_cache=cache)
    reference = make_prompt_cache(model)
    model(mx.array([calls[-1][:-1]]), cache=reference)
    assert difference(cache, reference) <= 1e-5
    assert kinds == [type(m) for _, m in model.named_modules()]


def test_bad_input():
    model, small, window = trained(), build("qwen3_5_moe"), build("qwen3_moe")
    for words, draft, options in (
        (f"vocabulary of 8192 tokens, got {V}. Draft and target must", ModelDraft(small), {}),
        ("tokens must be non-zero", ModelDraft(model), dict(max_tokens=0)),
        (r"LookupDraft\(\), .* got 'lookup'", "lookup", {}),
        *(
            (f"{name}: expected .* got {value!r}", ModelDraft(model), {name: value})
            for name, values in NUMBERS.items()
            for value in values
        ),
    ):
        with pytest.raises(ValueError, match=words):
            next(speculative_generate(model, load_tokenizer(TINY_MOE), "x", draft, **options))
    for words, target, prompt, cache in (
        ("prompt: expected at least one token, got none", small, [], None),
        ("expected 2 caches for the target, then .*got 1", small, PROMPT, small.make_cache()[:1]),
        ("0 tokens cannot be rolled back.* without a draft", build("deepseek_v41"), PROMPT, None),
        ("keep=4", window, PROMPT, make_prompt_cache(window, max_kv_size=16)),
    ):
        with pytest.raises(ValueError, match=words):
            steps(target, prompt, Guess(repeat), prompt_cache=cache)


def test_streamed_counters_are_consistent(hybrid):
    expected = plain(loaded(hybrid, mode="resident"), PROMPT)
    with loaded(hybrid, mode="fused", slots=4) as model:
        got = steps(model, PROMPT, Guess(repeat), 4)
        assert [t for t, *_ in got] == expected
        counted = moelab.stats(model)
        drafted = [r.drafted for r in {r.number: r for *_, r in got}.values()]
        # A round reads the last token and its drafts; all prompt tokens but one are read before.
        read = len(PROMPT) - 1 + sum(1 + n for n in drafted)
        assert counted.prefill.tokens + counted.decode.tokens == read
