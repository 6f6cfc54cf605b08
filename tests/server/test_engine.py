"""The server's texts are mlx-lm's: in batches, with drafts, and after kept prompts."""

import os
import random
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import mlx.core as mx
import pytest
from common import FAST
from fake_served import MODEL, TOKENIZER
from in_process import PROMPTS, SERVERS, SLOTS, chat, complete, serving, started, two_servers, user
from mlx_lm.sample_utils import make_sampler

from moelab.commands.server.ask import Ask
from moelab.commands.server.engine import _Text


@pytest.fixture(scope="module")
def texts(mlx):
    return [mlx.write(prompt) for prompt in PROMPTS]


STOPS = int(os.environ.get("MOELAB_STOPS", 8 if FAST else 24))
every_server = pytest.mark.parametrize("served", SERVERS, indirect=True)


def text_of(client, prompt, **fields):
    return complete(client, prompt, **fields).choices[0].text


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


@every_server
def test_the_text_is_that_of_mlx_lm(client, texts):
    """Eight requests come at once, then a stream; ``test_openai.py`` has other forms of answers."""
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda p: text_of(client, p), PROMPTS)) == texts
    parts = complete(client, PROMPTS[0], stream=True)
    assert "".join(part.choices[0].text for part in parts) == texts[0]


def test_texts_that_wait_have_one_prompt():
    """Copies for the 128 texts of a request would take 1 kB for each token of the prompt."""
    ask = Ask([5] * 1000, 1)
    assert all(_Text(i, ask, None, TOKENIZER).tokens is ask.tokens for i in range(2))


@every_server
def test_a_text_ends_before_its_first_stop_string(client, texts):
    """A stop string may begin or end within a token. Eight requests come at once, some streamed."""
    rng = random.Random(5)

    def ask(_):
        prompt, text = rng.choice([*zip(PROMPTS, texts)])
        stops = [text[a : a + rng.randint(1, 9)] for a in rng.sample(range(len(text)), 3)]
        stops = ["no such text", *stops[: rng.randint(1, 3)]]
        parts = complete(client, prompt, stop=stops, stream=rng.random() < 0.5)
        choices = [part.choices[0] for part in (parts if hasattr(parts, "response") else [parts])]
        assert "".join(c.text for c in choices) == text[: min(text.find(s) % 10**6 for s in stops)]
        assert choices[-1].finish_reason == "stop"

    with ThreadPoolExecutor(8) as threads:
        assert len([*threads.map(ask, range(STOPS))])


@two_servers
def test_what_was_read_before_is_not_read_again(client, mlx):
    """Kept caches serve a repeated prompt, a conversation that goes on, and the same instructions
    before another text. Of a prompt that begins a kept prompt only one token is read."""
    rules = {"role": "system", "content": '"""Notes about a queue of jobs, and how it empties.\n'}
    messages, length = [rules], 0
    for text in ("class Queue:\n    def push(self):", "def write(line):"):
        messages.append(user(text))
        first, again = (chat(client, *messages) for _ in range(2))
        assert length <= cached(first) < cached(again) == again.usage.prompt_tokens - 1
        answers = {answer.choices[0].message.content for answer in (first, again)}
        prompt = mlx.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert answers == {mlx.write((*prompt,))}
        messages.append({"role": "assistant", "content": answers.pop()})
        length = len(prompt) - 1
    other = user("def empty(jobs):\n")
    assert 8 <= cached(chat(client, rules, other)) < length and not cached(chat(client, other))
    for text in ("import json\nimport re", "import json\nimport", "import json\nimport"):
        answer = complete(client, text)
    assert cached(answer) == answer.usage.prompt_tokens - 1 > 0


@two_servers
def test_prompts_that_begin_alike(client, mlx):
    """The second prompt shows where prompts part. The third prompt is read from there."""
    begin = "x = 1  # What this file of settings says, and where each of them is read\n"
    begin += "def of(values, names, defaults):\n    return"
    shared = len(mlx.tokenizer.encode(begin))
    assert shared > 24
    for i, end in enumerate((" values + names", " sorted(names)", " {name: 1")):
        answer = complete(client, begin + end)
        assert cached(answer) == (0 if i < 2 else shared)
    assert answer.choices[0].text == mlx.write(begin + end)


@pytest.mark.parametrize("name, start", [("streamed", None), ("streamed", 0), ("lookup", 20)])
def test_a_prompt_is_not_read_again_after_a_restart(name, start, mlx, tmp_path):
    """Caches are quantized from ``start`` tokens on: none, all, or those of an answer's end."""
    quantized = {} if start is None else {"kv_bits": 4, "quantized_kv_start": start}
    options = ["--prompt-cache-dir", str(tmp_path / "new" / "folder")]
    options += [f"--{option}={value}".replace("_", "-") for option, value in quantized.items()]
    wanted = mlx.write(PROMPTS[1], max_tokens=40, **quantized)
    for restarted in (False, True):
        with serving(*SERVERS[name], *options) as server:
            answer = complete(server.client, PROMPTS[1], max_tokens=40)
        assert answer.choices[0].text == wanted and bool(cached(answer)) == restarted


@two_servers
def test_a_seed_writes_the_text(client, mlx):
    """A penalty looks at the whole prompt, cached or not, so a repeated text is the same."""
    fields = {"temperature": 0.8, "seed": 7, "extra_body": {"top_k": 50}}
    texts = {text_of(client, PROMPTS[0], **fields) for _ in range(2)}
    mx.random.seed(7)
    assert texts == {mlx.write(PROMPTS[0], sampler=make_sampler(0.8, top_p=1.0, top_k=50))}
    penalty = {"extra_body": {"repetition_penalty": 1.5, "repetition_context_size": 200}}
    texts = [text_of(client, PROMPTS[0], **penalty) for _ in range(2)]
    assert texts[0] == texts[1] != text_of(client, PROMPTS[0])


@pytest.mark.parametrize("name", ["streamed", "lookup"])
def test_a_short_prompt_does_not_wait_for_a_long_one(name, mlx, texts):
    """The short text is read and written while the long prompt is read; both texts are right."""
    ids = mlx.tokenizer.encode(max(MODEL.glob("heldout/*.py"), key=os.path.getsize).read_text())
    options, long = (*SERVERS[name], "--prefill-step-size", "8"), ids[:225]
    with serving(*options) as server, ThreadPoolExecutor(1) as threads:
        slow = threads.submit(text_of, server.client, long)
        time.sleep(0.05)
        assert text_of(server.client, PROMPTS[0]) == texts[0] and not slow.done()
        for _ in range(99):  # the long prompt does not wait for all short ones, either
            text_of(server.client, PROMPTS[1])
            if slow.done():
                break
        assert slow.done() and slow.result() == mlx.write((*long,))


def test_a_text_without_limit_goes_on_to_the_last_position(mlx, tmp_path):
    """A text goes on alone and beside others. A prompt too long to be answered is only counted."""
    shutil.copytree(MODEL, tmp_path / "m")
    config = tmp_path / "m/config.json"
    config.write_text(re.sub('("max_position_embeddings"): [0-9]+', r"\1: 64", config.read_text()))
    size = len(mlx.tokenizer.encode(PROMPTS[0]))
    wanted = mlx.write(PROMPTS[0], max_tokens=64 - size)
    with serving(*SLOTS, model=tmp_path / "m") as server, ThreadPoolExecutor(3) as threads:
        for n in (1, 3):
            for answer in threads.map(lambda _: complete(server.client, max_tokens=None), range(n)):
                assert (answer.choices[0].text, answer.usage.total_tokens) == (wanted, 64)
                assert answer.choices[0].finish_reason == "length"
        (card,) = server.client.models.list().to_dict()["data"]
        assert card["max_model_len"] == card["context_length"] == 64
        text, code = "x " * 80, "context_length_exceeded"
        long = {"messages": [user(text)]}
        counted = server.post("/messages/count_tokens", long)[1]["input_tokens"]
        for path, body, words, said in (
            ("/chat/completions", long, "maximum context length is 64 tokens", code),
            ("/completions", {"prompt": text}, "maximum context length is 64 tokens", code),
            ("/responses", {"input": text}, f"resulted in {counted} tokens", code),
            ("/messages", long, f"prompt is too long: {counted} tokens > 64 maximum", None),
        ):
            status, answer = server.post(path, body)
            error = answer["error"]
            assert (status, error.get("code")) == (400, said) and words in error["message"]


def test_an_error_ends_no_other_text():
    """Memory is short, or a sampler cannot be made. A text without a limit ends without an error if
    memory is short."""
    told, ends, (_, engine) = SimpleQueue(), [], started(*SLOTS)
    logits = engine._logits

    def short(text, end):
        if end > 20:
            raise MemoryError("memory is short")
        return logits(text, end)

    engine._logits = short
    wrong = Ask([1], 4, {"unknown": 1})
    for asks in ([Ask([1, 5], 99, is_open=True)], [Ask([1, 5], 99)], [wrong, Ask([1], 4)]):
        for ask in asks:
            engine.begin(ask, told.put)
        for _ in asks:
            while not isinstance(part := told.get(timeout=60), Exception) and not part.finish:
                pass
            ends.append(getattr(part, "finish", type(part)))
    engine.stop()
    assert ends == ["length", MemoryError, TypeError, "length"]
