"""generate and serve with the experts divided over two ranks: one answer, that of one process."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
import rank_processes as ranks
from in_process import complete

from moelab import DATA
from moelab.lab.ranks import environments, hosts

MODEL = str(DATA / "models/tiny-moe")
PROMPT = "def add(a, b):"
SETTINGS = ("--slots", "12", "--kernels", "mlx")


@pytest.fixture
def alone(run):
    """The text of one process."""
    argv = ["generate", MODEL, "--prompt", PROMPT, "--ignore-chat-template", "--verbose", "F"]
    return lambda n, *options: run(*argv, *SETTINGS, "--max-tokens", n, *options).out


def test_generate_under_mlx_launch(alone):
    """Sampled, with drafts whose number rank 0's policy chooses; rank 0 alone prints."""
    port = hosts(2)[0][0].partition(":")[2]
    command = [str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "--backend", "ring"]
    command += ["--starting-port", port, "--", sys.executable, "-m", "moelab", "generate", MODEL]
    options = ["--draft", "lookup", "--temp", "0.6", "--seed", "3"]
    command += ["--prompt", PROMPT, "--ignore-chat-template", "--verbose", "F", *SETTINGS]
    command += ["--max-tokens", "20", *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = done.stderr.splitlines()
    assert done.stdout == alone(20, *options)
    assert len(said) == 2 and all("to join" in line for line in said)


def test_prompts_that_differ(tmp_path):
    """Ranks that were started with other prompts are told apart."""
    commands = [["-m", "moelab", "generate", MODEL, "--prompt", p, *SETTINGS] for p in "ab"]
    for rank in ranks.finish(ranks.start(commands, tmp_path), 60):
        assert rank.returncode == 1 and rank.stdout == ""
        assert "moelab: prompt: expected the same on all ranks, got 'a', " in rank.stderr


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_what_is_not_divided(command, monkeypatch, run):
    """A command that knows of no ranks would do its work in each."""
    monkeypatch.setenv("MLX_RANK", "0")
    assert f"{command} runs in one process" in run(command, MODEL).err


@pytest.fixture
def served(tmp_path):
    """Two ranks that serve, and a client of rank 0."""
    command = ["-m", "moelab", "serve", MODEL, "--port", "0", "--log-level", "ERROR", *SETTINGS]
    processes = ranks.start([command] * 2, tmp_path)
    said = ""
    while not (found := re.search(r"http://\S+/v1", said)):
        line = processes[0].stderr.readline()
        assert line, said + "".join(p.communicate()[1] for p in processes)
        said += line
    return processes, openai.OpenAI(base_url=found[0], api_key="-", max_retries=0, timeout=120)


def test_serve(served, alone):
    """Batched and alone; a client that goes, and requests that are refused, stop nobody."""
    processes, client = served
    expected = alone(16)
    for more in ({}, {"seed": 1}):  # a seed changes nothing of a greedy text
        assert complete(client, PROMPT, **more).choices[0].text + "\n" == expected
        stream = complete(client, PROMPT, **more, max_tokens=500, stream=True)
        next(iter(stream))
        stream.close()
        for wrong in ({"model": "another"}, {"logit_bias": {"9999": 1}}):
            with pytest.raises(openai.BadRequestError):
                complete(client, PROMPT, **more, **wrong)
        assert complete(client, PROMPT, **more).choices[0].text + "\n" == expected
    for process in processes:
        process.send_signal(signal.SIGINT)
    assert [rank.returncode for rank in ranks.finish(processes, 30)] == [0, 0]


def test_a_rank_of_serve_that_is_killed(served):
    """The client gets an error, and rank 0 ends with one line."""
    processes, client = served
    stream = iter(complete(client, PROMPT, max_tokens=500, stream=True))
    next(stream)
    processes[1].kill()
    begin = time.monotonic()
    with pytest.raises(openai.APIError, match="another rank has ended"):
        list(stream)
    first, _ = ranks.finish(processes, 30)
    said = "moelab: rank 0 of 2: another rank has ended"
    assert first.returncode == 1 and first.stderr.count(said) == 1
    assert "Traceback" not in first.stderr and time.monotonic() - begin < 15


def test_a_rank_that_never_starts(tmp_path):
    """MLX waits for it in native code; the others say so first, and end all the same."""
    program = "from moelab.streaming import ranks; ranks.LOADING_S = 3; ranks.joined()"
    first, _ = environments(2, tmp_path)
    command, env = [sys.executable, "-c", program], {**os.environ, **first}
    alone = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    (said,) = alone.stderr.splitlines()
    assert alone.returncode == 1
    assert "rank 0 waits for rank 1 at 127.0.0.1:" in said and "to join" in said
    assert "within 3 s" in said
