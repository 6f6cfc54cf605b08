"""Fixtures of several test files."""

import json

import pytest
from small import small

from moelab import synthesize


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer of some 270 entries, so that these tests need nothing of data/."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    out = tmp_path_factory.mktemp("tokenizer")
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(
        ["def f(x): return x"] * 3,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|pad|>", "<|endoftext|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    t.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|endoftext|>",
                "pad_token": "<|pad|>",
            }
        )
    )
    return out


@pytest.fixture(scope="session")
def model_path(tmp_path_factory, tokenizer):
    """A random checkpoint of a small Qwen3.5-MoE."""
    return synthesize.synthesize(
        tmp_path_factory.mktemp("small") / "m", config=small(), tokenizer=tokenizer, progress=False
    )
