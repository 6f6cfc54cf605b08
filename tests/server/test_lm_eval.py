"""The log-likelihoods that lm-eval (``local-completions``) reads, from what it sends."""

import mlx.core as mx
import pytest
from in_process import MODEL, SERVERS, serving

PAIRS = [  # a context and what may follow it
    ("def add(a, b):", "\n    return a + b\n"),
    ("def add(a, b):", "\n    return"),
    ("import numpy", " as np"),
    ("for i in range(10", "):\n"),
    ("# größer", " — 日本"),
    ("<|endoftext|>", "class Stack:\n    def __init__(self):"),  # as it scores whole texts
]


@pytest.fixture
def scored(mlx):
    """Each pair's tokens, how many are context, and mlx-lm's sum and whether all are likeliest."""
    rows, encode = [], mlx.tokenizer.encode
    for context, continuation in PAIRS:
        begun, tokens = encode(context), encode(context + continuation)
        logprobs = mlx.scores(tokens)[len(begun) - 1 :]
        follow = mx.array(tokens[len(begun) :])
        total = mx.take_along_axis(logprobs, follow[:, None], axis=-1).sum().item()
        greedy = mx.all(logprobs.argmax(-1) == follow).item()
        rows.append((context + continuation, tokens, len(begun), total, greedy))
    assert {row[-1] for row in rows} == {True, False}
    return rows


def read(choice, size):
    """The sum and whether all are likeliest, as lm-eval's ``parse_logprobs`` finds them."""
    own = choice["logprobs"]["token_logprobs"][size:-1]
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][size:-1]]
    return sum(own), own == best


@pytest.mark.parametrize("name", ["streamed", "lookup"])
def test_log_likelihoods(name, scored):
    fixed = {"model": MODEL.name, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    with serving(*SERVERS[name]) as server:

        def ask(prompt, max_tokens=1):
            body = {"prompt": prompt, "max_tokens": max_tokens, **fixed}
            status, answer = server.post("/completions", body)
            assert status == 200, answer
            return answer["choices"]

        ids = [row[1] for row in scored]
        # All at once as tokens, one by one as tokens and as text; twice, after caches were kept.
        ways = [ask(ids), *zip(*((ask([t])[0], ask(text)[0]) for text, t, *_ in scored)), ask(ids)]
        for choices in ways:
            for choice, (text, tokens, size, total, greedy) in zip(choices, scored, strict=True):
                assert len(choice["logprobs"]["token_logprobs"]) == len(tokens) + 1
                assert choice["text"].startswith(text)
                got, all_likeliest = read(choice, size)
                assert (got, all_likeliest) == (pytest.approx(total, abs=1e-3), greedy)
