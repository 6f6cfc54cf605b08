"""The slow tier, and fixtures of several test files.

``make test`` leaves out what ``SLOW`` names; ``make test-all`` runs it too. Slow is what repeats a
property on more families, seeds or settings, never the only test of something.
"""

import json
import re
import signal
from dataclasses import dataclass

import pytest
from small import small

from moelab import synthesize


@dataclass(frozen=True)
class Slow:
    """A test whose cases run in ``make test-all`` only, but for some."""

    test: str  # the end of its node id, without the case
    why: str  # why the rest is enough for ``make test``
    keep: str = ""  # what ``re.search`` finds in the cases that stay in ``make test``
    every: int = 0  # instead of keep: every n-th case stays, from the first on


FAMILIES = "every family streams in test_family_streams; here one of three is enough"
SLOW = (
    Slow(
        "::test_the_same_logits_and_counters_that_add_up",
        "each prefetcher and each policy stays, with one number of slots",
        keep="-16-lru|lookahead-8-lfu",
    ),
    Slow(
        "::test_threads_in_turn_and_at_once",
        "each mode and the prefetcher stay, with MLX's kernels",
        keep="small reads-.*-mlx|reader threads-fused-mlx",
    ),
    Slow(
        "::test_an_interrupt_at_any_line",
        "one setting of each way to read stays",
        keep="small reads-{'policy'|reader threads-{}",
    ),
    Slow(
        "::test_greedy_text_at_every_block_size",
        "each draft stays, one resident and one streamed",
        keep="1-tiny-dflash-fused|0-tiny-draft-resident",
    ),
    Slow(
        "::test_acceptance_and_the_targets_own_text",
        "the other draft differs in its weights only",
        keep="dflash",
    ),
    Slow(
        "::test_sampled_pairs_have_the_targets_distribution",
        "20,000 samples tell finer differences than the 3,000 that stay",
        keep="-3000",
    ),
    Slow(
        "::test_the_same_seed_writes_the_same_text",
        "other samplers by the same rule",
        every=3,
    ),
    Slow(
        "::test_the_prompt_cache_is_left_as_mlx_lm_leaves_it",
        "a fixed number of drafts and the policy stay",
        keep=r"^3\]|auto",
    ),
    Slow(
        "::test_greedy_tokens_are_the_targets",
        "a hybrid, a Mamba and an attention model stay",
        keep="qwen3_5_moe|jamba|gpt_oss",
    ),
    Slow(
        "::test_a_small_file_that_unpacks_to_gigabytes",
        "other files of strangers stay: test_a_strangers_trace_is_refused",
    ),
    Slow(
        "::test_every_slider_changes_the_figure",
        "notebook 00 stays; nbmake sets the sliders of all notebooks from code",
        keep="00_start_here",
    ),
    Slow(
        "::test_a_server_of_large_experts_is_not_killed",
        "tiny-moe's server is asked as many things at once under a limit",
    ),
    *(
        Slow(
            f"test_serve.py::test_{name}",
            "a server without a draft and one with stay; every draft's server writes a text",
            keep="streamed|tiny-draft",
        )
        for name in ("eight_at_once", "a_shared_prefix_is_read_once", "a_seed_writes_the_text")
    ),
    Slow(
        "test_serve.py::test_a_bad_field",
        "with a draft the same methods refuse",
        keep="streamed",
    ),
    Slow(
        "::test_ranks_give_the_bits_of_one",
        "two ranks stay, in every mode; with more ranks than cores they wait for each other",
        keep=r"^2\]",
    ),
    Slow(
        "::test_ranks_that_differ", "other differences, found in the same way", keep="slots|shard"
    ),
    Slow("::test_a_rank_that_ends_in_an_answer", "an error ends a rank as a kill does", keep="SIG"),
    Slow("::test_lookahead_in_every_family", FAMILIES, every=3),
    Slow("::test_every_family_gives_the_same_answer_packed", FAMILIES, every=3),
    Slow("::test_every_recurrent_family", FAMILIES, every=3),
    Slow("::test_fewer_experts_per_token", FAMILIES, every=3),
)


def pytest_configure(config):
    """Started in the background, Python ignores Ctrl-C, and so would the programs under test."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" deselects
def pytest_collection_modifyitems(items):
    """Adds the marker ``slow`` to what ``SLOW`` names."""
    for slow in SLOW:
        cases = [item for item in items if item.nodeid.partition("[")[0].endswith(slow.test)]
        for i, case in enumerate(cases):
            kept = slow.keep and re.search(slow.keep, case.nodeid.partition("[")[2])
            if not kept and not (slow.every and i % slow.every == 0):
                case.add_marker(pytest.mark.slow(reason=slow.why))


@pytest.fixture
def in_time():
    """End a test that waits for ever."""

    def late(*_):
        pytest.fail("it waits")  # no OSError, which a cache would pass over

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


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
def random_tiny_moe(tmp_path_factory):
    """A random checkpoint with the shape and the tokenizer of tiny-moe."""
    import tiny_moe

    path = tmp_path_factory.mktemp("random")
    tiny_moe.random_model(path)
    return path


@pytest.fixture
def streamed(tmp_path):
    """A random hybrid with four slots in each layer."""
    import families

    from moelab import StreamConfig
    from moelab.streaming.model import load_model

    path = families.write_checkpoint("qwen3_5_moe", tmp_path / "m", "affine4")
    model, _ = load_model(path, StreamConfig(slots=4))
    with model:
        yield model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory, tokenizer):
    """A random checkpoint of a small Qwen3.5-MoE."""
    return synthesize.synthesize(
        tmp_path_factory.mktemp("small") / "m", config=small(), tokenizer=tokenizer, progress=False
    )
