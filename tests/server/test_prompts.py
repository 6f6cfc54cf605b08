"""Kept prompts: what a new prompt finds among them, and which ones are forgotten."""

import argparse
import re

import drafting
import families
import mlx.core as mx
import pytest
from common import TINY_MOE
from mlx.utils import tree_map
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from moelab import DATA, StreamConfig
from moelab.commands import kv_cache
from moelab.commands.drafting import open_draft
from moelab.commands.kv_cache import PromptFiles
from moelab.commands.server import prompts as module
from moelab.commands.server.prompts import Prompts
from moelab.speculation.generate import speculative_generate_step

TEXT = drafting.ids(0, 60, vocab=families.VOCAB - 4)[0].tolist()


@pytest.fixture(scope="module", params=["hybrid", "attention"])
def model(request):
    """The states of tiny-moe cannot be trimmed; the caches of an attention-only model can."""
    return drafting.trained() if request.param == "hybrid" else families.build("qwen3_moe")[0]


def read(model, tokens, cache=None):
    """Return the caches after tokens, and the logits after the last token."""
    cache = cache or make_prompt_cache(model)
    logits = model(mx.array([tokens]), cache=cache)[0, -1]
    mx.eval(logits, [c.state for c in cache])
    return cache, logits


def is_hybrid(model):
    return not all(c.is_trimmable() for c in make_prompt_cache(model))


def test_what_a_prompt_finds(model):
    """A prompt that goes on from kept caches gives the logits of a prompt that is read whole."""
    prompts = Prompts()
    assert prompts.fetch(TEXT) == (None, 0) == prompts.fetch([]) == prompts.fetch(TEXT[:1])
    cache, _ = read(model, TEXT[:40])
    prompts.keep(TEXT[:40], cache, "user")
    read(model, TEXT[50:], cache)  # this changes the cache, but not the copy that was kept
    other = TEXT[:30] + [t + 1 for t in TEXT[30:59]]
    cut = 0 if is_hybrid(model) else 30  # a hybrid's cache cannot be trimmed
    begin = 0 if is_hybrid(model) else 38  # mlx-lm's store leaves one more token to read
    for prompt, cached in ((TEXT, 40), (TEXT[:41], 40), (other, cut), (TEXT[:40], begin)):
        cache, n = prompts.fetch(prompt)
        assert n == cached and (cache is None) == (n == 0)
        wanted = read(model, prompt)[1]
        assert mx.allclose(read(model, prompt[n:], cache)[1], wanted, atol=1e-3)
    assert prompts.fetch(TEXT)[1] == 40  # reading on changed the fetched copy only


def test_a_view_of_a_batch_keeps_no_more_than_itself(model):
    """``keep`` copies one text's part of a batch's arrays; the caller's caches stay views."""
    texts = mx.array([TEXT[:40]] * 8)
    batch, prompts = make_prompt_cache(model), Prompts()
    mx.eval(model(texts, cache=batch), [c.state for c in batch])
    for c in batch:
        c.state = tree_map(lambda a: a[:1] if type(a) is mx.array else a, c.state)
    prompts.keep(TEXT[:40], batch)
    mx.synchronize()
    before, nbytes = mx.get_active_memory(), sum(c.nbytes for c in batch)
    del batch, c
    assert before - mx.get_active_memory() >= 7 * nbytes


def shared(prompts, tokens):
    return prompts.shared(tokens, prompts.fetch(tokens)[1])


def test_where_prompts_part(model):
    prompts = Prompts()
    other = TEXT[:30] + [t + 1 for t in TEXT[30:]]
    assert shared(prompts, TEXT) == 0
    assert shared(prompts, other) == 30  # shared with ``TEXT``, which was seen but not kept
    prompts.keep(TEXT[:30], read(model, TEXT[:30])[0], "system")
    assert shared(prompts, other[:-1]) == 58  # all but the last token of ``other[:-1]``
    assert shared(prompts, TEXT[:30] + [t + 2 for t in TEXT]) == 0  # a kept prompt ends there
    assert shared(prompts, TEXT[:10] + [t + 3 for t in TEXT]) == 0  # 10 are too few to be kept
    text = TEXT[::-1]
    prompts.keep(text, read(model, text)[0])
    # A kept cache that can be trimmed also serves prompts that share only its beginning.
    assert shared(prompts, text[:50] + TEXT) == (50 if is_hybrid(model) else 0)


def test_what_is_forgotten(model, monkeypatch):
    texts = [[t + i for t in TEXT] for i in range(4)]
    caches = [read(model, text)[0] for text in texts]
    nbytes = sum(c.nbytes for c in caches[0])

    def left(prompts):
        return [i for i, text in enumerate(texts) if prompts.fetch([*text, 0])[1]]

    def of(*given):
        prompts = Prompts(*given)
        for text, cache in zip(texts, caches):
            prompts.keep(text, cache)
        return prompts

    assert left(of(2)) == left(of(10, 2 * nbytes + 1)) == [2, 3]
    assert left(of(0)) == left(of(10, nbytes - 1)) == []
    prompts = of(10, 4 * nbytes)
    prompts.trim(3 * nbytes)  # unfinished texts take these bytes
    assert left(prompts) == [3]

    # There is memory for two texts' caches and the 10 bytes that stay free.
    prompts = Prompts(free_nbytes=10)
    room = 10 + 2 * nbytes
    monkeypatch.setattr(module, "memory_now", lambda: (0, room - prompts._lru.nbytes))
    for text, cache in zip(texts, caches):
        prompts.keep(text, cache)
    assert left(prompts) == [2, 3]
    room = 10 + nbytes
    assert prompts.make_way() and left(prompts) == [3]
    room = nbytes
    prompts.keep(texts[0], caches[0])
    assert left(prompts) == [] and not prompts.make_way(nbytes)


TEXTS = [TEXT[i:] for i in range(4)]


def files_of(folder, model=TINY_MOE, draft=None, config=None, **options):
    given = dict(adapter_path=None, kv_bits=None, kv_group_size=64, quantized_kv_start=0)
    given |= dict(trust_remote_code=False, prompt_cache_dir=str(folder), model=str(model))
    args = argparse.Namespace(**given | {"draft_model": draft and str(draft)} | options)
    return PromptFiles(args, config or StreamConfig(), open_draft(args.draft_model))


def restored(folder, *limits, **options):
    """The prompts of a server that starts."""
    return Prompts(*limits, files=files_of(folder, **options))


def saved(folder, *texts, size=10, **options):
    """The folder's files, oldest first, after a server that kept these texts has ended."""
    prompts = restored(folder, size, **options)
    for text in texts:
        prompts.keep(text, read(drafting.trained(), text)[0], "user")
    prompts.close()
    return sorted(folder.iterdir(), key=lambda f: f.lstat().st_mtime_ns)


def cached(prompts, *texts):
    return [prompts.fetch([*text, 0])[1] for text in texts]


@pytest.mark.parametrize("name", ["lookup", "tiny-draft", "tiny-dflash"])
def test_the_caches_of_a_draft(name, tmp_path):
    """A draft's caches are kept, too: the same drafts are accepted as without a restart."""
    name = name if name == "lookup" else DATA / "models" / name
    draft, model, text = open_draft(name), drafting.trained(), (TEXT[:8] * 6)[:45]

    def write(tokens, cache):
        given = dict(max_tokens=12, prompt_cache=cache, num_draft_tokens=3)
        steps = speculative_generate_step(mx.array(tokens), model, draft, **given)
        return [(int(token), bool(drafted)) for token, _, drafted, *_ in steps]

    prompts, cache = restored(tmp_path, draft=name), make_prompt_cache(model) + draft.make_cache()
    known = text + [token for token, _ in write(text, cache)]
    prompts.keep(known, cache)
    prompts.close()
    caches = [of.fetch([*known, *text])[0] for of in (prompts, restored(tmp_path, draft=name))]
    wanted, got = (write(text, cache) for cache in caches)
    assert wanted == got and any(drafted for _, drafted in got)
    assert cached(restored(tmp_path), known) == [0]  # without the draft


def test_the_newest_within_the_limits(tmp_path):
    files = saved(tmp_path, *TEXTS)
    assert len(files) == 4 and cached(restored(tmp_path), *TEXTS) == [60, 59, 58, 57]
    assert cached(restored(tmp_path, 2), *TEXTS) == [0, 0, 58, 57]
    nbytes = files[0].stat().st_size
    assert cached(restored(tmp_path, 10, nbytes + nbytes // 2), *TEXTS) == [0, 0, 0, 57]
    assert len(files_of(tmp_path).read(10, nbytes + nbytes // 2)) == 1  # other files are not read
    assert cached(restored(tmp_path, 0), *TEXTS) == [0] * 4
    # The oldest is forgotten for a new one; the others are not written again.
    again = saved(tmp_path, TEXT[9:], size=4)
    assert again[:-1] == files[1:] and cached(restored(tmp_path), *TEXTS) == [0, 59, 58, 57]


def test_files_that_are_left_alone(tmp_path, capsys):
    """Stderr names each file and says why; the server goes on and deletes none of them."""
    damaged, folder, unchecked, _ = saved(tmp_path, *TEXTS)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    folder.unlink()
    folder.mkdir()
    cache, about = load_prompt_cache(str(unchecked), return_metadata=True)
    del about["checksum"]
    save_prompt_cache(str(unchecked), cache, about)
    before = damaged.read_bytes(), unchecked.read_bytes()
    whys = {damaged: "damaged", folder: "file", unchecked: "options"}
    for i, (kind, tokens) in enumerate((("x", "[1]"), ("user", "[]"), ("user", '["1"]'))):
        file = tmp_path / f"prompt-{i:016}.safetensors"
        kv_cache.write_prompt_cache(file, cache, about | {"kind": kind, "tokens": tokens})
        whys[file] = "expected tokens and"
    (link := tmp_path / f"prompt-{15 * 'x'}\x1b.safetensors").symlink_to("nowhere")
    whys[link] = "FileNotFoundError"
    assert whys.keys() < {*saved(tmp_path, TEXT[9:])}
    assert before == (damaged.read_bytes(), unchecked.read_bytes())
    lines = "\n".join(sorted(capsys.readouterr().err.splitlines()))
    wanted = sorted(f".*{f}: left alone: .*{why}.*".replace("\x1b", " ") for f, why in whys.items())
    assert re.fullmatch("\n".join(wanted), lines)
    assert cached(restored(tmp_path), *TEXTS) == [0, 0, 0, 57]


def replaced(name, change):
    return lambda arrays, about: ({**arrays, name: change(arrays[name])}, about)


CHANGES = {  # of a file's arrays and metadata; layer 0 has a state, layer 7 keys and values
    "another class": lambda arrays, about: (arrays, {**about, "1.7": "ArraysCache"}),
    "smaller heads": replaced("7.0", lambda a: a[..., :-1]),
    "too many tokens": replaced("7.2", lambda a: a + 1000),
    "a smaller state": replaced("0.0.1", lambda a: a[:, :-1]),  # the kernels would read beyond it
    "other numbers": replaced("0.0.1", lambda a: -a),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_damaged(change, tmp_path, capsys, monkeypatch):
    """The checksum or sizes show damage; only the checksum shows changed numbers."""
    (file,) = saved(tmp_path, TEXT)
    changed = CHANGES[change](*mx.load(str(file), return_metadata=True))
    mx.save_safetensors(str(file), *changed)
    assert cached(restored(tmp_path), TEXT) == [0]
    assert f"{file}: left alone" in capsys.readouterr().err
    monkeypatch.setattr(kv_cache, "checksum", lambda _, about: about["checksum"])
    assert cached(restored(tmp_path), TEXT) == [60 * (change == "other numbers")]


def test_what_must_be_the_same(tmp_path, random_tiny_moe, capsys):
    """Weights count, too: an adapter trained again in the same folder is another adapter."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    weights = adapter / "adapters.safetensors"
    weights.write_bytes(b"old")
    folder, options = tmp_path / "kept", {"adapter_path": str(adapter)}
    saved(folder, TEXT, **options)
    assert cached(restored(folder, **options), TEXT) == [60]
    others = {"kv_bits": 4}, {"adapter_path": None}, {"draft": "lookup"}
    others += {"config": StreamConfig(top_k=1)}, {"model": random_tiny_moe}
    for other in others:
        assert cached(restored(folder, **options | other), TEXT) == [0]
        assert "left alone" in capsys.readouterr().err
    weights.write_bytes(b"newer")
    assert cached(restored(folder, **options), TEXT) == [0]


def test_a_disk_that_is_full(tmp_path, monkeypatch, capsys):
    def full(name, *_):
        open(name, "wb").close()
        raise RuntimeError("no space left")

    monkeypatch.setattr(kv_cache.mlx_lm_cache, "save_prompt_cache", full)
    folder = tmp_path / "kept"
    assert saved(folder, TEXT) == [] and "no space left" in capsys.readouterr().err
