"""Any thread may call a model, in turn or at once. A closed or freed model leaves nothing."""

import itertools
import json
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import families
import mlx.core as mx
import pytest
from common import FAST, STREAMED, loaded
from drafting import steps
from families import K
from mlx_lm.models.cache import make_prompt_cache

from moelab.lab import limit
from moelab.speculation.drafts import LookupDraft

PROMPTS = [[5, 36, 67, 2, 33, 64, 95], [7, 11, 13], [1, 2, 3, 4, 5, 6], [90, 80, 70, 60, 50]]
PROMPTS += [[(p + 1) % families.VOCAB for p in prompt] for prompt in PROMPTS[::-1]]


def written(model, prompt):
    """Greedy tokens, each evaluated after the next call, as in mlx-lm."""
    cache = make_prompt_cache(model)
    y = mx.argmax(model(mx.array([prompt]), cache=cache)[:, -1:], axis=-1)
    mx.async_eval(y)
    while True:
        following = mx.argmax(model(y, cache=cache), axis=-1)
        mx.async_eval(following)
        yield y.item()
        y = following


def greedy(model, prompt, steps=6):
    return [*itertools.islice(written(model, prompt), steps)]


def in_threads(work, arguments):
    """Run ``work`` on all arguments at once, each in a thread; return results or raise an error."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(work, arguments))


CONFIGS = [dict(mode=m, kernels=k) for m in ("resident", *STREAMED) for k in ("auto", "mlx")]
CONFIGS += [{"mode": "fused", "kernels": "mlx", "prefetch": "lookahead"}]


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda f: "-".join(map(str, f.values())))
def test_threads_in_turn_and_at_once(hybrid, fields, any_reads):
    """Eight threads share a model that another thread loaded. Each gets the text it gets alone.

    A text's steps may also run in any free thread, as asyncio runs them.
    """
    with ThreadPoolExecutor(1) as pool:
        model = pool.submit(loaded, hybrid, slots=K, **fields).result()
    with model:
        want = [greedy(model, p) for p in PROMPTS]
        with ThreadPoolExecutor(3) as pool:
            texts = [written(model, p) for p in PROMPTS]
            steps = [list(pool.map(next, texts)) for _ in want[0]]
            assert list(map(list, zip(*steps))) == want
        rounds = 2 if FAST else 100

        def work(i):
            for _ in range(rounds):
                assert greedy(model, PROMPTS[i]) == want[i], "another text than alone"

        in_threads(work, range(len(PROMPTS)))


def test_drafts_beside_other_threads(hybrid):
    """A verify pass hooks the model's layers. Another thread's call does not see the hooks."""
    with loaded(hybrid, slots=K, kernels="mlx") as model:
        want = [greedy(model, p, 12) for p in PROMPTS]

        class Repeats(LookupDraft):
            def propose(self, last, n, choose):
                return mx.array([last] * n, mx.uint32)  # nearly all drafts are rolled back

        def drafted(prompt):
            return [token for token, *_ in steps(model, prompt, Repeats(), 3, 12)]

        def work(i):
            return drafted(PROMPTS[i]) if i % 2 else greedy(model, PROMPTS[i], 12)

        for _ in range(2 if FAST else 20):
            assert in_threads(work, range(len(PROMPTS))) == want


def in_a_process(script, *args):
    """Run a script in its own process and return the JSON that it printed."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    done = limit.run(command, timeout_s=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_fork_says_so(hybrid):
    """A fork refuses to compute if its parent has computed; it never hangs. The parent goes on."""
    script = """
    import json, os, signal, sys
    import mlx.core as mx
    import moelab
    from moelab.checkpoint import checkpoint
    from moelab.streaming.model import load_model

    checkpoint.FORK_S = 0.5

    def load():
        return load_model(sys.argv[1], moelab.StreamConfig(slots=2, kernels="mlx"))[0]

    def answer(model):
        return model(mx.array([[1, 2, 3]]))[0, -1].tolist()

    def in_a_fork(*calls):
        read, write = os.pipe()
        if os.fork() == 0:
            signal.alarm(60)
            for call in calls:
                try:
                    said = str(call())
                except RuntimeError as e:
                    said = str(e)
                os.write(write, said.encode() + b"; ")
            os._exit(0)
        os.close(write)
        return open(read).read()

    # Metal computes in no fork that does not exec, and a fork lacks the memory of its arrays.
    on_metal = mx.metal.is_available()
    works = on_metal or in_a_fork(lambda: answer(load()))
    model = load()
    before = answer(model)
    calls = [load, lambda: moelab.plan(sys.argv[1]), lambda: moelab.footprint(sys.argv[1])]
    calls += [] if on_metal else [lambda: answer(model)]
    said = in_a_fork(*calls), len(calls)
    print(json.dumps([*said, works in (True, f"{before}; "), answer(model) == before]))
    """
    said, n, works, same = in_a_process(script, hybrid)
    assert said.count("is a fork of") == said.count("'spawn'") == n and works and same


LEAKS = """
import contextlib, gc, json, sys, threading
import mlx.core as mx
import moelab, psutil
from moelab.streaming.model import load_model

path, n, found = sys.argv[1], int(sys.argv[2]), {}
config = moelab.StreamConfig(slots=3, kernels="mlx", prefetch="lookahead")
gc.disable()  # a model goes with its last name: no cycle refers to it

def state(way, n):
    for _ in range(n):
        if way == "failed":
            with contextlib.suppress(ValueError, OSError):
                moelab.load(path, config)  # there is no tokenizer
            continue
        model, _ = load_model(path, config)
        mx.eval(model(mx.array([[1, 2, 3, 4, 5, 6, 7]])))
        if way == "closed":
            moelab.close(model)
        del model
    if way == "failed":
        gc.collect()
    own, nbytes = psutil.Process(), mx.get_active_memory()
    if mx.metal.is_available():  # whose threads and memory come and go
        return threading.active_count(), own.num_fds(), nbytes / 1e6
    return own.num_threads(), own.num_fds(), own.memory_info().rss / 1e6

for way in ("closed", "dropped", "failed"):
    found[way] = state(way, n // 3), state(way, n)
print(json.dumps(found))
"""


def test_a_load_leaves_nothing(hybrid):
    """No thread or file is left open; memory (in MB) grows by less than 20 kB for each load."""
    n = 12 if FAST else 200
    for way, ((*before, rss), (*after, rss_after)) in in_a_process(LEAKS, hybrid, n).items():
        assert after == before, way
        assert rss_after - rss < 2 + 0.02 * n, (way, rss, rss_after)
