"""How fast ``serve`` answers: this checkout's, and with ``--old`` another one's in turn.

    python data/recipes/server.py speed         start, tok/s and first token, alone and four at once
    python data/recipes/server.py conversation  an agent's two conversations of 12 turns, in turn
    python data/recipes/server.py beside        short requests beside a prompt of 8,000 tokens
        [--model FOLDER] [--serve "OPTIONS"] [--old TREE] [--rounds N] [--restart TURN]

TREE is a checkout, as for ``trees.py``. Each round starts each server anew, in random order, with
the same texts. It prints medians and quartiles, and new over old by round; all samples go to
``build/server``. ``again`` counts tokens that an earlier prompt began with and that were read once
more. ``--restart`` starts the server once more after a TURN; the new one then keeps its prompts.
"""

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import openai
from mlx_lm.utils import load_tokenizer
from trees import ROOT, compare

from moelab.commands.server.template import chat_tokens
from moelab.lab import records
from moelab.lab.decode import same_tokens
from moelab.lab.texts import heldout_code

TINY = ROOT / "data" / "models" / "tiny-moe"
OPTIONS = ("--context", "12288", "--log-level", "ERROR")
TEXTS = ("text", "content", "reasoning", "reasoning_content", "tool_calls")  # of a streamed event
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }} {{ tools | tojson if loop.first }}
{% set later = messages[loop.index:] | map(attribute="role") | list %}
{% if m.reasoning_content and "user" not in later %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}{% for call in m.tool_calls %}{% set tool_call = call.function %}
<tool_call>{{ tool_call.name }} {{ tool_call.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{{ "<|im_start|>assistant" if add_generation_prompt }}"""


@contextmanager
def serving(tree, model, options):
    """Serve a model until the block ends; gives a client, and the seconds until it answered."""
    port, begin = str(random.randrange(10000, 32000)), time.perf_counter()
    words = [sys.executable, "-m", "moelab", "serve", model, "--port", port, *options]
    environment, url = os.environ | {"PYTHONPATH": str(tree)}, f"http://127.0.0.1:{port}/v1"
    with subprocess.Popen(words, cwd=tree, env=environment) as process, ExitStack() as ends:
        ends.callback(process.terminate)
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=None)
        while process.poll() is None:
            with suppress(openai.APIConnectionError):
                client.models.list()
                break
        yield client, time.perf_counter() - begin


def ask(client, tokens, prompt):
    """Stream the answer to a text or to messages: when it began, its seconds and its tokens."""
    is_chat, first_s, begin = isinstance(prompt, list), None, time.perf_counter()
    create = client.chat.completions.create if is_chat else client.completions.create
    body = {"messages": prompt, "tools": TOOLS} if is_chat else {"prompt": prompt}
    body |= {"model": "default_model", "temperature": 0, "max_tokens": tokens}
    for event in create(**body, stream=True, stream_options={"include_usage": True}):
        said = [choice.model_dump() for choice in event.choices]
        if first_s is None and any(c.get("delta", c).get(name) for c in said for name in TEXTS):
            first_s = time.perf_counter() - begin
    asked = SimpleNamespace(begin=begin, usage=event.usage, whole_s=time.perf_counter() - begin)
    asked.first_s = first_s or asked.whole_s  # tokens without text
    return asked


def speed(start, text, *_):
    with start() as (client, start_s), ThreadPoolExecutor(4) as pool:
        row = {"start_s": start_s}
        for n in (64, 126, 400):  # the first one warms up
            one = ask(client, 64, text(n))
            four = list(pool.map(partial(ask, client, 64), [text(n) for _ in range(4)]))
            first_s, tokens = [a.first_s for a in four], [a.usage.completion_tokens for a in four]
            row |= {f"alone {n} first_s": one.first_s, f"four {n} first_s": median(first_s)}
            row[f"four {n} longest first_s"] = max(first_s)
            row[f"alone {n} tok/s"] = (one.usage.completion_tokens - 1) / (
                one.whole_s - one.first_s
            )
            row[f"four {n} tok/s"] = sum(tokens) / max(a.whole_s for a in four)
    return row


def conversation(start, text, tokenizer, restart):
    first, seen, row = {"role": "system", "content": text(4000)}, [], {}
    chats = {who: [first, {"role": "user", "content": text(120)}] for who in "AB"}
    for turns in filter(None, (range(1, restart + 1), range(restart + 1, 13))):
        with start() as (client, _):
            for turn, (who, messages) in product(turns, chats.items()):
                asked = ask(client, 24, messages)
                ids = chat_tokens(tokenizer, messages, TOOLS, {}, False)[0]
                shared = max([same_tokens(ids, other) for other in seen], default=0)
                seen.append(ids)
                cached = asked.usage.prompt_tokens_details.cached_tokens
                row |= {
                    f"{who}{turn} first_s": asked.first_s,
                    f"{who}{turn} again": shared - cached,
                }
                said = {"content": text(100), "reasoning_content": text(90), "tool_calls": [CALL]}
                result = {"role": "tool", "tool_call_id": "1", "content": text(250)}
                question = [{"role": "user", "content": text(120)}] * (turn % 3 == 0)
                messages += [{"role": "assistant", **said}, result, *question]
    return row | {n: sum(row[key] for key in row if key.endswith(n)) for n in ("first_s", "again")}


def beside(start, text, *_):
    with start() as (client, _), ThreadPoolExecutor(1) as pool:
        ask(client, 16, text(32))  # warms up
        running, met = pool.submit(ask, client, 16, text(8000)), []
        while not running.done():
            met.append(ask(client, 16, text(32)))
    long = running.result()
    met = [a for a in met if a.begin < long.begin + long.first_s]
    first_s, row = [a.first_s for a in met], {"the long one's first_s": long.first_s}
    row |= {"first_s": median(first_s), "longest first_s": max(first_s)}
    return row | {"longest whole_s": max(a.whole_s for a in met)}


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("measure", choices=("speed", "conversation", "beside"))
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--serve", type=shlex.split, default=[])
    parser.add_argument("--old", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--restart", type=int, default=12)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model, {"chat_template": TEMPLATE})
    ids = tokenizer.encode("\n".join(heldout_code(TINY).values()))
    options = [*OPTIONS, "--chat-template", TEMPLATE, *args.serve]

    def run(tree, number):
        places = random.Random(number)

        def text(n):
            at = places.randrange(len(ids) - n)
            return tokenizer.decode(ids[at : at + n])

        with tempfile.TemporaryDirectory() as kept:
            keeps = ["--prompt-cache-dir", kept] if args.restart < 12 and tree == ROOT else []
            start = partial(serving, tree.resolve(), str(args.model.resolve()), options + keeps)
            return globals()[args.measure](start, text, tokenizer, args.restart)

    ways = {"old": args.old and partial(run, args.old), "new": partial(run, ROOT)}
    ways = {name: way for name, way in ways.items() if way}
    made = records.interleave(args.measure, ways, args.rounds, vars(args), warmup=0, progress=True)
    records.save(ROOT / "build" / "server" / f"{args.measure}.json", made)
    compare(made, "new", "old")


if __name__ == "__main__":
    main()
