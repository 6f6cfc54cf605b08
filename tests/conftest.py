"""The slow tier, and fixtures of several test files."""

import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from types import SimpleNamespace

import families
import hypothesis
import mlx.core as mx
import psutil
import pytest
from common import loaded, small
from faults import read_in_parts

from moelab import DATA, synthesize
from moelab.__main__ import main
from moelab.kernels import modules
from moelab.lab import limit
from moelab.streaming import build
from moelab.streaming.reading import reader
from moelab.system import Linux

# No test depends on how fast or busy a machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Most cases of these tests are slow. A number n keeps every n-th case in ``make test``; a pattern
# keeps the cases whose id it matches. A slow case repeats a property on more families, seeds or
# settings and is never the only test of something. Comments say why the kept cases are enough.
SLOW = {
    # Every family streams in test_family_streams; here every third is enough.
    "::test_lookahead_in_every_family": 3,
    "::test_every_family_gives_the_same_answer_packed": 3,
    # Mode fused stays for every family, the other modes for one family of each shape of experts.
    "::test_family_of_mlx_vlm": "fused|qwen4_exp|laguna|phixtral",
    # A refused family, a hybrid and a family with attention only stay.
    "::test_lookahead_in_mlx_vlm": "deepseek_v4|qwen3_5_moe]|olmoe",
    "::test_every_recurrent_family": 3,
    "::test_fewer_experts_per_token": 3,
    # Unquantized experts are read by the same threads and in the same parts.
    "::test_experts_as_if_large": "affine4",
    # The server with a draft ends in the same way.
    "::test_ctrl_c": r"-3\]",
    # Each GPU and each kind of weights stay, in every mode.
    "::test_every_part_of_a_call_takes_a_gpus_kernel_of_the_whole": "cuda-affine4|metal-plain",
    # Each prefetcher and each policy stays, with one number of slots.
    "::test_the_same_logits_and_counters_that_add_up": "-16-lru|lookahead-8-lfu|40-direct|8-sta",
    # Each mode and the prefetcher stay, with MLX's kernels.
    "::test_threads_in_turn_and_at_once": "small reads-.*-mlx|reader threads-fused-mlx",
    # One case of each way to read experts stays in ``make test``.
    "::test_an_interrupt_at_any_line": "small reads-{'policy'|reader threads-{}|slots-.*router",
    # Both drafts stay: one with a streamed model, one with a resident model (5 times as slow).
    "::test_greedy_text_at_every_block_size": "1-tiny-dflash-fused-fast|0-tiny-draft-resident-mlx",
    # The other draft differs in its weights only.
    "::test_acceptance": "dflash|mtp",
    # Each sixth case stays. The others try the same rule with other samplers.
    "::test_the_same_seed_writes_the_same_text": 6,
    # The policy stays: it varies the number of drafted tokens.
    "::test_the_prompt_cache_is_left_as_mlx_lm_leaves_it": "auto",
    # A hybrid, a Mamba and an attention model stay.
    "::test_greedy_tokens_are_the_targets": "qwen3_5_moe|jamba|gpt_oss",
    # Notebook 00 stays; nbmake sets the sliders of all notebooks from code.
    "::test_every_slider_changes_the_figure": "00_start_here",
    # Two ranks stay, in every mode; with more ranks than cores they wait for each other.
    "::test_ranks_give_the_bits_of_one": r"^2\]",
    # Ranks find the other differences in the same way, and an error ends a rank as a kill does.
    "::test_ranks_that_differ_or_end": "slots|shard|SIG|other",
}


def pytest_configure(config):
    """Handle Ctrl-C even if a shell started pytest in the background, where Ctrl-C is ignored.

    On a GPU, compute with the precision of a CPU.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests compare with float32. A GPU would compute in the checkpoint's type, or in 19 bits.
    build.auto_dtype = lambda: mx.float32
    os.environ.setdefault("MLX_ENABLE_TF32", "0")


@pytest.hookimpl(tryfirst=True)  # runs before -m "not slow" deselects tests
def pytest_collection_modifyitems(items):
    """Adds the marker ``slow`` to the cases of ``SLOW``'s tests that do not stay."""
    for test, stays in SLOW.items():
        cases = [item for item in items if item.nodeid.partition("[")[0].endswith(test)]
        for i, item in enumerate(cases):
            case = item.nodeid.partition("[")[2]
            if i % stays if isinstance(stays, int) else not re.search(stays, case):
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Exclude imported objects from garbage collection: tests of open files collect often."""
    gc.freeze()


@pytest.fixture(autouse=True)
def no_child_stays():
    """End the processes that a test started and left running, such as one that ran out of time."""
    started, start = [], subprocess.Popen.__init__

    def noted(self, *args, **kwargs):
        start(self, *args, **kwargs)
        started.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", noted)
        yield
    for process in started:
        if process.poll() is None:
            parent = psutil.Process(process.pid)
            for each in (*parent.children(recursive=True), parent):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


@pytest.fixture
def in_time():
    """End a test that waits for ever."""

    def late(*_):
        pytest.fail("it waits")  # not an OSError: a cache ignores an OSError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(capsys, monkeypatch):
    """A function that runs a command and returns status, stdout, stderr's last line, all output."""

    def run(*argv, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        try:
            code = main([str(a) for a in argv])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        last = ["", *err.strip().splitlines()][-1]
        return SimpleNamespace(code=code, out=out, err=last, said=out + err)

    return run


@pytest.fixture(scope="session")
def limits():
    """Skip a test where memory cannot be limited."""
    try:
        limit.run(["true"], 100 << 20)
    except limit.NoLimit as e:
        pytest.skip(str(e))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer of some 270 entries, so that these tests need nothing of data/."""
    from tokenizers import ByteLevelBPETokenizer

    out = tmp_path_factory.mktemp("tokenizer")
    ends = {"pad_token": "<|pad|>", "eos_token": "<|endoftext|>"}
    t = ByteLevelBPETokenizer()
    texts = ["def f(x): return x"] * 3
    t.train_from_iterator(texts, 300, show_progress=False, special_tokens=[*ends.values()])
    t.save(str(out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="session")
def random_tiny_moe(tmp_path_factory):
    """A random checkpoint with the shape and the tokenizer of tiny-moe."""
    tiny = DATA / "models" / "tiny-moe"
    config = json.loads((tiny / "config.json").read_text())
    del config["quantization"], config["quantization_config"]
    path = tmp_path_factory.mktemp("random") / "m"
    return synthesize.synthesize(path, config=config, tokenizer=tiny, progress=False)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory, tokenizer):
    """A random checkpoint of a small Qwen3.5-MoE."""
    return synthesize.synthesize(
        tmp_path_factory.mktemp("small") / "m", config=small(), tokenizer=tokenizer, progress=False
    )


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """A function that returns a family's random checkpoint, written once. No test changes it."""

    @cache
    def stored(name, variant="affine4"):
        return families.write_checkpoint(name, tmp_path_factory.mktemp(variant) / name, variant)

    return stored


@pytest.fixture(scope="session")
def moe(stored):
    """Two layers of attention and experts."""
    return stored("qwen3_moe")


@pytest.fixture(scope="session")
def hybrid(stored):
    """Two layers with experts: one is recurrent, one has attention."""
    return stored("qwen3_5_moe")


@pytest.fixture
def streamed(hybrid):
    """A random hybrid with four slots in each layer."""
    with loaded(hybrid, slots=4) as model:
        yield model


@pytest.fixture(params=["small reads", "reader threads"])
def any_reads(request, monkeypatch):
    """Run a test twice: the calling thread reads, then the reader's threads read in parts."""
    if request.param == "reader threads":
        read_in_parts(monkeypatch)
    else:
        monkeypatch.setattr(reader, "INLINE_NBYTES", 1 << 40)


@pytest.fixture
def small_matrices(monkeypatch):
    """Let the fast kernels compute unquantized matrices that are too small for them otherwise."""
    monkeypatch.setattr(modules, "FLOAT_WEIGHTS", 0)
    monkeypatch.setattr(modules, "HERE", Linux())
