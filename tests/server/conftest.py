"""What several files need: a server of a real model, and what mlx-lm writes."""

import asyncio
import ssl
from functools import cache
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from fake_served import TOKENIZER
from in_process import MODEL, SERVERS, serving
from speaker import Speaker, speaking


@pytest.fixture(scope="session", autouse=True)
def no_delays():
    """Clients read certificates once (20 ms), and uvicorn ends within 20 ms instead of 300."""
    sleep = asyncio.sleep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        patch.setattr(asyncio, "sleep", lambda s, *more: sleep(0.01 if s == 0.1 else s, *more))
        yield


@pytest.fixture(scope="session")
def mlx():
    """Writes mlx-lm's continuation of a prompt, by a resident model and mlx-lm's own kernels."""
    model, tokenizer = mlx_lm.load(str(MODEL))[0], TOKENIZER  # TOKENIZER keeps leading spaces
    model.set_dtype(mx.float32)

    @cache
    def write(prompt, max_tokens=16, **options):
        prompt = prompt if isinstance(prompt, str) else [*prompt]
        return mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens, **options)

    @cache
    def scores(tokens):
        """Log probabilities [T - 1, V] of what follows each token."""
        return nn.log_softmax(model(mx.array([[*tokens]]))[0, :-1], axis=-1)

    return SimpleNamespace(write=write, scores=scores, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def speak():
    """A function that sets what a server's model says, and returns the server's address."""
    engine = Speaker()
    with speaking(engine) as url:
        yield lambda *said: engine.says(*said) or url


@pytest.fixture(scope="module")
def served(request):
    """The server of ``SERVERS`` that a test's parameter names."""
    with serving(*SERVERS[request.param]) as server:
        yield server


@pytest.fixture
def client(served):
    return served.client
