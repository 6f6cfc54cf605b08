"""Experts that are computed in the page cache: the same bits, and read where they are not there."""

import os

import families
import numpy as np
import pytest
from families import K
from greedy import greedy_logits
from needs import needs_kernels

from moelab import StreamConfig, kernels, stats
from moelab.kernels import modules
from moelab.lab.oscache import cached_nbytes, drop_pages, write_back
from moelab.repack import repack
from moelab.streaming.model import load_model
from moelab.streaming.reading.file import ReadError
from moelab.streaming.residency import pages
from moelab.streaming.session import session_of

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(os.name != "posix" or os.uname().sysname != "Linux", reason="Linux"),
]
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture
def small_experts(monkeypatch):
    monkeypatch.setattr(pages, "LEAST_NBYTES", 0)


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    monkeypatch.setattr(modules, "FLOAT_WEIGHTS", 0)


@pytest.fixture(params=("affine4", "mxfp4", "plain32", "packed"))
def path(request, tmp_path):
    packed = request.param == "packed"
    path = tmp_path / "model"
    families.write_checkpoint("qwen3_5_moe", path, "affine4" if packed else request.param)
    if packed:
        repack(path, tmp_path / "packed")
        path = tmp_path / "packed"
    for file in path.glob("*.safetensors"):
        file.read_bytes()  # into the page cache
    return path


def run(path, **config):
    model, _ = load_model(path, StreamConfig(**{"slots": K, "kernels": "fast", **config}))
    with model:
        stats(model, reset=True)
        logits = greedy_logits(model, PROMPT, 6)
        return logits, stats(model)


@pytest.mark.parametrize("mode", ("stacked", "fused"))
def test_the_same_bits_without_a_read(path, mode, small_experts):
    want, with_copies = run(path, mode=mode, zero_copy=False)
    got, without = run(path, mode=mode)
    assert np.array_equal(got, want)
    assert with_copies.decode.in_pages == 0 < with_copies.decode.bytes_read
    for counters in (without.prefill, without.decode):
        assert counters.in_pages > 0 == counters.bytes_read == counters.misses
        assert counters.hit_rate == 0


def test_what_the_page_cache_lacks_is_read_into_slots(path, small_experts, monkeypatch):
    want, _ = run(path, zero_copy=False)
    held = pages.Pages.held

    def even(self, experts):
        return held(self, [e for e in experts if e % 2 == 0])

    monkeypatch.setattr(pages.Pages, "held", even)
    got, mixed = run(path)
    assert np.array_equal(got, want)
    assert mixed.decode.in_pages > 0 and mixed.decode.hits + mixed.decode.misses > 0


def test_small_experts_and_files_of_others_are_copied(path, monkeypatch):
    assert run(path)[1].decode.in_pages == 0
    monkeypatch.setattr(pages, "LEAST_NBYTES", 0)
    monkeypatch.setattr(pages.os, "geteuid", lambda: os.getuid() + 1)
    assert run(path)[1].decode.in_pages == 0


def test_reads_past_the_page_cache_leave_it_alone(path, small_experts):
    model, _ = load_model(path, StreamConfig(slots=K, kernels="fast"))
    with model:
        session_of(model).reader.direct = True
        greedy_logits(model, PROMPT, 3)
        assert stats(model).decode.in_pages == 0


def test_a_mapped_file_can_be_dropped_from_the_page_cache(path, small_experts):
    write_back(path)
    with load_model(path, StreamConfig(slots=K, kernels="fast"))[0] as model:
        greedy_logits(model, PROMPT, 3)
        experts = session_of(model).residency.layers[0].bank.pages
        if not cached_nbytes(path):
            pytest.skip("this file system does not say what is cached")
        assert experts.held([1, 0]) == [1, 0]
        drop_pages(path)
        assert not cached_nbytes(path) and not experts.held([0])
        stats(model, reset=True)
        greedy_logits(model, PROMPT, 3)
        assert stats(model).prefill.misses


def test_lookahead_and_pages(path, small_experts):
    want, _ = run(path, zero_copy=False)
    got, _ = run(path, prefetch="lookahead")
    assert np.array_equal(got, want)


def test_a_file_that_changed_is_not_computed(path, small_experts):
    with load_model(path, StreamConfig(slots=K, kernels="fast"))[0] as model:
        greedy_logits(model, PROMPT, 2)
        for file in path.glob("*.safetensors"):
            os.utime(file)
        with pytest.raises(ReadError, match="changed while it was streamed"):
            greedy_logits(model, PROMPT, 2)


def test_every_text_of_a_batch_is_asked_for_ahead(path):
    """A look-ahead guesses for all tokens of a call, not for the first alone."""
    model, _ = load_model(path, StreamConfig(slots=8, kernels="fast", prefetch="lookahead"))
    with model:
        prefetcher = session_of(model).prefetcher
        block = next(m for m in model.modules() if hasattr(m, "route"))
        x = kernels.Rows(np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32))
        layer, routed = prefetcher.guess(0, prefetcher.ask(0, x))
        assert layer == 1 and routed.shape == block.route(x).shape == (3, K)
